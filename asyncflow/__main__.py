"""``python -m asyncflow``: the `asyncflow` command."""

from __future__ import annotations

import sys

from asyncflow.cli import command

if __name__ == "__main__":
    sys.exit(command())
