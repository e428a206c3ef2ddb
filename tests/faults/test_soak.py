"""Fault F61: a day of requests on virtual time, of which one in a hundred goes wrong, leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import sys
import threading
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest

import asyncflow as af
from asyncflow.checkpoint.directory import step_path, steps
from asyncflow.checkpoint.manifest import read_manifest
from asyncflow.checkpoint.reader import verify
from asyncflow.testing import virtual_clock
from tests.faults.kernels import INT
from tests.patience import PATIENCE_S

HOUR_S = 3600.0
FAULTS = 0.01


class Level(NamedTuple):
    """Resources that a process holds at one moment."""

    tasks: int
    files: int
    threads: int
    bytes_held: int
    plans: int
    waiting: int
    objects: int


def level(session: af.Session) -> Level:
    gc.collect()
    files = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    found = session.statistics()
    return Level(
        len(asyncio.all_tasks()),
        files,
        threading.active_count(),
        sum(found.used_bytes.values()),
        found.plans,
        found.runs + found.queued + found.queued_bytes,
        len(gc.get_objects()),
    )


class Service:
    """A model of a server: a loop of coroutines that is streamed too, a batched function, and a kernel.

    Attributes:
        begun: number of first steps begun by the coroutine of each request.
    """

    def __init__(self) -> None:
        self.begun: Counter[int] = Counter()

        @af.op(outputs=INT)
        async def work(i: Any, number: Any, fails_at: Any) -> Any:
            if i == 0:
                self.begun[int(number)] += 1
            if i == fails_at:
                raise LookupError("a fault")
            await asyncio.sleep(0.3)
            return i + 1

        with af.Graph() as self.graph:
            self.number, self.fails_at = af.placeholder("int64", (), name="number"), af.placeholder("int64", ())
            self.x = af.placeholder("float32", (1500,))
            self.seen: list[af.Tensor] = []

            def body(i: af.Tensor) -> af.Tensor:
                self.seen.append(work(i, self.number, self.fails_at))
                return self.seen[0]

            self.last = af.while_loop(lambda i: i < 3, body, 0)
            with af.control_dependencies([self.last]):
                together = af.batched(lambda row: af.tanh(row) * 2, max_delay_s=0.05)(self.x)
            self.answer = af.sum(together)

    def feeds(self, number: int, fails_at: int = 9) -> dict[Any, Any]:
        return {self.number: number, self.fails_at: fails_at, self.x: np.full(1500, 0.5, np.float32)}


async def request(session: af.Session, service: Service, number: int, dice: Random) -> str:
    """Send a request; return how it ended."""
    fault = dice.choice(["kernel", "cancel", "deadline", "feed", "consumer"]) if dice.random() < FAULTS else ""
    feeds = service.feeds(number, dice.randrange(3) if fault == "kernel" else 9)
    options: dict[str, Any] = {"priority": number % 3, "timeout": 0.5 if fault == "deadline" else 30.0}
    if fault == "feed":
        feeds[service.x] = "no numbers"
    if fault == "consumer" or number % 16 == 0:
        async with aclosing(session.stream(service.seen[0], feeds, **options)) as items:
            async for _ in items:
                if fault:
                    break
        return fault or "streamed"
    run = asyncio.ensure_future(session.run(service.answer, feeds, **options))
    if fault == "cancel":
        asyncio.get_running_loop().call_later(dice.random() * 1.5, run.cancel)
    try:
        assert await run == pytest.approx(1500 * 2 * np.tanh(0.5), rel=1e-4)
        return "answered"
    except (af.AsyncflowError, asyncio.CancelledError) as error:
        return type(error).__name__


async def day(hours: int) -> tuple[list[Level], Counter[str], Service]:
    dice = Random(61)
    loop = asyncio.get_running_loop()
    service = Service()
    ends: Counter[str] = Counter()
    levels: list[Level] = []
    number = 0

    async def counted(each: int) -> None:
        ends[await request(session, service, each, dice)] += 1

    async with af.Session(service.graph, max_runs=4, max_queued=16, max_queued_bytes=100_000) as session:
        for hour in range(1, hours + 1):
            async with asyncio.TaskGroup() as group:
                while loop.time() < hour * HOUR_S - 60:
                    await asyncio.sleep(dice.expovariate(1 / 60))
                    for _ in range(dice.choice((1, 1, 2, 40)) if dice.random() < 0.2 else 1):
                        group.create_task(counted(number := number + 1))
            await asyncio.sleep(hour * HOUR_S - loop.time())
            levels.append(level(session))
    assert ends.total() == number
    return levels, ends, service


@pytest.mark.slow
def test_a_day_with_faults_is_flat() -> None:
    """Fault F61: tasks, files, threads, bytes, plans and places, hour by hour; every run begins and ends once."""
    with virtual_clock(seed=61) as clock:
        levels, ends, service = clock.run(day(24))
    settled = levels[3:]
    assert len({each[:-1] for each in settled}) == 1, settled
    objects = [each.objects for each in settled]
    assert max(objects) - min(objects) < 300, objects
    assert {"answered", "streamed", "consumer"} <= set(ends), ends
    assert {"KernelError", "CancelledError", "DeadlineExceeded", "FeedError", "OverloadedError"} <= set(ends), ends
    assert ends["answered"] + ends["streamed"] >= 0.5 * ends.total()
    assert set(service.begun.values()) == {1}


async def day_of_steps(hours: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Level], Counter[str]]:
    """A model that trains, publishes steps, and in another session is served from the latest one."""
    dice = Random(61)
    loop = asyncio.get_running_loop()
    ends: Counter[str] = Counter()
    levels: list[Level] = []
    sync = os.fsync

    def full(descriptor: int) -> None:
        if fault == "disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with af.Graph() as graph:
        w, n = af.Variable(np.zeros(1000, np.float32), name="w"), af.Variable(0, name="n")
        train = [w.assign_add(np.ones(1000, np.float32)), n.assign_add(1)]
        both = af.sum(w) + af.astype(n.read(), "float32")
    fault = ""
    saver = af.Saver(root, keep=3)
    async with af.Session(graph, restore=saver) as trainer, af.Session(graph) as server:
        for step in range(hours * 20):
            fault = dice.choice(["disk", "cancel", "damage", "late"]) if dice.random() < 10 * FAULTS else ""
            await trainer.run(train)
            saving = asyncio.ensure_future(saver.save(step))
            if fault == "cancel":
                loop.call_soon(saving.cancel)
            try:
                path = await saving
                if fault == "damage":
                    file = path / "variables.safetensors"
                    file.write_bytes(file.read_bytes()[:-1])
                swapping = server.swap_variables(root)
                names = await (asyncio.wait_for(swapping, 0) if fault == "late" else swapping)
                ends[f"swapped {len(names)}"] += 1
            except (af.CheckpointError, asyncio.CancelledError, TimeoutError) as error:
                ends[type(error).__name__] += 1
            value = await server.run(both)
            assert value % 1001 == 0
            await asyncio.sleep(180)
            if fault == "damage":
                shutil.rmtree(step_path(root, step))
            if step % 20 == 19:
                for thread in set(threading.enumerate()) - {threading.current_thread()}:
                    thread.join(PATIENCE_S)  # of what was cancelled
                levels.append(level(server))
    return levels, ends


@pytest.mark.slow
def test_a_day_of_checkpoints_is_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F61, F49: tasks, files, threads, bytes and plans, hour by hour; every step that is left is complete."""
    with virtual_clock(seed=61) as clock:
        levels, ends = clock.run(day_of_steps(24, tmp_path, monkeypatch))
    settled = levels[3:]
    assert len({each[:-1] for each in settled}) == 1, settled
    objects = [each.objects for each in settled]
    assert max(objects) - min(objects) < 300, objects
    assert set(ends) == {"swapped 2", "CheckpointError", "CancelledError", "TimeoutError"}, ends
    assert ends["swapped 2"] > 0.8 * ends.total()
    left = steps(tmp_path)
    assert 1 <= len(left) <= 3
    assert sorted(os.listdir(tmp_path)) == sorted(step_path(tmp_path, step).name for step in left)
    for step in left:
        path = step_path(tmp_path, step)
        assert not verify(path, read_manifest(path))
