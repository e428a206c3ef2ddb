"""The numbers that users give to devices, checked."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex


def positive_count(value: object, meaning: str) -> int:
    """Return ``value`` if it is an int of at least 1, also NumPy's; ``meaning`` names the count in the error.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or index(value) < 1:
        raise ValueError(f"{meaning} is a positive int, not {value!r}")
    return index(value)
