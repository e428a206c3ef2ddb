"""`join_regions`: which regions of a card are better one, and which must stay apart. Behaviour 99."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.program.extract import extract
from asyncflow.compiler.program.host_values import find_host_values
from asyncflow.compiler.program.order_effects import order_effects
from asyncflow.compiler.regions.join_regions import RegionCosts
from asyncflow.compiler.regions.regions import make_regions
from asyncflow.devices.figures.host import Call
from asyncflow.testing import virtual_clock
from tests.fake_cupy.stand_in import stand_in

CARDS = ("sim:0", "sim:1")
CALL_NS = 10.0
HEAVY_NS = 100.0


def _heavy(node: af.Node) -> float:
    return HEAVY_NS if "heavy" in node.name else 1.0


def _regions(
    graph: af.Graph, fetches: Sequence[Any], devices: Mapping[str, str], kernel_ns: Callable[[af.Node], float] = _heavy
) -> list[str]:
    """The regions of both cards, each as the scopes of its nodes; `devices` of nodes by the start of their names."""
    feeds = [node.outputs[0] for node in graph.nodes if node.op.name == "placeholder"]
    made = extract(graph, fetches, feeds).graph
    order_effects(made)
    for node in made.walk():
        scope = node.name.removeprefix("while/body/")
        node.device = next((device for start, device in devices.items() if scope.startswith(start)), CARDS[0])
    costs = RegionCosts(dict.fromkeys(CARDS, CALL_NS), kernel_ns)
    make_regions(made, {}, (), CARDS, find_host_values(made), costs)
    af.verify(made)
    found = []
    for node in made.walk():
        if node.op.name == "region":
            scopes = [inner.name.removeprefix("while/body/").split("/")[0] for inner in node.attrs["region"].nodes]
            found.append(" ".join(dict.fromkeys(scopes)))
    return sorted(found)


def _step(x: Any, name: str) -> af.Tensor:
    """Two nodes of one scope."""
    with af.name_scope(name):
        return af.tanh(x * np.float32(2))


@pytest.fixture
def x() -> af.Tensor:
    with af.Graph():
        return af.placeholder("float32", (4,), name="x")


def test_what_only_feeds_another_region_is_part_of_it(x: af.Tensor) -> None:
    """Only the reader of the value from the other card needs the results that were computed meanwhile."""
    with x.graph:
        far = _step(x, "far")
        end = _step(_step(x, "near") + far, "end")
        assert _regions(x.graph, [end], {"far": CARDS[1]}) == ["far", "near add end"]


def test_kernels_that_take_longer_than_a_call_run_while_a_value_comes(x: af.Tensor) -> None:
    with x.graph:
        far = _step(x, "far")
        end = _step(_step(x, "heavy") + far, "end")
        assert _regions(x.graph, [end], {"far": CARDS[1]}) == ["add end", "far", "heavy"]


def test_what_another_card_wants_waits_for_nothing_that_comes_later(x: af.Tensor) -> None:
    """`sent` goes to the other card at once, though `end` could be of its region but for a value of that card."""
    with x.graph:
        far = _step(x, "far")
        sent = _step(x, "sent")
        ends = [_step(sent, "away"), _step(sent + far, "end")]
        found = _regions(x.graph, ends, {"far": CARDS[1], "away": CARDS[1]})
        assert "sent" in found and "add end" in found


def test_there_and_back_stays_apart(x: af.Tensor) -> None:
    """Between two regions that a value leaves and comes back to, the other card runs."""
    with x.graph:
        there = _step(x, "there")
        back = _step(_step(there, "far"), "back")
        assert _regions(x.graph, [back], {"far": CARDS[1]}) == ["back", "far", "there"]


def test_unsent_nodes_follow_sent_ones_unless_that_takes_long(x: af.Tensor) -> None:
    with x.graph:
        sent = _step(x, "sent")
        ends = [_step(sent, "away"), _step(sent, "kept")]
        assert _regions(x.graph, ends, {"away": CARDS[1]}) == ["away", "sent kept"]
        ends = [_step(sent, "away_too"), _step(sent, "heavy")]
        assert _regions(x.graph, ends, {"away": CARDS[1]}) == ["away_too", "heavy", "sent"]


@pytest.mark.parametrize(("comes_back", "expected"), [(False, "sent"), (True, "heavy")])
def test_in_a_loop_a_delay_counts_each_time_only_on_a_cycle(x: af.Tensor, comes_back: bool, expected: str) -> None:
    """A value that is sent on is late once, as a pipeline fills; a value that comes back for the next iteration is late
    every time.
    """
    with x.graph:

        def body(i: Any, here: Any, there: Any, kept: Any) -> Any:
            sent = _step(here, "sent")
            away = _step(sent + there, "away")
            return i + 1, away if comes_back else here * np.float32(0.5), away, _step(sent, "heavy") + kept

        out = af.while_loop(lambda i, *_: i < 5, body, (np.int32(0), x, x, x))
        found = _regions(x.graph, out[2:], {"away": CARDS[1], "add": CARDS[0]}, lambda node: _heavy(node) / 4)
        assert next(region for region in found if "heavy" in region).startswith(expected), found


def test_a_counter_runs_ahead(x: af.Tensor) -> None:
    """The other card begins an iteration when the predicate comes, whatever the first one waits for."""
    with x.graph:

        def body(i: Any, y: Any) -> Any:
            return i + 1, _step(_step(y, "far"), "near")

        out = af.while_loop(lambda i, _: i < 5, body, (np.int32(0), x))
        assert _regions(x.graph, [out[1]], {"far": CARDS[1]}) == ["far", "near"]


# -- a training step over cards --------------------------------------------------------------------------------------


def _training(kind: str) -> tuple[af.Graph, Any, af.Tensor]:
    """The gradients of a recurrent net of three layers, one on each of as many cards; how many steps is fed."""
    with af.Graph() as graph:
        steps = af.placeholder("int32", ())
        names = [f"{kind}:{index}" for index in range(3)]
        weights = []
        for index, name in enumerate(names):
            with af.device(name):
                weights.append([af.constant(np.eye(4, dtype=np.float32) * (index + 1) / 4) for _ in range(2)])

        def body(i: Any, *states: Any) -> Any:
            after: list[af.Tensor] = []
            x = states[0]
            for (w_x, w_h), name, state in zip(weights, names, states, strict=True):
                with af.device(name):
                    z = af.identity(x) @ w_x + state @ w_h
                    x = af.tanh(z) * af.sigmoid(z)
                after.append(x)
            return i + 1, *after

        start = (np.int32(0), *[np.full((4, 4), 0.5, np.float32)] * 3)
        out = af.while_loop(lambda i, *_: i < steps, body, start)
        slopes = af.gradients(af.sum(out[-1]), [w for pair in weights for w in pair])
    return graph, slopes, steps


def _calls(graph: af.Graph, slopes: Any, steps: af.Tensor, count: int) -> tuple[Counter[Call], list[Any]]:
    """Return the host's calls in a run of `count` time steps, and the results."""

    async def main() -> tuple[Counter[Call], list[Any]]:
        async with af.Session(graph) as session:
            await session.run(slopes, {steps: 1})
            (thread,) = clock.machine.threads.values()
            before = thread.calls.copy()
            found = await session.run(slopes, {steps: count})
            return thread.calls - before, found

    with virtual_clock("3 x v100, nvlink2") as clock:
        return clock.run(main())


def test_a_time_step_calls_one_region_forward_and_one_backward_on_each_card() -> None:
    """Behaviour 99."""
    graph, slopes, steps = _training("sim")
    (few, _), (many, found) = (_calls(graph, slopes, steps, count) for count in (3, 7))
    assert many["region"] - few["region"] == 4 * 6

    async def interpreted() -> list[Any]:
        async with af.Session(graph, regions=False, devices=["sim:0", "sim:1", "sim:2"]) as session:
            values: list[Any] = await session.run(slopes, {steps: 7})
            return values

    with virtual_clock("3 x v100, nvlink2") as clock:
        for ours, theirs in zip(found, clock.run(interpreted()), strict=True):
            np.testing.assert_array_equal(ours, theirs)


async def test_cuda_devices_get_the_regions_of_simulated_ones() -> None:
    """Behaviour 99."""
    graph, slopes, steps = _training("cuda")
    with stand_in(devices=3):
        async with af.Session(graph, ["cuda:0", "cuda:1", "cuda:2"]) as session:
            plan = session.plan(slopes, [steps])
    found = Counter(node.device for node in plan.graph.nodes if node.op.name == "region" and "/body/" in node.name)
    assert found == {"cuda:0": 2, "cuda:1": 2, "cuda:2": 2}
