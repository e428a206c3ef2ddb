"""The faults of `make mutants` can still be put into the code, and each was found when they last were."""

from __future__ import annotations

import ast

import pytest

from tests.cells import ALWAYS
from tests.mutants import BEGIN, END, FAULTS, PAGE, ROOT, Fault, table


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_one_line_and_there_are_tests_that_look_for_it(fault: Fault) -> None:
    text = (ROOT / "asyncflow" / fault.module).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1
    changed = text.replace(fault.old, fault.new)
    assert sum(old != new for old, new in zip(text.split("\n"), changed.split("\n"), strict=True)) == 1
    ast.parse(changed)
    tests = (ROOT / fault.path).read_text(encoding="utf-8")
    assert all(f"def {name}" in tests for name in fault.chosen.split(" or "))


def test_each_room_has_a_fault() -> None:
    rooms = {path.parent.name for path in (ROOT / "asyncflow").glob("*/__init__.py")}
    assert rooms == {fault.module.partition("/")[0] for fault in FAULTS}


def test_the_page_tells_of_all_faults_and_cells_and_each_fault_is_found() -> None:
    written = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    rows = [[mark.strip() == "found" for mark in line.split("|")[3:-1]] for line in written.split("\n")[2:]]
    assert written == table(rows).strip()
    assert len(rows) == len(FAULTS)
    assert all(any(row) for row in rows)
    assert all(any(column) for column in zip(*rows, strict=True))
    assert {len(row) for row in rows} == {len(ALWAYS)}
