"""Fixtures of the tests for a card, and the choice of tests that need one.

Without a card they run on the stand-in for CuPy. Tests marked `needs` are then deselected and listed. With
``ASYNCFLOW_REQUIRE_GPU=1`` nothing is left out: a missing tool is a failure, unless ``ASYNCFLOW_WITHOUT`` names it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from asyncflow.devices.cuda.backend import cuda_backend
from tests.gpu.card import Card, card_is_there, opened_card
from tests.gpu.figures import Figures

HERE = Path(__file__).parent

IS_THERE: dict[str, Callable[[], bool]] = {
    "card": card_is_there,
    "torch": lambda: importlib.util.find_spec("torch") is not None,
    "jax": lambda: importlib.util.find_spec("jax") is not None,
    "cuda-bindings": lambda: importlib.util.find_spec("cuda") is not None,
    "compute-sanitizer": lambda: shutil.which("compute-sanitizer") is not None,
}
"""Tools that a test may need, and checks if they are there."""

_left_out: list[str] = []


def is_required() -> bool:
    return os.environ.get("ASYNCFLOW_REQUIRE_GPU", "") not in ("", "0")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*what): cannot run on the stand-in for CuPy; see tests/gpu/conftest.py")
    config.addinivalue_line("markers", "slow: takes more than a quarter of a second")


def _missing(item: pytest.Item) -> list[str]:
    """Return the missing needs of a test; with a card required, the needs that were to be left out."""
    needed = [what for mark in item.iter_markers("needs") for what in mark.args]
    given_up = os.environ.get("ASYNCFLOW_WITHOUT", "").split(",")
    return [what for what in needed if (what in given_up if is_required() else not IS_THERE[what]())]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.parent == HERE]
    if card_is_there():
        for item in ours:
            item.add_marker(pytest.mark.filterwarnings("error::cupy._util.PerformanceWarning"))
    missing = {item: _missing(item) for item in ours}
    deselected = [item for item, what in missing.items() if what]
    for item in deselected:
        item.user_properties.append(("missing", missing[item]))
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if not missing.get(item)]
        # A line for each, at the end.
        _left_out[:] = [f"{item.name} (needs {', '.join(missing[item])})" for item in deselected]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        terminalreporter.section("tests/gpu: not run here")
        for line in _left_out:
            terminalreporter.line(line)


@pytest.fixture
def card(request: pytest.FixtureRequest) -> Iterator[Card]:
    """The card, or the stand-in."""
    if is_required() and not card_is_there():
        pytest.fail(f"ASYNCFLOW_REQUIRE_GPU is set, and there is no usable card: {cuda_backend().reason}")
    for mark in request.node.iter_markers("needs"):
        for what in mark.args:
            assert IS_THERE[what](), f"{what} is not here; leave it out on purpose with ASYNCFLOW_WITHOUT={what}"
    with opened_card(seed=crc32(request.node.nodeid.encode())) as opened:
        yield opened


@pytest.fixture
def figures(request: pytest.FixtureRequest, card: Card) -> Iterator[Figures]:
    """Figures that the test measured; on a card its limits hold."""
    measured = Figures(is_real=card.is_real)
    yield measured
    # As plain values, which go from process to process when tests are spread over several.
    properties: list[tuple[str, Any]] = request.node.user_properties
    properties.append(("figures", json.loads(json.dumps(measured, default=float))))
    measured.check()


@pytest.fixture
def out() -> Path | None:
    """Folder for pictures and timelines; None: nowhere."""
    folder = os.environ.get("ASYNCFLOW_GPU_OUT")
    return Path(folder) if folder else None
