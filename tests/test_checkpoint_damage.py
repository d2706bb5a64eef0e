"""Files of a checkpoint that are missing, damaged or contradict each other: named before a weight is read."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.safetensors_file import CheckpointError

Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("kept", [0, 5, 8, 40, 200, -300, -1])
def test_truncated_file(tmp_path: Path, kept: int) -> None:
    _write(tmp_path, {"a": torch.randn(50), "b": torch.randn(50)})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read, it is truncated or damaged"):
        open_checkpoint(tmp_path)


@given(position=st.integers(0, 150), value=st.integers(0, 255))
def test_damaged_header_is_an_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    _write(folder, {"a": torch.randn(5), "b": torch.randn(5)})
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[position] = value
    file.write_bytes(data)
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError:
        return
    assert sum(tensor[...].nbytes for tensor in checkpoint.values()) == checkpoint.nbytes <= 40


def test_missing_shards_are_all_named(broken: Callable[[], Path]) -> None:
    folder = broken()
    first, second, *_ = sorted(folder.glob("model-*.safetensors"))
    first.unlink(), second.unlink()
    with pytest.raises(CheckpointError, match=f"2 file.*{first.name}, {second.name}"):
        open_checkpoint(folder)


def test_truncated_shard_is_named(broken: Callable[[], Path]) -> None:
    folder = broken()
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{shard.name} cannot be read"):
        open_checkpoint(folder)


def test_index_that_does_not_fit_the_files_names_every_tensor(broken: Callable[[], Path]) -> None:
    folder = broken()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names, files = list(index["weight_map"]), sorted(set(index["weight_map"].values()))
    unindexed = names[0]
    index["weight_map"].pop(unindexed)
    elsewhere = next(name for name, file in index["weight_map"].items() if file != files[-1])
    index["weight_map"] |= {"nowhere.weight": files[0], elsewhere: files[-1]}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert "nowhere.weight is in the index but in no file" in str(caught.value)
    assert f"{elsewhere} is in " in str(caught.value) and f"the index says {files[-1]}" in str(caught.value)
    assert f"{unindexed} is in " in str(caught.value) and "but not in the index" in str(caught.value)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    _write_shards(tmp_path, {"a": {"x": torch.ones(1), "y": torch.ones(1)}, "b": {"y": torch.ones(1)}})
    with pytest.raises(CheckpointError, match=r"y is stored twice: in .*00001-of-00002.* and in .*00002-of-00002"):
        open_checkpoint(tmp_path)


def test_stale_shard_of_an_earlier_save(broken: Callable[[], Path]) -> None:
    folder = broken()
    _write(folder, {"old": torch.ones(1)}, "model-00009-of-00009.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00009-of-00009.* is in the folder but not in the index"):
        open_checkpoint(folder)


def test_files_of_other_tools_are_not_stale(broken: Callable[[], Path]) -> None:
    folder = broken()
    for name in ("consolidated.safetensors", "adapter_model.safetensors", "model.fp16-00001-of-00002.safetensors"):
        _write(folder, {"other": torch.ones(1)}, name)
    assert "other" not in open_checkpoint(folder)


def test_shards_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "a-folder"
    _write(folder, {"x": torch.ones(1)}, "first.safetensors")
    _write(tmp_path, {"beside": torch.ones(1)}, "a-1-of-2.safetensors")
    _write_index(folder, {"x": "first.safetensors"})
    assert set(open_checkpoint(folder)) == {"x"}


def test_single_file_beside_an_index(broken: Callable[[], Path]) -> None:
    folder = broken()
    everything = {name: tensor[...] for name, tensor in open_checkpoint(folder).items()}
    _write(folder, everything)
    assert open_checkpoint(folder).files == [str(folder / "model.safetensors")]
    _write(folder, {"stale": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"two checkpoints: .* with 1 tensors and an index with 21"):
        open_checkpoint(folder)
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        open_checkpoint(folder)


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/model.safetensors", "inner/model.safetensors"])
def test_index_cannot_point_outside_its_folder(tmp_path: Path, place: str) -> None:
    _write(tmp_path, {"x": torch.ones(1)})
    _write_index(tmp_path / "inner", {"x": place})
    with pytest.raises(CheckpointError, match=f"points outside its folder: {place}"):
        open_checkpoint(tmp_path / "inner")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"metadata": {}}', '{"weight_map": ["x"]}', '{"weight_map": {"x": 1}}']
)
def test_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json is not a checkpoint index"):
        open_checkpoint(tmp_path)


def test_index_that_names_nothing(tmp_path: Path) -> None:
    _write_index(tmp_path, {})
    with pytest.raises(CheckpointError, match="names no tensor"):
        open_checkpoint(tmp_path)


def test_dtype_that_torch_does_not_have_is_named(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"123")
    with pytest.raises(CheckpointError, match=r"x .*F6_E2M3"):
        open_checkpoint(tmp_path)


@pytest.fixture
def broken(tiny_llama: Path, tmp_path: Path) -> Callable[[], Path]:
    """A copy of a sharded checkpoint, for a test to break."""
    return lambda: Path(shutil.copytree(tiny_llama, tmp_path / "broken"))


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, {"a": torch.randn(5)})

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("sparseautomodel.checkpoint.SafetensorsFile", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read, permission denied"):
        open_checkpoint(tmp_path)


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
