"""Device names (``cuda:1``), and partial names that constrain placement (``cuda``)."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from asyncflow.devices.kinds import find_kind, kind_names
from asyncflow.errors import PlacementError

_PATTERN = re.compile(r"([a-z]+)(?::(0|[1-9][0-9]*))?")
_OTHER_WORDS = {"gpu": "cuda", "host": "cpu", "simulated": "sim"}


@dataclass(frozen=True, slots=True, order=True)
class DeviceName:
    """The full name of one device: its kind and its index among that kind, from 0."""

    kind: str
    index: int

    @classmethod
    def parse(cls, text: str) -> DeviceName:
        """Parse a full name, such as ``cpu:0``.

        Raises:
            PlacementError: ``text`` is no device name, or has no index.
        """
        kind, index = _split(text)
        if index is None:
            raise PlacementError(f"device name {text!r} has no index where one device is meant; say {kind + ':0'!r}")
        return cls(kind, index)

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A constraint on devices: an index that is None fits any."""

    kind: str
    index: int | None

    @classmethod
    def parse(cls, text: str) -> DeviceSpec:
        """Read a name that may leave out the index, such as ``cuda`` or ``cuda:1``.

        Raises:
            PlacementError: ``text`` is neither.
        """
        return cls(*_split(text))

    def matches(self, name: str) -> bool:
        """Return True if the device of this full name satisfies the constraint.

        Raises:
            PlacementError: ``name`` is no full device name.
        """
        device = DeviceName.parse(name)
        return self.kind == device.kind and self.index in (None, device.index)

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


def _split(text: object) -> tuple[str, int | None]:
    match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise PlacementError(f"{text!r} is no device name; {_accepted()}")
    kind, index = match[1], match[2]
    if find_kind(kind) is None:
        raise PlacementError(f"unknown kind of device in {text!r}{_suggestion(kind)}; {_accepted()}")
    return kind, None if index is None else int(index)


def _accepted() -> str:
    return f"accepted are a kind ({', '.join(kind_names())}) or a kind and an index (cpu:0, cuda:1, sim:3)"


def _suggestion(kind: str) -> str:
    close = [_OTHER_WORDS[kind]] if kind in _OTHER_WORDS else difflib.get_close_matches(kind, kind_names(), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
