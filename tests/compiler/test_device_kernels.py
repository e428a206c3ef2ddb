"""Kernels of users for kinds of devices: registration, calls on a card, placement, and what people are told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import virtual_clock
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.stand_in import stand_in

LENGTH = 3000
VALUE = np.arange(LENGTH, dtype=np.float32)


class Doubled:
    """An op with a function for NumPy and a kernel for cards, which note their calls."""

    def __init__(self, *, graph_safe: bool = False, **options: Any) -> None:
        self.calls: list[Any] = []
        self.streams: list[Any] = []
        self.given: list[Any] = []

        @af.op(outputs=lambda x: x, cost=lambda inputs, outputs: 3000.0, **options)
        def double(x: Any) -> Any:
            self.calls.append("host")
            return x * 2

        self.op = double
        self.graph_safe = graph_safe

    def register(self) -> None:
        @self.op.kernel("cuda", graph_safe=self.graph_safe)
        def double_on_card(x: Any, *, stream: Any) -> Any:
            self.calls.append("card")
            self.streams.append(stream)
            self.given.append(x)
            return x + x


@pytest.fixture(params=range(2))
def fake(request: pytest.FixtureRequest) -> Iterator[FakeCupy]:
    """The stand-in, which serves streams in an order of its own."""
    with stand_in(nbytes=16 << 20, seed=request.param) as fake:
        yield fake


def copies(session: af.Session) -> int:
    return session.devices[0].memory.requests.copies


async def test_a_kernel_gets_the_arrays_and_the_stream_of_its_card(fake: FakeCupy, graph: af.Graph) -> None:
    double = Doubled()
    double.register()
    x = af.placeholder("float32", (None,))
    y = double.op(x + 1) - 1
    async with af.Session(graph, devices=["cuda:0"], debug=True, compute_streams=2) as session:
        found = await session.run(af.on_device(y), {x: VALUE})
        before = copies(session)
        await session.run(af.on_device(y), {x: found})
        compute = session.devices[0].compute_streams[0].raw  # type: ignore[attr-defined]
    assert double.calls == ["card", "card"]
    assert {type(each) for each in double.given} == {fake.ndarray}
    assert [each.ptr for each in double.streams] == [compute.ptr] * 2
    assert copies(session) - before == 1, "the array that is fed from the card, to the card"
    np.testing.assert_array_equal(found.get(), (VALUE + 1) * 2 - 1)


async def test_the_host_makes_two_copies_a_call_without_a_kernel(
    fake: FakeCupy, graph: af.Graph, caplog: pytest.LogCaptureFixture
) -> None:
    double = Doubled()
    x = af.placeholder("float32", (None,))
    y = double.op(double.op(x + 1) - 1)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        await session.run(af.on_device(y), {x: VALUE})
        before = copies(session)
        await session.run(af.on_device(y), {x: VALUE})
        assert copies(session) - before == 1 + 4
        told = session.plan(af.on_device(y), [x]).explain()
    assert "no kernel for 'cuda' is registered, so the host calls its function" in told
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warned) == 1, "once for an op"
    assert "up to 1 array copied to the host and 1 back in each call" in warned[0]
    assert "built at" in warned[0]


async def test_a_kernel_registered_later_is_used_from_then_on(fake: FakeCupy, graph: af.Graph) -> None:
    double = Doubled()
    x = af.placeholder("float32", (None,))
    y = double.op(x)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        await session.run(y, {x: VALUE})
        double.register()
        await session.run(y, {x: VALUE})
        assert "double_on_card" in session.plan(y, [x]).explain()
    assert double.calls == ["host", "card"]


async def test_a_session_has_kernels_of_its_own(fake: FakeCupy, graph: af.Graph) -> None:
    double, calls = Doubled(), list[Any]()
    double.register()

    def softmax(x: Any, *, axis: int) -> Any:
        calls.append(("softmax", axis))
        return x * 0

    def other(x: Any) -> Any:
        calls.append("other")
        return x + x

    x = af.placeholder("float32", (2, LENGTH))
    y = af.softmax(double.op(x), axis=1)
    value = np.ones((2, LENGTH), np.float32)
    own: dict[tuple[object, str], Any] = {("softmax", "cuda"): softmax, (double.op, "cuda"): other}
    async with af.Session(graph, devices=["cuda:0"], kernels=own) as session:
        assert not (await session.run(y, {x: value})).any()
        told = session.plan(y, [x]).explain()
    assert calls == ["other", ("softmax", 1)]
    assert double.calls == []
    assert "softmax on cuda:0: softmax (" in told
    assert "the session's for 'cuda'" in told
    async with af.Session(graph, devices=["cuda:0"]) as session:
        np.testing.assert_allclose((await session.run(y, {x: value})).sum(), 2.0, rtol=1e-5)
    assert double.calls == ["card"]


async def test_strings_and_effects_are_left_to_the_host(
    fake: FakeCupy, graph: af.Graph, caplog: pytest.LogCaptureFixture
) -> None:
    double = Doubled(stateful=True)

    @af.op(outputs=lambda text: text)
    def twice(text: Any) -> Any:
        return np.strings.add(text, text)

    twice.kernel("cuda")(plain)
    y, z = double.op(af.constant(VALUE)), twice(af.constant("a"))
    async with af.Session(graph, devices=["cuda:0"]) as session:
        found = await session.run([y, z])
        assert found[1] == "aa"
        double.register()
        await session.run([y, z])
    assert double.calls == ["host", "card"]
    assert caplog.records == []


async def test_calls_of_several_runs_are_one_call_of_the_kernel(fake: FakeCupy, graph: af.Graph) -> None:
    double = Doubled(batch=af.Batch(max_size=4))
    double.register()
    x = af.placeholder("float32", (LENGTH,))
    y = double.op(x)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        found = await asyncio.gather(*(session.run(y, {x: VALUE + k}) for k in range(4)))
    np.testing.assert_array_equal(found, [(VALUE + k) * 2 for k in range(4)])
    assert [each.shape for each in double.given] == [(4, LENGTH)]


async def test_a_ufunc_is_a_kernel(fake: FakeCupy, graph: af.Graph) -> None:
    x = af.placeholder("float32", (None,))
    y = af.exp(x)
    for device, ufunc in (("cuda", fake.exp), ("cpu", np.exp)):
        async with af.Session(graph, devices=[device], kernels={(af.exp, device): ufunc}) as session:
            np.testing.assert_allclose(await session.run(y, {x: VALUE / LENGTH}), np.exp(VALUE / LENGTH), rtol=1e-6)
            assert f"exp, the session's for '{device}'" in session.plan(y, [x]).explain()


async def test_numbers_come_as_arrays_of_the_card(fake: FakeCupy, graph: af.Graph) -> None:
    @af.op(outputs=lambda x, n: x)
    def scaled(x: Any, n: Any) -> Any:
        return x * n

    given = []

    @scaled.kernel("cuda")
    def _(x: Any, n: Any) -> Any:
        given.append(n)
        return x * n

    x, n = af.placeholder("float32", (None,)), af.placeholder("float32", ())
    y = scaled(x, n)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        np.testing.assert_array_equal(await session.run(y, {x: VALUE, n: 3.0}), VALUE * 3)
    assert type(given[0]) is fake.ndarray
    assert given[0].shape == ()


async def test_arrays_of_other_libraries_are_taken_over_where_they_are(fake: FakeCupy, graph: af.Graph) -> None:
    class Foreign:
        def __init__(self, array: Any, *, dlpack: bool) -> None:
            self.array = array
            self.__cuda_array_interface__ = array.__cuda_array_interface__
            if dlpack:
                self.__dlpack_device__ = array.__dlpack_device__
                self.__dlpack__ = array.__dlpack__

    made: list[Any] = []

    @af.op(outputs=lambda x: (x, x))
    def both(x: Any) -> Any:
        return x + 1, x + 2

    @both.kernel("cuda")
    def _(x: Any) -> Any:
        made[:] = x + 1, x + 2
        return Foreign(made[0], dlpack=True), Foreign(made[1], dlpack=False)

    x = af.placeholder("float32", (None,))
    y, z = both(x)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        found = await session.run(af.on_device([y, z]), {x: VALUE})
        assert [each.data.ptr for each in found] == [each.data.ptr for each in made]
        np.testing.assert_array_equal(found[1].get(), VALUE + 2)
        made.clear()
    assert not [name for name in fake.blocking() if "ynchronize" in name or "memcpy" in name]


async def test_an_array_that_the_kernel_keeps_is_copied_on_the_card(fake: FakeCupy, graph: af.Graph) -> None:
    kept: list[Any] = []

    @af.op(outputs=lambda x: x)
    def same(x: Any) -> Any:
        return x.copy()

    @same.kernel("cuda")
    def _(x: Any) -> Any:
        if not kept:
            kept.append(fake.empty_like(x))
        kept[0][...] = x
        return kept[0]

    x = af.placeholder("float32", (None,))
    y = same(x)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        first = await session.run(af.on_device(y), {x: VALUE})
        await session.run(y, {x: VALUE + 1})
        np.testing.assert_array_equal(first.get(), VALUE)
        kept.clear()


async def test_memory_of_a_kernel_comes_from_the_pool_of_its_device(fake: FakeCupy, graph: af.Graph) -> None:
    double = Doubled()
    double.op.kernel("cuda")(lambda x: fake.concatenate([x] * 200)[: x.size])
    x = af.placeholder("float32", (None,))
    y = double.op(x)
    async with af.Session(graph, devices=["cuda:0"], memory_limit=1 << 20) as session:
        with pytest.raises(af.OutOfMemoryError, match=r"(?s)node    double.*cuda:0"):
            await session.run(y, {x: VALUE})


@pytest.mark.parametrize("by_row", [False, True])
async def test_rows_are_computed_by_the_kernel_of_the_card(fake: FakeCupy, graph: af.Graph, by_row: bool) -> None:
    double = Doubled(rows=not by_row)
    double.register()
    x = af.placeholder("float32", (None, LENGTH))
    y = af.vmap(double.op)(x)
    one = double.op(x[0])
    value = np.stack([VALUE, VALUE + 1])
    async with af.Session(graph, devices=["cuda:0"]) as session:
        found, row = await session.run([y, one], {x: value})
    np.testing.assert_array_equal(found, value * 2)
    np.testing.assert_array_equal(row, value[0] * 2)
    shapes = [each.shape for each in double.given]
    assert sorted(shapes) == sorted([(LENGTH,)] * 3 if by_row else [(1, LENGTH), (2, LENGTH)])


async def test_gradients_are_the_ops(fake: FakeCupy, graph: af.Graph) -> None:
    double = Doubled(gradient=lambda inputs, outputs, grads: grads * 2)
    double.register()
    x = af.placeholder("float32", (None,))
    dx = af.gradients(af.sum(double.op(x) ** 2), x)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        np.testing.assert_array_equal(await session.run(dx, {x: VALUE}), VALUE * 8)
    assert double.calls == ["card"]


async def test_cuda_graphs_hold_kernels_that_are_safe(fake: FakeCupy, graph: af.Graph) -> None:
    found = {}
    for graph_safe in (False, True):
        double = Doubled(graph_safe=graph_safe)
        double.register()
        x, op = af.placeholder("float32", (LENGTH,)), double.op

        def body(i: Any, y: Any, op: Any = op) -> Any:
            return i + 1, op(y) - y * 0.5

        _, y = af.while_loop(lambda i, y: i < 9, body, (af.constant(0), x))
        async with af.Session(graph, devices=["cuda:0"], cuda_graphs=True) as session:
            results = [await session.run(y, {x: VALUE}) for _ in range(12)]
            told = session.plan(y, [x]).explain()
        np.testing.assert_allclose(results[-1], VALUE * 1.5**9, rtol=1e-5)
        found[graph_safe] = len(double.calls), "CUDA graph" in told
    assert found[False] == (9 * 12, False)
    assert found[True][0] < 9 * 6
    assert found[True][1]


async def test_a_failure_inside_a_graph_names_node_and_kernel(fake: FakeCupy, graph: af.Graph) -> None:
    calls = []

    @af.op(outputs=lambda x: x)
    def fails(x: Any) -> Any:
        return x

    @fails.kernel("cuda", graph_safe=True)
    def fails_on_card(x: Any) -> Any:
        calls.append(x.shape)
        if len(calls) > 20:
            raise ValueError("no more")
        return x + 1

    x = af.placeholder("float32", (LENGTH,))
    _, y = af.while_loop(lambda i, y: i < 9, lambda i, y: (i + 1, fails(y) * 0.5), (af.constant(0), x))
    async with af.Session(graph, devices=["cuda:0"], cuda_graphs=True) as session:
        with pytest.raises(af.KernelError, match=r"(?s)no more.*node    while/body/fails") as caught:
            for _ in range(9):
                await session.run(y, {x: VALUE})
        assert "in the kernel of fails for 'cuda': fails_on_card (" in "".join(caught.value.__cause__.__notes__)  # type: ignore[union-attr]
        calls.clear()
        await session.run(y, {x: VALUE})


async def test_placement_knows_which_kernels_there_are(fake: FakeCupy, graph: af.Graph) -> None:
    x = af.placeholder("float32", (LENGTH, 1000))
    double = Doubled()
    for registered in (False, True):
        if registered:
            double.register()
        y = af.sum(double.op(af.exp(x)))
        async with af.Session(graph, devices=["cuda:0", "cpu:0"]) as session:
            told = session.plan(y, [x]).explain()
        assert ("double_on_card" in told) is registered
    with af.device("cuda"):
        z = double.op(x)
        w = Doubled().op(x)
    async with af.Session(graph, devices=["cuda:0", "cpu:0"], soft_placement=False) as session:
        session.plan(z, [x])
        with pytest.raises(af.PlacementError, match="no kernel of it runs there"):
            session.plan(w, [x])


def test_a_simulated_card_has_the_kernels_of_a_card(graph: af.Graph) -> None:
    double = Doubled()
    x = af.placeholder("float32", (LENGTH,))
    y = double.op(x + 1) - 1

    async def run() -> int:
        async with af.Session(graph, devices=["sim:0"]) as session:
            before = copies(session)
            np.testing.assert_array_equal(await session.run(y, {x: VALUE}), (VALUE + 1) * 2 - 1)
            return copies(session) - before

    found = []
    for _ in range(2):
        with virtual_clock("1 x v100") as clock:
            found.append(clock.run(run()))
        double.register()
    assert found == [4, 2]
    assert double.calls == ["host", "host"]


async def test_a_kernel_for_cpus(graph: af.Graph) -> None:
    double = Doubled()
    calls = []

    @double.op.kernel("cpu")
    def _(x: Any, *, stream: Any) -> Any:
        calls.append((stream, x.flags.writeable))
        return x + x

    x = af.placeholder("float32", (None,))
    y = double.op(x)
    async with af.Session(graph) as session:
        np.testing.assert_array_equal(await session.run(y, {x: VALUE}), VALUE * 2)
    assert calls == [(None, False)]
    assert af.kernels(double.op)["cpu"] is not double.op.function


# -- mistakes --------------------------------------------------------------------------------------------------------


def plain(x: Any) -> Any:
    return x


async def coroutine(x: Any) -> Any:
    return x


MISTAKES: list[tuple[Any, Any, Any, type[Exception], str]] = [
    (af.softmax, "gpu", plain, af.PlacementError, "unknown kind of device in 'gpu', did you mean 'cuda'"),
    (af.softmax, "cuda:0", plain, af.PlacementError, "say 'cuda', not 'cuda:0'"),
    (af.softmax, 3, plain, af.PlacementError, "3 is no device name"),
    (af.softmax, "cuda", plain, af.GraphError, r"plain\(x.*cannot be called: .*'axis'; softmax has \(x, axis=\)"),
    (af.softmax, "cuda", lambda x, y, *, axis: x, af.GraphError, "missing a required argument: 'y'"),
    (af.softmax, "cuda", coroutine, af.GraphError, "is a plain function"),
    (af.softmax, "cuda", 7, TypeError, "is a function; got 7"),
    ("softmx", "cuda", plain, af.GraphError, "no op is named 'softmx'; did you mean 'softmax'"),
    ("mine", "cuda", plain, af.GraphError, "no op is named 'mine'.*an op of yours is given itself"),
    ("while", "cuda", plain, af.GraphError, "while decides which nodes run"),
    (af.while_loop, "cuda", plain, af.GraphError, "while_loop decides which nodes run"),
    (af.cond, "cuda", plain, af.GraphError, "cond decides which nodes run"),
    (af.nn.lstm_cell, "cuda", plain, af.GraphError, "lstm_cell is made of other ops"),
    (af.reshape, "cuda", plain, af.GraphError, "reshape looks into the memory of its input"),
    ("variable_read", "cuda", plain, af.GraphError, "variable_read touches state"),
    ("random_normal", "cuda", plain, af.GraphError, "draws random numbers"),
    ("tensor_array_read", "cuda", plain, af.GraphError, "is a part of loops"),
    (plain, "cuda", plain, af.GraphError, r"got <function plain.*decorate it with @af.op\(outputs=...\) first"),
    (None, "cuda", plain, af.GraphError, "got None"),
]


@pytest.mark.parametrize(("op", "kind", "function", "error", "message"), MISTAKES)
def test_mistakes(op: Any, kind: Any, function: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        af.register_kernel(op, kind, function)
    with pytest.raises(error, match=message):
        af.Session(kernels={(op, kind): function})


def test_mistakes_of_a_session() -> None:
    with pytest.raises(TypeError, match="kernels is a mapping such as"):
        af.Session(kernels=[("softmax", "cuda", plain)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pairs of an op and a kind of device"):
        af.Session(kernels={"softmax": plain})  # type: ignore[dict-item]


def test_mistakes_of_an_op() -> None:
    @af.op(outputs=lambda x: x, timeout=1.0)
    def limited(x: Any) -> Any:
        return x

    with pytest.raises(af.GraphError, match="limited is a coroutine function, or has limits"):
        limited.kernel("cuda")(plain)

    @af.op(outputs=lambda x: x, stateful=True)
    def counted(x: Any) -> Any:
        return x

    with pytest.raises(af.GraphError, match=r'write @counted.kernel\("cuda"\)'):
        counted.kernel(plain)  # type: ignore[arg-type]
    with pytest.raises(af.GraphError, match="counted has effects, which a CUDA graph would repeat"):
        counted.kernel("cuda", graph_safe=True)(plain)

    @af.op(outputs=lambda x, width: x)
    def smooth(x: Any, *, width: int = 3) -> Any:
        return x

    with pytest.raises(af.GraphError, match=r"unexpected keyword argument 'width'; smooth has \(x, width=\)"):
        smooth.kernel("cuda")(plain)


async def test_an_argument_that_a_kernel_lacks_is_found_when_a_plan_is_made(fake: FakeCupy, graph: af.Graph) -> None:
    @af.op(outputs=lambda x: x)
    def smooth(x: Any, width: int = 3) -> Any:
        return x

    smooth.kernel("cuda")(plain)
    y = smooth(af.constant(VALUE), width=5)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        with pytest.raises(af.GraphError, match=r"(?s)kernel of smooth for 'cuda'.*'width'.*built at .*kernels.py"):
            await session.run(y)


WRONG: list[tuple[Any, str]] = [
    (lambda x: x.get(), "returned numpy.ndarray in the host's memory; a kernel for 'cuda' returns arrays on the card"),
    (lambda x: x.astype("float64"), "returned dtype float64 as its result, declared as float32"),
    (lambda x: x[1:], r"returned shape \[2999\] as its result"),
    (lambda x: None, "returned None; a kernel for 'cuda' returns arrays on the card, such as cupy.zeros_like"),
    (lambda x: [x, "y"], "returned 'y'; a kernel for 'cuda' returns arrays"),
    (lambda x: 1.5, r"returned shape \[\] as its result"),
    (lambda x: (x, x), "returned .* as its result"),
]


@pytest.mark.parametrize("graph_safe", [False, True])
@pytest.mark.parametrize(("function", "message"), WRONG)
async def test_wrong_results(fake: FakeCupy, graph: af.Graph, function: Any, message: str, graph_safe: bool) -> None:
    @af.op(outputs=af.spec("float32", (LENGTH,)))
    def same(x: Any) -> Any:
        return x

    same.kernel("cuda", graph_safe=graph_safe)(function)
    x = af.placeholder("float32", (LENGTH,))
    y = same(x * 2) + 1
    async with af.Session(graph, devices=["cuda:0"]) as session:
        with pytest.raises(af.KernelError, match=rf"(?s){message}.*node    same") as caught:
            await session.run(y, {x: VALUE})
    assert "in the kernel of same for 'cuda'" in str(caught.value.__cause__.__notes__)  # type: ignore[union-attr]
