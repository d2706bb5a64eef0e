"""What `verify` finds in any module. Each failure is planted, and each is one problem that names all its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sparseautomodel import init_module, materialize, verify
from sparseautomodel.initial_checks import listed
from sparseautomodel.numbers import poison
from sparseautomodel.verify import VerificationError
from tests.conftest import SIZES


def _plain() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Embedding(4, 4))
    module.mask = torch.zeros(2)
    return module


def _llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


def _forget_buffer(module: nn.Module) -> None:
    module[1].running_mean = module[1].running_mean.to("meta")
    module[1].running_var = module[1].running_var.to("meta")


def _leave_attribute(module: nn.Module) -> None:
    module.mask = module.mask.to("meta")


def _untie(module: nn.Module) -> None:
    module.lm_head.weight = nn.Parameter(module.lm_head.weight.detach().clone())


def _not_a_number(module: nn.Module) -> None:
    module[0].weight.data[1, 1] = torch.nan
    module[1].running_var[0] = torch.nan


def _never_write(module: nn.Module) -> None:
    poison(module[0].bias.data)
    poison(module[1].num_batches_tracked)
    poison(module[2].weight.data[1])


def _only_allocate(module: nn.Module) -> None:
    for value in (module[0].weight, module[2].weight):
        value.data.zero_()


def _same_everywhere(module: nn.Module) -> None:
    module[0].weight.data.fill_(0.5)


PLANTED: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object], dict[str, Any], str]] = {
    "forgotten buffer": (
        _plain,
        _forget_buffer,
        {},
        "on the meta device, without values: 1.running_mean, 1.running_var. Load them or call materialize(model)",
    ),
    "attribute": (_plain, _leave_attribute, {}, "on the meta device, without values: mask. Load them or call"),
    "untied head": (_llama, _untie, {}, "lm_head.weight and model.embed_tokens.weight are tied by the config but are"),
    "not a number": (_plain, _not_a_number, {}, "not finite: 0.weight, 1.running_var"),
    "never written": (_plain, _never_write, {}, "never written: 0.bias, 2.weight, 1.num_batches_tracked. Write them"),
    "only allocated": (_plain, _only_allocate, {}, "constant, as memory that nothing was written to: {0,2}.weight."),
    "constant": (_plain, _same_everywhere, {}, "constant, as memory that nothing was written to: 0.weight."),
    "wrong dtype": (
        _plain,
        lambda module: module[0].double(),
        {"dtype": torch.float32},
        "wrong dtype: 0.weight is torch.float64, not torch.float32, 0.bias is torch.float64, not torch.float32.",
    ),
    "wrong device": (
        _plain,
        lambda module: None,
        {"device": "cuda:0"},
        "wrong device: {0-2}.weight is on cpu, {0,1}.bias is on cpu, 1.running_mean is on cpu, ",
    ),
}


@pytest.mark.parametrize("failure", PLANTED)
def test_planted_failure_is_one_problem_that_names_all(failure: str) -> None:
    make, plant, expected, message = PLANTED[failure]
    module = make()
    assert verify(module).ok
    plant(module)
    (problem,) = verify(module, **expected).problems
    assert problem.startswith(message)
    with pytest.raises(VerificationError, match="is not in order"):
        verify(module, **expected).raise_for_problems()


def test_all_failures_are_one_error() -> None:
    module = _plain()
    for failure in ("constant", "attribute", "never written"):
        PLANTED[failure][1](module)
    with pytest.raises(VerificationError) as raised:
        verify(module, dtype=torch.bfloat16).raise_for_problems()
    assert str(raised.value).count("\n- ") == 4, str(raised.value)


def test_optimizer_of_a_model_without_values() -> None:
    with init_module(empty_weights=True):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    problem = verify(module, optimizer=optimizer).problems[-1]
    assert problem.startswith(
        "AdamW holds parameters on the meta device: {0,1}.weight, {0,1}.bias. Build the optimizer"
    )
    module.load_state_dict(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict(), assign=True)
    (problem,) = verify(module, optimizer=optimizer).problems  # the load put others in their places
    assert problem.startswith("AdamW holds parameters on the meta device: parameter 0 of group 0, parameter 1 of")
    assert verify(module, optimizer=torch.optim.AdamW(module.parameters())).ok


def test_optimizer_of_another_model() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([module.weight, nn.Parameter(torch.ones(2))], lr=1.0)
    (problem,) = verify(module, optimizer=optimizer).problems
    assert problem.startswith("SGD holds parameters that the model does not have: parameter 1 of group 0.")


def test_matrices_that_are_zero_on_purpose_are_no_alarm() -> None:
    module = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    nn.init.zeros_(module[2].weight)  # the second matrix of an adapter
    assert verify(module).ok


def test_masks_with_infinities_are_no_alarm() -> None:
    module = _plain()
    module.register_buffer("causal", torch.full((3, 3), -torch.inf).triu(1))
    assert verify(module).ok


def test_exact_values_and_devices_are_no_alarm() -> None:
    with init_module(empty_weights=True, dtype=torch.bfloat16):
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    verify(materialize(module, seed=0), dtype=torch.bfloat16, device="cpu").raise_for_problems()


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a.weight"], "a.weight"),
        (["h.0.w", "h.0.b", "h.1.w", "h.2.w"], "h.{0-2}.w, h.0.b"),
        (["h.0.w", "h.2.w"], "h.{0,2}.w"),
        (["h.0.e.1.w", "h.1.e.1.w"], "h.{0,1}.e.1.w"),
        (["w1", "w2"], "w1, w2"),
    ],
)
def test_every_name_is_there(names: list[str], text: str) -> None:
    assert listed(names) == text


def test_parameters_without_a_shape_are_named() -> None:
    (problem,) = verify(torch.nn.Sequential(torch.nn.LazyLinear(3))).problems
    assert "without a shape yet: 0.weight, 0.bias" in problem


def test_sparse_parameters_are_no_fault_of_the_check() -> None:
    module = torch.nn.Linear(2, 2)
    module.register_parameter("sparse", torch.nn.Parameter(torch.eye(3).to_sparse()))
    assert verify(module).ok
