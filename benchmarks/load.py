"""Loading with a recipe against loading dense with stock transformers, and against one plain read of the files.

    python benchmarks/load.py [FOLDER] [--recipe w4a16] [--runs 5]

FOLDER is a dense causal language model; without it a random Llama of 1.1 billion parameters is written to .cache
first.
Each measurement is a process of its own, in turn; medians are printed. Memory is the peak resident set from the start
of the process to the end of a first forward of 8 tokens, split into anonymous and file-backed pages at its end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

PLAIN = """
from safetensors import safe_open
import glob
files = sorted(glob.glob(folder + "/*.safetensors"))
clock = time.perf_counter()
kept = []
for path in files:
    with safe_open(path, framework="pt", backend="pread") as file:
        kept += [file.get_tensor(name) for name in file.keys()]
seconds = time.perf_counter() - clock
"""

STOCK = """
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
clock = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(folder)
seconds = time.perf_counter() - clock
with torch.inference_mode():
    model(torch.arange(8)[None])
"""

OURS = """
from sparseautomodel import SparseAutoModelForCausalLM
from transformers.models.llama import modeling_llama
clock = time.perf_counter()
model = SparseAutoModelForCausalLM.from_pretrained(folder, recipe=recipe)
seconds = time.perf_counter() - clock
with torch.inference_mode():
    model(torch.arange(8)[None])
assert {times for times, _ in model.load_report.reads.values()} == {1}
"""

FRAME = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch
folder, recipe = sys.argv[1:3]
{body}
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
sizes = {{key: int(status[key].split()[0]) / 1e6 for key in ("VmHWM", "RssAnon", "RssFile")}}
print(json.dumps({{"seconds": seconds}} | sizes))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--recipe", default="w4a16")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    folder = args.folder or random_llama(Path(".cache/llama-1.1b"))
    bodies = {"plain read": PLAIN, "stock, dense": STOCK, f"ours, {args.recipe}": OURS}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in bodies}
    for _ in range(args.runs):
        for name, body in bodies.items():
            results[name].append(measure(body, folder, args.recipe))
    print(f"{folder}, medians of {args.runs} runs")
    print(f"{'':16}{'seconds':>9}{'min':>7}{'max':>7}{'peak GB':>9}{'anon GB':>9}{'file GB':>9}")
    for name, runs in results.items():
        seconds = [run["seconds"] for run in runs]
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(
            f"{name:16}{middle['seconds']:9.2f}{min(seconds):7.2f}{max(seconds):7.2f}"
            f"{middle['VmHWM']:9.2f}{middle['RssAnon']:9.2f}{middle['RssFile']:9.2f}"
        )
    plain, stock, ours = results.values()
    ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(ours, plain, strict=True))
    memory = statistics.median(a["VmHWM"] / b["VmHWM"] for a, b in zip(ours, stock, strict=True))
    print(f"time: {ratio:.2f} x a plain read; peak memory: {memory:.2f} x stock dense (pair by pair)")


def measure(body: str, folder: Path, recipe: str) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    command = [sys.executable, "-c", FRAME.format(body=body), str(folder), recipe]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def random_llama(folder: Path, layers: int = 22, hidden: int = 2048, inner: int = 5632) -> Path:
    """A seeded random Llama in bf16, shards of 1 GB. The default has 1.1 billion parameters."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": 4}
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": 32000}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder, max_shard_size="1GB")
    return folder


if __name__ == "__main__":
    main()
