"""NextIteration: carries a value to the next iteration of its frame (EuroSys '18 §4.1).

The first value to arrive starts the iteration; if `parallel_iterations` are live it waits, parked, until the oldest
has ended. Deadness: a dead value stops here, and so ends the loop.
"""

from __future__ import annotations

from asyncflow.graph.building.build import TensorLike, apply
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import define

NEXT_ITERATION = define("next_iteration", lambda data: data)


def next_iteration(data: TensorLike, *, name: str | None = None) -> Tensor:
    """`data` in the next iteration."""
    return apply(NEXT_ITERATION, data, name=name)[0]
