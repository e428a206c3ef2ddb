"""``asyncflow replay``: does a recorded run again, and says where it goes another way."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from asyncflow.cli.target import Target, TargetError
from asyncflow.errors import AsyncflowError, ReplayError, a_kind
from asyncflow.graph.graph import Graph
from asyncflow.runtime.session.record import Record
from asyncflow.runtime.session.replay import replayed
from asyncflow.streams.loop import run

_DIFFERS = 1
_MOST_CHARACTERS = 200


def replay(path: Path, target: str | None, *, live: bool = False) -> int:
    """Replay the recorded run, and print the results.

    Args:
        path: of the record.
        target: names the program's graph, or a function without arguments that gives it; None for that in the record.
        live: call the program's functions, instead of using their recorded results.

    Returns:
        0; 1 if the run went another way than the recorded one.

    Raises:
        TargetError: `target` names no graph, there is no such file, or it is no record.
    """
    if not path.is_file():
        raise TargetError(f"there is no file {path}; replay takes the record that session.run(..., record=path) writes")
    try:
        record = Record.load(path)
    except ReplayError as error:
        raise TargetError(str(error)) from error
    graph = None if target is None else _graph(target)
    try:
        results = run(replayed(record, path, graph, live=live))
    except ReplayError as error:
        print(f"asyncflow replay: {error}", file=sys.stderr)
        return _DIFFERS
    except AsyncflowError as error:
        print(f"as recorded, it failed with {type(error).__name__}: {error}")
        return 0
    print("as recorded, bit by bit" + (":" if results else "; it was stopped then"))
    for name, value in results.items():
        if value is not None:  # of a node
            print(f"  {name} = {np.array2string(np.asarray(value), threshold=20):.{_MOST_CHARACTERS}}")
    return 0


def _graph(target: str) -> Graph:
    found = Target.parse(target).find()
    graph = found if isinstance(found, Graph) or not callable(found) else found()
    if not isinstance(graph, Graph):
        raise TargetError(f"{target} is {a_kind(type(graph))}; name a Graph, or a function that returns one")
    return graph
