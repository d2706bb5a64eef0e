"""Recipe documents as other tools lay them out, as one ordered list of modifiers; and their retired keys.

The layouts are those of SparseML 1.9 and llm-compressor 0.14 (its own loader reads only the first):

    quant_stage:                     stages:                        quant_modifiers:
      run_type: oneshot                quant:                         - GPTQModifier: {...}
      quant_modifiers:                   modifiers:                   - GPTQModifier: {...}
        GPTQModifier: {...}                GPTQModifier: {...}

Groups and stages can be mappings or lists, at the top or nested. The order of the text is kept.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace

from sparseautomodel.modifiers import MODIFIERS, Modifier
from sparseautomodel.recipe_text import EXAMPLE, Node, RecipeError, shown, unknown

Entry = tuple[str, Node]
"""Class name and keys of one modifier. The node holds a mapping, None (no keys), or the modifier itself."""

_METADATA = ("name", "description", "version")
_STAGE = re.compile(r".*_stage(_\d+)?")
_GROUP = re.compile(r"modifiers|.*_modifiers(_\d+)?")
_STAGE_FIELDS = ("run_type", "enabled", "args", "name", "group", "exclude_default")
_WEIGHT = re.compile(r"\\?\.weight(\$?)$")
_EVERYTHING = ("__ALL__", "__ALL_PRUNABLE__")
_EXPRESSION = re.compile(r"\$\{|\beval\s*\(")

_NO_SCHEDULE = "every modifier is applied once, in the order of the recipe"
_NO_VARIABLES = "but variables and expressions are not supported. Write the number where it is used"
_VARIABLE = "If it is a variable: variables are not supported. Write the number where it is used"
_RENAMED = {
    "percdamp": "dampening_frac",
    "params": "targets",
    "mask_type": "mask_structure",
}
_NEEDLESS = {
    "requires_calibration_data": "each modifier knows it",
    "group": "it is only a label",
    "sequential_update": "the inputs of a block always come from the blocks compressed before it",
    "preserve_sparsity_mask": "zeros always stay",
    "offload_hessians": "memory is managed by the walk over the blocks",
    "offload_device": "memory is managed by the walk over the blocks",
    "batched_quantization": "it changes no result",
    "update_scheduler": _NO_SCHEDULE,
    "scheduler_args": _NO_SCHEDULE,
    "leave_enabled": "zeros always stay",
}
_REMOVED = {
    "start": _NO_SCHEDULE,
    "end": _NO_SCHEDULE,
    "update": _NO_SCHEDULE,
    "start_epoch": _NO_SCHEDULE,
    "end_epoch": _NO_SCHEDULE,
    "update_frequency": _NO_SCHEDULE,
    "index": "the order of the recipe is the order of the modifiers",
    "quantize": "write a quantizing modifier of its own after this one",
    "num_calibration_steps": "give oneshot(num_samples=...) instead",
    "disable_quantization_observer_epoch": "there is no training",
    "freeze_bn_stats_epoch": "there is no training",
    "calibration_function": "the model's own forward is run",
    "algorithm": "the factors are those of SmoothQuant",
    "post_oneshot_calibration": "there is no second calibration",
    "model_fuse_fn_name": "modules are not fused",
    "model_fuse_fn_kwargs": "modules are not fused",
    "scheme_overrides": "write config_groups instead, one group for each kind of layer",
    "bypass_divisibility_checks": "write group_size: auto, or skip_indivisible: true",
    "kv_cache_scheme": "write it beside the scheme of QuantizationModifier or GPTQModifier",
    "input_observer": "inputs are scaled while the model runs, or by their extremes over all tokens",
    "output_observer": "activations are scaled while the model runs",
    "sparsity_profile": "give one entry a sparsity and the targets that shall have it",
    "owl_m": "give one entry a sparsity and the targets that shall have it",
    "owl_lmbda": "give one entry a sparsity and the targets that shall have it",
}
"""Retired keys that changed a result. Where their value is null, 0, -1, false or empty, they changed none."""
_DEFAULTS = {"algorithm": "smoothquant"}
"""Nor where it is this one."""


def entries(document: Node) -> list[Entry]:
    """Every modifier of a document in order. Raises `RecipeError` for a layout that nothing writes."""
    if isinstance(document.value, list):
        return list(_group(document))
    if not isinstance(document.value, dict):
        raise RecipeError(
            f"{document.at}: a recipe is a mapping with `modifiers:`, got {shown(document)}. "
            f"Write for example:\n{EXAMPLE}"
        )
    found: list[Entry] = []
    for key, node in document.value.items():
        if key in _METADATA:
            if isinstance(node.value, (dict, list)):
                raise RecipeError(f"{node.at}: '{key}' is free text, got {shown(node)}. Write one line of text")
        elif key == "stages":
            bodies = node.value.values() if isinstance(node.value, dict) else [node]
            found += [entry for body in bodies for entry in _stage(body)]
        elif key != "args" or _refuse_variables(node):
            found += _member(key, node, document.value, ("modifiers", "stages", *_METADATA), "top-level key")
    return found


def current_keys(cls: type[Modifier], keys: dict[str, Node]) -> dict[str, Node]:
    """`keys` with what older recipes write in today's words. Warns of each change; keys that `cls` has stay.

    Raises `RecipeError` for a retired key that changed a result, and for expressions.
    """
    known = cls.keys()
    current: dict[str, Node] = {}
    for key, node in keys.items():
        _refuse_expressions(node)
        about = f"{node.key_at}: '{key}' of {cls.__name__}"
        name = key if key in known else _RENAMED.get(key, key)
        if name in known:
            if name != key and name in keys:
                raise RecipeError(f"{about} is the old name of '{name}', which is given too. Remove '{key}'")
            if name != key:
                _warn(f"{about} is now called '{name}'")
            current[name] = _layer_names(node) if name in ("targets", "ignore") else node
        elif key in _NEEDLESS:
            _warn(f"{about} was left out: {_NEEDLESS[key]}")
        elif key in _REMOVED and (node.value in (None, 0, -1, _DEFAULTS.get(key)) or node.value in ([], {})):
            _warn(f"{about} was left out, {shown(node)} has no effect: {_REMOVED[key]}")
        elif key in _REMOVED:
            raise RecipeError(f"{about} is no longer a key: {_REMOVED[key]}. Remove:\n    {key}: {shown(node)}")
        else:
            current[key] = node
    return current


def _stage(node: Node) -> Iterator[Entry]:
    """One stage, or a list of them."""
    if isinstance(node.value, list):
        for body in node.value:
            yield from _stage(body)
        return
    if not isinstance(node.value, dict) or not node.value:
        raise RecipeError(f"{node.at}: a stage is a mapping with `modifiers:`, got {shown(node)}")
    if not _enabled(node.value):
        return
    for field, value in node.value.items():
        if field == "args":
            _refuse_variables(value)
        elif field not in _STAGE_FIELDS:
            yield from _member(field, value, node.value, ("modifiers", *_STAGE_FIELDS), "key of a stage")


def _enabled(stage: dict[str, Node]) -> bool:
    enabled = stage.get("enabled")
    if enabled is not None and not isinstance(enabled.value, bool):
        raise RecipeError(f"{enabled.at}: enabled is true or false, got {shown(enabled)}")
    if enabled is not None and not enabled.value:
        return False
    run_type = stage.get("run_type")
    if run_type is not None and run_type.value not in (None, "oneshot"):
        raise RecipeError(
            f"{run_type.at}: run_type is {shown(run_type)}, but this library compresses in one shot. "
            "Write run_type: oneshot, or leave the stage out with:\n    enabled: false"
        )
    return True


def _group(node: Node) -> Iterator[Entry]:
    """The modifiers under `modifiers:` or `<name>_modifiers:`."""
    if not node.value or not isinstance(node.value, (dict, list)):
        raise RecipeError(f"{node.at}: no list of modifiers but {shown(node)}. Write for example:\n{EXAMPLE}")
    for item in node.value if isinstance(node.value, list) else [node]:
        if isinstance(item.value, Modifier):
            yield type(item.value).__name__, item
        elif isinstance(item.value, str):
            yield from _member(item.value, Node(None, item.at, key_at=item.at), (), (), "modifier")
        elif isinstance(item.value, dict) and item.value:
            for key, keys in item.value.items():
                yield from _member(key, keys, item.value, (), "modifier")
        else:
            raise RecipeError(f"{item.at}: an entry is `- ClassName: {{keys}}`, got {shown(item)}")


def _member(key: str, node: Node, siblings: Iterable[str], options: tuple[str, ...], what: str) -> Iterator[Entry]:
    """What one key of a document, a stage or a group holds: a modifier, a group or a stage."""
    if key in MODIFIERS:
        if node.value is not None and not isinstance(node.value, dict):
            raise RecipeError(f"{node.at}: the keys of {key} are a mapping, got {shown(node)}")
        yield key, node
        return
    if _GROUP.fullmatch(key):
        yield from _group(node)
        return
    if _STAGE.fullmatch(key):
        yield from _stage(node)
        return
    classes = {name: MODIFIERS[name].keys() for name in siblings if name in MODIFIERS}
    owner = next((name for name, keys in classes.items() if key in keys), None)
    if owner is not None:
        raise RecipeError(
            f"{node.key_at}: '{key}' stands beside {owner}, not inside it. Indent it further:\n"
            f"    {owner}:\n      {key}: {shown(node)}"
        )
    if what == "modifier" or key.endswith("Modifier"):
        raise unknown(f"modifier '{key}'", key, node, tuple(MODIFIERS))
    error = unknown(f"{what} '{key}'", key, node, (*options, *MODIFIERS))
    raise RecipeError(str(error) if isinstance(node.value, (dict, list)) else f"{error}\n{_VARIABLE}")


def _refuse_variables(args: Node) -> bool:
    if args.value not in (None, {}):
        raise RecipeError(f"{args.key_at}: 'args' holds variables, {_NO_VARIABLES}")
    return False


def _refuse_expressions(node: Node) -> None:
    if isinstance(node.value, (dict, list)):
        for item in node.value.values() if isinstance(node.value, dict) else node.value:
            _refuse_expressions(item)
    elif isinstance(node.value, str) and _EXPRESSION.search(node.value) and not node.value.startswith("re:"):
        raise RecipeError(f"{node.at}: {node.value!r} is an expression, {_NO_VARIABLES}")


def _layer_names(node: Node) -> Node:
    """Layers where pruning recipes name weights (`re:.*q_proj.weight`) or everything (`__ALL_PRUNABLE__`)."""
    if isinstance(node.value, list):
        return replace(node, value=[_layer_names(item) for item in node.value])
    if not isinstance(node.value, str):
        return node
    name = "Linear" if node.value in _EVERYTHING else _WEIGHT.sub(r"\1", node.value)
    if name != node.value:
        _warn(f"{node.at}: '{node.value}' does not name layers and was read as '{name}'")
    return replace(node, value=name)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)
