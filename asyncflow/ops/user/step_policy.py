"""`StepPolicy`: a function of the user's that decides when a step of shared work begins, and how many members join.

Batched functions, pooled loops and shared vertex maps ask the policy that they are given (`policy=`) before each step,
in place of their own rules. In Cavs (§3.2) such a policy decides which vertices are computed next. Here it decides
which requests are.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from asyncflow.errors import GraphError

#: By how much a time may have passed: ``now_s - since_s >= 0.002`` and ``now_s >= since_s + 0.002`` round differently.
_ROUNDING_S = 1e-6


class WaitingMember(NamedTuple):
    """A member that waits to join a step.

    Attributes:
        priority: priority of its run; lower numbers are more important.
        since_s: when it began to wait.
        deadline_s: when its run has to have ended; infinity without a `timeout=`.
    """

    priority: int
    since_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class NextStep:
    """The step that a policy decides on, as far as is known before it.

    Times are seconds of one clock. In tests it may be virtual time.

    Attributes:
        now_s: time at which the policy is asked.
        waiting: members that wait, at least one. They are ordered by priority, then by deadline, or by a second after
            they came if that is sooner. The members in front join first, but every priority has its share.
        joined: number of members that are there already: rows of a pool, or runs of a vertex map; 0 for a batch.
        capacity: most members that a step can have; infinity where there is no limit.
        is_idle: True if nothing in the session can go on by itself, so that more members come from outside alone.
        expected_s: ``expected_s(n)`` gives the expected seconds of a step for `n` members, from measured ones; 0.0
            before any has been measured.
    """

    now_s: float
    waiting: Sequence[WaitingMember]
    joined: int
    capacity: float
    is_idle: bool
    expected_s: Callable[[int], float]


class WaitUntil(NamedTuple):
    """The decision of a policy that no member joins now.

    Attributes:
        time_s: when to ask the policy again, on the clock of `NextStep.now_s`; it is also asked when a member comes or
            leaves, after each step, and once the session is idle. A time that has passed is an error of the policy.
    """

    time_s: float = math.inf


@runtime_checkable
class StepPolicy(Protocol):
    """A policy, such as a function: it decides when a step of shared work begins, and how many members join it.

    The session calls the policy on the event loop before each step that members wait for. The policy returns the number
    of members that join, or `WaitUntil`. No more join than there is room for. With 0, a batch is not called, and a pool
    or vertex map goes on with the members it has. The policy must not block. If it raises an error, the members fail
    with that error, and a note on the error names the policy. While a session ends, all members join unasked.

    For example, calls are made for four members at once, or when the first has waited for 2 ms::

        def four_or_2_ms(step: af.NextStep) -> int | af.WaitUntil:
            first_s = min(member.since_s for member in step.waiting)
            if len(step.waiting) >= 4 or step.now_s >= first_s + 0.002:
                return 4
            return af.WaitUntil(first_s + 0.002)

        @af.batched(policy=four_or_2_ms)
        def classify(x: af.Tensor) -> af.Tensor: ...
    """

    def __call__(self, step: NextStep, /) -> int | WaitUntil:
        """Return how many members join the next step, or when to ask again."""


def check_policy(policy: object, what: str) -> None:
    """Raise `GraphError` unless this is a policy, or None."""
    if policy is not None and not callable(policy):
        raise GraphError(f"{what}: policy is a function of an af.NextStep, or None; got {policy!r}")


def name_of(policy: object) -> str:
    """Return the name by which messages call a policy."""
    return str(getattr(policy, "__qualname__", type(policy).__qualname__))


def decide(policy: StepPolicy, step: NextStep, label: str) -> tuple[int, float]:
    """Return how many members join, and when to ask again if none does; `label` names the work in errors.

    Raises:
        Exception: the policy raised it, as a note says.
        TypeError: the policy gave something else.
        ValueError: the policy waits for a time that has passed, or for no number. Waiting so would ask it without end.
    """
    room = int(min(len(step.waiting), max(step.capacity - step.joined, 0)))
    try:
        found: object = policy(step)
    except Exception as error:
        error.add_note(f"raised by {name_of(policy)}, the policy of {label}")
        raise
    if isinstance(found, WaitUntil):
        again_s: object = found.time_s
        if not isinstance(again_s, numbers.Real) or not float(again_s) >= step.now_s - _ROUNDING_S:
            raise ValueError(
                f"{name_of(policy)}, the policy of {label}, returned {found!r} at {step.now_s!r}; the time is a "
                "number, and not past: to begin a step now, return the number of members that join"
            )
        return 0, float(again_s)
    if isinstance(found, bool) or not isinstance(found, numbers.Integral) or int(found) < 0:
        raise TypeError(
            f"{name_of(policy)}, the policy of {label}, returned {found!r}; a policy returns the number of members "
            "that join the next step, 0 or more, or af.WaitUntil(time_s)"
        )
    return min(int(found), room), math.inf
