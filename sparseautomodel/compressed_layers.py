"""Modules that hold their weight compressed: what stands in a model for a Linear or an Embedding.

They are put in place on the meta device with the stored tensors as their parameters, and filled by the loader. Then
`settle` lays out each weight for the fastest kernel that its device has. What they save are the stored tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from torch import nn
from torch.distributed.tensor import DTensor

from sparseautomodel.crossover import crossover
from sparseautomodel.float_inputs import StraightThrough, can_round, round_floats
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.kernels import Kernel, choose
from sparseautomodel.kernels.portable import Portable
from sparseautomodel.read_only import WRITTEN, ReadOnly

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
    if isinstance(module, CompressedLinear):
        module._run_by(Portable)
    return module


def settle(model: nn.Module) -> None:
    """Have each compressed Linear of `model` run by the fastest kernel there is for its scheme, shape and device.

    Its weight is laid out anew, one layer at a time. It is settled again when it is moved.
    """
    for module in model.modules():
        if isinstance(module, CompressedLinear):
            module.settle()


def kernels_of(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Full name of each compressed Linear -> what it runs on, and why others for its scheme were passed over."""
    return {
        name: (module.kernel.name, "; ".join(module.passed_over))
        for name, module in model.named_modules()
        if isinstance(module, CompressedLinear)
    }


class CompressedLinear(nn.Linear):
    """A Linear whose parameters are the stored tensors of its scheme, or those as a kernel lays them out.

    `weight` reads as the dequantized matrix `[out_features, in_features]`; each access computes it anew. `.to(dtype)`
    changes `dtype` and plain scales; what is stored in a few bits stays as it is. `state_dict` has the stored tensors.
    """

    dtype: torch.dtype
    parts: tuple[str, ...]
    """Names of the weight's stored tensors."""
    kernel: Kernel
    passed_over: tuple[str, ...]
    """Kernels for its scheme that cannot run it, with why."""
    _is_hf_initialized = True  # transformers must not draw initial values for it: every tensor comes from the files
    _own_forward = False
    _settled = False
    _most: int | None = None

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return _weight(self, (self.out_features, self.in_features))

    def __getattr__(self, name: str) -> Any:
        """The stored tensors under their names, also while a kernel has them laid out otherwise."""
        if name != "parts" and name in self.__dict__.get("parts", ()) and name not in self._parameters:
            return self.stored()[name]
        return super().__getattr__(name)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self._own_forward or self.kernel.rounds_inputs):
            input = round_activations(self, input, "input")
        flat = input.reshape(-1, input.shape[-1])
        if torch.is_grad_enabled() and (flat.requires_grad or (self.bias is not None and self.bias.requires_grad)):
            output = _Multiplication.apply(flat, self.bias, self)
        else:
            output = _multiplied(self, flat)
        output = output.view(*input.shape[:-1], self.out_features)
        return output if self._own_forward else round_activations(self, output, "output")

    def settle(self) -> None:
        """Have the fastest kernel there is, and its layout. For the compressed layers of a model: `settle(model)`."""
        if any(isinstance(value, DTensor) for value in self._parameters.values()):
            self.passed_over = ("others: the layer is shared by several processes, as it is stored",)
            return
        self._unsettle()
        old = self.kernel
        self.kernel, self.passed_over = choose(old.scheme, old.shape, old.dtype, old.device, self._own_forward)
        self._settled, self._most = True, None
        stored: Any = self._parameters
        self._hold(self.kernel.lay_out({name: stored[name].detach() for name in self.parts}))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        dense = param is not None and param.is_floating_point() and param.dtype.itemsize > 1
        if name == "weight" and (dense or "weight" not in self.parts):
            raise ValueError(WRITTEN)
        super().register_parameter(name, param)

    def stored(self) -> dict[str, torch.Tensor]:
        """The weight's tensors as they are stored, by their local names."""
        held = {name: value.detach() for name, value in self._parameters.items() if value is not None}
        restored = self.kernel.restore(held)
        return {name: restored[name] for name in self.parts}

    def _run_by(self, kind: type[Kernel]) -> Kernel:
        held: Any = self._parameters
        shape, device = (self.out_features, self.in_features), held[self.parts[0]].device
        self.kernel, self.passed_over = kind(self.quantization_scheme, shape, self.dtype, device), ()
        return self.kernel

    def _unsettle(self) -> None:
        """Hold the stored tensors again."""
        if not isinstance(self.kernel, Portable):
            self._hold(self.stored())
        self._run_by(Portable)

    def _hold(self, weight: Mapping[str, torch.Tensor]) -> None:
        """Have these parameters for the weight, in place of those there are."""
        for name in [name for name in self._parameters if name.startswith("weight") and name not in weight]:
            del self._parameters[name]
        for name, tensor in weight.items():
            held = self._parameters.get(name)
            if held is None or held.data_ptr() != tensor.data_ptr() or held.shape != tensor.shape:
                self._parameters[name] = nn.Parameter(tensor, requires_grad=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        _check_cast(fn)
        self._unsettle()
        super()._apply(_keeping_codes(self, fn), recurse)
        self._run_by(Portable)
        if self._settled:
            self.settle()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self._as_stored(), destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._unsettle()
        super()._load_from_state_dict(*args, **kwargs)
        self._run_by(Portable)
        if self._settled:
            self.settle()

    def _as_stored(self) -> Any:
        """This module as it would be with the stored tensors, sharing all else."""
        if isinstance(self.kernel, Portable):
            return self
        shadow = object.__new__(type(self))
        rest = {name: value for name, value in self._parameters.items() if not name.startswith("weight")}
        weight = {name: nn.Parameter(value, requires_grad=False) for name, value in self.stored().items()}
        shadow.__dict__ = self.__dict__ | {"_parameters": weight | rest}
        return shadow

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _hollow, _bases(type(self)), self.__dict__


class _Multiplication(torch.autograd.Function):
    """The layer's product with a gradient to its input and bias: the weight is dequantized again, not kept for it.

    Rounded activations pass the gradient as if they had not been rounded.
    """

    @staticmethod
    def forward(ctx: Any, flat: torch.Tensor, bias: torch.Tensor | None, module: CompressedLinear) -> torch.Tensor:
        # Of a shared layer, the module holds this process's part during forward alone.
        ctx.kernel, ctx.tensors, ctx.dtype = module.kernel, dict(module._parameters), flat.dtype
        return _multiplied(module, flat)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        kernel, tensors = ctx.kernel, ctx.tensors
        to_input = to_bias = None
        if ctx.needs_input_grad[0]:
            to_input = gradient.new_zeros(len(gradient), kernel.shape[1])
            for rows in kernel.tiles():
                to_input += gradient[:, rows] @ kernel.dequantize(tensors, rows).to(gradient.dtype)
            to_input = to_input.to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            to_bias = gradient.sum(0).to(tensors["bias"].dtype)
        return to_input, to_bias, None


def _multiplied(module: CompressedLinear, flat: torch.Tensor) -> torch.Tensor:
    """`flat [tokens, in_features]` times the weight of `module`, plus its bias."""
    tensors: Any = module._parameters
    kernel = module.kernel
    if torch.is_autocast_enabled(flat.device.type):
        flat = flat.to(torch.get_autocast_dtype(flat.device.type))
    tokens = len(flat)
    if tokens == 0 or flat.dtype != kernel.dtype or not _are_few(module, tokens):
        return kernel.many(tensors, flat, module.bias)
    output = kernel.few(tensors, flat)
    return output if module.bias is None else output.add_(module.bias)


def _are_few(module: CompressedLinear, tokens: int) -> bool:
    """Whether so many tokens are multiplied as a few: known without a measurement, or measured once."""
    low, high = module.kernel.between
    if tokens <= low or tokens >= high:
        return tokens <= low
    if module._most is None:
        if torch.compiler.is_compiling():
            return False
        module._most = _measured(module)
    return tokens <= module._most


def _measured(module: CompressedLinear) -> int:
    tensors: Any = module._parameters
    kernel = module.kernel
    weights = kernel.scheme.weights

    def ways() -> tuple[Callable[[int], Any], Callable[[int], Any]]:
        flat = torch.linspace(-1, 1, kernel.between[1] * kernel.shape[1], device=kernel.device).to(kernel.dtype)
        flat = flat.view(-1, kernel.shape[1])  # no random numbers: those are the caller's
        return lambda count: kernel.few(tensors, flat[:count]), lambda count: kernel.many(tensors, flat[:count], None)

    name = f"{kernel.name}, {weights.strategy} {weights.group_size}, {kernel.shape}, {kernel.dtype}"
    return crossover(name, kernel.device, kernel.between, ways)


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
        _check_cast(fn)
        return super()._apply(_keeping_codes(self, fn), recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _hollow, _bases(type(self)), self.__dict__


def dequantize(module: Any, rows: slice | None = None) -> torch.Tensor:
    """The dense weight `[out_features, in_features]` of a compressed module, or a run of rows from a multiple of 64."""
    if isinstance(module, CompressedLinear):
        held: Any = module._parameters
        return module.kernel.dequantize(held, rows)
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
            return round_activations(
                self, own(self, round_activations(self, input, "input"), *args, **kwargs), "output"
            )

        body |= {"forward": forward, "_own_forward": True}
    return type(f"Compressed{base.__name__}", (base, kind), body)


def _bases(cls: type) -> tuple[type]:
    """What `_hollow` needs to make an instance of `cls`, which pickle cannot find by name if it was made here."""
    return (cls if cls in (CompressedLinear, CompressedEmbedding) else cls.__bases__[0],)


def _hollow(base: type) -> Any:
    """An instance without state, for pickle and deepcopy to fill."""
    return object.__new__(base if base in (CompressedLinear, CompressedEmbedding) else _class_like(base))


def round_activations(module: Any, values: Any, which: str) -> Any:
    """Activations, `which` is `input` or `output`, rounded as the scheme of `module` says, each token by itself.

    `module` is whatever has a `quantization_scheme`, a `quantization_status` and, where they were found beforehand,
    `input_scale` and so on.
    """
    args = getattr(module.quantization_scheme, f"{which}_activations")
    if args is None:
        return values
    flat = values.detach().reshape(-1, values.shape[-1])
    if can_round(args, values.dtype) and values.numel():
        found = (getattr(module, f"{which}_{kind}", None) for kind in ("scale", "global_scale"))
        rounded = round_floats(flat, args, *found).view(values.shape)
    else:
        # Three dimensions: compressed-tensors takes the scale of a 2-D input over all tokens together.
        rounded = forward_quantize(module, flat.unsqueeze(0), which, args).reshape(values.shape)
    return StraightThrough.apply(values, rounded) if values.requires_grad and torch.is_grad_enabled() else rounded


def _check_cast(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise ValueError where integers are to become other numbers: those of a compressed weight are codes."""
    made = fn(torch.empty(0, dtype=torch.uint8)).dtype
    if made != torch.uint8:
        raise ValueError(
            f"weights that are stored compressed cannot become {made}, as model.type({made}) wants of all tensors. "
            f"Write model.to({made if made.is_floating_point else torch.bfloat16}), which leaves stored codes as they "
            "are, or load with execution='dense'"
        )


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
    shared = module._parameters.get("weight")
    if isinstance(shared, DTensor):
        return shared  # whoever shares the layer among processes looks for the parameter under its name
    if any(
        value.is_meta for name, value in module._parameters.items() if name.startswith("weight")
    ):  # loaders look at it before there are values
        return torch.empty(shape, dtype=module.dtype, device="meta")
    values = dequantize(module)
    if type(values) is torch.Tensor and not torch.compiler.is_compiling():  # others have a subclass of their own
        values = values.as_subclass(ReadOnly)
    values._is_hf_initialized = True  # type: ignore[attr-defined]
    return values
