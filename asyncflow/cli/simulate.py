"""``asyncflow simulate``: runs a program on a machine that is not there, and predicts its times."""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from asyncflow.cli.profile import how_to_open
from asyncflow.cli.program import run_program
from asyncflow.cli.simulation.host_share import format_host, host_share
from asyncflow.cli.simulation.progress import shown_progress
from asyncflow.cli.target import Target
from asyncflow.devices.figures.presets import Card, MachineSpec, format_machine
from asyncflow.devices.memory import format_bytes
from asyncflow.devices.sim.machine import SimMachine, use_machine
from asyncflow.profiler import Summary, save, summarize
from asyncflow.profiler.save import check_destination
from asyncflow.profiler.summary import COPY_STREAMS, align, format_duration, format_requests
from asyncflow.runtime.watch.trace import Trace
from asyncflow.streams import loop as asyncflow_loops
from asyncflow.streams.virtual import VirtualClockLoop

_Build: TypeAlias = Callable[[VirtualClockLoop], SimMachine]


def simulate(target: str, build: _Build, outputs: Sequence[Path], arguments: Sequence[str]) -> int:
    """Run `target` on a simulated machine, print the time and memory needed there, and return the exit code.

    Event loops that the program starts (`asyncflow.run`, `asyncio.run`, `asyncio.Runner`, `uvloop.run`) run on virtual
    time, one after the other on one clock; a session that names no devices opens all of the machine's. Loops of other
    threads stay real. Standard error shows the progress while the program runs.

    Args:
        target: ``file.py:name`` or ``package.module:name``.
        build: makes the machine for an event loop.
        outputs: files for the timeline, ending in .json, .json.gz, .html, .png or .svg; checked before anything runs.
        arguments: the program's ``sys.argv[1:]``.

    Returns:
        As `asyncflow.cli.profile.profile`. The timeline is written in every case.

    Raises:
        TargetError: `target` names nothing that can be called without arguments.
        TraceFormatError, OSError: an output that cannot be written.
    """
    for path in outputs:
        check_destination(path)
    trace = Trace(detail="region")  # still every kernel: simulated regions record their launches one by one
    called = Target.parse(target)
    with _rare_collections():
        with simulated_loops(build) as machines, shown_progress(trace, machines):
            code = run_program(called, arguments, trace)
        sys.stdout.flush()
        report = format_report(trace, machines[0].spec, machines)
    print(f"\n{report}")
    for path in outputs:
        save(trace, path)
        print(f"\nwrote {path}{how_to_open(path)}")
    return code


_YOUNG_OBJECTS = 100_000
"""Number of new objects after which Python looks for garbage: a traced run makes thousands that stay."""


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for garbage less often: with its default of 700 that takes a quarter of a simulation's time."""
    gc.freeze()  # skip older objects, such as modules
    first, *others = thresholds = gc.get_threshold()
    if first:  # 0: collection is off
        gc.set_threshold(max(first, _YOUNG_OBJECTS), *others)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


# -- virtual time for the program's event loops ------------------------------------------------------------------


@contextmanager
def simulated_loops(build: _Build) -> Iterator[Sequence[SimMachine]]:
    """Make every event loop created on this thread inside the block virtual, with a machine of its own.

    Yields the list of machines, which grows as loops are made.
    """
    with ExitStack() as cleanup:
        loops = _Loops(build, cleanup)
        # Where `asyncio.Runner`, programs and `asyncflow.run` look up a new loop.
        places: list[Any] = [asyncio.events, asyncio, asyncflow_loops]
        uvloop: Any = sys.modules.get("uvloop")
        if uvloop is not None:
            places.append(uvloop)
            # uvloop looks up none, and insists on its own kind of loop.
            cleanup.callback(setattr, uvloop, "run", uvloop.run)
            uvloop.run = loops.runner(uvloop.run)
        for place in places:
            real = place.new_event_loop
            cleanup.callback(setattr, place, "new_event_loop", real)
            place.new_event_loop = loops.maker(real)
        yield loops.machines


class _Loops:
    """Virtual event loops of the program, one after the other.

    The next one and its machine are there before they are asked for: a program may open its session first and start
    its event loop afterwards.
    """

    def __init__(self, build: _Build, cleanup: ExitStack) -> None:
        self._build = build
        self._cleanup = cleanup
        self._thread = threading.get_ident()
        self._now_ns = 0
        self.machines: list[SimMachine] = []
        self._next = self._prepare()
        cleanup.callback(self._end)

    def maker(self, real: Callable[[], asyncio.AbstractEventLoop]) -> Callable[[], asyncio.AbstractEventLoop]:
        """A function to stand in for `real`."""

        def new_event_loop() -> asyncio.AbstractEventLoop:
            return self._take() if threading.get_ident() == self._thread else real()

        return new_event_loop

    def runner(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A function to stand in for `real`, which is ``uvloop.run``."""

        def run(main: Coroutine[Any, Any, Any], **options: Any) -> Any:
            if threading.get_ident() != self._thread or "loop_factory" in options:
                return real(main, **options)
            return asyncflow_loops.run(main, **options)

        return run

    def _take(self) -> asyncio.AbstractEventLoop:
        if self._next.is_taken:  # still open: the program wants a second loop
            self._next = self._prepare()
        self._next.is_taken = True
        return self._next

    def _prepare(self) -> _ProgramLoop:
        loop = _ProgramLoop(self._closed, start_ns=self._now_ns)
        machine = self._build(loop)
        self.machines.append(machine)
        self._cleanup.enter_context(use_machine(machine))
        return loop

    def _closed(self, loop: _ProgramLoop) -> None:
        self._now_ns = max(self._now_ns, loop.time_ns())
        if loop is self._next:
            self._next = self._prepare()

    def _end(self) -> None:
        if not self._next.is_taken:
            self._next.on_close = None
            self._next.close()


class _ProgramLoop(VirtualClockLoop):
    """A virtual loop that tells when it is closed."""

    def __init__(self, on_close: Callable[[_ProgramLoop], None], *, start_ns: int) -> None:
        super().__init__(start_ns=start_ns)
        self.is_taken = False
        self.on_close: Callable[[_ProgramLoop], None] | None = on_close

    def close(self) -> None:
        super().close()
        told, self.on_close = self.on_close, None
        if told is not None:
            told(self)


# -- the report --------------------------------------------------------------------------------------------------


def format_report(trace: Trace, machine: MachineSpec, machines: Sequence[SimMachine] = ()) -> str:
    """Return step time, load of host and streams, peak memory and requests of each device; ends without a newline.

    Args:
        trace: of all runs.
        machine: the simulated machine.
        machines: it, once for each event loop of the program.
    """
    head = f"machine    {format_machine(machine)}"
    if machines:
        head += f"\nhost       {machines[0].driver.summary}; launches by {machines[0].launches}"
    if not trace.runs and not trace.firings:
        return f"{head}\nnothing ran on it: the program made no graph run"
    summary = summarize(trace)
    lines = [head, *_unused_cards(summary), f"runs       {summary.runs}", *_step_time(trace)]
    lines.append(f"makespan   {format_duration(summary.wall_ns)}")
    if machines:
        lines += format_host(host_share(machines, summary.wall_ns), summary, machines[0].launches)
    streams = [
        (lane.device, lane.stream, f"{lane.busy_fraction:.1%}", format_duration(lane.busy_ns), str(lane.firings))
        for lane in summary.lanes
        if lane.busy_ns or lane.stream not in COPY_STREAMS  # copies of simulated CPUs take no time
    ]
    parts = ["\n".join(lines)]
    if streams:
        parts.append(align(("device", "stream", "busy %", "busy", "firings"), streams, left=2))
    parts.append(align(("device", "card", "peak memory", "of", ""), _memory(summary, machine), left=2))
    if summary.requests:
        parts.append(format_requests(summary.requests))
    if trace.dropped:
        parts.append(f"{trace.dropped} firings past the trace's capacity are in none of these figures")
    return "\n\n".join(parts)


def _step_time(trace: Trace) -> list[str]:
    steps = [run.ended_ns - run.started_ns for run in trace.runs if run.status == "ok"]
    failed = len(trace.runs) - len(steps)
    lines = []
    if steps:
        spread = f" (median; {format_duration(min(steps))} to {format_duration(max(steps))})" if len(steps) > 1 else ""
        lines.append(f"step time  {format_duration(statistics.median(steps))}{spread}")
    if failed:
        lines.append(f"failed     {failed}, which count in no step time")
    return lines


def _unused_cards(summary: Summary) -> list[str]:
    """Says so if the machine asked for had nothing to do."""
    used = list(dict.fromkeys(lane.device for lane in summary.lanes))
    if not used or any(device.startswith("sim:") for device in used):
        return []
    return [f"cards      ran nothing: the program's sessions name their own devices, and all was on {', '.join(used)}"]


def _memory(summary: Summary, machine: MachineSpec) -> list[tuple[str, ...]]:
    """Rows: the cards, idle neighbours in one, then the other devices."""
    peaks = {device.device: device.peak_nbytes for device in summary.devices}
    cards = [(f"sim:{index}", card) for index, card in enumerate(machine.cards)]
    rows: list[tuple[str, ...]] = []
    for (is_used, card), group in groupby(cards, key=lambda pair: (pair[0] in peaks, pair[1])):
        names = [name for name, _ in group]
        if is_used:
            rows += [_memory_row(name, card, peaks[name]) for name in names]
        else:
            rows.append((names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}", card.name, "idle", "", ""))
    rows += [(name, "", format_bytes(peak), "", "") for name, peak in peaks.items() if not name.startswith("sim:")]
    return rows


def _memory_row(name: str, card: Card, peak: int) -> tuple[str, ...]:
    limit = card.memory_bytes
    return name, card.name, format_bytes(peak), format_bytes(limit), f"{peak / limit:.1%}"
