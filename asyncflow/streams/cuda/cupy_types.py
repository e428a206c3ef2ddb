"""Type names for CuPy, which is untyped, optional, and replaced by a stand-in in tests."""

from __future__ import annotations

from typing import Any, TypeAlias

Cupy: TypeAlias = Any
"""The module."""

CupyArray: TypeAlias = Any
"""An array in the memory of a card."""

Raw: TypeAlias = Any
"""An event, a stream, a pointer, a graph: as CuPy or the driver gives it."""
