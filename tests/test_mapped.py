from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from sparseautomodel.checkpoint import open_files
from sparseautomodel.mapped import MappedFiles


def test_tensors_of_a_file_are_views_on_it(tmp_path: Path) -> None:
    values = {"a": torch.randn(300, 200), "small": torch.ones(3)}
    save_file(values, tmp_path / "x.safetensors")
    checkpoint, files = open_files([str(tmp_path / "x.safetensors")]), MappedFiles()
    view = files.stored(checkpoint["a"])
    assert view is not None and torch.equal(view, values["a"]) and files.holds(view)
    assert files.stored(checkpoint["small"]) is None  # it is read
    assert checkpoint.reads() == {"a": (1, values["a"].nbytes), "small": (0, 0)}


def test_other_tensors_are_kept_in_a_file() -> None:
    files = MappedFiles()
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32):
        tensor = torch.randn(300, 300).to(dtype)
        kept = files.keep(tensor)
        assert files.holds(kept) and torch.equal(kept.view(torch.uint8), tensor.view(torch.uint8))
        assert files.keep(kept) is kept
    small = torch.ones(4)
    assert files.keep(small) is small


def test_pages_come_back() -> None:
    files = MappedFiles()
    tensors = [torch.randn(500, 100) for _ in range(3)]
    kept = [files.keep(tensor) for tensor in tensors]
    runs = files.runs(kept)
    assert len(runs) == 1 and runs[0][1] >= sum(tensor.nbytes for tensor in tensors)
    for bring in (files.bring_first, files.bring):
        files.drop(runs)
        bring(runs)
        assert all(torch.equal(a, b) for a, b in zip(kept, tensors, strict=True))
    files.rest()
    assert all(torch.equal(a, b) for a, b in zip(kept, tensors, strict=True))
