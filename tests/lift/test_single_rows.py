"""Warnings about calls that cannot take rows at once: a user's function of one row is called for each."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.lift import single_rows

NUMBER = af.spec("float32", ())


@pytest.fixture(autouse=True)
def _told_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_rows, "_warned", {})


@af.op(outputs=NUMBER)
def half(x: Any) -> Any:
    return x / 2


@af.op(outputs=NUMBER, rows=True)
def halves(x: Any) -> Any:
    return x / 2


Half = Callable[[af.Tensor], af.Tensor]


def batched(x: af.Tensor, half: Half) -> None:
    af.batched(lambda row: half(row) + 1.0)(x[0])


def pooled(x: af.Tensor, half: Half) -> None:
    af.while_loop(
        lambda x: x > 1.0, lambda x: af.cond(x > 9.0, lambda: half(x), lambda: x - 1.0), (x[0],), pool=af.Pool()
    )


def shared(x: af.Tensor, half: Half) -> None:
    @af.vertex_function(children=1, state=NUMBER)
    def node(v: Any) -> None:
        v.scatter(v.gather(0) + half(v.pull()))

    graph = af.InputGraph.from_edges(3, [(0, 1), (1, 2)])
    af.vertex_map(node, graph, x, share=True)


def mapped(x: af.Tensor, half: Half) -> None:
    af.map_fn(half, x, lift=True)


BUILDS = {"batched": batched, "pool=": pooled, "share=True": shared, "lift=True": mapped}


@pytest.mark.parametrize("asked", BUILDS)
def test_a_function_of_one_row_is_told_where_all_were_asked_for(asked: str) -> None:
    """The warning has the reason and the user's line, and comes once however often the function is built."""
    graphs = af.Graph(), af.Graph()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for graph in graphs:
            with graph:
                BUILDS[asked](af.placeholder("float32", (3,)), half)
    (warning,) = told
    message = str(warning.message)
    assert f"half takes one row, so {asked} calls it once for each" in message
    assert "declare it with rows=True if it takes rows" in message
    assert warning.filename == __file__
    assert any("half takes one row" in remark for remark in graphs[0].root.remarks.values())
    with warnings.catch_warnings(), af.Graph():
        warnings.simplefilter("error")
        BUILDS[asked](af.placeholder("float32", (3,)), halves)


def test_nothing_is_told_where_nothing_was_asked_for() -> None:
    with warnings.catch_warnings(), af.Graph():
        warnings.simplefilter("error")
        x = af.placeholder("float32", (3,))
        af.map_fn(half, x)
        af.map_fn(half, x, lift=False)


async def test_members_that_are_all_different_are_told_apart() -> None:
    """There are more shapes than are kept, and one call for each: the warning comes once, at the line of the call; not
    with pad=.
    """
    with af.Graph() as graph:
        x = af.placeholder("float32", (None,))
        total = af.batched(af.sum)(x)
    async with af.Session(graph) as session:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                rows = [np.ones(1 + n, np.float32) for n in range(80)]
                assert [*await asyncio.gather(*(session.run(total, {x: row}) for row in rows))] == [*range(1, 81)]
    (warning,) = told
    assert "sum is hardly batched" in str(warning.message)
    assert warning.filename == __file__
