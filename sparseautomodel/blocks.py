"""`load_blocks`: some blocks of a model, in a row, without the rest of it: only their bytes are read.

names -> meta model -> which parameters -> their files -> plan -> transformers loads what is not hollow -> numbered anew
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig

from sparseautomodel.architecture import BUILDING, Architecture, read_architecture
from sparseautomodel.arguments import asked_dtype, check_device, compression_device, is_foreign, read_config
from sparseautomodel.block_cache import BlockCache, default_folder
from sparseautomodel.buffers import restore_buffers
from sparseautomodel.checkpoint import HUB_KEYS, Checkpoint, LazyTensor
from sparseautomodel.completeness import few
from sparseautomodel.compressed_layers import settle
from sparseautomodel.hollow import assemble, hollow_class
from sparseautomodel.layers import cache_scales
from sparseautomodel.plan import Plan, make_plan, planned_tensors
from sparseautomodel.quantization_config import write_config
from sparseautomodel.quantizer import CompressedConfig, held_layers
from sparseautomodel.recipe import Recipe
from sparseautomodel.report import LoadReport, versions
from sparseautomodel.sources import Source, fetch_configs, is_url, open_source
from sparseautomodel.stack import Stack, find_stack, stack_class
from sparseautomodel.stage import Part, Stage, chain
from sparseautomodel.transform import decode
from sparseautomodel.verify import VerificationError, verify

__all__ = ["Stage", "chain", "load_blocks"]

_SOURCE_KEYS = (*HUB_KEYS, "subfolder", "variant", "use_safetensors")


def load_blocks(
    name_or_path: str | os.PathLike[str],
    blocks: range,
    recipe: Any = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    block_cache: bool | str | os.PathLike[str] = True,
    **kwargs: Any,
) -> Stage:
    """Some blocks of a model, in a row, with what lies before the first or after the last where they are among them.

    Only the bytes of these blocks are read, and only the files that hold them are opened. The checkpoint may be dense
    or compressed, in a local folder, in the cache of the hub, or on a server (a repository that is not in the cache, or
    an `http://` address of a folder), from which ranges of its files are fetched.

    Args:
        blocks: their numbers, `range(10, 15)`; of an encoder-decoder model such as T5 those of the encoder.
        recipe: as for `from_pretrained`; it is planned for the whole model, so that its patterns mean the same.
        device: where the stage goes; None is the CPU.
        dtype: None is that of the checkpoint.
        block_cache: keep what a recipe made of a block, or what was fetched, on disk: True in
            `$HF_HOME/sparseautomodel/blocks`, a folder to have it there, False not at all.
        kwargs: what `from_pretrained` of transformers takes: `revision`, `token`, `subfolder`, `trust_remote_code`,
            `attn_implementation`, `quantization_config=BitsAndBytesConfig(load_in_4bit=True)`, ...

    Raises:
        ValueError: there are no such blocks, or the model has no single stack of blocks.
        CheckpointError, DownloadError: a file or tensor is missing or damaged, or a server does not give it.
        RecipeError, PlanError: before any weight is read.
        VerificationError: what was loaded is not all that the blocks need.

    >>> stage = load_blocks("model-folder", range(10, 15), recipe="w4a16")  # doctest: +SKIP
    >>> hidden = stage(hidden, past_key_values=cache)  # doctest: +SKIP
    """
    recipe = None if recipe is None else Recipe.load(recipe)
    if recipe is not None and kwargs.get("quantization_config") is not None:
        raise ValueError("recipe and quantization_config both say how to quantize: leave one of them out")
    cache = None if block_cache is False else BlockCache(default_folder() if block_cache is True else block_cache)
    kwargs["dtype"] = "auto" if dtype is None else dtype
    kwargs["device_map"] = None if device is None else {"": torch.device(device)}
    check_device(compression_device(kwargs["device_map"]))
    with BUILDING:
        loader = _open(name_or_path, recipe, cache, kwargs)
        loader.stack.check(blocks)
        part = loader.load(blocks, None)
    return Stage(part, loader.stack, loader.architecture.config, loader.load)


def _open(
    name_or_path: str | os.PathLike[str], recipe: Recipe | None, cache: BlockCache | None, kwargs: dict[str, Any]
) -> _Loader:
    files = {key: kwargs[key] for key in _SOURCE_KEYS if key in kwargs}
    with contextlib.ExitStack() as stack:
        place: Any = name_or_path
        if is_url(name_or_path):
            place = stack.enter_context(fetch_configs(str(name_or_path), kwargs.pop("subfolder", "")))
        config, kwargs = read_config(place, kwargs)
        generation = _generation_config(place, kwargs)
    source = open_source(name_or_path, **files)
    foreign = is_foreign(config, kwargs)
    if foreign and recipe is not None:
        raise ValueError(f"{name_or_path} is quantized by another method already, so no recipe can be applied to it")
    names = [*source.files, *(f"{name.rpartition('.')[0]}.weight" for name in source.files if foreign)]
    architecture = read_architecture(
        stack_class(config),
        config,
        dict.fromkeys(names),
        key_mapping=kwargs.get("key_mapping"),
        trust_remote_code=kwargs.get("trust_remote_code"),
        code_revision=kwargs.pop("code_revision", None),
    )
    options = {key: value for key, value in kwargs.items() if key not in _SOURCE_KEYS}
    return _Loader(source, architecture, find_stack(architecture), recipe, cache, options, foreign, generation)


def _generation_config(place: Any, kwargs: Mapping[str, Any]) -> GenerationConfig | None:
    with contextlib.suppress(OSError):  # not every model has one
        names = {key: kwargs[key] for key in (*HUB_KEYS, "subfolder") if key in kwargs}
        return GenerationConfig.from_pretrained(place, **names)
    return None


@dataclass
class _Loader:
    """All that is known of a model before a weight is read, and how its parts are loaded."""

    source: Source
    architecture: Architecture
    stack: Stack
    recipe: Recipe | None
    cache: BlockCache | None
    options: dict[str, Any]
    foreign: bool
    """Quantized by another method, on disk or by `quantization_config`: transformers does all of that."""
    generation: GenerationConfig | None
    plan: Plan | None = field(default=None)
    """Of a recipe, for the whole model: made once."""

    def load(self, blocks: range, held: Part | None) -> Part:
        """The part with these blocks; what `held` has of it is taken over, the rest is read."""
        with BUILDING:
            started = time.perf_counter()
            wanted = self.stack.wanted(blocks)
            kept = _kept(held, wanted, self.stack)
            missing = {name: unit for name, unit in wanted.items() if name not in kept}
            checkpoint = self.source.open(self._names(missing))
            plan = None if self.foreign else self._plan(checkpoint, missing)
            planned = time.perf_counter()
            tensors, readers = self._tensors(checkpoint, plan, missing)
            model, info = self._from_pretrained(tensors, plan, missing)
            restored = restore_buffers(model)
            loaded = time.perf_counter()
            problems = _problems(info) + list(verify(model).problems)
            if problems:
                text = "\n- ".join(problems)
                raise VerificationError(f"loading blocks {blocks} of {self.source.name} went wrong:\n- {text}")
            settle(model)
            assemble(model, self.stack, blocks, wanted, (held.model, held.blocks) if held is not None else None)
            seconds = {"plan": planned - started, "load": loaded - planned, "verify": time.perf_counter() - loaded}
            return Part(model, blocks, wanted, _report(self.source.name, readers, plan, seconds, restored))

    def _names(self, wanted: Mapping[str, str]) -> list[str]:
        """The checkpoint's tensors for these parameters."""
        return [name for name in self.source.files if self._is_wanted(self._parameter(name), wanted)]

    def _is_wanted(self, parameter: str, wanted: Mapping[str, str]) -> bool:
        """Whether it is one of `wanted`, or shares its values with one."""
        tied = (group for group in self.stack.ties if parameter in group)
        return parameter in wanted or any(not group.isdisjoint(wanted) for group in tied)

    def _parameter(self, name: str, plan: Plan | None = None) -> str:
        """The parameter that a tensor belongs to, also where it is a scale of it; "" for none. With a plan, `name` is
        one of those that it stores."""
        parameters, owner = self.architecture.parameters, name
        if plan is not None and name not in parameters:
            module = next((layer.module for layer in plan.all_layers if layer.name == name.rpartition(".")[0]), None)
            if module is not None:
                return parameters.get(f"{name.rpartition('.')[0]}.weight", f"{module}.weight")
        while owner:
            for key in (owner, f"{owner}.weight"):
                if key in parameters:
                    return parameters[key]
            owner = owner.rpartition(".")[0]
        return ""

    def _plan(self, checkpoint: Checkpoint, wanted: Mapping[str, str]) -> Plan:
        """What happens to these parameters. A recipe is planned for the whole model, whatever files are open."""
        if self.plan is None:
            seen = checkpoint if self.recipe is None else self._whole(checkpoint)
            plan = make_plan(self.source.name, seen, self.architecture, self.recipe, with_data=False)
            plan.raise_for_errors()
            for text in plan.warnings:
                warnings.warn(text, stacklevel=4)
            if self.recipe is None:
                return plan
            self.plan = plan
        parameters = self.architecture.parameters
        kept = []
        for item in self.plan.layers:
            parameter = parameters.get(f"{item.layer.name}.weight", f"{item.layer.module}.weight")
            if self._is_wanted(parameter, wanted):
                kept.append(item)
        _refuse_thresholds(self.plan, {item.layer.name for item in kept})
        return replace(self.plan, layers=tuple(kept))

    def _whole(self, checkpoint: Checkpoint) -> Checkpoint:
        """`checkpoint` and all tensors in files that are not open, with the shapes that the model says they have."""
        own = self.architecture.skeleton.state_dict()
        shapes = {_numberless(name): (tensor.shape, tensor.dtype) for name, tensor in checkpoint.items()}
        floats = next((one.dtype for one in checkpoint.values() if one.dtype.is_floating_point), torch.float32)
        tensors: dict[str, Any] = {}
        for name in self.source.files:
            parameter = self.architecture.parameters.get(name)
            if name in checkpoint:
                tensors[name] = checkpoint[name]
            elif _numberless(name) in shapes:
                tensors[name] = LazyTensor(name, *shapes[_numberless(name)])
            elif parameter is not None and name not in self.architecture.merged | self.architecture.converted:
                tensors[name] = LazyTensor(name, tuple(own[parameter].shape), floats)
        return Checkpoint(tensors, checkpoint.files, checkpoint._reads)

    def _tensors(
        self, checkpoint: Checkpoint, plan: Plan | None, wanted: Mapping[str, str]
    ) -> tuple[dict[str, LazyTensor], list[Checkpoint]]:
        """What transformers is given, and the checkpoints that it is read from: this one, or entries of the cache."""
        tensors: dict[str, LazyTensor] = dict(checkpoint)
        if plan is not None:
            device = compression_device(self.options["device_map"])
            tensors = planned_tensors(checkpoint, self.architecture, plan, device)
            scales = cache_scales(tensors, self.architecture.config)
            tensors = {name: tensor for name, tensor in tensors.items() if name not in scales}
        units: dict[str, dict[str, LazyTensor]] = {}
        for name, tensor in tensors.items():
            for key, unit in self._places(name, plan, wanted):
                units.setdefault(unit, {})[key] = tensor
        readers = [checkpoint]
        if self.cache is not None and ((plan is not None and plan.layers) or self.source.is_remote(checkpoint)):
            for unit, mine in units.items():
                entry = self._cached(self.cache, unit, mine, plan, wanted)
                if entry is not None:
                    units[unit] = {name: entry[name] for name in mine}
                    readers.append(entry)
        return {name: tensor for mine in units.values() for name, tensor in mine.items()}, readers

    def _places(self, name: str, plan: Plan | None, wanted: Mapping[str, str]) -> list[tuple[str, str]]:
        """Under which names a tensor is given to transformers, each with its unit. A tied head that is loaded without
        the embedding is given the embedding's tensor under its own name."""
        parameter = self._parameter(name, plan)
        if parameter in wanted:
            return [(name, wanted[parameter])]
        group = next((group for group in self.stack.ties if parameter in group), frozenset[str]())
        if plan is not None and plan.unties:
            return []
        return [(one, wanted[one]) for one in sorted(group) if one in wanted][:1]

    def _cached(
        self,
        cache: BlockCache,
        unit: str,
        tensors: Mapping[str, LazyTensor],
        plan: Plan | None,
        wanted: Mapping[str, str],
    ) -> Checkpoint | None:
        names = self._names({name: one for name, one in wanted.items() if one == unit})
        facts = {
            "unit": unit,
            "source": self.source.versions(names),
            "recipe": plan.recipe.to_dict() if plan is not None and plan.recipe is not None else None,
            "tensors": {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()},
            "versions": versions(),
        }
        return cache.load(facts) or cache.store(facts, tensors)

    def _from_pretrained(
        self, tensors: Mapping[str, LazyTensor], plan: Plan | None, wanted: Mapping[str, str]
    ) -> tuple[Any, dict[str, Any]]:
        config = copy.deepcopy(self.architecture.config)
        options = dict(self.options)
        if plan is not None:
            dtype = options["dtype"] = asked_dtype(options, config, tensors)
            if hasattr(config, "quantization_config"):
                del config.quantization_config
            if plan.unties and self.architecture.can_untie:
                for part in (config, config.get_text_config()):
                    part.tie_word_embeddings = False
            tensors = self._compressed(tensors, plan, dtype, options)
        model_class = self.architecture.model_class
        made: Any = hollow_class(model_class, self.stack, wanted)
        model, info = made.from_pretrained(
            None, config=config, state_dict=dict(tensors), output_loading_info=True, **options
        )
        model.__class__ = model_class
        model.config.name_or_path = model.name_or_path = self.source.name
        if self.generation is not None and model.can_generate():
            model.generation_config = self.generation
        return model, info

    def _compressed(
        self, tensors: Mapping[str, LazyTensor], plan: Plan, dtype: torch.dtype, options: dict[str, Any]
    ) -> Mapping[str, LazyTensor]:
        """Put into `options` how the compressed layers among `tensors` are held; those that cannot be are decoded."""
        there = {name.rpartition(".")[0] for name in tensors}
        layers = [
            replace(layer, dtype=self.architecture.loaded_dtype(f"{layer.module}.weight", dtype))
            for layer in plan.all_layers
            if layer.name in plan.schemes and layer.name in there
        ]
        schemes = {layer.name: plan.schemes[layer.name] for layer in layers}
        dense = {name: one for name, one in schemes.items() if f"{name}.weight" in self.architecture.converted}
        stored = {name: one for name, one in schemes.items() if name not in dense}
        if stored:
            known = [layer for layer in plan.all_layers if layer.name in there]
            options["quantization_config"] = CompressedConfig(
                write_config(stored, known), held_layers(tensors, layers, stored)
            )
        return decode(tensors, dense, layers) if dense else tensors


def _refuse_thresholds(plan: Plan, kept: Collection[str]) -> None:
    """A threshold over several layers is found in all of their values, which are not read."""
    for item in plan.layers:
        for modifier in item.modifiers:
            if getattr(modifier, "apply_globally", False) and item.layer.name not in kept:
                raise ValueError(
                    f"{type(modifier).__name__} has apply_globally: true, and selects {item.layer.name}, which is not "
                    "among the blocks: a threshold over the whole model cannot be found from a part. Write the "
                    "checkpoint with oneshot(path, recipe, output=folder), then load_blocks(folder, ...)"
                )


def _kept(held: Part | None, wanted: Mapping[str, str], stack: Stack) -> set[str]:
    """Of the wanted parameters those that are there already. A block, and what is tied, is read together."""
    if held is None:
        return set()
    kept = set(held.parameters).intersection(wanted)
    for group in (*stack.ties, *stack.parameters.values()):
        mine = group.intersection(wanted)
        if not mine <= kept:
            kept -= mine
    return kept


def _problems(info: Mapping[str, Any]) -> list[str]:
    problems = []
    if info["missing_keys"]:
        problems.append(f"no tensor of the checkpoint fills {few(sorted(info['missing_keys']))}")
    if info["unexpected_keys"]:
        problems.append(f"the blocks have no place for {few(sorted(info['unexpected_keys']))}")
    for entry in info["mismatched_keys"]:
        name, stored, there = entry[0], list(entry[1]), list(entry[2])
        problems.append(f"{name} has shape {stored} in the checkpoint and {there} in the model")
    return problems + [str(text) for text in info.get("error_msgs") or ()]


def _report(
    source: str, readers: Iterable[Checkpoint], plan: Plan | None, seconds: dict[str, float], restored: list[str]
) -> LoadReport:
    reads: dict[str, tuple[float, int]] = {}
    for checkpoint in readers:
        reads |= {name: read for name, read in checkpoint.reads().items() if read[1]}
    return LoadReport(
        source=source,
        reads=reads,
        unread=(),
        initialized=(),
        restored=tuple(restored),
        layers_compressed=len(plan.layers) if plan is not None else 0,
        share_changed=0.0,
        seconds=seconds,
        notes=plan.notes if plan is not None else (),
    )


def _numberless(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
