"""The end-to-end check against plain formulas."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from sparseautomodel.witness import Comparison


def outputs(
    shift: float, rows: int = 3, tokens: int = 150
) -> list[tuple[dict[str, torch.Tensor], CausalLMOutput, CausalLMOutput]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(rows):
        logits = torch.randn(1, tokens, 40, generator=generator) * 3
        noise = torch.randn(1, tokens, 40, generator=generator) * shift
        ids = torch.randint(0, 40, (1, tokens), generator=generator)
        found.append(({"input_ids": ids}, CausalLMOutput(logits=logits), CausalLMOutput(logits=logits + noise)))
    return found


def test_perplexity_divergence_and_agreement_are_the_plain_formulas() -> None:
    done, rows = Comparison(causal=True), outputs(0.5)
    for row in rows:
        done.add_ends(*row)
    found = done.quality()
    assert found is not None and found.kind == "perplexity" and found.tokens == 3 * 149
    ids = torch.cat([row["input_ids"][0, 1:] for row, _, _ in rows])
    first, second = (torch.cat([row[place].logits[0, :-1] for row in rows]).double() for place in (1, 2))
    for value, logits in ((found.source, first), (found.result, second)):
        assert value == pytest.approx(float(functional.cross_entropy(logits, ids).exp()), rel=1e-5)
    kl = functional.kl_div(second.log_softmax(-1), first.log_softmax(-1), reduction="batchmean", log_target=True)
    assert found.divergence == pytest.approx(float(kl), rel=1e-4)
    assert found.agreement == pytest.approx(float((first.argmax(-1) == second.argmax(-1)).double().mean()))
    assert found.passed and "passed" in str(found) and "did not see" in str(found)


def test_a_ruined_model_does_not_pass() -> None:
    for shift in (20.0, math.nan):
        done = Comparison(causal=True, seen=True)
        for row in outputs(shift):
            done.add_ends(*row)
        found = done.quality()
        assert found is not None and not found.passed and "WARNING" in str(found)
        assert "of the calibration" in str(found)
        json.dumps(found.to_dict(), allow_nan=False)


def test_a_source_that_is_not_finite_proves_nothing() -> None:
    done = Comparison(causal=True)
    for row, source, result in outputs(0.1):
        source.logits[:] = math.inf
        done.add_ends(row, source, result)
    found = done.quality()
    assert found is not None and not found.passed and "source itself is not finite" in str(found)


def test_models_without_a_next_token() -> None:
    hidden = torch.randn(1, 7, 16)
    done = Comparison(causal=False)
    done.add_ends({}, BaseModelOutput(last_hidden_state=hidden), BaseModelOutput(last_hidden_state=hidden * 1.1))
    found = done.quality()
    assert found is not None and found.kind == "hidden states" and found.tokens == 7 and found.passed
    assert found.divergence == pytest.approx(0.01, rel=1e-4) and found.source is None
    masked = Comparison(causal=False)
    for row in outputs(0.1):
        masked.add_ends(*row)
    found = masked.quality()
    assert found is not None and found.kind == "logits" and found.tokens == 450 and found.agreement is not None


def test_blocks_and_no_rows() -> None:
    done = Comparison(causal=True)
    assert done.quality() is None and math.isnan(done.error("model.layers.0"))
    source = torch.ones(1, 4, 8)
    done.add_block("model.layers.0", source, source * 1.5)
    done.add_block("model.layers.0", source, source)
    assert done.error("model.layers.0") == pytest.approx(0.125)
