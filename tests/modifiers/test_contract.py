"""What every modifier promises, over every class in `MODIFIERS`, as the shipped recipes use it.

A new modifier is covered by the recipe that is shipped with it; nothing has to be added here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize

from sparseautomodel.modifiers import MODIFIERS, Layer, Modifier, ModifierError, Weight

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
NAME = "model.layers.0.mlp.up_proj"
LAYER = Layer(NAME, NAME, ("Linear",), (256, 128), torch.bfloat16)
FURTHER = (
    ("MagnitudePruningModifier", {"sparsity": 0.3}),
    ("MagnitudePruningModifier", {"sparsity": 0.3, "apply_globally": True}),
    ("QuantizationModifier", {"scheme": "W4A16_ASYM"}),
    ("QuantizationModifier", {"scheme": "NVFP4"}),
    ("GPTQModifier", {"scheme": "FP8"}),
    ("GPTQModifier", {"scheme": "W4A16_ASYM", "actorder": None}),
    ("GPTQModifier", {"scheme": "NVFP4A16", "observer": "mse"}),
    ("AWQModifier", {"scheme": "W4A16", "duo_scaling": "both", "mappings": [[["re:.*up_proj"], "re:.*norm"]]}),
    ("SparseGPTModifier", {"sparsity": 0.3}),
    ("WandaPruningModifier", {"sparsity": 0.3}),
)
"""Branches of a modifier that no recipe shows."""


def _examples() -> Iterator[tuple[str, dict[str, Any], str]]:
    shown = set()
    for path in RECIPES:
        for entry in yaml.safe_load(path.read_text(encoding="utf-8"))["modifiers"]:
            for name, keys in entry.items():
                shown.add(name)
                yield name, keys or {}, path.stem
    for name, keys in FURTHER:
        shown.add(name)
        yield name, keys, "-".join(f"{key}={value}" for key, value in keys.items())
    for name, cls in MODIFIERS.items():
        if name not in shown and cls.__module__.startswith("sparseautomodel."):
            yield name, {}, "no-keys"


EXAMPLES = [pytest.param(name, keys, id=f"{name}-{label}") for name, keys, label in _examples()]
DATA_FREE = [
    example for example in EXAMPLES if example.values[0] not in MODIFIERS or not MODIFIERS[example.values[0]].needs_data
]
every = pytest.mark.parametrize(("name", "keys"), EXAMPLES)
data_free = pytest.mark.parametrize(("name", "keys"), DATA_FREE)


@every
def test_it_is_built_from_plain_keys_and_written_back_without_loss(name: str, keys: dict[str, Any]) -> None:
    modifier = MODIFIERS[name](**keys)
    written = modifier.to_dict()
    assert yaml.safe_load(yaml.safe_dump(written)) == written
    assert set(written) <= set(modifier.keys())
    again = MODIFIERS[name](**written)
    assert again == modifier
    assert again.to_dict() == written


@every
def test_what_was_resolved_and_scanned_is_written_without_loss_too(name: str, keys: dict[str, Any]) -> None:
    modifier = _ready(name, keys)
    written = yaml.safe_load(yaml.safe_dump(modifier.to_dict()))
    assert MODIFIERS[name](**written) == modifier
    assert modifier.resolve([LAYER]) == modifier


@every
def test_an_unknown_key_is_refused(name: str, keys: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ModifierError), match="sparsitty"):
        MODIFIERS[name](**keys, sparsitty=0.5)


@every
def test_its_keys_are_accepted_and_cannot_be_changed_later(name: str, keys: dict[str, Any]) -> None:
    modifier = MODIFIERS[name](**keys)
    assert set(keys) <= set(modifier.keys())
    assert {"targets", "ignore"} <= set(modifier.keys())
    with pytest.raises(dataclasses.FrozenInstanceError):
        modifier.targets = ("Conv1D",)  # type: ignore[misc]


@every
def test_an_ignored_layer_is_not_selected(name: str, keys: dict[str, Any]) -> None:
    assert MODIFIERS[name](**keys).selects(LAYER)
    for pattern in (NAME, "re:.*up_proj$", "Linear"):
        assert not MODIFIERS[name](**{**keys, "ignore": [pattern]}).selects(LAYER)


@every
def test_a_head_is_left_alone_by_a_class_name(name: str, keys: dict[str, Any]) -> None:
    head = dataclasses.replace(LAYER, name="lm_head", module="lm_head", role="head")
    without = {key: value for key, value in keys.items() if key != "ignore"}
    assert not MODIFIERS[name](**without).selects(head)
    if "targets" in keys:
        assert MODIFIERS[name](**{**without, "targets": ["Linear", "lm_head"]}).selects(head)


@every
def test_it_changes_a_layer_and_keeps_shape_and_device(name: str, keys: dict[str, Any]) -> None:
    before = _values()
    weight = _applied(name, keys, before)
    changed = [field for field, value in _tensors(weight).items() if field != "values"]
    assert bool(changed or not torch.equal(weight.values, before)) != _smooths_alone(_ready(name, keys))
    assert weight.values.dtype == (torch.float32 if weight.scale is not None and _needs_data(name) else before.dtype)
    assert weight.values.shape == before.shape
    assert weight.values.device == before.device
    assert all(tensor.isfinite().all() for tensor in (weight.values, weight.scale) if tensor is not None)
    if weight.keep is not None:
        assert weight.keep.dtype == torch.bool and weight.keep.shape == before.shape


@every
def test_the_same_input_gives_the_same_result(name: str, keys: dict[str, Any]) -> None:
    first, second = (_tensors(_applied(name, keys, _values())) for _ in range(2))
    assert first.keys() == second.keys()
    for field, tensor in first.items():
        assert torch.equal(tensor, second[field]), field


@every
def test_smoothing_gives_factors_and_changes_nothing(name: str, keys: dict[str, Any]) -> None:
    modifier, weight, scheme = _ready(name, keys), Weight(LAYER, _values()), preset_name_to_scheme("W4A16", [])
    statistic = modifier.statistic(LAYER)
    if statistic is not None:
        statistic.update(_inputs())
    factors = modifier.smooth([weight], statistic, [scheme], lambda found: found)
    assert torch.equal(weight.values, _values()) and weight.scale is None
    assert modifier.smooth([weight], statistic, [None], lambda found: found) is None
    if factors is not None:
        assert modifier.smooths
        assert factors.shape == (LAYER.shape[1],) and factors.isfinite().all() and (factors > 0).all()


@data_free
def test_rows_say_how_finely_the_layer_may_be_cut(name: str, keys: dict[str, Any]) -> None:
    modifier = _ready(name, keys)
    step = modifier.rows(LAYER)
    assert 1 <= step <= LAYER.shape[0]
    whole = _tensors(_apply(modifier, _values()))
    parts = [_tensors(_apply(modifier, part)) for part in _values().split(step)]
    for field, tensor in whole.items():
        if tensor.numel() == 1:
            assert all(torch.equal(part[field].reshape(()), tensor.reshape(())) for part in parts), field
        else:
            assert torch.equal(torch.cat([part[field] for part in parts]), tensor), field


@data_free
def test_columns_say_how_finely_too(name: str, keys: dict[str, Any]) -> None:
    """Each run of so many columns alone gives what it gets in the whole layer."""
    modifier = _ready(name, keys)
    step = modifier.columns(LAYER)
    assert 1 <= step <= LAYER.shape[1]
    whole = _tensors(_apply(modifier, _values()))
    parts = [_tensors(_apply(modifier, part.contiguous())) for part in _values().split(step, 1)]
    for field, tensor in whole.items():
        if tensor.numel() == 1:
            assert all(torch.equal(part[field].reshape(()), tensor.reshape(())) for part in parts), field
        else:
            assert torch.equal(torch.cat([part[field] for part in parts], 1), tensor), field


@every
def test_exact_zeros_stay_exact_zeros(name: str, keys: dict[str, Any]) -> None:
    before = _values()
    modifier = _ready(name, keys)
    weight = _apply(modifier, before, before != 0)
    zeros = before == 0
    assert zeros.any()
    assert not _stored(modifier, weight)[zeros].any()


@every
def test_zeros_are_at_least_those_announced(name: str, keys: dict[str, Any]) -> None:
    modifier = _ready(name, keys)
    weight = _apply(modifier, torch.randn(LAYER.shape).bfloat16())
    announced = modifier.sparsity_of(LAYER) or 0
    assert int((weight.values == 0).sum()) >= round(announced * math.prod(LAYER.shape))
    if weight.keep is not None:
        assert not weight.values[~weight.keep].any()


@every
def test_what_was_pruned_before_stays_pruned(name: str, keys: dict[str, Any]) -> None:
    modifier = _ready(name, keys)
    values = torch.randn(LAYER.shape).bfloat16()
    keep = torch.rand(LAYER.shape) > 0.4
    weight = _apply(modifier, values * keep, keep.clone())
    assert weight.keep is not None
    assert not weight.keep[~keep].any()
    assert not _stored(modifier, weight)[~keep].any()


def _values() -> torch.Tensor:
    """Skewed, with whole rows, whole groups and scattered values that are zero, some of them -0.0."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(LAYER.shape, generator=generator) + 0.7
    values[torch.rand(LAYER.shape, generator=generator) < 0.2] = 0
    values[5] = 0
    values[:, 32:64] = 0
    values[9, ::2] = -0.0
    return values.bfloat16()


def _ready(name: str, keys: dict[str, Any]) -> Modifier:
    return MODIFIERS[name](**keys).resolve([LAYER]).scan(lambda: iter([_values()]))


def _apply(modifier: Modifier, values: torch.Tensor, keep: torch.Tensor | None = None) -> Weight:
    """As a run does it: with the statistic that the modifier asks for, or without data."""
    weight, statistic = Weight(LAYER, values.clone(), keep=keep), modifier.statistic(LAYER)
    seen = modifier.input_range(LAYER)
    assert (statistic is not None or seen is not None) == modifier.needs_data
    if seen is not None:
        seen.update(_inputs())
        assert modifier.set_input_scales([weight], seen) == []
    if statistic is None:
        modifier.apply(weight)
        return weight
    with pytest.raises(NotImplementedError, match="no data-free form"):
        modifier.apply(weight)
    statistic.update(_inputs())
    errors = modifier.solve([weight], statistic)
    if _smooths_alone(modifier):
        assert errors == []
        return weight
    (error,) = errors
    assert error.name == NAME and error.fallback is None
    assert 0 <= error.after <= error.before
    return weight


def _smooths_alone(modifier: Modifier) -> bool:
    """Whether another modifier has to round what this one has smoothed."""
    return modifier.smooths and modifier.scheme_of(LAYER) is None


def _inputs() -> torch.Tensor:
    """Inputs of the layer that depend on each other."""
    generator = torch.Generator().manual_seed(2)
    mixing = torch.randn(LAYER.shape[1], LAYER.shape[1], generator=generator) / 8 + torch.eye(LAYER.shape[1])
    return (torch.randn(300, LAYER.shape[1], generator=generator) @ mixing).bfloat16()


def _needs_data(name: str) -> bool:
    return MODIFIERS[name].needs_data


def _applied(name: str, keys: dict[str, Any], values: torch.Tensor) -> Weight:
    return _apply(_ready(name, keys), values)


def _tensors(weight: Weight) -> dict[str, torch.Tensor]:
    fields = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


def _stored(modifier: Modifier, weight: Weight) -> torch.Tensor:
    """The values that a reader sees: rounded by compressed-tensors' own arithmetic where a scheme says so."""
    scheme = modifier.scheme_of(LAYER)
    if scheme is None:
        return weight.values
    return fake_quantize(
        weight.values, weight.scale, weight.zero_point, scheme.weights, global_scale=weight.global_scale
    )
