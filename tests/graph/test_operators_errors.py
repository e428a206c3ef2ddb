"""Errors for code that takes a tensor for an array: the message names the way to go."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow
from asyncflow.graph.values import dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The calls are wrong on purpose, which the type checker need not say.
af: Any = asyncflow
as_dtype: Any = dtypes.as_dtype
ARRAY: Any = np.arange(3.0)
NOTHING: Any = None


@pytest.fixture(params=["tensor", "variable"])
def x(request: pytest.FixtureRequest) -> Iterator[Any]:
    with af.Graph():
        yield af.placeholder("float64", (3,), name="x") if request.param == "tensor" else af.Variable(ARRAY, name="x")


async def fetch(value: Any) -> Any:
    return value


def other_graphs_tensor() -> Any:
    with af.Graph():
        return af.constant(1.0)


def set_item(x: Any) -> None:
    x[0] = 1.0


def add_in_place(x: Any) -> None:
    array = ARRAY.copy()
    array += x


# -- NumPy and Python want the value ---------------------------------------------------------------------------------

NO_VALUE: dict[str, tuple[Callable[[Any], object], str]] = {
    "ufunc": (np.sin, r"np\.sin computes at once, and .* has no value before a run; use af\.sin\n"),
    "ufunc of another name": (lambda x: np.arctan2(x, x), r"use af\.atan2\n"),
    "ufunc without a counterpart": (np.cbrt, r"np\.cbrt computes at once.*@af\.op"),
    "ufunc method": (np.add.reduce, r"np\.add\.reduce computes at once"),
    "ufunc with out": (lambda x: np.add(ARRAY, x, out=ARRAY), "cannot write"),
    "ufunc with where": (lambda x: np.add(ARRAY, x, where=ARRAY > 1), r"np\.add computes at once"),
    "ufunc of what no tensor holds": (lambda x: np.equal(x, NOTHING), "no value that a tensor holds"),
    "array in place": (add_in_place, r"write a = a \+ x"),
    "divmod": (lambda x: divmod(ARRAY, x), r"np\.divmod computes at once"),
    "function": (np.sum, r"np\.sum computes at once.*; use af\.sum\n"),
    "function of a list": (lambda x: np.concatenate([x, x]), r"use af\.concat\n"),
    "function of a module": (np.linalg.norm, r"np\.linalg\.norm computes at once"),
    "asarray": (np.asarray, r"fetch it with `await session\.run\(x\)`"),
    "array of a list": (lambda x: np.array([x]), r"fetch it with `await session\.run\(x\)`"),
    "scalar type": (np.float32, r"fetch it with `await session\.run\(x\)`"),
    "index": (lambda x: ARRAY[x], r"fetch it with `await session\.run\(x\)`"),
    "float": (float, r"fetch it with `await session\.run\(x\)`"),
    "floor": (math.floor, r"fetch it with `await session\.run\(x\)`"),
    "trunc": (math.trunc, r"use af\.trunc"),
    "round": (round, r"use af\.round"),
    "format": (lambda x: f"{x:.3f}", r"format '\.3f' of .* needs its value"),
    "await": (lambda x: x.__await__(), r"fetch it with await session\.run\(x\)"),
    "set item": (set_item, r"use x = af\.index_update"),
    "delete item": (lambda x: x.__delitem__(0), "values do not change"),
}


@pytest.mark.parametrize("case", NO_VALUE)
def test_what_needs_the_value_is_refused(case: str, x: Any) -> None:
    use, message = NO_VALUE[case]
    with pytest.raises(af.GraphError, match=message):
        use(x)


async def test_awaiting_a_tensor_is_refused() -> None:
    with af.Graph():
        x = af.placeholder("float32", ())
    with pytest.raises(af.GraphError, match="cannot be awaited"):
        await x


def test_a_plain_format_gives_the_repr(x: Any) -> None:
    assert f"{x}" == str(x)


# -- operators with NumPy on the left --------------------------------------------------------------------------------

MIXED: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "**": lambda a, b: a**b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "np.add": np.add,
    "np.power": np.power,
}
LEFT = {"array": np.array([4.0, 1.0, 3.0]), "scalar": np.float64(2.0), "float32": np.float32(2.0), "int": np.int64(3)}


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("operator", MIXED)
async def test_numpy_on_the_left_of_an_operator(operator: str, left: str) -> None:
    value = np.array([1.0, 2.0, 3.0])
    with af.Graph() as graph:
        x = af.placeholder("float64", (3,))
        results = MIXED[operator](LEFT[left], x), MIXED[operator](x, LEFT[left])
    async with af.Session(graph) as session:
        got = await session.run(results, {x: value})
    for seen, expected in zip(
        got, (MIXED[operator](LEFT[left], value), MIXED[operator](value, LEFT[left])), strict=True
    ):
        np.testing.assert_array_equal(seen, expected)
        assert seen.dtype == expected.dtype


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda m, n, b: np.eye(3) @ m, np.arange(3.0)),
        (lambda m, n, b: np.int64(1) << n, np.int64(4)),
        (lambda m, n, b: np.array([8, 4]) >> n, np.array([2, 1])),
        (lambda m, n, b: np.int64(6) & n, np.int64(2)),
        (lambda m, n, b: np.array([1, 2]) | n, np.array([3, 2])),
        (lambda m, n, b: np.array([1, 2]) ^ n, np.array([3, 0])),
        (lambda m, n, b: np.True_ & b, np.True_),
        (lambda m, n, b: np.abs(-m), np.arange(3.0)),
        (lambda m, n, b: np.invert(n), np.int64(-3)),
    ],
)
async def test_other_operators_with_numpy_on_the_left(use: Callable[..., Any], expected: Any) -> None:
    with af.Graph() as graph:
        m, n, b = af.constant(np.arange(3.0)), af.constant(2), af.constant(True)
        result = use(m, n, b)
    async with af.Session(graph) as session:
        np.testing.assert_array_equal(await session.run(result), expected)


# -- attributes ------------------------------------------------------------------------------------------------------

ATTRIBUTES = {
    "sum": r"use af\.sum\(x\)$",
    "cumsum": r"use af\.cumulative_sum\(x\)$",
    "transpose": r"use af\.permute_dims\(x, axes\), or x\.mT for the last two$",
    "item": r"await session\.run\(x\)$",
    "numpy": r"await session\.run\(x\)$",
    "no_such_thing": "has no attribute 'no_such_thing'$",
    "__no_such_thing__": "has no attribute '__no_such_thing__'$",
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_missing_attributes_name_the_function(name: str, x: Any) -> None:
    with pytest.raises(AttributeError, match=ATTRIBUTES[name]):
        getattr(x, name)
    assert not hasattr(x, name)


def test_instances_without_attributes_can_be_looked_at() -> None:
    """As copy and pickle do."""
    for kind in (af.Tensor, af.Variable):
        blank: Any = kind.__new__(kind)
        with pytest.raises(AttributeError, match="spec"):
            blank.spec  # noqa: B018


def test_tensors_copy_and_variables_pickle() -> None:
    with af.Graph():
        x = af.placeholder("float32", (2,), name="x")
    twin = copy.copy(x)
    assert (twin.node, twin.spec) == (x.node, x.spec)
    variable = pickle.loads(pickle.dumps(af.Variable(1.0, name="v")))
    assert (variable.name, variable.shape) == ("v", ())


# -- dtypes, constants and names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (as_dtype, r"a dtype is fixed when the graph is built; got"),
        (lambda x: as_dtype(ARRAY), r"a dtype is fixed when the graph is built; got array"),
        (lambda x: as_dtype(np.float32(1)), "a dtype is fixed"),
        (lambda x: as_dtype(af.Tensor), "is not a dtype"),
        (lambda x: af.zeros(3, dtype=x), "a dtype is fixed"),
        (lambda x: af.constant(2**70), "does not fit int64 or uint64"),
        (lambda x: af.constant([1, -(2**70)]), "does not fit int64 or uint64"),
    ],
)
def test_dtypes_and_constants_are_refused(make: Callable[[Any], object], message: str, x: Any) -> None:
    with pytest.raises(af.DTypeError, match=message):
        make(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (af.constant, "already is a tensor"),
        (lambda x: af.placeholder("int32", (), name=""), "not empty"),
        (lambda x: af.constant(1, name="a:0"), "no ':' in it"),
        (lambda x: af.identity(1, name=3), "name=3: a name is a string"),
        (lambda x: af.group(af.constant(1), name=""), "not empty"),
        (lambda x: af.while_loop(lambda i: i < 3, lambda i: i + 1, 0, name=""), "not empty"),
        (lambda x: af.cond(True, lambda: 1, lambda: 2, name=""), "not empty"),
        (lambda x: af.name_scope(3).__enter__(), r"name_scope\(3\): a scope's name .* is a string"),
        (lambda x: af.device(3).__enter__(), "a device is a string"),
        (lambda x: af.device("cpu0").__enter__(), r"device\('cpu0'\): a device is a kind.* did you mean 'cpu:0'\?"),
        (lambda x: af.device("CPU:0").__enter__(), "did you mean 'cpu:0'"),
        (lambda x: af.device("/cpu:0").__enter__(), "did you mean 'cpu:0'"),
        (lambda x: af.device("/device:CUDA:01").__enter__(), "did you mean 'cuda:1'"),
        (lambda x: af.device("CUDA").__enter__(), "did you mean 'cuda'"),
        (lambda x: af.device("/job:a/device:CPU:0").__enter__(), "did you mean 'cpu:0'"),
        (lambda x: af.device("cpu:x").__enter__(), r"such as 'cuda:1'\n"),
        (lambda x: af.device("").__enter__(), r"such as 'cuda:1'\n"),
        (lambda x: af.colocate_with(3.0).__enter__(), r"colocate_with\(3\.0\): pass a tensor, a node or a variable"),
        (lambda x: af.colocate_with("cpu:0").__enter__(), r"for a device there is af\.device"),
        (lambda x: af.colocate_with(other_graphs_tensor()).__enter__(), r"another graph; built at .*\.py:\d+"),
        (lambda x: af.control_dependencies(x).__enter__(), "pass a list"),
        (lambda x: af.control_dependencies(3).__enter__(), "pass a list"),
        (lambda x: af.control_dependencies([3]).__enter__(), "neither a tensor"),
    ],
)
def test_values_and_names_are_refused(make: Callable[[Any], object], message: str, x: Any) -> None:
    with pytest.raises(af.GraphError, match=message):
        make(x)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + fetch(x),
        lambda x: x + fetch,
        lambda x: af.constant([fetch(x), fetch(x)]),
        lambda x: af.while_loop(lambda i: i < 3, lambda i: [fetch(i)], 0),
    ],
)
@pytest.mark.filterwarnings("error")
def test_coroutines_are_no_values(use: Callable[[Any], object], x: Any) -> None:
    with pytest.raises(af.GraphError, match=r"fetch is a coroutine function; make it an op with @af\.op"):
        use(x)
    gc.collect()  # would warn of a coroutine that nobody awaited


# -- statistics of nothing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["mean", "std", "var"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "int64", "complex64", "bfloat16"])
@pytest.mark.parametrize(("shape", "axis"), [((0,), None), ((0, 3), 0), ((0, 3), 1), ((2, 0), (1,))])
@pytest.mark.parametrize("keepdims", [False, True])
async def test_moments_of_nothing_are_nan_without_a_warning(
    function: str, dtype: str, shape: tuple[int, ...], axis: Any, keepdims: bool
) -> None:
    with af.Graph() as graph:
        x = af.placeholder(dtype, (None,) * len(shape))
        result = getattr(af, function)(x, axis=axis, keepdims=keepdims)
    empty = np.zeros(shape, as_dtype(dtype))
    async with af.Session(graph) as session:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = await session.run(result, {x: empty})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = getattr(np, function)(
            empty.astype("float32") if dtype == "bfloat16" else empty, axis, keepdims=keepdims
        )
    assert (got.shape, got.dtype) == (expected.shape, result.dtype)
    np.testing.assert_array_equal(got.astype(expected.dtype), expected)
