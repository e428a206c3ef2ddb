"""Races in words: the two lines of each, the outcomes if the program is small enough to try all orders, and advice."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from asyncflow.errors import AsyncflowError, RaceWarning
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Tensor
from asyncflow.semantics.explore import Exploration, Outcome, explore
from asyncflow.semantics.program import NeededGraph
from asyncflow.semantics.races import Race, action, find_races
from asyncflow.semantics.state import digest
from asyncflow.values import Nest, Value

_MOST_RACES = 20
"""Of one program, that are told."""
_MOST_OUTCOMES = 6
_MOST_STEPS = 12
_MOST_STATES = 5_000
_MOST_SECONDS = 2.0


def describe_races(
    graph: Graph,
    fetches: Nest,
    feeds: Collection[Tensor] = (),
    values: Mapping[Tensor, Value] | None = None,
    *,
    runs: int = 1,
    known: Collection[str] = (),
) -> Iterator[str]:
    """Yield lines about the races of one kind of run; nothing without races.

    Args:
        graph: which.
        fetches: of the run.
        feeds: the tensors that it gets values for.
        values: feeds of one such run, from which outcomes are found; None if unknown.
        runs: 2 also tells of races between two runs of one session, apart.
        known: races that have been told, which are left out.

    Yields:
        Yields lines without line ends; the lines of a race itself are not indented.
    """
    races = [race for race in find_races(graph, fetches, feeds, runs=runs) if str(race) not in known]
    for count in range(1, runs + 1):
        here = [race for race in races if (race.between == "runs") == (count > 1)]
        if here:
            yield from _shown(list(dict.fromkeys(map(str, here))), _MOST_RACES)
            if len(values or ()) == len(feeds):
                yield from _outcomes(here, graph, fetches, values or {}, count)
            else:
                yield "  outcomes depend on the feeds, so none are listed"
            yield f"  {_advice(here)}"


def warn_of_races(graph: Graph, fetches: Nest, feeds: Iterable[Tensor]) -> None:
    """Warns of races on resources in one kind of run, once for a graph, and names the user's line of the first."""
    races = [race for race in find_races(graph, fetches, feeds) if race.variable is not None]
    if races:
        more = f" (and {len(races) - 1} more)" if len(races) > 1 else ""
        message = f"{races[0]}{more}; {_advice(races)}. session.plan(...).explain(races=True) tells more"
        place = races[0].first.location
        registry = graph.compiled.setdefault(RaceWarning, {})
        warnings.warn_explicit(message, RaceWarning, place.file, place.line, registry=registry)


def _advice(races: Sequence[Race]) -> str:
    names = dict.fromkeys(race.variable.name for race in races if race.variable is not None)
    allow = f", or say af.allow_races({', '.join(names)})" if names else ""
    if races[0].between == "runs":
        return f"run one after the other, or each as one step with atomic=True{allow}"
    return f"order them with control_dependencies{allow}"


def _shown(lines: Sequence[str], most: int) -> list[str]:
    return [*lines[:most], *([f"... and {len(lines) - most} more"] if len(lines) > most else ())]


# -- outcomes --------------------------------------------------------------------------------------------------------


def _outcomes(
    races: Sequence[Race], graph: Graph, fetches: Nest, values: Mapping[Tensor, Value], runs: int
) -> Iterator[str]:
    try:
        found = explore(graph, fetches, values, runs=runs, max_states=_MOST_STATES, max_seconds=_MOST_SECONDS)
    except AsyncflowError as error:
        yield f"  outcomes are not listed: {str(error).splitlines()[0]}"
        return
    names = [tensor.node.name.removesuffix("/read") for tensor in NeededGraph(graph, fetches, values).values]
    labels = [f"run {run + 1}: {name}" if runs > 1 else name for run in range(runs) for name in names]
    told = _differences([_named(outcome, labels) for outcome in found.outcomes])
    if len(told) == 1 and not found.stopped:
        yield "  outcomes: one with these values, whatever is first"
    elif runs == len(races) == 1 and len(told) == 2 and not found.stopped and (firsts := _firsts(races[0], found)):
        label = told[0].rpartition(" ")[0] + " "  # prefix of a value that is one word
        other = told[1].removeprefix(label)
        yield f"  outcomes: {told[0]} if the {firsts[0]} is first, {other} if the {firsts[1]} is"
    else:
        stopped = f"; there may be more, as the search ended {found.stopped}" if found.stopped else ""
        yield f"  outcomes, each with an order that leads to it{stopped}:"
        racing = {node.name for race in races for node in (race.first, race.second)}
        orders = [_order(outcome, racing) for outcome in found.outcomes]
        lines = dict(zip(told, orders, strict=True))  # equal texts are shown once
        yield from (f"    {line}" for line in _shown([f"{each} after {lines[each]}" for each in lines], _MOST_OUTCOMES))


def _order(outcome: Outcome, names: Collection[str]) -> str:
    """The reads and writes that race, in the order that leads to an outcome; of many the last ones."""
    steps = [step for step in outcome.order if _node_name(step) in names]
    return ", ".join([*(["..."] if len(steps) > _MOST_STEPS else []), *steps[-_MOST_STEPS:]])


def _node_name(step: str) -> str:
    """The name of the node of a step of `Outcome.order`."""
    return step.partition(": ")[2].partition(" [")[0] if step.startswith("run ") else step.partition(" [")[0]


def _named(outcome: Outcome, labels: Sequence[str]) -> dict[str, Value]:
    """Return the parts of an outcome by label."""
    if outcome.error:
        return {"fails with": outcome.error}
    named: dict[str, Value] = dict(zip(labels, outcome.fetches, strict=True))
    return named | {f"{variable.name} afterwards": value for variable, value in outcome.variables.items()}


def _differences(outcomes: Sequence[Mapping[str, Value]]) -> list[str]:
    """Return the parts in which outcomes differ, in words."""
    labels = dict.fromkeys(label for each in outcomes for label in each)
    found = {label: {digest(each[label]) if label in each else None for each in outcomes} for label in labels}
    shown = [label for label in labels if len(found[label]) > 1]
    return [", ".join(f"{label} {_brief(each[label])}" for label in shown if label in each) for each in outcomes]


def _brief(value: Value) -> str:
    if isinstance(value, np.ndarray):
        return " ".join(np.array2string(value, threshold=8, edgeitems=3, precision=6).split())
    return f"{value:.6g}" if isinstance(value, np.floating) else str(value)


def _firsts(race: Race, found: Exploration) -> list[str]:
    """Return the node that comes first in each of two outcomes; an empty list if it is the same in both."""
    names = [race.first.name, race.second.name]
    orders = [map(_node_name, outcome.order) for outcome in found.outcomes]
    firsts = [next((name for name in order if name in names), "") for order in orders]
    if sorted(firsts) != sorted(names):
        return []
    actions = [action(race.first), action(race.second)]
    if actions[0] == actions[1]:
        lines = [race.first.location.line, race.second.location.line]
        actions = names if lines[0] == lines[1] else [f"{actions[0]} of line {line}" for line in lines]
    return [actions[names.index(first)] for first in firsts]
