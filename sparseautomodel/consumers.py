"""Who can open what, as data: one row a measured limit, by consumer and version. `plan` asks `consumers_of`.

The rows were measured (x86-64, SmolLM2-135M and tiny models); a scheme without a row opened. What was not tried
says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.modifiers import Layer
from sparseautomodel.modifiers.group_keys import observes_inputs

TRANSFORMERS = "transformers 5.24 + compressed-tensors 0.20.1"
VLLM_CPU = "vLLM 0.32 on a CPU"


@dataclass(frozen=True)
class Consumer:
    """A verdict: whether one program reads the result, and if not, why not."""

    name: str
    reads: bool
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "reads": self.reads, "reasons": list(self.reasons)}


@dataclass(frozen=True)
class Limit:
    """One thing that one consumer does not open."""

    consumer: str
    reason: str
    applies: Callable[[QuantizationScheme, Layer], bool]


def _is_packed(scheme: QuantizationScheme) -> bool:
    return storage.format_of(scheme).endswith("pack-quantized")


def _is_packed_int(scheme: QuantizationScheme) -> bool:
    return scheme.weights.type == "int" and scheme.input_activations is None


LIMITS = (
    Limit(
        TRANSFORMERS,
        "groups in the order of activations (actorder: group): compressed-tensors refuses the config (our loader reads "
        "them)",
        lambda scheme, layer: scheme.weights.actorder == "group",
    ),
    Limit(
        TRANSFORMERS,
        "asymmetric packed integers: it expects unpacked zero points and finds packed ones (our loader reads them)",
        lambda scheme, layer: _is_packed_int(scheme) and not scheme.weights.symmetric,
    ),
    Limit(
        TRANSFORMERS,
        "experts in NVFP4: it drops the global scale and the experts come out about 31,600 times too large",
        lambda scheme, layer: layer.expert and scheme.weights.strategy == "tensor_group",
    ),
    Limit(
        TRANSFORMERS,
        "experts in integers that are not packed (W8A8, W4A8): its expert decompressor looks for packed ones and fails",
        lambda scheme, layer: layer.expert and scheme.weights.type == "int" and scheme.input_activations is not None,
    ),
    Limit(
        TRANSFORMERS,
        "experts in MXFP8, which is not packed either: the same failure",
        lambda scheme, layer: layer.expert and storage.format_of(scheme) == "mxfp8-quantized",
    ),
    Limit(
        TRANSFORMERS,
        "experts in FP8 blocks, more than one to a layer: its expert decompressor takes their scales for those of rows",
        lambda scheme, layer: (
            layer.expert
            and scheme.weights.type == "float"
            and scheme.weights.strategy == "block"
            and any(size > block for size, block in zip(layer.shape, scheme.weights.block_structure, strict=True))
        ),
    ),
    Limit(
        TRANSFORMERS,
        "experts with scales of their inputs: it leaves them out, with a warning, and does not round the inputs",
        lambda scheme, layer: layer.expert and observes_inputs(scheme),
    ),
    Limit(
        TRANSFORMERS,
        "quantized embeddings: the module is left without a weight (our loader runs them)",
        lambda scheme, layer: layer.role == "embedding",
    ),
    Limit(
        TRANSFORMERS,
        "quantized Conv1D: compressed-tensors has no such layer",
        lambda scheme, layer: layer.transposed,
    ),
    Limit(
        VLLM_CPU,
        "weight-only integers other than 4 bits: its CPU kernel takes 4 bits only",
        lambda scheme, layer: _is_packed_int(scheme) and scheme.weights.num_bits != 4,
    ),
    Limit(
        VLLM_CPU,
        "NVFP4 and MXFP4: there is no CPU kernel",
        lambda scheme, layer: scheme.weights.type == "float" and scheme.weights.num_bits == 4,
    ),
    Limit(
        VLLM_CPU,
        "MXFP6 and MXFP8: not tried, no CPU kernel is known",
        lambda scheme, layer: (
            scheme.weights.type == "float" and scheme.weights.strategy == "group" and scheme.weights.num_bits in (6, 8)
        ),
    ),
    Limit(
        VLLM_CPU,
        "FP8 weights without FP8 activations: not tried",
        lambda scheme, layer: (
            scheme.weights.type == "float"
            and scheme.weights.num_bits == 8
            and scheme.weights.strategy != "group"
            and scheme.input_activations is None
        ),
    ),
    Limit(
        VLLM_CPU,
        "FP8 activations with a scale found beforehand: its CPU build lacks static_scaled_fp8_quant (dynamic ones run)",
        lambda scheme, layer: (
            observes_inputs(scheme)
            and scheme.weights.type == scheme.input_activations.type == "float"
            and scheme.weights.num_bits == 8
        ),
    ),
    Limit(
        VLLM_CPU,
        "FP8 blocks that do not divide the layer",
        lambda scheme, layer: (
            scheme.weights.strategy == "block"
            and any(size % block for size, block in zip(layer.shape, scheme.weights.block_structure, strict=True))
        ),
    ),
    Limit(
        VLLM_CPU,
        "integer activations below 8 bits or weights below 8 bits with integer activations: not tried",
        lambda scheme, layer: (
            scheme.input_activations is not None
            and scheme.weights.type == "int"
            and (scheme.weights.num_bits < 8 or scheme.input_activations.num_bits < 8)
        ),
    ),
    Limit(
        VLLM_CPU,
        "quantized embeddings and heads: support depends on the model class, not tried",
        lambda scheme, layer: layer.role in ("embedding", "head"),
    ),
)


def consumers_of(
    schemes: Iterable[tuple[Layer, QuantizationScheme]],
    dense: Iterable[Layer] = (),
    initialized: Sequence[str] = (),
    cache: QuantizationArgs | None = None,
) -> tuple[Consumer, ...]:
    """A verdict of each consumer on a checkpoint whose layers are stored by these schemes, and others `dense`.

    `initialized` are classes that draw initial values for the layers inside them, see `Architecture.initializes`;
    `cache` is how keys and values are stored.
    """
    schemes = list(schemes)
    experts = any(layer.expert for layer, _ in schemes)
    verdicts = []
    for name in (TRANSFORMERS, VLLM_CPU):
        reasons = [
            limit.reason
            for limit in LIMITS
            if limit.consumer == name and any(limit.applies(scheme, layer) for layer, scheme in schemes)
        ]
        if name == TRANSFORMERS and experts and any(layer.expert for layer in dense):
            reasons.append("experts of which some are compressed and some not: it merges them all alike, and fails")
        if name == TRANSFORMERS and initialized and any(_is_packed(scheme) for _, scheme in schemes):
            reasons.append(
                f"{', '.join(initialized)}: draws initial values for layers that have no plain weight, and fails "
                "(our loader opens it)"
            )
        if cache is not None and name == TRANSFORMERS:
            reasons.append(
                "scales of a quantized cache: it leaves them out, with a warning, and keeps the cache as it is "
                "(compressed-tensors looks for an argument past_key_values, which is called cache now)"
            )
        if cache is not None and name == VLLM_CPU and cache.type == "int":
            reasons.append("a cache of integers: it takes FP8 only")
        verdicts.append(Consumer(name, not reasons, tuple(reasons)))
    return tuple(verdicts)
