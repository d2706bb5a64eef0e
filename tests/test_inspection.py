"""What `inspect` says is compared with the files as safetensors reads them, and with slow plain code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from sparseautomodel import SparseAutoModelForCausalLM, oneshot
from sparseautomodel.checkpoint import StoredTensor
from sparseautomodel.inspection import GROUPS, inspect, kind_of, zeros_of
from sparseautomodel.masks import prune_mask, zero_outside


def test_layers_sizes_and_files_are_those_of_the_checkpoint(tiny_llama: Path) -> None:
    tensors = _tensors(tiny_llama)
    found = inspect(tiny_llama)
    matrices = {name.removesuffix(".weight"): value for name, value in tensors.items() if value.ndim == 2}
    assert {layer.name: layer.shape for layer in found.layers} == {
        name: tuple(value.shape) for name, value in matrices.items()
    }
    assert {layer.name: layer.nbytes for layer in found.layers} == {
        name: value.nbytes for name, value in matrices.items()
    }
    assert {layer.name: layer.zeros for layer in found.layers} == {
        name: (value == 0).double().mean().item() for name, value in matrices.items()
    }
    assert found.nbytes == sum(value.nbytes for value in tensors.values())
    assert found.parameters == sum(value.numel() for value in tensors.values())
    assert found.files == {file.name: file.stat().st_size for file in tiny_llama.glob("*.safetensors")}
    assert (found.model_class, found.quant_method, found.formats) == ("LlamaForCausalLM", None, ("dense",))
    assert {layer.scheme for layer in found.layers} == {"bfloat16"}
    assert {layer.role for layer in found.layers} == {"block", "head", "embedding"}


def test_without_values_no_tensor_is_read(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    whole = inspect(tiny_llama)
    monkeypatch.setattr(StoredTensor, "__getitem__", refuse)
    found = inspect(tiny_llama, values=False)
    assert not found.values_read and whole.values_read
    assert all(layer.zeros is None and layer.structure is None for layer in found.layers)
    assert [(layer.name, layer.nbytes) for layer in found.layers] == [
        (layer.name, layer.nbytes) for layer in whole.layers
    ]
    with pytest.raises(AssertionError, match="a tensor was read"):
        inspect(tiny_llama)


def test_two_of_four_is_found_in_a_dense_result(tiny_llama: Path, tmp_path: Path) -> None:
    oneshot(tiny_llama, "2of4", output=tmp_path / "sparse")
    found = inspect(tmp_path / "sparse")
    blocks = [layer for layer in found.layers if layer.role == "block"]
    assert len(blocks) == 14
    assert {(layer.format, layer.zeros, layer.structure) for layer in blocks} == {("dense", 0.5, "2:4")}
    assert {layer.structure for layer in found.layers if layer.role != "block"} == {None}


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_mixtral"])
def test_zeros_of_compressed_layers_are_those_of_the_decoded_values(
    model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    oneshot(request.getfixturevalue(model), "2of4-w4a16", output=tmp_path / "small")
    found = inspect(tmp_path / "small")
    assert (found.quant_method, found.formats) == ("compressed-tensors", ("dense", "pack-quantized"))
    packed = {layer.name: layer for layer in found.layers if layer.format == "pack-quantized"}
    assert {layer.scheme for layer in packed.values()} == {"int4 group 64"}
    assert {layer.structure for layer in packed.values()} == {"2:4"}
    dense = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "small", execution="dense").state_dict()
    compared = [name for name in packed if f"{name}.weight" in dense]
    assert len(compared) >= 8  # experts are one tensor in the model
    for name in compared:
        assert packed[name].zeros == (dense[f"{name}.weight"] == 0).double().mean().item()
    tensors = _tensors(tmp_path / "small")
    for name, layer in packed.items():
        assert layer.nbytes == sum(value.nbytes for key, value in tensors.items() if key.startswith(f"{name}."))


def test_each_expert_is_a_layer_and_one_kind(tiny_mixtral: Path) -> None:
    found = inspect(tiny_mixtral)
    experts = [layer.name for layer in found.layers if ".experts." in layer.name]
    assert len(experts) == 2 * 4 * 3
    _, rows = found.table()
    assert [row[1] for row in rows if ".experts.*." in row[0]] == ["8", "8", "8"]
    _, rows = found.table(each=True)
    assert [row[0] for row in rows] == [layer.name for layer in found.layers]


def test_a_transposed_layer_has_its_shape_as_a_linear(tiny_gpt2: Path) -> None:
    found = {layer.name: layer for layer in inspect(tiny_gpt2).layers}
    stored = _tensors(tiny_gpt2)
    (name,) = (name for name in found if name.endswith("h.0.mlp.c_fc"))
    assert found[name].shape == tuple(reversed(stored[f"{name}.weight"].shape))
    assert found[name].nbytes == stored[f"{name}.weight"].nbytes + stored[f"{name}.bias"].nbytes


def test_another_method_is_named_and_judged_by_nobody(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "foreign")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (folder / "config.json").write_text(json.dumps(config))
    found = inspect(folder)
    assert (found.quant_method, found.consumers) == ("gptq", ())
    assert any("gptq" in note and "not listed" in note for note in found.notes())


def test_what_people_read(tiny_llama: Path, tmp_path: Path) -> None:
    oneshot(tiny_llama, "w4a16", output=tmp_path / "small")
    found = inspect(tmp_path / "small")
    assert "LlamaForCausalLM, compressed-tensors: dense, pack-quantized" in found.heading()
    assert "1 file, " in found.heading()
    headers, rows = found.table()
    row = dict(zip(headers, next(row for row in rows if row[0].endswith("up_proj")), strict=True))
    shares = [layer.zeros for layer in found.layers if layer.name.endswith("up_proj")]
    assert row["layer"] == "model.layers.*.mlp.up_proj"
    assert (row["count"], row["shape"], row["stored as"]) == ("2", "128 x 64", "int4 group 64")
    assert row["zeros"] == f"{min(shares) * 100:.1f}-{max(shares) * 100:.1f}%"
    assert any(note.startswith("vLLM") for note in found.notes())
    assert "not looked for" in "".join(inspect(tiny_llama, values=False).notes())


def test_to_dict_is_json(tiny_mixtral: Path) -> None:
    found = inspect(tiny_mixtral)
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["layers"][0]["name"] == found.layers[0].name
    assert document["nbytes"] == document["other_nbytes"] + sum(layer["nbytes"] for layer in document["layers"])


@pytest.mark.parametrize("n, m", [(1, 4), (2, 4), (3, 4), (2, 8), (4, 8), (8, 16), (3, 16)])
def test_a_pattern_is_found_as_it_was_made(n: int, m: int) -> None:
    values = torch.randn(64, 64)
    zero_outside(values, prune_mask(values, None, (n, m)))
    share, structure = zeros_of(values.split(32))
    assert structure == f"{n}:{m}"
    assert share == 1 - n / m


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.75, 0.9, 0.99])
def test_zeros_without_a_pattern_make_none(sparsity: float) -> None:
    for rows in (16, 64, 256):
        values = torch.ones(rows, 64) * (torch.rand(rows, 64) >= sparsity)
        assert zeros_of([values])[1] is None


def test_no_zeros_and_only_zeros_are_no_pattern() -> None:
    assert zeros_of([torch.ones(4, 16)]) == (0.0, None)
    assert zeros_of([torch.zeros(4, 16)]) == (1.0, None)
    assert zeros_of([torch.tensor([[0.0, -0.0, 1.0, 2.0, 3.0, 0.0]])]) == (0.5, None)  # 6 columns are no groups of 4
    assert zeros_of([]) == (0.0, None)


@given(st.integers(1, 6), st.sampled_from([4, 8, 12, 16, 32, 48]), st.integers(1, 3), st.randoms(use_true_random=False))
def test_zeros_of_is_what_plain_code_counts(rows, columns, step, random) -> None:
    keep = random.choice([0.1, 0.3, 0.5, 0.9])
    matrix = [[float(random.random() < keep) for _ in range(columns)] for _ in range(rows)]
    kept = []
    for m in (m for m in GROUPS if columns % m == 0):
        counts = [sum(row[at : at + m]) for row in matrix for at in range(0, columns, m)]
        n = int(max(counts))
        if 0 < n < m and counts.count(n) * 2 >= len(counts):
            kept.append((n / m, m, n))
    _, m, n = min(kept, default=(0, 0, 0))
    expected = f"{n}:{m}" if kept else None
    zeros = sum(value == 0 for row in matrix for value in row) / (rows * columns)
    assert zeros_of(torch.tensor(matrix).split(step)) == (zeros, expected)


def test_kind_of_replaces_every_index() -> None:
    assert kind_of("model.layers.7.mlp.experts.31.w1") == "model.layers.*.mlp.experts.*.w1"
    assert kind_of("classifier.0") == "classifier.*"
    assert kind_of("h2.w1") == "h2.w1"


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    result = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            result |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return result
