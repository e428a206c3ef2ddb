from __future__ import annotations

import pytest

from asyncflow.devices import available_devices, hardware, open_devices
from asyncflow.errors import PlacementError


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
        (["cuda:0"], "device cuda:0: CUDA devices are not built into this version; run `asyncflow devices`"),
        (["cuda"], "device cuda:0: CUDA devices"),
        (["sim:1"], "device sim:1: sim devices are not built into this version; available are logical CPU devices"),
        (["tpu:0"], "unknown kind of device in 'tpu:0'"),
        ([], "devices= is empty and a session needs one"),
        ("cpu:0", r"devices= is a list of names, not one str; say devices=\['cpu:0'\]"),
    ],
)
def test_devices_that_cannot_be_had(specs: list[str], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        open_devices(specs)


def test_the_machine_is_described() -> None:
    cpu, cuda = available_devices()
    assert (cpu.name, cpu.available) == ("cpu:0", True)
    assert f"{hardware.usable_cores()} cores" in cpu.detail and hardware.processor() in cpu.detail
    assert (cuda.name, cuda.available) == ("cuda", False)


def test_why_cuda_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    detail = available_devices()[1].detail
    assert detail == "off: CUDA devices are not built into this version; no NVIDIA driver found; cupy is not installed"
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: True)
    assert "driver" not in available_devices()[1].detail
