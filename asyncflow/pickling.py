"""Rules of `pickle`: some objects go to another process, others say why they do not.

Errors do: a process pool must not break because one of its tasks failed. Graphs and what belongs to them do not, as
they hold functions; they say what to send in their place.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any, ClassVar, NoReturn, Self

_HOMES = ("builtins", "asyncflow", "numpy")
"""Packages that the process at the other end has as well."""


class Unavailable(Exception):
    """An exception in a process that may not know its class: the name of its class, and its message."""


def portable(error: BaseException | None) -> BaseException | None:
    """Return `error` in a form for other processes: itself, or its text if they may not be able to read it."""
    if error is None:
        return None
    kind = type(error)
    if kind.__module__.partition(".")[0] in _HOMES:
        try:
            if type(pickle.loads(pickle.dumps(error))) is kind:
                return error
        except Exception:  # a user's error may raise anything
            pass
    return Unavailable(f"{kind.__name__}: {error}")


def revived(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any], cause: BaseException | None
) -> BaseException:
    """The error that was pickled, without a call of its `__init__`, which may want more than `args`."""
    made_by: type[Any] = kind
    while made_by.__module__ != "builtins":  # of two bases, the base that gives the layout
        made_by = made_by.__base__ or BaseException
    error: BaseException = made_by.__new__(kind, *args)
    error.__dict__.update(state)
    if cause is not None:
        error.__cause__ = cause
    return error


class NotPickled:
    """Copies like any object, unless it says otherwise, but is not pickled."""

    __slots__ = ()

    _instead: ClassVar[str]
    """The reason, and what to do."""

    _not_copied: ClassVar[str] = ""
    """The reason why it is not copied either; empty if it is copied."""

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError(f"cannot pickle {self!r}: {self._instead}")

    def _check_copied(self) -> None:
        if self._not_copied:
            raise TypeError(f"cannot copy {self!r}: {self._not_copied}")

    def __copy__(self) -> Self:
        self._check_copied()
        return self._filled(type(self).__new__(type(self)), self.__getstate__())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self._check_copied()
        made = memo[id(self)] = type(self).__new__(type(self))
        return self._filled(made, copy.deepcopy(self.__getstate__(), memo))

    def _filled(self, made: Self, state: Any) -> Self:
        # `__getstate__` returns a dict of attributes or, for classes with slots, a pair: this dict and a dict of the
        # slots.
        for attributes in state if isinstance(state, tuple) else (state,):
            for name, value in (attributes or {}).items():
                object.__setattr__(made, name, value)
        return made
