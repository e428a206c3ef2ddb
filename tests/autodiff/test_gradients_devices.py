"""Devices of gradients: a gradient runs beside its op, and values are saved where they are made."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import pytest

import asyncflow as af
from asyncflow.autodiff.stores.saved_values import MOVING_STORE, READ_SAVED, SAVE
from asyncflow.compiler.program.kernels.transfers import SEND
from asyncflow.graph.builtin import PLACEHOLDER
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.testing import virtual_clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncflow.compiler.plan import Plan


def _plan(fetches: object) -> Plan:
    with virtual_clock("2 x v100, nvlink2") as clock:

        async def main() -> Plan:
            async with af.Session(regions=False) as session:
                return session.plan(fetches)

        return clock.run(main())


def _two_layers() -> list[af.Tensor]:
    """The gradients of the weights of two layers, one on each device, that a loop applies."""
    weights = []
    for index in range(2):
        with af.device(f"sim:{index}"):
            weights.append(af.constant(np.eye(64, dtype=np.float32)))

    def body(i: af.Tensor, x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        for index, weight in enumerate(weights):
            with af.device(f"sim:{index}"):
                x = af.tanh(x @ weight)
        return i + 1, x

    start = af.constant(np.ones((64, 64), np.float32))
    _, x = af.while_loop(lambda i, x: i < 3, body, (np.int32(0), start))
    found: list[af.Tensor] = af.gradients(af.sum(x), weights)
    return found


def test_values_are_saved_and_read_where_they_are_made() -> None:
    with af.Graph():
        plan = _plan(_two_layers())
    kept: dict[object, set[str]] = {op: set() for op in (MOVING_STORE, SAVE, READ_SAVED)}
    for partition in plan.partitions:
        for node in partition.nodes:
            if node.source.op in kept:
                kept[node.source.op].add(partition.device)
            if node.source.op is SEND:
                assert node.source.inputs[0].dtype != VARIANT
    assert all(devices == {"sim:0", "sim:1"} for devices in kept.values())


def test_shapes_are_saved_where_their_values_are() -> None:
    with af.Graph() as graph:
        with af.device("cpu:0"):
            w = af.constant(np.eye(4, dtype=np.float32))
        x = af.placeholder("float32", (None, 4))
        with af.device("cpu:1"):
            _, y = af.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, af.tanh(y @ w + y)), (0, x))
            loss = af.sum(y)
        slope = af.gradients(loss, w)
    plan = af.Session(graph, devices=["cpu:0", "cpu:1"]).plan([loss, slope], [x])
    # Both loops are whole regions: nothing in them crosses.
    assert "frame" not in plan.explain()


def test_each_layer_is_differentiated_on_its_device() -> None:
    with af.Graph():
        plan = _plan(_two_layers())
    for partition in plan.partitions:
        layers = {
            node.name.rpartition("gradients/while/body/")[2].partition("/")[0]
            for node in partition.nodes
            if node.source.op.name == "matmul" and "gradients/" in node.name
        }
        assert layers == ({"matmul"} if partition.device == "sim:0" else {"matmul_1"})


def test_stores_of_inner_loops_stay_with_their_keepers() -> None:
    with af.Graph():
        x = af.constant(np.ones((64, 64), np.float32))

        def outer(i: af.Tensor, v: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            def inner(j: af.Tensor, w: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
                with af.device("sim:1"):
                    return j + 1, af.sin(w)

            _, w = af.while_loop(lambda j, w: j < 2, inner, (np.int32(0), v))
            with af.device("sim:0"):
                return i + 1, af.cos(w)

        with af.device("sim:0"):
            _, y = af.while_loop(lambda i, v: i < 3, outer, (np.int32(0), x))
        plan = _plan(af.gradients(y, x))
    sent = [node.source.inputs[0] for part in plan.partitions for node in part.nodes if node.source.op is SEND]
    assert sent
    assert all(tensor.dtype != VARIANT for tensor in sent)


def _second_order() -> list[af.Tensor]:
    """Of a loop in a loop, on another device each: second gradients of both go to stores that are one."""
    x = af.constant(np.ones((4, 4), np.float32))

    def outer(i: af.Tensor, v: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        def inner(j: af.Tensor, w: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            return j + 1, af.sin(w) * v

        with af.device("sim:1"):
            _, w = af.while_loop(lambda j, w: j < 2, inner, (np.int32(0), v))
        return i + 1, w * af.cos(v)

    with af.device("sim:0"):
        _, y = af.while_loop(lambda i, v: i < 3, outer, (np.int32(0), x))
    slope = af.gradients(af.sum(y), x)
    return [slope, af.gradients(af.sum(slope * slope), x)]


def _variables_in_branches() -> list[af.Tensor]:
    """A gradient in the branch that does not read the variable is zeros of its shape, which only a run knows."""
    weights = af.Variable(np.eye(4, dtype=np.float32), name="weights", shape=(None, None))

    def read() -> af.Tensor:
        with af.device("sim:0"):
            return af.sum(x @ weights.read())

    x = af.placeholder("float32", (4, 4))
    with af.device("sim:1"):
        y = af.cond(x[0, 0] > 0, read, lambda: af.sum(x))
    found: list[af.Tensor] = af.gradients(y, [x, weights])
    return found


@pytest.mark.parametrize("build", [_second_order, _variables_in_branches])
def test_what_gradients_copy_is_a_preference(build: Callable[[], list[af.Tensor]]) -> None:
    """Requests bind where the user has written them; where gradients of several meet in one store, they give way."""

    async def found() -> list[np.ndarray]:
        with af.Graph() as graph:
            fetches = build()
            feeds = {node.outputs[0]: np.ones((4, 4), np.float32) for node in graph.nodes if node.op is PLACEHOLDER}
        async with af.Session(graph) as session:
            return await session.run(fetches, feeds)

    with virtual_clock("2 x v100, nvlink2") as clock:
        two = clock.run(found())
    with virtual_clock("2 x v100, nvlink2") as clock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(af, "device", lambda spec: nullcontext())
        one = clock.run(found())
    for a, b in zip(two, one, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
