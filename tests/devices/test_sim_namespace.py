"""`SimNamespace`: NumPy for stores on a simulated card that launch kernels of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncflow.devices.sim.namespace import SimNamespace, lacks_memory
from asyncflow.devices.sim.values import no_data

F32 = np.dtype("float32")
LARGE, SMALL = (64, 64), (4, 4)


def seen(xp: SimNamespace) -> list[tuple[float | None, int, bool]]:
    """The noted kernels: operations, bytes, and True for a new array."""
    return [(noted.flops, noted.nbytes, noted.made is not None) for noted in xp.taken()]


def test_results_are_numpys_and_each_launch_is_noted() -> None:
    xp: Any = SimNamespace(shapes_only=False)
    x, y = np.ones(LARGE, F32), np.full(LARGE, 2, F32)
    block = xp.empty(LARGE, F32)
    xp.copyto(block, x)
    np.testing.assert_array_equal(block, x)
    np.testing.assert_array_equal(xp.matmul(x, y), x @ y)
    np.testing.assert_array_equal(xp.add(x, y, out=block), x + y)
    np.testing.assert_array_equal(xp.stack([x, y]), [x, y])
    np.testing.assert_array_equal(xp.concatenate([x, y], axis=1), np.concatenate([x, y], axis=1))
    np.testing.assert_array_equal(xp.tanh(x), np.tanh(x))
    np.testing.assert_array_equal(xp.concatenate([x[:3], y[3:]], axis=0, out=block)[2:4], [x[0], y[0]])
    n, nbytes = x.size, x.nbytes
    assert seen(xp) == [
        (None, nbytes, True),
        (0.0, 2 * nbytes, False),
        (2.0 * 64 * n, 3 * nbytes, True),
        (n, 3 * nbytes, False),
        (0.0, 4 * nbytes, True),
        (0.0, 4 * nbytes, True),
        (n, 2 * nbytes, True),
        (0.0, 2 * nbytes, False),
    ]
    assert not seen(xp)


def test_views_numbers_and_names_that_are_no_functions_launch_nothing() -> None:
    xp: Any = SimNamespace(shapes_only=False)
    x = np.ones(LARGE, F32)
    assert xp.reshape(x, (-1,)).base is x
    assert xp.sum(x) == x.size
    assert (xp.float32, xp.ndarray, xp.pi, xp.linalg) == (np.float32, np.ndarray, np.pi, np.linalg)
    assert not seen(xp)


def test_in_a_simulation_of_shapes_large_results_have_no_data_and_no_memory() -> None:
    xp: Any = SimNamespace(shapes_only=True)
    x, w = no_data(F32, LARGE), np.ones(SMALL, F32)
    block = xp.empty(LARGE, F32)
    xp.copyto(block[:2], x[:2])  # which nobody could write to
    made = [block, xp.matmul(x, x.T), xp.add(x, x), xp.stack([x, x]), xp.concatenate([x, x]), xp.tanh(x)]
    assert [each.shape for each in made] == [LARGE, LARGE, LARGE, (2, 64, 64), (128, 64), LARGE]
    assert all(map(lacks_memory, made))
    assert xp.add(x, x, out=block) is block
    small = xp.matmul(w, w)
    np.testing.assert_array_equal(small, w @ w)
    assert len(seen(xp)) == 9


def test_small_results_of_arrays_without_data_have_none_either() -> None:
    """Else a program would decide by the number that stands for them."""
    xp: Any = SimNamespace(shapes_only=True)
    row, matrix = no_data(F32, LARGE)[:2], np.ones((64, 2), F32)
    assert lacks_memory(xp.matmul(row, matrix))
    assert lacks_memory(xp.tanh(row[:, :2]))
    assert not lacks_memory(xp.matmul(matrix.T, matrix))


def test_operands_that_do_not_fit_are_refused_without_data_too() -> None:
    xp: Any = SimNamespace(shapes_only=True)
    x = no_data(F32, LARGE)
    with pytest.raises(ValueError, match="matmul"):
        xp.matmul(x, x[:2])
    with pytest.raises(ValueError, match="broadcast"):
        xp.add(x, x[:2])
