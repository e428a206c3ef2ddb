"""Types of nests, for the signatures of control flow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, Union

from asyncflow.control.stores.row_store import RowStore
from asyncflow.control.stores.tensor_array import TensorArray
from asyncflow.graph.ir import Tensor
from asyncflow.values import Nest


class DataclassLike(Protocol):
    """An instance of a dataclass, whose fields are taken to be tensors."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class AttrsLike(Protocol):
    """An instance of an attrs class, whose fields are taken to be tensors."""

    __attrs_attrs__: ClassVar[Any]


class NamedTupleLike(Protocol):
    """An instance of a named tuple, whose fields are taken to be tensors."""

    def _asdict(self) -> dict[str, Nest]: ...


Tensors: TypeAlias = Union[
    "Tensor", "TensorArray", "RowStore", "tuple[Tensors, ...]", "Mapping[str, Tensors]", DataclassLike, AttrsLike
]
"""A nest of tensors, TensorArrays and RowStores, for functions that return the type they are given. Excluded are nests
with numbers, which become tensors, and lists, which may be one array."""

N = TypeVar("N", bound=Tensors)
