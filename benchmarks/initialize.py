"""One model, initialized in several ways: what each costs in time and memory.

    python benchmarks/initialize.py [--runs 3] [--layers 22]

The model is a Llama in bf16, of 1.1 billion parameters with 22 layers; a checkpoint of it is written to .cache first.
Each measurement is a process of its own, in turn; medians are printed. Memory is the peak resident set above that
before the model, libraries imported; and `x model` is that over the bytes of the parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

WAYS = {
    "eager, transformers": "model = AutoModelForCausalLM.from_config(config)",
    "init_module(seed=0)": """
with init_module(seed=0):
    model = AutoModelForCausalLM.from_config(config)""",
    "init_module(empty_weights=True)": """
with init_module(empty_weights=True):
    model = AutoModelForCausalLM.from_config(config)""",
    "... then materialize": """
with init_module(empty_weights=True):
    model = AutoModelForCausalLM.from_config(config)
materialize(model, seed=0)""",
    "... then load_state_dict": """
with init_module(empty_weights=True):
    model = AutoModelForCausalLM.from_config(config)
for path in sorted(glob.glob(folder + "/*.safetensors")):
    model.load_state_dict(load_file(path), strict=False, assign=True)
materialize(model)
assert verify(model, dtype=torch.bfloat16, device="cpu").ok""",
    "from_pretrained": "model = SparseAutoModelForCausalLM.from_pretrained(folder)",
    "from_config(seed=0)": "model = SparseAutoModelForCausalLM.from_config(config, seed=0)",
    "from_config(recipe='w4a16')": "model = SparseAutoModelForCausalLM.from_config(config, recipe='w4a16', seed=0)",
}

FRAME = """
import glob, json, sys, threading, time, warnings
warnings.simplefilter("ignore")
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from sparseautomodel import SparseAutoModelForCausalLM, init_module, materialize, verify
folder = sys.argv[1]
config = AutoConfig.from_pretrained(folder)
with init_module(empty_weights=True):  # what is imported on first use
    small = AutoModelForCausalLM.from_config(type(config)(num_hidden_layers=1, hidden_size=64, num_attention_heads=1))
materialize(small, seed=0)
del small
def resident(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = resident("VmRSS")
clock = time.perf_counter()
{body}
seconds = time.perf_counter() - clock
nbytes = {weights}
print(json.dumps({{"seconds": seconds, "nbytes": resident("VmHWM") - before, "model": nbytes}}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    args = parser.parse_args()
    folder = random_llama(Path(f".cache/llama-{args.layers}-layers"), args.layers)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in args.ways}
    for _ in range(args.runs):
        for name in args.ways:
            results[name].append(measure(WAYS[name], folder))
    print(f"{folder}, medians of {args.runs} runs")
    print(f"{'':33}{'seconds':>9}{'MB':>9}{'x model':>9}")
    for name, runs in results.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        share = middle["nbytes"] / middle["model"]
        print(f"{name:33}{middle['seconds']:9.2f}{middle['nbytes'] / 1e6:9.0f}{share:9.2f}")


def measure(body: str, folder: Path) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    command = [sys.executable, "-c", FRAME.format(body=body, weights=nbytes), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def random_llama(folder: Path, layers: int) -> Path:
    """A seeded random Llama in bf16, in files of 500 MB, with its config."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import LlamaConfig

    from sparseautomodel import SparseAutoModelForCausalLM

    heads = {"num_attention_heads": 32, "num_key_value_heads": 4}
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": layers, "vocab_size": 32000}
    config = LlamaConfig(**sizes, **heads, dtype=torch.bfloat16)
    SparseAutoModelForCausalLM.from_config(config, seed=0).save_pretrained(folder, max_shard_size="500MB")
    return folder


if __name__ == "__main__":
    main()
