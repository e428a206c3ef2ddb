"""Messages about functions and results that `cond`, loops and similar functions cannot use."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The calls are wrong on purpose, which the type checker need not say.
af: Any = asyncflow


@pytest.fixture
def x() -> Iterator[asyncflow.Tensor]:
    with af.Graph():
        yield af.placeholder("float64", (3,), name="x")


async def fetch(value: Any = None) -> Any:
    return value


async def pages(value: Any = None) -> Any:
    yield value


def fails_inside(*values: Any) -> Any:
    raise TypeError("missing a required argument: of the user's own")


MAKE_AN_OP = r"fetch is a coroutine function; make it an op with @af\.op"

REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "value as true_fn": (
        lambda x: af.cond(True, x, lambda: x),
        r"^true_fn is a function without arguments; got <Tensor x:0 float64\[3\]>: write lambda: x",
    ),
    "value as false_fn": (lambda x: af.cond(True, lambda: x, x), "^false_fn is a function without arguments"),
    "branch with an argument": (
        lambda x: af.cond(True, lambda a: a, lambda: x),
        r"true_fn is called with no arguments",
    ),
    "one branch without results": (
        lambda x: af.cond(True, lambda: x, lambda: None),
        "expected one value, got None; for branches that only have effects return None from both",
    ),
    "other branch without results": (lambda x: af.cond(True, lambda: None, lambda: x), "return None from both"),
    "branches of other lengths": (
        lambda x: af.cond(True, lambda: (x, x), lambda: x),
        r"\(true_fn first\): expected a tuple of 2 values, got one value\n",
    ),
    "coroutine function as branch": (lambda x: af.cond(True, fetch, lambda: x), MAKE_AN_OP),
    "coroutine from a branch": (lambda x: af.cond(True, lambda: fetch(x), lambda: x), MAKE_AN_OP),
    "coroutine as a branch": (lambda x: af.cond(True, fetch(x), lambda: x), MAKE_AN_OP),
    "value in switch_case": (lambda x: af.switch_case(0, [lambda: x, x]), "^branch 1 is a function without arguments"),
    "value as default": (lambda x: af.switch_case(0, [lambda: x], x), "^default is a function without arguments"),
    "one branch in place of a list": (lambda x: af.switch_case(0, lambda: x), "switch_case takes a list of functions"),
    "tensor of branches": (lambda x: af.switch_case(0, x), "switch_case takes a list of functions"),
    "None in switch_case": (lambda x: af.switch_case(0, [lambda: x, lambda: None]), "return None from both"),
    "value in case": (lambda x: af.case([(True, x)]), "^branch 0 is a function without arguments"),
    "tensor of pairs": (af.case, "case takes a list of pairs"),
    "number of loop variables in cond": (
        lambda x: af.while_loop(lambda i: i < 3, lambda i, j: (i, j), (0, 1)),
        "cond of while_loop is called with 2 loop variables",
    ),
    "number of loop variables in body": (
        lambda x: af.while_loop(lambda i: i < 3, lambda i, j: i, [0]),
        "body of while_loop is called with 1 loop variable, which .*missing a required argument: 'j'",
    ),
    "a dict is one argument": (
        lambda x: af.while_loop(lambda i, j: i < 3, lambda d: d, {"i": 0, "j": 0}),
        "called with the loop variables, a dict with keys 'i', 'j'",
    ),
    "number of loop variables, bounded": (
        lambda x: af.while_loop(lambda i: i < 3, lambda: 1, 0, maximum_iterations=3),
        "body of while_loop is called with the loop variables, one value",
    ),
    "value as cond of a loop": (
        lambda x: af.while_loop(x, lambda i: i, 0),
        "^cond of while_loop is a function of the loop variables, one value; got <Tensor",
    ),
    "coroutine function as body": (lambda x: af.while_loop(lambda i: i < 3, fetch, 0), MAKE_AN_OP),
    "coroutine from a body": (lambda x: af.while_loop(lambda i, j: i < 3, lambda i, j: fetch(i), (0, 1)), MAKE_AN_OP),
    "coroutine from a bounded body": (
        lambda x: af.while_loop(lambda i: i < 3, lambda i: [fetch(i)], 0, maximum_iterations=2),
        MAKE_AN_OP,
    ),
    "coroutine from a predicate": (lambda x: af.while_loop(fetch, lambda i: i, 0), MAKE_AN_OP),
    "asynchronous generator": (lambda x: af.while_loop(lambda i: i < 3, pages, 0), r"pages is .*@af\.op"),
    "map_fn swapped": (lambda x: af.map_fn(x, lambda row: row), r"map_fn\(fn, elems\) takes the function first"),
    "scan swapped": (lambda x: af.scan(x, lambda s, row: row), r"scan\(fn, elems\) takes the function first"),
    "value as fn": (lambda x: af.map_fn(x, x), "^fn of map_fn is a function of one row, one value; got <Tensor"),
    "rows are nests": (
        lambda x: af.map_fn(lambda a, b: a, (x, x)),
        "fn of map_fn is called with one row, a tuple of 2 values",
    ),
    "fn of scan": (lambda x: af.scan(lambda s: s, x), "fn of scan is called with the state, one value, and one row"),
    "fn of foldl": (lambda x: af.foldl(lambda s: s, x), "fn of foldl is called with the state"),
    "coroutine function as fn": (lambda x: af.foldr(fetch, x), MAKE_AN_OP),
    "an element by index": (lambda x: asyncflow.TensorArray("int64", 3)[0], r"use \.read\(i\) or \.stack\(\)"),
    "elements in a for loop": (lambda x: list(asyncflow.TensorArray("int64", 3)), r"\.read\(i\).*\.stack\(\)"),
    "an element assigned": (
        lambda x: asyncflow.TensorArray("int64", 3).__setitem__(0, 1),
        r"array = array\.write\(i, value\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("error")
def test_refusals_say_what_to_write(case: str, x: asyncflow.Tensor) -> None:
    build, message = REFUSED[case]
    with pytest.raises(af.GraphError, match=message):
        build(x)
    gc.collect()  # would warn of a coroutine that nobody awaited


@pytest.mark.parametrize(
    "build",
    [
        lambda x: af.cond(True, fails_inside, lambda: x),
        lambda x: af.while_loop(lambda i: i < 3, fails_inside, 0),
        lambda x: af.map_fn(fails_inside, x),
        lambda x: af.foldl(fails_inside, x),
    ],
)
def test_errors_inside_the_functions_stay_themselves(build: Callable[[Any], object], x: asyncflow.Tensor) -> None:
    with pytest.raises(TypeError, match="of the user's own"):
        build(x)


async def test_functions_without_a_signature_are_called() -> None:
    """Builtins and objects with defaults are as good as any function."""
    with af.Graph() as graph:
        rows = af.constant(np.array([1.0, -2.0]))
        result = af.map_fn(abs, rows), af.cond(True, lambda default=1: af.constant(default), lambda *rest: 2)
    async with af.Session(graph) as session:
        doubled, one = await session.run(result)
    assert (doubled.tolist(), int(one)) == ([1.0, 2.0], 1)


@pytest.mark.parametrize("frame", [3, "", "a:b", None])
def test_a_frame_of_primitives_has_a_name(graph: af.Graph, frame: Any) -> None:
    with pytest.raises(af.GraphError, match=r"a frame's name is a string .* got .*\n  written at .*\.py:\d+"):
        af.raw.enter(af.constant(1.0), frame)
