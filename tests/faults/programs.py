"""Whole programs, run in a process of their own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

from tests.patience import PATIENCE_S

_ROOT = Path(__file__).parents[2]

PREAMBLE = """
import asyncio, gc, os, signal, sys, threading, warnings
import uvloop
import asyncflow as af
from tests.faults.kernels import CoroutineGate, INT, SLOW, ThreadGate, ticks, until

# Where this process ignores interrupts, as jobs in the background do, so would its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

def FACTORY():
    loop = NEW_LOOP()
    loop.slow_callback_duration = 1000  # in debug mode a busy machine would make it write that a callback was slow
    return loop

def endless():
    return af.while_loop(lambda i: i >= 0, lambda i: i + 1, (0,))[0]
"""


@contextmanager
def started(source: str, loop: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs `source` after `PREAMBLE`, with every warning shown; ``FACTORY`` makes its loop.

    It is killed when the block is left, and after `PATIENCE_S` at the latest: then its output ends.
    """
    factory = {"asyncio": "asyncio.new_event_loop", "uvloop": "uvloop.new_event_loop"}[loop]
    program = f"{PREAMBLE.replace('NEW_LOOP', factory)}\n{dedent(source)}"
    process = subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "default", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
    )
    killer = threading.Timer(PATIENCE_S, process.kill)
    killer.start()
    try:
        with process:
            try:
                yield process
            finally:
                process.kill()
    finally:
        killer.cancel()
        killer.join()


def run(source: str, loop: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `started`."""
    with started(source, loop) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err
