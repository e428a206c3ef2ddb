"""Types that say something: how often `Any` stands in each room, and that no public signature has it."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_overloads

import pytest

import asyncflow as af
from tests.packaging.test_exports import MODULES

PACKAGE = Path(af.__file__).parent

MOST = {
    "autodiff": 3,
    "cli": 15,
    "compiler": 34,
    "control": 15,
    "devices": 44,
    "errors.py": 2,
    "graph": 57,  # nodes that outlive their graph: `home.py`
    "nn": 2,
    "ops": 35,  # results of the users, recorded and in rows
    "pickling.py": 6,
    "profiler": 6,
    "runtime": 29,
    "state": 18,
    "streams": 8,
    "testing": 4,
    "values.py": 6,
}
"""Most uses of `Any` in a room; lower the number if there are fewer. Other rooms have none."""

NAMES_OF_ANY = {"Cupy", "CupyArray", "Grad", "Index", "Mark", "Nest", "Placed", "Raw", "TorchTensor", "Weight"}
"""Aliases of `Any`: a comment beside each says its meaning. More would hide what this counts."""


def test_no_room_says_any_more_often_than_it_did() -> None:
    found = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        found[room] += len(re.findall(r"\bAny\b", path.read_text(encoding="utf-8")))
    print(f"Any stands {found.total()} times in the package; {sum(MOST.values())} are allowed")
    assert {room: count for room, count in found.items() if count > MOST.get(room, 0)} == {}


def test_names_that_stand_for_any_are_few() -> None:
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        found.update(
            re.findall(r"^ *(\w+)(?:: TypeAlias)? = Any$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        )
    assert found == NAMES_OF_ANY


def signatures(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the annotations in a function, or in a class and its public methods: a name and the annotation."""
    if isinstance(value, type):
        yield from ((f"{name}.{field}", str(kind)) for field, kind in inspect.get_annotations(value).items())
        for member, inner in vars(value).items():
            if not member.startswith("_") or member in ("__call__", "__init__", "__getitem__"):
                yield from signatures(f"{name}.{member}", getattr(inner, "fget", getattr(inner, "__func__", inner)))
    elif inspect.isfunction(value):
        for each in (value, *get_overloads(value)):
            for parameter, kind in each.__annotations__.items():
                yield f"{name}({parameter})", str(kind)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_public_functions_say_their_types(module: ModuleType) -> None:
    """Functions made by other functions have types too: else `help` shows less of them, and the test below sees
    nothing.
    """
    functions = {name: value for name in module.__all__ if inspect.isfunction(value := getattr(module, name))}
    silent = [
        f"{name}({each})"
        for name, function in functions.items()
        for each in {*inspect.signature(function).parameters, "return"} - {*function.__annotations__}
    ]
    assert silent == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_no_public_signature_has_any(module: ModuleType) -> None:
    found = [
        f"{place}: {kind}"
        for name in module.__all__
        for place, kind in signatures(name, getattr(module, name))
        if re.search(r"\bAny\b", kind)
    ]
    assert found == []
