"""Training a long LSTM on a card that cannot hold what its loop saves: Table 1 and fig. 13 of EuroSys '18, and beyond.

An LSTM of 512 units over batches of 512, on simulated cards and on virtual time, with shapes only. A step takes its
inputs from the same 100 rows again and again, so that what grows with the sequence is what the loop saves: 6 MiB an
iteration. The limit is such that sequences of 500 fit, and of 600 do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

import asyncflow as af
from benchmarks.harness import Figure, Result
from benchmarks.lstm import Model, cell
from benchmarks.peers import NO_PEERS, Peers
from benchmarks.plots import Chart, Timeline, draw_charts, draw_timelines
from benchmarks.simulation import DRIVERS, Curve, as_results, driven_by, host_note, in_thread, simulate, with_host

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.simulation import Outcome

NAME = "saved_values"
ITERATION: Final = Figure("time an iteration, virtual time", "ms")
PREDICTED: Final = Figure("time an iteration, predicted", "ms")
LONGEST: Final = Figure("longest sequence", "steps", higher_is_better=True)

UNITS, BATCH, ROWS = 512, 512, 100


def limit_for(steps: int) -> int:
    """Return the bytes in which a little more than half of `steps` iterations fit, 6 MiB each, beside 100 rows of
    inputs.
    """
    return (100 << 20) + (3_350 << 20) * steps // 1_000


LIMIT: Final = limit_for(1_000)
"""500 iterations fit, and 600 do not."""

LENGTHS: Final = (200, 500, 600, 1_000)
STEPS: Final = 200
"""Length of the sequences that are compared by card; ratios are within 3 % of the ratios at 1,000."""
LONG: Final = 2_000
"""The longest sequence that is asked for: a loop that is planned has no longest one."""
CARDS: Final = ("k40", "v100", "a100", "h100")
CHOICES: Final = ("keep", "swap", "recompute", "auto")
LARGE: Final[dict[str, Any]] = {"units": 2_048, "batch": 256}
"""The model of EuroSys '18 §6.3 of which the longest sequence is asked for: 12 MiB an iteration."""

WAYS: Final[dict[str, dict[str, Any]]] = {
    "written out": {"is_looped": False, "choice": "keep"},
    "a loop, kept": {"choice": "keep"},
    "a loop, planned": {},
}
"""Ways to write a step over a long sequence, and to treat its saved values."""

Choice = Literal["keep", "swap", "recompute", "auto"]


def program(
    steps: int, *, units: int = UNITS, batch: int = BATCH, is_looped: bool = True
) -> tuple[Any, dict[Any, Any]]:
    """Return the loss and its gradients, and the feeds; as a loop or written out, in the current graph."""
    rows = min(steps, ROWS)
    shapes = [
        (rows, batch, units),
        (units, 4 * units),
        (units, 4 * units),
        (4 * units,),
        (batch, units),
        (batch, units),
    ]
    model = Model(*(af.placeholder("float32", shape) for shape in shapes))

    def body(t: Any, h: Any, c: Any, total: Any) -> Any:
        h, c = cell(af, model, model.xs[t % rows], h, c)
        return t + 1, h, c, total + af.sum(af.square(h))

    variables: tuple[Any, ...] = (0, model.h, model.c, np.float32(0))
    if is_looped:
        variables = af.while_loop(lambda t, *_: t < steps, body, (np.int32(0), *variables[1:]))
    else:
        for _ in range(steps):
            variables = body(*variables)
    total = variables[-1]
    fed = [model.xs, *model.parameters]
    feeds = {x: np.broadcast_to(np.float32(0), x.shape) for x in fed}
    return [total, *af.gradients(total, model.parameters)], feeds


def train(
    card: str, steps: int, *, limit: int | None, choice: Choice = "auto", traced: bool = False, **sizes: Any
) -> tuple[Outcome, float | None]:
    """A training step, and how long an iteration was predicted to take, in ms, where that was planned.

    Raises:
        OutOfMemoryError: it does not fit.
    """
    predicted: list[float] = []
    with af.Graph():
        fetches, feeds = program(steps, **sizes)

        async def work(session: af.Session) -> None:
            await session.run(fetches, feeds)

        async def look(session: af.Session) -> None:
            planned = session.plan(fetches, list(feeds)).memory
            predicted.extend(loop.way.ns / loop.figures.iterations / 1e6 for loop in planned)

        outcome = simulate(card, work, warm_up=look, traced=traced, memory_limit=limit, saved_values=choice)
    return outcome, predicted[0] if predicted else None


def ms_an_iteration(card: str, steps: int, *, limit: int | None, choice: Choice = "auto") -> float | None:
    """Milliseconds; None if memory is not enough."""
    try:
        outcome, _ = train(card, steps, limit=limit, choice=choice)
    except af.OutOfMemoryError:
        return None
    return outcome.seconds / steps * 1e3


def table_1(lengths: Sequence[int] = LENGTHS) -> dict[str, Curve]:
    """Milliseconds an iteration on a k40 by the length of the sequence: kept within a limit, planned, without one."""
    ways: dict[str, dict[str, Any]] = {
        "without a limit": {"limit": None},
        "kept": {"limit": LIMIT, "choice": "keep"},
        "planned": {"limit": LIMIT},
    }
    found: dict[str, Curve] = {}
    for name, options in ways.items():
        times = {steps: ms_an_iteration("k40", steps, **options) for steps in lengths}
        found[name] = {steps: ms for steps, ms in times.items() if ms is not None}
    return found


def longest(card: str, most: int, **way: Any) -> tuple[int, float]:
    """The longest sequence, up to `most`, that the memory of a card has room for, and its ms an iteration.

    The next longer one fails: lengths are doubled while they fit, and then halved in between.
    """
    fits, fails, ms = 0, most + 1, 0.0
    while fails - fits > 1:
        steps = min(2 * fits or 8, most) if fails > most else (fits + fails) // 2
        try:
            ms = train(card, steps, limit=None, **LARGE, **way)[0].seconds / steps * 1e3
        except af.OutOfMemoryError:
            fails = steps
        else:
            fits = steps
    return fits, ms


def by_card(steps: int = STEPS, cards: Sequence[str] = CARDS) -> dict[str, dict[str, float]]:
    """Milliseconds an iteration on each card without a limit, by each choice with one, and as predicted."""
    found: dict[str, dict[str, float]] = {}
    for card in cards:
        found[card] = {"without a limit": train(card, steps, limit=None)[0].seconds / steps * 1e3}
        for choice in CHOICES[1:]:
            outcome, predicted = train(card, steps, limit=limit_for(steps), choice=choice)
            found[card][choice] = outcome.seconds / steps * 1e3
            if predicted is not None:
                found[card]["predicted"] = predicted
    return found


def _cards_by_host(steps: int, cards: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    found = {}
    for host in DRIVERS:
        with driven_by(host):
            found[host] = by_card(steps, cards)
    return found


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 1,
    lengths: tuple[int, ...] = LENGTHS,
    cards: tuple[str, ...] = CARDS,
    steps: tuple[int, ...] = (STEPS,),
    most: tuple[int, ...] = (LONG,),
) -> list[Result]:
    """Milliseconds an iteration by length and by card, and the longest sequences of a larger model."""
    case = f"LSTM of {UNITS} units, batch {BATCH}, limit "
    first = f"k40, {{curve}}, {{x:,}} steps, {case}{LIMIT / 2**30:.2f} GiB"
    case = f"{case}{limit_for(steps[0]) / 2**30:.2f} GiB"
    results = as_results(NAME, await in_thread(table_1, lengths), ITERATION, first)
    for host, found in (await in_thread(_cards_by_host, steps[0], cards)).items():
        for card, ways in found.items():
            for way, ms in ways.items():
                figure = PREDICTED if way == "predicted" else ITERATION
                name = with_host(f"{card}, {'auto' if way == 'predicted' else way}", host)
                results += as_results(NAME, {name: {steps[0]: ms}}, figure, "{curve}, {x:,} steps, " + case)
    results += await in_thread(_longest_by_way, most[0])
    return results


def _longest_by_way(most: int) -> list[Result]:
    results = []
    for way, options in WAYS.items():
        steps, ms = longest("k40", most, **options)
        model = f"LSTM of {LARGE['units']:,} units, batch {LARGE['batch']}, all of the card's memory"
        results += as_results(
            NAME, {way: {most: float(steps)}}, LONGEST, f"k40, {{curve}}, up to {{x:,}} steps, {model}"
        )
        results += as_results(NAME, {way: {steps: ms}}, ITERATION, f"k40, {{curve}}, {{x:,}} steps, {model}")
    return results


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Time by length of the sequence, time by card, and the forward window."""
    mine = [result for result in results if result.workload == NAME]
    if not mine:
        return []
    return [_draw_lengths(mine, folder), _draw_cards(mine, folder), _draw_window(folder)]


def _draw_lengths(results: Sequence[Result], folder: Path) -> Path:
    curves: dict[str, Curve] = {}
    for result in results:
        card, way, length, *_ = result.case.split(", ")
        if card == "k40" and length.endswith("steps") and way in ("without a limit", "kept", "planned"):
            curves.setdefault(way, {})[int(length.split()[0].replace(",", ""))] = result.median
    chart = Chart(title="A training step on a k40", x="length of the sequence", y="ms an iteration", curves=curves)
    return draw_charts(folder / "saved_values_by_length.png", [chart])


def _draw_cards(results: Sequence[Result], folder: Path) -> Path:
    """Draw how much longer an iteration takes on each card than without a limit, by the host that drives it."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for result in results:
        card, way, *rest = result.case.split(", ")
        if result.figure == ITERATION and rest[0] in DRIVERS.values():
            times.setdefault((card, rest[0]), {})[way] = result.median
    charts = []
    for driver in DRIVERS.values():
        cards = [card for card, host in times if host == driver]
        curves = {
            way: {
                number: times[card, driver][way] / times[card, driver]["without a limit"]
                for number, card in enumerate(cards, 1)
            }
            for way in CHOICES[1:]
        }
        charts.append(Chart(title=driver, x="card", y="time, with a limit / without", curves=curves, names=cards))
    return draw_charts(folder / "saved_values_by_card.png", charts, note=host_note())


def _draw_window(folder: Path) -> Path:
    """Draw the forward loop, and the end of the gradient: kernels, with the copies of saved values below them."""
    steps = 60
    with driven_by("c++"):  # which launches kernels one by one, so that each tells its iteration
        outcome, _ = train("k40", steps, limit=600 << 20, choice="swap", traced=True)
    total = outcome.seconds * 1e3
    windows = {"forward": (0.2 * total, 0.3 * total), "gradient": (0.8 * total, 0.9 * total)}
    timelines = [
        Timeline(title=f"{name}: kernels, and copies below them", trace=outcome.trace, window_ms=window)
        for name, window in windows.items()
    ]
    return draw_timelines(folder / "saved_values_timeline.png", timelines)
