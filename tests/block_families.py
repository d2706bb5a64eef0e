"""Tiny models of several families, as tests of blocks use them: what is to be loaded, and the full model beside it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForTextEncoding,
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    MPNetConfig,
    Olmo2Config,
    OPTConfig,
    PreTrainedConfig,
    Qwen3Config,
    T5Config,
)

import sparseautomodel

BLOCKS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
GROUPED = SIZES | {"num_key_value_heads": 1}
OLD = {"vocab_size": 64, "n_layer": BLOCKS, "n_head": 2, "initializer_range": 0.2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "moe_intermediate_size": 32}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "llama-tied": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "gemma3": Gemma3TextConfig(
        **GROUPED,
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "olmo2": Olmo2Config(**GROUPED),
    "gpt2": GPT2Config(**OLD, n_embd=32, n_positions=64),
    "bloom": BloomConfig(**OLD, hidden_size=32),
    "falcon": FalconConfig(**{key: SIZES[key] for key in SIZES if key != "intermediate_size"}, bias=True, alibi=True),
    "t5": T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=BLOCKS, num_heads=2),
    "bert": BertConfig(**SIZES),
}
ODD: dict[str, PreTrainedConfig] = {
    "llama-wide": LlamaConfig(**GROUPED | {"hidden_size": 64, "intermediate_size": 128}),
    "gpt2-scaled-by-number": GPT2Config(**OLD, n_embd=32, n_positions=64, scale_attn_by_inverse_layer_idx=True),
    "opt-projected": OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        word_embed_proj_dim=16,
        max_position_embeddings=64,
    ),
    "deepseek-dense-first": DeepseekV3Config(**GROUPED, **LATENT, **EXPERTS, first_k_dense_replace=1),
    "mpnet-bias-beside": MPNetConfig(**SIZES),
}
"""Families in which a block's number, or what lies around the blocks, is used in another way."""


def save_family(name: str, folder: Path) -> Path:
    """A seeded model of a family in float32, several shards."""
    config = copy.deepcopy((FAMILIES | ODD)[name])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = stock_class(config).from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


def stock_class(config: PreTrainedConfig) -> Any:
    if isinstance(config, T5Config):
        return AutoModelForTextEncoding
    return AutoModelForMaskedLM if isinstance(config, (BertConfig, MPNetConfig)) else AutoModelForCausalLM


def full_model(name: str, folder: Path, recipe: Any) -> Any:
    stock = stock_class((FAMILIES | ODD)[name])
    if recipe is None and "quantization_config" not in (folder / "config.json").read_text():
        return stock.from_pretrained(folder).eval()
    ours = getattr(sparseautomodel, f"Sparse{stock.__name__}")
    return ours.from_pretrained(folder, recipe=recipe)


def outputs(model: Any, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What each block of the full model gives, and what the model gives: from hooks on its own forward."""
    blocks = next(one for one in model.modules() if isinstance(one, torch.nn.ModuleList))
    found: list[torch.Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out))
        for block in blocks
    ]
    with torch.no_grad():
        output = model(ids)
    for hook in hooks:
        hook.remove()
    return found, output.logits if "logits" in output else output[0]
