"""Snapshots of states, which checkpoints are made of: references to values that nobody writes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from asyncflow.graph.spec import Spec
from asyncflow.state.held import HeldValue
from asyncflow.values import Array

V = TypeVar("V", bound=Array | HeldValue, covariant=True)


@dataclass(frozen=True, slots=True)
class StateSnapshot(Generic[V]):
    """The state of one resource at one moment.

    Attributes:
        kind: of the resource, in small letters: checkpoints have a file for each kind.
        values: arrays, scalars or `HeldValue` by the name of the part; ``""`` where there is only one. No value at all
            is a state that has none yet.
        facts: what else there is to say, of strings, numbers, lists and dicts.
    """

    kind: str
    values: Mapping[str, V]
    facts: Mapping[str, object] = field(default_factory=dict)

    def specs(self: StateSnapshot[Array]) -> dict[str, Spec]:
        """The dtypes and shapes of values on the host."""
        return {part: Spec(value.dtype, np.shape(value)) for part, value in self.values.items()}


@runtime_checkable
class CheckpointedState(Protocol):
    """A state that checkpoints keep. Its methods are called on the session's event loop, and none of them waits."""

    def snapshot(self) -> StateSnapshot[Array | HeldValue]:
        """The state as it is now, by reference: this takes no longer for more bytes."""
        ...

    def misfit(self, kind: str, specs: Mapping[str, Spec], facts: Mapping[str, object]) -> str | None:
        """The reason why a snapshot of this kind, with such values, is none of this state's; None if it may be."""
        ...

    def put(self, snapshot: StateSnapshot[Array]) -> None:
        """Makes a snapshot that fits the state; its values are arrays of the host that nobody else has."""
        ...


__all__ = ["CheckpointedState", "StateSnapshot"]
