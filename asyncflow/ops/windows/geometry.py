"""Places of windows: how many there are along each axis, and which elements stand at one place of all of them.

A kernel goes over the places of a window rather than over windows: at place k, output i has element
``stride * i + dilation * k - before`` of the input. Elements outside of the input are left out, so no kernel pads.
For 5 elements, windows of 3, stride 2 and one zero before: place 0 joins outputs 1 and 2 with elements 1 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from asyncflow.errors import ShapeError

Extents: TypeAlias = tuple[int, ...]
Slices: TypeAlias = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows along the last axes: an attribute of ops, with an item for each of these axes.

    Attributes:
        stride: distance of windows.
        before: elements that are added in front; below 0, elements are left out there.
        after: likewise behind.
        dilation: distance of the elements of a window.
        ceil: the last window may reach beyond the added elements, if it begins in front of them.
    """

    stride: Extents
    before: Extents
    after: Extents
    dilation: Extents
    ceil: bool = False

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.stride)

    def raised(self) -> Windows:
        """Return the same windows along one more axis in front, which has a single element."""
        return Windows((1, *self.stride), (0, *self.before), (0, *self.after), (1, *self.dilation), self.ceil)

    def counts(self, sizes: Sequence[int | None], kernel: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the number of windows along each axis, None where an extent is not known.

        Raises:
            ShapeError: a window is larger than the input with added elements.
        """
        return tuple(self._count(axis, *each) for axis, each in enumerate(zip(sizes, kernel, strict=True)))

    def _count(self, axis: int, size: int | None, kernel: int | None) -> int | None:
        if kernel == 0:
            raise ShapeError(f"a window has one element or more along each axis; axis {axis} has none")
        if size == 0:
            return 0
        if size is None or kernel is None:
            return None
        before, after, stride = self.before[axis], self.after[axis], self.stride[axis]
        reach = self.dilation[axis] * (kernel - 1) + 1
        room = before + size + after - reach
        if room < 0:
            raise ShapeError(
                f"a window reaches over {reach} elements along spatial axis {axis}, which has {size}, and {before} and "
                f"{after} with padding"
            )
        found = (room + (stride - 1) * self.ceil) // stride + 1
        return found - (self.ceil and (found - 1) * stride >= size + before)

    def places(
        self, kernel: Extents, sizes: Extents, outputs: Sequence[slice]
    ) -> Iterator[tuple[Extents, Slices, Slices]]:
        """Yield each place of a window, the outputs that have an element there, counted from the first, and these
        elements.
        """
        along = [
            [self._elements(axis, k, sizes[axis], outputs[axis]) for k in range(n)] for axis, n in enumerate(kernel)
        ]
        for found in product(*along):
            yield tuple(k for k, *_ in found), tuple(o for _, o, _ in found), tuple(i for *_, i in found)

    def _elements(self, axis: int, place: int, size: int, outputs: slice) -> tuple[int, slice, slice]:
        stride, offset = self.stride[axis], self.dilation[axis] * place - self.before[axis]
        first = max(outputs.start, -(offset // stride))
        last = max(first, min(outputs.stop, (size - 1 - offset) // stride + 1))
        there = slice(first - outputs.start, last - outputs.start)
        start = stride * first + offset
        return place, there, slice(start, start + stride * (last - first), stride)


def tiles(extents: Extents, room: int) -> Iterator[Slices]:
    """Yield parts of at most `room` elements, one at least, that together are everything.

    Parts are long along the last axes. The first axis changes fastest.
    """
    steps: list[int] = []
    for extent in reversed(extents):
        most = max(1, min(extent, room // math.prod(steps)))
        steps.insert(0, -(-extent // -(-extent // most)))  # parts of one size, as near as may be
    along = [
        [slice(first, min(first + step, extent)) for first in range(0, extent, step)]
        for extent, step in zip(extents, steps, strict=True)
    ]
    return (part[::-1] for part in product(*along[::-1]))
