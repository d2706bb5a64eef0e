"""What is known of a model before a weight is read, against what transformers does when it loads the same files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from sparseautomodel.architecture import BUILDING, Architecture, auto_class_for, expert_merges, read_architecture
from sparseautomodel.checkpoint import StoredTensor, open_checkpoint

T5 = {
    "vocab_size": 256,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 1,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
}
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


class TwinConfig(PreTrainedConfig):
    model_type = "twin_of_these_tests"
    tie_word_embeddings = True


class Twin(PreTrainedModel):
    """Ties by a regex over modules, as detectors do."""

    config_class = TwinConfig
    base_model_prefix = "model"
    _tied_weights_keys = {r"heads\.(?!0)\d+": "heads.0"}  # noqa: RUF012

    def __init__(self, config: TwinConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList([nn.Linear(64, 32) for _ in range(3)])
        self.trunk = nn.Linear(64, 64)
        self.post_init()


class ListConfig(PreTrainedConfig):
    model_type = "list_ties_of_these_tests"
    tie_word_embeddings = True


class ListTwin(PreTrainedModel):
    config_class = ListConfig
    base_model_prefix = "model"
    _tied_weights_keys = ["head.weight"]  # noqa: RUF012

    def __init__(self, config: ListConfig) -> None:
        super().__init__(config)
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.post_init()


for config_class, model_class in ((TwinConfig, Twin), (ListConfig, ListTwin)):
    AutoConfig.register(config_class.model_type, config_class)
    AutoModelForCausalLM.register(config_class, model_class)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a model of any config and class to a folder."""

    def build(config: PreTrainedConfig, auto: Any = AutoModelForCausalLM) -> Path:
        folder = tmp_path_factory.mktemp(config.model_type)
        torch.manual_seed(0)
        auto.from_config(config).save_pretrained(folder)
        return folder

    return build


def read(folder: Path, auto: Any = None) -> tuple[Architecture, Any]:
    config = AutoConfig.from_pretrained(folder)
    checkpoint = open_checkpoint(folder)
    return read_architecture(auto or auto_class_for(config), config, checkpoint), checkpoint


@pytest.mark.parametrize(
    "fixture", ["tiny_llama", "tied_llama", "tiny_mixtral", "tiny_qwen3_moe", "tiny_gpt2", "tiny_bert"]
)
def test_names_lead_where_transformers_puts_the_tensors(fixture: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(fixture)
    architecture, checkpoint = read(folder)
    model = architecture.model_class.from_pretrained(folder)
    own = model.state_dict()
    assert set(architecture.parameters) == set(checkpoint), "every tensor has a place"
    for name, parameter in architecture.parameters.items():
        if name not in architecture.merged:
            assert torch.equal(checkpoint[name][...], own[parameter])
    assert not architecture.converted
    assert architecture.ties == model.all_tied_weights_keys


def test_no_weight_is_read_and_nothing_global_changes(tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(StoredTensor, "__getitem__", refuse)
    before = (torch.get_default_dtype(), torch.get_rng_state(), nn.init.normal_, torch.linspace)
    config = AutoConfig.from_pretrained(tiny_mixtral)
    plain = config.to_dict()
    architecture, checkpoint = read(tiny_mixtral)
    architecture.layers(checkpoint)
    assert all(parameter.is_meta for parameter in architecture.skeleton.parameters())
    with pytest.raises(ValueError, match="Unrecognized configuration"):
        read_architecture(AutoModelForSeq2SeqLM, config, checkpoint)
    after = (torch.get_default_dtype(), torch.get_rng_state(), nn.init.normal_, torch.linspace)
    assert before[0] == after[0] and torch.equal(before[1], after[1]) and before[2:] == after[2:]
    assert config.to_dict() == plain, "the config given is the user's"


def test_models_are_built_one_at_a_time_and_one_inside_another() -> None:
    with BUILDING:
        assert BUILDING.acquire(blocking=False), "remote code may load a model inside another"
        BUILDING.release()


def test_layers_are_the_matrices_and_have_their_roles(tiny_llama: Path, tiny_gpt2: Path) -> None:
    architecture, checkpoint = read(tiny_llama)
    layers = {layer.name: layer for layer in architecture.layers(checkpoint)}
    assert set(layers) == {
        name.removesuffix(".weight") for name, tensor in checkpoint.items() if len(tensor.shape) == 2
    }
    assert layers["lm_head"].role == "head" and layers["model.embed_tokens"].role == "embedding"
    assert {layer.role for name, layer in layers.items() if "layers" in name} == {"block"}
    assert all(
        layer.kinds == (("Embedding",) if layer.role == "embedding" else ("Linear",)) for layer in layers.values()
    )

    architecture, checkpoint = read(tiny_gpt2)
    layer = next(layer for layer in architecture.layers(checkpoint) if layer.name.endswith("c_fc"))
    assert layer.transposed and layer.kinds == ("Conv1D",) and layer.shape == (256, 64)
    assert checkpoint[f"{layer.name}.weight"].shape == (64, 256)


def test_each_expert_is_a_layer_and_routers_are_known(tiny_mixtral: Path, tiny_qwen3_moe: Path, built: Any) -> None:
    for folder, names in ((tiny_mixtral, ("w1", "w2", "w3")), (tiny_qwen3_moe, ("gate_proj", "up_proj", "down_proj"))):
        architecture, checkpoint = read(folder)
        layers = architecture.layers(checkpoint)
        experts = [layer for layer in layers if layer.expert]
        assert len(experts) == 2 * 4 * 3 and {layer.name.rpartition(".")[2] for layer in experts} == set(names)
        assert {layer.kinds for layer in experts} == {("Linear",)} and {layer.module for layer in experts} == {
            f"model.layers.{i}.mlp.experts" for i in range(2)
        }
        assert all(architecture.stores(layer) for layer in experts)
        assert [layer.name.rpartition(".")[2] for layer in layers if layer.role == "router"] == ["gate", "gate"]
    shared = built(
        transformers.Qwen2MoeConfig(
            **SIZES, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        )
    )  # fmt: skip
    architecture, checkpoint = read(shared)
    roles = {layer.name.rpartition(".")[2]: layer.role for layer in architecture.layers(checkpoint)}
    assert roles["gate"] == roles["shared_expert_gate"] == "router" and roles["gate_proj"] == "block"


def test_parts_beside_the_language_model_are_known_by_role(built: Any) -> None:
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=32, patch_size=16),
    )
    folder = built(config, AutoModelForImageTextToText)
    architecture, checkpoint = read(folder)
    roles = {layer.name: layer.role for layer in architecture.layers(checkpoint)}
    assert roles["multi_modal_projector.linear_1"] == "projector"
    assert roles["vision_tower.encoder.layers.0.mlp.fc1"] == "vision"
    assert roles["language_model.lm_head"] == "head"
    assert roles["language_model.model.layers.0.mlp.up_proj"] == "block"


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForSequenceClassification])
def test_other_heads_than_the_checkpoint_has(auto: Any, tiny_llama: Path) -> None:
    architecture, checkpoint = read(tiny_llama, auto)
    assert set(checkpoint) - set(architecture.parameters) == {"lm_head.weight"}
    prefix = "" if auto is AutoModel else "model."
    assert architecture.parameters["model.norm.weight"] == f"{prefix}norm.weight"
    layers = architecture.layers(checkpoint)
    assert [layer.name for layer in architecture.unstored_layers(layers)] == ([] if auto is AutoModel else ["score"])


def test_a_base_model_s_checkpoint_fills_a_model_with_a_head(built: Any) -> None:
    folder = built(transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True), AutoModel)
    architecture, checkpoint = read(folder, AutoModelForCausalLM)
    assert architecture.parameters["norm.weight"] == "model.norm.weight"
    ((layer, source),) = architecture.tied_layers(architecture.layers(checkpoint), checkpoint)
    assert (layer.name, layer.module, layer.role, source) == ("lm_head", "lm_head", "head", "embed_tokens.weight")


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_tie_from_the_side_that_is_stored(stored: str, tied_llama: Path, tmp_path: Path) -> None:
    """B7: the direction of a tie follows the files."""
    copied = retied(tied_llama, tmp_path, stored)
    architecture, checkpoint = read(copied)
    tied = architecture.tied_layers(architecture.layers(checkpoint), checkpoint)
    wanted = {"model.embed_tokens.weight": "lm_head", "lm_head.weight": "model.embed_tokens"}
    assert [(layer.name, source) for layer, source in tied] == ([] if stored == "both" else [(wanted[stored], stored)])
    renamed = {"lm_head.weight": "model.embed_tokens.weight"} if stored == "lm_head.weight" else {}
    assert architecture.tied_names(checkpoint) == renamed


def test_ties_of_more_than_two(built: Any) -> None:
    architecture, checkpoint = read(built(transformers.T5Config(**T5), AutoModelForSeq2SeqLM))
    tied = architecture.tied_layers(architecture.layers(checkpoint), checkpoint)
    assert {layer.name for layer, _ in tied} == {"encoder.embed_tokens", "decoder.embed_tokens", "lm_head"}
    assert {source for _, source in tied} == {"shared.weight"}
    names = ["encoder.embed_tokens.weight", *(name for name in checkpoint if name != "shared.weight")]
    only_encoder = {name: checkpoint.get(name, checkpoint["shared.weight"]) for name in names}
    mapped = read_architecture(AutoModelForSeq2SeqLM, architecture.config, only_encoder)
    tied = mapped.tied_layers(mapped.layers(only_encoder), only_encoder)
    assert {layer.name: source for layer, source in tied} == dict.fromkeys(
        ["shared", "decoder.embed_tokens", "lm_head"], "encoder.embed_tokens.weight"
    )


def test_tie_flags_that_do_not_untie(built: Any, tied_llama: Path) -> None:
    """To a T5 config, `tie_word_embeddings: false` means that outputs are not scaled."""
    assert read(tied_llama)[0].can_untie
    assert not read(built(transformers.T5Config(**T5), AutoModelForSeq2SeqLM))[0].can_untie


def test_ties_declared_as_a_regex_are_expanded(built: Any) -> None:
    """B5: a tie may be a pattern over modules; every parameter has one place."""
    folder = built(TwinConfig())
    architecture, checkpoint = read(folder, AutoModelForCausalLM)
    assert architecture.ties == {
        f"heads.{number}.{part}": f"heads.0.{part}" for number in (1, 2) for part in ("bias", "weight")
    }
    assert set(checkpoint) == {"heads.0.weight", "heads.0.bias", "trunk.weight", "trunk.bias"}
    tied = architecture.tied_layers(architecture.layers(checkpoint), checkpoint)
    assert {layer.name: source for layer, source in tied} == dict.fromkeys(["heads.1", "heads.2"], "heads.0.weight")


def test_ties_declared_as_a_list_say_what_to_change() -> None:
    """B12: the form of remote code before transformers 5."""
    with pytest.raises(ValueError, match=r"_tied_weights_keys as a list.*_tied_weights_keys = \{"):
        read_architecture(AutoModelForCausalLM, ListConfig(), ["head.weight"])


def test_misshapen_tensors_are_named_with_both_shapes(tiny_llama: Path) -> None:
    architecture, checkpoint = read(tiny_llama)
    assert architecture.misshapen(checkpoint) == []
    other = dict(checkpoint) | {"model.norm.weight": checkpoint["model.layers.0.self_attn.k_proj.weight"]}
    assert architecture.misshapen(other) == [
        "model.norm.weight has shape [32, 64] in the checkpoint and [64] in the model"
    ]


@pytest.mark.parametrize("fixture", ["tiny_mixtral", "tiny_qwen3_moe"])
def test_missing_and_surplus_experts_are_named(fixture: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(fixture)
    architecture, checkpoint = read(folder)
    assert architecture.missing_experts() == [] and architecture.merged
    gone = next(name for name in sorted(checkpoint) if ".experts.2." in name)
    config = AutoConfig.from_pretrained(folder)
    extra = gone.replace(".experts.2.", ".experts.7.")
    changed = read_architecture(auto_class_for(config), config, [*(name for name in checkpoint if name != gone), extra])
    assert changed.missing_experts() == [
        f"{gone.removesuffix('.weight')} is missing",
        f"{extra.removesuffix('.weight')} is an expert that the model does not have",
    ]


def test_projections_of_experts_come_in_the_order_of_the_model(tiny_mixtral: Path) -> None:
    architecture, _ = read(tiny_mixtral)
    merges = expert_merges(architecture.skeleton)
    assert set(merges) == {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
    assert set(map(str, merges.values())) == {str({"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)})}


def test_experts_in_one_tensor_are_named(built: Any) -> None:
    config = transformers.GptOssConfig(
        **SIZES, num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["full_attention"],
    )  # fmt: skip
    architecture, checkpoint = read(built(config))
    experts = "model.layers.0.mlp.experts"
    assert architecture.fused_experts() == [f"{experts}.gate_up_proj", f"{experts}.down_proj"]
    assert not any(layer.expert for layer in architecture.layers(checkpoint))


def test_tensors_that_the_loader_splits_are_no_module_s_weight(built: Any) -> None:
    config = transformers.NomicBertConfig(**SIZES, max_position_embeddings=64)
    folder = built(config, AutoModel)
    architecture, checkpoint = read(folder)
    split = [layer for layer in architecture.layers(checkpoint) if "qkv" in layer.name.lower()]
    assert split and {f"{layer.name}.weight" for layer in split} <= architecture.converted
    assert not any(architecture.stores(layer) for layer in split)
    others = [layer for layer in architecture.layers(checkpoint) if "fc" in layer.name or "out_proj" in layer.name]
    assert others and all(architecture.stores(layer) for layer in others)
    unstored = {
        layer.name.rpartition(".")[2] for layer in architecture.unstored_layers(architecture.layers(checkpoint))
    }
    assert {"k_proj", "v_proj"} <= unstored
    assert architecture.misshapen(checkpoint) == [], "a split tensor has no shape of its own to compare"


def test_modules_that_are_kept_in_float32(built: Any) -> None:
    architecture, _ = read(built(transformers.T5Config(**T5), AutoModelForSeq2SeqLM))
    wo, wi = ("encoder.block.0.layer.1.DenseReluDense." + name for name in ("wo.weight", "wi_0.weight"))
    assert architecture.loaded_dtype(wo, torch.float16) == torch.float32
    assert architecture.loaded_dtype(wi, torch.float16) == torch.float16
    assert architecture.loaded_dtype(wo, torch.bfloat16) == torch.bfloat16


def test_classes_that_draw_values_for_the_layers_inside_them(built: Any, tiny_llama: Path) -> None:
    architecture, checkpoint = read(built(transformers.T5Config(**T5), AutoModelForSeq2SeqLM))
    layers = [layer for layer in architecture.layers(checkpoint) if layer.role == "block"]
    assert set(architecture.initializes(layers)) == {"T5Attention", "T5DenseGatedActDense"}
    assert architecture.initializes([layer for layer in layers if layer.name.endswith("wi_0")]) == [
        "T5DenseGatedActDense"
    ]
    assert all(
        "weight" in module._parameters for module in architecture.skeleton.modules() if isinstance(module, nn.Linear)
    )
    architecture, checkpoint = read(tiny_llama)
    assert architecture.initializes(architecture.layers(checkpoint)) == []


CLASSES = {
    "LlamaForCausalLM": ("LlamaConfig", "AutoModelForCausalLM"),
    "BertForMaskedLM": ("BertConfig", "AutoModelForMaskedLM"),
    "BertForSequenceClassification": ("BertConfig", "AutoModelForSequenceClassification"),
    "BertModel": ("BertConfig", "AutoModel"),
    "T5ForConditionalGeneration": ("T5Config", "AutoModelForSeq2SeqLM"),
    "ViTForImageClassification": ("ViTConfig", "AutoModelForImageClassification"),
    "NotThere": ("LlamaConfig", "AutoModel"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_auto_class_is_the_one_whose_model_was_saved(name: str) -> None:
    config_name, wanted = CLASSES[name]
    config = getattr(transformers, config_name)(architectures=[name])
    auto: Any = auto_class_for(config)
    if name == "NotThere":
        assert auto is AutoModel
    else:
        with torch.device("meta"):
            assert type(auto.from_config(config)).__name__ == name
        assert auto._model_mapping is getattr(transformers, wanted)._model_mapping or auto is not AutoModel


def test_auto_class_of_remote_code_is_the_one_it_declares() -> None:
    config = PreTrainedConfig(architectures=["Mine"], auto_map={"AutoConfig": "m.C", "AutoModelForCausalLM": "m.Mine"})
    assert auto_class_for(config) is AutoModelForCausalLM


def retied(folder: Path, target: Path, stored: str) -> Path:
    """A copy of a tied checkpoint whose files hold the embedding, the head, or both."""
    tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    values = tensors.pop("model.embed_tokens.weight")
    names = ["model.embed_tokens.weight", "lm_head.weight"] if stored == "both" else [stored]
    save_file(tensors | {name: values.clone() for name in names}, target / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", target)
    return target
