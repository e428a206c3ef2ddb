"""The fake GPU: queues of work, and one thread that does it later, in any order that the queues and events allow.

Rules
1. Work does nothing when it is given. It runs on the GPU thread, after all earlier work of its queue.
2. Among the queues whose head is ready the GPU thread picks one at random (from a seed). Two queues are ordered only by
   events, as on a card: a wait that was forgotten shows up as a wrong result for some seed.
3. A fault loses the device: its work is dropped, and every later call about it raises the fault's error.
4. A call that blocks its thread is logged in `Engine.calls` before it blocks.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum, auto
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeVar

from tests.fake_cupy.errors import STICKY, CUDADriverError, CUDARuntimeError, DeviceFault, WouldBlockForEverError

if TYPE_CHECKING:
    from tests.fake_cupy.graphs import Capture

T = TypeVar("T")

MOST_SLEEPERS = 56
"""Number of sleepable event records that an H100 has room for in a stream that is behind. The next one blocks, whatever
other work was given in between.
"""

LAUNCH_FAILURE = 719
"""Error code of a device on which a kernel raised a Python exception: the device is lost."""


def _error(call: str, code: int) -> RuntimeError:
    """Return the error that CuPy raises if `call` returns `code`: kernels are launched by the driver, not by the
    runtime.
    """
    return CUDADriverError(code) if call == "launchKernel" else CUDARuntimeError(code)


class Kind(Enum):
    """The room that an item takes in its stream."""

    WORK = auto()
    """Kernels, copies and events with a time: one place in the launch queue."""
    SLEEPER = auto()
    """An event that a thread can sleep on: one of `MOST_SLEEPERS`."""
    MARK = auto()
    """Any other event, or a wait for one: none."""
    INTERNAL = auto()
    """Not given by the host: none."""


class Item:
    """A piece of queued work; also the point that a recorded event stands for."""

    __slots__ = ("after", "done", "done_ns", "internal", "kind", "name", "work")

    def __init__(
        self,
        name: str,
        work: Callable[[], None] | None,
        after: Iterable[Item],
        internal: bool,
        kind: Kind = Kind.WORK,
    ) -> None:
        self.name = name
        self.kind = Kind.INTERNAL if internal else kind
        self.work = work
        self.done: bool = False
        self.after: tuple[Item, ...] = tuple(item for item in after if not item.done)
        self.internal = internal
        self.done_ns = 0

    def finish(self) -> None:
        self.done = True
        self.done_ns = perf_counter_ns()
        self.work = None
        self.after = ()


class Queue:
    """The work of one stream, in order."""

    def __init__(self, ptr: int, device: int, *, blocking: bool, null: bool = False) -> None:
        self.ptr = ptr
        self.device = device
        self.blocking = blocking
        self.null = null
        self.items: deque[Item] = deque()
        self.running: Item | None = None
        self.last: Item | None = None
        self.capture: Capture | None = None
        # Counted, because a destructor may append while a loop over `items` allocates.
        self._waiting = dict.fromkeys(Kind, 0)

    def push(self, item: Item) -> None:
        self.items.append(item)
        self.last = item
        self._waiting[item.kind] += 1

    def pop(self) -> Item:
        item = self.items.popleft()
        self._waiting[item.kind] -= 1
        return item

    def drop(self) -> None:
        """Forget all items but the running one."""
        while self.items:
            self.pop().finish()

    @property
    def idle(self) -> bool:
        return not self.items and self.running is None

    def pending(self, *kinds: Kind) -> int:
        """Return how many items of these kinds are not done."""
        running = self.running
        return sum(self._waiting[kind] for kind in kinds) + (running is not None and running.kind in kinds)


class Engine:
    """Queues, the GPU thread, faults, and the log of blocking calls."""

    def __init__(self, devices: int, seed: int, launch_limit: int) -> None:
        self.devices = devices
        self.launch_limit = launch_limit
        self.calls: list[tuple[int, str]] = []
        self.launches: list[tuple[int, str]] = []
        self.errors: list[BaseException] = []
        self.lost: dict[int, int] = {}
        # The values of the handles of conditional nodes, and the streams that capture, the last to begin last.
        self.conditionals: dict[int, int] = {}
        self.captures: list[Queue] = []
        self.closed = False
        # What keeps an address in use, and whether it still does; memory objects say that.
        self.keeper: Callable[[int], int | None] = lambda _address: None
        self.is_kept: Callable[[int], bool] = lambda _keeper: True
        # Re-entrant, because a destructor may run at any allocation, also inside these short sections.
        self.condition = threading.Condition(threading.RLock())
        self._random = random.Random(seed)
        self._queues: dict[int, Queue] = {}
        self._null = [Queue(0, device, blocking=True, null=True) for device in range(devices)]
        self._next_ptr = 0x1000
        self._paused_by: int | None = None
        self._steps = 0
        self.faults: deque[tuple[int, str | None]] = deque()
        self._thread = threading.Thread(target=self._run, name="fake-gpu", daemon=True)
        self._thread.start()

    # Streams

    def new_ptr(self) -> int:
        """A handle that no other object of this engine ever has."""
        with self.condition:
            self._next_ptr += 0x10
            return self._next_ptr

    def create_queue(self, device: int, *, blocking: bool) -> int:
        queue = Queue(self.new_ptr(), device, blocking=blocking)
        with self.condition:
            self._queues[queue.ptr] = queue
        return queue.ptr

    def destroy_queue(self, ptr: int) -> None:
        """Forget the stream; its items are still executed, as on a card."""
        with self.condition:
            queue = self._queues.get(ptr)
            if queue is not None and queue.idle:
                del self._queues[ptr]

    def queue(self, ptr: int, device: int) -> Queue:
        """The queue of a stream handle; 0 and 1 are the null stream of `device`."""
        if ptr in (0, 1):
            return self._null[device]
        queue = self._queues.get(ptr)
        if queue is None:
            raise CUDARuntimeError(400)
        return queue

    def all_queues(self) -> list[Queue]:
        return [*self._null, *self._queues.values()]

    # Giving work

    def give(
        self,
        queue: Queue,
        name: str,
        work: Callable[[], None] | None,
        after: Iterable[Item] = (),
        *,
        internal: bool = False,
        kind: Kind = Kind.WORK,
        addresses: Iterable[int] = (),
    ) -> Item:
        """Append work to `queue`; blocks like a card when too much is pending there, except for `internal` work.

        Where the stream captures, the work is recorded instead, with the memory at its addresses, and the item stands
        for nothing.
        """
        if queue.capture is not None and not internal:
            keepers = (self.keeper(address) for address in addresses)
            queue.capture.record(name, work, (keeper for keeper in keepers if keeper is not None))
            return Item(name, None, (), internal)
        with self.condition:
            item = Item(name, work, (*after, *self._legacy_order(queue)), internal, kind)
            limit = {Kind.WORK: self.launch_limit, Kind.SLEEPER: MOST_SLEEPERS}.get(item.kind)
            if limit is not None and queue.pending(item.kind) >= limit:
                self.block(f"{name}: launch queue full", lambda: queue.pending(item.kind) < limit, queue.device)
            if self.closed or queue.device in self.lost:
                item.finish()
                return item
            if not internal:
                self.launches.append((threading.get_ident(), name))
            queue.push(item)
            self.condition.notify_all()
        return item

    def do_spoiling(self, queue: Queue) -> None:
        """Do the spoiling of freed memory that only waits for its turn, before the memory is used again.

        On a card nothing is done to freed memory. So where all work before is done, other streams need not wait for
        this one to use it. Where some work is left, the poison stays behind that, and shows a wait that is missing.
        """
        if threading.current_thread() is self._thread:  # a finalizer that allocates there must not wait for itself
            return
        with self.condition:
            # One item after another may be under way, each of them a poison.
            self.condition.wait_for(lambda: queue.running is None or queue.running.kind is not Kind.INTERNAL)
            if queue.running is not None and queue.running.kind is Kind.WORK:
                return
            for item in queue.items:
                if item.kind is Kind.WORK or not all(other.done for other in item.after):
                    return
                if item.name == "poison" and item.work is not None:
                    item.work()
                    item.work = None

    def _legacy_order(self, queue: Queue) -> list[Item]:
        """The legacy null stream and the blocking streams of a device take turns."""
        if queue.null:
            others = [q for q in list(self._queues.values()) if q.blocking and q.device == queue.device]
        else:
            others = [self._null[queue.device]] if queue.blocking else []
        return [other.last for other in others if other.last is not None]

    # Graphs

    def note_allocation(self, ptr: int, active: Collection[int]) -> None:
        """Memory that is allocated inside a block of a stream that captures belongs to the graph.

        Args:
            ptr: of the memory.
            active: the streams of the thread, with the streams of blocks around the current one.
        """
        for queue in self.captures:
            if queue.capture is not None:
                queue.capture.allocated.discard(ptr)
                if queue.ptr in active:
                    queue.capture.allocated.add(ptr)

    def capture_of(self, ptr: int) -> Capture | None:
        """Return the capture in which a piece was allocated, or the latest open capture of a body in its graph."""
        captures = [queue.capture for queue in self.captures if queue.capture is not None]
        owner = next((capture for capture in captures if ptr in capture.allocated), None)
        if owner is None:
            return None
        *_, root = owner.graph.line()
        innermost = [capture for capture in captures if root in capture.graph.line()][-1]
        return None if innermost.invalid else innermost

    def pick(self, ready: Sequence[T]) -> T:
        """Pick a queue at random; on the GPU thread."""
        return self._random.choice(ready)

    # Blocking the host

    def log(self, name: str) -> None:
        """Note a call that blocks, or may block, its thread."""
        self.calls.append((threading.get_ident(), name))

    def block(self, name: str, ready: Callable[[], bool], device: int) -> None:
        """Log `name`, then hold the calling thread until `ready`.

        Raises:
            CUDARuntimeError: the device is or gets lost.
            WouldBlockForEverError: this thread has paused the GPU.
        """
        self.log(name)
        with self.condition:
            while not ready():
                self.check(device)
                if self.closed:
                    raise RuntimeError(f"{name}: the fake was closed while this thread waited")
                if self._paused_by == threading.get_ident():
                    raise WouldBlockForEverError(f"{name} blocks, and this very thread has paused the GPU")
                self.condition.wait()
        self.check(device)

    def wait_idle(self) -> None:
        """Wait, unlogged, until no work is left; for tests."""
        with self.condition:
            if self._paused_by is not None and not all(queue.idle for queue in self.all_queues()):
                raise WouldBlockForEverError("wait_idle() of a paused fake with work in its queues: resume() first")
            self.condition.wait_for(lambda: self.closed or all(queue.idle for queue in self.all_queues()))

    # Controls

    def pause(self) -> None:
        with self.condition:
            self._paused_by = threading.get_ident()
            self._steps = 0
            # What is running now is finished first, so that "nothing executes" is true on return.
            self.condition.wait_for(lambda: all(queue.running is None for queue in self.all_queues()))

    def resume(self) -> None:
        with self.condition:
            self._paused_by = None
            self._steps = 0
            self.condition.notify_all()

    def step(self, count: int) -> int:
        """Let a paused GPU do up to `count` items; return how many were ready to be done."""
        with self.condition:
            if self._paused_by is None:
                raise RuntimeError("step() needs a paused fake: call pause() first")
            self._steps = count
            self.condition.notify_all()
            self.condition.wait_for(self._stuck)
            done = count - self._steps
            self._steps = 0
            return done

    def _stuck(self) -> bool:
        busy = any(queue.running is not None for queue in self.all_queues())
        return self.closed or (not busy and (self._steps == 0 or not self._ready()))

    # Faults

    def fail_next(self, code: int, call: str | None) -> None:
        self.faults.append((code, call))

    def enter(self, call: str, device: int) -> None:
        """Begin the runtime function `call`: raise what a test asked for, or what lost the device."""
        if self.faults and self.faults[0][1] in (None, call):
            code = self.faults.popleft()[0]
            if code in STICKY:
                self.lose(device, code)
            raise _error(call, code)
        self.check(device, call)

    def check(self, device: int, call: str = "") -> None:
        """Raise if the device is lost."""
        code = self.lost.get(device)
        if code is not None:
            raise _error(call, code)

    def lose(self, device: int, code: int) -> None:
        """Drop the device's work; every later call about it gives `code`."""
        with self.condition:
            self.lost.setdefault(device, code)
            for queue in self.all_queues():
                if queue.device == device:
                    queue.drop()
            self.condition.notify_all()

    # The GPU thread

    def _ready(self) -> list[Queue]:
        """The queues whose head may run now, unsorted by anything but age."""
        return [q for q in self.all_queues() if q.items and all(item.done for item in q.items[0].after)]

    def _choose(self) -> Queue | None:
        if self._paused_by is not None and self._steps == 0:
            return None
        ready = self._ready()
        return self._random.choice(ready) if ready else None

    def _take(self) -> tuple[Queue, Item] | None:
        """Wait for work; None when the fake is closed."""
        with self.condition:
            while not self.closed:
                queue = self._choose()
                if queue is not None:
                    item = queue.pop()
                    queue.running = item
                    if self._paused_by is not None and not item.internal:
                        self._steps -= 1
                    return queue, item
                self.condition.wait()
        return None

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            queue, item = taken
            try:
                if item.work is not None:
                    item.work()
            except DeviceFault as fault:
                self.lose(queue.device, fault.code)
            except Exception as error:
                error.add_note(f"in {item.name!r} on the GPU thread")
                self.errors.append(error)
                self.lose(queue.device, LAUNCH_FAILURE)
            with self.condition:
                item.finish()
                queue.running = None
                self.condition.notify_all()
            # A waiting GPU holds no work and so no memory.
            del taken, queue, item

    def close(self) -> None:
        """Stop the thread; work that was not done is dropped."""
        with self.condition:
            self.closed = True
            for queue in self.all_queues():
                queue.drop()
            self.condition.notify_all()
        self._thread.join()
