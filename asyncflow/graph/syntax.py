"""From a graph's text to statements: the grammar of `asyncflow.graph.text`, before any node is built."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from asyncflow.errors import GraphError
from asyncflow.graph.dtypes import DType, as_dtype, string
from asyncflow.graph.resource import Resource
from asyncflow.graph.spec import Spec
from asyncflow.graph.text import KEY_TYPES, little_endian
from asyncflow.graph.tokens import MAX_DEPTH, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asyncflow.graph.shapes import Shape

_CONSTANTS: dict[str, Any] = {"none": None, "true": True, "false": False, "nan": float("nan")}
_DTYPE_NAMES = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16")
    + ("float32", "float64", "float96", "float128", "complex64", "complex128", "complex192", "complex256")
    + ("string", "variant")
)
# What NumPy stores an element of each kind from; anything else would be converted silently.
_ELEMENT_TYPES: dict[str, tuple[type, ...]] = {"b": (bool,), "i": (int,), "u": (int,), "T": (str,), "c": (complex,)}


@dataclass(frozen=True, slots=True)
class Reference:
    """``%name:index``, and where it stands in the text."""

    name: str
    index: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A branch or loop body inside a statement."""

    label: str
    offset: int
    inputs: tuple[Reference, ...]
    after: tuple[Reference, ...]
    statements: tuple[Statement, ...]
    results: tuple[Reference, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One node of the text; `captured` is set, and `op` is ``parameter``, where it stands for a tensor outside."""

    name: str
    op: str
    offset: int
    inputs: tuple[Reference, ...]
    captured: Reference | None
    attrs: Mapping[str, Any]
    blocks: Mapping[str, Block]
    after: tuple[Reference, ...]
    device: str | None
    colocated_with: str | None
    specs: tuple[Spec, ...]
    single: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A whole text."""

    effects: Literal["ordered", "unordered"]
    seed: int | None
    statements: tuple[Statement, ...]


class Reader:
    """Reads statements and values off the tokens of one text."""

    __slots__ = ("_depth", "_given", "_names", "_resources", "tokens")

    def __init__(self, tokens: Tokens, resources: Mapping[str, Resource]) -> None:
        self.tokens = tokens
        self._given = resources
        self._resources: dict[str, Resource] = {}
        self._names: set[str] = set()
        self._depth = 0

    # -- statements ----------------------------------------------------------------------------------------------

    def program(self) -> Program:
        """The whole text."""
        tokens = self.tokens
        tokens.expect("graph")
        tokens.expect("effects")
        tokens.expect("=")
        if not tokens.at("ordered") and not tokens.at("unordered"):
            raise tokens.unexpected("'ordered' or 'unordered'")
        effects: Literal["ordered", "unordered"] = "ordered" if tokens.take().text == "ordered" else "unordered"
        tokens.expect("seed")
        tokens.expect("=")
        start = tokens.next.offset
        seed = self.value()
        if seed is not None and type(seed) is not int:
            raise tokens.error("an int or none as seed", start, repr(seed)[:40])
        while tokens.at("resource"):
            self._resource()
        statements = self._statements()
        if tokens.next.kind != "end":
            raise tokens.unexpected("a node such as '%x = ...'")
        return Program(effects=effects, seed=seed, statements=statements)

    def _resource(self) -> None:
        tokens = self.tokens
        tokens.expect("resource")
        token = tokens.expect_kind("resource", "a resource's name such as '@v'")
        label = tokens.unquote(token.text[1:], token.offset + 1)
        tokens.expect("=")
        described = self._string("a description of the resource in quotes")
        if label in self._resources:
            raise tokens.fault(f"resource @{label} is declared twice", token.offset)
        resource = self._given.get(label)
        if not isinstance(resource, Resource):
            raise tokens.fault(
                f"no resource is given for @{label} ({described}); pass resources={{{label!r}: ...}}", token.offset
            )
        self._resources[label] = resource

    def _statements(self) -> tuple[Statement, ...]:
        found = []
        while self.tokens.next.kind == "tensor":
            found.append(self._statement())
        return tuple(found)

    def _statement(self) -> Statement:
        tokens = self.tokens
        target = self._reference("a node's name such as '%x'", indexed=False)
        if target.name in self._names:
            raise tokens.fault(f"two nodes are named {target.name!r}; names are unique in a graph", target.offset)
        if not target.name:
            raise tokens.fault("a node's name may not be empty", target.offset)
        self._names.add(target.name)
        tokens.expect("=")
        op, inputs, captured = self._call()
        attrs = self._attrs() if captured is None and tokens.at("{") else {}
        after = self._after()
        device = self._string("a device in quotes") if tokens.skip("on") else None
        colocated = self._reference("a node's name", indexed=False).name if tokens.skip("with") else None
        tokens.expect(":")
        specs, single = self._specs()
        return Statement(
            name=target.name,
            op=op,
            offset=target.offset,
            inputs=inputs,
            captured=captured,
            attrs={"spec": specs[0]} if captured is not None and single else attrs,
            blocks=self._blocks(attrs) if tokens.at("{") else {},
            after=after,
            device=device,
            colocated_with=colocated,
            specs=specs,
            single=single,
        )

    def _call(self) -> tuple[str, tuple[Reference, ...], Reference | None]:
        """Op, inputs and captured tensor of ``op(%a, %b)`` or ``capture %outer``."""
        tokens = self.tokens
        if tokens.next.kind == "string":
            op = self._string("an op's name")
        else:
            op = tokens.expect_kind("word", "an op's name").text
            if op == "capture" and not tokens.at("("):
                return "parameter", (), self._reference("a tensor such as '%x' or '%x:1'")
        tokens.expect("(")
        inputs = self._references()
        tokens.expect(")")
        return op, inputs, None

    def _attrs(self) -> dict[str, Any]:
        tokens = self.tokens
        attrs: dict[str, Any] = {}
        tokens.expect("{")
        while True:
            token = tokens.expect_kind("word", "an attr's name")
            name = token.text
            if not name.isidentifier() or name.startswith("__"):
                raise tokens.error("an attr's name", token.offset, repr(name))
            if name in attrs:
                raise tokens.fault(f"attr {name!r} is given twice", token.offset)
            tokens.expect("=")
            attrs[name] = self.value()
            if not tokens.skip(","):
                break
        tokens.expect("}")
        return attrs

    def _blocks(self, attrs: Mapping[str, Any]) -> dict[str, Block]:
        tokens = self.tokens
        blocks: dict[str, Block] = {}
        self._enter("branches and loops")
        tokens.expect("{")
        while not tokens.at("}"):
            token = tokens.expect_kind("word", "the name of a branch or loop body, or '}'")
            if token.text in blocks or token.text in attrs:
                raise tokens.fault(f"attr {token.text!r} is given twice", token.offset)
            blocks[token.text] = self._block(token.offset)
        tokens.expect("}")
        self._depth -= 1
        return blocks

    def _block(self, offset: int) -> Block:
        tokens = self.tokens
        label = self._string("the body's label in quotes")
        tokens.expect("(")
        inputs = self._references()
        tokens.expect(")")
        after = self._after()
        tokens.expect("{")
        statements = self._statements()
        if not tokens.at("return"):
            raise tokens.unexpected("a node such as '%x = ...', or 'return'")
        tokens.take()
        results = self._references()
        tokens.expect("}")
        return Block(label=label, offset=offset, inputs=inputs, after=after, statements=statements, results=results)

    def _after(self) -> tuple[Reference, ...]:
        if not self.tokens.skip("after"):
            return ()
        self.tokens.expect("(")
        nodes = self._references(indexed=False)
        self.tokens.expect(")")
        return nodes

    def _references(self, *, indexed: bool = True) -> tuple[Reference, ...]:
        found: list[Reference] = []
        while self.tokens.next.kind == "tensor" or found:
            found.append(self._reference("a tensor such as '%x' or '%x:1'", indexed=indexed))
            if not self.tokens.skip(","):
                break
        return tuple(found)

    def _reference(self, meaning: str, *, indexed: bool = True) -> Reference:
        token = self.tokens.expect_kind("tensor", meaning)
        name, colon, index = token.text[1:].rpartition(":")
        if not colon or not index.isdigit():
            name, index = token.text[1:], ""
        if index and not indexed:
            raise self.tokens.error("a node's name without an output number", token.offset, str(token))
        return Reference(self.tokens.unquote(name, token.offset + 1), int(index or 0), token.offset)

    def _specs(self) -> tuple[tuple[Spec, ...], bool]:
        """Specs of the outputs, and whether they stand for the one value itself rather than a tuple."""
        tokens = self.tokens
        if not tokens.skip("("):
            return (self._spec(),), True
        specs = []
        while not tokens.at(")"):
            specs.append(self._spec())
            if not tokens.skip(","):
                break
        tokens.expect(")")
        return tuple(specs), False

    # -- values --------------------------------------------------------------------------------------------------

    def value(self) -> Any:
        """An attr's value."""
        tokens = self.tokens
        kind = tokens.next.kind
        if kind == "string":
            return self._string("a string")
        if kind == "number":
            return self._number()
        if kind == "resource":
            return self._named_resource()
        if kind == "word":
            return self._word()
        if tokens.skip("..."):
            return ...
        reader = {"(": self._tuple, "[": self._list, "{": self._dict}.get(tokens.next.text) if kind == "mark" else None
        if reader is None:
            raise tokens.unexpected("a value")
        self._enter("lists, tuples and dicts")
        found = reader()
        self._depth -= 1
        return found

    def _enter(self, what: str) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self.tokens.fault(f"{what} are nested deeper than {MAX_DEPTH} levels", self.tokens.next.offset)

    def _string(self, meaning: str) -> str:
        token = self.tokens.expect_kind("string", meaning)
        return self.tokens.unquote(token.text, token.offset)

    def _number(self) -> int | float:
        token = self.tokens.expect_kind("number", "a number")
        if "0x" in token.text:
            return int(token.text, 16)
        if not token.text.lstrip("-").isdigit():
            return float(token.text)
        if len(token.text) > 1000:
            raise self.tokens.fault("an int of more than 1000 digits is to be written as 0x...", token.offset)
        return int(token.text)

    def _named_resource(self) -> Resource:
        token = self.tokens.expect_kind("resource", "a resource")
        label = self.tokens.unquote(token.text[1:], token.offset + 1)
        if label not in self._resources:
            raise self.tokens.fault(f"resource @{label} is not declared at the top", token.offset)
        return self._resources[label]

    def _word(self) -> Any:
        token = self.tokens.take()
        if token.text in _CONSTANTS:
            return _CONSTANTS[token.text]
        special: Callable[[], Any] | None = {
            "array": self._array,
            "scalar": self._scalar,
            "complex": self._complex,
            "slice": self._slice,
        }.get(token.text)
        if special is not None:
            return special()
        dtype = self._dtype(token.text, token.offset)
        return Spec(dtype, self._shape()) if self.tokens.at("[") else dtype

    def _dtype(self, name: str, offset: int) -> DType:
        if name not in _DTYPE_NAMES:
            raise self.tokens.error("a value or a dtype", offset, repr(name[:40]))
        try:
            return as_dtype(name)
        except GraphError as error:
            raise self.tokens.fault(error.reason, offset) from error

    def _spec(self) -> Spec:
        token = self.tokens.expect_kind("word", "a dtype and shape such as 'float32[2,?]'")
        return Spec(self._dtype(token.text, token.offset), self._shape())

    def _shape(self) -> Shape:
        tokens = self.tokens
        tokens.expect("[")
        if tokens.skip("..."):
            tokens.expect("]")
            return None
        dims: list[int | None] = []
        while not tokens.at("]"):
            start = tokens.next.offset
            dim = None if tokens.skip("?") else self._number()
            if isinstance(dim, float) or (dim is not None and dim < 0):
                raise tokens.error("an extent: an int from 0, or '?'", start, repr(dim))
            dims.append(dim)
            if not tokens.skip(","):
                break
        tokens.expect("]")
        return tuple(dims)

    def _items(self, end: str) -> tuple[list[Any], bool]:
        """Values up to the mark `end`, and whether a comma followed the last."""
        tokens = self.tokens
        items: list[Any] = []
        comma = False
        while not tokens.at(end):
            items.append(self.value())
            comma = tokens.skip(",")
            if not comma:
                break
        tokens.expect(end)
        return items, comma

    def _tuple(self) -> tuple[Any, ...]:
        start = self.tokens.expect("(").offset
        items, comma = self._items(")")
        if len(items) == 1 and not comma:
            raise self.tokens.fault("a tuple of one item needs a comma after it: (1,)", start)
        return tuple(items)

    def _list(self) -> list[Any]:
        self.tokens.expect("[")
        return self._items("]")[0]

    def _dict(self) -> dict[Any, Any]:
        tokens = self.tokens
        tokens.expect("{")
        items: dict[Any, Any] = {}
        while not tokens.at("}"):
            start = tokens.next.offset
            key = self.value()
            if type(key) not in KEY_TYPES or key in items:
                raise tokens.fault("a key of a dict is a string, number, bool or none, and stands there once", start)
            tokens.expect(":")
            items[key] = self.value()
            if not tokens.skip(","):
                break
        tokens.expect("}")
        return items

    def _call_items(self, count: int, meaning: str) -> list[Any]:
        start = self.tokens.expect("(").offset
        items = self._items(")")[0]
        if len(items) != count:
            raise self.tokens.fault(f"{meaning} takes {count} values, found {len(items)}", start)
        return items

    def _complex(self) -> complex:
        start = self.tokens.next.offset
        real, imag = self._call_items(2, "complex")
        if type(real) is not float or type(imag) is not float:
            raise self.tokens.fault("complex takes two floats", start)
        return complex(real, imag)

    def _slice(self) -> slice:
        return slice(*self._call_items(3, "slice"))

    # -- arrays --------------------------------------------------------------------------------------------------

    def _scalar(self) -> np.generic:
        start = self.tokens.next.offset
        array = self._array()
        if array.shape != () or isinstance(array.dtype, np.dtypes.StringDType):
            raise self.tokens.error("a scalar of shape []", start, str(Spec(array.dtype, array.shape)))
        return cast("np.generic", array[()])

    def _array(self) -> np.ndarray[Any, Any]:
        """``array(float32[2], [1.0, 2.0])`` or ``array(int32[99], base64 "...")``; read-only, like a constant's."""
        tokens = self.tokens
        start = tokens.expect("(").offset
        spec = self._spec()
        if spec.shape is None or None in spec.shape or spec.dtype.kind == "O" or len(spec.shape) > 64:
            raise tokens.error("a full shape of at most 64 axes and a dtype that can be written", start, str(spec)[:80])
        shape = tuple(dim for dim in spec.shape if dim is not None)
        try:
            array = self._elements(spec.dtype, shape, start)
        except (ValueError, TypeError, OverflowError) as error:
            raise tokens.fault(f"the data do not make {str(spec)[:80]}: {error}", start) from error
        tokens.expect(")")
        array.flags.writeable = False
        return array

    def _elements(self, dtype: DType, shape: tuple[int, ...], start: int) -> np.ndarray[Any, Any]:
        tokens = self.tokens
        if 0 in shape:
            return np.empty(shape, dtype)
        tokens.expect(",")
        if tokens.skip("base64"):
            return self._base64(dtype, shape, start)
        nested = self.value()
        flat = _flatten(nested, shape)
        expected = _ELEMENT_TYPES.get("T" if dtype == string else dtype.kind, (float,))
        if any(type(item) not in expected for item in flat):
            raise tokens.fault(f"the elements of an array of {dtype} are all of type {expected[0].__name__}", start)
        return np.array(flat, dtype).reshape(shape)

    def _base64(self, dtype: DType, shape: tuple[int, ...], start: int) -> np.ndarray[Any, Any]:
        if dtype == string:
            raise self.tokens.fault("strings are written out, not as base64", start)
        token = self.tokens.next
        try:
            data = base64.b64decode(self._string("base64 data in quotes"), validate=True)
        except (binascii.Error, ValueError) as error:
            raise self.tokens.fault(f"this is not base64: {error}", token.offset) from error
        if dtype.kind == "b" and data.strip(b"\0\1"):
            raise self.tokens.fault("the bytes of booleans are 0 or 1", token.offset)
        return little_endian(np.frombuffer(data, dtype).reshape(shape).copy())


def _flatten(nested: Any, shape: tuple[int, ...]) -> list[Any]:
    """The elements of nested lists, which have to be of that shape exactly."""
    items = [nested]
    for extent in shape:
        if any(type(item) is not list or len(item) != extent for item in items):
            raise ValueError(f"the lists do not have {extent} items each along one axis")
        items = [inner for item in items for inner in item]
    return items
