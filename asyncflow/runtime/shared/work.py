"""`SharedWork`: members of different runs that one task computes together, step by step, until no member is left.

A pooled loop and a shared vertex map are such work. A member is the firing of one run, which waits in line for its
results (`asyncflow.state.waiting.lines`). The members share rows, and a step computes something for all of them.

The task compiles the steps first. Then it repeats four things until no member is left. It waits for a turn if other
work of the session is more important. It drops members that left, and lets waiting ones join. It computes a step, and
tells the members that have ended. It gives the turn back, and lets other coroutines run.

A step that fails is computed in halves, so only the member at fault fails (`asyncflow.runtime.lines.halving`). A
failure outside of steps, such as in the compiler, fails all members.

What not to do: let a member wait for the task. A member that is cancelled just leaves, and the task drops it before the
next step. Calls of batched functions share halving and turns with such work, but have no task. A call has one step, and
a task would cost it one more pass of the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, TypeVar, cast
from weakref import WeakKeyDictionary

from asyncflow.lift.calls.batched import SharedCode, identity_of
from asyncflow.ops.user.step_policy import NextStep, StepPolicy, WaitingMember, decide
from asyncflow.runtime.lines.gate import Waiter
from asyncflow.runtime.lines.priority_line import PriorityLine
from asyncflow.runtime.lines.shares import PATIENCE_S
from asyncflow.runtime.shared.step_rules import WaitingLine, at_once
from asyncflow.runtime.shared.step_turns import Stepper
from asyncflow.state.waiting.lines import PlaceInLine, TellingState, ToldPlace
from asyncflow.values import Array

if TYPE_CHECKING:
    from asyncflow.runtime.shared.batches import Batches
    from asyncflow.streams.holding import RunPart


class SharedMember(ToldPlace):
    """The firing of one run, which is a member of shared work.

    Attributes:
        part: its run.
        priority: of the run; lower numbers are more important.
        since_s: when it came, in the event loop's time.
        due_s: its deadline, or a second after it came if that is sooner.
    """

    is_called_outside = True

    __slots__ = ("due_s", "part", "priority", "since_s")

    def __init__(self, work: SharedWork, what: str, part: RunPart) -> None:
        super().__init__(work, what, tuple)
        self.part, self.priority = part, part.priority
        self.since_s = work.batches.turn.loop.time()
        self.due_s = min(part.deadline_s, self.since_s + PATIENCE_S)


def _seen(member: SharedMember) -> WaitingMember:
    """Return what policies see of a member."""
    return WaitingMember(member.priority, member.since_s, member.part.deadline_s)


C = TypeVar("C")
M = TypeVar("M", bound=SharedMember)


class SharedWork(TellingState):
    """Work that members of different runs share; see the module.

    Args:
        works: all such work of the session.
        key: names it among these.

    Attributes:
        batches: of the session.
        stepper: the work, as far as turns are concerned.
        is_held: True if no member had joined, and the policy had all of them wait, when it was last asked.
        changed: admitted when members come or leave while a policy has all of them wait.
    """

    policy: StepPolicy | None
    """The user's decision when members join; None for a rule of `asyncflow.runtime.shared.step_rules`."""
    label: str
    """The name of the function or loop in errors of the policy."""

    def __init__(self, works: SharedWorks, key: Hashable) -> None:
        super().__init__()
        self.works, self.batches, self.key = works, works.batches, key
        self.stepper = Stepper()
        self.changed = Waiter()
        self.is_held = False
        self._asked_again_s = inf

    # -- defined by each kind of work --------------------------------------------------------------------------------

    def members(self) -> Iterable[SharedMember]:
        """Return all members, waiting or joined."""
        raise NotImplementedError

    async def prepare(self) -> None:
        """Compile the plans that the steps need."""
        raise NotImplementedError

    async def step(self) -> None:
        """Compute one step, with its preparation and follow-up."""
        raise NotImplementedError

    async def goes_on(self) -> bool:
        """Return True once the next step may begin; False if no member is left."""
        raise NotImplementedError

    def fail_all(self, error: Exception) -> None:
        """Fail all members with an error."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what leads back to the work: no step comes any more."""

    # -- common to all kinds of shared work --------------------------------------------------------------------------

    def places(self) -> list[PlaceInLine]:
        """Give all members."""
        return list(self.members())

    def left(self, place: PlaceInLine) -> None:
        """See `LinedState.left`."""
        super().left(place)
        self.changed.admit()

    def come(self, priority: int) -> None:
        """A member of that priority has come."""
        self.stepper.rank = min(self.stepper.rank, priority)
        self.batches.steps.turns.come(self.stepper, priority)
        self.changed.admit()

    def joining(
        self,
        line: PriorityLine[float, M],
        joined: int,
        capacity: float = inf,
        expected_s: Callable[[int], float] = lambda _: 0.0,
        rule: StepPolicy = at_once,
    ) -> int:
        """Return how many of the members that wait join the next step, as the policy says, or `rule` without one.

        Raises:
            Exception: the policy has failed.
        """
        self._asked_again_s, self.is_held = inf, False
        self.changed.forget()
        if not line.by_priority:
            return 0
        turn = self.batches.turn
        waiting: Sequence[WaitingMember] = WaitingLine(line, _seen)
        if self.policy is not None:
            rule, waiting = (at_once if self.batches.is_ending else self.policy), tuple(waiting)
        step = NextStep(turn.loop.time(), waiting, joined, capacity, turn.is_idle, expected_s)
        count, self._asked_again_s = decide(rule, step, self.label)
        self.is_held = not (count or joined)
        if self.is_held and not step.is_idle:
            self.batches.steps.held_while_busy.add(self.changed)
        return count

    async def wait_for_change(self) -> None:
        """Return when a member has come or left, or the policy is to be asked again; others have their turns."""
        steps = self.batches.steps
        steps.gone(self.stepper)
        with suppress(TimeoutError):
            await self.changed.wait(self._asked_again_s)
        steps.turns.come(self.stepper, self.stepper.rank)

    def give_way(self, rank: float) -> None:
        """Members of another priority have come to other work: end a long step early if they go before these."""

    async def wait_for_turn(self) -> None:
        """Return when the next step is to be made, where other work of the session takes turns with this."""
        there = [member.part for member in self.members() if not member.is_gone]
        await self.batches.steps.begin(self.stepper, there)

    async def drive(self) -> None:
        """Compute steps until no member is left."""
        steps, failure = self.batches.steps, None
        try:
            await self.prepare()
            while True:
                if steps.turns.is_contended:
                    await self.wait_for_turn()
                await self.step()
                if self.stepper.is_stepping:
                    steps.ended(self.stepper)
                if not await self.goes_on():
                    break
        except Exception as error:  # no plan, or the session closes
            failure = error
        finally:
            self.close()
            steps.gone(self.stepper)
            self.works.forget(self.key)
        if failure is not None:  # after `forget`, as members may ask again, for new work
            self.fail_all(failure)
            del failure


W = TypeVar("W", bound=SharedWork)


class SharedWorks:
    """The work of one kind that runs of a session share, as long as it has members.

    Args:
        batches: of the session.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self._works: dict[Hashable, SharedWork] = {}
        self._code: WeakKeyDictionary[SharedCode, dict[Hashable, object]] = WeakKeyDictionary()

    def __iter__(self) -> Iterator[SharedWork]:
        return iter(self._works.values())

    def __len__(self) -> int:
        return len(self._works)

    def work(self, key: Hashable, begin: Callable[[], W]) -> W:
        """Return the work of a key, which `begin` makes if no member is there yet."""
        work = self._works.get(key)
        if work is None:
            work = self._works[key] = begin()
            self.batches.beside(work.drive())
        return cast("W", work)

    @property
    def sharing(self) -> int:
        """Return the number of works that share a turn, without works that wait for theirs; at least 1."""
        waiting = self.batches.steps.waiting
        if not waiting:
            return len(self._works) or 1
        return max(sum(work.stepper not in waiting for work in self._works.values()), 1)

    async def code_of(self, shared: SharedCode, where: Hashable, compiled: Callable[[], Awaitable[C]]) -> C:
        """Return the compiled form of some code, which `compiled` makes the first time."""
        codes = self._code.setdefault(shared, {})
        code = codes.get(where)
        if code is None:
            code = codes[where] = await compiled()
        return cast("C", code)

    def clear(self) -> None:
        """Forget compiled code: the session has closed."""
        self._code.clear()

    def forget(self, key: Hashable) -> None:
        """Forget work that has no member any more."""
        del self._works[key]
        self.batches.bodies.starter.tell_ended()


def common_values(has_rows: Sequence[bool], inputs: Sequence[Array]) -> list[Hashable]:
    """Return keys that are equal for members whose shared values are the same."""
    return [identity_of(value) for value, own in zip(inputs, has_rows, strict=True) if not own]
