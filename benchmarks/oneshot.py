"""Streamed oneshot against llm-compressor's load + oneshot + save: time and peak memory, W4A16 round to nearest.

    python benchmarks/oneshot.py [FOLDER] [--peer PYTHON] [--runs 3] [--large]

PEER is the interpreter of an environment that has llmcompressor (0.14.0.1 was measured). FOLDER is a dense causal
language model; without it a random Llama of 1.1 billion parameters. --large adds ours on 2.7 billion: the peak must
not grow with the model.
Every run is a process of its own, in turn; imports are not timed; memory is the peak resident set of the whole process.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from load import random_llama

OURS = """
from sparseautomodel import oneshot
clock = time.perf_counter()
oneshot(folder, "w4a16", output=output)
"""

PEER = """
from transformers import AutoModelForCausalLM
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
clock = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(folder)
oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]))
model.save_pretrained(output, save_compressed=True)
"""

FRAME = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch, transformers.models.llama.modeling_llama
folder, output = sys.argv[1:3]
{body}
seconds = time.perf_counter() - clock
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({{"seconds": seconds, "peak": int(status["VmHWM"].split()[0]) / 1e6}}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--peer", help="python of an environment with llmcompressor")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--large", action="store_true")
    args = parser.parse_args()
    folder = args.folder or random_llama(Path(".cache/llama-1.1b"))
    sides = {"ours": (sys.executable, OURS, folder)}
    if args.peer:
        sides["llm-compressor"] = (args.peer, PEER, folder)
    if args.large:
        large = random_llama(Path(".cache/llama-3b"), layers=26, hidden=3072, inner=8192)
        sides["ours, 2.7B"] = (sys.executable, OURS, large)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(args.runs):
        for name, (python, body, model) in sides.items():
            results[name].append(measure(python, body, model))
    print(f"{folder}, medians of {args.runs} runs")
    print(f"{'':16}{'seconds':>9}{'min':>7}{'max':>7}{'peak GB':>9}")
    for name, runs in results.items():
        seconds, peaks = [run["seconds"] for run in runs], [run["peak"] for run in runs]
        middle, peak = statistics.median(seconds), statistics.median(peaks)
        print(f"{name:16}{middle:9.2f}{min(seconds):7.2f}{max(seconds):7.2f}{peak:9.2f}")
    if args.peer:
        pairs = zip(results["ours"], results["llm-compressor"], strict=True)
        ratios = [(a["seconds"] / b["seconds"], a["peak"] / b["peak"]) for a, b in pairs]
        time, peak = (statistics.median(column) for column in zip(*ratios, strict=True))
        print(f"ours / llm-compressor, pair by pair: time {time:.2f}, peak {peak:.2f}")


def measure(python: str, body: str, folder: Path) -> dict[str, float]:
    """Run one side in a process of its own; what it wrote is removed."""
    scratch = Path(tempfile.mkdtemp(dir=".cache" if Path(".cache").is_dir() else None))
    try:
        command = [python, "-c", FRAME.format(body=body), str(folder), str(scratch / "output")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        return json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
