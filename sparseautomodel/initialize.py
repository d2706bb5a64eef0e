"""Modules built without values, and given values: `init_module` and `materialize`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from sparseautomodel.construction import Construction, constructions, forget, rebuilt
from sparseautomodel.contracts import Part, parts
from sparseautomodel.distributed import check_mesh, common_seed, shard
from sparseautomodel.empty_tensors import EmptyTensor, allocate, empty_tensors, origin
from sparseautomodel.initial_checks import WRITE_THEM, listed, wrong_device, wrong_dtype
from sparseautomodel.numbers import poisoned, spread
from sparseautomodel.random_values import checked_seed, drawing
from sparseautomodel.writes import Writes, local

WITH_VALUES = "Build the module with values, without empty_weights: init_module(seed=...)"


class InitializationError(ValueError):
    """A module cannot be given its initial values, or did not get them. Names every tensor concerned."""


@contextlib.contextmanager
def init_module(
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    empty_weights: bool = False,
    mesh: DeviceMesh | None = None,
    seed: int | None = None,
) -> Iterator[None]:
    """Build any `nn.Module`, or any model of transformers from its config, on a device, in a dtype, or without values.

    Args:
        device: where tensors are made, unless the constructor says otherwise; with `empty_weights`, where `materialize`
            puts them.
        dtype: what floating tensors have where the constructor does not say, as if it were torch's default dtype.
        empty_weights: build on the meta device: no memory, no values, init functions do not run, torch's random state
            is not touched. A load with `load_state_dict(..., assign=True)` fills the module, or `materialize`. Until
            then its forward is an error for inputs that have values. Where a constructor reads numbers out of a tensor
            (`.item()`), it gets those that it computed; `materialize` refuses them if they are random and kept.
        mesh: with `empty_weights`, what `materialize` shards the module over before any memory is taken. One dimension
            is FSDP2. Two, which need names: `("fsdp", "tp")` is FSDP2 and tensor parallelism by the plan of a model of
            transformers, over all processes; two others are a dimension that repeats and one that shards (HSDP). One
            that is named "tp" is tensor parallelism alone.
        seed: what constructors draw comes from this seed and not from torch's random state, in the order in which they
            draw it; with `empty_weights` it is the seed of `materialize`, where order does not matter.

    It acts in the calling thread, and replaces nothing of torch.

    >>> with init_module(empty_weights=True, dtype=torch.bfloat16):
    ...     layer = torch.nn.Linear(4, 4)
    >>> _ = materialize(layer, seed=0)
    """
    seed = checked_seed(seed, "init_module")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype={dtype!r} is no floating dtype of torch. Write torch.bfloat16, for instance")
    if mesh is not None and not empty_weights:
        raise ValueError("mesh needs empty_weights=True: materialize(module) shards it before it takes memory")
    if mesh is not None:
        check_mesh(mesh)
    place = None if device is None else torch.device(device)
    if empty_weights:
        mode = Construction(torch.device("meta"), dtype, True, place, mesh, seed)
    else:
        mode = Construction(place, dtype)
    draws = drawing({}, seed) if seed is not None and not empty_weights else contextlib.nullcontext()
    with draws, mode:
        yield


def materialize(module: nn.Module, device: str | torch.device | None = None, seed: int | None = None) -> nn.Module:
    """Give every tensor of `module` that is on the meta device its initial value. Others stay as they are.

    Parameters are initialized by `_init_weights` of the model of transformers that they are in, else by the module's
    own `init_weights`, `reset_parameters` or `_reset_parameters`. Buffers, and tensors that are plain attributes, get
    what the constructor computed: noted while it ran under `init_module`, else by building that module once more.
    Objects stay the same, so that optimizers that hold the parameters stay whole; those of which somebody keeps a view
    are replaced. Ties stay ties.

    Args:
        device: where the values go; the device given to `init_module`, else the CPU. What is sharded goes where its
            mesh is.
        seed: a random value depends on it, on the name of the tensor in `module` and on the element's place in it, not
            on layout, device or order. None draws the seed from torch's random state.

    Returns:
        `module` itself.

    Raises:
        InitializationError: before anything is changed, for modules that cannot be initialized; afterwards, for tensors
            that were not written, are not finite, are constant though drawn at random, have another dtype or device
            than they were built with, or are not tied any more. One error names them all.

    >>> with init_module(empty_weights=True):
    ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    >>> materialize(model, seed=0)[1].running_var.sum()
    tensor(8.)
    """
    if torch.empty(0).is_meta:
        raise ValueError(
            "materialize(module) is called where tensors are made on the meta device: call it after the with"
        )
    seed = checked_seed(seed, "materialize")
    built = constructions(module)
    if device is None:
        device = next((one.place for one in built if one.place is not None), "cpu")
    if seed is None:
        seed = next((one.seed for one in built if one.seed is not None), None)
    every = parts(module)
    _tie(module)
    _check_contracts(every, built)
    mesh = next((one.mesh for one in built if one.mesh is not None), None)
    tensors = empty_tensors(module)
    if mesh is not None and tensors:
        origins = {one.name: one.origin for one in tensors}
        shard(module, mesh)
        _tie(module)
        tensors = [replace(one, origin=origins[one.name]) for one in empty_tensors(module)]
    if tensors:
        if seed is None:
            drawn = int(torch.randint(2**62, ()).item())
            seed = common_seed(drawn) if any(isinstance(one.tensor, DTensor) for one in tensors) else drawn
        with torch.no_grad():
            _fill(module, every, tensors, built, torch.device(device), seed)
    for one in module.modules():
        forget(one)
    return module


@contextlib.contextmanager
def _drawn_once(tensors: list[EmptyTensor], built: Sequence[Construction]) -> Iterator[None]:
    """Let the module that made a tied tensor initialize it, as it does where ties are made after that.

    The others have a tensor without memory meanwhile, which costs nothing to fill.
    """
    tied = [one for one in tensors if one.is_parameter and len(one.owners) > 1]
    for one in tied:
        makers = [each.record.maker(one.origin) for each in built]
        one.owners.sort(key=lambda place: all(place[0] is not maker for maker in makers))
        for owner, key in one.owners[1:]:
            owner._parameters[key] = nn.Parameter(torch.empty_like(one.meta), requires_grad=False)
    try:
        yield
    finally:
        for one in tied:
            for owner, key in one.owners[1:]:
                owner._parameters[key] = one.tensor  # type: ignore[assignment]


def _tie(module: nn.Module) -> None:
    """Ties that transformers declares and leaves out while it builds a model for a load."""
    for model in module.modules():
        ties = (getattr(model, "all_tied_weights_keys", None) or {}) if isinstance(model, PreTrainedModel) else {}
        for target, source in ties.items():
            one, other = model.get_parameter(target), model.get_parameter(source)
            if one.is_meta and other.is_meta and one is not other:
                path, _, key = target.rpartition(".")
                setattr(model.get_submodule(path), key, other)


def _check_contracts(every: list[Part], built: Sequence[Construction]) -> None:
    """Every module with parameters on the meta device must be able to initialize them, unless it gave them values."""
    lacking = []
    for part in every:
        own = [
            name
            for name, value in part.module.named_parameters(recurse=False)
            if value.is_meta and not any(one.record.gives(origin(part.module, name, value)) for one in built)
        ]
        if own and not part.is_covered:
            names = listed(f"{part.name}.{name}".removeprefix(".") for name in own)
            lacking.append(f"{part.name or 'the module itself'}, a {type(part.module).__name__}: {names}")
    if lacking:
        raise InitializationError(
            "modules with parameters and no way to initialize them:\n- "
            + "\n- ".join(lacking)
            + "\nGive the class a method reset_parameters(self) that fills them, or load a checkpoint that has them"
        )


def _fill(
    module: nn.Module,
    every: list[Part],
    tensors: list[EmptyTensor],
    built: Sequence[Construction],
    device: torch.device,
    seed: int,
) -> None:
    kept = [value for value in (*module.parameters(), *module.buffers()) if not value.is_meta]
    named = {one.name: one.origin for one in tensors}
    owners = {id(part.module): part.owner for part in every}
    _check_reads(tensors, built)
    _check_writes(tensors, built)
    allocate(tensors, device)
    writes = Writes([one.tensor for one in tensors], kept)
    _replay([one for one in tensors if not one.is_parameter], named, built, seed, writes)
    with drawing({one.name: one.tensor for one in tensors}, seed), writes:
        with _drawn_once(tensors, built):
            for part in every:
                part.initialize()
        with writes.closed(one.tensor for one in tensors if not writes.lacks(one.tensor)):
            for part in every:
                own = (*part.module.parameters(recurse=False), *part.module.buffers(recurse=False))
                if part.owner is not None and part.method is not None and any(map(writes.lacks, own)):
                    part.method()
    changed = {one.name: _change(one, owners[id(one.owner)] is not None, built) for one in tensors}
    again = [one for one in tensors if changed[one.name] is not None or writes.lacks(one.tensor)]
    found = _replay(again, named, built, seed, writes)
    lost = [f"{one.name} ({changed[one.name]})" for one in again if changed[one.name] and one.name not in found]
    if lost:
        raise InitializationError(
            f"what a constructor sets is not known while the module is built empty: {listed(lost)}. {WITH_VALUES}"
        )
    for one in again:
        if one.name not in found and writes.lacks(one.tensor):
            _put(one, _rebuilt(one, owners[id(one.owner)], seed), writes)
    _check(module, tensors, writes)


def _check_reads(tensors: list[EmptyTensor], built: Sequence[Construction]) -> None:
    """Numbers that constructors read out of tensors which are drawn anew now would not fit to them."""
    problems = []
    for construction in built:
        for read in construction.record.reads:
            names = [one.name for one in tensors if construction.record.draws(one.origin) & read.draws]
            problems += [f"{read.how} in {read.line}, of {listed(names)}"] if names else []
    if problems:
        raise InitializationError(
            "a constructor reads numbers out of tensors that are random, and would have others in an empty module:\n- "
            + "\n- ".join(problems)
            + f"\n{WITH_VALUES}"
        )


def _check_writes(tensors: list[EmptyTensor], built: Sequence[Construction]) -> None:
    """What is written to a tensor without values, where no construction sees it, is gone."""
    changed = [one.name for one in tensors if any(each.record.is_written_unseen(one.origin) for each in built)]
    if changed:
        raise InitializationError(
            f"written to while they had no values, after init_module or in another thread: {listed(changed)}. "
            "Load checkpoints with load_state_dict(..., assign=True), and change values after materialize(module). "
            f"Or: {WITH_VALUES}"
        )


def _change(one: EmptyTensor, managed: bool, built: Sequence[Construction]) -> str | None:
    """Where a constructor changed a tensor after the module that has it was initialized."""
    changes = (each.record.changed_outside(one.origin, managed) for each in built)
    return next((call.line for call in changes if call is not None), None)


def _replay(
    tensors: list[EmptyTensor], named: Mapping[str, Tensor], built: Sequence[Construction], seed: int, writes: Writes
) -> set[str]:
    """Give tensors the values that the constructors computed. Returns the names of those for which they are known."""
    found = set()
    for construction in built:
        own = [one for one in tensors if construction.record.knows(one.origin)]
        for index, value in construction.record.values([one.origin for one in own], named, seed):
            if value is not None and value.shape == own[index].tensor.shape:
                _put(own[index], value, writes)
                found.add(own[index].name)
    return found


def _rebuilt(one: EmptyTensor, owner: PreTrainedModel | None, seed: int) -> Tensor | None:
    """What the module's constructor computes when it is run once more; for a model of transformers, from its config."""
    key, path, found = one.name.rpartition(".")[2], "", rebuilt(one.owner)
    if found is None and owner is not None:
        mode = Construction(torch.device("meta"), None, empty=True)
        with mode:
            found = type(owner)(owner.config), mode
        path = next(name for name, module in owner.named_modules() if module is one.owner)
    if found is None:
        return None
    try:
        again = getattr(found[0].get_submodule(path), key)
    except AttributeError:  # put there after construction
        return None
    if not isinstance(again, Tensor) or again.shape != one.origin.shape:
        return None
    if not again.is_meta:
        return again
    return next(value for _, value in found[1].record.values([again], {one.name: again}, seed))


def _put(one: EmptyTensor, value: Tensor | None, writes: Writes) -> None:
    """Write a value that is whole into what may be a part."""
    sharded = one.tensor
    if value is None or value.shape != sharded.shape:
        return
    if isinstance(sharded, DTensor):
        value = value.to(local(sharded).device, sharded.dtype)
        value = distribute_tensor(value, sharded.device_mesh, sharded.placements, src_data_rank=None)
    local(sharded).copy_(local(value))
    writes.note(sharded)


def _check(module: nn.Module, tensors: list[EmptyTensor], writes: Writes) -> None:
    """One error for all that did not come out as it should."""
    now = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    held = {name: (now.get(name, one.tensor), one) for one in tensors for name in one.names}
    never, odd, constant = [], [], []
    for one in tensors:
        value = held[one.name][0]
        if value is one.tensor and (writes.lacks(value) or poisoned(local(value))):
            never.append(f"{one.name} of {type(one.owner).__name__}")
        elif value.is_floating_point() and not value.is_meta:
            low, high = spread(local(value))
            finite = math.isfinite(low) and math.isfinite(high)
            odd += [] if finite or (low <= high and not one.is_parameter) else [one.name]
            constant += [one.name] if low == high and value.numel() >= 4 and writes.drawn(value) else []
    apart = [f"{one.name} and {name}" for name, (value, one) in held.items() if value is not held[one.name][0]]
    hollow = [name for name, (value, _) in held.items() if value.is_meta]
    problems = [f"never written: {listed(never)}. {WRITE_THEM}"] if never else []
    problems += [f"left on the meta device: {listed(hollow)}"] if hollow else []
    problems += [f"not finite: {listed(odd)}"] if odd else []
    problems += [f"drawn at random, and constant: {listed(constant)}"] if constant else []
    problems += [f"tied when they were built, and not any more: {listed(apart)}"] if apart else []
    problems += wrong_dtype({name: (value, one.dtype) for name, (value, one) in held.items()})
    problems += wrong_device({name: value for name, (value, _) in held.items()}, tensors[0].tensor.device)
    if problems:
        raise InitializationError(f"{type(module).__name__} was not initialized:\n- " + "\n- ".join(problems))
