"""The machine that simulated devices are part of: its clock, host, links and chance, and the hazards found."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from weakref import WeakKeyDictionary

from asyncflow.devices.captures import GivesWay
from asyncflow.devices.figures.host import LAUNCHES, Host, HostThread, Launches
from asyncflow.devices.figures.presets import DEFAULT_HOST, MachineSpec
from asyncflow.devices.sim.links import CopyLane
from asyncflow.devices.sim.namespace import SimNamespace
from asyncflow.devices.sim.values import SimArray, SimMemoryAccount, StandIn, Storage
from asyncflow.entered import Entered
from asyncflow.errors import HazardError
from asyncflow.streams.sim.stream import HostClock, SimEvent, SimStream
from asyncflow.streams.virtual import VirtualClockLoop
from asyncflow.values import Array


class SimMachine:
    """A host with simulated cards, on virtual time.

    Every session opens its own devices on it, with streams and memory of their own; the links are shared by all, and so
    is the thread of the host that drives them. Where a network joins the cards, each is in a host of its own. One seed
    and one program give one history.

    Attributes:
        spec: the cards and what connects them.
        loop: whose time it is.
        host: what the host has seen of every stream.
        driver: times of its threads' activities.
        launches: how kernels come to a card.
        threads: the host's threads used so far, by the devices they drive.
        jitter: kernels and copies take up to this fraction more or less, at random.
        shapes_only: arrays over 4 KiB have no data.
        iterations: number of iterations of loops whose conditions would need that data; None: an error.
        graphs: caches of graphs, and the account of the device that each is of.
        landing: memory that a copy fills, by the event of the copy, until that is done or the pool of that memory
            waits for it; see `asyncflow.devices.cuda.values.Landing`.
        hazards: all that were found, as messages.
        noting: the namespace of stores on cards that launch kernels of their own.
    """

    def __init__(
        self,
        spec: MachineSpec,
        loop: VirtualClockLoop,
        *,
        seed: int = 0,
        jitter: float = 0.0,
        shapes_only: bool = False,
        iterations: int | None = None,
        host: Host = DEFAULT_HOST,
        launches: Launches | None = None,
    ) -> None:
        """Build the machine; `launches` is how kernels come to a card, None as `host` does by default.

        Raises:
            TypeError, ValueError: see `check_chance` and `check_launches`.
        """
        check_chance(seed, jitter)
        check_launches(launches)
        self.spec = spec
        self.loop = loop
        self.host = HostClock(loop)
        self.driver = host
        self.launches: Launches = launches or host.launches
        self.threads: dict[str, HostThread] = {}
        self.jitter = jitter
        self.shapes_only = shapes_only
        self.iterations = iterations
        self.graphs: WeakKeyDictionary[GivesWay, SimMemoryAccount] = WeakKeyDictionary()
        self.landing: dict[SimEvent, Storage] = {}
        self.hazards: list[str] = []
        self.noting = SimNamespace(shapes_only=shapes_only)
        self._raised = 0
        self._random = Random(seed)
        self._lanes: dict[str, CopyLane] = {}
        self._kept: dict[int, tuple[weakref.ref[object], Storage]] = {}

    def now_ns(self) -> int:
        """The virtual time."""
        return self.loop.now_ns

    def duration_ns(self, seconds: float) -> int:
        """Return a duration with jitter."""
        jitter = self.jitter
        return round(seconds * 1e9 * self._random.uniform(1 - jitter, 1 + jitter) if jitter else seconds * 1e9)

    def thread_of(self, name: str, index: int) -> HostThread:
        """The thread of the host that drives the device `name`, which is in the host of card `index`."""
        driven = name if self.driver.thread_a_device else f"host {index}" if self.spec.message_s else "all devices"
        if driven not in self.threads:
            self.threads[driven] = HostThread(self.driver, self.host)
        return self.threads[driven]

    def lane(self, name: str) -> CopyLane:
        """Return the link of this name, shared by all users of the name."""
        if name not in self._lanes:
            self._lanes[name] = CopyLane(name)
        return self._lanes[name]

    # -- hazards -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise hazards found where nothing could be raised.

        Raises:
            HazardError: memory was freed too early, since the last call.
        """
        if self._raised < len(self.hazards):
            found = self.hazards[self._raised :]
            self._raised = len(self.hazards)
            raise HazardError("\n".join(found))

    def check_read(self, stream: SimStream, array: SimArray, reader: str) -> None:
        """Raise unless the next work of `stream` comes after what wrote `array`.

        Raises:
            HazardError: no event orders them.
        """
        if stream.has_seen(array.written):
            if self.landing and stream is array.storage.pool:
                self.landing.pop(array.storage.written, None)
            return
        writer = array.written.stream.name
        self.hazards.append(
            f"{reader!r} reads {array.name!r} on stream {stream.name} with no event that it is written: "
            f"{array.written.label!r} writes it on stream {writer}; record an event on {writer} after that and let "
            f"{stream.name} wait for it"
        )
        self._raised += 1
        raise HazardError(self.hazards[-1])

    def check_reuse(self, storage: Storage) -> None:
        """Find out whether memory that was just freed is still in use; `check` raises it."""
        if self.loop.is_closed():
            return  # running work was dropped with the loop
        pool, readers = storage.pool, storage.readers or {}
        for event, verb in ((storage.written, "writes"), *((event, "reads") for event in readers.values())):
            if not pool.has_seen(event):
                self.hazards.append(_early_free(storage, event, verb))

    # -- memory kept by state ------------------------------------------------------------------------------------

    def keep(self, owner: Array, storage: Storage) -> None:
        """Remember whose memory state's array is, and keep that while the array lives."""
        if type(owner) is StandIn:
            owner.storage = storage
            return
        key = id(owner)
        kept = self._kept
        if key not in kept or kept[key][1] is not storage:
            kept[key] = (weakref.ref(owner, lambda _: kept.pop(key, None) and None), storage)

    def kept(self, owner: Array) -> Storage | None:
        """The storage of an array that state keeps."""
        if type(owner) is StandIn:
            return owner.storage
        entry = self._kept.get(id(owner))
        return None if entry is None else entry[1]


def check_chance(seed: object, jitter: object) -> None:
    """Raise unless seed and jitter are valid for a machine.

    Raises:
        TypeError: `seed` is no integer, or `jitter` no real number.
        ValueError: `jitter` is not in 0 <= jitter < 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"seed is an integer; got {type(seed).__name__} {seed!r}")
    if isinstance(jitter, bool) or not isinstance(jitter, numbers.Real):
        raise TypeError(f"jitter is a fraction of a kernel's time, such as 0.1; got {type(jitter).__name__} {jitter!r}")
    if not 0.0 <= float(jitter) < 1.0:
        raise ValueError(f"jitter is a fraction of a kernel's time, 0 <= jitter < 1, not {jitter!r}")


def check_launches(launches: object) -> None:
    """Raise unless this can be how a machine launches.

    Raises:
        ValueError: it is none of ``"regions"``, ``"nodes"`` and ``"graphs"``, and not None.
    """
    if launches is not None and launches not in LAUNCHES:
        raise ValueError(f"launches is one of {', '.join(map(repr, LAUNCHES))}; got {launches!r}")


def check_iterations(iterations: object, *, shapes_only: bool) -> None:
    """Raise unless a machine can assume this number of iterations.

    Raises:
        TypeError: it is no integer, and not None.
        ValueError: it is negative, or all loops have the data to decide.
    """
    if iterations is None:
        return
    if isinstance(iterations, bool) or not isinstance(iterations, numbers.Integral):
        raise TypeError(f"iterations is an integer; got {type(iterations).__name__} {iterations!r}")
    if not shapes_only:
        raise ValueError("iterations=: loops decide by their data, unless shapes_only=True leaves it out")
    if int(iterations) < 0:
        raise ValueError(f"iterations is a number of iterations, 0 or more; got {iterations}")


def _early_free(storage: Storage, event: SimEvent, verb: str) -> str:
    pool, other = storage.pool.name, event.stream.name
    return (
        f"the buffer of {storage.written.label!r} on {storage.home.name} ({storage.nbytes} bytes) is freed while "
        f"stream {other} still {verb} it ({event.label!r}): it goes back to the pool of {pool}, whose next work may "
        f"overwrite it; keep it referenced until an event recorded on {other} after that is done, or let {pool} wait "
        "for one"
    )


_current: Entered[SimMachine] = Entered("asyncflow_sim_machine")


def current_machine() -> SimMachine | None:
    """The machine on which sessions open simulated devices; None outside `use_machine`."""
    return _current.innermost()


@contextmanager
def use_machine(machine: SimMachine) -> Iterator[SimMachine]:
    """Let sessions that are opened inside, in this context, find `machine`."""
    _current.enter(machine)
    try:
        yield machine
    finally:
        _current.leave(machine)
