"""Fault F35-F37: permitted feeds."""

from __future__ import annotations

import array
from collections import UserDict
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import asyncflow as af
from tests.faults.kernels import CoroutineGate, in_flight

Run = Callable[..., Awaitable[Any]]


class Pair(NamedTuple):
    """A tuple with names."""

    first: Any
    second: Any


WRONG_DTYPES: dict[str, tuple[str, Any, str]] = {
    "text for a number": ("float32", "1", "str"),
    "text array": ("float32", np.array(["1"]), "<U1"),
    "object array": ("float32", np.array([1.0], object), "object"),
    "float64 array": ("float32", np.array([1.0]), "float64"),
    "int for bool": ("bool", np.array([1]), "int64"),
    "bool array for int": ("int32", np.array([True]), "bool"),
    "complex": ("float32", np.array([1j]), "complex128"),
    "dates": ("int64", np.array(["2026-11-20"], "M8[D]"), "datetime64"),
    "too large": ("int8", 300, "300"),
    "far too large": ("float32", [2**200], "2|int"),
    "fraction": ("int32", [1.5], "1.5|float"),
    "None": ("float32", None, "None"),
    "a set": ("float32", {1.0}, "set"),
}


@pytest.mark.parametrize("case", WRONG_DTYPES)
async def test_a_wrong_dtype(run: Run, graph: af.Graph, case: str) -> None:
    """Fault F35: refused before any node runs, with both sides; nothing is cast silently."""
    dtype, value, seen = WRONG_DTYPES[case]
    ran: list[int] = []
    x = af.placeholder(dtype, None, name="x")

    @af.op(outputs=())
    def note(_: Any) -> None:
        ran.append(1)

    with pytest.raises(af.FeedError, match=rf"x:0[\s\S]*expected {dtype}[\s\S]*({seen})"):
        await run(note(x), {x: value})
    assert ran == []


EXACT: dict[str, tuple[str, Any]] = {
    "python int": ("int8", -128),
    "python int as float": ("float32", 3),
    "python bool": ("bool", True),
    "numpy scalar": ("float32", np.float32(1.5)),
    "nested lists": ("float64", [[1, 2], [3, 4]]),
    "text": ("string", ["a", "bc"]),
}


@pytest.mark.parametrize("case", EXACT)
async def test_what_fits_exactly(run: Run, graph: af.Graph, case: str) -> None:
    """Fault F35: Python values that the dtype holds exactly are taken."""
    dtype, value = EXACT[case]
    x = af.placeholder(dtype, None)
    np.testing.assert_array_equal(await run(af.identity(x), {x: value}), value)


async def test_a_wrong_shape(run: Run, graph: af.Graph) -> None:
    """Fault F36: expected against got, for extents and for rank; an unknown extent takes any."""
    x = af.placeholder("float32", (None, 3), name="x")
    for shape in [(2, 4), (3,), (), (1, 2, 3)]:
        with pytest.raises(af.FeedError, match=r"x:0: expected float32\[\?,3\]") as caught:
            await run(x * 1, {x: np.zeros(shape, np.float32)})
        assert f"[{','.join(map(str, shape))}]" in str(caught.value)
    for rows in (0, 1, 7):
        assert (await run(x * 1, {x: np.zeros((rows, 3), np.float32)})).shape == (rows, 3)


async def test_a_ragged_list(run: Run, graph: af.Graph) -> None:
    """Fault F36: named as such, not turned into objects."""
    x = af.placeholder("float32", None, name="x")
    with pytest.raises(af.FeedError, match="x:0"):
        await run(x * 1, {x: [[1.0, 2.0], [3.0]]})


async def test_a_missing_feed(run: Run, graph: af.Graph) -> None:
    """Fault F36: all missing feeds are listed with their specs; feeds that no node needs may be missing."""
    x, y, unused = (af.placeholder("float32", (), name=name) for name in ("x", "y", "unused"))
    with pytest.raises(af.FeedError, match=r"not fed[\s\S]*y:0 float32\[\]") as caught:
        await run(x + y, {x: 1.0})
    assert "x:0" not in str(caught.value)
    assert unused.name not in str(caught.value)
    assert await run(x + y, {x: 1.0, y: 2.0}) == 3


async def test_names(graph: af.Graph) -> None:
    """Fault F36: a tensor's name will do; an unknown one is named, and so is one without a graph."""
    x = af.placeholder("float32", (), name="x")
    async with af.Session(graph) as session:
        assert await session.run(x + 1, {"x:0": 2.0}) == 3
        with pytest.raises(af.FeedError, match="nowhere"):
            await session.run(x + 1, {"nowhere:0": 2.0})
    async with af.Session() as session:
        with pytest.raises(af.FeedError, match="'x:0' says nothing without a graph"):
            await session.run(x + 1, {"x:0": 2.0})


NOT_FEEDABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "a number": (lambda: 3, "keyed by tensors or their names; got int"),
    "a node": (lambda: af.constant(1).node, "keyed by tensors or their names; got Node"),
    "an array": (lambda: af.TensorArray("float32", 1), "keyed by tensors or their names; got TensorArray"),
    "inside a body": (
        lambda: af.while_loop(lambda i: i < 3, lambda i: i + 1, (0,))[0].node.attrs["body"].results[0],
        "value per iteration",
    ),
}


@pytest.mark.parametrize("case", NOT_FEEDABLE)
async def test_tensors_that_are_not_feedable(graph: af.Graph, case: str) -> None:
    """Fault F36: the error says what the key is and what keys there are."""
    make, message = NOT_FEEDABLE[case]

    key = make()
    fetch = af.constant(1) + 1
    async with af.Session(graph) as session:
        with pytest.raises(af.FeedError, match=message):
            await session.run(fetch, {key: 1})


async def test_fed_twice(graph: af.Graph) -> None:
    """Fault F36: once by tensor and once by name."""
    x = af.placeholder("float32", (), name="x")
    async with af.Session(graph) as session:
        with pytest.raises(af.FeedError, match="x:0 is fed twice"):
            await session.run(x, {x: 1.0, "x:0": 2.0})


async def test_any_tensor_may_be_fed(run: Run, graph: af.Graph) -> None:
    """Fault F36: a feed replaces the tensor, and what only computed it does not run."""
    x = af.placeholder("float32", (), name="x")
    middle = x * 2
    assert await run(middle + 1, {middle: np.float32(10)}) == 11


BASE = np.arange(24, dtype=np.float32).reshape(4, 6)
LAYOUTS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "C": BASE.copy,
    "Fortran": lambda: np.asfortranarray(BASE),
    "strided": lambda: BASE[::2, ::3],
    "reversed": lambda: BASE[::-1, ::-1],
    "transposed": lambda: BASE.T,
    "broadcast": lambda: np.broadcast_to(np.float32(2), (3, 5)),
    "0-d": lambda: np.array(3, np.float32),
    "empty": lambda: np.zeros((0, 6), np.float32),
    "empty strided": lambda: BASE[:0:2],
    "big-endian": lambda: BASE.astype(">f4"),
    "read-only": lambda: _locked(BASE.copy()),
    "read-only view": lambda: _locked(BASE[1:]),
    "matrix": lambda: BASE.view(np.matrix),
    "misaligned": lambda: np.frombuffer(b"\0" + BASE.tobytes(), np.float32, offset=1),
}


def _locked(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_layouts(run: Run, graph: af.Graph, layout: str) -> None:
    """Fault F37: the values count, however they lie in memory; the caller's array is not touched."""
    fed = LAYOUTS[layout]()
    before, expected = np.array(fed, copy=True, subok=False), np.array(fed, np.float32)
    x = af.placeholder("float32", None)
    doubled, same = await run([x + x, af.identity(x)], {x: fed})
    np.testing.assert_array_equal(doubled, expected * 2)
    np.testing.assert_array_equal(same, expected)
    np.testing.assert_array_equal(fed, before)
    assert np.asarray(same).dtype == np.float32
    assert np.asarray(same).dtype.isnative


async def test_more_elements_than_an_int32_counts(run: Run, graph: af.Graph) -> None:
    """Fault F37: 2**31 and three more; the array is locked, so it is not copied."""
    fed = np.zeros(2**31 + 3, np.int8)
    fed[[2**31, -1]] = 5, 7
    x = af.placeholder("int8", (None,))
    count, inside, last, tail = af.size(x), x[2**31], x[-1], af.sum(x[2**31 - 1 :])
    assert await run([count, inside, last, tail], {x: _locked(fed)}) == [2**31 + 3, 5, 7, 12]


async def test_a_masked_array(run: Run, graph: af.Graph) -> None:
    """Fault F37: would lose its mask, so it is refused."""
    x = af.placeholder("float32", None, name="x")
    with pytest.raises(af.FeedError, match="masked array would lose its mask"):
        await run(x, {x: np.ma.masked_array(BASE, BASE > 3)})


async def test_changes_after_the_start_are_not_seen(session: af.Session, graph: af.Graph) -> None:
    """Fault F37: the run works on a copy."""
    gate = CoroutineGate()
    x, ticket = af.placeholder("float32", None), af.placeholder("int64", ())
    with af.control_dependencies([gate.op(ticket).node]):
        late = x + 0
    fed = BASE.copy()
    async with in_flight(session.run(late, {x: fed, ticket: 1}), lambda: gate.started) as task:
        fed[:] = -1
        gate.opened.set()
        np.testing.assert_array_equal(await task, BASE)


async def test_results_belong_to_the_caller(run: Run, graph: af.Graph) -> None:
    """Fault F37: writing to a result changes neither the feed nor a later run's result, nor another result."""
    x = af.placeholder("float32", None)
    fed = BASE.copy()
    first, second, view = await run([x, x, af.reshape(x, (24,))], {x: fed})
    first[:] = -1
    np.testing.assert_array_equal(fed, BASE)
    np.testing.assert_array_equal(second, BASE)
    np.testing.assert_array_equal(view, BASE.ravel())
    constant = af.constant(BASE)
    (await run(constant))[:] = -1
    np.testing.assert_array_equal(await run(constant), BASE)
    computed = x * 2
    one, other = await run([computed, computed], {x: fed})
    one[:] = -1
    np.testing.assert_array_equal(other, BASE * 2)


async def test_streamed_items_belong_to_the_consumer(session: af.Session, graph: af.Graph) -> None:
    """Fault F37: writing to an item does not reach the loop, which goes on with the same value."""
    x = af.placeholder("float32", (None,))
    seen: list[af.Tensor] = []

    def body(i: Any, v: Any) -> Any:
        seen.append(v + 1)
        return i + 1, seen[0]

    af.while_loop(lambda i, _: i < 4, body, (0, x))
    items = []
    async for item in session.stream(seen[0], {x: np.zeros(3, np.float32)}):
        items.append(item[0])
        item[:] = -100
    assert items == [1, 2, 3, 4]


BUFFERS = [bytearray(b"1234"), memoryview(array.array("d", [1.0])), array.array("d", [1.0, 2.0])]


@pytest.mark.parametrize("value", BUFFERS, ids=lambda value: type(value).__name__)
async def test_a_buffer_has_a_dtype_of_its_own(run: Run, graph: af.Graph, value: Any) -> None:
    """Fault F35: it is not cast either."""
    x = af.placeholder("float32", (None,))
    with pytest.raises(af.FeedError, match=r"its dtype is (uint8|float64); convert it yourself"):
        await run(x + 1, {x: value})
    y = af.placeholder(np.asarray(value).dtype, (None,))
    np.testing.assert_array_equal(await run(y, {y: value}), np.asarray(value), strict=True)


async def test_bytes_are_read_by_numpy(run: Run, graph: af.Graph) -> None:
    """Fault F35: the error says by what."""
    x = af.placeholder("uint8", (None,))
    with pytest.raises(af.FeedError, match=r"feed np\.frombuffer\(value, dtype\)"):
        await run(x, {x: b"1234"})


def _with(**methods: Any) -> Any:
    return type("Foreign", (), methods)()


def _fails(*_: Any, **__: Any) -> Any:
    raise LookupError("gone")


def _containing_itself() -> list[Any]:
    made: list[Any] = [1.0]
    made.append(made)
    return made


FOREIGN: dict[str, Callable[[], Any]] = {
    "__array__": lambda: _with(__array__=_fails),
    "__array__ in a list": lambda: [_with(__array__=_fails)],
    "__array__ as a property": lambda: _with(__array__=property(_fails)),
    "__array_interface__": lambda: _with(__array_interface__=property(_fails)),
    "__dlpack__": lambda: _with(__dlpack__=_fails, __dlpack_device__=lambda self: (1, 0)),
    "__dlpack_device__": lambda: _with(__dlpack__=_fails, __dlpack_device__=_fails),
    "__dlpack_device__ alone": lambda: _with(__dlpack_device__=_fails),
    "requires_grad": lambda: _with(__dlpack__=_fails, requires_grad=property(_fails)),
    "dtype": lambda: _with(dtype=property(_fails)),
    "__len__": lambda: _with(__len__=_fails, __getitem__=_fails),
    "__getitem__": lambda: _with(__len__=lambda self: 2, __getitem__=_fails),
    "__iter__": lambda: _with(__iter__=_fails),
    "__index__": lambda: _with(__index__=_fails),
    "__float__": lambda: _with(__float__=_fails),
    "__repr__": lambda: _with(__repr__=_fails),
    "a list that contains itself": _containing_itself,
}


async def test_what_a_foreign_object_raises(run: Run, graph: af.Graph) -> None:
    """Fault F37: a FeedError that names the tensor, whatever the protocols of a fed object raise."""
    x = af.placeholder("float64", None, name="x")
    y = x + 1
    for case, make in FOREIGN.items():
        value = make()
        print(case)
        with pytest.raises(af.FeedError, match=r"cannot feed x:0: expected float64\[...\], got a (Foreign|list): "):
            await run(y, {x: value})
        with pytest.raises(af.GraphError, match=r"cannot make a tensor of "):
            af.constant(value)


async def test_a_mapping_that_cannot_be_read(run: Run, graph: af.Graph) -> None:
    """Fault F36: a FeedError with the mapping's own error."""

    class Feeds(UserDict[Any, Any]):
        def __getitem__(self, key: object) -> Any:
            raise LookupError("gone")

    x = af.placeholder("float64", ())
    with pytest.raises(af.FeedError, match=r"feeds, a Feeds, cannot be read: LookupError: gone"):
        await run(x, Feeds({x: 1.0}))


async def test_an_argument_that_cannot_be_read(run: Run) -> None:
    """Fault F37: of a traced function, by its name."""

    @af.function
    def double(x: Any) -> Any:
        return x * 2

    for value in (_with(__array__=_fails), _with(__hash__=_fails)):
        with pytest.raises(af.FeedError, match=r"argument x: a Foreign cannot be read: LookupError: gone"):
            await double(value)


async def test_masks_are_lost_nowhere(run: Run, graph: af.Graph) -> None:
    """Fault F37: neither as a constant nor as what an op returns, alone or among others."""
    masked = np.ma.masked_array(BASE, BASE > 3)
    with pytest.raises(af.GraphError, match="masked array would lose its mask; fill it first"):
        af.constant(masked)
    spec = af.spec(BASE.dtype, (None, None))
    for outputs, value in ((spec, masked), ((spec, spec), (BASE, masked))):
        returned = af.op(outputs=outputs)(lambda value=value: value)()
        with pytest.raises(af.KernelError, match=r"returned a masked array as (its result|output 1), which would lose"):
            await run(returned)


async def test_a_key_may_be_a_nest_of_tensors_and_names(graph: af.Graph) -> None:
    x, y, z = (af.placeholder("float64", shape, name=name) for shape, name in (((2,), "x"), ((), "y"), ((), "z")))
    total = x * y + z
    async with af.Session(graph) as session:
        assert (await session.run(total, {(x, ("y", z)): ([1.0, 2.0], (3.0, 4.0))})).tolist() == [7.0, 10.0]
        assert (await session.run(total, {(x,): (np.ones(2),), (y, z): (3.0, 4.0)})).tolist() == [7.0, 7.0]
        named = Pair(Pair(x, y), z)
        for fetches in (total, [total]):  # two kinds of runs, each begun twice
            for factor in (1.0, 2.0):
                found = np.ravel(await session.run(fetches, {named: Pair(Pair(np.ones(2), factor), 4.0)}))
                assert found.tolist() == [factor + 4.0] * 2
        for feeds, message in (
            ({(x, y): [1.0, 2.0], z: 4.0}, r"a nest like its key, .*: expected a tuple of 2 values, got a list of 2"),
            ({(x,): np.ones(2), (y, z): (3.0, 4.0)}, r"a nest like its key"),
            ({(x, y): (np.ones(2), 3.0), y: 3.0, z: 1.0}, r"is fed twice"),
            ({(x, 3): (np.ones(2), 3.0)}, r"keyed by tensors or their names; got int 3"),
        ):
            with pytest.raises(af.FeedError, match=message):
                await session.run(total, feeds)
