"""Fixtures for every test: event loops, sessions on one device and on three, and guards against leaks.

On which event loops and devices a test runs is said in `tests.cells`, what its processor time may be in
`tests.processor_time`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias
from zlib import crc32

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import asyncflow as af
from asyncflow.compiler.program.kernels import fused
from asyncflow.devices import captures
from asyncflow.devices.cuda.backend import cuda_backend
from asyncflow.devices.cuda.transfers import copies as cuda_copies
from asyncflow.devices.cuda.transfers.pinned import shared_slab
from asyncflow.devices.figures.presets import parse_machine
from asyncflow.devices.memory import LiveBuffer
from asyncflow.devices.saved import mover as mover_module
from asyncflow.devices.sim.device import SimDevice
from asyncflow.devices.sim.machine import SimMachine, use_machine
from asyncflow.runtime.executor.lone_firing import LoneFiring
from asyncflow.runtime.gates import in_flight
from asyncflow.runtime.run.run import Run
from asyncflow.runtime.scheduler.scheduler import Statistics
from asyncflow.streams.cuda import card as cuda_card
from asyncflow.streams.virtual import VirtualClockLoop
from tests import loops
from tests.adversary import Adversary
from tests.cells import LOOPS, ON_CARDS, WITHOUT, Arrangement, LoopFactory, Selection
from tests.clocks import CLOCKS, REAL, WorkClock
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.stand_in import stand_in
from tests.moves import AuditedMoves, left_over
from tests.patience import PATIENCE_S
from tests.processor_time import ProcessorTime

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping

    from _pytest.python import CallSpec

OpenSession: TypeAlias = Callable[..., AbstractAsyncContextManager[af.Session]]

MACHINE = "3 x v100, nvlink2"
"""The simulated machine of tests on virtual time."""

CARD_BYTES, PINNED_BYTES = 64 << 20, 1 << 20
"""Memory of the stand-in's cards, and bytes pinned for copies."""

JITTER = 0.3
"""Variation of the times of its kernels and copies, so that unordered work comes in any order."""

# What a test does, and whether it passes, depends neither on chance nor on how fast the machine is.
settings.register_profile(
    "steady", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")
# The first 40 of 100 examples; `--full` and a turn take all of them.
settings.register_profile("few", settings.get_profile("steady"), max_examples=40)

_selection = pytest.StashKey[Selection]()
_loop = pytest.StashKey[str]()
_adversary = pytest.StashKey[Adversary]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("asyncflow")
    group.addoption("--full", action="store_true", help="run every test in every cell of the conformance matrix")
    passes = [cell.without for cell in WITHOUT]
    group.addoption("--without", choices=passes, help="leave a pass of the compiler out of all tests")
    group.addoption("--turn", metavar="WORD", default="", help="run a part of what --full adds, chosen by a word")
    group.addoption("--adversary", metavar="SEED", default="", help="run on a machine that disturbs concurrent tests")
    group.addoption("--share", metavar="N", type=int, default=1, help="with --adversary: run one test function in N")


def pytest_configure(config: pytest.Config) -> None:
    loops.install()
    config.stash[_selection] = selection = Selection(config)
    if selection.is_thinned and not selection.full and selection.turn is None:
        settings.load_profile("few")
    if seed := config.getoption("adversary"):
        config.stash[_adversary] = adversary = Adversary(seed, config.getoption("share"))
        config.pluginmanager.register(adversary)
    else:
        config.pluginmanager.register(ProcessorTime())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set the clock and the event loop of the test, before its fixtures are made."""
    set_clock(item)
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        cell = item.callspec.params.get("arrangement")
        item.config.stash[_loop] = cell.loop if isinstance(cell, Arrangement) else ""


def set_clock(item: pytest.Item) -> None:
    """Have the library read the clock that the test asks for (`tests.clocks`)."""
    is_real = bool(item.get_closest_marker("real_time")) or (item.path.parent.name == ON_CARDS and has_real_cards())
    is_held = "work" in getattr(item, "fixturenames", ())
    if adversary := item.config.stash.get(_adversary, None):
        adversary.begin(item, is_held=is_held, is_real=is_real)
    elif is_real:
        CLOCKS.set(None, REAL)
    else:
        clock = WorkClock(is_held=is_held)
        CLOCKS.set(clock, clock.readings())


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    """A test with sessions runs on the loop of its cell; any other one once for each loop."""

    def make_loop() -> asyncio.AbstractEventLoop:
        return LOOPS[config.stash[_loop]]()

    if isinstance(item, pytest.Function) and "arrangement" in item.fixturenames:
        return {"cell": make_loop}
    return {name: LOOPS[name] for name in config.stash[_selection].loops(item)}


def pytest_collectstart() -> None:
    """Switch the collector off: collected items stay, so until the end it would find nothing."""
    gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Leave out sets of parameters that have not their turn, before they become tests: making one takes 0.7 ms."""
    selection = metafunc.config.stash[_selection]
    if "arrangement" in metafunc.fixturenames:
        cells = selection.arrangements(metafunc.definition)
        metafunc.parametrize("arrangement", cells, ids=str, indirect=True)
    yield
    if metafunc._calls:
        # Without any, pytest would make a test that has no parameters.
        metafunc._calls = selection.chosen(metafunc) or [_left_out(metafunc)]


def _left_out(metafunc: pytest.Metafunc) -> CallSpec:
    call = metafunc._calls[0]
    return replace(call, marks=[*call.marks, pytest.mark.left_out.mark])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that have not their turn."""
    selection = config.stash[_selection]

    def runs(item: pytest.Item) -> bool:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            return item.get_closest_marker("left_out") is None
        return item.get_closest_marker("slow") is None or selection.is_slow_turn(item, 1)

    left_out = [item for item in items if not runs(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if runs(item)]


def pytest_collection_finish() -> None:
    """Freeze the objects that exist before the first test, so that the collector need not visit them again and
    again.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


# -- what tests use --------------------------------------------------------------------------------------------------


@pytest.fixture
def work() -> WorkClock:
    """The clock of a test that asserts where work runs or what shares a call; it moves when the test says so."""
    assert CLOCKS.current is not None, "a test that is marked `real_time` has no clock of its own"
    return CLOCKS.current


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """NumPy gives no warnings, in modules that compute with infinities and NaN on purpose."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def graph() -> Iterator[af.Graph]:
    """A graph that the test builds in."""
    with af.Graph() as built:
        yield built


@pytest.fixture
def arrangement(request: pytest.FixtureRequest) -> Arrangement:
    """On how many devices sessions run, and how: what a program does must not depend on it."""
    chosen = request.param
    assert isinstance(chosen, Arrangement)
    if word := request.config.getoption("turn"):
        request.node.add_report_section("setup", "seed", f"draw the same again with --turn={word}")
    return chosen


@pytest.fixture
def regions(arrangement: Arrangement) -> bool:
    """True if sessions compile regions."""
    return arrangement.regions


@pytest.fixture
async def machine(request: pytest.FixtureRequest) -> AsyncIterator[SimMachine | None]:
    """On virtual time, the simulated machine that sessions find; on it, nothing may have been read or freed early."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualClockLoop):
        yield None
        return
    made = SimMachine(parse_machine(MACHINE), loop, seed=_seed(request), jitter=JITTER)
    with use_machine(made):
        yield made
    # Not asserted here: what a fixture that raises has reset stays as it was, in the tests that come after too.
    AuditedRun.leftovers.extend(str(hazard) for hazard in made.hazards)


def small_cards(seed: int) -> AbstractContextManager[FakeCupy]:
    """Sessions opened inside find the two cards of a stand-in for CuPy, which does its work in an order from `seed`."""
    return stand_in(devices=2, nbytes=CARD_BYTES, seed=seed, pinned_nbytes=PINNED_BYTES)


def has_real_cards() -> bool:
    """Return True if tests of cards run on the machine's cards."""
    return os.environ.get("ASYNCFLOW_REQUIRE_GPU", "") not in ("", "0")


def any_cards(seed: int) -> AbstractContextManager[object]:
    """Use `small_cards`; with ``ASYNCFLOW_REQUIRE_GPU=1`` the machine's cards, with their own order."""
    if not has_real_cards():
        return small_cards(seed)
    backend = cuda_backend()
    assert backend.cupy is not None, f"ASYNCFLOW_REQUIRE_GPU is set, and there is no usable card: {backend.reason}"
    shared_slab(backend.cupy, PINNED_BYTES)
    return nullcontext()


@pytest.fixture
def cards(arrangement: Arrangement, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """True if the arrangement has CUDA devices; sessions find cards for them."""
    with any_cards(_seed(request)) if arrangement.cuda else nullcontext():
        if arrangement.graphs:
            monkeypatch.setattr(captures, "WARM_UPS", 0)  # most tests run a region once
        yield bool(arrangement.cuda)


@pytest.fixture
def open_session(
    arrangement: Arrangement, machine: SimMachine | None, cards: bool, request: pytest.FixtureRequest
) -> OpenSession:
    """Opens sessions as `af.Session` does, as the arrangement says; afterwards nothing of their runs may be left."""
    kind = "cuda" if cards else "cpu" if machine is None else "sim"
    count = 1 if arrangement.draw is None else 3
    chosen: dict[str, Any] = {
        "debug": True,
        "regions": arrangement.regions,
        "devices": arrangement.devices or [f"{kind}:{index}" for index in range(count)],
        "placement_seed": None if arrangement.draw is None else _seed(request),
        "cuda_graphs": arrangement.graphs,
        "device_while": arrangement.graphs,
        "compute_streams": arrangement.streams,
        "without": [arrangement.without] if arrangement.without else [],
    }

    @asynccontextmanager
    async def opened(graph: af.Graph | None = None, **options: Any) -> AsyncIterator[af.Session]:
        async with af.Session(graph, **{**chosen, **options}) as session:
            yield session
            assert_baseline(session)
        assert_freed(session)

    return opened


@pytest.fixture
async def session(open_session: OpenSession) -> AsyncIterator[af.Session]:
    """A session in debug mode, as the arrangement says."""
    async with open_session() as opened:
        yield opened


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the garbage collector, so that whatever is freed is freed by its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def run(session: af.Session) -> Callable[..., Awaitable[Any]]:
    """`session.run`."""
    return session.run


def _seed(request: pytest.FixtureRequest) -> int:
    """Return the seed of a test's random placement and machine, from its name and the turn: each turn draws anew."""
    return crc32(f"{request.node.nodeid}{request.config.getoption('turn')}".encode())


# -- what must hold after every test ---------------------------------------------------------------------------------


def assert_baseline(session: af.Session) -> None:
    """After a run, however it ended: no run in flight, and no task but the test's own."""
    assert session.statistics().runs == 0
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [task for task in others if not task.done()], others


def held_buffers(session: af.Session) -> dict[str, Counter[LiveBuffer]]:
    """Return the buffers that devices hold for runs.

    Constants and CUDA graphs are not counted, as they live as long as the plan. Nor are copies that simulated devices
    keep of an array on another device: a graph's constants, when a TensorArray hands them out, and variables.
    """
    held: dict[str, Counter[LiveBuffer]] = {}
    for device in session.devices:
        kept_by_plans = ("constant", "CUDA graph of ")
        buffers = Counter(b for b in device.memory.top(1000) if not b.label.startswith(kept_by_plans))
        if isinstance(device, SimDevice):
            kept = [storage for _, storage in device.machine._kept.values() if storage.home is device]
            buffers -= Counter(LiveBuffer(storage.nbytes, storage.written.label) for storage in kept)
        if buffers:
            held[device.name] = buffers
    return held


def assert_freed(session: af.Session) -> None:
    """After a session has closed, its cards, simulated or not, hold nothing; on CPUs the test may hold results."""
    if held_on_cards(session):
        gc.collect()  # an expected error and its traceback refer to one another
        assert held_on_cards(session) == {}


def held_on_cards(session: af.Session) -> dict[str, Counter[LiveBuffer]]:
    """Return the buffers that devices with a memory of their own hold for runs."""
    return {name: held for name, held in held_buffers(session).items() if not name.startswith("cpu:")}


class AuditedRun(Run):
    """A run that, when it has ended, notes its remains."""

    leftovers: ClassVar[list[str]] = []

    def on_quiet(self) -> None:
        """The last thing that happens to a run."""
        was_finished = self.is_finished
        super().on_quiet()
        if self.is_finished and not was_finished:
            self.leftovers.extend(left_of(self))


def left_of(run: Run) -> list[str]:
    """The frames, tokens, rendezvous entries and work in flight of a run that has ended; none, it is to be hoped."""
    found = [f"{run.rendezvous.statistics()}"] if any(run.rendezvous.statistics()) else []
    for executor in run.executors:
        if isinstance(executor, LoneFiring):
            found += executor.waiting()
            continue
        held = executor.scheduler.statistics()
        if held != NOTHING_LEFT or executor.in_flight:
            found.append(f"{held}, {executor.in_flight} in flight")
    return found


NOTHING_LEFT = Statistics(ready=0, running=0, frames=0, iterations=0, parked=0)


@pytest.fixture(scope="module", autouse=True)
def _what_stays_is_collected_once() -> None:
    """Collect once, and freeze: pytest keeps records of finished tests, and each collection would visit all of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_left_of_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every run of every test ends with zero frames, tokens, rendezvous entries, work in flight and hazards."""
    monkeypatch.setattr(in_flight, "Run", AuditedRun)
    AuditedRun.leftovers.clear()
    yield
    assert AuditedRun.leftovers == []


@pytest.fixture(autouse=True)
def _saved_values_move_by_the_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Behaviour 68: none too small, none twice; what went out came back or was dropped, and nothing is held."""
    monkeypatch.setattr(mover_module, "SavedMoves", AuditedMoves)
    AuditedMoves.made.clear()
    AuditedMoves.found.clear()
    yield
    if any(moves.broken() for moves in AuditedMoves.made):
        gc.collect()  # an expected error and its traceback refer to one another
    assert left_over() == []


@pytest.fixture(autouse=True)
def _closed_stand_ins_are_forgotten() -> Iterator[None]:
    """Forget closed stand-ins: a process keeps data of its one CuPy, and would keep them for every test's stand-in."""
    yield
    for registry in (cuda_card._cards, cuda_copies._cards):
        for key in list(registry):
            cupy = key[0] if isinstance(key, tuple) else key
            if isinstance(cupy, FakeCupy) and cupy.engine.closed:
                del registry[key]
                fused._compiled.cache_clear()


@pytest.fixture(autouse=True)
def _no_leaked_threads() -> Iterator[None]:
    """Stream threads end with their sessions."""
    before = set(threading.enumerate())
    yield
    leaked = [t for t in threading.enumerate() if t not in before and t.name.startswith(("cpu:", "asyncflow"))]
    for thread in leaked:
        thread.join(timeout=PATIENCE_S / len(leaked))
    assert not [thread for thread in leaked if thread.is_alive()]
