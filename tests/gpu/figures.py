"""Figures that a test measured, for people; and the limits that hold on a card."""

from __future__ import annotations

from typing import Any


class Figures(dict[str, Any]):
    """A mapping from a name, with the unit, to a value.

    Attributes:
        is_real: True if a card was measured. Times of the stand-in say nothing.
    """

    def __init__(self, *, is_real: bool) -> None:
        super().__init__()
        self.is_real = is_real
        self.broken: list[str] = []

    def below(self, name: str, value: float, limit: float) -> None:
        """Note a value that is to be below `limit` on a card; `check` says whether all were."""
        self[name] = value
        if not value < limit:
            self.broken.append(f"{name} is {value:.4g}, and {limit:.4g} is the limit")

    def above(self, name: str, value: float, limit: float) -> None:
        """Note a value that is to be above `limit` on a card."""
        self[name] = value
        if not value > limit:
            self.broken.append(f"{name} is {value:.4g}, and is to be more than {limit:.4g}")

    def check(self) -> None:
        """Raises AssertionError, on a card, for limits that were not kept."""
        assert not (self.is_real and self.broken), "; ".join(self.broken)
