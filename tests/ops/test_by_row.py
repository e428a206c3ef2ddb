"""`RowKernel` and the ops that leave rows to it: ops of users, with rows at once or not, and random draws."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.errors import RowByRow
from asyncflow.graph.building.build import apply
from asyncflow.graph.op import Op
from asyncflow.ops.rows.by_row import BY_ROW_OPS, Paused, RowKernel
from asyncflow.ops.user.recorded_calls import recorded
from asyncflow.values import Conduct

Array = np.ndarray[Any, Any]


class Library:
    """Another library, whose functions take rows at once unless one of them is below 0; notes how it is called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.op = Op(
            "doubled", lambda x, k: x, self.kernel, conduct=Conduct(is_user=True), rows_kernel=self.rows_kernel
        )

    def kernel(self, xp: Any) -> Any:
        def call(x: Array, k: Array) -> Array:
            self.calls.append(x.tolist())
            if x.sum() < -9:
                raise ValueError("too low")
            return np.asarray(x * k)

        return call

    def rows_kernel(self, xp: Any) -> Any:
        def call(x: Array, k: Array) -> Array:
            assert k.strides[0] == 0, "a number that is the same for all rows is not repeated"
            if (x < 0).any():
                raise RowByRow
            self.calls.append(x.tolist())
            return x * k[:, None]

        return call


async def test_rows_may_be_left_to_calls_of_each() -> None:
    library = Library()
    with af.Graph() as graph:
        x, k = af.placeholder("float64", (None, 2)), af.placeholder("float64", ())
        y = af.vmap(lambda row: apply(library.op, row, k)[0])(x)
    async with af.Session(graph) as session:
        assert (await session.run(y, {x: [[1, 2], [3, 4]], k: 2})).tolist() == [[2, 4], [6, 8]]
        assert library.calls == [[[1, 2], [3, 4]]]
        assert (await session.run(y, {x: [[1, 2], [3, -4]], k: 2})).tolist() == [[2, 4], [6, -8]]
        assert library.calls[1:] == [[1, 2], [3, -4]]
        with pytest.raises(af.KernelError, match=r"(?s)too low.*vmap/1"):
            await session.run(y, {x: [[1, 2], [-30, -4]], k: 2})


async def test_rows_that_were_left_are_left_again_where_a_recorded_run_is_done_again(tmp_path: Path) -> None:
    library = Library()
    for kernel in ("kernel", "rows_kernel"):
        made = getattr(library.op, kernel)
        object.__setattr__(library.op, kernel, lambda xp, made=made: recorded(made(xp)))
    with af.Graph() as graph:
        x = af.placeholder("float64", (None, 2), name="x")
        y = af.vmap(lambda row: apply(library.op, row, 2.0)[0])(x)
    async with af.Session(graph) as session:
        found = await session.run(y, {x: [[1, 2], [3, -4]]}, record=tmp_path / "run.json")
    calls = list(library.calls)
    (again,) = (await af.replay(tmp_path / "run.json", graph)).values()
    assert np.asarray(again).tolist() == np.asarray(found).tolist() == [[2, 4], [6, -8]]
    assert library.calls == calls, "no function is called"


def test_rows_that_are_left_may_pause_between_them() -> None:
    """The results of rows are checked as the results of one call are."""
    library = Library()
    made = BY_ROW_OPS[3].kernel
    assert made is not None
    spec = af.spec("float64", (None, 2))
    kernel: Any = made(
        np, calls=library.op, arguments={}, host=(), single=True, has_rows=(True, True), specs=(spec,), label="row"
    )
    checked = kernel.followed_by(lambda found: (found[0] + 1,))
    x, k = np.array([[1.0, -2.0], [3.0, 4.0], [5.0, 6.0]]), np.broadcast_to(np.float64(2), (3,))
    begun = checked.begin(-1, np.arange(3)[:, None], x, k)
    pauses = 0
    while isinstance(begun, Paused):
        pauses += 1
        begun = begun.go_on()
    assert pauses == 3
    assert begun[0].tolist() == (x * 2 + 1).tolist()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_a_short_function_over_one_row_costs_few_calls_of_ours(shape: tuple[int, ...]) -> None:
    """Six of Python's functions, two of which are comprehensions; the results are views of nothing that was given."""
    spec = af.spec("float32", (None, *shape))
    kernel = RowKernel(np, lambda x: x, has_rows=(True,), specs=(spec,), single=True, label="row")
    fed, numbers = np.ones((1, *shape), np.float32), np.zeros((1, 1), np.int64)
    counted = Counter[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.endswith("rows/by_row.py"):
            counted[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        (found,) = kernel(numbers, fed)
    finally:
        sys.setprofile(None)
    assert found.shape == (1, *shape)
    assert found.dtype == np.float32
    assert np.array_equal(found, fed)
    assert not np.shares_memory(found, fed)
    del counted["PausingKernel.__call__"]
    assert counted.total() <= 6, counted


async def test_draws_of_rows_are_one_call_that_names_the_row_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with af.Graph(seed=1) as graph:
        x = af.placeholder("float64", (None, 3))
        drawn, noise = af.vmap(lambda row: (af.random.categorical(row), row + af.random.normal((3,))))(x)
    logits = np.zeros((4, 3))
    async with af.Session(graph) as session:
        with pytest.raises(af.KernelError, match=r"(?s)the largest logit along the axis is finite; got nan.*vmap/2"):
            await session.run(drawn, {x: np.where(np.arange(4)[:, None] == 2, np.nan, logits)})
        assert (await session.run(drawn, {x: logits[:0]})).shape == (0,)

        def refuse(*args: object, **options: object) -> Any:
            raise AssertionError("each row is drawn by itself")

        monkeypatch.setattr(RowKernel, "begin", refuse)
        found = await session.run([drawn, noise], {x: logits})
        assert found[0].shape == (4,)
        assert len(np.unique(found[1])) == 12
