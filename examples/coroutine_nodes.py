"""A coroutine as a node: the iterations of a loop wait for a server while the kernels of others compute.

Every iteration fetches a matrix from a TCP server, which takes its time to answer, and then computes with it. The loop
does not declare any overlap. The fetches depend on the loop counter alone, so the runtime has as many of them under way
as `parallel_iterations` allows. Meanwhile it computes with the matrices that have arrived. This program runs the loop
with 1 and with 16, and draws both timelines.

    python examples/coroutine_nodes.py --output demo-out
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import asyncflow as af

SIZE = 256
"""Rows and columns of a matrix."""

LATENCY = 0.020
"""Seconds the server takes to answer, on average."""

Matrix = NDArray[np.float32]


def matrix(number: int) -> Matrix:
    """Return the server's matrix of this number."""
    return np.random.default_rng(number).standard_normal((SIZE, SIZE), np.float32)


@asynccontextmanager
async def serving(matrices: Sequence[Matrix], latency: float) -> AsyncIterator[int]:
    """A server on this machine that answers after half to one and a half times `latency` seconds; gives its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = int(await reader.readline())
        await asyncio.sleep(latency * (0.5 + number * 0.618 % 1))
        writer.write(matrices[number].tobytes())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@af.op(outputs=af.spec("float32", (SIZE, SIZE)))
async def fetch(number: np.int64, *, port: int) -> Matrix:
    """Asks the server for a matrix. While this awaits, other nodes fire."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"%d\n" % number)
    data = await reader.read(-1)
    writer.close()
    await writer.wait_closed()
    return np.frombuffer(data, np.float32).reshape(SIZE, SIZE)


def build(port: int, count: int, parallel_iterations: int) -> tuple[af.Graph, af.Tensor]:
    """A graph that adds up a score of each of `count` matrices, and the tensor of the sum."""
    with af.Graph() as graph:

        def more(number: af.Tensor, total: af.Tensor) -> af.Tensor:
            return number < count

        def add_score(number: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            x = fetch(number, port=port)
            for _ in range(3):
                x = af.tanh(af.matmul(x, x) / SIZE**0.5)
            return number + 1, total + af.sum(af.abs(x))

        start = 0, af.constant(0.0, "float32")
        _, total = af.while_loop(more, add_score, start, parallel_iterations=parallel_iterations, name="scores")
    return graph, total


def compute_directly(matrices: Sequence[Matrix]) -> float:
    """The same sum in NumPy."""
    total = np.float32(0)
    for x in matrices:
        for _ in range(3):
            x = np.tanh(x @ x / np.float32(SIZE**0.5))
        total += np.abs(x).sum()
    return float(total)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way of running the loop."""

    total: float
    seconds: float
    at_once: int
    """Most fetches under way at the same time."""
    trace: af.Trace


async def measure(matrices: Sequence[Matrix], latency: float, parallel_iterations: int) -> Outcome:
    """Runs the loop against a server of its own."""
    async with serving(matrices, latency) as port:
        graph, total = build(port, len(matrices), parallel_iterations)
        async with af.Session(graph) as session:
            trace = af.Trace()
            value = await session.run(total, trace=trace)
    summary = af.profiler.summarize(trace)
    at_once = max(lane.max_concurrency for lane in summary.lanes if lane.stream == "async")
    return Outcome(float(value), summary.wall_ns / 1e9, at_once, trace)


def main(argv: Sequence[str] | None = None) -> int:
    """Gives 0 if both runs agree with NumPy and overlapped as they should, else 1."""
    parser = argparse.ArgumentParser(description="I/O and kernels of different iterations overlap.")
    parser.add_argument("--output", type=Path, default=Path("demo-out"), help="folder for the timelines")
    parser.add_argument("--count", type=int, default=48, help="how many matrices to fetch")
    parser.add_argument("--latency", type=float, default=LATENCY, help="seconds the server takes to answer")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)

    print(f"fetching {options.count} matrices; the server takes {options.latency * 1000:.0f} ms to answer ...")
    matrices = [matrix(number) for number in range(options.count)]
    outcomes = {n: af.run(measure(matrices, options.latency, n)) for n in (1, 16)}
    for parallel, outcome in outcomes.items():
        path = options.output / f"coroutine_nodes_{parallel}.html"
        af.profiler.save(outcome.trace, path)
        print(
            f"  parallel_iterations={parallel:<2}  {outcome.seconds * 1000:5.0f} ms, at most {outcome.at_once:2} "
            f"fetches at once: {path.resolve().as_uri()}"
        )
    one, many = outcomes[1], outcomes[16]
    print(f"  {one.seconds / many.seconds:.1f} times faster, without a change to the loop")

    expected = compute_directly(matrices)
    agreed = np.allclose([one.total, many.total], expected, rtol=1e-4)
    overlapped = one.at_once == 1 < many.at_once  # on a busy machine the server answers before all have asked
    print(f"{'PASS' if overlapped else 'FAIL'}: at most {one.at_once} fetch was under way, and then {many.at_once}")
    print(f"{'PASS' if agreed else 'FAIL'}: the sums are {one.total:.2f} and {many.total:.2f}, NumPy's {expected:.2f}")
    return 0 if agreed and overlapped else 1


if __name__ == "__main__":
    sys.exit(main())
