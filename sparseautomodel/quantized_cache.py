"""A cache that keeps keys and values in 8 bits, as the `kv_cache_scheme` of a checkpoint says.

The layers of transformers' own caches hold the bytes instead of the numbers, and give attention what they stand for,
so all that those layers do (windows, beams, cropping, preallocated memory) is done on the bytes. A layer of a cache
becomes one of these when its attention module is first run with it: by `generate`, by a plain forward, with the cache
that the model makes or one that is passed in.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from compressed_tensors.transform import TransformBase
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    BaseQuantizedLayer,
    CacheLayerMixin,
    StaticLayer,
)

ARGUMENTS = ("cache", "past_key_values", "past_key_value", "layer_past")
"""Names that attention modules have for their cache."""

LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


def quantize_cache(model: nn.Module, args: QuantizationArgs, names: Iterable[str]) -> list[str]:
    """Have the attention modules `names` of `model` keep their keys and values in 8 bits wherever there is a cache.

    A forward without a cache rounds keys and values too, so that it gives what a forward with one gives; gradients pass
    as if nothing were rounded. Scales that were found beforehand are `k_scale` and `v_scale` of each module, beside
    `k_zero_point` and `v_zero_point` where the scheme is not symmetric.

    Returns:
        Why modules were left as they are, for people; empty where all were changed.
    """
    reason = _refusal(args)
    if reason is not None:
        return [f"the cache of keys and values stays as it is: {reason}"]
    left = []
    for name in names:
        module = model.get_submodule(name)
        arguments = list(inspect.signature(module.forward).parameters)
        argument = next((one for one in ARGUMENTS if one in arguments), None)
        found = args.dynamic or all(hasattr(module, part) for part in ("k_scale", "v_scale"))
        if argument is None or not found:
            left.append(name)
        else:
            hook = _Keeping(args, argument, arguments.index(argument))
            module.register_forward_pre_hook(hook, with_kwargs=True)
    listed = ", ".join(left)
    return [f"keys and values stay as they are in {listed}: no scales, or no argument for a cache"] if left else []


def nbytes_a_token(model: Any) -> tuple[int, int] | None:
    """Bytes of a cache for one more token, all layers together: with the numbers of the model, and as it is kept.

    None where no attention module keeps 8 bits, or its sizes cannot be told from the config.
    """
    before = after = 0
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and (hook := _hook_of(module)) is not None:
            if heads is None or size is None or hasattr(module, "kv_b_proj"):
                return None
            width, dtype = getattr(module, "head_dim", size), model.dtype
            before += 2 * heads * width * dtype.itemsize
            after += 2 * heads * (width + (dtype.itemsize if hook.args.dynamic else 0))
    return (before, after) if before else None


def _refusal(args: QuantizationArgs) -> str | None:
    """Why a cache cannot be kept so."""
    if args.num_bits != 8:
        return f"it is kept in 8 bits, the scheme says {args.num_bits}"
    if args.dynamic and (args.strategy not in ("tensor", "token") or not args.symmetric):
        return f"scales found on the way are one a tensor or one a token, symmetric, not {args.strategy}"
    if not args.dynamic and args.strategy not in ("tensor", "attn_head"):
        return f"scales found beforehand are one a tensor or one a head, not {args.strategy}"
    return None


def _hook_of(module: nn.Module) -> _Keeping | None:
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _Keeping)), None)


@dataclass(frozen=True)
class _Keeping:
    """Before an attention module runs: the layer of the cache that it will write to keeps bytes from now on."""

    args: QuantizationArgs
    argument: str
    position: int
    """Of the argument among those that are passed by position."""

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        codecs = tuple(_codec(self.args, module, part) for part in "kv")
        by_position = self.position < len(args)
        cache = args[self.position] if by_position else kwargs.get(self.argument)
        if cache is not None:
            keep_bytes(getattr(cache, "self_attention_cache", cache), module.layer_idx, codecs)
            return None
        rounding = _RoundingCache(codecs)
        if by_position:
            return (*args[: self.position], rounding, *args[self.position + 1 :]), kwargs
        return args, kwargs | {self.argument: rounding}


def keep_bytes(cache: Cache, index: int, codecs: tuple[Any, ...]) -> None:
    """Have layer `index` of `cache` keep bytes; what it holds already is rounded."""
    layers = cache.layers
    if cache.layer_class_to_replicate is not None:
        while len(layers) <= index:
            layers.append(cache.layer_class_to_replicate())
    if index >= len(layers):
        return  # no cache that holds tokens
    layer: Any = layers[index]
    if not isinstance(layer, ByteLayer):
        if isinstance(layer, BaseQuantizedLayer) or not isinstance(layer, CacheLayerMixin):
            warnings.warn(
                f"{type(layer).__name__} keeps keys and values its own way: 8 bits are not used", stacklevel=2
            )
            return
        old, layer = layer, object.__new__(_class_like(type(layer)))
        layer.__dict__ = dict(vars(old))
        layer.codecs = codecs
        if layer.is_initialized:
            layer.dtypes = layer.keys.dtype, layer.values.dtype
            layer.keys, layer.values = codecs[0].encode(layer.keys), codecs[1].encode(layer.values)
        layers[index] = layer
    layer.codecs = codecs  # those of the module as it is now: it may have been moved


class ByteLayer:
    """What stands before a layer class of transformers: it holds bytes, its `update` takes and gives numbers."""

    codecs: tuple[_Codec, _Codec]
    dtypes: tuple[torch.dtype, torch.dtype]

    def lazy_initialization(self, *states: Tensor, **others: Any) -> None:
        if states and states[0].dtype != torch.uint8:  # memory is made before there are tokens
            self.dtypes = states[0].dtype, states[1].dtype
            states = tuple(codec.encode(one) for codec, one in zip(self.codecs, states, strict=True))
        super().lazy_initialization(*states, **others)  # type: ignore[misc]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        states, (keys, values) = (key_states, value_states), self.codecs
        self.dtypes = key_states.dtype, value_states.dtype
        held = super().update(keys.encode(key_states), values.encode(value_states), *args, **kwargs)  # type: ignore[misc]
        first, second = (
            codec.decode(one, dtype) for codec, one, dtype in zip(self.codecs, held, self.dtypes, strict=True)
        )
        if isinstance(self, StaticLayer):  # its new tokens are somewhere in the middle, and nobody trains with it
            return first, second
        return _with_gradient(first, states[0]), _with_gradient(second, states[1])

    def __reduce__(self) -> Any:
        return _hollow, (type(self).__bases__[1],), self.__dict__


def _class_like(base: type) -> type:
    return _KNOWN[base] if base in _KNOWN else _made(base)


@functools.cache
def _made(base: type) -> type:
    # Without a layer type of its own: transformers would put the class in its table of classes for all models.
    return type(f"Byte{base.__name__}", (ByteLayer, base), {"_layer_type": None})


_KNOWN = {
    base: _made(base)
    for base in {*DYNAMIC_LAYER_TYPE_MAPPING.values(), *STATIC_LAYER_TYPE_MAPPING.values()}
    if issubclass(base, CacheLayerMixin)
}
"""Made beforehand: torch.compile does not make classes."""


def _hollow(base: type) -> Any:
    return object.__new__(_class_like(base))


class _RoundingCache(Cache):
    """Holds nothing: gives back the keys and values that one which holds bytes would give."""

    def __init__(self, codecs: tuple[_Codec, ...]) -> None:
        super().__init__(layers=[])
        self.codecs = codecs

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rounded = (
            _with_gradient(codec.decode(codec.encode(states), states.dtype), states)
            for codec, states in zip(self.codecs, (key_states, value_states), strict=True)
        )
        return next(rounded), next(rounded)


def _codec(args: QuantizationArgs, module: nn.Module, part: str) -> _Codec:
    scale, zero_point = getattr(module, f"{part}_scale", None), getattr(module, f"{part}_zero_point", None)
    rotations = (one for one in module.children() if isinstance(one, TransformBase) and one.args.location == "k_cache")
    rotation = next(rotations, None) if part == "k" else None
    if args.dynamic:
        return _Codec(args, None, None, rotation)
    assert scale is not None
    zero_point = None if zero_point is None or args.symmetric else zero_point.detach()
    return _Codec(args, scale.detach(), zero_point, rotation)


@dataclass(frozen=True)
class _Codec:
    """Numbers `[batch, heads, tokens, width]` to bytes and back: of the keys or of the values of one layer.

    As compressed-tensors rounds activations. Scales that are found on the way lie behind the codes of each token.
    """

    args: QuantizationArgs
    scale: Tensor | None
    """`[1]`, or `[heads, 1, 1]`; None where it is found on the way."""
    zero_point: Tensor | None
    rotation: Any
    """Of keys, where the checkpoint has one: they are rounded in its directions, and turned back after."""

    def encode(self, values: Tensor) -> Tensor:
        values = values.detach() if self.rotation is None else self.rotation(values.detach())
        scale = self._found(values) if self.scale is None else self.scale
        scaled = values / scale
        if self.zero_point is not None:
            scaled += self.zero_point.to(scaled.dtype)
        if self.args.type == "float":
            codes = scaled.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            codes = scaled.clamp(-128, 127).round().to(torch.int8).view(torch.uint8)
        if self.scale is not None:
            return codes
        scales = scale.expand(*values.shape[:-1], 1).contiguous()
        return torch.cat([codes, scales.view(torch.uint8)], dim=-1)

    def decode(self, held: Tensor, dtype: torch.dtype) -> Tensor:
        scale, codes = self.scale, held
        if scale is None:
            codes, scales = held[..., : -dtype.itemsize], held[..., -dtype.itemsize :]
            scale = scales.contiguous().view(dtype)
        numbers = codes.view(torch.float8_e4m3fn if self.args.type == "float" else torch.int8).to(scale.dtype)
        if self.zero_point is not None:
            numbers -= self.zero_point.to(scale.dtype)
        values = (numbers * scale).to(dtype)
        return values if self.rotation is None else self.rotation.right_inverse(values)

    def _found(self, values: Tensor) -> Tensor:
        """The scale of each token and head, or of all together, `[..., 1]`."""
        if values.numel() == 0:
            return values.new_ones(1)
        # Three dimensions: in four, compressed-tensors takes the scale of a head over all tokens together.
        seen = values.flatten(0, 1) if self.args.strategy == "token" else values
        scale, _ = compute_dynamic_scales_and_zp(seen, self.args, nn.Identity())
        return scale.view(*values.shape[:-1], 1) if self.args.strategy == "token" else scale


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rounded: Tensor, states: Tensor) -> Tensor:
        ctx.tokens = states.shape[-2]
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient[..., gradient.shape[-2] - ctx.tokens :, :]


_pass: Callable[[Tensor, Tensor], Tensor] = _StraightThrough.apply


def _with_gradient(rounded: Tensor, states: Tensor) -> Tensor:
    """`rounded`, whose last tokens are those of `states`, with a gradient to them as if they had not been rounded."""
    return _pass(rounded, states) if torch.is_grad_enabled() and states.requires_grad else rounded
