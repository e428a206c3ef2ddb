"""The digits example, on shapes that are drawn here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import asyncflow as af
from examples import digits

pytestmark = pytest.mark.slow


def drawn(each: int) -> digits.Digits:
    """Return ten shapes of random pixels, with a little noise."""
    random = np.random.default_rng(1)
    labels = np.repeat(np.arange(10), each)
    images = (random.random((10, 1, 8, 8)) > 0.5)[labels] + random.normal(0, 0.1, (len(labels), 1, 8, 8))
    return digits.parted(images.astype(np.float32), labels)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> digits.Digits:
    found = drawn(each=40)
    monkeypatch.setattr(digits, "read_digits", lambda: found)
    monkeypatch.setattr(digits, "CHANNELS", (16, 32))
    monkeypatch.setattr(digits, "BATCH", 32)
    monkeypatch.setattr(digits, "moved", lambda images, random: images)
    return found


def test_a_fifth_of_each_digit_is_held_out() -> None:
    for part, count in ((drawn(each=15).held_out, 3), (drawn(each=15).train, 12)):
        np.testing.assert_array_equal(np.bincount(part[1]), [count] * 10)
        assert part[0].shape == (10 * count, 1, 8, 8)


def test_images_move_by_a_pixel_at_most() -> None:
    image = np.zeros((1, 1, 8, 8), np.float32)
    image[..., 3, 4] = 1
    found = digits.moved(np.repeat(image, 200, axis=0), np.random.default_rng(0))
    rows, columns = np.nonzero(found.sum(axis=(0, 1)))
    assert set(zip(rows.tolist(), columns.tolist(), strict=True)) == {(r, c) for r in (2, 3, 4) for c in (3, 4, 5)}
    np.testing.assert_array_equal(found.sum(axis=(1, 2, 3)), 1)


def test_it_learns_saves_and_draws(shapes: digits.Digits, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--trainings", "2", "--epochs", "8", "--output", str(tmp_path)]
    assert digits.main([*arguments, "--target", "95"]) == 0
    printed = capsys.readouterr().out
    assert "320 digits to learn from, 80 held out" in printed
    assert "PASS" in printed
    picture = ElementTree.parse(tmp_path / "digits.svg").getroot()
    counts = [text.text or "" for text in picture.iter("{http://www.w3.org/2000/svg}text")][1:-20]
    assert sum(map(int, counts)) == 2 * 80

    async def read() -> np.ndarray:
        network = digits.new_network((1, 8, 8), seed=7)
        async with af.Session(network.graph, restore=str(tmp_path / "digits")) as session:
            images = shapes.held_out[0]
            found: np.ndarray = await session.run(network.found, {network.images: images})
            alone = [await session.run(network.found, {network.images: images[row : row + 1]}) for row in range(20)]
            np.testing.assert_array_equal(np.concatenate(alone), found[:20])  # no statistics of the batch
            return found

    assert np.mean(af.run(read()) == shapes.held_out[1]) > 0.9


@pytest.mark.usefixtures("shapes")
def test_it_says_so_if_it_learns_too_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--trainings", "1", "--epochs", "1", "--target", "101", "--output", str(tmp_path)]
    assert digits.main(arguments) == 1
    assert "FAIL" in capsys.readouterr().out


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install scikit-learn"):
        digits.read_digits()
