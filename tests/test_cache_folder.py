"""Where what is kept for later processes lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseautomodel.cache_folder import cache_folder


def test_a_user_may_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEAUTOMODEL_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


def test_else_it_is_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSEAUTOMODEL_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "sparseautomodel"


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSEAUTOMODEL_CACHE", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(OSError, match="no home"):
        cache_folder()
