"""Number of functions that a call walks through: ``python -m benchmarks.walks``; ``--list NAME`` shows their names.

Counted are calls of Python functions of the package, on the thread of the event loop, from one call of the user's to
its result, as `sys.setprofile` hears of them: a coroutine or generator that goes on counts each time. Calls inside
NumPy, the event loop and the stand-in for CuPy are not counted, nor calls of other threads. The number is the length of
our own way, is the same on every machine, and stands for no time. It is the fewest of several calls, as a burst that
ends between two lines costs a call or two more. For a program that has run before, that is: plans, costs and caches are
there.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import asyncflow as af
from tests.fake_cupy.stand_in import stand_in

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from types import FrameType

PACKAGE: Final = str(Path(af.__file__).parent)
WARM_UPS: Final = 5
TAKEN: Final = 20
"""Number of counted calls; the fewest count."""

Walk = Counter[str]
"""Number of calls of each function."""


@dataclass(frozen=True, slots=True)
class Case:
    """A call whose walk is counted.

    Attributes:
        name: as the table has it.
        issue: what issue 13 says of such a program, whose details it does not tell; None where it says nothing.
        before: what this script counted at 22ec133, the commit that the issue began with; None for programs that it
            could not run.
        count: the walk of one call.
        devices: a context in which sessions find their devices.
    """

    name: str
    issue: int | None
    before: int | None
    count: Callable[[], Coroutine[Any, Any, Walk]]
    devices: Callable[[], AbstractContextManager[object]] = nullcontext


async def walk_of(call: Callable[[], Awaitable[object]]) -> Walk:
    """The functions that a call walks through, once it has been made a few times."""
    for _ in range(WARM_UPS):
        await call()
    return min([await walked(call) for _ in range(TAKEN)], key=Counter.total)


async def walked(call: Callable[[], Awaitable[object]]) -> Walk:
    """The functions that one call walks through."""
    heard: Counter[Any] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            heard[frame.f_code] += 1

    sys.setprofile(note)
    try:
        await call()
    finally:
        sys.setprofile(None)
    named: Walk = Counter()
    for code, times in heard.items():
        if code.co_filename.startswith(PACKAGE):
            named[f"{Path(code.co_filename).relative_to(PACKAGE)}: {code.co_qualname}"] += times
    return named


async def straight() -> Walk:
    """One short node, fed a number."""
    with af.Graph() as graph:
        x = af.placeholder("float32", ())
        y = x * 2
    async with af.Session(graph) as session:
        return await walk_of(lambda: session.run(y, {x: 21.0}))


async def threaded() -> Walk:
    """One product of matrices, which takes too long for the event loop."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (None, None))
        y = x @ x
    fed = np.ones((350, 350), np.float32)
    async with af.Session(graph) as session:
        return await walk_of(lambda: session.run(y, {x: fed}))


async def between_devices() -> Walk:
    """A short node on one CPU device, whose value one on another takes."""
    with af.Graph() as graph:
        x = af.placeholder("float32", ())
        with af.device("cpu:0"):
            there = x * 2
        with af.device("cpu:1"):
            y = there + 1
    async with af.Session(graph, devices=["cpu:0", "cpu:1"]) as session:
        return await walk_of(lambda: session.run(y, {x: np.float32(1)}))


async def pooled_step() -> Walk:
    """Two runs of a pooled loop of eight iterations, which are stepped together."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (8,))
        _, y = af.while_loop(lambda i, v: i < 8, lambda i, v: (i + 1, v * x), (0, x), pool=af.Pool(8))
    fed = np.ones(8, np.float32)
    async with af.Session(graph) as session:
        return await walk_of(lambda: asyncio.gather(session.run(y, {x: fed}), session.run(y, {x: fed})))


async def batched_call() -> Walk:
    """Two runs of a batched function, which share a call."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (8,))
        y = af.batched(lambda v: v * 2)(x)
    fed = np.ones(8, np.float32)
    async with af.Session(graph) as session:
        return await walk_of(lambda: asyncio.gather(session.run(y, {x: fed}), session.run(y, {x: fed})))


async def on_a_card() -> Walk:
    """An array fed to a card, two kernels there, and the result fetched."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (8,))
        y = af.tanh(x @ af.constant(np.ones((8, 8), np.float32)))
    fed = np.ones(8, np.float32)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        return await walk_of(lambda: session.run(y, {x: fed}))


async def compiling() -> Walk:
    """A graph of two nodes behind a placeholder, compiled."""
    async with af.Session() as session:

        async def compiled() -> None:
            session.plan(y, [x])

        walks = []
        for _ in range(WARM_UPS + TAKEN):
            with af.Graph():
                x = af.placeholder("float32", ())
                y = x * x + x
            walks.append(await walked(compiled))
        return min(walks[WARM_UPS:], key=Counter.total)


async def building_gradient() -> Walk:
    """The gradient of a loop of two variables and a capture, built."""

    async def counted() -> Walk:
        async def built() -> None:
            af.gradients(y, x)

        with af.Graph():
            x = af.placeholder("float32", ())
            _, y = af.while_loop(lambda i, v: i < 10, lambda i, v: (i + 1, v * x), (0, x))
            return await walked(built)

    walks = [await counted() for _ in range(WARM_UPS + TAKEN)]
    return min(walks[WARM_UPS:], key=Counter.total)


CASES: Final = (
    Case("straight", 34, 32, straight),
    Case("threaded", 118, 136, threaded),
    Case("Send/Recv", 138, 135, between_devices),
    Case("pooled step", None, None, pooled_step),
    Case("batched call", None, None, batched_call),
    Case("CUDA", 372, 388, on_a_card, lambda: stand_in(devices=1)),
    Case("compile", 958, 972, compiling),
    Case("gradient", None, 2192, building_gradient),
)


def measure(case: Case) -> Walk:
    """The walk of a case, on an event loop of its own."""
    with case.devices():
        return asyncio.run(case.count())


def table(counts: dict[str, int]) -> str:
    """Return a line a case: the count that was asked for, the count before, and the count now."""
    lines = ["functions called      issue   22ec133   now   now/22ec133"]
    for case in CASES:
        if case.name in counts:
            now = counts[case.name]
            ratio = "-" if case.before is None else f"{now / case.before:.2f}"
            lines.append(f"{case.name:<20}{case.issue or '-':>7}{case.before or '-':>10}{now:>6}{ratio:>14}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table, or the functions of one walk."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walks", description="Counts the functions of a walk.")
    parser.add_argument("--list", choices=[case.name for case in CASES], help="print the functions of this one instead")
    listed = parser.parse_args(arguments).list
    walks = {case.name: measure(case) for case in CASES if listed in (None, case.name)}
    if listed is not None:
        print("\n".join(f"{times:>4}  {name}" for name, times in sorted(walks[listed].items())))
    else:
        print(table({name: walk.total() for name, walk in walks.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
