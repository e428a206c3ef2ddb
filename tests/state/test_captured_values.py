"""Values of variables that a CUDA graph writes in place: only if no other code refers to them, on any thread."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.state.variables.captured import CapturedVariable
from asyncflow.state.variables.held import HeldValue
from asyncflow.state.variables.variable_state import VariableState


class Captured:
    """A variable whose value is at the handle ``"here"``."""

    def __init__(self) -> None:
        self.holder: Any = object()
        xp: Any = ModuleType("xp")
        xp.holder = self.holder
        self.state = VariableState("v", af.spec("float32", (2,)), np.zeros(2, np.float32))
        self.variable = CapturedVariable(self.state, xp, is_written=True)

    def at(self, handle: str) -> None:
        self.state.value = HeldValue(handle, self.holder)


@pytest.fixture
def captured() -> Captured:
    found = Captured()
    found.at("here")
    return found


def test_a_value_alone_is_replaced(captured: Captured) -> None:
    variable, state = captured.variable, captured.state
    first = state.value
    assert not variable.is_alone
    del first
    assert variable.is_alone
    assert variable.replace("here", variable.present())
    assert variable.replace("there", variable.present())
    assert variable.handle == "there"


def test_a_value_that_another_reader_has_got_is_not_written(captured: Captured) -> None:
    variable = captured.variable
    present = variable.present()
    reader = present[0]  # on another thread, between the question and the launch
    assert not variable.replace("here", present)
    del reader
    assert variable.replace("here", variable.present())


def test_a_reader_of_another_place_is_no_hindrance(captured: Captured) -> None:
    reader = captured.state.value
    assert captured.variable.replace("there", captured.variable.present())
    assert isinstance(reader, HeldValue)
    assert reader.handle == "here"


def test_a_value_that_was_assigned_meanwhile_stays(captured: Captured) -> None:
    variable, state = captured.variable, captured.state
    present = variable.present()
    captured.at("elsewhere")
    assert not variable.replace("here", present)
    assert variable.handle == "elsewhere"
    with state.lock:  # another thread is just writing
        assert not variable.replace("here", variable.present())
        variable.move("here")
    assert variable.handle == "elsewhere"


def test_copies_of_older_values_are_dropped(captured: Captured) -> None:
    variable, state = captured.variable, captured.state
    state.value = value = np.ones(2, np.float32)
    assert variable.handle is None
    variable.move("here")
    assert variable.handle == "here"
    assert state.value is value
    state.value = value + 1
    assert variable.handle is None
    assert state.copies is None


def test_moving_keeps_copies_of_other_devices_and_of_the_host(captured: Captured) -> None:
    variable, state = captured.variable, captured.state
    other: Any = ModuleType("other")
    other.holder = object()
    state.value = value = np.ones(2, np.float32)
    elsewhere = HeldValue("copy", other.holder)
    state.copies = (value, {other: elsewhere})
    variable.move("here")
    assert state.copies[1][other] is elsewhere
    state.value = HeldValue("here", captured.holder, host=value)
    variable.move("there")
    assert (variable.handle, state.value.host is value) == ("there", True)
