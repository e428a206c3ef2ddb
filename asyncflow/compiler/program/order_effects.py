"""Pass: makes nodes that touch one resource run in the order they were written.

Order edges are soft: they order nodes that are in the plan anyway and bring in none. A node waits for the last writer
before it, and a writer also for the readers since. A branch with side effects gets a result that exists once they are
done. A loop that writes a resource gets a loop variable that carries its turn from iteration to iteration. So a control
edge from the structured node waits for the effects inside.

With ``Graph(effects="unordered")`` only the resource ``"stream"`` is ordered.

Around primitives written by hand, a node may be dead, and an order edge must not pass that on: it leads through a
control trigger. Nodes of two frames are not ordered, nor are the iterations of such a loop.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from asyncflow.compiler.program.loops.frames import assign_frames, has_primitives
from asyncflow.control.primitives.control_trigger import CONTROL_TRIGGER
from asyncflow.graph.building.build import constant, identity
from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.graph import Graph, Subgraph, node_effects
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Access
from asyncflow.graph.structured import CondNode, WhileNode

_FIRST_TURN = "first_turn"


@dataclass(slots=True)
class _LastTouch:
    """The last accesses to a resource."""

    writer: Node | None = None
    readers: list[Node] = field(default_factory=list)

    def nodes(self) -> list[Node]:
        return [*([self.writer] if self.writer is not None else ()), *self.readers]


def order_effects(graph: Graph) -> None:
    """Adds the order edges, in place."""
    _order(graph, {})


def _order(graph: Graph, turns: dict[Hashable, _LastTouch]) -> None:
    order = _OrderByHand(graph) if has_primitives(graph.nodes) else _wait_for
    for node in list(graph.nodes):
        effects = [(r, access) for r, access in node_effects(node) if graph.effects == "ordered" or r == "stream"]
        for resource, access in effects:
            turn = turns.setdefault(resource, _LastTouch())
            if access is Access.READ:
                order(node, [turn.writer] if turn.writer is not None else [])
                turn.readers.append(node)
            else:
                order(node, turn.nodes())
                turns[resource] = _LastTouch(node)
        if isinstance(node, CondNode):
            _order_branches(node, any(access is Access.WRITE for _, access in effects))
        elif isinstance(node, WhileNode):
            _order_iterations(node, [resource for resource, access in effects if access is Access.WRITE])


def _wait_for(node: Node, before: Iterable[Node]) -> None:
    sources = set(node.control_inputs)
    if not node.subgraphs:
        # A value may leave a branch or loop before the effects inside are done. A value that enters one delays only its
        # users inside. So a data edge is enough only between two plain nodes.
        sources.update(tensor.node for tensor in node.inputs if not tensor.node.subgraphs)
    node.control_inputs.extend(earlier for earlier in before if earlier not in sources)


class _OrderByHand:
    """`_wait_for` in a graph with primitives written by hand."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.frames = assign_frames(graph)

    def __call__(self, node: Node, before: Iterable[Node]) -> None:
        same_frame = [earlier for earlier in before if self.frames[earlier] == self.frames[node]]
        if not same_frame:
            return
        # On the devices of earlier nodes: the news may go to another device, and must not be dead.
        labels: dict[str, list[Node]] = {}
        for earlier in same_frame:
            earlier.colocated_with = earlier.colocated_with or earlier.name
            labels.setdefault(earlier.colocated_with, []).append(earlier)
        for members in labels.values():
            trigger = self.graph.add_node(CONTROL_TRIGGER, (), {}, (), name="order", location=node.location)
            trigger.device, trigger.colocated_with = members[0].device, members[0].colocated_with
            self.graph.nodes.insert(self.graph.nodes.index(node), self.graph.nodes.pop())
            self.frames[trigger] = self.frames[node]
            _wait_for(trigger, members)
            _wait_for(node, [trigger])


def _order_branches(node: CondNode, has_side_effect: bool) -> None:
    for branch in node.subgraphs:
        turns: dict[Hashable, _LastTouch] = {}
        _order(branch, turns)
        if has_side_effect:
            branch.results.append(_after(branch, [n for turn in turns.values() for n in turn.nodes()]))
    if has_side_effect:
        node.add_output(node.subgraphs[0].results[-1].spec)


def _order_iterations(node: WhileNode, written: list[Hashable]) -> None:
    """Threads one loop variable per resource in `written` through the loop."""
    condition, body = node.subgraphs
    cond_turns: dict[Hashable, _LastTouch] = {}
    body_turns: dict[Hashable, _LastTouch] = {}
    for resource in written:
        place = node.n_vars
        node.add_variable(_first_turn(node.graph), name="turn")
        for part, turns in ((condition, cond_turns), (body, body_turns)):
            turns[resource] = _LastTouch(part.inputs[place].node)
    _order(condition, cond_turns)
    _order(body, body_turns)
    in_cond = [n for turn in cond_turns.values() for n in turn.nodes() if n.op is not PARAMETER]
    if in_cond:
        with condition:
            pred = identity(condition.results[0], name="pred")
        pred.node.control_inputs = in_cond
        condition.results[0] = pred
    for resource in written:
        body.results.append(_after(body, body_turns[resource].nodes()))


def _first_turn(graph: Graph) -> Tensor:
    """The constant that starts every turn variable; it stands before all loops of `graph`."""
    if graph.nodes[0].name != graph.scope.name_scope + _FIRST_TURN:
        with graph:
            node = constant(True, name=_FIRST_TURN).node
        graph.nodes.insert(0, graph.nodes.pop())
        return node.outputs[0]
    return graph.nodes[0].outputs[0]


def _after(body: Subgraph, nodes: list[Node]) -> Tensor:
    """A value of `body` that is there once `nodes` have run."""
    with body:
        done = identity(constant(True, name="turn"), name="turn")
    done.node.control_inputs = nodes
    return done
