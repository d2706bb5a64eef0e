"""Quantized tensors of bitsandbytes, moved as their plain parts; where it is installed (it runs on processors)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sparseautomodel.codecs import value_of


def _nf4(bnb: Any, double: bool) -> nn.Module:
    return bnb.nn.LinearNF4(64, 128, compute_dtype=torch.float32, compress_statistics=double)


LAYERS: dict[str, Callable[[Any], nn.Module]] = {
    "plain": lambda bnb: nn.Linear(64, 128),
    "nf4": lambda bnb: _nf4(bnb, False),
    "nf4 double": lambda bnb: _nf4(bnb, True),
    "int8": lambda bnb: bnb.nn.Linear8bitLt(64, 128, has_fp16_weights=False, threshold=6.0),
}


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_runs_from_a_copy_of_its_parts(name: str) -> None:
    bnb = None if name == "plain" else pytest.importorskip("bitsandbytes")
    layer: Any = LAYERS[name](bnb)
    layer.load_state_dict(nn.Linear(64, 128).state_dict())
    layer.to("cpu")  # which quantizes
    x = torch.randn(4, 64)
    expected = layer(x).clone()
    value = value_of(layer.weight, [(layer, "_parameters", "weight")])
    value.rebase([part.clone() for part in value.parts])
    assert torch.equal(layer(x), expected)
    kept = [part.clone() for part in value.parts]
    built = value.build([part.clone() for part in value.parts])
    for part in value.parts:
        part.zero_()
    value.show(built)
    assert torch.equal(layer(x), expected)
    value.hide(built)
    for part, old in zip(value.parts, kept, strict=True):
        part.copy_(old)
    assert torch.equal(layer(x), expected)


def test_a_tensor_of_unknown_parts_is_refused() -> None:
    class Odd(torch.Tensor):
        pass

    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="weight of a Linear is a Odd, whose parts device_budget does not know"):
        value_of(torch.zeros(2).as_subclass(Odd), [(layer, "_parameters", "weight")])
