"""Names for what is CuPy's, which has no types of its own, need not be installed, and has a stand-in in tests."""

from __future__ import annotations

from typing import Any, TypeAlias

Cupy: TypeAlias = Any
"""The module."""

CupyArray: TypeAlias = Any
"""An array in the memory of a card."""

Raw: TypeAlias = Any
"""An event, a stream, a pointer, a graph: as CuPy or the driver gives it."""
