from __future__ import annotations

import contextvars
import inspect
import itertools
import operator
import warnings
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import constant, placeholder
from asyncflow.graph.graph import Graph
from asyncflow.graph.op import find_op
from asyncflow.graph.values.dtypes import string
from asyncflow.ops.arithmetic import elementwise, logic

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(c) for c in "?bhilBHILefdFD"] + [BFLOAT16]
IDS = [str(dtype) for dtype in DTYPES]
NUMPY_NAMES = {
    "abs": "absolute",
    "conj": "conjugate",
    "bitwise_invert": "invert",
    "bitwise_left_shift": "left_shift",
    "bitwise_right_shift": "right_shift",
    "pow": "power",
    "round": "rint",
    "acos": "arccos",
    "acosh": "arccosh",
    "asin": "arcsin",
    "asinh": "arcsinh",
    "atan": "arctan",
    "atan2": "arctan2",
    "atanh": "arctanh",
}
PUBLIC = {
    name: function
    for module in (elementwise, logic)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
}
FUNCTIONS = {name: function for name, function in PUBLIC.items() if name not in ("clip", "real", "imag", "conj")}
UFUNCS = {name: getattr(np, NUMPY_NAMES.get(name, name)) for name in FUNCTIONS}
UNARY = [name for name, ufunc in UFUNCS.items() if ufunc.nin == 1]
BINARY = [name for name, ufunc in UFUNCS.items() if ufunc.nin == 2]
ROUNDING = ("ceil", "floor", "round", "trunc")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from asyncflow.values import Kernel

    Evaluate: TypeAlias = Callable[..., Any]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"), Graph():
        yield


def values(dtype: np.dtype) -> list:
    if dtype.kind == "b":
        return [0, 1]
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return [x for x in (info.min, -7, -1, 0, 1, 2, 3, 5, info.max) if x >= info.min]
    if dtype.kind == "c":
        return [0, 1, 1j, -2 + 3j, complex("inf"), complex("nan")]
    return [0.0, -0.0, 1, -1, 2.5, -2.5, 0.1, 6e4, np.inf, -np.inf, np.nan]


def sample(dtype: np.dtype) -> np.ndarray:
    return np.array(values(dtype)).astype(dtype)


def expected_dtype(ufunc: np.ufunc, *dtypes: np.dtype) -> np.dtype | None:
    try:
        if len(set(dtypes)) > 1:
            np.result_type(*dtypes)
        return ufunc.resolve_dtypes((*dtypes, None))[-1]
    except TypeError:
        return None


def same(got: Any, want: Any) -> bool:
    got, want = np.asarray(got), np.asarray(want)
    equal_nan = want.dtype.kind in "fcV"
    if want.dtype == BFLOAT16:
        got, want = got.astype("f4"), want.astype("f4")
    return got.dtype == want.dtype and got.shape == want.shape and np.array_equal(got, want, equal_nan=equal_nan)


def test_every_function_of_the_standard_is_there() -> None:
    standard = """
    abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_invert bitwise_or
    bitwise_right_shift bitwise_xor ceil clip conj copysign cos cosh divide equal exp expm1 floor floor_divide
    greater greater_equal hypot imag isfinite isinf isnan less less_equal log log1p log2 log10 logaddexp
    logical_and logical_not logical_or logical_xor maximum minimum multiply negative nextafter not_equal
    positive pow real reciprocal remainder round sign signbit sin sinh square sqrt subtract tan tanh trunc
    """
    assert set(standard.split()) <= set(PUBLIC)


@pytest.mark.parametrize("name", UNARY)
def test_unary_equals_numpy(evaluate: Evaluate, name: str) -> None:
    for dtype in DTYPES:
        x = sample(dtype)
        if name in ROUNDING and dtype.kind in "biu":
            assert same(evaluate(FUNCTIONS[name](x)), x)
            continue
        if expected_dtype(UFUNCS[name], dtype) is None:
            with pytest.raises(DTypeError, match=r"is not defined for"):
                FUNCTIONS[name](x)
            continue
        want = UFUNCS[name](x)
        assert same(evaluate(FUNCTIONS[name](x)), want)
        feed = placeholder(dtype, (None,))
        assert same(evaluate(FUNCTIONS[name](feed), {feed: x[:0]}), want[:0])
        for item in x[:3]:
            assert same(evaluate(FUNCTIONS[name](item)), UFUNCS[name](item))


@pytest.mark.parametrize("name", BINARY)
def test_binary_equals_numpy_for_every_pair_of_dtypes(evaluate: Evaluate, name: str) -> None:
    function, ufunc = FUNCTIONS[name], UFUNCS[name]
    for a, b in itertools.product(DTYPES, DTYPES):
        x, y = sample(a)[:, None], sample(b)
        if name == "pow" and b.kind == "i":
            y = np.abs(y)[1:-1]
        if expected_dtype(ufunc, a, b) is None:
            with pytest.raises(DTypeError):
                function(x, y)
            continue
        feed = placeholder(a, (None, 1))
        built, want = function(feed, y), ufunc(x, y)
        assert built.dtype == want.dtype, (a, b)
        if (DTYPES.index(a) + DTYPES.index(b)) % 3 == 0:  # the kernel is the ufunc, whatever the dtypes
            assert same(evaluate(built, {feed: x}), want), (a, b)


def scalar_kernel(name: str) -> Kernel:
    kernel = find_op(name).scalar_kernel
    assert kernel is not None
    return kernel


SCALAR = sorted(name for name in FUNCTIONS if find_op(name).scalar_kernel is not None)


@pytest.mark.parametrize("name", SCALAR)
def test_scalar_kernel_gives_the_bits_of_the_ufunc(name: str) -> None:
    ufunc, scalar = UFUNCS[name], scalar_kernel(name)
    for dtypes in itertools.product(DTYPES, repeat=ufunc.nin):
        if expected_dtype(ufunc, *dtypes) is None:
            continue
        if name == "multiply" and "c" in (dtype.kind for dtype in dtypes):
            continue
        for items in itertools.product(*(values(dtype) for dtype in dtypes)):
            operands = [dtype.type(item) for dtype, item in zip(dtypes, items, strict=True)]
            want, got = ufunc(*operands), scalar(*operands)
            assert type(got) is type(want)
            assert np.asarray(got).tobytes() == np.asarray(want).tobytes() or (got != got and want != want), operands


@given(
    st.data(),
    st.sampled_from(["add", "subtract", "multiply", "divide"]),
    st.sampled_from([np.dtype(c) for c in "efdFD"]),
)
def test_scalar_arithmetic_gives_the_bits_of_the_ufunc_on_any_float(data: st.DataObject, name: str, dtype: Any) -> None:
    assume(name != "multiply" or dtype.kind != "c")
    x, y = (dtype.type(data.draw(hnp.from_dtype(dtype))) for _ in range(2))
    got, want = scalar_kernel(name)(x, y), UFUNCS[name](np.array([x]), np.array([y]))[0]
    assert type(got) is type(want)
    assert same(got, want)


def test_complex_products_have_no_scalar_kernel_because_numpy_rounds_them_differently() -> None:
    for x, y in [(1j, 2.0), (np.float32(1), np.complex64(1))]:
        op = elementwise.multiply(x, y).node.op
        assert op.name == "complex_multiply" and op.scalar_kernel is None
    assert elementwise.multiply(1.0, 2).node.op.name == "multiply"


OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<<": operator.lshift,
    ">>": operator.rshift,
}


@pytest.mark.parametrize("symbol", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_operators_take_python_scalars_as_weak(evaluate: Evaluate, symbol: str, dtype: Any) -> None:
    act = OPERATORS[symbol]
    x = sample(dtype)[-3:]
    for weak in (True, 2, 2.5, 2j):
        for swapped in (False, True):
            operands = (weak, x) if swapped else (x, weak)
            if symbol == "**" and dtype.kind == "b" and weak == 2:
                continue  # here NumPy's operator and its function differ
            try:
                want = act(*operands)
            except TypeError:
                continue
            if dtype == BFLOAT16 and isinstance(weak, float) and want.dtype != bool:
                want = act(*(BFLOAT16.type(o) if o is weak else o for o in operands))
            symbolic = tuple(constant(x) if o is x else o for o in operands)
            got = evaluate(act(*symbolic))
            if symbol == "**":
                np.testing.assert_allclose(got.astype("D"), want.astype("D"), rtol=1e-2 if dtype.itemsize < 4 else 1e-5)
                assert got.dtype == want.dtype
            else:
                assert same(got, want), (weak, swapped)


WEAK = (True, 0, 3, -1, 300, 2**40, 2**70, 0.5, 1e300, 1e-300, float("nan"), 1j, 1e300j)


@pytest.mark.parametrize("name", BINARY)
def test_binary_functions_take_every_scalar_that_numpy_takes(evaluate: Evaluate, name: str) -> None:
    """Behaviour 93: with NumPy's dtypes and values: what divides, or is only compared or true, need not fit the
    integers."""
    function, ufunc = FUNCTIONS[name], UFUNCS[name]
    for dtype in DTYPES[:-1]:
        x = sample(dtype)[:4]
        for weak, swapped in itertools.product(WEAK, (False, True)):
            with warnings.catch_warnings(action="ignore"):
                try:
                    want = ufunc(*((weak, x) if swapped else (x, weak)))
                except (TypeError, OverflowError, ValueError):
                    continue
            with Graph():  # a small one: all nodes before the one asked for are evaluated
                built = function(*((weak, constant(x)) if swapped else (constant(x), weak)))
            assert same(evaluate(built), want), (dtype, weak, swapped)


def test_unary_operators(evaluate: Evaluate) -> None:
    x = constant(np.array([-3, 4], np.int32))
    assert evaluate(-x).tolist() == [3, -4]
    assert evaluate(+x).tolist() == [-3, 4]
    assert evaluate(abs(x)).tolist() == [3, 4]
    assert evaluate(~x).tolist() == [2, -5]


def test_numpy_scalars_are_strong_and_arrays_on_the_left_leave_the_operation_to_us(
    evaluate: Evaluate,
) -> None:
    x = constant(np.array([1], np.float32))
    assert (x + np.float64(1)).dtype == np.float64
    assert (np.array([1], np.float64) + x).dtype == np.float64
    assert (np.float32(1) + x).dtype == np.float32
    assert evaluate(np.arange(3) - constant(1)).tolist() == [-1, 0, 1]


def test_operators_work_outside_the_graph_that_is_built() -> None:
    with Graph() as graph:
        x = placeholder("float32", (2,))
    y = contextvars.Context().run(lambda: (x + 1) * 2.5 > 3)
    assert y.graph is graph


@pytest.mark.parametrize("dtype", ["uint8", "int64", "uint64", "float32"])
@pytest.mark.parametrize("bound", [-1, 300, 2**63, 2**64, -(2**70), 10**400])
@pytest.mark.parametrize("name", ["less", "less_equal", "greater", "greater_equal", "equal", "not_equal"])
def test_comparing_with_an_integer_out_of_range_is_exact(evaluate: Evaluate, dtype: Any, bound: int, name: str) -> None:
    x = np.array([0, 44, 255], dtype)
    assert evaluate(FUNCTIONS[name](x, bound)).tolist() == [getattr(operator, _SHORT[name])(int(i), bound) for i in x]


_SHORT = {"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq", "not_equal": "ne"}


def test_python_integer_out_of_range_is_refused_where_it_would_wrap() -> None:
    with pytest.raises(DTypeError, match=r"add: no common dtype for uint8, 300(?s:.*)written at .*test_elementwise"):
        constant(np.uint8(3)) + 300


def test_comparison_with_what_no_tensor_can_hold_is_by_identity() -> None:
    x: Any = constant(1.0)
    missing = None
    assert (x == missing) is False
    assert (x != missing) is True
    assert (x == {}) is False
    with pytest.raises(DTypeError):
        logic.equal(x, None)


def test_strings_compare_but_do_not_add(evaluate: Evaluate) -> None:
    x = constant(np.array(["a", "b"], dtype=string))
    assert evaluate(x == "a").tolist() == [True, False]
    assert evaluate(x < x).tolist() == [False, False]
    assert evaluate(constant("a") == constant("a")) == np.True_
    with pytest.raises(DTypeError, match=r"add: is not defined for string and string"):
        x + x
    with pytest.raises(DTypeError, match=r"no common dtype for string"):
        _ = x == 1


def test_bfloat16_and_float16_have_the_common_dtype_that_numpy_knows() -> None:
    """Until version 0.6 of `ml-dtypes` there is none; from 0.7 on it is float32."""
    x, y = constant(np.ones(2, BFLOAT16)), constant(np.float16(1))
    try:
        common = np.result_type(x.dtype, y.dtype)
    except TypeError:
        with pytest.raises(DTypeError, match=r"add: no common dtype for bfloat16, float16; convert one with af.astype"):
            x + y
    else:
        assert (x + y).dtype == common == np.float32


def test_shapes_broadcast_and_unknown_ones_stay_unknown() -> None:
    x, y = placeholder("float32", (None, 3)), placeholder("float32", (2, 1))
    assert (x + y).shape == (2, 3)
    assert (x + placeholder("float32", (1,))).shape == (None, 3)
    assert (x + placeholder("float32")).shape is None
    with pytest.raises(ShapeError, match=r"add: shapes \[\?,3\] and \[4\] do not broadcast"):
        x + placeholder("float32", (4,))


def test_pow_squares_exactly_and_refuses_negative_powers_of_integers(evaluate: Evaluate) -> None:
    x = np.array([1.1, -3.3], np.float32)
    assert same(evaluate(constant(x) ** 2), x * x)
    assert same(evaluate(constant(np.array([100], np.int8)) ** 2), np.array([100], np.int8) ** 2)
    assert (constant(True) ** 2).dtype == np.int64
    with pytest.raises(DTypeError, match=r"have no power -1; convert it to a float dtype"):
        constant(np.int32(3)) ** -1


@pytest.mark.parametrize("dtype", DTYPES[:12] + [BFLOAT16], ids=IDS[:12] + ["bfloat16"])
def test_clip(evaluate: Evaluate, dtype: Any) -> None:
    if dtype.kind == "c":
        with pytest.raises(DTypeError, match=r"takes real numbers"):
            elementwise.clip(np.ones(2, dtype), 0, 1)
        return
    x = sample(dtype)
    lo, hi = dtype.type(1), dtype.type(3)
    assert same(evaluate(elementwise.clip(x, lo, hi)), np.minimum(np.maximum(x, lo), hi))
    assert same(evaluate(elementwise.clip(x, min=lo)), np.maximum(x, lo))
    assert same(evaluate(elementwise.clip(x, max=hi)), np.minimum(x, hi))
    assert same(evaluate(elementwise.clip(x)), x)
    assert same(evaluate(elementwise.clip(x[1], lo, hi)), np.minimum(np.maximum(x[1], lo), hi))


def test_clip_does_not_wrap_bounds_around(evaluate: Evaluate) -> None:
    """Bounds that the dtype cannot hold limit nothing, or to the value next to them."""
    x = np.array([-128, -1, 127], np.int8)
    low, high = np.int64(-1000), np.int64(300)
    assert same(evaluate(elementwise.clip(x, low, high)), x)
    assert same(evaluate(elementwise.clip(x, -1000, 300)), x)
    assert same(evaluate(elementwise.clip(x, high)), np.full(3, 127, np.int8))
    assert same(evaluate(elementwise.clip(x.view(np.uint8), -1, 200)), np.array([128, 200, 127], np.uint8))
    with pytest.raises(DTypeError, match=r"no common dtype for int8, 300"):
        elementwise.clip(x, 300)


def test_clip_keeps_the_dtype_for_bounds_of_its_kind(evaluate: Evaluate) -> None:
    assert elementwise.clip(np.array([1], np.int8), np.int64(0), np.int64(9)).dtype == np.int8
    assert elementwise.clip(np.array([1], np.int8), 0.5).dtype == np.float64
    assert elementwise.clip(np.array([1], np.float32), 0, 0.5).dtype == np.float32
    assert evaluate(elementwise.clip(np.zeros((2, 1)), np.zeros(3), None)).shape == (2, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("name", ["real", "imag", "conj"])
def test_complex_parts(evaluate: Evaluate, dtype: Any, name: str) -> None:
    x = sample(dtype)
    if dtype.kind != "c":
        want = np.zeros_like(x) if name == "imag" else x
    else:
        want = getattr(np, name)(x)
    assert same(evaluate(getattr(elementwise, name)(x)), want)
    assert same(evaluate(getattr(elementwise, name)(x[1])), want[1])


def test_no_operator_reaches_python_bool() -> None:
    with pytest.raises(GraphError, match=r"af.cond"):
        bool(constant(1) == 1)
