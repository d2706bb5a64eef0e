"""Which layer of a checkpoint would run on what, and why: from config.json and the headers of the files."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from sparseautomodel.architecture import auto_class_for, read_architecture
from sparseautomodel.arguments import asked_dtype, check_device
from sparseautomodel.checkpoint import open_checkpoint
from sparseautomodel.inspection import kind_of
from sparseautomodel.kernels import choose
from sparseautomodel.layers import stored_layers
from sparseautomodel.transform import describe

DENSE = "torch: dense"
EMBEDDING = "portable: the rows asked for are dequantized"


@dataclass(frozen=True)
class LayerExecution:
    """How one layer would be run."""

    name: str
    shape: tuple[int, int]
    scheme: str
    """The scheme in words, or the dtype of a dense layer."""
    kernel: str
    """What it runs on."""
    why: str
    """Why on nothing faster, where there is something faster for its scheme."""


@dataclass(frozen=True)
class Execution:
    """What `execution_of` found, one row a layer."""

    source: str
    device: str
    layers: tuple[LayerExecution, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self, each: bool = False) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Headers and rows for people: a row for all layers that differ in their index alone, or one for `each`."""
        rows = Counter(
            (layer.name if each else kind_of(layer.name), layer.shape, layer.scheme, layer.kernel, layer.why)
            for layer in self.layers
        )
        cells: list[tuple[str, ...]] = [
            (name, str(count), f"{shape[0]} x {shape[1]}", scheme, kernel, why)
            for (name, shape, scheme, kernel, why), count in rows.items()
        ]
        return ("layer", "count", "shape", "stored as", "runs on", "since"), cells

    def heading(self) -> str:
        compressed = sum(layer.kernel != DENSE for layer in self.layers)
        return f"{self.source} on {self.device}: {compressed} of {len(self.layers)} layers stay compressed"


def execution_of(
    name_or_path: str | os.PathLike[str],
    *,
    device: str | None = None,
    trust_remote_code: bool | None = None,
    **kwargs: Any,
) -> Execution:
    """What each layer of `name_or_path` would run on under `execution="auto"`; no weight is read.

    As `model.load_report.kernels` says after a load.

    Args:
        device: None for the CPU, as a load without `device_map` takes it.
        kwargs: subfolder, revision, token, cache_dir, local_files_only, ... as for `from_pretrained`.

    Raises:
        CheckpointError, ValueError: as `inspect`.
    """
    try:
        place = torch.device(device or "cpu")
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is no device of torch. Write 'cpu', 'cuda' or 'cuda:1'") from error
    check_device(place)
    config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code, **kwargs)
    checkpoint = open_checkpoint(name_or_path, **kwargs)
    architecture = read_architecture(auto_class_for(config), config, checkpoint, trust_remote_code=trust_remote_code)
    stored, dtype = stored_layers(checkpoint, architecture), asked_dtype({}, config, checkpoint)
    layers = []
    for layer in stored.layers:
        scheme = stored.schemes.get(layer.name)
        kernel, why = DENSE, ""
        if scheme is not None:
            module = None if layer.expert else architecture.skeleton.get_submodule(layer.module)
            if isinstance(module, nn.Embedding):
                kernel = EMBEDDING
            else:
                own_forward = module is not None and type(module).forward is not nn.Linear.forward
                kind = architecture.loaded_dtype(f"{layer.module}.weight", dtype)
                chosen, passed_over = choose(scheme, layer.shape, kind, place, own_forward)
                kernel, why = chosen.name, "; ".join(passed_over)
        text = str(layer.dtype).removeprefix("torch.") if scheme is None else describe(scheme)
        layers.append(LayerExecution(layer.name, layer.shape, text, kernel, why))
    return Execution(str(name_or_path), str(place), tuple(layers))
