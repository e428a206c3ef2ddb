"""`fold`: constants are computed while compiling, with the bits a run would give."""

from __future__ import annotations

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.optimize.fold import fold
from asyncflow.compiler.optimize.prune import prune
from tests.compiler.stages import golden, optimized


def test_a_node_becomes_a_constant_under_its_own_name(graph: af.Graph) -> None:
    x = af.placeholder("float64", (), name="x")
    y = x * (af.constant(2.0) + af.constant(3.0))
    assert optimized(graph, [y], fold, prune) == golden("""
        %feed = feed() {index=0, spec=float64[]} : float64[]
        %add = constant() {value=array(float64[], 5.0)} : float64[]
        %multiply = multiply(%feed, %add) : float64[]
        %fetch = fetch(%multiply) : ()
    """)


@pytest.mark.parametrize("bad", ["raises", "not finite"])
async def test_what_goes_wrong_is_left_for_the_run(graph: af.Graph, bad: str) -> None:
    y = af.constant([1, 2, 3])[af.constant(7)] if bad == "raises" else af.log(af.constant(0.0))
    assert "= getitem(" in optimized(graph, [y], fold, prune) or "= log(" in optimized(graph, [y], fold, prune)
    async with af.Session(graph, debug=True, check_numerics=True) as session:
        with pytest.raises(af.KernelError, match=r"test_fold\.py"):
            await session.run(y)


def test_what_may_differ_from_run_to_run_or_grow_stays(graph: af.Graph) -> None:
    @af.op(outputs=af.spec("float64", ()))
    def mine(value: float) -> np.float64:
        return np.float64(value)

    one = af.constant(1.0)
    with af.device("cpu:0"):
        placed = af.constant(2.0)
    fetches = [af.random.normal(()), mine(one), af.broadcast_to(one, (100_000,)), af.print(one), one * placed]
    text = optimized(graph, fetches, fold, prune)
    assert [op for op in ("random_normal(", "mine(", "broadcast_to(", "print(", "multiply(") if op not in text] == []


def test_a_branch_known_to_be_taken_takes_the_place_of_the_cond(graph: af.Graph) -> None:
    x = af.placeholder("float64", (), name="x")
    y = af.cond(af.constant(1) < 2, lambda: x + 1, lambda: x * 2, name="pick")
    assert optimized(graph, [y], fold, prune) == golden("""
        %feed = feed() {index=0, spec=float64[]} : float64[]
        %pick/true/constant = constant() {value=array(float64[], 1.0)} : float64[]
        %pick/true/add = add(%feed, %pick/true/constant) : float64[]
        %fetch = fetch(%pick/true/add) : ()
    """)


async def test_effects_of_the_branch_taken_keep_their_place(graph: af.Graph) -> None:
    total = af.Variable(1.0, name="total")
    before = total.assign_add(1.0)
    chosen = af.cond(af.constant(True), lambda: total.assign(total.read() * 10.0), lambda: total.assign(0.0))
    after = total.assign_add(5.0)
    async with af.Session(graph, debug=True) as session:
        assert await session.run([before, chosen, after]) == [2.0, 20.0, 25.0]


def test_constants_sink_into_bodies_and_fold_there(graph: af.Graph) -> None:
    x, two = af.placeholder("float64", (), name="x"), af.constant(2.0)
    (y,) = af.while_loop(lambda s: s < x, lambda s: s + two * 3.0, (0.0,), name="loop")
    assert optimized(graph, [y], fold, prune) == golden("""
        %feed = feed() {index=0, spec=float64[]} : float64[]
        %constant_1 = constant() {value=array(float64[], 0.0)} : float64[]
        %loop = while(%constant_1, %feed) {n_vars=1} : (float64[],) {
          cond "loop/cond" (%loop/cond/var, %loop/cond/capture_x) {
            %loop/cond/var = parameter() {spec=float64[]} : float64[]
            %loop/cond/capture_x = parameter() {spec=float64[]} : float64[]
            %loop/cond/less = less(%loop/cond/var, %loop/cond/capture_x) : bool[]
            return %loop/cond/less
          }
          body "loop/body" (%loop/body/var, %loop/body/capture_x) {
            %loop/body/var = parameter() {spec=float64[]} : float64[]
            %loop/body/capture_x = parameter() {spec=float64[]} : float64[]
            %loop/body/multiply = constant() {value=array(float64[], 6.0)} : float64[]
            %loop/body/add = add(%loop/body/var, %loop/body/multiply) : float64[]
            return %loop/body/add
          }
        }
        %fetch = fetch(%loop) : ()
    """)
