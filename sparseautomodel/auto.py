"""`SparseAutoModel*`: the straight line from a checkpoint and a recipe to a model, every weight read once.

config -> meta model -> plan -> virtual checkpoint -> transformers loads it -> verified
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from sparseautomodel.architecture import BUILDING, Architecture, read_architecture
from sparseautomodel.arguments import (
    asked_dtype,
    check_arguments,
    check_device,
    compression_device,
    is_for_transformers_alone,
    is_foreign,
    read_config,
)
from sparseautomodel.budgeted import Home, home_for
from sparseautomodel.buffers import restore_buffers
from sparseautomodel.checkpoint import HUB_KEYS, Checkpoint, LazyTensor, open_checkpoint
from sparseautomodel.compressed_layers import kernels_of, settle
from sparseautomodel.distributed import common_seed, config_for_compressed, initialize_missing, is_shared, rank_device
from sparseautomodel.from_scratch import as_checkpoint, build
from sparseautomodel.layers import attention_modules, cache_scales, quantization_of
from sparseautomodel.plan import Plan, make_plan, planned_tensors
from sparseautomodel.quantization_config import write_config
from sparseautomodel.quantized_cache import nbytes_a_token, quantize_cache
from sparseautomodel.quantizer import CompressedConfig, held_layers
from sparseautomodel.random_values import checked_seed
from sparseautomodel.recipe import Recipe
from sparseautomodel.report import LoadReport
from sparseautomodel.rotations import fold, rotate, rotation_tensors, rotations_of
from sparseautomodel.shards import open_shards, shard_files
from sparseautomodel.transform import decode, loaded_dtype
from sparseautomodel.verify import VerificationError, check_loading, verify


class SparseAutoModel:
    """Loads any model of `transformers.AutoModel`, dense or compressed, and compresses it by a recipe on the way.

    Every `AutoModelFor*` of transformers has its `SparseAutoModelFor*` here.
    """

    auto_class: type = transformers.AutoModel

    def __init__(self) -> None:
        raise TypeError(f"call {type(self).__name__}.from_pretrained(name_or_path, recipe=...)")

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *model_args: Any,
        recipe: Any = None,
        execution: str = "auto",
        device_budget: int | str | None = None,
        strict: bool = True,
        requantize: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The plain transformers model, with each weight read from disk once and compressed layers kept compressed.

        Args:
            recipe: path, YAML text, name of a shipped recipe, dict, list of modifiers or `Recipe`; its modifiers must
                not need data. None loads the checkpoint as it is.
            execution: `"auto"` runs compressed layers in the fastest way there is, `"compressed"` dequantizes a tile of
                a layer at a time inside forward, `"dense"` dequantizes at load and gives a trainable dense model.
            device_budget: bytes, or text such as "6GiB", that weights and calls may take of the memory of one device
                (`device_map="cuda"`; `"cpu"`: of this process). The rest of the weights waits in host memory or in
                files and comes block by block; `model.residency` reports it and takes another budget.
            strict: anything unread, unfilled, non-finite or unexplained is an error; False makes it a warning.
            requantize: allow a recipe over a compressed checkpoint: it is decoded and done anew.
            kwargs: all that `AutoModelFor*.from_pretrained` takes, passed on unchanged.

        Returns:
            The model in eval mode; `model.load_report` says what was read, how often, and how long each step took.
            With `output_loading_info=True` a pair of the model and transformers' loading info.

        Raises:
            RecipeError, CheckpointError, PlanError: before any weight is read, with file, line or layer names.
            VerificationError: the loaded model does not hold what the files say, and `strict` is set.

        >>> model = SparseAutoModelForCausalLM.from_pretrained("model-folder", recipe="w4a16")  # doctest: +SKIP
        """
        started = time.perf_counter()
        check_arguments(execution, getattr(device_budget, "budget", device_budget), recipe, kwargs, model_args)
        recipe = None if recipe is None else Recipe.load(recipe)
        home = home_for(device_budget, kwargs)
        if is_for_transformers_alone(name_or_path, recipe, kwargs):
            model = cls.auto_class.from_pretrained(name_or_path, *model_args, **kwargs)  # type: ignore[attr-defined]
            return model if home is None else home.attach(model)
        with BUILDING:
            config, kwargs = read_config(name_or_path, kwargs)
            if recipe is None and is_foreign(config, kwargs):
                model = cls.auto_class.from_pretrained(  # type: ignore[attr-defined]
                    name_or_path, *model_args, config=config, **kwargs
                )
                return model if home is None else home.attach(model)
            files = {
                key: kwargs[key] for key in (*HUB_KEYS, "subfolder", "variant", "use_safetensors") if key in kwargs
            }
            shared = shard_files(os.path.join(name_or_path, kwargs.get("subfolder", "")))
            checkpoint = open_shards(os.path.dirname(shared[0])) if shared else open_checkpoint(name_or_path, **files)
            architecture = read_architecture(
                cls.auto_class,
                config,
                checkpoint,
                key_mapping=kwargs.get("key_mapping"),
                trust_remote_code=kwargs.get("trust_remote_code"),
                code_revision=kwargs.pop("code_revision", None),
            )
            if strict:
                misshapen = [] if kwargs.get("ignore_mismatched_sizes") else architecture.misshapen(checkpoint)
                _report(misshapen + architecture.missing_experts(), strict, name_or_path)
            plan = make_plan(
                str(name_or_path), checkpoint, architecture, recipe, requantize=requantize, with_data=False
            )
            plan.raise_for_errors()
            for text in plan.warnings:
                warnings.warn(text, stacklevel=2)
            planned = time.perf_counter()
            kwargs.setdefault("ignore_mismatched_sizes", not strict)
            model, info = _load(name_or_path, model_args, checkpoint, architecture, plan, execution, home, kwargs)
            loaded = time.perf_counter()
            restored = restore_buffers(model)
        unexplained, initialized = _initialized(info, architecture, kwargs["ignore_mismatched_sizes"])
        problems = check_loading(checkpoint, architecture, plan, unexplained)
        problems += verify(model, after_each=home.rest if home else None).problems
        _report(problems, strict, name_or_path)
        verified = time.perf_counter()
        if execution == "auto":
            settle(model) if home is None else home.settle(model)
        seconds = {"plan": planned - started, "load": loaded - planned, "verify": verified - loaded}
        seconds["settle"] = time.perf_counter() - verified
        info_of_load = info | {"missing_keys": initialized}
        report = LoadReport.of(checkpoint, plan, info_of_load, seconds, restored, kernels_of(model))
        model.load_report = replace(report, cache=nbytes_a_token(model))
        model = model if home is None else home.attach(model)
        return (model, info) if kwargs.get("output_loading_info") else model

    @classmethod
    def from_config(
        cls,
        config: PreTrainedConfig,
        recipe: Any = None,
        seed: int | None = None,
        distributed_config: Any = None,
        **kwargs: Any,
    ) -> Any:
        """A new model with initial values, in train mode as transformers leaves it.

        Args:
            recipe: as for `from_pretrained`; the result is what saving the new dense model and loading it with the
                recipe gives. The dense model is in memory meanwhile.
            seed: each value depends on it, on the parameter's name and the element's place alone, the same on any mesh;
                torch's random state is not used. None draws the seed from torch's random state.
            distributed_config: transformers' own; each process holds, and draws, its part of the model. With a recipe
                each draws the whole model first.
            kwargs: all that `AutoModelFor*.from_config` takes, passed on unchanged.

        Raises:
            InitializationError: naming all parameters that did not get a value.
            RecipeError, PlanError: the recipe does not fit the model.
            ValueError: `seed` is no whole number from 0 on.

        >>> model = SparseAutoModelForCausalLM.from_config(config, recipe="w4a16", seed=0)  # doctest: +SKIP
        """
        seed = checked_seed(seed, "from_config")
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                "config.quantization_config says that weights are compressed, and a new model has none yet. Delete it, "
                "and say how to compress: from_config(config, recipe=...)"
            )
        if recipe is None:
            return build(cls.auto_class, config, seed, distributed_config, kwargs)
        recipe = Recipe.load(recipe)
        if seed is None and distributed_config is not None:
            seed = common_seed(int(torch.randint(1 << 62, ())))
        dense = build(cls.auto_class, config, seed, None, kwargs)
        with BUILDING:
            checkpoint, trust = as_checkpoint(dense), kwargs.get("trust_remote_code")
            architecture = read_architecture(cls.auto_class, dense.config, checkpoint, trust_remote_code=trust)
            plan = make_plan(type(dense).__name__, checkpoint, architecture, recipe, with_data=False)
            plan.raise_for_errors()
            for text in plan.warnings:
                warnings.warn(text, stacklevel=2)
            options = {"device_map": {"": dense.device}, "distributed_config": distributed_config, **kwargs}
            options |= {"dtype": dense.dtype, "local_files_only": True}
            if distributed_config is not None:
                del options["device_map"]
            model, info = _load(plan.source, (), checkpoint, architecture, plan, "auto", None, options)
            restore_buffers(model)
        model.config.name_or_path = model.name_or_path = config.name_or_path
        _report(check_loading(checkpoint, architecture, plan, info) + list(verify(model).problems), True, plan.source)
        settle(model)
        return model.train()


def _load(
    name_or_path: str | os.PathLike[str],
    model_args: tuple[Any, ...],
    checkpoint: Checkpoint,
    architecture: Architecture,
    plan: Plan,
    execution: str,
    home: Home | None,
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Hand transformers the checkpoint as the plan changes it, and let it load."""
    config = architecture.config
    device = rank_device(kwargs.get("distributed_config")) or compression_device(kwargs.get("device_map"))
    check_device(device)
    tensors = planned_tensors(checkpoint, architecture, plan, device)
    options = {key: value for key, value in kwargs.items() if key not in _CONSUMED}
    dtype = options["dtype"] = asked_dtype(kwargs, config, tensors)
    if plan.unties and architecture.can_untie:
        _untie(config)
    scales = cache_scales(tensors, config)
    cache = plan.cache if not plan.layers and execution != "dense" else None
    if cache is None:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in scales}
    rotations = rotations_of(quantization_of(config))
    matrices = {name: tensors.pop(name) for name in rotation_tensors(tensors, rotations)}
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    layers = [
        replace(layer, dtype=architecture.loaded_dtype(f"{layer.module}.weight", dtype))
        for layer in plan.all_layers
        if layer.name in plan.schemes
    ]
    # What transformers splits while it loads has no module to be compressed in.
    dense = {
        name: scheme
        for name, scheme in plan.schemes.items()
        if execution == "dense" or f"{name}.weight" in architecture.converted
    }
    stored = {name: scheme for name, scheme in plan.schemes.items() if name not in dense}
    tensors = decode(tensors, dense, layers) if dense else tensors
    online = rotations is not None and execution != "dense"
    if stored or cache is not None or online:
        written, modules = write_config(stored, plan.all_layers, cache), held_layers(tensors, layers, stored)
        held = _cache_parts(architecture, plan, tensors, scales, dtype) if cache is not None else None
        written |= {"transform_config": rotations.model_dump(mode="json")} if rotations is not None and online else {}
        options["quantization_config"] = CompressedConfig(written, modules, held)
        options["distributed_config"] = config_for_compressed(kwargs.get("distributed_config"))
    model_class: Any = architecture.model_class
    seed = int(torch.randint(1 << 62, (), generator=torch.default_generator.clone_state()))  # draws nothing
    if home is not None:
        tensors, model_class = home.tensors(tensors, architecture, dtype), home.model_class(model_class)
    model, info = model_class.from_pretrained(
        None, *model_args, config=config, state_dict=tensors, output_loading_info=True, **options
    )
    if home is not None:
        home.loaded(model, architecture.model_class)
    if info["missing_keys"]:
        initialize_missing(model, info["missing_keys"], common_seed(seed) if is_shared(model) else seed)
    if rotations is not None:
        values = {name: tensor[...] for name, tensor in matrices.items()}
        (rotate if online else fold)(model, rotations, values)
    if cache is not None:
        names = attention_modules(architecture.skeleton, plan.all_layers).values()
        for text in quantize_cache(model, cache, [name for name, _ in names]):
            warnings.warn(text, stacklevel=3)
    model.config.name_or_path = model.name_or_path = str(name_or_path)
    if architecture.ties and not model.all_tied_weights_keys and architecture.can_untie:
        _untie(model.config)  # the files hold two different tensors, and they win
    if model.can_generate():
        _adjust_generation(model, name_or_path, kwargs)
    return model, info


_CONSUMED = (
    *HUB_KEYS,
    "subfolder",
    "variant",
    "use_safetensors",
    "output_loading_info",
    "dtype",
    "torch_dtype",
    "config",
)
"""Arguments that name files, which transformers does not get to see, or that are set anew."""


def _cache_parts(
    architecture: Architecture,
    plan: Plan,
    tensors: Mapping[str, LazyTensor],
    scales: Iterable[str],
    dtype: torch.dtype,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The scales of the cache as the model holds them: full parameter name -> shape and dtype."""
    modules = attention_modules(architecture.skeleton, plan.all_layers)
    found = {}
    for name in scales:
        owner, _, part = name.rpartition(".")
        if owner in modules:  # else it is said to be unexpected
            kind = loaded_dtype(part, tensors[name].dtype, dtype)
            found[f"{modules[owner][0]}.{part}"] = tuple(tensors[name].shape), kind
    return found


def _initialized(
    info: dict[str, Any], architecture: Architecture, may_mismatch: bool
) -> tuple[dict[str, Any], set[str]]:
    """Transformers' loading info without what users expect to be new, and all parameters that hold initial values."""
    new = set(architecture.new_parameters(info["missing_keys"]))
    mismatched = {entry[0] for entry in info["mismatched_keys"]}
    if new or mismatched:
        warnings.warn(f"newly initialized, to be trained: {', '.join(sorted(new | mismatched))}", stacklevel=3)
    explained = {"missing_keys": info["missing_keys"] - new}
    explained |= {"mismatched_keys": set()} if may_mismatch else {}
    return info | explained, info["missing_keys"] | mismatched


def _untie(config: PreTrainedConfig) -> None:
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False


def _adjust_generation(model: Any, name_or_path: str | os.PathLike[str], kwargs: dict[str, Any]) -> None:
    """The generation config, and `generate` of remote code, as transformers sets them for a model with a name."""
    names: dict[str, Any] = {"cache_dir": None, "force_download": False, "proxies": None, "local_files_only": False}
    names |= {"token": None, "revision": "main", "subfolder": "", "trust_remote_code": None}
    with contextlib.suppress(
        OSError
    ):  # a folder without generation_config.json and, since config was given, config.json
        model.adjust_generation_fn(
            kwargs.get("generation_config"), True, None, name_or_path, **{k: kwargs.get(k, v) for k, v in names.items()}
        )


def _report(problems: list[str], strict: bool, name_or_path: Any) -> None:
    if not problems:
        return
    text = f"loading {name_or_path} went wrong:\n- " + "\n- ".join(problems)
    if strict:
        raise VerificationError(f"{text}\nPass strict=False to get the model with these as a warning")
    warnings.warn(text, stacklevel=3)


def _make_classes() -> dict[str, type[SparseAutoModel]]:
    """One class for every `AutoModelFor*` of transformers."""
    return {
        f"Sparse{name}": type(
            f"Sparse{name}",
            (SparseAutoModel,),
            {"auto_class": getattr(transformers, name), "__doc__": f"`SparseAutoModel` for the models of `{name}`."},
        )
        for name in dir(transformers)
        if name.startswith("AutoModelFor")
    }


globals().update(_make_classes())
