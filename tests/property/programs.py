"""Random typed programs, and their meaning in plain Python and NumPy.

A program is a tree: a block of statements over expressions. Every name is bound once, so a block may use any name of
the blocks around it. Expressions are built from their required type, so every program is valid. `interpret` runs
a program with NumPy, `tests.property.graphs` builds the same program as a graph.

Left out because NumPy itself does not define their bits: conversions of floats to integers.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

LENGTH = 3
"""Of every vector."""
MAX_TRIPS = 3
"""Of every loop."""
EXTENTS = (2, 3, 5)
"""Of an array that is fed to every program; it has as many axes as a vector has elements."""

Value: TypeAlias = Any
"""A NumPy scalar or a vector."""


@dataclass(frozen=True, slots=True)
class Type:
    """Of a value: a scalar, or a vector of `LENGTH` elements."""

    dtype: str
    is_vector: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (LENGTH,) if self.is_vector else ()

    def scalar(self) -> Type:
        return Type(self.dtype, False)


# -- expressions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant; a Python number has no dtype of its own and takes the other operand's."""

    value: Value


@dataclass(frozen=True, slots=True)
class Name:
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """An operation of `OPERATIONS` on expressions."""

    operation: str
    operands: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Cast:
    operand: Expression
    dtype: str


@dataclass(frozen=True, slots=True)
class Item:
    vector: Expression
    index: int


@dataclass(frozen=True, slots=True)
class Sum:
    """Of a vector's elements, in the vector's own dtype."""

    vector: Expression
    dtype: str


@dataclass(frozen=True, slots=True)
class Stack:
    elements: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """The value of a variable at this moment."""

    variable: str


@dataclass(frozen=True, slots=True)
class Extents:
    """The shape of the array that is fed to every program, which is not known before the run."""


Expression: TypeAlias = Literal | Name | Call | Cast | Item | Sum | Stack | Read | Extents

OPERATIONS: dict[str, Callable[..., Value]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.true_divide,
    "floor_divide": np.floor_divide,
    "remainder": np.remainder,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "negative": np.negative,
    "abs": np.absolute,
    "square": np.square,
    "sqrt": np.sqrt,
    "floor": np.floor,
    "less": np.less,
    "less_equal": np.less_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "logical_not": np.logical_not,
    "where": np.where,
}
"""By their Array API names, which are asyncflow's."""


# -- statements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Let:
    name: str
    value: Expression


@dataclass(frozen=True, slots=True)
class Write:
    """Changes a variable (`verb`: assign, assign_add, assign_sub) and binds its new value."""

    name: str
    variable: str
    verb: str
    value: Expression


@dataclass(frozen=True, slots=True)
class Block:
    statements: tuple[Statement, ...]
    results: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class If:
    """Binds `names` to the results of the branch that `predicate` chooses."""

    names: tuple[str, ...]
    predicate: Expression
    then: Block
    otherwise: Block


@dataclass(frozen=True, slots=True)
class Collect:
    """A value an iteration, written to an array in the iterations where `when` holds (None: in all)."""

    name: str
    type: Type
    value: Expression
    when: Expression | None
    is_dynamic: bool


@dataclass(frozen=True, slots=True)
class Scan:
    """A vector that a loop reads through an array, element by element, as `element`."""

    vector: Expression
    type: Type
    element: str
    clear_after_read: bool


@dataclass(frozen=True, slots=True)
class Loop:
    """``while counter < trips and predicate: counter, variables = counter + 1, body``.

    Binds `names` to the last values of the variables, and `collect`'s names to the array and its sum.

    Attributes:
        counter: name of the counter inside.
        trips: an integer, whose remainder modulo `MAX_TRIPS` + 1 bounds the iterations.
        inner: names of the variables inside.
        form: how the loop carries its variables: ``tuple``, ``dict`` or ``nested``.
        limit: `maximum_iterations`, or None.
    """

    names: tuple[str, ...]
    counter: str
    counter_dtype: str
    trips: Expression
    inner: tuple[str, ...]
    initial: tuple[Expression, ...]
    predicate: Expression
    body: Block
    form: str
    limit: int | None
    scan: Scan | None
    collect: Collect | None


Statement: TypeAlias = Let | Write | If | Loop


@dataclass(frozen=True, slots=True)
class Program:
    """A block whose inputs are fed.

    Attributes:
        inputs: types of the fed values.
        feeds: their values.
        variables: initial values of the variables.
        fetches: names of the outermost block to return. With variables, all of them: a fetch runs only nodes that it
            needs, and other assignments would not run.
    """

    inputs: Mapping[str, Type]
    feeds: Mapping[str, Value]
    variables: Mapping[str, Value]
    body: Block
    fetches: tuple[str, ...]


# -- meaning ---------------------------------------------------------------------------------------------------------


def interpret(program: Program, state: dict[str, Value]) -> dict[str, Value]:
    """Return the results of a run, computed with NumPy. Changes `state`, the values of the variables."""
    with np.errstate(all="ignore"):
        scope = dict(program.feeds)
        _Interpreter(state).block(program.body, scope)
    return {name: scope[name] for name in program.fetches}


class _Interpreter:
    def __init__(self, state: dict[str, Value]) -> None:
        self.state = state

    def block(self, block: Block, scope: dict[str, Value]) -> list[Value]:
        """Runs the statements, which bind their names in `scope`, and evaluates the results."""
        for statement in block.statements:
            match statement:
                case Let(name, value):
                    scope[name] = self.value(value, scope)
                case Write():
                    self.write(statement, scope)
                case If(names, predicate, then, otherwise):
                    chosen = then if self.value(predicate, scope) else otherwise
                    scope.update(zip(names, self.block(chosen, dict(scope)), strict=True))
                case Loop():
                    self.loop(statement, scope)
        return [self.value(result, scope) for result in block.results]

    def write(self, write: Write, scope: dict[str, Value]) -> None:
        value = self.value(write.value, scope)
        old = self.state[write.variable]
        combine = {"assign_add": np.add, "assign_sub": np.subtract}.get(write.verb)
        new = value if combine is None else combine(old, value)
        self.state[write.variable] = scope[write.name] = new

    def loop(self, loop: Loop, scope: dict[str, Value]) -> None:
        trips = int(np.remainder(self.value(loop.trips, scope), MAX_TRIPS + 1))
        values = [self.value(initial, scope) for initial in loop.initial]
        elements = None if loop.scan is None else self.value(loop.scan.vector, scope)
        collected: dict[int, Value] = {}
        for count in itertools.count():
            if count == loop.limit:
                break
            inner = dict(scope)
            inner[loop.counter] = np.dtype(loop.counter_dtype).type(count)
            inner.update(zip(loop.inner, values, strict=True))
            # Both sides are evaluated, as in a graph.
            if not operator.and_(count < trips, bool(self.value(loop.predicate, inner))):
                break
            if loop.scan is not None and elements is not None:
                inner[loop.scan.element] = elements[count]
            values = self.block(loop.body, inner)
            if loop.collect is not None and (loop.collect.when is None or self.value(loop.collect.when, inner)):
                collected[count] = self.value(loop.collect.value, inner)
        scope.update(zip(loop.names, values, strict=True))
        if loop.collect is not None:
            self.bind_collected(loop.collect, trips, collected, scope)

    def bind_collected(
        self, collect: Collect, trips: int, collected: Mapping[int, Value], scope: dict[str, Value]
    ) -> None:
        size = max(collected, default=-1) + 1 if collect.is_dynamic else trips
        rows = np.zeros((size, *collect.type.shape), collect.type.dtype)
        for index, value in collected.items():
            rows[index] = value
        scope[array_name(collect)] = rows
        scope[collect.name] = np.sum(rows, axis=0, dtype=collect.type.dtype)

    def value(self, expression: Expression, scope: Mapping[str, Value]) -> Value:
        match expression:
            case Literal(value):
                return value
            case Name(name):
                return scope[name]
            case Call(operation, operands):
                result = OPERATIONS[operation](*(self.value(operand, scope) for operand in operands))
                return result[()]  # `np.where` gives 0-d arrays
            case Cast(operand, dtype):
                return self.value(operand, scope).astype(dtype)
            case Item(vector, index):
                return self.value(vector, scope)[index]
            case Sum(vector, dtype):
                return np.sum(self.value(vector, scope), dtype=dtype)
            case Stack(elements):
                return np.stack([self.value(element, scope) for element in elements])
            case Read(variable):
                return self.state[variable]
            case Extents():
                return np.array(EXTENTS)


def array_name(collect: Collect) -> str:
    """Name under which the whole array is bound."""
    return f"{collect.name}_array"
