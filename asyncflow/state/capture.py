"""Captures of states, which checkpoints are made of: references to values that nobody writes to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

from asyncflow.errors import CheckpointError
from asyncflow.state.held import HeldValue
from asyncflow.values import Array


class LateCapture(Protocol):
    """The state of one moment whose arrays are still to be made."""

    def arrays(self) -> Mapping[str, Array]:
        """The arrays by name; makes them on the calling thread, which may take a while."""


Capture: TypeAlias = "Mapping[str, Array | HeldValue] | LateCapture"
"""The state of one moment: its values by name, ``""`` where there is only one; none for a state that has none yet."""


@runtime_checkable
class CheckpointedState(Protocol):
    """A state that checkpoints keep."""

    kind: ClassVar[str]
    """The kind of its resource, in small letters: checkpoints have a file for each, such as ``variables``."""

    def capture(self) -> Capture:
        """The state as it is now: this takes no longer for more bytes."""

    def check_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Checks that a capture's arrays, all on the host, may be this state.

        Raises:
            CheckpointError: they may not.
        """

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Makes arrays that fit, and that nobody writes to, the state."""


def check_capture(state: CheckpointedState, kind: str, arrays: Mapping[str, Array]) -> None:
    """Checks that the arrays of a capture of a state of that kind may be this one.

    Raises:
        CheckpointError: they may not.
    """
    if kind != state.kind:
        raise CheckpointError(f"it is a {kind} there and a {state.kind} here")
    state.check_arrays(arrays)
