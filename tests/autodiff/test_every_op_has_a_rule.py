"""Every op that a program can be made of has a derivative, or a reason to have none."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import asyncflow
from asyncflow.graph.graph import STRUCTURED
from asyncflow.graph.op import Op, derivative_of, registered_ops, why_not_differentiable

ROOMS = ("ops", "control", "state", "autodiff")

OF_SWEEP = STRUCTURED | {"variable_read"}
"""Ops that `asyncflow.autodiff` differentiates itself: their derivatives are more than what reaches their inputs."""

MISSING = frozenset(
    {
        "case_index",
        "control_trigger",
        "enter",
        "exit",
        "loop_cond",
        "merge",
        "next_iteration",
        "saved_values",
        "store_gradient",
        "switch",
        "tensor_array",
        "tensor_array_close",
        "tensor_array_concat",
        "tensor_array_gather",
        "tensor_array_read",
        "tensor_array_scatter",
        "tensor_array_size",
        "tensor_array_split",
        "tensor_array_stack",
        "tensor_array_unstack",
        "tensor_array_write",
        "variable_assign",
        "variable_assign_add",
        "variable_assign_sub",
        "variable_update",
        "variable_user_update",
    }
)
"""Ops of control flow, state and saved values whose rules are still to come; the list is to end empty."""


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
    forgotten = sorted(without - OF_SWEEP - MISSING)
    assert not forgotten, f"give these ops a rule with @derivative, or say why with not_differentiable: {forgotten}"


def test_what_has_a_rule_is_not_listed_as_missing() -> None:
    done = sorted(op.name for op in every_op() if op.name in MISSING | OF_SWEEP and has_rule_or_reason(op))
    assert not done, f"these have rules or reasons by now: {done}"
    assert {op.name for op in every_op()} >= MISSING | OF_SWEEP


def test_no_op_has_both() -> None:
    both = [op.name for op in every_op() if derivative_of(op) is not None and why_not_differentiable(op) is not None]
    assert not both


def test_reasons_are_given() -> None:
    for op in every_op():
        reason = why_not_differentiable(op)
        assert reason is None or len(reason.split()) > 2, f"{op.name}: {reason!r} explains nothing"


def test_an_op_without_either_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: an op nobody thought of makes it fail."""
    stray = Op(name="stray", infer=lambda x: x, kernel=lambda xp: lambda x: x)
    monkeypatch.setitem(globals(), "registered_ops", lambda: (stray,))
    with pytest.raises(AssertionError, match="stray"):
        test_every_op_has_a_derivative_or_a_reason_to_have_none()
