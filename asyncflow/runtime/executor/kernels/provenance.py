"""Says where in the user's program a kernel failed: node, iteration, device, inputs, line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from asyncflow.compiler.plan import PlanNode
from asyncflow.compiler.regions.code.region_code import SourcePlace
from asyncflow.devices.memory import MemoryLimitExceeded
from asyncflow.errors import (
    AsyncflowError,
    BodyFailure,
    DeviceLostError,
    EndOfInput,
    GraphError,
    KernelError,
    OutOfMemoryError,
    QueueClosedError,
    TooManyIterations,
    attempt_of,
    row_of,
    told,
)
from asyncflow.graph.op import KernelContext
from asyncflow.graph.values.dtypes import dtype_name
from asyncflow.graph.values.shapes import format_shape
from asyncflow.ops.rows.positions import name_row
from asyncflow.values import Value

_STOPPED = ("generator raised StopIteration", "coroutine raised StopIteration")
"""Messages of the RuntimeError that Python raises where a StopIteration leaves a generator or a coroutine."""


def describe(value: object) -> str:
    """dtype and shape of a run-time value: ``float32[64,64]``."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):  # an array of any device
        return f"{dtype_name(value.dtype)}{format_shape(value.shape)}"
    return type(value).__name__


def _described(values: Sequence[object]) -> tuple[str, ...]:
    """The inputs of a firing as users know them: its context is none."""
    return tuple(describe(value) for value in values if not isinstance(value, KernelContext))


def as_kernel_error(
    error: BaseException, node: PlanNode, tag: str, inputs: Sequence[Value], device: str
) -> BaseException:
    """Return `error` with its provenance; exceptions meant for the interpreter (SystemExit, …) are returned unchanged,
    with a note.

    `GeneratorExit` is meant for the generator that is closed. Out of a run it would look as if the caller were closed.
    """
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration) and str(error) in _STOPPED:
        error = error.__cause__  # Python has replaced it by a RuntimeError
    found = None if node.region is None else node.region.place_of(error)
    if not isinstance(error, Exception | asyncio.CancelledError | GeneratorExit):
        source = node.source if found is None else found[0].node
        note = f"raised by {source.name} ({source.op.name}), built at {source.location}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        return error
    body = error if isinstance(error, BodyFailure) else None
    if body is not None:
        error = body.error
    if isinstance(error, DeviceLostError):
        # Not the node's fault: any next kernel would have failed.
        error.add_note(f"noticed at {node.name} ({node.source.op.name}), built at {node.source.location}")
        return error
    described = _described(inputs)
    # Show our own errors by message alone; another run's `KernelError`, and errors of other code, with their kind.
    is_ours = isinstance(error, AsyncflowError | TooManyIterations | MemoryLimitExceeded)
    reason = str(error) if is_ours and not isinstance(error, KernelError) else told(error)
    if body is not None:
        reason = body.inner.reason  # it may count axes as axes of a row
    if isinstance(error, GraphError):
        reason = error.reason  # without a location: no user line is on the stack
    if body is None and attempt_of(error):
        reason = f"{reason} ({attempt_of(error)})"
    kind: type[KernelError] = KernelError
    sizes: dict[str, Any] = {}
    if isinstance(error, MemoryLimitExceeded):
        kind, sizes = OutOfMemoryError, {"requested": error.requested, "used": error.used, "limit": error.limit}
    elif isinstance(error, EndOfInput) and not error.node:
        kind, reason = EndOfInput, error.reason
    elif isinstance(error, QueueClosedError) and not error.node:
        kind, sizes, reason = QueueClosedError, {"queue": error.queue, "left": error.left}, error.reason
    elif isinstance(error, MemoryError):
        kind, sizes = OutOfMemoryError, {"requested": 0, "used": 0, "limit": 0}
    row = row_of(error) if body is None else ""
    if isinstance(error, IndexError) and body is None:
        failed, values = (node.source, inputs) if found is None else (found[0].node, found[2])
        of_row = name_row(error, failed, values)
        reason, row = told(of_row), row_of(of_row)
    wrapped = with_provenance(kind, reason, node, tag, device, described, **sizes)
    if found is not None:
        _place_in_region(wrapped, *found)
    elif node.region is not None:
        wrapped.add_note(f"as a whole: {node.region.extent}")
    if row:
        tag, name, op = "/".join(filter(None, (wrapped.tag, row))), wrapped.node, wrapped.op
        wrapped.move_to(node=name, op=op, tag=tag, inputs=wrapped.inputs, location=wrapped.location)
    if isinstance(error, TooManyIterations) and not error.loop.by_hand:
        # Name the loop itself, whether a region, a card or primitives ran it.
        loop, tag, seen = error.loop, wrapped.tag, wrapped.inputs
        wrapped.move_to(node=loop.name, op="while", tag=tag, inputs=seen, location=loop.location)
    if body is not None:
        _place_in_body(wrapped, body)
    if isinstance(wrapped, OutOfMemoryError):
        error.__traceback__ = None  # its frames keep the values that exceed the memory
    wrapped.__cause__ = error
    return wrapped


def _place_in_region(
    wrapped: KernelError, place: SourcePlace, counters: Sequence[int], values: Sequence[Value]
) -> None:
    """Names the node inside the region that failed, and the iterations of the loops around it."""
    inner = "/".join(f"{label}/{count}" for (label, _), count in zip(place.loops, counters, strict=True))
    wrapped.move_to(
        node=place.node.name,
        op=place.node.op.name,
        tag="/".join(filter(None, (wrapped.tag, inner))),
        inputs=_described(values),
        location=place.node.location,
    )


def _place_in_body(wrapped: KernelError, body: BodyFailure) -> None:
    """Names the node that failed in a body, in place of the firing that was computed with others."""
    wrapped.add_note(f"in {wrapped.node} ({wrapped.op}), built at {wrapped.location}")
    inner, tag = body.inner, "/".join(filter(None, (wrapped.tag, body.tag)))
    wrapped.move_to(node=inner.node, op=inner.op, tag=tag, inputs=inner.inputs, location=inner.location)


def with_provenance(
    kind: type[KernelError], reason: str, node: PlanNode, tag: str, device: str, inputs: tuple[str, ...], **extra: Any
) -> KernelError:
    """An error of `kind` that says which node failed, in which iteration, on which inputs."""
    return kind(
        reason,
        node=node.name,
        op=node.source.op.name,
        tag=tag,
        device=device,
        inputs=inputs,
        location=node.source.location,
        **extra,
    )
