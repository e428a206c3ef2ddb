"""F63: whatever method of whatever device raises, at whatever moment, that run ends with the error, and closing ends.

One life of a session, from its opening over three runs to its close, is repeated with one call of one method raising:
the first, the middle and the last that such a life makes.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.cpu.device import CpuDevice
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.memory import MemoryAccount
from asyncflow.devices.protocol import LaunchingDevice, LogicalDevice
from asyncflow.devices.sim.device import SimDevice
from asyncflow.errors import DeviceLostError
from asyncflow.streams.cpu.stream import ThreadStream
from asyncflow.streams.protocol import Stream
from asyncflow.testing import virtual_clock
from tests.conftest import small_cards
from tests.patience import PATIENCE_S

X = np.ones(3000, np.float32)

KINDS: dict[str, tuple[type[Any], Callable[[], AbstractContextManager[Any]]]] = {
    "cpu": (CpuDevice, nullcontext),
    "sim": (SimDevice, lambda: virtual_clock("2 x v100")),
    "cuda": (CudaDevice, lambda: small_cards(0)),
}

NEVER_CALLED = {
    *((CpuDevice, name) for name in ("check_loops", "describe")),
    *((SimDevice, name) for name in ("bind_loop", "check_loops", "describe", "keep_taken", "require_data", "resident")),
    *((CudaDevice, name) for name in ("bind_loop", "check_loops", "describe", "keep_taken")),
    *((ThreadStream, name) for name in ("enqueue", "record", "wait")),
    *((MemoryAccount, name) for name in ("count", "forget", "statistics", "top", "uncounted")),
}
"""Methods that such a life does not need."""


class Injected(Exception):
    """The error that a method raises."""


class Fault:
    """Counts the calls of one method of a class, and makes one of them raise, before or after it has done its work."""

    def __init__(self, cls: type[Any], name: str, at: int, *, after: bool = False) -> None:
        self.calls = 0
        self.raised = False
        self.is_over = False
        self._at = at
        self._after = after
        self._what = f"{cls.__name__}.{name}"

    def wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(method):

            async def waits(*args: Any, **options: Any) -> Any:
                is_hit = self._is_hit()
                result = None if is_hit and not self._after else await method(*args, **options)
                return self._passed(result, is_hit)

            return waits

        def calls(*args: Any, **options: Any) -> Any:
            is_hit = self._is_hit()
            result = None if is_hit and not self._after else method(*args, **options)
            return self._passed(result, is_hit)

        return calls

    def _is_hit(self) -> bool:
        self.calls += not self.is_over
        return self.calls == self._at and not self.is_over

    def _passed(self, result: Any, is_hit: bool) -> Any:
        if is_hit:
            self.raised = True
            raise Injected(f"{self._what} fails at call {self._at}")
        return result


def methods(base: type[Any]) -> list[str]:
    """The names of what a class has, but properties, and what only devices themselves call as they are made."""
    return sorted(
        name
        for name, found in inspect.getmembers_static(base)
        if not name.startswith("_") and inspect.isroutine(found) and name != "make_streams"
    )


def cases() -> Iterator[tuple[str, type[Any], str]]:
    for kind, (cls, _) in KINDS.items():
        for name in methods(LogicalDevice if kind == "cpu" else LaunchingDevice):
            yield kind, cls, name
    for name in methods(Stream):
        yield "cpu", ThreadStream, name
    for name in methods(MemoryAccount):
        yield "cpu", MemoryAccount, name


@af.op(outputs=af.spec("float32", (None,)), cost=lambda *shapes: 1e7)
def doubled(x: Any) -> Any:
    return x * np.float32(2)


@af.op(outputs=af.spec("float32", (None,)))
async def awaited(x: Any) -> Any:
    await asyncio.sleep(0)
    return x


def program(kind: str) -> tuple[af.Tensor, af.Tensor]:
    """A fed vector, and what loops on one device and on two make of it: copies, predicates, coroutines, threads."""
    x = af.placeholder("float32", (None,))
    scale = af.Variable(np.float32(1.0))

    def body(total: af.Tensor) -> af.Tensor:
        with af.device(f"{kind}:1"):
            return af.tanh(total) * 0.0 + total * scale.read() + af.constant(np.full(1, 2.0, np.float32))

    with af.device(f"{kind}:0"):
        start = doubled(awaited(x) + 0.0 * x + 1.0)  # x is the host's and the device's
        start = af.reshape(start, (af.astype(af.sum(af.ones_like(start)), "int64"),))  # the host reads a size
        start = af.while_loop(lambda i, kept: i < 2, lambda i, kept: (i + 1, -kept), (0, start))[1]
        return x, af.while_loop(lambda total: af.sum(total) < 7.5 * X.size, body, (start,), parallel_iterations=2)[0]


async def life(kind: str, *faults: Fault) -> None:
    """Open, run three times, close; an AssertionError names each wrong step."""
    with af.Graph() as graph:
        x, y = program(kind)
    session = af.Session(graph, devices=[f"{kind}:0", f"{kind}:1"])
    seen: list[BaseException] = []
    was_raised = False
    try:
        await session.__aenter__()
    except Injected as error:
        seen.append(error)
    else:
        for trace in (None, af.Trace(), None):
            was_raised = any(fault.raised for fault in faults)
            try:
                value = await session.run(y, {x: X}, trace=trace)
            except (Injected, af.KernelError, DeviceLostError) as error:
                seen.append(error)
                is_lost = isinstance(error, DeviceLostError)
                is_right = is_lost or not was_raised  # not what another run met
            else:
                is_right = True
                np.testing.assert_array_equal(value, np.full_like(X, 8.0))
            assert is_right, seen
            assert session.statistics().runs == 0
        try:
            await session.aclose()
        except Injected as error:
            seen.append(error)
    for met in seen:
        assert isinstance(met.__cause__ if isinstance(met, af.KernelError) else met, Injected | DeviceLostError)
    for fault in faults:
        assert len(seen) >= fault.raised, "the error is lost"
        fault.is_over = True
    for device in session.devices:
        assert await device.aclose(PATIENCE_S)


def live(kind: str, *faults: Fault) -> None:
    """Run a life on an event loop of its own; a hang is a failure."""
    with ExitStack() as places:
        place = places.enter_context(KINDS[kind][1]())
        loop = place.loop if kind == "sim" else asyncio.new_event_loop()
        if kind != "sim":
            places.callback(loop.close)
        task = loop.create_task(life(kind, *faults))
        if kind == "sim":  # which finds out by itself that nothing can ever happen again
            loop.run_until_complete(task)
            return
        loop.run_until_complete(asyncio.wait({task}, timeout=PATIENCE_S))
        assert task.done(), "it hangs"
        task.result()


@cache
def calls_of_a_life(kind: str) -> dict[tuple[type[Any], str], int]:
    """Return how often a life calls each method."""
    faults = {(cls, name): Fault(cls, name, 0) for of, cls, name in cases() if of == kind}
    with pytest.MonkeyPatch.context() as patch:
        for (cls, name), fault in faults.items():
            patch.setattr(cls, name, fault.wrapped(getattr(cls, name)))
        live(kind, *faults.values())
    return {method: fault.calls for method, fault in faults.items()}


@pytest.mark.parametrize(("kind", "cls", "name"), list(cases()), ids=lambda part: getattr(part, "__name__", part))
def test_a_method_raises(kind: str, cls: type[Any], name: str) -> None:
    """Fault F63: the run it is called for ends with that error, later ones are right, and closing ends."""
    calls = calls_of_a_life(kind)[cls, name]
    assert (calls == 0) == ((cls, name) in NEVER_CALLED), calls
    for at, after in dict.fromkeys(((1, False), (calls // 2 + 1, True), (calls, False))) if calls else ():
        fault = Fault(cls, name, at, after=after)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cls, name, fault.wrapped(getattr(cls, name)))
            live(kind, fault)
        # On real time, and on cards, how often something is asked varies.
        assert fault.raised or at > 1
