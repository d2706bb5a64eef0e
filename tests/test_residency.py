"""`device_budget`: what a call gives is what the model gives without it, whatever comes and goes."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
)

from sparseautomodel import SparseAutoModelForCausalLM, SparseAutoModelForSeq2SeqLM, plan, registers
from sparseautomodel.devices import MappedHost
from sparseautomodel.placement import place
from sparseautomodel.residency import Residency
from sparseautomodel.units import find_units
from sparseautomodel.working import WorkingMemory
from tests.conftest import SIZES
from tests.gguf_files import pack_gguf, write_gguf
from tests.rigs import ClockDevice, LabelledSlots

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_everything_on_the_fake_device() -> None:
    """In a process of its own, where a second device is registered."""
    _cases("")


def test_a_few_cases_on_the_fake_device() -> None:
    _cases("ties or everything_fits or difference or cache or others_read or experts or (copies and llama)")


def _cases(selected: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/fake/cases.py", "-k", selected]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_slots_are_what_is_read(tiny_llama: Path, share: float) -> None:
    """Home is spoilt, and so is every slot that nobody waited for or that was given up."""
    model = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w4a16", execution="compressed")
    ids = torch.arange(3, 9)[None]
    expected = model.generate(ids, **SETTINGS)
    units = find_units(model)
    least, most = place(units, -1).nbytes, sum(unit.nbytes for unit in units)
    device = LabelledSlots(poison_homes=True)
    model.residency = Residency(model, device, int(least + share * (most - least)) + (4 << 20))
    model.residency._arrange(int(least + share * (most - least)))
    assert torch.equal(model.generate(ids, **SETTINGS), expected)
    assert device.copied


BITSANDBYTES = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
FAMILIES: dict[str, tuple[Any, PreTrainedConfig]] = {
    "llama": (SparseAutoModelForCausalLM, LlamaConfig(**SIZES | {"num_hidden_layers": 4})),
    "mixtral": (SparseAutoModelForCausalLM, MixtralConfig(**SIZES, num_local_experts=4)),
    "gpt2": (
        SparseAutoModelForCausalLM,
        GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=64, n_positions=64, **ENDS),
    ),
    "t5": (
        SparseAutoModelForSeq2SeqLM,
        T5Config(
            **{"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "d_kv": 16},
            **{"decoder_start_token_id": 0, **ENDS},
        ),
    ),
}


@pytest.mark.parametrize("form", BITSANDBYTES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bitsandbytes_models_under_every_budget(tmp_path: Path, family: str, form: str) -> None:
    pytest.importorskip("bitsandbytes")
    auto, config = FAMILIES[family]
    getattr(transformers, auto.__name__.removeprefix("Sparse")).from_config(config).save_pretrained(tmp_path)
    given = {"quantization_config": BitsAndBytesConfig(**BITSANDBYTES[form]), "dtype": torch.float32}
    whole = auto.from_pretrained(tmp_path, device_map="cpu", **given)
    layers = sum(type(module).__module__.startswith("bitsandbytes") for module in whole.modules())
    assert layers >= 8, "it is quantized"
    ids = torch.arange(3, 9)[None]
    expected = whole.generate(ids, **SETTINGS)
    mapped = auto.from_pretrained(tmp_path, device="cpu", device_budget="20MB", **given)
    assert torch.equal(mapped.generate(ids, **SETTINGS), expected)
    units, working = find_units(whole), WorkingMemory(whole).of((1, 6))
    least, most = place(units, -1).nbytes, sum(unit.nbytes for unit in units)
    whole.residency = Residency(whole, LabelledSlots(poison_homes=True), most + working)  # slots are what is read
    for step in range(10, -1, -1):
        whole.residency.set_budget(least + step * (most - least) // 10 + working)
        assert torch.equal(whole.generate(ids, **SETTINGS), expected), step
        report = whole.residency.report()
        assert report.live_nbytes + report.working_nbytes <= report.budget
        assert step < 10 or {unit.state for unit in report.units} == {"resident"}
        for unit in report.units:
            assert unit.state in ("resident", "rows") or unit.copies, unit.name
    assert len({state.name for state in report.units if state.copies}) >= 2, "blocks came and went"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("held", ["dense", "packed"])
def test_gguf_under_every_budget(tmp_path: Path, kind: str, held: str) -> None:
    """transformers dequantizes GGUF files of most models, and keeps the blocks of some where it has a kernel."""
    ids, number = torch.arange(3, 9)[None], gguf.GGMLQuantizationType[kind]
    write_gguf(tmp_path / "model.gguf", number)
    whole = SparseAutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    whole = whole if held == "dense" else pack_gguf(whole, number)
    assert (torch.uint8 in {value.dtype for value in whole.parameters()}) == (held == "packed")
    with torch.no_grad():
        expected, stored = whole(ids).logits, {name: value.clone() for name, value in whole.state_dict().items()}
    units, working = find_units(whole), WorkingMemory(whole).of((1, 6))
    least, most = place(units, -1).nbytes, sum(unit.nbytes for unit in units)
    for step in range(11):
        model = copy.deepcopy(whole)
        model.residency = Residency(model, LabelledSlots(), least + step * (most - least) // 10 + working)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected) and torch.equal(model(ids).logits, expected)
        report = model.residency.report()
        assert report.live_nbytes <= report.budget - working
        assert ({unit.state for unit in report.units} == {"resident"}) == (step == 10)
        assert all(torch.equal(model.state_dict()[name], value) for name, value in stored.items())


def test_gguf_on_the_processor_is_refused(tmp_path: Path) -> None:
    """Its loader holds the dense model, which is what the budget is to prevent."""
    write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(ValueError, match=r"gguf_file='model.gguf' and device_budget on the processor.*save_pretrained"):
        SparseAutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", device="cpu", device_budget="20MB")


class Blocks(PreTrainedModel):
    """Blocks of one size that take a second each on `clock`."""

    config_class = PreTrainedConfig
    clock: ClockDevice | None = None

    def __init__(self, count: int) -> None:
        super().__init__(PreTrainedConfig())
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if self.clock is not None:
                self.clock.compute(1.0)
        return x


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("copy_time", [0.5, 1.0, 2.0, 4.0])
def test_copies_and_computation_overlap(share: float, copy_time: float) -> None:
    """A pass takes what the slower of the two takes, within one block."""
    count, nbytes = 32, 64 * 64 * 4
    model = Blocks(count).eval()
    resident = int(count * share)
    device = ClockDevice(bandwidth=nbytes / copy_time)
    model.residency = Residency(model, device, (resident + 2) * nbytes)
    model.clock = device
    x, times = torch.randn(1, 64), []
    with torch.no_grad():
        for _ in range(6):
            before, copies = device.now, len(device.copied)
            model(x)
            times.append(device.now - before)
            copied = len(device.copied) - copies
    assert abs(copied - (count - resident)) <= 1
    floor = max(count, (count - resident) * copy_time)
    assert (times[-1] + times[-2]) / 2 <= floor + max(1.0, copy_time)


@pytest.mark.parametrize("recipe", [None, "w4a16", "fp8-dynamic"])
@pytest.mark.parametrize("model_name", ["llama", "tied", "mixtral"])
def test_on_the_processor_from_files(
    save_model: Callable[[PreTrainedConfig], Path],
    request: pytest.FixtureRequest,
    model_name: str,
    recipe: str | None,
) -> None:
    folder = request.getfixturevalue({"tied": "tied_llama"}.get(model_name, f"tiny_{model_name}"))
    given = {"recipe": recipe, "execution": "compressed"}
    whole = SparseAutoModelForCausalLM.from_pretrained(folder, **given)
    ids = torch.arange(3, 9)[None]
    expected = whole.generate(ids, **SETTINGS)
    for budget in ("20MB", 1_500_000):
        model = SparseAutoModelForCausalLM.from_pretrained(folder, device="cpu", device_budget=budget, **given)
        assert isinstance(model, type(whole)) and type(model).__name__ == type(whole).__name__
        assert torch.equal(model.generate(ids, **SETTINGS), expected)
        assert {times for times, _ in model.load_report.reads.values()} == {1}
        for (name, mine), theirs in zip(model.state_dict().items(), whole.state_dict().values(), strict=True):
            assert torch.equal(mine.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8)), name
        model.residency.park()
        assert torch.equal(model.generate(ids, **SETTINGS), expected)


KERNELS = [
    ("w4a16", "int4"),
    ("w8a16", "int8 weights"),
    ("w8a8-dynamic", "int8 x int8"),
    ("fp8-dynamic", "fp8"),
    ("2of4-w4a16", "int4"),
    *((recipe, "registers") for recipe in ("w4a16", "fp8-dynamic") if registers.why_not() is None),
]


@pytest.mark.parametrize(("recipe", "kernel"), KERNELS)
@pytest.mark.parametrize("home", ["files", "slots"])
def test_layouts_of_kernels_under_every_budget(
    save_model: Callable[[PreTrainedConfig], Path],
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    kernel: str,
    home: str,
) -> None:
    """`execution="auto"` lays weights out for the processor, in files too; they come and go as they are laid out."""
    monkeypatch.setattr(MappedHost, "in_use", lambda self: 0)  # what else is in this process
    if kernel != "registers":
        monkeypatch.setattr(registers, "why_not", lambda: "not in this test")
    folder = save_model(LlamaConfig(**SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}))
    whole = SparseAutoModelForCausalLM.from_pretrained(folder, recipe=recipe)
    assert {name.startswith(kernel) for name, _ in whole.load_report.kernels.values()} == {True}
    ids, units = torch.arange(3, 9)[None], find_units(whole)
    expected, stored = whole.generate(ids, **SETTINGS), whole.state_dict()
    working = WorkingMemory(whole).of((1, 6))
    least, most = place(units, -1).nbytes, sum(unit.nbytes for unit in units)
    for step in range(11):
        budget = least + step * (most - least) // 10 + working
        if home == "files":
            given = {"device": "cpu", "device_budget": budget}
            model = SparseAutoModelForCausalLM.from_pretrained(folder, recipe=recipe, **given)
        else:
            model = copy.deepcopy(whole)
            model.residency = Residency(model, LabelledSlots(), budget)
        assert torch.equal(model.generate(ids, **SETTINGS), expected), step
        before = {unit.name: unit.copies for unit in model.residency.report().units}
        with torch.no_grad():
            model(ids, use_cache=False)
        report = model.residency.report()
        assert report.live_nbytes <= budget - working and report.live_nbytes == report.resident_nbytes + sum(
            ring.nbytes for ring in model.residency._rings
        )
        states = {unit.state for unit in report.units}
        assert (states == {"resident"}) == (step == 10) and most == sum(unit.nbytes for unit in report.units)
        for unit in report.units:  # each streamed one once; a slot may hold what nothing else needed it for
            assert unit.copies - before[unit.name] <= (unit.state == "streamed"), unit
        for (name, mine), theirs in zip(model.state_dict().items(), stored.values(), strict=True):
            assert torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)), name


def test_on_the_processor_changes_in_place_stay(save_model: Callable[[PreTrainedConfig], Path]) -> None:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, vocab_size=64
    )
    folder = save_model(config)
    model = SparseAutoModelForCausalLM.from_pretrained(folder, device_map="cpu", device_budget=3_500_000)
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        before = model(ids).logits
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(0.5)
        changed = model(ids).logits
        assert not torch.equal(changed, before)
        assert torch.equal(model(ids).logits, changed)
        whole = SparseAutoModelForCausalLM.from_pretrained(folder)
        for parameter in whole.parameters():
            if parameter.ndim == 2:
                parameter.mul_(0.5)
        assert torch.equal(whole(ids).logits, changed)


def test_another_budget_waits_for_calls_of_other_threads(tiny_llama: Path) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, device_map="cpu", device_budget=1_500_000)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        wanted = model(ids).logits

        def run(_: int) -> bool:
            with torch.no_grad():
                return all(torch.equal(model(ids).logits, wanted) for _ in range(20))

        with ThreadPoolExecutor(3) as pool:
            results = [pool.submit(run, number) for number in range(3)]
            number = 0
            while not all(result.done() for result in results):
                number += 1
                model.residency.park() if number % 2 else model.residency.set_budget(1_000_000 + number)
            assert all(result.result(timeout=60) for result in results)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("first", ["compiled", "under a budget"])
@pytest.mark.parametrize("recipe", [None, pytest.param("w4a16", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:Dynamo detected")
def test_blocks_may_be_compiled(tiny_llama: Path, backend: str, first: str, recipe: str | None) -> None:
    """Weights come and go between compiled forwards: one graph for all blocks, and none for what brings them."""
    model = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe=recipe, execution="compressed")
    ids, units, working = torch.arange(3, 9)[None], find_units(model), WorkingMemory(model).of((1, 6))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    least, most = place(units, -1).nbytes, sum(unit.nbytes for unit in units)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if first == "compiled":
        _compile_blocks(model, backend)
    device = LabelledSlots(poison_homes=True)
    model.residency = Residency(model, device, least + working)
    if first == "under a budget":
        _compile_blocks(model, backend)
    with torch.no_grad():
        for budget in (least, least, (least + most) // 2, least, most + (1 << 24), least):
            model.residency.set_budget(budget + working)
            assert torch.equal(model(ids, use_cache=False).logits, expected)
            copies = len(device.copied)
            assert torch.equal(model(ids, use_cache=False).logits, expected)
            assert (len(device.copied) > copies) == (budget < most)
    counted = torch._dynamo.utils.counters
    assert counted["stats"]["unique_graphs"] > 0
    if recipe is None:  # what dequantizes a layer is no single graph, with a budget or without
        assert counted["stats"]["unique_graphs"] <= 2 and not counted["graph_break"]


def _compile_blocks(model: nn.Module, backend: str) -> None:
    for block in model.get_submodule("model.layers"):
        block.compile(backend=backend)


def test_a_deep_copy_is_a_plain_model(tiny_llama: Path) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, device="cpu", device_budget="20MB")
    twin = copy.deepcopy(model)
    ids = torch.arange(3, 9)[None]
    assert twin.residency is None and torch.equal(twin(ids).logits, model(ids).logits)


def test_saves_what_was_loaded(tiny_llama: Path, tmp_path: Path) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, device="cpu", device_budget="20MB")
    model.save_pretrained(tmp_path)
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_errors(tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match=r"device_budget='1kB' is 1,000 bytes, and LlamaForCausalLM needs at least"):
        SparseAutoModelForCausalLM.from_pretrained(tiny_llama, device="cpu", device_budget="1kB")
    with pytest.raises(ValueError, match="device_budget is for one device"):
        SparseAutoModelForCausalLM.from_pretrained(tiny_llama, device="cpu", device_map="cpu", device_budget="1GB")
    model = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, device="cpu", device_budget="20MB")
    with pytest.raises(ValueError, match="Give at least device_budget="):
        model.residency.set_budget(10)
    assert model.residency.report().budget == 20_000_000


def test_the_plan_says_it_first(tiny_llama: Path) -> None:
    budget = 150_000
    found = plan(tiny_llama, device_budget=budget).forecast
    model = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, device="cpu", device_budget=budget)
    report = model.residency.report()
    assert found is not None and found.fits and found.bandwidth > 0
    assert found.streamed_nbytes == pytest.approx(report.streamed_nbytes, rel=0.02)
    assert found.staging_nbytes == pytest.approx(report.staging_nbytes, rel=0.02)
    assert not plan(tiny_llama, device_budget=1000).forecast.fits
