"""The quickest treatment of a loop's saved values that fits: a choice by figures alone.

A loop runs forward and then its gradient runs back. The values of an iteration may stay, or move away and back; some of
them may be computed again in the gradient's body (a `Saving`). The iterations behind the first ones may be run again in
segments (`asyncflow.compiler.memory.recomputation.segments`). A `Way` is one choice of all of these for a loop:

- *keep* takes the time of both loops alone;
- *moving* takes the time of the copies that the loops are too short to hide: those out while the forward loop runs,
  those back while the gradient runs. The values saved first are read last, so that their copies have the most time;
- *computing again* takes the time of the kernels, in each iteration;
- *running again* takes the time of the forward loop, for the iterations that are not kept.

A card computes, its host launches, and its link copies, each on its own: while a loop runs, the busiest decides. So the
time of a way is convex in the number of iterations that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf, sqrt
from typing import NamedTuple

_EQUAL = 1.001
"""Ratio of times up to which ways count as equally quick; then the way that moves and changes least is taken."""


_SETS = 2
"""Sets of values that move together and are held at a time: a set on its way, and a set that is saved or read."""


class Work(NamedTuple):
    """The time of launched work: on the device, and on the host, which launches ahead; in nanoseconds."""

    device_ns: float = 0.0
    host_ns: float = 0.0

    def plus(self, other: Work, times: float = 1.0) -> Work:
        """Return this work, and the other `times` times."""
        return Work(self.device_ns + times * other.device_ns, self.host_ns + times * other.host_ns)

    def times(self, count: float) -> Work:
        """Return the work `count` times."""
        return Work().plus(self, count)

    @property
    def ns(self) -> float:
        """The duration."""
        return max(self)


_NOTHING = Work()


@dataclass(frozen=True, slots=True)
class Saving:
    """One way to choose the values that are saved, and computed again.

    Attributes:
        sizes: bytes an iteration of the values that may move, the largest first.
        fixed: bytes an iteration of all others that are saved.
        again: work done again in an iteration of the gradient.
        copies: how many copies an iteration each of `sizes` takes, if not one: a loop inside saves a value often.
        of_variables: bytes an iteration of the loop's own variables, which a segment's first iteration has in common
            with the segment's checkpoint.
        again_bytes: bytes of the values computed again, in one iteration of the gradient.
    """

    sizes: tuple[int, ...]
    fixed: int = 0
    again: Work = _NOTHING
    copies: tuple[int, ...] = ()
    of_variables: int = 0
    again_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes an iteration."""
        return sum(self.sizes) + self.fixed

    @property
    def times(self) -> Sequence[int]:
        """Number of times that each of `sizes` is saved in an iteration."""
        return self.copies or (1,) * len(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFigures:
    """Figures that a choice for a loop depends on.

    Attributes:
        iterations: how many it has.
        forward, backward: one iteration, of the loop and of its gradient.
        savings: the possible sets of saved values; the first is as the program stands.
        room: bytes that the saved values may take.
        spare: bytes that a set of values may take beside that, or less.
        copy_ns_per_byte: of a copy, out or back; None where nothing moves.
        start_ns: the host's time for a copy.
        part_ns: the host's time for one more value in a copy.
        together: most bytes of several values that move by one copy.
        least_together: bytes that move by one copy whatever the room is.
        beside: number of sets of values that may be read in part at a time.
        away: bytes that may be away at a time.
        unseen_ns: the time for which the host may not see that copies out have ended, so that it goes on where there
            is room.
        checkpoint_bytes: of the loop's variables, which begin a segment; None if it may not run again.
    """

    iterations: int
    forward: Work
    backward: Work
    savings: Sequence[Saving]
    room: float
    spare: float = 0.0
    copy_ns_per_byte: float | None = None
    start_ns: float = 0.0
    part_ns: float = 0.0
    together: float = 0.0
    least_together: float = 0.0
    beside: int = 1
    away: float = inf
    unseen_ns: float = 0.0
    checkpoint_bytes: int | None = None

    @property
    def usual_ns(self) -> float:
        """The time if everything is kept."""
        return self.iterations * (self.forward.ns + self.backward.ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way: one choice for a loop.

    Attributes:
        saving: which of the `LoopFigures.savings`.
        moved: number of its values that move, the first ones; values of late iterations stay once there is no place.
        kept: number of first iterations that keep their saved values; the others run again.
        length: of the segments in which they do.
        held: most bytes held at a time.
        away: bytes that move, as far as there is a place for them.
        together: most bytes of them that move by one copy, unless one value has more.
        ns: the time of the run.
        exposed_ns: the part of it that waits for copies.
    """

    saving: int = 0
    moved: int = 0
    kept: int
    length: int = 0
    held: float
    away: int = 0
    together: float = 0.0
    ns: float
    exposed_ns: float = 0.0


def segment_length(count: int, checkpoint_bytes: int, nbytes: int) -> int:
    """The length of segments with which least is held at a time, of `count` iterations that run again."""
    ratio = checkpoint_bytes / nbytes if checkpoint_bytes and nbytes else 1.0
    return max(1, min(count, round(sqrt(count * ratio))))


def choose_way(figures: LoopFigures) -> Way:
    """Return the quickest way that fits into the room, or else the way that holds least."""
    ways = list(_ways(figures))
    if fits(ways[0], figures):
        return ways[0]  # no change needed
    fitting = [way for way in ways if fits(way, figures)]
    if not fitting:
        return min(ways, key=lambda way: (way.held, way.ns))
    most_ns = _EQUAL * min(way.ns for way in fitting)
    quick = [way for way in fitting if way.ns <= most_ns]
    return min(quick, key=lambda way: (way.away, way.saving, figures.iterations - way.kept, way.ns))


def way_of(figures: LoopFigures, saving: int, moved: int, kept: int) -> Way:
    """The way that moves the first `moved` values of a saving, in all of the first `kept` iterations."""
    chosen, count = figures.savings[saving], figures.iterations
    going = sum(chosen.sizes[:moved])
    again, length, together, held = count - kept, 0, 0.0, float(kept * (chosen.nbytes - going) + chosen.again_bytes)
    if again:
        assert figures.checkpoint_bytes is not None
        length = segment_length(again, figures.checkpoint_bytes, chosen.nbytes)
        # The loop's initial values are held anyway, and are the first segment's checkpoint if no iterations are kept.
        checkpoints = ceil(again / length) + bool(kept)
        held += checkpoints * figures.checkpoint_bytes + length * chosen.nbytes - chosen.of_variables
    forward = figures.forward.times(count)
    backward = figures.backward.plus(chosen.again).times(count).plus(figures.forward, again)
    usual_ns = forward.ns + backward.ns
    away = int(min(kept * going, figures.away))
    if going:
        share = away / max(kept * going, 1)
        # Values move together as far as a set has room that is saved or read. The previous set may still be in flight
        # if both have room. A set ends where an iteration does: else two sets would be read in one iteration.
        room = figures.room + figures.spare
        each = sum(size / times for size, times in zip(chosen.sizes[:moved], chosen.times, strict=False))
        most = moved and ceil(figures.start_ns / figures.part_ns / moved) * each if figures.part_ns else inf
        together = min(most, max(0.0, room - held) / figures.beside)
        together -= together % each if together > each else 0.0
        together = min(figures.together, max(figures.least_together, together), away)
        alone = held + share * _moving(chosen, moved, kept)
        held += _SETS * together
        values = sum(chosen.copies[:moved]) or moved
        copies_each = min(values, going / together) if together else values
        starts_ns = share * (figures.start_ns * copies_each + figures.part_ns * (values - copies_each))
        copies, link_ns = Work(0.0, kept * starts_ns), away * (figures.copy_ns_per_byte or 0.0)
        step_ns = figures.forward.plus(Work(0.0, starts_ns)).ns
        # Bytes in flight, and bytes still queued for the link when the last iteration saves.
        left = max(0.0, 1 - kept * step_ns / link_ns) if link_ns else 0.0
        held = max(alone, min(held, room)) + away * left
        held += kept * going - away  # values that find no room elsewhere stay
        unseen = min(kept, figures.unseen_ns / step_ns) * share * going if step_ns else 0.0
        held = max(held, min(held + unseen, figures.room))
        ns = max(forward.plus(copies).ns, link_ns) + max(backward.plus(copies).ns, link_ns)
    else:
        ns = usual_ns
    return Way(
        saving=saving,
        moved=moved,
        kept=kept,
        length=length,
        held=held,
        away=away,
        together=together,
        ns=ns,
        exposed_ns=ns - usual_ns,
    )


def _moving(saving: Saving, moved: int, kept: int) -> float:
    """Return the bytes of values on their way: of each node the last two that it has saved, in an inner loop maybe."""
    sizes = zip(saving.sizes[:moved], saving.times, strict=False)
    return sum(min(2, kept * count) * size / count for size, count in sizes)


def fits(way: Way, figures: LoopFigures) -> bool:
    """Return True if there is room for the way."""
    return way.held <= figures.room + (max(figures.spare, 0.0) if way.together else 0.0)


def _ways(figures: LoopFigures) -> Iterator[Way]:
    """Yield the ways that may be the best, beginning with the way that keeps everything."""
    for number, saving in enumerate(figures.savings):
        most = 0 if figures.copy_ns_per_byte is None else len(saving.sizes)
        for moved in range(most + 1):
            yield way_of(figures, number, moved, figures.iterations)
            if figures.checkpoint_bytes is not None:
                yield from _in_part(figures, partial(way_of, figures, number, moved))


def _in_part(figures: LoopFigures, way: Callable[[int], Way]) -> Iterator[Way]:
    """Yield the ways with the quickest number of kept iterations, among all numbers and among numbers that fit."""
    most = _last(figures.iterations, lambda kept: fits(way(kept), figures))
    for end in (figures.iterations, most):
        yield way(_last(end, lambda kept: way(kept).ns <= way(kept - 1).ns))


def _last(end: int, holds: Callable[[int], bool]) -> int:
    """Return the last number up to `end` for which `holds` is true, as for all before it; 0 if for none."""
    low, high = 0, end + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
