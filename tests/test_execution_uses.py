"""What people do with a model that stays compressed: copy, move, cast, compile, generate, train adapters on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from sparseautomodel.compressed_layers import CompressedLinear
from tests.test_compressed_layers import pickled
from tests.test_execution import BF16, IDS, Reference, compressed, load

__all__ = ["compressed"]  # a fixture

SCHEMES = ["W4A16", "W4_GROUP_16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16"]


@pytest.fixture(params=SCHEMES)
def folder(request: pytest.FixtureRequest, compressed: Callable[[str, str], Path]) -> Path:
    return compressed("llama", request.param)


@pytest.fixture
def model(folder: Path) -> Any:
    return load(folder, "auto")


def stored(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_bytes(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name].contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8))
        for name in one
    )


@torch.no_grad()
def test_copies_and_pickles(model: Any) -> None:
    wanted, before = model(IDS).logits, stored(model)
    for other in (copy.deepcopy(model), pickled(model)):
        assert torch.equal(other(IDS).logits, wanted) and same_bytes(stored(other), before)
        other.load_state_dict(before)
        assert torch.equal(other(IDS).logits, wanted)
    assert copy.deepcopy(model).to("meta").device.type == "meta" and torch.equal(model(IDS).logits, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@torch.no_grad()
def test_another_dtype(model: Any, dtype: torch.dtype) -> None:
    wanted = model(IDS).logits.float()
    layer = model.model.layers[0].mlp.down_proj
    weight = layer.weight
    model.to(dtype)
    found = model(IDS).logits
    error = (found.float() - wanted).norm() / wanted.norm()
    rounds = layer.quantization_scheme.input_activations is not None  # few bits, which flip at the edges of codes
    assert found.dtype == dtype and error < (0.15 if rounds else 0.05)
    assert layer.weight.dtype == layer.dtype == dtype
    torch.testing.assert_close(layer.weight.float(), weight.float(), rtol=1e-2, atol=1e-3)
    layer.half()
    assert layer(torch.randn(2, layer.in_features).half()).dtype == torch.float16


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
@torch.no_grad()
def test_a_layer_compiled(scheme: str, compressed: Callable[[str, str], Path]) -> None:
    torch._dynamo.reset()
    layer = load(compressed("llama", scheme), "auto").model.layers[0].mlp.down_proj
    states = torch.randn(3, layer.in_features, dtype=BF16)
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(states), layer(states), rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@torch.no_grad()
def test_compiled(model: Any, backend: str) -> None:
    torch._dynamo.reset()
    found, wanted = torch.compile(model, backend=backend)(IDS).logits, model(IDS).logits
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))


def test_generate_with_a_cache_and_batches(model: Any) -> None:
    """Rows of different lengths, and one after the other without a cache: in float32, where ties are rare."""
    model.to(torch.float32)
    asked = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(IDS)
    mask[1, :5] = 0
    both = model.generate(input_ids=IDS, attention_mask=mask, **asked)
    assert torch.equal(both[:1], model.generate(IDS[:1], attention_mask=mask[:1], **asked))
    assert torch.equal(both[1:, 5:], model.generate(IDS[1:, 5:], attention_mask=mask[1:, 5:], **asked))
    assert torch.equal(both, model.generate(input_ids=IDS, attention_mask=mask, use_cache=False, **asked))


def test_inference_mode_and_autocast(model: Any) -> None:
    with torch.no_grad():
        wanted = model(IDS).logits
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, wanted)
    model.to(torch.float32)
    layer = model.model.layers[1].self_attn.q_proj
    states = torch.randn(3, layer.in_features)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        assert layer(states).dtype == BF16
        torch.testing.assert_close(layer(states).float(), layer.to(BF16)(states.to(BF16)).float(), rtol=5e-2, atol=5e-2)


def test_gradient_through_a_layer(folder: Path, model: Any) -> None:
    layer = model.model.layers[0].mlp.up_proj
    weight = Reference(folder).weights["model.layers.0.mlp.up_proj"]
    for tokens in (0, 1, 5, 70):
        torch.manual_seed(tokens)
        states = torch.randn(tokens, layer.in_features, dtype=BF16, requires_grad=True)
        out = torch.randn(tokens, layer.out_features, dtype=BF16)
        layer(states).backward(out)
        torch.testing.assert_close(states.grad, out @ weight, rtol=2e-2, atol=2e-1)
    assert all(parameter.grad is None for parameter in layer.parameters())


@torch.no_grad()
def test_inputs_of_every_shape(model: Any) -> None:
    layer = model.model.layers[0].self_attn.k_proj
    rows = torch.randn(24, layer.in_features, dtype=BF16)
    wanted = torch.stack([layer(row) for row in rows])
    near = {"rtol": 2e-2, "atol": 2e-2 * float(wanted.abs().max())}
    assert layer(rows[0]).shape == (layer.out_features,)
    for shape in ((24,), (4, 6), (2, 3, 4)):
        states = rows.view(*shape, -1)
        torch.testing.assert_close(layer(states).flatten(0, -2), wanted, **near)
    strided = torch.stack([rows, rows], -1)[..., 0]
    turned = rows.t().contiguous().t()
    for states in (strided, turned):
        assert not states.is_contiguous()
        torch.testing.assert_close(layer(states), wanted, **near)
    for shape in ((0,), (0, 3), (2, 0)):
        assert layer(rows.new_empty(*shape, layer.in_features)).shape == (*shape, layer.out_features)


class Adapter(nn.Module):
    """LoRA in ten lines."""

    def __init__(self, base: CompressedLinear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.first = nn.Parameter(torch.randn(rank, base.in_features, dtype=base.dtype) * base.in_features**-0.5)
        self.second = nn.Parameter(torch.zeros(base.out_features, rank, dtype=base.dtype))

    def forward(self, states: Tensor) -> Tensor:
        return self.base(states) + F.linear(F.linear(states, self.first), self.second)


def losses_of(model: Any, steps: int = 12) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for _ in range(steps):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_adapters_train_on_a_frozen_base(model: Any, dtype: torch.dtype) -> None:
    model.to(dtype).requires_grad_(False)
    before = stored(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, CompressedLinear):
            model.set_submodule(name, Adapter(module))
    losses = losses_of(model)
    assert losses[-1] < 0.8 * losses[0], losses
    after = {name.replace(".base.", "."): one for name, one in stored(model).items() if "first" not in name}
    assert same_bytes({name: one for name, one in after.items() if "second" not in name}, before)


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A8"])
def test_lora_of_peft_trains(scheme: str, compressed: Callable[[str, str], Path], tmp_path: Path) -> None:
    model = load(compressed("llama", scheme), "auto")
    before = stored(model)
    peft = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        first = model(IDS).logits
    losses = losses_of(peft)
    assert losses[-1] < 0.9 * losses[0], losses
    after = {name.replace(".base_layer.", "."): one for name, one in stored(model).items() if "lora_" not in name}
    assert same_bytes(after, before)
    peft.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    with torch.no_grad(), peft.disable_adapter():
        assert torch.equal(peft(IDS).logits, first)


def test_the_trainer_takes_adapters_and_no_base_alone(compressed: Callable[[str, str], Path], tmp_path: Path) -> None:
    model = load(compressed("llama", "W4A16"), "auto")
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    arguments = TrainingArguments(
        tmp_path, max_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    with pytest.raises(ValueError, match="attach trainable adapters"):
        Trainer(model=model, args=arguments, train_dataset=rows)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert Trainer(model=peft, args=arguments, train_dataset=rows).train().global_step == 2
