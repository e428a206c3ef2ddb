"""Launch of kernels on a CUDA device: on a compute stream, after which the result counts as present.

==========================  =================================================================================
any other kernel            called with CuPy arrays while its stream is the current one; nothing waits
counters and predicates     kernels of rank-0 integers and booleans whose inputs are on the host stay there
kernels of the host         (data-dependent shapes, printing, the user's functions) inputs are copied to the
                            host and waited for, but for staying values; outputs are copied in
a region                    one call enqueues all its kernels; see `CudaRegionLauncher`
==========================  =================================================================================
"""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.devices.captures import GraphCache
from asyncflow.devices.cuda.arguments import Values
from asyncflow.devices.cuda.graphs.graph import CapturedRegion, RegionGraph
from asyncflow.devices.cuda.progress import MOST_AHEAD
from asyncflow.devices.cuda.values import CudaArray, CudaOpaque
from asyncflow.devices.protocol import HostKernel, Into, KernelInfo, Placed, Span, recording
from asyncflow.devices.values import DeviceValue, as_scalar, is_plain, stays_on_host

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Generator, Sequence

    from asyncflow.devices.cuda.device import CudaDevice
    from asyncflow.devices.cuda.transfers.buffers import BuffersByVariable
    from asyncflow.streams.cuda.cupy_types import CupyArray
    from asyncflow.values import Array, Kernel, Value

STEP_LAUNCHES = 32
"""Number of launches after which a region stops for its driver, if it stops after each step."""

LONG_ELEMENTS = 1 << 15
"""A kernel of the host on more elements gets the device's host thread, and does not hold up the event loop."""


class CudaLauncher:
    """A kernel bound to a CUDA device: calling it launches it."""

    __slots__ = ("_device", "_info", "_kernel", "_values")

    def __init__(self, device: CudaDevice, kernel: Kernel, info: KernelInfo) -> None:
        self._device = device
        self._kernel = kernel
        self._info = info
        # State is valid in the order of the first stream, for any later user.
        self._values = Values(device, device.compute_streams[0 if info.keeps_arrays else info.stream])

    def __call__(self, *args: Value) -> Placed:
        """Launch the kernel on device values and host values; its outputs, likewise.

        Raises:
            DeviceLostError: an earlier kernel has broken the device.
            MemoryLimitExceeded: the outputs do not fit.
            BaseException: what the kernel raises, as it is.
        """
        device, info, values = self._device, self._info, self._values
        if info.on_host is not None and not any(type(value) is CudaArray for value in args):
            with device.timed_on_host(info.name):
                return info.on_host(*args)
        device.check()
        device.pool.label = info.name
        first = 1 if info.conduct.needs_context else 0
        raw = list(args)
        values.hold(args)
        # A kernel that only moves references need not hold the value; its user does.
        if not info.moves_references and (inside := values.inside(args)):
            values.stream.hold(*inside)
        try:
            with values.stream:
                for index in range(first, len(args)):
                    convert = values.raw if index - first in info.host_inputs else values.uploaded
                    raw[index] = convert(args[index], info.name)
                device.launched += 1
                values.stream.work.given += 1
                device.memory.requests.kernels += info.kernels
                with device.timed(values.stream, info.name):
                    result = self._kernel(*raw)
                if info.single:
                    return values.placed(0, result, info)
                return tuple([values.placed(place, output, info) for place, output in enumerate(result)])
        except RuntimeError as error:
            raise device.cause_of(error)  # noqa: B904 - which has its cause


@dataclass(slots=True, eq=False, repr=False)
class CudaHostLauncher(HostKernel):
    """A kernel that a CUDA device leaves to the host: calling it gives a coroutine."""

    _device: CudaDevice
    _kernel: Kernel
    _info: KernelInfo
    staying: Collection[int] = ()
    offers: Sequence[Into | None] = ()

    def __call__(self, *args: Value) -> Coroutine[object, object, Placed]:
        """Copy the inputs to the host, run the kernel there, and copy its outputs in.

        Raises (from the coroutine):
            DeviceLostError: an earlier kernel has broken the device.
            MemoryLimitExceeded: the outputs do not fit.
            BaseException: what the kernel raises, as it is.
        """
        return self._call_on_host(args, self._device.recorded())

    async def _call_on_host(self, args: Sequence[Value], spans: list[Span] | None) -> Placed:
        device, info = self._device, self._info
        with recording(device, spans):
            waiting = [value if k in info.stays else device.fetched(value) for k, value in enumerate(args)]
        values = await _all(waiting)
        result = await self._computed(values)
        given = {id(value): argument for value, argument in zip(values, args, strict=True)}
        with recording(device, spans):
            outputs = [
                output if index in self.staying else self._placed(given.get(id(output)), output, index)
                for index, output in enumerate([result] if info.single else result)
            ]
        outputs = await _all(outputs)
        return outputs[0] if info.single else tuple(outputs)

    async def _computed(self, values: Sequence[Value]) -> Placed:
        may_be_long = self._info.uses_state or sum(getattr(value, "size", 1) for value in values) > LONG_ELEMENTS
        if may_be_long and not is_coroutine_function(self._kernel):
            result = await self._device.in_host_thread(self._kernel, *values)
        else:
            result = self._kernel(*values, leaving=self.staying) if self._info.stays else self._kernel(*values)
        return await result if inspect.isawaitable(result) else result

    def _placed(self, argument: Placed, output: Value, index: int) -> Placed:
        if isinstance(argument, DeviceValue):
            return argument
        if isinstance(output, np.ndarray | np.generic) and not stays_on_host(output):
            into = self.offers[index] if self.offers else None
            return self._device.fed(np.asarray(output), self._info.name, into)
        output = as_scalar(output)
        is_there = is_plain(output) or isinstance(output, np.ndarray | CudaArray)
        return output if is_there else CudaOpaque(output, self._device, self._device.compute, True)


class CudaRegionLauncher:
    """A region's generated function, bound to a CUDA device: a call, or each step of its generator, enqueues kernels.

    Inside, values are CuPy's arrays and host values; nothing in a region waits, and all of it is on one stream.

    Attributes:
        ahead: captures a graph for arguments before there are calls: gives a generator to drive; None as `graphs`.
        graphs: the CUDA graphs that it has become; None where it becomes none.
    """

    __slots__ = ("_device", "_function", "_info", "_region", "_values", "ahead", "graphs")

    def __init__(self, device: CudaDevice, function: Kernel, info: KernelInfo, *, is_generator: bool) -> None:
        self._device = device
        stream = device.compute_streams[info.stream]
        self.graphs: GraphCache[RegionGraph] | None = None
        self.ahead: Kernel | None = None
        self._region: CapturedRegion | None = None
        if (code := info.code.graph) is not None:
            device.make_capturable()
            has_context, launches = info.conduct.needs_context, min(info.code.launches, STEP_LAUNCHES)
            buffers: BuffersByVariable = device.xp.holder.buffers
            self._region = region = CapturedRegion(
                device.cupy, stream, device.pool, function, info.name, code, buffers, has_context, launches
            )
            self.graphs, self.ahead = region.graphs, self._stepped(region.ahead)
            function = region.steps if is_generator else region
        self._function = self._stepped(function) if is_generator else self._called(function)
        self._info = info
        self._values = Values(device, stream)

    def __call__(self, *args: Value) -> Placed:
        """The outputs, or a generator that is driven as the region's own is and returns them.

        Raises:
            DeviceLostError: an earlier kernel has broken the device.
            MemoryLimitExceeded: a value does not fit.
            BaseException: what a kernel raises, as it is.
        """
        return self._function(*args)

    def offer(self, position: int, value: Array) -> CupyArray | None:
        """Return memory for the copy of a fed array that this region reads as that input; None for new memory."""
        # Graphs of other streams read their buffers in an order that copies of feeds do not wait for.
        is_usual = self._values.stream is self._device.compute
        return None if self._region is None or not is_usual else self._region.offer(position, value)

    def _inputs(self, args: Sequence[Value]) -> list[Placed]:
        self._device.check()
        self._device.pool.label = self._info.name
        return [self._values.raw(value, self._info.name) for value in args]

    def _outputs(self, results: Sequence[Value]) -> tuple[Placed, ...]:
        values, info = self._values, self._info
        return tuple([values.placed(place, x, info) for place, x in enumerate(results)])

    def _called(self, function: Kernel) -> Kernel:
        def call(*args: Value) -> tuple[Placed, ...]:
            stream, device, info = self._values.stream, self._device, self._info
            try:
                if info.code.vectors:
                    args = self._values.brought(args, info.code.vectors)
                self._values.hold(args)
                if inside := self._values.inside(args):
                    stream.hold(*inside)
                with stream, device.timed(stream, info.name):
                    device.launched += info.code.launches
                    stream.work.given += 1
                    return self._outputs(function(*self._inputs(args)))
            except RuntimeError as error:
                raise device.cause_of(error)  # noqa: B904 - which has its cause

        return call

    def _stepped(self, function: Kernel) -> Kernel:
        def steps(*args: Value) -> Generator[bool | None, int | None, tuple[Placed, ...]]:
            stream, device, info = self._values.stream, self._device, self._info
            launches, region = min(info.code.launches, STEP_LAUNCHES), self._region
            # After a short measured time, a driver would launch more at once than the card's queue takes.
            most = max(1, MOST_AHEAD // max(1, launches))
            budget: int | None = None
            taken: list[object] = list(self._values.inside(args))  # perhaps from stores; later steps use them, too
            try:
                if info.code.vectors:
                    args = self._values.brought(args, info.code.vectors)
                with stream:
                    generator = function(*self._inputs(args))
                while True:
                    # One synchronous block for each step: other code runs on this thread in between.
                    self._values.hold(args)
                    if taken:
                        stream.hold(*taken)
                    device.check()
                    device.pool.label = info.name
                    stream.work.given += 1
                    captured = 0 if region is None else region.slices
                    stream.taken = taken
                    try:
                        with stream, device.timed(stream, info.name):
                            begins_loop = generator.send(budget)
                    except StopIteration as ended:
                        device.launched += launches * (budget or 1)
                        with stream:
                            return self._outputs(ended.value)
                    finally:
                        stream.taken = None
                    if region is None or region.slices == captured:
                        device.launched += launches * (budget or 1)
                    budget = yield begins_loop
                    budget = None if budget is None else min(budget, most)
            except RuntimeError as error:
                raise device.cause_of(error)  # noqa: B904 - which has its cause

        return steps


async def _all(values: Sequence[Value]) -> list[Placed]:
    """Return the values, once the futures among them are done; of several failures, raise the first."""
    futures = [value for value in values if isinstance(value, asyncio.Future)]
    if futures:
        await asyncio.gather(*futures)
    return [value.result() if isinstance(value, asyncio.Future) else value for value in values]


def is_coroutine_function(kernel: Kernel) -> bool:
    """Return True if a kernel must be called on the event loop, since its result has to be awaited."""
    return any(inspect.iscoroutinefunction(x) for x in (kernel, getattr(kernel, "__call__", None)))  # noqa: B004
