"""Builds the programs of `tests.property.programs` as graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

import asyncflow as af
from tests.property.programs import (
    EXTENTS,
    MAX_TRIPS,
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
    Stack,
    Statement,
    Sum,
    Write,
    array_name,
)


class Built(NamedTuple):
    """A program as a graph: what to run, and what to feed."""

    graph: af.Graph
    fetches: dict[str, af.Tensor]
    feeds: dict[af.Tensor, Any]


def build(program: Program, parallel_iterations: int, where: Callable[[], str | None] = lambda: None) -> Built:
    """The graph of `program`, whose loops overlap up to `parallel_iterations` iterations.

    Each statement asks for the device that ``where()`` names, if any; statements in a branch or loop ask anew.
    """
    with af.Graph() as graph:
        variables = {name: af.Variable(value, name=name) for name, value in program.variables.items()}
        scope = {name: af.placeholder(type.dtype, type.shape, name=name) for name, type in program.inputs.items()}
        feeds = {scope[name]: value for name, value in program.feeds.items()}
        array = af.placeholder("float32", (None,) * len(EXTENTS), name="array")
        feeds[array] = np.zeros(EXTENTS, np.float32)
        _Builder(variables, array, parallel_iterations, where).block(program.body, scope)
    return Built(graph, {name: scope[name] for name in program.fetches}, feeds)


class _Builder:
    def __init__(
        self,
        variables: Mapping[str, af.Variable],
        array: af.Tensor,
        parallel_iterations: int,
        where: Callable[[], str | None],
    ) -> None:
        self.variables = variables
        self.array = array
        self.parallel_iterations = parallel_iterations
        self.where = where

    def block(self, block: Block, scope: dict[str, Any]) -> list[Any]:
        for statement in block.statements:
            with af.device(self.where()):
                self.statement(statement, scope)
        return [self.value(result, scope) for result in block.results]

    def statement(self, statement: Statement, scope: dict[str, Any]) -> None:
        match statement:
            case Let(name, value):
                scope[name] = af.asarray(self.value(value, scope))
            case Write(name, variable, verb, value):
                operand = self.value(value, scope)
                with af.device(None):  # all that touches a variable is in one place
                    scope[name] = getattr(self.variables[variable], verb)(operand)
            case If():
                self.branch(statement, scope)
            case Loop():
                self.loop(statement, scope)

    def branch(self, branch: If, scope: dict[str, Any]) -> None:
        results = af.cond(
            self.value(branch.predicate, scope),
            lambda: self.block(branch.then, dict(scope)),
            lambda: self.block(branch.otherwise, dict(scope)),
        )
        scope.update(zip(branch.names, results, strict=True))

    def loop(self, loop: Loop, scope: dict[str, Any]) -> None:
        trips = af.astype(af.remainder(self.value(loop.trips, scope), MAX_TRIPS + 1), loop.counter_dtype)
        initial = [self.value(value, scope) for value in loop.initial]
        source = self.source(loop, scope)
        array = self.empty_array(loop.collect, trips)

        def inner_scope(count: af.Tensor, carried: Any) -> dict[str, Any]:
            return {**scope, loop.counter: count, **dict(zip(loop.inner, _unpack(loop.form, carried), strict=True))}

        def goes_on(count: af.Tensor, carried: Any, *_: Any) -> af.Tensor:
            return af.logical_and(af.less(count, trips), self.value(loop.predicate, inner_scope(count, carried)))

        def body(count: af.Tensor, carried: Any, *arrays: af.TensorArray) -> tuple[Any, ...]:
            inner = inner_scope(count, carried)
            if loop.scan is not None and source is not None:
                inner[loop.scan.element] = source.read(count)
            values = self.block(loop.body, inner)
            grown = [self.collected(loop.collect, arrays[0], count, inner)] if loop.collect is not None else []
            return (count + 1, _pack(loop.form, values), *grown)

        _, carried, *arrays = af.while_loop(
            goes_on,
            body,
            (af.constant(0, loop.counter_dtype), _pack(loop.form, initial), *array),
            parallel_iterations=self.parallel_iterations,
            maximum_iterations=loop.limit,
        )
        scope.update(zip(loop.names, _unpack(loop.form, carried), strict=True))
        if loop.collect is not None:
            rows = scope[array_name(loop.collect)] = arrays[0].stack()
            scope[loop.collect.name] = af.sum(rows, axis=0, dtype=loop.collect.type.dtype)

    def source(self, loop: Loop, scope: dict[str, Any]) -> af.TensorArray | None:
        if loop.scan is None:
            return None
        vector = self.value(loop.scan.vector, scope)
        array = af.TensorArray(loop.scan.type.dtype, size=MAX_TRIPS, clear_after_read=loop.scan.clear_after_read)
        return array.unstack(vector)

    def empty_array(self, collect: Collect | None, trips: af.Tensor) -> list[af.TensorArray]:
        if collect is None:
            return []
        size = 0 if collect.is_dynamic else trips
        return [
            af.TensorArray(collect.type.dtype, size, dynamic_size=collect.is_dynamic, element_shape=collect.type.shape)
        ]

    def collected(
        self, collect: Collect, array: af.TensorArray, count: af.Tensor, scope: dict[str, Any]
    ) -> af.TensorArray:
        if collect.when is None:
            return array.write(count, self.value(collect.value, scope))
        return af.cond(
            self.value(collect.when, scope),
            lambda: array.write(count, self.value(collect.value, scope)),
            lambda: array,
        )

    def value(self, expression: Expression, scope: Mapping[str, Any]) -> Any:
        match expression:
            case Literal(value):
                return value
            case Name(name):
                return scope[name]
            case Call(operation, operands):
                return getattr(af, operation)(*(self.value(operand, scope) for operand in operands))
            case Cast(operand, dtype):
                return af.astype(self.value(operand, scope), dtype)
            case Item(vector, index):
                return af.asarray(self.value(vector, scope))[index]
            case Sum(vector, dtype):
                return af.sum(self.value(vector, scope), dtype=dtype)
            case Stack(elements):
                return af.stack([self.value(element, scope) for element in elements])
            case Read(variable):
                with af.device(None):
                    return self.variables[variable].read()
            case Extents():
                return af.shape(self.array)


def _pack(form: str, values: list[Any]) -> Any:
    match form:
        case "dict":
            return {f"v{index}": value for index, value in enumerate(values)}
        case "nested":
            return {"first": values[0], "rest": tuple(values[1:])}
        case _:
            return tuple(values)


def _unpack(form: str, carried: Any) -> list[Any]:
    match form:
        case "dict":
            return list(carried.values())
        case "nested":
            return [carried["first"], *carried["rest"]]
        case _:
            return list(carried)
