"""What must hold after a load and after a save. One verdict names everything that does not."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.utils import calculate_range
from torch import nn
from transformers import AutoConfig
from transformers.quantizers.auto import AutoQuantizationConfig

from sparseautomodel.architecture import Architecture, auto_class_for, read_architecture
from sparseautomodel.checkpoint import Checkpoint, LazyTensor, open_checkpoint
from sparseautomodel.checks import fused_sets
from sparseautomodel.completeness import check_cache, check_names, check_parts, explained, few
from sparseautomodel.compressed_layers import CompressedLinear
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.initial_checks import check_initial, listed
from sparseautomodel.layers import StoredLayers, attention_modules, cache_scales, quantization_of, stored_layers
from sparseautomodel.masks import parse_structure, violations
from sparseautomodel.modifiers import Layer
from sparseautomodel.numbers import CHUNK_NUMBERS, LIMITS, is_finite
from sparseautomodel.plan import Plan
from sparseautomodel.rotations import rotation_tensors, rotations_of
from sparseautomodel.safetensors_file import CheckpointError
from sparseautomodel.threads import torch_threads
from sparseautomodel.writes import local

REPORT_NAME = "compression_report.json"


class VerificationError(ValueError):
    """Something that must hold does not. Names every tensor concerned."""


@dataclass(frozen=True)
class Verdict:
    """The result of `verify`."""

    subject: str
    problems: tuple[str, ...] = ()
    checked: int = 0
    """Tensors that were looked at."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raise `VerificationError` with every problem, if there is one."""
        if self.problems:
            raise VerificationError(f"{self.subject} is not in order:\n- " + "\n- ".join(self.problems))

    def to_dict(self) -> dict[str, Any]:
        return {"subject": self.subject, "ok": self.ok, "checked": self.checked, "problems": list(self.problems)}

    def __str__(self) -> str:
        if self.ok:
            return f"{self.subject}: {self.checked} tensors in order"
        return f"{self.subject}: {len(self.problems)} problems\n- " + "\n- ".join(self.problems)


def verify(model_or_path: Any, against: str | os.PathLike[str] | None = None, **kwargs: Any) -> Verdict:
    """Whether a model in memory, or a checkpoint on disk, holds what it should.

    A model, any `nn.Module`: nothing on the meta device or never written, every number finite (buffers may hold
    infinities), matrices that are drawn not constant, every scale positive, ties one object. A checkpoint: files
    and index whole, every tensor known to the model and every parameter filled, compressed layers complete, scales
    finite and positive, the config accepted by the stock parser, the zeros of the recipe where the report says so.

    Args:
        against: the checkpoint it was made from: what was zero must be zero, what the recipe left alone unchanged.
        kwargs: trust_remote_code, subfolder, revision, ... for a checkpoint; for a model `dtype` of its parameters,
            `device` of all its tensors, and an `optimizer`, which must hold its parameters and none without values,
            and `after_each`, which is called after each tensor that was looked at.

    Raises:
        ValueError: it is neither a model nor a path. What is wrong with a checkpoint is in the verdict.

    >>> verify("compressed-folder", against="dense-folder").raise_for_problems()  # doctest: +SKIP
    """
    if not isinstance(model_or_path, (nn.Module, str, os.PathLike)):
        raise ValueError(
            f"verify takes a model, or the folder or name of a checkpoint, and was given {model_or_path!r}. Write "
            "verify(model) or verify('folder')"
        )
    with torch_threads(1, torch.get_num_threads()), torch.no_grad():  # the operations are many and small
        if isinstance(model_or_path, nn.Module):
            return _verify_model(model_or_path, **kwargs)
        return _verify_files(model_or_path, against, **kwargs)


def check_loading(checkpoint: Checkpoint, architecture: Architecture, plan: Plan, info: Mapping[str, Any]) -> list[str]:
    """What transformers' loading info and the read counter say against a load. Empty when all is well."""
    problems = []
    head_only = _outside_base(architecture, info["missing_keys"])
    missing = sorted(set(info["missing_keys"]) - head_only)
    if missing:
        problems.append(f"no tensor of the checkpoint fills {few(missing)}: they hold random values")
    extra = explained(checkpoint)
    unexpected = sorted(
        name for name in info["unexpected_keys"] if name not in extra and not _belongs_to_a_head(architecture, name)
    )
    if unexpected:
        problems.append(f"the model has no place for {few(unexpected)}: they were not used")
    for entry in info["mismatched_keys"]:
        name, stored, wanted = entry[0], list(entry[1]), list(entry[2])
        problems.append(f"{name} has shape {stored} in the checkpoint and {wanted} in the model")
    problems += [str(text) for text in info.get("error_msgs") or ()]
    problems += check_parts(checkpoint, architecture, () if plan.layers else plan.all_layers, plan.schemes)
    scanned = any(getattr(modifier, "apply_globally", False) for item in plan.layers for modifier in item.modifiers)
    often = [
        f"{name} ({times:g} times)" for name, (times, _) in checkpoint.reads().items() if times > (2 if scanned else 1)
    ]
    if often:
        problems.append(f"read more often than needed: {few(often)}")
    return problems


def _outside_base(architecture: Architecture, missing: Any) -> set[str]:
    """Missing parameters of a task head that the checkpoint does not have at all: a new head, as users expect.

    A checkpoint that was saved from this very class is damaged where its head is missing.
    """
    prefix, loaded = architecture.model_class.base_model_prefix, architecture.model_class.__name__
    saved = getattr(architecture.config, "architectures", None) or ()
    if not prefix or not hasattr(architecture.skeleton, prefix) or loaded in saved:
        return set()
    filled = {parameter.partition(".")[0] for parameter in architecture.parameters.values()}
    return {name for name in missing if not name.startswith(f"{prefix}.") and name.partition(".")[0] not in filled}


def _belongs_to_a_head(architecture: Architecture, name: str) -> bool:
    """Whether an unused tensor is part of the head of another class: this one is the base, or has its own head."""
    prefix, loaded = architecture.model_class.base_model_prefix, architecture.model_class.__name__
    saved = getattr(architecture.config, "architectures", None) or ()
    is_base = not hasattr(architecture.skeleton, prefix)
    known = {parameter.partition(".")[0] for parameter in architecture.parameters.values()}
    top = name.removeprefix(f"{prefix}.").partition(".")[0]
    of_another = is_base or bool(saved and loaded not in saved)
    return of_another and top not in known and not name.startswith(f"{prefix}.")


def _verify_model(model: nn.Module, **expected: Any) -> Verdict:
    tensors = [(name, local(value)) for name, value in (*model.named_parameters(), *model.named_buffers())]
    offloaded = "disk" in set((getattr(model, "hf_device_map", None) or {}).values())
    problems = check_initial(model, offloaded, **expected)
    scales = [name for name, value in _scales(model) if not value.is_meta and not is_positive(value)]
    if scales:
        problems.append(f"scales that are not above zero: {listed(scales)}")
    problems += [f"{name} overflows {dtype}: load it as bfloat16 or float32" for name, dtype in _overflows(model)]
    return Verdict(type(model).__name__, tuple(problems), len(tensors))


def _scales(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The scales of compressed layers; a model may call something else a scale, and hold any number there."""
    held = getattr(getattr(getattr(model, "config", None), "quantization_config", None), "cache", None) or ()
    for path, module in model.named_modules():
        compressed = getattr(module, "quantization_scheme", None) is not None
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, CompressedLinear):
            own |= module.stored()  # which a kernel may have laid out otherwise
        for part, value in own.items():
            name = f"{path}.{part}" if path else part
            if name.endswith("_scale") and (compressed or name in held):
                yield name, local(value)


def _overflows(model: nn.Module) -> Iterator[tuple[str, torch.dtype]]:
    """Compressed layers whose largest number times their largest scale is beyond the dtype they are run in."""
    for path, module in model.named_modules():
        scheme, scale = getattr(module, "quantization_scheme", None), getattr(module, "weight_scale", None)
        scale = None if scale is None else local(scale)
        if scheme is None or scale is None or not scale.numel() or scale.is_meta:
            continue
        if scale.dtype not in (torch.float16, torch.bfloat16):
            continue
        limits = calculate_range(scheme.weights, scale.device)
        largest = max(abs(float(limit)) for limit in limits) * float(scale.detach().float().max())
        if largest > torch.finfo(scale.dtype).max:
            yield f"{path}.weight", scale.dtype


def _verify_files(path: str | os.PathLike[str], against: str | os.PathLike[str] | None, **kwargs: Any) -> Verdict:
    try:
        checkpoint, architecture = _open(path, **kwargs)
        stored = stored_layers(checkpoint, architecture)
    except CheckpointError as error:
        return Verdict(str(path), (str(error),))
    except (ValueError, OSError) as error:
        return Verdict(str(path), (f"config.json: {error}",))
    report = _read_report(Path(path) / kwargs.get("subfolder", ""))
    problems = list(stored.problems) + _check_config(architecture.config)
    scales = cache_scales(checkpoint, architecture.config)
    matrices = rotation_tensors(checkpoint, rotations_of(quantization_of(architecture.config)))
    weights = {name: tensor for name, tensor in checkpoint.items() if name not in (*scales, *matrices)}
    problems += check_names(weights, architecture, stored.schemes)
    cache = (quantization_of(architecture.config) or {}).get("kv_cache_scheme")
    if cache and not cache.get("dynamic"):
        problems += check_cache(scales, attention_modules(architecture.skeleton, stored.layers))
        found = [checkpoint[name][...].float() for name in scales if name.endswith("_scale")]
        if found and all(bool((scale == 1).all()) for scale in found):
            problems.append("all scales of the cache are 1.0, as if none had been found")
    problems += check_parts(checkpoint, architecture, stored.layers, stored.schemes)
    for name, tensor in checkpoint.items():
        if tensor.dtype in LIMITS and not all(map(is_finite, _pieces(tensor))):
            problems.append(f"{name} is not finite")
        is_scale = name in scales or name.rpartition(".")[0] in stored.schemes
        if is_scale and name.endswith("_scale") and not all(map(is_positive, _pieces(tensor))):
            problems.append(f"{name} is a scale and not above zero")
    problems += _check_shared_scales(checkpoint, stored) + _check_zeros(report, checkpoint, stored)
    if against is not None and not problems:
        source, source_architecture = _open(against, **kwargs)
        problems += _compare(checkpoint, stored, source, stored_layers(source, source_architecture), report)
    return Verdict(str(path), tuple(problems), len(checkpoint))


def _open(path: Any, **kwargs: Any) -> tuple[Checkpoint, Architecture]:
    trust = kwargs.pop("trust_remote_code", None)
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust, **kwargs)
    checkpoint = open_checkpoint(path, **kwargs)
    return checkpoint, read_architecture(auto_class_for(config), config, checkpoint, trust_remote_code=trust)


def _check_config(config: Any) -> list[str]:
    entry = quantization_of(config)
    if entry is None:
        return []
    problems = []
    if entry.get("sparsity_config"):
        problems.append("config.json: sparsity_config is not empty, which servers refuse")
    named = [entry, *(group for group in entry.get("config_groups", {}).values() if isinstance(group, dict))]
    for name in {part["format"] for part in named if part.get("format") is not None}:
        if name not in (*BaseCompressor.registered_names(), "mixed-precision"):
            problems.append(f"config.json: there is no format {name!r}")
    try:
        AutoQuantizationConfig.from_dict(dict(entry))
    except Exception as error:  # whatever the stock parser raises is the finding
        problems.append(f"config.json: the stock parser refuses quantization_config: {error}")
    return problems


def _read_report(folder: Path) -> dict[str, Any]:
    """The report of the compression that lies in the folder; empty where there is none that can be read."""
    try:
        report = json.loads((folder / REPORT_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def _check_zeros(report: Mapping[str, Any], checkpoint: Checkpoint, stored: StoredLayers) -> list[str]:
    """The N:M patterns that the report of the compression claims, on the values as they are read back."""
    layers = {layer.name: layer for layer in stored.layers}
    problems = []
    for name, text in dict(report.get("structures") or {}).items():
        try:
            structure = parse_structure(text)
        except ValueError as error:
            problems.append(f"{REPORT_NAME}: {name}: {error}")
            continue
        if structure is None or name not in layers:
            continue
        wrong = sum(violations(values, *structure) for values in dense_pieces(layers[name], checkpoint, stored))
        if wrong:
            problems.append(f"{name} should be {text} and is not, in {wrong} groups")
    return problems


def _check_shared_scales(checkpoint: Checkpoint, stored: StoredLayers) -> list[str]:
    """Layers that servers run as one matrix have one global scale: all but one of them would be read wrongly."""
    problems = []
    for names in fused_sets(stored.schemes):
        for part in ("weight_global_scale", "input_global_scale"):
            found = {name: checkpoint[f"{name}.{part}"][...] for name in names if f"{name}.{part}" in checkpoint}
            if len({float(value) for value in found.values() if value.numel() == 1}) > 1:
                problems.append(f"{', '.join(found)} run as one matrix and differ in {part}")
    return problems


def _compare(
    checkpoint: Checkpoint, stored: StoredLayers, source: Checkpoint, before: StoredLayers, report: Mapping[str, Any]
) -> list[str]:
    """What the recipe left alone is as it was; what it changed is zero where it was zero, and near where it was not."""
    rows = report.get("layers")
    changed = None if rows is None else {row["name"] for row in rows if row["modifiers"]}
    old, new = ({layer.name: layer for layer in side.layers} for side in (before, stored))
    problems = []
    for name, layer in old.items():
        if name not in new:
            problems.append(f"{name} of the source is not in the result")
        elif new[name].shape != layer.shape:
            problems.append(f"{name} is {list(new[name].shape)}, in the source {list(layer.shape)}")
        else:
            pairs = zip(dense_pieces(layer, source, before), dense_pieces(new[name], checkpoint, stored), strict=True)
            may_change = changed is None or name in changed
            problems += _compare_layer(name, pairs, name not in stored.schemes, may_change)
    for name, tensor in source.items():
        owner, _, part = name.rpartition(".")
        if owner in old and part != "bias":
            continue
        if name not in checkpoint:
            problems.append(f"{name} of the source is not in the result")
        elif tensor.shape != checkpoint[name].shape or not all(
            torch.equal(was, now) for was, now in zip(_pieces(tensor), _pieces(checkpoint[name]), strict=True)
        ):
            problems.append(f"{name} differs from the source, and no recipe changes it")
    return problems


def _compare_layer(
    name: str, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], dense: bool, may_change: bool
) -> list[str]:
    """Zeros of the source are zero; what is stored dense is pruned at most; what is compressed has not drifted further
    than any scheme explains."""
    refilled, moved, error, norm = 0, 0, 0.0, 0.0
    for was, now in pairs:
        refilled += int(((was == 0) & (now != 0)).sum())
        moved += int(((now != was) & (now != 0) if may_change else now != was).sum())
        error += float((now.float() - was.float()).square().sum())
        norm += float(was.float().square().sum())
    problems = [f"{name}: {refilled} weights that were zero are not any more"] if refilled else []
    if dense and moved:
        problems.append(f"{name} is stored dense and differs from the source in {moved} weights")
    if norm and math.sqrt(error / norm) > 1.0:
        problems.append(f"{name}: relative error {math.sqrt(error / norm):.2f} against the source")
    return problems


def dense_pieces(layer: Layer, checkpoint: Mapping[str, LazyTensor], stored: StoredLayers) -> Iterator[torch.Tensor]:
    """The dense values of a layer `[rows, in_features]`, a run of rows at a time, decoded where it is compressed."""
    rows, columns = layer.shape
    step = max(32, CHUNK_NUMBERS // columns // 32 * 32)
    if layer.name not in stored.schemes:
        tensor = checkpoint[f"{layer.name}.weight"]
        if layer.transposed:
            yield tensor[...].t().contiguous()
            return
        for start in range(0, rows, step):
            yield tensor[start : start + step]
        return
    scheme = stored.schemes[layer.name]
    parts = {name.rpartition(".")[2]: checkpoint[name][...] for name in _owned(layer.name, checkpoint)}
    for start in range(0, rows, step):
        yield storage.decode(parts, scheme, slice(start, min(start + step, rows)), dtype=layer.dtype)


def is_positive(scale: torch.Tensor) -> bool:
    """Whether every scale is above zero. Scales stored as exponents (uint8) are, but for the pattern of NaN, 255."""
    if not scale.numel():
        return True
    if scale.dtype == torch.uint8:
        return int(scale.max()) < 255
    wide = scale.detach() if scale.dtype.itemsize > 1 else scale.detach().float()
    return bool((wide > 0).all())


def _pieces(tensor: LazyTensor) -> Iterator[torch.Tensor]:
    """A stored tensor in runs of rows."""
    if len(tensor.shape) < 2:
        yield tensor[...]
        return
    step = max(1, CHUNK_NUMBERS // max(1, math.prod(tensor.shape[1:])))
    for start in range(0, tensor.shape[0], step):
        yield tensor[start : start + step]


def _owned(layer: str, checkpoint: Mapping[str, LazyTensor]) -> list[str]:
    parts = ("", "_packed", "_scale", "_zero_point", "_shape", "_global_scale", "_g_idx")
    return [name for part in parts if (name := f"{layer}.weight{part}") in checkpoint]
