"""Distributed checkpoints read as one, against the tensors that torch's own writer was given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sparseautomodel.safetensors_file import CheckpointError
from sparseautomodel.shards import open_shards, shard_files

TENSORS = {
    "packed": torch.arange(80, dtype=torch.int32).view(10, 8),
    "wide": torch.arange(48, dtype=torch.bfloat16).view(6, 8),
    "scale": torch.arange(16, dtype=torch.uint8).view(16).view(torch.float8_e4m3fn),
    "shape": torch.tensor([10, 8]),
}
PARTS: dict[str, list[tuple[int, tuple[slice, ...]]]] = {
    "packed": [(0, (slice(0, 5),)), (1, (slice(5, 10),))],
    "wide": [(0, (slice(None), slice(0, 4))), (1, (slice(None), slice(4, 8)))],
    "scale": [(0, (slice(0, 8),)), (1, (slice(8, 16),))],
    "shape": [(0, ())],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As torch's writer lays it out: a file a rank, with the offsets of its parts in the header."""
    for rank in (0, 1):
        tensors: dict[str, Tensor] = {}
        info = {}
        for name, parts in PARTS.items():
            for owner, where in parts:
                if owner == rank:
                    tensors[name] = TENSORS[name][where or ...].contiguous()
                    starts = [one.start or 0 for one in where]
                    info[name] = {"saved_offsets": starts + [0] * (TENSORS[name].ndim - len(starts))}
        metadata = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
        save_file(tensors, tmp_path / f"shard-0000{rank + 1}-model-00001-of-00001.safetensors", metadata)
    return tmp_path


def test_tensors_are_whole_and_their_slices_too(folder: Path) -> None:
    checkpoint = open_shards(folder)
    assert set(checkpoint) == set(TENSORS)
    for name, wanted in TENSORS.items():
        tensor = checkpoint[name]
        assert (tuple(tensor.shape), tensor.dtype) == (tuple(wanted.shape), wanted.dtype)
        assert torch.equal(_bits(tensor[...]), _bits(wanted))
    assert torch.equal(checkpoint["packed"][3:7], TENSORS["packed"][3:7])
    assert torch.equal(checkpoint["wide"][1:3, 2:6], TENSORS["wide"][1:3, 2:6])
    assert torch.equal(checkpoint["packed"][10:12], TENSORS["packed"][10:12])


def test_a_slice_reads_its_bytes_alone(folder: Path) -> None:
    checkpoint = open_shards(folder)
    _ = checkpoint["packed"][3:7]
    assert checkpoint.reads()["packed"] == (0.4, 4 * 8 * 4)


def test_a_missing_file_of_a_rank_is_named(folder: Path) -> None:
    first, _ = shard_files(folder)
    Path(first).unlink()
    with pytest.raises(CheckpointError, match=r"lacks the file of a rank:\n  packed: 40 numbers of 80"):
        open_shards(folder)


def test_other_folders_have_no_shards(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert shard_files(tmp_path) == []
    assert shard_files("org/name") == []


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)
