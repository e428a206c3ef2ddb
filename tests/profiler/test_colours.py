"""Families of firings have colours that a reader can tell apart."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from asyncflow.profiler.colours import (
    CONTROL_FLOW,
    CONTROL_FLOW_COLOUR,
    OTHERS_COLOUR,
    PALETTE,
    family,
    family_colours,
)
from asyncflow.runtime.watch.trace import Firing

INK, FAILED = "#141922", "#dc3d43"
SEEN = {
    "by most": np.eye(3),
    "without green": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "without red": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
}
"""Linear RGB as seen with deficiencies (Machado 2009, severity 1)."""
LEAST = {"by most": 0.12, "without green": 0.05, "without red": 0.05}
"""Least distance in Oklab; 0.02 is just noticeable side by side."""
CONES = np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]])
OKLAB = np.array([[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]])


def linear(colour: str) -> np.ndarray:
    value = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(first: str, second: str) -> float:
    one, other = (float(linear(colour) @ [0.2126, 0.7152, 0.0722]) + 0.05 for colour in (first, second))
    return max(one, other) / min(one, other)


@pytest.mark.parametrize("eye", SEEN)
def test_colours_are_told_apart(eye: str) -> None:
    lab = {colour: OKLAB @ np.cbrt(CONES @ np.clip(SEEN[eye] @ linear(colour), 0, 1)) for colour in PALETTE}
    near = [
        (one, other, distance)
        for one, other in combinations(PALETTE, 2)
        if (distance := np.linalg.norm(lab[one] - lab[other])) < LEAST[eye]
    ]
    assert near == []


def test_names_are_read_on_every_colour() -> None:
    assert [colour for colour in (*PALETTE, OTHERS_COLOUR) if contrast(colour, INK) < 4.5] == []
    assert FAILED not in PALETTE


def firings(*names: str) -> list[Firing]:
    """Firings of ops with these names, each longer than the one behind it."""
    spans = range(len(names), 0, -1)
    return [
        Firing(0, name, name, "", "cpu:0", "inline", 0, 0, span, "", "ok", "")
        for name, span in zip(names, spans, strict=True)
    ]


def test_each_family_has_a_colour_of_its_own_and_the_shortest_share_one() -> None:
    names = [f"op_{k}" for k in range(len(PALETTE) + 3)]
    colours = family_colours(firings("Switch", *names))
    assert list(colours) == [CONTROL_FLOW, *names]
    assert sorted(colours[name] for name in names[: len(PALETTE)]) == sorted(PALETTE)
    assert {colours[name] for name in names[len(PALETTE) :]} == {OTHERS_COLOUR}
    assert colours[CONTROL_FLOW] == CONTROL_FLOW_COLOUR


def test_an_op_has_the_same_colour_on_two_pages() -> None:
    assert family_colours(firings("matmul", "add"))["matmul"] == family_colours(firings("tanh", "matmul"))["matmul"]


def test_what_ran_as_a_whole_goes_by_its_name() -> None:
    assert [family("encoder", "loop"), family("a, b", "region"), family("x/add", "add")] == ["encoder", "a, b", "add"]
    assert family("while/merge_1", "Merge") == CONTROL_FLOW
