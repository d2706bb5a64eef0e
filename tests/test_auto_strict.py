"""Damage, two threads, an exception half-way, what an import loads: nothing is silent, nothing is left behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from sparseautomodel import SparseAutoModelForCausalLM, oneshot
from sparseautomodel.checkpoint import StoredTensor
from sparseautomodel.plan import PlanError
from sparseautomodel.verify import VerificationError

pytestmark = pytest.mark.filterwarnings("ignore")

Tensors = dict[str, torch.Tensor]
ASYMMETRIC = {"modifiers": [{"QuantizationModifier": {"scheme": "W4A16_ASYM", "group_size": 32}}]}
UP = "model.layers.0.mlp.up_proj"
W1 = "model.layers.1.block_sparse_moe.experts.2.w1"


def damaged(folder: Path, target: Path, change: Callable[[Tensors], Any]) -> Path:
    tensors = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", target)
    return target


def put(name: str, value: torch.Tensor) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: value})


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


NORM, WRONG = "model.norm.weight", torch.ones(64, 64)
DENSE: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "a layer is missing": (drop(f"{UP}.weight"), rf"no tensor .*fills {UP}\.weight"),
    "a norm is missing": (drop(NORM), rf"no tensor .*fills {NORM}"),
    "a layer too many": (put("model.layers.0.more.weight", WRONG), r"no place for model\.layers\.0\.more"),
    "a layer of another shape": (put(f"{UP}.weight", WRONG), rf"{UP}\.weight has shape \[64, 64\]"),
    "a norm of another shape": (put(NORM, torch.ones(3)), rf"{NORM} has shape \[3\]"),
    "a number that is none": (put(NORM, torch.full((64,), float("nan"))), rf"not finite: {NORM}"),
}


@pytest.mark.parametrize("recipe", [None, "w4a16"])
@pytest.mark.parametrize("name", DENSE)
def test_damage_is_named(name: str, recipe: str | None, tiny_llama: Path, tmp_path: Path) -> None:
    change, message = DENSE[name]
    folder = damaged(tiny_llama, tmp_path / "damaged", change)
    with pytest.raises(VerificationError, match=message):
        SparseAutoModelForCausalLM.from_pretrained(folder, recipe=recipe)


@pytest.mark.parametrize("name", DENSE)
def test_not_strict_means_said_and_not_raised(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    change, message = DENSE[name]
    folder = damaged(tiny_llama, tmp_path / "damaged", change)
    with pytest.warns(UserWarning, match=message):
        model = SparseAutoModelForCausalLM.from_pretrained(folder, strict=False)
    assert not any(value.is_meta for value in model.parameters())


def test_a_recipe_for_a_layer_of_another_shape_stops_strict_or_not(tiny_llama: Path, tmp_path: Path) -> None:
    folder = damaged(tiny_llama, tmp_path / "damaged", DENSE["a layer of another shape"][0])
    with pytest.raises(PlanError, match=r"has shape \[64, 64\]"):
        SparseAutoModelForCausalLM.from_pretrained(folder, recipe="w4a16", strict=False)


PARTS = {
    "asymmetric": (ASYMMETRIC, ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")),
    "w8a8-dynamic": ("w8a8-dynamic", ("weight", "weight_scale")),
    "nvfp4a16": ("nvfp4a16", ("weight_packed", "weight_scale", "weight_global_scale")),
}


@pytest.mark.parametrize(("fixture", "layer"), [("tiny_llama", UP), ("tiny_mixtral", W1)])
@pytest.mark.parametrize("name", PARTS)
def test_every_tensor_of_a_scheme_is_needed_and_no_other(
    name: str, fixture: str, layer: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """F8: a scale that is missing, or left over, is never a model of other values."""
    recipe, parts = PARTS[name]
    oneshot(request.getfixturevalue(fixture), recipe, output=tmp_path / "out")
    for part in parts:
        folder = damaged(tmp_path / "out", tmp_path / f"no-{part}", drop(f"{layer}.{part}"))
        with pytest.raises(VerificationError, match=rf"{layer.rpartition('.')[2]}(\.weight\w*)?"):
            SparseAutoModelForCausalLM.from_pretrained(folder)
    folder = damaged(tmp_path / "out", tmp_path / "extra", put(f"{layer}.weight_other_scale", torch.ones(1)))
    with pytest.raises(VerificationError, match="weight_other_scale"):
        SparseAutoModelForCausalLM.from_pretrained(folder)
    shorter = torch.ones(3, 1, dtype=torch.bfloat16)
    folder = damaged(tmp_path / "out", tmp_path / "shorter", put(f"{layer}.weight_scale", shorter))
    with pytest.raises(VerificationError, match=r"weight_scale is \[3, 1\]"):
        SparseAutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("recipe", [None, "w4a16"])
def test_an_expert_that_is_missing_is_named_before_a_weight_is_read(
    recipe: str | None, tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = damaged(tiny_mixtral, tmp_path / "damaged", drop(f"{W1}.weight"))
    monkeypatch.setattr(StoredTensor, "__getitem__", None)
    with pytest.raises(VerificationError, match=rf"{W1} is missing"):
        SparseAutoModelForCausalLM.from_pretrained(folder, recipe=recipe)


def torch_state() -> tuple[Any, ...]:
    """What transformers, or a modifier, changes for a while and must give back."""
    patched = (
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.kaiming_uniform_,
        torch.linspace,
        nn.Module.register_parameter,
    )
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.get_default_device(),
        patched,
    )


@pytest.mark.parametrize("recipe", ["w4a16", "nvfp4a16", "2of4", None])
@pytest.mark.parametrize("how_many", [0, 7])
def test_an_exception_half_way_leaves_nothing_behind(
    recipe: str | None, how_many: int, tied_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, wanted = torch_state(), SparseAutoModelForCausalLM.from_pretrained(tied_llama, recipe=recipe).state_dict()
    left, read = how_many, StoredTensor.__getitem__

    def fail(self: StoredTensor, index: Any) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError("the disk is gone")
        return read(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(StoredTensor, "__getitem__", fail)
        with pytest.raises((OSError, RuntimeError), match="the disk is gone"):
            SparseAutoModelForCausalLM.from_pretrained(tied_llama, recipe=recipe)
    assert torch_state() == before
    again = SparseAutoModelForCausalLM.from_pretrained(tied_llama, recipe=recipe).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in again.items()) and torch_state() == before


def test_two_threads_load_two_models(tiny_llama: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    """Different dtypes, recipes and classes at once, and one that fails: each is what it is alone."""
    broken = damaged(tiny_llama, tmp_path / "broken", DENSE["a norm is missing"][0])
    jobs: list[tuple[Path, dict[str, Any]]] = [
        (tiny_llama, {"recipe": "w4a16", "dtype": torch.float16}),
        (tiny_mixtral, {"recipe": "nvfp4a16", "dtype": torch.float32}),
        (broken, {"recipe": "w8a16", "dtype": torch.float64}),
        (tiny_llama, {"dtype": torch.bfloat16}),
    ]
    alone = [SparseAutoModelForCausalLM.from_pretrained(folder, **given) for folder, given in jobs if folder != broken]
    before, start = torch_state(), threading.Barrier(len(jobs))

    def load(folder: Path, given: dict[str, Any]) -> Any:
        start.wait(timeout=30)
        return SparseAutoModelForCausalLM.from_pretrained(folder, **given)

    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(load, *job) for job in jobs]
    assert isinstance(futures[2].exception(), VerificationError)
    together = [future.result() for future in futures if future is not futures[2]]
    for one, other in zip(alone, together, strict=True):
        assert one.dtype == other.dtype
        first, second = one.state_dict(), other.state_dict()
        assert first.keys() == second.keys()
        assert all(
            value.dtype == second[name].dtype and torch.equal(value, second[name]) for name, value in first.items()
        )
    assert torch_state() == before


def test_a_model_may_be_loaded_while_another_is_built(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remote code does that in constructors; it must not wait for itself."""
    from sparseautomodel import auto

    inner: list[Any] = []
    real = auto.make_plan

    def nested(*args: Any, **kwargs: Any) -> Any:
        if not inner:
            inner.append(None)
            inner[0] = SparseAutoModelForCausalLM.from_pretrained(tiny_llama)
        return real(*args, **kwargs)

    monkeypatch.setattr(auto, "make_plan", nested)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(SparseAutoModelForCausalLM.from_pretrained, tiny_llama, recipe="w4a16")
        assert future.result(timeout=60).load_report.layers_compressed == 14 and inner[0] is not None


def test_random_state_is_the_caller_s(tiny_llama: Path) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w4a16")
    assert torch.equal(torch.get_rng_state(), before)


def test_warnings_name_the_line_of_the_caller(tiny_llama: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = {"scheme": "W4A16", "group_size": 32, "ignore": ["re:nope"]}
        SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe={"modifiers": [{"QuantizationModifier": given}]})
    ours = [one for one in caught if "QuantizationModifier" in str(one.message)]
    assert ours and {Path(one.filename).name for one in ours} == {Path(__file__).name}


def test_a_loaded_model_can_be_copied_moved_and_trained_around(tiny_llama: Path, tmp_path: Path) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w4a16")
    ids = torch.arange(12).view(1, 12)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w8a16", execution="compressed")
    assert not torch.equal(other(ids).logits, model(ids).logits)
    wide = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w4a16").to(torch.float32)
    assert wide(ids).logits.dtype == torch.float32
    torch.testing.assert_close(wide(ids).logits, model(ids).logits.float(), atol=0.1, rtol=0.1)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad is not None and embedded.grad.abs().sum() > 0
    dense = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert (model(ids).logits - dense(ids).logits).norm() / dense(ids).logits.norm() < 0.5


LIGHT = """
import sys, types
import sparseautomodel
assert {"plan", "verify", "oneshot", "Recipe"} < set(dir(sparseautomodel))
heavy = {"torch", "compressed_tensors"} & set(sys.modules)
assert not heavy, heavy
import sparseautomodel.plan
from sparseautomodel import plan
import sparseautomodel.verify, sparseautomodel.oneshot
from sparseautomodel import *
found = [plan, verify, oneshot, sparseautomodel.plan, sparseautomodel.verify, SparseAutoModelForCausalLM]
assert all(callable(one) and not isinstance(one, types.ModuleType) for one in found), found
assert isinstance(sys.modules["sparseautomodel.plan"], types.ModuleType)
"""


def test_an_import_is_light_and_names_are_functions_whatever_was_imported_before() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_that_are_not_there() -> None:
    import sparseautomodel

    with pytest.raises(AttributeError, match="has no attribute 'plam'"):
        _ = sparseautomodel.plam  # type: ignore[attr-defined]
    assert set(sparseautomodel.__all__) <= set(dir(sparseautomodel))


@pytest.mark.parametrize(
    "context",
    [torch.inference_mode, torch.no_grad, lambda: torch.device("cpu")],
    ids=["inference", "no_grad", "device"],
)
def test_loading_in_a_context_of_the_caller(context: Any, tied_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = SparseAutoModelForCausalLM.from_pretrained(tied_llama, recipe="nvfp4a16").state_dict()
    for threads in ("0", "1"):
        monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", threads)
        with context():
            model = SparseAutoModelForCausalLM.from_pretrained(tied_llama, recipe="nvfp4a16")
            logits = model(torch.arange(8).view(1, 8)).logits
        assert logits.isfinite().all()
        for name, value in model.state_dict().items():
            assert torch.equal(value.view(torch.uint8), wanted[name].view(torch.uint8)), name


@pytest.mark.parametrize("recipe", ["w8a16", "w4a16", "fp8-dynamic"])
def test_weights_beyond_the_range_of_float16_are_an_error(tiny_llama: Path, tmp_path: Path, recipe: str) -> None:
    """Codes and scales are finite each, and their product is not."""
    folder = damaged(tiny_llama, tmp_path / "large", lambda tensors: tensors[f"{UP}.weight"].mul_(1e6))
    with pytest.raises(VerificationError, match=rf"{UP}\.weight overflows torch\.float16: load it as bfloat16"):
        SparseAutoModelForCausalLM.from_pretrained(folder, recipe=recipe, dtype="float16")
    SparseAutoModelForCausalLM.from_pretrained(folder, recipe=recipe)
