from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncflow.autodiff.gradients import gradients
from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import constant, placeholder
from asyncflow.graph.graph import Graph
from asyncflow.graph.op import Op
from asyncflow.ops.indexing import indexing
from asyncflow.ops.matrices import products as linalg
from tests.ops.against_numpy import NUMBERS, compare, kernel_of, sample

ONE_SIDED: Any = ((0,),)
vecdot: Any = np.vecdot
MATMULS = [
    ((3,), (3,)),
    ((2, 3), (3,)),
    ((3,), (3, 2)),
    ((2, 3), (3, 4)),
    ((5, 2, 3), (3, 4)),
    ((3,), (5, 3, 4)),
    ((5, 1, 2, 3), (6, 3, 4)),
    ((0, 3), (3, 2)),
    ((2, 0), (0, 2)),
]


@pytest.mark.parametrize(("a", "b"), MATMULS)
def test_matmul_shapes(evaluate: Any, a: Any, b: Any) -> None:
    x, y = sample(a, "float32"), sample(b, "float32", 1)
    compare(evaluate, lambda s, t: s @ t, x @ y, x, y)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_products_in_every_dtype(evaluate: Any, dtype: Any) -> None:
    x, y = sample((2, 3), dtype), sample((3, 2), dtype, 1)
    compare(evaluate, linalg.matmul, x @ y, x, y)
    compare(evaluate, lambda s, t: linalg.tensordot(s, t, axes=1), np.tensordot(x, y, 1), x, y)
    compare(evaluate, linalg.vecdot, vecdot(x, y.T), x, y.T)
    compare(evaluate, lambda s, t: linalg.einsum("ij,jk->ik", s, t), np.einsum("ij,jk->ik", x, y), x, y)


def test_mixed_dtypes_promote(evaluate: Any) -> None:
    x, y = sample((2, 3), "int32"), sample((3, 2), "float32", 1)
    compare(evaluate, linalg.matmul, x @ y, x, y)
    compare(evaluate, lambda s, t: linalg.einsum("ij,jk", s, t), np.einsum("ij,jk", x, y), x, y)


def test_bfloat16_stays_bfloat16(evaluate: Any) -> None:
    x, y = sample((2, 3), ml_dtypes.bfloat16), sample((3, 2), ml_dtypes.bfloat16, 1)
    wide = (x.astype("float32") @ y.astype("float32")).astype(ml_dtypes.bfloat16)
    compare(evaluate, linalg.matmul, wide, x, y)
    compare(evaluate, lambda s, t: linalg.tensordot(s, t, axes=1), wide, x, y)
    compare(evaluate, lambda s, t: linalg.einsum("ij,jk->ik", s, t), wide, x, y)
    compare(evaluate, linalg.vecdot, vecdot(x, y.T).astype(ml_dtypes.bfloat16), x, y.T)


@pytest.mark.parametrize(
    "product", ["a,b->a", "a,b->", "ab,b->a", "ab,bc,c->a", "a,b,c->a", "matmul", "tensordot", "vecdot"]
)
def test_mixed_dtypes_promote_before_anything_is_computed(evaluate: Any, product: str) -> None:
    """Behaviour 93: as if all operands had been converted first; pairs contracted as they are would wrap around or
    saturate."""
    terms = product.partition("->")[0].split(",") if "->" in product else ["ab", "bc" if product != "vecdot" else "ab"]
    products: dict[str, Any] = {
        "matmul": linalg.matmul,
        "tensordot": lambda x, y: linalg.tensordot(x, y, axes=1),
        "vecdot": linalg.vecdot,
    }
    build = products.get(product, lambda *xs: linalg.einsum(product, *xs))
    for dtypes in itertools.product(("bool", "int8", "uint8", "int64", "float32", "float64", "complex64"), repeat=2):
        arrays = [
            (np.full((3,) * len(term), 1 if kind == "bool" else 100)).astype(kind)
            for term, kind in zip(terms, (dtypes[0], *dtypes[1:] * len(terms)), strict=False)
        ]
        common = np.result_type(*arrays)
        wide = [array.astype(common) for array in arrays]
        reference: dict[str, Any] = {"matmul": np.matmul, "tensordot": partial(np.tensordot, axes=1), "vecdot": vecdot}
        want = reference.get(product, partial(np.einsum, product))(*wide)
        compare(evaluate, build, np.asarray(want, common), *arrays, known=("all",), exact=False)


def test_gradients_of_einsum_promote_first(evaluate: Any) -> None:
    """Behaviour 93: what reaches an operand is a product of all others, of which two may be small integers."""
    x = np.ones(2)
    with Graph():
        operands = constant(x), constant(np.array([100, 100], np.int8)), constant(np.array([100, 100], np.int8))
        (found,) = gradients(linalg.einsum("a,b,c->a", *operands), [operands[0]])
        assert evaluate(found).tolist() == [40000, 40000]


@pytest.mark.parametrize("shape", [(2, 3), (4, 2, 3), (0, 1)])
def test_matrix_transpose(evaluate: Any, shape: Any) -> None:
    x = sample(shape, "int8")
    compare(evaluate, lambda t: t.mT, np.swapaxes(x, -1, -2), x)
    if len(shape) == 2:
        compare(evaluate, lambda t: t.T, x.T, x)


@pytest.mark.parametrize("axes", [0, 1, 2, ((0,), (1,)), ((1, 0), (0, 1)), ((-1,), (-2,))])
def test_tensordot_axes(evaluate: Any, axes: Any) -> None:
    x, y = sample((3, 3), "float64"), sample((3, 3), "float64", 1)
    compare(evaluate, lambda s, t: linalg.tensordot(s, t, axes=axes), np.tensordot(x, y, axes), x, y)


def test_vecdot_conjugates_and_broadcasts(evaluate: Any) -> None:
    x, y = sample((2, 1, 3), "complex64"), sample((4, 3), "complex64", 1)
    compare(evaluate, linalg.vecdot, vecdot(x, y), x, y)
    compare(evaluate, lambda s, t: linalg.vecdot(s, t, axis=-2), vecdot(x, x, axis=-2), x, x)


class _WithoutVecdot:
    """CuPy has no vecdot."""

    def __getattr__(self, name: Any) -> Any:
        if name == "vecdot":
            raise AttributeError(name)
        return getattr(np, name)


def test_vecdot_where_the_library_has_none() -> None:
    x, y = sample((2, 3, 4), "complex64"), sample((3, 1), "complex64", 1)
    kernel = kernel_of(linalg.VECDOT)(_WithoutVecdot(), axis=-2, dtype=np.dtype("complex64"))
    np.testing.assert_allclose(kernel(x, y), vecdot(x, y, axis=-2))


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("ij,jk", [(2, 3), (3, 4)]),
        ("ij->ji", [(2, 3)]),
        ("ii->i", [(3, 3)]),
        ("ii", [(3, 3)]),
        ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
        ("i,j,k->kji", [(2,), (3,), (4,)]),
        ("ij,jk->ik", [(2, 1), (3, 4)]),
        (",i", [(), (3,)]),
        ("ba", [(2, 3)]),
    ],
)
def test_einsum(evaluate: Any, subscripts: Any, shapes: Any) -> None:
    arrays = [sample(shape, "float64", seed) for seed, shape in enumerate(shapes)]
    compare(evaluate, lambda *xs: linalg.einsum(subscripts, *xs), np.einsum(subscripts, *arrays), *arrays)


@pytest.mark.parametrize(
    ("subscripts", "shapes", "calls"),
    [
        ("bqhd,bkhd->bhqk", [(2, 3, 4, 5), (2, 6, 4, 5)], 0),
        ("hkd,hd->kh", [(4, 6, 5), (4, 5)], 0),
        ("iab,jba->ji", [(2, 3, 4), (5, 4, 3)], 0),
        ("i,i->", [(3,), (3,)], 0),
        ("bij,bjk->bik", [(1, 2, 3), (4, 3, 2)], 0),
        ("ij,jk->ik", [(0, 3), (3, 0)], 0),
        ("ij,jk->ik", [(2, 0), (0, 4)], 0),
        ("ij,jk->ik", [(2, 1), (3, 4)], 1),
        ("ij,jk->k", [(2, 3), (3, 4)], 1),
        ("i,j->ij", [(2,), (3,)], 1),
        ("ii,ij->j", [(3, 3), (3, 4)], 1),
    ],
)
def test_einsum_of_two_operands_is_a_product(
    subscripts: str, shapes: Any, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contractions that are products of matrices call no einsum of NumPy's."""
    arrays = [sample(shape, "float64", seed) for seed, shape in enumerate(shapes)]
    want, made, plain = np.einsum(subscripts, *arrays), list[Any](), np.einsum

    def counted(*args: Any, **options: Any) -> Any:
        made.append(args)
        return plain(*args, **options)

    monkeypatch.setattr(np, "einsum", counted)
    found = kernel_of(linalg.EINSUM)(np, subscripts=subscripts, dtype=np.dtype("float64"))(*arrays)
    assert found.shape == want.shape
    np.testing.assert_allclose(found, want, rtol=1e-12)
    assert len(made) == calls


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("...ij,...jk", [(5, 2, 3), (3, 4)]),
        ("b...i, a...i", [(2, 5, 3), (4, 1, 3)]),
        ("i...->...", [(2, 3, 4)]),
        ("...ii->...i", [(2, 3, 3)]),
        ("...,...->...", [(2, 1), (3,)]),
        ("ij...->ji", [(2, 3)]),
        ("...i,...", [(4, 2), ()]),
    ],
)
def test_einsum_with_an_ellipsis(evaluate: Any, subscripts: Any, shapes: Any) -> None:
    arrays = [sample(shape, "float64", seed) for seed, shape in enumerate(shapes)]
    want = np.einsum(subscripts, *arrays)
    compare(evaluate, lambda *xs: linalg.einsum(subscripts, *xs), want, *arrays, known=("all", "rank"), exact=False)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((2, 3), (4, 2), r"\[2,3\] and \[4,2\] must be equal, found 3 and 4"),
        ((3,), (4,), "found 3 and 4"),
        ((), (3,), "one is a scalar"),
        ((2, 2, 3), (3, 3, 4), "do not broadcast"),
    ],
)
def test_matmul_refuses_shapes(a: Any, b: Any, message: Any) -> None:
    with Graph(), pytest.raises(ShapeError, match=message):
        placeholder("float32", a) @ placeholder("float32", b)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda x: linalg.matmul(constant(["a"]), constant(["b"])), DTypeError, "numbers and booleans, not string"),
        (lambda x: linalg.matrix_transpose(constant([1])), ShapeError, "needs rank 2 or higher"),
        (lambda x: linalg.tensordot(x, x, axes=3), ShapeError, "cannot sum over 3 axes"),
        (lambda x: linalg.tensordot(x, x, axes=((0,), (0, 1))), ShapeError, "equally many axes"),
        (lambda x: linalg.tensordot(x, x, axes=ONE_SIDED), GraphError, "an int or two sequences"),
        (lambda x: linalg.tensordot(x, x, axes=1), ShapeError, "found 3 and 2"),
        (lambda x: linalg.vecdot(x, indexing.getitem(x, (slice(None), slice(2)))), ShapeError, "found 3 and 2"),
        (lambda x: linalg.vecdot(placeholder("float64"), x, axis=0), ShapeError, "unknown rank"),
        (lambda x: linalg.einsum("i..,i", x, x), GraphError, "letters, commas"),
        (lambda x: linalg.einsum("i......", x), GraphError, "letters, commas"),
        (lambda x: linalg.einsum("i...->i", x), GraphError, r"must hold '\.\.\.': it stands for 1 axes"),
        (lambda x: linalg.einsum("ijk...", x), ShapeError, r"fewer axes than 'ijk\.\.\.' has letters"),
        (lambda x: linalg.einsum("...i", placeholder("float64")), ShapeError, "unknown rank.*a letter for each axis"),
        (lambda x: linalg.einsum(ONE_SIDED, x), GraphError, "takes its subscripts first"),
        (lambda x: linalg.einsum("ij->k", x), GraphError, "must name letters of the operands"),
        (lambda x: linalg.einsum("ijk", x), ShapeError, "does not have the 3 axes"),
        (lambda x: linalg.einsum("ij,jk", x), ShapeError, "for 2 operands, got 1"),
        (lambda x: linalg.einsum("ij,ji", x, x), ShapeError, "do not broadcast"),
    ],
)
def test_errors_name_the_fault(build: Any, error: Any, message: Any) -> None:
    with Graph(), pytest.raises(error, match=message):
        build(placeholder("float32", (2, 3)))


def flops(op: Op, *args: Any, **attrs: Any) -> float:
    assert op.flops is not None
    return op.flops(*args, **attrs)


def test_flops_count_multiplications_and_additions() -> None:
    assert flops(linalg.MATMUL, [(8, 2, 3), (3, 4)], [(8, 2, 4)], dtype=None) == 2 * 8 * 2 * 3 * 4
    assert flops(linalg.TENSORDOT, [(2, 3, 4), (3, 4, 5)], [(2, 5)], axes=2, dtype=None) == 2 * 2 * 3 * 4 * 5
    assert flops(linalg.EINSUM, [(2, 3), (3, 4)], [(2, 4)], subscripts="ij,jk->ik", dtype=None) == 2 * 2 * 3 * 4
    assert flops(linalg.MATRIX_TRANSPOSE, [(2, 3)], [(3, 2)]) == 0
