from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncflow.devices import CpuDevice, DeviceKind, DeviceOptions, kinds, register_kind
from asyncflow.devices.memory import MemoryAccount
from asyncflow.errors import PlacementError
from asyncflow.streams.cpu.stream import ThreadStream
from asyncflow.testing import check_device, device_checks, virtual_clock
from tests.conftest import small_cards


@pytest.mark.slow  # The devices below that break one promise keep all others.
def test_cpus() -> None:
    check_device("cpu")


@pytest.mark.parametrize("kind", ["sim", "cpu"])
def test_simulated_devices(kind: str) -> None:
    with virtual_clock("2 x v100") as clock:
        check_device(kind, run=clock.run)


@pytest.mark.slow
def test_cards() -> None:
    with small_cards(0):
        check_device("cuda")


def test_missing_parts_are_not_checked() -> None:
    with pytest.raises(PlacementError, match="device sim:0: simulated devices exist on virtual time only"):
        check_device("sim")


class Renamed(CpuDevice):
    """A CPU of another kind, to break."""

    def __init__(self, index: int, **options: Any) -> None:
        super().__init__(index, **options)
        self.kind = "odd"
        self.name = f"odd:{index}"


class Nameless(Renamed):
    def describe(self) -> str:
        return "a device"


class Free(Renamed):
    def kernel_ns(self, flops: float, nbytes: float) -> float:
        return 0.0


class Blind(MemoryAccount):
    def track(self, value: object, label: str = "") -> None:
        pass


class Careless(Renamed):
    """A device whose account has the limit, and refuses nothing."""

    def __init__(self, index: int, **options: Any) -> None:
        super().__init__(index, **options)
        self.memory = Blind(self.name, self.memory.limit)


class Open(Renamed):
    """A device with a stream that is never closed."""

    @property
    def streams(self) -> tuple[ThreadStream, ...]:
        return (*super().streams, ThreadStream("odd:0/more"))


class Odd(DeviceKind):
    name = "odd"

    def __init__(self, make: Callable[..., CpuDevice]) -> None:
        self._make = make

    def open(self, index: int, options: DeviceOptions) -> CpuDevice:
        return self._make(index, memory_limit=options.memory_limit)


@pytest.mark.parametrize(
    ("make", "promise", "message"),
    [
        (Nameless, "A device has its name", "a device"),
        (Free, "has costs for placement", ""),
        (Careless, "Memory is counted", "came where OutOfMemoryError should have been raised"),
        (Open, "A closed device holds nothing", "stream odd:0/more takes work although its session is closed"),
    ],
)
def test_a_promise_that_is_broken_is_named(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., CpuDevice], promise: str, message: str
) -> None:
    monkeypatch.setattr(kinds, "_kinds", dict(kinds._kinds))
    register_kind(Odd(make))
    with pytest.raises(ExceptionGroup, match="1 of 19 checks of devices of kind 'odd' failed") as caught:
        check_device("odd")
    (failure,) = caught.value.exceptions
    (note,) = failure.__notes__[-1:]
    assert note.startswith("check of devices of kind 'odd': ")
    assert promise in note
    assert message in str(failure)


def test_all_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs(_: object) -> None:
        """It ends."""
        raise TimeoutError

    async def holds(_: object) -> None:
        """It holds."""

    async def differs(_: object) -> None:
        """It is the same."""
        raise AssertionError

    monkeypatch.setattr(device_checks, "CHECKS", (hangs, holds, differs))
    with pytest.raises(ExceptionGroup, match="2 of 3 checks of devices of kind 'cpu' failed") as caught:
        check_device("cpu")
    assert [error.__notes__ for error in caught.value.exceptions] == [
        ["check of devices of kind 'cpu': It ends."],
        ["check of devices of kind 'cpu': It is the same."],
    ]


def test_every_check_says_what_should_be_so() -> None:
    assert all(check.__doc__ is not None and check.__doc__.endswith(".") for check in device_checks.CHECKS)
