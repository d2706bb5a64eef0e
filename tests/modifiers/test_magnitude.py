from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sparseautomodel.masks import satisfies, sparsity
from sparseautomodel.modifiers import MODIFIERS, Layer, ModifierError, Weight
from sparseautomodel.modifiers.constant import ConstantPruningModifier
from sparseautomodel.modifiers.magnitude import MagnitudePruningModifier

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("text", "n", "m"), [("2:4", 2, 4), ("1:4", 1, 4), ("4:8", 4, 8), ("8:16", 8, 16)])
def test_structure_keeps_the_largest_of_every_group(dtype: torch.dtype, text: str, n: int, m: int) -> None:
    values = torch.randn(6, 64).to(dtype)
    weight = _weight(values)
    modifier = MagnitudePruningModifier(mask_structure=text)
    modifier.apply(weight)
    groups = values.abs().reshape(-1, m)
    best = groups.sort(dim=1, descending=True, stable=True).indices[:, :n]
    keep = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, best, True).reshape(values.shape)
    assert torch.equal(weight.values, values.where(keep, 0))
    assert torch.equal(weight.keep, keep)
    assert satisfies(weight.values, n, m)
    assert sparsity(weight.values) == modifier.sparsity_of(weight.layer) == 1 - n / m
    assert modifier.rows(weight.layer) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.93, 1])
def test_unstructured_prunes_the_exact_share_of_the_layer(dtype: torch.dtype, share: float) -> None:
    values = torch.randn(7, 31).to(dtype)
    weight = _weight(values)
    modifier = MagnitudePruningModifier(sparsity=share)
    modifier.apply(weight)
    pruned = round(share * values.numel())
    order = values.abs().flatten().sort(descending=True, stable=True).indices
    expected = values.flatten().clone()
    expected[order[len(order) - pruned :]] = 0
    assert torch.equal(weight.values, expected.reshape(values.shape))
    assert sparsity(weight.values) == modifier.sparsity_of(weight.layer) == pruned / values.numel()
    assert modifier.rows(weight.layer) == 7


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 3, (torch.float32,) * 3, DTYPES])
def test_global_threshold_is_that_of_all_layers_concatenated(dtypes: tuple[torch.dtype, ...]) -> None:
    shapes = ((9, 20), (5, 64), (30, 8))
    layers = [
        (scale * torch.randn(shape)).to(dtype) for scale, shape, dtype in zip((1, 4, 0.1), shapes, dtypes, strict=True)
    ]
    asked = MagnitudePruningModifier(sparsity=0.5, apply_globally=True)
    found = asked.scan(lambda: iter(layers))
    together = torch.cat([values.float().abs().flatten() for values in layers])
    reference = together.sort().values[round(0.5 * together.numel()) - 1].item()
    assert found == dataclasses.replace(asked, threshold=reference)

    pruned = 0
    for values in layers:
        weight = _weight(values)
        assert found.rows(weight.layer) == 1 and found.sparsity_of(weight.layer) is None
        found.apply(weight)
        keep = values.float().abs() > reference
        assert torch.equal(weight.keep, keep)
        assert torch.equal(weight.values, values.where(keep, 0))
        pruned += int((~keep).sum())
    assert pruned >= round(0.5 * together.numel())
    if torch.float32 in dtypes:
        assert pruned == round(0.5 * together.numel()), "these values have no ties at the threshold"


def test_all_ties_at_the_global_threshold_are_pruned() -> None:
    layers = [torch.tensor([[1.0, 2.0, -2.0, 2.0, 5.0]]), torch.tensor([[-2.0, 9.0, 9.0, 9.0, 9.0]])]
    found = MagnitudePruningModifier(sparsity=0.3, apply_globally=True).scan(lambda: iter(layers))
    assert found.threshold == 2.0
    kept = []
    for values in layers:
        weight = _weight(values)
        found.apply(weight)
        kept.append(weight.values.tolist())
    assert kept == [[[0, 0, 0, 0, 5.0]], [[0, 9.0, 9.0, 9.0, 9.0]]]


def test_only_a_global_run_without_a_threshold_reads_the_layers() -> None:
    def read() -> Iterator[torch.Tensor]:
        raise AssertionError("the layers were read")

    for modifier in (
        MagnitudePruningModifier(sparsity=0.5),
        MagnitudePruningModifier(mask_structure="2:4"),
        MagnitudePruningModifier(sparsity=0.5, apply_globally=True, threshold=0.25),
    ):
        assert modifier.scan(read) is modifier
    with pytest.raises(AssertionError, match="were read"):
        MagnitudePruningModifier(sparsity=0.5, apply_globally=True).scan(read)


def test_a_global_run_without_a_threshold_is_not_applied() -> None:
    with pytest.raises(ValueError, match=r"scan\(read\)"):
        MagnitudePruningModifier(sparsity=0.5, apply_globally=True).apply(_weight(torch.ones(2, 4)))


def test_zeros_and_masks_of_earlier_modifiers_stay() -> None:
    values = torch.randn(8, 32)
    values[:, ::3] = 0
    zeros = values == 0
    weight = _weight(values)
    ConstantPruningModifier().apply(weight)
    MagnitudePruningModifier(sparsity=0.1).apply(weight)
    assert torch.equal(weight.keep, ~zeros), "there were more zeros than asked: nothing new is pruned"
    assert torch.equal(weight.values, values)
    MagnitudePruningModifier(mask_structure="2:4").apply(weight)
    assert satisfies(weight.values, 2, 4) and satisfies(weight.keep, 2, 4)
    assert not weight.values[zeros].any() and not weight.keep[zeros].any()
    assert not weight.values[~weight.keep].any()


def test_prune_then_structure_leaves_what_both_keep() -> None:
    values = torch.randn(8, 32)
    weight = _weight(values)
    MagnitudePruningModifier(mask_structure="4:8").apply(weight)
    first = weight.keep
    MagnitudePruningModifier(mask_structure="2:4").apply(weight)
    assert satisfies(weight.values, 4, 8) and satisfies(weight.values, 2, 4)
    assert torch.equal(weight.keep, weight.keep & first)
    assert torch.equal(weight.values, values.where(weight.keep, 0))


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"sparsity": 0.5}, {"sparsity": 0.5}),
        ({"sparsity": 1}, {"sparsity": 1.0}),
        ({"final_sparsity": 0.5}, {"sparsity": 0.5}),
        ({"init_sparsity": 0, "final_sparsity": 0.5}, {"sparsity": 0.5}),
        ({"init_sparsity": 0.5, "final_sparsity": 0.5}, {"sparsity": 0.5}),
        ({"sparsity": 0.5, "final_sparsity": 0.5}, {"sparsity": 0.5}),
        ({"sparsity": 0.5, "mask_structure": "unstructured"}, {"sparsity": 0.5}),
        ({"sparsity": 0.5, "mask_structure": "0:0"}, {"sparsity": 0.5}),
        ({"mask_structure": "2:4"}, {"mask_structure": "2:4"}),
        ({"mask_structure": " 2 : 4 ", "sparsity": 0.5}, {"mask_structure": "2:4"}),
        ({"mask_structure": "1:3", "final_sparsity": 0.67}, {"mask_structure": "1:3"}),
        ({"mask_structure": "2:4", "init_sparsity": 0.0}, {"mask_structure": "2:4"}),
        (
            {"sparsity": 0.5, "apply_globally": True, "threshold": 0.1, "ignore": "lm_head"},
            {"sparsity": 0.5, "apply_globally": True, "threshold": 0.1, "ignore": ["lm_head"]},
        ),
    ],
)
def test_spellings_of_one_meaning_are_equal_and_written_alike(given: dict, written: dict) -> None:
    modifier = MagnitudePruningModifier(**given)
    assert modifier.to_dict() == written
    assert MagnitudePruningModifier(**written) == modifier
    assert hash(MagnitudePruningModifier(**written)) == hash(modifier)


@pytest.mark.parametrize(
    ("given", "key", "said"),
    [
        ({}, "sparsity", 'Write sparsity: 0.5, or mask_structure: "2:4"'),
        ({"init_sparsity": 0.1}, "sparsity", "no sparsity"),
        ({"sparsity": 0}, "sparsity", "above 0"),
        ({"sparsity": -0.5}, "sparsity", "above 0"),
        ({"sparsity": 50}, "sparsity", "Write sparsity: 0.5"),
        ({"sparsity": math.nan}, "sparsity", "above 0"),
        ({"sparsity": "half"}, "sparsity", "'half'"),
        ({"sparsity": True}, "sparsity", "True"),
        ({"final_sparsity": 1.5}, "final_sparsity", "up to 1"),
        ({"sparsity": 0.5, "final_sparsity": 0.6}, "final_sparsity", "contradicts sparsity 0.5"),
        ({"sparsity": 0.5, "init_sparsity": 0.6}, "init_sparsity", "from 0 to sparsity"),
        ({"sparsity": 0.5, "init_sparsity": "low"}, "init_sparsity", "'low'"),
        ({"mask_structure": "2:4", "init_sparsity": 0.6}, "init_sparsity", "0.5"),
        ({"mask_structure": "2:4", "sparsity": 0.75}, "sparsity", "contradicts 2:4, which implies 0.5"),
        ({"mask_structure": "1:4", "sparsity": 0.25}, "sparsity", "implies 0.75"),
        ({"mask_structure": "block4", "sparsity": 0.5}, "mask_structure", "mask_structure: 'block4' is no"),
        ({"mask_structure": 124}, "mask_structure", 'Write "2:4"'),
        ({"mask_structure": "4:2"}, "mask_structure", 'Write "2:4"'),
        ({"mask_structure": "2:4", "apply_globally": True}, "apply_globally", "does not go with 2:4"),
        ({"sparsity": 0.5, "apply_globally": "yes"}, "apply_globally", "true or false"),
        ({"sparsity": 0.5, "threshold": 0.1}, "threshold", "apply_globally: true"),
        ({"sparsity": 0.5, "apply_globally": True, "threshold": -1}, "threshold", "from 0 up"),
        ({"sparsity": 0.5, "apply_globally": True, "threshold": math.nan}, "threshold", "from 0 up"),
        ({"sparsity": 0.5, "targets": []}, "targets", "empty"),
    ],
)
def test_a_wrong_value_names_its_key_and_what_to_write(given: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(ModifierError, match=said) as error:
        MagnitudePruningModifier(**given)
    assert error.value.key == key


def test_keys_list_those_that_are_folded_into_others() -> None:
    keys = MagnitudePruningModifier.keys()
    assert set(keys) == {
        *("targets", "ignore", "sparsity", "mask_structure", "apply_globally", "threshold"),
        *("init_sparsity", "final_sparsity"),
    }
    assert len(keys) == len(set(keys))


def test_columns_that_the_group_does_not_divide_are_named() -> None:
    with pytest.raises(ValueError, match=r"2:4 .*\[3, 6\]"):
        MagnitudePruningModifier(mask_structure="2:4").apply(_weight(torch.ones(3, 6)))


def test_the_shipped_recipe_is_two_kept_of_every_four() -> None:
    path = Path(__file__).resolve().parents[2] / "recipes" / "2of4.yaml"
    [entry] = yaml.safe_load(path.read_text(encoding="utf-8"))["modifiers"]
    [(name, keys)] = entry.items()
    modifier = MODIFIERS[name](**keys)
    assert modifier == MagnitudePruningModifier(mask_structure="2:4", ignore=("lm_head",))
    values = torch.randn(4, 16)
    weight = _weight(values)
    modifier.apply(weight)
    assert sparsity(weight.values) == 0.5 and satisfies(weight.values, 2, 4)


def _weight(values: torch.Tensor) -> Weight:
    name = "model.layers.0.mlp.up_proj"
    layer = Layer(name, name, ("Linear",), (values.shape[0], values.shape[1]), values.dtype)
    return Weight(layer, values.clone())
