"""The rules by which regions and loops become graphs that are launched as a whole, and the cache of graphs.

A region that ran a few times on inputs of one kind is captured, and launched from then on. A graph is valid for the
shapes and dtypes of its arrays, and for the very values on the host: the code may have branched on them, and kernels
have them as arguments. A region with ever new host values is left alone, and so is a region that cannot be captured.
Variables are read and written at fixed addresses. A graph is bound to these, too: its *place*.

Real and simulated cards share these rules. How a graph is made and launched is a card's own matter.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, MutableSet, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from threading import Lock
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from asyncflow.devices.memory import MemoryLimitExceeded
from asyncflow.devices.values import ArraySpec
from asyncflow.errors import counted
from asyncflow.values import Kernel, Value

_log = logging.getLogger("asyncflow.devices")

WARM_UPS = 2
"""Calls with the same key before the capture: they compile the kernels, and most keys are never seen again."""

MOST_KEYS = 8
"""Number of keys that a region or loop is captured for; if none of them came twice, it is left alone."""

MOST_PLACES = 4
"""Number of graphs for one key: variables change their places while a reader holds an older value."""

SLICE_LAUNCHES = 64
"""Number of kernels captured between two turns of the event loop: to capture one takes 10 to 20 µs."""

_NO_STOP = 1 << 62
"""Number of iterations that no loop has."""

_LARGEST_KEY = 2048
"""Elements of a host array in a key: the lengths of a long batch. To find a key then takes 3 µs."""

_LEAST_PATIENCE, _GROWTH, _MOST_PATIENCE = 8, 4, 2_048
"""Calls before a graph is captured again that had to give way, the factor for each further time, and their limit."""

_launches = itertools.count(1)

Graph = TypeVar("Graph")
Result = TypeVar("Result")

Steps: TypeAlias = Generator[object, "int | None", Result]
"""A function in progress that stops now and then, and is sent how much to do until it stops again."""


class NotCapturableError(Exception):
    """Code to be captured that a graph cannot hold."""


class NotLaunchedError(Exception):
    """A graph that could not be launched, and has changed nothing.

    Attributes:
        error: the device's.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


class GraphVariable(Protocol):
    """A variable that a graph reads or writes; see `asyncflow.state.variables.captured`.

    A *handle* is that of an array in the memory of the graph's device, as the device's holder knows it.

    Attributes:
        value: what the code finds while it is captured, and leaves.
        is_written: True if the code may write it.
    """

    value: Value
    is_written: bool

    @property
    def name(self) -> str:
        """The variable's name."""

    @property
    def key(self) -> object:
        """The variable's state, by which other graphs know it."""

    @property
    def kind(self) -> ArraySpec | None:
        """The dtype and shape of the present value; None without a value."""

    def given(self) -> Value | None:
        """The variable's value, for a kernel of the device; None if it has none yet."""

    # -- for graphs bound to addresses, as of CUDA ---------------------------------------------------------------

    @property
    def handle(self) -> object | None:
        """The handle of the present value, or of its copy; None if the device has neither."""

    @property
    def is_alone(self) -> bool:
        """True if nothing but the state refers to the present value, apart from the value's handle."""

    def present(self) -> list[object]:
        """The present value as the state keeps it, in a list: no other reference to it is made."""

    def move(self, handle: object) -> None:
        """Take note that `handle` has a copy of the present value. A value of the same device is then let go."""

    def replace(self, handle: object, present: list[object]) -> bool:
        """Make a value with `handle` the present one: a copy of it so far, to which a graph is about to write.

        Returns False if the graph must not be launched: `present` is not the present value any more, or in use.
        """

    # -- for graphs that are given values, as of simulated cards -------------------------------------------------

    @property
    def lock(self) -> Lock:
        """Held from `given` to `put`."""

    def put(self, x: Value) -> None:
        """Make the result of a launch the variable's value."""


@dataclass(frozen=True, slots=True)
class GraphCode:
    """The code of a region as a graph holds it: nothing in it moves or waits, and variables are arrays of the device.

    Attributes:
        function: takes the region's inputs, and gives the tuple of its outputs, or a generator that does.
        is_generator: it gives a generator.
        variables: that the code reads or writes.
        numbers: positions of inputs that are numbers, other ones in each call: they are in memory of the card.
        extent: its first and last node and their lines, for people.
    """

    function: Kernel
    is_generator: bool = False
    variables: Sequence[GraphVariable] = ()
    numbers: frozenset[int] = frozenset()
    extent: str = ""

    def steps(self, inputs: Sequence[Value], values: Sequence[Value]) -> Steps[tuple[Sequence[Value], list[Value]]]:
        """Run the code, and return its outputs and the values that it leaves in variables; one such call at a time.

        Args:
            inputs: of the region.
            values: of the variables.
        """
        for variable, value in zip(self.variables, values, strict=True):
            variable.value = value
        try:
            called = self.function(*inputs)
            outputs: Sequence[Value] = (yield from called) if self.is_generator else called
            return outputs, [variable.value for variable in self.variables]
        finally:
            for variable in self.variables:
                variable.value = None

    @contextmanager
    def alone(self) -> Iterator[list[Value | None]]:
        """Keep other threads from writing the variables, and give the values that these have."""
        with ExitStack() as stack:
            # All regions take locks in one order, set by the compiler, so two launches never deadlock.
            for variable in self.variables:
                stack.enter_context(variable.lock)
            yield [variable.given() for variable in self.variables]


def host_key(value: Value) -> Hashable:
    """The key that tells a host value from others, to the bit; None if it cannot be told."""
    if isinstance(value, np.generic):
        return value.dtype, value.tobytes()
    if isinstance(value, np.ndarray):
        is_short = value.size <= _LARGEST_KEY and not value.dtype.hasobject
        return (value.dtype, value.shape, value.tobytes()) if is_short else None
    if isinstance(value, float):
        return float, value.hex()
    return (type(value), value) if isinstance(value, int | str | bytes) else None


class GivesWay(Protocol):
    """Graphs that can be made again, and go where memory is short; see `GraphCache`."""

    used: int

    @property
    def may_give_way(self) -> bool:
        """True if some graphs can go now."""

    def give_way(self) -> None:
        """Forget the graphs."""


class GraphCache(Generic[Graph]):
    """The graphs of a region or loop by their keys, and for each key by their places.

    Invariant: no more than `MOST_KEYS` keys, each with how often it was seen, or its graphs: one, unless variables have
    changed their places.

    Attributes:
        used: a number that grows with each launch of a graph of any cache.
    """

    __slots__ = (
        "__weakref__",
        "_capturing",
        "_complete",
        "_found",
        "_has_given_way",
        "_has_other_inputs",
        "_label",
        "_launching",
        "_refusal",
        "_warm_ups",
        "used",
    )

    def __init__(self, label: str, among: MutableSet[GivesWay] | None = None, warm_ups: int | None = None) -> None:
        """Begin without graphs.

        Args:
            label: of the region or loop.
            among: the caches of a device, which have to give way when its memory is short.
            warm_ups: calls before the capture; None for `WARM_UPS`.
        """
        self._label = label
        self._warm_ups = WARM_UPS if warm_ups is None else warm_ups
        self._found: dict[Hashable, int | dict[Hashable, Graph]] = {}
        self._complete: set[Hashable] = set()  # keys whose next graph did not fit in memory
        self._refusal = ""
        self._has_other_inputs = self._has_given_way = False
        self._capturing = self._launching = False
        self.used = 0
        if among is not None:
            among.add(self)

    def __str__(self) -> str:
        """Say how many graphs there are by now, or why there will be none."""
        if self._refusal:
            return f"none is made: {self._refusal}"
        kinds = f"{len(self.made)} made, for {counted(len(self._found), 'kind')} of inputs"
        others = ", and calls with inputs that have none" if self._has_other_inputs else ""
        return f"{kinds}{others}{'; memory was short for earlier ones' if self._has_given_way else ''}"

    @property
    def made(self) -> list[Graph]:
        """The graphs, of all keys and places."""
        # A key without a graph maps to the number of its calls.
        return [graph for found in self._found.values() if not isinstance(found, int) for graph in found.values()]

    @property
    def is_refused(self) -> bool:
        """True if nothing will be captured any more, so that no key is needed."""
        return bool(self._refusal)

    def get(self, key: Hashable, make: Callable[[], Graph]) -> Graph | None:
        """The graph for `key`, which ``make()`` captures when it is time; None if there is none, now or ever.

        The key None is that of inputs whose graph could not be told from others: it has none.
        """
        graph = self.find(key)
        if graph is None and self.is_due(key):
            with self.capturing(key) as keep:
                graph = make()
                keep(graph)
        return graph

    def may_begin(self, key: Hashable) -> bool:
        """Return True if a graph for `key` may be captured now, without calls before it."""
        is_open = key is not None and not (self._refusal or self._capturing or self._has_given_way)
        return is_open and not self.has_graph(key) and (key in self._found or len(self._found) < MOST_KEYS)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """A block that runs the code of graphs without a capture; nothing is captured meanwhile."""
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    def has_graph(self, key: Hashable) -> bool:
        """Return True if there is a graph for `key`, whatever its place."""
        return not isinstance(self._found.get(key, 0), int)

    def find(self, key: Hashable, place: Hashable = ()) -> Graph | None:
        """The graph for `key` and `place`; None if there is none now."""
        found = self._found.get(key, 0)
        return None if isinstance(found, int) else found.get(place)

    def drop(self, key: Hashable, place: Hashable = ()) -> None:
        """Forget the graph for `key` and `place`, which may be captured again."""
        found = self._found.get(key, 0)
        if not isinstance(found, int):
            found.pop(place, None)

    def is_due(self, key: Hashable) -> bool:
        """Note a call with inputs that have no graph; return True if the caller is to capture one (`capturing`).

        A graph for another place needs no warm-up.
        """
        if key is None:
            self._has_other_inputs = True
            return False
        seen = self._found.get(key, 0)
        if not isinstance(seen, int):
            # Kernels are compiled, and the region does repeat. The two buffers of a variable make two places; regions
            # that share variables may make a few more. Graphs take memory, so limit their number.
            return len(seen) < MOST_PLACES and key not in self._complete and not self._capturing
        if not seen and len(self._found) >= MOST_KEYS:
            # After graphs were freed, the next one needs many calls, so a few calls without a graph are no failure.
            if not self._has_given_way and all(isinstance(found, int) for found in self._found.values()):
                self._refusal = f"none of {MOST_KEYS} kinds of inputs has come {self._warm_ups + 1} times"
            return False
        if seen >= self._warm_ups:
            # One capture at a time: it binds the code's variables to its buffers.
            return not self._capturing
        self._found[key] = seen + 1
        return False

    def forget_calls(self, key: Hashable) -> None:
        """Forget the calls with inputs of a kind that has no graph, since one has failed: a capture would fail, too.

        A capture that fails is the last one. So three calls with wrong inputs would end the graphs of all others.
        """
        if isinstance(self._found.get(key), int):
            del self._found[key]

    @contextmanager
    def capturing(self, key: Hashable, place: Hashable = ()) -> Iterator[Callable[[Graph], None]]:
        """A block that captures the graph for `key` and `place`, and hands it to the function that it gets.

        Calls meanwhile, of other runs, go without. An exception ends with the block, and no graph will ever be; after a
        `MemoryLimitExceeded` there may be one much later. If there is a graph for another place and no room for this
        one, that graph stays. If the block is cancelled, the next call captures.
        """
        self._capturing = True
        found = self._found

        def keep(graph: Graph) -> None:
            if found is self._found and not self._refusal:  # else all graphs were dropped meanwhile
                # The entry is a number of calls, or graphs for other places.
                graphs = found.get(key)
                found[key] = {**graphs, place: graph} if isinstance(graphs, dict) else {place: graph}

        try:
            yield keep
        except MemoryLimitExceeded as error:
            # A second place only helps while a reader holds values: do not give up the first graph for it.
            if self.has_graph(key):
                error.__traceback__ = None
                self._complete.add(key)
            else:
                self._lacks_room(error)
        except Exception as error:
            # A lost device raises again when the caller goes on without a graph.
            self.refuse(error)
        finally:
            self._capturing = False

    def launched(self, key: Hashable, make: Callable[[], Graph], launch: Callable[[Graph], Result]) -> Result | None:
        """The results of ``launch(graph)``; None if there is no graph for `key`, or no room for its results."""
        graph = self.get(key, make)
        return None if graph is None else self.results(graph, launch)

    def results(self, graph: Graph, launch: Callable[[Graph], Result]) -> Result | None:
        """The results of ``launch(graph)``; None if there is no room for them, or if it cannot be launched any more.

        The caller's kernels then say at which node the device fails, if they fail, too.
        """
        self.used = next(_launches)
        self._launching = True
        try:
            return launch(graph)
        except MemoryLimitExceeded as error:
            del graph  # frees its memory before the caller's kernels allocate
            self._lacks_room(error)
            return None
        except NotLaunchedError as error:
            self.refuse(error.error)
            return None
        finally:
            self._launching = False

    @property
    def may_give_way(self) -> bool:
        """True if there are graphs, and none is being made or launched now."""
        return not (self._capturing or self._launching) and bool(self.made)

    def give_way(self) -> None:
        """Forget all graphs, whose memory others need; make new ones after many more calls than before."""
        self.clear()
        self._has_given_way = True
        # Otherwise a session whose work does not fit beside a graph would capture it again and again.
        self._warm_ups = max(_LEAST_PATIENCE, min(_GROWTH * self._warm_ups, _MOST_PATIENCE))

    def _lacks_room(self, error: MemoryLimitExceeded) -> None:
        _log.info("no room for a CUDA graph of %s: %s", self._label, error)
        error.__traceback__ = None  # its frames hold the graph's memory
        self.give_way()

    def refuse(self, error: Exception) -> None:
        """Forget all graphs, and make no more."""
        _log.info("no CUDA graph of %s: %s: %s", self._label, type(error).__name__, error)
        _log.debug("no CUDA graph of %s", self._label, exc_info=error)
        error.__traceback__ = None  # its frames hold the graph's memory
        self.clear()
        self._refusal = f"{type(error).__name__}: {error}"

    def clear(self) -> None:
        """Forget all graphs; their memory is free in the order of their stream. Start anew."""
        self._found = {}  # a new dict, so that a capture in progress notices
        self._complete.clear()
        self._refusal = ""
        self._has_other_inputs = False


def free_graphs(caches: Iterable[GivesWay], has_enough: Callable[[], bool]) -> bool:
    """Have graphs give way, the least recently used first, until there is enough memory; return True if there is."""
    # Iterate over a copy: the set is weak, and caches may end with their plans on any thread.
    for cache in sorted([cache for cache in caches if cache.may_give_way], key=attrgetter("used")):
        if has_enough():
            return True
        cache.give_way()
    return has_enough()


def slice_budget(launches: int, asked: int | None) -> int:
    """Return how many iterations, or stretches of a straight line, are captured at a time.

    Args:
        launches: of kernels until the function may stop.
        asked: by whoever drives the function; None for the first time.
    """
    return max(1, min(asked or 1, SLICE_LAUNCHES // max(launches, 1)))


def run_to_end(steps: Steps[Result]) -> Result:
    """Return the result of a function in progress, without stops."""
    budget = None  # a generator's first `send` takes None
    try:
        while True:
            steps.send(budget)
            budget = _NO_STOP
    except StopIteration as ended:
        result: Result = ended.value
        return result
