"""Measurements that decide how steps on a card become faster: ``python -m benchmarks.gpu_levers --out DIR``.

Each part answers one question of the table at the end, where a prediction stands beside the measured figure. The parts
run in the order of their worth, so that a run of five minutes already decides. Each measurement is a line of
``levers.jsonl`` in the folder, written at once. A part that fails, or is late, leaves a line that says so, and the
others go on.

Without a card the parts run on the stand-in for CuPy, with tiny sizes. Their figures then mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import IO, Any, Final

import numpy as np

import asyncflow as af
from asyncflow.devices.captures import WARM_UPS
from asyncflow.devices.cuda.backend import cuda_backend
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.graphs.graph import PrivateMemory, capture
from asyncflow.devices.cuda.memory import PrivatePool
from asyncflow.streams.cuda.stream import CudaStream
from asyncflow.streams.futures import resolve
from benchmarks import gpu, gpu_launches
from benchmarks.peers import NO_PEERS, Peers, load_peers
from tests.fake_cupy.stand_in import stand_in

ROOT: Final = Path(__file__).resolve().parents[1]
CHECKS: Final = "t12 or t13 or t21 or t22 or t23 or t24"
"""Tests of `tests/gpu` whose subjects have not run on a card yet."""
GRACE_S: Final = 30.0
BUSY_S: Final = 100e-6
"""Length of a turn of the event loop that is kept busy."""


@dataclass(slots=True)
class Lever:
    """A run of the parts: the card, and where measurements go.

    Attributes:
        cupy: the module, or the stand-in for it.
        is_real: there is a card.
        file: for lines.
        peers: libraries to compare with.
        part: that is measured now.
        found: measured values, by part and name.
    """

    cupy: Any
    is_real: bool
    file: IO[str]
    peers: Peers
    part: str = ""
    found: dict[tuple[str, str], float] = field(default_factory=dict)

    def note(self, name: str, value: float, **others: object) -> None:
        """Write a measurement down."""
        self.found[self.part, name] = value
        self.line(part=self.part, name=name, value=round(value, 4), **others)

    def line(self, **values: object) -> None:
        """Write a line, at once."""
        self.file.write(json.dumps(values, default=str) + "\n")
        self.file.flush()

    def size(self, real: int, tiny: int) -> int:
        """Return the size for a card, or for the stand-in."""
        return real if self.is_real else tiny

    @asynccontextmanager
    async def device(self, index: int = 0) -> AsyncIterator[CudaDevice]:
        """A logical device on card 0."""
        device = CudaDevice(self.cupy, index, physical=0)
        await device.open()
        try:
            device.make_capturable()
            yield device
        finally:
            await device.aclose(GRACE_S)

    def host_us(self, work: Callable[[], object], *, calls: int = 200, settle: Callable[[], object]) -> float:
        """The median µs of the host for one call, over batches that fit the card's queue.

        Args:
            work: the call.
            calls: in all.
            settle: waits for the card.
        """
        count, times = self.size(calls, 4), []
        for _ in range(max(1, count // 50)):
            started = perf_counter()
            for _ in range(min(count, 50)):
                work()
            times.append((perf_counter() - started) / min(count, 50))
            settle()
        return 1e6 * statistics.median(times)

    def card_us(self, device: CudaDevice, work: Callable[[], object], *, repeats: int = 20) -> float:
        """The median µs that the card takes for the launches of one call."""
        cupy, times = self.cupy, []
        for _ in range(self.size(repeats, 1)):
            with device.compute:
                before, after = cupy.cuda.Event(), cupy.cuda.Event()
                before.record(device.compute.raw)
                work()
                after.record(device.compute.raw)
                after.synchronize()
            times.append(1e3 * cupy.cuda.get_elapsed_time(before, after))
        return float(statistics.median(times))


def ticket(stream: CudaStream) -> asyncio.Future[None]:
    """Return a future that is done once all work of the stream is."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stream.notify(lambda error: resolve(future, error=error))
    return future


async def timed_ms(work: Callable[[], Awaitable[object]], *, repeats: int, warm_ups: int = WARM_UPS + 2) -> float:
    """The median ms of an awaited call."""
    times = []
    for repeat in range(-warm_ups, repeats):
        started = perf_counter()
        await work()
        if repeat >= 0:
            times.append(perf_counter() - started)
    return 1e3 * statistics.median(times)


# -- parts -----------------------------------------------------------------------------------------------------------


async def machine(run: Lever) -> None:
    """M0: versions, and the first kernel of the process."""
    cupy = run.cupy
    run.line(
        part=run.part, name="versions", cupy=cupy.__version__, numpy=np.__version__, python=platform.python_version()
    )
    started = perf_counter()
    async with run.device() as device:
        with device.compute:
            cupy.zeros(16, np.float32)
        await ticket(device.compute)
    run.note("first kernel, ms", 1e3 * (perf_counter() - started))


async def host_calls(run: Lever) -> None:
    """M1: µs of the host for each kind of call."""
    cupy, runtime = run.cupy, run.cupy.cuda.runtime
    async with run.device() as device:
        stream = device.compute
        raw = stream.raw
        with stream:
            x, y = cupy.zeros(1024, np.float32), cupy.zeros(1024, np.float32)
            square, out = cupy.zeros((8, 8), np.float32), cupy.zeros((8, 8), np.float32)
        event = cupy.cuda.Event(disable_timing=True)
        fused = cupy.ElementwiseKernel("float32 x, float32 y", "float32 z", "z = x * y + x", "lever_fused")
        calls: dict[str, Callable[[], object]] = {
            "cupy.add(out=), us": lambda: cupy.add(x, y, out=y),
            "cupy.add, us": lambda: cupy.add(x, y),
            "ElementwiseKernel, us": lambda: fused(x, y, y),
            "product of matrices, us": lambda: device.xp.matmul(square, square, out=out),
            "allocation, us": lambda: cupy.empty(1024, np.float32),
            "memcpyAsync, us": lambda: runtime.memcpyAsync(
                y.data.ptr, x.data.ptr, x.nbytes, runtime.memcpyDeviceToDevice, raw.ptr
            ),
            "record of an event, us": lambda: runtime.eventRecord(event.ptr, raw.ptr),
            "wait for an event, us": lambda: runtime.streamWaitEvent(raw.ptr, event.ptr),
        }
        for count in (1, 100, run.size(1500, 100)):
            graph = _chain_graph(run, device, x, y, count)
            calls[f"launch of a graph of {count}, us"] = partial(graph.launch, stream=raw)
        for name, call in calls.items():
            with stream:
                call()  # the first call may compile
                raw.synchronize()
                run.note(name, run.host_us(call, settle=raw.synchronize))
            await asyncio.sleep(0)


def _chain_graph(run: Lever, device: CudaDevice, x: Any, y: Any, count: int) -> Any:
    def chain() -> None:
        for _ in range(count):
            run.cupy.add(x, y, out=y)

    with device.compute:
        chain()
        device.compute.raw.synchronize()
        graph, _ = capture(device.compute.raw, chain)
    return graph


async def gaps(run: Lever) -> None:
    """M2: µs of the card for a small node, in a stream and in a graph."""
    cupy, count = run.cupy, run.size(1000, 10)
    async with run.device() as device:
        for blocks, elements in ((1, 128), (132, 132 * 128)):
            with device.compute:
                x, y = cupy.zeros(elements, np.float32), cupy.zeros(elements, np.float32)

            def stream_chain(x: Any = x, y: Any = y) -> None:
                for _ in range(count):
                    cupy.add(x, y, out=y)

            graph = _chain_graph(run, device, x, y, count)
            launch = partial(graph.launch, stream=device.compute.raw)
            for name, work in (("a kernel", stream_chain), ("a node of a graph", launch)):
                work()
                run.note(f"{name}, {blocks} blocks, us", run.card_us(device, work) / count)
                await asyncio.sleep(0)


async def loops(run: Lever) -> None:
    """M3: µs of an iteration of a loop that the card decides."""
    with af.Graph() as graph:
        x, limit = af.placeholder("float32", (64,)), af.placeholder("float32", (1,))
        y = af.while_loop(lambda y: af.max(y) < limit[0], lambda y: y + 1.0, x)
    for on_card in (True, False):
        async with af.Session(graph, [gpu.CARD], device_while=on_card) as session:
            for iterations in (10, run.size(1_000, 20), *((100_000,) if on_card and run.is_real else ())):
                feeds = {x: np.zeros(64, np.float32), limit: np.full(1, iterations, np.float32)}
                ms = await timed_ms(partial(session.run, y, feeds), repeats=run.size(5, 1), warm_ups=2)
                who = "the card" if on_card else "the host"
                run.note(f"decided by {who}, {iterations} iterations, us", 1e3 * ms / iterations)


async def products(run: Lever) -> None:
    """M4: products of matrices in graphs of 100."""
    cupy, count = run.cupy, run.size(100, 3)
    shapes = [(64, 2048, 512), (64, 512, 2048), (16, 512, 128), (1, 2048, 512), (6400, 2048, 512), (512, 2048, 6400)]
    async with run.device() as device:
        for rows, columns, inner in shapes if run.is_real else [(4, 8, 2), (1, 8, 2)]:
            with device.compute:
                a, b = cupy.ones((rows, inner), np.float32), cupy.ones((inner, columns), np.float32)
                out = cupy.empty((rows, columns), np.float32)

                def multiply(a: Any = a, b: Any = b, out: Any = out) -> None:
                    for _ in range(count):
                        device.xp.matmul(a, b, out=out)

                multiply()
                device.compute.raw.synchronize()
                graph, _ = capture(device.compute.raw, multiply)
            us = run.card_us(device, partial(graph.launch, stream=device.compute.raw)) / count
            rate = 2e-6 * rows * columns * inner / us
            run.note(f"{rows} x {inner} x {columns}, us", us, teraflops=round(rate, 3))
            await asyncio.sleep(0)


async def steps(run: Lever) -> None:
    """M7: this library's own steps, launched and as CUDA graphs; equal to the bit."""
    sizes = gpu.LSTM_SIZES if run.is_real else {"steps": 4, "batch": 2, "hidden": 4}
    answers = {}
    for graphs in (False, True):
        step = gpu.lstm_step(sizes, cuda_graphs=graphs)
        async with step.session:
            ms = await timed_ms(step.run, repeats=run.size(7, 1))
            answers[graphs] = [np.asarray(value).tobytes() for value in _leaves(await step.run())]
        run.note(f"LSTM training, {'graph' if graphs else 'launched'}, ms", ms)
    run.note("LSTM training, equal to the bit", float(answers[True] == answers[False]))
    for name, build in gpu_launches.PROGRAMS.items():
        for graphs in (False, True):
            with af.Graph() as graph:
                program = build()
            async with af.Session(graph, [gpu.CARD], cuda_graphs=graphs) as session:
                once = partial(session.run, program.fetches, program.feeds)
                ms = await timed_ms(once, repeats=run.size(15, 1))
                explained = session.plan(program.fetches, list(program.feeds)).explain()
            launching = next((line.strip() for line in explained.splitlines() if line.startswith("      # ")), "")
            run.note(f"{name}, {'graph' if graphs else 'launched'}, ms", ms, launching=launching)


def _leaves(step: Any) -> list[Any]:
    loss, gradients = step
    return [loss, *gradients]


async def peers_steps(run: Lever) -> None:
    """M6: the same step in PyTorch and JAX."""
    sizes = gpu.LSTM_SIZES if run.is_real else {"steps": 3, "batch": 2, "hidden": 4}
    for result in await gpu.measure_lstm(run.peers, repeats=run.size(5, 1), sizes=sizes):
        run.note(f"{result.system}, {result.figure.unit}", result.median, case=result.case)


async def by_hand(run: Lever) -> None:
    """M5: the forward loop by hand, launched and captured."""
    cupy = run.cupy
    count, batch, hidden = (100, 64, 512) if run.is_real else (3, 2, 4)
    async with run.device() as device:
        with device.compute:
            weights, h0 = cupy.ones((hidden, 4 * hidden), np.float32), cupy.zeros((batch, hidden), np.float32)

            def forward() -> None:
                h = c = h0
                for _ in range(count):
                    gates = device.xp.matmul(h, weights)
                    i, f, o, g = (gates[:, k * hidden : (k + 1) * hidden] for k in range(4))
                    c = cupy.tanh(f) * c + cupy.tanh(i) * cupy.tanh(g)
                    h = cupy.tanh(o) * cupy.tanh(c)

            forward()
            device.compute.raw.synchronize()
            run.note("forward, launched, us a step", run.card_us(device, forward, repeats=5) / count)
            # Memory allocated while capturing belongs to the graph, so its pool must live as long.
            with PrivateMemory(device.compute, PrivatePool(cupy, device.pool, "the forward loop")) as memory:
                graph, _ = capture(device.compute.raw, forward)
        launch = partial(graph.launch, stream=device.compute.raw)
        run.note("forward, captured, us a step", run.card_us(device, launch) / count)
        await ticket(device.compute)
        del graph, launch, memory


async def capturing(run: Lever) -> None:
    """M8: ms to capture a graph, by its nodes."""
    async with run.device() as device:
        with device.compute:
            x, y = run.cupy.zeros(128, np.float32), run.cupy.zeros(128, np.float32)
        for count in (100, 1500, 10_000) if run.is_real else (3, 6):
            started = perf_counter()
            _chain_graph(run, device, x, y, count)
            run.note(f"launch, capture and instantiate {count} nodes, ms", 1e3 * (perf_counter() - started))
            await asyncio.sleep(0)


async def one_kernel(run: Lever) -> None:
    """M9: a run with one kernel, by where its input and result are."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (1024,))
        y = af.tanh(x)
        resident = af.Variable(np.ones(1024, np.float32), name="resident")
        kept = resident.assign(af.tanh(resident)).node
    fed = np.ones(1024, np.float32)
    async with af.Session(graph, [gpu.CARD]) as session:
        runs: dict[str, Callable[[], Awaitable[object]]] = {
            "fed and fetched, us": lambda: session.run(y, {x: fed}),
            "fed, us": lambda: session.run(y.node, {x: fed}),
            "resident, us": lambda: session.run(kept),
            "on the card, us": lambda: session.run(af.on_device(y), {x: fed}),
        }
        for name, work in runs.items():
            run.note(name, 1e3 * await timed_ms(work, repeats=run.size(300, 2)))


async def completions(run: Lever) -> None:
    """M10: µs from a launch until a coroutine goes on, on an idle loop and on a busy one."""

    async def keep_busy() -> None:
        while True:
            until = perf_counter() + BUSY_S
            while perf_counter() < until:
                pass
            await asyncio.sleep(0)

    async with run.device() as device:
        with device.compute:
            x = run.cupy.zeros(16, np.float32)

        async def once() -> None:
            with device.compute:
                run.cupy.add(x, x, out=x)
            await ticket(device.compute)

        run.note("a ticket on an idle loop, us", 1e3 * await timed_ms(once, repeats=run.size(500, 3)))
        task = asyncio.ensure_future(keep_busy())
        try:
            run.note("a ticket on a busy loop, us", 1e3 * await timed_ms(once, repeats=run.size(100, 2)))
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def large_values(run: Lever) -> None:
    """M11: ms of 13 MB in, and of 9 MB out."""
    numbers, out = run.size(13 << 18, 1 << 10), run.size(9 << 18, 1 << 10)
    with af.Graph() as graph:
        x = af.placeholder("float32", (numbers,))
        first = af.sum(x)
        large = af.zeros((out,), dtype="float32") + first
    fed = np.ones(numbers, np.float32)
    async with af.Session(graph, [gpu.CARD]) as session:
        run.note("13 MB in, ms", await timed_ms(lambda: session.run(first, {x: fed}), repeats=run.size(20, 1)))
        run.note(
            "13 MB in, 9 MB out, ms", await timed_ms(lambda: session.run(large, {x: fed}), repeats=run.size(20, 1))
        )


async def transfers(run: Lever) -> None:
    """M12: µs of a value that goes to another logical device of the card, and back."""
    rounds = run.size(50, 2)
    with af.Graph() as graph:
        y = x = af.placeholder("float32", (64,))
        for number in range(2 * rounds):
            with af.device(f"cuda:{number % 2}"):
                y = af.tanh(y)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(af.Session(graph, ["cuda:0", "cuda:1"]))
        fed = {x: np.ones(64, np.float32)}
        ms = await timed_ms(lambda: session.run(y, fed), repeats=run.size(10, 1))
    run.note("a transfer, us", 1e3 * ms / (2 * rounds))


async def checks(run: Lever) -> None:
    """M13: tests whose subjects have not run on a card yet."""
    if not run.is_real:
        run.line(part=run.part, name="checks", status="not run", reason="the test suite runs them on the stand-in")
        return
    command = [sys.executable, "-m", "tests.gpu.check", "B", "--out", str(Path(run.file.name).parent), "-k", CHECKS]
    ended = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, timeout=300, check=False)
    run.note("checks, exit code", float(ended.returncode))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the measurements.

    Attributes:
        name: of `GPU levers`.
        seconds: that it may take in a run of nine minutes.
        measure: does it.
        figure: the measurement that decides.
        predicted: for an H100.
        decides: the question that it answers.
    """

    name: str
    seconds: float
    measure: Callable[[Lever], Awaitable[None]]
    figure: str
    predicted: str
    decides: str


PARTS: Final = (
    Part("M0", 10, machine, "first kernel, ms", "", "whether the card works"),
    Part("M1", 20, host_calls, "ElementwiseKernel, us", "9 to 21", "packed launches, if they take 4 or less"),
    Part("M2", 20, gaps, "a node of a graph, 1 blocks, us", "1.5", "at 2.5 and more, persistent kernels"),
    Part("M3", 30, loops, "decided by the card, 1000 iterations, us", "13", "unrolling of such loops"),
    Part("M4", 60, products, "64 x 512 x 2048, us", "9", "workspace, other kernels for small products"),
    Part("M7", 90, steps, "LSTM training, graph, ms", "13 to 15", "graphs by default, if equal to the bit"),
    Part("M6", 80, peers_steps, "jax jit, ms", "13", "the goal: 1.2 times of it"),
    Part("M5", 60, by_hand, "forward, captured, us a step", "25", "fusion of cells"),
    Part("M8", 30, capturing, "launch, capture and instantiate 1500 nodes, ms", "60", "when to capture"),
    Part("M9", 20, one_kernel, "resident, us", "1000", "what a run costs besides kernels"),
    Part("M10", 20, completions, "a ticket on a busy loop, us", "5200", "completion flags, at one turn and 20"),
    Part("M11", 20, large_values, "13 MB in, 9 MB out, ms", "4", "results that stay in pinned memory"),
    Part("M12", 20, transfers, "a transfer, us", "250", "transfers without a ticket, at 30"),
    Part("M13", 60, checks, "checks, exit code", "0", "what may be on by default"),
)


async def measure_all(run: Lever, minutes: float, parts: Sequence[Part] = PARTS) -> None:
    """Run the parts, each within its share of the time that is left."""
    ends_s = perf_counter() + 60 * minutes
    for place, part in enumerate(parts):
        left_s = ends_s - perf_counter()
        share_s = left_s * part.seconds / sum(each.seconds for each in parts[place:])
        # A quick part leaves its time to the others. A slow part may take up to twice its share.
        limit_s = min(left_s, 2 * share_s)
        run.part, started = part.name, perf_counter()
        status: dict[str, object] = {"status": "done"}
        try:
            async with asyncio.timeout(limit_s):
                await part.measure(run)
        except TimeoutError:
            status = {"status": "late", "limit_s": round(limit_s, 1)}
        except Exception as error:  # the other parts are to run all the same
            status = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        run.line(part=part.name, name="end", seconds=round(perf_counter() - started, 3), **status)


def table(run: Lever, parts: Sequence[Part] = PARTS) -> str:
    """The decisions, with predictions for an H100 beside the measured figures."""
    lines = [f"{'':5}{'figure':48}{'predicted':>12}{'measured':>12}  decides"]
    for part in parts:
        value = run.found.get((part.name, part.figure))
        measured = "-" if value is None else f"{value:.4g}"
        lines.append(f"{part.name:5}{part.figure:48}{part.predicted:>12}{measured:>12}  {part.decides}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_levers", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="of all parts together")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for levers.jsonl")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(
        "CUPY_CACHE_DIR", str(ROOT / ".cupy_cache")
    )  # the folder has kernels that an earlier run has compiled
    backend = cuda_backend()
    with (
        nullcontext(backend.cupy) if backend.cupy is not None else stand_in(devices=1, nbytes=256 << 20) as cupy,
        (options.out / "levers.jsonl").open("w", encoding="utf-8") as file,
    ):
        is_real = backend.cupy is not None
        run = Lever(cupy, is_real, file, load_peers() if is_real else NO_PEERS)
        card = backend.cards[0] if backend.cards else f"none, a stand-in for CuPy: {backend.reason}"
        run.line(part="", name="machine", card=card)
        af.run(measure_all(run, options.minutes))
        print(f"{card}\n{table(run)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
