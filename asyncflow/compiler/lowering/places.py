"""Putting nodes into a flat graph: each on its device, held back until it may run, its inputs brought to it.

The part of lowering that knows neither branches nor loops, only what both are made of; `lower.py` tells what gating
is, and how values cross from device to device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from asyncflow.compiler.program.extract import FEED
from asyncflow.compiler.program.kernels.transfers import EXPAND, RECV, SEND, TO_HOST, TRUNCATE, HostUse
from asyncflow.control.primitives.control_trigger import CONTROL_TRIGGER
from asyncflow.control.primitives.enter import ENTER
from asyncflow.control.primitives.merge import MERGE
from asyncflow.control.primitives.next_iteration import NEXT_ITERATION
from asyncflow.control.primitives.switch import SWITCH
from asyncflow.graph.builtin import CONSTANT, IDENTITY
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import Op
from asyncflow.graph.values.dtypes import bool_, float32, int32, uint16
from asyncflow.graph.values.spec import Spec

Device: TypeAlias = str | None
"""A full name; None for the only device of a plan that was not placed."""

NEWS = Spec(bool_, ())
INDEX = Spec(int32, ())


@dataclass(slots=True, eq=False)
class Place:
    """A place for nodes: outside all branches and loops, in a branch, or in a part of a loop.

    Attributes:
        open: makes the gate on a device that has none yet; None outside everything.
        gates: by device, a tensor whose arrival means that the branch is taken, or the iteration has begun.
        pivots: by device, the node to wait for instead.
    """

    open: Callable[[Device], Tensor] | None = None
    gates: dict[Device, Tensor] = field(default_factory=dict)
    pivots: dict[Device, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class EnclosingLoop:
    """Facts about a loop around the places in it.

    Attributes:
        node: the node that its primitives implement.
        around: the place of the loop.
        before: nodes that it waits for.
        frame: name of its frame.
        parallel_iterations: how many of them may be live at once.
        holds_back: constants that enter have to wait until it is known that it is live.
    """

    node: Node
    around: Place
    before: list[Node]
    frame: str
    parallel_iterations: int
    holds_back: bool = False

    def enter_attrs(self, *, constant: bool) -> Attrs:
        """Return the attributes of an Enter into it."""
        attrs = {"frame": self.frame, "constant": constant, "parallel_iterations": self.parallel_iterations}
        return attrs if self.node.op is ENTER else attrs | {"loop": self.node.name}


class FlatBuilder:
    """Puts nodes into `flat`, a graph in which no edge leads from one device to another."""

    def __init__(self, source: Graph, asynchronous: Collection[str], truncate: bool) -> None:
        self.flat = Graph(effects=source.effects, seed=source.seed)
        nodes = source.walk()
        for node in nodes:
            self.flat.reserve(node.name)  # nodes keep their names; new ones must not take them
        self.asynchronous = frozenset(asynchronous)
        self.truncate = truncate
        self.outside = Place()
        self.tensors: dict[Tensor, Tensor] = {}
        # Nodes to wait for in place of a structured node, or of a body's input, at the start of a control edge.
        self.completion: dict[Node, list[Node]] = {}
        self.constants: set[Tensor] = set()
        self.ungated: set[Tensor] = set()
        # A loop's captures: the body's input, which stands for the constant Enters, to the value outside.
        self.captures: dict[Tensor, tuple[Tensor, EnclosingLoop]] = {}
        self.here: dict[tuple[Tensor, Device], Tensor] = {}
        self.news: dict[tuple[Node, Device], Node] = {}
        self.on_host: dict[tuple[Tensor, Place], Tensor] = {}
        # Places of nodes; and of values, where they differ from the places of their nodes.
        self.places: dict[Node, Place] = {}
        self.value_places: dict[Tensor, Place] = {}
        # Places that can be opened.
        self.opened: list[Place] = []
        # LoopConds: each receiver of the predicate acknowledges when its iteration has ended.
        self.drivers: set[Node] = set()
        self.n_transfers = 0
        self.true: Tensor | None = None
        self.awaited: set[Node] = set()
        self.used: set[Tensor] = set()
        for node in nodes:
            self.awaited.update(node.control_inputs)
            self.used.update(node.inputs)
            self.used.update(result for body in node.subgraphs for result in body.results)
        # Devices that use values of awaited nodes, so that the news can come with the value.
        self.used_on = {
            (tensor, node.device)
            for node in nodes
            for tensor in node.inputs
            if tensor.node in self.awaited and not node.subgraphs
        }

    def values(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The stand-in for tensors of the structured graph."""
        return [self.tensors.get(tensor, tensor) for tensor in tensors]

    def put(
        self,
        like: Node,
        suffix: str,
        op: Op,
        inputs: Sequence[Tensor],
        place: Place,
        *,
        device: Device,
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
            reserved_name=self.flat.reserve(f"{like.name}/{suffix}"),
            location=like.location,
        )
        node.device, node.control_inputs = device, control_inputs
        self.places[node] = place
        return node.outputs

    def held_back(self, inputs: Iterable[Tensor], controls: list[Node], place: Place, device: Device) -> list[Node]:
        """The control inputs of a node to be put: the pivot, if nothing else gates it."""
        if place.open is None or controls or any(tensor not in self.ungated for tensor in inputs):
            return controls
        return [self.pivot(place, device)]

    def gate(self, place: Place, device: Device) -> Tensor:
        """A tensor on `device` whose arrival means that `place` is live."""
        if device not in place.gates:
            assert place.open is not None
            place.gates[device] = place.open(device)
        return place.gates[device]

    def pivot(self, place: Place, device: Device) -> Node:
        """The node on `device` that others wait for to run only where `place` is live."""
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
        """Return control inputs, with structured nodes and body inputs replaced by their stand-ins."""
        found = (stand_in for node in nodes for stand_in in self.completion.get(node, (node,)))
        return list(dict.fromkeys(found))

    def bind_input(self, inner: Tensor, value: Tensor) -> None:
        """Makes a body's `inner` stand for `value`."""
        self.tensors[inner] = value
        if inner.node in self.awaited:
            # A value that is there from the start delays no node; `held_back` then adds the pivot.
            self.completion[inner.node] = [] if value in self.ungated else [self.arrival(value)]

    # -- crossing from device to device --------------------------------------------------------------------------

    def local(self, tensor: Tensor, device: Device) -> Tensor:
        """Return `tensor` as nodes on `device` use it."""
        if tensor in self.constants:
            return tensor
        if tensor in self.captures:
            return self.once(tensor, device, self.enter_constant)
        if tensor.node.device == device:
            return tensor
        return self.once(tensor, device, self.feed if tensor.node.op is FEED else self.send)

    def once(self, tensor: Tensor, device: Device, make: Callable[[Tensor, Device], Tensor]) -> Tensor:
        """The result of `make`, made once."""
        found = self.here.get((tensor, device))
        if found is None:
            found = self.here[tensor, device] = make(tensor, device)
        return found

    def send(self, tensor: Tensor, device: Device) -> Tensor:
        """The value on another device, after a transfer."""
        source, place = tensor.node, self.place_of(tensor)
        if self.truncate and tensor.dtype == float32:
            spec = Spec(uint16, tensor.shape)
            short = self.put(source, "truncate", TRUNCATE, [tensor], place, device=source.device, specs=spec)
            (received,) = self.transfer(source, short, spec, place, device)
            return self.put(source, "expand", EXPAND, [received], place, device=device, specs=tensor.spec)[0]
        return self.transfer(source, [tensor], tensor.spec, place, device)[0]

    def transfer(
        self, source: Node, sent: Sequence[Tensor], spec: Spec, place: Place, device: Device
    ) -> tuple[Tensor, ...]:
        """A Send beside `source` and a Recv on `device`; without anything sent, the news that `source` has run."""
        number = self.n_transfers = self.n_transfers + 1
        is_acknowledged = source in self.drivers and len(sent) > 0  # news without a value is not acknowledged
        controls = [] if sent else [source]
        if source.op is CONTROL_TRIGGER and place.open is not None:
            controls.append(self.pivot(place, source.device))  # a trigger also fires in dead places, without a Recv
        there: Attrs = {"transfer": number, "target": device, "is_acknowledged": is_acknowledged}
        self.put(source, "send", SEND, sent, place, device=source.device, specs=(), controls=controls, **there)
        here: Attrs = {"transfer": number, "source": source.device, "spec": spec, "is_acknowledged": is_acknowledged}
        return self.put(source, "recv", RECV, (), place, device=device, specs=spec, **here)

    def feed(self, tensor: Tensor, device: Device) -> Tensor:
        """Fed values come from outside, so each device takes its own copy."""
        node = tensor.node
        copy = self.flat.add_node(FEED, (), node.attrs, tensor.spec, name=node.name, location=node.location)
        copy.device, self.places[copy] = device, self.outside
        return copy.outputs[0]

    def enter_constant(self, inner: Tensor, device: Device) -> Tensor:
        """The constant Enter of a capture on `device`."""
        value, loop = self.captures[inner]
        attrs = {**loop.enter_attrs(constant=True), "specs": inner.spec}
        if loop.holds_back:
            attrs["controls"] = [self.pivot(loop.around, device)]
        return self.put(loop.node, "enter", ENTER, [value], loop.around, device=device, **attrs)[0]

    def arrived(self, nodes: Iterable[Node], device: Device) -> list[Node]:
        """The nodes that nodes on `device` wait for in place of `nodes`."""
        return [node if node.device == device else self.arrived_from(node, device) for node in nodes]

    def arrived_from(self, node: Node, device: Device) -> Node:
        """The node on `device` that runs once `node`, of another device, has."""
        if (node, device) not in self.news:
            # One transfer brings a value and the news that it was made.
            brought = (tensor for tensor in node.outputs if tensor not in self.value_places)
            there = (t for t in brought if (t, device) in self.used_on or (t, device) in self.here)
            arrival = next((self.local(tensor, device).node for tensor in there), None)
            if arrival is None:
                (told,) = self.transfer(node, (), NEWS, self.places[node], device)
                arrival = told.node
            self.news[node, device] = arrival
        return self.news[node, device]

    def host_value(self, tensor: Tensor, like: Node, place: Place, *, use: HostUse = "result") -> Tensor:
        """Return `tensor` in a form that Python code can read."""
        device = tensor.node.device
        if device not in self.asynchronous:
            return tensor
        if tensor not in self.ungated:
            place = self.place_of(tensor)
        if (tensor, place) not in self.on_host:
            (copied,) = self.put(like, "to_host", TO_HOST, [tensor], place, device=device, use=use)
            self.on_host[tensor, place] = copied
        elif use in ("predicate", "loop"):
            copied = self.on_host[tensor, place]
            copied.node.attrs = {**copied.node.attrs, "use": use}
        return self.on_host[tensor, place]

    def place_of(self, tensor: Tensor) -> Place:
        """Return the place where a value is live."""
        return self.value_places.get(tensor) or self.places.get(tensor.node, self.outside)

    def gated(self, result: Tensor, place: Place, like: Node, device: Device) -> Tensor:
        """A body's result as a value that only exists if the body ran."""
        value = self.tensors.get(result, result)
        if value not in self.ungated:
            return value
        return self.put(like, "result", IDENTITY, [value], place, device=device)[0]

    def device_of(self, result: Tensor, like: Node) -> Device:
        """Return the device of a body's result; a constant is everywhere."""
        value = self.tensors.get(result, result)
        return like.device if value in self.constants else value.node.device

    # -- the primitives of branches and loops ----------------------------------------------------------------------

    def put_switch(
        self, node: Node, data: Tensor, pred: Tensor, place: Place, device: Device, **attrs: Any
    ) -> tuple[Tensor, Tensor]:
        """``(false_side, true_side)`` of a Switch."""
        specs = data.spec, data.spec
        sides = self.put(node, "switch", SWITCH, [data, pred], place, device=device, specs=specs, **attrs)
        return sides[0], sides[1]

    def put_merge(
        self, loop: EnclosingLoop, prefix: str, initial: Tensor, spec: Spec, in_cond: Place, device: Device
    ) -> Tensor:
        """The Enter and Merge of a loop variable or, prefixed ``control``, of a control loop."""
        attrs = loop.enter_attrs(constant=False)
        enter, merge = (f"{prefix}_{op}" if prefix else op for op in ("enter", "merge"))
        (entered,) = self.put(
            loop.node, enter, ENTER, [initial], loop.around, device=device, controls=loop.before, **attrs
        )
        merged, _ = self.put(loop.node, merge, MERGE, [entered], self.outside, device=device, specs=(spec, INDEX))
        self.places[merged.node] = in_cond
        return merged

    def put_back_edge(self, loop: Node, merged: Tensor, value: Tensor, in_body: Place) -> None:
        """The NextIteration that brings a Merge its next value."""
        device = merged.node.device
        (again,) = self.put(loop, "next_iteration", NEXT_ITERATION, [value], in_body, device=device)
        merged.node.inputs.append(again)

    def always(self) -> Tensor:
        """A constant that starts control loops."""
        if self.true is None:
            node = self.flat.add_node(CONSTANT, (), {"value": np.array(True)}, NEWS, name="always")
            self.true = node.outputs[0]
            self.constants.add(self.true)
            self.ungated.add(self.true)
        return self.true
