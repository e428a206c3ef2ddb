"""Simulations of shapes only, and random programs with data and without."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from asyncflow.devices.memory import MemoryLimitExceeded
from asyncflow.devices.sim.device import SimDevice
from asyncflow.devices.sim.machine import SimMachine
from asyncflow.devices.sim.values import SimArray, no_data
from asyncflow.errors import FetchError, ShapeError
from asyncflow.state.variables.immutable import immutable
from asyncflow.streams.virtual import VirtualClockLoop
from tests.devices.sim_machines import bind, fetched, idle, machine_of, received

F32 = np.dtype(np.float32)


@pytest.fixture
def machine() -> Iterator[SimMachine]:
    loop = VirtualClockLoop()
    yield machine_of(loop, shapes_only=True)
    loop.close()


@pytest.fixture
def device(machine: SimMachine) -> SimDevice:
    return SimDevice(machine)


def large(device: SimDevice, n: int = 1 << 14) -> SimArray:
    def kernel() -> None:
        pytest.fail("nothing this large is computed")

    result = bind(device, kernel, "large", flops=1.0, infer=lambda specs: [(F32, (n, n))])()
    assert isinstance(result, SimArray)
    return result


def test_large_arrays_take_no_memory_and_count_on_the_device(device: SimDevice) -> None:
    tracemalloc.start()
    x = large(device)
    with pytest.raises(MemoryLimitExceeded):
        bind(device, np.negative)(x)
    y = received(SimDevice(device.machine, 1), x, device)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert x.data is y.data is None
    assert device.memory.used == device.memory.limit == x.nbytes == 1 << 30


@pytest.fixture
def roomy(machine: SimMachine) -> SimDevice:
    return SimDevice(machine, memory_limit=1 << 40)


def test_small_arrays_are_computed(roomy: SimDevice) -> None:
    x = roomy.copy_in(np.arange(1024, dtype=np.float32))
    assert x.data is not None and roomy.copy_in(np.arange(1025, dtype=np.float32)).data is None
    total = bind(roomy, np.sum, "sum", infer=lambda specs: [(F32, ())])(x)
    roomy.require_data(total, "predicate")
    assert roomy.machine.loop.run_until_complete(fetched(roomy, total)) == 1023 * 512


def test_results_without_data_cannot_decide_anything(roomy: SimDevice) -> None:
    total = bind(roomy, np.sum, "sum", infer=lambda specs: [(F32, ())])(large(roomy))
    small = bind(roomy, np.negative, "negate")(total)
    assert total.data is small.data is None and small.shape == ()
    message = "'while/predicate' needs the data of 'negate', which a shapes-only simulation does not have"
    with pytest.raises(FetchError, match=message):
        roomy.require_data(small, "while/predicate")
    roomy.require_data(np.bool_(True), "a host value")


def test_a_fetch_of_no_data_is_nan_and_takes_no_memory(roomy: SimDevice) -> None:
    loop = roomy.machine.loop
    got = loop.run_until_complete(fetched(roomy, large(roomy)))
    assert got.shape == (1 << 14, 1 << 14) and got.strides == (0, 0) and np.isnan(got[3, 4])
    assert loop.time_ns() > 10**8, "a GiB takes its time"
    integers = bind(roomy, lambda x: x, infer=lambda specs: [(np.dtype(np.int8), ())])(large(roomy))
    assert loop.run_until_complete(fetched(roomy, integers)) == 0


def test_a_shape_that_depends_on_data_is_an_error(roomy: SimDevice) -> None:
    launch = bind(roomy, np.nonzero, "nonzero", infer=lambda specs: None)
    with pytest.raises(ShapeError, match="'nonzero' cannot be simulated: its output's shape depends on data, which a"):
        launch(large(roomy))
    small = launch(roomy.constant(np.array([0.0, 1.0])))  # computed
    assert small is not None


def test_views_of_no_data_share_its_memory(roomy: SimDevice) -> None:
    x = large(roomy)
    view = bind(roomy, np.ravel, flops=0.0, infer=lambda specs: [(F32, (1 << 28,))])(x)
    assert view.storage is x.storage and view.written is x.written and roomy.memory.used == x.nbytes


def test_state_keeps_stand_ins_without_a_copy(roomy: SimDevice) -> None:
    kept: list[Any] = []

    def assign(x: np.ndarray) -> np.ndarray:
        kept.append(immutable(x))
        return kept[-1]

    x = large(roomy)
    used = roomy.memory.used
    y = bind(roomy, assign, "assign", keeps_arrays=True)(x)
    assert kept[0].strides == (0, 0) and np.isnan(kept[0][0, 0])
    assert y.data is None and y.storage is x.storage
    del x, y
    assert roomy.memory.used == used
    z = bind(roomy, lambda: kept[0], "read", keeps_arrays=True)()
    assert z.data is None and z.nbytes == used == roomy.memory.used
    del z
    kept.clear()
    assert roomy.memory.used == 0


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (3, 0), (1000, 1000)])
def test_stand_ins_have_dtype_and_shape_and_no_size(dtype: str, shape: tuple[int, ...]) -> None:
    stand_in = no_data(np.dtype(dtype), shape)
    assert (stand_in.dtype, stand_in.shape) == (np.dtype(dtype), shape)
    if shape:
        assert immutable(stand_in) is stand_in


def random_program(seed: int, n: int, **options: Any) -> tuple[list[Any], int, list[tuple[str, int, int]], list[str]]:
    """Kernels on random streams of random devices, on random values that others drop; with fetches in between."""
    random, loop = Random(seed), VirtualClockLoop()
    machine = machine_of(loop, 3, peer=None if seed % 3 == 0 else machine_of(loop).spec.peer_link, seed=seed, **options)
    devices = [SimDevice(machine, i, compute_streams=2) for i in range(3)]
    ops: dict[str, Any] = {"negate": np.negative, "add": np.add, "keep": lambda x: x}
    launches = [
        {
            (name, stream): bind(device, op, name, stream=stream, flops=0.0 if name == "keep" else None)
            for name, op in ops.items()
            for stream in range(2)
        }
        for device in devices
    ]
    recorded: list[list[Any]] = [[] for _ in devices]
    for device, into in zip(devices, recorded, strict=True):
        device.record_into(into)
    got: list[Any] = []
    values = [devices[i % 3].copy_in(np.full(n, i, np.float32)) for i in range(4)]
    homes = [i % 3 for i in range(4)]
    for step in range(120):
        slot, home, stream = random.randrange(4), random.randrange(3), random.randrange(2)

        def here(i: int, home: int = home) -> SimArray:
            if homes[i] == home:
                return values[i]
            array = received(devices[home], values[i], devices[homes[i]])
            assert isinstance(array, SimArray)
            return array

        name = random.choice(["negate", "add", "keep"])
        args = [here(slot), *([here(random.randrange(4))] if name == "add" else [])]
        values[slot], homes[slot] = launches[home][name, stream](*args), home
        del args
        if step % 10 == 0:
            values[slot].to_host(lambda array, error: got.append(array))
        if step % 40 == 39:
            loop.run_until_complete(fetched(devices[homes[0]], values[0]))
    values.clear()
    for device in devices:
        loop.run_until_complete(idle(device))
    spans = [
        (each.label, each.started_ns, each.ended_ns)
        for device, into in zip(devices, recorded, strict=True)
        for each in device.settle(into)
    ]
    used = sum(device.memory.used for device in devices)
    loop.close()
    return got, used, spans, machine.hazards


def expected(seed: int, n: int) -> list[np.ndarray]:
    """The same program in NumPy."""
    random = Random(seed)
    values = [np.full(n, i, np.float32) for i in range(4)]
    got = []
    for step in range(120):
        slot, _, _ = random.randrange(4), random.randrange(3), random.randrange(2)
        name = random.choice(["negate", "add", "keep"])
        if name == "negate":
            values[slot] = -values[slot]
        elif name == "add":
            values[slot] = values[slot] + values[random.randrange(4)]
        if step % 10 == 0:
            got.append(values[slot])
    return got


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_have_no_hazards_and_numpys_results(seed: int) -> None:
    got, used, spans, hazards = random_program(seed, 2000)
    assert hazards == [] and used == 0 and len(spans) > 60
    by_value = sorted(tuple(array) for array in got)
    assert by_value == sorted(tuple(array) for array in expected(seed, 2000))


@pytest.mark.parametrize("seed", range(4))
def test_a_simulation_of_shapes_takes_the_same_times(seed: int) -> None:
    _, _, with_data, _ = random_program(seed, 2000, jitter=0.2)
    got, used, shapes_only, hazards = random_program(seed, 2000, jitter=0.2, shapes_only=True)
    assert shapes_only == with_data and hazards == [] and used == 0
    assert all(np.isnan(array).all() for array in got)
