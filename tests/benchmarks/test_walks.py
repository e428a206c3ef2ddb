"""The walks of calls are counted, and stay as short as they have become."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.walks import CASES, Case, main, measure, table, walk_of

MOST = {
    "straight": 16,
    "threaded": 100,
    "Send/Recv": 103,
    "pooled step": 489,
    "batched call": 279,
    "CUDA": 226,
    "compile": 815,
    "gradient": 1520,
}
"""Most calls of the walks that were made shorter; none may grow again unnoticed. The figures include the checks of the
tests at the end of a run.

For a card they include calls that depend on whether copies end before they are asked for. Four calls ask a region for
its input buffers, which saves a copy on the card for each feed of a CUDA graph.

Compiling took 10 fewer before a pass looked for an order that holds less, and 15 fewer before a pass looked for
kernels of users. It took 735 before nodes let go of their graph: each look at it is a call, and the program of this
walk drops its graph.
"""


def one() -> int:
    return 1


async def test_only_functions_of_the_package_are_counted() -> None:
    """Functions of tests and of other packages are not counted."""

    async def call() -> None:
        one()
        await asyncio.sleep(0)

    assert (await walk_of(call)).total() == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_walk_is_counted(case: Case) -> None:
    walk = measure(case)
    session = "runtime/session/session.py: Session."
    called = {"compile": f"{session}plan", "gradient": "autodiff/gradients.py: gradients"}
    assert walk[called.get(case.name, f"{session}run")]
    assert walk.total() <= MOST[case.name]


def test_the_table_compares_counts_with_earlier_ones() -> None:
    assert table({"straight": 16}).splitlines() == [
        "functions called      issue   22ec133   now   now/22ec133",
        "straight                 34        32    16          0.50",
    ]
    assert table({"pooled step": 489}).splitlines()[1:] == ["pooled step               -         -   489             -"]


def test_the_functions_of_a_walk_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "straight"]) == 0
    assert "   1  runtime/session/session.py: Session.run\n" in capsys.readouterr().out
