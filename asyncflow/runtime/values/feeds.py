"""Checks fed values and makes the copies a run may keep: strict about dtype, shape and place."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncflow.devices.cuda.transfers.exchange import ForeignArray
from asyncflow.devices.memory import owner_of
from asyncflow.errors import DeviceLostError, FeedError, GraphError, told
from asyncflow.graph.building.build import as_array, is_masked
from asyncflow.graph.building.feeds import refusal, wrong_dtype, wrong_shape
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import DType
from asyncflow.graph.values.shapes import is_compatible
from asyncflow.runtime.values.foreign_feeds import (
    NotExchangeable,
    as_of_now,
    exchanged,
    has_foreign,
    is_exchangeable,
    on_host,
)
from asyncflow.state.variables.immutable import LARGE_BYTES, is_immutable
from asyncflow.streams.beside import call_beside
from asyncflow.values import Array, Value

if TYPE_CHECKING:
    from asyncflow.compiler.plan import Plan
    from asyncflow.devices.protocol import Device


_SCALAR = ((), None)
"""Shapes that a number fits."""


class _Numbers(NamedTuple):
    kind: type
    least: float
    most: float


_NUMBERS = {
    np.dtype(bool): _Numbers(bool, False, True),
    np.dtype("int32"): _Numbers(int, -(2**31), 2**31 - 1),
    np.dtype("int64"): _Numbers(int, -(2**63), 2**63 - 1),
    np.dtype("float32"): _Numbers(float, -3e38, 3e38),
    np.dtype("float64"): _Numbers(float, -1.7e308, 1.7e308),
}
"""Ranges of Python's numbers that a dtype surely holds: these need no further check."""


class LargeFeed(NamedTuple):
    """An array that fits its tensor and is still to be copied, off the event loop."""

    array: Array
    dtype: DType

    def copied(self) -> Array:
        """Return the copy, read-only."""
        copy = _copy(self.array, self.dtype)
        copy.flags.writeable = False
        return copy


def feed_value(tensor: Tensor, value: Value) -> Value:
    """Return `value` as the run will see it: a NumPy scalar, or a read-only C-contiguous array.

    Two kinds come unchanged, as they take long: a `LargeFeed`, which a thread is to copy, and a `ForeignArray` in the
    memory of a card, which is copied when the run starts; see `foreign_feeds`.

    Raises:
        FeedError: dtype or shape do not fit; nothing is cast silently.
    """
    spec = tensor.spec
    if type(value) is np.ndarray and value.dtype is spec.dtype and value.ndim:
        # Most feeds end here, with the result of the general path at a fifth of its cost.
        is_copied = value.flags.writeable and value.nbytes <= LARGE_BYTES
        if is_copied or _may_be_kept(value):
            if not is_compatible(value.shape, spec.shape):
                raise wrong_shape(tensor, value, value.shape)
            if is_copied:
                value = value.copy()
                value.setflags(write=False)
            return value
    if spec.shape in _SCALAR:
        if isinstance(value, np.generic) and value.dtype == spec.dtype:
            return value
        fits = _NUMBERS.get(spec.dtype)
        # A NaN is in no range, so the general path below takes it.
        if fits and isinstance(value, int | float) and type(value) is fits.kind and fits.least <= value <= fits.most:
            return spec.dtype.type(value)
    if isinstance(value, Tensor):
        raise refusal(tensor, value, "that is a tensor, which has no value yet; fetch it first")
    if is_masked(value):
        raise refusal(tensor, value, "a masked array would lose its mask; fill it first, with .filled(value)")
    try:
        array = _as_typed_array(tensor, value)
    except (FeedError, MemoryError):
        raise
    except Exception as error:  # an object's `__array__`, `__dlpack__` and the like may raise anything
        raise refusal(tensor, value, f"it cannot be read: {told(error)}") from error
    shape = array.array.shape if isinstance(array, LargeFeed) else array.shape
    if not is_compatible(shape, spec.shape):
        raise wrong_shape(tensor, value, shape)
    return locked(array) if isinstance(array, np.ndarray) else array


def comparable(tensor: Tensor, value: Value) -> Array:
    """Return a checked value for the host to compare with what a graph was built on.

    Raises:
        FeedError: it is in the memory of a card.
    """
    if type(value) is ForeignArray:
        raise refusal(tensor, value.value, "the graph is built on its value, which the host compares; feed a host copy")
    return value.array if type(value) is LargeFeed else np.asarray(value)


def locked(array: Array) -> Value:
    """Return a NumPy scalar, or the array itself, made read-only."""
    if array.ndim == 0 and array.dtype.kind in "biufc":
        return array[()]
    array.flags.writeable = False
    return array


async def at_hand(
    values: Sequence[Value], feeds: Sequence[Tensor], plan: Plan, devices: Mapping[str, Device]
) -> list[Value]:
    """Return the values in a form that a plan takes, and wait for them and for the state that kernels read.

    So no kernel has to hold up the event loop for that state, unless a device writes it again before.

    Raises:
        FeedError: as `settled`.
    """
    if has_foreign(values):
        values = await settled(values, feeds, plan, devices)
    for state in plan.survey.read_on_host:
        if (read := state.read_on_host()) is not None:
            with suppress(DeviceLostError):  # readers get the error
                await call_beside(read)
    return list(values)


async def settled(
    values: Sequence[Value], feeds: Sequence[Tensor], plan: Plan, devices: Mapping[str, Device]
) -> Sequence[Value]:
    """The values, as the devices of a plan take them; does not suspend if all stay in the memory of cards.

    Raises:
        FeedError: one has to be read on the host, and cannot be.
    """
    places = {index: devices[part.device] for part in plan.partitions for index in part.feed_indexes}
    wanted = [
        index
        for index, value in enumerate(values)
        # 0-d numbers stay on the host, wherever they are used.
        if type(value) is ForeignArray
        and not (index in places and places[index].capabilities.takes_foreign and value.ndim)
    ]
    if not wanted:
        return values
    copies: list[Any] = as_of_now(list(values))
    readings = [_on_host(feeds[index], copies[index]) for index in wanted]
    for index, array in zip(wanted, await asyncio.gather(*readings), strict=True):
        copies[index] = array
    return copies


async def _on_host(tensor: Tensor, foreign: ForeignArray) -> Value:
    try:
        return locked(await on_host(foreign))
    except NotExchangeable as error:
        raise refusal(tensor, foreign.value, str(error)) from error.__cause__


def _as_typed_array(tensor: Tensor, value: Value) -> Array | LargeFeed | ForeignArray:
    """A C-contiguous array of the tensor's dtype that shares no memory the caller can write to, or will be one."""
    if is_exchangeable(value):
        try:
            found = exchanged(value)
        except NotExchangeable as error:
            raise refusal(tensor, value, str(error)) from error.__cause__
        if isinstance(found, ForeignArray):
            if found.dtype != tensor.dtype:
                raise wrong_dtype(tensor, value, found.dtype)
            return found
        return _copied(tensor, value, found)
    if isinstance(value, bytes):
        raise refusal(tensor, value, "bytes say nothing of dtype and shape; feed np.frombuffer(value, dtype)")
    if not _is_typed(value):
        try:
            return as_array(value, tensor.dtype)
        except GraphError as error:
            raise refusal(tensor, value, error.reason) from error
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise refusal(tensor, value, f"NumPy cannot read it: {error}") from error
    return _copied(tensor, value, array)


def _is_typed(value: object) -> bool:
    """Return True if it has a dtype of its own, as arrays do, and `bytearray`, `memoryview` and `array.array`."""
    if isinstance(value, list | tuple | int | float | complex | str):  # most feeds
        return isinstance(value, np.generic)
    if any(hasattr(value, name) for name in ("dtype", "__array__", "__array_interface__")):
        return True
    try:
        memoryview(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _copied(tensor: Tensor, value: Value, array: Array) -> Array | LargeFeed:
    """Return a copy of `array`, which reads `value`, in the tensor's dtype; `array` itself if it is immutable."""
    native = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    if native != tensor.dtype and not (array.dtype.kind == "U" and tensor.dtype.kind == "T"):
        raise wrong_dtype(tensor, value, native)
    if native == array.dtype == tensor.dtype and _may_be_kept(array):
        return array
    if array.nbytes > LARGE_BYTES and array.ndim:
        return LargeFeed(array, tensor.dtype)
    return _copy(array, tensor.dtype)


def _may_be_kept(array: Array) -> bool:
    flags = array.flags
    if type(array) is not np.ndarray or not (flags.c_contiguous and flags.aligned):
        return False
    if array.base is None:
        return not flags.writeable
    # Copy a slice, which would keep, and count as, its whole buffer.
    return is_immutable(array) and owner_of(array).nbytes == array.nbytes


def _copy(array: Array, dtype: DType) -> Array:
    return np.array(array, dtype=dtype, order="C", copy=True, subok=False)
