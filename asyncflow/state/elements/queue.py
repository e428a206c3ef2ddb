"""`QueueState`: the elements of a queue and the waiting firings, in one session or in a container.

Conditions for going on, at any moment; only the first of each line is asked for:

=====================  ===============================================================================================
it wants to            it may if
=====================  ===============================================================================================
put k elements         they fit into the capacity; or the next take needs more than there is: else both might wait for
                       ever
take n elements        there are n, and the reserve, and enough of them belong together or no more fit in
either, once closed    puts that waited go on as above. A take needs n, without a reserve, or all that will ever be
                       there if it takes up to n; if there will never be enough, it ends with `QueueClosedError`
=====================  ===============================================================================================

A put or take is one step: all of its elements at once, or none. Enqueues and dequeues are served in the order they
came, each in a line of their own; nothing overtakes.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, NamedTuple, NoReturn, cast

import numpy as np

from asyncflow.errors import CheckpointError, QueueClosedError
from asyncflow.graph.values.shapes import size_of
from asyncflow.graph.values.spec import Spec
from asyncflow.state.elements.element_orders import Element, ElementOrder
from asyncflow.state.elements.queue_arrays import as_arrays, as_elements
from asyncflow.state.elements.queue_places import CopyingPlace, QueuePlace, Stage
from asyncflow.state.elements.taken import Taken
from asyncflow.state.variables.immutable import LARGE_BYTES
from asyncflow.state.waiting.lines import NOT_YET, LinedState, PlaceInLine
from asyncflow.values import Array, Value


class QueueSnapshot(NamedTuple):
    """One moment of a queue.

    Attributes:
        elements: immutable elements, in an order in which they can be put in again.
        order: what else decides which is next, such as the state of a random generator.
        is_closed: whether it was closed.
        specs: of the values of an element.
    """

    elements: tuple[Element, ...]
    order: object
    is_closed: bool
    specs: Sequence[Spec] = ()

    def arrays(self) -> dict[str, Array]:
        """The same as arrays, for a checkpoint."""
        arrays = {"is_closed": np.asarray(self.is_closed), **as_arrays(self.elements, self.specs)}
        if isinstance(self.order, tuple):  # of `random.Random.getstate`: (version, integers, next Gaussian)
            arrays["order"] = np.array(self.order[1], np.int64)
        return arrays


class QueueState(LinedState):
    """The elements of a queue; thread-safe.

    Invariant, outside the lock: the first of a line has been called if and only if it may go on.

    Args:
        name: for messages.
        order: the elements, none yet.
        capacity: how many it holds. A put of several exceeds it by the surplus, where a take waits for more elements
            than there are.
        reserve: how many have to be left by a take while the queue is open.
        specs: of the values of an element.
    """

    kind: ClassVar[str] = "queue"

    def __init__(
        self,
        name: str,
        order: ElementOrder,
        capacity: int,
        reserve: int = 0,
        specs: Sequence[Spec] = (),
    ) -> None:
        super().__init__()
        self.specs = specs
        self.name = name
        self.elements = order
        self.capacity = capacity
        self.reserve = reserve
        self.is_closed = False
        self.left_container: str | None = None
        self._putters: deque[QueuePlace] = deque()
        self._takers: deque[QueuePlace] = deque()
        self._coming = 0  # number of elements in waiting puts
        self._in_hand: list[Element] = []  # elements being copied for the first take
        self._restored = 0  # number of calls of `become`
        self._element_bytes = _bytes_of(specs)

    def __repr__(self) -> str:
        return f"<QueueState {self.name}: {self.describe()}>"

    # -- requests ------------------------------------------------------------------------------------------------

    def put(
        self, elements: Sequence[Element], what: str, finish: Callable[[None], Value], taken: Taken | None = None
    ) -> Value | PlaceInLine:
        """Put elements in, all at once; return what `finish` makes of None, or a place in line.

        What a run has `taken` counts as used once they are in.

        Raises:
            QueueClosedError: it is closed.
        """
        order, count, place = self.elements, len(elements), None
        # Outside the lock: a user's function may find the bucket of an element.
        entries = elements if order.entries is None else order.entries(elements)
        with self.lock:
            if self.is_closed or self.ended is not None:
                self._refuse(what)
            if self._putters or ((self._in_hand or len(order) + count > self.capacity) and not self._may_put(count)):
                place = QueuePlace(self, what, finish, count, partial(order.add, entries), taken=taken)
                self._putters.append(place)
                self._coming += count
            else:
                order.add(entries)
                if taken is not None and taken.count:
                    taken.keep()
            if self._takers:
                self._settle()
        if self.to_wake:
            self.wake_called()
        return place if place is not None else finish(None)

    def put_copies(
        self,
        copy: Callable[[], Sequence[Element]],
        count: int,
        what: str,
        finish: Callable[[None], Value],
        taken: Taken | None = None,
    ) -> PlaceInLine:
        """As `put` of the elements that ``copy()`` gives, which takes long and is called on a thread.

        Raises:
            QueueClosedError: it is closed.
        """
        order = self.elements

        def copied() -> Callable[[], object]:
            elements = copy()
            return partial(order.add, elements if order.entries is None else order.entries(elements))

        place = CopyingPlace(self, what, finish, count, puts=copied, taken=taken)
        with self.lock:
            if self.is_closed or self.ended is not None:
                self._refuse(what)
            self._putters.append(place)
            self._coming += count
            self._settle()
        self.wake_called()
        return place

    def take(
        self,
        count: int,
        or_fewer: bool,
        what: str,
        finish: Callable[[list[Element]], Value],
        *,
        copies: bool = False,
        taken: Taken | None = None,
    ) -> Value | PlaceInLine:
        """Take `count` elements, all at once: returns the result of `finish`, or a place in line.

        Args:
            count: how many.
            or_fewer: take the remaining elements, if there will never be enough.
            what: it does, for messages.
            finish: makes the result.
            copies: it copies the elements; large ones on a thread.
            taken: remembers the elements, for a run that may give them back; None for a coroutine.

        Raises:
            QueueClosedError: it is closed, and there will never be enough.
        """
        place: QueuePlace | None = None
        found: list[Element] = []
        with self.lock:
            if self.ended is not None:
                self.check()
            if self._takers or not self._may_take(count, or_fewer):
                kind = CopyingPlace if copies else QueuePlace
                place = kind(self, what, finish, count, or_fewer=or_fewer, taken=taken)
                self._takers.append(place)
            else:
                found = self._taken(count, or_fewer, what) if self.is_closed else self.elements.remove(count)
                if copies and self._are_large(found):
                    place = CopyingPlace(self, what, finish, count, or_fewer=or_fewer, taken=taken)
                    self._copy(place, found)
                elif taken is not None:
                    taken.add(self.give_back, found, (self._restored, self.elements.last))
            if self._putters:
                self._settle()
        if self.to_wake:
            self.wake_called()
        return place if place is not None else finish(found)

    def give_back(self, elements: Sequence[Element], where: object) -> None:
        """Put elements of a run that has ended early back to their places, also above the capacity."""
        restored, where = cast("tuple[int, object]", where)
        with self.lock:
            if restored != self._restored:
                return  # they are not part of the restored content
            self.elements.give_back(elements, where)
            self._settle()
        self.wake_called()

    def size(self) -> int:
        """Return the number of elements."""
        with self.lock:
            self.check()
            return self._held()

    def close(self, cancel_pending: bool = False) -> None:
        """Close the queue to further elements. Idempotent.

        Args:
            cancel_pending: refuse waiting enqueues, too, with a `QueueClosedError`.
        """
        with self.lock:
            self.check()
            self.is_closed = True
            if cancel_pending:  # takes need no refusal: `_may_take` lets them go on, and they find the queue closed
                waiting, self._putters, self._coming = self._putters, deque(), 0
                for place in waiting:
                    place.is_refused = True
                    place.is_called = False
                    self.call(place)
            self._settle()
        self.wake_called()

    def leave_container(self, name: str) -> None:
        """Tell waiting coroutines that the container was reset; runs that have this queue go on with it."""
        with self.lock:
            self.left_container = name
            for place in (*self._putters, *self._takers):
                if place.is_beside:
                    self.call(place)
        self.wake_called()

    def capture(self) -> QueueSnapshot:
        """Capture the present moment, by reference; waiting enqueues are not part of it."""
        with self.lock:
            elements, order = self.elements.capture()
            if self._in_hand:
                elements = (*self._in_hand, *elements)
            return QueueSnapshot(elements, order, self.is_closed, self.specs)

    def check_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Check that a capture's arrays fit this queue.

        Raises:
            CheckpointError: they are of other elements.
        """
        self._captured(arrays)

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Make a capture's arrays the elements.

        Raises:
            CheckpointError: they do not fit; nothing has changed.
        """
        self.become(self._captured(arrays))

    def _captured(self, arrays: Mapping[str, Array]) -> QueueSnapshot:
        closed, numbers = arrays.get("is_closed"), arrays.get("order")
        if closed is None:
            raise CheckpointError(f"queue {self.name!r} is closed or not, which nothing says there")
        order = None if numbers is None else (random.Random.VERSION, tuple(numbers.tolist()), None)
        return QueueSnapshot(tuple(as_elements(arrays, self.specs)), order, bool(closed), self.specs)

    def become(self, snapshot: QueueSnapshot) -> None:
        """Restore a captured moment. Waiting producers and consumers keep their places and see the restored
        elements.
        """
        with self.lock:
            self._in_hand = []  # the take that copies them counts as earlier
            self._restored += 1
            self.elements.restore(snapshot.elements, snapshot.order)
            self.is_closed = snapshot.is_closed
            self._settle()
        self.wake_called()

    # -- conditions of places in line, under the lock ------------------------------------------------------------

    def _held(self) -> int:
        return len(self.elements) + len(self._in_hand)

    def _may_put(self, count: int) -> bool:
        held = self._held()
        return held + count <= self.capacity or (bool(self._takers) and held < self._first_needs())

    def _may_take(self, count: int, or_fewer: bool) -> bool:
        held = len(self.elements)
        if self.is_closed:
            # A take that can never be served needs 0 elements: it goes on, and fails.
            return held >= self._needed(count, or_fewer)
        if held < count + self.reserve:
            return False
        has = self.elements.has
        if has is None or has(count):
            return True
        return bool(self._putters) and held + self._putters[0].count > self.capacity

    def _first_needs(self) -> int:
        first = self._takers[0]
        return self._needed(first.count, first.or_fewer) if first.stage is Stage.WAITING else 0

    def _needed(self, count: int, or_fewer: bool) -> int:
        """Return the number of elements that must be present for a take to go on."""
        if not self.is_closed:
            return count + self.reserve
        final = len(self.elements) + self._coming
        return count if final >= count else final if or_fewer else 0

    def _settle(self) -> None:
        """Call the first of each line if it may go on, and withdraw a call that no longer holds."""
        if self._putters:
            if self._first_may_put():
                self.call(self._putters[0])
            else:
                self._putters[0].is_called = False
        if self._takers:
            if self._first_may_take():
                self.call(self._takers[0])
            else:
                self._takers[0].is_called = False

    def _first_may_put(self) -> bool:
        first = self._putters[0]
        return first.stage is Stage.WAITING and self._may_put(first.count)

    def _first_may_take(self) -> bool:
        first = self._takers[0]
        if first.stage is Stage.WAITING:
            return self._may_take(first.count, first.or_fewer)
        return first.stage is Stage.MADE

    def _taken(self, count: int, or_fewer: bool, what: str) -> list[Element]:
        if self.is_closed:
            count = self._needed(count, or_fewer)
            if not count:
                raise self._closed(f"{what} can never be served")
        return self.elements.remove(count)

    def claimed(self, place: PlaceInLine) -> object:
        """See `LinedState.claimed`."""
        assert isinstance(place, QueuePlace)
        if isinstance(place, CopyingPlace) and place.error is not None:
            error, place.error = place.error, None
            raise error
        if self.left_container is not None and place.is_beside:
            left = self._held()
            raise QueueClosedError(
                f"{place.what}: container {self.left_container!r} was reset while this waited, and sessions share this "
                "queue no more; call it again, and it waits for the new one of that name",
                queue=self.name,
                left=left,
            )
        if place.is_refused:
            raise self._closed(f"{place.what}: it was closed with cancel_pending=True while this waited")
        line = self._takers if place.add is None else self._putters
        may = self._first_may_take if place.add is None else self._first_may_put
        if not line or line[0] is not place or not may():
            place.is_called = False
            return NOT_YET
        line.popleft()
        # Even if this fails, the next place in line may have to be called.
        try:
            if place.add is None:
                return self._served(place)
            self._coming -= place.count
            place.add()
            if place.taken is not None and place.taken.count:
                place.taken.keep()
            return None
        finally:
            self._settle()

    def _served(self, place: QueuePlace) -> object:
        if isinstance(place, CopyingPlace) and place.stage is Stage.MADE:
            in_hand, self._in_hand = self._in_hand, []
            if place.taken is not None and in_hand:
                place.taken.add(self.give_back, in_hand, (self._restored, self.elements.last))
            return place.made
        found = self._taken(place.count, place.or_fewer, place.what)
        if isinstance(place, CopyingPlace) and self._are_large(found):
            return self._copy(place, found)
        if place.taken is not None:
            place.taken.add(self.give_back, found, (self._restored, self.elements.last))
        return found

    def left(self, place: PlaceInLine) -> None:
        """See `LinedState.left`."""
        assert isinstance(place, QueuePlace)
        line = self._takers if place.add is None else self._putters
        if place in line:
            line.remove(place)
            if place.add is not None:
                self._coming -= place.count
            elif place.stage is not Stage.WAITING:
                in_hand, self._in_hand = self._in_hand, []
                if in_hand:  # a cancelled take has taken nothing
                    self.elements.give_back(in_hand, self.elements.last)
            self._settle()

    # -- copies, under the lock ----------------------------------------------------------------------------------

    def _are_large(self, elements: Sequence[Element]) -> bool:
        """Return True if the elements take too long to copy on an event loop."""
        size = self._element_bytes
        if size is not None:
            return len(elements) * size > LARGE_BYTES
        return sum(value.nbytes for element in elements for value in element) > LARGE_BYTES

    def _copy(self, place: CopyingPlace, elements: list[Element]) -> object:
        """Start the copy of the first consumer's elements; it stays first meanwhile."""
        self._takers.appendleft(place)
        self._in_hand = elements
        place.copy(elements)
        return NOT_YET

    def copied(self, place: CopyingPlace, made: object, error: BaseException | None) -> None:
        """Take the copies that `place` waits for, or the error of the copy; on any thread."""
        with self.lock:
            if error is not None:
                place.error = error
                self.left(place)
                self.call(place)
            elif place.add is None:
                place.stage, place.made = Stage.MADE, made
            else:
                place.stage, place.add = Stage.WAITING, cast("Callable[[], object]", made)
            self._settle()
        self.wake_called()

    def places(self) -> list[PlaceInLine]:
        """See `LinedState.places`."""
        return [*self._putters, *self._takers]

    # -- messages and containers ---------------------------------------------------------------------------------

    def describe(self) -> str:
        """See `LinedState.describe`."""
        waiting = [(len(self._putters), "to put"), (len(self._takers), "to take")]
        lines = ", ".join(f"{count} wait{'s' * (count == 1)} {verb}" for count, verb in waiting if count)
        reserve = f", {self.reserve} of which a take leaves" if self.reserve else ""
        state = ", closed" if self.is_closed else ""
        return f"{self._held()} of {self.capacity} elements{reserve}{state}{f'; {lines}' if lines else ''}"

    def _refuse(self, what: str) -> NoReturn:
        self.check()
        raise self._closed(f"{what}: nothing more can be put in")

    def _closed(self, why: str) -> QueueClosedError:
        left = self._held() + self._coming
        some = f"{left} element{'s are' if left != 1 else ' is'} left"
        return QueueClosedError(f"{why}, as queue {self.name!r} is closed; {some}", queue=self.name, left=left)


def _bytes_of(specs: Sequence[Spec]) -> int | None:
    """The bytes of an element; None if that is not the same for all."""
    total = 0
    for spec in specs:
        size = size_of(spec.shape)
        if size is None:
            return None
        total += size * spec.dtype.itemsize
    return total
