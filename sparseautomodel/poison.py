"""Memory without values, made so that it can be told from values later."""

from __future__ import annotations

import torch
from torch import Tensor

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
    """How many elements of a tensor hold the pattern of their dtype: they were never written."""
    if tensor.dtype not in _PATTERNS or not tensor.numel():
        return 0
    integer, pattern = _PATTERNS[tensor.dtype]
    flat = tensor.detach().contiguous().view(-1).view(integer)
    step = 1 << 20
    return sum(int((flat[at : at + step] == pattern).sum()) for at in range(0, len(flat), step))
