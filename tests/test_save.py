from __future__ import annotations

import gc
import json
import re
import struct
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sparseautomodel import save as module
from sparseautomodel.checkpoint import LazyTensor, open_checkpoint
from sparseautomodel.safetensors_file import SAFETENSORS_DTYPES
from sparseautomodel.save import (
    COMPUTED_AHEAD,
    SIDE_FILES,
    copy_side_files,
    parse_size,
    write_tensors,
)

ROOT = Path(__file__).resolve().parents[1]


class Computed(LazyTensor):
    """A tensor that is made when it is sliced, and tells how many such are alive."""

    alive, most = 0, 0
    lock = threading.Lock()

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        values = make()
        super().__init__("computed", tuple(values.shape), values.dtype)
        self.make = make

    def __getitem__(self, index: Any) -> torch.Tensor:
        values = self.make()
        with Computed.lock:
            Computed.alive += 1
            Computed.most = max(Computed.most, Computed.alive)
        weakref.finalize(values, self._release)
        return values[index]

    @staticmethod
    def _release() -> None:
        with Computed.lock:
            Computed.alive -= 1


# Tensors


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(list(SAFETENSORS_DTYPES.values())), st.lists(st.integers(0, 5), max_size=3)),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 200),
)
def test_files_are_what_safetensors_reads_and_all_is_aligned(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, list[int]]], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("written")
    tensors = {f"t{number}": _random(shape, dtype) for number, (dtype, shape) in enumerate(kinds)}
    write_tensors({name: Computed(values.clone) for name, values in tensors.items()}, folder, limit)
    read = {name: values for file in folder.glob("*.safetensors") for name, values in load_file(file).items()}
    assert read.keys() == tensors.keys()
    for name, values in tensors.items():
        assert (read[name].dtype, read[name].shape) == (values.dtype, values.shape)
        assert torch.equal(read[name].view(-1).view(torch.uint8), values.view(-1).view(torch.uint8))
    for file in folder.glob("*.safetensors"):
        header, start = _header(file)
        assert start % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
        for entry in header.values():
            assert (start + entry["data_offsets"][0]) % SAFETENSORS_DTYPES[entry["dtype"]].itemsize == 0


def test_shards_are_within_their_limit_and_the_index_fits(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.randn(10 + number, 10) for number in range(12)}
    tensors["large"] = torch.randn(100, 10)
    write_tensors({name: Computed(values.clone) for name, values in tensors.items()}, tmp_path, 2000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    nbytes = sum(values.nbytes for values in tensors.values())
    assert index["metadata"] == {"total_size": nbytes, "total_parameters": nbytes // 4}
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    for file in files:
        content = load_file(file)
        assert {name for name, place in index["weight_map"].items() if place == file.name} == content.keys()
        assert sum(values.nbytes for values in content.values()) <= 2000 or list(content) == ["large"]
    assert set(open_checkpoint(tmp_path)) == tensors.keys()


@pytest.mark.parametrize("limit", [10_000, 10**9])
def test_transformers_reads_what_was_written(tiny_llama: Path, tmp_path: Path, limit: int) -> None:
    write_tensors(dict(open_checkpoint(tiny_llama)), tmp_path, limit)
    copy_side_files(tiny_llama, tmp_path)
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    expected = AutoModelForCausalLM.from_pretrained(tiny_llama).state_dict()
    assert all(torch.equal(values, expected[name]) for name, values in model.state_dict().items())


def test_every_tensor_is_reported_once_in_order(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    tensors = {name: Computed(lambda: torch.zeros(3, 3)) for name in ("c", "a", "b")}
    write_tensors(tensors, tmp_path, 40, lambda name, nbytes: told.append((name, nbytes)))
    assert told == [("c", 36), ("a", 36), ("b", 36)]


def test_save_never_gathers_the_model(tmp_path: Path) -> None:
    """F15: host memory in save is that of a few tensors, whatever the size of the model or of a shard."""
    gc.collect()
    Computed.alive = Computed.most = 0
    write_tensors({f"t{n}": Computed(lambda: torch.randn(50, 50)) for n in range(60)}, tmp_path, 10**9)
    assert 1 <= Computed.most <= COMPUTED_AHEAD + 2
    assert Computed.alive <= 1  # the loop's last one


def test_tensors_that_stay_as_they_are_pass_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir()
    tensors = {
        "wide": torch.randn(100, 40),
        "flat": torch.randn(999),
        "one": torch.tensor(1.0),
        "none": torch.empty(0, 9),
    }
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    sizes: list[int] = []
    write_at = module._write_at
    monkeypatch.setattr(module, "_write_at", lambda *given: sizes.append(len(given[1])) or write_at(*given))
    monkeypatch.setattr(module, "COPY_ROWS_NBYTES", 1000)
    checkpoint = open_checkpoint(tmp_path / "source")
    (tmp_path / "result").mkdir()
    write_tensors(dict(checkpoint), tmp_path / "result", 10**9)
    assert max(sizes[1:]) <= 1000
    result = load_file(tmp_path / "result" / "model.safetensors")
    assert all(torch.equal(result[name], values) for name, values in tensors.items())
    assert {times for times, _ in checkpoint.reads().values()} == {1}


def test_tensor_of_another_size_than_it_said_is_named(tmp_path: Path) -> None:
    wrong = Computed(lambda: torch.zeros(4))
    wrong.shape = (3,)
    with pytest.raises(RuntimeError, match="wrong came out 4 bytes longer"):
        write_tensors({"wrong": wrong, "other": Computed(lambda: torch.zeros(9))}, tmp_path, 10**9)


def test_failing_tensor_stops_the_work(tmp_path: Path) -> None:
    made: list[int] = []

    def make(number: int) -> torch.Tensor:
        made.append(number)
        if number == 2 and made.count(2) == 2:  # the first call asks for the shape
            raise ValueError("no such thing")
        return torch.zeros(2)

    tensors = {f"t{n}": Computed(lambda n=n: make(n)) for n in range(50)}
    before = threading.active_count()
    with pytest.raises(ValueError, match="no such thing"):
        write_tensors(tensors, tmp_path, 10**9)
    assert len(made) < 50 + 2 + COMPUTED_AHEAD + 2
    assert threading.active_count() == before


# Files beside the weights


def test_side_files_are_copied_and_nothing_of_an_earlier_run(tmp_path: Path) -> None:
    """F18: remote code, templates, tokenizer, processor and licenses go along; weights, recipes and reports do not."""
    wanted = [
        "modeling_x.py",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
        "tokenizer.json",
        "merges.txt",
        "LICENSE",
        "tokenizer_config.json",
        "preprocessor_config.json",
        "generation_config.json",
        "sentencepiece.bpe.model",
        "qwen.tiktoken",
        "modules.json",
        "1_Pooling/config.json",
        "LICENSE-llama.txt",
        "NOTICE.txt",
    ]
    left = [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "recipe.yaml",
        "compression_report.json",
        "README.md",
        "config.json",
        "quantize_config.json",
        "model.gguf",
        "onnx/model.onnx",
        "optimizer.pt",
        ".gitattributes",
        ".cache/huggingface/x.json",
        "consolidated.safetensors",
    ]
    source, result = tmp_path / "source", tmp_path / "result"
    for name in wanted + left:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    result.mkdir()
    assert sorted(copy_side_files(source, result)) == sorted(wanted)
    assert sorted(str(file.relative_to(result)) for file in result.rglob("*") if file.is_file()) == sorted(wanted)
    assert all((result / name).read_text() == name for name in wanted)


def test_side_files_of_a_subfolder_and_behind_links(tmp_path: Path) -> None:
    (tmp_path / "source" / "inner").mkdir(parents=True)
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "source" / "inner" / "tokenizer.json").symlink_to(tmp_path / "blob")
    (tmp_path / "source" / "vocab.json").write_text("of another model")
    (tmp_path / "result").mkdir()
    assert copy_side_files(tmp_path / "source", tmp_path / "result", subfolder="inner") == ["tokenizer.json"]
    copied = tmp_path / "result" / "tokenizer.json"
    assert copied.read_text() == "{}" and not copied.is_symlink()


def test_every_file_that_a_tokenizer_of_transformers_reads_is_copied() -> None:
    package = Path(transformers.__file__).parent / "models"
    entries = re.compile(r"^VOCAB_FILES_NAMES = \{(.*?)\}", re.DOTALL | re.MULTILINE)
    names = {
        name
        for file in package.glob("*/tokenization_*.py")
        for entry in entries.findall(file.read_text())
        for name in re.findall(r':\s*"([^"]+)"', entry)
    }
    assert len(names) > 10
    assert not [name for name in names if not any(Path(name).match(pattern) for pattern in SIDE_FILES)]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (123, 123),
        ("5GB", 5 * 10**9),
        ("6GiB", 6 * 2**30),
        ("1.5 MB", 1_500_000),
        ("10kB", 10_000),
        ("2KiB", 2048),
        ("7B", 7),
    ],
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["5", "five GB", "5 XB", "-1GB", "", "5GB or so"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="number of bytes or text such as '5GB'"):
        parse_size(text)


def _header(file: Path) -> tuple[dict[str, Any], int]:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length


def _random(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    highest = 2 if dtype == torch.bool else 256
    return torch.randint(0, highest, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)
