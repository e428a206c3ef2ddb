"""Loops that a GPU runs by itself: its own result decides if another iteration follows, without the host.

The loop is one CUDA graph, with a conditional node for itself and for each loop and branch in its body, see
`conditional.py`. Loop variables, also of inner loops, and the results of branches are in fixed buffers, written in
place; these belong to the graph.

Work that CUDA refuses to capture spoils the capture. In the body of a conditional node, ending a spoilt capture ends
the process (a bug of the drivers of CUDA 13, NVBUG 6805256). So all is captured once without conditional nodes before.

A launch makes no more iterations than it is told to (`Limits`), so that no loop occupies the device for ever. Its
caller looks at its state, and launches it again with the values that it gave.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncflow.devices.captures import GraphCache, NotCapturableError
from asyncflow.devices.cuda.graphs.conditional import ConditionalNodes, GatedPlace, Limits, Rehearsal
from asyncflow.devices.cuda.graphs.graph import (
    PrivateMemory,
    array_key,
    capture,
    copy_into,
    empty_as,
    key_of,
    without_gaps,
)
from asyncflow.devices.cuda.graphs.logs import Log, logs_in, new_table
from asyncflow.devices.cuda.memory import PrivatePool, active_requests
from asyncflow.devices.decisions import Body, Branch, Condition, Decision, Ended, Loop, advance, decisions

if TYPE_CHECKING:
    from asyncflow.devices.cuda.memory import CudaPool
    from asyncflow.devices.protocol import Placed
    from asyncflow.streams.cuda.bindings import Bindings
    from asyncflow.streams.cuda.cupy_types import Cupy, CupyArray, Raw
    from asyncflow.streams.cuda.stream import CudaStream
    from asyncflow.values import Kernel, Value


_DEFAULT_LIMITS = Limits()

_MOST_STARTS = 16
"""Number of limits for which a graph keeps the state of a launch that begins."""


class Iterated(NamedTuple):
    """The results that a launch will have computed.

    Attributes:
        values: of the loop variables, new arrays.
        state: an int64 array that begins with: how many iterations, how it came out (`ENDED`, `STOPPED`, `GIVEN_UP` or
            `TOO_LONG`, or `FULL`), and how many iterations of the loops inside.
    """

    values: tuple[Placed, ...]
    state: Raw


@dataclass(slots=True, eq=False, repr=False)
class Interpreter:
    """An interpreter of functions that decide by arrays: runs them on the current stream, with nodes for their
    decisions.
    """

    cupy: Cupy
    nodes: ConditionalNodes | Rehearsal

    def run(self, loop: Loop, buffers: Sequence[CupyArray]) -> None:
        """The loop of a launch, whose variables are in `buffers`."""
        self._repeat(loop, buffers, self.nodes.loop())

    def _values(self, function: Kernel, arguments: Sequence[Value]) -> Placed:
        """The result of ``function(*arguments)``."""
        running = decisions(function, arguments)
        decision = advance(running, None)
        while not isinstance(decision, Ended):
            decision = advance(running, self._decided(decision))
        return decision.value

    def _decided(self, decision: Decision) -> Sequence[Placed]:
        return self._looped(decision) if isinstance(decision, Loop) else self._branched(decision)

    def _branched(self, branch: Branch) -> Sequence[Placed]:
        """The results of a branch, in buffers that either side writes."""
        if not isinstance(branch.pred, self.cupy.ndarray):
            return list(self._values(branch.on_true if branch.pred else branch.on_false, branch.arguments))
        node = self.nodes.branch()
        node.decide(self._checked(branch.pred))
        buffers = None
        for function, side in zip((branch.on_true, branch.on_false), node.bodies(), strict=True):
            with side:
                results = self._values(function, branch.arguments)
                if buffers is None:
                    buffers = [self.buffer_for(result) for result in results]
                self.put(buffers, results)
        assert buffers is not None
        return buffers

    def _looped(self, loop: Loop) -> Sequence[Placed]:
        """The variables of a loop inside, in buffers of its own."""
        node = self.nodes.inner_loop()
        buffers = [self.buffer_for(value) for value in loop.variables]
        self.put(buffers, loop.variables)
        self._repeat(loop, buffers, node)
        return buffers

    def _repeat(self, loop: Loop, buffers: Sequence[CupyArray], node: GatedPlace) -> None:
        arguments = *buffers, *loop.captures
        node.decide(self._checked(self._values(loop.condition, arguments)))
        (iteration,) = node.bodies()
        with iteration:
            self.put(buffers, self._values(loop.body, arguments))
            node.decide(self._checked(self._values(loop.condition, arguments)))

    def _checked(self, pred: Value) -> Placed:
        if not isinstance(pred, self.cupy.ndarray) or pred.dtype != np.bool_ or pred.size != 1:
            raise NotCapturableError("a predicate is not computed on the device")
        return pred

    def buffer_for(self, value: Value) -> CupyArray:
        """New memory for `value`, an array or a number of the host; a log stays the same."""
        if isinstance(value, Log):
            return value
        is_array = isinstance(value, self.cupy.ndarray)
        return empty_as(self.cupy, value) if is_array else self.cupy.empty((), np.asarray(value).dtype)

    def put(self, buffers: Sequence[CupyArray], values: Sequence[Value]) -> None:
        """Write each value into its buffer, as if all at once."""
        # Skip logs: separate kernels fill them, and they are the same in all iterations.
        arrays = [place for place, buffer in enumerate(buffers) if not isinstance(buffer, Log)]
        buffers, values = [buffers[place] for place in arrays], list(values)
        values = [values[place] for place in arrays]
        places = {buffer.data.mem.ptr for buffer in buffers if buffer.nbytes}
        for index, (buffer, value) in enumerate(zip(buffers, values, strict=True)):
            _check_fits(buffer, value)
            # A variable's next value may be another one's current value, or a view of the old value.
            if isinstance(value, self.cupy.ndarray) and value is not buffer and value.data.mem.ptr in places:
                values[index] = value.copy()
        for buffer, value in zip(buffers, values, strict=True):
            if not isinstance(value, self.cupy.ndarray):
                buffer.fill(value)
            elif value is not buffer:
                self.cupy.copyto(buffer, value)


def _check_fits(buffer: CupyArray, value: Value) -> None:
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", ())
    if (dtype, shape) != (buffer.dtype, buffer.shape):
        raise NotCapturableError(f"a value of {buffer.dtype}{buffer.shape} becomes {dtype}{shape}")


class LoopGraph:
    """A captured loop; what its kernels use stays as long as it does."""

    __slots__ = ("_captures", "_cupy", "_graph", "_held", "_n_logs", "_raw", "_starts", "_state", "_variables")

    def __init__(
        self,
        cupy: Cupy,
        raw: Raw,
        bindings: Bindings,
        functions: tuple[Condition, Body],
        variables: Sequence[Value],
        captures: Sequence[Value],
    ) -> None:
        """Capture; a private pool is the stream's pool meanwhile. The arguments are as in `DeviceLoop`."""
        self._cupy = cupy
        self._raw = raw
        rehearsal = Rehearsal()
        rehearsed = Interpreter(cupy, rehearsal)
        self._n_logs = len(logs_in(variables))
        self._state = _state_of(cupy, Limits(1), self._n_logs)
        # Numbered in the order of `logs_in`, by which the launcher finds the full log. Logs that are only read have
        # numbers, too, which no kernel uses.
        numbers = itertools.count()
        self._variables = [rehearsed.buffer_for(self._seen(value, numbers)) for value in variables]
        self._captures = [self._seen(value, numbers) for value in captures]
        self._captures = [empty_as(cupy, x) if isinstance(x, cupy.ndarray) else x for x in self._captures]
        self._starts: dict[Limits, Raw] = {}
        self._fill(variables, captures)
        loop = Loop(*functions, self._variables, self._captures)
        # Compile all kernels first: a capture must not load modules.
        rehearsed.run(loop, self._variables)
        capture(raw, lambda: rehearsed.run(loop, self._variables))
        # They never get their own memory: see `PrivateMemory`.
        sides = [cupy.cuda.Stream(non_blocking=True) for _ in range(rehearsal.depth)]
        nodes = ConditionalNodes(cupy, raw, sides, bindings, self._state)
        # The functions hold constants, and the nodes hold the kernels that decide.
        self._held = functions, nodes
        self._graph, _ = capture(raw, lambda: Interpreter(cupy, nodes).run(loop, self._variables))

    def launch(self, variables: Sequence[Value], captures: Sequence[Value], limits: Limits) -> Iterated:
        """Run the loop from these values, as far as `limits` allow.

        Raises:
            MemoryLimitExceeded: the results do not fit; nothing was launched.
        """
        cupy, raw = self._cupy, self._raw
        results = [
            value if isinstance(buffer, Log) else empty_as(cupy, buffer)
            for buffer, value in zip((*self._variables, self._state), (*variables, None), strict=True)
        ]
        if limits not in self._starts:
            # How many iterations a launch may make follows from the room in logs, which differs from run to run.
            if len(self._starts) >= _MOST_STARTS:
                self._starts.clear()
            self._starts[limits] = _state_of(cupy, limits, self._n_logs)
        self._fill(variables, captures)
        copy_into(cupy, self._state, self._starts[limits], raw)
        self._graph.launch(stream=raw)
        active_requests().graphs += 1
        for result, buffer in zip(results, (*self._variables, self._state), strict=True):
            if not isinstance(buffer, Log):
                copy_into(cupy, result, buffer, raw)
        *values, state = results
        return Iterated(tuple(values), state)

    def _seen(self, value: Placed, numbers: Iterator[int]) -> Placed:
        """Return `value`, and for a log its stand-in: with a table in the graph's memory, for logs of any run."""
        if not isinstance(value, Log):
            return value
        seen = value.seen_by(new_table(self._cupy), self._state, next(numbers))
        seen.inner = self._seen(value.inner, numbers)
        return seen

    def _fill(self, variables: Sequence[Value], captures: Sequence[Value]) -> None:
        cupy = self._cupy
        for buffer, value in zip((*self._variables, *self._captures), (*variables, *captures), strict=True):
            if isinstance(value, cupy.ndarray):
                copy_into(cupy, buffer, value, self._raw)
            elif isinstance(value, Log):
                # Copy only the table: kernels find the blocks by its addresses.
                for seen, log in zip(buffer.line(), value.line(), strict=True):
                    copy_into(cupy, seen.table, log.table, self._raw)
            elif isinstance(buffer, cupy.ndarray):
                buffer.fill(value)
                active_requests().kernels += 1


def _state_of(cupy: Cupy, limits: Limits, n_logs: int) -> Raw:
    """That of a launch which begins, filled by kernels: a copy from the host might block."""
    state = limits.state()
    array = cupy.zeros(len(state) + n_logs, np.int64)
    for index, value in enumerate(state):
        if value:
            array[index : index + 1].fill(value)
    return array


@dataclass(slots=True, eq=False, repr=False)
class DeviceLoop:
    """A loop over raw arrays; for each kind of values it is captured once, and one launch runs it.

    All calls belong inside ``with stream:``. Nothing is captured before the first launch.

    Attributes:
        cupy: the module.
        stream: the compute stream that the loop runs on.
        pool: where the device's memory comes from.
        bindings: see `cuda_bindings`; None: nothing is captured.
        condition: with `body`, the loop's functions. Both launch on the current stream, and yield their decisions by
            arrays; dtypes and shapes of variables and results never change. Each body and each side of a branch is run
            beforehand, whatever the values are.
        body: see `condition`.
        label: for logs, and for what the memory of its graphs is called.
    """

    cupy: Cupy
    stream: CudaStream
    pool: CudaPool
    bindings: Bindings | None
    condition: Condition
    body: Body
    label: str
    _graphs: GraphCache[LoopGraph] = field(init=False)

    def __post_init__(self) -> None:
        self._graphs = GraphCache(self.label, self.pool.graphs, warm_ups=0)

    def launch(
        self, variables: Sequence[Value], captures: Sequence[Value] = (), limits: Limits = _DEFAULT_LIMITS
    ) -> Iterated | None:
        """Start the loop, or go on with it, as far as `limits` allow; nothing is waited for.

        Args:
            variables: CuPy's arrays, and NumPy scalars for variables that begin on the host.
            captures: arrays and host values that do not change; host values are part of the capture.

        Returns:
            The variables after the launch, all of them arrays; None where the loop cannot be captured, or has no room,
            and the host has to drive it.
        """
        bindings = self.bindings
        if bindings is None or self._graphs.is_refused:
            return None
        # Some values, such as the gradient of a sum, are views of one number.
        variables, captures = map(self._without_gaps, (variables, captures))
        return self._graphs.launched(
            self._key(variables, captures),
            lambda: self._captured(bindings, variables, captures),
            lambda graph: graph.launch(variables, captures, limits),
        )

    def _without_gaps(self, values: Sequence[Value]) -> list[Value]:
        cupy = self.cupy
        return [without_gaps(cupy, value) if isinstance(value, cupy.ndarray) else value for value in values]

    def _key(self, variables: Sequence[Value], captures: Sequence[Value]) -> Hashable:
        ndarray = self.cupy.ndarray
        shapes: list[Hashable] = []
        for value in variables:
            if isinstance(value, Log):
                # Without the number of entries: a longer log needs no new graph.
                shape: Hashable = value.spec
            else:
                shape = array_key(value) if isinstance(value, ndarray) else _scalar_key(value)
            if shape is None:
                return None
            shapes.append(shape)
        captured = key_of([value for value in captures if not isinstance(value, Log)], ndarray)
        return None if captured is None else (*shapes, *(log.spec for log in logs_in(captures)), *captured)

    def _captured(self, bindings: Bindings, variables: Sequence[Value], captures: Sequence[Value]) -> LoopGraph:
        functions = self.condition, self.body
        with PrivateMemory(self.stream, PrivatePool(self.cupy, self.pool, f"CUDA graph of {self.label}")):
            return LoopGraph(self.cupy, self.stream.raw, bindings, functions, variables, captures)


def _scalar_key(value: Placed) -> Hashable:
    """Of a variable's first value, which is copied in: its dtype."""
    is_number = isinstance(value, np.generic) and (value.dtype.kind in "biufc" or value.dtype.name == "bfloat16")
    return (value.dtype, (), "C") if is_number else None
