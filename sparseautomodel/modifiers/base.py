"""What a recipe's entries are (`Modifier`), what they are asked about (`Layer`), and what they work on (`Weight`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils.match import match_name

from sparseautomodel.masks import zero_outside
from sparseautomodel.ranges import InputRange
from sparseautomodel.statistics import LayerError, Statistic


class ModifierError(ValueError):
    """A key of a modifier has a value that is not allowed. `recipe.py` adds the file, line and column."""

    def __init__(self, key: str | None, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True)
class Layer:
    """One matrix that a recipe can change, known from the config and the file headers alone."""

    name: str
    """Full dotted name in the checkpoint, without `.weight`: `model.layers.0.self_attn.q_proj`."""
    module: str
    """Full dotted name of the module (for an expert: of the fused module) in the transformers model."""
    kinds: tuple[str, ...]
    """Class names of the module, most derived first; an expert's projection is `("Linear",)`."""
    shape: tuple[int, int]
    """`(out_features, in_features)`, whatever the order in the file."""
    dtype: torch.dtype
    role: str = "block"
    """`block`, or what class-name targets pass by: `head`, `embedding`, `router`, `vision`, `audio`, `projector`."""
    expert: bool = False
    transposed: bool = False
    """True for `Conv1D`, whose file holds `(in_features, out_features)`."""

    def matches(self, pattern: str) -> bool:
        """Whether `pattern` (full name, `re:` regex as in compressed-tensors, or class name) names this layer."""
        return self.named_by(pattern) or pattern in self.kinds

    def targeted_by(self, pattern: str) -> bool:
        """Whether a target `pattern` reaches this layer: by name always, by class only in the repeated blocks."""
        return self.named_by(pattern) or (self.role == "block" and pattern in self.kinds)

    def named_by(self, pattern: str) -> bool:
        """Whether `pattern` matches by name, in the checkpoint's or the model's spelling; class names do not count."""
        return match_name(self.name, pattern) or match_name(self.module, pattern)


@dataclass
class Weight:
    """The dense values in hand, and what the modifiers have decided about them so far.

    `values` is `[rows, in_features]` in the checkpoint's dtype: the whole matrix, or a run of whole rows when every
    modifier of the layer works on rows alone. A calibrated method leaves them in float32 once it has decided which
    numbers of `scale` they are. Modifiers change the fields in place.
    """

    layer: Layer
    values: torch.Tensor
    scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    keep: torch.Tensor | None = None
    """Bool, shaped like `values`: False where the value is zero for good. None where nothing was pruned."""
    input_scale: torch.Tensor | None = None
    """`[1]`, of activations whose scale is found beforehand; with `input_zero_point` where they are asymmetric."""
    input_zero_point: torch.Tensor | None = None
    input_global_scale: torch.Tensor | None = None
    """`[1]` float32, of NVFP4 activations."""

    def prune(self, keep: torch.Tensor) -> None:
        """Zero the values that `keep` does not allow; what an earlier modifier pruned stays pruned."""
        zero_outside(self.values, keep)
        self.keep = keep if self.keep is None else self.keep & keep


@dataclass(frozen=True, kw_only=True)
class Modifier:
    """One entry of a recipe: its keys as fields, and one method that does the work.

    A subclass is one algorithm and one file. The class name is the recipe's name for it, the fields are its keys;
    defining the subclass enters it in `MODIFIERS`, unless it is made with `registered=False` for others to derive from.
    """

    targets: tuple[str, ...] = ("Linear",)
    """Full names, `re:` regexes or class names. A class name leaves heads, routers and vision parts alone."""
    ignore: tuple[str, ...] = ()
    """Layers that are not touched, in the same spelling."""

    needs_data: ClassVar[bool] = False
    """Whether calibration data is needed: then only `oneshot(data=...)` can run it. For some, that depends on the keys:
    there the instance says it, and the class says what is true whatever the keys."""
    smooths: ClassVar[bool] = False
    """Whether `smooth` moves size from a layer's inputs into its weights."""

    def __init_subclass__(cls, registered: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not registered:
            return
        if cls.__name__ in MODIFIERS:
            raise TypeError(f"two modifiers are called {cls.__name__}")
        MODIFIERS[cls.__name__] = cls

    def __post_init__(self) -> None:
        for key in ("targets", "ignore"):
            value = getattr(self, key)
            value = (value,) if isinstance(value, str) else value
            if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
                raise ModifierError(key, f"{key} must be a list of names, got {value!r}")
            object.__setattr__(self, key, tuple(value))
        if not self.targets:
            raise ModifierError("targets", "targets is empty: nothing would be changed. Write for example: [Linear]")

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """The keys that a recipe may give, in order."""
        return tuple(field.name for field in dataclasses.fields(cls))

    def to_dict(self) -> dict[str, Any]:
        """The keys that differ from their defaults, as plain YAML values."""
        given = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if value != default:
                given[field.name] = _plain(value)
        return given

    def patterns(self) -> tuple[str, ...]:
        """Every target pattern, wherever in the keys it stands."""
        return self.targets

    def selects(self, layer: Layer) -> bool:
        """Whether this modifier changes the layer: a target reaches it and `ignore` does not name it."""
        return any(layer.targeted_by(pattern) for pattern in self.patterns()) and not self.ignores(layer)

    def ignores(self, layer: Layer) -> bool:
        """Whether `ignore` names the layer or its class, whatever its role."""
        return any(layer.matches(pattern) for pattern in self.ignore)

    def resolve(self, layers: Iterable[Layer]) -> Modifier:
        """This modifier with every automatic choice (`group_size: auto`) made for the layers that it changes."""
        return self

    def scan(self, read: Callable[[], Iterator[torch.Tensor]]) -> Modifier:
        """This modifier with what must be known of ALL its layers before the first is changed.

        `read()` reads the layers anew, one after another; a modifier that does not call it costs no read.
        """
        return self

    def scheme_of(self, layer: Layer) -> QuantizationScheme | None:
        """How this modifier stores the layer, or None when it leaves the number format alone."""
        return None

    def sparsity_of(self, layer: Layer) -> float | None:
        """The least share of zeros, 0..1, that the layer has afterwards, or None when that depends on its values."""
        return None

    def share_global_scale(self, weights: Sequence[Weight]) -> None:
        """Give layers that servers run as one matrix what they must have in common; for most modifiers, nothing."""

    def rows(self, layer: Layer) -> int:
        """How many rows must be seen together: 1 when each row stands alone, `layer.shape[0]` when all are needed."""
        return 1

    def columns(self, layer: Layer) -> int:
        """How many columns must be seen together, counted from the first: `layer.shape[1]` when all are needed."""
        return layer.shape[1]

    def apply(self, weight: Weight) -> None:
        """Change `weight` in place."""
        raise NotImplementedError(f"{type(self).__name__} has no data-free form")

    def statistic(self, layer: Layer) -> Statistic | None:
        """A new, empty statistic to gather over the inputs of the layer; None: `apply` does the work, without data."""
        return None

    def input_range(self, layer: Layer) -> InputRange | None:
        """A new, empty range to gather over the inputs of the layer beside `statistic`, for `set_input_scales`.

        None where the layer is stored without scales of its inputs.
        """
        return None

    def set_input_scales(
        self, weights: Sequence[Weight], inputs: InputRange, others: Sequence[InputRange] = ()
    ) -> list[LayerError]:
        """Set the fields of `weights` that static activations need.

        Args:
            weights: layers that read ONE input; those whose scheme needs nothing are left alone.
            inputs: its range.
            others: ranges of inputs of the same kind (the other experts of the block), for an input without a token.

        Returns an entry for each layer whose scales are not those of its own inputs.
        """
        raise NotImplementedError(f"{type(self).__name__} stores no scales of activations")

    def smooth(
        self,
        weights: Sequence[Weight],
        statistic: Any,
        schemes: Sequence[QuantizationScheme | None],
        allowed: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor | None:
        """Factors `[in_features]` > 0, by which the inputs of `weights` are divided and their columns multiplied.

        Called before any modifier changes the layers, where what makes their input can be divided too; nothing is
        changed here. None leaves all as it is.

        Args:
            weights, statistic: as in `solve`.
            schemes: how each layer will be stored, whoever quantizes it; None: dense.
            allowed: the nearest factors that the producer of the input can hold (heads that share it have the same).
        """
        return None

    def moves(self, layers: Sequence[str], producer: str, kind: str) -> bool:
        """Whether `smooth` may be asked about `layers`, whose input `producer` makes, by full module names."""
        return False

    def solve(self, weights: Sequence[Weight], statistic: Any) -> list[LayerError]:
        """Change whole `weights` in place, called instead of `apply` where `statistic` returned one.

        Args:
            weights: layers that read ONE input.
            statistic: what was gathered over that input. It is not changed.

        Returns what each layer has lost, in the order of `weights`.
        """
        raise NotImplementedError(f"{type(self).__name__} uses no data")


MODIFIERS: dict[str, type[Modifier]] = {}
"""Every modifier by its recipe name. Filled by importing the files of this folder; never from text."""


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
