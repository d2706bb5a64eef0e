"""Calibrated oneshot against llm-compressor on the same rows: time, peak memory, and perplexity of both results.

    python benchmarks/calibrated.py FOLDER TEXT [--peer PYTHON] [--methods gptq sparsegpt wanda] [--runs 3]

FOLDER is a dense language model with its tokenizer, TEXT a file: its first 64 x 512 tokens calibrate, 24 windows of 512
tokens near its end, which neither side has seen, are scored. PEER is the interpreter of an environment that has
llmcompressor (0.14.0.1 was measured). `gptq` and `sparsegpt` are like for like: min-max scales, and the paper's method,
on both sides; `gptq-mse` searches scales on both sides. Names of our recipes (w4a16-gptq, w8a8-smoothquant) run on our
side alone.
Every run is a process of its own, in turn; imports are not timed, load and save are; memory is the peak resident set.
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

from sparseautomodel.recipe import shipped

GROUPS = '{"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 64, "observer": "%s"}}}'

OURS = {
    "gptq": '{"GPTQModifier": {"scheme": "W4A16", "group_size": 64}}',
    "gptq-mse": '{"GPTQModifier": {"scheme": "W4A16", "group_size": 64, "observer": "mse"}}',
    "sparsegpt": '{"SparseGPTModifier": {"mask_structure": "2:4", "refine": False}}',
    "wanda": '{"WandaPruningModifier": {"mask_structure": "2:4"}}',
    "rtn": '{"QuantizationModifier": {"scheme": "W4A16", "group_size": 64}}',
}

PRUNED = '(sparsity=0.5, mask_structure="2:4", targets=["Linear"], ignore=["re:.*lm_head"])'

PEERS = {
    "gptq": ("quantization", f'GPTQModifier(config_groups={GROUPS % "minmax"}, ignore=["lm_head"])'),
    "gptq-mse": ("quantization", f'GPTQModifier(config_groups={GROUPS % "mse"}, ignore=["lm_head"])'),
    "sparsegpt": (
        "pruning",
        'SparseGPTModifier(sparsity=0.5, mask_structure="2:4", targets=["Linear"], ignore=["re:.*lm_head"])',
    ),
    "wanda": (
        "pruning",
        'WandaPruningModifier(sparsity=0.5, mask_structure="2:4", targets=["Linear"], ignore=["re:.*lm_head"])',
    ),
    "rtn": ("quantization", f'QuantizationModifier(config_groups={GROUPS % "minmax"}, ignore=["lm_head"])'),
}

OUR_RUN = """
from sparseautomodel import oneshot
clock = time.perf_counter()
recipe = {recipe}
oneshot(folder, recipe, data=text, output=output, num_samples=64, max_length=512, batch_size=8)
"""

PEER_RUN = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.{package} import *
from pathlib import Path
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer(Path(text).read_text()[:400_000], add_special_tokens=False)["input_ids"]
rows = [ids[number * 512 : number * 512 + 512] for number in range(64)]
rows = Dataset.from_list([{{"input_ids": row, "attention_mask": [1] * 512}} for row in rows])
clock = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(folder)
oneshot(model=model, dataset=rows, recipe={recipe}, num_calibration_samples=64, max_seq_length=512)
model.save_pretrained(output, save_compressed={save})
tokenizer.save_pretrained(output)
"""

FRAME = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch, transformers.models.llama.modeling_llama
folder, text, output = sys.argv[1:4]
{body}
seconds = time.perf_counter() - clock
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({{"seconds": seconds, "peak": int(status["VmHWM"].split()[0]) / 1e6}}))
"""

SCORE = """
import sys, warnings
warnings.simplefilter("ignore")
from transformers import AutoTokenizer
from sparseautomodel import SparseAutoModelForCausalLM
from sparseautomodel.report import perplexity
folder, text, result = sys.argv[1:4]
model = SparseAutoModelForCausalLM.from_pretrained(result, strict=False)  # as it runs, inputs rounded where they are
part = open(text).read()[-200_000:]
print(perplexity(model, AutoTokenizer.from_pretrained(folder), part, window=512, max_tokens=24 * 512).value)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--peer", help="python of an environment with llmcompressor")
    parser.add_argument("--methods", nargs="*", default=["gptq", "sparsegpt", "wanda"], choices=[*OURS, *shipped()])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="a folder in which the first result of each side stays")
    args = parser.parse_args()
    print(f"dense: perplexity {score(args.folder, args.text, args.folder):.2f}", flush=True)
    print(f"{'':28}{'seconds':>9}{'min':>7}{'max':>7}{'peak GB':>9}{'perplexity':>12}")
    for method in args.methods:
        sides = {"ours": (sys.executable, OUR_RUN.format(recipe=OURS.get(method, repr(method))))}
        if args.peer and method in PEERS:
            package, recipe = PEERS[method]
            save = method not in ("sparsegpt", "wanda")
            sides["llm-compressor"] = (args.peer, PEER_RUN.format(package=package, recipe=recipe, save=save))
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for number in range(args.runs):
            for name, (python, body) in sides.items():
                kept = args.keep / f"{method}-{name}" if args.keep and number == 0 else None
                runs[name].append(measure(python, body, args.folder, args.text, number == 0, kept))
        for name, found in runs.items():
            seconds, peak = [run["seconds"] for run in found], statistics.median(run["peak"] for run in found)
            middle, quality = statistics.median(seconds), found[0]["perplexity"]
            row = f"{middle:9.1f}{min(seconds):7.1f}{max(seconds):7.1f}{peak:9.2f}{quality:12.2f}"
            print(f"{method + ', ' + name:28}{row}", flush=True)
        if len(runs) == 2:
            pairs = list(zip(*runs.values(), strict=True))
            ratios = [statistics.median(other[key] / ours[key] for ours, other in pairs) for key in ("seconds", "peak")]
            print(f"{'':8}llm-compressor / ours, pair by pair: time {ratios[0]:.2f}, peak {ratios[1]:.2f}", flush=True)


def measure(python: str, body: str, folder: Path, text: Path, scored: bool, kept: Path | None) -> dict[str, float]:
    """Run one side in a process of its own; what it wrote is scored, and then removed or `kept`."""
    scratch = Path(tempfile.mkdtemp(dir=".cache" if Path(".cache").is_dir() else None))
    try:
        output = scratch / "output"
        found = json.loads(run([python, "-c", FRAME.format(body=body), str(folder), str(text), str(output)]))
        scores = {"perplexity": score(folder, text, output)} if scored else {}
        if kept is not None:
            shutil.copytree(output, kept)
        return found | scores
    finally:
        shutil.rmtree(scratch)


def score(folder: Path, text: Path, result: Path) -> float:
    return float(run([sys.executable, "-c", SCORE, str(folder), str(text), str(result)]))


def run(command: list[str]) -> str:
    """The last line that the command prints."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    main()
