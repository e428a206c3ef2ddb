"""From text to a graph: reads the form that `asyncflow.graph.text.text` describes, and builds each node as it comes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from asyncflow.errors import GraphError, SourceLocation, told
from asyncflow.graph.assumptions import assume
from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor, is_name
from asyncflow.graph.op import Op, find_op
from asyncflow.graph.resource import Resource, revived
from asyncflow.graph.text.array_text import read_array
from asyncflow.graph.text.text import KEY_TYPES, quote_name
from asyncflow.graph.text.tokens import Tokens
from asyncflow.graph.values.dtypes import as_dtype, string
from asyncflow.graph.values.shapes import Shape
from asyncflow.graph.values.spec import Spec, show_specs, specs_agree

NOTHING_GIVEN: Mapping[str, Any] = MappingProxyType({})
_CONSTANTS: dict[str, Any] = {"none": None, "true": True, "false": False, "nan": float("nan")}
# `as_dtype` accepts more names, such as "f4"; the text form has one name for each dtype.
_DTYPE = r"bool|u?int(8|16|32|64)|float(16|32|64|96|128)|bfloat16|complex(64|128|192|256)|string|variant"
_CALLS: dict[str, tuple[type, int]] = {"complex": (complex, 2), "slice": (slice, 3)}
_KEYS = "a key of a dict is a string, number, bool or none, and stands there once"
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class HasOp(Protocol):
    """A function that `asyncflow.op` has made an op of."""

    @property
    def op(self) -> Op:
        """The op."""


def parse_graph(
    text: str,
    *,
    ops: Mapping[str, Op | HasOp] = NOTHING_GIVEN,
    resources: Mapping[str, Resource] = NOTHING_GIVEN,
    file: str = "",
) -> Graph:
    """Return the graph described by a text such as `print_graph` makes.

    The text is not trusted: nothing in it is evaluated, and time and memory are bounded by its length. A graph that
    can be parsed need not be sound; `asyncflow.graph.verify.verify` tells.

    Args:
        text: see `asyncflow.graph.text.text` for its form.
        ops: ops by name, or the functions that they were made of, looked up before the registered ones.
        resources: the resources that the text names, by their names there, and no others; resources that the text
            describes need not be given.
        file: where the text is from, for messages.

    Raises:
        GraphError: the text is malformed or does not fit the ops; the message shows line and column.
    """
    parser = _Parser(text, file, {name: _op_of(name, op) for name, op in ops.items()}, resources)
    graph = parser.graph()
    # Refuse unknown names: with a misspelt name, a new resource would be made from the text's description.
    for name in resources:
        if name not in parser.resources:
            known = ", ".join(map(repr, parser.resources)) or "none"
            raise GraphError(f"{file or 'the text'} has no resource named {name!r} to be given; it has {known}")
    return graph


def parse_value(text: str) -> object:
    """The value of an attr that has this text (`asyncflow.graph.text.text.Printer.value`); none that names a resource.

    Raises:
        GraphError: there is none.
    """
    parser = _Parser(text, "", {}, NOTHING_GIVEN)
    value: object = parser.value()
    parser.want(parser.kind == "end", "nothing more")
    return value


def _op_of(name: str, given: Op | HasOp) -> Op:
    op = getattr(given, "op", given)
    if not isinstance(op, Op):
        raise GraphError(f"ops are functions with @af.op, such as {{'my_op': my_op}}; {name!r} is {given!r}")
    return op


class _Reference(NamedTuple):
    """A reference ``%name:output``, and its position in the text."""

    name: str
    output: int
    offset: int


class _Parser(Tokens):
    """Builds the nodes of one text, whose names are unique in all its bodies; None is a node that is being read.

    The inputs of a merge that takes later nodes, which closes a loop, are found when all is read.
    """

    def __init__(self, text: str, file: str, ops: Mapping[str, Op], given: Mapping[str, Resource]) -> None:
        super().__init__(text, file)
        self._ops = ops
        self._given = given
        self.resources: dict[str, Resource] = {}
        self._nodes: dict[str, Node | None] = {}
        self._loops: list[tuple[Node, list[_Reference], int]] = []

    def graph(self) -> Graph:
        """The whole text."""
        self.expect("graph", "effects", "=")
        is_ordered = self.skip("ordered")
        self.want(is_ordered or self.skip("unordered"), "'ordered' or 'unordered'")
        self.expect("seed", "=")
        seed = self._int("an int or none as seed", unless="none")
        graph = Graph(effects="ordered" if is_ordered else "unordered", seed=seed)
        while self.skip("resource"):
            self._declare()
        self._read_nodes(graph)
        while self.skip("assume"):  # after all nodes, as it may name nodes of any body
            self._assume()
        self.want(self.kind == "end", "a node such as '%x = ...'")
        for node, references, start in self._loops:
            node.inputs = self._tensors(references, node.graph)
            self._check_specs(node, start)
        return graph

    def _declare(self) -> None:
        start, label = self.offset, self.name("resource", "a resource's name such as '@v'")
        self.expect("=")
        meaning = "a description of the resource in quotes, or its kind"
        kind = "" if self.kind == "string" else self.take("word", meaning)
        described = kind or self.name("string", "")
        attrs = self._attrs() if kind else {}
        self.check(label not in self.resources, f"resource @{label} is declared twice", start)
        if kind and label not in self._given:
            self.resources[label] = self.located(start, partial(revived, kind), attrs)
            return
        fault = f"no resource is given for @{label} ({described}); pass resources={{{label!r}: ...}}"
        self.check(isinstance(self._given.get(label), Resource), fault, start)
        self.resources[label] = self._given[label]

    def _assume(self) -> None:
        """A conclusion that the graph was built on, from values of any of its bodies."""
        start, location = self.offset, SourceLocation(self.file or "<text>", self.line, "<text>")
        rule = self.name("string", "the name of a rule in quotes")
        references = self._references("(", ")")
        self.check(bool(references), "it is concluded from no tensor", start)
        self.expect("=")
        value = self.value()
        found = [(self._nodes.get(reference.name), reference) for reference in references]
        tensors = tuple(self._output(node, reference) for node, reference in found if node is not None)
        self.check(len(tensors) == len(found), "it depends on a node that does not exist", start)
        assume(rule, tensors, value, location)

    # -- nodes ---------------------------------------------------------------------------------------------------

    def _read_nodes(self, graph: Graph) -> None:
        while self.kind == "tensor":
            self._read_node(graph)

    def _read_node(self, graph: Graph) -> None:
        start, location = self.offset, SourceLocation(self.file or "<text>", self.line, "<text>")
        name = self._reference("a node's name such as '%x'", indexed=False).name
        self.check(name not in self._nodes, f"two nodes are named {name!r}; names are unique in a graph", start)
        self.check(is_name(name), f"a node is named {name!r}; a name may not be empty, and has no ':' in it", start)
        self._nodes[name] = None
        self.expect("=")
        op_name = self.name("string", "") if self.kind == "string" else self.take("word", "an op's name")
        captured = self._reference() if op_name == "capture" and self.word != "(" else None
        references = [] if captured else self._references("(", ")")
        op = PARAMETER if captured else self._ops.get(op_name) or self.located(start, find_op, op_name)
        attrs = self._attrs() if self.word == "{" and not captured else {}
        late = op_name == "merge" and any(self._nodes.get(reference.name) is None for reference in references)
        inputs = [] if late else self._tensors(references, graph)
        controls = self._after(graph)
        device = self.name("string", "a device in quotes") if self.skip("on") else None
        beside = self._reference("a node's name", indexed=False).name if self.skip("with") else None
        self.expect(":")
        specs = tuple(self.until(")", self._spec)[0]) if self.skip("(") else self._spec()
        if captured and isinstance(specs, Spec):
            attrs["spec"] = specs
        if self.skip("{"):
            self._read_bodies(graph, attrs)
        # Only the text decides these: scopes of the caller do not apply.
        with graph.scoped(name_scope="", controls=controls, device=device, colocated_with=beside):
            node = graph.add_node(op, inputs, attrs, specs, name=name, location=location)
        if late:
            self._loops.append((node, references, start))
        else:
            self._check_specs(node, start)
        self._nodes[name] = node
        if captured:
            self._capture(graph, node, captured)

    def _attrs(self) -> dict[str, Any]:
        attrs: dict[str, Any] = {}
        while self.skip("," if attrs else "{"):
            start, name = self.offset, self.take("word", "an attr's name")
            if not name.isidentifier() or name.startswith("__"):
                raise self.expected("an attr's name", start, name)
            self.check(name not in attrs, f"attr {name!r} is given twice", start)
            self.expect("=")
            attrs[name] = self.value()
        self.expect("}")
        return attrs

    def _read_bodies(self, graph: Graph, attrs: dict[str, Any]) -> None:
        self.deeper("branches and loops")
        while not self.skip("}"):
            start, name = self.offset, self.take("word", "the name of a branch or loop body, or '}'")
            self.check(name not in attrs, f"attr {name!r} is given twice", start)
            attrs[name] = body = Subgraph(graph, self.name("string", "the body's label in quotes"))
            inputs = self._references("(", ")")
            body.outer_controls = dict.fromkeys(self._after(graph))
            self.expect("{")
            self._read_nodes(body)
            self.want(self.word == "return", "a node such as '%x = ...', or 'return'")
            body.inputs = self._tensors(inputs, body)
            body.results = self._tensors(self._references("return", "}"), body)
            body.closed = True
        self.depth -= 1

    def _capture(self, graph: Graph, node: Node, captured: _Reference) -> None:
        name, _, offset = captured
        if not isinstance(graph, Subgraph):
            raise self.fault("only the body of a branch or loop can capture", offset)
        outer = self._nodes.get(name)
        # A body captures from the body directly around it; each body between captures a value from further out.
        if outer is None or outer.graph is not graph.parent:
            raise self.fault(f"%{name} is no earlier node of the graph around this body", offset)
        tensor = self._output(outer, captured)
        self.check(tensor not in graph.captures, f"%{name} is captured twice by one body", offset)
        graph.captures[tensor] = node.outputs[0]

    def _check_specs(self, node: Node, start: int) -> None:
        op, claimed = node.op, node.specs
        seen = ", ".join(str(tensor.spec) for tensor in node.inputs) or "no inputs"
        try:
            inferred = op.infer(*(tensor.spec for tensor in node.inputs), **node.attrs)
            fits = specs_agree(inferred, claimed)
        except GraphError as error:
            raise self.fault(f"{op.name} of {seen}: {error.reason}", start) from error
        except Exception as error:
            # An op's rule may raise anything for attrs that only a text can contain.
            raise self.fault(f"{op.name} does not take {seen} and these attrs: {told(error)}", start) from error
        said, found = show_specs(inferred), show_specs(claimed)
        self.check(fits, f"{op.name} of {seen} gives {said}, but the text says {found}", start)

    # -- references ----------------------------------------------------------------------------------------------

    def _reference(self, meaning: str = "a tensor such as '%x' or '%x:1'", *, indexed: bool = True) -> _Reference:
        start, word = self.offset, self.take("tensor", meaning)
        name, _, index = word[1:].rpartition(":")
        if not name or not index.isdigit():
            name, index = word[1:], "0"
        elif not indexed:
            raise self.expected("a node's name without an output number", start, word)
        return _Reference(self.unquote(name, start + 1), int(index), start)

    def _references(self, opening: str, end: str, *, indexed: bool = True) -> list[_Reference]:
        self.expect(opening)
        found: list[_Reference] = []
        while self.skip(",") if found else self.kind == "tensor":
            found.append(self._reference(indexed=indexed))
        self.expect(end)
        return found

    def _after(self, graph: Graph) -> list[Node]:
        references = self._references("(", ")", indexed=False) if self.skip("after") else []
        return [self._node(reference, graph) for reference in references]

    def _tensors(self, references: list[_Reference], graph: Graph) -> list[Tensor]:
        return [self._output(self._node(reference, graph), reference) for reference in references]

    def _output(self, node: Node, reference: _Reference) -> Tensor:
        name, index, offset = reference
        self.check(index < len(node.outputs), f"%{name} has {len(node.outputs)} outputs", offset)
        return node.outputs[index]

    def _node(self, reference: _Reference, graph: Graph) -> Node:
        name = reference.name
        node = self._nodes.get(name)
        if node is not None and node.graph is graph:
            return node
        reason = "is not built in this graph or body; a body gets at tensors outside by '%inner = capture %outer'"
        # Search the text only now, as only the message needs it.
        later = re.compile(rf"%{re.escape(quote_name(name))}\s*=")
        if node is None and (name in self._nodes or later.search(self.text, self.offset)):
            reason = "is used before the line that builds it; only a merge takes a later node (the loop's back edge)"
        raise self.fault(f"%{name} {reason}", reference.offset)

    # -- values --------------------------------------------------------------------------------------------------

    def value(self) -> Any:
        """The value that comes next."""
        start, kind = self.offset, self.kind
        if kind == "string":
            return self.name("string", "")
        if kind == "number":
            return self.number("")
        if kind == "word":
            return self._named()
        if kind == "resource":
            label = self.name("resource", "")
            self.check(label in self.resources, f"resource @{label} is not declared at the top", start)
            return self.resources[label]
        return ... if self.skip("...") else self._nested()

    def _nested(self) -> object:
        start, opening = self.offset, self.word
        self.want(opening in _CLOSING, "a value")
        self.take()
        self.deeper("lists, tuples and dicts")  # raises a proper error instead of a RecursionError for deep nesting
        is_tuple, is_dict = opening == "(", opening == "{"
        found, comma = self.until(_CLOSING[opening], self._item if is_dict else self.value)
        self.depth -= 1
        self.check(not is_tuple or len(found) != 1 or comma, "a tuple of one item needs a comma after it: (1,)", start)
        self.check(not is_dict or len(dict(found)) == len(found), _KEYS, start)
        return dict(found) if is_dict else tuple(found) if is_tuple else found

    def _item(self) -> tuple[object, object]:
        start, key = self.offset, self.value()
        self.check(type(key) in KEY_TYPES, _KEYS, start)
        self.expect(":")
        return key, self.value()

    def _named(self) -> Any:
        start, name = self.offset, self.take()
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in ("array", "scalar"):
            return self._array(start, is_scalar=name == "scalar")
        if name in _CALLS:
            make, count = _CALLS[name]
            self.expect("(")
            items, _ = self.until(")", self.value)
            self.check(len(items) == count, f"{name} takes {count} values, found {len(items)}", start)
            self.check(make is not complex or set(map(type, items)) == {float}, "complex takes two floats", start)
            return make(*items)
        if not re.fullmatch(_DTYPE, name):
            raise self.expected("a value or a dtype", start, name)
        dtype = self.located(start, as_dtype, name)
        return Spec(dtype, self._shape()) if self.skip("[") else dtype

    def _spec(self) -> Spec:
        start, word = self.offset, self.word
        found = self._named() if self.kind == "word" else None
        if not isinstance(found, Spec):
            raise self.expected("a dtype and shape such as 'float32[2,?]'", start, word)
        return found

    def _shape(self) -> Shape:
        if self.skip("..."):
            self.expect("]")
            return None
        return tuple(self.until("]", partial(self._int, "an extent: an int from 0, or '?'", unless="?", least=0))[0])

    def _int(self, meaning: str, *, unless: str, least: float = float("-inf")) -> int | None:
        """An int, or None for the word or mark `unless`."""
        start, word = self.offset, self.word
        found = None if self.skip(unless) else self.number(meaning)
        if isinstance(found, float) or (found is not None and found < least):
            raise self.expected(meaning, start, word)
        return found

    def _array(self, start: int, *, is_scalar: bool) -> Any:
        self.expect("(")
        spec, data, is_encoded = self._spec(), None, False
        if 0 not in (spec.shape or ()):  # an empty array is written as dtype and shape only
            self.expect(",")
            is_encoded = self.skip("base64")
            data = self.name("string", "base64 data in quotes") if is_encoded else self.value()
        self.expect(")")
        array = self.located(start, partial(read_array, data=data, is_encoded=is_encoded), spec)
        if is_scalar and (array.shape or array.dtype == string):
            raise self.expected("a scalar of shape []", start, str(spec))
        return array[()] if is_scalar else array
