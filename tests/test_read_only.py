"""A weight that is computed when it is read cannot be written to, and reads as any tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparseautomodel.read_only import ReadOnly
from tests.test_compressed_layers import compress, linear


def _assign(weight: Tensor) -> None:
    weight.data = torch.zeros(2, 2)


def _add(weight: Tensor) -> None:
    weight.data += 1


def _index(weight: Tensor) -> None:
    weight[0] = 1


WRITES: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda weight: weight.zero_(),
    "data.copy_": lambda weight: weight.data.copy_(torch.zeros(2, 2)),
    "detach.mul_": lambda weight: weight.detach().mul_(2),
    "out": lambda weight: torch.add(torch.zeros(2, 2), 1, out=weight),
    "init": lambda weight: nn.init.zeros_(weight),
    "data =": _assign,
    "data +=": _add,
    "[0] =": _index,
    "[0].add_": lambda weight: weight[0].add_(1),
    "[0, 1].fill_": lambda weight: weight[0, 1].fill_(0),
    "view.add_": lambda weight: weight.view(-1).add_(1),
    "t.add_": lambda weight: weight.t().add_(1),
    "data.T.mul_": lambda weight: weight.data.T.mul_(2),
    "transpose.narrow": lambda weight: weight.transpose(0, 1).narrow(0, 0, 1).zero_(),
    "diagonal": lambda weight: weight.diagonal().zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_an_error(write: Callable[[Tensor], object]) -> None:
    weight = torch.ones(2, 2).as_subclass(ReadOnly)
    with pytest.raises(ValueError, match="execution='dense'"):
        write(weight)
    assert torch.equal(weight, torch.ones(2, 2))


def test_it_reads_as_any_tensor_and_results_are_plain() -> None:
    plain = torch.randn(3, 4)
    weight = plain.clone().as_subclass(ReadOnly)
    states = torch.randn(2, 4, requires_grad=True)
    F.linear(states, weight).sum().backward()
    assert states.grad is not None and torch.equal(states.grad, plain.sum(0).expand(2, 4))
    for result in (weight + 1, weight.double(), weight.t() @ weight, weight.clone(), weight.to("cpu", torch.float16)):
        assert type(result) is Tensor
    assert (weight.dtype, weight.shape, weight.device) == (plain.dtype, plain.shape, plain.device)
    changed = weight.clone().zero_()
    assert changed.abs().sum() == 0


def test_a_merge_into_a_compressed_layer_is_an_error() -> None:
    module = compress(linear(64, 64), "W4A16_64")
    for layer in (module, module.settle() or module):
        with pytest.raises(ValueError, match="execution='dense'"):
            layer.weight.data += 1
        with pytest.raises(ValueError, match="execution='dense'"):
            layer.weight = nn.Parameter(torch.zeros(64, 64))
