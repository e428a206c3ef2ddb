from __future__ import annotations

import asyncio
import threading

import pytest

from asyncflow.streams import Latch
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.every_loop


def test_block_returns_when_set_by_another_thread() -> None:
    latch = Latch()
    thread = threading.Thread(target=latch.set)
    thread.start()
    assert latch.block(PATIENCE_S) and latch.done()
    thread.join()
    assert latch.block(0.0)


def test_block_gives_up_at_its_timeout_and_leaves_nothing_behind() -> None:
    latch = Latch()
    assert not latch.block(0.0)
    assert latch._callbacks == []


async def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    latch = Latch()
    waiter = asyncio.create_task(latch.wait())
    await asyncio.sleep(0)
    assert len(latch._callbacks) == 1
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert latch._callbacks == []


async def test_set_and_cancel_in_one_turn_of_the_loop() -> None:
    latch = Latch()
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    waiter = asyncio.create_task(latch.wait())
    await asyncio.sleep(0)
    latch.set()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await latch.wait()
    await asyncio.sleep(0)
    assert complaints == []


def test_setting_wakes_no_closed_loop() -> None:
    latch = Latch()
    loop = asyncio.new_event_loop()
    waiting = latch.wait()

    async def begin() -> None:
        waiting.send(None)

    loop.run_until_complete(begin())
    loop.close()
    latch.set()
    assert latch.done()
    waiting.close()
