"""Places in the line of a state, and their order; knows no event loops.

A kernel that cannot give its result yet gives a `PlaceInLine`. A waiting place is *called* when it may go on, and then
goes on by itself (`PlaceInLine.claim`). A result that is not claimed, because the wait was given up, is still there for
the next in line. A state calls only the first of a line, so nothing overtakes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final
from weakref import WeakSet

from asyncflow.values import Value

NOT_YET: Final = object()
"""Result of a claim that came too early: another place has withdrawn its element."""

lined_states: WeakSet[LinedState] = WeakSet()
"""Every state of the process that has lines."""


class PlaceInLine:
    """A place in a line of a state.

    Attributes:
        what: is waited for, for people, such as ``dequeue_many(64) of queue 'q'``.
        finish: makes the result of what the state gives.
        is_called_outside: True if code outside of firings calls it, so that a firing may go on there and then.
        works: something may have to be done first that takes too long for an event loop; see `do_beside`.
        is_asked_later: True if `is_called` may be read before `when_called`.
        has_inputs: True if the place itself has the inputs of its firing, as long as they are needed.
        early: the outcome of a claim that was made ahead, a result and an error; None without one.
        is_given_up: returns True if the run that waits there has been cancelled, and only has not left yet.
    """

    is_called_outside = False
    works = False
    is_asked_later = True
    has_inputs = False

    __slots__ = ("early", "finish", "is_called", "is_given_up", "state", "wake", "what")

    def __init__(self, state: LinedState, what: str, finish: Callable[..., Value]) -> None:
        self.state = state
        self.what = what
        self.finish = finish
        self.is_called = False
        self.early: tuple[Value, BaseException | None] | None = None
        self.is_given_up: Callable[[], bool] | None = None
        self.wake: Callable[[], None] | None = None

    def when_called(self, wake: Callable[[], None]) -> None:
        """Has ``wake()`` called whenever the first of the line may go on, on any thread; now, if it may already."""
        state = self.state
        with state.lock:
            self.wake = wake
            if self.is_called:
                state.to_wake.append(wake)
        if state.to_wake:
            state.wake_called()

    def do_beside(self, start: Callable[[Callable[[], None]], None]) -> None:
        """Pass ``work`` to ``start``, now or later, to be called on a thread where it may take long."""
        raise NotImplementedError

    def claim(self) -> Value:
        """The result, once called; `NOT_YET` if it has to be waited for after all.

        Raises:
            AsyncflowError: it will never come.
        """
        state = self.state
        found: object = None
        try:
            with state.lock:
                try:
                    state.check()
                    found = state.claimed(self)
                finally:
                    if found is not NOT_YET:
                        self.wake = self.is_given_up = None  # avoid a cycle: they refer back to this object
        finally:
            state.wake_called()
        return NOT_YET if found is NOT_YET else self.finish(found)

    def claim_early(self) -> bool:
        """Claim what `claimed` gives later, so that others in line go on; False if it has to be waited for."""
        if self.early is None:
            result: Value = None
            error: BaseException | None = None
            try:
                result = self.claim()
            except BaseException as raised:
                error = raised
            if result is not NOT_YET:
                self.early = result, error
        return self.early is not None

    def leave(self) -> None:
        """Gives up; nothing happens if the claim has been made. Whoever comes next may be called."""
        state = self.state
        with state.lock:
            state.left(self)
            self.wake = self.is_given_up = None
        state.wake_called()

    def describe(self) -> str:
        """Describe the awaited result, and the present state."""
        return f"{self.what} ({self.state.describe()})"


class ToldPlace(PlaceInLine):
    """A place whose result is computed elsewhere.

    Attributes:
        outcome: its results, or why there are none; None before, and once they have been taken.
        is_gone: its results are not wanted any more.
    """

    is_asked_later = False

    __slots__ = ("is_gone", "outcome")

    def __init__(self, state: LinedState, what: str, finish: Callable[..., Value]) -> None:
        super().__init__(state, what, finish)
        self.outcome: Sequence[Value] | BaseException | None = None
        self.is_gone = False

    def take_outcome(self) -> object:
        """The results, whose memory is the taker's now, or `NOT_YET`; raises why there are none."""
        outcome, self.outcome = self.outcome, None
        if not isinstance(outcome, BaseException):
            return NOT_YET if outcome is None else outcome
        context = outcome.__context__
        try:
            raise outcome
        finally:
            # Avoid a cycle: an exception being handled may have `outcome` as its cause, and its traceback leads to this
            # frame.
            outcome.__context__ = context
            del outcome, context


def claimed(place: PlaceInLine) -> Value | PlaceInLine:
    """The result of a place that was called; itself, if it has to be waited for after all."""
    if place.early is not None:
        (result, error), place.early = place.early, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: avoid a cycle
        return result
    result = place.claim()
    return place if result is NOT_YET else result


def worked(found: Value | PlaceInLine) -> Value | PlaceInLine:
    """The outcome of a kernel where work takes no time: that of a place in line is done at once."""
    if not (isinstance(found, PlaceInLine) and found.works):
        return found
    found.do_beside(lambda work: work())
    return claimed(found)


class LinedState:
    """A state with places in line. Every change is one step under the lock, on whichever thread.

    A subclass changes itself under the lock, calls `call` for places that may go on, and calls `wake_called` after
    releasing it.

    Attributes:
        lock: held for every change, never while a place is woken.
        to_wake: callbacks to run once the lock is free.
        ended: makes the error of all present and future places; None while the state is in use.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.to_wake: deque[Callable[[], None]] = deque()
        self.ended: Callable[[], Exception] | None = None
        self._is_waking = False
        lined_states.add(self)

    def places(self) -> list[PlaceInLine]:
        """Return all places in line."""
        raise NotImplementedError

    def claimed(self, place: PlaceInLine) -> object:
        """Gives what the place waits for, under the lock; it leaves the line. `NOT_YET` if it is not its turn."""
        raise NotImplementedError

    def left(self, place: PlaceInLine) -> None:
        """Takes a place out of its line, under the lock."""
        raise NotImplementedError

    def describe(self) -> str:
        """Describe the present state, for messages."""
        raise NotImplementedError

    def call(self, place: PlaceInLine) -> None:
        """Has a place go on, under the lock."""
        if not place.is_called:
            place.is_called = True
            if place.wake is not None:
                self.to_wake.append(place.wake)

    def check(self) -> None:
        """Raise the error of `end`, if the state has ended."""
        if self.ended is not None:
            raise self.ended()

    def end(self, error: Callable[[], Exception]) -> None:
        """End the state: every waiting or later place gets an error of its own."""
        with self.lock:
            self.ended = error
            for place in self.places():
                place.is_called = False  # it may have been called for another reason
                self.call(place)
        self.wake_called()

    def wake_called(self) -> None:
        """Wake the called places, one after the other: each may call the next."""
        if not self.to_wake or self._is_waking:
            return
        with self.lock:
            if not self.to_wake or self._is_waking:
                return
            self._is_waking, wake = True, self.to_wake.popleft()
        while True:
            try:
                wake()
            except BaseException:  # such as KeyboardInterrupt: still wake the others
                self._is_waking = False
                self.wake_called()
                raise
            with self.lock:
                if not self.to_wake:
                    self._is_waking = False
                    return
                wake = self.to_wake.popleft()

    def forget_lines(self) -> None:
        """Forget the lines after a fork: waiting code is in the parent, which may have held the lock."""
        self.lock = Lock()
        self.to_wake.clear()
        self._is_waking = False
        for place in self.places():
            self.left(place)
        self.to_wake.clear()


class TellingState(LinedState):
    """A state that computes for the waiting places, and tells each its outcome."""

    def claimed(self, place: PlaceInLine) -> object:
        """Return the results of a told place; `NOT_YET` before."""
        assert isinstance(place, ToldPlace)
        return place.take_outcome()

    def left(self, place: PlaceInLine) -> None:
        """Mark the place's results as no longer wanted."""
        assert isinstance(place, ToldPlace)
        place.is_gone = True

    def is_left(self) -> bool:
        """Return True if all callers waiting for this result have gone."""
        return all(isinstance(place, ToldPlace) and place.is_gone for place in self.places())

    def tell(self, place: ToldPlace, outcome: Sequence[Value] | BaseException) -> None:
        """Has one go on with its results, or with why there are none, unless it was told or has gone."""
        if not (place.is_gone or place.is_called):
            place.outcome = outcome
            del outcome
            with self.lock:
                self.call(place)
            self.wake_called()
