from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncflow.devices import SimMachine, available_devices, current_machine, open_devices, use_machine
from asyncflow.devices.cuda.backend import _probe
from asyncflow.devices.machine import hardware
from asyncflow.errors import PlacementError
from asyncflow.foreign_names import install
from asyncflow.streams.virtual import VirtualClockLoop
from tests.devices.sim_machines import CARD, machine_of


def test_the_default_is_one_cpu() -> None:
    (device,) = open_devices()
    assert (device.name, device.kind, device.memory.limit) == ("cpu:0", "cpu", None)


def test_devices_come_in_the_order_named_and_share_nothing() -> None:
    devices = open_devices(["cpu:3", "cpu"], memory_limit=1 << 20)
    assert [device.name for device in devices] == ["cpu:3", "cpu:0"]
    assert [device.memory.limit for device in devices] == [1 << 20] * 2
    assert devices[0].compute is not devices[1].compute and devices[0].memory is not devices[1].memory


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["cpu:0", "cpu"], "device cpu:0 is named 2 times in devices="),
        (["cuda:0"], "device cuda:0: CUDA is off on this machine: .*; available are logical CPU devices"),
        (["cuda"], "device cuda:0: CUDA is off"),
        (
            ["sim:1"],
            "device sim:1: simulated devices exist on virtual time only; open the session inside "
            r"asyncflow.testing.virtual_clock\(\); available are logical CPU devices",
        ),
        (["tpu:0"], "unknown kind of device in 'tpu:0'"),
        ([], "devices= is empty and a session needs one"),
        ("cpu:0", r"devices= is a list of names, not one str; say devices=\['cpu:0'\]"),
        (2, r"devices= is a list of names, such as \['cpu:0', 'cpu:1'\]; got int 2"),
    ],
)
def test_devices_that_cannot_be_had(specs: list[str], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        open_devices(specs)


@pytest.fixture
def machine() -> Iterator[SimMachine]:
    loop = VirtualClockLoop()
    with use_machine(machine_of(loop, 3)) as made:
        yield made
    loop.close()


def test_streams_of_kernels_are_passed_on() -> None:
    assert [len(device.compute_streams) for device in open_devices(["cpu:0", "cpu:1"], compute_streams=2)] == [2, 2]


@pytest.mark.usefixtures("machine")
def test_on_virtual_time_all_devices_are_simulated() -> None:
    assert [device.name for device in open_devices()] == ["sim:0", "sim:1", "sim:2"]
    devices = open_devices(["sim:2", "cpu:7", "sim"], memory_limit=1 << 20, compute_streams=3)
    assert [(device.name, device.kind) for device in devices] == [("sim:2", "sim"), ("cpu:7", "cpu"), ("sim:0", "sim")]
    assert all(device.asynchronous is device and device.memory.limit == 1 << 20 for device in devices)
    assert [len(device.compute_streams) for device in devices] == [3, 3, 3]
    card, cpu = open_devices(["sim:1", "cpu"])
    assert (card.memory.limit, cpu.memory.limit) == (CARD.memory_bytes, None)


@pytest.mark.usefixtures("machine")
def test_sessions_have_devices_of_their_own() -> None:
    (one,), (other,) = open_devices(["sim:0"]), open_devices(["sim:0"])
    assert one.compute is not other.compute and one.memory is not other.memory


@pytest.mark.usefixtures("machine")
def test_a_card_that_the_machine_has_not() -> None:
    message = (
        "device sim:3: the simulated machine has 3 cards, sim:0 to sim:2; name one of them, or give "
        r'virtual_clock\(\) a machine with more, such as "4 x round"'
    )
    with pytest.raises(PlacementError, match=message):
        open_devices(["sim:3"])
    with pytest.raises(PlacementError, match="device cuda:0: there are no real cards on virtual time"):
        open_devices(["cuda"])


def test_a_machine_is_used_inside_only(machine: SimMachine) -> None:
    assert current_machine() is machine
    inner = machine_of(machine.loop, 1)
    with use_machine(inner):
        assert current_machine() is inner
        with pytest.raises(PlacementError, match="has 1 card, sim:0;"):
            open_devices(["sim:1"])
    assert current_machine() is machine


def test_the_machine_is_described() -> None:
    cpu, cuda = available_devices()
    assert (cpu.name, cpu.available) == ("cpu:0", True)
    assert f"{hardware.usable_cores()} cores" in cpu.detail and hardware.processor() in cpu.detail
    assert (cuda.name, cuda.available) == ("cuda", False)


def test_why_cuda_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _probe.cache_clear()
    try:
        detail = available_devices()[1].detail
        assert detail.startswith(f"off: no NVIDIA driver found; cupy is not installed ({install('cuda13')}")
        _probe.cache_clear()
        monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: True)
        assert "no NVIDIA driver" not in available_devices()[1].detail
    finally:
        _probe.cache_clear()
