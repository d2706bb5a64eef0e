"""Blocks that were compressed or fetched once, kept on disk as they are loaded: a second start reads only packed bytes.

An entry is a folder with `model.safetensors` and `entry.json`. It appears when it is complete, its name is a hash of
all that its content depends on, and it is read only while its checksum is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from sparseautomodel.checkpoint import Checkpoint, LazyTensor, open_files
from sparseautomodel.safetensors_file import CheckpointError
from sparseautomodel.save import appear_when_complete, write_json, write_tensors

FORMAT = 1
"""Raised when the same key would stand for other content."""

CHECKED_NBYTES = 1 << 20


def default_folder() -> Path:
    """Beside the hub's own cache: `$HF_HOME/sparseautomodel/blocks`."""
    return Path(constants.HF_HOME, "sparseautomodel", "blocks")


class BlockCache:
    """Entries in one folder. Nothing is ever removed but what is damaged; the folder can be deleted at any time."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def load(self, facts: Mapping[str, Any]) -> Checkpoint | None:
        """The entry for these facts; None where there is none, or where it was damaged and has been removed."""
        entry = self.folder / _key(facts)
        if not (entry / "entry.json").is_file():
            return None
        try:
            said = json.loads((entry / "entry.json").read_text())
            if said["facts"] != json.loads(_text(facts)) or said["crc32"] != _crc32(entry / "model.safetensors"):
                raise CheckpointError("its checksum is another than when it was written")
            return open_files([str(entry / "model.safetensors")])
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"{entry} is damaged ({error}): it is removed and made anew", stacklevel=2)
            shutil.rmtree(entry, ignore_errors=True)
            return None

    def store(self, facts: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> Checkpoint | None:
        """Write an entry, tensor by tensor, and open it. None where the disk does not take it, which is said."""
        entry = self.folder / _key(facts)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        try:
            with contextlib.suppress(FileExistsError), appear_when_complete(entry, nbytes) as folder:
                write_tensors(tensors, folder, nbytes + 1)
                crc = _crc32(folder / "model.safetensors")
                write_json(folder / "entry.json", {"crc32": crc, "facts": json.loads(_text(facts))})
            return open_files([str(entry / "model.safetensors")])
        except (OSError, CheckpointError) as error:
            warnings.warn(f"blocks are not kept in {self.folder}: {error}", stacklevel=2)
            return None


def _key(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(facts).encode()).hexdigest()[:40]


def _text(facts: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT} | dict(facts), sort_keys=True, default=str)


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(CHECKED_NBYTES):
            value = zlib.crc32(piece, value)
    return value
