"""`virtual_clock`: a machine and its time for the length of a block."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import uvloop

import asyncflow as af
from asyncflow.devices.figures.presets import CARDS, LINKS, MachineSpec
from asyncflow.devices.sim.machine import current_machine
from asyncflow.testing import VirtualClock, virtual_clock
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable


async def now() -> float:
    return asyncio.get_running_loop().time()


def test_time_is_virtual_and_goes_on_between_runs() -> None:
    async def main(delay: float) -> float:
        await asyncio.sleep(delay)
        return await now()

    with virtual_clock() as clock:
        assert clock.now_s == 0.0
        assert clock.run(main(10)) == 10.0
        assert clock.run(main(0.5)) == 10.5
        assert (clock.now_s, clock.now_ns) == (10.5, 10_500_000_000)
    assert clock.now_s == 10.5
    assert clock.loop.is_closed()


def test_machine_is_current_inside_and_in_what_runs() -> None:
    async def main() -> object:
        return await asyncio.create_task(look())

    async def look() -> object:
        return current_machine()

    with virtual_clock("2 x a100, nvlink3") as clock:
        assert current_machine() is clock.machine
        assert clock.run(main()) is clock.machine
        assert clock.machine.spec.cards == (CARDS["a100"],) * 2
    assert current_machine() is None


def test_takes_a_machine_of_ones_own() -> None:
    spec = MachineSpec((CARDS["k40"],), LINKS["pcie4"])
    with virtual_clock(spec) as clock:
        assert clock.machine.spec is spec


def test_machine_ends_with_a_block_that_fails() -> None:
    with pytest.raises(LookupError), virtual_clock():
        raise LookupError
    assert current_machine() is None


def test_machine_ends_with_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="every task waits and no timer is pending"), virtual_clock() as clock:
        clock.run(main())
    assert current_machine() is None
    assert clock.loop.is_closed()


def test_what_runs_sees_the_callers_context() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="unset")

    async def look() -> str:
        return variable.get()

    with virtual_clock() as clock:
        assert clock.run(look()) == "unset"
        variable.set("later")
        assert clock.run(look()) == "later"


def test_tasks_left_behind_are_cancelled() -> None:
    ended: list[str] = []

    async def background() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append("cancelled")

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(background())
        await asyncio.sleep(1)
        return task

    with virtual_clock() as clock:
        task = clock.run(main())
        assert not task.done()
    assert ended == ["cancelled"]


def test_clocks_do_not_nest() -> None:
    with virtual_clock() as clock:
        with pytest.raises(RuntimeError, match="virtual clocks do not nest"), virtual_clock():
            pass
        with pytest.raises(RuntimeError, match="virtual clocks do not nest"), clock:
            pass
        assert clock.run(now()) == 0.0
        assert current_machine() is clock.machine


def test_clocks_are_used_once() -> None:
    clock = virtual_clock()
    with clock:
        pass
    with pytest.raises(RuntimeError, match=r"has ended, and its machine with it; call virtual_clock\(\) again"), clock:
        pass
    with pytest.raises(RuntimeError, match="has ended, and its event loop is closed"):
        clock.run(now())


@pytest.mark.parametrize(
    "use",
    [lambda clock: clock.run(now()), lambda clock: clock.loop, lambda clock: clock.machine, lambda clock: clock.now_s],
    ids=["run", "loop", "machine", "now_s"],
)
def test_clocks_begin_with_the_block(use: Callable[[VirtualClock], object]) -> None:
    with pytest.raises(RuntimeError, match="has not begun; use it in a with statement"):
        use(virtual_clock())


async def test_clocks_are_for_plain_functions() -> None:
    with pytest.raises(RuntimeError, match="use it in a plain function"), virtual_clock():
        pass
    clock: Any = virtual_clock()
    with pytest.raises(TypeError, match="use `with`, not `async with`"):
        async with clock:
            pass
    assert current_machine() is None


def test_run_is_not_for_its_own_program() -> None:
    with virtual_clock() as clock:

        async def main() -> None:
            clock.run(now())

        with pytest.raises(RuntimeError, match="await the coroutine instead"):
            clock.run(main())


def test_run_takes_a_coroutine() -> None:
    wrong: Any = now
    with virtual_clock() as clock:
        with pytest.raises(TypeError, match=r"got function .*; call it: clock\.run\(now\(\)\)"):
            clock.run(wrong)
        wrong = 3
        with pytest.raises(TypeError, match=r"clock\.run takes a coroutine; got int 3$"):
            clock.run(wrong)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"machine": None}, TypeError, "a machine is a str such as .* or a MachineSpec; got NoneType None"),
        ({"machine": 4}, TypeError, "a machine is a str .* got int 4"),
        ({"seed": "a"}, TypeError, "seed is an integer; got str 'a'"),
        ({"seed": True}, TypeError, "seed is an integer; got bool True"),
        ({"jitter": "x"}, TypeError, "jitter is a fraction .* got str 'x'"),
        ({"jitter": 1.5}, ValueError, "0 <= jitter < 1, not 1.5"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """And not only when the block begins."""
    with pytest.raises(error, match=message):
        virtual_clock(**arguments)


def test_unknown_cards_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="unknown card or link 'v101'"):
        virtual_clock("v101")


def test_sessions_open_the_machines_devices() -> None:
    async def main() -> list[list[str]]:
        names = []
        for devices in (None, ["sim:2", "sim:0"]):
            async with af.Session(devices=devices) as session:
                names.append([device.name for device in session.devices])
        return names

    with virtual_clock("3 x v100") as clock:
        assert clock.run(main()) == [["sim:0", "sim:1", "sim:2"], ["sim:2", "sim:0"]]


@pytest.mark.parametrize("start", [af.run, asyncio.run, uvloop.run])
def test_sessions_refuse_a_loop_that_is_not_on_the_clock(start: Callable[[Any], object]) -> None:
    """There, nothing that the simulated devices do would ever be done."""

    async def main() -> None:
        async with af.Session():
            pass

    with virtual_clock("v100"), pytest.raises(RuntimeError, match=r"sim:0 is simulated.*clock\.run\(main\(\)\)"):
        start(main())


def test_run_threadsafe_takes_virtual_time() -> None:
    """The thread waits for the run, so that time must not wait for the thread."""
    with af.Graph() as graph:
        x = af.placeholder("float32", ())
        y = x * 2

    async def main() -> tuple[float, bool]:
        async with af.Session(graph) as session:
            value = await asyncio.to_thread(lambda: session.run_threadsafe(y, {x: 3.0}).result(PATIENCE_S))
            return float(value), await now() > 0.0

    with virtual_clock("v100") as clock:
        assert clock.run(main()) == (6.0, True)


def test_a_graph_takes_virtual_time() -> None:
    with af.Graph() as graph:
        x = af.placeholder("float32", (64, 64))
        y = af.sum(af.matmul(x, x))

    async def main() -> tuple[float, float]:
        async with af.Session(graph) as session:
            value = await session.run(y, {x: np.ones((64, 64), np.float32)})
            return float(value), await now()

    runs = []
    for _ in range(2):
        with virtual_clock("v100") as clock:
            runs.append(clock.run(main()))
    assert runs[0] == runs[1]
    value, ended = runs[0]
    assert value == 64.0**3
    # Copy in, two kernels, copy out: no less than their latencies, and far less than a second.
    assert 2 * LINKS["pcie3"].latency_s + 2 * CARDS["v100"].kernel_s <= ended < 0.01
