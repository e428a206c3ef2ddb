"""Device for each task: a search that judges by a simulated execution.

Tasks are put where they would finish first, in order of their longest path to the end (HEFT, Topcuoglu 2002; white
paper 2015 §3.2.1 without the ranks). The result is compared with keeping everything together, with cutting the tasks
into stages, and with doing the same on the fastest devices only. Small problems are then improved by moving one group
at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncflow.compiler.placement.simulated_execution import (
    SPREAD,
    Execution,
    Problem,
    Task,
    edges,
    host_loads,
    loads,
    simulate,
)

GAIN = 0.9
"""Largest share of the time on one device for which spreading tasks pays."""

_AS_GOOD = 1.03
"""Of placements that take so little longer than the best, the one with the fewest transfers is taken."""

_WORTH_A_MOVE = 1.005

_MOST_GATHERINGS = 4
"""Maximum number of devices tried as the device that keeps everything together."""

_MOST_ON_FEWER = 60_000
"""Maximum number of tasks, times allowed devices, placed on fewer devices than there are."""


@dataclass(slots=True, kw_only=True)
class Solution:
    """A device for each group.

    Attributes:
        devices: by group; `SPREAD` for spread tasks.
        span: ns of a simulated run, repetitions included.
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
    found = [greedy, gathered, *_pipelines(problem, greedy, range(len(problem.limits)))]
    for fewer in _fewer(problem):
        # A choice that is best task by task may use a slow device, or one too many.
        on_fewer = _Greedy(problem, fewer).run()
        found += [on_fewer, *_pipelines(problem, on_fewer, sorted(fewer))]
    # Improve the solution with the fewest transfers first, as large problems leave no time for a second.
    found.sort(key=lambda solution: solution.cost)
    found = _improved(problem, [_with_fewest_crossings(found), *found])
    best = _with_fewest_crossings(found)
    if gathered.overflow <= best.overflow and best.span > GAIN * gathered.span:
        return gathered
    return best


def _with_fewest_crossings(found: Sequence[Solution]) -> Solution:
    """Return the solution with fewest crossings among those about as good as the best."""
    overflow, span = min(solution.cost for solution in found)
    as_good = (solution for solution in found if solution.overflow <= overflow and solution.span <= _AS_GOOD * span)
    return min(as_good, key=lambda solution: solution.crossings)


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
    """The time that the later part of the tasks adds in the long run, when pipelines are full.

    It is the most work of a device or a thread of the host, or the longest way of tasks one after the other.
    """
    first, both = (simulate(problem, devices, n, contend=False)[0] for n in (problem.first_part, None))
    # The host is another resource: a loop is no faster than its thread launches it.
    part = problem.first_part
    return max(*loads(problem, devices, part), *host_loads(problem, devices, part), both - first)


def _fewer(problem: Problem) -> Iterator[frozenset[int]]:
    """Yield the fastest 2 devices, 3 and so on, but not all; first the sets that leave out slower devices."""
    times = {d: sum(task.times[d] for task in problem.tasks) for d in range(len(problem.limits))}
    fastest = sorted(times, key=lambda device: (times[device], device))
    sizes = range(2, len(fastest))
    budget = _MOST_ON_FEWER
    for size in sorted(sizes, key=lambda size: (times[fastest[size - 1]] == times[fastest[size]], -size)):
        budget -= size * len(problem.tasks)
        if budget < 0:
            return
        yield frozenset(fastest[:size])


def _gathered(problem: Problem, greedy: Solution) -> Solution:
    """Return the best solution that keeps all free groups on one device."""
    pinned = [0.0] * len(problem.limits)
    for group in problem.groups:
        if len(group.allowed) == 1:
            pinned[group.allowed[0]] += sum(problem.tasks[task].times[group.allowed[0]] for task in group.tasks)
    free = [group for group in problem.groups if len(group.allowed) > 1]
    total = [sum(problem.tasks[task].times[d] for group in free for task in group.tasks) for d in range(len(pinned))]
    # Devices with much pinned work are the likelier choice; the first device is always tried.
    likely = sorted(range(1, len(pinned)), key=lambda d: (total[d] - pinned[d], d))[: _MOST_GATHERINGS - 1]
    best: Solution | None = None
    for device in [0, *sorted(likely)]:
        if best is not None and total[device] + pinned[device] >= best.span and best.overflow == 0:
            continue
        devices = [
            device if device in group.allowed else greedy.devices[index] for index, group in enumerate(problem.groups)
        ]
        tried = _evaluated(problem, devices, greedy)
        if best is None or tried.cost < best.cost:
            best = tried
    assert best is not None
    # Shown in the reasons for nodes.
    best.is_gathered = True
    return best


def _pipelines(problem: Problem, greedy: Solution, usable: Sequence[int]) -> Iterator[Solution]:
    """Yield solutions that cut the free groups into as many stages of equal work as there are usable devices, or
    fewer.
    """
    free = [index for index, group in enumerate(problem.groups) if len(group.allowed) > 1]
    free.sort(key=lambda index: problem.groups[index].tasks[0])
    work = {index: sum(min(problem.tasks[task].times) for task in problem.groups[index].tasks) for index in free}
    n_stages = min(len(usable), len(free))
    total = sum(work.values())
    while n_stages > 1 and total > 0.0:
        devices, done = greedy.devices.copy(), 0.0
        for index in free:
            stage = min(n_stages - 1, int((done + work[index] / 2) * n_stages / total))
            done += work[index]
            if usable[stage] in problem.groups[index].allowed:
                devices[index] = usable[stage]
        yield _evaluated(problem, devices, greedy)
        # Fewer stages have fewer transfers, and may be as fast if one stage is the longest anyway.
        n_stages //= 2


def _improved(problem: Problem, starts: Sequence[Solution]) -> list[Solution]:
    """The solution that each start becomes if one group at a time is moved for as long as that helps.

    Large problems are left as the first start has them.
    """
    free = [index for index, group in enumerate(problem.groups) if len(group.allowed) > 1]
    n_moves = sum(len(problem.groups[index].allowed) - 1 for index in free)
    budget = problem.trials // max(1, len(problem.tasks))
    ends = [starts[0]]
    seen: list[list[int]] = []
    for start in starts:
        # Greedy placements of fewer devices are often the same.
        if start.devices in seen:
            continue
        seen.append(start.devices)
        best, moved = start, True
        while moved and n_moves <= budget:
            budget -= n_moves
            before = best
            for index in free:
                best = _moved(problem, best, index)
            moved = best is not before
        ends.append(best)
        if n_moves > budget:
            break
    return ends


def _moved(problem: Problem, start: Solution, group: int) -> Solution:
    """The best placement with one group elsewhere, if it is better."""
    best = start
    for device in problem.groups[group].allowed:
        # Ignore smaller gains, which the next move may undo.
        if device != start.devices[group]:
            devices = start.devices.copy()
            devices[group] = device
            tried = _evaluated(problem, devices, start)
            if (tried.overflow, _WORTH_A_MOVE * tried.span) < best.cost:
                best = tried
    return best


# -- greedy ----------------------------------------------------------------------------------------------------------


class _Greedy:
    """A greedy placement: groups go where their first task, and with it the work of all others, would finish first.

    With `usable`, they go to no other device if they may go to one of these. `promised` is the work of the groups on
    each device, done or not.
    """

    def __init__(self, problem: Problem, usable: frozenset[int] | None = None) -> None:
        self.problem = problem
        self.usable = usable
        self.groups = groups = problem.groups
        self.devices = [group.allowed[0] if len(group.allowed) == 1 else None for group in groups]
        self.execution = Execution(problem, self.devices)
        self.promised = [0.0] * len(problem.limits)
        self.finishes: list[dict[int, float] | None] = [None] * len(problem.groups)
        self.full: list[tuple[int, ...]] = [()] * len(problem.groups)

    def run(self) -> Solution:
        for index in self._order():
            task = self.problem.tasks[index]
            device = self.devices[task.group]
            if task.spread is None and device is None:
                self.devices[task.group] = device = self._choose(task)
                self.promised[device] += self._work(task.group, device)
            self.execution.run(index, self.execution.ready(task, device))
        devices = [SPREAD if device is None else device for device in self.devices]
        solution = _evaluated(self.problem, devices)
        solution.finishes, solution.full = self.finishes, self.full
        return solution

    def _order(self) -> list[int]:
        """Return the tasks by their longest path to the end; no task has a shorter one than the tasks waiting for
        it.
        """
        tasks, values = self.problem.tasks, self.problem.values
        followers = edges(tasks)
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
        if self.usable is not None:
            allowed = [device for device in allowed if device in self.usable] or allowed
        memory = self.execution.memory
        if memory is not None:
            needs = {device: memory.needs(task, device) for device in allowed}
            fitting = [device for device in allowed if needs[device] <= memory.room(device)]
            self.full[task.group] = tuple(device for device in allowed if device not in fitting)
            allowed = fitting or [max(allowed, key=lambda device: memory.room(device) - needs[device])]
        rest = {device: self._work(task.group, device) for device in allowed}
        ends = {
            device: rest[device]
            + max(self.execution.ready(task, device), self.execution.free[device], self.promised[device])
            for device in allowed
        }
        self.finishes[task.group] = ends
        best = min(ends.values())
        if not any(rest.values()):
            # Work that takes no time goes with its first input, not to any device that is equally early.
            home = self._first_home(task)
            if home is not None and ends.get(home, best + 1.0) <= best:
                return home
        return next(device for device, end in ends.items() if end <= best)

    def _work(self, group: int, device: int) -> float:
        return sum(self.problem.tasks[member].times[device] for member in self.groups[group].tasks)

    def _first_home(self, task: Task) -> int | None:
        """Return the device of the first input that is in one place, or of the first task that it runs after."""
        homes = [self.execution.places.of(self.problem.values[i]) for i in task.inputs]
        homes += [self.devices[self.problem.tasks[before].group] for before in task.waits]
        return next((home for home in homes if home is not None), None)
