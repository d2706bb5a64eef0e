"""What `verify` says of values: against the source, against the pattern that was claimed, and of a model in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from sparseautomodel import SparseAutoModelForCausalLM, oneshot, verify
from sparseautomodel.compressed_layers import settle
from sparseautomodel.verify import LIMITS, Verdict, VerificationError, is_finite, is_positive

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LAYER = "model.layers.1.mlp.up_proj"
Tensors = dict[str, torch.Tensor]
Broken = Callable[[str, Callable[[Tensors], object]], Path]


@pytest.fixture
def broken(tiny_llama: Path, tmp_path: Path) -> Broken:
    """A compressed checkpoint with its tensors changed."""

    def make(recipe: str, change: Callable[[Tensors], object]) -> Path:
        folder = tmp_path / recipe
        oneshot(tiny_llama, recipe, output=folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return make


# The pattern


@pytest.mark.parametrize("recipe", ["2of4", "2of4-w4a16"])
def test_broken_pattern_is_found_on_the_values_read_back(broken: Broken, recipe: str) -> None:
    def fill(tensors: Tensors) -> None:
        if recipe == "2of4":
            tensors[f"{LAYER}.weight"][3, 8:12] = 1.0
        else:
            tensors[f"{LAYER}.weight_packed"][3, 1] = 0x7FFFFFFF

    verdict = verify(broken(recipe, fill))
    (problem,) = verdict.problems
    assert problem.startswith(f"{LAYER} should be 2:4 and is not, in ") and "groups" in problem


def test_report_that_cannot_be_read_claims_nothing(broken: Broken) -> None:
    folder = broken("2of4", lambda tensors: tensors[f"{LAYER}.weight"].fill_(1.0))
    assert not verify(folder).ok
    for text in ("", "[]", "{}", '{"structures": null}'):
        (folder / "compression_report.json").write_text(text)
        assert verify(folder).ok
    (folder / "compression_report.json").write_text(json.dumps({"structures": {LAYER: "many:few"}}))
    assert f"compression_report.json: {LAYER}" in verify(folder).problems[0]


# Against the source


@pytest.mark.parametrize("recipe", ["w4a16", "2of4", "w8a8-dynamic"])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_dense_tensor_that_the_recipe_left_alone_has_changed(
    broken: Broken, tiny_llama: Path, recipe: str, name: str
) -> None:
    def nudge(tensors: Tensors) -> None:
        tensors[name].view(-1)[5] += 0.25

    folder = broken(recipe, nudge)
    assert verify(folder).ok
    problem = verify(folder, against=tiny_llama).problems[-1]
    assert name.removesuffix(".weight") in problem and "differs from the source" in problem


def test_layer_that_is_zeroed_though_no_recipe_prunes_it(broken: Broken, tiny_llama: Path) -> None:
    folder = broken("w4a16", lambda tensors: tensors["lm_head.weight"][7].zero_())
    assert "lm_head is stored dense and differs from the source in 64 weights" in verify(folder, tiny_llama).problems
    (folder / "compression_report.json").unlink()
    assert verify(folder, tiny_llama).ok  # without a report nobody knows that it was not to be pruned


def test_pruned_layer_whose_other_weights_have_moved(broken: Broken, tiny_llama: Path) -> None:
    folder = broken("2of4", lambda tensors: tensors[f"{LAYER}.weight"].mul_(1.5))
    (problem,) = verify(folder, against=tiny_llama).problems
    assert problem == f"{LAYER} is stored dense and differs from the source in {128 * 64 // 2} weights"


@pytest.mark.parametrize("recipe", ["w4a16", "w8a16", "fp8-dynamic"])
def test_zeros_of_the_source_that_were_refilled(tiny_llama: Path, tmp_path: Path, recipe: str) -> None:
    oneshot(tiny_llama, "2of4", output=tmp_path / "sparse")
    oneshot(tmp_path / "sparse", recipe, output=tmp_path / "out")
    verify(tmp_path / "out", against=tmp_path / "sparse").raise_for_problems()
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    part = tensors.get(f"{LAYER}.weight_packed", tensors.get(f"{LAYER}.weight"))
    part.view(torch.uint8)[0] ^= 0x40
    save_file(tensors, file)
    (problem,) = verify(tmp_path / "out", against=tmp_path / "sparse").problems
    assert problem.startswith(f"{LAYER}: ") and problem.endswith("weights that were zero are not any more")


def test_values_that_are_those_of_another_layer(broken: Broken, tiny_llama: Path) -> None:
    def swap(tensors: Tensors) -> None:
        for part in ("weight_packed", "weight_scale"):
            one, other = f"model.layers.0.mlp.up_proj.{part}", f"{LAYER}.{part}"
            tensors[one], tensors[other] = tensors[other], tensors[one]

    problems = verify(broken("w4a16", swap), against=tiny_llama).problems
    assert len(problems) == 2 and all("relative error 1." in problem for problem in problems)


def test_tensors_and_shapes_of_another_source(tiny_llama: Path, tied_llama: Path, tmp_path: Path) -> None:
    oneshot(tied_llama, "2of4", output=tmp_path / "out")
    problems = "\n".join(verify(tmp_path / "out", against=tiny_llama).problems)
    assert "lm_head of the source is not in the result" in problems
    wide = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(tied_llama, intermediate_size=96)).bfloat16()
    wide.save_pretrained(tmp_path / "wide")
    problems = "\n".join(verify(tmp_path / "out", against=tmp_path / "wide").problems)
    assert f"{LAYER} is [128, 64], in the source [96, 64]" in problems


# A model


def test_sound_model(tiny_llama: Path, tied_llama: Path) -> None:
    for folder in (tiny_llama, tied_llama):
        model = AutoModelForCausalLM.from_pretrained(folder)
        verdict = verify(model)
        assert verdict.ok and verdict.subject == "LlamaForCausalLM" and verdict.checked > 20


def test_parameter_on_meta(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.model.norm.to("meta")
    assert verify(model).problems == (
        "on the meta device, without values: model.norm.weight. Load them or call materialize(model)",
    )


def test_buffer_and_attribute_on_meta(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.to("meta")
    model.model.layers[1].table = torch.empty(3, device="meta")
    (problem,) = verify(model).problems
    assert "model.rotary_emb.inv_freq" in problem and "model.layers.1.table" in problem


def test_model_with_numbers_that_are_not_finite(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.model.norm.weight.data[3] = float("inf")
    model.model.rotary_emb.inv_freq[0] = float("nan")
    assert verify(model).problems == ("not finite: model.norm.weight, model.rotary_emb.inv_freq",)


def test_scale_of_a_compressed_model(tiny_llama: Path) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w4a16", execution="compressed")
    model.model.layers[1].mlp.up_proj.weight_scale.data[2] = 0
    wanted = (f"scales that are not above zero: {LAYER}.weight_scale",)
    assert verify(model).problems == wanted
    settle(model)
    assert verify(model).problems == wanted, "also where a kernel has laid it out"


def test_what_a_model_calls_a_scale_may_be_any_number() -> None:
    """Parameters such as `logit_scale` or `per_dim_scale` are no scales of a format: zero and below are their right."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("per_dim_scale", nn.Parameter(torch.tensor([0.0, -1.0])))
    assert verify(model).ok


def test_broken_tie(tied_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tied_llama)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    (problem,) = verify(model).problems
    assert "lm_head.weight" in problem and "model.embed_tokens.weight" in problem and "two tensors" in problem


def test_verifying_leaves_the_number_of_threads_alone(tiny_llama: Path) -> None:
    model, before = AutoModelForCausalLM.from_pretrained(tiny_llama), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        verify(model), verify(tiny_llama)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


# The verdict


def test_verdict_for_people_and_for_programs() -> None:
    good, bad = Verdict("a", checked=7), Verdict("b", ("x is wrong", "y is wrong"), 9)
    assert good.ok and str(good) == "a: 7 tensors in order" and good.raise_for_problems() is None
    assert not bad.ok and str(bad) == "b: 2 problems\n- x is wrong\n- y is wrong"
    assert json.loads(json.dumps(bad.to_dict())) == {
        "subject": "b",
        "ok": False,
        "checked": 9,
        "problems": ["x is wrong", "y is wrong"],
    }
    with pytest.raises(VerificationError, match=r"b is not in order:\n- x is wrong\n- y is wrong"):
        bad.raise_for_problems()
    assert issubclass(VerificationError, ValueError)


@given(st.sampled_from(list(LIMITS)), st.integers(0, 2**31), st.integers(0, 60))
def test_finite_is_what_torch_says(dtype: torch.dtype, seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    expected = bool(values.to(torch.float64).isfinite().all())
    assert is_finite(values) == expected
    assert is_finite(values[::2]) == bool(values[::2].to(torch.float64).isfinite().all())
    assert is_finite(values.abs().to(torch.float64).nan_to_num(1, 1, 1).to(dtype)) or dtype == torch.float8_e4m3fn


def test_finite_and_positive_at_the_edges() -> None:
    for dtype in LIMITS:
        largest = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=torch.float64).to(dtype)
        assert is_finite(largest) and not is_positive(largest)
        assert not is_finite(torch.cat([largest.double(), torch.tensor([float("nan")])]).to(dtype))
        assert is_positive(torch.full((3,), torch.finfo(dtype).tiny, dtype=torch.float64).to(dtype))
        assert not is_positive(torch.zeros(3).to(dtype)) and not is_positive(torch.tensor(float("nan")).to(dtype))
    assert is_finite(torch.empty(0)) and is_positive(torch.empty(0)) and is_finite(torch.tensor([1, 2]))
    assert is_positive(torch.tensor([0, 254], dtype=torch.uint8)) and not is_positive(torch.tensor([255]).byte())
