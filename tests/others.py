"""The tasks beside a test's own."""

from __future__ import annotations

import asyncio


async def others_end() -> None:
    """What the session does beside ends."""
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
