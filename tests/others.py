"""The tasks beside a test's own, and what is held once they and the threads have done their work."""

from __future__ import annotations

import asyncio

import asyncflow as af


async def others_end() -> None:
    """What the session does beside ends."""
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))


async def held_bytes(session: af.Session) -> int:
    """What the CPU device holds once its stream thread has let go of its last job."""
    compute = session.devices[0].compute
    compute.enqueue(int)
    await compute.record().wait()
    return session.statistics().used_bytes["cpu:0"]


async def held_in_the_end(session: af.Session) -> int:
    """The same, once what the session does beside has ended, too."""
    await others_end()
    return await held_bytes(session)
