"""Calls of user functions in a run that is recorded, or done again from its record.

A run that is done again must not send an agent's mail twice, nor depend on what a tool answers the second time. So the
results of each firing's calls are written down, in their order, and given again in place of calls. A firing finds its
calls in a context variable, as they may be on the event loop, on a thread or in a task.
"""

from __future__ import annotations

import builtins
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context, ContextVar
from dataclasses import astuple
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np

import asyncflow.errors
from asyncflow.errors import KernelError, ReplayError, SourceLocation, attempt_of, in_attempt
from asyncflow.values import Value


class Raised(NamedTuple):
    """An error that a function raised.

    Attributes:
        kind: the name of the next class of Python's, or of this library's, among its bases.
        name: of its class.
        module: of that.
        message: as it is printed.
        notes: added to it.
        reason: for this library's errors, the message without later additions.
        attempt: the attempt that failed for good; see `asyncflow.errors.attempt_of`.
        place: for this library's `KernelError`, its other attributes: where it was raised, and sizes.
        cause: the error that it was raised from.
    """

    kind: str
    name: str
    module: str
    message: str
    notes: Sequence[str] = ()
    reason: str = ""
    attempt: str = ""
    place: Mapping[str, object] | None = None
    cause: Raised | None = None

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Return the record of an error."""
        chain = [error]
        while (cause := chain[-1].__cause__) is not None and all(cause is not each for each in chain):
            chain.append(cause)
        found = None
        for each in reversed(chain):
            kind = next(base for base in type(each).__mro__ if _known(base.__name__) is base)
            name, module, notes = type(each).__qualname__, type(each).__module__, list(getattr(each, "__notes__", ()))
            place = _place_of(each) if isinstance(each, KernelError) and kind is type(each) else None
            reason = str(getattr(each, "reason", ""))
            found = cls(kind.__name__, name, module, str(each), notes, reason, attempt_of(each), place, found)
        assert found is not None
        return found

    @classmethod
    def read(cls, found: object) -> Raised:
        """Return the record that JSON has made a list of.

        Raises:
            TypeError, ValueError: there is more or less in the list.
        """
        raised = cls(*cast("Raised", found))
        return raised if raised.cause is None else raised._replace(cause=cls.read(raised.cause))

    def error(self) -> BaseException:
        """An error like it, of a class of that name; of the very class, if that is one of Python's."""
        base = _known(self.kind)
        if base is None:
            raise ReplayError(f"the record is damaged: it has an error of kind {self.kind!r}")
        found: BaseException
        if self.place is not None:
            found = _placed(base, self.reason, self.place)
        elif base.__module__ == "builtins" and self.name == self.kind and _says(base, self.message):
            found = base(self.message)
        else:
            fields = {"__init__": _no_init, "__str__": lambda error: self.message, "__module__": self.module}
            found = type(self.name, (base,), fields)(self.message)
            found.reason = self.reason  # type: ignore[attr-defined]
        for note in self.notes:
            found.add_note(note)
        if self.attempt and isinstance(found, Exception):
            in_attempt(found, self.attempt)
        if self.cause is not None:
            found.__cause__ = self.cause.error()
        return found


_ATTRIBUTES: Final = {"node", "op", "tag", "device", "requested", "used", "limit", "queue", "left"}


def _place_of(error: KernelError) -> dict[str, object]:
    found = {name: value for name, value in vars(error).items() if name in _ATTRIBUTES}
    return {**found, "inputs": list(error.inputs), "location": list(astuple(error.location))}


def _placed(kind: type[BaseException], reason: str, place: Mapping[str, object]) -> BaseException:
    try:
        inputs, location = cast("Sequence[str]", place["inputs"]), cast("tuple[str, int, str]", place["location"])
        return kind(reason, **{**place, "inputs": tuple(inputs), "location": SourceLocation(*location)})
    except (KeyError, TypeError) as error:
        raise ReplayError(f"the record is damaged: there is no {kind.__name__} with {place!r:.200}") from error


def _no_init(error: BaseException, message: str) -> None:
    """In place of an ``__init__`` that asks for more than the message."""


def _known(name: str) -> type[BaseException] | None:
    for module in (builtins, asyncflow.errors):
        found = getattr(module, name, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    return None


def _says(kind: type[BaseException], message: str) -> bool:
    try:
        return str(kind(message)) == message
    except TypeError:  # needs more arguments, like UnicodeDecodeError
        return False


IN_CARD = None
"""In place of a result: it is in the memory of a card, and no record holds it."""

Outcome: TypeAlias = "Value | tuple[Value, ...] | Raised | None"


class CallLog:
    """A log of one firing's calls, filled while they are made.

    Attributes:
        outcomes: their results, or the error that a call raised.
    """

    __slots__ = ("outcomes",)

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def call(self, function: Callable[..., Value], values: Sequence[Value]) -> Value:
        """The result of ``function(*values)``, which is written down."""
        try:
            found = function(*values)
        except BaseException as error:
            self.outcomes.append(Raised.of(error))
            raise
        self.outcomes.append(_kept(found))
        return found

    async def awaited(self, function: Callable[..., Awaitable[Value]], values: Sequence[Value]) -> Value:
        """Call a coroutine function and log the outcome; a call cancelled with its run has none."""
        try:
            found = await function(*values)
        except Exception as error:
            self.outcomes.append(Raised.of(error))
            raise
        self.outcomes.append(_kept(found))
        return found


class CallReplay(CallLog):
    """The calls of one firing of a run that is done again: none is made."""

    __slots__ = ()

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        super().__init__()
        self.outcomes[:] = reversed(outcomes)

    def call(self, function: Callable[..., Value], values: Sequence[Value]) -> Value:
        """Return the result of the next call.

        Raises:
            ReplayError: there was none, or its result is not in the record.
            BaseException: the recorded error of the call.
        """
        if not self.outcomes:
            raise ReplayError("the function is called more often than in the record; live=True calls it")
        found = self.outcomes.pop()
        if isinstance(found, Raised):
            raise found.error()
        if found is IN_CARD:
            raise ReplayError("the function's result was in the memory of a card, and is not in the record")
        return found

    async def awaited(self, function: Callable[..., Awaitable[Value]], values: Sequence[Value]) -> Value:
        """As `call`."""
        return self.call(function, values)


call_log: ContextVar[CallLog | None] = ContextVar("asyncflow_calls", default=None)
"""The log of the calls of the current firing; None where no run is recorded or done again."""


def in_log(context: Context, log: CallLog) -> Context:
    """Return a copy of `context` whose calls of user functions go into `log`."""
    found = context.copy()
    found.run(call_log.set, log)
    return found


def recorded(function: Callable[..., Value]) -> Callable[..., Value]:
    """`function`, whose calls are written down, or given again, where a run is recorded or done again."""

    def call(*values: Value) -> Value:
        log = call_log.get()
        return function(*values) if log is None else log.call(function, values)

    return call


def recorded_coroutine(function: Callable[..., Awaitable[Value]]) -> Callable[..., Awaitable[Value]]:
    """As `recorded`, of a coroutine function."""

    async def call(*values: Value) -> Value:
        log = call_log.get()
        return await (function(*values) if log is None else log.awaited(function, values))

    return call


def _kept(found: Any) -> Outcome:
    """Return a result that stays unchanged when the memory of this one is used again."""
    if isinstance(found, tuple):
        each = tuple(map(_kept, found))
        return IN_CARD if IN_CARD in [x if x is IN_CARD else 0 for x in each] else each
    if isinstance(found, np.ndarray):
        return found.copy()
    return found if isinstance(found, np.generic | str) else IN_CARD
