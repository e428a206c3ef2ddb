"""Runs a program whose sessions name CUDA devices on the stand-in: ``python -m tests.fake_cupy program.py [args]``."""

from __future__ import annotations

import argparse
import runpy
import sys

from tests.fake_cupy.stand_in import stand_in


def main() -> None:
    """Run the program that the command line names, with two cards; it sees its own arguments."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_cupy", description=__doc__)
    parser.add_argument("program", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for the program")
    options = parser.parse_args()
    sys.argv = [options.program, *options.arguments]
    with stand_in(devices=2, nbytes=256 << 20, pinned_nbytes=16 << 20):
        runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    main()
