"""Pairs in real blocks, against the output of the block; what must not be paired; what is restored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig

from sparseautomodel.architecture import expert_merges
from sparseautomodel.quantizer import put_experts
from sparseautomodel.sets import find_blocks
from sparseautomodel.smoothing import Names, Pair, find_pairs, multiply_columns

ENCODER = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES = ENCODER | {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0}
SHORT = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
RANKS = {"q_lora_rank": 24, "kv_lora_rank": 16, "first_k_dense_replace": 2}
MLA = RANKS | {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "gemma": transformers.GemmaConfig(**SIZES, head_dim=16),
    "phi3": transformers.Phi3Config(**SIZES),
    "cohere": transformers.CohereConfig(**SIZES),
    "deepseek": transformers.DeepseekV3Config(**{**SIZES, **MLA}),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "gpt_neox": transformers.GPTNeoXConfig(**ENCODER, num_attention_heads=4, initializer_range=0.2),
    "bloom": transformers.BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.2),
    "falcon": transformers.FalconConfig(**SHORT, num_kv_heads=2, new_decoder_architecture=True, initializer_range=0.2),
    "gpt2": transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2),
    "opt": transformers.OPTConfig(**SHORT, ffn_dim=128, word_embed_proj_dim=64, init_std=0.2),
    "bert": transformers.BertConfig(**ENCODER, num_attention_heads=4, initializer_range=0.2),
}
TABLE = """
llama  self_attn.q_proj  input_layernorm  weight  64
llama  self_attn.o_proj  self_attn.v_proj  rows  32
llama  mlp.gate_proj  post_attention_layernorm  weight  64
llama  mlp.down_proj  mlp.up_proj  rows  128
phi3  self_attn.qkv_proj  input_layernorm  weight  64
phi3  self_attn.o_proj  self_attn.qkv_proj  rows  32
phi3  mlp.gate_up_proj  post_attention_layernorm  weight  64
phi3  mlp.down_proj  mlp.gate_up_proj  rows  128
cohere  self_attn.q_proj  input_layernorm  weight  64
cohere  self_attn.o_proj  self_attn.v_proj  rows  32
cohere  mlp.down_proj  mlp.up_proj  rows  128
deepseek  self_attn.q_a_proj  input_layernorm  weight  64
deepseek  self_attn.q_b_proj  self_attn.q_a_layernorm  weight  24
deepseek  self_attn.kv_b_proj  self_attn.kv_a_layernorm  weight  16
deepseek  self_attn.o_proj  self_attn.kv_b_proj  rows  64
deepseek  mlp.gate_proj  post_attention_layernorm  weight  64
deepseek  mlp.down_proj  mlp.up_proj  rows  128
mixtral  self_attn.q_proj  input_layernorm  weight  64
mixtral  self_attn.o_proj  self_attn.v_proj  rows  32
mixtral  mlp.experts.0.w1  -  -  -
mixtral  mlp.experts.1.w1  -  -  -
mixtral  mlp.experts.2.w1  -  -  -
mixtral  mlp.experts.3.w1  -  -  -
mixtral  mlp.experts.0.w2  mlp.experts.0.w3  rows  128
mixtral  mlp.experts.1.w2  mlp.experts.1.w3  rows  128
mixtral  mlp.experts.2.w2  mlp.experts.2.w3  rows  128
mixtral  mlp.experts.3.w2  mlp.experts.3.w3  rows  128
gpt_neox  attention.query_key_value  input_layernorm  weight  64
gpt_neox  attention.dense  attention.query_key_value  rows  64
gpt_neox  mlp.dense_h_to_4h  post_attention_layernorm  weight  64
gpt_neox  mlp.dense_4h_to_h  -  -  -
bloom  self_attention.query_key_value  input_layernorm  weight  64
bloom  self_attention.dense  self_attention.query_key_value  rows  64
bloom  mlp.dense_h_to_4h  post_attention_layernorm  weight  64
bloom  mlp.dense_4h_to_h  -  -  -
falcon  self_attention.query_key_value  ln_attn  weight  64
falcon  self_attention.dense  self_attention.query_key_value  rows  32
falcon  mlp.dense_h_to_4h  ln_mlp  weight  64
falcon  mlp.dense_4h_to_h  -  -  -
gpt2  attn.c_attn  ln_1  weight  64
gpt2  attn.c_proj  attn.c_attn  rows  64
gpt2  mlp.c_fc  ln_2  weight  64
gpt2  mlp.c_proj  -  -  -
opt  self_attn.q_proj  self_attn_layer_norm  weight  64
opt  self_attn.out_proj  self_attn.v_proj  rows  64
opt  fc1  final_layer_norm  weight  64
opt  fc2  fc1  rows  128
bert  attention.self.query  -  -  -
bert  attention.output.dense  attention.self.value  rows  64
bert  intermediate.dense  -  -  -
bert  output.dense  -  -  -
"""
"""Model, first layer of a set, producer, kind, how many rows of it make the input. Or no pair: the inputs of Mixtral's
experts are some tokens of a norm's output each, those of BERT are the residual too, and GELU stands before some."""
PAIRS: dict[str, dict[str, tuple[str, str, int] | None]] = {}
for line in TABLE.split("\n")[1:-1]:
    name, layer, producer, kind, count = line.split()
    PAIRS.setdefault(name, {})[layer] = None if count == "-" else (producer, kind, int(count))
PAIRS["gemma"] = {
    layer: pair and (pair[0], pair[1].replace("weight", "one_plus_weight"), pair[2])
    for layer, pair in PAIRS["llama"].items()
}


@dataclass
class Case:
    block: nn.Module
    run: Callable[[], Tensor]
    sets: list[Names]
    runs: int = 0

    def find(self, **keys: Any) -> dict[Names, Pair]:
        def counted() -> Tensor:
            self.runs += 1
            return self.run()

        return find_pairs(self.block, counted, self.sets, **keys)


def _case(block: nn.Module, run: Callable[[], Any]) -> Case:
    """A block with the sets of its layers that read one tensor."""

    @torch.no_grad()
    def forward() -> Tensor:
        output = run()
        return output if isinstance(output, Tensor) else output[0]

    inputs: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(_keeper(inputs, name))
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]
    forward()
    for hook in hooks:
        hook.remove()
    groups: dict[Any, list[str]] = {}
    for name, value in inputs.items():
        groups.setdefault((value.data_ptr(), value.shape, value.stride()), []).append(name)
    return Case(block, forward, [tuple(names) for names in groups.values()])


def _keeper(inputs: dict[str, Tensor], name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.setdefault(name, args[0])

    return keep


def _model_case(name: str, dtype: torch.dtype = torch.float32) -> Case:
    model = AutoModel.from_config(CONFIGS[name]).to(dtype).eval()
    for experts, merged in expert_merges(model).items():
        put_experts(model, experts, [], merged)
    for path, parameter in model.named_parameters():
        # Norms and biases that do something, and experts, which came without values.
        if parameter.ndim == 1:
            parameter.data += torch.randn_like(parameter) * 0.3
        elif ".experts." in path:
            parameter.data = torch.randn_like(parameter).to(dtype) * 0.2
    block = model.get_submodule(find_blocks(model, [path for path, _ in model.named_modules()])[1])
    model.config.use_cache = False
    seen: dict[str, Any] = {}
    hook = block.register_forward_pre_hook(lambda module, *given: seen.update(given=given), with_kwargs=True)
    with torch.no_grad():
        model(torch.randint(1, 64, (1, 24)))
    hook.remove()
    args, kwargs = seen["given"]
    return _case(block, lambda: block(*args, **kwargs))


def _smooth(case: Case, pairs: dict[Names, Pair], spread: float = 1.0) -> None:
    for names, pair in pairs.items():
        factors = pair.divide(case.block, (torch.randn(len(pair.rows)) * spread).exp())
        for name in names:
            multiply_columns(case.block.get_submodule(name), factors)


def _change(case: Case, before: Tensor) -> float:
    return float((case.run().double() - before.double()).norm() / before.double().norm())


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_real_blocks(name: str) -> None:
    case = _model_case(name)
    pairs = case.find()
    found = {names[0]: pairs.get(names) for names in case.sets}
    kinds = {
        first: None if pair is None else (pair.producer, pair.kind, len(pair.rows.unique()))
        for first, pair in found.items()
    }
    assert kinds == PAIRS[name]
    assert case.runs <= 13
    before = case.run()
    _smooth(case, pairs)
    assert _change(case, before) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma", "phi3", "gpt_neox"])
def test_pairs_are_the_same_in_bfloat16_and_change_no_more_than_its_rounding(name: str) -> None:
    case = _model_case(name, torch.bfloat16)
    pairs = case.find()
    assert {names[0]: (pair.producer, pair.kind) for names, pair in pairs.items()} == {
        first: pair[:2] for first, pair in PAIRS[name].items() if pair is not None
    }
    before = case.run()
    _smooth(case, pairs, 0.5)
    assert _change(case, before) < 0.02


@pytest.mark.parametrize("name", ["llama", "mixtral", "bert"])
def test_every_parameter_is_the_same_object_with_the_same_bits_afterwards(name: str) -> None:
    case = _model_case(name)
    before = {path: (value, value.detach().clone()) for path, value in case.block.named_parameters()}
    case.find()
    after = dict(case.block.named_parameters())
    assert after.keys() == before.keys()
    for path, (parameter, values) in before.items():
        assert after[path] is parameter and torch.equal(parameter, values)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in case.block.modules())


@pytest.mark.parametrize("at", range(1, 9))
def test_a_run_that_fails_leaves_all_as_it_was(at: int) -> None:
    case = _model_case("llama")
    before = {path: (value, value.detach().clone()) for path, value in case.block.named_parameters()}
    inner = case.run

    def failing() -> Tensor:
        if case.runs == at:
            case.block.get_submodule("mlp")(torch.ones(1, 1, 63))
        return inner()

    case.run = failing
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        case.find()
    for path, (parameter, values) in before.items():
        assert dict(case.block.named_parameters())[path] is parameter and torch.equal(parameter, values)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in case.block.modules())


def test_only_wanted_producers_are_tried() -> None:
    case, asked = _model_case("llama"), set()

    def wants(names: Names, producer: str, kind: str) -> bool:
        asked.add((names[0], producer, kind))
        return kind != "rows"

    assert {pair.kind for pair in case.find(wants=wants).values()} == {"weight"}
    assert case.runs <= 3
    assert ("mlp.down_proj", "mlp.up_proj", "rows") in asked


class OnePlus(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * 0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs / inputs.square().mean(-1, keepdim=True).sqrt() * (1 + self.weight)


class Router(nn.Module):
    """Reads the same tokens in another shape, and is no Linear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, width) * 0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.flatten(0, -2) @ self.weight.t()).softmax(-1)


class Block(nn.Module):
    """x + down(up(norm(x))), with a router on the norm's output if asked; `leak` of that output goes elsewhere."""

    def __init__(self, norm: nn.Module, routed: bool = False, leak: float = 0.0) -> None:
        super().__init__()
        self.norm, self.leak = norm, leak
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.router = Router(16) if routed else None

    def forward(self, inputs: Tensor) -> Tensor:
        states = self.norm(inputs)
        hidden = self.up(states)
        if self.router is not None:
            hidden = hidden * self.router(states).view(*states.shape[:-1], 4).amax(-1, keepdim=True)
        return inputs + self.down(hidden) + self.leak * states


def _small(block: nn.Module) -> Case:
    inputs = torch.randn(2, 12, 16)
    return _case(block.eval(), lambda: block(inputs))


def test_a_norm_that_multiplies_by_one_plus_its_weight() -> None:
    case = _small(Block(OnePlus(16)))
    pairs = case.find()
    assert [(pair.producer, pair.kind) for pair in pairs.values()] == [("norm", "one_plus_weight"), ("up", "rows")]
    before, weight = case.run(), case.block.norm.weight.detach().clone()
    factors = torch.rand(16) + 0.5
    pairs[("up",)].divide(case.block, factors)
    assert torch.allclose(case.block.norm.weight, (1 + weight) / factors - 1)
    multiply_columns(case.block.up, factors)
    assert _change(case, before) < 1e-6


def test_what_else_reads_the_input_is_multiplied_too() -> None:
    case = _small(Block(nn.LayerNorm(16), routed=True))
    pair = case.find()[("up",)]
    assert (pair.producer, pair.companions) == ("norm", ("router",))
    before = case.run()
    _smooth(case, {("up",): pair})
    assert _change(case, before) < 1e-6


@pytest.mark.parametrize("leak", [1.0, 0.01])
def test_an_output_that_goes_elsewhere_too_is_no_pair(leak: float) -> None:
    assert ("up",) not in _small(Block(nn.LayerNorm(16), leak=leak)).find()
    assert ("up",) in _small(Block(nn.LayerNorm(16))).find()


def test_sets_that_share_their_input_have_no_pair() -> None:
    case = _small(Block(nn.LayerNorm(16), routed=True))
    case.sets = [("up",), ("router",), ("down",)]
    assert set(case.find()) == {("down",)}


class Mixed(nn.Module):
    """down reads channels of up in another order, some of them never above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)
        self.order = torch.randperm(48)
        self.up.bias.data[5] = -1e4

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down(self.up(inputs).relu()[..., self.order])


def test_channels_in_another_order_and_channels_that_are_silent() -> None:
    case = _small(Mixed())
    pair = case.find()[("down",)]
    silent = int((case.block.order == 5).nonzero())
    assert pair.rows[silent] == -1
    assert torch.equal(pair.rows[pair.rows >= 0], case.block.order[case.block.order != 5])
    factors = torch.rand(48) + 0.5
    allowed = pair.allowed(factors)
    assert allowed[silent] == 1
    assert torch.equal(allowed[pair.rows >= 0], factors[pair.rows >= 0])
    before = case.run()
    assert torch.allclose(pair.divide(case.block, factors), allowed)
    multiply_columns(case.block.down, allowed)
    assert _change(case, before) < 1e-6


def test_a_block_whose_output_is_not_finite_has_no_pairs() -> None:
    block = Block(nn.LayerNorm(16))
    block.down.weight.data[0, 0] = torch.nan
    assert _small(block).find() == {}


def test_layers_that_the_batch_does_not_reach_have_no_pair() -> None:
    case = _small(Block(nn.LayerNorm(16)))
    case.block.spare = nn.Linear(16, 16)
    case.sets.append(("spare",))
    assert ("spare",) not in case.find()


def test_heads_that_read_one_row_get_its_geometric_mean() -> None:
    rows = torch.tensor([0, 1, 0, 1, 2, -1])
    pair = Pair("v_proj", "rows", rows, 4)
    factors = torch.tensor([1.0, 8.0, 4.0, 2.0, 3.0, 5.0])
    assert torch.allclose(pair.allowed(factors), torch.tensor([2.0, 4.0, 2.0, 4.0, 3.0, 1.0]))
    assert torch.allclose(pair.producer_factors(factors), torch.tensor([2.0, 4.0, 3.0, 1.0]))
    assert torch.allclose(pair.allowed(pair.allowed(factors)), pair.allowed(factors))


def test_what_float16_cannot_hold_keeps_its_size() -> None:
    block = Block(nn.LayerNorm(16)).half()
    block.norm.weight.data[3] = 100
    pair, before = Pair("norm", "weight", torch.arange(16), 16), block.norm.weight.detach().clone()
    factors = torch.full((16,), 2.0)
    factors[3] = 1e-4
    factors = pair.divide(block, factors)
    assert factors[3] == 1 and block.norm.weight[3] == before[3]
    assert block.norm.weight.isfinite().all()
    assert torch.equal(factors * block.norm.weight.float(), before.float())


def test_factors_are_what_the_rounded_norm_really_divides_by() -> None:
    block = Block(OnePlus(16)).bfloat16()
    pair, before = Pair("norm", "one_plus_weight", torch.arange(16), 16), block.norm.weight.detach().float()
    wanted = torch.rand(16) * 4 + 0.2
    factors = pair.divide(block, wanted)
    assert torch.allclose(factors, wanted, rtol=0.02)
    assert not torch.allclose(factors, wanted, rtol=1e-5)
    assert torch.allclose(factors * (1 + block.norm.weight.float()), 1 + before)
