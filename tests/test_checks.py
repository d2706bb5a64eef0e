"""What can be wrong between a recipe and a model: said with what to write instead, and following that works."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from sparseautomodel import SparseAutoModelForCausalLM, oneshot, plan
from sparseautomodel.checks import fused_sets, read_twice, unmatched_ignores, unmatched_targets
from sparseautomodel.modifiers import Layer
from sparseautomodel.modifiers.magnitude import MagnitudePruningModifier
from sparseautomodel.modifiers.quantization import QuantizationModifier
from sparseautomodel.plan import Plan, PlanError
from sparseautomodel.recipe import Recipe

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
W4 = {"scheme": "W4A16", "group_size": 32}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def build(config: PreTrainedConfig, auto: Any = AutoModelForCausalLM) -> Path:
        folder = tmp_path_factory.mktemp(config.model_type)
        torch.manual_seed(0)
        auto.from_config(config).to(torch.bfloat16).save_pretrained(folder)
        return folder

    return build


@pytest.fixture(scope="module")
def narrow(built: Callable[..., Path]) -> Path:
    """Hidden size 96: 64 and 128 do not divide it, 32 does; the other width, 256, all divide."""
    return built(LlamaConfig(**SIZES, hidden_size=96, intermediate_size=256, head_dim=32))


def quantizing(**keys: Any) -> dict[str, Any]:
    return {"modifiers": [{"QuantizationModifier": keys}]}


def pruning(**keys: Any) -> dict[str, Any]:
    return {"modifiers": [{"MagnitudePruningModifier": keys}]}


def errors(folder: Path, recipe: Any) -> list[str]:
    return list(plan(folder, recipe).errors)


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("re:.*nope$", "Classes in this model: Embedding, Linear"),
        ("Linaer", "Linear"),
        ("model.layers.0.self_atn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("q_proj", "Nearest: "),
    ],
)
def test_target_that_matches_nothing(pattern: str, nearest: str, tiny_llama: Path) -> None:
    """C2: an error with the nearest names, whatever the form of the pattern."""
    (error,) = errors(tiny_llama, quantizing(targets=[pattern], **W4))
    assert error.startswith(f"QuantizationModifier: target {pattern!r} matches nothing. Nearest: ") and nearest in error
    with pytest.raises(PlanError, match="matches nothing"):
        SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe=quantizing(targets=[pattern], **W4))


def test_one_target_of_two_that_matches_nothing(tiny_llama: Path) -> None:
    """C2: the other one does not hide it."""
    assert len(errors(tiny_llama, pruning(targets=["Linear", "re:.*nope$"], sparsity=0.5))) == 1


def test_ignore_that_matches_nothing_warns(tiny_llama: Path) -> None:
    """C2."""
    planned = plan(tiny_llama, quantizing(**W4, ignore=["re:.*nope$", "lm_head", "model.layers.1.mlp.up_pro"]))
    assert not planned.errors
    unmatched = [text for text in planned.warnings if "matches nothing" in text]
    assert len(unmatched) == 2 and "re:.*nope$" in unmatched[0] and "mlp.up_proj" in unmatched[1]
    with pytest.warns(UserWarning, match="ignore 're:.\\*nope\\$' matches nothing"):
        SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe=quantizing(**W4, ignore=["re:.*nope$"]))


def test_one_recipe_in_every_form_is_one_plan(tiny_llama: Path, tmp_path: Path) -> None:
    """C3: text, file, dict and objects."""
    given = quantizing(**W4, ignore=["re:.*down_proj"])
    text = Recipe.load(given).to_yaml()
    (tmp_path / "mine.yaml").write_text(text)
    objects = [QuantizationModifier(scheme="W4A16", group_size=32, ignore=("re:.*down_proj",))]
    wanted = plan(tiny_llama, given).to_dict()
    for form in (text, tmp_path / "mine.yaml", objects, Recipe.load(given)):
        assert plan(tiny_llama, form).to_dict() == wanted


def test_retired_and_misspelled_keys_never_reach_a_plan(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C4, C5: the recipe is wrong before any file is looked at."""
    monkeypatch.chdir(tiny_llama)
    with pytest.raises(ValueError, match=r"(?s)sparsityy.*sparsity"):
        plan(tiny_llama, pruning(targets=["Linear"], sparsityy=0.5))
    with pytest.raises(ValueError, match=r"(?s)Looked for.*/x\.yaml"):
        plan(tiny_llama, "x.yaml")


def test_ignore_means_left_as_it_is(tiny_llama: Path) -> None:
    """C6: one meaning for one word, for every modifier that has it."""
    half = {"targets": ["Linear"], "sparsity": 0.5, "ignore": ["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"]}
    both = [{"MagnitudePruningModifier": half}, {"QuantizationModifier": W4}]
    rows = {row.name: row for row in plan(tiny_llama, {"modifiers": both}).rows}
    assert rows["model.layers.0.self_attn.q_proj"].modifiers == ("QuantizationModifier",)
    assert rows["model.layers.0.mlp.up_proj"].modifiers == ("MagnitudePruningModifier", "QuantizationModifier")


def test_each_expert_is_covered_and_the_share_is_said(tiny_mixtral: Path) -> None:
    """C7: `Linear` reaches the experts, and the plan says how much of the model that is."""
    planned = plan(tiny_mixtral, quantizing(**W4))
    assert sum("experts" in row.name for row in planned.rows) == 2 * 4 * 3
    share = planned.parameters_changed / planned.parameters
    assert share > 0.8 and f"{share:.1%} of" in str(planned)


def test_experts_in_one_tensor_are_not_passed_by(built: Callable[..., Path]) -> None:
    """C7: fused 3-D experts stop the plan; following the message leaves them on purpose."""
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    folder = built(transformers.GptOssConfig(**sizes, head_dim=16, layer_types=["full_attention"] * 2))
    (error,) = errors(folder, quantizing(**W4))
    assert "model.layers.0.mlp.experts.gate_up_proj" in error and "3-D tensors" in error
    proposed = re.search(r"ignore: (\[.*?\])", error)
    assert proposed is not None
    planned = plan(folder, quantizing(**W4, ignore=json.loads(proposed[1].replace("'", '"'))))
    assert not planned.errors and planned.parameters_changed / planned.parameters < 0.5
    assert not errors(folder, quantizing(targets=["re:.*self_attn.*"], **W4)), "a target by name passes nothing by"


def test_routers_heads_and_parts_beside_the_language_model_are_left_alone_and_said(
    tiny_mixtral: Path, tiny_qwen3_moe: Path, built: Callable[..., Path]
) -> None:
    """C10: a class name never reaches them; the plan says so."""
    for folder in (tiny_mixtral, tiny_qwen3_moe):
        planned = plan(folder, quantizing(**W4))
        assert {row.name for row in planned.rows if row.name.endswith(("gate", "lm_head"))} == set()
        assert any("router left alone" in text and ".gate" in text for text in planned.notes)
        assert any("head left alone: lm_head" in text for text in planned.notes)
    vision = {"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 14}
    text = SIZES | {"hidden_size": 64, "intermediate_size": 128}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision)
    folder = built(config, transformers.AutoModelForImageTextToText)
    planned = plan(folder, quantizing(**W4))
    assert not any(row.name.startswith("visual") for row in planned.rows)
    assert any("vision left alone: visual.blocks.0.attn.proj" in text for text in planned.notes)
    named = plan(folder, quantizing(targets=["Linear", r"re:visual.*mlp\.fc\d"], **W4))
    assert {row.name for row in named.rows if "visual" in row.name} == {
        "visual.blocks.0.mlp.fc1",
        "visual.blocks.0.mlp.fc2",
    }


def test_group_that_does_not_divide(narrow: Path) -> None:
    """D1: refused before a weight is read, with the layers, and each proposal works."""
    (error,) = errors(narrow, quantizing(scheme="W4A16", group_size=128))
    assert "group size 128 does not divide 10 layers: model.layers.0." in error and "(96 inputs)" in error
    assert "down_proj" not in error and "o_proj" not in error, "128 and 256 are multiples"
    sizes = re.search(r"or one of ([\d, ]+);", error)
    assert sizes is not None and sizes[1] == "32, 16"
    for keys in (
        {"group_size": "auto"},
        *({"group_size": int(size)} for size in sizes[1].split(", ")),
        {"group_size": -1},
    ):
        assert not errors(narrow, quantizing(scheme="W4A16", **keys))
    assert not errors(narrow, quantizing(scheme="W4A16", group_size=128, ignore=["re:.*(q|k|v|up|gate)_proj"]))


def test_skipped_layers_are_recorded(narrow: Path) -> None:
    """D2: an option leaves them dense, and the plan shows which."""
    planned = plan(narrow, quantizing(scheme="W4A16", group_size=128, skip_indivisible=True))
    assert not planned.errors and {row.name.rpartition(".")[2] for row in planned.rows} == {"down_proj", "o_proj"}
    (text,) = [one for one in planned.warnings if "skip_indivisible" in one]
    assert "leaves 10 layers dense: model.layers.0." in text


@pytest.mark.parametrize("scheme", ["NVFP4A16", "MXFP4A16"])
def test_groups_that_a_format_fixes(scheme: str, built: Callable[..., Path]) -> None:
    folder = built(LlamaConfig(**SIZES, hidden_size=72, intermediate_size=128, head_dim=16))
    (error,) = errors(folder, quantizing(scheme=scheme))
    assert "The format fixes it" in error and "group_size:" not in error
    assert not errors(folder, quantizing(scheme=scheme, skip_indivisible=True))


def test_last_block_may_be_partial_and_last_group_may_not(narrow: Path, tmp_path: Path) -> None:
    """D3: blocks of 128 x 128 on 96 columns are stored; the activation groups of FP8_BLOCK are not."""
    block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    explicit = quantizing(config_groups={"g": {"targets": ["Linear"], "weights": block}})
    assert not errors(narrow, explicit)
    oneshot(narrow, explicit, output=tmp_path / "out")
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.isfinite(model(torch.arange(8).view(1, 8)).logits).all()
    (error,) = errors(narrow, "fp8-block")
    assert "activation group size 128 does not divide" in error and "fp8-dynamic" in error
    assert not errors(narrow, "fp8-dynamic")


def test_pattern_that_does_not_divide(built: Callable[..., Path]) -> None:
    folder = built(LlamaConfig(**SIZES, hidden_size=72, intermediate_size=128, head_dim=16))
    (error,) = errors(folder, pruning(targets=["Linear"], mask_structure="8:16"))
    assert "N:M pattern of 16 does not divide" in error and "72 inputs" in error
    assert not errors(folder, pruning(targets=["Linear"], mask_structure="2:4"))


def test_layers_that_servers_run_as_one_need_one_scheme(tiny_llama: Path) -> None:
    apart = quantizing(**W4, ignore=["re:.*k_proj"])
    found = errors(tiny_llama, apart)
    assert len(found) == 2 and "model.layers.0.self_attn.k_proj: dense" in found[0] and "int4 group 32" in found[0]
    assert not errors(tiny_llama, quantizing(**W4, ignore=["re:.*[qkv]_proj"]))
    preset = {"W8A8": ["re:.*q_proj"], "FP8_DYNAMIC": ["re:.*(k|v)_proj"]}
    assert "float8 channel, input float8 token dynamic" in errors(tiny_llama, quantizing(scheme=preset))[0]
    same = {"targets": ["re:.*(k|v)_proj"], "weights": {"num_bits": 8, "strategy": "channel"}}
    mixed = {"a": same, "b": {"targets": ["re:.*q_proj"], "weights": {**same["weights"], "type": "int"}}}
    assert not errors(tiny_llama, quantizing(config_groups=mixed)), "two spellings of one scheme"


def test_fused_sets_are_siblings() -> None:
    names = ["a.q_proj", "a.k_proj", "b.v_proj", "b.q_proj", "c.q_proj", "x.w1", "x.w3", "x.w2"]
    assert fused_sets(names) == [["a.q_proj", "a.k_proj"], ["b.q_proj", "b.v_proj"], ["x.w1", "x.w3"]]


def test_conv1d_can_be_pruned_and_not_quantized(tiny_gpt2: Path) -> None:
    (error,) = errors(tiny_gpt2, quantizing(targets=["Conv1D"], scheme="W8A8"))
    assert "compressed-tensors cannot store Conv1D layers quantized" in error and "They can be pruned" in error
    assert not errors(tiny_gpt2, pruning(targets=["Conv1D"], sparsity=0.5))
    (error,) = errors(tiny_gpt2, quantizing(scheme="W8A8"))
    assert "matches only lm_head, which a class name leaves alone" in error


def test_routers_of_their_own_class_cannot_be_quantized_by_name(tiny_mixtral: Path) -> None:
    (error,) = errors(tiny_mixtral, quantizing(targets=["re:.*gate$"], **W4))
    assert "cannot store MixtralTopKRouter layers quantized" in error


def test_tensors_that_transformers_splits_can_be_pruned_and_not_quantized(built: Callable[..., Path]) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    config = transformers.NomicBertConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)
    folder = built(config, AutoModel)
    (error,) = errors(folder, quantizing(**W4))
    assert "splits or rearranges" in error and "Wqkv" in error
    assert not errors(folder, quantizing(**W4, ignore=["re:.*Wqkv"]))
    assert not errors(folder, pruning(targets=["Linear"], sparsity=0.5))


def test_quantized_twice(tiny_llama: Path) -> None:
    twice = [{"QuantizationModifier": W4}, {"QuantizationModifier": {"targets": ["re:.*down_proj"], "scheme": "W8A8"}}]
    found = errors(tiny_llama, {"modifiers": twice})
    assert (
        "model.layers.0.mlp.down_proj is quantized twice, by QuantizationModifier and QuantizationModifier" in found[0]
    )


def test_other_methods_checkpoints_are_named(tiny_llama: Path, tmp_path: Path) -> None:
    for file in tiny_llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    entry = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    with pytest.raises(PlanError, match="quantized by gptq: take the dense one"):
        SparseAutoModelForCausalLM.from_pretrained(tmp_path, recipe="w4a16")


def test_a_threshold_over_all_layers_costs_a_second_read(tiny_llama: Path) -> None:
    (text,) = [
        one
        for one in plan(tiny_llama, pruning(targets=["Linear"], sparsity=0.5, apply_globally=True)).warnings
        if "twice" in one
    ]
    assert "apply_globally reads the layers twice" in text
    assert not read_twice([MagnitudePruningModifier(sparsity=0.5)])
    known = MagnitudePruningModifier(sparsity=0.5, apply_globally=True, threshold=0.1)
    assert not read_twice([known])


def test_names_are_looked_for_in_both_spellings() -> None:
    layer = Layer("block_sparse_moe.gate", "mlp.gate", ("Router",), (4, 64), torch.bfloat16, role="router")
    for pattern in ("block_sparse_moe.gate", "re:mlp.*"):
        assert not unmatched_targets(QuantizationModifier(scheme="W4A16", targets=(pattern,)), [layer])
        assert not unmatched_ignores(QuantizationModifier(scheme="W4A16", ignore=(pattern,)), [layer])


def test_errors_come_together(narrow: Path) -> None:
    both = quantizing(scheme="W4A16", group_size=128, targets=["Linear", "re:.*nope$"])
    planned: Plan = plan(narrow, both)
    assert len(planned.errors) == 2
    with pytest.raises(PlanError, match=r"(?s)matches nothing.*does not divide"):
        planned.raise_for_errors()


@pytest.mark.parametrize(
    "keys", [W4 | {"ignore": ["Linear"]}, W4 | {"group_size": 100, "skip_indivisible": True}], ids=["ignore", "skipped"]
)
def test_a_modifier_that_changes_no_layer_is_an_error(tiny_llama: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    (text,) = errors(tiny_llama, quantizing(**keys))
    assert "QuantizationModifier changes no layer" in text and "leaves out all" in text and "q_proj" in text
    for run in (
        lambda: SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe=quantizing(**keys)),
        lambda: oneshot(tiny_llama, quantizing(**keys), output=tmp_path / "out"),
    ):
        with pytest.raises(PlanError, match="changes no layer"):
            run()


def test_an_embedding_has_no_inputs_to_scale(tiny_llama: Path) -> None:
    (error,) = errors(tiny_llama, quantizing(scheme="FP8", targets=["Linear", "model.embed_tokens"]))
    assert "model.embed_tokens" in error and "token ids and have no scale" in error
    assert not errors(tiny_llama, quantizing(scheme="FP8", targets=["Linear", "lm_head"]))
