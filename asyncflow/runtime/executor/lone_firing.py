"""A plan that is one firing that waits in line, as most requests of a serving application are: it needs no scheduler.

That is a call of a batched function, a pooled loop or a shared vertex map, from feeds to fetches. It waits where others
compute it, and is told on the event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.graph.op import KernelContext
from asyncflow.runtime.executor.kernels.provenance import as_kernel_error
from asyncflow.state.waiting.lines import NOT_YET, PlaceInLine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.compiler.lowering.single_call import SingleCall
    from asyncflow.devices.protocol import Device
    from asyncflow.runtime.executor.scope import RunScope
    from asyncflow.values import Value


class LoneFiring:
    """Executes such a plan once, as an `Executor` does a partition, whose attributes mean the same.

    Invariant: once it is done, with results, a failure or stopped, it has no place in line any more.
    """

    __slots__ = ("_call", "_inputs", "_place", "device", "done", "failures", "is_closed", "is_queued", "results", "run")

    def __init__(self, call: SingleCall, run: RunScope, device: Device) -> None:
        self._call, self.run, self.device = call, run, device
        self._inputs: list[Value] = []
        self._place: PlaceInLine | None = None
        self.results: list[Value] = []
        self.failures: list[tuple[int, int, BaseException]] = []
        self.done = self.is_closed = self.is_queued = False

    @property
    def scheduler(self) -> LoneFiring:
        """The firing itself, which knows when it is done."""
        return self

    @property
    def is_quiet(self) -> bool:
        """True if no work is left or in flight."""
        return self.done

    def start(self, feeds: Sequence[Value]) -> None:
        """Begins to wait as soon as the session has time."""
        self._inputs = self._call.inputs(feeds)
        if self._call.keys:
            context = KernelContext(seed=self.run.seed, run=self.run.number, tag=())
            for place, make in self._call.keys:
                self._inputs[place] = make(context)
        if self.run.turn.has_time():
            self.drive(0)
        else:
            self.run.turn.enqueue(self)

    def drive(self, _deadline_ns: int) -> bool:
        """Begins to wait; nothing more will have to be driven (False)."""
        if not self.done:
            try:
                self.run.context.run(self._begin)
            except BaseException as error:
                self._failed(error)
        return False

    def _begin(self) -> None:
        found = self._call.node.kernel(*self._inputs)  # type: ignore[misc]
        assert isinstance(found, PlaceInLine)
        self._place = found
        found.when_called(self._wake)

    def _wake(self) -> None:
        place = self._place
        if place is None:
            return  # given up: the result belongs to the next place in line
        try:
            result = place.claim()
            if result is NOT_YET:
                return
            self.results = self._call.results(result)
            for value in self.results:
                self.device.memory.track(value, self._call.node.source.name)
        except BaseException as error:
            self._place = None
            self._failed(error)
            return
        self._place, self._inputs, self.done = None, [], True
        self.run.on_quiet()

    def _failed(self, error: BaseException) -> None:
        if self.is_closed:
            raise error  # no caller waits for this run any more
        node = self._call.node
        self.fail(as_kernel_error(error, node, "", self._inputs, self.device.name), node.source.id)
        self.run.on_quiet()

    def fail(self, error: BaseException, order: int = -1) -> None:
        """Ends the run with `error`."""
        self.failures.append((self.run.turn.count(), order, error))
        self.run.on_failed()  # which stops it

    def stop(self) -> None:
        """Waits no more."""
        self.done = True
        self._inputs, self.results = [], []  # a kept error refers to this frame
        if self._place is not None:
            place, self._place = self._place, None
            place.leave()

    def waiting(self) -> list[str]:
        """Return a line on the awaited resource, if it waits, for messages."""
        where = f"built at {self._call.node.source.location}"
        return [] if self._place is None else [f"{self._call.node.name}: {self._place.describe()}\n    {where}"]

    def close(self) -> None:
        """Lets go of the run, which has ended: no cycle may hold its values."""
        self.is_closed = True
        del self.run
