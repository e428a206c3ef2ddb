"""Launch of regions on a simulated device: the host calls the function once, and it launches the kernels.

Inside, values are the device's own, so every kernel has a time of its own, and whatever is not waited for is found. If
the machine or the session says so, a region becomes a CUDA graph by the same rules as on a CUDA device
(`cuda/graphs/graph.py`). After a few calls with inputs of one kind its kernels take no host time any more; launching
the graph does, and copying its inputs and outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncflow.devices.captures import GraphCache, NotCapturableError, host_key, run_to_end
from asyncflow.devices.sim.values import SimArray, SimOpaque, SimUnknown, quiet

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable, Sequence

    from asyncflow.devices.protocol import KernelInfo, Placed
    from asyncflow.devices.sim.device import SimDevice
    from asyncflow.values import Kernel, Value


class SimRegionLauncher:
    """A region's generated function, bound to a simulated device.

    Attributes:
        graphs: the CUDA graphs that it has become; None where it becomes none.
    """

    __slots__ = ("_code", "_device", "_function", "_info", "_is_generator", "_is_noted", "_stream", "graphs")

    def __init__(self, device: SimDevice, function: Kernel, info: KernelInfo, *, is_generator: bool) -> None:
        self._device = device
        self._info = info
        self._stream = device.compute_streams[info.stream]
        self.graphs: GraphCache[object] | None = None if info.code.graph is None else GraphCache(info.name)
        # A region that could be a graph and is none notes the time that a graph would save.
        self._is_noted = info.code.could_capture and self.graphs is None
        self._function, self._is_generator = function, is_generator
        self._code = info.code.graph

    def __call__(self, *args: Value) -> Placed:
        """The outputs, or a generator that is driven as the region's own is and returns them.

        Raises:
            HazardError: an input was not waited for, or memory was freed too early.
            MemoryLimitExceeded: a value does not fit.
            BaseException: what a kernel raises, as it is.
        """
        if self._is_generator:
            return self._steps(args)
        inputs = self._begin(args)
        outputs = self._captured(inputs)
        if outputs is None:
            before_ns = self._device.thread.busy_ns.total()
            self._device.charge("region")
            with quiet():
                outputs = self._function(*inputs)
            self._note(self._device.thread.busy_ns.total() - before_ns, inputs, outputs)
        return outputs

    def _steps(self, args: Sequence[Value]) -> Generator[bool | None, int | None, tuple[Placed, ...]]:
        inputs = self._begin(args)
        outputs = self._captured(inputs)
        if outputs is None:
            is_noted, busy_ns = self._is_noted, self._device.thread.busy_ns
            taken_ns = -busy_ns.total() if is_noted else 0
            self._device.charge("region")
            generator, budget = self._function(*inputs), None
            while True:
                try:
                    with quiet():
                        paused = generator.send(budget)
                except StopIteration as ended:
                    outputs = ended.value
                    break
                if is_noted:
                    taken_ns += busy_ns.total()
                budget = yield paused
                if is_noted:
                    taken_ns -= busy_ns.total()
            self._note(taken_ns + busy_ns.total(), inputs, outputs)
        return outputs

    def _note(self, taken_ns: int, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        """Note the time that a graph would have saved, if the region could be one and is none."""
        if self._is_noted:
            self._device.thread.note_region(taken_ns, len(_arrays([*inputs, *outputs])))

    def _begin(self, args: Sequence[Value]) -> list[Placed]:
        """The arguments of the function: its stream waits for all of it, and vectors of the host are copied in."""
        device, info = self._device, self._info
        inputs = list(args)
        for index in info.code.vectors:
            if type(inputs[index]) is np.ndarray or type(inputs[index]) is SimUnknown:
                inputs[index] = device.copy_in(inputs[index], info.name)
        for value in inputs:
            if isinstance(value, SimArray):
                device.settle_on(self._stream, value)
        return inputs

    # -- graphs --------------------------------------------------------------------------------------------------

    def _captured(self, inputs: Sequence[Value]) -> tuple[Placed, ...] | None:
        """The outputs of a graph, which is bound to buffers of its own; None if there is none for such inputs."""
        code = self._code
        if self.graphs is None or code is None or self.graphs.is_refused:
            return None
        inputs = inputs[1:] if self._info.conduct.needs_context else inputs
        key = tuple([_number(value) if place in code.numbers else _key(value) for place, value in enumerate(inputs)])
        if self.graphs.get(None if None in key else key, object) is None:
            return None
        device, stream, name = self._device, self._stream, self._info.name
        device.fill_buffers(stream, _arrays(inputs), name)
        try:
            with code.alone() as given, device.in_graph(), quiet():
                if any(value is None for value in given):
                    return None
                outputs, left = run_to_end(code.steps(inputs, given))
                for variable, start, end in zip(code.variables, given, left, strict=True):
                    if end is not start:
                        variable.put(end)
        except NotCapturableError as error:
            self.graphs.refuse(error)
            return None
        device.empty_buffers(stream, _arrays(outputs), name)
        return tuple(outputs)


def _arrays(values: Sequence[Value]) -> list[SimArray]:
    return [value for value in values if isinstance(value, SimArray)]


def _number(value: Value) -> Hashable:
    return (value.dtype, ()) if isinstance(value, np.generic) else _key(value)


def _key(value: Value) -> Hashable:
    """The key that a graph depends on; None if there is no graph for such a value."""
    if isinstance(value, SimArray):
        return value.dtype, value.shape
    return None if isinstance(value, SimOpaque) else host_key(value)
