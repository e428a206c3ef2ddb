"""Nothing is imported once a session is entered: importing holds the event loop, for 10 ms and more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S

PROGRAM = """
import asyncio
import sys

import numpy as np

import asyncflow as af


@af.op(outputs=lambda x: x)
def mine(x):
    return x + 1


@af.op(outputs=lambda x: x)
async def later(x):
    await asyncio.sleep(0)
    return x


@af.op(outputs=lambda x: x)
def fails(x):
    raise ValueError("no")


@af.function
def doubled(x):
    return x * 2


with af.Graph() as graph:
    x = af.placeholder("float64", (None,), name="x")
    n = af.placeholder("int64", (), name="n")
    variable = af.Variable(np.zeros(3), name="v")
    loop = af.while_loop(lambda i, y: i < n, lambda i, y: (i + 1, af.tanh(y * x)), (0, x))[1]
    square = af.reshape(af.concat([x] * 300), (30, 30))
    fetches = [
        x * 2,
        af.cond(n > 2, lambda: x, lambda: -x),
        loop,
        af.gradients(af.sum(loop), x),
        af.map_fn(lambda row: row * 2, x),
        variable.assign_add(x),
        af.random.normal((3,)),
        af.einsum("i,j->ij", x, x),
        af.sort(x),
        af.unique_values(x),
        af.arange(n),
        square @ square,
        mine(x),
        later(x),
        af.astype(x, "float32"),
    ]
    wrong = fails(x)
    steps = af.while_loop(lambda i: i < 3, lambda i: i + 1, (0,))


async def main():
    feeds = [np.ones(3), [1.0, 2.0, 3.0], (1, 2, 3), np.ones(6)[::2]]
    for options in ({}, {"regions": False}, {"memory_limit": 1 << 24}, {"debug": True}):
        async with af.Session(graph, **options) as session:
            before = set(sys.modules)
            for fetch in fetches:
                await session.run(fetch, {x: feeds[0], n: 3}, timeout=60)
            for value in feeds:
                await session.prepare(x * 2, [x])(value)
            await session.run(fetches[:3], {x: feeds[0], n: 3}, trace=af.Trace())
            await asyncio.gather(*(session.run(fetches[-4], {x: feeds[0]}) for _ in range(8)))
            await doubled(np.ones(3))
            try:
                await session.run(wrong, {x: feeds[0]})
            except af.KernelError:
                pass
            imported = sorted(set(sys.modules) - before)
            assert not imported, f"{options}: {imported}"


{run}(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("run", ["asyncio.run", "af.run"])
def test_first_runs_import_nothing(run: str) -> None:
    """Behaviour 95: of many kinds of runs, in a new process."""
    program = PROGRAM.replace("{run}", run)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
