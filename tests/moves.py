"""Invariants of every value that ever moves between a device and the host, in any test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from asyncflow.devices.saved.swap import LEAST_BYTES, SavedMoves

if TYPE_CHECKING:
    from asyncflow.devices.saved.saved_handle import SavedHandle


class AuditedMoves(SavedMoves):
    """Moves that note violations; `broken` lists further ones afterwards."""

    made: ClassVar[list[AuditedMoves]] = []
    found: ClassVar[list[str]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.made.append(self)
        self.has_gone: set[SavedHandle] = set()

    def _goes(self, handle: SavedHandle, out: list[SavedHandle]) -> bool:
        if handle in self.has_gone:
            self.found.append(f"{handle} moves twice")
        if handle.nbytes < min(self.least_bytes, LEAST_BYTES):
            self.found.append(f"{handle} is too small to move")
        goes = super()._goes(handle, out)
        if goes:
            self.has_gone.add(handle)
        return goes

    def broken(self) -> list[str]:
        """Return lines about bytes that went out and are lost, and about bytes that are still counted."""
        now = self.statistics()
        self.has_gone.clear()
        found = []
        if now.moved_out != now.moved_in + now.discarded:
            found.append(f"{now}: not all that went out has come in, or was dropped")
        in_flight = self._leaving + self._ending, self._coming
        if any((now.kept, now.host, now.disk, now.coming, *in_flight)):
            found.append(f"{now}, {self._leaving} leaving, {self._coming} in flight, after the end")
        return [*found, *(f"{space.used} bytes on the {space.name}" for space in self._spaces if space.used)]


def left_over() -> list[str]:
    """Return the violations of all moves since the last call."""
    found = [*AuditedMoves.found, *(line for moves in AuditedMoves.made for line in moves.broken())]
    AuditedMoves.made.clear()
    AuditedMoves.found.clear()
    return found
