"""Names of other libraries are refused with a hint, and `dir()` shows the public names."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import asyncflow as af
import asyncflow.testing
from asyncflow.foreign_names import _ADVICE, FUNCTIONS, close_names, in_place_of

MODULES = {
    "asyncflow": af,
    "asyncflow.fft": af.fft,
    "asyncflow.linalg": af.linalg,
    "asyncflow.nn": af.nn,
    "asyncflow.optim": af.optim,
    "asyncflow.profiler": af.profiler,
    "asyncflow.random": af.random,
    "asyncflow.raw": af.raw,
    "asyncflow.testing": asyncflow.testing,
}


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        ("asyncflow", "concatenate", "; use af.concat"),
        ("asyncflow", "transpose", "; use af.permute_dims"),
        ("asyncflow", "cast", "; use af.astype"),
        ("asyncflow", "reduce_sum", "; use af.sum"),
        ("asyncflow", "cumsum", "; use af.cumulative_sum"),
        ("asyncflow", "outer", "; use af.linalg.outer"),
        ("asyncflow", "bfloat16", '; use the name "bfloat16" as a dtype'),
        ("asyncflow.linalg", "einsum", "; use af.einsum"),
        ("asyncflow", "ifft", "; use af.fft.ifft"),
        ("asyncflow", "load", "; use af.load_graph(path) for a graph, session.restore(path) for variables"),
        ("asyncflow", "GRAPH", "; did you mean Graph?"),
        ("asyncflow", "while_lop", "; did you mean while_loop?"),
        ("asyncflow", "xyzzy", ""),
        ("asyncflow", "__wrapped__", ""),
        ("asyncflow.nn", "Linear", "; use x @ w + b, with w and b variables; af.nn has functions, no layers"),
        ("asyncflow.nn", "lstmcell", "; did you mean lstm_cell?"),
        ("asyncflow.optim", "Adam", "; use af.optim.adam"),
        ("asyncflow.random", "randn", "; use af.random.normal"),
    ],
)
def test_what_to_use_in_its_place(module: str, name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(MODULES[module], name)
    assert str(caught.value).startswith(f"module {module!r} has no attribute {name!r}{hint}")
    assert caught.value.name == name
    assert not hasattr(MODULES[module], name)


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_dir_shows_public_names_only(module: ModuleType) -> None:
    assert dir(module) == sorted(module.__all__)


def _resolve(path: str) -> object:
    found: object = af
    for name in path.split(".")[1:]:
        found = getattr(found, name)
    return found


def test_every_hint_names_an_existing_function() -> None:
    for name in FUNCTIONS:
        for path in re.findall(r"\baf\.[\w.]*\w", in_place_of(name) or ""):
            _resolve(path)
    for module, hints in _ADVICE.items():
        for name, advice in hints.items():
            there = getattr(MODULES[module], name, None)
            assert there is None or isinstance(there, ModuleType), f"{module}.{name} is there: no hint is needed"
            for path in re.findall(r"\baf\.[\w.]*\w", advice):
                _resolve(path)


X, Y, MASK = (
    np.array([[0.5, 0.0, 2.0], [3.0, -1.0, 0.25]]),
    np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 7.0]]),
    np.eye(2, 3) > 0,
)
SQUARE = X @ Y.T
SAID: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "append": (lambda: np.append(X[0], Y[0]), {"x": X[0], "y": Y[0]}),
    "argwhere": (lambda: np.argwhere(X), {"x": X}),
    "average": (lambda: np.average(X), {"x": X}),
    "column_stack": (lambda: np.column_stack([X, Y]), {"xs": [X, Y]}),
    "eigvals": (lambda: np.linalg.eigvalsh(X @ X.T), {"x": X @ X.T}),
    "fft2": (lambda: np.fft.fft2(X), {"x": X}),
    "flatten": (X.flatten, {"x": X}),
    "hstack": (lambda: np.hstack([X, Y]), {"xs": [X, Y]}),
    "inner": (lambda: np.inner(X[0], Y[0]), {"x": X[0], "y": Y[0]}),
    "inverse": (lambda: np.linalg.inv(SQUARE), {"x": SQUARE}),
    "irfft2": (lambda: np.fft.irfft2(X), {"x": X}),
    "isin": (lambda: np.isin(X, [0.5, 3.0]), {"x": X, "values": np.array([0.5, 3.0])}),
    "lstsq": (lambda: np.linalg.lstsq(X, Y, rcond=None)[0], {"a": X, "b": Y}),
    "masked_fill": (lambda: np.where(MASK, 9.0, X), {"x": X, "mask": MASK, "value": 9.0}),
    "median": (lambda: np.median(X), {"x": X}),
    "norm": (lambda: np.linalg.norm(X), {"x": X}),
    "percentile": (lambda: np.percentile(X, 30.0), {"x": X, "percent": 30.0}),
    "put": (lambda: np.concat([Y[:1], X[1:]]), {"x": X, "key": 0, "values": Y[0]}),
    "ravel": (X.ravel, {"x": X}),
    "transpose": (lambda: X.T, {"x": X, "axes": (1, 0)}),
    "vstack": (lambda: np.vstack([X, Y]), {"xs": [X, Y]}),
}


@pytest.mark.parametrize("name", SAID)
async def test_hints_compute_the_named_function(name: str) -> None:
    expected, given = SAID[name]
    hint = _ADVICE["asyncflow"].get(name) or in_place_of(name, "(x)") or ""
    first = re.split(r", or | or |, for | for ", hint)[0]
    with af.Graph() as graph:
        operands = {key: af.constant(value) if isinstance(value, np.ndarray) else value for key, value in given.items()}
        result = eval(first if "(" in first or " " in first else f"{first}(x)", {"af": af, **operands})
    async with af.Session(graph) as session:
        np.testing.assert_allclose(await session.run(result), expected(), atol=1e-12)


def test_what_differs_in_case_alone_comes_first() -> None:
    assert close_names("X", ["y", "x", "xs"]) == ["x"]
    assert close_names("LOSS", ["loss", "losses", "LOS"])[0] == "loss"
    assert close_names("q", ["x", "y"]) == []


async def test_a_feed_in_capitals_is_told_the_name() -> None:
    with af.Graph() as graph:
        x = af.placeholder("float64", (), name="x")
        y = x + 1.0
    async with af.Session(graph) as session:
        with pytest.raises(af.FeedError, match="no node is named 'X'; did you mean 'x'"):
            await session.run(y, {"X": 1.0})
