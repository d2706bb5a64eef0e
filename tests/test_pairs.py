"""Products with 2:4 weights against dense ones in float64, and against torch's own."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from sparseautomodel import pairs
from sparseautomodel.pairs import Pairs, multiply, split

pytestmark = pytest.mark.skipif(pairs.why_not() is not None, reason=str(pairs.why_not()))
BF16 = torch.bfloat16


def two_in_four(rows: int, columns: int, least: int = 0) -> Tensor:
    """`least` to 2 numbers of each four are not 0, anywhere in it."""
    groups = -(-columns // 4)
    order = torch.rand(rows, groups, 4).argsort(-1)
    count = torch.randint(least, 3, (rows, groups, 1))
    weight = torch.where(order < count, torch.randn(rows, groups, 4), torch.zeros(()))
    return weight.view(rows, -1)[:, :columns].contiguous().to(BF16)


def made(weight: Tensor) -> Pairs:
    found = split(weight)
    assert found is not None
    return found


@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 150),
    tokens=st.integers(0, 40),
    has_bias=st.booleans(),
    stride=st.integers(0, 5),
)
def test_close_to_exact(rows: int, columns: int, tokens: int, has_bias: bool, stride: int) -> None:
    torch.manual_seed(rows * columns)
    weight, inputs = two_in_four(rows, columns), torch.randn(tokens, columns + stride).to(BF16)[:, :columns]
    bias = torch.randn(rows).to(BF16) if has_bias else None
    found = made(weight)
    assert torch.equal(found.dense(), weight)
    output = multiply(inputs, found, bias)
    exact = inputs.double() @ weight.double().t() + (0 if bias is None else bias.double())
    size = inputs.double().abs() @ weight.double().abs().t() + 1
    assert output.dtype == BF16 and output.shape == (tokens, rows)
    assert ((output.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-20 * size).all()


@pytest.mark.parametrize("columns", [1100, 2048, 4100])
@pytest.mark.parametrize("tokens", [1, 12, 13, 24, 700])
def test_wide_rows_are_summed_in_parts(columns: int, tokens: int) -> None:
    weight, inputs = two_in_four(40, columns), torch.randn(tokens, columns).to(BF16)
    output, exact = multiply(inputs, made(weight), None), inputs.double() @ weight.double().t()
    assert float((output.double() - exact).norm() / exact.norm()) < 3e-3


@pytest.mark.parametrize("tokens", [2, 12, 13, 40, 300])
def test_a_token_does_not_depend_on_the_others_nor_on_threads(tokens: int) -> None:
    weight, inputs = made(two_in_four(50, 1200)), torch.randn(tokens, 1200).to(BF16)
    whole = multiply(inputs, weight, None)
    assert torch.equal(whole, torch.cat([multiply(row[None], weight, None) for row in inputs]))
    torch.set_num_threads(3)
    try:
        assert torch.equal(multiply(inputs.clone(), weight, None), whole)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("count", range(5))
def test_every_place_of_a_group(count: int) -> None:
    """All patterns of zeros of four numbers; one with more than two others is no such weight."""
    patterns = [bits for bits in range(16) if bits.bit_count() == count]
    weight = torch.tensor([[float(i + 1) if bits >> i & 1 else 0.0 for i in range(4)] for bits in patterns]).to(BF16)
    if count > 2:
        assert all(split(row[None]) is None for row in weight)
        return
    assert torch.equal(made(weight).dense(), weight)
    assert torch.equal(multiply(torch.eye(4).to(BF16), made(weight), None), weight.t())


def test_numbers_that_are_none_and_the_smallest_are_kept() -> None:
    weight = torch.tensor([[float("nan"), -0.0, float("inf"), 0.0], [-0.0, -0.0, -0.0, 1e-40]]).to(BF16)
    dense = made(weight).dense()
    assert dense[0, 0].isnan() and dense[0, 2].isinf() and dense[1, 3] == weight[1, 3] > 0 == dense[1, 0]
    weight[0, 1] = 1
    assert split(weight) is None


def test_same_inputs_are_packed_once_and_changed_ones_again() -> None:
    one, other, inputs = made(two_in_four(20, 64)), made(two_in_four(30, 64)), torch.randn(20, 64).to(BF16)
    first = multiply(inputs, one, None)
    assert torch.equal(multiply(inputs, other, None), multiply(inputs.clone(), other, None))
    assert torch.equal(multiply(inputs, one, None), first)
    inputs.mul_(2)
    assert torch.equal(multiply(inputs, one, None), first * 2)
    multiply(torch.randn(20, 64).to(BF16), one, None)
    assert torch.equal(multiply(inputs, one, None), first * 2)
    few = made(two_in_four(20, 32))
    with pytest.raises(ValueError, match=r"takes \[..., 32\]"):
        multiply(inputs, few, None)
    assert torch.equal(multiply(inputs, one, None), first * 2)
    wide = torch.randn(5, 20, 64).to(BF16)
    with pytest.raises(ValueError, match="a bias of 20"):
        multiply(wide, one, torch.ones(3, dtype=BF16))
    assert torch.equal(multiply(wide, one, None), multiply(wide.clone(), one, None))
    with torch.inference_mode():
        held = torch.randn(20, 64).to(BF16)
        before = multiply(held, one, None)
        held.mul_(2)
        assert torch.equal(multiply(held, one, None), before * 2)


def test_same_inputs_are_packed_again_where_memory_is_other() -> None:
    """More threads need more of it."""
    weight, inputs = made(two_in_four(50, 128)), torch.randn(300, 128).to(BF16)
    wanted = multiply(inputs.clone(), weight, None)
    assert torch.equal(multiply(inputs, weight, None), wanted)
    for threads in (4, 16, 1):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(multiply(inputs, weight, None), wanted)
        finally:
            torch.set_num_threads(1)


def test_many_tokens_take_no_more_memory_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(role: str, *shape: int, dtype: torch.dtype) -> Tensor:
        sizes.append(shape[0])
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(pairs, "scratch", counted)
    weight, inputs = made(two_in_four(20, 96)), torch.randn(2500, 2, 96).to(BF16)
    output = multiply(inputs, weight, None)
    assert torch.equal(output[700], multiply(inputs[700], weight, None))
    assert torch.equal(output, multiply(inputs, weight, None))
    torch.testing.assert_close(output, torch.nn.functional.linear(inputs, weight.dense()))
    multiply(inputs[:512].clone(), weight, None)
    assert sizes[0] == sizes[-1], "1024 tokens at most"


def test_threads_have_memory_of_their_own() -> None:
    weight, given_inputs = made(two_in_four(64, 256)), [torch.randn(60, 256).to(BF16) for _ in range(4)]
    wanted = [multiply(inputs, weight, None) for inputs in given_inputs]
    wrong: list[int] = []

    def run(number: int) -> None:
        for _ in range(30):
            if not torch.equal(multiply(given_inputs[number], weight, None), wanted[number]):
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_inputs_of_any_rank_and_layout() -> None:
    weight = two_in_four(24, 40)
    found = made(weight)
    for inputs in (torch.randn(40), torch.randn(2, 3, 40), torch.randn(2, 40, 3).transpose(1, 2), torch.randn(0, 40)):
        inputs = inputs.to(BF16)
        torch.testing.assert_close(multiply(inputs, found, None), torch.nn.functional.linear(inputs, weight))
    assert torch.equal(made(weight.t().contiguous().t()).dense(), weight)


def test_what_does_not_fit_is_refused() -> None:
    found = made(two_in_four(8, 16))
    for inputs in (torch.ones(2, 15, dtype=BF16), torch.ones(2, 16), torch.ones(2, 16, dtype=BF16, device="meta")):
        with pytest.raises(ValueError, match=r"this layer takes \[\.\.\., 16\]"):
            multiply(inputs, found, None)
    with pytest.raises(ValueError, match="only bfloat16 weights"):
        split(torch.zeros(4, 4))


def test_whoever_follows_operations_sees_the_product() -> None:
    found, inputs = made(two_in_four(8, 16)), torch.randn(3, 16).to(BF16)
    assert torch.equal(
        make_fx(lambda values: multiply(values, found, None))(inputs)(inputs), multiply(inputs, found, None)
    )
    with FakeTensorMode() as mode:
        fake = Pairs(mode.from_tensor(found.numbers), mode.from_tensor(found.places), found.shape)
        assert multiply(mode.from_tensor(inputs), fake, None).shape == (3, 8)


def test_machines_without_a_compiler_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_functions", lambda: "no compiler: gcc is not there")
    assert pairs.why_not() == "no compiler: gcc is not there"
    with pytest.raises(RuntimeError, match="no products with pairs: no compiler"):
        split(torch.zeros(4, 4, dtype=BF16))
