"""Waits for work of other libraries on a card: ``af.cuda``.

`done` awaits the work of another library's stream, without a thread that blocks::

    y = model(x)                                   # PyTorch launches, and returns at once
    await af.cuda.done(torch.cuda.current_stream())
"""

from __future__ import annotations

import typing as _typing

from asyncflow.devices.cuda.backend import cuda_backend as _cuda_backend
from asyncflow.foreign_names import facade as _facade
from asyncflow.streams.cuda import foreign as _foreign
from asyncflow.streams.cuda.card import card_of as _card_of


async def done(stream: object, *, device: int | None = None) -> None:
    """Wait for all work that a CUDA stream has been given so far; the event loop runs meanwhile.

    Several tasks may wait, for one stream or for many. A wait takes the rest of a turn of a busy event loop,
    and tens of microseconds on an idle one. It needs CuPy, which the extras ``cuda12`` and ``cuda13`` install; the
    stream may be of any library. The first call on a machine imports CuPy and tries each card.

    Args:
        stream: an object with ``__cuda_stream__`` (CuPy, cuda.core, cuDF, and others), a PyTorch stream, or an integer
            handle. Handle 0 is the default stream of the current device.
        device: CUDA's number of the stream's device. By default the stream or the driver says it, or else it is the
            device that is current for CuPy.

    Raises:
        TypeError: `stream` is not a CUDA stream.
        ValueError: CUDA has no such stream on the device, no such device, or the stream captures a graph.
        DeviceLostError: the card failed, before the call or while it waited.
        RuntimeError: CUDA is off on this machine; the message says why.

    Ordering: later work of the stream is not waited for. Cancellation: the work goes on, and its memory must stay.
    Await `done` once more before you reuse that.
    """
    handle = _foreign.handle_of(stream)
    backend = _cuda_backend()
    if backend.cupy is None:
        raise RuntimeError(f"af.cuda.done needs CUDA, which is off on this machine: {backend.reason}")
    ordinal = _foreign.device_of(backend.cupy, stream, handle) if device is None else device
    if not 0 <= ordinal < len(backend.cards):
        raise ValueError(f"device={ordinal}, but this machine has {len(backend.cards)} CUDA devices, counted from 0")
    await _foreign.done(_card_of(backend.cupy, ordinal), handle)


if not _typing.TYPE_CHECKING:  # type checkers see the imports above; with `__getattr__` a misspelt name would pass
    __all__, __getattr__, __dir__ = _facade("asyncflow.cuda", globals())
