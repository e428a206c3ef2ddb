"""Python programs in processes of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Final

LIMIT_S: Final = 1800
"""A process that takes longer hangs."""


async def run_python(*arguments: str) -> str:
    """Return the output of ``python *arguments``.

    Raises:
        RuntimeError: it failed; the message has its standard error.
    """
    # On a thread, for `subprocess` starts processes without `os.fork`, which is not safe beside threads of the peers.
    command = [sys.executable, *arguments]
    process = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    if process.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} failed:\n{process.stderr}")
    return process.stdout
