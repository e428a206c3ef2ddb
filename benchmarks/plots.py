"""Pictures of measurements: curves, bars, and timelines with a lane per device, as PNG.

They need the extra `plot` (matplotlib), which is imported where a picture is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from benchmarks.simulation import ANOTHER_HOST, without_host

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import asyncflow as af
    from asyncflow.runtime.watch.trace import Firing
    from benchmarks.simulation import Curve

_PALETTE: Final = "tab10"
_KERNELS: Final = "compute"
_COPIES: Final = ("h2d", "d2h", "peer")
_NS_PER_MS: Final = 1e6
_MOST_ENTRIES_INSIDE: Final = 4
"""With more, a legend covers curves, and stands beside the chart."""


_APART = 1.25
"""Least ratio of two labelled numbers of the x axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart of curves.

    Attributes:
        title: above it.
        x, y: what the axes show, with units.
        curves: ours, by name; what another host drives has the colour of what ours drives, and is dashed.
        paper: the paper's values, by name; hollow marks.
        is_log: both axes are logarithmic; else only x is, to the base 2.
        names: of what x numbers from 1 on, where it is no quantity: bars then stand for curves.
    """

    title: str
    x: str
    y: str
    curves: Mapping[str, Curve]
    paper: Mapping[str, Curve] = field(default_factory=dict)
    is_log: bool = False
    names: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One timeline: a lane per device, kernels coloured by iteration, or by run, and copies thin below them.

    Attributes:
        title: above it.
        trace: what happened.
        window_ms: from where to where; None for all of it.
        colours: what a colour stands for: ``"iteration"`` or ``"run"``.
    """

    title: str
    trace: af.Trace
    window_ms: tuple[float, float] | None = None
    colours: str = "iteration"


def draw_charts(path: Path, charts: Sequence[Chart], *, note: str = "", columns: int = 3) -> Path:
    """Writes the charts side by side; gives `path`."""
    pyplot = _pyplot()
    columns = min(columns, len(charts))
    rows = -(-len(charts) // columns)
    beside = max(2.4 * (len(chart.curves) + len(chart.paper) > _MOST_ENTRIES_INSIDE) for chart in charts)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=((6.4 if columns == 1 else 5.0) * columns + beside, 4.4 * rows), squeeze=False
    )
    for axis, chart in zip(axes.flat, charts, strict=False):
        _draw_chart(axis, chart)
    for axis in axes.flat[len(charts) :]:
        axis.set_visible(False)
    return _write(figure, path, note)


def draw_timelines(path: Path, timelines: Sequence[Timeline], *, note: str = "") -> Path:
    """Writes the timelines below each other; gives `path`."""
    pyplot = _pyplot()
    lanes = [len(_devices(timeline)) for timeline in timelines]
    figure, axes = pyplot.subplots(
        len(timelines),
        1,
        figsize=(11, sum(0.34 * n + 0.9 for n in lanes) + 0.3),
        height_ratios=[0.34 * n + 0.9 for n in lanes],
        squeeze=False,
    )
    for axis, timeline in zip(axes.flat, timelines, strict=True):
        _draw_timeline(axis, timeline)
    axes.flat[-1].set_xlabel("virtual time, ms")
    return _write(figure, path, note)


def draw_bars(
    path: Path, title: str, y: str, bars: Mapping[str, tuple[float, float, float]], *, goal: float | None = None
) -> Path:
    """Writes one bar a system, each ``(median, worst, best)`` with a whisker from worst to best; gives `path`."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(1.5 * len(bars) + 2.2, 4.2))
    for index, (name, (median, *ends)) in enumerate(bars.items()):
        colour = "C0" if name.startswith("asyncflow") else "0.6"
        axis.bar(index, median, color=colour, width=0.65)
        axis.errorbar(index, median, [[median - min(ends)], [max(ends) - median]], color="0.2", capsize=4, lw=1)
        axis.annotate(f"{median:,.3g}" if median < 1000 else f"{median:,.0f}", (index, 0), (0, 4),
                      textcoords="offset points", ha="center", va="bottom", color="white", weight="bold")  # fmt: skip
    if goal is not None:
        axis.axhline(goal, color="C3", ls="--", lw=1)
        axis.annotate("goal", (len(bars) - 0.1, goal), (-2, 3), textcoords="offset points", color="C3", ha="right")
    axis.set_xlim(-0.6, len(bars) - (0.1 if goal is not None else 0.4))
    axis.yaxis.set_major_formatter(_number_of_axis)
    axis.set_xticks(range(len(bars)), [name.replace(", ", ",\n") for name in bars])
    axis.set_ylabel(y)
    axis.set_title(title, fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    return _write(figure, path, "")


# -- charts ------------------------------------------------------------------------------------------------------


def _draw_groups(axis: Any, chart: Chart) -> None:
    width = 0.8 / len(chart.curves)
    for number, (name, curve) in enumerate(chart.curves.items()):
        places = [x + (number - (len(chart.curves) - 1) / 2) * width for x in curve]
        bars = axis.bar(places, list(curve.values()), width, color=f"C{number}", label=name)
        axis.bar_label(bars, [f"{y:.2f}" for y in curve.values()], fontsize=7, padding=1)
    axis.set_xticks(range(1, len(chart.names) + 1), chart.names)
    axis.set_ylim(0, 1.2 * max(y for curve in chart.curves.values() for y in curve.values()))  # below the legend


def _draw_chart(axis: Any, chart: Chart) -> None:
    if chart.names:
        _draw_groups(axis, chart)
    else:
        _draw_curves(axis, chart)
    axis.set_xlabel(chart.x)
    axis.set_ylabel(chart.y)
    axis.set_title(chart.title, fontsize=11)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    entries = len(chart.curves) + len(chart.paper)
    if entries > _MOST_ENTRIES_INSIDE:
        axis.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif entries > 1:
        axis.legend(frameon=False, fontsize=9, ncols=entries if chart.names else 1)


def _draw_curves(axis: Any, chart: Chart) -> None:
    # One colour for all that shows the same, whoever drives it.
    shown = list(dict.fromkeys(without_host(name) for name in (*chart.curves, *chart.paper)))
    for name, curve in chart.curves.items():
        colour, line = f"C{shown.index(without_host(name))}", "o--" if name.endswith(ANOTHER_HOST) else "o-"
        axis.plot(list(curve), list(curve.values()), line, color=colour, ms=5, label=name)
    for name, curve in chart.paper.items():
        colour, label = f"C{shown.index(name)}", f"{name}, in the paper"
        # No line: what lies between its points is not known here.
        axis.plot(list(curve), list(curve.values()), "s", color=colour, mfc="white", ms=7, label=label)
    axis.set_xscale("log", base=2)
    ticks = sorted({x for curve in (*chart.curves.values(), *chart.paper.values()) for x in curve})
    told: list[float] = []
    for x in reversed(ticks):  # their numbers would lie on one another
        told += [x] if not told or told[-1] >= _APART * x else []
    axis.set_xticks(ticks, [f"{x:,}" if x in told else "" for x in ticks])
    axis.minorticks_off()
    if chart.is_log:
        axis.set_yscale("log", subs=[2, 5])
        axis.yaxis.set_minor_formatter(_number_of_axis)
    else:
        highest = max(y for curve in (*chart.curves.values(), *chart.paper.values()) for y in curve.values())
        axis.set_ylim(0, 1.08 * highest)
    axis.yaxis.set_major_formatter(_number_of_axis)


def _number_of_axis(value: float, _position: int) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


# -- timelines ---------------------------------------------------------------------------------------------------


def _draw_timeline(axis: Any, timeline: Timeline) -> None:
    names = _devices(timeline)
    palette = _colours()
    origin = min(firing.started_ns for firing in timeline.trace.firings)
    first, last = timeline.window_ms or (0.0, float("inf"))
    # By device and number: where its longest kernel is.
    longest: dict[tuple[str, int], tuple[float, float]] = {}
    final = first
    for firing in timeline.trace.firings:
        start, end = ((time - origin) / _NS_PER_MS for time in (firing.started_ns, firing.ended_ns))
        if end <= first or start >= last or not _is_drawn(firing):
            continue
        number, lane = _number(firing, timeline), names.index(firing.device)
        colour = palette[number % len(palette)]
        if firing.stream in _COPIES:
            axis.broken_barh([(start, end - start)], (lane + 0.28, 0.2), facecolors=colour, alpha=0.55)
        else:
            axis.broken_barh([(start, end - start)], (lane - 0.38, 0.62), facecolors=colour)
            known = longest.setdefault((firing.device, number), (start, end))
            if end - start > known[1] - known[0]:
                longest[firing.device, number] = start, end
        final = max(final, end)
    last = min(last, final)
    axis.set_xlim(first, last)
    for (device, number), (start, end) in longest.items():
        # Only where the number has room.
        if end - start > (last - first) / 70 and first <= (start + end) / 2 <= last:
            axis.text((start + end) / 2, names.index(device) - 0.07, str(number), ha="center", va="center",
                      fontsize=7, color="white", clip_on=True)  # fmt: skip
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.45, -0.55)
    axis.set_title(timeline.title, fontsize=10, loc="left")
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _devices(timeline: Timeline) -> list[str]:
    names = {firing.device for firing in timeline.trace.firings if _is_drawn(firing)}
    return sorted(names, key=lambda name: (name.partition(":")[0], int(name.partition(":")[2])))


def _is_drawn(firing: Firing) -> bool:
    return firing.stream in _COPIES or firing.stream.startswith(_KERNELS)


def _number(firing: Firing, timeline: Timeline) -> int:
    """Of the iteration, or of the run, which are counted from 0."""
    if timeline.colours == "run":
        return firing.run - min(span.run for span in timeline.trace.runs)
    return int(firing.tag.split("/")[1]) if firing.tag else 0


# -- matplotlib --------------------------------------------------------------------------------------------------


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install -e '.[plot]', or leave --plots out") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def _colours() -> list[Any]:
    import matplotlib

    return list(matplotlib.color_sequences[_PALETTE])


def _write(figure: Any, path: Path, note: str) -> Path:
    if note:
        figure.supxlabel(note, fontsize=9, color="0.35")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    # Without the version in it, equal results make equal files.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    _pyplot().close(figure)
    return path
