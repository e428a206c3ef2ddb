from __future__ import annotations

import asyncio

from asyncflow.entered import Entered


def test_the_innermost_is_the_last_that_was_not_left() -> None:
    entered: Entered[object] = Entered("test")
    first, second = object(), object()
    assert entered.innermost() is None
    entered.enter(first)
    entered.enter(second)
    entered.enter(first)
    assert entered.innermost() is first
    entered.leave(first)
    assert entered.all() == (first, second)
    entered.leave(first)  # out of order
    assert entered.all() == (second,)
    entered.leave(first)  # not entered here
    entered.leave_all()
    assert entered.innermost() is None


async def test_each_task_has_its_own_and_begins_with_its_makers() -> None:
    entered: Entered[str] = Entered("test")
    entered.enter("a")

    async def enters() -> tuple[str, ...]:
        entered.enter("b")
        await asyncio.sleep(0)
        entered.leave("a")
        return entered.all()

    assert list(await asyncio.gather(enters(), enters())) == [("b",), ("b",)]
    assert entered.all() == ("a",)
