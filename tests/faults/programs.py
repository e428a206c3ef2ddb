"""Whole programs, run in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

_ROOT = Path(__file__).parents[2]

PREAMBLE = """
import asyncio, gc, os, signal, sys, threading, warnings
import uvloop
import asyncflow as af
from tests.faults.kernels import CoroutineGate, INT, SLOW, ThreadGate, ticks, until

def endless():
    return af.while_loop(lambda i: i >= 0, lambda i: i + 1, (0,))[0]
"""


def start(source: str, loop: str) -> subprocess.Popen[str]:
    """A Python process that runs `source` after `PREAMBLE`, with every warning shown; ``FACTORY`` makes its loop."""
    factory = {"asyncio": "asyncio.new_event_loop", "uvloop": "uvloop.new_event_loop"}[loop]
    program = f"{PREAMBLE}\nFACTORY = {factory}\n{dedent(source)}"
    return subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "default", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
    )


def run(source: str, loop: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `start`."""
    with start(source, loop) as process:
        out, err = process.communicate(timeout=30)
    return process.returncode, out, err
