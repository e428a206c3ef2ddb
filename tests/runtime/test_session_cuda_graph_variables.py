"""Variables in CUDA graphs: captured steps leave the same bits as launched ones, also if other readers hold values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.captures import WARM_UPS
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.graphs import graph as cuda_graph
from tests.cells import SEEDS
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.stand_in import stand_in

WIDTH = 4
BEHIND = 40
"""Items of the stream of copies that keep it behind the stream of kernels."""

Built = tuple[af.Graph, af.Tensor, list[af.Variable], Any]
"""A graph, its placeholder, its variables, and the fetches of a step."""


def graphs_launched(cupy: FakeCupy) -> int:
    return [name for _, name in cupy.engine.launches].count("graph")


def counts(session: af.Session, fetches: Any, *feeds: af.Tensor) -> str:
    """Return the plan's words about the graphs of its region."""
    plan = session.plan(fetches, list(feeds)).explain()
    return next(line.partition("# ")[2] for line in plan.splitlines() if "# " in line)


def training() -> Built:
    """A step of Adam, which also returns the weights from before."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (2, WIDTH), name="x")
        w = af.Variable(np.linspace(-1, 1, WIDTH, dtype=np.float32), name="w")
        loss = af.mean(af.square(af.tanh(x @ af.expand_dims(w, 1)) - 0.5))
        before = w.read()
        step = af.optim.adam([(af.gradients(loss, [w])[0], w)], 0.1)
        with af.control_dependencies([step]):
            after = w + 0.0
    return graph, x, [w], [loss, before, after]


def fed(n: int) -> Any:
    return np.random.default_rng(n).normal(size=(2, WIDTH)).astype(np.float32)


async def steps(session: af.Session, built: Built, numbers: Sequence[int]) -> list[Any]:
    _, x, _, fetches = built
    return [await session.run(fetches, {x: fed(n)}) for n in numbers]


def assert_same(found: Any, wanted: Any) -> None:
    for left, right in zip(found, wanted, strict=True):
        if isinstance(left, list | tuple):
            assert_same(left, right)
        else:
            left, right = np.asarray(left), np.asarray(right)
            assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


def twice(
    program: Callable[[af.Session, Built], Any], build: Callable[[], Built] = training, seed: int = 0, **options: Any
) -> list[tuple[Any, FakeCupy]]:
    """Run a program in a session that launches, and in a session that captures, each on a card of its own."""

    async def run(cuda_graphs: bool) -> Any:
        built = build()
        async with af.Session(built[0], ["cuda:0"], cuda_graphs=cuda_graphs, **options) as session:
            return await program(session, built)

    found = []
    for cuda_graphs in (False, True):
        with stand_in(devices=1, seed=seed) as cupy:
            found.append((asyncio.run(run(cuda_graphs)), cupy))
            cupy.wait_idle()
            assert not cupy.engine.errors
            af.reset_container("test")
    return found


def test_a_step_of_adam_is_one_launch() -> None:
    async def program(session: af.Session, built: Built) -> Any:
        results = await steps(session, built, range(WARM_UPS + 5))
        return results, counts(session, built[3], built[1])

    (wanted, _), (found, cupy) = twice(program)
    assert_same(found[0], wanted[0])
    assert graphs_launched(cupy) == 5
    assert "1 made, for 1 kind" in found[1]
    for (_, _, after), (_, before, _) in pairwise(found[0]):
        assert (after == before).all()  # a value read before the write stays what it was
        assert not np.isnan(after).any()


def test_a_held_value_stays_and_two_addresses_make_two_graphs() -> None:
    async def program(session: af.Session, built: Built) -> Any:
        (w,) = built[2]
        state, seen = session.state.lookup(w), []
        await steps(session, built, range(WARM_UPS + 2))
        for n in range(8):
            held = state.capture()
            was = np.array(await session.run(w))
            await steps(session, built, [n, n])
            seen.append((was, held[""].on_host()))
            del held
        return seen, counts(session, built[3], built[1])

    (wanted, _), (found, cupy) = twice(program)
    assert_same(found[0], wanted[0])
    assert_same(*zip(*found[0], strict=True))
    assert "2 made, for 1 kind" in found[1]
    assert graphs_launched(cupy) == 2 + 8 * 2


def test_a_step_runs_without_a_graph_while_both_buffers_are_held() -> None:
    async def program(session: af.Session, built: Built) -> Any:
        state = session.state.lookup(built[2][0])
        await steps(session, built, range(WARM_UPS + 2))
        held = []
        for n in range(4):
            held.append(state.capture()[""])
            await steps(session, built, [n])
        values = [value.on_host() for value in held]
        del held[:]
        return values, await steps(session, built, range(3))

    (wanted, _), (found, cupy) = twice(program)
    assert_same(found, wanted)
    assert graphs_launched(cupy) == 2 + 1 + 3  # the second capture is launched; then both are held


async def after_a_while(session: af.Session, *runs: Any, is_d2h_late: bool) -> Any:
    """Return the results of runs, all launched before the card does any work; a late `d2h` copies last."""
    device = session.devices[0]
    assert isinstance(device, CudaDevice)
    device.cupy.pause()
    event = device.cupy.cuda.Event(disable_timing=True)
    for _ in range(BEHIND if is_d2h_late else 0):
        event.record(device.d2h.raw)
    tasks = [asyncio.ensure_future(run) for run in runs]
    for _ in range(20):
        await asyncio.sleep(0)
    device.cupy.resume()
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize("seed", range(2))
def test_a_fetch_in_flight_gives_the_value_of_its_turn(seed: int) -> None:
    async def program(session: af.Session, built: Built) -> Any:
        _, x, (w,), fetches = built
        await steps(session, built, range(WARM_UPS + 2))
        await session.run(w)  # which compiles it: runs would start in another order
        seen = []
        for n in range(3):
            runs = session.run(w), session.run(fetches, {x: fed(n)})
            seen.append(await after_a_while(session, *runs, is_d2h_late=True))
            assert_same([seen[-1][0]], [seen[-1][1][1]])
        return seen

    (wanted, _), (found, _) = twice(program, seed=seed)
    assert_same(found, wanted)


@pytest.mark.parametrize("seed", range(3))
def test_the_copy_of_a_checkpoint_waits_for_the_launch(seed: int) -> None:
    async def program(session: af.Session, built: Built) -> Any:
        _, x, (w,), fetches = built
        state, seen = session.state.lookup(w), []
        nodes = [fetch.node for fetch in fetches]  # nothing is fetched, so no other copy waits for the card
        for n in range(WARM_UPS + 2):
            await session.run(nodes, {x: fed(n)})

        async def copied() -> Any:
            value = state.capture()[""]
            return await value.holder.fetched(value.handle)

        for n in range(4):
            _, value = await after_a_while(session, session.run(nodes, {x: fed(n)}), copied(), is_d2h_late=False)
            assert_same([value], [await session.run(w)])
            seen.append(value)
        return seen

    (wanted, _), (found, cupy) = twice(program, seed=seed)
    assert_same(found, wanted)
    assert graphs_launched(cupy) == 2 + 4


def test_a_value_from_elsewhere_is_what_the_next_launch_reads(tmp_path: Path) -> None:
    names = iter(("launched", "captured"))

    async def program(session: af.Session, built: Built) -> Any:
        (w,) = built[2]
        seen = await steps(session, built, range(WARM_UPS + 2))
        folder = tmp_path / next(names)
        await session.save(folder)
        seen += await steps(session, built, range(2))
        await session.restore(folder)
        seen += await steps(session, built, range(2))
        with built[0]:
            given = af.placeholder("float32", (WIDTH,))
            change = w.assign(given)
        await session.run(change, {given: np.full(WIDTH, 0.25, np.float32)})
        seen += await steps(session, built, range(2))
        await session.swap_variables({w: np.full(WIDTH, -0.5, np.float32)})
        seen += await steps(session, built, range(WARM_UPS + 2))
        assert (seen[-WARM_UPS - 2][1] == -0.5).all()
        assert (seen[WARM_UPS + 6][1] == 0.25).all()
        return seen

    (wanted, _), (found, cupy) = twice(program)
    assert_same(found, wanted)
    assert graphs_launched(cupy) >= 2 + 2 + 2 + 2


def test_sessions_that_share_a_container_see_each_others_writes() -> None:
    def build() -> Built:
        with af.Graph() as graph:
            x = af.placeholder("float32", (2, WIDTH), name="x")
            w = af.Variable(np.zeros(WIDTH, np.float32), name="w", container="test")
            before = w.read()
            after = w.update(lambda w, x: af.tanh(w * 0.5 + x) - af.mean(x), af.sum(x, axis=0))
        return graph, x, [w], [before, after]

    async def program(session: af.Session, built: Built) -> Any:
        other = build()
        seen = []
        async with af.Session(other[0], ["cuda:0"], cuda_graphs=True) as second:
            for n in range(2 * WARM_UPS + 8):
                seen += await steps(session, built, [n])
                seen += await steps(second, other, [n] if n % 3 else [n, n + 1])
        return seen

    (wanted, _), (found, cupy) = twice(program, build)
    assert_same(found, wanted)
    for (_, after), (before, _) in pairwise(found):
        assert (after == before).all()
    assert graphs_launched(cupy) > 2


def test_two_variables_may_change_places() -> None:
    def build() -> Built:
        with af.Graph() as graph:
            x = af.placeholder("float32", (2, WIDTH), name="x")
            v, w = (af.Variable(np.full(WIDTH, n, np.float32), name=name) for n, name in ((1, "v"), (2, "w")))
            old = v.read()
            results = [old, v.assign(w.read()), w.assign(old)]
            results += [af.tanh(result) + x for result in results]
            results.append(w.assign_add(v.read()))
        return graph, x, [v, w], results

    async def program(session: af.Session, built: Built) -> Any:
        return await steps(session, built, range(WARM_UPS + 4))

    (wanted, _), (found, cupy) = twice(program, build)
    assert_same(found, wanted)
    assert graphs_launched(cupy) == 4


def test_a_step_whose_graph_cannot_be_launched_is_made_once_by_its_kernels() -> None:
    async def program(session: af.Session, built: Built) -> Any:
        seen = await steps(session, built, range(WARM_UPS + 2))
        device = session.devices[0]
        assert isinstance(device, CudaDevice)
        if has_graphs := "1 made" in counts(session, built[3], built[1]):
            device.cupy.fail_next(1, "graphLaunch")
        seen += await steps(session, built, range(3))
        said = counts(session, built[3], built[1])
        assert has_graphs == ("none is made: CUDARuntimeError: cudaErrorInvalidValue" in said)
        return seen

    (wanted, _), (found, cupy) = twice(program)
    assert_same(found, wanted)
    assert graphs_launched(cupy) == 2


# -- random programs ---------------------------------------------------------------------------------------------------


class Steps:
    """A step that reads and writes variables many times over, drawn by `dice`."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        self.has_loops = False
        with af.Graph() as self.graph:
            self.x, self.k = af.placeholder("float32", (WIDTH,), name="x"), af.placeholder("int64", (), name="k")
            self.variables = [
                af.Variable(np.linspace(-1, n, WIDTH, dtype=np.float32), name=f"v{n}")
                for n in range(dice.randint(1, 3))
            ]
            self.count = af.Variable(0, name="count")
            values = [self.x, af.tanh(self.x), *self.block(2, [self.x])]
            values += [self.count.assign_add(dice.randint(1, 3)), *self.block(2, values)]
            self.fetches = [*dice.sample(values, min(4, len(values))), values[-1]]
            self.fetches += [af.astype(variable.read(), "float32") for variable in self.variables[:1]]

    def block(self, depth: int, values: list[Any]) -> list[Any]:
        """Some values, after some reads and writes."""
        values = list(values)
        for _ in range(self.dice.randint(2, 4)):
            values.append(self.statement(depth, values))
        return values

    def statement(self, depth: int, values: list[Any]) -> Any:
        dice = self.dice
        v, x = dice.choice(self.variables), dice.choice(values)
        choices: list[Callable[[], Any]] = [
            v.read,
            lambda: af.tanh(v.read() * 0.5) + x,
            lambda: v.assign(x),
            lambda: v.assign(dice.choice(self.variables).read()),
            lambda: v.assign_add(af.tanh(x)),
            lambda: v.assign_sub(x * 0.25),
            lambda: v.update(lambda old, x: old * 0.5 - x, x),
            lambda: af.flip(v.read()),
            lambda: x * af.astype(self.count.read(), "float32"),
        ]
        if depth:
            choices += [lambda: self.branch(depth - 1, x), lambda: self.loop(depth - 1, x)]
        return af.tanh(choices[dice.randrange(len(choices))]())

    def branch(self, depth: int, x: Any) -> Any:
        sides = [self.side(depth, x) for _ in range(2)]
        return af.cond(self.k > 0, *sides)

    def side(self, depth: int, x: Any) -> Callable[[], Any]:
        return lambda: self.block(depth, [x])[-1]

    def loop(self, depth: int, x: Any) -> Any:
        self.has_loops = True
        most = self.dice.randint(1, 3)
        return af.while_loop(lambda i, _: i < most, lambda i, y: (i + 1, self.block(depth, [y])[-1]), (0, x))[1]


async def lived(session: af.Session, program: Steps, dice: Random, folder: Path) -> list[Any]:
    """Return the results of steps, and of fetches and checkpoints between them."""
    seen: list[Any] = []
    held: list[Any] = []
    saved = 0
    states = [session.state.lookup(variable) for variable in (*program.variables, program.count)]

    async def step() -> None:
        feeds = {program.x: fed(dice.randrange(9))[0], program.k: np.int64(dice.randrange(2))}
        seen.append(await session.run(program.fetches, feeds))

    if dice.random() < 0.5:
        await session.warm_up(program.fetches, {program.x: fed(0)[0], program.k: np.int64(dice.randrange(2))})
    for _ in range(9):
        await step()
        action = dice.randrange(8)
        variable = dice.choice(program.variables)
        if action == 0:
            seen.append(await session.run(variable))
        elif action == 1:
            held.append([state.capture()[""] for state in dice.sample(states, dice.randint(1, len(states)))])
        elif action == 2:
            seen.append([getattr(value, "on_host", lambda value=value: value)() for row in held for value in row])
            held.clear()
        elif action == 3:
            saved += 1
            await session.save(folder, step=saved)
        elif action == 4 and saved:
            await session.restore(folder)
        elif action == 5 and dice.random() < 0.3:
            await session.swap_variables({variable: np.full(WIDTH, dice.random(), np.float32)})
            states = [session.state.lookup(variable) for variable in (*program.variables, program.count)]
        elif action == 6 and not program.has_loops:  # between iterations that are launched, others run
            run = asyncio.ensure_future(session.run(variable))
            await step()
            seen.append(await run)
    seen.append(
        [value if isinstance(value, np.generic | np.ndarray) else value.on_host() for row in held for value in row]
    )
    seen.append(await session.run([*program.variables, program.count]))
    return seen


def random_steps(seed: int, folder: Path, **options: Any) -> int:
    """Run a program of that seed both ways; return the number of graphs launched."""

    async def run(cuda_graphs: bool) -> Any:
        dice = Random(seed)
        program = Steps(dice)
        inner = folder / f"{seed}-{cuda_graphs}"
        async with af.Session(program.graph, ["cuda:0"], cuda_graphs=cuda_graphs, **options) as session:
            return await lived(session, program, dice, inner)

    found, launched = [], 0
    for cuda_graphs in (False, True):
        with stand_in(devices=1, seed=seed) as cupy:
            found.append(asyncio.run(run(cuda_graphs)))
            cupy.wait_idle()
            assert not cupy.engine.errors
            launched = graphs_launched(cupy)
    assert_same(*found)
    return launched


@pytest.mark.parametrize("part", range(3))
def test_random_steps_leave_the_same_bits(
    part: int, pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graph, "CALM", part)
    first = crc32(f"{pytestconfig.getoption('turn')} {part}".encode()) % 10_000
    launched = 0
    for seed in range(first, first + SEEDS):
        try:
            launched += random_steps(seed, tmp_path)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
