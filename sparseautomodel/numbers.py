"""Numbers of tensors: whether they are finite, how far apart, and whether anything wrote them."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_NUMBERS = 1 << 20
"""Numbers read at a time, so that a check needs no memory to speak of."""

_AT_ONCE = 1 << 17
"""Numbers looked at at a time: what is made of them stays in the cache of the processor, and takes no memory anew."""

LIMITS = {  # dtype -> (integer view, mask of the magnitude, smallest pattern that is not finite)
    torch.float64: (torch.int64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
    torch.float16: (torch.int16, 0x7FFF, 0x7C00),
    torch.float8_e4m3fn: (torch.int8, 0x7F, 0x7F),
    torch.float8_e5m2: (torch.int8, 0x7F, 0x7C),
}

_PATTERNS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FFD7FED7FED7FED),
    torch.float32: (torch.int32, 0x7FED7FED),
    torch.bfloat16: (torch.int16, 0x7FED),
    torch.float16: (torch.int16, 0x7FED),
    torch.int64: (torch.int64, 0x7FED7FED7FED7FED),
    torch.int32: (torch.int32, 0x7FED7FED),
    torch.int16: (torch.int16, 0x7FED),
}
"""dtype -> integer view and pattern: a NaN that no operation makes, or a number that nobody uses. Smaller dtypes have
no pattern to spare."""


def poison(tensor: Tensor) -> None:
    """Fill a tensor with the pattern of its dtype; with NaN, or the largest number, where the dtype has none."""
    with torch.no_grad():
        if tensor.dtype in _PATTERNS and tensor.is_contiguous():
            integer, pattern = _PATTERNS[tensor.dtype]
            tensor.view(integer).fill_(pattern)
        elif tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


def poisoned(tensor: Tensor) -> int:
    """How many elements of a tensor hold the pattern of their dtype: they were never written.

    Of floats any one counts. An integer can be any number, as the words of packed weights are: all or none.
    """
    if tensor.dtype not in _PATTERNS or not tensor.numel():
        return 0
    integer, pattern = _PATTERNS[tensor.dtype]
    flat = tensor.detach().contiguous().view(-1).view(integer)
    if not tensor.is_floating_point():
        return tensor.numel() if int(flat[0]) == pattern and bool((flat == pattern).all()) else 0
    found = (piece == pattern for piece in flat.split(_AT_ONCE))
    return sum(int(held.sum()) for held in found if held.any())  # looking is several times faster than counting


def is_finite(values: Tensor) -> bool:
    """Whether every number is finite; tensors of integers are. Needs no temporary larger than a chunk."""
    if values.dtype not in LIMITS or not values.numel():
        return True
    integer, mask, limit = LIMITS[values.dtype]
    flat = values.detach().contiguous().view(-1).view(integer)
    return all(int((piece & mask).max()) < limit for piece in flat.split(_AT_ONCE))


def spread(value: Tensor) -> tuple[float, float]:
    """Smallest and largest number of a tensor; both NaN where there is a NaN."""
    value = value.detach()
    if value.dtype.itemsize == 1 and value.is_floating_point():
        value = value.float()
    if not value.numel() or value.dtype == torch.bool or value.is_complex():
        return 0.0, 1.0
    low, high = torch.aminmax(value)
    return float(low), float(high)
