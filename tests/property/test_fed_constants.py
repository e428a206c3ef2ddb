"""Random programs whose constants are fed: they compute what placeholders in the place of the constants give.

Where a static shape was built on a constant, the feed is refused. No run computes with the old value.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

import numpy as np
import pytest

import asyncflow as af
from tests.cells import SEEDS

Step: TypeAlias = Callable[[Any, Any], Any]
"""Takes a vector of float64 and an integer scalar from 1 to 4; returns a vector."""


def joined(v: Any, more: Any) -> Any:
    return af.concat([v, af.reshape(af.astype(more, "float64"), [-1])])


def written(v: Any, n: Any) -> Any:
    array = af.TensorArray("float64", n, element_shape=())
    return af.while_loop(lambda i, _: i < n, lambda i, a: (i + 1, a.write(i, v[0])), (0, array))[1].stack()


def rows(v: Any, start: Any, stop: Any) -> Any:
    store = af.RowStore("float64").append(af.concat([v[:1], np.ones(9)]))
    return joined(v, store.slice(start, stop))


def at_each_turn(v: Any, n: Any) -> Any:
    return af.while_loop(lambda i, _: i < 3, lambda i, total: (i + 1, total + v[n]), (0, 0.5))[1]


SHAPED: dict[str, Step] = {
    "full": lambda v, n: joined(v, af.full((n,), 2.0)),
    "zeros": lambda v, n: joined(v, af.cos(af.zeros(n + 1))),
    "broadcast_to": lambda v, n: af.sum(af.broadcast_to(v, (n, af.size(v))), axis=0),
    "reshape": lambda v, n: joined(v, af.sum(af.reshape(v[:1] * np.ones(12), [n, -1]), axis=0)),
    "reshape to a vector": lambda v, n: joined(v, af.reshape(v[:1] * np.ones(12), af.stack([n, 12 // n]))[0]),
    "arange": lambda v, n: joined(v, af.arange(n)),
    "linspace": lambda v, n: joined(v, af.linspace(0.0, 1.0, n)),
    "one_hot": lambda v, n: joined(v, af.one_hot(0, n, dtype="float64")),
    "eye": lambda v, n: joined(v, af.eye(n)),
    "random": lambda v, n: joined(v, af.ones_like(af.random.uniform((n,)))),
    "TensorArray": lambda v, n: joined(v, af.TensorArray("float64", n).unstack(af.concat([v, v])[:n]).stack()),
    "TensorArray behind a loop": lambda v, n: joined(v, written(v, n)),
    "RowStore": lambda v, n: rows(v, n, 2 * n),
}
"""Steps that build a static shape on the integer, if it is known."""

OPEN: dict[str, Step] = {
    "broadcast_to": lambda v, n: af.sum(af.broadcast_to(v, af.stack([n, af.size(v)])), axis=0),
    "slice": lambda v, n: v[:n],
    "last": lambda v, n: v[-n:],
    "index": lambda v, n: v * v[n % af.size(v)],
    "length": lambda v, n: joined(v, af.arange(n, n + 3)),
    "rows": lambda v, n: rows(v, n, n + 2),
    "power": lambda v, n: af.abs(v) ** n,
    "roll": af.roll,
    "count": lambda v, n: v * af.while_loop(lambda i, x: i < n, lambda i, x: (i + 1, x * 1.5), (0, v[0]))[1],
    "limit": lambda v, n: v * af.while_loop(lambda x: True, lambda x: x + v[0], (0.5,), maximum_iterations=n)[0],
    "start": lambda v, n: v * af.while_loop(lambda i, x: i < 6, lambda i, x: (i + 1, x * 1.5), (n, v[0]))[1],
    "place": lambda v, n: v * at_each_turn(joined(v, np.ones(4)), n),
    "map_fn": lambda v, n: af.map_fn(lambda x: x * af.astype(n, "float64"), v),
    "branch": lambda v, n: af.cond(n > 2, lambda: v * 2.0, lambda: v - 1.0),
    "drawn": lambda v, n: v + 0.0 * af.random.integers((2,), low=0, high=n)[0],
}
"""Steps that do not."""


def in_a_loop(step: Step) -> Step:
    def run(v: Any, n: Any) -> Any:
        sums = af.while_loop(lambda i, _: i < 2, lambda i, s: (i + 1, s + af.sum(step(v, n))), (0, 0.0))
        return joined(v, sums[1])

    return run


def in_a_branch(step: Step) -> Step:
    return lambda v, n: joined(v, af.cond(v[0] > 0, lambda: af.sum(step(v, n)), lambda: -af.sum(step(v, n))))


AROUND: tuple[Callable[[Step], Step], ...] = (lambda step: step, lambda step: step, in_a_loop, in_a_branch)


VECTOR = np.array([0.5, 1.25, -0.75, 2.0, 1.5])
REFUSED = r"cannot feed constant\S*:0 the value \d[\s\S]*was built for[\s\S]*use a placeholder[\s\S]*test_fed_constants"


@pytest.mark.parametrize("around", AROUND[1:])
async def test_a_shape_built_on_a_constant_refuses_another_value(around: Callable[[Step], Step]) -> None:
    """Behaviour 103: whatever takes the shape, and wherever it stands."""
    async with af.Session() as session:
        for name, step in SHAPED.items():
            with af.Graph() as graph:
                n, x = af.constant(2), af.placeholder("float64", (None,))
                result = around(step)(x, n)
            with pytest.raises(af.FeedError, match=REFUSED):
                await session.run(result, {n: 3, x: VECTOR})
                pytest.fail(f"{name} of {graph}")


async def test_what_builds_no_shape_uses_the_fed_value() -> None:
    """Behaviour 103: gradients included."""
    fetched = []
    for make in (af.constant, lambda _: af.placeholder("int64", ())):
        with af.Graph() as graph:
            n, x = make(2), af.placeholder("float64", (None,))
            results = [step(x, n) for step in OPEN.values()]
            total = af.sum(af.stack([af.sum(result) for result in results]))
            fetches = [*results, *af.gradients(total, [x])]
        async with af.Session(graph) as session:
            fetched.append(await session.run(fetches, {n: 3, x: VECTOR}))
    for found, expected in zip(*fetched, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def program(seed: int, make: Callable[[int], Any]) -> tuple[Any, int, list[Any], Any, bool]:
    """Return the integer, what to feed it, the fetches, the vector, and whether a shape is built on the integer."""
    random = Random(seed)
    old, new = random.sample((1, 2, 3, 4), 2)
    n, x = make(old), af.placeholder("float64", (None,))
    is_shaped, v = False, x
    steps = [*SHAPED.values(), *OPEN.values()] if seed % 2 else [*OPEN.values()]
    for step in random.choices(steps, k=3):
        is_shaped = is_shaped or step in SHAPED.values()
        v = random.choice(AROUND)(step)(v, n)
    return n, new, [v, *af.gradients(af.sum(v), [x], unconnected="zero")], x, is_shaped


@pytest.mark.parametrize("seed", range(2 * SEEDS))
async def test_a_fed_constant_counts_everywhere_or_is_refused(seed: int) -> None:
    """Behaviour 103: where placeholders take the place of the constants, a program gives the same."""
    fixed_graph, open_graph = af.Graph(), af.Graph()  # kept: a graph that was dropped refuses every such feed
    with fixed_graph:
        n, new, fixed, x, is_shaped = program(seed, af.constant)
    async with af.Session(regions=False) as session:
        if is_shaped:
            with pytest.raises(af.FeedError, match=REFUSED):
                await session.run(fixed, {n: new, x: VECTOR})
            new = n.node.attrs["value"]
        found = await session.run(fixed, {n: new, x: VECTOR})
        with open_graph:
            n, _, open_, x, _ = program(seed, lambda _: af.placeholder("int64", ()))
        expected = await session.run(open_, {n: new, x: VECTOR})
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("kind", ["batched", "pooled", "vertices"])
async def test_code_that_runs_share_refuses_another_constant(kind: str) -> None:
    """Behaviour 103: a constant is part of the code that several runs compute together."""
    with af.Graph() as graph:
        scale, x = af.constant(2.0, name="scale"), af.placeholder("float64", (2,))
        fed: dict[Any, Any] = {x: [1.0, 2.0]}
        if kind == "batched":
            y: Any = af.batched(lambda v: v * scale)(x)
        elif kind == "pooled":
            y = af.while_loop(lambda v: v[0] < 3.0, lambda v: v * scale, x, pool=af.Pool(2))
        else:
            chained = af.vertex_function(state=af.spec("float64", ()), children=1)
            scaled = chained(lambda v: v.scatter((v.gather(0) + v.pull()) * scale))
            structure = af.InputGraph.placeholder()
            y = af.vertex_map(scaled, structure, x, share=True, initial=0.0).roots
            fed |= structure.feeds(af.InputGraph.chain([2]))
    async with af.Session(graph) as session:
        with pytest.raises(af.FeedError, match=r"cannot feed scale:0 the value 3\.0"):
            await session.run(y, {**fed, scale: 3.0})
        found = await session.run(y, {**fed, scale: 2.0})
        assert np.array_equal(found, await session.run(y, fed))
