"""Simulated figures beside figures of real runs: they are near, and the page has the table of the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncflow.devices.figures.presets import DEFAULT_HOST
from benchmarks import gpu_model
from benchmarks.gpu_model import FITTED, Row, Simulated

PAGE = (Path(__file__).parents[2] / "docs" / "gpu" / "README.md").read_text(encoding="utf-8").splitlines()

FAR = {"loop: five float32 scalar operations": "a fused kernel of numbers on the host counts as one step"}
"""Rows whose times the model misses by more than `NEAR`, and the reasons."""

NEAR = (0.55, 1.45)
"""Simulated to measured time. Repeats of one row in one run differ as much."""


@pytest.fixture(scope="module")
def found() -> list[tuple[Row, Simulated]]:
    return [(row, row.simulate()) for row in gpu_model.rows()]


@pytest.mark.slow
def test_simulated_times_are_near_the_measured_ones(found: list[tuple[Row, Simulated]]) -> None:
    """Behaviour 99."""
    ratios = {row.name: row.ratio(simulated) for row, simulated in found}
    assert {name for name, ratio in ratios.items() if not NEAR[0] < ratio < NEAR[1]} == set(FAR)
    near = [ratio for name, ratio in ratios.items() if name not in FAR]
    assert np.exp(np.mean(np.log(near))) == pytest.approx(1, abs=0.1), "the model is too fast or too slow as a whole"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _check_page(lines: list[str]) -> None:
    """Check that the page has these rows of a table, with simulated figures of two digits and more."""
    page = {_cells(line)[0]: _cells(line) for line in PAGE if line.startswith("| ")}
    for line in lines[2:]:
        (name, *cells), (_, *theirs) = _cells(line), page[_cells(line)[0]]
        for cell, other in zip(cells, theirs, strict=True):
            if cell != other:
                assert float(cell.replace(",", "")) == pytest.approx(float(other.replace(",", "")), rel=0.05), name


@pytest.mark.slow
def test_the_page_has_what_the_command_prints(found: list[tuple[Row, Simulated]]) -> None:
    """Behaviour 114."""
    _check_page(gpu_model.table(found))


@pytest.mark.slow
def test_costs_of_the_presets_explain_the_rows(found: list[tuple[Row, Simulated]]) -> None:
    """To half as much again: costs of which few rows tell follow the noise of these."""
    costs = gpu_model.fitted([each for each in found if each[0].name not in FAR])
    assert set(costs) == set(FITTED)
    for call, seconds in costs.items():
        assert seconds == pytest.approx(DEFAULT_HOST.cost_s(call), rel=0.5), call


def test_costs_are_found_from_made_up_rows() -> None:
    """The rows are of a host that takes twice as long for launches, and half as long for products."""
    launch_s, product_s = DEFAULT_HOST.launch_s, DEFAULT_HOST.product_s
    rows = []
    for launches, products in ((100, 0), (0, 100), (50, 50), (10, 90)):
        measured = 2 * launches * launch_s + products * product_s / 2
        now = Simulated(launches * launch_s + products * product_s, {"launch": launches, "product": products})
        row = Row(name="", unit="s", measured=(measured,), program=lambda now=now: now, scale=1.0)  # type: ignore[misc]
        rows.append((row, now))
    costs = gpu_model.fitted(rows)
    assert costs["launch"] == pytest.approx(2 * launch_s, rel=0.1)
    assert costs["product"] == pytest.approx(product_s / 2, rel=0.1)
    assert costs["run"] == pytest.approx(DEFAULT_HOST.run_s)


def test_calls_of_then_take_the_place_of_todays() -> None:
    now = Simulated(1.0, {"launch": 5, "view": 1})
    then = now.as_then({"launch": 15, "library": 2})
    assert then.calls == {"launch": 15, "view": 1, "library": 2}
    assert then.seconds == pytest.approx(1 + 10 * DEFAULT_HOST.launch_s + 2 * DEFAULT_HOST.library_s)


def test_a_rate_is_the_inverse_of_a_time() -> None:
    row = Row(name="", unit="", measured=(50.0, 150.0), program=lambda: Simulated(2.0, {}), scale=200.0, is_rate=True)
    assert (row.seconds, row.figure(2.0), row.ratio(row.simulate())) == (2.0, 100.0, 1.0)


def test_a_second_card_is_not_used_where_the_host_is_the_limit() -> None:
    """Behaviour 99: two cards are no slower than one for chains that the host launches more slowly than a card runs."""
    for size in (32, 512):
        one, two = (gpu_model.chains(size, cards) for cards in (1, 2))
        assert two <= one / 0.98


@pytest.mark.parametrize(("size", "gain"), [(1024, 1.3), (2048, 1.8)])
def test_a_second_card_takes_half_of_large_products(size: int, gain: float) -> None:
    one, two = (gpu_model.chains(size, cards) for cards in (1, 2))
    assert one / two >= gain


@pytest.mark.slow
def test_the_page_has_the_gain_of_a_second_card() -> None:
    """Behaviour 114."""
    _check_page(gpu_model.chain_table())
