"""How far a compressed model has moved from its source, on rows that calibration has not seen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ROWS = 2
"""Rows that run through both models."""

_LOGITS = 2**19
"""Logits of each model that are compared at once: what the caches hold."""

_WORSE = 2.0
"""How many times the source's perplexity is too much."""

_FAR = 0.25
"""Relative squared error of hidden states that is too much, where there are no logits."""


@dataclass(frozen=True)
class Quality:
    """The end-to-end check that closes a calibrated run."""

    kind: str
    """`perplexity`, of a language model; `logits`, of another one with logits; `hidden states`."""
    source: float | None
    """Perplexity of the model as it was; None where there is none."""
    result: float | None
    """The same of what it has become."""
    divergence: float
    """Mean Kullback-Leibler divergence of the next token, in nats; for hidden states their relative squared error."""
    agreement: float | None
    """Share of positions with the same most likely token, 0..1."""
    tokens: int
    passed: bool
    seen: bool = False
    """Whether the tokens are those of the calibration, since the data had no more."""

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "WARNING: the result is far from the source"
        if self.source is not None and not math.isfinite(self.source):
            verdict = "WARNING: the source itself is not finite on this data"
        where = f"{self.tokens} tokens {'of the calibration' if self.seen else 'that calibration did not see'}"
        if self.source is not None and self.result is not None:
            return (
                f"{verdict}: perplexity {self.source:.2f} -> {self.result:.2f} on {where}, "
                f"{self.agreement:.0%} of the top tokens agree, divergence {self.divergence:.3f} nats"
            )
        agree = "" if self.agreement is None else f", {self.agreement:.0%} of the top tokens agree"
        return f"{verdict}: {self.kind} differ by {self.divergence:.4f} on {where}{agree}"

    def to_dict(self) -> dict[str, Any]:
        return {name: _finite(value) for name, value in asdict(self).items()} | {"text": str(self)}


@dataclass
class Comparison:
    """Adds up what `walk` compares."""

    causal: bool
    """Whether the logits at a position are those of the next token of the row."""
    seen: bool = False
    """Whether the rows are those of the calibration."""
    blocks: dict[str, list[float]] = field(default_factory=dict)
    _ends: list[tuple[str, int, Tensor]] = field(default_factory=list)

    def add_block(self, block: str, source: Tensor, result: Tensor) -> None:
        """Both are the block's output for one row."""
        sums = self.blocks.setdefault(block, [0.0, 0.0])
        sums[0] += float((result.float() - source.float()).square().sum())
        sums[1] += float(source.float().square().sum())

    def error(self, block: str) -> float:
        """Relative squared error of the block's output, all that came before it included; nan where no row came."""
        lost, whole = self.blocks.get(block, (0.0, 0.0))
        return lost / whole if whole else math.nan

    @torch.no_grad()
    def add_ends(self, row: Mapping[str, Tensor], source: Any, result: Any) -> None:
        """Both are what the model returns for one row."""
        logits = getattr(source, "logits", None)
        if logits is None or logits.ndim != 3:
            first, second = (_tensor(output).float() for output in (source, result))
            sums = torch.tensor([float((second - first).square().sum()), float(first.square().sum())])
            self._ends.append(("hidden states", math.prod(first.shape[:-1]), sums))
            return
        labels = row["input_ids"] if self.causal and row.get("input_ids") is not None else None
        causal = labels is not None and labels.shape == logits.shape[:2]
        last = logits.shape[1] - (1 if causal else 0)
        sums = torch.zeros(4, dtype=torch.float64)
        step = max(1, _LOGITS // logits.shape[2])
        for start in range(0, last, step):
            part = slice(start, min(last, start + step))
            first, second = (one.logits[:, part].float().log_softmax(-1) for one in (source, result))
            sums[0] += (first.exp() * (first - second)).sum().double().cpu()
            sums[1] += (first.argmax(-1) == second.argmax(-1)).sum().cpu()
            if causal and labels is not None:
                following = labels[:, part.start + 1 : part.stop + 1].to(first.device)
                for place, one in enumerate((first, second)):
                    sums[2 + place] += functional.nll_loss(
                        one.flatten(0, 1), following.flatten(), reduction="sum"
                    ).cpu()
        self._ends.append(("perplexity" if causal else "logits", last * len(logits), sums))

    def quality(self) -> Quality | None:
        """The verdict; None where no witness has come to the end."""
        kinds = {kind for kind, tokens, _ in self._ends if tokens}
        if len(kinds) != 1:
            return None
        kind, tokens = kinds.pop(), sum(count for _, count, _ in self._ends)
        sums = torch.stack([one for _, count, one in self._ends if count]).sum(0).tolist()
        if kind == "hidden states":
            error = sums[0] / sums[1] if sums[1] else math.nan
            return Quality(kind, None, None, error, None, tokens, error <= _FAR, self.seen)
        divergence, agreement = sums[0] / tokens, sums[1] / tokens
        if kind == "logits":
            return Quality(kind, None, None, divergence, agreement, tokens, divergence <= math.log(_WORSE), self.seen)
        source, result = (_exp(total / tokens) for total in sums[2:])
        passed = math.isfinite(divergence) and math.isfinite(source) and result <= _WORSE * source
        return Quality(kind, source, result, divergence, agreement, tokens, passed, self.seen)


def _tensor(output: Any) -> Tensor:
    value = getattr(output, "last_hidden_state", None)
    return value if isinstance(value, Tensor) else output[0]


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
