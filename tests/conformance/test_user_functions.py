"""One rule for functions of the user's: on threads until they have proved short, wherever they appear."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.clocks import LIGHT_NS, WorkClock
from tests.patience import PATIENCE_S

FLOAT = af.spec("float64", ())
SLOW_NS = 50_000_000
ROWS = 5
WHO: ContextVar[str] = ContextVar("who", default="nobody")


class Watched:
    """A function that is short until it is told to be slow, and knows where it was called.

    Args:
        clock: of the test.
    """

    def __init__(self, clock: WorkClock) -> None:
        self.clock = clock
        self.loop_thread = threading.get_ident()
        self.takes_ns = LIGHT_NS
        self.calls: list[tuple[bool, int]] = []
        self.callers: list[str] = []

    def __call__(self, x: Any) -> Any:
        self.calls.append((threading.get_ident() == self.loop_thread, self.takes_ns))
        self.callers.append(WHO.get())
        self.clock.wait(self.takes_ns)
        return x * 2.0

    def on_loop(self, takes_ns: int) -> int:
        """Return the number of calls of `takes_ns` that held the event loop."""
        return self.calls.count((True, takes_ns))


Build = Callable[[Any, Any], Any]
"""``build(op, x)`` returns the fetch for a vector `x` of ROWS elements."""


def vertices(op: Any, x: Any, *, share: bool = False) -> Any:
    @af.vertex_function(state=af.spec("float64", (1,)), children=1)
    def double(v: af.Vertex) -> None:
        seen = op(v.pull() + v.gather(0)[0] * 0.0)
        v.push(seen, "y")
        v.scatter(af.reshape(seen, (1,)))

    chains = af.InputGraph.chain([2, ROWS - 2])
    return af.vertex_map(double, chains, x, share=share).pushes["y"]


def in_a_loop(op: Any, x: Any) -> Any:
    _, y = af.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, af.map_fn(op, y) / 2.0), (0, x))
    return y * 2.0


def pooled(op: Any, x: Any) -> Any:
    _, y = af.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, op(y) / 2.0), (0, x[0]), pool=af.Pool(4))
    return af.broadcast_to(y * 2.0, (ROWS,))


PLACES: dict[str, tuple[Build, dict[str, Any]]] = {
    "alone": (lambda op, x: af.stack([op(x[k]) for k in range(ROWS)]), {}),
    "map_fn": (lambda op, x: af.map_fn(op, x) + 0.0, {}),
    "vmap": (lambda op, x: af.vmap(op)(x), {}),
    "rows": (af.map_fn, {"rows": True}),
    "vertices": (vertices, {}),
    "shared vertices": (partial(vertices, share=True), {}),
    "loop": (in_a_loop, {}),
    "batch": (lambda op, x: af.stack([op(x[k]) for k in range(ROWS)]), {"batch": af.Batch(8)}),
    "pool": (pooled, {}),
}


@pytest.mark.parametrize(
    ("place", "regions"), [*((place, True) for place in PLACES), ("map_fn", False), ("loop", False)]
)
@pytest.mark.filterwarnings("ignore:.* takes one row:UserWarning")
async def test_a_function_that_turns_slow_holds_the_loop_once(place: str, regions: bool, work: WorkClock) -> None:
    """Behaviour 108: by the clock on the wall, call by call; and a function that gets short returns to the loop."""
    watched, (build, options) = Watched(work), PLACES[place]
    with af.Graph() as graph:
        x = af.placeholder("float64", (ROWS,))
        y = build(af.op(watched, outputs=FLOAT, **options), x)  # type: ignore[call-overload]
    value = np.full(ROWS, 1.5)
    async with af.Session(graph, regions=regions) as session:

        async def run(times: int) -> None:
            for _ in range(times):
                assert np.array_equal(await session.run(y, {x: value}), value * 2)

        await run(4)
        assert not any(on_loop for on_loop, _ in watched.calls[:8])
        await run(20)
        assert watched.calls[-1][0], "a short one has not come to the loop"
        watched.takes_ns = SLOW_NS
        await run(6)
        assert watched.on_loop(SLOW_NS) == 1
        watched.takes_ns = LIGHT_NS
        await run(100)
        assert watched.calls[-1][0], "one that is short again has not come back"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.filterwarnings("ignore:.* takes one row:UserWarning")
async def test_a_function_that_waits_now_and_then_stays_on_threads(place: str, work: WorkClock) -> None:
    """Behaviour 108: each tenth call waits, which takes no time of the processor."""
    watched, (build, options) = Watched(work), PLACES[place]
    with af.Graph() as graph:
        x = af.placeholder("float64", (ROWS,))
        y = build(af.op(watched, outputs=FLOAT, **options), x)  # type: ignore[call-overload]
    async with af.Session(graph) as session:
        for number in range(100):
            watched.takes_ns = SLOW_NS if number % 10 == 9 else LIGHT_NS
            await session.run(y, {x: np.ones(ROWS)})
    assert watched.on_loop(SLOW_NS) <= 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.filterwarnings("ignore:.* takes one row:UserWarning")
async def test_context_timeouts_and_runs_of_its_own(place: str, work: WorkClock) -> None:
    """Behaviour 108: it has its caller's context, may ask for a run, and a run that is over calls it no more."""
    watched, (build, options) = Watched(work), PLACES[place]
    is_held, asked = threading.Event(), list[float]()
    with af.Graph() as graph:
        x = af.placeholder("float64", (ROWS,))
        other = af.placeholder("float64", ())
        small = other + 1.0

    def function(v: Any) -> Any:
        assert threading.get_ident() != watched.loop_thread
        asked.append(float(np.asarray(inner.run_threadsafe(small, {other: 1.0}).result(PATIENCE_S))))
        return watched(v)

    def held(v: Any) -> Any:
        loop.call_soon_threadsafe(began.set)
        assert is_held.wait(PATIENCE_S)
        watched.calls.append((threading.get_ident() == watched.loop_thread, SLOW_NS))
        return v

    with graph:
        y = build(af.op(function, outputs=FLOAT, **options), x)  # type: ignore[call-overload]
        z = build(af.op(held, outputs=FLOAT, **options), x)  # type: ignore[call-overload]
    loop, began = asyncio.get_running_loop(), asyncio.Event()
    async with af.Session(graph) as session, af.Session(graph) as inner:
        WHO.set("me")
        for _ in range(12):
            await session.run(y, {x: np.ones(ROWS)})
        assert set(watched.callers) == {"me"} and set(asked) == {2.0}
        waits = asyncio.ensure_future(session.run(z, {x: np.ones(ROWS)}))
        await began.wait()
        waits.cancel()
        await asyncio.sleep(0)
        is_held.set()
        with pytest.raises(asyncio.CancelledError):
            await waits
    assert watched.on_loop(SLOW_NS) == 0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.filterwarnings("ignore:.* takes one row:UserWarning")
async def test_a_deadline_passes_in_a_slow_function(place: str, work: WorkClock) -> None:
    """Behaviour 108: the run ends as late, not as done, and no further row is called."""
    is_held, calls = threading.Event(), list[int]()
    loop_thread, (build, options) = threading.get_ident(), PLACES[place]

    def held(v: Any) -> Any:
        calls.append(threading.get_ident())
        assert is_held.wait(PATIENCE_S)
        return v

    with af.Graph() as graph:
        x = af.placeholder("float64", (ROWS,))
        y = build(af.op(held, outputs=FLOAT, **options), x)  # type: ignore[call-overload]
    async with af.Session(graph) as session:
        asyncio.get_running_loop().call_later(0.1, is_held.set)
        with pytest.raises(af.DeadlineExceeded):
            await session.run(y, {x: np.ones(ROWS)}, timeout=0.05)
    assert loop_thread not in calls
    # Of what several runs share, a call that has begun goes on to its end.
    assert len(calls) <= (ROWS if place in ("alone", "batch", "shared vertices") else 1)
