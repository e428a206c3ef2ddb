"""Values in stores count as held, on every kind of device, for as long as the stores hold them."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import virtual_clock
from tests.conftest import small_cards

N, SIDE = 6, 128
ELEMENT = SIDE * SIDE * 8
LIMIT = 64 << 20
"""On a CPU stores are looked into only where there is a limit."""

SMALL = ELEMENT // 4
"""Bytes of counters and constants, and of the overhead that a CPU counts for each value."""

KINDS = ("sim", "virtual cpu", "cuda", "cpu")

Look = Callable[[Any], af.Tensor]
"""Notes how much the device holds; returns its argument."""


@contextmanager
def loops(kind: str) -> Iterator[Callable[[Any], Any]]:
    """Return the event loop for a session on a device of this kind."""
    with ExitStack() as stack:
        if kind in ("sim", "virtual cpu"):
            yield stack.enter_context(virtual_clock("v100")).run
        else:
            if kind == "cuda":
                stack.enter_context(small_cards(seed=1))
            yield asyncio.run


def held_by(kind: str, build: Callable[[Look], af.Tensor], *, regions: bool) -> tuple[list[int], int]:
    """Return the bytes held at each call of `look` during the run, and the most; afterwards nothing is held."""
    seen: list[int] = []

    async def main() -> int:
        device = f"{kind.rpartition(' ')[2]}:0"
        async with af.Session(devices=[device], regions=regions, memory_limit=LIMIT) as session:
            (account,) = (device.memory for device in session.devices)

            @af.op(outputs=af.spec("int64", ()))
            async def look(i: Any) -> Any:
                seen.append(account.used)
                return i

            await session.run(build(look))
            assert account.used < SMALL
            return account.peak

    with af.Graph(), loops(kind) as run:
        peak = run(main())
    return seen, peak


def numbers(i: af.Tensor) -> af.Tensor:
    return af.ones((SIDE, SIDE)) * af.astype(i, "float64") + 1.0


def written(look: Look, **options: Any) -> af.Tensor:
    _, array = af.while_loop(
        lambda i, array: i < N,
        lambda i, array: (i + 1, array.write(look(i), numbers(i))),
        (0, af.TensorArray("float64", **{"size": N, **options})),
        parallel_iterations=1,
    )
    return array.stack()


def saved(look: Look) -> af.Tensor:
    def body(i: af.Tensor, x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return i + 1, af.tanh(x * af.astype(look(i) + 1, "float64"))

    start = af.ones((SIDE, SIDE)) * 0.5
    _, last = af.while_loop(lambda i, x: i < N, body, (0, start), parallel_iterations=1)
    return af.gradients(af.sum(last), [start])[0]


GROWING: dict[str, Callable[[Look], af.Tensor]] = {
    "an array of fixed size": written,
    "an array that is read again": lambda look: written(look, clear_after_read=False),
    "an array that grows": lambda look: written(look, size=0, dynamic_size=True),
    "what a gradient needs": saved,
}
"""Programs whose iteration i begins with i values in a store."""


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("kind", KINDS)
def test_each_value_counts_from_when_it_is_put_in(kind: str, name: str, regions: bool) -> None:
    seen, peak = held_by(kind, GROWING[name], regions=regions)
    assert [held >= i * ELEMENT for i, held in enumerate(seen)] == [True] * N, seen
    if kind != "cpu":  # where an array of fixed size is one block, and stacked already
        assert all(held < (i + 1) * ELEMENT + SMALL for i, held in enumerate(seen)), seen
        stacked = 2 * N if "array" in name else N
        assert peak >= stacked * ELEMENT, "elements are there until the stack is"


def write_at_once(write: Callable[[af.TensorArray], af.TensorArray]) -> Callable[[Look], af.Tensor]:
    def build(look: Look) -> af.Tensor:
        array = write(af.TensorArray("float64", N, clear_after_read=False))
        return array.read(look(array.size() - 1))

    return build


def rows(*shape: int) -> af.Tensor:
    return af.ones(shape) * 2.0


AT_ONCE: dict[str, Callable[[Look], af.Tensor]] = {
    "scatter": write_at_once(lambda array: array.scatter(list(range(N)), rows(N, SIDE, SIDE))),
    "split": write_at_once(lambda array: array.split(rows(N * SIDE, SIDE), [SIDE] * N)),
    "unstack": write_at_once(lambda array: array.unstack(rows(N, SIDE, SIDE))),
}


@pytest.mark.parametrize("name", AT_ONCE)
@pytest.mark.parametrize("kind", KINDS)
def test_values_put_in_at_once_count(kind: str, name: str) -> None:
    ((held,), _) = held_by(kind, AT_ONCE[name], regions=True)
    assert held >= N * ELEMENT


@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_of_gradients_counts_beside_its_parts(kind: str) -> None:
    def build(look: Look) -> af.Tensor:
        whole = rows(N, SIDE, SIDE)
        _, total = af.while_loop(
            lambda i, total: i < N, lambda i, total: (i + 1, total + af.sum(af.tanh(whole[i]))), (0, 0.0)
        )
        return af.gradients(total, [whole])[0]

    _, peak = held_by(kind, build, regions=True)
    assert 2 * N * ELEMENT <= peak < 3 * N * ELEMENT, "what was saved has gone as it was read"


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_count_with_the_room_that_is_made_for_them(kind: str, regions: bool) -> None:
    def build(look: Look) -> af.Tensor:
        _, store = af.while_loop(
            lambda i, _: i < N,
            lambda i, store: (i + 1, store.append(af.reshape(numbers(look(i)), (1, SIDE, SIDE)))),
            (0, af.RowStore("float64", (SIDE, SIDE))),
            parallel_iterations=1,
        )
        return af.sum(store.stack())

    seen, peak = held_by(kind, build, regions=regions)
    assert [held >= i * ELEMENT for i, held in enumerate(seen)] == [True] * N, seen
    assert all(held <= (2 * i + 1) * ELEMENT + SMALL for i, held in enumerate(seen)), seen
    assert peak >= N * ELEMENT


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_of_rows_takes_no_room(kind: str) -> None:
    """Not even while it is made."""

    async def main() -> float:
        devices = [f"{kind.rpartition(' ')[2]}:0"]
        async with af.Session(devices=devices, memory_limit=(N + 3) * ELEMENT) as session:
            store = af.RowStore("float64", (SIDE, SIDE), N)
            _, store = af.while_loop(
                lambda i, _: i < N,
                lambda i, store: (i + 1, store.append(af.reshape(numbers(i), (1, SIDE, SIDE)))),
                (0, store),
                parallel_iterations=1,
            )
            views = [store.slice(0, i + 1) for i in range(N)]
            return float(await session.run(sum(view[-1, 0, 0] for view in views)))

    with af.Graph(), loops(kind) as run:
        assert run(main()) == sum(i + 1.0 for i in range(N))


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_outgrows_the_memory_ends_its_run_alone(kind: str, regions: bool) -> None:
    async def main() -> None:
        n = af.placeholder("int64", ())
        _, store = af.while_loop(
            lambda i, _: i < n,
            lambda i, store: (i + 1, store.append(af.reshape(numbers(i), (1, SIDE, SIDE)))),
            (0, af.RowStore("float64", (SIDE, SIDE))),
            parallel_iterations=1,
        )
        size = store.size()
        device = f"{kind.rpartition(' ')[2]}:0"
        async with af.Session(devices=[device], regions=regions, memory_limit=N * ELEMENT) as session:
            (account,) = (device.memory for device in session.devices)
            with pytest.raises(af.OutOfMemoryError):
                await session.run(size, {n: 4 * N})
            assert account.used < SMALL
            assert await session.run(size, {n: 2}) == 2

    with af.Graph(), loops(kind) as run:
        run(main())


def numpy_bytes() -> int:
    """Return the bytes that NumPy holds, by Python's own account of memory."""
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)])
    return sum(each.size for each in snapshot.statistics("filename"))


def array_of(**options: Any) -> Any:
    """A TensorArray, how a row is written to it, and how one is read."""
    rows = af.TensorArray("float64", **options)
    return rows, lambda rows, i, value: rows.write(i, value), lambda rows, i: rows.read(i)


def row_store() -> Any:
    """The same of a RowStore."""

    def read(rows: Any, i: Any) -> Any:
        return af.reshape(rows.slice(i, i + 1), (8192,))

    return af.RowStore("float64", (8192,)), lambda rows, _, value: rows.append(af.reshape(value, (1, 8192))), read


@pytest.mark.parametrize(
    ("make", "left"),
    [
        (lambda: array_of(size=40), 10),
        (lambda: array_of(dynamic_size=True, element_shape=(8192,)), 10),
        (row_store, 50),  # the sum of what reaches its rows has all of them until its loop ends
    ],
    ids=["a block", "one by one", "a row store"],
)
def test_stores_and_saved_values_give_back_their_bytes_as_the_gradient_reads_them(
    make: Callable[[], Any], left: int
) -> None:
    """The account is what Python holds, within two values; at the end hardly any is left."""
    row, steps = af.spec("float64", (8192,)), 40
    value = 8192 * 8
    found: list[tuple[int, int]] = []
    memories: list[Any] = []

    @af.op(outputs=row)
    def looked_at(grad: Any) -> Any:
        is_looked = len(found) % 8 == 0 or len(found) > 2 * steps - 3
        found.append((numpy_bytes() // value, memories[0].exact // value) if is_looked else (0, 0))
        return grad + 0

    noted = af.op(outputs=row, gradient=lambda inputs, outputs, grad: looked_at(grad))(lambda y: y + 0)
    with af.Graph() as graph:
        x = af.placeholder("float64", (8192,))
        rows, write, read = make()
        filled = af.while_loop(
            lambda i, _: i < steps,
            lambda i, r: (i + 1, write(r, i, noted(af.sin(x * af.astype(i, "float64"))))),
            (0, rows),
            parallel_iterations=4,
        )[1]
        total = af.while_loop(
            lambda i, _: i < steps,
            lambda i, t: (i + 1, t + noted(af.tanh(read(filled, i)))),
            (0, x * 0.0),
            parallel_iterations=4,
        )[1]
        gradient = af.gradients(af.sum(total), x)

    async def main() -> None:
        async with af.Session(graph, devices=["cpu:0"], memory_limit=1 << 30) as opened:
            memories.append(opened.devices[0].memory)
            tracemalloc.start()
            try:
                await opened.run(gradient, {x: np.ones(8192)})
            finally:
                tracemalloc.stop()

    with virtual_clock("v100") as clock:  # where nothing happens beside
        clock.run(main())
    assert len(found) == 2 * steps
    held = [each for each in found if each[0]]
    assert all(account <= python <= account + 2 for python, account in held)
    assert max(python for python, _ in held) > steps
    assert held[-1][1] <= left


@pytest.mark.parametrize("regions", [True, False])
def test_rows_that_wait_for_their_product_count_until_it_is_made(regions: bool) -> None:
    """The sum of the products so far counts, too: the account equals the bytes that Python holds, but for small
    values.
    """
    steps, batch, units = 40, 8, 128
    state = af.spec("float32", (batch, units))
    found: list[tuple[int, int]] = []
    memories: list[Any] = []
    largest: set[str] = set()

    @af.op(outputs=state)
    def looked_at(grad: Any) -> Any:
        found.append((numpy_bytes(), memories[0].exact) if len(found) % 7 == 5 else (0, 0))
        largest.update(buffer.label for buffer in memories[0].top())
        return grad + 0

    noted = af.op(outputs=state, gradient=lambda inputs, outputs, grad: looked_at(grad))(lambda y: y + 0)
    with af.Graph() as graph:
        h, w = af.placeholder("float32", state.shape), af.placeholder("float32", (units, units))
        body: Any = lambda i, y: (i + 1, noted(af.tanh(y @ w)))  # noqa: E731
        last = af.while_loop(lambda i, _: i < steps, body, (0, h), parallel_iterations=1)[1]
        gradient = af.gradients(af.sum(last), w)

    async def main() -> None:
        async with af.Session(graph, devices=["cpu:0"], regions=regions, memory_limit=4 << 20) as opened:
            memories.append(opened.devices[0].memory)
            assert "summed up, for several" in opened.plan(gradient, [h, w]).explain()  # constants are made before
            tracemalloc.start()
            try:
                fed = {h: np.ones((batch, units), np.float32), w: np.full((units, units), 1 / units, np.float32)}
                for value in fed.values():
                    value.flags.writeable = False  # so that it is not copied
                await opened.run(gradient, fed)
            finally:
                tracemalloc.stop()
            del fed, value
            assert memories[0].used == 0

    asyncio.run(main())
    assert len(found) == steps
    held = [each for each in found if each[0]]
    assert "gradients/while/while/body/gradients/while/body/matmul/matmul_1/pending_sums" in largest
    assert all(abs(python - account) < SMALL for python, account in held), held
