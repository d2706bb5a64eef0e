"""Compression with calibration data: the blocks of a model one after another, each read once, solved, stored and freed.

What is in memory is the block at work and the activations of the batches at one place; what lies outside the blocks
waits in mapped files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sparseautomodel import pairs
from sparseautomodel.allocator import freed_memory_stays
from sparseautomodel.architecture import Architecture
from sparseautomodel.calibration import Batches
from sparseautomodel.checkpoint import Checkpoint, LazyTensor, Reads, StoredTensor, open_files
from sparseautomodel.kv_cache import ObservedCache, kv_scales
from sparseautomodel.layers import quantization_of
from sparseautomodel.modifiers import Layer, Modifier
from sparseautomodel.plan import Plan
from sparseautomodel.report import versions
from sparseautomodel.safetensors_file import CheckpointError
from sparseautomodel.sets import find_blocks
from sparseautomodel.solving import OUTSIDE, Solving, damaged
from sparseautomodel.spill import Spill
from sparseautomodel.statistics import LayerError
from sparseautomodel.transform import LayerPlan, scan, transform
from sparseautomodel.walk import Room, walk
from sparseautomodel.witness import ROWS, Quality

FINGERPRINT = "fingerprint.json"

_CACHED_TOKENS = 1024
"""Tokens in a forward on a CPU: activations of more leave its caches."""


@dataclass(frozen=True)
class Calibrated:
    """What calibration gives: the new checkpoint, and how well its layers were solved."""

    tensors: dict[str, LazyTensor]
    errors: list[LayerError]
    """Of each layer that data has changed, in the order in which they were solved."""
    blocks: list[dict[str, Any]]
    """Of each block: name, relative squared error of its output (nan where no row was left to see), seconds."""
    quality: Quality | None
    """The check of the whole model; None where no row was left for it."""
    batches: Batches
    seconds: float
    notes: tuple[str, ...] = ()
    """What the recipe asked for and could not be had."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_samples": self.batches.num_samples,
            "num_tokens": self.batches.num_tokens,
            "fingerprint": self.batches.fingerprint,
            "seconds": self.seconds,
            "verdict": None if self.quality is None else self.quality.to_dict(),
            "blocks": [_strict(block) for block in self.blocks],
            "layers": [_strict(asdict(error)) for error in self.errors],
        }


def calibrate(
    checkpoint: Checkpoint,
    architecture: Architecture,
    plan: Plan,
    batches: Batches,
    scratch: Path,
    device: torch.device,
    resume: bool = False,
    budget: int = 1 << 30,
) -> Calibrated:
    """The checkpoint that the plan makes of `checkpoint`, its blocks solved with the batches; and each layer's error.

    Args:
        scratch: a folder for finished blocks, on the disk of the result.
        resume: take the blocks that are there already from a run with the same inputs.
        budget: bytes of calibration state in memory (activations that wait, statistics); more waits in `scratch`.

    Raises:
        ValueError: the source is compressed, the model's forward passes a block by, or `resume` is set and the folder
            is of a run with other inputs.
    """
    assert plan.recipe is not None
    if quantization_of(architecture.config) is not None:
        raise ValueError(
            f"{plan.source} is compressed, and calibration runs the dense model. Write its dense values first: "
            "from_pretrained(path, execution='dense').save_pretrained(folder), then calibrate the folder"
        )
    started = time.perf_counter()
    source = [(name, tensor.shape, str(tensor.dtype), tensor.file) for name, tensor in checkpoint.items()]
    stamps = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in checkpoint.files]
    inputs = {"data": batches.fingerprint, "seed": torch.initial_seed(), "device": str(device)}
    inputs["compiler"] = pairs.why_not()  # products of compiled functions are not those of torch, bit for bit
    _open_scratch(scratch, resume, model=[source, stamps], recipe=plan.recipe.to_dict(), **inputs)
    plans = scan(plan.layers, checkpoint)
    by_path = {path_of(item.layer): item for item in plans}
    modifiers = _in_order(plan.recipe.modifiers, plan.layers, plans)
    work = Solving(checkpoint, architecture, by_path, modifiers, scratch, device)
    blocks = find_blocks(work.model, list(by_path))
    inside = {block: [path for path in by_path if path.startswith(f"{block}.")] for block in blocks}
    apart = [path for path in by_path if not any(path.startswith(f"{block}.") for block in blocks)]
    lonely = [path for path in apart if _needs_data(by_path[path])]
    work.load_outside(blocks)
    witnesses = batches.held_out or [_first_row(batch) for batch in batches.batches[-ROWS:]]
    work.comparison.seen = not batches.held_out
    rest = _outside_without_data(work, [by_path[path] for path in apart if path not in lonely], device)
    known = _finished(scratch)
    for path in lonely:
        if set(by_path[path].outputs()) <= set(known):
            work.load_head()
            work.change_outside(path, known)
    observed = None if plan.cache is None else ObservedCache()
    with freed_memory_stays(), tqdm(total=len(blocks), desc="Calibrating", unit="block", disable=None) as bar:
        work.progress = bar.update
        walk(
            work.model,
            [_to(part, device) for batch in batches.batches for part in _parts(batch, device)],
            blocks,
            inside,
            work,
            outside=[path for path in lonely if not set(by_path[path].outputs()) <= set(known)],
            witnesses=[_to(row, device) for row in witnesses],
            room=Room(Spill(scratch, budget), budget),
            cache=observed,
        )
    work.finish(OUTSIDE)
    tensors = _result(checkpoint, work.outside_tensors() | rest, _finished(scratch), plans)
    if observed is not None and plan.cache is not None:
        tensors |= kv_scales(observed, work.model, plan.cache, plan.all_layers)
    return Calibrated(
        tensors=tensors,
        errors=work.errors,
        blocks=[
            {"name": block, "error": work.comparison.error(block), "seconds": work.seconds.get(block, math.nan)}
            for block in blocks
        ],
        quality=work.comparison.quality(),
        batches=batches,
        seconds=time.perf_counter() - started,
        notes=work.smoother.notes(),
    )


def _needs_data(plan: LayerPlan) -> bool:
    asked = [ask(plan.layer) for modifier in plan.modifiers for ask in (modifier.statistic, modifier.input_range)]
    return any(statistic is not None for statistic in asked)


def scratch_of(output: str | os.PathLike[str]) -> Path:
    """The folder beside `output` in which finished blocks wait for the rest, also after a run was killed."""
    output = Path(output).absolute()
    return output.parent / f".{output.name}.blocks"


def leave_or_say(scratch: Path, error: BaseException) -> None:
    """After a failure: the folder goes if no block was finished, else the error says that it is there, and what for."""
    if any(scratch.glob("*.safetensors")):
        error.add_note(f"Finished blocks are kept in {scratch}: resume=True goes on from them; else delete the folder")
    else:
        clear_scratch(scratch)


def clear_scratch(scratch: Path) -> None:
    """Remove what runs have left in the folder; and the folder, unless there is something else in it."""
    for file in [*scratch.glob("*.safetensors"), *scratch.glob("*.partial"), scratch / FINGERPRINT]:
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        scratch.rmdir()


def path_of(layer: Layer) -> str:
    """Name of the module that has the layer's weight; experts have one each here."""
    found = re.match(r".*\.(\d+\..+)$", layer.name) if layer.expert else None
    return f"{layer.module}.{found[1]}" if found else layer.module


def _outside_without_data(work: Solving, plans: Sequence[LayerPlan], device: torch.device) -> dict[str, LazyTensor]:
    """What the layers outside the blocks become that need no data, as tensors in memory; the model has it from here."""
    if any(work.model.get_parameter(f"{path_of(plan.layer)}.weight").is_meta for plan in plans):
        work.load_head()
    wanted, reads = {plan.source for plan in plans}, Reads()
    sources = {name: tensor for name, tensor in work.outside_tensors().items() if name in wanted}
    changed = transform(sources, plans, (), device)
    stored: dict[str, LazyTensor] = {}
    for name, tensor in changed.items():
        value = tensor[...]
        stored[name] = StoredTensor(name, tuple(value.shape), value.dtype, "memory", value, reads)
    for plan in plans:
        work.change_outside(path_of(plan.layer), stored)
    return stored


def _result(
    checkpoint: Checkpoint,
    outside: Mapping[str, LazyTensor],
    done: Mapping[str, LazyTensor],
    plans: Sequence[LayerPlan],
) -> dict[str, LazyTensor]:
    """The new checkpoint in the order of the old one."""
    by_source: dict[str, list[LayerPlan]] = {}
    for plan in plans:
        by_source.setdefault(plan.source, []).append(plan)
    result: dict[str, LazyTensor] = {}
    known = {**outside, **done}
    for name, tensor in checkpoint.items():
        for plan in by_source.get(name, ()):
            result |= {output: known[output] for output in plan.outputs()}
        if all(f"{plan.layer.name}.weight" != name for plan in by_source.get(name, ())):
            result[name] = known.get(name, tensor)
    return result


def _finished(scratch: Path) -> dict[str, LazyTensor]:
    found: dict[str, LazyTensor] = {}
    for file in sorted(scratch.glob("*.safetensors")):
        try:
            found |= open_files([str(file)])
        except CheckpointError as error:
            raise damaged(file) from error
    return found


def _open_scratch(scratch: Path, resume: bool, **inputs: Any) -> None:
    """Make the folder for finished blocks, or take the one of a run that was killed.

    Args:
        inputs: all that the result depends on; a folder made with other inputs is refused.

    Raises:
        ValueError: `resume` is set and the folder was made from something else; what differs is named.
    """
    wanted = {name: _digest(value) for name, value in (inputs | {"versions": versions()}).items()}
    path = scratch / FINGERPRINT
    found = _known(path) if resume else None
    if found is not None:
        differing = sorted(name for name in wanted if found.get(name) != wanted[name])
        if differing:
            raise ValueError(
                f"{scratch} is of a run with another {', '.join(differing)}: it cannot be resumed. Give what it was "
                "started with, or start anew with resume=False"
            )
        return
    clear_scratch(scratch)
    scratch.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(wanted, indent=2))
    partial.replace(path)


def _known(path: Path) -> dict[str, str] | None:
    """What a run was started with; None where that cannot be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _in_order(recipe: Sequence[Modifier], planned: Sequence[LayerPlan], scanned: Sequence[LayerPlan]) -> list[Modifier]:
    """The scanned modifiers in the order of the recipe, whichever of them a layer has."""
    found: dict[int, Modifier] = {}
    for before, after in zip(planned, scanned, strict=True):
        found |= {id(old): new for old, new in zip(before.modifiers, after.modifiers, strict=True)}
    return [found[id(modifier)] for modifier in recipe if id(modifier) in found]


def _parts(batch: Mapping[str, Tensor], device: torch.device) -> Iterator[Mapping[str, Tensor]]:
    """The batch as it is run: on a CPU in runs of few rows, which is faster and changes no result."""
    ids = batch.get("input_ids")
    if device.type != "cpu" or ids is None or any(len(value) != len(ids) for value in batch.values()):
        yield batch  # patches of images are not one a row
        return
    rows = max(1, _CACHED_TOKENS // ids.shape[1])
    for start in range(0, len(ids), rows):
        yield {name: value[start : start + rows] for name, value in batch.items()}


def _to(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) for name, value in batch.items()}


def _first_row(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    rows = len(next(iter(batch.values())))
    return {name: value[:1] if len(value) == rows else value for name, value in batch.items()}


def _strict(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without nan, which JSON does not have."""
    return {key: None if value != value else value for key, value in values.items()}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
