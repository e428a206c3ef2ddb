"""Functions on a device's arrays that decide by the arrays' values.

Such a function is a generator: it yields a decision, a `Branch` or a `Loop`, is sent the results, and goes on. Whoever
runs it chooses how: a capture makes conditional nodes (`cuda/graphs/conditional.py`), the host waits for the
predicate (`cuda/graphs/host_loop.py`). A function that decides nothing is a plain one::

    def collatz(n, steps):
        (n,) = yield Branch(n % 2 == 0, lambda n: (n // 2,), lambda n: (3 * n + 1,), (n,))
        return n, steps + 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import GeneratorType
from typing import TYPE_CHECKING, Any, TypeAlias

from asyncflow.errors import LoopIdentity
from asyncflow.values import Kernel, Value

if TYPE_CHECKING:
    from asyncflow.devices.values import DType


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A decision: one of two functions is to be run.

    Attributes:
        pred: a boolean array with one element, or a boolean of the host.
        on_true, on_false: give results of the same dtypes and shapes.
        arguments: of both.
    """

    pred: Value
    on_true: Body
    on_false: Body
    arguments: Sequence[Value]


_UNNAMED = LoopIdentity("loop")


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """A decision: a body is to be run as long as a condition holds; the results are the variables.

    Attributes:
        condition, body: take the variables and then the captures.
        variables: initial values: arrays, or numbers of the host.
        captures: arrays and host values that do not change.
        identity: for errors.
    """

    condition: Condition
    body: Body
    variables: Sequence[Value]
    captures: Sequence[Value] = ()
    identity: LoopIdentity = _UNNAMED


Decision: TypeAlias = Branch | Loop

Body: TypeAlias = Callable[..., Sequence[Any] | Generator[Decision, Sequence[Any], Sequence[Any]]]
"""Gives a sequence of values: for a loop, the next ones of its variables."""

Condition: TypeAlias = Callable[..., Any]
"""Gives a boolean with one element, perhaps by way of a generator."""


@dataclass(frozen=True, slots=True)
class LogSpec:
    """The entries of a log, in which a loop saves a value in each iteration.

    Attributes:
        dtype, shape: of an entry.
        inner: of the log of a loop inside, if an entry is the number of the first entry that an iteration adds there.
    """

    dtype: DType
    shape: tuple[int, ...]
    inner: LogSpec | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of an entry."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCode:
    """A loop for a device that runs loops by itself.

    Attributes:
        condition, body: over the device's arrays and host values.
        n_vars: how many of the arguments are loop variables; the others are captures.
        logs: specs of variables that are logs, by their places. A call gets none of them, and makes them.
        identity: of the loop, for errors.
        limit: most iterations of a loop, this one or one inside; None for no limit.
    """

    condition: Condition
    body: Body
    n_vars: int
    identity: LoopIdentity
    logs: Mapping[int, LogSpec] = field(default_factory=dict)
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A function has ended.

    Attributes:
        value: its result.
    """

    value: Value


def decisions(function: Kernel, arguments: Sequence[Value]) -> Generator[Decision, Any, Any]:
    """The generator of ``function(*arguments)``, also of a function that decides nothing."""
    result = function(*arguments)
    return (yield from result) if isinstance(result, GeneratorType) else result


def advance(running: Generator[Decision, Any, Any], results: Sequence[Value] | None) -> Decision | Ended:
    """Advance a generator to its next decision, with the results of the last one; None to start it."""
    try:
        return running.send(results)
    except StopIteration as stop:
        return Ended(stop.value)
