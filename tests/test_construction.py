"""What constructors get while they run under `init_module`, and what they leave. The reference is eager torch."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparseautomodel import init_module
from sparseautomodel.construction import ATTRIBUTE, Construction, constructions, rebuilt
from sparseautomodel.numbers import poisoned

PATCHABLE = (torch, torch.nn.init, torch.Tensor, nn.Module, nn.Linear, nn.Parameter, torch.overrides)


class Computed(nn.Module):
    """Buffers and attributes that a constructor computes in many ways."""

    def __init__(self, size: int, base: float = 10.0) -> None:
        super().__init__()
        self.register_buffer("inverse", 1.0 / base ** (torch.arange(0, size, 2).float() / size), persistent=False)
        self.register_buffer("mask", torch.triu(torch.full((size, size), float("-inf")), diagonal=1))
        self.register_buffer("positions", torch.arange(size).expand((1, -1)))
        parts = torch.empty(size)
        parts[: size // 2], parts[size // 2 :] = 1.0, -1.0
        self.register_buffer("parts", parts.mul_(2) + torch.tensor([0.5] * size))
        self.register_buffer("ratio", torch.arange(size) / 3)
        self.register_buffer("chosen", torch.where(torch.arange(size) > 2, 1.0, 0.0))
        self.register_buffer("legacy", torch.Tensor([1.0, 2.0]))
        self.slopes = torch.pow(2.0, -torch.arange(1, size + 1))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, size)]


@pytest.fixture
def eager_dtype() -> Any:
    def build(dtype: torch.dtype, make: Callable[[], nn.Module]) -> nn.Module:
        usual = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return make()
        finally:
            torch.set_default_dtype(usual)

    return build


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_computed_values_are_those_of_an_eager_build(dtype: torch.dtype, eager_dtype: Any) -> None:
    eager = eager_dtype(dtype, lambda: Computed(8))
    mode = Construction(torch.device("meta"), dtype, empty=True)
    with mode:
        module = Computed(8)
    for name, value in (*eager.named_buffers(), ("slopes", eager.slopes)):
        if name == "legacy":  # its values are given: torch places it, and it is there
            continue
        empty = getattr(module, name)
        assert empty.is_meta
        assert empty.dtype == value.dtype, name
        computed = _value(mode, empty)
        assert torch.equal(computed, value), name
    assert module.rates == eager.rates


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_dtypes_are_those_of_a_default_dtype(empty: bool, dtype: torch.dtype, eager_dtype: Any) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8), nn.BatchNorm1d(4), nn.LSTM(2, 2), Computed(4))

    with init_module(dtype=dtype, empty_weights=empty):
        module = make()
    eager = eager_dtype(dtype, make).state_dict()
    kinds = {name: value.dtype for name, value in module.state_dict().items() if not name.endswith("legacy")}
    assert kinds == {name: value.dtype for name, value in eager.items() if not name.endswith("legacy")}


def test_uninitialized_memory_has_no_value() -> None:
    mode = Construction(torch.device("meta"), None, empty=True)
    with mode:
        hollow = torch.empty(3)
        copied, partly = hollow.clone() + 1, torch.empty(4)
        partly[:2] = 1.0
    assert [_value(mode, hollow), _value(mode, copied)] == [None, None]
    value = _value(mode, partly)
    assert value is not None
    assert poisoned(value) == 2


def test_values_that_were_not_made_here_are_not_known() -> None:
    mode = Construction(torch.device("meta"), None, empty=True)
    other = torch.ones(3, device="meta")
    with mode:
        derived = other * 2
    assert [_value(mode, other), _value(mode, derived)] == [None, None]


def test_init_functions_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(Tensor, name, lambda self, *args, name=name, **kwargs: ran.append(name) or self)
    before = torch.get_rng_state()
    with init_module(empty_weights=True):
        module = nn.Sequential(nn.Linear(4, 4), nn.Embedding(5, 4), nn.Conv1d(2, 2, 1), nn.MultiheadAttention(4, 2))
        nn.init.kaiming_normal_(module[0].weight)
        nn.init.trunc_normal_(module[1].weight)
    assert all(value.is_meta for value in module.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    assert set(ran) <= {"normal_", "uniform_"}  # on the meta device alone, where they draw nothing


def test_random_state_is_not_used_by_tensors_that_a_constructor_places() -> None:
    before = torch.get_rng_state()
    with init_module(empty_weights=True):
        noise = torch.randn(8, device="cpu")
        filled = torch.zeros(4, device="cpu").normal_()
    assert torch.equal(torch.get_rng_state(), before)
    assert noise.std() > 0
    assert filled.std() > 0


def test_legacy_constructors_are_placed_too() -> None:
    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.FloatTensor(2, 3))
            self.bias = nn.Parameter(torch.Tensor(3).uniform_())

    with init_module(empty_weights=True):
        module = Old()
    assert module.weight.is_meta
    assert module.bias.is_meta


def test_arguments_of_a_constructor_build_it_again() -> None:
    with init_module(empty_weights=True):
        module = Computed(6, base=5.0)
    found = rebuilt(module)
    assert found is not None
    again, mode = found
    value = _value(mode, again.inverse)
    assert torch.equal(value, Computed(6, base=5.0).inverse)


def test_arguments_that_a_constructor_changes_are_not_known() -> None:
    class Changing(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            size = size * 2
            self.weight = nn.Parameter(torch.empty(size))

    with init_module(empty_weights=True):
        module = Changing(2)
    assert rebuilt(module) is None


def test_module_can_be_copied_and_pickled() -> None:
    with init_module(empty_weights=True):
        module = nn.Linear(2, 2)
    assert constructions(copy.deepcopy(module)) == constructions(module)
    assert constructions(pickle.loads(pickle.dumps(module))) == []


def test_forward_without_values_is_refused() -> None:
    with init_module(empty_weights=True):
        module = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=r"forward of Embedding, which was built empty.* weight have no values.*materialize\(model\)"
    ):
        module(torch.tensor([1]))
    assert module(torch.tensor([1], device="meta")).is_meta  # shapes may be asked for
    module.load_state_dict(nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2)).state_dict(), assign=True)
    assert module(torch.tensor([1])).shape == (1, 2)
    assert not module[0]._forward_pre_hooks
    assert ATTRIBUTE not in vars(module[1])


def test_threads_that_overlap_and_exceptions_leave_torch_as_it_was() -> None:
    before = _names()
    inside, leave = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    def first() -> None:
        with init_module(empty_weights=True, dtype=torch.bfloat16):
            inside.set()
            leave.wait(10)
            found["first"] = nn.Linear(2, 2).weight

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(10)
    found["outside"] = nn.Linear(2, 2).weight
    with pytest.raises(RuntimeError, match="on purpose"), init_module(empty_weights=True, dtype=torch.float64):
        leave.set()
        thread.join()  # the first leaves while the second is still inside
        found["second"] = nn.Linear(2, 2).weight
        raise RuntimeError("on purpose")
    found["after"] = nn.Linear(2, 2).weight
    seen = {name: (value.device.type, value.dtype) for name, value in found.items()}
    assert seen == {
        "outside": ("cpu", torch.float32),
        "first": ("meta", torch.bfloat16),
        "second": ("meta", torch.float64),
        "after": ("cpu", torch.float32),
    }
    assert _names() == before
    assert torch.get_default_dtype() == torch.float32
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0


def _names() -> dict[str, int]:
    """The identity of everything that could be replaced in torch."""
    names = {f"{place.__name__}.{name}": id(value) for place in PATCHABLE for name, value in vars(place).items()}
    hooks = {name: len(value) for name, value in vars(torch.nn.modules.module).items() if name.endswith("_hooks")}
    return names | hooks | {"device": id(torch.utils._device.CURRENT_DEVICE)}


def _value(mode: Construction, tensor: Tensor) -> Any:
    return next(value for _, value in mode.record.values([tensor], {}, 0))
