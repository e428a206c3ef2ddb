"""Costs of the mover of saved values while nothing moves, and the values that it hands over afterwards."""

from __future__ import annotations

import operator
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

import asyncflow as af
from asyncflow.autodiff.stores.stores import MovingLog
from asyncflow.devices.cpu.spilling import CpuSwapping
from asyncflow.devices.memory import MemoryAccount
from asyncflow.devices.saved.saved_handle import SavedEntry, Space
from asyncflow.streams.cpu.stream import ThreadStream
from tests.streams.outcomes import see_off

if TYPE_CHECKING:
    from types import FrameType

ROOMS = tuple(str(Path(af.__file__).parent / room) for room in ("devices", "autodiff"))
"""Of the account, the gate, the moves and the stores."""
STEPS = 60
ROWS = np.linspace(-1, 1, 96 * 192, dtype=np.float32).reshape(96, 192)
WEIGHTS = np.linspace(-0.02, 0.02, 192 * 192, dtype=np.float32).reshape(192, 192)


def program(steps: int = STEPS) -> tuple[list[af.Tensor], dict[Any, Any]]:
    """Gradients of a loop that saves two values of 72 KiB an iteration, one of which another one has saved."""
    x, w = af.placeholder("float32", ROWS.shape), af.placeholder("float32", WEIGHTS.shape)

    def body(i: af.Tensor, h: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return i + 1, af.tanh(h @ w + x)

    _, h = af.while_loop(lambda i, _: i < steps, body, (np.int32(0), x))
    return af.gradients(af.sum(h), [x, w]), {x: ROWS, w: WEIGHTS}


async def calls(**options: Any) -> float:
    """Return how many functions of these rooms an iteration calls, on any thread, after a first run."""
    found = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(ROOMS)

    with af.Graph() as graph:
        fetches, feeds = program()
        threading.setprofile(note)
        try:
            async with af.Session(graph, devices=["cpu:0"], **options) as session:
                for _ in range(2):
                    await session.run(fetches, feeds)
                found = 0
                sys.setprofile(note)
                await session.run(fetches, feeds)
                sys.setprofile(None)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return found / STEPS


async def test_a_mover_costs_little_where_nothing_moves(tmp_path: Path) -> None:
    """Two saves, two reads and two questions for memory an iteration: fewer than two calls each."""
    limit = 1 << 30
    counted = await calls(memory_limit=limit)
    managed = await calls(memory_limit=limit, spill_directory=str(tmp_path))
    assert managed - counted < 12


def test_stores_hand_over_their_values_iteration_by_iteration(tmp_path: Path) -> None:
    """In the order in which it was saved, before whatever is saved next; and rest again when nothing is left."""
    writing, reading = ThreadStream("writing"), ThreadStream("reading")
    account = MemoryAccount("cpu:0", 4 << 20)
    swapping = CpuSwapping(account, [Space("disk")], str(tmp_path), writing, reading)
    logs = [MovingLog((), swapping, label=f"value_{k}", run=1, moves="short", loop="while") for k in range(2)]
    values = [np.full((96, 192), k, np.float32) for k in range(20)]
    for value, log in zip(values, 10 * logs, strict=True):
        log.add(value)
    assert all(map(operator.is_, logs[0], values[::2]))  # nobody was told
    assert swapping.statistics().kept == sum(value.nbytes for value in values)
    logs[0].add(np.ones((96, 192), np.float32))
    assert [entry.value.rank for log in logs for entry in cast("list[SavedEntry]", log)] == [
        *range(0, 21, 2),
        *range(1, 20, 2),
    ]
    assert all(logs[k % 2].take(k // 2) is values[k] for k in reversed(range(20)))
    del logs
    assert swapping.moves.is_empty
    assert not swapping.is_at_rest
    last = MovingLog((), swapping, label="last", run=2, moves="short", loop="while")
    last.add(values[0])
    assert swapping.is_at_rest
    assert last[0] is values[0]
    swapping.close()
    see_off(writing)
    see_off(reading)


def test_a_store_that_ends_while_others_hand_over_is_left_out(tmp_path: Path) -> None:
    writing, reading = ThreadStream("writing"), ThreadStream("reading")
    account = MemoryAccount("cpu:0", 4 << 20)
    swapping = CpuSwapping(account, [Space("disk")], str(tmp_path), writing, reading)
    log = MovingLog((), swapping, label="value", run=1, moves="short", loop="while")
    log.add(np.zeros((96, 192), np.float32))
    log.__del__()  # as when another thread has found it a moment before
    log.hand_over(0)
    assert swapping.statistics().kept == 0
    swapping.close()
    see_off(writing)
    see_off(reading)
