"""Answers of a symbolic value to code that wants the value now: errors that name the way to go.

NumPy would otherwise take a tensor for a sequence, or an opaque object, and fail far away or compute nonsense.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from asyncflow.errors import GraphError
from asyncflow.foreign_names import in_place_of

FETCHING = frozenset({"cpu", "data", "detach", "eval", "get", "item", "numpy", "tobytes", "tolist", "value", "values"})
"""Attributes that, elsewhere, give the value."""


class NoValue:
    """A base class that refuses uses of a value before a run: conversions, NumPy functions, assignment, formatting."""

    __slots__ = ()

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        raise GraphError(
            f"NumPy wants the value of {self!r}, which has none before a run; fetch it with `await session.run(x)`, or "
            f"compute with the functions of asyncflow"
        )

    def __array_function__(
        self, function: Callable[..., object], types: object, args: object, kwargs: object
    ) -> NoReturn:
        module = str(getattr(function, "__module__", "numpy")).replace("numpy", "np", 1)
        raise GraphError(refusal(f"{module}.{function.__name__}", function.__name__, self))

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise GraphError(
            f"{self!r} cannot be assigned to: values do not change; use x = af.index_update(x, key, values), or "
            f"af.index_add for +="
        )

    def __delitem__(self, key: object) -> NoReturn:
        raise GraphError(f"nothing can be deleted from {self!r}: values do not change; use af.concat of what stays")

    def __int__(self) -> NoReturn:
        raise GraphError(f"{self!r} has no value until a run computes it; fetch it with `await session.run(x)`")

    def __float__(self) -> NoReturn:
        raise GraphError(
            f"a float of {self!r} needs its value, which a run computes: fetch it with `await session.run(x)`; in the "
            f"graph use af.sqrt for math.sqrt, and so on, and af.astype for float()"
        )

    def __index__(self) -> NoReturn:
        raise GraphError(
            f"an index of {self!r} needs its value, which a run computes: fetch it with `await session.run(x)`; in the "
            f"graph use af.while_loop or af.arange for range(), and af.take for an element of a list"
        )

    __complex__ = __int__

    def __round__(self, ndigits: int | None = None) -> NoReturn:
        raise GraphError(f"round() of {self!r} needs its value, which a run computes; use af.round(x)")

    def __trunc__(self) -> NoReturn:
        raise GraphError(f"trunc() of {self!r} needs its value, which a run computes; use af.trunc(x)")

    def __format__(self, format_spec: str) -> str:
        if not format_spec:
            return str(self)
        raise GraphError(
            f"format {format_spec!r} of {self!r} needs its value, which a run computes; format what "
            f"`await session.run(x)` gives, or use af.print in the graph"
        )

    def __await__(self) -> NoReturn:
        raise GraphError(f"{self!r} cannot be awaited: it is part of a program; fetch it with await session.run(x)")

    if not TYPE_CHECKING:  # with `__getattr__`, every misspelt attribute would pass the type checker

        def __getattr__(self, name: str) -> NoReturn:
            # Only called for missing attributes. No repr, as copy and pickle inspect unfinished instances.
            advice = ""
            if name in FETCHING:
                advice = "; it has no value before a run: fetch it with await session.run(x)"
            elif (known := in_place_of(name, "(x)")) is not None:
                advice = f"; use {known}"
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{advice}", name=name, obj=self)


def refusal(shown: str, name: str, value: object) -> str:
    """The message that a function of NumPy's cannot take `value`, and which one of asyncflow's can."""
    known = in_place_of(name)
    advice = f"use {known}" if known else "compute with functions of asyncflow, or call it in an op made with @af.op"
    return f"{shown} computes at once, and {value!r} has no value before a run; {advice}"
