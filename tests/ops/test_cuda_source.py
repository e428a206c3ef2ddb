"""The C++ expressions of elementwise ops give NumPy's values; every elementwise op has one, or a reason not to."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import asyncflow
from asyncflow.compiler.program.kernels.chains import Chain, Member
from asyncflow.compiler.program.kernels.kernel_text import kernel_source
from asyncflow.errors import GraphError
from asyncflow.graph.op import Op, find_op, registered_ops
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.cost import free
from asyncflow.ops.cuda import source as cuda_source
from asyncflow.ops.cuda.functions import helpers
from tests.compiler.elementwise_kernel import compile_as_cuda, compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.graph.values.dtypes import DType

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(char) for char in "?bhilBHILefd"] + [BFLOAT16]
HALVES = (np.dtype("e"), BFLOAT16)
LIBRARY_FUNCTIONS = frozenset(
    {
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "exp", "expm1", "log", "log1p"),
        *("log10", "log2", "sin", "sinh", "tan", "tanh", "hypot", "logaddexp", "pow"),
        *("sigmoid", "silu", "softplus", "gelu", "erf"),
    }
)
"""Functions whose last digits are the library's."""
MIXED = [
    ("equal", "lL"),
    ("less", "lL"),
    ("less_equal", "Ll"),
    ("greater", "Ll"),
    ("greater_equal", "lL"),
    ("not_equal", "Ll"),
    ("less", "iL"),
    ("add", "bd"),
    ("add", "he"),
    ("multiply", "?f"),
    ("subtract", "Bb"),
    ("divide", "iB"),
    ("maximum", "bB"),
    ("floor_divide", "hf"),
    ("power", "bh"),
    ("left_shift", "bH"),
]


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(autouse=True, scope="module")
def _every_op() -> None:
    for module in pkgutil.walk_packages(asyncflow.__path__, "asyncflow."):
        if not module.name.endswith("__main__"):
            import_module(module.name)


def sample(dtype: DType) -> np.ndarray:
    """Everything that might be a special case."""
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        listed = [info.min, info.min + 1, -100, -7, -3, -1, 0, 1, 2, 3, 5, 7, 33, 64, 100, info.max - 1, info.max]
        return np.array(sorted({x for x in listed if x >= info.min}), dtype)
    floats = [0.0, 1.0, 0.1, 0.5, 1.5, 2.0, 2.5, 3.0, 7.0, 1e-3, 100.3, 6e4, 65519.9, 3.3e-6, np.inf]
    return np.array([*floats, *(-x for x in floats), np.nan]).astype(dtype)


def grid(dtypes: Sequence[DType]) -> list[np.ndarray]:
    """All combinations of the samples."""
    return [array.ravel() for array in np.meshgrid(*map(sample, dtypes), indexing="ij")]


def chain_of(op: Op, dtypes: Sequence[DType], attrs: dict[str, Any]) -> Chain | None:
    """Return a chain of the op alone; None if it does not take these dtypes."""
    inputs = tuple(Spec(dtype, (None,)) for dtype in dtypes)
    try:
        spec = op.infer(*inputs, **attrs)
    except GraphError:
        return None
    assert isinstance(spec, Spec)
    member = Member(op, attrs, tuple(range(len(inputs))), spec, op.name)
    return Chain(inputs, (member,), (len(inputs),))


def n_inputs(op: Op) -> int:
    assert op.kernel is not None
    kernel = op.kernel(np)
    return kernel.nin if isinstance(kernel, np.ufunc) else 1


def cases() -> list[tuple[Op, Sequence[DType], dict[str, Any]]]:
    """Ops, the dtypes of their inputs, and attributes."""
    found: list[tuple[Op, Sequence[DType], dict[str, Any]]] = []
    for op in registered_ops():
        if callable(op.cuda) and op.name not in ("astype", "where", "clip"):
            found += [(op, (dtype,) * n_inputs(op), {}) for dtype in DTYPES]
    names = {"power": "pow", "left_shift": "bitwise_left_shift"}
    found += [(find_op(names.get(name, name)), [np.dtype(c) for c in chars], {}) for name, chars in MIXED]
    found += [(find_op("where"), (np.dtype("?"), dtype, dtype), {}) for dtype in DTYPES]
    for source, target in product(DTYPES, DTYPES):
        if source != target:
            found.append((find_op("astype"), (source,), {"dtype": target}))
    for dtype in DTYPES:
        found.append((find_op("clip"), (dtype,) * 3, {"low": True, "high": True, "dtype": dtype}))
        found.append((find_op("clip"), (dtype,) * 2, {"low": False, "high": True, "dtype": dtype}))
    mixed = (np.dtype("b"), np.dtype("i"), np.dtype("h"))
    found.append((find_op("clip"), mixed, {"low": True, "high": True, "dtype": np.dtype("b")}))
    return found


def values_for(op: Op, dtypes: Sequence[DType], attrs: dict[str, Any]) -> list[np.ndarray]:
    """Inputs for which NumPy's result is defined, and is no error."""
    values = grid(dtypes)
    keep = np.ones(len(values[0]), bool)
    integers = all(dtype.kind in "biu" for dtype in dtypes)
    if op.name == "reciprocal" and integers:
        keep &= values[0] != 0
    if op.name == "pow" and integers:
        keep &= values[1] >= 0
    if op.name == "astype" and not integers and attrs["dtype"].kind in "iu":
        wide = values[0].astype(np.float64)
        keep &= (wide > (-1 if attrs["dtype"].kind == "u" else -129)) & (wide < 128)
    return [value[keep] for value in values]


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """By how many neighbours the values differ; 0 where both are NaN."""
    bits = np.dtype(f"i{got.dtype.itemsize}")
    ordered = []
    for array in (got, want):
        raw = array.view(bits).astype(np.int64 if bits.itemsize < 8 else object)
        ordered.append(np.where(raw < 0, -(raw & np.iinfo(bits).max), raw))
    both_nan = np.isnan(got) & np.isnan(want)
    return np.where(both_nan, 0, abs(ordered[0] - ordered[1]))


def check(op: Op, got: np.ndarray, want: np.ndarray, values: Sequence[np.ndarray]) -> None:
    what = f"{op.name} of {[str(value.dtype) for value in values]}"
    assert got.dtype == want.dtype, what
    if got.dtype.kind in "biu":
        wrong = got != want
    elif op.name in LIBRARY_FUNCTIONS:
        wrong = ulps(got, want) > (1 if got.dtype in HALVES else 4)
        # Digits cancel in these, in intermediate results that are 4 ulps apart at most.
        wrong &= ~np.isclose(got.astype(float), want.astype(float), rtol=4e-7, atol=1e-7, equal_nan=True)
    else:
        # The sign of zero: NumPy takes either of two zeros for the larger, and keeps that of a bfloat16's sign.
        is_free = op.name in ("maximum", "minimum", "clip", "relu") or (op.name == "sign" and got.dtype == BFLOAT16)
        wrong = ~((got == want) | (np.isnan(got) & np.isnan(want)))
        if not is_free:
            wrong |= (np.signbit(got) != np.signbit(want)) & ~np.isnan(got)
    assert not wrong.any(), f"{what}: {[v[wrong][:3] for v in values]} gave {got[wrong][:3]}, not {want[wrong][:3]}"


def chains_with_source() -> list[tuple[Chain, list[np.ndarray]]]:
    """Yield chains of a single op, and inputs for each."""
    found = []
    for op, dtypes, attrs in cases():
        chain = chain_of(op, dtypes, attrs)
        if chain is None:
            continue
        names = [f"v{index}" for index in range(len(dtypes))]
        if cuda_source.expression(op, attrs, dtypes, chain.members[0].spec.dtype, names) is not None:
            found.append((chain, values_for(op, dtypes, attrs)))
    return found


@pytest.mark.slow
def test_every_expression_gives_numpys_values() -> None:
    found = chains_with_source()
    assert len(found) > 700
    kernels = compiled([kernel_source(chain) for chain, _ in found])
    for (chain, values), run in zip(found, kernels, strict=True):
        (member,) = chain.members
        assert member.op.kernel is not None
        check(member.op, run(*values)[0], member.op.kernel(np, **member.attrs)(*values), values)


@pytest.mark.slow
def test_expressions_compile_for_a_gpu() -> None:
    dtypes = {np.dtype(char) for char in "?iLefd"}
    chains = [chain for chain, _ in chains_with_source() if dtypes.issuperset(spec.dtype for spec in chain.specs)]
    assert len(chains) > 300
    compile_as_cuda([kernel_source(chain) for chain in chains])


def test_dtypes_without_expressions() -> None:
    names = ["v0", "v1"]
    for name in ("complex64", "complex128"):
        dtype = np.dtype(name)
        assert cuda_source.expression(find_op("add"), {}, (dtype, dtype), dtype, names) is None
    text = np.dtypes.StringDType()
    assert cuda_source.expression(find_op("equal"), {}, (text, text), np.dtype(bool), names) is None
    # The neighbours of a half are not those of the float that holds it.
    for half in HALVES:
        assert cuda_source.expression(find_op("nextafter"), {}, (half, half), half, names) is None


def test_literals_have_the_dtypes_digits() -> None:
    single = cuda_source.expression(find_op("gelu"), {}, (np.dtype("f"),), np.dtype("f"), ["x"])
    double = cuda_source.expression(find_op("gelu"), {}, (np.dtype("d"),), np.dtype("d"), ["x"])
    assert single is not None and double is not None
    assert single.endswith("* (1.0f + tanhf(0.7978845834732056f * (x + 0.044714998453855515f * x * x * x)))")
    assert double.endswith("* (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))")


def test_only_helpers_that_are_called_are_defined() -> None:
    assert helpers("v0 + v1") == ""
    found = helpers("asyncflow_remainderf(v0, v1)")
    assert "asyncflow_remainderf(float a" in found
    assert found.count("__device__") == 1


# -- every elementwise op --------------------------------------------------------------------------------------------


def is_elementwise(op: Op) -> bool:
    """Return True if each element of the output depends only on that element of the inputs, by trying it."""
    if not op.is_pure or op.kernel is None:
        return False
    dtypes = [np.dtype(c) for c in "fi?F"]
    for count, dtype in product((1, 2, 3), dtypes):
        inputs = [np.arange(1, 10).reshape(3, 3).astype(dtype) for _ in range(count)]
        if count == 3:
            inputs[0] = np.eye(3, dtype=bool)  # as of `where`
        found = _try(op, inputs)
        if found is None:
            continue
        if all(_depends_on_one(op, inputs, found, place) for place in ((0, 0), (1, 2), (2, 1))):
            return True
    return False


def _try(op: Op, inputs: Sequence[np.ndarray]) -> np.ndarray | None:
    """The one output, if it is a 3 x 3 array and the op needs no attributes."""
    assert op.kernel is not None
    try:
        spec = op.infer(*(Spec(array.dtype, array.shape) for array in inputs))
        if not isinstance(spec, Spec) or spec.shape != (3, 3):
            return None
        return np.asarray(op.kernel(np)(*inputs))
    except (TypeError, ValueError, IndexError, AttributeError, GraphError):
        return None  # not for such inputs


def _depends_on_one(op: Op, inputs: Sequence[np.ndarray], found: np.ndarray, place: tuple[int, int]) -> bool:
    changed = [array.copy() for array in inputs]
    for array in changed:
        array[place] = not array[place] if array.dtype == bool else array[place] + 1
    other = _try(op, changed)
    if other is None:
        return False
    differs = ~((found == other) | ((found != found) & (other != other)))
    differs[place] = False
    # It may be that nothing shows in the output at all: constants and signs are elementwise too.
    return not differs.any()


def test_every_elementwise_op_has_source_or_a_reason() -> None:
    elementwise = [op for op in registered_ops() if is_elementwise(op)]
    names = {op.name for op in elementwise}
    assert {"add", "equal", "isnan", "sigmoid", "relu", "where", "bitwise_and", "identity", "imag"} <= names
    assert not {"sort", "flip", "matmul", "sum", "cumulative_sum", "broadcast_to", "matrix_transpose"} & names
    missing = [
        op.name
        for op in elementwise
        if op.cuda is None and op.flops is not free  # gives a view: there is nothing to launch
    ]
    assert not missing, f"{missing}: define them with cuda=, a rule of asyncflow.ops.cuda.source or why they have none"
    # These cannot be tried without attributes.
    assert all(callable(find_op(name).cuda) for name in ("astype", "clip"))


def test_reasons_are_given() -> None:
    for op in registered_ops():
        assert not isinstance(op.cuda, str) or len(op.cuda.split()) > 2, f"{op.name}: {op.cuda!r} explains nothing"
