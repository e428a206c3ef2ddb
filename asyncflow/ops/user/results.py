"""Values of a user's function: read-only inputs, and results that are checked against the declared outputs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from sys import getrefcount
from typing import Any

import numpy as np

from asyncflow.errors import DTypeError, brief, counted
from asyncflow.graph.building.build import is_masked, is_symbolic
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import dtype_name, string
from asyncflow.graph.values.shapes import format_shape, is_compatible
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.promotion import is_weak, promoted_dtype
from asyncflow.values import Array, Nest, Value


def read_only(value: Value) -> Value:
    """Return `value` so that the user's code cannot write to it: others use the same memory."""
    if not isinstance(value, np.ndarray) or not value.flags.writeable:
        return value
    view = value.view()
    view.flags.writeable = False
    return view


class Results:
    """A check that takes a function's results apart into the values of a declared nest.

    Args:
        outputs: a nest of specs.
    """

    __slots__ = ("_specs", "_structure")

    def __init__(self, outputs: object) -> None:
        self._specs, self._structure = nest.flatten(outputs)

    def __call__(self, returned: Nest) -> tuple[Value, ...]:
        """Return the values of what the function returned; raises as `checked`, or TypeError for another nest."""
        values = self._leaves(returned)
        return tuple(
            checked(spec, value, f"output {index}")
            for index, (spec, value) in enumerate(zip(self._specs, values, strict=True))
        )

    def _leaves(self, returned: Nest) -> list[Value]:
        if not self._specs and returned is None:
            return []
        if self._structure.kind in (tuple, list) and isinstance(returned, tuple | list):
            # Tuple and list are interchangeable at the top: Python functions return several values as a tuple.
            returned = self._structure.kind(returned)
        try:
            return nest.flatten_like(self._structure, returned)
        except nest.StructureMismatch as error:
            found = len(nest.flatten(returned)[0])
            raise TypeError(
                f"the function returned {counted(found, 'value')}, {_describe(returned)}, and "
                f"{len(self._specs)} are declared: {error}"
            ) from None


def require_rows(results: Sequence[Array], rows: int) -> None:
    """Raise ValueError if a function of rows did not give one for each."""
    if any(len(y) != rows for y in results):
        raise ValueError(f"results have {[len(y) for y in results]} rows, and {rows} were given; return one for each")


def _references(value: object) -> int:
    return getrefcount(value)


_FRESH = _references(np.empty(0))
"""Reference count of an array that a call has just returned, without further references."""


def given_up(result: Nest, kind: type[Array] = np.ndarray) -> Nest:
    """Return the results of a function, with copies of the arrays of `kind` that are still referenced and may be
    written to later.
    """
    if type(result) is kind:
        return result.copy() if getrefcount(result) > _FRESH or _is_window(result) else result
    if isinstance(result, np.generic | int | float | complex | str):
        return result
    # Each value has references from the nest, the list and the loop variable.
    allowed = _FRESH + 2 if getrefcount(result) <= _FRESH else 0
    leaves, structure = nest.flatten(result)
    if structure.kind is None:
        return result
    return structure.unflatten(
        [x.copy() if type(x) is kind and (getrefcount(x) > allowed or _is_window(x)) else x for x in leaves]
    )


def _is_window(array: Array) -> bool:
    """Return True if the array is a view of an array with further references."""
    if array.base is None or getrefcount(array.base) <= _FRESH:
        return False
    return bool(getattr(array.flags, "writeable", True))  # CuPy's arrays are never locked


def checked(spec: Spec, value: Any, what: str = "its result") -> Array:
    """Return `value` as a value of `spec`.

    Raises:
        TypeError: it is no array or number, or one of another dtype.
        ValueError: it has another shape.
    """
    if isinstance(value, bool | int | float | complex | str) and not isinstance(value, np.generic):
        value = _from_python(spec, value, what)
    elif isinstance(value, np.ndarray):
        if is_masked(value):
            raise TypeError(
                f"the function returned a masked array as {what}, which would lose its mask; fill it first, with "
                f".filled(value), or return the mask as an output of its own"
            )
        # Convert subclasses: matrices, for example, compute differently.
        value = np.asarray(value)
    elif not isinstance(value, np.generic) and not hasattr(value, "__cuda_array_interface__"):
        raise TypeError(f"the function returned {_describe(value)} as {what}, declared as {spec}{_advice(value)}")
    if value.dtype != spec.dtype:
        if spec.dtype != string or value.dtype.kind != "U":
            raise TypeError(
                f"the function returned dtype {value.dtype} as {what}, declared as {spec}; convert it with "
                f".astype({dtype_name(spec.dtype)!r}), or declare its outputs"
            )
        value = np.asarray(value).astype(string)
    array: Array = value
    if not is_compatible(array.shape, spec.shape):
        raise ValueError(f"the function returned shape {format_shape(array.shape)} as {what}, declared as {spec}")
    return array


def _from_python(spec: Spec, value: bool | int | float | complex | str, what: str) -> Array:
    """A Python scalar as a value of the declared dtype."""
    if isinstance(value, str):
        fits = spec.dtype == string
    else:
        try:
            fits = is_weak(value) and promoted_dtype([spec.dtype, value]) == spec.dtype
        except DTypeError:
            fits = False
    if not fits:
        raise TypeError(
            f"the function returned {_describe(value)} as {what}, which does not fit the declared dtype "
            f"{dtype_name(spec.dtype)}"
        )
    return np.array(value, dtype=spec.dtype)[()] if spec.dtype != string else np.array(value, dtype=string)


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"an array {value.dtype}{format_shape(value.shape)}"
    return f"{brief(value)} ({type(value).__name__})"


def _advice(value: object) -> str:
    """The end of the message on a result that is no array: how to mend it."""
    if inspect.iscoroutine(value):
        value.close()  # it will never be awaited, which Python would warn of
        return "; declare the function with `async def`"
    if is_symbolic(value):
        return "; it is called while the graph runs and computes with NumPy, not with graph functions"
    if isinstance(value, list | tuple):
        return "; return np.asarray(...) of it, or declare a tuple of specs for several outputs"
    return "; return a NumPy array or a number"
