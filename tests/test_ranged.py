"""Ranges of files on a server: only what is asked for, again where it failed, and typed errors."""

from __future__ import annotations

import contextlib
import gc
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparseautomodel import ranged
from sparseautomodel.checkpoint import Reads
from sparseautomodel.ranged import ATTEMPTS, DownloadError, RemoteFile, remote_tensors
from sparseautomodel.safetensors_file import CheckpointError
from tests.range_server import Served, serve


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranged, "FIRST_WAIT", 0.0)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "a": torch.randn(8, 4),
        "b": torch.arange(6, dtype=torch.int64),
        "c": torch.randn(0, 3),
        "d": torch.ones(()),
    }


@pytest.fixture
def server(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Iterator[Served]:
    save_file(tensors, tmp_path / "model.safetensors")
    with serve(tmp_path) as served:
        yield served


def test_tensors_come_as_they_were_and_alone(server: Served, tensors: dict[str, torch.Tensor]) -> None:
    reads = Reads()
    found = remote_tensors(RemoteFile(f"{server.url}/model.safetensors"), reads)
    assert {name: (one.shape, one.dtype) for name, one in found.items()} == {
        name: (tuple(one.shape), one.dtype) for name, one in tensors.items()
    }
    header = server.nbytes()
    for name, want in tensors.items():
        assert torch.equal(found[name][...], want)
        assert reads.nbytes(name) == want.nbytes
    assert server.nbytes() - header == sum(one.nbytes for one in tensors.values())
    assert torch.equal(found["a"][2:5], tensors["a"][2:5])


@pytest.mark.parametrize("failures", [["503"], ["429", "500"], ["drop"], ["cut"], ["cut", "503", "drop", "cut"]])
def test_what_passes_is_tried_again(failures: list[str], server: Served, tensors: dict[str, torch.Tensor]) -> None:
    found = remote_tensors(RemoteFile(f"{server.url}/model.safetensors"), Reads())
    server.failures = list(failures)
    assert torch.equal(found["a"][...], tensors["a"])
    assert not server.failures


def test_goes_on_where_it_stopped(server: Served, tensors: dict[str, torch.Tensor]) -> None:
    found = remote_tensors(RemoteFile(f"{server.url}/model.safetensors"), Reads())
    before = server.nbytes()
    server.failures = ["cut", "cut"]
    assert torch.equal(found["a"][...], tensors["a"])
    assert server.nbytes() - before == tensors["a"].nbytes


@pytest.mark.parametrize("failure", ["503", "drop"])
def test_is_given_up_after_a_few_attempts(failure: str, server: Served) -> None:
    server.failures = [failure] * (ATTEMPTS + 3)
    with pytest.raises(
        DownloadError, match=rf"bytes 0 to 4 of {server.url}/model.safetensors did not come, {ATTEMPTS} "
    ):
        RemoteFile(f"{server.url}/model.safetensors").read(0, 4)
    assert len(server.failures) == 3


@pytest.mark.parametrize(
    ("failure", "message"),
    [("403", "1 attempt"), ("404", "1 attempt"), ("whole", "sends the whole file"), ("shifted", "the server sends 1-")],
)
def test_what_does_not_pass_is_not_tried_again(failure: str, message: str, server: Served) -> None:
    server.failures = [failure, "503"]
    with pytest.raises(DownloadError, match=message):
        RemoteFile(f"{server.url}/model.safetensors").read(0, 4)
    assert server.failures == ["503"]


def test_a_file_that_changes_meanwhile(server: Served) -> None:
    file = RemoteFile(f"{server.url}/model.safetensors")
    file.read(0, 4)
    server.tag = "second"
    with pytest.raises(DownloadError, match="was changed while it was read"):
        file.read(4, 8)


@pytest.mark.parametrize("failure", ["", "404", "shifted"])
def test_connections_are_closed_when_the_files_are_gone(failure: str, server: Served) -> None:
    client = ranged.new_client()
    pool = client._transport._pool  # type: ignore[attr-defined]
    files = [RemoteFile(f"{server.url}/model.safetensors", client=client) for _ in range(2)]
    server.failures = [failure]
    with contextlib.suppress(DownloadError):
        files[0].read(0, 4)
    files[1].read(0, 4)
    (held,) = pool.connections
    del client, files[0]
    assert not held.is_closed()
    files.clear()
    gc.collect()
    assert held.is_closed()


def test_no_server_at_all() -> None:
    with pytest.raises(DownloadError, match="did not come"):
        RemoteFile("http://127.0.0.1:9/model.safetensors").exists()


def test_exists(server: Served) -> None:
    assert RemoteFile(f"{server.url}/model.safetensors").exists()
    assert not RemoteFile(f"{server.url}/nothing").exists()
    server.failures = ["403"]
    with pytest.raises(DownloadError):
        RemoteFile(f"{server.url}/model.safetensors").exists()


def test_damaged_headers_are_named(tmp_path: Path, server: Served) -> None:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    texts = {
        "no-json": b"{" * 16,
        "no-dtype": json.dumps({"a": entry | {"dtype": "F31"}}).encode(),
        "other-length": json.dumps({"a": entry | {"shape": [5]}}).encode(),
        "truncated": json.dumps({"a": entry | {"shape": [999], "data_offsets": [0, 3996]}}).encode(),
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    (tmp_path / "endless").write_bytes(struct.pack("<Q", 1 << 40) + bytes(16))
    for name in (*texts, "endless"):
        with pytest.raises(CheckpointError, match=name):
            remote_tensors(RemoteFile(f"{server.url}/{name}"), Reads())
