"""Memory limits hold for wide programs without loops, whatever order their nodes are fired in."""

from __future__ import annotations

import asyncio
import re
from random import Random
from threading import Event, Lock
from time import sleep
from typing import Any, Literal

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import virtual_clock
from tests.fake_cupy.stand_in import stand_in
from tests.patience import PATIENCE_S

Kind = Literal["cpu", "cpu without regions", "v100", "card"]
KINDS: tuple[Kind, ...] = ("cpu", "cpu without regions", "v100", "card")

ELEMENTS = 16_384
NBYTES = 4 * ELEMENTS
LARGE = 100 * NBYTES
FUNCTIONS = af.sin, af.abs, af.tanh, af.square


def branches(seed: int) -> tuple[af.Tensor, af.Tensor, int]:
    """An input, the sum of many branches of it, and the number of values that are computed."""
    random = Random(seed)
    x = af.placeholder("float32", (ELEMENTS,))
    ends, values = [], 1
    for number in range(random.randrange(6, 14)):
        end = x * np.float32(number + 2)
        depth = random.randrange(3)
        for _ in range(depth):
            end = random.choice(FUNCTIONS)(end)
        values += 2 * (depth + 1)
        ends.append(af.sum(end) if random.random() < 0.5 else end)
    return x, af.sum(sum(ends[1:], start=ends[0])), values + 1


async def run_within(limit: int, seed: int, device: str, **options: Any) -> tuple[Any, int]:
    """The sum, or the message where it does not fit, and the most bytes held."""
    with af.Graph() as graph:
        x, total, _ = branches(seed)
    fed = {x: np.linspace(0, 1, ELEMENTS, dtype=np.float32)}
    async with af.Session(graph, devices=[device], memory_limit=limit, **options) as session:
        try:
            found = await session.run(total, fed, timeout=PATIENCE_S)
        except af.OutOfMemoryError as error:
            found = "\n".join((str(error), *getattr(error, "__notes__", ())))
        return found, session.devices[0].memory.peak


def run_on(kind: Kind, limit: int, seed: int) -> tuple[Any, int]:
    if kind == "v100":
        with virtual_clock("1 x v100, pcie3") as clock:
            return clock.run(run_within(limit, seed, "sim:0"))
    if kind == "card":
        with stand_in():
            return asyncio.run(run_within(limit, seed, "cuda:0"))
    options = {"regions": False} if kind == "cpu without regions" else {}
    return asyncio.run(run_within(limit, seed, "cpu:0", **options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_wide_programs_stay_within_their_limit_or_end_with_an_error(kind: Kind, seed: int) -> None:
    """Behaviour 109."""
    with af.Graph():
        *_, values = branches(seed)
    found = [run_on(kind, limit * NBYTES, seed) for limit in (3, 8, values)]
    # A CPU counts an array once a kernel has returned it, on each of its threads.
    beyond = 0 if kind in ("v100", "card") else 2 * NBYTES
    for limit, (_, peak) in zip((3, 8, values), found, strict=True):
        assert peak <= limit * NBYTES + beyond
    *sums, enough = [total for total, _ in found]
    assert all("raise memory_limit=" in x if isinstance(x, str) else x == pytest.approx(enough, rel=1e-4) for x in sums)
    assert not isinstance(enough, str)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_the_most_that_a_run_has_held_is_a_limit_that_it_fits_into(kind: Kind, seed: int) -> None:
    """Behaviour 109: however little a limit leaves for buffers that are written again."""
    total, peak = run_on(kind, LARGE, seed)
    again, peak_again = run_on(kind, peak, seed)
    assert (again, peak_again) == (total, peak)


def test_parts_of_complex_numbers_take_nothing_on_a_simulated_card() -> None:
    """They are views: a card is not asked for room for them."""

    async def fits() -> Any:
        with af.Graph() as graph:
            z = af.placeholder("complex64", (ELEMENTS,))
            both = af.sum(af.imag(z)) + af.sum(af.real(z))
        async with af.Session(graph, devices=["sim:0"], memory_limit=8 * ELEMENTS + 64) as session:
            return await session.run(both, {z: np.full(ELEMENTS, 1 + 2j, np.complex64)})

    with virtual_clock("v100") as clock:
        assert clock.run(fits()) == 3 * ELEMENTS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_an_error_names_a_limit_that_is_enough(kind: Kind, seed: int) -> None:
    """F30: for programs without loops, in whatever order their nodes are fired."""
    total, peak = run_on(kind, LARGE, seed)
    message, _ = run_on(kind, peak // 2, seed)
    named = re.search(r"memory_limit=([\d_]+) is predicted to be enough", message)
    assert named is not None
    assert int(named[1]) < 4 * peak
    assert run_on(kind, int(named[1]), seed)[0] == total


async def test_results_count_before_the_event_loop_takes_them() -> None:
    """The event loop takes the results of many firings on threads at a time; each counts as soon as it is there."""
    count = 6
    loop, stands, goes_on = asyncio.get_running_loop(), Event(), Event()
    looking, called, counted = Lock(), list[int](), list[int]()

    def hold_up() -> None:
        """Keep the event loop from taking results; let threads go on until theirs count, or have had every chance."""
        stands.set()
        assert goes_on.wait(PATIENCE_S)
        for _ in range(1_000_000):
            if session.devices[0].memory.used >= count * NBYTES:
                break
            sleep(0)
        counted.append(session.devices[0].memory.used)

    @af.op(outputs=af.spec("float32", (ELEMENTS,)), name="make")
    def make(number: int) -> Any:
        if not stands.is_set():
            loop.call_soon_threadsafe(hold_up)
            assert stands.wait(PATIENCE_S)
        with looking:
            called.append(number)
            if len(called) == count:
                goes_on.set()
        return np.full(ELEMENTS, number, np.float32)

    with af.Graph() as graph:
        first = af.placeholder("int64", ())
        made = [make(first + number) for number in range(count)]
    session = af.Session(graph, devices=["cpu:0"], memory_limit=2 * count * NBYTES)
    async with session:
        await session.run(made, {first: 0}, timeout=PATIENCE_S)
    assert counted[0] == count * NBYTES
