"""Captures, launches and conditional nodes of the fake."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.fake_cupy import FakeCupy
from tests.fake_cupy.errors import CUDARuntimeError

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


def test_what_is_captured_is_not_done_until_it_is_launched(cupy: FakeCupy, stream: Any) -> None:
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


def test_a_launch_reads_what_is_in_the_memory_then(cupy: FakeCupy, stream: Any) -> None:
    with stream:
        x = cupy.arange(4)
        stream.begin_capture()
        y = x * 2
        graph = stream.end_capture()
        x += 1
        graph.launch()
        np.testing.assert_array_equal(y.get(), [2, 4, 6, 8])


def test_memory_freed_in_a_capture_is_spoilt_by_each_launch(cupy: FakeCupy, stream: Any) -> None:
    with stream:
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


def test_memory_that_a_graph_uses_and_somebody_else_got_is_overwritten(cupy: FakeCupy, stream: Any) -> None:
    """Why a graph needs a pool of its own."""
    with stream:
        x = cupy.ones(4)
        stream.begin_capture()
        y = (x + 1) * 2
        graph = stream.end_capture()
        assert graph.captured.names() == ["cupy_add", "cupy_multiply", "poison"]
        victim = cupy.full(4, 7.0)
        graph.launch()
        assert victim.get().tolist() != [7.0] * 4
        assert y.get().tolist() == [4.0] * 4


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
    """Why the capture's dependencies have to be updated."""
    results = {_looped(seed, update=False) for seed in range(12)}
    assert results == {0, 5}
    assert {_looped(seed, update=True) for seed in range(12)} == {5}


def _looped(seed: int, *, update: bool) -> int:
    """What work behind a loop that counts to 5 finds."""
    source = 'cudaGraphSetConditional extern "C" __global__ void set_cond('
    with FakeCupy(seed=seed) as cupy:
        driver, runtime = cupy.bindings.driver, cupy.bindings.runtime
        main, side = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        with main:
            count, total, seen = cupy.zeros((), np.int64), cupy.zeros(()), cupy.zeros(())
            pred = cupy.ones((), bool)
            kernel = cupy.RawModule(code=source).get_function("set_cond")
            main.begin_capture()
            _, _, _, graph, *_ = runtime.cudaStreamGetCaptureInfo(main.ptr)
            _, context = driver.cuCtxGetCurrent()
            _, handle = driver.cuGraphConditionalHandleCreate(graph, context, 0, 0)
            args = (np.uint64(int(handle)), pred, count, np.int64(5))
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
