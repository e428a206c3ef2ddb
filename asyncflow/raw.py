"""The primitives, to write control flow by hand: ``af.raw``.

`asyncflow.cond` and `asyncflow.while_loop` compile to these; use them directly only to study or test the executor.

What differs from structured control flow: a value inside a frame can be neither fetched nor fed, Python numbers beside
one have to be brought in with `enter`, and effects are ordered within one iteration of one frame only; use
`control_dependencies` for the rest.
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
