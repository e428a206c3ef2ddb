"""The hypothesis strategy behind `tests.property.programs`: `programs()` draws a valid random program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st

from tests.property.programs import (
    LENGTH,
    Block,
    Call,
    Cast,
    Collect,
    Expression,
    Extents,
    If,
    Item,
    Let,
    Literal,
    Loop,
    Name,
    Program,
    Read,
    Scan,
    Stack,
    Statement,
    Sum,
    Type,
    Write,
    array_name,
)

T = TypeVar("T")

DTYPES = ("bool", "int32", "int64", "float32", "float64")
NUMBERS = DTYPES[1:]
TYPES = tuple(Type(dtype, is_vector) for dtype in DTYPES for is_vector in (False, True))
BOOL = Type("bool", False)
VECTORS = tuple(Type(dtype, True) for dtype in ("bool", "int64", "float32"))

_NUMBERS = {
    "bool": (False, True),
    "int32": (0, 1, -1, 2, 3, 7, -5, 2**31 - 1, -(2**31)),
    "int64": (0, 1, -1, 2, 3, 7, -5, 2**63 - 1, -(2**63)),
    "float32": (0.0, 1.0, -1.5, 0.1, 2.0, -0.0, 3e38, float("inf"), float("nan")),
    "float64": (0.0, 1.0, -1.5, 0.1, 2.0, -0.0, 1e308, float("-inf"), float("nan")),
}
_PAIRS = {
    dtype: [(a, b) for a in DTYPES for b in DTYPES if np.result_type(a, b) == dtype and (a, b) != ("bool", "bool")]
    for dtype in NUMBERS
}
_ARITHMETIC = ("add", "subtract", "multiply", "maximum", "minimum", "floor_divide", "remainder")
_WEAK_SAFE = _ARITHMETIC[:5]
_UNARY = {"i": ("negative", "abs", "square"), "f": ("negative", "abs", "square", "sqrt", "floor")}
_COMPARISONS = ("less", "less_equal", "equal", "not_equal")
_LOGIC = ("logical_and", "logical_or", "logical_xor")
_CASTS = {
    "int32": ("bool", "int64"),
    "int64": ("bool", "int32"),
    "float32": ("bool", "int32", "int64", "float64"),
    "float64": ("bool", "int32", "int64", "float32"),
}


@st.composite
def programs(draw: st.DrawFn, types: Sequence[Type] = TYPES) -> Program:
    """A random program of up to three levels of branches and loops."""
    return write_program(lambda count: draw(st.integers(0, count - 1)), types)


def write_program(choose: Callable[[int], int], types: Sequence[Type] = TYPES) -> Program:
    """Return a program, by the decisions of `choose`, which returns a number from 0 up to its argument, exclusive.

    `types` are the types of inputs, names, results and loop variables.
    """
    writer = _Writer(choose, types)
    inputs = {f"input{index}": writer.pick(types) for index in range(choose(4))}
    feeds = {name: writer.literal(type).value for name, type in inputs.items()}
    variables = {f"variable{index}": writer.pick(TYPES[2:]) for index in range(choose(3))}
    writer.variables = variables
    scope = _Scope(dict(inputs))
    body = Block(tuple(writer.statements(scope, depth=0)), ())
    bound = tuple(name for name in (*scope.types, *scope.arrays) if name not in inputs)
    if not variables and len(bound) > 1:
        bound = tuple(dict.fromkeys(writer.pick(bound) for _ in range(1 + choose(3))))
    initial = {name: writer.literal(type).value for name, type in variables.items()}
    return Program(inputs, feeds, initial, body, bound)


@dataclass(slots=True)
class _Scope:
    """The names in sight and their types, and the arrays, which can only be fetched."""

    types: dict[str, Type]
    arrays: list[str] = field(default_factory=list)

    def inner(self) -> _Scope:
        return _Scope(dict(self.types))


class _Writer:
    """Writes a program; the first options of every choice are the simplest, because hypothesis shrinks towards them."""

    def __init__(self, choose: Callable[[int], int], types: Sequence[Type]) -> None:
        self.choose = choose
        self.types = types
        self.variables: dict[str, Type] = {}
        self._numbers = itertools.count()

    def pick(self, options: Sequence[T]) -> T:
        return options[self.choose(len(options))]

    def chance(self) -> bool:
        return self.choose(2) == 1

    def fresh(self, stem: str) -> str:
        return f"{stem}{next(self._numbers)}"

    # -- statements ----------------------------------------------------------------------------------------------

    def statements(self, scope: _Scope, depth: int) -> list[Statement]:
        """A few statements, which bind their names in `scope`."""
        return [self.statement(scope, depth) for _ in range(1 + self.choose(4 - depth))]

    def statement(self, scope: _Scope, depth: int) -> Statement:
        kinds: list[Callable[[_Scope, int], Statement]] = [self.let]
        if self.variables:
            kinds += [self.write]
        if depth < 3:
            kinds += [self.branch, self.loop, self.loop]
        return self.pick(kinds)(scope, depth)

    def let(self, scope: _Scope, depth: int) -> Let:
        type = self.pick(self.types)
        value = self.expression(type, scope, 2)
        name = self.fresh("x")
        scope.types[name] = type
        return Let(name, value)

    def write(self, scope: _Scope, depth: int) -> Write:
        variable = self.pick(list(self.variables))
        type = self.variables[variable]
        verb = self.pick(("assign", "assign_add", "assign_sub"))
        operand = type.scalar() if verb != "assign" and self.chance() else type
        value = self.expression(operand, scope, 2)
        name = self.fresh("w")
        scope.types[name] = type
        return Write(name, variable, verb, value)

    def block(self, types: Sequence[Type], scope: _Scope, depth: int) -> Block:
        statements = self.statements(scope, depth)
        return Block(tuple(statements), tuple(self.expression(type, scope, 1) for type in types))

    def branch(self, scope: _Scope, depth: int) -> If:
        types = [self.pick(self.types) for _ in range(1 + self.choose(2))]
        predicate = self.expression(BOOL, scope, 2)
        then, otherwise = (self.block(types, scope.inner(), depth + 1) for _ in range(2))
        names = tuple(self.fresh("c") for _ in types)
        scope.types.update(zip(names, types, strict=True))
        return If(names, predicate, then, otherwise)

    def loop(self, scope: _Scope, depth: int) -> Loop:
        types = [self.pick(self.types) for _ in range(1 + self.choose(3))]
        counter_dtype = self.pick(("int32", "int64"))
        trips = self.expression(Type(self.pick(("int32", "int64")), False), scope, 1)
        initial = tuple(self.expression(type, scope, 1) for type in types)
        counter, inner = self.fresh("i"), tuple(self.fresh("v") for _ in types)
        inside = scope.inner()
        inside.types[counter] = Type(counter_dtype, False)
        inside.types.update(zip(inner, types, strict=True))
        always = Literal(np.True_)
        predicate = self.expression(BOOL, inside, 2) if self.pick((True, False, False)) else always
        scan = self.scan(scope) if self.pick((True, False, False)) else None
        if scan is not None:
            inside.types[scan.element] = scan.type
        body = self.block(types, inside, depth + 1)
        collect = self.collect(inside) if self.chance() else None
        names = tuple(self.fresh("r") for _ in types)
        scope.types.update(zip(names, types, strict=True))
        if collect is not None:
            scope.types[collect.name] = collect.type
            scope.arrays.append(array_name(collect))
        return Loop(
            names=names,
            counter=counter,
            counter_dtype=counter_dtype,
            trips=trips,
            inner=inner,
            initial=initial,
            predicate=predicate,
            body=body,
            form=self.pick(("tuple", "dict", "nested")),
            limit=self.pick((None, None, 0, 1, 2)),
            scan=scan,
            collect=collect,
        )

    def scan(self, scope: _Scope) -> Scan:
        type = self.pick(TYPES).scalar()
        vector = self.expression(Type(type.dtype, True), scope, 1)
        return Scan(vector, type, self.fresh("e"), self.chance())

    def collect(self, scope: _Scope) -> Collect:
        type = self.pick(TYPES[2:])
        when = self.expression(BOOL, scope, 1) if self.chance() else None
        value = self.expression(type, scope, 1)
        return Collect(self.fresh("t"), type, value, when, self.chance())

    # -- expressions ---------------------------------------------------------------------------------------------

    def literal(self, type: Type) -> Literal:
        numbers = _NUMBERS[type.dtype]
        if not type.is_vector:
            return Literal(np.dtype(type.dtype).type(self.pick(numbers)))
        return Literal(np.array([self.pick(numbers) for _ in range(LENGTH)], type.dtype))

    def expression(self, type: Type, scope: _Scope, depth: int) -> Expression:
        if depth == 0 or not self.choose(3):
            return self.leaf(type, scope)
        if type.dtype == "bool":
            return self.condition(type, scope, depth - 1)
        return self.arithmetic(type, scope, depth - 1)

    def leaf(self, type: Type, scope: _Scope) -> Expression:
        names = [name for name, seen in scope.types.items() if seen == type]
        variables = [name for name, seen in self.variables.items() if seen == type]
        options: list[Any] = [Name(name) for name in names[-6:]] + [Read(name) for name in variables]
        options += [Extents()] if type == Type("int64", True) else []
        index = self.choose(len(options) + 1)
        return options[index] if index < len(options) else self.literal(type)

    def condition(self, type: Type, scope: _Scope, depth: int) -> Expression:
        match self.choose(5):
            case 0:
                return Call("logical_not", (self.expression(type, scope, depth),))
            case 1:
                return Call(self.pick(_LOGIC), self.pair(type, ("bool", "bool"), scope, depth))
            case 2 if not type.is_vector:
                return Item(self.expression(Type("bool", True), scope, depth), self.choose(LENGTH))
            case _:
                dtypes = (self.pick(NUMBERS), self.pick(NUMBERS))
                return Call(self.pick(_COMPARISONS), self.pair(type, dtypes, scope, depth))

    def arithmetic(self, type: Type, scope: _Scope, depth: int) -> Expression:
        match self.choose(9):
            case 0:
                return Call(self.pick(_UNARY[type.dtype[0]]), (self.expression(type, scope, depth),))
            case 1:
                number = Literal(self.pick((0, 1, 2, -3, 5)))
                return Call(self.pick(_WEAK_SAFE), (self.expression(type, scope, depth), number))
            case 2:
                source = Type(self.pick(_CASTS[type.dtype]), type.is_vector)
                return Cast(self.expression(source, scope, depth), type.dtype)
            case 3:
                condition = self.expression(Type("bool", type.is_vector and self.chance()), scope, depth)
                first = self.expression(type, scope, depth)
                return Call("where", (condition, first, self.expression(type, scope, depth)))
            case 4 if type.is_vector:
                return Stack(tuple(self.expression(type.scalar(), scope, depth) for _ in range(LENGTH)))
            case 4:
                return Item(self.expression(Type(type.dtype, True), scope, depth), self.choose(LENGTH))
            case 5 if not type.is_vector:
                return Sum(self.expression(Type(type.dtype, True), scope, depth), type.dtype)
            case 6 if type.dtype[0] == "f":
                return Call("divide", self.pair(type, (type.dtype, type.dtype), scope, depth))
            case _:
                return Call(self.pick(_ARITHMETIC), self.pair(type, self.pick(_PAIRS[type.dtype]), scope, depth))

    def pair(self, type: Type, dtypes: tuple[str, str], scope: _Scope, depth: int) -> tuple[Expression, Expression]:
        """Two operands of these dtypes that broadcast to the shape of `type`."""
        scalar = self.choose(4) if type.is_vector else None
        left, right = (
            self.expression(Type(dtype, type.is_vector and place != scalar), scope, depth)
            for place, dtype in enumerate(dtypes)
        )
        return left, right
