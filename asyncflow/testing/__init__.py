"""Run graphs on simulated devices: `virtual_clock`; test kinds of devices and ops: `check_device`, `check_op`.

`compare_sessions` finds the first node whose values differ between two sessions.

>>> import asyncflow as af
>>> from asyncflow.testing import virtual_clock
>>> async def main():
...     async with af.Session(devices=["sim:0", "sim:1"]) as session:
...         return [device.name for device in session.devices]
>>> with virtual_clock("2 x v100, nvlink2") as clock:
...     clock.run(main())
['sim:0', 'sim:1']
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.foreign_names import public_names
from asyncflow.testing.clock import VirtualClock, virtual_clock
from asyncflow.testing.device_checks import check_device
from asyncflow.testing.golden import compare_sessions
from asyncflow.testing.op_checks import check_op

__all__ = ["VirtualClock", "check_device", "check_op", "compare_sessions", "virtual_clock"]

if not TYPE_CHECKING:  # with `__getattr__`, every misspelt name would pass the type checker
    __getattr__, __dir__ = public_names("asyncflow.testing", __all__)
