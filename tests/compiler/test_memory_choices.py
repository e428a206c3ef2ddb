"""Choices by figures alone, compared with all there are."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.compiler.memory.memory_choices import LoopFigures, Saving, Way, Work, choose_way, segment_length, way_of

MIB = 1 << 20
LSTM = LoopFigures(
    iterations=1_000,
    forward=Work(0.9e6),
    backward=Work(1.5e6),
    savings=(Saving((MIB,) * 6), Saving((MIB,) * 2, again=Work(0.8e6))),
    room=float(1 << 40),
    copy_ns_per_byte=0.08,
    checkpoint_bytes=2 * MIB,
)
"""An LSTM of 512 units over rows of 512 on a k40, more or less."""


def every_way(figures: LoopFigures) -> list[Way]:
    """Each saving, with as many of its values moved, over as many iterations."""
    return [
        way_of(figures, number, moved, kept)
        for number, saving in enumerate(figures.savings)
        for moved in range(1 if figures.copy_ns_per_byte is None else len(saving.sizes) + 1)
        for kept in range(figures.iterations + 1)
        if kept == figures.iterations or figures.checkpoint_bytes is not None
    ]


def fits(way: Way, figures: LoopFigures) -> bool:
    return way.held <= figures.room and way.away <= figures.away


def test_all_is_kept_while_it_fits() -> None:
    way = choose_way(replace(LSTM, room=6_000 * MIB))
    assert (way.saving, way.moved, way.kept, way.away, way.exposed_ns) == (0, 0, 1_000, 0, 0)
    assert way.held == 6_000 * MIB
    assert way.ns == LSTM.usual_ns


def test_what_moves_behind_compute_costs_nothing_and_no_more_moves_than_has_to() -> None:
    way = choose_way(replace(LSTM, room=3_100 * MIB))
    assert (way.saving, way.moved, way.kept, way.exposed_ns) == (0, 3, 1_000, 0)
    assert way.ns == LSTM.usual_ns
    assert way.away == 3_000 * MIB


def test_a_slow_link_has_some_iterations_run_again() -> None:
    """As many as the link cannot take."""
    figures = replace(LSTM, room=1_000 * MIB, copy_ns_per_byte=0.3)
    way = choose_way(figures)
    assert way.saving == 0
    assert way.moved > 0
    assert 0 < way.kept < 1_000
    assert way.ns < min(each.ns for each in every_way(figures) if fits(each, figures) and not each.moved)


def test_a_host_that_is_slow_to_start_copies_has_none() -> None:
    figures = replace(LSTM, room=3_000 * MIB, forward=Work(0.9e6, 0.8e6), backward=Work(1.5e6, 1.4e6), start_ns=5e5)
    way = choose_way(figures)
    assert way.moved == 0
    assert way.kept == pytest.approx(490, abs=20)


def test_where_nothing_moves_the_first_iterations_are_kept_and_the_others_run_again() -> None:
    way = choose_way(replace(LSTM, room=3_000 * MIB, copy_ns_per_byte=None))
    assert way.ns == pytest.approx(LSTM.usual_ns + (1_000 - way.kept) * 0.9e6)
    assert way.length == segment_length(1_000 - way.kept, 2 * MIB, 6 * MIB)


def test_what_may_not_run_again_is_computed_again_one_by_one() -> None:
    way = choose_way(replace(LSTM, room=3_000 * MIB, copy_ns_per_byte=None, checkpoint_bytes=None))
    assert (way.saving, way.kept) == (1, 1_000)
    assert way.ns == pytest.approx(LSTM.usual_ns + 1_000 * 0.8e6)


def test_where_values_go_has_a_limit_too() -> None:
    way = choose_way(replace(LSTM, room=3_100 * MIB, away=1_000 * MIB))
    assert way.away <= 1_000 * MIB
    assert way.held <= 3_100 * MIB
    assert way.kept < 1_000


def test_values_without_a_place_to_go_stay() -> None:
    free, full = (way_of(replace(LSTM, away=away), 0, 3, 1_000) for away in (inf, 1_000.0 * MIB))
    assert (free.away, full.away) == (3_000 * MIB, 1_000 * MIB)
    assert full.held - free.held == pytest.approx(2_000 * MIB, rel=0.01)


def test_the_way_that_holds_least_if_none_fits() -> None:
    figures = replace(LSTM, iterations=40, room=MIB)
    least = choose_way(figures)
    assert least.held > figures.room
    assert least.held <= 1.05 * min(way.held for way in every_way(figures))


TIMES = st.floats(1e3, 1e7)
WORK = st.builds(Work, TIMES, st.floats(0, 1e6))
SAVINGS = st.builds(
    Saving,
    st.lists(st.integers(MIB // 16, 4 * MIB), max_size=4).map(lambda sizes: tuple(sorted(sizes, reverse=True))),
    st.integers(1, MIB),
    WORK,
)
FIGURES = st.builds(
    LoopFigures,
    iterations=st.integers(1, 60),
    forward=WORK,
    backward=WORK,
    savings=st.lists(SAVINGS, min_size=1, max_size=3).map(lambda each: (replace(each[0], again=Work()), *each[1:])),
    room=st.floats(MIB, 200 * MIB),
    copy_ns_per_byte=st.none() | st.floats(0.001, 10.0),
    start_ns=st.floats(0, 1e6),
    away=st.just(inf) | st.floats(0, 100 * MIB),
    checkpoint_bytes=st.none() | st.integers(0, 4 * MIB),
)


@pytest.mark.slow
@given(figures=FIGURES)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_choice_is_about_as_good_as_the_best_of_all(figures: LoopFigures) -> None:
    """Lengths of segments are whole numbers, so the held bytes are not quite convex; otherwise the choice is the
    best.
    """
    chosen = choose_way(figures)
    fitting = [way for way in every_way(figures) if fits(way, figures)]
    assert fits(chosen, figures) == bool(fitting)
    if fitting:
        quickest = min(way.ns for way in fitting)
        longest = (figures.forward.ns + figures.backward.ns + max(s.again.ns for s in figures.savings)) * 3
        assert chosen.ns <= 1.001 * quickest + longest


def test_what_segments_have_in_common_counts_once() -> None:
    """A segment begins with its checkpoint, and the first of all checkpoints is what the loop begins with."""
    saving = Saving((4 * MIB,), fixed=MIB)
    figures = replace(LSTM, savings=(saving, replace(saving, of_variables=MIB)))
    apart, common = (way_of(figures, number, 0, 100) for number in range(2))
    assert apart.held - common.held == MIB
    alone = way_of(figures, 0, 0, 0)
    segments = ceil(1_000 / alone.length)
    assert alone.held == segments * 2 * MIB + alone.length * 5 * MIB
    beside = way_of(figures, 0, 0, 100)
    segments = ceil(900 / beside.length)
    assert beside.held == (100 + beside.length) * 5 * MIB + (segments + 1) * 2 * MIB
