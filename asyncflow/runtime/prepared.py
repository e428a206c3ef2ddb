"""`Prepared`: fetches and feeds read once, to be run many times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncflow.errors import FeedError
from asyncflow.graph.ir import Tensor
from asyncflow.runtime.feeds import feed_targets, feed_value
from asyncflow.runtime.fetches import graph_of, read_fetches, read_streamed
from asyncflow.runtime.plans import PlanRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from asyncflow.compiler.plan import Plan
    from asyncflow.graph.graph import Graph
    from asyncflow.runtime.fetches import Fetch
    from asyncflow.runtime.session import Session
    from asyncflow.runtime.trace import Trace


class Call:
    """Fetches and feeds, read; what a session remembers of a kind of run.

    Attributes:
        request: what its plan is compiled for.
        structure: the nest of the fetches.
        plan: the plan for `version` of the graph; None before the first run.
    """

    __slots__ = ("plan", "request", "structure", "version")

    def __init__(
        self,
        fetches: Any,
        feeds: Sequence[Any],
        graph: Graph | None,
        *,
        regions: bool,
        all_effects: bool = False,
        streams: bool = False,
    ) -> None:
        fetched: Sequence[Fetch] = ()
        streamed: Sequence[Tensor] = ()
        if streams:
            streamed, self.structure = read_streamed(fetches, graph)
        else:
            fetched, self.structure = read_fetches(fetches, graph)
        if isinstance(feeds, Tensor | str):
            raise FeedError(f"feeds to prepare for are a list, such as [x]; got {type(feeds).__name__} {feeds!r}")
        targets = feed_targets(feeds, graph)
        root = graph_of((*fetched, *streamed, *targets), graph)
        self.request = PlanRequest(root, tuple(fetched), targets, tuple(streamed), all_effects, regions)
        self.version = -1
        self.plan: Plan | None = None

    def check(self, values: Sequence[Any]) -> list[Any]:
        """The values as the run will see them.

        Raises:
            FeedError: there are too many or too few, or one does not fit.
        """
        feeds = self.request.feeds
        if len(values) != len(feeds):
            listed = ", ".join(tensor.name for tensor in feeds)
            raise FeedError(f"this call was prepared with {len(feeds)} feeds ({listed}); got {len(values)} values")
        return [feed_value(tensor, value) for tensor, value in zip(feeds, values, strict=True)]


class Prepared:
    """A run that only lacks the values to feed: ``await prepared(value, ...)``. Made by `Session.prepare`.

    It stays valid when the graph grows; the next call then compiles anew.
    """

    __slots__ = ("_call", "_session")

    def __init__(self, session: Session, call: Call) -> None:
        self._session = session
        self._call = call

    def __repr__(self) -> str:
        names = ", ".join(tensor.name for tensor in self._call.request.feeds)
        return f"<Prepared ({names}) -> {len(self._call.request.fetches)} fetches>"

    async def __call__(
        self,
        *values: Any,
        timeout: float | None = None,
        trace: Trace | str | Path | None = None,
        allow_dead: bool = False,
    ) -> Any:
        """Runs with these values, in the order of the feeds it was prepared with; else as `Session.run`."""
        return await self._session.run_call(self._call, values, timeout, trace, allow_dead)
