"""Loops that run again in segments for their gradients: the same bits, less held, and parts that never run twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from math import isqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.autodiff.stores.checkpoints import CHECKPOINT, segment_of
from asyncflow.compiler.memory.recomputation.segments import SegmentedLoop, loops_to_segment, segments
from asyncflow.compiler.program.extract import extract
from asyncflow.graph.structured import WhileNode
from tests.autodiff.programs import Program
from tests.autodiff.strategies import programs
from tests.autodiff.test_gradients_random_programs import Runner, differentiate
from tests.compiler.segmented import PROGRAMS, WIDTH, N, assert_same_bits, built, force, nested
from tests.conftest import OpenSession, small_cards


@pytest.fixture
def graph() -> Iterator[af.Graph]:
    """The current graph, whose random numbers are the same in all sessions."""
    with af.Graph(seed=5) as made:
        yield made


@pytest.fixture(params=[None, 1, 4, 100], ids=lambda length: f"segments of {length or '1, 2, 3'}")
def length(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """The length of all segments, whether that gains anything or not."""
    force(monkeypatch, request.param)
    found: int | None = request.param
    return found


# -- which iteration is in which segment -----------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1, 20, 60])
@pytest.mark.parametrize("length", [None, 1, 2, 7, 50])
def test_segments_follow_one_another(length: int | None, kept: int) -> None:
    """All kept iterations are one segment."""
    found = [segment_of(number, length, kept) for number in range(50)]
    starts = [number for number in range(50) if found[number][1] == number]
    assert [segment for segment, _ in found] == [sum(start <= number for start in starts) - 1 for number in range(50)]
    assert all(first == starts[segment] for segment, first in found)
    if length is None:
        assert len(starts) <= isqrt(2 * 50) + 1, "there are about sqrt(2 n) segments"


# -- the same bits: on all devices in tests/conformance/test_recomputation.py ----------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
async def test_products_of_many_iterations_are_the_same_within_rounding(graph: af.Graph, name: str) -> None:
    fetches, n = built(PROGRAMS[name])
    async with af.Session(graph) as keeping, af.Session(graph, debug=True, saved_values="recompute") as again:
        for one, other in zip(await again.run(fetches, {n: N}), await keeping.run(fetches, {n: N}), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize(("kept", "regions"), [(1, True), (5, False), (N, True), (100, False)])
@pytest.mark.parametrize("name", PROGRAMS)
async def test_the_first_iterations_may_be_kept(
    graph: af.Graph, name: str, kept: int, regions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward loop saves what those need, and they do not run again."""
    force(monkeypatch, 2, kept)
    fetches, n = built(PROGRAMS[name])
    options: dict[str, Any] = {"debug": True, "loop_batching": False, "regions": regions}
    async with (
        af.Session(graph, **options) as keeping,
        af.Session(graph, saved_values="recompute", **options) as again,
    ):
        assert_same_bits(await again.run(fetches, {n: N}), await keeping.run(fetches, {n: N}))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [{"regions": True}, {"regions": False, "seed": 3}, {"devices": ["cpu:0", "cpu:1", "cpu:2"], "placement_seed": 5}],
    ids=["regions", "interpreted", "three"],
)
@given(program=programs(), length=st.sampled_from([None, 1, 2]))
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
def test_random_programs(program: Program, length: int | None, options: dict[str, Any]) -> None:
    """First and second derivatives of loops and branches in one another."""
    at = {**program.inputs, **program.variables}
    found = differentiate(program, {name: np.ones(np.shape(value)) for name, value in at.items()}, at_once=True)
    grads = [grad for order in (found.first, found.second) for grad in order.values() if grad is not None]

    async def main(saved_values: Any) -> Any:
        async with af.Session(
            found.graph, debug=True, loop_batching=False, saved_values=saved_values, **options
        ) as session:
            return await Runner(found, session).run([found.value, *grads], at)

    with pytest.MonkeyPatch.context() as patch:
        force(patch, length)
        assert_same_bits(asyncio.run(main("recompute")), asyncio.run(main("keep")))


# -- what a run holds ------------------------------------------------------------------------------------------------

SIDE = 32
VALUE = SIDE * SIDE * 8
COUNT = 64


def held(saved_values: Any, *, regions: bool, cuda: bool = False, known: bool = True) -> int:
    """The most values that a device holds at a time while a gradient is made, of a loop that saves two in each."""

    async def main() -> int:
        device = "cuda:0" if cuda else "cpu:0"
        options: dict[str, Any] = {"devices": [device], "memory_limit": 64 << 20, "regions": regions}
        async with af.Session(saved_values=saved_values, **options) as session:
            await session.run(grad, feeds)
            return session.devices[0].memory.peak // VALUE

    with af.Graph():
        n = af.placeholder("int64", ())
        feeds: dict[Any, Any] = {} if known else {n: COUNT}
        start = af.ones((SIDE, SIDE), dtype="float64") * 0.5
        w = af.ones((SIDE, SIDE), dtype="float64") / SIDE
        body = lambda i, x: (i + 1, af.tanh(af.tanh(x @ w) @ w))  # noqa: E731
        _, last = af.while_loop(lambda i, _: i < (COUNT if known else n), body, (0, start), parallel_iterations=1)
        grad = af.gradients(af.sum(last), start)
        if cuda:
            with small_cards(seed=1):
                return asyncio.run(main())
        return asyncio.run(main())


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize("cuda", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bytes_held_follow_the_segments(regions: bool, cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of n iterations in segments of k: n / k variables, and k times what an iteration saves."""
    everything = held("keep", regions=regions, cuda=cuda)
    per_iteration = everything // COUNT
    assert per_iteration >= 2
    few = 16  # in flight, and of a segment that is just being given up
    for length in (2, 8, 32):
        force(monkeypatch, length)
        expected = COUNT // length + length * per_iteration
        assert abs(held("recompute", regions=regions, cuda=cuda) - expected) <= few, length
    monkeypatch.undo()
    assert held("recompute", regions=regions, cuda=cuda) < everything // 4


def test_segments_of_a_length_that_only_the_run_knows_hold_little() -> None:
    assert held("recompute", regions=True, known=False) < held("keep", regions=True, known=False) // 3


def loops_of(graph: af.Graph, fetches: Any) -> list[SegmentedLoop]:
    """Return the loops that the pass finds in a private copy of the graph, with nothing fed."""
    return list(loops_to_segment(extract(graph, fetches, []).graph))


def test_the_prediction_counts_variables_and_values(graph: af.Graph) -> None:
    start = af.ones((4,), dtype="float32")
    _, last = af.while_loop(lambda i, _: i < COUNT, lambda i, x: (i + 1, af.tanh(x)), (0, start))
    (loop,) = loops_of(graph, [af.gradients(af.sum(last), start)])
    assert (loop.value_bytes, loop.variable_bytes, loop.trip_count) == (16, 16, COUNT)
    assert loop.usual_length() == 8
    assert loop.bytes_held(COUNT, 8) == 8 * 16 + 8 * 16
    assert loop.bytes_held(COUNT, 30) == 3 * 16 + 30 * 16
    assert loop.bytes_held(COUNT, None) == 11 * 16 + 11 * 16
    assert loop.bytes_held(0, 8) == 0
    assert loop.gains(COUNT, 8)
    assert not loop.gains(COUNT, 1)


def test_a_loop_of_few_iterations_keeps_its_values(graph: af.Graph) -> None:
    start = af.ones((4,), dtype="float32")
    _, last = af.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, af.tanh(x)), (0, start))
    grad = af.gradients(af.sum(last), start)
    assert "3 iterations hold no more than segments of them would" in explained(grad)


# -- what is not run again -------------------------------------------------------------------------------------------


def explained(fetches: Any, feeds: Any = ()) -> str:
    return af.Session(saved_values="recompute").plan(fetches, list(feeds)).explain()


def slope_of(body: Callable[[af.Tensor], Any]) -> af.Tensor:
    """The gradient of a loop that applies `body` many times."""
    start = af.constant(np.linspace(0.1, 1, WIDTH))
    _, last = af.while_loop(lambda i, _: i < COUNT, lambda i, x: (i + 1, *body(x)), (0, start))
    found: af.Tensor = af.gradients(af.sum(last), start)
    return found


async def test_a_function_of_the_user_is_not_run_twice(graph: af.Graph) -> None:
    @af.op(outputs=af.spec("float64", (WIDTH,)), gradient=lambda inputs, outputs, grad: grad)
    def noisy(x: Any) -> Any:
        return x + 1

    grad = slope_of(lambda x: (af.sin(noisy(x)),))
    with pytest.raises(af.GraphError, match=r"(?s)would run while/body/noisy.*again.*it calls your function") as error:
        explained(grad)
    lines = str(error.value).splitlines()
    assert lines[1].startswith(f"  built at {__file__}")
    assert lines[2].startswith(f"  in the loop built at {__file__}")


async def test_what_waits_is_not_run_twice(graph: af.Graph) -> None:
    """The reason is the op's: a pool is no function of the user's."""

    def pooled(x: Any) -> Any:
        double = lambda s: s * 2.0  # noqa: E731
        grown = af.while_loop(
            lambda s: s < 8.0, double, af.stop_gradient(af.sum(x)) + 1.0, pool=af.Pool(2), name="pooled"
        )
        return (af.sin(x) * grown,)

    @af.op(outputs=af.spec("float64", (WIDTH,)), gradient=lambda inputs, outputs, grad: grad)
    async def asked(x: Any) -> Any:
        return x + 1

    queue = af.FIFOQueue(4, af.spec("float64", ()))
    reasons = {
        "would run while/body/pooled.*it is computed together with calls of other runs": pooled,
        "would run while_1/body/asked.*it awaits your function": lambda x: (af.sin(asked(x)),),
        "would run while_2/body/.*dequeue.*it waits for others": lambda x: (af.sin(x) * queue.dequeue(),),
    }
    for reason, body in reasons.items():
        with pytest.raises(af.GraphError, match=f"(?s){reason}"):
            explained(slope_of(body))


async def test_a_pure_function_of_the_user_is_run_again(graph: af.Graph, open_session: OpenSession) -> None:
    @af.op(outputs=af.spec("float64", (WIDTH,)), gradient=lambda inputs, outputs, grad: grad * 2, pure=True)
    def twice(x: Any) -> Any:
        return x * 2

    grad = slope_of(lambda x: (af.sin(twice(x)),))
    async with open_session(graph, saved_values="recompute") as session:
        assert "while/body/twice/again" in session.plan(grad, []).explain(memory=True)
        found = await session.run(grad)
    async with open_session(graph, saved_values="keep") as session:
        np.testing.assert_allclose(found, await session.run(grad), rtol=1e-12)


async def test_a_function_of_the_user_beside_the_repeated_part(graph: af.Graph, open_session: OpenSession) -> None:
    calls = []

    @af.op(outputs=af.spec("float64", (WIDTH,)))
    def watch(x: Any) -> Any:
        calls.append(x)
        return x

    start = af.constant(np.linspace(0.1, 1, WIDTH))
    body = lambda i, x, seen: (i + 1, af.sin(x), watch(x))  # noqa: E731
    _, last, seen = af.while_loop(lambda i, *_: i < N, body, (0, start, start))
    async with open_session(graph, saved_values="recompute") as session:
        await session.run([af.gradients(af.sum(last), start), seen])
    assert len(calls) == N


async def test_effects_happen_once(graph: af.Graph, open_session: OpenSession) -> None:
    """Effects beside the repeated part stay; in it they are refused."""
    total = af.Variable(np.float64(0))

    def body(x: af.Tensor) -> tuple[af.Tensor]:
        total.assign_add(af.sum(x))
        return (af.sin(x),)

    grad = slope_of(body)
    value = total.read()
    async with open_session(graph) as keeping:
        expected = await keeping.run([grad, value])
    async with open_session(graph, saved_values="recompute") as session:
        assert_same_bits(await session.run([grad, value]), expected)


async def test_a_variable_that_the_loop_writes(graph: af.Graph) -> None:
    scale = af.Variable(np.float64(0.5))

    def body(x: af.Tensor) -> tuple[af.Tensor]:
        x = af.sin(x * scale.read())
        scale.assign_add(0.1)
        return (x,)

    with pytest.raises(af.GraphError, match="it reads a variable that the loop writes"):
        explained(slope_of(body))


async def test_a_variable_written_between_the_loop_and_its_gradient(
    graph: af.Graph, open_session: OpenSession, length: int | None
) -> None:
    """A repeated iteration reads the value that the loop has read."""
    scale = af.Variable(np.float64(0.5))
    start = af.constant(np.linspace(0.1, 1, WIDTH))
    _, last = af.while_loop(lambda i, _: i < N, lambda i, x: (i + 1, af.sin(x * scale)), (0, start))
    loss = af.sum(last)
    with af.control_dependencies([loss]):
        written = scale.assign(7.0)
    with af.control_dependencies([written]):
        grads = af.gradients(loss * af.identity(af.constant(1.0, "float64")), [start])
    found = []
    for saved_values in ("keep", "recompute"):
        async with open_session(graph, saved_values=saved_values, loop_batching=False) as session:
            await session.run(scale.assign(0.5))
            found.append(await session.run([loss, *grads, written]))
    assert_same_bits(*found)


def test_an_array_that_iterations_pass_on_is_kept(graph: af.Graph) -> None:
    array = af.TensorArray("float64", COUNT + 1, element_shape=(WIDTH,), clear_after_read=False)
    start = af.constant(np.linspace(0.1, 1, WIDTH))

    def body(i: af.Tensor, x: af.Tensor, made: Any) -> tuple[Any, ...]:
        made = made.write(i, af.sin(x))
        return i + 1, af.exp(made.read(i // 2)), made

    _, last, _ = af.while_loop(lambda i, *_: i < COUNT, body, (0, start, array))
    told = explained(af.gradients(af.sum(last), start))
    assert "tensor_array_write changes or uses up an array or store" in told


def test_a_gradient_that_is_differentiated_keeps_its_values(graph: af.Graph) -> None:
    start = af.constant(np.linspace(0.1, 1, WIDTH))
    _, last = af.while_loop(lambda i, _: i < COUNT, lambda i, x: (i + 1, af.sin(x)), (0, start))
    slope = af.gradients(af.sum(last), start)
    told = explained(af.gradients(af.sum(slope), start))
    assert "is differentiated in turn" in told
    assert "runs again for its gradient" in told, "the gradient, for its own"


def test_of_nested_loops_the_outer_one_is_run_again(graph: af.Graph) -> None:
    fetches, n = built(nested)
    told = explained(fetches, [n])
    assert "a loop around it saves its values" in told
    assert told.count("runs again for its gradient, in segments of 1, 2, 3, ... iterations") == 1


def test_the_plan_tells_the_saved_values_and_times(graph: af.Graph) -> None:
    start = af.ones((4,), dtype="float32")
    _, last = af.while_loop(lambda i, _: i < COUNT, lambda i, x: (i + 1, af.tanh(x)), (0, start))
    plan = af.Session(saved_values="recompute").plan(af.gradients(af.sum(last), start), [])
    told = plan.explain(memory=True)
    assert "float32[4], at the start of each segment; " in told
    assert "loop gradients/while/while/segments/while" in told


# -- what the graph becomes ------------------------------------------------------------------------------------------


def test_the_forward_loop_keeps_its_name_and_saves_its_variables(graph: af.Graph) -> None:
    start = af.constant(np.linspace(0.1, 1, WIDTH))
    _, last = af.while_loop(lambda i, _: i < COUNT, lambda i, x: (i + 1, af.sin(x) * af.cos(x)), (0, start))
    private = extract(graph, [af.gradients(af.sum(last), start)], []).graph
    assert segments(private) == ["while: runs again for its gradient, in segments of 5 iterations"]
    af.verify(private)
    forward, around = (node for node in private.nodes if isinstance(node, WhileNode))
    saving = [result.node for result in forward.body.results if result.node.op is CHECKPOINT]
    assert [node.inputs[2] for node in saving] == [forward.body.inputs[1]]
    assert around.parallel_iterations == 1
    assert [node.name for node in around.body.nodes if isinstance(node, WhileNode)] == [
        "gradients/while/while/segments/while",
        "gradients/while/while",
    ]


@pytest.mark.parametrize("wrong", ["everything", None, 3])
def test_an_option_that_does_not_exist(wrong: Any) -> None:
    with pytest.raises(ValueError, match="saved_values is 'auto' or 'keep' or 'swap' or 'recompute'; got"):
        af.Session(saved_values=wrong)
