"""The tasks beside a test's own, and the bytes held once they and the threads have done their work."""

from __future__ import annotations

import asyncio

import asyncflow as af

MOST_TURNS = 1_000
"""Of a thread that another thread has answered: it may stop anywhere behind that."""


async def others_end() -> None:
    """Wait until all other tasks of the session have ended."""
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))


async def held_bytes(session: af.Session) -> int:
    """Return the bytes that the CPU device holds once its threads have released their last jobs, or had many turns
    to.
    """
    compute = session.devices[0].compute
    held = 1
    for _ in range(MOST_TURNS):
        compute.enqueue(int)
        await compute.record().wait()
        held = session.statistics().used_bytes["cpu:0"]
        if not held:
            break
    return held


async def held_in_the_end(session: af.Session) -> int:
    """The same, once what the session does beside has ended, too."""
    await others_end()
    return await held_bytes(session)
