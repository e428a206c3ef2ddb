"""A trace as a picture for a page or a paper: a row per device and stream, after fig. 13 of EuroSys '18.

Coloured by iteration, it shows at a glance whether a loop is pipelined: iterations then stand side by side on different
rows instead of one after the other.

The layout is computed in plain Python and tested so; only `render_picture` needs matplotlib.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from operator import attrgetter
from typing import Any, Literal, TypeAlias

from asyncflow.errors import counted
from asyncflow.profiler.lanes import TimelineLane, firing_lanes, time_bounds
from asyncflow.runtime.watch.trace import WHOLE, Firing, Trace

ColorBy: TypeAlias = Literal["auto", "op", "node", "iteration"]

COLUMNS = 2_000
"""Pixels across the picture; thinner bars share a pixel."""
PALETTE = (
    *("#4c8bd6", "#e08a3c", "#5bb26b", "#9a77cc", "#d9b341", "#2aa5ad", "#d982b5", "#8a9a45", "#7f86d9", "#a97c5a"),
)
"""No reds: red means failed."""
MOST_SINGLE = 5 * len(PALETTE)
"""Maximum number of iterations with a colour each; with more, a colour stands for a block of them."""
GREY = "#b4bcc8"
FAILED = "#dc3d43"
OTHERS = "other"
OUTSIDE = "outside loops"
ERRORS = "failed"


@dataclass(frozen=True, slots=True)
class Bar:
    """One rectangle: a firing, or several that are thinner than a pixel."""

    start_ns: int
    length_ns: int
    key: str
    """Entry of the legend that gives the bar its colour."""
    label: str
    """Text of the bar, if there is room."""


@dataclass(frozen=True, slots=True)
class Row:
    """One lane."""

    device: str
    label: str
    busy_fraction: float
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that is to be drawn."""

    title: str
    wall_ns: int
    rows: tuple[Row, ...]
    """By device; times are from the first event."""
    legend: dict[str, str]
    """Colours by name, in the order listed."""
    legend_title: str


def can_plot() -> bool:
    """Return True if matplotlib is installed, which pictures need."""
    return importlib.util.find_spec("matplotlib") is not None


def lay_out(trace: Trace, *, color_by: ColorBy = "auto") -> Picture:
    """Return the bars, lanes and arrows of a picture of `trace`.

    Args:
        trace: the events of the runs.
        color_by: ``"op"``, ``"node"`` or ``"iteration"`` of the outermost loop; ``"auto"`` takes the iteration if there
            is a loop and the op otherwise. Colours of iterations repeat after ten, or stand for a tenth of the
            iterations each if there are many.

    Raises:
        ValueError: another `color_by`.
    """
    lanes = firing_lanes(trace)
    first, last = time_bounds(trace)
    wall = last - first
    keys = _Keys(color_by, trace.firings)
    column = max(1, -(-wall // COLUMNS))
    rows = tuple(
        Row(
            device=lane.device,
            label=lane.label,
            busy_fraction=sum(f.ended_ns - f.started_ns for f in lane.firings) / wall if wall else 0.0,
            bars=tuple(_bars(lane, keys, first, column)),
        )
        for lane in lanes
    )
    seen = {bar.key for row in rows for bar in row.bars}
    return Picture(
        title=f"{counted(len(trace.runs), 'run')}, {counted(len(trace.firings), 'firing')}" if trace.firings else "",
        wall_ns=wall,
        rows=rows,
        legend={key: color for key, color in keys.colors.items() if key in seen},
        legend_title=keys.title,
    )


def outermost_iteration(tag: str) -> int | None:
    """The iteration of the outermost loop: 3 of ``outer/3/inner/7``; None outside loops."""
    return next((int(part) for part in tag.split("/")[1:] if part.isdecimal()), None)


class _Keys:
    """Entries of the legend, by firing, and their colours."""

    def __init__(self, color_by: ColorBy, firings: Sequence[Firing]) -> None:
        if color_by not in ("auto", "op", "node", "iteration"):
            raise ValueError(f"color_by is 'auto', 'op', 'node' or 'iteration'; got {color_by!r}")
        if color_by == "auto":
            # Copies of saved values always have a tag; kernels launched by regions have none.
            color_by = "iteration" if any(firing.tag for firing in firings if not firing.nbytes) else "op"
        self.by_iteration = color_by == "iteration"
        if self.by_iteration:
            last = max((outermost_iteration(firing.tag) or 0 for firing in firings), default=0)
            self._block = 1 if last < MOST_SINGLE else math.ceil((last + 1) / len(PALETTE))
            self._last = last
            # Up to MOST_SINGLE, colours repeat: neighbours still differ, which is what shows a pipeline.
            names = [self._iterations(number) for number in range(0, last + 1, self._block)]
            self.title = "iteration" if last < len(PALETTE) or self._block > 1 else f"iteration mod {len(PALETTE)}"
            self.colors = dict(zip(names, PALETTE, strict=False)) | {OUTSIDE: GREY}
        else:
            self._name: Callable[[Firing], str] = _op if color_by == "op" else attrgetter("node")
            self.title = color_by
            times: Counter[str] = Counter()
            for firing in firings:
                times[self._name(firing)] += max(0, firing.ended_ns - firing.started_ns)
            heaviest = sorted(times, key=lambda name: (-times[name], name))
            self.colors = dict(zip(heaviest, PALETTE, strict=False)) | {OTHERS: GREY}
        self.colors[ERRORS] = FAILED

    def key(self, firing: Firing) -> str:
        """The firing's entry of the legend."""
        if firing.status == "error":
            return ERRORS
        if self.by_iteration:
            number = outermost_iteration(firing.tag)
            return OUTSIDE if number is None else self._iterations(number)
        name = self._name(firing)
        return name if name in self.colors else OTHERS

    def _iterations(self, number: int) -> str:
        """Return the range of iterations that share one colour."""
        if self._block == 1:
            return str(number % len(PALETTE))
        first = number // self._block * self._block
        last = min(first + self._block - 1, self._last)
        return f"{first} to {last}" if last > first else str(first)

    def label(self, firing: Firing) -> str:
        """The text in the firing's bar: what its colour does not say."""
        number = outermost_iteration(firing.tag) if self.by_iteration else None
        if number is not None:
            return str(number)
        return firing.label if firing.op in WHOLE else firing.op


def _op(firing: Firing) -> str:
    """Return the op of a firing, or the node's name if the node ran as a whole."""
    return firing.node if firing.op in WHOLE else firing.op


def _bars(lane: TimelineLane, keys: _Keys, origin: int, column: int) -> Iterable[Bar]:
    """A bar for each firing that fills a pixel column; the others of a column share one, coloured as the longest."""
    thin: list[Firing] = []
    for firing in lane.firings:
        is_thin = firing.ended_ns - firing.started_ns < column
        if thin and not (is_thin and (firing.started_ns - origin) // column == (thin[0].started_ns - origin) // column):
            yield _shared_bar(thin, keys, origin, column)
            thin = []
        if is_thin:
            thin.append(firing)
        else:
            length = firing.ended_ns - firing.started_ns
            yield Bar(firing.started_ns - origin, length, keys.key(firing), keys.label(firing))
    if thin:
        yield _shared_bar(thin, keys, origin, column)


def _shared_bar(firings: Sequence[Firing], keys: _Keys, origin: int, column: int) -> Bar:
    times: Counter[str] = Counter()
    for firing in firings:
        times[keys.key(firing)] += firing.ended_ns - firing.started_ns
    # Show a failed firing however short it is: users open such a picture to find it.
    key = ERRORS if ERRORS in times else max(times, key=lambda name: times[name])
    start = firings[0].started_ns
    # A single short firing keeps its length, but is wide enough to be seen.
    return Bar(start - origin, max(firings[-1].ended_ns - start, column // 2), key, "")


# -- drawing ---------------------------------------------------------------------------------------------------------

_INCHES = 11.0
_LEFT, _RIGHT = 1.45, 2.15
"""Inches beside the rows: for their names, and for how busy they are and the legend."""
_ROW, _GAP, _BAR = 0.28, 0.16, 0.82
_MAX_INCHES = 60.0
_INK = "#1a202b"
_MUTED = "#667182"


def render_picture(trace: Trace, file_format: Literal["png", "svg"], *, color_by: ColorBy = "auto") -> bytes:
    """The picture as a PNG or SVG file; equal traces make equal files.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: another `color_by`.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    picture = lay_out(trace, color_by=color_by)
    tops = _tops(picture.rows)
    depth = tops[-1] + _ROW if tops else _ROW
    height = min(_MAX_INCHES, max(1.8, depth + 1.25, 0.9 + 0.19 * len(picture.legend)))
    # Without the salt, names inside an SVG are random. A node's name may hold a "$", which is no formula.
    style: dict[Any, Any] = {
        "svg.hashsalt": "asyncflow",
        "svg.fonttype": "none",
        "text.parse_math": False,
        "font.size": 8.5,
        "text.color": _INK,
    }
    with mpl.rc_context(style):
        # Not pyplot: it keeps figures alive and wants a display.
        figure = Figure(figsize=(_INCHES, height), dpi=160, facecolor="white")
        left, right, above, below = _LEFT / _INCHES, 1 - _RIGHT / _INCHES, 0.45, 0.5
        axes = figure.add_axes((left, below / height, right - left, 1 - (above + below) / height))
        scale, unit = next(
            ((scale, unit) for scale, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")) if picture.wall_ns >= 2 * scale),
            (1.0, "ns"),
        )
        axes.set_xlim(0, max(picture.wall_ns, 1) / scale)
        axes.set_ylim(depth + _GAP / 2, -_GAP / 2)  # from top to bottom, as rows are counted
        _draw_rows(axes, picture, tops, scale)
        _draw_frame(axes, picture, unit)
        file = BytesIO()
        metadata = {"Date": None} if file_format == "svg" else {"Software": "asyncflow"}
        figure.savefig(file, format=file_format, metadata=metadata)
    return file.getvalue()


def _tops(rows: Sequence[Row]) -> list[float]:
    """Return the top of each row in inches; rows of different devices are set apart."""
    tops: list[float] = []
    y = 0.0
    for number, row in enumerate(rows):
        if number and row.device != rows[number - 1].device:
            y += _GAP
        tops.append(y)
        y += _ROW
    return tops


def _draw_rows(axes: Any, picture: Picture, tops: Sequence[float], scale: float) -> None:
    room = picture.wall_ns / (_INCHES - _LEFT - _RIGHT)  # nanoseconds an inch
    from_side = axes.get_yaxis_transform()
    for number, (row, top) in enumerate(zip(picture.rows, tops, strict=True)):
        middle = top + _ROW / 2
        axes.axhspan(top, top + _ROW, color="#f4f6f8" if number % 2 else "#eceff3", linewidth=0, zorder=0)
        colors = [picture.legend[bar.key] for bar in row.bars]
        spans = [(bar.start_ns / scale, bar.length_ns / scale) for bar in row.bars]
        wide = [bar.length_ns > room * 0.03 for bar in row.bars]
        # White lines separate neighbours, but would hide bars as narrow as the lines.
        for are_wide, line in ((True, 0.5), (False, 0.0)):
            chosen = [i for i, is_wide in enumerate(wide) if is_wide == are_wide]
            axes.broken_barh(
                [spans[i] for i in chosen],
                (top + _ROW * (1 - _BAR) / 2, _ROW * _BAR),
                facecolors=[colors[i] for i in chosen],
                edgecolor="white",
                linewidth=line,
                zorder=2,
            )
        for bar in row.bars:
            # In this size of type a letter is about 0.06 inches wide.
            if bar.label and bar.length_ns > room * (0.03 + 0.06 * len(bar.label)):
                axes.text(
                    (bar.start_ns + bar.length_ns / 2) / scale,
                    middle,
                    bar.label,
                    ha="center",
                    va="center_baseline",
                    fontsize=7,
                    color="white",
                    zorder=3,
                    clip_on=True,
                )
        axes.text(-0.008, middle, row.label, transform=from_side, ha="right", va="center_baseline")
        busy = f"{row.busy_fraction:.0%}"
        axes.text(1.008, middle, busy, transform=from_side, ha="left", va="center_baseline", color=_MUTED)
        if number == 0 or row.device != picture.rows[number - 1].device:
            axes.text(-0.172, middle, row.device, transform=from_side, va="center_baseline", fontweight="bold")
    axes.text(1.008, 1.0, "busy", transform=axes.transAxes, ha="left", va="bottom", color=_MUTED)


def _draw_frame(axes: Any, picture: Picture, unit: str) -> None:
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_MUTED)
    axes.tick_params(axis="x", colors=_MUTED)
    axes.set_yticks([])
    axes.grid(axis="x", color="white", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(f"time, {unit}", color=_MUTED)
    axes.set_title(picture.title, loc="left", fontsize=9, color=_MUTED)
    if not picture.rows:
        axes.text(0.5, 0.5, "this trace is empty", transform=axes.transAxes, ha="center", va="center", color=_MUTED)
    if not picture.legend:
        return
    handles = [_swatch(color) for color in picture.legend.values()]
    names = [_shortened(name) for name in picture.legend]
    legend = axes.legend(
        handles,
        names,
        title=picture.legend_title,
        loc="upper left",
        bbox_to_anchor=(1.06, 1.0),
        borderaxespad=0.0,
        frameon=False,
        fontsize=8,
        handlelength=1.0,
        handleheight=1.0,
    )
    legend.get_title().set_color(_MUTED)
    legend.set_alignment("left")


def _shortened(name: str) -> str:
    """At most 18 characters: the end of a path, which tells nodes of one scope apart, or the beginning of a list."""
    if len(name) <= 18:
        return name
    return f"{name[:17]}…" if ", " in name else f"…{name[-17:]}"


def _swatch(color: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color, linewidth=0)
