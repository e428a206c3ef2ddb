"""Loops that the device runs by itself, on a stand-in for CuPy and for `cuda.bindings`."""

from __future__ import annotations

import ctypes
import gc
import itertools
import shutil
import subprocess
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.devices.captures import MOST_KEYS
from asyncflow.devices.cuda.graphs.conditional import (
    ENDED,
    GIVEN_UP,
    SOURCE,
    STOPPED,
    TOO_LONG,
    Limits,
    node_params,
)
from asyncflow.devices.cuda.graphs.loop import DeviceLoop, Iterated
from asyncflow.devices.machine import hardware
from asyncflow.streams.cuda.bindings import cuda_bindings, stand_ins
from tests.devices.cards import MIB, CapturingCard
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.bindings import (
    CUgraphConditionalNodeType,
    CUgraphNodeType,
    cudaStreamCaptureMode,
    cudaStreamUpdateCaptureDependenciesFlags,
)
from tests.fake_cupy.graphs import SETTERS
from tests.fake_cupy.stand_in import last_of


class Card(CapturingCard):
    def loop(self, condition: Callable[..., Any], body: Callable[..., Any], **limits: int) -> Loop:
        return Loop(self, condition, body, Limits(**limits))


class Loop:
    """A loop, and how often Python ran its functions."""

    def __init__(self, card: Card, condition: Callable[..., Any], body: Callable[..., Any], limits: Limits) -> None:
        self.card = card
        self.calls = {"condition": 0, "body": 0}
        functions = (self.counted("condition", condition), self.counted("body", body))
        self.limits = limits
        self.device = DeviceLoop(card.cupy, card.stream, card.pool, card.cupy.bindings, *functions, "while")

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            self.calls[name] += 1
            return function(self.card.cupy, *values)

        return call

    def launch(self, variables: list[Any], captures: list[Any] = []) -> Iterated | None:  # noqa: B006 - not changed
        cupy = self.card.cupy
        with self.card.stream:
            here, captured = (
                [cupy.asarray(x) if isinstance(x, np.ndarray) else x for x in values]
                for values in (variables, captures)
            )
            return self.device.launch(here, captured, self.limits)

    def __call__(self, variables: list[Any], captures: list[Any] = []) -> tuple[list[Any], int]:  # noqa: B006 - likewise
        values, (count, outcome, _) = self.launched(variables, captures)
        assert outcome == ENDED
        return values, count

    def launched(self, variables: list[Any], captures: Sequence[Any] = ()) -> tuple[list[Any], list[int]]:
        """The values after one launch, and its state but for the limits."""
        found = self.launch(variables, list(captures))
        assert found is not None
        with self.card.stream:
            return [value.get() for value in found.values], found.state.get().tolist()[:3]


@pytest.fixture
def card(fake: FakeCupy) -> Card:
    return Card(fake)


def is_below(xp: Any, i: Any, total: Any, n: Any) -> Any:
    return xp.less(i, n)


def add_up(xp: Any, i: Any, total: Any, n: Any) -> tuple[Any, ...]:
    return i + np.int64(1), total + i


@pytest.mark.parametrize("n", [0, 1, 2, 7, 1000])
def test_a_loop_runs_as_often_as_its_predicate_says(card: Card, n: int) -> None:
    loop = card.loop(is_below, add_up)
    (i, total), count = loop([np.int64(0), np.zeros(3)], [np.asarray(n)])
    assert (i, count) == (n, n)
    assert total.tolist() == [n * (n - 1) / 2] * 3


def test_one_capture_serves_all_trip_counts(card: Card) -> None:
    loop = card.loop(is_below, add_up)
    for n in (3, 0, 1, 5, 0, 200):
        (i, total), count = loop([np.int64(0), np.full(3, 0.5)], [np.asarray(n)])
        assert (i, count) == (n, n)
        assert total.tolist() == [n * (n - 1) / 2 + 0.5] * 3
    # To compile, to see whether all of it can be captured, and to capture it, each time before and inside the loop.
    assert loop.calls == {"condition": 6, "body": 3}


def test_nothing_blocks_and_results_are_not_overwritten(fake: FakeCupy, card: Card) -> None:
    loop = card.loop(is_below, add_up)
    loop([np.int64(0), np.zeros(2)], [np.asarray(1)])
    with card.stream:
        limits = [fake.asarray(np.asarray(n)) for n in range(6)]
        start = fake.zeros(2)
        before = [name for name in fake.blocking() if name != "malloc"]
        fake.pause()
        found = [loop.device.launch([np.int64(0), start], [n]) for n in limits]
        assert [name for name in fake.blocking() if name != "malloc"] == before
        fake.resume()
        assert [int(one.values[0].get()) for one in found if one is not None] == [0, 1, 2, 3, 4, 5]
        assert [one.values[1].get()[0] for one in found if one is not None] == [0, 0, 1, 3, 6, 10]


@pytest.mark.parametrize(("most", "n"), [(1, 0), (1, 1), (1, 5), (5, 4), (5, 5), (5, 6), (5, 5000)])
def test_a_launch_ends_after_so_many_iterations_and_says_so(card: Card, most: int, n: int) -> None:
    loop = card.loop(is_below, add_up, most=most)
    (i, total), state = loop.launched([np.int64(0), np.zeros(1)], [np.asarray(n)])
    done = min(n, most)
    assert (i, total.tolist()) == (done, [done * (done - 1) / 2])
    assert state == [done, STOPPED if n > most else ENDED, 0]


def test_a_loop_that_was_stopped_goes_on_from_its_values(card: Card) -> None:
    loop = card.loop(is_below, add_up, most=4)
    values: list[Any] = [np.int64(0), np.zeros(1)]
    rounds = 0
    while True:
        values, (_, outcome, _) = loop.launched(values, [np.asarray(11)])
        rounds += 1
        if outcome == ENDED:
            break
    assert (values[0], values[1].tolist(), rounds) == (11, [55], 3)


def test_no_launch_without_iterations(card: Card) -> None:
    with pytest.raises(ValueError, match=r"at least 1 iteration; got Limits\(most=0"):
        card.loop(is_below, add_up, most=0)
    with pytest.raises(ValueError, match="inside=0"):
        card.loop(is_below, add_up, inside=0)


def test_variables_that_take_each_others_place(card: Card) -> None:
    def rotated(xp: Any, n: Any, a: Any, b: Any, c: Any) -> tuple[Any, ...]:
        return n - np.int32(1), b, c, a

    loop = card.loop(lambda xp, n, *_: n > 0, rotated)
    for n in range(5):
        (_, *found), _ = loop([np.int32(n), *(np.full(2, float(k)) for k in range(3))])
        assert [int(x[0]) for x in found] == [n % 3, (n + 1) % 3, (n + 2) % 3]


def test_variables_that_are_views_of_themselves(card: Card) -> None:
    def turned(xp: Any, n: Any, a: Any, b: Any) -> tuple[Any, ...]:
        return n - np.int32(1), a.T, b[::-1]

    loop = card.loop(lambda xp, n, *_: n > 0, turned)
    a, b = np.arange(9.0).reshape(3, 3), np.arange(4)
    for n in (0, 1, 2, 3):
        (_, found, reverse), _ = loop([np.int32(n), a, b])
        np.testing.assert_array_equal(found, a.T if n % 2 else a)
        np.testing.assert_array_equal(reverse, b[::-1] if n % 2 else b)


def test_variables_that_stay_or_become_a_constant(card: Card) -> None:
    loop = card.loop(
        lambda xp, goes_on, *_: goes_on,
        lambda xp, goes_on, kept, reset, taken, x, y: (np.bool_(False), kept, np.float32(2), x),
    )
    variables = [np.bool_(True), np.ones(2), np.float32(0), np.zeros(3)]
    (goes_on, kept, reset, taken), count = loop(variables, [np.arange(3.0), np.float64(7)])
    assert (bool(goes_on), kept.tolist(), float(reset), taken.tolist(), count) == (False, [1, 1], 2.0, [0, 1, 2], 1)


def test_an_empty_variable(card: Card) -> None:
    loop = card.loop(lambda xp, n, x: n > 0, lambda xp, n, x: (n - np.int8(1), x + 1))
    (n, x), count = loop([np.int8(3), np.zeros((0, 2))])
    assert (int(n), x.shape, count) == (0, (0, 2), 3)


def test_shapes_and_captured_host_values_have_graphs_of_their_own(card: Card) -> None:
    loop = card.loop(lambda xp, x, step: xp.max(x) < 10, lambda xp, x, step: (x + step,))
    for step in (np.float64(1), np.float64(3)):
        for size in (2, 5):
            for start in (0.0, 4.0):
                (x,), _ = loop([np.full(size, start)], [step])
                wanted = start
                while wanted < 10:
                    wanted += step
                assert x.tolist() == [wanted] * size
    assert loop.calls["body"] == 4 * 3


def test_ever_new_host_values_are_no_longer_captured(card: Card) -> None:
    loop = card.loop(lambda xp, x, step: x[0] < 3, lambda xp, x, step: (x + step,))
    launched = [loop.launch([np.zeros(1)], [np.float64(k + 1)]) is not None for k in range(MOST_KEYS + 3)]
    assert launched == [True] * MOST_KEYS + [False] * 3
    assert loop.launch([np.zeros(1)], [np.float64(1)]) is not None


REFUSED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "cuBLAS": (lambda xp, x: xp.max(x) < 3, lambda xp, x: (xp.matmul(x, x) + 1,)),
    "a predicate on the host": (lambda xp, x: np.bool_(False), lambda xp, x: (x,)),
    "a predicate of numbers": (lambda xp, x: xp.max(x), lambda xp, x: (x,)),
    "several predicates": (lambda xp, x: x < 0, lambda xp, x: (x,)),
    "a shape that changes": (lambda xp, x: xp.max(x) < 3, lambda xp, x: (x[:1],)),
    "a dtype that changes": (lambda xp, x: xp.max(x) < 3, lambda xp, x: (x.astype(np.int32),)),
    "a value of Python's": (lambda xp, x: xp.max(x) < 3, lambda xp, x: (None,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_left_to_the_host(card: Card, name: str) -> None:
    loop = card.loop(*REFUSED[name])
    assert loop.launch([np.zeros((2, 2))]) is None
    calls = dict(loop.calls)
    assert loop.launch([np.zeros((2, 2))]) is None
    assert loop.calls == calls
    assert not card.stream.raw.is_capturing()
    assert card.stream.pool is card.pool
    gc.collect()
    assert card.pool.account.used == 0


@pytest.mark.parametrize(
    "call", ["streamBeginCapture", "graphInstantiate", "cuGraphConditionalHandleCreate", "launchKernel"]
)
def test_a_failure_of_cuda_while_capturing_leaves_the_loop_to_the_host(fake: FakeCupy, card: Card, call: str) -> None:
    loop = card.loop(is_below, add_up)
    with card.stream:
        values = [np.int64(0), fake.zeros(1)]
        n = fake.asarray(np.asarray(3))
        fake.fail_next(1, call)
        assert loop.device.launch(values, [n]) is None
    assert not card.stream.raw.is_capturing()


def test_a_failure_in_the_body_while_it_is_captured_ends_both_captures(card: Card) -> None:
    calls = 0

    def breaks_at_the_second(xp: Any, x: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("only in the capture")
        return (x + 1,)

    loop = card.loop(lambda xp, x: xp.max(x) < 3, breaks_at_the_second)
    assert loop.launch([np.zeros(2)]) is None
    assert calls == 2
    assert not card.stream.raw.is_capturing()
    assert card.cupy.engine.captures == []


def test_without_bindings_and_for_values_that_have_no_buffers_the_host_drives(card: Card) -> None:
    functions: tuple[Any, Any] = (lambda x: x.max() < 3, lambda x: (x + 1,))
    alone = DeviceLoop(card.cupy, card.stream, card.pool, None, *functions, "while")
    with card.stream:
        whole = card.cupy.zeros((2, 4))
        assert alone.launch([whole]) is None
        bound = DeviceLoop(card.cupy, card.stream, card.pool, card.cupy.bindings, *functions, "while")
        assert bound.launch(["text"]) is None
        assert bound.launch([whole], [object()]) is None
        assert bound.launch([whole]) is not None
        assert bound.launch([whole[:, ::2]]) is not None  # as a copy without gaps


def test_memory_of_a_loop_counts_until_it_is_released(fake: FakeCupy, card: Card) -> None:
    loop = card.loop(is_below, lambda xp, i, x, n: (i + np.int64(1), xp.tanh(x * 2) + 1))
    loop([np.int64(0), np.zeros(64)], [np.asarray(3)])
    assert {buffer.label for buffer in card.pool.account.top()} == {"CUDA graph of while"}
    with card.stream:
        others = [fake.full(64, float(k)) for k in range(20)]
        loop([np.int64(0), np.zeros(64)], [np.asarray(50)])
        assert [int(other.get()[0]) for other in others] == list(range(20))
        del others
    loop.device._graphs.clear()
    gc.collect()
    assert card.pool.account.used == 0


def test_all_memory_of_a_loop_is_of_the_compute_streams_arena(fake: FakeCupy) -> None:
    """A pool that was primed has nothing for the stream that the body is captured on."""
    card = Card(fake, limit=MIB)
    with card.stream:
        card.pool.prime()
    reserved = len([name for _, name in fake.calls if name == "malloc"])
    loop = card.loop(is_below, lambda xp, i, x, n: (i + np.int64(1), xp.tanh(x * 2) + 1))
    loop([np.int64(0), np.zeros(64)], [np.asarray(3)])
    assert len([name for _, name in fake.calls if name == "malloc"]) == reserved


def test_a_loop_without_room_is_left_to_the_host(fake: FakeCupy) -> None:
    card = Card(fake, limit=8 * 512)
    loop = card.loop(lambda xp, x: xp.max(x) < 3, lambda xp, x: (x + 1,))
    with card.stream:
        kept = [fake.zeros(512)]
        assert loop.device.launch(kept) is None
        gc.collect()
        assert card.pool.account.used == kept[0].nbytes


# -- against the host --------------------------------------------------------------------------------------------------


def by_numpy(condition: Any, body: Any, values: list[Any]) -> tuple[list[Any], int]:
    count = 0
    with np.errstate(all="ignore"):
        while condition(np, *values):
            values = list(body(np, *values))
            count += 1
    return values, count


def collatz(xp: Any, x: Any, steps: Any) -> tuple[Any, ...]:
    lives = x != 1
    following = xp.where(x % 2 == 0, x // 2, 3 * x + 1)
    return xp.where(lives, following, x), steps + lives


def newton(xp: Any, x: Any, a: Any) -> tuple[Any, ...]:
    return (x + a / x) / 2, a


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(1, 300), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(0, 2**16))
def test_collatz(starts: list[list[int]], seed: int) -> None:
    with FakeCupy(nbytes=8 * MIB, seed=seed) as fake:
        condition = lambda xp, x, steps: xp.any(x != 1)  # noqa: E731 - as in the other tests
        loop = Card(fake).loop(condition, collatz)
        for start in starts:
            values = [np.asarray(start), np.zeros(3, np.int64)]
            found, count = loop(values)
            wanted, times = by_numpy(condition, collatz, values)
            assert count == times
            for left, right in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(left, right)
        assert loop.calls["body"] == 3


@settings(max_examples=25, deadline=None)
@given(st.floats(1e-3, 1e6), st.floats(1e-12, 1.0), st.integers(0, 2**16))
def test_newtons_square_root(a: float, tolerance: float, seed: int) -> None:
    def is_rough(xp: Any, x: Any, a: Any) -> Any:
        return xp.abs(x * x - a) > tolerance * a

    with FakeCupy(nbytes=8 * MIB, seed=seed) as fake:
        values = [np.asarray(a), np.asarray(a)]
        (x, _), count = Card(fake).loop(is_rough, newton)(values)
        (wanted, _), times = by_numpy(is_rough, newton, values)
    assert (x, count) == (wanted, times)


UPDATES: dict[str, Callable[..., Any]] = {
    "tanh": lambda xp, x, y: xp.tanh(x) + y,
    "mixed": lambda xp, x, y: x * 0.5 - y,
    "other": lambda xp, x, y: y,
    "summed": lambda xp, x, y: xp.broadcast_to(xp.mean(x, axis=0, keepdims=True), x.shape) + y * 0.25,
    "turned": lambda xp, x, y: x.T,
    "same": lambda xp, x, y: x,
    "larger": lambda xp, x, y: xp.maximum(x, y),
}


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(UPDATES)), st.sampled_from(sorted(UPDATES)), st.integers(0, 12), st.integers(0, 2**16))
def test_any_body_gives_what_numpy_gives(first: str, second: str, n: int, seed: int) -> None:
    def body(xp: Any, i: Any, x: Any, y: Any) -> tuple[Any, ...]:
        return i + np.int64(1), UPDATES[first](xp, x, y), UPDATES[second](xp, y, x)

    def condition(xp: Any, i: Any, x: Any, y: Any) -> Any:
        return xp.logical_and(i < n, xp.sum(x) < 50)

    random = np.random.default_rng(seed)
    with FakeCupy(nbytes=8 * MIB, seed=seed) as fake:
        loop = Card(fake).loop(condition, body)
        for _ in range(2):
            values = [np.int64(0), random.normal(size=(3, 3)), random.normal(size=(3, 3))]
            found, count = loop(values)
            wanted, times = by_numpy(condition, body, values)
            assert count == times
            for left, right in zip(found, wanted, strict=True):
                np.testing.assert_allclose(left, right, rtol=1e-12)


# -- the rest of the world ---------------------------------------------------------------------------------------------


def test_bindings_come_from_the_test(fake: FakeCupy) -> None:
    before = cuda_bindings()
    with last_of(stand_ins, fake.bindings):
        assert cuda_bindings() is fake.bindings
    assert cuda_bindings() is before


if (cpp := shutil.which("c++")) is not None:

    def test_the_kernels_that_decide_do_what_the_stand_in_does(tmp_path: Path) -> None:
        """The kernels' source is compiled for this machine, with the address of a value for a handle."""
        source, library = tmp_path / "kernels.cpp", tmp_path / "kernels.so"
        source.write_text(f"""
            #define __global__
            #define __device__
            {SOURCE}
            extern "C" void cudaGraphSetConditional(unsigned long long handle, unsigned int value)
            {{ *reinterpret_cast<unsigned int*>(handle) = value; }}
        """)
        subprocess.run([str(cpp), "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=100)
        kernels = ctypes.CDLL(str(library))
        states = list(itertools.product((0, 1, 2), (ENDED, STOPPED, GIVEN_UP, TOO_LONG), (0, 4, 5)))
        for pred, state, count, most in itertools.product((False, True), states, (0, 1), (0, 1, 2)):
            for name in ("set_branch", "set_loop", "set_inner_loop"):
                arrays = [np.asarray(pred), np.asarray((*state, most, 4, 5, most)), np.asarray(count)]
                arrays = arrays[: {"set_branch": 1, "set_loop": 2, "set_inner_loop": 3}[name]]
                copies = [array.copy() for array in arrays]
                value = ctypes.c_uint(7)
                pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
                kernels[name](ctypes.c_ulonglong(ctypes.addressof(value)), *pointers)
                assert value.value == SETTERS[name](*copies)
                assert [array.tolist() for array in arrays] == [array.tolist() for array in copies]


def nvrtc() -> Path | None:
    """NVIDIA's compiler, where its wheel is installed; it needs no GPU."""
    try:
        files = metadata.files("nvidia-cuda-nvrtc") or []
    except metadata.PackageNotFoundError:
        return None
    found = [file.locate() for file in files if file.name.startswith("libnvrtc.so")]
    return Path(str(found[0])) if found else None


if (compiler := nvrtc()) is not None:

    def test_the_kernels_that_decide_compile_for_hopper() -> None:
        library = ctypes.CDLL(str(compiler))
        program = ctypes.c_void_p()
        assert library.nvrtcCreateProgram(ctypes.byref(program), SOURCE.encode(), b"conditional", 0, None, None) == 0
        options = (ctypes.c_char_p * 2)(b"-arch=sm_90", b"-std=c++17")
        assert library.nvrtcCompileProgram(program, 2, options) == 0
        size = ctypes.c_size_t()
        assert library.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
        assert size.value > 0


if (real := cuda_bindings()) is not None and not hardware.has_nvidia_driver():

    def test_the_real_bindings_take_the_same_arguments() -> None:
        """Without a driver every call fails, but no longer because of its arguments."""
        assert real is not None
        driver, runtime = real.driver, real.runtime
        for kind, size in (("WHILE", 1), ("IF", 2)):
            params = node_params(driver, kind, size, driver.CUgraphConditionalHandle(5), driver.CUcontext(7))
            conditional = params.conditional
            assert (int(conditional.handle), int(conditional.ctx), conditional.size) == (5, 7, size)
            assert conditional.type == getattr(CUgraphConditionalNodeType, f"CU_GRAPH_COND_TYPE_{kind}")
            assert params.type == CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        flags = runtime.cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
        assert mode == cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        assert flags == cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
        stream, node, graph = 0x10, driver.CUgraphNode(3), driver.CUgraph(4)
        results = [
            runtime.cudaStreamGetCaptureInfo(stream),
            runtime.cudaStreamUpdateCaptureDependencies(stream, [node], None, 1, flags),
            runtime.cudaStreamBeginCaptureToGraph(stream, graph, None, None, 0, mode),
            runtime.cudaStreamEndCapture(stream),
        ]
        assert [len(result) for result in results] == [7, 1, 1, 2]
        assert all(int(result[0]) for result in results)
