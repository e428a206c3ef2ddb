"""Launch of kernels on a simulated device: its result at once, its time on the stream, its memory in the account."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncflow.devices.memory import Held, owner_of
from asyncflow.devices.protocol import ArraySpec, HostKernel, Into, KernelInfo, Placed, Span, recording
from asyncflow.devices.sim.namespace import lacks_memory
from asyncflow.devices.sim.shapes import OutputSpecs, SpecRule, lacks_data
from asyncflow.devices.sim.values import (
    SMALL_BYTES,
    BlockStorage,
    SimArray,
    SimOpaque,
    SimUnknown,
    Storage,
    StoreBuffer,
    quiet,
)
from asyncflow.devices.values import DeviceValue, DType, is_array, is_plain
from asyncflow.errors import InternalError
from asyncflow.streams.futures import resolve

if TYPE_CHECKING:
    from asyncflow.devices.figures.host import Call
    from asyncflow.devices.sim.device import SimDevice
    from asyncflow.streams.sim.stream import SimEvent
    from asyncflow.values import Array, Kernel, Value


class SimLauncher:
    """A kernel bound to a simulated device: calling it launches it.

    What a call costs:

    - A kernel that may run on the host, and has no device array among its inputs, takes the host's time only.
    - So does a kernel without computation: it returns views of its inputs, or values from state, or reads shapes.
    - Any other occupies its stream, not before the host has launched it.

    If only a region calls it, no node is interpreted for it.

    `asyncflow.devices.sim.repeated` has the launchers of calls like earlier ones, which leave out most of the checks.
    """

    __slots__ = ("_device", "_found_flops", "_info", "_kernel", "_leaves_numbers", "_rule", "_stream", "_viewing")

    def __init__(self, device: SimDevice, kernel: Kernel, info: KernelInfo) -> None:
        self._device = device
        self._kernel = kernel
        self._info = info
        self._stream = device.compute_streams[info.stream]
        self._rule = SpecRule(info, reads_values=device.machine.shapes_only)
        self._leaves_numbers = device.capabilities.leaves_numbers
        # On a CPU a view is a NumPy call, as slow as computing a number; see `Host.times_of_cpu`.
        is_step = info.moves_references or not device.capabilities.own_memory
        self._viewing: Call = "node" if not info.in_region else "step" if is_step else "view"
        self._found_flops: dict[tuple[tuple[int, ...] | None, ...], float] = {}

    def __call__(self, *args: Value) -> Placed:
        """Launch the kernel on device values and host values; its outputs, likewise.

        Raises:
            HazardError: an input was not waited for, or memory was freed too early since the last call.
            MemoryLimitExceeded: the outputs do not fit.
            ShapeError: only shapes are simulated, and the outputs' shapes depend on data.
            BaseException: what the kernel raises, as it is.
        """
        return self._checked(args)

    def _checked(self, args: Sequence[Value]) -> Placed:
        """Launch with all checks."""
        device, info, stream = self._device, self._info, self._stream
        device.machine.check()
        if self._leaves_numbers and info.is_metadata:
            return self._on_host(args)
        kinds = set(map(type, args))
        if self._leaves_numbers:
            if info.on_host is not None and SimArray not in kinds:
                return self._on_host(args)
            if np.ndarray in kinds or SimUnknown in kinds:
                args = tuple(self._brought(args))
        values = args[1:] if info.conduct.needs_context else args
        arrays = [value for value in values if type(value) is SimArray]
        if info.may_run_on_host and not (arrays or self._leaves_numbers):
            return self._on_host(args)
        # Before the kernel runs, so that a refused call changes no state.
        for array in arrays:
            if array.storage.home is not device:
                raise _not_sent(array, device, info.name)
            if array.written.stream is not stream:
                device.settle_on(stream, array)
        specs = None if SimOpaque in kinds else self._rule.infer(values)
        shapes = [getattr(value, "shape", ()) for value in values]
        if specs is not None:
            self._check_room(specs, shapes)
        if not self._has_data(values, specs):
            outputs = self._without_data(arrays, shapes, specs)
        elif info.keeps_arrays:
            with device.memory.one_kernel():
                result = self._compute(args)
                outputs = self._wrap(values, arrays, shapes, [result] if info.single else list(result))
        else:
            result = self._compute(args)
            outputs = self._wrap(values, arrays, shapes, [result] if info.single else list(result))
        return outputs[0] if info.single else tuple(outputs)

    # -- on the host ---------------------------------------------------------------------------------------------

    def _on_host(self, args: Sequence[Value]) -> Placed:
        """Run a kernel that the host computes, or whose result it finds out without looking at data."""
        info = self._info
        if self._device.machine.shapes_only and not info.is_metadata and any(map(lacks_data, args)):
            outputs = self._unknown(args[1:] if info.conduct.needs_context else args)
            self._device.run_on_host(info.name, "step" if info.in_region else "node")
            return outputs[0] if info.single else tuple(outputs)
        raw = [
            value.any_stand_in() if type(value) is SimArray else value.value if type(value) is SimOpaque else value
            for value in args
        ]
        if info.in_region:
            result = (info.on_host or self._kernel)(*raw)
        else:
            with quiet():
                result = (info.on_host or self._kernel)(*raw)
        self._device.run_on_host(info.name, "step" if info.in_region else "node")
        return result

    def _unknown(self, values: Sequence[Placed]) -> list[SimUnknown]:
        """The outputs of a kernel of the host that is not run, for want of data."""
        return [SimUnknown(dtype, shape, self._info.name) for dtype, shape in self._rule.require(values)]

    def _brought(self, args: Sequence[Value]) -> list[Placed]:
        """The arguments, with copies on the device for vectors of the host that are data there."""
        info, first = self._info, 1 if self._info.conduct.needs_context else 0
        return [
            self._device.copy_in(value, info.name)
            if (type(value) is np.ndarray or type(value) is SimUnknown) and index - first not in info.host_inputs
            else value
            for index, value in enumerate(args)
        ]

    # -- computing -----------------------------------------------------------------------------------------------

    def _compute(self, args: Sequence[Value]) -> Placed:
        raw = [self._raw(value) if isinstance(value, _PLACED) else value for value in args]
        if self._info.keeps_arrays:
            return self._kept(args, raw)
        if self._info.in_region:
            return self._kernel(*raw)
        with quiet():
            return self._kernel(*raw)

    def _kept(self, args: Sequence[Value], raw: Sequence[Placed]) -> Placed:
        """The result of a kernel that keeps arrays, and may have launched kernels of its own."""
        noting = self._device.machine.noting
        try:
            if self._info.in_region:
                result = self._kernel(*raw)
            else:
                with quiet():
                    result = self._kernel(*raw)
        except BaseException:
            noting.noted.clear()
            raise
        if noting.noted:
            self._launch_noted(args)
        return result

    def _launch_noted(self, args: Sequence[Value]) -> None:
        """Give the stream the kernels that a store has launched inside, and count their memory."""
        device, stream, name = self._device, self._stream, self._info.name
        stores = [value for value in args if type(value) is SimOpaque]
        device.order(stream, [event for store in stores for event in store.events])
        for noted in device.machine.noting.taken():
            event = stream.origin(name)
            if noted.flops is not None:
                is_wide = noted.filled.dtype in WIDE
                event = device.launch_kernel(stream, noted.flops, noted.nbytes, is_wide, name, fired=False)
                device.state_events[stream] = event
            if noted.made is not None:
                Storage(device, stream, event, noted.made.nbytes).keep(noted.made)

    def _raw(self, value: SimArray | SimOpaque | SimUnknown) -> Placed:
        if isinstance(value, SimOpaque):
            return value.value
        if type(value) is not SimArray:
            return value.stand_in()
        if not self._info.keeps_arrays:
            return value.stand_in()
        data: Placed = value.data
        if data is None:
            return value.storage.keep_stand_in(value.dtype, value.shape)
        value.storage.keep(data if isinstance(data, np.ndarray) else None)
        return data

    def _has_data(self, values: Sequence[Placed], specs: OutputSpecs) -> bool:
        """Return True if the kernel runs: not on or for values without data, unless it changes a state."""
        info = self._info
        if not self._device.machine.shapes_only or info.is_metadata:
            return True
        if info.keeps_arrays:  # runs even without data: the store needs its entries and their shapes
            is_new = all(hasattr(value, "dtype") for value in values)  # no store yet
            if is_new and any(lacks_data(values[place]) for place in info.host_inputs):
                raise self._rule.refusal()
            return True
        if any(map(lacks_data, values)):
            return False
        return specs is None or not any(spec_nbytes(spec) > SMALL_BYTES for spec in specs)

    def _check_room(self, specs: Sequence[ArraySpec], shapes: Sequence[tuple[int, ...]]) -> None:
        """Refuse outputs without room before the kernel runs and state changes; possible views are checked
        afterwards.
        """
        info = self._info
        if info.keeps_arrays and not shapes:
            return  # it reads state
        if info.keeps_arrays or self._flops(shapes, [shape for _, shape in specs]) > 0:
            self._device.memory.check(sum(map(spec_nbytes, specs)), info.name)

    def _flops(self, inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]) -> float:
        key = (*inputs, None, *outputs)
        flops = self._found_flops.get(key)
        if flops is None:
            if len(self._found_flops) >= MOST_SHAPES:  # growing arrays have a new shape in each iteration
                self._found_flops.clear()
            flops = self._found_flops[key] = self._info.flops(inputs, outputs)
        return flops

    # -- wrapping ------------------------------------------------------------------------------------------------

    def _without_data(
        self, arrays: Sequence[SimArray], shapes: Sequence[tuple[int, ...]], specs: OutputSpecs
    ) -> list[Placed]:
        """The outputs of a kernel that is not run."""
        info = self._info
        if specs is None:
            raise self._rule.refusal()
        flops = self._flops(shapes, [shape for _, shape in specs])
        if flops == 0 and arrays:
            # Ops without computation return views of the input at the same place, or of the only input.
            sources = arrays if len(arrays) == len(specs) else [arrays[0]] * len(specs)
            self._device.run_on_host(info.name, self._viewing)
            return [
                self._followed(SimArray(None, dtype, shape, source.storage, source.written, info.name))
                for (dtype, shape), source in zip(specs, sources, strict=True)
            ]
        fresh = sum(map(spec_nbytes, specs))
        self._device.memory.check(fresh, info.name)
        event = self._launch(arrays, (), flops, fresh, [dtype for dtype, _ in specs])
        homes = [Storage(self._device, self._stream, event, spec_nbytes(spec)) for spec in specs]
        pairs = zip(specs, homes, strict=True)
        return [SimArray(None, dtype, shape, home, event, info.name) for (dtype, shape), home in pairs]

    def _wrap(
        self,
        values: Sequence[Placed],
        arrays: Sequence[SimArray],
        shapes: Sequence[tuple[int, ...]],
        outputs: list[Placed],
    ) -> list[Placed]:
        """Return device values for a kernel's outputs."""
        info, device = self._info, self._device
        are_arrays = [is_array(output) and place not in info.code.host_outputs for place, output in enumerate(outputs)]
        homes = _Homes(device, values, info.keeps_arrays) if True in are_arrays else None
        found = [None if homes is None else homes.find(output) for output in outputs]
        fresh = [output for output, home, each in zip(outputs, found, are_arrays, strict=True) if each and home is None]
        flops = self._flops(shapes, [getattr(output, "shape", ()) for output in outputs])
        stores = [value for value in values if type(value) is SimOpaque]
        opaque = [event for store in stores for event in store.events] if stores else []
        if self._is_work(flops, bool(arrays or stores), values, fresh, has_outputs=True in are_arrays):
            nbytes = _buffer_nbytes(fresh)
            device.memory.check(nbytes, info.name)
            event = self._launch(arrays, opaque, flops, nbytes, [output.dtype for output in fresh])
            if info.keeps_arrays:
                device.state_events[self._stream] = event
        else:
            self._device.run_on_host(info.name, self._viewing)
            event = None
        for store in stores:  # reading a sum of gradients may have created its buffer
            self._count_buffers(store.value)
        events = [*opaque, *[array.written for array in arrays]]
        if homes is None:
            return [self._seen(output, event, events) for output in outputs]
        forgets = info.conduct.is_user and device.machine.shapes_only and any(map(lacks_data, values))
        return [
            self._wrap_one(output, home, event, events, homes, forgets=forgets)
            if each
            else self._seen(output, event, events)
            for output, home, each in zip(outputs, found, are_arrays, strict=True)
        ]

    def _is_work(
        self, flops: float, has_inputs: bool, values: Sequence[Value], fresh: Sequence[Value], *, has_outputs: bool
    ) -> bool:
        """Return True if the kernel, with inputs on the device and arrays as outputs, occupies the stream."""
        if self._info.keeps_arrays:
            return bool(fresh) and flops > 0 and bool(values)  # else it only moves references or reads state
        if fresh:
            return flops > 0 or not has_inputs
        return has_inputs and not has_outputs

    def _wrap_one(
        self,
        output: Placed,
        home: tuple[Storage, SimEvent] | None,
        event: SimEvent | None,
        events: Sequence[SimEvent],
        homes: _Homes,
        *,
        forgets: bool,
    ) -> Placed:
        home = home or homes.find(output)  # an earlier output may share its memory
        if home is None:
            home = self._new_home(output, event or self._join(events), homes)
        storage, written = home
        if type(storage) is BlockStorage:  # parts have their own writers, later than the block's
            written = self._join(events)
        data = output
        if self._device.machine.shapes_only and (forgets or output.nbytes > SMALL_BYTES or lacks_memory(output)):
            data = storage.array = None
        return self._followed(SimArray(data, output.dtype, output.shape, storage, written, self._info.name))

    def _seen(self, output: Placed, event: SimEvent | None, events: Sequence[SimEvent]) -> Placed:
        """Return an output that is no array, with the work that it depends on."""
        self._count_buffers(output)
        if is_plain(output) or isinstance(output, np.ndarray):
            return output
        depends = (event,) if event is not None else latest_events(events)
        return SimOpaque(output, depends, self._device) if depends else output

    def _count_buffers(self, output: object) -> None:
        """Count buffers that a store has made for itself; values put into it are kept, and count by themselves."""
        held: Held | None = getattr(output, "held", None)
        if held is not None:
            self._count_held(held)

    def _count_held(self, held: Held) -> None:
        buffers = held.buffers()
        if buffers:
            device, stream = self._device, self._stream
            for buffer in buffers:
                if device.machine.kept(buffer) is None:
                    kind = BlockStorage if held.gives_views else StoreBuffer
                    origin = stream.origin(self._info.name)
                    made = kind(device, stream, origin, buffer.nbytes)
                    made.keep(buffer)

    def _followed(self, array: SimArray) -> SimArray:
        """Return an array made on this stream, which has waited for the writer of the viewed memory."""
        if array.written.stream is not self._stream:
            array.followers = (self._stream,)
        return array

    def _new_home(self, output: Placed, written: SimEvent, homes: _Homes) -> tuple[Storage, SimEvent]:
        if not isinstance(output, np.ndarray):
            return Storage(self._device, self._stream, written, output.nbytes, None), written
        owner = owner_of(output)
        storage = Storage(self._device, self._stream, written, owner.nbytes, None if homes.is_foreign(owner) else owner)
        if self._info.keeps_arrays:
            storage.keep(output)
        homes.add(owner, storage, written)
        return storage, written

    def _join(self, events: Sequence[SimEvent]) -> SimEvent:
        """Return one event for new memory that no kernel filled: its dependencies, which its stream has to wait for."""
        stream, state = self._stream, self._device.state_events
        latest = latest_events(events or (tuple(state.values()) if self._info.keeps_arrays else ()))
        self._device.order(stream, latest)
        if not latest:
            return stream.origin(self._info.name)
        return latest[0] if len(latest) == 1 else stream.record()

    # -- time and memory -----------------------------------------------------------------------------------------

    def _launch(
        self,
        arrays: Sequence[SimArray],
        opaque: Sequence[SimEvent],
        flops: float,
        fresh_nbytes: int,
        dtypes: Sequence[DType],
    ) -> SimEvent:
        """Give the kernel to its stream, after the writers of its inputs."""
        device, stream, info = self._device, self._stream, self._info
        nbytes, is_wide, elsewhere = fresh_nbytes, any(dtype in WIDE for dtype in dtypes), []
        waited = [*[array.written for array in arrays if array.written.stream is not stream], *opaque]
        if waited:
            device.order(stream, waited)
        if info.keeps_arrays and not opaque:
            device.order(stream, device.state_events.values())
        for array in arrays:
            device.machine.check_read(stream, array, info.name)
            nbytes += array.nbytes
            is_wide = is_wide or array.dtype in WIDE
            if array.storage.pool is not stream:
                elsewhere.append(array.storage)
        event = device.launch_kernel(
            stream, flops, nbytes, is_wide, info.name, fired=not info.in_region, launch=info.launch
        )
        for array in arrays:
            array.storage.read_by(event)
        if elsewhere:
            device.hold(event, elsewhere)
        return event


@dataclass(slots=True, eq=False, repr=False)
class SimHostLauncher(HostKernel):
    """A kernel that a simulated device leaves to the host: calling it gives a coroutine."""

    _device: SimDevice
    _kernel: Kernel
    _info: KernelInfo
    staying: Collection[int] = ()
    offers: Sequence[Into | None] = ()

    def __call__(self, *args: Value) -> Coroutine[object, object, Placed]:
        """Copy the inputs to the host, await the user's kernel there, and copy its outputs in, but for some."""
        return self._call(args, self._device.recorded())

    async def _call(self, args: Sequence[Value], spans: list[Span] | None) -> Placed:
        device, info = self._device, self._info
        values = [await self._fetched(value, spans) for value in args]
        lacks = device.machine.shapes_only and any(map(lacks_data, values))
        if lacks and not (info.keeps_arrays or inspect.iscoroutinefunction(self._kernel)):
            specs = SpecRule(info, reads_values=True).require(values[1:] if info.conduct.needs_context else values)
            results = [SimUnknown(*spec, info.name) for spec in specs]
        else:
            result = self._kernel(*[value.stand_in() if type(value) is SimUnknown else value for value in values])
            if inspect.isawaitable(result):
                result = await result
            results = [self._known(value, lacks) for value in ([result] if info.single else result)]
        # Check for memory freed too early while the user's code ran. Record into the call's span list: another run may
        # record by now.
        device.machine.check()
        with recording(device, spans):
            outputs = [
                output if index in self.staying else device.copy_in(output, info.name)
                for index, output in enumerate(results)
            ]
        return outputs[0] if info.single else tuple(outputs)

    async def _fetched(self, value: Value, spans: list[Span] | None) -> Placed:
        if not isinstance(value, DeviceValue):
            return value
        future: asyncio.Future[Placed] = self._device.machine.loop.create_future()
        with recording(self._device, spans):
            self._device.read_value(value, partial(resolve, future))
        return await future

    def _known(self, result: Placed, lacks: bool) -> Placed:
        """Return a result, or its dtype and shape alone if data of the inputs was missing."""
        return SimUnknown(result.dtype, result.shape, self._info.name) if lacks and is_array(result) else result


class _Homes:
    """The memory of each output of a call: of an input, of state, or of an output before."""

    __slots__ = ("_device", "_foreign", "_keeps", "_known")

    def __init__(self, device: SimDevice, values: Sequence[Value], keeps: bool) -> None:
        self._device = device
        self._keeps = keeps
        self._known: dict[int, tuple[Storage, SimEvent]] = {}
        self._foreign: set[int] = set()
        for value in values:
            if type(value) is SimArray:
                if type(value.data) is np.ndarray:
                    self._known[id(owner_of(value.data))] = (value.storage, value.written)
            elif type(value) is np.ndarray:
                self._foreign.add(id(owner_of(value)))

    def find(self, output: Value) -> tuple[Storage, SimEvent] | None:
        """Return the storage of an output and the event of its writer; None for new memory."""
        if not isinstance(output, np.ndarray):
            return None
        owner = owner_of(output)
        home = self._known.get(id(owner))
        if home is None and self._keeps:
            storage = self._device.machine.kept(owner)
            if storage is not None and type(storage) is not StoreBuffer and storage.home is self._device:
                home = (storage, storage.written)
        return home

    def add(self, owner: Array, storage: Storage, written: SimEvent) -> None:
        """Let later outputs of the call share this memory."""
        self._known[id(owner)] = (storage, written)

    def is_foreign(self, owner: Array) -> bool:
        """Return True if the memory came in as a host value, so that the device may not overwrite it."""
        return id(owner) in self._foreign


_PLACED = (SimArray, SimOpaque, SimUnknown)

MOST_SHAPES = 64
"""Number of sets of shapes that a launcher remembers."""

WIDE = (np.dtype(np.float64), np.dtype(np.complex128))
"""Dtypes of kernels that a card computes at its rate for float64."""


def _not_sent(array: SimArray, device: SimDevice, name: str) -> InternalError:
    return InternalError(
        f"{name!r} runs on {device.name} and was given {array.name!r}, which is on {array.device} and was not sent"
    )


def _buffer_nbytes(arrays: Sequence[Placed]) -> int:
    """The bytes of the memory that some arrays look into."""
    if len(arrays) == 1:
        return owner_of(arrays[0]).nbytes if isinstance(arrays[0], np.ndarray) else arrays[0].nbytes
    owners = [owner_of(array) if isinstance(array, np.ndarray) else array for array in arrays]
    return sum({id(owner): owner.nbytes for owner in owners}.values())


def latest_events(events: Sequence[SimEvent]) -> tuple[SimEvent, ...]:
    """Return the last event of each stream."""
    if len(events) < 2:
        return tuple(events)
    if len(events) == 2 and events[0].stream is events[1].stream:
        return (events[0] if events[0].count >= events[1].count else events[1],)
    latest: dict[Any, SimEvent] = {}  # streams run in order: the last event follows all others
    for event in events:
        if event.stream not in latest or latest[event.stream].count < event.count:
            latest[event.stream] = event
    return tuple(latest.values())


def spec_nbytes(spec: ArraySpec) -> int:
    """Return the bytes of an array of a dtype and shape."""
    dtype, shape = spec
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size
