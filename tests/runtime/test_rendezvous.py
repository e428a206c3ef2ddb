"""`Rendezvous`: Sends and Recvs meet by transfer and tag, whoever comes first."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

import asyncflow as af
from asyncflow.runtime.scheduler.rendezvous import Rendezvous, RendezvousStatistics

if TYPE_CHECKING:
    from asyncflow.compiler.plan import PlanNode
    from asyncflow.runtime.scheduler.frame import Iteration

NOTHING = RendezvousStatistics(sent=0, waiting=0, unacknowledged=0)


@dataclass(frozen=True)
class Tag:
    """An iteration, as the rendezvous sees it."""

    numbers: tuple[int, ...] = ()

    def counters(self) -> tuple[int, ...]:
        return self.numbers

    def tag(self) -> str:
        return "/".join(f"loop/{number}" for number in self.numbers)


def at(*numbers: int) -> Iteration:
    return cast("Iteration", Tag(numbers))


def node(name: str, number: int = 1, peer: str = "cpu:9") -> PlanNode:
    return cast("PlanNode", SimpleNamespace(name=name, number=number, peer=peer))


@dataclass
class Party:
    """An executor that writes down its deliveries."""

    heard: list[Any] = field(default_factory=list)

    def arrived(self, node: PlanNode, iteration: Iteration, value: Any, sent_ns: int) -> None:
        self.heard.append((node.name, iteration.counters(), value, sent_ns))

    def acknowledged(self, node: PlanNode, iteration: Iteration) -> None:
        self.heard.append((node.name, iteration.counters()))


@pytest.fixture
def rendezvous() -> Rendezvous:
    return Rendezvous()


@pytest.fixture
def party() -> Party:
    return Party()


def test_a_value_waits_for_its_recv(rendezvous: Rendezvous, party: Party) -> None:
    rendezvous.send(node("send"), at(), "value", 17)
    assert rendezvous.statistics() == RendezvousStatistics(sent=1, waiting=0, unacknowledged=0)
    rendezvous.receive(party.arrived, node("recv"), at())
    assert party.heard == [("recv", (), "value", 17)]
    assert rendezvous.statistics() == NOTHING


def test_a_recv_waits_for_its_value(rendezvous: Rendezvous, party: Party) -> None:
    rendezvous.receive(party.arrived, node("recv"), at())
    assert party.heard == []
    assert rendezvous.statistics() == RendezvousStatistics(sent=0, waiting=1, unacknowledged=0)
    rendezvous.send(node("send"), at(), "value", 17)
    assert party.heard == [("recv", (), "value", 17)]
    assert rendezvous.statistics() == NOTHING


@pytest.mark.parametrize("value", [None, np.False_, 0])
@pytest.mark.parametrize("is_sent_first", [True, False])
def test_what_looks_like_nothing_is_a_value(
    rendezvous: Rendezvous, party: Party, value: Any, is_sent_first: bool
) -> None:
    if is_sent_first:
        rendezvous.send(node("send"), at(), value)
        rendezvous.receive(party.arrived, node("recv"), at())
    else:
        rendezvous.receive(party.arrived, node("recv"), at())
        rendezvous.send(node("send"), at(), value)
    assert party.heard == [("recv", (), value, 0)]


def test_the_tag_is_part_of_the_key(rendezvous: Rendezvous, party: Party) -> None:
    """One transfer under two tags: a later iteration's value may come first, and another loop's number be the same."""
    rendezvous.receive(party.arrived, node("recv"), at(0))
    rendezvous.send(node("send"), at(1), "of iteration 1")
    rendezvous.send(node("send"), at(0, 0), "of an inner loop")
    assert party.heard == []
    rendezvous.send(node("send"), at(0), "of iteration 0")
    rendezvous.receive(party.arrived, node("recv"), at(1))
    assert party.heard == [("recv", (0,), "of iteration 0", 0), ("recv", (1,), "of iteration 1", 0)]
    assert rendezvous.statistics() == RendezvousStatistics(sent=1, waiting=0, unacknowledged=0)


def test_the_transfer_is_part_of_the_key(rendezvous: Rendezvous, party: Party) -> None:
    rendezvous.send(node("send", 1), at(3), "first")
    rendezvous.receive(party.arrived, node("recv", 2), at(3))
    assert party.heard == []
    rendezvous.send(node("send_1", 2), at(3), "second")
    assert party.heard == [("recv", (3,), "second", 0)]


def test_a_value_is_taken_once(rendezvous: Rendezvous, party: Party) -> None:
    rendezvous.send(node("send"), at(), "value")
    rendezvous.receive(party.arrived, node("recv"), at())
    rendezvous.receive(party.arrived, node("recv"), at())
    assert len(party.heard) == 1
    assert rendezvous.statistics().waiting == 1


def test_a_send_hears_that_its_iteration_has_ended_elsewhere(rendezvous: Rendezvous, party: Party) -> None:
    rendezvous.await_acknowledgement(party.acknowledged, node("send"), at(4))
    rendezvous.await_acknowledgement(party.acknowledged, node("send"), at(5))
    assert rendezvous.statistics() == RendezvousStatistics(sent=0, waiting=0, unacknowledged=2)
    rendezvous.acknowledge(1, (5,))
    assert party.heard == [("send", (5,))]
    rendezvous.acknowledge(1, (4,))
    assert party.heard == [("send", (5,)), ("send", (4,))]
    assert rendezvous.statistics() == NOTHING


def test_no_executor_has_to_wait_for_an_acknowledgement(rendezvous: Rendezvous, party: Party) -> None:
    """In a loop on an untaken branch no predicate was sent; and a second one for the same iteration is too much."""
    rendezvous.acknowledge(1, (0,))
    rendezvous.await_acknowledgement(party.acknowledged, node("send"), at(1))
    rendezvous.acknowledge(1, (0,))
    rendezvous.acknowledge(2, (1,))
    assert party.heard == []
    rendezvous.acknowledge(1, (1,))
    rendezvous.acknowledge(1, (1,))
    assert party.heard == [("send", (1,))]


def test_clear_forgets_everything(rendezvous: Rendezvous, party: Party) -> None:
    rendezvous.send(node("send", 1), at(), "value")
    rendezvous.receive(party.arrived, node("recv", 2), at())
    rendezvous.await_acknowledgement(party.acknowledged, node("send", 3), at())
    assert rendezvous.statistics() == RendezvousStatistics(sent=1, waiting=1, unacknowledged=1)
    rendezvous.clear()
    assert rendezvous.statistics() == NOTHING
    assert rendezvous.waiting() == []
    rendezvous.send(node("send", 2), at(), "value")
    rendezvous.acknowledge(3, ())
    assert party.heard == []


def test_a_waiting_recv_names_its_sender_and_line(rendezvous: Rendezvous, party: Party) -> None:
    rendezvous.receive(party.arrived, node("a/recv", 1, "cpu:1"), at())
    rendezvous.receive(party.arrived, node("b/recv", 2, "sim:0"), at(3, 7))
    rendezvous.await_acknowledgement(party.acknowledged, node("c/send", 3, "sim:1"), at(2))
    assert rendezvous.waiting() == [
        "a/recv waits for its value from cpu:1",
        "b/recv in iteration loop/3/loop/7 waits for its value from sim:0",
        "c/send in iteration loop/2 waits until sim:1 ends that iteration",
    ]


async def test_messages_of_a_loop(graph: af.Graph) -> None:
    """Every transfer meets once under each tag; the predicate is sent once more than the body runs."""
    n = af.placeholder("int64", (), name="n")

    def more(i: af.Tensor, _: af.Tensor) -> af.Tensor:
        with af.device("cpu:0"):
            return i < n

    def body(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        with af.device("cpu:0"):
            following = i + 1
        with af.device("cpu:1"):
            return following, s + i

    total = af.while_loop(more, body, (0, 0), name="loop")[1]
    async with af.Session(graph, devices=["cpu:0", "cpu:1"], debug=True) as session:
        trace = af.Trace()
        assert await session.run(total, {n: 4}, trace=trace) == 6
    met = [(transfer.node, transfer.tag) for transfer in trace.transfers]
    assert len(met) == len(set(met))
    assert [tag for name, tag in met if name == "loop/loop_cond/recv"] == [f"loop/{k}" for k in range(5)]
    assert [tag for name, tag in met if name == "loop/switch/recv"] == [f"loop/{k}" for k in range(4)]
