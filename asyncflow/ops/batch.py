"""`Batch` and `Pool`: how firings of one function, or activations of one loop, are computed together."""

from __future__ import annotations

import math
import numbers
from dataclasses import KW_ONLY, dataclass

from asyncflow.errors import GraphError


@dataclass(frozen=True, slots=True)
class Batch:
    """How firings of one function, of any runs of a session and any iterations, become one call.

    Args:
        max_size: most firings that share a call.
        max_delay_s: seconds that a firing may wait for others although nothing else is left to do. 0: none; a firing
            that is alone never waits, and batches grow as the device falls behind.
        max_bytes: most bytes of inputs that share a call; a firing that has more is alone. None for no limit.
        cost: "learned": how many share a call is chosen from what calls of each size took; "none": as many as there
            are.

    Raises:
        GraphError: an argument is out of its range.
    """

    max_size: int = 64
    _: KW_ONLY
    max_delay_s: float = 0.0
    max_bytes: int | None = None
    cost: str = "learned"

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


@dataclass(frozen=True, slots=True)
class Pool:
    """How activations of one loop, in any runs of a session, are stepped together (continuous batching).

    Args:
        capacity: most activations that are stepped together; more wait.

    Raises:
        GraphError: `capacity` is no integer of at least 1.
    """

    capacity: int = 64

    def __post_init__(self) -> None:
        value: object = self.capacity
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
            raise GraphError(f"Pool: capacity is an integer of at least 1; got {value!r}")
