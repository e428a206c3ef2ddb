"""CUDA graphs: what a stream is given while it captures, done again and again, on the same memory.

Rules
1. While a stream captures, its work is recorded and not done. Asking the stream how far it is, or waiting for it,
   breaks the capture: it ends with an error. CuPy itself refuses cuBLAS and copies from and to the host meanwhile.
2. A launch is one item of its stream. The steps run in an order that their dependencies allow, picked at random.
3. Memory that was allocated in a capture and freed there is spoilt again by every launch, at that place.
4. A conditional node looks at its handle when it is come to, and a loop again after each iteration. Only kernels set
   handles. A default is assigned when the graph is launched, and not when a body is come to again; without a default
   the value is anything then.
5. Bodies hold no events, and kernels in them set only handles of their own graph.
6. A launch of a graph with an address in it whose memory has been freed since the capture loses the device.
7. Ending a capture after that of a body in it was broken ends the process, as drivers of CUDA 13 do (NVBUG 6805256).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tests.fake_cupy.errors import CompileException, CUDARuntimeError, DeviceFault

if TYPE_CHECKING:
    from tests.fake_cupy.engine import Engine, Queue
    from tests.fake_cupy.kernels import Kernels
    from tests.fake_cupy.streams import Stream

UNSUPPORTED, INVALIDATED, UNMATCHED, UNJOINED, ISOLATION, CAPTURED_EVENT, WRONG_THREAD = (
    900,
    901,
    903,
    904,
    905,
    907,
    908,
)
NOT_SUPPORTED = 801

MOST_ITERATIONS = 1_000_000
"""A loop of more ends with a fault: on a card it would never end."""


class DriverCrash(BaseException):
    """The driver would have ended the process. No handler of a program sees that."""


class Step:
    """A node of a graph: work, or a conditional node.

    Attributes:
        after: the nodes it depends on.
        handle: of a conditional node.
        is_loop: the only body runs again and again; else the first runs, or the second if there is one.
        bodies: of a conditional node.
    """

    __slots__ = ("after", "bodies", "handle", "is_loop", "name", "work")

    def __init__(self, name: str, work: Callable[[], None] | None, after: Sequence[Step]) -> None:
        self.name = name
        self.work = work
        self.after = tuple(after)
        self.handle = 0
        self.is_loop = False
        self.bodies: list[CapturedGraph] = []


class CapturedGraph:
    """The nodes of a graph.

    Attributes:
        ptr: its handle.
        parent: the graph whose conditional node owns it as a body.
        defaults: the handles made for it, with the values they are given at a launch; None: any.
        used: the handles that a node looks at.
        is_broken: the capture of a body was, so that the driver has a pointer to a graph that is gone.
        keepers: numbers of what keeps the addresses in its nodes in use; see `pool.Pieces`.
    """

    def __init__(self, ptr: int, *, parent: CapturedGraph | None = None) -> None:
        self.ptr = ptr
        self.parent = parent
        self.steps: list[Step] = []
        self.defaults: dict[int, int | None] = {}
        self.used: set[int] = set()
        self.is_broken = False
        self.keepers: set[int] = set()

    def line(self) -> Iterator[CapturedGraph]:
        """The graph and those around it."""
        graph: CapturedGraph | None = self
        while graph is not None:
            yield graph
            graph = graph.parent

    def tree(self) -> Iterator[CapturedGraph]:
        """The graph and all bodies in it."""
        yield self
        for step in self.steps:
            for body in step.bodies:
                yield from body.tree()

    def launch(self, engine: Engine) -> None:
        """Do it all; runs on the GPU thread."""
        for graph in self.tree():
            for handle, default in graph.defaults.items():
                engine.conditionals[handle] = engine.pick((0, 1, 7)) if default is None else default
        self._run(engine)

    def _run(self, engine: Engine) -> None:
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
        if not step.bodies:
            return
        if not step.is_loop:
            for body in step.bodies[:1] if engine.conditionals[step.handle] else step.bodies[1:]:
                body._run(engine)
            return
        for _ in range(MOST_ITERATIONS):
            if not engine.conditionals[step.handle]:
                return
            step.bodies[0]._run(engine)
        raise DeviceFault(702)

    def names(self) -> list[str]:
        """Return the names of the nodes, with bodies behind their node; for tests."""
        found: list[str] = []
        for step in self.steps:
            found.append(step.name)
            found += [f"  {name}" for body in step.bodies for name in body.names()]
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

    def record(self, name: str, work: Callable[[], None] | None, keepers: Iterable[int] = ()) -> None:
        if self.invalid:
            raise CUDARuntimeError(INVALIDATED)
        if self.graph.parent is not None and work is None:
            self.invalid = True
            raise CUDARuntimeError(NOT_SUPPORTED)
        step = Step(name, work, self.last)
        self.graph.steps.append(step)
        self.graph.keepers.update(keepers)
        self.last = (step,)

    def break_with(self, code: int) -> CUDARuntimeError:
        """The capture is worth nothing any more; gives the error of whoever broke it."""
        self.invalid = True
        return CUDARuntimeError(code)


def begin(engine: Engine, queue: Queue, graph: CapturedGraph | None = None) -> Capture:
    """Make further items of `queue` nodes of `graph`, or of a new graph."""
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
    graph = capture.graph
    queue.capture = None
    engine.captures.remove(queue)
    if any(other.capture is not None and other.capture.graph.parent is graph for other in engine.captures):
        raise CUDARuntimeError(UNJOINED)
    if graph.is_broken:
        error = DriverCrash("the capture of a conditional node's body was broken and ended, and then the one around it")
        engine.errors.append(error)
        raise error
    if capture.invalid:
        if graph.parent is not None:
            graph.parent.is_broken = True
        raise CUDARuntimeError(INVALIDATED)
    if graph.parent is None and any(one.defaults.keys() - one.used for one in graph.tree()):
        raise CUDARuntimeError(1)
    return graph


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
        # Now, and not when it is done: memory that the host frees after a launch is used again in the stream's order.
        is_kept = all(engine.is_kept(keeper) for graph in captured.tree() for keeper in graph.keepers)
        engine.give(queue, "graph", (lambda: captured.launch(engine)) if is_kept else _fault)

    def upload(self, stream: Stream | None = None) -> None:
        self._queue(stream, "graphUpload")

    def _queue(self, stream: Stream | None, call: str) -> Queue:
        stream = self._current() if stream is None else stream
        queue = self._engine.queue(stream.ptr, max(stream.device_id, 0))
        self._engine.enter(call, queue.device)
        return queue


def _fault() -> None:
    raise DeviceFault(700)


class RawModule:
    """`cupy.RawModule` for the kernels that set handles; `SETTERS` has their source in Python.

    Parameters are the source's, and arguments must have the types that it declares.
    """

    _kernels: ClassVar[Kernels]

    def __init__(
        self, *, code: str | None = None, path: str | None = None, options: tuple[str, ...] = (), **more: Any
    ) -> None:
        if code is None or path is not None or more:
            raise NotImplementedError("the fake's RawModule takes code and options")
        self.code, self.options = code, options

    def get_function(self, name: str) -> RawFunction:
        found = re.search(rf'extern "C" __global__\s+void {name}\(([^)]*)\)', self.code)
        if found is None:
            raise CompileException(f"named symbol not found: {name}", self.code, name, self.options)
        if name not in SETTERS or "cudaGraphSetConditional" not in self.code:
            raise NotImplementedError(f"the fake does not run the raw kernel {name!r}")
        types = [parameter.rpartition(" ")[0].strip() for parameter in found[1].split(",")]
        return RawFunction(self._kernels, name, types)


class RawFunction:
    """A kernel of `SETTERS`."""

    def __init__(self, kernels: Kernels, name: str, types: Sequence[str]) -> None:
        self._kernels = kernels
        self._name = name
        self._types = types

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        if (grid, block) != ((1,), (1,)):
            raise ValueError("one thread decides")
        if len(args) != len(self._types):
            raise TypeError(f"{self._name} takes {self._types}, not {args}")
        for declared, value in zip(self._types, args, strict=True):
            self._check(declared, value)
        handle, *rest = args
        engine = self._kernels.platform.engine
        capture = self._kernels.current_queue().capture
        if capture is None:
            raise CUDARuntimeError(1)
        *_, root = capture.graph.line()
        if not any(int(handle) in graph.defaults for graph in root.tree()):
            raise CUDARuntimeError(1)
        arrays = [value for value in rest if isinstance(value, self._kernels.ndarray)]
        numbers = [int(value) for value in rest if not isinstance(value, self._kernels.ndarray)]

        def decide(*views: np.ndarray) -> None:
            engine.conditionals[int(handle)] = int(SETTERS[self._name](*views, *numbers))

        self._kernels.launch(self._name, decide, arrays)

    def _check(self, declared: str, value: Any) -> None:
        if declared in SCALARS:
            fits = isinstance(value, SCALARS[declared])
        else:
            fits = isinstance(value, self._kernels.ndarray) and value.dtype == POINTERS[declared]
        if not fits:
            raise TypeError(f"{self._name} takes a {declared} where it is given {value!r}")


SCALARS: dict[str, type] = {"unsigned long long": np.uint64, "long long": np.int64}
POINTERS = {"const bool*": np.dtype(bool), "long long*": np.dtype(np.int64)}


def set_loop(pred: np.ndarray, state: np.ndarray) -> bool:
    most, inside = state[3], state[4]
    if not pred.item() or state[1]:
        return False
    if state[0] < most and state[2] < inside:
        state[0] += 1
        return True
    state[1] = 1
    return False


def set_inner_loop(pred: np.ndarray, state: np.ndarray, count: np.ndarray) -> bool:
    too_long, most = state[5], state[6]
    if not pred.item() or state[1] >= 2:
        return False
    if count.item() >= most:
        state[1] = 2
    elif state[2] >= too_long:
        state[1] = 3
    else:
        count += 1
        state[2] += 1
        return True
    return False


def set_branch(pred: np.ndarray) -> bool:
    return bool(pred.item())


SETTERS: dict[str, Callable[..., bool]] = {
    "set_loop": set_loop,
    "set_inner_loop": set_inner_loop,
    "set_branch": set_branch,
}
"""The value of the handle, of the arrays and then the numbers."""
