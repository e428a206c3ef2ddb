"""Chains as kernels of our own: any inputs, however they lie in memory, give what the ops give one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.compiler.program.kernels.fused import FUSED
from asyncflow.compiler.program.kernels.packed import MOST_LAYOUTS, PackedChain, bits_of
from asyncflow.compiler.regions.fuse import fuse_line
from asyncflow.devices.cuda.kernels import KernelLaunches
from asyncflow.errors import InternalError
from asyncflow.graph.building.build import apply
from asyncflow.graph.graph import Graph
from asyncflow.ops.arrays.datatypes import ASTYPE
from tests.compiler.test_fuse import assert_same, build, feeds_for, line_of, programs, run_line
from tests.fake_cupy import FakeCupy

pytestmark = pytest.mark.usefixtures("quiet")


class Packed:
    """NumPy for single ops, and kernels of our own on a fake for chains.

    Attributes:
        packed: number of calls of kernels of our own.
    """

    def __init__(self, cupy: FakeCupy) -> None:
        self.launches = KernelLaunches(cupy, cupy.bindings)
        self.cupy = cupy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cupy, name)


LAYOUTS = ("C", "F", "gaps", "backwards", "wide")


def laid(cupy: FakeCupy, value: np.ndarray, layout: str) -> Any:
    """An array of the fake with these values, in one of several layouts."""
    if layout == "F":
        return cupy.asarray(np.asfortranarray(value))
    if layout == "gaps":
        doubled = np.zeros((*value.shape[:-1], value.shape[-1] * 2), value.dtype)
        doubled[..., 1::2] = value
        return cupy.asarray(doubled)[..., 1::2]
    if layout == "backwards":
        return cupy.asarray(np.ascontiguousarray(value[::-1]))[::-1]
    if layout == "wide":
        return cupy.asarray(np.pad(value, [(1, 2)] * value.ndim))[tuple(slice(1, -2) for _ in value.shape)]
    return cupy.asarray(value)


def compare(
    cupy: FakeCupy, results: Sequence[Any], feeds: dict[Any, np.ndarray], layouts: Sequence[str]
) -> list[PackedChain]:
    """Compare chains on the fake with ops on NumPy; returns the kernels of the chains."""
    nodes = line_of(results[0].graph)
    want = run_line(nodes, feeds, results)
    made, fused = fuse_line(nodes, results)
    values: dict[Any, Any] = {
        x: laid(cupy, value, layouts[index % len(layouts)]) if value.ndim else value[()]
        for index, (x, value) in enumerate(feeds.items())
    }
    xp, kernels = Packed(cupy), []
    for node in made:
        assert node.op.kernel is not None
        if node.op is FUSED:
            kernel: Any = node.op.kernel(xp, **node.attrs)
            kernels.append(kernel)
            found = kernel(*(values[tensor] for tensor in node.inputs))
        else:
            arrays = [on_host(values[tensor]) for tensor in node.inputs]
            computed = node.op.kernel(np, **node.attrs)(*arrays)
            parts = (computed,) if node.single else computed
            on_card = [cupy.asarray(np.ascontiguousarray(part)) if np.ndim(part) else part for part in parts]
            found = on_card[0] if node.single else on_card
        values.update(zip(node.outputs, (found,) if node.single else found, strict=True))
    assert_same([on_host(values[result]) for result in fused], want)
    return kernels


def kernel_of(graph: Graph, result: Any, cupy: FakeCupy) -> Any:
    """Return the kernel that computes all of `result`."""
    (node,) = fuse_line(line_of(graph), [result])[0]
    assert node.op.kernel is not None
    return node.op.kernel(Packed(cupy), **node.attrs)


def on_host(value: Any) -> Any:
    return value.get() if hasattr(value, "get") else value


@pytest.mark.slow  # compiles a kernel for each
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout(shared: FakeCupy, graph: Graph, layout: str) -> None:
    x, y = af.placeholder("float32", (3, 5)), af.placeholder("float32", (5,))
    rate, flag = af.placeholder("float32", ()), af.placeholder("bool", (3, 1))
    z = af.where(flag, x * rate + y, -x)
    draw = np.random.default_rng(len("layout"))
    feeds = {
        x: draw.normal(size=(3, 5)).astype("f"),
        y: draw.normal(size=5).astype("f"),
        rate: np.array(0.3, "f"),
        flag: np.array([[True], [False], [True]]),
    }
    (kernel,) = compare(shared, [z], feeds, [layout, "C"])
    assert [found is None for found in kernel._layouts.values()] == [False]


def test_layouts_are_remembered_and_bounded(shared: FakeCupy, graph: Graph) -> None:
    x = af.placeholder("float32", (None,))
    kernel = kernel_of(graph, x * x + x, shared)
    sources = len(shared.raw_kernels)
    for size in range(MOST_LAYOUTS + 2):
        value = shared.asarray(np.arange(size, dtype="f"))
        got = kernel(value)
        if size % 64 < 2:
            np.testing.assert_array_equal(got.get(), np.arange(size, dtype="f") ** 2 + np.arange(size))
    assert len(kernel._layouts) == 2
    assert len(shared.raw_kernels) == sources + 1
    kernel(shared.asarray(np.ones(5, "f")))
    (layout,) = [found for found in kernel._layouts.values() if found.shapes == ((5,),)]
    assert len(layout.records) == 1  # and used again
    kernel(shared.asarray(np.ones(5, "f")))
    assert len(layout.records) == 1


def test_an_operand_of_another_dtype_is_an_error(shared: FakeCupy, graph: Graph) -> None:
    x = af.placeholder("float32", (3,))
    kernel = kernel_of(graph, x * x + x, shared)
    with pytest.raises(InternalError, match="asyncflow_multiply_add: input 0 should be float32, and is float64"):
        kernel(shared.zeros(3))
    with pytest.raises(InternalError, match="asyncflow_multiply_add: an array of the host is an operand"):
        kernel(np.zeros(3, "f"))


def test_scalars_as_parameters() -> None:
    assert bits_of(np.dtype("int8"))(np.int8(-1)) == 0xFF
    assert bits_of(np.dtype("int64"))(np.int64(-2)) == 2**64 - 2
    assert bits_of(np.dtype(bool))(np.bool_(True)) == 1
    assert bits_of(np.dtype("float32"))(np.array(1.0, "f")) == 0x3F800000
    assert bits_of(np.dtype("float64"))(1.0) == 0x3FF0000000000000
    assert bits_of(np.dtype("float16"))(np.float16(65504)) == int(np.float32(65504).view(np.uint32))
    assert bits_of(np.dtype(ml_dtypes.bfloat16))(np.float32(1.00390625)) == 0x3F800000  # rounded to even


def test_empty_arrays_and_an_extent_of_1(shared: FakeCupy, graph: Graph) -> None:
    x, y = af.placeholder("float64", (None, 3)), af.placeholder("float64", (None, 3))
    a = x + 1.0
    results = [a, a * y]
    for rows in ((4, 4), (0, 0), (4, 1), (1, 4)):
        feeds = {x: np.ones((rows[0], 3)), y: np.ones((rows[1], 3))}
        (kernel,) = compare(shared, results, feeds, ["C"])
        (layout,) = kernel._layouts.values()
        assert (layout is None) == (rows == (1, 4)), rows


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(programs(), st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=7), st.sampled_from([(4, 3), (1, 3), (5,)]))
def test_random_chains_of_random_layouts(
    shared: FakeCupy, program: tuple[list[tuple[Any, ...]], list[bool]], layouts: list[str], extents: tuple[int, ...]
) -> None:
    steps, chosen = program
    with af.Graph(), np.errstate(all="ignore"):
        fed, made = build([step for step in steps if step[0] != "reduce"] or [("unary", 0, 0, 0, 0)], [extents])
        results = [value for value, is_result in zip(made, chosen, strict=False) if is_result] or made[-1:]
        compare(shared, results, feeds_for(fed, [extents]), layouts)


def test_an_array_to_write_to_is_used_if_it_fits(shared: FakeCupy, graph: Graph) -> None:
    x = af.placeholder("float32", (3, 4))
    kernel = kernel_of(graph, x * x + x, shared)
    value = np.arange(12, dtype="f").reshape(3, 4)
    fitting, turned = shared.zeros((3, 4), "f"), shared.asarray(np.zeros((4, 3), "f")).T
    assert kernel.takes_out
    assert kernel(shared.asarray(value), out=fitting) is fitting
    # In another order of memory, elements would go to other places.
    for out in (turned, shared.zeros((1, 4), "f"), None):
        found = kernel(shared.asarray(value), out=out)
        assert found is not out
        np.testing.assert_array_equal(found.get(), value * value + value)
    np.testing.assert_array_equal(fitting.get(), value * value + value)


def test_a_chain_never_gives_its_input(shared: FakeCupy, graph: Graph) -> None:
    """Its memory may be written again while the output is in use."""
    x, y = af.placeholder("float32", (None,)), af.placeholder("float32", (None,))
    same = apply(ASTYPE, x, dtype=np.dtype("float32"))[0]
    product = same * y
    made, results = fuse_line(line_of(graph), [same, product])
    (node,) = made
    assert node.op.kernel is not None
    for xp in (np, Packed(shared)):
        array: Any = np.ones(1, "f") if xp is np else shared.ones(1, "f")
        other: Any = np.ones(3, "f") if xp is np else shared.ones(3, "f")
        found = node.op.kernel(xp, **node.attrs)(array, other)  # of two shapes, so one by one
        first = found[node.outputs.index(results[0])]
        first += np.float32(1)
        assert on_host(array).tolist() == [1.0] and on_host(first).tolist() == [2.0]
