"""Products that expand a weight in registers, against sums in float64 over codes that plain code reads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from sparseautomodel import compiler, registers

BF16 = torch.bfloat16
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)

pytestmark = pytest.mark.skipif(registers.why_not() is not None, reason=str(registers.why_not()))


@pytest.fixture(params=["bfloat16 instructions", "float32 instructions"], scope="module", autouse=True)
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """This processor's own, and what processors with AVX512 but without its bfloat16 run."""
    if request.param == "bfloat16 instructions":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "gcc -mno-avx512bf16")
        assert shutil.which("gcc")
        registers._functions.cache_clear()
        patch.setattr(registers, "compiled", compiler.compiled.__wrapped__)
        assert registers.why_not() is None
        yield
    registers._functions.cache_clear()


def number_of(kind: str, code: int) -> float:
    """What a code stands for before zero point and scale."""
    if kind == "int4":
        return code - 8
    if kind == "uint8":
        return code - 128
    if kind == "int8":
        return code - 256 * (code > 127)
    if kind == "fp4":
        return (-1) ** (code >> 3) * E2M1[code & 7]
    return torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).item()


def random_weight(kind: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as they are stored, and the numbers `[rows, columns]` that they stand for."""
    bits = 4 if kind in ("int4", "fp4") else 8
    codes = torch.randint(0, 2**bits, (rows, columns))
    if kind == "fp8":
        codes[(codes & 127) == 127] = 0  # no number
    meaning = torch.tensor([number_of(kind, code) for code in range(2**bits)])
    numbers = meaning.nan_to_num()[codes]
    if bits == 8:
        return codes.to(torch.uint8), numbers
    even = torch.nn.functional.pad(codes, (0, columns % 2))
    return (even[:, ::2] | even[:, 1::2] << 4).to(torch.uint8), numbers


def near(output: torch.Tensor, flat: torch.Tensor, weight: torch.Tensor) -> bool:
    """Within the rounding of the output, and of float32 sums."""
    exact = flat.double() @ weight.double().t()
    sums = flat.double().abs() @ weight.double().abs().t()
    return bool(((output.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-17 * sums).all())


@pytest.mark.parametrize("kind", registers.CODES)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 300),
    tokens=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 40]),
    scales=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 9),
)
def test_one_scale_a_row(kind: str, rows: int, columns: int, tokens: int, scales: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    codes, numbers = random_weight(kind, rows, columns)
    scale = (torch.rand(rows, 1) + 0.1).to(scales)
    weight = (numbers * scale.float()).to(BF16)
    flat = torch.randn(tokens, columns).to(BF16)
    shifts = 0, registers.WHOLE
    output = registers.multiply(flat, codes, scale, None, None, kind, (rows, columns), shifts)
    assert output.shape == (tokens, rows) and output.dtype == BF16
    assert near(output, flat, weight)


@pytest.mark.parametrize("kind", registers.CODES)
@pytest.mark.parametrize("width", [16, 32, 64, 128, 1024])
@pytest.mark.parametrize("zeros", ["none", "bytes", "packed"])
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_scales_and_zero_points_of_groups(kind: str, width: int, zeros: str, tokens: int) -> None:
    shift = registers.column_shift(width, kind)
    if shift is None:
        assert width == 16 and kind in ("int8", "uint8", "fp8")
        return
    if zeros != "none" and (kind in ("fp4", "fp8") or (kind == "int8" and zeros == "packed")):
        pytest.skip("not stored so")
    rows, columns, bits = 37, 3 * max(width, 32), 4 if kind == "int4" else 8
    groups = columns // width
    codes, numbers = random_weight(kind, rows, columns)
    scale = (torch.rand(rows, groups) + 0.1).to(BF16)
    zero = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, groups))
    stored = None
    if zeros == "bytes":
        stored = zero.to(torch.int8)
    elif zeros == "packed":
        each = 32 // bits
        words = torch.zeros(-(-rows // each), groups, dtype=torch.int64)
        for row in range(rows):
            words[row // each] |= (zero[row] + 2 ** (bits - 1)) << (row % each * bits)
        stored = words.to(torch.int32)
    if stored is not None:
        numbers = numbers - zero.repeat_interleave(width, 1)
    weight = (numbers * scale.float().repeat_interleave(width, 1)).to(BF16)
    flat = torch.randn(tokens, columns).to(BF16)
    output = registers.multiply(flat, codes, scale, stored, None, kind, (rows, columns), (0, shift))
    assert near(output, flat, weight)


@pytest.mark.parametrize("tokens", [1, 5])
def test_scales_that_are_bytes(tokens: int) -> None:
    codes, numbers = random_weight("fp4", 20, 128)
    flat = torch.randn(tokens, 128).to(BF16)
    scale, divisor = (torch.rand(20, 8) * 448).to(torch.float8_e4m3fn), torch.tensor([1234.5])
    weight = (numbers * (scale.float() / divisor).repeat_interleave(16, 1)).to(BF16)
    assert near(registers.multiply(flat, codes, scale, None, divisor, "fp4", (20, 128), (0, 4)), flat, weight)
    exponents = torch.randint(110, 140, (20, 4), dtype=torch.int32).to(torch.uint8)
    weight = (numbers * (2.0 ** (exponents.float() - 127)).repeat_interleave(32, 1)).to(BF16)
    assert near(registers.multiply(flat, codes, exponents, None, None, "fp4", (20, 128), (0, 5)), flat, weight)


@pytest.mark.parametrize("tokens", [2, 8])
@pytest.mark.parametrize(("rows", "columns"), [(70, 200), (64, 64), (1, 33)])
def test_scales_of_blocks(tokens: int, rows: int, columns: int) -> None:
    codes, numbers = random_weight("fp8", rows, columns)
    scale = torch.rand(-(-rows // 32), -(-columns // 64))
    spread = scale.repeat_interleave(32, 0).repeat_interleave(64, 1)[:rows, :columns]
    flat = torch.randn(tokens, columns).to(BF16)
    output = registers.multiply(flat, codes, scale, None, None, "fp8", (rows, columns), (5, 6))
    assert near(output, flat, (numbers * spread).to(BF16))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("tokens", [4, 30, registers.TOKENS + 3])
def test_threads_share_the_work_and_tokens_may_lie_apart(threads: int, tokens: int) -> None:
    codes, numbers = random_weight("int8", 301, 2500)  # wider than what is multiplied at once
    scale = torch.rand(301, 1)
    flat = torch.randn(tokens, 5000).to(BF16)[:, 100:2600]
    torch.set_num_threads(threads)
    try:
        output = registers.multiply(flat, codes, scale, None, None, "int8", (301, 2500), (0, registers.WHOLE))
    finally:
        torch.set_num_threads(1)
    assert near(output, flat, (numbers * scale).to(BF16))


def test_the_same_sums_at_any_number_of_threads_and_in_any_batch() -> None:
    codes, _ = random_weight("int4", 130, 256)
    scale, flat = torch.rand(130, 2).to(BF16), torch.randn(24, 256).to(BF16)

    def product(flat: torch.Tensor) -> torch.Tensor:
        return registers.multiply(flat, codes, scale, None, None, "int4", (130, 256), (0, 7))

    whole = product(flat)
    torch.set_num_threads(2)
    try:
        assert torch.equal(product(flat), whole)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(product(flat.t().contiguous().t()), whole), "strides do not matter"
    for tokens in (5, 6, 7, 23):
        assert torch.equal(product(flat[:tokens]), whole[:tokens])


def test_what_is_no_number_stays_none() -> None:
    codes, _ = random_weight("int4", 8, 64)
    scale = torch.ones(8, 1)
    for tokens in (2, 7):
        flat = torch.zeros(tokens, 64, dtype=BF16)
        flat[0, 3] = float("nan")
        output = registers.multiply(flat, codes, scale, None, None, "int4", (8, 64), (0, registers.WHOLE))
        assert output[0].isnan().all() and (output[1:] == 0).all()


@pytest.mark.parametrize("tokens", [2, 7])
@pytest.mark.parametrize("code", [127, 255])
def test_a_scale_that_is_no_number_is_seen(tokens: int, code: int) -> None:
    codes, _ = random_weight("fp4", 8, 64)
    scale = torch.ones(8, 4).to(torch.float8_e4m3fn)
    scale.view(torch.uint8)[3, 1] = code
    flat = torch.ones(tokens, 64, dtype=BF16)
    output = registers.multiply(flat, codes, scale, None, torch.ones(1), "fp4", (8, 64), (0, 4))
    assert output[:, 3].isnan().all() and output.isnan().sum() == tokens


@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 9])
@pytest.mark.parametrize(("rows", "columns"), [(6, 0), (0, 64), (0, 0)])
def test_sizes_of_nothing(tokens: int, rows: int, columns: int) -> None:
    flat, codes = torch.ones(tokens, columns, dtype=BF16), torch.ones(rows, columns, dtype=torch.int8)
    shifts = registers.WHOLE, registers.WHOLE
    output = registers.multiply(flat, codes, torch.ones(1), None, None, "int8", (rows, columns), shifts)
    assert output.shape == (tokens, rows) and (output == 0).all()


def test_inputs_that_do_not_fit_are_refused() -> None:
    codes, scale = torch.ones(8, 64, dtype=torch.int8), torch.ones(1)
    for flat in (torch.ones(2, 63, dtype=BF16), torch.ones(2, 64, dtype=BF16, device="meta")):
        with pytest.raises(ValueError, match=r"this layer, on the CPU, takes \[\.\.\., 64\] there"):
            registers.multiply(flat, codes, scale, None, None, "int8", (8, 64), (registers.WHOLE, registers.WHOLE))
    with pytest.raises(ValueError, match=r"inputs are \[2, 63\]"):
        registers.multiply_int8(torch.ones(2, 63, dtype=BF16), codes, scale, None, 8, None)


def test_the_default_device_and_dtype_are_others() -> None:
    codes, _ = random_weight("int8", 8, 64)
    flat, scale = torch.randn(3, 64).to(BF16), torch.rand(8, 1)

    def products() -> list[torch.Tensor]:
        own = registers.multiply(flat, codes, scale, None, None, "int8", (8, 64), (0, registers.WHOLE))
        return [own, registers.multiply_int8(flat, codes.view(torch.int8), scale, None, 8, None)]

    wanted = products()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            registers._functions.cache_clear()
            registers._memory.size = 0
            assert all(torch.equal(one, other) for one, other in zip(products(), wanted, strict=True))
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_first_use_may_be_among_tensors_without_memory() -> None:
    registers._functions.cache_clear()
    with FakeTensorMode():
        assert registers.why_not() is None


def test_whoever_follows_operations_sees_the_product() -> None:
    codes, _ = random_weight("int4", 8, 64)
    scale = torch.rand(8, 1)

    def product(flat: torch.Tensor) -> torch.Tensor:
        return registers.multiply(flat, codes, scale, None, None, "int4", (8, 64), (0, registers.WHOLE))

    first, other = torch.randn(3, 64).to(BF16), torch.randn(3, 64).to(BF16)
    assert torch.equal(torch.jit.trace(product, (first,))(other), product(other))
    assert torch.equal(make_fx(product)(first)(other), product(other))
    rows = torch.stack([first, other])
    assert torch.equal(torch.vmap(product)(rows), torch.stack([product(first), product(other)]))


def test_groups_that_are_too_narrow_are_told() -> None:
    codes, _ = random_weight("int8", 8, 64)
    with pytest.raises(ValueError, match="groups of 8 columns are too narrow for int8"):
        registers.multiply(torch.ones(1, 64, dtype=BF16), codes, torch.ones(8, 8), None, None, "int8", (8, 64), (0, 3))
    assert registers.column_shift(48, "int4") is None and registers.row_shift(96) is None


def test_machines_without_it_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registers, "_functions", lambda: "no compiler")
    assert registers.why_not() == "no compiler"
    assert not registers.multiplies_int8(torch.ones(1, 64, dtype=BF16), torch.ones(1))
    with pytest.raises(RuntimeError, match="no compiler"):
        registers.multiply(
            *(torch.ones(1, 64, dtype=BF16), torch.ones(1, 64, dtype=torch.int8), torch.ones(1), None, None),
            *("int8", (1, 64), (registers.WHOLE, registers.WHOLE)),
        )


def test_functions_that_compute_wrongly_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registers, "_multiply", lambda functions, flat, *rest: torch.zeros(len(flat), 9))
    assert registers._functions.__wrapped__() == "the compiled products are wrong on this machine"


def test_traced_models_see_one_operation() -> None:
    codes, _ = random_weight("int4", 8, 64)
    scale = torch.rand(8, 1)

    def product(flat: torch.Tensor) -> torch.Tensor:
        return registers.multiply(flat, codes, scale, None, None, "int4", (8, 64), (0, registers.WHOLE)) + 1

    flat = torch.randn(3, 64).to(BF16)
    compiled = torch.compile(product, backend="eager", fullgraph=True)
    assert torch.equal(compiled(flat), product(flat))
    torch.library.opcheck(registers._operator, (flat, codes, scale, None, None, "int4", [8, 64], [0, registers.WHOLE]))


@given(
    tokens=st.integers(1, registers.FEW),
    rows=st.integers(1, 20),
    columns=st.integers(1, 300),
    magnitude=st.sampled_from([1e-30, 1e-3, 1.0, 1e20]),
    bits=st.sampled_from([6, 8]),
    is_static=st.booleans(),
)
def test_integers_by_integers(
    tokens: int, rows: int, columns: int, magnitude: float, bits: int, is_static: bool
) -> None:
    torch.manual_seed(columns)
    weight = torch.randint(-128, 128, (rows, columns)).to(torch.int8)
    scale, bias = (torch.rand(rows, 1) + 0.1).to(BF16), torch.randn(rows).to(BF16)
    flat = (torch.randn(tokens, columns) * magnitude).to(BF16)
    given_scale = torch.tensor([magnitude / 40]).to(BF16) if is_static else None
    if not registers.multiplies_int8(flat, scale):
        pytest.skip("no VNNI")
    own = given_scale if given_scale is not None else flat.abs().amax(1, keepdim=True) / ((2**bits - 1) / 2)
    codes = (flat / own).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    sums = codes.long() @ weight.long().t()
    wanted = (sums.float() * own.float() * scale.float().view(-1) + bias.float()).to(BF16)
    assert torch.equal(registers.multiply_int8(flat, weight, scale, bias, bits, given_scale), wanted)


def test_where_integers_by_integers_are_not_for() -> None:
    flat, scale = torch.ones(1, 64, dtype=BF16), torch.ones(1)
    assert not registers.multiplies_int8(flat.to("meta"), scale)
    assert not registers.multiplies_int8(flat, scale.half()) and not registers.multiplies_int8(flat, scale.double())
    with FakeTensorMode() as mode:
        assert not registers.multiplies_int8(mode.from_tensor(flat), scale)


def test_scales_and_biases_of_integers_may_lie_apart() -> None:
    flat, weight = torch.randn(2, 70).to(BF16), torch.randint(-128, 128, (9, 70)).to(torch.int8)
    scale, bias = torch.rand(9, 2)[:, :1], torch.randn(9, 2).to(BF16)[:, 0]
    if not registers.multiplies_int8(flat, scale):
        pytest.skip("no VNNI")
    wanted = registers.multiply_int8(flat, weight, scale.contiguous(), bias.contiguous(), 8, None)
    assert torch.equal(registers.multiply_int8(flat, weight.t().contiguous().t(), scale, bias, 8, None), wanted)


def test_compilers_without_vnni_leave_the_other_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc -mno-avx512vnni")
    monkeypatch.setattr(registers, "_functions", registers._functions.__wrapped__)
    monkeypatch.setattr(registers, "compiled", compiler.compiled.__wrapped__)
    assert registers.why_not() is None
    assert not registers.multiplies_int8(torch.ones(1, 64, dtype=BF16), torch.ones(1))


def test_integers_of_nothing_and_of_no_number() -> None:
    flat = torch.zeros(3, 70, dtype=BF16)
    flat[1, 69] = float("nan")
    weight, scale = torch.ones(5, 70, dtype=torch.int8), torch.ones(1)
    if not registers.multiplies_int8(flat, scale):
        pytest.skip("no VNNI")
    output = registers.multiply_int8(flat, weight, scale, None, 8, None)
    assert (output[[0, 2]] == 0).all() and output[1].isnan().all()
