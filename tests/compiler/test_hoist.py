"""`hoist`: values that do not change from iteration to iteration are computed before the loop, if they cannot fail."""

from __future__ import annotations

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.optimize.hoist import TURNED, hoist
from asyncflow.compiler.optimize.prune import prune
from asyncflow.graph.graph import Graph
from tests.compiler.stages import golden, optimized


def test_invariant_nodes_stand_in_front_of_the_loop(graph: af.Graph) -> None:
    x = af.placeholder("float64", (), name="x")
    _, y = af.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s + af.tanh(x * 2.0)), (0, x), name="loop")
    assert optimized(graph, [y], hoist, prune) == golden("""
        %feed = feed() {index=0, spec=float64[]} : float64[]
        %constant = constant() {value=array(int64[], 0)} : int64[]
        %constant_1 = constant() {value=array(float64[], 2.0)} : float64[]
        %loop/body/multiply = multiply(%feed, %constant_1) : float64[]
        %loop/body/tanh = tanh(%loop/body/multiply) : float64[]
        %loop = while(%constant, %feed, %loop/body/tanh) {n_vars=2} : (int64[], float64[]) {
          cond "loop/cond" (%loop/cond/var, %loop/cond/var_1, %loop/cond/capture_tanh) {
            %loop/cond/var = parameter() {spec=int64[]} : int64[]
            %loop/cond/var_1 = parameter() {spec=float64[]} : float64[]
            %loop/cond/capture_tanh = parameter() {spec=float64[]} : float64[]
            %loop/cond/constant = constant() {value=array(int64[], 3)} : int64[]
            %loop/cond/less = less(%loop/cond/var, %loop/cond/constant) : bool[]
            return %loop/cond/less
          }
          body "loop/body" (%loop/body/var, %loop/body/var_1, %loop/body/capture_tanh) {
            %loop/body/var = parameter() {spec=int64[]} : int64[]
            %loop/body/var_1 = parameter() {spec=float64[]} : float64[]
            %loop/body/capture_tanh = parameter() {spec=float64[]} : float64[]
            %loop/body/constant = constant() {value=array(int64[], 1)} : int64[]
            %loop/body/add = add(%loop/body/var, %loop/body/constant) : int64[]
            %loop/body/add_1 = add(%loop/body/var_1, %loop/body/capture_tanh) : float64[]
            return %loop/body/add, %loop/body/add_1
          }
        }
        %fetch = fetch(%loop:1) : ()
    """)


def test_out_of_nested_loops_all_the_way(graph: af.Graph) -> None:
    x = af.placeholder("float64", (), name="x")

    def inner(s: af.Tensor) -> af.Tensor:
        _, total = af.while_loop(lambda j, t: j < 2, lambda j, t: (j + 1, t + af.exp(x)), (0, s))
        return total

    _, y = af.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, inner(s)), (0, x))
    first, *rest = optimized(graph, [y], hoist, prune).split(" = while(")
    assert "exp(%feed)" in first
    assert not any("= exp(" in part for part in rest)


def test_extents_that_only_a_run_knows_are_asked_for_once(graph: af.Graph) -> None:
    """Looking at a shape cannot fail, but an addition of unknown shapes can."""
    x, y = af.placeholder("float64", (None, 2)), af.placeholder("float64", (None, 2))
    _, total = af.while_loop(
        lambda i, s: i < 3, lambda i, s: (i + 1, s + af.astype(af.shape(x)[0], "float64") + af.sum(x + y)), (0, 0.0)
    )
    before, inside = optimized(graph, [total], hoist, prune).split(" = while(")
    assert "= shape(" in before
    assert "= shape(" not in inside
    assert inside.count("= add(") == 4


def test_a_predicate_runs_at_least_once_so_what_may_fail_moves_out_of_it(graph: af.Graph) -> None:
    rows = af.placeholder("float64", (None, 2), name="rows")
    n = af.while_loop(lambda i: i < af.shape(rows)[0], lambda i: i + af.shape(rows)[0] // 2, 0, name="loop")
    before, inside = optimized(graph, [n], hoist, prune).split("%loop = while(")
    assert "getitem(%loop/cond/shape)" in before, "the predicate's"
    assert "floor_divide" in inside and "getitem" in inside, "the body's may fail, and need not run"


@pytest.mark.parametrize("optimize", [True, False])
async def test_a_loop_without_iterations_fails_on_nothing(graph: af.Graph, optimize: bool) -> None:
    v, n = af.placeholder("float64", (3,), name="v"), af.placeholder("int64", (), name="n")
    _, y = af.while_loop(
        lambda i, s: i < n,
        lambda i, s: (i + 1, s + v[n + 9] + af.astype(n ** af.constant(-1), "float64")),
        (0, af.constant(0.0)),
    )
    async with af.Session(graph, debug=True, optimize=optimize) as session:
        assert await session.run(y, {v: np.zeros(3), n: 0}) == 0.0
        with pytest.raises(af.KernelError):
            await session.run(y, {v: np.zeros(3), n: 1})


def test_a_value_larger_than_its_sources_stays_inside(graph: af.Graph) -> None:
    x = af.placeholder("float64", (1000,), name="x")
    column = af.reshape(x, (1000, 1))
    _, y = af.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s + af.sum(x * column)), (0, 0.0), name="loop")
    before, inside = optimized(graph, [y], hoist, prune).split("%loop = ")
    assert "multiply(" not in before
    assert "multiply(" in inside


@pytest.mark.parametrize(("rows", "is_right", "is_copied"), [(256, True, True), (256, False, False), (8, True, False)])
async def test_a_large_matrix_by_which_a_loop_multiplies_is_turned_once(
    graph: af.Graph, rows: int, is_right: bool, is_copied: bool
) -> None:
    w, x = af.placeholder("float32", (rows, rows), name="w"), af.placeholder("float32", (rows, rows), name="x")

    def step(y: af.Tensor) -> af.Tensor:
        return af.tanh(y @ w.T if is_right else w.T @ y)

    _, y = af.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, step(y)), (0, x), name="loop")
    w_value, expected = np.random.default_rng(0).standard_normal((2, rows, rows), np.float32)
    feeds = {w: w_value / rows, x: expected}
    for _ in range(3):
        expected = np.tanh(expected @ feeds[w].T if is_right else feeds[w].T @ expected)
    async with af.Session(graph) as session:
        np.testing.assert_allclose(await session.run(y, feeds), expected, rtol=1e-4, atol=1e-6)
    after: list[Graph] = []
    optimized(graph, [y], hoist, after.append)
    (turned,) = [node for node in after[0].nodes if node.op.name == "matrix_transpose"]
    assert (turned.op is TURNED) is is_copied


@pytest.mark.parametrize("shape", [(1, 5), (64, 3), (130, 70), (0, 4)])
def test_a_turned_matrix_is_the_transposed_one(shape: tuple[int, int]) -> None:
    assert TURNED.kernel is not None
    x = np.random.default_rng(0).standard_normal(shape)
    turned = TURNED.kernel(np)(x)
    assert turned.flags.c_contiguous
    np.testing.assert_array_equal(turned, x.T)
