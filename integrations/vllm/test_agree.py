"""The comparison itself; the run against vLLM is a script with its own environment (README.md)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SPEC = importlib.util.spec_from_file_location("agree", Path(__file__).with_name("agree.py"))
agree = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(agree)


def test_compare_says_where_tokens_part() -> None:
    assert agree.compare([[1, 2, 3]], [[1, 2, 3]]) == (True, "prompt 0: the first 3 of 3 tokens agree")
    assert agree.compare([[1, 2, 3]], [[1, 9, 3]]) == (False, "prompt 0: the first 1 of 3 tokens agree")


def test_wrong_usage_is_exit_2() -> None:
    assert agree.main(["theirs"]) == 2
