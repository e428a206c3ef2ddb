"""Experiments on simulated machines: virtual time, so one repeat says everything, and the same on any machine."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import asyncflow as af
from asyncflow.compiler.plan import FiringWay
from asyncflow.devices.figures.presets import HOSTS
from asyncflow.testing import virtual_clock
from benchmarks.harness import ASYNCFLOW, Figure, Result

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from asyncflow.compiler.plan import Plan

STEPS_RATE: Final = Figure("rate, virtual time", "steps/s", higher_is_better=True)
ITERATION_RATE: Final = Figure("rate, virtual time", "iterations/s", higher_is_better=True)
PAPER: Final = "the paper"
"""EuroSys '18, on its own machines: something to look at, and nothing to divide by."""

DRIVERS: Final = {"asyncflow": "this runtime", "c++": "a thread a device"}
"""The hosts that drive the simulated cards, with names of their curves; see `asyncflow.devices.figures`."""

ANOTHER_HOST: Final = DRIVERS["c++"]

_driver: ContextVar[str] = ContextVar("driver", default="asyncflow")

Curve = dict[int, float]
"""By the number of devices, or whatever is varied."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a simulated run: its virtual time, and its trace."""

    seconds: float
    trace: af.Trace


def simulate(
    machine: str,
    work: Callable[[af.Session], Awaitable[object]],
    *,
    warm_up: Callable[[af.Session], Awaitable[object]] | None = None,
    jitter: float = 0.0,
    traced: bool = False,
    **options: Any,
) -> Outcome:
    """Return the virtual time of `work` on a simulated machine, whose large arrays carry no data.

    Args:
        machine: such as ``"8 x v100, nvlink2"``.
        work: the timed work, given a session on all devices.
        warm_up: runs before it; None for `work` itself. It makes variables, and takes the first run's copies.
        jitter: variation of the times of kernels and copies.
        traced: record `work`.
        options: of the session.
    """

    async def main() -> Outcome:
        async with af.Session(**options) as session:
            await (warm_up or work)(session)
            loop, trace = asyncio.get_running_loop(), af.Trace(detail="region")
            started = loop.time()
            if traced:
                with trace:
                    await work(session)
            else:
                await work(session)
            return Outcome(loop.time() - started, trace)

    with virtual_clock(machine, jitter=jitter, shapes_only=True, host=_driver.get()) as clock:
        return clock.run(main())


@contextmanager
def driven_by(host: str) -> Iterator[None]:
    """Inside, that host drives the simulated cards."""
    token = _driver.set(host)
    try:
        yield
    finally:
        _driver.reset(token)


def by_host(make: Callable[[], Mapping[str, Curve]]) -> dict[str, Curve]:
    """The curves with each of the hosts."""
    found: dict[str, Curve] = {}
    for host in DRIVERS:
        with driven_by(host):
            found.update((with_host(name, host), curve) for name, curve in make().items())
    return found


def with_host(name: str, host: str) -> str:
    """Return the name of the curve `name` if `host` drives the cards."""
    return ", ".join(part for part in (name, DRIVERS[host]) if part)


def without_host(name: str) -> str:
    """Return the name of a curve without its host."""
    for label in DRIVERS.values():
        name = name.removesuffix(label).removesuffix(", ")
    return name


def host_note() -> str:
    """Return a description of the hosts, for the foot of a picture."""
    return "\n".join(f"{HOSTS[host].summary}, by {HOSTS[host].launches}" for host in DRIVERS)


async def in_thread(simulation: Callable[..., Any], *args: Any) -> Any:
    """The result of `simulation`, which starts an event loop of its own and so needs a thread without one."""
    return await asyncio.to_thread(simulation, *args)


def as_results(
    workload: str, curves: Mapping[str, Curve], figure: Figure, case: str, *, system: str = ASYNCFLOW
) -> list[Result]:
    """Return the curves as rows of a table.

    Args:
        workload: the program's name.
        curves: by what they show.
        figure: of their values.
        case: of a row, with ``{curve}`` and ``{x}`` in it.
        system: whose they are.
    """
    return [
        Result(
            workload=workload,
            case=case.format(curve=curve, x=x),
            figure=figure,
            system=system,
            values=(value,),
            ratio=None,
        )
        for curve, points in curves.items()
        for x, value in points.items()
    ]


def require_bodies(plan: Plan, names: Sequence[str]) -> None:
    """Check that each of the devices computes something in a loop of a plan.

    Raises:
        AssertionError: one has no part in it, so that nothing is measured of what the loop costs over devices.
    """
    computing = {
        partition.device
        for partition in plan.partitions
        for path, frame in partition.frames.items()
        if path and any(node.kernel is not None and node.way < FiringWay.SEND for node in frame.nodes)
    }
    idle = [name for name in names if name not in computing]
    assert not idle, f"{', '.join(idle)}: no part in the body of a loop\n{plan.explain()}"


def devices(count: int) -> list[str]:
    """Names of the first `count` simulated devices."""
    return [f"sim:{index}" for index in range(count)]


def spread(n_layers: int, names: Sequence[str]) -> list[str]:
    """The device of each layer: neighbouring layers together, as many on each device as on any other."""
    return [names[layer * len(names) // n_layers] for layer in range(n_layers)]
