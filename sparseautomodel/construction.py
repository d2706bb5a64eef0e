"""What happens while constructors run under `init_module`: where tensors are made, in which dtype, what is left out.

All of it is a torch function mode, which belongs to the thread that entered it: nothing of torch is replaced.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from sparseautomodel.frames import arguments, constructors, in_contract
from sparseautomodel.numbers import poison
from sparseautomodel.random_values import drawing

ATTRIBUTE = "_construction"
"""Where a module that was built empty keeps what its constructor did, until it has values."""

_TYPED: set[Any] = {
    torch.empty,
    torch.empty_permuted,
    torch.empty_strided,
    torch.ones,
    torch.zeros,
    torch.rand,
    torch.randn,
    torch.eye,
    torch.linspace,
    torch.logspace,
    torch.scalar_tensor,
    torch.bartlett_window,
    torch.blackman_window,
    torch.hamming_window,
    torch.hann_window,
    torch.kaiser_window,
    torch.fft.fftfreq,
    torch.fft.rfftfreq,
}
"""What makes a tensor of the default dtype."""
_UNTYPED: set[Any] = {
    torch.full,
    torch.arange,
    torch.range,
    torch.tensor,
    torch.as_tensor,
    torch.asarray,
    torch.randint,
    torch.randperm,
    torch.tril_indices,
    torch.triu_indices,
}
"""What makes a tensor whose dtype is that of the values given."""
_FACTORIES = _TYPED | _UNTYPED
_RANDOM = {"rand", "randn", "normal", "normal_", "uniform_", "rand_like", "randn_like"}
_READING = {"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__"}
"""What makes numbers of Python's, or of numpy's, of a tensor."""
_KEEPING = {"requires_grad_", "detach_", "share_memory_"}
"""What ends like a change of values and is none."""
_CASTS = {"to", "type", "type_as", "float", "double", "half", "bfloat16", "view", "__get__", "__set__"}


@dataclass
class _Call:
    """One call that made or changed tensors on the meta device."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    written: tuple[Tensor, ...]
    in_contract: bool = True
    """Whether a method of initialization made it, and not a constructor that sets what its parts have set before."""
    maker: weakref.ReferenceType[nn.Module] | None = None
    """The module whose constructor made it."""


@dataclass
class Built:
    """What a module that was built empty knows of its construction: the calls, and its constructor's arguments."""

    construction: Construction | None = None
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Built:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Built, ()  # it does not outlive the process


@dataclass(eq=False)
class Construction(TorchFunctionMode):
    """The mode: makes tensors on `device` and in `dtype` where the constructor does not say; with `empty`, on the meta
    device, where init functions are noted and not run.

    Values that a constructor computes are known all the same: `replay` computes them when they are wanted.
    """

    device: torch.device | None
    dtype: torch.dtype | None
    empty: bool = False
    place: torch.device | None = None
    """Where `materialize` is to put what is built empty; `mesh` and `seed` are for it too."""
    mesh: DeviceMesh | None = None
    seed: int | None = None
    calls: list[_Call] = field(default_factory=list)
    draws: int = 0
    running: bool = False
    """Whether a function of torch is running that the mode has seen."""

    def __post_init__(self) -> None:
        TorchFunctionMode.__init__(self)
        self._legacy = _LegacyConstructors(self)

    def __enter__(self) -> Any:
        self._legacy.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._legacy.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.running = True
        try:
            return self._call(func, args, dict(kwargs or {}))
        finally:
            self.running = False

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if self.empty and getattr(func, "__module__", None) == "torch.nn.init":
            tensor: Tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if tensor.is_meta:
                self._append(func, args, kwargs, None, (tensor,))
                return tensor
            return self._draw(func, args, kwargs)
        if func in _FACTORIES or (func is torch.normal and not _tensors(args, kwargs)):
            self._mark()
            if kwargs.get("device") is None and self.device is not None:
                kwargs["device"] = self.device
        if func in _TYPED and kwargs.get("dtype") is None and self.dtype is not None:
            kwargs["dtype"] = self.dtype
        if not self.empty:
            return self._typed(func, name, args, kwargs)[-1]
        if name in _RANDOM and not _on_meta(args, kwargs):
            return self._draw(func, args, kwargs)
        if name in _READING and isinstance(args[0], Tensor) and args[0].is_meta:
            (value,) = self._draw(self.replay, ([args[0]],), {})
            return func(args[0] if value is None else value, *args[1:], **kwargs)
        func, args, kwargs, result = self._typed(func, name, args, kwargs)
        self._note(func, name, args, kwargs, result)
        return result

    def replay(self, tensors: Iterable[Tensor]) -> list[Tensor | None]:
        """The values that the constructors gave these tensors of the meta device, on the CPU.

        None for one that they left as memory without values, or that was not made here. What is random is drawn anew,
        from the mode that the caller is in.
        """
        tensors = list(tensors)
        storages = {_storage(tensor) for tensor in tensors}
        wanted = []
        for call in reversed(self.calls):
            touched = [*call.written, *_tensors(call.result)]
            if any(_storage(tensor) in storages for tensor in touched):
                wanted.append(call)
                storages |= {_storage(tensor) for tensor in _tensors(call.args, call.kwargs) if tensor.is_meta}
        known: dict[Any, Tensor] = {}
        hollow: set[int] = set()
        with torch.no_grad():
            for call in reversed(wanted):
                _run(call, known, hollow)
        found = [known.get(_place(tensor)) for tensor in tensors]
        return [None if value is None or _storage(value) in hollow else value for value in found]

    def changed_outside(self, tensor: Tensor) -> bool:
        """Whether a constructor changed a tensor after the module that has it was initialized."""
        place = _storage(tensor)
        return any(not call.in_contract and any(_storage(one) == place for one in call.written) for call in self.calls)

    def maker(self, tensor: Tensor) -> nn.Module | None:
        """The module whose constructor made a tensor, whichever modules have it now."""
        place = _storage(tensor)
        made = (call.maker for call in self.calls if any(_storage(one) == place for one in _tensors(call.result)))
        return next((maker() for maker in made if maker is not None), None)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Random values of tensors that a constructor places itself: from a seed, torch's random state is not used."""
        self.draws += 1
        with drawing({}, (self.seed or 0) + self.draws):
            return func(*args, **kwargs)

    def _typed(self, func: Any, name: str, args: Any, kwargs: Any) -> tuple[Any, Any, dict[str, Any], Any]:
        """The result in `dtype` where it would have torch's default dtype for want of any other, and the call made."""
        result = func(*args, **kwargs)
        usual = torch.get_default_dtype()
        if self.dtype in (None, usual) or not isinstance(result, Tensor) or result.dtype != usual:
            return func, args, kwargs, result
        if func in _UNTYPED:
            if kwargs.get("dtype") is None and not hasattr(args[0], "dtype"):
                kwargs = kwargs | {"dtype": self.dtype}
                result = func(*args, **kwargs)
            return func, args, kwargs, result
        leaves = tree_flatten((args, kwargs))[0]
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        decided = name in _CASTS or any(isinstance(leaf, torch.dtype) for leaf in leaves)
        if not inputs or decided or any(one.is_floating_point() or one.is_complex() for one in inputs):
            return func, args, kwargs, result
        if all(one.dtype == torch.bool for one in inputs):
            self._note(func, name, args, kwargs, result)
            return self._typed(torch.Tensor.to, "to", (result, self.dtype), {})
        # Integers become the default dtype before they are divided.
        args, kwargs = tree_map(self._widened, (args, kwargs))
        return func, args, kwargs, func(*args, **kwargs)

    def _widened(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype == torch.bool:
            return value
        wide = value.to(self.dtype)
        self._note(torch.Tensor.to, "to", (value, self.dtype), {}, wide)
        return wide

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        written: tuple[Tensor, ...] = ()
        in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")
        if in_place and name not in _KEEPING and args and isinstance(args[0], Tensor):
            written = (args[0],)
        if not self.empty or not any(tensor.is_meta for tensor in (*written, *_tensors(result))):
            return
        if name == "__deepcopy__":
            func, args, kwargs = torch.clone, args[:1], {}
        self._append(func, args, kwargs, result, written)

    def _append(self, *call: Any) -> None:
        """The objects of the module get values in time: what is noted are others, in the same place."""
        func, args, kwargs, result, written = tree_map(_alias, call)
        # The frame is in no variable: it would hold itself, and with it every tensor in it.
        maker = next((weakref.ref(module) for _, module in constructors(sys._getframe())), None)
        contract = not written or in_contract(sys._getframe())
        self.calls.append(_Call(func, args, kwargs, result, written, contract, maker))

    def _mark(self) -> None:
        """Let the modules whose constructors are running know of this construction."""
        if not self.empty:
            return
        for number, (frame, module) in enumerate(constructors(sys._getframe(2))):
            own = vars(module)
            if ATTRIBUTE not in own and "_forward_pre_hooks" in own:
                own[ATTRIBUTE] = Built(self)
                if not number:
                    module.register_forward_pre_hook(refuse_empty, with_kwargs=True)
            if ATTRIBUTE in own and frame.f_code is getattr(type(module).__init__, "__code__", None):
                own[ATTRIBUTE].arguments = own[ATTRIBUTE].arguments or arguments(frame)


class _LegacyConstructors(TorchDispatchMode):
    """`torch.Tensor(n)` and `torch.FloatTensor(n)`, which no function mode sees, on the device of a construction."""

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, construction = kwargs or {}, self._construction
        if construction.running or construction.device is None or func is not torch.ops.aten.empty.memory_format:
            return func(*args, **kwargs)
        made = func(*args, **kwargs | {"device": construction.device})
        construction._mark()
        construction._note(torch.empty, "empty", args, {"dtype": made.dtype}, made)
        return made


def refuse_empty(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward hook of modules that were built empty: values in, none inside, is an error. It removes itself."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    hollow = [name for name, value in own if value.is_meta]
    if not hollow:
        forget(module)
    elif any(not tensor.is_meta for tensor in _tensors(args, kwargs)):
        raise ValueError(
            f"forward of {type(module).__name__}, which was built empty: {', '.join(hollow)} have no values. "
            "Load a checkpoint into the model, or call materialize(model), before it is run"
        )


def forget(module: nn.Module) -> None:
    """Remove what construction left on this one module."""
    vars(module).pop(ATTRIBUTE, None)
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is refuse_empty]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def constructions(module: nn.Module) -> list[Construction]:
    """The constructions that made the modules inside `module`."""
    found = [vars(one).get(ATTRIBUTE) for one in module.modules()]
    return list(dict.fromkeys(built.construction for built in found if built is not None and built.construction))


def rebuilt(module: nn.Module) -> tuple[nn.Module, Construction] | None:
    """This one module built once more, empty, from its constructor's arguments; None where they are not known."""
    built = vars(module).get(ATTRIBUTE)
    arguments = built.arguments if built is not None else None
    if arguments is None:
        return None
    again = Construction(torch.device("meta"), None, empty=True)
    with contextlib.suppress(Exception), again:  # whatever a constructor raises, its values are then not known
        return type(module)(*arguments[0], **arguments[1]), again
    return None


def _run(call: _Call, known: dict[Any, Tensor], hollow: set[int]) -> None:
    """Do one call on the CPU, on the values that are known. `hollow` are the storages without values."""
    if any(one.is_meta and _place(one) not in known for one in _tensors(call.args, call.kwargs)):
        return
    args, kwargs = tree_map(lambda value: _real(value, known), (call.args, call.kwargs))
    if call.func in _FACTORIES:
        kwargs["device"] = "cpu"
    name, result = getattr(call.func, "__name__", ""), call.func(*args, **kwargs)
    valued = name.endswith("_like") or name.startswith("new_") or call.func in _FACTORIES
    without = any(_storage(one) in hollow for one in _tensors(args, kwargs)) and not valued
    for meta, real in zip(_tensors(call.result), _tensors(result) if call.result is not None else [], strict=True):
        known[_place(meta)] = real
        if name.startswith(("empty", "new_empty")):
            poison(real)
        if without or name.startswith(("empty", "new_empty")):
            hollow.add(_storage(real))
    for meta in call.written:
        hollow.discard(_storage(known[_place(meta)]))


def _alias(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _real(value: Any, known: Mapping[Any, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return known[_place(value)] if value.is_meta else value
    if isinstance(value, torch.device) and value.type == "meta":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value == "meta" else value


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """What a tensor is a view of, and where: the same for a parameter and the tensor that it was made from."""
    return _storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(*values: Any) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]


def _on_meta(args: Any, kwargs: dict[str, Any]) -> bool:
    inputs = _tensors(args, kwargs)
    return inputs[0].is_meta if inputs else torch.device(kwargs.get("device") or "cpu").type == "meta"
