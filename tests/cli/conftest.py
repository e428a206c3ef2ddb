"""The printed output of a command."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

Output: TypeAlias = Callable[[], tuple[str, str]]


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Output:
    """Return the output since the last call: stdout, stderr."""

    def read() -> tuple[str, str]:
        captured = capsys.readouterr()
        return captured.out, captured.err

    return read
