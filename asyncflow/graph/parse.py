"""From text to a graph: builds the nodes of the statements that `asyncflow.graph.syntax` reads."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from asyncflow.errors import GraphError, SourceLocation, told
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.op import find_op
from asyncflow.graph.shapes import is_compatible
from asyncflow.graph.spec import Spec
from asyncflow.graph.syntax import Reader
from asyncflow.graph.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.graph.op import Op
    from asyncflow.graph.resource import Resource
    from asyncflow.graph.syntax import Block, Reference, Statement

_NONE: Mapping[str, Any] = MappingProxyType({})


def parse_graph(text: str, *, ops: Mapping[str, Op] = _NONE, resources: Mapping[str, Resource] = _NONE) -> Graph:
    """The graph that a text such as `print_graph` makes stands for.

    The text is not trusted: nothing in it is evaluated, and time and memory are bounded by its length. A graph that
    can be parsed need not be sound; `asyncflow.graph.verify.verify` tells.

    Args:
        text: see `asyncflow.graph.text` for its form.
        ops: ops by name, looked up before the registered ones.
        resources: the resources that the text names, by the names they have there.

    Raises:
        GraphError: the text is malformed or does not fit the ops; the message shows line and column.
    """
    tokens = Tokens(text)
    program = Reader(tokens, resources).program()
    graph = Graph(effects=program.effects, seed=program.seed)
    _Builder(tokens, ops).fill(graph, program.statements, {})
    return graph


class _Scope:
    """What the names of one graph or body stand for while it is built."""

    __slots__ = ("nodes", "statements")

    def __init__(self, statements: Sequence[Statement]) -> None:
        self.nodes: dict[str, Node] = {}
        self.statements = {statement.name: statement for statement in statements}


class _Builder:
    __slots__ = ("_ops", "_tokens")

    def __init__(self, tokens: Tokens, ops: Mapping[str, Op]) -> None:
        self._tokens = tokens
        self._ops = ops

    def fill(self, graph: Graph, statements: Sequence[Statement], outer: Mapping[str, Node]) -> _Scope:
        """Builds the statements in `graph`; `outer` holds the nodes of the graph around it that can be captured."""
        scope = _Scope(statements)
        merges = []
        for statement in statements:
            node = self._build(graph, statement, scope, outer)
            scope.nodes[statement.name] = node
            if len(node.inputs) < len(statement.inputs):
                merges.append((node, statement))
        for node, statement in merges:
            node.inputs = [self._tensor(reference, scope) for reference in statement.inputs]
        return scope

    def _build(self, graph: Graph, statement: Statement, scope: _Scope, outer: Mapping[str, Node]) -> Node:
        op = self._op(statement)
        inputs = [x for ref in statement.inputs if (x := self._input(ref, statement, scope)) is not None]
        input_specs = [self._input_spec(ref, scope) for ref in statement.inputs]
        controls = [self._node(ref, scope) for ref in statement.after]
        bodies = {name: self._body(graph, block, scope) for name, block in statement.blocks.items()}
        attrs = {**statement.attrs, **bodies}
        self._check_specs(op, input_specs, attrs, statement)
        specs = statement.specs[0] if statement.single else statement.specs
        location = SourceLocation("<text>", self._tokens.line(statement.offset), "<text>")
        prefix = "" if isinstance(graph, Subgraph) else graph.scope.name_scope  # the names in the text are whole
        with graph.scoped(
            name_scope=prefix,
            controls=tuple(controls),
            device=statement.device,
            colocated_with=statement.colocated_with,
        ):
            node = graph.add_node(op, inputs, attrs, specs, name=statement.name, location=location)
        if statement.captured is not None:
            self._capture(graph, node, statement.captured, outer)
        return node

    def _op(self, statement: Statement) -> Op:
        try:
            return self._ops.get(statement.op) or find_op(statement.op)
        except GraphError as error:
            raise self._tokens.fault(error.reason, statement.offset) from error

    def _body(self, graph: Graph, block: Block, scope: _Scope) -> Subgraph:
        body = Subgraph(graph, block.label)
        inner = self.fill(body, block.statements, scope.nodes)
        body.inputs = [self._tensor(reference, inner) for reference in block.inputs]
        body.results = [self._tensor(reference, inner) for reference in block.results]
        body.outer_controls = dict.fromkeys(self._node(reference, scope) for reference in block.after)
        body.closed = True
        return body

    def _capture(self, graph: Graph, node: Node, captured: Reference, outer: Mapping[str, Node]) -> None:
        if not isinstance(graph, Subgraph):
            raise self._tokens.fault("only the body of a branch or loop can capture", captured.offset)
        if len(node.outputs) != 1:
            raise self._tokens.fault("a capture has one output", captured.offset)
        if captured.name not in outer:
            raise self._tokens.fault(
                f"%{captured.name} is no earlier node of the graph around this body", captured.offset
            )
        tensor = self._output(outer[captured.name], captured)
        if tensor in graph.captures:
            raise self._tokens.fault(f"%{captured.name} is captured twice by one body", captured.offset)
        graph.captures[tensor] = node.outputs[0]

    # -- names ---------------------------------------------------------------------------------------------------

    def _input(self, reference: Reference, statement: Statement, scope: _Scope) -> Tensor | None:
        """The tensor, or None for one that a merge takes from a later node."""
        later = reference.name not in scope.nodes and reference.name in scope.statements
        return None if later and statement.op == "merge" else self._tensor(reference, scope)

    def _input_spec(self, reference: Reference, scope: _Scope) -> Spec:
        if reference.name in scope.nodes:
            return self._tensor(reference, scope).spec
        specs = scope.statements[reference.name].specs
        if reference.index >= len(specs):
            raise self._tokens.fault(f"%{reference.name} has {len(specs)} outputs", reference.offset)
        return specs[reference.index]

    def _tensor(self, reference: Reference, scope: _Scope) -> Tensor:
        return self._output(self._node(reference, scope), reference)

    def _output(self, node: Node, reference: Reference) -> Tensor:
        if reference.index >= len(node.outputs):
            raise self._tokens.fault(f"%{reference.name} has {len(node.outputs)} outputs", reference.offset)
        return node.outputs[reference.index]

    def _node(self, reference: Reference, scope: _Scope) -> Node:
        node = scope.nodes.get(reference.name)
        if node is not None:
            return node
        if reference.name in scope.statements:
            reason = "is used before the line that builds it; only a merge takes a later node (the loop's back edge)"
        else:
            reason = "is not built in this graph or body; a body gets at tensors outside by '%inner = capture %outer'"
        raise self._tokens.fault(f"%{reference.name} {reason}", reference.offset)

    # -- specs ---------------------------------------------------------------------------------------------------

    def _check_specs(self, op: Op, inputs: Sequence[Spec], attrs: Mapping[str, Any], statement: Statement) -> None:
        seen = ", ".join(map(str, inputs)) or "no inputs"
        try:
            inferred = op.infer(*inputs, **attrs)
        except GraphError as error:
            raise self._tokens.fault(f"{op.name} of {seen}: {error.reason}", statement.offset) from error
        except Exception as error:
            # The rule of an op may stumble anywhere over attrs that only a text can give it.
            message = f"{op.name} does not take {seen} and these attrs: {told(error)}"
            raise self._tokens.fault(message, statement.offset) from error
        if not all(isinstance(spec, Spec) for spec in (inferred if isinstance(inferred, tuple) else (inferred,))):
            raise self._tokens.fault(f"{op.name} takes a dtype and shape as its spec", statement.offset)
        if not specs_agree(inferred, statement.specs, single=statement.single):
            said, found = show_specs(inferred), show_specs(statement.specs[0] if statement.single else statement.specs)
            raise self._tokens.fault(f"{op.name} of {seen} gives {said}, but the text says {found}", statement.offset)


def specs_agree(inferred: Spec | tuple[Spec, ...], given: Sequence[Spec], *, single: bool) -> bool:
    """Whether the outputs of a node can be what its op's shape rule says: same number and dtypes, fitting shapes."""
    if isinstance(inferred, tuple) is single:
        return False
    listed = inferred if isinstance(inferred, tuple) else (inferred,)
    return len(listed) == len(given) and all(
        a.dtype == b.dtype and is_compatible(a.shape, b.shape) for a, b in zip(listed, given, strict=True)
    )


def show_specs(specs: Spec | tuple[Spec, ...]) -> str:
    """Specs as an op's shape rule gives them: one, or a tuple in parentheses."""
    return f"({', '.join(map(str, specs))})" if isinstance(specs, tuple) else str(specs)
