"""Soundness of a graph: the rules that building keeps and that every rewriting of a graph has to keep.

In each graph or body: inputs and control inputs stand in the same graph, earlier (but for the back edges of loops
written by hand, `next_iteration` to `merge`); outputs are what the op's shape rule says; bodies of branches and loops
fit the node that holds them. In the whole graph: names and ids are unique and known to the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.errors import GraphError, ShapeError, told
from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode, levels
from asyncflow.graph.text.text import neighbourhood
from asyncflow.graph.values.dtypes import bool_
from asyncflow.graph.values.shapes import is_compatible
from asyncflow.graph.values.spec import show_specs, specs_agree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from asyncflow.graph.ir import Node, Tensor

    Places = Mapping[Node, int]


def verify(graph: Graph) -> None:
    """Checks every rule a graph has to keep, in branches and loops too.

    Raises:
        GraphError: one is broken; the message names the node, the rule, the line that built it and its neighbours.
    """
    names: dict[str, Node] = {}
    ids: dict[int, Node] = {}
    for here in levels(graph):
        places = {node: place for place, node in enumerate(here.nodes)}
        for node in here.nodes:
            _check_registration(node, here, names, ids)
        for node in here.nodes:
            _check_edges(node, places)
            # Bodies first: shape rules of branches and loops rely on them.
            _check_bodies(node, places)
            _check_outputs(node)


def _fault(node: Node, message: str) -> GraphError:
    return GraphError(
        f"node {node.name!r} ({node.op.name}): {message}\n  built at {node.location}\n  it stands here:\n"
        f"{neighbourhood(node)}"
    )


# -- names, ids, versions ----------------------------------------------------------------------------------------


def _check_registration(node: Node, graph: Graph, names: dict[str, Node], ids: dict[int, Node]) -> None:
    root = graph.root
    if node.graph is not graph:
        raise _fault(node, f"it is listed in {graph!r} but says that it belongs to {node.graph!r}")
    if names.setdefault(node.name, node) is not node:
        raise _fault(node, f"another node has its name, built at {names[node.name].location}; names are unique")
    if ids.setdefault(node.id, node) is not node:
        raise _fault(node, f"its id {node.id} is that of node {ids[node.id].name!r} too; ids are unique")
    if node.id >= root.version:
        raise _fault(node, f"its id {node.id} is not below the graph's version {root.version}, which counts nodes")
    if root.node(node.name) is not node:
        raise _fault(node, "the root graph finds another node under its name")


# -- edges -------------------------------------------------------------------------------------------------------


def _check_edges(node: Node, places: Places) -> None:
    for index, tensor in enumerate(node.inputs):
        what = f"input {index}, {tensor.name}"
        _check_source(node, tensor.node, what, places)
        if not _owns(tensor):
            raise _fault(node, f"{what}, is not an output of the node it names")
    for before in node.control_inputs:
        _check_source(node, before, f"control input {before.name}", places)


def _check_source(node: Node, source: Node, what: str, places: Places) -> None:
    if source not in places:
        raise _fault(node, f"{what}, is not in the same graph but in {source.graph!r}")
    if places[source] < places[node] or _is_back_edge(source, node):
        return
    cycle = _path(node, source, places)
    if cycle:
        shown = " -> ".join(member.name for member in (*cycle, node))
        raise _fault(
            node,
            f"it waits for itself: {shown}; a cycle has to pass from a next_iteration to a merge, "
            f"or be written as af.while_loop",
        )
    raise _fault(node, f"{what}, comes later in the graph; nodes are in an order in which they can run")


def _is_back_edge(source: Node, target: Node) -> bool:
    return source.op.name == "next_iteration" and target.op.name == "merge"


def _sources(node: Node) -> Iterator[Node]:
    return (source for source in node.sources if not _is_back_edge(source, node))


def _path(start: Node, end: Node, places: Places) -> list[Node]:
    """Nodes on a way from `start` to `end` along the edges, found backwards from `end`; empty if there is none."""
    towards: dict[Node, Node | None] = {end: None}
    stack = [end]
    while stack and start not in towards:
        node = stack.pop()
        for source in _sources(node):
            if source in places and source not in towards:
                towards[source] = node
                stack.append(source)
    path: list[Node] = []
    step: Node | None = start if start in towards else None
    while step is not None:
        path.append(step)
        step = towards[step]
    return path


def _owns(tensor: Tensor) -> bool:
    outputs = tensor.node.outputs
    return tensor.index < len(outputs) and outputs[tensor.index] is tensor


def _may_be_dead(node: Node) -> bool:
    """Return True if the node may be on a branch that is never taken: known values may then contradict the graph."""
    return any(each.op.name == "switch" for each in node.graph.nodes)


# -- outputs -----------------------------------------------------------------------------------------------------


def _check_outputs(node: Node) -> None:
    inputs = [tensor.spec for tensor in node.inputs]
    seen = ", ".join(map(str, inputs)) or "no inputs"
    try:
        inferred = node.op.infer(*inputs, **node.attrs)
    except Exception as error:
        if isinstance(error, ShapeError) and _may_be_dead(node):
            return
        # The rule may raise anything for inputs and attrs that `apply` has never checked.
        raise _fault(node, f"its op does not take {seen}: {told(error)}") from error
    if not specs_agree(inferred, node.specs):
        raise _fault(
            node, f"its outputs are {show_specs(node.specs)}, but its op makes {show_specs(inferred)} of {seen}"
        )


# -- branches and loops ------------------------------------------------------------------------------------------


def _check_bodies(node: Node, places: Places) -> None:
    if isinstance(node, StructuredNode):
        for name in node.body_names:
            _check_body(node, name, _body(node, name), places)
        if isinstance(node, CondNode):
            _check_cond(node)
        elif isinstance(node, WhileNode):
            _check_while(node)


def _check_body(node: Node, name: str, body: Subgraph, places: Places) -> None:
    if body.parent is not node.graph or body.root is not node.graph.root:
        raise _fault(node, f"its {name} {body.label!r} does not belong to the node's graph")
    for tensor in body.inputs:
        if tensor.node.graph is not body or tensor.node.op is not PARAMETER:
            raise _fault(node, f"input {tensor.name} of its {name} is not a parameter of {body.label!r}")
    for tensor in body.results:
        if tensor.node.graph is not body or not _owns(tensor):
            raise _fault(node, f"result {tensor.name} of its {name} is not a tensor of {body.label!r}")
    for before in body.outer_controls:
        if before not in places:
            raise _fault(node, f"its {name} waits for {before.name!r}, which is not in the graph of the node")
    first = len(node.inputs) - len(body.inputs)
    positions = {tensor: place for place, tensor in enumerate(body.inputs, start=first)}
    for outer, inner in body.captures.items():
        place = positions.get(inner, -1)
        if place < 0 or node.inputs[place] is not outer:
            raise _fault(
                node, f"its {name} captures {outer.name} as {inner.name}, but they are not inputs at one place of both"
            )


def _check_cond(node: CondNode) -> None:
    if not node.inputs:
        raise _fault(node, "its first input must be the predicate; it has no inputs")
    _check_predicate(node, node.inputs[0], "its predicate")
    for branch in (_body(node, name) for name in node.body_names):
        _check_specs(node, node.inputs[1:], branch.inputs, f"inputs after the predicate and inputs of {branch.label!r}")
        _check_specs(node, branch.results, node.outputs, f"results of {branch.label!r} and outputs")


def _check_while(node: WhileNode) -> None:
    predicate, body = (_body(node, name) for name in node.body_names)
    n_vars = node.attrs.get("n_vars")
    if type(n_vars) is not int or not 0 <= n_vars <= len(node.inputs):
        raise _fault(node, f"n_vars is {n_vars!r}; it counts the loop variables among its {len(node.inputs)} inputs")
    for graph in (predicate, body):
        _check_specs(node, node.inputs, graph.inputs, f"inputs and inputs of {graph.label!r}")
    if len(predicate.results) != 1:
        raise _fault(node, f"{predicate.label!r} gives {len(predicate.results)} results; a loop's predicate gives one")
    _check_predicate(node, predicate.results[0], f"the result of {predicate.label!r}")
    _check_specs(node, body.inputs[:n_vars], body.results, f"loop variables and results of {body.label!r}")
    _check_specs(node, body.results, node.outputs, f"results of {body.label!r} and outputs")


def _body(node: Node, name: str) -> Subgraph:
    body = node.attrs.get(name)
    if not isinstance(body, Subgraph):
        raise _fault(node, f"its attr {name!r} must be a body of nodes; it is {body!r}")
    return body


def _check_predicate(node: Node, tensor: Tensor, what: str) -> None:
    if tensor.dtype != bool_ or not is_compatible(tensor.shape, ()):
        raise _fault(node, f"{what} is {tensor.name} {tensor.spec}; it must be a bool scalar, bool[]")


def _check_specs(node: Node, left: Sequence[Tensor], right: Sequence[Tensor], what: str) -> None:
    if len(left) != len(right):
        raise _fault(node, f"its {what} differ in number: {len(left)} and {len(right)}")
    for place, (a, b) in enumerate(zip(left, right, strict=True)):
        if not specs_agree(a.spec, b.spec):
            raise _fault(node, f"its {what} differ at {place}: {a.name} {a.spec} and {b.name} {b.spec}")
