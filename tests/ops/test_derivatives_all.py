"""Every op that a program can be made of has a derivative, or a reason to have none."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

import pytest

import asyncflow
from asyncflow.autodiff.gradients import gradients
from asyncflow.control.primitives.control_trigger import control_trigger
from asyncflow.control.primitives.enter import enter
from asyncflow.control.primitives.exit import exit
from asyncflow.control.primitives.loop_cond import loop_cond
from asyncflow.errors import GraphError
from asyncflow.graph.building.build import apply, constant, placeholder
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import OPAQUE, Op, derivative_of, find_op, registered_ops, why_not_differentiable
from asyncflow.ops.derivatives.shapes import carries_gradient
from asyncflow.state.variables.variable import Variable

ROOMS = ("ops", "control", "state", "autodiff", "vertex")

OF_SWEEP = {"cond", "while", "custom_gradient", "recomputed", "variable_read"}
"""Ops that `asyncflow.autodiff` differentiates itself: their derivatives are more than what reaches their inputs."""

REFUSED = frozenset(
    {
        "enter",
        "exit",
        "merge",
        "next_iteration",
        "switch",
        "variable_assign",
        "variable_assign_add",
        "variable_assign_sub",
        "variable_update",
        "variable_user_update",
    }
)
"""Ops that have neither, as a gradient of zeros would be wrong without a word: asking for one is an error.

A write of state gives the new value, which depends on the written value and on state of earlier runs. The
primitives pass values on in loops written by hand, which `gradients` does not put together again.
"""

NEVER_REACHED = frozenset({"case_index", "control_trigger", "loop_cond"})
"""Ops that no gradient comes to, as their outputs are integers or booleans, or they have none."""


def every_op() -> tuple[Op, ...]:
    """All ops, whichever modules the test session has imported so far."""
    for room in ROOMS:
        package = importlib.import_module(f"{asyncflow.__name__}.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    return registered_ops()


def has_rule_or_reason(op: Op) -> bool:
    return derivative_of(op) is not None or why_not_differentiable(op) is not None


def test_every_op_has_a_derivative_or_a_reason_to_have_none() -> None:
    without = {op.name for op in every_op() if not has_rule_or_reason(op)}
    forgotten = sorted(without - OF_SWEEP - REFUSED - NEVER_REACHED)
    assert not forgotten, f"give these ops a rule with @derivative, or say why with not_differentiable: {forgotten}"


def test_ops_with_a_rule_are_not_listed_as_exceptions() -> None:
    listed = OF_SWEEP | REFUSED | NEVER_REACHED
    done = sorted(op.name for op in every_op() if op.name in listed and has_rule_or_reason(op))
    assert not done, f"these have rules or reasons: {done}"
    assert {op.name for op in every_op()} >= listed


@pytest.mark.parametrize(
    "write",
    [
        lambda v, x: v.assign(x),
        lambda v, x: v.assign_add(x),
        lambda v, x: v.assign_sub(x),
        lambda v, x: v.update(lambda old, new: old * new, x),
    ],
)
def test_a_gradient_through_a_write_is_refused(write: Callable[[Variable, Tensor], Tensor]) -> None:
    """The error says what to do; written and not used, the same value has its gradient."""
    with Graph():
        x = placeholder("float64", ())
        written = write(Variable(1.0), x)
        assert gradients(x * x, x) is not None
        with pytest.raises(GraphError, match=r"variable_\w+ has no derivative.*stop_gradient"):
            gradients(written * x, x)


def test_a_gradient_through_a_primitive_is_refused() -> None:
    """Loops written by hand are not differentiated."""
    with Graph():
        x = placeholder("float64", ())
        entered = enter(x, "loop")
        with pytest.raises(GraphError, match="no derivative"):
            gradients(exit(entered * entered), x)


@pytest.mark.parametrize("name", sorted(NEVER_REACHED))
def test_unreached_ops_return_nothing_a_gradient_flows_through(name: str) -> None:
    with Graph():
        true = constant(True)
        made: dict[str, Callable[[], Node]] = {
            "case_index": lambda: apply(find_op("case_index"), true, true, exclusive=False, has_default=False)[0].node,
            "control_trigger": control_trigger,
            "loop_cond": lambda: loop_cond(true).node,
        }
        assert not any(carries_gradient(output.spec) for output in made[name]().outputs)


def test_no_op_has_both() -> None:
    both = [op.name for op in every_op() if derivative_of(op) is not None and why_not_differentiable(op) is not None]
    assert not both


def test_reasons_are_given() -> None:
    for op in every_op():
        reason = why_not_differentiable(op)
        assert reason is None or len(reason.split()) > 2, f"{op.name}: {reason!r} explains nothing"


def test_an_op_without_either_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself works: an unknown op makes it fail."""
    stray = Op("stray", lambda x: x, lambda xp: lambda x: x, traits=OPAQUE)
    monkeypatch.setitem(globals(), "registered_ops", lambda: (stray,))
    with pytest.raises(AssertionError, match="stray"):
        test_every_op_has_a_derivative_or_a_reason_to_have_none()
