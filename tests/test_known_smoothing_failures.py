"""Faults that users of other tools met with AWQ and SmoothQuant, from files to files; the label of the entry is in the
docstring."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPTNeoXConfig,
    PreTrainedConfig,
)

from sparseautomodel import SparseAutoModelForCausalLM, oneshot, verify
from tests.conftest import SIZES

pytestmark = pytest.mark.filterwarnings("ignore")

AWQ: dict[str, Any] = {"AWQModifier": {"scheme": "W4A16_ASYM", "group_size": 32}}
SMOOTH: dict[str, Any] = {"SmoothQuantModifier": {}}
W8A8: dict[str, Any] = {"GPTQModifier": {"scheme": "W8A8"}}
RECIPES = {"awq": [AWQ], "smoothquant": [SMOOTH, W8A8]}
GEMMA = Gemma3TextConfig(
    **SIZES,
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=8,
    head_dim=16,
)
BLOOM = BloomConfig(vocab_size=256, hidden_size=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
NEOX = GPTNeoXConfig(**{key: size for key, size in SIZES.items() if key != "num_key_value_heads"})


@pytest.fixture
def rows() -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.randint(1, 250, (length,))} for length in (24, 24, 17, 24, 24, 24)]


@pytest.fixture
def exact(tmp_path: Path) -> Callable[[PreTrainedConfig], Path]:
    """A folder with a float32 model that has channels of very different size, as trained ones have."""

    def make(config: PreTrainedConfig) -> Path:
        model = AutoModelForCausalLM.from_config(config)
        for name, value in model.named_parameters():
            if "norm" in name:
                value.data.add_(torch.randn_like(value), alpha=0.2)
                value.data[3] += 4
        model.save_pretrained(tmp_path / "source")
        return tmp_path / "source"

    return make


@pytest.mark.parametrize("name", RECIPES)
def test_overflow_in_float16_is_named_and_searched_around(
    name: str, tiny_llama: Path, tmp_path: Path, rows: Any
) -> None:
    """E2: no finite loss in the grid, and nothing said why."""
    source = Path(shutil.copytree(tiny_llama, tmp_path / "source"))
    norm = "model.layers.1.input_layernorm.weight"
    for file in source.glob("*.safetensors"):
        tensors = {key: value.half() for key, value in load_file(file).items()}
        if norm in tensors:
            tensors[norm][3] = 6e4
        save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    report = oneshot(source, {"modifiers": RECIPES[name]}, data=rows, output=tmp_path / "out")
    verify(tmp_path / "out").raise_for_problems()
    for layer in report.calibration["layers"]:
        seen = ".layers.1." in layer["name"]
        assert (layer["fallback"] is not None and "not finite" in layer["fallback"]) == seen, layer


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_mixtral", "tiny_qwen3_moe"])
def test_search_is_never_worse_than_no_search(
    model: str, tmp_path: Path, rows: Any, request: pytest.FixtureRequest
) -> None:
    """E3: the search could choose what is worse than nothing."""
    report = oneshot(request.getfixturevalue(model), {"modifiers": [AWQ]}, data=rows, output=tmp_path / "out")
    layers = report.calibration["layers"]
    assert len(layers) == len(report.layers)
    for layer in layers:
        assert layer["after"] is None or layer["after"] <= layer["before"] * (1 + 1e-6), layer


@pytest.mark.parametrize("config", [GEMMA, BLOOM, NEOX], ids=["gemma3", "bloom", "neox"])
def test_smoothing_cancels_out(
    config: PreTrainedConfig, exact: Callable[[PreTrainedConfig], Path], tmp_path: Path, rows: Any
) -> None:
    """E4, E6: norms that compute `1 + weight`, fused projections, blocks that no table knows: what is divided before a
    layer is multiplied in it, so that no more is lost than 8 bits lose."""
    source = exact(config)
    weights = {"GPTQModifier": {"scheme": "W8A16", "group_size": 32}}
    report = oneshot(source, {"modifiers": [SMOOTH, weights]}, data=rows, output=tmp_path / "out")
    assert sum(layer["smoothed"] for layer in report.calibration["layers"]) >= 2
    inputs = rows[0]["input_ids"][None]
    with torch.no_grad():
        wanted, found = (
            AutoModelForCausalLM.from_pretrained(folder)(inputs).logits for folder in (source, tmp_path / "out")
        )
    assert (found - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("config", [GEMMA, BLOOM, NEOX], ids=["gemma3", "bloom", "neox"])
def test_architectures_without_a_table_are_smoothed(
    name: str, config: PreTrainedConfig, exact: Callable[[PreTrainedConfig], Path], tmp_path: Path, rows: Any
) -> None:
    """E6: tables of names lag behind; which layers read which norm is found by running a block."""
    source = exact(config)
    report = oneshot(source, {"modifiers": RECIPES[name]}, data=rows, output=tmp_path / "out")
    layers = report.calibration["layers"]
    assert all(layer["fallback"] is None for layer in layers)
    assert sum(layer["smoothed"] for layer in layers) >= 2
    plain = {"QuantizationModifier": AWQ["AWQModifier"] if name == "awq" else W8A8["GPTQModifier"]}
    oneshot(source, {"modifiers": [plain]}, output=tmp_path / "plain")
    inputs = torch.stack([row["input_ids"] for row in rows if len(row["input_ids"]) == 24])
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(source)(inputs).logits
        errors = [
            float((SparseAutoModelForCausalLM.from_pretrained(tmp_path / folder)(inputs).logits - wanted).norm())
            for folder in ("out", "plain")
        ]
    assert math.isfinite(errors[0]) and errors[0] < 1.25 * errors[1]


@pytest.mark.parametrize("name", RECIPES)
def test_without_data_it_is_said_what_to_run(name: str, tiny_llama: Path) -> None:
    """E14: `NoneType` errors, deep in a loop."""
    with pytest.raises(ValueError, match=r"needs calibration data.*Run oneshot\(path, recipe, data="):
        SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe={"modifiers": RECIPES[name]})
