"""`vertex_map(share=True)`: sets of vertices of different runs are rows of one call, each run with its own results."""

from __future__ import annotations

import asyncio
import re
from linecache import getline
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.machine.cost import MeasuredCost
from asyncflow.graph.values import nest
from asyncflow.runtime.executor.turn import BURST_NS
from asyncflow.runtime.shared import vertex_pools
from asyncflow.runtime.shared.batches import Batches
from asyncflow.runtime.shared.bodies import Bodies
from tests.conftest import OpenSession
from tests.others import others_end
from tests.vertex.evaluation import H, child_sum, child_sum_alone, forest, slotted, slotted_alone

WIDTH = 2
WEIGHTS = np.linspace(-0.4, 0.4, H * H).reshape(H, H)

MANY_SETS = 4_000
"""The sets of a run that a test cancels long before its last one; larger graphs are put in order by themselves."""


class Program:
    """A vertex map, shared with other runs or not."""

    def __init__(
        self, function: af.VertexFunction, *, share: bool = True, heights: bool = True, **options: Any
    ) -> None:
        with af.Graph(seed=5) as self.graph:
            self.structure = af.InputGraph.placeholder(heights=heights)
            self.x = af.placeholder("float64", (None, WIDTH), name="x")
            found = af.vertex_map(function, self.structure, self.x, share=share, **options)
            roots = found.roots[0] if isinstance(found.roots, tuple) else found.roots
            self.fetches = [*found.pushes.values(), roots]

    def feeds(self, graph: af.InputGraph, x: Any) -> Any:
        return {**self.structure.feeds(graph), self.x: x}


def request(seed: int) -> tuple[af.InputGraph, Any]:
    """Trees, chains, graphs with shared children, single vertices, or nothing at all."""
    random = np.random.default_rng(seed)
    graph = forest(random, random.integers(1, 9, int(random.integers(0, 4))).tolist())
    return graph, random.normal(size=(graph.n_vertices, WIDTH))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["slotted", "slotted, in parts", "any number"])
async def test_structures_of_runs_share_calls(open_session: OpenSession, name: str, seed: int) -> None:
    """Arrivals and cancels at any pass: each result is that of the vertices one by one, and of the run by itself."""
    function, alone = (child_sum, child_sum_alone) if name == "any number" else (slotted, slotted_alone)
    program = Program(function, initial=0.0)
    random = Random(seed)
    async with open_session(program.graph) as session:

        async def one(number: int) -> None:
            graph, x = request(100 * seed + number)
            for _ in range(random.randrange(6)):
                await asyncio.sleep(0)
            asked = asyncio.ensure_future(session.run(program.fetches, program.feeds(graph, x)))
            if random.random() < 0.3:
                for _ in range(random.randrange(8)):
                    await asyncio.sleep(0)
                asked.cancel()
            try:
                found = await asked
            except asyncio.CancelledError:
                return
            pushed, roots = alone(graph, x)
            np.testing.assert_allclose(found[0], pushed, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(found[-1], roots, rtol=1e-9, atol=1e-12)

        await asyncio.gather(*map(one, range(14)))
        (counts,) = session.statistics().batches.values()
        assert counts.largest > 1
        await others_end()
        assert session.statistics().runs == 0


@pytest.mark.usefixtures("work")
async def test_any_sets_are_one_call(open_session: OpenSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that comes while another computes joins at the next set; the sets of a run do not wait for the sets of
    others.
    """
    monkeypatch.setattr(vertex_pools, "BURST_NS", 0)  # a run that is alone looks for others after each set
    begun, count_call = asyncio.Event(), Batches.count_call

    def counted(*args: Any, **options: Any) -> None:
        begun.set()
        count_call(*args, **options)

    program = Program(slotted)
    long, short = af.InputGraph.chain([MANY_SETS]), af.InputGraph.chain([3])
    async with open_session(program.graph) as session:
        # Kernels that were never measured go to threads, which begin when the machine lets them.
        await session.run(program.fetches, program.feeds(short, np.ones((3, WIDTH))))
        monkeypatch.setattr(Batches, "count_call", counted)
        slow = asyncio.ensure_future(session.run(program.fetches, program.feeds(long, np.ones((MANY_SETS, WIDTH)))))
        await begun.wait()
        for _ in range(3):
            found = await session.run(program.fetches, program.feeds(short, np.ones((3, WIDTH))))
            np.testing.assert_allclose(found[-1], slotted_alone(short, np.ones((3, WIDTH)))[1])
        (counts,) = session.statistics().batches.values()
        assert not slow.done()
        assert counts.largest == 2
        assert counts.members == counts.calls + 9  # no set of a short run needed a call of its own
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        await others_end()


async def test_vertex_maps_share_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of less than a turn is computed on the event loop; for each of two maps it is too long."""
    with af.Graph() as graph:
        structure, x = af.InputGraph.placeholder(), af.placeholder("float64", (None, WIDTH))
        maps = [af.vertex_map(slotted, structure, x, initial=0.0, share=True).roots for _ in range(2)]
    feeds = {**structure.feeds(af.InputGraph.chain([5])), x: np.ones((5, WIDTH))}
    runs, run = 0, Bodies.run_batch

    def counted(*args: Any) -> Any:
        nonlocal runs
        runs += 1
        return run(*args)

    async with af.Session(graph) as session:
        await asyncio.gather(*(session.run(each, feeds) for each in maps))  # and sets are measured
        monkeypatch.setattr(MeasuredCost, "predict_ns", lambda *_: BURST_NS * 0.7)
        monkeypatch.setattr(Bodies, "run_batch", counted)
        await session.run(maps[0], feeds)
        assert not runs  # nor to put the graph in order
        runs = 0
        await asyncio.gather(*(session.run(each, feeds) for each in maps))
        assert runs > 2  # the sets of one map at least, until the other is alone


@pytest.mark.filterwarnings("ignore:.* takes one row:UserWarning")
async def test_a_run_whose_vertex_fails(open_session: OpenSession) -> None:
    """Behaviour 88: it alone fails, by a function or a check, and its error names that, the sample and the vertex."""

    @af.op(outputs=af.spec("float64", (H,)), pure=True)
    def positive(h: Any) -> Any:
        if h.min() < 0:
            raise ValueError("not positive")
        return h

    @af.vertex_function(state=af.spec("float64", (H,)), children=2)
    def checked(v: Any) -> None:
        af.assert_that(af.sum(v.pull()) < 1e6, "too large")
        v.scatter(positive(af.sum(v.pull()) + v.gather(0) + v.gather(1)))

    program = Program(checked)
    graphs = [af.InputGraph.batch([af.InputGraph.chain([2]), af.InputGraph.chain([4])])] * 5
    xs = [np.ones((6, WIDTH)) for _ in graphs]
    xs[3][3], xs[1][0] = -1e7, 1e7
    async with open_session(program.graph) as session:
        found = await asyncio.gather(
            *(session.run(program.fetches, program.feeds(*each)) for each in zip(graphs, xs, strict=True)),
            return_exceptions=True,
        )
        for number, each in enumerate(found):
            if number == 1:
                assert isinstance(each, af.KernelError)
                assert (each.node, each.tag) == ("vertex_map/checked/assert", "vertex_map/checked (sample/vertex)/0/0")
                assert "too large" in str(each)
            elif number == 3:
                assert isinstance(each, af.KernelError)
                assert (each.node, each.tag) == (
                    "vertex_map/checked/positive",
                    "vertex_map/checked (sample/vertex)/1/1",
                )
                assert "not positive" in str(each)
                assert "v.scatter(positive(" in getline(each.location.file, each.location.line)
                assert "in vertex_map/checked/sets (shared_sets), built at " in each.__notes__[0]
            else:
                assert isinstance(each, list)
                np.testing.assert_allclose(each[0], [[4.0] * H, [8.0] * H])
        del found, each
        await others_end()
        (counts,) = session.statistics().batches.values()
        assert 1 <= counts.failed <= 8  # of five, of halves, and of the two


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("known", [True, False], ids=["heights", "no-heights"])
async def test_a_run_whose_graph_is_none(open_session: OpenSession, known: bool) -> None:
    """Behaviour 88: only that run fails, and its error names its own sample and vertex; the others share all sets."""
    program = Program(slotted, heights=known)
    chain = af.InputGraph.chain([3])
    heights = [chain.heights] * known
    right = [chain.offsets, chain.children, chain.samples, *heights, np.ones((3, WIDTH))]
    wrong = {
        1: ([0, 1, 2, 3], [1, 2, 0], [0, 3], "vertex 0 of sample 0 is " + ("of height 0" if known else "its own")),
        2: ([0, 0, 1, 3], [0, 1, 9], [0, 3], "vertex 2 of sample 0 has a child 9"),
        4: ([1, 1, 2, 3], [0, 1, 1], [0, 3], "offsets of an input graph go from 0"),
        5: ([0, 0, 1], [0], [0, 2], "pulls\\['x'\\] has a row for each vertex: the graph has 2 vertices"),
        6: ([0, 0, 0, 3], [0, 1, 1], [0, 3], "vertex 2 of sample 0 has 3 children; at most 2 are allowed"),
    }
    arrays = [*nest.flatten(program.structure)[0], program.x]
    asked = [[*map(np.array, wrong[each][:3]), *right[3:]] if each in wrong else right for each in range(8)]
    async with open_session(program.graph) as session:
        runs = (session.run(program.fetches, dict(zip(arrays, each, strict=True))) for each in asked)
        found = await asyncio.gather(*runs, return_exceptions=True)
        for number, each in enumerate(found):
            if number in wrong:
                assert isinstance(each, af.KernelError)
                assert each.node == "vertex_map/slotted/sets"
                assert re.search(wrong[number][3], str(each.__cause__))
            else:
                assert isinstance(each, list)
                np.testing.assert_allclose(each[-1], slotted_alone(chain, right[-1])[1])
        del found, each
        (counts,) = session.statistics().batches.values()
        assert counts.largest > 1
        assert (counts.members, counts.failed) == (9, 0)
        await others_end()
        assert session.statistics().runs == 0


async def test_a_deadline_between_sets(open_session: OpenSession) -> None:
    """Behaviour 85: the late run leaves; the others have their results."""
    program = Program(slotted)
    endless, short = af.InputGraph.chain([200_000]), af.InputGraph.chain([3])
    async with open_session(program.graph) as session:
        late = session.run(program.fetches, program.feeds(endless, np.ones((200_000, WIDTH))), timeout=0.2)
        other = session.run(program.fetches, program.feeds(short, np.ones((3, WIDTH))))
        found = await asyncio.gather(late, other, return_exceptions=True)
        assert isinstance(found[0], af.DeadlineExceeded)
        assert isinstance(found[1], list)
        del found
        await others_end()
        assert session.statistics().runs == 0


async def test_random_numbers_equal_the_runs_own() -> None:
    """A vertex draws the same numbers whichever runs share a call, before its children are done or behind."""

    @af.vertex_function(state=af.spec("float64", (H,)), children=2)
    def noisy(v: Any) -> None:
        kept = af.random.uniform((H,), dtype="float64") < 0.5
        first = v.gather(0)
        first = af.cond(af.sum(first) > 0, lambda: first + af.random.normal((H,)), lambda: first)
        v.scatter(af.tanh(af.where(kept, af.sum(v.pull()), 0.0) + first @ WEIGHTS + v.gather(1)))
        v.push(af.random.normal(seed=3), "noise")

    found: list[list[Any]] = []
    for program, at_once in ((Program(noisy), 12), (Program(noisy), 1), (Program(noisy, share=False), 1)):
        async with af.Session(program.graph) as session:
            found.append([])
            for first in range(0, 12, at_once):
                numbers = range(first, first + at_once)
                asked = (session.run(program.fetches, program.feeds(*request(number))) for number in numbers)
                found[-1] += await asyncio.gather(*asked)
    for together, alone, unshared in zip(*found, strict=True):
        np.testing.assert_allclose(together[0], alone[0], rtol=1e-9)
        np.testing.assert_allclose(together[0], unshared[0], rtol=1e-9)
        np.testing.assert_allclose(together[1], unshared[1], rtol=1e-9)


async def test_variables_are_read_by_each_run() -> None:
    """Runs that see other values of a variable share no call."""
    with af.Graph() as graph:
        w = af.Variable(np.eye(H), name="w")

        @af.vertex_function(state=af.spec("float64", (H,)), children=1)
        def cell(v: Any) -> None:
            v.scatter(v.pull() @ w + v.gather(0))

        structure, x = af.InputGraph.placeholder(), af.placeholder("float64", (None, H))
        roots = af.vertex_map(cell, structure, x, share=True).roots
        double = w.assign(w * 2)
    chain = af.InputGraph.chain([3])
    async with af.Session(graph) as session:
        feeds = {**structure.feeds(chain), x: np.ones((3, H))}
        assert (await session.run(roots, feeds)).tolist() == [[3.0] * H]
        await session.run(double)
        found = await asyncio.gather(*(session.run(roots, feeds) for _ in range(3)))
        assert [each.tolist() for each in found] == [[[6.0] * H]] * 3


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("reduce", ["sum", "max"])
async def test_random_numbers_of_children_equal_the_runs_own(reduce: str, seed: int) -> None:
    """Each child draws by the key of its vertex and its place, in branches that it takes and in loops that it stays in.

    The vertex itself draws, too, and a variable and a value of the vertex are read for each child.
    """
    gate = af.Variable(np.full(H, 0.5), name="gate")

    def noise(h: Any, x: Any) -> Any:
        h = h * (af.random.uniform((H,), dtype="float64") < gate) + af.random.normal((H,), dtype="float64") * x
        h = af.cond(h[0] > 0, lambda: h + af.random.normal((H,), dtype="float64"), lambda: h * 0.5)
        again = lambda i, y: (i + 1, y + af.random.uniform((H,), dtype="float64"))  # noqa: E731
        return af.while_loop(lambda i, y: (i < 3) & (y[1] < 1.0), again, (0, h))[1]

    @af.vertex_function(state=af.spec("float64", (H,)))
    def noisy(v: Any) -> None:
        x = v.pull()
        h = v.gather_all(lambda h: noise(h, x[0]), reduce=reduce)
        v.push(h)
        v.scatter(af.tanh(h + x[1]) + af.random.uniform((H,), dtype="float64"))

    alone, shared = Program(noisy, share=False, initial=0.0), Program(noisy, initial=0.0)
    given = [request(30 + 7 * seed + number) for number in range(5)]
    async with af.Session(alone.graph) as session:
        expected = [await session.run(alone.fetches, alone.feeds(*each)) for each in given]
    async with af.Session(shared.graph) as session:
        found = await asyncio.gather(*(session.run(shared.fetches, shared.feeds(*each)) for each in given))
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.tobytes() == b.tobytes()


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(af.GraphError, match="one function, and streams=1"):
        Program(slotted, streams=2)
    program = Program(slotted)
    with (
        program.graph,
        pytest.raises(af.GraphError, match=r"(?s)shared with other runs, through which no gradient.*share=True"),
    ):
        af.gradients(af.sum(program.fetches[-1]), [program.x])


@pytest.mark.parametrize("is_read_inside", [True, False])
def test_nothing_that_is_shared_has_a_gradient(is_read_inside: bool) -> None:
    """A variable that is read in shared work has no gradient either: it was once taken for an unused one."""
    with af.Graph():
        w = af.Variable(np.ones(H), name="w")
        weights: Any = w if is_read_inside else w.read()

        @af.vertex_function(state=af.spec("float64", (H,)))
        def scaled(v: Any) -> None:
            v.scatter(v.gather_all() * weights + 1.0)

        tree, _ = af.InputGraph.from_nested((("a", "b"), "c"))
        shared = [
            af.vertex_map(scaled, tree, {}, share=True).roots,
            af.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, h * weights), (0, af.ones(H)), pool=af.Pool())[1],
            af.batched(lambda i: weights * i)(2.0),
            af.batched(lambda i: weights[i])(0),
        ]
        for y in shared:
            with pytest.raises(af.GraphError, match="through which no gradient goes"):
                af.gradients(af.sum(y), w)
