"""A range of a model's blocks, called as the model's own stack of blocks is, and several in a row as one model."""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.utils.generic import ModelOutput, TransformersKwargs

from sparseautomodel.forwards import first_tensor
from sparseautomodel.hooks import Hook
from sparseautomodel.report import LoadReport
from sparseautomodel.stack import Stack


@dataclass(frozen=True)
class Part:
    """What was loaded of a model: `model` has the blocks and edges of a range, and nothing else."""

    model: PreTrainedModel
    blocks: range
    parameters: Mapping[str, str]
    """Full names of the parameters there are -> the unit that each belongs to."""
    report: LoadReport


class _Passed(Exception):
    """The last block of the stage has run: what its model does after the blocks is another stage's."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Stage:
    """Some blocks of a model, in a row. `load_blocks` makes them.

    `stage(hidden_states)` runs the blocks. The first stage of a model takes `input_ids`, the last gives logits (the
    last hidden state where the model has no head).
    """

    def __init__(self, part: Part, stack: Stack, config: PreTrainedConfig, load: Callable[[range, Part | None], Part]):
        self._stack, self._full_config, self._load = stack, config, load
        self._given = threading.local()
        self._hooks: list[Any] = []
        self._take(part)

    @property
    def blocks(self) -> range:
        """The blocks, by their numbers in the whole model."""
        return self._part.blocks

    @property
    def num_blocks(self) -> int:
        """Of the whole model."""
        return self._stack.count

    @property
    def is_first(self) -> bool:
        return self.blocks.start == 0

    @property
    def is_last(self) -> bool:
        return self.blocks.stop == self._stack.count

    @property
    def model(self) -> PreTrainedModel:
        """The model class's own object, with these blocks alone, numbered from 0 on."""
        return self._part.model

    @property
    def config(self) -> PreTrainedConfig:
        """That of a model of these blocks alone: `DynamicCache(config=stage.config)` is a cache for them."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        return next(value.device for value in (*self.model.parameters(), *self.model.buffers()))

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters and buffers, those that are tied counted once."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())

    @property
    def load_report(self) -> LoadReport:
        """What the last load or move read."""
        return self._part.report

    def __call__(
        self,
        hidden_states: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """The output of the blocks.

        Args:
            hidden_states: `[batch, positions, hidden]`, the output of the stage before; of the first stage
                `input_ids`, `[batch, positions]`, or embeddings.
            position_ids: `[batch, positions]`; None counts on from what the cache holds.
            past_key_values: a cache for these blocks, `DynamicCache(config=stage.config)`, or one for the whole model,
                of which the stage uses its own part: all stages can be given the same. It is extended in place.
            kwargs: what the model's forward takes besides, `attention_mask` above all.

        Returns:
            Hidden states `[batch, positions, hidden]`, of the last stage logits `[batch, positions, vocabulary]`.

        >>> cache = DynamicCache(config=stage.config)  # doctest: +SKIP
        >>> hidden = stage(hidden, past_key_values=cache)  # doctest: +SKIP
        """
        self._check_names(kwargs)
        output = self.run(hidden_states, position_ids, past_key_values, **kwargs)
        if isinstance(output, Tensor):
            return output
        logits: Tensor | None = getattr(output, "logits", None)
        return output[0] if logits is None else logits

    def run(
        self, hidden_states: Tensor, position_ids: Tensor | None = None, past_key_values: Any = None, **kwargs: Any
    ) -> Tensor | ModelOutput:
        """As a call, but the last stage returns all that its model returns."""
        self._check_input(hidden_states)
        ids = not hidden_states.is_floating_point()
        kwargs["input_ids" if ids else "inputs_embeds"] = hidden_states
        takes = inspect.signature(self.model.forward).parameters
        if position_ids is not None:
            kwargs["position_ids"] = position_ids
        if past_key_values is not None:
            kwargs["cache"] = self._own_part(past_key_values)
        if "use_cache" in takes:
            kwargs["use_cache"] = past_key_values is not None
        self._given.hidden = hidden_states
        try:
            return self.model(**kwargs)
        except _Passed as passed:
            return passed.hidden
        except RuntimeError as error:
            own = self.model.get_submodule(self._stack.name).parameters()
            dtype = next((one.dtype for one in own if one.is_floating_point() and one.dtype.itemsize > 1), None)
            if ids or dtype in (None, hidden_states.dtype):
                raise
            raise ValueError(
                f"{self._label} is in {dtype}, and was given hidden_states of {hidden_states.dtype}. Write "
                f"stage(hidden_states.to({dtype})), or load_blocks(..., dtype={hidden_states.dtype})"
            ) from error
        finally:
            self._given.hidden = None

    def move(self, blocks: range) -> None:
        """Become the stage of other blocks: reads those that are not here yet, lets go of those no longer in it.

        A cache for the whole model stays right for the blocks that remain.

        Raises:
            ValueError: there are no such blocks. After any error the stage is as it was.
        """
        self._stack.check(blocks)
        if blocks != self.blocks:
            part = self._load(blocks, self._part)
            self._take(part)

    def __repr__(self) -> str:
        name, blocks = type(self.model).__name__, self.blocks
        return f"Stage({name}, blocks {blocks.start} to {blocks.stop - 1} of {self._stack.count}, {self.nbytes} bytes)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Stage:
        """A stage with weights of its own, that loads from the same place."""
        part = replace(self._part, model=copy.deepcopy(self.model, memo))
        return Stage(part, self._stack, self._full_config, self._load)

    @property
    def _label(self) -> str:
        return f"the stage of blocks {self.blocks.start} to {self.blocks.stop - 1}"

    def _check_input(self, hidden_states: Any) -> None:
        if not isinstance(hidden_states, Tensor):
            raise ValueError(f"{self._label} was given a {type(hidden_states).__name__}: it takes a tensor")
        shape = tuple(hidden_states.shape)
        if not hidden_states.is_floating_point():
            if not self.is_first:
                raise ValueError(
                    f"{self._label} takes hidden states, and was given {hidden_states.dtype}: input_ids go to the "
                    "stage of block 0"
                )
            if len(shape) != 2:
                raise ValueError(f"{self._label} takes input_ids [batch, positions], and was given {list(shape)}")
            return
        width = self.config.get_text_config().hidden_size
        if self.is_first:  # some models have embeddings of another width than their blocks
            width = getattr(self.model.get_input_embeddings(), "embedding_dim", width)
        if len(shape) != 3 or shape[-1] != width:
            raise ValueError(
                f"{self._label} takes hidden_states [batch, positions, {width}], and was given {list(shape)}"
            )

    def _check_names(self, kwargs: Mapping[str, Any]) -> None:
        """Models of transformers ignore what they do not know."""
        known = {"return_dict", *TransformersKwargs.__annotations__, *FlashAttentionKwargs.__annotations__}
        for module in (self.model, self.model.base_model):
            named = inspect.signature(module.forward).parameters.values()
            known |= {one.name for one in named if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                text = f"Write {near[0]}=..." if near else f"Those there are: {', '.join(sorted(known))}"
                raise ValueError(f"{self._label} knows no argument {name!r}. {text}")

    def _take(self, part: Part) -> None:
        for hook in self._hooks:
            hook.remove()
        self._part = part
        own: Any = part.model.get_submodule(self._stack.name)
        self._hooks = []
        if not self.is_first:
            self._hooks.append(own[0].register_forward_pre_hook(Hook(self._enter), with_kwargs=True))
        if not self.is_last:
            self._hooks.append(own[-1].register_forward_hook(Hook(self._leave)))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What models do to embeddings before the first block has been done in the first stage."""
        hidden = getattr(self._given, "hidden", None)
        if hidden is None:  # the block is called by itself
            return None
        return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if getattr(self._given, "hidden", None) is not None:
            raise _Passed(first_tensor(output))

    def _own_part(self, cache: Any) -> Any:
        """The layers of `cache` that are these blocks': it may be for them alone, or for the whole model."""
        layers = getattr(cache, "layers", None)
        if layers is None or (self.is_first and self.is_last):
            return cache
        if not layers and cache.layer_class_to_replicate is not None:
            layers += [cache.layer_class_to_replicate() for _ in range(self._stack.count)]
        if len(layers) == self._stack.count:
            cache = copy.copy(cache)
            cache.layers = layers[self.blocks.start : self.blocks.stop]
        elif len(layers) != len(self.blocks):
            raise ValueError(
                f"past_key_values has {len(layers)} layers: it must have {len(self.blocks)}, those of this stage, or "
                f"{self._stack.count}, those of the whole model. Write DynamicCache(config=stage.config)"
            )
        else:
            owner = getattr(cache, "_blocks", self.blocks)
            if owner != self.blocks and cache.get_seq_length():
                raise ValueError(
                    f"past_key_values holds keys and values of {owner}, and these are {self.blocks}: each stage needs "
                    "a cache of its own, or all of them one for the whole model"
                )
            cache._blocks = self.blocks
        return cache


def chain(stages: Sequence[Stage]) -> PreTrainedModel:
    """Stages of one model, one after another, as that model: called like it, and driven by its own `generate`.

    The stages can be on different devices. The result shares its modules with the first of them.

    Raises:
        ValueError: the stages are not all blocks of the model, in order.

    >>> model = chain([load_blocks(path, range(0, 15)), load_blocks(path, range(15, 30))])  # doctest: +SKIP
    >>> model.generate(ids, max_new_tokens=8)  # doctest: +SKIP
    """
    stages = tuple(stages) if isinstance(stages, Iterable) else (stages,)
    _check_whole(stages)
    first = stages[0]
    model_class: Any = type(first.model)

    @functools.wraps(model_class.forward)
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        _check_whole(stages)  # a stage may have been moved since
        cache = kwargs.pop("past_key_values", None) if cache is None else cache
        hidden: Any = input_ids if input_ids is not None else inputs_embeds
        for stage in stages:
            device = stage.device
            masks = {key: _at(value, device) for key, value in kwargs.items()}
            masks |= {} if attention_mask is None else {"attention_mask": _at(attention_mask, device)}
            masks |= {} if labels is None or not stage.is_last else {"labels": _at(labels, device)}
            hidden = stage.run(_at(hidden, device), _at(position_ids, device), cache, **masks)
        if cache is not None:
            hidden["cache"] = cache
        return hidden

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "a chain has no tensors of its own to save: its stages have them, each those of its blocks. To write the "
            "model, compressed or not: oneshot(path, recipe, output=folder)"
        )

    model: Any = copy.copy(first.model)
    made = {"forward": forward, "__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    made |= {"save_pretrained": refuse, "state_dict": refuse}
    model.__class__ = type(model_class.__name__, (model_class,), made)
    model.config = copy.deepcopy(first._full_config)
    model._chained = stages
    return model


def _check_whole(stages: Sequence[Stage]) -> None:
    others = [type(one).__name__ for one in stages if not isinstance(one, Stage)]
    if others:
        raise ValueError(
            f"chain takes stages of load_blocks, and was given {', '.join(others)}. Write "
            "chain([load_blocks(path, range(0, 15)), load_blocks(path, range(15, 30))])"
        )
    ends = [0, *(stage.blocks.stop for stage in stages)]
    if not stages or ends[:-1] != [stage.blocks.start for stage in stages] or not stages[-1].is_last:
        given = ", ".join(f"{stage.blocks.start}:{stage.blocks.stop}" for stage in stages)
        total = f"all {stages[0].num_blocks}" if stages else "all"
        raise ValueError(f"a chain needs {total} blocks in order, and has the blocks {given or 'of no stage'}")


def _at(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
