"""The walk: each set sees every token once, later sets see what earlier ones have become, nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, T5Config, T5ForConditionalGeneration

from sparseautomodel.attention import block_attention
from sparseautomodel.callbacks import Callbacks
from sparseautomodel.sets import LayerSet, find_blocks
from sparseautomodel.spill import Spill
from sparseautomodel.walk import Room, walk


class Sum:
    """A statistic: what has been summed up of the inputs."""

    def __init__(self, nbytes: int = 1) -> None:
        self.nbytes = nbytes
        self.value: Tensor | float = 0.0

    def update(self, inputs: Tensor) -> None:
        self.value = self.value + inputs.double().sum(0)


class Recorder(Callbacks):
    """Records what is called; `change` is applied to each layer's weight when it is solved."""

    def __init__(self, model: nn.Module, change: float = 1.0) -> None:
        self.model, self.change = model, change
        self.calls: list[str] = []
        self.sets: list[tuple[str, ...]] = []
        self.sums: dict[str, Any] = {}
        self.tokens: dict[str, int] = {}
        self.blocks: list[tuple[str, Tensor, Tensor]] = []
        self.ends: list[tuple[Any, Any, Any]] = []

    def enter(self, block: str) -> None:
        self.calls.append(f"enter {block}")

    def gather(self, names: Sequence[str]) -> list[Any]:
        return [Sum()]

    def solve(self, layers: LayerSet) -> None:
        self.sets.append(layers.names)
        self.calls.append(f"solve {layers.names[0]}")
        for name in layers.names:
            self.sums[name], self.tokens[name] = layers.statistics[0].value, layers.num_tokens
            self.model.get_submodule(name).weight.data.mul_(self.change)

    def leave(self, block: str) -> None:
        self.calls.append(f"leave {block}")

    def compare(self, block: str, source: Tensor, result: Tensor) -> None:
        self.blocks.append((block, source, result))

    def compare_ends(self, row: Any, source: Any, result: Any) -> None:
        self.ends.append((row, source, result))


def linears(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "." in name]


def run(model: nn.Module, batches: list[dict[str, Tensor]], change: float = 1.0, **keys: Any) -> Recorder:
    layers = [name for name in linears(model) if find_blocks(model, [name])]
    blocks = find_blocks(model, layers)
    recorder = Recorder(model, change)
    walk(model, batches, blocks, {b: [n for n in layers if n.startswith(f"{b}.")] for b in blocks}, recorder, **keys)
    return recorder


def inputs_of(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sum of each layer's inputs, by plain hooks on plain forwards."""
    sums: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            sums[name] = sums.get(name, 0) + args[0].reshape(-1, args[0].shape[-1]).double().sum(0)

        return add

    hooks = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in linears(model)]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for one in hooks:
        one.remove()
    return sums


@pytest.fixture
def batches() -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.randint(1, 250, (rows, length))} for rows, length in ((2, 9), (3, 5), (1, 16))]


def test_llama_sets_order_and_sums(tiny_llama: Path, batches: list[dict[str, Tensor]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    expected = inputs_of(model, batches)
    done = run(model, batches)
    block = "model.layers.0"
    assert done.sets[:4] == [
        tuple(f"{block}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")),
        (f"{block}.self_attn.o_proj",),
        tuple(f"{block}.mlp.{name}" for name in ("gate_proj", "up_proj")),
        (f"{block}.mlp.down_proj",),
    ]
    assert len(done.sums) == 14
    for name, value in done.sums.items():
        torch.testing.assert_close(value, expected[name])
        assert done.tokens[name] == 2 * 9 + 3 * 5 + 16


def test_later_sets_see_what_earlier_ones_have_become(tiny_llama: Path, batches: list[dict[str, Tensor]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    done = run(model, batches, change=0.5)
    changed = inputs_of(model, batches)  # every weight is changed now, and every layer saw all those before it changed
    for name, value in done.sums.items():
        torch.testing.assert_close(value, changed[name])


def test_number_of_batches_changes_nothing(tiny_llama: Path) -> None:
    rows = torch.randint(1, 250, (8, 12))
    sums = []
    for size in (1, 3, 8):
        model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
        sums.append(run(model, [{"input_ids": part} for part in rows.split(size)], change=0.9).sums)
    for name, value in sums[0].items():
        torch.testing.assert_close(value, sums[1][name], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(value, sums[2][name], rtol=1e-5, atol=1e-4)


def test_a_block_is_left_before_the_next_is_entered(tiny_llama: Path, batches: list[dict[str, Tensor]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    calls = [call for call in run(model, batches).calls if not call.startswith("solve")]
    assert [call.split()[0] for call in calls] == ["enter", "leave", "enter", "leave"]
    assert calls[0].endswith("layers.0") and calls[2].endswith("layers.1")


def test_encoder_and_encoder_decoder_have_blocks(tiny_bert: Path, batches: list[dict[str, Tensor]]) -> None:
    bert = AutoModelForMaskedLM.from_pretrained(tiny_bert, dtype=torch.float32)
    expected = inputs_of(bert, batches)
    for name, value in run(bert, batches).sums.items():
        torch.testing.assert_close(value, expected[name])
    config = T5Config(vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    t5 = T5ForConditionalGeneration(config).eval()
    both = [batch | {"decoder_input_ids": batch["input_ids"][:, :4]} for batch in batches]
    expected = inputs_of(t5, both)
    done = run(t5, both)
    assert {name.split(".")[0] for name in done.sums} == {"encoder", "decoder"}
    for name, value in done.sums.items():
        torch.testing.assert_close(value, expected[name])


def test_hooks_and_threads_are_gone_after_an_error(tiny_llama: Path, batches: list[dict[str, Tensor]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    layers = [name for name in linears(model) if find_blocks(model, [name])]
    blocks = find_blocks(model, layers)

    class Failing(Recorder):
        def solve(self, layers: LayerSet) -> None:
            if "o_proj" in layers.names[0]:
                raise RuntimeError("cannot solve this")

    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="cannot solve this"):
        walk(model, batches, blocks, {blocks[0]: layers[:7], blocks[1]: layers[7:]}, Failing(model))
    assert set(threading.enumerate()) <= before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_an_error_of_the_model_reaches_the_caller(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with pytest.raises(IndexError):
        run(model, [{"input_ids": torch.tensor([[100000]])}])


def test_a_block_that_no_forward_runs_is_named(tiny_llama: Path, batches: list[dict[str, Tensor]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.extra = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])
    with pytest.raises(ValueError, match=r"does not run extra\.0"):
        walk(model, batches, ["extra.0", "model.layers.0"], {}, Recorder(model))


def test_a_block_that_runs_twice_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])
            self.last = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])

        def forward(self, x: Tensor) -> Tensor:
            return self.last[0](self.layers[0](self.layers[0](x)))

    model = Twice()
    with pytest.raises(ValueError, match="more than once"):
        walk(model, [{"x": torch.rand(2, 4)}], ["layers.0", "last.0"], {}, Recorder(model))


def test_in_parts_gives_what_one_forward_gives(
    tiny_llama: Path, batches: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    done = []
    for room in (Room(), Room(Spill(tmp_path, 0), 0), Room(Spill(tmp_path, 0), 1 << 40)):
        model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
        done.append(run(model, batches, 0.5, room=room))
    whole, parts, spilled = done
    assert whole.sets == parts.sets == spilled.sets
    assert whole.tokens == parts.tokens == spilled.tokens
    for name, value in whole.sums.items():
        assert torch.equal(value, parts.sums[name]) and torch.equal(value, spilled.sums[name])


def test_a_part_has_as_many_sets_as_have_room(
    tiny_llama: Path, batches: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    expected = inputs_of(model, batches)  # of the dense model: all sets of a block are seen before one is solved
    recorder = run(model, batches, 0.5, room=Room(Spill(tmp_path, 0), 4))  # four sets of one byte
    for name in recorder.sums:
        if "layers.0" in name:
            torch.testing.assert_close(recorder.sums[name], expected[name])


def test_witnesses_see_both_models(tiny_llama: Path, batches: list[dict[str, Tensor]]) -> None:
    source = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    rows = [{"input_ids": torch.randint(1, 250, (1, 11))} for _ in range(2)]
    recorder = run(model, batches, 0.5, witnesses=rows)
    assert set(recorder.tokens.values()) == {2 * 9 + 3 * 5 + 16}
    assert [name for name, _, _ in recorder.blocks] == [f"model.layers.{number}" for number in (0, 0, 1, 1)]
    with torch.no_grad():
        for row, (ends, first, second) in zip(rows, recorder.ends, strict=True):
            assert ends is row
            torch.testing.assert_close(first.logits, source(**row).logits)
            torch.testing.assert_close(second.logits, model(**row).logits)
            assert not torch.allclose(first.logits, second.logits)


def test_layers_outside_the_blocks_see_every_token(tiny_llama: Path, batches: list[dict[str, Tensor]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    recorder = run(model, batches, 0.5, outside=["lm_head", "model.embed_tokens"])
    model.model.embed_tokens.weight.data.mul_(2)  # it was solved last, without a token
    changed = inputs_of(model, batches)
    assert recorder.sets[-2:] == [("lm_head",), ("model.embed_tokens",)]
    assert recorder.tokens["lm_head"] == 2 * 9 + 3 * 5 + 16 and recorder.tokens["model.embed_tokens"] == 0
    torch.testing.assert_close(recorder.sums["lm_head"], inputs_of_head(model, batches))
    torch.testing.assert_close(recorder.sums["model.layers.1.mlp.down_proj"], changed["model.layers.1.mlp.down_proj"])


def inputs_of_head(model: Any, batches: list[dict[str, Tensor]]) -> Tensor:
    with torch.no_grad():
        hidden = [model.model(**batch).last_hidden_state.flatten(0, 1).double().sum(0) for batch in batches]
    return torch.stack(hidden).sum(0)


def test_freed_memory_goes_back_on_the_way(
    tiny_llama: Path, batches: list[dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = []
    monkeypatch.setattr(Spill, "trim", lambda self: times.append(1))
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    run(model, batches, room=Room(Spill(tmp_path, 0)))
    assert not times  # too little has passed to be worth it
    monkeypatch.setattr("sparseautomodel.walk._TRIM", 0)
    run(model, batches, room=Room(Spill(tmp_path, 0)))
    assert len(times) >= len(batches) * 8  # four sets in each of two blocks


@pytest.mark.parametrize("way", ["compiled_attention", "block_attention"])
def test_attention_is_our_own_during_the_walk_and_not_after(
    way: str, tiny_llama: Path, batches: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []

    def counted(query: Tensor, *args: Any) -> Tensor:
        called.append(query.shape[0])
        return block_attention(query, *args)

    monkeypatch.setattr("sparseautomodel.attention._is_faster", lambda: True)
    monkeypatch.setattr("sparseautomodel.attention.has_compiled", lambda *given: way == "compiled_attention")
    monkeypatch.setattr(f"sparseautomodel.attention.{way}", counted)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    run(model, batches, witnesses=[{"input_ids": batches[0]["input_ids"][:1]}])
    rows = [len(batch["input_ids"]) for batch in batches]
    assert called == [1, *rows, 1] * 2  # in each block: the witness as it was, the batches, the witness as it became
    called.clear()
    model(**batches[0])
    assert not called  # nothing is left behind
