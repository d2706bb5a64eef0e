"""The main job on a small real model: compress while loading, talk, save, reload, measure.

make quickstart                                  # installs, fetches the model, runs this
python docs/quickstart.py MODEL_FOLDER [RECIPE]  # any causal language model with a chat template
"""

import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from sparseautomodel import SparseAutoModelForCausalLM, plan
from sparseautomodel.report import peak_nbytes, perplexity

QUESTION = "What is the capital of France? Answer in one sentence."


def main(dense: str, recipe: str = "w4a16") -> None:
    print(plan(dense, recipe))

    tokenizer = AutoTokenizer.from_pretrained(dense)
    model = SparseAutoModelForCausalLM.from_pretrained(dense, recipe=recipe)
    print(model.load_report)

    answer = generate(model, tokenizer)
    print(f"\n{QUESTION}\n{tokenizer.decode(answer, skip_special_tokens=True)}\n")

    with tempfile.TemporaryDirectory() as compressed:
        model.save_pretrained(compressed)
        tokenizer.save_pretrained(compressed)

        reloaded = SparseAutoModelForCausalLM.from_pretrained(compressed)
        if not torch.equal(generate(reloaded, tokenizer), answer):
            sys.exit("the reloaded model answers differently")
        print("Saved and reloaded: the same tokens.\n")

        del model, reloaded
        print_table(
            {
                "dense": in_fresh_process(dense),
                f"dense + {recipe}": in_fresh_process(dense, recipe),
                f"saved {recipe}": in_fresh_process(compressed),
            }
        )


def generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The new tokens of the greedy answer to `QUESTION`, `[length]`."""
    messages = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    return tokens[0, inputs["input_ids"].shape[1] :]


@dataclass
class Measured:
    disk: int
    libraries: int
    peak: int
    seconds: float
    perplexity: float
    tokens: int


def in_fresh_process(folder: str, recipe: str | None = None) -> Measured:
    """`measure` in a process of its own, so that its peak memory is nobody else's."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
        return process.submit(measure, folder, recipe).result()


def measure(folder: str, recipe: str | None) -> Measured:
    warnings.simplefilter("ignore")  # the plan has said it all
    tokenizer = AutoTokenizer.from_pretrained(folder)
    libraries = peak_nbytes()
    start = time.perf_counter()
    model = SparseAutoModelForCausalLM.from_pretrained(folder, recipe=recipe)
    seconds = time.perf_counter() - start
    # A dense checkpoint is mapped into memory, and resident only once a forward has touched it.
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None])
    peak = peak_nbytes()
    prose = "\n".join(topics[name] for name in sorted(topics))
    found = perplexity(model, tokenizer, prose, window=512, stride=256, max_tokens=2048)
    disk = sum(file.stat().st_size for file in Path(folder).iterdir() if file.is_file())
    return Measured(disk, libraries, peak, seconds, found.value, found.tokens)


def print_table(columns: dict[str, Measured]) -> None:
    found = list(columns.values())
    rows = {
        "size on disk, MB": [f"{column.disk / 1e6:.1f}" for column in found],
        "load, seconds": [f"{column.seconds:.2f}" for column in found],
        "peak memory to first forward, MB": [f"{column.peak / 1e6:.0f}" for column in found],
        "  without the libraries, MB": [f"{(column.peak - column.libraries) / 1e6:.0f}" for column in found],
        f"perplexity ({found[0].tokens} tokens)": [f"{column.perplexity:.2f}" for column in found],
    }
    width = max(map(len, rows))
    print(" " * width, *(f"{name:>16}" for name in columns))
    for name, values in rows.items():
        print(f"{name:<{width}}", *(f"{value:>16}" for value in values))


if __name__ == "__main__":
    main(*sys.argv[1:])
