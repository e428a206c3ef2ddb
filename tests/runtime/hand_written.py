"""Loops written with the primitives, for what `while_loop` does not build."""

from __future__ import annotations

from dataclasses import dataclass

import asyncflow as af


@dataclass(frozen=True, slots=True)
class Loop:
    """``for i in range(limit)``, and the value of `i` in each iteration that runs the body."""

    i: af.Tensor
    """The counter as the body sees it; dead in the last iteration, where the predicate fails."""
    every: af.Tensor
    """The counter in every iteration, the last one included."""
    total: af.Tensor
    """The counter after the loop."""
    frame: str

    def constant(self, value: object) -> af.Tensor:
        """`value` in every iteration."""
        return af.raw.enter(value, self.frame, constant=True)

    def found(self, pred: af.Tensor) -> af.Tensor:
        """The counter of the iteration where `pred` holds, as it leaves the loop."""
        return af.raw.exit(af.raw.switch(self.every, pred)[1])


def counting_loop(limit: af.Tensor | int, *, start: object = 0, frame: str = "loop", bound: int = 32) -> Loop:
    """A loop in the current graph that counts to `limit`."""

    def constant(value: object) -> af.Tensor:
        return af.raw.enter(value, frame, constant=True, parallel_iterations=bound)

    entered = af.raw.enter(start, frame, parallel_iterations=bound)
    i, _ = af.raw.merge(entered)
    done, body = af.raw.switch(i, af.raw.loop_cond(i < constant(limit)))
    af.raw.add_back_edge(i, af.raw.next_iteration(body + constant(1)))
    return Loop(body, i, af.raw.exit(done), frame)
