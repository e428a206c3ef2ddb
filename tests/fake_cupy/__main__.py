"""Runs a program whose sessions name CUDA devices on the stand-in: ``python -m tests.fake_cupy program.py``."""

from __future__ import annotations

import runpy
import sys

from tests.fake_cupy.stand_in import stand_in


def main() -> None:
    """Run the program that the command line names, with two cards."""
    with stand_in(devices=2, nbytes=256 << 20, pinned_nbytes=16 << 20):
        runpy.run_path(sys.argv[1], run_name="__main__")


if __name__ == "__main__":
    main()
