"""Values that loops save for their gradients, as ``plan.explain(memory=True)`` lists them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import asyncflow as af


def _explained(fetches: object, *feeds: af.Tensor) -> list[str]:
    plan = af.Session(feeds[0].graph).plan(fetches, feeds=feeds)
    return plan.explain(memory=True).splitlines()


def test_a_loop_lists_its_saved_values_with_bytes_and_readers() -> None:
    with af.Graph():
        x = af.placeholder("float32", (4, 3), name="x")
        _, y = af.while_loop(lambda i, v: i < 5, lambda i, v: (i + 1, af.sin(v)), (0, x), name="loop")
        slope = af.gradients(y, x)
    heading, line = _explained(slope, x)
    assert heading.startswith("loop loop (")
    assert heading.endswith(f"{__file__.rpartition('/')[2]}:21) saves 48 bytes an iteration for its gradient")
    assert line == "  loop/body/var_1: float32[4,3], 48 bytes; for the gradient of loop/body/sin"


def test_uses_of_a_shape_alone_save_no_value() -> None:
    with af.Graph():
        x = af.placeholder("float64", (None,), name="x")
        _, y = af.while_loop(lambda i, v: i < 5, lambda i, v: (i + 1, v + af.sum(v)), (0, x), name="loop")
        slope = af.gradients(y, x)
    heading, *lines = _explained(slope, x)
    assert "saves 8 bytes an iteration" in heading
    (line,) = lines
    assert "loop/body/shape: int64[1], 8 bytes" in line


def test_sizes_that_only_a_run_knows_are_said_to_be_so() -> None:
    with af.Graph():
        x = af.placeholder("float64", (None,), name="x")
        _, y = af.while_loop(lambda i, v: i < 5, lambda i, v: (i + 1, v * v), (0, x), name="loop")
        slope = af.gradients(y, x)
    heading, line = _explained(slope, x)
    assert heading.endswith("saves 0 bytes an iteration for its gradient, and values of a size known only in a run")
    assert "float64[?], of a size known only in a run; for the gradient of loop/body/multiply" in line


def test_inner_loops_and_predicates_of_branches_are_told() -> None:
    with af.Graph():
        x = af.placeholder("float64", (3,), name="x")

        def body(i: af.Tensor, v: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            _, w = af.while_loop(lambda j, w: j < 2, lambda j, w: (j + 1, af.sin(w)), (np.int32(0), v), name="inner")
            return i + 1, af.cond(af.sum(w) > 0, lambda: w * v, lambda: af.cos(w), name="branch")

        _, y = af.while_loop(lambda i, v: i < 3, body, (np.int32(0), x), name="loop")
        slope = af.gradients(y, x)
    lines = _explained(slope, x)
    assert "  loop/body/greater: bool[], 1 bytes; for the gradient of loop/body/branch" in lines
    stores = [line for line in lines if "the saved values or the array of an inner loop" in line]
    assert len(stores) == 1
    assert stores[0].endswith("for the gradient of loop/body/inner/body/sin")
    assert any(line.startswith("loop loop/body/inner (") for line in lines)


def test_without_gradients_nothing_is_saved() -> None:
    with af.Graph():
        x = af.placeholder("float64", (), name="x")
        _, y = af.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * v), (0, x))
    assert _explained(y, x) == ["no loop saves values for a gradient"]


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_variable_is_kept_once_unless_the_loop_changes_it(is_changed: bool) -> None:
    w = af.Variable(np.ones(3), name="w")
    with af.Graph():
        x = af.placeholder("float64", (3,), name="x")

        def body(i: af.Tensor, v: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            v = v * w
            if is_changed:
                with af.control_dependencies([w.assign_add(np.ones(3))]):
                    v = af.identity(v)
            return i + 1, v

        _, y = af.while_loop(lambda i, v: i < 5, body, (0, x), name="loop")
        slope = af.gradients(y, x)
    heading, line = _explained(slope, x)
    assert f"saves {24 if is_changed else 0} bytes an iteration" in heading
    assert ("float64[3], 24 bytes" if is_changed else "float64[3], the same in all iterations and kept once") in line


def test_a_buffer_with_two_names_counts_once() -> None:
    """The result of an iteration is the start of the next, and its view is no other buffer."""
    with af.Graph():
        x = af.placeholder("float64", (4, 3), name="x")

        def body(i: af.Tensor, v: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            # The slope of tanh reads its result, which the next iteration's sin and cos read as v and as a vector.
            return i + 1, af.tanh(af.sin(v) + af.sum(af.cos(af.reshape(v, (12,)))))

        _, y = af.while_loop(lambda i, v: i < 5, body, (0, x), name="loop")
        slope = af.gradients(y, x)
    heading, *lines = _explained(slope, x)
    assert "saves 96 bytes an iteration" in heading
    assert sum("float64[4,3], 96 bytes" in line or "float64[12], 96 bytes" in line for line in lines) == 1
    assert all("in the buffer of" in line for line in lines[1:]) and len(lines) > 1


@pytest.mark.parametrize("part", [af.real, af.imag])
def test_parts_of_complex_numbers_are_saved_without_the_numbers(part: Callable[[af.Tensor], af.Tensor]) -> None:
    """A part looks into an array of twice its bytes, which a loop would keep alive."""
    with af.Graph():
        x = af.placeholder("float32", (64, 64), name="x")
        _, y = af.while_loop(lambda i, v: i < 5, lambda i, v: (i + 1, part(af.fft.fft(v)) ** 2), (0, x), name="loop")
        slope = af.gradients(y, x)
    heading, line = _explained(slope, x)
    assert "saves 16,384 bytes an iteration" in heading
    assert line == "  loop/body/positive: float32[64,64], 16,384 bytes; for the gradient of loop/body/square"
