"""What calibrated methods gather over the inputs of a layer, and the linear algebra on it that several of them share.

The output error of a layer `y = W x` that becomes `W + D` is, summed over the calibration tokens, `tr(D H D^T)` with
`H = X^T X`: the Hessian of Optimal Brain Surgeon (Hassibi and Stork, 1993), as GPTQ and SparseGPT use it, without their
factor of 2, which changes no result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparseautomodel.squares import column_squares

_CHUNK = 2048
"""Tokens that are added at once, wherever updates were cut: so the cut does not change one bit of the result."""

_PANELS, _WIDEST = 6, 512
"""Runs of columns, and their most, in which the upper half of X^T X is computed: at most 58 % of all products."""

_BLOCK = 128
"""Rows or columns of a large matrix that are worked on at once: what is not done in place is no larger than this."""

_RUN_ROWS, _RUN_ELEMENTS = 4096, 2**21
"""Rows and weights that are solved at once: enough that each step of torch is worth its call, not many copies."""


class NotPositiveDefinite(ValueError):
    """A Hessian has no Cholesky factor, whatever is added to its diagonal within reason."""


@dataclass(frozen=True)
class LayerError:
    """What a calibrated method did to one layer, measured on the calibration data."""

    name: str
    before: float
    """Relative output error, `tr(D H D^T) / tr(W H W^T)`, of the plain method: round to nearest, or magnitude pruning.
    `nan` where there was no output, or it was not finite."""
    after: float
    """The same of the result; never above `before`."""
    fallback: str | None = None
    """Why the layer has the result of the plain method instead, or None."""
    tokens: int = 0
    """How many calibration tokens came to the layer."""
    smoothed: bool = False
    """Whether its inputs were divided first."""

    @classmethod
    def of(cls, name: str, squares: Sequence[float], fallback: str | None = None) -> LayerError:
        """From three squared norms: of the layer's output, of the plain method's error, of the solution's error.

        Where the solution is not finite or is worse, it has to be the plain result: then `fallback` says so.
        """
        output, plain, solved = squares
        if fallback is None and not solved <= plain:
            worse = math.isfinite(solved) and math.isfinite(plain)
            fallback = "the solution was worse than the plain method" if worse else "the solution was not finite"
        before = plain / output if 0 < output < math.inf else math.nan
        return cls(name, before, before if fallback else solved / output if output else math.nan, fallback)


class Statistic(Protocol):
    """What a method has to know of the inputs of a layer."""

    tokens: int
    """How many were seen."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes once inputs have come."""

    def update(self, inputs: Tensor) -> None:
        """Add inputs `[tokens, in_features]` of any float dtype, without padding."""

    def divide(self, factors: Tensor) -> None:
        """As if all inputs had been divided by `factors` `[in_features]`, which are > 0."""


class Hessian:
    """`X^T X` over all inputs X `[tokens, in_features]` of a layer, as a plain sum in float32.

    The result is the same bit for bit however the same tokens, in the same order, are cut into updates.
    """

    def __init__(self, columns: int, device: torch.device | str | None = None, arithmetic: str = "float32") -> None:
        """
        Args:
            device: where the sum lies; None: where the first inputs are. No memory is taken before they come.
            arithmetic: `float32`; or `int8`, several times faster on a CPU, and float32 elsewhere: inputs are rounded
                to 255 steps, each column of a run of tokens with its own scale, and their products are exact, so that
                the sum stays positive semi-definite. The rounding acts like a little more dampening.
        """
        if arithmetic not in ("float32", "int8"):
            raise ValueError(f"there is no arithmetic {arithmetic!r}. Allowed: float32, int8")
        self.columns, self.arithmetic, self.tokens = columns, arithmetic, 0
        self._device = None if device is None else torch.device(device)
        self._sum: Tensor | None = None
        self._rest: list[Tensor] = []
        self._mirrored = True

    @torch.no_grad()
    def update(self, inputs: Tensor) -> None:
        """Add inputs `[tokens, in_features]` of any float dtype, without padding; another shape is a ValueError."""
        _check_inputs(inputs, self.columns)
        inputs = inputs.detach().to(self._device)
        self.tokens += len(inputs)
        held = sum(map(len, self._rest))
        if held and held + len(inputs) >= _CHUNK:
            head, inputs = inputs[: _CHUNK - held], inputs[_CHUNK - held :]
            self._add_rest(head)
            held = 0
        whole = 0 if held else len(inputs) // _CHUNK * _CHUNK
        for chunk in inputs[:whole].split(_CHUNK):
            if len(chunk):
                self._add(chunk)
        if whole < len(inputs):
            self._rest.append(inputs[whole:].clone())

    @property
    def value(self) -> Tensor:
        """`[in_features, in_features]` float32, symmetric: the sum itself, not a copy. Valid until the next update."""
        self._add_rest()
        if self._sum is None:
            self._sum = torch.zeros(self.columns, self.columns, device=self._device)
        if not self._mirrored:
            _mirror(self._sum)
            self._mirrored = True
        return self._sum

    @property
    def nbytes(self) -> int:
        """Memory that the sum takes once inputs have come."""
        return 4 * self.columns**2

    @property
    def diagonal(self) -> Tensor:
        """`[in_features]` float32: the sum of squares of each column of the inputs."""
        return self.value.diagonal()

    def divide(self, factors: Tensor) -> None:
        """As if all inputs had been divided by `factors` `[in_features]`, which are > 0."""
        inverse = 1 / factors.float()
        self.value.mul_(inverse).mul_(inverse.unsqueeze(1))
        self._mirrored = False  # the order of the two products decides the last bit

    def _zeros(self, device: torch.device) -> Tensor:
        """The sum, made where the first inputs are."""
        if self._sum is None:
            self._sum = torch.zeros(self.columns, self.columns, device=self._device or device)
        return self._sum

    def _add_rest(self, more: Tensor | None = None) -> None:
        rest = [*self._rest, *([] if more is None else [more])]
        self._rest = []
        if rest:
            kinds = {inputs.dtype for inputs in rest}
            self._add(torch.cat(rest if len(kinds) == 1 else [inputs.float() for inputs in rest]))

    def _add(self, inputs: Tensor) -> None:
        total, self._mirrored = self._zeros(inputs.device), False
        if self.arithmetic == "int8" and inputs.device.type == "cpu":
            codes, scale = _codes(inputs)
            for panel, rest in _panels(self.columns):
                product = torch._int_mm(codes[:, panel].t(), codes[:, rest]).float().mul_(scale[panel].unsqueeze(1))
                total[panel, rest].addcmul_(product, scale[rest])
        else:
            exact = inputs.float()
            for panel, rest in _panels(self.columns):
                total[panel, rest].addmm_(exact[:, panel].t(), exact[:, rest])


class ColumnNorm:
    """The sum of squares of each input of a layer, over all tokens."""

    def __init__(self, columns: int, device: torch.device | str | None = None) -> None:
        """
        Args:
            device: where the sums lie; None: where the first inputs are.
        """
        self.columns, self.tokens = columns, 0
        self._device = None if device is None else torch.device(device)
        self._sum: Tensor | None = None

    @torch.no_grad()
    def update(self, inputs: Tensor) -> None:
        """Add inputs `[tokens, in_features]` of any float dtype, without padding; another shape is a ValueError."""
        _check_inputs(inputs, self.columns)
        inputs = inputs.detach().to(self._device)
        self.tokens += len(inputs)
        squares = column_squares(inputs)  # float64, so that it does not matter how the tokens were cut
        self._sum = squares if self._sum is None else self._sum + squares

    @property
    def value(self) -> Tensor:
        """`[in_features]` float32."""
        return torch.zeros(self.columns, device=self._device) if self._sum is None else self._sum.float()

    @property
    def nbytes(self) -> int:
        """Memory that the sums take."""
        return 8 * self.columns

    @property
    def diagonal(self) -> Tensor:
        """The same: what `Hessian.diagonal` of these inputs is."""
        return self.value

    def divide(self, factors: Tensor) -> None:
        """As if all inputs had been divided by `factors` `[in_features]`, which are > 0."""
        if self._sum is not None:
            self._sum = self._sum / factors.double().square()


@torch.no_grad()
def inverse_factor(hessian: Tensor, dampening_frac: float, order: Tensor | None = None) -> Tensor:
    """The upper triangular U `[in, in]` float32 with `U^T U = (H + a I)^-1`, whose rows GPTQ and SparseGPT work with.

    a is `dampening_frac` times the mean of the diagonal, and ten times as much again, up to the mean itself, as long as
    H is not positive definite. Columns that no token has reached (zero diagonal) are independent of all others.

    Args:
        hessian: symmetric, positive semi-definite, float32; it is not changed.
        order: work on the columns in this order.

    Raises:
        NotPositiveDefinite: the Hessian is not finite, or no allowed a helps.
    """
    diagonal = hessian.diagonal()
    mean = float(diagonal.double().mean())
    if not math.isfinite(mean) or mean < 0:
        raise NotPositiveDefinite("the inputs of the layer are not finite, or their squares are not")
    if mean == 0:
        return torch.eye(len(hessian), device=hessian.device)
    # U of H is L^-1 of H in reverse order, reversed: one factorization, where the inverse first takes three.
    last_first = torch.arange(len(hessian), device=hessian.device) if order is None else order
    last_first = last_first.flip(0)
    dead = (diagonal == 0).index_select(0, last_first)
    lower, failed = torch.empty_like(hessian), torch.empty((), dtype=torch.int32, device=hessian.device)
    for fraction in _fractions(dampening_frac):
        for rows, places in zip(lower.split(_BLOCK), last_first.split(_BLOCK), strict=True):
            torch.index_select(hessian.index_select(0, places), 1, last_first, out=rows)
        lower.diagonal()[dead] = mean
        lower.diagonal().add_(fraction * mean)
        # LAPACK goes by columns: what is the upper factor there is the lower one here, with no copy.
        torch.linalg.cholesky_ex(lower.t(), upper=True, out=(lower.t(), failed))
        if not failed:
            _invert_lower(lower)
            _reverse(lower)
            return lower
    raise NotPositiveDefinite("the Hessian is not positive definite, even with the mean of its diagonal added to it")


def output_errors(change: Tensor, hessian: Tensor) -> Tensor:
    """`d H d^T` for each row d of `change` `[rows, in]`: the squared change of that output, summed over the tokens."""
    total = torch.zeros(len(change), device=change.device)
    for rows, found in zip(change.split(_WIDEST), total.split(_WIDEST), strict=True):
        for panel, rest in _panels(len(hessian)):
            product = rows[:, panel] @ hessian[panel, rest]
            width = panel.stop - panel.start
            # What is right of the diagonal block stands for its mirror image too.
            product[:, width:].mul_(2)
            found += torch.linalg.vecdot(product, rows[:, rest])
    return total.clamp_(min=0)


def row_runs(rows: Sequence[int], columns: int) -> Iterator[list[tuple[int, slice]]]:
    """Layers of that many rows, which read one input, in runs to solve at once: small ones together, large ones cut.

    A run is a list of numbers of layers, each with the rows that are in it.
    """
    most = max(1, min(_RUN_ROWS, _RUN_ELEMENTS // columns))
    run: list[tuple[int, slice]] = []
    room = most
    for number, count in enumerate(rows):
        first = 0
        while first < count:
            part = slice(first, min(count, first + room))
            run.append((number, part))
            room -= part.stop - first
            first = part.stop
            if room == 0:
                yield run
                run, room = [], most
    if run:
        yield run


def _check_inputs(inputs: Tensor, columns: int) -> None:
    if inputs.ndim != 2 or inputs.shape[1] != columns or not inputs.is_floating_point():
        raise ValueError(
            f"inputs must be [tokens, {columns}] of a float dtype, got {list(inputs.shape)} {inputs.dtype}"
        )


def _panels(columns: int) -> Iterator[tuple[slice, slice]]:
    """Runs of columns, and for each all columns from its first on."""
    step = min(-(-columns // _PANELS), _WIDEST)
    for first in range(0, columns, step):
        yield slice(first, min(columns, first + step)), slice(first, columns)


def _mirror(matrix: Tensor) -> None:
    """Copy the upper half into the lower one, in place."""
    for first in range(0, len(matrix), _BLOCK):
        part, below = slice(first, first + _BLOCK), slice(first + _BLOCK, len(matrix))
        block = matrix[part, part]
        block.copy_(block.triu() + block.triu(1).t())
        matrix[below, part].copy_(matrix[part, below].t())


def _invert_lower(matrix: Tensor) -> None:
    """Invert a lower triangular matrix in place: the inverse of [[A, 0], [B, C]] has -C^-1 B A^-1 where B was."""
    for first in range(0, len(matrix), _BLOCK):
        rows, before = matrix[first : first + _BLOCK], slice(0, first)
        block = rows[:, first : first + _BLOCK]
        one = torch.eye(len(block), device=block.device)
        block.copy_(torch.linalg.solve_triangular(block, one, upper=False))
        left = (block @ rows[:, before]).neg_()
        for start in range(0, first, _WIDEST):  # A^-1 is zero above its diagonal
            stop = min(first, start + _WIDEST)
            torch.mm(left[:, start:], matrix[start:first, start:stop], out=rows[:, start:stop])


def _reverse(matrix: Tensor) -> None:
    """Reverse the order of the rows and of the columns, in place."""
    numbers, size = matrix.view(-1), _BLOCK * len(matrix)
    middle = len(numbers) // 2
    for first in range(0, middle, size):
        last = min(middle, first + size)
        head, tail = numbers[first:last], numbers[len(numbers) - last : len(numbers) - first]
        kept = head.flip(0)
        head.copy_(tail.flip(0))
        tail.copy_(kept)


def _codes(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs as int8, and the float32 scale of each column."""
    exact = inputs if inputs.dtype == torch.bfloat16 else inputs.float()
    smallest = torch.finfo(torch.bfloat16).tiny
    scale = exact.abs().amax(0).div_(127).clamp_(min=smallest)
    return (exact / scale).round_().clamp_(-127, 127).to(torch.int8), scale.float()


def _fractions(first: float) -> Iterator[float]:
    """`first`, then ten times as much up to 1; from nothing it goes on at 0.001."""
    fraction = first
    while fraction < 1:
        yield fraction
        fraction = max(10 * fraction, 1e-3)
    yield max(first, 1.0)
