"""Checks the options of runs, so that a wrong one is named where it is given."""

from __future__ import annotations

import math
import numbers
from pathlib import Path

from asyncflow.runtime.trace import Trace

_FOR_EVER_S = 1e9
"""Event loops overflow on delays of centuries."""


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


def as_priority(priority: object) -> int:
    """An integer.

    Raises:
        TypeError: it is none.
    """
    if isinstance(priority, bool) or not isinstance(priority, numbers.Integral):
        raise TypeError(f"priority is an integer, and lower ones go first; got {type(priority).__name__} {priority!r}")
    return int(priority)


def check_trace(trace: object, *, may_be_path: bool) -> None:
    """Raises TypeError unless `trace` is a Trace, None, or (if it may be one) a path."""
    if trace is None or isinstance(trace, Trace) or (may_be_path and isinstance(trace, str | Path)):
        return
    wanted = "a Trace to record into or a path to write to" if may_be_path else "a Trace to record into"
    raise TypeError(f"trace is {wanted}; got {type(trace).__name__} {trace!r}")
