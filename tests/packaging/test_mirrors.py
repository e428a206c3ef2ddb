"""Test files are found by the module they test: `devices/cuda/launch.py` by `tests/devices/test_cuda_launch.py`."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {path.name: path for folder in ("asyncflow", ".") for path in (ROOT / folder).iterdir() if path.is_dir()}
"""A folder of tests is named after one of these: a room, or a folder beside the package."""

WHOLE_BEHAVIOUR = {
    "conformance": "what programs give, whoever computes it",
    "distributed": "programs on several devices",
    "fake_cupy": "the stand-in for CuPy, whose modules stand beside its tests",
    "faults": "what is left after things go wrong",
    "gpu": "what only a card can show",
    "interop": "values of other libraries",
    "packaging": "the project itself",
    "peers": "what issues of other systems ask for",
    "property": "random programs",
    "scaling": "cost beside size",
    "typing": "what type checkers see",
}
"""Folders whose tests are about no module of their own, and their subjects."""

NO_MODULE = {
    "benchmarks/test_benchmarks.py": "runs all of them",
    "benchmarks/test_figures.py": "compares what they print with the pages",
    "examples/test_examples.py": "runs all of them",
    "ops/test_host_inputs.py": "asks all ops what their kernels read on the host",
}


def names(room: Path) -> set[str]:
    """Return the names that tests of a room's modules may have.

    A module in a folder of the room goes by its own name, or with its folders, or some of them, before it; not if
    several modules then have one name, of which none stands in the room itself.
    """
    found: Counter[str] = Counter()
    for path in room.rglob("*.py"):
        *folders, module = path.relative_to(room).with_suffix("").parts
        if module != "__init__":
            chosen = (few for count in range(len(folders) + 1) for few in combinations(folders, count))
            found.update("_".join((*few, module)) for few in chosen)
    return {name for name, count in found.items() if count == 1 or (room / f"{name}.py").exists()}


def mirrors(test: str, room: Path) -> bool:
    """Return True if a test file is named after a module, with words behind its name or without:
    `test_place_quality.py`.
    """
    words = test.removeprefix("test_").removesuffix(".py").split("_")
    return not names(room).isdisjoint("_".join(words[:count]) for count in range(1, len(words) + 1))


@pytest.mark.parametrize("folder", sorted(path.name for path in (ROOT / "tests").iterdir() if path.is_dir()))
def test_test_files_mirror_modules(folder: str) -> None:
    if folder in WHOLE_BEHAVIOUR or folder == "__pycache__":
        return
    tests = [path.name for path in (ROOT / "tests" / folder).rglob("test_*.py")]
    without = [test for test in tests if f"{folder}/{test}" not in NO_MODULE and not mirrors(test, ROOMS[folder])]
    assert not without, f"tests/{folder}: {without} mirror no module of {ROOMS[folder].relative_to(ROOT)}/, or several"


def test_reasons_are_for_files_that_are_there() -> None:
    assert [name for name in (*WHOLE_BEHAVIOUR, *NO_MODULE) if not (ROOT / "tests" / name).exists()] == []


def test_what_mirrors(tmp_path: Path) -> None:
    for name in ("memory", "place", "cuda/memory", "cuda/launch", "sim/launch", "cuda/deep/graph"):
        module = tmp_path / f"{name}.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.touch()
    good = ("memory", "memory_limits", "place", "cuda_launch", "cuda_deep_graph", "cuda_graph", "graph", "deep_graph")
    assert [name for name in good if not mirrors(f"test_{name}.py", tmp_path)] == []
    bad = ("launch", "launches", "cuda", "cuda_limits")
    assert [name for name in bad if mirrors(f"test_{name}.py", tmp_path)] == []
