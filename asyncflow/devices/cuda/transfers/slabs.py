"""Pinned memory that grows: slabs of it, for saved values that are away from a card.

Pinning takes milliseconds and may stall the card, so it is done on a thread while waiting code has no room. Each slab
is as large as all before it together, up to a limit. Pinned memory stays, for later values, until the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.devices.cuda.transfers.pinned import PINNED_BYTES, PinnedBuffer, PinnedSlab

if TYPE_CHECKING:
    from asyncflow.streams.cuda.cupy_types import Cupy

FIRST_BYTES = 16 << 20
"""The size of the first slab."""


class PinnedSlabs:
    """The slabs of one device; `take` and `grow` may be called on any thread."""

    __slots__ = ("_cupy", "_slabs")

    def __init__(self, cupy: Cupy) -> None:
        self._cupy = cupy
        self._slabs: list[PinnedSlab] = []

    def take(self, nbytes: int) -> PinnedBuffer | None:
        """Return a buffer of `nbytes` bytes, or None without room. It goes back with its last reference."""
        fitting = (slab.take(nbytes) for slab in self._slabs if nbytes <= slab.nbytes)
        return next((buffer for buffer in fitting if buffer is not None), None)

    def is_low(self, limit: int | None) -> bool:
        """Return True if most is in use, and more than `limit` is not pinned yet."""
        nbytes = sum(slab.nbytes for slab in self._slabs)
        return 4 * sum(slab.free_bytes for slab in self._slabs) < nbytes and (limit is None or nbytes < limit)

    def grow(self, nbytes: int) -> None:
        """Pin at least `nbytes` more bytes; blocks.

        Raises:
            RuntimeError: the system refuses.
        """
        together = sum(slab.nbytes for slab in self._slabs)
        self._slabs.append(PinnedSlab(self._cupy, max(nbytes, FIRST_BYTES, min(together, PINNED_BYTES))))

    def close(self) -> None:
        """Give all slabs back to the system, except slabs with a part still in use; blocks."""
        slabs, self._slabs = self._slabs, []
        for slab in slabs:
            if slab.free_bytes == slab.nbytes:
                slab.close()
