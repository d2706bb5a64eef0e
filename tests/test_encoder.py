"""A real encoder keeps its sentence vectors in 8 bits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase

from sparseautomodel import SparseAutoModel, oneshot, verify

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MINILM = Path(__file__).resolve().parents[1] / ".cache" / "minilm"
SENTENCES = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Two men pushed carts through the woods.",
    "A monkey is playing drums.",
    "A cheetah is running behind its prey.",
    "How do I reset the password of my account?",
    "Where can I change my login credentials?",
    "The central bank raised interest rates by half a percentage point on Thursday.",
    "Inflation has slowed for the third month in a row.",
    "The mitochondrion is the powerhouse of the cell.",
    "Photosynthesis turns light into chemical energy.",
    "def add(a, b): return a + b",
    "SELECT name FROM users WHERE age > 30 ORDER BY name;",
    "To be, or not to be, that is the question.",
    "The train to Bern leaves at 7:32 from platform 4.",
    "The hotel was clean and quiet, but breakfast was a disappointment and the staff seemed overworked throughout.",
    "Je voudrais un café, s'il vous plaît.",
    "The children built a castle of sand before the tide came in.",
    "She sells sea shells by the sea shore, and the shells she sells are sea shells, I am sure.",
)
TEXTS = (
    "The old library on the corner was built of gray stone and smelled of paper and rain.",
    "What is the fastest way to learn how to cook for a large family on a small budget?",
    "Install the package, import the module and call the function with two arguments.",
    "Scientists found that the glacier lost a third of its mass within twenty years.",
    "The match ended in a draw after extra time, and the crowd sang all the way home.",
    "Please send the signed contract back to our office before the end of the month.",
)


@pytest.fixture(scope="module")
def minilm() -> Path:
    """all-MiniLM-L6-v2, dense float32, with its tokenizer. `make encoder` puts it there."""
    if not (MINILM / "config.json").is_file():
        message = f"{MINILM} holds no model: run `make encoder`"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return MINILM


@pytest.fixture(scope="module")
def dense(minilm: Path) -> Tensor:
    model, tokenizer = AutoModel.from_pretrained(minilm), AutoTokenizer.from_pretrained(minilm)
    return vectors(model, tokenizer, [*SENTENCES, "Yes."])


@pytest.mark.parametrize(
    ("recipe", "least"), [("w8a8-dynamic", 0.99), ("w8a8-smoothquant", 0.99), ("w8a8-static", 0.95)]
)
def test_sentence_vectors_keep_their_direction(
    recipe: str, least: float, minilm: Path, dense: Tensor, tmp_path: Path
) -> None:
    data = None if recipe == "w8a8-dynamic" else list(TEXTS)
    oneshot(minilm, recipe, data=data, output=tmp_path / "out")
    verify(tmp_path / "out").raise_for_problems()
    model = SparseAutoModel.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    cosines = nn.functional.cosine_similarity(vectors(model, tokenizer, SENTENCES), dense[:-1])
    assert cosines.min() >= least, f"{cosines.min():.4f} of {SENTENCES[int(cosines.argmin())]!r}"
    short = nn.functional.cosine_similarity(vectors(model, tokenizer, ["Yes."]), dense[-1:])
    assert short >= least - 0.03  # the mean of four tokens evens out little


def vectors(model: nn.Module, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str]) -> Tensor:
    """`[sentences, 384]`: the mean of the last hidden states of each, as sentence-transformers takes it."""
    found = []
    with torch.no_grad():
        for sentence in sentences:
            hidden = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state
            found.append(hidden[0].mean(0))
    return torch.stack(found)
