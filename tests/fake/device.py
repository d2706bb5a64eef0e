"""A second device without a GPU: a tensor says that it is on `fakegpu:0` and holds a CPU tensor.

Operations on tensors of two devices fail, bytes copied each way are counted, live and peak bytes are tracked, memory
runs out at a capacity or at the n-th allocation. Importing this registers the device for the whole process, which then
has an accelerator: import it only in processes of its own (tests/test_residency.py starts them).

    from tests.fake.device import DEVICE, meter
    layer.to(DEVICE); meter.live; meter.copied("h2d"); meter.capacity = meter.live + 1000
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fakegpu"
_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)


class Meter:
    """What the device has done so far. There is one a process."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        """Bytes held now, and the most since the last reset."""
        self.capacity: int | None = None
        self.fail_at: int | None = None
        """Allocations until one fails."""
        self.log: list[tuple[str, int]] = []
        """`h2d` or `d2h`, and bytes, of each copy."""
        self._views: dict[int, int] = {}
        """Address of a storage -> how many tensors view it."""
        self._lock = threading.RLock()

    def reset(self) -> None:
        self.log.clear()
        self.peak = self.live

    def copied(self, way: str) -> int:
        return sum(nbytes for direction, nbytes in self.log if direction == way)

    def copies(self, way: str) -> list[int]:
        """Bytes of each copy."""
        return [nbytes for direction, nbytes in self.log if direction == way]

    def charge(self, tensor: torch.Tensor, cpu: torch.Tensor) -> None:
        """Count a storage once, however many tensors view it; give it back with the last of them."""
        storage = cpu.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        with self._lock:
            if address not in self._views:
                self._allocate(size)
                self._views[address] = 0
            self._views[address] += 1
        weakref.finalize(tensor, self._release, address, size)

    def _allocate(self, size: int) -> None:
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at == 0:
                raise torch.OutOfMemoryError(f"{NAME}: this allocation was to fail")
        if self.capacity is not None and self.live + size > self.capacity:
            raise torch.OutOfMemoryError(f"{NAME}: want {size} bytes, {self.live} in use, capacity {self.capacity}")
        self.live += size
        self.peak = max(self.peak, self.live)

    def _release(self, address: int, size: int) -> None:
        with self._lock:
            self._views[address] -= 1
            if self._views[address] == 0:
                del self._views[address]
                self.live -= size


meter = Meter()


class FakeTensor(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl
    _cpu: torch.Tensor

    @staticmethod
    def __new__(cls: type, cpu: torch.Tensor, requires_grad: bool = False) -> FakeTensor:
        if isinstance(cpu, FakeTensor):
            return cpu
        if cpu.is_meta:  # accelerate makes a tensor of the class it found, also when it takes the values away
            return torch.nn.Parameter(cpu, requires_grad=False)  # type: ignore[return-value]
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            cpu.shape,
            strides=cpu.stride(),
            storage_offset=cpu.storage_offset(),
            dtype=cpu.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        self._cpu = cpu
        meter.charge(self, cpu)
        return self

    def tolist(self) -> Any:
        return self._cpu.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"FakeTensor({self._cpu!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "copy_":
            return _copy(args[1], args[0])
        if name == "_to_copy":
            return _to_copy(args[0]._cpu, kwargs)
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor) and tensor.dim() > 0:
                raise RuntimeError(f"{func}: expected all tensors to be on one device, got {tensor.device} and {NAME}")
        known = {id(t._cpu): t for t in tensors if isinstance(t, FakeTensor)}  # in-place results keep their identity
        args, kwargs = pytree.tree_map(_to_host, (args, kwargs))
        return pytree.tree_map(lambda result: _from_host(result, known), func(*args, **kwargs))


def _to_host(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return value._cpu
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def _from_host(value: Any, known: dict[int, FakeTensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return known[id(value)] if id(value) in known else FakeTensor(value)


def _copy(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    size = source.numel() * source.element_size()
    if isinstance(target, FakeTensor):
        if not isinstance(source, FakeTensor):
            meter.log.append(("h2d", size))
        target._cpu.copy_(_to_host(source))
    else:
        meter.log.append(("d2h", size))
        target.copy_(source._cpu)  # type: ignore[attr-defined]
    return target


def _to_copy(source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    result = source.to(dtype=kwargs.get("dtype") or source.dtype, copy=True)
    if device is not None and device.type == "meta":
        return torch.empty_like(result, device="meta")
    if device is not None and device.type == "cpu":
        meter.log.append(("d2h", result.numel() * result.element_size()))
        return result
    return FakeTensor(result)


def _empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, *args: Any, **kwargs: Any) -> Any:
    return FakeTensor(torch.empty(size, dtype=dtype or torch.get_default_dtype()))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    return FakeTensor(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype()))


_aten = torch.library.Library("aten", "IMPL")
_aten.impl("empty.memory_format", _empty, "PrivateUse1")
_aten.impl("empty_strided", _empty_strided, "PrivateUse1")
_aten.impl("_copy_from", lambda source, target, non_blocking=False: _copy(source, target), "PrivateUse1")
# What torch.random.fork_rng asks of a device.
_backend = getattr(torch, NAME)
_backend.get_rng_state = lambda device=None: torch.empty(0)
_backend.set_rng_state = lambda state, device=None: None
