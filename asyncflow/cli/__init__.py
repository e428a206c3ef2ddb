"""The `asyncflow` command: profile a program, simulate it on other machines, list the devices."""

from __future__ import annotations

import sys
from importlib import import_module

import asyncflow as af


def command() -> int:
    """Run the command with this process's arguments and return the exit code; ``--version`` imports no further
    module.
    """
    if sys.argv[1:] == ["--version"]:
        print(f"asyncflow {af.__version__}")
        return 0
    code: int = import_module("asyncflow.cli.main").main()
    return code
