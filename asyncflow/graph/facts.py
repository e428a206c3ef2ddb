"""Facts that follow from the conduct of ops, and the purposes for which they refuse an op: one table of reasons."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, Protocol


class Fact(enum.Enum):
    """A difference between an op and a pure op, whose outputs depend on its inputs and attributes alone."""

    JOINS = "firings are computed together with firings of other runs"
    WAITS = "firings wait for something else to happen"
    AWAITS = "firings await a user's function"
    CALLS = "it calls user code that is not declared pure"
    CALLS_PURE = "it calls a function that the user has declared pure"
    EFFECT = "it reads or changes state"
    DRAWS = "it depends on the firing, or makes something new each time"
    BODIES = "it is a branch or loop"
    GIVEN = "its value comes from elsewhere"
    BY_HAND = "it is control flow written by hand"


class Classified(Protocol):
    """An op with its facts."""

    @property
    def facts(self) -> frozenset[Fact]:
        """The facts about it."""


class Purpose:
    """A use of nodes that some ops refuse.

    Attributes:
        reasons: facts that refuse an op, with the words for them; the most telling first.
        refused: the facts alone.
    """

    __slots__ = ("reasons", "refused")

    def __init__(self, reasons: Mapping[Fact, str]) -> None:
        self.reasons = reasons
        self.refused = frozenset(reasons)

    def allows(self, op: Classified) -> bool:
        """Return True if nodes of an op may be used so."""
        return self.refused.isdisjoint(op.facts)

    def why_not(self, op: Classified) -> str | None:
        """Return the reason why nodes of an op may not be used so; None if they may."""
        if self.allows(op):
            return None
        return next(why for fact, why in self.reasons.items() if fact in op.facts)


RECOMPUTE: Final = Purpose(
    {Fact.CALLS: "if it changes nothing, and gives the same again, declare it with @af.op(pure=True)"}
    | dict.fromkeys((Fact.WAITS, Fact.EFFECT, Fact.BY_HAND), "take it out of the function")
)
"""A gradient builds the node again. The words are advice."""

ITERATE_AGAIN: Final = Purpose(
    {
        Fact.JOINS: "it is computed together with calls of other runs, as a pool or a batch",
        Fact.AWAITS: "it awaits your function",
        Fact.WAITS: "it waits for others",
        Fact.CALLS: "it calls your function, which @af.op(pure=True) does not declare pure",
        Fact.EFFECT: "it has an effect",
        Fact.BY_HAND: "it is control flow written by hand",
    }
)
"""The compiler runs an iteration again for a gradient."""

_OUTSIDE: Final = Fact.JOINS, Fact.WAITS, Fact.AWAITS, Fact.CALLS, Fact.CALLS_PURE

RUN_AGAIN: Final = Purpose(dict.fromkeys(_OUTSIDE, "it waits for other runs, or calls user code"))
"""A run that ran out of memory starts again. Nodes that write are refused, too."""

CALL_AGAIN: Final = Purpose({Fact.CALLS: "it calls user code that is not declared pure"})
"""A call for several runs has failed, and is repeated for a part of them."""

UPDATE: Final = Purpose(
    {Fact.BODIES: "is a branch or loop", Fact.JOINS: "is a coroutine", Fact.EFFECT: "uses state or has a side effect"}
    | dict.fromkeys((Fact.WAITS, Fact.AWAITS), "is a coroutine")
    | {Fact.DRAWS: "draws random numbers"}
    | dict.fromkeys((Fact.BY_HAND, Fact.GIVEN), "has no value of its own")
)
"""The function of an update runs any number of times until no other update came between."""

SAME_FOR_ALL: Final = Purpose(
    dict.fromkeys((Fact.CALLS, Fact.CALLS_PURE, Fact.DRAWS), "it may give another value in each run")
    | dict.fromkeys((Fact.BODIES, Fact.GIVEN), "its value comes from what each run does")
)
"""Runs share the node's value. Nodes that write are refused, too."""

REPLACE: Final = Purpose(dict.fromkeys(Fact, "it does more than compute a value from its inputs"))
"""Another computation takes the node's place: at compile time, once for equal nodes or for all iterations of a loop, or
again for a gradient. `Op.is_pure` holds the answer for each op.
"""

MOVE: Final = Purpose(dict.fromkeys(set(Fact) - {Fact.DRAWS}, "it does more than compute a value"))
"""The node runs on another device than its neighbours, or, if nothing uses its outputs, not at all."""
