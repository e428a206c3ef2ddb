"""Checks of the options of runs, so that a wrong option is reported where it is given."""

from __future__ import annotations

import math
import numbers
from pathlib import Path

from asyncflow.errors import DeadlineExceeded, brief
from asyncflow.runtime.watch.trace import Trace

_FOR_EVER_S = 1e9
"""Event loops overflow on delays of centuries."""


def as_timeout(timeout: object) -> float | None:
    """Return seconds, or None for no timeout, which infinity means too.

    Raises:
        TypeError: it is no real number.
        ValueError: it is NaN.
        DeadlineExceeded: it is negative, as the time left after a deadline.
    """
    if timeout is None:
        return None
    seconds = _as_float(timeout, "timeout is a number of seconds, or None")
    if seconds < 0:
        raise DeadlineExceeded(
            f"timeout={timeout} had passed before the run was asked for; without a timeout pass None"
        )
    return seconds if seconds < _FOR_EVER_S else None


def as_seconds(seconds: object, name: str, *, may_be_zero: bool = True) -> float:
    """Return seconds to wait; infinity becomes the longest time of event loops.

    Raises:
        TypeError: it is no real number.
        ValueError: it is NaN, negative, or 0 where that may not be.
    """
    rule = f"{name} is a number of seconds, {'0 or more' if may_be_zero else 'more than 0'}"
    wanted = _as_float(seconds, rule)
    if wanted < 0 or (wanted == 0 and not may_be_zero):
        raise ValueError(f"{rule}; got {seconds!r}")
    return min(wanted, _FOR_EVER_S)


def _as_float(value: object, rule: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{rule}; got {type(value).__name__} {brief(value)}")
    number = float(value)
    if math.isnan(number):
        raise ValueError(f"{rule}; got nan")
    return number


def as_priority(priority: object) -> int:
    """An integer.

    Raises:
        TypeError: it is none.
    """
    if isinstance(priority, bool) or not isinstance(priority, numbers.Integral):
        raise TypeError(f"priority is an integer, and lower ones go first; got {type(priority).__name__} {priority!r}")
    return int(priority)


def check_trace(trace: object, *, may_be_path: bool) -> None:
    """Raise TypeError unless `trace` is a Trace, None, or (if allowed) a path."""
    if trace is None or isinstance(trace, Trace) or (may_be_path and isinstance(trace, str | Path)):
        return
    wanted = "a Trace to record into or a path to write to" if may_be_path else "a Trace to record into"
    raise TypeError(f"trace is {wanted}; got {type(trace).__name__} {trace!r}")
