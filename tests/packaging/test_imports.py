"""Imports for annotations count here, which import-linter leaves out: a reader follows these arrows, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Final, TypeAlias

import grimp
import pytest

Arrows: TypeAlias = Mapping[str, Iterable[str]]
"""The names that each name imports."""

FLOORS: Final = (
    *(("session",), ("gates",), ("shared",), ("run",), ("calls",), ("executor",)),
    *(("scheduler", "values", "watch"), ("lines",)),
)
"""Rooms of `asyncflow/runtime`, from top to bottom; rooms of one floor do not import one another."""

MOST_FILES: Final = 8
"""Files of the largest circle. A circle is one thing in several files, each of which is read with the others.

This number only shrinks."""

PARTS_IN_CIRCLES: Final = {
    "asyncflow.compiler": [2],
    "asyncflow.devices.cuda": [5],
    "asyncflow.graph": [8],
    "asyncflow.lift": [3],
    "asyncflow.ops": [10],
    "asyncflow.state": [3],
}
"""Number of members of each circle of folders and files of a room that contains a folder. These numbers only shrink.

Families of ops use the ops and the derivatives of one another; each file of a family is in no circle.
"""


@pytest.fixture(scope="module")
def imports() -> dict[str, frozenset[str]]:
    """The modules of the package that each module imports, for annotations too."""
    graph = grimp.build_graph("asyncflow", exclude_type_checking_imports=False, cache_dir=None)
    return {module: frozenset(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def circles(arrows: Arrows) -> list[list[str]]:
    """Return the sets of names from each of which arrows lead to each, the largest first."""
    left = {name: set(targets) for name, targets in arrows.items()}
    found: list[list[str]] = []
    while left:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as error:
            start = error.args[1][0]
        else:
            break
        back: dict[str, set[str]] = {name: set() for name in left}
        for name, targets in left.items():
            for target in targets & left.keys():
                back[target].add(name)
        circle = reached(left, start) & reached(back, start)
        found.append(sorted(circle))
        left = {name: targets - circle for name, targets in left.items() if name not in circle}
    return sorted(found, key=lambda circle: (-len(circle), circle))


def reached(arrows: Arrows, start: str) -> set[str]:
    """Return the names to which arrows lead from a name, that name included."""
    found, stack = {start}, [start]
    while stack:
        new = set(arrows.get(stack.pop(), ())) - found
        found |= new
        stack += new
    return found


def between_parts(imports: Arrows, room: str) -> dict[str, set[str]]:
    """Return the arrows between the folders and files of a room."""
    found: dict[str, set[str]] = {}
    for module, targets in imports.items():
        if module.startswith(f"{room}."):
            part = part_of(module, room)
            inside = {part_of(target, room) for target in targets if target.startswith(f"{room}.")}
            found.setdefault(part, set()).update(inside - {part})
    return found


def part_of(module: str, room: str) -> str:
    """Return the folder or file of a room that a module is in."""
    return f"{room}.{module.removeprefix(f'{room}.').partition('.')[0]}"


def test_each_floor_of_the_runtime_imports_only_the_floors_below(imports: Arrows) -> None:
    height = {f"asyncflow.runtime.{room}": -level for level, rooms in enumerate(FLOORS) for room in rooms}
    arrows = between_parts(imports, "asyncflow.runtime")
    assert set(arrows) == set(height)
    assert [(part, target) for part in arrows for target in arrows[part] if height[target] >= height[part]] == []


def test_no_circle_of_files_is_large(imports: Arrows) -> None:
    large = circles(imports)[0]
    assert len(large) == MOST_FILES, f"cut an arrow of this circle, or lower the number: {large}"


def test_rooms_do_not_import_one_another_in_circles(imports: Arrows) -> None:
    folders = {module.rpartition(".")[0] for module in imports}
    found: dict[str, list[int]] = {}
    for room in sorted(folders - {""}):
        sizes = [len(circle) for circle in circles(between_parts(imports, room)) if not folders.isdisjoint(circle)]
        if sizes:
            found[room] = sizes
    assert found == PARTS_IN_CIRCLES


def test_circles_are_found() -> None:
    arrows = {"a": "bc", "b": "a", "c": "d", "d": "ce", "e": "c", "f": "fa"}
    assert circles(arrows) == [["c", "d", "e"], ["a", "b"], ["f"]]


def test_arrows_between_parts() -> None:
    imports = {"x.a.one": ["x.b", "x.a.two", "y.z"], "x.b": ["x.a.two"], "x.a.two": [], "y.z": ["x.b"]}
    assert between_parts(imports, "x") == {"x.a": {"x.b"}, "x.b": {"x.a"}}
