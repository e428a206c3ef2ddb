"""Behaviour 1-13: the primitives written by hand, and how deadness travels.

Rules about the order of events are pinned down without an event loop in `tests/runtime/test_scheduler.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import asyncflow as af
from asyncflow.runtime.executor.executor import Executor
from tests.conformance.gates import Gate, settle
from tests.conformance.journal import Journal
from tests.patience import PATIENCE_S
from tests.runtime.by_hand import NOTHING
from tests.runtime.hand_written import counting_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from tests.cells import Arrangement

    Run = Callable[..., Coroutine[Any, Any, Any]]


def fork() -> tuple[af.Tensor, af.Tensor, dict[str, af.Tensor]]:
    """``(on_false, on_true, feeds by name)`` of a switch named ``fork``."""
    x, pred = af.placeholder("int64", (), name="x"), af.placeholder("bool", (), name="pred")
    on_false, on_true = af.raw.switch(x, pred, name="fork")
    return on_false, on_true, {"x": x, "pred": pred}


# -- 1 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [False, True])
async def test_fetching_a_dead_port_names_the_switch(graph: af.Graph, run: Run, taken: bool) -> None:
    """Behaviour 1: an error that names the Switch and where it was built; never a hang or None."""
    sides = fork()
    feeds = {sides[2]["x"]: 7, sides[2]["pred"]: taken}
    assert await run(sides[taken], feeds) == 7
    with pytest.raises(af.FetchError, match=rf"fork:{int(not taken)} is dead.*switch fork built at .*\.py:\d+"):
        await run(sides[not taken], feeds)


async def test_fetching_what_depends_on_a_dead_port_names_the_switch(graph: af.Graph, run: Run) -> None:
    """Behaviour 1: also through other nodes, a merge and a loop."""
    dead, _, fed = fork()
    through_loop = counting_loop(3, start=dead).total
    merged, index = af.raw.merge(dead, -dead)
    for fetch in (dead + 1, through_loop, merged, index):
        with pytest.raises(af.FetchError, match="switch fork built at"):
            await run(fetch, {fed["x"]: 7, fed["pred"]: True})


async def test_allow_dead_gives_none_for_a_dead_fetch(graph: af.Graph, run: Run) -> None:
    """Behaviour 1: the caller may ask for None."""
    on_false, on_true, fed = fork()
    values = await run([on_false, on_true], {fed["x"]: 7, fed["pred"]: True}, allow_dead=True)
    assert values == [None, 7]


# -- 2 -----------------------------------------------------------------------------------------------------------


async def test_a_frame_without_a_loop(graph: af.Graph, run: Run) -> None:
    """Behaviour 2: Enter, multiply, Exit."""
    x = af.placeholder("int64", ())
    product = af.raw.exit(af.raw.enter(x, "frame") * af.raw.enter(5, "frame"))
    assert await run(product + x, {x: 4}) == 24


async def test_frames_nest(graph: af.Graph, run: Run) -> None:
    """Behaviour 2."""
    x = af.placeholder("int64", ())
    inner = af.raw.enter(af.raw.enter(x, "outer"), "inner")
    assert await run(af.raw.exit(af.raw.exit(inner * inner)), {x: 4}) == 16


def _product_of_two_frames(x: af.Tensor) -> None:
    af.raw.enter(x, "left") * af.raw.enter(x, "right")


def _inner_and_outer(x: af.Tensor) -> None:
    af.raw.enter(x, "left") + x


def _control_edge_from_another_frame(x: af.Tensor) -> None:
    left, right = af.raw.enter(x, "left"), af.raw.enter(x, "right")
    with af.control_dependencies([left]):
        right + right


def _group_of_another_frame(x: af.Tensor) -> None:
    with af.control_dependencies([af.group(af.raw.enter(x, "left"))]):
        x + x


def _back_edge_to_another_frame(x: af.Tensor) -> None:
    merged, _ = af.raw.merge(af.raw.enter(x, "left"))
    af.raw.add_back_edge(merged, af.raw.next_iteration(af.raw.enter(x, "right")))


def _exit_of_nothing(x: af.Tensor) -> None:
    af.raw.enter(x, "left")
    af.raw.exit(x)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_product_of_two_frames, "mixes two frames: .*frame 'left'.*frame 'right'"),
        (_inner_and_outer, "mixes two frames: .*frame 'left'.*in no frame"),
        (_control_edge_from_another_frame, "mixes two frames: .*frame 'right'.*frame 'left'"),
        (_group_of_another_frame, "mixes two frames: .*in no frame, group in frame 'left'"),
        (_back_edge_to_another_frame, "a back edge stays in one frame: .*frame 'right'.*frame 'left'"),
        (_exit_of_nothing, "an exit outside every frame"),
    ],
)
def test_mixing_two_frames_is_refused(graph: af.Graph, build: Callable[[af.Tensor], None], message: str) -> None:
    """Behaviour 2: while the graph is built, and naming both frames."""
    with pytest.raises(af.GraphError, match=message):
        build(af.placeholder("int64", ()))


def doubling(start: af.Tensor, times: int, **entered: Any) -> af.Tensor:
    """A loop by hand that doubles the length of a vector so often; `entered` goes to its enter."""
    i, _ = af.raw.merge(af.raw.enter(af.constant(0), "f"))
    x, _ = af.raw.merge(af.raw.enter(start, "f", **entered))
    go_on = af.raw.loop_cond(i < af.raw.enter(af.constant(times), "f", constant=True))
    left, stays = af.raw.switch(x, go_on)
    one = af.raw.enter(af.constant(1), "f", constant=True)
    af.raw.add_back_edge(i, af.raw.next_iteration(af.raw.switch(i, go_on)[1] + one))
    af.raw.add_back_edge(x, af.raw.next_iteration(af.concat([stays, stays])))
    return af.raw.exit(left)


@pytest.mark.parametrize("shape", [(None,), None])
async def test_a_shape_that_changes_by_hand_is_said(graph: af.Graph, run: Run, shape: Any) -> None:
    """Behaviour 93: nodes behind a merge may rely on its shape: the whole shape is there in every iteration."""
    grown = doubling(af.constant([1.0, 2.0]), 2, shape=shape)
    assert grown.shape == shape
    assert (await run(af.ones_like(grown))).tolist() == [1.0] * 8


def test_a_back_edge_of_another_shape_is_refused(graph: af.Graph) -> None:
    """Behaviour 93: and so is a shape for what enters that does not allow it, and a dtype that changes."""
    with pytest.raises(af.ShapeError, match=r"merge_1 has shape \[2\], .* brings shape \[4\]; .* enter\(..., shape=\)"):
        doubling(af.constant([1.0, 2.0]), 2)
    with pytest.raises(af.ShapeError, match=r"a value of shape \[2\] cannot enter as one of shape \[3\]"):
        af.raw.enter(af.constant([1.0, 2.0]), "g", shape=3)
    merged, _ = af.raw.merge(af.raw.enter(af.constant(1.0), "h"))
    with pytest.raises(af.DTypeError, match=r"one dtype; got float64\[\], int64\[\]"):
        af.raw.add_back_edge(merged, af.raw.next_iteration(af.astype(merged, "int64")))


def test_a_frame_has_one_number_of_parallel_iterations(graph: af.Graph) -> None:
    """Behaviour 10: the same for all its Enters; frames of one name inside others are others."""
    first = af.raw.enter(af.constant(1), "f", parallel_iterations=4)
    assert af.raw.enter(af.constant(2), "f", constant=True).node.attrs["parallel_iterations"] == 4
    af.raw.enter(first, "f", parallel_iterations=8)
    with pytest.raises(af.GraphError, match=r"frame 'f' is entered with parallel_iterations=4 by enter and with 8"):
        af.raw.enter(af.constant(3), "f", parallel_iterations=8)


def test_each_node_is_looked_at_once_for_the_enters_of_its_frame(graph: af.Graph) -> None:
    """And not once for each Enter that comes after it."""

    class Counting(list[Any]):
        looked_at = 0

        def __iter__(self) -> Iterator[Any]:
            for item in super().__iter__():
                self.looked_at += 1
                yield item

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            self.looked_at += len(found) if isinstance(index, slice) else 1
            return found

    nodes = graph.nodes = Counting(graph.nodes)
    for k in range(100):
        af.raw.enter(af.constant(k), f"f{k % 3}")
    assert nodes.looked_at <= 2 * len(nodes)


def test_a_value_inside_a_frame_can_be_neither_fetched_nor_fed(graph: af.Graph) -> None:
    """Behaviour 2: it may have many values in a run."""
    x = af.placeholder("int64", ())
    inner = counting_loop(x).every
    session = af.Session()
    with pytest.raises(af.FetchError, match=r"is in frame 'loop'.*exit"):
        session.plan(inner, [x])
    with pytest.raises(af.FeedError, match="is in frame 'loop'"):
        session.plan(x, [inner])


@pytest.mark.parametrize("constant", [False, True])
async def test_a_dead_value_arrives_inside_a_frame(graph: af.Graph, run: Run, constant: bool) -> None:
    """Behaviour 2: a node that needs only the arrival goes on, be it a trigger or a merge that waits for it."""
    dead, _, fed = fork()
    arrived = af.raw.enter(dead, "frame", constant=constant)
    y = af.placeholder("int64", ())
    live = af.raw.enter(y, "frame")
    with af.control_dependencies([arrived]):
        merged, _ = af.raw.merge(live, af.identity(arrived))
        trigger = af.raw.control_trigger()
    with af.control_dependencies([trigger]):
        after = live + 1
    fetches = [af.raw.exit(merged), af.raw.exit(after), af.raw.exit(arrived)]
    feeds = {fed["x"]: 7, fed["pred"]: True, y: 3}
    assert await run(fetches, feeds, allow_dead=True) == [3, 4, None]


# -- 3, 4 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [False, True])
async def test_merge_gives_the_live_input_and_its_index(graph: af.Graph, run: Run, taken: bool) -> None:
    """Behaviour 3."""
    on_false, on_true, fed = fork()
    value, index = af.raw.merge(on_false * 10, on_true * 100)
    values = await run([value, index], {fed["x"]: 7, fed["pred"]: taken})
    assert values == [[70, 0], [700, 1]][taken]
    assert values[1].dtype == np.int32


async def test_predicates_that_are_computed_from_arrays(graph: af.Graph, run: Run) -> None:
    """Behaviour 3: of a switch by itself and of a loop, wherever the arrays are."""
    x = af.placeholder("float32", (4,))
    negative, positive = af.raw.switch(x * 2, af.sum(x) > 0)
    chosen, _ = af.raw.merge(negative + 1, positive * 10)
    value, _ = af.raw.merge(af.raw.enter(x, "doubling"))
    goes_on = af.raw.loop_cond(af.sum(value) < af.raw.enter(np.float32(50), "doubling", constant=True))
    done, body = af.raw.switch(value, goes_on)
    af.raw.add_back_edge(value, af.raw.next_iteration(body + body))
    doubled = af.raw.exit(done)
    for fed, fetches, expected in ((1, [chosen, doubled], [20, 16]), (-1, [chosen], [-1])):
        values = await run(fetches, {x: np.full(4, fed, "float32")})
        assert [value.tolist() for value in values] == [[each] * 4 for each in expected]


async def test_merge_fires_once(graph: af.Graph, run: Run) -> None:
    """Behaviour 3: what depends on it runs once."""
    on_false, on_true, fed = fork()
    journal = Journal()
    value, _ = af.raw.merge(on_false, on_true, -on_false)
    await run(journal.note("merged", value), {fed["x"]: 7, fed["pred"]: True})
    assert journal.entries == [("merged", 7)]


def _two_constants(x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
    return af.raw.merge(1, 2)


def _two_feeds(x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
    return af.raw.merge(x, x)


def _feed_and_constant(x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
    return af.raw.merge(x, 1)


def _two_kernels(x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
    return af.raw.merge(x + 1, x + 2)


def _two_switches(x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
    return af.raw.merge(af.raw.switch(x, True)[1], af.raw.switch(x, False)[0])


@pytest.mark.parametrize("build", [_two_constants, _two_feeds, _feed_and_constant, _two_kernels, _two_switches])
async def test_two_live_inputs_of_a_merge_are_an_error(
    graph: af.Graph, run: Run, build: Callable[[af.Tensor], tuple[af.Tensor, af.Tensor]]
) -> None:
    """Behaviour 3: found whenever they arrive, where TensorFlow takes one by chance."""
    x = af.placeholder("int64", ())
    value, _ = build(x)
    with pytest.raises(af.AsyncflowError, match="two live inputs") as caught:
        await run([value, x], {x: 7})
    assert isinstance(caught.value, af.KernelError | af.GraphError)
    assert "merge" in str(caught.value) and "test_primitives.py" in str(caught.value)


async def test_merge_waits_for_its_control_inputs(graph: af.Graph, run: Run) -> None:
    """Behaviour 4: and a dead control input does not kill it."""
    on_false, on_true, fed = fork()
    gate, journal = Gate(), Journal()
    with af.control_dependencies([gate(on_true), -on_false]):
        value, _ = af.raw.merge(on_false, on_true)
    note = journal.note("merged", value)
    running = asyncio.create_task(run([value, note], {fed["x"]: 7, fed["pred"]: True}))
    await settle()
    assert gate.arrived == 1 and journal.entries == []
    gate.open()
    assert (await running)[0] == 7 and journal.entries == [("merged", 7)]


async def test_merge_is_dead_when_all_its_data_inputs_are(graph: af.Graph, run: Run) -> None:
    """Behaviour 4: although its control inputs are live."""
    on_false, on_true, fed = fork()
    with af.control_dependencies([on_true + 1]):
        value, index = af.raw.merge(on_false, -on_false)
    assert await run([value, index], {fed["x"]: 7, fed["pred"]: True}, allow_dead=True) == [None, None]


async def test_a_constant_of_all_iterations_at_a_merge_is_refused(graph: af.Graph, run: Run) -> None:
    """Behaviour 3: it would be a live input in every iteration."""
    merged, _ = af.raw.merge(af.raw.enter(1, "frame", constant=True))
    with pytest.raises(af.GraphError, match="a constant enter reaches every iteration"):
        await run(af.raw.exit(merged))


# -- 5, 6 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["data", "control"])
async def test_a_dead_input_makes_a_node_dead(graph: af.Graph, run: Run, through: str) -> None:
    """Behaviour 5: its kernel is skipped, and all its outputs and control edges are dead."""
    on_false, _, fed = fork()
    journal = Journal()
    if through == "data":
        dead = journal.note("dead", on_false)
    else:
        with af.control_dependencies([-on_false]):
            dead = journal.note("dead", fed["x"])
    with af.control_dependencies([dead]):
        after = journal.note("after the dead one", fed["x"])
        value = fed["x"] + 1
    live = journal.note("live", fed["x"])
    feeds = {fed["x"]: 7, fed["pred"]: True}
    assert await run([after, live, value], feeds, allow_dead=True) == [None, None, None]
    assert journal.entries == [("live", 7)]


async def test_effects_written_after_a_dead_one_still_run(graph: af.Graph, run: Run) -> None:
    """Behaviour 5: the order of effects is no reason to die."""
    on_false, on_true, fed = fork()
    total = af.Variable(100)
    total.assign(on_false)
    await run([total.assign(on_false), total.assign_add(on_true)], {fed["x"]: 7, fed["pred"]: True}, allow_dead=True)
    assert await run(total.read()) == 107


async def test_a_control_trigger_runs_although_its_inputs_are_dead(graph: af.Graph, run: Run) -> None:
    """Behaviour 6: and once they are all done."""
    on_false, on_true, fed = fork()
    gate, journal = Gate(), Journal()
    with af.control_dependencies([gate(on_true), -on_false]):
        trigger = af.raw.control_trigger()
    with af.control_dependencies([trigger]):
        note = journal.note("triggered")
    running = asyncio.create_task(run(note, {fed["x"]: 7, fed["pred"]: True}))
    await settle()
    assert journal.entries == []
    gate.open()
    await running
    assert journal.entries == ["triggered"]


async def test_a_control_trigger_works_inside_a_frame(graph: af.Graph, run: Run) -> None:
    """Behaviour 6: once in each iteration; nothing orders what iterations do on several devices."""
    journal, loop = Journal(), counting_loop(2)
    with af.control_dependencies([-loop.i]):  # dead in the last iteration
        trigger = af.raw.control_trigger()
    with af.control_dependencies([trigger]):
        note = journal.note("iteration", loop.every)
    await run([loop.total, note])
    assert sorted(journal.entries) == [("iteration", 0), ("iteration", 1), ("iteration", 2)]


# -- 7 - 11 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [False, True])
async def test_a_loop_on_an_untaken_branch_ends_at_once(graph: af.Graph, run: Run, taken: bool) -> None:
    """Behaviour 7: a dead Enter makes the loop Merge dead; a dead NextIteration stops there."""
    on_false, on_true, fed = fork()
    total, index = af.raw.merge(counting_loop(5, start=on_false).total, on_true * 100)
    assert await run([total, index], {fed["x"]: 2, fed["pred"]: taken}) == [[5, 0], [200, 1]][taken]


async def test_a_live_exit_leaves_early_and_dead_ones_are_dropped(graph: af.Graph, run: Run) -> None:
    """Behaviour 8: the exit is dead in all iterations but one, and is there while the loop still runs."""
    journal, gate = Journal(), Gate()
    loop = counting_loop(4)
    found = loop.found(af.equal(loop.every, loop.constant(2)))
    held = af.raw.exit(af.raw.switch(gate(loop.every), loop.every < loop.constant(4))[0])
    running = asyncio.create_task(run([journal.note("found", found), held]))
    await settle()
    assert journal.entries == [("found", 2)] and not running.done()
    gate.open()
    assert (await running)[1] == 4


async def test_an_exit_without_a_live_value_is_dead(graph: af.Graph, run: Run) -> None:
    """Behaviour 8: it is held until its frame is done."""
    loop = counting_loop(4)
    never = loop.found(af.equal(loop.every, loop.constant(99)))
    assert await run([loop.total, never], allow_dead=True) == [4, None]


async def test_a_late_loop_constant_reaches_iterations_already_started(graph: af.Graph, run: Run) -> None:
    """Behaviour 9."""
    x, journal, gate = af.placeholder("int64", ()), Journal(), Gate()
    loop = counting_loop(3)
    late = loop.constant(gate(x))
    early, note = journal.note("started", loop.every), journal.note("with constant", loop.i * late)
    running = asyncio.create_task(run([loop.total, early, note], {x: 10}))
    await settle()
    assert journal.entries == [("started", k) for k in range(4)]
    gate.open()
    await running
    assert sorted(journal.values("with constant")) == [0, 10, 20]


@pytest.mark.parametrize("bound", [1, 2, 3])
async def test_iterations_past_the_bound_are_parked(
    graph: af.Graph, run: Run, arrangement: Arrangement, bound: int
) -> None:
    """Behaviour 10: as many iterations start as may be live at once; the next starts when the oldest ends.

    On another device than the predicate's the latest predicate may have started one more.
    """
    journal, gate = Journal(), Gate()
    loop = counting_loop(6, bound=bound)
    started = journal.note("started", loop.every)
    slow = af.raw.exit(af.raw.switch(gate(loop.every), loop.every < loop.constant(6))[0])
    running = asyncio.create_task(run([loop.total, started, slow]))
    await settle()
    n_started = bound + (len(journal.entries) > bound and arrangement.draw is not None)
    assert journal.values("started") == list(range(n_started))
    gate.open()
    assert (await running)[::2] == [6, 6]
    assert journal.values("started") == list(range(7))


@pytest.mark.parametrize("ending", ["success", "error", "cancel"])
async def test_nothing_is_left_of_a_frame(graph: af.Graph, session: af.Session, ending: str) -> None:
    """Behaviour 11: zero frames, iterations and tokens remain, however the run ends."""
    gate, loop = Gate(), counting_loop(3)

    @af.op(outputs=lambda spec: spec)
    def pass_or_fail(i: np.int64) -> np.int64:
        if ending == "error" and i == 2:
            raise ValueError("two is too much")
        return i

    last = loop.found(af.equal(pass_or_fail(gate(loop.every)), loop.constant(3)))
    running = asyncio.create_task(session.run([loop.total, last]))
    await settle()
    executors = next(iter(session._runs.in_flight.runs)).executors
    schedulers = [executor.scheduler for executor in executors if isinstance(executor, Executor)]
    assert gate.arrived == 4, "all iterations are held by the gate"
    assert len(schedulers) > 1 or schedulers[0].statistics()[1:] == (4, 2, 1 + 4, 0)
    if ending == "cancel":
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    gate.open()
    if ending == "error":
        with pytest.raises(af.KernelError, match="two is too much") as caught:
            await running
        assert caught.value.tag == "loop/2"
    if ending == "success":
        assert await running == [3, 3]
    assert all(scheduler.statistics() == NOTHING for scheduler in schedulers)
    assert session.statistics().runs == 0
    assert await session.run(af.raw.exit(af.raw.enter(1, "other"))) == 1, "the session is as good as new"


# -- 12 ----------------------------------------------------------------------------------------------------------


def _sum_in_python(n: int) -> int:
    return sum(10 * i + j for i in range(n) for j in range(i, 3))


async def test_activations_of_an_inner_loop_are_apart(graph: af.Graph, session: af.Session) -> None:
    """Behaviour 12: in two outer iterations, and in concurrent runs."""
    n = af.placeholder("int64", ())
    total = af.while_loop(
        lambda i, s: i < n,
        lambda i, s: (i + 1, af.while_loop(lambda j, t: j < 3, lambda j, t: (j + 1, t + i * 10 + j), (i, s))[1]),
        (0, 0),
    )[1]
    counts = range(8)
    values = await asyncio.gather(*(session.run(total, {n: count}) for count in counts))
    assert values == [_sum_in_python(count) for count in counts]


async def test_concurrent_runs_of_a_held_loop_are_apart(graph: af.Graph, session: af.Session) -> None:
    """Behaviour 12: all of them in the middle of the same iteration at one time."""
    n, gate = af.placeholder("int64", ()), Gate()
    total = af.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, gate(s) + i * n), (0, n), name="loop")[1]
    tasks = [asyncio.create_task(session.run(total, {n: k})) for k in range(10)]
    async with asyncio.timeout(PATIENCE_S):
        while gate.arrived < 10:  # others begin when the first wait: on cards once these have ended their work
            await settle()
    gate.open()
    assert await asyncio.gather(*tasks) == [4 * k for k in range(10)]


# -- 13 ----------------------------------------------------------------------------------------------------------

_VALUES = [
    *(np.array([0, 1, 1]).astype(dtype) for dtype in ("bool", "int8", "uint16", "int32", "int64", "uint64")),
    *(np.array([1.5, -2.0]).astype(dtype) for dtype in ("float16", "float32", "float64", "complex64", "complex128")),
    np.array([1.5, -2.0], ml_dtypes.bfloat16),
    np.array(["left", "right", ""], np.dtypes.StringDType()),
    np.array("alone", np.dtypes.StringDType()),
    np.zeros((0, 3), "float32"),
]


@pytest.mark.parametrize("value", _VALUES, ids=lambda value: f"{value.dtype}{list(value.shape)}")
async def test_switch_and_merge_carry_every_dtype(graph: af.Graph, run: Run, value: np.ndarray[Any, Any]) -> None:
    """Behaviour 13: around a loop as well."""
    x, pred = af.placeholder(value.dtype, value.shape), af.placeholder("bool", ())
    merged, index = af.raw.merge(*af.raw.switch(x, pred))
    looped = af.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, v), (0, x))[1]
    for taken in (False, True):
        got, side, round_trip = await run([merged, index, looped], {x: value, pred: taken})
        assert side == taken
        for result in (got, round_trip):
            assert np.asarray(result).dtype == value.dtype and np.shape(result) == value.shape
            assert np.array_equal(result, value)


async def test_all_parts_of_a_structured_value_take_one_side(graph: af.Graph, run: Run) -> None:
    """Behaviour 13."""
    x, pred = af.placeholder("float32", (2,)), af.placeholder("bool", ())
    parts = {"values": x, "indices": (af.astype(x, "int64"), af.constant("name"))}
    picked = af.cond(pred, lambda: parts, lambda: parts)
    got = await run(picked, {x: np.array([1, 2], "float32"), pred: False})
    assert set(got) == {"values", "indices"} and isinstance(got["indices"], tuple)
    assert got["values"].tolist() == [1.0, 2.0] and got["indices"][0].tolist() == [1, 2]
    assert got["indices"][1] == "name"


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (((1, 2), (2, 2)), (None, 2)),
        (((2, 2), (2, 2)), (2, 2)),
        (((2,), (2, 2)), None),
        (((), (None,)), None),
        (((None, 3), (4, 3)), (None, 3)),
        ((None, (4, 3)), None),
    ],
)
def test_the_static_shape_of_a_merge(graph: af.Graph, shapes: tuple[Any, Any], expected: object) -> None:
    """Behaviour 13: extents that differ are unknown, and so is a rank that does."""
    value, index = af.raw.merge(*(af.placeholder("float32", shape) for shape in shapes))
    assert value.shape == expected and index.shape == ()


def test_a_merge_of_two_dtypes_is_refused(graph: af.Graph) -> None:
    """Behaviour 13."""
    with pytest.raises(af.DTypeError, match=r"all inputs of a merge have one dtype; got float32.*int64"):
        af.raw.merge(af.placeholder("float32", ()), 1)
