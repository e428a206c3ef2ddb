"""Python operators on symbolic values: ``a + b``, ``-a``, ``a[1:]`` build nodes.

`Tensor` and `Variable` share them through `Operators`. The functions behind them live in `asyncflow.ops`, which hands
them over with `install`, because a graph must not know which operations exist.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

from asyncflow.errors import GraphError
from asyncflow.graph.values.no_value import NoValue, refusal
from asyncflow.graph.values.shapes import Shape, size_of

if TYPE_CHECKING:
    from types import ModuleType

    import numpy as np

    from asyncflow.graph.ir import Tensor
    from asyncflow.graph.values.dtypes import DType
    from asyncflow.graph.values.spec import Spec

API_VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12")
"""Supported versions of the Array API standard; each includes the earlier ones."""

_Binary: TypeAlias = "Callable[[Operators, object], Tensor]"
_functions: dict[str, Callable[..., Any]] = {}


def install(**functions: Callable[..., Any]) -> None:
    """Hands over the functions behind the operators, under their Array API names (``add``, ``matmul``, …)."""
    _functions.update(functions)


def _call(name: str, *operands: object) -> Tensor:
    result: Tensor = _functions[name](*operands)
    return result


def _binary(name: str) -> tuple[_Binary, _Binary]:
    """The operator that calls the function of that name, and the one for when the value stands on the right."""
    return lambda self, other: _call(name, self, other), lambda self, other: _call(name, other, self)


def _unary(name: str) -> Callable[[Operators], Tensor]:
    return lambda self: _call(name, self)


# NumPy's operators are ufuncs; these ufuncs have other names in the Array API.
_RENAMED = {
    "absolute": "abs",
    "invert": "bitwise_invert",
    "left_shift": "bitwise_left_shift",
    "power": "pow",
    "right_shift": "bitwise_right_shift",
}


class Operators(NoValue):
    """Arithmetic, comparison and indexing operators of symbolic values, and properties read off their `spec`."""

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
                f"there is no Array API {api_version!r} here; asyncflow has {API_VERSIONS[-1]}, and older versions"
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

    __add__, __radd__ = _binary("add")
    __sub__, __rsub__ = _binary("subtract")
    __mul__, __rmul__ = _binary("multiply")
    __truediv__, __rtruediv__ = _binary("divide")
    __floordiv__, __rfloordiv__ = _binary("floor_divide")
    __mod__, __rmod__ = _binary("remainder")
    __pow__, __rpow__ = _binary("pow")
    __matmul__, __rmatmul__ = _binary("matmul")
    __and__, __rand__ = _binary("bitwise_and")
    __or__, __ror__ = _binary("bitwise_or")
    __xor__, __rxor__ = _binary("bitwise_xor")
    __lshift__, __rlshift__ = _binary("bitwise_left_shift")
    __rshift__, __rrshift__ = _binary("bitwise_right_shift")
    __lt__ = _binary("less")[0]
    __le__ = _binary("less_equal")[0]
    __gt__ = _binary("greater")[0]
    __ge__ = _binary("greater_equal")[0]
    __neg__ = _unary("negative")
    __pos__ = _unary("positive")
    __abs__ = _unary("abs")
    __invert__ = _unary("bitwise_invert")

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
