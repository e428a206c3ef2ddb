"""Machines for random programs over large arrays: NumPy, which defines their meaning, and a graph.

The functions of `tests.property.large` call `xp`. NumPy and asyncflow both have its functions under their Array API
names. Where the two differ, they call methods of this module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import asyncflow as af


class Machine(ABC):
    """Runs the steps of a program as they are written, or writes them down in a graph."""

    xp: Any

    @abstractmethod
    def cond(self, predicate: Any, then: Callable[[], list[Any]], otherwise: Callable[[], list[Any]]) -> list[Any]:
        """The results of one of two branches."""

    @abstractmethod
    def switch(self, index: Any, branches: Sequence[Callable[[], list[Any]]]) -> list[Any]:
        """The results of ``branches[index]``; past the end, of the last."""

    @abstractmethod
    def loop(self, trips: Any, body: Callable[..., list[Any]], initial: Sequence[Any]) -> list[Any]:
        """``body(i, *variables)`` for each ``i < trips``."""

    @abstractmethod
    def rows(self, dtype: str, shape: tuple[int, ...], size: Any = None) -> Any:
        """A TensorArray without elements, which may be read again and again; it grows where no size is given."""

    @abstractmethod
    def read(self, variable: str) -> Any:
        """The value of a variable at this moment."""

    @abstractmethod
    def write(self, variable: str, verb: str, value: Any) -> Any:
        """Changes a variable; its new value."""

    @abstractmethod
    def dtype(self, value: Any) -> str:
        """The name of the value's dtype."""


class Rows:
    """The model of a TensorArray: a new one after each write, and each element is written once."""

    def __init__(self, rows: Sequence[Any], empty: Any) -> None:
        self._rows = tuple(rows)
        self._empty = empty

    def size(self) -> Any:
        return np.int32(len(self._rows))

    def write(self, index: Any, value: Any) -> Rows:
        assert index == len(self._rows)
        return Rows((*self._rows, value), self._empty)

    def read(self, index: Any) -> Any:
        return self._rows[int(index)]

    def stack(self) -> Any:
        return np.stack(self._rows) if self._rows else self._empty[None][:0]


class Numbers(Machine):
    """NumPy; `state` has the values of the variables."""

    xp = np

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def cond(self, predicate: Any, then: Callable[[], list[Any]], otherwise: Callable[[], list[Any]]) -> list[Any]:
        return then() if predicate else otherwise()

    def switch(self, index: Any, branches: Sequence[Callable[[], list[Any]]]) -> list[Any]:
        return branches[min(int(index), len(branches) - 1)]()

    def loop(self, trips: Any, body: Callable[..., list[Any]], initial: Sequence[Any]) -> list[Any]:
        values = list(initial)
        for count in range(int(trips)):
            values = body(np.int32(count), *values)
        return values

    def rows(self, dtype: str, shape: tuple[int, ...], size: Any = None) -> Rows:
        return Rows((), np.zeros(shape, dtype))

    def read(self, variable: str) -> Any:
        return self.state[variable]

    def write(self, variable: str, verb: str, value: Any) -> Any:
        combine = {"assign_add": np.add, "assign_sub": np.subtract}.get(verb)
        self.state[variable] = value if combine is None else combine(self.state[variable], value)
        return self.state[variable]

    def dtype(self, value: Any) -> str:
        return value.dtype.name


class Nodes(Machine):
    """A graph under construction."""

    xp = af

    def __init__(self, variables: Mapping[str, af.Variable], parallel_iterations: int) -> None:
        self.variables = variables
        self.parallel_iterations = parallel_iterations

    def cond(self, predicate: Any, then: Callable[[], list[Any]], otherwise: Callable[[], list[Any]]) -> list[Any]:
        return list(af.cond(predicate, then, otherwise))

    def switch(self, index: Any, branches: Sequence[Callable[[], list[Any]]]) -> list[Any]:
        return list(af.switch_case(index, branches))

    def loop(self, trips: Any, body: Callable[..., list[Any]], initial: Sequence[Any]) -> list[Any]:
        _, *values = af.while_loop(
            lambda i, *_: i < trips,
            lambda i, *values: (i + 1, *body(i, *values)),
            (af.constant(np.int32(0)), *initial),
            parallel_iterations=self.parallel_iterations,
        )
        return values

    def rows(self, dtype: str, shape: tuple[int, ...], size: Any = None) -> af.TensorArray:
        grows = size is None
        return af.TensorArray(
            dtype, 0 if grows else size, dynamic_size=grows, element_shape=shape, clear_after_read=False
        )

    def read(self, variable: str) -> Any:
        return self.variables[variable].read()

    def write(self, variable: str, verb: str, value: Any) -> Any:
        return getattr(self.variables[variable], verb)(value)

    def dtype(self, value: Any) -> str:
        return value.dtype.name
