"""Fixtures of the tests of CUDA devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.devices.cards import MIB
from tests.fake_cupy import FakeCupy

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def fake() -> Iterator[FakeCupy]:
    """A stand-in for CuPy with one small card."""
    with FakeCupy(nbytes=8 * MIB) as cupy:
        yield cupy
