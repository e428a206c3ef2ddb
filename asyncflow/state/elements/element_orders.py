"""In which order the elements of a queue leave it: as they came, at random, by priority, or with those like them.

An element is a tuple of values, one for each leaf of the queue's spec.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import itemgetter
from typing import Protocol, TypeAlias, cast

from asyncflow.values import Array, Nest

Element: TypeAlias = tuple[Array, ...]


class ElementOrder(Protocol):
    """The elements of a queue."""

    def __len__(self) -> int: ...

    @property
    def has(self) -> Callable[[int], bool] | None:
        """Function that returns True if `count` elements belong together; None if any elements do. The caller has
        checked that there are enough elements.
        """

    @property
    def entries(self) -> Callable[[Sequence[Element]], Sequence[Nest]] | None:
        """Makes what `add` takes of elements, and may fail; None where it takes elements."""

    @property
    def add(self) -> Callable[[Sequence[Nest]], object]:
        """Adds entries, and never fails."""

    def remove(self, count: int) -> list[Element]:
        """Remove the next `count` elements, of which there are enough."""

    @property
    def last(self) -> object:
        """The places that the last `remove` took its elements from, for `give_back`."""

    def give_back(self, elements: Sequence[Element], where: object) -> None:
        """Put removed elements back to their places, whatever was removed or given back in between."""

    def capture(self) -> tuple[tuple[Element, ...], object]:
        """Return the elements, in an order in which they can be added again, and the further state of the order."""

    def restore(self, elements: Sequence[Element], extra: object) -> None:
        """Restore the state that `capture` returned."""


class ArrivalOrder(deque[Element]):
    """First in, first out."""

    has = entries = None
    add = deque[Element].extend

    def __init__(self) -> None:
        super().__init__()
        self._removed = 0  # number of elements removed for the first time, which numbers them
        self._returned: list[int] = []  # numbers of elements given back, which come first
        self.last: object = 0  # numbers of the elements removed last; of the newest ones, the number behind them

    def remove(self, count: int) -> list[Element]:  # type: ignore[override]
        """From the front."""
        if self._returned:
            known, self._returned = self._returned[:count], self._returned[count:]
            new = count - len(known)
            self.last = [*known, *range(self._removed, self._removed + new)]
            self._removed += new
        else:
            self.last = self._removed = self._removed + count
        return [self.popleft()] if count == 1 else [self.popleft() for _ in range(count)]

    @property
    def removed(self) -> tuple[int, list[int]]:
        """The number of elements that have ever left, and the numbers of elements given back."""
        return self._removed, self._returned

    def give_back(self, elements: Sequence[Element], where: object) -> None:
        """In front, in the order in which they first came."""
        numbers = range(where - len(elements), where) if isinstance(where, int) else cast("list[int]", where)
        for number, element in zip(numbers, elements, strict=True):
            index = bisect_left(self._returned, number)
            self._returned.insert(index, number)
            self.insert(index, element)

    def capture(self) -> tuple[tuple[Element, ...], object]:
        """First first."""
        return tuple(self), None

    def restore(self, elements: Sequence[Element], extra: object) -> None:
        """As captured."""
        self.clear()
        self._returned = []
        self.extend(elements)


class RandomOrder:
    """Random order: each element present is equally likely to be next.

    Args:
        seed: of the choices; None draws one.
    """

    has = entries = last = None

    def __init__(self, seed: int | None) -> None:
        self._elements: list[Element] = []
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._elements)

    def add(self, elements: Sequence[Element]) -> None:
        """Add elements at the end, which has no meaning here."""
        self._elements.extend(elements)

    def remove(self, count: int) -> list[Element]:
        """Remove elements, each chosen among the remaining ones."""
        elements, taken = self._elements, []
        for _ in range(count):
            place = self._random.randrange(len(elements))
            taken.append(elements[place])
            elements[place] = elements[-1]
            elements.pop()
        return taken

    def give_back(self, elements: Sequence[Element], where: object) -> None:
        """To the others: any of them is next."""
        self._elements.extend(elements)

    def capture(self) -> tuple[tuple[Element, ...], object]:
        """Return the elements, and the state of the random generator."""
        return tuple(self._elements), self._random.getstate()

    def restore(self, elements: Sequence[Element], extra: object) -> None:
        """As captured."""
        self._elements = list(elements)
        if extra is not None:
            self._random.setstate(extra)  # type: ignore[arg-type]


class PriorityOrder:
    """Priority order: the smallest first value first; equal ones in order of arrival."""

    has = None

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Element]] = []
        self._count = 0
        self.last: list[int] = []  # arrival numbers of the elements removed last

    def __len__(self) -> int:
        return len(self._heap)

    def entries(self, elements: Sequence[Element]) -> list[tuple[int, Element]]:
        """Return the elements with their priorities."""
        return [(int(element[0]), element) for element in elements]

    def add(self, elements: Iterable[tuple[int, Element]]) -> None:
        """Add elements in the order of their priorities."""
        for priority, element in elements:
            self._count += 1
            heapq.heappush(self._heap, (priority, self._count, element))

    def remove(self, count: int) -> list[Element]:
        """Smallest first."""
        entries = [heapq.heappop(self._heap) for _ in range(count)]
        self.last = [number for _, number, _ in entries]
        return [element for _, _, element in entries]

    def give_back(self, elements: Sequence[Element], where: object) -> None:
        """Put elements back in their old places."""
        for number, element in zip(cast("list[int]", where), elements, strict=True):
            heapq.heappush(self._heap, (int(element[0]), number, element))

    def capture(self) -> tuple[tuple[Element, ...], object]:
        """Smallest first."""
        return tuple(element for _, _, element in sorted(self._heap, key=lambda entry: entry[:2])), None

    def restore(self, elements: Sequence[Element], extra: object) -> None:
        """As captured."""
        self._heap.clear()
        self.add(self.entries(elements))


class BucketOrder:
    """Bucket order: elements of one bucket together, from the bucket with the oldest element among buckets with enough
    elements.

    If no bucket has enough, which matters only when no more can come in, the oldest of all.

    Args:
        bucket_by: gives the bucket of an element.
    """

    def __init__(self, bucket_by: Callable[[Element], Hashable]) -> None:
        self._bucket_by = bucket_by
        self._buckets: dict[Hashable, deque[tuple[int, Element]]] = {}
        self._count = 0
        self._len = 0
        self.last: list[tuple[Hashable, int]] = []  # buckets and arrival numbers of the elements removed last

    def __len__(self) -> int:
        return self._len

    def entries(self, elements: Sequence[Element]) -> list[tuple[Hashable, Element]]:
        """Return the elements with their buckets."""
        buckets = [self._bucket_by(element) for element in elements]
        for bucket in buckets:
            hash(bucket)  # an unhashable bucket fails here, before any element is added
        return list(zip(buckets, elements, strict=True))

    def add(self, entries: Iterable[tuple[Hashable, Element]]) -> None:
        """Add each element to its bucket."""
        for bucket, element in entries:
            self._count += 1
            self._len += 1
            self._buckets.setdefault(bucket, deque()).append((self._count, element))

    def has(self, count: int) -> bool:
        """Return True if a bucket has `count` elements."""
        return any(len(members) >= count for members in self._buckets.values())

    def remove(self, count: int) -> list[Element]:
        """Remove elements of one bucket, if a bucket has enough."""
        self.last = []
        full = [bucket for bucket, members in self._buckets.items() if len(members) >= count]
        if full:
            bucket = min(full, key=lambda each: self._buckets[each][0][0])
            return [self._pop(bucket) for _ in range(count)]
        return [self._pop(min(self._buckets, key=lambda each: self._buckets[each][0][0])) for _ in range(count)]

    def _pop(self, bucket: Hashable) -> Element:
        members = self._buckets[bucket]
        self._len -= 1
        number, element = members.popleft()
        self.last.append((bucket, number))
        if not members:
            del self._buckets[bucket]
        return element

    def give_back(self, elements: Sequence[Element], where: object) -> None:
        """Put elements back in their old places."""
        places = cast("list[tuple[Hashable, int]]", where)
        for (bucket, number), element in zip(places, elements, strict=True):
            self._len += 1
            insort(self._buckets.setdefault(bucket, deque()), (number, element), key=itemgetter(0))

    def capture(self) -> tuple[tuple[Element, ...], object]:
        """Oldest first."""
        entries = sorted(entry for members in self._buckets.values() for entry in members)
        return tuple(element for _, element in entries), None

    def restore(self, elements: Sequence[Element], extra: object) -> None:
        """As captured."""
        entries = self.entries(elements)
        self._buckets.clear()
        self._len = 0
        self.add(entries)
