"""Attention of whole rows in bfloat16 on a CPU, in the time that its matrix products take."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseautomodel.compiler import compiled
from sparseautomodel.scratch import scratch

SOURCE = Path(__file__).with_name("attention.c")

_QUERIES, _SCORES, _FEWEST = 128, 2**22, 32
"""Most queries at once, and most scores: what the caches hold, and less than half is computed to be masked. Fewest
queries at once: rows so long that they would have to be fewer are left to torch."""

_MORE = 2
"""Columns that queries and keys get for what is taken from the scores: even, since the instructions take pairs."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """`scaled_dot_product_attention`, or None where torch's own is to be taken.

    Queries, keys and values are bfloat16, on a processor with its own instructions for them, and no mask is given.
    torch's kernel does not use these instructions there (without AMX): it takes six times as long as what is compiled
    here, and more than twice as long as `block_attention`, which is for machines without a compiler.
    """
    if attn_mask is not None or dropout_p or query.ndim != 4 or query.requires_grad or not _is_faster():
        return None
    kinds = {(one.dtype, one.device.type) for one in (query, key, value)}
    (batch, heads, tokens, width), shared = query.shape, key.shape[1]
    alike = key.shape == (batch, shared, tokens, width) and value.shape[:3] == key.shape[:3]
    grouped = heads == shared or (enable_gqa and heads % shared == 0)
    short = 0 < heads * tokens * _FEWEST <= _SCORES
    if kinds != {(torch.bfloat16, "cpu")} or not (alike and grouped and short):
        return None
    way = compiled_attention if has_compiled(query, key, value) else block_attention
    return way(query, key, value, width**-0.5 if scale is None else scale, is_causal)


def compiled_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    """`softmax(scale * query key^T) value`, all `[batch, heads, tokens, width]` bfloat16 on a CPU, by attention.c.

    Scores and softmax are float32; shares are rounded to bfloat16 before values are summed, as in torch's kernel. Heads
    of query share those of key. Where `has_compiled` is True of them.
    """
    functions: Any = _functions()
    (batch, heads, tokens, width), out_width = query.shape, value.shape[3]
    result = query.new_empty(batch, tokens, heads, out_width).transpose(1, 2)
    strides = [(ctypes.c_int64 * 3)(*one.stride()[:3]) for one in (query, key, value, result)]
    given = _Attention(batch, heads, key.shape[1], tokens, width, out_width, *strides, causal, scale)
    threads = torch.get_num_threads()
    memory = scratch("attention", functions.attention_bytes(given, threads), dtype=torch.uint8)
    places = [one.data_ptr() for one in (query, key, value, result, memory)]
    functions.attend(given, *places, threads)
    return result


def has_compiled(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `compiled_attention` is for these."""
    fits = query.shape[3] % 2 == 0 and value.shape[3] % 16 == 0
    return fits and all(one.stride(3) == 1 for one in (query, key, value)) and not isinstance(_functions(), str)


def block_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    """`softmax(scale * query key^T) value`, all `[batch, heads, tokens, width]`; heads of query share those of key.

    Scores leave the matrix product in the dtype, where a score of 20 is off by up to 1/16. So the product takes from
    those of each query about the largest of them: softmax is the same, and what counts is close to 0 and nearly exact.
    What stands above the diagonal of a block is not computed. Each row of the batch is computed alone, so that the size
    of the batch changes nothing.
    """
    batch, heads, tokens, _ = query.shape
    length = key.shape[2]
    step = max(_FEWEST, min(_QUERIES, _SCORES // (heads * length)))
    result = query.new_empty(batch, tokens, heads, value.shape[3]).transpose(1, 2)
    above = query.new_full((step, step), -torch.inf).triu_(1) if causal else None
    for row in range(batch):
        queries, keys = _shifted(query[row], key[row], scale)
        shared, _, _, width = queries.shape
        for start in range(0, tokens, step):
            stop = min(tokens, start + step)
            seen = stop if causal else length
            mine = queries[:, :, start:stop].reshape(shared, -1, width)
            scores = torch.bmm(mine, keys[:, :seen].transpose(1, 2)).view(heads, stop - start, seen)
            if above is not None:
                scores[:, :, start:].add_(above[: stop - start, : stop - start])
            part = torch.bmm(scores.softmax(-1).view(shared, -1, seen), value[row, :, :seen])
            result[row, :, start:stop] = part.view(heads, stop - start, -1)
    return result


def _shifted(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Queries `[shared, heads of each, tokens, width]` and keys with a few columns more, so that their product is the
    scores less the larger of two for each query: that of the first key, on which attention rests, and of its own."""
    (heads, tokens, width), shared = query.shape, key.shape[0]
    queries = query.new_zeros(shared, heads // shared, tokens, width + _MORE)
    keys = key.new_zeros(shared, key.shape[1], width + _MORE)
    keys[:, :, :width], keys[:, :, width] = key, -1
    scaled = torch.mul(query.view(shared, -1, tokens, width), scale, out=queries[..., :width])
    first = torch.matmul(scaled, key[:, None, 0, :, None]).squeeze(-1)
    own = (scaled * key[:, None]).sum(-1)
    torch.maximum(first, own, out=queries[..., width])
    return queries, keys


def _is_faster() -> bool:
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


class _Attention(ctypes.Structure):
    """`Attention` of the C file."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "shared", "tokens", "width", "out_width")),
        *((name, ctypes.c_int64 * 3) for name in ("query", "key", "value", "result")),
        *(("causal", ctypes.c_int64), ("scale", ctypes.c_double)),
    ]


@functools.cache
def _functions() -> ctypes.CDLL | str:
    """Those of the C file, or why there are none."""
    found = compiled(SOURCE, frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_bf16"}))
    if isinstance(found, str):
        return found
    integer, pointer, given = ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(_Attention)
    found.attention_bytes.restype = integer
    found.attention_bytes.argtypes = (given, integer)
    found.attend.argtypes = (given, pointer, pointer, pointer, pointer, pointer, integer)
    return found
