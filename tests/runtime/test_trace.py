"""A trace made while another one records: neither loses anything."""

from __future__ import annotations

from pathlib import Path

import pytest

import asyncflow as af


@pytest.fixture
def value(graph: af.Graph) -> af.Tensor:
    return af.constant(1.0) + af.placeholder("float64", (), name="x")


async def run(session: af.Session, value: af.Tensor, trace: af.Trace | str | None = None) -> None:
    await session.run(value, {value.node.inputs[1]: 1.0}, trace=trace)


async def test_inner_block(session: af.Session, value: af.Tensor) -> None:
    with af.Trace() as outer:
        await run(session, value)
        with af.Trace() as inner:
            await run(session, value)
        await run(session, value)
    assert (len(outer.runs), len(inner.runs)) == (3, 1)
    assert inner.runs[0] in outer.runs
    assert {firing.run for firing in outer.firings} == {span.run for span in outer.runs}
    assert len(outer.memory) == len(outer.firings)


async def test_trace_of_one_run(session: af.Session, value: af.Tensor, tmp_path: Path) -> None:
    with af.Trace() as outer:
        await run(session, value, one := af.Trace())
        await run(session, value, str(tmp_path / "two.json"))
    assert len(one.runs) == 1
    assert len(outer.runs) == 2
    assert (tmp_path / "two.json").exists()


async def test_three_deep_and_entered_again(session: af.Session, value: af.Tensor) -> None:
    outer = af.Trace()
    for _ in range(2):
        with outer, af.Trace(), af.Trace():
            await run(session, value)
    assert [span.status for span in outer.runs] == ["ok", "ok"]


async def test_capacity_holds_for_what_is_added(session: af.Session, value: af.Tensor) -> None:
    with af.Trace(capacity=1) as outer, af.Trace() as inner:
        await run(session, value)
        await run(session, value)
    assert len(outer.firings) == 1
    assert outer.dropped == len(inner.firings) - 1


async def test_trace_made_outside_is_independent(session: af.Session, value: af.Tensor) -> None:
    independent = af.Trace()
    with af.Trace() as outer:
        await run(session, value, independent)
    assert len(independent.runs) == 1
    assert outer.runs == []
