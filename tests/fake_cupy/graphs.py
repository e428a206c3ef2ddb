"""CUDA graphs: what a stream is given while it captures, done again and again, on the same memory.

Rules
1. While a stream captures, its work is recorded and not done. Asking the stream how far it is, or waiting for it,
   breaks the capture: it ends with an error. CuPy itself refuses cuBLAS and copies from and to the host meanwhile.
2. A launch is one item of its stream. The steps run in an order that their dependencies allow, picked at random.
3. Memory that was allocated in a capture and freed there is spoilt again by every launch, at that place.
4. The body of a conditional node runs while its handle is not zero, which only a kernel (`set_cond`) says.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tests.fake_cupy.errors import CompileException, CUDARuntimeError, DeviceFault

if TYPE_CHECKING:
    from tests.fake_cupy.arrays import Array
    from tests.fake_cupy.engine import Engine, Queue
    from tests.fake_cupy.kernels import Kernels
    from tests.fake_cupy.streams import Stream

UNSUPPORTED, INVALIDATED, UNMATCHED, ISOLATION, CAPTURED_EVENT, WRONG_THREAD = 900, 901, 903, 905, 907, 908
NOT_SUPPORTED = 801

MOST_ITERATIONS = 1_000_000
"""A loop of more ends with a fault: on a card it would never end."""


class Step:
    """A node of a graph: work, or the loop of a conditional node."""

    __slots__ = ("after", "body", "handle", "is_branch", "name", "work")

    def __init__(self, name: str, work: Callable[[], None] | None, after: Sequence[Step]) -> None:
        self.name = name
        self.work = work
        self.after = tuple(after)
        self.handle = 0
        self.body: CapturedGraph | None = None
        self.is_branch = False


class CapturedGraph:
    """The nodes of a graph; `ptr` is its handle, and `is_body` says that a conditional node owns it."""

    def __init__(self, ptr: int, *, is_body: bool = False) -> None:
        self.ptr = ptr
        self.is_body = is_body
        self.steps: list[Step] = []

    def run(self, engine: Engine) -> None:
        """Do it; runs on the GPU thread."""
        done: set[int] = set()
        left = list(self.steps)
        while left:
            ready = [step for step in left if all(id(other) in done for other in step.after)]
            step = engine.pick(ready)
            left.remove(step)
            self._do(step, engine)
            done.add(id(step))

    def _do(self, step: Step, engine: Engine) -> None:
        if step.work is not None:
            step.work()
        if step.body is None:
            return
        for _ in range(MOST_ITERATIONS):
            if not engine.conditionals[step.handle]:
                return
            step.body.run(engine)
            if step.is_branch:
                return
        raise DeviceFault(702)

    def names(self) -> list[str]:
        """What the nodes are called, those of bodies behind their node; for tests."""
        found: list[str] = []
        for step in self.steps:
            found.append(step.name)
            found += [] if step.body is None else [f"  {name}" for name in step.body.names()]
        return found


class Capture:
    """A stream's capture, from begin to end."""

    def __init__(self, graph: CapturedGraph, ident: int) -> None:
        self.graph = graph
        self.ident = ident
        self.thread = threading.get_ident()
        self.invalid = False
        self.last: tuple[Step, ...] = ()
        self.allocated: set[int] = set()

    def record(self, name: str, work: Callable[[], None] | None) -> None:
        if self.invalid:
            raise CUDARuntimeError(INVALIDATED)
        if self.graph.is_body and work is None:
            self.invalid = True
            raise CUDARuntimeError(NOT_SUPPORTED)
        step = Step(name, work, self.last)
        self.graph.steps.append(step)
        self.last = (step,)

    def break_with(self, code: int) -> CUDARuntimeError:
        """The capture is worth nothing any more; gives the error of whoever broke it."""
        self.invalid = True
        return CUDARuntimeError(code)


def begin(engine: Engine, queue: Queue, graph: CapturedGraph | None = None) -> Capture:
    """What is given to `queue` from here on becomes nodes of `graph`, or of a new graph."""
    if queue.capture is not None:
        raise CUDARuntimeError(1)
    queue.capture = Capture(graph or CapturedGraph(engine.new_ptr()), engine.new_ptr())
    engine.captures.append(queue)
    return queue.capture


def end(engine: Engine, queue: Queue) -> CapturedGraph:
    """The graph; the stream does its work again."""
    capture = queue.capture
    if capture is None:
        raise CUDARuntimeError(1)
    if capture.thread != threading.get_ident():
        raise CUDARuntimeError(WRONG_THREAD)
    queue.capture = None
    engine.captures.remove(queue)
    if capture.invalid:
        raise CUDARuntimeError(INVALIDATED)
    return capture.graph


class Graph:
    """`cupy.cuda.Graph`, which only `Stream.end_capture` makes.

    Attributes:
        captured: the nodes; for tests.
        launches: how often it was launched; for tests.
    """

    def __init__(self, engine: Engine, captured: CapturedGraph, current: Callable[[], Stream]) -> None:
        self.captured = captured
        self.launches = 0
        self.graph = 0
        self.graphExec = engine.new_ptr()
        self._engine = engine
        self._current = current

    def launch(self, stream: Stream | None = None) -> None:
        queue = self._queue(stream, "graphLaunch")
        captured, engine = self.captured, self._engine
        if queue.capture is not None:
            raise NotImplementedError("the fake has no child graphs")
        self.launches += 1
        engine.give(queue, "graph", lambda: captured.run(engine))

    def upload(self, stream: Stream | None = None) -> None:
        self._queue(stream, "graphUpload")

    def _queue(self, stream: Stream | None, call: str) -> Queue:
        stream = self._current() if stream is None else stream
        queue = self._engine.queue(stream.ptr, max(stream.device_id, 0))
        self._engine.enter(call, queue.device)
        return queue


class RawModule:
    """`cupy.RawModule` for the one source it knows: the kernel that decides whether a loop goes on.

    ::

        set_cond(handle, pred, count, limit):  handle = *pred && (*count)++ < limit
    """

    _kernels: ClassVar[Kernels]

    def __init__(
        self, *, code: str | None = None, path: str | None = None, options: tuple[str, ...] = (), **more: Any
    ) -> None:
        if code is None or path is not None or more:
            raise NotImplementedError("the fake's RawModule takes code and options")
        self.code, self.options = code, options

    def get_function(self, name: str) -> RawFunction:
        wanted = re.compile(rf'extern "C" __global__\s+void {name}\(')
        if not wanted.search(self.code):
            raise CompileException(f"named symbol not found: {name}", self.code, name, self.options)
        if name != "set_cond" or "cudaGraphSetConditional" not in self.code:
            raise NotImplementedError(f"the fake does not run the raw kernel {name!r}")
        return RawFunction(self._kernels)


class RawFunction:
    """`set_cond`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        handle, pred, count, limit = args
        if not (isinstance(handle, np.uint64) and isinstance(limit, np.int64)):
            raise TypeError(f"set_cond takes a uint64 and an int64, not {type(handle)} and {type(limit)}")
        if (grid, block) != ((1,), (1,)):
            raise ValueError("one thread decides")
        self._check(pred, "bool")
        self._check(count, "int64")
        engine = self._kernels.platform.engine
        if self._kernels.current_queue().capture is None or int(handle) not in engine.conditionals:
            raise CUDARuntimeError(1)

        def decide(go_on: np.ndarray, counted: np.ndarray) -> None:
            goes_on = False
            if go_on:
                goes_on = bool(counted < limit)
                counted += 1
            engine.conditionals[int(handle)] = int(goes_on)

        self._kernels.launch("set_cond", decide, [pred, count])

    def _check(self, array: Array, dtype: str) -> None:
        if not isinstance(array, self._kernels.ndarray) or array.dtype != dtype or array.size != 1:
            raise TypeError(f"set_cond takes one {dtype}, not {array!r}")
