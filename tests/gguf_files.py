"""A tiny Llama as a GGUF file, as llama.cpp would write it, and as transformers holds one in blocks."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import nn
from transformers.integrations.gguf.utils import GgufEmbedding, GgufLinear

WIDTH, INNER, BLOCKS, HEADS, VOCABULARY = 64, 128, 4, 4, 64


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """Matrices in `kind`, norms in float32, a head of its own."""
    numbers = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(BLOCKS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    matrices = {"token_embd": (VOCABULARY, WIDTH), "output": (VOCABULARY, WIDTH)}
    norms = ["output_norm"]
    for block in range(BLOCKS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrices[f"blk.{block}.{name}"] = (WIDTH, WIDTH)
        matrices |= {f"blk.{block}.{name}": (INNER, WIDTH) for name in ("ffn_gate", "ffn_up")}
        matrices[f"blk.{block}.ffn_down"] = (WIDTH, INNER)
        norms += [f"blk.{block}.attn_norm", f"blk.{block}.ffn_norm"]
    for name, shape in matrices.items():
        values = numbers.standard_normal(shape, dtype=np.float32) * 0.2
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in norms:
        writer.add_tensor(f"{name}.weight", 1 + 0.1 * numbers.standard_normal(WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pack_gguf(model: nn.Module, kind: gguf.GGMLQuantizationType) -> nn.Module:
    """Put the modules of transformers that hold blocks in the place of Linear and Embedding, as its loader does for the
    models it knows, where it has a kernel. Without one, as here, they unpack the blocks in each call."""
    for name, module in list(model.named_modules()):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            rows, columns = module.weight.shape
            made = (
                GgufEmbedding(rows, columns, kind) if isinstance(module, nn.Embedding) else _Linear(columns, rows, kind)
            )
            blocks = gguf.quants.quantize(module.weight.detach().numpy(), kind)
            made.weight = nn.Parameter(torch.from_numpy(blocks), requires_grad=False)
            model.set_submodule(name, made)
    return model


class _Linear(GgufLinear):
    """A few rows go through the kernel, which there is none of here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._unpack_matmul(x.reshape(-1, self.in_features)).reshape(*x.shape[:-1], self.out_features)
