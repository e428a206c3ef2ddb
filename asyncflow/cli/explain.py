"""``asyncflow explain``: runs a program, and prints the plans of its runs, or what passes of the compiler change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import asyncflow as af
from asyncflow.cli.program import run_program
from asyncflow.cli.target import Target
from asyncflow.compiler.dump import listening
from asyncflow.compiler.plan import Plan
from asyncflow.errors import counted
from asyncflow.graph.builtin import PLACEHOLDER
from asyncflow.graph.ir import Node
from asyncflow.profiler.summary import format_requests, summarize
from asyncflow.runtime.watch.trace import Trace


def explain(target: str, arguments: Sequence[str], *, passes: Sequence[str] = (), all_passes: bool = False) -> int:
    """Run `target`, print each plan compiled for it and the requests to cards, and return the exit code.

    Args:
        target: ``file.py:name`` or ``package.module:name``. Of a graph, the plan of all that it computes is printed.
        arguments: the program's ``sys.argv[1:]``.
        passes: print what the passes of these names change instead.
        all_passes: print what all passes change instead.

    Returns:
        As `asyncflow.cli.profile.profile`.

    Raises:
        TargetError: `target` names neither a graph nor a callable without arguments.
    """
    not_seen = dict.fromkeys(passes)
    shows_passes = bool(passes) or all_passes
    count = 0

    def tell(name: str, change: str) -> None:
        if all_passes or name in passes:
            not_seen.pop(name, None)
            print(change or f"{name} changes nothing")

    def on_plan(plan: Plan) -> None:
        nonlocal count
        count += 1
        names = ", ".join(getattr(each, "name", type(each).__name__) for each in plan.request.fetches)
        print(f"plan {count}, of {names or 'nothing'}:\n{plan.explain()}\n")

    listens = listening(tell) if shows_passes else listening(on_plan=on_plan)
    trace = Trace(detail="region", capacity=0)  # only for its counts

    @contextmanager
    def observed() -> Iterator[None]:
        with listens, trace:
            yield

    code = run_program(Target.parse(target), arguments, observed(), on_graph=_compile)
    if requests := summarize(trace).requests:
        print(f"requests to cards in {counted(len(trace.runs), 'run')}:\n{format_requests(requests)}")
    for name in not_seen:
        print(f"in no plan of the program was there anything for {name} to do")
    return code


def _compile(graph: af.Graph) -> None:
    """Compile the plan of every value and effect that no other node of the graph uses."""
    used = {x.node for node in graph.nodes for x in node.inputs}
    last: list[Node | af.Tensor] = []
    for node in graph.nodes:
        if node not in used and node.op is not PLACEHOLDER:
            last += node.outputs or (node,)
    fed = [node.outputs[0] for node in graph.nodes if node.op is PLACEHOLDER]
    af.Session(graph).plan(last, fed)
