"""The example of deep Q-learning: that it learns, that it is one program in all its forms, and what a step writes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from examples import dqn

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learns from the third step on, with a small network."""
    for name, value in {"HIDDEN": 4, "BATCH": 2, "ROWS": 50, "WARM_UP": 2, "COPY_EVERY": 5}.items():
        monkeypatch.setattr(dqn, name, value)


def test_learns_to_the_return_it_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example reaches a mean of 150 of 200 over 20 episodes, within 400 episodes, and writes the stated files."""
    assert dqn.main(["--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "PASS" in printed and str(tmp_path / "dqn.html") in printed
    assert (tmp_path / "dqn.html").stat().st_size > 10_000


def test_says_so_when_it_has_not_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str], small: None) -> None:
    assert dqn.main(["--episodes", "3", "--latency", "0", "--output", str(tmp_path)]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_the_pole_of_ops_is_that_of_numpy() -> None:
    rng = np.random.default_rng(0)
    with af.Graph() as graph:
        state, action = af.placeholder("float32", (4,)), af.placeholder("int64", ())
        answered = dqn.pole(state, action)

    async def both() -> None:
        async with af.Session(graph) as session:
            for _ in range(50):
                at, push = (rng.normal(size=4) * (1, 1, 0.1, 1)).astype("f4"), int(rng.integers(2))
                after, fallen = await session.run(answered, {state: at, action: push})
                expected, ends = dqn.answer(at, push)
                np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-6)
                assert fallen == ends

    af.run(both())


def test_an_episode_is_its_steps(small: None) -> None:
    """With regions and without, and with an environment that is awaited, the same seed plays the same games."""

    async def episodes(agent: dqn.Agent, **options: Any) -> list[int]:
        async with af.Session(agent.graph, **options) as session:
            return [int(await session.run(agent.episode)) for _ in range(6)]

    of_regions = af.run(episodes(dqn.new_agent()))
    assert len(of_regions) == 6 and all(8 <= each <= dqn.LONGEST for each in of_regions)
    assert af.run(episodes(dqn.new_agent(), regions=False)) == of_regions
    assert af.run(episodes(dqn.new_agent(dqn.awaited_pole(0.0)))) == of_regions


def test_a_run_a_step_learns_too(small: None) -> None:
    agent = dqn.new_agent()

    async def steps() -> list[tuple[int, bool]]:
        async with af.Session(agent.graph) as session:
            return [tuple(map(int, await session.run(agent.step))) for _ in range(60)]  # type: ignore[misc]

    counts = af.run(steps())
    for (count, ends), (following, _) in pairwise(counts):
        assert following == (1 if ends else count + 1)
    assert any(ends for _, ends in counts)


def test_python_drives_the_same(small: None) -> None:
    async def play() -> list[int]:
        async with dqn.Driver() as driver:
            return [await driver.episode() for _ in range(3)]

    assert all(8 <= each <= dqn.LONGEST for each in af.run(play()))
