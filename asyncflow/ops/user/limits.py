"""`CallLimits`: timeout, retries and number of calls of a user's function.

This module holds the declaration. `LimitedCalls` of the runtime enforces it, as that takes an event loop.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from random import Random
from typing import TypeAlias, TypeGuard

from asyncflow.errors import (
    AsyncflowError,
    DeadlineExceeded,
    EndOfInput,
    GraphError,
    KernelError,
    OverloadedError,
    QueueClosedError,
    brief,
)
from asyncflow.values import Nest, Value

RetryOn: TypeAlias = "type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool]"
"""Errors that deserve another attempt: a class, a tuple of classes, or a function of the error."""

Backoff: TypeAlias = "float | Callable[[int, Exception], float]"
"""Seconds before the first retry, or a function of the number of failed attempts and the last error."""

Rate: TypeAlias = "float | tuple[int, float]"
"""Calls per second, or a number of calls and the seconds in which they may begin."""

FIRST_BACKOFF_S = 0.1
"""The delay before the first retry, if none is said."""

MOST_BACKOFF_S = 60.0
"""Delays grow up to a minute."""

CallLimited: TypeAlias = Callable[["CallLimits", Callable[..., Nest], bool, Sequence[Value]], Awaitable[Nest]]
"""Function ``call(limits, function, is_async, values)`` that calls a function within its limits."""

_call_limited: list[CallLimited] = []


def install_limited_calls(call: CallLimited) -> None:
    """Tells how functions with limits are called, which takes more than is known here."""
    _call_limited[:] = [call]


async def call_limited(
    limits: CallLimits, function: Callable[..., Nest], values: Sequence[Value], *, is_async: bool
) -> Nest:
    """Return the result of a function, called as its limits say."""
    return await _call_limited[0](limits, function, is_async, values)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CallLimits:
    """The limits of one function; see `asyncflow.op` for what each means.

    Args:
        name: of the function.
        timeout: seconds that one attempt may take; None for any time.
        retries: number of further attempts after a failed one.
        retry_on: errors that are worth another attempt.
        backoff: seconds before the first retry, 0.1 for None; or a function that returns the seconds before any retry.
        max_concurrency: number of calls at once; None for no limit.
        rate: calls per second, or calls and seconds; None for no limit.

    Attributes:
        tokens: number of calls that may begin within any `period_s`; None for no limit.
        period_s: seconds.

    Raises:
        GraphError: an argument is out of its range.
    """

    name: str
    timeout: float | None = None
    retries: int = 0
    retry_on: RetryOn | None = None
    backoff: Backoff | None = None
    max_concurrency: int | None = None
    rate: Rate | None = None
    tokens: int | None = field(init=False, default=None)
    period_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if self.timeout is not None:
            self._check("timeout", self.timeout, "a number of seconds above 0", _is_positive(self.timeout))
        self._check("retries", self.retries, "a number of attempts, 0 or more", _is_count(self.retries, 0))
        if self.max_concurrency is not None:
            is_count = _is_count(self.max_concurrency, 1)
            self._check("max_concurrency", self.max_concurrency, "a number of calls, at least 1", is_count)
        if self.backoff is not None and not callable(self.backoff):
            is_delay = _is_positive(self.backoff) or self.backoff == 0
            self._check("backoff", self.backoff, "a number of seconds, 0 or more, or a function", is_delay)
        for argument, value in (("backoff", self.backoff), ("retry_on", self.retry_on)):
            self._check(argument, value, "for retries, and retries= is 0", value is None or self.retries > 0)
        self._check_errors()
        if self.rate is not None:
            found = _tokens(self.rate)
            text = "a number of calls per second above 0, or a pair of a number of calls and a number of seconds"
            self._check("rate", self.rate, text, found is not None)
            for name, value in zip(("tokens", "period_s"), found or (), strict=False):
                object.__setattr__(self, name, value)

    @property
    def given(self) -> list[str]:
        """The names of the limits that there are."""
        names = ("timeout", "retries", "max_concurrency", "rate")
        return [name for name in names if getattr(self, name)]

    def _check(self, argument: str, value: object, rule: str, holds: bool) -> None:
        if not holds:
            raise GraphError(f"@op: {argument}= of {self.name} is {rule}; got {brief(value)}")

    def _check_errors(self) -> None:
        given: object = self.retry_on
        kinds = given if isinstance(given, tuple) else (given,)
        are_errors = bool(kinds) and all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds)
        is_predicate = callable(given) and not isinstance(given, type) and not iscoroutinefunction(given)
        rule = (
            "a class of errors, a tuple of them, or a function of an error, not async; CancelledError is never retried"
        )
        self._check("retry_on", given, rule, given is None or are_errors or is_predicate)

    def is_retried(self, error: Exception) -> bool:
        """Return True if an error is worth another attempt, as long as any are left."""
        retry_on = self.retry_on
        if retry_on is None:
            # This library's errors about the program would recur.
            is_temporary = isinstance(error, _TEMPORARY) and not isinstance(error, EndOfInput | QueueClosedError)
            return is_temporary or not isinstance(error, AsyncflowError)
        if isinstance(retry_on, tuple | type):
            return isinstance(error, retry_on)
        return bool(retry_on(error))

    def delay_s(self, failed: int, error: Exception, random: Random) -> float:
        """Return the seconds before the next attempt, after `failed` failed ones.

        Raises:
            GraphError: the user's function gives no number of seconds.
        """
        if not callable(self.backoff):
            first_s = FIRST_BACKOFF_S if self.backoff is None else float(self.backoff)
            # Half of the delay is random, so that clients that failed together do not retry together.
            longest_s = min(first_s * 2.0 ** min(failed - 1, 64), max(MOST_BACKOFF_S, first_s))
            return longest_s * (1 - random.random() / 2)
        found = self.backoff(failed, error)
        if not (_is_positive(found) or found == 0):
            raise GraphError(f"backoff= of {self.name} returned {brief(found)}; it returns seconds, 0 or more")
        return float(found)


_TEMPORARY = (KernelError, OverloadedError, DeadlineExceeded)
"""Errors of this library that may not occur the next time: errors of another run, and of a busy session."""


def _is_positive(value: object) -> TypeGuard[float]:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and 0 < float(value) < math.inf


def _is_count(value: object, least: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral) and int(value) >= least


def _tokens(rate: object) -> tuple[int, float] | None:
    """Return a rate as calls and seconds, or None: 10 is ten calls a second, and 2.5 one call every 0.4 s."""
    if isinstance(rate, tuple) and len(rate) == 2:
        return (int(rate[0]), float(rate[1])) if _is_count(rate[0], 1) and _is_positive(rate[1]) else None
    if _is_positive(rate):
        return (int(rate), 1.0) if rate == int(rate) else (1, 1 / float(rate))
    return None
