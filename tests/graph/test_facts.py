"""The table of facts about ops: a new op that is not pure has to be classified here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncflow.graph.facts import (
    CALL_AGAIN,
    ITERATE_AGAIN,
    MOVE,
    RECOMPUTE,
    REPLACE,
    RUN_AGAIN,
    SAME_FOR_ALL,
    UPDATE,
    Fact,
    Purpose,
)
from asyncflow.graph.op import NEW_EACH, OPAQUE, Op, find_op, registered_ops
from asyncflow.values import Conduct

J, W, A, C, P = Fact.JOINS, Fact.WAITS, Fact.AWAITS, Fact.CALLS, Fact.CALLS_PURE
E, D, B, G, H = Fact.EFFECT, Fact.DRAWS, Fact.BODIES, Fact.GIVEN, Fact.BY_HAND

FACTS: dict[frozenset[Fact], str] = {
    frozenset({B}): "cond while",
    frozenset({G}): "parameter placeholder",
    frozenset({H}): "control_trigger enter exit loop_cond merge next_iteration switch",
    frozenset({H, D}): "reduce_children",
    frozenset({D}): "barrier draw_row_by_row moving_saved_values random_again random_bernoulli random_categorical "
    "random_choice random_gamma random_integers random_key random_normal random_permutation random_poisson "
    "random_seeded random_truncated_normal random_uniform row_store saved_values store_gradient tensor_array",
    frozenset({E}): "assert check_row_by_row print table_append table_gather table_size table_write "
    "tensor_array_close variable_assign variable_assign_add variable_assign_sub variable_read variable_update",
    frozenset({E, D}): "table_sample",
    frozenset({E, C}): "variable_user_update",
    frozenset({E, W}): "barrier_wait dequeue dequeue_many enqueue enqueue_many queue_close queue_size",
    frozenset({E, W, D}): "mutex_lock mutex_unlock",
    frozenset({E, W, C}): "input_has_more input_next",
    frozenset({E, W, J}): "batched pooled_while shared_sets",
    frozenset({C}): "user_anywhere_row_by_row user_row_by_row",
    frozenset({C, A}): "user_anywhere_waiting_row_by_row user_waiting_row_by_row",
    frozenset({P}): "user_pure_anywhere_row_by_row user_pure_row_by_row",
    frozenset({P, A}): "user_pure_anywhere_waiting_row_by_row user_pure_waiting_row_by_row",
}
"""The ops that are not pure, by what sets them apart."""

REFUSED = {
    # facts: RECOMPUTE, ITERATE_AGAIN, RUN_AGAIN, CALL_AGAIN, UPDATE, MOVE, REPLACE, SAME_FOR_ALL
    frozenset(): "",
    frozenset({B}): "update move replace same_for_all",
    frozenset({G}): "update move replace same_for_all",
    frozenset({H}): "recompute iterate_again update move replace",
    frozenset({H, D}): "recompute iterate_again update move replace same_for_all",
    frozenset({D}): "update replace same_for_all",
    frozenset({E}): "recompute iterate_again update move replace",
    frozenset({E, D}): "recompute iterate_again update move replace same_for_all",
    frozenset({E, C}): "recompute iterate_again run_again call_again update move replace same_for_all",
    frozenset({E, W}): "recompute iterate_again run_again update move replace",
    frozenset({E, W, D}): "recompute iterate_again run_again update move replace same_for_all",
    frozenset({E, W, C}): "recompute iterate_again run_again call_again update move replace same_for_all",
    frozenset({E, W, J}): "recompute iterate_again run_again update move replace",
    frozenset({C}): "recompute iterate_again run_again call_again move replace same_for_all",
    frozenset({C, A}): "recompute iterate_again run_again call_again update move replace same_for_all",
    frozenset({P}): "run_again move replace same_for_all",
    frozenset({P, A}): "iterate_again run_again update move replace same_for_all",
}
"""The purposes for which ops with these facts are refused."""

PURPOSES = {
    "recompute": RECOMPUTE,
    "iterate_again": ITERATE_AGAIN,
    "run_again": RUN_AGAIN,
    "call_again": CALL_AGAIN,
    "update": UPDATE,
    "move": MOVE,
    "replace": REPLACE,
    "same_for_all": SAME_FOR_ALL,
}


def test_every_op_that_is_not_pure_is_in_the_table() -> None:
    table = {name: facts for facts, names in FACTS.items() for name in names.split()}
    wrong = {op.name: op.facts for op in registered_ops() if op.facts != table.get(op.name, frozenset())}
    assert not wrong, "classify new ops in FACTS"
    for name in table:
        find_op(name)  # raises where none is left


def test_every_op_is_refused_for_the_purposes_in_the_table() -> None:
    for op in registered_ops():
        refused = {name for name, purpose in PURPOSES.items() if not purpose.allows(op)}
        assert refused == set(REFUSED[op.facts].split()), op.name
        assert {name for name, purpose in PURPOSES.items() if purpose.why_not(op) is not None} == refused


def test_an_op_without_facts_is_pure() -> None:
    assert all(op.is_pure == (not op.facts) for op in registered_ops())


@pytest.mark.parametrize("purpose", PURPOSES.values(), ids=PURPOSES)
def test_the_most_telling_fact_is_named(purpose: Purpose) -> None:
    every = Op("every", lambda: (), lambda xp: lambda: None, traits=OPAQUE)
    object.__setattr__(every, "facts", frozenset(Fact))
    assert purpose.why_not(every) == next(iter(purpose.reasons.values()))


def test_facts_of_a_changed_op_are_its_own() -> None:
    assert Fact.DRAWS in replace(find_op("add"), conduct=NEW_EACH).facts
    assert not find_op("add").facts


def test_an_op_of_the_users_may_have_any_name() -> None:
    assert Fact.GIVEN not in Op("placeholder", lambda: (), lambda xp: lambda: None, conduct=Conduct(is_user=True)).facts
