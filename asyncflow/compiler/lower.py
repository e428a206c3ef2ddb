"""Pass: rewrites `cond` and `while` nodes into the five primitives (EuroSys '18 §4.2).

The result is one flat graph in which no edge leads from one device to another.

A `while`, per loop variable: Enter → Merge → Switch → body → NextIteration → Merge, and Switch → Exit, with the
predicate behind one LoopCond and each capture behind a constant Enter. A `cond`: one Switch per capture and one Merge
per result. All primitives of one loop variable are on one device; a Switch is on the device of its data.

Gating. A node must not run in an iteration that has not begun, nor in a branch not taken. Most are held back by an
input that comes through a Switch or Merge. Constants are not: they belong to every frame, and cost nothing in a run.
Neither are a loop's captures, which a constant Enter brings to every iteration. A node with only such *ungated* inputs
(or none) gets a control edge from the *pivot* of the branch or iteration it belongs to, on its own device.

Devices (EuroSys '18 §4.4, white paper §3.2.2). A value used on another device is sent there once: a Send beside its
producer and a Recv, gated like any node, beside its users. A control edge between devices sends the news alone. A loop
over several devices has a *control loop* on each that does not own the predicate: an Enter, Merge, Switch and
NextIteration that do nothing but receive the predicate in each iteration, and so start the next one or end. A branch on
a device of its own has a Switch of the predicate there, so its Recvs are dead without any message when it is not taken.
Captures are sent once, before the loop, whose constant Enters are on every device that uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from asyncflow.compiler.extract import EMIT, FEED, FETCH
from asyncflow.compiler.frames import has_primitives
from asyncflow.compiler.transfers import EXPAND, RECV, SEND, TO_HOST, TRUNCATE
from asyncflow.control.primitives.enter import ENTER
from asyncflow.control.primitives.exit import EXIT
from asyncflow.control.primitives.loop_cond import LOOP_COND
from asyncflow.control.primitives.merge import MERGE
from asyncflow.control.primitives.next_iteration import NEXT_ITERATION
from asyncflow.control.primitives.switch import SWITCH
from asyncflow.graph.builtin import CONSTANT, IDENTITY
from asyncflow.graph.dtypes import bool_, float32, int32, uint16
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from asyncflow.graph.graph import Subgraph
    from asyncflow.graph.op import Op

_INDEX = Spec(int32, ())
_NEWS = Spec(bool_, ())

_Device: TypeAlias = str | None
"""A full name; None for the only device of a plan that was not placed."""


@dataclass(slots=True, eq=False)
class _Place:
    """Where nodes are being put: outside everything, in a branch, or in a part of a loop.

    Attributes:
        open: makes the gate on a device that has none yet; None outside everything.
        gates: by device, a tensor whose arrival means that the branch is taken, or the iteration has begun.
        pivots: by device, the node to wait for instead.
    """

    open: Callable[[_Device], Tensor] | None = None
    gates: dict[_Device, Tensor] = field(default_factory=dict)
    pivots: dict[_Device, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Loop:
    """What is known of a loop around the places in it."""

    node: Node
    around: _Place
    before: list[Node]


def lower(
    graph: Graph,
    *,
    asynchronous: Collection[str] = (),
    truncate: bool = False,
    delay: Callable[[Graph, Mapping[Node, object]], object] | None = None,
) -> Graph:
    """`graph` without structured nodes; `graph` itself is used up.

    Args:
        graph: structured, each node with its device.
        asynchronous: devices whose values must be copied to the host before Python may look at them.
        truncate: send float32 values as their upper 16 bits.
        delay: adds control inputs to Recvs, given the result and the places of its nodes; see `delay_recvs`. Not called
            where control flow is written by hand: then places are not known.
    """
    if delay is not None and has_primitives(graph.walk()):
        delay = None
    lowering = _Lowering(graph, asynchronous, truncate)
    lowering.put_nodes(graph, lowering.outside)
    if delay is not None:
        delay(lowering.flat, lowering.places)
    return lowering.finish()


class _Lowering:
    def __init__(self, source: Graph, asynchronous: Collection[str], truncate: bool) -> None:
        self.flat = Graph(effects=source.effects, seed=source.seed)
        for node in source.walk():
            self.flat.unique_name(node.name)  # nodes keep their names; new ones must not take them
        self.asynchronous = frozenset(asynchronous)
        self.truncate = truncate
        self.outside = _Place()
        self.tensors: dict[Tensor, Tensor] = {}
        # What a control edge from a structured node, or from a body's input, waits for.
        self.completion: dict[Node, list[Node]] = {}
        self.constants: set[Tensor] = set()
        self.ungated: set[Tensor] = set()
        # A loop's captures: the body's input, which stands for the constant Enters, to the value outside.
        self.captures: dict[Tensor, tuple[Tensor, _Loop]] = {}
        self.here: dict[tuple[Tensor, _Device], Tensor] = {}
        self.news: dict[tuple[Node, _Device], Node] = {}
        self.on_host: dict[tuple[Tensor, _Place], Tensor] = {}
        # Places of nodes; and of values, where they are not those of their nodes.
        self.places: dict[Node, _Place] = {}
        self.value_places: dict[Tensor, _Place] = {}
        self.n_transfers = 0
        self.true: Tensor | None = None
        self.awaited: set[Node] = set()
        self.used: set[Tensor] = set()
        for node in source.walk():
            self.awaited.update(node.control_inputs)
            self.used.update(node.inputs)
            self.used.update(result for body in node.subgraphs for result in body.results)
        # Where values of such nodes are used, so that news of them can come with the value.
        self.used_on = {
            (tensor, node.device)
            for node in source.walk()
            if not node.subgraphs
            for tensor in node.inputs
            if tensor.node in self.awaited
        }

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
            inputs = self.values(node.inputs)
            if node.op in (FETCH, EMIT):
                inputs = [self.host_value(tensor, node, place) for tensor in inputs]
            controls = self.arrived(self.controls(node.control_inputs), node.device)
            node.inputs = [self.local(tensor, node.device) for tensor in inputs]
            node.control_inputs = self.held_back(inputs, controls, place, node.device)
            self.places[node] = place
        self.flat.adopt(node)

    def values(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [self.tensors.get(tensor, tensor) for tensor in tensors]

    def put(
        self,
        like: Node,
        suffix: str,
        op: Op,
        inputs: Sequence[Tensor],
        place: _Place,
        *,
        device: _Device,
        specs: Spec | tuple[Spec, ...] | None = None,
        controls: Iterable[Node] = (),
        **attrs: Any,
    ) -> tuple[Tensor, ...]:
        """Puts a new node on behalf of `like`."""
        local = [self.local(tensor, device) for tensor in inputs]
        control_inputs = self.held_back(inputs, self.arrived(controls, device), place, device)
        node = self.flat.add_node(
            op,
            local,
            attrs,
            inputs[0].spec if specs is None else specs,
            name=f"{like.name}/{suffix}",
            location=like.location,
        )
        node.device, node.control_inputs = device, control_inputs
        self.places[node] = place
        return node.outputs

    def held_back(self, inputs: Iterable[Tensor], controls: list[Node], place: _Place, device: _Device) -> list[Node]:
        """The control inputs of a node to be put: the pivot, if nothing else gates it."""
        if place.open is None or controls or any(tensor not in self.ungated for tensor in inputs):
            return controls
        return [self.pivot(place, device)]

    def gate(self, place: _Place, device: _Device) -> Tensor:
        """A tensor on `device` whose arrival means that `place` is live."""
        if device not in place.gates:
            assert place.open is not None
            place.gates[device] = place.open(device)
        return place.gates[device]

    def pivot(self, place: _Place, device: _Device) -> Node:
        if device not in place.pivots:
            place.pivots[device] = self.arrival(self.gate(place, device))
        return place.pivots[device]

    def arrival(self, tensor: Tensor) -> Node:
        """A node that runs when `tensor` arrives live: its own node, or an identity behind one side of a Switch."""
        node = tensor.node
        if node.op is not SWITCH:
            return node
        name, place = f"{node.name}/pivot", self.place_of(tensor)
        pivot = self.flat.add_node(IDENTITY, (tensor,), {}, tensor.spec, name=name, location=node.location)
        pivot.device, self.places[pivot] = node.device, place
        return pivot

    def controls(self, nodes: Iterable[Node]) -> list[Node]:
        """Control inputs, with structured nodes and body inputs replaced by what stands for them."""
        found = (stand_in for node in nodes for stand_in in self.completion.get(node, (node,)))
        return list(dict.fromkeys(found))

    def bind_input(self, inner: Tensor, value: Tensor) -> None:
        """Makes a body's `inner` stand for `value`."""
        self.tensors[inner] = value
        if inner.node in self.awaited:
            # What is there from the start holds nothing back; `held_back` then adds the pivot.
            self.completion[inner.node] = [] if value in self.ungated else [self.arrival(value)]

    # -- crossing from device to device --------------------------------------------------------------------------

    def local(self, tensor: Tensor, device: _Device) -> Tensor:
        """`tensor` as nodes on `device` use it."""
        if tensor in self.constants:
            return tensor
        if tensor in self.captures:
            return self.once(tensor, device, self.enter_constant)
        if tensor.node.device == device:
            return tensor
        return self.once(tensor, device, self.feed if tensor.node.op is FEED else self.send)

    def once(self, tensor: Tensor, device: _Device, make: Callable[[Tensor, _Device], Tensor]) -> Tensor:
        found = self.here.get((tensor, device))
        if found is None:
            found = self.here[tensor, device] = make(tensor, device)
        return found

    def send(self, tensor: Tensor, device: _Device) -> Tensor:
        source, place = tensor.node, self.place_of(tensor)
        if self.truncate and tensor.dtype == float32:
            spec = Spec(uint16, tensor.shape)
            short = self.put(source, "truncate", TRUNCATE, [tensor], place, device=source.device, specs=spec)
            (received,) = self.transfer(source, short, spec, place, device)
            return self.put(source, "expand", EXPAND, [received], place, device=device, specs=tensor.spec)[0]
        return self.transfer(source, [tensor], tensor.spec, place, device)[0]

    def transfer(
        self, source: Node, sent: Sequence[Tensor], spec: Spec, place: _Place, device: _Device
    ) -> tuple[Tensor, ...]:
        """A Send beside `source` and a Recv on `device`; without anything sent, the news that `source` has run."""
        self.n_transfers += 1
        is_acknowledged = source.op is LOOP_COND and len(sent) > 0  # not for the news, which may come besides
        self.put(
            source,
            "send",
            SEND,
            sent,
            place,
            device=source.device,
            specs=(),
            controls=() if sent else (source,),
            transfer=self.n_transfers,
            target=device,
            is_acknowledged=is_acknowledged,
        )
        return self.put(
            source,
            "recv",
            RECV,
            (),
            place,
            device=device,
            specs=spec,
            transfer=self.n_transfers,
            source=source.device,
            spec=spec,
            is_acknowledged=is_acknowledged,
        )

    def feed(self, tensor: Tensor, device: _Device) -> Tensor:
        """Fed values come from outside, so each device takes its own copy."""
        node = tensor.node
        copy = self.flat.add_node(FEED, (), node.attrs, tensor.spec, name=node.name, location=node.location)
        copy.device, self.places[copy] = device, self.outside
        return copy.outputs[0]

    def enter_constant(self, inner: Tensor, device: _Device) -> Tensor:
        """The constant Enter of a capture on `device`."""
        value, loop = self.captures[inner]
        attrs = _enter_attrs(loop.node, constant=True)
        (entered,) = self.put(loop.node, "enter", ENTER, [value], loop.around, device=device, **attrs)
        return entered

    def arrived(self, nodes: Iterable[Node], device: _Device) -> list[Node]:
        """What nodes on `device` wait for in place of `nodes`."""
        return [node if node.device == device else self.arrived_from(node, device) for node in nodes]

    def arrived_from(self, node: Node, device: _Device) -> Node:
        if (node, device) not in self.news:
            # The same transfer brings a value and the news that it was made.
            brought = (tensor for tensor in node.outputs if tensor not in self.value_places)
            there = (t for t in brought if (t, device) in self.used_on or (t, device) in self.here)
            arrival = next((self.local(tensor, device).node for tensor in there), None)
            if arrival is None:
                (told,) = self.transfer(node, (), _NEWS, self.places[node], device)
                arrival = told.node
            self.news[node, device] = arrival
        return self.news[node, device]

    def host_value(self, tensor: Tensor, like: Node, place: _Place, *, is_predicate: bool = False) -> Tensor:
        """`tensor` where Python can look at it."""
        device = tensor.node.device
        if device not in self.asynchronous:
            return tensor
        if tensor not in self.ungated:
            place = self.place_of(tensor)
        if (tensor, place) not in self.on_host:
            (copied,) = self.put(like, "to_host", TO_HOST, [tensor], place, device=device, is_predicate=is_predicate)
            self.on_host[tensor, place] = copied
        return self.on_host[tensor, place]

    def place_of(self, tensor: Tensor) -> _Place:
        """Where a value is live; hand-written primitives say nothing of it, and are on one device."""
        return self.value_places.get(tensor) or self.places.get(tensor.node, self.outside)

    # -- cond ----------------------------------------------------------------------------------------------------

    def put_cond(self, node: Node, place: _Place) -> None:
        pred, *captured = self.values(node.inputs)
        before = self.controls(node.control_inputs)
        if before:
            (pred,) = self.put(node, "pred", IDENTITY, [pred], place, device=pred.node.device, controls=before)
        pred = self.host_value(pred, node, place, is_predicate=True)
        on_true, on_false = _Place(), _Place()

        def switch(data: Tensor, device: _Device) -> tuple[Tensor, Tensor]:
            false_side, true_side = self.put_switch(node, data, pred, place, device)
            for side, branch in ((false_side, on_false), (true_side, on_true)):
                branch.gates[device] = side
                self.value_places[side] = branch
            return false_side, true_side

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
            specs = output.spec, _INDEX
            value, _ = self.put(node, "merge", MERGE, sides, place, device=device, specs=specs)
            self.tensors[output] = value
            merges.append(value.node)
        if not merges and node in self.awaited:
            # Nobody wants a result, but the order of what is before and after has to hold.
            gates = [self.gate(branch, node.device) for branch in (on_false, on_true)]
            specs = gates[0].spec, _INDEX
            decided, _ = self.put(node, "merge", MERGE, gates, place, device=node.device, specs=specs)
            merges.append(decided.node)
        self.completion[node] = merges

    def put_switch(
        self, node: Node, data: Tensor, pred: Tensor, place: _Place, device: _Device
    ) -> tuple[Tensor, Tensor]:
        specs = data.spec, data.spec
        false_side, true_side = self.put(node, "switch", SWITCH, [data, pred], place, device=device, specs=specs)
        return false_side, true_side

    def gated(self, result: Tensor, place: _Place, like: Node, device: _Device) -> Tensor:
        """A body's result as a value that only exists if the body ran."""
        value = self.tensors.get(result, result)
        if value not in self.ungated:
            return value
        return self.put(like, "result", IDENTITY, [value], place, device=device)[0]

    def device_of(self, result: Tensor, like: Node) -> _Device:
        """Where a body's result is; a constant is everywhere."""
        value = self.tensors.get(result, result)
        return like.device if value in self.constants else value.node.device

    # -- while ---------------------------------------------------------------------------------------------------

    def put_while(self, node: Node, place: _Place) -> None:
        condition: Subgraph = node.attrs["cond"]
        body: Subgraph = node.attrs["body"]
        n_vars: int = node.attrs["n_vars"]
        loop = _Loop(node, place, self.controls(node.control_inputs))
        outer = self.values(node.inputs)
        in_cond, in_body = _Place(), _Place()
        merges = self.put_merges(loop, outer[:n_vars], body, in_cond)
        control_loops: list[_Device] = []

        def open_cond(device: _Device) -> Tensor:
            control_loops.append(device)
            return self.put_merge(loop, "control", self.always(), _NEWS, in_cond, device)

        def open_body(device: _Device) -> Tensor:
            false_side, true_side = self.put_switch(node, self.gate(in_cond, device), pred, in_cond, device)
            self.value_places[false_side] = self.value_places[true_side] = in_body
            return true_side

        in_cond.open, in_body.open = open_cond, open_body
        gate = _gate_variable(merges, node.device)
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
        pred = self.host_value(pred, node, in_cond, is_predicate=True)
        (pred,) = self.put(node, "loop_cond", LOOP_COND, [pred], in_cond, device=node.device)
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

    def put_merges(self, loop: _Loop, initial: Sequence[Tensor], body: Subgraph, in_cond: _Place) -> list[Tensor]:
        return [
            self.put_merge(loop, "", value, inner.spec, in_cond, inner.node.device)
            for value, inner in zip(initial, body.inputs, strict=False)
        ]

    def put_merge(
        self, loop: _Loop, prefix: str, initial: Tensor, spec: Spec, in_cond: _Place, device: _Device
    ) -> Tensor:
        """The Enter and Merge of a loop variable or, prefixed ``control``, of a control loop."""
        attrs = _enter_attrs(loop.node, constant=False)
        enter, merge = (f"{prefix}_{op}" if prefix else op for op in ("enter", "merge"))
        (entered,) = self.put(
            loop.node, enter, ENTER, [initial], loop.around, device=device, controls=loop.before, **attrs
        )
        merged, _ = self.put(loop.node, merge, MERGE, [entered], self.outside, device=device, specs=(spec, _INDEX))
        self.places[merged.node] = in_cond
        return merged

    def put_back_edge(self, loop: Node, merged: Tensor, value: Tensor, in_body: _Place) -> None:
        device = merged.node.device
        (again,) = self.put(loop, "next_iteration", NEXT_ITERATION, [value], in_body, device=device)
        merged.node.inputs.append(again)

    def put_exits(self, node: Node, false_sides: Sequence[Tensor], around: _Place) -> None:
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

    def always(self) -> Tensor:
        """A constant that starts control loops."""
        if self.true is None:
            node = self.flat.add_node(CONSTANT, (), {"value": np.array(True)}, _NEWS, name="always")
            self.true = node.outputs[0]
            self.constants.add(self.true)
            self.ungated.add(self.true)
        return self.true


def _gate_variable(merges: Sequence[Tensor], device: _Device) -> int | None:
    """The loop variable whose arrival gates the predicate's device: a counter if there is one, as it is never late."""
    there = [index for index, merged in enumerate(merges) if merged.node.device == device]
    return next((index for index in there if merges[index].dtype.kind in "iu"), there[0] if there else None)


def _enter_attrs(loop: Node, *, constant: bool) -> dict[str, Any]:
    return {"frame": loop.name, "constant": constant, "parallel_iterations": loop.attrs["parallel_iterations"]}
