"""The example of a kind of device: a process over a pipe does what every device has to, and may die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices import kinds, register_kind
from asyncflow.errors import DeviceLostError
from asyncflow.streams.futures import resolve
from asyncflow.testing import check_device
from examples.remote_device.device import KIND, RemoteDevice, Timed
from tests.conftest import small_cards
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow  # a process imports the package first

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(autouse=True)
def _remote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_kinds", dict(kinds._kinds))
    register_kind(KIND)


@asynccontextmanager
async def opened(*names: str, **options: Any) -> AsyncIterator[tuple[af.Session, RemoteDevice]]:
    async with af.Session(devices=names or ("remote:0",), **options) as session:
        device = session.devices[0]
        assert isinstance(device, RemoteDevice)
        yield session, device


async def died(device: RemoteDevice) -> None:
    """Return once its process is gone."""
    assert device.process is not None
    device.process.kill()
    await asyncio.to_thread(device.process.wait, PATIENCE_S)


def listen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The verbs of the messages that are sent from here on."""
    told: list[str] = []
    tell = RemoteDevice.tell

    def overheard(device: RemoteDevice, timed: Timed | None, verb: str, *arguments: object) -> None:
        tell(device, timed, verb, *arguments)
        told.append(verb)

    monkeypatch.setattr(RemoteDevice, "tell", overheard)
    return told


def test_it_does_what_every_device_has_to() -> None:
    check_device("remote")


async def test_kernels_run_in_the_process(graph: af.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    told = listen(monkeypatch)
    x = af.placeholder("float32", (2, 3))
    y = af.sum(x @ af.permute_dims(x, (1, 0)), axis=0)
    async with opened() as (session, device):
        for _ in range(2):
            np.testing.assert_array_equal(await session.run(y, {x: X}), (X @ X.T).sum(axis=0))
        assert device.memory.used == 0
    kernels = ["bind", "call"]
    assert told[0] == "put"
    assert sorted(told) == sorted([*kernels * 3, *["call"] * 3, "put", "put"])


async def test_a_kernels_error_comes_with_what_depends_on_it(graph: af.Graph) -> None:
    x, i = af.placeholder("float32", (2, 3)), af.placeholder("int64", (2,))
    picked = af.take(x, i, axis=0)
    y = picked * 2.0
    good = x + 1.0
    async with opened() as (session, _):
        with pytest.raises(af.KernelError, match="out of bounds") as caught:
            await session.run(y, {x: X, i: np.array([0, 7])})
        cause = caught.value.__cause__
        assert isinstance(cause, IndexError)
        assert cause.__notes__ == [f"raised by {picked.node.name}, in the process of the device"]
        np.testing.assert_array_equal(await session.run(good, {x: X}), X + 1)


async def test_a_death_between_runs(graph: af.Graph) -> None:
    x = af.placeholder("float32", (2, 3))
    y = x * 2.0
    async with asyncio.timeout(PATIENCE_S), opened() as (session, device):
        await session.run(y, {x: X})
        await died(device)
        for _ in range(2):
            with pytest.raises(DeviceLostError, match=r"remote:0 is lost: its process ended with code -9 \("):
                await session.run(y, {x: X})
    async with opened() as (session, _):
        np.testing.assert_array_equal(await session.run(y, {x: X}), X * 2)


async def test_a_death_in_a_run(graph: af.Graph) -> None:
    x = af.placeholder("float32", (2, 3))
    (endless,) = af.while_loop(lambda t: af.sum(t) > -1.0, lambda t: af.abs(af.sin(t)), (x,))
    async with asyncio.timeout(PATIENCE_S), opened() as (session, device):
        runs = [asyncio.ensure_future(session.run(endless, {x: X})) for _ in range(2)]
        reached: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        device.ask(partial(resolve, reached), None, "wait")
        await reached
        await died(device)
        for run in runs:
            with pytest.raises(DeviceLostError, match="and with it all values that it had; open another session"):
                await run


async def test_cards_and_processes_exchange_values(graph: af.Graph) -> None:
    x = af.placeholder("float32", (2, 3))
    with af.device("remote:0"):
        y = x * 2.0
    with af.device("cuda:0"):
        y = y + 1.0
    with af.device("remote:1"):
        y = y * 3.0
    with small_cards(0):
        async with opened("remote:0", "cuda:0", "remote:1", "cpu:0") as (session, _):
            np.testing.assert_array_equal(await session.run(y, {x: X}), (X * 2 + 1) * 3)
