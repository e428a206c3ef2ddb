"""Random smooth programs for gradients: nested branches and loops whose course depends on the data.

A program is a tree. One evaluator makes either NumPy values or a graph of it: they differ only in the `Machine`.
Every name is bound once, and an expression is built from its required type, so every program is valid. Floats come
from smooth operations on bounded values. Branches depend on an integer, or on a float far from the
threshold (`Numbers.margin`). So a small step to either side takes the same course.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

import asyncflow as af

Value: TypeAlias = Any
"""An array or a tensor."""
Scope: TypeAlias = dict[str, Value]

LENGTH = 4
MAX_TRIPS = 3
"""Of every loop."""
DEEPEST = 3
"""Deepest nesting of branches and loops."""

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
    """A condition: True if an integer is odd."""

    number: Expression


@dataclass(frozen=True, slots=True)
class Below:
    """A condition: True if a float is less than a threshold."""

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
    """A program with one float scalar as result, the sum of all values that its outermost block binds.

    Attributes:
        inputs: values of the inputs.
        variables: values of the variables.
        types: types of the names that the outermost block binds.
    """

    inputs: Mapping[str, Any]
    variables: Mapping[str, Any]
    body: Block
    types: Mapping[str, Type]


# -- meaning ---------------------------------------------------------------------------------------------------------


class Machine(Protocol):
    """An interpreter of programs: it computes with NumPy or builds a graph."""

    @property
    def namespace(self) -> Any:
        """With the functions of the Array API standard."""
        ...

    def read(self, variable: str) -> Value:
        """The value of a variable."""
        ...

    def below(self, value: Value, threshold: float) -> Value:
        """Return True if a value is less than a threshold."""
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
                        partial(self.block, then, dict(scope)),
                        partial(self.block, otherwise, dict(scope)),
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
