"""Does a recorded run again: every firing in the place that it had."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from asyncflow.errors import AsyncflowError, GraphError, InternalError, ReplayError, SourceLocation
from asyncflow.graph.graph import Graph
from asyncflow.graph.resource import Resource
from asyncflow.graph.text.parse import parse_graph
from asyncflow.graph.values.spec import Spec
from asyncflow.runtime.session.record import Record, resources_by_label
from asyncflow.runtime.session.session import Session
from asyncflow.runtime.watch.picks import PickGuide, calls_functions, checksum
from asyncflow.runtime.watch.trace import Trace
from asyncflow.semantics.races import allow_races
from asyncflow.state.variables.variable import Variable
from asyncflow.streams.beside import call_beside
from asyncflow.values import Nest, Value

_STOPPED = ("CancelledError", "DeadlineExceeded", "SessionClosedError", "GeneratorExit", "KeyboardInterrupt")
"""Exceptions of a run that was stopped from outside."""


async def replay(path: str | Path, graph: Graph | None = None, *, live: bool = False) -> dict[str, Value]:
    """Repeat a recorded run in a session of its own, firing by firing in the same order, bit for bit.

    Args:
        path: a file written by ``session.run(..., record=path)``.
        graph: the program. None for the graph in the record, which has it unless it uses ops of your own or other
            resources than variables. Variables and tables of yours in containers take the values that they had. Queues,
            inputs and savers are left alone: their elements are in the record, as are results of batches and pools.
        live: call user functions again. Otherwise they are not called: the result, or exception, of each call is in the
            record. Functions that are ``pure=True`` are called in any case, and functions of batches and pools never.

    Returns:
        The fetched values by name, None for a node; none of a run that was stopped from outside, which is done as far
        as it came.

    Raises:
        ReplayError: the file is no record, or has no results of functions, or the run went another way; the message
            says at which firing.
        AsyncflowError: what the recorded run raised, too.
    """
    if not isinstance(graph, Graph | None):
        raise TypeError(f"replay takes a graph, or None for that in the record; got {graph!r:.100}")
    return await replayed(await call_beside(Record.load, Path(path)), path, graph, live=live)


async def replayed(record: Record, path: str | Path, graph: Graph | None, *, live: bool = False) -> dict[str, Value]:
    """`replay`, of a record that has been read from that path."""
    if graph is None:
        graph, given = _recorded_graph(record, path)
    else:
        given = resources_by_label(graph)
        _check_graph(record, path, graph, given)
    if (missing := record.lacks()) is not None:
        raise ReplayError(record.why_it_lacks(missing))
    if not (record.has_results or live):
        _check_functions(path, graph)
    try:
        opened = Session(graph, record.devices, **record.options)  # type: ignore[arg-type]
    except (TypeError, ValueError, AsyncflowError) as error:
        raise ReplayError(f"a session like that of {path} cannot be opened here: {error}") from error
    async with opened as session:
        for label, value in record.variables.items():
            if not isinstance(value, Spec):
                session.state.lookup(given[label]).assign(value)
        for label, arrays in record.tables.items():
            session.state.lookup(given[label]).restore(arrays)
        return await _follow(session, graph, record, given, live=live)


def _recorded_graph(record: Record, path: str | Path) -> tuple[Graph, Mapping[str, Resource]]:
    """The graph in a record, built where the recorded one was, and its variables by label."""
    if record.why_no_graph:
        raise ReplayError(f"{path} has no graph, as {record.why_no_graph}; give replay() the graph of the program")
    given = {label: Variable(value, name=label) for label, value in record.variables.items()}
    allow_races(*given.values())  # the recorded run has warned, and a replay keeps one order
    try:
        graph = parse_graph(record.graph, resources=given)
    except GraphError as error:
        raise ReplayError(f"the graph in {path} cannot be read; give replay() the program's: {error}") from error
    for node in graph.walk():
        file, _, line = record.lines.get(node.name, "").rpartition(":")
        if line.isdecimal():
            node.location = SourceLocation(file, int(line), node.location.function)
    return graph, given


def _check_graph(record: Record, path: str | Path, graph: Graph, resources: Mapping[str, Resource]) -> None:
    """Refuses a graph that has not what the recorded run was given, and gave."""
    nodes = {node.name for node in graph.walk()}
    known = {*nodes, *(f"@{label}" for label in resources)}
    asked = [*record.fetches, *record.feeds, *(f"@{label}" for label in (*record.variables, *record.tables))]
    missing = next((name for name in asked if name.partition(":")[0] not in known and name not in known), None)
    if missing is not None:
        raise ReplayError(
            f"{path} was recorded with another graph: the one given has no {missing.removeprefix('@')!r}, which it "
            f"names; give replay() the graph of the program as it was"
        )


def _check_functions(path: str | Path, graph: Graph) -> None:
    """Refuses a graph with functions, the results of which are not in the record."""
    node = next((node for node in graph.walk() if calls_functions(node)), None)
    if node is not None:
        raise ReplayError(
            f"{path} was recorded by an earlier release, and does not say what {node.op.name} gave, built at "
            f"{node.location}; record the run again, or have your functions called again: replay(..., live=True), "
            f"or asyncflow replay --live"
        )


async def _follow(
    session: Session, graph: Graph, record: Record, resources: Mapping[str, Resource], *, live: bool
) -> dict[str, Value]:
    kind = record.status.partition(":")[0]
    guide = PickGuide(record.picks, record.answers, is_whole=kind not in _STOPPED, live=live)
    trace = Trace(capacity=0, detail="node")
    trace.order = guide
    try:
        fetches = [_fetched(name, graph, resources) for name in record.fetches]
        about = record.run, record.random_seed, record.placement
        results = await session.run_again(fetches, record.feeds, trace, *about)
    except BaseException as error:
        if guide.difference is not None:
            raise guide.difference from None
        if kind in _STOPPED and guide.is_at_end:
            return {}  # stopped where the recorded run was, or had no more work before that
        if not isinstance(error, Exception) and type(error).__name__ != kind:
            raise  # the replay's own caller is stopped
        if isinstance(error, InternalError):
            raise guide.stalled() from error
        if type(error).__name__ != kind:
            raise ReplayError(f"the recorded run ended with {record.status}; this one with {error}") from error
        raise
    if len(record.fetches) != len(record.checksums) and record.status == "ok":
        raise ReplayError(f"the record is damaged: {len(record.fetches)} fetches, {len(record.checksums)} checksums")
    if kind in _STOPPED and guide.is_at_end:
        return {}  # the recorded run was stopped after its last firing
    if record.status != "ok":
        raise ReplayError(f"the recorded run ended with {record.status}; this one gave its values")
    for name, value, expected in zip(record.fetches, results, record.checksums, strict=True):
        if checksum(value) != expected:
            raise ReplayError(f"the value of {name} differs from that in the record: {value!r:.200}")
    return dict(zip(record.fetches, results, strict=True))


def _fetched(name: str, graph: Graph, resources: Mapping[str, Resource]) -> Nest:
    """Return the fetch of that name: without an output it is a node, whose values were not fetched."""
    if name.startswith("@"):
        return resources[name[1:]]
    return name if ":" in name else graph.node(name)
