"""Tiny models and a tokenizer, built here and saved to folders that tests read and never change."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sparseautomodel import column_blocks, masks, pairs, squares
from tests.block_families import save_family

SMOLLM2 = Path(__file__).resolve().parents[1] / ".cache" / "smollm2"
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}

torch.set_num_threads(1)  # two threads of one operation stall each other as soon as anything else runs
# The same examples in every run, and no limit on time, which depends on the machine.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(params=["compiled", "torch"])
def compiled_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of the C files, and the operations of torch that devices and machines without them have."""
    if request.param == "torch":
        for module in (column_blocks, masks, squares, pairs):
            monkeypatch.setattr(module, "_functions", lambda: "not in this test")


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level tokenizer of 256 tokens, with a chat template; byte 0 is bos, eos and pad."""
    alphabet = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE(vocab={text: byte for byte, text in alphabet.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = {"bos_token": alphabet[0], "eos_token": alphabet[0], "pad_token": alphabet[0]}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)
    wrapped.chat_template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    return wrapped


@pytest.fixture(scope="session")
def save_model(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerBase
) -> Iterator[Callable[[PreTrainedConfig], Path]]:
    """Saves a seeded model of any config, with the tokenizer, to a folder that no test may change."""
    saved = {}

    def save(config: PreTrainedConfig) -> Path:
        folder = tmp_path_factory.mktemp(config.model_type)
        _seeded(config).save_pretrained(folder, max_shard_size="64KB")
        tiny_tokenizer.save_pretrained(folder)
        saved[folder] = _snapshot(folder)
        return folder

    yield save
    changed = [folder.name for folder, before in saved.items() if _snapshot(folder) != before]
    assert not changed, f"a test changed these shared folders, it should have worked on a copy: {changed}"


@pytest.fixture(scope="session")
def tiny_llama(save_model: Callable[[PreTrainedConfig], Path]) -> Path:
    """A Llama of 2 layers, 64 wide, head not tied: bf16, several safetensors shards."""
    return save_model(LlamaConfig(**SIZES, tie_word_embeddings=False))


@pytest.fixture(scope="session")
def tied_llama(save_model: Callable[[PreTrainedConfig], Path]) -> Path:
    """The same with the head tied to the embedding: the files hold one tensor for both."""
    return save_model(LlamaConfig(**SIZES, tie_word_embeddings=True))


@pytest.fixture(scope="session")
def tiny_mixtral(save_model: Callable[[PreTrainedConfig], Path]) -> Path:
    """A Mixtral of 4 experts a layer: one tensor an expert's projection in the files, fused in the model."""
    return save_model(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


@pytest.fixture(scope="session")
def tiny_qwen3_moe(save_model: Callable[[PreTrainedConfig], Path]) -> Path:
    """A Qwen3-MoE of 4 experts a layer, each 64 wide inside."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return save_model(Qwen3MoeConfig(**SIZES, **experts, head_dim=16))


@pytest.fixture(scope="session")
def tiny_qwen3(save_model: Callable[[PreTrainedConfig], Path]) -> Path:
    """A Qwen3: norms of queries and keys, head dimension of its own, tied head."""
    return save_model(Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True))


@pytest.fixture(scope="session")
def tiny_gemma3(save_model: Callable[[PreTrainedConfig], Path]) -> Path:
    """A Gemma 3 of which one layer looks at a window of 8 tokens."""
    types = ["sliding_attention", "full_attention"]
    return save_model(Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=8, layer_types=types))


@pytest.fixture(scope="session")
def tiny_gpt2(save_model: Callable[[PreTrainedConfig], Path]) -> Path:
    """A GPT-2: `Conv1D` layers, whose weights are transposed in the files, biases, tied head."""
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return save_model(GPT2Config(vocab_size=256, n_positions=512, n_embd=64, n_layer=2, n_head=4, **ends))


@pytest.fixture(scope="session")
def tiny_bert(save_model: Callable[[PreTrainedConfig], Path]) -> Path:
    """A BERT with its masked-language head: an encoder, biases everywhere, tied decoder."""
    decoder_only = ("num_key_value_heads", "bos_token_id", "eos_token_id")
    return save_model(BertConfig(**{key: size for key, size in SIZES.items() if key not in decoder_only}))


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a family in `block_families` -> folder of a tiny model of it, that no test may change."""
    return functools.cache(lambda name: save_family(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, dense bf16, with its tokenizer. `make model` puts it there."""
    if not (SMOLLM2 / "config.json").is_file():
        message = f"{SMOLLM2} holds no model: run `make model`"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return SMOLLM2


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2)


def _seeded(config: PreTrainedConfig) -> PreTrainedModel:
    auto = AutoModelForMaskedLM if isinstance(config, BertConfig) else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config)
        # Biases of zero and norms of one would hide a tensor that was never loaded.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(torch.bfloat16)


def _snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
