"""The hypothesis strategy behind `tests.autodiff.programs`: `programs()` draws a valid random program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st

from tests.autodiff.programs import (
    DEEPEST,
    GROWN,
    INTEGER,
    LENGTH,
    MATRIX,
    SCALAR,
    TYPES,
    VECTOR,
    Below,
    Block,
    Call,
    Expression,
    If,
    Let,
    Literal,
    Loop,
    Name,
    Odd,
    Predicate,
    Program,
    Read,
    Statement,
    Type,
)

T = TypeVar("T")


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A random program."""
    return write_program(lambda count: draw(st.integers(0, count - 1)))


def write_program(choose: Callable[[int], int]) -> Program:
    """A program, by the decisions of `choose`, which gives a number from 0 up to its argument, exclusive."""
    writer = _Writer(choose)
    kinds: list[Type] = [writer.pick((VECTOR, MATRIX, SCALAR)) for _ in range(1 + choose(3))]
    inputs = {f"input{place}": writer.number(kind) for place, kind in enumerate(kinds)}
    variables: dict[str, Type] = {f"variable{place}": writer.pick((SCALAR, VECTOR)) for place in range(choose(3))}
    writer.variables = variables
    scope = dict(zip(inputs, kinds, strict=True))
    before = set(scope)
    statements = [writer.structured(scope, 0)]
    statements += [writer.statement(scope, 0) for _ in range(choose(2))]
    bound = {name: kind for name, kind in scope.items() if name not in before}
    state = {name: writer.number(kind) for name, kind in variables.items()}
    return Program(inputs, state, Block(tuple(statements), ()), bound)


_SAME: dict[Type, tuple[tuple[str, tuple[Type, ...]], ...]] = {
    SCALAR: (
        ("total", (VECTOR,)),
        ("total", (MATRIX,)),
        ("total", (GROWN,)),
        ("first", (VECTOR,)),
        ("at", (VECTOR, INTEGER)),
        ("matmul", (VECTOR, VECTOR)),
        ("float", (INTEGER,)),
        ("weigh", (SCALAR, INTEGER)),
        ("back", (VECTOR, INTEGER)),
    ),
    VECTOR: (
        ("multiply", (SCALAR, VECTOR)),
        ("add", (VECTOR, SCALAR)),
        ("fill", (SCALAR,)),
        ("stack", (SCALAR,) * LENGTH),
        ("reversed", (VECTOR,)),
        ("shuffle", (VECTOR, INTEGER)),
        ("row", (MATRIX, INTEGER)),
        ("weigh", (VECTOR, INTEGER)),
        ("back", (MATRIX, INTEGER)),
        ("matmul", (MATRIX, VECTOR)),
        ("column", (MATRIX,)),
        ("at", (MATRIX, INTEGER)),
    ),
    MATRIX: (
        ("multiply", (MATRIX, SCALAR)),
        ("add", (MATRIX, VECTOR)),
        ("outer", (VECTOR, VECTOR)),
        ("matmul", (MATRIX, MATRIX)),
        ("transpose", (MATRIX,)),
        ("shuffle", (MATRIX, INTEGER)),
    ),
    GROWN: (("multiply", (SCALAR, GROWN)), ("join", (GROWN, VECTOR)), ("join", (VECTOR, GROWN)), ("tail", (GROWN,))),
    INTEGER: (("sum", (INTEGER, INTEGER)), ("next", (INTEGER,)), ("length", (GROWN,))),
}
"""Operations for each result type, beside the operations that every float has."""

_NUMBERED: dict[Type, tuple[tuple[str, Type], ...]] = {
    SCALAR: (("at", VECTOR), ("back", VECTOR), ("weigh", SCALAR)),
    VECTOR: (("at", MATRIX), ("row", MATRIX), ("back", MATRIX), ("weigh", VECTOR)),
}
"""Operations that take another type and an integer, by result type: the integer is often the number of the iteration.
"""


@dataclass(slots=True)
class _Writer:
    """Writes a program; the first options of every choice are the simplest, because hypothesis shrinks towards them."""

    choose: Callable[[int], int]
    variables: dict[str, Type] = field(default_factory=dict)
    _names: Any = field(default_factory=itertools.count)

    def pick(self, options: Sequence[T]) -> T:
        return options[self.choose(len(options))]

    def fresh(self, stem: str) -> str:
        return f"{stem}{next(self._names)}"

    # -- statements ----------------------------------------------------------------------------------------------

    def statement(self, scope: dict[str, Type], depth: int) -> Statement:
        if depth < DEEPEST and self.choose(2):
            return self.structured(scope, depth)
        kind = self.pick(TYPES)
        value = self.expression(kind, scope, 2)
        name = self.fresh("x")
        scope[name] = kind
        return Let(name, value)

    def structured(self, scope: dict[str, Type], depth: int) -> Statement:
        kinds: list[Callable[[dict[str, Type], int], Statement]] = [self.loop, self.loop, self.branch]
        return self.pick(kinds)(scope, depth)

    def block(self, kinds: Sequence[Type], scope: dict[str, Type], depth: int, same: Sequence[str] = ()) -> Block:
        """A block whose results have these types; a result may be the variable of `same` at its place, as it is."""
        statements = tuple(self.statement(scope, depth) for _ in range(1 + self.choose(2)))
        results = [self.expression(kind, scope, 2) for kind in kinds]
        for place, name in enumerate(same):
            if not self.choose(6):
                results[place] = Name(name)
        return Block(statements, tuple(results))

    def branch(self, scope: dict[str, Type], depth: int) -> If:
        kinds = [self.pick(TYPES) for _ in range(1 + self.choose(2))]
        predicate = self.predicate(scope)
        then, otherwise = (self.block(kinds, dict(scope), depth + 1) for _ in range(2))
        names = tuple(self.fresh("c") for _ in kinds)
        scope.update(zip(names, kinds, strict=True))
        return If(names, predicate, then, otherwise)

    def loop(self, scope: dict[str, Type], depth: int) -> Loop:
        kinds = tuple(self.pick(TYPES) for _ in range(1 + self.choose(3)))
        trips = self.expression(INTEGER, scope, 1) if self.choose(2) else Literal(self.pick((2, 1, 3, 0)))
        initial = tuple(self.expression(kind, scope, 1) for kind in kinds)
        counter, inner = self.fresh("i"), tuple(self.fresh("v") for _ in kinds)
        inside: dict[str, Type] = {**scope, counter: INTEGER, **dict(zip(inner, kinds, strict=True))}
        goes_on = None if self.choose(2) else self.predicate(inside)
        body = self.block(kinds, inside, depth + 1, inner)
        names = tuple(self.fresh("r") for _ in kinds)
        scope.update(zip(names, kinds, strict=True))
        return Loop(
            names=names,
            counter=counter,
            start=self.pick((0, 2)),
            dtype=self.pick(("int64", "int32")),
            trips=trips,
            inner=inner,
            types=kinds,
            initial=initial,
            goes_on=goes_on,
            body=body,
            parallel_iterations=self.pick((32, 1, 2)),
        )

    def predicate(self, scope: dict[str, Type]) -> Predicate:
        if self.choose(2):
            return Odd(self.expression(INTEGER, scope, 1))
        return Below(self.expression(SCALAR, scope, 1), self.pick((0.1, 0.7, -0.3)))

    # -- expressions ---------------------------------------------------------------------------------------------

    def number(self, kind: Type) -> Any:
        if kind == INTEGER:
            return np.int64(self.choose(4))
        shape = (2,) if kind == GROWN else kind
        chosen = [0.1 * self.choose(19) - 0.87 for _ in range(int(np.prod(shape)))]  # type: ignore[arg-type]
        return np.array(chosen).reshape(shape)[()]  # type: ignore[arg-type]

    def expression(self, kind: Type, scope: Mapping[str, Type], depth: int) -> Expression:
        if depth == 0 or not self.choose(3):
            return self.leaf(kind, scope)
        if kind != INTEGER:
            match self.choose(6):
                case 0:
                    return Call(self.pick(("sin", "tanh", "half")), (self.expression(kind, scope, depth - 1),))
                case 1 if kind in _NUMBERED:
                    operation, x = self.pick(_NUMBERED[kind])
                    return Call(operation, (self.leaf(x, scope), self.leaf(INTEGER, scope)))
                case 2 | 3 if kind != GROWN:
                    operands = self.expression(kind, scope, depth - 1), self.expression(kind, scope, depth - 1)
                    return Call(self.pick(("multiply", "add", "subtract")), operands)
                case _:
                    pass
        operation, kinds = self.pick(_SAME[kind])
        return Call(operation, tuple(self.expression(each, scope, depth - 1) for each in kinds))

    def leaf(self, kind: Type, scope: Mapping[str, Type]) -> Expression:
        names = [name for name, seen in scope.items() if seen == kind]
        options: list[Expression] = [Name(name) for name in reversed(names)]
        options += [Read(name) for name, seen in self.variables.items() if seen == kind]
        place = self.choose(len(options) + (1 if len(options) < 3 else 0))
        return options[place] if place < len(options) else Literal(self.number(kind))
