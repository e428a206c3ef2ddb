"""The tasks that drive a session's pools, while they wait for others; `StepTurns` decides for which."""

from __future__ import annotations

import asyncio
from math import ceil, inf
from typing import TYPE_CHECKING

from asyncflow.runtime.lines.gate import Gate, Waiter
from asyncflow.runtime.shared.step_turns import Stepper, StepTurns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.runtime.executor.turn import Turn
    from asyncflow.streams.holding import RunPart


class StepWaits:
    """The tasks that wait for the next step of a session.

    Args:
        turn: of the session.
    """

    def __init__(self, turn: Turn) -> None:
        self.turns = StepTurns()
        self.holds_calls = False
        """True if batches wait too; they look for themselves."""
        self._turn = turn
        self.waiting = Gate[Stepper]()
        self.held_while_busy: set[Waiter] = set()
        """The waits of work whose policy let no member join while runs had ready work."""
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self, stepper: Stepper, there: Sequence[RunPart]) -> None:
        """Wait until a stepper is to make its next step, for the runs in it."""
        if there:  # without runs, the step ends soon
            stepper.rank = min(each.priority for each in there)
            first_s = min(each.deadline_s for each in there)
            stepper.deadline_ns = self._turn.clock() + (first_s - self._turn.loop.time()) * 1e9
        if self.turns.ask(stepper, self._turn.clock()):
            return
        with self.waiting.stand(stepper) as waiter:
            self.look()
            await waiter.wait()

    def ask_held(self) -> None:
        """Have policies asked again that may have waited until the session is idle."""
        while self.held_while_busy:
            self.held_while_busy.pop().admit()

    def ended(self, stepper: Stepper) -> None:
        """A step has been made."""
        self.turns.ended(stepper, self._turn.clock())
        self.look()

    def gone(self, stepper: Stepper) -> None:
        """Note that a stepper has no work any more."""
        self.turns.gone(stepper, self._turn.clock())
        self.look()

    def look(self) -> None:
        """Wake the steppers that need not wait any longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.holds_calls:
            self._turn.wake()
        if not self.waiting:
            return
        now_ns = self._turn.clock()
        for stepper in self.turns.next(now_ns):
            self.waiting.admit(stepper)  # a stepper whose task is cancelled ends its step with `gone`
        wake_ns = self.turns.wake_ns(now_ns)
        if wake_ns < inf:
            self._timer = self._turn.loop.call_later((ceil(wake_ns) - now_ns) / 1e9, self.look)
