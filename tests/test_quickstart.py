"""docs/quickstart.py runs, and the job that it shows works on the small real model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from sparseautomodel import SparseAutoModelForCausalLM
from sparseautomodel.report import perplexity

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


def test_script_runs_on_any_chat_model(tiny_llama: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "quickstart.py", tiny_llama, "w8a16"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Saved and reloaded: the same tokens." in done.stdout
    rows = {line.rsplit(maxsplit=3)[0].strip(): line.split()[-3:] for line in done.stdout.splitlines()[-5:]}
    _, compressed, saved = rows["perplexity (2047 tokens)"]
    assert compressed == saved
    assert {"size on disk, MB", "load, seconds", "peak memory to first forward, MB"} < rows.keys()


def test_small_real_model_keeps_its_wits_in_4_bits(smollm2: Path, smollm2_tokenizer: PreTrainedTokenizerBase) -> None:
    dense = SparseAutoModelForCausalLM.from_pretrained(smollm2)
    model = SparseAutoModelForCausalLM.from_pretrained(smollm2, recipe="w4a16")
    inputs = smollm2_tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in smollm2_tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    with torch.no_grad():
        before, after = (perplexity(one, smollm2_tokenizer, text, max_tokens=512).value for one in (dense, model))
    assert before < after < 2 * before
