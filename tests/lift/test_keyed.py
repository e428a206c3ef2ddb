"""Random draws of bodies that runs share: by the keys of rows, or as they were written if the body cannot be shared."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.plan import Plan
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Tensor
from asyncflow.lift.calls.keyed import capture_key, carry_key, draws
from asyncflow.ops.random.random_again import RANDOM_AGAIN, RANDOM_KEY
from asyncflow.runtime.executor.kernels.single_call import CountedCall
from asyncflow.runtime.shared.bodies import Bodies
from tests.cells import SEEDS


def loops(condition: Any, body: Any, start: Any) -> tuple[af.Graph, af.Tensor, list[af.Tensor]]:
    """A loop from a placeholder, plain and pooled, with draws of equal seeds."""
    with af.Graph(seed=2) as graph:
        n = af.placeholder("int64", ())
        found = [
            af.while_loop(lambda *v: condition(n, *v), lambda *v: body(n, *v), start, pool=pool, name="loop")
            for pool in (None, af.Pool())
        ]
    return graph, n, [each[-1] for each in found]


async def asked(graph: af.Graph, n: af.Tensor, fetches: list[af.Tensor], count: int = 5) -> None:
    """Both give the same for any number of requests."""
    async with af.Session(graph) as session:
        for plain, pooled in await asyncio.gather(*(session.run(fetches, {n: k}) for k in range(count))):
            assert np.array_equal(plain, pooled)


async def test_a_predicate_draws_for_its_own_iteration() -> None:
    """Also before the first one; and every row ends by a draw of its own."""
    graph, n, fetches = loops(lambda n, i: af.random.uniform(seed=(n, 1)) < 0.9, lambda n, i: [i + 1 + n * 0], (0,))
    assert all(isinstance(y.node.attrs.get("shared"), object) for y in fetches)
    await asked(graph, n, fetches, 9)


async def test_a_pool_in_a_loop_counts_both() -> None:
    """The pool's key has the iteration of the loop around; the number of loops is not known where a body is built."""

    def outer(pool: af.Pool | None, n: af.Tensor) -> af.Tensor:
        def again(k: af.Tensor, x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            step = lambda i, y: (i + 1, y + af.random.normal((2,), seed=3))  # noqa: E731
            return k + 1, af.while_loop(lambda i, _: i < k + n, step, (0, x), pool=pool)[1]

        return af.while_loop(lambda k, _: k < 3, again, (0, np.zeros(2)))[1]

    with af.Graph(seed=2) as graph:
        n = af.placeholder("int64", ())
        fetches = [outer(pool, n) for pool in (None, af.Pool())]
    await asked(graph, n, fetches)


@pytest.mark.parametrize("reason", ["nonzero", "nonzero, behind rows that decide"])
async def test_what_cannot_be_pooled_draws_as_it_was_written(reason: str) -> None:
    def body(n: af.Tensor, i: af.Tensor, x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        x = x + af.cond(i % 2 == 0, lambda: af.random.normal(seed=4), lambda: af.random.uniform(seed=5))
        if "rows" in reason:
            of_row = lambda y: af.cond(y > 0, lambda: y + af.random.normal(seed=7), lambda: y * 2)  # noqa: E731
            x = x + af.sum(af.vmap(of_row)(af.stack([x, -x])))
        return i + 1, x + af.shape(af.nonzero(af.random.bernoulli(af.full((4,), 0.5), seed=6))[0])[0]

    with pytest.warns(UserWarning, match="is not pooled"):
        graph, n, fetches = loops(lambda n, i, _: i < n, body, (0, 0.0))
    assert all(node.op not in (RANDOM_AGAIN, RANDOM_KEY) for node in graph.walk())
    await asked(graph, n, fetches)


async def test_a_stream_of_drawn_values_is_that_of_the_loop() -> None:
    drawn: list[af.Tensor] = []

    def body(n: af.Tensor, i: af.Tensor) -> tuple[af.Tensor]:
        drawn.append(af.random.integers(high=100, seed=(n, 4)))
        return (i + 1,)

    graph, n, _ = loops(lambda n, i: i < 4, body, (0,))
    async with af.Session(graph) as session:

        async def streamed(x: af.Tensor, k: int) -> list[int]:
            return [int(value) async for value in session.stream(x, {n: k})]

        plain = [await streamed(drawn[0], k) for k in range(3)]
        assert await asyncio.gather(*(streamed(drawn[1], k) for k in range(3))) == plain
        assert len({*map(tuple, plain)}) == 3


async def test_steps_that_draw_are_calls_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    made = Bodies.counted_call

    def noted(self: Bodies, plan: Plan) -> CountedCall | None:
        calls.append(made(self, plan))
        return made(self, plan)

    monkeypatch.setattr(Bodies, "counted_call", noted)
    graph, n, fetches = loops(
        lambda n, i, _: i < n, lambda n, i, x: (i + 1, x + af.random.normal(seed=(n, 4))), (0, 0.0)
    )
    await asked(graph, n, fetches)
    assert len(calls) == 2
    assert None not in calls


def test_keys_go_into_bodies() -> None:
    """A body that draws gets the key, with the number of loops in between."""
    with af.Graph() as graph:
        body = Subgraph(graph, "body")
        with body:
            x = af.random.normal()
            af.while_loop(lambda y: y < 1, lambda y: y + af.random.uniform(), x)
            af.cond(x > 0, lambda: x, lambda: x + 1)
        assert draws(body)
        capture_key(body)
        plain = Subgraph(graph, "plain")
    by_key = [node for node in body.walk() if node.op is RANDOM_AGAIN]
    assert [node.attrs["inside"] for node in by_key] == [0, 1]
    (key,) = body.captures
    assert key.node.op is RANDOM_KEY
    assert by_key[0].inputs[0] is body.inputs[0] is body.captures[key]
    assert not draws(plain)
    (branch,) = (node for node in body.nodes if node.name.endswith("cond"))
    assert len(branch.inputs) == 2


def test_a_loop_carries_its_key_behind_its_variables() -> None:
    with af.Graph() as graph:
        condition, body = Subgraph(graph, "cond"), Subgraph(graph, "body")
        variables: list[Tensor] = []
        for part in (condition, body):
            with part:
                variables.append(part.add_input(af.spec("float64", ()), "x"))
                part.results.append(variables[-1] + af.random.normal())
        first = carry_key(condition, body, 1)
    assert first.shape == (3,)
    assert [part.inputs[0] for part in (condition, body)] == variables
    assert [part.inputs[1].spec for part in (condition, body)] == [first.spec] * 2
    assert [len(part.results) for part in (condition, body)] == [1, 2]


def program(dice: Random, depth: int) -> Any:
    """A nest that says where a function draws: at once, in branches of a choice, in a loop, or in its predicate."""
    kind = dice.choice(("draw", "branch", "loop", "predicate")) if depth else "draw"
    parts = [program(dice, depth - 1) for _ in range(2)] if kind != "draw" else []
    return kind, round(dice.uniform(-0.5, 1), 2), dice.randrange(1000), parts


def computed(part: Any, x: Any) -> Any:
    """The value of such a function, whose choices and loops depend on `x` and on the numbers drawn."""
    kind, limit, number, parts = part
    if kind == "draw":
        return x + af.random.uniform((), dtype="float64", seed=number) - 0.4
    first, second = parts
    if kind == "branch":
        return af.cond(x > limit, lambda: computed(first, x * 0.5), lambda: computed(second, x + 0.1))
    if kind == "predicate":
        return af.while_loop(
            lambda i, y: (computed(first, y) < limit + 1) & (i < 4), lambda i, y: (i + 1, computed(second, y)), (0, x)
        )[1]
    return af.while_loop(
        lambda i, y: (y < limit + 1) & (i < 4), lambda i, y: (i + 1, computed(second, computed(first, y))), (0, x)
    )[1]


@pytest.mark.parametrize("seed", range(4, 9 + 6 * (SEEDS - 1)))
async def test_rows_draw_their_own_numbers_in_branches_they_take_and_loops_they_stay_in(seed: int) -> None:
    """A row of a batch, of a pool, or of `map_fn` has the bits that it has alone, whatever the others do."""
    part = program(Random(seed), 2)
    with af.Graph(seed=seed) as graph:
        x, k = af.placeholder("float64", ()), af.placeholder("int64", ())
        loop = lambda pool, f: af.while_loop(  # noqa: E731
            lambda i, _: i < k, lambda i, y: (i + 1, f(y)), (0, x), pool=pool, name="loop"
        )[1]
        each = lambda y: computed(part, y)  # noqa: E731
        nested = lambda y: af.sum(af.vmap(lambda z: computed(part, z + y))(np.array([-0.3, 0.1, 0.6])))  # noqa: E731
        twice = lambda y: af.sum(af.vmap(lambda z: nested(z * 2) + y)(np.array([0.2, -0.1])))  # noqa: E731
        pairs = [(f(x), af.batched(f)(x)) for f in (each, nested, twice)]
        pairs += [(loop(None, f), loop(af.Pool(4), f)) for f in (each, nested)]
        rows = af.placeholder("float64", (None,))
        lifted = [af.map_fn(lambda y: computed(part, y), rows, lift=lift, name="rows") for lift in (True, False)]
    dice = Random(seed + 1)
    feeds = [{x: dice.uniform(-1, 1), k: dice.randrange(4)} for _ in range(7)]
    async with af.Session(graph) as session:
        requests = await asyncio.gather(*(session.run(pairs, each) for each in feeds))
        for found in [*requests, *[await session.run(pairs, each) for each in feeds[:2]]]:  # and requests by themselves
            for alone, together in found:
                assert alone.tobytes() == together.tobytes()
        shared = session.statistics().batches.values()
        assert all(counts.largest > 1 for counts in shared if counts.members > 3)  # few enter a loop if few k are not 0
        fed = {rows: [dice.uniform(-1, 1) for _ in range(9)]}
        one, other = await session.run(lifted, fed)
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("count", [0, 1, 7])
async def test_rows_leave_a_loop_by_draws_of_its_predicate(count: int) -> None:
    """Also all in the first iteration, where the body never runs, and also if there are no rows."""
    row_counts: list[int] = []

    @af.op(outputs=af.spec("float64", ()), pure=True, rows=True)
    def noted(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        row_counts.append(len(x))
        return x + 1.0

    def each(chance: af.Tensor, one_more: Any) -> af.Tensor:
        def goes_on(i: af.Tensor, x: af.Tensor) -> af.Tensor:
            drawn = af.while_loop(lambda k, _: k < 2, lambda k, y: (k + 1, y + af.random.uniform(seed=4)), (0, 0.0))
            return drawn[1] < chance

        return af.while_loop(goes_on, lambda i, x: (i + 1, one_more(x) * af.random.uniform(seed=3)), (0, 0.0))[1]

    with af.Graph(seed=3) as graph:
        chances = af.placeholder("float64", (None,))
        lifted = af.map_fn(lambda chance: each(chance, noted), chances, name="rows")
        plain = af.map_fn(lambda chance: each(chance, lambda x: x + 1.0), chances, lift=False, name="rows")
    async with af.Session(graph) as session:
        for chance in (-1.0, 1.8):  # no draw is below the first
            row_counts.clear()
            found, alone = await session.run([lifted, plain], {chances: np.full(count, chance)})
            assert found.tobytes() == alone.tobytes()
            assert found.any() == bool(row_counts) == (chance > 0 and count > 0)
            assert 0 not in row_counts


async def test_gradients_go_through_a_loop_whose_predicate_draws() -> None:
    def each(x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        def again(y: af.Tensor) -> af.Tensor:
            return y * y * (1.0 + af.random.uniform(dtype="float64", seed=3) / 4)

        (y,) = af.while_loop(lambda y: y < 3.0 + af.random.uniform(dtype="float64", seed=4), again, (x,))
        return y, af.gradients(y, x)

    with af.Graph(seed=3) as graph:
        xs = af.placeholder("float64", (None,))
        pairs = [af.map_fn(each, xs, lift=lift, name="rows") for lift in (True, False)]
        outside = [af.gradients(af.sum(ys), xs) for ys, _ in pairs]
    async with af.Session(graph) as session:
        (one, other), (first, second) = await session.run([pairs, outside], {xs: np.linspace(1.2, 4.5, 9)})
    for gradient in (one[1], first, second):
        np.testing.assert_allclose(gradient, other[1], rtol=1e-12)
    assert one[0].tobytes() == other[0].tobytes()
