"""Effects that outlast a run, in plans that take elements: after such an effect, the taken elements count as used.

A cancelled run gives back the elements it has taken (`asyncflow.state.elements.taken`), unless a later effect of it
outlasts the run. Only plans that take elements pay for this check: kernels with lasting effects are wrapped there. An
enqueue notes it by itself, as it may have to wait for room.
"""

from __future__ import annotations

from functools import partial
from typing import cast

from asyncflow.graph.facts import CALL_AGAIN
from asyncflow.graph.graph import has_side_effect
from asyncflow.graph.ir import Node
from asyncflow.graph.resource import resources_of
from asyncflow.ops.rows.by_row import Paused, PausingKernel
from asyncflow.state.elements.taken import current_taken
from asyncflow.values import Array, Kernel, Value


def lasts(node: Node) -> bool:
    """Return True if a firing has effects that outlast its run, queues aside."""
    op = node.op
    if op.conduct.is_undone or any(resource.waits for resource in resources_of(node)):
        return False
    if op.effects is not None and has_side_effect(node):
        return True
    return not getattr(node.attrs.get("shared"), "is_repeatable", CALL_AGAIN.allows(op))


def keeping(kernel: Kernel) -> Kernel:
    """Return a kernel that first counts the elements which its run has taken as used, and then does the same."""
    return _KeepingRows(kernel) if isinstance(kernel, PausingKernel) else partial(_keeping, kernel)


class _KeepingRows(PausingKernel):
    """A kernel for rows that may be computed in parts, and first counts taken elements as used."""

    __slots__ = ("_kernel",)

    def __init__(self, kernel: PausingKernel) -> None:
        super().__init__()
        self._kernel = kernel

    def begin(self, limit_ns: float, numbers: Array, *inputs: Array) -> Paused | tuple[Array, ...]:
        """See `PausingKernel`."""
        return cast("Paused | tuple[Array, ...]", _keeping(self._kernel.begin, limit_ns, numbers, *inputs))


def _keeping(kernel: Kernel, *inputs: Value, **told: Value) -> Value:
    taken = current_taken()
    if taken is not None and taken.count:
        taken.keep()
    return kernel(*inputs, **told)
