"""Where the files of a checkpoint are: a folder, the cache of a hub, a server. None is opened before it is needed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from sparseautomodel import load_blocks, ranged, sources
from sparseautomodel.ranged import DownloadError
from sparseautomodel.safetensors_file import CheckpointError
from sparseautomodel.sources import fetch_configs, is_url, open_source
from tests.block_families import full_model, outputs
from tests.range_server import serve

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

W4A16 = [{"QuantizationModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W4A16", "group_size": 32}}]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranged, "FIRST_WAIT", 0.0)


def test_a_folder_opens_what_is_asked_for(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    source = open_source(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    checkpoint = source.open([name])
    assert set(checkpoint) == {name}
    assert [os.path.basename(file) for file in checkpoint.files] == [source.files[name]]
    assert torch.equal(checkpoint[name][...], AutoModelForCausalLM.from_pretrained(folder).get_parameter(name))
    assert not source.is_remote([name])
    (version,) = source.versions([name]).values()
    assert version[1] == os.path.getsize(checkpoint.files[0])


def test_single_files_and_pickled_files(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder_of("llama"))
    model.save_pretrained(tmp_path / "single")
    (tmp_path / "pickled").mkdir()
    shutil.copy(tmp_path / "single" / "config.json", tmp_path / "pickled")
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    hidden, _ = outputs(model, torch.arange(5)[None])
    for folder in ("single", "pickled"):
        with torch.no_grad():
            assert torch.equal(load_blocks(tmp_path / folder, range(1, 2))(hidden[0]), hidden[1])


@pytest.mark.parametrize("weight_map", [{}, {"a": "../other.safetensors"}])
def test_bad_indexes_are_refused(weight_map: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index\.json (points outside|names no tensor)"):
        open_source(tmp_path)


def test_tensor_that_its_file_does_not_hold(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folder_of("llama"), tmp_path / "copy"))
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = next(
        one for one in files if one != index["weight_map"]["model.norm.weight"]
    )
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is in the index but not in"):
        open_source(folder).open(["model.norm.weight"])


@pytest.mark.parametrize("shards", [True, False])
def test_blocks_from_a_server(shards: bool, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of("llama")
    if not shards:
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "single")
        folder = tmp_path / "single"
    hidden, _ = outputs(full_model("llama", folder, None), torch.arange(5)[None])
    with serve(folder) as served:
        served.failures = ["", "503", "", "cut"]
        stage = load_blocks(served.url, range(1, 2), block_cache=tmp_path / "cache")
        with torch.no_grad():
            assert torch.equal(stage(hidden[0]), hidden[1])
        own = sum(one.nbytes for one in stage.model.parameters())
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"] if shards else {}
        mine = {file for name, file in index.items() if ".layers.1." in name} or {"model.safetensors"}
        assert {file for file, start, _ in served.requests if file.endswith(".safetensors") and start} == mine
        header = sum(length for file, start, length in served.requests if file in mine and start <= 8)
        assert served.nbytes() - header == own
        served.requests.clear()
        again = load_blocks(served.url, range(1, 2), block_cache=tmp_path / "cache")
        with torch.no_grad():
            assert torch.equal(again(hidden[0]), hidden[1])
        assert served.nbytes() < header + 64  # no weights
        packed = load_blocks(served.url, range(1, 2), W4A16, block_cache=False)
        local = load_blocks(folder, range(1, 2), W4A16, block_cache=False)
        assert all(
            torch.equal(one, other)
            for one, other in zip(packed.model.parameters(), local.model.parameters(), strict=True)
        )


def test_what_a_server_does_not_have(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folder_of("llama"), tmp_path / "copy"))
    with serve(folder) as served:
        for file in folder.glob("*.safetensors"):
            file.unlink()
        with pytest.raises(CheckpointError, match=r"the index of http.* names model-0.* which is not there"):
            load_blocks(served.url, range(1, 2), block_cache=False)
        (folder / "model.safetensors.index.json").unlink()
        with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor its index"):
            load_blocks(served.url, range(1, 2), block_cache=False)
        (folder / "config.json").unlink()
        with pytest.raises(DownloadError, match=r"must be that of a folder with config\.json"):
            load_blocks(served.url, range(1, 2), block_cache=False)


def test_configs_are_fetched_to_a_folder_that_goes_away(folder_of: Callable[[str], Path]) -> None:
    with serve(folder_of("llama")) as served, fetch_configs(served.url) as folder:
        assert {path.name for path in Path(folder).iterdir()} == {"config.json", "generation_config.json"}
    assert not Path(folder).exists()
    assert is_url("https://server/folder")
    assert not is_url("organization/model")


def test_repository_from_its_cache_and_the_rest_by_ranges(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that is in the cache is read there; one that is not is fetched in part, unless offline."""
    folder, commit = folder_of("llama"), "0" * 40
    snapshot = tmp_path / "models--tiny--llama" / "snapshots" / commit
    shutil.copytree(folder, snapshot)
    (tmp_path / "models--tiny--llama" / "refs").mkdir()
    (tmp_path / "models--tiny--llama" / "refs" / "main").write_text(commit)
    names = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("up", "down")]
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index[names[0]] != index[names[1]]
    whole = open_source("tiny/llama", cache_dir=str(tmp_path))
    assert not whole.is_remote(names)
    (snapshot / index[names[1]]).unlink()
    offline = open_source("tiny/llama", cache_dir=str(tmp_path))
    with pytest.raises(CheckpointError, match=f"names {index[names[1]]}, which is not there"):
        offline.open(names)
    with serve(folder) as served:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(sources, "hf_hub_url", lambda name, file, **_: f"{served.url}/{file}")
        (snapshot / "model.safetensors").write_bytes((folder / index[names[0]]).read_bytes())
        (snapshot / "model.safetensors").unlink()
        source = open_source("tiny/llama", cache_dir=str(tmp_path))
        checkpoint = source.open(names)
        assert source.is_remote(names)
        assert not source.is_remote(names[:1])
        for name in names:
            assert torch.equal(checkpoint[name][...], AutoModelForCausalLM.from_pretrained(folder).get_parameter(name))
        assert {file for file, _, _ in served.requests} == {index[names[1]]}
