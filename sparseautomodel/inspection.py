"""What is in a checkpoint: its files, how each layer is stored, and how many of the values are zero."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig

from sparseautomodel.architecture import auto_class_for, read_architecture
from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.consumers import Consumer, consumers_of
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.layers import quantization_of, stored_layers
from sparseautomodel.plan import size_text
from sparseautomodel.quantization_config import QUANT_METHOD
from sparseautomodel.transform import describe
from sparseautomodel.verify import dense_pieces

DENSE = "dense"
GROUPS = (4, 8, 16)
"""The M of the N:M patterns that are looked for: those that hardware and published methods use."""


@dataclass(frozen=True)
class LayerContents:
    """One layer as it is in the files."""

    name: str
    shape: tuple[int, int]
    role: str
    """`block`, `head`, `embedding`, `router`, ..."""
    format: str
    """`dense`, or the format of compressed-tensors, such as `pack-quantized`."""
    scheme: str
    """The scheme in words, such as `int4 group 64`; of a dense layer its dtype."""
    nbytes: int
    zeros: float | None = None
    """Share of values that are exactly zero, decoded where the layer is compressed; None when values were not read."""
    structure: str | None = None
    """The N:M pattern that the values keep, such as `2:4`; None when there is none or values were not read."""


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found. `to_dict()` has a row a layer."""

    source: str
    model_class: str
    quant_method: str | None
    """What config.json says: `compressed-tensors`, the name of another method, or None for a dense checkpoint."""
    files: Mapping[str, int]
    """File of weights -> bytes."""
    layers: tuple[LayerContents, ...]
    parameters: int
    other_nbytes: int
    """Bytes of the tensors that are no layer: norms, biases."""
    values_read: bool
    """Whether `zeros` and `structure` were counted on the values; else only headers were read."""
    consumers: tuple[Consumer, ...] = field(default=())
    problems: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.other_nbytes + sum(layer.nbytes for layer in self.layers)

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that layers have, in the order of the files."""
        return tuple(dict.fromkeys(layer.format for layer in self.layers))

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "model_class": self.model_class,
            "quant_method": self.quant_method,
            "formats": list(self.formats),
            "files": dict(self.files),
            "parameters": self.parameters,
            "nbytes": self.nbytes,
            "other_nbytes": self.other_nbytes,
            "values_read": self.values_read,
            "layers": [vars(layer) | {"shape": list(layer.shape)} for layer in self.layers],
            "consumers": [consumer.to_dict() for consumer in self.consumers],
            "problems": list(self.problems),
        }

    def table(self, each: bool = False) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Headers and rows for people: a row for all layers that differ in their index alone, or one for `each`."""
        groups: dict[tuple[Any, ...], list[LayerContents]] = {}
        for layer in self.layers:
            name = layer.name if each else kind_of(layer.name)
            groups.setdefault((name, layer.shape, layer.scheme, layer.structure), []).append(layer)
        rows: list[tuple[str, ...]] = [
            (name, str(len(group)), f"{shape[0]} x {shape[1]}", scheme, _range(group), structure or "", _size(group))
            for (name, shape, scheme, structure), group in groups.items()
        ]
        return ("layer", "count", "shape", "stored as", "zeros", "N:M", "size"), rows

    def heading(self) -> str:
        """What it is, and how large."""
        method = "not quantized" if self.quant_method is None else f"{self.quant_method}: {', '.join(self.formats)}"
        bits = 8 * self.nbytes / max(1, self.parameters)
        return (
            f"{self.source}: {self.model_class}, {method}\n"
            f"{len(self.files)} file{'s' * (len(self.files) != 1)}, {size_text(self.nbytes)}, "
            f"{self.parameters / 1e6:,.1f} M parameters, {bits:.1f} bits each"
        )

    def notes(self) -> list[str]:
        """What the table leaves out, how it was found, who reads the checkpoint, and what is wrong with it."""
        read = "counted on the values, decoded where a layer is compressed"
        lines = [
            f"tensors that are no layer: {size_text(self.other_nbytes)}",
            f"zeros and N:M: {read if self.values_read else 'not looked for, only headers were read'}",
        ]
        if self.quant_method not in (None, QUANT_METHOD):
            lines.append(f"layers that {self.quant_method} compressed are not listed: their format is not known here")
        for consumer in self.consumers:
            lines.append(f"{consumer.name}: {'reads it' if consumer.reads else 'does not read it'}")
            lines += [f"    - {reason}" for reason in consumer.reasons]
        return lines + [f"problem: {problem}" for problem in self.problems]


def inspect(
    name_or_path: str | os.PathLike[str],
    *,
    values: bool = True,
    trust_remote_code: bool | None = None,
    **kwargs: Any,
) -> Inspection:
    """How each layer in `name_or_path` is stored and, unless `values` is False, how many zeros it has.

    Values are read a run of rows at a time and decoded where they are compressed; without them only headers are read.

    Args:
        kwargs: subfolder, revision, token, cache_dir, local_files_only, ... as for `from_pretrained`.

    Raises:
        CheckpointError: the files are missing or damaged.
        ValueError: the config is not one that transformers or compressed-tensors accept.

    >>> inspect("compressed-folder").layers[0].structure  # doctest: +SKIP
    '2:4'
    """
    config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code, **kwargs)
    checkpoint = open_checkpoint(name_or_path, **kwargs)
    architecture = read_architecture(auto_class_for(config), config, checkpoint, trust_remote_code=trust_remote_code)
    stored = stored_layers(checkpoint, architecture)
    sizes: Counter[str] = Counter()
    for name, tensor in checkpoint.items():
        sizes[name.rpartition(".")[0]] += tensor.nbytes
    layers = []
    for layer in tqdm(stored.layers, desc="Reading values", disable=None if values else True):
        scheme = stored.schemes.get(layer.name)
        zeros, structure = zeros_of(dense_pieces(layer, checkpoint, stored)) if values else (None, None)
        contents = LayerContents(
            name=layer.name,
            shape=layer.shape,
            role=layer.role,
            format=DENSE if scheme is None else storage.format_of(scheme),
            scheme=str(layer.dtype).removeprefix("torch.") if scheme is None else describe(scheme),
            nbytes=sizes[layer.name],
            zeros=zeros,
            structure=structure,
        )
        layers.append(contents)
    method = _quant_method(config)
    compressed = [(layer, stored.schemes[layer.name]) for layer in stored.layers if layer.name in stored.schemes]
    dense = [layer for layer in stored.layers if layer.name not in stored.schemes]
    verdicts = consumers_of(compressed, dense, architecture.initializes([layer for layer, _ in compressed]))
    return Inspection(
        source=str(name_or_path),
        model_class=architecture.model_class.__name__,
        quant_method=method,
        files={os.path.basename(file): os.path.getsize(file) for file in checkpoint.files},
        layers=tuple(layers),
        parameters=sum(math.prod(layer.shape) for layer in layers) + stored.other_parameters,
        other_nbytes=checkpoint.nbytes - sum(layer.nbytes for layer in layers),
        values_read=values,
        consumers=verdicts if method in (None, QUANT_METHOD) else (),
        problems=stored.problems,
    )


def zeros_of(pieces: Iterable[torch.Tensor]) -> tuple[float, str | None]:
    """The share of exact zeros in a matrix given in runs of rows `[rows, columns]`, and the N:M pattern it keeps.

    A pattern is found when every M consecutive columns have at most N nonzeros and half of them or more have exactly N;
    without the second condition a small matrix with many zeros would keep one by chance. Of several, the one that
    leaves the fewest nonzeros, then the one with the smallest M.

    >>> zeros_of([torch.tensor([[0.0, 0.0, 1.0, 2.0]])])
    (0.5, '2:4')
    """
    numel = nonzero = 0
    histograms: dict[int, torch.Tensor] = {}
    for piece in pieces:
        counts = (piece != 0).view(torch.uint8)
        numel += piece.numel()
        nonzero += int(counts.count_nonzero())
        for group in (2, *GROUPS):
            if piece.shape[1] % group:
                break
            counts = counts[:, ::2] + counts[:, 1::2]
            if group in GROUPS:
                found = torch.bincount(counts.flatten(), minlength=group + 1)
                histograms[group] = histograms.get(group, 0) + found
    kept = [(n / m, m, n) for m, histogram in histograms.items() if (n := _kept(histogram, m))]
    _, m, n = min(kept, default=(0, 0, 0))
    return (numel - nonzero) / max(1, numel), f"{n}:{m}" if n else None


def kind_of(name: str) -> str:
    """The name with `*` for each index: layers of one kind differ in their indices alone.

    >>> kind_of("model.layers.7.mlp.experts.3.w1")
    'model.layers.*.mlp.experts.*.w1'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _kept(histogram: torch.Tensor, m: int) -> int:
    """N, when groups of `m` have N nonzeros or fewer, most of them N; else 0. `histogram[k]` groups have k nonzeros."""
    n = int(histogram.nonzero().max()) if int(histogram.sum()) else 0
    return n if n < m and 2 * int(histogram[n]) >= int(histogram.sum()) else 0


def _quant_method(config: Any) -> str | None:
    entry = getattr(config, "quantization_config", None)
    if entry is None or quantization_of(config) is not None:
        return None if entry is None else QUANT_METHOD
    entry = entry if isinstance(entry, dict) else entry.to_dict()
    return str(entry.get("quant_method", "unknown"))


def _range(layers: list[LayerContents]) -> str:
    """The smallest and the largest share of zeros, `12.5%` or `12.1-13.0%`."""
    shares = [layer.zeros for layer in layers if layer.zeros is not None]
    if not shares:
        return ""
    low, high = f"{min(shares):.1%}", f"{max(shares):.1%}"
    return low if low == high else f"{low.removesuffix('%')}-{high}"


def _size(layers: list[LayerContents]) -> str:
    return size_text(sum(layer.nbytes for layer in layers))
