"""`Session`: runs graphs on devices; `await session.run(fetches, feeds)`."""

from __future__ import annotations

import asyncio
import numbers
import os
import threading
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

from asyncflow.checkpoint.checkpoints import Checkpoints
from asyncflow.checkpoint.saver import Saver, as_path
from asyncflow.compiler.passes import Context
from asyncflow.compiler.pipeline import compile_plan
from asyncflow.devices.machine.blas import BlasLease, acquire_blas_threads
from asyncflow.devices.machine.heap import process_heap
from asyncflow.devices.registry import open_devices
from asyncflow.entered import Entered
from asyncflow.errors import GraphError, SessionClosedError, brief
from asyncflow.graph.building.feeds import Feeds, as_feeds
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Tensor
from asyncflow.pickling import NotPickled
from asyncflow.runtime.calls.calls import Call, CallCache, Prepared, label_of
from asyncflow.runtime.calls.options import as_seconds
from asyncflow.runtime.calls.plans import PlanCache
from asyncflow.runtime.calls.session_options import SessionOptions, taking, with_arguments
from asyncflow.runtime.gates.admission import ExpectedRun, SessionLoad
from asyncflow.runtime.gates.runs import Runs
from asyncflow.runtime.session.checkpointed import CheckpointedSession
from asyncflow.runtime.session.record import SessionFacts, recorded
from asyncflow.runtime.session.session_statistics import SessionStatistics, device_memory
from asyncflow.runtime.session.state_access import StateAccess
from asyncflow.runtime.session.thread_call import ThreadCall
from asyncflow.runtime.watch.observer import Observers, RunObserver, check_observer
from asyncflow.runtime.watch.trace import Trace
from asyncflow.state.containers import StateStore, entered_stores
from asyncflow.state.variables.held import holder_of
from asyncflow.streams.holding import note_ask
from asyncflow.streams.loop import clock_of

if TYPE_CHECKING:
    import concurrent.futures

    from asyncflow.compiler.plan import Plan
    from asyncflow.compiler.program.kernels.kernels import Resolve
    from asyncflow.compiler.program.request import PlanRequest
    from asyncflow.devices.protocol import Device
    from asyncflow.values import Nest, Value

_THREADS_END_S = 5.0
"""Seconds that idle threads may take to end."""

_INTERNAL = ("expect_run", "run_again", "run_call", "run_function")
"""Methods that other rooms call."""

_current: Entered[Session] = Entered("asyncflow_session")
_forked: weakref.WeakSet[Session] = weakref.WeakSet()


def current_session() -> Session | None:
    """The session whose ``async with`` block this code runs in, or None."""
    # The list may still have sessions that another task has closed.
    return next((session for session in reversed(_current.all()) if session._runs.in_flight.closed is None), None)


class Session(CheckpointedSession, NotPickled):
    """Runs graphs on devices. Any number of runs may be in flight; each is awaited on the session's event loop.

    A session binds to the event loop that first uses it. Variables without a container belong to one session.

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

    __doc__ = with_arguments(__doc__, SessionOptions)  # for `help`; editors read the signature from `taking`
    _not_copied = "it has devices, threads and variables of its own; make another session"
    _instead = (
        "it has devices, threads and an event loop of this process; make a session in the other one, and send values "
        "there as NumPy arrays"
    )

    @taking(SessionOptions)
    def __init__(self, options: SessionOptions) -> None:
        self.graph = options.graph
        self.devices: tuple[Device, ...] = open_devices(
            options.devices,
            options.memory_limit,
            options.compute_streams,
            host_memory_limit=options.host_memory_limit,
            spill_directory=options.spill_directory,
        )
        if options.device_while:
            for device in self.devices:
                device.check_loops()
        self.state = StateStore()
        self._options = options
        self._plans = PlanCache(options.plans)
        # A variable stays on the device whose memory it is in, whatever later plans run.
        has_memories = any(device.capabilities.own_memory for device in self.devices)
        homes: dict[Hashable, str] | None = {} if has_memories else None
        self._placed: dict[str, str] = {}
        # Without a limit, and with one device and stream, no choice depends on node costs.
        is_limited = any(device.memory.limit is not None for device in self.devices)
        has_choices = is_limited or len(self.devices) > 1 or options.compute_streams > 1
        # Not bound to the session: runs must not keep a dropped session alive.
        self._compile = partial(
            _compile,
            context=Context(
                devices=self.devices,
                options=options.for_plans(),
                resolve=self.state.lookup,
                homes=homes,
                placed=self._placed,
            ),
            measured=self._plans if has_choices else None,
        )
        self._calls = CallCache(options.graph, self._plans, regions=options.regions)
        self._runs = Runs(
            {device.name: device for device in self.devices}, self._plans, self._compile, self.state, options
        )
        access = StateAccess(self._runs, {device.name: device for device in self.devices}, homes)
        self._checkpoints = Checkpoints(options.graph, self.state, access)
        self._swapping = asyncio.Lock()
        self._restores_from = options.restore
        """Checkpoint that variables begin with; None once they have."""
        self._saver = options.restore if isinstance(options.restore, Saver) else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._blas: BlasLease | None = None
        self._has_started = False
        _forked.add(self)

    # -- life cycle ----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        restores_from, self._restores_from = self._restores_from, None
        try:
            if self._runs.in_flight.closed is None:
                self._has_started = True
                for device in self.devices:
                    if device.asynchronous is not None:
                        await device.asynchronous.open()
            self._bind()
            if isinstance(restores_from, Saver):
                await restores_from.start(self._checkpoints)
            elif restores_from is not None:
                await self._checkpoints.start(as_path(restores_from))
        except BaseException:
            if self._loop is None or restores_from is not None:  # else the session stays open, as it was entered before
                await self.aclose()
            raise
        for session in _current.all():
            if session._runs.in_flight.closed is not None:
                _current.leave(session)  # closed by another task
                entered_stores.leave(session.state)
        _current.enter(self)
        entered_stores.enter(self.state)
        return self

    async def __aexit__(self, kind: object, *exc: object) -> None:
        _current.leave(self)
        entered_stores.leave(self.state)
        # Once the block has failed, no caller reads the results of runs in flight.
        await (self.aclose() if kind is None else self.aclose(grace_s=0))

    def __enter__(self) -> NoReturn:
        raise TypeError("a session opens and closes on an event loop: use `async with` in place of `with`")

    def __exit__(self, *exc: object) -> None:
        """Exit method, never called; without it, Python would not call `__enter__` to explain the error."""

    def __dir__(self) -> list[str]:
        """Names for completion: methods that other rooms of the library call are left out."""
        return [name for name in super().__dir__() if name not in _INTERNAL]

    def _bind(self) -> asyncio.AbstractEventLoop:
        """Return the event loop, after a check that it is the running one and that the session is open."""
        if self._runs.in_flight.closed is not None:
            raise SessionClosedError(self._runs.in_flight.closed)
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return loop
        if self._loop is not None:
            raise RuntimeError(
                "this session is bound to a different event loop; make one session per loop, or use "
                "session.run_threadsafe(...) from another thread"
            )
        if self._restores_from is not None:
            raise RuntimeError("a session with restore= is entered with `async with` first: it reads its values there")
        for device in self.devices:
            device.check_event_loop(loop)
        self._start_devices()
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._runs.bind(loop)
        self._blas = acquire_blas_threads(self._options.threads)
        process_heap.enter()
        return loop

    def _start_devices(self) -> None:
        self._has_started = True
        for device in self.devices:
            if device.asynchronous is not None:
                device.asynchronous.start()

    def is_bound_here(self) -> bool:
        """Return True if the session is open and bound to the running event loop."""
        return self._runs.in_flight.closed is None and self._loop is asyncio.get_running_loop()

    async def aclose(self, grace_s: float = 5.0) -> None:
        """Let runs in flight end for up to `grace_s` seconds, stop the others, and free everything. Idempotent.

        A stream whose consumer is not waiting for its next item is stopped at once, and so are runs that wait for their
        turn (`max_runs`). A coroutine function that ignores its cancellation is left behind after 5 s, and named.

        Raises:
            TypeError, ValueError: `grace_s` is no number of seconds, 0 or more; the session stays open.
            RuntimeError: this is not the event loop of the session, which is still open.
        """
        grace_s = as_seconds(grace_s, "grace_s")
        if self._runs.in_flight.closed is not None:
            return
        if self._loop not in (None, asyncio.get_running_loop()) and not self._loop.is_closed():
            raise RuntimeError(
                "this session is bound to a different event loop, which is still open: await its aclose() there, or "
                "from here asyncio.wrap_future(asyncio.run_coroutine_threadsafe(session.aclose(), that_loop))"
            )
        self._runs.refuse("the session is closed; make a new one")
        # Last in, first out: runs end before the resources they use. Each step is done even if an earlier step fails.
        async with AsyncExitStack() as closing:
            for device in self.devices:
                closing.push_async_callback(device.aclose, _THREADS_END_S)
            closing.push_async_callback(self._runs.copies.aclose, _THREADS_END_S)
            closing.callback(self._release)  # before the devices close, so that they can return all their memory
            closing.push_async_callback(self._leave_containers)
            closing.push_async_callback(self.state.aclose)
            if self._saver is not None:
                # The saver may still have to write values of devices.
                closing.push_async_callback(self._saver.stop, self._checkpoints)
            closing.push_async_callback(self._plans.aclose)
            closing.push_async_callback(self._runs.stop)
            await self._runs.end(grace_s)

    async def drain(self, grace_s: float = 5.0) -> None:
        """Stop starting runs, and return when all requested ones have ended; `aclose` comes after it.

        Runs in flight, queued runs (`max_runs`), and streams have `grace_s` seconds to end; then they are stopped with
        `SessionClosedError`, which new ones get from now on, too. A run requested inside a run of the session is part
        of that run, and starts. All else still works: `save`, `restore`, `statistics`.

        Args:
            grace_s: how long to wait for runs; 0 to stop them at once.

        Raises:
            TypeError, ValueError: `grace_s` is no number of seconds, 0 or more; the session is not drained.
            RuntimeError: this is not the event loop of the session.

        Cancellation: runs go on, and no new ones start.
        """
        grace_s = as_seconds(grace_s, "grace_s")
        self._bind()
        await self._runs.drain("the session is being drained and starts no more runs; ask another", grace_s)

    async def _leave_containers(self) -> None:
        """Bring what containers' variables have in the memory of the session's devices to the host."""
        holders = [holder for device in self.devices if (holder := holder_of(device.xp)) is not None]
        if self._loop is None or not holders:
            return
        try:
            async with asyncio.timeout(_THREADS_END_S):
                await self.state.leave(holders)
        except TimeoutError:
            pass  # values stay on the devices, which stay alive; readers wait there

    def _release(self) -> None:
        self._plans.clear()
        self._runs.release()
        self.state.clear()
        if self._blas is not None:
            self._blas.release()
            self._blas = None
            process_heap.leave()

    def __del__(self) -> None:
        runs: Runs | None = getattr(self, "_runs", None)
        if runs is not None and runs.in_flight.closed is None and self._has_started:
            if self._loop is not None:
                warnings.warn(f"{self!r} was dropped without close; use `async with`", ResourceWarning, stacklevel=2)
            # Nothing here may wait: the collector may run this on the thread that the wait would be for.
            for device in self.devices:
                for stream in device.streams:
                    stream.stop()
            runs.copies.stop()
            self._release()

    def __repr__(self) -> str:
        return f"<Session on {', '.join(device.name for device in self.devices)}>"

    def statistics(self) -> SessionStatistics:
        """A snapshot."""
        memory = {device.name: device_memory(device) for device in self.devices}
        used = {name: each.held for name, each in memory.items()}
        runs = self._runs
        running = len(runs.in_flight.runs)
        completed = runs.in_flight.begun - running
        batches = runs.batches.statistics() if runs.batches is not None else {}
        limits = runs.limited.statistics() if runs.limited is not None else {}
        queued, refused, late, nbytes, aside = (0,) * 5 if runs.admission is None else runs.admission.counts()
        return SessionStatistics(
            running, len(self._plans), completed, used, memory, queued, refused, batches, late, nbytes, aside, limits
        )

    def load(self) -> SessionLoad:
        """Return how busy the session is; costs a few microseconds, so a server may ask for each request.

        Raises:
            RuntimeError: there is no event loop.
        """
        loop, admission = self._bind(), self._runs.admission
        return SessionLoad(len(self._runs.in_flight.runs)) if admission is None else admission.load(loop.time())

    def observe(self, observer: RunObserver) -> Callable[[], None]:
        """Tell an observer of every run and batch from now on, until the returned function is called.

        It is told on the event loop, and may not wait. An exception of the observer is logged once, and changes no run.

        Raises:
            TypeError: it lacks a method of a `RunObserver`.
            RuntimeError: there is no event loop.
        """
        check_observer(observer)
        loop = self._bind()
        in_flight = self._runs.in_flight
        if in_flight.observers is None:
            in_flight.observers = Observers(clock_of(loop))
        return in_flight.observers.add(observer)

    def check_batches(self, share: float) -> None:
        """Compute a share of the calls of batched functions member by member as well, and compare the results.

        If a member by itself gives another result, beyond rounding, a warning of the logger ``asyncflow.runtime`` names
        the result and the call. Results must not depend on the members that share a call. So such a difference is a
        fault, of a function of yours that takes rows, or of ours.

        Args:
            share: of the calls, from 0 (none, as in a new session) to 1 (all); they are chosen at random.

        Raises:
            ValueError: `share` is no such number.
            RuntimeError: there is no event loop.
        """
        given: object = share
        if isinstance(given, bool) or not isinstance(given, numbers.Real) or not 0 <= float(given) <= 1:
            raise ValueError(f"check_batches: the share is a number from 0 to 1; got {share!r}")
        self._bind()
        assert self._runs.batches is not None
        self._runs.batches.checked_share = share

    # -- running -------------------------------------------------------------------------------------------------

    async def run(
        self,
        fetches: Nest,
        feeds: Feeds | None = None,
        *,
        timeout: float | None = None,
        trace: Trace | str | Path | None = None,
        allow_dead: bool = False,
        atomic: bool = False,
        priority: int = 0,
        record: str | Path | None = None,
    ) -> Nest:
        """Run the nodes that `fetches` need, and return the values in the same nest.

        Args:
            fetches: any nest of tensors, nodes (run, give None), variables (read after everything else) and names, and
                of these in `on_device(...)`.
            feeds: values for placeholders, or for any other tensor outside branches and loops. Copied, above 1 MiB on a
                thread, during which the array is not to be written to; taken as they are if they are read-only and own
                their memory, or look at `bytes`. Strict about dtype and shape. Arrays of other libraries are read by
                DLPack. An array on a card is copied there, in the order of its library's current stream. If it is
                needed on the host, it is read on a thread.
            timeout: seconds until `DeadlineExceeded`.
            trace: a `Trace` to record into, or a path to write the timeline to (``.json``, ``.json.gz``,
                ``.html``, and with matplotlib ``.png``, ``.svg``).
            allow_dead: give None for a fetch on a branch not taken, instead of an error.
            atomic: make the run's reads and writes of variables one step for every other run of the session. It starts
                when runs in flight that touch the same variables have ended, and later ones wait for it. It undoes
                nothing: a run that fails or is cancelled leaves its writes.
            priority: order among waiting runs (`max_runs`; for places in batches and pools): the lowest number goes
                first; of equal ones, the run whose `timeout` passes first; then the run that came first. Each waiting
                number gets at least an eighth (of nine or more, an equal part).
            record: a path for a record that `replay` needs to repeat the run: the order in which its nodes were taken,
                what other runs wrote to its variables, and all else. It is written however the run ends once it has
                begun. Not together with `trace`. Such a run is interpreted, and firings that touch variables stay on
                the event loop.

        Raises:
            FeedError, FetchError: before anything runs (or, for a dead fetch, after).
            OverloadedError: before anything runs, of a session with `max_runs`: too many runs wait, or the run would
                not end within `timeout` after the runs before it. Its `retry_after_s` says when to ask again.
            SessionClosedError: the session is closed, or `drain` was called.
            KernelError: the first node that failed; everything else has been stopped.
            DeadlineExceeded: after `timeout`; before anything runs, if its turn comes too late for it to end in time.

        Cancellation: the run stops, kernels in flight end, then CancelledError is raised; the session stays usable.
        """
        self._bind()
        call, values = self._calls.of_run(fetches, feeds)
        if record is not None:
            if not isinstance(record, str | Path):
                raise TypeError(f"record= is a path to write; got {record!r}")
            if trace is not None:
                raise ValueError("a run has a record= or a trace=, not both: run it once for each")
            run = partial(
                self._runs.call, call, values, timeout, allow_dead=allow_dead, atomic=atomic, priority=priority
            )
            work = recorded(call, values, Path(record), run, self._facts())
        else:
            work = self._runs.call(call, values, timeout, trace, allow_dead, atomic, priority)
        return await (
            work if (observers := self._runs.in_flight.observers) is None else observers.watch(call.label, work)
        )

    def _facts(self) -> SessionFacts:
        names = [device.name for device in self.devices]
        return SessionFacts(names, self._options, self._runs.in_flight.random_seed, self.state.lookup)

    async def run_again(
        self,
        fetches: Nest,
        feeds: Feeds,
        trace: Trace,
        number: int,
        random_seed: int,
        placement: Mapping[str, str],
    ) -> list[Value]:
        """Do what the run of that number did in a session with that seed, and return a list of the fetched values.

        Nodes are on the devices that `placement` has for their names.
        """
        in_flight = self._runs.in_flight
        # Random numbers depend on the run's number: give the next run the number of the recorded run.
        in_flight.begun, in_flight.random_seed = number - 1, random_seed
        self._placed.update(placement)
        fetched: list[Value] = await self.run(fetches, feeds, trace=trace, allow_dead=True)
        return fetched

    def prepare(self, fetches: Nest, feeds: Sequence[Value] = (), *, capture: bool = False) -> Prepared:
        """A run that only lacks values, for serving: ``f = session.prepare(y, [x])``, then ``await f(value)``.

        Args:
            fetches: as in `run`.
            feeds: the tensors, or their names, that each call gives values for, in that order.
            capture: capture CUDA graphs at the first call with values of a kind, rather than at the third, of regions
                that take fed values alone. The session needs ``cuda_graphs=True``. `warm_up` does so before any call.

        Raises:
            FeedError, FetchError: as in `run`.
            ValueError: the session makes no CUDA graphs.
        """
        if capture and not self._options.cuda_graphs:
            raise ValueError(
                "prepare: capture=True captures CUDA graphs, and this session makes none; open it with cuda_graphs=True"
            )
        return Prepared(self.run_call, self._calls.new(fetches, feeds), self._captured if capture else None)

    async def _captured(self, call: Call, values: Sequence[Value]) -> None:
        self._bind()
        await self._runs.capture(call, values)

    def run_call(
        self,
        call: Call,
        values: Sequence[Value],
        timeout: float | None = None,
        trace: Trace | str | Path | None = None,
        allow_dead: bool = False,
        atomic: bool = False,
        priority: int = 0,
        is_wanted: Callable[[], bool] | None = None,
    ) -> Coroutine[object, object, Nest]:
        """Start a `Call`, for `run`, a `Prepared` and a `Function`."""
        self._bind()
        work = self._runs.call(call, values, timeout, trace, allow_dead, atomic, priority, is_wanted)
        observers = self._runs.in_flight.observers
        return work if observers is None else observers.watch(call.label, work)

    def expect_run(self, *, timeout: float | None = None, priority: int = 0) -> ExpectedRun:
        """Keep a place for a run that a request will ask for; inside ``with``, the first run of this context takes it.

        Args:
            timeout: as the run will have it.
            priority: as the run will have it.

        Raises:
            OverloadedError, SessionClosedError: the run would be refused.
        """
        return self._runs.expect(timeout, priority)

    def run_function(
        self, graph: Graph, outputs: Nest, feeds: Mapping[Tensor, Value], *, atomic: bool = False
    ) -> Coroutine[object, object, Nest]:
        """Run a traced `@af.function`: its outputs and all its effects."""
        return self.run_call(self._calls.of_function(graph, outputs, feeds), tuple(feeds.values()), atomic=atomic)

    def stream(
        self,
        fetches: Nest,
        feeds: Feeds | None = None,
        *,
        timeout: float | None = None,
        trace: Trace | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[Nest, None]:
        """Iterate over values inside a loop: ``async for value in session.stream(x)``, one item an iteration.

        Items come in the order of the iterations. The loop runs at most `parallel_iterations` ahead of the consumer.
        Leaving the ``async for`` early stops the run: at once inside ``async with contextlib.aclosing(...)``, else when
        the iterator is dropped.

        Args:
            fetches: any nest of tensors of one loop body (or of a branch in it).
            feeds: as in `run`.
            timeout: seconds for the whole run.
            trace: a `Trace` to record into.
            priority: as in `run`.

        Raises:
            FetchError: the tensors are not inside one loop body.
            OverloadedError: as in `run`.
            KernelError, DeadlineExceeded: as in `run`. Items of iterations that ran ahead of the consumer are then
                lost; with ``parallel_iterations=1`` there are none, and all items before the failure have come.
        """

        def ask() -> tuple[Call, Sequence[Value]]:
            self._bind()
            fed = as_feeds(feeds)
            return self._calls.new(fetches, tuple(fed), streams=True), tuple(fed.values())

        items = self._runs.stream(ask, timeout, trace, priority)
        observers = self._runs.in_flight.observers
        return items if observers is None else observers.watch_stream(label_of(fetches), items)

    def run_threadsafe(
        self, fetches: Nest, feeds: Feeds | None = None, *, timeout: float | None = None, priority: int = 0
    ) -> concurrent.futures.Future[Nest]:
        """`run` from another thread; the session's event loop must be running in its own.

        An op's own function may not wait for a run that needs a thread of the session while it has one itself: the run
        fails, and says so. A coroutine function may await `run`.

        Raises:
            SessionClosedError: the session, or its event loop, is closed.
            RuntimeError: the session has no event loop yet, or this is its thread, where waiting would never end.
        """
        if self._runs.in_flight.closed is not None:
            raise SessionClosedError(self._runs.in_flight.closed)
        if self._loop is None:
            raise RuntimeError("the session has no event loop yet; enter it with `async with` on the loop's thread")
        if self._loop.is_closed():
            raise SessionClosedError("the session's event loop is closed; make a new session on a new loop")
        if self._thread_id == threading.get_ident():
            raise RuntimeError("this is the thread of the session's event loop; use `await session.run(...)` here")
        note_ask()

        async def work(is_wanted: Callable[[], bool]) -> Nest:
            self._bind()  # check again, on the loop: the session may have been closed since the call
            call, values = self._calls.of_run(fetches, feeds)
            return await self.run_call(call, values, timeout, priority=priority, is_wanted=is_wanted)

        thread_call = ThreadCall(self._loop, work)
        self._loop.call_soon_threadsafe(thread_call.start)
        return thread_call.future

    async def warm_up(self, fetches: Nest, feeds: Feeds | None = None, *, sizes: Sequence[int] = (1,)) -> int:
        """Compile and run once, so that the first request is as fast as later ones.

        Compiles the plan, and the plans of batched functions and pooled loops in it. If a run only computes, it is then
        run and its results are dropped, which also measures its kernels. State stays as it is: a plan that writes, or
        calls functions of yours that are not said to be pure, is compiled only. Random numbers go on as if nothing had
        been run, unless others run meanwhile. With `cuda_graphs` there are three runs for each one of `sizes`, which
        captures CUDA graphs; of a plan that writes, regions that take fed values alone are captured without a run.

        Args:
            fetches: as in `run`.
            feeds: as in `run`; values like the expected ones.
            sizes: numbers of runs made at a time, so that batches and pools of these sizes have been computed.

        Returns:
            How many runs were made; 0 if the plan was compiled only.

        Raises:
            ValueError: `sizes` is empty, or has something else than positive integers, or more than `max_runs`.
            FeedError, FetchError, KernelError: as in `run`.
        """
        self._bind()
        limit = self._options.max_runs
        most = limit if isinstance(limit, int) else None
        given: object = sizes  # callers may pass a wrong type
        counts = given if isinstance(given, Sequence) else ()
        if not counts or any(type(n) is not int or n < 1 or (most is not None and n > most) for n in counts):
            upto = "" if most is None else f" up to max_runs={most}"
            raise ValueError(f"warm_up: sizes has positive integers{upto}, how many run at a time; got {brief(sizes)}")
        return await self._runs.warm_up(*self._calls.of_run(fetches, feeds), sizes)

    # -- plans ---------------------------------------------------------------------------------------------------

    def plan(self, fetches: Nest, feeds: Sequence[Value] = ()) -> Plan:
        """Return the compiled plan for runs with these fetches and these fed tensors; ``.explain()`` prints it.

        Constants are copied to the devices then: CUDA devices of a session that has not been entered are started first,
        which blocks.

        Raises:
            FeedError, FetchError: as in `run`.
            GraphError, PlacementError: as the first such run.
            SessionClosedError: the session is closed.
        """
        if self._runs.in_flight.closed is not None:
            raise SessionClosedError(self._runs.in_flight.closed)
        self._start_devices()
        return self._plans.get_nowait(self._calls.new(fetches, feeds).request, self._compile)


def _compile(
    request: PlanRequest, *, context: Context, measured: PlanCache | None, resolve: Resolve | None = None
) -> Plan:
    """A new plan; `measured` says what nodes cost, `resolve` what the states are, if the session does not."""
    if resolve is not None:
        context = replace(context, resolve=resolve)
    if measured is not None:
        context = replace(context, costs=measured.of(request.graph).learn_costs())
    try:
        return compile_plan(request, context)
    except RecursionError:
        raise GraphError(
            "the graph nests branches and loops too deep to compile; nest them less, or write a recursion as a "
            "while_loop"
        ) from None


# A forked child has no threads, so a run there would wait for ever.
def _poison_after_fork() -> None:
    for session in list(_forked):
        session._runs.in_flight.closed = "this session belongs to the parent process: make a new one after a fork"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_poison_after_fork)
