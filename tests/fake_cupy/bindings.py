"""`cuda.bindings.driver` and `.runtime` of a fake: conditional nodes, in the calls and types of version 13."""

# ruff: noqa: N801, N815 - the names of CUDA

from __future__ import annotations

import ctypes
import enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.fake_cupy import graphs
from tests.fake_cupy.errors import CUDADriverError, CUDARuntimeError, driver_name
from tests.fake_cupy.graphs import CapturedGraph, Step

if TYPE_CHECKING:
    from tests.fake_cupy.module import FakeCupy


class CUresult(enum.IntEnum):
    """The error codes of the driver."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_SUPPORTED = 801

    @classmethod
    def _missing_(cls, value: object) -> CUresult:
        assert isinstance(value, int)
        made = int.__new__(cls, value)
        made._name_, made._value_ = driver_name(value), value
        return made


class cudaStreamCaptureMode(enum.IntEnum):
    """As in CUDA."""

    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1
    cudaStreamCaptureModeRelaxed = 2


class cudaStreamCaptureStatus(enum.IntEnum):
    """As in CUDA."""

    cudaStreamCaptureStatusNone = 0
    cudaStreamCaptureStatusActive = 1
    cudaStreamCaptureStatusInvalidated = 2


class cudaStreamUpdateCaptureDependenciesFlags(enum.IntEnum):
    """As in CUDA."""

    cudaStreamAddCaptureDependencies = 0
    cudaStreamSetCaptureDependencies = 1


class CUgraphNodeType(enum.IntEnum):
    """As in CUDA."""

    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_CONDITIONAL = 13


class CUgraphConditionalNodeType(enum.IntEnum):
    """As in CUDA."""

    CU_GRAPH_COND_TYPE_IF = 0
    CU_GRAPH_COND_TYPE_WHILE = 1
    CU_GRAPH_COND_TYPE_SWITCH = 2


CU_GRAPH_COND_ASSIGN_DEFAULT = 1


SIZES = {
    CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF: (1, 2),
    CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE: (1,),
}
"""Number of bodies of a node, by kind."""


class Handle:
    """A handle, which knows its object."""

    def __init__(self, ptr: int, thing: Any = None) -> None:
        self.ptr = ptr
        self.thing = thing

    def __int__(self) -> int:
        return self.ptr


class CUcontext(Handle):
    """A context."""


class CUgraph(Handle):
    """A graph; its thing is a `CapturedGraph`."""


class CUgraphNode(Handle):
    """A node; its thing is a `Step`."""


class CUfunction(Handle):
    """A kernel, by the handle that CuPy's function has."""


class CUgraphConditionalHandle(Handle):
    """The value that a conditional node looks at."""


class ConditionalParams:
    """`CUDA_CONDITIONAL_NODE_PARAMS`."""

    def __init__(self) -> None:
        self.handle: CUgraphConditionalHandle | None = None
        self.ctx: CUcontext | None = None
        self.type: CUgraphConditionalNodeType | None = None
        self.size = 0
        self.phGraph_out: list[CUgraph] = []


class CUgraphNodeParams:
    """The node that `cuGraphAddNode` adds."""

    def __init__(self) -> None:
        self.type: Any = None
        self.conditional = ConditionalParams()


class Bindings:
    """The functions that capture loops; `fake.cuda` is their other half.

    Attributes:
        has_else: IF nodes may have a second body; not so before CUDA 12.8.
        can_write: streams can write numbers into memory; not so on some drivers.
    """

    def __init__(self, fake: FakeCupy) -> None:
        self.has_else = True
        self.can_write = True
        self._fake = fake
        self._engine = fake.engine
        self.driver = SimpleNamespace(
            CUgraphNodeParams=CUgraphNodeParams,
            CUgraphNodeType=CUgraphNodeType,
            CUgraphConditionalNodeType=CUgraphConditionalNodeType,
            cuCtxGetCurrent=lambda: (CUresult.CUDA_SUCCESS, CUcontext(0x77)),
            cuGraphConditionalHandleCreate=self.handle_create,
            cuGraphAddNode=self.add_node,
            CUfunction=CUfunction,
            cuLaunchKernel=self.launch_kernel,
            cuStreamWriteValue32=self.write_value,
        )
        self.runtime = SimpleNamespace(
            cudaStreamCaptureMode=cudaStreamCaptureMode,
            cudaStreamCaptureStatus=cudaStreamCaptureStatus,
            cudaStreamUpdateCaptureDependenciesFlags=cudaStreamUpdateCaptureDependenciesFlags,
            cudaStreamGetCaptureInfo=self.capture_info,
            cudaStreamUpdateCaptureDependencies=self.update_dependencies,
            cudaStreamBeginCaptureToGraph=self.begin_to_graph,
            cudaStreamEndCapture=self.end_capture,
            cudaStreamGetDevice=self.stream_device,
        )

    def launch_kernel(
        self,
        function: CUfunction,
        *extents: int,
    ) -> tuple[CUresult]:
        """Launch a raw kernel with the parameters at an address; see `RawKernel.launch`."""
        *grid_and_block, shared_nbytes, stream, record, extra = extents
        if len(grid_and_block) != 6:
            raise TypeError("cuLaunchKernel(f, gx, gy, gz, bx, by, bz, sharedMemBytes, hStream, kernelParams, extra)")
        if extra or not all(isinstance(given, int) for given in extents) or not all(grid_and_block):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        try:
            kernel = self._fake.raw_kernels[int(function)]
            kernel.launch(grid_and_block, shared_nbytes, self._queue(stream), record)
        except (CUDARuntimeError, CUDADriverError) as error:
            return (CUresult(error.status),)
        return (CUresult.CUDA_SUCCESS,)

    def handle_create(self, graph: Any, ctx: Any, default: int, flags: int) -> tuple[Any, ...]:
        if not isinstance(graph, CUgraph) or not isinstance(ctx, CUcontext):
            raise TypeError("cuGraphConditionalHandleCreate(graph, ctx, default, flags)")
        try:
            self._engine.enter("cuGraphConditionalHandleCreate", 0)
        except CUDARuntimeError:
            return CUresult.CUDA_ERROR_NOT_SUPPORTED, None
        if flags not in (0, CU_GRAPH_COND_ASSIGN_DEFAULT):
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        ptr = self._engine.new_ptr()
        graph.thing.defaults[ptr] = default if flags else None
        return CUresult.CUDA_SUCCESS, CUgraphConditionalHandle(ptr)

    def add_node(
        self, graph: CUgraph, dependencies: Any, data: Any, count: int, params: CUgraphNodeParams
    ) -> tuple[Any, ...]:
        """Adds a conditional node, and gives its empty bodies in ``params.conditional.phGraph_out``."""
        asked = params.conditional
        if not all(isinstance(node, CUgraphNode) for node in dependencies) or count != len(dependencies):
            raise TypeError("Argument 'dependencies' is not instance of type (expected tuple[CUgraphNode])")
        if params.type is not CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL or data is not None:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        if asked.handle is None or asked.ctx is None or asked.type not in SIZES:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        if asked.size not in SIZES[asked.type]:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        if asked.size > 1 and not self.has_else:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        owners = [one for one in graph.thing.line() if int(asked.handle) in one.defaults]
        if not owners or int(asked.handle) in owners[0].used:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        owners[0].used.add(int(asked.handle))
        step = Step("conditional", None, [node.thing for node in dependencies])
        step.handle = int(asked.handle)
        step.is_loop = asked.type is CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
        step.bodies = [CapturedGraph(self._engine.new_ptr(), parent=graph.thing) for _ in range(asked.size)]
        graph.thing.steps.append(step)
        asked.phGraph_out = [CUgraph(body.ptr, body) for body in step.bodies]
        return CUresult.CUDA_SUCCESS, CUgraphNode(self._engine.new_ptr(), step)

    def write_value(self, stream: int, address: int, value: int, flags: int) -> tuple[int]:
        """Write a number of 32 bits into pinned memory, after the stream's earlier work."""
        queue = self._queue(stream)
        memory = self._fake.memory_map
        if queue.capture is not None:
            raise queue.capture.break_with(900)  # each launch of the graph would write the number of one ticket
        if not self.can_write:
            return (CUresult.CUDA_ERROR_NOT_SUPPORTED,)
        if flags or address % 4 or not memory.is_pinned(address, 4):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        try:
            self._engine.enter("cuStreamWriteValue32", queue.device)
        except CUDARuntimeError as error:
            return (error.status,)
        word = ctypes.c_uint32.from_address(address)

        def write() -> None:
            word.value = value

        self._engine.give(queue, "cuStreamWriteValue32", write, internal=True)
        return (CUresult.CUDA_SUCCESS,)

    def stream_device(self, stream: int) -> tuple[Any, ...]:
        try:
            return CUresult.CUDA_SUCCESS, self._queue(stream).device
        except CUDARuntimeError as error:
            return error.status, None

    def capture_info(self, stream: int) -> tuple[Any, ...]:
        """``(error, status, id, graph, dependencies, edges, count)``."""
        capture = self._queue(stream).capture
        status = cudaStreamCaptureStatus
        if capture is None:
            return CUresult.CUDA_SUCCESS, status.cudaStreamCaptureStatusNone, 0, None, None, None, 0
        if capture.invalid:
            return CUresult.CUDA_SUCCESS, status.cudaStreamCaptureStatusInvalidated, 0, None, None, None, 0
        nodes = [CUgraphNode(self._engine.new_ptr(), step) for step in capture.last]
        graph = CUgraph(capture.graph.ptr, capture.graph)
        found: tuple[Any, ...] = status.cudaStreamCaptureStatusActive, capture.ident, graph, nodes, [], len(nodes)
        return CUresult.CUDA_SUCCESS, *found

    def update_dependencies(
        self, stream: int, nodes: list[CUgraphNode], data: Any, count: int, flags: Any
    ) -> tuple[CUresult]:
        capture = self._queue(stream).capture
        if capture is None or data is not None or count != len(nodes):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        steps = tuple(node.thing for node in nodes)
        is_set = flags == cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
        capture.last = steps if is_set else (*capture.last, *steps)
        return (CUresult.CUDA_SUCCESS,)

    def begin_to_graph(
        self, stream: int, graph: CUgraph, dependencies: Any, data: Any, count: int, mode: Any
    ) -> tuple[CUresult]:
        if not isinstance(mode, cudaStreamCaptureMode):
            raise TypeError(f"Argument 'mode' is not instance of type cudaStreamCaptureMode: {mode!r}")
        if dependencies is not None or data is not None or count:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        graphs.begin(self._engine, self._queue(stream), graph.thing)
        return (CUresult.CUDA_SUCCESS,)

    def end_capture(self, stream: int) -> tuple[Any, ...]:
        try:
            captured = graphs.end(self._engine, self._queue(stream))
        except CUDARuntimeError:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        return CUresult.CUDA_SUCCESS, CUgraph(captured.ptr, captured)

    def _queue(self, stream: int) -> Any:
        return self._engine.queue(stream, self._fake.cuda.runtime.getDevice())
