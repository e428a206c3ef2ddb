"""Quality of placement: compared with the best of all placements, in a simulation of its own."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

import asyncflow as af
from tests.compiler.placing import MS, devices, placed, work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.devices.protocol import Device


@dataclass(frozen=True)
class Job:
    """A node: its needs, its time, the size of its value, and the jobs that it is colocated with."""

    needs: tuple[int, ...]
    ms: float
    floats: int
    partner: int | None = None


def run(jobs: Sequence[Job], where: Sequence[int], on: Sequence[Device]) -> float:
    """Return the time when all jobs are done. A device takes the job that was ready first; every transfer has its own
    link.
    """
    done: dict[int, float] = {}
    free = [0.0] * len(on)
    waiting = set(range(len(jobs)))
    while waiting:
        ready: list[tuple[float, int]] = []
        for index in waiting:
            if not all(need in done for need in jobs[index].needs):
                continue
            here = where[index]
            arrivals = [0.0]
            for need in jobs[index].needs:
                crosses = where[need] != here
                sent = on[where[need]].transfer_ns(4.0 * jobs[need].floats, on[here]) if crosses else 0.0
                arrivals.append(done[need] + sent)
            ready.append((max(arrivals), index))
        time, index = min(ready)
        device = where[index]
        free[device] = max(free[device], time) + on[device].kernel_ns(jobs[index].ms * MS, 0.0)
        done[index] = free[device]
        waiting.remove(index)
    return max(done.values())


def best(jobs: Sequence[Job], on: Sequence[Device]) -> float:
    """The least time over all placements that keep partners together."""
    return min(
        run(jobs, where, on)
        for where in itertools.product(range(len(on)), repeat=len(jobs))
        if all(job.partner is None or where[job.partner] == where[index] for index, job in enumerate(jobs))
    )


def found(jobs: Sequence[Job], on: Sequence[Device]) -> list[int]:
    """Return the devices on which `place` puts the jobs."""
    with af.Graph() as graph:
        made: list[af.Tensor] = []
        for job in jobs:
            needs = [made[need] for need in job.needs]
            if job.partner is None:
                made.append(work(*needs, ms=job.ms, shape=(job.floats,)))
            else:
                with af.colocate_with(made[job.partner]):
                    made.append(work(*needs, ms=job.ms, shape=(job.floats,)))
    result = placed(graph, made, on)
    names = [device.name for device in on]
    return [names.index(result[tensor]) for tensor in made]


def random_jobs(choose: random.Random, n: int, *, partners: bool) -> list[Job]:
    jobs = []
    for index in range(n):
        needs = tuple(sorted(choose.sample(range(index), choose.randint(0, min(index, 3)))))
        partner = choose.randrange(index) if partners and index and choose.random() < 0.25 else None
        ms = choose.choice([0.05, 0.3, 1.0, 1.0, 2.0, 5.0]) if index else 1.0
        jobs.append(Job(needs, ms, choose.choice([1, 1_000, 50_000]), partner))
    return jobs


@pytest.mark.parametrize("seed", range(60))
def test_within_1_3_of_the_best(seed: int) -> None:
    choose = random.Random(seed)
    n_devices = choose.choice([2, 3])
    jobs = random_jobs(choose, choose.randint(3, 8 if n_devices == 2 else 6), partners=seed % 2 == 1)
    latency, rate = choose.choice([1e3, 5e4, 5e5]), choose.choice([0.0, 1.0, 10.0])
    on = [
        device
        for index in range(n_devices)
        for device in devices(
            f"sim:{index}",
            slowness=choose.choice([0.5, 1.0, 2.0]) if seed % 3 == 0 else 1.0,
            latency=latency,
            ns_per_byte=rate,
        )
    ]
    where = found(jobs, on)
    for index, job in enumerate(jobs):
        assert job.partner is None or where[index] == where[job.partner]
    assert run(jobs, where, on) <= 1.3 * best(jobs, on)


def test_the_simulation_knows_bad_placements() -> None:
    jobs = [Job((), 1.0, 1), Job((), 1.0, 1), Job((0, 1), 1.0, 1)]
    on = devices("sim:0", "sim:1", latency=1e5)
    assert run(jobs, [0, 0, 0], on) == pytest.approx(3.0 * MS, rel=0.01)
    assert run(jobs, [0, 1, 0], on) == pytest.approx(2.1 * MS, rel=0.01) == best(jobs, on)
    assert run(jobs, [0, 0, 1], on) == pytest.approx(3.1 * MS, rel=0.01)


def test_large_graphs_use_their_devices() -> None:
    choose = random.Random(7)
    jobs = [
        Job(tuple(choose.sample(range(max(0, index - 40), index), 2)) if index >= 40 else (), 1.0, 10)
        for index in range(600)
    ]
    on = devices(*(f"sim:{index}" for index in range(4)))
    alone = run(jobs, [0] * len(jobs), on)
    assert run(jobs, found(jobs, on), on) < alone / 3.2


def chains(n: int, length: int) -> list[Job]:
    """Chains of long jobs and short ones in turn, of large values, and a last job that needs a number of each."""
    jobs, ends = [Job((), 0.2, 16_000_000)], []
    for _ in range(n):
        jobs.append(Job((0,), 0.2, 16_000_000))
        for _ in range(length):
            jobs.append(Job((0, len(jobs) - 1), 10.0, 16_000_000))
            jobs.append(Job((len(jobs) - 1,), 0.2, 16_000_000))
        jobs.append(Job((len(jobs) - 1,), 0.2, 1))
        ends.append(len(jobs) - 1)
    return [*jobs, Job(tuple(ends), 0.01, 1)]


def machine(*slowness: float) -> list[Device]:
    """Return devices with fast links, each slower than the usual one by its factor."""
    each = [
        devices(f"sim:{index}", slowness=slow, latency=2e3, ns_per_byte=0.02) for index, slow in enumerate(slowness)
    ]
    return [device for devices_of in each for device in devices_of]


@pytest.mark.parametrize(
    ("slowness", "without_slow"),
    [((1, 1, 1, 4.2), (1, 1, 1)), ((4.2, 1, 1, 1), (1, 1, 1)), ((1, 1, 4.2), (1, 1)), ((1, 4, 4, 4), (1,))],
)
def test_more_devices_are_not_worse_than_the_fastest_of_them(
    slowness: tuple[float, ...], without_slow: tuple[float, ...]
) -> None:
    """A slow card beside fast ones is only used if that helps."""
    jobs, all_of_them, fast = chains(4, 6), machine(*slowness), machine(*without_slow)
    assert run(jobs, found(jobs, all_of_them), all_of_them) <= 1.01 * run(jobs, found(jobs, fast), fast)


@pytest.mark.parametrize("n_devices", [2, 3, 4, 5])
def test_one_device_more_is_not_worse(n_devices: int) -> None:
    """Work that does not divide by the number of devices."""
    jobs, on = chains(4, 6), machine(*[1.0] * n_devices)
    fewer = on[:-1]
    assert run(jobs, found(jobs, on), on) <= 1.01 * run(jobs, found(jobs, fewer), fewer)
