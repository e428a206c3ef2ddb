"""Typed programs run as they are written."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import asyncflow as af
from tests.typing import signatures


async def test_annotated_parameters_are_arrays_of_that_kind() -> None:
    assert await signatures.main() == (5.0, 14.0, 9.0)
    for refused in (np.array([3, 4]), np.array([[3.0]]), "text"):
        with pytest.raises(af.FeedError, match=r"cannot feed x:0: expected float64\[\?\]"):
            await signatures.norm(refused)


def test_control_flow_gives_the_nests_that_the_types_say() -> None:
    signatures.build()


def test_signatures_are_kept() -> None:
    assert list(inspect.signature(signatures.norm).parameters) == ["x", "order"]
    assert list(inspect.signature(signatures.total).parameters) == ["x", "scale"]


def test_gradients_give_the_nests_that_the_types_say() -> None:
    with pytest.raises(AttributeError, match="no_such_method"):
        signatures.differentiate()
