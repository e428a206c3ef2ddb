"""Pooled loops drawn at random: whoever is stepped together, each request has what the plain loop gives it, to the bit.

Each run computes the loop twice, with and without ``pool=``, from the same captures and draws. Values are integers.
Random numbers that the bodies draw are equal: they depend on the request, its iteration and the op's seed alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import virtual_clock
from tests.cells import SEEDS
from tests.fake_cupy.stand_in import stand_in
from tests.patience import PATIENCE_S

WIDTH = 3
MOST = 7
BAD = 4
"""An element that the user's function refuses."""

Update = Callable[[af.Tensor, af.Tensor], af.Tensor]
"""Gives the next rows from the number of the step and the rows before."""


@af.op(outputs=lambda x: x, rows=True, pure=True)
def refusing(x: Any) -> Any:
    if (x % 97 == BAD).any():
        raise ValueError("refused")
    return x + 1


class Program:
    """A graph of one loop, pooled and plain, whose body is drawn by `dice`."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        with af.Graph(seed=dice.randrange(100)) as self.graph:
            self.x, self.n = af.placeholder("int64", (None, WIDTH)), af.placeholder("int64", ())
            self.own, self.seed = af.placeholder("int64", (WIDTH,)), af.placeholder("int64", ())
            self.vector = af.Variable(np.array([3, -1, 2]), name="vector")
            matrix = af.Variable(np.arange(WIDTH * WIDTH).reshape(WIDTH, WIDTH) - 4, name="matrix")
            self.new = af.placeholder("int64", (WIDTH,))
            self.change = self.vector.assign(self.new)
            vector, drawn = self.vector.read(), af.random.integers((WIDTH,), low=-5, high=5)
            updates: list[Update] = [
                lambda i, s: s + vector,
                lambda i, s: s * af.sum(vector),
                lambda i, s: s @ matrix.read(),
                lambda i, s: s + self.own * i,
                lambda i, s: af.cond(af.sum(s) % 2 == 0, lambda: s + self.own, lambda: s * 3 - i),
                lambda i, s: af.while_loop(lambda j, _: j < i % 3, lambda j, t: (j + 1, t + vector), (0, s))[1],
                self.drawing,
                self.drawing_in_branches,
                self.drawing_in_loops,
            ]
            # Who fails is found out by another run, so it does not depend on what that may see anew.
            self.may_fail = dice.random() < 0.4
            updates.append((lambda i, s: refusing(s % 1000) + vector) if self.may_fail else (lambda i, s: s - drawn))
            self.body = dice.sample(updates, dice.randint(1, 4))
            self.store = dice.choice((None, self.rows, self.array, self.read_once))
            self.look = dice.randrange(3)
            self.grows = dice.random() < 0.3
            pool = af.Pool(dice.choice((1, 2, 3, 8)))
            self.plain = self.loop({})
            self.pooled = self.loop({"pool": pool})

    def seed_of(self, op: int) -> Any:
        """The seed of an op that draws; where another run is to draw the same, with that of the request."""
        return (self.seed, op) if self.may_fail else op

    def drawing(self, i: af.Tensor, s: af.Tensor) -> af.Tensor:
        chances = af.astype(af.abs(s) % 5, "float64") / 4
        own = af.random.poisson(rate=chances, seed=(self.seed, 11)) + af.random.integers(
            (WIDTH,), high=9, seed=self.seed_of(12)
        )
        return s + own * af.astype(af.random.bernoulli(chances, seed=self.seed_of(13)), "int64")

    def drawing_in_branches(self, i: af.Tensor, s: af.Tensor) -> af.Tensor:
        logits = af.stack([af.astype(s[0] % (k + 2), "float32") for k in range(4)], axis=-1)
        return af.cond(
            af.sum(s) % 2 == 0,
            lambda: s + af.random.categorical(logits, seed=(self.seed, 14)),
            lambda: s - af.random.permutation(WIDTH, seed=self.seed_of(15)),
        )

    def drawing_in_loops(self, i: af.Tensor, s: af.Tensor) -> af.Tensor:
        def again(j: af.Tensor, t: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            drawn = af.vmap(lambda x: x + af.random.integers(high=9, seed=(self.seed, 16)))(s[0])
            return j + 1, t + drawn * af.random.integers(high=3, seed=self.seed_of(17))

        return af.while_loop(lambda j, _: j < i % 3, again, (0, s))[1]

    def rows(self, store: Any, i: af.Tensor, s: af.Tensor) -> tuple[Any, af.Tensor]:
        if store is None:
            return af.RowStore("int64", (WIDTH,)).append(s), s
        seen = [store.stack(), store.slice(store.size() // (1 + self.n % 2), store.size()), store.take([0, -1])][
            self.look
        ]
        return store.append(s if self.look else s[:1]), s + af.sum(seen, axis=0)

    def array(self, store: Any, i: af.Tensor, s: af.Tensor) -> tuple[Any, af.Tensor]:
        if store is None:
            made = af.TensorArray("int64", 1, dynamic_size=True, element_shape=(WIDTH,), clear_after_read=False)
            return made.write(0, s[0]), s
        seen = [lambda: af.sum(store.stack(), axis=0), lambda: store.read(i // 2), lambda: store.read(0)][self.look]()
        return store.write(store.size(), s[-1]), s + seen

    def read_once(self, store: Any, i: af.Tensor, s: af.Tensor) -> tuple[Any, af.Tensor]:
        if store is None:
            return af.TensorArray("int64", 1, dynamic_size=True, element_shape=(WIDTH,)).write(0, s[0]), s
        return store.write(i + 1, s[-1]), s + store.read(i)

    def loop(self, options: dict[str, Any]) -> tuple[Any, ...]:
        def step(i: af.Tensor, s: af.Tensor, *stores: Any) -> tuple[Any, ...]:
            found = []
            for store in stores:
                assert self.store is not None
                kept, s = self.store(store, i, s)
                found.append(kept)
            for update in self.body:
                s = update(i, s)
            return i + 1, af.concat([s, s[:1]]) if self.grows else s, *found

        first = () if self.store is None else (self.store(None, self.n, self.x)[0],)
        start = self.n // 3 if self.store is None else 0
        shapes = ((), (None, WIDTH), *(None for _ in first))
        last = af.while_loop(
            lambda i, *_: i < self.n, step, (start, self.x, *first), shape_invariants=shapes, **options
        )
        return last[1], *([] if self.store in (None, self.read_once) else [last[2].stack()])


async def serve(seed: int, devices: list[str] | None) -> None:
    dice = Random(seed)
    program = Program(dice)
    options: dict[str, Any] = {"devices": devices, "debug": dice.random() < 0.2, "regions": dice.random() < 0.7}
    if devices is not None:
        options["placement_seed"] = seed

    async def request(number: int) -> None:
        own = Random(f"{seed} {number}")
        for _ in range(own.randrange(6)):
            await asyncio.sleep(0)
        feeds = {
            program.x: np.array([[own.randrange(-50, 50)] * WIDTH] * own.choice((1, 1, 2))),
            program.n: own.randrange(MOST),
            program.own: np.array([number, 1, -number]),
            program.seed: own.randrange(-9, 2**40),
        }
        run = asyncio.ensure_future(session.run([program.pooled, program.plain], feeds))
        if own.random() < 0.15:
            for _ in range(own.randrange(8)):
                await asyncio.sleep(0)
            run.cancel()
        try:
            pooled, plain = await run
        except asyncio.CancelledError:
            return
        except af.KernelError:
            with pytest.raises(af.KernelError):
                await session.run(program.plain, feeds)
            return
        assert [part.tolist() for part in pooled] == [part.tolist() for part in plain], number

    async with af.Session(program.graph, **options) as session, asyncio.timeout(PATIENCE_S):
        async with asyncio.TaskGroup() as group:
            for number in range(dice.choice((2, 5, 12))):
                group.create_task(request(number))
            for value in range(0 if program.may_fail else dice.choice((0, 2))):
                group.create_task(session.run(program.change, {program.new: np.array([value, 2, 1])}))


def on_asyncio(start: Callable[[], Any]) -> None:
    asyncio.run(start())


def on_virtual_time(start: Callable[[], Any]) -> None:
    with virtual_clock() as clock:
        clock.run(start())


def on_cards(start: Callable[[], Any]) -> None:
    with stand_in(devices=2, pinned_nbytes=128 << 10) as cupy:
        asyncio.run(start())
        cupy.wait_idle()


PLACES: dict[str, tuple[Callable[[Callable[[], Any]], None], list[str] | None]] = {
    "CPU": (on_asyncio, None),
    "virtual time": (on_virtual_time, None),
    "a CPU and two cards": (on_cards, ["cpu:0", "cuda:0", "cuda:1"]),
}


@pytest.mark.parametrize("place", PLACES)
def test_requests_in_shared_steps_equal_lone_requests(place: str, pytestconfig: pytest.Config) -> None:
    """Behaviour 102."""
    run, devices = PLACES[place]
    first = crc32(pytestconfig.getoption("turn").encode()) % 10_000
    for seed in range(first, first + (1 if devices else 2) * SEEDS):
        try:
            run(partial(serve, seed, devices))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
