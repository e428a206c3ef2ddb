"""`check_device`: requirements on every kind of device, checked against one of them.

Each check is a coroutine function whose docstring states the requirement. Programs run in sessions of that kind, and
their results are compared with NumPy's; nothing here knows how a device works.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import TypeAlias, TypeVar

import numpy as np

import asyncflow as af
from asyncflow.errors import SessionClosedError
from asyncflow.values import Array

_Error = TypeVar("_Error", bound=BaseException)

PATIENCE_S = 60.0
"""Seconds that one check may take."""

_DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128")
_SHAPES: tuple[tuple[int, ...], ...] = ((), (0, 3), (3,), (2, 3, 4))


def check_device(kind: str, *, run: Callable[[Coroutine[object, None, None]], object] | None = None) -> None:
    """Checks that devices of a kind do what programs may expect of any: values, control flow, state, errors, memory.

    It opens devices 0 and 1 of the kind. Whoever writes a kind calls this in a test; it needs no pytest.

    Args:
        kind: the name of the kind, such as ``"cuda"``.
        run: runs a coroutine to its end; None for `asyncio.run`. For simulated devices, ``clock.run`` of their clock.

    Raises:
        ExceptionGroup: what failed; each error has a note that says which requirement it broke.
        PlacementError: there are no such devices here.

    >>> check_device("cpu")
    """
    (run or asyncio.run)(_check(kind))


async def _check(kind: str) -> None:
    failures: list[Exception] = []
    subject = _Subject(kind)
    async with AsyncExitStack() as sessions:
        subject.session = await sessions.enter_async_context(subject.together())  # raises if there are no such devices
        for check in CHECKS:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await check(subject)
            except Exception as error:
                error.add_note(f"check of devices of kind {kind!r}: {check.__doc__}")
                failures.append(error)
                await sessions.aclose()  # a failed check may have left the session in any state
                subject.session = await sessions.enter_async_context(subject.together())
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(CHECKS)} checks of devices of kind {kind!r} failed", failures)


class _Subject:
    """The devices that are checked.

    Attributes:
        session: one on all of them, for checks that harm nothing.
        names: device 0 and 1 of the kind, and a CPU.
    """

    session: af.Session

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.names = list(dict.fromkeys((f"{kind}:0", f"{kind}:1", "cpu:0")))

    def together(self) -> af.Session:
        """A session on all of them, to be entered."""
        return af.Session(devices=self.names)

    def alone(self, *, regions: bool = True, memory_limit: int | None = None) -> af.Session:
        """A session on device 0 alone, to be entered."""
        return af.Session(devices=self.names[:1], regions=regions, memory_limit=memory_limit)

    @contextmanager
    def graph(self) -> Iterator[af.Graph]:
        """A graph whose nodes are on device 0."""
        with af.Graph() as graph, af.device(self.names[0]):
            yield graph

    @contextmanager
    def fed(self, shape: tuple[int | None, ...], dtype: str = "float32") -> Iterator[af.Tensor]:
        """Yield a placeholder in a new graph."""
        with self.graph():
            yield af.placeholder(dtype, shape)

    async def expect(
        self, cases: Sequence[tuple[af.Tensor, Array]], feeds: Mapping[af.Tensor, object] | None = None
    ) -> None:
        """Raise unless tensors have these values; NumPy's bits but for rounding."""
        results = await self.session.run([tensor for tensor, _ in cases], feeds)
        for (tensor, wanted), result in zip(cases, results, strict=True):
            _require_equal(result, np.asarray(wanted), tensor.name)


def _require_equal(result: object, wanted: Array, name: str) -> None:
    found = np.asarray(result)
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        raise AssertionError(
            f"{name} is {found.dtype}{list(found.shape)}, and should be {wanted.dtype}{list(wanted.shape)}"
        )
    rounding = 1e-2 if wanted.dtype == np.float16 else 1e-5
    np.testing.assert_allclose(found, wanted, rtol=rounding, atol=rounding, err_msg=name)


async def _raised(work: Awaitable[object], kind: type[_Error]) -> _Error:
    """The error that `work` fails with, which has to be of this kind."""
    try:
        result = await work
    except kind as error:
        return error
    raise AssertionError(f"{result!r} came where {kind.__name__} should have been raised")


# -- checks ----------------------------------------------------------------------------------------------------------


async def _names(subject: _Subject) -> None:
    """A device has its name, says so for people, and has costs for placement."""
    for index, device in enumerate(subject.session.devices[:2]):
        assert (device.name, device.kind) == (f"{subject.kind}:{index}", subject.kind), device.name
        assert device.name in device.describe(), device.describe()
        assert device.kernel_ns(1e6, 1e6) > 0
        assert device.transfer_ns(1e6, device) == 0
        assert set(device.compute_streams) <= set(device.streams)
        assert len(device.compute_streams) == 1


async def _feeds(subject: _Subject) -> None:
    """Values that are fed come back, of every dtype, and of any shape and layout."""
    for dtype in _DTYPES:
        with subject.graph():
            xs = [af.placeholder(dtype, shape) for shape in (*_SHAPES, (4, 3, 2))]
            # Compute on the feed: a feed that is only fetched need not reach the device.
            ys = [af.stack([x, x]) for x in xs]
        values = [np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype) for shape in _SHAPES]
        values.append(values[-1].T)  # not in C order
        wanted = [np.stack([value, value]) for value in values]
        await subject.expect(list(zip(ys, wanted, strict=True)), dict(zip(xs, values, strict=True)))


async def _operations(subject: _Subject) -> None:
    """Operations give the same results as NumPy."""
    rng = np.random.default_rng(0)
    a, b, n = rng.normal(size=(3, 4)).astype("f4"), rng.normal(size=(4, 3)).astype("f4"), np.arange(12).reshape(3, 4)
    with subject.graph():
        x, y, i = af.placeholder("float32", (3, 4)), af.placeholder("float32", (4, 3)), af.placeholder("int64", (3, 4))
        cases: list[tuple[af.Tensor, Array]] = [
            (x + af.permute_dims(y, (1, 0)), a + b.T),
            (x @ y, a @ b),
            (x / 2.0 - af.exp(x), a / np.float32(2) - np.exp(a)),
            (af.tanh(x) * af.sqrt(af.abs(x)), np.tanh(a) * np.sqrt(np.abs(a))),
            (af.sum(x, axis=1), a.sum(axis=1)),
            (af.mean(x), np.asarray(a.mean())),
            (af.max(x, axis=0, keepdims=True), a.max(axis=0, keepdims=True)),
            (af.argmax(x, axis=1), a.argmax(axis=1)),
            (af.cumulative_sum(x, axis=0), a.cumsum(axis=0)),
            (af.where(x > 0, x, 0.0), np.where(a > 0, a, np.float32(0))),
            (af.logical_and(x > 0, i < 6), (a > 0) & (n < 6)),
            (i // 5 + i % 5, n // 5 + n % 5),
            (af.astype(x, "int32"), a.astype("i4")),
            (af.concat([x, x[:1]]), np.concatenate([a, a[:1]])),
            (x[1:, ::2], a[1:, ::2]),
            (af.take(x, af.constant([2, 0]), axis=0), a[[2, 0]]),
            (af.reshape(x, (2, 6)), a.reshape(2, 6)),
            (af.broadcast_to(x[:1], (5, 4)), np.broadcast_to(a[:1], (5, 4))),
            (af.sort(x, axis=1), np.sort(a, axis=1)),
            (af.nonzero(x > 0)[0], np.nonzero(a > 0)[0]),
            (af.shape(x), np.array([3, 4])),
            (x * af.constant(np.ones((3, 4), "f4")), a),
        ]
    await subject.expect(cases, {x: a, y: b, i: n})


async def _shapes(subject: _Subject) -> None:
    """Shapes that only a run knows can be computed with, on the device that has the array and on the other one."""
    with subject.graph():
        x, row = af.placeholder("float32", (None, 3)), af.placeholder("float32", (None,))
        new = af.placeholder("int64", (2,))
        product = x * row
        (gradient,) = af.gradients(af.sum(product * product), [row])
        filled, shaped = af.full(af.shape(x), 7.0, dtype="float32"), af.reshape(x, new)
        with af.device(subject.names[1]):
            there = af.full(af.shape(product), 2.0, dtype="float32") + 1.0
    a, b = np.arange(6, dtype="f4").reshape(2, 3), np.array([2], "f4")
    cases = [
        (gradient, np.array([(2 * a * a * b).sum()], "f4")),
        (filled, np.full((2, 3), 7, "f4")),
        (shaped, a.reshape(3, 2)),
        (there, np.full((2, 3), 3, "f4")),
    ]
    await subject.expect(cases, {x: a, row: b, new: np.array([3, 2])})


async def _branches(subject: _Subject) -> None:
    """A value computed on the device chooses the branch, and only that branch runs."""
    with subject.fed((2,)) as x:
        y = af.cond(af.sum(x) > 0, lambda: x * 2.0, lambda: af.cond(x[0] > 0, lambda: x + 1.0, lambda: -x))
    for values, wanted in (([1, 2], [2, 4]), ([1, -2], [2, -1]), ([-1, -2], [1, 2])):
        await subject.expect([(y, np.array(wanted, "f4"))], {x: np.array(values, "f4")})


def _root(x: af.Tensor, parallel_iterations: int) -> af.Tensor:
    """The square root of `x`, by Newton's method."""

    def is_off(root: af.Tensor) -> af.Tensor:
        return af.max(af.abs(root * root - x)) > 1e-9

    (root,) = af.while_loop(is_off, lambda r: (r + x / r) / 2.0, (x,), parallel_iterations=parallel_iterations)
    assert isinstance(root, af.Tensor)
    return root


async def _loops(subject: _Subject) -> None:
    """Loops run as long as what the device computed says so: not at all, nested, with regions and without."""
    with subject.fed((3,), "float64") as x:
        roots = [_root(x, 1), _root(x, 8)]

        def inner(i: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            return i + 1, af.while_loop(lambda j, _: j < i, lambda j, t: (j + 1, t + x), (0, total))[1]

        nested = af.while_loop(lambda i, _: i < 4, inner, (0, x))[1]
    for values in (np.array([1.0, 1.0, 1.0]), np.array([2.0, 9.0, 10.0])):
        # `nested` is x, and i times x for each i below 4.
        wanted = [*((root, np.sqrt(values)) for root in roots), (nested, 7 * values)]
        await subject.expect(wanted, {x: values})
        async with subject.alone(regions=False) as session:
            # Without regions, the scheduler runs each node by itself; otherwise generated code runs whole loops.
            _require_equal(await session.run(roots[0], {x: values}), np.sqrt(values), "the loop without regions")


async def _arrays(subject: _Subject) -> None:
    """A TensorArray filled by a loop keeps its elements."""
    with subject.fed((2,)) as x:
        array = af.TensorArray("float32", 5)
        _, array = af.while_loop(
            lambda i, _: i < 5, lambda i, a: (i + 1, a.write(i, x * af.astype(i, "float32"))), (0, array)
        )
        stacked = array.stack()
    wanted = np.outer(np.arange(5), [1, 2]).astype("f4")
    await subject.expect([(stacked, wanted)], {x: np.array([1, 2], "f4")})


async def _gradients(subject: _Subject) -> None:
    """A loop's gradient finds the values that its iterations saved."""
    with subject.fed((3,), "float64") as x:
        y = af.while_loop(lambda i, _: i < 3, lambda i, t: (i + 1, af.sin(t) * x), (0, x))[1]
        (gradient,) = af.gradients(af.sum(y), [x])
    values = np.array([0.5, 1.0, 1.5])

    def looped(x: Array) -> Array:
        result: Array = np.sin(np.sin(np.sin(x) * x) * x) * x
        return result

    # A central difference in float64 is off by some 1e-10, far within what `_require_equal` allows.
    slope = (looped(values + 1e-6) - looped(values - 1e-6)) / 2e-6
    await subject.expect([(gradient, slope)], {x: values})


async def _state(subject: _Subject) -> None:
    """A variable keeps an assigned value for the next run, and changes in the order written."""
    with subject.fed((2,)) as x:
        v = af.Variable(np.zeros(2, np.float32))
        before = v.read() + 0.0
        added = v.assign_add(x)
        after = v.read() * 10.0
    for step in (1, 2, 3):
        old, new = np.full(2, step - 1, "f4"), np.full(2, step, "f4")
        await subject.expect([(before, old), (added, new), (after, new * 10)], {x: np.ones(2, "f4")})


@af.op(outputs=af.spec("float32", (2,)))
def _doubled(x: Array) -> Array:
    return x * np.float32(2)


@af.op(outputs=af.spec("float32", (2,)))
async def _awaited(x: Array) -> Array:
    await asyncio.sleep(0)
    return x + np.float32(1)


async def _host_code(subject: _Subject) -> None:
    """User-defined functions and coroutines get host arrays, and the device uses their results."""
    with subject.fed((2,)) as x:
        y = _awaited(_doubled(x * 3.0)) * 10.0
    async with subject.alone() as session:  # only this device, or a CPU would compute the function
        result = await session.run(y, {x: np.array([1, 2], "f4")})
    _require_equal(result, np.array([70, 130], "f4"), y.name)


async def _several(subject: _Subject) -> None:
    """Values, also in loops, go from one device to the other, to a CPU and back."""
    with af.Graph():
        x = af.placeholder("float32", (3,))
        y: af.Tensor = x
        for name in (*subject.names, *subject.names):
            with af.device(name):
                y = y * 2.0 + 1.0

        def body(i: af.Tensor, t: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            with af.device(subject.names[0]):
                t = t + 1.0
            with af.device(subject.names[1]):
                return i + 1, t * 2.0

        with af.device(subject.names[0]):
            z = af.while_loop(lambda _, t: af.sum(t) < 100.0, body, (0, x))[1]
    values = np.array([1, 2, 3], "f4")
    chained, looped = values, values
    for _ in range(2 * len(subject.names)):
        chained = chained * np.float32(2) + np.float32(1)
    while looped.sum() < 100:
        looped = (looped + np.float32(1)) * np.float32(2)
    await subject.expect([(y, chained), (z, looped)], {x: values})


async def _staying(subject: _Subject) -> None:
    """Values that stay on their device can be fed again."""
    with subject.fed((3,)) as x:
        y = x * 2.0
    values = np.array([1, 2, 3], "f4")
    kept = await subject.session.run(af.on_device(y), {x: values})
    await subject.expect([(y, values * 4)], {x: kept})


async def _results(subject: _Subject) -> None:
    """Results are the caller's own: whoever changes them changes nothing else."""
    with subject.fed((3,)) as x:
        constant = af.constant(np.ones(3, np.float32)) * 1.0
    for _ in range(2):  # the second run uses the constant that the first caller might have changed
        first, second = await subject.session.run([x, constant], {x: np.ones(3, np.float32)})
        _require_equal(first, np.ones(3, "f4"), "the feed")
        _require_equal(second, np.ones(3, "f4"), "the constant")
        first[...] = second[...] = 7.0


async def _many_runs(subject: _Subject) -> None:
    """Runs that are in flight together keep apart."""
    with subject.fed((3,)) as x:
        y = af.while_loop(lambda i, _: i < 5, lambda i, t: (i + 1, t + x), (0, x))[1]
    values = [np.full(3, k, "f4") for k in range(8)]
    results = await asyncio.gather(*(subject.session.run(y, {x: value}) for value in values))
    for value, result in zip(values, results, strict=True):
        _require_equal(result, 6 * value, y.name)


@af.op(outputs=af.spec("float32", (2,)))
def _failing(x: Array) -> Array:
    raise ZeroDivisionError("a kernel's own error")


async def _errors(subject: _Subject) -> None:
    """A kernel's error ends the run, names the node, and leaves the session usable."""
    with subject.fed((2,)) as x:
        y, good = _failing(x * 2.0), x + 1.0
    async with subject.alone() as session:
        error = await _raised(session.run(y, {x: np.ones(2, "f4")}), af.KernelError)
        assert (error.node, error.device) == (y.node.name, subject.names[0]), (error.node, error.device)
        assert isinstance(error.__cause__, ZeroDivisionError), repr(error.__cause__)
        _require_equal(await session.run(good, {x: np.ones(2, "f4")}), np.full(2, 2, "f4"), good.name)


async def _cancelling(subject: _Subject) -> None:
    """A run that would never end can be cancelled, has a deadline, and leaves the session as it was."""
    with subject.fed((2,)) as x:
        good = x + 1.0
        # A magnitude is never below 0, so neither is the sum.
        endless = af.while_loop(lambda t: af.sum(t) > -1.0, lambda t: af.abs(af.sin(t)), (x,))[0]
    feeds = {x: np.ones(2, "f4")}
    running = asyncio.ensure_future(subject.session.run(endless, feeds))
    for _ in range(20):  # until the run has started: before that, asyncio alone cancels it
        await asyncio.sleep(0)
    running.cancel()
    await _raised(running, asyncio.CancelledError)
    await _raised(subject.session.run(endless, feeds, timeout=0.01), af.DeadlineExceeded)
    await subject.expect([(good, np.full(2, 2, "f4"))], feeds)


async def _memory(subject: _Subject) -> None:
    """Memory is counted, given back after each run, and refused above the limit."""
    limit = 4 << 20
    with subject.fed((None,)) as x:
        y = af.sum(af.concat([x, x]) * 2.0)
    async with subject.alone(memory_limit=limit) as session:
        # The large feed takes half of the limit. Joined to itself it takes all of it, while the feed is still held.
        small, large = np.ones(1 << 10, "f4"), np.ones(limit // 8, "f4")
        memory = session.devices[0].memory
        assert memory.limit == limit
        used = []
        for _ in range(3):
            _require_equal(await session.run(y, {x: small}), np.array(1 << 12, "f4"), "the sum")
            gc.collect()
            used.append(memory.used)
        assert used[0] == used[1] == used[2], f"each run leaves more in use: {used} bytes"
        error = await _raised(session.run(y, {x: large}), af.OutOfMemoryError)
        assert error.limit == limit
        _require_equal(await session.run(y, {x: small}), np.array(1 << 12, "f4"), "the sum, after that")
        assert memory.peak <= 2 * limit


async def _timeline(subject: _Subject) -> None:
    """A traced run shows what the device did, and when."""
    with subject.fed((64, 64)) as x:
        y = af.tanh(x @ x)
    trace = af.Trace(detail="node")
    async with subject.alone() as session:
        await session.run(y, {x: np.ones((64, 64), "f4")}, trace=trace)
    shown = {firing.node for firing in trace.firings if firing.device == subject.names[0]}
    assert y.node.name in shown, f"{y.node.name} is missing among {sorted(shown)}"
    assert all(firing.ended_ns >= firing.started_ns for firing in trace.firings)


async def _closing(subject: _Subject) -> None:
    """A closed device holds nothing and takes no more work, and another one can be opened."""
    with subject.graph():
        y = af.constant(np.ones((64, 64), np.float32)) * 2.0
    for _ in range(2):  # the second session opens the device that the first one closed
        async with subject.alone() as session:
            device = session.devices[0]
            _require_equal(await session.run(y), np.full((64, 64), 2, "f4"), y.name)
        gc.collect()
        assert device.memory.used == 0 or not device.capabilities.own_memory, device.describe()
        for stream in device.streams:
            assert stream.pending == 0, stream.name
            try:
                stream.record()
            except SessionClosedError:
                continue
            raise AssertionError(f"stream {stream.name} takes work although its session is closed")
        assert await device.aclose(0.0), "closing again has nothing left to do"


_Check: TypeAlias = Callable[[_Subject], Awaitable[None]]

CHECKS: tuple[_Check, ...] = (
    *(_names, _feeds, _operations, _shapes, _branches, _loops, _arrays, _gradients, _state, _host_code, _several),
    *(_staying, _results, _many_runs, _errors, _cancelling, _memory, _timeline, _closing),
)
