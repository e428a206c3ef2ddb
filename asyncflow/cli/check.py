"""``asyncflow check``: names the races of a graph, or of all that a program runs."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

from asyncflow.cli.program import INTERRUPTED, run_program
from asyncflow.cli.target import Target
from asyncflow.compiler.program.request import PlanRequest, watching
from asyncflow.errors import GraphError, RaceWarning
from asyncflow.graph.builtin import CONSTANT, PLACEHOLDER
from asyncflow.graph.graph import Graph, has_side_effect
from asyncflow.graph.ir import Tensor
from asyncflow.semantics.report import describe_races
from asyncflow.values import Nest, Value

_RACES = 1
_PROGRAM_FAILED = 3


def check(target: str, arguments: Sequence[str], *, runs: int = 1) -> int:
    """Print the races of `target`, each once, and return the exit code.

    Args:
        target: ``file.py:name`` or ``package.module:name``. A graph is checked as a whole. A program is run, and every
            kind of run is checked.
        arguments: the program's ``sys.argv[1:]``.
        runs: 2 also looks for races between two runs of one session.

    Returns:
        1 if there are some; else 0, 3 if the program raised or exited with a code other than 0, or 130 if it was
        interrupted.

    Raises:
        TargetError: `target` names neither a graph nor a callable without arguments.
    """
    checking = _Checking(runs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RaceWarning)  # reported below, only once
        code = run_program(Target.parse(target), arguments, watching(checking.add), checking.add_graph)
    return checking.report() or (code if code in (0, INTERRUPTED) else _PROGRAM_FAILED)


class _Checking:
    """Collects kinds of runs, and tells of their races when the program is over."""

    def __init__(self, runs: int) -> None:
        self.runs = runs
        self.kinds: dict[PlanRequest, Sequence[Value]] = {}
        self._graphs: set[Graph] = set()
        """The graphs of `kinds`, for which the program may have no use any more."""

    def add(self, request: PlanRequest, values: Sequence[Value]) -> None:
        """Takes note of a kind of run."""
        self.kinds.setdefault(request, values)
        self._graphs.add(request.graph)

    def add_graph(self, graph: Graph) -> None:
        """Takes note of a run of all effects of a graph, and of all values that nothing else uses."""
        used = {tensor for node in graph.nodes for tensor in node.inputs}
        wanted: list[Nest] = []
        for node in graph.nodes:
            if has_side_effect(node) and not node.subgraphs:
                wanted.append(node)
            elif node.op not in (CONSTANT, PLACEHOLDER):
                wanted += [tensor for tensor in node.outputs if tensor not in used]
        placeholders = [node.outputs[0] for node in graph.nodes if node.op is PLACEHOLDER]
        self.kinds[PlanRequest(graph.home, tuple(wanted), tuple(placeholders))] = ()

    def report(self) -> int:
        """Prints; gives the exit code."""
        told: list[str] = []
        for request, values in self.kinds.items():
            given = dict(zip(request.feeds, values, strict=True)) if len(values) == len(request.feeds) else None
            told += self._told(request, given, told)
        if not self.kinds:
            print("no graph was run; name one, such as train.py:graph, or a function that runs it")
        elif not told:
            print("no races")
        return _RACES if told else 0

    def _told(self, request: PlanRequest, given: Mapping[Tensor, Value] | None, known: Collection[str]) -> list[str]:
        try:
            lines = list(
                describe_races(request.graph, request.roots, request.feeds, given, runs=self.runs, known=known)
            )
        except GraphError as error:
            lines = [f"not checked: {error.reason}"]
        for line in lines:
            print(line)
        return [line for line in lines if line.startswith("race ")]
