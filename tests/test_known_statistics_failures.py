"""What a calibrated run gathers, of every layer: whatever the batches are, and whatever the model does between blocks.

Each a kind of fault of other tools; the label of the entry is in the docstring.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MixtralConfig, PreTrainedConfig

from sparseautomodel import oneshot
from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.modifiers import MODIFIERS, Layer, Modifier, Weight
from sparseautomodel.statistics import Hessian, LayerError
from tests.conftest import SIZES

LENGTHS = (24, 24, 17, 24, 9, 17, 24, 30, 24, 1)
Statistics = dict[str, tuple[int, Tensor]]

REMOTE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class HandConfig(PreTrainedConfig):
    model_type = "hand-made"

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = 4
        self.to_q, self.to_k, self.to_v = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.to_out = nn.Linear(32, 32, bias=False)

    def forward(self, hidden, bias=None):
        q, k, v = self.to_q(hidden), self.to_k(hidden), self.to_v(hidden)
        return self.to_out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias))

class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.attention_type = "full" if number % 2 else "causal"
        self.norm = nn.LayerNorm(32)
        self.self_attn = Attention()

    def forward(self, hidden, bias):
        return hidden + self.self_attn(self.norm(hidden), bias=bias)

class HandForCausalLM(PreTrainedModel):
    config_class = HandConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([Block(number) for number in range(3)])
        self.lm_head = nn.Linear(32, 64, bias=False)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        hidden = self.embed_tokens(input_ids) * self.layers[0].self_attn.heads
        if (input_ids > 40).any():
            hidden = hidden.flip(-1)
        size = input_ids.shape[1]
        biases = {"full": None, "causal": torch.ones(size, size, dtype=torch.bool).tril()}
        for layer in self.layers:
            hidden = layer(hidden, bias=biases[layer.attention_type])
        return CausalLMOutput(logits=self.lm_head(hidden))
"""


@dataclass(frozen=True, kw_only=True)
class Recorder(Modifier, registered=False):
    """Keeps the tokens and the Hessian of each layer, and changes nothing: so nothing is rounded differently."""

    needs_data: ClassVar[bool] = True
    seen: ClassVar[Statistics] = {}

    def statistic(self, layer: Layer) -> Hessian:
        return Hessian(layer.shape[1])

    def solve(self, weights: Sequence[Weight], statistic: Any) -> list[LayerError]:
        for weight in weights:
            self.seen[weight.layer.name] = statistic.tokens, statistic.value.clone()
        return [LayerError(weight.layer.name, 0.0, 0.0) for weight in weights]


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Statistics]:
    """What a calibrated run gathers, per layer."""
    monkeypatch.setitem(MODIFIERS, "Recorder", Recorder)

    def run(source: Path, data: Any, **options: Any) -> Statistics:
        Recorder.seen.clear()
        number = len(list(tmp_path.iterdir()))
        oneshot(source, [Recorder()], data=data, output=tmp_path / f"out-{number}", **options)
        return dict(Recorder.seen)

    return run


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32, so that what differs is not the rounding of activations."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config: PreTrainedConfig = MixtralConfig(**SIZES, **experts) if request.param == "mixtral" else LlamaConfig(**SIZES)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def hand_made(tmp_path: Path) -> Path:
    """A model of remote code that no table knows: its own names, and a forward that nothing can trace."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "modeling_hand.py").write_text(REMOTE)
    config = {"model_type": "hand-made", "architectures": ["HandForCausalLM"], "dtype": "float32", "vocab_size": 64}
    names = {"AutoConfig": "HandConfig", "AutoModelForCausalLM": "HandForCausalLM"}
    config["auto_map"] = {auto: f"modeling_hand.{name}" for auto, name in names.items()}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"embed_tokens.weight": torch.randn(64, 32), "lm_head.weight": torch.randn(64, 32)}
    for number in range(3):
        tensors |= {f"layers.{number}.norm.{name}": torch.rand(32) for name in ("weight", "bias")}
        layers = [f"layers.{number}.self_attn.to_{name}.weight" for name in ("q", "k", "v", "out")]
        tensors |= {name: torch.randn(32, 32) / 5 for name in layers}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def data() -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.randint(1, 250, (length,))} for length in LENGTHS]


def padded(data: Sequence[dict[str, Tensor]], left: bool) -> dict[str, Tensor]:
    width = max(LENGTHS)
    sides = [(width - length, 0) if left else (0, width - length) for length in LENGTHS]
    rows = [row["input_ids"] for row in data]
    pads = [torch.nn.functional.pad(row, side, value=7) for row, side in zip(rows, sides, strict=True)]
    masks = [torch.nn.functional.pad(torch.ones_like(row), side) for row, side in zip(rows, sides, strict=True)]
    return {"input_ids": torch.stack(pads), "attention_mask": torch.stack(masks)}


def packed(data: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All rows in one, told apart by positions that start anew."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return {"input_ids": torch.cat([row["input_ids"] for row in data])[None], "position_ids": positions[None]}


@pytest.mark.parametrize("form", ["batches of 8", "right padded", "left padded", "packed"])
def test_how_rows_are_batched_changes_no_statistic(
    form: str, source: Path, data: list[dict[str, Tensor]], gathered: Callable[..., Statistics]
) -> None:
    """E15: the same rows one at a time, eight at a time, padded on either side and packed into one."""
    forms = {
        "batches of 8": data,
        "right padded": [padded(data, left=False)],
        "left padded": [padded(data, left=True)],
        "packed": [packed(data)],
    }
    single, other = gathered(source, data, batch_size=1), gathered(source, forms[form])
    assert single.keys() == other.keys() and len(single) >= 14
    for name, (tokens, hessian) in single.items():
        assert other[name][0] == tokens, name
        assert (other[name][1] - hessian).norm() <= 1e-5 * hessian.norm(), name
    if "mixtral" in str(source):
        ups = [tokens for name, (tokens, _) in single.items() if "layers.0." in name and name.endswith("w1")]
        assert len(ups) == 4 and sum(ups) == 2 * sum(LENGTHS)
    else:
        assert {tokens for tokens, _ in single.values()} == {sum(LENGTHS)}


def test_one_global_scale_whatever_the_layers_are_called(hand_made: Path, tmp_path: Path) -> None:
    """E17: `to_q`, `to_k`, `to_v` were missed by a table of names."""
    recipe = {"modifiers": [{"GPTQModifier": {"scheme": "NVFP4A16"}}]}
    oneshot(hand_made, recipe, data=hand_rows(), output=tmp_path / "out", trust_remote_code=True)
    tensors = open_checkpoint(tmp_path / "out")
    for number in range(3):
        names = [f"layers.{number}.self_attn.to_{name}.weight_global_scale" for name in "qkv"]
        assert len({float(tensors[name][...]) for name in names}) == 1


def test_forward_that_cannot_be_traced_is_walked(hand_made: Path, gathered: Callable[..., Statistics]) -> None:
    """E18, E19: a data-dependent `if`; a forward that reads a block's parts and kind; other inputs for each block."""
    found = gathered(hand_made, hand_rows(), batch_size=1, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(hand_made, trust_remote_code=True)
    equal_hessians(plain_hessians(model, hand_rows()), found)


def test_hybrid_attention_gives_each_block_its_own_mask(
    tmp_path: Path, gathered: Callable[..., Statistics], data: Any
) -> None:
    """E19: full and sliding attention in turns, with other positions and masks: each block gets what it was called
    with."""
    kinds = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 4}
    config = Gemma3TextConfig(**SIZES | {"num_hidden_layers": 3}, **kinds, head_dim=16)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    equal_hessians(plain_hessians(model, data), gathered(tmp_path, data, batch_size=2))


def hand_rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, high, (24,), generator=generator)} for high in (40, 64, 30)]


def plain_hessians(model: torch.nn.Module, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """X^T X of every layer of the blocks, by plain hooks on plain forwards of one row each."""
    sums: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def add(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs = args[0].reshape(-1, args[0].shape[-1])
            sums[name] = sums.get(name, 0) + inputs.t() @ inputs

        return add

    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for name, module in layers.items():
        if "layers." in name:
            module.register_forward_pre_hook(hook(name))
    with torch.no_grad():
        for row in rows:
            model(input_ids=row["input_ids"][None])
    return sums


def equal_hessians(wanted: dict[str, Tensor], found: Statistics) -> None:
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert (found[name][1] - value).norm() <= 1e-5 * value.norm(), name
