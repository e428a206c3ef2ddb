"""`SavedMoves` behind a `MemoryGate`: what moves, when, and in which order; every interleaving of two loops."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

import pytest

from asyncflow.devices.saved.memory_gate import MemoryGate
from asyncflow.devices.saved.saved_handle import SavedHandle, SavedState, SavedValue, Space
from asyncflow.devices.saved.swap import Orders, SavedMoves
from asyncflow.devices.saved.working_set import Pace, WorkingSet

MIB = 1 << 20


@dataclass
class Machine:
    """A device as gate and moves see it: values, copies in flight, and an account of both.

    Attributes:
        limit: of the device; None for none.
        others: bytes of other things than saved values.
        together: most bytes that move by one copy; at most 0.15 of the limit.
    """

    limit: int | None = 10 * MIB
    space: Space = field(default_factory=lambda: Space("host"))
    others: int = 0
    together: int = 0
    now_ns: int = 0
    handles: list[SavedHandle] = field(default_factory=list)
    out: list[SavedHandle] = field(default_factory=list)
    into: list[SavedHandle] = field(default_factory=list)
    moved: dict[tuple[int, int], int] = field(default_factory=dict)
    orders: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate = MemoryGate(self, self)
        self.moves = SavedMoves(self, self.gate, [self.space], ns_per_byte=1e-3, together=self.together)

    @property
    def used(self) -> int:
        """Return the bytes on the device: values there, and the targets and sources of copies in flight.

        Values have memory of their own until they come back to one block.
        """
        here = [
            x for x in self.handles if x.state in (SavedState.KEPT, SavedState.LEAVING, SavedState.COMING) or x.copying
        ]
        return self.others + sum(x.nbytes for x in here)

    @property
    def at_most(self) -> int:
        return self.used

    @property
    def total(self) -> int:
        return 0

    @property
    def fed(self) -> int:
        return 0

    def lap(self) -> tuple[int, int]:
        return 0, self.used

    # -- as the gate's room --------------------------------------------------------------------------------------

    @property
    def to_be_free(self) -> int:
        return self.moves.to_be_free

    @property
    def is_held_up(self) -> bool:
        return self.moves.is_short

    def owed(self, run: int) -> int:
        return self.moves.owed(run)

    def free(self, nbytes: float, run: int | None = None, *, with_sets: bool = True) -> None:
        self.start(self.moves.clear(nbytes, run))

    # -- events --------------------------------------------------------------------------------------------------

    def leave(self, run: int) -> None:
        self.gate.leaves(run)
        self.moves.leaves(run)

    def start(self, orders: Orders) -> None:
        for handle in orders.out:
            moved = handle.group.key, handle.rank
            self.moved[moved] = self.moved.get(moved, 0) + 1
            self.orders.append(f"out {handle.label}")
        self.orders += [f"in {handle.label}" for handle in orders.into]
        self.out += orders.out
        self.into += orders.into

    def save(self, label: str, *, nbytes: int = MIB, run: int = 1, always: bool = False) -> SavedValue:
        self.now_ns += 1000
        group = self.moves.group(run)
        handle = SavedHandle(label, group)
        if always and self.moves.together:  # values are added to the newest set while they fit in
            if group.newest is not None and group.newest.nbytes + nbytes > self.moves.together:
                self.start(self.moves.newest_goes(run))
            handle = self.moves.set_of(group)
        if handle not in self.handles:
            self.handles.append(handle)
        value = self.moves.adds(handle, nbytes, label)
        self.start(self.moves.saved(handle, self.now_ns, moves="always" if always else "short"))
        return value

    def read(self, value: SavedValue) -> bool:
        """Return True if the value is there; then it is released."""
        self.now_ns += 1000
        self.start(self.moves.wanted(value.handle, self.now_ns, value.rank))
        if value.handle.state is SavedState.COMING:
            return False
        self.drop(value)
        return True

    def ask(self, working_set: WorkingSet, run: int = 1) -> bool:
        return self.gate.asks(run, (working_set,))

    def admits(self, run: int = 1) -> bool:
        return self.gate.admits(run)

    def working_set(self, nbytes: int) -> WorkingSet:
        """A loop of which iterations have been measured."""
        working_set = WorkingSet(self)
        for _ in range(3):
            working_set.measured(nbytes, nbytes)
        return working_set

    def drop(self, value: SavedValue) -> None:
        assert self.moves.dropped(value) == (not value.handle.live)

    def end_out(self, taken_ns: int = 1000) -> None:
        self.start(self.moves.left(self.out.pop(0), taken_ns))

    def end_in(self, taken_ns: int = 1000) -> None:
        self.moves.came(self.into.pop(0), taken_ns)

    def check(self) -> None:
        """Check the invariants of any moment."""
        now = self.moves.statistics()
        here = [x for x in self.handles if x.state in (SavedState.KEPT, SavedState.LEAVING, SavedState.COMING)]
        away = [x for x in self.handles if x.state is SavedState.AWAY]
        assert now.kept == sum(x.nbytes for x in here)
        assert now.host == sum(x.nbytes for x in away)
        in_flight = [x for x in self.out if x.state is not SavedState.AWAY]
        assert self.space.used == sum(x.nbytes for x in (*away, *in_flight, *self.into))
        assert now.moved_out == now.moved_in + now.discarded + sum(x.nbytes for x in (*away, *in_flight))
        assert all(count == 1 for count in self.moved.values())

    def check_end(self) -> None:
        """Check the state after all values are gone and no copy is in flight."""
        self.check()
        now = self.moves.statistics()
        assert now.moved_out == now.moved_in + now.discarded
        assert now.kept == now.host == now.disk == self.space.used == 0
        assert self.used == self.others
        assert not self.moves._groups
        assert self.moves._leaving == self.moves._ending == self.moves._coming == 0
        assert not self.gate._ages


def test_the_example_of_saved_moves() -> None:
    """Copies out go one after the other, and so do copies in; each takes as long as two iterations."""
    machine = Machine(limit=10 * MIB)
    machine.moves.ns_per_byte = 2000 / MIB
    loop = machine.working_set(MIB // 2)
    ends: dict[str, int] = {}

    def pass_time() -> None:
        for name, copies, end in (("out", machine.out, machine.end_out), ("in", machine.into, machine.end_in)):
            if copies and ends.setdefault(name, machine.now_ns + 2000) <= machine.now_ns:
                end(2000)
                del ends[name]

    values, orders = [], {}
    for number in range(10):
        values.append(machine.save(str(number)))
        pass_time()
        orders[f"save {number}"] = machine.orders[-1:]
    machine.orders.clear()
    for number in reversed(range(10)):
        assert machine.ask(loop)
        assert machine.read(values[number])
        pass_time()
        if machine.orders:
            orders[f"read {number}"] = [*machine.orders]
            machine.orders.clear()
    outs = {f"save {number}": [f"out {number - 7}"] for number in (7, 8, 9)}
    assert {name: each for name, each in orders.items() if each} == {**outs, "read 6": ["in 1", "in 0"]}
    now = machine.moves.statistics()
    assert (now.moved_out, now.moved_in, now.discarded, now.late) == (3 * MIB, 2 * MIB, MIB, 0)
    machine.leave(1)
    machine.check_end()


def test_nothing_moves_while_there_is_room() -> None:
    """Behaviour 68: below 70 % of the limit all values stay."""
    machine = Machine(limit=10 * MIB)
    values = [machine.save(str(number)) for number in range(7)]
    assert machine.orders == []
    assert all(machine.read(value) for value in reversed(values))
    machine.check_end()


def test_the_oldest_go_as_far_as_it_takes_and_come_back_in_the_order_of_reads() -> None:
    """Behaviour 68: oldest first, back last first."""
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


def test_values_that_always_move_go_and_come_by_one_copy() -> None:
    """Three fit together; the newest of them is read first, and brings the others back."""
    machine = Machine(limit=30 * MIB, together=3 * MIB)
    values = [machine.save(str(number), always=True) for number in range(7)]
    assert machine.orders == ["out 0", "out 3"]
    assert [value.handle.nbytes for value in values] == [3 * MIB] * 6 + [MIB]
    while machine.out:
        machine.end_out()
        machine.check()
    machine.orders.clear()
    for value in reversed(values):
        while not machine.read(value):
            machine.end_in()
        machine.check()
    assert machine.orders == ["in 3", "in 0"]
    while machine.into:
        machine.end_in()
    machine.leave(1)
    machine.check_end()


def test_a_set_may_hold_a_buffer_that_all_iterations_save() -> None:
    """A store hands over a whole set: the second save of the buffer comes before the set is known."""
    machine = Machine(limit=30 * MIB, together=3 * MIB)
    handle = machine.moves.set_of(machine.moves.group(1))
    machine.handles.append(handle)
    value = machine.moves.adds(handle, MIB, "w")
    place = machine.moves.again(value, "w")
    machine.start(machine.moves.saved(handle, machine.now_ns, moves="always"))
    assert (place, value.holders, handle.nbytes, handle.stride) == (0, 2, MIB, 1)
    machine.drop(value)
    machine.drop(value)
    machine.leave(1)
    machine.check_end()


def test_an_iteration_without_room_lets_values_go_that_would_wait_for_others() -> None:
    machine = Machine(limit=20 * MIB, together=3 * MIB)
    values = [machine.save(str(number), always=True) for number in range(2)]
    machine.others = 17 * MIB
    assert machine.orders == []
    assert not machine.ask(machine.working_set(2 * MIB))
    assert machine.orders == ["out 0"]
    assert values[1].handle.state is SavedState.LEAVING
    machine.end_out()
    assert machine.admits()


def test_values_that_are_away_together_are_taken_apart() -> None:
    """The newest come by themselves; what no store refers to any more is given up then."""
    machine = Machine(limit=30 * MIB, together=4 * MIB)
    values = [machine.save(str(number), always=True) for number in range(5)]
    machine.end_out()
    assert machine.moves.statistics().host == 4 * MIB
    machine.drop(values[1])
    old = values[0].handle
    own = machine.moves.split(old, values[2:4])
    machine.handles.append(own)
    assert [value.handle for value in values[:4]] == [old, old, own, own]
    assert (old.values, old.rank, old.nbytes, old.live) == ([values[0]], 0, MIB, 1)
    assert (own.rank, own.nbytes, own.live, own.state) == (3, 2 * MIB, 2, SavedState.AWAY)
    now = machine.moves.statistics()
    assert (now.host, now.discarded, machine.space.used) == (3 * MIB, MIB, 3 * MIB)
    machine.orders.clear()
    machine.start(machine.moves.wanted(own, machine.now_ns))
    assert machine.orders == ["in 2"]


def test_a_value_that_is_read_before_it_has_left_stays() -> None:
    machine = Machine(limit=None)
    value = machine.save("a", always=True)
    machine.save("b", always=True)
    assert value.handle.state is SavedState.LEAVING
    assert machine.read(value)
    machine.end_out()
    assert machine.moves.statistics().discarded == MIB
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


def test_a_value_that_all_iterations_save_brings_back_the_next_ones_alone() -> None:
    """The gradient's first iteration reads it at the place of its last save, not of its first."""
    machine = Machine(limit=100 * MIB)
    shared = machine.save("w")
    values, places = [machine.save("y", always=True)], [shared.rank]
    for _ in range(7):
        places.append(machine.moves.again(shared, "w"))
        values.append(machine.save("y", always=True))
    while machine.out:
        machine.end_out(taken_ns=1)
    assert machine.read(values.pop())
    machine.orders.clear()
    machine.start(machine.moves.wanted(shared.handle, machine.now_ns, places.pop()))
    assert [values.index(handle.values[0]) for handle in machine.into] == [6, 5]
    assert shared.handle.group.until == 5
    for _ in places:
        machine.moves.dropped(shared)


def test_a_buffer_that_is_read_twice_counts_the_time_to_the_next_one() -> None:
    pace = Pace()
    for now_ns, rank in ((0, 3), (400, 3), (1_000, 2), (1_400, 2), (2_000, 1)):
        pace.note(now_ns, rank, -1)
    assert pace.step_ns() == pytest.approx(1_000)


def test_nothing_comes_ahead_into_memory_that_others_need() -> None:
    machine = Machine(limit=10 * MIB)
    values = [machine.save(str(number), always=True) for number in range(8)]
    while machine.out:
        machine.end_out(taken_ns=1 << 40)
    machine.others = 5 * MIB
    assert machine.read(values[-1])
    assert machine.orders[7:] == ["in 6"]  # 7 MiB with it, and 7.5 are 75 %
    machine.check()


@pytest.mark.parametrize(
    ("is_measured", "takes", "ahead"), [(True, 1, 4), (True, 3, 2), (False, 1, 1)], ids=["plenty", "tight", "unknown"]
)
def test_values_that_come_further_ahead_leave_room_for_iterations(is_measured: bool, takes: int, ahead: int) -> None:
    """Room is left for the rest of this iteration and for the next; values come less far ahead while the need is
    unmeasured.
    """
    machine = Machine(limit=10 * MIB)
    values = [machine.save(str(number), always=True) for number in range(8)]
    while machine.out:
        machine.end_out(taken_ns=1 << 40)  # so that all would come late
    loop = machine.working_set(takes * MIB) if is_measured else WorkingSet(machine)
    machine.others = MIB
    assert machine.ask(loop)
    assert machine.read(values[-1])
    assert machine.orders[7:] == [f"in {number}" for number in range(6, 6 - ahead, -1)]
    machine.check()


def test_a_failed_copy_out_leaves_the_value_where_it_was_and_is_not_tried_again() -> None:
    """Fault F31: the device's copy is kept, and nothing is half written."""
    machine = Machine(limit=None)
    value = machine.save("a", always=True)
    machine.save("b", always=True)
    machine.moves.stays(machine.out.pop())
    assert value.handle.state is SavedState.KEPT
    assert machine.space.used == 0
    machine.save("c", always=True)
    assert machine.orders == ["out a", "out b"]
    machine.check()


def test_a_value_with_no_place_to_go_stays_and_how_much_was_missing_is_known() -> None:
    machine = Machine(limit=2 * MIB, space=Space("host", MIB))
    for number in range(4):
        machine.save(str(number))
    assert machine.orders == ["out 0"]
    assert machine.moves.missing == MIB


def test_the_youngest_run_makes_room() -> None:
    """Of two runs the younger one's values go, so that the older one ends."""
    machine = Machine(limit=10 * MIB)
    for number in range(4):
        machine.save(f"old {number}", run=1)
    for number in range(4):
        machine.save(f"young {number}", run=2)
    assert machine.orders == ["out young 0"]


@dataclass
class Measured:
    """An account whose highest marks are told."""

    limit: int | None = 100
    used: int = 0
    total: int = 0
    fed: int = 0
    most: int = 0

    @property
    def at_most(self) -> int:
        return self.used

    def lap(self) -> tuple[int, int]:
        most, self.most = self.most, self.used
        return most, self.used

    def iteration(self, most: int, total: int) -> None:
        self.most = max(self.most, self.used + most)
        self.total += total


def test_no_iteration_takes_fed_bytes() -> None:
    """A feed counts from the iteration that saves it first, which took no more than others."""
    account = Measured()
    gate, working_set = MemoryGate(account), WorkingSet(account)
    gate.asks(1, (working_set,))
    account.iteration(5 + 30, 9 + 30)
    account.used, account.fed = account.used + 30, 30
    gate.asks(1, (working_set,))
    account.iteration(4, 4)
    gate.asks(1, (working_set,))
    assert (working_set.most, working_set.total) == (5, 9)


@pytest.mark.parametrize("is_placed", [True, False])
def test_an_iteration_of_an_outer_loop_is_measured_until_an_inner_one_begins(is_placed: bool) -> None:
    """The gate asks for that measurement, and the whole takes as much as all parts. A loop in a region knows no outer
    loop.
    """
    account = Measured()
    outer = WorkingSet(account, is_around=True)
    gate, inner = MemoryGate(account), WorkingSet(account, outer if is_placed else None)
    for _ in range(4):
        gate.asks(1, (outer,))
        account.iteration(3, 3)
        for _ in range(2):
            gate.asks(1, (inner,))
            account.iteration(7, 8)
    assert (outer.most, outer.total) == (3, 3 + 2 * 8)
    assert (inner.most, inner.total) == (7, 8)
    assert outer.fits(2)


def test_what_an_iteration_takes_is_measured_from_one_to_the_next() -> None:
    """The most of any, and in all; none that ran beside another."""
    account = Measured()
    gate, working_set = MemoryGate(account), WorkingSet(account)
    for most, total in ((5, 9), (7, 8), (4, 4)):
        assert gate.asks(1, (working_set,))
        assert not working_set.fits(3)  # nobody knows well enough yet
        account.iteration(most, total)
    assert gate.asks(1, (working_set,))
    assert (working_set.most, working_set.total) == (7, 9)
    assert working_set.fits(11)
    assert not working_set.fits(12)
    account.iteration(50, 50)  # of several iterations
    gate.asks(1, (working_set,))
    assert (working_set.most, working_set.total) == (7, 9)
    account.iteration(3, 3)
    gate.asks(2, (WorkingSet(account),))
    account.iteration(60, 60)  # of somebody else
    gate.asks(1, (working_set,))
    assert (working_set.most, working_set.total) == (7, 9)


def test_a_measurement_beside_another_run_stands_until_a_run_is_alone() -> None:
    """The measurement is too high, and a run that is retried alone would have too little room for it."""
    account = Measured()
    gate, working_set = MemoryGate(account), WorkingSet(account)
    for others in (1, 0, 1, 0):
        for run in range(others):
            gate.enters(8 + run)
        gate.enters(7)
        gate.asks(7, (working_set,))
        account.iteration(50 if others else 5, 60 if others else 6)
        gate.asks(7, (working_set,))
        assert (working_set.most, working_set.total) == ((50, 60) if others else (5, 6))
        for run in (7, 8):
            gate.leaves(run)


def test_one_iteration_is_enough_to_go_by_where_much_is_free() -> None:
    account = Measured(limit=1000)
    gate, working_set = MemoryGate(account), WorkingSet(account)
    assert gate.asks(1, (working_set,))
    assert not working_set.fits(2)
    account.iteration(5, 10)
    assert gate.asks(1, (working_set,))
    assert working_set.fits(25)  # four times as much, at most
    assert not working_set.fits(26)


def test_values_whose_copies_back_could_not_start_come_ahead_later() -> None:
    """Behaviour 68: there was no room, or the card is lost, and then they are counted as away from it."""
    machine = Machine(limit=None)
    values = [machine.save(str(number), always=True) for number in range(8)]
    while machine.out:
        machine.end_out(taken_ns=1 << 40)
    machine.orders.clear()
    assert machine.read(values[7])
    assert sorted(handle.rank for handle in machine.moves.away()) == list(range(7))
    ahead, machine.into = machine.into, []
    for handle in ahead:
        machine.moves.refused(handle)
    assert sorted(handle.rank for handle in machine.moves.away()) == list(range(7))
    machine.check()
    assert not machine.read(values[6])
    assert machine.orders == [*(f"in {number}" for number in range(6, -1, -1))] * 2


def test_an_iteration_begins_once_copies_out_have_made_room_for_it() -> None:
    machine = Machine(limit=10 * MIB)
    loop = machine.working_set(3 * MIB)
    for number in range(6):
        assert machine.ask(loop)
        machine.save(str(number))
    machine.others = 2 * MIB
    assert not machine.ask(loop)  # 8 of 10 MiB are held
    assert machine.orders == ["out 0", "out 1", "out 2", "out 3"]  # for the next iteration, too
    machine.end_out()
    assert machine.admits()
    machine.check()


@pytest.mark.parametrize("fails", [False, True])
def test_an_iteration_begins_once_unneeded_copies_out_have_ended(fails: bool) -> None:
    """Fault F32: such a copy holds the memory of a value that was read for the last time before it had left."""
    machine = Machine(limit=10 * MIB)
    loop = machine.working_set(3 * MIB)
    values = [machine.save(str(number)) for number in range(8)]
    assert machine.orders == ["out 0"]
    machine.others = 2 * MIB
    assert machine.read(values[0])
    assert machine.read(values[7])
    assert machine.used == 9 * MIB
    for value in values[1:7]:
        value.handle.has_moved = True  # so that nothing else can go
    assert not machine.ask(loop)
    assert not machine.admits()
    assert machine.moves.is_short
    if fails:
        machine.moves.stays(machine.out.pop())
    else:
        machine.end_out()
    assert machine.used == 8 * MIB
    assert machine.admits()  # nothing else will make room
    assert not machine.moves.is_short
    for value in values[1:7]:
        assert machine.read(value)
    machine.others = 0
    machine.leave(1)
    machine.check_end()


def test_an_iteration_that_is_too_large_begins_once_nothing_can_go_any_more() -> None:
    """The iteration then fails by itself, with its numbers."""
    machine = Machine(limit=4 * MIB)
    loop = machine.working_set(9 * MIB)
    machine.save("0")
    assert not machine.ask(loop)
    machine.end_out()
    assert machine.admits()


def test_a_younger_run_waits_for_the_older_and_all_its_values_go() -> None:
    """Fault F32: the older one waits for copies alone, whatever the younger one holds."""
    machine = Machine(limit=10 * MIB)
    loop = machine.working_set(2 * MIB)
    machine.gate.enters(1)
    machine.gate.enters(2)
    for number in range(2):
        for run in (2, 1):
            assert machine.ask(loop, run)
            machine.save(f"{run}.{number}", run=run)
    machine.others = 3 * MIB
    assert not machine.ask(loop, run=2)  # 2 MiB for it and 2 for the older one, but 3 are free
    assert machine.orders == ["out 2.0", "out 2.1"]
    assert machine.ask(loop, run=1)
    while machine.out:
        machine.end_out()
    assert machine.admits(run=2)
    machine.others = 6 * MIB
    assert not machine.ask(loop, run=2)
    assert not machine.admits(run=2)  # though nothing is in flight
    machine.leave(1)
    assert machine.admits(run=2)


@pytest.mark.parametrize("aged", [(), (1,), (2,)])
def test_runs_that_do_more_than_compute_wait_for_no_run_and_no_run_for_them(aged: tuple[int, ...]) -> None:
    """Each of the runs may wait for work of the other."""
    machine = Machine(limit=10 * MIB, others=9 * MIB)
    for run in aged:
        machine.gate.enters(run)
    loop = machine.working_set(2 * MIB)
    assert machine.ask(loop, run=1)
    assert machine.ask(loop, run=2)


class Loop:
    """A forward loop that saves, and a gradient loop that reads each value once, from the last to the first.

    Each step asks before it begins, and may have to wait.
    """

    def __init__(self, run: int, count: int, always: bool, machine: Machine, needs: int | None) -> None:
        self.run, self.count, self.always = run, count, always
        self.values: list[SavedValue] = []
        self.left = count
        self.waits = self.cancelled = self.paused = False
        self.working_set = None if needs is None else machine.working_set(needs)
        self.is_admitted = needs is None
        machine.gate.enters(run)

    def step(self, machine: Machine) -> None:
        if not self.is_admitted:
            assert self.working_set is not None
            self.is_admitted = machine.ask(self.working_set, self.run)
            self.paused = not self.is_admitted
            return
        if self.waits:  # for what it asked for
            machine.drop(self.values[self.left - 1])
            self.waits = False
        elif len(self.values) < self.count and self.left == self.count:
            label = f"{self.run}.{len(self.values)}"
            self.values.append(machine.save(label, run=self.run, always=self.always))
            self.is_admitted = self.working_set is None
            return
        elif not machine.read(self.values[self.left - 1]):
            self.waits = True
            return
        self.left -= 1
        self.is_admitted = self.working_set is None
        if not self.left:
            machine.leave(self.run)

    def can_step(self) -> bool:
        waits = self.waits and self.values[self.left - 1].handle.state is SavedState.COMING
        return not (self.cancelled or self.paused or waits or self.left == 0)

    def cancel(self, machine: Machine) -> None:
        self.cancelled, self.paused = True, False
        for value in self.values[: self.left]:
            machine.drop(value)
        machine.leave(self.run)

    def look(self, machine: Machine) -> None:
        """Go on, if that may be now."""
        if self.paused and machine.admits(self.run):
            self.paused, self.is_admitted = False, True

    def key(self) -> tuple[object, ...]:
        return len(self.values), self.left, self.waits, self.cancelled, self.paused, self.is_admitted


def _key(machine: Machine, loops: list[Loop]) -> tuple[object, ...]:
    values = tuple((x.label, x.state, x.copying, x.has_moved, x.live) for x in machine.handles)
    queues = tuple(x.label for x in machine.out), tuple(x.label for x in machine.into)
    return frozenset(values), queues, tuple(loop.key() for loop in loops)


def _events(machine: Machine, loops: list[Loop], *, with_faults: bool) -> list[tuple[str, int]]:
    events = [("step", number) for number, loop in enumerate(loops) if loop.can_step()]
    if with_faults:
        live = [number for number, loop in enumerate(loops) if loop.left and loop.values and not loop.cancelled]
        events += [("cancel", number) for number in live]
        events += [("fail", 0)] if machine.out else []
    return events + [("out", 0)] * bool(machine.out) + [("in", 0)] * bool(machine.into)


def _do(event: str, number: int, machine: Machine, loops: list[Loop]) -> None:
    if event == "step":
        loops[number].step(machine)
    elif event == "cancel":
        loops[number].cancel(machine)
    elif event == "out":
        machine.end_out()
    elif event == "fail":
        machine.moves.stays(machine.out.pop(0))
    else:
        machine.end_in()
    for loop in loops:
        loop.look(machine)


def explore(
    limit: int | None,
    counts: tuple[int, int],
    always: tuple[bool, bool],
    *,
    needs: int | None = None,
    with_faults: bool = True,
    together: int = 0,
) -> int:
    """Every order of all events; how many different situations there were."""
    machine = Machine(limit=limit, together=together)
    open_ = [(machine, [Loop(k + 1, count, always[k], machine, needs) for k, count in enumerate(counts)])]
    seen = set()
    lock = machine.space._lock
    ends = 0
    while open_:
        machine, loops = open_.pop()
        key = _key(machine, loops)
        if key in seen:
            continue
        seen.add(key)
        machine.check()
        assert machine.out or not loops[0].paused, "the oldest waits for nothing"
        events = _events(machine, loops, with_faults=with_faults)
        for event, number in events:
            after = deepcopy((machine, loops), {id(lock): lock})
            _do(event, number, *after)
            open_.append(after)
        if not events:
            machine.check_end()
            assert all(loop.left == 0 or loop.cancelled for loop in loops), "a loop waits for nothing"
            ends += 1
    assert ends
    return len(seen)


@pytest.mark.slow
@pytest.mark.parametrize("needs", [None, MIB, 2 * MIB])
@pytest.mark.parametrize("limit", [None, 3 * MIB, 1])
@pytest.mark.parametrize("always", [(True, True), (False, True), (False, False)])
def test_every_interleaving_of_two_loops(limit: int | None, always: tuple[bool, bool], needs: int | None) -> None:
    """Four values in all: saves, reads, ends and failures of copies, cancels; invariants hold after each."""
    assert explore(limit, (2, 2), always, needs=needs) > 20


@pytest.mark.slow
@pytest.mark.parametrize("needs", [None, 2 * MIB])
@pytest.mark.parametrize("limit", [7 * MIB, 100 * MIB])
@pytest.mark.parametrize("always", [(True, True), (True, False)])
def test_every_interleaving_of_two_loops_whose_values_move_together(
    limit: int, always: tuple[bool, bool], needs: int | None
) -> None:
    """Three values of a loop, of which two fit into one copy; with failures and cancels."""
    assert explore(limit, (3, 2), always, needs=needs, together=2 * MIB) > 20


@pytest.mark.slow
@pytest.mark.parametrize("needs", [None, MIB, 2 * MIB])
@pytest.mark.parametrize("limit", [5 * MIB, 3 * MIB])
def test_every_interleaving_of_two_loops_of_three_values(limit: int, needs: int | None) -> None:
    """Six values in all; copies succeed and no reader gives up."""
    assert explore(limit, (3, 3), (False, False), needs=needs, with_faults=False) > 300
