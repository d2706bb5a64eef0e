"""Stages: called with and without caches, moved, and chained to the model that they come from."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import sparseautomodel
from sparseautomodel import load_blocks
from sparseautomodel.safetensors_file import CheckpointError
from sparseautomodel.stage import Stage, chain
from tests.block_families import BLOCKS, FAMILIES, full_model, outputs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

W4A16 = [{"QuantizationModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W4A16", "group_size": 32}}]
SPLITS = list(range(1, BLOCKS))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("t5", "bert")])
def test_chain_generates_what_the_full_model_does(name: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(name)
    full = full_model(name, folder, None)
    ids = torch.randint(3, 60, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for split in SPLITS:
        model = chain([load_blocks(folder, range(split)), load_blocks(folder, range(split, BLOCKS))])
        for way in (
            {"do_sample": False},
            {"do_sample": True},
            {"num_beams": 3},
            {"do_sample": False, "use_cache": False},
        ):
            drawn = []
            for one in (model, full):
                torch.manual_seed(1)
                options = {"max_new_tokens": 8, "pad_token_id": 0} | way
                drawn.append(one.generate(ids, attention_mask=mask, **options))
            assert torch.equal(*drawn), (split, way)


def test_chain_with_dynamic_cache_and_labels(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("gemma3")
    full = full_model("gemma3", folder, None)
    stages = [load_blocks(folder, range(number, number + 1)) for number in range(BLOCKS)]
    model = chain(stages)
    ids = torch.randint(3, 60, (2, 7))
    with torch.no_grad():
        assert torch.equal(model(ids, labels=ids).loss, full(ids, labels=ids).loss)
        ours, theirs = DynamicCache(config=full.config), DynamicCache(config=full.config)
        for part in ids.split([4, 2, 1], dim=1):
            got, want = model(part, past_key_values=ours), full(part, cache=theirs)
            assert torch.equal(got.logits, want.logits)
    assert ours.get_seq_length() == theirs.get_seq_length() == 7


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "bloom", "falcon", "mixtral"])
def test_middle_stage_with_a_cache_of_its_own(name: str, folder_of: Callable[[str], Path]) -> None:
    """The trap: where blocks keep their numbers, or placeholders are left, the cache says 0 positions were run."""
    folder = folder_of(name)
    ids = torch.randint(3, 60, (2, 7))
    hidden, _ = outputs(full_model(name, folder, None), ids)
    stage = load_blocks(folder, range(1, 2))
    cache = DynamicCache(config=stage.config)
    with torch.no_grad():
        whole = stage(hidden[0])
        parts = [stage(part, past_key_values=cache) for part in hidden[0].split([4, 2, 1], dim=1)]
    assert cache.get_seq_length() == 7
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "mixtral", "gpt2", "t5", "bert", "deepseek-dense-first"])
def test_move_reads_the_difference(name: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(name)
    ids = torch.randint(3, 60, (2, 7))
    hidden, output = outputs(full_model(name, folder, None), ids)
    stage = load_blocks(folder, range(0, 1))
    for start, stop in [(0, 2), (1, 3), (1, 2), (0, 3), (2, 3), (0, 1)]:
        kept = {stage._stack.block(number) for number in range(start, stop) if number in stage.blocks}
        stage.move(range(start, stop))
        assert not [one for one in stage.load_report.reads if one.startswith(tuple(f"{block}." for block in kept))]
        fresh = load_blocks(folder, range(start, stop))
        assert stage.nbytes == fresh.nbytes
        assert set(stage.model.state_dict()) == set(fresh.model.state_dict())
        with torch.no_grad():
            got = stage(ids if start == 0 else hidden[start - 1])
        assert torch.equal(got, output if stop == BLOCKS else hidden[stop - 1]), (start, stop)


def test_move_with_a_recipe_keeps_a_running_generation(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder, recipe = folder_of("llama"), W4A16
    full = full_model("llama", folder, recipe)
    ids = torch.randint(3, 60, (1, 7))
    stages = [load_blocks(folder, blocks, recipe, block_cache=tmp_path) for blocks in (range(0, 2), range(2, 3))]
    ours, theirs = DynamicCache(config=full.config), DynamicCache(config=full.config)
    with torch.no_grad():
        for part, split in zip(ids.split([3, 2, 2], dim=1), (2, 1, 2), strict=True):
            stages[0].move(range(split))
            stages[1].move(range(split, BLOCKS))
            hidden: torch.Tensor = part
            for stage in stages:
                hidden = stage(hidden, past_key_values=ours)
            assert torch.equal(hidden, full(part, cache=theirs).logits)


def test_failed_move_leaves_the_stage_as_it_was(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folder_of("llama"), tmp_path / "copy"))
    stage = load_blocks(folder, range(0, 1))
    before = stage(torch.arange(5)[None])
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    (folder / index["model.layers.2.mlp.up_proj.weight"]).unlink()
    with pytest.raises(CheckpointError, match="which is not there"):
        stage.move(range(0, 3))
    with pytest.raises(ValueError, match="blocks 0 to 2"):
        stage.move(range(0, 4))
    assert stage.blocks == range(0, 1)
    assert torch.equal(stage(torch.arange(5)[None]), before)


def test_dtype_device_and_config_of_a_stage(folder_of: Callable[[str], Path]) -> None:
    stage = load_blocks(folder_of("gemma3"), range(1, 3), device="cpu", dtype="bfloat16")
    assert stage.model.dtype == torch.bfloat16
    assert stage.device == torch.device("cpu")
    assert stage.config.num_hidden_layers == 2
    assert stage.config.layer_types == ["full_attention", "sliding_attention"]
    assert not stage.is_first
    assert stage.is_last
    assert stage.num_blocks == BLOCKS
    assert "blocks 1 to 2 of 3" in repr(stage)
    assert isinstance(stage, Stage)
    assert sparseautomodel.load_blocks is load_blocks


def test_one_cache_for_all_stages_or_one_for_each(folder_of: Callable[[str], Path]) -> None:
    folder, ids = folder_of("llama"), torch.randint(3, 60, (1, 7))
    stages = [load_blocks(folder, range(number, number + 1)) for number in range(BLOCKS)]
    own = [DynamicCache(config=stage.config) for stage in stages]
    lazy, whole = DynamicCache(), DynamicCache(config=full_model("llama", folder, None).config)
    results = []
    with torch.no_grad():
        for caches in (own, [lazy] * BLOCKS, [whole] * BLOCKS):
            for part in ids.split([4, 3], dim=1):
                hidden: torch.Tensor = part
                for stage, cache in zip(stages, caches, strict=True):
                    hidden = stage(hidden, past_key_values=cache)
            results.append(hidden)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert [cache.get_seq_length() for cache in (*own, lazy, whole)] == [7] * (BLOCKS + 2)


def test_positions_are_those_given(folder_of: Callable[[str], Path]) -> None:
    stage, hidden = load_blocks(folder_of("llama"), range(1, 2)), torch.randn(1, 4, 32)
    with torch.no_grad():
        plain = stage(hidden)
        assert torch.equal(stage(hidden, torch.arange(4)[None]), plain)
        assert not torch.allclose(stage(hidden, torch.tensor([[0, 2, 7, 9]])), plain)


def test_mistakes_of_a_call_are_named(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    middle = load_blocks(folder, range(1, 2))
    with pytest.raises(ValueError, match=r"blocks 1 to 1 takes hidden states, and was given torch\.int64"):
        middle(torch.arange(4)[None])
    two = DynamicCache(config=load_blocks(folder, range(0, 2)).config)
    with pytest.raises(ValueError, match="has 2 layers: it must have 1, those of this stage, or 3"):
        middle(torch.randn(1, 4, 32), past_key_values=two)


def test_chain_needs_all_blocks_in_order(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    first, second, third = (load_blocks(folder, range(number, number + 1)) for number in range(BLOCKS))
    for stages in ([first, third], [first, second], [second, third], [first, third, second]):
        with pytest.raises(ValueError, match="all 3 blocks in order"):
            chain(stages)
    with pytest.raises(ValueError, match="of no stage"):
        chain([])


def test_gradients_reach_the_input_and_the_stage_before(folder_of: Callable[[str], Path]) -> None:
    folder, ids = folder_of("llama"), torch.randint(3, 60, (1, 5))
    full = full_model("llama", folder, None)
    full(ids, labels=ids).loss.backward()
    stages = [load_blocks(folder, range(0, 1)), load_blocks(folder, range(1, 3))]
    chain(stages)(ids, labels=ids).loss.backward()
    assert torch.equal(
        stages[0].model.model.layers[0].mlp.up_proj.weight.grad, full.model.layers[0].mlp.up_proj.weight.grad
    )


def test_two_threads_call_one_stage(folder_of: Callable[[str], Path]) -> None:
    stage = load_blocks(folder_of("gpt2"), range(1, 2))
    inputs = [torch.randn(1, 4, 32) for _ in range(16)]
    with torch.no_grad():
        alone = [stage(one) for one in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(torch.no_grad()(stage), inputs))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_chain_is_whole_at_each_call_and_writes_no_files(tiny_llama: Path, tmp_path: Path) -> None:
    stages = [load_blocks(tiny_llama, range(0, 1)), load_blocks(tiny_llama, range(1, 2))]
    model, ids = chain(stages), torch.arange(5)[None]
    before = model(input_ids=ids).logits
    stages[1].move(range(0, 2))
    with pytest.raises(ValueError, match="blocks 0:1, 0:2"):
        model(input_ids=ids)
    stages[1].move(range(1, 2))
    assert torch.equal(model(input_ids=ids).logits, before)
    for call in (lambda: model.save_pretrained(tmp_path / "out"), model.state_dict):
        with pytest.raises(ValueError, match="a chain has no tensors of its own to save"):
            call()
    assert not (tmp_path / "out").exists()


def test_a_cache_of_one_stage_is_not_one_of_another(tiny_llama: Path) -> None:
    first, last = load_blocks(tiny_llama, range(0, 1)), load_blocks(tiny_llama, range(1, 2))
    cache = DynamicCache(config=first.config)
    hidden = first(torch.arange(5)[None], past_key_values=cache)
    with pytest.raises(ValueError, match="each stage needs a cache of its own"):
        last(hidden, past_key_values=cache)


def test_what_a_stage_cannot_take(tiny_llama: Path) -> None:
    first, last = load_blocks(tiny_llama, range(0, 1)), load_blocks(tiny_llama, range(1, 2))
    hidden = torch.randn(1, 5, 64, dtype=torch.bfloat16)
    wrong = {
        r"takes hidden_states \[batch, positions, 64\], and was given \[1, 5, 1\]": lambda: last(hidden[..., :1]),
        r"and was given \[1, 5, 32\]": lambda: last(hidden[..., :32]),
        r"and was given \[5, 64\]": lambda: last(hidden[0]),
        r"blocks 0 to 0 takes hidden_states .*given \[1, 5, 63\]": lambda: first(hidden[..., :63]),
        r"takes input_ids \[batch, positions\], and was given \[3\]": lambda: first(torch.arange(3)),
        r"blocks 1 to 1 takes hidden states, and was given torch.int64: input_ids go to the": lambda: last(
            torch.arange(3)[None]
        ),
        "was given a list: it takes a tensor": lambda: last([1, 2]),
        r"is in torch.bfloat16, and was given hidden_states of torch.float32.*stage\(hidden_states.to": lambda: last(
            hidden.float()
        ),
        "knows no argument 'atention_mask'. Write attention_mask=": lambda: last(hidden, atention_mask=None),
        "knows no argument 'zzz'. Those there are: attention_mask": lambda: last(hidden, zzz=1),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert last(hidden, output_attentions=False).shape == (1, 5, 256)


@pytest.mark.parametrize(("given", "name"), [([5], "int"), (5, "int"), ([torch.nn.Linear(2, 2)], "Linear")])
def test_a_chain_is_of_stages(given: object, name: str) -> None:
    with pytest.raises(ValueError, match=rf"chain takes stages of load_blocks, and was given {name}. Write chain\("):
        chain(given)  # type: ignore[arg-type]


def test_deep_copy_of_a_stage_is_a_stage_of_its_own(folder_of: Callable[[str], Path]) -> None:
    stage = load_blocks(folder_of("llama"), range(1, 2))
    twin, hidden = copy.deepcopy(stage), torch.randn(1, 5, 32)
    with torch.no_grad():
        expected = stage(hidden)
        assert torch.equal(twin(hidden), expected)
        next(twin.model.parameters()).add_(1)
        twin.move(range(2, 3))
        assert twin.blocks == range(2, 3) and stage.blocks == range(1, 2)
        assert torch.equal(stage(hidden), expected) and not torch.equal(twin(hidden), expected)
        assert torch.equal(twin(hidden), load_blocks(folder_of("llama"), range(2, 3))(hidden))
