"""Graphs in files: the text form, read within bounds, as files may be untrusted."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Final

from asyncflow.errors import GraphError
from asyncflow.graph.graph import Graph
from asyncflow.graph.op import Op
from asyncflow.graph.resource import Resource
from asyncflow.graph.text.parse import NOTHING_GIVEN, HasOp, parse_graph
from asyncflow.graph.text.text import print_graph
from asyncflow.graph.text.tokens import DEFINITION
from asyncflow.graph.verify import verify

FORMAT: Final = "# asyncflow graph, format 1"
"""The first line of a file."""
_KIND: Final = re.compile(r"# asyncflow graph, format ([0-9]{1,9})")
_DEFINITION: Final = re.compile(DEFINITION)


def save_graph(graph: Graph, path: str | Path) -> None:
    """Write a graph to a file, from which `load_graph` reads an equal one.

    The file is text (see `print_graph`). Variables are written down with their initial values; what a session has in
    them is not. The file appears complete, and replaces an existing one.

    Args:
        graph: a root graph.
        path: of the file.

    Raises:
        GraphError: `graph` is none, or an attr holds something that has no text form.
        OSError: the file cannot be written.

    >>> import asyncflow as af
    >>> with af.Graph() as graph:
    ...     af.Variable(3, name="n").assign_add(1)
    <Tensor n/assign_add:0 int64[]>
    >>> save_graph(graph, "counter.graph")
    >>> [variable.name for variable in load_graph("counter.graph").resources]
    ['n']
    """
    if not isinstance(graph, Graph):
        raise GraphError(f"save_graph takes an af.Graph; got {type(graph).__name__} {graph!r}")
    target = Path(path)
    text = f"{FORMAT}\n{print_graph(graph, with_resources=True)}"
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", newline="\n")
        beside.replace(target)
    except OSError as error:  # it names the file next to it
        raise OSError(error.errno, error.strerror, str(target)) from error
    finally:
        with suppress(OSError):
            beside.unlink()


def load_graph(
    path: str | Path,
    *,
    ops: Mapping[str, Op | HasOp] = NOTHING_GIVEN,
    resources: Mapping[str, Resource] = NOTHING_GIVEN,
    max_nbytes: int = 1 << 25,
    max_nodes: int = 100_000,
) -> Graph:
    """Read a graph that `save_graph` wrote; its variables are new, or taken from `resources`.

    The file is not trusted: it is data, and reading it neither runs nor imports nor opens anything. Its size is bounded
    before it is read, and its content checked before the graph is returned.

    Args:
        path: of the file.
        ops: user-defined ops by name, as ``{"my_op": my_op}``; the library's own are known.
        resources: variables, queues or tables to use in place of the file's, by their names in the file; the file must
            have each of them.
        max_nbytes: refuse a larger file.
        max_nodes: refuse a graph of more nodes; reading takes about 50 µs and 1 KiB for each.

    Returns:
        The graph; `Graph.resources` has its variables. Messages name lines of the file in place of the user's.

    Raises:
        GraphError: the file is too large, damaged or no graph file; or it names an unknown op, attribute or resource
            (the message has file and line); or it lacks a name in `resources`.
        OSError: the file cannot be read.
    """
    text = _read(Path(path), max_nbytes)
    kind = _KIND.fullmatch(text.partition("\n")[0].rstrip("\r"))
    if kind is None:
        raise GraphError(f"{path} is no graph that save_graph wrote: its first line is not {FORMAT!r}")
    if kind[0] != FORMAT:
        raise GraphError(f"{path} has format {kind[1]}, of a later version; this one reads format 1")
    count = sum(1 for _ in _DEFINITION.finditer(text))
    if count > max_nodes:
        raise GraphError(f"{path} has {count} nodes, more than max_nodes={max_nodes}")
    graph = parse_graph(text, ops=ops, resources=resources, file=str(path))
    verify(graph)
    return graph


def _read(path: Path, max_nbytes: int) -> str:
    """Return the text of a file, if the path is a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would be waited for
    if not S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise GraphError(f"{path} is no file with a graph in it, but a folder, pipe or device")
    with open(descriptor, "rb") as file:
        data = file.read(max_nbytes + 1)
    if len(data) > max_nbytes:
        raise GraphError(f"{path} has more than max_nbytes={max_nbytes} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise GraphError(f"{path}:{line}: a graph is UTF-8 text; byte {data[error.start]:#04x} is invalid") from None
