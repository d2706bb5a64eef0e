"""FP8 and FP4 layers against the same layers as stock transformers runs them, decompressed: time for each token count.

    OMP_NUM_THREADS=2 python benchmarks/float_kernels.py [--schemes FP8_DYNAMIC NVFP4A16 MXFP4A16] [--shape 5632 2048]

Prints milliseconds of stock and ours, the fastest of ten, and the ratio. Several layers take turns, so that no weight
stays in the cache. Stock rounds the inputs with compressed-tensors where the scheme says so.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import set_forward_quantized
from torch import nn

from sparseautomodel.compressed_layers import compressed
from sparseautomodel.formats import compressed_tensors as storage

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LAYERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=["FP8_DYNAMIC", "NVFP4A16", "MXFP4A16"])
    parser.add_argument("--shape", nargs=2, type=int, default=[5632, 2048], metavar=("OUT", "IN"))
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    rows, columns = arguments.shape
    print(f"{rows} x {columns}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name in arguments.schemes:
        pairs = [layers(name, rows, columns) for _ in range(LAYERS)]
        print(f"{name}: {pairs[0][1].kernel.name}")
        for tokens in TOKENS:
            values = torch.randn(1, tokens, columns, dtype=torch.bfloat16)
            stock, ours = (milliseconds([pair[side] for pair in pairs], values) for side in (0, 1))
            print(f"{tokens:5d} tokens: stock {stock:6.2f} ms, ours {ours:6.2f} ms, ours / stock {ours / stock:.2f}")


def layers(name: str, rows: int, columns: int) -> tuple[Any, Any]:
    """The same layer of random codes, decompressed as stock has it, and compressed."""
    scheme, dtype = preset_name_to_scheme(name, ["Linear"]), torch.bfloat16
    parts = storage.layout(scheme, (rows, columns), dtype)
    module = compressed(nn.Linear(columns, rows, bias=False).to(dtype), scheme, parts, dtype)
    for part, (shape, kind) in parts.items():
        codes = torch.randint(0, 120, shape, dtype=torch.int32).to(torch.uint8)
        value = codes.view(kind) if kind.itemsize == 1 else torch.rand(shape).add_(0.01).to(kind)
        module._parameters[part] = nn.Parameter(value, requires_grad=False)
    stock: Any = nn.Linear(columns, rows, bias=False).to(dtype)
    stock.weight.copy_(module.weight)
    stock.quantization_scheme, stock.quantization_status = scheme, module.quantization_status
    set_forward_quantized(stock)
    module.settle()
    return stock, module


def milliseconds(modules: list[Callable[[torch.Tensor], torch.Tensor]], values: torch.Tensor) -> float:
    times = []
    for module in itertools.islice(itertools.cycle(modules), 12):
        started = time.perf_counter()
        module(values)
        times.append(time.perf_counter() - started)
    return 1e3 * min(times[2:])


if __name__ == "__main__":
    main()
