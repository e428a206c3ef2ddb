"""The values that a run may return: reads the nest of fetches, and turns run-time values into values for the user."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncflow.compiler.plan import Dead
from asyncflow.compiler.program.request import Fetch
from asyncflow.devices.values import DeviceArray
from asyncflow.errors import FeedError, FetchError, GraphError
from asyncflow.graph.building.build import is_symbolic
from asyncflow.graph.frames import format_frame, output_frame
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.values import Array, Nest, Value


class OnDevice:
    """A fetch whose value stays on its device; made by `on_device`. Fetches of one tensor are equal.

    Attributes:
        fetch: the tensor, variable or name.
    """

    __slots__ = ("fetch",)

    def __init__(self, fetch: Nest) -> None:
        self.fetch = fetch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnDevice) and other.fetch is self.fetch

    def __hash__(self) -> int:
        return hash((OnDevice, self.fetch))

    def __repr__(self) -> str:
        return f"on_device({self.fetch!r})"


def on_device(fetches: Nest) -> Nest:
    """Return fetches whose values stay in the memory of their devices: ``await session.run([loss, af.on_device(y)])``.

    From a CUDA device comes the ``cupy.ndarray`` itself, without a copy; from a CPU the NumPy array, also for rank 0.
    Either has ``__dlpack__``, so that ``torch.from_dlpack(value)`` is free. Values that are on the host anyway, such as
    counters, come as NumPy arrays from any device.

    Do not write to it: a variable, a constant or another fetch may be the same array. Its memory is used again once it
    and all views of it are gone. New uses come after the work given to CuPy's and PyTorch's current streams by then.
    Wait yourself for other streams that read it.

    Args:
        fetches: any nest of tensors, variables and names, for `Session.run` and `Session.prepare`.

    Returns:
        The same nest of fetches.

    Raises:
        FetchError: the nest contains itself.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     y = af.constant([1.0, 2.0]) * 2
    >>> async def main():
    ...     async with af.Session() as session:
    ...         return await session.run(on_device(y))
    >>> af.run(main())
    array([2., 4.])
    """
    leaves, structure = _flatten(fetches)
    return structure.unflatten([OnDevice(leaf) for leaf in leaves])


_NO_NODES = Graph()
"""The graph of a run that fetches nothing but variables: they belong to none."""


def read_fetches(fetches: Nest, graph: Graph | None) -> tuple[list[Fetch], nest.Structure, tuple[int, ...]]:
    """Return the fetches, their nest, and the indexes of fetches that stay on their device; names are looked up in
    `graph`.

    Raises:
        FetchError: a leaf that cannot be fetched; the message says which and why.
    """
    leaves, structure = _flatten(fetches)
    staying = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, OnDevice))
    return [_read_fetch(leaf, graph) for leaf in leaves], structure, staying


def read_streamed(fetches: Nest, graph: Graph | None) -> tuple[list[Tensor], nest.Structure]:
    """Return the tensors to stream and their nest; names are looked up in `graph`.

    Raises:
        FetchError: there are none, or a tensor is not inside a loop, or they belong to several graphs.
    """
    leaves, structure = _flatten(fetches)
    tensors = [_read_streamed(leaf, graph) for leaf in leaves]
    if not tensors or any(tensor.graph is not tensors[0].graph for tensor in tensors):
        raise FetchError("stream takes tensors of one loop body; got none, or tensors of several bodies")
    return tensors, structure


def _flatten(fetches: Nest) -> tuple[list[Nest], nest.Structure]:
    try:
        return nest.flatten(fetches)
    except GraphError:
        raise FetchError("the fetches are nested too deep, or contain themselves") from None


def _named(name: str, graph: Graph | None) -> Tensor | Node:
    if graph is None:
        raise FetchError(f"the name {name!r} says nothing without a graph; give one to Session(graph)")
    try:
        return graph.named(name)
    except GraphError as error:
        raise FetchError(str(error)) from None


def _read_streamed(leaf: object, graph: Graph | None) -> Tensor:
    if isinstance(leaf, OnDevice):
        raise FetchError(
            f"stream has no on_device: its items come to the host, one an iteration; stream {leaf.fetch!r} itself, or "
            "return it from the loop and run af.on_device of what the loop gives"
        )
    if isinstance(leaf, str):
        leaf = _named(leaf, graph)
    if not isinstance(leaf, Tensor):
        raise FetchError(f"stream takes tensors inside a loop body; got {type(leaf).__name__} {leaf!r}")
    body: Graph | None = leaf.graph
    while isinstance(body, Subgraph) and not body.label.endswith("/body"):
        body = body.parent
    if not isinstance(body, Subgraph):
        raise FetchError(f"{leaf!r} is not inside a loop; fetch it with session.run\n  built at {leaf.node.location}")
    return leaf


def _read_fetch(leaf: object, graph: Graph | None) -> Fetch:
    stays = isinstance(leaf, OnDevice)
    if isinstance(leaf, OnDevice):
        leaf = leaf.fetch
        if isinstance(leaf, OnDevice):
            raise FetchError(f"on_device({leaf!r}) is on_device twice; once is enough")
    if isinstance(leaf, str):
        leaf = _named(leaf, graph)
    if stays and isinstance(leaf, Node):
        raise FetchError(f"{leaf!r} is a node, which has no value to leave on its device; fetch the node itself")
    if not (isinstance(leaf, Node) or is_symbolic(leaf)):
        raise FetchError(
            f"a fetch is a tensor, a node, a variable or a name, in any nest; got {type(leaf).__name__} {leaf!r}"
        )
    if isinstance(leaf, Tensor | Node):
        _refuse_inner(leaf)
    if isinstance(leaf, Tensor) and leaf.dtype == VARIANT:
        raise FetchError(
            f"{leaf!r} holds an opaque value, such as a TensorArray; fetch a value read from it, such as "
            f"array.stack()\n  built at {leaf.node.location}"
        )
    return leaf


def _refuse_inner(leaf: Tensor | Node) -> None:
    body = leaf.graph
    node = leaf.node if isinstance(leaf, Tensor) else leaf
    location = node.location
    frame = output_frame(node, body.frames.get(node, ()))
    if frame and isinstance(leaf, Tensor):
        raise FetchError(
            f"{leaf!r} is in {format_frame(frame)}: it may have a value per iteration; fetch what an exit takes out of "
            f"it\n  built at {location}"
        )
    if not isinstance(body, Subgraph):
        return
    raise FetchError(
        f"{leaf!r} is inside {body.label}: it has no value, or one per iteration, once the run is over; return it from "
        f"the branch or body, or iterate over it with `async for value in session.stream(x)`\n  built at {location}"
    )


def graph_of(fetches: Sequence[Fetch], feeds: Sequence[Tensor], graph: Graph | None) -> Graph:
    """Return the one root graph that all fetches and fed tensors belong to.

    Raises:
        FetchError: there are two, or nothing is fetched or fed and there is no graph.
        FeedError: a fed tensor belongs to another graph.
    """
    for fetch in fetches:
        if isinstance(fetch, Tensor | Node):
            root = fetch.graph.root
            if graph is not None and root is not graph:
                raise FetchError(f"{fetch!r} belongs to another graph than this session or the other fetches")
            graph = root
    for tensor in feeds:
        if graph is not None and tensor.graph.root is not graph:
            raise FeedError(
                f"cannot feed {tensor.name}, built at {tensor.node.location}: it belongs to another graph than this "
                "session or the fetches"
            )
        graph = tensor.graph.root
    if graph is not None:
        return graph
    if not fetches:
        raise FetchError(
            "nothing is fetched, and no graph is known; fetch something, or give a graph to Session(graph)"
        )
    return _NO_NODES


def user_values(
    fetches: Sequence[Fetch], positions: Sequence[int | None], values: Sequence[Value], *, allow_dead: bool
) -> list[Value]:
    """The results of a run for `fetches`; `positions` says which of the values each one is, None for a node.

    Raises:
        FetchError: a value is dead.
    """
    results: list[Value] = []
    handed_out: set[int] = set()
    for fetch, position in zip(fetches, positions, strict=True):
        value = None if position is None else values[position]
        results.append(value if position is None else user_value(fetch, value, id(value) in handed_out, allow_dead))
        handed_out.add(id(value))
    return results


def user_value(fetch: Fetch, value: Value, shared: bool, allow_dead: bool) -> Value:
    """Return a run-time value in the user's form: a NumPy scalar, or an array that nothing else shares.

    Args:
        fetch: the fetch.
        value: its value in the run.
        shared: other code has this very value.
        allow_dead: give None for a dead value.

    Raises:
        FetchError: the value is dead: it lies on a branch that was not taken.
    """
    if isinstance(value, Dead):
        if allow_dead:
            return None
        name = fetch.name if isinstance(fetch, Tensor) else repr(fetch)
        raise FetchError(
            f"{name} is dead: it depends on a branch that was not taken, at the switch {value.killer} built at "
            f"{value.location}; merge the branches, or pass allow_dead=True to get None"
        )
    if isinstance(value, np.ndarray):
        if value.ndim == 0 and value.dtype.kind in "biufc":
            return value[()]
        if shared or not is_fresh(value):
            return value.copy()
    return value


def is_fresh(array: Array) -> bool:
    """Return True if a run made the array, for no other use: constants, variables and feeds are locked, a view has a
    base.
    """
    return array.flags.writeable and array.base is None


def exchangeable(value: Value) -> Value:
    """The value of a fetch that stays `on_device`, with ``__dlpack__``."""
    if isinstance(value, DeviceArray):
        return value.lend()
    return np.asarray(value) if isinstance(value, np.generic) else value
