"""`init_module` and `materialize`, against eager builds; and every failure that was planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from sparseautomodel import init_module, materialize, verify
from sparseautomodel.initialize import InitializationError
from tests.conftest import SIZES


class Mixed(nn.Module):
    """Modules with every kind of tensor, a tie made by hand, and a part that the constructor sets after it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.zeros_(self.last.weight)
        self.register_buffer("positions", torch.arange(8), persistent=False)
        self.slopes = torch.arange(1.0, 4.0)


def test_values_are_those_of_an_eager_build() -> None:
    eager = Mixed()
    with init_module(empty_weights=True):
        module = Mixed()
    assert materialize(module, seed=0) is module
    assert verify(module).ok
    for name, expected in (*eager.state_dict().items(), ("positions", eager.positions), ("slopes", eager.slopes)):
        value = module.get_buffer(name) if name in ("positions",) else _attribute(module, name)
        assert (value.shape, value.dtype, value.device) == (expected.shape, expected.dtype, expected.device), name
        if not expected.is_floating_point() or expected.min() == expected.max() or name == "slopes":
            assert torch.equal(value, expected), name
        else:
            assert 0.5 < float(value.detach().std() / expected.std()) < 2.0, name
    assert module.head.weight is module.embedding.weight
    assert bool((module.embedding.weight[0] == 0).all())
    assert not module.last.weight.any()


def test_tie_is_drawn_as_the_module_that_made_it_draws() -> None:
    """An Embedding has a deviation of 1, a Linear of 1 / sqrt(3 * 64): the embedding made the tensor."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 50, bias=False)
            self.embedding = nn.Embedding(50, 64)
            self.head.weight = self.embedding.weight

    with init_module(empty_weights=True):
        module = Tied()
    assert 0.9 < float(materialize(module, seed=0).head.weight.detach().std()) < 1.1
    assert module.head.weight is module.embedding.weight


def test_parameters_that_share_memory_share_it_still() -> None:
    with init_module(empty_weights=True):
        module = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        module[1].weight = nn.Parameter(module[0].weight.data)
    materialize(module, seed=0)
    assert module[0].weight.data_ptr() == module[1].weight.data_ptr()


def test_same_seed_gives_the_same_values_in_any_order_and_random_state_is_not_used() -> None:
    def build(seed: int, before: int) -> dict[str, Tensor]:
        torch.manual_seed(before)
        with init_module(empty_weights=True):
            module = Mixed()
        state = torch.get_rng_state()
        materialize(module, seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        return module.state_dict()

    one, same, other = build(7, 0), build(7, 1), build(8, 0)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])


def test_without_a_seed_the_random_state_decides() -> None:
    def build() -> Tensor:
        with init_module(empty_weights=True):
            module = nn.Linear(4, 4)
        return materialize(module).weight

    torch.manual_seed(3)
    one, other = build(), build()
    torch.manual_seed(3)
    assert torch.equal(build(), one)
    assert not torch.equal(one, other)


def test_seed_of_an_eager_build() -> None:
    def build(seed: int) -> Tensor:
        with init_module(seed=seed, dtype=torch.float64):
            return nn.Linear(8, 8).weight

    before = torch.get_rng_state()
    assert torch.equal(build(1), build(1))
    assert not torch.equal(build(1), build(2))
    assert build(1).dtype == torch.float64
    assert torch.equal(torch.get_rng_state(), before)


def test_what_init_module_was_told_holds_for_materialize() -> None:
    with init_module("cpu", torch.bfloat16, empty_weights=True, seed=5):
        one = nn.Linear(4, 4)
    with init_module(empty_weights=True):
        other = nn.Linear(4, 4).to(torch.bfloat16)
    assert torch.equal(materialize(one).weight, materialize(other, "cpu", 5).weight)
    assert one.weight.dtype == torch.bfloat16


def test_buffers_are_right_after_a_cast() -> None:
    """The tensors that the constructor made are gone then; its arguments tell the values."""

    class Rotary(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.register_buffer("inverse", 1.0 / 10 ** (torch.arange(size) / size))

    with init_module(empty_weights=True):
        module = nn.Sequential(Rotary(6), nn.Linear(2, 2)).to(torch.bfloat16)
    materialize(module, seed=0)
    assert torch.equal(module[0].inverse, Rotary(6).inverse.to(torch.bfloat16))


def test_optimizer_and_hooks_stay_with_the_parameters() -> None:
    with init_module(empty_weights=True):
        module = nn.Linear(2, 2)
    module.weight.mark = "kept"
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    assert not verify(module, optimizer=optimizer).ok
    materialize(module, seed=0)
    verify(module, optimizer=optimizer).raise_for_problems()
    before = module.weight.detach().clone()
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(module.weight, before - 1.0)
    assert module.weight.mark == "kept"


def test_parameter_of_which_a_view_is_kept() -> None:
    with init_module(empty_weights=True):
        module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        module[1].weight = module[0].weight
    view = module[0].weight[0]
    materialize(module, seed=0)
    assert view.is_meta
    assert module[1].weight is module[0].weight
    assert verify(module).ok


def test_what_has_values_keeps_them() -> None:
    with init_module(empty_weights=True):
        module = Mixed()
    given = torch.eye(8)
    module.load_state_dict({"last.weight": given, "norm.running_var": torch.full((8,), 2.0)}, strict=False, assign=True)
    materialize(module, seed=0)
    assert torch.equal(module.last.weight, given)
    assert float(module.norm.running_var[0]) == 2.0
    assert verify(module).ok


def test_nothing_to_do_is_nothing_done() -> None:
    module, before = nn.Linear(2, 2), torch.get_rng_state()
    values = module.weight.detach().clone()
    materialize(module)
    assert torch.equal(module.weight, values)
    assert torch.equal(torch.get_rng_state(), before)


def test_model_of_transformers_that_others_built_on_meta() -> None:
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    materialize(model, seed=0)
    eager = LlamaForCausalLM(config)
    assert torch.equal(model.model.rotary_emb.inv_freq, eager.model.rotary_emb.inv_freq)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.arange(8)[None]
    assert model(ids, labels=ids).loss < 8.0


class CustomConfig(PreTrainedConfig):
    model_type = "custom"


class CustomModel(PreTrainedModel):
    """Custom code as it is on the hub: a buffer and a parameter that `_init_weights` does not know."""

    config_class = CustomConfig

    def __init__(self, config: CustomConfig) -> None:
        super().__init__(config)
        self.layer = nn.Linear(4, 4)
        self.gate = nn.Parameter(torch.full((4,), 0.25))
        self.noise = nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.arange(1.0, 9.0), persistent=False)
        self.post_init()


@pytest.mark.parametrize("context", [lambda: init_module(empty_weights=True), lambda: torch.device("meta")])
def test_custom_model_of_transformers(context: Callable[[], Any]) -> None:
    with context():
        model = CustomModel(CustomConfig())
    materialize(model, seed=0)
    assert torch.equal(model.table, torch.arange(1.0, 9.0))
    assert torch.equal(model.gate, torch.full((4,), 0.25))
    assert float(model.noise.std()) > 0
    assert 0.005 < float(model.layer.weight.std()) < 0.04
    assert verify(model).ok


def test_two_threads_materialize_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def build(seed: int) -> Tensor:
        with init_module(empty_weights=True):
            module = Mixed()
        return materialize(module, seed=seed).embedding.weight.detach()

    expected = [build(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(build, range(4)))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


class Bare(nn.Module):
    """A parameter, and no method that fills it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))


def _module(reset: Callable[[Any], object], shape: tuple[int, ...] = (3, 3)) -> nn.Module:
    class Planted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(3))
            self.register_buffer("table", torch.empty(5))

        def reset_parameters(self) -> None:
            reset(self)

    with init_module(empty_weights=True):
        return nn.Sequential(Planted(), Planted())


def _fill(module: Any) -> None:
    for value in (module.weight, module.bias, module.table):
        nn.init.normal_(value)


def _replace(module: Any) -> None:
    _fill(module)
    module.weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))


def _partly(module: Any) -> None:
    _fill(module)
    module.table.copy_(torch.full((5,), torch.nan))
    module.weight.data[0] = torch.inf


PLANTED = {
    "never written": (
        lambda one: nn.init.ones_(one.bias),
        r"never written: \{0,1\}\.weight of Planted, \{0,1\}\.table of Planted\.",
    ),
    "forgotten buffer": (
        lambda one: (nn.init.ones_(one.bias), nn.init.normal_(one.weight)),
        r"never written: \{0,1\}\.table of Planted\. Write them in the module's reset_parameters",
    ),
    "not finite": (_partly, r"not finite: \{0,1\}\.weight, \{0,1\}\.table"),
    "constant": (
        lambda one: (_fill(one), nn.init.normal_(one.weight, std=0.0)),
        r"drawn at random, and constant: \{0,1\}\.weight",
    ),
    "wrong dtype": (_replace, r"wrong dtype: \{0,1\}\.weight is torch\.float64, not torch\.float32\."),
}


@pytest.mark.parametrize("failure", PLANTED)
def test_planted_failure_is_one_error_that_names_all(failure: str) -> None:
    reset, message = PLANTED[failure]
    with pytest.raises(InitializationError, match=message) as raised:
        materialize(_module(reset), seed=0)
    assert str(raised.value).count("\n- ") == 1
    materialize(_module(_fill), seed=0)


def test_module_without_a_method_is_named_before_anything_is_done() -> None:
    with init_module(empty_weights=True):
        module = nn.ModuleDict({"fine": nn.Linear(2, 2), "first": Bare(), "second": nn.Sequential(Bare())})
    with pytest.raises(InitializationError) as raised:
        materialize(module)
    assert str(raised.value).split("\n") == [
        "modules with parameters and no way to initialize them:",
        "- first, a Bare: first.scale, first.shift",
        "- second.0, a Bare: second.0.scale, second.0.shift",
        "Give the class a method reset_parameters(self) that fills them, or load a checkpoint that has them",
    ]
    assert module["fine"].weight.is_meta
    module.load_state_dict(
        {f"{path}.{key}": torch.ones(3) for path in ("first", "second.0") for key in ("scale", "shift")},
        strict=False,
        assign=True,
    )
    assert verify(materialize(module, seed=0)).ok


def test_tie_that_a_method_breaks_is_named() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.other.weight = self.one.weight

        def init_weights(self) -> None:
            self.one.weight = nn.Parameter(torch.rand(2, 2))

    with init_module(empty_weights=True):
        module = Tied()
    with pytest.raises(InitializationError, match=r"tied when they were built, and not any more: one.weight and other"):
        materialize(module, seed=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": torch.int8}, "no floating dtype"),
        ({"dtype": "bfloat16"}, r"Write torch\.bfloat16"),
        ({"mesh": object()}, "mesh needs empty_weights=True"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), init_module(**given):
        pass


def test_materialize_inside_the_with_is_refused() -> None:
    with init_module(empty_weights=True):
        module = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="after the with"):
            materialize(module)


def _attribute(module: nn.Module, name: str) -> Tensor:
    path, _, key = name.rpartition(".")
    return getattr(module.get_submodule(path), key)
