from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from asyncflow.streams.mailbox import Mailbox


class FakeLoop:
    """Keeps wake-ups until it is turned."""

    def __init__(self) -> None:
        self.wakeups: list[Callable[[], None]] = []
        self.sent = 0
        self.closed = False

    def is_closed(self) -> bool:
        return self.closed

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.sent += 1
        self.wakeups.append(callback)

    def turn(self) -> None:
        self.wakeups.pop(0)()


def make() -> tuple[FakeLoop, Mailbox[object], list[object]]:
    """Return a mailbox whose items are noted; callable items are called instead."""
    loop, got = FakeLoop(), list[object]()

    def deliver(item: object) -> None:
        if callable(item):
            item()
        else:
            got.append(item)

    return loop, on(loop, deliver), got


def on(loop: FakeLoop, deliver: Callable[[object], object], discarded: list[object] | None = None) -> Mailbox[object]:
    into = [] if discarded is None else discarded
    return Mailbox(cast(asyncio.AbstractEventLoop, loop), deliver, into.append)


def test_one_wake_up_delivers_a_batch_in_order() -> None:
    loop, mailbox, got = make()
    for value in range(100):
        mailbox.post(value)
    mailbox.post(*range(100, 200))
    assert loop.sent == 1 and got == []
    loop.turn()
    assert got == list(range(200))
    mailbox.post("next")
    assert loop.sent == 2
    loop.turn()
    assert got[-1] == "next"


def test_items_during_a_delivery_have_their_own_wake_up() -> None:
    loop, mailbox, got = make()
    mailbox.post(lambda: mailbox.post("late"))
    loop.turn()
    assert got == [] and loop.sent == 2
    loop.turn()
    assert got == ["late"]


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()])
def test_a_deliver_that_raises_leaves_the_rest_for_another_wake_up(error: BaseException) -> None:
    loop, mailbox, got = make()

    def deliver() -> None:
        raise error

    mailbox.post(deliver)
    mailbox.post("rest")
    with pytest.raises(type(error)):
        loop.turn()
    loop.turn()
    assert got == ["rest"]


def test_a_closed_loop_discards_results_silently() -> None:
    loop, got, discarded = FakeLoop(), list[object](), list[object]()
    mailbox = on(loop, got.append, discarded)
    mailbox.post("waiting when it closes")
    loop.closed = True
    mailbox.post("after")
    assert loop.sent == 1 and discarded == ["waiting when it closes", "after"]
    loop.turn()
    assert got == []


def test_settling_discards_what_a_closed_loop_left() -> None:
    loop, got, discarded = FakeLoop(), list[object](), list[object]()
    mailbox = on(loop, got.append, discarded)
    mailbox.post("left")
    loop.closed = True
    mailbox.settle()
    assert got == [] and discarded == ["left"]


def test_settling_delivers_at_once_and_on_its_own_loop_alone() -> None:
    loop, got = asyncio.new_event_loop(), list[object]()
    mailbox: Mailbox[object] = Mailbox(loop, got.append, got.append)

    async def settled(value: object) -> list[object]:
        mailbox.post(value)
        mailbox.settle()
        return got.copy()

    try:
        assert asyncio.run(settled("from another loop")) == []
        assert loop.run_until_complete(settled("here")) == ["from another loop", "here"]
    finally:
        loop.close()


def test_a_loop_that_closes_under_a_wake_up_discards_results_silently() -> None:
    class Closing(FakeLoop):
        def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
            self.closed = True
            super().call_soon_threadsafe(callback)

    discarded: list[object] = []
    on(Closing(), lambda _: None, discarded).post(1)
    assert discarded == [1]


def test_a_loop_that_refuses_for_another_reason_is_heard() -> None:
    class Broken(FakeLoop):
        def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
            raise RuntimeError("out of order")

    mailbox = on(Broken(), lambda _: None)
    with pytest.raises(RuntimeError, match="out of order"):
        mailbox.post(1)
