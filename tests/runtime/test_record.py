"""The file of a recorded run: values come back bit by bit, and a damaged file is an error that says so."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.control.stores.array_store import ArrayKind
from asyncflow.control.stores.array_value import ArrayContent, ArrayValue
from asyncflow.control.stores.row_block import RowContent, RowKind
from asyncflow.devices.memory import MemoryLimitExceeded
from asyncflow.devices.protocol import Deliver
from asyncflow.devices.values import DeviceValue
from asyncflow.errors import SourceLocation
from asyncflow.graph.values.dtypes import float32
from asyncflow.ops.user.recorded_calls import Raised
from asyncflow.runtime.session.record import Record, _read_answer, _written_answer
from asyncflow.runtime.watch.picks import COMPUTED, ELSEWHERE, OnCard, Pick, PickLog

VALUES: dict[str, Any] = {
    "bits": np.frombuffer(b"\x01\0\xc0\x7f\0\0\x80\xff", "float32"),  # a NaN of its own, and an infinity
    "half": np.array([1.5, -2], ml_dtypes.bfloat16),
    "words": np.array([["a", "ü"], ["", "\n"]], np.dtypes.StringDType()),
    "none": np.empty((0, 3), "int8"),
    "flag": np.bool_(True),
    "open": af.spec("complex64", (None, 2)),
}

ROWS = RowContent(RowKind(float32, (2,)), 5, np.arange(6, dtype="float32").reshape(3, 2))
ARRAY = ArrayContent(ArrayKind(float32, (), False, True), 4, ((),), {0: (), 2: np.array(0.5, "float32")})

ANSWERS = {
    0: (np.float32(0.5), "ü"),
    1: (),
    2: np.array("ä", np.dtypes.StringDType()),
    3: COMPUTED,
    4: Raised.of(af.QueueClosedError("is closed", queue="q", left=2)),
    5: OnCard(np.arange(3, dtype="float32"), [0]),
    6: OnCard((np.int64(1), np.zeros((0, 2)), np.float64(-0.0)), [1, 2]),
    7: Raised("ValueError", "OddError", "tools", "odd", ["a note"], "", "attempt 2 of 2"),
    8: ROWS,
    9: OnCard((np.int64(1), ARRAY, ROWS), [1, 2]),
}


def record() -> Record:
    return Record(
        graph="graph effects=ordered seed=none\n",
        why_no_graph="",
        lines={"a": "train.py:3"},
        fetches=["a:0", "@v"],
        feeds={name: value for name, value in VALUES.items() if name != "open"},
        variables=VALUES,
        tables={"seen": {"rows": np.arange(3.0)}},
        devices=["cpu:0"],
        options={"seed": 3, "without": ["fold"]},
        run=4,
        random_seed=2**62,
        picks=[Pick(0, "a", "", 7), Pick(1, "b", "while/3", None)],
        answers=ANSWERS,
        status="ok",
        checksums=[1, None],
    )


def test_a_written_record_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    record().save(path)
    found = Record.load(path)
    assert found.picks == record().picks
    assert found.options == record().options
    assert found.variables["open"] == VALUES["open"]
    np.testing.assert_array_equal(found.tables["seen"]["rows"], np.arange(3.0))
    assert found.answers.keys() == ANSWERS.keys()
    for place, answer in found.answers.items():
        assert type(answer) is type(ANSWERS[place])
        assert repr(answer) == repr(ANSWERS[place])
    for name, value in found.feeds.items():
        assert value.dtype == VALUES[name].dtype
        assert value.shape == VALUES[name].shape
        assert value.tobytes() == np.asarray(VALUES[name]).tobytes() or name == "words"
    np.testing.assert_array_equal(found.feeds["words"], VALUES["words"])


def chain_of(error: BaseException | None) -> list[object]:
    """Return the classes, messages and attributes of an error and its causes."""
    if error is None:
        return []
    shown = {
        name: value for name, value in vars(error).items() if name != "reason" or isinstance(error, af.KernelError)
    }
    return [type(error), str(error), shown, *chain_of(error.__cause__)]


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        af.KernelError("no", node="a", op="tanh", tag="loop/3", device="cpu:0", inputs=("float32[3]",)),
        af.OutOfMemoryError("full", requested=3, used=2, limit=4, node="a", location=SourceLocation("a.py", 3, "f")),
        af.QueueClosedError("closed", queue="q", left=2, node="a"),
        raised_from(af.KernelError("no", node="a"), raised_from(ValueError("x"), LookupError("y"))),
        raised_from(ZeroDivisionError("z"), af.EndOfInput("over", node="b")),
    ],
)
def test_an_error_is_read_with_its_place_and_causes(tmp_path: Path, error: BaseException) -> None:
    replace(record(), answers={0: Raised.of(error)}).save(tmp_path / "run.json")
    read = Record.load(tmp_path / "run.json").answers[0]
    assert isinstance(read, Raised)
    assert chain_of(read.error()) == chain_of(error)


def test_an_error_that_causes_itself_has_a_record() -> None:
    error = ValueError("x")
    assert Raised.of(raised_from(error, error)).cause is None


@given(st.data())
def test_a_damaged_file_is_an_error_or_another_record(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = tmp_path_factory.mktemp("damaged") / "run.json"
    record().save(path)
    written = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        written[data.draw(st.integers(0, len(written) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(written[: data.draw(st.integers(0, len(written)))])
    try:
        found: object = Record.load(path)
    except af.ReplayError as error:
        found = error
    assert isinstance(found, Record) or str(path) in str(found)


class _OfCard(DeviceValue):
    def to_host(self, deliver: Deliver) -> None:
        raise AssertionError("the card is asked")


@pytest.mark.parametrize("is_lost", [False, True])
async def test_copies_from_a_card_that_is_lost_end(*, is_lost: bool) -> None:
    """A record is written after the last of them; without its value the answer is nowhere."""
    asked: list[Any] = []
    card: Any = SimpleNamespace(read_value=lambda value, deliver: asked.append(deliver))
    card.asynchronous = card
    log = PickLog()
    log.answers[0] = ELSEWHERE
    log._bring(0, (_OfCard(), np.int64(1), _OfCard()), card)
    copied = asyncio.ensure_future(log.copied())
    asked[0](np.arange(3), None)
    await asyncio.sleep(0)
    assert not copied.done()
    asked[1](*((None, RuntimeError("lost")) if is_lost else (np.arange(2), None)))
    await copied
    assert (log.answers[0] is ELSEWHERE) == is_lost
    assert is_lost or repr(log.answers[0]) == repr(OnCard((np.arange(3), np.int64(1), np.arange(2)), [0, 2]))


async def test_a_record_has_its_folder_and_no_trace(tmp_path: Path) -> None:
    with af.Graph() as graph:
        count = af.Variable(0)
        step = count.assign_add(1)
    async with af.Session(graph) as session:
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            await session.run(step, record=tmp_path / "nowhere" / "run.json")
        with pytest.raises(ValueError, match="not both"):
            await session.run(step, record=tmp_path / "run.json", trace=af.Trace())
        with pytest.raises(TypeError, match="record= is a path to write; got 5"):
            await session.run(step, record=5)  # type: ignore[arg-type]
        with pytest.raises(IsADirectoryError, match="is a folder"):
            await session.run(step, record=tmp_path)
        assert await session.run(count) == 0


async def test_a_record_has_a_file_of_its_own(tmp_path: Path) -> None:
    """While a run writes its record; the file is free again behind it."""
    path, gate, began = tmp_path / "run.json", asyncio.Event(), asyncio.Event()

    @af.op(outputs=af.spec("int64", ()))
    async def waits() -> int:
        began.set()
        await gate.wait()
        return 1

    with af.Graph() as graph:
        y = waits()
    async with af.Session(graph) as session:
        first = asyncio.ensure_future(session.run(y, record=path))
        await began.wait()
        with pytest.raises(ValueError, match="another run writes its record there; give each run a file of its own"):
            await session.run(y, record=tmp_path / "." / "run.json")
        gate.set()
        assert await first == 1 == await session.run(y, record=path)


async def test_runs_that_waited_for_their_plan_have_their_own_numbers(tmp_path: Path) -> None:
    """Random numbers depend on these numbers: the first requested run need not begin first."""
    with af.Graph() as graph:
        y = af.random.normal((3,))
        for _ in range(60):  # so many that they are compiled beside the event loop
            y = af.tanh(y)
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    async with af.Session(graph) as session:
        await asyncio.gather(*(session.run(y, record=path) for path in paths))
    assert {Record.load(path).run for path in paths} == {1, 2, 3}
    for path in paths:
        await af.replay(path)


@pytest.mark.parametrize("clears", [False, True])
async def test_tensor_arrays_of_a_pool_are_replayed_bit_for_bit(tmp_path: Path, *, clears: bool) -> None:
    """Behaviour 78: elements of several shapes, an element that is not written, and elements that were read before."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (None,), name="x")
        arrays = [
            af.TensorArray("float32", 6, element_shape=(None,), clear_after_read=clears),
            af.TensorArray("float32", 6, element_shape=(), clear_after_read=clears),
            af.TensorArray("bfloat16", 0, element_shape=(2,), dynamic_size=True),
        ]
        read = af.TensorArray("int64", 4, element_shape=(), clear_after_read=clears).unstack([3, 1, 4, 1])

        def body(i: af.Tensor, grown: af.Tensor, *stores: af.TensorArray) -> Any:
            a, b, c, d = stores
            b = b.write(i, grown[0] * af.astype(d.read(i), "float32"))
            c = c.write(i, af.astype(grown[:1] + np.array([1, 2], np.float32), "bfloat16"))
            return i + 1, af.concat([grown, x[:1]]), a.write(i, grown), b, c, d

        _, _, a, b, c, d = af.while_loop(
            lambda i, *_: i < 3,
            body,
            (0, af.exp(x), *arrays, read),
            shape_invariants=((), (None,), None, None, None, None),
            pool=af.Pool(4),
        )
        fetches = [*(a.read(i) for i in range(3)), b.stack(), c.stack(), d.read(3), d.size()]
    path = tmp_path / "run.json"
    async with af.Session(graph) as session:
        fetched = await session.run(fetches, {x: np.array([-0.0, 2.5, 1e-30], np.float32)}, record=path)
    again = (await af.replay(path, graph)).values()
    for one, other in zip(fetched, again, strict=True):
        assert np.asarray(one).dtype == np.asarray(other).dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_a_content_of_a_tensor_array_that_is_damaged_is_refused(tmp_path: Path) -> None:
    """Behaviour 78: nothing of a file is believed that cannot be."""
    array = ArrayValue.create(np, ArrayKind(float32, (2,), dynamic_size=True, clear_after_read=True), 0)
    array = array.write(0, np.array([1, 2], np.float32)).write(2, np.array([3, 4], np.float32))
    array.read(0)
    content = array.content()
    assert content is not None
    kind, written = _written_answer((content, np.int64(3)))
    (found, _) = cast("tuple[ArrayContent, object]", _read_answer(kind, json.loads(json.dumps(written))))
    assert (found.kind, found.size, found.common, list(found.elements)) == (content.kind, 3, ((2,),), [0, 2])
    again = found.value()
    with pytest.raises(ValueError, match="is read a second time"):
        again.read(0)
    assert again.element_shape(0).tolist() == [2]
    assert again.read(1).tolist() == [0, 0]
    assert again.read(2).tolist() == [3, 4]
    (_, text), _ = cast("list[tuple[str, str]]", written)
    with pytest.raises(ValueError, match="no TensorArray of"):
        _read_answer("array", text.replace("float32", "float64", 1))
    array.close()
    assert array.content() is None


def test_a_content_of_a_row_store_that_is_damaged_is_refused() -> None:
    """Behaviour 112: a store of it has the rows, and room for as many as before."""
    kind, written = _written_answer(ROWS)
    found = cast("RowContent", _read_answer(kind, json.loads(json.dumps(written))))
    again = found.value().append(np.ones((2, 2), np.float32))
    assert again.block is not found.value().block
    assert (again.size, len(again.block.array)) == (5, 5)
    np.testing.assert_array_equal(again.slice(0, 5), np.concatenate([ROWS.rows, np.ones((2, 2), np.float32)]))
    for before, after in [("float32", "float64"), ("[2]", "[3]"), ("5", "2"), ("[3,2]", "[6]")]:
        damaged = cast("str", written).replace(before, after, 1)
        assert damaged != written
        with pytest.raises((ValueError, TypeError, af.GraphError)):
            _read_answer(kind, damaged)


async def test_a_card_without_room_for_copies_of_a_store_leaves_the_record_without_it() -> None:
    """The run goes on; the answer is nowhere."""

    def bind(kernel: Any, info: Any) -> Any:
        def full(store: object) -> Any:
            raise MemoryLimitExceeded(device="cuda:0", requested=3, used=5, limit=4, top=())

        return full

    card: Any = SimpleNamespace(bind=bind)
    card.asynchronous = card
    log = PickLog()
    log.answers[0] = ELSEWHERE
    store = _OfCard()
    store.value = ARRAY.value()  # type: ignore[attr-defined]
    log._bring(0, (store,), card)
    await log.copied()
    assert log.answers[0] is ELSEWHERE
