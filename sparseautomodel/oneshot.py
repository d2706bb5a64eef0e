"""`oneshot`: the straight line of compression, from checkpoint to checkpoint or in a live model.

plan -> virtual checkpoint -> written tensor by tensor -> verified -> appears under its name
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_file

from sparseautomodel.architecture import Architecture, auto_class_for, read_architecture
from sparseautomodel.calibrated import calibrate, clear_scratch, leave_or_say, scratch_of
from sparseautomodel.calibration import read_batches
from sparseautomodel.checkpoint import HUB_KEYS, Checkpoint, LazyTensor, Reads, StoredTensor, open_checkpoint
from sparseautomodel.completeness import few
from sparseautomodel.compressed_layers import settle
from sparseautomodel.layers import quantization_of
from sparseautomodel.modifiers import Layer
from sparseautomodel.plan import Plan, make_plan, planned_tensors
from sparseautomodel.quantization_config import write_config
from sparseautomodel.quantizer import CompressedConfig, CompressedQuantizer, StoredLayer, put
from sparseautomodel.random_values import checked_seed
from sparseautomodel.recipe import Recipe
from sparseautomodel.report import Report, model_card, peak_nbytes
from sparseautomodel.save import appear_when_complete, copy_side_files, parse_size, write_json, write_tensors
from sparseautomodel.transform import LayerPlan
from sparseautomodel.verify import REPORT_NAME, VerificationError, verify
from sparseautomodel.witness import ROWS

CONFIG_KEYS = (*HUB_KEYS, "subfolder")


def oneshot(
    model: str | os.PathLike[str] | PreTrainedModel,
    recipe: Any,
    data: Any = None,
    output: str | os.PathLike[str] | None = None,
    *,
    tokenizer: Any = None,
    num_samples: int = 512,
    max_length: int = 2048,
    batch_size: int = 8,
    device: str | torch.device | None = None,
    resume: bool = False,
    seed: int = 0,
    requantize: bool = False,
    memory_budget: int | str = "1GB",
    max_shard_size: int | str = "5GB",
    trust_remote_code: bool | None = None,
    **kwargs: Any,
) -> Report:
    """Compress a model by a recipe.

    Args:
        model: a folder or hub id, which is streamed to `output` without being built; or a live model, changed in place.
        recipe: anything `Recipe.load` takes.
        data: calibration data, for recipes whose modifiers need it: what `calibration.read_batches` takes. None is
            prose that every CPython carries.
        output: the folder that appears when the result is complete. It must not exist or be empty.
        tokenizer: for texts as data, and saved beside the result; by default the source's own.
        num_samples, max_length, batch_size: of the calibration data, in rows, tokens and rows a forward.
        resume: go on with the blocks that a killed run with the same model, recipe and data has finished.
        seed: set before calibration, for models that draw random numbers; a whole number from 0 on.
        device: where the modifiers run; the CPU by default.
        memory_budget: of calibration state in memory, a number of bytes or text: inputs that wait for others, and
            statistics. Inputs above it wait in a file beside `output`; and where even the forwards of one block do not
            fit, blocks are run more often, for one batch after another.
        requantize: allow a source that is already compressed: it is decoded and compressed anew.
        max_shard_size: size of a file of weights, as a number of bytes or text such as "5GB".
        kwargs: subfolder, revision, variant, token, ... of the source.

    Returns:
        What was done. The same is in `compression_report.json` of the output.

    Raises:
        RecipeError, CheckpointError, PlanError: before any weight is read.
        FileExistsError, OSError: nothing is left under `output`, and the source is untouched.
        VerificationError: the written checkpoint does not hold what it should; it is not kept.

    >>> print(oneshot("dense-folder", "w4a16", output="compressed-folder"))  # doctest: +SKIP
    """
    recipe, shard_nbytes, budget = Recipe.load(recipe), parse_size(max_shard_size), parse_size(memory_budget)
    if isinstance(memory_budget, bool) or budget < 0:
        raise ValueError(f"memory_budget={memory_budget!r} must be bytes, or text such as '1GB'")
    if checked_seed(seed, "oneshot") is None or seed >= 2**64:
        raise ValueError(
            f"oneshot(seed={seed!r}): a result must come out again: a seed is from 0 to 2**64 - 1. Write 0"
        )
    if data is not None and not any(modifier.needs_data for modifier in recipe.modifiers):
        warnings.warn("no modifier of the recipe needs data: data is not used", stacklevel=2)
    if isinstance(model, nn.Module):
        if kwargs or requantize:
            given = ", ".join([*kwargs, *(["requantize"] if requantize else [])])
            raise TypeError(f"{given}: for a model that is read from files, not for one in memory")
        return _compress_live(model, recipe, output, tokenizer, device, shard_nbytes, trust_remote_code)
    if output is None:
        raise ValueError(
            f"oneshot({str(model)!r}, ...) streams to files and needs output=folder. To get a model in memory: "
            f"SparseAutoModelForCausalLM.from_pretrained({str(model)!r}, recipe=...)"
        )
    started = time.perf_counter()
    config_keys = {key: value for key, value in kwargs.items() if key in CONFIG_KEYS}
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, **config_keys)
    checkpoint = open_checkpoint(model, **kwargs)
    loader = auto_class_for(config)
    architecture = read_architecture(loader, config, checkpoint, trust_remote_code=trust_remote_code)
    plan = make_plan(str(model), checkpoint, architecture, recipe, requantize=requantize)
    _report_plan(plan, stacklevel=3)
    calibrating = any(modifier.needs_data for modifier in recipe.modifiers)
    place = torch.device(device or "cpu")
    with appear_when_complete(output, plan.nbytes_after) as folder:
        if calibrating:
            reader = tokenizer or _tokenizer(model, trust_remote_code, config_keys)
            batches = read_batches(
                data,
                reader,
                model=architecture.skeleton,
                num_samples=num_samples,
                max_length=max_length,
                batch_size=batch_size,
                held_out=ROWS,
            )
            scratch = scratch_of(output)
            with torch.random.fork_rng(), _scratch_said(scratch):
                torch.manual_seed(seed)
                done = calibrate(checkpoint, architecture, plan, batches, scratch, place, resume, budget)
            tensors = done.tensors
        else:
            tensors = planned_tensors(checkpoint, architecture, plan, place)
        with tqdm(total=plan.nbytes_after, unit="B", unit_scale=True, desc="Compressing", disable=None) as bar:
            write_tensors(tensors, folder, shard_nbytes, lambda name, nbytes: bar.update(nbytes))
        found = cached_file(model, "config.json", **config_keys)
        _write_config(json.loads(Path(str(found)).read_text()), folder, checkpoint, architecture, plan)
        copy_side_files(model, folder, **config_keys)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        report = _report(plan, checkpoint, output, started)
        closed = [
            f"{one.name} does not read the result: {'; '.join(one.reasons)}" for one in plan.consumers if not one.reads
        ]
        report = replace(report, notes=(*report.notes, *closed))
        if calibrating:
            report = replace(
                report, calibration=done.to_dict(), warnings=(*report.warnings, *batches.notes, *done.notes)
            )
            if done.quality is not None and not done.quality.passed:
                warnings.warn(str(done.quality), stacklevel=2)
        _write_provenance(folder, report, recipe, model, loader.__name__, **config_keys)
        _check_result(folder, trust_remote_code)
    if calibrating:
        clear_scratch(scratch_of(output))
    return report


@contextlib.contextmanager
def _scratch_said(scratch: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        leave_or_say(scratch, error)
        raise


def _tokenizer(model: Any, trust_remote_code: bool | None, keys: Mapping[str, Any]) -> Any:
    """The source's own tokenizer, or None; data without text needs none."""
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code, **keys)
    except (OSError, ValueError):
        return None


def _report_plan(plan: Plan, stacklevel: int) -> None:
    plan.raise_for_errors()
    for text in plan.warnings:
        warnings.warn(text, stacklevel=stacklevel)
    if not plan.layers:
        raise ValueError(f"{plan.source} is compressed by this recipe already: there is nothing to do")


def _write_config(
    config: dict[str, Any], folder: Path, checkpoint: Checkpoint, architecture: Architecture, plan: Plan
) -> None:
    """The source's config.json, field by field, with what has changed."""
    config.pop("quantization_config", None)
    if plan.schemes:
        layers = [*plan.all_layers, *_unknown_layers(checkpoint, architecture)]
        config["quantization_config"] = write_config(plan.schemes, layers, plan.cache)
    dtype = config.get("dtype") or config.get("torch_dtype") or _first_dtype(checkpoint)
    config["dtype"] = config["torch_dtype"] = dtype
    if plan.unties:
        for part in (config, config.get("text_config")):
            if isinstance(part, dict) and (part is config or "tie_word_embeddings" in part):
                part["tie_word_embeddings"] = False
    write_json(folder / "config.json", config)


def _unknown_layers(checkpoint: Checkpoint, architecture: Architecture) -> list[Layer]:
    """Matrices that the model class has no place for, such as draft heads: they stay dense, `ignore` has to say so."""
    return [
        Layer(name.removesuffix(".weight"), name.removesuffix(".weight"), ("Linear",), tensor.shape, tensor.dtype)
        for name, tensor in checkpoint.items()
        if name.endswith(".weight") and name not in architecture.parameters and len(tensor.shape) == 2
    ]


def _check_result(folder: Path, trust_remote_code: bool | None) -> None:
    problems = verify(folder, trust_remote_code=trust_remote_code).problems
    if problems:
        raise VerificationError("the result is not in order and was not kept:\n- " + "\n- ".join(problems))


def _first_dtype(checkpoint: Mapping[str, LazyTensor]) -> str:
    wide = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    dtype = next((tensor.dtype for tensor in checkpoint.values() if tensor.dtype in wide), torch.float32)
    return str(dtype).removeprefix("torch.")


def _write_provenance(folder: Path, report: Report, recipe: Recipe, source: Any, loader: str, **hub: Any) -> None:
    (folder / "recipe.yaml").write_text(recipe.source if recipe.source is not None else recipe.to_yaml())
    write_json(folder / REPORT_NAME, report.to_dict())
    name = Path(source).resolve().name if Path(source).is_dir() else str(source)
    (folder / "README.md").write_text(model_card(report, name, _license(source, **hub), loader))


def _license(source: Any, **hub: Any) -> str | None:
    """The license that the source's own model card names."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    card = cached_file(source, "README.md", **hub, **quiet)
    if card is None:
        return None
    lines = Path(card).read_text(errors="replace").splitlines()
    value = next((line.partition(":")[2] for line in lines[:60] if line.startswith("license:")), "")
    return value.strip(" \t'\"") or None


def _report(plan: Plan, checkpoint: Checkpoint, output: Any, started: float) -> Report:
    assert plan.recipe is not None
    return Report(
        source=plan.source,
        output=None if output is None else str(output),
        recipe=plan.recipe.to_dict(),
        layers=tuple(plan.to_dict()["layers"]),
        parameters=plan.parameters,
        parameters_changed=plan.parameters_changed,
        nbytes_before=plan.nbytes_before,
        nbytes_after=plan.nbytes_after,
        structures=_structures(plan),
        reads=checkpoint.reads(),
        seconds=time.perf_counter() - started,
        peak_nbytes=peak_nbytes(),
        notes=plan.notes,
        warnings=plan.warnings,
    )


def _structures(plan: Plan) -> dict[str, str]:
    return {
        item.layer.name: structure
        for item in plan.layers
        for modifier in item.modifiers
        if ":" in (structure := getattr(modifier, "mask_structure", ""))
    }


def _compress_live(
    model: PreTrainedModel,
    recipe: Recipe,
    output: Any,
    tokenizer: Any,
    device: Any,
    shard_nbytes: int,
    trust_remote_code: bool | None,
) -> Report:
    """Change the layers of a model in memory, one after another."""
    if quantization_of(model.config) is not None:
        raise ValueError(
            "the model is compressed already. Load its files with execution='dense' and compress that, or go from "
            "files to files: oneshot(path, recipe, output=folder, requantize=True)"
        )
    started, reads = time.perf_counter(), Reads()
    hollow = [name for name, value in model.named_parameters() if value.is_meta]
    if hollow:
        raise ValueError(f"parameters without values, offloaded or on the meta device: {few(hollow)}")
    stored = {
        name: StoredTensor(name, tuple(value.shape), value.dtype, "memory", value.detach(), reads)
        for name, value in model.named_parameters()
    }
    checkpoint = Checkpoint(stored, [], reads)
    names = {name: name for name in model.state_dict()}
    architecture = Architecture(type(model), model.config, model, names, frozenset())
    name = model.name_or_path or type(model).__name__
    plan = make_plan(name, checkpoint, architecture, recipe, with_data=False)
    _report_plan(plan, stacklevel=4)
    verify(model).raise_for_problems()  # before anything is changed: a NaN would only spread
    with contextlib.ExitStack() as stack:
        folder = None if output is None else stack.enter_context(appear_when_complete(output, plan.nbytes_after))
        _change(model, plan, planned_tensors(checkpoint, architecture, plan, torch.device(device or model.device)))
        report = _report(plan, checkpoint, output, started)
        if folder is not None:
            model.save_pretrained(folder, max_shard_size=shard_nbytes)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            loader = auto_class_for(model.config).__name__
            _write_provenance(folder, report, recipe, plan.source, loader, local_files_only=True)
            _check_result(folder, trust_remote_code)
    settle(model)
    return report


def _change(model: PreTrainedModel, plan: Plan, tensors: dict[str, LazyTensor]) -> None:
    layers = []
    for item in tqdm(plan.layers, desc="Compressing", disable=None):
        outputs = {name.rpartition(".")[2]: tensors.pop(name) for name in item.outputs()}
        layers += _replace(model, item, outputs)
    if plan.unties:
        apart = {f"{item.layer.module}.weight" for item in plan.layers if item.source != f"{item.layer.name}.weight"}
        model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = {
            one: other for one, other in model.all_tied_weights_keys.items() if one not in apart and other not in apart
        }
    if plan.schemes:
        model.config.quantization_config = CompressedConfig(write_config(plan.schemes, plan.all_layers), tuple(layers))
        setattr(model, "hf_quantizer", CompressedQuantizer(model.config.quantization_config))  # noqa: B010


def _replace(model: PreTrainedModel, item: LayerPlan, outputs: Mapping[str, LazyTensor]) -> list[StoredLayer]:
    layer = item.layer
    old: Any = model.get_submodule(layer.module)
    values = {part: tensor[...].to(old.weight.device) for part, tensor in outputs.items()}
    if item.scheme is None:
        if item.source == f"{layer.name}.weight":
            with torch.no_grad():
                old.weight.copy_(values["weight"])
        else:  # it was tied, and what it was tied to keeps other values
            old.weight = nn.Parameter(values["weight"], requires_grad=old.weight.requires_grad)
        return []
    parts = {part: (tuple(value.shape), value.dtype) for part, value in values.items()}
    stored = StoredLayer(layer.module, item.scheme, parts, layer.shape, layer.dtype)
    with torch.device("meta"):
        put(model, stored)
    module = model.get_submodule(layer.module)
    for part, value in values.items():
        module._parameters[part] = nn.Parameter(value, requires_grad=False)
    return [stored]
