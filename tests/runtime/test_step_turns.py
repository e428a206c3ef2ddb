"""The order of steps, without an event loop: Fault F46 among pools, in whatever order events come."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from math import inf
from random import Random
from typing import NamedTuple

import pytest

from asyncflow.runtime.lines.shares import SHARE, share_of
from asyncflow.runtime.shared.step_turns import LINGER_NS, Stepper, StepTurns

MS = 1_000_000
CARD, OTHER = "cuda:0", "cuda:1"


def stepper(turns: StepTurns, rank: int, room: int = 1, place: str = CARD) -> Stepper:
    one = Stepper(rank=rank, place=place, room=room)
    turns.come(one, rank)
    return one


def test_no_turn_is_asked_for_with_one_rank_or_one_stepper() -> None:
    turns = StepTurns()
    one, two = stepper(turns, 3), stepper(turns, 3)
    assert not turns.is_contended
    more = stepper(turns, 0)
    assert turns.is_contended
    turns.gone(more, 0)
    assert turns.is_contended  # as one of them may be another's client by now
    turns.gone(one, 0)
    assert not turns.is_contended
    turns.gone(two, 0)
    stepper(turns, 5), stepper(turns, 5)
    assert not turns.is_contended, "what ranks there were before nobody was there is forgotten"


def test_the_lowest_rank_never_waits_and_another_for_its_eighth() -> None:
    turns = StepTurns()
    first, last = stepper(turns, 0), stepper(turns, 5)
    assert turns.ask(last, 0)  # it is owed a step
    assert last.is_behind
    turns.ended(last, 2 * MS)
    assert not turns.ask(last, 2 * MS)
    assert turns.wake_ns(2 * MS) == 16 * MS
    for now_ns in range(2 * MS, 16 * MS, MS):
        assert turns.ask(first, now_ns)
        assert not first.is_behind
        turns.ended(first, now_ns + MS)
        assert turns.next(now_ns + MS) == ([last] if now_ns + MS == 16 * MS else [])


def test_a_left_stepper_counts_for_a_moment() -> None:
    """Clients whose calls have ended ask again: work behind them does not come between."""
    turns = StepTurns()
    first, last = stepper(turns, 0), stepper(turns, 5)
    turns.took(5, CARD, 9 * MS, 0, 0)
    assert turns.ask(first, 0)
    assert not turns.ask(last, 0)
    turns.gone(first, MS)
    assert turns.next(MS) == []
    assert turns.wake_ns(MS) == MS + LINGER_NS
    assert turns.next(MS + LINGER_NS) == [last]


def test_other_places_and_room_beside() -> None:
    turns = StepTurns()
    first, second = stepper(turns, 0), stepper(turns, 0)
    behind = [stepper(turns, 5, room=3) for _ in range(3)]
    assert turns.ask(stepper(turns, 5, place=OTHER), 0)  # nobody is there
    turns.took(5, CARD, 9 * MS, 0, 0)
    assert [turns.ask(each, 0) for each in (*behind, first, second)] == [True, False, False, True, True]
    assert turns.wake_ns(0) == inf  # there is a step of their rank
    turns.gone(first, MS)
    assert turns.next(MS) == [behind[1]]
    turns.ended(behind[0], MS)
    assert turns.next(MS) == [behind[2]]


def test_of_one_rank_the_most_overdue_goes_first() -> None:
    """The first asked goes first, and a deadline sooner than a second counts; but a step may be late for ever."""
    turns = StepTurns()
    stepper(turns, 0)
    early, late, urgent = (stepper(turns, 5) for _ in range(3))
    urgent.deadline_ns = 500 * MS
    turns.took(5, CARD, 20 * MS, 0, 0)
    for now_ns, each in enumerate((early, late, urgent)):
        assert not turns.ask(each, now_ns * MS)
    order = []
    for now_ns in range(0, 3_000 * MS, 20 * MS):
        turns.next(now_ns)
        for each in [each for each in (early, late, urgent) if each.is_stepping]:
            order.append(each)
            turns.ended(each, now_ns + 2 * MS)
            turns.ask(each, now_ns + 2 * MS)
    assert order[:9] == [urgent] * 9
    assert {order.count(each) for each in (early, late)} <= {2, 3}


class Pool(NamedTuple):
    rank: int
    least: int
    most: int


@pytest.mark.parametrize(
    "pools",
    [
        [Pool(0, 1, 1), Pool(5, 9, 9)],
        [Pool(0, 20, 20), Pool(5, 1, 1)],
        [Pool(0, 1, 9), Pool(2, 1, 30), Pool(5, 1, 3)],
        [Pool(0, 1, 3), *[Pool(5, 1, 9)] * 8],
        [*[Pool(0, 1, 9)] * 5, Pool(5, 1, 9)],
        [Pool(rank, 1, 9) for rank in range(11)],
    ],
)
def test_shares_of_time(pools: list[Pool]) -> None:
    """Fault F46: where all have work, each rank but the first has an eighth of the time, however many pools it is of.

    Or a step between two of others: on an event loop, each that need not wait makes one in each pass.
    """
    random, turns, now_ns = Random(1), StepTurns(), 0
    there = {stepper(turns, pool.rank): pool for pool in pools}
    taken: Counter[float] = Counter()
    steps: Counter[float] = Counter()
    for each in there:
        turns.ask(each, 0)
    while now_ns < 500 * MS:
        begun = [each for each in there if each.is_stepping]
        if not begun:
            now_ns = int(turns.wake_ns(now_ns)) + 1
            turns.next(now_ns)
            continue
        for each in begun:
            taken_ns = random.randint(there[each].least, there[each].most) * MS // 20
            each.began_ns, now_ns = now_ns, now_ns + taken_ns
            taken[each.rank] += taken_ns
            steps[each.rank] += 1
            turns.ended(each, now_ns)
        for each in begun:
            turns.ask(each, now_ns)
        turns.next(now_ns)
    share = share_of(len({pool.rank for pool in pools}))
    for rank in {pool.rank for pool in pools} - {0}:
        assert taken[rank] / now_ns <= share * 1.02
        assert taken[rank] / now_ns >= share * 0.95 or steps[rank] >= steps[0] - 1
    assert taken[0] / now_ns >= 1 - share * (len({pool.rank for pool in pools}) - 1) * 1.02


@dataclass
class _State:
    """Pools of ranks 0, 5 and 5; each has gone in the end."""

    turns: StepTurns
    pools: list[Stepper]
    asked: list[int]
    now_ns: int = 0
    ticks: int = 0
    most: int = 2

    def key(self) -> str:
        """All that the rest depends on."""
        return repr(self._parts())

    def _parts(self) -> tuple[object, ...]:
        turns = self.turns
        there = [each in turns._present for each in self.pools]
        waits = [each in turns._waiting for each in self.pools]
        steps = [each.is_stepping for each in self.pools]
        due = [turns._owed_ns.get((rank, CARD), 0) - self.now_ns for rank in (0, 5)]
        left = [turns._ended_ns.get((rank, CARD), 0) - self.now_ns for rank in (0, 5)]
        since = [self.now_ns - each.began_ns if each.is_stepping else 0 for each in self.pools]
        return there, waits, steps, since, due, left, self.asked, self.ticks


def _events(state: _State) -> list[tuple[str, int]]:
    found = [("time", 0)] if state.ticks < state.most else []
    for k, each in enumerate(state.pools):
        if each not in state.turns._present:
            continue
        found.append(("gone", k))
        if each.is_stepping:
            found.append(("ended", k))
        elif each not in state.turns._waiting and state.asked[k] < max(state.most - (k == 0), 1):
            found.append(("ask", k))
    return found if any(event != "time" for event, _ in found) else []


def _after(state: _State, event: str, k: int) -> _State:
    state = deepcopy(state)
    turns, one = state.turns, state.pools[k]
    if event == "time":
        state.ticks += 1
        wake_ns = turns.wake_ns(state.now_ns)
        state.now_ns += MS if wake_ns == inf else max(int(wake_ns) - state.now_ns, 0)
    elif event == "ask":
        state.asked[k] += 1
        turns.ask(one, state.now_ns)
    else:
        getattr(turns, event)(one, state.now_ns)
    turns.next(state.now_ns)
    return state


@pytest.mark.parametrize(("most", "room"), [(1, 1), pytest.param(2, 1, marks=pytest.mark.slow), (1, 2)])
def test_every_order_of_what_may_happen_to_three(most: int, room: int) -> None:
    """Asks, ends, leaves and time, in any order: the first rank never waits, and whoever waits is told when to look."""
    turns = StepTurns()
    start = _State(turns, [stepper(turns, rank, room) for rank in (0, 5, 5)], [0] * 3, most=most)
    seen, pending, ends = {start.key()}, [start], 0
    while pending:
        state = pending.pop()
        turns, (first, *others) = state.turns, state.pools
        waiting = [each for each in others if each in turns._waiting]
        assert first not in turns._waiting
        if waiting:
            assert turns.wake_ns(state.now_ns) > state.now_ns  # or else it would have begun
            assert turns.wake_ns(state.now_ns) < inf or any(each.is_stepping for each in others)
            assert first in turns._present or turns._ended_ns[0, CARD] + LINGER_NS > state.now_ns
        if first in turns._present and sum(each.is_stepping for each in others) > 1:
            # What had begun before it came, if there was no room; here it came first.
            raise AssertionError("two steps at once beside one that goes first")
        followers = [_after(state, *event) for event in _events(state)]
        if not followers:
            ends += 1
            assert not (turns._waiting or turns._present)
        for each in followers:
            if each.key() not in seen:
                seen.add(each.key())
                pending.append(each)
    assert ends
    assert len(seen) > 300


def test_times_are_not_kept_for_every_priority_that_ever_was() -> None:
    turns = StepTurns()
    for rank in range(1_000):
        one = stepper(turns, rank)
        turns.ask(one, rank * 100 * MS)
        turns.gone(one, rank * 100 * MS + MS)
    assert len(turns._owed_ns) + len(turns._ended_ns) < 5
    assert SHARE == 1 / 8
