"""Rounding to nearest: results equal to llm-compressor's. What the keys mean is tested in test_scheme_keys.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from safetensors import safe_open

from sparseautomodel.formats.compressed_tensors import encode, layout
from sparseautomodel.modifiers import Layer, Weight
from sparseautomodel.modifiers.quantization import QuantizationModifier

GOLDEN = Path(__file__).parent / "llmcompressor_0_14.safetensors"
"""A weight, and what llm-compressor 0.14.0.1 with compressed-tensors 0.19 stores of it, scheme by scheme."""
WITHOUT_DATA = [name for name in PRESET_SCHEMES if name not in ("UNQUANTIZED", "FP8", "NVFP4")]


def _golden() -> tuple[torch.Tensor, dict[str, dict[str, torch.Tensor]]]:
    schemes: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(GOLDEN, "pt") as file:
        for key in file.keys():  # noqa: SIM118  the file is no mapping
            scheme, _, name = key.rpartition(".")
            schemes.setdefault(scheme, {})[name] = file.get_tensor(key)
    return schemes.pop("")["weight"], schemes


@pytest.mark.parametrize("scheme", _golden()[1])
def test_results_are_those_of_llm_compressor(scheme: str) -> None:
    weight, expected = _golden()[0], _golden()[1][scheme]
    modifier, layer = QuantizationModifier(scheme=scheme), _layer(shape=tuple(weight.shape))
    work = Weight(layer, weight.clone())
    modifier.apply(work)
    assert torch.equal(work.values, weight)
    stored = modifier.scheme_of(layer)
    assert stored is not None
    out = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in layout(stored, *_as(weight)).items()}
    parameters = {"scale": work.scale, "zero_point": work.zero_point, "global_scale": work.global_scale}
    encode(work.values, stored, out, **parameters)
    assert out.keys() == expected.keys()
    for name, tensor in expected.items():
        assert out[name].dtype == tensor.dtype and out[name].shape == tensor.shape
        assert torch.equal(out[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_every_preset_that_needs_no_data_is_applied(name: str) -> None:
    modifier, layer = QuantizationModifier(scheme=name.lower()), _layer()
    scheme = modifier.scheme_of(layer)
    assert scheme is not None and scheme.weights == PRESET_SCHEMES[name]["weights"]
    assert scheme.input_activations == PRESET_SCHEMES[name].get("input_activations")
    work = Weight(layer, torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16())
    modifier.apply(work)
    assert work.scale is not None and work.scale.isfinite().all() and (work.scale > 0).all()
    assert (work.zero_point is None) == scheme.weights.symmetric
    assert (work.global_scale is None) == (scheme.weights.strategy != "tensor_group")


def _layer(shape: tuple[int, int] = (256, 256)) -> Layer:
    return Layer("up_proj", "up_proj", ("Linear",), shape, torch.bfloat16)


def _as(weight: torch.Tensor) -> tuple[tuple[int, int], torch.dtype]:
    return (weight.shape[0], weight.shape[1]), weight.dtype
