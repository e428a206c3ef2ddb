"""The state that a session finds for a resource, and its lifetime."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.resource import Resource
from asyncflow.state.containers import StateStore, reset_container
from asyncflow.state.variables.held import HeldValue

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _empty_container() -> Iterator[None]:
    yield
    reset_container("test")


def shared(value: object, name: str = "v") -> af.Variable:
    return af.Variable(value, name=name, container="test")


def test_a_private_state_is_made_once_per_store() -> None:
    v, w = af.Variable(1, name="same"), af.Variable(1, name="same")
    one, two = StateStore(), StateStore()
    assert one.lookup(v) is one.lookup(v)
    assert one.lookup(v) is not two.lookup(v)
    assert one.lookup(v) is not one.lookup(w)


def test_clear_forgets_private_states_alone() -> None:
    store = StateStore()
    v, w = af.Variable(1), shared(1)
    kept = store.lookup(w)
    store.lookup(v).value = 5
    store.clear()
    assert len(store) == 0
    assert store.lookup(v).value == 1
    assert store.lookup(w) is kept


def test_a_state_dies_with_its_variable() -> None:
    store = StateStore()
    v = af.Variable(1)
    store.lookup(v)
    del v
    gc.collect()
    assert len(store) == 0


def test_a_store_dies_before_its_variables() -> None:
    v = af.Variable(1)
    store = StateStore()
    store.lookup(v)
    watch = weakref.ref(store)
    gc.disable()  # no cycle may keep it
    try:
        del store
        assert watch() is None
    finally:
        gc.enable()
    assert StateStore().lookup(v).value == 1


def test_a_container_is_shared_by_name() -> None:
    one, two = StateStore(), StateStore()
    one.lookup(shared(1)).value = 5
    assert two.lookup(shared(9)).value == 5
    assert two.lookup(shared(9, name="other")).value == 9


def test_a_container_refuses_another_kind_under_a_name() -> None:
    class Shelf(Resource):
        pass

    store = StateStore()
    store.lookup(shared(1))
    with pytest.raises(
        af.GraphError, match=r"'test' already holds 'v' as a variable int64\[\].* as a variable float64"
    ):
        store.lookup(shared(1.5))
    with pytest.raises(af.GraphError, match=r"asked for as a Shelf; use another name, or reset_container\('test'\)"):
        store.lookup(Shelf("v", "test"))
    assert store.lookup(shared(1)).value == 1


def test_reset_starts_a_container_afresh() -> None:
    store = StateStore()
    store.lookup(shared(1)).value = 5
    reset_container("test")
    reset_container("never used")
    assert store.lookup(shared(1.5)).value == 1.5


@pytest.mark.slow
def test_a_state_dies_with_its_container() -> None:
    store = StateStore()
    state = weakref.ref(store.lookup(shared(1)))
    gc.collect()
    assert state() is not None
    reset_container("test")
    gc.collect()
    assert state() is None


class Memory:
    """Holds two variables, and gives their values when it is told to."""

    device = "memory"

    def __init__(self) -> None:
        self.asked: dict[str, asyncio.Future[Any]] = {}

    def fetched(self, handle: str) -> asyncio.Future[Any]:
        self.asked[handle] = asyncio.get_running_loop().create_future()
        return self.asked[handle]


@pytest.mark.parametrize("error", [None, af.DeviceLostError("lost"), RuntimeError("broken")], ids=repr)
async def test_values_come_home_at_once_and_a_failure_keeps_no_other(error: Exception | None) -> None:
    store, memory = StateStore(), Memory()
    states = {name: store.lookup(shared(0, name)) for name in "vw"}
    for name, state in states.items():
        state.value = HeldValue(name, memory)  # type: ignore[arg-type]
    leaving = asyncio.ensure_future(store.leave([memory]))  # type: ignore[list-item]
    for _ in range(5):
        await asyncio.sleep(0)
    assert sorted(memory.asked) == ["v", "w"]
    if error is None:
        memory.asked["v"].set_result(np.array(1))
    else:
        memory.asked["v"].set_exception(error)
    for _ in range(5):
        await asyncio.sleep(0)
    memory.asked["w"].set_result(np.array(2))
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="broken"):
            await leaving
    else:
        await leaving
    assert states["w"].value == 2
    assert states["v"].value == 1 if error is None else type(states["v"].value) is HeldValue


async def test_sessions_share_a_container() -> None:
    with af.Graph():
        add = shared(1).assign_add(1)
        other = shared(0).assign_add(1)
    async with af.Session() as one, af.Session() as two:
        assert await one.run(add) == 2
        assert await two.run(other) == 3
