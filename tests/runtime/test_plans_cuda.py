"""Plans for cards: before a session is entered, and their explanation of loops."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.cuda import device
from asyncflow.devices.cuda.transfers.pinned import ALIGNMENT, shared_slab
from asyncflow.errors import SessionClosedError
from asyncflow.foreign_names import install
from tests.conftest import small_cards
from tests.fake_cupy import FakeCupy
from tests.patience import PATIENCE_S

WEIGHTS = np.arange(3000, dtype=np.float32)


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with small_cards(0) as fake:
        yield fake


def program() -> tuple[af.Graph, af.Tensor, af.Tensor]:
    """A loop in a region with a large constant in it and one outside."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (None,))
        y = af.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * WEIGHTS + 1.0), (0, x + WEIGHTS[::-1].copy()))[1]
    return graph, x, y


def expected(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    y = x + WEIGHTS[::-1]
    for _ in range(3):
        y = y * WEIGHTS + np.float32(1)
    return y


@pytest.mark.parametrize(
    "options",
    [{}, {"regions": False}, {"compute_streams": 2}, {"memory_limit": 1 << 20}, {"cuda_graphs": True}],
    ids=str,
)
def test_a_plan_before_the_session_is_entered(cupy: FakeCupy, options: dict[str, Any]) -> None:
    graph, x, y = program()
    session = af.Session(graph, ["cuda:0"], **options)
    plan = session.plan(y, [x])
    assert "partition on cuda:0" in plan.explain(source=True)
    value = np.ones(3000, np.float32)

    async def main() -> None:
        async with session:
            assert session.plan(y, [x]) is plan
            for _ in range(2):
                np.testing.assert_allclose(await session.run(y, {x: value}), expected(value), rtol=1e-6)

    af.run(main())


async def test_a_plan_on_the_event_loop_before_the_session_is_entered(cupy: FakeCupy) -> None:
    graph, x, y = program()
    session = af.Session(graph, ["cuda:0", "cuda:1"])
    plan = session.plan(y, [x])
    value = np.ones(3000, np.float32)
    async with session:
        assert session.plan(y, [x]) is plan
        np.testing.assert_allclose(await session.run(y, {x: value}), expected(value), rtol=1e-6)
    with pytest.raises(SessionClosedError, match="the session is closed"):
        session.plan(y + 1, [x])


async def test_a_session_that_only_plans_leaves_nothing(cupy: FakeCupy) -> None:
    """Without a warning, as on CPUs; its streams end, and its memory is free.

    The pinned memory from which the card copies constants is free when it has copied them, however late that is: their
    memory on the card, which is used again in the order of its stream, is free before.
    """
    graph, x, y = program()
    pinned = shared_slab(cupy)
    unused = pinned.free_bytes
    session = af.Session(graph, ["cuda:0"])
    session.plan(x + 1, [x])  # starts the card, which is then held up
    cupy.pause()
    session.plan(y, [x])
    account, streams = session.devices[0].memory, session.devices[0].compute_streams
    assert account.used
    del session
    gc.collect()
    with pytest.raises(SessionClosedError):
        streams[0].record()
    assert account.used == 0 and pinned.free_bytes == unused - 2 * pinned_size(WEIGHTS.nbytes)
    cupy.resume()
    while pinned.free_bytes < unused:  # noqa: ASYNC110 - nothing tells when the copies have been delivered
        await asyncio.sleep(0)
    assert account.used == 0


def test_an_event_loop_that_ends_before_copies_do_leaves_nothing(cupy: FakeCupy) -> None:
    graph, x, y = program()
    pinned = shared_slab(cupy)
    unused = pinned.free_bytes

    async def main() -> None:
        session = af.Session(graph, ["cuda:0"])
        session.plan(x + 1, [x])
        cupy.pause()
        session.plan(y, [x])

    asyncio.run(main())
    gc.collect()
    assert pinned.free_bytes < unused
    (reaper,) = [thread for thread in threading.enumerate() if thread.name == "asyncflow:cuda:0/h2d"]
    cupy.resume()
    reaper.join(PATIENCE_S)
    assert pinned.free_bytes == unused


def pinned_size(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def test_a_session_that_was_closed_unused_plans_nothing(cupy: FakeCupy) -> None:
    graph, x, y = program()
    session = af.Session(graph, ["cuda:0"])
    af.run(session.aclose())
    with pytest.raises(SessionClosedError, match="the session is closed"):
        session.plan(y, [x])


# -- who drives a loop -------------------------------------------------------------------------------------------------


def test_without_bindings_cards_cannot_run_loops(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda_bindings", lambda: None)
    with pytest.raises(af.PlacementError, match=rf"cuda-bindings, version 13 .*{re.escape(install('cuda13'))}"):
        af.Session(devices=["cpu:0", "cuda:0"], device_while=True)
    af.Session(devices=["cuda:0"])
    af.Session(devices=["cpu:0"], device_while=True)


def is_small(v: af.Tensor) -> af.Tensor:
    return af.sum(v) < 1000


def sorts(x: af.Tensor) -> af.Tensor:
    return af.while_loop(is_small, af.sort, x, name="inner")


def cut(x: af.Tensor) -> af.Tensor:
    def body(v: af.Tensor) -> af.Tensor:
        with af.device("cuda:1"):
            v = v * 2
        with af.device("cuda:0"):
            return v + 1

    return af.while_loop(is_small, body, x, name="cut")


def own(x: af.Tensor, name: str = "own") -> af.Tensor:
    return af.while_loop(is_small, lambda v: af.cond(af.max(v) > 9, lambda: v + 1, lambda: v * 2 + 1), x, name=name)


READS = "the host drives it, and reads the predicate of each iteration"
Loop = Callable[[af.Tensor], Any]
LOOPS: dict[str, tuple[Loop, tuple[int | None, ...], list[str]]] = {
    "the card's": (own, (5,), ["own on cuda:0: the card runs it, with the branches and loops in it"]),
    "by counters": (
        lambda x: af.while_loop(lambda i, _: i < 5, lambda i, v: (i + 1, v * 2), (0, x), name="count"),
        (5,),
        ["count on cuda:0: the host drives it, ahead of its kernels: it decides by numbers on the host"],
    ),
    "shapes": (
        own,
        (None,),
        [f"own on cuda:0: {READS}: a value of it is float32[?], whose shape is not fixed"],
    ),
    "sorting": (
        lambda x: af.while_loop(is_small, lambda v: sorts(v) + 1, x, name="outer"),
        (5,),
        [
            f"outer on cuda:0: {READS}: in outer/body/inner, outer/body/inner/body/sort (sort, HERE) does "
            "more than launch kernels",
            f"outer/body/inner on cuda:0: {READS}: outer/body/inner/body/sort (sort, HERE) does more than launch "
            "kernels",
        ],
    ),
    "one inside": (
        lambda x: af.while_loop(is_small, lambda v: af.sort(own(v, "inner")), x, name="outer"),
        (5,),
        [
            f"outer on cuda:0: {READS}: outer/body/sort (sort, HERE) does more than launch kernels",
            "outer/body/inner on cuda:0: the card runs it, with the branches and loops in it",
        ],
    ),
    "cut": (cut, (5,), [f"cut on cuda:0, cuda:1: {READS}: it is cut over devices"]),
}


def explained(make: Loop, shape: tuple[int | None, ...], **options: Any) -> list[str]:
    """Return a plan's explanation of loops."""
    with af.Graph() as graph:
        x = af.placeholder("float32", shape)
        with af.device("cuda:0"):
            y = make(x)
    plan = af.Session(graph, ["cuda:0", "cuda:1"], **options).plan(y, [x])
    lines = re.sub(rf"{re.escape(__file__)}:\d+", "HERE", plan.explain()).splitlines()
    return [line for line in lines if "the host drives" in line or "the card runs" in line]


@pytest.mark.parametrize("case", LOOPS)
def test_a_plan_names_the_driver_of_a_loop(cupy: FakeCupy, case: str) -> None:
    make, shape, lines = LOOPS[case]
    found = explained(make, shape, device_while=True)
    assert sorted(found) == sorted(lines)
    for line in explained(make, shape):
        assert line.endswith(("reads the predicate of each iteration", "it decides by numbers on the host"))


def test_a_plan_for_cpus_says_nothing_of_it() -> None:
    with af.Graph() as graph:
        x = af.placeholder("float32", (5,))
        y = own(x)
    explained = af.Session(graph).plan(y, [x]).explain()
    assert "drives" not in explained
    assert "kernels" not in explained


def chain(x: af.Tensor) -> af.Tensor:
    for _ in range(6):
        x = af.sum(x) + x @ np.eye(5, dtype=np.float32)
    return x


REGIONS: dict[str, tuple[Callable[[af.Tensor], Any], dict[str, Any], str]] = {
    "not asked for": (chain, {}, "one by one: Session(cuda_graphs=True) makes a graph of them"),
    "asked for": (chain, {"cuda_graphs": True}, "becomes a CUDA graph for each kind of inputs that comes again: "),
    "no gain": (
        lambda x: af.tanh(x) @ x,
        {},
        "one by one: 2 kernels would become a graph with 2 arrays to copy, without gain",
    ),
    "state": (
        lambda x: chain(x * af.Variable(np.float32(2), name="scale")),
        {"cuda_graphs": True},
        "becomes a CUDA graph for each kind of inputs that comes again: ",
    ),
    "stores": (
        lambda x: af.scan(lambda total, y: total + y, x, x[0])[1],
        {"cuda_graphs": True},
        "becomes a CUDA graph for each kind of inputs that comes again: ",
    ),
    "values that always move": (
        lambda x: af.gradients(
            af.sum(af.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, af.tanh(v)), (0, x), swap_memory=True)[1]),
            [x],
        )[0],
        {"cuda_graphs": True},
        "(moving_saved_values, HERE) is to move all its values away, as swap_memory=True or saved_values='swap' says",
    ),
    "checks": (chain, {"cuda_graphs": True, "check_numerics": True}, "one by one: check_numerics=True looks at every"),
    "branches": (
        lambda x: af.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, af.sort(v)), (0, x))[1],
        {"cuda_graphs": True},
        "sort (sort, HERE) does more than launch kernels",
    ),
}


@pytest.mark.parametrize("case", REGIONS)
def test_a_plan_says_how_regions_are_launched(cupy: FakeCupy, case: str) -> None:
    make, options, expected = REGIONS[case]
    with af.Graph() as graph:
        x = af.placeholder("float32", (5,))
        y = make(x)
    explained = af.Session(graph, ["cuda:0"], **options).plan(y, [x]).explain()
    explained = re.sub(rf"{re.escape(__file__)}:\d+", "HERE", explained)
    assert any(expected in line for line in explained.splitlines() if line.startswith("      # ")), explained


def test_a_plan_counts_the_graphs_that_there_are(cupy: FakeCupy) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float32", (None, 5))
        y = chain(x)

    async def main() -> list[str]:
        async with af.Session(graph, ["cuda:0"], cuda_graphs=True) as session:
            found = []
            for rows in (2, 2, 2, 3):
                await session.run(y, {x: np.ones((rows, 5), np.float32)})
                found.append(session.plan(y, [x]).explain().partition("comes again: ")[2].partition("\n")[0])
            return found

    assert asyncio.run(main()) == [
        "0 made, for 1 kind of inputs",
        "0 made, for 1 kind of inputs",
        "1 made, for 1 kind of inputs",
        "1 made, for 2 kinds of inputs",
    ]
