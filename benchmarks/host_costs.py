"""Costs of the host for each kind of work: ``python -m benchmarks.host_costs``, on a card.

Small programs, each of which makes the host do much of one thing, run on a real card, and once more on a simulated one,
which counts the host's work. The costs explain the processor's time of all programs best, by least squares of relative
errors. Time of the processor, not of the clock: while the host waits it is free.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from time import process_time
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import asyncflow as af
from asyncflow.devices.figures.host import COSTS, Call
from asyncflow.devices.machine import hardware
from asyncflow.devices.registry import available_devices
from asyncflow.graph.builtin import PLACEHOLDER
from asyncflow.testing import virtual_clock
from asyncflow.values import Array, Nest

_EYE = np.eye(8, dtype=np.float32)
"""On any card a kernel on so few rows and columns ends before the next one is launched."""

_BATCH_S = 0.02
_WARM_UPS = 4
_MACHINE = "2 x h100, nvlink4"
_KINDS = "sim", "cuda"
"""Kinds of cards: one counts, and one is measured."""


class HostProgram(NamedTuple):
    """Something that keeps the host busy."""

    name: str
    """Name of the work."""
    fetches: Nest
    """For a run."""
    options: Mapping[str, Any] = {}
    """Of the session."""
    devices: int = 1
    runs: int = 1
    """Number of runs that are timed as one."""
    events: int = 0
    """In place of runs: how many times a stream waits for another, which a simulation does not tell."""
    kind: str = ""
    """Of the devices."""
    feeds: Mapping[af.Tensor, Array] = {}

    async def go(self, session: af.Session) -> None:
        """Do the timed work once."""
        if self.events:
            device = session.devices[0]
            for _ in range(self.events):
                device.d2h.wait(device.compute.record())
            return
        for _ in range(self.runs):
            await session.run(self.fetches, self.feeds)

    def session(self) -> af.Session:
        """A session on its devices, to be entered."""
        return af.Session(devices=[f"{self.kind}:{index}" for index in range(self.devices)], **self.options)


_Make: TypeAlias = Callable[[str, int, af.Tensor, af.Tensor], HostProgram]
"""Maker of a program: of a kind of devices and a size, around a fed matrix and a constant one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One program: what the host did in it, and how long that took."""

    name: str
    calls: Mapping[Call, int]
    seconds: float

    def explained_s(self, costs: Mapping[str, float]) -> float:
        """Return the expected time at these costs."""
        return sum(costs[f"{call}_s"] * count for call, count in self.calls.items())


def main() -> int:
    """Measures, prints the costs as `asyncflow.devices.figures.presets` has them, and gives the exit code."""
    card = next(device for device in available_devices() if device.name.startswith(_KINDS[1]))
    if not card.available:
        print(
            f"benchmarks.host_costs: error: {card.detail.removeprefix('off: ')}; what launching costs is measured on a "
            "card, and any will do"
        )
        return 2
    print(format_costs(measure(), card.detail))
    return 0


def measure(*, batch_s: float = _BATCH_S, batches: int = 7, sizes: tuple[int, int] = (4, 40)) -> list[Measured]:
    """Every program at two sizes, on the card ``cuda:0``; on it are both devices of programs with two."""
    simulated, real = ([_program(make, kind, size) for make in _PROGRAMS for size in sizes] for kind in _KINDS)
    counted = [_counts(program) for program in simulated]
    seconds = af.run(_timed(real, batch_s, batches))
    return [Measured(*each) for each in zip([program.name for program in real], counted, seconds, strict=True)]


def fitted(measured: list[Measured]) -> dict[str, float]:
    """The costs that explain all of it best; none is negative."""
    weights = np.array([[each.calls.get(name[:-2], 0) / each.seconds for name in COSTS] for each in measured])  # type: ignore[call-overload]
    free = [index for index in range(len(COSTS)) if weights[:, index].any()]
    while True:
        found = np.linalg.lstsq(weights[:, free], np.ones(len(measured)), rcond=None)[0]
        if (found >= 0).all():
            break
        free.pop(int(np.argmin(found)))
    return dict.fromkeys(COSTS, 0.0) | {COSTS[index]: float(cost) for index, cost in zip(free, found, strict=True)}


def format_costs(measured: list[Measured], card: str) -> str:
    """The costs, ready for `asyncflow.devices.figures.presets`, and how well they explain each program."""
    costs = fitted(measured)
    lines = [f"{name}={costs[name] * 1e6:.2g}e-6," for name in COSTS]
    lines.append(f'source="python -m benchmarks.host_costs, {date.today()}: {hardware.processor()}, {card}",')
    lines.append("")
    for each in measured:
        share = each.explained_s(costs) / each.seconds
        lines.append(f"{each.name:<28} {each.seconds * 1e6:>9.1f} µs, of which the costs explain {share:.0%}")
    return "\n".join(lines)


# -- measuring ---------------------------------------------------------------------------------------------------


def _counts(program: HostProgram) -> Mapping[Call, int]:
    """Counts of the host's work in one go of a program, once warm."""
    if program.events:
        return {"event": program.events}

    async def main() -> Counter[Call]:
        async with program.session() as session:
            for _ in range(_WARM_UPS):
                await program.go(session)
            (thread,) = clock.machine.threads.values()
            before = thread.calls.copy()
            await program.go(session)
            return thread.calls - before

    with virtual_clock(_MACHINE) as clock:
        return clock.run(main())


async def _timed(programs: list[HostProgram], batch_s: float, batches: int) -> list[float]:
    return [await _seconds(program, batch_s, batches) for program in programs]


async def _seconds(program: HostProgram, batch_s: float, batches: int) -> float:
    """The processor's time of one go, undisturbed."""
    best = float("inf")
    async with program.session() as session:
        for _ in range(_WARM_UPS):
            await program.go(session)
        for _ in range(batches):
            goes, started = 0, process_time()
            while goes < 3 or process_time() - started < batch_s:
                await program.go(session)
                goes += 1
            best = min(best, (process_time() - started) / goes)
            await asyncio.sleep(0)
    return best


# -- the programs ------------------------------------------------------------------------------------------------


def _program(make: _Make, kind: str, size: int) -> HostProgram:
    with af.Graph() as graph:
        program = make(kind, size, _matrix(), af.constant(_EYE))
    feeds = {node.outputs[0]: _EYE for node in graph.nodes if node.op is PLACEHOLDER}
    return program._replace(kind=kind, feeds=feeds)


def _matrix() -> af.Tensor:
    return af.placeholder("float32", _EYE.shape)


def _chain(x: af.Tensor, w: af.Tensor, length: int) -> af.Tensor:
    """Products, chains of elementwise operations, which are fused, and sums."""
    for _ in range(length):
        x = af.tanh(x @ w) * np.float32(0.5)
        x = x @ (w + af.sum(x, axis=0))
    return x


def _launches(kind: str, size: int, x: af.Tensor, w: af.Tensor) -> HostProgram:
    return HostProgram(f"{5 * size} launches", _chain(x, w, size))


def _nodes(kind: str, size: int, x: af.Tensor, w: af.Tensor) -> HostProgram:
    return HostProgram(f"{5 * size} launches, interpreted", _chain(x, w, size), {"regions": False})


def _views(kind: str, size: int, x: af.Tensor, w: af.Tensor) -> HostProgram:
    half = len(_EYE) // 2
    for _ in range(size):
        product = x @ w
        x = product[:half, :] @ product[:, :half]
        x = af.concat([x, x], axis=0)
        x = af.concat([x, x], axis=1)
    return HostProgram(f"{2 * size} views", x)


def _steps(kind: str, size: int, x: af.Tensor, w: af.Tensor) -> HostProgram:
    _, y = af.while_loop(lambda i, y: i < 10 * size, lambda i, y: (i * 3 // 2 + 1 - i // 2, y), (np.int32(0), x @ x))
    return HostProgram(f"{10 * size} iterations, nothing launched", y @ x)


def _primitives(kind: str, size: int, x: af.Tensor, w: af.Tensor) -> HostProgram:
    start = (np.int32(0), *[x] * size)
    out = af.while_loop(lambda i, *_: i < 20, lambda i, *ys: (i + 1, *ys[1:], ys[0]), start)
    return HostProgram(f"20 iterations, {size} variables", out[1], {"regions": False})


def _events(kind: str, size: int, x: af.Tensor, w: af.Tensor) -> HostProgram:
    return HostProgram(f"{10 * size} events", x, events=10 * size)


def _feeds(kind: str, size: int, x: af.Tensor, w: af.Tensor) -> HostProgram:
    for _ in range(size - 1):
        x = x @ _matrix()
    return HostProgram(f"{size} feeds", x)


def _fetches(kind: str, size: int, x: af.Tensor, w: af.Tensor) -> HostProgram:
    found = []
    for _ in range(size):
        x = x @ w
        found.append(x)
    return HostProgram(f"{size} fetches", found)


def _hops(kind: str, size: int, x: af.Tensor, w: af.Tensor) -> HostProgram:
    for index in range(size):
        with af.device(f"{kind}:{index % 2}"):
            x = _chain(x, w, 1)
    return HostProgram(f"{size} copies between devices", x, devices=2)


def _cut_loop(kind: str, size: int, x: af.Tensor, w: af.Tensor) -> HostProgram:
    def body(i: Any, *states: Any) -> Any:
        after, below = [], states[0]
        for index, state in enumerate(states):
            with af.device(f"{kind}:{index}"):
                below = _chain(below + state, w, 1)
            after.append(below)
        return i + 1, *after

    out = af.while_loop(lambda i, *_: i < size, body, (np.int32(0), x, x))
    return HostProgram(f"{size} iterations over 2 devices", out[-1], devices=2)


def _training(kind: str, size: int, x: af.Tensor, w: af.Tensor) -> HostProgram:
    weights = af.Variable(_EYE)
    read = weights.read()
    _, y = af.while_loop(
        lambda i, y: i < size, lambda i, y: (i + 1, af.sigmoid(y @ read) * af.tanh(y @ read)), (np.int32(0), x)
    )
    (slope,) = af.gradients(af.sum(y), [weights])
    return HostProgram(f"{size} iterations, forward and backward", af.group(weights.assign_sub(slope)))


def _moves(kind: str, size: int, x: af.Tensor, w: af.Tensor) -> HostProgram:
    start = np.int32(0), af.broadcast_to(af.sum(x), (128, 128))
    _, y = af.while_loop(lambda i, y: i < 10 * size, lambda i, y: (i + 1, af.tanh(y)), start)
    options = {"memory_limit": 1 << 20, "saved_values": "swap"}
    return HostProgram(f"{10 * size} saved values that move", af.gradients(af.sum(y), [x]), options)


def _runs(kind: str, size: int, x: af.Tensor, w: af.Tensor) -> HostProgram:
    return HostProgram(f"{size} runs", x @ x @ x, runs=size)


def _graphs(kind: str, size: int, x: af.Tensor, w: af.Tensor) -> HostProgram:
    for index in range(size):
        with af.device(f"{kind}:{index % 2}"):
            for _ in range(6):
                x = af.tanh(x) + af.sum(x, axis=0)
    return HostProgram(f"{size} CUDA graphs", x, {"cuda_graphs": True}, devices=2)


def _buffers(kind: str, size: int, x: af.Tensor, w: af.Tensor) -> HostProgram:
    y = x
    for _ in range(8):
        y = af.tanh(y) + af.sum(y, axis=0)
    found = [y + af.sum(y + index, axis=0) for index in range(size // 2)]
    return HostProgram(f"a graph with {size // 2} outputs", found, {"cuda_graphs": True})


_PROGRAMS: tuple[_Make, ...] = (
    *(
        _launches,
        _nodes,
        _views,
        _steps,
        _primitives,
        _events,
        _feeds,
        _fetches,
        _hops,
        _cut_loop,
        _training,
        _moves,
        _runs,
    ),
    *(_graphs, _buffers),
)


if __name__ == "__main__":
    sys.exit(main())
