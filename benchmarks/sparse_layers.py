"""Linear layers with two zeros in every four weights on a CPU: dense, and after `run_sparse`, in turn.

    python benchmarks/sparse_layers.py [--tokens 1 4 16 64 256 1024] [--runs 15]

Weights of several layers are gone through, so that they come from memory as in a model. Medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from torch import nn

from sparseautomodel.masks import prune_mask
from sparseautomodel.sparse24 import run_sparse

SHAPES = ((576, 576), (1536, 576), (2048, 2048), (5632, 2048), (2048, 5632))
HELD = 64 << 20
"""Bytes of dense weights that are gone through: more than caches hold."""


def layers_of(rows: int, columns: int) -> nn.ModuleList:
    layers = nn.ModuleList(nn.Linear(columns, rows, bias=False) for _ in range(max(2, HELD // (2 * rows * columns))))
    for layer in layers:
        layer.weight.data.mul_(prune_mask(layer.weight.data, None, (2, 4)))
    return layers.bfloat16()


@torch.inference_mode()
def seconds(layers: nn.ModuleList, inputs: torch.Tensor) -> float:
    clock = time.perf_counter()
    for layer in layers:
        layer(inputs)
    return (time.perf_counter() - clock) / len(layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--runs", type=int, default=15)
    given = parser.parse_args()
    print(f"{'out x in':>12} {'tokens':>7} {'dense ms':>9} {'sparse ms':>10} {'times as fast':>14}")
    for rows, columns in SHAPES:
        dense = layers_of(rows, columns)
        sparse = copy.deepcopy(dense)
        refused = [reason for reason in run_sparse(sparse).values() if reason]
        if refused:
            raise SystemExit(refused[0])
        for tokens in given.tokens:
            inputs = torch.randn(tokens, columns).bfloat16()
            pairs = [(seconds(dense, inputs), seconds(sparse, inputs)) for _ in range(given.runs)]
            one, other = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
            print(f"{rows:>6} x {columns:<4} {tokens:>6} {one:9.3f} {other:10.3f} {one / other:14.2f}")


if __name__ == "__main__":
    main()
