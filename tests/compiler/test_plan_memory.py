"""Saved values where memory is short: choices by figures, the same bits, and predictions that are about right."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.batching import pending_sums
from asyncflow.devices.sim import swapping
from asyncflow.testing import virtual_clock

SIDE, STEPS = 256, 40
VALUE = SIDE * SIDE * 4
"""A value that may move: 256 KiB; the loops save two of them in an iteration."""

QUICK_LINK = "k40, pcie5"


def loop(x: af.Tensor, w: af.Tensor, n: Any = STEPS, **options: Any) -> af.Tensor:
    """A loop that saves its state and the operands of the state, both results of a product."""

    def body(i: af.Tensor, y: af.Tensor) -> Any:
        z = y @ w
        return i + 1, af.sin(z) * y

    found: af.Tensor = af.while_loop(lambda i, _: i < n, body, (0, x), **options)[1]
    return found


def nested(x: af.Tensor, w: af.Tensor, **options: Any) -> af.Tensor:
    """A nested loop: the values that inner loops save are a value of the outer one."""
    body: Any = lambda i, y: (i + 1, loop(y, w, 4))  # noqa: E731
    found: af.Tensor = af.while_loop(lambda i, _: i < STEPS // 4, body, (0, x), **options)[1]
    return found


def with_an_op_of_a_user(x: af.Tensor, w: af.Tensor) -> af.Tensor:
    """A loop whose user op may not run again, while other values may be computed again."""
    spec = af.spec("float32", (SIDE, SIDE))
    noted = af.op(outputs=spec, gradient=lambda inputs, outputs, grad: grad)(lambda y: y + 0)

    def body(i: af.Tensor, y: af.Tensor) -> Any:
        return i + 1, noted(af.sin(y @ w) * y)

    found: af.Tensor = af.while_loop(lambda i, _: i < STEPS, body, (0, x))[1]
    return found


@dataclass
class Outcome:
    """The results of a gradient, and its plan."""

    values: list[Any]
    peak: int
    moved: int
    text: str
    planned: tuple[Any, ...]
    seconds: float


async def train(build: Any = loop, *, devices: Any = "cpu:0", **options: Any) -> Outcome:
    with af.Graph(seed=3):
        x, w = (af.placeholder("float32", (SIDE, SIDE), name=name) for name in "xw")
        grads = af.gradients(af.sum(build(x, w)), [x, w])
        fed = np.random.default_rng(0).normal(size=(SIDE, SIDE)).astype(np.float32) / 20
        async with af.Session(devices=[devices], **options) as session:
            plan = session.plan(grads, [x, w])
            started = asyncio.get_running_loop().time()
            values = await session.run(grads, {x: fed, w: fed})
            seconds = asyncio.get_running_loop().time() - started
            memory = session.statistics().memory[devices]
            return Outcome(values, memory.peak, memory.moved_out, plan.explain(memory=True), plan.memory, seconds)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values move by themselves: each copy is of one value."""
    monkeypatch.setattr(swapping, "TOGETHER", 0)


def on_card(build: Any = loop, card: str = "k40", host: str = "c++", **options: Any) -> Outcome:
    with virtual_clock(card, host=host) as clock:
        return clock.run(train(build, devices="sim:0", **options))


# -- on a CPU, where nothing moves ------------------------------------------------------------------------------------


async def test_nothing_is_done_where_all_fits() -> None:
    usual = await train(memory_limit=1 << 30)
    (planned,) = usual.planned
    assert not planned.values
    assert planned.way.kept == STEPS
    assert planned.held == pytest.approx(usual.peak, rel=0.1)
    assert "limit 1.0 GiB, holds 2" in usual.text
    assert usual.text.endswith("all is kept")


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize("share", [0.8, 0.5, 0.3])
async def test_what_does_not_fit_is_computed_again(share: float, regions: bool) -> None:
    """Values that do not fit are computed again: the same bits, within the limit, as predicted.

    Without regions a gradient's iterations may begin ahead of one another, as kernels happen to end. They would hold
    the values that they compute from saved ones, so they begin when there is room.
    """
    usual = await train(regions=regions, memory_limit=1 << 30, loop_batching=False)
    limit = int(share * usual.peak)
    less = await train(regions=regions, memory_limit=limit, loop_batching=False)
    (planned,) = less.planned
    assert planned.way.kept < STEPS or planned.way.saving
    assert less.peak <= limit
    assert 0.75 * planned.held <= less.peak <= 1.01 * planned.held
    for one, other in zip(less.values, usual.values, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("build", [loop, nested])
@pytest.mark.parametrize("ys", [1, 2])
async def test_iterations_begin_as_there_is_room_where_sizes_are_not_known(build: Any, ys: int) -> None:
    """With little more than one at a time takes; of several gradients, too.

    They ran ahead of one another, as far as `parallel_iterations` let them, and held twice as much and more.
    """
    side = 64

    async def peak(limit: int, **options: Any) -> int:
        with af.Graph():
            x, w = af.placeholder("float32", (None, side)), af.placeholder("float32", (side, side))
            y = build(x, w, **options)
            grads = [af.gradients(af.sum(z), [x, w]) for z in (y, af.sin(y))[:ys]]
            fed = np.random.default_rng(0).normal(size=(side, side)).astype(np.float32) / 20
            async with af.Session(memory_limit=limit, regions=False, loop_batching=False) as session:
                await session.run(grads, {x: fed, w: fed})
                return session.statistics().memory["cpu:0"].peak

    limit = int(1.15 * await peak(1 << 30, parallel_iterations=1))
    assert await peak(limit) <= limit


async def test_more_memory_never_takes_longer() -> None:
    usual = await train(memory_limit=1 << 30)
    taken = [(await train(memory_limit=int(share * usual.peak))).planned[0].way for share in (0.3, 0.5, 0.8)]
    assert [way.ns for way in taken] == sorted((way.ns for way in taken), reverse=True)
    assert [way.held for way in taken] == sorted(way.held for way in taken)


async def test_loops_in_one_another_run_again_together() -> None:
    usual = await train(nested, memory_limit=1 << 30, loop_batching=False)
    limit = usual.peak * 6 // 10
    less = await train(nested, memory_limit=limit, loop_batching=False)
    assert less.peak <= limit
    for one, other in zip(less.values, usual.values, strict=True):
        np.testing.assert_array_equal(one, other)


async def test_a_user_s_op_is_never_run_again() -> None:
    """Only neighbours of the op may run again, one by one."""
    usual = await train(with_an_op_of_a_user, memory_limit=1 << 30, loop_batching=False)
    limit = usual.peak * 7 // 10
    less = await train(with_an_op_of_a_user, memory_limit=limit, loop_batching=False)
    (planned,) = less.planned
    assert planned.way.kept == STEPS
    assert "recompute" in [value.choice for value in planned.values]
    assert less.peak <= limit
    for one, other in zip(less.values, usual.values, strict=True):
        np.testing.assert_array_equal(one, other)


def with_two_dropouts(x: af.Tensor, w: af.Tensor) -> af.Tensor:
    """Both divide by one number, which the loop saves for each."""

    def body(i: af.Tensor, y: af.Tensor) -> Any:
        return i + 1, af.dropout(af.sin(af.dropout(y @ w, 0.1)) * y, 0.1)

    found: af.Tensor = af.while_loop(lambda i, _: i < STEPS, body, (0, x))[1]
    return found


async def test_free_values_are_no_choice() -> None:
    less = await train(with_two_dropouts, memory_limit=30 * VALUE, loop_batching=False)
    (planned,) = less.planned
    assert {value.choice for value in planned.values} == {"keep", "recompute"}
    assert all(value.nbytes for value in planned.values)


async def test_rows_that_wait_for_their_product_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has up to 1,024 rows of what the gradient of `w` is a product of, and is held besides."""
    monkeypatch.setattr(pending_sums, "_ENOUGH_ROWS", ())
    one_by_one, batched = [await train(memory_limit=1 << 30, loop_batching=is_batched) for is_batched in (False, True)]
    assert batched.planned[0].standing - one_by_one.planned[0].standing == 1_024 * 2 * SIDE * 4
    assert batched.planned[0].held == pytest.approx(batched.peak, rel=0.1)


PARTS: dict[str, Any] = {
    "split, a small part": (64, lambda big, _: af.split(big, (64, 960), axis=1)[0]),
    "split, most of it": (960, lambda big, _: af.split(big, (64, 960), axis=1)[1]),
    "window": (64, lambda big, i: af.dynamic_slice(big, (0, i), (64, 64))),
    "diagonal": (16, lambda big, _: af.linalg.diagonal(af.reshape(big, (64, 16, 64)))),
}


@pytest.mark.parametrize("name", PARTS)
async def test_a_part_that_is_saved_counts_with_all_that_it_keeps(name: str) -> None:
    """A view keeps its whole array in memory: a small part is copied, and a large one counts as the array does."""
    width, part = PARTS[name]
    with af.Graph():
        x, w = af.placeholder("float32", (64, 64)), af.placeholder("float32", (width, 64))

        def body(i: af.Tensor, y: af.Tensor) -> Any:
            return i + 1, af.tanh(part(af.concat([y] * 16, axis=1) * 1.5, i) @ w)

        y = af.while_loop(lambda i, _: i < STEPS, body, (0, x))[1]
        grads = af.gradients(af.sum(y), [x, w])
        async with af.Session(devices=["cpu:0"], memory_limit=1 << 30) as session:
            (planned,) = session.plan(grads, [x, w]).memory
            await session.run(grads, {x: np.ones((64, 64), "f4") / 8, w: np.ones((width, 64), "f4") / width})
            assert planned.held == pytest.approx(session.devices[0].memory.peak, rel=0.1)


async def test_nothing_is_planned_without_a_limit() -> None:
    assert (await train(memory_limit=None)).planned == ()


@pytest.mark.parametrize(
    ("choice", "moves", "done", "last"),
    [
        ("keep", True, "keep", "a run that passes the limit fails with OutOfMemoryError"),
        ("swap", False, "keep", "a run that passes the limit fails with OutOfMemoryError"),
        ("swap", True, "swap", "once all of these are away fails with OutOfMemoryError"),
    ],
)
async def test_the_sessions_wishes_are_reported_value_by_value(
    choice: Any, moves: bool, done: str, last: str, tmp_path: Any
) -> None:
    """Nothing is changed for it, and nothing is computed again however short memory is said to be."""
    usual = await train(memory_limit=1 << 30)
    directory = str(tmp_path) if moves else None
    found = await train(memory_limit=usual.peak + VALUE, saved_values=choice, spill_directory=directory)
    (planned,) = found.planned
    assert planned.way.kept == STEPS
    assert [(value.nbytes, value.choice) for value in planned.values] == [(VALUE, done)] * 2
    assert [line.split()[1:4] for line in found.text.splitlines()[-3:-1]] == [["256.0", "KiB", done]] * 2
    assert found.text.endswith(last)
    assert (found.moved > 0) is (done == "swap")
    for one, other in zip(found.values, usual.values, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("choice", "said"), [("keep", "all its values are kept"), ("swap", "64 KiB and more move from")]
)
async def test_the_sessions_wishes_are_reported_for_loops_of_unknown_length(choice: Any, said: str) -> None:
    assert said in (await train(of_unknown_length, memory_limit=1 << 30, saved_values=choice)).text.splitlines()[-1]


def of_unknown_length(x: af.Tensor, w: af.Tensor, **options: Any) -> af.Tensor:
    """Only a run knows that it has `STEPS` iterations."""
    return loop(x, w, af.astype(af.sum(x) * 0, "int32") + STEPS, **options)


@pytest.mark.parametrize("share", [0.8, 0.5])
async def test_of_an_unknown_number_of_iterations_the_fitting_ones_keep_their_values(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others run again in segments that grow: the same bits, within the limit."""
    monkeypatch.setattr(sys.modules[__name__], "SIDE", 64)
    monkeypatch.setattr(sys.modules[__name__], "STEPS", 200)
    usual = await train(of_unknown_length, memory_limit=1 << 30, loop_batching=False)
    assert usual.planned == ()
    assert "only a run knows how many iterations there are; the first " in usual.text
    limit = int(share * usual.peak)
    less = await train(of_unknown_length, memory_limit=limit, loop_batching=False)
    assert less.peak <= limit
    assert "keep 32.0 KiB each, and later ones run again for the gradient, in segments of 1, 2, 3" in less.text
    for one, other in zip(less.values, usual.values, strict=True):
        np.testing.assert_array_equal(one, other)


async def test_where_there_is_no_room_no_iteration_keeps_its_values() -> None:
    """There were a negative number of them, and the number of a checkpoint was wrong."""
    with af.Graph():
        x, w = (af.placeholder("float32", (SIDE, SIDE)) for _ in range(2))
        grads = af.gradients(af.sum(of_unknown_length(x, w)), [x, w])
        async with af.Session(memory_limit=VALUE) as session:
            assert "; the first 0 keep 512.0 KiB each" in session.plan(grads, [x, w]).explain(memory=True)


async def test_why_nothing_is_predicted_is_said() -> None:
    def of_any_rows(x: af.Tensor, w: af.Tensor) -> af.Tensor:
        return loop(af.boolean_mask(x, x[:, 0] > -9), w) if hasattr(af, "boolean_mask") else loop(x[x[:, 0] > -9], w)

    text = (await train(of_any_rows, memory_limit=1 << 30)).text
    assert "nothing is predicted, as only a run knows the sizes of its saved values" in text


# -- on a simulated card ----------------------------------------------------------------------------------------------


@pytest.fixture
def computes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a k40 take longer for an iteration than its host, and than copies of the saved values."""
    monkeypatch.setattr(sys.modules[__name__], "SIDE", 320)


@pytest.mark.parametrize("host", ["c++", "asyncflow"])
def test_nothing_moves_while_no_more_is_held_than_was_predicted_to_fit(host: str) -> None:
    """This holds above 70 % of the limit, too: moving would take time, and no run would use the room."""
    usual = on_card(host=host, memory_limit=1 << 30)
    (planned,) = usual.planned
    less = on_card(host=host, memory_limit=int(planned.kept_all / 0.84))
    assert less.text.endswith("all is kept")
    assert less.peak == usual.peak
    assert less.moved == 0
    assert less.seconds == pytest.approx(usual.seconds, rel=1e-3)


@pytest.mark.usefixtures("computes_long")
def test_values_move_where_a_link_is_quick() -> None:
    usual = on_card(card=QUICK_LINK, memory_limit=1 << 30)
    less = on_card(card=QUICK_LINK, memory_limit=usual.peak // 2)
    (planned,) = less.planned
    assert [value.choice for value in planned.values].count("swap") > 0
    assert less.moved > 0
    assert less.peak <= usual.peak // 2
    assert "of copies each way" in less.text
    for one, other in zip(less.values, usual.values, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("choice", "moved"), [("auto", 2 * STEPS - 1), ("swap", 2 * STEPS - 1)])
@pytest.mark.usefixtures("one_by_one")
def test_the_first_run_of_a_plan_that_moves_values_is_as_quick_as_the_next(choice: Any, moved: int) -> None:
    """Before it is known what iterations and copies take."""

    async def main() -> list[tuple[float, int, int]]:
        x, w = (af.placeholder("float32", (SIDE, SIDE), name=name) for name in "xw")
        fetches, fed = af.gradients(af.sum(loop(x, w)), [x, w]), np.eye(SIDE, dtype=np.float32)
        found = []
        async with af.Session(devices=["sim:0"], memory_limit=30 * VALUE, saved_values=choice) as session:
            memory, clock = session.devices[0].memory, asyncio.get_running_loop()
            for _ in range(2):
                started, before = clock.time(), session.statistics().memory["sim:0"].moved_out
                memory.lap("runs")
                await session.run(fetches, {x: fed, w: fed})
                moved_out = session.statistics().memory["sim:0"].moved_out - before
                found.append((clock.time() - started, memory.lap("runs")[0], moved_out // VALUE))
        return found

    with virtual_clock(QUICK_LINK, host="c++") as clock, af.Graph():
        (seconds, *first), (next_seconds, *second) = clock.run(main())
    peak, count = first
    assert count == moved
    assert peak <= 30 * VALUE
    assert second == first
    assert seconds == pytest.approx(next_seconds, rel=0.01)


@pytest.mark.parametrize("share", [0.6, 0.4])
def test_values_of_loops_in_one_another_are_chosen_together(share: float) -> None:
    """The gradient did not fit without a plan for the values of inner loops; the bits are the same."""
    usual = on_card(nested, memory_limit=1 << 30)
    less = on_card(nested, memory_limit=int(share * usual.peak))
    (planned,) = less.planned
    inner = [value for value in planned.values if value.name.startswith("while/body/while/body/")]
    assert [value.nbytes for value in inner] == [4 * VALUE, 4 * VALUE]
    assert less.peak <= share * usual.peak
    assert planned.held == pytest.approx(less.peak, rel=0.2)
    assert "its values are chosen with the outer loop's" in less.text
    for one, other in zip(less.values, usual.values, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("one_by_one")
def test_values_of_an_inner_loop_move_as_asked_for_the_outer_ones() -> None:
    def build(x: af.Tensor, w: af.Tensor) -> af.Tensor:
        return nested(x, w, swap_memory=True)

    moved = on_card(build, memory_limit=1 << 30)
    (planned,) = moved.planned
    choices = {value.name: value.choice for value in planned.values if value.nbytes >= VALUE}
    assert choices == {"while/body/while/body/var_1": "swap", "while/body/while/body/matmul": "swap"}
    assert planned.way.away == 2 * STEPS * VALUE
    assert moved.moved == (2 * STEPS - 1) * VALUE


def test_values_move_where_one_copy_takes_many_of_them() -> None:
    """A card that is quick, and a host that is not: it starts one copy for as many values as have room."""
    usual = on_card(card="h100", host="asyncflow", memory_limit=1 << 30)
    less = on_card(card="h100", host="asyncflow", memory_limit=usual.peak // 2)
    way = less.planned[0].way
    assert way.moved == 2
    assert way.together % (2 * VALUE) == 0  # a set ends where an iteration does
    assert 8 * VALUE <= way.together <= less.planned[0].figures.room
    assert less.peak <= usual.peak // 2
    assert less.seconds < 1.2 * usual.seconds


@pytest.mark.usefixtures("one_by_one")
def test_nothing_moves_where_starting_a_copy_takes_longer_than_computing_again() -> None:
    """A card that is quick, and a host that is not."""
    usual = on_card(card="h100", host="asyncflow", memory_limit=1 << 30)
    less = on_card(card="h100", host="asyncflow", memory_limit=usual.peak // 2)
    assert less.planned[0].way.moved == 0
    assert less.peak <= usual.peak // 2
    assert "run again for the gradient" in less.text


@pytest.mark.parametrize("host", ["c++", "asyncflow"])
def test_the_time_of_an_iteration_is_predicted(host: str) -> None:
    """The prediction also holds if the host is the busy part: numbers, saved values and loops' variables take it some
    time. Products that are batched take less.
    """
    options: dict[str, Any] = {"memory_limit": 1 << 30, "loop_batching": False}
    short, long = [on_card(partial(loop, n=n), "h100", host, **options) for n in (20, 60)]
    predicted_ns = long.planned[0].way.ns - short.planned[0].way.ns
    assert predicted_ns / 1e9 == pytest.approx(long.seconds - short.seconds, rel=0.01)


@pytest.mark.parametrize("choice", ["auto", "recompute"])
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.usefixtures("one_by_one")
def test_loops_of_several_cards_stay_each_on_its_own(is_known: bool, choice: Any) -> None:
    """Nodes that run again for a gradient are placed with the loop: nothing is sent, and each takes as long as
    alone.
    """

    async def step(cards: int) -> float:
        with af.Graph() as graph:
            xs, grads, steps = [], [], af.placeholder("int32", ())
            for card in range(cards):
                with af.device(f"sim:{card}"):
                    xs.append(x := af.placeholder("float32", (SIDE, SIDE)))
                    grads.append(af.gradients(af.sum(loop(x, x, STEPS if is_known else steps)), x))
        async with af.Session(graph, memory_limit=12 << 20, saved_values=choice) as session:
            plan = session.plan(grads, [*xs, steps])
            assert " sends " not in plan.explain()
            assert "again" in plan.explain(memory=True)
            started = asyncio.get_running_loop().time()
            await session.run(grads, {steps: STEPS, **dict.fromkeys(xs, np.broadcast_to(np.float32(0), (SIDE, SIDE)))})
            return asyncio.get_running_loop().time() - started

    taken = []
    for machine, cards in (("h100", 1), ("3 x h100", 3)):
        with virtual_clock(machine, host="c++", shapes_only=True) as clock:
            taken.append(clock.run(step(cards)))
    assert taken[1] == pytest.approx(taken[0], rel=0.02)


@pytest.mark.usefixtures("one_by_one")
def test_a_loop_that_was_asked_to_move_everything_does() -> None:
    def build(x: af.Tensor, w: af.Tensor) -> af.Tensor:
        return loop(x, w, swap_memory=True)

    moved = on_card(build, memory_limit=1 << 30)
    (planned,) = moved.planned
    assert [value.choice for value in planned.values] == ["swap", "swap"]
    assert planned.way.held < moved.moved == (2 * STEPS - 1) * VALUE  # the last stays
    assert (planned.way.kept, planned.way.length) == (STEPS, 0)


def test_values_asked_to_move_without_a_place_run_again() -> None:
    def build(x: af.Tensor, w: af.Tensor) -> af.Tensor:
        return loop(x, w, swap_memory=True)

    usual = on_card(memory_limit=1 << 30)
    less = on_card(build, memory_limit=usual.peak // 2, host_memory_limit=4 * VALUE)
    assert less.planned[0].way.kept < STEPS
    assert less.peak <= usual.peak // 2


@pytest.mark.usefixtures("one_by_one")
def test_a_matrix_that_all_iterations_save_brings_back_one_iteration_at_a_time() -> None:
    """The gradient reads it first, although it was saved first: not all other values come back then."""
    limit = 4 << 20

    async def step() -> tuple[int, int]:
        with af.Graph():
            x, w = af.placeholder("float32", (64, SIDE)), af.Variable(np.eye(SIDE, dtype=np.float32))
            body: Any = lambda i, y: (i + 1, af.tanh(y @ w.read()))  # noqa: E731
            _, last = af.while_loop(lambda i, _: i < 2 * STEPS, body, (0, x), swap_memory=True)
            grad = af.gradients(af.sum(last), w)
        async with af.Session(devices=["sim:0"], memory_limit=limit) as session:
            (planned,) = session.plan(grad, [x]).memory
            assert planned.kept_all > limit > 2 * planned.held
            await session.run(grad, {x: np.ones((64, SIDE), np.float32)})
            return planned.held, session.devices[0].memory.peak

    with virtual_clock("v100") as clock:
        held, peak = clock.run(step())
    assert peak <= 1.5 * held


def test_the_limit_named_by_an_error_counts_values_without_a_place() -> None:
    usual = on_card(memory_limit=1 << 30)
    options: dict[str, Any] = {"saved_values": "swap", "host_memory_limit": 8 * VALUE}
    with pytest.raises(af.OutOfMemoryError, match="no place to go") as raised:
        on_card(memory_limit=usual.peak // 2, **options)
    (note,) = raised.value.__notes__
    assert "(2.0 MiB of the 20.0 MiB that would move have a place to go)" in note
    named = int(note.partition("memory_limit=")[2].partition(" ")[0])
    assert on_card(memory_limit=named, **options).peak <= named


@pytest.mark.usefixtures("computes_long")
def test_a_loop_of_unknown_length_moves_its_values_where_a_link_is_quick() -> None:
    """Once memory is short, or from the first byte on where that was asked for."""
    usual = on_card(of_unknown_length, QUICK_LINK, memory_limit=1 << 30)
    less = on_card(of_unknown_length, QUICK_LINK, memory_limit=usual.peak // 2)
    assert "move once memory is short, as that takes less time than running iterations again" in less.text
    assert less.moved > usual.moved == 0
    assert less.peak <= usual.peak // 2
    asked = on_card(partial(of_unknown_length, swap_memory=True), memory_limit=1 << 30)
    assert "move from the first byte on, as was asked" in asked.text
    assert asked.moved > 0


def test_a_session_may_have_all_loops_move_from_the_first_byte() -> None:
    assert on_card(memory_limit=1 << 30, saved_values="swap").moved > 0
    assert on_card(memory_limit=1 << 30).moved == 0


def test_the_text_of_a_plan() -> None:
    usual = on_card(memory_limit=1 << 30)
    lines = on_card(memory_limit=usual.peak // 2).text.splitlines()
    (line, head, first, *_, last) = lines[
        next(place for place, line in enumerate(lines) if "iterations, limit" in line) :
    ]
    assert "40 iterations, limit" in line
    assert "would hold" in line
    assert head.split() == ["value", "bytes/iteration", "choice", "costs/iteration"]
    assert "256.0 KiB" in first
    assert last.startswith("predicted: ")
    assert "an iteration (" in last
    assert "the next 100 MiB less do not fit" in last
