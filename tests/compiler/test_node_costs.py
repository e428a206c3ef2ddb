"""Estimates of kernel times: every node has one, however little is known of its shapes."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.placement.node_costs import NodeCosts, assumed_ns, estimate_region
from asyncflow.devices.cpu.device import CpuDevice
from asyncflow.graph.op import registered_ops
from asyncflow.nn.packing import first_rows, place_rows
from asyncflow.ops.cost import free, moving, moving_all, per_input_element, several_passes, sorting

ANY_SHAPES = (free, moving, moving_all, per_input_element, several_passes, sorting)
"""Rules that are given nothing but shapes, of which any will do."""


def build_all(x: af.Tensor, y: af.Tensor) -> None:
    """Build a node of each op whose arithmetic depends on more than shapes, and of their gradients."""
    i = af.placeholder("int64", ())
    rows = af.placeholder("int64", (None,))
    products = [af.matmul(x, y), af.vecdot(x, y), af.einsum("abc,cab->b", x, y)]
    contracted: list[Any] = [0, 1, 3, ((2,), (0,)), ((2, 0), (-1, 1))]
    over_axes = [af.tensordot(x, y, axes=axes) for axes in contracted]
    heads = [af.reshape(each, (2, 2, 2)) for each in (x, y)]
    products.append(af.nn.scaled_dot_product_attention(heads[0], heads[1], heads[1]))
    pooled = af.nn.max_pool1d(x, 2)
    products.append(af.nn.batch_norm(heads[0], None, None, training=True))
    products += [af.nn.conv1d(x, y, padding=1), af.nn.avg_pool1d(x, 2), af.gradients(pooled, x, pooled)]
    products += over_axes if x.shape is not None else over_axes[:3]  # else listed axes have no gradient
    read = [x[i], af.take(x, rows, axis=2), af.take_along_axis(x, af.astype(y, "int64"), axis=2), x[..., ::2, None]]
    changed = [
        af.index_add(x, 0, y[0]),
        af.index_update(x, i, y[0]),
        place_rows(af.take(x, rows, axis=0), rows, rows[0]),
    ]
    read.append(first_rows(x, y))
    nn = [af.sigmoid(x), af.silu(x), af.softplus(x), af.gelu(x), af.erf(x), af.cumulative_prod(x, axis=2)]
    shaped = [*af.broadcast_arrays(x, y), af.broadcast_to(x, (2, 2, 2)), af.sort(x), af.sum(x)]
    linalg = [*af.linalg.slogdet(x), *af.linalg.eigh(x), *af.linalg.svd(x, full_matrices=False), *af.linalg.qr(x)]
    of_one = (af.linalg.cholesky, af.linalg.det, af.linalg.inv, af.linalg.eigvalsh, af.linalg.svdvals, af.linalg.pinv)
    linalg += [found(x) for found in of_one]
    linalg += [af.linalg.solve(x, np.eye(2)), af.linalg.matrix_rank(x)]
    z = af.astype(x, "complex128")
    fft = [af.fft.fft(z), af.fft.ifft(z), af.fft.rfft(x), af.fft.irfft(z)]
    v = af.zeros(4)
    af.map_fn(lambda row: (af.searchsorted(v, row), af.random.normal(()), af.linspace(row, 9, 3)), v, lift=True)
    af.map_fn(lambda row: af.assert_that(row < 1.0), v, lift=True)
    table = af.Table(4, af.spec("float64", (2,)))
    table.write(0, [1.0, 2.0])
    table.append([1.0, 2.0])
    smooth = [tensor for tensor in (*linalg, *fft) if tensor.dtype.kind == "f"]
    af.gradients([*products, *read, *changed, *nn, *shaped, *smooth], [x, y], unconnected="zero")


@pytest.mark.parametrize("known", [(2, 2, 2), (None, 2, None), None])
def test_an_estimate_never_raises(known: Any) -> None:
    """Behaviour 93: not for shapes that only a run knows, whose ranks are guessed, nor for any others."""
    random = Random(93)
    with af.Graph() as graph:
        build_all(af.placeholder("float64", known), af.placeholder("float64", known))
    costs = NodeCosts([CpuDevice(0)], {})
    assert estimate_region(graph.nodes).once_ns > 0
    for node in graph.nodes:
        assert assumed_ns(node) > 0
        assert min(costs.times(node)) >= 0
        if node.op.flops is not None and node.op.flops not in ANY_SHAPES:
            for _ in range(50):
                inputs, outputs = ([any_shape(random) for _ in ends] for ends in (node.inputs, node.outputs))
                assert node.op.flops(inputs, outputs, **node.attrs) >= 0
    if known is None:  # where gradients do what any rank needs
        ruled = {op.name for op in registered_ops() if op.flops not in (None, *ANY_SHAPES) and not op.conduct.is_user}
        missing = ruled - {node.op.name for node in graph.nodes}
        assert not missing, "build a node of each in build_all"


def any_shape(random: Random) -> Any:
    if random.random() < 0.1:
        return None
    return tuple(random.choice([None, 0, 1, 5]) for _ in range(random.randrange(6)))


async def test_tensordot_over_a_third_axis_of_unknown_rank(graph: af.Graph) -> None:
    """Behaviour 93: in a region, which asks whether a kernel may be long."""
    x, y = af.placeholder("float64"), af.placeholder("float64")
    z = af.tensordot(x, y, axes=((2,), (0,))) + 1
    a, b = np.ones((2, 3, 4)), np.ones((4, 5))
    async with af.Session(graph) as session:
        assert (await session.run(z, {x: a, y: b}) == np.tensordot(a, b, 1) + 1).all()


@pytest.mark.parametrize("shape", [None, (None,), (3,)])
async def test_a_cost_that_fails_is_told_and_counts_as_none(graph: af.Graph, shape: Any) -> None:
    """A user's wrong cost cannot fail a run; nothing is reported if the rank was guessed."""

    @af.op(outputs=lambda x: x, cost=lambda inputs, outputs: inputs[0][2] * 10)
    def double(x: Any) -> Any:
        return x * 2

    x = af.placeholder("float64", shape)
    y = double(x) + 1
    async with af.Session(graph) as session:
        if shape is None:
            assert (await session.run(y, {x: np.ones(3)})).tolist() == [3, 3, 3]
        else:
            with pytest.warns(RuntimeWarning, match=r"the cost= of double fails for inputs of shapes(?s:.*)IndexError"):
                assert (await session.run(y, {x: np.ones(3)})).tolist() == [3, 3, 3]
