"""``python -m benchmarks.gpu_levers``: each part leaves its lines, whatever happens to the others."""

from __future__ import annotations

import asyncio
import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import gpu_levers
from benchmarks.gpu_levers import PARTS, Lever, Part, measure_all, table
from benchmarks.peers import NO_PEERS

if TYPE_CHECKING:
    from pathlib import Path


async def _found(run: Lever) -> None:
    run.note("figure", 2.5, case="a")


async def _broken(run: Lever) -> None:
    run.note("before", 1.0)
    raise ValueError("no such card")


async def _late(run: Lever) -> None:
    await asyncio.Event().wait()


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def test_a_part_that_fails_or_is_late_stops_no_other() -> None:
    measures = {"A": _broken, "B": _late, "C": _found}
    parts = [Part(name, 1, measure, "figure", "2", "all") for name, measure in measures.items()]
    file = io.StringIO()
    run = Lever(None, False, file, NO_PEERS)
    await measure_all(run, 0.0005, parts)
    lines = lines_of(file.getvalue())
    assert [(line["part"], line["status"]) for line in lines if line["name"] == "end"] == [
        ("A", "failed"),
        ("B", "late"),
        ("C", "done"),
    ]
    assert [line["error"] for line in lines if "error" in line] == ["ValueError: no such card"]
    assert {"part": "C", "name": "figure", "value": 2.5, "case": "a"} in lines
    assert [row.split()[:4] for row in table(run, parts).splitlines()[1:]] == [
        ["A", "figure", "2", "-"],
        ["B", "figure", "2", "-"],
        ["C", "figure", "2", "2.5"],
    ]


@pytest.mark.slow
def test_all_parts_run_on_the_stand_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_levers.main(["--minutes", "30", "--out", str(tmp_path)]) == 0
    lines = lines_of((tmp_path / "levers.jsonl").read_text(encoding="utf-8"))
    ends = {line["part"]: line for line in lines if line["name"] == "end"}
    assert list(ends) == [part.name for part in PARTS]
    assert {line["status"] for line in ends.values()} == {"done"}, ends
    assert {"part": "M7", "name": "LSTM training, equal to the bit", "value": 1.0} in lines
    printed = capsys.readouterr().out
    assert "stand-in" in printed
    assert all(part.decides in printed for part in PARTS)
