"""`delay_recvs`: transfers begin when their values will soon be needed (white paper 2015 §5.2)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler import pipeline
from asyncflow.compiler.lowering import delay_recvs as module
from asyncflow.compiler.lowering.delay_recvs import delay_recvs
from asyncflow.compiler.lowering.lower import lower
from asyncflow.compiler.placement.node_costs import NodeCosts
from asyncflow.compiler.program.loops.frames import assign_frames
from asyncflow.testing import virtual_clock
from tests.compiler.cut import put_by_hand
from tests.compiler.placing import FakeDevice, work
from tests.property.graphs import build
from tests.property.programs import interpret
from tests.property.strategies import write_program
from tests.property.test_random_programs import assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asyncflow.devices.protocol import Device
    from asyncflow.graph.graph import Graph
    from asyncflow.graph.ir import Node

MEGABYTE = (512, 512)
"""The shape of a float32 value that takes 1.05 ms to another device, plus 0.05 ms."""


@dataclass(eq=False)
class CostDevice(FakeDevice):
    """A device as this pass sees it: ``cpu`` computes on the host, all others are asynchronous."""

    ns_per_byte: float = 1.0


def devices(*names: str) -> list[Device]:
    return [cast("Device", CostDevice(name)) for name in names]


def delays(
    graph: af.Graph, fetches: Sequence[Any], *, names: Sequence[str] = ("cpu:0", "sim:0", "sim:1"), **options: Any
) -> dict[str, str]:
    """Return the names of the nodes that delayed Recvs wait for, by the names of the Recvs."""
    return {recv.name: recv.control_inputs[-1].name for recv in delayed(graph, fetches, names=names, **options)[1]}


def delayed(
    graph: af.Graph,
    fetches: Sequence[Any],
    *,
    names: Sequence[str] = ("cpu:0", "sim:0", "sim:1"),
    costs: Mapping[str, float] | None = None,
    truncate: bool = False,
) -> tuple[Graph, list[Node]]:
    """The lowered graph, and its delayed Recvs."""
    lowered = lower(put_by_hand(graph, fetches), truncate=truncate)
    found = delay_recvs(lowered.graph, lowered.places, devices(*names), costs)
    af.verify(lowered.graph)
    return lowered.graph, found


def chain(start: af.Tensor, length: int, *, ms: float = 1.0, name: str = "step") -> af.Tensor:
    """Works one after the other, ``step``, ``step_1`` and so on."""
    for _ in range(length):
        start = work(start, ms=ms, name=name)
    return start


@pytest.fixture
def x(graph: af.Graph) -> af.Tensor:
    return af.placeholder("float32", (4,), name="x")


def on(device: str, *inputs: af.Tensor, **options: Any) -> af.Tensor:
    with af.device(device):
        return work(*inputs, **options)


# -- which node ------------------------------------------------------------------------------------------------------


def test_a_value_needed_late_is_fetched_late(graph: af.Graph, x: af.Tensor) -> None:
    """The transfer takes 1.1 ms, and from the end of ``step_3`` on 2 ms are left.

    It waits for ``step_2``, because ``step_3`` is launched before a Recv that waits for the same node.
    """
    value = on("sim:0", x, shape=MEGABYTE, name="value")
    with af.device("sim:1"):
        late = work(chain(x, 6), value, name="late")
    assert delays(graph, [late.node]) == {"value/recv": "step_2"}


@pytest.mark.parametrize(
    ("edge", "waits_for"),
    [(160, "step_3"), (512, "step_2"), (660, "step_2"), (768, "step_1"), (2048, None)],
)
def test_the_larger_the_value_the_earlier(graph: af.Graph, x: af.Tensor, edge: int, waits_for: str | None) -> None:
    """A Recv is not delayed if it takes longer than half of the work before the use of its value."""
    value = on("sim:0", x, shape=(edge, edge), name="value", ms=0.0)
    with af.device("sim:1"):
        late = work(chain(x, 6), value, name="late")
    assert delays(graph, [late.node]) == ({} if waits_for is None else {"value/recv": waits_for})


def test_measured_times_count(graph: af.Graph, x: af.Tensor) -> None:
    value = on("sim:0", x, shape=MEGABYTE, name="value", ms=0.0)
    with af.device("sim:1"):
        late = work(chain(x, 6), value, name="late")
    assert delays(graph, [late.node], costs={"step_5": 9e6}) == {"value/recv": "step_3"}


def test_all_users_have_to_come_late_enough(graph: af.Graph, x: af.Tensor) -> None:
    """The users come after ``step_9`` and ``step_5``; both after ``step_2`` and late enough."""
    value = on("sim:0", x, shape=MEGABYTE, name="value", ms=0.0)
    with af.device("sim:1"):
        early = chain(x, 6)
        last = work(chain(early, 4), value, name="last")
        other = work(early, value, name="other")
    assert delays(graph, [last.node, other.node]) == {"value/recv": "step_2"}


def test_an_early_user_has_it_fetched_at_once(graph: af.Graph, x: af.Tensor) -> None:
    """``early`` comes after nothing; that it is one of two users does not matter, nor that ``late`` is another."""
    value = on("sim:0", x, shape=MEGABYTE, name="value", ms=0.0)
    with af.device("sim:1"):
        late = work(chain(x, 6), value, name="late")
        early = work(value, name="early")
    assert delays(graph, [late.node, early.node]) == {}


def test_what_waits_for_the_news_is_a_user(graph: af.Graph, x: af.Tensor) -> None:
    value = on("sim:0", x, shape=MEGABYTE, name="value", ms=0.0)
    with af.device("sim:1"):
        late = work(chain(x, 6), value, name="late")
        with af.control_dependencies([value]):
            early = work(x, name="early")
    assert delays(graph, [late.node, early.node]) == {}


def test_a_value_made_late_is_fetched_at_once(graph: af.Graph, x: af.Tensor) -> None:
    """The Recv would have to wait for hardly longer than the transfer takes."""
    value = on("sim:0", x, shape=MEGABYTE, name="value", ms=4.5)
    with af.device("sim:1"):
        late = work(chain(x, 6), value, name="late")
    assert delays(graph, [late.node]) == {}


def test_work_elsewhere_is_not_waited_for(graph: af.Graph, x: af.Tensor) -> None:
    """Only work on the user's device counts."""
    value = on("sim:0", x, shape=MEGABYTE, name="value", ms=0.0)
    with af.device("sim:1"):
        first = work(x, name="first")
        second = work(first, name="second")
    with af.device("sim:2"):
        elsewhere = chain(second, 6)
    with af.device("sim:1"):
        late = work(elsewhere, value, name="late")
    names = ("cpu:0", "sim:0", "sim:1", "sim:2")
    assert delays(graph, [late.node], names=names) == {"value/recv": "second"}


def test_independent_work_is_not_waited_for(graph: af.Graph, x: af.Tensor) -> None:
    """However the device orders it, it must not hold up the user."""
    value = on("sim:0", x, shape=MEGABYTE, name="value", ms=0.0)
    with af.device("sim:1"):
        beside = chain(x, 6, name="beside")
        late = work(chain(x, 6), value, name="late")
    assert delays(graph, [beside.node, late.node]) == {"value/recv": "step_2"}


# -- which values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("extent", "is_large"), [(16_383, False), (16_384, True)])
def test_small_values_are_fetched_at_once(graph: af.Graph, x: af.Tensor, extent: int, is_large: bool) -> None:
    value = on("sim:0", x, shape=(extent,), name="value", ms=0.0)
    with af.device("sim:1"):
        late = work(chain(x, 6), value, name="late")
    assert bool(delays(graph, [late.node])) is is_large


@pytest.mark.parametrize(("shape", "is_large"), [((None, None), True), ((None,), False), (None, True)])
def test_extents_that_are_not_known_count_as_256(graph: af.Graph, x: af.Tensor, shape: Any, is_large: bool) -> None:
    fed = af.placeholder("float32", shape)
    with af.device("sim:0"):
        value = af.negative(fed)
    with af.device("sim:1"):
        late = work(chain(x, 6), value, name="late")
    assert bool(delays(graph, [late.node])) is is_large


@pytest.mark.parametrize(
    ("source", "target", "is_copied"),
    [("sim:0", "sim:1", True), ("cpu:0", "sim:1", True), ("sim:0", "cpu:0", True), ("cpu:0", "cpu:1", False)],
)
def test_only_copied_values_are_delayed(
    graph: af.Graph, x: af.Tensor, source: str, target: str, is_copied: bool
) -> None:
    value = on(source, x, shape=MEGABYTE, name="value", ms=0.0)
    with af.device(target):
        late = work(chain(x, 6), value, name="late")
    names = ("cpu:0", "cpu:1", "sim:0", "sim:1")
    found = delays(graph, [late.node], names=names)
    assert found == ({"value/recv": "step_2"} if is_copied else {})


def test_a_tensor_array_is_not_delayed(graph: af.Graph, x: af.Tensor) -> None:
    with af.device("sim:0"):
        array = af.TensorArray("float32", size=1, element_shape=MEGABYTE).write(0, work(x, shape=MEGABYTE))
    with af.device("sim:1"):
        last = chain(x, 6)
        with af.control_dependencies([last]):
            late = array.read(0)
    flat, found = delayed(graph, [late.node])
    assert {node.attrs["spec"].dtype.kind for node in flat.nodes if node.op.name == "recv"} == {"O"}
    assert found == []


def test_the_short_form_is_delayed_with_what_expands_it(graph: af.Graph, x: af.Tensor) -> None:
    value = on("sim:0", x, shape=(704, 704), name="value", ms=0.0)
    with af.device("sim:1"):
        late = work(chain(x, 6), value, name="late")
    assert delays(graph, [late.node], truncate=True) == {"value/recv": "step_2"}


# -- branches and loops ----------------------------------------------------------------------------------------------


def test_in_a_loop_it_waits_for_a_node_of_the_same_iteration(graph: af.Graph, x: af.Tensor) -> None:
    """And for the gate of its body, as before; the chain before the loop is of no use."""

    def body(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        value = on("sim:0", i, shape=MEGABYTE, name="value", ms=0.0)
        with af.device("sim:1"):
            return i + 1, work(chain(s, 6), value, name="late")

    with af.device("sim:1"):
        start = chain(x, 6, name="before")
    result = af.while_loop(lambda i, _: i < 3, body, (0, start), name="loop")[1]
    flat, (recv,) = delayed(graph, [result])
    gate, after = recv.control_inputs
    assert gate.name.startswith("loop/switch")
    assert after.name == "loop/body/step_2"
    frames = assign_frames(flat)
    assert frames[after] == frames[recv] == ("loop",)


def test_a_capture_is_fetched_at_once(graph: af.Graph, x: af.Tensor) -> None:
    """The constant Enter of a capture comes after nothing: work before the loop's first iteration need not come before
    it.
    """
    value = on("sim:0", x, shape=MEGABYTE, name="value", ms=0.0)
    with af.device("sim:1"):
        start = chain(x, 6)

    def body(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        with af.device("sim:1"):
            return i + 1, chain(s + af.sum(value), 3, name="inside")

    result = af.while_loop(lambda i, _: i < 3, body, (0, start), name="loop")[1]
    flat, found = delayed(graph, [result])
    assert found == []
    assert flat.node("value/recv").control_inputs == []


def test_a_loop_on_the_way_is_passed_through(graph: af.Graph, x: af.Tensor) -> None:
    """Work after the loop comes after the work before it, and may wait for the loop's Exit."""
    value = on("sim:0", x, shape=MEGABYTE, name="value", ms=0.0)

    def body(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        with af.device("sim:1"):
            return i + 1, chain(s, 3, name="inside")

    with af.device("sim:1"):
        start = chain(x, 2)
    result = af.while_loop(lambda i, _: i < 3, body, (0, start), name="loop")[1]
    with af.device("sim:1"):
        late = work(chain(result, 3, name="after"), value, name="late")
    assert delays(graph, [late.node]) == {"value/recv": "loop/exit"}


def test_in_a_branch_it_waits_for_a_node_of_the_same_branch(graph: af.Graph, x: af.Tensor) -> None:
    """Nodes outside are live though the branch is not taken; waiting for the branch is the gate's part."""
    pred = af.placeholder("bool", ())
    with af.device("sim:1"):
        before = chain(x, 6, name="before")

    def taken(length: int) -> af.Tensor:
        value = on("sim:0", x, shape=MEGABYTE, name="value", ms=0.0)
        with af.device("sim:1"):
            return work(chain(before, length), value, name="late")

    picked = af.cond(pred, lambda: taken(6), lambda: taken(0), name="pick")
    flat, (recv,) = delayed(graph, [picked])
    gate, after = recv.control_inputs
    assert recv.name == "pick/true/value/recv"
    assert gate.name.startswith("pick/switch")
    assert after.name == "pick/true/step_2"
    assert len(flat.node("pick/false/value/recv").control_inputs) == 1


def test_it_is_looked_for_near_by_only(graph: af.Graph, x: af.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the way: a large graph compiles in linear time."""
    value = on("sim:0", x, shape=MEGABYTE, name="value", ms=0.0)
    with af.device("sim:1"):
        late = work(chain(x, 6), value, name="late")
    monkeypatch.setattr(module, "_MOST_VISITED", 3)
    assert delays(graph, [late.node]) == {}


# -- simulated -------------------------------------------------------------------------------------------------------

STEPS = 6


def data_dependent_steps(n: int) -> tuple[af.Graph, af.Tensor, af.Tensor]:
    """Steps on one device, each of which looks at its data; a value from another device goes into each, at its end."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (n, n))
        with af.device("sim:0"):
            values = [x * float(step + 1) for step in range(STEPS)]
        with af.device("sim:1"):
            h = x
            for value in values:
                h = step(h) + value
    return graph, x, h


def plain_steps(n: int) -> tuple[af.Graph, af.Tensor, af.Tensor]:
    """The same in one straight line, all of which the host launches before the first step is done."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (n, n))
        with af.device("sim:0"):
            values = [x * float(step + 1) for step in range(2 * STEPS)]
        with af.device("sim:1"):
            h = x
            for value in values:
                h = af.matmul(af.matmul(h, h), h) * np.float32(1e-6) + value
    return graph, x, h


def step(h: af.Tensor) -> af.Tensor:
    return af.cond(af.sum(h) > 0, lambda: af.matmul(af.matmul(h, h), h) * np.float32(1e-6), lambda: h)


def simulate(
    n: int,
    build: Callable[[int], tuple[af.Graph, af.Tensor, af.Tensor]] = data_dependent_steps,
    host: str = "c++",
    **options: Any,
) -> tuple[Any, int, int]:
    """The result, the virtual time, and the most bytes that the receiving device held."""
    graph, x, result = build(n)

    async def main() -> tuple[Any, int]:
        async with af.Session(graph, devices=["sim:0", "sim:1"], debug=True, **options) as session:
            value = await session.run(result, {x: np.full((n, n), 0.5, np.float32)})
            return value, session.devices[1].memory.statistics().peak

    with virtual_clock("2 x v100, nvlink2", host=host) as clock:
        value, peak = clock.run(main())
    assert clock.machine.hazards == []
    return value, clock.now_ns, peak


def test_control_flow_written_by_hand_is_left_alone() -> None:
    graph, x, result = plain_steps(512)
    with graph:
        _, live = af.raw.switch(result, True)

    def waiting(fetch: af.Tensor) -> int:
        plan = af.Session(devices=["sim:0", "sim:1"]).plan(fetch, [x])
        return sum(node.op.name == "recv" and bool(node.control_inputs) for node in plan.graph.nodes)

    with virtual_clock("2 x v100, nvlink2"):
        assert waiting(result) > 0
        assert waiting(live) == 0


@pytest.mark.parametrize("options", [{}, {"regions": False}, {"transfer_dtype": "bfloat16"}])
def test_less_memory_and_no_more_time(options: dict[str, Any]) -> None:
    """Without the pass all values are there from the start; with it, about one at a time."""
    n = 512
    value, time_ns, peak = simulate(n, **options)
    same, time_without_ns, peak_without = simulate(n, **options, without=["delay_recvs"])
    assert value.tobytes() == same.tobytes()
    assert time_ns <= time_without_ns
    assert peak <= peak_without - (STEPS - 2) * (2 if "transfer_dtype" in options else 4) * n * n


@pytest.mark.parametrize("host", ["c++", "asyncflow"])
def test_memory_is_taken_when_the_copy_is_due(host: str) -> None:
    """A value's memory is used again by later values, however far ahead the host launches."""
    n = 512
    nbytes = 4 * n * n
    value, time_ns, peak = simulate(n, plain_steps, host)
    same, time_without_ns, peak_without = simulate(n, plain_steps, host, without=["delay_recvs"])
    assert value.tobytes() == same.tobytes()
    # A delayed copy may cost this runtime's host an event that a copy to an idle stream does not need.
    assert time_ns <= 1.005 * time_without_ns
    # Not the values, however many: those in use, the next ones on their way, and the operands of a step.
    assert peak <= 8 * nbytes
    assert peak_without >= 2 * STEPS * nbytes


# -- random programs -------------------------------------------------------------------------------------------------


class _QuickTransfers(NodeCosts):
    """Every node takes a while and no transfer does, so that nearly every Recv has something to wait for."""

    def times(self, node: Node) -> tuple[float, ...]:
        return (1000.0,) * len(self.devices)

    def transfer(self, nbytes: float, source: int, target: int) -> float:
        return 1.0


@pytest.mark.slow
def test_random_programs_give_the_same_and_never_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value counts as large, and every Recv is delayed that can be, in branches and loops and around them."""
    found: Counter[str] = Counter()

    def delay(flat: Graph, *arguments: Any) -> None:
        frames = assign_frames(flat)
        for recv in delay_recvs(flat, *arguments):
            found[f"{len(frames[recv])} loops, {'gated' if len(recv.control_inputs) > 1 else 'free'}"] += 1

    monkeypatch.setattr(module, "SMALL_NBYTES", 0)
    monkeypatch.setattr(module, "NodeCosts", _QuickTransfers)
    monkeypatch.setattr(pipeline, "delay_recvs", delay)
    for seed in range(150):
        check_program(seed)
    assert found.keys() >= {"0 loops, free", "0 loops, gated", "1 loops, gated", "2 loops, gated"}, found


def check_program(seed: int) -> None:
    """Runs a random program, its nodes at random on two or three simulated devices, and compares with NumPy."""
    random = Random(seed)
    program = write_program(random.randrange)
    graph, fetches, feeds = build(program, random.choice([1, 2, 32]))
    options: dict[str, Any] = {
        "devices": [f"sim:{index}" for index in range(random.choice([2, 3]))],
        "placement_seed": seed,
        "seed": random.choice([None, seed]),
        "regions": random.choice([True, False]),
    }

    async def main() -> list[Any]:
        async with af.Session(graph, debug=True, **options) as session:
            return [await session.run(fetches, feeds) for _ in range(2)]

    with virtual_clock("3 x v100, nvlink2", seed=seed, jitter=0.3) as clock:
        runs = clock.run(main())
    assert clock.machine.hazards == []
    state = dict(program.variables)
    for actual in runs:
        for name, value in interpret(program, state).items():
            assert_same_bits(f"program {seed}, {name}", actual[name], value)
