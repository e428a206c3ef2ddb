from __future__ import annotations

import pytest

from asyncflow.devices import DeviceName, DeviceSpec
from asyncflow.errors import PlacementError


@pytest.mark.parametrize("text", ["cpu:0", "cuda:1", "sim:31"])
def test_full_names_round_trip(text: str) -> None:
    assert str(DeviceName.parse(text)) == str(DeviceSpec.parse(text)) == text


def test_names_sort_by_kind_and_number() -> None:
    names = [DeviceName.parse(text) for text in ("cuda:1", "cpu:10", "cpu:9")]
    assert [str(name) for name in sorted(names)] == ["cpu:9", "cpu:10", "cuda:1"]


@pytest.mark.parametrize(
    ("spec", "matching"),
    [("cpu", {"cpu:0", "cpu:1"}), ("cuda:1", {"cuda:1"}), ("sim", set())],
)
def test_a_partial_name_matches_the_devices_it_leaves_open(spec: str, matching: set[str]) -> None:
    assert {name for name in ("cpu:0", "cpu:1", "cuda:1") if DeviceSpec.parse(spec).matches(name)} == matching


@pytest.mark.parametrize("text", ["", "cpu:", ":0", "cpu:-1", "cpu:01", "cpu:x", "CPU:0", " cpu:0", "cpu:0\n", None, 0])
def test_wrong_names_are_refused_with_the_accepted_ones(text: object) -> None:
    with pytest.raises(PlacementError, match=r"is no device name; accepted are a kind \(cpu, cuda, sim\)"):
        DeviceSpec.parse(text)  # type: ignore[arg-type]


def test_an_unknown_kind_is_refused_with_a_suggestion() -> None:
    with pytest.raises(PlacementError, match=r"unknown kind of device in 'gpu:0', did you mean 'cuda'\?; accepted"):
        DeviceSpec.parse("gpu:0")
    with pytest.raises(PlacementError, match=r"in 'cudda', did you mean 'cuda'\?"):
        DeviceSpec.parse("cudda")
    with pytest.raises(PlacementError, match=r"unknown kind of device in 'quantum'; accepted"):
        DeviceSpec.parse("quantum")


def test_a_full_name_needs_its_index() -> None:
    with pytest.raises(PlacementError, match="'cuda' has no index where one device is meant; say 'cuda:0'"):
        DeviceName.parse("cuda")
