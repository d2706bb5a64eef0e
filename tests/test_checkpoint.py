from __future__ import annotations

import json
import os
import pickle
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparseautomodel import checkpoint as module
from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.safetensors_file import SAFETENSORS_DTYPES, CheckpointError

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that the system was asked for, past the headers, whatever the counters of the checkpoint say."""
    counted: Counter[str] = Counter()
    preadv = os.preadv

    def count(descriptor: int, views: list[memoryview], offset: int) -> int:
        done = preadv(descriptor, views, offset)
        counted["all"] += done
        return done

    monkeypatch.setattr(module.os, "preadv", count)
    return counted


# Reading


@pytest.mark.parametrize("name", SAFETENSORS_DTYPES)
def test_every_dtype_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    dtype = SAFETENSORS_DTYPES[name]
    values = _random(4, 6, dtype=dtype)
    _write(tmp_path, {"odd": torch.zeros(3, dtype=torch.uint8), "values": values})
    tensor = open_checkpoint(tmp_path)["values"]
    assert (tensor.shape, tensor.dtype, tensor.get_shape(), tensor.get_dtype()) == ((4, 6), dtype, [4, 6], name)
    for index in (..., slice(1, 3), (slice(None), slice(2, 5)), 2):
        assert _same(tensor[index], values[index])


@pytest.mark.parametrize(
    "index",
    [
        *(slice(None), slice(0, 0), slice(2, 5), slice(-3, None), slice(5, 2), slice(4, 99), slice(0, 7, 2)),
        *(0, 3, (slice(1, 3), slice(None)), (slice(None), slice(-2, None)), (..., slice(0, 1)), (2, slice(1, 4))),
    ],
    ids=str,
)
def test_slices_are_those_of_torch(tmp_path: Path, index: Any) -> None:
    values = torch.randn(7, 5, 2)
    _write(tmp_path, {"values": values})
    assert _same(open_checkpoint(tmp_path)["values"][index], values[index])


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    tensors = {"scalar": torch.tensor(3.0), "rows": torch.empty(0, 5), "columns": torch.empty(3, 0)}
    _write(tmp_path, tensors)
    checkpoint = open_checkpoint(tmp_path)
    for name, values in tensors.items():
        assert _same(checkpoint[name][...], values)
    assert _same(checkpoint["rows"][0:3], tensors["rows"])
    assert checkpoint.nbytes == 4
    assert {times for times, _ in checkpoint.reads().values()} == {1}


def test_opening_reads_no_tensor(tiny_llama: Path, bytes_read: Counter[str]) -> None:
    checkpoint = open_checkpoint(tiny_llama)
    assert len(checkpoint) > 10 and bytes_read["all"] == 0
    assert {read for read in checkpoint.reads().values()} == {(0, 0)}


def test_a_run_of_rows_reads_its_own_bytes_and_no_others(tmp_path: Path, bytes_read: Counter[str]) -> None:
    values = torch.randn(100, 30)
    _write(tmp_path, {"before": torch.randn(50), "values": values})
    tensor = open_checkpoint(tmp_path)["values"]
    assert _same(tensor[10:15], values[10:15])
    assert bytes_read["all"] == 5 * 30 * 4
    tensor[...]
    assert bytes_read["all"] == 105 * 30 * 4


def test_reads_are_counted_exactly(tmp_path: Path) -> None:
    _write(tmp_path, {"a": torch.randn(8, 4), "b": torch.randn(8, 4), "c": torch.randn(8, 4)})
    checkpoint = open_checkpoint(tmp_path)
    for start in range(0, 8, 2):
        checkpoint["a"][start : start + 2]
    checkpoint["b"][...], checkpoint["b"][:, 0:2]
    assert checkpoint.reads() == {"a": (1, 128), "b": (1.5, 192), "c": (0, 0)}


def test_names_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    tensors = {"z": torch.randn(2, dtype=torch.float64), "m": torch.randn(2), "a": torch.randn(2).half()}
    _write(tmp_path, tensors)  # widest first: safetensors sorts by alignment
    assert list(open_checkpoint(tmp_path)) == ["z", "m", "a"]


def test_many_threads_read_one_file(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.randn(64, 33) for number in range(40)}
    _write(tmp_path, tensors)
    checkpoint = open_checkpoint(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            read = dict(zip(tensors, pool.map(lambda name: checkpoint[name][...], tensors), strict=True))
            assert all(_same(read[name], values) for name, values in tensors.items())
    assert set(checkpoint.reads().values()) == {(3, 3 * 64 * 33 * 4)}


def test_what_was_read_can_be_written_to(tmp_path: Path) -> None:
    """A modifier works in place; neither the file nor a later read may see it."""
    values = torch.randn(4, 4)
    torch.save({"values": values}, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(tmp_path)
    checkpoint["values"][...].zero_()
    checkpoint["values"][0:2].zero_()
    assert _same(checkpoint["values"][...], values)


def test_files_are_closed_with_the_checkpoint(tmp_path: Path) -> None:
    _write(tmp_path, {"values": torch.randn(4)})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        open_checkpoint(tmp_path)["values"][...]
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    _write(tmp_path, {"values": torch.randn(100)})
    checkpoint = open_checkpoint(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 200)
    with pytest.raises(CheckpointError, match=r"ends in the middle of values"):
        checkpoint["values"][...]


# Where the files are


def test_shards_are_one_checkpoint(tiny_llama: Path) -> None:
    files = sorted(tiny_llama.glob("model-*.safetensors"))
    assert len(files) > 2
    expected = {name: values for file in files for name, values in load_file(file).items()}
    checkpoint = open_checkpoint(tiny_llama)
    assert checkpoint.files == [str(file) for file in files]
    assert set(checkpoint) == set(expected)
    assert all(_same(checkpoint[name][...], values) for name, values in expected.items())


@pytest.mark.parametrize("sharded", [False, True])
def test_variant_and_subfolder(tmp_path: Path, sharded: bool) -> None:
    _write(tmp_path, {"plain": torch.randn(2)})
    folder = tmp_path / "inner"
    if sharded:
        _write_shards(folder, {"a": {"x": torch.ones(1)}, "b": {"y": torch.ones(1)}}, variant="fp16")
    else:
        _write(folder, {"x": torch.ones(1), "y": torch.ones(1)}, "model.fp16.safetensors")
    assert set(open_checkpoint(tmp_path)) == {"plain"}
    assert set(open_checkpoint(tmp_path, subfolder="inner", variant="fp16")) == {"x", "y"}
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"model\.fp16\.safetensors"):
        open_checkpoint(tmp_path, variant="fp16")


def test_hub_repository_from_the_cache(tmp_path: Path, tiny_llama: Path) -> None:
    _into_hub_cache(tiny_llama, tmp_path, "someone/tiny")
    checkpoint = open_checkpoint("someone/tiny", cache_dir=tmp_path, local_files_only=True)
    assert set(checkpoint) == set(open_checkpoint(tiny_llama))
    with pytest.raises(CheckpointError, match=r"someone/other holds no checkpoint.*not a local folder either"):
        open_checkpoint("someone/other", cache_dir=tmp_path, local_files_only=True)


def test_folder_without_a_checkpoint_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors, model\.safetensors\.index\.json, pytorch_model"):
        open_checkpoint(tmp_path)


def test_unknown_argument_is_not_swallowed(tmp_path: Path) -> None:
    _write(tmp_path, {"values": torch.randn(4)})
    with pytest.raises(TypeError, match=r"sub_folder.*subfolder"):
        open_checkpoint(tmp_path, sub_folder="inner")


# Pickled checkpoints


@pytest.mark.parametrize("zipped", [True, False])
def test_bin_is_read_lazily_and_a_tie_is_one_tensor(tmp_path: Path, zipped: bool) -> None:
    square = torch.randn(6, 6)
    tensors = {"a": torch.randn(6, 4), "tie": square, "b": square, "turned": square.t(), "none": torch.empty(0)}
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint) == ["a", "tie", "turned", "none"]
    for name in checkpoint:
        assert _same(checkpoint[name][...], tensors[name])
    assert _same(checkpoint["a"][2:4], tensors["a"][2:4])
    assert checkpoint.reads()["a"] == (1.333, 6 * 4 * 4 + 2 * 4 * 4)


def test_bin_shards(tmp_path: Path) -> None:
    shared = torch.randn(3)
    torch.save({"x": shared, "y": shared}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"z": torch.ones(1)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    first, second = (f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2))
    places = {"x": first, "y": first, "z": second}
    _write_index(tmp_path, places, "pytorch_model.bin.index.json")
    assert set(open_checkpoint(tmp_path)) == {"x", "z"}
    _write_index(tmp_path, places | {"nowhere": second}, "pytorch_model.bin.index.json")
    with pytest.raises(CheckpointError, match="nowhere is in the index but in no file"):
        open_checkpoint(tmp_path)
    torch.save({"x": torch.ones(1), "z": torch.ones(1)}, tmp_path / second)
    with pytest.raises(CheckpointError, match="x is stored twice"):
        open_checkpoint(tmp_path)


def test_safetensors_come_before_bin_unless_asked(tmp_path: Path) -> None:
    _write(tmp_path, {"safe": torch.ones(1)})
    torch.save({"pickled": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert set(open_checkpoint(tmp_path)) == {"safe"}
    assert set(open_checkpoint(tmp_path, use_safetensors=False)) == {"pickled"}
    (tmp_path / "model.safetensors").unlink()
    assert set(open_checkpoint(tmp_path)) == {"pickled"}
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        open_checkpoint(tmp_path, use_safetensors=True)


class _Intruder:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["INTRUDER"],)


@pytest.mark.parametrize("zipped", [True, False, None])
def test_pickle_with_code_is_refused_by_name_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool | None
) -> None:
    monkeypatch.setenv("INTRUDER", str(tmp_path / "was-here"))
    file = tmp_path / "pytorch_model.bin"
    content = {"x": torch.ones(1), "y": _Intruder()}
    if zipped is None:
        file.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is refused.*safetensors"):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "was-here").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [([torch.ones(1)], "a list, not a dict"), ({"x": {"y": torch.ones(1)}}, "x in .* is a dict")],
)
def test_pickle_of_something_else(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_truncated_bin(tmp_path: Path, zipped: bool) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"x": torch.randn(40), "y": torch.randn(40)}, file, _use_new_zipfile_serialization=zipped)
    data = file.read_bytes()
    for kept in {*range(0, len(data), 31), len(data) - 1}:
        file.write_bytes(data[:kept])
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
            open_checkpoint(tmp_path)


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Every pattern of bits, NaN among them."""
    highest = 2 if dtype == torch.bool else 256
    return torch.randint(0, highest, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit, in shape and in dtype."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(values.contiguous().view(-1).view(torch.uint8) for values in (one, other)))


def _write(folder: Path, tensors: Tensors, name: str = "model.safetensors") -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)


def _write_index(folder: Path, weight_map: dict[str, str], name: str = "model.safetensors.index.json") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _write_shards(folder: Path, shards: dict[str, Tensors], variant: str = "") -> None:
    stem = f".{variant}" if variant else ""
    weight_map = {}
    for number, tensors in enumerate(shards.values(), 1):
        name = f"model{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder, tensors, name)
        weight_map.update(dict.fromkeys(tensors, name))
    _write_index(folder, weight_map, f"model.safetensors.index{stem}.json")


def _into_hub_cache(source: Path, cache: Path, name: str) -> None:
    """Lay a folder down as the hub's client does after a download."""
    root = cache / f"models--{name.replace('/', '--')}"
    commit = "0" * 40
    shutil.copytree(source, root / "snapshots" / commit)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)
