"""Which module makes the input of some layers and can make each channel of it smaller: found by running their block.

Smoothing divides the inputs of layers by a factor a channel and multiplies the columns of their weights by the same.
That changes nothing only where the factors can be taken out of whatever makes the input, and where nothing else reads
it. So every candidate is tried: with factors that are powers of two, which floats hold exactly, no output of the block
may change. What makes the input is either a norm, or a linear layer whose outputs reach the input channel by channel
(`up_proj` before `down_proj`, `v_proj` before `o_proj`, also where several heads read one, and where it is some of the
rows of a fused layer): then which row makes which channel is found by scaling the rows and looking at what comes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

_MOST_LINEAR = 3
"""Linear layers that are tried for a set, those that ran last first."""

Names = tuple[str, ...]
Kind = Literal["weight", "one_plus_weight", "rows"]
Wants = Callable[[Names, str, Kind], bool]
_NORMS: tuple[Kind, Kind] = ("weight", "one_plus_weight")


@dataclass(frozen=True, eq=False)
class Pair:
    """What makes the input of a set of layers, and can divide it. Names are relative to the block."""

    producer: str
    kind: Kind
    """A norm that multiplies by its `weight`, or by `one_plus_weight` (Gemma); or `rows` of a linear layer."""
    rows: Tensor
    """`[in_features]` int64: the row of the producer that makes each channel, or -1: that channel keeps its size."""
    num_rows: int
    """Rows of the producer's weight."""
    companions: Names = ()
    """Other layers that read the same input: their columns have to be multiplied too."""

    def allowed(self, factors: Tensor) -> Tensor:
        """The nearest factors `[in_features]` that the producer can hold: geometric means over channels of one row."""
        return self._channels(self.producer_factors(factors))

    def producer_factors(self, factors: Tensor) -> Tensor:
        """What each row of the producer is divided by, `[num_rows]` float32, for factors `[in_features]`."""
        rows = self.rows.to(factors.device)
        reached = rows >= 0
        rows, factors = rows[reached], factors[reached].float()
        if len(rows.unique()) == len(rows):
            return torch.ones(self.num_rows, device=factors.device).index_copy_(0, rows, factors)
        sums = torch.zeros(2, self.num_rows, device=factors.device)
        sums.index_add_(1, rows, torch.stack([factors.log(), torch.ones_like(factors)]))
        return (sums[0] / sums[1].clamp(min=1)).exp()

    @torch.no_grad()
    def divide(self, block: nn.Module, factors: Tensor) -> Tensor:
        """Divide what the producer makes, and multiply the columns of the companions; the set itself stays as it is.

        Returns the factors `[in_features]` float32 by which the input is really divided, and the columns of the set are
        to be multiplied: `allowed(factors)`, but with the rounding of a norm's weight to its dtype, and 1 where the
        quotient is no number of that dtype. Parameters are replaced, not written into.
        """
        module = block.get_submodule(self.producer)
        changed, divisors = _divided(module, self.kind, self.producer_factors(factors))
        channels = self._channels(divisors)
        for name, value in changed.items():
            _put(module, name, value)
        for name in self.companions:
            multiply_columns(block.get_submodule(name), channels)
        return channels

    def _channels(self, by_row: Tensor) -> Tensor:
        rows = self.rows.to(by_row.device)
        return torch.where(rows >= 0, by_row[rows.clamp(min=0)], 1.0)


def multiply_columns(module: nn.Module, factors: Tensor) -> None:
    """Multiply what reads each input of a linear layer (or Conv1D) by its factor; the parameter is replaced."""
    weight = _weight(module)
    assert weight is not None
    along = factors.to(weight.device).float().unsqueeze(1 - _input_dim(module))
    _put(module, "weight", (weight.float() * along).to(weight.dtype))


def find_pairs(
    block: nn.Module, run: Callable[[], Tensor], sets: Sequence[Names], wants: Wants | None = None
) -> dict[Names, Pair]:
    """For each set of layers that read one input, what makes it, where smoothing changes no output of the block.

    All parameters are afterwards what they were, the same objects, also when `run` raises.

    Args:
        block: has its weights, all of them finite.
        run: runs the block on a small batch of at least some tokens, always the same, and returns its output.
        sets: names relative to the block. Sets without a pair are not in the result, so are those that the batch does
            not reach, and those that share their input with another set.
        wants: whether a producer may be tried, given the set, the producer and its kind; None: all may.
    """
    with torch.no_grad():
        search = _Search(block, run, sets, wants or (lambda names, producer, kind: True))
        found: dict[Names, Pair | None] = {}
        alike: dict[Names, Pair] = {}
        for names in filter(search.reached, sets):
            # Experts are built alike: those after the first are tried together, and one by one only if that fails.
            model = next((known for known in found if _numberless(known) == _numberless(names)), None)
            pair = None if model is None else found[model]
            if model is None:
                found[names] = search.find(names)
            elif pair is not None and not pair.companions:
                alike[names] = _renumbered(pair, model, names)
        if not search.holds(alike):
            alike = {names: pair for names, pair in alike.items() if search.holds({names: pair})}
        known = {names: pair for names, pair in found.items() if pair is not None} | alike
        return {names: known[names] for names in sets if names in known}


class _Reached(Exception):
    """Ends a run at the layer whose input was wanted."""


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a module: what it read and gave, copied, and where that lay."""

    name: str
    reads: tuple[int, ...] | None
    makes: tuple[int, ...] | None
    inputs: Tensor | None
    output: Tensor | None
    held: Any  # what was passed: alive, so that nothing else gets its address


class _Search:
    def __init__(self, block: nn.Module, run: Callable[[], Tensor], sets: Sequence[Names], wants: Wants) -> None:
        self._block, self._run, self._wants = block, run, wants
        self._members = {name for names in sets for name in names}
        self._calls, self._output = self._record()
        dtypes = {weight.dtype for module in block.modules() if (weight := _weight(module)) is not None}
        self._base = 6 if torch.float16 in dtypes else 16  # float16 has no room for smaller numbers
        self._short = bool(dtypes - {torch.float32, torch.float64})

    def reached(self, names: Names) -> bool:
        """Whether the batch came to all layers of a set, and they read one input."""
        keys = {call.reads for call in self._calls if call.name in names}
        return len(keys) == 1 and None not in keys and {call.name for call in self._calls} >= set(names)

    def find(self, names: Names) -> Pair | None:
        """The first candidate with which all outputs stay as they are."""
        candidates = self._candidates(names) if bool(self._output.isfinite().all()) else ()
        return next((pair for pair in candidates if self.holds({names: pair})), None)

    def holds(self, pairs: Mapping[Names, Pair]) -> bool:
        """Whether nothing that the block computes changes when the inputs of all these sets do."""
        if not pairs:
            return True
        generator = torch.Generator().manual_seed(0)
        with _restored(self._block):
            for names, pair in pairs.items():
                exponents = torch.randint(0, 4, (pair.num_rows,), generator=generator).to(pair.rows.device)
                factors = pair._channels(torch.tensor([0.25, 0.5, 2.0, 4.0], device=exponents.device)[exponents])
                factors = pair.divide(self._block, factors)
                for name in names:
                    multiply_columns(self._block.get_submodule(name), factors)
            calls, output = self._record()
        # 1 + weight is rounded anew, which is the one thing here that is not exact.
        rounded = self._short and any(pair.kind == "one_plus_weight" for pair in pairs.values())
        most = 0.1 if rounded else 1e-2 if self._short else 1e-3
        changed = {pair.producer for pair in pairs.values()}
        if [call.name for call in calls] != [call.name for call in self._calls]:
            return False
        both = [(one, other) for one, other in zip(self._calls, calls, strict=True) if one.name not in changed]
        return all(_same(one.output, other.output, most) for one, other in both) and _same(self._output, output, most)

    def _candidates(self, names: Names) -> Iterator[Pair]:
        first = next(number for number, call in enumerate(self._calls) if call.name in names)
        inputs, earlier = self._calls[first].inputs, self._calls[:first]
        assert inputs is not None
        width, key = inputs.shape[-1], self._calls[first].reads
        readers = dict.fromkeys(call.name for call in self._calls if call.reads == key)
        companions = tuple(name for name in readers if name not in names)
        if any(name in self._members or not self._reads(name, width) for name in companions):
            return
        channels = torch.arange(width, device=inputs.device)
        for name in dict.fromkeys(call.name for call in reversed(earlier) if call.makes == key):
            weight = _weight(self._block.get_submodule(name))
            if weight is not None and weight.shape == (width,):
                for kind in _NORMS:
                    if self._wants(names, name, kind):
                        yield Pair(name, kind, channels, width, companions)
        tried = 0
        for name in dict.fromkeys(call.name for call in reversed(earlier)):
            module = self._block.get_submodule(name)
            count = _num_rows(module)
            if not count or tried == _MOST_LINEAR or (width % count and count < width):
                continue
            if self._wants(names, name, "rows"):
                tried += 1
                for rows in _row_choices(count, width, self._head_sizes(names, width)):
                    found = self._rows_of(module, rows.to(inputs.device), names, inputs)
                    if found is not None:
                        yield Pair(name, "rows", found, count, companions)

    def _reads(self, name: str, width: int) -> bool:
        module = self._block.get_submodule(name)
        weight = _weight(module)
        return weight is not None and weight.ndim == 2 and weight.shape[_input_dim(module)] == width

    def _head_sizes(self, names: Names, width: int) -> list[int]:
        """Whole numbers that the module around the layers keeps, and that divide their input: a head's size is one."""
        owner = self._block.get_submodule(names[0].rpartition(".")[0])
        numbers = {value for value in vars(owner).values() if type(value) is int and 1 < value < width}
        return sorted((number for number in numbers if width % number == 0), reverse=True)

    def _rows_of(self, module: nn.Module, rows: Tensor, names: Names, before: Tensor) -> Tensor | None:
        """Which of `rows` of a linear layer makes each channel of the set's input; None where more than one does.

        Each row is divided by a power of two for each digit of its place, and the digit is read from the input.
        """
        width, place = before.shape[-1], torch.arange(len(rows), device=rows.device)
        found = torch.zeros(width, dtype=torch.int64, device=rows.device)
        live = before.flatten(0, -2).abs().amax(0) > 0
        for digit in range(max(1, math.ceil(math.log(len(rows), self._base)))):
            code = place // self._base**digit % self._base + 1
            divisors = torch.ones(_num_rows(module), device=rows.device).index_copy_(0, rows, torch.exp2(code.float()))
            with _restored(self._block):
                for name, value in _divided(module, "rows", divisors)[0].items():
                    _put(module, name, value)
                after = self._input_of(names)
            exponents = _exponents(before, after)
            if exponents is None or bool(((exponents < 1) | (exponents > self._base))[live].any()):
                return None
            if (
                len(rows) == width
                and digit == 0
                and torch.equal(exponents[live], code[live])
                and live.sum() > width / 2
            ):
                return rows  # each row makes its own channel: the trial will tell if the other digits differ
            found += (exponents - 1) * self._base**digit
        # A row that several channels read may make a silent one too, and which is not known.
        unclear = not bool(live.all()) and len(found[live].unique()) < int(live.sum())
        if unclear or bool((found[live] >= len(rows)).any()):
            return None
        return torch.where(live, rows[found.clamp(0, len(rows) - 1)], -1)

    def _input_of(self, names: Names) -> Tensor | None:
        """What comes to the set; the run is ended there."""
        seen: list[Tensor] = []

        def stop(module: nn.Module, args: tuple[Any, ...]) -> None:
            seen.append(args[0].clone())
            raise _Reached

        hooks = [self._block.get_submodule(name).register_forward_pre_hook(stop) for name in names]
        try:
            with contextlib.suppress(_Reached):
                self._run()
        finally:
            for hook in hooks:
                hook.remove()
        return seen[0] if seen else None

    def _record(self) -> tuple[list[_Call], Tensor]:
        """All calls of modules with parameters of their own, in order, and the block's output."""
        calls: list[_Call] = []

        def keep(name: str) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                inputs, made = _tensor(args), _tensor(output)
                read, gave = (None if value is None else value.clone() for value in (inputs, made))
                calls.append(_Call(name, _key(inputs), _key(made), read, gave, held=(inputs, made)))

            return hook

        named = self._block.named_modules()
        hooks = [module.register_forward_hook(keep(name)) for name, module in named if name and module._parameters]
        try:
            output = self._run()
        finally:
            for hook in hooks:
                hook.remove()
        return calls, output


@contextlib.contextmanager
def _restored(block: nn.Module) -> Iterator[None]:
    """Put every parameter back afterwards: the object, not its values."""
    before = [(module, name, value) for module in block.modules() for name, value in module._parameters.items()]
    try:
        yield
    finally:
        for module, name, value in before:
            module._parameters[name] = value


def _divided(module: nn.Module, kind: Kind, divisors: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The parameters of a producer whose rows are divided, and the divisors that come of it in their dtype."""
    weight, bias = _weight(module), module._parameters.get("bias")
    assert weight is not None
    divisors = divisors.to(weight.device)
    shift = 1.0 if kind == "one_plus_weight" else 0.0
    whole = weight.float() + shift
    along = divisors if weight.ndim == 1 else divisors.unsqueeze(_input_dim(module))
    changed = (whole / along - shift).to(weight.dtype)
    fits = changed.isfinite() if weight.ndim == 1 else changed.isfinite().all(_input_dim(module))
    if bias is not None:
        fits = fits & (bias.float() / divisors).to(bias.dtype).isfinite()
    if kind != "rows":
        left = changed.float() + shift
        real = torch.where(whole == 0, divisors, whole / left)
        fits &= (real > 0) & real.isfinite()
        divisors = real
    divisors = torch.where(fits, divisors, 1.0)
    fits = fits if weight.ndim == 1 else fits.unsqueeze(_input_dim(module))
    found = {"weight": torch.where(fits, changed, weight)}
    return (found if bias is None else found | {"bias": (bias.float() / divisors).to(bias.dtype)}), divisors


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    module._parameters[name] = nn.Parameter(value, requires_grad=False)


def _weight(module: nn.Module) -> Tensor | None:
    weight = module._parameters.get("weight")
    return None if weight is None or weight.ndim not in (1, 2) or not weight.is_floating_point() else weight.detach()


def _input_dim(module: nn.Module) -> int:
    """Where the inputs stand in a `[out, in]` weight; in a Conv1D of transformers it is `[in, out]`."""
    return 0 if any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) else 1


def _num_rows(module: nn.Module) -> int:
    """Outputs of a linear layer; 0 for everything else."""
    weight = _weight(module) if isinstance(module, nn.Linear) or _input_dim(module) == 0 else None
    return 0 if weight is None else weight.shape[1 - _input_dim(module)]


def _row_choices(count: int, width: int, head_sizes: Sequence[int]) -> Iterator[Tensor]:
    """Which of `count` rows of a layer might make an input of `width` channels: all, or those of a part fused in."""
    rows = torch.arange(count)
    if width % count == 0:
        yield rows
        return
    rest = count - width
    choices = [rows[-(rest // 2) :]] if rest % 2 == 0 and width % (rest // 2) == 0 else []  # q, k, v
    if count % width == 0:
        choices += [rows[-width:], rows[:width]]  # gate and up, in either order
    for size in head_sizes:
        # Head after head: q of one or several heads, k, v; or, in one head, a part of the keys and the value.
        for heads in (rest // (2 * size), width // size):
            if heads and count % heads == 0 and width % (heads * size) == 0 and count // heads > size:
                choices.append(rows.view(heads, -1)[:, -size:].flatten())
    yield from {tuple(choice.tolist()): choice for choice in choices}.values()


def _exponents(before: Tensor, after: Tensor | None) -> Tensor | None:
    """`[channels]` whole n with `after = before / 2^n`; None where a channel has not simply changed its size."""
    if after is None or after.shape != before.shape:
        return None
    before, after = before.flatten(0, -2).float(), after.flatten(0, -2).float()
    size = before.norm(dim=0)
    exponents = (size / after.norm(dim=0)).log2().nan_to_num(0.0, 0.0, 0.0).round()
    expected = torch.exp2(-exponents)
    differing = (after - before * expected).norm(dim=0) > 0.03 * size * expected
    return None if bool(differing.any()) else exponents.to(torch.int64)


def _same(one: Tensor | None, other: Tensor | None, most: float) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return one is other
    return bool((one.double() - other.double()).norm() <= most * one.double().norm())


def _tensor(value: Any) -> Tensor | None:
    """The tensor that a module reads or gives; the first one where there are several."""
    items = value if isinstance(value, (tuple, list)) else (value,)
    return next((item for item in items if isinstance(item, Tensor)), None)


def _key(value: Tensor | None) -> tuple[int, ...] | None:
    """Equal for views that hold the same channels, whatever the shape of the tokens."""
    return None if value is None or not value.ndim else (value.data_ptr(), value.numel(), value.shape[-1])


def _numberless(names: Names) -> Names:
    return tuple(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names)


def _renumbered(pair: Pair, model: Names, names: Names) -> Pair:
    """The pair of a set that is named as another but for its numbers: those of another expert."""
    parts = zip(".".join(model).split("."), ".".join(names).split("."), strict=True)
    known = {old: new for old, new in parts if old.isdigit()}
    return replace(pair, producer=".".join(known.get(part, part) for part in pair.producer.split(".")))
