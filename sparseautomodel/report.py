"""What the user is told: what a load read, what a run changed, how good the result is, and the files that say so."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from sparseautomodel.checkpoint import Checkpoint
from sparseautomodel.plan import Plan, size_text

DEPENDENCIES = ("torch", "transformers", "compressed-tensors", "safetensors")


@dataclass(frozen=True)
class LoadReport:
    """What a load read and did. Attached to the model as `model.load_report`."""

    source: str
    reads: Mapping[str, tuple[float, int]]
    """Tensor of the source -> how many times its bytes were read, and how many bytes that was."""
    unread: tuple[str, ...]
    """Tensors of the source that were not read, since the model has no place for them."""
    initialized: tuple[str, ...]
    """Parameters that no file fills (a new task head): they hold initial values."""
    restored: tuple[str, ...]
    """Buffers of custom code that were computed anew."""
    layers_compressed: int
    share_changed: float
    """Share of the parameters that the recipe changed, 0..1."""
    seconds: Mapping[str, float]
    """How long each step took: plan, load, verify, settle (choosing kernels and laying out weights for them)."""
    notes: tuple[str, ...] = ()
    """What the recipe left open and was decided for this model."""
    kernels: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Compressed layer -> what it runs on, and why on nothing faster where something faster is for its scheme."""

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        plan: Plan,
        info: Mapping[str, Any],
        seconds: Mapping[str, float],
        restored: list[str],
        kernels: Mapping[str, tuple[str, str]],
    ) -> LoadReport:
        reads = checkpoint.reads()
        return cls(
            source=plan.source,
            reads={name: read for name, read in reads.items() if read[1]},
            unread=tuple(name for name, (_, nbytes) in reads.items() if not nbytes and checkpoint[name].nbytes),
            initialized=tuple(sorted(info["missing_keys"])),
            restored=tuple(restored),
            layers_compressed=len(plan.schemes),
            share_changed=plan.parameters_changed / plan.parameters if plan.parameters else 0.0,
            seconds=dict(seconds),
            notes=plan.notes,
            kernels=kernels,
        )

    @property
    def nbytes(self) -> int:
        """Bytes read."""
        return sum(nbytes for _, nbytes in self.reads.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"nbytes": self.nbytes}

    def __str__(self) -> str:
        lines = [
            f"{self.source}: {_reads_text(self.reads)}",
            f"{self.layers_compressed} layers compressed"
            + (f"; recipe changed {self.share_changed:.1%} of the parameters" if self.share_changed else ""),
            ", ".join(f"{step} {seconds:.2f} s" for step, seconds in self.seconds.items()),
        ]
        lines += [
            f"{count} layers run on {kernel}" + (f" ({why})" if why else "")
            for (kernel, why), count in Counter(self.kernels.values()).items()
        ]
        lines += [f"not read: {', '.join(self.unread)}"] if self.unread else []
        lines += [f"newly initialized: {', '.join(self.initialized)}"] if self.initialized else []
        lines += [f"note: {text}" for text in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """What a run of `oneshot` did. Written beside the result as `compression_report.json`."""

    source: str
    output: str | None
    recipe: Mapping[str, Any]
    """The recipe as evaluated."""
    layers: tuple[Mapping[str, Any], ...]
    """One row a changed layer: name, shape, scheme, bytes before and after, share of zeros where it was counted."""
    parameters: int
    parameters_changed: int
    nbytes_before: int
    nbytes_after: int
    structures: Mapping[str, str]
    """Layer -> N:M pattern that its values keep."""
    reads: Mapping[str, tuple[float, int]] = field(repr=False)
    seconds: float = 0.0
    peak_nbytes: int = 0
    """Peak resident memory of the process so far."""
    notes: tuple[str, ...] = ()
    """What the recipe left open and was decided for this model."""
    warnings: tuple[str, ...] = ()
    calibration: Mapping[str, Any] = field(default_factory=dict)
    """For a run with data: tokens, a hash of the data, and the error of each layer before and after."""
    versions: Mapping[str, str] = field(default_factory=lambda: versions())

    def to_dict(self) -> dict[str, Any]:
        """Everything but the read counts, which are summed up: a global threshold needs a second time."""
        result = asdict(self)
        times = sorted({count for count, nbytes in self.reads.values() if nbytes})
        nbytes = sum(nbytes for _, nbytes in self.reads.values())
        result["reads"] = {"tensors": len(self.reads), "times": times, "nbytes": nbytes}
        return result

    def __str__(self) -> str:
        share = self.parameters_changed / self.parameters if self.parameters else 0.0
        return "\n".join(
            [
                f"{self.source} -> {self.output or 'in memory'}: {len(self.layers)} layers, {share:.1%} of "
                f"{self.parameters / 1e6:,.1f} M parameters changed",
                f"{size_text(self.nbytes_before)} -> {size_text(self.nbytes_after)} in {self.seconds:.1f} s, "
                f"peak memory {size_text(self.peak_nbytes)}; {_reads_text(self.reads)}",
                *_calibration_lines(self.calibration),
                *(f"note: {text}" for text in self.notes),
                *(f"warning: {text}" for text in self.warnings),
            ]
        )


def _calibration_lines(calibration: Mapping[str, Any]) -> list[str]:
    """Data, verdict, worst layer and fallbacks of a run with data."""
    if not calibration:
        return []
    lines = [f"calibrated on {calibration['num_samples']} rows, {calibration['num_tokens']:,} tokens"]
    if calibration.get("verdict"):
        lines.append(calibration["verdict"]["text"])
    known = [layer for layer in calibration["layers"] if layer["after"] is not None and layer["before"] is not None]
    if known:
        worst = max(known, key=lambda layer: layer["after"])
        lines.append(f"largest relative error: {worst['name']}, {worst['after']:.2%} ({worst['before']:.2%} plainly)")
    fallen = [layer for layer in calibration["layers"] if layer["fallback"]]
    if fallen:
        first = fallen[0]
        lines.append(f"{len(fallen)} layers fell back, the first {first['name']}: {first['fallback']}")
    return lines


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of a model on a text."""

    value: float
    tokens: int
    """Tokens that were predicted; the first of each text window is only context."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"perplexity {self.value:.2f} over {self.tokens} tokens"


@torch.inference_mode()
def perplexity(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    window: int = 512,
    stride: int | None = None,
    max_tokens: int | None = None,
    batch_size: int = 4,
) -> Perplexity:
    """exp of the mean negative log likelihood of each token, read in windows of `window` tokens.

    Args:
        stride: how far each window moves on; the tokens before it are context and not counted again. None: `window`,
            windows side by side.
        max_tokens: stop after this many tokens of the text.

    Raises:
        ValueError: the text has fewer than two tokens, `window` is below 2, or `stride` not between 1 and `window`.
    """
    stride = window if stride is None else stride
    if window < 2:
        raise ValueError(f"window={window} must be at least 2: one token is predicted from those before it")
    if not 1 <= stride <= window:
        raise ValueError(f"stride={stride} must be between 1 and window={window}")
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"max_tokens={max_tokens} must be at least 2")
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"][0][:max_tokens]
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; at least 2 are needed to predict one from another")
    windows, counted = [], 0
    for start in range(0, len(ids), stride):
        stop = min(start + window, len(ids))
        windows.append((start, stop, max(counted, start + 1)))
        counted = stop
        if stop == len(ids):
            break
    total, tokens = 0.0, 0
    full = [item for item in windows if item[1] - item[0] == window]
    batches = [full[at : at + batch_size] for at in range(0, len(full), batch_size)]
    for batch in [*batches, *([item] for item in windows if item[1] - item[0] != window)]:
        inputs = torch.stack([ids[start:stop] for start, stop, _ in batch]).to(model.device)
        logits = model(input_ids=inputs, use_cache=False).logits
        for row, (start, stop, first) in enumerate(batch):
            if first >= stop:
                continue
            predicted = logits[row, first - start - 1 : stop - start - 1].float()
            wanted = inputs[row, first - start :]
            total += float(torch.nn.functional.cross_entropy(predicted, wanted, reduction="sum"))
            tokens += stop - first
    return Perplexity(float(torch.tensor(total / tokens, dtype=torch.float64).exp()), tokens)


def peak_nbytes() -> int:
    """Peak resident memory of this process, in bytes (VmHWM on Linux, ru_maxrss elsewhere)."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        scale = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def versions() -> dict[str, str]:
    """Versions of this library, Python and what the numbers depend on."""
    return {"sparseautomodel": _own_version(), "python": platform.python_version()} | {
        name: version(name) for name in DEPENDENCIES
    }


def model_card(report: Report, base: str, license_name: str | None, loader: str = "AutoModelForCausalLM") -> str:
    """README.md of a compressed checkpoint: what it was made from, how, with what figures, and how to load it.

    `loader` is the `AutoModelFor*` of transformers that opens the model.
    """
    front = {"library_name": "transformers", "base_model": base, "tags": ["compressed-tensors", "sparseautomodel"]}
    if license_name:
        front["license"] = license_name
    header = "\n".join(f"{key}: {json.dumps(value)}" for key, value in front.items())
    schemes = sorted({str(row["scheme"]) for row in report.layers if row["scheme"]})
    share = report.parameters_changed / report.parameters if report.parameters else 0.0
    rows = [
        ("layers changed", f"{len(report.layers)} ({share:.1%} of {report.parameters / 1e6:,.1f} M parameters)"),
        ("stored as", "; ".join(schemes) or "dense"),
        ("zeros", ", ".join(sorted(set(report.structures.values()))) or "as in the source"),
        ("size", f"{size_text(report.nbytes_before)} -> {size_text(report.nbytes_after)}"),
        *((("quality", verdict["text"]),) if (verdict := report.calibration.get("verdict")) else ()),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""---
{header}
---
# {base}, compressed

Made from `{base}` with sparseautomodel {report.versions["sparseautomodel"]} and the recipe in `recipe.yaml`.

| | |
| --- | --- |
{table}

```python
from sparseautomodel import Sparse{loader}
model = Sparse{loader}.from_pretrained("this-folder")
```

`transformers.{loader}.from_pretrained("this-folder")` opens it too, with compressed-tensors installed, where
the scheme is one that it reads. `compression_report.json` has a row a layer and the versions that were used.
"""


def _reads_text(reads: Mapping[str, tuple[float, int]]) -> str:
    times = sorted({count for count, nbytes in reads.values() if nbytes})
    often = "once" if times == [1] else f"{' or '.join(f'{count:g}' for count in times) or 0} times"
    return f"{len(reads)} tensors read {often}, {size_text(sum(nbytes for _, nbytes in reads.values()))}"


def _own_version() -> str:
    from importlib.metadata import PackageNotFoundError

    try:
        return version("sparseautomodel")
    except PackageNotFoundError:
        return "unknown"
