"""`summary`: variables by scope, and the memory of activations."""

from __future__ import annotations

import numpy as np
import pytest

import asyncflow as af


def test_variables_stand_by_scope_with_totals(graph: af.Graph) -> None:
    kernel = af.Variable(np.zeros((3, 4), np.float32), name="net/dense/kernel")
    bias = af.Variable(np.zeros(4, np.float32), name="net/dense/bias")
    count = af.Variable(0, name="count")
    x = af.placeholder("float32", (None, 3))
    loss = af.sum(af.tanh(x @ kernel + bias))
    step = af.optim.adam(zip(af.gradients(loss, [kernel, bias]), [kernel, bias], strict=True))
    with af.control_dependencies([step]):
        count.assign_add(1)
    lines = af.summary(graph).splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["variable", "value", "elements", "bytes"],
        ["-" * 17, "-" * 12, "-" * 8, "-" * 5],
        ["count", "int64[]", "1", "8", "B"],
        ["net/", "50", "208", "B"],
    ]
    assert [line.rstrip() for line in lines[4:8]] == [
        "  dense/                               50  208 B",
        "    bias           float32[4]           4   16 B",
        "    bias/                               9   40 B",
        "      adam_mean    float32[4]           4   16 B",
    ]
    assert lines[-2] == "9 variables, 51 elements, 216 B"


def test_activations_are_values_that_gradients_read(graph: af.Graph) -> None:
    w = af.Variable(np.ones((3, 4), np.float32), name="w")
    x = af.placeholder("float32", (None, 3))
    y = af.tanh(x @ w)
    af.exp(x)  # which no gradient needs
    af.gradients(af.sum(y), w)
    assert af.summary(graph).splitlines()[-1] == "activations: 16 B in 1 value (open extents taken as 1)"
    assert af.summary(graph, extent=1000).splitlines()[-1].startswith("activations: 15.6 KiB in 1 value")


def test_a_loop_in_which_variables_stand(graph: af.Graph) -> None:
    w = af.Variable(np.ones(5), name="w")
    af.while_loop(lambda i: i < 3, lambda i: i + af.astype(af.sum(w), "int64"), (0,))
    assert "1 variable, 5 elements, 40 B" in af.summary(graph)


def test_a_graph_without_variables(graph: af.Graph) -> None:
    af.constant(1.0)
    assert af.summary(graph) == "0 variables, 0 elements, 0 B\nactivations: 0 B in 0 values"


def test_mistakes(graph: af.Graph) -> None:
    with pytest.raises(af.GraphError, match="summary: takes a graph; got 3"):
        af.summary(3)  # type: ignore[arg-type]
    with pytest.raises(af.GraphError, match="extent is at least 0; got -1"):
        af.summary(graph, extent=-1)
