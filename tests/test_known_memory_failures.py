"""Faults of memory that users of other tools met in one-shot runs; the label of the entry is in the docstring.

Nothing here measures the process: what is counted is what is computed and held.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig

from sparseautomodel import oneshot
from sparseautomodel.calibrated import scratch_of
from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.modifiers import MODIFIERS, Layer, Modifier, Weight
from sparseautomodel.statistics import Hessian, LayerError
from tests.conftest import SIZES

pytestmark = pytest.mark.filterwarnings("ignore")

GPTQ: dict[str, Any] = {"modifiers": [{"GPTQModifier": {"scheme": "W4A16", "group_size": 32}}]}


class Shapes(TorchDispatchMode):
    """Shapes of all that is computed; memory that is asked for and never written is none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is not torch.ops.aten.empty.memory_format:
            found = result if isinstance(result, tuple) else (result,)
            self.seen |= {tuple(one.shape) for one in found if isinstance(one, Tensor) and not one.is_meta}
        return result


class LiveHessian(Hessian):
    """Knows how much memory all of its kind hold at once."""

    alive: ClassVar[weakref.WeakSet[LiveHessian]] = weakref.WeakSet()
    peak: ClassVar[int] = 0

    def update(self, inputs: Tensor) -> None:
        super().update(inputs)
        _ = self.value
        LiveHessian.alive.add(self)
        LiveHessian.peak = max(LiveHessian.peak, len(LiveHessian.alive))


@dataclass(frozen=True, kw_only=True)
class Holder(Modifier, registered=False):
    """Gathers Hessians and changes nothing."""

    needs_data: ClassVar[bool] = True

    def statistic(self, layer: Layer) -> Hessian:
        return LiveHessian(layer.shape[1])

    def solve(self, weights: Sequence[Weight], statistic: Any) -> list[LayerError]:
        return [LayerError(weight.layer.name, 0.0, 0.0) for weight in weights]


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch) -> Holder:
    monkeypatch.setitem(MODIFIERS, "Holder", Holder)
    LiveHessian.alive, LiveHessian.peak = weakref.WeakSet(), 0
    return Holder()


@pytest.fixture
def rows() -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.randint(1, 250, (32,))} for _ in range(8)]


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_mixtral"])
def test_budget_changes_no_bit(model: str, rows: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """G2, G17: all samples' activations filled the memory; switches that save it crashed each other."""
    source = request.getfixturevalue(model)
    results = []
    for number, (budget, shard) in enumerate([("1GB", "5GB"), ("1GB", "64KB"), (1, "5GB"), (1, "64KB")]):
        output = tmp_path / str(number)
        oneshot(source, GPTQ, rows, output, batch_size=2, memory_budget=budget, max_shard_size=shard)
        results.append({name: tensor[...] for name, tensor in open_checkpoint(output).items()})
        assert not scratch_of(output).exists()
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name


def test_logits_of_calibration_rows_are_never_computed(rows: Any, tmp_path: Path) -> None:
    """G2: the logits are the largest tensor of a forward, and nobody reads them."""
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"vocab_size": 1999})).save_pretrained(tmp_path / "source")
    with Shapes() as shapes:
        oneshot(tmp_path / "source", GPTQ, rows, tmp_path / "out", batch_size=4)
    assert (4, 32, 64) in shapes.seen  # hidden states of a batch
    assert not any(shape[-1:] == (1999,) and shape[0] > 1 and len(shape) == 3 for shape in shapes.seen)


def test_experts_are_never_joined(save_model: Callable[[PreTrainedConfig], Path], rows: Any, tmp_path: Path) -> None:
    """G16: experts that are stored one by one were joined for the model and taken apart again for the method."""
    source = save_model(MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2))
    with Shapes() as shapes:
        oneshot(source, GPTQ, rows, tmp_path / "out", batch_size=4)
    assert (128, 64) in shapes.seen  # one expert's projection
    assert not any(len(shape) == 3 and shape[0] == 8 and {64, 128, 256} >= set(shape[1:]) for shape in shapes.seen)


def test_statistics_are_held_for_few_layers_at_a_time(tiny_llama: Path, rows: Any, tmp_path: Path, holder: Any) -> None:
    """G3: one Hessian for each set of layers with one input, let go when it is solved."""
    oneshot(tiny_llama, [holder], rows, tmp_path / "out", batch_size=1)
    assert LiveHessian.peak == 1 and not len(LiveHessian.alive)


def test_statistics_of_experts_are_held_for_few_at_a_time(
    save_model: Callable[[PreTrainedConfig], Path], tmp_path: Path, holder: Any
) -> None:
    """G3: one Hessian an expert, all at once, took 1.4 TB. Rows of few tokens, each with experts of its own."""
    source = save_model(MixtralConfig(**SIZES, num_local_experts=16, num_experts_per_tok=1))
    few = [{"input_ids": [token, token + 1]} for token in range(1, 33, 2)]
    oneshot(source, [holder], few, tmp_path / "out", batch_size=1, memory_budget=1)
    assert LiveHessian.peak == 1 and not len(LiveHessian.alive)
