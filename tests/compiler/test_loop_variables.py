"""`loop_variables`: variables that never change become captures, and two that go on alike become one."""

from __future__ import annotations

import asyncflow as af
from asyncflow.compiler.optimize.cse import eliminate_common_subexpressions as cse
from asyncflow.compiler.optimize.loop_variables import reduce_loop_variables
from asyncflow.compiler.optimize.prune import prune
from tests.compiler.stages import golden, optimized


def test_invariant_and_equal_variables(graph: af.Graph) -> None:
    x = af.placeholder("float64", (), name="x")
    *_, y = af.while_loop(
        lambda i, j, k, s: i < 3,
        lambda i, j, k, s: (i + 1, j + 1, k, s + k + af.astype(j, "float64")),
        (0, 0, x, x),
        name="loop",
    )
    assert optimized(graph, [y], reduce_loop_variables, cse, prune) == golden("""
        %feed = feed() {index=0, spec=float64[]} : float64[]
        %constant = constant() {value=array(int64[], 0)} : int64[]
        %loop = while(%constant, %feed, %feed) {n_vars=2} : (int64[], float64[]) {
          cond "loop/cond" (%loop/cond/var, %loop/cond/var_3, %loop/cond/var_2) {
            %loop/cond/var = parameter() {spec=int64[]} : int64[]
            %loop/cond/var_2 = parameter() {spec=float64[]} : float64[]
            %loop/cond/var_3 = parameter() {spec=float64[]} : float64[]
            %loop/cond/constant = constant() {value=array(int64[], 3)} : int64[]
            %loop/cond/less = less(%loop/cond/var, %loop/cond/constant) : bool[]
            return %loop/cond/less
          }
          body "loop/body" (%loop/body/var, %loop/body/var_3, %loop/body/var_2) {
            %loop/body/var = parameter() {spec=int64[]} : int64[]
            %loop/body/var_2 = parameter() {spec=float64[]} : float64[]
            %loop/body/var_3 = parameter() {spec=float64[]} : float64[]
            %loop/body/constant = constant() {value=array(int64[], 1)} : int64[]
            %loop/body/add = add(%loop/body/var, %loop/body/constant) : int64[]
            %loop/body/add_2 = add(%loop/body/var_3, %loop/body/var_2) : float64[]
            %loop/body/astype = astype(%loop/body/var) {dtype=float64} : float64[]
            %loop/body/add_3 = add(%loop/body/add_2, %loop/body/astype) : float64[]
            return %loop/body/add, %loop/body/add_3
          }
        }
        %fetch = fetch(%loop:1) : ()
    """)


def test_variables_that_start_or_go_on_differently_stay_two(graph: af.Graph) -> None:
    loops = [
        af.while_loop(lambda i, j: i < 3, lambda i, j: (i + 1, j + 1), (0, 1)),
        af.while_loop(lambda i, j: i < 3, lambda i, j: (i + 1, j + 2), (0, 0)),
        af.while_loop(lambda i, j: i < 3, lambda i, j: (i + 1, i), (0, 0)),
        af.while_loop(lambda i, x, y: i < 3, lambda i, x, y: (i + 1, y, x), (0, 1.0, 2.0)),
    ]
    text = optimized(graph, [tensor for loop in loops for tensor in loop], reduce_loop_variables)
    assert [text.count(f"n_vars={n}") for n in (1, 2, 3)] == [0, 3, 1]


async def test_a_loop_keeps_something_to_iterate_on(graph: af.Graph) -> None:
    count = af.Variable(0, name="count")

    def body(x: af.Tensor) -> af.Tensor:
        count.assign_add(1)
        return x

    (y,) = af.while_loop(lambda x: count.read() < 3, body, (af.constant(5),))
    async with af.Session(graph, debug=True) as session:
        assert await session.run([y, count]) == [5, 3]
