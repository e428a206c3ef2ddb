"""Resources: named things that survive a run, such as variables and queues."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from typing import Any, Self

from asyncflow.graph.ir import Node

_serial = itertools.count()


class Resource:
    """A named thing that nodes refer to and whose state a session keeps.

    A resource belongs to no graph: any graph may use it. Its state lives in the session, or, when `container` is
    given, in the container of that name, which all sessions of the process share. A copy is the resource itself.

    Attributes:
        name: for messages.
        container: None for a state of each session's own.
        serial: what tells it from others.
        allows_races: whether its reads and writes are meant to have no order.
    """

    def __init__(self, name: str, container: str | None) -> None:
        self.name = name
        self.container = container
        self.serial = next(_serial)
        self.allows_races = False

    @property
    def effect_key(self) -> Hashable:
        """The key that tells states apart: two resources may share one."""
        return self

    def create_state(self) -> Any:
        """The initial state; called once per session (or container)."""
        raise NotImplementedError

    def __copy__(self) -> Self:
        return self  # its state in each session is found by its serial, and goes with it

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def resources_of(node: Node) -> Iterator[Resource]:
    """The resources that `node` touches."""
    return (value for value in node.attrs.values() if isinstance(value, Resource))
