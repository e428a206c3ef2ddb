"""The calls of CUDA that runs make, stage by stage: ``python -m benchmarks.card_run``."""

from __future__ import annotations

from typing import Final

import pytest

from benchmarks.card_run import COLUMNS, NAMES, PROGRAMS, REST, Stages, main, measure, table

MOST: Final = {
    "small": (225, 2, 1, 0, 1),
    "256 KiB": (265, 2, 3, 2, 2),
    "nothing fed": (192, 1, 1, 0, 1),
    "one graph": (275, 2, 1, 0, 1),
    "two cards": (395, 2, 3, 2, 1),
}
"""Most functions of a run, with the checks of the tests at its end; its copies, and records of events, waits of streams
and flags. How often the loop looks for ends, in the stage "tickets", depends on the machine, so its functions do not
count. Before small values were copied on the stream of their kernels, a small run made 282 functions in all, 2, 5, 3
and 3 calls, and two cards 502, 2, 10, 6 and 5. None may grow again unnoticed.
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_run_asks_no_more_of_cuda_than_it_did(name: str) -> None:
    stages = measure(PROGRAMS[name])
    calls = [sum(stages.counts[stage, column] for stage in NAMES) for column in COLUMNS[1:5]]
    functions = sum(stages.counts[stage, "functions"] for stage in NAMES if stage != "tickets")
    most, *expected = MOST[name]
    assert calls == expected, "fewer calls are news for the changelog"
    assert functions <= most


def test_functions_count_in_the_innermost_stage() -> None:
    """A feed whose copy is under way begins the scheduling, which launches the kernels."""
    stages = measure(PROGRAMS["small"])
    assert stages.counts["feeds", "copies"] == stages.counts["fetches", "copies"] == 1
    assert stages.counts["kernels", "arrays"] == 2 and stages.counts["end of the run", "records"] == 0
    assert min(stages.counts[stage, "functions"] for stage in NAMES) > 0


def test_the_table_adds_the_stages_up() -> None:
    stages = Stages()
    stages.counts.update({("feeds", "functions"): 3, (REST, "functions"): 4, ("feeds", "copies"): 1})
    lines = table("small", stages).splitlines()
    assert lines[1].split() == ["feeds", "3", "1", *5 * ["-"]]
    assert lines[-1].split() == ["all", "7", "1", *5 * ["-"]]


def test_one_program_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing fed"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("nothing fed ") and out.count("\n") == len(NAMES) + 2
