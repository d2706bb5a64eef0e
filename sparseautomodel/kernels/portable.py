"""Run a layer from its compressed tensors on any device: a tile of rows is dequantized, used and dropped.

Memory stays that of the compressed tensors plus one tile, whatever the scheme. Speed is that of dequantizing the weight
once a call, so it suits many tokens at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from sparseautomodel.formats import compressed_tensors as storage

TILE_ELEMENTS = 1 << 22
"""Weights dequantized at a time: 8 MB of bfloat16."""

Parts = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Local tensor name -> shape and dtype, as they are stored for one layer."""


def compressed(old: nn.Module, scheme: QuantizationScheme, parts: Parts, dtype: torch.dtype) -> Any:
    """A module like `old`, a Linear or Embedding, that holds its weight as the stored tensors `parts` of `scheme`.

    All else stays: bias, attributes, buffers, submodules, and `forward` where the class of `old` has its own. The new
    parameters are empty, on the current device. `dtype` is that of the weight when it is read, and of an embedding's
    output.
    """
    cls: Any = type(old)
    module: Any = object.__new__(_class_like(cls))
    module.__dict__ = {name: value for name, value in vars(old).items() if name != "forward"}
    module._parameters = {name: value for name, value in old._parameters.items() if name != "weight"}
    module.dtype, module.parts = dtype, tuple(name for name in parts if name.startswith("weight"))
    module.quantization_scheme, module.quantization_status = scheme, QuantizationStatus.COMPRESSED
    for name, (shape, kind) in parts.items():
        module._parameters[name] = nn.Parameter(torch.empty(shape, dtype=kind), requires_grad=False)
    return module


class CompressedLinear(nn.Linear):
    """A Linear whose parameters are the stored tensors of its scheme, made by `compressed`.

    `weight` reads as the dequantized matrix `[out_features, in_features]`; each access computes it anew. `.to(dtype)`
    changes `dtype` and plain scales; what is stored in a few bits stays as it is.
    """

    dtype: torch.dtype
    _is_hf_initialized = True  # transformers must not draw initial values for it: every tensor comes from the files
    _rounds_activations = True

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return _weight(self, (self.out_features, self.in_features))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._rounds_activations:
            input = _rounded(self, input, "input")
        flat = input.reshape(-1, input.shape[-1])
        tiles = [
            F.linear(flat, dequantize(self, rows).to(flat.dtype), None if self.bias is None else self.bias[rows])
            for rows in _tiles(self.out_features, self.in_features)
        ]
        output = tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=-1)
        output = output.reshape(*input.shape[:-1], self.out_features)
        return _rounded(self, output, "output") if self._rounds_activations else output

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return super()._apply(_keeping_codes(self, fn), recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _hollow, _bases(type(self)), self.__dict__


class CompressedEmbedding(nn.Embedding):
    """An Embedding whose parameters are the stored tensors of its scheme, made by `compressed`.

    Only the rows asked for are dequantized, in the runs in which they are stored.
    """

    dtype: torch.dtype
    _is_hf_initialized = True

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return _weight(self, (self.num_embeddings, self.embedding_dim))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows, inverse = torch.unique(input, return_inverse=True)
        values = torch.empty(len(rows), self.embedding_dim, dtype=self.dtype, device=input.device)
        # Zero points are packed along rows, so rows are dequantized in the runs of 32 in which they are stored.
        runs = torch.unique(rows // storage.PACKED_ROWS)
        for run in runs.tolist():
            start = run * storage.PACKED_ROWS
            mine = rows // storage.PACKED_ROWS == run
            block = dequantize(self, slice(start, min(start + storage.PACKED_ROWS, self.num_embeddings)))
            values[mine] = block[rows[mine] - start].to(self.dtype)
        return values[inverse]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return super()._apply(_keeping_codes(self, fn), recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _hollow, _bases(type(self)), self.__dict__


class CompressedExperts(nn.Module):
    """The experts of a mixture, each projection a layer under the name it has in the files, compressed or dense.

    Stands in for a fused experts module of transformers 5 (`forward(hidden_states, top_k_index, top_k_weights)`), whose
    attributes and gate it takes over. `layers` are named `0.gate_proj`; `inner` are the projections whose outputs, side
    by side, the activation takes, `outer` the one after it.
    """

    _is_hf_initialized = True

    def __init__(self, fused: Any, layers: Mapping[str, nn.Module], inner: Sequence[str], outer: str) -> None:
        super().__init__()
        self.num_experts: int
        self.act_fn: Any
        for name, value in [*vars(fused).items(), *fused.named_children()]:
            if not name.startswith("_") and name != "forward":
                setattr(self, name, value)
        gated = getattr(fused, "has_gate", True)
        self._gate: Any = getattr(type(fused), "_apply_gate", None) if gated else None
        self._inner, self._outer = tuple(inner), outer
        for name, layer in layers.items():
            expert, _, projection = name.partition(".")
            if expert not in self._modules:
                self.add_module(expert, nn.Module())
            self.get_submodule(expert).add_module(projection, layer)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        result = torch.zeros_like(hidden_states)
        for number in torch.unique(top_k_index).tolist():
            if number >= self.num_experts:
                continue  # the index that expert parallelism gives to experts of other ranks
            token, position = torch.where(top_k_index == number)
            expert = self.get_submodule(str(number))
            states = hidden_states[token]
            inner = [expert.get_submodule(name)(states) for name in self._inner]
            states = expert.get_submodule(self._outer)(self._activate(inner))
            states = states * top_k_weights[token, position, None]
            result.index_add_(0, token, states.to(result.dtype))
        return result

    def _activate(self, inner: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._gate is not None:
            return self._gate(self, torch.cat(list(inner), dim=-1))
        return self.act_fn(inner[0]) * inner[1] if len(inner) > 1 else self.act_fn(inner[0])


def dequantize(module: Any, rows: slice | None = None) -> torch.Tensor:
    """The dense weight `[out_features, in_features]` of a compressed module, or a run of rows from a multiple of 32."""
    parts = {name: module._parameters[name].detach() for name in module.parts}
    return storage.decode(parts, module.quantization_scheme, rows, dtype=module.dtype)


@functools.cache
def _class_like(base: type) -> type:
    """`base` with its weight compressed: a class of this file where `base` is torch's own, else one made of both."""
    kind = CompressedEmbedding if issubclass(base, nn.Embedding) else CompressedLinear
    if base in (nn.Linear, nn.Embedding):
        return kind
    # Its buffers may be filled by the model's `_init_weights`, which leaves alone what is marked as loaded.
    body: dict[str, Any] = {"__module__": base.__module__, "_is_hf_initialized": False}
    own: Any = base.forward  # type: ignore[attr-defined]
    if kind is CompressedLinear and own is not nn.Linear.forward:

        def forward(self: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return _rounded(self, own(self, _rounded(self, input, "input"), *args, **kwargs), "output")

        body |= {"forward": forward, "_rounds_activations": False}
    return type(f"Compressed{base.__name__}", (base, kind), body)


def _bases(cls: type) -> tuple[type]:
    """What `_hollow` needs to make an instance of `cls`, which pickle cannot find by name if it was made here."""
    return (cls if cls in (CompressedLinear, CompressedEmbedding) else cls.__bases__[0],)


def _hollow(base: type) -> Any:
    """An instance without state, for pickle and deepcopy to fill."""
    return object.__new__(base if base in (CompressedLinear, CompressedEmbedding) else _class_like(base))


def _rounded(module: Any, values: Any, which: str) -> Any:
    """Activations rounded as the scheme of `module` says, each token by itself."""
    args = getattr(module.quantization_scheme, f"{which}_activations")
    if args is None:
        return values
    # Three dimensions: compressed-tensors takes the scale of a 2-D input over all tokens together.
    flat = values.reshape(1, -1, values.shape[-1])
    return forward_quantize(module, flat, which, args).reshape(values.shape)


def _keeping_codes(module: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """`fn` as `nn.Module._apply` has it, for modules whose tensors may move but not all change their dtype."""
    fixed = {id(value) for name, value in module._parameters.items() if name.endswith("global_scale")}
    module.dtype = fn(torch.empty(0, dtype=module.dtype)).dtype

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype.itemsize > 1 and id(tensor) not in fixed:
            return fn(tensor)
        as_integers = torch.uint8 if tensor.dtype.itemsize == 1 else torch.int32
        return fn(tensor.view(as_integers)).view(tensor.dtype)

    return apply


def _weight(module: Any, shape: tuple[int, int]) -> torch.Tensor:
    if any(module._parameters[name].is_meta for name in module.parts):  # loaders look at it before there are values
        stored = module._parameters.get("weight")
        return stored if isinstance(stored, DTensor) else torch.empty(shape, dtype=module.dtype, device="meta")
    values = dequantize(module)
    values._is_hf_initialized = True  # type: ignore[attr-defined]
    return values


def _tiles(rows: int, columns: int) -> list[slice]:
    step = max(storage.PACKED_ROWS, TILE_ELEMENTS // max(columns, 1) // storage.PACKED_ROWS * storage.PACKED_ROWS)
    return [slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]
