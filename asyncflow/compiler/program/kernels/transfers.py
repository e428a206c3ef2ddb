"""Ops that carry values between the devices of a plan: Send, Recv, the copy to the host, and the lossy short form.

Made while a graph is lowered. A value is sent to a device once, however many nodes there use it (white paper §3.2.2).
Send and Recv of one transfer share its number; with the tag it is the key under which they meet in the rendezvous.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, Literal, TypeAlias

import numpy as np

from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import OPAQUE, VIEW, Op, runs_on_host
from asyncflow.graph.values.dtypes import float32, uint16
from asyncflow.graph.values.spec import Spec
from asyncflow.values import Kernel, Namespace, Value

SEND = Op("send", lambda *values, transfer, target, is_acknowledged: ())
"""Hands its input to the Recv of the same `transfer` on the device `target`; without an input, the news that it ran.

With `is_acknowledged` it is done only when the Recv's iteration has ended: that holds the loop's window open."""

RECV = Op("recv", lambda *, transfer, source, spec, is_acknowledged: spec)
"""Gives the value that the Send of the same `transfer` on the device `source` hands over under the same tag."""

HostUse: TypeAlias = Literal["predicate", "loop", "input", "result"]
"""Use of a value on the host: to decide a branch or a loop, as an input of a kernel there, or as a fetched result."""

TO_HOST = Op("to_host", lambda value, *, use: value)
"""Copies a value from an asynchronous device to the host, for one `HostUse`."""


TO_CARD = Op(
    "to_card",
    lambda *values: values,
    lambda xp: lambda *values: values,
    flops=lambda *_: 0.0,
    traits=VIEW,
)
"""Copies vectors of the host to a card, for kernels that use them as data."""


# The host computes the order of sequences, say, while the card still works: a region that waits for the order waits for
# no kernel. Two regions would share the step's stores, so the step could not be one CUDA graph.
def is_made_ahead(node: Node, on_host: AbstractSet[Tensor]) -> bool:
    """Return True if the host makes the values of a node of values `on_host`, and no kernel delays the host."""
    # A coroutine may wait for anything, however early its inputs are there.
    is_of_host = node.op is TO_CARD or (runs_on_host(node) and not node.op.conduct.is_async)
    return is_of_host and all(tensor in on_host for tensor in node.inputs)


def _truncate(xp: Namespace) -> Kernel:
    def truncate(value: Any) -> Value:
        bits = xp.asarray(value).view(np.uint32)
        # A NaN with only lower bits set would become an infinity without them.
        is_nan = (bits & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
        return ((bits >> np.uint32(16)) | (is_nan.astype(np.uint32) << np.uint32(6))).astype(np.uint16)

    return truncate


def _expand(xp: Namespace) -> Kernel:
    def expand(value: Any) -> Value:
        return (xp.asarray(value).astype(np.uint32) << np.uint32(16)).view(np.float32)

    return expand


TRUNCATE = Op("truncate", lambda value: Spec(uint16, value.shape), _truncate, traits=OPAQUE)
"""The upper 16 bits of a float32, which are a bfloat16 (white paper 2015 §5.5): half the bytes, 8 bits of precision."""

EXPAND = Op("expand", lambda value: Spec(float32, value.shape), _expand, traits=OPAQUE)
"""Op that makes a float32 of its upper 16 bits, with zeros below."""
