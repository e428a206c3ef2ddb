"""Fault F10-F14: dead values, and graphs whose control flow is wrong."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import asyncflow as af
from tests.conftest import assert_baseline

Run = Callable[..., Awaitable[Any]]


async def test_a_dead_fetch_names_its_switch(session: af.Session, graph: af.Graph) -> None:
    """Fault F10: an error that names the switch and its line, never a hang; the session goes on."""
    pred = af.placeholder("bool", ())
    if_false, if_true = af.raw.switch(af.constant(5), pred, name="fork")
    with pytest.raises(af.FetchError, match=r"fork:1 is dead[\s\S]*switch fork built at .*test_deadness\.py"):
        await session.run(if_true, {pred: False})
    with pytest.raises(af.FetchError, match="is dead"):
        await session.run([if_false, if_false * 2 + 1], {pred: True})
    assert_baseline(session)
    assert await session.run(if_true + 1, {pred: True}) == 6


async def test_allow_dead_gives_none(run: Run, graph: af.Graph) -> None:
    """Fault F10: `allow_dead=True` returns None in the place of each dead fetch, and only there."""
    if_false, if_true = af.raw.switch(af.constant(5), af.constant(True))
    result = await run({"dead": if_false, "derived": -if_false, "live": if_true}, allow_dead=True)
    assert result == {"dead": None, "derived": None, "live": 5}


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("taken", [True, False])
async def test_nested_loops_on_both_sides_of_a_branch(graph: af.Graph, seed: int | None, taken: bool) -> None:
    """Fault F11: the loop on the untaken side ends at once, the other computes, in any ready order."""

    def triangle(rows: int) -> af.Tensor:
        def row(i: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            _, total = af.while_loop(lambda j, _: j < i, lambda j, t: (j + 1, t + 1), (0, total))
            return i + 1, af.cond(i > 2, lambda: total, lambda: total * 1)

        return af.while_loop(lambda i, _: i < rows, row, (0, 0))[1]

    pred = af.placeholder("bool", ())
    result = af.cond(pred, lambda: triangle(5), lambda: triangle(4))
    async with af.Session(graph, debug=True, seed=seed, regions=seed is None) as session:
        assert await session.run(result, {pred: taken}) == (10 if taken else 6)
        assert_baseline(session)


@pytest.mark.parametrize("seed", [None, 0, 1])
async def test_a_dead_enter_ends_the_loop(graph: af.Graph, seed: int | None) -> None:
    """Fault F11: exits of a loop that was never live are dead, and what merges them goes on."""
    if_false, if_true = af.raw.switch(af.constant(3), af.constant(True))
    entered = af.raw.enter(if_false, "loop")
    value, _ = af.raw.merge(entered)
    done, body = af.raw.switch(value, af.raw.loop_cond(value < af.raw.enter(10, "loop", constant=True)))
    af.raw.add_back_edge(value, af.raw.next_iteration(body + body))
    merged, index = af.raw.merge(af.raw.exit(done), if_true)
    async with af.Session(graph, debug=True, seed=seed, regions=seed is None) as session:
        assert await session.run([merged, index]) == [3, 1]


def test_an_op_in_two_frames() -> None:
    """Fault F12: refused where it is written, with both frames."""
    with af.Graph():
        outer = af.raw.enter(1, "outer")
        inner = af.raw.enter(af.raw.enter(1, "outer"), "inner")
        with pytest.raises(af.GraphError, match=r"mixes two frames: .*'outer', .*'outer/inner'"):
            outer + inner


async def test_an_exit_outside_every_frame(run: Run, graph: af.Graph) -> None:
    """Fault F12: there is no frame to leave."""
    with pytest.raises(af.GraphError, match="exit outside every frame"):
        await run(af.raw.exit(af.constant(1)))


async def test_a_cycle_without_next_iteration(run: Run, graph: af.Graph) -> None:
    """Fault F13: refused before anything runs, with the path of the cycle."""
    x = af.placeholder("float32", (), name="x")
    with af.name_scope("ring"):
        first = x + 1
        second = first * 2
        third = second - 3
    first.node.inputs[0] = third
    with pytest.raises(af.GraphError, match=r"waits for itself: .* -> .* -> .* -> ") as caught:
        await run(third, {x: 1.0})
    for node in (first.node, second.node, third.node):
        assert node.name in str(caught.value)


def test_a_back_edge_that_is_none() -> None:
    """Fault F13: a back edge runs from a next_iteration to a merge, and nowhere else."""
    with af.Graph():
        merged, _ = af.raw.merge(af.raw.enter(1, "loop"))
        kernel, following = merged + merged, af.raw.next_iteration(merged)
        for wrong in [(merged, kernel), (kernel, following)]:
            with pytest.raises(af.GraphError, match="a back edge runs from a next_iteration to a merge"):
                af.raw.add_back_edge(*wrong)


async def test_a_merge_of_dead_inputs_is_dead(run: Run, graph: af.Graph) -> None:
    """Fault F14: dead only when all inputs are."""
    dead = [af.raw.switch(af.constant(x), af.constant(True))[0] for x in range(3)]
    all_dead, _ = af.raw.merge(*dead)
    one_live, index = af.raw.merge(*dead, af.constant(7))
    assert await run([all_dead, one_live, index], allow_dead=True) == [None, 7, 3]
    with pytest.raises(af.FetchError, match="is dead"):
        await run(all_dead)


LIVE_PAIRS: dict[str, Callable[[af.Tensor], tuple[Any, Any]]] = {
    "two kernels": lambda x: (x + 1, x + 2),
    "feed and kernel": lambda x: (x, x + 1),
    "feed twice": lambda x: (x, x),
    "feed and constant": lambda x: (x, af.constant(1)),
    "two constants": lambda x: (af.constant(1), af.constant(2)),
}


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("pair", LIVE_PAIRS)
async def test_a_merge_of_two_live_inputs(graph: af.Graph, pair: str, seed: int | None) -> None:
    """Fault F14: an error that names the merge, whichever input comes first; the session goes on."""
    x = af.placeholder("int64", ())
    merged, _ = af.raw.merge(*LIVE_PAIRS[pair](x), name="crowded")
    async with af.Session(graph, debug=True, seed=seed, regions=seed is None) as session:
        with pytest.raises((af.KernelError, af.GraphError), match="two live inputs") as caught:
            await session.run(merged, {x: 1})
        assert "crowded" in str(caught.value)
        assert_baseline(session)
        assert await session.run(x + 1, {x: 1}) == 2
