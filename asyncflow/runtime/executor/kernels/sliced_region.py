"""One firing of a region that is a generator, because of its loops or of long kernels: driven in slices.

It starts on the event loop if its kernels are short as far as is known, and loops over scalars stay there: they hold
the GIL wherever they run, and a slice ends with the session's turn. When an iteration takes longer than a kernel may on
the event loop, the rest moves to one of the device's threads; that is safe where the generator stands still: at a back
edge, or behind a kernel that may be long. Where the next firing starts depends on its node's `hold`: the longest
time, as measured, for which it held its thread without giving way, wherever that was.

A region that calls a user's function is taken for that function: it begins on a thread until it has proved to be short
(`UserCost`). Its time is that of the clock on the wall, as the function may wait, and it stops behind a slow call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import perf_counter_ns, thread_time_ns
from types import FrameType, GeneratorType
from typing import NamedTuple, TypeAlias

from asyncflow.compiler.plan import PlanNode
from asyncflow.compiler.regions.code.region_code import Phase
from asyncflow.devices.machine.cost import INLINE_LIMIT_NS, SLICE_NS, MeasuredCost
from asyncflow.devices.protocol import Spans
from asyncflow.devices.saved.working_set import WorkingSet
from asyncflow.ops.rows.by_row import Paused, PausingKernel
from asyncflow.runtime.executor.kernels.first_guess import user_cost
from asyncflow.runtime.scheduler.frame import Iteration
from asyncflow.state.waiting.lines import PlaceInLine
from asyncflow.values import Value

_OVERRUN_NS = 1_000_000
"""A slice that takes longer holds heavy work among light, though its mean iteration be short."""

_GROWTH = 16

_MOST_STEPS = 1 << 12
"""The largest budget of a slice. A loop that never ends gives way even if the clock hardly moves."""


RegionGenerator: TypeAlias = (
    "GeneratorType[bool | WorkingSet | PlaceInLine | Paused | None, int | None, tuple[Value, ...]]"
)


def in_parts(node: PlanNode) -> Callable[..., object]:
    """Return the kernel of a user's function; it pauses between rows that take long."""
    kernel = node.kernel
    assert kernel is not None
    return partial(kernel.begin, INLINE_LIMIT_NS) if isinstance(kernel, PausingKernel) else kernel


class PhaseSpan(NamedTuple):
    """The time span of one phase of a traced region."""

    phase: Phase
    started_ns: int
    ended_ns: int


class Stopped(Exception):
    """The run was stopped while the region ran on a thread."""


@dataclass(slots=True, eq=False, repr=False)
class SlicedRegion:
    """A region in progress.

    Args:
        clock: nanoseconds of the thread that launches it, where that is simulated.
        is_traced: its phases are asked for.
    """

    node: PlanNode
    iteration: Iteration
    inputs: Sequence[Value]
    generator: RegionGenerator
    spans: Spans | None = None
    """Spans that an asynchronous device records for the region; None if the run is not traced."""
    clock: Callable[[], int] | None = None
    is_traced: bool = field(default=False, kw_only=True)
    budget: int | None = field(default=None, init=False)
    """The number of back edges and long kernels until it yields again; None before it has begun."""
    is_heavy: bool = field(default=False, init=False)
    """The last slice held the event loop for too long, so that the rest belongs on a thread."""
    is_waiting: bool = field(default=False, init=False)
    """True if it has stopped before waiting for a saved value, which a thread must do."""
    lacks_memory: bool = field(default=False, init=False)
    """True if it has stopped before an iteration for which memory is short."""
    place: PlaceInLine | None = field(default=None, init=False)
    """Place in line at which the region has stopped until it is called."""
    is_suspect: bool = field(init=False)
    """True if an earlier slice may have been long, in this firing or the previous."""
    is_unsettled: bool = field(default=False, init=False)
    """True while it is unknown whether the last long slice was long by itself."""
    is_proved: bool = field(default=False, init=False)
    """True if a slice has proved to be long by itself."""
    is_watched: bool = field(default=True, init=False)
    """The next slice's time of the processor will be taken."""
    size: int = field(init=False)
    """Number of elements of the region's inputs."""
    hold_ns: int = field(default=0, init=False)
    """Longest time for which the region has held its thread without giving way."""
    has_learned: bool = field(default=False, init=False)
    inline_ns: int = field(default=0, init=False)
    """Time for which it has computed on the event loop."""
    parts: int = field(default=0, init=False)
    """Number of slices begun and stopped."""
    paused_ns: int | None = field(default=None, init=False)
    """Time of the last stop; None before it began."""
    phases: list[PhaseSpan] = field(default_factory=list, init=False)
    """Phases in which a traced region computed since the last request."""
    iterations: dict[Phase, int] = field(default_factory=dict, init=False)
    """Numbers of iterations of its ended loops, by phase."""
    seen_phases: dict[Phase, int] = field(default_factory=dict, init=False)
    """Number of recordings of each phase."""
    _standing: Phase | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.is_suspect = self.node.times.is_suspect
        self.size = size_of(self.inputs)

    def expected_hold_ns(self) -> float:
        """Return the time for which the region is expected to hold its thread without giving way; infinite if
        unknown.
        """
        hold = self.node.times.hold
        if hold is None and self.node.conduct.is_user:
            hold = self.node.times.hold = user_cost(self.node)
        if hold is not None:
            return hold.predict_ns(self.size)
        assert self.node.times.estimate is not None
        return inf if self.node.times.estimate.expects(INLINE_LIMIT_NS, self.inputs) else 0.0

    def run_slice(self) -> int:
        """Runs until the budget is spent and sets the next one; gives the time afterwards.

        Raises:
            StopIteration: it has ended; the exception's value is the tuple of outputs.
        """
        # Processor time excludes moments when other threads ran, but is slow to read. A kept frame still has its
        # variables after the function returned: the last loop's counter.
        frame = self.generator.gi_frame if self.is_traced else None
        if self.is_traced and self._standing is None:
            self._standing = self._phase()
        busy_ns = thread_time_ns() if self.is_watched and not self.node.conduct.is_user else 0
        clock = self.clock or perf_counter_ns
        before = clock()
        try:
            why = self.generator.send(self.budget)
        except StopIteration:
            now = clock()
            self._note_phase(before, now, frame)
            self._take_time(before, now, busy_ns)
            raise
        now = clock()
        begins_loop = why is True
        self.is_waiting, self.lacks_memory = why is False, isinstance(why, WorkingSet)
        self.place = why if isinstance(why, PlaceInLine) else None
        self._note_phase(before, now, frame)
        taken, spent = self._take_time(before, now, busy_ns)
        if isinstance(why, Paused):
            self.is_heavy = True
            self.hold_ns = max(self.hold_ns, taken)
        self.is_watched = (self.is_suspect and not self.is_proved) or begins_loop
        if self.place is not None:
            self.budget = spent  # no more: the rest has not been measured
            return now
        # Times of earlier iterations say nothing about another loop.
        most = min(spent * _GROWTH, _MOST_STEPS)
        self.budget = 1 if begins_loop else max(1, min(most, spent * SLICE_NS // max(taken, 1)))
        return now

    def _phase(self) -> Phase | None:
        """The phase in which it stands, to go on with."""
        frame, code = self.generator.gi_frame, self.node.region
        assert code is not None
        return None if frame is None else code.phase_at(frame.f_lineno)

    def _note_phase(self, started_ns: int, ended_ns: int, frame: FrameType | None) -> None:
        """Notes a slice of a traced region; of a loop that has ended the iterations, which a variable still counts."""
        phase = self._standing
        if phase is None:
            return
        if self.phases and self.phases[-1].phase is phase:
            started_ns = self.phases.pop().started_ns
        self.phases.append(PhaseSpan(phase, started_ns, ended_ns))
        self._standing = self._phase()
        if phase.counter and frame is not None and self._standing is not phase:
            count = frame.f_locals.get(phase.counter)  # missing if it failed before the loop began
            if count is not None:
                self.iterations[phase] = count

    def take_phases(self) -> list[PhaseSpan]:
        """Return the phases in which it computed since the last call; none if the run is not traced."""
        taken, self.phases = self.phases, []
        return taken

    def _take_time(self, before: int, now: int, busy_ns: int) -> tuple[int, int]:
        """Accounts for a slice; how long it took, and how many steps it may have had."""
        taken, spent = now - before, self.budget or 1
        limit_ns = min(INLINE_LIMIT_NS * spent, _OVERRUN_NS)
        held_ns = taken // spent
        self.is_heavy = False
        if self.node.conduct.is_user:
            self.is_heavy = taken > limit_ns
            held_ns = taken if self.is_heavy else held_ns
        elif taken > limit_ns:
            self.is_suspect = True
            self.is_unsettled = not self.is_watched
            held_ns = INLINE_LIMIT_NS
            if self.is_watched:
                computed_ns = thread_time_ns() - busy_ns
                self.is_heavy = computed_ns > limit_ns
                self.is_proved |= self.is_heavy
                held_ns = computed_ns if self.is_heavy else computed_ns // spent
        self.hold_ns = max(self.hold_ns, held_ns)
        return taken, spent

    def learn_hold(self) -> None:
        """Has the node's next firings begin where this one should have."""
        if self.node.times.hold is None:
            self.node.times.hold = MeasuredCost()
        self.node.times.hold.observe(self.size, self.hold_ns)
        self.has_learned = True

    def learn(self, on_thread_ns: int = 0) -> None:
        """Learn the region's times at its end: its hold (`learn_hold`) if that is news, and its time on a thread and
        before.
        """
        self.node.times.is_suspect = self.is_unsettled
        is_known = self.inline_ns and self.node.times.hold is None and self.hold_ns <= INLINE_LIMIT_NS
        if not (self.has_learned or is_known):
            self.learn_hold()
        if self.node.times.cost is None:
            self.node.times.cost = MeasuredCost()
        self.node.times.cost.observe(self.size, self.inline_ns + on_thread_ns)

    def run_to_end(self, is_stopped: Callable[[], bool]) -> tuple[Value, ...]:
        """Runs on a thread until it ends, or lacks memory; watched until it has proved heavy.

        Raises:
            Stopped: `is_stopped` said so at a back edge.
        """
        self.is_suspect = True
        try:
            while not is_stopped():
                self.run_slice()
                if self.lacks_memory or self.place is not None:
                    return ()
        except StopIteration as ended:
            outputs: tuple[Value, ...] = ended.value
            return outputs
        self.close()
        raise Stopped

    def close(self) -> None:
        """Gives up."""
        if self.place is not None:
            self.place.leave()
        self.generator.close()

    def describe(self) -> str:
        """Describe the awaited resource, for messages."""
        frame, code = self.generator.gi_frame, self.node.region
        assert self.place is not None and frame is not None and code is not None
        source = code.places[frame.f_lineno + 1].node  # the line after the yield claims it
        return f"{source.name}: {self.place.describe()}\n    built at {source.location}"


def size_of(values: Iterable[Value]) -> int:
    """The number of elements of the values in all: the size of the work on them."""
    size = 0
    for value in values:
        size += getattr(value, "size", 1)
    return size
