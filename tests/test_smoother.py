"""Smoothing on the way: the model as a whole computes the same, and what cannot be smoothed is left and said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from sparseautomodel import SparseAutoModelForCausalLM, oneshot, verify
from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.modifiers import Layer, Weight
from sparseautomodel.modifiers.smoothquant import SmoothQuantModifier
from sparseautomodel.sets import LayerSet
from sparseautomodel.smoother import Smoother
from sparseautomodel.transform import LayerPlan

pytestmark = pytest.mark.filterwarnings("ignore")

AWQ: dict[str, Any] = {"AWQModifier": {"targets": ["Linear"]}}
SMOOTH: dict[str, Any] = {"SmoothQuantModifier": {"smoothing_strength": 0.5}}
W8: dict[str, Any] = {"QuantizationModifier": {"scheme": "W8A8"}}
W4: dict[str, Any] = {"GPTQModifier": {"scheme": "W4A16", "group_size": 32}}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, 250, (24,), generator=generator)} for _ in range(10)]


@pytest.fixture
def outliers(tiny_llama: Path, tmp_path: Path) -> Path:
    """The tiny Llama with a few channels that are thirty times the others, behind each norm and each `up_proj`."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.no_grad():
        for block in model.model.layers:
            for norm in (block.input_layernorm, block.post_attention_layernorm):
                norm.weight[::16] *= 30
            block.mlp.up_proj.weight[::16] *= 30
    model.save_pretrained(tmp_path / "outliers")
    return tmp_path / "outliers"


@pytest.mark.parametrize("entries", [[SMOOTH, W8], [AWQ, W4]], ids=["smoothquant", "awq"])
@pytest.mark.parametrize("budget", ["1GB", 4], ids=["at once", "in parts"])
def test_norms_and_layers_before_make_up_for_it(
    entries: list[Any], budget: Any, outliers: Path, rows: Any, tmp_path: Path
) -> None:
    report = oneshot(outliers, {"modifiers": entries}, data=rows, output=tmp_path / "out", memory_budget=budget)
    assert verify(tmp_path / "out").ok
    before, after = open_checkpoint(outliers), open_checkpoint(tmp_path / "out")
    norms = [name for name in before if name.endswith("layernorm.weight")]
    assert len(norms) == 4 and not any(torch.equal(before[name][...], after[name][...]) for name in norms)
    plain = oneshot(outliers, {"modifiers": entries[1:]}, data=rows, output=tmp_path / "plain").calibration
    source = AutoModelForCausalLM.from_pretrained(outliers, dtype=torch.float32)
    inputs = torch.stack([row["input_ids"] for row in rows])
    with torch.no_grad():
        wanted = source(inputs).logits
        error = [
            float((SparseAutoModelForCausalLM.from_pretrained(tmp_path / name)(inputs).logits - wanted).norm())
            for name in ("out", "plain")
        ]
    assert error[0] < error[1] and plain is not None
    if "AWQModifier" in entries[0]:
        assert any(layer["smoothed"] for layer in report.calibration["layers"])


def test_where_nothing_can_be_divided_it_is_said(tiny_bert: Path, rows: Any, tmp_path: Path) -> None:
    recipe = {"modifiers": [{"SmoothQuantModifier": {}}, W8]}
    report = oneshot(tiny_bert, recipe, data=rows, output=tmp_path / "out")
    assert any("SmoothQuantModifier has changed nothing" in text for text in report.warnings)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(self.norm(hidden))


def test_what_changes_the_block_is_undone() -> None:
    torch.manual_seed(0)
    block, hidden = Block(), torch.randn(4, 8)
    layer = Layer("b.layer", "b.layer", ("Linear",), (8, 8), torch.float32)
    modifier = SmoothQuantModifier()
    scheme = preset_name_to_scheme("W8A8", ["Linear"])
    smoother = Smoother([modifier], {"b.layer": LayerPlan(layer, "b.layer.weight", (modifier,), scheme)})
    layers = LayerSet(("b.layer",), statistics=[modifier.statistic(layer)])
    noisy = [False]

    def run() -> Tensor:
        output = block(hidden)
        return output + torch.randn_like(output) if noisy[0] else output

    smoother.enter("b", block, [layers], run)
    inputs = block.norm(hidden).detach()
    layers.statistics[0].update(inputs)
    layers.inputs = [inputs.clone()]
    before = {name: value.clone() for name, value in block.state_dict().items()}
    noisy[0] = True  # as if dividing changed what comes out
    weight = Weight(layer, block.layer.weight.detach().clone())
    smoother.smooth(layers, [weight])
    assert smoother.undone == ["b.layer"] and not smoother.smoothed and "undone" in smoother.notes()[0]
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())
    assert torch.equal(layers.inputs[0], inputs) and torch.equal(weight.values, before["layer.weight"])
    noisy[0] = False
    smoother.smooth(layers, [weight])
    assert smoother.smoothed == {"b.layer"}
    torch.testing.assert_close(layers.inputs[0] @ weight.values.t(), inputs @ before["layer.weight"].t())
    torch.testing.assert_close(layers.inputs[0], block.norm(hidden).detach())
    torch.testing.assert_close(layers.statistics[0].largest, layers.inputs[0].abs().amax(0))
