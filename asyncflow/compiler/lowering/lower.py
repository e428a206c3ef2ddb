"""Pass: rewrites `cond` and `while` nodes into the five primitives (EuroSys '18 §4.2).

The result is one flat graph in which no edge leads from one device to another.

A `while`, per loop variable: Enter → Merge → Switch → body → NextIteration → Merge, and Switch → Exit, with the
predicate behind one LoopCond and each capture behind a constant Enter. A `cond`: one Switch per capture and one Merge
per result. All primitives of one loop variable are on one device; a Switch is on the device of its data.

Gating. A node must not run in an iteration that has not begun, nor in a branch not taken. Most are held back by an
input that comes through a Switch or Merge. Constants are not: they belong to every frame, and cost nothing in a run.
Neither are a loop's captures, which a constant Enter brings to every iteration. A node with only such *ungated* inputs
(or none) gets a control edge from the *pivot* of its branch or iteration, on its own device.

Devices (EuroSys '18 §4.4, white paper §3.2.2). A value used on another device is sent there once: a Send beside its
producer and a Recv, gated like any node, beside its users. A control edge between devices sends the news alone. A loop
over several devices has a *control loop* on each that does not own the predicate: an Enter, Merge, Switch and
NextIteration that do nothing but receive the predicate in each iteration, and so start the next one or end. A branch on
a device of its own has a Switch of the predicate there. So its Recvs are dead without any message when the branch is
not taken. Captures are sent once, before the loop, whose constant Enters are on every device that uses them. Primitives
that were written by hand stay as they are, and are cut in the same way (`lower_by_hand`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from asyncflow.compiler.lowering.lower_by_hand import PlacesByHand
from asyncflow.compiler.lowering.places import INDEX, NEWS, Device, EnclosingLoop, FlatBuilder, Place
from asyncflow.compiler.program.extract import EMIT, FETCH
from asyncflow.compiler.program.kernels.transfers import TO_HOST
from asyncflow.compiler.program.loops.frames import has_primitives, is_everywhere
from asyncflow.compiler.program.loops.hand_written import HandWritten
from asyncflow.control.primitives.enter import ENTER
from asyncflow.control.primitives.exit import EXIT
from asyncflow.control.primitives.loop_cond import LOOP_COND
from asyncflow.control.primitives.merge import MERGE
from asyncflow.graph.builtin import CONSTANT, IDENTITY, PARAMETER
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import CondNode, WhileNode


class Lowered(NamedTuple):
    """A flat graph, and the nodes that are live together: they have equal places; constants, which are everywhere,
    have none.
    """

    graph: Graph
    places: Mapping[Node, Place]


def lower(
    graph: Graph,
    *,
    asynchronous: Collection[str] = (),
    truncate: bool = False,
    reads: Callable[[Node], Collection[int]] | None = None,
) -> Lowered:
    """`graph` without structured nodes; `graph` itself is used up.

    Args:
        graph: structured, each node with its device.
        asynchronous: devices whose values must be copied to the host before Python may look at them.
        truncate: send float32 values as their upper 16 bits.
        reads: positions of a node's inputs that Python looks at when it runs; None for none of any node.
    """
    lowering = _Lowering(graph, asynchronous, truncate, reads or (lambda _: ()))
    lowering.put_nodes(graph, lowering.outside)
    lowering.flat.renumber()
    lowering.flat.made_of = graph
    for place in lowering.opened:
        place.open = None  # avoid a cycle: the function refers to the place
    return Lowered(lowering.flat, lowering.places)


class _Lowering(FlatBuilder):
    def __init__(
        self,
        source: Graph,
        asynchronous: Collection[str],
        truncate: bool,
        reads: Callable[[Node], Collection[int]],
    ) -> None:
        super().__init__(source, asynchronous, truncate)
        self.reads = reads
        self.read_values: dict[tuple[Tensor, Device, Place], Tensor] = {}

    def put_nodes(self, source: Graph, place: Place) -> None:
        if has_primitives(source.nodes):
            found = HandWritten(source)
            if not found.whole_because:
                self.put_by_hand(source, PlacesByHand(self, found, place))
                return
        for node in source.nodes:
            self.put_node(node, place)

    def put_by_hand(self, source: Graph, places: PlacesByHand) -> None:
        for node in source.nodes:
            if node.op is not ENTER or not places.capture(node):
                before = places.before(node)
                self.put_node(node, places.place_of(node))
                node.control_inputs += before
                places.tell(node)
        places.close()

    def put_node(self, node: Node, place: Place) -> None:
        if isinstance(node, CondNode):
            self.put_cond(node, place)
        elif isinstance(node, WhileNode):
            self.put_while(node, place)
        elif node.op is not PARAMETER:
            self.move(node, place)

    def move(self, node: Node, place: Place) -> None:
        """Puts a node that needs no rewriting."""
        if node.op is CONSTANT and not node.control_inputs:
            self.constants.update(node.outputs)
            self.ungated.update(node.outputs)
            self.completion[node] = []
        else:
            read = self.reads(node)  # first, as it needs the tensors before `values` changes them
            inputs = self.values(node.inputs)
            if node.op in (FETCH, EMIT):
                node.device = self.where_to_hand_out(node, inputs)
                inputs = [self.host_value(tensor, node, place) for tensor in inputs]
            controls = self.arrived(self.controls(node.control_inputs), node.device)
            node.inputs = [self.local(tensor, node.device) for tensor in inputs]
            for index in read:
                node.inputs[index] = self.read_value(inputs[index], node, place)
            node.control_inputs = self.held_back(inputs, controls, place, node.device)
            self.places[node] = place
        self.flat.adopt(node)

    def where_to_hand_out(self, node: Node, values: Sequence[Tensor]) -> Device:
        """Return the device that hands values out: values already on the host must not go to an asynchronous device
        again.

        A value may be elsewhere than when the node was placed, since a region has taken it there.
        """
        if node.device not in self.asynchronous:
            return node.device
        there = (value.node.device for value in values)
        return next((device for device in there if device not in self.asynchronous), node.device)

    def read_value(self, tensor: Tensor, node: Node, place: Place) -> Tensor:
        """Return `tensor` in a form that the kernel of `node` can read, once it has reached the device."""
        key = tensor, node.device, place
        if key not in self.read_values:
            (copied,) = self.put(node, "to_host", TO_HOST, [tensor], place, device=node.device, use="input")
            self.read_values[key] = copied
        return self.read_values[key]

    # -- cond ----------------------------------------------------------------------------------------------------

    def put_cond(self, node: CondNode, place: Place) -> None:
        pred, *captured = self.values(node.inputs)
        before = self.controls(node.control_inputs)
        if before:
            (pred,) = self.put(node, "pred", IDENTITY, [pred], place, device=pred.node.device, controls=before)
        pred = self.host_value(pred, node, place, use="predicate")
        on_true, on_false = Place(), Place()

        def switch(data: Tensor, device: Device) -> tuple[Tensor, Tensor]:
            false_side, true_side = self.put_switch(node, data, pred, place, device)
            for side, branch in ((false_side, on_false), (true_side, on_true)):
                branch.gates[device] = side
                self.value_places[side] = branch
            return false_side, true_side

        self.opened += (on_true, on_false)
        on_true.open = lambda device: switch(pred, device)[1]
        on_false.open = lambda device: switch(pred, device)[0]
        true_branch, false_branch = node.subgraphs
        for outer, in_true, in_false in zip(captured, true_branch.inputs, false_branch.inputs, strict=True):
            false_side = true_side = outer
            if outer not in self.ungated:
                false_side, true_side = switch(outer, outer.node.device)
            self.bind_input(in_true, true_side)
            self.bind_input(in_false, false_side)
        self.put_nodes(true_branch, on_true)
        self.put_nodes(false_branch, on_false)
        merges = []
        for output, *results in zip(node.outputs, false_branch.results, true_branch.results, strict=True):
            device = self.device_of(results[1], node)
            sides = [
                self.gated(result, branch, node, device)
                for result, branch in zip(results, (on_false, on_true), strict=True)
            ]
            specs = output.spec, INDEX
            value, _ = self.put(node, "merge", MERGE, sides, place, device=device, specs=specs)
            self.tensors[output] = value
            merges.append(value.node)
        if not merges and node in self.awaited:
            # No result is used, but nodes behind the branch must still wait for it.
            gates = [self.gate(branch, node.device) for branch in (on_false, on_true)]
            specs = gates[0].spec, INDEX
            decided, _ = self.put(node, "merge", MERGE, gates, place, device=node.device, specs=specs)
            merges.append(decided.node)
        self.completion[node] = merges

    # -- while ---------------------------------------------------------------------------------------------------

    def put_while(self, node: WhileNode, place: Place) -> None:
        condition, body, n_vars = node.predicate, node.body, node.n_vars
        loop = EnclosingLoop(node, place, self.controls(node.control_inputs), node.name, node.parallel_iterations)
        outer = self.values(node.inputs)
        in_cond, in_body = Place(), Place()
        # Loop variables form cycles, built from the middle. First come the Merges, which the predicate reads, then its
        # LoopCond, the Switches behind it, and the body. Back edges come last, as the body makes their values.
        merges = [
            self.put_merge(loop, "", value, inner.spec, in_cond, inner.node.device)
            for value, inner in zip(outer[:n_vars], body.inputs, strict=False)
        ]
        control_loops: list[Device] = []

        def open_cond(device: Device) -> Tensor:
            control_loops.append(device)
            return self.put_merge(loop, "control", self.always(), NEWS, in_cond, device)

        def open_body(device: Device) -> Tensor:
            false_side, true_side = self.put_switch(node, self.gate(in_cond, device), pred, in_cond, device)
            self.value_places[false_side] = self.value_places[true_side] = in_body
            return true_side

        # Nodes that no loop variable delays wait for a gate: a value that their device has in each iteration. A loop
        # variable on the device serves as the gate. Otherwise the first such node makes a control loop: a device used
        # only in the predicate, or only in the body, gets no more than it needs.
        self.opened += (in_cond, in_body)
        in_cond.open, in_body.open = open_cond, open_body
        gate = _gate_variable(merges, node)
        if gate is not None:
            in_cond.gates[node.device] = merges[gate]
        for position, (inner_cond, inner_body) in enumerate(zip(condition.inputs, body.inputs, strict=True)):
            if position < n_vars:
                self.bind_input(inner_cond, merges[position])
                continue
            capture = outer[position]
            if capture not in self.constants:
                self.captures[inner_cond] = capture, loop
                self.ungated.add(inner_cond)
                capture = inner_cond
            self.bind_input(inner_cond, capture)
            self.bind_input(inner_body, capture)
        self.put_nodes(condition, in_cond)
        (pred,) = self.values(condition.results)
        # One LoopCond drives the Switches of all devices: its value is sent there, and acknowledged (`drivers`).
        pred = self.host_value(pred, node, in_cond, use="loop")
        (pred,) = self.put(node, "loop_cond", LOOP_COND, [pred], in_cond, device=node.device)
        self.drivers.add(pred.node)
        switches = [self.put_switch(node, merged, pred, in_cond, merged.node.device) for merged in merges]
        for inner_body, sides in zip(body.inputs[:n_vars], switches, strict=True):
            self.value_places.update(dict.fromkeys(sides, in_body))
            self.bind_input(inner_body, sides[1])
        if gate is not None:
            in_body.gates[node.device] = switches[gate][1]
        self.put_nodes(body, in_body)
        for merged, result in zip(merges, body.results, strict=True):
            value = self.gated(result, in_body, node, merged.node.device)
            self.put_back_edge(node, merged, value, in_body)
        for device in control_loops:
            self.put_back_edge(node, in_cond.gates[device], self.gate(in_body, device), in_body)
        self.put_exits(node, [false_side for false_side, _ in switches], place)

    def put_exits(self, node: WhileNode, false_sides: Sequence[Tensor], around: Place) -> None:
        """One Exit per result in use; all of them if something waits for the loop as a whole."""
        exits = []
        for output, false_side in zip(node.outputs, false_sides, strict=True):
            if output in self.used or node in self.awaited:
                device = false_side.node.device
                (left,) = self.put(node, "exit", EXIT, [false_side], self.outside, device=device, specs=output.spec)
                self.places[left.node] = around
                self.tensors[output] = left
                exits.append(left.node)
        self.completion[node] = exits


def _gate_variable(merges: Sequence[Tensor], loop: WhileNode) -> int | None:
    """Return the loop variable whose arrival gates the predicate's device: a counter if there is one, as it is never
    late.

    In a loop over several devices only a counter will do: nodes that wait for a slow variable would be received too
    late for iterations to overlap. A sum is such a variable too, so there the counter has to be a variable that the
    predicate reads. Without one, None asks for a control loop.
    """
    condition = loop.predicate
    read = {*condition.results, *(tensor for node in condition.nodes for tensor in node.inputs)}
    there = [index for index, merged in enumerate(merges) if merged.node.device == loop.device]
    counters = [index for index in there if merges[index].dtype.kind in "iu"]
    read_ones = [index for index in counters if condition.inputs[index] in read]
    if read_ones or not there or _is_cut(loop):
        return read_ones[0] if read_ones else None
    return (counters or there)[0]


def _is_cut(loop: WhileNode) -> bool:
    """Return True if a loop has nodes on several devices."""
    return any(
        inner.device != loop.device for body in loop.subgraphs for inner in body.walk() if not is_everywhere(inner)
    )
