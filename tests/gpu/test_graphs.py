"""T12, T13: captured CUDA graphs, and loops that the card runs by itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from functools import partial
from time import perf_counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.captures import WARM_UPS, GraphCode
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.graphs.conditional import ENDED, STOPPED, TOO_LONG, Limits
from asyncflow.devices.cuda.graphs.graph import CALM, CapturedRegion, capture
from asyncflow.devices.cuda.graphs.loop import DeviceLoop
from asyncflow.devices.cuda.transfers.buffers import LentMemory
from asyncflow.devices.cuda.values import CudaArray
from asyncflow.devices.decisions import Branch, Decision, Loop
from tests.gpu.card import Card
from tests.gpu.figures import Figures
from tests.gpu.on_loop import on_loop, ticket

ROWS, COLUMNS = 64, 33


def _chain(xp: Any, x: Any, y: Any) -> tuple[Any, ...]:
    z = xp.tanh(x) * y + xp.sum(y, axis=-1, keepdims=True)
    for _ in range(8):
        z = xp.sqrt(z * z + 1.0) - x
    return z, xp.max(z - y, axis=0)


async def _fetched(device: CudaDevice, arrays: Any) -> list[np.ndarray]:
    return [await device.fetched(CudaArray(array, device, device.compute, "x")) for array in arrays]


async def _sent(device: CudaDevice, value: np.ndarray) -> Any:
    sent = await device.fed(value, "x")
    sent.settle(device.compute)
    return sent.array


class Counted:
    """A function of `_chain`'s kind, and how often Python ran it."""

    def __init__(self, card: Card) -> None:
        self.calls = 0
        self._xp = card.cupy

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        self.calls += 1
        return _chain(self._xp, *inputs)


@pytest.mark.slow
@on_loop
async def test_t12_replays_are_equal_to_launches(card: Card, figures: Figures) -> None:
    """While others allocate, fill and free: what the graph has freed is not theirs."""
    rounds = card.choose(1000, 30)
    random_, generator = random.Random(0), np.random.default_rng(0)
    async with card.device(memory_limit=64 << 20) as device:
        function = Counted(card)
        region = CapturedRegion(card.cupy, device.compute, device.pool, function, "chain", GraphCode(function))
        inputs = [await _sent(device, generator.standard_normal((ROWS, COLUMNS), np.float32)) for _ in range(4)]
        kept: list[Any] = []
        replay_s = eager_s = 0.0
        for index in range(rounds):
            x, y = random_.sample(inputs, 2)
            with device.activate():
                kept.append(card.cupy.full(random_.choice((ROWS, ROWS * COLUMNS)), float(index), np.float32))
                started = perf_counter()
                found = region(x, y)
                launched = perf_counter()
                wanted = _chain(card.cupy, x, y)
                if index > WARM_UPS:
                    replay_s += launched - started
                    eager_s += perf_counter() - launched
            if len(kept) > 16:
                kept.clear()
            if index % 25 == 24 or index <= WARM_UPS + 1:
                for one, other in zip(await _fetched(device, found), await _fetched(device, wanted), strict=True):
                    np.testing.assert_array_equal(one, other)
        figures["replay_us"] = 1e6 * replay_s / (rounds - WARM_UPS - 1)
        figures["launches_us"] = 1e6 * eager_s / (rounds - WARM_UPS - 1)
        assert function.calls == WARM_UPS + 1, "it was not captured, or more than once"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
@on_loop
async def test_t12_a_graph_holds_our_own_products(card: Card, dtype: str) -> None:
    """In every layout, captured products equal launched ones to the bit, and NumPy's within rounding."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    wide = np.dtype("complex128" if kind.kind == "c" else "float64")
    random_ = np.random.default_rng(0)

    def numbers(*shape: int) -> np.ndarray:
        return (random_.standard_normal(shape) * (1 + 1j if kind.kind == "c" else 1)).astype(kind)

    async with card.device(memory_limit=64 << 20) as device:
        device.make_capturable()
        xp: Any = device.xp
        m, k, n = (card.choose(*extents) for extents in ((96, 6), (130, 5), (70, 4)))
        x, y, many, single = numbers(m, k), numbers(k, n), numbers(3, m, k), numbers(m, 1)
        sent = [await _sent(device, value) for value in (x, y, many, single)]
        pairs: list[Callable[[Any, Any, Any, Any], tuple[Any, Any]]] = [
            lambda x, y, many, single: (x, y),
            lambda x, y, many, single: (x.T, x),
            lambda x, y, many, single: (y.T, x[:, :].T),
            lambda x, y, many, single: (x[:, 1:-1], y[1:-1]),
            lambda x, y, many, single: (x[::2, ::-1], y[:, ::2]),
            lambda x, y, many, single: (many, y),
            lambda x, y, many, single: (many, many.swapaxes(-1, -2)),
            lambda x, y, many, single: (many[::2], y[None]),
            lambda x, y, many, single: (single.T, x),
            lambda x, y, many, single: (x[0], y),
            lambda x, y, many, single: (x, y[:, 0]),
            lambda x, y, many, single: (single, single.T),
        ]

        def products(*values: Any) -> tuple[Any, ...]:
            return tuple([xp.matmul(*pair(*values)) for pair in pairs])

        region = CapturedRegion(card.cupy, device.compute, device.pool, products, "products", GraphCode(products))
        with device.activate():
            results = [region(*sent) for _ in range(WARM_UPS + 3)]
            with pytest.raises(NotImplementedError):  # CuPy's cannot be captured, and were not what was
                capture(device.compute.raw, lambda: sent[0] @ sent[1])
        launched = await _fetched(device, results[0])
        for replayed in results[1:]:
            for one, other in zip(await _fetched(device, replayed), launched, strict=True):
                assert one.tobytes() == other.tobytes()
        for index, (pair, found) in enumerate(zip(pairs, launched, strict=True)):
            one, other = (value.astype(wide) for value in pair(x, y, many, single))
            tolerance = 8 * float(ml_dtypes.finfo(kind).eps) * np.matmul(abs(one), abs(other)).max()
            np.testing.assert_allclose(found.astype(wide), np.matmul(one, other), 0, tolerance, err_msg=str(index))


@on_loop
async def test_t12_results_that_are_held_are_not_overwritten(card: Card) -> None:
    """Two graphs share memory and lend their results; the card's CuPy counts references to results."""
    random_ = np.random.default_rng(0)
    async with card.device(memory_limit=64 << 20) as device:
        x, y = [await _sent(device, random_.normal(size=(ROWS, COLUMNS))) for _ in range(2)]
        functions = [lambda x, y: _chain(card.cupy, x, y), lambda x, y: _chain(card.cupy, y, x * 0.5)]
        regions = [
            CapturedRegion(card.cupy, device.compute, device.pool, function, "chain", GraphCode(function))
            for function in functions
        ]
        with device.activate():
            unused = LentMemory(card.cupy.empty(8))
            assert unused.shows_users
            launched = [region(x, y) for region in regions]
            for _ in range(WARM_UPS + CALM + 2):
                for region in regions:
                    region(x, y)
            assert [graph.lending.is_on for region in regions for graph in region.graphs.made] == [True, True]
            held = [region(x, y) for region in regions]
            views = [(values[0][1:], values[1].reshape(-1)) for values in held]
            del held
            again = [region(x * k, y) for k in range(1, 5) for region in regions]
        expected = [await _fetched(device, values) for values in launched]
        for (first, second), wanted in zip(views, expected, strict=True):
            found = await _fetched(device, [first, second])
            assert found[0].tobytes() == wanted[0][1:].tobytes()
            assert found[1].tobytes() == wanted[1].tobytes()
        for values, wanted in zip(again[:2], expected, strict=True):
            assert [value.tobytes() for value in await _fetched(device, values)] == [x.tobytes() for x in wanted]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, ROWS, 10_000], ids=["small", "on its stream", "in pieces"])
@on_loop
async def test_t12_values_of_the_host_are_copied_to_the_inputs_of_a_graph(card: Card, rows: int) -> None:
    """The card's CuPy counts references to inputs, and copies into them wait for the launch before."""
    generator, rounds = np.random.default_rng(0), WARM_UPS + CALM + card.choose(50, 6)
    async with card.device(memory_limit=64 << 20) as device:
        function = Counted(card)
        region = CapturedRegion(card.cupy, device.compute, device.pool, function, "chain", GraphCode(function))
        offers: list[bool] = []

        def offer(place: int, value: np.ndarray) -> Any:
            array = region.offer(place, value)
            offers.append(array is not None)
            return array

        for _ in range(rounds):
            x, y = generator.standard_normal((2, rows, COLUMNS), np.float32)
            sent = [await device.fed(value, "x", partial(offer, place)) for place, value in enumerate((x, y))]
            for value in sent:
                value.order(device.compute)
            with device.activate():
                found = region(*[value.array for value in sent])
                wanted = _chain(card.cupy, *[value.array for value in sent])
            for one, other in zip(await _fetched(device, found), await _fetched(device, wanted), strict=True):
                np.testing.assert_array_equal(one, other)
            del sent, value, found, wanted
        assert all(offers[-6:]), "the memory was in use, or references to it do not show"
        assert function.calls == WARM_UPS + 1


@on_loop
async def test_t12_a_product_of_cupys_cannot_be_captured(card: Card) -> None:
    """CuPy refuses; the stream works on, and a region with one works without a graph."""
    async with card.device(memory_limit=64 << 20) as device:
        with device.activate():
            x = card.cupy.eye(8, dtype=np.float32) * np.float32(2.0)
            product = x @ x
            with pytest.raises(NotImplementedError):
                capture(device.compute.raw, lambda: x @ x)
            code = GraphCode(lambda x: (x @ x,))
            region = CapturedRegion(card.cupy, device.compute, device.pool, code.function, "product", code)
            results = [region(x)[0] for _ in range(WARM_UPS + 3)]
        for found in await _fetched(device, [product, *results]):
            np.testing.assert_array_equal(found, 4.0 * np.eye(8, dtype=np.float32))


def _collatz(xp: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Steps until 1, and the largest number on the way; what a branch would choose, `where` does."""

    def condition(n: Any, steps: Any, largest: Any) -> Any:
        return n != 1

    def body(n: Any, steps: Any, largest: Any) -> tuple[Any, ...]:
        n = xp.where(n % 2 == 0, n // 2, 3 * n + 1)
        return n, steps + 1, xp.maximum(largest, n)

    return condition, body


def _branching_collatz(xp: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`_collatz` with a branch."""
    condition, _ = _collatz(xp)

    def body(n: Any, steps: Any, largest: Any) -> Generator[Decision, Any, tuple[Any, ...]]:
        (n,) = yield Branch(n % 2 == 0, lambda n: (n // 2,), lambda n: (3 * n + 1,), (n,))
        return n, steps + 1, xp.maximum(largest, n)

    return condition, body


def _by_hand(start: int) -> tuple[int, int, int]:
    n, steps, largest = start, 0, start
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps, largest = steps + 1, max(largest, n)
    return n, steps, largest


async def _launched(device: CudaDevice, loop: DeviceLoop, variables: Any, captures: Any = ()) -> tuple[Any, ...]:
    """The values after a launch that came to an end, and how many iterations it made."""
    with device.activate():
        iterated = loop.launch(variables, captures)
    assert iterated is not None, "the loop was not captured"
    *values, state = await _fetched(device, [*iterated.values, iterated.state])
    assert state[1] == ENDED
    return tuple(values), int(state[0])


def _integers(card: Card, device: CudaDevice, *numbers: int) -> list[Any]:
    with device.activate():
        return [card.cupy.full((), number, dtype=np.int64) for number in numbers]


@pytest.mark.parametrize("functions", [_collatz, _branching_collatz])
@on_loop
async def test_t13_the_card_runs_a_loop(card: Card, functions: Callable[..., Any]) -> None:
    """As often as its own result says, 0 times and once too; launched again and again. A branch in it is a node too."""
    async with card.device(memory_limit=64 << 20) as device:
        condition, body = functions(card.cupy)
        loop = DeviceLoop(card.cupy, device.compute, device.pool, card.bindings, condition, body, "collatz")
        for start in (27, 1, 2, 97, 1, 6):
            values, count = await _launched(device, loop, _integers(card, device, start, 0, start))
            assert tuple(map(int, values)) == _by_hand(start)
            assert count == _by_hand(start)[1]


def _rows(xp: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """For each i below n: the sum of the numbers below i, added where i is even, else taken away."""

    def condition(i: Any, total: Any, n: Any) -> Any:
        return i < n

    def body(i: Any, total: Any, n: Any) -> Generator[Decision, Any, tuple[Any, ...]]:
        _, row = yield Loop(
            lambda j, row, i: j < i,
            lambda j, row, i: (j + 1, xp.sqrt(row * row) + j),
            (np.int64(0), xp.zeros_like(total)),
            (i,),
        )

        def added(total: Any, row: Any) -> Generator[Decision, Any, tuple[Any, ...]]:
            (total,) = yield Branch(i > 2, lambda t: (t + 0.5,), lambda t: (t,), (total,))
            return (total + row,)

        (total,) = yield Branch(i % 2 == 0, added, lambda total, row: (total - row,), (total, row))
        return i + 1, total

    return condition, body


def _rows_by_hand(n: int) -> float:
    return sum((0.5 * (i > 2) if i % 2 == 0 else 0.0) + (-1) ** (i % 2) * i * (i - 1) / 2 for i in range(n))


@on_loop
async def test_t13_loops_and_branches_inside_one_another(card: Card) -> None:
    """Each time that a loop inside is come to it begins anew, and so does every launch."""
    async with card.device(memory_limit=64 << 20) as device:
        loop = DeviceLoop(card.cupy, device.compute, device.pool, card.bindings, *_rows(card.cupy), "rows")
        for n in (6, 0, 1, 2, 33, 6):
            with device.activate():
                variables = [np.int64(0), card.cupy.zeros(ROWS)]
                limit = card.cupy.full((), n, dtype=np.int64)
            (i, total), count = await _launched(device, loop, variables, [limit])
            assert (int(i), count) == (n, n)
            np.testing.assert_allclose(total, np.full(ROWS, _rows_by_hand(n)))


@on_loop
async def test_t13_a_loop_inside_that_never_ends_does_not_keep_the_card(card: Card) -> None:
    """The launch says that it has given up, and the next one works."""
    async with card.device(memory_limit=64 << 20) as device:
        xp = card.cupy

        def body(x: Any) -> Generator[Decision, Any, Any]:
            return (yield Loop(lambda x: x > 0, lambda x: (x + 1,), (x,)))

        loop = DeviceLoop(xp, device.compute, device.pool, card.bindings, lambda x: x < 5, body, "forever")
        (x,) = _integers(card, device, 1)
        with device.activate():
            iterated = loop.launch([x], limits=Limits(inside=100))
        assert iterated is not None
        (state,) = await _fetched(device, [iterated.state])
        assert state[1] == TOO_LONG
        values, count = await _launched(device, loop, _integers(card, device, 7))
        assert (int(values[0]), count) == (7, 0)


@pytest.mark.slow
@on_loop
async def test_t13_what_an_iteration_costs(card: Card, figures: Figures) -> None:
    """A thousand of them, beside the loop in which the host asks for the predicate, and with a branch inside."""
    steps = card.choose(1000, 50)
    async with card.device(memory_limit=64 << 20) as device:
        xp = card.cupy

        def condition(i: Any, x: Any) -> Any:
            return i < steps

        def body(i: Any, x: Any) -> tuple[Any, Any]:
            return i + 1, 0.5 * (x + 2.0 / x)

        def variables() -> list[Any]:
            with device.activate():
                return [xp.zeros((), np.int64), xp.full(16, 5.0, np.float32)]

        loop = DeviceLoop(xp, device.compute, device.pool, card.bindings, condition, body, "newton")
        await _launched(device, loop, variables())
        started = perf_counter()
        (_, found), count = await _launched(device, loop, variables())
        figures["on_the_card_us"] = 1e6 * (perf_counter() - started) / steps
        assert count == steps

        def branching(i: Any, x: Any) -> Generator[Decision, Any, tuple[Any, Any]]:
            (x,) = yield Branch(i % 2 == 0, lambda x: (0.5 * (x + 2.0 / x),), lambda x: (x * 1.0,), (x,))
            return i + 1, x

        branched = DeviceLoop(xp, device.compute, device.pool, card.bindings, condition, branching, "branching")
        await _launched(device, branched, variables())
        started = perf_counter()
        await _launched(device, branched, variables())
        figures["with_a_branch_us"] = 1e6 * (perf_counter() - started) / steps

        started = perf_counter()
        i, x = variables()
        while True:
            with device.activate():
                goes_on = condition(i, x)
            if not (await _fetched(device, [goes_on]))[0]:
                break
            with device.activate():
                i, x = body(i, x)
        figures["driven_by_the_host_us"] = 1e6 * (perf_counter() - started) / steps
        np.testing.assert_allclose(found, (await _fetched(device, [x]))[0], rtol=1e-6)
        np.testing.assert_allclose(found, np.sqrt(2.0), rtol=1e-5)


@on_loop
async def test_t13_a_launch_makes_so_many_iterations_at_most(card: Card) -> None:
    """The next launch goes on with the results of the last one."""
    async with card.device(memory_limit=64 << 20) as device:
        xp = card.cupy
        loop = DeviceLoop(xp, device.compute, device.pool, card.bindings, *_collatz(xp), "collatz")
        values: Any = _integers(card, device, 27, 0, 27)
        for _ in range(_by_hand(27)[1] // 50):
            with device.activate():
                iterated = loop.launch(values, limits=Limits(50))
            assert iterated is not None
            values = iterated.values
            assert (await _fetched(device, [iterated.state]))[0].tolist()[:3] == [50, STOPPED, 0]
        found, count = await _launched(device, loop, values)
        assert tuple(map(int, found)) == _by_hand(27)
        assert count == _by_hand(27)[1] % 50


@on_loop
async def test_t13_a_loop_on_the_card_holds_our_own_products(card: Card) -> None:
    """In its body, and in a branch: powers of a matrix until one is large."""
    async with card.device(memory_limit=64 << 20) as device:
        device.make_capturable()
        xp: Any = device.xp
        matrix = np.array([[1, 1], [1, 0]], np.float32)
        start, factor = await _sent(device, np.eye(2, dtype=np.float32)), await _sent(device, matrix)

        def body(x: Any, factor: Any) -> Generator[Decision, Any, tuple[Any, ...]]:
            (x,) = yield Branch(x[0, 0] > 0, lambda x: (xp.matmul(x, factor),), lambda x: (x,), (x,))
            return (xp.matmul(x, factor),)

        loop = DeviceLoop(
            xp, device.compute, device.pool, card.bindings, lambda x, factor: x[0, 0] < 1000.0, body, "powers"
        )
        found, count = await _launched(device, loop, [start], [factor])
        assert count == 8
        np.testing.assert_array_equal(found[0], np.linalg.matrix_power(matrix, 16))


@pytest.mark.slow
@on_loop
async def test_t13_a_loop_is_trained_on_the_card(card: Card) -> None:
    """Entries of 4 and 12 bytes, of a loop in a loop: equal to the bit to the loops that the host drives."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (3,))

        def step(y: af.Tensor) -> af.Tensor:
            inner = af.while_loop(lambda z: af.max(z) < 3, lambda z: z * 1.25 + af.sin(z) * 0.25 + 0.5, af.abs(y) * 0.5)
            return af.tanh(inner) * 0.5 + y + af.max(y) * 0.125

        y = af.while_loop(lambda y: af.sum(y) < 200, step, x)
        fetches = [y, *af.gradients(af.sum(y * y), [x])]
    found = []
    for on_card in (False, True):
        async with af.Session(graph, ["cuda:0"], device_while=on_card, loop_batching=False) as session:
            assert session.plan(fetches, [x]).explain().count("the card runs it") == 2 * on_card
            for _ in range(3):
                results = await session.run(fetches, {x: np.array([0.5, 1.0, 1.5], np.float32)})
                found.append([result.tobytes() for result in results])
    assert found == found[:1] * len(found)


def _product_at(place: str, xp: Any) -> Callable[..., Any]:
    """A body with what CuPy refuses to capture, or what breaks a capture, in it, a branch or a loop."""
    if place == "body":
        return lambda x: (x @ x + x,)
    if place == "branch":
        return lambda x: (yield Branch(x.sum() > 0, lambda x: (x @ x + x,), lambda x: (x,), (x,)))
    if place == "loop":
        return lambda x: (yield Loop(lambda x: x.sum() < 50.0, lambda x: (x @ x + x,), (x,)))
    # A wait for the stream. In the capture of a branch's body it would end the process (NVBUG 6805256).
    return lambda x: (yield Branch(x.sum() > 0, lambda x: (x * xp.nonzero(x)[0].size,), lambda x: (x,), (x,)))


@pytest.mark.parametrize("place", ["body", "branch", "loop", "wait"])
@on_loop
async def test_t13_a_loop_that_cannot_be_captured_is_left_to_the_host(card: Card, place: str) -> None:
    async with card.device(memory_limit=64 << 20) as device:
        with device.activate():
            x = card.cupy.eye(4, dtype=np.float32)
        loop = DeviceLoop(
            card.cupy,
            device.compute,
            device.pool,
            card.bindings,
            lambda x: x.sum() < 100.0,
            _product_at(place, card.cupy),
            "product",
        )
        for _ in range(2):
            with device.activate():
                assert loop.launch([x]) is None
        with device.activate():
            y = x + x
        np.testing.assert_array_equal((await _fetched(device, [y]))[0], 2.0 * np.eye(4, dtype=np.float32))
        await ticket(device.compute)
