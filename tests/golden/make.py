"""Write the golden checkpoints of this release. Run once a release, for a new folder; a folder that exists is history.

python -m tests.golden.make 0.1.0
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from sparseautomodel import SparseAutoModelForCausalLM, oneshot

GOLDEN = Path(__file__).resolve().parent
KEPT = ("config.json", "model.safetensors")


def _weights(**args: Any) -> list[dict[str, Any]]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True} | args}
    return [{"QuantizationModifier": {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}}]


RECIPES: dict[str, Any] = {
    "dense-2of4": "2of4",
    "pack-int4-group": "w4a16",
    "pack-int4-group-2of4": "2of4-w4a16",
    "pack-int4-group-asymmetric": _weights(num_bits=4, strategy="group", group_size=32, symmetric=False),
    "pack-int3-channel-asymmetric": _weights(num_bits=3, strategy="channel", symmetric=False),
    "pack-int8-group": "w8a16",
    "int8-dynamic": "w8a8-dynamic",
    "float8-dynamic": "fp8-dynamic",
    "float8-block": _weights(num_bits=8, type="float", strategy="block", block_structure=[16, 16]),
    "nvfp4": "nvfp4a16",
    "mxfp4": "mxfp4a16",
    "mxfp8": [{"QuantizationModifier": {"scheme": "MXFP8A16"}}],
    "tied-head-int8": [
        {"QuantizationModifier": {"scheme": "W8A16", "targets": ["Linear", "lm_head"], "group_size": 32}}
    ],
}


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 of every tensor of a model: name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for name, values in sorted(model.state_dict().items()):
        digest.update(f"{name} {values.dtype} {list(values.shape)}\n".encode())
        digest.update(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def make(release: str) -> None:
    """Compress one small model by every recipe and note what each loads as."""
    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True}
    (GOLDEN / release).mkdir()
    found = {}
    for name, recipe in RECIPES.items():
        torch.manual_seed(0)
        config = LlamaConfig(**sizes, **heads, initializer_range=0.1, tie_word_embeddings="tied" in name)
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(f"{folder}/dense")
            report = oneshot(f"{folder}/dense", recipe, output=f"{folder}/out")
            (GOLDEN / release / name).mkdir()
            for file in KEPT:
                shutil.copyfile(f"{folder}/out/{file}", GOLDEN / release / name / file)
            claims = {"structures": dict(report.structures)}
            (GOLDEN / release / name / "compression_report.json").write_text(json.dumps(claims, indent=2) + "\n")
        dense = SparseAutoModelForCausalLM.from_pretrained(GOLDEN / release / name, execution="dense")
        found[name] = fingerprint(dense)
    (GOLDEN / release / "fingerprints.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    make(sys.argv[1])
