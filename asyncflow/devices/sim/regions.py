"""Launch of regions on a simulated device: the host calls the function once, and it launches the kernels.

Inside, values are the device's own, so every kernel has a time of its own, and whatever is not waited for is found. If
the machine or the session says so, a region becomes a CUDA graph by the same rules as on a CUDA device
(`cuda/graphs/graph.py`). After a few calls with inputs of one kind its kernels take no host time any more; launching
the graph does, and copying its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.devices.captures import GraphCache, GraphCode, host_key, run_to_end
from asyncflow.devices.sim.values import SimArray, SimMemoryAccount, SimOpaque, SimUnknown, quiet

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
        self.graphs: GraphCache[SimGraph] | None = None
        if info.code.graph is not None:
            self.graphs = GraphCache(info.name)
            device.machine.graphs[self.graphs] = device.memory
        # A region that could be a graph, but is not, records the time that a graph would save.
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
            self._device.call_region()
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
            self._device.call_region()
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
        code, graphs = self._code, self.graphs
        if graphs is None or code is None or graphs.is_refused:
            return None
        inputs = inputs[1:] if self._info.conduct.needs_context else inputs
        keys = [_number(value) if place in code.numbers else _key(value) for place, value in enumerate(inputs)]
        with code.alone() as given:
            key = (*keys, *map(_number, given))
            graph = graphs.find(None if None in key else key)
            if graph is not None:
                return graphs.results(graph, partial(self._replayed, code, inputs, given))
            if graphs.is_due(None if None in key else key):
                with graphs.capturing(key) as keep:
                    outputs, graph = self._recorded(code, inputs, given)
                    keep(graph)
                    return outputs
        return None

    def _recorded(
        self, code: GraphCode, inputs: Sequence[Value], given: Sequence[Value]
    ) -> tuple[tuple[Placed, ...], SimGraph]:
        """Launch the kernels one by one, and return the outputs, and a graph with as much memory as that took.

        To capture takes the host as long as to launch.

        Raises:
            MemoryLimitExceeded: that does not fit. No variable has changed.
        """
        device, memory, laps = self._device, self._device.memory, object()
        buffers = sum(array.nbytes for array in (*_arrays(inputs), *given) if hasattr(array, "nbytes"))
        _, before = memory.lap(laps)
        device.call_region()
        try:
            with quiet():
                outputs, left = run_to_end(code.steps(inputs, given))
            most, _ = memory.lap(laps)
        finally:
            memory.end_laps(laps)
        graph = SimGraph(memory, buffers + most - before, self._info.name)
        graph.results = sum({id(x.storage): x.storage.nbytes for x in _arrays(outputs)}.values())
        _put(code, given, left)
        return tuple(outputs), graph

    def _replayed(
        self, code: GraphCode, inputs: Sequence[Value], given: Sequence[Value], graph: SimGraph
    ) -> tuple[Placed, ...]:
        """Launch a graph.

        Raises:
            MemoryLimitExceeded: its results do not fit; nothing was launched.
        """
        device, stream, name = self._device, self._stream, self._info.name
        device.memory.check(graph.results, name)
        device.fill_buffers(stream, _arrays(inputs), name)
        with device.in_graph(), graph.in_use(), quiet():
            outputs, left = run_to_end(code.steps(inputs, given))
        _put(code, given, left)
        device.empty_buffers(stream, _arrays(outputs), name)
        return tuple(outputs)


class SimGraph:
    """A graph that a simulated card has, with memory of its own.

    Attributes:
        results: bytes that a launch allocates for its results.
    """

    __slots__ = ("_charge", "_memory", "_name", "_nbytes", "results")

    def __init__(self, memory: SimMemoryAccount, nbytes: int, name: str) -> None:
        """Count the memory.

        Raises:
            MemoryLimitExceeded: it does not fit.
        """
        self.results = self._charge = 0
        self._memory, self._nbytes, self._name = memory, nbytes, f"CUDA graph of {name}"
        self._charge = memory.charge(nbytes, self._name)

    @property
    def held(self) -> dict[object, int]:
        """Bytes of its memory, which it shares with no other graph."""
        return {self: self._nbytes}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count arrays that are made inside the block in place of the graph's memory, which they are in.

        Raises:
            MemoryLimitExceeded: results take more than they took at first.
        """
        self._memory.credit(self._charge)
        self._charge = 0
        try:
            yield
        finally:
            self._charge = self._memory.charge(self._nbytes, self._name)

    def __del__(self) -> None:
        if self._charge:
            self._memory.credit(self._charge)


def _put(code: GraphCode, given: Sequence[Value], left: Sequence[Value]) -> None:
    """Give variables the values that the code has left."""
    for variable, start, end in zip(code.variables, given, left, strict=True):
        if end is not start:
            variable.put(end)


def _arrays(values: Sequence[Value]) -> list[SimArray]:
    return [value for value in values if isinstance(value, SimArray)]


def _number(value: Value) -> Hashable:
    return (value.dtype, value.shape) if isinstance(value, np.generic | np.ndarray) else _key(value)


def _key(value: Value) -> Hashable:
    """The key that a graph depends on; None if there is no graph for such a value."""
    if isinstance(value, SimArray):
        return value.dtype, value.shape
    return None if isinstance(value, SimOpaque) else host_key(value)
