"""Context managers that mark the nodes built inside them: names, devices, colocation, control edges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from asyncflow.errors import GraphError
from asyncflow.graph.building.build import SupportsTensor, awaited_node, graph_for, is_symbolic, symbolic
from asyncflow.graph.ir import Node, Tensor, is_name

_DEVICE = re.compile(r"[a-z]+(:(0|[1-9][0-9]*))?")
_LIKE_A_DEVICE = re.compile(r"(?:.*/)?(?:device:)?([a-z]+)[ :]*([0-9]+)?")


@contextmanager
def name_scope(name: str) -> Iterator[str]:
    """Prefixes the names of nodes with ``name/``; scopes nest. Gives the full prefix."""
    if not is_name(name):
        raise GraphError(f"name_scope({name!r}): a scope's name is not empty and has no ':' in it, and is a string")
    graph = graph_for()
    with graph.scoped(name_scope=graph.unique_name(name) + "/") as scope:
        yield scope.name_scope


@contextmanager
def device(spec: str | None) -> Iterator[None]:
    """Asks for nodes to be placed on a device: ``"cpu"``, ``"cuda:1"``; None lifts the constraint.

    Raises:
        GraphError: `spec` does not read like the name of a device. Which ones there are is known when a session runs.
    """
    if not isinstance(spec, str | None):
        raise GraphError(f"device({spec!r}): a device is a string such as 'cpu' or 'cuda:1', or None")
    if spec is not None and not _DEVICE.fullmatch(spec):
        raise GraphError(
            f"device({spec!r}): a device is a kind, such as 'cpu', or a kind and an index, such as 'cuda:1'"
            f"{_device_suggestion(spec)}"
        )
    with graph_for().scoped(device=spec):
        yield


def placed_on(spec: str | None) -> AbstractContextManager[None]:
    """The scope that an argument ``device=`` asks for: `device`, where None asks for nothing and changes nothing."""
    return nullcontext() if spec is None else device(spec)


def _device_suggestion(spec: str) -> str:
    """Guess the meaning of ``CPU:0``, ``cpu0`` or ``/device:CPU:0``."""
    match = _LIKE_A_DEVICE.fullmatch(spec.strip().lower())
    if match is None:
        return ""
    kind, index = match.groups()
    return f"; did you mean {kind if index is None else f'{kind}:{int(index)}'!r}?"


@contextmanager
def colocate_with(x: Tensor | Node | SupportsTensor) -> Iterator[None]:
    """Asks for nodes to be placed on the device of `x`: a tensor, a node or a variable.

    Raises:
        GraphError: `x` is none of these, or belongs to another graph.
    """
    if not (isinstance(x, Node) or is_symbolic(x)):
        raise GraphError(f"colocate_with({x!r}): pass a tensor, a node or a variable; for a device there is af.device")
    graph = graph_for(x)
    node = x if isinstance(x, Node) else symbolic(x).node
    if node.graph.root is not graph.root:
        raise GraphError(f"colocate_with({x!r}): it belongs to another graph; built at {node.location}")
    with graph.scoped(colocated_with=node.name):
        yield


@contextmanager
def control_dependencies(items: Sequence[Tensor | Node | SupportsTensor] | None) -> Iterator[None]:
    """Make nodes built inside run after all `items`; None lifts the enclosing dependencies.

    An item built outside the surrounding branch or loop body runs once, before the whole branch or loop, even if the
    branch is not taken.
    """
    if items is not None and not _is_listing(items):
        raise GraphError(f"control_dependencies: pass a list of tensors and nodes, or None; got {items!r}")
    listed = [] if items is None else list(items)
    graph = graph_for(*listed)
    outer = graph.scope.controls
    with graph.scoped(controls=() if items is None else tuple(dict.fromkeys((*outer, *_local_controls(listed))))):
        yield


def _is_listing(items: object) -> bool:
    return isinstance(items, Iterable) and not is_symbolic(items)


def _local_controls(items: Sequence[Tensor | Node | SupportsTensor]) -> Iterator[Node]:
    graph = graph_for(*items)
    for item in items:
        if not (isinstance(item, Node) or is_symbolic(item)):
            raise GraphError(f"control_dependencies: {item!r} is neither a tensor, a node nor a variable")
        local = awaited_node(symbolic(item), graph)
        if local is not None:
            yield local
