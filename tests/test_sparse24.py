"""2:4 sparse layers: what is replaced, and that it saves, moves and multiplies as before. Without a GPU, torch's sparse
tensor is stood in for by a dense one."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from sparseautomodel import pairs, sparse24
from sparseautomodel.masks import prune_mask
from sparseautomodel.sparse24 import PairsLinear, TensorCoreLinear, run_sparse
from tests.conftest import SIZES

NEEDS_C = pytest.mark.skipif(pairs.why_not() is not None, reason=str(pairs.why_not()))


def prune(layer: nn.Module) -> None:
    with torch.no_grad():
        layer.weight.mul_(prune_mask(layer.weight, None, (2, 4)))


def model() -> nn.Module:
    layers = nn.ModuleDict({"sparse": nn.Linear(64, 32), "dense": nn.Linear(64, 32), "odd": nn.Linear(48, 32)})
    prune(layers["sparse"])
    return layers.to(torch.bfloat16)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """As on a GPU that has sparse tensor cores. Lists the weights that were made sparse."""
    made: list[torch.Tensor] = []
    monkeypatch.setattr(sparse24, "_kind", lambda device: TensorCoreLinear)
    monkeypatch.setattr(sparse24, "to_sparse_semi_structured", lambda weight: (made.append(weight), weight.clone())[1])
    return made


def test_only_sparse_layers_are_replaced(anywhere: list[torch.Tensor]) -> None:
    layers = model()
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    values = torch.randn(3, 64, dtype=torch.bfloat16)
    wanted = layers["sparse"](values)
    assert run_sparse(layers) == {
        "sparse": "",
        "dense": "has more than two weights in four that are not zero",
        "odd": "needs multiples of 32 x 64, the weight has 32 x 48",
    }
    assert type(layers["sparse"]) is TensorCoreLinear and type(layers["dense"]) is nn.Linear and len(anywhere) == 1
    assert torch.equal(layers["sparse"](values), wanted)
    assert not layers["sparse"].weight.requires_grad
    after = layers.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


def test_moved_where_it_cannot_run_it_is_dense_again(anywhere: list[torch.Tensor]) -> None:
    layers = model()
    run_sparse(layers)
    layers.to(torch.float16)
    assert type(layers["sparse"]) is TensorCoreLinear and len(anywhere) == 2
    layers.to(torch.float32)
    assert type(layers["sparse"]) is nn.Linear and layers["sparse"].weight.dtype == torch.float32


def test_other_weights_can_be_loaded(anywhere: list[torch.Tensor]) -> None:
    layers, others = model(), model()
    run_sparse(layers)
    layers.load_state_dict(others.state_dict())
    assert type(layers["sparse"]) is TensorCoreLinear
    assert torch.equal(layers["sparse"].weight, others["sparse"].weight)


@pytest.mark.parametrize(
    ("device", "capability", "hip", "wanted"),
    [
        ("mps", None, None, "needs a CPU or an NVIDIA GPU, the weight is on mps"),
        ("meta", None, None, "needs a CPU or an NVIDIA GPU, the weight is on meta"),
        ("cuda", (9, 4), "6.3", "needs a CPU or an NVIDIA GPU, the weight is on ROCm"),
        ("cuda", (7, 5), None, "needs compute capability 8.0, this GPU has 7.5"),
        ("cuda", (8, 0), None, TensorCoreLinear),
    ],
)
def test_devices(
    device: str, capability: tuple[int, int] | None, hip: str | None, wanted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert sparse24._kind(torch.device(device)) == wanted


def test_cpus_without_such_products_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "why_not", lambda: "no compiler: gcc is not there")
    assert set(run_sparse(model()).values()) == {
        "has no such products on this CPU: no compiler: gcc is not there",
    }


@NEEDS_C
def test_on_a_cpu_it_is_the_same_layer_in_9_of_16_bytes() -> None:
    layers = model()
    values = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    wanted = layers["sparse"](values)
    assert run_sparse(layers)["sparse"] == ""
    sparse = layers["sparse"]
    assert type(sparse) is PairsLinear and sum(one.nbytes for one in sparse.buffers()) * 16 == 64 * 32 * 2 * 9
    torch.testing.assert_close(sparse(values), wanted)
    after = layers.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    for again in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
        assert type(again) is PairsLinear and torch.equal(again(values), sparse(values))
    others = model()
    layers.load_state_dict(others.state_dict())
    assert type(sparse) is PairsLinear and torch.equal(sparse.weight, others["sparse"].weight)
    layers.load_state_dict({name: torch.ones_like(value) for name, value in others.state_dict().items()})
    assert type(sparse) is nn.Linear and (sparse.weight == 1).all() and not sparse._buffers


@NEEDS_C
def test_on_a_cpu_what_is_written_to_its_weight_is_refused_and_not_lost() -> None:
    layers = model()
    run_sparse(layers)
    with pytest.raises(ValueError, match="before run_sparse"), torch.no_grad():
        layers["sparse"].weight.add_(1)
    with pytest.raises(ValueError, match="would be lost"):
        layers["sparse"].weight.data += 1
    with torch.device("meta"):
        assert not layers["sparse"].weight.is_meta


@NEEDS_C
def test_on_a_cpu_moved_and_cast_and_named_as_before() -> None:
    layers = model()
    names = [name for name, _ in layers["sparse"].named_parameters()]
    run_sparse(layers)
    layers.to("meta")
    assert type(layers["sparse"]) is nn.Linear and layers["sparse"].weight.is_meta
    layers = model()
    run_sparse(layers)
    dense = layers["sparse"].weight
    layers.float()
    assert type(layers["sparse"]) is nn.Linear and torch.equal(layers["sparse"].weight, dense.float())
    assert [name for name, _ in layers["sparse"].named_parameters()] == names
    layers.bfloat16()
    assert run_sparse(layers)["sparse"] == "" and torch.equal(layers["sparse"].weight, dense)


@NEEDS_C
def test_on_a_cpu_gradients_reach_inputs_and_biases() -> None:
    layers = model()
    values = torch.randn(2, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    gradients = torch.autograd.grad(layers["sparse"](values).float().square().sum(), [values, layers["sparse"].bias])
    run_sparse(layers)
    found = torch.autograd.grad(layers["sparse"](values).float().square().sum(), [values, layers["sparse"].bias])
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


@NEEDS_C
def test_on_a_cpu_under_autocast_and_in_float32_it_is_the_dense_layer() -> None:
    layers = model()
    dense = copy.deepcopy(layers["sparse"])
    run_sparse(layers)
    with torch.autocast("cpu", torch.bfloat16):
        values = torch.randn(3, 64)
        assert torch.equal(layers["sparse"](values), dense(values))
    with pytest.raises(RuntimeError, match="same dtype"):
        layers["sparse"](torch.randn(3, 64))


@NEEDS_C
@pytest.mark.parametrize("rows", [1, 16, 33])
@pytest.mark.parametrize("columns", [4, 6, 48, 70])
def test_on_a_cpu_any_width_will_do(rows: int, columns: int) -> None:
    layer = nn.Linear(columns, rows, bias=False).bfloat16()
    with torch.no_grad():
        layer.weight.view(-1)[:] = torch.randn(rows * columns)
        layer.weight[:, 1::2] = 0
    values = torch.randn(5, columns, dtype=torch.bfloat16)
    holder = nn.ModuleDict({"layer": layer})
    wanted = layer(values)
    assert run_sparse(holder) == {"layer": ""}
    torch.testing.assert_close(holder["layer"](values), wanted)


@NEEDS_C
def test_a_model_on_a_cpu_generates_the_same(tmp_path: Path) -> None:
    torch.manual_seed(1)
    llama = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.bfloat16)
    for name, module in llama.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            prune(module)
    inputs = torch.arange(1, 20)[None]
    wanted = llama.generate(inputs, max_new_tokens=8, do_sample=False)
    logits = llama(inputs).logits
    reasons = run_sparse(llama)
    assert [name for name, reason in reasons.items() if reason] == ["lm_head"]
    torch.testing.assert_close(llama(inputs).logits, logits, rtol=0.05, atol=0.05)
    assert llama.generate(inputs, max_new_tokens=8, do_sample=False).shape == wanted.shape
    compiled = torch.compile(llama.model.layers[0].mlp, fullgraph=True)
    hidden = torch.randn(1, 3, llama.config.hidden_size, dtype=torch.bfloat16)
    torch.testing.assert_close(compiled(hidden), llama.model.layers[0].mlp(hidden), rtol=0.05, atol=5e-3)
    llama.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    torch.testing.assert_close(again(inputs).logits, logits)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs sparse tensor cores"
)
def test_on_a_gpu() -> None:
    layers = model().cuda()
    values = torch.randn(5, 64, dtype=torch.bfloat16, device="cuda")
    wanted, before = layers["sparse"](values), layers["sparse"].weight.clone()
    assert run_sparse(layers)["sparse"] == ""
    torch.testing.assert_close(layers["sparse"](values), wanted)
    assert torch.equal(layers.state_dict()["sparse.weight"], before)
    assert not isinstance(layers.cpu()["sparse"], TensorCoreLinear)
