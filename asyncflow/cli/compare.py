"""``asyncflow compare``: runs two programs, and names the first node whose values differ."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import nullcontext

from asyncflow.cli.program import INTERRUPTED, run_program
from asyncflow.cli.target import Target
from asyncflow.devices.registry import default_devices
from asyncflow.testing.golden import ValueLog, difference, logged

_DIFFERS = 1
_PROGRAM_FAILED = 3


def compare(first: str, second: str, devices: Sequence[Sequence[str]] = (), *, tolerance: float | None = None) -> int:
    """Run both programs, print the first difference, and return the exit code.

    Args:
        first: ``file.py``, ``file.py:name`` or ``package.module:name``, and arguments behind it. It is the golden run.
        second: likewise; the same as `first` for another run of it.
        devices: of sessions that name none, of the first and of the second program.
        tolerance: as of `difference`.

    Returns:
        0; 1 if a value differs, or the programs share no firing; else 3 if a program raised or exited with a code other
        than 0, or 130 if it was interrupted.

    Raises:
        TargetError: `first` or `second` names nothing that can be called without arguments.
    """
    programs = [(Target.parse(target), arguments) for target, *arguments in map(shlex.split, (first, second))]
    logs: list[ValueLog] = []
    code = 0
    for number, (target, arguments) in enumerate(programs):
        placed = default_devices(devices[number]) if number < len(devices) else nullcontext()
        with placed, logged() as log:
            code = run_program(target, arguments, nullcontext()) or code
        logs.append(log)
        if code == INTERRUPTED:
            return code
    found = difference(*logs, tolerance=tolerance)
    if found is not None:
        print(found)
        return _DIFFERS
    both = len(logs[0].values.keys() & logs[1].values.keys())
    counts = [len(log.values) for log in logs]
    what = "no difference in" if both else "nothing to compare: the programs share"
    end = "; a program failed" if code else "" if both else "; firings are known by the names of their nodes"
    print(f"{what} {both} firings, of {counts[0]} in the first program and {counts[1]} in the second{end}")
    return _PROGRAM_FAILED if code else 0 if both else _DIFFERS
