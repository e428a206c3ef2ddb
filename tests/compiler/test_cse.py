"""`cse`: equal nodes become the first of them."""

from __future__ import annotations

import asyncflow as af
from asyncflow.compiler.optimize.cse import eliminate_common_subexpressions as cse
from tests.compiler.stages import golden, optimized


def test_equal_nodes_become_the_first(graph: af.Graph) -> None:
    x = af.placeholder("float64", (), name="x")
    assert optimized(graph, [(x + 1.0) * (x + 1.0)], cse) == golden("""
        %feed = feed() {index=0, spec=float64[]} : float64[]
        %constant = constant() {value=array(float64[], 1.0)} : float64[]
        %add = add(%feed, %constant) : float64[]
        %multiply = multiply(%add, %add) : float64[]
        %fetch = fetch(%multiply) : ()
    """)


def test_attributes_are_compared_by_type_and_bits(graph: af.Graph) -> None:
    zeros = [af.constant(0.0), af.constant(-0.0), af.constant(0), af.constant([0.0]), af.constant(False)]
    text = optimized(graph, zeros, cse)
    assert text.count("constant()") == len(zeros)
    assert optimized(graph, [af.constant(float("nan")), af.constant(float("nan"))], cse).count("constant()") == 1


def test_bodies_are_joined_each_on_its_own_and_share_captures(graph: af.Graph) -> None:
    p, x = af.placeholder("bool", (), name="p"), af.placeholder("float64", (), name="x")
    one, other = af.square(x), af.square(x)
    y = af.cond(p, lambda: af.exp(one) + af.exp(other), lambda: af.square(one), name="pick")
    assert optimized(graph, [y], cse) == golden("""
        %feed = feed() {index=0, spec=bool[]} : bool[]
        %feed_1 = feed() {index=1, spec=float64[]} : float64[]
        %square = square(%feed_1) : float64[]
        %pick = cond(%feed, %square) : (float64[],) {
          true_branch "pick/true" (%pick/true/capture_square) {
            %pick/true/capture_square = parameter() {spec=float64[]} : float64[]
            %pick/true/exp = exp(%pick/true/capture_square) : float64[]
            %pick/true/add = add(%pick/true/exp, %pick/true/exp) : float64[]
            return %pick/true/add
          }
          false_branch "pick/false" (%pick/false/capture_square) {
            %pick/false/capture_square = parameter() {spec=float64[]} : float64[]
            %pick/false/square = square(%pick/false/capture_square) : float64[]
            return %pick/false/square
          }
        }
        %fetch = fetch(%pick) : ()
    """)
