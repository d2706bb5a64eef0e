"""What a walk through a model asks of whoever changes the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from sparseautomodel.sets import LayerSet


class Callbacks:
    """What the walk asks for, in the order in which it does."""

    def outside(self, source: bool) -> None:
        """Let what lies outside the blocks be what it is in the source, or what it has become."""

    def enter(self, block: str) -> None:
        """Give the block the weights of the source."""

    def restore(self, block: str) -> bool:
        """Whether it is known what the block has to become, and it is that now. Then nothing is solved."""
        return False

    def found(self, block: str, sets: Sequence[LayerSet], run: Callable[[], Tensor]) -> None:
        """The sets of a block are known; `run` runs the block on one row and returns its output."""

    def gather(self, names: Sequence[str]) -> list[Any]:
        """Fresh statistics for a set of layers: objects with `update(inputs)` and `nbytes`."""
        return []

    def solve(self, layers: LayerSet) -> None:
        """Change the weights of the layers, in the modules."""

    def rounded(self, name: str, inputs: Tensor) -> Tensor:
        """Inputs of a layer as they are rounded when the result is run."""
        return inputs

    def leave(self, block: str) -> None:
        """The block is done: store what it has become, and free it."""

    def load_head(self) -> None:
        """Give the head its weights: no forward has needed them before."""

    def compare(self, block: str, source: Tensor, result: Tensor) -> None:
        """The output of a block for one witness, in the model as it was and as it has become."""

    def compare_ends(self, row: Mapping[str, Tensor], source: Any, result: Any) -> None:
        """What the whole model returns for one witness, as it was and as it has become."""
