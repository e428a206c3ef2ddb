"""The primitives, to write control flow by hand: ``af.raw``.

`asyncflow.cond` and `asyncflow.while_loop` compile to these; use them directly only to study or test the executor.

Loops and branches written by hand are cut over devices like structured ones, where nodes ask for several or are placed
at random. A loop is cut if all its variables go on by one predicate that every iteration makes, which `loop_cond` may
mark; and a value goes to another device if it is clear from the switches and merges before it when it is dead. The rest
stays on one device: ``plan.explain()`` says why, and asking for two is a `PlacementError`.

What differs from structured control flow: a value inside a frame can be neither fetched nor fed, Python numbers beside
one have to be brought in with `enter`, a loop is only cut where nodes ask for several devices, and effects are ordered
within one iteration of one frame only; use `control_dependencies` for the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.control.primitives.control_trigger import control_trigger
from asyncflow.control.primitives.enter import enter
from asyncflow.control.primitives.exit import exit
from asyncflow.control.primitives.loop_cond import loop_cond
from asyncflow.control.primitives.merge import add_back_edge, merge
from asyncflow.control.primitives.next_iteration import next_iteration
from asyncflow.control.primitives.switch import switch
from asyncflow.foreign_names import public_names

__all__ = [
    "add_back_edge",
    "control_trigger",
    "enter",
    "exit",
    "loop_cond",
    "merge",
    "next_iteration",
    "switch",
]

if not TYPE_CHECKING:  # or every misspelt name would pass the type checker
    __getattr__, __dir__ = public_names("asyncflow.raw", __all__)
