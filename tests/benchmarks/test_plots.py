"""Pictures of measured values and of timelines are written, and show the data."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import dependency_patterns, plots, two_device_loop
from benchmarks.__main__ import GPU_WORKLOADS, PICTURES, WORKLOADS, main
from benchmarks.plots import Chart, Timeline, draw_bars, draw_charts, draw_timelines
from benchmarks.simulation import ANOTHER_HOST, driven_by, with_host

if TYPE_CHECKING:
    from pathlib import Path

PNG = b"\x89PNG\r\n"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were drawn."""
    drawn: list[Any] = []
    write = plots._write

    def keep(figure: Any, path: Path, note: str) -> Path:
        drawn.append(figure)
        return write(figure, path, note)

    monkeypatch.setattr(plots, "_write", keep)
    return drawn


def test_a_chart_shows_curves_and_the_papers_values(tmp_path: Path, figures: list[Any]) -> None:
    chart = Chart(
        title="rates", x="devices", y="1/s", curves={"a": {1: 5.0, 2: 9.0}, "b": {1: 5.0}}, paper={"b": {2: 3.0}}
    )
    path = draw_charts(tmp_path / "new" / "chart.png", [chart, chart], note="twice")
    assert path.read_bytes().startswith(PNG)
    (figure,) = figures
    axis, again = figure.axes
    ours, other, paper = axis.lines
    assert (list(ours.get_xdata()), list(ours.get_ydata())) == ([1, 2], [5.0, 9.0])
    assert (list(paper.get_xdata()), list(paper.get_ydata())) == ([2], [3.0])
    assert paper.get_color() == other.get_color() != ours.get_color()
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["a", "b", "b, in the paper"]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1", "2"]
    assert again.get_visible()


def test_named_values_are_bars_side_by_side_and_numbers_do_not_overlap(tmp_path: Path, figures: list[Any]) -> None:
    bars = Chart(
        title="t", x="card", y="y", curves={"swap": {1: 1.0, 2: 2.5}, "auto": {1: 1.0, 2: 1.2}}, names=["a", "b"]
    )
    line = Chart(title="t", x="x", y="y", curves={"kept": {100: 1.0, 500: 1.0, 600: 1.0, 1000: 1.0}})
    draw_charts(tmp_path / "named.png", [bars, line])
    named, counted = figures[0].axes
    assert [label.get_text() for label in named.get_xticklabels()] == ["a", "b"]
    assert len(named.patches) == 4
    assert [label.get_text() for label in counted.get_xticklabels()] == ["100", "", "600", "1,000"]


def test_what_another_host_drives_has_the_same_colour_and_is_dashed(tmp_path: Path, figures: list[Any]) -> None:
    names = [with_host(name, host) for host in ("asyncflow", "c++") for name in ("free", "barrier")]
    papers = {"free": {1: 2.0}, "barrier": {1: 1.0}}
    chart = Chart(title="", x="", y="", curves={name: {1: 3.0, 2: 4.0} for name in names}, paper=papers)
    draw_charts(tmp_path / "chart.png", [chart])
    *lines, papers_free, papers_barrier = figures[0].axes[0].lines
    colours = [line.get_color() for line in lines]
    assert colours == [papers_free.get_color(), papers_barrier.get_color()] * 2
    assert len(set(colours)) == 2
    assert [line.get_linestyle() for line in lines] == ["-", "-", "--", "--"]
    assert ANOTHER_HOST in lines[2].get_label()
    # Beside six entries no curve is hidden.
    axis = figures[0].axes[0]
    assert axis.get_legend().get_window_extent().x0 >= axis.get_window_extent().x1


def test_a_timeline_has_a_lane_a_device_and_a_bar_a_kernel_or_copy(tmp_path: Path, figures: list[Any]) -> None:
    with driven_by("c++"):
        trace = dependency_patterns.run("ring", 2, iterations=3, traced=True).trace
    path = draw_timelines(tmp_path / "timeline.png", [Timeline(title="ring", trace=trace)])
    assert path.read_bytes().startswith(PNG)
    (axis,) = figures[0].axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["sim:0", "sim:1"]
    drawn = [firing for firing in trace.firings if firing.stream != "host"]
    assert len(axis.collections) == len(drawn)
    origin = min(firing.started_ns for firing in trace.firings)
    extents = sorted(collection.get_paths()[0].get_extents().intervalx.tolist() for collection in axis.collections)
    expected = sorted([(f.started_ns - origin) / 1e6, (f.ended_ns - origin) / 1e6] for f in drawn)
    assert [pytest.approx(extent) for extent in extents] == expected
    assert {text.get_text() for text in axis.texts} == {"0", "1", "2"}
    colours = {tuple(collection.get_facecolor()[0][:3]) for collection in axis.collections}
    assert len(colours) == 3


def test_a_timeline_shows_its_window(tmp_path: Path, figures: list[Any]) -> None:
    with driven_by("c++"):
        trace = dependency_patterns.run("independent", 1, iterations=8, traced=True).trace
    kernels = [firing for firing in trace.firings if firing.stream == "compute" and firing.node.endswith("matmul")]
    origin = min(firing.started_ns for firing in trace.firings)
    until = (kernels[2].ended_ns - origin) / 1e6
    draw_timelines(tmp_path / "timeline.png", [Timeline(title="", trace=trace, window_ms=(0.0, until), colours="run")])
    (axis,) = figures[0].axes
    assert axis.get_xlim() == (0.0, pytest.approx(until))
    assert {text.get_text() for text in axis.texts} == {"0"}


def test_bars_show_medians_with_whiskers(tmp_path: Path, figures: list[Any]) -> None:
    bars = {"asyncflow, fast": (3.0, 1.0, 4.0), "peer": (2000.0, 3000.0, 1000.0)}
    assert draw_bars(tmp_path / "bars.png", "speed", "1/s", bars, goal=5.0).read_bytes().startswith(PNG)
    (axis,) = figures[0].axes
    assert [bar.get_height() for bar in axis.patches] == [3.0, 2000.0]
    assert {text.get_text() for text in axis.texts} == {"3", "2,000", "goal"}


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[plot\]'"):
        draw_bars(tmp_path / "bars.png", "speed", "1/s", {"a": (1.0, 1.0, 1.0)})


def test_the_command_draws_its_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PICTURES.keys() < WORKLOADS.keys() | GPU_WORKLOADS.keys()
    monkeypatch.setitem(WORKLOADS, "two_device_loop", lambda peers: two_device_loop.measure(peers, iterations=10))
    assert main(["two_device_loop", "--no-peers", "--plots", str(tmp_path)]) == 0
    assert f"wrote {tmp_path / 'two_device_loop.png'}" in capsys.readouterr().out
    assert two_device_loop.draw([], tmp_path / "nothing") == []
    assert not (tmp_path / "nothing").exists()
