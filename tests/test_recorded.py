"""Constructors of every kind: `materialize` gives what an eager build gives, or an error; never something else."""

from __future__ import annotations

import copy
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as pruning

from sparseautomodel import init_module, materialize
from sparseautomodel.initialize import InitializationError
from tests.eager import eager, tensors

SIZE = 4


class Base(nn.Module):
    """Two layers, and what a kind of constructor does with them."""

    def __init__(self, act: Callable[[Any], object]) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        act(self)


def no_grad(act: Callable[[Any], object]) -> Callable[[Any], object]:
    return torch.no_grad()(act)


def load_state_dict(one: Any) -> None:
    one.other.load_state_dict(one.one.state_dict())


def load_real_state_dict(one: Any) -> None:
    values = np.arange(SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
    one.one.load_state_dict({"weight": torch.from_numpy(values), "bias": torch.zeros(SIZE, device="cpu")})
    values[:] = 0  # torch copied it


def load_with_assign(one: Any) -> None:
    one.other.load_state_dict(one.one.state_dict(), assign=True)


def numpy_buffer_reused(one: Any) -> None:
    row = np.zeros(SIZE, dtype=np.float32)
    with torch.no_grad():
        for number in range(SIZE):
            row[:] = number
            one.one.weight[number].copy_(torch.from_numpy(row))
            one.other.weight[number] = torch.tensor(row)


def weight_norm(one: Any) -> None:
    nn.utils.parametrizations.weight_norm(one.one)


def spectral_norm(one: Any) -> None:
    nn.utils.parametrizations.spectral_norm(one.one)


def old_weight_norm(one: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(one.one)


def vector(one: Any) -> None:
    flat = nn.utils.parameters_to_vector(one.one.parameters())
    nn.utils.vector_to_parameters(flat * 2, one.other.parameters())


def orthogonal(one: Any) -> None:
    q, r = torch.linalg.qr(torch.randn(SIZE, SIZE))
    one.register_buffer("q", q)
    one.register_buffer("r", r)
    one.one.weight.data.copy_(q * torch.diagonal(r).sign())


class Scaled(nn.Module):
    """A method of initialization that the constructor calls with an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIZE, SIZE))
        self.reset_parameters(3.0)

    def reset_parameters(self, value: float = 1.0) -> None:
        nn.init.constant_(self.weight, value)


class Other(nn.Module):
    """The constructor uses another method than the first that the class has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIZE, SIZE))
        self.reset_parameters()

    def init_weights(self) -> None:
        nn.init.zeros_(self.weight)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def jitted(one: Any) -> None:
    @torch.jit.script
    def fill(x: Tensor) -> Tensor:
        return x.fill_(2.0)

    fill(one.one.weight.data)


def prune(one: Any) -> None:
    pruning.l1_unstructured(one.one, "weight", amount=0.5)


SAME: dict[str, Callable[[Any], object]] = {
    "plain": lambda one: None,
    "load_state_dict": load_state_dict,
    "load_state_dict of values": load_real_state_dict,
    "load_state_dict(assign=True)": load_with_assign,
    ".data = a factory": lambda one: setattr(one.one.weight, "data", torch.ones(SIZE, SIZE)),
    ".data = numpy": lambda one: setattr(
        one.one.weight, "data", torch.from_numpy(np.arange(16, dtype=np.float32).reshape(4, 4))
    ),
    ".data = computed": lambda one: setattr(one.one.weight, "data", one.other.weight.data * 2),
    ".data = shared": lambda one: setattr(one.one.weight, "data", one.other.weight.data),
    ".data.copy_": lambda one: one.one.weight.data.copy_(torch.eye(SIZE)),
    ".data.copy_ of another": lambda one: one.one.weight.data.copy_(one.other.weight.data),
    ".data[0] =": lambda one: one.one.weight.data.__setitem__(0, 7.0),
    ".data.mul_": lambda one: one.one.weight.data.mul_(3.0),
    ".data *=": lambda one: one.one.weight.data.__imul__(3.0),
    "nn.init under .data": lambda one: nn.init.constant_(one.one.weight.data, 2.0),
    "random nn.init under .data": lambda one: nn.init.normal_(one.one.weight.data, 1.0, 0.5),
    "trunc_normal_": lambda one: nn.init.trunc_normal_(one.one.weight, std=0.02),
    "xavier_normal_": lambda one: nn.init.xavier_normal_(one.one.weight),
    "orthogonal_": lambda one: nn.init.orthogonal_(one.one.weight),
    "eye_": lambda one: nn.init.eye_(one.one.weight),
    "sparse_": lambda one: nn.init.sparse_(one.one.weight, 0.5),
    "copy_ between parameters": no_grad(lambda one: one.other.weight.copy_(one.one.weight)),
    "swap": no_grad(lambda one: one.other.weight.copy_(one.one.weight.t().clone())),
    "view": no_grad(lambda one: one.one.weight.view(-1).__setitem__(3, 0.0)),
    "flatten and index": no_grad(lambda one: one.one.weight.flatten().data.index_fill_(0, torch.tensor([1, 2]), 5.0)),
    "masked_fill_": no_grad(lambda one: one.one.weight.masked_fill_(torch.eye(SIZE).bool(), 0.0)),
    "mask": no_grad(lambda one: one.one.weight.__setitem__(torch.eye(SIZE).bool(), 0.0)),
    "out=": no_grad(lambda one: torch.add(one.other.weight, 1.0, out=one.one.weight.data)),
    "t_": no_grad(lambda one: one.one.weight.data.t_().mul_(torch.arange(4.0))),
    "foreach": no_grad(lambda one: torch._foreach_mul_([one.one.weight, one.other.weight], 2.0)),
    "numpy reused": numpy_buffer_reused,
    "buffer of a parameter": lambda one: one.register_buffer("norm", one.one.weight.detach().norm()),
    "buffer that is a clone": lambda one: one.register_buffer("held", one.one.weight.detach().clone()),
    "tensor of tensors": lambda one: one.register_buffer("x", torch.tensor([one.one.weight.detach().sum(), 1.0])),
    "parameter of a clone": lambda one: setattr(one, "more", nn.Parameter(one.one.weight.clone())),
    "parameter of a factory": lambda one: setattr(one, "more", nn.Parameter(torch.ones(SIZE))),
    "weight_norm": weight_norm,
    "old weight_norm": old_weight_norm,
    "prune": prune,
    "vector_to_parameters": vector,
    "float of a constant": lambda one: one.register_buffer("x", torch.ones(2) * float(torch.full((1,), 3.0))),
    "item of a random temporary": lambda one: setattr(one, "x", torch.rand(1).item()),
    "tolist of a linspace": lambda one: setattr(one, "x", torch.linspace(0, 1, 5).tolist()),
    "numpy of an arange": lambda one: one.register_buffer("x", torch.from_numpy(torch.arange(5).numpy() + 1)),
    "cpu of an arange": lambda one: one.register_buffer("x", torch.arange(5).cpu() + 1),
    "if of a constant": lambda one: bool(torch.ones(1)) and one.one.weight.data.zero_(),
    "batch norm statistics": lambda one: [
        (norm.running_var.fill_(2.0), setattr(one, "norm", norm)) for norm in [nn.BatchNorm1d(SIZE)]
    ],
    "reset with an argument": lambda one: setattr(one, "scaled", Scaled()),
    "jit": jitted,
    "deepcopy": lambda one: setattr(one, "copied", copy.deepcopy(one.one)),
}
"""Kinds of constructors whose values are those of an eager build."""


def _in_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def write_in_thread(one: Any) -> None:
    with torch.no_grad():
        _in_thread(lambda: one.one.weight.requires_grad_(False).fill_(3.0))


def spectral(one: Any) -> bool:
    hooked = one.one.parametrizations.weight[0]
    matrix = one.one.parametrizations.weight.original
    u = nn.functional.normalize(torch.mv(matrix, hooked._v), dim=0)
    return torch.allclose(u.abs(), hooked._u.abs(), atol=1e-2) and _one(hooked._v.norm())


def _one(value: Any) -> bool:
    return abs(float(value) - 1.0) < 1e-5


def temporary(one: Any) -> None:
    noise = torch.randn(SIZE)
    one.register_buffer("a", noise * 2)
    one.register_buffer("b", noise * 4)


def read_twice(one: Any) -> None:
    noise = torch.rand(2)
    one.x, one.y = noise.tolist(), noise.numpy().tolist()


RELATED: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    ".data = random": (
        lambda one: setattr(one.one.weight, "data", torch.rand(SIZE, SIZE) + 5),
        lambda one: 5 <= float(one.one.weight.min()) < float(one.one.weight.max()) < 6,
    ),
    "buffers of one draw": (
        lambda one: (one.register_buffer("a", torch.randn(SIZE)), one.register_buffer("b", one.a * 2)),
        lambda one: torch.equal(one.a * 2, one.b),
    ),
    "buffers of one temporary draw": (temporary, lambda one: torch.equal(one.a * 2, one.b)),
    "buffers of two draws": (
        lambda one: (one.register_buffer("a", torch.randn(SIZE)), one.register_buffer("b", torch.randn(SIZE))),
        lambda one: not torch.equal(one.a, one.b),
    ),
    "random parameter": (
        lambda one: setattr(one, "more", nn.Parameter(torch.randn(1000))),
        lambda one: 0.9 < float(one.more.std()) < 1.1,
    ),
    "bernoulli": (
        lambda one: one.register_buffer("mask", torch.bernoulli(torch.full((64,), 0.5))),
        lambda one: one.mask.unique().tolist() == [0.0, 1.0],
    ),
    "bernoulli_": (
        lambda one: one.one.weight.data.bernoulli_(0.5),
        lambda one: set(one.one.weight.unique().tolist()) <= {0.0, 1.0},
    ),
    "randint": (
        lambda one: one.register_buffer("ids", torch.randint(3, 99, (640,))),
        lambda one: 3 <= int(one.ids.min()) < 9 and 93 < int(one.ids.max()) < 99,
    ),
    "randperm": (
        lambda one: one.register_buffer("ids", torch.randperm(64)),
        lambda one: one.ids.sort().values.tolist() == list(range(64)),
    ),
    "qr of random": (
        orthogonal,
        lambda one: (
            torch.allclose(one.one.weight @ one.one.weight.T, torch.eye(SIZE), atol=1e-5)
            and torch.equal(one.one.weight, one.q * torch.diagonal(one.r).sign())
        ),
    ),
    "spectral_norm": (spectral_norm, spectral),
    "half": (
        lambda one: one.one.half(),
        lambda one: one.one.weight.dtype == torch.float16 and 0 < float(one.one.weight.std()) < 0.5,
    ),
    "double and back": (
        lambda one: one.one.double().float(),
        lambda one: one.one.weight.dtype == torch.float32 and 0 < float(one.one.weight.std()) < 0.5,
    ),
    "half, then a copy": (
        lambda one: one.other.half().load_state_dict(one.one.state_dict()),
        lambda one: torch.equal(one.other.weight, one.one.weight.half()),
    ),
    "read twice": (read_twice, lambda one: one.x == one.y),
}
"""Kinds that draw for tensors which have no name: what has to hold of the result, which two seeds give differently."""


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "float of a parameter": (
        lambda one: setattr(one, "norm", float(one.one.weight.detach().norm())),
        r"__float__ in .*test_recorded\.py:\d+, of one\.weight",
    ),
    "item": (lambda one: setattr(one, "x", one.one.weight.sum().item()), r"item in .*, of one\.weight"),
    "tolist": (lambda one: setattr(one, "x", one.one.bias.tolist()), r"tolist in .*, of one\.bias"),
    "numpy": (lambda one: setattr(one, "x", one.one.weight.detach().numpy()), r"numpy in .*, of one\.weight"),
    "array": (lambda one: setattr(one, "x", np.asarray(one.one.weight.detach())), r"__array__ in .*, of one\.weight"),
    "cpu": (lambda one: one.register_buffer("x", one.one.weight.detach().cpu()), r"cpu in .*, of one\.weight"),
    "to cpu": (lambda one: one.register_buffer("x", one.one.weight.detach().to("cpu")), r"to in .*, of one\.weight"),
    "if": (
        lambda one: one.other.weight.data.zero_() if (one.one.weight > 0).any() else None,
        r"__bool__ in .*, of one\.weight",
    ),
    "temporary read and kept": (
        lambda one: [(one.register_buffer("a", noise), setattr(one, "x", noise.tolist())) for noise in [torch.rand(3)]],
        r"tolist in .*, of a$",
    ),
    "written in a thread": (write_in_thread, r"one\.weight"),
}
"""Kinds that are refused: the error of `materialize` names tensor and line."""

LOUD: dict[str, Callable[[Any], object]] = {
    "write through numpy": no_grad(lambda one: one.one.weight.numpy().fill(0.0)),
    "memory without values": lambda one: setattr(one, "x", torch.empty(3).tolist()),
    "nonzero": lambda one: one.register_buffer("x", one.one.weight.detach().nonzero()),
    "masked select": lambda one: one.register_buffer("x", one.one.weight.detach()[one.one.weight > 0]),
    "unique": lambda one: one.register_buffer("x", one.one.weight.detach().unique()),
    "equal": lambda one: torch.equal(one.one.weight, one.other.weight) or one.one.weight.data.zero_(),
    "allclose": lambda one: torch.allclose(one.one.weight, one.other.weight) or one.one.weight.data.zero_(),
    "data of another device": no_grad(lambda one: torch.ones(4, device="cpu").copy_(one.one.bias)),
}
"""Kinds that stop in the constructor itself."""


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("kind", SAME)
def test_values_are_those_of_an_eager_build(kind: str, seed: int) -> None:
    expected = tensors(eager(lambda: Base(SAME[kind]), seed))
    with init_module(empty_weights=True):
        module = Base(SAME[kind])
    found = tensors(materialize(module, seed=seed))
    assert not any(value.is_meta for value in found.values())
    assert found.keys() == expected.keys()
    different = [name for name in expected if not _equal(found[name], expected[name])]
    assert different == []


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


@pytest.mark.parametrize("kind", RELATED)
def test_what_an_eager_build_relates_is_related(kind: str) -> None:
    act, holds = RELATED[kind]
    with init_module(seed=0):
        assert holds(Base(act)), "the check itself"
    found = []
    for seed in (0, 0, 1):
        with init_module(empty_weights=True):
            module = Base(act)
        with torch.no_grad():
            assert holds(materialize(module, seed=seed))
        found.append(tensors(module))
    assert all(_equal(value, found[1][name]) for name, value in found[0].items())
    assert not all(_equal(value, found[2][name]) for name, value in found[0].items())


def test_what_another_thread_makes_has_values_as_it_has_without_init_module() -> None:
    with init_module(empty_weights=True):
        module = Base(lambda one: _in_thread(lambda: setattr(one, "more", nn.Parameter(torch.ones(2, 2)))))
    assert torch.equal(materialize(module, seed=0).more, torch.ones(2, 2))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_come_out_wrong_is_named(kind: str) -> None:
    act, message = REFUSED[kind]
    with init_module(empty_weights=True):
        module = Base(act)
    with pytest.raises(InitializationError, match=re.compile(message, re.MULTILINE)) as raised:
        materialize(module, seed=0)
    assert "Build the module with values" in str(raised.value)
    with init_module(seed=0):
        Base(act)


@pytest.mark.parametrize("kind", LOUD)
def test_what_cannot_be_done_without_values_stops_the_constructor(kind: str) -> None:
    with pytest.raises((ValueError, NotImplementedError, RuntimeError)), init_module(empty_weights=True):
        Base(LOUD[kind])


def test_load_that_copies_into_an_empty_module_is_named() -> None:
    with init_module(empty_weights=True):
        module = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is a no-op
        module.load_state_dict(nn.Linear(2, 2).state_dict())
    with pytest.raises(InitializationError, match=r"weight, bias.*assign=True"):
        materialize(module)


@pytest.mark.parametrize("cast", [lambda module: module.to(torch.bfloat16), copy.deepcopy])
def test_what_a_constructor_sets_survives_a_cast_and_a_copy(cast: Callable[[Any], Any]) -> None:
    def act(one: Any) -> None:
        nn.init.zeros_(one.one.weight)
        one.other.weight.data.copy_(torch.eye(SIZE))

    with init_module(empty_weights=True):
        module = Base(act)
    module = materialize(cast(module), seed=0)
    assert not module.one.weight.any()
    assert torch.equal(module.other.weight.float(), torch.eye(SIZE))
