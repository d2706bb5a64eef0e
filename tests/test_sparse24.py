"""2:4 sparse layers: what is replaced, and that it saves, moves and multiplies as before. Without a GPU, torch's sparse
tensor is stood in for by a dense one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparseautomodel import sparse24
from sparseautomodel.masks import prune_mask
from sparseautomodel.sparse24 import Sparse24Linear, run_sparse


def model() -> nn.Module:
    layers = nn.ModuleDict({"sparse": nn.Linear(64, 32), "dense": nn.Linear(64, 32), "odd": nn.Linear(48, 32)})
    with torch.no_grad():
        weight = layers["sparse"].weight
        weight.mul_(prune_mask(weight, None, (2, 4)))
    return layers.to(torch.bfloat16)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """As on a GPU that has sparse tensor cores. Lists the weights that were made sparse."""
    made: list[torch.Tensor] = []
    monkeypatch.setattr(sparse24, "_refusal_of_device", lambda device: "")
    monkeypatch.setattr(sparse24, "to_sparse_semi_structured", lambda weight: (made.append(weight), weight.clone())[1])
    return made


def test_only_sparse_layers_are_replaced(anywhere: list[torch.Tensor]) -> None:
    layers = model()
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    values = torch.randn(3, 64, dtype=torch.bfloat16)
    wanted = layers["sparse"](values)
    assert run_sparse(layers) == {
        "sparse": "",
        "dense": "has more than two weights in four that are not zero",
        "odd": "needs multiples of 32 x 64, the weight has 32 x 48",
    }
    assert type(layers["sparse"]) is Sparse24Linear and type(layers["dense"]) is nn.Linear and len(anywhere) == 1
    assert torch.equal(layers["sparse"](values), wanted)
    assert not layers["sparse"].weight.requires_grad
    after = layers.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


def test_moved_where_it_cannot_run_it_is_dense_again(anywhere: list[torch.Tensor]) -> None:
    layers = model()
    run_sparse(layers)
    layers.to(torch.float16)
    assert type(layers["sparse"]) is Sparse24Linear and len(anywhere) == 2
    layers.to(torch.float32)
    assert type(layers["sparse"]) is nn.Linear and layers["sparse"].weight.dtype == torch.float32


def test_other_weights_can_be_loaded(anywhere: list[torch.Tensor]) -> None:
    layers, others = model(), model()
    run_sparse(layers)
    layers.load_state_dict(others.state_dict())
    assert type(layers["sparse"]) is Sparse24Linear
    assert torch.equal(layers["sparse"].weight, others["sparse"].weight)


@pytest.mark.parametrize(
    ("device", "capability", "hip", "wanted"),
    [
        ("cpu", None, None, "needs an NVIDIA GPU, the weight is on cpu"),
        ("mps", None, None, "needs an NVIDIA GPU, the weight is on mps"),
        ("cuda", (9, 4), "6.3", "needs an NVIDIA GPU, the weight is on ROCm"),
        ("cuda", (7, 5), None, "needs compute capability 8.0, this GPU has 7.5"),
        ("cuda", (8, 0), None, ""),
    ],
)
def test_devices(
    device: str, capability: tuple[int, int] | None, hip: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert sparse24._refusal_of_device(torch.device(device)) == wanted


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs sparse tensor cores"
)
def test_on_a_gpu() -> None:
    layers = model().cuda()
    values = torch.randn(5, 64, dtype=torch.bfloat16, device="cuda")
    wanted, before = layers["sparse"](values), layers["sparse"].weight.clone()
    assert run_sparse(layers)["sparse"] == ""
    torch.testing.assert_close(layers["sparse"](values), wanted)
    assert torch.equal(layers.state_dict()["sparse.weight"], before)
    assert type(layers.cpu()["sparse"]) is nn.Linear
