"""The options of a session: said once, checked where they are given, and documented."""

from __future__ import annotations

import inspect
import re
from dataclasses import FrozenInstanceError, fields
from typing import Any, get_type_hints

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.program.request import PlanOptions
from asyncflow.runtime.calls.session_options import SessionOptions

NAMES = [field.name for field in fields(SessionOptions)]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"graph": "g"}, TypeError, "graph is a Graph or None; got str 'g'"),
        ({"seed": 1.5}, TypeError, "seed is an integer; got float 1.5"),
        ({"seed": True}, TypeError, "seed is an integer; got bool True"),
        ({"max_iterations": 0}, ValueError, "max_iterations is at least 1; got 0"),
        ({"max_iterations": "9"}, TypeError, "max_iterations is an integer; got str '9'"),
        ({"threads": 0}, ValueError, "threads is at least 1; got 0"),
        ({"optimize": 1}, TypeError, "optimize is True or False; got int 1"),
        ({"loop_batching": 0}, TypeError, "loop_batching is True or False; got int 0"),
        ({"regions": "no"}, TypeError, "regions is True or False; got str 'no'"),
        ({"fusion": None}, TypeError, "fusion is True or False; got NoneType None"),
        ({"cuda_graphs": "yes"}, TypeError, "cuda_graphs is True or False; got str 'yes'"),
        ({"device_while": 1}, TypeError, "device_while is True or False; got int 1"),
        ({"debug": []}, TypeError, r"debug is True or False; got list \[\]"),
        ({"soft_placement": 0.0}, TypeError, "soft_placement is True or False; got float 0.0"),
        ({"without": "fold"}, TypeError, r"without is a list of names of passes, such as \['fold'\]; got str 'fold'"),
        ({"without": None}, TypeError, "without is a list of names of passes, .* got NoneType None"),
        (
            {"without": ["flod"]},
            ValueError,
            "no pass is called 'flod'; did you mean 'fold'.* There are extract, ",
        ),
        ({"without": (3,)}, ValueError, "no pass is called 3; There are extract"),
        (
            {"without": ["cse", "place"]},
            ValueError,
            "the pass 'place' cannot be left out: every node runs on a device. Passes that can be left out: "
            "loop_variables, fold",
        ),
        ({"dump": "flod"}, ValueError, "no pass is called 'flod'; did you mean 'fold'"),
        ({"dump": 1}, TypeError, "dump is True, the name of a pass, or a function .* got int 1"),
        ({"check_numerics": "1"}, TypeError, "check_numerics is True or False; got str '1'"),
    ],
)
def test_options_of_a_session(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        af.Session(**options)


def test_flags_may_be_numpys() -> None:
    assert repr(af.Session(regions=np.bool_(False))) == "<Session on cpu:0>"  # type: ignore[arg-type]


def test_a_session_takes_them_and_says_so() -> None:
    """Names, order, defaults and types, whoever asks."""
    taken, owned = inspect.signature(af.Session), inspect.signature(SessionOptions)
    assert list(taken.parameters.values()) == list(owned.parameters.values())
    assert list(taken.parameters) == NAMES
    assert get_type_hints(af.Session.__init__)["regions"] is bool


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: af.Session(region=True), "Session has no option 'region'; did you mean regions?"),  # type: ignore[call-arg]
        (lambda: af.Session(None, None, True), r"Session.__init__\(\) takes from 1 to 3 positional arguments"),  # type: ignore[call-arg]
    ],
)
def test_a_wrong_call_is_told_as_one_of_the_session(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_each_is_documented_with_the_session() -> None:
    doc = inspect.getdoc(af.Session)
    assert doc is not None
    arguments = doc.partition("Args:\n")[2].partition("\nRaises:")[0]
    assert re.findall(r"^    (\w+): ", arguments, flags=re.MULTILINE) == NAMES
    assert doc.endswith("np.float32(42.0)")


def test_they_stay_as_they_were_given() -> None:
    options = SessionOptions(regions=False)
    with pytest.raises(FrozenInstanceError):
        options.regions = True  # type: ignore[misc]


def test_plans_get_their_own_options() -> None:
    options = SessionOptions(max_iterations=3, fusion=False).for_plans()
    assert (options.max_iterations, options.fusion, options.optimize) == (3, False, True)
    assert {field.name for field in fields(PlanOptions)} <= set(NAMES)
