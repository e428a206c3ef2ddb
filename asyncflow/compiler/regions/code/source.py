"""`Source`: the source of a region's function while it is written, with its names and the objects that it uses."""

from __future__ import annotations

import itertools
import keyword
import linecache
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncflow.compiler.program.kernels.work import KernelCounter
from asyncflow.compiler.regions.code.buffers import Buffers
from asyncflow.compiler.regions.code.region_code import SourcePlace
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import KernelContext
from asyncflow.values import Kernel, Value

_serial = itertools.count(1)


@dataclass(slots=True)
class KnownNames:
    """Names of the values that exist at one place of the source."""

    loops: tuple[tuple[str, str], ...] = ()
    depth: int = 1
    buffers: Buffers | None = None
    nodes: Sequence[Node] = ()
    escaping: tuple[Tensor, ...] = ()
    variables: frozenset[Tensor] = frozenset()
    dead: dict[int, list[Tensor]] = field(default_factory=dict)

    def deeper(self) -> KnownNames:
        """The block one level further in."""
        return KnownNames(self.loops, self.depth + 1)


@dataclass(slots=True, kw_only=True)
class Source:
    """The source of a function while it is written.

    Args:
        bind: gives each node's kernel.
        counter: of the kernels that the function launches.

    Attributes:
        names: the variables that hold values.
        bound: the objects that the function uses, by their names in it.
        taken: number of variables made of each name.
        lines: the body so far.
        places: number of a line, counted from 1, to its place in the program.
        constants: names of the constants among `bound`.
    """

    bind: Callable[[Node], Kernel]
    counter: KernelCounter = field(default_factory=KernelCounter)
    names: dict[Tensor, str] = field(default_factory=dict)
    bound: dict[str, Any] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    places: dict[int, SourcePlace] = field(default_factory=dict)
    constants: dict[Tensor, str] = field(default_factory=dict)

    def fresh(self, path: str, fallback: str) -> str:
        """Return a new Python name that reads like the last part of `path`.

        The name is ASCII: Python normalises some letters (it reads ``µ`` of either code point as one variable), and
        rejects some that `re` calls letters.
        """
        stem = re.sub(r"[^0-9A-Za-z_]+", "_", path.rpartition("/")[2]).strip("_") or fallback
        if stem[0].isdigit() or keyword.iskeyword(stem):
            stem = f"{fallback}_{stem}"
        name = stem
        while name in self.taken:
            self.taken[stem] += 1
            name = f"{stem}_{self.taken[stem]}"
        self.taken[name] = 0
        return name

    def name(self, tensor: Tensor) -> str:
        """The new variable that will hold `tensor`."""
        name = self.names[tensor] = self.fresh(tensor.node.name, "value")
        return name

    def value(self, tensor: Tensor) -> str:
        """The expression for `tensor`: its variable, or a bound constant."""
        if tensor in self.names:
            return self.names[tensor]
        assert tensor.node.op is CONSTANT, f"{tensor!r} has no value in the region"
        if tensor not in self.constants:
            self.constants[tensor] = self.bind_name(tensor.node.name, "constant", self.bind(tensor.node)())
        return self.constants[tensor]

    def bind_name(self, path: str, fallback: str, value: Value) -> str:
        """A new name for what the function is bound to."""
        name = self.fresh(path, fallback)
        self.bound[name] = value
        return name

    def line(self, block: KnownNames, text: str, node: Node | None = None) -> None:
        """Add a line, which belongs to `node`."""
        self.lines.append("    " * block.depth + text)
        if node is not None:
            self.places[len(self.lines)] = self.place(node, block)

    def count(self, nodes: Sequence[Node], block: KnownNames) -> None:
        """Add a line that counts the kernels of a straight line of nodes."""
        if self.counter.requests is not None and (launched := self.counter.count(nodes)):
            self.bound["requests"] = self.counter.requests
            self.line(block, f"requests.kernels += {launched}")

    def place(self, node: Node, block: KnownNames) -> SourcePlace:
        """Return the place in the program of a line for `node`."""
        arguments = (self.names.get(tensor) or self.constants.get(tensor, "") for tensor in node.inputs)
        return SourcePlace(node, block.loops, tuple(arguments))

    def compiled(self, function: str, lines: Sequence[str]) -> tuple[Kernel, str, str]:
        """Return the function that whole lines define, their text, and the name of the file in tracebacks."""
        source = "\n".join(lines) + "\n"
        filename = f"<asyncflow region {function} {next(_serial)}>"
        # Tracebacks and debuggers show the source as long as the function lives.
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        namespace = dict(self.bound)
        exec(compile(source, filename, "exec"), namespace)
        made = namespace.pop(function)  # not in its own globals: a cycle would keep its constants until it is collected
        weakref.finalize(made, linecache.cache.pop, filename, None).atexit = False
        return made, source, filename


# A NamedTuple's constructor is a Python function, which would run in each iteration for kernels with a context.
_new_tuple = tuple.__new__


def in_iteration(context: KernelContext, counters: tuple[int, ...]) -> KernelContext:
    """The context of a kernel inside loops of a region."""
    seed, run, tag, at_end = context
    return _new_tuple(KernelContext, (seed, run, tag + counters, at_end))
