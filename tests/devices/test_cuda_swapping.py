"""Saved values on a stand-in card: to pinned memory and back, through a file, and what becomes of them if it fails."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.cuda import progress
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.transfers import passage, slabs
from asyncflow.devices.cuda.transfers.swapping import CudaSwapping
from asyncflow.devices.figures.presets import DEFAULT_HOST
from asyncflow.devices.saved.saved_handle import SavedHandle, SavedState
from asyncflow.devices.saved.swap import Orders, SavedMoves
from asyncflow.errors import DeviceLostError
from asyncflow.graph.structured import WhileNode
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.stand_in import stand_in
from tests.patience import PATIENCE_S

SIDE, STEPS = 128, 24
VALUE = SIDE * SIDE * 4
"""A value that may move: 64 KiB."""

LIMIT = 20 * VALUE
"""A limit below the memory of a loop that keeps all its values."""

ROOM = 1 << 30


@pytest.fixture(params=[0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def cupy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    """A stand-in whose streams are served in one of several orders."""
    monkeypatch.setattr(slabs, "FIRST_BYTES", 16 * VALUE)
    monkeypatch.setattr(passage, "PASSING_BYTES", 2 * VALUE)
    with stand_in(devices=2, nbytes=64 << 20, seed=request.param) as fake:
        yield fake
        fake.engine.errors.clear()


def loop(x: Any, w: Any, *, steps: Any = STEPS, window: int = 32) -> Any:
    def body(i: Any, y: Any) -> Any:
        return i + 1, af.tanh(y @ w)

    return af.while_loop(lambda i, _: i < steps, body, (0, x), parallel_iterations=window)[1]


def nested(x: Any, w: Any) -> Any:
    """Inner loops, of which one in three does nothing."""

    def body(i: Any, y: Any) -> Any:
        return i + 1, af.cond(i % 3 == 2, lambda: y * w, lambda: loop(y, w, steps=4, window=1))

    return af.while_loop(lambda i, _: i < 5, body, (0, x), parallel_iterations=1)[1]


class Training:
    """A training step: its graph, and its feeds."""

    def __init__(self, build: Callable[..., Any] = loop, *, order: int = 1) -> None:
        with af.Graph() as self.graph:
            self.x = af.placeholder("float32", (SIDE, SIDE))
            w = af.placeholder("float32", (SIDE, SIDE))
            self.grads = af.gradients(af.sum(build(self.x, w)), [self.x, w])
            if order == 2:
                self.grads = af.gradients(af.sum(af.square(self.grads[1])), [self.x, w])
        values = np.random.default_rng(0).normal(size=(2, SIDE, SIDE)).astype(np.float32) / 12
        self.fed = dict(zip((self.x, w), values, strict=True))

    @asynccontextmanager
    async def session(self, **options: Any) -> AsyncIterator[af.Session]:
        """Open a session; afterwards the card and the accounts hold nothing. `least_bytes` may move."""
        least_bytes = options.pop("least_bytes", None)
        async with af.Session(self.graph, **{"devices": ["cuda:0"], **options}) as session:
            if least_bytes is not None:
                swapping_of(session).moves.least_bytes = least_bytes
            yield session
            await settled(session)

    async def step(self, session: af.Session) -> list[np.ndarray[Any, Any]]:
        async with asyncio.timeout(PATIENCE_S):
            values: list[np.ndarray[Any, Any]] = await session.run(self.grads, self.fed)
        return values

    async def once(self, **options: Any) -> tuple[list[np.ndarray[Any, Any]], Any]:
        """The gradients, and the memory of the card after it."""
        async with self.session(**options) as session:
            return await self.step(session), session.statistics().memory["cuda:0"]


def swapping_of(session: af.Session) -> Any:
    device = session.devices[0]
    assert isinstance(device, CudaDevice)
    return device.swapping


def held(session: af.Session) -> list[int]:
    """Return the figures of accounts that should be 0 once copies have ended."""
    moves = swapping_of(session)
    now = moves.statistics()
    counts = [now.kept, now.host, now.disk, now.moved_out - now.moved_in - now.discarded, len(moves._known)]
    counts += [session.devices[0].memory.used, len(moves._flights), moves._passage.passing]
    return counts if any([*counts, *(space.used for space in moves.spaces)]) else []


async def settled(session: af.Session) -> None:
    """Wait until nothing is held, or fail with the figures."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            for turn in count():
                if not held(session):
                    return
                if turn == 1000:
                    gc.collect()  # an expected error and its traceback refer to one another
                await asyncio.sleep(0)
    except TimeoutError:
        pytest.fail(f"still held: {held(session)}")


def blocking(cupy: FakeCupy) -> list[str]:
    """The calls of this thread, the event loop's, that block."""
    return [name for thread, name in cupy.engine.calls if thread == threading.get_ident()]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """All loops have `swap_memory`."""
    all_move(monkeypatch)


def all_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all loops `swap_memory`, and let two values move by one copy, so that a few values suffice to see moves."""
    monkeypatch.setattr(WhileNode, "swap_memory", True)
    monkeypatch.setattr(CudaSwapping, "together", 2 * VALUE)


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize("build", [loop, nested])
async def test_gradients_are_the_same_bits_however_values_move(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: Any, regions: bool
) -> None:
    """Behaviour 68: never, once memory is short, always, through a file, and whatever their size."""
    training = Training(build)
    never, kept = await training.once(regions=regions, memory_limit=ROOM // 32)
    cupy.engine.calls.clear()
    limit = kept.peak - 3 * VALUE
    short, some = await training.once(regions=regions, memory_limit=limit, without=["plan_memory"])
    all_move(monkeypatch)
    always, all_of_it = await training.once(regions=regions, memory_limit=ROOM // 32)
    tiny, _ = await training.once(regions=regions, memory_limit=ROOM // 32, least_bytes=0)
    options: Any = {"host_memory_limit": VALUE, "spill_directory": str(tmp_path)}
    spilled, through_file = await training.once(regions=regions, memory_limit=limit, **options)
    assert kept.moved_out == 0
    assert some.peak <= limit
    assert min(some.moved_out, all_of_it.moved_out) > 0
    assert through_file.moved_in > VALUE
    for other in (short, always, tiny, spilled):
        np.testing.assert_array_equal(other, never)
    assert [name for name in blocking(cupy) if name != "compile"] == []


async def test_plans_know_what_starting_a_copy_takes_the_host(cupy: FakeCupy) -> None:
    """As on a simulated card behind the same host: small values are not worth it."""
    async with Training().session() as session:
        assert swapping_of(session).start_ns == DEFAULT_HOST.swap_s * 1e9 > 0


@pytest.mark.parametrize("options", [{"compute_streams": 2}, {"cuda_graphs": True}], ids=["streams", "graphs"])
@pytest.mark.usefixtures("always")
async def test_several_streams_and_graphs_move_too(cupy: FakeCupy, options: Any) -> None:
    """Behaviour 85: what another stream still reads is not given away."""
    training = Training()
    never, _ = await training.once(saved_values="keep")
    moved, memory = await training.once(memory_limit=ROOM // 32, **options)
    assert memory.moved_in > 0
    np.testing.assert_array_equal(moved, never)


async def test_the_host_takes_no_more_than_its_limit(cupy: FakeCupy) -> None:
    """A value without a place stays on the card, and the error says how many bytes were missing where."""
    training = Training()
    with pytest.raises(af.OutOfMemoryError) as caught:
        # A plan would run iterations again in so little memory.
        await training.once(memory_limit=LIMIT, host_memory_limit=2 * VALUE, without=["plan_memory"])
    assert "a saved value of 64.0 KiB had no place to go (the host has 128.0 KiB, all in use)" in str(caught.value)
    assert "raise host_memory_limit=, or give spill_directory=" in str(caught.value)


def needs_much(x: Any, w: Any) -> Any:
    """The saved values alone do not make memory short, and then much is needed at once; no plan knows the loop's
    length.
    """
    y = loop(x, w, steps=af.astype(af.sum(x * 0.0), "int64") + 10)
    much = af.concat([y] * 6, axis=0)
    return af.sum(much * much)


@pytest.mark.parametrize("regions", [True, False])
async def test_what_may_move_makes_room_for_what_does_not_fit(cupy: FakeCupy, regions: bool) -> None:
    """Fault F30: an allocation that fails is tried once more, and only streams wait."""
    training = Training(needs_much)
    never, kept = await training.once(regions=regions, memory_limit=ROOM // 32)
    async with training.session(regions=regions, memory_limit=kept.peak - 2 * VALUE) as session:
        cupy.engine.calls.clear()
        np.testing.assert_array_equal(await training.step(session), never)
        assert session.statistics().memory["cuda:0"].moved_out >= 2 * VALUE
        assert [name for name in blocking(cupy) if name != "compile"] == []
        session.devices[0].memory.make_room = lambda _: False  # type: ignore[attr-defined]
        with pytest.raises(af.OutOfMemoryError, match="largest now"):
            await training.step(session)


@pytest.mark.slow
@pytest.mark.parametrize("regions", [True, False])
async def test_where_memory_is_short_streams_wait_for_copies_out_and_the_host_launches(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, regions: bool
) -> None:
    """Nothing that was launched has run yet, and half of what a loop saves has been away already.

    The gradient may have asked for some of it again, as the host gets that far at once.
    """
    monkeypatch.setattr(progress, "MOST_AHEAD", 900)
    training = Training()
    never, _ = await training.once(regions=regions, saved_values="keep")
    async with training.session(memory_limit=LIMIT, regions=regions, without=["plan_memory"]) as session:
        await training.step(session)  # pins
        moves = swapping_of(session)
        came_back = moves.statistics().moved_in
        cupy.pause()
        try:
            task = asyncio.ensure_future(session.run(training.grads, training.fed))
            await until(lambda: (now := moves.statistics()).host + now.moved_in - came_back >= STEPS * VALUE // 2)
            assert not moves.gate.paused
        finally:
            cupy.resume()
        np.testing.assert_array_equal(await task, never)
        assert session.statistics().memory["cuda:0"].peak <= LIMIT


@pytest.mark.usefixtures("always")
async def test_the_host_pins_no_more(cupy: FakeCupy) -> None:
    """Fault F31: values stay on the card as they were; if they do not fit, the error names the refused request."""
    training = Training()
    never, _ = await training.once(saved_values="keep")
    async with training.session(memory_limit=ROOM // 32) as session:
        swapping_of(session)._passage.slabs.close()
        cupy.engine.fail_next(2, "hostAlloc")
        np.testing.assert_array_equal(await training.step(session), never)
        assert session.statistics().memory["cuda:0"].moved_in == 0
    async with training.session(memory_limit=LIMIT) as session:
        swapping_of(session)._passage.slabs.close()
        cupy.engine.fail_next(2, "hostAlloc")
        with pytest.raises(af.OutOfMemoryError, match="the system pins no more memory of the host"):
            await training.step(session)


@pytest.mark.parametrize("direction", ["move_out", "move_in"])
@pytest.mark.usefixtures("always")
async def test_a_copy_that_fails(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    """Fault F31: on its way out the value stays; on its way back, its reader gets the error."""
    training = Training()
    never, _ = await training.once(saved_values="keep")
    async with training.session() as session:
        copies = session.devices[0].copies  # type: ignore[attr-defined]
        copy = getattr(type(copies), direction)

        def fails_once(self: Any, *args: Any) -> Any:
            monkeypatch.undo()
            monkeypatch.setattr(WhileNode, "swap_memory", True)
            cupy.engine.fail_next(1, "memcpyAsync")
            return copy(self, *args)

        monkeypatch.setattr(type(copies), direction, fails_once)
        if direction == "move_out":
            np.testing.assert_array_equal(await training.step(session), never)
        else:
            with pytest.raises(af.KernelError, match="cudaErrorInvalidValue"):
                await training.step(session)
        np.testing.assert_array_equal(await training.step(session), never)


async def until(is_so: Callable[[], object]) -> None:
    """Lets the loop turn until something is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)


def loses_once_away(moves: SavedMoves, cupy: FakeCupy) -> None:
    """The first card is lost when a value is away from it; before the next turn a gradient may ask for it again."""
    left = moves.left

    def left_and_lost(handle: SavedHandle, taken_ns: int | None) -> Orders:
        orders = left(handle, taken_ns)
        if handle.state is SavedState.AWAY:  # a reader may have come first
            cupy.engine.lose(0, 700)
        return orders

    moves.left = left_and_lost  # type: ignore[method-assign]


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.usefixtures("always")
async def test_a_card_is_lost_while_values_are_away(cupy: FakeCupy, regions: bool) -> None:
    """Fault F33: the run fails with that, all is given back, and another card goes on."""
    training = Training()
    never, _ = await training.once(saved_values="keep")
    async with training.session(devices=["cuda:1"]) as other:
        async with training.session(regions=regions) as session:
            loses_once_away(swapping_of(session).moves, cupy)
            with pytest.raises(DeviceLostError, match="cuda:0 is lost") as caught:
                await training.step(session)
            (away,) = [note for note in caught.value.__notes__ if note.startswith("away from it")]
            assert re.fullmatch(r"away from it, and so not lost: \d+ values \(\d+ of while/body/\w+.*\)", away)
            assert any(note.startswith("lost with cuda:0: ") for note in caught.value.__notes__)
            del caught
        np.testing.assert_array_equal(await training.step(other), never)


@pytest.mark.usefixtures("always")
async def test_host_values_go_on_without_the_card(cupy: FakeCupy) -> None:
    """Fault F33: runs that need nothing of a lost card, and variables on the host, in the very session."""
    training = Training()
    with training.graph, af.device("cpu:0"):
        count = af.Variable(0.0, name="count")
        counted = af.sum(count.assign_add(1.0) * af.while_loop(lambda i: i < 5, lambda i: i + 1, 0))
    async with training.session(devices=["cuda:0", "cpu:0"], soft_placement=False) as session:
        assert await session.run(counted) == 5.0
        loses_once_away(swapping_of(session).moves, cupy)
        with pytest.raises(DeviceLostError, match="cuda:0 is lost"):
            await training.step(session)
        assert await session.run(counted) == 10.0


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize("spills", [True, False])
@pytest.mark.usefixtures("always")
async def test_cancelled_at_any_turn_all_is_given_back(
    cupy: FakeCupy, tmp_path: Path, regions: bool, spills: bool
) -> None:
    """Fault F18: memory of the card, of the host and the disk, copies in flight included; a run after it is right."""
    training = Training()
    never, _ = await training.once(saved_values="keep")
    options: Any = {"host_memory_limit": 2 * VALUE, "spill_directory": str(tmp_path)} if spills else {}
    async with training.session(memory_limit=LIMIT, regions=regions, **options) as session:
        for turns in (*range(6), *range(6, 60, 9)):
            task = asyncio.ensure_future(session.run(training.grads, training.fed))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            try:
                np.testing.assert_array_equal(await task, never)
            except asyncio.CancelledError:
                pass
            await settled(session)
        np.testing.assert_array_equal(await training.step(session), never)


@pytest.mark.usefixtures("always")
async def test_a_buffer_is_kept_until_its_copy_has_ended(cupy: FakeCupy) -> None:
    """Behaviour 85: the card's memory and the pinned one, also after the run is cancelled."""
    training = Training()
    async with training.session(memory_limit=ROOM // 32) as session:
        moves, memory = swapping_of(session), session.devices[0].memory
        slab = moves._passage.slabs._slabs[0]
        task = asyncio.ensure_future(session.run(training.grads, training.fed))
        cupy.pause()
        await until(lambda: moves._flights)
        flying = len(moves._flights)
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert memory.used >= flying * VALUE
        assert slab.free_bytes <= slab.nbytes - flying * VALUE
        cupy.resume()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settled(session)
        assert slab.free_bytes == slab.nbytes


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize("spills", [True, False])
async def test_runs_that_do_not_fit_together_all_end(
    cupy: FakeCupy, tmp_path: Path, regions: bool, spills: bool
) -> None:
    """Fault F32: neither waits for the other's memory for ever."""
    training = Training()
    never, _ = await training.once(regions=regions, saved_values="keep")
    options: Any = {"host_memory_limit": 4 * VALUE, "spill_directory": str(tmp_path)} if spills else {}
    async with training.session(memory_limit=LIMIT, regions=regions, **options) as session:
        for values in await asyncio.gather(*(training.step(session) for _ in range(3))):
            np.testing.assert_array_equal(values, never)
        assert session.statistics().memory["cuda:0"].peak <= LIMIT


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize(("fails", "said"), [("read", "Input/output error"), ("bit", "differ from the written ones")])
@pytest.mark.usefixtures("always")
async def test_a_bad_read_fails_a_run_and_others_go_on(
    cupy: FakeCupy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, said: str, regions: bool
) -> None:
    """Fault F31: the error names the value and the file."""
    training = Training()
    never, _ = await training.once(saved_values="keep")
    read = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fails == "read":
            raise OSError(5, "Input/output error")
        count = read(fd, buffers, offset)
        buffers[0][0] ^= 1
        return count

    options: Any = {"host_memory_limit": VALUE, "spill_directory": str(tmp_path)}
    async with training.session(memory_limit=LIMIT, regions=regions, **options) as session:
        with monkeypatch.context() as broken:
            broken.setattr(os, "preadv", preadv)
            with pytest.raises(af.KernelError, match="cannot be read back from the spill file") as caught:
                await training.step(session)
        assert "'while/body/" in str(caught.value)
        assert str(tmp_path) in str(caught.value)
        assert said in str(caught.value)
        del caught
        np.testing.assert_array_equal(await training.step(session), never)


@pytest.mark.usefixtures("always")
async def test_a_full_disk(cupy: FakeCupy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F31: values stay where they are; where they do not fit the error says what went wrong with the file."""
    training = Training()
    never, _ = await training.once(saved_values="keep")

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    options: Any = {"host_memory_limit": VALUE, "spill_directory": str(tmp_path)}
    values, _ = await training.once(**options)
    np.testing.assert_array_equal(values, never)
    with pytest.raises(af.OutOfMemoryError, match="No space left on device"):
        await training.once(memory_limit=LIMIT // 2, **options)
