"""Services drawn at random: requests of several kinds at once, some cancelled or late, beside swaps and saves.

Every answer is that of the request by itself, and afterwards nothing is left over, whatever came together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import uvloop

import asyncflow as af
from asyncflow.testing import virtual_clock
from tests.fake_cupy.stand_in import stand_in
from tests.patience import PATIENCE_S

WIDTH = 6
W = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 4
ROW = af.spec("float32", (WIDTH,))
STEPS = (0, 1, 3, 20)
SOON_S = (0.0005, 0.003, 0.05)

ENDS = (asyncio.CancelledError, af.DeadlineExceeded, af.OutOfMemoryError, af.OverloadedError)
"""Ends of a request without its answer: it was cancelled or late, did not fit, or came when there was no place."""

Tree: TypeAlias = "tuple[Tree, ...]"
Run: TypeAlias = Callable[[Callable[[], Any]], None]


class Request(NamedTuple):
    """A client's request: a row, a number of steps, and a tree, each vertex of which has that row."""

    x: Any
    n: int
    tree: Tree


class Kind(NamedTuple):
    """A kind of request: its fetches and feeds, and the result of a request by itself, if that is known.

    Attributes:
        names: of the fields of `Request` that it takes.
        streamed: a tensor in its loop.
    """

    fetch: Any
    names: str
    alone: Callable[[Request], float] | None = None
    streamed: af.Tensor | None = None


def stepped(h: Any, x: Any, count: int) -> float:
    for _ in range(count):
        h = np.tanh(h @ W + x)
    return float(np.sum(h))


def tree_alone(tree: Tree, x: Any) -> Any:
    return np.tanh(x + sum((tree_alone(child, x) for child in tree), np.zeros(WIDTH, np.float32)) @ W)


def drawn_tree(dice: Random, most: int) -> Tree:
    """Of nested tuples, in which the empty one is a leaf."""
    children = dice.randint(0, 2) if most > 1 else 0
    return tuple(drawn_tree(dice, (most - 1) // children) for _ in range(children))


def with_leaves(tree: Tree) -> Any:
    return tuple(map(with_leaves, tree)) or "leaf"


class Service:
    """A graph of all that requests share, with capacities and sizes drawn by `dice`."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        with af.Graph() as self.graph:
            self.w = af.Variable(W, name="w")
            self.x, self.n = af.placeholder("float32", (WIDTH,)), af.placeholder("int64", ())
            self.structure, self.rows = af.InputGraph.placeholder(), af.placeholder("float32", (None, WIDTH))
            count = af.Variable(0, name="count")
            self.add, self.count = count.assign_add(1), count.read()
            self.kinds = [*self.batches(), *self.pools(), self.trees(), *self.stateful()]

    def batched(self) -> Callable[[af.Tensor], af.Tensor]:
        size, delay_s = self.dice.choice((2, 16)), self.dice.choice((0.0, 0.001))
        return af.batched(lambda row: af.tanh(row @ self.w), max_size=size, max_delay_s=delay_s)

    def pooled(self, h: af.Tensor, most: af.Tensor, seen: list[af.Tensor] | None = None) -> af.Tensor:
        """The sum of a row after some steps, and in `seen` after each."""

        def step(i: af.Tensor, h: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            h = af.tanh(h @ self.w + self.x)
            if seen is not None:
                seen.append(af.sum(h))
            return i + 1, h

        return af.sum(af.while_loop(lambda i, _: i < most, step, (0, h), pool=af.Pool(self.dice.choice((2, 16))))[1])

    def batches(self) -> Iterator[Kind]:
        batched = self.batched()
        yield Kind(af.sum(batched(self.x)), "x", lambda it: stepped(it.x, 0, 1))
        rows = af.map_fn(batched, af.stack([self.x, self.x * 2]))
        yield Kind(af.sum(rows), "x", lambda it: stepped(it.x, 0, 1) + stepped(it.x * 2, 0, 1))
        either = af.cond(self.n > 2, lambda: af.sum(batched(self.x)), lambda: self.pooled(self.x, self.n))
        yield Kind(either, "xn", lambda it: stepped(it.x, 0, 1) if it.n > 2 else stepped(it.x, it.x, it.n))

    def pools(self) -> Iterator[Kind]:
        seen: list[af.Tensor] = []
        last = self.pooled(self.x, self.n, seen)
        yield Kind(last, "xn", lambda it: stepped(it.x, it.x, it.n), seen[0])

        def outer(i: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            return i + 1, total + self.pooled(self.x * af.astype(i, "float32"), af.minimum(self.n, 3))

        total = af.while_loop(lambda i, _: i < af.minimum(self.n, 4), outer, (0, np.float32(0)))[1]
        yield Kind(total, "xn", lambda it: sum(stepped(it.x * i, it.x, min(it.n, 3)) for i in range(min(it.n, 4))))

    def trees(self) -> Kind:
        @af.vertex_function(state=ROW, children=2)
        def vertex(v: af.Vertex) -> None:
            v.scatter(af.tanh(v.pull() + (v.gather(0) + v.gather(1)) @ self.w))

        roots = af.vertex_map(vertex, self.structure, self.rows, initial=0.0, share=True).roots
        return Kind(af.sum(roots), "xt", lambda it: float(np.sum(tree_alone(it.tree, it.x))))

    def stateful(self) -> Iterator[Kind]:
        table, queue = af.Table(16, ROW), af.FIFOQueue(self.dice.choice((1, 3, 50)), ROW)
        yield Kind(table.append(self.x), "x")
        yield Kind(queue.enqueue(self.x), "x")
        yield Kind(af.sum(queue.dequeue()), "")

    def feeds(self, kind: Kind, request: Request) -> dict[Any, Any]:
        if "t" in kind.names:
            structure = af.InputGraph.from_nested(with_leaves(request.tree))[0]
            rows = np.broadcast_to(request.x, (structure.n_vertices, WIDTH))
            return {**self.structure.feeds(structure), self.rows: rows}
        return {
            placeholder: value
            for name, placeholder, value in (("x", self.x, request.x), ("n", self.n, request.n))
            if name in kind.names
        }


class Clients:
    """Clients of a session; they draw their actions, and count how often `Service.add` ran and how often it may have
    run.
    """

    def __init__(self, service: Service, session: af.Session, seed: int) -> None:
        self.service, self.session, self.seed = service, session, seed
        self.kinds = service.dice.sample(service.kinds, service.dice.randint(2, len(service.kinds)))
        self.added = self.unknown = 0

    async def client(self, number: int) -> None:
        dice = Random(f"{self.seed} {number}")
        for _ in range(dice.randint(1, 6)):
            work = self.add() if dice.random() < 0.1 else self.ask(dice, dice.choice(self.kinds))
            task = asyncio.ensure_future(work)
            if dice.random() < 0.15:
                asyncio.get_running_loop().call_later(dice.random() * 0.01, task.cancel)
            with suppress(*ENDS):
                await task

    async def add(self) -> None:
        self.unknown += 1
        await self.session.run(self.service.add)
        self.added += 1

    async def ask(self, dice: Random, kind: Kind) -> None:
        x = np.array([dice.gauss(0, 1) for _ in range(WIDTH)], np.float32)
        request = Request(x, dice.choice(STEPS), drawn_tree(dice, dice.randint(1, 12)))
        feeds = self.service.feeds(kind, request)
        # Who takes from a queue may wait for ever.
        timeout = dice.choice(SOON_S) if dice.random() < 0.1 or kind.alone is None else None
        if kind.streamed is not None and dice.random() < 0.4:
            await self.stream(dice, kind.streamed, feeds, request)
            return
        found = await self.session.run(kind.fetch, feeds, timeout=timeout, priority=dice.randint(0, 2))
        if kind.alone is not None:
            np.testing.assert_allclose(found, kind.alone(request), rtol=1e-4, atol=1e-4)

    async def stream(self, dice: Random, streamed: af.Tensor, feeds: dict[Any, Any], request: Request) -> None:
        """All of a stream, or some of it."""
        seen: list[Any] = []
        is_left = False
        async with aclosing(self.session.stream(streamed, feeds)) as items:
            async for item in items:
                seen.append(item)
                if is_left := dice.random() < 0.05:
                    break
                await asyncio.sleep(dice.choice((0, 0, 0.001)))
        expected = [stepped(request.x, request.x, count + 1) for count in range(request.n)]
        np.testing.assert_allclose(seen, expected[: len(seen)] if is_left else expected, rtol=1e-4, atol=1e-4)

    async def beside(self, folder: Path) -> None:
        """Values are swapped for equal ones, and saved."""
        dice = self.service.dice
        for number in range(dice.choice((0, 0, 3))):
            await asyncio.sleep(dice.random() * 0.02)
            if dice.random() < 0.5:
                await self.session.swap_variables({"w": W})
            else:
                await self.session.save(folder / f"{self.seed}-{number}")


async def serve(seed: int, folder: Path, devices: list[str] | None) -> None:
    dice = Random(seed)
    service = Service(dice)
    options: dict[str, Any] = {"devices": devices, "debug": dice.random() < 0.2, "regions": dice.random() < 0.8}
    if dice.random() < 0.4:
        options["max_runs"], options["max_queued"] = dice.choice((2, 8)), dice.choice((5, 100))
    if dice.random() < 0.2:
        options["memory_limit"] = dice.choice((40_000, 400_000))
    if devices is not None and dice.random() < 0.5:
        options["placement_seed"] = seed
    async with af.Session(service.graph, **options) as session, asyncio.timeout(PATIENCE_S):
        if dice.random() < 0.2:
            session.check_batches(0.3)
        clients = Clients(service, session, seed)
        async with asyncio.TaskGroup() as group:
            group.create_task(clients.beside(folder))
            for number in range(dice.choice((1, 5, 20))):
                group.create_task(clients.client(number))
        # Shared calls whose members have all left are still computed: also on virtual time, which passes meanwhile.
        while session.statistics().runs:  # noqa: ASYNC110, nobody tells when they end
            await asyncio.sleep(0.001)
        assert not session.statistics().queued
        assert clients.added <= await session.run(service.count) <= clients.unknown


def on_loop(loop: Callable[[], asyncio.AbstractEventLoop], start: Callable[[], Any]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(start())


def on_virtual_time(start: Callable[[], Any]) -> None:
    with virtual_clock() as clock:
        clock.run(start())


def on_cards(start: Callable[[], Any]) -> None:
    with stand_in(devices=2, pinned_nbytes=128 << 10) as cupy:
        on_loop(uvloop.new_event_loop, start)
        cupy.wait_idle()


WHERE: dict[str, tuple[Run, list[str] | None]] = {
    "asyncio": (partial(on_loop, asyncio.new_event_loop), None),
    "uvloop": (partial(on_loop, uvloop.new_event_loop), None),
    "two CPUs": (partial(on_loop, uvloop.new_event_loop), ["cpu:0", "cpu:1"]),
    "two cards": (on_cards, ["cuda:0", "cuda:1"]),
    "a CPU and a card": (on_cards, ["cpu:0", "cuda:0"]),
    "virtual time": (on_virtual_time, None),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 60), marks=pytest.mark.slow)], ids=["few", "many"])
def test_requests_of_all_kinds_together(where: str, seeds: range, tmp_path: Path) -> None:
    """Behaviour 84, 88: each has the answer of the request by itself, or its requested end, and no request waits for
    ever.
    """
    run, devices = WHERE[where]
    for seed in seeds:
        try:
            run(partial(serve, seed, tmp_path, devices))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
