"""The states of MAPL '17 §3.2: values of variables, and values in transit.

The paper keeps a queue of values on each edge. Here a value stays where it was made; values in transit are the inputs
that waiting firings find. Nothing else distinguishes states: two ways to one state are the same, whatever was read and
forgotten on the way.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np

from asyncflow.graph.ir import Node, Tensor
from asyncflow.values import Value

Tag: TypeAlias = tuple[int, ...]
"""The run, and the iterations of the loops around, outermost first."""

Firing: TypeAlias = tuple[Node, Tag]
"""A node in one context, where it fires at most once."""


@dataclass(slots=True)
class ProgramState:
    """A state of one or more runs, changed in place by the rules.

    Attributes:
        memory: values of resources, by their keys.
        values: values that nodes have made.
        waiting: firings that have not been, in the order in which they were written; of a loop, the iteration that its
            predicate is about, or -1 before it began.
        done: firings that have been.
        decided: the branch that each cond takes, and the number of iterations that each loop has made, once known.
        failing: firings whose kernel raises on inputs that are there; each may end the run, now or later.
    """

    memory: dict[Hashable, Value]
    values: dict[tuple[Tensor, Tag], Value]
    waiting: dict[Firing, int]
    done: set[Firing]
    decided: dict[Firing, int]
    failing: dict[Firing, Exception]

    def copy(self) -> ProgramState:
        """Return an independent copy."""
        copied = [getattr(self, each.name).copy() for each in fields(self)]
        return ProgramState(*copied)


def digest(value: Value) -> Hashable:
    """Equal for values of the same bits."""
    if isinstance(value, tuple):  # of a queue
        return tuple(map(digest, value))
    if not isinstance(value, np.ndarray | np.generic):
        return value
    if value.dtype.kind in "OT":
        return str(value.dtype), value.shape, str(value.tolist())
    return str(value.dtype), value.shape, value.tobytes()
