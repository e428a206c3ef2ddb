"""Kinds of device: the package's own, and kinds that others offer.

A kind is found by its name, the first half of ``cuda:1``. Another package offers one as an entry point of the group
``asyncflow.devices``, whose name is the kind's and whose object is a `DeviceKind`; it is looked for when its name is
first met. A program that has one of its own calls `register_kind`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from asyncflow.devices.protocol import Device
from asyncflow.devices.saved.saved_handle import Space
from asyncflow.errors import PlacementError

ENTRY_POINTS = "asyncflow.devices"
"""The group of entry points that name kinds."""

_NAME = re.compile(r"[a-z]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDescription:
    """One line of ``asyncflow devices``."""

    name: str
    """Name such as ``cpu:0``; a kind alone if there is no such device."""
    available: bool
    detail: str
    """The device in words; where it is not available, why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """The wishes of a session for the devices that it opens.

    Attributes:
        memory_limit: bytes that each may hold; None for all of its memory.
        compute_streams: how many streams of kernels each has.
        sharing: how many devices of the kind the session opens.
        host: where saved values go.
        spill_directory: where they go beyond that; None for nowhere.
    """

    memory_limit: int | None = None
    compute_streams: int = 1
    sharing: int = 1
    host: Space = field(default_factory=lambda: Space("host"), compare=False)
    spill_directory: str | None = None


class DeviceKind(ABC):
    """A kind of device: opens the devices of its name. It is made once, and knows nothing of sessions.

    Attributes:
        name: lower-case letters, the first half of its devices' names.
    """

    name: str

    @abstractmethod
    def open(self, index: int, options: DeviceOptions) -> Device:
        """Make device `index` of the kind, without blocking: an asynchronous device gets ready in its own ``open``.

        Raises:
            ValueError: an option is none that it can have.
        """

    def why_not(self, index: int) -> str | None:
        """Return the reason why there is no such device here, to follow its name and a colon; None if there is one."""
        del index
        return None

    def describe(self) -> Sequence[DeviceDescription]:
        """The lines of ``asyncflow devices``: what this machine has of the kind."""
        missing = self.why_not(0)
        if missing is not None:
            return (DeviceDescription(name=self.name, available=False, detail=f"off: {missing}"),)
        return (DeviceDescription(name=f"{self.name}:0", available=True, detail=f"of {type(self).__module__}"),)


_kinds: dict[str, DeviceKind] = {}


def register_kind(kind: DeviceKind) -> None:
    """Register a kind, so that its devices can be named in this process.

    Raises:
        TypeError: `kind` is no `DeviceKind`.
        ValueError: its name is not of lower-case letters, or is that of another kind.
    """
    if not isinstance(kind, DeviceKind):
        raise TypeError(f"a kind of device is an instance of a subclass of DeviceKind; got {kind!r}")
    if not _NAME.fullmatch(str(kind.name)):
        raise ValueError(f"the name of a kind of device is of lower-case letters, such as 'cuda'; got {kind.name!r}")
    known = _kinds.setdefault(kind.name, kind)
    if known is not kind:
        raise ValueError(f"a kind of device named {kind.name!r} is registered already: {known!r}")


def find_kind(name: str) -> DeviceKind | None:
    """The kind of that name; None if there is none.

    Raises:
        PlacementError: a package offers it, and it cannot be imported.
    """
    if name not in _kinds and name in _offered():
        _load(_offered()[name])
    return _kinds.get(name)


def kind_names() -> tuple[str, ...]:
    """The names of all kinds, the package's own first."""
    return tuple(dict.fromkeys((*_kinds, *_offered())))


@cache
def _offered() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=ENTRY_POINTS)}


def _load(offered: EntryPoint) -> None:
    try:
        kind = offered.load()
        if getattr(kind, "name", offered.name) != offered.name:
            raise ValueError(f"it is named {kind.name!r}")
        register_kind(kind)
    except Exception as error:  # other packages' code may raise anything
        raise PlacementError(
            f"the kind of device {offered.name!r}, which the entry point {offered.value!r} offers, cannot be used: "
            f"{type(error).__name__}: {error}"
        ) from error
