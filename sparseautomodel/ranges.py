"""The smallest and the largest value of each input of a layer: what SmoothQuant and static activation scales need."""

from __future__ import annotations

import torch
from torch import Tensor


class InputRange:
    """Smallest and largest value of each column of a layer's inputs, over all tokens."""

    def __init__(self, columns: int, device: torch.device | str | None = None) -> None:
        """
        Args:
            device: where the values lie; None: where the first inputs are.
        """
        self.columns, self.tokens = columns, 0
        self._device = None if device is None else torch.device(device)
        self._ends: Tensor | None = None

    @torch.no_grad()
    def update(self, inputs: Tensor) -> None:
        """Add inputs `[tokens, in_features]` of any float dtype, without padding; another shape is a ValueError."""
        if inputs.ndim != 2 or inputs.shape[1] != self.columns or not inputs.is_floating_point():
            raise ValueError(
                f"inputs must be [tokens, {self.columns}] of a float dtype, got {list(inputs.shape)} {inputs.dtype}"
            )
        self.tokens += len(inputs)
        if len(inputs):
            ends = torch.stack(inputs.detach().to(self._device).aminmax(dim=0)).float()
            self._ends = ends if self._ends is None else _wider(self._ends, ends)

    @property
    def nbytes(self) -> int:
        """Memory that the values take."""
        return 8 * self.columns

    @property
    def low(self) -> Tensor:
        """`[in_features]` float32: the smallest value of each column; 0 where no token came."""
        return self._both()[0]

    @property
    def high(self) -> Tensor:
        """`[in_features]` float32: the largest value of each column; 0 where no token came."""
        return self._both()[1]

    @property
    def largest(self) -> Tensor:
        """`[in_features]` float32: the largest magnitude of each column."""
        return self._both().abs().amax(0)

    def divide(self, factors: Tensor) -> None:
        """As if all inputs had been divided by `factors` `[in_features]`, which are > 0."""
        if self._ends is not None:
            self._ends = self._ends / factors.float()

    def _both(self) -> Tensor:
        return torch.zeros(2, self.columns, device=self._device) if self._ends is None else self._ends


def _wider(ends: Tensor, more: Tensor) -> Tensor:
    return torch.stack([torch.minimum(ends[0], more[0]), torch.maximum(ends[1], more[1])])
