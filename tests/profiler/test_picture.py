"""The picture: which bars, in which colours, with what legend; and that matplotlib draws it."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.profiler.picture import (
    COLUMNS,
    ERRORS,
    FAILED,
    GREY,
    OTHERS,
    OUTSIDE,
    PALETTE,
    Bar,
    lay_out,
    outermost_iteration,
    render_picture,
)
from asyncflow.runtime.watch.trace import Firing, RunSpan, Trace


def firing(
    start: int,
    end: int,
    *,
    tag: str = "",
    node: str = "n",
    op: str = "op",
    device: str = "sim:0",
    stream: str = "compute",
    status: str = "ok",
) -> Firing:
    return Firing(0, node, op, tag, device, stream, start, start, end, "", status, "")


def loop(iterations: int) -> Trace:
    return Trace(firings=[firing(10 * k, 10 * k + 10, tag=f"loop/{k}") for k in range(iterations)])


def svg_texts(trace: Trace) -> list[str]:
    root = ElementTree.fromstring(render_picture(trace, "svg"))
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(
    ("tag", "iteration"),
    [("", None), ("loop/3", 3), ("outer/3/inner/7", 3), ("net/encoder/loop/12", 12), ("7/2", 2)],
)
def test_the_outermost_iteration_of_a_tag(tag: str, iteration: int | None) -> None:
    assert outermost_iteration(tag) == iteration


def test_a_row_for_each_lane_with_how_busy_it_was() -> None:
    trace = Trace(firings=[firing(0, 50), firing(0, 25, stream="peer"), firing(0, 100, device="sim:1")])
    rows = lay_out(trace).rows
    assert [(row.device, row.label, row.busy_fraction) for row in rows] == [
        ("sim:0", "compute", 0.5),
        ("sim:0", "peer", 0.25),
        ("sim:1", "compute", 1.0),
    ]


def test_the_title_counts_runs_and_firings() -> None:
    runs = [RunSpan(number, "", 0, 10, "ok") for number in range(2)]
    one = Trace(firings=[firing(0, 10, op="loop")._replace(iterations=1)], runs=runs[:1])
    assert lay_out(one).title == "1 run, 1 firing"
    assert one.firings[0].label == "n (loop, 1 iteration)"
    assert repr(one) == "<Trace: 1 run, 1 firing, 0 transfers, detail 'node'>"
    assert lay_out(Trace(firings=[firing(0, 10)] * 1_200, runs=runs)).title == "2 runs, 1,200 firings"


def test_copies_of_saved_values_alone_do_not_colour_by_iteration() -> None:
    """Regions launch kernels of no iteration, beside copies of which each has one."""
    copy = firing(0, 10, tag="loop/3", op="copy", stream="d2h")._replace(nbytes=65_536)
    picture = lay_out(Trace(firings=[firing(0, 30, op="region", node="matmul"), copy]))
    assert (picture.legend_title, [*picture.legend]) == ("op", ["matmul", "copy"])


def test_iterations_have_colours_of_their_own_and_their_number_on_them() -> None:
    trace = loop(3)
    trace.firings.append(firing(30, 40, op="to_host"))
    picture = lay_out(trace)
    assert picture.legend_title == "iteration"
    assert picture.legend == {"0": PALETTE[0], "1": PALETTE[1], "2": PALETTE[2], OUTSIDE: GREY}
    (row,) = picture.rows
    assert row.bars == (
        Bar(0, 10, "0", "0"),
        Bar(10, 10, "1", "1"),
        Bar(20, 10, "2", "2"),
        Bar(30, 10, OUTSIDE, "to_host"),
    )


def test_more_iterations_than_colours_go_round() -> None:
    picture = lay_out(loop(23))
    assert picture.legend_title == "iteration mod 10"
    assert list(picture.legend) == [str(number) for number in range(10)]
    (row,) = picture.rows
    assert [(bar.key, bar.label) for bar in row.bars][9:12] == [("9", "9"), ("0", "10"), ("1", "11")]


def test_of_very_many_iterations_a_block_shares_a_colour() -> None:
    picture = lay_out(loop(123))
    assert picture.legend_title == "iteration"
    assert list(picture.legend) == [*(f"{13 * k} to {13 * k + 12}" for k in range(9)), "117 to 122"]


def test_without_a_loop_the_colours_follow_the_ops_heaviest_first() -> None:
    trace = Trace(firings=[firing(10 * k, 10 * k + 10 - k // 2, op=f"op{k}") for k in range(12)])
    picture = lay_out(trace)
    assert picture.legend_title == "op"
    assert list(picture.legend) == [*(f"op{k}" for k in range(10)), OTHERS]
    assert picture.legend[OTHERS] == GREY
    assert lay_out(loop(2), color_by="op").legend == {"op": PALETTE[0]}
    assert lay_out(loop(2), color_by="node").legend == {"n": PALETTE[0]}


def test_a_failed_firing_is_red_however_thin() -> None:
    trace = Trace(firings=[firing(0, 100_000), firing(100_000, 100_001, status="error"), firing(100_001, 100_003)])
    picture = lay_out(trace)
    assert [bar.key for bar in picture.rows[0].bars] == ["op", ERRORS]
    assert picture.legend[ERRORS] == FAILED


def test_an_unknown_colouring_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'tag'"):
        lay_out(Trace(), color_by="tag")  # type: ignore[arg-type]


def test_however_many_slices_there_are_no_more_bars_than_columns() -> None:
    trace = Trace(firings=[firing(10 * k, 10 * k + 5, tag=f"loop/{k}") for k in range(20_000)])
    (row,) = lay_out(trace).rows
    assert len(row.bars) <= COLUMNS + 1


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 2_000)), min_size=1, max_size=60))
def test_bars_of_a_row_keep_their_order_and_cover_every_firing(spans: list[tuple[int, int]]) -> None:
    trace = Trace(firings=[firing(start, start + length) for start, length in spans])
    origin = min(start for start, _ in spans)
    for row in lay_out(trace).rows:
        assert all(before.start_ns <= after.start_ns for before, after in pairwise(row.bars))
    bars = [bar for row in lay_out(trace).rows for bar in row.bars]
    for start, length in spans:
        here = start - origin
        assert any(b.start_ns <= here and here + length <= b.start_ns + max(b.length_ns, length) for b in bars)


def test_svg_describes_its_picture() -> None:
    trace = Trace(
        firings=[
            firing(0, 1_000_000, tag="loop/0", device=d, stream=s)
            for d in ("sim:0", "sim:1")
            for s in ("compute", "h2d")
        ],
        runs=[RunSpan(0, "", 0, 4_000_000, "ok")],
    )
    texts = svg_texts(trace)
    assert texts.count("sim:0") == texts.count("sim:1") == 1
    assert texts.count("compute") == texts.count("h2d") == 2
    assert texts.count("25%") == 4
    assert {"1 run, 4 firings", "busy", "iteration", "time, ms"} <= set(texts)


def test_png_and_an_empty_trace_are_drawn() -> None:
    assert render_picture(loop(5), "png").startswith(b"\x89PNG")
    assert "this trace is empty" in svg_texts(Trace())


@pytest.mark.parametrize("name", ["$x", "$a$ and $b$", "_private", "<b>&amp;", "\\frac", "a{b", "x" * 500])
def test_a_hostile_name_is_drawn_as_text(name: str) -> None:
    texts = svg_texts(Trace(firings=[firing(0, 100, op=name)]))
    shown = name if len(name) <= 18 else f"…{name[-17:]}"
    assert shown in texts


def test_an_instant_alone_is_drawn() -> None:
    trace = Trace(firings=[firing(5, 5)])
    assert lay_out(trace).rows[0].bars == (Bar(0, 0, "op", ""),)
    assert re.match(rb"\x89PNG", render_picture(trace, "png"))
