"""Imports every module of derivatives, which installs the rules."""

from __future__ import annotations

from asyncflow.ops.derivatives import (
    builtin,
    checks,
    creation,
    datatypes,
    elementwise,
    indexing,
    linalg,
    logic,
    manipulation,
    nn,
    random,
    recurrence,
    scatter,
    searching,
    sets,
    shapes,
    sorting,
    statistical,
    utility,
)

__all__ = [
    "builtin",
    "checks",
    "creation",
    "datatypes",
    "elementwise",
    "indexing",
    "linalg",
    "logic",
    "manipulation",
    "nn",
    "random",
    "recurrence",
    "scatter",
    "searching",
    "sets",
    "shapes",
    "sorting",
    "statistical",
    "utility",
]
