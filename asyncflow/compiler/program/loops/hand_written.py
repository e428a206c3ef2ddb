"""Control flow written by hand: the iterations, and the sides of predicates, in which each value is live.

That has to be known before a graph can be cut over devices: a Recv must be dead, without any message, exactly where the
value it brings is dead, and wait for it everywhere else. `while_loop` and `cond` say so by how they are built; here it
is found from the primitives. A value is live under the `sides` of predicates that the Switches before it ask for; a
Merge of both sides of a predicate is live whether it holds or not; a loop's Merge is live in each iteration.

A loop is *regular* if its variables go on together, by one predicate. Everything in it then arrives in every iteration
that starts, dead or live, on any device. In a loop on a branch not taken, some values do not come from the branch, such
as a counter that begins with a constant. They would be live all the same. If no node can observe the difference, they
are made dead. A loop that is not regular stays on one device, and so do nodes that use a value whose deadness is
unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from asyncflow.compiler.program.loops.frames import assign_frames, is_everywhere
from asyncflow.control.primitives.control_trigger import CONTROL_TRIGGER
from asyncflow.control.primitives.enter import ENTER
from asyncflow.control.primitives.exit import EXIT
from asyncflow.control.primitives.loop_cond import LOOP_COND
from asyncflow.control.primitives.merge import MERGE
from asyncflow.control.primitives.next_iteration import NEXT_ITERATION
from asyncflow.control.primitives.switch import SWITCH
from asyncflow.graph.builtin import IDENTITY
from asyncflow.graph.frames import FramePath, format_frame, output_frame
from asyncflow.graph.graph import Graph, Subgraph, has_side_effect
from asyncflow.graph.ir import Node, Tensor
from asyncflow.ops.arithmetic.logic import LOGICAL_NOT

Side: TypeAlias = "tuple[Tensor, bool]"
"""A predicate, and the value that it has on this side."""


@dataclass(frozen=True, slots=True)
class Live:
    """The condition under which a value is live: each iteration of a frame in which all `sides` hold."""

    frame: FramePath
    sides: frozenset[Side] = frozenset()


@dataclass(slots=True, eq=False)
class HandFrame:
    """A frame that a user entered by hand.

    Attributes:
        path: names of the frames from the outermost to this one.
        enters: its Enters.
        following: its NextIterations.
        loop_conds: its LoopConds.
        around: condition under which it is live: all values that enter are.
        driver: the predicate it goes on by, and the side on which it does; None if it is no loop.
        is_opposite: True if its LoopCond marks the opposite of that predicate.
        trouble: the reason why it cannot be cut; None if it can.
    """

    path: FramePath
    enters: list[Node] = field(default_factory=list)
    following: list[Node] = field(default_factory=list)
    loop_conds: list[Node] = field(default_factory=list)
    around: Live | None = None
    driver: Side | None = None
    is_opposite: bool = False
    trouble: str | None = None


class HandWritten:
    """Facts about one graph, or of one body, whose control flow was written by hand.

    Attributes:
        frame_of: the frame each node runs in.
        frames: frames entered by hand.
        runs: when each node runs live; None: that is not known.
        live: when its outputs and control edges are, but for the outputs of a Switch (`live_of`).
        sides: the sides that a Switch has, of its predicate.
        dead_results: results of a body that may be dead: then nothing of it can be cut.

    Raises:
        GraphError: a node mixes two frames, or nodes wait for one another in a cycle.
    """

    def __init__(self, graph: Graph) -> None:
        self.frame_of = assign_frames(graph)
        self.frames: dict[FramePath, HandFrame] = {}
        self.runs: dict[Node, Live | None] = {}
        self.live: dict[Node, Live | None] = {}
        self._outer: dict[Node, frozenset[Side]] = {}
        """For nodes in iteration 0: sides that must hold around the frame for the node to be live."""
        self.sides = {
            node: (_literal(node.inputs[1], False), _literal(node.inputs[1], True))
            for node in self.frame_of
            if node.op is SWITCH
        }
        self._users: dict[Node, list[Node]] = {}
        self._order = {node: place for place, node in enumerate(self.frame_of)}
        self._odd_exits: set[Node] = set()
        self._collect(graph)
        self._find_odd_uses()
        # Assume at first that each frame is regular. Each round may refute this for some frames, which changes the
        # facts about nodes around and inside. Troubles and odd exits only grow in number, so this ends.
        is_settled = False
        while not is_settled:
            for node in self._order:
                self._outer[node] = self._needs(node)
                self.runs[node], self.live[node] = self._when(node)
            is_settled = not self._has_moved() and not self._has_trouble()
        results = graph.results if isinstance(graph, Subgraph) else ()
        self.dead_results = [result.node for result in results if self.live_of(result) != Live(())]

    @property
    def whole_because(self) -> str:
        """Reason why nothing of a body can be cut; empty if it can."""
        return f"results may be dead: {_listed(self.dead_results)}" if self.dead_results else ""

    def live_of(self, tensor: Tensor) -> Live | None:
        """Return the condition under which a value is live; None: unknown."""
        live, sides = self.live[tensor.node], self.sides.get(tensor.node)
        return live if live is None or sides is None else Live(live.frame, live.sides | {sides[tensor.index]})

    def is_early(self, enter: Node) -> bool:
        """Return True if a value entering a regular loop may be live where the loop is not."""
        frame = self.frames[output_frame(enter, self.frame_of[enter])]
        return frame.driver is not None and frame.trouble is None and self.runs[enter] != frame.around

    def latest(self, sides: Iterable[Side]) -> Side:
        """The side of the predicate that is made last: the others are known when it is."""
        return max(sides, key=lambda side: self._order[side[0].node])

    def held(self, path: FramePath) -> HandFrame | None:
        """Return the frame, this or one around it, that cannot be cut."""
        around = (self.frames.get(path[:depth]) for depth in range(1, len(path) + 1))
        return next((frame for frame in around if frame is not None and frame.trouble is not None), None)

    def together(self) -> Iterator[tuple[Node, Node, str]]:
        """Pairs of nodes that have to be on one device, and why."""
        first: dict[HandFrame, Node] = {}
        for node, path in self.frame_of.items():
            frame = self.held(path)
            if frame is not None:
                yield node, first.setdefault(frame, node), _why_held(node, frame)
            for source in dict.fromkeys(node.sources):
                if self._is_variable(source, node):
                    yield node, source, f"{node.name} and {source.name} are of one loop variable"
                elif self.live[source] is None and frame is None:
                    why = f"it is only known in a run whether {source.name} is dead, which {node.name} uses"
                    yield node, source, f"{why}, built at {node.location}"
                elif self.live[source] is None and frame is not None and self.frame_of[source] != path:
                    yield source, node, _why_held(source, frame)
            if self.runs[node] is None:
                for inner in (inner for body in node.subgraphs for inner in body.walk()):
                    yield inner, node, f"{inner.name} is in {node.name}, of which it is only known in a run if it runs"

    # -- frames ----------------------------------------------------------------------------------------------------

    def _collect(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.op is ENTER:
                inside = output_frame(node, self.frame_of[node])
                self.frames.setdefault(inside, HandFrame(inside)).enters.append(node)
            for source in node.sources:
                self._users.setdefault(source, []).append(node)
        for node in graph.nodes:
            frame = self.frames.get(self.frame_of[node])
            if frame is not None and node.op is NEXT_ITERATION:
                frame.following.append(node)
            elif frame is not None and node.op is LOOP_COND:
                frame.loop_conds.append(node)

    def _find_odd_uses(self) -> None:
        """A node that brings a value to some iterations only may be used by a loop's Merge alone."""
        for frame in self.frames.values():
            entering = [enter for enter in frame.enters if frame.following and not enter.attrs["constant"]]
            for node in (*entering, *frame.following):
                odd = next((user for user in self._users.get(node, ()) if not self._is_variable(node, user)), None)
                if odd is not None:
                    frame.trouble = f"{_described(odd)} uses {node.name}, which not every iteration has"
            if len(frame.loop_conds) > 1:
                frame.trouble = f"it has several predicates, {_listed(frame.loop_conds)}"

    def _is_variable(self, source: Node, user: Node) -> bool:
        """Return True if the edge brings a loop's variable in or back."""
        return source.op in (ENTER, NEXT_ITERATION) and _is_loop_merge(user) and source not in user.control_inputs

    # -- values ----------------------------------------------------------------------------------------------------

    def _when(self, node: Node) -> tuple[Live | None, Live | None]:
        """Return the conditions under which a node runs live, and under which its outputs are live."""
        path = self.frame_of[node]
        runs = None if self.held(path) is not None else self._runs(node, path)
        if node.op is ENTER:
            inside = output_frame(node, path)
            return runs, None if runs is None or self.held(inside) is not None else Live(inside)
        if node.op is EXIT:
            # An Exit of a loop is live once, by one side of one predicate; an Exit of a plain frame with its frame.
            if runs is None or node in self._odd_exits or len(runs.sides) != bool(self.frames[path].following):
                return runs, None
            return runs, self.frames[path].around  # a later check makes sure that it leaves the loop by the other side
        return runs, runs

    def _runs(self, node: Node, path: FramePath) -> Live | None:
        if _is_loop_merge(node) or node.op is CONTROL_TRIGGER:
            return Live(path)
        if node.op is MERGE:
            return _merged(path, [self.live_of(tensor) for tensor in node.inputs])
        waits_for = [self.live_of(tensor) for tensor in node.inputs if not is_everywhere(tensor.node)]
        waits_for += [self.live[control] for control in node.control_inputs if not is_everywhere(control)]
        sides: frozenset[Side] = frozenset()
        for live in waits_for:
            if live is None or (node.subgraphs and live != waits_for[0]):
                return None  # a branch or loop with one dead input may have other live inputs
            sides |= live.sides
        return Live(path, sides)

    def _needs(self, node: Node) -> frozenset[Side]:
        if node.op is ENTER:
            runs = self.runs.get(node)
            return frozenset() if runs is None else runs.sides
        if node.op is EXIT:
            enters = self.frames[self.frame_of[node]].enters
            return frozenset().union(*(self._outer_of(source) for enter in enters for source in enter.sources))
        if node.op is MERGE:
            entering = [tensor.node for tensor in node.inputs if tensor.node.op is not NEXT_ITERATION]
            return frozenset.intersection(*(self._outer_of(source) for source in entering))
        if node.op is CONTROL_TRIGGER:
            return frozenset()
        return frozenset().union(*map(self._outer_of, node.sources))

    def _outer_of(self, source: Node) -> frozenset[Side]:
        return self._outer.get(source, frozenset())

    def _has_moved(self) -> bool:
        """Return True if a frame is live at other times than assumed."""
        moved = False
        for frame in self.frames.values():
            entering = [self.runs[enter] for enter in frame.enters]
            sides = [live.sides for live in entering if live is not None]
            around = Live(frame.path[:-1], frozenset().union(*sides)) if len(sides) == len(entering) else None
            moved |= around != frame.around
            frame.around = around
        return moved

    def _has_trouble(self) -> bool:
        """Return True if an assumption has turned out wrong."""
        before = len(self._odd_exits)
        found = False
        for frame in self.frames.values():
            if self.held(frame.path) is None:
                frame.trouble = self._trouble(frame)
                found |= frame.trouble is not None
        for node, path in self.frame_of.items():
            runs = self.runs[node]
            if node.op is not EXIT or runs is None:
                continue
            driver = self.frames[path].driver
            # A value that leaves while the loop goes on may come twice, or not at all: only a run shows that.
            if driver is not None and runs.sides != {(driver[0], not driver[1])}:
                self._odd_exits.add(node)
        return found or len(self._odd_exits) > before

    def _trouble(self, frame: HandFrame) -> str | None:
        """Return the reason why a frame is not regular."""
        around = frame.around
        if around is None:
            dead = [enter for enter in frame.enters if self.runs[enter] is None]
            return f"it is only known in a run whether what enters is dead: see {_listed(dead)}"
        if not frame.following:
            if any(self.runs[enter] != around for enter in frame.enters):
                return f"some of what enters may be dead where the rest is not: see {_listed(frame.enters)}"
            return f"it has {_listed(frame.loop_conds)} and no back edge" if frame.loop_conds else None
        goes_on = [self.runs[node] for node in frame.following]
        first = goes_on[0]
        if first is None or len(first.sides) != 1 or any(live != first for live in goes_on):
            return (
                f"its variables do not all go on by one predicate, which their switches share: see "
                f"{_listed(frame.following)}"
            )
        ((pred, side),) = first.sides
        if output_frame(pred.node, self.frame_of[pred.node]) != frame.path:
            return f"its predicate {_described(pred.node)} is not made inside"
        for marked in frame.loop_conds:
            known, holds = _literal(marked.outputs[0], True)
            if known is not pred or self.runs[marked] != Live(frame.path):
                return f"its switches do not ask for its predicate, {_described(marked)}"
            frame.is_opposite = not holds
        frame.driver = pred, side
        return self._trouble_when_dead(frame, around)

    def _trouble_when_dead(self, frame: HandFrame, around: Live) -> str | None:
        """Return the reason why it would show that values live outside of parts of a loop were made dead."""
        if all(self.runs[enter] == around for enter in frame.enters):
            return None
        depth = len(frame.path)
        for node, path in self.frame_of.items():
            if path[:depth] != frame.path or not (has_side_effect(node) or (node.op is EXIT and path == frame.path)):
                continue
            inside = self.frames[path[: depth + 1]].enters if path != frame.path else (node,)
            sources = (source for user in inside for source in user.sources)
            if frozenset[Side]().union(*map(self._outer_of, sources)) != around.sides:
                return f"{_described(node)} is live although {format_frame(frame.path)} may be on a branch not taken"
        return None


def _literal(pred: Tensor, side: bool) -> Side:
    """The meaning of `pred` being as `side` says, for the value that it is a copy or the opposite of."""
    # So Switches by a predicate, its copy or its negation are known to depend on one predicate.
    while pred.node.op in (LOOP_COND, IDENTITY, LOGICAL_NOT):
        side ^= pred.node.op is LOGICAL_NOT
        pred = pred.node.inputs[0]
    return pred, side


def _merged(path: FramePath, inputs: Sequence[Live | None]) -> Live | None:
    """Return the condition under which a Merge is live: a predicate does not matter if both its sides meet there."""
    left: list[frozenset[Side]] = []
    for live in inputs:
        if live is None:
            return None
        sides = live.sides
        # Joining two sides of an inner predicate may leave the opposite of another input. Four inputs under two
        # predicates, say, meet first in pairs, then the pairs meet.
        while (other := next((each for each in left if _are_opposite(each, sides)), None)) is not None:
            left.remove(other)
            sides &= other
        left.append(sides)
    return Live(path, left[0]) if len(left) == 1 else None


def _are_opposite(one: frozenset[Side], other: frozenset[Side]) -> bool:
    """Return True if the two differ only in the side of one predicate."""
    differing = one ^ other
    return len(differing) == 2 and len({pred for pred, _ in differing}) == 1 and len(one) == len(other)


def _why_held(node: Node, frame: HandFrame) -> str:
    return f"{node.name} is in {format_frame(frame.path)}, which stays on one device: {frame.trouble}"


def _is_loop_merge(node: Node) -> bool:
    return node.op is MERGE and any(tensor.node.op is NEXT_ITERATION for tensor in node.inputs)


def _described(node: Node) -> str:
    return f"{node.name} ({node.op.name}, built at {node.location})"


def _listed(nodes: Iterable[Node]) -> str:
    return ", ".join(map(_described, nodes))
