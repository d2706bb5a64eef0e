"""What must hold of any module once it has its initial values, and of an optimizer that is to train it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparseautomodel.poison import poisoned
from sparseautomodel.writes import local

_DRAWN = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)
"""Modules whose weights are drawn at random."""


def check_initial(
    module: nn.Module,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    optimizer: Optimizer | None = None,
) -> list[str]:
    """What is wrong with a module that was initialized or loaded, beside what has no values or is not finite.

    Args:
        dtype: of all floating parameters; None: any.
        device: of all parameters and buffers; None: any.
        optimizer: it must hold parameters of `module`, and none on the meta device.
    """
    problems = []
    never = never_written(module)
    if never:
        problems.append(f"never written: {listed(never)}. {WRITE_THEM}")
    flat = _constant_weights(module)
    if flat:
        problems.append(
            f"constant, as memory that nothing was written to: {listed(flat)}. Call materialize(model) on the model "
            "while it is on the meta device, instead of to_empty, or load a checkpoint"
        )
    if dtype is not None:
        problems += wrong_dtype(
            {name: (one, dtype) for name, one in module.named_parameters() if one.is_floating_point()}
        )
    if device is not None:
        problems += wrong_device({name: one for name, one in _tensors(module)}, torch.device(device))
    if optimizer is not None:
        problems += _check_optimizer(optimizer, module)
    return problems


WRITE_THEM = "Write them in the module's reset_parameters, or load a checkpoint that has them"


def never_written(module: nn.Module) -> list[str]:
    """Tensors of which some elements hold what `materialize` puts into memory before it is written."""
    found = []
    for name, value in _tensors(module):
        count = 0 if value.is_meta else poisoned(local(value))
        if count:
            found.append(name if count == local(value).numel() else f"{name} ({count} elements of it)")
    return found


def wrong_dtype(found: Mapping[str, tuple[Tensor, torch.dtype]]) -> list[str]:
    """One problem that names all tensors which do not have the dtype beside them."""
    wrong = [f"{name} is {value.dtype}, not {dtype}" for name, (value, dtype) in found.items() if value.dtype != dtype]
    return [f"wrong dtype: {listed(wrong)}. Build the module under init_module(dtype=...)"] if wrong else []


def wrong_device(found: Mapping[str, Tensor], device: torch.device) -> list[str]:
    """One problem that names all tensors which are on another device; those without values are not among them."""
    wrong = [
        f"{name} is on {value.device}"
        for name, value in found.items()
        if not value.is_meta
        and (value.device.type != device.type or device.index not in (None, value.device.index or 0))
    ]
    return (
        [f"wrong device: {listed(wrong)}, not on {device}. Move them with model.to({str(device)!r})"] if wrong else []
    )


def spread(value: Tensor) -> tuple[float, float]:
    """Smallest and largest number of a tensor, or of the part of it that is here; both NaN where there is a NaN."""
    here = local(value.detach())
    if here.dtype.itemsize == 1 and here.is_floating_point():
        here = here.float()
    if not here.numel() or here.dtype == torch.bool or here.is_complex():
        return 0.0, 1.0
    low, high = torch.aminmax(here)
    return float(low), float(high)


def listed(names: Iterable[str]) -> str:
    """All the names: an error that leaves some out has to be met again."""
    return ", ".join(names)


def _constant_weights(module: nn.Module) -> list[str]:
    """Matrices that should be random and are one number throughout: all of them if that is most, else those not zero.

    Single matrices are set to zero on purpose (the second matrix of an adapter, the last of a block).
    """
    drawn, constant, odd = 0, [], []
    for path, one in module.named_modules():
        weight = one._parameters.get("weight") if isinstance(one, _DRAWN) else None
        if weight is None or weight.is_meta or not weight.is_floating_point() or local(weight).numel() < 4:
            continue
        drawn += 1
        low, high = spread(weight)
        if low == high:
            constant.append(f"{path}.weight".removeprefix("."))
            odd += constant[-1:] if low else []
    return constant if 2 * len(constant) > drawn else odd


def _check_optimizer(optimizer: Optimizer, module: nn.Module) -> list[str]:
    names = {id(value): name for name, value in module.named_parameters()}
    hollow, foreign = [], []
    for group, entry in enumerate(optimizer.param_groups):
        for number, value in enumerate(entry["params"]):
            name = names.get(id(value), f"parameter {number} of group {group}")
            if value.is_meta:
                hollow.append(name)
            elif id(value) not in names:
                foreign.append(name)
    after = "Build the optimizer after the model is loaded or materialized: Optimizer(model.parameters())"
    problems = [f"{type(optimizer).__name__} holds parameters on the meta device: {listed(hollow)}. {after}"]
    problems += [
        f"{type(optimizer).__name__} holds parameters that the model does not have: {listed(foreign)}. {after}"
    ]
    return problems[: bool(hollow)] + problems[1 : 1 + bool(foreign)]


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
