"""Arithmetic, mathematical functions, and what passes values on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.op import derivative_of, why_not_differentiable
from asyncflow.graph.values.dtypes import bfloat16
from asyncflow.ops.arithmetic import elementwise, logic
from asyncflow.ops.reductions import utility
from tests.autodiff.sweep import assert_derivatives, gradients_at, kept_values, sweep

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = [((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 1), (1, 3)), ((), (2,)), ((2, 1), ()), ((), ()), ((0, 3), (1, 3))]
"""Broadcasting either way, rank 0, and nothing at all."""

UNARY: list[tuple[str, float, float]] = [
    ("abs", 0.2, 3.0),
    ("acos", -0.9, 0.9),
    ("acosh", 1.2, 4.0),
    ("asin", -0.9, 0.9),
    ("asinh", -3.0, 3.0),
    ("atan", -3.0, 3.0),
    ("atanh", -0.9, 0.9),
    ("conj", -3.0, 3.0),
    ("cos", -3.0, 3.0),
    ("cosh", -3.0, 3.0),
    ("exp", -3.0, 3.0),
    ("expm1", -3.0, 3.0),
    ("log", 0.2, 4.0),
    ("log10", 0.2, 4.0),
    ("log1p", -0.8, 4.0),
    ("log2", 0.2, 4.0),
    ("negative", -3.0, 3.0),
    ("positive", -3.0, 3.0),
    ("real", -3.0, 3.0),
    ("reciprocal", 0.3, 3.0),
    ("sin", -3.0, 3.0),
    ("sinh", -3.0, 3.0),
    ("sqrt", 0.2, 4.0),
    ("square", -3.0, 3.0),
    ("tan", -1.2, 1.2),
    ("tanh", -3.0, 3.0),
]
"""Functions of one value, and a range to take it from."""

BINARY = ["add", "atan2", "copysign", "divide", "hypot", "logaddexp", "maximum", "minimum", "multiply", "subtract"]

HOLOMORPHIC = [name for name, _, _ in UNARY if name not in ("abs", "conj", "real", "log2", "log10")]


def uniform(shape: tuple[int, ...], low: float = -3.0, high: float = 3.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape)


def two_sided(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Of either sign, and away from 0."""
    rng = np.random.default_rng(seed)
    return rng.uniform(0.4, 2.0, shape) * rng.choice([-1.0, 1.0], shape)


def complex_numbers(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return two_sided(shape, seed) + 1j * two_sided(shape, seed + 100)


def all_but_nothing(*gradients: Any) -> list[Any]:
    return [gradient.tolist() for gradient in gradients if gradient is not None]


# -- functions of one value ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "low", "high"), UNARY)
def test_one_value(name: str, low: float, high: float) -> None:
    function = getattr(af, name)
    assert_derivatives(function, uniform((), low, high))
    assert_derivatives(function, uniform((0, 2), low, high))
    assert_derivatives(function, uniform((2, 3), low, high), order=2)


@pytest.mark.parametrize("name", HOLOMORPHIC)
def test_one_complex_value(name: str) -> None:
    order = 2 if name in ("exp", "square", "sqrt", "tanh") else 1
    assert_derivatives(getattr(af, name), complex_numbers((2, 3)), order=order, rtol=1e-4)


@pytest.mark.parametrize("name", ["abs", "sign", "conj", "real", "imag"])
def test_functions_that_are_not_holomorphic(name: str) -> None:
    assert_derivatives(getattr(af, name), complex_numbers((2, 3)), order=2)


def test_abs_of_either_sign() -> None:
    assert_derivatives(af.abs, two_sided((3, 2)), order=2)
    assert all_but_nothing(*gradients_at(af.abs, [-2.0, 0.0, -0.0, 3.0], grad=[np.ones(4)])) == [[-1.0, 0.0, 0.0, 1.0]]


def test_complex_numbers_pass_nothing_at_zero() -> None:
    zero = np.zeros(1, np.complex128)
    assert all_but_nothing(*gradients_at(af.abs, zero)) == [[0]]
    (grad,) = gradients_at(af.sign, zero, grad=[[1 + 2j]])
    assert grad is not None
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("op", [elementwise.FLOOR, elementwise.CEIL, elementwise.ROUND, elementwise.TRUNC])
def test_rounding_has_a_reason(op: Any) -> None:
    assert derivative_of(op) is None
    assert why_not_differentiable(op) == "it is constant almost everywhere"


def test_nothing_flows_through_real_signs_and_rounding() -> None:
    assert gradients_at(lambda x: (af.sign(x), af.floor(x), x // 2), [1.5, -2.5]) == [None]


def test_square_roots_are_infinite_at_zero() -> None:
    assert all_but_nothing(*gradients_at(af.sqrt, [0.0, 4.0], grad=[[1.0, 1.0]])) == [[np.inf, 0.25]]


def test_digits_near_one_are_kept() -> None:
    x = 1 - 2.0**-52
    (grad,) = gradients_at(af.asin, x, grad=[1.0])
    assert grad is not None
    np.testing.assert_allclose(grad, 1 / np.sqrt(2.0**-52 * (2 - 2.0**-52)), rtol=1e-14)


# -- functions of two values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "right"), SHAPES)
@pytest.mark.parametrize("name", BINARY)
def test_two_values(name: str, left: Any, right: Any) -> None:
    assert_derivatives(getattr(af, name), two_sided(left), two_sided(right, 1), known=("all", "nothing"))


@pytest.mark.parametrize("name", BINARY)
def test_two_values_twice(name: str) -> None:
    assert_derivatives(getattr(af, name), two_sided((2,)), two_sided((2, 2), 1), order=2, known=("nothing",))


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide"])
def test_complex_arithmetic(name: str) -> None:
    function: Callable[..., Any] = getattr(af, name)
    z, w = complex_numbers((2, 1)), complex_numbers((3,), 1)
    assert_derivatives(function, z, w, order=2, known=("nothing",))
    assert_derivatives(function, z, two_sided((2, 3)))
    assert_derivatives(function, two_sided(()), w)


@pytest.mark.parametrize("name", ["add", "divide", "multiply", "pow", "maximum"])
def test_integers_get_no_gradient(name: str) -> None:
    whole = np.array([1, 2, 4], np.int32)
    assert_derivatives(getattr(af, name), uniform((3,), 1.1, 1.9), whole)
    assert_derivatives(getattr(af, name), whole, uniform((2, 1), 1.1, 1.9))


def test_every_operand_keeps_its_dtype() -> None:
    def built(x: Any, y: Any) -> Any:
        return x * y + x / y + af.maximum(x, y) + x**y + af.clip(x, y, y + 1)

    single, double = gradients_at(built, np.array([0.5, 2.0], np.float32), np.array([1.5]))
    assert single is not None
    assert double is not None
    assert (single.dtype, double.dtype) == (np.float32, np.float64)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision(name: str) -> None:
    def built(x: Any) -> Any:
        return af.tanh(x) * af.exp(x) / (1 + x * x) + af.sqrt(x) ** 3

    narrow = bfloat16() if name == "bfloat16" else np.float16
    (grad,) = gradients_at(built, np.array([0.5, 1.5], narrow), grad=[[1, 1]])
    (wide,) = gradients_at(built, np.array([0.5, 1.5]), grad=[[1, 1]])
    assert grad is not None
    assert wide is not None
    assert grad.dtype == narrow
    np.testing.assert_allclose(grad.astype(float), wide, rtol=0.05)


def test_ties_are_shared() -> None:
    for function in (af.maximum, af.minimum):
        assert all_but_nothing(*gradients_at(function, [1.0, 2.0], [1.0, 2.0], grad=[[3.0, 1.0]])) == [[1.5, 0.5]] * 2
    assert all_but_nothing(*gradients_at(lambda x: af.maximum(x, 0), [-1.0, 0.0, 1.0], grad=[[1, 1, 1]])) == [
        [0, 0.5, 1]
    ]


def test_the_origin_passes_nothing() -> None:
    for function in (af.hypot, af.atan2):
        assert all_but_nothing(*gradients_at(function, 0.0, 0.0, grad=[1.0])) == [0.0, 0.0]


def test_logaddexp_of_infinities() -> None:
    x, y = [-np.inf, -np.inf, np.inf, np.inf, 0.0], [-np.inf, 0.0, np.inf, 0.0, 0.0]
    assert all_but_nothing(*gradients_at(af.logaddexp, x, y, grad=[np.ones(5)])) == [
        [0.5, 0.0, 0.5, 1.0, 0.5],
        [0.5, 1.0, 0.5, 0.0, 0.5],
    ]
    # A tie of finite values is no kink.
    assert_derivatives(af.logaddexp, [0.0, 1.0], [0.0, 1.0], order=2)


def test_remainder() -> None:
    x, y = np.array([[5.3], [-4.4], [0.7]]), np.array([1.9, -2.3])
    assert_derivatives(af.remainder, x, y, order=2)


def test_nextafter_is_its_first_argument() -> None:
    assert all_but_nothing(*gradients_at(af.nextafter, [1.0, 2.0], 5.0, grad=[[3.0, 4.0]])) == [[3.0, 4.0]]


# -- powers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_powers(left: Any, right: Any) -> None:
    assert_derivatives(af.pow, uniform(left, 0.3, 2.0), uniform(right, seed=1), known=("all", "nothing"))


def test_powers_twice() -> None:
    assert_derivatives(af.pow, uniform((2,), 0.3, 2.0), uniform((2, 1), seed=1), order=2)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, -1, -2, 0.5, 2.5, np.float64(3), np.int64(2), 1 + 2j])
def test_constant_exponents(exponent: Any) -> None:
    assert_derivatives(lambda x: x**exponent, uniform((2, 3), 0.3, 2.0), order=2)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, -2, 3.0])
def test_whole_powers_of_negative_numbers(exponent: Any) -> None:
    assert_derivatives(lambda x: x**exponent, two_sided((2, 3)), order=2)


def test_constant_bases() -> None:
    assert_derivatives(lambda y: 2.0**y, uniform((2, 3)), order=2)


def test_complex_powers() -> None:
    z = np.array([0.5 + 0.4j, 1.2 - 0.7j])
    assert_derivatives(af.pow, z, complex_numbers((2, 1), 1), order=2, known=("nothing",), rtol=1e-4)
    assert_derivatives(af.pow, z, uniform((2,)))
    assert_derivatives(lambda x: x**3, z)


def test_powers_at_zero() -> None:
    ones = [np.ones(4)]
    base, exponent = gradients_at(af.pow, [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0], grad=ones)
    assert all_but_nothing(base, exponent) == [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    assert all_but_nothing(*gradients_at(lambda x: x**0, [0.0, 1.0], grad=[[1.0, 1.0]])) == [[0.0, 0.0]]
    assert all_but_nothing(*gradients_at(lambda x: x**1, [0.0, np.inf], grad=[[1.0, 1.0]])) == [[1.0, 1.0]]


def test_no_exponent_of_a_negative_base() -> None:
    _, exponent = gradients_at(af.pow, -2.0, 2.0, grad=[1.0])
    assert exponent is not None
    assert np.isnan(exponent)


# -- clip ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [((6,), (), ()), ((2, 6), (6,), (2, 1)), ((), (2,), ()), ((0,), (), (1,))])
def test_clip(shapes: Any) -> None:
    x, low, high = uniform(shapes[0]), uniform(shapes[1], -1.5, -0.5, 1), uniform(shapes[2], 0.5, 1.5, 2)
    assert_derivatives(af.clip, x, low, high)
    assert_derivatives(af.clip, x, low)
    assert_derivatives(lambda x, high: af.clip(x, max=high), x, high)
    assert_derivatives(lambda x: af.clip(x, -1, 1) * x, x, order=2)


def test_a_value_on_a_bound_takes_the_gradient() -> None:
    assert all_but_nothing(*gradients_at(af.clip, [-1.0, 0.0, 1.0, -2.0, 2.0], -1.0, 1.0, grad=[np.ones(5)])) == [
        [1.0, 1.0, 1.0, 0.0, 0.0],
        1.0,
        1.0,
    ]


def test_bounds_that_cross() -> None:
    assert_derivatives(af.clip, [-2.0, 0.0, 2.0], 1.0, -1.0)


def test_clip_in_a_wider_dtype() -> None:
    whole = np.array([-3, 0, 3])
    assert_derivatives(lambda x, low: af.clip(x, low, 1.5), whole, np.float64(-1.5))


# -- what passes values on -------------------------------------------------------------------------------------------


def test_identity_and_checks_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert_derivatives(af.identity, two_sided((2, 3)))
    assert_derivatives(af.check_numerics, two_sided((2, 3)))
    assert_derivatives(af.print, two_sided((2,)), two_sided((3,)), known=("rank",))
    assert "print" not in kept_values(af.print, 1.0)
    assert capsys.readouterr().out


@pytest.mark.parametrize("n", [0, 1, 2, 3])
@pytest.mark.parametrize("axis", [0, -1])
def test_diff(n: int, axis: int) -> None:
    assert_derivatives(lambda x: utility.diff(x, n=n, axis=axis) ** 2, uniform((4, 3)), order=2)
    assert_derivatives(lambda x: utility.diff(x, n=n, axis=axis), uniform((2, 0)))


def test_diff_of_too_few() -> None:
    assert_derivatives(lambda x: utility.diff(x, n=3), uniform((2,)))
    assert all_but_nothing(*gradients_at(lambda x: utility.diff(x, n=3), [1.0, 2.0], known="nothing")) == [[0.0, 0.0]]


@pytest.mark.parametrize("op", [logic.EQUAL, logic.ISNAN, logic.BITWISE_XOR, utility.ALL])
def test_booleans_and_bits_have_a_reason(op: Any) -> None:
    assert derivative_of(op) is None
    assert why_not_differentiable(op)


# -- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["add", "subtract"])
def test_sums_keep_shapes_alone(name: str) -> None:
    assert kept_values(getattr(af, name), 1.0, 2.0) == set()


@pytest.mark.parametrize("name", ["exp", "expm1", "tanh", "tan", "sqrt", "reciprocal"])
def test_functions_that_keep_their_result(name: str) -> None:
    assert kept_values(getattr(af, name), 1.0) == {name}


def test_products_keep_their_factors() -> None:
    assert kept_values(af.multiply, 1.0, 2.0) == {"x0", "x1"}
    assert kept_values(af.divide, 1.0, 2.0) == {"x1", "divide"}
    assert kept_values(lambda x: x**3, 2.0) >= {"x0"}


OPEN = [((None, 3), (3,)), ((None, None), ()), ((None, 3), (1, 1)), (None, ())]
"""Shapes of which the first, whatever it turns out to be, is not stretched by the second."""

MAY_STRETCH = [((None, 1), (3,)), ((None,), (3,)), ((None,), (None,)), (None, (1,)), ((), None)]


@pytest.mark.parametrize(("left", "right"), OPEN)
@pytest.mark.parametrize("name", [*BINARY, "pow"])
def test_what_broadcasting_cannot_stretch_is_not_summed(name: str, left: Any, right: Any) -> None:
    assert not built_for_first(name, left, right) & {"sum_to", "shape"}


@pytest.mark.parametrize(("left", "right"), MAY_STRETCH)
def test_what_broadcasting_may_stretch_is_summed(left: Any, right: Any) -> None:
    assert "sum_to" in built_for_first("multiply", left, right)


def built_for_first(name: str, left: Any, right: Any) -> set[str]:
    """The ops that make the gradient of the first operand."""
    with af.Graph():
        x, y = af.placeholder("float64", left), af.placeholder("float64", right)
        z = getattr(af, name)(x, y)
        (grad,) = sweep([z], [x], [af.placeholder("float64", z.shape)])
    assert grad is not None
    found, nodes = set(), [grad.node]
    while nodes:
        node = nodes.pop()
        found.add(node.op.name)
        nodes += [item.node for item in node.inputs]
    return found


def test_a_square_by_hand_is_not_summed() -> None:
    with af.Graph() as graph:
        x = af.placeholder("float64", None)
        sweep([x * x], [x], [af.placeholder("float64", None)])
    assert not [node for node in graph.nodes if node.op.name == "sum_to"]


@pytest.mark.parametrize("name", ["tanh", "exp", "negative", "abs"])
def test_functions_of_one_value_keep_no_shape(name: str) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float64", None)
        sweep([getattr(af, name)(x)], [x], [af.placeholder("float64", None)])
    assert not graph.shapes


@pytest.mark.filterwarnings("ignore:overflow", "ignore:underflow")
def test_slopes_where_squares_are_no_numbers() -> None:
    """The square of a large value is infinite and that of a small one 0, but the slope is neither."""
    found: Any = gradients_at
    for scale in (2.0**600, 2.0**-600):
        by_y, by_x = found(af.atan2, [3 * scale], [4 * scale], grad=[np.ones(1)])
        assert [by_y[0] * scale, by_x[0] * scale] == [pytest.approx(0.16), pytest.approx(-0.12)]
        assert [g[0] for g in found(af.hypot, [3 * scale], [4 * scale], grad=[np.ones(1)])] == [0.6, 0.8]
    assert found(af.asinh, [2.0**600], grad=[np.ones(1)])[0] == 2.0**-600


def test_a_complex_sign_passes_nothing_at_0() -> None:
    (found,) = gradients_at(af.sign, np.array([0, 3 + 4j]), grad=[np.array([1 + 2j, 1 + 2j])])
    assert found is not None
    assert found[0] == 0 and found[1] != 0
