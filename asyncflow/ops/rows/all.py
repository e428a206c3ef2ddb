"""Imports every module of row rules, which installs them."""

from __future__ import annotations

from asyncflow.ops.rows import axes, by_row, extents, indexing, linalg, shape

__all__ = ["axes", "by_row", "extents", "indexing", "linalg", "shape"]
