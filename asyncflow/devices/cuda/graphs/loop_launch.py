"""A CUDA device's run of a loop that decides by device values: one launch, and one look at its progress.

If a loop cannot be captured, the host drives it, and waits for the predicate of each iteration, and of each branch and
loop inside. The host also drives the rest of a loop whose launch gave an iteration up. That happens if an inner loop
passes the limit, an error which the host then reaches, or if inner loops go on for too long.

Nothing stops a launch, so a deadline, a cancellation and the session's end wait for it. How many iterations a launch
may make therefore follows how long launches take.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from asyncflow.devices.cuda.arguments import Values
from asyncflow.devices.cuda.graphs.conditional import (
    ENDED,
    FULL,
    FULL_LOG,
    INSIDE,
    MOST_ITERATIONS,
    STOPPED,
    TOO_LONG,
    Limits,
)
from asyncflow.devices.cuda.graphs.host_loop import HostDriver
from asyncflow.devices.cuda.graphs.logs import GrowingLog, growing_logs
from asyncflow.devices.cuda.graphs.loop import DeviceLoop, Iterated
from asyncflow.devices.decisions import Loop, LoopCode
from asyncflow.devices.protocol import CoroutineKernel, KernelInfo, Placed, Span, recording

if TYPE_CHECKING:
    from asyncflow.devices.cuda.device import CudaDevice
    from asyncflow.streams.cuda.bindings import Bindings
    from asyncflow.values import Value


FIRST_ITERATIONS = 1 << 10
"""Of the first launch."""

LEAST_ITERATIONS = 1 << 6
"""Of any: a launch may have taken long because of what other runs had given the card before."""

_STEP = 4
"""Factor by which launches become longer, or shorter."""

SHORT_S, LONG_S = 0.05, 0.2
"""Seconds after which asking the host costs nothing, and seconds after which a waiting user would notice."""


class Patience:
    """The number of iterations that a loop's launches may make, learnt from their durations.

    Invariant: `_least` <= `most` <= `MOST_ITERATIONS`; with fewer than `_least` an iteration was given up.
    """

    __slots__ = ("_least", "most")

    def __init__(self) -> None:
        self.most = FIRST_ITERATIONS
        self._least = min(LEAST_ITERATIONS, FIRST_ITERATIONS)

    def learn(self, outcome: int, took_s: float, *, is_cut: bool = False) -> bool:
        """Note the outcome of a launch; return True if a further launch may come further.

        Args:
            outcome: see `conditional.py`.
            took_s: how long it took.
            is_cut: it was to make fewer iterations, for want of room in a log.
        """
        if outcome == TOO_LONG:
            grown = min(self.most * _STEP, MOST_ITERATIONS)
            is_longer, self.most, self._least = grown > self.most, grown, grown
            return is_longer
        if took_s > LONG_S:
            self.most = max(self.most // _STEP, self._least)
        elif outcome == STOPPED and took_s < SHORT_S and not is_cut:
            self.most = min(self.most * _STEP, MOST_ITERATIONS)
        return outcome == STOPPED


class WhileLauncher(CoroutineKernel):
    """A loop bound to a CUDA device: calling it with its variables and captures gives a coroutine of its results."""

    __slots__ = ("_code", "_device", "_info", "_loop", "_patience", "_usual", "_values")

    def __init__(self, device: CudaDevice, bindings: Bindings | None, loop: LoopCode, info: KernelInfo) -> None:
        """Store the arguments; nothing is captured before the first call.

        Args:
            device: where it runs.
            bindings: None: the host drives the loop.
            loop, info: see `AsynchronousDevice.bind_loop` and `DeviceLoop`.
        """
        stream = device.compute_streams[info.stream]
        self._device = device
        self._info = info
        self._code = loop
        self._values = Values(device, stream)
        self._loop = DeviceLoop(device.cupy, stream, device.pool, bindings, loop.condition, loop.body, info.name)
        self._patience = Patience()
        self._usual: Sequence[int] = ()  # entries of the logs in the last run

    def __call__(self, *args: Value) -> Coroutine[object, object, tuple[Placed, ...]]:
        """Run the loop.

        Raises (from the coroutine):
            DeviceLostError: an earlier kernel has broken the device.
            MemoryLimitExceeded: a value does not fit.
            TooManyIterations: the predicate of a loop still holds after as many as the limit.
            BaseException: what a kernel raises.

        Cancellation: launched work is done to its end, which usually takes some tenths of a second.
        """
        return self._run(args, self._device.recorded())

    async def _run(self, args: tuple[Value, ...], spans: list[Span] | None) -> tuple[Placed, ...]:
        try:
            return await self._launched(args, spans)
        except RuntimeError as error:
            raise self._device.cause_of(error)  # noqa: B904 - which has its cause

    async def _launched(self, args: tuple[Value, ...], spans: list[Span] | None) -> tuple[Placed, ...]:
        code = self._code
        with recording(self._device, spans):
            args = self._values.brought(args, self._info.code.vectors)
        host = HostDriver(self._device, self._values, self._info, args, spans, code.limit)
        with self._values.stream:
            raw = [self._values.raw(value, self._info.name) for value in args]
        variables, captures = host.in_one_block(self._divided, raw)
        logs = growing_logs(variables)
        counts = [0] * len(logs)
        done, outcome = 0, STOPPED
        while outcome != ENDED:
            most, iterated = host.in_one_block(self._launch, variables, captures, done)
            if iterated is None:
                break
            began = monotonic()  # excludes time for capture and compilation
            state = (await host.fetched(iterated.state)).tolist()
            count, outcome = state[:2]
            if outcome == FULL:
                host.in_one_block(self._make_room, variables, logs[state[FULL_LOG]].entries + 1)
                continue
            is_worth_another = self._patience.learn(outcome, monotonic() - began, is_cut=most < self._patience.most)
            if outcome in (ENDED, STOPPED):
                done += count
                counts = list(map(max, counts, state[FULL_LOG + 1 :]))
                code.identity.check(done + (outcome == STOPPED), code.limit)
                variables = list(iterated.values)
            elif not is_worth_another:
                break
        if outcome != ENDED:
            for log, count in zip(logs, counts, strict=True):
                log.count = count
            rest = Loop(code.condition, code.body, variables, captures, code.identity)
            variables = list(await host.looped(rest, done))
            counts = [log.count for log in logs]
        # A run with as many iterations then finds enough room, and takes one launch.
        self._usual = [1 << max(count - 1, 0).bit_length() for count in counts]
        return tuple([self._values.wrapped(value, self._info.name) for value in variables])

    def _divided(self, args: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """Return the variables, with new logs, and the captures."""
        code, device = self._code, self._device
        given, usual = iter(args), iter(self._usual)

        def variable(place: int) -> Value:
            spec = code.logs.get(place)
            return next(given) if spec is None else GrowingLog(device.cupy, device.xp.launches, spec, usual)

        variables = [variable(place) for place in range(code.n_vars)]
        for log in growing_logs(variables):
            log.reserve(1)
        return variables, list(given)

    def _make_room(self, variables: Sequence[Value], entries: int) -> None:
        """Make room in all logs of loops inside, as the logs of one loop have equally many entries."""
        for log in growing_logs(variables):
            if log not in variables:
                log.reserve(entries)

    def _launch(self, variables: Sequence[Value], captures: Sequence[Value], done: int) -> tuple[int, Iterated | None]:
        """Start the loop or go on; return the most iterations that the launch may make, and its results."""
        most = self._patience.most
        for log in variables:
            if isinstance(log, GrowingLog):
                log.reserve(done + 1)
                most = min(most, log.entries - done)
        # Fewer iterations for lack of room do not limit the inner loops.
        limits = Limits(most, INSIDE * self._patience.most, self._code.limit)
        return most, self._loop.launch(variables, captures, limits)
