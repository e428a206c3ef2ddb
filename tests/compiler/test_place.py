"""Choosing the device of a run."""

from __future__ import annotations

from typing import Any

import pytest

import asyncflow as af


async def placed_on(devices: list[str] | None, *requests: str | None) -> str:
    """The device that runs one node per request."""
    with af.Graph():
        total: Any = af.placeholder("float32", ())
        x = total
        for request in requests:
            with af.device(request):
                total = total + 1
    async with af.Session(devices=devices) as session:
        assert await session.run(total, {x: 0.0}) == len(requests)
        return session.plan(total, [x]).partitions[0].device


@pytest.mark.parametrize(
    ("devices", "requests", "expected"),
    [
        (None, (None,), "cpu:0"),
        (["cpu:0", "cpu:1"], (None,), "cpu:0"),
        (["cpu:0", "cpu:1"], ("cpu",), "cpu:0"),
        (["cpu:0", "cpu:1"], ("cpu:1",), "cpu:1"),
        (["cpu:0", "cpu:1"], (None, "cpu", "cpu:1"), "cpu:1"),
        (["cpu:3"], (None, "cpu:3"), "cpu:3"),
    ],
)
async def test_first_device_that_fits_every_request(
    devices: list[str] | None, requests: tuple[str | None, ...], expected: str
) -> None:
    assert await placed_on(devices, *requests) == expected


async def test_no_device_fits_a_request() -> None:
    with pytest.raises(
        af.PlacementError, match=r"no device fits 'cuda': this session has cpu:0[^$]*test_place\.py:\d+"
    ):
        await placed_on(None, "cuda")


async def test_requests_that_no_one_device_fits() -> None:
    with pytest.raises(af.PlacementError, match=r"one run uses one device[^$]*'cpu:0'[^$]*'cpu:1'"):
        await placed_on(["cpu:0", "cpu:1"], "cpu:0", "cpu:1")


async def test_request_inside_a_body_counts() -> None:
    with af.Graph():

        def body(i: af.Tensor) -> af.Tensor:
            with af.device("cpu:1"):
                return i + 1

        last = af.while_loop(lambda i: i < 3, body, 0)
    async with af.Session(devices=["cpu:0", "cpu:1"]) as session:
        assert await session.run(last) == 3
        assert session.plan(last).partitions[0].device == "cpu:1"
