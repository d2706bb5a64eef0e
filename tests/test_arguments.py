"""Arguments of `from_pretrained` behave as transformers' own: each is given to both, and the models compared."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    GenerationConfig,
    LlamaConfig,
)

from sparseautomodel import (
    SparseAutoModel,
    SparseAutoModelForCausalLM,
    SparseAutoModelForMaskedLM,
    SparseAutoModelForSequenceClassification,
    oneshot,
)
from sparseautomodel.arguments import compression_device
from sparseautomodel.safetensors_file import CheckpointError
from sparseautomodel.verify import VerificationError

pytestmark = pytest.mark.filterwarnings("ignore")

REMOTE = """
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class TinyConfig(PreTrainedConfig):
    model_type = "remote_of_these_tests"

    def __init__(self, width=64, **kwargs):
        super().__init__(**kwargs)
        self.width = width


class TinyLM(PreTrainedModel, GenerationMixin):
    config_class = TinyConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"head.weight": "embed.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(256, config.width)
        self.block = nn.Sequential(nn.Linear(config.width, 128), nn.GELU(), nn.Linear(128, config.width))
        self.head = nn.Linear(config.width, 256, bias=False)
        self.register_buffer("ramp", torch.arange(1, 9, dtype=torch.float32), persistent=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, **kwargs):
        return CausalLMOutput(logits=self.head(self.block(self.embed(input_ids))))
"""


def state(model: Any) -> dict[str, torch.Tensor]:
    return model.state_dict()


def same(one: Any, other: Any) -> bool:
    first, second = state(one), state(other)
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture
def copied(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "copied"))


@pytest.mark.parametrize("recipe", [None, "w4a16"])
@pytest.mark.parametrize(
    "given", [{}, {"dtype": "auto"}, {"dtype": "float16"}, {"dtype": torch.float32}, {"torch_dtype": torch.float16}]
)
def test_dtype(given: dict[str, Any], recipe: str | None, tiny_llama: Path) -> None:
    ours = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe=recipe, **given)
    stock = AutoModelForCausalLM.from_pretrained(tiny_llama, **given)
    assert ours.dtype == stock.dtype == ours.config.dtype == stock.config.dtype
    assert {value.dtype for value in ours.parameters() if value.is_floating_point()} == {stock.dtype}
    assert torch.get_default_dtype() == torch.float32


def test_dtype_of_files_whose_config_names_none(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    config.pop("dtype", None)
    config.pop("torch_dtype", None)
    (copied / "config.json").write_text(json.dumps(config))
    assert SparseAutoModelForCausalLM.from_pretrained(copied, recipe="w4a16").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype='bfloat61' is no dtype of torch"):
        SparseAutoModelForCausalLM.from_pretrained(copied, dtype="bfloat61")


MAPS = ["cpu", {"": "cpu"}, "auto", "sequential", torch.device("cpu"), {"model": "cpu", "lm_head": "cpu"}]


@pytest.mark.parametrize("device_map", MAPS, ids=str)
def test_device_map(device_map: Any, tiny_llama: Path) -> None:
    plain = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w4a16")
    placed = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w4a16", device_map=device_map)
    assert same(plain, placed)
    stock = AutoModelForCausalLM.from_pretrained(tiny_llama, device_map=device_map)
    assert getattr(placed, "hf_device_map", None) == getattr(stock, "hf_device_map", None)


@pytest.mark.parametrize("device_map", [{"": "disk"}, {"model": "cpu", "lm_head": "disk"}])
def test_disk_in_a_device_map_says_what_to_use(device_map: Any, tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match=r"on 'disk'.*oneshot\(path, recipe, output=folder\)"):
        SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w4a16", device_map=device_map)


def test_modifiers_run_where_the_weights_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A9: a map with one place names it; else the accelerator that there is."""
    cpu, gpu, second = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    there = {"auto": cpu, "balanced": cpu, "sequential": cpu, "cpu": cpu, "meta": torch.device("meta")}
    assert {text: compression_device(text) for text in there} == there and compression_device(None) == cpu
    assert compression_device({"": "cpu"}) == compression_device(cpu) == cpu
    assert compression_device({"": second}) == compression_device({"a": "cuda:1", "b": "cuda:1"}) == second
    assert compression_device({"": gpu}) == compression_device("cuda:0") == compression_device("cuda") == gpu
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert compression_device("cuda") == second, "as transformers places it"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: gpu)
    for device_map in ("auto", "balanced", {"a": "cpu", "b": 0}, {"a": 0, "b": 1}):
        assert compression_device(device_map) == gpu
    assert compression_device(None) == cpu, "without a map, transformers leaves the model on the CPU"
    with pytest.raises(ValueError, match="device_map"):
        compression_device("bogus")


def test_key_mapping(tiny_llama: Path, tmp_path: Path) -> None:
    tensors = {
        name.replace("model.", "decoder.").replace("q_proj", "query"): value
        for name, value in tensors_of(tiny_llama).items()
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    shutil.copy(tiny_llama / "config.json", tmp_path)
    mapping = {"^decoder": "model", "query": "q_proj"}
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path, recipe="w4a16", key_mapping=mapping)
    assert same(model, SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w4a16"))
    model.save_pretrained(tmp_path / "saved")
    assert same(model, SparseAutoModelForCausalLM.from_pretrained(tmp_path / "saved", key_mapping=mapping))
    with pytest.raises(VerificationError, match=r"the model has no place for decoder\."):
        SparseAutoModelForCausalLM.from_pretrained(tmp_path)


def test_subfolder_and_variant(copied: Path, tmp_path: Path) -> None:
    wanted = SparseAutoModelForCausalLM.from_pretrained(copied, recipe="w4a16")
    GenerationConfig(max_new_tokens=7).save_pretrained(copied)
    outer = tmp_path / "outer"
    shutil.copytree(copied, outer / "sub")
    model = SparseAutoModelForCausalLM.from_pretrained(outer, subfolder="sub", recipe="w4a16")
    assert same(model, wanted) and model.generation_config.max_new_tokens == 7
    with pytest.raises((OSError, CheckpointError, ValueError)):
        SparseAutoModelForCausalLM.from_pretrained(outer, recipe="w4a16")
    tensors = tensors_of(copied)
    for file in [*copied.glob("*.safetensors*")]:
        file.unlink()
    save_file(tensors, copied / "model.fp16.safetensors", {"format": "pt"})
    assert same(SparseAutoModelForCausalLM.from_pretrained(copied, variant="fp16", recipe="w4a16"), wanted)
    with pytest.raises(CheckpointError, match=r"looked for model\.safetensors"):
        SparseAutoModelForCausalLM.from_pretrained(copied, recipe="w4a16")


def test_use_safetensors(copied: Path) -> None:
    wanted = SparseAutoModelForCausalLM.from_pretrained(copied, recipe="w4a16", use_safetensors=True)
    torch.save({name: value + 1 for name, value in tensors_of(copied).items()}, copied / "pytorch_model.bin")
    assert same(SparseAutoModelForCausalLM.from_pretrained(copied, recipe="w4a16"), wanted)
    assert not same(SparseAutoModelForCausalLM.from_pretrained(copied, recipe="w4a16", use_safetensors=False), wanted)
    for file in copied.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        SparseAutoModelForCausalLM.from_pretrained(copied, use_safetensors=True)


def test_output_loading_info(tiny_llama: Path) -> None:
    model, info = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w4a16", output_loading_info=True)
    _, stock = AutoModelForCausalLM.from_pretrained(tiny_llama, output_loading_info=True)
    assert info.keys() == stock.keys() and not any(info.values()) and model.load_report


@pytest.mark.parametrize("compressed", [False, True])
def test_a_config_object_is_used_and_left_as_it_is(compressed: bool, tiny_llama: Path, tmp_path: Path) -> None:
    folder = tiny_llama
    if compressed:
        oneshot(tiny_llama, "w4a16", output=tmp_path / "out")
        folder = tmp_path / "out"
    config = LlamaConfig.from_pretrained(folder)
    config.use_cache = False
    before = config.to_json_string(use_diff=False)
    head = {"modifiers": [{"QuantizationModifier": {"targets": ["lm_head", "Linear"], "scheme": "W8A8"}}]}
    model = SparseAutoModelForCausalLM.from_pretrained(folder, config=config, recipe=None if compressed else head)
    assert not model.config.use_cache and config.to_json_string(use_diff=False) == before
    assert hasattr(config, "quantization_config") == compressed


def test_keys_of_the_config_and_keys_that_nobody_has(tiny_llama: Path) -> None:
    model = SparseAutoModelForCausalLM.from_pretrained(
        tiny_llama, recipe="w4a16", use_cache=False, attn_implementation="eager"
    )
    assert not model.config.use_cache and model.config._attn_implementation == "eager"
    assert model.config.name_or_path == model.name_or_path == str(tiny_llama) and not model.training
    for load in (AutoModelForCausalLM, SparseAutoModelForCausalLM):
        with pytest.raises(TypeError, match="nonsense"):
            load.from_pretrained(tiny_llama, nonsense=3)


def test_generation_config_of_the_folder_of_the_caller_and_of_neither(copied: Path) -> None:
    def found(**given: Any) -> list[int | None]:
        return [
            load.from_pretrained(copied, **given).generation_config.max_new_tokens
            for load in (AutoModelForCausalLM, SparseAutoModelForCausalLM)
        ]

    (copied / "generation_config.json").unlink(missing_ok=True)
    assert found() == [None, None]
    GenerationConfig(max_new_tokens=7).save_pretrained(copied)
    assert found() == [7, 7] and found(generation_config=GenerationConfig(max_new_tokens=9)) == [9, 9]


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with its own model code."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "modeling_tiny.py").write_text(REMOTE)
    monkeypatch.syspath_prepend(tmp_path / "code")
    code = importlib.import_module("modeling_tiny")
    code.TinyConfig.register_for_auto_class()
    code.TinyLM.register_for_auto_class("AutoModelForCausalLM")
    model = code.TinyLM(code.TinyConfig(tie_word_embeddings=True))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    del sys.modules["modeling_tiny"]
    yield tmp_path / "model"


def test_trust_remote_code(remote: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        SparseAutoModelForCausalLM.from_pretrained(remote, recipe="w4a16", trust_remote_code=False)
    model = SparseAutoModelForCausalLM.from_pretrained(remote, recipe="w4a16", trust_remote_code=True)
    assert type(model).__name__ == "TinyLM" and model.load_report.layers_compressed == 2
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.ramp, torch.arange(1, 9)) and "ramp" in model.load_report.restored
    oneshot(remote, "w4a16", output=tmp_path / "out", trust_remote_code=True)
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert same(model, again) and model(torch.arange(4).view(1, 4)).logits.isfinite().all()


def test_heads_of_another_task(tiny_bert: Path, tiny_llama: Path, tmp_path: Path) -> None:
    """A new head (and the pooler under it) is initialised, and said; the head that is left is listed."""
    with pytest.warns(UserWarning, match="newly initialized, to be trained: bert.pooler.dense.bias"):
        model = SparseAutoModelForSequenceClassification.from_pretrained(tiny_bert, recipe="w4a16", num_labels=3)
    assert model.config.num_labels == 3 and model.classifier.weight.shape == (3, 64)
    new = {"bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias", "classifier.weight"}
    assert set(model.load_report.initialized) == new
    assert model.load_report.unread and all(name.startswith("cls.") for name in model.load_report.unread)
    stock = AutoModelForSequenceClassification.from_pretrained(tiny_bert, num_labels=3)
    assert torch.equal(stock.bert.embeddings.word_embeddings.weight, model.bert.embeddings.word_embeddings.weight)
    model.save_pretrained(tmp_path / "saved")
    again, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()) and torch.equal(again.classifier.weight, model.classifier.weight)
    with pytest.warns(UserWarning, match=r"to be trained: score\.weight"):
        SparseAutoModelForSequenceClassification.from_pretrained(tiny_llama, recipe="w4a16")


@pytest.mark.parametrize("how", ["dense", "compressed"])
def test_base_models_and_models_with_heads_from_each_other_s_files(
    how: str, tiny_llama: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    base = SparseAutoModel.from_pretrained(tiny_llama, recipe="w4a16", execution=how)
    full = SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w4a16", execution=how)
    assert same(base, full.model) and base.load_report.unread == ("lm_head.weight",)
    base.save_pretrained(tmp_path / "base")
    head = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert same(head.model, full.model) and head.load_report.initialized == ("lm_head.weight",)
    masked = SparseAutoModelForMaskedLM.from_pretrained(tiny_bert, recipe="w8a8-dynamic", execution=how)
    assert not masked.load_report.initialized and not masked.load_report.unread
    assert masked(torch.arange(8).view(1, 8)).logits.isfinite().all()


def test_ignore_mismatched_sizes(copied: Path) -> None:
    stored = tensors_of(copied)
    for file in copied.glob("*.safetensors*"):
        file.unlink()
    save_file(stored | {"lm_head.weight": torch.ones(3, 64)}, copied / "model.safetensors", {"format": "pt"})
    wanted = r"lm_head.weight has shape \[3, 64\] in the checkpoint and \[256, 64\] in the model"
    with pytest.raises(VerificationError, match=wanted):
        SparseAutoModelForCausalLM.from_pretrained(copied, recipe="w4a16")
    with pytest.warns(UserWarning, match=r"to be trained: lm_head\.weight"):
        model = SparseAutoModelForCausalLM.from_pretrained(copied, recipe="w4a16", ignore_mismatched_sizes=True)
    assert model.load_report.initialized == ("lm_head.weight",) and model.lm_head.weight.shape == (256, 64)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"execution": "fast"}, r"execution='fast' is not one of 'auto', 'compressed', 'dense'"),
    ({"device": "cpu"}, r"device='cpu' goes with device_budget. Write device_map='cpu'"),
    ({"device_budget": "much"}, "device_budget='much' must be bytes"),
    ({"device_budget": -1}, "device_budget=-1 must be bytes"),
    ({"recipe": "w4a16", "quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, "both say how to quantize"),
    ({"recipe": "w4a16", "gguf_file": "x.gguf"}, r"a recipe cannot be applied to gguf_file.*save_pretrained"),
    ({"recipe": "w4a16", "state_dict": {}}, "a recipe cannot be applied to state_dict"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[str(sorted(given)) for given, _ in WRONG])
def test_arguments_that_do_not_go(given: dict[str, Any], message: str, tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match=message):
        SparseAutoModelForCausalLM.from_pretrained(tiny_llama, **given)


def test_a_recipe_over_an_adapter_or_over_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tiny_llama)}))
    with pytest.raises(ValueError, match="a recipe cannot be applied to an adapter"):
        SparseAutoModelForCausalLM.from_pretrained(tmp_path, recipe="w4a16")
    with pytest.raises(ValueError, match="no checkpoint"):
        SparseAutoModelForCausalLM.from_pretrained(None, recipe="w4a16")


@pytest.mark.parametrize(
    "given",
    [{"gguf_file": "m.gguf"}, {"state_dict": {"a": 1}}, {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}],
)
def test_what_is_transformers_own_business_is_passed_on(
    given: dict[str, Any], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "theirs"

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", record)
    assert SparseAutoModelForCausalLM.from_pretrained(tiny_llama, dtype="float16", revision="main", **given) == "theirs"
    ((args, kwargs),) = calls
    kwargs.pop("config", None)
    assert args == (tiny_llama,) and kwargs == {"dtype": "float16", "revision": "main", **given}


def test_another_method_s_checkpoint_is_transformers_own_business(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "awq", "bits": 4}})
    )
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: kwargs["config"])
    passed = SparseAutoModelForCausalLM.from_pretrained(copied)
    assert passed.quantization_config["quant_method"] == "awq"


def test_stock_options_for_a_compressed_checkpoint_go_to_stock(tiny_llama: Path, tmp_path: Path) -> None:
    oneshot(tiny_llama, "w4a16", output=tmp_path / "out")
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=CompressedTensorsConfig())
    assert type(model.hf_quantizer).__name__ == "CompressedTensorsHfQuantizer" and not hasattr(model, "load_report")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("device_map", ["cuda", {"": "cuda:0"}])
def test_a_device_that_is_not_there_is_named(tiny_llama: Path, device_map: Any) -> None:
    with pytest.raises(ValueError, match=r"on 'cuda(:0)?', and this machine and torch have only 'cpu'"):
        SparseAutoModelForCausalLM.from_pretrained(tiny_llama, recipe="w8a16", device_map=device_map)


@pytest.mark.parametrize(
    "given", ["w4a16", [{"QuantizationModifier": {"scheme": "W4A16"}}], {"modifiers": []}], ids=str
)
def test_a_recipe_without_its_name_is_an_error(given: Any, tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match="a recipe goes by its name"):
        SparseAutoModelForCausalLM.from_pretrained(tiny_llama, given)


@pytest.mark.parametrize("given", ["abc", 1.5, [], "", 0, -1, True], ids=str)
def test_a_budget_that_is_no_size_is_named(given: Any, tiny_llama: Path) -> None:
    with pytest.raises(ValueError, match="device_budget="):
        SparseAutoModelForCausalLM.from_pretrained(tiny_llama, device_budget=given)
