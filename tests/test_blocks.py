"""`load_blocks`: any blocks of any family, dense or compressed, equal to the full model; their bytes alone are read."""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    DynamicCache,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    MPNetConfig,
    Olmo2Config,
    OPTConfig,
    PreTrainedConfig,
    Qwen3Config,
    T5Config,
)

import sparseautomodel
from sparseautomodel import SparseAutoModelForCausalLM, SparseAutoModelForMaskedLM, load_blocks, oneshot
from sparseautomodel.blocks import Stage, chain
from sparseautomodel.checkpoint import CheckpointError, _SafetensorsFile
from sparseautomodel.plan import PlanError
from sparseautomodel.verify import VerificationError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

BLOCKS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
GROUPED = SIZES | {"num_key_value_heads": 1}
OLD = {"vocab_size": 64, "n_layer": BLOCKS, "n_head": 2, "initializer_range": 0.2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "moe_intermediate_size": 32}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "llama-tied": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "gemma3": Gemma3TextConfig(
        **GROUPED,
        head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "olmo2": Olmo2Config(**GROUPED),
    "gpt2": GPT2Config(**OLD, n_embd=32, n_positions=64),
    "bloom": BloomConfig(**OLD, hidden_size=32),
    "falcon": FalconConfig(**{key: SIZES[key] for key in SIZES if key != "intermediate_size"}, bias=True, alibi=True),
    "t5": T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=BLOCKS, num_heads=2),
    "bert": BertConfig(**SIZES),
}
ODD: dict[str, PreTrainedConfig] = {
    "llama-wide": LlamaConfig(**GROUPED | {"hidden_size": 64, "intermediate_size": 128}),
    "gpt2-scaled-by-number": GPT2Config(**OLD, n_embd=32, n_positions=64, scale_attn_by_inverse_layer_idx=True),
    "opt-projected": OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        word_embed_proj_dim=16,
        max_position_embeddings=64,
    ),
    "deepseek-dense-first": DeepseekV3Config(**GROUPED, **LATENT, **EXPERTS, first_k_dense_replace=1),
    "mpnet-bias-beside": MPNetConfig(**SIZES),
}
"""Families in which a block's number, or what lies around the blocks, is used in another way."""

IGNORE = ["lm_head", "re:.*(cls|predictions|pooler).*"]
FORMATS: dict[str, Any] = {
    "w4a16": [{"QuantizationModifier": {"targets": ["Linear"], "ignore": IGNORE, "scheme": "W4A16", "group_size": 32}}],
    "fp8": [{"QuantizationModifier": {"targets": ["Linear"], "ignore": IGNORE, "scheme": "FP8_DYNAMIC"}}],
    "2of4": [{"MagnitudePruningModifier": {"targets": ["Linear"], "ignore": IGNORE, "mask_structure": "2:4"}}],
}
SPLITS = list(range(1, BLOCKS))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a family -> folder of a seeded model of it in float32, several shards."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            config = copy.deepcopy((FAMILIES | ODD)[name])
            made[name] = tmp_path_factory.mktemp(name)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = _stock(config).from_config(config)
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
            model.save_pretrained(made[name], max_shard_size="20KB")
        return made[name]

    return make


@pytest.mark.parametrize("name", [*FAMILIES, *ODD])
def test_all_ranges_equal_the_full_model(name: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(name)
    ids = torch.randint(3, 60, (2, 7))
    hidden, output = _outputs(_full(name, folder, None), ids)
    for start, stop in itertools.combinations(range(BLOCKS + 1), 2):
        stage = load_blocks(folder, range(start, stop))
        with torch.no_grad():
            got = stage(ids if start == 0 else hidden[start - 1])
        assert torch.equal(got, output if stop == BLOCKS else hidden[stop - 1]), (start, stop)


@pytest.mark.parametrize("saved", [False, True], ids=["on-the-way", "saved"])
@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_split_of_every_format(
    name: str, recipe: str, saved: bool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    if name == "gpt2" and recipe != "2of4":
        pytest.skip("Conv1D is stored dense only")
    folder: Path = folder_of(name)
    modifiers: Any = copy.deepcopy(FORMATS[recipe])
    if name == "gpt2":
        modifiers[0]["MagnitudePruningModifier"]["targets"] = ["Conv1D"]
    if saved:
        oneshot(folder, modifiers, output=tmp_path / "saved")
        folder, modifiers = tmp_path / "saved", None
    ids = torch.randint(3, 60, (2, 7))
    full = _full(name, folder, modifiers)
    _, output = _outputs(full, ids)
    for split in SPLITS:
        first, last = (
            load_blocks(folder, blocks, modifiers, block_cache=tmp_path / "cache")
            for blocks in (range(split), range(split, BLOCKS))
        )
        with torch.no_grad():
            assert torch.equal(last(first(ids)), output), split
    if recipe != "2of4":
        packed = sum(one.nbytes for one in full.parameters()) - sum(one.nbytes for one in _edges(full))
        middle = load_blocks(folder, range(1, 2), modifiers, block_cache=False)
        assert sum(one.nbytes for one in middle.model.parameters()) <= packed / BLOCKS + 256


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("t5", "bert")])
def test_chain_generates_what_the_full_model_does(name: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(name)
    full = _full(name, folder, None)
    ids = torch.randint(3, 60, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for split in SPLITS:
        model = chain([load_blocks(folder, range(split)), load_blocks(folder, range(split, BLOCKS))])
        for way in (
            {"do_sample": False},
            {"do_sample": True},
            {"num_beams": 3},
            {"do_sample": False, "use_cache": False},
        ):
            drawn = []
            for one in (model, full):
                torch.manual_seed(1)
                options = {"max_new_tokens": 8, "pad_token_id": 0} | way
                drawn.append(one.generate(ids, attention_mask=mask, **options))
            assert torch.equal(*drawn), (split, way)


def test_chain_with_dynamic_cache_and_labels(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("gemma3")
    full = _full("gemma3", folder, None)
    stages = [load_blocks(folder, range(number, number + 1)) for number in range(BLOCKS)]
    model = chain(stages)
    ids = torch.randint(3, 60, (2, 7))
    with torch.no_grad():
        assert torch.equal(model(ids, labels=ids).loss, full(ids, labels=ids).loss)
        ours, theirs = DynamicCache(config=full.config), DynamicCache(config=full.config)
        for part in ids.split([4, 2, 1], dim=1):
            got, want = model(part, past_key_values=ours), full(part, cache=theirs)
            assert torch.equal(got.logits, want.logits)
    assert ours.get_seq_length() == theirs.get_seq_length() == 7


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "bloom", "falcon", "mixtral"])
def test_middle_stage_with_a_cache_of_its_own(name: str, folder_of: Callable[[str], Path]) -> None:
    """The trap: where blocks keep their numbers, or placeholders are left, the cache says 0 positions were run."""
    folder = folder_of(name)
    ids = torch.randint(3, 60, (2, 7))
    hidden, _ = _outputs(_full(name, folder, None), ids)
    stage = load_blocks(folder, range(1, 2))
    cache = DynamicCache(config=stage.config)
    with torch.no_grad():
        whole = stage(hidden[0])
        parts = [stage(part, past_key_values=cache) for part in hidden[0].split([4, 2, 1], dim=1)]
    assert cache.get_seq_length() == 7
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "mixtral", "gpt2", "t5", "bert", "deepseek-dense-first"])
def test_move_reads_the_difference(name: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(name)
    ids = torch.randint(3, 60, (2, 7))
    hidden, output = _outputs(_full(name, folder, None), ids)
    stage = load_blocks(folder, range(0, 1))
    for start, stop in [(0, 2), (1, 3), (1, 2), (0, 3), (2, 3), (0, 1)]:
        kept = {stage._stack.block(number) for number in range(start, stop) if number in stage.blocks}
        stage.move(range(start, stop))
        assert not [one for one in stage.load_report.reads if one.startswith(tuple(f"{block}." for block in kept))]
        fresh = load_blocks(folder, range(start, stop))
        assert stage.nbytes == fresh.nbytes
        assert set(stage.model.state_dict()) == set(fresh.model.state_dict())
        with torch.no_grad():
            got = stage(ids if start == 0 else hidden[start - 1])
        assert torch.equal(got, output if stop == BLOCKS else hidden[stop - 1]), (start, stop)


def test_move_with_a_recipe_keeps_a_running_generation(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder, recipe = folder_of("llama"), FORMATS["w4a16"]
    full = _full("llama", folder, recipe)
    ids = torch.randint(3, 60, (1, 7))
    stages = [load_blocks(folder, blocks, recipe, block_cache=tmp_path) for blocks in (range(0, 2), range(2, 3))]
    ours, theirs = DynamicCache(config=full.config), DynamicCache(config=full.config)
    with torch.no_grad():
        for part, split in zip(ids.split([3, 2, 2], dim=1), (2, 1, 2), strict=True):
            stages[0].move(range(split))
            stages[1].move(range(split, BLOCKS))
            hidden: torch.Tensor = part
            for stage in stages:
                hidden = stage(hidden, past_key_values=ours)
            assert torch.equal(hidden, full(part, cache=theirs).logits)


def test_failed_move_leaves_the_stage_as_it_was(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = _copy(folder_of("llama"), tmp_path)
    stage = load_blocks(folder, range(0, 1))
    before = stage(torch.arange(5)[None])
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    (folder / index["model.layers.2.mlp.up_proj.weight"]).unlink()
    with pytest.raises(CheckpointError, match="which is not there"):
        stage.move(range(0, 3))
    with pytest.raises(ValueError, match="blocks 0 to 2"):
        stage.move(range(0, 4))
    assert stage.blocks == range(0, 1)
    assert torch.equal(stage(torch.arange(5)[None]), before)


def test_reads_the_blocks_and_opens_their_files_alone(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("llama")
    opened: list[str] = []
    init = _SafetensorsFile.__init__
    monkeypatch.setattr(_SafetensorsFile, "__init__", lambda self, path: (opened.append(path), init(self, path))[1])
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    mine = {name: file for name, file in index.items() if name.startswith("model.layers.1.")}
    for recipe in (None, FORMATS["w4a16"]):
        opened.clear()
        stage = load_blocks(folder, range(1, 2), recipe, block_cache=False)
        assert {os.path.basename(path) for path in opened} == set(mine.values()) < set(index.values())
        assert {name: times for name, (times, _) in stage.load_report.reads.items()} == dict.fromkeys(mine, 1)
    assert set(load_blocks(folder, range(0, 1)).load_report.reads) == {
        *(name for name in index if name.startswith("model.layers.0.")),
        "model.embed_tokens.weight",
    }


def test_recipe_means_the_same_as_for_the_whole_model(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Patterns with a block's number, also one outside the range."""
    folder = folder_of("llama")
    one = {"targets": ["re:.*layers.2.mlp.*"], "scheme": "W4A16", "group_size": 32}
    two = {"targets": ["re:.*layers.0.*proj"], "scheme": "W8A16", "group_size": 32}
    recipe = [{"QuantizationModifier": one}, {"QuantizationModifier": two}]
    full = _full("llama", folder, recipe)
    ids = torch.randint(3, 60, (2, 7))
    hidden, output = _outputs(full, ids)
    with torch.no_grad():
        assert torch.equal(load_blocks(folder, range(2, 3), recipe, block_cache=tmp_path)(hidden[1]), output)
        assert torch.equal(load_blocks(folder, range(1, 2), recipe, block_cache=tmp_path)(hidden[0]), hidden[1])
    with pytest.raises(PlanError, match=r"layers\.7"):
        load_blocks(folder, range(0, 1), [{"QuantizationModifier": one | {"targets": ["re:.*layers.7.*"]}}])


def test_head_that_is_untied_by_the_recipe(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of("llama-tied")
    recipe = [{"QuantizationModifier": {"targets": ["Linear"], "scheme": "W8A16", "group_size": 32}}]
    ids = torch.randint(3, 60, (2, 7))
    hidden, output = _outputs(_full("llama-tied", folder, recipe), ids)
    first, last = (load_blocks(folder, blocks, recipe, block_cache=tmp_path) for blocks in (range(2), range(2, 3)))
    with torch.no_grad():
        assert torch.equal(first(ids), hidden[1])
        assert torch.equal(last(hidden[1]), output)
    assert "model.embed_tokens.weight" not in last.model.state_dict()


def test_tied_head_alone_is_loaded_from_the_embedding(folder_of: Callable[[str], Path]) -> None:
    stage = load_blocks(folder_of("llama-tied"), range(2, 3))
    names = set(stage.model.state_dict())
    assert "lm_head.weight" in names
    assert "model.embed_tokens.weight" not in names
    whole = load_blocks(folder_of("llama-tied"), range(0, 3))
    assert whole.model.lm_head.weight is whole.model.model.embed_tokens.weight


def test_threshold_over_the_whole_model_is_refused(folder_of: Callable[[str], Path]) -> None:
    recipe = [{"MagnitudePruningModifier": {"sparsity": 0.5, "apply_globally": True, "targets": ["Linear"]}}]
    with pytest.raises(ValueError, match="threshold over the whole model cannot be found from a part"):
        load_blocks(folder_of("llama"), range(1, 2), recipe)


def test_encoder_of_an_encoder_decoder_checkpoint(tmp_path: Path) -> None:
    model = AutoModelForSeq2SeqLM.from_config(copy.deepcopy(FAMILIES["t5"])).eval()
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, 60, (2, 7))
    with torch.no_grad():
        hidden: torch.Tensor = ids
        for number in range(BLOCKS):
            hidden = load_blocks(tmp_path, range(number, number + 1))(hidden)
        assert torch.equal(hidden, model.get_encoder()(ids)[0])


def test_dtype_device_and_config_of_a_stage(folder_of: Callable[[str], Path]) -> None:
    stage = load_blocks(folder_of("gemma3"), range(1, 3), device="cpu", dtype="bfloat16")
    assert stage.model.dtype == torch.bfloat16
    assert stage.device == torch.device("cpu")
    assert stage.config.num_hidden_layers == 2
    assert stage.config.layer_types == ["full_attention", "sliding_attention"]
    assert not stage.is_first
    assert stage.is_last
    assert stage.num_blocks == BLOCKS
    assert "blocks 1 to 2 of 3" in repr(stage)
    assert isinstance(stage, Stage)
    assert sparseautomodel.load_blocks is load_blocks


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (range(2, 4), "the model has blocks 0 to 2"),
        (range(0, 3, 2), "is no run of blocks"),
        (range(1, 1), "is no run of blocks"),
        (range(-1, 1), "the model has blocks 0 to 2"),
        ([0, 1], "is no run of blocks"),
    ],
)
def test_wrong_ranges_say_the_right_ones(blocks: Any, message: str, folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=message):
        load_blocks(folder_of("llama"), blocks)


def test_missing_tensor_is_named(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = _copy(folder_of("llama"), tmp_path)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(VerificationError, match=r"no tensor of the checkpoint fills model\.layers\.1\.mlp\.up_proj"):
        load_blocks(folder, range(1, 2))
    assert load_blocks(folder, range(0, 1)).nbytes


def test_models_without_one_stack_are_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32}
    config = BartConfig(**sizes, decoder_ffn_dim=32, encoder_attention_heads=2, decoder_attention_heads=2)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no single stack of blocks"):
        load_blocks(tmp_path, range(0, 1))


def test_recipe_and_quantization_config_exclude_each_other(folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="leave one of them out"):
        load_blocks(folder_of("llama"), range(0, 1), FORMATS["w4a16"], quantization_config=object())


@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "int8"])
def test_bitsandbytes(kind: str, folder_of: Callable[[str], Path]) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": kind == "nf4-double"}
    wanted = BitsAndBytesConfig(**({"load_in_8bit": True} if kind == "int8" else four))
    folder, ids = folder_of("llama-wide"), torch.randint(3, 60, (2, 7))  # its kernels want multiples of 64
    full = AutoModelForCausalLM.from_pretrained(folder, quantization_config=wanted).eval()
    hidden, output = _outputs(full, ids)
    with torch.no_grad():
        assert torch.equal(load_blocks(folder, range(0, 1), quantization_config=wanted)(ids), hidden[0])
        assert torch.equal(load_blocks(folder, range(1, 2), quantization_config=wanted)(hidden[0]), hidden[1])
        assert torch.equal(load_blocks(folder, range(2, 3), quantization_config=wanted)(hidden[1]), output)


@pytest.mark.slow
def test_five_of_thirty_blocks_of_a_real_model(smollm2: Path) -> None:
    full = AutoModelForCausalLM.from_pretrained(smollm2)
    hidden, _ = _outputs(full, torch.arange(5, 30)[None])
    own = sum(one.nbytes for block in full.model.layers[10:15] for one in block.parameters())
    stage = load_blocks(smollm2, range(10, 15))
    assert stage.load_report.nbytes <= 1.02 * own
    assert stage.nbytes <= 1.02 * own
    with torch.no_grad():
        assert torch.equal(stage(hidden[9]), hidden[14])


def _stock(config: PreTrainedConfig) -> Any:
    if isinstance(config, T5Config):
        from transformers import AutoModelForTextEncoding

        return AutoModelForTextEncoding
    return AutoModelForMaskedLM if isinstance(config, (BertConfig, MPNetConfig)) else AutoModelForCausalLM


def _full(name: str, folder: Path, recipe: Any) -> Any:
    stock = _stock((FAMILIES | ODD)[name])
    if recipe is None and "quantization_config" not in (folder / "config.json").read_text():
        return stock.from_pretrained(folder).eval()
    ours = {AutoModelForCausalLM: SparseAutoModelForCausalLM, AutoModelForMaskedLM: SparseAutoModelForMaskedLM}
    ours = ours.get(stock, getattr(sparseautomodel, "SparseAutoModelForTextEncoding", None))
    return ours.from_pretrained(folder, recipe=recipe)


def _outputs(model: Any, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What each block of the full model gives, and what the model gives: from hooks on its own forward."""
    blocks = next(one for one in model.modules() if isinstance(one, torch.nn.ModuleList))
    found: list[torch.Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out))
        for block in blocks
    ]
    with torch.no_grad():
        output = model(ids)
    for hook in hooks:
        hook.remove()
    return found, output.logits if "logits" in output else output[0]


def _edges(model: Any) -> list[torch.nn.Parameter]:
    blocks = next(one for one in model.modules() if isinstance(one, torch.nn.ModuleList))
    inside = {id(one) for one in blocks.parameters()}
    return [one for one in model.parameters() if id(one) not in inside]


def _copy(folder: Path, target: Path) -> Path:
    import shutil

    return Path(shutil.copytree(folder, target / "copy"))
