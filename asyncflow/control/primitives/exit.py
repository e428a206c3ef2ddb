"""Exit: takes a value out of a loop's frame (EuroSys '18 §4.1).

Deadness: a live value leaves at once, before the loop has ended; a dead one is held until the frame ends and dropped
if a live one came.
"""

from __future__ import annotations

from asyncflow.graph.building.build import TensorLike, apply
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import define

EXIT = define("exit", lambda data: data)


def exit(data: TensorLike, *, name: str | None = None) -> Tensor:
    """`data`, a value of a loop's frame, in the frame around it."""
    return apply(EXIT, data, name=name)[0]
