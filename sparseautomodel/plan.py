"""Every decision about a model and a recipe, made from the config and the file headers alone.

`plan` is what the user calls; `make_plan` is what loading and `oneshot` call, with the checkpoint already open.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from transformers import AutoConfig

from sparseautomodel import checks
from sparseautomodel.architecture import Architecture, auto_class_for, read_architecture
from sparseautomodel.checkpoint import Checkpoint, LazyTensor, open_checkpoint
from sparseautomodel.consumers import Consumer, consumers_of
from sparseautomodel.forecast import Forecast, forecast
from sparseautomodel.layers import StoredLayers, cache_scales, quantization_of, stored_layers
from sparseautomodel.modifiers import Layer, Modifier, ModifierError
from sparseautomodel.recipe import Recipe
from sparseautomodel.transform import LayerPlan, decode, describe, scan, transform

LIBRARIES_NBYTES = 400 << 20
"""Resident memory of Python, torch and transformers before any model, as measured on Linux."""


class PlanError(ValueError):
    """The recipe does not fit the model. Says every reason at once, before any weight is read."""


@dataclass(frozen=True)
class PlanRow:
    """One layer: what it is and what becomes of it."""

    name: str
    shape: tuple[int, int]
    dtype: str
    scheme: str | None
    sparsity: float | None
    modifiers: tuple[str, ...]
    nbytes_before: int
    nbytes_after: int


@dataclass(frozen=True)
class Plan:
    """What a recipe will do to a model. `print(plan)` is a table, `to_dict()` has a row a layer."""

    source: str
    recipe: Recipe | None
    """The recipe as evaluated: every automatic choice has become a value."""
    rows: tuple[PlanRow, ...]
    parameters: int
    parameters_changed: int
    nbytes_before: int
    nbytes_after: int
    peak_load_nbytes: int
    """Predicted peak resident memory of loading with the recipe, libraries included."""
    peak_stream_nbytes: int
    """Predicted peak resident memory of `oneshot` from files to files, libraries included."""
    consumers: tuple[Consumer, ...]
    notes: tuple[str, ...] = ()
    """What was decided where the recipe left it open, and what its class names leave alone."""
    warnings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    layers: tuple[LayerPlan, ...] = field(default=(), repr=False)
    """The work itself, for `transform`."""
    shared_scales: tuple[tuple[str, ...], ...] = field(default=(), repr=False)
    schemes: Mapping[str, QuantizationScheme] = field(default_factory=dict, repr=False)
    """Layer name -> how it is stored afterwards, whether this recipe did it or the source came so."""
    all_layers: tuple[Layer, ...] = field(default=(), repr=False)
    cache: QuantizationArgs | None = field(default=None, repr=False)
    """How keys and values are stored; None: as they are."""
    unties: bool = False
    """Whether tied layers come apart because only one of them is changed, or because the format cannot tie."""
    forecast: Forecast | None = None

    def raise_for_errors(self) -> None:
        """Raise `PlanError` with every error, if there is one."""
        if self.errors:
            raise PlanError(f"the recipe does not fit {self.source}:\n- " + "\n- ".join(self.errors))

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "recipe": self.recipe.to_dict() if self.recipe else None,
            "layers": [vars(row) | {"shape": list(row.shape), "modifiers": list(row.modifiers)} for row in self.rows],
            "parameters": self.parameters,
            "parameters_changed": self.parameters_changed,
            "nbytes_before": self.nbytes_before,
            "nbytes_after": self.nbytes_after,
            "peak_load_nbytes": self.peak_load_nbytes,
            "peak_stream_nbytes": self.peak_stream_nbytes,
            "forecast": self.forecast.to_dict() if self.forecast else None,
            "consumers": [consumer.to_dict() for consumer in self.consumers],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "errors": list(self.errors),
        }

    def __str__(self) -> str:
        """A table with one line for each run of like layers, the totals, who reads the result, notes and problems."""
        lines = [f"Plan for {self.source}", *(_table(self.rows) if self.rows else [])]
        share = self.parameters_changed / self.parameters if self.parameters else 0.0
        saved = self.nbytes_after / self.nbytes_before if self.nbytes_before else 1.0
        changed = sum(bool(row.modifiers) for row in self.rows)
        lines += [
            f"changes {changed} layers, {share:.1%} of {self.parameters / 1e6:,.1f} M parameters",
            f"size {size_text(self.nbytes_before)} -> {size_text(self.nbytes_after)} ({saved:.1%})",
            f"peak memory: {size_text(self.peak_load_nbytes)} to load with the recipe, "
            f"{size_text(self.peak_stream_nbytes)} to write it with oneshot",
        ]
        lines += [str(self.forecast)] if self.forecast else []
        for consumer in self.consumers:
            reasons = "".join(f"\n    - {reason}" for reason in consumer.reasons)
            lines.append(f"{consumer.name}: {'reads it' if consumer.reads else 'does not read it'}{reasons}")
        for label, texts in (("note", self.notes), ("warning", self.warnings), ("error", self.errors)):
            lines += [f"{label}: {text}" for text in texts]
        return "\n".join(lines)


def plan(
    name_or_path: str | os.PathLike[str],
    recipe: Any = None,
    *,
    trust_remote_code: bool | None = None,
    requantize: bool = False,
    device_budget: int | str | None = None,
    **kwargs: Any,
) -> Plan:
    """What `recipe` would do to the model in `name_or_path`, from `config.json` and the file headers alone.

    Args:
        recipe: anything `Recipe.load` takes; None describes the checkpoint as it is.
        requantize: allow a recipe over a checkpoint that is already compressed: it is decoded and done anew.
        device_budget: say in `.forecast` how the model will run under it, on `device` ("cpu"); a sample is read.
        kwargs: subfolder, revision, variant, token, cache_dir, local_files_only, ... as for `from_pretrained`.

    Raises:
        RecipeError: the recipe itself is wrong. What does not fit the model is in `.errors` instead.
        CheckpointError: the files are missing or damaged.

    >>> print(plan("model-folder", "w4a16"))  # doctest: +SKIP
    """
    recipe = None if recipe is None else Recipe.load(recipe)
    key_mapping, device = kwargs.pop("key_mapping", None), torch.device(kwargs.pop("device", None) or "cpu")
    named = {key: value for key, value in kwargs.items() if key not in ("variant", "use_safetensors")}
    config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code, **named)
    checkpoint = open_checkpoint(name_or_path, **kwargs)
    architecture = read_architecture(
        auto_class_for(config), config, checkpoint, key_mapping=key_mapping, trust_remote_code=trust_remote_code
    )
    found = make_plan(str(name_or_path), checkpoint, architecture, recipe, requantize=requantize)
    if device_budget is not None and not found.errors:
        tensors = planned_tensors(checkpoint, architecture, found, device)
        found = replace(found, forecast=forecast(tensors, architecture, device_budget, device))
    return found


def make_plan(
    source: str,
    checkpoint: Checkpoint,
    architecture: Architecture,
    recipe: Recipe | None,
    *,
    requantize: bool = False,
    with_data: bool = True,
) -> Plan:
    """The plan for an open checkpoint. Errors are collected, not raised; without data, modifiers that need it are."""
    stored = stored_layers(checkpoint, architecture)
    misfits = architecture.misshapen(checkpoint)
    cache, wrong = checks.cache(recipe, architecture)
    problems, warnings = [*stored.problems, *wrong], misfits + architecture.missing_experts()
    notes: list[str] = []
    plans: list[LayerPlan] = []
    layers = list(stored.layers)
    tied = architecture.tied_layers(layers, checkpoint)
    candidates = layers + [layer for layer, _ in tied]
    if recipe is not None:
        problems += checks.other_method(architecture.config)
        problems += [] if with_data else checks.needs_data(recipe.modifiers)
        recipe = _resolve(recipe, candidates, problems, warnings, notes)
        plans = _layer_plans(recipe.modifiers, layers, tied)
        if stored.schemes and not requantize:
            problems += checks.over_compressed(plans, stored)
            plans = []
        misshapen = checks.shapes(plans) + checks.misfits(plans, misfits)
        problems += [*misshapen, *checks.fused(plans, candidates), *checks.experts(recipe, architecture, layers)]
        problems += checks.storable(plans, architecture) + checks.smoothed_for_nothing(plans)
        notes += checks.left_alone(recipe.modifiers, candidates)
        warnings += checks.skipped(recipe.modifiers, candidates) + checks.read_twice(recipe.modifiers)
        plans = [] if misshapen else plans  # what they would come to cannot be said
    schemes = dict(stored.schemes) if not plans else {}
    schemes |= {plan.layer.name: plan.scheme for plan in plans if plan.scheme is not None}
    compressed = [(layer, schemes[layer.name]) for layer in candidates if layer.name in schemes]
    dense = [layer for layer in candidates if layer.name not in schemes]
    unties = _unties(architecture, checkpoint, plans, [layer for layer, _ in compressed])
    if unties and recipe is not None and not architecture.can_untie:
        problems.append(
            f"{type(architecture.config).__name__} always ties the head to the embedding: one of them cannot be "
            "changed or quantized apart from the other. Put them in ignore"
        )
    elif unties:
        notes.append(
            "the embedding and the head share one tensor in the source and are stored apart in the result "
            "(tie_word_embeddings: false): what is quantized or changed alone cannot be tied"
        )
    before, after, largest = _sizes(checkpoint, stored, plans)
    nbytes = _layer_nbytes(checkpoint)
    return Plan(
        source=source,
        recipe=recipe,
        rows=tuple(_row(plan, nbytes) for plan in plans)
        or tuple(_stored_row(layer, stored, nbytes) for layer in stored.layers),
        parameters=sum(math.prod(layer.shape) for layer in stored.layers) + stored.other_parameters,
        parameters_changed=sum(math.prod(plan.layer.shape) for plan in plans if plan.modifiers),
        nbytes_before=before,
        nbytes_after=after,
        peak_load_nbytes=LIBRARIES_NBYTES + after + 2 * largest,
        peak_stream_nbytes=LIBRARIES_NBYTES + 2 * largest,
        consumers=consumers_of(compressed, dense, architecture.initializes([layer for layer, _ in compressed]), cache),
        notes=tuple(dict.fromkeys(notes)),
        warnings=tuple(dict.fromkeys(warnings)),
        errors=tuple(dict.fromkeys(problems)),
        layers=tuple(plans),
        shared_scales=tuple(checks.shared_scales(plans)),
        schemes=schemes,
        cache=cache,
        all_layers=(*candidates, *architecture.unstored_layers(candidates)),
        unties=unties,
    )


def planned_tensors(
    checkpoint: Checkpoint, architecture: Architecture, plan: Plan, device: torch.device
) -> dict[str, LazyTensor]:
    """The virtual checkpoint: what the plan makes of `checkpoint`, nothing read yet but by a global scan."""
    tensors: Mapping[str, LazyTensor] = checkpoint
    if not plan.layers:
        return dict(tensors)
    if quantization_of(architecture.config) is not None:
        stored = stored_layers(checkpoint, architecture)
        scales = cache_scales(tensors, architecture.config)
        kept = {name: tensor for name, tensor in tensors.items() if name not in scales}
        tensors = decode(kept, stored.schemes, stored.layers)
    result = transform(tensors, scan(plan.layers, tensors), plan.shared_scales, device)
    spelled = {} if plan.unties else architecture.tied_names(result)
    return {spelled.get(name, name): tensor for name, tensor in result.items()}


def _resolve(
    recipe: Recipe, layers: Sequence[Layer], problems: list[str], warnings: list[str], notes: list[str]
) -> Recipe:
    """The recipe with every automatic choice made; what its patterns match, or fail to, is said."""
    resolved = []
    for modifier in recipe.modifiers:
        label = type(modifier).__name__
        problems += checks.unmatched_targets(modifier, layers)
        warnings += checks.unmatched_ignores(modifier, layers)
        selected = [layer for layer in layers if modifier.selects(layer)]
        problems += checks.selects_nothing(modifier, selected, layers)
        try:
            fixed = modifier.resolve(selected) if selected else modifier
        except ModifierError as error:
            problems.append(f"{label}: {error}")
            fixed = modifier
        if fixed != modifier:
            given = modifier.to_dict()
            chosen = {key: value for key, value in fixed.to_dict().items() if given.get(key) != value}
            notes.append(
                f"{label}: chosen for this model: {', '.join(f'{key}: {value}' for key, value in chosen.items())}"
            )
        resolved.append(fixed)
    return Recipe(tuple(resolved), source=recipe.source)


def _layer_plans(
    modifiers: Sequence[Modifier], layers: Sequence[Layer], tied: Sequence[tuple[Layer, str]]
) -> list[LayerPlan]:
    """One entry a layer that is changed, or that comes apart from the layer it was tied to."""
    plans = {}
    for layer in layers:
        if mine := _selecting(modifiers, layer):
            plans[f"{layer.name}.weight"] = LayerPlan(layer, f"{layer.name}.weight", mine, _scheme(mine, layer))
    result, alike = list(plans.values()), list[LayerPlan]()
    for layer, source in tied:
        mine, holder = _selecting(modifiers, layer), plans.get(source)
        scheme = _scheme(mine, layer)
        pruned_alike = holder is not None and holder.modifiers == mine and holder.scheme is scheme is None
        untouched = not mine and holder is None
        (alike if pruned_alike or untouched else result).append(LayerPlan(layer, source, mine, scheme))
    # One flag unties them all, so that where one comes apart the others are stored apart too.
    return result if len(result) == len(plans) else result + alike


def _selecting(modifiers: Sequence[Modifier], layer: Layer) -> tuple[Modifier, ...]:
    return tuple(modifier for modifier in modifiers if modifier.selects(layer))


def _scheme(modifiers: Sequence[Modifier], layer: Layer) -> QuantizationScheme | None:
    schemes = [scheme for modifier in modifiers if (scheme := modifier.scheme_of(layer)) is not None]
    return schemes[-1] if schemes else None


def _unties(
    architecture: Architecture, checkpoint: Checkpoint, plans: Sequence[LayerPlan], compressed: Sequence[Layer]
) -> bool:
    """Whether tied parameters come apart: one is stored compressed, or they are changed differently."""
    if any(plan.source != f"{plan.layer.name}.weight" for plan in plans):
        return True
    packed = {f"{layer.module}.weight" for layer in compressed}
    changed = {f"{plan.layer.module}.weight": plan.modifiers for plan in plans}
    stored = {architecture.parameters[name] for name in checkpoint if name in architecture.parameters}
    return any(
        target in packed
        or source in packed
        or ({target, source} <= stored and changed.get(target) != changed.get(source))
        for target, source in architecture.ties.items()
    )


def _sizes(checkpoint: Checkpoint, stored: StoredLayers, plans: Sequence[LayerPlan]) -> tuple[int, int, int]:
    """Bytes before, bytes after, bytes of the largest tensor."""
    before, largest = checkpoint.nbytes, max((tensor.nbytes for tensor in checkpoint.values()), default=0)
    if not plans:
        return before, before, largest
    # What is compressed already is decoded, all of it, before anything else is done.
    decoded = [layer for layer in stored.layers if layer.name in stored.schemes]
    packed = _layer_nbytes(checkpoint)
    own = [plan.layer for plan in plans if plan.source == f"{plan.layer.name}.weight"]
    unpacked = {layer.name: math.prod(layer.shape) * layer.dtype.itemsize for layer in [*decoded, *own]}
    dense = before + sum(unpacked[layer.name] - packed[layer.name] for layer in decoded)
    after = dense - sum(unpacked[layer.name] for layer in own) + sum(plan.nbytes for plan in plans)
    return before, after, max([largest, *(unpacked[layer.name] for layer in decoded)])


def _layer_nbytes(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of the tensors of each module of the files, biases left out."""
    nbytes: dict[str, int] = {}
    for name, tensor in checkpoint.items():
        owner, _, part = name.rpartition(".")
        nbytes[owner] = nbytes.get(owner, 0) + (0 if part == "bias" else tensor.nbytes)
    return nbytes


def _row(plan: LayerPlan, nbytes: Mapping[str, int]) -> PlanRow:
    known = [share for modifier in plan.modifiers if (share := modifier.sparsity_of(plan.layer)) is not None]
    return PlanRow(
        name=plan.layer.name,
        shape=plan.layer.shape,
        dtype=str(plan.layer.dtype).removeprefix("torch."),
        scheme=None if plan.scheme is None else describe(plan.scheme),
        sparsity=max(known, default=None),
        modifiers=tuple(type(modifier).__name__ for modifier in plan.modifiers),
        nbytes_before=nbytes.get(plan.layer.name, 0),
        nbytes_after=plan.nbytes,
    )


def _stored_row(layer: Layer, stored: StoredLayers, nbytes: Mapping[str, int]) -> PlanRow:
    """A layer as it is in the files, for a plan without a recipe."""
    scheme, size = stored.schemes.get(layer.name), nbytes[layer.name]
    dtype = str(layer.dtype).removeprefix("torch.")
    text = None if scheme is None else describe(scheme)
    return PlanRow(layer.name, layer.shape, dtype, text, None, (), size, size)


def _table(rows: Sequence[PlanRow]) -> list[str]:
    """One line for each run of layers that differ in their index alone."""
    grouped: dict[tuple[Any, ...], list[PlanRow]] = {}
    for row in rows:
        key = (re.sub(r"(?<=\.)\d+(?=\.)", "*", row.name), row.shape, row.dtype, row.scheme, row.sparsity)
        grouped.setdefault(key, []).append(row)
    cells = [("layer", "count", "shape", "stored as", "zeros", "before", "after")]
    for (name, shape, dtype, scheme, sparsity), group in grouped.items():
        before, after = sum(row.nbytes_before for row in group), sum(row.nbytes_after for row in group)
        zeros = "" if sparsity is None else f"{sparsity:.0%}"
        size = f"{shape[0]} x {shape[1]}"
        cells.append((name, str(len(group)), size, scheme or dtype, zeros, size_text(before), size_text(after)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    ]


def size_text(nbytes: float) -> str:
    """Bytes for people: `1.23 GB`."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"
