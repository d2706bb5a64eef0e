"""Compressed modules against plain code: compressed-tensors' own decompression, then torch's Linear or Embedding."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from sparseautomodel import SparseAutoModelForCausalLM, compressed_layers
from sparseautomodel.compressed_layers import CompressedEmbedding, CompressedLinear, compressed
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.kernels import base
from sparseautomodel.modifiers import Layer, Weight
from sparseautomodel.modifiers.quantization import QuantizationModifier

BF16 = torch.bfloat16
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 16}
SCHEMES = {
    "W4A16": INT4,
    "W4A16_ASYM": INT4 | {"symmetric": False},
    "W8A16": {"num_bits": 8, "strategy": "channel"},
    "W3": {"num_bits": 3, "strategy": "channel", "symmetric": False},
    "FP8_BLOCK": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 16]},
    "NVFP4A16": None,
    "MXFP4A16": None,
}

LARGE_GROUPS = {
    f"{name}_{size}": {"num_bits": 4, "strategy": "group", "group_size": size, "symmetric": name == "W4A16"}
    for name in ("W4A16", "W4A16_ASYM")
    for size in (32, 64, 128)
}
"""Schemes with the group sizes that kernels ask for, which small widths do not allow."""


def scheme_of(name: str) -> QuantizationScheme:
    args = (SCHEMES | LARGE_GROUPS).get(name)
    return (
        preset_name_to_scheme(name, ["Linear"])
        if args is None
        else QuantizationScheme(targets=["Linear"], weights=args)
    )


def compress(old: Any, name: str | QuantizationScheme, dtype: torch.dtype = BF16) -> Any:
    """`old` with its weight stored by the scheme, or the one of that name, round to nearest."""
    scheme = scheme_of(name) if isinstance(name, str) else name
    values = old.weight.detach().to(dtype)
    layer = Layer("layer", "layer", ("Linear",), tuple(values.shape), dtype)
    given_args = {
        key: value for key, value in scheme.model_dump(mode="json", exclude={"format"}).items() if value is not None
    }
    is_preset = isinstance(name, str) and (SCHEMES | LARGE_GROUPS).get(name) is None
    group = {"scheme": name} if is_preset else {"config_groups": {"g": given_args}}
    weight = Weight(layer, values.clone())
    QuantizationModifier(**group).apply(weight)
    parts = storage.layout(scheme, layer.shape, dtype)
    module = compressed(old, scheme, parts, dtype)
    out = {part: torch.empty(shape, dtype=kind) for part, (shape, kind) in parts.items()}
    storage.encode(
        weight.values, scheme, out, scale=weight.scale, zero_point=weight.zero_point, global_scale=weight.global_scale
    )
    for part, value in out.items():
        module._parameters[part] = nn.Parameter(value, requires_grad=False)
    return module


def reference_weight(module: Any) -> torch.Tensor:
    """The dense weight as compressed-tensors decompresses it; asymmetric zero points are unpacked by it too."""
    compressor = BaseCompressor.get_value_from_registry(storage.format_of(module.quantization_scheme))
    state = {part: module._parameters[part].detach().clone() for part in module.parts}
    return compressor.decompress(state, module.quantization_scheme)["weight"]


def pickled(module: Any) -> Any:
    """Through pickle and back, by torch.save: pickle alone cannot read the float8 tensors that it writes."""
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def linear(columns: int, rows: int, bias: bool = False, dtype: torch.dtype = BF16) -> nn.Linear:
    return nn.Linear(columns, rows, bias=bias).to(dtype)


@pytest.mark.parametrize("name", [*SCHEMES, "W8A8", "FP8_DYNAMIC"])
def test_weight_reads_as_what_compressed_tensors_decompresses(name: str) -> None:
    module = compress(linear(64, 96), name)
    assert module.weight.shape == (96, 64) and module.weight.dtype == BF16
    assert torch.equal(module.weight, reference_weight(module).to(BF16))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32])
def test_forward_is_a_product_with_the_decompressed_weight(name: str, dtype: torch.dtype) -> None:
    module = compress(linear(64, 33, bias=True), name).to(dtype)
    input = torch.randn(5, 64, dtype=dtype)
    wanted = F.linear(input, module.weight, module.bias)
    assert module.weight.dtype == dtype
    assert torch.equal(module(input), wanted)


@pytest.mark.parametrize("shape", [(48,), (0, 48), (1, 48), (7, 48), (2, 3, 48), (2, 1, 3, 48), (0, 3, 48)])
def test_inputs_of_any_shape_and_of_no_token(shape: tuple[int, ...]) -> None:
    module = compress(linear(48, 32), "W4A16")
    input = torch.randn(shape, dtype=BF16)
    output = module(input)
    assert output.shape == (*shape[:-1], 32)
    torch.testing.assert_close(output, F.linear(input, module.weight))


@pytest.mark.parametrize("name", ["W4A16", "W8A8"])
def test_inputs_that_are_not_contiguous(name: str) -> None:
    module = compress(linear(48, 32), name)
    wide = torch.randn(3, 48, 5, dtype=BF16).transpose(1, 2)
    strided = torch.randn(6, 96, dtype=BF16)[::2, ::2]
    for input in (wide, strided, torch.randn(1, 48, dtype=BF16).expand(4, 48)):
        assert not input.is_contiguous()
        assert torch.equal(module(input), module(input.contiguous()))


@pytest.mark.parametrize(("columns", "rows"), [(48, 31), (576, 192), (4304, 16), (16, 4304)])
@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "FP8_BLOCK"])
def test_sizes_of_real_models(name: str, columns: int, rows: int) -> None:
    module = compress(linear(columns, rows), name)
    input = torch.randn(2, columns, dtype=BF16)
    torch.testing.assert_close(module(input), F.linear(input, reference_weight(module).to(BF16)))


@pytest.mark.parametrize("name", ["W4A16_ASYM", "FP8_BLOCK"])
def test_tiles_add_up_to_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = compress(linear(48, 100, bias=True), name)
    input = torch.randn(4, 48, dtype=BF16)
    whole = module(input)
    monkeypatch.setattr(base, "TILE_ELEMENTS", 1)
    assert len(list(module.kernel.tiles())) == 2
    torch.testing.assert_close(module(input), whole)


@pytest.mark.parametrize("name", ["W8A8", "FP8_DYNAMIC"])
def test_activations_are_rounded_a_token_at_a_time(name: str) -> None:
    module = compress(linear(48, 32), name)
    tokens = torch.randn(6, 48, dtype=BF16) * torch.logspace(-3, 3, 6, dtype=BF16).unsqueeze(1)
    args = module.quantization_scheme.input_activations
    rounded = []
    for token in tokens:
        scale, zero_point = compute_dynamic_scales_and_zp(token.view(1, 1, -1), args, module)
        rounded.append(fake_quantize(token.view(1, 1, -1), scale, zero_point, args).view(-1))
    wanted = F.linear(torch.stack(rounded), module.weight)
    torch.testing.assert_close(module(tokens), wanted)
    torch.testing.assert_close(module(tokens.view(2, 3, 48)).view(6, 32), wanted)


def test_gradient_reaches_the_input() -> None:
    module = compress(linear(48, 32), "W4A16")
    input = torch.randn(3, 48, dtype=BF16, requires_grad=True)
    module(input).sum().backward()
    assert input.grad is not None
    torch.testing.assert_close(input.grad, torch.ones(3, 32, dtype=BF16) @ module.weight)
    assert all(not parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("name", ["W4A16_ASYM", "FP8_DYNAMIC", "NVFP4A16"])
def test_copies_pickles_and_state_dicts_hold_the_same(name: str) -> None:
    module = compress(linear(48, 32, bias=True), name)
    input = torch.randn(3, 48, dtype=BF16)
    wanted = module(input)
    empty = compressed(
        linear(48, 32, bias=True),
        module.quantization_scheme,
        {part: (tuple(module._parameters[part].shape), module._parameters[part].dtype) for part in module.parts},
        BF16,
    )
    empty.load_state_dict(module.state_dict())
    for other in (empty, copy.deepcopy(module), pickled(module)):
        assert type(other) is CompressedLinear and torch.equal(other(input), wanted)
        assert set(other.state_dict()) == {"bias", *storage.layout(module.quantization_scheme, (32, 48), BF16)}
        assert other._parameters["weight_scale"] is not module._parameters["weight_scale"]


def test_inference_mode() -> None:
    module, input = compress(linear(48, 32), "W4A16"), torch.randn(3, 48, dtype=BF16)
    with torch.inference_mode():
        assert torch.equal(module(input), F.linear(input, module.weight))


@pytest.mark.parametrize("name", ["W4A16_ASYM", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16"])
def test_another_dtype_leaves_what_is_stored_in_a_few_bits(name: str) -> None:
    module = compress(linear(64, 32, bias=True), name)
    before = {part: value.detach().clone() for part, value in module.named_parameters()}
    module.to(torch.float32)
    after = dict(module.named_parameters())
    assert module.dtype == module.weight.dtype == after["bias"].dtype == torch.float32
    for part, value in before.items():
        if value.dtype.itemsize == 1 or part in ("weight_packed", "weight_shape", "weight_zero_point"):
            assert after[part].dtype == value.dtype and torch.equal(
                after[part].view(torch.uint8), value.view(torch.uint8)
            )
        elif part == "weight_global_scale":
            assert after[part].dtype == torch.float32 and torch.equal(after[part], value)
        else:
            assert after[part].dtype == torch.float32 and torch.equal(after[part], value.float())
    module.half().double()
    assert module.dtype == torch.float64 and module(torch.randn(2, 64, dtype=torch.float64)).dtype == torch.float64
    if name == "NVFP4A16":
        assert torch.equal(dict(module.named_parameters())["weight_global_scale"], before["weight_global_scale"])


@pytest.mark.parametrize("name", ["W4A16", "W8A8"])
def test_without_values_only_the_shape_is_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = compress(linear(48, 32), name).to("meta")
    monkeypatch.setattr(compressed_layers, "dequantize", None)
    assert module.weight.is_meta and module.weight.shape == (32, 48) and module.weight.dtype == BF16


def test_no_initial_values_are_drawn_for_it() -> None:
    assert CompressedLinear._is_hf_initialized and CompressedEmbedding._is_hf_initialized


@given(
    ids=st.lists(st.integers(0, 69), max_size=12),
    dims=st.sampled_from([1, 2, 3]),
    name=st.sampled_from(["W4A16", "W4A16_ASYM", "W3"]),
)
def test_embedding_reads_only_the_rows_asked_for(ids: list[int], dims: int, name: str) -> None:
    torch.manual_seed(0)
    module = compress(nn.Embedding(70, 48, padding_idx=3).to(BF16), name)
    input = torch.tensor(ids, dtype=torch.int64).reshape(*[1] * (dims - 1), -1)
    output = module(input)
    assert type(module) is CompressedEmbedding and output.shape == (*input.shape, 48)
    assert torch.equal(output, F.embedding(input, module.weight))


def test_embedding_touches_no_other_run_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    module = compress(nn.Embedding(320, 16).to(BF16), "W4A16")
    seen: list[slice] = []
    whole = compressed_layers.dequantize
    monkeypatch.setattr(
        compressed_layers, "dequantize", lambda module, rows=None: (seen.append(rows), whole(module, rows))[1]
    )
    module(torch.tensor([[5, 40], [41, 5]]))
    assert [(rows.start, rows.stop) for rows in seen] == [(0, 32), (32, 64)]


class Scaled(nn.Embedding):
    """As in Gemma: the class has a forward of its own, with a buffer."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("embed_scale", torch.tensor(8.0), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.embed_scale.to(self.weight.dtype)


class Grouped(nn.Linear):
    """As in DeepSeek-V4: the product is not that of a Linear."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.einsum("gi,goi->go", input, self.weight.view(2, -1, self.in_features))


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_a_class_keeps_its_own_forward() -> None:
    embedding = compress(Scaled(64, 48).to(BF16), "W4A16")
    ids = torch.tensor([1, 63, 1])
    assert isinstance(embedding, Scaled) and isinstance(embedding, CompressedEmbedding)
    assert torch.equal(embedding(ids), F.embedding(ids, embedding.weight) * 8)

    grouped, input = compress(Grouped(48, 32, bias=False).to(BF16), "W4A16"), torch.randn(2, 48, dtype=BF16)
    wanted = torch.stack([F.linear(row, part) for row, part in zip(input, grouped.weight.view(2, 16, 48), strict=True)])
    torch.testing.assert_close(grouped(input), wanted)

    doubled, plain = compress(Doubled(48, 32).to(BF16), "W8A8"), None
    plain = compress(linear(48, 32, bias=True), "W8A8")
    plain.load_state_dict(doubled.state_dict())
    assert torch.equal(doubled(input), 2 * plain(input)), "activations are rounded once, around the class's own forward"

    for module, argument in ((embedding, ids), (doubled, input)):
        for other in (copy.deepcopy(module), pickled(module)):
            assert type(other) is type(module) and torch.equal(other(argument), module(argument))


@pytest.mark.parametrize("symmetric", [True, False])
def test_activations_are_rounded_with_the_scale_that_was_found(symmetric: bool) -> None:
    weights, inputs = {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "strategy": "tensor"}
    scheme = QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=inputs | {"symmetric": symmetric}
    )
    old = linear(48, 32)
    parts = storage.layout(scheme, (32, 48), BF16)
    module = compressed(old, scheme, parts, BF16)
    out = {part: torch.zeros(shape, dtype=kind) for part, (shape, kind) in parts.items()}
    out["input_scale"].fill_(0.03)
    if not symmetric:
        out["input_zero_point"].fill_(-20)
    scale = old.weight.detach().abs().amax(1, keepdim=True) / 127.5
    storage.encode(old.weight.detach(), scheme, out, scale=scale)
    for part, value in out.items():
        module._parameters[part] = nn.Parameter(value, requires_grad=False)
    tokens = torch.randn(2, 6, 48, dtype=BF16) * 3
    rounded = fake_quantize(tokens, out["input_scale"], out.get("input_zero_point"), scheme.input_activations)
    assert not torch.equal(rounded, tokens)
    assert torch.equal(module(tokens), F.linear(rounded, module.weight))
    half = copy.deepcopy(module).half()
    assert half.input_scale.dtype == torch.float16 and ("input_zero_point" in parts) != symmetric
    assert symmetric or half.input_zero_point.dtype == torch.int8


def test_the_global_scale_of_inputs_stays_as_it_is() -> None:
    scheme = preset_name_to_scheme("NVFP4", ["Linear"])
    parts = storage.layout(scheme, (32, 48), BF16)
    module = compressed(linear(48, 32), scheme, parts, BF16)
    assert parts["input_global_scale"] == ((1,), torch.float32)
    assert module.half().input_global_scale.dtype == torch.float32


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_codes_are_not_cast(tiny_llama: Path, name: str) -> None:
    """`type` casts every tensor, codes too, which `to` and `half` leave alone."""
    recipe = [
        {"QuantizationModifier": {"targets": ["lm_head", "model.embed_tokens"], "scheme": "W4A16", "group_size": 32}}
    ]
    model = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe=recipe)
    module = next(module for path, module in model.named_modules() if path.endswith(name))
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"cannot become torch.float16, as model.type.*Write model.to\(torch.float16\)"
    ):
        module.type(torch.float16)
    assert all(torch.equal(module.state_dict()[key], value) for key, value in before.items())
    assert module.to(torch.float16).dtype == torch.float16
