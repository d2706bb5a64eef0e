"""What can be wrong between a recipe and a model, one function a check. Each returns sentences for `Plan.errors` or
`Plan.warnings`: what, where, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from compressed_tensors.quantization import QuantizationArgs

from sparseautomodel.architecture import Architecture
from sparseautomodel.layers import StoredLayers, is_attention, quantization_of
from sparseautomodel.modifiers import Layer, Modifier
from sparseautomodel.modifiers.scheme_keys import SchemeKeys
from sparseautomodel.quantization_config import same_storage
from sparseautomodel.recipe import Recipe
from sparseautomodel.transform import LayerPlan, describe

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)
"""Layers that servers run as one matrix, by the last parts of the names of siblings."""

GROUP_SIZES = (128, 64, 32, 16)


def unmatched_targets(modifier: Modifier, layers: Sequence[Layer]) -> list[str]:
    """A target that names nothing is an error: the user meant something."""
    problems = []
    for pattern in modifier.patterns():
        if any(layer.targeted_by(pattern) for layer in layers):
            continue
        label = f"{type(modifier).__name__}: target {pattern!r}"
        spared = [layer.name for layer in layers if layer.matches(pattern)]
        if spared:
            problems.append(
                f"{label} matches only {_few(spared)}, which a class name leaves alone (heads, routers, parts beside "
                f"the language model). To change them, name them: targets: [{spared[0]}]"
            )
            continue
        kinds = sorted({kind for layer in layers for kind in layer.kinds[:1]})
        near = difflib.get_close_matches(pattern.removeprefix("re:"), [layer.name for layer in layers] + kinds, 3, 0.3)
        problems.append(
            f"{label} matches nothing. Nearest: {_few(near) or 'none'}. Classes in this model: {_few(kinds)}"
        )
    return problems


def needs_data(modifiers: Sequence[Modifier]) -> list[str]:
    """What works with statistics of a layer's inputs cannot be done while a checkpoint is loaded."""
    problems = []
    for modifier in modifiers:
        if modifier.needs_data:
            instead = getattr(modifier, "without_data", lambda: None)() or "a data-free recipe such as w4a16"
            problems.append(
                f"{type(modifier).__name__} needs calibration data: the statistics it works with are not in a dense "
                f"checkpoint. Run oneshot(path, recipe, data=..., output=folder), or take {instead}"
            )
    return problems


def selects_nothing(modifier: Modifier, selected: Sequence[Layer], layers: Sequence[Layer]) -> list[str]:
    """A modifier whose targets are all ignored or skipped would change nothing."""
    reached = [layer.name for layer in layers if any(layer.targeted_by(pattern) for pattern in modifier.patterns())]
    if selected or not reached:
        return []
    ignored = f"ignore {list(modifier.ignore)}" if modifier.ignore else "skip_indivisible"
    return [
        f"{type(modifier).__name__} changes no layer: {ignored} leaves out all that its targets name ({_few(reached)})"
    ]


def smoothed_for_nothing(plans: Sequence[LayerPlan]) -> list[str]:
    """A modifier that makes layers easier to quantize, where nothing quantizes them."""
    problems = []
    for modifier in dict.fromkeys(modifier for plan in plans for modifier in plan.modifiers if modifier.smooths):
        if not any(plan.scheme for plan in plans if modifier in plan.modifiers):
            name = type(modifier).__name__
            problems.append(
                f"{name} only prepares layers for quantization, and nothing quantizes them: add a GPTQModifier or "
                "QuantizationModifier with a scheme, such as scheme: W4A16"
            )
    return problems


def unmatched_ignores(modifier: Modifier, layers: Sequence[Layer]) -> list[str]:
    """An `ignore` that names nothing is a warning: a recipe for many models carries such names."""
    notes = []
    for pattern in () if modifier.smooths else modifier.ignore:  # those may name norms
        if not any(layer.matches(pattern) for layer in layers):
            near = difflib.get_close_matches(pattern.removeprefix("re:"), [layer.name for layer in layers], 3, 0.3)
            notes.append(
                f"{type(modifier).__name__}: ignore {pattern!r} matches nothing. Nearest: {_few(near) or 'none'}"
            )
    return notes


def left_alone(modifiers: Sequence[Modifier], layers: Sequence[Layer]) -> list[str]:
    """What class-name targets would have caught and by default do not."""
    notes = []
    for modifier in modifiers:
        spared: dict[str, list[str]] = {}
        patterns = modifier.patterns()
        for layer in layers:
            # Routers are Linear to servers and to readers of recipes, whatever class transformers has for them.
            caught = any(layer.matches(pattern) for pattern in patterns)
            caught = caught or (layer.role == "router" and "Linear" in patterns)
            if caught and not modifier.ignores(layer) and not any(layer.targeted_by(pattern) for pattern in patterns):
                spared.setdefault(layer.role, []).append(layer.name)
        for role, names in spared.items():
            notes.append(
                f"{type(modifier).__name__}: {role} left alone: {_few(names)}. To change it, target it by name"
            )
    return notes


def skipped(modifiers: Sequence[Modifier], layers: Sequence[Layer]) -> list[str]:
    """Layers that `skip_indivisible` leaves dense."""
    notes = []
    for modifier in modifiers:
        skips = getattr(modifier, "skips", None)
        names = [layer.name for layer in layers if skips is not None and skips(layer)]
        if names:
            notes.append(f"{type(modifier).__name__}: skip_indivisible leaves {len(names)} layers dense: {_few(names)}")
    return notes


def shapes(plans: Sequence[LayerPlan]) -> list[str]:
    """Groups, blocks and N:M patterns must divide the layer, here and not hours later."""
    failing: dict[tuple[str, int], list[Layer]] = {}
    for plan in plans:
        for label, divisor in _divisors(plan):
            if plan.layer.shape[1] % divisor:
                failing.setdefault((label, divisor), []).append(plan.layer)
    problems = []
    for (label, divisor), layers in failing.items():
        widths = sorted({layer.shape[1] for layer in layers})
        listed = _few([f"{layer.name} ({layer.shape[1]} inputs)" for layer in layers])
        problems.append(f"{label} {divisor} does not divide {len(layers)} layers: {listed}. {_remedy(label, widths)}")
    return problems


def _divisors(plan: LayerPlan) -> list[tuple[str, int]]:
    found = [
        ("N:M pattern of", int(structure.partition(":")[2]))
        for modifier in plan.modifiers
        if ":" in (structure := getattr(modifier, "mask_structure", ""))
    ]
    if plan.scheme is not None:
        weights = plan.scheme.weights
        kind = "group size" if weights.type == "int" else f"the {weights.type}{weights.num_bits} group size"
        for label, args in ((kind, weights), ("activation group size", plan.scheme.input_activations)):
            if args is not None and args.strategy in ("group", "tensor_group"):
                found.append((label, args.group_size))
    return found


def _remedy(label: str, widths: Sequence[int]) -> str:
    if label == "group size":
        dividing = [size for size in GROUP_SIZES if all(width % size == 0 for width in widths)]
        sizes = f"Write group_size: auto, or one of {', '.join(map(str, dividing))}; or " if dividing else "Write "
        return f"{sizes}group_size: -1 (one scale a row), or put these layers in ignore, or set skip_indivisible: true"
    if label == "activation group size":
        return "This scheme does not fit the model; take fp8-dynamic, whose scales are per channel and per token"
    if label.endswith("group size"):
        return "The format fixes it: put these layers in ignore, or set skip_indivisible: true"
    return "Put these layers in ignore, or prune them unstructured"


def misfits(plans: Sequence[LayerPlan], found: Sequence[str]) -> list[str]:
    """Of the misfits between files and model that were found, those in layers that are to be changed."""
    planned = {f"{plan.layer.name}.weight" for plan in plans}
    return [text for text in found if text.partition(" ")[0] in planned]


def other_method(config: Any) -> list[str]:
    """What another quantization method has stored cannot be changed here."""
    entry = getattr(config, "quantization_config", None)
    if (quantization_of(config) or {}).get("transform_config"):
        return [
            "the checkpoint is rotated (transform_config), and a recipe would change weights without the rotations. "
            'Load it with execution="dense", save that with save_pretrained, and compress what was saved'
        ]
    if entry is None or quantization_of(config) is not None:
        return []
    method = entry.get("quant_method") if isinstance(entry, dict) else getattr(entry, "quant_method", None)
    return [f"the checkpoint is quantized by {method or 'another method'}: take the dense one that it was made from"]


def read_twice(modifiers: Sequence[Modifier]) -> list[str]:
    """A threshold over all layers together must be known before the first is changed."""
    return [
        f"{type(modifier).__name__}: apply_globally reads the layers twice, once for the threshold and once to prune"
        for modifier in modifiers
        if getattr(modifier, "apply_globally", False) and getattr(modifier, "threshold", None) is None
    ]


def storable(plans: Sequence[LayerPlan], architecture: Architecture) -> list[str]:
    """compressed-tensors stores Linear and Embedding layers, one scheme each."""
    problems = []
    quantized = [plan.layer for plan in plans if plan.scheme]
    split = [layer for layer in quantized if f"{layer.name}.weight" in architecture.converted]
    if split:
        problems.append(
            "transformers splits or rearranges these tensors while it loads them, so they cannot be quantized as they "
            f"are stored: {_few([layer.name for layer in split])}. They can be pruned; put them in ignore of the "
            "quantizing modifier"
        )
    foreign = [layer for layer in quantized if layer not in split and not architecture.stores(layer)]
    if foreign:
        kinds = ", ".join(sorted({layer.kinds[0] for layer in foreign}))
        names = _few([layer.name for layer in foreign])
        problems.append(
            f"compressed-tensors cannot store {kinds} layers quantized: {names}. They can be pruned; put them in "
            "ignore of the quantizing modifier"
        )
    embeddings = [plan.layer.name for plan in plans if plan.layer.role == "embedding" and _observes(plan)]
    if embeddings:
        problems.append(
            f"the inputs of an embedding are token ids and have no scale: {_few(embeddings)}. Give it a scheme without "
            "input_activations"
        )
    for plan in plans:
        quantizing = [type(modifier).__name__ for modifier in plan.modifiers if modifier.scheme_of(plan.layer)]
        if len(quantizing) > 1:
            problems.append(
                f"{plan.layer.name} is quantized twice, by {' and '.join(quantizing)}: ignore it in one of them"
            )
    return problems


def _observes(plan: LayerPlan) -> bool:
    return any(modifier.input_range(plan.layer) is not None for modifier in plan.modifiers)


def fused(plans: Sequence[LayerPlan], layers: Sequence[Layer]) -> list[str]:
    """Layers that a server runs as one matrix must be stored alike."""
    by_name = {plan.layer.name: plan for plan in plans}
    problems = []
    for names in fused_sets(layer.name for layer in layers):
        schemes = {name: by_name[name].scheme if name in by_name else None for name in names}
        stored = {name: "dense" if scheme is None else describe(scheme) for name, scheme in schemes.items()}
        if len(set(stored.values())) > 1:
            listed = ", ".join(f"{name}: {text}" for name, text in stored.items())
            problems.append(
                f"servers run these as one matrix, so they need one scheme: {listed}. Target or ignore all of them"
            )
    if len(problems) > 4:
        problems = [*problems[:4], f"... and {len(problems) - 4} more such sets of layers"]
    return problems


def shared_scales(plans: Sequence[LayerPlan]) -> list[tuple[str, ...]]:
    """Sets of layers that need one global scale in common (NVFP4), since a server runs them as one matrix."""
    wanting = [plan.layer.name for plan in plans if plan.scheme and plan.scheme.weights.strategy == "tensor_group"]
    return [tuple(names) for names in fused_sets(wanting)]


def fused_sets(names: Iterable[str]) -> list[list[str]]:
    """Of these layers, the sets that servers run as one matrix."""
    names = list(names)
    present, sets = set(names), []
    for parent, last in (name.rpartition(".")[::2] for name in names):
        for family in FUSED:
            if last == family[0]:
                siblings = [f"{parent}.{part}" for part in family if f"{parent}.{part}" in present]
                sets += [siblings] if len(siblings) > 1 else []
    return sets


def cache(recipe: Recipe | None, architecture: Architecture) -> tuple[QuantizationArgs | None, list[str]]:
    """How keys and values are stored, by the recipe or else in the files as they are; and what is wrong with it."""
    if recipe is None:
        given = (quantization_of(architecture.config) or {}).get("kv_cache_scheme")
        return None if given is None else QuantizationArgs.model_validate(given), []
    found = [one for modifier in recipe.modifiers if (one := _cache_scheme(modifier)) is not None]
    if not found:
        return None, []
    if any(one != found[0] for one in found):
        return found[0], ["kv_cache_scheme is given twice, and differently: a model has one cache"]
    attention = [module for module in architecture.skeleton.modules() if is_attention(module)]
    name = type(architecture.skeleton).__name__
    if not attention:
        return found[0], [f"{name} has no attention that keeps keys and values: leave kv_cache_scheme out"]
    two_caches = getattr(architecture.config, "is_encoder_decoder", False)
    if two_caches or len({module.layer_idx for module in attention}) < len(attention):
        return found[0], [f"{name} has more than one attention a layer of its cache: leave kv_cache_scheme out"]
    if any(hasattr(module, "kv_b_proj") for module in attention):
        return found[0], [
            f"servers cache what the keys and values of {name} are made of, not these: leave kv_cache_scheme out"
        ]
    return found[0], []


def _cache_scheme(modifier: Modifier) -> QuantizationArgs | None:
    return modifier.cache_scheme() if isinstance(modifier, SchemeKeys) else None


def experts(recipe: Recipe, architecture: Architecture, layers: Sequence[Layer]) -> list[str]:
    """Experts whose files hold all of them in one 3-D tensor are no layers, and `Linear` would pass them by."""
    held = {f"{layer.module}" for layer in layers if layer.expert}
    missed = [name for name in architecture.fused_experts() if name.rpartition(".")[0] not in held]
    ignored = [
        name
        for name in missed
        if any(
            modifier.ignores(Layer(name, name, ("Linear",), (0, 0), architecture.dtype))
            for modifier in recipe.modifiers
        )
    ]
    missed = [name for name in missed if name not in ignored]
    if not missed or not any("Linear" in modifier.patterns() for modifier in recipe.modifiers):
        return []
    return [
        f"the experts are stored as 3-D tensors ({_few(missed)}), which target 'Linear' would pass by, and most of the "
        "model with them. Save the checkpoint with one tensor an expert, or write ignore: ['re:.*experts.*'] to leave "
        "them dense"
    ]


def over_compressed(plans: Sequence[LayerPlan], stored: StoredLayers) -> list[str]:
    """The source is compressed already: the same recipe changes nothing, another one must be asked for."""
    wanted = {plan.layer.name: plan.scheme for plan in plans if plan.scheme is not None}
    differing = [
        f"{name}: stored as {'dense' if name not in stored.schemes else describe(stored.schemes[name])}, "
        f"the recipe says {'dense' if name not in wanted else describe(wanted[name])}"
        for name in [*stored.schemes, *(name for name in wanted if name not in stored.schemes)]
        if name not in wanted or name not in stored.schemes or not same_storage(wanted[name], stored.schemes[name])
    ]
    if not differing:
        return []
    return [
        f"the checkpoint is compressed already, and otherwise than the recipe says, in {len(differing)} layers: "
        f"{_few(differing)}. Leave recipe out to load it as it is, or pass requantize=True to decode it and do it anew"
    ]


def _few(names: Sequence[str], limit: int = 6) -> str:
    listed = ", ".join(names[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"
