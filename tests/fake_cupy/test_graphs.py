"""Captures, launches and conditional nodes of the fake."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from asyncflow.devices.cuda.graphs.conditional import SOURCE, Limits, node_params
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.bindings import CU_GRAPH_COND_ASSIGN_DEFAULT
from tests.fake_cupy.errors import CUDARuntimeError
from tests.fake_cupy.graphs import DriverCrash

FORBIDDEN = {
    "cuBLAS": (lambda cupy, x: cupy.matmul(x, x), NotImplementedError),
    "a copy to the host": (lambda cupy, x: x.get(), RuntimeError),
    "a copy from the host": (lambda cupy, x: cupy.asarray(np.ones(3)), RuntimeError),
    "a copy by pointer": (lambda cupy, x: x.data.copy_to_host_async(0, 8), RuntimeError),
    "asking": (lambda cupy, x: bool(x[0, 0]), RuntimeError),
}
BREAKING = {
    "waiting": lambda cupy, stream, x: stream.synchronize(),
    "a shape that depends on the values": lambda cupy, stream, x: cupy.nonzero(x),
    "waiting for other work": lambda cupy, stream, x: stream.wait_event(cupy.cuda.Stream(non_blocking=True).record()),
}


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with FakeCupy() as fake:
        yield fake


@pytest.fixture
def stream(cupy: FakeCupy) -> Any:
    return cupy.cuda.Stream(non_blocking=True)


def test_captured_work_is_not_done_until_it_is_launched(cupy: FakeCupy, stream: Any) -> None:
    with stream:
        x, y = cupy.ones(4), cupy.zeros(4)
        stream.begin_capture()
        assert stream.is_capturing()
        cupy.add(x, y, out=y)
        graph = stream.end_capture()
        assert not stream.is_capturing()
        for _ in range(3):
            graph.launch()
    graph.launch(stream=stream)
    np.testing.assert_array_equal(y.get(stream=stream), np.full(4, 4.0))
    assert graph.launches == 4


def captured_sum(cupy: FakeCupy, stream: Any, x: Any, allocate: Any = None) -> tuple[Any, Any]:
    """The graph of ``x + 1``, and the result, whose memory `allocate` gives."""
    with stream:
        y = cupy.empty(4) if allocate is None else cupy.ndarray(4, memptr=allocate(32))
        stream.begin_capture()
        cupy.add(x, 1.0, out=y)
        return stream.end_capture(), y


@pytest.mark.parametrize("freed", ["x", "y"])
def test_a_graph_with_an_address_that_is_freed_loses_the_device(cupy: FakeCupy, stream: Any, freed: str) -> None:
    pool = cupy.cuda.MemoryPool()
    cupy.cuda.set_allocator(pool.malloc)
    with stream:
        arrays = {"x": cupy.ones(4)}
    graph, arrays["y"] = captured_sum(cupy, stream, arrays["x"])
    graph.launch(stream=stream)
    cupy.engine.wait_idle()
    del arrays[freed]
    with stream:
        other = cupy.full(4, 5.0)  # has that memory now
    graph.launch(stream=stream)
    cupy.engine.wait_idle()
    with pytest.raises(CUDARuntimeError, match="illegal memory access"):
        other.get(stream=stream)


def test_memory_that_is_freed_behind_a_launch_is_used_in_the_order_of_the_stream(cupy: FakeCupy, stream: Any) -> None:
    pool = cupy.cuda.MemoryPool()
    cupy.cuda.set_allocator(pool.malloc)
    with stream:
        x = cupy.ones(4)
    graph, y = captured_sum(cupy, stream, x)
    cupy.pause()
    graph.launch(stream=stream)
    del x
    with stream:
        other = cupy.full(4, 5.0)
    cupy.resume()
    np.testing.assert_array_equal(y.get(stream=stream), np.full(4, 2.0))
    np.testing.assert_array_equal(other.get(stream=stream), np.full(4, 5.0))


def test_memory_of_a_private_pool_is_kept_with_the_pool(cupy: FakeCupy, stream: Any) -> None:
    pool = cupy.cuda.MemoryPool()
    private = cupy.cuda.MemoryPool(pool.malloc)
    cupy.cuda.set_allocator(pool.malloc)
    with stream:
        x = cupy.ones(4)
    graph, y = captured_sum(cupy, stream, x, private.malloc)
    del y
    graph.launch(stream=stream)  # writes to memory of the pool that is in no array
    cupy.engine.wait_idle()
    assert not cupy.engine.lost
    del private
    graph.launch(stream=stream)
    cupy.engine.wait_idle()
    assert cupy.engine.lost


def test_a_launch_reads_the_memory_of_that_moment(cupy: FakeCupy, stream: Any) -> None:
    with stream:
        x = cupy.arange(4)
        stream.begin_capture()
        y = x * 2
        graph = stream.end_capture()
        x += 1
        graph.launch()
        np.testing.assert_array_equal(y.get(), [2, 4, 6, 8])


def test_memory_freed_in_a_capture_is_spoilt_by_each_launch(cupy: FakeCupy, stream: Any) -> None:
    private = cupy.cuda.MemoryPool(cupy.cuda.MemoryPool().malloc)
    with stream, cupy.cuda.using_allocator(private.malloc):
        x, y, pool = cupy.ones(4), cupy.zeros(4), cupy.cuda.memory
        stream.begin_capture()
        temporary = x + 1
        lying = cupy.ndarray(4, float, pool.MemoryPointer(pool.UnownedMemory(temporary.data.ptr, 32, None, 0), 0))
        del temporary
        cupy.copyto(y, lying)
        graph = stream.end_capture()
        assert graph.captured.names() == ["cupy_add", "poison", "copyto"]
        graph.launch()
        assert y.get().view(np.uint8).tolist() == [0xDD] * 32


def test_memory_of_a_graph_given_to_another_user_loses_the_device(cupy: FakeCupy, stream: Any) -> None:
    """The reason why a graph needs a pool of its own: a card would overwrite what the other user has."""
    with stream:
        x = cupy.ones(4)
        stream.begin_capture()
        y = (x + 1) * 2
        graph = stream.end_capture()
        assert graph.captured.names() == ["cupy_add", "cupy_multiply", "poison"]
        victim = cupy.full(4, 7.0)
        graph.launch()
        cupy.engine.wait_idle()
        with pytest.raises(CUDARuntimeError, match="illegal memory access"):
            victim.get()
    del y


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_cupy_refuses_leaves_the_capture_whole(cupy: FakeCupy, stream: Any, name: str) -> None:
    call, error = FORBIDDEN[name]
    with stream:
        x = cupy.ones((3, 3))
        stream.begin_capture()
        with pytest.raises(error):
            call(cupy, x)
        y = x + 1
        stream.end_capture().launch()
        assert y.get().sum() == 18


@pytest.mark.parametrize("name", BREAKING)
def test_what_breaks_a_capture_fails_it(cupy: FakeCupy, stream: Any, name: str) -> None:
    with stream:
        x = cupy.ones((3, 3))
        stream.begin_capture()
        with pytest.raises(CUDARuntimeError, match=r"capturing|uncaptured"):
            BREAKING[name](cupy, stream, x)
        with pytest.raises(CUDARuntimeError, match="previous error during capture"):
            stream.is_capturing()
        with pytest.raises(CUDARuntimeError, match="previous error during capture"):
            x + 1
        with pytest.raises(CUDARuntimeError, match="previous error during capture"):
            stream.end_capture()
        assert not stream.is_capturing()
        assert (x + 1).get().sum() == 18


def test_done_breaks_a_capture_and_says_not_done(cupy: FakeCupy, stream: Any) -> None:
    with stream:
        stream.begin_capture()
        assert not stream.done
        with pytest.raises(CUDARuntimeError, match="previous error"):
            stream.end_capture()


def test_an_event_of_a_capture_is_none_that_can_be_asked(cupy: FakeCupy, stream: Any) -> None:
    with stream:
        stream.begin_capture()
        event = stream.record()
        assert cupy.cuda.runtime.eventQuery(event.ptr) == 907
        stream.end_capture()


def test_a_capture_is_ended_by_the_thread_that_began_it(cupy: FakeCupy, stream: Any) -> None:
    failures: list[CUDARuntimeError] = []

    def end() -> None:
        try:
            stream.end_capture()
        except CUDARuntimeError as error:
            failures.append(error)

    stream.begin_capture()
    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert [error.status for error in failures] == [908]
    stream.end_capture()
    with pytest.raises(RuntimeError, match="default"):
        cupy.cuda.Stream.null.begin_capture()


def test_work_that_was_not_ordered_after_a_loop_may_come_before_it() -> None:
    """The reason why the capture's dependencies have to be updated."""
    results = {_looped(seed, update=False) for seed in range(12)}
    assert results == {0, 5}
    assert {_looped(seed, update=True) for seed in range(12)} == {5}


def _looped(seed: int, *, update: bool) -> int:
    """Return the count that work behind a loop finds; the loop counts to 5."""
    with FakeCupy(seed=seed) as cupy:
        driver, runtime = cupy.bindings.driver, cupy.bindings.runtime
        main, side = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        with main:
            state, total, seen = cupy.asarray(Limits(5).state()), cupy.zeros(()), cupy.zeros(())
            pred = cupy.ones((), bool)
            kernel = cupy.RawModule(code=SOURCE).get_function("set_loop")
            main.begin_capture()
            _, _, _, graph, *_ = runtime.cudaStreamGetCaptureInfo(main.ptr)
            _, context = driver.cuCtxGetCurrent()
            _, handle = driver.cuGraphConditionalHandleCreate(graph, context, 0, 0)
            args = (np.uint64(int(handle)), pred, state)
            kernel((1,), (1,), args)
            nodes = runtime.cudaStreamGetCaptureInfo(main.ptr)[4]
            params = driver.CUgraphNodeParams()
            params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
            asked = params.conditional
            asked.handle, asked.ctx, asked.size = handle, context, 1
            asked.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
            error, node = driver.cuGraphAddNode(graph, nodes, None, len(nodes), params)
            assert error == 0
            if update:
                flags = runtime.cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
                runtime.cudaStreamUpdateCaptureDependencies(main.ptr, [node], None, 1, flags)
            mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
            runtime.cudaStreamBeginCaptureToGraph(side.ptr, asked.phGraph_out[0], None, None, 0, mode)
            with side:
                cupy.add(total, 1, out=total)
                kernel((1,), (1,), args)
            assert runtime.cudaStreamEndCapture(side.ptr)[0] == 0
            cupy.copyto(seen, total)
            captured = main.end_capture()
            captured.launch()
            assert total.get() == 5
            return int(seen.get())


# -- conditional nodes -------------------------------------------------------------------------------------------------


class Capturing:
    """A capture, and the calls that make conditional nodes in it."""

    def __init__(self, cupy: FakeCupy) -> None:
        self.cupy = cupy
        self.driver, self.runtime = cupy.bindings.driver, cupy.bindings.runtime
        self.main = cupy.cuda.Stream(non_blocking=True)
        self.module = cupy.RawModule(code=SOURCE)

    def graph(self, stream: Any) -> Any:
        return self.runtime.cudaStreamGetCaptureInfo(stream.ptr)[3]

    def handle(self, stream: Any, default: int | None = None) -> Any:
        _, context = self.driver.cuCtxGetCurrent()
        flags = 0 if default is None else CU_GRAPH_COND_ASSIGN_DEFAULT
        error, handle = self.driver.cuGraphConditionalHandleCreate(self.graph(stream), context, default or 0, flags)
        assert error == 0
        return handle

    def set_branch(self, handle: Any, pred: Any) -> None:
        self.module.get_function("set_branch")((1,), (1,), (np.uint64(int(handle)), pred))

    def add(self, stream: Any, handle: Any, kind: str, size: int) -> tuple[int, Sequence[Any]]:
        """The error, and the bodies."""
        _, context = self.driver.cuCtxGetCurrent()
        params = node_params(self.driver, kind, size, handle, context)
        nodes = self.runtime.cudaStreamGetCaptureInfo(stream.ptr)[4]
        error, node = self.driver.cuGraphAddNode(self.graph(stream), nodes, None, len(nodes), params)
        if not error:
            flags = self.runtime.cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
            self.runtime.cudaStreamUpdateCaptureDependencies(stream.ptr, [node], None, 1, flags)
        return int(error), params.conditional.phGraph_out

    @contextmanager
    def body(self, graph: Any) -> Iterator[Any]:
        side = self.cupy.cuda.Stream(non_blocking=True)
        mode = self.runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        self.runtime.cudaStreamBeginCaptureToGraph(side.ptr, graph, None, None, 0, mode)
        with side:
            yield side
        self.runtime.cudaStreamEndCapture(side.ptr)


@pytest.fixture
def capturing(cupy: FakeCupy) -> Capturing:
    return Capturing(cupy)


@pytest.mark.parametrize("size", [1, 2])
def test_one_branch_runs(cupy: FakeCupy, capturing: Capturing, size: int) -> None:
    with capturing.main as main:
        pred, found = cupy.zeros((), bool), cupy.zeros(())
        main.begin_capture()
        handle = capturing.handle(main)
        capturing.set_branch(handle, pred)
        _, bodies = capturing.add(main, handle, "IF", size)
        for value, graph in enumerate(bodies, start=1):
            with capturing.body(graph):
                found.fill(value)
        graph = main.end_capture()
        for value, wanted in ((True, 1), (False, 2 if size == 2 else 0), (True, 1)):
            pred.fill(value)
            found.fill(0)
            graph.launch()
            assert found.get() == wanted


@pytest.mark.parametrize(("default", "wanted"), [(0, {0}), (1, {1}), (None, {0, 1})])
def test_without_a_kernel_that_sets_it_a_handle_has_its_default_or_anything(
    cupy: FakeCupy, capturing: Capturing, default: int | None, wanted: set[int]
) -> None:
    with capturing.main as main:
        found = cupy.zeros(())
        main.begin_capture()
        _, (graph,) = capturing.add(main, capturing.handle(main, default), "IF", 1)
        with capturing.body(graph):
            cupy.add(found, 1, out=found)
        captured = main.end_capture()
        seen = set()
        for _ in range(30):
            found.fill(0)
            captured.launch()
            seen.add(int(found.get()))
        assert seen == wanted


def test_a_default_is_assigned_once_a_launch_and_not_when_a_node_is_come_to_again(
    cupy: FakeCupy, capturing: Capturing
) -> None:
    """The branch in the loop is taken in the first iteration, which clears its handle for all that follow."""
    with capturing.main as main:
        state = cupy.asarray(Limits(5).state())
        always, never, found = cupy.ones((), bool), cupy.zeros((), bool), cupy.zeros(())
        main.begin_capture()
        loop = capturing.handle(main)
        arguments = np.uint64(int(loop)), always, state
        set_loop = capturing.module.get_function("set_loop")
        set_loop((1,), (1,), arguments)
        _, (iteration,) = capturing.add(main, loop, "WHILE", 1)
        with capturing.body(iteration) as side:
            branch = capturing.handle(side, default=1)
            _, (taken,) = capturing.add(side, branch, "IF", 1)
            with capturing.body(taken):
                cupy.add(found, 1, out=found)
                capturing.set_branch(branch, never)
            set_loop((1,), (1,), arguments)
        graph = main.end_capture()
        for launches in (1, 2):
            state[:3].fill(0)
            graph.launch()
            assert (int(state.get()[0]), int(found.get())) == (5, launches)


def test_handles_belong_to_a_graph_and_to_one_node_of_it(cupy: FakeCupy, capturing: Capturing) -> None:
    other = cupy.cuda.Stream(non_blocking=True)
    with capturing.main as main:
        pred = cupy.zeros((), bool)
        main.begin_capture()
        other.begin_capture()
        handle, foreign = capturing.handle(main), capturing.handle(other)
        with pytest.raises(CUDARuntimeError):
            capturing.set_branch(foreign, pred)
        assert capturing.add(main, foreign, "IF", 1)[0] == 1
        assert capturing.add(main, handle, "WHILE", 2)[0] == 1
        assert capturing.add(main, handle, "IF", 3)[0] == 1
        assert capturing.add(main, handle, "IF", 2)[0] == 0
        assert capturing.add(main, handle, "IF", 2)[0] == 1
        main.end_capture()
    with pytest.raises(CUDARuntimeError):
        other.end_capture()  # its handle has no node


def test_a_broken_body_ends_the_process(cupy: FakeCupy, capturing: Capturing) -> None:
    with capturing.main as main:
        main.begin_capture()
        _, (graph,) = capturing.add(main, capturing.handle(main), "IF", 1)
        with capturing.body(graph) as side, pytest.raises(CUDARuntimeError):
            side.synchronize()
        with pytest.raises(DriverCrash):
            main.end_capture()
    assert len(cupy.engine.errors) == 1
    cupy.engine.errors.clear()


def test_a_capture_does_not_end_before_its_bodies(cupy: FakeCupy, capturing: Capturing) -> None:
    with capturing.main as main:
        main.begin_capture()
        _, (graph,) = capturing.add(main, capturing.handle(main), "IF", 1)
        with capturing.body(graph), pytest.raises(CUDARuntimeError):
            main.end_capture()
