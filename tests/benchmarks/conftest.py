"""Benchmarks are scripts that find each other by the folder they lie in."""

from __future__ import annotations

import pytest

from tests.benchmarks.running import ROOT


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """``import report`` and the like find what lies in benchmarks/."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
