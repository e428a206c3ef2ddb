"""Fed values that are in the memory of a card already: what of them has to come to the host, and when they are copied.

A feed is a snapshot. One that is used on a CUDA device is copied on the card when the run starts, in the order of the
stream that its library writes to. One that the run needs on the host is read on a thread. Whoever has to wait before it
comes to that is given a copy first, made by the library itself.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from asyncflow.devices.cuda.backend import cuda_backend
from asyncflow.devices.foreign import ForeignArray, read, view
from asyncflow.errors import DeviceLostError
from asyncflow.runtime.values.feeds import locked, refusal
from asyncflow.streams.beside import call_beside

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncflow.compiler.plan import Plan
    from asyncflow.devices.protocol import Device
    from asyncflow.graph.ir import Tensor


def has_foreign(values: Sequence[Any]) -> bool:
    """Whether a checked value is in the memory of a card."""
    return ForeignArray in map(type, values)


def snapshots(values: Sequence[Any]) -> list[Any]:
    """The values, with copies for those in the memory of a card."""
    # At once, because the stream that is current now orders the copies; CuPy is imported already unless the values are
    # another library's and no device here is a card.
    cupy = cuda_backend().cupy
    return [value.snapshot(cupy) if type(value) is ForeignArray else value for value in values]


def as_of_now(values: list[Any]) -> list[Any]:
    """The values, which whoever has them may go on to change: `snapshots`, if there is anything to take."""
    return snapshots(values) if has_foreign(values) else values


async def at_hand(
    values: Sequence[Any], feeds: Sequence[Tensor], plan: Plan, devices: Mapping[str, Device]
) -> list[Any]:
    """The values where a plan takes them, once they are there, and so is the state that kernels read.

    No kernel has to hold up the event loop for that state then, unless a device writes it again before.

    Raises:
        FeedError: as `settled`.
    """
    if has_foreign(values):
        values = await settled(values, feeds, plan, devices)
    for state in plan.read_on_host:
        if (read := state.read_on_host()) is not None:
            with suppress(DeviceLostError):  # whoever reads it is told
                await call_beside(read)
    return list(values)


async def settled(values: Sequence[Any], feeds: Sequence[Tensor], plan: Plan, devices: Mapping[str, Device]) -> Any:
    """The values, as the devices of a plan take them; does not suspend if all stay in the memory of cards.

    Raises:
        FeedError: one has to be read on the host, and cannot be.
    """
    places = {index: devices[part.device] for part in plan.partitions for index in part.feed_indexes}
    wanted = [
        index
        for index, value in enumerate(values)
        # Numbers of rank 0 are the host's, wherever they are used.
        if type(value) is ForeignArray
        and not (index in places and places[index].capabilities.takes_foreign and value.ndim)
    ]
    if not wanted:
        return values
    values = snapshots(values)
    readings = [_read(feeds[index], values[index]) for index in wanted]
    for index, array in zip(wanted, await asyncio.gather(*readings), strict=True):
        values[index] = array
    return values


async def _read(tensor: Tensor, foreign: ForeignArray) -> Any:
    backend = cuda_backend()
    if backend.cupy is None:
        raise refusal(
            tensor,
            foreign.value,
            f"it is in the memory of a card, which takes CuPy to read ({backend.reason}); feed a copy on the host",
        )
    try:
        array, written = view(backend.cupy, foreign)
        values = await call_beside(read, backend.cupy, array, written, foreign.card)
    except Exception as error:
        raise refusal(tensor, foreign.value, f"it cannot be copied from card {foreign.card}: {error}") from error
    return locked(values)


__all__ = ["as_of_now", "at_hand", "has_foreign", "settled", "snapshots"]
