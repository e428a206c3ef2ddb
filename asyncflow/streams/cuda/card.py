"""Streams and events of a physical card, which outlive the sessions that use them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncflow.streams.cuda.flags import Flags
from asyncflow.streams.cuda.pooled_event import EventPool

if TYPE_CHECKING:
    import asyncio

    from asyncflow.streams.cuda.cupy_types import Cupy, Raw
    from asyncflow.streams.cuda.foreign import ForeignWait


@dataclass(slots=True, eq=False)
class PhysicalCard:
    """Streams and events of one physical CUDA device; they outlive the sessions that use them.

    Attributes:
        cupy: the module.
        physical: the device's CUDA ordinal.
        events: of its streams.
        awaited: open waits for streams of other libraries, by event loop and handle.
    """

    cupy: Cupy
    physical: int
    events: EventPool
    awaited: dict[tuple[asyncio.AbstractEventLoop, int], ForeignWait] = field(default_factory=dict)
    _free: list[Raw] = field(default_factory=list)
    _made: list[Raw] = field(default_factory=list)  # includes streams never returned: no stream is ever destroyed

    def take_stream(self) -> Raw:
        """Take a free ``cupy.cuda.Stream``, or make one."""
        if self._free:
            return self._free.pop()
        with self.cupy.cuda.Device(self.physical):
            raw = self.cupy.cuda.Stream(non_blocking=True)
        self._made.append(raw)
        return raw

    def give_back(self, raw: Raw) -> None:
        """Return a stream whose work is done and which no caller uses any more."""
        self._free.append(raw)


_cards: dict[tuple[Cupy, int], PhysicalCard] = {}
"""By CuPy module, of which there are several in tests, and CUDA ordinal."""


def card_of(cupy: Cupy, physical: int) -> PhysicalCard:
    """The card of that number."""
    card = _cards.get((cupy, physical))
    if card is None:
        card = _cards[cupy, physical] = PhysicalCard(cupy, physical, EventPool(cupy, Flags(cupy)))
    return card
