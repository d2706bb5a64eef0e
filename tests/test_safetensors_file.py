"""Reads of a safetensors file against safetensors itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sparseautomodel.safetensors_file import CheckpointError, FileTensor, SafetensorsFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {
        "b": torch.randn(6, 4),
        "a": torch.randn(3).bfloat16(),
        "none": torch.empty(0, 5),
        "one": torch.tensor(2),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize(
    "index",
    [
        ...,
        slice(None),
        slice(1, 4),
        slice(4, 2),
        slice(-2, None),
        (slice(1, 3), slice(None)),
        (slice(1, 3), slice(0, 4)),
        (slice(None), slice(1, 3)),
        (slice(0, 6, 2), slice(None)),
    ],
    ids=str,
)
def test_every_slice_is_that_of_safetensors(path: Path, index: object) -> None:
    with safe_open(path, framework="pt") as file:
        whole = file.get_tensor("b")
    assert torch.equal(FileTensor(SafetensorsFile(str(path)), "b")[index], whole[index])  # type: ignore[index]


def test_tensors_come_in_the_order_of_their_bytes_and_whole(path: Path) -> None:
    file = SafetensorsFile(str(path))
    offsets = [entry["data_offsets"][0] for entry in file.entries.values()]
    assert offsets == sorted(offsets) and set(file.entries) == {"a", "b", "none", "one"}
    with safe_open(path, framework="pt") as stock:
        for name in file.entries:
            assert torch.equal(file.read(name), stock.get_tensor(name))


def test_a_file_cut_off_after_it_was_opened_is_an_error(path: Path) -> None:
    file = SafetensorsFile(str(path))
    last = list(file.entries)[-1]
    with open(path, "r+b") as cut:
        cut.truncate(path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"ends in the middle of {last}"):
        file.read(last)
