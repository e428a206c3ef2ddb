"""Pass: rewrites `cond` and `while` nodes into the five primitives (EuroSys '18 §4.2), giving one flat graph.

A `while`, per loop variable: Enter → Merge → Switch → body → NextIteration → Merge, and Switch → Exit, with the
predicate behind one LoopCond and each capture behind a constant Enter. A `cond`: one Switch per capture and one Merge
per result.

Gating. A node must not run in an iteration that has not begun, nor in a branch not taken. Most are held back by an
input that comes through a Switch or Merge. Constants are not: they belong to every frame, and cost nothing in a run.
Neither are a loop's captures, which a constant Enter brings to every iteration. A node with only such *ungated* inputs
(or none) gets a control edge from the *pivot* of the branch or iteration it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncflow.control.primitives.enter import ENTER
from asyncflow.control.primitives.exit import EXIT
from asyncflow.control.primitives.loop_cond import LOOP_COND
from asyncflow.control.primitives.merge import MERGE
from asyncflow.control.primitives.next_iteration import NEXT_ITERATION
from asyncflow.control.primitives.switch import SWITCH
from asyncflow.graph.builtin import CONSTANT, IDENTITY
from asyncflow.graph.dtypes import int32
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncflow.graph.graph import Subgraph
    from asyncflow.graph.op import Op

_INDEX = Spec(int32, ())


@dataclass(slots=True)
class _Place:
    """Where nodes are being put: outside everything, in a branch, or in a part of a loop.

    `gate` is a tensor whose arrival means that the branch is taken, or the iteration has begun.
    """

    gate: Tensor | None = None
    pivot: Node | None = None


def lower(graph: Graph) -> Graph:
    """`graph` without structured nodes; `graph` itself is used up."""
    lowering = _Lowering(graph)
    lowering.put_nodes(graph, _Place())
    return lowering.finish()


class _Lowering:
    def __init__(self, source: Graph) -> None:
        self.flat = Graph(effects=source.effects, seed=source.seed)
        for node in source.walk():
            self.flat.unique_name(node.name)  # nodes keep their names; new ones must not take them
        self.tensors: dict[Tensor, Tensor] = {}
        # What a control edge from a structured node, or from a body's input, waits for.
        self.completion: dict[Node, list[Node]] = {}
        self.constants: set[Tensor] = set()
        self.ungated: set[Tensor] = set()
        self.awaited: set[Node] = set()
        self.used: set[Tensor] = set()
        for node in source.walk():
            self.awaited.update(node.control_inputs)
            self.used.update(node.inputs)
            self.used.update(result for body in node.subgraphs for result in body.results)

    def finish(self) -> Graph:
        self.flat.renumber()
        return self.flat

    # -- putting nodes -------------------------------------------------------------------------------------------

    def put_nodes(self, source: Graph, place: _Place) -> None:
        for node in source.nodes:
            if node.op.name == "cond":
                self.put_cond(node, place)
            elif node.op.name == "while":
                self.put_while(node, place)
            elif node.op.name != "parameter":
                self.move(node, place)

    def move(self, node: Node, place: _Place) -> None:
        """Puts a node that needs no rewriting."""
        if node.op is CONSTANT and not node.control_inputs:
            self.constants.update(node.outputs)
            self.ungated.update(node.outputs)
            self.completion[node] = []
        else:
            node.control_inputs = self.controls(node.control_inputs)
            node.inputs = [self.tensors.get(tensor, tensor) for tensor in node.inputs]
            node.control_inputs = self.held_back(node.inputs, node.control_inputs, place, node)
        self.flat.adopt(node)

    def put(
        self,
        like: Node,
        suffix: str,
        op: Op,
        inputs: Sequence[Tensor],
        place: _Place,
        *,
        specs: Spec | tuple[Spec, ...] | None = None,
        controls: Iterable[Node] = (),
        **attrs: Any,
    ) -> tuple[Tensor, ...]:
        """Puts a new node on behalf of `like`."""
        control_inputs = self.held_back(inputs, list(controls), place, like)
        node = self.flat.add_node(
            op, inputs, attrs, specs or inputs[0].spec, name=f"{like.name}/{suffix}", location=like.location
        )
        node.device, node.colocated_with = like.device, like.colocated_with
        node.control_inputs = control_inputs
        return node.outputs

    def held_back(self, inputs: Iterable[Tensor], controls: list[Node], place: _Place, like: Node) -> list[Node]:
        """The control inputs of a node to be put: the pivot, if nothing else gates it."""
        if place.gate is None or controls or any(tensor not in self.ungated for tensor in inputs):
            return controls
        return [self.pivot(place, like)]

    def pivot(self, place: _Place, like: Node) -> Node:
        assert place.gate is not None
        if place.pivot is None:
            place.pivot = self.arrival(place.gate, like)
        return place.pivot

    def arrival(self, tensor: Tensor, like: Node) -> Node:
        """A node that runs when `tensor` arrives live: its own node, or an identity behind one side of a Switch."""
        if tensor.node.op is not SWITCH:
            return tensor.node
        node = self.flat.add_node(
            IDENTITY, (tensor,), {}, tensor.spec, name=f"{tensor.node.name}/pivot", location=like.location
        )
        node.device = tensor.node.device
        return node

    def enter_constant(self, tensor: Tensor, around: _Place, loop: Node) -> Tensor:
        (inner,) = self.put(loop, "enter", ENTER, [tensor], around, **_enter_attrs(loop, constant=True))
        self.ungated.add(inner)
        return inner

    def controls(self, nodes: Iterable[Node]) -> list[Node]:
        """Control inputs, with structured nodes and body inputs replaced by what stands for them."""
        found = (stand_in for node in nodes for stand_in in self.completion.get(node, (node,)))
        return list(dict.fromkeys(found))

    def bind_input(self, inner: Tensor, value: Tensor) -> None:
        """Makes a body's `inner` stand for `value`."""
        self.tensors[inner] = value
        if inner.node in self.awaited:
            self.completion[inner.node] = [self.arrival(value, inner.node)]

    # -- cond ----------------------------------------------------------------------------------------------------

    def put_cond(self, node: Node, place: _Place) -> None:
        pred, *captured = (self.tensors.get(tensor, tensor) for tensor in node.inputs)
        before = self.controls(node.control_inputs)
        if before:
            (pred,) = self.put(node, "pred", IDENTITY, [pred], place, controls=before)
        on_true, on_false = (_Place() for _ in range(2))
        true_branch, false_branch = node.subgraphs
        for outer, in_true, in_false in zip(captured, true_branch.inputs, false_branch.inputs, strict=True):
            false_side = true_side = outer
            if outer not in self.constants:
                false_side, true_side = self.put_switch(node, outer, pred, place)
                on_false.gate, on_true.gate = false_side, true_side
            self.bind_input(in_true, true_side)
            self.bind_input(in_false, false_side)
        if on_true.gate is None:
            on_false.gate, on_true.gate = self.put_switch(node, pred, pred, place)
        self.put_nodes(true_branch, on_true)
        self.put_nodes(false_branch, on_false)
        merges = []
        for output, true_result, false_result in zip(
            node.outputs, true_branch.results, false_branch.results, strict=True
        ):
            sides = self.gated(true_result, on_true, node), self.gated(false_result, on_false, node)
            value, _ = self.put(node, "merge", MERGE, sides[::-1], place, specs=(output.spec, _INDEX))
            self.tensors[output] = value
            merges.append(value.node)
        if not merges and node in self.awaited:
            # Nobody wants a result, but the order of what is before and after has to hold.
            gates = [side.gate for side in (on_false, on_true) if side.gate is not None]
            decided, _ = self.put(node, "merge", MERGE, gates, place, specs=(gates[0].spec, _INDEX))
            merges.append(decided.node)
        self.completion[node] = merges

    def put_switch(self, node: Node, data: Tensor, pred: Tensor, place: _Place) -> tuple[Tensor, Tensor]:
        false_side, true_side = self.put(node, "switch", SWITCH, [data, pred], place, specs=(data.spec, data.spec))
        return false_side, true_side

    def gated(self, result: Tensor, place: _Place, like: Node) -> Tensor:
        """A body's result as a value that only exists if the body ran."""
        value = self.tensors.get(result, result)
        if value not in self.ungated:
            return value
        return self.put(like, "result", IDENTITY, [value], place)[0]

    # -- while ---------------------------------------------------------------------------------------------------

    def put_while(self, node: Node, place: _Place) -> None:
        condition: Subgraph = node.attrs["cond"]
        body: Subgraph = node.attrs["body"]
        n_vars: int = node.attrs["n_vars"]
        outer = [self.tensors.get(tensor, tensor) for tensor in node.inputs]
        merges = self.put_merges(node, place, outer[:n_vars], body)
        for position, (in_cond, in_body) in enumerate(zip(condition.inputs, body.inputs, strict=True)):
            if position < n_vars:
                self.bind_input(in_cond, merges[position])
                continue
            capture = outer[position]
            inner = capture if capture in self.constants else self.enter_constant(capture, place, node)
            self.bind_input(in_cond, inner)
            self.bind_input(in_body, inner)
        in_cond_place = _Place(merges[0])
        self.put_nodes(condition, in_cond_place)
        pred = self.tensors.get(condition.results[0], condition.results[0])
        (pred,) = self.put(node, "loop_cond", LOOP_COND, [pred], in_cond_place)
        switches = [self.put_switch(node, merged, pred, in_cond_place) for merged in merges]
        for in_body, (_, true_side) in zip(body.inputs[:n_vars], switches, strict=True):
            self.bind_input(in_body, true_side)
        in_body_place = _Place(switches[0][1])
        self.put_nodes(body, in_body_place)
        for merged, result in zip(merges, body.results, strict=True):
            value = self.gated(result, in_body_place, node)
            (again,) = self.put(node, "next_iteration", NEXT_ITERATION, [value], in_body_place)
            merged.node.inputs.append(again)
        self.put_exits(node, [false_side for false_side, _ in switches])

    def put_merges(self, node: Node, around: _Place, initial: Sequence[Tensor], body: Subgraph) -> list[Tensor]:
        before = self.controls(node.control_inputs)
        merges = []
        for value, inner in zip(initial, body.inputs, strict=False):
            attrs = _enter_attrs(node, constant=False)
            (entered,) = self.put(node, "enter", ENTER, [value], around, controls=before, **attrs)
            merged, _ = self.put(node, "merge", MERGE, [entered], _Place(), specs=(inner.spec, _INDEX))
            merges.append(merged)
        return merges

    def put_exits(self, node: Node, false_sides: Sequence[Tensor]) -> None:
        """One Exit per result in use; all of them if something waits for the loop as a whole."""
        exits = []
        for output, false_side in zip(node.outputs, false_sides, strict=True):
            if output in self.used or node in self.awaited:
                (left,) = self.put(node, "exit", EXIT, [false_side], _Place(), specs=output.spec)
                self.tensors[output] = left
                exits.append(left.node)
        self.completion[node] = exits


def _enter_attrs(loop: Node, *, constant: bool) -> dict[str, Any]:
    return {"frame": loop.name, "constant": constant, "parallel_iterations": loop.attrs["parallel_iterations"]}
