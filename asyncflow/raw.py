"""The primitives, to write control flow by hand: ``af.raw``.

`asyncflow.cond` and `asyncflow.while_loop` compile to these; use them directly only to study or test the executor.

Loops and branches written by hand are cut over devices like structured ones, where nodes ask for several or are placed
at random. A loop is cut if all its variables go on by one predicate that every iteration makes, which `loop_cond` may
mark; and a value goes to another device if it is clear from the switches and merges before it when it is dead. The rest
stays on one device: ``plan.explain()`` says why, and asking for two is a `PlacementError`.

Differences from structured control flow: a value inside a frame can be neither fetched nor fed. Python numbers beside
such a value have to be brought in with `enter`. A loop is only cut where nodes ask for several devices. Effects are
ordered within one iteration of one frame only; use `control_dependencies` for the rest.
"""

from __future__ import annotations

import typing as _typing

from asyncflow.control.primitives.control_trigger import control_trigger as control_trigger
from asyncflow.control.primitives.enter import enter as enter
from asyncflow.control.primitives.exit import exit as exit
from asyncflow.control.primitives.loop_cond import loop_cond as loop_cond
from asyncflow.control.primitives.merge import add_back_edge as add_back_edge
from asyncflow.control.primitives.merge import merge as merge
from asyncflow.control.primitives.next_iteration import next_iteration as next_iteration
from asyncflow.control.primitives.switch import switch as switch
from asyncflow.foreign_names import facade as _facade

if not _typing.TYPE_CHECKING:  # type checkers see the imports above; with `__getattr__` a misspelt name would pass
    __all__, __getattr__, __dir__ = _facade("asyncflow.raw", globals())
