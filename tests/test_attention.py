"""Attention in blocks against a float64 reference, and against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from sparseautomodel import attention
from sparseautomodel.attention import block_attention, compiled_attention
from sparseautomodel.fast_forward import FastForward

WHY_NOT = attention._functions()
NEEDS_C = pytest.mark.skipif(isinstance(WHY_NOT, str), reason=str(WHY_NOT))
WAYS = [block_attention, pytest.param(compiled_attention, marks=NEEDS_C)]


def inputs(heads: int, shared: int, tokens: int, batch: int = 2, width: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(batch, tokens, count, width).bfloat16() for count in (heads, shared, shared))
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def reference(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (one.double().repeat_interleave(group, 1) for one in (key, value))
    scores = query.double() @ key.transpose(-1, -2) * query.shape[3] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ value


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).square().sum() / exact.square().sum())


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls of `block_attention`, on a processor for which it is made."""
    calls: list[int] = []

    def called(query: Tensor, *args: object) -> Tensor:
        calls.append(query.shape[2])
        return block_attention(query, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "_is_faster", lambda: True)
    monkeypatch.setattr(attention, "has_compiled", lambda *tensors: False)
    monkeypatch.setattr(attention, "block_attention", called)
    return calls


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("tokens", [1, 31, 256, 300])
def test_close_to_exact(way: Any, heads: int, shared: int, tokens: int, causal: bool) -> None:
    query, key, value = inputs(heads, shared, tokens)
    found = way(query, key, value, 16**-0.5, causal)
    assert found.shape == query.shape and found.dtype == torch.bfloat16
    assert relative_error(found, reference(query, key, value, causal)) < 1e-4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("causal", [True, False])
def test_large_scores_are_not_rounded_where_they_count(way: Any, causal: bool) -> None:
    query, key, value = inputs(6, 2, 300)
    query, key = query + 2, key + 2  # what is common to all keys makes scores large, and softmax does not see it
    exact = reference(query, key, value, causal)
    group = query.shape[1] // key.shape[1]
    scores = (query * 0.25) @ key.repeat_interleave(group, 1).transpose(-1, -2)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    rounded = scores.softmax(-1) @ value.repeat_interleave(group, 1)
    found = relative_error(way(query, key, value, 0.25, causal), exact)
    assert scores.isfinite().any() and float(scores[scores.isfinite()].max()) > 15
    assert found < relative_error(rounded, exact) / 2


@pytest.mark.parametrize("way", WAYS)
def test_batch_size_changes_no_bit(way: Any) -> None:
    query, key, value = inputs(6, 2, 70, batch=3)
    whole = way(query, key, value, 0.25, True)
    alone = [way(query[row : row + 1], key[row : row + 1], value[row : row + 1], 0.25, True) for row in (0, 2)]
    assert torch.equal(whole[:1], alone[0]) and torch.equal(whole[2:], alone[1])


def test_cut_into_blocks_changes_only_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = inputs(4, 2, 200)
    monkeypatch.setattr(attention, "_QUERIES", 32)
    assert relative_error(block_attention(query, key, value, 0.25, True), reference(query, key, value, True)) < 1e-4


def test_taken_only_inside_and_for_grouped_heads(taken: list[int]) -> None:
    query, key, value = inputs(6, 2, 40)
    plain = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert not taken
    with FastForward():
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert taken == [40]
    assert relative_error(found, plain.double()) < 1e-4


@pytest.mark.parametrize("case", ["float32", "mask", "dropout", "other length", "gradient", "too long"])
def test_left_to_torch(case: str, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = inputs(4, 4, 40)
    options: dict[str, object] = {}
    if case == "float32":
        query, key, value = query.float(), key.float(), value.float()
    elif case == "mask":
        options = {"attn_mask": torch.ones(40, 40).tril().bool()}
    elif case == "dropout":
        options = {"dropout_p": 0.5}
    elif case == "other length":
        query = query[:, :, -3:]
    elif case == "gradient":
        query.requires_grad_()
    else:
        monkeypatch.setattr(attention, "_SCORES", 1000)
    torch.manual_seed(1)
    plain = functional.scaled_dot_product_attention(query, key, value, **options)  # type: ignore[arg-type]
    torch.manual_seed(1)
    with FastForward():
        found = functional.scaled_dot_product_attention(query, key, value, **options)  # type: ignore[arg-type]
    assert not taken and torch.equal(plain, found)


def test_processors_without_bfloat16_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = inputs(4, 4, 40)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    plain = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    with FastForward():
        assert torch.equal(functional.scaled_dot_product_attention(query, key, value, is_causal=True), plain)


@NEEDS_C
@given(
    batch=st.integers(1, 2),
    shared=st.integers(1, 3),
    group=st.integers(1, 3),
    tokens=st.integers(1, 140),
    width=st.sampled_from([2, 16, 40, 64, 128]),
    out_width=st.sampled_from([16, 32, 48, 64, 80, 128]),
    causal=st.booleans(),
)
def test_compiled_attention_rounds_only_shares_and_results(
    batch: int, shared: int, group: int, tokens: int, width: int, out_width: int, causal: bool
) -> None:
    torch.manual_seed(tokens)
    query = torch.randn(batch, tokens, shared * group, width).bfloat16().transpose(1, 2) * 2
    key = torch.randn(batch, tokens, shared, width).bfloat16().transpose(1, 2)
    value = torch.randn(batch, shared, tokens, out_width).bfloat16()
    assert attention.has_compiled(query, key, value)
    found = compiled_attention(query, key, value, width**-0.5, causal)
    exact = reference(query, key, value, causal)
    largest = value.double().abs().amax()
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-8 * largest).all()
    assert relative_error(found, exact) < 2e-5


@NEEDS_C
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    query, key, value = inputs(6, 2, 130, width=32)
    whole = compiled_attention(query, key, value, 0.2, True)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(compiled_attention(query, key, value, 0.2, True), whole)
    finally:
        torch.set_num_threads(1)


@NEEDS_C
def test_what_is_no_number_stays_none_and_is_not_seen_before_its_place() -> None:
    query, key, value = inputs(4, 2, 40)
    query[0, 1, 7, 3] = float("nan")
    found = compiled_attention(query, key, value, 0.25, True)
    assert found[0, 1, 7].isnan().all() and int(found.isnan().any(-1).sum()) == 1
    query, key, value = inputs(4, 2, 40)
    key[0, 0, 20, 3] = float("inf")
    found = compiled_attention(query, key, value, 0.25, True)
    assert found[0, 0, :20].isfinite().all() and not found[0, 0, 20:].isfinite().all()


def test_shapes_that_are_not_compiled() -> None:
    query, key, value = inputs(4, 2, 8, width=24)
    assert not attention.has_compiled(query, key, value)
    query, key, value = inputs(4, 2, 8)
    assert not attention.has_compiled(query, key, value.transpose(2, 3))


@NEEDS_C
def test_the_compiled_one_is_taken_where_it_is() -> None:
    query, key, value = inputs(6, 2, 40)
    with FastForward():
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.equal(found, compiled_attention(query, key, value, 0.25, True))
