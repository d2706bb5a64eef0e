"""The transform step: one checkpoint becomes another, a layer at a time, while it is read.

`transform` returns a mapping of lazy tensors in the layout of compressed-tensors. Slicing one of them reads the dense
weight behind it, runs the layer's modifiers, packs the result, and keeps it until its other tensors are taken too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy, QuantizationType

from sparseautomodel.checkpoint import LazyTensor, StoredTensor
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.modifiers import Layer, Modifier, Weight
from sparseautomodel.pieces import Pieces, Range, Window
from sparseautomodel.threads import SIDE_BY_SIDE, torch_threads

CHUNK_ELEMENTS = 1 << 19
"""Weights in hand at a time on a CPU: 1 MB of bfloat16, which stays in a core's own cache through all steps."""

PACKED_ROWS = 32
"""Chunks are multiples of this many rows: zero points are packed along rows, 32 to a whole number of words."""


@dataclass(frozen=True)
class LayerPlan:
    """What happens to one layer: where its values come from, which modifiers run, how the result is stored."""

    layer: Layer
    source: str
    """The checkpoint tensor that holds the dense values; another layer's when the two are tied."""
    modifiers: tuple[Modifier, ...]
    scheme: QuantizationScheme | None = None
    """None: the result is stored dense, under `source`'s spelling of the layer's own name."""

    def outputs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Full tensor name -> shape and dtype of what is stored for the layer."""
        name, shape = self.layer.name, self.layer.shape
        if self.scheme is not None:
            parts = storage.layout(self.scheme, shape, self.layer.dtype)
            return {f"{name}.{part}": what for part, what in parts.items()}
        stored = (shape[1], shape[0]) if self.layer.transposed else shape
        return {f"{name}.weight": (stored, self.layer.dtype)}

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.outputs().values())

    def store(self, weight: Weight, outputs: Mapping[str, torch.Tensor], start: int = 0) -> None:
        """Write the rows in `weight`, which are those from `start` on, into the layer's tensors of `outputs`."""
        if self.scheme is not None:
            if weight.scale is None:
                raise ValueError(f"no modifier has found a scale for {self.layer.name}")
            parts = {name.rpartition(".")[2]: outputs[name] for name in self.outputs()}
            for part in [part for part in parts if part.startswith("input_")]:
                value = getattr(weight, part)
                if value is None:
                    raise ValueError(f"no modifier has found {part} for {self.layer.name}: it needs calibration data")
                parts[part].copy_(value)
            storage.encode(
                weight.values,
                self.scheme,
                parts,
                scale=weight.scale,
                zero_point=weight.zero_point,
                global_scale=weight.global_scale,
                start=start,
            )
            return
        stored, stop = outputs[f"{self.layer.name}.weight"], start + weight.values.shape[0]
        if self.layer.transposed:
            stored[:, start:stop] = weight.values.t()
        else:
            stored[start:stop] = weight.values


class DerivedTensor(LazyTensor):
    """A tensor that is computed when it is sliced."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, work: Work | Decoding) -> None:
        super().__init__(name, shape, dtype)
        self._work = work

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(self._work, Work):
            return self._work.take(self.name, index)
        values = self._work.take(self.name)
        return values if index is Ellipsis else values[index].clone()  # a view would keep all of them


def transform(
    tensors: Mapping[str, LazyTensor],
    plans: Sequence[LayerPlan],
    shared_scales: Sequence[Sequence[str]] = (),
    device: torch.device | str | None = None,
) -> dict[str, LazyTensor]:
    """The checkpoint that `plans` turn `tensors` into, in the same order, with nothing read yet.

    Args:
        shared_scales: sets of layer names that must have one global scale in common, since servers fuse them.
        device: where the modifiers run. The dense weight is moved there once; the results stay there.
    """
    device = torch.device(device or "cpu")
    turn = threading.Semaphore(SIDE_BY_SIDE if device.type == "cpu" else 1)  # whatever the number of loader threads
    units = _units(plans, shared_scales)
    changed = {plan.source: unit for unit in units for plan in unit}
    untied = {plan.source for plan in plans if f"{plan.layer.name}.weight" != plan.source}
    untied -= {plan.source for plan in plans if f"{plan.layer.name}.weight" == plan.source}
    result: dict[str, LazyTensor] = {}
    done: set[int] = set()
    for name, tensor in tensors.items():
        unit = changed.get(name)
        if unit is None:
            result[name] = tensor
        elif id(unit) not in done:
            done.add(id(unit))
            kept = [source for source in dict.fromkeys(plan.source for plan in unit) if source in untied]
            work = Work(unit, {plan.source: tensors[plan.source] for plan in unit}, kept, device, turn)
            result.update(work.outputs())
    return result


def scan(plans: Sequence[LayerPlan], tensors: Mapping[str, LazyTensor]) -> list[LayerPlan]:
    """The plans with modifiers that know what they need of all their layers; only a global threshold costs a read."""
    known: list[tuple[Modifier, Modifier]] = []
    for modifier in (modifier for plan in plans for modifier in plan.modifiers):
        if not any(modifier is old for old, _ in known):
            sources = dict.fromkeys(plan.source for plan in plans if any(modifier is one for one in plan.modifiers))
            known.append((modifier, modifier.scan(partial(_read, tensors, tuple(sources)))))
    new = {id(old): new for old, new in known}
    return [replace(plan, modifiers=tuple(new[id(modifier)] for modifier in plan.modifiers)) for plan in plans]


def _read(tensors: Mapping[str, LazyTensor], names: Sequence[str]) -> Iterator[torch.Tensor]:
    return (tensors[name][...] for name in names)


class Work:
    """A layer (or the few that share a source or a global scale) on its way through its modifiers."""

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        sources: Mapping[str, LazyTensor],
        kept: Sequence[str],
        device: torch.device,
        turn: threading.Semaphore,
    ) -> None:
        self._plans, self._sources, self._kept, self._device, self._turn = plans, sources, kept, device, turn
        self._lock, self._threads = threading.Lock(), torch.get_num_threads()
        self._results: dict[str, torch.Tensor] | None = None
        self._shapes = {name: what for plan in plans for name, what in plan.outputs().items()}
        self._shapes |= {name: (tuple(sources[name].shape), sources[name].dtype) for name in kept}
        self._pieces = self._cut()

    def outputs(self) -> dict[str, LazyTensor]:
        return {name: DerivedTensor(name, shape, dtype, self) for name, (shape, dtype) in self._shapes.items()}

    def take(self, name: str, index: Any = ...) -> torch.Tensor:
        """The result called `name`, or a slice of it; the results are let go as they are taken."""
        with self._lock:
            if self._pieces is not None:
                return self._take_piece(self._pieces, name, index)
            if self._results is None or name not in self._results:
                self._results = self._limited(self._run)
            values = self._results.pop(name)
            return values if index is Ellipsis else values[index].clone()

    def _cut(self) -> Pieces | None:
        """For a layer of whose result a part can be computed from a part of its weight alone."""
        plan, sources = self._plans[0], list(self._sources.values())
        layer, scheme = plan.layer, plan.scheme
        spans = {"weight": (Fraction(1), Fraction(1))} if scheme is None else storage.spans(scheme)
        spans = {part: both for part, both in spans.items() if part != "weight_shape"}
        rows = [modifier.rows(layer) for modifier in plan.modifiers]
        whole = layer.transposed or any(both[0] is None for both in spans.values()) or layer.shape[0] in rows
        if len(self._plans) > 1 or self._kept or whole or not isinstance(sources[0], StoredTensor):
            return None
        columns = [modifier.columns(layer) for modifier in plan.modifiers]
        units = math.lcm(*rows), layer.shape[1] if layer.shape[1] in columns else math.lcm(*columns)

        def compute(rows: Range, columns: Range) -> dict[str, torch.Tensor]:
            part = replace(plan, layer=replace(layer, shape=(rows[1] - rows[0], columns[1] - columns[0])))
            window = Window(sources[0], rows, columns)
            results = self._limited(Work([part], {plan.source: window}, [], self._device, self._turn)._run)
            return {name.rpartition(".")[2]: values for name, values in results.items() if name in named}

        named = {f"{layer.name}.{part}" for part in spans}
        return Pieces(layer.shape, spans, units, compute)

    def _take_piece(self, pieces: Pieces, name: str, index: Any) -> torch.Tensor:
        part, (shape, dtype) = name.rpartition(".")[2], self._shapes[name]
        given = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        if part == "weight_shape":
            return torch.tensor(self._plans[0].layer.shape, device=self._device)[given or ...]
        ranges = [one.indices(size)[:2] for one, size in zip(given, shape, strict=False)]
        ranges += [(0, size) for size in shape[len(ranges) :]]
        sizes = [max(0, stop - start) for start, stop in ranges]
        if 0 in sizes:
            return torch.empty(sizes, dtype=dtype, device=self._device)
        return pieces.take(part, *ranges)

    def _limited(self, run: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What `run` returns, with this work's share of the threads, when it is its turn."""
        share = max(1, self._threads // SIDE_BY_SIDE)
        with self._turn, torch_threads(share, self._threads), torch.no_grad():
            return run()

    def _run(self) -> dict[str, torch.Tensor]:
        results = {
            name: torch.empty(shape, dtype=dtype, device=self._device) for name, (shape, dtype) in self._shapes.items()
        }
        global_scale, whole = self._read_together()
        for source, tensor in self._sources.items():
            plans = [plan for plan in self._plans if plan.source == source]
            step = _rows_in_hand(plans, self._device)
            values = whole.get(source)
            if values is None and (not isinstance(tensor, (StoredTensor, Window)) or plans[0].layer.transposed):
                values = tensor[...].to(self._device)
            if values is not None and plans[0].layer.transposed:
                values = values.t().contiguous()
            rows = plans[0].layer.shape[0]
            for start in range(0, rows, step):
                stop = min(rows, start + step)
                chunk = tensor[start:stop].to(self._device) if values is None else values[start:stop]
                if source in self._kept:
                    results[source][start:stop] = chunk
                for position, plan in enumerate(plans):
                    last = position == len(plans) - 1 and values is None
                    self._apply(plan, chunk if last else chunk.clone(), start, global_scale, results)
            whole.pop(source, None)
        return results

    def _read_together(self) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """The global scale of the set, and the weights that had to be read for it."""
        owners = [
            (plan, modifier) for plan in self._plans for modifier in plan.modifiers if modifier.scheme_of(plan.layer)
        ]
        if not owners or owners[0][0].scheme is None or owners[0][0].scheme.weights.strategy != "tensor_group":
            return None, {}
        whole = {source: tensor[...].to(self._device) for source, tensor in self._sources.items()}
        pruned = []
        for plan, owner in owners:
            weight = Weight(plan.layer, whole[plan.source].clone() if len(plan.modifiers) > 1 else whole[plan.source])
            for modifier in plan.modifiers[: plan.modifiers.index(owner)]:
                modifier.apply(weight)
            pruned.append(weight.values)
        plan, owner = owners[0]
        return owner.global_scale(plan.layer, pruned), whole  # type: ignore[attr-defined]

    def _apply(
        self,
        plan: LayerPlan,
        values: torch.Tensor,
        start: int,
        global_scale: torch.Tensor | None,
        results: dict[str, torch.Tensor],
    ) -> None:
        layer, stop = plan.layer, start + values.shape[0]
        try:
            weight = Weight(layer, values, global_scale=global_scale)
            for modifier in plan.modifiers:
                modifier.apply(weight)
            plan.store(weight, results, start)
        except Exception as error:
            steps = ", ".join(type(modifier).__name__ for modifier in plan.modifiers)
            raise RuntimeError(
                f"{layer.name} (shape {list(layer.shape)}, {layer.dtype}, rows {start} to {stop}) failed in {steps}"
                f"{'' if plan.scheme is None else f' with {describe(plan.scheme)}'}: {type(error).__name__}: {error}"
            ) from error


class Decoding:
    """A compressed layer on its way back to a dense weight."""

    def __init__(self, layer: Layer, parts: Mapping[str, LazyTensor], scheme: QuantizationScheme) -> None:
        self._layer, self._parts, self._scheme = layer, parts, scheme

    def take(self, name: str) -> torch.Tensor:
        """The dense values in the layer's dtype, computed as a model of that dtype computes them."""
        dtype = self._layer.dtype
        parts = {part: tensor[...] for part, tensor in self._parts.items()}
        plain = {part: value.to(loaded_dtype(part, value.dtype, dtype)) for part, value in parts.items()}
        return storage.decode(plain, self._scheme, dtype=dtype)


def decode(
    tensors: Mapping[str, LazyTensor], schemes: Mapping[str, QuantizationScheme], layers: Iterable[Layer]
) -> dict[str, LazyTensor]:
    """The dense checkpoint behind a compressed one: those of `layers` that `schemes` names get their `.weight` back.

    The dtype of a layer is that of its weight in the result.
    """
    by_name = {layer.name: layer for layer in layers if layer.name in schemes}
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        owner, _, part = name.rpartition(".")
        layer = by_name.get(owner)
        if layer is None or part == "bias":
            result[name] = tensor
        elif f"{owner}.weight" not in result:
            layout = storage.layout(schemes[owner], layer.shape, layer.dtype)
            parts = {part: tensors[f"{owner}.{part}"] for part in layout if f"{owner}.{part}" in tensors}
            work = Decoding(layer, parts, schemes[owner])
            result[f"{owner}.weight"] = DerivedTensor(f"{owner}.weight", layer.shape, layer.dtype, work)
    return result


def loaded_dtype(part: str, stored: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a model of `dtype` holds one tensor of a compressed layer: plain scales are cast to it."""
    plain = stored in (torch.float16, torch.bfloat16, torch.float32) and not part.endswith("global_scale")
    return dtype if plain else stored


def describe(scheme: QuantizationScheme) -> str:
    """A scheme in a few characters: `int4 group 64`, `float8 tensor, input float8 tensor static`."""
    parts = []
    for label, args in (
        ("", scheme.weights),
        ("input ", scheme.input_activations),
        ("output ", scheme.output_activations),
    ):
        if args is None:
            continue
        kind, strategy = QuantizationType(args.type).value, QuantizationStrategy(args.strategy).value
        size = args.group_size if strategy in ("group", "tensor_group") else args.block_structure
        where = f"{strategy} {size}" if size and size != -1 else strategy
        extra = " dynamic" if args.dynamic else ("" if args.symmetric else " asymmetric")
        extra += " in the order of activations" if args.actorder == "group" else ""
        if label and args.dynamic is not True:
            extra = " local" if args.dynamic else f"{extra} static"
        parts.append(f"{label}{kind}{args.num_bits} {where}{extra}")
    return ", ".join(parts) or "unquantized"


def _units(plans: Sequence[LayerPlan], shared_scales: Iterable[Sequence[str]]) -> list[list[LayerPlan]]:
    """Plans that have to be worked on together: those of one source, and those that share a global scale."""
    set_of = {name: names[0] for names in shared_scales for name in names}
    by_source = {plan.source: set_of.get(plan.layer.name, plan.source) for plan in reversed(plans)}
    units: dict[str, list[LayerPlan]] = {}
    for plan in plans:
        units.setdefault(by_source[plan.source], []).append(plan)
    return list(units.values())


def _rows_in_hand(plans: Sequence[LayerPlan], device: torch.device) -> int:
    rows, columns = plans[0].layer.shape
    together = [modifier.rows(plan.layer) for plan in plans for modifier in plan.modifiers]
    if device.type != "cpu" or rows in together:
        return rows
    unit = math.lcm(PACKED_ROWS, *together)
    return min(rows, max(unit, CHUNK_ELEMENTS // columns // unit * unit))
