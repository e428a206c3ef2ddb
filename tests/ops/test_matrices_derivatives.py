"""Products of vectors, matrices and stacks of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.op import derivative_of
from asyncflow.graph.values.dtypes import bfloat16
from asyncflow.ops.matrices import products as linalg
from tests.autodiff.sweep import assert_derivatives, gradients_at, kept_values

MATMULS = [
    ((3,), (3,)),
    ((2, 3), (3,)),
    ((3,), (3, 2)),
    ((2, 3), (3, 4)),
    ((2, 2, 3), (3, 2)),
    ((2, 3), (2, 3, 2)),
    ((3,), (2, 3, 2)),
    ((2, 2, 3), (3,)),
    ((2, 1, 2, 3), (2, 3, 2)),
    ((1, 2, 3), (2, 3, 1)),
    ((2, 3), (2, 1, 3, 2)),
    ((0, 3), (3, 2)),
    ((2, 0), (0, 2)),
    ((0, 2, 3), (3, 2)),
]

TENSORDOTS: list[tuple[tuple[int, ...], tuple[int, ...], Any]] = [
    ((2, 3), (3, 2), 1),
    ((2, 3), (2, 3), 2),
    ((2,), (3, 2), 0),
    ((2, 3, 4), (4, 2, 2), ((2, 0), (0, 1))),
    ((2, 3, 2), (3, 2, 2), ((1, 2), (0, -1))),
    ((3, 3), (3, 3), ((1, 0), (0, 1))),
    ((2, 3), (3, 2), ((), ())),
    ((), (2,), 0),
    ((0, 2), (2, 3), 1),
]

VECDOTS = [
    ((3,), (3,), -1),
    ((2, 3), (3,), -1),
    ((2, 1, 3), (2, 3), -1),
    ((3, 2), (3, 2), 0),
    ((2, 3, 2), (3, 1), -2),
    ((3, 2, 2), (3, 2), 0),
    ((2, 0), (0,), -1),
]

EINSUMS: list[tuple[str, list[tuple[int, ...]]]] = [
    ("ij,jk->ik", [(2, 3), (3, 2)]),
    ("ij,jk", [(2, 3), (3, 2)]),
    ("bik,bkj->bij", [(2, 2, 3), (2, 3, 1)]),
    ("ij->ji", [(2, 3)]),
    ("ij->i", [(2, 3)]),
    ("ij->", [(2, 3)]),
    ("i,j->ij", [(2,), (3,)]),
    ("i,i->", [(3,), (3,)]),
    ("ij,ij,i->j", [(2, 3), (2, 3), (2,)]),
    ("ij,kl->il", [(2, 3), (2, 2)]),
    ("ii->i", [(3, 3)]),
    ("ii->", [(3, 3)]),
    ("iij,j->i", [(2, 2, 3), (3,)]),
    ("iji,k->jk", [(2, 3, 2), (2,)]),
    ("iiij->ij", [(2, 2, 2, 2)]),
    ("ij,j->ij", [(2, 3), (1,)]),
    ("ij,jk->ik", [(2, 3), (1, 2)]),
    ("ij,jk->ik", [(2, 1), (3, 2)]),
    (",i->i", [(), (3,)]),
    ("ij,jk->ik", [(0, 3), (3, 2)]),
]


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-2, 2, shape)


def complex_values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return values(shape, seed) + 1j * values(shape, seed + 100)


# -- matmul ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "right"), MATMULS)
def test_matmul(left: Any, right: Any) -> None:
    assert_derivatives(linalg.matmul, values(left), values(right, 1))


@pytest.mark.parametrize(("left", "right"), MATMULS[:9])
@pytest.mark.parametrize("known", ["all", "nothing"])
def test_matmul_twice(left: Any, right: Any, known: str) -> None:
    # At order 2 the transposes themselves are differentiated, with the gradient as an operand of them.
    def weighted(x: Any, y: Any, w: Any) -> Any:
        return (x @ y) * w

    scale = values((), 2)
    assert_derivatives(weighted, values(left), values(right, 1), scale, order=2, known=(known,))


@pytest.mark.parametrize(("left", "right"), [MATMULS[3], MATMULS[1], MATMULS[2], MATMULS[4], MATMULS[8]])
def test_complex_matmul(left: Any, right: Any) -> None:
    assert_derivatives(linalg.matmul, complex_values(left), complex_values(right, 1), order=2, known=("all", "nothing"))
    assert_derivatives(linalg.matmul, values(left), complex_values(right, 1))


def test_a_batch_of_vectors_reaches_a_matrix_in_one_product() -> None:
    with af.Graph() as graph:
        x, w = af.placeholder("float32", (None, None, 3)), af.placeholder("float32", (3, 2))
        grad = af.placeholder("float32", (None, None, 2))
        from_x = linalg.matmul(x, w)
        rule = rule_of(from_x)
        _, by_w = rule(from_x.node, grad)
    assert by_w.shape == (3, 2)
    assert not [node for node in graph.nodes if node.op.name == "sum_to"]


def rule_of(y: Any) -> Any:
    found = derivative_of(y.node.op)
    assert found is not None
    return found


@pytest.mark.parametrize("product", [lambda x, y: linalg.tensordot(x, y, axes=1), linalg.vecdot, linalg.matmul])
def test_known_parts_of_a_shape_stay_known(product: Any) -> None:
    with af.Graph():
        x, y = af.placeholder("float64", (None, 3)), af.placeholder("float64", (3,))
        z = product(x, y)
        by_x, by_y = rule_of(z)(z.node, af.placeholder("float64", z.shape))
    assert (by_x.shape, by_y.shape) == ((None, 3), (3,))


@pytest.mark.parametrize("shape", [(2, 3), (2, 2, 3), (0, 2)])
def test_matrix_transpose(shape: Any) -> None:
    assert_derivatives(linalg.matrix_transpose, values(shape), order=2)


# -- tensordot -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "right", "axes"), TENSORDOTS)
def test_tensordot(left: Any, right: Any, axes: Any) -> None:
    known = ("all", "rank", "nothing") if isinstance(axes, int) else ("all", "rank")
    assert_derivatives(lambda x, y: linalg.tensordot(x, y, axes=axes), values(left), values(right, 1), known=known)


@pytest.mark.parametrize(("left", "right", "axes"), TENSORDOTS[:5])
def test_tensordot_twice(left: Any, right: Any, axes: Any) -> None:
    def built(x: Any, y: Any) -> Any:
        return linalg.tensordot(x, y, axes=axes)

    known = "nothing" if isinstance(axes, int) else "rank"
    assert_derivatives(built, values(left), values(right, 1), order=2, known=(known,))
    assert_derivatives(built, complex_values(left), complex_values(right, 1), order=2, known=("all",))


def test_listed_axes_of_unknown_ranks_have_no_gradient() -> None:
    with af.Graph():
        x = af.placeholder("float64")
        y = linalg.tensordot(x, x, axes=((0,), (1,)))
        with pytest.raises(af.ShapeError, match=r"axes \(\(0,\), \(1,\)\) has a gradient where ranks are known"):
            af.gradients(af.sum(y), [x])


def test_higher_orders_of_tensordot_use_both_transposes() -> None:
    def cubic(x: Any, y: Any) -> Any:
        return linalg.tensordot(linalg.tensordot(x, y, axes=((1,), (0,))), x, axes=((1,), (0,)))

    assert_derivatives(cubic, values((2, 2)), values((2, 2), 1), order=3, rtol=1e-4, known=("all", "rank"))


# -- vecdot ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "right", "axis"), VECDOTS)
def test_vecdot(left: Any, right: Any, axis: int) -> None:
    def built(x: Any, y: Any) -> Any:
        return linalg.vecdot(x, y, axis=axis)

    known = ("all", "nothing") if axis < 0 else ("all", "rank")
    assert_derivatives(built, values(left), values(right, 1), order=2, known=known)
    assert_derivatives(built, complex_values(left), complex_values(right, 1), order=2, known=("rank",))
    assert_derivatives(built, values(left), complex_values(right, 1), known=known)


# -- einsum ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("subscripts", "shapes"), EINSUMS)
def test_einsum(subscripts: str, shapes: Any) -> None:
    def built(*xs: Any) -> Any:
        return linalg.einsum(subscripts, *xs)

    assert_derivatives(built, *(values(shape, seed) for seed, shape in enumerate(shapes)))
    assert_derivatives(built, *(complex_values(shape, seed) for seed, shape in enumerate(shapes)), known=("nothing",))


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [("...ij,jk", [(2, 2, 3), (3, 2)]), ("b...i,a...i", [(2, 3, 2), (2, 1, 2)]), ("...ii->...", [(2, 2, 2)])],
)
def test_einsum_with_an_ellipsis(subscripts: str, shapes: Any) -> None:
    def built(*xs: Any) -> Any:
        return linalg.einsum(subscripts, *xs)

    assert_derivatives(built, *(values(shape, seed) for seed, shape in enumerate(shapes)), known=("rank",))


@pytest.mark.parametrize(("subscripts", "shapes"), EINSUMS[:17])
def test_einsum_twice(subscripts: str, shapes: Any) -> None:
    def built(*xs: Any) -> Any:
        return linalg.einsum(subscripts, *xs)

    arrays = [values(shape, seed) for seed, shape in enumerate(shapes)]
    assert_derivatives(built, *arrays, order=2, known=("nothing",))


# -- dtypes ----------------------------------------------------------------------------------------------------------

PRODUCTS: list[Any] = [
    linalg.matmul,
    lambda x, y: linalg.tensordot(x, y, axes=1),
    lambda x, y: linalg.vecdot(x, linalg.matrix_transpose(y)),
    lambda x, y: linalg.einsum("ij,jk->ik", x, y),
]


@pytest.mark.parametrize("product", PRODUCTS)
def test_integers_get_no_gradient(product: Any) -> None:
    whole = np.array([[1, 2], [3, 4]], np.int32)
    assert_derivatives(product, values((2, 2)), whole)
    assert_derivatives(product, whole, values((2, 2)))


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("known", ["all", "nothing"])
@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float16", "float32"), ("bfloat16", "bfloat16")])
def test_every_operand_keeps_its_dtype(product: Any, known: str, dtypes: tuple[str, str]) -> None:
    first, second = (bfloat16() if name == "bfloat16" else np.dtype(name) for name in dtypes)
    x, y = values((2, 2)), values((2, 2), 1)
    wide = gradients_at(product, x, y)
    found = gradients_at(product, x.astype(first), y.astype(second), known=known)
    for grad, want, dtype in zip(found, wide, (first, second), strict=True):
        assert grad is not None
        assert want is not None
        assert grad.dtype == dtype
        np.testing.assert_allclose(grad.astype(float), want, rtol=0.05, atol=0.1)


# -- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("product", [linalg.matmul, linalg.vecdot])
def test_products_keep_their_factors_alone(product: Any) -> None:
    assert kept_values(product, [1.0], [1.0]) == {"x0", "x1"}


def test_transposes_and_sums_keep_nothing() -> None:
    assert kept_values(linalg.matrix_transpose, [[1.0]]) == set()
    assert kept_values(lambda x: linalg.einsum("ij->i", x), [[1.0]]) == set()
