"""A model on less memory than its weights take, on the processor: ours against accelerate's disk offload.

    python benchmarks/residency.py [--runs 3] [--budget 400MiB] [--packed-budget 150MiB]

A random Llama of 1.1 billion parameters (2.2 GB in bfloat16) is written to .cache first. Each measurement is a process
of its own, in turn: load, a prompt of 8 tokens, 24 tokens decoded one by one. Medians of the time a token, and of the
peak resident set, anonymous and file pages together, are printed. Files are in memory when there is room for them.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from load import measure, random_llama

DECODE = """
ids, times = torch.arange(8)[None], []
with torch.inference_mode():
    output = model(ids, use_cache=True)
    for _ in range(24):
        token = output.logits[:, -1:].argmax(-1)
        clock = time.perf_counter()
        output = model(token, past_key_values=output.past_key_values, use_cache=True)
        times.append(time.perf_counter() - clock)
seconds = sorted(times)[len(times) // 2]
"""

WHOLE = "from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained(folder)\n"

ACCELERATE = """
import tempfile
from transformers import AutoModelForCausalLM, LlamaConfig
layers = LlamaConfig.from_pretrained(folder).num_hidden_layers
places = {f"model.layers.{number}": "disk" for number in range(layers)}
places |= {"model.embed_tokens": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
offload = tempfile.TemporaryDirectory()
model = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=offload.name)
"""

OURS = """
from sparseautomodel import SparseAutoModelForCausalLM
model = SparseAutoModelForCausalLM.from_pretrained(folder, device="cpu", device_budget="{budget}", recipe={recipe})
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--budget", default="400MiB")
    parser.add_argument("--packed-budget", default="150MiB")
    args = parser.parse_args()
    folder = random_llama(Path(".cache/llama-1.1b"))
    bodies = {
        "whole": WHOLE,
        "accelerate, disk": ACCELERATE,
        f"ours, {args.budget}": OURS.format(budget=args.budget, recipe=None),
        f"ours, W4A16, {args.packed_budget}": OURS.format(budget=args.packed_budget, recipe="'w4a16'"),
    }
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in bodies}
    for _ in range(args.runs):
        for name, body in bodies.items():
            results[name].append(measure(body + DECODE, folder, "none"))
    print(f"{'':26}{'ms a token':>11}{'peak MB':>9}")
    for name, runs in results.items():
        peak = statistics.median(run["VmHWM"] for run in runs) * 1e3
        print(f"{name:26}{statistics.median(run['seconds'] for run in runs) * 1e3:11.0f}{peak:9.0f}")
    whole, theirs, ours, packed = results.values()
    for label, one, other in (("accelerate / ours", theirs, ours), ("whole / ours, W4A16", whole, packed)):
        ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(one, other, strict=True))
        print(f"time, {label}: {ratio:.2f} (pair by pair)")


if __name__ == "__main__":
    main()
