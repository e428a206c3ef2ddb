"""A model of a run: tasks on devices, values that go from one to another, memory; and the time of it all.

Each device runs its tasks one by one, in the order in which they become ready. A value goes once to each device that
needs it, as soon as it exists: the runtime does the same.

Tasks of cards are launched by a thread of the host, one after the other, and begin no earlier. That thread also sends
values, and takes its time for every card that a run uses. All cards of a process have the same thread, so that another
card gains nothing where it is busy all the time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

SPREAD = -1
"""The device of a task that runs on several."""


@dataclass(slots=True, kw_only=True)
class Value:
    """A result of one task, or something there from the start.

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
    """A task's use of several devices.

    Attributes:
        loads: ns on each device.
        hosts: ns of each thread of the host.
        span: ns from its start to its end, with all devices free.
        inputs: by value, the device that needs it; None if none does.
        outputs: the device of each output; None: everywhere.
    """

    loads: Sequence[float]
    hosts: Sequence[float] = ()
    span: float
    inputs: dict[int, int | None]
    outputs: Sequence[int | None]


@dataclass(slots=True, kw_only=True)
class Task:
    """Work that runs on one device, that of its group; or, with `spread`, on several that are settled.

    Attributes:
        group: tasks of one group share a device.
        times: ns on each device.
        launches: ns of launching it on each device, by the thread that drives the device.
        part: the iteration that it belongs to.
        inputs: values, each once.
        waits: tasks that it runs after, without taking a value.
        outputs: values.
        workspace: bytes held only while it runs.
        spread: None for a task on one device.
    """

    group: int
    times: Sequence[float]
    launches: Sequence[float] = ()
    part: int = 0
    inputs: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    workspace: float = 0.0
    spread: Spread | None = None


@dataclass(slots=True, kw_only=True)
class Group:
    """Tasks that share a device: one of `allowed` (none for a spread task), which holds `held` bytes for them."""

    allowed: Sequence[int]
    held: float = 0.0
    tasks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Threads of the host that launch the tasks of devices.

    Attributes:
        count: of the threads.
        of: the thread of each device; None for a device that computes by itself.
        opening: ns of a thread for each device that has a task, in each iteration.
        sending: ns of a thread for each value that goes from the device to another.
    """

    count: int
    of: Sequence[int | None]
    opening: Sequence[float]
    sending: Sequence[float]


NO_HOSTS: Final = Hosts(count=0, of=(), opening=(), sending=())


@dataclass(slots=True, kw_only=True)
class Problem:
    """Tasks in an order in which they can run, and the devices.

    Attributes:
        first_part: number of tasks before the repeated ones; the iterations of a loop, such as 2 of 4.
        repeats: how often what the other tasks add to the time is counted beyond once.
        limits: bytes each device may hold; None is no limit.
        transfer: ns to send a number of bytes from one device to another.
        hosts: what launches the tasks; none where no task is launched.
        trials: maximum number of tasks simulated in all, in a search that moves one group after the other.
    """

    tasks: list[Task] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    limits: Sequence[float | None]
    transfer: Callable[[float, int, int], float]
    trials: int
    hosts: Hosts = NO_HOSTS
    first_part: int = 0
    repeats: float = 0.0


class Places:
    """Places of values, given the places of groups (a group not placed yet is nowhere: None)."""

    def __init__(self, problem: Problem, devices: Sequence[int | None]) -> None:
        self.problem = problem
        self.devices = devices

    def of(self, value: Value) -> int | None:
        """The device that makes the value, or where it is from the start; None for everywhere."""
        # A loop variable is where the previous iteration has made it.
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


class LiveBytes:
    """Bytes live on each device. A value is live from when it is made, or sent there, to its last use."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.used = [0.0] * len(problem.limits)
        self.overflow = 0.0
        self.held: set[int] = set()
        self.holders: dict[int, set[int]] = {}
        self.uses = [len(value.users) + value.is_kept for value in problem.values]

    def needs(self, task: Task, device: int) -> float:
        """The bytes that the device would have to hold more while the task runs."""
        values = self.problem.values
        # Inputs already on the device need no more memory; bytes held by the group count with its first task.
        more = task.workspace + sum(values[output].nbytes for output in task.outputs)
        more += sum(values[i].nbytes for i in task.inputs if device not in self.holders.get(i, ()))
        return more if task.group in self.held else more + self.problem.groups[task.group].held

    def room(self, device: int) -> float:
        """Bytes the device may hold more."""
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
            # After its last use a value is freed on every device.
            if self.uses[index] == 0:
                for holder in self.holders.pop(index):
                    self.used[holder] -= values[index].nbytes


class Execution:
    """Tasks, each run once all that it waits for has been: where and when.

    Attributes:
        places: by the devices that groups are on, of which more may become known as it goes on.
        memory: None if no device has a limit.
        ends: when each task ends, in ns.
        free: when each device has ended its last task.
        hosts: when each thread of the host has launched its last task.
    """

    def __init__(self, problem: Problem, devices: Sequence[int | None]) -> None:
        self.problem = problem
        self.places = Places(problem, devices)
        self.memory = LiveBytes(problem) if any(limit is not None for limit in problem.limits) else None
        self.ends = [0.0] * len(problem.tasks)
        self.free = [0.0] * len(problem.limits)
        self.hosts = [0.0] * problem.hosts.count
        self._known: set[tuple[str, int, int]] = set()

    def ready(self, task: Task, device: int | None) -> float:
        """Return the time at which all inputs of the task are there, if it is on `device`."""
        places, values, ends = self.places, self.problem.values, self.ends
        ready = 0.0
        for before in task.waits:
            ready = max(ready, ends[before])
        for i in task.inputs:
            value = values[i]
            there = 0.0 if value.maker is None else ends[value.maker]
            source, needed = places.of(value), task.spread.inputs[i] if task.spread else device
            if source != needed:
                there += places.transfer(value, source, needed)
            ready = max(ready, there)
        return ready

    def run(self, index: int, ready: float, *, contend: bool = True) -> None:
        """Run the task on its group's device, once inputs and devices are ready; or at once, unless tasks `contend`."""
        task = self.problem.tasks[index]
        device = self.places.devices[task.group]
        # Without contention, times depend on the longest path alone.
        free = self.free if contend else [0.0] * len(self.free)
        # The thread launches a task before its inputs are ready, and is late only if it is overloaded.
        if self.hosts and contend:
            ready = max(ready, self._launched(task, device))
        if task.spread is not None:
            finish = ready + task.spread.span
            for used, load in enumerate(task.spread.loads):
                # The task ends with its last device, but no earlier than if all of its devices were free.
                if load > 0.0:
                    free[used] = max(free[used], ready) + load
                    finish = max(finish, free[used])
        else:
            assert device is not None
            free[device] = finish = max(ready, free[device]) + task.times[device]
            if self.memory is not None:
                self.memory.run(task, device)
        self.ends[index] = finish

    def _launched(self, task: Task, device: int | None) -> float:
        """Return the time at which a thread has launched the task; of a spread task, its first part."""
        hosts, free = self.problem.hosts, self.hosts
        for number, more in enumerate(host_ns(self.places, task, device, self._known)):
            free[number] += more
        if task.spread is not None or device is None:
            return 0.0
        thread = hosts.of[device]
        return 0.0 if thread is None else free[thread]


def host_ns(places: Places, task: Task, device: int | None, known: set[tuple[str, int, int]]) -> Sequence[float]:
    """Return the ns that each thread of the host takes for a task.

    Args:
        places: of the values.
        task: on `device`, or spread.
        device: None for a spread task.
        known: the devices that were used and the values that were sent; the task's are added.
    """
    problem, hosts = places.problem, places.problem.hosts
    taken = [0.0] * hosts.count if task.spread is None else list(task.spread.hosts)
    if device is not None and task.spread is None and task.launches:
        thread, opened = hosts.of[device], ("device", device, task.part)
        if thread is not None:
            # Each used device adds a partition of the run, which costs the thread time however little it computes.
            taken[thread] += task.launches[device]
            if opened not in known:
                known.add(opened)
                taken[thread] += hosts.opening[device]
    for i in task.inputs:
        value = problem.values[i]
        needed = device if task.spread is None else task.spread.inputs.get(i)
        source = places.of(value)
        if source is None or needed is None or source == needed or ("value", i, needed) in known:
            continue
        # A value is sent once to a device, however many tasks use it there.
        known.add(("value", i, needed))
        thread = hosts.of[source]
        if thread is not None:
            taken[thread] += value.share * hosts.sending[source]
    return taken


def simulate(
    problem: Problem, devices: Sequence[int], n_tasks: int | None = None, *, contend: bool = True
) -> tuple[float, float, int]:
    """Return the end of the last of the first `n_tasks` tasks, in ns.

    The result also has the bytes by which a device exceeds its limit, and the number of values that go to another
    device. Unless tasks `contend`, a device runs any number of them at a time.
    """
    tasks, values = problem.tasks[:n_tasks], problem.values
    execution = Execution(problem, devices)
    followers = edges(tasks)
    missing = [sum(values[i].maker is not None for i in task.inputs) + len(task.waits) for task in tasks]
    queue = [
        (execution.ready(task, devices[task.group]), index) for index, task in enumerate(tasks) if not missing[index]
    ]
    heapq.heapify(queue)
    crossings: set[tuple[int, int]] = set()
    # The earliest task goes first, whatever its device: all devices share one clock and one host.
    while queue:
        ready, index = heapq.heappop(queue)
        execution.run(index, ready, contend=contend)
        users = followers[index].copy()
        for output in tasks[index].outputs:
            source = execution.places.of(values[output])
            for user in values[output].users:
                if user < len(tasks):
                    users.append(user)
                    other = tasks[user]
                    needed = other.spread.inputs[output] if other.spread else devices[other.group]
                    if needed is not None and source is not None and needed != source:
                        crossings.add((output, needed))
        # A task is queued once, when its last predecessor has run.
        for user in users:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(queue, (execution.ready(tasks[user], devices[tasks[user].group]), user))
    # A run ends no earlier than the thread that launches it.
    memory = execution.memory
    return (
        max((*execution.ends, *execution.hosts), default=0.0),
        max(0.0, memory.overflow) if memory else 0.0,
        len(crossings),
    )


def loads(problem: Problem, devices: Sequence[int], first: int = 0) -> list[float]:
    """The ns of work on each device, of all tasks from the `first` one on."""
    total = [0.0] * len(problem.limits)
    for task in problem.tasks[first:]:
        if task.spread is None:
            total[devices[task.group]] += task.times[devices[task.group]]
        else:
            total = [load + more for load, more in zip(total, task.spread.loads, strict=True)]
    return total


def host_loads(problem: Problem, devices: Sequence[int], first: int = 0) -> list[float]:
    """The ns of work of each thread of the host, of all tasks from the `first` one on."""
    total = [0.0] * problem.hosts.count
    # Fast path: most problems have no such thread, and a search calls this often.
    if total:
        places, known = Places(problem, devices), set[tuple[str, int, int]]()
        for task in problem.tasks[first:]:
            device = None if task.spread is not None else devices[task.group]
            total = [load + more for load, more in zip(total, host_ns(places, task, device, known), strict=True)]
    return total


def edges(tasks: Sequence[Task]) -> list[list[int]]:
    """The tasks that wait for each without taking a value."""
    followers: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for before in task.waits:
            followers[before].append(index)
    return followers
