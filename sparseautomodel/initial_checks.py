"""What must hold of any module once it has its initial values, and of an optimizer that is to train it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from transformers import PreTrainedModel

from sparseautomodel.buffers import meta_attributes
from sparseautomodel.numbers import is_finite, poisoned, spread
from sparseautomodel.writes import local

_DRAWN = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)
"""Modules whose weights are drawn at random."""


def check_initial(
    module: nn.Module,
    offloaded: bool = False,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    optimizer: Optimizer | None = None,
    after_each: Callable[[], None] | None = None,
) -> list[str]:
    """What is wrong with the tensors of a module that was initialized or loaded.

    Args:
        offloaded: tensors on the meta device are on disk.
        dtype: of all floating parameters; None: any.
        device: of all parameters and buffers; None: any.
        optimizer: it must hold parameters of `module`, and none on the meta device.
        after_each: called after each tensor that was looked at.
    """
    rest = after_each or (lambda: None)
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    lazy = [name for name, value in (parameters | buffers).items() if is_lazy(value)]
    parameters = {name: value for name, value in parameters.items() if name not in lazy and _is_plain(value)}
    buffers = {name: value for name, value in buffers.items() if name not in lazy and _is_plain(value)}
    every: dict[str, Tensor] = {**parameters, **buffers}
    hollow = [name for name, value in every.items() if value.is_meta]
    hollow += [name for name, _ in meta_attributes(module)]
    problems = []
    if lazy:
        problems.append(f"without a shape yet: {listed(lazy)}. Run a forward, which gives it to them")
    if hollow and not offloaded:
        problems.append(f"on the meta device, without values: {listed(hollow)}. Load them or call materialize(model)")
    never, bad = {}, []
    for name, value in every.items():
        if value.is_meta:
            continue
        finite = is_finite(local(value))  # the pattern of what was never written is not, where it is a float
        if (not finite or not value.is_floating_point()) and (count := poisoned(local(value))):
            never[name] = count
        elif name in parameters:
            bad += [] if finite else [name]
        elif math.isnan(spread(local(value))[0]):
            bad.append(name)
        rest()
    if never:
        problems.append(f"never written: {listed(never)}. {WRITE_THEM}")
    if bad:
        problems.append(f"not finite: {listed(bad)}")
    flat = _constant_weights(module, rest)
    if flat:
        problems.append(
            f"constant, as memory that nothing was written to: {listed(flat)}. Call materialize(model) on the model "
            "while it is on the meta device, instead of to_empty, or load a checkpoint"
        )
    problems += list(_broken_ties(module))
    if dtype is not None:
        problems += wrong_dtype({name: (one, dtype) for name, one in parameters.items() if one.is_floating_point()})
    if device is not None:
        problems += wrong_device(every, torch.device(device))
    if optimizer is not None:
        problems += _check_optimizer(optimizer, module)
    return problems


def _is_plain(value: Tensor) -> bool:
    """Whether its numbers lie in memory one after another; sparse ones are not looked at."""
    return value.layout == torch.strided


WRITE_THEM = "Write them in the module's reset_parameters, or load a checkpoint that has them"


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


def listed(names: Iterable[str]) -> str:
    """All the names: an error that leaves some out has to be met again. Those that differ in their first number alone
    are written together: `layers.{0-3}.weight`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = re.match(r"(.*?(?:^|\.))(\d+)((?:\.|$).*)", name)
        groups.setdefault((match[1], match[3]) if match else (name, ""), []).extend([int(match[2])] if match else [])
    return ", ".join(before + _numbers(numbers) + after for (before, after), numbers in groups.items())


def _numbers(numbers: list[int]) -> str:
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    whole = numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2
    return "{" + (f"{numbers[0]}-{numbers[-1]}" if whole else ",".join(map(str, numbers))) + "}"


def _broken_ties(model: nn.Module) -> Iterator[str]:
    if not isinstance(model, PreTrainedModel):
        return
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if target in parameters and source in parameters and parameters[target] is not parameters[source]:
            yield f"{target} and {source} are tied by the config but are two tensors: call model.tie_weights()"


def _constant_weights(module: nn.Module, rest: Callable[[], None]) -> list[str]:
    """Matrices that should be random and are one number throughout: all of them if that is most, else those not zero.

    Single matrices are set to zero on purpose (the second matrix of an adapter, the last of a block).
    """
    drawn, constant, odd = 0, [], []
    for path, one in module.named_modules():
        weight = one._parameters.get("weight") if isinstance(one, _DRAWN) else None
        if (
            weight is None
            or is_lazy(weight)
            or weight.is_meta
            or not weight.is_floating_point()
            or local(weight).numel() < 4
        ):
            continue
        drawn += 1
        low, high = spread(local(weight))
        rest()
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
