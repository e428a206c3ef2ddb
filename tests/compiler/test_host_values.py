"""`find_host_values`, and what becomes a region on devices that enqueue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.program.extract import extract
from asyncflow.compiler.program.host_values import find_host_values, mixes_vectors
from asyncflow.compiler.regions.regions import make_regions
from asyncflow.graph.structured import WhileNode

if TYPE_CHECKING:
    from collections.abc import Callable


def needed(graph: af.Graph, tensors: tuple[af.Tensor, ...]) -> af.Graph:
    """The part of the graph that these tensors need, with all placeholders fed."""
    fed = [node.outputs[0] for node in graph.nodes if node.op.name == "placeholder"]
    return extract(graph, list(tensors), fed).graph


def on_host(graph: af.Graph, *tensors: af.Tensor) -> list[bool]:
    """Return for each tensor True if its value is certainly on the host."""
    found = {(tensor.node.name, tensor.index) for tensor in find_host_values(needed(graph, tensors))}
    return [(tensor.node.name, tensor.index) in found for tensor in tensors]


def test_numbers_of_rank_0_from_feeds_and_constants(graph: af.Graph) -> None:
    n, x = af.placeholder("int32", ()), af.placeholder("float32", (4,))
    rate = af.constant(0.1) / (af.astype(n, "float64") + 1)
    assert on_host(graph, n + 1, rate, rate > 0.5) == [True, True, True]
    assert on_host(graph, x, af.sum(x), af.sum(x) * rate, rate * x) == [False] * 4
    assert on_host(graph, af.constant([1, 2])) == [False], "an array is on the device"


def test_facts_on_an_array_without_its_data(graph: af.Graph) -> None:
    x = af.placeholder("float32", (None, 4))
    rows = af.shape(x)[0]
    assert on_host(graph, af.shape(x), rows, rows * 2, af.size(x)) == [True] * 4


def test_state_and_functions_of_the_user_say_nothing(graph: af.Graph) -> None:
    @af.op(outputs=af.spec("int64", ()))
    def own(value: Any) -> Any:
        return value

    assert on_host(graph, af.Variable(0).read(), own(af.constant(1))) == [False, False]


def test_loop_variables_that_stay(graph: af.Graph) -> None:
    x = af.placeholder("float64", (4,))
    i, scaled, total = af.while_loop(
        lambda i, *_: i < 10,
        lambda i, scale, total: (i + 1, scale * 0.5, total + af.sum(x * scale)),
        (0, af.constant(1.0), af.constant(0.0)),
    )
    assert on_host(graph, i, scaled, total) == [True, True, False]


def test_a_variable_that_takes_over_from_a_leaving_one(graph: af.Graph) -> None:
    """`b` starts on the host, but gets what `a` was, and that comes from an array."""
    x = af.placeholder("float64", (4,))
    a, b, c = af.while_loop(
        lambda a, b, c: b < 10.0,
        lambda a, b, c: (af.sum(x) + a, a, c + 1.0),
        (af.constant(0.0), af.constant(0.0), af.constant(0.0)),
    )
    assert on_host(graph, a, b, c) == [False, False, True]


def test_a_branch_is_on_the_host_if_both_sides_are(graph: af.Graph) -> None:
    n, x = af.placeholder("int64", ()), af.placeholder("int64", (3,))
    both = af.cond(n > 0, lambda: n + 1, lambda: n - 1)
    one = af.cond(n > 0, lambda: n + 1, lambda: af.max(x))
    assert on_host(graph, both, one) == [True, False]


def test_vectors_that_are_on_the_host_now_and_then(graph: af.Graph) -> None:
    """Vectors are shapes in one branch or iteration and data in the next; other vectors are always shapes, or always
    data.
    """
    n, x, y = af.placeholder("int64", ()), af.placeholder("int64", (2,)), af.placeholder("float32", (None, None))

    def loop(initial: af.Tensor, update: Callable[[af.Tensor], af.Tensor]) -> af.Tensor:
        return af.while_loop(lambda i, _: i < n, lambda i, v: (i + 1, update(v)), (0, initial))[1]

    mixed = [
        af.cond(n > 0, lambda: af.shape(y), lambda: x),
        af.cond(n > 0, lambda: x, lambda: af.shape(y)),
        loop(af.shape(y), lambda v: v * 2),
        loop(x, lambda v: af.shape(y)),
    ]
    steady = [
        af.cond(n > 0, lambda: af.shape(y), lambda: af.shape(x[:, None])),
        af.cond(n > 0, lambda: x, lambda: x * 2),
        loop(af.shape(y), lambda v: v),
        loop(x, lambda v: v * 2),
    ]
    part = needed(graph, (*mixed, *steady))
    found = find_host_values(part)
    structured = [node for node in part.nodes if node.op.name in ("cond", "while")]
    assert [mixes_vectors(node, found) for node in structured] == [True] * 4 + [False] * 4


# -- regions ---------------------------------------------------------------------------------------------------------


def regions_on_cards(graph: af.Graph, *fetches: af.Tensor) -> list[str]:
    """The ops in each region that a graph gets on a device that enqueues."""
    working = needed(graph, fetches)
    for node in working.walk():
        node.device = "cuda:0"
    make_regions(working, {}, (), {"cuda:0"}, find_host_values(working))
    return [_ops(node.attrs["region"]) for node in working.walk() if node.op.name == "region"]


def _ops(region: Any) -> str:
    return " ".join(node.op.name for node in region.nodes)


def test_a_loop_that_counts_is_one_region(graph: af.Graph) -> None:
    x = af.constant(np.ones((8, 8)))
    _, y = af.while_loop(lambda i, _: i < 5, lambda i, y: (i + 1, af.matmul(y, x)), (0, x))
    assert regions_on_cards(graph, y) == ["while"]


def test_a_loop_that_looks_at_arrays_stays_and_its_body_is_one(graph: af.Graph) -> None:
    x = af.constant(np.ones((8, 8)))
    (y,) = af.while_loop(lambda y: af.sum(y) < 100, lambda y: af.matmul(y, x) + x, (x,))
    assert regions_on_cards(graph, y) == ["matmul add", "sum less"]


@pytest.mark.parametrize(
    ("waits", "regions"),
    [
        (lambda x: af.nonzero(x)[0], ["exp add", "astype add"]),  # its shape depends on the data
        (af.print, ["exp add", "astype add"]),
        (lambda x: x, ["exp add astype add"]),
    ],
)
def test_what_the_host_computes_cuts_a_region(graph: af.Graph, waits: Any, regions: list[str]) -> None:
    x = af.placeholder("float64", (4,))
    before = af.exp(x) + 1
    after = af.astype(waits(before), "float32") + 1
    assert regions_on_cards(graph, after) == regions


def test_an_index_that_is_on_the_device_has_to_be_waited_for(graph: af.Graph) -> None:
    x = af.placeholder("float64", (4, 4))
    i = af.argmax(x[0])
    n = af.placeholder("int64", ())
    assert regions_on_cards(graph, (x * 2)[n:] + 1) == ["multiply getitem add"]
    assert not any("getitem add" in region for region in regions_on_cards(graph, (x * 2)[i:] + 1))


def test_numbers_that_loops_save(graph: af.Graph) -> None:
    """Gradients of inner loops count down from the counts of these loops: the host decides, and waits for nothing."""
    x = af.placeholder("float32", (3,))

    def inner(n: Any, y: Any) -> Any:
        return af.while_loop(lambda i, _: i < n, lambda i, y: (i + 1, af.sin(y)), (0, y))[1]

    def undecided(n: Any) -> list[str]:
        y = af.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, inner(n(i, y), y)), (0, x))[1]
        program = needed(graph, (af.gradients(y, x),))
        found = find_host_values(program)
        loops = [node for node in program.walk() if isinstance(node, WhileNode)]
        assert len(loops) == 4
        return [loop.name for loop in loops if loop.decision not in found]

    assert undecided(lambda i, y: i + 2) == []
    assert undecided(lambda i, y: af.astype(af.sum(y), "int32")) == ["while_1/body/while"], "the gradient has counted"
