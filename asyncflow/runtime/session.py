"""`Session`: runs graphs on devices; `await session.run(fetches, feeds)`."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import warnings
import weakref
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

from asyncflow.compiler.pipeline import compile_plan
from asyncflow.compiler.request import PlanOptions, PlanRequest
from asyncflow.devices.blas import acquire_blas_threads
from asyncflow.devices.registry import check_event_loop, has_one_memory, open_devices
from asyncflow.entered import Entered
from asyncflow.errors import GraphError, OutOfMemoryError, SessionClosedError
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Tensor
from asyncflow.pickling import NotPickled
from asyncflow.runtime.admission import Admission, AtomicRuns, in_time
from asyncflow.runtime.channel import Channel
from asyncflow.runtime.copies import Copies
from asyncflow.runtime.device_feeds import as_of_now, at_hand
from asyncflow.runtime.feeds import as_feeds
from asyncflow.runtime.fetches import user_value
from asyncflow.runtime.loop import burst_clock, thread_waits
from asyncflow.runtime.memory_turns import MemoryTurns
from asyncflow.runtime.options import (
    as_timeout,
    check_device_while,
    check_flag,
    check_graph,
    check_integer,
    check_limits,
    check_plan_options,
    check_trace,
)
from asyncflow.runtime.plans import PlanCache
from asyncflow.runtime.prepared import Call, CallCache, Prepared
from asyncflow.runtime.run import Run
from asyncflow.runtime.session_statistics import SessionStatistics
from asyncflow.runtime.straight import quiet_context, run_straight
from asyncflow.runtime.trace import Trace, current_trace, looks_inside, write_trace
from asyncflow.runtime.turn import Turn
from asyncflow.state.containers import StateStore
from asyncflow.state.held import holder_of
from asyncflow.streams.beside import call_beside
from asyncflow.streams.holding import is_within, note_ask

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import AsyncGenerator, Callable, Collection, Hashable, Mapping, Sequence

    from asyncflow.compiler.plan import Plan
    from asyncflow.devices.blas import BlasLease
    from asyncflow.devices.protocol import AsynchronousDevice, Device
    from asyncflow.runtime.admission import Claim, Ticket

_THREADS_END_S = 5.0
"""How long idle threads may take to end."""

_current: Entered[Session] = Entered("asyncflow_session")
_forked: weakref.WeakSet[Session] = weakref.WeakSet()


def current_session() -> Session | None:
    """The session whose ``async with`` block this code runs in, or None."""
    # One that another task has left may still stand here.
    return next((session for session in reversed(_current.all()) if session._closed is None), None)


class Session(NotPickled):
    """Runs graphs on devices. Any number of runs may be in flight; each is awaited on the session's event loop.

    A session binds to the event loop that first uses it. Variables without a container belong to one session.

    Args:
        graph: where names in fetches and feeds are looked up; tensors know their own graph.
        devices: names such as ``["cpu:0", "cpu:1"]``; None for one CPU device.
        optimize: fold constants, join equal nodes and move invariant ones out of loops before a graph runs.
        loop_batching: with `optimize`, do matrix products of many iterations of a loop at once where they do not need
            what the loop carries, or nothing in the loop needs them; results are the same within rounding.
        regions: compile clusters of nodes that never wait into generated Python functions.
        fusion: with `regions`, make one CUDA kernel of each chain of elementwise ones. It is compiled when it first
            runs; results are the same but for rounding in transcendental functions.
        cuda_graphs: with `regions`, launch a region of elementwise operations and reductions as one CUDA graph once it
            has run a few times with the same shapes and the same numbers on the host. New; right on the one card it
            ran on, and about three times as fast there.
        device_while: run loops on the card that decide by arrays and whose bodies are such operations, branches and
            loops of them included, with no copy to the host in between; needs the package ``cuda-bindings``, which the
            extras ``cuda13`` and ``cuda12`` bring, and a driver of CUDA 13. ``Plan.explain()`` says for each loop
            whether the card runs it. New; right on the one card it ran on.
        debug: verify the graph after every compiler pass and every kernel's outputs against the op's shape rule.
        seed: picks among ready firings at random, to show that results do not depend on the order. None: in order.
        memory_limit: bytes per device; None for no limit. Runs that only compute, and pass it together, are done one
            after the other; what passes it alone fails with `OutOfMemoryError`.
        threads: BLAS threads a stream. One is best when several runs are in flight.
        compute_streams: streams for kernels on each device; with more than one, the compiler divides a run's
            independent branches, and the iterations of its loops, over them. Kernels of different runs on a CPU overlap
            in any case: it has a thread for each core, up to 8, and two more, one of them for short work alone.
        transfer_dtype: ``"bfloat16"`` sends float32 values between devices as their upper 16 bits, in half the bytes
            and with 8 bits of precision. None sends what is there.
        soft_placement: a node goes to another device if it has no kernel for the one asked for; False makes that an
            error.
        placement_seed: puts nodes on devices at random, as far as requests allow, to show that results do not depend on
            it. None: where they finish first.
        check_numerics: fail on the first NaN or infinity, naming the node.
        max_iterations: most iterations of any one loop; None for no limit.
        plans: most compiled plans that the session keeps; the one used least recently goes first. What is kept for a
            graph goes when the graph does.
        max_runs: most runs in flight at once; others wait their turn. None for no limit. Not counted are runs that need
            no scheduler, as they are over at once, and those that a run asks for.
        max_queued: with `max_runs`, most runs that wait; more, and those that would not end within their ``timeout=``,
            are refused (`OverloadedError`). None for no limit.

    Raises:
        TypeError, ValueError: an option is of another type than it says, or out of its range.
        PlacementError: `devices` names one that is not there, or `device_while` lacks ``cuda-bindings``.

    >>> import asyncflow as af
    >>> with af.Graph() as graph:
    ...     x = af.placeholder("float32", ())
    ...     y = x * 2
    >>> async def main():
    ...     async with af.Session(graph) as session:
    ...         return await session.run(y, {x: 21.0})
    >>> af.run(main())
    np.float32(42.0)
    """

    _instead = (
        "it has devices, threads and an event loop of this process; make a session in the other one, and send values "
        "there as NumPy arrays"
    )

    def __init__(
        self,
        graph: Graph | None = None,
        devices: Sequence[str] | None = None,
        *,
        optimize: bool = True,
        loop_batching: bool = True,
        regions: bool = True,
        fusion: bool = True,
        cuda_graphs: bool = False,
        device_while: bool = False,
        debug: bool = False,
        seed: int | None = None,
        memory_limit: int | None = None,
        threads: int = 1,
        compute_streams: int = 1,
        transfer_dtype: str | None = None,
        soft_placement: bool = True,
        placement_seed: int | None = None,
        check_numerics: bool = False,
        max_iterations: int | None = None,
        plans: int = 256,
        max_runs: int | None = None,
        max_queued: int | None = None,
    ) -> None:
        check_graph(graph)
        check_flag(regions, "regions")
        check_integer(threads, "threads", 1)
        check_integer(compute_streams, "compute_streams", 1)
        check_integer(plans, "plans", 1)
        check_limits(max_runs, max_queued)
        if seed is not None:
            check_integer(seed, "seed", None)
        self._options = PlanOptions(
            optimize=optimize,
            loop_batching=loop_batching,
            fusion=fusion,
            cuda_graphs=cuda_graphs,
            device_while=device_while,
            debug=debug,
            check_numerics=check_numerics,
            max_iterations=max_iterations,
            transfer_dtype=transfer_dtype,
            soft_placement=soft_placement,
            placement_seed=placement_seed,
        )
        check_plan_options(self._options)
        self.graph = graph
        self.devices: tuple[Device, ...] = open_devices(devices, memory_limit, compute_streams)
        if device_while:
            check_device_while(self.devices)
        # Only then is there a choice that depends on what nodes cost.
        self._is_divided = len(self.devices) > 1 or compute_streams > 1
        self._device_of = {device.name: device for device in self.devices}
        self.state = StateStore()
        self._seed = seed
        self._threads = threads
        self._random_seed = secrets.randbits(63)
        # A variable stays on the device whose memory it is in, whatever else a later plan runs.
        self._homes: dict[Hashable, str] | None = None if has_one_memory(self.devices) else {}
        self._plans = PlanCache(plans)
        self._calls = CallCache(graph, self._plans, regions=regions)
        self._copies = Copies()
        self._quiet = quiet_context()
        self._admission = None if max_runs is None else Admission(max_runs, max_queued)
        self._atomic = AtomicRuns()
        self._memory_turns = None if memory_limit is None else MemoryTurns()
        self._runs: set[Run] = set()
        self._run_count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._turn: Turn | None = None
        self._blas: BlasLease | None = None
        self._closed: str | None = None
        self._has_started = False
        self._idle: asyncio.Event | None = None
        _forked.add(self)

    # -- life cycle ----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            if self._closed is None:
                self._has_started = True
                for device in self.devices:
                    if device.is_asynchronous:
                        await cast("AsynchronousDevice", device).open()
            self._bind()
        except BaseException:
            if self._loop is None:  # else it goes on where it was entered before
                await self.aclose()
            raise
        for session in _current.all():
            if session._closed is not None:
                _current.leave(session)  # another task has left it
        _current.enter(self)
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        _current.leave(self)
        # Nobody will look at the results of runs in flight once the block has failed.
        await (self.aclose() if kind is None else self.aclose(grace_s=0))

    def __enter__(self) -> NoReturn:
        raise TypeError("a session opens and closes on an event loop: use `async with` in place of `with`")

    def __exit__(self, *exc: object) -> None:
        """Never called; without it, Python would not call `__enter__` to say what is wrong."""

    def _bind(self) -> asyncio.AbstractEventLoop:
        """The event loop, after checking that this is it and that the session is open."""
        if self._closed is not None:
            raise SessionClosedError(self._closed)
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return loop
        if self._loop is not None:
            raise RuntimeError(
                "this session is bound to a different event loop; make one session per loop, or use "
                "session.run_threadsafe(...) from another thread"
            )
        check_event_loop(self.devices, loop)
        self._start_devices()
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._turn = Turn(loop, burst_clock(loop))
        self._blas = acquire_blas_threads(self._threads)
        return loop

    def _start_devices(self) -> None:
        self._has_started = True
        for device in self.devices:
            if device.is_asynchronous:
                cast("AsynchronousDevice", device).start()

    def is_bound_here(self) -> bool:
        """Whether the session is open and bound to the running event loop."""
        return self._closed is None and self._loop is asyncio.get_running_loop()

    async def aclose(self, grace_s: float = 5.0) -> None:
        """Lets runs in flight end for up to `grace_s` seconds, stops the others, and frees everything. Idempotent.

        A stream whose consumer is not waiting for its next item is stopped at once, and so are runs that wait for their
        turn (`max_runs`).
        """
        if self._closed is not None:
            return
        self._closed = "the session is closed; make a new one"
        if self._admission is not None:
            self._admission.close(self._closed)
        async with AsyncExitStack() as closing:  # which does the rest, whatever becomes of the steps before
            for device in self.devices:
                closing.push_async_callback(device.aclose, _THREADS_END_S)
            closing.push_async_callback(self._copies.aclose, _THREADS_END_S)
            closing.callback(self._release)  # before the devices, which may then give back all their memory
            closing.push_async_callback(self._leave_containers)
            closing.push_async_callback(self._stop_runs)
            for run in [run for run in self._runs if run.is_abandoned]:
                run.close()
            if self._runs and grace_s > 0:
                await self._drain(grace_s)

    async def _stop_runs(self) -> None:
        for run in list(self._runs):
            run.close()
        if self._runs:
            await self._drain(None)

    async def _drain(self, grace_s: float | None) -> None:
        self._idle = asyncio.Event()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            pass  # the caller stops what is left

    async def _leave_containers(self) -> None:
        """Brings what containers' variables have in the memory of the session's devices to the host."""
        holders = [holder for device in self.devices if (holder := holder_of(device.xp)) is not None]
        if self._loop is None or not holders:
            return
        try:
            async with asyncio.timeout(_THREADS_END_S):
                await self.state.leave(holders)
        except TimeoutError:
            pass  # they stay where they are, and alive: those who read them there wait

    def _release(self) -> None:
        self._plans.clear()
        self.state.clear()
        if self._blas is not None:
            self._blas.release()
            self._blas = None

    def __del__(self) -> None:
        if getattr(self, "_closed", "") is None and self._has_started:
            if self._loop is not None:
                warnings.warn(f"{self!r} was dropped without close; use `async with`", ResourceWarning, stacklevel=2)
            for device in self.devices:
                for stream in device.streams:
                    stream.stop()
            self._copies.stop()
            self._release()

    def __repr__(self) -> str:
        return f"<Session on {', '.join(device.name for device in self.devices)}>"

    def statistics(self) -> SessionStatistics:
        """A snapshot."""
        used = {device.name: device.memory.used for device in self.devices}
        queued, refused = (0, 0) if self._admission is None else (self._admission.queued, self._admission.refused)
        completed = self._run_count - len(self._runs)
        return SessionStatistics(len(self._runs), len(self._plans), completed, used, queued, refused)

    # -- running -------------------------------------------------------------------------------------------------

    async def run(
        self,
        fetches: Any,
        feeds: Mapping[Any, Any] | None = None,
        *,
        timeout: float | None = None,
        trace: Trace | str | Path | None = None,
        allow_dead: bool = False,
        atomic: bool = False,
    ) -> Any:
        """Runs what `fetches` need and returns their values in the same nest.

        Args:
            fetches: any nest of tensors, nodes (run, give None), variables (read after everything else) and names, and
                of these in `on_device(...)`.
            feeds: values for placeholders, or for any other tensor outside branches and loops. Copied, above 1 MiB on
                a thread, during which the array is not to be written to; taken as they are if they are
                read-only and own their memory, or look at `bytes`. Strict about dtype and shape. Arrays of other
                libraries are read by DLPack; one on a card is copied there, in the
                order of its library's current stream, or read on a thread if it is needed on the host.
            timeout: seconds until `DeadlineExceeded`.
            trace: a `Trace` to record into, or a path to write the timeline to (``.json``, ``.json.gz``,
                ``.html``, and with matplotlib ``.png``, ``.svg``).
            allow_dead: give None for a fetch on a branch not taken, instead of an error.
            atomic: make what the run reads and writes of variables one step for every other run of the session: it
                starts when those in flight that touch the same variables have ended, and later ones wait for it. It
                undoes nothing: a run that fails or is cancelled leaves what it has written.

        Raises:
            FeedError, FetchError: before anything runs (or, for a dead fetch, after).
            OverloadedError: before anything runs, of a session with `max_runs`.
            KernelError: the first node that failed; everything else has been stopped.
            DeadlineExceeded: after `timeout`.

        Cancellation: the run stops, kernels in flight end, then CancelledError is raised; the session stays usable.
        """
        self._bind()
        if type(feeds) is not dict:
            feeds = as_feeds(feeds)
        return await self.run_call(
            self._calls.of_run(fetches, feeds), tuple(feeds.values()), timeout, trace, allow_dead, atomic
        )

    def prepare(self, fetches: Any, feeds: Sequence[Any] = ()) -> Prepared:
        """A run that only lacks values, for serving: ``f = session.prepare(y, [x])``, then ``await f(value)``.

        Args:
            fetches: as in `run`.
            feeds: the tensors, or their names, that each call gives values for, in that order.

        Raises:
            FeedError, FetchError: as in `run`.
        """
        return Prepared(self, self._calls.new(fetches, feeds))

    async def run_call(
        self,
        call: Call,
        values: Sequence[Any],
        timeout: float | None = None,
        trace: Trace | str | Path | None = None,
        allow_dead: bool = False,
        atomic: bool = False,
    ) -> Any:
        """What `run`, a `Prepared` and a `Function` do, once it is known what to run."""
        loop = self._bind()
        note_ask()
        if timeout is not None:
            timeout = as_timeout(timeout)
        if trace is not None:
            check_trace(trace, may_be_path=True)
        asked_s = loop.time()
        recorder = Trace() if isinstance(trace, str | Path) else trace or current_trace()
        plan = call.plan
        is_planned = plan is not None and call.version == call.request.graph.version and recorder is None
        ticket = claim = None
        is_whole = False
        # What needs no scheduler is over before anybody could wait for it.
        if self._admission is None or (is_planned and plan is not None and plan.straight is not None and not atomic):
            checked, waits = call.check(values)
        else:
            self._may_wait(plan, timeout, asked_s)  # before anything is copied
            checked, waits = call.check(values)
            checked = as_of_now(checked) if waits else checked
            ticket = await self._admitted(plan, timeout, asked_s)
        try:
            if waits:
                checked = await self._copied(checked, timeout, asked_s)
            if plan is None or not is_planned:
                plan, checked = await self._planned(call, checked, recorder, timeout)
            if plan.read_on_host or waits:
                checked = await self._at_hand(plan, call, checked, timeout, asked_s)
            if (
                plan.straight is not None
                and recorder is None
                and not atomic
                and self._may_run_straight(plan, timeout, asked_s)
            ):
                device = self._device_of[plan.partitions[0].device]
                try:
                    straight = run_straight(plan.straight, device, self._quiet, checked)
                except OutOfMemoryError:
                    if self._memory_turns is None or not plan.is_repeatable:
                        raise
                    straight = None  # others may end
                if straight is not None:
                    self._run_count += 1
                    plan.used = self._run_count
                    return call.result(plan, straight, self._device_of, allow_dead=allow_dead)
            if self._admission is not None and ticket is None:
                ticket = await self._admitted(plan, timeout, asked_s)
            if atomic or self._atomic.claims:
                checked = as_of_now(checked) if waits else checked
                claim = await self._claimed(plan, atomic, timeout, asked_s)
            if ticket is not None and self._admission is not None:
                self._admission.begin(ticket, plan)
            staying = frozenset(plan.fetches[index] for index in call.staying)
            start = partial(self._start, loop, plan, checked, timeout, asked_s, recorder, None, staying)
            if self._memory_turns is None or atomic or not plan.is_repeatable or is_within(self._turn):
                values = await start().wait()
            else:
                values = await self._in_turn(start, plan, timeout, asked_s)
            results = await self._copies.of_results(values)
            is_whole = True
        finally:
            if claim is not None:
                self._atomic.leave(claim)
            if ticket is not None and self._admission is not None:
                self._admission.leave(ticket, is_whole=is_whole)
            if recorder is not None and isinstance(trace, str | Path):
                await call_beside(write_trace, recorder, Path(trace))
        return call.result(plan, results, self._device_of, allow_dead=allow_dead)

    def _may_wait(self, plan: Plan | None, timeout: float | None, asked_s: float) -> None:
        """Raises OverloadedError if a run will not be admitted."""
        if self._admission is not None and not is_within(self._turn):
            self._admission.apply(plan, None if timeout is None else asked_s + timeout)

    async def _in_turn(self, start: Callable[[], Run], plan: Plan, timeout: float | None, asked_s: float) -> list[Any]:
        """The values of a run that is done again, alone, if it passes the memory limit beside others."""

        async def attempt() -> list[Any]:
            if self._atomic.claims:
                await self._claimed(plan, False, timeout, asked_s)
            return await start().wait()

        assert self._memory_turns is not None
        waits = partial(in_time, timeout, asked_s, "runs that it does not fit into memory with did not end")
        return await self._memory_turns.values(attempt, waits)

    async def _admitted(self, plan: Plan | None, timeout: float | None, asked_s: float) -> Ticket | None:
        """The leave to start a run; None for one that is part of another."""
        if self._admission is None or is_within(self._turn):
            return None
        return await self._admission.enter(plan, None if timeout is None else asked_s + timeout)

    async def _claimed(self, plan: Plan, atomic: bool, timeout: float | None, asked_s: float) -> Claim | None:
        """Returns when a run may start as far as atomic ones are concerned; its own claim, if it is one."""
        if is_within(self._turn):
            if atomic:
                raise RuntimeError(
                    "atomic=True is for runs that no other run of the session asks for: this one would wait for the "
                    "run it is part of; make that one atomic"
                )
            return None
        async with in_time(timeout, asked_s, "other runs that use the same variables did not end"):
            if atomic:
                return await self._atomic.claim(plan.states, self._runs)
            await self._atomic.wait(plan.states)
        return None

    async def run_function(
        self, graph: Graph, outputs: Any, feeds: Mapping[Tensor, Any], *, atomic: bool = False
    ) -> Any:
        """Runs a traced `@af.function`: its outputs and all its effects."""
        self._bind()
        call = self._calls.of_function(graph, outputs, feeds)
        return await self.run_call(call, tuple(feeds.values()), atomic=atomic)

    async def _planned(
        self, call: Call, values: list[Any], trace: Trace | None, timeout: float | None
    ) -> tuple[Plan, list[Any]]:
        """The plan of a call, kept there unless it is for a trace that looks inside regions; and its values as of now.

        While a large graph is compiled, those of other libraries may change.
        """
        values = as_of_now(values)
        inside = looks_inside(trace)
        request = call.request._replace(regions=False) if inside else call.request
        version = request.graph.version
        plan = await self._plans.get(request, self._compile, timeout)
        if not inside:
            call.plan, call.version = plan, version
        return plan, values

    async def _at_hand(
        self, plan: Plan, call: Call, values: list[Any], timeout: float | None, asked_s: float
    ) -> list[Any]:
        """The values where the plan takes them; see `at_hand`."""
        async with in_time(timeout, asked_s, "what the run needs of other libraries and devices was not there"):
            return await at_hand(values, call.request.feeds, plan, self._device_of)

    async def _copied(self, values: list[Any], timeout: float | None, asked_s: float) -> list[Any]:
        """The values, with those copied that are too large for it on the event loop."""
        async with in_time(timeout, asked_s, "what is fed was not copied"):
            return await self._copies.of_feeds(values)

    def _may_run_straight(self, plan: Plan, timeout: float | None, asked_s: float) -> bool:
        assert self._turn is not None and self._loop is not None
        if self._options.debug or (self._atomic.claims and self._atomic.holds_up(plan.states)):
            return False
        # It is over at once, so a deadline that has not passed will be kept.
        return (timeout is None or self._loop.time() < asked_s + timeout) and self._turn.has_time()

    def _start(
        self,
        loop: asyncio.AbstractEventLoop,
        plan: Plan,
        values: Sequence[Any],
        timeout: float | None,
        asked_s: float,
        trace: Trace | None,
        channel: Channel | None,
        staying: Collection[int | None] = (),
    ) -> Run:
        if self._closed is not None:  # while the plan was compiled
            raise SessionClosedError(self._closed)
        assert self._turn is not None
        self._run_count += 1
        plan.used = self._run_count
        run = Run(
            plan,
            number=self._run_count,
            devices=self._device_of,
            loop=loop,
            turn=self._turn,
            seed=self._random_seed if plan.graph.seed is None else plan.graph.seed,
            shuffle_seed=self._seed,
            max_iterations=self._options.max_iterations,
            trace=trace,
            channel=channel,
            staying=staying,
            guard=self._options.debug,
            on_end=self._forget,
        )
        self._runs.add(run)
        run.start(values, timeout, asked_s)
        return run

    def _forget(self, run: Run) -> None:
        self._runs.discard(run)
        if self._atomic.claims:
            self._atomic.on_end(run)
        if self._idle is not None and not self._runs:
            self._idle.set()

    async def stream(
        self,
        fetches: Any,
        feeds: Mapping[Any, Any] | None = None,
        *,
        timeout: float | None = None,
        trace: Trace | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Iterates over values inside a loop: ``async for value in session.stream(x)``, one item an iteration.

        Items come in the order of the iterations. The loop runs at most `parallel_iterations` ahead of the consumer.
        Leaving the ``async for`` early stops the run: at once inside ``async with contextlib.aclosing(...)``, else when
        the iterator is dropped.

        Args:
            fetches: any nest of tensors of one loop body (or of a branch in it).
            feeds: as in `run`.
            timeout: seconds for the whole run.
            trace: a `Trace` to record into.

        Raises:
            FetchError: the tensors are not inside one loop body.
            KernelError, DeadlineExceeded: as in `run`. Items of iterations that ran ahead of the consumer are then
                lost; with ``parallel_iterations=1`` there are none, and all items before the failure have come.
        """
        loop = self._bind()
        timeout = as_timeout(timeout)
        check_trace(trace, may_be_path=False)
        feeds = as_feeds(feeds)
        call = self._calls.new(fetches, tuple(feeds), streams=True)
        checked, _ = call.check(tuple(feeds.values()))
        asked_s = loop.time()
        checked = await self._copied(checked, timeout, asked_s)
        recorder = trace or current_trace()
        plan, checked = await self._planned(call, checked, recorder, timeout)
        checked = await self._at_hand(plan, call, checked, timeout, asked_s)
        channel = Channel(loop)
        checked = as_of_now(checked)
        ticket = await self._admitted(plan, timeout, asked_s)
        run: Run | None = None
        try:
            if self._atomic.claims:
                await self._claimed(plan, False, timeout, asked_s)
            run = self._start(loop, plan, checked, timeout, asked_s, recorder, channel)
            while (values := await channel.get()) is not None:
                # The loop goes on with the same arrays, so the consumer gets copies.
                copies = await self._copies.of_results(values, shared=True)
                items = zip(call.request.streamed, values, copies, strict=True)
                yield call.structure.unflatten([user_value(x, copy, copy is value, False) for x, value, copy in items])
            await run.wait()
        finally:
            try:
                if run is not None and not run.is_finished:
                    run.stop("cancelled")
                    await run.wait()
            finally:
                if ticket is not None and self._admission is not None:
                    self._admission.leave(ticket)

    def run_threadsafe(
        self, fetches: Any, feeds: Mapping[Any, Any] | None = None, *, timeout: float | None = None
    ) -> concurrent.futures.Future[Any]:
        """`run` from another thread; the session's event loop must be running in its own.

        An op's own function may not wait for a run that needs a thread of the session while it has one itself: the run
        fails, and says so. A coroutine function may await `run`.

        Raises:
            SessionClosedError: the session, or its event loop, is closed.
            RuntimeError: the session has no event loop yet, or this is its thread, where waiting would be for ever.
        """
        if self._closed is not None:
            raise SessionClosedError(self._closed)
        if self._loop is None:
            raise RuntimeError("the session has no event loop yet; enter it with `async with` on the loop's thread")
        if self._loop.is_closed():
            raise SessionClosedError("the session's event loop is closed; make a new session on a new loop")
        if self._thread_id == threading.get_ident():
            raise RuntimeError("this is the thread of the session's event loop; use `await session.run(...)` here")
        note_ask()
        return asyncio.run_coroutine_threadsafe(self._run_for_thread(fetches, feeds, timeout), self._loop)

    async def _run_for_thread(self, fetches: Any, feeds: Mapping[Any, Any] | None, timeout: float | None) -> Any:
        with thread_waits(asyncio.get_running_loop()):
            return await self.run(fetches, feeds, timeout=timeout)

    # -- plans ---------------------------------------------------------------------------------------------------

    def plan(self, fetches: Any, feeds: Sequence[Any] = ()) -> Plan:
        """The compiled plan for runs with these fetches and these fed tensors; ``.explain()`` prints it.

        Constants are copied to the devices then: CUDA devices of a session that has not been entered are started first,
        which blocks.

        Raises:
            FeedError, FetchError: as in `run`.
            GraphError, PlacementError: as the first such run.
            SessionClosedError: the session is closed.
        """
        if self._closed is not None:
            raise SessionClosedError(self._closed)
        self._start_devices()
        return self._plans.get_nowait(self._calls.new(fetches, feeds).request, self._compile)

    def _compile(self, request: PlanRequest) -> Plan:
        try:
            return compile_plan(
                request,
                self._options,
                devices=self.devices,
                resolve=self.state.lookup,
                costs=self._plans.of(request.graph).learn_costs() if self._is_divided else None,
                homes=self._homes,
            )
        except RecursionError:
            raise GraphError(
                "the graph nests branches and loops too deep to compile; nest them less, or write a recursion as a "
                "while_loop"
            ) from None


def _poison_after_fork() -> None:
    for session in list(_forked):
        session._closed = "this session belongs to the parent process: make a new one after a fork"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_poison_after_fork)
