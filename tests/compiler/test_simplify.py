"""`simplify`: nodes that change no bit are left out, and no others."""

from __future__ import annotations

import asyncflow as af
from asyncflow.compiler.optimize.prune import prune
from asyncflow.compiler.optimize.simplify import simplify
from tests.compiler.stages import golden, optimized


def test_nodes_that_change_no_bit_are_left_out(graph: af.Graph) -> None:
    x = af.placeholder("float64", (2, 3), name="x")
    y = af.negative(af.negative(x * 1.0 - 0.0)) / 1.0
    y = af.permute_dims(af.permute_dims(af.reshape(y, (2, 3)), (1, 0)), (1, 0)).mT.mT
    y = af.where(af.greater(x, 0.0), y, y)
    assert optimized(graph, [af.identity(y)], simplify, prune) == golden("""
        %feed = feed() {index=0, spec=float64[2,3]} : float64[2,3]
        %fetch = fetch(%feed) : ()
    """)


def test_adding_zero_to_a_float_changes_the_sign_of_minus_zero(graph: af.Graph) -> None:
    x = af.placeholder("float64", (), name="x")
    kept = [x + 0.0, x + af.constant(0), x - (-0.0), af.reshape(x, (1,)), af.logical_not(af.logical_not(x))]
    assert "fetch(%feed" not in optimized(graph, kept, simplify)
    n = af.placeholder("int64", (), name="n")
    assert optimized(graph, [n + 0, 0 + n, n * 1, n // 1, n | 0], simplify).count("fetch(%feed_1)") == 5


def test_an_operand_that_widens_the_result_stays(graph: af.Graph) -> None:
    n, x = af.placeholder("int64", (), name="n"), af.placeholder("float64", (None,), name="x")
    kept = [n * af.constant(1.0), x * af.constant([1.0, 1.0]), af.reshape(x, (3,)), af.astype(n, "float64")]
    assert "fetch(%feed" not in optimized(graph, kept, simplify)


def test_an_identity_that_something_waits_for_stays(graph: af.Graph) -> None:
    x = af.placeholder("float64", (), name="x")
    first = af.identity(x)
    with af.control_dependencies([first]):
        y = af.identity(x)
    assert optimized(graph, [y], simplify) == golden("""
        %feed = feed() {index=0, spec=float64[]} : float64[]
        %identity = identity(%feed) : float64[]
        %identity_1 = identity(%feed) after(%identity) : float64[]
        %fetch = fetch(%identity_1) : ()
    """)


def test_what_may_fail_stays_though_its_value_is_not_used(graph: af.Graph) -> None:
    x = af.placeholder("float64", (3,), name="x")
    index = af.placeholder("int64", (), name="index")
    assert "getitem(" in optimized(graph, [af.where(x[index] > 0.0, x, x)], simplify, prune)
