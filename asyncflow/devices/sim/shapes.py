"""The shapes of a kernel's outputs in a simulation of shapes, found without running it.

A shape follows from other shapes, and from values that kernels read on the host: sizes, bounds and counts. A simulation
of shapes computes those values wherever they follow from shapes. A value that depends on data has no data itself, and
a kernel whose shapes depend on such a value is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from asyncflow.devices.protocol import ArraySpec, KernelInfo, Placed
from asyncflow.devices.sim.values import SMALL_BYTES, SimArray, SimUnknown
from asyncflow.errors import ShapeError
from asyncflow.values import Array

if TYPE_CHECKING:
    from asyncflow.values import Value

OutputSpecs: TypeAlias = "Sequence[ArraySpec] | None"
"""dtypes and shapes of a kernel's outputs; None where they depend on data."""

_MOST_SPECS = 64

_NO_VALUES: Mapping[int, Array] = MappingProxyType({})


class SpecRule:
    """The shape rule of a kernel, with its earlier results.

    Attributes:
        reads_values: it is also told the values that the kernel reads on the host.
    """

    __slots__ = ("_found", "_info", "reads_values")

    def __init__(self, info: KernelInfo, *, reads_values: bool) -> None:
        self._info = info
        self._found: dict[Hashable, OutputSpecs] = {}
        self.reads_values = reads_values and bool(info.host_inputs)

    def infer(self, values: Sequence[Placed]) -> OutputSpecs:
        """Return dtypes and shapes of the outputs; None if known facts on the inputs do not determine them."""
        key = _specs_of(values)
        if key is None:
            return None
        specs = self._cached(key, key, _NO_VALUES)
        if specs is None and self.reads_values:
            found = [(place, _known(values[place])) for place in sorted(self._info.host_inputs)]
            known = {place: value for place, value in found if value is not None}
            specs = self._with(known, key)
        return specs

    def infer_with_numbers(self, values: Sequence[Placed]) -> OutputSpecs:
        """Return what `infer` does, where all that the kernel reads on the host are numbers; None elsewhere."""
        key, places = _specs_of(values), self._info.host_inputs
        if key is None or not all(place < len(values) and isinstance(values[place], np.generic) for place in places):
            return None
        known = {place: value for place in sorted(places) if (value := _known(values[place])) is not None}
        return self._with(known, key)

    def _with(self, known: Mapping[int, Array], specs: tuple[ArraySpec, ...]) -> OutputSpecs:
        if not known:
            return None
        return self._cached((specs, *((place, x.tobytes()) for place, x in known.items())), specs, known)

    def without_values(self, values: Sequence[Placed]) -> OutputSpecs:
        """Return the same as `infer`; None if the result depends on values that the kernel reads on the host."""
        key = _specs_of(values)
        return None if key is None else self._cached(key, key, _NO_VALUES)

    def require(self, values: Sequence[Placed]) -> Sequence[ArraySpec]:
        """Return the same as `infer`.

        Raises:
            ShapeError: the shapes depend on data.
        """
        specs = self.infer(values)
        if specs is None:
            raise self.refusal()
        return specs

    def refusal(self) -> ShapeError:
        """Return the error to raise where shapes depend on data."""
        return ShapeError(
            f"{self._info.name!r} cannot be simulated: its output's shape depends on data, which a shapes-only "
            "simulation does not have; simulate with data, or keep this part of the program below 4 KiB a value"
        )

    def _cached(self, key: Hashable, specs: Sequence[ArraySpec], known: Mapping[int, Array]) -> OutputSpecs:
        if key not in self._found:
            if len(self._found) >= _MOST_SPECS:
                self._found.clear()
            self._found[key] = self._info.infer(specs, known)
        return self._found[key]


def _specs_of(values: Sequence[Placed]) -> tuple[ArraySpec, ...] | None:
    try:
        return tuple([(value.dtype, value.shape) for value in values])
    except AttributeError:
        return None  # a string, or something opaque


def lacks_data(value: Value) -> bool:
    """Return True for a value of which a simulation of shapes knows nothing else."""
    return type(value) is SimUnknown or (type(value) is SimArray and value.data is None)


def _known(value: Placed) -> Array | None:
    """A value that a kernel reads on the host, if it is there and small."""
    data: Placed = value.data if isinstance(value, SimArray) else value
    if isinstance(data, np.ndarray | np.generic) and data.nbytes <= SMALL_BYTES and data.dtype.kind in "biuf":
        return np.asarray(data)
    return None
