"""Random smooth programs for gradients: nested branches and loops whose course depends on the data.

A program is a tree, of which one evaluator makes either NumPy values or a graph: they differ only in the `Machine`.
Every name is bound once, and an expression is built from the type it must have, so every program is valid. Floats come
from smooth operations on bounded values; what decides is an integer, or a float that NumPy tells to be far from the
threshold it is compared with (`Numbers.margin`), so a small step to either side takes the same course.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from hypothesis import strategies as st

import asyncflow as af

T = TypeVar("T")
Value: TypeAlias = Any
"""An array or a tensor."""
Scope: TypeAlias = dict[str, Value]

LENGTH = 4
MAX_TRIPS = 3
"""Of every loop."""
DEEPEST = 3
"""How far branches and loops are nested."""

SCALAR, VECTOR, MATRIX = (), (LENGTH,), (LENGTH, LENGTH)
GROWN = (None,)
"""A vector that may get longer from iteration to iteration."""
INTEGER = "int64"
"""A scalar that counts."""
Type: TypeAlias = "tuple[int | None, ...] | str"

TYPES: tuple[Type, ...] = (SCALAR, VECTOR, VECTOR, MATRIX, GROWN, INTEGER)


# -- operations ------------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[..., Value]] = {
    "sin": lambda m, x: m.sin(x),
    "tanh": lambda m, x: m.tanh(x),
    "add": lambda m, x, y: m.add(x, y),
    "subtract": lambda m, x, y: m.subtract(x, y),
    "multiply": lambda m, x, y: m.multiply(x, y),
    "half": lambda m, x: m.multiply(x, 0.5),
    "total": lambda m, x: m.sum(x),
    "outer": lambda m, x, y: m.multiply(m.expand_dims(x, axis=1), y),
    "matmul": lambda m, x, y: m.matmul(x, y),
    "transpose": lambda m, x: m.permute_dims(x, (1, 0)),
    "fill": lambda m, x: m.broadcast_to(x, (LENGTH,)),
    "stack": lambda m, *xs: m.stack(xs),
    "first": lambda m, x: x[0],
    "reversed": lambda m, x: x[::-1],
    "column": lambda m, x: x[:, 1],
    "at": lambda m, x, index: x[m.remainder(index, LENGTH)],
    "back": lambda m, x, index: x[m.remainder(index, LENGTH) - LENGTH],
    "shuffle": lambda m, x, index: m.take(x, _numbers(m, index), axis=0),
    "row": lambda m, x, index: m.sum(m.take(x, m.remainder(m.stack([index]), LENGTH), axis=0), axis=0),
    "weigh": lambda m, x, n: m.multiply(m.multiply(x, 0.25), m.astype(n, m.float64)),
    "join": lambda m, x, y: m.concat([x, y]),
    "tail": lambda m, x: x[1:],
    "float": lambda m, n: m.multiply(m.astype(n, m.float64), 0.25),
    "next": lambda m, n: m.remainder(m.add(m.multiply(n, 3), 1), 5),
    "sum": lambda m, n, k: m.remainder(m.add(n, k), 7),
    "length": lambda m, x: m.astype(m.sum(m.astype(m.equal(x, x), m.int64)), m.int64),
}
"""From a namespace (NumPy's or asyncflow's) and values to a value."""


def _numbers(m: Any, index: Value) -> Value:
    """Of elements, one of them twice."""
    return m.remainder(m.stack([index, index + 1, index + 3, index]), LENGTH)


@dataclass(frozen=True, slots=True)
class Literal:
    value: Any


@dataclass(frozen=True, slots=True)
class Name:
    name: str


@dataclass(frozen=True, slots=True)
class Read:
    """The value of a variable."""

    variable: str


@dataclass(frozen=True, slots=True)
class Call:
    operation: str
    operands: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Odd:
    """Whether an integer is."""

    number: Expression


@dataclass(frozen=True, slots=True)
class Below:
    """Whether a float is less than a threshold."""

    value: Expression
    threshold: float


Expression: TypeAlias = Literal | Name | Read | Call
Predicate: TypeAlias = Odd | Below


# -- statements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Let:
    name: str
    value: Expression


@dataclass(frozen=True, slots=True)
class Block:
    statements: tuple[Statement, ...]
    results: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class If:
    names: tuple[str, ...]
    predicate: Predicate
    then: Block
    otherwise: Block


@dataclass(frozen=True, slots=True)
class Loop:
    """``while counter < trips % (MAX_TRIPS + 1) and goes_on: counter, inner = counter + 1, body``.

    Attributes:
        counter: its name inside; it counts from `start`.
        start: of the counter.
        dtype: of the counter.
        types: of the loop variables.
        goes_on: None for as many iterations as `trips` says.
    """

    names: tuple[str, ...]
    counter: str
    start: int
    dtype: str
    trips: Expression
    inner: tuple[str, ...]
    types: tuple[Type, ...]
    initial: tuple[Expression, ...]
    goes_on: Predicate | None
    body: Block
    parallel_iterations: int


Statement: TypeAlias = Let | If | Loop


@dataclass(frozen=True, slots=True)
class Program:
    """Gives one float scalar, the sum of all that its outermost block binds.

    Attributes:
        inputs: the values of what is fed.
        variables: the values of the variables.
        types: of what the outermost block binds.
    """

    inputs: Mapping[str, Any]
    variables: Mapping[str, Any]
    body: Block
    types: Mapping[str, Type]


# -- meaning ---------------------------------------------------------------------------------------------------------


class Machine(Protocol):
    """What makes values of a program."""

    @property
    def namespace(self) -> Any:
        """With the functions of the Array API standard."""
        ...

    def read(self, variable: str) -> Value:
        """The value of a variable."""
        ...

    def below(self, value: Value, threshold: float) -> Value:
        """Whether it is less."""
        ...

    def branch(self, predicate: Value, then: Callable[[], list[Value]], otherwise: Callable[[], list[Value]]) -> Any:
        """The values that one of the two gives."""
        ...

    def repeat(
        self, loop: Loop, trips: Value, goes_on: Callable[..., Value], body: Callable[..., Any], initial: list[Value]
    ) -> Any:
        """The last values of the variables of a loop, without the counter."""
        ...


class Numbers:
    """Computes with NumPy.

    Attributes:
        margin: how far the nearest float was from the threshold it was compared with.
    """

    namespace = np

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self.variables = variables
        self.margin = np.inf

    def read(self, variable: str) -> Value:
        return self.variables[variable]

    def below(self, value: Value, threshold: float) -> Value:
        self.margin = min(self.margin, abs(float(value) - threshold))
        return value < threshold

    def branch(self, predicate: Value, then: Callable[[], list[Value]], otherwise: Callable[[], list[Value]]) -> Any:
        return then() if predicate else otherwise()

    def repeat(
        self, loop: Loop, trips: Value, goes_on: Callable[..., Value], body: Callable[..., Any], initial: list[Value]
    ) -> Any:
        values = initial
        for count in range(int(trips)):
            counter = np.dtype(loop.dtype).type(count + loop.start)
            if not goes_on(counter, *values):
                break
            values = body(counter, *values)
        return values


class Graph:
    """Builds nodes of the current graph."""

    namespace = af

    def __init__(self, variables: Mapping[str, af.Variable]) -> None:
        self.variables = variables

    def read(self, variable: str) -> Value:
        return self.variables[variable].read()

    def below(self, value: Value, threshold: float) -> Value:
        return af.less(value, threshold)

    def branch(self, predicate: Value, then: Callable[[], list[Value]], otherwise: Callable[[], list[Value]]) -> Any:
        return af.cond(predicate, then, otherwise)

    def repeat(
        self, loop: Loop, trips: Value, goes_on: Callable[..., Value], body: Callable[..., Any], initial: list[Value]
    ) -> Any:
        end = af.astype(trips + loop.start, loop.dtype)
        _, *values = af.while_loop(
            lambda count, *inner: af.logical_and(af.less(count, end), goes_on(count, *inner)),
            lambda count, *inner: (count + 1, *body(count, *inner)),
            (af.constant(loop.start, loop.dtype), *initial),
            shape_invariants=((), *(() if kind == INTEGER else kind for kind in loop.types)),
            parallel_iterations=loop.parallel_iterations,
        )
        return values


def evaluate(program: Program, machine: Machine, inputs: Mapping[str, Value]) -> Value:
    """The scalar that a program gives for these inputs, in the values of `machine`."""
    scope = dict(inputs)
    evaluator = _Evaluator(machine)
    evaluator.block(program.body, scope)
    m = machine.namespace
    total = m.astype(m.asarray(0.0), m.float64)
    for place, (name, kind) in enumerate(program.types.items()):
        value = m.astype(scope[name], m.float64) if kind == INTEGER else scope[name]
        total = total + (0.5 + 0.3 * place) * m.sum(m.sin(value))
    return total


class _Evaluator:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def block(self, block: Block, scope: Scope) -> list[Value]:
        """Evaluates the statements, which bind their names in `scope`, and the results."""
        for statement in block.statements:
            match statement:
                case Let(name, value):
                    scope[name] = self.value(value, scope)
                case If(names, predicate, then, otherwise):
                    found = self.machine.branch(
                        self.decision(predicate, scope),
                        lambda then=then: self.block(then, dict(scope)),
                        lambda otherwise=otherwise: self.block(otherwise, dict(scope)),
                    )
                    scope.update(zip(names, found, strict=True))
                case Loop():
                    scope.update(zip(statement.names, self.loop(statement, scope), strict=True))
        return [self.value(result, scope) for result in block.results]

    def loop(self, loop: Loop, scope: Scope) -> Any:
        m = self.machine.namespace

        def inner_scope(count: Value, values: Sequence[Value]) -> Scope:
            counted = m.astype(count, m.int64)
            return {**scope, loop.counter: counted, **dict(zip(loop.inner, values, strict=True))}

        def goes_on(count: Value, *values: Value) -> Value:
            return True if loop.goes_on is None else self.decision(loop.goes_on, inner_scope(count, values))

        def body(count: Value, *values: Value) -> list[Value]:
            return self.block(loop.body, inner_scope(count, values))

        trips = m.remainder(self.value(loop.trips, scope), MAX_TRIPS + 1)
        return self.machine.repeat(loop, trips, goes_on, body, [self.value(x, scope) for x in loop.initial])

    def decision(self, predicate: Predicate, scope: Scope) -> Value:
        if isinstance(predicate, Below):
            return self.machine.below(self.value(predicate.value, scope), predicate.threshold)
        m = self.machine.namespace
        return m.equal(m.remainder(self.value(predicate.number, scope), 2), 1)

    def value(self, expression: Expression, scope: Scope) -> Value:
        match expression:
            case Literal(value):
                return self.machine.namespace.asarray(value)
            case Name(name):
                return scope[name]
            case Read(variable):
                return self.machine.read(variable)
            case Call(operation, operands):
                return OPERATIONS[operation](
                    self.machine.namespace, *(self.value(operand, scope) for operand in operands)
                )


# -- writing programs ------------------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A random program."""
    return write_program(lambda count: draw(st.integers(0, count - 1)))


def write_program(choose: Callable[[int], int]) -> Program:
    """A program, by the decisions of `choose`, which gives a number from 0 up to its argument, exclusive."""
    writer = _Writer(choose)
    kinds: list[Type] = [writer.pick((SCALAR, VECTOR, MATRIX)) for _ in range(1 + choose(3))]
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
"""What gives a value of a type, besides what every float has."""


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
        return self.pick((self.loop, self.loop, self.branch))(scope, depth)

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
                case 1 | 2 if kind != GROWN:
                    operands = self.expression(kind, scope, depth - 1), self.expression(kind, scope, depth - 1)
                    return Call(self.pick(("multiply", "add", "subtract")), operands)
                case _:
                    pass
        operation, kinds = self.pick(_SAME[kind])
        return Call(operation, tuple(self.expression(each, scope, depth - 1) for each in kinds))

    def leaf(self, kind: Type, scope: Mapping[str, Type]) -> Expression:
        options: list[Expression] = [Name(name) for name, seen in scope.items() if seen == kind][::-1]
        options += [Read(name) for name, seen in self.variables.items() if seen == kind]
        place = self.choose(len(options) + (1 if len(options) < 3 else 0))
        return options[place] if place < len(options) else Literal(self.number(kind))
