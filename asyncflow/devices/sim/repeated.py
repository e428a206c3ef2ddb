"""Launchers that reuse the findings of an earlier call whose inputs had the same dtypes and shapes.

A loop calls each of its kernels once an iteration, mostly with inputs like the previous iteration's. `SimLauncher`
would find out everything again: the dtypes and shapes of the outputs, the cost, and the memory that they are in. The
launchers here keep these findings (`_Known`), by a key of the inputs' dtypes and shapes.

An example: ``tanh`` of a float32 array of shape ``(64, 256)``, in a simulation of shapes alone, on a V100.

1. The first call makes the key ``(float32, (64, 256), None)``; None says that the array has no data. `_find_out` asks
   the op for the outputs' shapes and the card's model for the cost. It keeps both under the key: one array of 65,536
   bytes, the time of the kernel on the card, and that the kernel need not run.
2. The next iteration's call makes the same key and finds the entry. Three steps are left: check that 65,536 bytes fit,
   give the stream a piece of work of that length, and make a `SimArray` without data.
3. The last batch has 10 rows. Its key ``(float32, (10, 256), None)`` is new, so the launcher repeats step 1.
4. Another stream has written the next input, and this stream has not waited for it yet. That needs an event, which no
   key can tell, so `SimLauncher._checked` does the whole call.

Rule: virtual times, peaks of memory, firings and results are the same as with `SimLauncher` alone, to the byte
(`tests/devices/test_sim_repeated.py`). So a launcher decides whether a call is like an earlier one *before* the call
has any effect. If the call is not, or may not be, it goes to `SimLauncher._checked`. If the kernel runs and returns
something unexpected, such as a view, the outputs go to `SimLauncher._wrap`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncflow.devices.memory import Held, owner_of
from asyncflow.devices.protocol import ArraySpec, KernelInfo, Placed
from asyncflow.devices.sim.launch import MOST_SHAPES, WIDE, SimLauncher, latest_events, spec_nbytes
from asyncflow.devices.sim.values import SMALL_BYTES, BlockStorage, SimArray, SimOpaque, StandIn, Storage, quiet

if TYPE_CHECKING:
    from asyncflow.devices.sim.device import SimDevice
    from asyncflow.streams.sim.stream import SimEvent, SimStream
    from asyncflow.values import Kernel, Value


def sim_launcher(device: SimDevice, kernel: Kernel, info: KernelInfo) -> SimLauncher:
    """Return the launcher of a kernel that is no coroutine function: the one with the fewest steps."""
    if not device.capabilities.leaves_numbers:
        return SimLauncher(device, kernel, info)
    if info.is_metadata:
        return MetadataLauncher(device, kernel, info)
    if info.conduct.is_user or info.conduct.needs_context:
        return SimLauncher(device, kernel, info)  # equal inputs may give different results
    if not info.keeps_arrays:
        return ComputeLauncher(device, kernel, info)
    return StoreLauncher(device, kernel, info) if info.in_region else SimLauncher(device, kernel, info)


class MetadataLauncher(SimLauncher):
    """The launcher of a kernel that needs no data, such as a kernel that returns a shape."""

    __slots__ = ()

    def __call__(self, *args: Value) -> Placed:
        """See `SimLauncher`."""
        self._device.machine.check()
        return self._on_host(args)


class ComputeLauncher(SimLauncher):
    """The launcher of a kernel that computes arrays of its inputs alone."""

    __slots__ = ("_known", "_needs_values", "_on_numbers")

    def __init__(self, device: SimDevice, kernel: Kernel, info: KernelInfo) -> None:
        super().__init__(device, kernel, info)
        self._on_numbers = info.on_host if info.in_region else None
        self._known: dict[tuple[object, ...], _Known | None] = {}
        self._needs_values = False  # True if output shapes also depend on numbers of the host

    def __call__(self, *args: Value) -> Placed:
        """See `SimLauncher`."""
        stream, info, machine = self._stream, self._info, self._device.machine
        if self._on_numbers is not None:
            for value in args:
                if type(value) not in _NUMBERS:
                    break
            else:
                if machine.hazards:
                    machine.check()
                result = self._on_numbers(*args)
                self._device.run_on_host(info.name, "step")
                return result
        arrays: list[SimArray] = []
        key: list[object] = []
        # One pass over the inputs makes the key, and finds inputs that the cache cannot serve.
        for value in args:
            if type(value) is SimArray:
                written = value.written
                if value.storage.pool is not stream or not (written.stream is stream or _has_waited(stream, value)):
                    return self._checked(args)
                arrays.append(value)
                key += value.dtype, value.shape
                if value.data is None:
                    key.append(None)  # in a simulation of shapes, small arrays have data if their inputs had
            elif isinstance(value, np.generic):
                key.append(type(value))
                if self._needs_values:
                    key.append(value)
            elif info.on_host is None or any(type(each) is SimArray for each in args):
                return self._checked(args)  # a vector of the host must be copied in
        if machine.hazards:
            machine.check()
        if not arrays:
            return self._checked(args) if info.on_host is None else self._on_host(args)
        known_as = tuple(key)
        try:
            known = self._known[known_as]
        except KeyError:
            known = self._find_out(known_as, args, arrays)
            if known is None and not self._needs_values and self._rule.infer_with_numbers(args) is not None:
                # Numbers, such as the start of a slice, belong to this launcher's keys from now on.
                self._needs_values = True
                return self(*args)
        if known is None:
            return self._checked(args)
        if not known.runs:
            return self._without_running(known, arrays)
        # Check memory before the kernel runs. With numbers in the key the kernel may return a view: see `_place`.
        if known.is_work and not self._needs_values:
            self._device.memory.check(known.fresh_nbytes, info.name)
        raw = [value.data if type(value) is SimArray else value for value in args]
        if info.in_region:
            result = self._kernel(*raw)
        else:
            with quiet():  # a region enters it once for all of its kernels
                result = self._kernel(*raw)
        outputs = [result] if info.single else list(result)
        placed = self._place(known, arrays, raw, outputs)
        if placed is None:
            placed = self._wrap(args, arrays, [getattr(value, "shape", ()) for value in args], outputs)
        return placed[0] if info.single else tuple(placed)

    def _find_out(self, key: tuple[object, ...], args: Sequence[Placed], arrays: Sequence[SimArray]) -> _Known | None:
        """Find and keep the outputs' specs and the cost for such dtypes and shapes; None if they need data."""
        specs = self._rule.infer_with_numbers(args) if self._needs_values else self._rule.without_values(args)
        known = None
        if specs is not None and not any(dtype.kind in "OSUT" for dtype, _ in specs):
            flops = self._flops([value.shape for value in args], [shape for _, shape in specs])
            fresh = sum(map(spec_nbytes, specs))
            is_wide = any(dtype in WIDE for dtype in (*[dtype for dtype, _ in specs], *[x.dtype for x in arrays]))
            cost = self._device.cost(flops, fresh + sum([array.nbytes for array in arrays]), is_wide)
            runs = not self._device.machine.shapes_only or (
                all(array.data is not None for array in arrays)
                and not any(spec_nbytes(spec) > SMALL_BYTES for spec in specs)
            )
            known = _Known(specs, [spec_nbytes(spec) for spec in specs], flops > 0, runs, fresh, *cost)
        if len(self._known) >= MOST_SHAPES:
            self._known.clear()
        self._known[key] = known
        return known

    def _without_running(self, known: _Known, arrays: list[SimArray]) -> Placed:
        """Return the outputs of a kernel that is not run, as `SimLauncher._without_data` does."""
        device, info, stream = self._device, self._info, self._stream
        name = info.name
        outputs: list[SimArray] = []
        if known.is_work:
            device.memory.check_charge(known.fresh_nbytes, name)
            event = self._launched(known, arrays)
            if info.single:
                ((dtype, shape),) = known.specs
                storage = Storage(device, stream, event, known.fresh_nbytes)
                return SimArray(None, dtype, shape, storage, event, name)
            for (dtype, shape), nbytes in zip(known.specs, known.nbytes, strict=True):
                storage = Storage(device, stream, event, nbytes)
                outputs.append(SimArray(None, dtype, shape, storage, event, name))
        else:
            # Ops without computation return views of the input at the same place, or of the only input.
            specs = known.specs
            sources = arrays if len(arrays) == len(specs) else [arrays[0]] * len(specs)
            device.run_on_host(name, self._viewing)
            for (dtype, shape), source in zip(specs, sources, strict=True):
                written = source.written
                view = SimArray(None, dtype, shape, source.storage, written, name)
                if written.stream is not stream:
                    view.followers = (stream,)
                outputs.append(view)
        return outputs[0] if info.single else tuple(outputs)

    def _launched(self, known: _Known, arrays: Sequence[SimArray]) -> SimEvent:
        """Give the kernel to its stream, which has waited for the inputs."""
        device, stream = self._device, self._stream
        landing = device.machine.landing  # usually empty, except just after copies
        if landing:
            for array in arrays:
                landing.pop(array.storage.written, None)
        info = self._info
        event = device.launch_for(stream, known.seconds, known.work_ns, info.name, not info.in_region, info.launch)
        return event

    def _place(
        self, known: _Known, arrays: Sequence[SimArray], raw: Sequence[Value], outputs: Sequence[Placed]
    ) -> list[Placed] | None:
        """Wrap new arrays that a kernel gave, or one view; return None, with no effect, for anything else."""
        device, stream, name = self._device, self._stream, self._info.name
        if not known.is_work:
            if len(outputs) != 1 or type(outputs[0]) is not np.ndarray or outputs[0].base is None:
                return None
            output, source = outputs[0], None
            owner = owner_of(output)
            for array in arrays:
                if type(array.data) is np.ndarray and owner_of(array.data) is owner:
                    source = array
            if source is None or type(source.storage) is BlockStorage:
                return None
            device.run_on_host(name, self._viewing)
            dtype, shape = output.dtype, output.shape
            return [self._followed(SimArray(output, dtype, shape, source.storage, source.written, name))]
        if len(outputs) != len(known.specs):
            return None
        seen = set(map(id, raw))  # inputs, and repeated outputs, are not new memory
        for output, (dtype, shape) in zip(outputs, known.specs, strict=True):
            if type(output) is np.ndarray:
                if output.base is not None or id(output) in seen:
                    return None
                seen.add(id(output))
            elif not isinstance(output, np.generic):
                return None
            if output.shape != shape or output.dtype != dtype:
                return None
        if self._needs_values:  # not checked above, as the kernel may return views
            device.memory.check(known.fresh_nbytes, name)
        event = self._launched(known, arrays)
        placed: list[Placed] = []
        for output, (dtype, shape), nbytes in zip(outputs, known.specs, known.nbytes, strict=True):
            storage = Storage(device, stream, event, nbytes, output if type(output) is np.ndarray else None)
            placed.append(SimArray(output, dtype, shape, storage, event, name))
        return placed


class StoreLauncher(SimLauncher):
    """The launcher of a kernel that puts values into a store or takes them out, called by the code of a region.

    Such a kernel takes the card no time: a loop saves values for its gradient, or writes them to a TensorArray, as they
    are. The kernel always runs, because the store's contents decide the output, and no key tells them. The launcher
    only leaves out the search for the memory of the output: that is the store's, or the value's own.
    """

    __slots__ = ()

    def __call__(self, *args: Value) -> Placed:
        """See `SimLauncher`."""
        device, stream, info = self._device, self._stream, self._info
        arrays: list[SimArray] = []
        stores: list[SimOpaque] = []
        raw: list[Placed] = []
        for value in args:
            if type(value) is SimOpaque:
                stores.append(value)
                raw.append(value.value)
            elif type(value) is SimArray:
                written = value.written
                if not (written.stream is stream or _has_waited(stream, value)) or value.storage.home is not device:
                    return self._checked(args)
                arrays.append(value)
                if value.data is None:  # as `_raw` does
                    raw.append(value.storage.keep_stand_in(value.dtype, value.shape))
                else:
                    raw.append(self._raw(value))
            elif type(value) in _NUMBERS or isinstance(value, np.generic) or len(raw) in info.host_inputs:
                raw.append(value)
            else:
                return self._checked(args)
        if not stores:
            return self._checked(args)
        if device.machine.hazards:
            device.machine.check()
        memory = device.memory
        late: list[int] = []
        at_once = memory.credit
        memory.credit = late.append  # see `SimMemoryAccount.one_kernel`, which would take twice as long
        try:
            result = self._kept(args, raw)
            if info.single or len(result) == 1:
                placed = self._moved(result if info.single else result[0], stores, arrays)
                if placed is not None:
                    return placed if info.single else (placed,)
            shapes = [getattr(value, "shape", ()) for value in args]
            wrapped = self._wrap(args, arrays, shapes, [result] if info.single else list(result))
        finally:
            memory.credit = at_once
            for charge in late:
                at_once(charge)
        return wrapped[0] if info.single else tuple(wrapped)

    def _moved(self, output: Placed, stores: Sequence[SimOpaque], arrays: Sequence[SimArray]) -> Placed | None:
        """Return a version of a store, or a value that one kept as it was; None, with no effect, for anything else."""
        device, name = self._device, self._info.name
        if type(output) is np.ndarray:
            owner = output.base
            if type(owner) is not StandIn:
                owner = owner_of(output)
            home = None if arrays else device.machine.kept(owner)
            if type(home) is not Storage or home.home is not device or output.dtype.kind in "OSUT":
                return None
            device.run_on_host(name, self._viewing)
            for store in stores:
                self._count_buffers(store.value)
            data: Placed = output
            if device.machine.shapes_only and (output.nbytes > SMALL_BYTES or type(owner) is StandIn):
                data = home.array = None
            return self._followed(SimArray(data, output.dtype, output.shape, home, home.written, name))
        held: Held | None = getattr(output, "held", None)
        if held is None:
            return None
        device.run_on_host(name, self._viewing)
        events: Sequence[SimEvent] = stores[0].events if len(stores) == 1 else [x for y in stores for x in y.events]
        for store in stores:
            held_before: Held | None = getattr(store.value, "held", None)
            if held_before is not held:
                self._count_buffers(store.value)
        self._count_held(held)
        depends = latest_events([*events, *[array.written for array in arrays]] if arrays else events)
        return SimOpaque(output, depends, device) if depends else output


_NUMBERS = frozenset(np.dtype(code).type for code in "?bBhHiIlLqQfd")
"""Types of the numbers that a region counts with; others take more steps."""


class _Known(NamedTuple):
    """Facts that follow from the dtypes and shapes of a kernel's inputs, and from which of them have data.

    Attributes:
        specs: dtypes and shapes of the outputs.
        nbytes: sizes of the outputs.
        is_work: True if the kernel occupies its stream; one without work gives views of its inputs.
        runs: True if the kernel is called; without a call its outputs have no data.
        fresh_nbytes: sum of `nbytes`, which the device allocates if the kernel gives no views.
        seconds: time that the kernel takes, without jitter.
        work_ns: part of that in which the card has no room for another kernel.
    """

    specs: Sequence[ArraySpec]
    nbytes: Sequence[int]
    is_work: bool
    runs: bool
    fresh_nbytes: int
    seconds: float
    work_ns: int


def _has_waited(stream: SimStream, array: SimArray) -> bool:
    """Return True if the host has asked the stream to wait for the work that wrote the array."""
    return stream in array.followers and stream.has_seen(array.written)
