"""The transform step against slow plain code: the whole matrix at once, through compressed-tensors' own functions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given
from hypothesis import strategies as st

from sparseautomodel import transform as module
from sparseautomodel.checkpoint import Reads, StoredTensor
from sparseautomodel.modifiers import MODIFIERS, Layer, Modifier, Weight
from sparseautomodel.modifiers.magnitude import MagnitudePruningModifier
from sparseautomodel.modifiers.quantization import QuantizationModifier
from sparseautomodel.transform import LayerPlan, decode, describe, loaded_dtype, scan, transform

BF16 = torch.bfloat16
GROUP = {"num_bits": 4, "strategy": "group", "group_size": 16}


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1)


@pytest.fixture
def noise() -> Iterator[type[Modifier]]:
    """A modifier that fails, registered for one test."""

    @dataclass(frozen=True, kw_only=True)
    class FailingModifier(Modifier):
        def apply(self, weight: Weight) -> None:
            raise ZeroDivisionError("no reason")

    yield FailingModifier
    del MODIFIERS["FailingModifier"]


def source(reads: Reads, **tensors: torch.Tensor) -> dict[str, StoredTensor]:
    return {
        name.replace("__", "."): StoredTensor(
            name.replace("__", "."), tuple(value.shape), value.dtype, "f", value, reads
        )
        for name, value in tensors.items()
    }


def plan_of(name: str, values: torch.Tensor, *modifiers: Modifier, **changes: Any) -> LayerPlan:
    transposed = changes.get("transposed", False)
    shape = tuple(values.shape[::-1] if transposed else values.shape)
    kinds = ("Conv1D",) if transposed else ("Linear",)
    layer = Layer(name, name, kinds, shape, values.dtype, transposed=transposed)
    schemes = [scheme for modifier in modifiers if (scheme := modifier.scheme_of(layer))]
    return LayerPlan(layer, changes.get("source", f"{name}.weight"), modifiers, schemes[-1] if schemes else None)


def quantizing(**weights: Any) -> QuantizationModifier:
    return QuantizationModifier(config_groups={"g": {"targets": ["Linear"], "weights": weights}})


def reference(values: torch.Tensor, scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
    """The stored tensors of a whole matrix: extremes in plain code, scales and packing by compressed-tensors."""
    args, rows = scheme.weights, len(values)
    if args.strategy in ("group", "tensor_group"):
        split = values.view(rows, -1, args.group_size)
        low, high = split.amin(-1), split.amax(-1)
    elif args.strategy == "channel":
        low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    else:
        low, high = values.min().view(1), values.max().view(1)
    state = {"weight": values}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(values.min(), values.max()).view(1)
        scale, zero = calculate_qparams(low, high, args, global_scale=state["weight_global_scale"])
    else:
        scale, zero = calculate_qparams(low, high, args)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    format_name = module.storage.format_of(scheme)
    compressed = BaseCompressor.get_value_from_registry(format_name).compress(state, scheme)
    return {part: value for part, value in compressed.items() if not (part == "weight_zero_point" and args.symmetric)}


SCHEMES: dict[str, QuantizationModifier] = {
    "int4": quantizing(**GROUP),
    "int4 asymmetric": quantizing(**GROUP, symmetric=False),
    "int3 asymmetric": quantizing(num_bits=3, strategy="channel", symmetric=False),
    "int8 tensor": quantizing(num_bits=8, strategy="tensor"),
    "fp8": quantizing(num_bits=8, type="float", strategy="channel"),
    "nvfp4": QuantizationModifier(scheme="NVFP4A16"),
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("rows", [16, 96, 100])
@pytest.mark.usefixtures("tiny_chunks")
def test_rows_at_a_time_give_what_the_whole_matrix_gives(name: str, rows: int) -> None:
    values, reads = torch.randn(rows, 64, dtype=BF16), Reads()
    planned = plan_of("a", values, SCHEMES[name])
    result = transform(source(reads, a__weight=values), [planned])
    wanted = reference(values, planned.scheme)
    assert {name.removeprefix("a.") for name in result} == wanted.keys()
    for part, value in wanted.items():
        lazy = result[f"a.{part}"]
        given = lazy[...]
        assert (lazy.shape, lazy.dtype) == (tuple(given.shape), given.dtype) and lazy.get_shape() == list(given.shape)
        assert torch.equal(given.float(), value.to(given.dtype).float()), part
    assert reads.nbytes("a.weight") == values.nbytes, "read once"


@given(threads=st.integers(1, 6), order=st.randoms())
def test_whoever_takes_first_the_source_is_read_once(threads: int, order: Any) -> None:
    values, reads = torch.randn(64, 64, dtype=BF16), Reads()
    result = transform(source(reads, a__weight=values), [plan_of("a", values, quantizing(**GROUP))])
    names = list(result)
    order.shuffle(names)
    with ThreadPoolExecutor(threads) as pool:
        taken = dict(zip(names, pool.map(lambda name: result[name][...], names), strict=True))
    assert reads.nbytes("a.weight") == values.nbytes
    wanted = reference(values, plan_of("a", values, quantizing(**GROUP)).scheme)
    assert all(torch.equal(taken[f"a.{part}"], value.to(taken[f"a.{part}"].dtype)) for part, value in wanted.items())


def test_other_tensors_pass_through_in_their_order() -> None:
    values = torch.randn(32, 32, dtype=BF16)
    tensors = source(Reads(), a__bias=torch.ones(32), a__weight=values, z__weight=values, norm=torch.ones(3))
    result = transform(tensors, [plan_of("a", values, quantizing(**GROUP))])
    assert list(result) == ["a.bias", "a.weight_packed", "a.weight_scale", "a.weight_shape", "z.weight", "norm"]
    assert all(result[name] is tensors[name] for name in ("a.bias", "z.weight", "norm"))


@pytest.mark.usefixtures("tiny_chunks")
def test_modifiers_run_in_the_order_of_the_recipe_and_zeros_stay() -> None:
    values = torch.randn(64, 64, dtype=BF16)
    pruning, asymmetric = MagnitudePruningModifier(mask_structure="2:4"), quantizing(**GROUP, symmetric=False)
    planned = plan_of("a", values, pruning, asymmetric)
    result = transform(source(Reads(), a__weight=values), [planned])
    (dense,) = decode(result, {"a": planned.scheme}, [planned.layer]).values()
    pruned = transform(source(Reads(), a__weight=values), [plan_of("a", values, pruning)])["a.weight"][...]
    assert ((pruned != 0).view(-1, 4).sum(-1) == 2).all()
    assert (dense[...][pruned == 0] == 0).all() and (dense[...] != 0).sum() > 1800
    scale = result["a.weight_scale"][...].repeat_interleave(16, 1)
    assert ((dense[...] - pruned).abs() <= scale * 1.1).all(), "the scale is that of what was left"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.usefixtures("tiny_chunks")
def test_what_is_pruned_is_stored_as_the_file_had_it(transposed: bool) -> None:
    values = torch.randn(64, 48, dtype=BF16)
    stored = values.t().contiguous() if transposed else values
    planned = plan_of(
        "a", stored, MagnitudePruningModifier(targets=["Linear", "Conv1D"], mask_structure="2:4"), transposed=transposed
    )
    lazy = transform(source(Reads(), a__weight=stored), [planned])["a.weight"]
    pruned = lazy[...]
    assert pruned.shape == stored.shape == tuple(lazy.shape)
    kept = (pruned.t() if transposed else pruned).reshape(64, -1, 4) != 0
    assert (kept.sum(-1) == 2).all(), "of every four inputs, whatever the order in the file"
    assert torch.equal(pruned[pruned != 0], stored[pruned != 0])
    assert torch.equal(lazy[3:7], pruned[3:7])


def test_layers_that_share_a_global_scale_are_worked_on_together() -> None:
    q, k = torch.randn(32, 32, dtype=BF16), 5 * torch.randn(32, 32, dtype=BF16)
    modifier, reads = QuantizationModifier(scheme="NVFP4A16"), Reads()
    plans = [plan_of("q", q, modifier), plan_of("k", k, modifier)]
    for sets, wanted in (([["q", "k"]], (torch.cat([q, k]),) * 2), ([], (q, k))):
        result = transform(source(reads, q__weight=q, k__weight=k), plans, sets)
        for name, values in zip("qk", wanted, strict=True):
            expected = generate_gparam(values.min(), values.max()).view(1)
            assert torch.equal(result[f"{name}.weight_global_scale"][...], expected)
    assert reads.nbytes("q.weight") == 2 * q.nbytes, "once for each of the two transforms"


def test_a_tied_layer_comes_from_the_tensor_that_holds_it() -> None:
    values, reads = torch.randn(64, 32, dtype=BF16), Reads()
    modifier = quantizing(**GROUP)
    plans = [plan_of("head", values, modifier, source="embed.weight")]
    result = transform(source(reads, embed__weight=values, norm=torch.ones(1)), plans)
    assert set(result) == {"head.weight_packed", "head.weight_scale", "head.weight_shape", "embed.weight", "norm"}
    assert torch.equal(result["embed.weight"][...], values), "the tensor itself stays"
    wanted = reference(values, plans[0].scheme)
    assert torch.equal(result["head.weight_packed"][...], wanted["weight_packed"])
    for name in ("head.weight_scale", "head.weight_shape"):
        _ = result[name][...]
    assert reads.nbytes("embed.weight") == values.nbytes


def test_only_a_global_threshold_is_read_for() -> None:
    a, b, reads = torch.randn(32, 32, dtype=BF16), 99 * torch.randn(32, 32, dtype=BF16), Reads()
    tensors = source(reads, a__weight=a, b__weight=b)
    local = MagnitudePruningModifier(sparsity=0.5)
    everywhere = MagnitudePruningModifier(sparsity=0.5, apply_globally=True)
    assert scan([plan_of("a", a, local)], tensors)[0].modifiers == (local,) and reads.nbytes("a.weight") == 0
    plans = scan([plan_of("a", a, everywhere), plan_of("b", b, everywhere)], tensors)
    assert reads.nbytes("a.weight") % a.nbytes == 0 and reads.nbytes("a.weight") > 0
    (one,), (other,) = (plan.modifiers for plan in plans)
    assert one is other and one.threshold is not None
    result = transform(tensors, plans)
    zeros = [(result[name][...] == 0).sum().item() for name in ("a.weight", "b.weight")]
    assert abs(sum(zeros) - 1024) <= 8 and zeros[0] > 990, "the small weights go, wherever they are"


def test_an_error_says_layer_shape_scheme_and_step(noise: type[Modifier]) -> None:
    """D5: a raw error from the middle of a layer's work says where it happened."""
    values = torch.randn(32, 32, dtype=BF16)
    plans = [plan_of("model.q_proj", values, noise(), quantizing(**GROUP))]
    result = transform(source(Reads(), **{"model__q_proj__weight": values}), plans)
    with pytest.raises(RuntimeError) as caught:
        result["model.q_proj.weight_packed"][...]
    assert str(caught.value) == (
        "model.q_proj (shape [32, 32], torch.bfloat16, rows 0 to 32) failed in FailingModifier, QuantizationModifier "
        "with int4 group 16: ZeroDivisionError: no reason"
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_the_number_of_threads_is_as_before(noise: type[Modifier]) -> None:
    before = torch.get_num_threads()
    values = torch.randn(64, 64, dtype=BF16)
    for modifier in (quantizing(**GROUP), noise()):
        result = transform(source(Reads(), a__weight=values), [plan_of("a", values, modifier)])
        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(tensor.__getitem__, ...) for tensor in result.values()]
        assert all(future.done() for future in futures) and torch.get_num_threads() == before


def test_a_dense_weight_crosses_to_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A9: modifiers run where the weight goes; nothing but the dense tensor in hand and the result is there."""
    values, reads = torch.randn(256, 64, dtype=BF16), Reads()
    crossed: list[tuple[int, ...]] = []
    real = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.device) and not tensor.is_meta:
            crossed.append(tuple(tensor.shape))
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1)
    planned = plan_of("a", values, MagnitudePruningModifier(targets=["Linear"], mask_structure="2:4"))
    result = transform(source(reads, a__weight=values), [planned], device="meta")
    assert result["a.weight"][...].is_meta and crossed == [(256, 64)]
    crossed.clear()
    assert not transform(source(reads, a__weight=values), [planned], device="cpu")["a.weight"][...].is_meta
    assert crossed == [(32, 64)] * 8, "on a CPU, runs of rows that fit the cache"


def test_concurrent_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    values, at_once, most, lock = torch.randn(32, 32, dtype=BF16), 0, 0, threading.Lock()
    real: Callable[..., Any] = module.Work._run
    both = threading.Barrier(2, timeout=20)

    def run(work: Any) -> Any:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        both.wait()  # only passes when two are at work side by side
        with lock:
            at_once -= 1
        return real(work)

    monkeypatch.setattr(module.Work, "_run", run)
    names = [f"l{number}" for number in range(8)]
    tensors = {f"{name}.weight": StoredTensor(f"{name}.weight", (32, 32), BF16, "f", values, Reads()) for name in names}
    result = transform(tensors, [plan_of(name, values, MagnitudePruningModifier(sparsity=0.5)) for name in names])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: result[name][...], result))
    assert most == module.SIDE_BY_SIDE == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_decoding_computes_in_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    values = torch.randn(32, 32, dtype=BF16)
    planned = plan_of("a", values, quantizing(**GROUP))
    parts = {name: tensor[...] for name, tensor in transform(source(Reads(), a__weight=values), [planned]).items()}
    reads = Reads()
    tensors = {
        name: StoredTensor(name, tuple(value.shape), value.dtype, "f", value, reads) for name, value in parts.items()
    }
    layer = Layer("a", "a", ("Linear",), (32, 32), dtype)
    dense = decode(tensors, {"a": planned.scheme}, [layer])
    assert set(dense) == {"a.weight"} and dense["a.weight"].dtype == dtype
    numbers = BaseCompressor.get_value_from_registry("pack-quantized").decompress(
        {name.removeprefix("a."): value for name, value in parts.items() if "scale" not in name}
        | {"weight_scale": parts["a.weight_scale"].to(dtype)},
        planned.scheme,
    )
    assert torch.equal(dense["a.weight"][...], numbers["weight"]) and dense["a.weight"][...].dtype == dtype


def test_which_tensors_of_a_layer_take_the_dtype_of_the_model() -> None:
    wanted = {("weight_scale", BF16): torch.float32, ("weight_global_scale", torch.float32): torch.float32}
    wanted |= {("weight_packed", torch.int32): torch.int32, ("weight_scale", torch.float8_e4m3fn): torch.float8_e4m3fn}
    wanted |= {("weight_scale", torch.uint8): torch.uint8, ("input_scale", torch.float16): torch.float32}
    assert {key: loaded_dtype(*key, torch.float32) for key in wanted} == wanted
    assert loaded_dtype("weight_global_scale", torch.float32, BF16) == torch.float32


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("W4A16", "int4 group 128"),
        ("W4A16_ASYM", "int4 group 128 asymmetric"),
        ("W8A8", "int8 channel, input int8 token dynamic"),
        ("FP8_BLOCK", "float8 block [128, 128], input float8 group 128 dynamic"),
        ("NVFP4A16", "float4 tensor_group 16"),
    ],
)
def test_schemes_in_a_few_words(name: str, text: str) -> None:
    assert describe(preset_name_to_scheme(name, ["Linear"])) == text


def test_scales_of_inputs_are_stored_with_the_layer_or_missed() -> None:
    modifier, layer = QuantizationModifier(scheme="FP8"), Layer("a", "a", ("Linear",), (8, 16), BF16)
    plan = LayerPlan(layer, "a.weight", (modifier,), modifier.scheme_of(layer))
    outputs = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in plan.outputs().items()}
    assert outputs.keys() == {"a.weight", "a.weight_scale", "a.input_scale"}
    weight = Weight(layer, torch.randn(8, 16).to(BF16))
    modifier.apply(weight)
    with pytest.raises(ValueError, match="no modifier has found input_scale for a: it needs calibration data"):
        plan.store(weight, outputs)
    weight.input_scale = torch.tensor([0.25]).to(BF16)
    plan.store(weight, outputs)
    assert outputs["a.input_scale"].item() == 0.25
    assert describe(plan.scheme) == "float8 tensor, input float8 tensor static"
    assert describe(preset_name_to_scheme("NVFP4", ["Linear"])).endswith("input float4 tensor_group 16 local")
