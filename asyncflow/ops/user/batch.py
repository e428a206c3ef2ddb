"""`Batch` and `Pool`: how firings of one function, or activations of one loop, are computed together."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

from asyncflow.errors import GraphError
from asyncflow.ops.user.step_policy import StepPolicy, check_policy


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch: options for firings of one function, of any runs of a session and any iterations, that become one call.

    No gradient goes through such a call.

    Args:
        max_size: most firings that share a call.
        max_delay_s: seconds that a firing may wait for others although nothing else is left to do. 0: none; a firing
            that is alone never waits, and batches grow as the device falls behind. No more than half of the time that
            it has until its deadline.
        max_bytes: most bytes of inputs that share a call; a firing that has more is alone. None for no limit.
        cost: "learned" chooses the size of a call by the durations of earlier calls. It waits briefly for clients that
            usually send their next request at once; "none" takes all waiting firings.
        pad: a number or string. Firings whose arguments differ in extents that the graph leaves open share a call:
            each argument is padded with it, at its end, to the longest. The function takes one more argument,
            ``lengths``: the member's own extents, in the order of arguments and axes; a scalar if there is one.
            Results are cut to these again.
        bucket: ascending extents, each for lengths up to that extent, or a function of a length that gives an extent.
            Works as `pad` (0 without it), but to that extent, and only firings with equal ones share a call. A length
            above the last extent stays as it is.
        ragged: "packed": such arguments differ in their first extent, and the function gets them side by side, with no
            padding: ``[total, ...]``, the others as ``[members, ...]``, and one more argument, ``offsets``: member k
            has the rows from ``offsets[k]`` to ``offsets[k + 1]``; several such arguments have a row of them each.
            It is written for all members at once, and each result has a row for each row or for each member.
        policy: decides when a call is made, and for how many, in place of `max_delay_s` and `cost`; see `StepPolicy`.

    Raises:
        GraphError: an argument is out of its range.
    """

    max_size: int = 64
    _: KW_ONLY
    max_delay_s: float = 0.0
    max_bytes: int | None = None
    cost: str = "learned"
    pad: bool | float | str | None = None
    bucket: Sequence[int] | Callable[[int], int] | None = None
    ragged: str | None = None
    policy: StepPolicy | None = None

    def __post_init__(self) -> None:
        counts: dict[str, object] = {"max_size": self.max_size, "max_bytes": self.max_bytes}
        for name, value in counts.items():
            if value is None and name == "max_bytes":
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
                raise GraphError(f"Batch: {name} is an integer of at least 1; got {value!r}")
        delay: object = self.max_delay_s
        if isinstance(delay, bool) or not isinstance(delay, numbers.Real) or not 0 <= float(delay) < math.inf:
            raise GraphError(f"Batch: max_delay_s is a number of seconds, 0 or more; got {delay!r}")
        if self.cost not in ("learned", "none"):
            raise GraphError(f'Batch: cost is "learned" or "none"; got {self.cost!r}')
        check_policy(self.policy, "Batch")
        if self.policy is not None and (self.max_delay_s or self.cost == "none"):
            raise GraphError(
                "Batch: policy decides when a call is made and for how many; leave out max_delay_s= and cost="
            )
        if self.ragged not in (None, "packed"):
            raise GraphError(f'Batch: ragged is "packed" or None; got {self.ragged!r}')
        if self.ragged is not None and (self.pad is not None or self.bucket is not None):
            raise GraphError('Batch: ragged="packed" pads nothing; leave out pad= and bucket=')
        if self.pad is not None and not isinstance(self.pad, numbers.Real | str):
            raise GraphError(f"Batch: pad is a number or a string; got {self.pad!r}")
        if self.bucket is not None and not callable(self.bucket):
            object.__setattr__(self, "bucket", _edges(self.bucket))

    @property
    def tells(self) -> str | None:
        """The name of the argument that tells the function whose rows are how long; None if all are alike."""
        if self.ragged is not None:
            return "offsets"
        return None if self.pad is None and self.bucket is None else "lengths"


def _edges(bucket: object) -> tuple[int, ...]:
    edges = tuple(bucket) if isinstance(bucket, Iterable) else ()
    are_extents = all(isinstance(edge, numbers.Integral) and not isinstance(edge, bool) for edge in edges)
    if not edges or not are_extents or edges[0] < 1 or any(a >= b for a, b in pairwise(edges)):
        raise GraphError(f"Batch: bucket is ascending extents of at least 1, or a function of one; got {bucket!r}")
    return tuple(map(int, edges))


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool: options for activations of one loop, in any runs of a session, that are stepped together (continuous
    batching).

    No gradient goes through such a loop.

    Args:
        capacity: most activations that are stepped together; more wait.
        policy: decides when activations that wait join, and how many; see `StepPolicy`. Without one they join as soon
            as there is room.

    Raises:
        GraphError: `capacity` is no integer of at least 1, or `policy` no function.
    """

    capacity: int = 64
    _: KW_ONLY
    policy: StepPolicy | None = None

    def __post_init__(self) -> None:
        check_policy(self.policy, "Pool")
        value: object = self.capacity
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
            raise GraphError(f"Pool: capacity is an integer of at least 1; got {value!r}")
