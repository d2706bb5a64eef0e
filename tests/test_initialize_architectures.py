"""Models of transformers, tiny, of every kind: initialized as an eager build is, with no false alarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn

from sparseautomodel import init_module, materialize, verify

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
HEADS: dict[str, Any] = {"num_key_value_heads": 2}
VISION: dict[str, Any] = {key: size for key, size in BASE.items() if key != "vocab_size"} | {
    "image_size": 16,
    "patch_size": 4,
}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
SSM: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4}
CAUSAL, MASKED, IMAGE_TEXT = T.AutoModelForCausalLM, T.AutoModelForMaskedLM, T.AutoModelForImageTextToText
IMAGE = T.AutoModelForImageClassification


def _text() -> T.LlamaConfig:
    return T.LlamaConfig(**BASE, **HEADS, pad_token_id=0)


def _rope(kind: str) -> T.LlamaConfig:
    more: dict[str, Any] = {
        "default": {},
        "linear": {"factor": 2.0},
        "dynamic": {"factor": 2.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "longrope": {
            "factor": 4.0,
            "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 32,
        },
    }[kind]
    rope = {"rope_type": kind, "rope_theta": 10000.0} | more
    return T.LlamaConfig(**BASE, **HEADS, max_position_embeddings=128, rope_parameters=rope)


MODELS: dict[str, tuple[Any, Callable[[], Any]]] = {
    **{
        f"rope-{kind}": (CAUSAL, lambda kind=kind: _rope(kind))
        for kind in ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
    },
    "llama-tied": (CAUSAL, lambda: T.LlamaConfig(**BASE, **HEADS, tie_word_embeddings=True)),
    "gemma3": (CAUSAL, lambda: T.Gemma3TextConfig(**BASE, **HEADS, head_dim=8)),
    "phi3": (CAUSAL, lambda: T.Phi3Config(**BASE, **HEADS, pad_token_id=0)),
    "gpt2": (CAUSAL, lambda: T.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)),
    "opt": (CAUSAL, lambda: T.OPTConfig(**BASE, ffn_dim=48, word_embed_proj_dim=32)),
    "bloom-alibi": (CAUSAL, lambda: T.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
    "mpt-alibi": (CAUSAL, lambda: T.MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=32)),
    "bert": (MASKED, lambda: T.BertConfig(**BASE)),
    "roberta": (MASKED, lambda: T.RobertaConfig(**BASE)),
    "deberta": (MASKED, lambda: T.DebertaV2Config(**BASE, relative_attention=True, pos_att_type=["p2c", "c2p"])),
    "modernbert": (
        MASKED,
        lambda: T.ModernBertConfig(
            **BASE, pad_token_id=0, eos_token_id=1, bos_token_id=2, cls_token_id=3, sep_token_id=4
        ),
    ),
    "xlnet": (CAUSAL, lambda: T.XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=4, d_inner=48)),
    "t5": (
        T.AutoModelForSeq2SeqLM,
        lambda: T.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
    ),
    "bart": (T.AutoModelForSeq2SeqLM, lambda: T.BartConfig(**SEQ2SEQ, max_position_embeddings=32)),
    "mixtral": (CAUSAL, lambda: T.MixtralConfig(**BASE, **HEADS, num_local_experts=4)),
    "qwen3-moe": (CAUSAL, lambda: T.Qwen3MoeConfig(**BASE, **HEADS, **MOE)),
    "mamba": (CAUSAL, lambda: T.MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2)),
    "mamba2": (
        CAUSAL,
        lambda: T.Mamba2Config(
            vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, num_heads=8, head_dim=8, n_groups=2
        ),
    ),
    "bamba-hybrid": (
        CAUSAL,
        lambda: T.BambaConfig(**BASE, **HEADS, **SSM, attn_layer_indices=[1], mamba_n_groups=1),
    ),
    "jamba-hybrid": (
        CAUSAL,
        lambda: T.JambaConfig(**BASE | {"num_hidden_layers": 6}, **HEADS, num_experts=2, mamba_d_state=4),
    ),
    "falcon-h1-hybrid": (CAUSAL, lambda: T.FalconH1Config(**BASE, **HEADS, **SSM, mamba_d_ssm=64)),
    "rwkv": (CAUSAL, lambda: T.RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)),
    "vit": (IMAGE, lambda: T.ViTConfig(**VISION)),
    "resnet": (
        IMAGE,
        lambda: T.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    ),
    "swin": (
        IMAGE,
        lambda: T.SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4),
    ),
    "clip": (
        T.AutoModel,
        lambda: T.CLIPConfig(text_config=dict(BASE, max_position_embeddings=16), vision_config=VISION),
    ),
    "siglip": (
        T.AutoModel,
        lambda: T.SiglipConfig(text_config=dict(BASE, max_position_embeddings=16), vision_config=VISION),
    ),
    "whisper": (
        T.AutoModelForSpeechSeq2Seq,
        lambda: T.WhisperConfig(
            **SEQ2SEQ,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
    ),
    "wav2vec2": (
        T.AutoModelForCTC,
        lambda: T.Wav2Vec2Config(
            **BASE,
            conv_dim=(8, 8),
            conv_stride=(2, 2),
            conv_kernel=(3, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
        ),
    ),
    "llava": (IMAGE_TEXT, lambda: T.LlavaConfig(text_config=_text(), vision_config=T.CLIPVisionConfig(**VISION))),
    "idefics3": (IMAGE_TEXT, lambda: T.Idefics3Config(text_config=_text(), vision_config=VISION)),
    "gemma3-vision": (
        IMAGE_TEXT,
        lambda: T.Gemma3Config(
            text_config=dict(BASE, **HEADS, head_dim=8), vision_config=VISION, mm_tokens_per_image=4
        ),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_initialized_as_an_eager_build(name: str) -> None:
    auto, make = MODELS[name]
    eager = auto.from_config(make())
    before = torch.get_rng_state()
    with init_module(empty_weights=True):
        model = auto.from_config(make())
    assert all(value.is_meta for value in (*model.parameters(), *model.buffers()))
    materialize(model, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    verify(model, dtype=torch.float32, device="cpu").raise_for_problems()
    assert verify(eager).ok
    assert _ties(model) == _ties(eager)
    buffers = dict(model.named_buffers())
    for key, expected in eager.named_buffers():
        assert buffers.pop(key).dtype == expected.dtype, key
        assert torch.equal(model.get_buffer(key), expected), key
    assert not buffers
    for key, expected in eager.named_parameters():
        value = model.get_parameter(key)
        assert (value.shape, value.dtype, value.requires_grad) == (
            expected.shape,
            expected.dtype,
            expected.requires_grad,
        ), key
        if expected.min() == expected.max():
            assert torch.equal(value, expected), key
        elif value.numel() > 30:
            assert 0.5 < float(value.detach().std() / expected.detach().std()) < 2.0, key


def _ties(model: nn.Module) -> dict[str, str]:
    """Each parameter's name and the first name of the same object."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(one), name) for name, one in model.named_parameters(remove_duplicate=False)}
