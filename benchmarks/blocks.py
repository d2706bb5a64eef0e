"""One block of a model against one plain read of its bytes, and against loading the whole model with transformers.

    python benchmarks/blocks.py [FOLDER] [--block 11] [--count 1] [--recipe w4a16] [--runs 5]

FOLDER is a dense causal language model; without it random Llamas with blocks of 88 MB, 4 and 22 of them, are written to
.cache first: the time for one block should not depend on how many there are. Each measurement is a process of its own,
in turn; medians are printed. `seconds` is that of the first call in a process that has imported everything, memory what
the resident set grew by from before the call to its peak, files warm; `file pages` of it are pages of files, which are
shared with every other process: the code of torch that runs for the first time, and mapped checkpoints.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from load import random_llama

PLAIN = """
from safetensors import safe_open
import glob
parts = []
for path in sorted(glob.glob(folder + "/*.safetensors")):
    with safe_open(path, framework="pt", backend="pread") as file:
        parts += [(path, name) for name in file.keys() if any(f".layers.{one}." in name for one in blocks)]
begin()
kept = []
for path in dict.fromkeys(path for path, _ in parts):
    with safe_open(path, framework="pt", backend="pread") as file:
        kept += [file.get_tensor(name) for one, name in parts if one == path]
end(sum(one.nbytes for one in kept))
"""

OURS = """
from sparseautomodel import load_blocks
from transformers.models.llama import modeling_llama
import sparseautomodel.blocks
begin()
stage = load_blocks(folder, blocks, recipe or None, block_cache=cache or False)
end(stage.load_report.nbytes)
"""

STOCK = """
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
begin()
model = AutoModelForCausalLM.from_pretrained(folder)
with torch.inference_mode():
    model(torch.arange(8)[None])
end(sum(one.nbytes for one in model.parameters()))
"""

FRAME = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch, transformers
transformers.logging.disable_progress_bar()
folder, blocks, recipe, cache = sys.argv[1], range(*map(int, sys.argv[2].split(":"))), sys.argv[3], sys.argv[4]
def resident(key):
    return int(dict(line.split(":", 1) for line in open("/proc/self/status"))[key].split()[0]) / 1e3
def begin():
    global clock, before, files
    open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here
    before, files, clock = resident("VmRSS"), resident("RssFile"), time.perf_counter()
def end(nbytes):
    seconds = time.perf_counter() - clock
    growth, pages = resident("VmHWM") - before, resident("RssFile") - files
    print(json.dumps({{"seconds": seconds, "growth": growth, "pages": pages, "read": nbytes / 1e6}}))
{body}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--block", type=int, default=2)
    parser.add_argument("--count", type=int, default=1, help="of blocks, from --block on")
    parser.add_argument("--recipe", default="w4a16")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    if args.folder:
        folder, small = args.folder, args.folder
    else:
        folder, small = random_llama(Path(".cache/llama-1.1b")), random_llama(Path(".cache/llama-4-blocks"), layers=4)
    blocks = f"{args.block}:{args.block + args.count}"
    with tempfile.TemporaryDirectory() as cache:
        kept, recipe = str(Path(cache, "kept")), args.recipe
        measure(OURS, folder, blocks, recipe, kept)  # fills the cache of blocks
        rows = {
            "plain read of the block": (PLAIN, folder, "", ""),
            "load_blocks": (OURS, folder, "", ""),
            "load_blocks, model of 4 blocks": (OURS, small, "", ""),
            f"load_blocks, {recipe}": (OURS, folder, recipe, ""),
            f"load_blocks, {recipe}, kept": (OURS, folder, recipe, kept),
            "stock, whole model and a forward": (STOCK, folder, "", ""),
        }
        results: dict[str, list[dict[str, float]]] = {name: [] for name in rows}
        for _ in range(args.runs):
            for name, (body, where, asked, cached) in rows.items():
                results[name].append(measure(body, where, blocks, asked, cached))
    print(f"{folder}, blocks {blocks}, medians of {args.runs} runs")
    titles = f"{'seconds':>9}{'min':>8}{'max':>8}{'growth MB':>11}{'file pages':>12}{'read MB':>9}{'x plain read':>14}"
    print(f"{'':34}{titles}")
    plain = results["plain read of the block"]
    for name, runs in results.items():
        seconds = [run["seconds"] for run in runs]
        ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(runs, plain, strict=True))
        growth, pages, read = (statistics.median(run[key] for run in runs) for key in ("growth", "pages", "read"))
        middle = statistics.median(seconds)
        times = f"{middle:9.3f}{min(seconds):8.3f}{max(seconds):8.3f}"
        print(f"{name:34}{times}{growth:11.1f}{pages:12.1f}{read:9.1f}{ratio:14.2f}")


def measure(body: str, folder: Path, blocks: str, recipe: str, cache: str) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    command = [sys.executable, "-c", FRAME.format(body=body), str(folder), blocks, recipe, cache]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
