"""Limits of functions: their meaning, and values that are no limit."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.ops.user.limits import CallLimits

SCALAR = af.spec("float64", ())


def same(x: Any) -> Any:
    return x


async def lately(error: Exception) -> bool:
    return True


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"timeout": 0}, r"@op: timeout= of same is a number of seconds above 0; got 0"),
        ({"timeout": -1.0}, r"timeout= of same is a number of seconds above 0; got -1.0"),
        ({"retries": -1}, r"retries= of same is a number of attempts, 0 or more; got -1"),
        ({"retries": True}, r"retries= of same is a number of attempts, 0 or more; got True"),
        ({"max_concurrency": 0}, r"max_concurrency= of same is a number of calls, at least 1; got 0"),
        ({"rate": 0}, r"rate= of same is a number of calls per second above 0, or a pair .*; got 0"),
        ({"rate": (2.5, 1)}, r"rate= of same is .*; got \(2.5, 1\)"),
        ({"rate": (2, 0)}, r"rate= of same is .*; got \(2, 0\)"),
        ({"retries": 1, "backoff": -1}, r"backoff= of same is a number of seconds, 0 or more, or a function; got -1"),
        ({"retries": 1, "retry_on": BaseException}, r"retry_on= of same is a class of errors, .* never retried; got"),
        ({"retries": 1, "retry_on": ()}, r"retry_on= of same is a class of errors, .*; got \(\)"),
        ({"retries": 1, "retry_on": "no"}, r"retry_on= of same is a class of errors, .*; got 'no'"),
        ({"retries": 1, "retry_on": lately}, r"retry_on= of same is .* a function of an error, not async; .*; got"),
        ({"rate": 1, "backoff": 2.0}, r"backoff= of same is for retries, and retries= is 0; got 2.0"),
        ({"rate": 1, "retry_on": OSError}, r"retry_on= of same is for retries, and retries= is 0; got <class"),
    ],
)
def test_a_limit_out_of_its_range_is_an_error_at_the_decorator(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(af.GraphError, match=message):
        af.op(outputs=SCALAR, **limits)(same)


@pytest.mark.parametrize(
    ("rate", "tokens", "period_s"),
    [(10, 10, 1.0), (2.5, 1, 0.4), ((100, 60), 100, 60.0), (np.float64(0.5), 1, 2.0), ((np.int64(3), 0.5), 3, 0.5)],
)
def test_a_rate_is_calls_and_seconds(rate: Any, tokens: int, period_s: float) -> None:
    limits = CallLimits("f", rate=rate)
    assert (limits.tokens, limits.period_s) == (tokens, period_s)


def test_functions_without_limits_have_none() -> None:
    assert af.op(outputs=SCALAR, retries=0, timeout=None)(same).limits is None
    assert af.op(outputs=SCALAR)(same).limits is None
    assert not af.op(outputs=SCALAR)(same).op.conduct.is_async
    assert af.op(outputs=SCALAR, timeout=1)(same).op.conduct.is_async


def test_calls_of_a_stateful_plain_function_take_turns() -> None:
    async def awaited(x: Any) -> Any:
        return x

    def one(function: Any, **limits: Any) -> int | None:
        found = af.op(outputs=SCALAR, stateful=True, timeout=1, **limits)(function).limits
        assert found is not None
        return found.max_concurrency

    assert one(same) == 1
    assert one(same, max_concurrency=3) == 3
    assert one(awaited) is None


def test_delays_double_up_to_a_minute_less_a_random_part() -> None:
    limits, draw = CallLimits("f", retries=20, backoff=0.5), Random(0)
    for failed, longest_s in ((1, 0.5), (2, 1.0), (3, 2.0), (7, 32.0), (8, 60.0), (2000, 60.0)):
        delays = [limits.delay_s(failed, OSError(), draw) for _ in range(200)]
        assert longest_s / 2 <= min(delays) < 0.6 * longest_s < 0.9 * longest_s < max(delays) <= longest_s
    assert CallLimits("f", retries=1).delay_s(1, OSError(), draw) <= 0.1
    assert CallLimits("f", retries=1, backoff=0).delay_s(1, OSError(), draw) == 0
    assert 60 <= CallLimits("f", retries=1, backoff=120).delay_s(1, OSError(), draw) <= 120


def test_a_function_says_the_delays() -> None:
    limits = CallLimits("f", retries=1, backoff=lambda failed, error: failed * float(str(error)))
    assert limits.delay_s(2, OSError("1.5"), Random(0)) == 3.0
    with pytest.raises(af.GraphError, match=r"backoff= of f returned -2.0; it returns seconds, 0 or more"):
        limits.delay_s(2, OSError("-1"), Random(0))


@pytest.mark.parametrize(
    ("retry_on", "retried", "not_retried"),
    [
        (
            None,
            [OSError(), TypeError(), TimeoutError(), af.OverloadedError("busy"), af.KernelError("other run")],
            [
                af.GraphError("no"),
                af.FeedError("no"),
                af.SessionClosedError("no"),
                af.EndOfInput("no"),
            ],
        ),
        (OSError, [OSError(), ConnectionError()], [TypeError(), af.GraphError("no")]),
        ((OSError, KeyError), [KeyError()], [ValueError()]),
        (lambda error: "429" in str(error), [OSError("429 too many")], [OSError("404")]),
    ],
)
def test_which_errors_are_retried(retry_on: Any, retried: list[Exception], not_retried: list[Exception]) -> None:
    limits = CallLimits("f", retries=1, retry_on=retry_on)
    assert all(map(limits.is_retried, retried))
    assert not any(map(limits.is_retried, not_retried))
