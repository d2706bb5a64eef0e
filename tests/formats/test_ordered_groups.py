"""Groups in the order of activations (`weight_g_idx`): against compressed-tensors on the columns put in order."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from sparseautomodel import SparseAutoModelForCausalLM, oneshot, verify
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.quantization_config import with_order

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

IDS = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module", params=[(4, True), (4, False), (8, True), (3, True)], ids=str)
def ordered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint as older tools wrote it, and its dense weights: groups of columns in the order of an index, codes in
    the order of the model."""
    bits, symmetric = request.param
    folder, source = tmp_path_factory.mktemp("ordered"), request.getfixturevalue("tiny_llama")
    weights = {"num_bits": bits, "strategy": "group", "group_size": 16, "symmetric": symmetric}
    groups = {"all": {"targets": ["Linear"], "weights": weights}}
    entry = {"QuantizationModifier": {"config_groups": groups, "ignore": ["lm_head"]}}
    generator, model = torch.Generator().manual_seed(2), AutoModelForCausalLM.from_pretrained(source)
    orders = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            orders[name] = torch.randperm(module.in_features, generator=generator)
            module.weight.data = module.weight.data[:, orders[name]]
    model.save_pretrained(folder / "sorted")
    oneshot(folder / "sorted", {"modifiers": [entry]}, output=folder / "out")
    tensors = load_file(folder / "out" / "model.safetensors")
    config = json.loads((folder / "out" / "config.json").read_text())
    (scheme,) = QuantizationConfig.model_validate(config["quantization_config"]).config_groups.values()
    dense = {name: tensor for name, tensor in tensors.items() if not name.endswith(PARTS)}
    for name, order in orders.items():
        state = {part: tensors[f"{name}.{part}"] for part in NAMES if f"{name}.{part}" in tensors}
        compressor = BaseCompressor.get_value_from_registry("pack-quantized")
        back = torch.argsort(order)
        dense[f"{name}.weight"] = compressor.decompress(dict(state), scheme)["weight"][:, back]
        codes = unpacked(state["weight_packed"], bits, len(order))[:, back]
        tensors[f"{name}.weight_packed"] = packed(codes, bits, state["weight_packed"].shape[1])
        tensors[f"{name}.weight_g_idx"] = (back // 16).to(torch.int32)
    save_file(tensors, folder / "out" / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    (folder / "out" / "config.json").write_text(json.dumps(config))
    return folder / "out", dense


NAMES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
PARTS = tuple(f".{name}" for name in NAMES)


def unpacked(words: Tensor, bits: int, columns: int) -> Tensor:
    """Plain: bit by bit, low bits first, codes across the ends of words."""
    stream = ((words.long().unsqueeze(-1) >> torch.arange(32)) & 1).flatten(1)[:, : columns * bits]
    return (stream.unflatten(1, (columns, bits)) << torch.arange(bits)).sum(-1)


def packed(codes: Tensor, bits: int, words: int) -> Tensor:
    stream = ((codes.unsqueeze(-1) >> torch.arange(bits)) & 1).flatten(1)
    stream = torch.nn.functional.pad(stream, (0, 32 * words - stream.shape[1])).unflatten(1, (words, 32))
    value = (stream << torch.arange(32)).sum(-1)
    return torch.where(value >= 2**31, value - 2**32, value).to(torch.int32)


@pytest.mark.parametrize("execution", ["auto", "compressed", "dense"])
@torch.no_grad()
def test_it_runs_as_the_columns_in_order(ordered: tuple[Path, dict[str, Tensor]], execution: str) -> None:
    folder, dense = ordered
    model: Any = SparseAutoModelForCausalLM.from_pretrained(folder, execution=execution)
    reference = AutoModelForCausalLM.from_pretrained(folder.parent / "sorted")
    reference.load_state_dict(dense)
    for name, weight in dense.items():
        if name.endswith("_proj.weight"):
            assert torch.equal(model.get_submodule(name.removesuffix(".weight")).weight, weight)
    assert torch.equal(model(IDS).logits, reference(IDS).logits)
    if execution == "auto":
        kernels = set(model.load_report.kernels.values())
        assert all(kernel.startswith("portable") for kernel, _ in kernels)
        assert torch.equal(copy.deepcopy(model)(IDS).logits, model(IDS).logits)


def test_what_is_saved_is_what_was_loaded(ordered: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, _ = ordered
    SparseAutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert (
        json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"][
            "weights"
        ]["actorder"]
        == "group"
    )
    problems = verify(tmp_path).problems
    assert len(problems) == 1 and "the stock parser refuses quantization_config" in problems[0]


def test_an_index_of_minus_one_counts_for_nothing() -> None:
    """A7: older tools stored it where no order was used."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": 16}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    parts = storage.layout(with_order(scheme), (32, 64), torch.bfloat16)
    assert parts["weight_g_idx"] == ((64,), torch.int32)
    assert parts.keys() - storage.layout(scheme, (32, 64), torch.bfloat16).keys() == {"weight_g_idx"}
    tensors = {part: torch.zeros(shape, dtype=kind) for part, (shape, kind) in parts.items()}
    values = torch.randn(32, 64, dtype=torch.bfloat16)
    storage.encode(values, scheme, tensors, scale=values.view(32, 4, 16).abs().amax(-1) / 7.5)
    tensors["weight_g_idx"].fill_(-1)
    assert torch.equal(storage.decode(tensors, with_order(scheme)), storage.decode(tensors, scheme))
    tensors["weight_g_idx"].copy_(torch.arange(64) // 16)
    assert torch.equal(storage.decode(tensors, with_order(scheme)), storage.decode(tensors, scheme))
