"""Conditional nodes of CUDA graphs: their content runs once, or again and again, or not at all, as a kernel decides.

CuPy captures kernels but has no conditional nodes, so those few calls are made through `cuda.bindings`: handles of
streams and graphs are the driver's, and the same for both. A node looks at the value of its handle, which a kernel of
one thread sets (`SOURCE`)::

    IF     predicate → set_branch → IF [ true branch → results | false branch → results ]
    WHILE  variables, predicate → set_loop → WHILE [ next values → variables → predicate → set_loop ]

A handle's default value would be its value when the graph is launched, and never again: in a loop it keeps its last set
value. So no handle has a default here: whenever a node is about to run, a kernel has just set its handle.

An IF node has both branches (CUDA 12.8 and later; older versions refuse the node, and the host drives the loop). Two
nodes with one branch each would do as well, with two handles that have to be set to opposite values. With one handle
exactly one branch runs, whatever the value is, and it is one node and one kernel less an iteration.

Bodies may hold kernels, copies and fills of device memory, and conditional nodes; no allocations and no events. Memory
is taken from a `PrivateMemory`: memory that a body frees during capture is taken by later work, in that body or behind
its node, and only there. Memory that a body uses from outside must not be freed before the body ends, because another
iteration reads it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncflow.devices.captures import NotCapturableError

if TYPE_CHECKING:
    from asyncflow.streams.cuda.bindings import Bindings
    from asyncflow.streams.cuda.cupy_types import Cupy, Raw
    from asyncflow.values import Value

ENDED, STOPPED, GIVEN_UP, TOO_LONG, FULL = range(5)
"""Outcomes of a launch: ended by the predicate; or stopped, to be launched again with the values that it gave.

Or its values are void: a loop inside passes its limit, loops inside went on for too long, or one of their logs is full.
"""

SOURCE = """
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);

// The state of a launch: iterations of its loop, how it came out, iterations of the loops inside; its limits; and the
// number of the log that is full. Behind it, the entries of each log.

extern "C" __global__ void set_loop(unsigned long long handle, const bool* pred, long long* state)
{
    const long long most = state[3], inside = state[4];
    unsigned int goes_on = 0;
    if (*pred && state[1] == 0) {
        if (state[0] < most && state[2] < inside) {
            ++state[0];
            goes_on = 1;
        } else {
            state[1] = 1;
        }
    }
    cudaGraphSetConditional(handle, goes_on);
}

extern "C" __global__ void set_inner_loop(
    unsigned long long handle, const bool* pred, long long* state, long long* count)
{
    const long long too_long = state[5], most = state[6];
    unsigned int goes_on = 0;
    if (*pred && state[1] < 2) {
        if (*count >= most) {
            state[1] = 2;
        } else if (state[2] >= too_long) {
            state[1] = 3;
        } else {
            ++*count;
            ++state[2];
            goes_on = 1;
        }
    }
    cudaGraphSetConditional(handle, goes_on);
}

extern "C" __global__ void set_branch(unsigned long long handle, const bool* pred)
{
    cudaGraphSetConditional(handle, *pred ? 1u : 0u);
}
"""
"""NVRTC has no header that declares the function; the driver finds it when it loads the kernels."""

MOST_ITERATIONS = 1 << 16
"""Of any launch."""

FULL_LOG = 7
"""Position in a state of the number of the log that is full; the numbers of entries of all logs come behind."""

INSIDE = 4
"""Iterations of all loops inside for each iteration that a launch may make."""

_PATIENCE = 4
_NO_LIMIT = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a launch, in iterations.

    Attributes:
        most: of its loop, at least 1.
        inside: of all loops inside, at least 1. A launch that has made this number stops after its current iteration,
            and a launch that makes four times as many gives that iteration up. None: four times `most`.
        inner: of a loop inside, each time that it starts; None: no limit of its own.
    """

    most: int = MOST_ITERATIONS
    inside: int | None = None
    inner: int | None = None

    def __post_init__(self) -> None:
        if self.most < 1 or (self.inside is not None and self.inside < 1):
            raise ValueError(f"a launch makes at least 1 iteration; got {self}")

    def state(self) -> tuple[int, ...]:
        """Of a launch that begins; see `SOURCE`."""
        inside = INSIDE * self.most if self.inside is None else self.inside
        return 0, 0, 0, self.most, inside, inside * _PATIENCE, _NO_LIMIT if self.inner is None else self.inner, 0


class GatedPlace(NamedTuple):
    """A place in a sequence of work that runs depending on a predicate.

    Attributes:
        decide: lets the value that a boolean array with one element then has decide.
        bodies: gives one body for a loop, two for a branch: work launched inside, in this order, runs in the chosen
            body.
    """

    decide: Callable[[Value], object]
    bodies: Callable[[], Sequence[AbstractContextManager[None]]]


@dataclass(slots=True, eq=False, repr=False)
class Rehearsal:
    """Runs each body once, whatever was decided, so that everything is compiled, and all that is unfit shows up.

    It makes no nodes; `ConditionalNodes` does, on the current stream.

    Attributes:
        depth: how many nodes were inside one another.
    """

    depth: int = 0
    _depth: int = 0

    def loop(self) -> GatedPlace:
        """The loop of a launch."""
        return GatedPlace(lambda pred: None, lambda: [self.body()])

    inner_loop = loop

    def branch(self) -> GatedPlace:
        """A branch inside."""
        return GatedPlace(lambda pred: None, lambda: [self.body(), self.body()])

    @contextmanager
    def body(self) -> Iterator[None]:
        """Inside is one level deeper."""
        self._depth += 1
        self.depth = max(self.depth, self._depth)
        try:
            yield
        finally:
            self._depth -= 1


class ConditionalNodes:
    """Makes conditional nodes of the graph that the current stream captures."""

    __slots__ = ("_bindings", "_cupy", "_kernels", "_state", "_streams")

    def __init__(self, cupy: Cupy, raw: Raw, sides: Sequence[Raw], bindings: Bindings, state: Raw) -> None:
        """Compiles the kernels.

        Args:
            cupy: the module.
            raw: CuPy's stream that captures.
            sides: streams that bodies are captured on, one for each level of nodes inside one another.
            bindings: see `cuda_bindings`.
            state: of a launch, an int64 array; see `SOURCE`.
        """
        module = cupy.RawModule(code=SOURCE)
        self._cupy = cupy
        self._kernels = {name: module.get_function(name) for name in ("set_loop", "set_inner_loop", "set_branch")}
        self._streams = [raw, *sides]
        self._bindings = bindings
        self._state = state

    def loop(self) -> GatedPlace:
        """The loop of a launch."""
        return self._node("WHILE", 1, "set_loop", self._state)

    def inner_loop(self) -> GatedPlace:
        """A loop inside."""
        count = self._cupy.zeros((), np.int64)  # captured as well, so it is 0 each time the loop starts
        return self._node("WHILE", 1, "set_inner_loop", self._state, count)

    def branch(self) -> GatedPlace:
        """A branch inside."""
        return self._node("IF", 2, "set_branch")

    def _node(self, kind: str, size: int, kernel: str, *arguments: Value) -> GatedPlace:
        driver = self._bindings.driver
        (context,) = ok(driver.cuCtxGetCurrent())
        graph, _ = self._captured()
        (handle,) = ok(driver.cuGraphConditionalHandleCreate(graph, context, 0, 0))
        params = node_params(driver, kind, size, handle, context)

        def decide(pred: Value) -> None:
            self._kernels[kernel]((1,), (1,), (np.uint64(int(handle)), pred, *arguments))

        return GatedPlace(decide, lambda: self._add(params))

    def _add(self, params: Raw) -> Sequence[AbstractContextManager[None]]:
        """Add the node behind the work captured so far, and before all later work; its bodies are empty."""
        driver, runtime = self._bindings.driver, self._bindings.runtime
        graph, dependencies = self._captured()
        (node,) = ok(driver.cuGraphAddNode(graph, dependencies, None, len(dependencies), params))
        flags = runtime.cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
        ok(runtime.cudaStreamUpdateCaptureDependencies(self._streams[0].ptr, [node], None, 1, flags))
        return [self._body(params.conditional.phGraph_out[index]) for index in range(params.conditional.size)]

    def _captured(self) -> tuple[Raw, Raw]:
        """Return the graph that the current stream captures, and the nodes in it that later work depends on."""
        _, _, graph, dependencies, *_ = ok(self._bindings.runtime.cudaStreamGetCaptureInfo(self._streams[0].ptr))
        return graph, dependencies

    @contextmanager
    def _body(self, graph: Raw) -> Iterator[None]:
        runtime, outer, side = self._bindings.runtime, self._streams[0], self._streams[1]
        # Relaxed: the pool may have to ask CUDA for memory.
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        ok(runtime.cudaStreamBeginCaptureToGraph(side.ptr, graph, None, None, 0, mode))
        self._streams = self._streams[1:]
        try:
            with side:
                yield
        finally:
            self._streams = [outer, *self._streams]
            # Not `end_capture`, which would make a separate graph of the body; the node owns the body.
            ended = runtime.cudaStreamEndCapture(side.ptr)
        ok(ended)


def node_params(driver: Raw, kind: str, size: int, handle: Raw, context: Raw) -> Raw:
    """The parameters of which ``cuGraphAddNode`` makes an IF or a WHILE node, and puts its bodies in."""
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    conditional = params.conditional
    conditional.handle, conditional.ctx, conditional.size = handle, context, size
    conditional.type = getattr(driver.CUgraphConditionalNodeType, f"CU_GRAPH_COND_TYPE_{kind}")
    return params


def ok(result: tuple[Raw, ...]) -> tuple[Raw, ...]:
    """The results of a call of the bindings.

    Raises:
        NotCapturableError: CUDA says no.
    """
    code, *values = result
    if int(code):
        raise NotCapturableError(f"CUDA says {code!r}")
    return tuple(values)
