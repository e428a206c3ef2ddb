"""Pass: decides which saved values stay, move or are computed again, for loops on devices with a limit.

A plan is made for what runs are predicted to hold and to take (`loop_costs`). As long as that fits, nothing is changed.
Else each loop gets the quickest way that fits (`memory_choices`): the values that move do so from the first iteration
on; others are computed again in the gradient's body, as the minimum cut chooses them for a price of memory
(`choose_saved`); and iterations behind the first ones run again in segments (`segments`). All else that can move still
does so when memory is short.

If a session asks for all values to be kept, or to move, nothing is chosen: the outcome is predicted and reported.

If only a run knows the number of iterations, as many keep their values as fit, and later ones run again, in segments
that grow. Or, if moving takes less time, values move once memory is short. A loop that was asked to move all it saves
(`while_loop(swap_memory=True)`) does, as long as there is a place for it.

The values of an inner loop are chosen with the outer loop's: in each iteration of the outer loop all of them stay, or
move. Where only a run knows how large they are, the most that they may be counts (`largest`). Three kinds of
loops are left alone, and a note says so: loops that save values of any size, loops on several devices, and loops whose
values two loops' gradients read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from math import ceil, inf
from typing import Literal, NamedTuple, TypeAlias

from asyncflow.autodiff.stores.saved_values import NEW_STORE
from asyncflow.compiler.memory.largest import largest_spec, most_iterations
from asyncflow.compiler.memory.live_bytes import standing_bytes
from asyncflow.compiler.memory.loop_costs import LoopCosts
from asyncflow.compiler.memory.memory_choices import LoopFigures, Saving, Way, Work, choose_way, fits, way_of
from asyncflow.compiler.memory.recomputation.segments import SegmentedLoop, loop_to_segment
from asyncflow.compiler.memory.saving.choose_saved import SavedChange, nbytes_of
from asyncflow.compiler.memory.store_paths import StorePaths, stores_of
from asyncflow.compiler.program.loops.counters import trip_count
from asyncflow.compiler.program.purity import may_run_again
from asyncflow.devices.machine.cost import SLICE_NS
from asyncflow.devices.memory import format_bytes
from asyncflow.devices.protocol import Device
from asyncflow.devices.saved.swap import FULL
from asyncflow.errors import SourceLocation
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import CondNode, WhileNode
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import is_static

_PRICES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
"""Nanoseconds of computing again that a byte held in all iterations is worth: one cut is tried for each."""

_KEPT = 0.75
"""Share of the room for iterations that keep their values, if the number of iterations is unknown."""

_LONG = 4
"""Factor on the number of fitting iterations, with which the choice between moving values and running iterations
again is made.
"""

_UNSEEN_SLICES = 3.5
"""Slices of a region for which a host that launches ahead does not notice that copies have ended.

Measured with the programs of `tests/conformance/test_memory_nested.py` on a simulated V100, with limits of 0.3, 0.4 and
0.5 of their need: predictions are off by at most 9 %. With 0, 3, 4 and 6 slices it is 32, 12, 11 and 28 %.
"""

_SETS_FULL = 0.92
"""Share of the limit that values which move together may take. A set that finds no room is taken apart."""

_LESS = 100 << 20
"""Bytes less of memory, whose cost `PlannedLoop.explain` tells."""

Asked: TypeAlias = Literal["keep", "swap"]
"""Treatment of all saved values that a session may ask for, in place of a choice."""

_ALL: Mapping[Asked, str] = {
    "keep": "all its values are kept",
    "swap": "its values of 64 KiB and more move from the first byte on, if the device can move them",
}

UNPLANNED = '; its saved values are not planned for the limit: saved_values="recompute" can hold less'
"""End of the note on a loop without a prediction that may run again for its gradient."""


@dataclass(frozen=True, slots=True)
class PlannedValue:
    """A value saved by a loop, or by an inner loop, and its treatment.

    Attributes:
        name: name of the node that makes it.
        nbytes: bytes in an iteration of the outermost loop.
        choice: ``"keep"``, ``"swap"`` or ``"recompute"``.
        ns: an iteration's time of its copies, one way, or of computing it again.
    """

    name: str
    nbytes: int
    choice: str
    ns: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoop:
    """The choice for the values that a loop saves, and its predicted cost.

    Attributes:
        name: the loop's.
        location: where it was written.
        limit: the memory limit of its device, in bytes.
        standing: bytes that are held besides.
        figures: the figures that the choice was made from.
        way: the choice.
        values: the choice for each value; empty if nothing is changed.
        asked: ``"keep"`` or ``"swap"`` if the session asks for that way, and nothing was chosen.
        least_limit: the limit in which the ways of all loops of the device are predicted to fit.
        has_usual_blocks: sums over iterations are made in the blocks that they would be made in without a limit.
    """

    name: str
    location: SourceLocation
    limit: int
    standing: int
    figures: LoopFigures
    way: Way
    values: tuple[PlannedValue, ...] = ()
    asked: Asked | None = None
    least_limit: int = 0
    has_usual_blocks: bool = True

    @property
    def held(self) -> int:
        """Bytes that are predicted to be held at most."""
        return self.standing + round(self.way.held)

    def advice(self) -> str:
        """Return a line for people that says which limit is predicted to do; empty if this one is."""
        if fits(self.way, self.figures):
            return ""
        least = self.least_limit
        way = "in the way that holds least" if self.asked is None else f"with saved_values={self.asked!r}"
        moving = self.way.kept * sum(self.figures.savings[self.way.saving].sizes[: self.way.moved])
        place = f" ({format_bytes(self.way.away)} of the {format_bytes(moving)} that would move have a place to go)"
        return (
            f"{way} loop {self.name} ({self.location}) is predicted to hold {format_bytes(self.held)}"
            f"{place if self.way.away < moving else ''}; "
            f"memory_limit={least:_} ({format_bytes(least)}) is predicted to be enough"
        )

    @property
    def kept_all(self) -> int:
        """Bytes that would be held if all values were kept."""
        return self.standing + self.figures.iterations * self.figures.savings[0].nbytes

    def explain(self) -> Iterator[str]:
        """Lines for people."""
        figures, way = self.figures, self.way
        count = figures.iterations
        head = f"loop {self.name} ({self.location}): {count:,} iterations, limit {format_bytes(self.limit)}"
        if not self.values:
            yield f"{head}, holds {format_bytes(self.kept_all)}: all is kept"
            return
        yield f"{head}, would hold {format_bytes(self.kept_all)}"
        width = max(len(value.name) for value in self.values)
        yield f"  {'value':<{width}}  bytes/iteration  {'choice':<9}  costs/iteration"
        for value in self.values:
            size = format_bytes(value.nbytes)
            yield f"  {value.name:<{width}}  {size:<15}  {value.choice:<9}  {self._cost(value)}".rstrip()
        if way.kept < count:
            again = f"iterations {way.kept:,} to {count - 1:,}" if way.kept else "all iterations"
            yield f"  {again} run again for the gradient, in segments of {way.length:,}: {_ms(figures.forward.ns)} each"
        if not self.has_usual_blocks:
            yield "  sums over iterations are made in smaller blocks than without a limit, and round differently"
        predicted = (
            f"predicted: {format_bytes(self.held)}, {_ms(way.ns / count)} an iteration "
            f"({_ms(figures.usual_ns / count)} without a limit)"
        )
        if self.asked is not None:
            after = " once all of these are away" if way.moved else ""
            yield f"{predicted}; a run that passes the limit{after} fails with OutOfMemoryError"
            return
        room = figures.room - _LESS
        less = choose_way(replace(figures, room=room))
        more = f"cost {_ms((less.ns - way.ns) / count)} an iteration" if less.held <= room else "do not fit"
        yield f"{predicted}; {self.advice() or f'the next 100 MiB less {more}'}"

    def _cost(self, value: PlannedValue) -> str:
        if value.choice == "recompute":
            return f"{_ms(value.ns)}, in the gradient's body"
        if value.choice == "keep":
            return ""
        moved = sum(self.figures.savings[self.way.saving].sizes[: self.way.moved])
        late_ns = self.way.exposed_ns / self.figures.iterations * value.nbytes / max(moved, 1)
        behind = "the rest" if late_ns else "all"
        return f"{_ms(late_ns)} ({_ms(value.ns)} of copies each way, {behind} behind compute)"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.2f} ms" if ns >= 1e5 or not ns else f"{ns / 1e3:.1f} µs"


class MemoryPlan(NamedTuple):
    """The choices for a program."""

    loops: tuple[PlannedLoop, ...]
    notes: tuple[str, ...]
    """A line for people for each loop that nothing was predicted for."""


def plan_memory(
    graph: Graph,
    devices: Sequence[Device],
    measured: Mapping[str, float],
    *,
    fuses: bool,
    pending: Callable[[WhileNode], tuple[int, int]] | None = None,
    asked: Asked | None = None,
) -> MemoryPlan:
    """Choose for all loops of `graph`, and change loops that do not fit, in place.

    Args:
        graph: a program before placement.
        devices: of the session.
        measured: mean ns of nodes in earlier runs, by name.
        fuses: whether devices that can fuse elementwise nodes do.
        pending: bytes that a gradient's loop will hold of rows that wait for their product: in the usual blocks, and in
            the least.
        asked: the session's way; nothing is chosen or changed then, only predicted.
    """
    found: dict[str, list[_Candidate]] = defaultdict(list)
    notes: dict[WhileNode, str] = {}
    loops = [node for node in graph.walk() if isinstance(node, WhileNode) and stores_of(node)]
    for loop in loops:
        device = _device_of(loop, devices)
        candidate: _Candidate | str | None = "it is not certain on which device it runs"
        if device is not None:
            if device.memory.limit is None:
                continue
            costs = LoopCosts(device, measured, fuses=fuses and device.capabilities.fuses)
            candidate = _candidate(loop, device, costs)
        if isinstance(candidate, _Candidate):
            found[candidate.device.name].append(candidate)
        elif candidate is not None:
            notes[loop] = f"loop {loop.name} ({loop.location}): nothing is predicted, as {candidate}"
            notes[loop] += f"; {_ALL[asked]}" if asked else UNPLANNED if loop_to_segment(loop).may_run_again else ""
    stores = [store for candidates in found.values() for each in candidates for store in each.inner]
    for inner in [loop for store in stores for loop in store.loops]:
        notes[inner] = f"loop {inner.name} ({inner.location}): its values are chosen with the outer loop's"
    planned = [each for candidates in found.values() for each in _planned(graph, candidates, pending, asked)]
    of_unknown = [each for each in planned if isinstance(each, str)]
    return MemoryPlan(tuple(each for each in planned if not isinstance(each, str)), (*notes.values(), *of_unknown))


def _device_of(loop: WhileNode, devices: Sequence[Device]) -> Device | None:
    """The device that the loop runs on, if that is certain."""
    asked = {node.device for node in loop.body.walk() if node.device is not None}
    if len(devices) == 1:
        return devices[0]
    # Placement comes later, and sees nodes that this plan may add. Only a device requested for all nodes is certain.
    return next((device for device in devices if asked == {device.name}), None)


def _planned(
    graph: Graph,
    candidates: Sequence[_Candidate],
    pending: Callable[[WhileNode], tuple[int, int]] | None,
    asked: Asked | None,
) -> Iterator[PlannedLoop | str]:
    """Yield the choices for the loops of one device: each gets room for the least that it may hold.

    Loops of unknown length are expected to hold the room that others leave, or half of it.
    """
    limit = candidates[0].device.memory.limit
    assert limit is not None
    loops = [each.loop for each in candidates]
    gradients = [reader for each in candidates for reader in each.gradients]
    # Rows pending for a product take memory, too: in usual blocks if these fit, else in the smallest ones. Other block
    # sizes round differently, so results change only if the values would not fit otherwise.
    waiting = [(0, 0) if pending is None else pending(each) for each in gradients]
    standing = standing_bytes([*loops, *gradients]) + sum(least for _, least in waiting)
    blocks = sum(usual - least for usual, least in waiting)
    room = FULL * limit - standing - blocks
    known = sum(each.would_hold for each in candidates if each.iterations)
    unknown = [each for each in candidates if not each.iterations]
    has_usual_blocks = known <= room or not unknown or not blocks
    if not has_usual_blocks:
        room += blocks
    for each in unknown:
        share = max(room - known, room / 2) / len(unknown)
        yield each.keep_first(share) if asked is None else f"{each.unknown}; {_ALL[asked]}"
        room -= share
    counted = [each for each in candidates if each.iterations]
    # Computed now, as `look_for_savings` replaces the savings it depends on.
    would_hold = {each: each.would_hold for each in counted}
    if known > room and asked is None:
        for each in counted:
            each.look_for_savings(graph)
    # With no room, the choice that holds least is taken: the least bytes that each loop needs.
    least = {each: each.way(each.figures(0.0), asked).held for each in counted}
    needed = sum(least.values())
    if has_usual_blocks and blocks and needed > room:
        has_usual_blocks = False
        room += blocks
    standing += blocks if has_usual_blocks else 0
    # Loops of unknown length get at least half of the room, so the others need twice as much room.
    least_limit = ceil((standing + needed * (2 if unknown else 1)) / FULL) + 1
    for each in counted:
        if known > room and asked is None and each is not counted[0]:
            each.look_for_savings(graph)  # earlier loops have changed the program by now
        usual = would_hold[each]
        share = room * usual / known
        # Between the least and the full bytes of each loop, so that all shares add up to the room.
        if needed <= room < known:
            share = least[each] + (room - needed) * (usual - least[each]) / (known - needed)
        figures = each.figures(share)
        way = each.way(figures, asked)
        is_changed = asked is None and (known > room or way.moved > 0)
        planned = PlannedLoop(
            name=each.loop.name,
            location=each.loop.location,
            limit=limit,
            standing=standing,
            figures=figures,
            way=way,
            values=tuple(each.values(way)) if is_changed or asked is not None else (),
            asked=asked,
            least_limit=least_limit,
            has_usual_blocks=has_usual_blocks,
        )
        if is_changed or not (asked or each.loop.swap_memory):
            each.apply(way)
        elif way.moved:
            each.let_move(way.together)
        yield planned


@dataclass(slots=True, eq=False)
class _Candidate:
    """A loop that may be changed.

    Attributes:
        loop: the forward loop.
        device: where it runs.
        costs: of its nodes there.
        iterations: how many; 0 if only a run knows.
        segmented: the means to run it again.
        inner: the stores of loops in it.
        changes: of its saved values, and of the values of each loop in it; the first is none.
        savings: the figures of each.
        movable: the values of each that may move, the largest first.
    """

    loop: WhileNode
    device: Device
    costs: LoopCosts
    iterations: int
    segmented: SegmentedLoop
    inner: Sequence[_InnerStore]
    changes: list[list[SavedChange]] = field(default_factory=list)
    savings: list[Saving] = field(default_factory=list)
    movable: list[list[Tensor]] = field(default_factory=list)

    @property
    def gradients(self) -> list[WhileNode]:
        return [reader.loop for reader in self.segmented.readers]

    @property
    def least_bytes(self) -> float:
        """Bytes of the smallest value that may move."""
        return inf if self.device.swapping is None else self.device.swapping.moves.least_bytes

    @property
    def beside(self) -> int:
        """Number of sets of values that may be read in part at a time: one for each loop that saves them.

        An outer loop reads some before, and some behind, the loops inside it.
        """
        bodies = {value.node.graph for value in self.movable[0]}
        inner = {store.loops[0].body for store in self.inner}
        return len(bodies) + (bool(inner) and not bodies <= inner) or 1

    @property
    def would_hold(self) -> int:
        return self.iterations * self.savings[0].nbytes

    def way(self, figures: LoopFigures, asked: Asked | None) -> Way:
        """The choice: the quickest that fits, or that which the user asks for, if there is room for it."""
        if asked is not None:
            return way_of(figures, 0, len(figures.savings[0].sizes) if asked == "swap" else 0, self.iterations)
        if self.loop.swap_memory and figures.copy_ns_per_byte is not None:
            way = way_of(figures, 0, len(figures.savings[0].sizes), self.iterations)
            if fits(way, figures):
                return way
        return choose_way(figures)

    @property
    def unknown(self) -> str:
        """Text that says that its length is unknown."""
        return f"loop {self.loop.name} ({self.loop.location}): only a run knows how many iterations there are"

    def keep_first(self, room: float) -> str:
        """Keep the values of the iterations that fit into `room`, if only a run knows how many there are.

        Later ones run again in segments of 1, 2, 3, ... iterations, unless it takes less time to move values.
        """
        nbytes = self.savings[0].nbytes
        kept = max(0, int(_KEPT * room / nbytes))
        says = self.unknown
        if self.loop.swap_memory and self.device.swapping is not None:
            return f"{says}; values of 64 KiB move from the first byte on, as was asked"
        # Assume several times as many iterations as fit. With fewer, little needs to be decided.
        figures = replace(self.figures(room), iterations=_LONG * (kept + 1))
        way = choose_way(figures)
        why_not = self.segmented.why_not or (None if self.segmented.refusal is None else "some nodes may not run twice")
        if figures.checkpoint_bytes is None or way.moved:
            why = "that takes less time than running iterations again" if way.moved else why_not
            moves = "move once memory is short" if self.device.swapping is not None else "stay"
            return f"{says}; the values of all of them {moves}, as {why or 'several gradients read them'}"
        loop_to_segment(self.loop).rewrite(None, kept)
        return (
            f"{says}; the first {kept:,} keep {format_bytes(nbytes)} each, and later ones run again for the "
            f"gradient, in segments of 1, 2, 3, ...: {_ms(figures.forward.ns)} each"
        )

    def add(self, change: SavedChange, *inner: SavedChange) -> None:
        """Add a possible set of saved values, in the loop and maybe in inner loops."""
        changes, saved = [change, *inner], self.saved([change, *inner])
        sizes = {value: each.nbytes * each.times for value, each in saved.items()}
        movable = [value for value, each in saved.items() if each.nbytes >= self.least_bytes]
        movable.sort(key=lambda value: -sizes[value])  # prefer few large copies, as starting each takes host time
        large = tuple(sizes[value] for value in movable)
        copies = tuple(saved[value].times for value in movable)
        self.changes.append(changes)
        self.movable.append(movable)
        fixed = sum(sizes.values()) - sum(large)
        variables = set(self.loop.body.inputs[: self.loop.n_vars])
        of_variables = sum(sizes[value] for value in saved if value in variables)
        again = [self.costs.of_nodes(each.again).times(self.times_of(each.loop)) for each in changes]
        live = max(sum(nbytes_of(largest_spec(x), 1) for node in each.again for x in node.outputs) for each in changes)
        self.savings.append(Saving(large, fixed, reduce(Work.plus, again), copies, of_variables, live))

    def times_of(self, loop: WhileNode) -> int:
        """Return the number of iterations of the loop, or of an inner one, in each iteration of this."""
        return next((store.times for store in self.inner if store.loops[0] is loop), 1)

    def saved(self, changes: Sequence[SavedChange]) -> dict[Tensor, _SavedInside]:
        """Return the values saved with some changes of the loop, and maybe of inner loops."""
        saved = [(each, each.saved()) for each in changes]
        found = {x: _SavedInside(size, self.times_of(each.loop)) for each, sizes in saved for x, size in sizes.items()}
        if len(changes) == 1:
            found.update((x.value, _SavedInside(_nbytes(x), x.times)) for x in self.inner)
        return found

    def look_for_savings(self, graph: Graph) -> None:
        """Find the cuts for several prices of memory, in the loop and in inner loops."""
        del self.changes[:], self.savings[:], self.movable[:]
        paths = StorePaths(graph)
        self.add(SavedChange(self.loop, paths, lambda _: None))
        loops = [self.loop, *dict.fromkeys(store.loops[0] for store in self.inner)]
        # Many prices give the same cut. The cut that keeps all values is there already, as the first saving.
        seen = {frozenset(x for loop in loops for x in SavedChange(loop, paths, lambda _: None).kept)}
        for price in _PRICES:
            changes = [SavedChange(loop, paths, partial(self._price, price=price)) for loop in loops]
            kept = frozenset(x for change in changes for x in change.kept)
            if kept not in seen:
                seen.add(kept)
                self.add(*changes)

    def _price(self, value: Tensor, price: float) -> int | None:
        return round(self.costs.of_node(value.node).ns / price) if may_run_again(value.node) else None

    def figures(self, room: float) -> LoopFigures:
        """The figures that the choice depends on."""
        segmented, swapping = self.segmented, self.device.swapping
        may = segmented.may_run_again and len(segmented.readers) == 1
        in_pieces = swapping is not None and swapping.gate.in_pieces
        most = 0.0 if swapping is None else swapping.moves.together if in_pieces else swapping.together
        return LoopFigures(
            iterations=self.iterations,
            forward=self.costs.iteration(self.loop),
            backward=reduce(Work.plus, map(self.costs.iteration, self.gradients)),
            savings=tuple(self.savings),
            room=room,
            spare=0.0 if in_pieces else (_SETS_FULL - FULL) * (self.device.memory.limit or 0),
            copy_ns_per_byte=None if swapping is None else swapping.ns_per_byte,
            start_ns=0.0 if swapping is None else swapping.start_ns,
            part_ns=0.0 if swapping is None else swapping.part_ns,
            together=most,
            least_together=most if in_pieces else 0.0,  # a card may have no larger piece of memory
            beside=self.beside,
            away=0.0 if swapping is None else swapping.room,
            unseen_ns=0.0 if self.device.asynchronous is None else _UNSEEN_SLICES * SLICE_NS,
            checkpoint_bytes=segmented.variable_bytes if may else None,
        )

    def values(self, way: Way) -> Iterator[PlannedValue]:
        """The saved values, and the choice for each."""
        changes, swapping = self.changes[way.saving], self.device.swapping
        moved = set(self.movable[way.saving][: way.moved])
        for value, each in self.saved(changes).items():
            size = each.nbytes * each.times
            if size and value in moved:
                assert swapping is not None
                yield PlannedValue(value.node.name, size, "swap", size * swapping.ns_per_byte)
            elif size:
                yield PlannedValue(value.node.name, size, "keep")
        usual = self.saved(self.changes[0])
        for store in [store for change in changes for store in change.dropped] if way.saving else ():
            if store.value in usual:  # else it takes no memory
                node, (nbytes, times) = store.value.node, usual[store.value]
                yield PlannedValue(node.name, nbytes * times, "recompute", self.costs.of_node(node).ns * times)

    def apply(self, way: Way) -> None:
        """Change the loop. Values that are to stay move only if more is held than was predicted."""
        change, *inside = self.changes[way.saving]
        if way.saving:
            change.apply()
            for each in inside:
                again = SavedChange(each.loop, each.paths, each.price_of)  # by the store paths of the changed program
                if again.gains:
                    again.apply()
        buffers = {each.loop: each.buffer for each in (change, *inside)}
        buffer = change.buffer
        moved = {own(value) for value in self.movable[way.saving][: way.moved] for own in buffers.values()}
        stores = self._stores()
        inner = {store.made: buffers.get(store.loops[0], buffer)(store.value) for store in self._inner_stores()}
        for store in (*stores, *inner):
            store.attrs = {**store.attrs, "moves": "late"}
        # Before the loop's own stores are marked to move always: stores of segments are made with the same attributes,
        # and their few values are read at once.
        if way.kept < self.iterations:
            loop_to_segment(self.loop).rewrite(way.length, way.kept)
        always = {"moves": "always", "together": way.together}
        for store, value in stores.items():
            if buffer(value) in moved:
                store.attrs = {**store.attrs, **always}
        for store, value in inner.items():
            if value in moved:
                store.attrs = {**store.attrs, **always}

    def let_move(self, together: float) -> None:
        """Say how many bytes of its values move by one copy, where all of them move."""
        for store in (*self._stores(), *(each.made for each in self._inner_stores())):
            store.attrs = {**store.attrs, "together": together}

    def _stores(self) -> dict[Node, Tensor]:
        """Return the nodes that make its stores, with the values in them."""
        return {self.loop.inputs[store.output.index].node: store.value for store in stores_of(self.loop)}

    def _inner_stores(self) -> list[_InnerStore]:
        paths = StorePaths(self.loop.graph.root)
        found = [_stored_inside(store.value, paths) for store in stores_of(self.loop) if store.value.dtype == VARIANT]
        return [store for store in found if store is not None]


def _candidate(loop: WhileNode, device: Device, costs: LoopCosts) -> _Candidate | str | None:
    """The loop, or why too little is known of it; None where nothing is to be decided."""
    count, stores = trip_count(loop), stores_of(loop)
    paths = StorePaths(loop.graph.root)
    inner = [_stored_inside(store.value, paths) for store in stores if store.value.dtype == VARIANT]
    known = [store for store in inner if store is not None]
    if count == 0:  # no iteration saves a value
        return None
    if len(known) < len(inner) or (inner and count is None):
        return "only a run knows how much the loops in it save"
    if not all(is_static(largest_spec(store.value).shape) for store in stores):
        return "only a run knows the sizes of its saved values"
    segmented = loop_to_segment(loop)
    if not segmented.readers:
        return segmented.why_not
    found = _Candidate(loop, device, costs, count or 0, segmented, known)
    for inner_loop in {each for store in known for each in store.loops}:
        for store in stores_of(inner_loop):
            gradients = (paths.owners.get(reader.node.graph) for reader in paths.readers(store) or ())
            costs.counts.update(
                (x, most_iterations(inner_loop, paths.owners) or 0) for x in gradients if isinstance(x, WhileNode)
            )
    found.add(SavedChange(loop, paths, lambda _: None))
    return found if found.savings[0].nbytes else None


class _SavedInside(NamedTuple):
    """The memory of a value that a loop, or an inner loop, saves."""

    nbytes: int
    """Bytes of one value."""
    times: int
    """Number of them in an iteration of the outermost loop."""


class _InnerStore(NamedTuple):
    """The store of an inner loop, with the number of values saved in each iteration of the outermost loop."""

    loops: tuple[WhileNode, ...]
    """The loop that saves the values, and the loops around it, without the outermost one."""
    made: Node
    """The node that makes the store."""
    value: Tensor
    """The value in the store."""
    times: int
    """Number of values that are saved in an iteration of the outermost loop."""


def _nbytes(store: _InnerStore) -> int:
    return nbytes_of(largest_spec(store.value), 1)


def _stored_inside(store: Tensor, paths: StorePaths) -> _InnerStore | None:
    """Return the facts about the store of a loop nested to any depth; None if only a run knows how much it may hold."""
    loop = store.node
    while isinstance(loop, CondNode):  # a branch without the loop gives an empty store
        filled = [body.results[store.index] for body in loop.subgraphs]
        filled = [each for each in filled if each.node.op is not NEW_STORE]
        if len(filled) != 1:
            return None
        (store,) = filled
        loop = store.node
    count = most_iterations(loop, paths.owners) if isinstance(loop, WhileNode) else None
    if not isinstance(loop, WhileNode) or count is None:
        return None
    saved = next((each.value for each in stores_of(loop) if each.output is store), None)
    if saved is None:
        return None
    if saved.dtype == VARIANT:  # a store of stores: search one level deeper
        inner = _stored_inside(saved, paths)
        return None if inner is None else inner._replace(loops=(*inner.loops, loop), times=inner.times * count)
    made = loop.inputs[store.index].node
    return _InnerStore((loop,), made, saved, count) if is_static(largest_spec(saved).shape) else None
