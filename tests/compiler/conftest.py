"""The stand-in for CuPy that compiles chains of kernels, for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_cupy import FakeCupy


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeCupy]:
    """One stand-in for CuPy for all tests of a module."""
    with FakeCupy(nbytes=16 << 20) as fake:
        yield fake
