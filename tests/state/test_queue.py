"""The pure state of a queue: every order of small programs, and that a broken rule would be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import pytest

import asyncflow as af
from asyncflow.state.elements import element_orders
from asyncflow.state.elements.element_orders import ArrivalOrder, BucketOrder, ElementOrder, PriorityOrder, RandomOrder
from asyncflow.state.elements.queue import QueueState
from asyncflow.state.elements.queue_places import QueuePlace, Stage
from asyncflow.state.elements.taken import MOST_ELEMENTS, Taken
from asyncflow.state.variables.immutable import LARGE_BYTES
from asyncflow.state.waiting.lines import NOT_YET, PlaceInLine

Op: TypeAlias = tuple[Any, ...]
"""``("put", k)``, ``("take", n)``, ``("up_to", n)`` or ``("close", cancel_pending)``."""
Move: TypeAlias = tuple[str, int]

ORDERS: dict[str, Callable[[], ElementOrder]] = {
    "arrival": ArrivalOrder,
    "random": lambda: RandomOrder(0),
    "priority": PriorityOrder,
    "bucket": lambda: BucketOrder(lambda element: int(element[0]) % 2),
}

PUTS, TAKES = ("put",), ("take", "up_to")


def elements_of(values: Sequence[int]) -> list[Any]:
    """Elements of one number each."""
    return [(value,) for value in values]


class World:
    """Actors, each with operations to do one after the other, on one queue; a move is a step of one of them.

    Attributes:
        copies: the copies of each actor on a thread, also of operations that it has given up; not none in a world
            in which all elements are large.
        put: the elements that went in, in that order.
        got: elements of each take, in the order in which takes ended.
        errors: errors of operations, with the operation.
    """

    def __init__(
        self,
        actors: Sequence[Sequence[Op]],
        capacity: int,
        order: str = "arrival",
        reserve: int = 0,
        *,
        are_large: bool = False,
    ) -> None:
        self.actors = actors
        self.state = QueueState("q", ORDERS[order](), capacity, reserve)
        self.are_large = are_large
        if are_large:
            self.state._element_bytes = LARGE_BYTES + 1
        self.copies: list[list[Callable[[], None]]] = [[] for _ in actors]
        self.order = order
        self.done = [0] * len(actors)
        self.places: list[PlaceInLine | None] = [None] * len(actors)
        self.offered: list[list[int]] = [[] for _ in actors]
        self.put: list[int] = []
        self.got: list[list[int]] = []
        self.errors: list[tuple[Op, int]] = []
        self.left: set[int] = set()
        self.next = 0

    def moves(self) -> list[Move]:
        """Return the possible next moves."""
        found: list[Move] = [("copied", actor) for actor, copies in enumerate(self.copies) if copies]
        for actor, place in enumerate(self.places):
            if place is not None:
                found.append(("leave", actor))
                if place.is_called:
                    found.append(("claim", actor))
            elif self.done[actor] < len(self.actors[actor]):
                found.append(("ask", actor))
        return found

    def move(self, move: Move) -> None:
        kind, actor = move
        if kind == "copied":
            self.copies[actor].pop(0)()
            return
        place = self.places[actor]
        if kind == "leave":
            assert place is not None
            place.leave()
            self.left.update(self.offered[actor])
            self._end(actor)
            return
        try:
            found: Any = self._ask(actor) if place is None else place.claim()
        except af.QueueClosedError as error:
            self.errors.append((self.actors[actor][self.done[actor]], error.left))
            self.left.update(self.offered[actor])
            self._end(actor)
            return
        if isinstance(found, PlaceInLine):
            self.places[actor] = found
            if found.works:
                found.do_beside(self.copies[actor].append)
        elif found is not NOT_YET:
            if self.actors[actor][self.done[actor]][0] in TAKES:
                self.got.append(found)
            self._end(actor)

    def _ask(self, actor: int) -> Any:
        kind, argument = self.actors[actor][self.done[actor]]
        if kind == "close":
            return self.state.close(argument)
        if kind == "put":
            values = self.offered[actor] = list(range(self.next, self.next + argument))
            self.next += argument
            if self.are_large:
                return self.state.put_copies(
                    lambda: elements_of(values), argument, "put", lambda _: self.put.extend(values)
                )
            return self.state.put(elements_of(values), "put", lambda _: self.put.extend(values))
        numbers: Any = lambda elements: [int(each[0]) for each in elements]  # noqa: E731
        return self.state.take(argument, kind == "up_to", kind, numbers, copies=self.are_large)

    def _end(self, actor: int) -> None:
        self.done[actor] += 1
        self.places[actor] = None
        self.offered[actor] = []

    def key(self) -> Any:
        """Equal for worlds in which the same may follow, and the same has."""
        state = self.state
        lines = tuple(
            (self.places.index(place), place.is_called, place.stage)
            for place in state.places()
            if isinstance(place, QueuePlace)
        )
        elements, order = state.capture()[:2]
        return (
            tuple(self.done),
            tuple(map(len, self.copies)),
            lines,
            len(state.elements),
            elements,
            order,
            state.is_closed,
            str(self.got),
            tuple(self.put),
            str(self.errors),
        )

    def check(self) -> None:
        """Check the invariants after every move."""
        state = self.state
        held = [int(element[0]) for element in state.capture().elements]
        taken = [value for batch in self.got for value in batch]
        assert sorted(taken + held) == sorted(self.put), "an element is in one place, whatever happens"
        assert not set(self.put) & self.left, "who leaves has put nothing in"
        put, take = (max(op[1] for ops in self.actors for op in ops if op[0] in kinds) for kinds in (PUTS, TAKES))
        assert len(held) <= max(state.capacity, take + state.reserve + put - 1)
        if self.order == "arrival":
            assert taken == self.put[: len(taken)]
        for line in (state._putters, state._takers):
            # Said anew, and not asked of the state: who is first goes on if and only if the table says so.
            for place in list(line)[1:]:
                assert not place.is_called, "nobody overtakes"
            if line:
                first = line[0]
                assert first.is_called == (first.stage is not Stage.COPYING and self._may(first))

    def _may(self, place: QueuePlace) -> bool:
        state = self.state
        held, putters, takers = len(state.capture().elements), list(state._putters), list(state._takers)
        if place.stage is Stage.MADE:
            return True
        final = held + sum(each.count for each in putters)
        count: int = place.count
        if place in putters:
            if held + count <= state.capacity:
                return True
            return bool(takers) and held < self._needs(takers[0], final)
        if state.is_closed:
            return held >= self._needs(place, final)
        full = bool(putters) and held + putters[0].count > state.capacity
        buckets: list[int] = [int(each[0]) % 2 for each in state.capture().elements]
        together = self.order != "bucket" or max(buckets.count(0), buckets.count(1)) >= count
        return held >= count + state.reserve and (together or full)

    def _needs(self, request: QueuePlace, final: int) -> int:
        count: int = request.count
        if request.stage is not Stage.WAITING:
            return 0
        if not self.state.is_closed:
            return count + self.state.reserve
        return count if final >= count else final if request.or_fewer else 0


def explore(make: Callable[[], World]) -> Iterator[World]:
    """A world for each that is different and can be reached, by any moves of its actors."""
    seen = set()
    paths: list[tuple[Move, ...]] = [()]
    while paths:
        path = paths.pop()
        world = make()
        for move in path:
            world.move(move)
        world.check()
        if world.key() in seen:
            continue
        seen.add(world.key())
        yield world
        paths.extend((*path, move) for move in world.moves())


PROGRAMS: dict[str, tuple[Sequence[Sequence[Op]], int]] = {
    "one of each": (([("put", 1)], [("take", 1)]), 1),
    "two producers, one consumer": (([("put", 1), ("put", 1)], [("put", 1)], [("take", 1), ("take", 1)]), 1),
    "batches that do not fit": (([("put", 2), ("put", 2)], [("take", 3)]), 3),
    "a batch larger than the capacity": (([("put", 1), ("put", 1), ("put", 1)], [("take", 3)]), 1),
    "more at once than the capacity": (([("put", 3)], [("take", 1), ("take", 1)], [("put", 1)]), 2),
    "two consumers": (([("put", 2), ("put", 1)], [("take", 2)], [("take", 1)]), 2),
    "closed while all wait": (([("put", 1), ("put", 1)], [("take", 2)], [("close", False)]), 1),
    "closed for those who wait": (([("put", 1), ("put", 1)], [("take", 1)], [("close", True)]), 1),
    "what is left": (([("put", 2)], [("up_to", 3), ("up_to", 1)], [("close", False)]), 2),
}


def test_every_order_of_elements_is_looked_at() -> None:
    orders = {each for each in vars(element_orders).values() if isinstance(each, type) and hasattr(each, "give_back")}
    assert {type(order()) for order in ORDERS.values()} == orders - {ElementOrder}, "a new order joins ORDERS"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_order_of_a_program(name: str, order: str) -> None:
    """Fault F18, F50: whatever comes first, and whoever gives up at any moment, each element is in one place."""
    actors, capacity = PROGRAMS[name]
    worlds = list(explore(lambda: World(actors, capacity, order)))
    assert len(worlds) > 5
    ended = [world for world in worlds if not world.moves()]
    assert ended


LONGEST = "two producers, one consumer"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == LONGEST)) for name in PROGRAMS]
)
def test_every_order_of_a_program_that_copies(name: str, order: str) -> None:
    """Fault F18, F50: the same while threads copy, whenever they end, and whatever happens before that."""
    actors, capacity = PROGRAMS[name]
    worlds = list(explore(lambda: World(actors, capacity, order, are_large=True)))
    assert len(worlds) > 20
    assert any(not world.moves() for world in worlds)


@pytest.mark.parametrize("reserve", [1, 2])
def test_every_order_with_a_reserve(reserve: int) -> None:
    actors = [("put", 2), ("put", 1)], [("take", 1), ("take", 1)], [("close", False)]
    for world in explore(lambda: World(actors, 3, "random", reserve)):
        if not world.state.is_closed and world.got:
            assert len(world.state.elements) >= reserve


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_larger_programs(order: str) -> None:
    actors = [("put", 1), ("put", 2)], [("put", 1)], [("take", 2), ("up_to", 2)], [("take", 1)], [("close", False)]
    assert sum(1 for _ in explore(lambda: World(actors, 2, order))) > 1000


def test_no_firing_waits_once_it_is_closed_and_nothing_comes() -> None:
    """Behaviour 78: at the end of every order, whoever still waits waits for elements that may come."""
    actors = [("put", 1)], [("take", 2)], [("take", 1)], [("close", False)]
    for world in explore(lambda: World(actors, 1)):
        if world.state.is_closed and world.state.places():
            assert any(place.is_called for place in world.state.places())


@pytest.mark.parametrize("broken", ["lost", "overtaking", "torn"])
def test_a_broken_copy_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: elements that are not given back, or others that go on while a thread copies."""
    if broken == "lost":
        monkeypatch.setattr(ArrivalOrder, "give_back", lambda self, elements, where: None)
    elif broken == "overtaking":
        monkeypatch.setattr(QueueState, "_first_may_put", lambda self: self._may_put(self._putters[0].count))
    else:
        monkeypatch.setattr(QueueState, "_held", lambda self: len(self.elements))
    actors = [("put", 2)], [("put", 1)], [("take", 2), ("take", 1)]
    with pytest.raises(AssertionError):
        for _ in explore(lambda: World(actors, 2, are_large=True)):
            pass


def test_a_lost_call_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: a state that forgets to call whoever comes next does not pass."""
    monkeypatch.setattr(QueueState, "left", lambda self, place: self._takers.remove(place))
    with pytest.raises((AssertionError, ValueError)):
        for _ in explore(lambda: World(*PROGRAMS["two consumers"])):
            pass


# -- what is left, and messages --------------------------------------------------------------------------------------


def put(state: QueueState, *values: int) -> Any:
    return state.put(elements_of(values), "put", lambda _: "put")


def take(state: QueueState, count: int, or_fewer: bool = False) -> Any:
    return state.take(count, or_fewer, "take", lambda elements: [each[0] for each in elements])


def test_close_leaves_present_elements() -> None:
    """Behaviour 78: the error says how many are left, and they can be taken."""
    state = QueueState("q", ArrivalOrder(), 5)
    put(state, 1, 2, 3)
    state.close()
    with pytest.raises(af.QueueClosedError, match="3 elements are left") as caught:
        take(state, 4)
    assert (caught.value.queue, caught.value.left) == ("q", 3)
    with pytest.raises(af.QueueClosedError, match="nothing more can be put in"):
        put(state, 4)
    assert take(state, 2) == [1, 2]
    assert take(state, 2, or_fewer=True) == [3]
    with pytest.raises(af.QueueClosedError, match="0 elements are left"):
        take(state, 1, or_fewer=True)


def test_close_lets_waiting_putters_in() -> None:
    """Behaviour 78: without `cancel_pending`, an enqueue that waits goes in; with it, it fails."""
    for cancel_pending in (False, True):
        state = QueueState("q", ArrivalOrder(), 1)
        put(state, 1)
        waiting = put(state, 2)
        state.close(cancel_pending)
        assert waiting.is_called == cancel_pending
        assert take(state, 1) == [1]
        if cancel_pending:
            with pytest.raises(af.QueueClosedError, match="cancel_pending=True"):
                waiting.claim()
        else:
            assert waiting.claim() == "put"
            assert take(state, 1) == [2]


def test_a_snapshot_is_taken_by_reference() -> None:
    """Behaviour 79: a snapshot is one moment of the elements; it has no waiting places, which are served by restored
    elements.
    """
    for order in ORDERS.values():
        state, other, third = (QueueState("q", order(), 5) for _ in range(3))
        elements = elements_of((3, 1, 4, 1, 5))
        state.put(elements, "put", lambda _: None)
        place = put(state, 9)
        taken_before = take(state, 1)
        snapshot = state.capture()
        assert all(any(each is element for element in elements) for each in snapshot.elements)
        assert (len(snapshot.elements), snapshot.is_closed) == (4, False)
        place.claim()
        for _ in range(4):
            take(state, 1)
        third.become(snapshot)
        expected = [take(third, 1) for _ in range(4)]
        waiting = take(other, 1)
        other.become(snapshot)
        assert waiting.is_called
        assert [waiting.claim(), *(take(other, 1) for _ in range(3))] == expected
        state.close()
        state.become(snapshot)
        assert not state.is_closed
        assert sorted([taken_before[0], *(take(state, 1)[0] for _ in range(4))]) == [1, 1, 3, 4, 5]


@pytest.mark.parametrize("ends", ["leaves", "claims"])
def test_a_take_that_copies_gives_nothing_to_restored_elements(ends: str) -> None:
    """The elements in its hand were taken from the queue as it was before."""
    state = QueueState("q", ArrivalOrder(), 9, specs=[af.spec("int64", ())])
    state._element_bytes = LARGE_BYTES + 1
    state.put(elements_of([1, 2, 3]), "put", lambda _: ())
    snapshot = state.capture()
    copies: list[Callable[[], None]] = []
    place = state.take(1, False, "take", lambda elements: [int(each[0]) for each in elements], copies=True)
    assert isinstance(place, PlaceInLine)
    place.do_beside(copies.append)
    state.become(snapshot)
    if ends == "claims":
        copies.pop()()
        assert place.claim() == [1]
    place.leave()
    assert state.size() == 3
    assert [int(element[0]) for element in state.capture().elements] == [1, 2, 3]


def test_elements_go_back_to_their_places_whatever_was_taken_meanwhile() -> None:
    """Two runs give elements back, the later one first; elements do not go back to a queue restored meanwhile."""
    for order in (ArrivalOrder(), PriorityOrder(), BucketOrder(lambda element: int(element[0]) % 2)):
        state = QueueState("q", order, 9)
        state.put(elements_of([1, 2, 3, 4]), "put", lambda _: ())
        first, second, third = Taken(), Taken(), Taken()
        assert state.take(1, False, "take", len, taken=first) == 1
        assert state.take(1, False, "take", len, taken=second) == 1
        second.give_back()
        first.give_back()
        assert state.take(2, False, "take", len, taken=third) == 2
        third.give_back()
        assert sorted(int(element[0]) for element in state.capture().elements) == [1, 2, 3, 4]
        if not isinstance(order, BucketOrder):
            assert [int(element[0]) for element in state.capture().elements] == [1, 2, 3, 4]
        assert state.take(1, False, "take", len, taken=third) == 1
        state.become(state.capture())
        third.give_back()
        assert state.size() == 3


def test_a_run_remembers_so_much_and_no_more() -> None:
    """A loop may take any number of elements: the last ones are given back, and memory stays bounded."""
    state, taken = QueueState("q", ArrivalOrder(), 10**6), Taken()
    state.put(elements_of(list(range(3 * MOST_ELEMENTS))), "put", lambda _: ())
    for _ in range(2 * MOST_ELEMENTS + 7):
        state.take(1, False, "take", len, taken=taken)
        assert taken.count <= MOST_ELEMENTS
    taken.give_back()
    assert int(state.capture().elements[0][0]) == 2 * MOST_ELEMENTS


def test_a_shuffled_snapshot_goes_on_as_it_would_have() -> None:
    """Behaviour 79: the random choices to come are part of it."""
    state = QueueState("q", RandomOrder(7), 100)
    put(state, *range(100))
    take(state, 10)
    snapshot = state.capture()
    first = take(state, 50)
    state.become(snapshot)
    assert take(state, 50) == first
    assert first != sorted(first)


def test_a_waiting_place_is_told_when_the_state_ends() -> None:
    state = QueueState("q", ArrivalOrder(), 1)
    waiting = take(state, 1)
    woken: list[int] = []
    waiting.when_called(lambda: woken.append(1))
    state.end(lambda: af.SessionClosedError("over"))
    assert woken == [1]
    with pytest.raises(af.SessionClosedError, match="over"):
        waiting.claim()
    with pytest.raises(af.SessionClosedError, match="over"):
        put(state, 1)


def test_many_are_woken_one_after_the_other() -> None:
    """One put serves thousands of waiting takes, without a stack as deep."""
    state = QueueState("q", ArrivalOrder(), 5000)
    got: list[Any] = []
    for _ in range(5000):
        place = take(state, 1)
        place.when_called(lambda place=place: got.append(place.claim()))
    put(state, *range(5000))
    assert got == [[k] for k in range(5000)]


def test_a_wake_that_raises_does_not_keep_others_asleep() -> None:
    """Fault F28: such as KeyboardInterrupt, at the worst of moments."""
    state = QueueState("q", ArrivalOrder(), 5)
    got: list[Any] = []

    def interrupted() -> None:
        first.leave()
        raise KeyboardInterrupt

    first, second = take(state, 1), take(state, 1)
    first.when_called(interrupted)
    second.when_called(lambda: got.append(second.claim()))
    with pytest.raises(KeyboardInterrupt):
        put(state, 1)
    assert got == [[1]]
    assert put(state, 2) == "put"


def test_lines_are_forgotten_after_a_fork() -> None:
    """Fault F27: places wait in the parent; in the child no coroutine stands behind them."""
    state = QueueState("q", ArrivalOrder(), 1)
    waiting = take(state, 1)
    state.lock.acquire()  # as a thread of the parent's had it
    state.forget_lines()
    put(state, 1)
    assert take(state, 1) == [1]
    assert waiting.claim() is NOT_YET


def test_buckets_are_mixed_only_where_no_firing_could_go_on() -> None:
    """Elements of one bucket together; when the queue is full of few of each, the oldest."""
    state = QueueState("q", ORDERS["bucket"](), 4)
    put(state, 1, 2, 3, 4)
    waiting = take(state, 3)
    assert not waiting.is_called
    late = put(state, 6)
    assert waiting.is_called
    assert waiting.claim() == [1, 2, 3]
    assert late.is_called
    assert late.claim() == "put"
    assert take(state, 2) == [4, 6]
