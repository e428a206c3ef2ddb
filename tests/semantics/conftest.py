"""For tests that explore programs."""

from __future__ import annotations

import pytest

from asyncflow.semantics import report
from asyncflow.semantics.explore import explore
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def _time_for_all_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search ends when it has found all, unless its test says when, however slow the machine is."""
    monkeypatch.setattr(report, "_MOST_SECONDS", PATIENCE_S)
    monkeypatch.setattr(explore, "__kwdefaults__", {**(explore.__kwdefaults__ or {}), "max_seconds": PATIENCE_S})
