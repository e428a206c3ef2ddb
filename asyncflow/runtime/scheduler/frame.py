"""State of a loop in a run: `Frame`, one activation of it, and `Iteration`, where the tokens of one tag meet.

Only `asyncflow.runtime.scheduler.scheduler` changes them; its rules say when.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncflow.compiler.plan import Dead, PlanFrame, PlanNode
from asyncflow.values import Value


@dataclass(slots=True, eq=False, repr=False)
class Frame:
    """A frame: one activation of a loop.

    Invariants: ``live`` is the number of iterations started and not ended; ``newest.next`` is None; only ``newest``
    parks tokens; ``values`` and ``pending`` are the initial tables of a new iteration, constants included; ``killer``
    is the cause of death of the first dead Enter.
    """

    info: PlanFrame
    parent: Iteration | None
    values: list[Any] = field(init=False)
    pending: list[int] = field(init=False)
    pending_enters: int = field(init=False)
    dead: dict[int, Dead] = field(default_factory=dict, init=False)
    killer: Dead | None = field(default=None, init=False)
    constant_ready: list[PlanNode] = field(default_factory=list, init=False)
    live: int = field(default=0, init=False)
    live_exits: set[PlanNode] = field(default_factory=set, init=False)
    parked: list[tuple[PlanNode, Value]] = field(default_factory=list, init=False)
    newest: Iteration | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.values, self.pending = self.info.values, self.info.pending
        self.pending_enters = self.info.n_enters

    @property
    def oldest(self) -> Iteration | None:
        """The first iteration that has not ended; None before one has started and once all have ended."""
        iteration = self.newest
        while iteration is not None and iteration.previous is not None:
            iteration = iteration.previous
        return iteration


class Iteration:
    """One iteration of a frame: the tag under which tokens meet.

    Invariants: ``outstanding`` counts nodes that are ready or running; ``pending[p]`` the inputs node p still waits
    for; ``dead`` holds, for nodes with a dead input, what killed it; ``ready_ns``, in a traced run, when nodes became
    ready.
    """

    __slots__ = (
        "_counters",
        "children",
        "dead",
        "frame",
        "index",
        "next",
        "outstanding",
        "pending",
        "previous",
        "ready_ns",
        "values",
    )

    def __init__(self, frame: Frame, index: int, previous: Iteration | None) -> None:
        self.frame = frame
        self.index = index
        self.previous = previous
        self.next: Iteration | None = None
        self.values = frame.values[:]
        self.pending = frame.pending[:]
        self.dead: dict[int, Dead] | None = dict(frame.dead) if frame.dead else None
        self.outstanding = 0
        self.children: dict[PlanFrame, Frame] = {}
        self._counters: tuple[int, ...] | None = None
        self.ready_ns: dict[PlanNode, int] | None = None

    def since(self, node: PlanNode) -> int | None:
        """Return when a node became ready; None if that is not known, or was asked for before."""
        return None if self.ready_ns is None else self.ready_ns.pop(node, None)

    def tag(self) -> str:
        """Frames and iterations from the outermost inward: ``outer/3/inner/7``; empty outside loops."""
        parts: list[str] = []
        iteration = self
        while (parent := iteration.frame.parent) is not None:
            parts.append(f"{iteration.frame.info.label}/{iteration.index}")
            iteration = parent
        return "/".join(reversed(parts))

    def counters(self) -> tuple[int, ...]:
        """Iteration numbers from the outermost loop inward."""
        if self._counters is None:
            outer = self.frame.parent
            self._counters = () if outer is None else (*outer.counters(), self.index)
        return self._counters
