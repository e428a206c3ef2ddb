"""Runs a plan by hand: firings are held until the test lets them complete, in whatever order it likes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncflow as af
from asyncflow.runtime.scheduler.frame import Iteration
from asyncflow.runtime.scheduler.scheduler import Scheduler
from asyncflow.runtime.values.feeds import feed_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asyncflow.compiler.plan import Partition, PlanNode
    from asyncflow.runtime.scheduler.scheduler import Firing

NOTHING = (0, 0, 0, 0, 0)
"""The statistics of a scheduler that holds nothing."""


def step(name: str) -> Callable[..., Any]:
    """An op of that name that gives its first input back; a firing of it is held until the test completes it."""

    @af.op(outputs=lambda first, *_: first, name=name)
    def first(x: Any, *_: Any) -> Any:
        return x

    return first


def partition_of(fetches: Any, feeds: Mapping[af.Tensor, Any]) -> Partition:
    """Return the partition that a session would run for these fetches and feeds, with single nodes instead of
    regions.
    """
    return af.Session(debug=True, regions=False).plan(fetches, list(feeds)).partitions[0]


def label(node: PlanNode, iteration: Iteration) -> str:
    """``node@tag``, without the names of the loops around the node; the name alone outside loops."""
    tag, path = iteration.tag(), iteration.frame.info.path
    return f"{node.name.removeprefix(f'{path[-1]}/body/')}@{tag}" if tag else node.name


class ByHand:
    """A started scheduler and the firings it has handed out."""

    def __init__(
        self,
        fetches: Any,
        feeds: Mapping[af.Tensor, Any] | None = None,
        *,
        max_iterations: int | None = None,
        seed: int | None = None,
    ) -> None:
        checked = {tensor: feed_value(tensor, value) for tensor, value in (feeds or {}).items()}
        self.scheduler = Scheduler(partition_of(fetches, checked), max_iterations=max_iterations, seed=seed)
        self.history: list[str] = []
        self._firings: dict[str, Firing] = {}
        self.scheduler.start(checked.values())
        self._collect()

    @property
    def held(self) -> set[str]:
        """The firings handed out and not completed."""
        return set(self._firings)

    @property
    def firings(self) -> list[Firing]:
        """The same, as the scheduler gave them."""
        return list(self._firings.values())

    @property
    def results(self) -> list[Any]:
        """The fetched values so far."""
        return self.scheduler.results

    @property
    def live_iterations(self) -> int:
        """Iterations of loops that have started and not ended."""
        return self.scheduler.statistics().iterations - (not self.scheduler.done)

    def complete(self, *labels: str) -> None:
        """Lets these firings complete, one after the other."""
        for name in labels:
            node, iteration, inputs = self._firings.pop(name)
            assert node.kernel is not None
            self.scheduler.complete(node, iteration, node.kernel(*inputs))
            self._collect()

    def complete_all_but(self, *names: str) -> None:
        """Lets everything complete, also what becomes ready on the way, except firings of these nodes."""
        while ready := [held for held in self._firings if held.partition("@")[0] not in names]:
            self.complete(ready[0])

    def go_on(self) -> None:
        """Let iterations begin that have asked for memory."""
        self.scheduler.asks.clear()
        self._collect()

    def _collect(self) -> None:
        while (firing := self.scheduler.next_firing()) is not None:
            name = label(firing[0], firing[1])
            assert name not in self.history, f"{name} fired twice under one tag"
            self.history.append(name)
            self._firings[name] = firing
