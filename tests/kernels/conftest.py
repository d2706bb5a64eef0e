"""What tests of several kernels share."""

from __future__ import annotations

import pytest

from sparseautomodel import registers


@pytest.fixture
def without_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler or AVX512, where the kernels that torch has operations for come next."""
    monkeypatch.setattr(registers, "why_not", lambda: "not in this test")
