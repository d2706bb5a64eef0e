"""`load_blocks`: any blocks of any family, dense or compressed, equal to the full model; their bytes alone are read."""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BartConfig, BitsAndBytesConfig

from sparseautomodel import load_blocks, oneshot
from sparseautomodel.plan import PlanError
from sparseautomodel.safetensors_file import SafetensorsFile
from sparseautomodel.verify import VerificationError
from tests.block_families import BLOCKS, FAMILIES, ODD, full_model, outputs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

IGNORE = ["lm_head", "re:.*(cls|predictions|pooler).*"]
FORMATS: dict[str, Any] = {
    "w4a16": [{"QuantizationModifier": {"targets": ["Linear"], "ignore": IGNORE, "scheme": "W4A16", "group_size": 32}}],
    "fp8": [{"QuantizationModifier": {"targets": ["Linear"], "ignore": IGNORE, "scheme": "FP8_DYNAMIC"}}],
    "2of4": [{"MagnitudePruningModifier": {"targets": ["Linear"], "ignore": IGNORE, "mask_structure": "2:4"}}],
}
SPLITS = list(range(1, BLOCKS))


@pytest.mark.parametrize("name", [*FAMILIES, *ODD])
def test_all_ranges_equal_the_full_model(name: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(name)
    ids = torch.randint(3, 60, (2, 7))
    hidden, output = outputs(full_model(name, folder, None), ids)
    for start, stop in itertools.combinations(range(BLOCKS + 1), 2):
        stage = load_blocks(folder, range(start, stop))
        with torch.no_grad():
            got = stage(ids if start == 0 else hidden[start - 1])
        assert torch.equal(got, output if stop == BLOCKS else hidden[stop - 1]), (start, stop)


@pytest.mark.parametrize("saved", [False, True], ids=["on-the-way", "saved"])
@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_split_of_every_format(
    name: str, recipe: str, saved: bool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    if name == "gpt2" and recipe != "2of4":
        pytest.skip("Conv1D is stored dense only")
    folder: Path = folder_of(name)
    modifiers: Any = copy.deepcopy(FORMATS[recipe])
    if name == "gpt2":
        modifiers[0]["MagnitudePruningModifier"]["targets"] = ["Conv1D"]
    if saved:
        oneshot(folder, modifiers, output=tmp_path / "saved")
        folder, modifiers = tmp_path / "saved", None
    ids = torch.randint(3, 60, (2, 7))
    full = full_model(name, folder, modifiers)
    _, output = outputs(full, ids)
    for split in SPLITS:
        first, last = (
            load_blocks(folder, blocks, modifiers, block_cache=tmp_path / "cache")
            for blocks in (range(split), range(split, BLOCKS))
        )
        with torch.no_grad():
            assert torch.equal(last(first(ids)), output), split
    if recipe != "2of4":
        packed = sum(one.nbytes for one in full.parameters()) - sum(one.nbytes for one in _edges(full))
        middle = load_blocks(folder, range(1, 2), modifiers, block_cache=False)
        assert sum(one.nbytes for one in middle.model.parameters()) <= packed / BLOCKS + 256


def test_reads_the_blocks_and_opens_their_files_alone(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("llama")
    opened: list[str] = []
    init = SafetensorsFile.__init__
    monkeypatch.setattr(SafetensorsFile, "__init__", lambda self, path: (opened.append(path), init(self, path))[1])
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    mine = {name: file for name, file in index.items() if name.startswith("model.layers.1.")}
    for recipe in (None, FORMATS["w4a16"]):
        opened.clear()
        stage = load_blocks(folder, range(1, 2), recipe, block_cache=False)
        assert {os.path.basename(path) for path in opened} == set(mine.values()) < set(index.values())
        assert {name: times for name, (times, _) in stage.load_report.reads.items()} == dict.fromkeys(mine, 1)
    assert set(load_blocks(folder, range(0, 1)).load_report.reads) == {
        *(name for name in index if name.startswith("model.layers.0.")),
        "model.embed_tokens.weight",
    }


def test_recipe_means_the_same_as_for_the_whole_model(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Patterns with a block's number, also one outside the range."""
    folder = folder_of("llama")
    one = {"targets": ["re:.*layers.2.mlp.*"], "scheme": "W4A16", "group_size": 32}
    two = {"targets": ["re:.*layers.0.*proj"], "scheme": "W8A16", "group_size": 32}
    recipe = [{"QuantizationModifier": one}, {"QuantizationModifier": two}]
    full = full_model("llama", folder, recipe)
    ids = torch.randint(3, 60, (2, 7))
    hidden, output = outputs(full, ids)
    with torch.no_grad():
        assert torch.equal(load_blocks(folder, range(2, 3), recipe, block_cache=tmp_path)(hidden[1]), output)
        assert torch.equal(load_blocks(folder, range(1, 2), recipe, block_cache=tmp_path)(hidden[0]), hidden[1])
    with pytest.raises(PlanError, match=r"layers\.7"):
        load_blocks(folder, range(0, 1), [{"QuantizationModifier": one | {"targets": ["re:.*layers.7.*"]}}])


def test_head_that_is_untied_by_the_recipe(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of("llama-tied")
    recipe = [{"QuantizationModifier": {"targets": ["Linear"], "scheme": "W8A16", "group_size": 32}}]
    ids = torch.randint(3, 60, (2, 7))
    hidden, output = outputs(full_model("llama-tied", folder, recipe), ids)
    first, last = (load_blocks(folder, blocks, recipe, block_cache=tmp_path) for blocks in (range(2), range(2, 3)))
    with torch.no_grad():
        assert torch.equal(first(ids), hidden[1])
        assert torch.equal(last(hidden[1]), output)
    assert "model.embed_tokens.weight" not in last.model.state_dict()


def test_tied_head_that_a_recipe_prunes_with_the_embedding(folder_of: Callable[[str], Path]) -> None:
    recipe = [{"MagnitudePruningModifier": {"targets": ["model.embed_tokens", "lm_head"], "mask_structure": "2:4"}}]
    folder, ids = folder_of("llama-tied"), torch.randint(3, 60, (2, 7))
    hidden, output = outputs(full_model("llama-tied", folder, recipe), ids)
    first, last = (load_blocks(folder, blocks, recipe, block_cache=False) for blocks in (range(2), range(2, 3)))
    with torch.no_grad():
        assert torch.equal(first(ids), hidden[1])
        assert torch.equal(last(hidden[1]), output)


def test_tied_head_alone_is_loaded_from_the_embedding(folder_of: Callable[[str], Path]) -> None:
    stage = load_blocks(folder_of("llama-tied"), range(2, 3))
    names = set(stage.model.state_dict())
    assert "lm_head.weight" in names
    assert "model.embed_tokens.weight" not in names
    whole = load_blocks(folder_of("llama-tied"), range(0, 3))
    assert whole.model.lm_head.weight is whole.model.model.embed_tokens.weight


def test_threshold_over_the_whole_model_is_refused(folder_of: Callable[[str], Path]) -> None:
    recipe = [{"MagnitudePruningModifier": {"sparsity": 0.5, "apply_globally": True, "targets": ["Linear"]}}]
    with pytest.raises(ValueError, match="threshold over the whole model cannot be found from a part"):
        load_blocks(folder_of("llama"), range(1, 2), recipe)


def test_encoder_of_an_encoder_decoder_checkpoint(tmp_path: Path) -> None:
    model = AutoModelForSeq2SeqLM.from_config(copy.deepcopy(FAMILIES["t5"])).eval()
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, 60, (2, 7))
    with torch.no_grad():
        hidden: torch.Tensor = ids
        for number in range(BLOCKS):
            hidden = load_blocks(tmp_path, range(number, number + 1))(hidden)
        assert torch.equal(hidden, model.get_encoder()(ids)[0])


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (range(2, 4), "the model has blocks 0 to 2"),
        (range(0, 3, 2), "is no run of blocks"),
        (range(1, 1), "is no run of blocks"),
        (range(-1, 1), "the model has blocks 0 to 2"),
        ([0, 1], "is no run of blocks"),
    ],
)
def test_wrong_ranges_say_the_right_ones(blocks: Any, message: str, folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=message):
        load_blocks(folder_of("llama"), blocks)


def test_missing_tensor_is_named(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = _copy(folder_of("llama"), tmp_path)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(VerificationError, match=r"no tensor of the checkpoint fills model\.layers\.1\.mlp\.up_proj"):
        load_blocks(folder, range(1, 2))
    assert load_blocks(folder, range(0, 1)).nbytes


def test_models_without_one_stack_are_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32}
    config = BartConfig(**sizes, decoder_ffn_dim=32, encoder_attention_heads=2, decoder_attention_heads=2)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no single stack of blocks"):
        load_blocks(tmp_path, range(0, 1))


def test_recipe_and_quantization_config_exclude_each_other(folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="leave one of them out"):
        load_blocks(folder_of("llama"), range(0, 1), FORMATS["w4a16"], quantization_config=object())


@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "int8"])
def test_bitsandbytes(kind: str, folder_of: Callable[[str], Path]) -> None:
    pytest.importorskip("bitsandbytes")
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": kind == "nf4-double"}
    wanted = BitsAndBytesConfig(**({"load_in_8bit": True} if kind == "int8" else four))
    folder, ids = folder_of("llama-wide"), torch.randint(3, 60, (2, 7))  # its kernels want multiples of 64
    full = AutoModelForCausalLM.from_pretrained(folder, quantization_config=wanted).eval()
    hidden, output = outputs(full, ids)
    with torch.no_grad():
        assert torch.equal(load_blocks(folder, range(0, 1), quantization_config=wanted)(ids), hidden[0])
        assert torch.equal(load_blocks(folder, range(1, 2), quantization_config=wanted)(hidden[0]), hidden[1])
        assert torch.equal(load_blocks(folder, range(2, 3), quantization_config=wanted)(hidden[1]), output)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_bitsandbytes_as_it_was_saved(kind: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    wanted = BitsAndBytesConfig(**{f"load_in_{4 if kind == 'nf4' else 8}bit": True}, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(folder_of("llama-wide"), quantization_config=wanted).save_pretrained(tmp_path)
    hidden, output = outputs(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), torch.randint(3, 60, (2, 7)))
    with torch.no_grad():
        assert torch.equal(load_blocks(tmp_path, range(1, 2))(hidden[0]), hidden[1])
        assert torch.equal(load_blocks(tmp_path, range(2, 3))(hidden[1]), output)
    with pytest.raises(ValueError, match="quantized by another method"):
        load_blocks(tmp_path, range(1, 2), FORMATS["w4a16"])


def test_arguments_of_transformers_are_passed_on(folder_of: Callable[[str], Path]) -> None:
    stage = load_blocks(folder_of("llama"), range(1, 2), attn_implementation="eager")
    assert stage.config._attn_implementation == "eager"
    other = load_blocks(folder_of("llama"), range(1, 2), subfolder="", local_files_only=True)
    assert other.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_five_of_thirty_blocks_of_a_real_model(smollm2: Path) -> None:
    full = AutoModelForCausalLM.from_pretrained(smollm2)
    hidden, _ = outputs(full, torch.arange(5, 30)[None])
    own = sum(one.nbytes for block in full.model.layers[10:15] for one in block.parameters())
    stage = load_blocks(smollm2, range(10, 15))
    assert stage.load_report.nbytes <= 1.02 * own
    assert stage.nbytes <= 1.02 * own
    with torch.no_grad():
        assert torch.equal(stage(hidden[9]), hidden[14])


def _edges(model: Any) -> list[torch.nn.Parameter]:
    blocks = next(one for one in model.modules() if isinstance(one, torch.nn.ModuleList))
    inside = {id(one) for one in blocks.parameters()}
    return [one for one in model.parameters() if id(one) not in inside]


def _copy(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))
