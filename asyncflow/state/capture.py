"""Captures of states, for checkpoints: references to immutable values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

from asyncflow.errors import CheckpointError
from asyncflow.state.variables.held import HeldValue
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
    """Kind of the resource, in small letters: checkpoints have a file for each, such as ``variables``."""

    def capture(self) -> Capture:
        """Capture the present state, in time that does not grow with its bytes."""

    def check_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Checks that a capture's arrays, all on the host, may be this state.

        Raises:
            CheckpointError: they may not.
        """

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Replace the state by arrays that fit, and that nothing writes to any more."""


def check_capture(state: CheckpointedState, kind: str, arrays: Mapping[str, Array]) -> None:
    """Check that a state of this kind accepts the arrays of a capture.

    Raises:
        CheckpointError: the state does not.
    """
    if kind != state.kind:
        raise CheckpointError(f"it is a {kind} there and a {state.kind} here")
    state.check_arrays(arrays)
