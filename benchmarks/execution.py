"""Running compressed models: ours, stock transformers on the same checkpoint, the dense model, and vLLM where given.

    python benchmarks/execution.py [FOLDER] [--recipe w4a16 w8a8-dynamic] [--runs 3] [--sweep SVG] [--peer PYTHON]

FOLDER is a dense causal language model; without it a random Llama of 1.1 billion parameters is written to .cache
first, and each recipe's result beside it. PEER is the interpreter of an environment with vllm (0.32 for CPUs was
measured).
Each measurement is a process of its own, in turn; imports are done before the clock starts. Medians are printed:
decoding a token after 16 others, a prefill of 256, the load with the first token, the peak resident set up to the tenth
token. --sweep measures one forward of 1, 2, 4, ..., 512 tokens instead, and draws it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

from load import random_llama

LOADERS = {
    "ours": "from sparseautomodel import SparseAutoModelForCausalLM as Auto",
    "stock": "from transformers import AutoModelForCausalLM as Auto",
}
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

FRAME = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import torch, transformers.models.llama.modeling_llama
from transformers import DynamicCache
{loader}
folder, counts = sys.argv[1], json.loads(sys.argv[2])
torch.set_grad_enabled(False)
def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) / 1e6
def median(times):
    return sorted(times)[len(times) // 2]
def seconds(work, repeats):
    times = []
    for _ in range(repeats):
        clock = time.perf_counter()
        work()
        times.append(time.perf_counter() - clock)
    return times
clock = time.perf_counter()
model = Auto.from_pretrained(folder)
ids = (torch.arange(512) * 37 % model.config.vocab_size)[None]
cache = DynamicCache(config=model.config)
token = model(ids[:, :16], past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
result = {{"load + first token s": time.perf_counter() - clock}}
def step():
    global token
    token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
times = seconds(step, 9)
result["peak GB at token 10"] = peak()
result["decode ms"] = 1e3 * median(times + seconds(step, 15))
if counts:
    result = {{}}
    for count in counts:
        work = lambda: model(ids[:, :count], use_cache=False, logits_to_keep=1)
        work()
        result[str(count)] = 1e3 * min(seconds(work, 5))
else:
    work = lambda: model(ids[:, :256], use_cache=False, logits_to_keep=1)
    result["prefill 256 ms"] = 1e3 * median(seconds(work, 5))
print(json.dumps(result))
"""

VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
model = LLM(sys.argv[1], enforce_eager=True, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=1024)
def run(prompt, tokens):
    clock = time.perf_counter()
    model.generate([{"prompt_token_ids": [i * 37 % 32000 for i in range(prompt)]}],
                   SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False), use_tqdm=False)
    return time.perf_counter() - clock
run(16, 2)
one, many = min(run(16, 1) for _ in range(3)), min(run(16, 25) for _ in range(3))
print(json.dumps({"decode ms": (many - one) / 24 * 1e3, "prefill 256 ms": 1e3 * min(run(256, 1) for _ in range(3))}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--recipe", nargs="+", default=["w4a16", "w8a8-dynamic"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sweep", type=Path)
    parser.add_argument("--peer")
    args = parser.parse_args()
    folder = args.folder or random_llama(Path(".cache/llama-1.1b"))
    for recipe in args.recipe:
        small = compressed(folder, recipe)
        sides = {"ours": ("ours", small), "stock": ("stock", small), "dense": ("stock", folder)}
        results: dict[str, list[dict[str, float]]] = {
            name: [] for name in (*sides, "vllm") if args.peer or name != "vllm"
        }
        for _ in range(args.runs):
            for name, (loader, source) in sides.items():
                results[name].append(measure(LOADERS[loader], source, COUNTS if args.sweep else ()))
            if args.peer:
                results["vllm"].append(vllm(args.peer, small))
        show(recipe, results)
        if args.sweep:
            draw(args.sweep.with_stem(f"{args.sweep.stem}-{recipe}"), recipe, results)


def compressed(folder: Path, recipe: str) -> Path:
    output = folder.with_name(f"{folder.name}-{recipe}")
    if not output.exists():
        code = "import sys; from sparseautomodel import oneshot; oneshot(*sys.argv[1:3], output=sys.argv[3])"
        subprocess.run([sys.executable, "-c", code, str(folder), recipe, str(output)], check=True)
    return output


def measure(loader: str, folder: Path, counts: tuple[int, ...]) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    command = [sys.executable, "-c", FRAME.format(loader=loader), str(folder), json.dumps(counts)]
    return _last_line(command)


def vllm(python: str, folder: Path) -> dict[str, float]:
    return _last_line([python, "-c", VLLM, str(folder)])


def _last_line(command: list[str]) -> dict[str, float]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    # Engines log to the same stream, also while they end.
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def show(recipe: str, results: dict[str, list[dict[str, float]]]) -> None:
    runs = len(results["ours"])
    print(f"{recipe}, medians of {runs} runs")
    print(f"{'':22}" + "".join(f"{name:>9}" for name in results) + "   ours / stock   ours / dense")
    for key in results["ours"][0]:
        row = {
            name: statistics.median(run[key] for run in side) if key in side[0] else None
            for name, side in results.items()
        }
        cells = "".join(f"{'' if value is None else format(value, '.2f'):>9}" for value in row.values())
        ratios = [
            statistics.median(a[key] / b[key] for a, b in zip(results["ours"], results[name], strict=True))
            for name in ("stock", "dense")
        ]
        print(f"{key:22}{cells}" + "".join(f"{ratio:15.2f}" for ratio in ratios))


def draw(path: Path, recipe: str, results: dict[str, list[dict[str, float]]]) -> None:
    """Milliseconds of a forward over its tokens, both axes logarithmic, as plain SVG."""
    curves = {name: [statistics.median(run[str(n)] for run in runs) for n in COUNTS] for name, runs in results.items()}
    every = [value for curve in curves.values() for value in curve]
    low, high = math.floor(math.log10(min(every))), math.ceil(math.log10(max(every)))

    def place(column: int, value: float) -> str:
        return f"{70 + 50 * column:.0f},{300 - 260 * (math.log10(value) - low) / (high - low):.1f}"

    parts = [f'<text x="300" y="20" text-anchor="middle">{recipe}: milliseconds of one forward, by its tokens</text>']
    for column, count in enumerate(COUNTS):
        parts.append(f'<text x="{70 + 50 * column}" y="325" text-anchor="middle">{count}</text>')
    for power in range(low, high + 1):
        y = place(0, 10.0**power).partition(",")[2]
        parts.append(f'<line x1="70" x2="520" y1="{y}" y2="{y}" stroke="#bbb"/>')
        parts.append(f'<text x="60" y="{float(y) + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for (name, curve), color in zip(curves.items(), ("#b2182b", "#2166ac", "#555", "#1b7837"), strict=False):
        points = " ".join(place(column, value) for column, value in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        x, y = place(len(COUNTS) - 1, curve[-1]).split(",")
        parts.append(f'<text x="{float(x) + 8:.0f}" y="{float(y) + 4:.0f}" fill="{color}">{name}</text>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 340" font-family="sans-serif" font-size="12">'
    path.write_text(
        head + '<rect width="600" height="340" fill="#fff"/>' + "".join(parts) + "</svg>\n", encoding="utf-8"
    )
    print(f"drawn: {path}")


if __name__ == "__main__":
    main()
