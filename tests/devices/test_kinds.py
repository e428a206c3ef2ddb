from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from asyncflow.devices import (
    Capabilities,
    CpuDevice,
    DeviceKind,
    DeviceOptions,
    DeviceSpec,
    LaunchingDevice,
    kinds,
    register_kind,
)
from asyncflow.devices.registry import available_devices, open_devices
from asyncflow.errors import PlacementError
from asyncflow.streams import ThreadStream
from asyncflow.testing import virtual_clock


class Toy(DeviceKind):
    name = "toy"
    opened: list[tuple[int, DeviceOptions]]

    def __init__(self) -> None:
        self.opened = []

    def open(self, index: int, options: DeviceOptions) -> CpuDevice:
        self.opened.append((index, options))
        return CpuDevice(index)

    def why_not(self, index: int) -> str | None:
        return None if index < 2 else "there are two of them"


OFFERED = Toy()


@pytest.fixture(autouse=True)
def no_kind_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_kinds", dict(kinds._kinds))


def offer(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    found = {name: EntryPoint(name, value, kinds.ENTRY_POINTS)}
    monkeypatch.setattr(kinds, "_offered", lambda: found)


def test_a_registered_kind_opens_its_devices_and_no_cpu_stands_in() -> None:
    with pytest.raises(PlacementError, match="unknown kind of device in 'toy:1'"):
        open_devices(["toy:1", "cpu:0"])
    toy = Toy()
    register_kind(toy)
    register_kind(toy)  # the same one again is no harm
    open_devices(["toy:1", "cpu:0", "toy"], memory_limit=1 << 20, compute_streams=2)
    options = DeviceOptions(memory_limit=1 << 20, compute_streams=2, sharing=2)
    assert toy.opened == [(1, options), (0, options)]
    assert DeviceSpec.parse("toy").matches("toy:1")
    assert [(line.name, line.available) for line in available_devices()][-1] == ("toy:0", True)


def test_a_device_that_lacks_something_is_not_made() -> None:
    class Incomplete(LaunchingDevice[ThreadStream]):
        def kernel_ns(self, flops: float, nbytes: float) -> float:
            return flops + nbytes

    with pytest.raises(TypeError, match=r"abstract.* bind.*constant.*feed.*mark.*throttle.*transfer_ns.*when_done"):
        Incomplete("toy", 0, Capabilities(), 1)  # type: ignore[abstract]


def test_a_device_that_a_kind_has_not_is_refused_with_its_reason() -> None:
    register_kind(Toy())
    with pytest.raises(PlacementError, match="device toy:2: there are two of them; available are logical CPU devices"):
        open_devices(["toy:2"])
    with virtual_clock(), pytest.raises(PlacementError, match="device toy:0: there are no real cards on virtual time"):
        open_devices(["toy:0"])


def test_an_unknown_kind_is_refused_with_all_that_there_are() -> None:
    register_kind(Toy())
    accepted = r"did you mean 'toy'\?; accepted are a kind \(cpu, cuda, sim, toy\) or"
    with pytest.raises(PlacementError, match=accepted):
        DeviceSpec.parse("toys:0")


@pytest.mark.parametrize("name", ["", "Toy", "toy1", "toy:0", None])
def test_names_that_no_kind_can_have(name: object) -> None:
    kind = Toy()
    kind.name = name  # type: ignore[assignment]
    with pytest.raises(ValueError, match="the name of a kind of device is of lower-case letters"):
        register_kind(kind)


def test_two_kinds_do_not_share_a_name() -> None:
    kind = Toy()
    kind.name = "cpu"
    with pytest.raises(ValueError, match="a kind of device named 'cpu' is registered already"):
        register_kind(kind)
    with pytest.raises(TypeError, match="an instance of a subclass of DeviceKind; got <class"):
        register_kind(Toy)  # type: ignore[arg-type]


def test_a_kind_of_another_package_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "toy", f"{__name__}:OFFERED")
    assert "toy" not in kinds._kinds
    open_devices(["toy:1"])
    assert OFFERED.opened == [(1, DeviceOptions())]


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("toy", "no_such_package:KIND", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("toy", f"{__name__}:Toy", "TypeError: a kind of device is an instance"),
        ("another", f"{__name__}:OFFERED", "ValueError: it is named 'toy'"),
    ],
)
def test_an_offer_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, name: str, value: str, cause: str) -> None:
    offer(monkeypatch, name, value)
    with pytest.raises(PlacementError, match=f"the kind of device '{name}', which the entry point .* cannot be used: "):
        open_devices([name])
    with pytest.raises(PlacementError, match=cause):
        open_devices([name])
