"""Resources: named things that survive a run, such as variables and queues."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, ClassVar, Self

from asyncflow.errors import GraphError, a_kind, told
from asyncflow.graph.ir import Attrs, Node, is_name

_serial = itertools.count()
_kinds: dict[str, Callable[[Attrs], Resource]] = {}


class Resource:
    """A named object that nodes refer to and whose state a session keeps.

    A resource belongs to no graph: any graph may use it. Its state lives in the session, or, when `container` is
    given, in the container of that name, which all sessions of the process share. A copy is the resource itself.

    Args:
        name: for messages, and the key inside a container; None generates one.
        container: None for a state of each session's own.

    Raises:
        GraphError: `name` is no name, or is missing where it is needed.

    Attributes:
        noun: one of its kind, in a sentence.
        serial: what tells it from others.
        allows_races: whether its reads and writes are meant to have no order.
        waits: True if its nodes wait in line for nodes of other runs (`asyncflow.state.waiting.lines`). Its state is
            then on the host: no device is the home of its nodes, and an atomic run does not keep others from it.
        nodes: methods that make nodes, by the equivalent methods outside of graphs, for errors.
    """

    noun: ClassVar[str] = "resource"
    waits: ClassVar[bool] = False
    nodes: ClassVar[Mapping[str, str]] = {}

    def __init__(self, name: str | None, container: str | None) -> None:
        kind = type(self).__name__
        if name is not None and not is_name(name):
            raise GraphError(f"{kind}(name={name!r}): a name is a string that is not empty and has no ':' in it")
        if container is not None and name is None:
            raise GraphError(f"a {self.noun} in container {container!r} needs a name, so that other sessions find it")
        self.serial = next(_serial)
        self.name = name or f"{self.noun}_{self.serial}"
        self.container = container
        self.allows_races = False

    @property
    def effect_key(self) -> Hashable:
        """Key that tells states apart: resources in a container may share one."""
        return (self.noun, self.serial) if self.container is None else ("container", self.container, self.name)

    @property
    def signature(self) -> str:
        """Kind of the resource, equal for resources that may share a state in a container."""
        return a_kind(type(self))

    def create_state(self) -> Any:
        """The initial state; called once per session (or container)."""
        raise NotImplementedError

    def described(self) -> Attrs | None:
        """Return the description for a text, for the function that `revives` registered; None without one."""
        return None

    def __copy__(self) -> Self:
        return self  # sessions find its state by its serial, and drop the state with it

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def waits_in_line(node: Node) -> bool:
    """Return True if the kernel of `node` may return a place in line instead of its result."""
    return node.op.conduct.waits_in_line or any(resource.waits for resource in resources_of(node))


def resources_of(node: Node) -> Iterator[Resource]:
    """The resources that `node` touches."""
    return (value for value in node.attrs.values() if isinstance(value, Resource))


def revives(kind: str, make: Callable[[Attrs], Resource]) -> None:
    """Registers how resources of a class are made of what `Resource.described` says, which comes from any text."""
    _kinds[kind] = make


def revived(kind: str, attrs: Attrs) -> Resource:
    """Make a resource from its description in a text.

    Raises:
        GraphError: there is no such kind, or there are other attrs to it.
    """
    if kind not in _kinds:
        raise GraphError(f"no kind of resource is named {kind!r}; there are {', '.join(sorted(_kinds))}")
    try:
        return _kinds[kind](attrs)
    except GraphError:
        raise
    except Exception as error:  # a text may contain any attrs
        raise GraphError(f"this is no {kind}: {told(error)}") from error
