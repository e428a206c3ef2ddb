"""The changes of passes as text, for developers: ``Session(dump=...)`` and ``asyncflow explain``.

A change is a unified diff of the program before and after the pass, as `print_graph` writes it. Two things without a
text form are added: nodes of a region stand under it, and nodes on another stream than the first name their stream.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from difflib import unified_diff
from typing import TYPE_CHECKING, TypeAlias

from asyncflow.compiler.regions.regions import REGION
from asyncflow.graph.text.text import Printer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncflow.compiler.passes import Program
    from asyncflow.compiler.plan import Plan
    from asyncflow.compiler.program.request import Fetch
    from asyncflow.graph.ir import Node

Tell: TypeAlias = "Callable[[str, str], object]"
"""Callback with the name of each pass that has run, and its change as text; empty if there is none."""

_listeners: list[Tell] = []
"""Callbacks that listen to all sessions."""

_plan_listeners: list[Callable[[Plan], object]] = []
"""Listeners that are called with each plan that is compiled."""

_MOST_NAMED = 3
"""Of what a plan gives, at the head of a change."""


@contextmanager
def listening(tell: Tell | None = None, on_plan: Callable[[Plan], object] | None = None) -> Iterator[None]:
    """Tell of the plans that any session compiles inside: what passes change (`tell`), and each plan (`on_plan`)."""
    _listeners.extend(each for each in [tell] if each is not None)
    _plan_listeners.extend(each for each in [on_plan] if each is not None)
    try:
        yield
    finally:
        if tell is not None:
            _listeners.remove(tell)
        if on_plan is not None:
            _plan_listeners.remove(on_plan)


def tell_plan(plan: Plan) -> None:
    """Tell the listeners of a plan that has just been compiled."""
    for tell in _plan_listeners:
        tell(plan)


def start_dump(program: Program, asked: bool | str | Tell) -> Dump | None:
    """Make a dump of a program's changes, if there is a listener, or the session has `asked`."""
    tells = list(_listeners)
    if callable(asked):
        tells.append(asked)
    elif asked:
        only = asked if isinstance(asked, str) else None
        # To the standard error, as results of the program may be on the standard output.
        write = sys.stderr.write
        tells.append(lambda name, change: only in (None, name) and write(f"{change or name + ' changes nothing'}\n"))
    return Dump(program, tells) if tells else None


class Dump:
    """A dump of the changes that passes make to a program."""

    def __init__(self, program: Program, tells: Sequence[Tell]) -> None:
        self.program = program
        self.tells = tells
        self.before = _lines(program)

    def tell(self, name: str) -> None:
        """Tells of the pass that has just run."""
        after, plan = _lines(self.program), _described(self.program.request.fetches)
        diff = unified_diff(self.before, after, f"{plan} before {name}", f"{plan} after {name}", lineterm="", n=2)
        self.before, change = after, "\n".join(diff)
        for tell in self.tells:
            tell(name, change)


def _described(fetches: Sequence[Fetch]) -> str:
    names = [getattr(fetch, "name", type(fetch).__name__) for fetch in fetches]
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return ", ".join([*names[:_MOST_NAMED], *more]) or "nothing"


def _lines(program: Program) -> list[str]:
    return list(_ProgramPrinter(program).graph_lines(program.graph))


class _ProgramPrinter(Printer):
    __slots__ = ("program",)

    def __init__(self, program: Program) -> None:
        super().__init__(lenient=True)
        self.program = program

    def node_lines(self, node: Node, indent: str) -> Iterator[str]:
        """See `Printer.node_lines`."""
        yield from super().node_lines(node, indent)
        for inner in node.attrs["region"].nodes if node.op is REGION else ():
            yield from self.node_lines(inner, f"{indent}  | ")

    def head(self, node: Node) -> str:
        """See `Printer.head`."""
        stream = self.program.streams.get(node)
        return f"{super().head(node)}  # stream {stream}" if stream else super().head(node)
