"""Checks fed values and makes the copies a run may keep: strict about dtype, shape and place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from asyncflow.devices.foreign import ForeignArray
from asyncflow.errors import FeedError, GraphError
from asyncflow.graph.build import as_array
from asyncflow.graph.dtypes import VARIANT, dtype_name
from asyncflow.graph.frames import format_frame, output_frame
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Tensor
from asyncflow.graph.shapes import format_shape, is_compatible
from asyncflow.runtime.exchange import NotExchangeable, exchanged, is_exchangeable


def as_feeds(feeds: object) -> Mapping[Any, Any]:
    """`feeds` as given to a run; none for None.

    Raises:
        FeedError: it is no mapping.
    """
    if feeds is None:
        return {}
    if not isinstance(feeds, Mapping):
        raise FeedError(
            f"feeds is a mapping of tensors, or their names, to values, such as {{x: 1.0}}; got {type(feeds).__name__}"
        )
    return feeds


def feed_target(key: object, graph: Graph | None) -> Tensor:
    """The tensor a key of ``feeds`` names.

    Raises:
        FeedError: it names none, or one that cannot be fed.
    """
    if isinstance(key, str):
        if graph is None:
            raise FeedError(f"the name {key!r} says nothing without a graph; give one to Session(graph), or a Tensor")
        try:
            key = graph.tensor(key)
        except GraphError as error:
            raise FeedError(str(error)) from None
    if not isinstance(key, Tensor):
        raise FeedError(f"feeds are keyed by tensors or their names; got {type(key).__name__} {key!r}")
    if isinstance(key.graph, Subgraph):
        raise FeedError(
            f"{key!r} is inside {key.graph.label}: it has a value per iteration or branch taken, so a run cannot feed "
            f"it; feed what enters the branch or loop instead\n  built at {key.node.location}"
        )
    frame = output_frame(key.node, key.graph.frames.get(key.node, ()))
    if frame:
        raise FeedError(
            f"{key!r} is in {format_frame(frame)}: it may have a value per iteration, so a run cannot feed it; feed "
            f"what enters the frame instead\n  built at {key.node.location}"
        )
    if key.dtype == VARIANT:
        raise FeedError(f"{key!r} holds an opaque value that cannot be fed\n  built at {key.node.location}")
    return key


def feed_targets(keys: Iterable[object], graph: Graph | None) -> tuple[Tensor, ...]:
    """The tensors that keys of ``feeds`` name.

    Raises:
        FeedError: as `feed_target`, or two keys name one tensor.
    """
    targets: dict[Tensor, None] = {}
    for key in keys:
        target = feed_target(key, graph)
        if target in targets:
            raise FeedError(f"{target.name} is fed twice")
        targets[target] = None
    return tuple(targets)


def feed_value(tensor: Tensor, value: Any) -> Any:
    """`value` as the run will see it: a NumPy scalar, or a C-contiguous array nobody else can write to.

    What is in the memory of a card stays there, and is copied when the run starts; see `device_feeds`.

    Raises:
        FeedError: dtype or shape do not fit; nothing is cast silently.
    """
    if isinstance(value, np.generic) and value.dtype == tensor.dtype and tensor.shape in ((), None):
        return value
    if isinstance(value, Tensor):
        raise refusal(tensor, value, "that is a tensor, which has no value yet; fetch it first")
    if isinstance(value, np.ma.MaskedArray):
        raise refusal(tensor, value, "a masked array would lose its mask; fill it first")
    array = _as_typed_array(tensor, value)
    if not is_compatible(array.shape, tensor.shape):
        raise refusal(tensor, value, f"its shape is {format_shape(array.shape)}")
    return array if isinstance(array, ForeignArray) else locked(array)


def locked(array: np.ndarray[Any, Any]) -> Any:
    """A NumPy scalar, or the array itself, which nobody can write to any more."""
    if array.ndim == 0 and array.dtype.kind in "biufc":
        return array[()]
    array.flags.writeable = False
    return array


def _as_typed_array(tensor: Tensor, value: Any) -> np.ndarray[Any, Any] | ForeignArray:
    """A C-contiguous array of the tensor's dtype that shares no memory the caller can write to."""
    if is_exchangeable(value):
        try:
            found = exchanged(value)
        except NotExchangeable as error:
            raise refusal(tensor, value, str(error)) from error.__cause__
        if isinstance(found, ForeignArray):
            if found.dtype != tensor.dtype:
                raise _wrong_dtype(tensor, value, found.dtype)
            return found
        return _copied(tensor, value, found)
    strong = hasattr(value, "dtype") or hasattr(value, "__array__") or hasattr(value, "__array_interface__")
    if not strong:
        try:
            return as_array(value, tensor.dtype)
        except GraphError as error:
            raise refusal(tensor, value, str(error)) from error
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise refusal(tensor, value, f"NumPy cannot read it: {error}") from error
    return _copied(tensor, value, array)


def _copied(tensor: Tensor, value: Any, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy of `array`, which reads `value`, of the tensor's dtype; itself if nobody can ever write to it."""
    native = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    if native != tensor.dtype and not (array.dtype.kind == "U" and tensor.dtype.kind == "T"):
        raise _wrong_dtype(tensor, value, native)
    owned_and_locked = array.base is None and not array.flags.writeable and array.flags.c_contiguous
    if owned_and_locked and native == array.dtype == tensor.dtype:
        return array
    return np.array(array, dtype=tensor.dtype, order="C", copy=True, subok=False)


def _wrong_dtype(tensor: Tensor, value: object, dtype: np.dtype[Any]) -> FeedError:
    return refusal(tensor, value, f"its dtype is {dtype}; convert it yourself if you mean to")


def refusal(tensor: Tensor, value: object, reason: str) -> FeedError:
    """The error that says why `value` is not fed to `tensor`."""
    seen = type(value).__name__
    return FeedError(
        f"cannot feed {tensor.name}: expected {dtype_name(tensor.dtype)}{format_shape(tensor.shape)}, got a {seen}: "
        f"{reason}\n  built at {tensor.node.location}"
    )
