"""Which values a matrix keeps: N:M and unstructured pruning. No other file knows how either is chosen.

**N:M is N KEPT of every M**, as in NVIDIA's 2:4 and in compressed-tensors: at most N of M consecutive inputs
are not zero. (In the code published with SparseGPT and Wanda N is the number pruned: equal for 2:4 alone.)

Values are ranked by magnitude through their bits: without the sign bit, the patterns of IEEE floats and of
bfloat16 order as their magnitudes do, NaN above all. So ranking is exact, in integers, with no float32 copy,
and a NaN is kept, where a check for finite values finds it, and does not pass for a small number.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from sparseautomodel.compiler import compiled, is_followed

SOURCE = Path(__file__).with_name("masks.c")

MAX_GROUP = 16
"""The largest M of N:M."""

_BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_DIGIT = 16

_COMPILED = (2, 4, 8, 16)
"""The M that masks.c is for: a register holds whole groups."""


def parse_structure(text: str) -> tuple[int, int] | None:
    """`(2, 4)` for `"2:4"`: 2 of every 4 consecutive inputs are kept. None for `"unstructured"` and `"0:0"`.

    Raises ValueError with the text to write instead.

    >>> parse_structure("1:4")
    (1, 4)
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 60:
        n, m = divmod(text, 60)
        raise ValueError(f'the number {text} is how YAML 1.1 reads {n}:{m} without quotes. Write "{n}:{m}"')
    if not isinstance(text, str):
        raise ValueError(f'the structure must be text, got {text!r}. Write "2:4" or "unstructured"')
    if text.strip() in ("unstructured", "0:0"):
        return None
    match = re.fullmatch(r"\s*(\d{1,4})\s*:\s*(\d{1,4})\s*", text)
    if match is None:
        raise ValueError(f'{text!r} is no structure. Write "2:4" (2 kept of every 4) or "unstructured"')
    n, m = int(match[1]), int(match[2])
    if 0 < m < n <= MAX_GROUP:
        raise ValueError(f'"{n}:{m}" would keep {n} of every {m}. Write "{m}:{n}"')
    if not 0 < n < m:
        raise ValueError(f'"{n}:{m}" would prune {"nothing" if n else "everything"}. Write "2:4"')
    if m > MAX_GROUP:
        raise ValueError(f'"{n}:{m}" has groups larger than {MAX_GROUP}. Write "8:16" or "unstructured"')
    return n, m


def prune_mask(
    scores: torch.Tensor,
    sparsity: float | None,
    structure: tuple[int, int] | None = None,
    *,
    per_row: bool = False,
) -> torch.Tensor:
    """What to keep, by the magnitude of `scores` `[rows, cols]` (the sign does not count): True is kept.

    With a structure `(n, m)` exactly n of every m consecutive columns are kept and `sparsity` does not count.
    Without, exactly `round(sparsity * scores.numel())` entries of the matrix are pruned; or with `per_row`, exactly
    `round(sparsity * cols)` of each row. Of equal scores the earlier is kept (lower row, then lower column). Beyond the
    mask, memory for a block of rows is used.

    Raises ValueError for columns that are no multiple of m, a sparsity outside 0..1, or a dtype that is not
    bfloat16, float16, float32 or float64.
    """
    if structure is not None:
        return _structured_mask(scores, *structure)
    if sparsity is None or not 0 <= sparsity <= 1:
        raise ValueError(f"unstructured pruning needs a sparsity from 0 to 1, got {sparsity}")
    if per_row:
        return _row_mask(scores, round(sparsity * scores.shape[1]))
    return _unstructured_mask(scores, round(sparsity * scores.numel()))


def global_threshold(read: Callable[[], Iterable[torch.Tensor]], sparsity: float) -> float:
    """The magnitude at or below which `round(sparsity * n)` of all n values lie; more, where there are ties.

    Exact in float32; 0.0 if nothing is to be pruned. `read()` goes through all tensors `[rows, cols]`, once
    if all are bfloat16, which a histogram of 16 bits tells apart, else twice.
    """
    dtypes = set()

    def patterns() -> Iterator[torch.Tensor]:
        for tensor in read():
            dtypes.add(tensor.dtype)
            for block in _row_blocks(tensor):
                yield _magnitude_bits(block.float())

    counts = _histogram(patterns(), shift=_DIGIT)
    rank = round(sparsity * int(counts.sum()))
    if rank == 0:
        return 0.0
    high, rank, _ = _digit_of_rank(counts, rank)
    low = 0
    if dtypes != {torch.bfloat16}:
        low, _, _ = _digit_of_rank(_histogram(patterns(), shift=0, prefix=high), rank)
    return torch.tensor(high << _DIGIT | low, dtype=torch.int32).view(torch.float32).item()


def threshold_mask(scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """What to keep of `scores` `[rows, cols]`: magnitudes, in float32, above `threshold`, and NaN."""
    mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    for block, kept in zip(_row_blocks(scores), _row_blocks(mask), strict=True):
        torch.le(block.float().abs(), threshold, out=kept).logical_not_()
    return mask


def zero_outside(values: torch.Tensor, keep: torch.Tensor) -> None:
    """Set `values` `[rows, cols]` to zero, in place, where the bool `keep` of the same shape is False."""
    for block, kept in zip(_row_blocks(values), _row_blocks(keep), strict=True):
        # As integers: ten times the speed of masked_fill_, and unlike a float's product never -0.0 or NaN.
        block.view(_bits_dtype(block)).mul_(kept)


def violations(values: torch.Tensor, n: int, m: int) -> int:
    """How many groups of `m` consecutive columns of `values` `[rows, cols]` have more than `n` nonzeros."""
    _check_structure(values, n, m)
    if (found := _compiled("count_violations", values, n, m)) is not None:
        return found
    broken = 0
    for block in _row_blocks(values):
        nonzero = (block != 0).reshape(-1).view(torch.uint8)
        total = nonzero.clone()  # of the group that starts here: meant only at every m-th place
        for distance in range(1, m):
            total[:-distance] += nonzero[distance:]
        broken += int((total[::m] > n).sum())
    return broken


def satisfies(values: torch.Tensor, n: int, m: int) -> bool:
    """Whether every group of `m` consecutive columns of `values` `[rows, cols]` has at most `n` nonzeros."""
    return violations(values, n, m) == 0


def sparsity(values: torch.Tensor) -> float:
    """The share of exact zeros in `values` `[rows, cols]`, 0..1; 0 if it is empty."""
    # Through bool: on half-precision numbers themselves, count_nonzero takes four times as long.
    nonzero = sum(int(torch.count_nonzero(block != 0)) for block in _row_blocks(values))
    return (values.numel() - nonzero) / max(1, values.numel())


def _structured_mask(scores: torch.Tensor, n: int, m: int) -> torch.Tensor:
    """Rank every entry in its group by m - 1 comparisons of the whole block with itself, shifted.

    A comparison decides a pair for both sides: rank = place + lost to later ones - won against earlier ones.
    Shifts read memory in order; cutting a group's columns out by strides takes three times as long.
    """
    _check_structure(scores, n, m)
    mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    if _compiled("keep_largest", scores, n, m, mask.data_ptr()) is not None:
        return mask
    blocks = _row_blocks(scores)
    if not blocks:
        return mask
    place = torch.arange(m, dtype=torch.uint8, device=scores.device).repeat(blocks[0].numel() // m)
    same_group = [(place < m - distance).view(torch.uint8) for distance in range(m)]
    for block, kept in zip(blocks, _row_blocks(mask), strict=True):
        bits = _magnitude_bits(block)
        size = bits.numel()
        rank = place[:size].clone()
        for distance in range(1, m):
            lost = (bits[distance:] > bits[:-distance]).view(torch.uint8)
            lost &= same_group[distance][: size - distance]
            rank[:-distance] += lost
            rank[distance:] -= lost
        torch.lt(rank, n, out=kept.view(-1))
    return mask


def _unstructured_mask(scores: torch.Tensor, pruned: int) -> torch.Tensor:
    if pruned == 0:
        return torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    blocks = _row_blocks(scores)
    threshold, rank = 0, pruned
    top = 8 * scores.element_size() - _DIGIT
    for shift in range(top, -1, -_DIGIT):
        counts = _histogram(map(_magnitude_bits, blocks), shift, None if shift == top else threshold)
        digit, rank, ties = _digit_of_rank(counts, rank)
        threshold = threshold << _DIGIT | digit
    spared = ties - rank
    mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    for block, kept in zip(blocks, _row_blocks(mask), strict=True):
        bits = _magnitude_bits(block)
        torch.gt(bits, threshold, out=kept.view(-1))
        if spared:
            tied = bits == threshold
            count = int(tied.sum())
            if count > spared:
                tied &= tied.cumsum(0, dtype=torch.int32) <= spared
            kept.view(-1).logical_or_(tied)
            spared -= min(count, spared)
    return mask


def _row_mask(scores: torch.Tensor, pruned: int) -> torch.Tensor:
    """The same number of entries pruned in each row."""
    mask = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    if pruned == 0:
        return mask
    for block, kept in zip(_row_blocks(scores), _row_blocks(mask), strict=True):
        bits = _magnitude_bits(block).view(block.shape)
        threshold = bits.kthvalue(pruned, dim=1, keepdim=True).values
        tied = bits == threshold
        spared = (bits <= threshold).sum(1, keepdim=True) - pruned
        tied &= tied.cumsum(1, dtype=torch.int32) <= spared
        torch.logical_or(bits > threshold, tied, out=kept)
    return mask


def _histogram(patterns: Iterable[torch.Tensor], shift: int, prefix: int | None = None) -> torch.Tensor:
    """Counts `[65536]` of the 16-bit digit at `shift`, of the patterns whose higher bits are `prefix`."""
    counts = torch.zeros(1 << _DIGIT, dtype=torch.int64)
    for bits in patterns:
        if prefix is not None:
            bits = bits[bits >> (shift + _DIGIT) == prefix]
        digits = bits if bits.dtype == torch.int16 else (bits >> shift) & ((1 << _DIGIT) - 1)
        counts = counts.to(bits.device)
        counts += torch.bincount(digits, minlength=1 << _DIGIT)
    return counts


def _digit_of_rank(counts: torch.Tensor, rank: int) -> tuple[int, int, int]:
    """The digit of the `rank`-th smallest (from 1), its rank among those of that digit, and their number."""
    reached = counts.cumsum(0)
    digit = int((reached < rank).sum())
    ties = int(counts[digit])
    return digit, rank - int(reached[digit]) + ties, ties


def _magnitude_bits(block: torch.Tensor) -> torch.Tensor:
    """The values of a block in one dimension, as integers that order as their magnitudes do."""
    bits = _bits_dtype(block)
    return (block.view(bits) & torch.iinfo(bits).max).reshape(-1)


def _bits_dtype(values: torch.Tensor) -> torch.dtype:
    if values.dtype not in _BITS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _BITS)
        raise ValueError(f"cannot rank values of {values.dtype}. Convert them to one of: {allowed}")
    return _BITS[values.dtype]


def _row_blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The matrix in runs of whole rows whose temporaries fit the cache of a CPU core, or keep a GPU busy."""
    if matrix.numel() == 0:
        return ()
    values = 1 << 18 if matrix.device.type == "cpu" else 1 << 22
    return matrix.split(max(1, values // matrix.shape[1]))


def _check_structure(values: torch.Tensor, n: int, m: int) -> None:
    if not 0 < n <= m <= MAX_GROUP:
        raise ValueError(f"N:M needs 0 < N <= M <= {MAX_GROUP}, got {n}:{m}")
    if values.shape[1] % m:
        raise ValueError(
            f"{n}:{m} needs a multiple of {m} columns, the matrix is {list(values.shape)}. "
            "Put the layer under `ignore` or prune it unstructured"
        )


def _compiled(name: str, values: torch.Tensor, n: int, m: int, *places: int) -> int | None:
    """What a function of masks.c returns, or None where there is none for these values."""
    functions = _functions()
    narrow = values.dtype in _BITS and values.itemsize <= 4
    there = narrow and values.is_cpu and values.is_contiguous() and not is_followed(values)
    if isinstance(functions, str) or not there or m not in _COMPILED:
        return None
    given = values.data_ptr(), values.itemsize, values.numel(), n, m
    return getattr(functions, name)(*given, *places, torch.get_num_threads()) or 0


@functools.cache
def _functions() -> ctypes.CDLL | str:
    """Those of masks.c, or why there are none."""
    found = compiled(SOURCE, frozenset({"avx512f", "avx512bw", "avx512vl"}))
    if isinstance(found, str):
        return found
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    found.keep_largest.restype = None
    found.keep_largest.argtypes = (pointer, integer, integer, integer, integer, pointer, integer)
    found.count_violations.argtypes = (pointer, integer, integer, integer, integer, integer)
    found.count_violations.restype = integer
    return found
