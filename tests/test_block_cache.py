"""Blocks that are kept on disk: read back alone, remade when damaged, never mistaken for others."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparseautomodel import load_blocks
from sparseautomodel.block_cache import BlockCache, default_folder
from sparseautomodel.checkpoint import Reads, StoredTensor
from sparseautomodel.stage import Stage

W4A16 = [{"QuantizationModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W4A16", "group_size": 32}}]
W8A16 = [{"QuantizationModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W8A16", "group_size": 32}}]
FACTS = {"unit": "model.layers.0", "source": {"file": ["place", 12, 3]}}


def _tensors() -> dict[str, StoredTensor]:
    values = {"a": torch.arange(12, dtype=torch.int32), "b": torch.randn(3, 4).to(torch.bfloat16)}
    return {
        name: StoredTensor(name, tuple(value.shape), value.dtype, "file", value, Reads())
        for name, value in values.items()
    }


def test_entries_come_back_under_their_facts_alone(tmp_path: Path) -> None:
    cache, tensors = BlockCache(tmp_path / "cache"), _tensors()
    assert cache.load(FACTS) is None
    stored = cache.store(FACTS, tensors)
    found = cache.load(FACTS)
    assert stored is not None
    assert found is not None
    for name, tensor in tensors.items():
        assert torch.equal(found[name][...], tensor[...])
        assert torch.equal(stored[name][...], tensor[...])
    assert cache.load(FACTS | {"unit": "model.layers.1"}) is None
    assert cache.load(FACTS | {"source": {"file": ["place", 12, 4]}}) is None
    again = cache.store(FACTS, tensors)  # another process was faster
    assert again is not None


@pytest.mark.parametrize("damage", ["flip", "cut", "no-tensors", "no-json", "other-facts"])
def test_damaged_entries_are_said_and_removed(damage: str, tmp_path: Path) -> None:
    cache = BlockCache(tmp_path)
    cache.store(FACTS, _tensors())
    (entry,) = tmp_path.iterdir()
    data = bytearray((entry / "model.safetensors").read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        (entry / "model.safetensors").write_bytes(data)
    elif damage == "cut":
        (entry / "model.safetensors").write_bytes(data[:-3])
    elif damage == "no-tensors":
        (entry / "model.safetensors").unlink()
    else:
        (entry / "entry.json").write_text("{" if damage == "no-json" else '{"facts": {}, "crc32": 0}')
    with pytest.warns(UserWarning, match="is damaged"):
        assert cache.load(FACTS) is None
    assert not entry.exists()


def test_a_disk_that_takes_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(UserWarning, match="blocks are not kept in"):
        assert BlockCache(tmp_path / "file").store(FACTS, _tensors()) is None


def test_failed_store_leaves_nothing(tmp_path: Path) -> None:
    class Broken(StoredTensor):
        def __getitem__(self, index: object) -> torch.Tensor:
            raise RuntimeError("no values")

    broken = Broken("a", (3,), torch.float32, "file", None, Reads())
    with pytest.raises(RuntimeError, match="no values"):
        BlockCache(tmp_path).store(FACTS, {"a": broken})
    assert not list(tmp_path.iterdir())


def test_second_start_reads_packed_bytes_only(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of("llama")
    first = load_blocks(folder, range(0, 2), W4A16, block_cache=tmp_path)
    second = load_blocks(folder, range(1, 3), W4A16, block_cache=tmp_path)
    third = load_blocks(folder, range(0, 2), W4A16, block_cache=tmp_path)
    assert _same(first, third)
    dense = {name for name in first.load_report.reads if name.endswith("proj.weight")}
    assert {".".join(name.split(".")[:3]) for name in dense} == {"model.layers.0", "model.layers.1"}
    assert {name.split(".")[2] for name in second.load_report.reads if name.endswith("proj.weight")} == {"2"}
    assert not [name for name in third.load_report.reads if name.endswith("proj.weight")]
    packed = sum(one.nbytes for one in third.model.parameters())
    assert third.load_report.nbytes <= packed + 8 * len(third.load_report.reads) * 2  # the shapes, two int64


def test_what_is_kept_depends_on_recipe_and_source(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folder_of("llama"), tmp_path / "copy"))
    four = load_blocks(folder, range(1, 2), W4A16, block_cache=tmp_path / "cache")
    eight = load_blocks(folder, range(1, 2), W8A16, block_cache=tmp_path / "cache")
    assert eight.nbytes > four.nbytes
    other = folder_of("llama-tied")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    for file in other.iterdir():
        shutil.copy(file, folder)
    changed = load_blocks(folder, range(1, 2), W4A16, block_cache=tmp_path / "cache")
    assert _same(changed, load_blocks(other, range(1, 2), W4A16, block_cache=False))


def test_damage_is_repaired_by_a_load(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of("llama")
    first = load_blocks(folder, range(1, 2), W4A16, block_cache=tmp_path)
    (entry,) = tmp_path.iterdir()
    data = bytearray((entry / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (entry / "model.safetensors").write_bytes(data)
    with pytest.warns(UserWarning, match="is damaged"):
        assert _same(load_blocks(folder, range(1, 2), W4A16, block_cache=tmp_path), first)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load_blocks(folder, range(1, 2), W4A16, block_cache=tmp_path)


def test_local_dense_blocks_are_not_kept_twice(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    load_blocks(folder_of("llama"), range(1, 2), block_cache=tmp_path / "cache")
    load_blocks(folder_of("llama"), range(1, 2), W4A16, block_cache=False)
    assert not (tmp_path / "cache").exists()


def test_default_is_beside_the_cache_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "sparseautomodel" / "blocks"


def _same(one: Stage, other: Stage) -> bool:
    pairs = zip(one.model.state_dict().items(), other.model.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
