"""Waits for members that were just answered: clients that ask again at once, and others, simulated."""

from __future__ import annotations

from heapq import heappop, heappush
from math import ceil, inf
from random import Random
from statistics import mean

import pytest

import asyncflow as af
from asyncflow.runtime.shared.batcher import BatchCall, Batcher, Gathered
from asyncflow.runtime.shared.call_costs import CallCosts, Returns

MS = 1_000_000
POLICY = af.Batch(32)


class Asked(Gathered):
    """A request of one client."""

    def __init__(self, client: int, offered_ns: int, deadline_ns: float = inf) -> None:
        self.client, self.offered_ns, self.deadline_ns = client, offered_ns, deadline_ns
        self.nbytes, self.priority, self.is_gone, self.signature = 1, 0, False, "lane"


def true_ns(size: int) -> int:
    """A product of few rows with large weights: most of it is there whatever the number of rows."""
    return int((2 if size == 1 else 7.5 + 0.4 * size) * MS)


class Server:
    """A batcher whose calls take `true_ns`, on a clock of its own."""

    def __init__(self, seed: int = 0) -> None:
        self.random = Random(seed)
        self.batcher: Batcher[Asked] = Batcher(seed)
        self.costs = CallCosts()
        self.sizes: list[int] = []
        self.times_ns: list[int] = []
        self.now_ns = 0
        self._events: list[tuple[int, int, int | BatchCall[Asked]]] = []
        self._count = 0

    def at(self, time_ns: float, event: int | BatchCall[Asked]) -> None:
        """A client asks then, or a call ends."""
        self._count += 1
        heappush(self._events, (int(time_ns), self._count, event))

    def serve(self, until_ns: int, think_ns: float | None) -> None:
        """Clients ask again after as long as that, each answer being sent and read by itself; None for never."""
        while self._events and self._events[0][0] <= until_ns:
            self.now_ns, _, event = heappop(self._events)
            if isinstance(event, BatchCall):
                self.sizes.append(len(event.members))
                self.batcher.ended(event, true_ns(len(event.members)), self.now_ns)
                for place, member in enumerate(event.members):
                    self.times_ns.append(self.now_ns - member.offered_ns)
                    if think_ns is not None:
                        self.at(self.now_ns + think_ns + (place + self.random.random()) * 0.1 * MS, member.client)
            elif event >= 0:
                self.batcher.offer("lane", self.costs, POLICY, Asked(event, self.now_ns))
            for call in self.batcher.take(self.now_ns, is_idle=True):
                self.at(self.now_ns + true_ns(len(call.members)), call)
            if (wake_ns := self.batcher.wake_ns(self.now_ns)) < inf:
                self.at(ceil(wake_ns), -1)


@pytest.mark.parametrize("seed", range(3))
def test_clients_that_ask_again_at_once_share_one_call_instead_of_taking_turns(seed: int) -> None:
    server = Server(seed)
    for client in range(32):
        server.at(client * 0.3 * MS, client)
    server.serve(1_000 * MS, think_ns=0.2 * MS)
    server.sizes.clear()
    server.serve(3_000 * MS, think_ns=0.2 * MS)
    a_second = sum(server.sizes) / 2
    assert a_second >= 0.95 * 32 / ((true_ns(32) + 3.4 * MS) / 1e9)  # which is sent and read in between
    assert a_second >= 1.15 * 32 / (2 * true_ns(16) / 1e9)  # as two halves would be in turn


@pytest.mark.parametrize("seed", range(3))
def test_a_pause_of_all_clients_says_nothing_of_when_they_come_back(seed: int) -> None:
    server, served = Server(seed), []
    for client in range(32):
        server.at(client * 0.3 * MS, client)
    for begin in (1_000, 4_000):
        server.serve(begin * MS, think_ns=2 * MS)
        server.sizes.clear()
        server.serve((begin + 300) * MS, think_ns=2 * MS)
        served.append(sum(server.sizes))
        server.serve((begin + 360) * MS, think_ns=2_600 * MS)
    assert served[1] >= 0.97 * served[0]


def test_a_client_that_is_alone_never_waits() -> None:
    server = Server()
    server.at(0, 0)
    server.serve(1_000 * MS, think_ns=0.2 * MS)
    assert set(server.times_ns) == {true_ns(1)}


def test_the_last_of_many_waits_for_the_others_once() -> None:
    server = Server()
    for client in range(32):
        server.at(0, client)
    server.serve(500 * MS, think_ns=0.2 * MS)
    server._events = [event for event in server._events if isinstance(event[2], BatchCall)]  # they all leave
    server.serve(550 * MS, think_ns=None)
    server.times_ns.clear()
    server.at(550 * MS, 0)
    server.serve(1_000 * MS, think_ns=0.2 * MS)
    assert server.times_ns[0] <= 2 * true_ns(1)
    assert set(server.times_ns[1:]) == {true_ns(1)}


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8, 1.5])
def test_requests_that_come_by_themselves_wait_no_longer_than_without(
    load: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poisson arrivals: no client comes back, and so the session learns that waiting does not pay."""
    means = []
    for waits in (True, False):
        if not waits:
            monkeypatch.setattr(Returns, "waits_until_ns", lambda *_: -inf)
        server, now_ns = Server(1), 0.0
        for client in range(5_000):
            now_ns += server.random.expovariate(load * 32 / true_ns(32))
            server.at(now_ns, client)
        server.serve(int(now_ns) + 9_000 * MS, think_ns=None)
        assert len(server.times_ns) == 5_000
        means.append(mean(server.times_ns))
    assert means[0] <= 1.02 * means[1]


def parts_of(costs: CallCosts, size: int, times_ns: dict[int, float], calls: int = 400) -> float:
    """Return the mean number of parts of `size` members, if each number of parts takes a given time at once."""
    random, found = Random(1), []
    for _ in range(calls):
        found.append(costs.parts(size, random))
        costs.observe(size, times_ns[found[-1]], found[-1])
    return mean(found[calls // 2 :])


def test_calls_are_cut_where_threads_take_less_for_the_parts_and_whole_again_when_they_do_not() -> None:
    costs = CallCosts(threads=5)  # of 1, 2 and 4 parts
    assert parts_of(costs, 30, {1: 20 * MS, 2: 13 * MS, 4: 9 * MS}) >= 3.8
    assert parts_of(costs, 31, {1: 20 * MS, 2: 13 * MS, 4: 26 * MS}) == pytest.approx(2, abs=0.2)
    assert parts_of(costs, 29, {1: 20 * MS, 2: 23 * MS, 4: 26 * MS}) <= 1.2


def test_one_call_that_was_held_up_says_little_of_calls_like_it() -> None:
    costs = CallCosts(threads=2)
    assert parts_of(costs, 32, {1: 28 * MS, 2: 20 * MS}) >= 1.9
    costs.observe(32, 500 * MS, 2)
    assert parts_of(costs, 32, {1: 28 * MS, 2: 20 * MS}, 20) >= 1.8
    for _ in range(10):
        costs.observe(32, 60 * MS, 2)
    assert parts_of(costs, 32, {1: 28 * MS, 2: 60 * MS}) <= 1.2


def test_early_first_parts_are_worth_a_late_last_one() -> None:
    costs, random = CallCosts(threads=2), Random(1)
    for _ in range(4):
        costs.observe(32, 28 * MS, 1, 28 * MS)
        costs.observe(32, 29 * MS, 2, 23 * MS)
    assert mean(costs.parts(32, random) for _ in range(200)) >= 1.9


def test_one_call_goes_before_two_that_are_hardly_better() -> None:
    costs = CallCosts()
    for size, taken_ns in ((1, 4.0), (12, 12.2), (20, 15.3), (32, 28.0)):
        for _ in range(3):
            costs.observe(size, taken_ns * MS)
    assert costs.best(32, 32) == 32
    for _ in range(9):
        costs.observe(32, 50 * MS)
    assert costs.best(32, 32) == 20


def test_calls_are_whole_where_they_are_short_or_there_is_one_thread() -> None:
    assert parts_of(CallCosts(threads=8), 30, {1: 1 * MS}) == 1
    assert parts_of(CallCosts(), 30, {1: 20 * MS}) == 1
    assert parts_of(CallCosts(threads=8), 1, {1: 20 * MS}) == 1


def learnt() -> CallCosts:
    """Of 2 and 4 members, and that all are back after 100."""
    costs = CallCosts()
    for size, taken_ns in ((1, 1_000.0), (2, 1_200.0), (3, 1_400.0), (4, 1_600.0)):
        for _ in range(3):
            costs.observe(size, taken_ns)
            costs.returns.taken.observe(size, 100.0)
            costs.returns.apart.observe(size, 10.0)
    return costs


def waiting(costs: CallCosts, deadline_ns: float = inf) -> Batcher[Asked]:
    """Two have been answered at 0, and two others wait."""
    batcher: Batcher[Asked] = Batcher()
    for client in range(2):
        batcher.offer("lane", costs, POLICY, Asked(client, -5_000))
    (call,) = batcher.take(-5_000, is_idle=True)
    for client in range(2, 4):
        batcher.offer("lane", costs, POLICY, Asked(client, -1_000, deadline_ns))
    batcher.ended(call, 1_200.0, 0)
    return batcher


def test_waiting_members_are_called_when_the_last_is_back() -> None:
    costs = learnt()
    batcher = waiting(costs)
    assert not list(batcher.take(0, is_idle=True))
    batcher.offer("lane", costs, POLICY, Asked(0, 50))
    assert not list(batcher.take(50, is_idle=True))
    batcher.offer("lane", costs, POLICY, Asked(1, 60))
    (call,) = batcher.take(60, is_idle=True)
    assert len(call.members) == 4


def test_late_ones_are_not_waited_for() -> None:
    batcher = waiting(learnt())
    assert not list(batcher.take(149, is_idle=True))
    assert batcher.wake_ns(149) == pytest.approx(100 + 50)
    (call,) = batcher.take(150, is_idle=True)
    assert len(call.members) == 2


def test_no_member_is_waited_for_past_half_of_a_deadline_or_at_the_end() -> None:
    batcher = waiting(learnt(), deadline_ns=1_200)
    assert not list(batcher.take(99, is_idle=True))
    assert batcher.wake_ns(99) == pytest.approx(100)
    assert list(batcher.take(100, is_idle=True))
    batcher = waiting(learnt())
    batcher.is_ending = True
    assert list(batcher.take(0, is_idle=True))


def test_no_member_is_waited_for_longer_than_it_would_save() -> None:
    costs = learnt()
    for _ in range(40):
        costs.returns.taken.observe(2, 900.0)
    assert list(waiting(costs).take(0, is_idle=True))


def test_noise_of_single_sizes_hides_nothing_that_is_saved() -> None:
    costs = CallCosts()
    for size, taken_ns in ((1, 900.0), (8, 1_100.0), (16, 1_550.0), (30, 2_100.0), (31, 1_900.0), (32, 2_400.0)):
        costs.observe(size, taken_ns)
    assert costs.saved_ns(16, 16, 32) == pytest.approx(700, rel=0.3)
    assert costs.saved_ns(1, 31, 32) == pytest.approx(850, rel=0.1)
    assert costs.saved_ns(1, 31, 31) == pytest.approx(850, rel=0.1)  # 30 of them
    assert costs.saved_ns(31, 8, 31) == 0.0
