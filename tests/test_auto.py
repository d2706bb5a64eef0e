"""`from_pretrained`: every tensor read once, and the same model as from the files that `oneshot` writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import sparseautomodel
from sparseautomodel import Recipe, SparseAutoModel, SparseAutoModelForCausalLM, oneshot
from sparseautomodel.plan import PlanError
from sparseautomodel.recipe import shipped
from sparseautomodel.verify import VerificationError

pytestmark = pytest.mark.filterwarnings("ignore")

W4 = {"scheme": "W4A16", "group_size": 32}
NAMES = [
    name
    for name in shipped()
    if name != "fp8-block" and not any(modifier.needs_data for modifier in Recipe.load(name).modifiers)
]
BIG = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}


def recipe(kind: str = "Quantization", **keys: Any) -> dict[str, Any]:
    return {"modifiers": [{f"{kind}Modifier": keys}]}


def state(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.state_dict(keep_vars=True))


def assert_same(one: Any, other: Any) -> None:
    """Every parameter and buffer, bit for bit, and ties where there were ties."""
    first, second = state(one), state(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype and torch.equal(
            value.view(torch.uint8), second[name].view(torch.uint8)
        ), name
    buffers = dict(other.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in one.named_buffers())
    assert one.all_tied_weights_keys == other.all_tied_weights_keys


def greedy(model: Any) -> list[int]:
    prompt = torch.tensor([[1, 5, 9, 7]])
    return model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None).tolist()[0]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def edited(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = tensors_of(folder)
    change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def build(config: PreTrainedConfig, auto: Any = AutoModelForCausalLM) -> Path:
        folder = tmp_path_factory.mktemp(config.model_type)
        torch.manual_seed(0)
        model: PreTrainedModel = auto.from_config(config)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.1)
        model.to(torch.bfloat16).save_pretrained(folder)
        return folder

    return build


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fixture", ["tiny_llama", "tied_llama", "tiny_mixtral", "tiny_qwen3_moe"])
def test_loading_with_a_recipe_equals_loading_what_it_saves(
    name: str, fixture: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(fixture)
    loaded = SparseAutoModelForCausalLM.from_pretrained(folder, recipe=name)
    reads = loaded.load_report.reads
    assert reads.keys() == tensors_of(folder).keys() and {times for times, _ in reads.values()} == {1}
    oneshot(folder, name, output=tmp_path / "out")
    saved = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {times for times, _ in saved.load_report.reads.values()} == {1}
    assert_same(loaded, saved)
    if name in ("w4a16", "w8a8-dynamic", "2of4"):
        assert greedy(loaded) == greedy(saved)


@pytest.mark.parametrize("fixture", ["tiny_llama", "tied_llama", "tiny_mixtral", "tiny_gpt2"])
def test_without_a_recipe_it_is_what_transformers_loads(fixture: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(fixture)
    ours = SparseAutoModelForCausalLM.from_pretrained(folder)
    assert_same(ours, AutoModelForCausalLM.from_pretrained(folder))
    assert {times for times, _ in ours.load_report.reads.values()} == {1}


def _t5() -> PreTrainedConfig:
    sizes = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4}
    return transformers.T5Config(**sizes, feed_forward_proj="gated-gelu", decoder_start_token_id=0)


def _qwen2_vl() -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision = {"depth": 1, "embed_dim": 64, "hidden_size": 128, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    text = BIG | {"num_key_value_heads": 2, "rope_parameters": rope, **ends}
    return transformers.Qwen2VLConfig(text_config=text, vision_config=vision)


def _nemotron() -> PreTrainedConfig:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "n_group": 1, "topk_group": 1}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_shared_expert_intermediate_size": 64}
    layers = {"num_hidden_layers": 2, "layers_block_type": ["moe", "attention"]}
    return transformers.NemotronHConfig(**sizes, **heads, **experts, **layers)


def _small(name: str, **more: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: getattr(transformers, f"{name}Config")(**more)


FOUR = {"num_hidden_layers": 1, "num_attention_heads": 4}
FAMILIES: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "opt": (_small("OPT", vocab_size=64, hidden_size=64, ffn_dim=128, word_embed_proj_dim=64, **FOUR), "CausalLM"),
    "gpt_neox": (_small("GPTNeoX", **BIG, max_position_embeddings=64), "CausalLM"),
    "bloom": (_small("Bloom", vocab_size=64, hidden_size=64, n_layer=1, n_head=4), "CausalLM"),
    "falcon": (_small("Falcon", vocab_size=64, hidden_size=64, **FOUR), "CausalLM"),
    "gemma3": (
        _small("Gemma3Text", **BIG, num_key_value_heads=2, head_dim=32, layer_types=["full_attention"]),
        "CausalLM",
    ),
    "t5": (_t5, "Seq2SeqLM"),
    "qwen2_vl": (_qwen2_vl, "ImageTextToText"),
    "vit": (
        _small("ViT", hidden_size=64, intermediate_size=128, image_size=32, patch_size=16, **FOUR),
        "ImageClassification",
    ),
    "nemotron_h": (_nemotron, "CausalLM"),
}


@pytest.mark.parametrize("given", ["w4a16", "w8a8-dynamic", "2of4-w4a16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_models(family: str, given: str, built: Callable[..., Path], tmp_path: Path) -> None:
    make, suffix = FAMILIES[family]
    folder = built(make(), getattr(transformers, f"AutoModelFor{suffix}"))
    ours = getattr(sparseautomodel, f"SparseAutoModelFor{suffix}")
    loaded = ours.from_pretrained(folder, recipe=given)
    assert {times for times, _ in loaded.load_report.reads.values()} == {1} and not loaded.load_report.unread
    oneshot(folder, given, output=tmp_path / "out")
    assert_same(loaded, ours.from_pretrained(tmp_path / "out"))
    loaded.save_pretrained(tmp_path / "again")
    assert_same(loaded, ours.from_pretrained(tmp_path / "again"))
    dense = ours.from_pretrained(folder, recipe=given, execution="dense")
    for layer in (name for name in dense.state_dict() if name.endswith(".weight")):
        module, wanted = loaded.get_submodule(layer.removesuffix(".weight")), dense.get_parameter(layer)
        assert torch.equal(module.weight, wanted), layer


CONV1D = recipe("MagnitudePruning", targets=["Conv1D"], mask_structure="2:4")


@pytest.mark.parametrize(
    ("fixture", "suffix", "given"),
    [("tiny_gpt2", "CausalLM", CONV1D), ("tiny_bert", "MaskedLM", "w4a16"), ("tiny_bert", "MaskedLM", "2of4-w4a16")],
)
def test_encoders_and_transposed_layers(
    fixture: str, suffix: str, given: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder, ours = request.getfixturevalue(fixture), getattr(sparseautomodel, f"SparseAutoModelFor{suffix}")
    loaded = ours.from_pretrained(folder, recipe=given)
    assert {times for times, _ in loaded.load_report.reads.values()} == {1} and not loaded.load_report.unread
    oneshot(folder, given, output=tmp_path / "out")
    assert_same(loaded, ours.from_pretrained(tmp_path / "out"))
    stock = getattr(transformers, f"AutoModelFor{suffix}").from_pretrained(tmp_path / "out")
    ids, exact = torch.arange(16).view(1, 16), ours.from_pretrained(folder, recipe=given, execution="compressed")
    assert torch.equal(stock(ids).logits, exact(ids).logits)
    assert_near(loaded(ids).logits, exact(ids).logits)


def test_blocks_of_128_where_they_fit(built: Callable[..., Path], tmp_path: Path) -> None:
    folder = built(transformers.LlamaConfig(**BIG, num_key_value_heads=4))
    loaded = SparseAutoModelForCausalLM.from_pretrained(folder, recipe="fp8-block")
    oneshot(folder, "fp8-block", output=tmp_path / "out")
    assert_same(loaded, SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(16).view(1, 16)
    assert torch.equal(stock(ids).logits, loaded(ids).logits)


def assert_near(values: torch.Tensor, wanted: torch.Tensor) -> None:
    """As near as two ways to round to bfloat16 are, which may send a token to another expert."""
    assert (values - wanted).norm() <= 0.06 * wanted.norm()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "2of4"])
@pytest.mark.parametrize("fixture", ["tiny_llama", "tiny_qwen3_moe"])
def test_every_execution_holds_the_same_values(name: str, fixture: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(fixture)
    auto, compressed, dense = (
        SparseAutoModelForCausalLM.from_pretrained(folder, recipe=name, execution=how)
        for how in ("auto", "compressed", "dense")
    )
    assert_same(auto, compressed)
    assert not hasattr(dense.config, "quantization_config") and all(value.requires_grad for value in dense.parameters())
    assert {times for times, _ in dense.load_report.reads.values()} == {1}
    for key, value in dense.named_parameters():
        if "experts" not in key and key.endswith("_proj.weight"):
            assert torch.equal(value, auto.get_submodule(key.removesuffix(".weight")).weight), key
        elif key.endswith("experts.down_proj"):
            experts = auto.get_submodule(key.removesuffix(".down_proj"))
            assert torch.equal(value, torch.stack([experts.get_submodule(f"{i}.down_proj").weight for i in range(4)]))
    if not name.startswith(("w8a8", "fp8")):  # a dense model does not round its activations
        ids = torch.arange(32).view(2, 16)
        torch.testing.assert_close(compressed(ids).logits, dense(ids).logits, atol=0.06, rtol=0.06)
        assert_near(auto(ids).logits, dense(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_another_dtype_on_a_compressed_checkpoint(dtype: torch.dtype, tiny_llama: Path, tmp_path: Path) -> None:
    oneshot(tiny_llama, "w4a16", output=tmp_path / "out")
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    dense = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype, execution="dense")
    layer = "model.layers.0.mlp.up_proj"
    assert model.get_submodule(layer).weight_scale.dtype == model.get_submodule(layer).weight.dtype == dtype
    assert torch.equal(model.get_submodule(layer).weight, dense.get_submodule(layer).weight)
    ids = torch.arange(16).view(1, 16)
    assert model(ids).logits.dtype == model.config.dtype == dtype
    torch.testing.assert_close(model(ids).logits, dense(ids).logits, atol=5e-3, rtol=5e-3)
    assert_same(model, SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w4a16", dtype=dtype))


def test_modules_kept_in_float32(built: Callable[..., Path]) -> None:
    folder = built(_t5(), transformers.AutoModelForSeq2SeqLM)
    ours = sparseautomodel.SparseAutoModelForSeq2SeqLM
    for how in ("compressed", "dense"):
        model = ours.from_pretrained(folder, recipe="w4a16", dtype=torch.float16, execution=how)
        feed_forward = model.encoder.block[0].layer[1].DenseReluDense
        assert feed_forward.wo.weight.dtype == torch.float32 and feed_forward.wi_0.weight.dtype == torch.float16


@pytest.mark.parametrize("biases", ["none", "real", "zero", "q, k, v"])
def test_biases_are_there_if_and_only_if_they_were(biases: str, built: Callable[..., Path], tmp_path: Path) -> None:
    sizes = BIG | {"num_key_value_heads": 2, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(**sizes, attention_bias=biases in ("real", "zero"))
    folder = built(transformers.Qwen2Config(**sizes) if biases == "q, k, v" else config)
    source = {name: value for name, value in tensors_of(folder).items() if name.endswith("bias")}
    if biases == "zero":
        folder = edited(
            folder, tmp_path / "zero", lambda all: all.update({name: value * 0 for name, value in source.items()})
        )
        source = {name: value * 0 for name, value in source.items()}
    assert {name.split(".")[-2] for name in source} == set(
        {"none": "", "q, k, v": "q_proj k_proj v_proj"}.get(biases, "q_proj k_proj v_proj o_proj").split()
    )
    oneshot(folder, "w4a16", output=tmp_path / "out")
    for model in (
        SparseAutoModelForCausalLM.from_pretrained(folder, recipe="w4a16"),
        SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out"),
    ):
        found = {name: value for name, value in model.named_parameters() if name.endswith("bias")}
        assert found.keys() == source.keys() and all(torch.equal(value, source[name]) for name, value in found.items())
        assert (model.model.layers[0].self_attn.q_proj.bias is None) == (biases == "none")


def test_the_same_recipe_over_its_own_result_is_applied_once(tiny_llama: Path, tmp_path: Path) -> None:
    """A2: a folder that carries its recipe, and a caller who gives one."""
    oneshot(tiny_llama, "w4a16", output=tmp_path / "out")
    assert (tmp_path / "out" / "recipe.yaml").is_file()
    once = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(once, SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", recipe="w4a16"))
    assert_same(
        once, SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", recipe=tmp_path / "out" / "recipe.yaml")
    )
    with pytest.raises(PlanError, match=r"stored as int4 group 64, the recipe says float8 channel.*requantize=True"):
        SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", recipe="fp8-dynamic")


def test_requantize_decodes_and_does_it_anew(tiny_llama: Path, tmp_path: Path) -> None:
    oneshot(tiny_llama, "w8a16", output=tmp_path / "eight")
    dense = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "eight", execution="dense")
    dense.save_pretrained(tmp_path / "decoded")
    for given in ("w4a16", recipe(**W4, ignore=["re:.*layers.0.*"])):
        wanted = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "decoded", recipe=given)
        model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "eight", recipe=given, requantize=True)
        assert_same(model, wanted)
        assert {times for times, _ in model.load_report.reads.values()} == {1}


def test_a_threshold_over_all_layers_is_read_for_first(tiny_llama: Path, tmp_path: Path) -> None:
    given = recipe("MagnitudePruning", targets=["Linear"], sparsity=0.5, apply_globally=True)
    with pytest.warns(UserWarning, match="apply_globally reads the layers twice"):
        model = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe=given)
    reads = model.load_report.reads
    assert {times for name, (times, _) in reads.items() if "_proj" in name} == {2}
    assert {times for name, (times, _) in reads.items() if "_proj" not in name} == {1}
    oneshot(tiny_llama, given, output=tmp_path / "out")
    assert_same(model, SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out"))


def test_recipes_that_need_data_say_so_in_a_sentence(tiny_llama: Path) -> None:
    """A3: and not as a wall of missing scale keys."""
    with pytest.raises(ValueError, match=r"needs calibration data.*or take scheme FP8_DYNAMIC"):
        SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe=recipe(scheme="FP8"))


def test_every_auto_class_has_its_own() -> None:
    wanted = {f"Sparse{name}" for name in dir(transformers) if name.startswith("AutoModelFor")}
    assert wanted < set(sparseautomodel.__all__)
    for name in wanted:
        cls = getattr(sparseautomodel, name)
        assert issubclass(cls, SparseAutoModel) and cls.auto_class is getattr(transformers, name.removeprefix("Sparse"))
        with pytest.raises(TypeError, match="from_pretrained"):
            cls()


def test_a_report_says_what_was_read(tiny_llama: Path) -> None:
    report = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w4a16").load_report
    source = tensors_of(tiny_llama)
    assert report.nbytes == sum(value.nbytes for value in source.values())
    assert {name: nbytes for name, (_, nbytes) in report.reads.items()} == {
        name: value.nbytes for name, value in source.items()
    }
    assert report.layers_compressed == 14 and set(report.seconds) == {"plan", "load", "verify", "settle"}
    assert "21 tensors read once" in str(report) and json.dumps(report.to_dict())


def test_a_packed_tensor_under_a_name_of_its_own(tiny_mixtral: Path, tmp_path: Path) -> None:
    """F7: packed and unused, plain and missing: never a model of random values."""
    oneshot(tiny_mixtral, "w4a16", output=tmp_path / "out")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts.1.w1." in name]:
            tensors[name.replace(".experts.", ".other_experts.")] = tensors.pop(name)

    moved = edited(tmp_path / "out", tmp_path / "moved", rename)
    with pytest.raises(VerificationError, match=r"experts.1.w1 is missing"):
        SparseAutoModelForCausalLM.from_pretrained(moved)
