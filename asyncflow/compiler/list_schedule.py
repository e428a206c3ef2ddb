"""Which device each task of a directed acyclic graph should run on: a simulated execution and a search over it.

`simulate` plays what the runtime does: each device runs its tasks one by one, in the order in which they become ready,
and a value goes to a device that needs it once, as soon as it is there. `search` puts tasks where they would finish
first, those with the longest way to the end first (HEFT, Topcuoglu 2002; white paper 2015 §3.2.1 without the ranks),
compares that with keeping everything together, and tries to better small problems by moving one group at a time.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

GAIN = 0.9
"""Tasks are only spread if that takes at most this part of the time they take together."""

_AS_GOOD = 1.03
"""Of placements that take so little longer than the best, the one with the fewest transfers is taken."""

_WORTH_A_MOVE = 1.005

_MOST_TRIALS = 60_000
"""A search by moving groups may simulate so many tasks in all."""

_MOST_GATHERINGS = 4
"""So many devices are tried as the one where everything is kept together."""

SPREAD = -1
"""The device of a task that runs on several."""


@dataclass(slots=True, kw_only=True)
class Value:
    """What one task makes, or what is there from the start.

    Attributes:
        nbytes: its size.
        maker: the task that makes it; None if it is there from the start, on `home`.
        home: a device; None: everywhere.
        like: a value; this one is there from the start on the device that makes that one (it is what that one was an
            iteration ago).
        slot: which output of its maker it is.
        share: which part of the cost of sending it counts; what a loop uses is sent once for all its iterations.
        is_kept: it stays live after its last use, as constants do.
        users: tasks.
    """

    nbytes: float
    maker: int | None = None
    home: int | None = None
    like: int | None = None
    slot: int = 0
    share: float = 1.0
    is_kept: bool = False
    users: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Spread:
    """How a task that runs on several devices uses them.

    Attributes:
        loads: ns on each device.
        span: ns from its start to its end, with all devices free.
        inputs: by value, the device that needs it; None if none does.
        outputs: the device of each output; None: everywhere.
    """

    loads: Sequence[float]
    span: float
    inputs: dict[int, int | None]
    outputs: Sequence[int | None]


@dataclass(slots=True, kw_only=True)
class Task:
    """Work that runs on one device, that of its group; or, with `spread`, on several that are settled.

    Attributes:
        group: tasks of one group share a device.
        times: ns on each device.
        inputs: values, each once.
        waits: tasks that it runs after, without taking a value.
        outputs: values.
        workspace: bytes held only while it runs.
        spread: None for a task on one device.
    """

    group: int
    times: Sequence[float]
    inputs: list[int]
    waits: list[int]
    outputs: list[int]
    workspace: float = 0.0
    spread: Spread | None = None


@dataclass(slots=True, kw_only=True)
class Group:
    """Tasks that share a device: one of `allowed` (none for a spread task), which holds `held` bytes for them."""

    allowed: Sequence[int]
    held: float = 0.0
    tasks: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Problem:
    """Tasks in an order in which they can run, and the devices.

    Attributes:
        first_part: how many tasks come before those that are repeated; the iterations of a loop, such as 2 of 4.
        repeats: how often what the other tasks add to the time is counted beyond once.
        limits: bytes each device may hold; None is no limit.
        transfer: ns to send so many bytes from one device to another.
    """

    tasks: list[Task]
    values: list[Value]
    groups: list[Group]
    limits: Sequence[float | None]
    transfer: Callable[[float, int, int], float]
    first_part: int = 0
    repeats: float = 0.0


@dataclass(slots=True, kw_only=True)
class Solution:
    """A device for each group.

    Attributes:
        devices: by group; `SPREAD` for spread tasks.
        span: ns of a simulated run, with what is repeated.
        overflow: bytes by which devices exceed their limits in it.
        crossings: how often a value goes to another device.
        finishes: by group, when it would end on each device, as seen when it was put on one; None if it had no choice.
        full: by group, the devices that had no room for it then.
        is_gathered: everything that has the choice is on one device.
    """

    devices: list[int]
    span: float
    overflow: float
    crossings: int
    finishes: list[dict[int, float] | None]
    full: list[tuple[int, ...]]
    is_gathered: bool = False

    @property
    def cost(self) -> tuple[float, float]:
        """Smaller is better."""
        return self.overflow, self.span


def search(problem: Problem) -> Solution:
    """The best placement found."""
    if all(len(group.allowed) < 2 for group in problem.groups):
        devices = [group.allowed[0] if group.allowed else SPREAD for group in problem.groups]
        return _evaluated(problem, devices)
    greedy = _Greedy(problem).run()
    gathered = _gathered(problem, greedy)
    found = [greedy, gathered, *_pipelines(problem, greedy)]
    overflow, span = min(solution.cost for solution in found)
    as_good = [solution for solution in found if solution.overflow <= overflow and solution.span <= _AS_GOOD * span]
    best = _improved(problem, min(as_good, key=lambda solution: solution.crossings))
    if gathered.overflow <= best.overflow and best.span > GAIN * gathered.span:
        return gathered
    return best


def _evaluated(problem: Problem, devices: list[int], like: Solution | None = None) -> Solution:
    span, overflow, crossings = simulate(problem, devices)
    if problem.repeats:
        span += problem.repeats * _added(problem, devices)
    n_groups = len(problem.groups)
    return Solution(
        devices=devices,
        span=span,
        overflow=overflow,
        crossings=crossings,
        finishes=[None] * n_groups if like is None else like.finishes,
        full=[()] * n_groups if like is None else like.full,
    )


def _added(problem: Problem, devices: Sequence[int]) -> float:
    """What the later part of the tasks adds to the time in the long run, when pipelines are full.

    That is the most work it gives to a device, or the way its tasks have to go one after the other.
    """
    loads = [0.0] * len(problem.limits)
    for task in problem.tasks[problem.first_part :]:
        if task.spread is None:
            loads[devices[task.group]] += task.times[devices[task.group]]
        else:
            loads = [load + more for load, more in zip(loads, task.spread.loads, strict=True)]
    first, both = (simulate(problem, devices, n, contend=False)[0] for n in (problem.first_part, None))
    return max(*loads, both - first)


def _gathered(problem: Problem, greedy: Solution) -> Solution:
    """The best of those that keep what is free to go anywhere on one device."""
    loads = [0.0] * len(problem.limits)
    for group in problem.groups:
        if len(group.allowed) == 1:
            loads[group.allowed[0]] += sum(problem.tasks[task].times[group.allowed[0]] for task in group.tasks)
    free = [group for group in problem.groups if len(group.allowed) > 1]
    total = [sum(problem.tasks[task].times[d] for group in free for task in group.tasks) for d in range(len(loads))]
    # Devices that ask for much anyway, being asked for, are the likelier place; the first one is always tried.
    likely = sorted(range(1, len(loads)), key=lambda d: (total[d] - loads[d], d))[: _MOST_GATHERINGS - 1]
    best: Solution | None = None
    for device in [0, *sorted(likely)]:
        if best is not None and total[device] + loads[device] >= best.span and best.overflow == 0:
            continue
        devices = [
            device if device in group.allowed else greedy.devices[index] for index, group in enumerate(problem.groups)
        ]
        tried = _evaluated(problem, devices, greedy)
        if best is None or tried.cost < best.cost:
            best = tried
    assert best is not None
    best.is_gathered = True
    return best


def _pipelines(problem: Problem, greedy: Solution) -> Iterator[Solution]:
    """Those that cut what is free into as many stages of equal work as there are devices, or fewer."""
    free = [index for index, group in enumerate(problem.groups) if len(group.allowed) > 1]
    free.sort(key=lambda index: problem.groups[index].tasks[0])
    work = {index: sum(min(problem.tasks[task].times) for task in problem.groups[index].tasks) for index in free}
    n_stages = min(len(problem.limits), len(free))
    total = sum(work.values())
    while n_stages > 1 and total > 0.0:
        devices, done = greedy.devices.copy(), 0.0
        for index in free:
            stage = min(n_stages - 1, int((done + work[index] / 2) * n_stages / total))
            done += work[index]
            if stage in problem.groups[index].allowed:
                devices[index] = stage
        yield _evaluated(problem, devices, greedy)
        n_stages //= 2


def _improved(problem: Problem, start: Solution) -> Solution:
    """Moves one group at a time for as long as that helps; large problems are left as they are."""
    free = [index for index, group in enumerate(problem.groups) if len(group.allowed) > 1]
    moves = sum(len(problem.groups[index].allowed) - 1 for index in free)
    budget = _MOST_TRIALS // max(1, len(problem.tasks))
    best = start
    improves = moves <= budget
    while improves:
        improves = False
        for index in free:
            for device in problem.groups[index].allowed:
                if device == best.devices[index]:
                    continue
                devices = best.devices.copy()
                devices[index] = device
                budget -= 1
                tried = _evaluated(problem, devices, start)
                if (tried.overflow, _WORTH_A_MOVE * tried.span) < best.cost:
                    best, improves = tried, True
        improves = improves and moves <= budget
    return best


# -- simulated execution ---------------------------------------------------------------------------------------------


class _Places:
    """Where values are, given where groups are (a group that is not placed yet is nowhere: None)."""

    def __init__(self, problem: Problem, devices: Sequence[int | None]) -> None:
        self.problem = problem
        self.devices = devices

    def of(self, value: Value) -> int | None:
        """The device that makes the value, or where it is from the start; None for everywhere."""
        if value.maker is None:
            if value.like is None:
                return value.home
            value = self.problem.values[value.like]
            assert value.maker is not None
        task = self.problem.tasks[value.maker]
        if task.spread is None:
            return self.devices[task.group]
        return task.spread.outputs[value.slot]

    def transfer(self, value: Value, source: int | None, target: int | None) -> float:
        """The ns until the value is there."""
        if source is None or target is None or source == target:
            return 0.0
        return value.share * self.problem.transfer(value.nbytes, source, target)


class _Memory:
    """Bytes live on each device. A value is live from when it is made, or sent there, to its last use."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.used = [0.0] * len(problem.limits)
        self.overflow = 0.0
        self.held: set[int] = set()
        self.holders: dict[int, set[int]] = {}
        self.uses = [len(value.users) + value.is_kept for value in problem.values]

    def needs(self, task: Task, device: int) -> float:
        """What the device would have to hold more while the task runs."""
        values = self.problem.values
        more = task.workspace + sum(values[output].nbytes for output in task.outputs)
        more += sum(values[i].nbytes for i in task.inputs if device not in self.holders.get(i, ()))
        return more if task.group in self.held else more + self.problem.groups[task.group].held

    def room(self, device: int) -> float:
        limit = self.problem.limits[device]
        return float("inf") if limit is None else limit - self.used[device]

    def run(self, task: Task, device: int) -> None:
        """The task runs: its outputs are made, and its inputs used."""
        self.overflow = max(self.overflow, self.needs(task, device) - self.room(device))
        values = self.problem.values
        if task.group not in self.held:
            self.held.add(task.group)
            self.used[device] += self.problem.groups[task.group].held
        for index in (*task.outputs, *task.inputs):
            holders = self.holders.setdefault(index, set())
            if device not in holders:
                holders.add(device)
                self.used[device] += values[index].nbytes
        for index in task.inputs:
            self.uses[index] -= 1
            if self.uses[index] == 0:
                for holder in self.holders.pop(index):
                    self.used[holder] -= values[index].nbytes


def simulate(
    problem: Problem, devices: Sequence[int], n_tasks: int | None = None, *, contend: bool = True
) -> tuple[float, float, int]:
    """When the last of the first `n_tasks` tasks ends, in ns.

    Also by how many bytes a device exceeds its limit, and how often a value goes to another device. Unless they
    `contend`, a device runs any number of tasks at a time.
    """
    tasks, values = problem.tasks[:n_tasks], problem.values
    places = _Places(problem, devices)
    memory = _Memory(problem) if any(limit is not None for limit in problem.limits) else None
    followers, missing, ready = _edges(tasks), [0] * len(tasks), [0.0] * len(tasks)
    arrived: dict[tuple[int, int], float] = {}
    for index, task in enumerate(tasks):
        missing[index] = sum(values[i].maker is not None for i in task.inputs) + len(task.waits)
        device = devices[task.group]
        for i in task.inputs:
            if values[i].maker is None:
                needed = task.spread.inputs[i] if task.spread else device
                ready[index] = max(ready[index], places.transfer(values[i], places.of(values[i]), needed))
    queue = [(ready[index], index) for index in range(len(tasks)) if missing[index] == 0]
    heapq.heapify(queue)
    idle = [0.0] * len(problem.limits)
    free = idle.copy()
    span = 0.0
    while queue:
        start, index = heapq.heappop(queue)
        task = tasks[index]
        device = devices[task.group]
        finish = _occupy(task, device, start, free if contend else idle.copy())
        if memory is not None and task.spread is None:
            memory.run(task, device)
        span = max(span, finish)
        for output in task.outputs:
            value = values[output]
            source = places.of(value)
            for user in value.users:
                if user >= len(tasks):
                    continue
                other = tasks[user]
                needed = other.spread.inputs[output] if other.spread else devices[other.group]
                there = finish
                if needed is not None and source is not None and needed != source:
                    key = (output, needed)
                    if key not in arrived:
                        arrived[key] = finish + places.transfer(value, source, needed)
                    there = arrived[key]
                _arrive(user, there, ready, missing, queue)
        for user in followers[index]:
            _arrive(user, finish, ready, missing, queue)
    return span, max(0.0, memory.overflow) if memory is not None else 0.0, len(arrived)


def _edges(tasks: Sequence[Task]) -> list[list[int]]:
    """The tasks that wait for each without taking a value."""
    followers: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for before in task.waits:
            followers[before].append(index)
    return followers


def _arrive(user: int, time: float, ready: list[float], missing: list[int], queue: list[tuple[float, int]]) -> None:
    ready[user] = max(ready[user], time)
    missing[user] -= 1
    if missing[user] == 0:
        heapq.heappush(queue, (ready[user], user))


def _occupy(task: Task, device: int, start: float, free: list[float]) -> float:
    """Runs the task when it and its devices are ready; returns when it ends."""
    if task.spread is None:
        free[device] = finish = max(start, free[device]) + task.times[device]
        return finish
    finish = start + task.spread.span
    for used, load in enumerate(task.spread.loads):
        if load > 0.0:
            free[used] = max(free[used], start) + load
            finish = max(finish, free[used])
    return finish


# -- greedy ----------------------------------------------------------------------------------------------------------


class _Greedy:
    """Puts groups where their first task, and with it the work of all others, would finish first.

    `promised` is the work of the groups on each device, done or not.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.groups = groups = problem.groups
        self.devices = [group.allowed[0] if len(group.allowed) == 1 else None for group in groups]
        self.places = _Places(problem, self.devices)
        self.memory = _Memory(problem) if any(limit is not None for limit in problem.limits) else None
        self.free = [0.0] * len(problem.limits)
        self.promised = [0.0] * len(problem.limits)
        self.finish = [0.0] * len(problem.tasks)
        self.finishes: list[dict[int, float] | None] = [None] * len(problem.groups)
        self.full: list[tuple[int, ...]] = [()] * len(problem.groups)

    def run(self) -> Solution:
        for index in self._order():
            task = self.problem.tasks[index]
            device = self.devices[task.group]
            if task.spread is None and device is None:
                self.devices[task.group] = device = self._choose(task)
                self.promised[device] += self._work(task.group, device)
            start = self._start(task, device)
            self.finish[index] = _occupy(task, SPREAD if device is None else device, start, self.free)
            if self.memory is not None and device is not None:
                self.memory.run(task, device)
        devices = [SPREAD if device is None else device for device in self.devices]
        solution = _evaluated(self.problem, devices)
        solution.finishes, solution.full = self.finishes, self.full
        return solution

    def _order(self) -> list[int]:
        """By the longest way to the end, which no task has a shorter one of than those that wait for it."""
        tasks, values = self.problem.tasks, self.problem.values
        followers = _edges(tasks)
        ranks = [0.0] * len(tasks)
        far = len(self.problem.limits) - 1
        for index in range(len(tasks) - 1, -1, -1):
            task = tasks[index]
            longest = max((ranks[user] for user in followers[index]), default=0.0)
            for output in task.outputs:
                value = values[output]
                if value.users:
                    sent = value.share * self.problem.transfer(value.nbytes, 0, far)
                    longest = max(longest, sent + max(ranks[user] for user in value.users))
            ranks[index] = longest + (task.spread.span if task.spread else min(task.times))
        return sorted(range(len(tasks)), key=lambda index: (-ranks[index], index))

    def _choose(self, task: Task) -> int:
        group = self.groups[task.group]
        allowed = group.allowed
        if self.memory is not None:
            needs = {device: self.memory.needs(task, device) for device in allowed}
            fitting = [device for device in allowed if needs[device] <= self.memory.room(device)]
            self.full[task.group] = tuple(device for device in allowed if device not in fitting)
            allowed = fitting or [max(allowed, key=lambda device: self._room(device) - needs[device])]
        rest = {device: self._work(task.group, device) for device in allowed}
        ends = {
            device: rest[device] + max(self._start(task, device), self.free[device], self.promised[device])
            for device in allowed
        }
        self.finishes[task.group] = ends
        best = min(ends.values())
        if not any(rest.values()):
            # Work of no time goes where its first input is, rather than where it happens to be as early.
            home = self._first_home(task)
            if home is not None and ends.get(home, best + 1.0) <= best:
                return home
        return next(device for device, end in ends.items() if end <= best)

    def _work(self, group: int, device: int) -> float:
        return sum(self.problem.tasks[member].times[device] for member in self.groups[group].tasks)

    def _room(self, device: int) -> float:
        return float("inf") if self.memory is None else self.memory.room(device)

    def _first_home(self, task: Task) -> int | None:
        """Where the first input is that is in one place, or else the first task that it runs after."""
        homes = [self.places.of(self.problem.values[i]) for i in task.inputs]
        homes += [self.devices[self.problem.tasks[before].group] for before in task.waits]
        return next((home for home in homes if home is not None), None)

    def _start(self, task: Task, device: int | None) -> float:
        """When all inputs are there."""
        start = max((self.finish[before] for before in task.waits), default=0.0)
        for i in task.inputs:
            value = self.problem.values[i]
            needed = task.spread.inputs[i] if task.spread else device
            made = 0.0 if value.maker is None else self.finish[value.maker]
            start = max(start, made + self.places.transfer(value, self.places.of(value), needed))
        return start
