"""Generated functions of kernels that feed one another."""

from __future__ import annotations

import operator

import pytest

from asyncflow.ops.straight_line import LineStep, straight_line


def test_values_are_numbered_inputs_first() -> None:
    line = straight_line(
        2, [LineStep(operator.sub, (1, 0)), LineStep(operator.mul, (2, 2)), LineStep(list, ())], (3, 0, 4)
    )
    assert line(2, 5) == (9, 2, [])


def test_a_single_result_comes_by_itself() -> None:
    assert straight_line(1, [LineStep(operator.neg, (0,))], 1)(3) == -3
    assert straight_line(1, [], (0,))("given") == ("given",)


def test_a_step_may_give_several_values_and_any_sequence_of_them() -> None:
    steps = [
        LineStep(divmod, (0, 1), 2),
        LineStep(lambda x: [x], (3,), 1),
        LineStep(lambda x: [], (0,), 0),
        LineStep(max, (2, 4)),
    ]
    assert straight_line(2, steps, (2, 3, 4, 5))(17, 5) == (3, 2, 2, 3)
    with pytest.raises(ValueError, match="too many values"):
        straight_line(0, [LineStep(lambda: (1, 2), (), 1)], 0)()


def test_lines_of_one_form_share_their_code_and_no_kernels() -> None:
    first, second = (straight_line(2, [LineStep(kernel, (0, 1))], 2) for kernel in (operator.add, operator.mul))
    assert first.__code__ is second.__code__
    assert (first(3, 4), second(3, 4)) == (7, 12)
