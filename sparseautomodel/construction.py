"""What happens while constructors run under `init_module`: where tensors are made, in which dtype, what is left out.

All of it is a torch function mode, which belongs to the thread that entered it: nothing of torch is replaced.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from sparseautomodel.frames import arguments, constructors, in_contract, line
from sparseautomodel.random_values import drawing
from sparseautomodel.recorded import Call, Record, kept, rebind, tensors_in
from sparseautomodel.writes import storage, targets_of

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
_RANDOM = {
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "rand_like", "randn_like"),
    *("randint_like", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_", "log_normal_"),
    "cauchy_",
}
_READING = {"item", "tolist", "numpy", "cpu", "__array__"}
_READING |= {"__bool__", "__int__", "__float__", "__index__", "__complex__"}
"""What makes numbers of Python's, or of numpy's, of a tensor."""
_PROPERTIES = {
    getattr(Tensor, name).__get__
    for name in ("device", "dtype", "shape", "is_meta", "requires_grad", "ndim", "grad", "layout", "is_leaf", "grad_fn")
}
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_CONSTANT = {"constant_", "dirac_", "ones_", "zeros_", "eye_"}
_KEEPING = {"requires_grad_", "detach_", "share_memory_"}
"""What ends like a change of values and is none."""
_CASTS = {"to", "type", "type_as", "float", "double", "half", "bfloat16", "view", "__get__", "__set__"}


@dataclass
class Built:
    """What a module that was built empty knows of its construction: the calls, and its constructor's arguments."""

    construction: Construction | None = None
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Its own parameters and buffers when the construction ended."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Built:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Built, ()  # it does not outlive the process


@dataclass(eq=False)
class Construction(TorchFunctionMode):
    """The mode: makes tensors on `device` and in `dtype` where the constructor does not say; with `empty`, on the meta
    device, where init functions are noted and not run.

    Values that a constructor computes are known all the same: `record` computes them when they are wanted.
    """

    device: torch.device | None
    dtype: torch.dtype | None
    empty: bool = False
    place: torch.device | None = None
    """Where `materialize` is to put what is built empty; `mesh` and `seed` are for it too."""
    mesh: DeviceMesh | None = None
    seed: int | None = None
    record: Record = field(default_factory=Record)
    draws: int = 0
    running: bool = False
    """Whether a function of torch is running that the mode has seen."""
    noting: bool = False
    """Whether an operator is being noted."""
    written: list[Tensor] = field(default_factory=list)
    """What that function has written to so far."""
    is_random: bool = False
    """Whether it has drawn random values."""

    def __post_init__(self) -> None:
        TorchFunctionMode.__init__(self)
        self._operators = _Operators(self)
        self._modules: list[weakref.ReferenceType[nn.Module]] = []
        self._before: dict[int, Tensor] = {}
        """Tensors that the running function was given -> what they were."""

    def __enter__(self) -> Any:
        self._operators.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operators.__exit__(*error)
        for reference in self._modules:
            module = reference()
            if module is not None and ATTRIBUTE in vars(module):
                own: dict[str, Any] = {**module._parameters, **module._buffers}
                held = {key: kept(one) for key, one in own.items() if one is not None and one.is_meta}
                vars(module)[ATTRIBUTE].tensors = held
        self._modules.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.noting or func in _PROPERTIES:
            if self.empty and func == _IS_META and args[0].is_meta:
                self._skipped(args[0], sys._getframe(1))
            return func(*args, **(kwargs or {}))
        self.running, self.is_random, self.written = True, False, []
        self._before = self._look(args, kwargs) if self.empty else {}
        try:
            return self._call(func, args, dict(kwargs or {}))
        finally:
            self.running = False

    def _look(self, *given: Any) -> dict[int, Tensor]:
        found = {id(one): one.detach() for one in tensors_in(given) if one.is_meta}
        for one in found.values():
            self.record.look(one)
        return found

    def _skipped(self, tensor: Tensor, frame: FrameType) -> None:
        """Functions of `torch.nn.init` that ask whether a tensor is on the meta device do nothing if it is."""
        if frame.f_globals.get("__name__") != "torch.nn.init" or self.noting:
            return
        code, values = frame.f_code, frame.f_locals
        func = getattr(torch.nn.init, code.co_name)
        kwargs = {name: values[name] for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
        self._before, self.is_random = {}, code.co_name not in _CONSTANT
        self._append(func, (), kwargs, None, (tensor,))

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if self.empty and getattr(func, "__module__", None) == "torch.nn.init":
            tensor: Tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if tensor.is_meta:
                self.is_random = name not in _CONSTANT
                self._append(func, args, kwargs, None, (tensor,))
                return tensor
            return self._draw(func, args, kwargs)
        if func in _FACTORIES or (func is torch.normal and not tensors_in(args, kwargs)):
            self._mark()
            if kwargs.get("device") is None and self.device is not None:
                kwargs["device"] = self.device
        if func in _TYPED and kwargs.get("dtype") is None and self.dtype is not None:
            kwargs["dtype"] = self.dtype
        if not self.empty:
            return self._typed(func, name, args, kwargs)[-1]
        if name in _RANDOM and not _on_meta(args, kwargs):
            return self._draw(func, args, kwargs)
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if name in _READING or (name == "to" and _leaves_meta(args[1:], kwargs)):
                return self._read(func, name, args, kwargs)
            if func == _SET_DATA:
                return self._rebind(*args)
        func, args, kwargs, result = self._typed(func, name, args, kwargs)
        self._note(func, name, args, kwargs, result)
        return result

    def _read(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Numbers out of a tensor: of the values that it would have by now."""
        value = self.record.read(args[0], name, line(sys._getframe()), self.seed or 0)
        if value is None:
            raise ValueError(
                f"{name} of a tensor without values, {tuple(args[0].shape)}, in {line(sys._getframe())}: what it holds "
                "is not known while a module is built empty. Build it with values: init_module() without empty_weights"
            )
        found = func(value, *args[1:], **kwargs)
        if isinstance(found, np.ndarray):  # writes to it would not reach the tensor
            found.setflags(write=False)
        return found

    def _rebind(self, tensor: Tensor, value: Tensor) -> None:
        """`tensor.data = value`"""
        if not value.is_meta:
            empty = torch.empty_like(value, device="meta")
            self._append(torch.clone, (value,), {}, empty, ())
            value = empty
        _SET_DATA(tensor, value)
        self._append(rebind, (value,), {}, None, (tensor,))

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
        if not self.empty:
            return
        own = set(self._before)
        places = {storage(one) for one in self._before.values()}
        written = [one for one in self.written if one.is_meta and storage(one) in places and name not in _KEEPING]
        made = [one for one in tensors_in(result) if one.is_meta]
        if not written and all(id(one) in own for one in made):
            return
        if name == "__deepcopy__":
            func, args, kwargs = torch.clone, args[:1], {}
        self._append(func, args, kwargs, result, tuple(written))

    def _append(self, func: Any, args: Any, kwargs: Any, result: Any, written: tuple[Tensor, ...]) -> None:
        """The objects of the module get values in time: what is noted are others, in the same place."""
        before = self._before
        args, kwargs = tree_map(lambda one: before[id(one)] if id(one) in before else kept(one), (args, kwargs))
        result, written = tree_map(kept, (result, written))
        # The frame is in no variable: it would hold itself, and with it every tensor in it.
        maker = next((weakref.ref(module) for _, module in constructors(sys._getframe())), None)
        contract = not written or in_contract(sys._getframe())
        call = Call(func, args, kwargs, result, written, contract, maker, line(sys._getframe()), self.is_random)
        self.record.append(call)

    def _mark(self) -> None:
        """Let the modules whose constructors are running know of this construction."""
        if not self.empty:
            return
        for number, (frame, module) in enumerate(constructors(sys._getframe(2))):
            own = vars(module)
            if ATTRIBUTE not in own and "_forward_pre_hooks" in own:
                own[ATTRIBUTE] = Built(self)
                self._modules.append(weakref.ref(module))
                if not number:
                    module.register_forward_pre_hook(refuse_empty, with_kwargs=True)
            if ATTRIBUTE in own and frame.f_code is getattr(type(module).__init__, "__code__", None):
                own[ATTRIBUTE].arguments = own[ATTRIBUTE].arguments or arguments(frame)


class _Operators(TorchDispatchMode):
    """What the operators below a function of torch do, and those that no function mode sees: legacy constructors
    (`torch.Tensor(n)`, `torch.FloatTensor(n)`), compiled code."""

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, construction = kwargs or {}, self._construction
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if construction.running:
            if construction.empty:
                construction.written += targets_of(func, args, kwargs)
                construction.is_random |= is_random
            return func(*args, **kwargs)
        if func is torch.ops.aten.empty.memory_format and construction.device is not None:
            kwargs = kwargs | {"device": construction.device}
            construction._mark()
        if not construction.empty:
            return func(*args, **kwargs)
        construction.noting = True
        try:
            before = construction._before = construction._look(args, kwargs)
            result = func(*args, **kwargs)
            construction.is_random, construction.written = is_random, targets_of(func, args, kwargs)
            places = {storage(one) for one in before.values()}
            if construction.written or any(storage(one) not in places for one in tensors_in(result)):
                construction._note(func, func.__name__, args, kwargs, result)
        finally:
            construction.noting = False
        return result


def refuse_empty(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward hook of modules that were built empty: values in, none inside, is an error. It removes itself."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    hollow = [name for name, value in own if value.is_meta]
    if not hollow:
        forget(module)
    elif any(not tensor.is_meta for tensor in tensors_in(args, kwargs)):
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


def _on_meta(args: Any, kwargs: dict[str, Any]) -> bool:
    inputs = tensors_in(args, kwargs)
    return inputs[0].is_meta if inputs else torch.device(kwargs.get("device") or "cpu").type == "meta"


def _leaves_meta(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether what `Tensor.to` was given is another device."""
    given = [kwargs.get("device"), kwargs.get("other"), *args[:1]]
    devices = [one.device if isinstance(one, Tensor) else one for one in given]
    return any(isinstance(one, (torch.device, str)) and torch.device(one).type != "meta" for one in devices)
