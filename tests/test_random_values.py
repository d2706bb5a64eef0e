"""Random values by name and place: the published generator, the distributions, and the same values on any mesh."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from sparseautomodel.random_values import checked_seed, drawing, normal, uniform

FILLS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda tensor: nn.init.normal_(tensor, 0.5, 0.02),
    "uniform": lambda tensor: nn.init.uniform_(tensor, -0.1, 0.3),
    "trunc_normal": nn.init.trunc_normal_,
    "trunc_normal tail": lambda tensor: nn.init.trunc_normal_(tensor, a=1.0, b=1.5),
    "kaiming_uniform": lambda tensor: nn.init.kaiming_uniform_(tensor, math.sqrt(5)),
    "xavier_normal": nn.init.xavier_normal_,
}
WHOLE: dict[str, Callable[[Tensor], Tensor]] = FILLS | {
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda tensor: nn.init.sparse_(tensor, 0.2),
}


@pytest.fixture
def fake_ranks() -> Iterator[Callable[[int, int], None]]:
    """Makes this process rank `r` of `n`, without the others."""

    def become(rank: int, world: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", WHOLE)
def test_the_distribution_is_that_of_torch(name: str) -> None:
    mine = torch.empty(501, 333)
    with drawing({"x": mine}, seed=3):
        WHOLE[name](mine)
    torch.manual_seed(0)
    theirs = WHOLE[name](torch.empty(501, 333))
    scale = theirs.std()
    assert abs(mine.mean() - theirs.mean()) < 0.015 * scale
    assert abs(mine.std() / scale - 1) < 0.015
    levels = torch.tensor([0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999])
    gap = torch.quantile(mine.flatten(), levels) - torch.quantile(theirs.flatten(), levels)
    assert gap.abs().max() < 0.12 * scale
    assert torch.corrcoef(torch.stack((mine.flatten()[1:], mine.flatten()[:-1])))[0, 1].abs() < 0.01


@pytest.mark.parametrize("name", WHOLE)
def test_values_depend_on_seed_and_name_alone(name: str) -> None:
    state = torch.get_rng_state()
    results = []
    for seed, names in ((0, "ab"), (0, "ba"), (1, "ab")):
        tensors = {one: torch.empty(17, 23) for one in names}
        with drawing(tensors, seed):
            for tensor in tensors.values():
                WHOLE[name](tensor)
            WHOLE[name](tensors["a"])
        results.append(tensors)
    assert torch.equal(results[0]["a"], results[1]["a"])
    assert torch.equal(results[0]["b"], results[1]["b"])
    assert not torch.equal(results[0]["a"], results[0]["b"])
    assert not torch.equal(results[0]["a"], results[2]["a"])
    assert torch.equal(torch.get_rng_state(), state)


PLACEMENTS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((2,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((3,), (Shard(0),)),
    ((3,), (Shard(1),)),
    ((2,), (Replicate(),)),
    ((2, 2), (Shard(0), Shard(1))),
    ((2, 2), (Replicate(), Shard(1))),
    ((2, 2), (Shard(1), Shard(1))),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 3), (Shard(0), Shard(0))),
]


@pytest.mark.parametrize("shape", [(8, 12), (13, 7), (16, 10)])
@pytest.mark.parametrize(("mesh_shape", "placements"), PLACEMENTS)
def test_ranks_draw_what_one_process_draws(
    fake_ranks: Callable[[int, int], None],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    shape: tuple[int, int],
) -> None:
    if shape[0] % 4 and any(isinstance(one, _StridedShard) for one in placements):
        pytest.skip("torch shards unevenly here")
    whole = torch.empty(shape)
    index = torch.arange(whole.numel(), dtype=torch.float64).view(shape)
    with drawing({"layer.weight": whole}, 5):
        nn.init.normal_(whole)
    for rank in range(math.prod(mesh_shape)):
        fake_ranks(rank, math.prod(mesh_shape))
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
        local = _slice(index, mesh.get_coordinate(), mesh_shape, placements)
        part = DTensor.from_local(
            torch.empty(local.shape), mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
        )
        with drawing({"layer.weight": part}, 5):
            nn.init.normal_(part)
        assert torch.equal(part._local_tensor, whole.flatten()[local.long()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_round_one_stream_and_stay_below_the_end(dtype: torch.dtype) -> None:
    tensor, wide = torch.empty(100, 999, dtype=dtype), torch.empty(100, 999)
    for one in (tensor, wide):
        with drawing({"x": one}, 0):
            nn.init.normal_(one, 1.0, 0.5)
    assert torch.allclose(tensor.double(), wide.double(), atol=0, rtol=2 * torch.finfo(torch.bfloat16).eps)
    with drawing({"x": tensor}, 0):
        tensor.uniform_(1.0, 1.5)
    assert tensor.min() >= 1.0 and tensor.max() < 1.5


def test_views_and_parts_have_the_values_of_their_places() -> None:
    index = torch.arange(35).view(5, 7)
    tensor = torch.empty(5, 7)
    with drawing({"x": tensor}, 1):
        tensor[1:3].normal_()
        tensor[:, 5].uniform_()
        tensor.T[2:4].normal_()
    assert torch.equal(tensor[1:3, :5], normal(1, "x", index)[1:3, :5])
    assert torch.equal(tensor[:, 5], uniform(1, "x", index)[:, 5])
    assert torch.equal(tensor[:, 2:4], normal(1, "x", index)[:, 2:4])


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_a_row_is_filled_on_the_rank_that_holds_it(
    fake_ranks: Callable[[int, int], None], placement: Placement
) -> None:
    """transformers zeroes the row of the padding token so, and DTensor fills a copy of it."""
    held = []
    for rank in range(2):
        fake_ranks(rank, 2)
        mesh = init_device_mesh("cpu", (2,))
        shape = (2, 4) if placement.is_shard(0) else (4, 2) if placement.is_shard(1) else (4, 4)
        part = DTensor.from_local(
            torch.ones(shape), mesh, [placement], run_check=False, shape=torch.Size((4, 4)), stride=(4, 1)
        )
        with torch.no_grad(), drawing({"embed.weight": part}, 0):
            nn.init.zeros_(part[3])
        held.append(part._local_tensor)
    dim = getattr(placement, "dim", None)
    whole = held[0] if dim is None else torch.cat(held, dim)
    assert torch.equal(whole, torch.tensor([[1.0]] * 3 + [[0.0]]).expand(4, 4))


def test_a_tensor_in_a_shared_storage_and_a_tied_one() -> None:
    base = torch.empty(10, 6)
    upper, lower = base[:5], base[5:]
    with drawing({"upper": upper, "lower": lower, "tied": upper.detach()}, 0):
        upper.normal_()
        lower.normal_()
    alone = {name: torch.empty(5, 6) for name in ("upper", "lower")}
    with drawing(alone, 0):
        for one in alone.values():
            one.normal_()
    assert torch.equal(upper, alone["upper"]) and torch.equal(lower, alone["lower"])


def test_other_random_tensors_repeat_and_leave_the_generator_alone() -> None:
    state = torch.get_rng_state()
    made = []
    for _ in range(2):
        tensor = torch.empty(3)
        with drawing({"x": tensor}, 0):
            tensor.normal_()
            made.append([torch.randn(4), torch.rand(2, 3), torch.randperm(9), torch.empty(3).normal_()])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    assert sorted(made[0][2].tolist()) == list(range(9))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_has_no_such_values_is_refused() -> None:
    tensor = torch.empty(4)
    with drawing({"layer.mask": tensor}, 0), pytest.raises(NotImplementedError, match=r"layer\.mask is filled by"):
        tensor.bernoulli_(0.5)


def test_only_the_calling_thread_draws() -> None:
    tensor, other = torch.empty(1000), torch.empty(1000)

    def fill() -> None:
        torch.manual_seed(7)
        other.normal_()

    with drawing({"x": tensor, "y": other}, 0):
        thread = threading.Thread(target=fill)
        thread.start()
        thread.join()
        tensor.normal_()
    torch.manual_seed(7)
    assert torch.equal(other, torch.empty(1000).normal_())
    assert torch.equal(tensor, normal(0, "x", torch.arange(1000)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_draws_what_a_cpu_draws() -> None:
    for name, fill in FILLS.items():
        tensors = [torch.empty(301, 517, device=device) for device in ("cpu", "cuda")]
        for tensor in tensors:
            with drawing({"x": tensor}, 0):
                fill(tensor)
        assert torch.equal(tensors[0], tensors[1].cpu()), name


def test_long_tensors_are_drawn_in_parts_without_a_seam() -> None:
    tensor = torch.empty(3, (1 << 17) + 5)
    with drawing({"x": tensor}, 0):
        tensor.normal_()
    index = torch.arange(tensor.numel()).view(tensor.shape)[:, (1 << 17) - 9 :]
    assert torch.equal(tensor[:, (1 << 17) - 9 :], normal(0, "x", index))


def _slice(
    whole: Tensor, coordinate: list[int] | None, mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> Tensor:
    """What a rank holds of a tensor, by cutting the tensor itself."""
    assert coordinate is not None
    for number, count, placement in zip(coordinate, mesh, placements, strict=True):
        if isinstance(placement, _StridedShard):
            groups = whole.chunk(placement.split_factor, placement.dim)
            whole = torch.cat([group.chunk(count, placement.dim)[number] for group in groups], placement.dim)
        elif isinstance(placement, Shard):
            parts = list(whole.chunk(count, placement.dim))
            parts += [parts[0].narrow(placement.dim, 0, 0)] * (count - len(parts))
            whole = parts[number]
    return whole


@pytest.mark.parametrize("seed", ["a", "1", 1.5, 2.0, True, -1, b"x", torch.tensor(1.5)])
def test_what_is_no_seed_is_refused(seed: object) -> None:
    with pytest.raises(ValueError, match=r"^from_config\(seed=.*from 0 on.*from_config\(\.\.\., seed=\d+\)"):
        checked_seed(seed, "from_config")


def test_seeds() -> None:
    assert [checked_seed(seed, "f") for seed in (None, 0, 2**70, np.int64(3))] == [None, 0, 2**70, 3]
