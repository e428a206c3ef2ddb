"""Facts about a region's generated function: where its lines come from, and what its parts are called."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from asyncflow.errors import counted
from asyncflow.graph.ir import Node
from asyncflow.graph.structured import WhileNode
from asyncflow.values import Conduct, Kernel, Value

_MOST_NAMES = 3
"""Maximum number of scopes in a label, by number of nodes."""


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """The place in the program of a line of generated source."""

    node: Node
    loops: tuple[tuple[str, str], ...]
    """Label and counter of each loop around it, outermost first."""
    arguments: tuple[str, ...]
    """Variables that hold the node's inputs."""


@dataclass(slots=True, eq=False)
class Phase:
    """A phase: a stretch of a region that timelines show by itself, either a loop or the code between loops.

    Attributes:
        line: its first line in the source; it goes on to the next phase's.
        nodes: the nodes outside all loops; of a loop, its node; none where the function ends after a loop.
        counter: the variable that counts the loop's iterations; empty for other phases.
    """

    line: int
    nodes: list[Node]
    counter: str = ""

    @property
    def label(self) -> str:
        """Name of the phase, as a user knows it."""
        return self.nodes[0].name.removesuffix("/while") if self.is_loop else label_of(self.nodes)

    @property
    def is_loop(self) -> bool:
        """True if it is one loop."""
        return bool(self.nodes) and isinstance(self.nodes[0], WhileNode)


# Without slots, as `label` is cached in `__dict__` for traces.
@dataclass(frozen=True)
class RegionCode:
    """A generated function.

    Attributes:
        function: takes the region's inputs (after a `KernelContext`, if it needs one) and gives the tuple of its
            outputs; or, if `is_generator`, a generator that does, and is sent its budget of iterations and of kernels
            that may be long. It yields a place in line until that may be claimed.
        source: its text.
        filename: under which tracebacks show it.
        places: line number to place.
        conduct: that of its nodes together.
        phases: by their lines. A generator always yields between two of them where either takes its time.
        launching: for people, how a card launches it: as a CUDA graph, or kernel by kernel and why; empty elsewhere.
    """

    function: Kernel
    source: str
    filename: str
    places: dict[int, SourcePlace]
    is_generator: bool
    conduct: Conduct
    phases: tuple[Phase, ...]
    launching: str = ""

    def phase_at(self, line: int) -> Phase | None:
        """Return the phase of a line of the source; the first for earlier lines, None without phases."""
        if not self.phases:
            return None
        return self.phases[max(0, bisect_right(self.phases, line, key=attrgetter("line")) - 1)]

    @cached_property
    def label(self) -> str:
        """Description of the region's content, in the user's names; a trace asks for it at every firing."""
        loops = [phase.label for phase in self.phases if phase.is_loop]
        return ", ".join(loops) if loops else label_of([node for phase in self.phases for node in phase.nodes])

    @property
    def extent(self) -> str:
        """The first and the last node of the code with their lines, for errors that no single node has raised."""
        nodes = list({id(place.node): place.node for _, place in sorted(self.places.items())}.values())
        ends = [f"{node.name!r} ({node.location})" for node in nodes[:: max(1, len(nodes) - 1)]]
        return f"{' to '.join(ends)}, {counted(len(nodes), 'node')}"

    def place_of(self, error: BaseException) -> tuple[SourcePlace, tuple[int, ...], tuple[Value, ...]] | None:
        """Return the place where `error` was raised, the iteration numbers of the loops around it, and the node's
        inputs.
        """
        found = None
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == self.filename and traceback.tb_lineno in self.places:
                place = self.places[traceback.tb_lineno]
                held = traceback.tb_frame.f_locals
                counters = tuple(held.get(counter, 0) for _, counter in place.loops)
                found = place, counters, tuple(held[name] for name in place.arguments if name in held)
            traceback = traceback.tb_next
        return found


def label_of(nodes: Sequence[Node]) -> str:
    """Nodes outside loops by the scopes they stand in; where none stands in any, by their own names or their ops."""
    scopes = Counter(scope for node in nodes if (scope := _scope(node)))
    if not scopes:
        few = len(nodes) <= _MOST_NAMES
        scopes = Counter(node.name if few else node.op.name for node in nodes)
    named = [name for name, _ in scopes.most_common(_MOST_NAMES)]
    return ", ".join([*named, "..."] if len(scopes) > _MOST_NAMES else named)


def _scope(node: Node) -> str:
    """Return the outermost scope of a node, empty for none; of a gradient, with the scope of the differentiated
    node.
    """
    first, *others = node.name.split("/")
    if not others:
        return ""
    return f"{first}/{others[0]}" if first == "gradients" and len(others) > 1 else first
