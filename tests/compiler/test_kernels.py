"""`bind_member`: the function called for a node of a region, on a device with a memory of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np

import asyncflow as af
from asyncflow.autodiff.stores.saved_values import new_store, saved_value
from asyncflow.compiler.program.kernels.kernels import bind_member

if TYPE_CHECKING:
    from asyncflow.devices.protocol import AsynchronousDevice
    from asyncflow.graph.ir import Node
    from asyncflow.values import Kernel, Namespace, Value

CARD = cast("AsynchronousDevice", SimpleNamespace(xp=SimpleNamespace(full=np.full)))


def calls_of(node: Node, *inputs: Value) -> int:
    """Return the number of kernel calls in one firing of a node, if its result is an array of the host."""
    calls = []

    def kernel(*given: Value) -> Value:
        calls.append(given)
        return np.ones(2, np.float32)

    def bare(_: Namespace) -> Kernel:
        return kernel

    bind_member(node, bare, CARD, 0, frozenset())(*inputs)
    return len(calls)


def test_numbers_of_the_host_are_put_on_the_card_for_a_second_call() -> None:
    with af.Graph():
        x = af.placeholder("float32", ())
        stacked = af.stack([x, x + 1.0])
    assert calls_of(stacked.node, np.float32(1), np.float32(2)) == 2


def test_what_reads_a_store_is_called_once() -> None:
    """The store gives up an element once read: a second call would find nothing."""
    with af.Graph():
        read = saved_value(new_store(), af.placeholder("int64", ()), af.spec("float32", (2,)))
    assert calls_of(read.node, object(), np.int64(0)) == 1
