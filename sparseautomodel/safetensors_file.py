"""A safetensors file: reads go straight into the tensor that is returned, and a run of rows costs a run of rows."""

from __future__ import annotations

import json
import math
import os
import struct
import weakref
from typing import Any

import torch
from safetensors import safe_open

SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The names that the safetensors format gives to dtypes."""

DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


class CheckpointError(ValueError):
    """The files of a checkpoint are missing, damaged or contradict each other. Names every file and tensor."""


class SafetensorsFile:
    """An open file. Reads go straight into the tensor that is returned: bytes that were read do not stay mapped, so
    memory is what the model needs and nothing else, and a run of rows costs a run of rows."""

    def __init__(self, path: str) -> None:
        with safe_open(path, framework="pt"):
            pass  # safetensors checks the header and that the file is as long as it says
        self.path, self._descriptor = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        (length,) = struct.unpack("<Q", os.pread(self._descriptor, 8, 0))
        header = json.loads(os.pread(self._descriptor, length, 8))
        header.pop("__metadata__", None)
        self.entries = dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]))
        self.start = 8 + length

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """The tensor, or its rows `rows.start` to `rows.stop`."""
        entry = self.entries[name]
        shape, dtype = list(entry["shape"]), SAFETENSORS_DTYPES[entry["dtype"]]
        offset = self.start + entry["data_offsets"][0]
        if rows is not None:
            offset += rows.start * math.prod(shape[1:]) * dtype.itemsize
            shape[0] = rows.stop - rows.start
        values = torch.empty(shape, dtype=dtype, device="cpu")
        view = values.view(-1).view(torch.uint8).numpy().data if values.numel() else memoryview(b"")
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                raise CheckpointError(f"{self.path} ends in the middle of {name}: it was changed while it was read")
            done += count
        return values


class FileTensor:
    """Slicing of one tensor of a safetensors file: runs of rows are read alone, anything else through safetensors."""

    def __init__(self, file: SafetensorsFile, name: str) -> None:
        self._file, self._name = file, name
        self.place = file.path, file.start + file.entries[name]["data_offsets"][0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        shape = self._file.entries[self._name]["shape"]
        if isinstance(index, tuple) and index and _are_whole(index[1:], shape[1:]):
            index = index[0]  # sharded loading gives a slice for each dimension
        if index is Ellipsis or index == slice(None):
            return self._file.read(self._name)
        if isinstance(index, slice) and shape and index.step in (None, 1):
            start, stop, _ = index.indices(shape[0])
            return self._file.read(self._name, slice(start, max(start, stop)))
        with safe_open(self._file.path, framework="pt") as file:
            return file.get_slice(self._name)[index].clone()  # a column slice; cloned: the map is closed


def _are_whole(index: tuple[Any, ...], shape: list[int]) -> bool:
    return all(
        isinstance(one, slice) and one.indices(size) == (0, size, 1) for one, size in zip(index, shape, strict=False)
    )
