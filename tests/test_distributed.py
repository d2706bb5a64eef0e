"""Models shared by gloo processes: each rank holds the slice of what one process loads, and reads no more."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from sparseautomodel import SparseAutoModelForCausalLM, SparseAutoModelForSequenceClassification, oneshot
from sparseautomodel.checkpoint import Reads
from sparseautomodel.distributed import (
    DistributedError,
    cut_problem,
    distribute,
    initialize_missing,
)
from sparseautomodel.formats import compressed_tensors as storage
from sparseautomodel.random_values import drawing
from sparseautomodel.save import consolidate
from sparseautomodel.writes import local
from tests.conftest import SIZES
from tests.ranks import in_ranks

Mesh = tuple[int, int]
"""tp_size and fsdp_size."""
CONFIG = LlamaConfig(
    **SIZES | {"num_key_value_heads": 4}, tie_word_embeddings=False, attention_bias=True, mlp_bias=True
)


def group_recipe(**weights: Any) -> dict[str, Any]:
    given = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16} | weights
    return {"QuantizationModifier": {"config_groups": {"group_0": {"targets": ["Linear"], "weights": given}}}}


RECIPES: dict[str, Any] = {
    "dense": None,
    "w4a16": group_recipe(),
    "w4a16 asymmetric": group_recipe(symmetric=False),
    "int3 channel": group_recipe(num_bits=3, strategy="channel", group_size=None),
    "int8 channel asymmetric": group_recipe(num_bits=8, strategy="channel", group_size=None, symmetric=False),
    "fp8 block": group_recipe(num_bits=8, type="float", strategy="block", group_size=None, block_structure=[16, 16]),
    "int8 tensor": group_recipe(num_bits=8, strategy="tensor", group_size=None),
    "2of4": {"MagnitudePruningModifier": {"mask_structure": "2:4"}},
    "half": {"MagnitudePruningModifier": {"sparsity": 0.5}},
    "2of4 w4a16": {"MagnitudePruningModifier": {"mask_structure": "2:4"}, **group_recipe()},
    "nvfp4": {"QuantizationModifier": {"scheme": "NVFP4A16"}},
}
SPLIT = ("dense", "w4a16", "2of4", "2of4 w4a16", "fp8 block")
"""Recipes with which a rank needs nothing of the source but its own rows and columns."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many key heads as query heads, so that four ranks can share them."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    for value in model.parameters():
        if value.ndim == 1:
            value.data.add_(torch.randn_like(value), alpha=0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def w4a16(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("w4a16") / "model"
    oneshot(str(llama), group_recipe(), output=str(folder))
    return folder


FAST: list[tuple[int, Mesh, list[str]]] = [
    (2, (2, 1), ["dense", "w4a16", "w4a16 asymmetric", "fp8 block", "2of4 w4a16", "half"]),
    (2, (1, 2), ["dense", "w4a16", "int3 channel", "2of4", "nvfp4"]),
    (4, (2, 2), ["w4a16", "int8 channel asymmetric"]),
]
FULL = [(tp * fsdp, (tp, fsdp), list(RECIPES)) for tp, fsdp in ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2))]


@pytest.mark.parametrize(("world", "mesh", "names"), FAST)
def test_ranks_hold_the_slices_of_one_process(llama: Path, world: int, mesh: Mesh, names: list[str]) -> None:
    for rank, problems in enumerate(in_ranks(world, _compare, llama, mesh, names)):
        assert not problems, f"rank {rank}: {problems}"


@pytest.mark.slow
@pytest.mark.parametrize(("world", "mesh", "names"), FULL)
def test_every_recipe_on_every_mesh(llama: Path, world: int, mesh: Mesh, names: list[str]) -> None:
    names = [name for name in names if not (mesh[0] == 4 and name == "int3 channel")]  # 16 columns are no whole words
    for rank, problems in enumerate(in_ranks(world, _compare, llama, mesh, names)):
        assert not problems, f"rank {rank}: {problems}"


@pytest.mark.parametrize(("world", "mesh"), [(2, (2, 1)), (2, (1, 2))])
def test_a_compressed_checkpoint_is_shared_as_it_is_stored(w4a16: Path, world: int, mesh: Mesh) -> None:
    for rank, problems in enumerate(in_ranks(world, _compare, w4a16, mesh, ["dense"])):
        assert not problems, f"rank {rank}: {problems}"


@pytest.mark.slow
@pytest.mark.parametrize(("world", "mesh"), [(1, (1, 1)), (4, (4, 1)), (4, (1, 4)), (4, (2, 2))])
def test_a_compressed_checkpoint_on_other_meshes(w4a16: Path, world: int, mesh: Mesh) -> None:
    for rank, problems in enumerate(in_ranks(world, _compare, w4a16, mesh, ["dense"])):
        assert not problems, f"rank {rank}: {problems}"


@pytest.mark.parametrize(("world", "mesh"), [(2, (2, 1)), (2, (1, 2))])
@pytest.mark.parametrize("model", ["tied_llama", "tiny_mixtral", "tiny_qwen3_moe"])
def test_ties_and_experts(request: pytest.FixtureRequest, model: str, world: int, mesh: Mesh) -> None:
    source = request.getfixturevalue(model)
    for rank, problems in enumerate(in_ranks(world, _compare, source, mesh, ["dense", "w4a16", "2of4"], EXACT)):
        assert not problems, f"rank {rank}: {problems}"


EXACT = torch.float32
"""A router chooses other experts for the smallest difference."""


def _compare(rank: int, source: Path, mesh: Mesh, names: list[str], dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """What differs between a shared model and one in one process, and what was read that need not be."""
    problems = []
    for name in names:
        given = {"recipe": RECIPES[name], "dtype": dtype, "execution": "compressed"}
        shared = SparseAutoModelForCausalLM.from_pretrained(source, distributed_config=_config(mesh), **given)
        single = SparseAutoModelForCausalLM.from_pretrained(source, **given)
        problems += [f"{name}: {text}" for text in _differences(shared, single)]
        ids = torch.arange(24).view(2, 12)
        with torch.no_grad():
            found, wanted = shared(ids).logits, single(ids).logits
        difference = float((found - wanted).abs().max() / wanted.abs().max())
        if difference > (1e-5 if dtype == EXACT else 0.02):
            problems.append(f"{name}: logits differ by {difference:.6f}")
        reads = shared.load_report.reads
        problems += [f"{name}: {one} was read {times} times" for one, (times, _) in reads.items() if times > 1]
        if name in SPLIT:
            own = {
                one: math.prod(local(value).shape) / math.prod(value.shape)
                for one, value in shared.named_parameters()
                if one in reads or f"{one.rpartition('.')[0]}.weight" in reads
            }
            for one, (times, _) in reads.items():
                stem = one.removesuffix(".weight")
                share = own.get(one, own.get(f"{stem}.weight_packed"))
                if share is not None and times > share + 0.001:
                    problems.append(f"{name}: {one} was read {times} times for a share of {share}")
    return problems


def _differences(shared: nn.Module, single: nn.Module) -> list[str]:
    problems = []
    one_by_one = dict(single.named_parameters())
    if set(one_by_one) != {name for name, _ in shared.named_parameters()}:
        problems.append("other parameters")
    for name, value in shared.named_parameters():
        found, wanted = _whole(value), one_by_one[name]
        if found.dtype != wanted.dtype or not torch.equal(_bits(found), _bits(wanted)):
            problems.append(f"{name} is not that of one process")
    buffers = zip(shared.named_buffers(), single.named_buffers(), strict=True)
    problems += [name for (name, value), (_, wanted) in buffers if not torch.equal(_whole(value), wanted)]
    if len(list(single.parameters())) and not any(isinstance(value, DTensor) for value in shared.parameters()):
        problems += [] if getattr(shared, "_mesh_manager", None) is None else ["nothing is shared"]
    return problems


def _config(mesh: Mesh) -> DistributedConfig:
    return DistributedConfig(tp_size=mesh[0], fsdp_size=mesh[1])


def _whole(value: Tensor) -> Tensor:
    value = value.detach()
    if not isinstance(value, DTensor):
        return value
    if value.dtype == torch.float8_e4m3fn:  # which gloo does not send
        bits = value.to_local().view(torch.uint8)
        whole = DTensor.from_local(
            bits, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
        return whole.full_tensor().view(value.dtype)
    return value.full_tensor()


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8) if value.ndim else value


MESHES: list[tuple[int, Mesh]] = [(2, (2, 1)), (2, (1, 2)), (4, (2, 2))]


@pytest.mark.parametrize(("world", "mesh"), MESHES)
def test_initial_values_from_scratch_do_not_depend_on_the_mesh(world: int, mesh: Mesh) -> None:
    assert in_ranks(world, _from_scratch, mesh) == [[]] * world


def _scratch(mesh: Mesh) -> LlamaForCausalLM:
    config = LlamaConfig(**SIZES | {"num_key_value_heads": 4, "pad_token_id": 3}, tie_word_embeddings=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    if mesh != (1, 1):
        distribute(model, _config(mesh))
    model.to_empty(device="cpu")
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    with drawing(dict(model.named_parameters()), 7):
        model.initialize_weights()
    return model


def _from_scratch(rank: int, mesh: Mesh) -> list[str]:
    torch.manual_seed(rank)
    return _differences(_scratch(mesh), _scratch((1, 1)))


@pytest.mark.parametrize(("world", "mesh"), [(2, (2, 1)), (2, (1, 2))])
def test_a_new_head_has_the_values_that_one_process_gives_it(llama: Path, world: int, mesh: Mesh) -> None:
    results = in_ranks(world, _new_head, llama, mesh)
    assert [problems for problems, _ in results] == [[]] * world


def _new_head(rank: int, source: Path, mesh: Mesh) -> tuple[list[str], list[str]]:
    """The seed is the first rank's: the others have another."""
    heads = []
    for config in (_config(mesh), None):
        torch.manual_seed(5 if rank == 0 or config is None else 11)
        model = SparseAutoModelForSequenceClassification.from_pretrained(
            source, num_labels=3, **({"distributed_config": config} if config else {})
        )
        heads.append(model)
    if config is None and rank:
        torch.manual_seed(5)
    problems = [] if rank else [name for name in ("score.weight",) if not _same(heads, name)]
    if rank:  # every rank takes part in putting the tensor together
        _whole(heads[0].get_parameter("score.weight"))
    return problems, sorted(heads[0].load_report.initialized)


def _same(models: list[Any], name: str) -> bool:
    values = [_whole(model.get_parameter(name)) for model in models]
    return torch.equal(*values) and float(values[0].float().std()) > 0


@pytest.mark.parametrize(("world", "mesh"), MESHES)
def test_twenty_steps_of_training_have_the_loss_of_one_process(world: int, mesh: Mesh) -> None:
    for losses, wanted in in_ranks(world, _train, mesh):
        assert losses[0] > losses[-1] + 0.5, "the loss is flat"
        assert max(abs(one - other) for one, other in zip(losses, wanted, strict=True)) < 1e-5


def _train(rank: int, mesh: Mesh) -> tuple[list[float], list[float]]:
    return _losses(_scratch(mesh)), _losses(_scratch((1, 1)))


def _losses(model: LlamaForCausalLM) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(1, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(20):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("world", "mesh"), [(2, (2, 1)), (2, (1, 2))])
def test_gradients_pass_through_shared_compressed_layers(llama: Path, world: int, mesh: Mesh) -> None:
    for difference in in_ranks(world, _gradient, llama, mesh):
        assert difference < 1e-5


def _gradient(rank: int, source: Path, mesh: Mesh) -> float:
    """How far the gradient at the embeddings is from that of one process, relative to its largest entry."""
    gradients = []
    for shared in (True, False):
        kwargs = {"distributed_config": _config(mesh)} if shared else {}
        model = SparseAutoModelForCausalLM.from_pretrained(
            source, recipe=RECIPES["w4a16"], dtype=EXACT, execution="compressed", **kwargs
        )
        states = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(2)).requires_grad_()
        model(inputs_embeds=states).logits.square().sum().backward()
        assert states.grad is not None
        gradients.append(states.grad)
    return float((gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max())


def test_a_cut_inside_a_group_is_an_error_before_anything_is_read(llama: Path) -> None:
    for text, nbytes in in_ranks(2, _bad_cut, llama):
        assert "model.layers.0.self_attn.o_proj cannot be cut by tensor parallelism over 2 processes" in text
        assert "64 columns are 32 for each of 2, no multiple of 64 (weight_scale)" in text
        assert "Choose tp_size among [1]" in text
        assert nbytes == 0


def _bad_cut(rank: int, source: Path) -> tuple[str, int]:
    read = 0

    def count(self: Any, name: str, nbytes: int) -> None:
        nonlocal read
        read += nbytes

    Reads.add = count  # type: ignore[method-assign]
    with pytest.raises(DistributedError) as caught:
        SparseAutoModelForCausalLM.from_pretrained(
            source, recipe=group_recipe(group_size=64), distributed_config=_config((2, 1))
        )
    return str(caught.value), read


@pytest.mark.parametrize(
    ("weights", "axis", "fine", "wrong"),
    [
        ({}, 1, (1, 2, 4), (3, 8)),  # groups of 16 in 64
        ({"strategy": "channel", "group_size": None}, 1, (1, 2, 4, 8), (16, 3)),  # 8 numbers to a word
        ({"strategy": "channel", "group_size": None, "num_bits": 3}, 1, (1, 2), (4,)),  # 32 numbers to three words
        ({"symmetric": False}, 0, (1, 2, 3, 6), (4, 5)),  # zero points of 8 rows to a word, of 48
        ({}, 0, (1, 2, 5, 7, 48), ()),
    ],
)
def test_cuts_fall_on_words_groups_and_blocks(
    weights: dict[str, Any], axis: int, fine: tuple[int, ...], wrong: tuple[int, ...]
) -> None:
    scheme = QuantizationScheme(**_weights_of(group_recipe(**weights)))
    for count in fine:
        assert cut_problem(scheme, (48, 64), axis, count) is None, count
    for count in wrong:
        assert cut_problem(scheme, (48, 64), axis, count) is not None, count


def _weights_of(recipe: dict[str, Any]) -> dict[str, Any]:
    return recipe["QuantizationModifier"]["config_groups"]["group_0"]


def test_spans_tell_what_an_index_stands_for() -> None:
    """Checked against the sizes of the stored tensors themselves."""
    for name, recipe in RECIPES.items():
        if not recipe or "QuantizationModifier" not in recipe or "config_groups" not in recipe["QuantizationModifier"]:
            continue
        scheme = QuantizationScheme(**_weights_of(recipe))
        stored = storage.layout(scheme, (96, 192), torch.bfloat16)
        for part, spans in storage.spans(scheme).items():
            for size, span, whole in zip(stored[part][0], spans, (96, 192), strict=False):
                assert span is None or size * span == whole, (name, part)


@pytest.mark.parametrize(("world", "mesh"), [(2, (1, 2)), (2, (2, 1))])
def test_distributed_checkpoints_of_compressed_models(llama: Path, tmp_path: Path, world: int, mesh: Mesh) -> None:
    assert in_ranks(world, _save_and_load, llama, tmp_path, mesh) == [[]] * world
    consolidate(tmp_path / "saved", tmp_path / "one")
    recipe = RECIPES["w4a16 asymmetric"]
    single = SparseAutoModelForCausalLM.from_pretrained(llama, recipe=recipe, execution="compressed")
    for folder in ("one", "saved", "gathered"):  # put together, straight from the shards, as transformers saves
        again = SparseAutoModelForCausalLM.from_pretrained(tmp_path / folder, execution="compressed")
        assert not _differences(again, single)
    with safe_open(tmp_path / "one" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(single.state_dict())


def _save_and_load(rank: int, source: Path, folder: Path, mesh: Mesh) -> list[str]:
    recipe = RECIPES["w4a16 asymmetric"]
    shared = SparseAutoModelForCausalLM.from_pretrained(source, recipe=recipe, distributed_config=_config(mesh))
    shared.save_pretrained(folder / "saved", distributed_checkpoint=True)
    shared.save_pretrained(folder / "gathered")
    single = SparseAutoModelForCausalLM.from_pretrained(source, recipe=recipe, execution="compressed")
    problems = []
    for other in (mesh, mesh[::-1]):  # the layout that was saved, and another
        again = SparseAutoModelForCausalLM.from_pretrained(folder / "saved", distributed_config=_config(other))
        problems += _differences(again, single)
    return problems


def test_a_folder_without_shards_is_not_consolidated(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no distributed checkpoint"):
        consolidate(llama, tmp_path / "out")


def test_initialize_missing_touches_nothing_else(llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama, dtype="auto")
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    state = torch.get_rng_state()
    initialize_missing(model, {"lm_head.weight"}, 3)
    changed = [name for name, value in model.named_parameters() if not torch.equal(value, before[name])]
    assert changed == ["lm_head.weight"]
    assert torch.equal(torch.get_rng_state(), state)
