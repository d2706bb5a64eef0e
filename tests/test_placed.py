from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

from sparseautomodel.placed import lengths_of, set_classes, take_back
from tests.conftest import SIZES


def test_classes_come_and_go() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    cls = type(model)
    set_classes(model, None)
    assert type(model) is cls
    set_classes(model, object())
    assert isinstance(model, cls) and type(model).__name__ == cls.__name__ and type(model) is not cls
    set_classes(model, None)
    assert type(model) is cls and copy.copy(type(model)) is cls


def test_a_cache_is_taken_back() -> None:
    cache, lengths = DynamicCache(), []
    for length in (3, 2):
        lengths = lengths_of({"cache": cache})
        for layer in range(2):
            cache.update(torch.ones(1, 1, length, 4), torch.ones(1, 1, length, 4), layer)
    cache.layers[1].keys = torch.ones(1, 1, 6, 4)  # memory ran out before the values were added
    assert take_back({"cache": cache}, lengths)
    assert [layer.keys.shape[-2] for layer in cache.layers] == [3, 3] == [x.values.shape[-2] for x in cache.layers]
    assert not take_back({"cache": StaticCache(config=LlamaConfig(**SIZES), max_cache_len=8)}, [])
    assert take_back({}, [])
