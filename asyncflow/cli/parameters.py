"""``asyncflow parameters``: the variables of a graph, or of each graph that a program runs, and their memory."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.cli.program import run_program
from asyncflow.cli.target import Target
from asyncflow.compiler.program.request import PlanRequest, watching
from asyncflow.graph.graph import Graph
from asyncflow.parameters import summary
from asyncflow.values import Value


def parameters(target: str, arguments: Sequence[str], *, extent: int = 1) -> int:
    """Print `summary` of the graph that `target` names, or of each graph that it runs, and return the exit code.

    Args:
        target: ``file.py:name`` or ``package.module:name``.
        arguments: the program's ``sys.argv[1:]``.
        extent: stands for extents that are not known while a graph is built.

    Returns:
        As `asyncflow.cli.profile.profile`.

    Raises:
        TargetError: `target` names neither a graph nor a callable without arguments.
    """
    graphs: dict[Graph, None] = {}

    def note(request: PlanRequest, values: Sequence[Value]) -> None:
        graphs.setdefault(request.graph.root)

    code = run_program(Target.parse(target), arguments, watching(note), graphs.setdefault)
    for number, graph in enumerate(graphs, 1):
        print(f"{'' if number == 1 else chr(10)}graph {number} of {len(graphs)}:\n{summary(graph, extent=extent)}")
    if not graphs:
        print("no graph was run; name one, such as train.py:graph, or a function that runs it")
    return code
