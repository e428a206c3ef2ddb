"""Behaviour 14-23: `cond`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pytest

import asyncflow as af
from tests.conformance.journal import Journal
from tests.conftest import OpenSession
from tests.runtime.by_hand import ByHand, step

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    Run = Callable[..., Coroutine[Any, Any, Any]]

BOTH = pytest.mark.parametrize("taken", [False, True])


@pytest.fixture
def pred(graph: af.Graph) -> af.Tensor:
    return af.placeholder("bool", (), name="pred")


@pytest.fixture
def x(graph: af.Graph) -> af.Tensor:
    return af.placeholder("int64", (), name="x")


def pure(x: af.Tensor, ran: set[str], label: str) -> af.Tensor:
    """`x`, from an op without declared effects that adds `label` to `ran`."""

    @af.op(outputs=lambda spec: spec)
    def look(value: Any) -> Any:
        ran.add(label)
        return value

    seen: af.Tensor = look(x)
    return seen


def noting(calls: list[Any], note: object, value: Any) -> Callable[[], Any]:
    """A branch that gives `value` and appends `note` when it is built."""

    def branch() -> Any:
        calls.append(note)
        return value

    return branch


def keeping(kept: list[af.Tensor], x: af.Tensor) -> Callable[[], af.Tensor]:
    """A branch that lets one of its tensors leak."""

    def branch() -> af.Tensor:
        kept.append(x + 1)
        return kept[0]

    return branch


# -- 14, 15 ------------------------------------------------------------------------------------------------------


def test_each_branch_builder_is_called_once(pred: af.Tensor, x: af.Tensor) -> None:
    """Behaviour 14: while the graph is built, whatever the predicate will be."""
    calls: list[str] = []
    af.cond(pred, noting(calls, "true", x), noting(calls, "false", x))
    assert calls == ["true", "false"]


@BOTH
async def test_only_the_taken_side_runs(pred: af.Tensor, x: af.Tensor, run: Run, taken: bool) -> None:
    """Behaviour 14: pure nodes and effects alike."""
    journal, ran = Journal(), set[str]()

    def branch(label: str, factor: int) -> Callable[[], tuple[af.Tensor, af.Node]]:
        return lambda: (pure(x, ran, label) * factor, journal.note(label, x))

    value, noted = await run(af.cond(pred, branch("true", 10), branch("false", 100)), {pred: taken, x: 3})
    assert value == (30 if taken else 300) and noted
    assert journal.entries == [("true" if taken else "false", 3)]
    assert ran == {"true" if taken else "false"}


@BOTH
async def test_an_assertion_fires_on_the_taken_side_only(pred: af.Tensor, x: af.Tensor, run: Run, taken: bool) -> None:
    """Behaviour 14."""

    def checked() -> af.Tensor:
        with af.control_dependencies([af.assert_that(x < 0, "x is not negative")]):
            return af.identity(x)

    running = run(af.cond(pred, checked, lambda: -x), {pred: taken, x: 3})
    if not taken:
        assert await running == -3
        return
    with pytest.raises(af.KernelError, match="x is not negative"):
        await running


@BOTH
async def test_nodes_outside_a_branch_run_regardless(pred: af.Tensor, x: af.Tensor, run: Run, taken: bool) -> None:
    """Behaviour 15: also if only the untaken branch uses their value."""
    journal = Journal()
    with af.control_dependencies([journal.note("outside", x)]):
        outside = af.identity(x)
    assert await run(af.cond(pred, lambda: outside + 1, lambda: 0), {pred: taken, x: 3}) == (4 if taken else 0)
    assert journal.entries == [("outside", 3)]


@BOTH
async def test_an_outer_node_named_inside_a_branch_runs_once(
    pred: af.Tensor, x: af.Tensor, run: Run, taken: bool
) -> None:
    """Behaviour 15: as a control dependency inside, even of the branch not taken; and before both."""
    journal = Journal()
    outside = journal.note("outside")

    def on_true() -> af.Tensor:
        with af.control_dependencies([outside]):
            first = journal.note("inside")
        with af.control_dependencies([outside, first]):
            return x + 1

    assert await run(af.cond(pred, on_true, lambda: x), {pred: taken, x: 3}) == 3 + taken
    assert journal.entries == (["outside", "inside"] if taken else ["outside"])


# -- 16, 17 ------------------------------------------------------------------------------------------------------


@BOTH
async def test_branches_without_results(pred: af.Tensor, session: af.Session, taken: bool) -> None:
    """Behaviour 16: None gives the node, whose fetch runs the taken branch's effects and is None."""
    journal = Journal()

    def on_true() -> None:
        journal.note("true")

    node = af.cond(pred, on_true, lambda: None)
    assert isinstance(node, af.Node)
    assert await session.run(node, {pred: taken}) is None
    assert journal.entries == ["true"] * taken


@pytest.mark.parametrize("effects", ["ordered", "unordered"])
@BOTH
async def test_branches_that_give_nodes(run: Run, taken: bool, effects: Literal["ordered", "unordered"]) -> None:
    """Behaviour 16: a Node becomes a boolean that is true once it has run."""
    journal = Journal()
    with af.Graph(effects=effects):
        pred = af.placeholder("bool", ())
        done = af.cond(pred, lambda: journal.note("true"), lambda: af.group(journal.note("false")))
    assert done.dtype == af.bool
    assert await run(done, {pred: taken})
    assert journal.entries == ["true" if taken else "false"]


@BOTH
async def test_a_captured_tensor_and_a_variable_as_results(
    pred: af.Tensor, x: af.Tensor, run: Run, taken: bool
) -> None:
    """Behaviour 16."""
    variable = af.Variable(10)
    assert await run(af.cond(pred, lambda: x, lambda: variable), {pred: taken, x: 3}) == (3 if taken else 10)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Point:
    x: Any
    y: Any


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: [a],
        lambda a, b: (a, [b, {"c": a}]),
        lambda a, b: {"b": b, "a": a},
        lambda a, b: Pair(a, (b,)),
        lambda a, b: Point(a, {"deep": b}),
        lambda a, b: (a, None, ()),
    ],
)
async def test_results_keep_their_nest(
    pred: af.Tensor, x: af.Tensor, run: Run, make: Callable[[Any, Any], Any]
) -> None:
    """Behaviour 16: tuples, lists, dicts, namedtuples and dataclasses, and None within them."""
    picked = af.cond(pred, lambda: make(x, x + 1), lambda: make(-x, 0))
    assert type(picked) is type(make(0, 0))
    assert await run(picked, {pred: True, x: 3}) == make(3, 4)
    assert await run(picked, {pred: False, x: 3}) == make(-3, 0)


@pytest.mark.parametrize(
    ("on_true", "on_false", "error", "message"),
    [
        (lambda x: (x, x), lambda x: x, af.GraphError, "branches of cond return different nests"),
        (
            lambda x: (x, x),
            lambda x: (x,),
            af.GraphError,
            "different nests.*tuple of 2 values, got a tuple of 1",
        ),
        (lambda x: None, lambda x: x, af.GraphError, "branches of cond return different nests"),
        (lambda x: {"a": x}, lambda x: {"b": x}, af.GraphError, "different nests.*keys 'a'.*keys 'b'"),
        (lambda x: [x], lambda x: (x,), af.GraphError, "different nests.*expected a list of 1 value, got a tuple"),
        (lambda x: x, lambda x: x * 1.5, af.DTypeError, "result of cond is int64 in true_fn and float64 in false_fn"),
        (lambda x: {"a": (x, x)}, lambda x: {"a": (x, x > 0)}, af.DTypeError, r"result\['a'\]\[1\] of cond is int64"),
    ],
)
def test_branches_that_do_not_match_are_refused(
    pred: af.Tensor,
    x: af.Tensor,
    on_true: Callable[[af.Tensor], Any],
    on_false: Callable[[af.Tensor], Any],
    error: type[af.GraphError],
    message: str,
) -> None:
    """Behaviour 17: while the graph is built, naming the result and the line."""
    with pytest.raises(error, match=message) as caught:
        af.cond(pred, lambda: on_true(x), lambda: on_false(x))
    assert "test_cond.py" in str(caught.value)


async def test_results_of_two_shapes_have_their_common_shape(pred: af.Tensor, run: Run) -> None:
    """Behaviour 17: shapes may differ; extents that do are unknown."""
    a, b = af.placeholder("float32", (2, 3)), af.placeholder("float32", (4, 3))
    picked = af.cond(pred, lambda: a, lambda: b)
    assert picked.shape == (None, 3)
    assert af.cond(pred, lambda: a, lambda: af.sum(b)).shape is None
    feeds = {a: np.ones((2, 3), "float32"), b: np.ones((4, 3), "float32")}
    assert (await run(picked, {pred: False, **feeds})).shape == (4, 3)


# -- 18 ----------------------------------------------------------------------------------------------------------


def test_a_tensor_of_the_other_branch_is_refused(pred: af.Tensor, x: af.Tensor) -> None:
    """Behaviour 18: naming both branches."""
    kept: list[af.Tensor] = []
    with pytest.raises(af.GraphError, match="built inside cond/true and is used in cond/false"):
        af.cond(pred, keeping(kept, x), lambda: kept[0] + 1)


def test_a_tensor_of_a_branch_is_refused_outside(pred: af.Tensor, x: af.Tensor) -> None:
    """Behaviour 18."""
    kept: list[af.Tensor] = []
    af.cond(pred, keeping(kept, x), lambda: x)
    with pytest.raises(af.GraphError, match="built inside cond/true and is used in this graph"):
        kept[0] + 1
    with pytest.raises(af.GraphError, match="built inside cond/true and is used in"), af.control_dependencies(kept):
        pass


# -- 19 ----------------------------------------------------------------------------------------------------------


async def test_a_feed_replaces_a_constant_predicate(graph: af.Graph, run: Run) -> None:
    """Behaviour 19."""
    pred = af.constant(True)
    picked = af.cond(pred, lambda: 37.0, lambda: 0.0)
    assert await run(picked) == 37.0
    assert await run(picked, {pred: False}) == 0.0


@BOTH
async def test_a_second_output_as_predicate(graph: af.Graph, run: Run, taken: bool) -> None:
    """Behaviour 19."""
    flags = af.placeholder("bool", (2,))
    picked = af.cond(af.unstack(flags)[1], lambda: 1, lambda: 0)
    assert await run(picked, {flags: np.array([not taken, taken])}) == taken


@pytest.mark.parametrize(
    ("declared", "fed"), [((1,), (1,)), ((1, 1), (1, 1)), ((None, 1), (1, 1)), (None, (1, 1)), (None, ())]
)
@BOTH
async def test_a_predicate_of_one_element(
    graph: af.Graph, run: Run, declared: tuple[int | None, ...] | None, fed: tuple[int, ...], taken: bool
) -> None:
    """Behaviour 19: whatever its shape, if that is known or turns out so in the run."""
    pred = af.placeholder("bool", declared)
    assert await run(af.cond(pred, lambda: 1, lambda: 0), {pred: np.full(fed, taken)}) == taken


@pytest.mark.parametrize(("declared", "fed"), [((None,), (2,)), ((None, 1), (3, 1)), (None, (1, 3)), (None, (0,))])
async def test_a_predicate_that_turns_out_to_have_other_elements_fails(
    graph: af.Graph, run: Run, declared: tuple[int | None, ...] | None, fed: tuple[int, ...]
) -> None:
    """Behaviour 19: the error says what a predicate is, and where the user wrote it."""
    pred = af.placeholder("bool", declared)
    picked = af.cond(pred, lambda: 1, lambda: 0)
    shape = str(list(fed)).replace(" ", "")
    message = f"a predicate is a boolean scalar; got shape {shape}; use af.any, af.all or af.reshape"
    with pytest.raises(af.KernelError, match=re.escape(message)) as caught:
        await run(picked, {pred: np.ones(fed, bool)})
    assert f"{Path(__file__).name}:{picked.node.location.line}" in str(caught.value)


def test_a_predicate_that_must_have_several_elements(graph: af.Graph) -> None:
    """Behaviours 19 and 28: refused where the graph is built, though an extent is unknown."""
    rows = af.placeholder("float64", (None, 3))
    message = r"a predicate is a boolean scalar; got shape \[\?,3\]; use af.any, af.all or af.reshape"
    uses: list[Callable[[], object]] = [
        lambda: af.cond(rows > 0, lambda: 1, lambda: 0),
        lambda: af.case([(rows > 0, lambda: 1)], default=lambda: 0),
        lambda: af.while_loop(lambda x: x < 3, lambda x: x + 1, rows),
        lambda: af.while_loop(lambda x: x < 3, lambda x: x + 1, rows, maximum_iterations=2),
    ]
    for use in uses:
        with pytest.raises(af.ShapeError, match=message):
            use()


@BOTH
async def test_a_python_bool_as_predicate(graph: af.Graph, run: Run, taken: bool) -> None:
    """Behaviour 19: it is a constant, and both branches are built all the same."""
    built: list[int] = []
    picked = af.cond(taken, noting(built, 1, 1), noting(built, 0, 0))
    assert built == [1, 0] and await run(picked) == taken


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: af.placeholder("int64", ()), af.DTypeError),
        (lambda: 1, af.DTypeError),
        (lambda: None, af.GraphError),
        (lambda: af.placeholder("bool", (2,)), af.ShapeError),
        (lambda: [True, False], af.GraphError),
    ],
)
def test_other_predicates_are_refused(graph: af.Graph, make: Callable[[], object], error: type[af.GraphError]) -> None:
    """Behaviour 19: while the graph is built."""
    with pytest.raises(error, match=r"boolean|predicate"):
        af.cond(make(), lambda: 1, lambda: 0)


# -- 20 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effects", ["ordered", "unordered"])
async def test_fetching_one_of_several_results(run: Run, effects: Literal["ordered", "unordered"]) -> None:
    """Behaviour 20: pure nodes are pruned; effects of the taken branch run if effects are ordered, else not."""
    journal, ran = Journal(), set[str]()

    def branch(x: af.Tensor, label: str) -> tuple[af.Tensor, af.Tensor, af.Node]:
        return pure(x, ran, f"{label} wanted"), pure(x, ran, f"{label} unwanted"), journal.note(label)

    with af.Graph(effects=effects):
        pred, x = af.placeholder("bool", ()), af.placeholder("float64", ())
        wanted, *_ = af.cond(pred, lambda: branch(x, "true"), lambda: branch(x, "false"))
    assert await run(wanted, {pred: True, x: 3.0}) == 3.0
    assert journal.entries == (["true"] if effects == "ordered" else [])
    assert ran == {"true wanted"}


async def test_fetching_a_result_of_one_cond_runs_no_other(pred: af.Tensor, run: Run) -> None:
    """Behaviour 20: a fetch pulls in only the nodes that it needs."""
    journal = Journal()
    af.cond(pred, lambda: journal.note("not asked for"), lambda: journal.note("nor this"))
    picked = af.cond(pred, lambda: 1, lambda: 0)
    assert await run(picked, {pred: True}) == 1
    assert journal.entries == []


# -- 21 ----------------------------------------------------------------------------------------------------------


async def test_ten_chained_conds(x: af.Tensor, run: Run) -> None:
    """Behaviour 21: the count of numbers from 0 to 9 that are at least 6."""
    count: af.Tensor = x
    for number in range(10):
        held = count
        count = af.cond(x + number >= 6, lambda held=held: held + 1, lambda held=held: held)  # type: ignore[misc]
    assert await run(count, {x: 0}) == 4


@pytest.mark.parametrize(("a", "b"), [(False, False), (False, True), (True, False), (True, True)])
async def test_conds_nest_in_both_branches(x: af.Tensor, run: Run, a: bool, b: bool) -> None:
    """Behaviour 21: the inner ones capture from two levels out."""
    first, second = af.placeholder("bool", ()), af.placeholder("bool", ())
    picked = af.cond(
        first,
        lambda: af.cond(second, lambda: x + 11, lambda: x + 10),
        lambda: af.cond(second, lambda: x + 1, lambda: x),
    )
    assert await run([picked, picked + 1], {first: a, second: b, x: 100}) == [100 + 10 * a + b, 101 + 10 * a + b]


async def test_a_cond_inside_a_function(open_session: OpenSession, graph: af.Graph) -> None:
    """Behaviour 21: awaited on its own, and built into a graph."""

    @af.function
    def magnitude(x: af.Tensor) -> af.Tensor:
        result: af.Tensor = af.cond(x < 0, lambda: -x, lambda: x)
        return result

    async with open_session() as session:
        y = af.placeholder("float64", ())
        assert await session.run(magnitude(y) + 1, {y: -2.0}) == 3.0


async def test_a_function_with_a_cond_is_awaited(open_session: OpenSession) -> None:
    """Behaviour 21."""

    @af.function
    def magnitude(x: af.Tensor) -> af.Tensor:
        result: af.Tensor = af.cond(x < 0, lambda: -x, lambda: x)
        return result

    async with open_session():
        assert [await magnitude(np.float64(v)) for v in (-2.0, 5.0)] == [2.0, 5.0]


# -- 22 ----------------------------------------------------------------------------------------------------------


@BOTH
async def test_an_uninitialised_variable(pred: af.Tensor, run: Run, taken: bool) -> None:
    """Behaviour 22: on the taken side it raises and is named; on the other it is not read."""
    empty = af.Variable(af.spec("int64", ()), name="never_assigned")
    picked = af.cond(pred, lambda: empty.read() + 1, lambda: 7)
    if not taken:
        assert await run(picked, {pred: False}) == 7
        return
    with pytest.raises(af.KernelError, match="'never_assigned' is read before it has a value"):
        await run(picked, {pred: True})


# -- 23 ----------------------------------------------------------------------------------------------------------


def test_a_switch_passes_its_value_on_without_a_copy(graph: af.Graph) -> None:
    """Behaviour 23: what a branch gets is the very object that was fed, and a check of it copies nothing."""
    pred, data = af.placeholder("bool", ()), af.placeholder("float64", (3,))
    look = step("look")

    def guarded() -> af.Tensor:
        with af.control_dependencies([af.assert_that(af.all(data > 0), "positive")]):
            return look(data)

    picked = af.cond(pred, guarded, lambda: data)
    owned = np.ones(3)
    owned.flags.writeable = False
    run = ByHand(af.identity(picked), {data: owned, pred: True})
    seen: list[Any] = []
    while run.held:
        seen.extend(value for _, _, inputs in run.firings for value in inputs)
        run.complete(min(run.held))
    assert [value for value in seen if np.shape(value) == (3,) and value.dtype == "float64"]
    assert all(value is owned for value in seen if np.shape(value) == (3,) and value.dtype == "float64")
    assert run.scheduler.done
