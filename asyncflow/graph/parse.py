"""From text to a graph: reads the form that `asyncflow.graph.text` describes, and builds each node as it comes."""

from __future__ import annotations

import re
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncflow.errors import GraphError, SourceLocation, told
from asyncflow.graph.array_text import read_array
from asyncflow.graph.dtypes import DType, as_dtype, string
from asyncflow.graph.graph import Graph, Subgraph, is_name
from asyncflow.graph.op import find_op
from asyncflow.graph.resource import Resource
from asyncflow.graph.spec import Spec, show_specs, specs_agree
from asyncflow.graph.text import KEY_TYPES, quote_name
from asyncflow.graph.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.graph.op import Op
    from asyncflow.graph.shapes import Shape

_NONE: Mapping[str, Any] = MappingProxyType({})
_CONSTANTS: dict[str, Any] = {"none": None, "true": True, "false": False, "nan": float("nan")}
_DTYPE_NAMES = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16")
    + ("float32", "float64", "float96", "float128", "complex64", "complex128", "complex192", "complex256")
    + ("string", "variant")
)
_CALLS: dict[str, tuple[type, int]] = {"complex": (complex, 2), "slice": (slice, 3)}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


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
    return _Parser(text, ops, resources).graph()


class _Reference(NamedTuple):
    """``%name:output``, and where it stands in the text."""

    name: str
    output: int
    offset: int


class _Parser(Tokens):
    """Builds the nodes of one text, whose names are unique in all its bodies; None is a node that is being read."""

    def __init__(self, text: str, ops: Mapping[str, Op], given: Mapping[str, Resource]) -> None:
        super().__init__(text)
        self._ops = ops
        self._given = given
        self._resources: dict[str, Resource] = {}
        self._nodes: dict[str, Node | None] = {}

    def graph(self) -> Graph:
        """The whole text."""
        self.expect("graph", "effects", "=")
        if self.word not in ("ordered", "unordered"):
            raise self.expected("'ordered' or 'unordered'")
        graph = Graph(effects="ordered" if self.take() == "ordered" else "unordered")
        self.expect("seed", "=")
        start = self.offset
        graph.seed = self._value()
        if graph.seed is not None and type(graph.seed) is not int:
            raise self.expected("an int or none as seed", start, repr(graph.seed)[:40])
        while self.skip("resource"):
            self._declare()
        self._read_nodes(graph)
        if self.kind != "end":
            raise self.expected("a node such as '%x = ...'")
        return graph

    def _declare(self) -> None:
        start = self.offset
        label = self.unquote(self.take("resource", "a resource's name such as '@v'")[1:], start + 1)
        self.expect("=")
        described = self._string("a description of the resource in quotes")
        if label in self._resources:
            raise self.fault(f"resource @{label} is declared twice", start)
        resource = self._given.get(label)
        if not isinstance(resource, Resource):
            message = f"no resource is given for @{label} ({described}); pass resources={{{label!r}: ...}}"
            raise self.fault(message, start)
        self._resources[label] = resource

    # -- nodes ---------------------------------------------------------------------------------------------------

    def _read_nodes(self, graph: Graph) -> None:
        loops: list[tuple[Node, list[_Reference], int]] = []
        while self.kind == "tensor":
            self._read_node(graph, loops)
        for node, references, start in loops:
            node.inputs = [self._tensor(reference, graph) for reference in references]
            self._check_specs(node, start)

    def _read_node(self, graph: Graph, loops: list[tuple[Node, list[_Reference], int]]) -> None:
        """Builds a node; `loops` gets a merge that takes later nodes, whose inputs are found when those are built."""
        start, location = self.offset, SourceLocation("<text>", self.line, "<text>")
        name = self._reference("a node's name such as '%x'", indexed=False).name
        if name in self._nodes:
            raise self.fault(f"two nodes are named {name!r}; names are unique in a graph", start)
        if not is_name(name):
            raise self.fault(f"a node is named {name!r}; a name may not be empty, and has no ':' in it", start)
        self._nodes[name] = None
        self.expect("=")
        op_name = self._string("") if self.kind == "string" else self.take("word", "an op's name")
        references: list[_Reference] = []
        captured = self._reference() if op_name == "capture" and self.word != "(" else None
        if captured:
            op_name = "parameter"
        else:
            self.expect("(")
            references = self._references()
        op = self._ops.get(op_name) or self.located(start, find_op, op_name)
        attrs = self._attrs() if self.word == "{" and not captured else {}
        late = op_name == "merge" and any(self._nodes.get(reference.name) is None for reference in references)
        inputs = [] if late else [self._tensor(reference, graph) for reference in references]
        controls = self._after(graph)
        device = self._string("a device in quotes") if self.skip("on") else None
        beside = self._reference("a node's name", indexed=False).name if self.skip("with") else None
        self.expect(":")
        specs = tuple(self.until(")", self._spec)[0]) if self.skip("(") else self._spec()
        if captured and isinstance(specs, Spec):
            attrs["spec"] = specs
        if self.skip("{"):
            self._read_bodies(graph, attrs)
        with graph.scoped(name_scope="", controls=controls, device=device, colocated_with=beside):
            node = graph.add_node(op, inputs, attrs, specs, name=name, location=location)
        if late:
            loops.append((node, references, start))
        else:
            self._check_specs(node, start)
        self._nodes[name] = node
        if captured:
            self._capture(graph, node, captured)

    def _attrs(self) -> dict[str, Any]:
        attrs: dict[str, Any] = {}
        while self.skip("," if attrs else "{"):
            start = self.offset
            name = self.take("word", "an attr's name")
            if not name.isidentifier() or name.startswith("__"):
                raise self.expected("an attr's name", start, repr(name))
            if name in attrs:
                raise self.fault(f"attr {name!r} is given twice", start)
            self.expect("=")
            attrs[name] = self._value()
        self.expect("}")
        return attrs

    def _read_bodies(self, graph: Graph, attrs: dict[str, Any]) -> None:
        self.deeper("branches and loops")
        while not self.skip("}"):
            start = self.offset
            name = self.take("word", "the name of a branch or loop body, or '}'")
            if name in attrs:
                raise self.fault(f"attr {name!r} is given twice", start)
            attrs[name] = body = Subgraph(graph, self._string("the body's label in quotes"))
            self.expect("(")
            inputs = self._references()
            body.outer_controls = dict.fromkeys(self._after(graph))
            self.expect("{")
            self._read_nodes(body)
            if not self.skip("return"):
                raise self.expected("a node such as '%x = ...', or 'return'")
            body.inputs = [self._tensor(reference, body) for reference in inputs]
            body.results = [self._tensor(reference, body) for reference in self._references("}")]
            body.closed = True
        self.depth -= 1

    def _capture(self, graph: Graph, node: Node, captured: _Reference) -> None:
        outer = self._nodes.get(captured.name)
        if not isinstance(graph, Subgraph):
            raise self.fault("only the body of a branch or loop can capture", captured.offset)
        if len(node.outputs) != 1:
            raise self.fault("a capture has one output", captured.offset)
        if outer is None or outer.graph is not graph.parent:
            message = f"%{captured.name} is no earlier node of the graph around this body"
            raise self.fault(message, captured.offset)
        tensor = self._output(outer, captured)
        if tensor in graph.captures:
            raise self.fault(f"%{captured.name} is captured twice by one body", captured.offset)
        graph.captures[tensor] = node.outputs[0]

    def _check_specs(self, node: Node, start: int) -> None:
        op, given = node.op, tuple(output.spec for output in node.outputs)
        claimed = given[0] if node.single else given
        seen = ", ".join(str(tensor.spec) for tensor in node.inputs) or "no inputs"
        try:
            inferred = op.infer(*(tensor.spec for tensor in node.inputs), **node.attrs)
        except GraphError as error:
            raise self.fault(f"{op.name} of {seen}: {error.reason}", start) from error
        except Exception as error:
            # The rule of an op may stumble anywhere over attrs that only a text can give it.
            raise self.fault(f"{op.name} does not take {seen} and these attrs: {told(error)}", start) from error
        if not all(isinstance(spec, Spec) for spec in (inferred if isinstance(inferred, tuple) else (inferred,))):
            raise self.fault(f"{op.name} takes a dtype and shape as its spec", start)
        if not specs_agree(inferred, claimed):
            said, found = show_specs(inferred), show_specs(claimed)
            raise self.fault(f"{op.name} of {seen} gives {said}, but the text says {found}", start)

    # -- references ----------------------------------------------------------------------------------------------

    def _reference(self, meaning: str = "a tensor such as '%x' or '%x:1'", *, indexed: bool = True) -> _Reference:
        start, word = self.offset, self.take("tensor", meaning)
        name, colon, index = word[1:].rpartition(":")
        if not colon or not index.isdigit():
            name, index = word[1:], "0"
        elif not indexed:
            raise self.expected("a node's name without an output number", start, repr(word))
        return _Reference(self.unquote(name, start + 1), int(index), start)

    def _references(self, end: str = ")", *, indexed: bool = True) -> list[_Reference]:
        found = [self._reference(indexed=indexed)] if self.kind == "tensor" else []
        while found and self.skip(","):
            found.append(self._reference(indexed=indexed))
        self.expect(end)
        return found

    def _after(self, graph: Graph) -> tuple[Node, ...]:
        if not self.skip("after"):
            return ()
        self.expect("(")
        return tuple(self._node(reference, graph) for reference in self._references(indexed=False))

    def _tensor(self, reference: _Reference, graph: Graph) -> Tensor:
        return self._output(self._node(reference, graph), reference)

    def _output(self, node: Node, reference: _Reference) -> Tensor:
        if reference.output >= len(node.outputs):
            raise self.fault(f"%{reference.name} has {len(node.outputs)} outputs", reference.offset)
        return node.outputs[reference.output]

    def _node(self, reference: _Reference, graph: Graph) -> Node:
        name = reference.name
        node = self._nodes.get(name)
        if node is not None and node.graph is graph:
            return node
        reason = "is not built in this graph or body; a body gets at tensors outside by '%inner = capture %outer'"
        later = re.compile(rf"%{re.escape(quote_name(name))}\s*=")
        if node is None and (name in self._nodes or later.search(self.text, self.offset)):
            reason = "is used before the line that builds it; only a merge takes a later node (the loop's back edge)"
        raise self.fault(f"%{name} {reason}", reference.offset)

    # -- values --------------------------------------------------------------------------------------------------

    def _value(self) -> Any:
        start, kind, word = self.offset, self.kind, self.word
        if kind == "string":
            return self._string("a string")
        if kind == "number":
            return self._number()
        if kind in ("tensor", "end") or word in (")", "]", "}", ",", ":", "=", "?"):
            raise self.expected("a value")
        self.take()
        if kind == "resource":
            label = self.unquote(word[1:], start + 1)
            if label not in self._resources:
                raise self.fault(f"resource @{label} is not declared at the top", start)
            return self._resources[label]
        if kind == "word":
            return self._named(word, start)
        if word == "...":
            return ...
        self.deeper("lists, tuples and dicts")
        items: dict[Any, Any] = {}
        found, comma = self.until(_CLOSING[word], self._value if word != "{" else lambda: self._item(items))
        self.depth -= 1
        if word == "(" and len(found) == 1 and not comma:
            raise self.fault("a tuple of one item needs a comma after it: (1,)", start)
        return items if word == "{" else found if word == "[" else tuple(found)

    def _item(self, items: dict[Any, Any]) -> None:
        start, key = self.offset, self._value()
        if type(key) not in KEY_TYPES or key in items:
            raise self.fault("a key of a dict is a string, number, bool or none, and stands there once", start)
        self.expect(":")
        items[key] = self._value()

    def _string(self, meaning: str) -> str:
        start = self.offset
        return self.unquote(self.take("string", meaning), start)

    def _number(self) -> int | float:
        start, word = self.offset, self.take("number", "a number")
        if "0x" in word:
            return int(word, 16)
        if not word.lstrip("-").isdigit():
            return float(word)
        if len(word) > 1000:
            raise self.fault("an int of more than 1000 digits is to be written as 0x...", start)
        return int(word)

    def _named(self, name: str, start: int) -> Any:
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in ("array", "scalar"):
            return self._array(scalar=name == "scalar")
        if name not in _CALLS:
            dtype = self._dtype(name, start)
            return Spec(dtype, self._shape()) if self.word == "[" else dtype
        make, count = _CALLS[name]
        start = self.offset
        self.expect("(")
        items, _ = self.until(")", self._value)
        if len(items) != count:
            raise self.fault(f"{name} takes {count} values, found {len(items)}", start)
        if make is complex and any(type(item) is not float for item in items):
            raise self.fault("complex takes two floats", start)
        return make(*items)

    def _spec(self) -> Spec:
        start, name = self.offset, self.take("word", "a dtype and shape such as 'float32[2,?]'")
        return Spec(self._dtype(name, start), self._shape())

    def _shape(self) -> Shape:
        self.expect("[")
        if self.skip("..."):
            self.expect("]")
            return None
        return tuple(self.until("]", self._extent)[0])

    def _dtype(self, name: str, start: int) -> DType:
        if name not in _DTYPE_NAMES:
            raise self.expected("a value or a dtype", start, repr(name[:40]))
        return self.located(start, as_dtype, name)

    def _extent(self) -> int | None:
        start = self.offset
        extent = None if self.skip("?") else self._number()
        if isinstance(extent, float) or (extent is not None and extent < 0):
            raise self.expected("an extent: an int from 0, or '?'", start, repr(extent))
        return extent

    def _array(self, *, scalar: bool) -> Any:
        start = self.offset
        self.expect("(")
        spec = self._spec()
        nested, encoded = None, None
        if 0 not in (spec.shape or ()):
            self.expect(",")
            place = self.offset
            if self.skip("base64"):
                start, encoded = place, self._string("base64 data in quotes")
            else:
                nested = self._value()
        self.expect(")")
        array = self.located(start, partial(read_array, nested=nested, encoded=encoded), spec)
        if scalar and (array.shape or array.dtype == string):
            raise self.expected("a scalar of shape []", start, str(spec))
        return array[()] if scalar else array
