"""A visible side effect for conformance programs: ops that append to a Python list when they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import asyncflow as af

if TYPE_CHECKING:
    from asyncflow.graph.building.build import TensorLike


class Journal:
    """A list and the ops that write it; all of them touch one resource, so ordered graphs run them as written."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

        # A coroutine, so that it stays on the event loop: a plain function that once was slow would go to a thread.
        @af.op(outputs=(), stateful=True, name="note")
        async def append(*values: np.generic, label: str) -> None:
            numbers = tuple(value.item() for value in values)
            self.entries.append((label, *numbers) if numbers else label)

        self._append = append

    def note(self, label: str, *values: TensorLike) -> af.Node:
        """A node that appends `label`, or a tuple of it and the values."""
        node: af.Node = self._append(*values, label=label)
        return node

    def values(self, label: str) -> list[Any]:
        """Return the single values that were noted under `label`, in order."""
        return [entry[1] for entry in self.entries if isinstance(entry, tuple) and entry[0] == label]
