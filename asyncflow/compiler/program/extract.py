"""Pass: copies the part of a graph that one kind of run needs into a fresh graph, which the later passes may change.

Needed are the fetches and everything they depend on, up to the fed tensors. Where a value is needed for its shape only,
the shape is found from other shapes if possible. A check of a shape is left out if it alone would need further values.
Inside branches and loops, needed are the used results and, if effects are ordered, every node with a side effect.
Unused loop variables and branch results are dropped.

No `Copier` makes the copy, since it would repeat all inputs and outputs of a branch or loop. Nodes keep their names
here, and the back edges of loops written by hand are closed at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from asyncflow.compiler.program.request import structured_nodes_around
from asyncflow.compiler.program.shape_rules import SHAPE_BY_RULE, rule_of, shape_sources
from asyncflow.control.stores.tensor_array import ELEMENT_SHAPE, READ
from asyncflow.errors import FeedError, FetchError
from asyncflow.graph.building.build import SupportsTensor
from asyncflow.graph.building.copying import copied
from asyncflow.graph.builtin import PARAMETER, PLACEHOLDER
from asyncflow.graph.graph import Graph, Subgraph, has_side_effect
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import Access, Op
from asyncflow.graph.structured import PooledNode, StructuredNode, WhileNode, bodies_in
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.shapes import is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.shape import SHAPE
from asyncflow.ops.derivatives.shapes import CHECK_SHAPE
from asyncflow.state.mutex import LOCK

FEED = Op("feed", lambda *, spec, index, is_lent=False, stays=False: spec)
"""Op that gives a fed value. A value with the attribute `stays` is on the host, whatever the device."""
FETCH = Op("fetch", lambda value: ())
EMIT = Op("emit", lambda *values: (), effects=lambda node: (("stream", Access.WRITE),))
"""Hands the values of one iteration to `Session.stream`."""


@dataclass(slots=True)
class Extract:
    """The copy: its graph, and the nodes through which values come in and go out."""

    graph: Graph
    fetches: list[Node | None]
    """One FETCH node per fetch; None for a fetched node, which has no value."""
    kept: list[Node]
    """The fetched nodes."""


@dataclass(slots=True)
class _Need:
    """The needed part of one graph or body."""

    nodes: dict[Node, None] = field(default_factory=dict)
    done: set[Node] = field(default_factory=set)
    """Needed nodes whose inputs are among the needed tensors."""
    tensors: dict[Tensor, None] = field(default_factory=dict)
    inside: dict[Node, _Inside] = field(default_factory=dict)
    shapes: dict[Tensor, None] = field(default_factory=dict)
    """Tensors whose shape is asked for, but perhaps not their value."""
    by_rule: dict[Tensor, None] = field(default_factory=dict)
    """Tensors of `shapes` that are not computed."""
    unchecked: set[Node] = field(default_factory=set)
    """Checks of shapes that are left out."""


@dataclass(frozen=True, slots=True)
class _Inside:
    """The needed part of a structured node: of each body, and which results (loop variables) are kept."""

    bodies: tuple[_Need, ...]
    kept: tuple[int, ...]


def extract(
    graph: Graph,
    fetches: Sequence[Tensor | Node | SupportsTensor],
    feeds: Sequence[Tensor],
    *,
    streamed: Sequence[Tensor] = (),
    all_effects: bool = False,
) -> Extract:
    """Copy the nodes that `fetches` need, given `feeds`.

    Args:
        graph: a root graph; not changed.
        fetches: tensors, nodes to run, and variables to read after all else.
        feeds: tensors of the root graph that get their values from the run.
        streamed: tensors of one body, handed out in each iteration.
        all_effects: also run every side effect of the root graph (an `@af.function`).

    Raises:
        FeedError: a needed placeholder is not fed.
        FetchError: a streamed tensor is too deep inside a loop with a pool.
    """
    analysis = _Analysis(graph, feeds, streamed)
    roots: list[Tensor | Node] = [fetch for fetch in fetches if isinstance(fetch, Tensor | Node)]
    if all_effects:
        roots.extend(node for node in graph.nodes if has_side_effect(node))
    roots.extend(analysis.stream_path[:1])
    return _Copy(graph, streamed).run(analysis.of_graph(graph, roots), fetches, feeds)


class _Analysis:
    """An analysis that walks backwards from the fetches."""

    def __init__(self, graph: Graph, feeds: Iterable[Tensor], streamed: Sequence[Tensor]) -> None:
        self.ordered = graph.effects == "ordered"
        self.feeds = dict.fromkeys(feeds)
        self.streamed = streamed
        self.stream_path = structured_nodes_around(streamed[0].graph) if streamed else []
        if any(isinstance(node, PooledNode) for node in self.stream_path[:-1]):
            raise FetchError(
                f"{streamed[0].name} is in a branch or loop inside of a loop with a pool, which hands out values of "
                f"its own body alone: stream a value of that body\n  built at {streamed[0].node.location}"
            )
        # Cached: nested loops query their inner loops repeatedly while their own needs grow.
        self._memo: dict[tuple[Node, tuple[int, ...]], _Inside] = {}

    def of_graph(self, graph: Graph, roots: Iterable[Tensor | Node]) -> _Need:
        need = _Need()
        for root in roots:
            if isinstance(root, Tensor):
                self._need_tensor(root, need)
            else:
                self._need_node(root, need)
        # Inputs stand before their users, so one backward sweep is enough. Only back edges of hand-written loops point
        # forward, and need another sweep.
        done = need.done
        settled: set[Tensor] = set()
        checks: dict[Node, None] = {}
        while True:
            while len(done) < len(need.nodes):
                for node in reversed(graph.nodes):
                    if node in need.nodes and node not in done:
                        done.add(node)
                        if _is_check_of_shape(node):
                            checks[node] = None
                            self._need_tensor(node.inputs[0], need)
                        else:
                            self._need_inputs(node, need)
            asked = [tensor for tensor in need.shapes if tensor not in settled]
            if not asked and not checks:
                return need
            settled.update(asked)
            for tensor in asked:
                self._need_shape(tensor, need)
            if not asked:  # the rest is settled; take one check at a time, as its inputs may settle others
                node, _ = checks.popitem()
                if self._is_at_hand(node.inputs[1].node.inputs[0], need):
                    self._need_inputs(node, need)
                else:
                    need.unchecked.add(node)

    def _is_there(self, tensor: Tensor, need: _Need) -> bool:
        return tensor in need.by_rule or tensor in self.feeds or tensor.node in need.nodes

    def _need_shape(self, tensor: Tensor, need: _Need) -> None:
        """Need the sources of a value's shape, if the value itself is not needed, and if they are cheaper than the
        value.
        """
        if tensor in need.by_rule:
            return
        sources = None if self._is_there(tensor, need) else shape_sources(tensor)
        if sources is None:
            self._need_tensor(tensor, need)
            return
        need.by_rule[tensor] = None
        for source in sources[0]:
            self._need_shape(source, need)
        for source in sources[1]:
            self._need_tensor(source, need)

    def _is_at_hand(self, tensor: Tensor, need: _Need) -> bool:
        """Return True if a shape follows from values that the run computes anyway."""
        seen, pending = {tensor}, [tensor]
        while pending:
            latest = pending.pop()
            if self._is_there(latest, need):
                continue
            sources = shape_sources(latest)
            if sources is None or not all(self._is_there(x, need) for x in sources[1]):
                return False
            pending += [x for x in sources[0] if x not in seen]
            seen.update(sources[0])
        return True

    def _need_tensor(self, tensor: Tensor, need: _Need) -> None:
        if tensor not in need.tensors and isinstance(tensor.node, StructuredNode):
            need.done.discard(tensor.node)  # a further result is wanted, so visit the node again
        need.tensors[tensor] = None
        if tensor not in self.feeds:
            need.nodes[tensor.node] = None

    def _need_node(self, node: Node, need: _Need) -> None:
        if node.op is not PLACEHOLDER or node.outputs[0] not in self.feeds:
            need.nodes[node] = None

    def _need_inputs(self, node: Node, need: _Need) -> None:
        inputs: Iterable[Tensor] = node.inputs
        if node.op is SHAPE and not node.control_inputs:
            need.shapes[node.inputs[0]] = None
            return
        if isinstance(node, StructuredNode):
            used = tuple(out.index for out in node.outputs if out in need.tensors and out not in self.feeds)
            inside = need.inside[node] = self._inside(node, used)
            inputs = (node.inputs[position] for position in _kept_inputs(node, inside))
        for tensor in inputs:
            self._need_tensor(tensor, need)
        for control in node.control_inputs:
            self._need_node(control, need)
        if node.op is LOCK and "until" in node.attrs:  # a mutex that is locked and never unlocked would block all runs
            self._need_node(node.graph.root.node(node.attrs["until"]), need)

    def _inside(self, node: StructuredNode, used: tuple[int, ...]) -> _Inside:
        key = (node, used)
        if key not in self._memo:
            of_node = self._of_while(node, used) if isinstance(node, WhileNode) else self._of_cond(node, used)
            self._memo[key] = of_node
        return self._memo[key]

    def _of_body(self, body: Subgraph, used: Iterable[int]) -> _Need:
        return self.of_graph(body, [*(body.results[index] for index in used), *self._effects(body)])

    def _of_cond(self, node: StructuredNode, used: tuple[int, ...]) -> _Inside:
        return _Inside(tuple(self._of_body(body, used) for body in node.subgraphs), used)

    def _of_while(self, node: WhileNode, used: tuple[int, ...]) -> _Inside:
        of_predicate = self._of_body(node.predicate, (0,))
        # A loop needs a variable to iterate on, even if only its effects are wanted.
        variables = set(used) or {0}
        # A variable that is read needs its next value, which may read more variables.
        while True:
            bodies = of_predicate, self._of_body(node.body, sorted(variables))
            read = {i for i in range(node.n_vars) if _reads_input(node, i, bodies)}
            if read <= variables:
                return _Inside(bodies, tuple(sorted(variables)))
            variables |= read

    def _effects(self, body: Subgraph) -> list[Tensor | Node]:
        kept: list[Tensor | Node] = []
        if self.ordered:
            kept.extend(node for node in body.nodes if has_side_effect(node))
        kept.extend(node for node in self.stream_path if node.graph is body)
        if self.streamed and self.streamed[0].graph is body:
            kept.extend(self.streamed)
        return kept


def _is_check_of_shape(node: Node) -> bool:
    """Return True if the node only checks that a value has the shape of another, which stands beside it."""
    if node.op is not CHECK_SHAPE or len(node.inputs) != 2 or node.control_inputs:
        return False
    return node.inputs[1].node.op is SHAPE and node.inputs[1].graph is node.graph


def _reads_input(node: StructuredNode, body_input: int, bodies: Sequence[_Need]) -> bool:
    """Return True if a needed part of a body reads that body input, or waits for it."""
    inner = (body.inputs[body_input] for body in node.subgraphs)
    return any(tensor.node in need.nodes for tensor, need in zip(inner, bodies, strict=True))


def _kept_inputs(node: StructuredNode, inside: _Inside) -> list[int]:
    """Return the inputs of a structured node that its needed parts use: loop variables kept, captures read."""
    first = list(inside.kept) if isinstance(node, WhileNode) else [0]
    captures = range(node.first_capture, len(node.inputs))
    return first + [i for i in captures if _reads_input(node, i - node.body_offset, inside.bodies)]


class _Copy:
    """Builds the copy; `tensors` and `nodes` lead from the original to it."""

    def __init__(self, graph: Graph, streamed: Sequence[Tensor]) -> None:
        self.source = graph
        self.target = Graph(effects=graph.effects, seed=graph.seed)
        self.streamed = streamed
        self.tensors: dict[Tensor, Tensor] = {}
        self.nodes: dict[Node, Node] = {}
        self.back_edges: list[tuple[Node, Node]] = []
        self.shapes: dict[Tensor, Tensor] = {}

    def run(self, need: _Need, fetches: Sequence[Tensor | Node | SupportsTensor], feeds: Sequence[Tensor]) -> Extract:
        for index, tensor in enumerate(feeds):
            self._feed(tensor, index)
        self._refuse_unfed(need)
        self._copy_nodes(self.source, self.target, need)
        # Back edges of hand-written loops start at later nodes, which have a copy only now.
        for made, original in self.back_edges:
            made.inputs = [self.tensors[tensor] for tensor in original.inputs]
        fetch_nodes = [self._fetch(fetch) for fetch in fetches]
        kept = [self.nodes[fetch] for fetch in fetches if isinstance(fetch, Node)]
        return Extract(self.target, fetch_nodes, kept)

    def _feed(self, tensor: Tensor, index: int) -> None:
        attrs = {"spec": tensor.spec, "index": index}
        if tensor.node.attrs.get("is_lent"):
            attrs["is_lent"] = True
        node = self.target.add_node(FEED, (), attrs, tensor.spec, name="feed", location=tensor.node.location)
        self.tensors[tensor] = node.outputs[0]
        if tensor.node.op is PLACEHOLDER:
            self.nodes[tensor.node] = node

    def _fetch(self, fetch: Tensor | Node | SupportsTensor) -> Node | None:
        if isinstance(fetch, Node):
            return None
        if isinstance(fetch, Tensor):
            value = self.tensors[fetch]
        else:
            with self.target:  # the last node to touch the variable, so it sees every effect of the run
                value = fetch.__asyncflow_tensor__()
        return self.target.add_node(FETCH, (value,), {}, (), name="fetch", location=value.node.location)

    def _refuse_unfed(self, need: _Need) -> None:
        unfed = [node for node in need.nodes if node.op is PLACEHOLDER]
        if unfed:
            listed = "\n".join(f"  {n.outputs[0].name} {n.outputs[0].spec}, built at {n.location}" for n in unfed)
            are_of_trees = {"offsets", "children"} <= {part for each in unfed for part in each.name.split("_")}
            advice = "; feed the placeholders of an af.InputGraph with **trees.feeds(data)" if are_of_trees else ""
            raise FeedError(f"these placeholders are needed but not fed; pass them in feeds={{...}}{advice}\n{listed}")

    def _copy_nodes(self, source: Graph, target: Graph, need: _Need) -> None:
        for node in source.nodes:
            for output in node.outputs:
                if output in need.by_rule:
                    self.shapes[output] = self._shape_by_rule(output, target)
            if node not in need.nodes or node.op is PARAMETER:
                continue
            if node in need.unchecked:  # skip the check: its input stands in for it
                self._stand_in(node, self.tensors[node.inputs[0]])
                continue
            if node.op is SHAPE and node.inputs[0] not in self.tensors and node.inputs[0] in self.shapes:
                self._stand_in(node, self.shapes[node.inputs[0]])
                continue
            if isinstance(node, StructuredNode):
                self._copy_structured(node, target, need.inside[node])
            else:
                attrs = node.attrs
                if isinstance(node, PooledNode) and self.streamed and self.streamed[0].graph in bodies_in(node):
                    attrs = {**attrs, "streamed": tuple(self.streamed)}
                self._add(node, target, node.inputs, attrs, node.specs, node.outputs)
        if self.streamed and self.streamed[0].graph is source:
            emitted = [self.tensors[tensor] for tensor in self.streamed]
            target.add_node(EMIT, emitted, {}, (), name="emit", location=self.streamed[0].node.location)

    def _stand_in(self, node: Node, value: Tensor) -> None:
        self.tensors.setdefault(node.outputs[0], value)
        self.nodes[node] = value.node  # control edges from the check, or the shape, start here instead

    def _shape_by_rule(self, tensor: Tensor, target: Graph) -> Tensor:
        node = tensor.node
        name = self._name_for_shape(tensor)
        rule = None if node.op is READ else rule_of(tensor)
        if rule is None:
            op, inputs, attrs = ELEMENT_SHAPE, [self.tensors[source] for source in node.inputs], node.attrs
        else:
            op, attrs = SHAPE_BY_RULE, {"rule": rule}
            inputs = [self._shape_of(source, target) for source in node.inputs if not is_static(source.shape)]
        made = target.add_node(
            op, inputs, attrs, Spec(int64, (tensor.ndim,)), reserved_name=name, location=node.location
        )
        made.device, made.colocated_with = node.device, node.colocated_with
        return made.outputs[0]

    def _name_for_shape(self, tensor: Tensor) -> str:
        """A name that no node of the source has, which keep theirs."""
        name = f"{tensor.node.name}/shape"
        while self.source.has_name(name) or self.target.has_name(name):
            name += "_"
        return name

    def _shape_of(self, tensor: Tensor, target: Graph) -> Tensor:
        if tensor not in self.shapes:
            value = self.tensors[tensor]
            name = self._name_for_shape(tensor)
            made = target.add_node(SHAPE, [value], {}, Spec(int64, (tensor.ndim,)), reserved_name=name)
            made.device, made.location = value.node.device, tensor.node.location
            self.shapes[tensor] = made.outputs[0]
        return self.shapes[tensor]

    def _copy_structured(self, node: StructuredNode, target: Graph, inside: _Inside) -> None:
        attrs = dict(node.attrs)
        kept = _kept_inputs(node, inside)
        offset = node.body_offset
        for name, body, need in zip(node.body_names, node.subgraphs, inside.bodies, strict=True):
            copy = attrs[name] = Subgraph(target, body.label)
            for position in kept[offset:]:
                inner = body.inputs[position - offset]
                self.tensors[inner] = copy.add_input(inner.spec, inner.node.name.rpartition("/")[2])
                self.nodes[inner.node] = self.tensors[inner].node
            self._copy_nodes(body, copy, need)
            is_predicate = isinstance(node, WhileNode) and body is node.predicate
            results = body.results if is_predicate else [body.results[index] for index in inside.kept]
            copy.results = [self.tensors[result] for result in results]
        if isinstance(node, WhileNode):
            attrs["n_vars"] = len(inside.kept)
        inputs = [node.inputs[position] for position in kept]
        outputs = [node.outputs[index] for index in inside.kept]
        self._add(node, target, inputs, attrs, tuple(out.spec for out in outputs), outputs)

    def _add(
        self,
        node: Node,
        target: Graph,
        inputs: Sequence[Tensor],
        attrs: Attrs,
        specs: Spec | tuple[Spec, ...],
        outputs: Sequence[Tensor],
    ) -> None:
        is_closed = all(tensor in self.tensors for tensor in inputs)
        known = [self.tensors[tensor] for tensor in inputs if tensor in self.tensors]
        made = copied(node, target, known, node.name, attrs=attrs, specs=specs)
        made.control_inputs = [self.nodes[control] for control in node.control_inputs]
        self.nodes[node] = made
        for original, copy in zip(outputs, made.outputs, strict=True):
            self.tensors.setdefault(original, copy)  # a fed tensor keeps its feed
        if not is_closed:
            self.back_edges.append((made, node))
