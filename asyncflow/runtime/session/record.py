"""Records of runs, for repeating a run, firing by firing, in another process.

A record is one JSON file. It has the text of the graph, the feeds, and the variables and tables as they were before. It
has the session's options, and the order in which nodes were taken. It also has the answers of other runs (`PickLog`)
and of user functions (`asyncflow.ops.user.recorded_calls`), and the end of the run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, cast

import numpy as np

from asyncflow.compiler.program.kernels.kernels import Resolve
from asyncflow.compiler.program.request import Fetch
from asyncflow.control.stores.array_value import ArrayContent
from asyncflow.control.stores.row_block import RowContent
from asyncflow.devices.values import is_array
from asyncflow.errors import EndOfInput, GraphError, QueueClosedError, ReplayError
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.resource import Resource
from asyncflow.graph.text.parse import parse_value
from asyncflow.graph.text.text import Printer, print_graph
from asyncflow.graph.values import nest
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.user.recorded_calls import IN_CARD, CallLog, Outcome, Raised
from asyncflow.runtime.calls.calls import Call
from asyncflow.runtime.calls.session_options import OF_ITS_PLACE, SessionOptions
from asyncflow.runtime.watch.picks import (
    COMPUTED,
    ELSEWHERE,
    UNANSWERED,
    OnCard,
    Pick,
    PickLog,
    StoreContent,
    checksum,
)
from asyncflow.runtime.watch.trace import Trace
from asyncflow.state.table import Table
from asyncflow.state.table_state import TableCapture, TableState
from asyncflow.state.variables.held import HeldValue
from asyncflow.state.variables.variable import Variable
from asyncflow.state.variables.variable_state import VariableState
from asyncflow.streams.beside import call_beside
from asyncflow.values import Array, Nest, Value

_V = TypeVar("_V")
_W = TypeVar("_W")

_log = logging.getLogger("asyncflow.runtime")

_FORMAT: Final = "asyncflow record 4"

_WITHOUT_RESULTS: Final = "asyncflow record 3"
"""Format of earlier releases, which did not record the results of user functions."""

_KINDS: Final = (
    dict.fromkeys(("graph", "why_no_graph", "status"), str)
    | dict.fromkeys(("fetches", "devices", "checksums"), list)
    | dict.fromkeys(("run", "random_seed"), int)
    | dict.fromkeys(("options", "lines", "placement"), dict)
)
"""Types of the fields that are read as they are written."""


_MARKS: Final = {"computed": COMPUTED, "elsewhere": ELSEWHERE, "none": UNANSWERED}
"""Marks in place of answers, by their names in a record."""


class SessionFacts(NamedTuple):
    """Facts about the session that a record holds.

    Attributes:
        devices: their names.
        options: of the session.
        random_seed: of the session.
        lookup: the state of a resource.
    """

    devices: Sequence[str]
    options: SessionOptions
    random_seed: int
    lookup: Resolve


@dataclass(frozen=True, slots=True)
class Record:
    """A recorded run: its program, its inputs, and its course.

    Attributes:
        graph: its text; empty if it has none.
        why_no_graph: why it has none.
        lines: of the user's code, by the names of the nodes that they built.
        fetches: names; a variable's begins with "@".
        feeds: values by the names of tensors.
        variables: values before the run, or specs of variables without a value, by their names in the text.
        tables: the arrays of each table before the run.
        devices: names of the session's.
        options: of the session.
        run: its number in the session.
        random_seed: of the session.
        picks: the order in which nodes were taken.
        answers: results of other runs, or of user functions, for some of them, by their places.
        status: "ok", or the type of its exception, with the first line.
        checksums: of the fetched values.
        has_results: results of user functions are among the answers.
        placement: the devices of nodes by name, which depend on what the session had run and learnt before.
    """

    graph: str
    why_no_graph: str
    lines: Mapping[str, str]
    fetches: Sequence[str]
    feeds: Mapping[str, Array]
    variables: Mapping[str, Array | Spec]
    tables: Mapping[str, Mapping[str, Array]]
    devices: Sequence[str]
    options: Mapping[str, object]
    run: int
    random_seed: int
    picks: Sequence[Pick]
    answers: Mapping[int, object]
    status: str
    checksums: Sequence[int | None]
    has_results: bool = True
    placement: Mapping[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the file."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "has_results"}
        for name in ("feeds", "variables"):
            found[name] = _each(_written, found[name])
        found["tables"] = {name: _each(_written, arrays) for name, arrays in self.tables.items()}
        found["answers"] = [[place, *_written_answer(answer)] for place, answer in self.answers.items()]
        path.write_text(json.dumps({"format": _FORMAT, **found}) + "\n", encoding="utf-8")

    def lacks(self) -> str | None:
        """Return the first node whose answer is not in the record, which cannot be replayed; None without one."""
        places = sorted(place for place, answer in self.answers.items() if answer is ELSEWHERE)
        return self.picks[places[0]].node if places else None

    def why_it_lacks(self, node: str) -> str:
        """Return the message for a node that `lacks` names."""
        return (
            f"what {node} was given is not in the record, which holds no values of a simulation of shapes, and none "
            f"of a card that was lost or had no room for copies\n  built at {self.lines.get(node, 'an unknown line')}"
        )

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read such a file; nothing in it is evaluated.

        Raises:
            ReplayError: it is none, or damaged.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            form = found.pop("format", None) if isinstance(found, dict) else None
            if form not in (_FORMAT, _WITHOUT_RESULTS):
                raise ValueError(f"its format is not {_FORMAT!r}")
            found.setdefault("placement", {})  # records of earlier releases have none
            for name in ("feeds", "variables"):
                found[name] = _each(parse_value, found[name])
            found["tables"] = {name: _each(parse_value, arrays) for name, arrays in found["tables"].items()}
            found["picks"] = [Pick(*pick) for pick in found["picks"]]
            found["answers"] = {place: _read_answer(*answer) for place, *answer in found["answers"]}
            for name, kind in _KINDS.items():
                if not isinstance(found[name], kind):
                    raise ValueError(f"its {name} is {found[name]!r:.50}")
            if not all(isinstance(name, str) for name in (*found["fetches"], *found["devices"])):
                raise ValueError("a fetch or a device is no name")
            return cls(**found, has_results=form == _FORMAT)
        # A damaged file may fail anywhere above: report all of these as faults of the file, by name.
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            wrong = f"{path} is no record of a run, or a part of one: it is no JSON"
            raise ReplayError(f"{wrong}; session.run(..., record=path) writes one") from error
        except (ValueError, TypeError, KeyError, AttributeError, GraphError) as error:
            raise ReplayError(f"{path} is no record of a run: {type(error).__name__}: {error}") from error


_in_flight: set[Path] = set()
"""Files that runs in flight write their records to."""


async def recorded(
    call: Call, values: Sequence[Value], path: Path, run: Callable[[Trace], Awaitable[Nest]], about: SessionFacts
) -> Nest:
    """Do ``run(trace)``, and write its record, however it ends.

    Args:
        call: the call to run.
        values: the feeds.
        path: path of the record.
        run: does it.
        about: facts about the session.

    Raises:
        OSError: the record cannot be written; before the run, if its folder is not there, or it is a folder itself.
        ValueError: another run is writing its record there; before the run.
    """
    # Check the path and reserve it, without an await between, before the run: it may take hours and have effects.
    file = _checked(path)
    _in_flight.add(file)
    try:
        return await _recorded(call, values, path, run, about)
    finally:
        _in_flight.discard(file)


async def _recorded(
    call: Call, values: Sequence[Value], path: Path, run: Callable[[Trace], Awaitable[Nest]], about: SessionFacts
) -> Nest:
    # A trace of capacity 0: runs take the log of picks from it, and record no firings.
    graph, trace = call.request.graph, Trace(capacity=0, detail="node")
    resources = resources_by_label(graph)
    states = {label: about.lookup(it) for label, it in resources.items()}
    # Capture all states in one step of the event loop, then copy them on a thread while writes go on.
    trace.order = log = PickLog(about.lookup, [it for it in resources.values() if isinstance(it, Variable | Table)])
    variables = {label: (state, state.value) for label, state in states.items() if isinstance(state, VariableState)}
    captures = {label: state.capture() for label, state in states.items() if isinstance(state, TableState)}
    before = await call_beside(_each, _start_value, variables)
    tables = await call_beside(_each, TableCapture.arrays, captures)
    status, results = "ok", None
    try:
        results = await run(trace)
        log.end(None)
        return results
    except BaseException as error:
        log.end(error)
        status = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise
    finally:  # failed runs are the most worth recording
        if log.run:  # the run has begun
            await log.copied()
            text, why = _text_of(graph, resources.values())
            # Numbers and strings take the dtype of the fed tensor, as in the run.
            pairs = zip(call.request.feeds, values, strict=True)
            feeds = {tensor.name: np.asarray(value, tensor.dtype) for tensor, value in pairs}
            leaves = [] if status != "ok" else nest.flatten_like(call.structure, results, nested_leaves=True)
            record = Record(
                graph=text,
                why_no_graph=why,
                lines={node.name: str(node.location) for node in graph.walk()},
                fetches=[_name(fetch, resources) for fetch in call.request.fetches],
                feeds=feeds,
                variables=before,
                tables=tables,
                devices=about.devices,
                options=_plain_options(about.options),
                run=log.run,
                random_seed=about.random_seed,
                picks=log.picks,
                answers=log.answers,
                status=status,
                placement=log.placement,
                checksums=[checksum(value) for value in leaves],
            )
            # On a thread, as records of long runs take many megabytes.
            await call_beside(record.save, path)
            if (missing := record.lacks()) is not None:
                _log.warning("%s cannot be replayed: %s", path, record.why_it_lacks(missing))


def _checked(path: Path) -> Path:
    """Return the file that a record is written to."""
    if path.is_dir():
        raise IsADirectoryError(f"record={str(path)!r} is a folder; give the path of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"record={str(path)!r}: there is no folder {path.parent}")
    file = path.resolve()
    if file in _in_flight:
        raise ValueError(f"record={str(path)!r}: another run writes its record there; give each run a file of its own")
    return file


def resources_by_label(graph: Graph) -> dict[str, Resource]:
    """Return the resources of a graph by their names in its text."""
    # Printing labels resources in the order of the text. Lenient: the text is discarded, and any graph has resources.
    printer = Printer(lenient=True)
    for _ in printer.graph_lines(graph):
        pass
    return {label: resource for resource, label in printer.resources.items()}


def _start_value(captured: tuple[VariableState, Array | HeldValue | None]) -> Array | Spec:
    """Return the captured value of a variable, or its spec if there was none; blocks until that is on the host."""
    state, value = captured
    if value is None:
        return state.spec
    return value.on_host() if isinstance(value, HeldValue) else value


def _text_of(graph: Graph, resources: Iterable[Resource]) -> tuple[str, str]:
    """The graph's text; or none, and why."""
    other = next((each for each in resources if each.described() is None), None)
    if other is not None:
        return "", f"it uses {other!r}, which has no text form"
    users = next((node for node in graph.walk() if node.op.conduct.is_user), None)
    if users is not None:
        return "", f"it uses {users.op.name}, an op of your own, at {users.location}"
    try:
        return print_graph(graph), ""
    except GraphError as error:
        return "", str(error)


def _name(fetch: Fetch, resources: Mapping[str, Resource]) -> str:
    if isinstance(fetch, Tensor | Node):
        return fetch.name
    as_resource: object = fetch  # a variable
    return next("@" + label for label, resource in resources.items() if resource is as_resource)


def _plain_options(options: SessionOptions) -> dict[str, object]:
    found = {each.name: getattr(options, each.name) for each in fields(SessionOptions)}
    return {
        # `without` may be a set, which JSON lacks.
        name: list(value) if name == "without" else value
        for name, value in found.items()
        if name not in OF_ITS_PLACE
    }


def _each(change: Callable[[_V], _W], values: Mapping[str, _V]) -> dict[str, _W]:
    """Return the changed values by name."""
    return {name: change(value) for name, value in values.items()}


def _written_answer(answer: object) -> tuple[str, object]:
    """Return the kind of an answer, and its content as JSON."""
    for kind, mark in _MARKS.items():
        if answer is mark:
            return kind, None
    if isinstance(answer, CallLog):
        return "calls", [_written_outcome(outcome) for outcome in answer.outcomes]
    if isinstance(answer, OnCard):
        return "card", (_written_answer(answer.outputs), answer.placed)
    if isinstance(answer, Raised):
        return "raised", answer
    if isinstance(answer, StoreContent):
        return "array" if isinstance(answer, ArrayContent) else "rows", answer.text()
    # The text form of values cannot hold contents of stores.
    if isinstance(answer, tuple) and any(isinstance(each, StoreContent) for each in answer):
        return "values", [_written_answer(each) for each in answer]
    return "value", _written(answer)


def _written_outcome(outcome: Outcome) -> tuple[str, object]:
    if outcome is IN_CARD:
        return "elsewhere", None
    return ("raised", outcome) if isinstance(outcome, Raised) else ("value", _written(outcome))


def _read_answer(kind: str, found: object) -> object:
    if kind in _MARKS:
        return _MARKS[kind]
    # Unknown kinds fail below, as they are not the text of a value.
    if kind == "refusal":  # written by release 0.2: a closed queue, or an input at its end
        reason, queue, left = cast("tuple[str, str, int]", found)
        return Raised.of(QueueClosedError(reason, queue=queue, left=left) if queue else EndOfInput(reason))
    if kind == "raised":
        return Raised.read(found)
    if kind == "calls":
        log = CallLog()
        log.outcomes = [_read_outcome(*outcome) for outcome in cast("list[tuple[str, object]]", found)]
        return log
    if kind == "card":
        return _read_on_card(*cast("tuple[str | tuple[str, object], Sequence[int]]", found))
    if kind in ("array", "rows"):
        return (ArrayContent if kind == "array" else RowContent).read(cast("str", found))
    if kind == "values":
        return tuple(_read_answer(*each) for each in cast("list[tuple[str, object]]", found))
    return parse_value(cast("str", found))


def _read_on_card(written: str | tuple[str, object], placed: Sequence[int]) -> OnCard:
    # Earlier releases wrote only the text, without stores.
    outputs = parse_value(written) if isinstance(written, str) else _read_answer(*written)
    # Refuse a damaged record here: a string or a number placed on a card would fail without naming the file.
    arrays = outputs if isinstance(outputs, tuple) else (outputs,)
    is_there = [is_array(each) or isinstance(each, StoreContent) for each in arrays]
    if not placed or not all(index in range(len(arrays)) and is_there[index] for index in placed):
        raise ValueError(f"no card has outputs {placed!r:.50} of {len(arrays)}")
    return OnCard(outputs, placed)


def _read_outcome(kind: str, found: object) -> Outcome:
    if kind == "raised":
        return Raised.read(found)
    return IN_CARD if kind == "elsewhere" else parse_value(cast("str", found))


def _written(value: object) -> str:
    """Return the text of a value, as in the attrs of nodes."""
    return Printer().value(value)
