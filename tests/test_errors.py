"""Errors of building name the user's line, whoever raises them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.errors import UNKNOWN_LOCATION, a_kind, user_location
from tests.patience import PATIENCE_S

NOTHING: Any = []
WRONG: Any = 3
PROGRAMS: dict[str, Callable[[af.Tensor, af.Variable], object]] = {
    "case": lambda x, v: af.case([]),
    "switch_case": lambda x, v: af.switch_case(af.sum(af.shape(x)), NOTHING),
    "maximum_iterations": lambda x, v: af.while_loop(lambda i: i < 3, lambda i: i, (0,), maximum_iterations=-5),
    "shape_invariants": lambda x, v: af.while_loop(lambda i: i < 3, lambda i: i, (0,), shape_invariants=((), ())),
    "a list in a loop": lambda x, v: af.while_loop(lambda xs: True, af.concat, ([x, x],)),
    "a predicate": lambda x, v: af.cond(x, lambda: 1, lambda: 2),
    "rows of a scalar": lambda x, v: af.map_fn(lambda row: row, af.sum(x)),
    "a truth value": lambda x, v: bool(x),
    "NumPy": lambda x, v: np.asarray(x),
    "an operand": lambda x, v: af.sin(None),
    "an index": lambda x, v: x["a"],
    "a dtype": lambda x, v: af.astype(x, "foo"),
    "an extent": lambda x, v: af.zeros((-1,)),
    "a shape": lambda x, v: af.placeholder("float32", 1.5),  # type: ignore[arg-type]
    "a variable": lambda x, v: v.assign_add("a"),
    "a variable's name": lambda x, v: af.Variable(1, name=WRONG),
    "an update": lambda x, v: v.update(WRONG, x),
    "an op": lambda x, v: af.op(lambda x: x),
    "a scope": lambda x, v: af.device("cpu:x").__enter__(),
    "a group": lambda x, v: af.group(WRONG),
    "a name": lambda x, v: af.Graph().tensor(WRONG),
    "a sum": lambda x, v: af.einsum(WRONG, x),
    "a moment": lambda x, v: af.var(x, correction="a"),  # type: ignore[arg-type]
    "a loss": lambda x, v: af.nn.softmax_cross_entropy(x, af.zeros((7,))),
    "a transform": lambda x, v: af.fft.fft(x, n=0),
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_errors_of_building_name_the_line(what: str) -> None:
    program = PROGRAMS[what]
    line = inspect.getsourcelines(program)[1]
    with af.Graph():
        x, v = af.placeholder("float32", (2, 3), name="x"), af.Variable(np.zeros(3, np.float32))
        with pytest.raises(af.GraphError) as caught:
            program(x, v)
    assert str(caught.value).count("written at") == 1
    assert f"\n  written at {__file__}:{line}" in str(caught.value)


def test_a_reason_is_without_the_line() -> None:
    error = af.ShapeError("it is wrong")
    here = inspect.currentframe()
    assert here is not None
    assert error.reason == "it is wrong"
    assert str(error) == f"it is wrong\n  written at {__file__}:{here.f_lineno - 4}"
    assert str(af.GraphError(str(error))) == str(error)
    assert "a.py:1\n  written at " in str(af.GraphError("another node\n  built at a.py:1"))


def test_what_starts_a_thread_is_no_line_of_the_users() -> None:
    found: list[object] = []
    source = "def ask():\n    found.append(user_location())"
    inside: dict[str, Any] = {"found": found, "user_location": user_location}
    exec(compile(source, str(Path(af.__file__).parent / "inside.py"), "exec"), inside)
    thread = threading.Thread(target=inside["ask"])
    thread.start()
    thread.join(PATIENCE_S)
    assert found == [UNKNOWN_LOCATION]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (int, "an int"),
        (np.ndarray, "an ndarray"),
        (dict, "a dict"),
        (type("uint8", (), {}), "a uint8"),
        (type("Edge", (), {}), "an Edge"),
        (type("NoneType", (), {}), "a NoneType"),
        (type("", (), {}), "an object of a class without a name"),
    ],
)
def test_kinds_are_named_with_their_articles(kind: type, said: str) -> None:
    assert a_kind(kind) == said
