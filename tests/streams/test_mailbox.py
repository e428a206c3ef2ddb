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


def make() -> tuple[FakeLoop, Mailbox, list[object]]:
    loop = FakeLoop()
    return loop, Mailbox(cast(asyncio.AbstractEventLoop, loop)), []


def post(mailbox: Mailbox, got: list[object], value: object) -> None:
    mailbox.post(lambda: got.append(value))


def test_one_wake_up_delivers_a_batch_in_order() -> None:
    loop, mailbox, got = make()
    for value in range(100):
        post(mailbox, got, value)
    assert loop.sent == 1 and got == []
    loop.turn()
    assert got == list(range(100))
    post(mailbox, got, "next")
    assert loop.sent == 2
    loop.turn()
    assert got[-1] == "next"


def test_what_comes_during_a_delivery_has_its_own_wake_up() -> None:
    loop, mailbox, got = make()
    mailbox.post(lambda: post(mailbox, got, "late"))
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
    post(mailbox, got, "rest")
    with pytest.raises(type(error)):
        loop.turn()
    loop.turn()
    assert got == ["rest"]


def test_a_closed_loop_drops_results_silently() -> None:
    loop, mailbox, got = make()
    post(mailbox, got, "waiting when it closes")
    loop.closed = True
    post(mailbox, got, "after")
    assert loop.sent == 1
    loop.turn()
    assert got == []


def test_a_loop_that_closes_under_a_wake_up_drops_results_silently() -> None:
    class Closing(FakeLoop):
        def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
            self.closed = True
            super().call_soon_threadsafe(callback)

    mailbox = Mailbox(cast(asyncio.AbstractEventLoop, Closing()))
    post(mailbox, [], 1)


def test_a_loop_that_refuses_for_another_reason_is_heard() -> None:
    class Broken(FakeLoop):
        def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
            raise RuntimeError("out of order")

    mailbox = Mailbox(cast(asyncio.AbstractEventLoop, Broken()))
    with pytest.raises(RuntimeError, match="out of order"):
        post(mailbox, [], 1)
