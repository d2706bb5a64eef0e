"""Compression with calibration data: the blocks of a model one after another, each read once, solved, stored and freed.

What is in memory is what lies outside the blocks, the block at work, and the activations of the batches at one place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from sparseautomodel.architecture import Architecture, expert_merges
from sparseautomodel.calibration import Batches
from sparseautomodel.checkpoint import Checkpoint, LazyTensor, Reads, StoredTensor, open_files
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.layers import quantization_of
from sparseautomodel.modifiers import Layer, Modifier, Weight
from sparseautomodel.plan import Plan
from sparseautomodel.quantizer import put_experts
from sparseautomodel.report import versions
from sparseautomodel.statistics import LayerError
from sparseautomodel.transform import LayerPlan, scan, transform
from sparseautomodel.walk import Callbacks, LayerSet, find_blocks, walk

FINGERPRINT = "fingerprint.json"


@dataclass(frozen=True)
class Calibrated:
    """What calibration gives: the new checkpoint, and how well its layers were solved."""

    tensors: dict[str, LazyTensor]
    errors: list[LayerError]
    batches: Batches

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_samples": self.batches.num_samples,
            "num_tokens": self.batches.num_tokens,
            "fingerprint": self.batches.fingerprint,
            "layers": [
                {key: None if value != value else value for key, value in asdict(error).items()}  # JSON has no nan
                for error in self.errors
            ],
        }


def calibrate(
    checkpoint: Checkpoint,
    architecture: Architecture,
    plan: Plan,
    batches: Batches,
    scratch: Path,
    device: torch.device,
    resume: bool = False,
) -> Calibrated:
    """The checkpoint that the plan makes of `checkpoint`, its blocks solved with the batches; and each layer's error.

    Args:
        scratch: a folder for finished blocks, on the disk of the result.
        resume: take the blocks that are there already from a run with the same inputs.

    Raises:
        ValueError: a layer that needs data lies outside the blocks, the model's forward passes a block by, or `resume`
            is set and the folder is of a run with other inputs.
    """
    assert plan.recipe is not None
    if quantization_of(architecture.config) is not None:
        raise ValueError(
            f"{plan.source} is compressed, and calibration runs the dense model. Write its dense values first: "
            "from_pretrained(path, execution='dense').save_pretrained(folder), then calibrate the folder"
        )
    source = [(name, tensor.shape, str(tensor.dtype), tensor.file) for name, tensor in checkpoint.items()]
    stamps = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in checkpoint.files]
    _open_scratch(scratch, resume, model=[source, stamps], recipe=plan.recipe.to_dict(), data=batches.fingerprint)
    model = _hollow_model(architecture)
    plans = scan(plan.layers, checkpoint)
    by_path = {path_of(item.layer): item for item in plans}
    blocks = find_blocks(model, list(by_path))
    inside = {block: [path for path in by_path if path.startswith(f"{block}.")] for block in blocks}
    covered = {path for paths in inside.values() for path in paths}
    outside = [item for path, item in by_path.items() if path not in covered]
    lonely = [item.layer.name for item in outside if any(modifier.needs_data for modifier in item.modifiers)]
    if lonely:
        raise ValueError(f"{', '.join(lonely)} lie outside the blocks and cannot be calibrated: put them in ignore")
    modifiers = _in_order(plan.recipe.modifiers, plan.layers, plans)
    work = _Blocks(checkpoint, architecture, model, by_path, modifiers, blocks, scratch, device)
    work.load_outside()
    with tqdm(total=len(blocks), desc="Calibrating", unit="block", disable=None) as bar:
        work.bar = bar
        walk(model, [_to(batch, device) for batch in batches.batches], blocks, inside, work)
    done = open_files(sorted(str(file) for file in scratch.glob("*.safetensors")))
    kept = work.outside_tensors()
    rest = {name: kept.get(name, tensor) for name, tensor in checkpoint.items()}
    rest = transform(rest, outside, (), device)
    result: dict[str, LazyTensor] = {}
    sources = {item.source: item for item in plans if path_of(item.layer) in covered}
    for name, tensor in rest.items():
        if name in sources:
            result |= {output: done[output] for output in sources[name].outputs()}
        else:
            result[name] = done.get(name, tensor)
    return Calibrated(result, work.errors, batches)


def scratch_of(output: str | os.PathLike[str]) -> Path:
    """The folder beside `output` in which finished blocks wait for the rest, also after a run was killed."""
    output = Path(output).absolute()
    return output.parent / f".{output.name}.blocks"


def _open_scratch(scratch: Path, resume: bool, **inputs: Any) -> None:
    """Make the folder for finished blocks, or take the one of a run that was killed.

    Args:
        inputs: all that the result depends on; a folder made with other inputs is refused.

    Raises:
        ValueError: `resume` is set and the folder was made from something else; what differs is named.
    """
    wanted = {name: _digest(value) for name, value in (inputs | {"versions": versions()}).items()}
    path = scratch / FINGERPRINT
    if resume and path.is_file():
        found = json.loads(path.read_text())
        differing = sorted(name for name in wanted if found.get(name) != wanted[name])
        if differing:
            raise ValueError(
                f"{scratch} is of a run with another {', '.join(differing)}: it cannot be resumed. Give what it was "
                "started with, or start anew with resume=False"
            )
        return
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    path.write_text(json.dumps(wanted, indent=2))


def path_of(layer: Layer) -> str:
    """Name of the module that has the layer's weight; experts have one each here."""
    found = re.match(r".*\.(\d+\..+)$", layer.name) if layer.expert else None
    return f"{layer.module}.{found[1]}" if found else layer.module


class _Blocks(Callbacks):
    """Reads blocks, solves their layers by the plan, stores what they have become."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        architecture: Architecture,
        model: PreTrainedModel,
        plans: Mapping[str, LayerPlan],
        modifiers: Sequence[Modifier],
        blocks: Sequence[str],
        scratch: Path,
        device: torch.device,
    ) -> None:
        self._checkpoint, self._model, self._plans, self._blocks = checkpoint, model, plans, blocks
        self._scratch, self._device, self._modifiers = scratch, device, modifiers
        self._names = _tensor_names(checkpoint, architecture)
        self._results: dict[str, Tensor] = {}
        self.errors: list[LayerError] = []
        self.bar: Any = None

    def load_outside(self) -> None:
        """Read what lies outside the blocks, but for the head, which no forward reaches."""
        head = self._model.get_output_embeddings()
        for name, _ in list(self._model.named_parameters()):
            inside = any(name.startswith(f"{block}.") for block in self._blocks)
            owner = self._model.get_submodule(name.rpartition(".")[0])
            if not inside and owner is not head and name in self._names:
                self._put(name, self._checkpoint[self._names[name]][...])
        for name, buffer in list(self._model.named_buffers()):
            stored = self._names.get(name)
            value = buffer if stored is None else self._checkpoint[stored][...]
            owner = self._model.get_submodule(name.rpartition(".")[0])
            owner._buffers[name.rpartition(".")[2]] = value.to(self._device)

    def outside_tensors(self) -> dict[str, LazyTensor]:
        """What was read outside the blocks, as tensors in memory, so that it is not read again to be written."""
        reads = Reads()
        values = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        return {
            name: StoredTensor(name, tuple(value.shape), value.dtype, "memory", value.detach(), reads)
            for parameter, name in self._names.items()
            if (value := values.get(parameter)) is not None and not value.is_meta
        }

    def enter(self, block: str) -> bool:
        finished = self._scratch / f"{block}.safetensors"
        known = open_files([str(finished)]) if finished.is_file() else None
        for name, _ in list(self._model.get_submodule(block).named_parameters(prefix=block)):
            path = name.rpartition(".")[0]
            if known is not None and path in self._plans and name.endswith(".weight"):
                self._put(name, self._dense(self._plans[path], known))
            elif known is not None:
                self._put(name, known[self._names[name]][...])
            else:
                self._put(name, self._checkpoint[self._names[name]][...])
        return known is None

    def gather(self, names: Sequence[str]) -> list[Any]:
        found: dict[Any, Any] = {}
        for name in names:
            plan = self._plans[name]
            for modifier in plan.modifiers:
                statistic = modifier.statistic(plan.layer)
                if statistic is not None:
                    found.setdefault(type(statistic), statistic)
        return list(found.values())

    def solve(self, layers: LayerSet) -> None:
        plans = [self._plans[name] for name in layers.names]
        weights = {
            plan.layer.name: self._weight(name, plan.layer) for name, plan in zip(layers.names, plans, strict=True)
        }
        by_type = {type(statistic): statistic for statistic in layers.statistics}
        for modifier in self._modifiers:
            mine = [weights[plan.layer.name] for plan in plans if any(modifier is one for one in plan.modifiers)]
            if not mine:
                continue
            modifier.share_global_scale(mine)
            statistic = modifier.statistic(mine[0].layer)
            if statistic is None:
                for weight in mine:
                    modifier.apply(weight)
            else:
                self.errors += modifier.solve(mine, by_type[type(statistic)])
        for name, plan in zip(layers.names, plans, strict=True):
            self._store(name, plan, weights[plan.layer.name])

    def leave(self, block: str) -> None:
        for name, value in list(self._model.get_submodule(block).named_parameters(prefix=block)):
            if name.rpartition(".")[0] not in self._plans or not name.endswith(".weight"):
                self._results[self._names[name]] = value.detach().cpu().contiguous()
            self._put(name, torch.empty_like(value, device="meta"))
        finished = self._scratch / f"{block}.safetensors"
        if not finished.is_file():
            partial = finished.with_suffix(".partial")
            save_file(self._results, partial)
            partial.replace(finished)
        self._results = {}
        self.bar.update()

    def _weight(self, path: str, layer: Layer) -> Weight:
        """The layer's dense values. Zeros that they have already stay zeros, whoever made them."""
        stored = self._model.get_parameter(f"{path}.weight").detach()
        values = (stored.t() if layer.transposed else stored).clone()
        keep = values != 0
        return Weight(layer, values, keep=None if keep.all() else keep)

    def _store(self, path: str, plan: LayerPlan, weight: Weight) -> None:
        """Keep what is stored for the layer, and run on with exactly what will be read back."""
        outputs = {
            name: torch.empty(shape, dtype=dtype, device=self._device)
            for name, (shape, dtype) in plan.outputs().items()
        }
        plan.store(weight, outputs)
        self._results |= {name: value.cpu() for name, value in outputs.items()}
        self._put(f"{path}.weight", self._dense(plan, outputs))

    def _dense(self, plan: LayerPlan, stored: Mapping[str, Any]) -> Tensor:
        parts = {name.rpartition(".")[2]: stored[name][...] for name in plan.outputs()}
        if plan.scheme is None:
            return parts["weight"]
        return storage.decode(parts, plan.scheme, dtype=plan.layer.dtype)

    def _put(self, name: str, value: Tensor) -> None:
        path, _, attribute = name.rpartition(".")
        place = value if value.is_meta else value.to(self._device)
        self._model.get_submodule(path)._parameters[attribute] = nn.Parameter(place, requires_grad=False)


def _hollow_model(architecture: Architecture) -> PreTrainedModel:
    """The model with real buffers, and parameters on the meta device; experts with a layer for each projection."""
    with no_init_weights(), init_empty_weights(include_buffers=False):
        model = architecture.model_class(architecture.config)
    with torch.device("meta"):
        for name, merged in expert_merges(model).items():
            put_experts(model, name, [], merged)
    return model.eval()


def _tensor_names(checkpoint: Checkpoint, architecture: Architecture) -> dict[str, str]:
    """Parameter or buffer of the hollow model -> the checkpoint tensor that fills it."""
    names = {}
    for name in checkpoint:
        parameter = architecture.parameters.get(name)
        if parameter is None:
            continue
        if name in architecture.merged:
            found = re.match(r".*\.(\d+\.[^.]+(?:\..+)?)$", name)
            parameter = f"{parameter.rpartition('.')[0]}.{found[1]}" if found else parameter
        names[parameter] = name
    return names


def _in_order(recipe: Sequence[Modifier], planned: Sequence[LayerPlan], scanned: Sequence[LayerPlan]) -> list[Modifier]:
    """The scanned modifiers in the order of the recipe, whichever of them a layer has."""
    found: dict[int, Modifier] = {}
    for before, after in zip(planned, scanned, strict=True):
        found |= {id(old): new for old, new in zip(before.modifiers, after.modifiers, strict=True)}
    return [found[id(modifier)] for modifier in recipe if id(modifier) in found]


def _to(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) for name, value in batch.items()}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
