"""Kernels on devices with memory of their own look only at values that their op declares to be on the host.

Every test of an op in this folder runs its kernel on such arrays, too (`check_on_device`). Here whole programs do. So
ops that pass on other values than arrays are among them, and no op is left out.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.autodiff.gradients import gradients
from asyncflow.autodiff.stores import part_sums, saved_values, store_gradients
from asyncflow.control.case import CASE_INDEX
from asyncflow.control.stores.tensor_array import ELEMENT_SHAPE, PEEK
from asyncflow.graph.building.build import apply, constant, placeholder
from asyncflow.graph.graph import Graph
from asyncflow.graph.op import KernelContext, Op, find_op, host_inputs, registered_ops, runs_on_host
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.lift.control.branches import JOIN_ROWS, split_rows
from asyncflow.nn.losses import softmax_cross_entropy
from asyncflow.nn.packing import PACK_LENGTHS, first_rows, place_rows
from asyncflow.ops.derivatives.shapes import checked_shape, ensure_shape
from asyncflow.ops.indexing.scatter import scatter_along_axis, scatter_to
from asyncflow.ops.layers import nn as ops_nn
from asyncflow.ops.matrices.derivatives import fit_to
from asyncflow.values import Conduct
from asyncflow.vertex.children import REDUCE_SEGMENTS, SUM_SEGMENTS
from asyncflow.vertex.permutation import permuted
from asyncflow.vertex.schedule import schedules
from tests.ops.device_arrays import XP, DeviceArray, on_device, values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from asyncflow.graph.ir import Node, Tensor

X = np.array([[0.5, -1.5, 2.0], [3.0, 0.25, -0.75]])
V = np.array([1.5, -0.5, 2.5])
N = np.array([2, 0, 1])
NOT_HERE = frozenset({"identity", "no_op", "stop_gradient", "custom_gradient", "moving_saved_values"})
"""Ops that hand their inputs on, and one without inputs, for the plans of a device."""


def _evaluated(node: Node, values: dict[Tensor, Any], kernel: Callable[..., Any], inputs: Sequence[Any]) -> None:
    context = [KernelContext(seed=1, run=2, tag=(3,))] if node.op.conduct.needs_context else []
    with np.errstate(all="ignore"):
        result = kernel(*context, *inputs)
    values.update(zip(node.outputs, (result,) if node.single else result, strict=True))


def run_here(nodes: Iterable[Node], values: dict[Tensor, Any]) -> dict[Tensor, Any]:
    for node in nodes:
        if node.op.kernel is not None:
            _evaluated(node, values, node.op.kernel(np, **node.attrs), [values[x] for x in node.inputs])
    return values


def _run_there(nodes: Iterable[Node], values: dict[Tensor, Any], counters: bool) -> dict[Tensor, Any]:
    """As a CUDA device runs them."""

    def fetched(value: Any) -> Any:
        return value.data_[()] if isinstance(value, DeviceArray) else value

    for node in nodes:
        if node.op.kernel is None:
            continue
        inputs, at_home, reads = [values[x] for x in node.inputs], runs_on_host(node), host_inputs(node)
        given = [
            fetched(value) if at_home or place in reads else on_device(value, counters=counters, scalars=True)
            for place, value in enumerate(inputs)
        ]
        _evaluated(node, values, node.op.kernel(np if at_home else XP, **node.attrs), given)
    return values


def traced(build: Callable[..., Any], arrays: Sequence[Any], known: bool) -> tuple[list[Node], dict[Tensor, Any]]:
    """Return the nodes of a program and its gradients, and its feeds."""
    with Graph() as graph:
        inputs = [placeholder(x.dtype, x.shape if known else (None,) * x.ndim) for x in map(np.asarray, arrays)]
        built = build(*inputs)
        ys = [y for y in (built if isinstance(built, tuple | list) else (built,)) if y.dtype.kind in "fc"]
        xs = [x for x in inputs if x.dtype.kind in "fc"]
        if ys and xs:
            gradients(ys, xs, [af.ones_like(y) for y in ys], unconnected="zero")  # complex ones ask for weights
    return list(graph.nodes), dict(zip(inputs, [np.asarray(x)[()] for x in arrays], strict=True))


def check(build: Callable[..., Any], *arrays: Any, known: bool = False) -> None:
    """Runs a program and its gradients here and there; what the tensors are must agree."""
    nodes, fed = traced(build, arrays, known)
    here = run_here(nodes, dict(fed))
    for counters in (False, True):
        there = _run_there(nodes, dict(fed), counters)
        for tensor, value in here.items():
            if tensor.dtype != VARIANT:
                found = values_of(there[tensor])
                assert found.dtype == tensor.dtype, f"{tensor.node.op.name}: {found.dtype} for {tensor!r}"
                if tensor.dtype.kind == "T":
                    assert found.tolist() == np.asarray(value).tolist()
                else:
                    np.testing.assert_allclose(found, value, rtol=1e-6, err_msg=tensor.node.op.name)


def _unary(x: Tensor) -> list[Tensor]:
    names = "abs acos acosh asin asinh atan atanh cos cosh exp expm1 log log1p log10 log2 negative positive reciprocal "
    names += "sign sin sinh sqrt square tan tanh ceil floor round trunc isfinite isinf isnan signbit"
    named = [getattr(af, name)(x) for name in names.split()]
    named += [af.erf(x), ops_nn.relu(x), ops_nn.sigmoid(x), ops_nn.silu(x), ops_nn.softplus(x), ops_nn.gelu(x)]
    return [*named, af.logical_not(x > 0), af.all(x > 0), af.any(x > 0, axis=0), af.astype(x, "float32")]


def _binary(x: Tensor, y: Tensor) -> list[Tensor]:
    names = "add atan2 copysign divide floor_divide hypot logaddexp maximum minimum multiply nextafter remainder "
    names += "subtract pow equal greater greater_equal less less_equal not_equal"
    named = [getattr(af, name)(x, y) for name in names.split()]
    logical = [getattr(af, f"logical_{name}")(x > 0, y > 0) for name in ("and", "or", "xor")]
    return [*named, *logical, af.clip(x, y, 2.0), af.where(x > y, x, y)]


def _bits(n: Tensor, m: Tensor) -> list[Tensor]:
    names = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift")
    return [*(getattr(af, name)(n, m) for name in names), af.bitwise_invert(n), ops_nn.one_hot(n, af.size(m))]


def _reductions(x: Tensor) -> list[Tensor]:
    names = ("sum", "prod", "max", "min", "mean", "std", "var")
    found = [getattr(af, name)(x, axis=axis) for name in names for axis in (None, 0)]
    found += [af.cumulative_sum(x, axis=1), af.cumulative_prod(x, axis=1, include_initial=True)]
    found += [ops_nn.softmax(x), ops_nn.log_softmax(x), ops_nn.logsumexp(x, axis=0), ops_nn.layer_norm(x)]
    return [*found, af.argmax(x, axis=0), af.argmin(x), af.count_nonzero(x, axis=1), af.diff(x, axis=1)]


def _shapes(x: Tensor) -> list[Tensor]:
    rows, columns = af.shape(x)[0], af.shape(x)[1]
    found = [
        af.reshape(x, (columns, rows)),
        af.reshape(x, (-1,)),
        af.broadcast_to(x, (2, rows, columns)),
        af.full((rows, 2), 7.0) * x[:, :1],
        af.full_like(x, 2.0) * x,
        x[: rows - 1],
        x[rows - 1],
        af.roll(x, rows, axis=1),
        af.roll(x, 1),
        af.tile(x, (2, 1)),
        af.repeat(x, 2, axis=1),
        af.repeat(x, af.constant([1, 2]), axis=0),
        af.repeat(x, af.stack([rows, 0, 1, 1, 1, 1])),
        af.flip(x),
        af.expand_dims(x, axis=(0, 2)),
        af.squeeze(af.expand_dims(x, axis=0), 0),
        af.permute_dims(x, (1, 0)),
        af.matrix_transpose(x),
        af.concat([x, x], axis=1),
        af.concat([x, x], axis=None),
        af.stack([x, x], axis=1),
        af.sum(af.eye(rows, columns) * x),
        af.arange(columns) * x,
        af.linspace(0.0, 1.0, columns) * x,
        af.tril(x),
        af.triu(x),
        *af.meshgrid(x[0], x[1]),
        *af.broadcast_arrays(x, x[:1]),
        checked_shape(x, x, "x"),
        ensure_shape(x, (2, None)),
        fit_to(x, (rows, 1)),
        af.pad(x, ((1, 0), (0, 2)), value=3.0),
        *af.split(x, 3, axis=1),
        permuted(x, af.constant(np.array([1, 0])), af.constant(np.array([1, 0]))),
        af.diag(x, k=1),
        af.trace(x),
        af.diag(x[0], k=-1),
    ]
    return [*found, af.size(x), af.rank(x)]


def _indexing(x: Tensor, n: Tensor) -> list[Tensor]:
    flag, mask = af.sum(x) > 0, x > 0
    found = [
        x[mask],
        x[:, mask[0]],
        x[n % 2],
        x[n % 2, n],
        x[flag],
        x[..., None, n[1]],
        x[n[1]],
        af.take(x, n, axis=1),
        af.take_along_axis(x, af.argsort(x, axis=1), axis=1),
        af.index_update(x, mask, 1.0),
        af.index_update(x, (n % 2, n), x[0]),
        af.index_update(x, flag, 2.0),
        af.index_add(x, (slice(None), n), x),
        af.index_add(x, mask, 1.0),
        af.index_add(x, slice(0, n[0]), 1.0),
        af.scatter_add(x, n[:2] % 2, x),
        ops_nn.embedding(x, n % 2),
        place_rows(x, n[:2], 4),
        first_rows(x, n[:1]),
        *apply(PACK_LENGTHS, n, 9, 3),
        af.dynamic_slice(x, [n[1], n[2] % 2], [2, 2]),
        scatter_to(x, (("slice", None, None, None), ("input", 0)), [n], (2, 3)),
        scatter_along_axis(x, af.argsort(x, axis=1), af.shape(x), axis=1),
        af.searchsorted(af.sort(x[0]), x[1]),
        af.sort(x, descending=True, axis=0),
        *af.top_k(x, 2),
        af.segment_sum(x, n[:2], 3),
        af.bincount(n, weights=x[0]),
        softmax_cross_entropy(x, n[:2]),
        *af.gradients(af.nn.scaled_dot_product_attention(x, x, x, scale=1.0, lengths=n[0]), [x]),
    ]
    return [*found, *af.nonzero(x), *af.unique_all(n), *af.unique_counts(n), *af.unique_inverse(n), af.unique_values(n)]


def _products(x: Tensor, v: Tensor) -> list[Tensor]:
    return [
        af.matmul(x, v),
        af.matmul(x, af.matrix_transpose(x)),
        af.tensordot(x, v, axes=1),
        af.tensordot(v[0], v[1], axes=0),
        af.vecdot(x, v),
        af.einsum("ij,j->i", x, v),
        af.einsum("ij->ji", x),
        af.einsum("ij,kj,j->ik", x, x, v),
    ]


def _decompositions(x: Tensor) -> list[Tensor]:
    linalg, tall = af.linalg, af.matrix_transpose(x)
    square = af.matmul(x, tall) + af.eye(2)
    found = [linalg.cholesky(square), linalg.det(square), linalg.inv(square), linalg.eigvalsh(square)]
    found += linalg.slogdet(square)
    # The signs of vectors are any; of their squares they are not.
    found += [y * y for y in (*linalg.eigh(square), *linalg.qr(tall), *linalg.svd(tall, full_matrices=False))]
    found += [linalg.svdvals(x), linalg.pinv(x), linalg.matrix_rank(x), linalg.solve(square, x)]
    return [*found, linalg.cross(x, af.flip(x))]


def _transforms(x: Tensor) -> list[Tensor]:
    z = af.astype(x, "complex128")
    return [af.fft.fft(z), af.fft.ifft(z), af.fft.rfft(x), af.fft.irfft(z), af.fft.irfft(z, n=5)]


def _transposes(x: Tensor, v: Tensor) -> list[Tensor]:
    unknown = placeholder_like(x)
    return [af.matmul(unknown, v), af.tensordot(unknown, v, axes=1), af.vecdot(unknown, v)]


def placeholder_like(x: Tensor) -> Tensor:
    """`x`, of which nothing is known while the graph is built."""
    return af.reshape(x, af.unique_values(af.shape(x)))


def _arrays(x: Tensor, n: Tensor) -> list[Tensor]:
    rows = af.shape(x)[0]
    array = af.TensorArray("float64", rows, clear_after_read=False)
    written = array.write(0, x[0]).write(rows - 1, x[1])
    scattered = af.TensorArray("float64", 3, clear_after_read=False).scatter(n, af.reshape(x, (3, 2)))
    split = af.TensorArray("float64", 2, clear_after_read=False).split(x[0], af.stack([rows, 1]))
    counters = af.TensorArray("int64", 2).write(0, rows).write(1, n[0])
    pushed = saved_values.save(saved_values.new_store(), rows - 2, x)
    reached = store_gradients.merge_gradients(
        store_gradients.element_gradients(rows, x), store_gradients.element_gradients(n[0], x)
    )
    return [
        written.stack(),
        written.read(n[2] - 1),
        array.unstack(x).stack(),
        scattered.gather(n),
        apply(PEEK, scattered.handle, n, element=af.spec("float64", (2,)))[0],
        split.concat(),
        counters.stack(),
        counters.size(),
        apply(ELEMENT_SHAPE, array.unstack(x).handle, n[1], element=x[0].spec)[0],
        saved_values.saved_value(pushed, rows - 2, x.spec),
        store_gradients.element_gradient(reached, n[0], x),
        store_gradients.element_gradient(reached, n[1] + 7, x),
    ]


def _rows(x: Tensor, n: Tensor) -> list[Tensor]:
    store = af.RowStore("float64", (3,), af.shape(x)[0]).append(x)
    more = store.append(store.take(n % 2) * 2.0)
    found = [store.stack(), more.take(n), more.slice(n[1], n[0] + 1), more.take(af.reshape(n, (3, 1)))]
    (grad,) = gradients([y**2 for y in found], [x], [af.ones_like(y) for y in found])
    return [*found, grad, more.size()]


def _parts(x: Tensor, n: Tensor) -> list[Tensor]:
    """Sums of gradients of parts, which loops carry: of an array so large that they are kept, and of a small one."""
    sums = []
    for whole in (af.tile(x, (20, 10)), x):
        total = store_gradients.no_gradient()
        sums.append(part_sums.whole_sum(total, whole))
        for part in (whole[n[1]], whole[n[1] : n[2], 1:], whole[n[:2] % 2], whole[n[1], n[2]]):
            (grad,) = gradients([part], [whole], [af.ones_like(part)])
            assert part_sums.are_parts(grad, None)
            total = part_sums.with_parts(total, grad)
        sums.append(part_sums.whole_sum(total, whole))
    return sums


def _complex(z: Tensor) -> list[Tensor]:
    return [af.real(z), af.imag(z), af.conj(z), z * z, af.logical_and(z, z), af.index_add(z, [0, 0], z[:2])]


def _layers(x: Tensor, n: Tensor) -> list[Tensor]:
    images = af.reshape(x, (1, 2, 3))
    weights = af.reshape(af.concat([x, x], axis=0), (2, 2, 3))
    y = af.nn.conv1d(images, weights, padding=1, stride=2)
    z = af.nn.max_pool1d(images, 2, 1) + af.nn.avg_pool1d(images, 2, 1)
    normal = af.nn.batch_norm(weights, None, None, training=True)
    grads = [each for each in gradients([y, z], [images, weights], [y, z]) if each is not None]
    found = [*gradients(grads, [y, z], grads), *gradients([normal], [weights], [normal**2])]
    return [y, z, *grads, *(each for each in found if each is not None)]


def _random(x: Tensor, n: Tensor) -> list[Tensor]:
    size, x = af.shape(x), af.stop_gradient(x)
    return [
        af.random.normal(size),
        af.random.truncated_normal((n[0], 2)),
        af.random.normal(size, seed=n[0]),
        af.random.uniform((2,)),
        af.random.integers(size, low=0, high=n[0] + 3),
        af.random.gamma(size, alpha=2.0),
        af.random.poisson((2,), rate=3.0),
        af.random.bernoulli(x * 0 + 0.5),
        af.random.categorical(x),
        af.random.choice(x, (2,)),
        af.random.permutation(x),
    ]


def _again(x: Tensor) -> Tensor:
    """A piece that its gradient runs again, and that draws."""
    slope: Tensor = af.gradients(af.recompute(lambda a: af.sin(a) * af.random.normal(af.shape(a)))(x), x)
    return slope


def _on_host(x: Tensor, n: Tensor) -> list[Tensor]:
    text = af.astype(n, "string")
    checked = [af.check_numerics(x), af.astype(text, "int64"), af.concat([text, text])]
    return [*checked, apply(CASE_INDEX, n[0] > 1, n[1] > 1, exclusive=False, has_default=False)[0]]


def _ordering(offsets: Tensor, children: Tensor) -> list[Tensor]:
    graph = af.InputGraph(offsets, children, constant([0, 3]))
    pulls = {"x": offsets[: af.size(children) + 1]}
    return [x for arity in (None, 2) for x in schedules(graph, pulls=pulls, arity=arity)[0] if x is not None]


def _lifted(x: Tensor) -> list[Tensor]:
    def body(row: Tensor) -> list[Tensor]:
        drawn = af.random.normal((2,), seed=1)
        found = [af.searchsorted(af.constant(V), row), af.linspace(af.sum(row), 1.0, 3), drawn]
        return [*found, row[af.argmax(row)], af.constant(V)]

    held, others = split_rows(x[:, 0] > 1.0)
    joined = apply(
        JOIN_ROWS, af.shape(x)[0], held, af.gather(x, held), others, af.gather(x, others), extent=None, absent=False
    )
    return [*af.map_fn(body, x, lift=True), *joined]


def _segments(x: Tensor) -> list[Tensor]:
    starts, owners = constant([0, 2, 2]), constant([0, 0])
    reduced = [apply(REDUCE_SEGMENTS, x, starts, owners, reduce=reduce)[0] for reduce in ("sum", "max")]
    return [*reduced, *apply(SUM_SEGMENTS, x, starts, owners)]


PROGRAMS: tuple[tuple[Callable[..., Any], tuple[Any, ...], bool], ...] = (
    (_unary, (X,), False),
    (_binary, (X, X[:, ::-1].copy()), False),
    (_bits, (N, N + 1), False),
    (_reductions, (X,), False),
    (_shapes, (X,), False),
    (_indexing, (X, N), False),
    (_products, (X, V), False),
    (_decompositions, (X,), False),
    (_transforms, (X,), False),
    (_transposes, (X, V), False),
    (_arrays, (X, N), True),
    (_rows, (X, N), False),
    (_parts, (X, N), False),
    (_layers, (X, N), False),
    (_complex, (X[0] + 1j * X[1],), False),
    (_random, (X, N), False),
    (_again, (X,), False),
    (_on_host, (X, N), False),
    (_ordering, (np.array([0, 0, 0, 2]), np.array([0, 1])), False),
    (_lifted, (X,), False),
    (_segments, (X,), False),
    (af.unstack, (X,), True),
)


@pytest.mark.parametrize(("build", "arrays", "known"), PROGRAMS)
def test_nothing_is_read_on_the_host_unsaid(
    build: Callable[..., Any], arrays: tuple[Any, ...], known: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    check(build, *arrays, known=known)


def _every_op() -> list[Op]:
    for room in ("ops", "control", "autodiff", "lift", "nn", "state", "vertex"):
        package = importlib.import_module(f"asyncflow.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    return [op for op in registered_ops() if op.kernel is not None]


def test_every_op_is_looked_at() -> None:
    """An op that none of the programs has would be looked at nowhere: add it to one."""
    seen = {node.op for build, arrays, known in PROGRAMS for node in traced(build, arrays, known)[0]}
    pure = [op for op in _every_op() if op.effects is None and not op.conduct.is_user]
    missing = sorted(op.name for op in pure if op not in seen and op.name not in NOT_HERE)
    assert not missing, f"add these to a program of this file: {missing}"


def test_a_kernel_that_looks_unsaid_is_found() -> None:
    """The check itself: without what `arange` says, it fails."""
    silent = replace(find_op("reshape_to"), name="silent_reshape_to", host_inputs=())
    with pytest.raises(AssertionError, match="only after a wait"):
        check(lambda x, n: apply(silent, af.stop_gradient(x), n, dims=None)[0], X, np.array([3, 2]))


def test_users_and_strings_stay_on_the_host() -> None:
    user = Op(name="user", infer=lambda x: x, kernel=lambda xp: lambda x: x, conduct=Conduct(is_user=True))
    with Graph():
        x, text = placeholder("float64", (2,)), placeholder("string", (2,))
        assert runs_on_host(apply(user, x)[0].node)
        assert runs_on_host(af.concat([text, text]).node)
        assert runs_on_host(af.astype(text, "float64").node)
        assert not runs_on_host(af.concat([x, x]).node)
        assert runs_on_host(af.TensorArray("string", 2).handle.node)
        assert not runs_on_host(af.TensorArray("float64", 2).handle.node)


def test_what_masks_and_slices_read() -> None:
    with Graph():
        x, i = placeholder("float64", (4, 3)), placeholder("int64", ())
        mask, flag, unsure = placeholder("bool", (4,)), placeholder("bool", ()), placeholder("bool", None)
        rows = placeholder("int64", (2,))
        assert host_inputs(x[i].node) == set()
        assert host_inputs(x[rows].node) == set()
        assert host_inputs(x[i:, rows].node) == {1}
        assert host_inputs(x[mask, i].node) == {1}
        assert host_inputs(x[flag].node) == host_inputs(x[unsure].node) == {0, 1}
        assert host_inputs(af.index_update(x, mask, 1.0).node) == {2}
