"""Random texts: the first test with `hypothesis.strategies.text` takes two seconds to list all characters."""

from __future__ import annotations

import sys

from hypothesis import strategies as st

_CHARACTERS = (st.integers(0, 0x24F) | st.integers(0, sys.maxunicode)).map(chr)
"""Any, lone surrogates too; often a letter."""


def texts(*, min_size: int = 0, max_size: int) -> st.SearchStrategy[str]:
    """Of any characters."""
    return st.lists(_CHARACTERS, min_size=min_size, max_size=max_size).map("".join)
