"""Does vLLM generate what this library generates from the same compressed folder?

The two live in environments of their own, so this file runs in each:

    python integrations/vllm/agree.py ours FOLDER ours.json          # where sparseautomodel is installed
    python integrations/vllm/agree.py vllm FOLDER ours.json          # where vLLM is installed; exit 1 on disagreement

README.md beside this file has the set-up. Greedy, 16 tokens, two prompts, bfloat16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,", "2, 4, 6, 8, 10, 12, 14,")
"""Continuations that the model is sure of: the best token leads by 2 logits or more. In open text a model of this size
often has two tokens within one bfloat16 step (0.125 at these logits), and the order of a sum decides between them."""
NUM_TOKENS = 16


def ours(folder: str, prompts: tuple[str, ...] = PROMPTS, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Greedy tokens of each prompt, generated with this library."""
    from transformers import AutoTokenizer

    from sparseautomodel import SparseAutoModelForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = SparseAutoModelForCausalLM.from_pretrained(folder)
    results = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        output = model.generate(**inputs, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
        results.append(output[0, length:].tolist())
    return results


def vllm(folder: str, prompts: tuple[str, ...] = PROMPTS, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Greedy tokens of each prompt, generated with vLLM."""
    from vllm import LLM, SamplingParams

    engine = LLM(model=folder, enforce_eager=True, dtype="bfloat16", max_model_len=256)
    settings = SamplingParams(temperature=0.0, max_tokens=num_tokens, min_tokens=num_tokens)
    return [list(output.outputs[0].token_ids) for output in engine.generate(list(prompts), settings)]


def compare(expected: list[list[int]], found: list[list[int]]) -> tuple[bool, str]:
    """Whether all tokens agree, and a line a prompt that says how many of them do."""
    lines: list[Any] = []
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        same = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
        lines.append(f"prompt {number}: the first {same} of {len(one)} tokens agree")
    return expected == found, "\n".join(lines)


def main(arguments: list[str]) -> int:
    if len(arguments) != 3 or arguments[0] not in ("ours", "vllm"):
        print(__doc__, file=sys.stderr)
        return 2
    side, folder, path = arguments
    if side == "ours":
        Path(path).write_text(json.dumps(ours(folder)))
        return 0
    agreed, text = compare(json.loads(Path(path).read_text()), vllm(folder))
    print(text)
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
