"""The text form of a graph: readable, deterministic, and read back by `asyncflow.graph.text.parse.parse_graph`.

::

    graph effects=ordered seed=none
    resource @v = "Variable('v')"
    resource @w = Variable {container=none, initial=array(int32[], 3), name="w", spec=int32[]}

    %x = placeholder() {spec=float32[2,?]} : float32[2,?]
    %layer/add = add(%x, %x) after(%init) on "cuda:1" with %x : float32[2,?]
    %loop = while(%i, %n) {n_vars=1} : (int32[],) {
      cond "loop/cond" (%loop/cond/i, %loop/cond/n) {
        %loop/cond/i = parameter() {spec=int32[]} : int32[]
        %loop/cond/n = capture %n : int32[]
        %loop/cond/less = less(%loop/cond/i, %loop/cond/n) : bool[]
        return %loop/cond/less
      }
      body ...
    }

A node is one line. It has the name, op and inputs (``%split:1`` is output 1), and attrs by name. Nodes to wait for
stand behind ``after``, its device behind ``on``, and a node to be placed with behind ``with``. The specs of the outputs
come last: one, or a tuple. Branches and loops are blocks with their inputs, the nodes they run ``after``, and the
results behind ``return``; ``%inner = capture %outer`` is a parameter that stands for a tensor outside. A resource is
given to the parser, or made anew where the text describes it. Behind the nodes, ``assume "value" (%n) = array(int64[],
3)`` is a conclusion that shapes are built on, so that no run may feed against it. Where the user built a node is not
part of the text. Newlines and indentation mean nothing, and ``#`` begins a comment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from asyncflow.errors import GraphError, a_kind, brief
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.resource import Resource
from asyncflow.graph.text.array_text import encode, python_values
from asyncflow.graph.text.tokens import MAX_DEPTH, NAME, WORD
from asyncflow.graph.values.dtypes import VARIANT, dtype_name, is_supported
from asyncflow.graph.values.spec import Spec
from asyncflow.values import Array

READABLE_SIZE = 32
"""Size of the largest arrays printed as nested lists; larger ones are base64 of their bytes."""
KEY_TYPES = (str, int, float, bool, type(None))
"""Types that the keys of a dict in an attr may have."""
_LINE_WIDTH = 160
_PLAIN_NAME = re.compile(NAME)
_PLAIN_WORD = re.compile(WORD)
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t", '"': r"\"", "\\": r"\\"}


def print_graph(graph: Graph, *, with_resources: bool = False) -> str:
    """The graph as text; `parse_graph` gives an equal graph back.

    Args:
        graph: a root graph.
        with_resources: describe variables with their initial values, so that `parse_graph` makes new ones.

    Raises:
        GraphError: an attr holds something that has no text form.
    """
    printer = Printer()
    lines = [*printer.graph_lines(graph), *printer.assumption_lines(graph)]
    header = f"graph effects={graph.effects} seed={'none' if graph.seed is None else int(graph.seed)}"
    resources = [
        f"resource @{label} = {printer.resource(resource) if with_resources else quote(repr(resource))}"
        for resource, label in printer.resources.items()
    ]
    return "\n".join([header, *resources, "", *lines]) + "\n"


def neighbourhood(node: Node, *, around: int = 2) -> str:
    """The node's line of text, marked, with a few lines before and after it; prints broken graphs too."""
    nodes = node.graph.nodes
    position = next((i for i, other in enumerate(nodes) if other is node), len(nodes))
    shown = [*nodes[max(0, position - around) : position], node, *nodes[position + 1 : position + 1 + around]]
    printer = Printer(lenient=True)
    lines = []
    for other in shown:
        line = printer.head(other)
        cut = line if len(line) <= _LINE_WIDTH else f"{line[: _LINE_WIDTH - 3]}..."
        lines.append(f"  {'>' if other is node else ' '} {cut}")
    return "\n".join(lines)


class Printer:
    """Prints the nodes of one graph and collects the resources they name.

    Args:
        lenient: shorten large arrays, and show the repr of objects without a text form, rather than refuse them.
    """

    __slots__ = ("_captures", "_labels", "lenient", "resources")

    def __init__(self, *, lenient: bool = False) -> None:
        self.lenient = lenient
        self.resources: dict[Resource, str] = {}
        self._labels: set[str] = set()
        self._captures: dict[Graph, dict[Tensor, Tensor]] = {}

    def graph_lines(self, graph: Graph, indent: str = "") -> Iterator[str]:
        """The lines of the graph's nodes, with the blocks they hold."""
        for node in graph.nodes:
            yield from self.node_lines(node, indent)

    def assumption_lines(self, graph: Graph) -> Iterator[str]:
        """Yield the lines of the assumptions that shapes are built on; see `asyncflow.graph.assumptions`."""
        for each in graph.assumptions.values():
            yield f"assume {quote(each.rule)} ({references(each.tensors)}) = {self.value(each.value)}"

    def node_lines(self, node: Node, indent: str) -> Iterator[str]:
        """Yield the node's line, and the lines of its blocks."""
        head = indent + self.head(node)
        blocks = [(name, value) for name, value in node.attrs.items() if is_subgraph(value)]
        if not blocks:
            yield head
            return
        yield head + " {"
        for name, body in blocks:
            takes = f"({references(body.inputs)}){_after(body.outer_controls)}"
            yield f"{indent}  {name} {quote(body.label)} {takes} {{"
            yield from self.graph_lines(body, indent + "    ")
            yield f"{indent}    return {references(body.results)}".rstrip()
            yield f"{indent}  }}"
        yield indent + "}"

    def head(self, node: Node) -> str:
        """Return the node's line without its blocks."""
        parts = [f"%{quote_name(node.name)} = {self._call(node)}"]
        parts.append(_after(node.control_inputs).lstrip())
        parts.append("" if node.device is None else f"on {quote(node.device)}")
        parts.append("" if node.colocated_with is None else f"with %{quote_name(node.colocated_with)}")
        parts.append(f": {_specs(node)}")
        return " ".join(part for part in parts if part)

    def _call(self, node: Node) -> str:
        outer = self._captured(node)
        if outer is not None:
            return f"capture {reference(outer)}"
        # Sorted, as passes set attrs in any order, and texts are compared.
        attrs = [self._attr(node, name) for name in sorted(node.attrs) if not is_subgraph(node.attrs[name])]
        braced = f" {{{', '.join(attrs)}}}" if attrs else ""
        return f"{quote_word(node.op.name)}({references(node.inputs)}){braced}"

    def _captured(self, node: Node) -> Tensor | None:
        """Return the outer tensor that a parameter stands for, if `parse_graph` would build the parameter the same
        way.
        """
        body: Any = node.graph
        if node.op.name != "parameter" or not is_subgraph(body):
            return None
        # If a pass has changed the parameter, print it in full, so that no change is lost.
        if not node.single or node.inputs or node.attrs != {"spec": node.outputs[0].spec}:
            return None
        if body not in self._captures:
            self._captures[body] = {inner: outer for outer, inner in body.captures.items()}
        return self._captures[body].get(node.outputs[0])

    def _attr(self, node: Node, name: str) -> str:
        try:
            if not name.isidentifier() or not name.isascii():
                raise GraphError("its name is not an identifier")
            return f"{name}={self.value(node.attrs[name])}"
        except GraphError as error:
            if self.lenient:
                return f"{name}=<{brief(node.attrs[name])}>"
            raise GraphError(
                f"attr {name!r} of node {node.name!r} ({node.op.name}) has no text form: {error.reason}"
                f"\n  built at {node.location}"
            ) from error

    def resource(self, resource: Resource) -> str:
        """Format a resource by kind and description, or by its repr without a description."""
        attrs = resource.described()
        if attrs is None:
            return quote(repr(resource))
        listed = ", ".join(f"{name}={self.value(attrs[name])}" for name in sorted(attrs))
        return f"{type(resource).__name__} {{{listed}}}"

    def value(self, value: Any, depth: int = 0) -> str:
        """The text of an attr's value."""
        if depth > MAX_DEPTH // 2:  # the parser's limit also counts enclosing blocks
            raise GraphError(f"it is nested deeper than {MAX_DEPTH // 2} levels")
        kind = type(value)
        # Exact types: a subclass, such as an enum's member, would come back as another type.
        if kind in (int, float, str, bool, complex) or value is None:
            return _plain(value)
        if kind is tuple:
            return f"({self._items(value, depth)}{',' if len(value) == 1 else ''})"
        if kind is list:
            return f"[{self._items(value, depth)}]"
        if kind is dict:
            return self._dict(value, depth)
        if kind is slice:
            return f"slice({self._items((value.start, value.stop, value.step), depth)})"
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value)
        return self._named(value)

    def _items(self, values: Iterable[object], depth: int) -> str:
        return ", ".join(self.value(item, depth + 1) for item in values)

    def _dict(self, value: dict[object, object], depth: int) -> str:
        refused = [key for key in value if type(key) not in KEY_TYPES]
        if refused:
            raise GraphError(f"the key {brief(refused[0])} of a dict is no string, number, bool or None")
        items = (f"{_plain(key)}: {self.value(item, depth + 1)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"

    def _named(self, value: object) -> str:
        if isinstance(value, Resource):
            return f"@{self._label(value)}"
        if isinstance(value, Spec):
            return str(value)
        if isinstance(value, np.dtype) and is_supported(value):
            return dtype_name(value)
        if value is Ellipsis:
            return "..."
        if (why := getattr(value, "why_no_text", None)) is not None:
            raise GraphError(why)
        raise GraphError(
            f"{brief(value)} is {a_kind(type(value))}; attrs hold None, numbers, strings, tuples, lists, dicts, "
            f"dtypes, specs, arrays and resources"
        )

    def _label(self, resource: Resource) -> str:
        # Resources belong to no graph, so two of one name may meet here.
        if resource not in self.resources:  # one object has one label, wherever the graph names it
            label, count = resource.name, 0
            while label in self._labels:
                count += 1
                label = f"{resource.name}_{count}"
            self._labels.add(label)
            self.resources[resource] = quote_name(label)
        return self.resources[resource]

    def _array(self, value: Array | np.generic) -> str:
        array = np.asarray(value)
        if not is_supported(array.dtype) or array.dtype == VARIANT:
            raise GraphError(f"an array of dtype {array.dtype} cannot be written down")
        if not array.dtype.isnative:  # the text is to be the same on every machine
            array = array.astype(array.dtype.newbyteorder("="))
        kind = "scalar" if isinstance(value, np.generic) else "array"
        spec = Spec(array.dtype, array.shape)
        if array.size == 0:
            return f"{kind}({spec})"
        if self.lenient and array.size > READABLE_SIZE:
            return f"{kind}({spec}, ...)"
        return f"{kind}({spec}, {self._data(array)})"

    def _data(self, array: Array) -> str:
        is_text = isinstance(array.dtype, np.dtypes.StringDType)
        if is_text or array.size <= READABLE_SIZE:
            items = python_values(array)
            # Digits do not distinguish NaNs, and long doubles have more digits than Python's floats. So try it, and
            # write values that would not come back exactly as bytes.
            if is_text or np.array(items, array.dtype).reshape(array.shape).tobytes() == array.tobytes():
                return self._nested(items, array.shape)
        return f"base64 {quote(encode(array))}"

    def _nested(self, items: list[object], shape: tuple[int, ...]) -> str:
        texts = [_plain(item) for item in items]
        for extent in reversed(shape):
            texts = [f"[{', '.join(texts[i : i + extent])}]" for i in range(0, len(texts), extent)]
        return texts[0]


def quote(text: str) -> str:
    """`text` in double quotes, on one line, with everything unprintable escaped."""
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else f"\\u{{{ord(c):x}}}") for c in text) + '"'


def quote_name(name: str) -> str:
    """A node's or resource's name, quoted if it has to be."""
    return name if _PLAIN_NAME.fullmatch(name) else quote(name)


def quote_word(word: str) -> str:
    """An op's name, quoted if it has to be."""
    return word if _PLAIN_WORD.fullmatch(word) else quote(word)


def is_subgraph(value: object) -> bool:
    """Return True if an attr's value is the body of a branch or loop."""
    return getattr(value, "is_subgraph", False) is True


def reference(tensor: Tensor) -> str:
    """``%name``, or ``%name:index`` for outputs after the first."""
    return f"%{quote_name(tensor.node.name)}" + (f":{tensor.index}" if tensor.index else "")


def references(tensors: Iterable[Tensor]) -> str:
    """Format references with commas between them."""
    return ", ".join(map(reference, tensors))


def _plain(value: object) -> str:
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, float):
        return "nan" if math.isnan(value) else repr(value)
    if isinstance(value, complex):
        return f"complex({_plain(value.real)}, {_plain(value.imag)})"
    # Python refuses to convert integers of more than 4,300 digits, and takes quadratic time before that.
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 1024:
        return hex(value)
    return str(value).lower()


def _after(nodes: Iterable[Node]) -> str:
    listed = ", ".join(f"%{quote_name(node.name)}" for node in nodes)
    return f" after({listed})" if listed else ""


def _specs(node: Node) -> str:
    specs = [str(output.spec) for output in node.outputs]
    if node.single:
        return specs[0]
    return f"({', '.join(specs)}{',' if len(specs) == 1 else ''})"
