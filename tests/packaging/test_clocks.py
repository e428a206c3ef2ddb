"""The clocks of tests: which tests read the machine's, and that no pause of it disturbs the others."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncflow.runtime.executor.kernels import single_call
from tests.adversary import KINDS, RATES, Disturbances, LeapingClock
from tests.clocks import ABOUT_THREADS, CLOCKS, REAL, WorkClock
from tests.loops import FailingUvLoop, SteadyLoop, SteadyUvLoop, new_uvloop

ROOT = Path(__file__).resolve().parents[2]

REAL_TIME = {
    "conformance/test_async.py::test_a_loop_without_kernels": "the time for which the loop is really held",
    "conformance/test_async.py::test_other_coroutines_keep_their_latency": "the same",
    "conformance/test_async.py::test_the_guard_names_a_kernel_that_holds_the_loop": "the same",
    "conformance/test_async.py::test_the_guard_says_nothing_of_threads": "the same",
    "conformance/test_pooled.py::test_long_steps_share_a_run_until_an_activation_joins_or_leaves": "others end steps",
    "faults/test_admission.py::test_an_endless_run_makes_room_when_its_time_is_up": "a loop that only time ends",
    "faults/test_deadlines_and_cancellation.py::test_an_endless_loop_with_a_deadline": "the same",
    "runtime/test_sliced_region.py::test_a_deadline_on_an_endless_loop": "loops of any weight, which only time ends",
    "runtime/test_sliced_region.py::test_other_coroutines_go_on": "kernels that are really long hold no event loop",
    "serving/test_spans.py::test_a_run_is_a_child_of_its_caller_and_a_parent_of_its_coroutines": "the wall's clock",
}
"""Tests on the machine's clock, and why. The list only shrinks: a new test holds its clock with the fixture `work`."""


def marked(path: Path) -> Iterator[str]:
    """The tests of a file that are marked `real_time`."""
    text = path.read_text(encoding="utf-8")
    for node in ast.parse(text).body if "mark.real_time" in text else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any("mark.real_time" in ast.unparse(decorator) for decorator in node.decorator_list):
                yield f"{path.relative_to(ROOT / 'tests')}::{node.name}"
        else:
            assert isinstance(node, ast.ClassDef) or "mark.real_time" not in ast.unparse(node), path


def test_only_these_tests_read_the_clock_of_the_machine() -> None:
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    assert sorted(each for path in files for each in marked(path)) == sorted(REAL_TIME)


def test_the_library_imports_its_clocks_by_name() -> None:
    """``from time import perf_counter_ns``: tests replace that name in each module."""
    for path in (ROOT / "asyncflow").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if [name for name in REAL if f"time.{name}(" in source]:
            assert ".".join(path.relative_to(ROOT).with_suffix("").parts) in ABOUT_THREADS, path


def test_the_library_reads_the_clock_of_the_test(work: WorkClock) -> None:
    library = vars(single_call)
    before = library["perf_counter_ns"](), library["thread_time_ns"]()
    work.work(1000)
    assert (library["perf_counter_ns"](), library["thread_time_ns"]()) == (before[0] + 1001, before[1] + 1000)


class Paused(WorkClock):
    """A clock of a machine whose time a test sets."""

    passed_s = 0.0

    def machine_s(self) -> float:
        return self.passed_s


@pytest.mark.parametrize("kind", [SteadyLoop, SteadyUvLoop])
def test_a_pause_fires_no_timer_early(kind: type[SteadyLoop]) -> None:
    """Each slice of a delay counts once, however long it took."""
    clock, fired = Paused(), list[str]()
    loop = kind(clock)
    for name, delay_s in (("second", 0.1), ("first", 0.01)):
        loop.call_later(delay_s, fired.append, name)
    loop.call_later(0.02, fired.append, "cancelled").cancel()
    slices = 0
    while len(fired) < 2:
        slice_s = loop._slice()
        assert slice_s is not None
        clock.passed_s += 60.0
        for each in loop._pass(slice_s):
            each._run()
        slices += 1
        assert (fired == []) == (slices < 10)
    assert fired == ["first", "second"] and slices > 30
    assert clock.loop_s() == 0.1
    loop.close()


@pytest.mark.every_loop
def test_a_test_that_waits_for_ever_fails_on_uvloop() -> None:
    """Its alarm is raised in the loop, which otherwise takes it for a callback's error and waits on."""
    loop = new_uvloop()
    assert isinstance(loop, FailingUvLoop)
    waiting = loop.create_future()
    loop.call_soon(pytest.fail, "it takes too long")
    loop.call_soon(loop.call_soon, waiting.set_result, None)
    with pytest.raises(pytest.fail.Exception, match="it takes too long"):
        loop.run_until_complete(waiting)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


async def test_a_timer_that_fires_moves_the_clock() -> None:
    loop = asyncio.get_running_loop()
    before_s = loop.time()
    await asyncio.sleep(0.002)
    assert CLOCKS.current is not None
    assert loop.time() >= before_s + 0.002
    assert vars(single_call)["perf_counter_ns"]() / 1e9 >= before_s + 0.002


def test_a_seed_draws_the_same_disturbances() -> None:
    drawn = [Disturbances("7 a test") for _ in range(2)]
    assert drawn[0].rates == drawn[1].rates and set(drawn[0].rates) == set(KINDS)
    assert [drawn[0].leap_s() for _ in range(100)] == [drawn[1].leap_s() for _ in range(100)]
    others = [Disturbances(f"{seed} a test") for seed in range(100)]
    assert {rate for each in others for rate in each.rates.values()} == set(RATES)
    assert min(each.clock_rate for each in others) < 0.1 and max(each.clock_rate for each in others) > 5


def test_the_adversary_s_clock_leaps_and_never_goes_back() -> None:
    clock = LeapingClock(Disturbances("3"))
    clock.disturbances.rates.update(leap=0.3, pause=0.0)
    seen = [clock.now_ns() for _ in range(200)]
    assert seen == sorted(seen) and seen[-1] - seen[0] > 10_000_000
    clock.reach(1e6)
    assert clock.loop_s() >= 1e6 and clock.now_ns() >= 10**15
