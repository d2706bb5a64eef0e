"""What happens to a model's blocks while it is walked through: each read, smoothed, solved, stored and freed."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import init_empty_weights
from compressed_tensors.quantization import QuantizationStatus
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from sparseautomodel.architecture import Architecture, expert_merges
from sparseautomodel.callbacks import Callbacks
from sparseautomodel.checkpoint import Checkpoint, LazyTensor, Reads, StoredTensor, open_files
from sparseautomodel.compressed_layers import round_activations
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.modifiers import Layer, Modifier, Weight
from sparseautomodel.quantizer import put_experts
from sparseautomodel.ranges import InputRange
from sparseautomodel.sets import LayerSet
from sparseautomodel.smoother import Smoother
from sparseautomodel.spill import Spill
from sparseautomodel.statistics import LayerError
from sparseautomodel.transform import LayerPlan
from sparseautomodel.witness import Comparison

OUTSIDE = "outside"
"""File of the layers outside the blocks that data has changed."""


class Solving(Callbacks):
    """Reads blocks, solves their layers by the plan, stores what they have become."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        architecture: Architecture,
        plans: Mapping[str, LayerPlan],
        modifiers: Sequence[Modifier],
        scratch: Path,
        device: torch.device,
    ) -> None:
        """
        Args:
            plans: layers by the name of their module in the hollow model.
            modifiers: in the order of the recipe.
        """
        self.model = hollow_model(architecture)
        self._checkpoint, self._plans, self._modifiers = checkpoint, plans, modifiers
        self._scratch, self._device = scratch, device
        self._names = _tensor_names(checkpoint, architecture)
        self._files = Spill(scratch, 0)
        self._results: dict[str, Tensor] = {}
        self._blocks: tuple[str, ...] = ()
        self._ends: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}
        self._started = 0.0
        self._ranges: dict[str, list[InputRange]] = {}
        self._found_scales: dict[str, dict[str, Tensor]] = {}
        """Of inputs, layer by layer, where the scheme has them found beforehand."""
        self.smoother = Smoother(modifiers, plans)
        self.errors: list[LayerError] = []
        self.seconds: dict[str, float] = {}
        self.comparison = Comparison(causal="CausalLM" in type(self.model).__name__)
        self.progress: Callable[[], Any] = lambda: None

    def load_outside(self, blocks: Sequence[str]) -> None:
        """Read what lies outside the blocks, but for the head, which no forward reaches before the end."""
        self._blocks = tuple(f"{block}." for block in blocks)
        head = self.model.get_output_embeddings()
        for name, _ in list(self.model.named_parameters(remove_duplicate=False)):
            if not name.startswith(self._blocks) and self._owner(name) is not head:
                self._read(name)
        # They are used at the beginning and at the end: in between they wait in files.
        for parameter in self.model.parameters():
            self._files.wait(parameter)
        self._files.rest()
        for name, buffer in list(self.model.named_buffers()):
            stored = self._names.get(name)
            value = buffer if stored is None else self._checkpoint[stored][...]
            self._owner(name)._buffers[name.rpartition(".")[2]] = value.to(self._device)

    def load_head(self) -> None:
        """Read the head, unless it is there."""
        head = self.model.get_output_embeddings()
        for name, value in list(self.model.named_parameters(remove_duplicate=False)):
            if value.is_meta and self._owner(name) is head:
                self._read(name)

    def change_outside(self, path: str, stored: Mapping[str, Any]) -> None:
        """`path`, which lies outside the blocks, has become what is stored."""
        name = f"{path}.weight"
        self._ends[True].setdefault(name, self.model.get_parameter(name).detach())
        self._ends[False][name] = self._dense(path, stored).to(self._device)

    def outside_tensors(self) -> dict[str, LazyTensor]:
        """What was read outside the blocks, as tensors in memory, so that it is not read again to be written."""
        reads = Reads()
        values = {name: value.detach() for name, value in self.model.named_parameters()}
        values |= dict(self.model.named_buffers()) | self._ends[True]
        return {
            name: StoredTensor(name, tuple(value.shape), value.dtype, "memory", value, reads)
            for parameter, name in self._names.items()
            if (value := values.get(parameter)) is not None and not value.is_meta
        }

    def outside(self, source: bool) -> None:
        for name, value in self._ends[source].items():
            self._put(name, value)

    def enter(self, block: str) -> None:
        self._files.rest()
        self._started, self._ranges = time.perf_counter(), {}
        for name, _ in list(self.model.get_submodule(block).named_parameters(prefix=block)):
            self._put(name, self._finite(name))

    def restore(self, block: str) -> bool:
        known = self._finished(block)
        for name, _ in list(self.model.get_submodule(block).named_parameters(prefix=block)) if known else []:
            path = name.rpartition(".")[0]
            changed = path in self._plans and name.endswith(".weight")
            self._put(name, self._dense(path, known) if changed else known[self._names[name]][...])
        return bool(known)

    def found(self, block: str, sets: Sequence[LayerSet], run: Callable[[], Tensor]) -> None:
        self.smoother.enter(block, self.model.get_submodule(block), sets, run)

    def gather(self, names: Sequence[str]) -> list[Any]:
        found: dict[Any, Any] = {}
        for name in names:
            plan = self._plans[name]
            for modifier in plan.modifiers:
                for statistic in (modifier.statistic(plan.layer), modifier.input_range(plan.layer)):
                    if statistic is not None:
                        found.setdefault(type(statistic), statistic)
        return list(found.values())

    def solve(self, layers: LayerSet) -> None:
        if any(self.model.get_parameter(f"{name}.weight").is_meta for name in layers.names):
            self.load_head()
        plans = [self._plans[name] for name in layers.names]
        weights = {
            plan.layer.name: self._weight(name, plan.layer) for name, plan in zip(layers.names, plans, strict=True)
        }
        again = self.smoother.smooth(layers, list(weights.values()))
        if again is not None:
            self._store(again, self._plans[again], self.smoother.solved(again))
        for name in layers.names:
            if name.startswith(self._blocks):  # the values in hand are the only ones from here on
                self._put(f"{name}.weight", torch.empty_like(self.model.get_parameter(f"{name}.weight"), device="meta"))
        by_type = {type(statistic): statistic for statistic in layers.statistics}
        errors: list[LayerError] = []
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
                errors += modifier.solve(mine, by_type[type(statistic)])
            if any(modifier.input_range(weight.layer) is not None for weight in mine):
                found = modifier.set_input_scales(mine, by_type[InputRange], self._ranges_of(layers))
                said = {error.name for error in errors}
                errors += [error for error in found if error.name not in said]
        smoothed = layers.names[0] in self.smoother.smoothed
        if smoothed and not errors:  # what rounds them has not measured it
            errors = [LayerError(name, math.nan, math.nan) for name in weights]
        self.errors += [replace(error, tokens=layers.num_tokens, smoothed=smoothed) for error in errors]
        for name, plan in zip(layers.names, plans, strict=True):
            self._store(name, plan, weights[plan.layer.name])
            self.smoother.keep(name, weights[plan.layer.name])

    def rounded(self, name: str, inputs: Tensor) -> Tensor:
        scheme = self._plans[name].scheme
        if scheme is None or scheme.input_activations is None:
            return inputs
        said = {"quantization_scheme": scheme, "quantization_status": QuantizationStatus.COMPRESSED}
        return round_activations(SimpleNamespace(**said, **self._found_scales.get(name, {})), inputs, "input")

    def _ranges_of(self, layers: LayerSet) -> list[InputRange]:
        """Ranges of the inputs of the same layers in the block's other experts, as far as tokens came to them."""
        alike = re.sub(r"\.\d+\.", ".*.", layers.names[0])
        others = self._ranges.setdefault(alike, [])
        mine = [one for one in layers.statistics if isinstance(one, InputRange) and one.tokens]
        known = list(others)
        others += mine
        return known

    def leave(self, block: str) -> None:
        for name, value in list(self.model.get_submodule(block).named_parameters(prefix=block)):
            if name.rpartition(".")[0] not in self._plans or not name.endswith(".weight"):
                self._results[self._names[name]] = value.detach().cpu().contiguous()
            self._put(name, torch.empty_like(value, device="meta"))
        self.seconds[block] = time.perf_counter() - self._started
        self.finish(block)
        self.progress()

    def finish(self, part: str) -> None:
        """Write what has been solved since the last call, unless an earlier run has done so."""
        path = self._scratch / f"{part}.safetensors"
        mine = {name.rpartition(".")[0] for name in self._results}
        if self._results and not path.is_file():
            errors = [asdict(error) for error in self.errors if error.name in mine]
            save_file(self._results, path.with_suffix(".partial"), metadata={"errors": json.dumps(errors)})
            path.with_suffix(".partial").replace(path)
        elif part == OUTSIDE:
            self._finished(part)
        self._results = {}

    def compare(self, block: str, source: Tensor, result: Tensor) -> None:
        self.comparison.add_block(block, source, result)

    def compare_ends(self, row: Mapping[str, Tensor], source: Any, result: Any) -> None:
        self.comparison.add_ends(row, source, result)

    def _finished(self, part: str) -> dict[str, LazyTensor]:
        """What an earlier run has made of a block, with its errors; or nothing."""
        path = self._scratch / f"{part}.safetensors"
        if not path.is_file():
            return {}
        try:
            with safe_open(path, "pt") as file:
                errors = [LayerError(**error) for error in json.loads(file.metadata()["errors"])]
        except (SafetensorError, TypeError, KeyError, ValueError) as error:
            raise damaged(path) from error
        self.errors += errors
        return dict(open_files([str(path)]))

    def _weight(self, path: str, layer: Layer) -> Weight:
        """The layer's dense values. Zeros that they have already stay zeros, whoever made them."""
        stored = self.model.get_parameter(f"{path}.weight").detach()
        values = stored.t() if layer.transposed else stored
        if not path.startswith(self._blocks):
            values = values.clone()  # it may be tied, and is compared with what it becomes
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
        if not path.startswith(self._blocks):
            self.change_outside(path, outputs)
        self._put(f"{path}.weight", self._dense(path, outputs))

    def _dense(self, path: str, stored: Mapping[str, Any]) -> Tensor:
        """The weight that is stored for a layer; the scales of its inputs are kept."""
        plan = self._plans[path]
        parts = {name.rpartition(".")[2]: stored[name][...] for name in plan.outputs()}
        self._found_scales[path] = {
            name: part.to(self._device) for name, part in parts.items() if name.startswith("input")
        }
        if plan.scheme is None:
            return parts["weight"]
        return storage.decode(parts, plan.scheme, dtype=plan.layer.dtype)

    def _read(self, name: str) -> None:
        """Fill a parameter outside the blocks, from its tensor or from what it is tied to."""
        if name in self._names:
            if self.model.get_parameter(name).is_meta:
                self._put(name, self._finite(name))
            return
        tied = self.model.all_tied_weights_keys.get(name)
        if tied is not None:
            self._read(tied)
            self._owner(name)._parameters[name.rpartition(".")[2]] = self.model.get_parameter(tied)

    def _finite(self, name: str) -> Tensor:
        """A parameter of the source, which is of no use when it has values that are not finite."""
        value = self._checkpoint[self._names[name]][...]
        # The sum alone is a tenth of the work, and is finite unless it overflows.
        if value.is_floating_point() and not value.sum().isfinite() and not value.isfinite().all():
            raise ValueError(
                f"{self._names[name]} of the source has values that are not finite (nan or inf), and calibration would "
                "spread them: give a source that is whole"
            )
        return value

    def _put(self, name: str, value: Tensor) -> None:
        place = value if value.is_meta else value.to(self._device)
        self._owner(name)._parameters[name.rpartition(".")[2]] = nn.Parameter(place, requires_grad=False)

    def _owner(self, name: str) -> nn.Module:
        return self.model.get_submodule(name.rpartition(".")[0])


def damaged(path: Path) -> ValueError:
    """What is said of a file of a finished block that cannot be used."""
    return ValueError(
        f"{path}, of a run that is resumed, is damaged. Delete it: resume=True then solves that part again; "
        "or start anew with resume=False"
    )


def hollow_model(architecture: Architecture) -> PreTrainedModel:
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
