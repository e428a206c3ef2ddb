"""Runs a program whose sessions name CUDA devices on the stand-in: ``python -m tests.fake_cupy program.py``."""

from __future__ import annotations

import runpy
import sys

from asyncflow.devices.cuda_backend import using_cupy
from asyncflow.devices.pinned import close_shared_slab, shared_slab
from tests.fake_cupy import FakeCupy

PINNED_BYTES = 16 << 20


def main() -> None:
    """Run the program that the command line names, with two cards."""
    with FakeCupy(devices=2, nbytes=256 << 20) as cupy:
        shared_slab(cupy, PINNED_BYTES)
        try:
            with using_cupy(cupy):
                runpy.run_path(sys.argv[1], run_name="__main__")
        finally:
            close_shared_slab(cupy)


if __name__ == "__main__":
    main()
