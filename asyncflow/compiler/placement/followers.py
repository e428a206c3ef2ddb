"""Devices for nodes without work of their own: constants, fed and fetched values, parameters, `cond` and `while`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from asyncflow.compiler.placement.choices import Choices
from asyncflow.compiler.program.extract import EMIT, FEED, FETCH
from asyncflow.graph.builtin import CONSTANT, PARAMETER
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode


def place_followers(graph: Graph, choices: Choices, where: dict[Node, int], why: dict[Node, str]) -> None:
    """Add every missing node of `graph` to `where` and `why`.

    A constant or fed value goes to its first user, and a capture to its value. A loop variable goes to the maker of its
    next value or, if it never changes, of its initial value. A `while` and a `cond` go to the predicate; fetched and
    streamed values are handed out where they are.
    """
    _Followers(graph, choices, where, why).run()


@dataclass(slots=True)
class _Followers:
    graph: Graph
    choices: Choices
    where: dict[Node, int]
    why: dict[Node, str]
    users: dict[Tensor, list[Node]] = field(default_factory=dict)
    owners: dict[Graph, StructuredNode] = field(default_factory=dict)
    positions: dict[Tensor, int] = field(default_factory=dict)

    def run(self) -> None:
        nodes = list(self.graph.walk())
        for node in nodes:
            for tensor in node.inputs:
                # A node that has a device needs no users to find one.
                if tensor.node not in self.where:
                    self.users.setdefault(tensor, []).append(node)
            if isinstance(node, StructuredNode):
                for body in node.subgraphs:
                    self.owners[body] = node
                    inner = enumerate(body.inputs, start=node.body_offset)
                    self.positions.update((tensor, place) for place, tensor in inner)
        self.put_bound(nodes)
        for node in nodes:
            self.device_of_node(node)

    def put_bound(self, nodes: Sequence[Node]) -> None:
        """Put constants and fed values with requests on the device of their group."""
        groups = {node.colocated_with: device for node, device in self.where.items() if node.colocated_with is not None}
        for node in nodes:
            if node in self.where or not self.choices.is_bound(node) or node.op not in (CONSTANT, FEED):
                continue
            device, label = self.choices.allowed(node)[0], node.colocated_with
            if label is not None:
                device = groups.setdefault(label, device)
            self.put(node, device, self.choices.asked_reason(node) or "does no work")

    def put(self, node: Node, device: int, reason: str) -> int:
        self.where[node] = device
        self.why[node] = reason
        return device

    def device_of_node(self, node: Node) -> int:
        """The device of a node, which is settled if it is not."""
        found = self.where.get(node)
        if found is not None:
            return found
        if node.op is PARAMETER:
            return self.device_of(node.outputs[0])
        if isinstance(node, StructuredNode):
            return self.put(node, self.device_of(node.decision), "with its predicate")
        if node.op in (FETCH, EMIT):
            return self.put(node, self.device_of(node.inputs[0]), "where its value is")
        user = next((user for tensor in node.outputs for user in self.working_users(tensor)), None)
        if user is None:
            return self.put(node, 0, "nothing uses it")
        return self.put(node, self.where[user], f"with its first user, {user.name}")

    def device_of(self, tensor: Tensor) -> int:
        """The device that has a value first; parameters on the way to where it comes from are settled too."""
        followed: dict[Node, str] = {}
        while True:
            node = tensor.node
            if isinstance(node, WhileNode):
                tensor = node.body.inputs[tensor.index]
            elif isinstance(node, CondNode):
                # Like the Merge of the two results: with the true branch's result.
                tensor = node.subgraphs[0].results[tensor.index]
            elif node.op is PARAMETER and node not in self.where:
                tensor, reason = self.stands_for(node, followed)
                followed[node] = reason
            else:
                break
        device = self.device_of_node(node)
        for parameter, reason in followed.items():
            self.put(parameter, device, reason)
        return device

    def stands_for(self, node: Node, followed: Mapping[Node, str]) -> tuple[Tensor, str]:
        """The value whose place a parameter shares, and why."""
        owner, position = self.owners[node.graph], self.positions[node.outputs[0]]
        if isinstance(owner, WhileNode) and position < owner.n_vars:
            variable, result = owner.body.inputs[position], owner.body.results[position]
            if node is not variable.node:
                return variable, "a loop variable"
            # A variable that only ever takes values of other variables is placed where it starts.
            if result is not variable and node not in followed:
                return result, "a loop variable, where its next value is made"
            return owner.inputs[position], "a loop variable, where it begins"
        return owner.inputs[position], "where the captured value is"

    def working_users(self, tensor: Tensor) -> Iterator[Node]:
        """Yield the nodes that use a value and have a place, in order, also inside branches and loops."""
        stack, seen = [tensor], {tensor}
        while stack:
            here = stack.pop()
            deeper: list[Tensor] = []
            for user in self.users.get(here, ()):
                if not isinstance(user, StructuredNode):
                    if user in self.where and user.op not in (FETCH, EMIT):
                        yield user
                    continue
                offset = user.body_offset
                places = [place for place, given in enumerate(user.inputs) if given is here and place >= offset]
                deeper += [body.inputs[place - offset] for body in user.subgraphs for place in places]
            stack.extend(inner for inner in reversed(deeper) if inner not in seen)
            seen.update(deeper)
