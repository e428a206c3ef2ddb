"""`virtual_clock`: a simulated machine, and an event loop on its time, for the length of a ``with`` block."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from contextvars import copy_context
from typing import Any, NoReturn, Self, TypeVar

from asyncflow.devices.figures.host import Host, Launches
from asyncflow.devices.figures.presets import DEFAULT_HOST, MachineSpec, host_named, parse_machine
from asyncflow.devices.sim.machine import (
    SimMachine,
    check_chance,
    check_iterations,
    check_launches,
    current_machine,
    use_machine,
)
from asyncflow.streams.loop import is_running_here
from asyncflow.streams.virtual import VirtualClockLoop

_Result = TypeVar("_Result")


def virtual_clock(
    machine: str | MachineSpec = "v100",
    *,
    seed: int = 0,
    jitter: float = 0.0,
    shapes_only: bool = False,
    iterations: int | None = None,
    host: str | Host = DEFAULT_HOST,
    launches: Launches | None = None,
) -> VirtualClock:
    """Make a simulated machine and an event loop on its time, for a ``with`` statement.

    Inside, ``Session(devices=["sim:0", ...])`` opens simulated devices, and ``Session()`` all of them. Time is virtual:
    kernels and copies take as long as they would on that machine. A sleep takes no time at all, and the same program
    behaves the same each time.

    Args:
        machine: cards and links, such as ``"8 x v100, nvlink2"``; `asyncflow.devices.figures.presets` knows them.
        seed: of the jitter.
        jitter: how much the times of kernels and copies vary; 0.1 for about a tenth.
        shapes_only: large arrays carry no data, so that a paper-sized experiment takes seconds and little memory.
        iterations: with `shapes_only`, how often a loop runs whose condition needs data that is not there; None for an
            error.
        host: what drives the cards, and how long it takes to: ``"asyncflow"`` is this runtime, whose one thread drives
            them all; ``"c++"`` a C++ runtime with a thread a device; or a `asyncflow.devices.figures.host.Host`.
        launches: how kernels come to a card: ``"regions"``, ``"nodes"`` or ``"graphs"``; None for what the host does.

    Raises:
        TypeError: an argument of another type.
        ValueError: a card, link or host that is unknown, a jitter that is not in 0 <= jitter < 1, or other launches;
            or a number of iterations that is negative, or without `shapes_only`.

    >>> import asyncio
    >>> with virtual_clock() as clock:
    ...     clock.run(asyncio.sleep(60))
    ...     clock.now_s
    60.0
    """
    spec = parse_machine(machine) if isinstance(machine, str) else machine
    if not isinstance(spec, MachineSpec):
        raise TypeError(
            "a machine is a str such as '8 x v100, nvlink2', or a MachineSpec; "
            f"got {type(machine).__name__} {machine!r}"
        )
    driver = host_named(host) if isinstance(host, str) else host
    if not isinstance(driver, Host):
        raise TypeError(f"a host is the name of one, or a Host; got {type(host).__name__} {host!r}")
    check_chance(seed, jitter)
    check_launches(launches)
    check_iterations(iterations, shapes_only=shapes_only)
    return VirtualClock(
        spec,
        seed=seed,
        jitter=jitter,
        shapes_only=shapes_only,
        iterations=iterations,
        host=driver,
        launches=launches,
    )


class VirtualClock:
    """A clock of `virtual_clock`. Like `asyncio.Runner`, it has one loop, on which `run` may be called many times.

    Use it once, in a plain function: it starts an event loop, so it cannot be inside a coroutine.
    """

    def __init__(self, spec: MachineSpec, **options: Any) -> None:
        """Take the `options` of `SimMachine`."""
        self._spec = spec
        self._options = options
        self._resources = ExitStack()
        self._runner: asyncio.Runner | None = None
        self._begun: tuple[VirtualClockLoop, SimMachine] | None = None
        self._ended = False

    def __enter__(self) -> Self:
        if self._ended:
            raise RuntimeError("this virtual clock has ended, and its machine with it; call virtual_clock() again")
        if self._runner is not None or current_machine() is not None:
            raise RuntimeError("a virtual clock runs here already; virtual clocks do not nest: use that one")
        if is_running_here():
            raise RuntimeError(
                "a virtual clock has its own event loop and one is running in this thread already; use it in a plain "
                "function (def, not async def) and pass the coroutine to clock.run()"
            )
        with ExitStack() as resources:
            runner = resources.enter_context(asyncio.Runner(loop_factory=VirtualClockLoop))
            loop = runner.get_loop()
            assert isinstance(loop, VirtualClockLoop)
            machine = SimMachine(self._spec, loop, **self._options)
            resources.enter_context(use_machine(machine))
            self._resources = resources.pop_all()
        self._runner, self._begun = runner, (loop, machine)
        return self

    def __exit__(self, *exc: object) -> None:
        self._runner, self._ended = None, True
        self._resources.close()

    async def __aenter__(self) -> NoReturn:
        raise TypeError("a virtual clock has its own event loop: use `with`, not `async with`, in a plain function")

    async def __aexit__(self, *exc: object) -> None:
        """Exit method, never called; without it, Python would not call `__aenter__` to explain the error."""

    def run(self, main: Coroutine[Any, Any, _Result]) -> _Result:
        """Run `main` to its end, and return the result; virtual time continues from the previous run.

        The coroutine sees the caller's context variables, such as the trace of a ``with af.Trace()`` block.

        Raises:
            TypeError: `main` is not a coroutine.
            RuntimeError: outside the ``with`` block; or every task waits and no timer is pending, so that nothing can
                ever happen again.
        """
        _check_coroutine(main)
        if self._runner is None or is_running_here():
            main.close()  # or Python would warn that it was never awaited
            if self._runner is None:
                raise RuntimeError(self._not_entered())
            raise RuntimeError("clock.run cannot be called inside its own program: await the coroutine instead")
        return self._runner.run(main, context=copy_context())

    @property
    def loop(self) -> VirtualClockLoop:
        """The event loop; it can be looked at after the block, too."""
        return self._entered()[0]

    @property
    def machine(self) -> SimMachine:
        """The simulated machine; it can be looked at after the block, too."""
        return self._entered()[1]

    @property
    def now_s(self) -> float:
        """The virtual time in seconds, which begins at 0.0."""
        return self.loop.time()

    @property
    def now_ns(self) -> int:
        """The virtual time in nanoseconds, exactly."""
        return self.loop.time_ns()

    def _entered(self) -> tuple[VirtualClockLoop, SimMachine]:
        if self._begun is None:
            raise RuntimeError(self._not_entered())
        return self._begun

    def _not_entered(self) -> str:
        if self._ended:
            return "this virtual clock has ended, and its event loop is closed; call virtual_clock() again"
        return "this virtual clock has not begun; use it in a with statement: with virtual_clock() as clock: ..."


def _check_coroutine(main: object) -> None:
    if not asyncio.iscoroutine(main):
        hint = f"; call it: clock.run({getattr(main, '__name__', 'main')}())" if callable(main) else ""
        raise TypeError(f"clock.run takes a coroutine; got {type(main).__name__} {main!r}{hint}")
