"""How a CUDA device runs a loop that decides by what it computes: one launch, and one look at how far it came.

A loop that cannot be captured is driven by the host, which waits for the predicate of each iteration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from asyncflow.devices.cuda_launch import Values
from asyncflow.devices.cuda_while import MOST_ITERATIONS, DeviceLoop
from asyncflow.devices.protocol import CoroutineKernel, recording

if TYPE_CHECKING:
    from asyncflow.devices.cuda import CudaDevice
    from asyncflow.devices.cuda_bindings import Bindings
    from asyncflow.devices.cuda_while import Body, Condition
    from asyncflow.devices.protocol import KernelInfo, Span


class WhileLauncher(CoroutineKernel):
    """A loop bound to a CUDA device: calling it with its variables and captures gives a coroutine of its results."""

    __slots__ = ("_device", "_info", "_limit", "_loop", "_n_vars", "_too_many", "_values")

    def __init__(
        self,
        device: CudaDevice,
        bindings: Bindings | None,
        functions: tuple[Condition, Body],
        info: KernelInfo,
        *,
        n_vars: int,
        limit: int | None = None,
        too_many: Callable[[], Exception],
    ) -> None:
        """Nothing is captured before the first call.

        Args:
            device: where it runs.
            bindings: None: the host drives the loop.
            functions: condition and body, over CuPy's arrays and host values; see `DeviceLoop`.
            info: of the node.
            n_vars: how many of the arguments of a call are loop variables.
            limit: most iterations of a call.
            too_many: the error if the predicate still holds after so many.
        """
        stream = device.compute_streams[info.stream]
        most = MOST_ITERATIONS if limit is None else max(1, min(limit, MOST_ITERATIONS))
        self._device = device
        self._info = info
        self._n_vars = n_vars
        self._limit = limit
        self._too_many = too_many
        self._values = Values(device, stream)
        self._loop = DeviceLoop(device.cupy, stream, device.pool, bindings, *functions, info.name, most=most)

    def __call__(self, *args: Any) -> Coroutine[Any, Any, tuple[Any, ...]]:
        """Run the loop.

        Raises (from the coroutine):
            DeviceLostError: an earlier kernel has broken the device.
            MemoryLimitExceeded: a value does not fit.
            BaseException: what `too_many` gives, or what a kernel raises.

        Cancellation: what is launched is done to its end, for no more than `MOST_ITERATIONS` iterations.
        """
        return self._run(args, self._device.recorded())

    async def _run(self, args: Sequence[Any], spans: list[Span] | None) -> tuple[Any, ...]:
        variables, captures = args[: self._n_vars], args[self._n_vars :]
        try:
            return await self._launched(variables, captures, spans)
        except self._device.cuda_error as error:
            raise self._device.cause_of(error)  # noqa: B904 - which has its cause

    async def _launched(
        self, variables: Sequence[Any], captures: Sequence[Any], spans: list[Span] | None
    ) -> tuple[Any, ...]:
        done = 0
        while True:
            iterated = self._in_one_block(self._loop.launch, (variables, captures), spans)
            if iterated is None:
                return await self._driven(done, variables, captures, spans)
            values, count = self._wrapped(iterated.values), self._values.wrapped(iterated.count, self._info.name)
            reached = int(await self._fetched(count, spans))
            done += min(reached, self._loop.most)
            goes_on = reached > self._loop.most
            self._check(done, goes_on)
            if not goes_on:
                return values
            variables = values

    async def _driven(
        self, done: int, variables: Sequence[Any], captures: Sequence[Any], spans: list[Span] | None
    ) -> tuple[Any, ...]:
        condition, body = self._loop.condition, self._loop.body
        while True:
            goes_on = self._in_one_block(lambda *given: condition(*given[0], *given[1]), (variables, captures), spans)
            if not await self._fetched(self._values.wrapped(goes_on, self._info.name), spans):
                return tuple(variables)
            self._check(done, goes_on=True)
            values = self._in_one_block(lambda *given: body(*given[0], *given[1]), (variables, captures), spans)
            variables = self._wrapped(values)
            done += 1

    def _check(self, done: int, goes_on: bool) -> None:
        """Raise if that many iterations, and one more if it goes on, are too many."""
        if self._limit is not None and done + goes_on > self._limit:
            raise self._too_many()

    def _in_one_block(
        self,
        launch: Callable[..., Any],
        given: tuple[Sequence[Any], Sequence[Any]],
        spans: list[Span] | None,
    ) -> Any:
        """``launch(variables, captures)`` on raw values, with the stream active and nothing in between."""
        device, info, values = self._device, self._info, self._values
        device.check()
        device.pool.label = info.name
        values.hold([*given[0], *given[1]])
        with recording(device, spans), values.stream.activate(), device.timed(values.stream, info.name):
            device.launched += info.launches
            return launch(*[[values.raw(value, info.name) for value in part] for part in given])

    def _wrapped(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([self._values.wrapped(value, self._info.name) for value in values])

    async def _fetched(self, value: Any, spans: list[Span] | None) -> Any:
        with recording(self._device, spans):
            found = self._device.fetched(value)
        return await found if isinstance(found, asyncio.Future) else found


__all__ = ["WhileLauncher"]
