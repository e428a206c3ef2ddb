"""Names that other libraries have are refused with a hint, and `dir()` shows what is public."""

from __future__ import annotations

from types import ModuleType

import pytest

import asyncflow as af
import asyncflow.testing
from asyncflow.foreign_names import _ADVICE, FUNCTIONS, close_names

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


def test_every_hint_names_what_is_there() -> None:
    assert {name for name in FUNCTIONS.values() if not hasattr(af, name)} == set()
    for module, hints in _ADVICE.items():
        for name, advice in hints.items():
            there = getattr(MODULES[module], name, None)
            assert there is None or isinstance(there, ModuleType), f"{module}.{name} is there: no hint is needed"
            for word in advice.replace("(", " ").replace(",", " ").replace(":", " ").split():
                if word.startswith("af."):
                    *rooms, last = word.rstrip(";").split(".")[1:]
                    home = MODULES[".".join(["asyncflow", *rooms])]
                    assert hasattr(home, last), f"{module}.{name}: {advice}"


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
