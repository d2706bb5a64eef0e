"""Checkpoints of every earlier release load, and load as the same values (tests/golden/make.py writes them)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparseautomodel import SparseAutoModelForCausalLM, plan, verify
from sparseautomodel.consumers import TRANSFORMERS
from tests.golden.make import GOLDEN, RECIPES, fingerprint

FOLDERS = sorted(path.parent for path in GOLDEN.glob("*/*/config.json"))
TEXT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def _label(folder: Path) -> str:
    return f"{folder.parent.name}-{folder.name}"


def test_every_recipe_has_its_checkpoint() -> None:
    releases = {folder.parent for folder in FOLDERS}
    assert releases
    newest = max(releases)
    assert {folder.name for folder in FOLDERS if folder.parent == newest} == set(RECIPES)
    for release in releases:
        written = json.loads((release / "fingerprints.json").read_text())
        assert written.keys() == {folder.name for folder in FOLDERS if folder.parent == release}
        assert sum(file.stat().st_size for file in release.rglob("*")) < 400_000


@pytest.mark.parametrize("folder", FOLDERS, ids=_label)
def test_checkpoint_of_an_earlier_release_loads_as_it_did(folder: Path) -> None:
    """F25: an upgrade must not break old files."""
    expected = json.loads((folder.parent / "fingerprints.json").read_text())[folder.name]
    dense = SparseAutoModelForCausalLM.from_pretrained(folder, execution="dense")
    assert fingerprint(dense) == expected
    compressed = SparseAutoModelForCausalLM.from_pretrained(folder)
    verify(folder).raise_for_problems()
    with torch.no_grad():
        ours, exact = compressed(TEXT).logits.float(), dense(TEXT).logits.float()
    # Activations of dynamic schemes are rounded in the one and not in the other.
    assert (ours - exact).abs().max() <= (0.1 if "dynamic" in folder.name else 2**-6) * exact.abs().max()


@pytest.mark.parametrize("folder", FOLDERS, ids=_label)
def test_what_stock_transformers_read_it_still_reads(folder: Path) -> None:
    if not next(consumer for consumer in plan(folder).consumers if consumer.name == TRANSFORMERS).reads:
        pytest.skip("never read by stock transformers")
    stock, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    ours = SparseAutoModelForCausalLM.from_pretrained(folder, execution="compressed")
    with torch.no_grad():
        assert (stock(TEXT).logits - ours(TEXT).logits).abs().max() <= 2**-6 * ours(TEXT).logits.abs().max()
