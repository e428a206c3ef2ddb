"""Python operators on symbolic values: ``a + b``, ``-a``, ``a[1:]`` build nodes.

`Tensor` and `Variable` share them through `Operators`. The functions behind them live in `asyncflow.ops`, which hands
them over with `install`, because a graph must not know which operations exist.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, cast

from asyncflow.errors import GraphError
from asyncflow.graph.no_value import NoValue, refusal
from asyncflow.graph.shapes import size_of

if TYPE_CHECKING:
    from types import ModuleType

    import numpy as np

    from asyncflow.graph.dtypes import DType
    from asyncflow.graph.ir import Tensor
    from asyncflow.graph.shapes import Shape
    from asyncflow.graph.spec import Spec

API_VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12")
"""Versions of the Array API standard, each of which has all that the ones before it have."""

_functions: dict[str, Callable[..., Any]] = {}


def install(**functions: Callable[..., Any]) -> None:
    """Hands over the functions behind the operators, under their Array API names (``add``, ``matmul``, …)."""
    _functions.update(functions)


def _call(name: str, *operands: object) -> Tensor:
    result: Tensor = _functions[name](*operands)
    return result


# NumPy's operators are ufuncs, and those of the names below bear other names than the Array API gives them.
_RENAMED = {
    "absolute": "abs",
    "invert": "bitwise_invert",
    "left_shift": "bitwise_left_shift",
    "power": "pow",
    "right_shift": "bitwise_right_shift",
}


class Operators(NoValue):
    """Arithmetic, comparison and indexing operators of symbolic values, and what their `spec` says."""

    __slots__ = ()

    spec: Spec

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.spec.dtype

    @property
    def shape(self) -> Shape:
        """Partial shape: None for unknown rank, None items for unknown extents."""
        return self.spec.shape

    @property
    def ndim(self) -> int | None:
        """Number of dimensions, or None if unknown."""
        return self.spec.rank

    @property
    def size(self) -> int | None:
        """Number of elements, or None if unknown; `asyncflow.size` gives it as a tensor."""
        return size_of(self.spec.shape)

    def __array_namespace__(self, /, *, api_version: str | None = None) -> ModuleType:
        """The module with the functions of the Array API standard: ``asyncflow``.

        Raises:
            GraphError: another version of the standard is asked for.
        """
        if api_version not in (None, *API_VERSIONS):
            raise GraphError(
                f"there is no Array API {api_version!r} here; asyncflow has {API_VERSIONS[-1]}, and what is older"
            )
        return sys.modules["asyncflow"]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **options: object) -> Tensor:
        """Builds the node of ``array + x``, for which NumPy asks the ufunc of the operator."""
        name = ufunc.__name__
        function = _functions.get(_RENAMED.get(name, name))
        if method != "__call__":
            raise GraphError(refusal(f"np.{name}.{method}", "", self))
        if "out" in options:
            raise GraphError(
                f"np.{name} cannot write {self!r} into an array: it has no value "
                f"before a run; write a = a + x, not a += x"
            )
        if function is None or options:
            raise GraphError(refusal(f"np.{name}", name, self))
        result = function(*inputs)
        if result is NotImplemented:
            raise GraphError(
                f"np.{name} of {' and '.join(map(repr, inputs))}: one of them is no value that a tensor holds"
            )
        return cast("Tensor", result)

    def __add__(self, other: object) -> Tensor:
        return _call("add", self, other)

    def __radd__(self, other: object) -> Tensor:
        return _call("add", other, self)

    def __sub__(self, other: object) -> Tensor:
        return _call("subtract", self, other)

    def __rsub__(self, other: object) -> Tensor:
        return _call("subtract", other, self)

    def __mul__(self, other: object) -> Tensor:
        return _call("multiply", self, other)

    def __rmul__(self, other: object) -> Tensor:
        return _call("multiply", other, self)

    def __truediv__(self, other: object) -> Tensor:
        return _call("divide", self, other)

    def __rtruediv__(self, other: object) -> Tensor:
        return _call("divide", other, self)

    def __floordiv__(self, other: object) -> Tensor:
        return _call("floor_divide", self, other)

    def __rfloordiv__(self, other: object) -> Tensor:
        return _call("floor_divide", other, self)

    def __mod__(self, other: object) -> Tensor:
        return _call("remainder", self, other)

    def __rmod__(self, other: object) -> Tensor:
        return _call("remainder", other, self)

    def __pow__(self, other: object) -> Tensor:
        return _call("pow", self, other)

    def __rpow__(self, other: object) -> Tensor:
        return _call("pow", other, self)

    def __matmul__(self, other: object) -> Tensor:
        return _call("matmul", self, other)

    def __rmatmul__(self, other: object) -> Tensor:
        return _call("matmul", other, self)

    def __and__(self, other: object) -> Tensor:
        return _call("bitwise_and", self, other)

    def __rand__(self, other: object) -> Tensor:
        return _call("bitwise_and", other, self)

    def __or__(self, other: object) -> Tensor:
        return _call("bitwise_or", self, other)

    def __ror__(self, other: object) -> Tensor:
        return _call("bitwise_or", other, self)

    def __xor__(self, other: object) -> Tensor:
        return _call("bitwise_xor", self, other)

    def __rxor__(self, other: object) -> Tensor:
        return _call("bitwise_xor", other, self)

    def __lshift__(self, other: object) -> Tensor:
        return _call("bitwise_left_shift", self, other)

    def __rlshift__(self, other: object) -> Tensor:
        return _call("bitwise_left_shift", other, self)

    def __rshift__(self, other: object) -> Tensor:
        return _call("bitwise_right_shift", self, other)

    def __rrshift__(self, other: object) -> Tensor:
        return _call("bitwise_right_shift", other, self)

    def __neg__(self) -> Tensor:
        return _call("negative", self)

    def __pos__(self) -> Tensor:
        return _call("positive", self)

    def __abs__(self) -> Tensor:
        return _call("abs", self)

    def __invert__(self) -> Tensor:
        return _call("bitwise_invert", self)

    def __lt__(self, other: object) -> Tensor:
        return _call("less", self, other)

    def __le__(self, other: object) -> Tensor:
        return _call("less_equal", self, other)

    def __gt__(self, other: object) -> Tensor:
        return _call("greater", self, other)

    def __ge__(self, other: object) -> Tensor:
        return _call("greater_equal", self, other)

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return _call("equal", self, other)

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return _call("not_equal", self, other)

    # Elementwise equality must not take identity hashing away: graphs keep tensors in dicts.
    __hash__ = object.__hash__

    def __getitem__(self, key: object) -> Tensor:
        return _call("getitem", self, key)

    def __bool__(self) -> NoReturn:
        raise GraphError(
            f"{self!r} has no truth value while the graph is built; use af.cond or af.while_loop to branch on it, "
            f"or `is` to compare identities"
        )

    def __len__(self) -> int:
        if self.shape and self.shape[0] is not None:
            return self.shape[0]
        raise GraphError(f"len() of {self!r} is not known to Python; use .shape[0], or af.shape(x)[0] when running")
