"""Feeds of a run: the tensors fed, and errors for values that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from asyncflow.errors import FeedError, GraphError, a_kind, told
from asyncflow.graph.building.build import TensorLike, as_array
from asyncflow.graph.frames import format_frame, output_frame
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import VARIANT, DType, dtype_name
from asyncflow.graph.values.shapes import format_shape, is_compatible
from asyncflow.values import Array

Feeds: TypeAlias = Mapping[Any, Any]
"""Values by tensor, or tensor name; nested tuples of tensors have nests of values.

Any: the keys of a mapping are of one type alone."""


def as_feeds(feeds: object) -> Feeds:
    """`feeds` as given to a run, with one tensor or name a key; none for None.

    Raises:
        FeedError: it is no mapping, or a value is not a nest like its key.
    """
    if feeds is None:
        return {}
    if not isinstance(feeds, Mapping):
        raise FeedError(
            f"feeds is a mapping of tensors, or their names, to values, such as {{x: 1.0}}; got {type(feeds).__name__}"
        )
    try:
        given = dict(feeds)
    except Exception as error:
        raise FeedError(f"feeds, {a_kind(type(feeds))}, cannot be read: {told(error)}") from error
    return _opened(given) if any(isinstance(key, tuple) for key in given) else given


def _opened(feeds: Feeds) -> Feeds:
    """Return `feeds` with an entry for each tensor in keys that are tuples."""
    opened: dict[Any, Any] = {}
    for key, value in feeds.items():
        keys, structure = nest.flatten(key) if isinstance(key, tuple) else ([key], nest.LEAF)
        try:
            values = nest.flatten_like(structure, value, nested_leaves=True)
        except nest.StructureMismatch as error:
            raise FeedError(f"the value of a feed is a nest like its key, {key!r}: {error}") from None
        for each, part in zip(keys, values, strict=True):
            if each in opened:
                raise FeedError(f"{each!r} is fed twice")
            opened[each] = part
    return opened


def feed_target(key: object, graph: Graph | None) -> Tensor:
    """The tensor a key of ``feeds`` names.

    Raises:
        FeedError: the key names no tensor, or a tensor that cannot be fed.
    """
    if isinstance(key, str):
        if graph is None:
            raise FeedError(f"the name {key!r} says nothing without a graph; give one to Session(graph), or a Tensor")
        try:
            key = graph.tensor(key)
        except GraphError as error:
            raise FeedError(str(error)) from None
    if not isinstance(key, Tensor):
        raise FeedError(
            f"feeds are keyed by tensors or their names; got {type(key).__name__} {key!r}"
            + ("; write feeds={**graph.feeds(data), ...}" if hasattr(key, "feeds") else "")
            + ("; a variable is not fed: use w.assign or session.swap_variables" if hasattr(key, "assign_add") else "")
        )
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


def fed_array(tensor: Tensor, value: TensorLike) -> Array:
    """A fresh NumPy array of `value`, for a run on the host.

    Raises:
        FeedError: dtype or shape do not fit; nothing is cast silently.
    """
    try:
        array, typed = as_array(value, tensor.dtype), as_array(value, None) if hasattr(value, "dtype") else None
    except GraphError as error:
        raise refusal(tensor, value, error.reason) from error
    if typed is not None and typed.dtype != tensor.dtype:
        raise wrong_dtype(tensor, value, typed.dtype)
    if not is_compatible(array.shape, tensor.shape):
        raise wrong_shape(tensor, value, array.shape)
    return array


def wrong_shape(tensor: Tensor, value: object, shape: tuple[int, ...]) -> FeedError:
    """The error for a value of another shape."""
    return refusal(tensor, value, f"its shape is {format_shape(shape)}")


def wrong_dtype(tensor: Tensor, value: object, dtype: DType) -> FeedError:
    """The error for a value of another dtype."""
    return refusal(tensor, value, f"its dtype is {dtype}; convert it yourself if you mean to")


def refusal(tensor: Tensor, value: object, reason: str) -> FeedError:
    """The error that says why `value` is not fed to `tensor`."""
    wanted = f"{dtype_name(tensor.dtype)}{format_shape(tensor.shape)}"
    return FeedError(
        f"cannot feed {tensor.name}: expected {wanted}, got {a_kind(type(value))}: {reason}\n"
        f"  built at {tensor.node.location}"
    )
