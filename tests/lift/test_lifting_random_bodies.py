"""Random bodies of nested branches and loops over rows equal their results row by row, and so do their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af

Body = tuple[Any, ...]


def _bodies() -> st.SearchStrategy[Body]:
    plain = st.sampled_from([("tanh",), ("scale",), ("product",), ("pick",), ("shared",)])
    return st.recursive(
        plain,
        lambda inner: st.one_of(
            st.tuples(st.just("then"), inner, inner),
            st.tuples(st.just("cond"), inner, inner),
            st.tuples(st.just("while"), st.booleans(), inner),
        ),
        max_leaves=5,
    )


def _built(body: Body, x: Any, w: Any) -> Any:
    match body:
        case ("tanh",):
            return af.tanh(x) + 0.25
        case ("scale",):
            return x * 0.5 - 0.125
        case ("product",):
            return x @ w
        case ("pick",):
            return x + x[af.argmax(x)]
        case ("shared",):
            return x + w[0] * 0.5
        case ("then", first, second):
            return _built(second, _built(first, x, w), w)
        case ("cond", first, second):
            return af.cond(af.sum(x) > 0.2, lambda: _built(first, x, w), lambda: _built(second, x, w))
        case ("while", each, inner):
            limit = af.astype(af.sum(x) > 0.0, "int64") + 1 if each else af.constant(2)
            return af.while_loop(lambda i, y: i < limit, lambda i, y: (i + 1, _built(inner, y, w) * 0.5), (0, x))[1]
    raise AssertionError(body)


@settings(max_examples=4, deadline=None)
@given(body=_bodies(), n_rows=st.integers(0, 4), seed=st.integers(0, 99))
def test_random_bodies(body: Body, n_rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    fed, weights = rng.normal(size=(n_rows, 3)), rng.normal(size=(3, 3)) * 0.5

    async def main() -> Any:
        with af.Graph() as graph:
            x, w = af.placeholder("float64", (None, 3)), af.constant(weights)
            found = []
            for lift in (True, False):
                y = af.map_fn(lambda row: _built(body, row, w), x, lift=lift)
                first = af.gradients(af.sum(y * y), [x, w], unconnected="zero")
                second = af.gradients(af.sum(first[0] * first[0]), [x], unconnected="zero")
                # Where not all can be lifted, map_fn may loop.
                slopes = lambda row: af.gradients(af.sum(_built(body, row, w) ** 2), [row, w], unconnected="zero")  # noqa: E731
                inner = af.map_fn(slopes, x, lift="auto" if lift else False)
                pairs = lambda rows: af.map_fn(lambda row: _built(body, row, w), rows, lift=lift)  # noqa: B023, E731
                folded = af.map_fn(pairs, af.stack([x, x * 0.5, -x]), lift=lift)
                found.append((y, *first, *second, *inner, folded))
        async with af.Session(graph) as session:
            return await session.run(found, {x: fed})

    lifted, looped = af.run(main())
    for one, other in zip(lifted, looped, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-9)
