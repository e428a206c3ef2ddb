"""Fetches and feeds read once, to be run many times: `Call`, the cache of calls, and `Prepared`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.compiler.program.request import Fetch, PlanRequest
from asyncflow.devices.captures import MOST_KEYS
from asyncflow.errors import FeedError
from asyncflow.graph.building.feeds import Feeds, as_feeds, feed_targets
from asyncflow.graph.builtin import PLACEHOLDER
from asyncflow.graph.ir import Assumption, Tensor
from asyncflow.graph.values import nest
from asyncflow.ops.arrays.known_values import assumptions_about, refuse_contradictions
from asyncflow.pickling import NotPickled
from asyncflow.runtime.values.feeds import comparable, feed_value
from asyncflow.runtime.values.fetches import (
    OnDevice,
    exchangeable,
    graph_of,
    read_fetches,
    read_streamed,
    user_value,
    user_values,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
    from pathlib import Path

    from asyncflow.compiler.plan import Plan
    from asyncflow.graph.graph import Graph
    from asyncflow.runtime.calls.plans import PlanCache
    from asyncflow.runtime.watch.trace import Trace
    from asyncflow.values import Nest, Value

_AT_HAND = (np.ndarray, np.generic, str)
"""Types of fed values that need not be waited for."""

_REMEMBERED = (Tensor, OnDevice)

_MOST_CALLS = 1_000
"""Maximum number of kinds of runs that a session remembers for one graph."""


class Call:
    """Fetches and feeds, read; what a session remembers of a kind of run.

    Attributes:
        request: what its plan is compiled for.
        structure: the nest of the fetches.
        staying: which of the fetches stay on their device.
        plan: the plan for `version` of the graph; None before the first run.
    """

    __slots__ = ("_about", "_only", "_overridden", "plan", "request", "staying", "structure", "version")

    def __init__(
        self,
        fetches: Nest,
        feeds: Sequence[Value],
        graph: Graph | None,
        *,
        regions: bool,
        all_effects: bool = False,
        streams: bool = False,
    ) -> None:
        fetched: Sequence[Fetch] = ()
        streamed: Sequence[Tensor] = ()
        self.staying: tuple[int, ...] = ()
        if streams:
            streamed, self.structure = read_streamed(fetches, graph)
        else:
            fetched, self.structure, self.staying = read_fetches(fetches, graph)
        if isinstance(feeds, Tensor | str):
            raise FeedError(f"feeds to prepare for are a list, such as [x]; got {type(feeds).__name__} {feeds!r}")
        targets = feed_targets(feeds, graph)
        root = graph_of((*fetched, *streamed), targets, graph)
        self.request = PlanRequest(root.home, tuple(fetched), targets, tuple(streamed), all_effects, regions)
        self._overridden = frozenset(x for x in targets if x.node.op is not PLACEHOLDER)
        self._about: tuple[int, list[Assumption]] = (-1, [])
        self._only = fetched[0] if self.structure is nest.LEAF and fetched and not self.staying else None
        self.version = -1
        self.plan: Plan | None = None

    @property
    def label(self) -> str:
        """The name of the first thing that it fetches."""
        return label_of(self.request.fetches)

    def check(self, values: Sequence[Value]) -> tuple[list[Value], bool]:
        """Return the values as the run will see them, and True if some still have to be copied or read.

        Raises:
            FeedError: there are too many or too few, or one does not fit.
        """
        feeds = self.request.feeds
        if len(values) != len(feeds):
            listed = ", ".join(tensor.name for tensor in feeds)
            raise FeedError(f"this call was prepared with {len(feeds)} feeds ({listed}); got {len(values)} values")
        checked = []
        waits = False
        for tensor, value in zip(feeds, values, strict=True):
            value = feed_value(tensor, value)
            checked.append(value)
            if not isinstance(value, _AT_HAND):
                waits = True
        if self._overridden:
            self._refuse_contradictions(checked)
        return checked, waits

    def _refuse_contradictions(self, checked: Sequence[Value]) -> None:
        """Check fed values that replace computed ones against the assumptions of the graph."""
        root = self.request.graph
        if self._about[0] != len(root.assumptions):
            self._about = len(root.assumptions), assumptions_about(root, self._overridden)
        if self._about[1]:
            pairs = zip(self.request.feeds, checked, strict=True)
            fed = {x: comparable(x, value) for x, value in pairs if x in self._overridden}
            refuse_contradictions(self._about[1], fed)

    def result(self, plan: Plan, values: Sequence[Value], *, allow_dead: bool) -> Nest:
        """The results of the run, of the values that its plan fetched.

        Raises:
            FetchError: one is dead.
        """
        if self._only is not None and plan.fetches[0] == 0:  # most runs
            return user_value(self._only, values[0], False, allow_dead)
        fetched = user_values(self.request.fetches, plan.fetches, values, allow_dead=allow_dead)
        for index in self.staying:
            fetched[index] = exchangeable(fetched[index])
        return self.structure.unflatten(fetched)


def label_of(fetches: Nest) -> str:
    """The name of the first of the fetches; empty if there are none."""
    first = next(iter(nest.flatten(fetches)[0]), "")
    return first if isinstance(first, str) else str(getattr(first, "name", ""))


@dataclass(frozen=True, slots=True)
class CallCache:
    """The calls a session remembers: a run that asks for the same as one before does not read it again.

    They are kept beside the plans of their graphs, and go with them.
    """

    graph: Graph | None
    plans: PlanCache
    regions: bool

    def new(self, fetches: Nest, feeds: Sequence[Value], *, streams: bool = False) -> Call:
        """A call that is not remembered."""
        return Call(fetches, feeds, self.graph, regions=self.regions, streams=streams)

    def of_run(self, fetches: Nest, feeds: object) -> tuple[Call, tuple[Value, ...]]:
        """The call of a run, and its values to feed.

        The call is remembered if it fetches a tensor or a flat list or tuple of tensors.

        Raises:
            FeedError: `feeds` is no mapping, or a value is not a nest like its key.
        """
        fed: Feeds = feeds if type(feeds) is dict else as_feeds(feeds)
        # Every run passes here: so spell out `tensor.graph.root`, and check for nested keys last.
        kind = type(fetches)
        tensor: object = None
        key: tuple[object, ...] = ()
        if kind is Tensor or kind is OnDevice:
            tensor, key = fetches, (fetches, *fed)
        elif kind in (list, tuple) and fetches and all(isinstance(fetch, _REMEMBERED) for fetch in fetches):
            tensor, key = fetches[0], (kind, len(fetches), *fetches, *fed)
        if type(tensor) is OnDevice:
            tensor = tensor.fetch
        calls: dict[object, Call] | None = None
        if isinstance(tensor, Tensor):
            home = tensor.node._home
            graph = home.ref() or home.graph
            calls = self.plans.of(graph.root if graph.is_subgraph else graph).calls
            if (call := calls.get(key)) is not None:
                return call, tuple(fed.values())
        if any(isinstance(each, tuple) for each in fed):
            return self.of_run(fetches, as_feeds(fed))
        call = self.new(fetches, tuple(fed))
        if calls is not None:
            if len(calls) >= _MOST_CALLS:
                calls.clear()
            calls[key] = call
        return call, tuple(fed.values())

    def of_function(self, graph: Graph, outputs: Nest, feeds: Mapping[Tensor, Value]) -> Call:
        """The call of a traced `@af.function`, whose graph serves no other."""
        calls = self.plans.of(graph).calls
        call: Call | None = calls.get(None)
        if call is None:
            call = calls[None] = Call(outputs, tuple(feeds), graph, regions=self.regions, all_effects=True)
        return call


class Prepared(NotPickled):
    """A run that only lacks the values to feed: ``await prepared(value, ...)``. Made by `Session.prepare`.

    It stays valid when the graph grows; the next call then compiles anew.
    """

    __slots__ = ("_call", "_capture", "_graph", "_known", "_run")
    _instead = "it belongs to a session of this process; prepare it in the other one"

    def __init__(
        self,
        run: Callable[..., Coroutine[object, object, Nest]],
        call: Call,
        capture: Callable[..., Awaitable[None]] | None = None,
    ) -> None:
        self._run = run  # `Session.run_call`
        self._capture = capture  # `Runs.capture`, for a call that captures ahead
        self._known: set[tuple[object, ...]] = set()
        self._call = call
        self._graph = call.request.graph  # a request does not keep the graph alive

    def __repr__(self) -> str:
        names = ", ".join(tensor.name for tensor in self._call.request.feeds)
        return f"<Prepared ({names}) -> {len(self._call.request.fetches)} fetches>"

    def __call__(
        self,
        *values: Value,
        timeout: float | None = None,
        trace: Trace | str | Path | None = None,
        allow_dead: bool = False,
        atomic: bool = False,
        priority: int = 0,
    ) -> Coroutine[object, object, Nest]:
        """Run with these values, in the order of the prepared feeds; otherwise as `Session.run`."""
        terms = timeout, trace, allow_dead, atomic, priority
        if self._capture is not None:
            return self._captured(self._capture, values, terms)
        return self._run(self._call, values, *terms)

    async def _captured(
        self, capture: Callable[..., Awaitable[None]], values: Sequence[Value], terms: tuple[object, ...]
    ) -> Nest:
        if len(self._known) < MOST_KEYS:
            kinds = tuple([(type(x), getattr(x, "dtype", None), getattr(x, "shape", x)) for x in values])
            if kinds not in self._known:
                self._known.add(kinds)
                await capture(self._call, values)
        return await self._run(self._call, values, *terms)
