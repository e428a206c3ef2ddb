from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncflow.errors import DTypeError, GraphError
from asyncflow.graph.building.build import constant, placeholder
from asyncflow.graph.graph import Graph, has_side_effect, node_effects
from asyncflow.graph.op import Access
from asyncflow.ops.checks.checks import assert_that, check_numerics, print_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    Evaluate: TypeAlias = Callable[..., Any]


@pytest.fixture(autouse=True)
def _graph() -> Iterator[None]:
    with Graph():
        yield


def test_print_writes_one_line_and_gives_back_its_first_value(
    evaluate: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    x = constant(np.array([1.5, 2], np.float32))
    y = print_(x, 3, message="loss:")
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert evaluate(y).tolist() == [1.5, 2]
    assert capsys.readouterr().out == "loss: [1.5 2. ] 3\n"


@pytest.mark.parametrize(
    ("summarize", "text"), [(3, "[  0   1   2 ... 997 998 999]\n"), (1, "[  0 ... 999]\n"), (None, " 500 ")]
)
def test_print_shortens_long_arrays(
    evaluate: Evaluate, capsys: pytest.CaptureFixture[str], summarize: int | None, text: str
) -> None:
    evaluate(print_(np.arange(1000), summarize=summarize))
    out = capsys.readouterr().out
    assert text in out
    assert (" 500 " in out) == (summarize is None)


def test_print_is_ordered_by_its_effect() -> None:
    x = print_(1)
    assert node_effects(x.node) == (("stdout", Access.WRITE),)
    with pytest.raises(GraphError, match=r"print needs a value"):
        print_(message="hello")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "bfloat16"])
def test_check_numerics(evaluate: Evaluate, dtype: Any) -> None:
    x = placeholder(dtype, (None,))
    y = check_numerics(x, "gradient")
    good = np.ones(3).astype(x.dtype)
    assert evaluate(y, {x: good}) is good
    bad = np.array([np.nan, np.inf, -np.inf, 1]).astype(x.dtype)
    with pytest.raises(FloatingPointError, match=r"gradient: 1 NaN and 2 Inf among 4 values"):
        evaluate(y, {x: bad})
    with pytest.raises(FloatingPointError, match=r"^1 NaN and 0 Inf among 1 values"):
        evaluate(check_numerics(x.dtype.type(np.nan)))


def test_check_numerics_lets_integers_pass_and_refuses_strings(evaluate: Evaluate) -> None:
    assert evaluate(check_numerics(np.array([1], np.int32))).tolist() == [1]
    with pytest.raises(DTypeError, match=r"check_numerics: takes floats or complex numbers"):
        check_numerics(placeholder("string", ()))


def test_assert_that(evaluate: Evaluate) -> None:
    x = placeholder("int32", (None,))
    check = assert_that(x > 0, "sizes must be positive", data=[x, 7])
    assert evaluate(check, {x: np.array([1, 2], np.int32)}).tolist() == [True, True]
    assert evaluate(assert_that(True)) == np.True_
    with pytest.raises(AssertionError, match=r"sizes must be positive\n  \[ 1 -2\]\n  7"):
        evaluate(check, {x: np.array([1, -2], np.int32)})
    with pytest.raises(AssertionError, match=r"the condition does not hold"):
        evaluate(assert_that(False))
    with pytest.raises(DTypeError, match=r"assert: takes a boolean condition, not int32"):
        assert_that(x)


def test_assertions_are_kept_but_not_ordered() -> None:
    one, two = assert_that(True).node, assert_that(True).node
    assert has_side_effect(one)
    assert node_effects(one) != node_effects(two)
