"""Models under a budget on the fake device. Run in a process of its own by tests/test_residency.py."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import gguf
import pytest
import torch
import transformers
from torch import nn

import sparseautomodel
from sparseautomodel import working
from sparseautomodel.placement import place
from sparseautomodel.residency import Residency
from sparseautomodel.units import find_units
from tests.fake.accelerator import FakeAccelerator
from tests.fake.device import DEVICE, NAME, meter
from tests.gguf_files import pack_gguf, write_gguf

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "gpt2": transformers.GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=64, n_positions=64, **ENDS),
    "t5": transformers.T5Config(
        d_model=64, d_ff=128, num_layers=2, num_heads=4, vocab_size=64, d_kv=16, decoder_start_token_id=0, **ENDS
    ),
}
RECIPES = {"w4a16": "w4a16", "w8a8": "w8a8-dynamic", "fp8": "fp8-dynamic"}
ROOM = 60_000
"""Bytes for what a call needs besides the weights."""
TABLES = 64
"""Bytes of numbers that compressed-tensors makes once a device and keeps."""

MATRIX = [(name, "dense") for name in CONFIGS]
MATRIX += [(name, recipe) for name in ("llama", "mixtral", "t5") for recipe in RECIPES]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Models on the host, each with its input and the tokens it generates there."""
    made: dict[tuple[str, str], tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def get(name: str, form: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
        if (name, form) not in made:
            torch.manual_seed(1)
            auto = "AutoModelForSeq2SeqLM" if name == "t5" else "AutoModelForCausalLM"
            model = getattr(transformers, auto).from_config(CONFIGS[name]).eval()
            if form != "dense":
                folder: Path = tmp_path_factory.mktemp(name)
                model.save_pretrained(folder)
                load = getattr(sparseautomodel, f"Sparse{auto}").from_pretrained
                model = load(folder, recipe=RECIPES[form], execution="compressed", device_map="cpu")
            model.config._experts_implementation = "eager"  # the fused path makes a histogram that the CPU lacks
            ids = torch.randint(3, 64, (1, 6))
            if form != "dense":  # tables for dequantizing are made once a device, and stay
                copy.deepcopy(model).to(DEVICE).generate(ids.to(DEVICE), **SETTINGS)
            made[name, form] = model, ids, model.generate(ids, **SETTINGS)
        model, ids, expected = made[name, form]
        return copy.deepcopy(model), ids, expected

    return get


SETTINGS: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, models: Any) -> Iterator[None]:
    """A test leaves nothing on the device, and no limit."""
    parameters = getattr(request.node, "callspec", None)
    found = parameters.params if parameters else {}
    models(found.get("name", "llama"), found.get("form", "dense"))
    models("mixtral", "w4a16")
    gc.collect()
    before = meter.live
    yield
    meter.capacity = meter.fail_at = None
    gc.collect()
    assert meter.live - before <= TABLES, "something was left on the device"


def budget_of(model: nn.Module, share: float, room: int = ROOM) -> int:
    """A budget of a share of what there is between the least and everything."""
    units = find_units(model)
    least, all_of_it = place(units, -1).nbytes, sum(unit.nbytes for unit in units)
    return int(least + share * (all_of_it - least)) + room


@pytest.mark.parametrize(("name", "form"), MATRIX)
def test_tokens_are_equal_under_every_budget(
    models: Any, name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = form == "dense"
    if not dense:  # what a tiny layer is dequantized with is larger than the model
        monkeypatch.setattr(working, "_TILE", 0)
    for share in range(0, 11):
        model, ids, expected = models(name, form)
        before = meter.live
        budget = budget_of(model, share / 10, ROOM if dense else 6_000)
        meter.capacity, meter.peak = before + budget if dense else None, before  # also while it is loaded
        model.residency = Residency(model, FakeAccelerator(weights_only=not dense), budget)
        assert meter.live - before == model.residency.report().live_nbytes
        tokens = model.generate(ids.to(DEVICE), **SETTINGS)
        assert torch.equal(tokens.cpu(), expected), share
        del tokens
        gc.collect()
        report = model.residency.report()
        assert 0 <= meter.live - before - report.live_nbytes <= TABLES
        assert report.live_nbytes <= budget and (meter.peak <= before + budget or not dense)
        model.residency.park()
        gc.collect()
        assert meter.live - before <= TABLES
        assert all(value.device.type == "cpu" for value in model.state_dict().values())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("held", ["dense", "packed"])
def test_gguf_under_every_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: Any, kind: str, held: str
) -> None:
    """The blocks are unpacked on the device where transformers keeps them."""
    number = gguf.GGMLQuantizationType[kind]
    write_gguf(tmp_path / "model.gguf", number)
    whole = sparseautomodel.SparseAutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    whole = whole if held == "dense" else pack_gguf(whole, number)
    ids = torch.arange(3, 9)[None]
    expected = whole.generate(ids, **SETTINGS)
    monkeypatch.setattr(working, "_TILE", 0)
    for step in range(11):
        model, before = copy.deepcopy(whole), meter.live
        model.residency = Residency(model, FakeAccelerator(weights_only=True), budget_of(model, step / 10, 6_000))
        assert torch.equal(model.generate(ids.to(DEVICE), **SETTINGS).cpu(), expected), step
        gc.collect()
        report = model.residency.report()
        assert meter.live - before == report.live_nbytes <= report.budget
        model.residency.park()
        gc.collect()
        assert meter.live == before


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_forward_copies_what_is_streamed_and_nothing_else(models: Any, name: str, share: float) -> None:
    model, ids, _ = models(name, "dense")
    model.residency = Residency(model, FakeAccelerator(), budget_of(model, share))
    inputs = {"input_ids": ids.to(DEVICE), "use_cache": False}
    inputs |= {"decoder_input_ids": inputs["input_ids"]} if name == "t5" else {}
    with torch.no_grad():
        model(**inputs)
        model(**inputs)
        before = {unit.name: unit.copies for unit in model.residency.report().units}
        meter.reset()
        model(**inputs)
    report = model.residency.report()
    copies = {unit.name: unit.copies - before[unit.name] for unit in report.units}
    for unit in report.units:
        # T5's blocks differ in size, so that one may stay in a slot that nothing else needs.
        wanted = {0, 1} if name == "t5" and unit.state == "streamed" else {int(unit.state == "streamed")}
        assert unit.state == "rows" or copies[unit.name] in wanted, unit
    streamed = sorted(unit.nbytes for unit in report.units if unit.state == "streamed" and copies[unit.name])
    rows = sum(unit.state == "rows" for unit in report.units)
    large = sorted(meter.copies("h2d"), reverse=True)[: len(streamed)]
    assert sorted(large) == streamed and len(meter.copies("h2d")) <= len(streamed) + 2 * rows + 2


def test_only_the_experts_that_are_chosen_come(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working, "_TILE", 0)
    model, ids, _ = models("mixtral", "w4a16")
    model.residency = Residency(model, FakeAccelerator(weights_only=True), budget_of(model, 0, 6_000))
    chosen: list[set[int]] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(
            lambda module, args: chosen.append(set(args[1]._cpu.unique().tolist()))
        )
    with torch.no_grad():
        model(ids[:, :1].to(DEVICE), use_cache=False)
    experts = [unit for unit in model.residency.report().units if unit.kind == "expert"]
    came = {unit.name for unit in experts if unit.copies}
    stay = {unit.name for unit in experts if unit.state == "resident"}
    names = {f"model.layers.{n}.mlp.experts.{expert}" for n, some in enumerate(chosen) for expert in some}
    assert len(experts) == 16 and came == names - stay and len(stay) < 16 - len(names)
    assert all(unit.copies == 1 for unit in experts if unit.name in came)


def test_ties_stay_one_object(models: Any) -> None:
    model, ids, expected = models("tied", "dense")
    budgets = [budget_of(model, share) for share in (0.3, 0, 1)]
    model.residency = Residency(model, FakeAccelerator(), budgets[0])
    for budget in budgets:
        model.residency.set_budget(budget)
        assert torch.equal(model.generate(ids.to(DEVICE), **SETTINGS).cpu(), expected)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    model.residency.park()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_everything_fits_and_the_hooks_are_gone(models: Any) -> None:
    model, ids, expected = models("llama", "dense")
    half = budget_of(model, 0.5)
    model.residency = Residency(model, FakeAccelerator(), "1GB")
    assert type(model) is transformers.LlamaForCausalLM
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert {value.device.type for value in model.parameters()} == {NAME}
    assert torch.equal(model.generate(ids.to(DEVICE), **SETTINGS).cpu(), expected)
    model.residency.set_budget(half)
    assert {value.device.type for value in model.parameters()} == {"cpu"} and model.device.type == NAME
    assert torch.equal(model.generate(ids.to(DEVICE), **SETTINGS).cpu(), expected)


def test_another_budget_moves_the_difference(models: Any) -> None:
    model, _, _ = models("llama", "dense")
    most, little, everything = (budget_of(model, share) for share in (0.9, 0.1, 1))
    model.residency = Residency(model, FakeAccelerator(), most)
    resident = {unit.name for unit in model.residency.report().units if unit.state == "resident"}
    meter.reset()
    model.residency.set_budget(little)
    assert meter.copied("h2d") == 0
    fewer = {unit.name for unit in model.residency.report().units if unit.state == "resident"}
    model.residency.set_budget(everything)
    report = model.residency.report()
    assert fewer < resident
    assert meter.copied("h2d") == sum(unit.nbytes for unit in report.units if unit.name not in fewer)


def test_failure_at_every_allocation(models: Any) -> None:
    model, ids, _ = models("llama", "dense")
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    before = meter.live
    model.residency = Residency(model, FakeAccelerator(), budget_of(model, 0.4))
    inputs, failed = ids.to(DEVICE), 0
    for number in range(1, 400, 3):
        with torch.no_grad():
            meter.fail_at = number
            logits = model(inputs, use_cache=False).logits  # it is called again, with fewer weights
            done = meter.fail_at > 0
            meter.fail_at = None
            torch.testing.assert_close(logits.cpu(), expected)
            del logits
        failed += not done
        gc.collect()
        assert all(value.device.type == "cpu" for value in model.parameters()), number
        assert meter.live - before - inputs.nbytes == model.residency.report().live_nbytes, number
        if done:
            break
    assert done and failed > 50


def test_no_memory_twice_is_an_error_and_the_model_goes_on(models: Any) -> None:
    model, ids, expected = models("llama", "dense")
    before = meter.live
    model.residency = Residency(model, FakeAccelerator(), budget_of(model, 0.4))
    inputs, many = ids.to(DEVICE), ids.to(DEVICE).repeat(64, 1)
    held = inputs.nbytes + many.nbytes
    least = place(find_units(model), -1).nbytes
    for room in (100, 5_000, 20_000):
        meter.capacity = before + held + least + room
        with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match=r"device_budget=.*set_budget"):
            model(many)
        meter.capacity = None
        gc.collect()
        assert all(value.device.type == "cpu" for value in model.parameters())
        assert meter.live - before - held == model.residency.report().live_nbytes
        assert torch.equal(model.generate(inputs, **SETTINGS).cpu(), expected)


def test_cache_is_taken_back_when_a_step_is_done_again(models: Any) -> None:
    model, ids, expected = models("llama", "dense")
    model.residency = Residency(model, FakeAccelerator(), budget_of(model, 0.6))
    with torch.no_grad():
        first = model(ids.to(DEVICE), use_cache=True)
        cache, token = first.past_key_values, first.logits[:, -1:].argmax(-1)
        meter.fail_at = 60  # in the middle of the step
        second = model(token, past_key_values=cache)
        assert meter.fail_at <= 0
    assert cache.get_seq_length() == 7
    assert int(second.logits.cpu().argmax(-1)) == int(expected[0, 7])


def test_adapters_stay_on_the_device(models: Any) -> None:
    """LoRA as peft puts it in: a module around the Linear, with two of its own."""
    model, ids, _ = models("llama", "dense")
    model.residency = Residency(model, FakeAccelerator(), budget_of(model, 0.2))
    for layer in model.model.layers:
        layer.self_attn.q_proj = _Lora(layer.self_attn.q_proj)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        expected = plain(ids).logits
        model(ids.to(DEVICE))
        meter.reset()
        torch.testing.assert_close(model(ids.to(DEVICE)).logits.cpu(), expected)
    adapters = [unit for unit in model.residency.report().units if unit.state == "resident" and unit.nbytes == 1024]
    assert len(adapters) == 4 and 1024 not in meter.copies("h2d")


class _Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def test_weights_that_others_read_and_modules_run_without_being_called(models: Any) -> None:
    model, ids, _ = models("llama", "dense")

    class Odd(type(model.lm_head)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            other = model.model.embed_tokens.weight  # a parent would do so
            return super().forward(model.model.norm.forward(x)) + nn.functional.linear(x, other)

    model.lm_head.__class__ = Odd
    with torch.no_grad():
        expected = model(ids).logits
        model.residency = Residency(model, FakeAccelerator(), budget_of(model, 0))
        torch.testing.assert_close(model(ids.to(DEVICE)).logits.cpu(), expected)
    assert type(model.model.embed_tokens.weight) is nn.Parameter


def test_accelerate_side_by_side(models: Any) -> None:
    """No more bytes than its cpu_offload, in far fewer copies. Of four blocks, two slots take what could be resident:
    so few blocks are more bytes a forward than with dispatch_model, which copies while nothing computes."""
    figures = {}
    shares = {"accelerate cpu_offload": None, "accelerate dispatch_model": None, "ours, 0 %": 0.0, "ours, 50 %": 0.5}
    for label, share in shares.items():
        model, ids, _ = models("llama", "dense")
        before = meter.live
        if share is not None:
            model.residency = Residency(model, FakeAccelerator(), budget_of(model, share))
        elif "cpu" in label:
            accelerate.cpu_offload(model, execution_device=DEVICE, offload_buffers=True)
        else:
            names = [f"model.layers.{n}" for n in range(4)] + ["model.embed_tokens", "model.norm", "lm_head"]
            places: dict[str, Any] = {name: DEVICE if n in (0, 1) else "cpu" for n, name in enumerate(names)}
            places |= {"model.rotary_emb": DEVICE}
            accelerate.dispatch_model(model, places, main_device=DEVICE, offload_buffers=True)
        inputs = ids.to(DEVICE)
        with torch.no_grad():
            for _ in range(3):  # what calls need is learned
                model(inputs, use_cache=False)
            gc.collect()
            meter.reset()
            model(inputs, use_cache=False)
        figures[label] = meter.copied("h2d"), len(meter.copies("h2d")), meter.peak - before
        del model
        gc.collect()
    for label, (nbytes, copies, peak) in figures.items():
        print(f"{label:28}{nbytes:>10,} bytes in {copies:>3} copies, peak {peak:,}")
    theirs, dispatched, least, half = figures.values()
    assert least[0] <= theirs[0] and least[1] < theirs[1] / 4
    assert half[0] <= theirs[0] and half[1] < dispatched[1] and half[2] < dispatched[2] * 1.05
