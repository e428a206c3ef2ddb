"""Costs of the host: programs are run, counted and explained. Times on the stand-in say nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asyncflow.devices.figures.host import COSTS
from benchmarks import host_costs
from tests.fake_cupy.stand_in import stand_in

if TYPE_CHECKING:
    from benchmarks.host_costs import Measured


def test_costs_are_found_from_what_programs_take() -> None:
    """Also where a program keeps the host busy with several things; what no program does costs nothing."""
    costs = {"launch_s": 5e-6, "copy_s": 2e-5, "region_s": 1e-5}
    counts = ({"launch": 10}, {"launch": 30, "copy": 2}, {"region": 4, "copy": 1}, {"launch": 1, "region": 9})
    measured: list[Measured] = [
        host_costs.Measured("made up", calls, sum(costs[f"{call}_s"] * n for call, n in calls.items()))  # type: ignore[arg-type]
        for calls in counts
    ]
    found = host_costs.fitted(measured)
    assert {name: cost for name, cost in found.items() if cost} == pytest.approx(costs)
    assert set(found) == set(COSTS)
    text = host_costs.format_costs(measured, "a card")
    assert "launch_s=5e-06," in text.replace("5e-6", "5e-06") and "explain 100%" in text


@pytest.mark.slow
def test_programs_match_their_descriptions() -> None:
    with stand_in(devices=1, nbytes=1 << 22):
        measured = host_costs.measure(batch_s=0.0, batches=1, sizes=(2, 4))
    assert {call for each in measured for call in each.calls} == {name[:-2] for name in COSTS}
    assert all(each.seconds > 0 for each in measured)


def test_without_a_card_there_is_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert host_costs.main() == 2
    assert "what launching costs is measured on a card" in capsys.readouterr().out
