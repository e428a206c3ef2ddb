"""`check_op` finds an op whose parts do not agree, and says which of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import check_op, virtual_clock
from tests.fake_cupy.stand_in import stand_in

VALUES = np.linspace(-1.0, 2.0, 6).reshape(2, 3)


def squared(**options: Any) -> Any:
    options = {"outputs": lambda x: x, "gradient": lambda inputs, _, grads: 2 * inputs[0] * grads, **options}

    @af.op(**options)
    def squared(x: Any) -> Any:
        return x * x

    return squared


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("rows", [False, True])
def test_an_op_whose_parts_agree(dtype: str, rows: bool) -> None:
    op = squared(rows=rows)
    op.kernel("cuda")(lambda x: x * x)
    with stand_in(nbytes=16 << 20):
        assert check_op(op, VALUES.astype(dtype)) == []
    with virtual_clock("1 x v100") as clock:
        assert check_op(op, VALUES.astype(dtype), run=clock.run) == []


def test_functions_of_the_library() -> None:
    assert check_op(af.softmax, VALUES, axis=0) == []
    assert check_op(af.matmul, VALUES, VALUES.T) == []
    assert check_op(af.layer_norm, VALUES) == []
    assert check_op(af.take, VALUES, np.array([1, 0]), axis=1) == []
    (left_out,) = check_op(af.argmax, np.arange(4))
    assert left_out == "gradients on 'cpu': no input is a float"
    assert check_op(squared(gradient=None), VALUES) == ["gradients on 'cpu': it has no gradient="]


def broken(of: Any, match: str, **options: Any) -> None:
    with pytest.raises(ExceptionGroup, match=r"checks of .* failed") as caught:
        check_op(of, VALUES, **options)
    told = "\n".join(f"{error}\n{error.__notes__}" for error in caught.value.exceptions)
    assert match in told, told


def test_a_wrong_gradient() -> None:
    broken(squared(gradient=lambda inputs, _, grads: inputs[0] * grads), "The gradient in a direction is")


def test_a_wrong_kernel() -> None:
    op = squared()
    op.kernel("cuda")(lambda x: x * x * 1.0001)
    with stand_in(nbytes=16 << 20):
        broken(op, "check of <op squared> on 'cuda': A kernel gives the same as the kernel for CPUs")
        broken(op, "Mismatched elements: 6 / 6")
        assert check_op(op, VALUES, tolerance=1e-3) == []


def test_a_wrong_row_rule() -> None:
    @af.op(outputs=lambda x: x, rows=True)
    def centred(x: Any) -> Any:
        return x - x.mean()  # of all rows

    broken(centred, "Results for many rows are the results of each row")


def test_a_wrong_shape_rule() -> None:
    @af.op(outputs=lambda x: af.spec(x.dtype, x.shape[:1] if None in x.shape else x.shape))
    def same(x: Any) -> Any:
        return x

    broken(same, "Results have the shapes and dtypes that the shape rule gives, also for open extents")


def test_errors_name_the_line_of_the_check() -> None:
    @af.op(outputs=lambda x: x)
    def fails(x: Any) -> Any:
        raise ValueError("no")

    broken(fails, "test_op_checks.py")


def test_rows_are_left_out() -> None:
    spd = VALUES.T @ VALUES + np.eye(3)
    assert check_op(af.linalg.cholesky, spd, rows=0, tolerance=10.0) == ["by_rows on 'cpu': rows=0"]


def test_an_op_without_inputs() -> None:
    with pytest.raises(TypeError, match="check_op needs inputs to call the op with"):
        check_op(squared())
