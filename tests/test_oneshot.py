"""`oneshot` from files to files: every shipped recipe through the real entry point."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
)
from transformers.quantizers.auto import AutoQuantizationConfig

from sparseautomodel import Recipe, SparseAutoModelForCausalLM, oneshot, plan, verify
from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.consumers import TRANSFORMERS
from sparseautomodel.recipe import shipped
from sparseautomodel.report import Report

SHIPPED = [name for name in shipped() if not any(modifier.needs_data for modifier in Recipe.load(name).modifiers)]
QUANTIZING = [name for name in SHIPPED if name != "2of4"]
TEXT = torch.tensor([[*range(1, 250, 7)]])

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what the plan says, tested with the plan

# What compressed-tensors had before its latest fields; parsers of servers refuse what they do not know.
CONFIG_FIELDS = {"quant_method", "quantization_status", "format", "config_groups", "ignore"}
GROUP_FIELDS = {"targets", "weights", "input_activations"}
ARGS_FIELDS = {"num_bits", "type", "symmetric", "strategy", "dynamic", "group_size", "block_structure"}


Compressed = Callable[[str], tuple[Path, Report]]


@pytest.fixture(scope="module")
def wide_llama(save_model: Callable[[PreTrainedConfig], Path], tiny_llama: Path) -> Path:
    """A Llama whose layers every shipped recipe divides."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    return save_model(LlamaConfig.from_pretrained(tiny_llama, **sizes, attention_bias=True))


@pytest.fixture(scope="module")
def compressed(wide_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Compressed:
    """The folder and the report of a shipped recipe, made once."""
    made: dict[str, tuple[Path, Report]] = {}

    def make(recipe: str) -> tuple[Path, Report]:
        if recipe not in made:
            output = tmp_path_factory.mktemp("outputs") / recipe
            made[recipe] = output, oneshot(wide_llama, recipe, output=output)
        return made[recipe]

    return make


@pytest.mark.parametrize("recipe", SHIPPED)
def test_every_saved_layout_opens_in_stock_transformers(compressed: Compressed, recipe: str) -> None:
    """F1: what is written loads with no missing and no unexpected key, and computes what ours computes."""
    output, _ = compressed(recipe)
    consumers = {consumer.name: consumer for consumer in plan(output).consumers}
    assert consumers[TRANSFORMERS].reads
    ours = SparseAutoModelForCausalLM.from_pretrained(output, execution="compressed")
    stock, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(info.values())
    assert (ours.dtype, stock.dtype) == (torch.bfloat16, torch.bfloat16)
    with torch.no_grad():
        own, other = ours(TEXT).logits.float(), stock(TEXT).logits.float()
    assert (own - other).abs().max() <= 2**-7 * other.abs().max()
    assert own.isfinite().all() and own.std() > 0.1


@pytest.mark.parametrize("recipe", SHIPPED)
def test_each_tensor_is_read_exactly_once(compressed: Compressed, recipe: str) -> None:
    _, report = compressed(recipe)
    assert len(report.reads) == 29 and {times for times, _ in report.reads.values()} == {1}


@pytest.mark.parametrize("recipe", SHIPPED)
def test_result_is_in_order_also_against_its_source(compressed: Compressed, wide_llama: Path, recipe: str) -> None:
    output, report = compressed(recipe)
    verify(output, against=wide_llama).raise_for_problems()
    result, source = open_checkpoint(output), open_checkpoint(wide_llama)
    assert (result.nbytes, source.nbytes) == (report.nbytes_after, report.nbytes_before)
    for name in set(source) & set(result):
        if not name.endswith("proj.weight"):
            assert torch.equal(result[name][...], source[name][...])


@pytest.mark.parametrize("recipe", SHIPPED)
def test_load_with_recipe_equals_load_of_what_was_saved(compressed: Compressed, wide_llama: Path, recipe: str) -> None:
    output, _ = compressed(recipe)
    saved = SparseAutoModelForCausalLM.from_pretrained(output)
    direct = SparseAutoModelForCausalLM.from_pretrained(wide_llama, recipe=recipe)
    expected = saved.state_dict()
    assert direct.state_dict().keys() == expected.keys()
    assert all(torch.equal(values, expected[name]) for name, values in direct.state_dict().items())
    with torch.no_grad():
        assert torch.equal(direct(TEXT).logits, saved(TEXT).logits)


# config.json


@pytest.mark.parametrize("recipe", SHIPPED)
def test_fields_that_older_parsers_refuse_are_left_out(compressed: Compressed, recipe: str) -> None:
    """F3: no field beyond those that were there before the latest release, unless the scheme cannot do without."""
    output, _ = compressed(recipe)
    config = json.loads((output / "config.json").read_text()).get("quantization_config")
    if recipe == "2of4":
        assert config is None
        return
    assert config.keys() <= CONFIG_FIELDS
    for group in config["config_groups"].values():
        assert group.keys() <= GROUP_FIELDS
        extra = {"scale_dtype"} if config["format"] in ("nvfp4-pack-quantized", "mxfp4-pack-quantized") else set()
        for args in (group["weights"], group.get("input_activations", {})):
            assert args.keys() <= ARGS_FIELDS | extra
            assert None not in args.values()


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_config_is_parsed_back_by_the_stock_class(compressed: Compressed, recipe: str) -> None:
    """F4: one None or unknown value and the other side refuses the file."""
    output, _ = compressed(recipe)
    entry = AutoConfig.from_pretrained(output).quantization_config
    parsed = AutoQuantizationConfig.from_dict(dict(entry)).quantization_config
    (group,) = parsed.config_groups.values()
    assert group.targets == ["Linear"] and parsed.ignore == ["lm_head"]
    assert str(parsed.quantization_status.value) == "compressed"


@pytest.mark.parametrize("recipe", SHIPPED)
def test_sparsity_is_plain_zeros_and_never_a_sparse_format(compressed: Compressed, recipe: str) -> None:
    """F12, F13: no bitmask tensor, and nothing in `sparsity_config`, which servers refuse whatever it holds."""
    output, report = compressed(recipe)
    assert "sparsity_config" not in (output / "config.json").read_text()
    parts = {name.rpartition(".")[2] for name in open_checkpoint(output)}
    assert parts <= {"weight", "bias", "weight_packed", "weight_scale", "weight_shape", "weight_global_scale"}
    assert set(report.structures.values()) == ({"2:4"} if "2of4" in recipe else set())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16", "torch_dtype": None}, torch.bfloat16),
        ({"torch_dtype": None}, torch.bfloat16),
        ({}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
    ],
    ids=str,
)
def test_dtype_is_written_under_both_names(
    tiny_llama: Path, tmp_path: Path, given: dict[str, Any], expected: torch.dtype
) -> None:
    """F23: a dtype that is null or absent is that of the tensors, so that no consumer guesses."""
    source = _copy(tiny_llama, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config.pop("dtype"), config.pop("torch_dtype", None)
    (source / "config.json").write_text(json.dumps(config | given))
    oneshot(source, "w8a8-dynamic", output=tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    name = str(expected).removeprefix("torch.")
    assert config["dtype"] == config["torch_dtype"] == name
    for loader in (AutoModelForCausalLM, SparseAutoModelForCausalLM):
        assert loader.from_pretrained(tmp_path / "out").dtype == expected


# Tensors


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_files_hold_plain_tensors_that_any_reader_of_safetensors_opens(compressed: Compressed, recipe: str) -> None:
    """F22: no tensor subclass, no metadata that a reader would need."""
    output, _ = compressed(recipe)
    tensors = load_file(output / "model.safetensors")
    assert {type(values) for values in tensors.values()} == {torch.Tensor}
    save_file(tensors, output.parent / f"{recipe}.safetensors", metadata={"format": "pt"})
    again = load_file(output.parent / f"{recipe}.safetensors")
    assert all(torch.equal(values.view(torch.uint8), again[name].view(torch.uint8)) for name, values in tensors.items())


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_auxiliary_tensors_have_their_defined_values(compressed: Compressed, recipe: str) -> None:
    """A7: no activation order, so no `weight_g_idx`; what else lies beside a weight is what the format says."""
    output, _ = compressed(recipe)
    model = SparseAutoModelForCausalLM.from_pretrained(output)
    layer = model.model.layers[1].mlp.down_proj
    names = {name for name, _ in layer.named_parameters()}
    assert not names & {"weight_g_idx", "weight_zero_point"}
    if "weight_shape" in names:
        assert layer.weight_shape.tolist() == [128, 256]
    if "weight_global_scale" in names:
        assert layer.weight_global_scale.shape == (1,) and layer.weight_global_scale > 1


@pytest.mark.parametrize("recipe", ["w4a16", "w8a8-dynamic", "2of4"])
@pytest.mark.parametrize("kind", ["none", "real", "zero", "attention only"])
def test_module_has_a_bias_where_the_source_had_one(
    save_model: Callable[[PreTrainedConfig], Path], tiny_llama: Path, tmp_path: Path, kind: str, recipe: str
) -> None:
    """A8: never a random bias, never a lost one, and a bias of zeros is still a bias."""
    attention, mlp = kind != "none", kind in ("real", "zero")
    config = LlamaConfig.from_pretrained(tiny_llama, attention_bias=attention, mlp_bias=mlp)
    source = _copy(save_model(config), tmp_path / "source")
    if kind == "zero":
        for file in source.glob("*.safetensors"):
            tensors = load_file(file)
            save_file({name: values * (not name.endswith("bias")) for name, values in tensors.items()}, file)
    oneshot(source, recipe, output=tmp_path / "out")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    biases = {name for name in before if name.endswith("bias")}
    assert {name for name in after if name.endswith("bias")} == biases
    assert len(biases) == {"none": 0, "real": 14, "zero": 14, "attention only": 8}[kind]
    for loader in (SparseAutoModelForCausalLM, AutoModelForCausalLM):
        state = loader.from_pretrained(tmp_path / "out").state_dict()
        assert {name for name in state if name.endswith("bias")} == biases
        assert all(torch.equal(state[name], before[name][...]) for name in biases)


def test_draft_heads_are_kept_and_named_in_ignore(wide_llama: Path, tmp_path: Path) -> None:
    """What transformers would drop at a load and a save, a server still uses."""
    source = _copy(wide_llama, tmp_path / "source")
    extra = {
        "mtp.layers.0.weight": torch.randn(128, 128).bfloat16(),
        "model.layers.2.eh_proj.weight": torch.randn(128, 256).bfloat16(),
        "model.layers.2.mlp.up_proj.weight": torch.randn(256, 128).bfloat16(),
        "model.layers.2.enorm.weight": torch.randn(128).bfloat16(),
    }
    _add(source, extra)
    oneshot(source, "w4a16", output=tmp_path / "out")
    result = open_checkpoint(tmp_path / "out")
    assert all(torch.equal(result[name][...], values) for name, values in extra.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {"lm_head", "mtp.layers.0", "model.layers.2.eh_proj", "model.layers.2.mlp.up_proj"} == set(config["ignore"])
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert set(model.load_report.unread) == set(extra)
    verify(tmp_path / "out", against=source).raise_for_problems()


def test_tensor_that_nothing_explains_is_refused(wide_llama: Path, tmp_path: Path) -> None:
    source = _copy(wide_llama, tmp_path / "source")
    _add(source, {"model.layers.7.mlp.up_proj.weight": torch.randn(256, 128).bfloat16()})
    with pytest.raises(ValueError, match=r"no place for model\.layers\.7\.mlp\.up_proj\.weight"):
        oneshot(source, "w4a16", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_and_progress_do_not_change_the_tensors(
    compressed: Compressed, wide_llama: Path, tmp_path: Path
) -> None:
    whole, _ = compressed("nvfp4a16")
    oneshot(wide_llama, "nvfp4a16", output=tmp_path / "out", max_shard_size="20kB")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 5
    expected, found = open_checkpoint(whole), open_checkpoint(tmp_path / "out")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name][...], expected[name][...]) for name in expected)


def test_result_does_not_depend_on_the_number_of_threads(
    compressed: Compressed, wide_llama: Path, tmp_path: Path
) -> None:
    before = torch.get_num_threads()
    for count in (1, 5):
        torch.set_num_threads(count)
        try:
            oneshot(wide_llama, "w4a16-mse", output=tmp_path / str(count))
            assert torch.get_num_threads() == count
        finally:
            torch.set_num_threads(before)
    one, five = (load_file(tmp_path / str(count) / "model.safetensors") for count in (1, 5))
    assert all(torch.equal(values, five[name]) for name, values in one.items())


def test_global_threshold_reads_twice_and_says_so(wide_llama: Path, tmp_path: Path) -> None:
    recipe = [{"MagnitudePruningModifier": {"sparsity": 0.5, "apply_globally": True}}]
    report = oneshot(wide_llama, recipe, output=tmp_path / "out")
    assert {name.endswith("proj.weight"): times for name, (times, _) in report.reads.items()} == {True: 2, False: 1}
    assert "read 1 or 2 times" in str(report) and report.to_dict()["reads"]["times"] == [1, 2]
    assert SparseAutoModelForCausalLM.from_pretrained(wide_llama, recipe=recipe).load_report


def _copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def _add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """One more shard."""
    save_file(tensors, folder / "more.safetensors", metadata={"format": "pt"})
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "more.safetensors")
    path.write_text(json.dumps(index))
