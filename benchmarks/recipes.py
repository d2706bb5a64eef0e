"""Size and perplexity of a model under every shipped recipe that fits it, as the table of recipes/README.md.

    python benchmarks/recipes.py .cache/smollm2 [--windows 24] [--only w4a16 ...]

The text is prose that every CPython carries (`pydoc_data.topics`), in windows of 512 tokens side by side. No recipe
measured here uses data, so none has seen it.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from pydoc_data import topics

from transformers import AutoModelForCausalLM, AutoTokenizer

from sparseautomodel import SparseAutoModelForCausalLM, oneshot
from sparseautomodel.plan import PlanError
from sparseautomodel.recipe import shipped
from sparseautomodel.report import perplexity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    text = prose()

    def measure(model: object) -> str:
        return f"{perplexity(model, tokenizer, text, window=512, max_tokens=512 * args.windows).value:.2f}"

    print("| recipe | size, MB | perplexity | zeros |\n| --- | --- | --- | --- |")
    dense = AutoModelForCausalLM.from_pretrained(args.folder)
    print(f"| none (dense) | {megabytes(args.folder):.1f} | {measure(dense)} | |", flush=True)
    del dense
    for name in args.only or shipped():
        with tempfile.TemporaryDirectory() as scratch:
            output = Path(scratch) / name
            try:
                report = oneshot(args.folder, name, output=output)
            except PlanError as error:
                print(
                    f"| {name} | | does not fit: {str(error).splitlines()[1].removeprefix('- ')[:80]}... | |",
                    flush=True,
                )
                continue
            model = SparseAutoModelForCausalLM.from_pretrained(output)
            zeros = ", ".join(sorted(set(report.structures.values())))
            print(f"| {name} | {megabytes(output):.1f} | {measure(model)} | {zeros} |", flush=True)


def prose() -> str:
    """The language reference that `help()` shows, topic after topic."""
    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def megabytes(folder: Path) -> float:
    """Size of the weight files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6


if __name__ == "__main__":
    main()
