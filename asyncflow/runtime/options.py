"""Checks the options of sessions and runs, so that a wrong one is named where it is given."""

from __future__ import annotations

import math
import numbers
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.graph.graph import Graph
from asyncflow.runtime.trace import Trace

if TYPE_CHECKING:
    from asyncflow.compiler.program.request import PlanOptions

_FOR_EVER_S = 1e9
"""Event loops overflow on delays of centuries."""


def check_graph(graph: object) -> None:
    """Raises TypeError unless `graph` is a Graph or None."""
    if graph is not None and not isinstance(graph, Graph):
        raise TypeError(f"graph is a Graph or None; got {type(graph).__name__} {graph!r}")


def check_integer(value: object, name: str, least: int | None = None) -> None:
    """Raises TypeError unless `value` is an integer, ValueError if it is less than `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} is an integer; got {type(value).__name__} {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} is at least {least}; got {value}")


def check_limits(max_runs: object, max_queued: object) -> None:
    """Raises TypeError or ValueError for limits of runs that make no sense."""
    if max_runs is not None:
        check_integer(max_runs, "max_runs", 1)
    if max_queued is not None:
        check_integer(max_queued, "max_queued", 0)
        if max_runs is None:
            raise ValueError("max_queued limits the runs that wait, and without max_runs none ever does: give both")


def check_flag(value: object, name: str) -> None:
    """Raises TypeError unless an option is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is True or False; got {type(value).__name__} {value!r}")


def check_plan_options(options: PlanOptions) -> None:
    """Raises TypeError or ValueError for what a user has given as one of them."""
    for field in fields(options):
        if field.type == "bool":
            check_flag(getattr(options, field.name), field.name)
    check_transfer_dtype(options.transfer_dtype)
    if options.placement_seed is not None:
        check_integer(options.placement_seed, "placement_seed", None)
    if options.max_iterations is not None:
        check_integer(options.max_iterations, "max_iterations", 1)


def check_transfer_dtype(value: object) -> None:
    """Raises ValueError unless `value` is None or ``"bfloat16"``."""
    if value not in (None, "bfloat16"):
        raise ValueError(f"transfer_dtype is None or 'bfloat16'; got {value!r}")


def as_timeout(timeout: object) -> float | None:
    """Seconds, or None for no timeout, which infinity means too.

    Raises:
        TypeError: it is no real number.
        ValueError: it is NaN.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout is a number of seconds, or None; got {type(timeout).__name__} {timeout!r}")
    seconds = float(timeout)
    if math.isnan(seconds):
        raise ValueError("timeout is a number of seconds, or None; got nan")
    return seconds if seconds < _FOR_EVER_S else None


def check_trace(trace: object, *, may_be_path: bool) -> None:
    """Raises TypeError unless `trace` is a Trace, None, or (if it may be one) a path."""
    if trace is None or isinstance(trace, Trace) or (may_be_path and isinstance(trace, str | Path)):
        return
    wanted = "a Trace to record into or a path to write to" if may_be_path else "a Trace to record into"
    raise TypeError(f"trace is {wanted}; got {type(trace).__name__} {trace!r}")
