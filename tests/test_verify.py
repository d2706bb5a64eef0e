"""Every fault that can be planted in a checkpoint or a model is found and named; sound ones pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from sparseautomodel import Recipe, SparseAutoModelForCausalLM, oneshot, verify
from sparseautomodel.recipe import shipped
from sparseautomodel.verify import Verdict, VerificationError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SHIPPED = [name for name in shipped() if not any(modifier.needs_data for modifier in Recipe.load(name).modifiers)]
LAYER = "model.layers.1.mlp.up_proj"
Tensors = dict[str, torch.Tensor]
Broken = Callable[..., Path]


@pytest.fixture(scope="module")
def wide_llama(save_model: Callable[[PreTrainedConfig], Path], tiny_llama: Path) -> Path:
    """A Llama whose layers every shipped recipe divides, with a row of zeros and a layer of zeros."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    return save_model(LlamaConfig.from_pretrained(tiny_llama, **sizes, attention_bias=True))


@pytest.fixture(scope="module")
def compressed(wide_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(recipe: str) -> Path:
        if recipe not in made:
            made[recipe] = tmp_path_factory.mktemp("outputs") / recipe
            oneshot(wide_llama, recipe, output=made[recipe])
        return made[recipe]

    return make


@pytest.fixture
def broken(compressed: Callable[[str], Path], tmp_path: Path) -> Broken:
    """A copy of a compressed checkpoint with its tensors or its config changed."""

    def make(
        recipe: str,
        tensors: Callable[[Tensors], None] = lambda tensors: None,
        config: Callable[[dict[str, Any]], None] = lambda config: None,
    ) -> Path:
        folder = Path(shutil.copytree(compressed(recipe), tmp_path / recipe))
        content = load_file(folder / "model.safetensors")
        tensors(content)
        save_file({name: values.contiguous() for name, values in content.items()}, folder / "model.safetensors")
        entries = json.loads((folder / "config.json").read_text())
        config(entries)
        (folder / "config.json").write_text(json.dumps(entries))
        return folder

    return make


def _change(part: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Tensors], None]:
    """Change the tensor `part` of one layer: in place, or to what is returned."""

    def apply(tensors: Tensors) -> None:
        name = part if "." in part else f"{LAYER}.{part}"
        changed = change(tensors[name])
        if changed is not None:
            tensors[name] = changed

    return apply


def _set(value: float) -> Callable[[torch.Tensor], None]:
    def change(values: torch.Tensor) -> None:
        values.view(-1)[3] = value

    return change


def _problems(verdict: Verdict) -> str:
    assert not verdict.ok and verdict.problems
    return "\n".join(verdict.problems)


# Sound


@pytest.mark.parametrize("recipe", SHIPPED)
def test_sound_result_of_every_shipped_recipe(compressed: Callable[[str], Path], wide_llama: Path, recipe: str) -> None:
    verdict = verify(compressed(recipe), against=wide_llama)
    assert verdict.ok and verdict.problems == () and verdict.checked > 28
    assert verify(SparseAutoModelForCausalLM.from_pretrained(compressed(recipe))).ok


@pytest.mark.parametrize(
    "fixture", ["tiny_llama", "tied_llama", "tiny_mixtral", "tiny_qwen3_moe", "tiny_gpt2", "tiny_bert"]
)
def test_sound_dense_checkpoint_of_every_family(request: pytest.FixtureRequest, fixture: str) -> None:
    folder = request.getfixturevalue(fixture)
    verify(folder, against=folder).raise_for_problems()


@pytest.mark.parametrize("fixture", ["tiny_mixtral", "tiny_qwen3_moe"])
@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4a16", "2of4-w4a16", "w8a8-dynamic"])
def test_sound_experts(request: pytest.FixtureRequest, tmp_path: Path, fixture: str, recipe: str) -> None:
    folder = request.getfixturevalue(fixture)
    oneshot(folder, recipe, output=tmp_path / "out")
    verify(tmp_path / "out", against=folder).raise_for_problems()


@pytest.mark.parametrize("recipe", [name for name in SHIPPED if name != "2of4"])
def test_rows_and_layers_of_zeros_are_sound(wide_llama: Path, tmp_path: Path, recipe: str) -> None:
    """Their scale is above zero all the same."""
    model = AutoModelForCausalLM.from_pretrained(wide_llama)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[5] = 0
        model.model.layers[0].mlp.down_proj.weight.zero_()
    model.save_pretrained(tmp_path / "source")
    oneshot(tmp_path / "source", recipe, output=tmp_path / "out")
    verify(tmp_path / "out", against=tmp_path / "source").raise_for_problems()
    loaded = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not loaded.model.layers[0].mlp.down_proj.weight.any()


# Tensors of a compressed layer


@pytest.mark.parametrize(
    ("recipe", "part"),
    [
        *(("w4a16", part) for part in ("weight_scale", "weight_packed", "weight_shape")),
        *(("w8a8-dynamic", part) for part in ("weight_scale", "weight")),
        *(("fp8-dynamic", "weight_scale"), ("fp8-block", "weight_scale"), ("mxfp4a16", "weight_scale")),
        *(("nvfp4a16", part) for part in ("weight_scale", "weight_packed", "weight_global_scale")),
    ],
)
def test_part_missing_from_the_checkpoint_is_an_error(broken: Broken, recipe: str, part: str) -> None:
    """A4: also where the rest would load and compute something."""
    folder = broken(recipe, lambda tensors: tensors.pop(f"{LAYER}.{part}"))
    assert LAYER in _problems(verify(folder))
    with pytest.raises(VerificationError, match=LAYER.replace(".", r"\.")):
        SparseAutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("recipe", ["w4a16", "w8a8-dynamic", "nvfp4a16", "2of4"])
@pytest.mark.parametrize(
    "name",
    [
        *(f"{LAYER}.{part}" for part in ("weight_scale_2", "input_scale", "weight_g_idx", "weight_zero_point", "bias")),
        *("model.norm.weight_scale", "model.layers.9.extra.weight_packed", "stray"),
    ],
)
def test_tensor_that_no_scheme_consumes_is_an_error(broken: Broken, recipe: str, name: str) -> None:
    """F8: a leftover scale means that values are read in another way than they were written."""
    folder = broken(recipe, lambda tensors: tensors.update({name: torch.ones(1)}))
    layer = name.rpartition(".")[0]
    assert name in _problems(verify(folder)) or layer in _problems(verify(folder))
    with pytest.raises(ValueError, match=layer.replace(".", r"\.")):
        SparseAutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("recipe", ["w4a16", "w8a8-dynamic", "2of4"])
def test_scale_beside_a_dense_layer(broken: Broken, recipe: str) -> None:
    folder = broken(recipe, lambda tensors: tensors.update({"lm_head.weight_scale": torch.ones(256, 1).bfloat16()}))
    assert "lm_head.weight" in _problems(verify(folder))


@pytest.mark.parametrize("recipe", ["w4a16", "w8a8-dynamic", "fp8-dynamic", "fp8-block", "nvfp4a16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_scale_that_is_not_a_positive_number(broken: Broken, recipe: str, value: float) -> None:
    if recipe == "nvfp4a16" and value == float("inf"):
        value = float("nan")  # what float8_e4m3fn makes of it
    at = 0 if recipe == "fp8-block" else 3

    def spoil(tensors: Tensors) -> None:
        tensors[f"{LAYER}.weight_scale"].view(-1)[at] = value

    folder = broken(recipe, spoil)
    expected = "is not finite" if value != value or value == float("inf") else "is a scale and not above zero"
    assert f"{LAYER}.weight_scale {expected}" in _problems(verify(folder))
    with pytest.raises(VerificationError, match="weight_scale"):
        SparseAutoModelForCausalLM.from_pretrained(folder)


def test_exponent_that_stands_for_nan(broken: Broken) -> None:
    folder = broken("mxfp4a16", _change("weight_scale", _set(255)))
    assert f"{LAYER}.weight_scale is a scale and not above zero" in _problems(verify(folder))


def test_global_scale_of_zero(broken: Broken) -> None:
    folder = broken("nvfp4a16", lambda tensors: tensors[f"{LAYER}.weight_global_scale"].zero_())
    assert f"{LAYER}.weight_global_scale is a scale and not above zero" in _problems(verify(folder))


@pytest.mark.parametrize(
    ("recipe", "part", "change"),
    [
        ("w4a16", "weight_packed", lambda values: values[:, :-1]),
        ("w4a16", "weight_packed", lambda values: values.to(torch.int64)),
        ("w4a16", "weight_scale", lambda values: values[:-1]),
        ("w4a16", "weight_scale", lambda values: values.repeat(1, 2)),
        ("w8a8-dynamic", "weight", lambda values: values.to(torch.uint8)),
        ("w8a8-dynamic", "weight", lambda values: values.to(torch.float8_e4m3fn)),
        ("nvfp4a16", "weight_scale", lambda values: values.float()),
        ("nvfp4a16", "weight_global_scale", lambda values: values.bfloat16()),
        ("mxfp4a16", "weight_scale", lambda values: values[:, :1]),
    ],
)
def test_wrong_shape_or_dtype_of_a_part(
    broken: Broken, recipe: str, part: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    folder = broken(recipe, _change(part, change))
    assert f"{LAYER}.{part} is [" in _problems(verify(folder)) and "the scheme says" in _problems(verify(folder))


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_global_scale"])
def test_packed_expert_that_is_not_used_is_an_error(tiny_mixtral: Path, tmp_path: Path, part: str) -> None:
    """F7, F8: an expert's tensor under a name that nothing maps, or without its global scale, and the rest loads."""
    oneshot(tiny_mixtral, "nvfp4a16", output=tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if ".experts.1." in name and name.endswith(part))
    moved = name.replace(".experts.1.", ".experts.one.")
    for change in ({moved: tensors[name]}, {}):
        save_file({key: values for key, values in tensors.items() if key != name} | change, file)
        assert name.rpartition(".")[0] in _problems(verify(tmp_path / "out")) or moved in _problems(
            verify(tmp_path / "out")
        )
        with pytest.raises(ValueError, match=r"experts\.(1|one)"):
            SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")


# Dense tensors


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"]
)
def test_dense_number_that_is_not_finite(broken: Broken, name: str, value: float) -> None:
    folder = broken("w4a16", _change(name, _set(value)))
    assert verify(folder).problems == (f"{name} is not finite",)
    with pytest.raises(VerificationError, match=f"not finite: {name}"):
        SparseAutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", f"{LAYER}.weight"])
def test_dense_tensor_missing_or_of_another_shape(broken: Broken, name: str) -> None:
    folder = broken("2of4", lambda tensors: tensors.pop(name))
    assert verify(folder).problems == (f"no tensor fills {name}",)
    with pytest.raises(VerificationError, match=f"no tensor of the checkpoint fills {name}"):
        SparseAutoModelForCausalLM.from_pretrained(folder)
    shutil.rmtree(folder)
    folder = broken("2of4", _change(name, lambda values: values[:-1]))
    assert f"{name} has shape [" in _problems(verify(folder))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn])
def test_few_bits_without_a_scale(broken: Broken, dtype: torch.dtype) -> None:
    """F7: a loader would take the codes for the weights, and nothing would be missing."""
    folder = broken("2of4", _change(f"{LAYER}.weight", lambda values: values.mul(100).to(dtype)))
    assert f"{LAYER}.weight is stored as {dtype} and has no scale" in _problems(verify(folder))
    with pytest.raises(VerificationError, match=f"{LAYER}.weight is stored as {dtype} and has no scale"):
        SparseAutoModelForCausalLM.from_pretrained(folder)
    with pytest.warns(UserWarning, match="has no scale"):
        SparseAutoModelForCausalLM.from_pretrained(folder, strict=False)


# config.json


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda entry: entry.update(sparsity_config={"format": "dense", "targets": ["Linear"]}),
            "sparsity_config is not empty",
        ),
        (lambda entry: entry["config_groups"]["group_0"]["weights"].update(num_bits="four"), "num_bits"),
        (lambda entry: entry["config_groups"]["group_0"]["weights"].update(new_field=1), "new_field"),
        (lambda entry: entry["config_groups"]["group_0"].update(targets=["Conv2d"]), "no group of quantization_config"),
        (lambda entry: entry.update(format="sparse-24-bitmask"), "there is no format 'sparse-24-bitmask'"),
        (lambda entry: entry.pop("config_groups"), "quantization_config"),
    ],
)
def test_config_that_others_refuse(broken: Broken, change: Callable[[dict], None], message: str) -> None:
    """F13 and F4, seen from the reader's side."""
    folder = broken("w4a16", config=lambda config: change(config["quantization_config"]))
    assert message in _problems(verify(folder))


def test_config_that_does_not_say_it_is_quantized(broken: Broken) -> None:
    for recipe in ("w4a16", "w8a8-dynamic"):
        folder = broken(recipe, config=lambda config: config.pop("quantization_config"))
        assert "up_proj" in _problems(verify(folder))
        with pytest.raises(VerificationError, match="up_proj"):
            SparseAutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_config_that_cannot_be_read_is_a_problem(broken: Broken, text: str) -> None:
    folder = broken("w4a16")
    (folder / "config.json").write_text(text)
    assert "config.json" in _problems(verify(folder))
    (folder / "config.json").unlink()
    assert "config.json" in _problems(verify(folder))


def test_damaged_file_is_a_problem(broken: Broken) -> None:
    folder = broken("w4a16")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    assert "model.safetensors cannot be read" in _problems(verify(folder))


@pytest.mark.parametrize("given", [5, None, {}])
def test_what_is_neither_a_model_nor_a_path(given: object) -> None:
    with pytest.raises(ValueError, match=r"verify takes a model, or the folder.*was given .*Write verify\(model\)"):
        verify(given)
