"""Loops that a GPU runs by itself: its own result decides whether another iteration follows, the host is not asked.

The loop is one CUDA graph. Its conditional node of type WHILE holds the body and runs it again while a handle is not
zero, and a kernel of one thread (`SOURCE`) sets the handle from the predicate: once before the node, which decides on
the first iteration, and at the end of the body. The loop variables are in fixed buffers, written in place::

    predicate of the buffers → set_cond → WHILE [ next values → buffers → predicate of the buffers → set_cond ]

CuPy captures kernels but has no conditional nodes, so those few calls are made through `cuda.bindings`: handles of
streams and graphs are the driver's, and the same for both.

A launch makes at most `most` iterations, so that no loop takes hold of the device for ever; who calls it looks at the
count and goes on with the values it gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from asyncflow.devices.cuda_graph import (
    GraphCache,
    NotCapturableError,
    PrivateMemory,
    array_key,
    capture,
    copy_into,
    empty_as,
    key_of,
)
from asyncflow.devices.memory import MemoryLimitExceeded

if TYPE_CHECKING:
    from collections.abc import Hashable

    from asyncflow.devices.cuda_bindings import Bindings
    from asyncflow.devices.cuda_memory import CudaPool
    from asyncflow.streams.cuda import CudaStream

SOURCE = """
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);

extern "C" __global__ void set_cond(unsigned long long handle, const bool* pred, long long* count, long long most)
{
    cudaGraphSetConditional(handle, (*pred && (*count)++ < most) ? 1u : 0u);
}
"""
"""NVRTC has no header that declares the function; the driver finds it when it loads the kernel."""

MOST_ITERATIONS = 1 << 16
"""Of a launch: some tenths of a second, after which whoever runs the loop can stop it."""

Body: TypeAlias = Callable[..., Sequence[Any]]
"""Takes the loop variables and what the loop captures, and gives the next values of the variables."""

Condition: TypeAlias = Callable[..., Any]
"""Takes the same, and gives a boolean with one element."""


class Iterated(NamedTuple):
    """What a launch will have computed.

    Attributes:
        values: of the loop variables, new arrays.
        count: an int64 array of rank 0: how many iterations; more than there may be where the loop has not ended.
    """

    values: tuple[Any, ...]
    count: Any


class LoopGraph:
    """A captured loop; what its kernels use stays as long as it does."""

    __slots__ = ("_captures", "_count", "_cupy", "_functions", "_graph", "_kernel", "_raw", "_side", "_variables")

    def __init__(
        self,
        cupy: Any,
        raw: Any,
        bindings: Bindings,
        functions: tuple[Condition, Body],
        variables: Sequence[Any],
        captures: Sequence[Any],
        most: int,
    ) -> None:
        """Capture; a private pool is the stream's pool meanwhile. The arguments are those of `DeviceLoop`."""
        self._cupy = cupy
        self._raw = raw
        self._functions = functions
        self._kernel = cupy.RawModule(code=SOURCE).get_function("set_cond")
        self._variables = [_buffer_for(cupy, value) for value in variables]
        self._captures = [empty_as(cupy, x) if isinstance(x, cupy.ndarray) else x for x in captures]
        self._count = cupy.zeros((), np.int64)
        # Never given memory of its own: see `PrivateMemory`.
        self._side = cupy.cuda.Stream(non_blocking=True)
        self._fill(variables, captures)
        # Compiles all kernels: in a capture nothing may have to be loaded.
        self._iterate()
        self._predicate()
        self._graph, _ = capture(raw, lambda: self._record(bindings, most))

    def launch(self, variables: Sequence[Any], captures: Sequence[Any]) -> Iterated:
        """Run the loop from these values.

        Raises:
            MemoryLimitExceeded: the results do not fit; nothing was launched.
        """
        cupy, raw = self._cupy, self._raw
        results = [empty_as(cupy, buffer) for buffer in (*self._variables, self._count)]
        self._fill(variables, captures)
        cupy.cuda.runtime.memsetAsync(self._count.data.ptr, 0, self._count.nbytes, raw.ptr)
        self._graph.launch(stream=raw)
        for result, buffer in zip(results, (*self._variables, self._count), strict=True):
            copy_into(cupy, result, buffer, raw)
        *values, count = results
        return Iterated(tuple(values), count)

    def _fill(self, variables: Sequence[Any], captures: Sequence[Any]) -> None:
        cupy = self._cupy
        for buffer, value in zip((*self._variables, *self._captures), (*variables, *captures), strict=True):
            if isinstance(value, cupy.ndarray):
                copy_into(cupy, buffer, value, self._raw)
            elif isinstance(buffer, cupy.ndarray):
                buffer.fill(value)

    # -- what is captured ----------------------------------------------------------------------------------------

    def _predicate(self) -> Any:
        pred = self._functions[0](*self._variables, *self._captures)
        if not isinstance(pred, self._cupy.ndarray) or pred.dtype != np.bool_ or pred.size != 1:
            raise NotCapturableError("its predicate is not computed on the device")
        return pred

    def _iterate(self) -> None:
        """Put the next values in the place of the current ones."""
        values = list(self._functions[1](*self._variables, *self._captures))
        places = {buffer.data.mem.ptr: buffer for buffer in self._variables if buffer.nbytes}
        for index, (buffer, value) in enumerate(zip(self._variables, values, strict=True)):
            _check_fits(buffer, value)
            # One variable's next value may be another's current one, or a view of its own.
            if isinstance(value, self._cupy.ndarray) and value is not buffer and value.data.mem.ptr in places:
                values[index] = value.copy()
        for buffer, value in zip(self._variables, values, strict=True):
            if not isinstance(value, self._cupy.ndarray):
                buffer.fill(value)
            elif value is not buffer:
                self._cupy.copyto(buffer, value)

    def _record(self, bindings: Bindings, most: int) -> None:
        driver, runtime, main, side = bindings.driver, bindings.runtime, self._raw.ptr, self._side.ptr
        _, _, graph, *_ = _ok(runtime.cudaStreamGetCaptureInfo(main))
        (context,) = _ok(driver.cuCtxGetCurrent())
        (handle,) = _ok(driver.cuGraphConditionalHandleCreate(graph, context, 0, 0))

        def decide() -> None:
            self._kernel((1,), (1,), (np.uint64(int(handle)), self._predicate(), self._count, np.int64(most)))

        decide()
        _, _, graph, dependencies, *_ = _ok(runtime.cudaStreamGetCaptureInfo(main))
        params = while_node(driver, handle, context)
        (node,) = _ok(driver.cuGraphAddNode(graph, dependencies, None, len(dependencies), params))
        flags = runtime.cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
        _ok(runtime.cudaStreamUpdateCaptureDependencies(main, [node], None, 1, flags))
        body = params.conditional.phGraph_out[0]
        # Relaxed: the pool may have to ask CUDA for memory.
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        _ok(runtime.cudaStreamBeginCaptureToGraph(side, body, None, None, 0, mode))
        try:
            with self._side:
                self._iterate()
                decide()
        finally:
            # Not `end_capture`, which would make a graph of its own of the body; the node owns it.
            ended = runtime.cudaStreamEndCapture(side)
        _ok(ended)


def while_node(driver: Any, handle: Any, context: Any) -> Any:
    """What ``cuGraphAddNode`` makes a WHILE node of."""
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    conditional = params.conditional
    conditional.handle, conditional.ctx, conditional.size = handle, context, 1
    conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
    return params


def _ok(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of a call of the bindings."""
    code, *values = result
    if int(code):
        raise NotCapturableError(f"CUDA says {code!r}")
    return tuple(values)


def _buffer_for(cupy: Any, value: Any) -> Any:
    is_array = isinstance(value, cupy.ndarray)
    return empty_as(cupy, value) if is_array else cupy.empty((), np.asarray(value).dtype)


def _check_fits(buffer: Any, value: Any) -> None:
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    if (dtype, shape) != (buffer.dtype, buffer.shape):
        raise NotCapturableError(f"a variable of {buffer.dtype}{buffer.shape} becomes {dtype}{shape}")


class DeviceLoop:
    """A loop over raw arrays; for each kind of values it is captured once, and one launch runs it.

    All calls belong inside ``stream.activate()``.

    Attributes:
        condition, body: as given.
        most: iterations of a launch, at most.
    """

    __slots__ = ("_bindings", "_cupy", "_graphs", "_label", "_pool", "_stream", "body", "condition", "most")

    def __init__(
        self,
        cupy: Any,
        stream: CudaStream,
        pool: CudaPool,
        bindings: Bindings | None,
        condition: Condition,
        body: Body,
        label: str,
        *,
        most: int = MOST_ITERATIONS,
    ) -> None:
        """Nothing is captured before the first launch.

        Args:
            cupy: the module.
            stream: the compute stream that the loop runs on.
            pool: where the device's memory comes from.
            bindings: see `cuda_bindings`; None: nothing is captured.
            condition: with `body`, what the loop does. Both launch on the current stream; dtypes and shapes of the
                variables never change. They may be run once more than the loop needs.
            body: see `condition`.
            label: for logs, and for what the memory of its graphs is called.
            most: iterations of a launch, at least 1.

        Raises:
            ValueError: `most` is less than 1.
        """
        if most < 1:
            raise ValueError(f"a launch of {label!r} makes at least 1 iteration; got most={most}")
        self._cupy = cupy
        self._stream = stream
        self._pool = pool
        self._bindings = bindings
        self.condition = condition
        self.body = body
        self.most = most
        self._label = label
        self._graphs: GraphCache[LoopGraph] = GraphCache(label, warm_ups=0)

    def launch(self, variables: Sequence[Any], captures: Sequence[Any] = ()) -> Iterated | None:
        """Start the loop, or go on with it; nothing is waited for.

        Args:
            variables: CuPy's arrays, and NumPy scalars for variables that begin on the host.
            captures: arrays and host values that do not change; host values are part of what is captured.

        Returns:
            The variables after no more than `most` iterations, all of them arrays; None where the loop cannot be
            captured, or has no room, and the host has to drive it.
        """
        bindings = self._bindings
        if bindings is None or self._graphs.is_refused:
            return None
        key = self._key(variables, captures)
        if key is None:
            return None
        graph = self._graphs.get(key, lambda: self._captured(bindings, variables, captures))
        if graph is None:
            return None
        try:
            return graph.launch(variables, captures)
        except MemoryLimitExceeded as error:
            del graph
            self._graphs.refuse(error)
            return None

    def release(self) -> None:
        """Drop all graphs, as memory is short; launches in flight are done first. Launches capture anew."""
        self._graphs.clear()

    def _key(self, variables: Sequence[Any], captures: Sequence[Any]) -> Hashable:
        ndarray = self._cupy.ndarray
        shapes: list[Hashable] = []
        for value in variables:
            shape = array_key(value) if isinstance(value, ndarray) else _scalar_key(value)
            if shape is None:
                return None
            shapes.append(shape)
        captured = key_of(captures, ndarray)
        return None if captured is None else (*shapes, *captured)

    def _captured(self, bindings: Bindings, variables: Sequence[Any], captures: Sequence[Any]) -> LoopGraph:
        functions = self.condition, self.body
        with PrivateMemory(self._stream, self._pool, f"CUDA graph of {self._label}"):
            return LoopGraph(self._cupy, self._stream.raw, bindings, functions, variables, captures, self.most)


def _scalar_key(value: Any) -> Hashable:
    """Of a variable's first value, which is copied in: its dtype."""
    is_number = isinstance(value, np.generic) and (value.dtype.kind in "biufc" or value.dtype.name == "bfloat16")
    return (value.dtype, (), "C") if is_number else None


__all__ = ["MOST_ITERATIONS", "SOURCE", "Body", "Condition", "DeviceLoop", "Iterated", "LoopGraph", "while_node"]
