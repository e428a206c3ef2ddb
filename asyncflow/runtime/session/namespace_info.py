"""The Array API standard's information on a namespace: ``af.__array_namespace_info__()``."""

from __future__ import annotations

from typing import Final

from asyncflow.devices.registry import available_devices
from asyncflow.graph.values.dtypes import DType, as_dtype, complex128, float64, int64
from asyncflow.ops.arrays.datatypes import isdtype

_NAMES: Final = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float32", "float64", "complex64", "complex128"),
)


class NamespaceInfo:
    """The capabilities of `asyncflow`, in the words of the standard; made by ``af.__array_namespace_info__()``."""

    def capabilities(self) -> dict[str, bool | int]:
        """Boolean indexing and data-dependent shapes are supported; the most dimensions that arrays have."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str | None:
        """None: where nothing is asked for, a session chooses the device when it runs."""
        return None

    def default_dtypes(self, *, device: str | None = None) -> dict[str, DType]:
        """The dtypes of Python numbers, the same on every device."""
        return {"real floating": float64, "complex floating": complex128, "integral": int64, "indexing": int64}

    def devices(self) -> list[str]:
        """Return the devices of this machine, as `asyncflow.device` takes them."""
        return [description.name for description in available_devices() if description.available]

    def dtypes(self, *, device: str | None = None, kind: str | tuple[str, ...] | None = None) -> dict[str, DType]:
        """The standard's dtypes of a kind, by name, the same on every device; None for all.

        Raises:
            DTypeError: an unknown kind.
        """
        dtypes = {name: as_dtype(name) for name in _NAMES}
        return dtypes if kind is None else {name: dtype for name, dtype in dtypes.items() if isdtype(dtype, kind)}
