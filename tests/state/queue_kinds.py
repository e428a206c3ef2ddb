"""Every kind of queue, for the tests that go over all of them: a new kind joins here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import asyncflow as af
from asyncflow.graph.values import nest


@dataclass(frozen=True, slots=True)
class QueueKind:
    """A kind of queue in tests: its constructor, and the form of its elements.

    Attributes:
        make: makes a queue of a capacity, a spec and a name.
        element: makes an element of a value and a number; or a batch of elements, of a batch of each.
        value: gives the value of an element.
        values: gives the values of a batch.
    """

    make: Callable[[int, Any, str], af.Queue]
    element: Callable[[Any, Any], Any] = lambda value, number: value
    value: Callable[[Any], Any] = lambda element: element
    values: Callable[[Any], Any] = lambda batch: batch


def parity(element: Any) -> int:
    """A bucket of two: the parity of the sum of an element's first value."""
    return int(np.sum(nest.flatten(element)[0][0])) % 2


KINDS: dict[str, QueueKind] = {
    "fifo": QueueKind(lambda capacity, spec, name: af.FIFOQueue(capacity, spec, name=name)),
    "shuffle": QueueKind(lambda capacity, spec, name: af.ShuffleQueue(capacity, spec, seed=1, name=name)),
    "priority": QueueKind(
        lambda capacity, spec, name: af.PriorityQueue(capacity, spec, name=name),
        element=lambda value, number: (number, value),
        value=lambda element: element[1],
        values=lambda batch: batch[1],
    ),
    "padding": QueueKind(
        lambda capacity, spec, name: af.PaddingQueue(capacity, spec, name=name), values=lambda batch: batch[0]
    ),
    "buckets": QueueKind(
        lambda capacity, spec, name: af.PaddingQueue(capacity, spec, bucket_by=parity, name=name),
        values=lambda batch: batch[0],
    ),
}
