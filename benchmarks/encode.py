"""How fast a weight is quantized and packed, side by side with compressed-tensors' own way.

One bfloat16 matrix of 5632 x 2048 in runs of 256 rows, as it is worked on while loading: scales from the extremes,
then codes, then bytes. Prints G parameters a second (medians), the ratio, a plain copy of the same data for scale, and
how many cores other processes kept busy meanwhile: above 0.1, only the ratios mean something.

    python benchmarks/encode.py [--threads 2] [--repeats 7] [--observer minmax]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from sparseautomodel.formats.compressed_tensors import decode, encode, format_of, layout
from sparseautomodel.modifiers import MODIFIERS, Layer, Weight

SHAPE, RUN = (5632, 2048), 256
SCHEMES = (
    "W4A16",
    "W4A16_ASYM",
    "W3A16",
    "W8A16",
    "W8A8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "NVFP4A16",
    "MXFP4A16",
    "MXFP8A16",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--observer", default="minmax", help="of ours; compressed-tensors' way is always minmax")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    weight = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    copy = torch.empty_like(weight)
    speed, foreign = _speed(lambda: copy.copy_(weight), options.repeats)
    print(f"{options.threads} threads. A plain copy: {speed:.2f} G parameters/s (other processes: {foreign:.2f} cores)")
    print(f"{'':12} {'ours':>7} {'theirs':>7} {'ratio':>7} {'decode':>7} {'theirs':>7} {'ratio':>7} {'others':>7}")
    for name in SCHEMES:
        ours, theirs, ours_back, theirs_back = _ways(name, options.observer, weight)
        speeds, others = zip(
            *(_speed(way, options.repeats) for way in (ours, theirs, ours_back, theirs_back)), strict=True
        )
        cells = [*speeds[:2], speeds[0] / speeds[1], *speeds[2:], speeds[2] / speeds[3], max(others)]
        print(f"{name:12} {' '.join(f'{cell:7.2f}' for cell in cells)}", flush=True)


def _ways(name: str, observer: str, weight: torch.Tensor) -> tuple[Callable[[], object], ...]:
    modifier = MODIFIERS["QuantizationModifier"](scheme=name, observer=observer)
    layer = Layer("layer", "layer", ("Linear",), SHAPE, weight.dtype)
    scheme = modifier.scheme_of(layer)
    assert scheme is not None
    out = {
        part: torch.empty(shape, dtype=dtype) for part, (shape, dtype) in layout(scheme, SHAPE, weight.dtype).items()
    }
    global_scale = modifier.global_scale(layer, [weight])  # type: ignore[attr-defined]
    compressor = BaseCompressor.get_value_from_registry(format_of(scheme))
    stored: list[dict[str, torch.Tensor]] = []

    def ours() -> None:
        for start in range(0, SHAPE[0], RUN):
            work = Weight(layer, weight[start : start + RUN], global_scale=global_scale)
            modifier.apply(work)
            parameters = {"scale": work.scale, "zero_point": work.zero_point, "global_scale": work.global_scale}
            encode(work.values, scheme, out, start=start, **parameters)

    def theirs() -> None:
        stored.clear()
        for rows in weight.split(RUN):
            stored.append(compressor.compress(_with_scales(rows, scheme, global_scale), scheme))

    ours()
    theirs()
    runs = [slice(start, start + RUN) for start in range(0, SHAPE[0], RUN)]
    return (
        ours,
        theirs,
        lambda: [decode(out, scheme, run).shape for run in runs],
        lambda: [compressor.decompress(part, scheme)["weight"].shape for part in stored],
    )


def _with_scales(
    rows: torch.Tensor, scheme: QuantizationScheme, global_scale: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """What compressed-tensors is given: a weight and its scales, found as llm-compressor does."""
    args = scheme.weights
    if args.strategy == "channel":
        groups = rows.unsqueeze(1)
    elif args.strategy == "block":
        height, width = args.block_structure
        groups = rows.view(len(rows) // height, height, -1, width).transpose(1, 2).flatten(2)
    else:
        groups = rows.unflatten(1, (-1, args.group_size))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale)
    given = {"weight": rows, "weight_scale": scale, "weight_zero_point": zero_point}
    return given if global_scale is None else given | {"weight_global_scale": global_scale}


def _speed(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """G parameters a second, and the cores that other processes used meanwhile."""
    work()
    busy, own, begin = _busy_seconds(), time.process_time(), time.perf_counter()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    foreign = _busy_seconds() - busy - (time.process_time() - own)
    return SHAPE[0] * SHAPE[1] / statistics.median(seconds) / 1e9, max(0.0, foreign / (time.perf_counter() - begin))


def _busy_seconds() -> float:
    """Seconds that all cores together have worked since the start of the machine; 0 where that is not known."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    ticks = [int(field) for field in stat.read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / 100


if __name__ == "__main__":
    main()
