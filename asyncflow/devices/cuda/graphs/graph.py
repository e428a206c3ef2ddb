"""CUDA graphs: a region that ran a few times on the same shapes is captured, and launched as a whole from then on.

A captured graph is bound to addresses. So its inputs are copied into fixed buffers before each launch, unless the copy
from the host was put there in the first place (`InputBuffer`). Its outputs stay where they are, in the graph's memory,
if nothing holds earlier outputs there any more; else they are copied to new arrays (`Lending`). The buffers, and all
memory allocated meanwhile, are in blocks that graphs share (`GraphMemory`). Copies and launches are on the region's
compute stream, in whose order every value of the device is valid; launches of graphs never overlap, as they are all
on that stream.

A graph is valid for the shapes, dtypes and layouts of its arrays, and for the very values on the host: the region may
have branched on them, and kernels have them as arguments. A region with ever new host values is left alone, and so is a
region whose capture fails, for whatever reason: it runs as it would without graphs.

Python takes about as long to capture a region as to launch it. So a region is captured in slices, on a stream that
belongs to the capture alone. Between two slices the event loop has its turn, other work may be launched on the compute
stream, and the run may be cancelled. The memory of the graph is taken in the order of the compute stream, on which the
graph is launched later.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar
from weakref import ReferenceType, ref

import numpy as np

from asyncflow.devices.captures import (
    GraphCache,
    GraphCode,
    NotCapturableError,
    NotLaunchedError,
    Steps,
    host_key,
    run_to_end,
    slice_budget,
)
from asyncflow.devices.cuda.graphs.blocks import GraphMemory, blocks_of
from asyncflow.devices.cuda.graphs.variables import Buffers, RegionVariables, stored
from asyncflow.devices.cuda.memory import active_requests, home_of
from asyncflow.devices.cuda.transfers.buffers import LentMemory
from asyncflow.devices.memory import MemoryLimitExceeded
from asyncflow.devices.values import is_plain
from asyncflow.errors import a_kind
from asyncflow.streams.cuda.stream import CudaStream, CupyPool, capturing

if TYPE_CHECKING:
    from asyncflow.devices.cuda.memory import CudaPool
    from asyncflow.devices.cuda.transfers.buffers import BuffersByVariable
    from asyncflow.devices.protocol import Placed
    from asyncflow.streams.cuda.cupy_types import Cupy, CupyArray, Raw
    from asyncflow.values import Array, Kernel, Value

_log = logging.getLogger("asyncflow.devices")

CALM = 3
"""Number of launches in a row whose outputs had gone before the next one, before outputs are lent."""

LONGER = 16
"""Number of launches by which lending begins later, for each time that a lent output was still held."""

MOST_CONFLICTS = 2
"""Number of launches that find an output of an earlier one held, before the graph is captured again."""

Result = TypeVar("Result")


# -- keys ------------------------------------------------------------------------------------------------------------


def array_key(array: CupyArray) -> Hashable:
    """The key that a graph's buffer for `array` depends on; None for one with gaps, for which there are no buffers."""
    flags = array.flags
    if flags.c_contiguous:
        return array.dtype, array.shape, "C"
    return (array.dtype, array.shape, "F") if flags.f_contiguous else None


def key_of(
    values: Sequence[Value], ndarray: type, numbers: Collection[int] = frozenset()
) -> tuple[Hashable, ...] | None:
    """The key of a region's inputs; None if there is no graph for them.

    Args:
        values: of the inputs.
        ndarray: CuPy's class.
        numbers: positions of numbers that the graph has buffers for.
    """
    key = tuple(
        [
            array_key(value)
            if isinstance(value, ndarray)
            else (value.dtype, (), "C")
            if place in numbers and isinstance(value, np.generic)
            else host_key(value)
            for place, value in enumerate(values)
        ]
    )
    return None if None in key else key


# -- capturing -------------------------------------------------------------------------------------------------------


def capture(raw: Raw, record: Callable[[], Result]) -> tuple[Raw, Result]:
    """Return the graph of the work that ``record()`` launches on the CuPy stream `raw`, and the result of ``record()``.

    Raises:
        Exception: raised by `record` or by the end of the capture. The stream does not capture any more then.
    """
    requests = active_requests()
    launched = requests.kernels
    with capturing:
        raw.begin_capture()
        try:
            result = record()
        except BaseException:
            _abandon(raw)
            raise
        finally:
            requests.kernels = launched  # captured kernels have not been launched
        return raw.end_capture(), result


def capture_in_slices(
    cupy: Cupy, memory: PrivateMemory, work: Steps[Result], launches: int
) -> Generator[None, int | None, tuple[Raw, Result]]:
    """Capture the work that `work` launches on a stream of its own, and return the graph and the result of `work`.

    Nothing is active, and no lock is held, while it is stopped. Closed there, it leaves nothing of the capture.

    Args:
        cupy: the module.
        memory: of the graph, from which `work` allocates.
        work: launches on the current stream.
        launches: see `slice_budget`.

    Raises:
        Exception: raised by `work`, or by the beginning or the end of the capture.
    """
    # Not the compute stream: other work given to it between two slices would become part of the graph. No memory is
    # allocated for this stream, so a later stream may get its address.
    raw = cupy.cuda.Stream(non_blocking=True)
    raw.begin_capture()
    budget: int | None = None
    while True:
        try:
            with memory, raw:
                work.send(budget)
            budget = slice_budget(launches, (yield))
        except StopIteration as ended:
            return raw.end_capture(), ended.value
        except BaseException:  # including cancellation of the run while this is suspended
            work.close()
            _abandon(raw)
            raise


def _abandon(raw: Raw) -> None:
    try:
        raw.end_capture()
    except Exception:  # the error that broke the capture is being raised already
        _log.debug("a broken capture was ended", exc_info=True)


class PrivateMemory:
    """Inside, allocations of a stream come from the memory of a graph.

    Other threads allocate for that stream only while they hold `capturing`, and so do not get memory of the graph.
    """

    __slots__ = ("_before", "_pool", "_stream")

    def __init__(self, stream: CudaStream, pool: CupyPool) -> None:
        self._stream = stream
        self._pool = pool
        self._before: CupyPool | None = None

    def malloc(self, nbytes: int) -> Raw:
        """A CuPy ``MemoryPointer``, of the compute stream's arena also while a loop's body is captured elsewhere.

        The two never run at the same time, and the device's pool has nothing for other streams.
        """
        with self._stream.raw:
            return self._pool.malloc(nbytes)

    def __enter__(self) -> PrivateMemory:
        capturing.acquire()
        self._before, self._stream.pool = self._stream.pool, self
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.pool = self._before
        capturing.release()


def empty_as(cupy: Cupy, array: CupyArray) -> CupyArray:
    """A new array of the dtype, shape and layout of `array`, which has no gaps."""
    return cupy.empty(array.shape, array.dtype, order="C" if array.flags.c_contiguous else "F")


def buffer_for(cupy: Cupy, value: CupyArray) -> CupyArray:
    """A buffer for arrays like `value`, or for numbers of its dtype."""
    return empty_as(cupy, value) if isinstance(value, cupy.ndarray) else cupy.empty((), value.dtype)


def without_gaps(cupy: Cupy, array: CupyArray) -> CupyArray:
    """Return `array`, or a copy if it is a view with gaps."""
    return array if array.flags.forc else cupy.ascontiguousarray(array)


def copy_into(cupy: Cupy, target: CupyArray, source: CupyArray, raw: Raw) -> None:
    """Copy between arrays of one layout, by the stream `raw`, which is the current one; or write a number."""
    if not isinstance(source, cupy.ndarray):
        target.fill(source)
        active_requests().kernels += 1
    elif source.nbytes:
        runtime = cupy.cuda.runtime
        runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, runtime.memcpyDeviceToDevice, raw.ptr)
        active_requests().copies += 1


def apart(cupy: Cupy, memory: GraphMemory, inputs: Sequence[Value], outputs: Sequence[Value]) -> list[Value]:
    """Return the outputs of a region that is being captured, each array without gaps and in memory of its own.

    No other graph writes there.
    """
    ndarray = cupy.ndarray
    seen = {id(value.data.mem) for value in inputs if isinstance(value, ndarray)}
    found: list[Value] = []
    for value in outputs:
        if isinstance(value, ndarray):
            value = without_gaps(cupy, value)
            # Memory with a home does not belong to the graph: the output is a constant.
            is_part = value.base is not None or id(value.data.mem) in seen or home_of(value) is not None
            if is_part or not memory.has_alone(value):
                with memory.alone():
                    value = value.copy()
            seen.add(id(value.data.mem))
        found.append(value)
    return found


# -- regions ---------------------------------------------------------------------------------------------------------


class Lending:
    """The choice whether a graph lends its outputs, or copies them to new arrays at each launch.

    A lent output is in memory that the next launch writes to. So lending begins once copies were gone before the next
    launch `CALM` times in a row, as in steps that are awaited one by one. If a launch finds a lent output still held,
    the region launches its kernels that time, and the graph copies again for longer.
    """

    __slots__ = ("_blocked", "_calm", "_conflicts", "_copies", "_is_out", "is_on", "outputs")

    def __init__(self, outputs: Sequence[LentMemory]) -> None:
        self.outputs = outputs
        self.is_on = self._is_out = False
        self._blocked = self._calm = self._conflicts = 0
        self._copies: list[ReferenceType[Raw]] = []

    @property
    def is_lost(self) -> bool:
        """True if outputs are held for good, as several launches in a row had to do without the graph."""
        return self._blocked > MOST_CONFLICTS

    def forbid(self) -> None:
        """Copy the outputs of all launches."""
        self._calm = -sys.maxsize

    def may_launch(self) -> bool:
        """Return True if no output of an earlier launch is held in the graph's memory; decide whether to lend."""
        if self._is_out and any(output.is_held for output in self.outputs):
            self.is_on = False
            self._blocked += 1
            self._conflicts += 1
            self._calm = -LONGER * self._conflicts
            return False
        self._is_out, self._blocked = False, 0
        if not self.is_on:
            self._calm = self._calm + 1 if all(copy() is None for copy in self._copies) else min(self._calm, 0)
            if self._copies and self._calm > CALM:
                self.is_on = all(output.shows_users for output in self.outputs)
                if not self.is_on:
                    self.forbid()
        return True

    def launched(self, copies: Sequence[CupyArray]) -> None:
        """Note a launch, with the copies of its outputs; no copies are made of lent ones."""
        self._is_out = self.is_on
        self._copies = [ref(array) for array in copies]


class InputBuffer(LentMemory):
    """Memory of a graph for an input, offered for the next copy of a value of the host.

    The value stays there until the graph is launched, so no other launch may bring a value meanwhile. As for `Lending`,
    offers begin once each value was gone before the next launch. They pause after a launch that found another run's
    value.
    """

    __slots__ = ("_calm", "_conflicts", "_is_known", "_is_out", "_source")

    def __init__(self, array: CupyArray) -> None:
        super().__init__(array)
        self._calm = self._conflicts = 0
        self._is_out = self._is_known = False
        self._source: ReferenceType[Raw] | None = None

    def offered_for(self, value: Array) -> CupyArray | None:
        """Return the memory for a copy of an array of the host; None if it is in use, or does not fit."""
        array = self.array
        fits = array.dtype == value.dtype and array.shape == value.shape and array.flags.c_contiguous
        del array  # which would count as a user
        if not fits or self._calm <= CALM or self.is_held:
            return None
        self._is_known = self._is_known or self.shows_users
        if not self._is_known:
            return None
        self._is_out = True
        return self.array

    def may_take(self, value: Value) -> bool:
        """Return True if the next launch may bring `value`; False if another value is in the memory, and in use."""
        if value is self.array:
            return True
        if self._is_out and self.is_held:
            self._conflicts += 1
            self._calm = -LONGER * self._conflicts
            return False
        self._is_out = False
        return True

    def take(self, cupy: Cupy, value: Value, raw: Raw) -> None:
        """Bring a value, by the stream `raw`, which is the current one."""
        if value is self.array:
            return
        if isinstance(value, cupy.ndarray):
            # An input that stays on the card is never gone.
            self._calm = self._calm + 1 if self._source is None or self._source() is None else min(self._calm, 0)
            self._source = ref(value)
        copy_into(cupy, self.array, value, raw)


class RegionGraph:
    """A captured region.

    What its kernels use stays as long as it does: its memory, the buffers, and the constants of the code.
    """

    __slots__ = ("_code", "_cupy", "_graph", "_inputs", "_lending", "_memory", "_outputs", "_place", "_raw")

    def __init__(
        self,
        cupy: Cupy,
        raw: Raw,
        memory: GraphMemory,
        code: GraphCode,
        graph: Raw,
        place: Buffers,
        inputs: Sequence[Value],
        outputs: Sequence[Placed],
    ) -> None:
        """Check what `recorded` has captured.

        Raises:
            NotCapturableError: an output is neither an array nor a plain value.
        """
        ndarray = cupy.ndarray
        self._cupy = cupy
        self._raw = raw
        # Buffers also keep their blocks alive, but a region may have none, and the graph has addresses of temporaries.
        self._memory = memory
        self._code = code
        self._graph = graph
        self._place = place
        self._inputs = [InputBuffer(buffer) if isinstance(buffer, ndarray) else None for buffer in inputs]
        self._outputs = [LentMemory(value) if isinstance(value, ndarray) else value for value in outputs]
        self._lending = Lending([output for output in self._outputs if type(output) is LentMemory])
        for value in outputs:
            if not isinstance(value, ndarray | np.ndarray) and not is_plain(value):
                raise NotCapturableError(f"it gives {a_kind(type(value))}")

    @property
    def held(self) -> dict[object, int]:
        """Bytes of each block of memory that it uses, for `Plan.explain`."""
        return self._memory.held

    @property
    def lending(self) -> Lending:
        """The choice about its outputs."""
        return self._lending

    @classmethod
    def recorded(
        cls,
        cupy: Cupy,
        raw: Raw,
        memory: GraphMemory,
        private: PrivateMemory,
        code: GraphCode,
        inputs: Sequence[Value],
        place: Buffers,
        launches: int,
        fed: Collection[int] = (),
    ) -> Generator[None, int | None, RegionGraph]:
        """Capture a call of a region's code, in slices.

        Args:
            cupy: the module.
            raw: the CuPy stream on which the graph will be launched.
            memory: of the graph.
            private: has allocations come from `memory`.
            code: of the region.
            inputs: of a call.
            place: buffers of the variables.
            launches: see `slice_budget`.
            fed: positions of inputs whose buffers are offered to the device.
        """
        ndarray = cupy.ndarray

        def start(position: int, value: Value) -> Value:
            if not isinstance(value, ndarray) and position not in code.numbers:
                return value
            # A fed value stays until the launch: no other graph may have the memory for its temporaries.
            with memory.alone() if position in fed else nullcontext():
                return buffer_for(cupy, value)

        def record() -> Steps[tuple[list[Value], list[Placed]]]:
            starts = [start(position, value) for position, value in enumerate(inputs)]
            # The graph keeps the buffers, not their arrays: references to an array show that a reader has it.
            variables = [buffer.array for buffer in place]
            outputs, left = yield from code.steps(starts, variables)
            # Unchanged variables need no store.
            ends = [None if end is start else end for end, start in zip(left, variables, strict=True)]
            kept = stored(cupy, cupy.cuda.get_current_stream(), place, outputs, ends)
            return starts, apart(cupy, memory, starts, kept)

        graph, (starts, outputs) = yield from capture_in_slices(cupy, private, record(), launches)
        return cls(cupy, raw, memory, code, graph, place, starts, outputs)

    def offer(self, position: int, value: Array) -> CupyArray | None:
        """Return the memory of an input for a copy of `value`; None if it is in use, or does not fit."""
        buffer = self._inputs[position]
        return None if buffer is None else buffer.offered_for(value)

    def launch(self, inputs: Sequence[Value], variables: RegionVariables) -> tuple[Placed, ...] | None:
        """The outputs for `inputs`; variables have their new values afterwards.

        Outputs are copied to new arrays, or lent in the graph's memory; see `Lending`.

        None, with nothing launched, if the value of a variable, an earlier output, or a fed value of another run is in
        use.

        Raises:
            MemoryLimitExceeded: new arrays do not fit; nothing was launched.
            NotLaunchedError: the card has refused it; nothing was launched.
        """
        cupy, raw, lending = self._cupy, self._raw, self._lending
        brought = [(buffer, x) for buffer, x in zip(self._inputs, inputs, strict=True) if buffer is not None]
        with capturing:  # readers on other threads wait here until the launch is in the stream
            if not all(buffer.may_take(x) for buffer, x in brought):
                return None
            if not lending.may_launch():
                return None
            copies = [] if lending.is_on else [empty_as(cupy, output.array) for output in lending.outputs]
            try:
                if not variables.take(self._place):
                    return None
                for buffer, x in brought:
                    buffer.take(cupy, x, raw)
                self._graph.launch(stream=raw)
            except RuntimeError as error:
                raise NotLaunchedError(error) from error
        active_requests().graphs += 1
        # From here on variables have changed: an error ends the run.
        if not lending.is_on:
            for result, output in zip(copies, lending.outputs, strict=True):
                copy_into(cupy, result, output.array, raw)
        lending.launched(copies)
        arrays = iter([output.array for output in lending.outputs] if lending.is_on else copies)
        return tuple([next(arrays) if type(output) is LentMemory else output for output in self._outputs])


@dataclass(slots=True, eq=False, repr=False)
class CapturedRegion:
    """A region's function, which becomes a CUDA graph for each kind of inputs it is called with again and again.

    All calls belong inside ``with stream:``. Nothing is captured before the first ones.

    Attributes:
        cupy: the module.
        stream: the compute stream that the region runs on.
        pool: where the device's memory comes from.
        function: takes CuPy's arrays and host values, launches on the current stream, and gives a tuple of them; or a
            generator that returns the tuple, and is sent how much to do at a time.
        label: for logs, and for what the memory of its graphs is called.
        code: of its graphs.
        buffers: memory of the device's variables; None for code without any.
        takes_context: the first argument of `function` is a context, which graphs do without.
        launches: number of kernels that the function launches until it may stop.
        slices: number of steps so far that captured, and launched nothing.
        graphs: the CUDA graphs that it has become.
    """

    cupy: Cupy
    stream: CudaStream
    pool: CudaPool
    function: Kernel
    label: str
    code: GraphCode
    buffers: BuffersByVariable | None = None
    takes_context: bool = False
    launches: int = 1
    slices: int = field(default=0, init=False)
    graphs: GraphCache[RegionGraph] = field(init=False)
    _variables: RegionVariables = field(init=False)
    _has_lost: bool = field(default=False, init=False)  # True once the outputs of a graph were held for good
    _fed: set[int] = field(default_factory=set, init=False)  # positions of inputs that memory was asked for

    def __post_init__(self) -> None:
        self.graphs = GraphCache(self.label, self.pool.graphs)
        self._variables = RegionVariables(self.cupy, self.stream, self.buffers, self.code.variables)

    def __call__(self, *inputs: Value) -> tuple[Placed, ...]:
        """Return the results of `function` for these inputs."""
        outputs: tuple[Value, ...] | None = run_to_end(self._launched(inputs))
        if outputs is None:
            with self._counted(inputs):
                outputs = self.function(*inputs)
        return outputs

    def steps(self, *inputs: Value) -> Steps[tuple[Placed, ...]]:
        """`__call__`, for a function that gives a generator: it is driven as that is, and a graph is one step.

        A call that captures stops between slices. It launches the graph afterwards, for the values of variables then.
        """
        outputs: tuple[Value, ...] | None = yield from self._launched(inputs)
        if outputs is None:
            with self._counted(inputs):
                outputs = yield from self.function(*inputs)
        return outputs

    def ahead(self, *inputs: Value) -> Steps[tuple[Placed, ...]]:
        """Capture a graph for such inputs before the first call, in steps; variables stay as they are.

        The code of the graph is run once before, which compiles its kernels. It writes to no variable.
        """
        inputs = inputs[1:] if self.takes_context else inputs
        key, variables = self._key(inputs), self._variables
        if self.graphs.may_begin(key):
            try:
                with self.graphs.rehearsing():
                    yield from self.code.steps(inputs, [variable.given() for variable in self.code.variables])
            except MemoryLimitExceeded as error:
                error.__traceback__ = None  # not an error of the run: without a graph, it may move values to the host
                return ()
            place = variables.choose() if self.graphs.may_begin(key) and self._key(inputs) == key else None
            if place is not None:
                with self.graphs.capturing(key, place) as keep:
                    keep((yield from self._captured(inputs, place)))
        return ()

    def offer(self, position: int, value: Array) -> CupyArray | None:
        """Return memory of a graph for the copy of an array that is fed as one of the inputs; None for new memory."""
        self._fed.add(position)
        offers = (graph.offer(position, value) for graph in self.graphs.made)
        return next((array for array in offers if array is not None), None)

    @contextmanager
    def _counted(self, inputs: Sequence[Value]) -> Iterator[None]:
        """Count the calls of `function` in a block, without failed calls, before a capture."""
        try:
            yield
        except Exception:
            self.graphs.forget_calls(self._key(inputs[1:] if self.takes_context else inputs))
            raise

    def _key(self, inputs: Sequence[Value]) -> tuple[Hashable, ...] | None:
        """The key of a graph for `inputs` and the present values of variables; None if there is none."""
        own, kinds = key_of(inputs, self.cupy.ndarray, self.code.numbers), self._variables.kinds()
        return None if own is None or kinds is None else (*own, *kinds)

    def _launched(self, inputs: Sequence[Value]) -> Steps[tuple[Placed, ...] | None]:
        """The outputs of a graph; None if there is none for such inputs, or no room for it."""
        graphs, variables = self.graphs, self._variables
        inputs = inputs[1:] if self.takes_context else inputs
        own = None if graphs.is_refused else key_of(inputs, self.cupy.ndarray, self.code.numbers)
        has_captured = False
        while not graphs.is_refused:
            # Search the place in each round: other runs may have moved the variables during the capture.
            kinds = variables.kinds()
            key = None if own is None or kinds is None else (*own, *kinds)
            place = None
            if graphs.has_graph(key):
                place = variables.choose()
                # None if both buffers of a variable are in use: do not delay a run that can launch without a graph.
                if place is None:
                    return None
                graph = graphs.find(key, place)
                if graph is not None:
                    self.pool.graph_launched = self.code.extent
                    outputs = graphs.results(graph, lambda graph: graph.launch(inputs, variables))
                    if graph.lending.is_lost:
                        self._has_lost = True
                        graphs.drop(key, place)
                    return outputs
            if has_captured or not graphs.is_due(key):
                return None
            place = variables.choose() if place is None else place
            if place is None:
                return None
            with graphs.capturing(key, place) as keep:
                keep((yield from self._captured(inputs, place)))
            # Meanwhile other runs may have changed the variables, even to shapes for which no graph exists.
            has_captured = True
        return None

    def _captured(self, inputs: Sequence[Value], place: Buffers) -> Steps[RegionGraph]:
        memory = GraphMemory(self.cupy, self.pool, blocks_of(self.stream), f"CUDA graph of {self.label}")
        private = PrivateMemory(self.stream, memory)
        recorded = RegionGraph.recorded(
            self.cupy, self.stream.raw, memory, private, self.code, inputs, place, self.launches, self._fed
        )
        budget = None
        try:
            while True:
                self.slices += 1
                recorded.send(budget)
                budget = yield None
        except StopIteration as ended:
            graph: RegionGraph = ended.value
            if self._has_lost:
                graph.lending.forbid()
            return graph
        finally:
            recorded.close()
