"""`SwapManager`: what moves, when, and in which order; every interleaving of two loops."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from asyncflow.devices.swap import Orders, SavedHandle, SavedState, Space, SwapManager

MIB = 1 << 20


@dataclass
class Machine:
    """A device as the manager sees it: values, copies in flight, and an account of both.

    Attributes:
        limit: of the device; None for none.
        others: bytes of other things than saved values.
    """

    limit: int | None = 10 * MIB
    space: Space = field(default_factory=lambda: Space("host"))
    others: int = 0
    now_ns: int = 0
    handles: list[SavedHandle] = field(default_factory=list)
    out: list[SavedHandle] = field(default_factory=list)
    into: list[SavedHandle] = field(default_factory=list)
    moves: dict[int, int] = field(default_factory=dict)
    orders: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manager = SwapManager(self, [self.space], ns_per_byte=1e-3)

    @property
    def used(self) -> int:
        """What is on the device: values that are, and the target or source of each copy in flight."""
        here = [
            x for x in self.handles if x.state in (SavedState.KEPT, SavedState.LEAVING, SavedState.COMING) or x.copying
        ]
        return self.others + sum(x.nbytes for x in here)

    def start(self, orders: Orders) -> None:
        for handle in orders.out:
            self.moves[id(handle)] = self.moves.get(id(handle), 0) + 1
            self.orders.append(f"out {handle.label}")
        self.orders += [f"in {handle.label}" for handle in orders.into]
        self.out += orders.out
        self.into += orders.into

    def save(self, label: str, *, nbytes: int = MIB, run: int = 1, always: bool = False) -> SavedHandle:
        self.now_ns += 1000
        handle = SavedHandle(nbytes, label, self.manager.group(run))
        self.handles.append(handle)
        self.start(self.manager.saved(handle, self.now_ns, always=always))
        return handle

    def read(self, handle: SavedHandle) -> bool:
        """Whether it is there; then it is let go of."""
        self.now_ns += 1000
        self.start(self.manager.wanted(handle, self.now_ns))
        if handle.state is SavedState.COMING:
            return False
        self.drop(handle)
        return True

    def drop(self, handle: SavedHandle) -> None:
        assert self.manager.dropped(handle)

    def end_out(self, taken_ns: int = 1000) -> None:
        self.start(self.manager.left(self.out.pop(0), taken_ns))

    def end_in(self, taken_ns: int = 1000) -> None:
        self.manager.came(self.into.pop(0), taken_ns)

    def check(self) -> None:
        """What holds at any time."""
        now = self.manager.statistics()
        here = [x for x in self.handles if x.state in (SavedState.KEPT, SavedState.LEAVING, SavedState.COMING)]
        away = [x for x in self.handles if x.state is SavedState.AWAY]
        assert now.kept == sum(x.nbytes for x in here)
        assert now.host == sum(x.nbytes for x in away)
        in_flight = [x for x in self.out if x.state is not SavedState.AWAY]
        assert self.space.used == sum(x.nbytes for x in (*away, *in_flight, *self.into))
        assert now.moved_out == now.moved_in + now.discarded + sum(x.nbytes for x in (*away, *in_flight))
        assert all(count == 1 for count in self.moves.values())

    def check_end(self) -> None:
        """What holds when all values are gone and no copy is in flight."""
        self.check()
        now = self.manager.statistics()
        assert now.moved_out == now.moved_in + now.discarded
        assert now.kept == now.host == now.disk == self.space.used == 0
        assert self.used == self.others
        assert not self.manager._groups
        assert self.manager._leaving == self.manager._coming == 0


def test_nothing_moves_while_there_is_room() -> None:
    """CONFORMANCE 68: below 70 % of the limit all values stay."""
    machine = Machine(limit=10 * MIB)
    values = [machine.save(str(number)) for number in range(7)]
    assert machine.orders == []
    assert all(machine.read(value) for value in reversed(values))
    machine.check_end()


def test_the_oldest_go_as_far_as_it_takes_and_come_back_in_the_order_of_reads() -> None:
    """CONFORMANCE 68: oldest first, back last first."""
    machine = Machine(limit=10 * MIB)
    values = []
    for number in range(12):
        values.append(machine.save(str(number)))
        while machine.out:
            machine.end_out()
    assert machine.orders == [f"out {number}" for number in range(5)]
    machine.orders.clear()
    for value in reversed(values):
        while not machine.read(value):
            machine.end_in()
        while machine.into:
            machine.end_in()
    assert machine.orders == [f"in {number}" for number in (4, 3, 2, 1, 0)]
    machine.check_end()


def test_what_always_moves_goes_once_a_newer_value_is_saved() -> None:
    """`swap_memory=True` moves from the first byte; the newest is read first, and stays."""
    machine = Machine(limit=None)
    for number in range(3):
        machine.save(str(number), always=True)
    assert machine.orders == ["out 0", "out 1"]


def test_a_value_that_is_read_before_it_has_left_stays() -> None:
    machine = Machine(limit=None)
    value = machine.save("a", always=True)
    machine.save("b", always=True)
    assert value.state is SavedState.LEAVING
    assert machine.read(value)
    machine.end_out()
    assert machine.manager.statistics().discarded == MIB
    machine.check()


@pytest.mark.parametrize(("taken_ns", "ahead"), [(300, 1), (600, 3), (700, 5), (1100, 19)])
def test_values_come_back_as_far_ahead_as_copies_take_as_long_as_steps(taken_ns: int, ahead: int) -> None:
    """Each step takes 1000 ns; where copies take longer, all that has room comes at once."""
    machine = Machine(limit=None)
    values = [machine.save(str(number), always=True) for number in range(20)]
    while machine.out:
        machine.end_out(taken_ns)
    machine.orders.clear()
    assert machine.read(values[-1])
    assert machine.orders == [f"in {number}" for number in range(18, 18 - ahead, -1)]


def test_all_values_of_an_iteration_come_back_an_iteration_ahead() -> None:
    machine = Machine(limit=None)
    values = [machine.save(name, always=True) for _ in range(5) for name in "abc"]
    while machine.out:
        machine.end_out(taken_ns=1)
    machine.orders.clear()
    assert machine.read(values[-1])
    assert machine.orders == ["in b", "in a", "in c"]


def test_nothing_comes_ahead_into_memory_that_others_need() -> None:
    machine = Machine(limit=10 * MIB)
    values = [machine.save(str(number), always=True) for number in range(8)]
    while machine.out:
        machine.end_out(taken_ns=1 << 40)
    machine.others = 5 * MIB
    assert machine.read(values[-1])
    assert machine.orders[7:] == ["in 6"]  # 7 MiB with it, and 7.5 are 75 %
    machine.check()


def test_a_failed_copy_out_leaves_the_value_where_it_was_and_is_not_tried_again() -> None:
    """FAULTS F31: the device's copy is kept, and nothing is half written."""
    machine = Machine(limit=None)
    value = machine.save("a", always=True)
    machine.save("b", always=True)
    machine.manager.stays(machine.out.pop())
    assert value.state is SavedState.KEPT
    assert machine.space.used == 0
    machine.save("c", always=True)
    assert machine.orders == ["out a", "out b"]
    machine.check()


def test_a_value_with_no_place_to_go_stays_and_how_much_was_missing_is_known() -> None:
    machine = Machine(limit=2 * MIB, space=Space("host", MIB))
    for number in range(4):
        machine.save(str(number))
    assert machine.orders == ["out 0"]
    assert machine.manager.missing == MIB


def test_the_youngest_run_makes_room() -> None:
    """Of two runs the younger one's values go, so that the older one ends."""
    machine = Machine(limit=10 * MIB)
    for number in range(4):
        machine.save(f"old {number}", run=1)
    for number in range(4):
        machine.save(f"young {number}", run=2)
    assert machine.orders == ["out young 0"]


class Loop:
    """A forward loop that saves, and a gradient loop that reads each value once, from the last to the first."""

    def __init__(self, run: int, count: int, always: bool) -> None:
        self.run, self.count, self.always = run, count, always
        self.values: list[SavedHandle] = []
        self.left = count
        self.waits = self.cancelled = False

    def step(self, machine: Machine) -> None:
        if len(self.values) < self.count and self.left == self.count:
            label = f"{self.run}.{len(self.values)}"
            self.values.append(machine.save(label, run=self.run, always=self.always))
            return
        value = self.values[self.left - 1]
        if self.waits:  # for what it asked for
            machine.drop(value)
            self.waits = False
        elif not machine.read(value):
            self.waits = True
            return
        self.left -= 1

    def can_step(self) -> bool:
        waits = self.waits and self.values[self.left - 1].state is SavedState.COMING
        return not (self.cancelled or waits or (self.left == 0 and self.values))

    def cancel(self, machine: Machine) -> None:
        self.cancelled = True
        for value in self.values[: self.left]:
            machine.drop(value)

    def key(self) -> tuple[object, ...]:
        return len(self.values), self.left, self.waits, self.cancelled


def _key(machine: Machine, loops: list[Loop]) -> tuple[object, ...]:
    values = tuple((x.label, x.state, x.copying, x.has_moved) for x in machine.handles)
    queues = tuple(x.label for x in machine.out), tuple(x.label for x in machine.into)
    return values, queues, tuple(loop.key() for loop in loops)


def _events(machine: Machine, loops: list[Loop]) -> list[tuple[str, int]]:
    events = [("step", number) for number, loop in enumerate(loops) if loop.can_step()]
    events += [("cancel", number) for number, loop in enumerate(loops) if loop.can_step() and loop.values]
    events += [("out", 0), ("fail", 0)] if machine.out else []
    return events + ([("in", 0)] if machine.into else [])


def _after(
    history: tuple[tuple[str, int], ...], limit: int | None, counts: tuple[int, int], always: tuple[bool, bool]
) -> tuple[Machine, list[Loop]]:
    machine = Machine(limit=limit)
    loops = [Loop(number + 1, count, always[number]) for number, count in enumerate(counts)]
    for event, number in history:
        if event == "step":
            loops[number].step(machine)
        elif event == "cancel":
            loops[number].cancel(machine)
        elif event == "out":
            machine.end_out()
        elif event == "fail":
            machine.manager.stays(machine.out.pop(0))
        else:
            machine.end_in()
    return machine, loops


def explore(limit: int | None, counts: tuple[int, int], always: tuple[bool, bool]) -> int:
    """Every order of all events; how many different situations there were."""
    open_: list[tuple[tuple[str, int], ...]] = [()]
    seen = set()
    ends = 0
    while open_:
        history = open_.pop()
        machine, loops = _after(history, limit, counts, always)
        key = _key(machine, loops)
        if key in seen:
            continue
        seen.add(key)
        machine.check()
        events = _events(machine, loops)
        open_ += [(*history, event) for event in events]
        if not events:
            machine.check_end()
            assert all(loop.left == 0 or loop.cancelled for loop in loops), "a loop waits for nothing"
            ends += 1
    assert ends
    return len(seen)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 3 * MIB, 1])
@pytest.mark.parametrize("always", [(True, True), (False, True), (False, False)])
def test_every_interleaving_of_two_loops(limit: int | None, always: tuple[bool, bool]) -> None:
    """Four values in all: saves, reads, ends and failures of copies, cancels; invariants hold after each."""
    assert explore(limit, (2, 2), always) > 20
