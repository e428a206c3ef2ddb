from __future__ import annotations

import asyncio

import pytest

from asyncflow.streams.futures import resolve

pytestmark = pytest.mark.every_loop


async def test_a_future_gets_its_result_or_its_error() -> None:
    future = asyncio.get_running_loop().create_future()
    resolve(future, 3)
    assert await future == 3
    future = asyncio.get_running_loop().create_future()
    resolve(future, None, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await future


@pytest.mark.parametrize("error", [None, ZeroDivisionError()])
async def test_a_cancelled_future_stays_cancelled(error: Exception | None) -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    resolve(future, 3, error)
    assert future.cancelled()
