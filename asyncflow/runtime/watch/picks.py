"""The order in which ready nodes of one run were taken: recorded, and followed in another run.

The results of a run depend on no other order. State is read and written by the firing that is taken, on the event loop,
before the next firing is taken. The order in which coroutines and threads end shows in the firings taken after it.
Values that other runs and the world hand to a firing, such as an element of a queue, are recorded as well: its
*answer*. Once another run has written a variable or table of the run, the results of its firings on that are answers,
too: a replay has no other run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias
from zlib import crc32

import numpy as np

from asyncflow.compiler.plan import Kind, PlanNode
from asyncflow.control.stores.array_value import ArrayContent, ArrayValue
from asyncflow.control.stores.row_block import RowContent, RowState
from asyncflow.devices.memory import MemoryLimitExceeded
from asyncflow.devices.protocol import AsynchronousDevice, Device, KernelInfo, Placed
from asyncflow.devices.values import DeviceValue
from asyncflow.errors import ReplayError
from asyncflow.graph.facts import CALL_AGAIN
from asyncflow.graph.ir import Node
from asyncflow.graph.resource import Resource, resources_of, waits_in_line
from asyncflow.graph.values.dtypes import string
from asyncflow.ops.user.recorded_calls import CallLog, CallReplay, Raised
from asyncflow.state.table import Table
from asyncflow.state.variables.variable import Variable
from asyncflow.streams.futures import resolve

if TYPE_CHECKING:
    from asyncflow.values import Array, Value

_MOST_SHOWN = 5

COMPUTED: Final = object()
"""In place of an answer: the firing is to be computed."""

UNANSWERED: Final = object()
"""In place of an answer: the recorded run has ended before one came."""

ELSEWHERE: Final = object()
"""In place of an answer: it has no copy on the host, such as a value of a card that is lost."""

StoreContent: TypeAlias = ArrayContent | RowContent
"""All that a state of a TensorArray or RowStore holds."""


class Tagged(Protocol):
    """An iteration of a run, known by its tag alone."""

    def tag(self) -> str:
        """The path of frames and iterations."""


_Ready: TypeAlias = "Sequence[tuple[PlanNode, Tagged]]"


class OnCard(NamedTuple):
    """The answer of a firing that has some of its outputs in the memory of a card.

    Attributes:
        outputs: the copies on the host: one value, or a tuple of them; of a store, its content.
        placed: the numbers of the outputs that belong on the card.
    """

    outputs: Value
    placed: Sequence[int]


def asks_others(node: Node) -> bool:
    """Return True if other runs, or the world, contribute to a node's results: for nodes with queues, inputs and
    batches.

    Variables and tables are as the record has them, unless others write them during the run. Results of user functions
    are in the record as well: see `calls_functions`.
    """
    return waits_in_line(node) or any(not isinstance(each, Variable | Table) for each in resources_of(node))


def calls_functions(node: Node) -> bool:
    """Return True if a node calls a user function that is not pure, of whose calls a record has the results."""
    return not CALL_AGAIN.allows(node.op) and not asks_others(node)


class Pick(NamedTuple):
    """A pick: one firing, in the place where it was taken.

    Attributes:
        partition: the number of the run's partition.
        node: its name.
        tag: the path of frames and iterations.
        checksum: checksum of its results; None if they are not on the host when it ends.
    """

    partition: int
    node: str
    tag: str
    checksum: int | None = None

    def __str__(self) -> str:
        return f"{self.node} in iteration {self.tag}" if self.tag else self.node


class WatchedState(Protocol):
    """The state of a variable or table."""

    @property
    def last_write(self) -> object:
        """An object that only the last write has made."""


class PickLog:
    """A log of the firings taken.

    Args:
        lookup: finds the states of variables and tables.
        resources: the run's variables and tables.

    Attributes:
        picks: so far, in order, over all partitions.
        answers: of ended firings that `asks_others` names, by their places among the picks; or their error, or
            `ELSEWHERE`; of firings that `calls_functions` names, their calls. Copies from cards come until `copied`,
            and which error the run ended with is known by `end`.
        run: the number of the run; 0 until it begins.
        placement: the devices of nodes by name, once it has begun.
    """

    def __init__(
        self, lookup: Callable[[Resource], WatchedState] | None = None, resources: Iterable[Variable | Table] = ()
    ) -> None:
        self.run = 0
        self.placement: Mapping[str, str] = {}
        self.picks: list[Pick] = []
        self.answers: dict[int, object] = {}
        self._places: dict[Pick, int] = {}
        self._calls: dict[int, CallLog] = {}
        self._failures: list[tuple[int, BaseException, object]] = []
        """Places of firings that failed, and the answers that they have if the run ended with their errors."""
        self._lookup = lookup
        self._last_writes: dict[Resource, object] = {}
        """The last write of each variable or table that the run made or has seen."""
        if lookup is not None:
            self._last_writes = {each: lookup(each).last_write for each in resources}
        self._states: dict[Resource, WatchedState] = {}
        self._foreign: set[Resource] = set()
        """Variables and tables that others have written since the record began."""
        self._copies = 0
        self._last_copy: asyncio.Future[None] | None = None

    def begin(self, run: int, placement: Mapping[str, str]) -> None:
        """Note that the run of that number begins, with nodes on these devices by name."""
        self.run, self.placement = run, placement
        # Looked up only now: the variables' versions may have been replaced since the record began.
        if self._lookup is not None:
            self._states = {each: self._lookup(each) for each in self._last_writes}

    def position(self, partition: int, ready: _Ready) -> int | None:
        """Return the position of the ready firing to be taken in a partition; None for any of them."""
        return None

    def may_take(self, partition: int, ready: _Ready) -> bool:
        """Return True if a ready firing of a partition may be taken now."""
        return len(ready) > 0

    def taken(self, partition: int, node: PlanNode, iteration: Tagged) -> None:
        """A node was taken."""
        if node.kind != Kind.KERNEL:
            return  # primitives only route: their order shows in the order of later kernels
        pick = Pick(partition, node.name, iteration.tag())
        self._places[pick] = len(self.picks)
        self.picks.append(pick)

    def ended(
        self, partition: int, node: PlanNode, iteration: Tagged, result: Value, device: Device, *, at_once: bool
    ) -> None:
        """Note the result of a firing on a device.

        Args:
            partition: number of its partition.
            node: its node.
            iteration: its iteration.
            result: its result.
            device: its device.
            at_once: the firing was taken in the same step of the event loop.
        """
        if not at_once:  # other runs may have written before the firing's own access
            self._foreign.update(self._touched(node))
        place = self._places[Pick(partition, node.name, iteration.tag())]
        self.picks[place] = self.picks[place]._replace(checksum=checksum(result))
        self._keep(place, node, result, device)
        self._note_writes(node)

    def _touched(self, node: PlanNode) -> list[Resource]:
        return [each for each in resources_of(node.source) if each in self._states] if self._states else []

    def _note_writes(self, node: PlanNode) -> None:
        """Note what a firing has written, in the same step of the event loop."""
        for each in self._touched(node):
            self._last_writes[each] = self._states[each].last_write

    def _is_foreign(self, node: PlanNode) -> bool:
        return not self._foreign.isdisjoint(self._touched(node))

    def _keep(self, place: int, node: PlanNode, result: Value, device: Device) -> None:
        """Record the answer to a firing."""
        if asks_others(node.source) or self._is_foreign(node):
            copied = _copied(result)
            self.answers[place] = ELSEWHERE if _checksum_of(copied) is None else copied
            self._bring(place, result, device)
        elif place in self._calls:
            self.answers[place] = self._calls[place]

    def _bring(self, place: int, result: Value, device: Device) -> None:
        """Ask a card for copies of the answer; until they come, the answer is `ELSEWHERE`."""
        # Requested now, while the values are on the card: later firings may reuse their memory.
        outputs: list[Placed] = [*result] if isinstance(result, tuple) else [result]
        placed = [index for index, value in enumerate(outputs) if isinstance(value, DeviceValue)]
        card = device.asynchronous
        if not placed or card is None:
            return
        outputs = [*map(_copied, outputs)]
        try:
            contents = {index: found for index in placed if (found := _content_on(card, outputs[index])) is not None}
        except MemoryLimitExceeded:  # the run itself may still fit; a replay reports the missing answer
            return
        parts = {index: list(contents[index].arrays if index in contents else [outputs[index]]) for index in placed}
        asked = [(each, at) for each in parts.values() for at, x in enumerate(each) if isinstance(x, DeviceValue)]
        left = len(asked) + 1

        def take(each: list[Placed], at: int, value: Value, _: BaseException | None) -> None:
            each[at] = value
            self._ended_copy()
            end()

        def end() -> None:
            nonlocal left
            left -= 1
            if left:
                return
            for index, each in parts.items():
                outputs[index] = contents[index].with_arrays(map(np.asarray, each)) if index in contents else each[0]
            # No answer after an error, such as a lost card, or in a simulation of shapes, which has no data.
            if _checksum_of(tuple(outputs)) is not None:
                self.answers[place] = OnCard(tuple(outputs) if isinstance(result, tuple) else outputs[0], placed)

        self._copies += len(asked)  # count before the calls, which may deliver at once
        for number, (each, at) in enumerate(asked):
            try:
                card.read_value(each[at], partial(take, each, at))
            except BaseException:
                for _ in asked[number:]:
                    self._ended_copy()
                raise
        end()

    def _ended_copy(self) -> None:
        self._copies -= 1
        if not self._copies and self._last_copy is not None:
            resolve(self._last_copy, None)

    async def copied(self) -> None:
        """Wait until all copies from cards have ended."""
        if self._copies:
            self._last_copy = asyncio.get_running_loop().create_future()
            await self._last_copy

    def failed(self, partition: int, node: PlanNode, iteration: Tagged, error: BaseException) -> None:
        """Note that a firing failed: with `error`, which ends the run unless that was ended before."""
        place = self._places.get(Pick(partition, node.name, iteration.tag()))
        if place is None:
            return
        answer: object = self._calls.get(place, COMPUTED)
        if asks_others(node.source) or self._is_foreign(node):
            # Computing it again would call the functions of a batch or pool without its other members.
            answer = Raised.of(error)
        self._failures.append((place, error, answer))

    def withdrawn(self, partition: int, node: PlanNode, iteration: Tagged) -> None:
        """Note that a firing was given up when the run had been ended."""
        place = self._places.get(Pick(partition, node.name, iteration.tag()))
        if place is not None:
            self.answers[place] = UNANSWERED

    def end(self, error: BaseException | None) -> None:
        """Note that the run has ended, with `error` unless that is None.

        Firings under way fail after that as well. In a replay, which waits for none of them, such an error would come
        first.
        """
        for place, found, answer in self._failures:
            self.answers[place] = answer if found is error else UNANSWERED
        self._failures.clear()  # their tracebacks refer to this object

    def calls(self, partition: int, node: PlanNode, iteration: Tagged) -> CallLog | None:
        """Return the log of a firing's calls of user functions; None if they are called without a log."""
        if not calls_functions(node.source):
            return None
        log = self._calls[self._places[Pick(partition, node.name, iteration.tag())]] = CallLog()
        return log

    def answer(self, partition: int, node: PlanNode, iteration: Tagged) -> object:
        """Return the answer that a firing got: its result, its run's error, `COMPUTED` or `UNANSWERED`."""
        for each in self._touched(node):
            if self._states[each].last_write is not self._last_writes[each]:
                self._foreign.add(each)
        return COMPUTED

    def join(self, partition: int, wake: Callable[[], object], stop: Callable[[], object]) -> None:
        """Let a partition take part.

        Args:
            partition: its number.
            wake: makes it look again for firings that it may take.
            stop: has the run end, soon.
        """


class PickGuide(PickLog):
    """A guide that makes a run take the firings of another one.

    Args:
        expected: the other run's picks.
        given: the answers it got.
        is_whole: it came to its end; otherwise this run is stopped at the same place.
        live: user functions are called again, instead of using their recorded results.

    Attributes:
        difference: where this run differs; None if it does not, so far.
    """

    def __init__(
        self, expected: Sequence[Pick], given: Mapping[int, object], *, is_whole: bool, live: bool = False
    ) -> None:
        super().__init__()
        self.difference: ReplayError | None = None
        self._expected = expected
        self._given = given
        self._is_whole = is_whole
        self._live = live
        self._wakes: dict[int, Callable[[], object]] = {}
        self._stop: Callable[[], object] | None = None
        self._ready: dict[int, _Ready] = {}

    @property
    def is_at_end(self) -> bool:
        """True if all picks of the other run have been taken."""
        return len(self.picks) == len(self._expected)

    def position(self, partition: int, ready: _Ready) -> int | None:
        """Return the position of the next pick, or of a primitive; None if there is neither."""
        self._ready[partition] = ready  # kept to list them if the run stalls
        awaited = None if self.is_at_end else self._expected[len(self.picks)][:3]
        # Take primitives at once: they may make the next kernel ready.
        for position, (node, iteration) in enumerate(ready):
            if node.kind != Kind.KERNEL or (partition, node.name, iteration.tag()) == awaited:
                return position
        return None

    def may_take(self, partition: int, ready: _Ready) -> bool:
        """Return True if the next pick is ready."""
        return self.position(partition, ready) is not None

    def taken(self, partition: int, node: PlanNode, iteration: Tagged) -> None:
        """A node was taken; the next may be another partition's."""
        super().taken(partition, node, iteration)
        if node.kind != Kind.KERNEL:
            return
        if self.is_at_end:
            # The recorded run was cancelled or timed out here, and no later pick would stop this one.
            if not self._is_whole and self._stop is not None:
                self._stop()
        # Wake the next partition: with no pick of its own, it does not check again by itself.
        elif (following := self._expected[len(self.picks)].partition) != partition and following in self._wakes:
            self._wakes[following]()

    def _keep(self, place: int, node: PlanNode, result: Value, device: Device) -> None:
        """Keep nothing: the record has the answers."""

    def ended(
        self, partition: int, node: PlanNode, iteration: Tagged, result: Value, device: Device, *, at_once: bool
    ) -> None:
        """Note the result of a firing.

        Raises:
            ReplayError: the result differs from the recorded one.
        """
        super().ended(partition, node, iteration, result, device, at_once=at_once)
        place = self._places[Pick(partition, node.name, iteration.tag())]
        given, expected = self.picks[place], self._expected[place]
        if expected.checksum is None:  # the recorded run stopped or failed before this firing had a result
            return
        # Report only the first difference, as later values depend on it.
        if self.difference is None and given.checksum != expected.checksum:
            self.difference = ReplayError(
                f"firing {place + 1} of {len(self._expected)}, {given}, gave another value than in the record: "
                f"{result!r:.200}\n  built at {node.source.location}"
            )
            raise self.difference

    def answer(self, partition: int, node: PlanNode, iteration: Tagged) -> object:
        """Return the recorded answer to a firing."""
        calls = calls_functions(node.source)
        if calls and self._live:
            return COMPUTED
        is_known = calls or asks_others(node.source)
        place = self._places[Pick(partition, node.name, iteration.tag())]
        found = self._given.get(place, UNANSWERED if is_known else COMPUTED)
        # Compute the node with the recorded results of its calls, as kernels do work around a call.
        if isinstance(found, CallLog):
            return COMPUTED
        return found if isinstance(found, Raised) else _given(found)

    def calls(self, partition: int, node: PlanNode, iteration: Tagged) -> CallLog | None:
        """Return the recorded results of a firing's calls of user functions."""
        if self._live or not calls_functions(node.source):
            return None
        found = self._given[self._places[Pick(partition, node.name, iteration.tag())]]
        assert isinstance(found, CallLog)
        return CallReplay(found.outcomes)

    def join(self, partition: int, wake: Callable[[], object], stop: Callable[[], object]) -> None:
        """Let a partition take part."""
        self._wakes[partition] = wake
        self._stop = stop

    def stalled(self) -> ReplayError:
        """Return the reason why the run has stopped without a failure: the next pick of the record never became
        ready.
        """
        names = [f"{node.name} {it.tag()}".strip() for queue in self._ready.values() for node, it in list(queue)]
        there = ", ".join(names[:_MOST_SHOWN]) + (", ..." if len(names) > _MOST_SHOWN else "") or "nothing"
        if self.is_at_end:
            return ReplayError(f"the record ends after {len(self.picks)} firings, but the run goes on; ready: {there}")
        awaited = self._expected[len(self.picks)]
        return ReplayError(
            f"firing {len(self.picks) + 1} of {len(self._expected)} in the record, {awaited}, did not become ready "
            f"here; ready: {there}"
        )


def _content_on(card: AsynchronousDevice, value: DeviceValue) -> StoreContent | None:
    """Return the content of a store on a card, with copies of its arrays there; None for any other value."""
    found: StoreContent | None = None

    def copied(store: Placed) -> tuple[Array, ...]:
        nonlocal found
        found = store.content()
        return () if found is None else found.arrays

    if not isinstance(getattr(value, "value", None), ArrayValue | RowState):
        return None
    # Copy by a kernel of the card, which runs before any later kernel writes to the elements.
    info = KernelInfo(name="record", single=False, keeps_arrays=True, flops=lambda *_: 0.0, infer=lambda *_: None)
    arrays = card.bind(copied, info)(value)
    return None if found is None else found.with_arrays(arrays)


def made_on(card: AsynchronousDevice, content: StoreContent, arrays: Sequence[Placed]) -> Placed:
    """Return a store on a card that has a content with these arrays, which are on the card."""
    info = KernelInfo(name="replay", keeps_arrays=True, flops=lambda *_: 0.0, infer=lambda *_: None)
    return card.bind(lambda *found: content.with_arrays(found).value(card.xp), info)(*arrays)


def _copied(result: Value) -> Value:
    """Return a result that stays unchanged when the memory of this one is used again."""
    if isinstance(result, tuple):
        return tuple(map(_copied, result))
    if isinstance(result, ArrayValue | RowState):
        return result.content() or result
    return result.copy() if isinstance(result, np.ndarray) else result


def _given(answer: object) -> object:
    """Return the answer to give again: its arrays have stores of their own, as elements may be read only once."""
    if isinstance(answer, StoreContent):
        return answer.value()
    return tuple(map(_given, answer)) if isinstance(answer, tuple) and not isinstance(answer, OnCard) else answer


def _checksum_of(result: Value) -> int | None:
    """Return the checksum of a result and of the arrays in its stores; None if some are not on the host."""
    values = result if isinstance(result, tuple) else (result,)
    parts = (each.arrays if isinstance(each, StoreContent) else (each,) for each in values)
    return checksum(tuple(chain.from_iterable(parts)))


def checksum(result: Value) -> int | None:
    """Return a checksum that tells results apart by their bits; None for results that are not on the host."""
    values = result if isinstance(result, tuple) else (result,)
    total = 0
    for value in values:
        if not isinstance(value, np.ndarray | np.generic | str):
            return None
        array = np.asarray(value, string if isinstance(value, str) else None)
        data = repr(array.tolist()).encode() if array.dtype.hasobject or array.dtype.kind == "T" else array.tobytes()
        total = crc32(data, crc32(f"{array.dtype}{array.shape}".encode(), total))
    return total
