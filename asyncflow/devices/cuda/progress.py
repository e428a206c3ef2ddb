"""Progress of a CUDA device with its launched work, and the state of its card.

A kernel counts as done once it is launched. So launching could run ahead for ever, and failures show at a later call,
of anything. The first CUDA error of a card is its last, and all unfinished work fails with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from asyncflow.devices.protocol import Capabilities, Deliver, LaunchingDevice, Mark
from asyncflow.errors import DeviceLostError
from asyncflow.streams.cuda.pooled_event import DONE, NOT_READY

if TYPE_CHECKING:
    from asyncflow.devices.cuda.memory import CudaPool
    from asyncflow.streams.cuda.cupy_types import Cupy
    from asyncflow.streams.cuda.stream import CudaStream
    from asyncflow.values import Kernel, Value

MARK_EVERY = 64
"""Launches between two marks that tell how far the device has got."""

MOST_AHEAD = 256
"""Launches that may be in flight before launching has to pause.

At about 1,000 the driver would block the caller; some of ours are several of the driver's, and marks count too.
"""

_CAPABILITIES = Capabilities(
    own_memory=True, runs_regions=True, captures="asked", runs_loops=True, kernels="arrays", takes_foreign=True
)

_CAPTURE_ERRORS = range(900, 909)
"""CUDA's codes of what a capture does not allow, by whichever stream: the card works."""


class Progress(LaunchingDevice["CudaStream"]):
    """The part of a CUDA device that follows its work; a base class, as every launch asks it.

    Attributes (more in `LogicalDevice`):
        cupy: the module.
        physical: the card's number.
        pool: where the device's memory comes from; its label is that of the latest launch.
        launched: kernels launched since the last mark.
    """

    def __init__(self, cupy: Cupy, physical: int, index: int, compute_streams: int) -> None:
        super().__init__("cuda", index, _CAPABILITIES, compute_streams)
        self.cupy = cupy
        self.physical = physical
        self.pool: CudaPool
        self.launched = 0
        self._copying: tuple[CudaStream, ...] = ()
        # Queried for the card's state: it never captures, and querying a capturing stream breaks the capture.
        self._probe: CudaStream | None = None
        self._in_flight = 0
        self._resumes: list[Callable[[], object]] = []
        self._lost: BaseException | None = None
        self._lost_at = ""

    # -- progress ------------------------------------------------------------------------------------------------

    def throttle(self, resume: Callable[[], None]) -> bool:
        """Return True if launching must pause for unfinished work; then call ``resume()`` once, later."""
        if self.launched >= MARK_EVERY:
            count = self.launched
            self.when_done(lambda _error: self._caught_up(count))
            self.launched = 0
            self._in_flight += count
        if self._in_flight < MOST_AHEAD or self._lost is not None:
            return False
        # Called later, so that a failing callback does not keep the others waiting.
        self._resumes.append(partial(asyncio.get_running_loop().call_soon_threadsafe, resume))
        return True

    def _caught_up(self, count: int) -> None:
        self._in_flight -= count
        if self._in_flight < MOST_AHEAD // 2:
            self._go_on()

    def _go_on(self) -> None:
        resumes, self._resumes = self._resumes, []
        for resume in resumes:
            resume()

    def mark(self) -> Mark:
        """None: `when_done` says that all work launched before it is called has ended, whoever launched it."""
        return None

    def has_ended(self) -> bool:
        """Return True if all work launched so far is known to have ended."""
        for stream in self.compute_streams:
            if not stream.is_idle:
                return False
        for stream in self._copying:
            if stream.pending:
                return False
        return self._lost is None

    def when_done(
        self, done: Callable[[BaseException | None], None], mark: Mark = None, *, elsewhere: bool = False
    ) -> None:
        """Call ``done(error)`` once, never before this returns, when all work launched has ended."""
        del mark, elsewhere
        # Every copy has a ticket, so a stream without tickets is idle.
        busy = [stream for stream in self.compute_streams if not stream.is_idle]
        busy += [stream for stream in self._copying if stream.pending]
        if not busy:
            asyncio.get_running_loop().call_soon(done, None if self._lost is None else self._loss())
            return
        left = len(busy)
        failure: BaseException | None = None

        def ended(error: BaseException | None) -> None:
            nonlocal left, failure
            left -= 1
            failure = failure or error
            if not left:
                done(None if failure is None else self.loss_of(failure))

        for stream in busy:
            stream.notify(ended)

    # -- loss of the device --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if the device is lost.

        Raises:
            DeviceLostError: an earlier kernel has broken it.
        """
        if self._lost is not None:
            raise self._loss()

    def _loss(self) -> DeviceLostError:
        last = f"launched last was {self._lost_at!r}, and " if self._lost_at else ""
        graph = self.pool.graph_launched
        last += f"the latest CUDA graph was that of {graph}; without cuda_graphs=True " if graph else ""
        loss = DeviceLostError(
            f"{self.name} is lost: a kernel or copy failed with {self._lost}, after which CUDA refuses all work in "
            f"this process; {last}CUDA_LAUNCH_BLOCKING=1 shows which it was. Restart the process"
        )
        loss.__cause__ = self._lost
        return loss

    def loss_of(self, error: BaseException) -> DeviceLostError:
        """Return the error for unfinished work: `error` comes from a stream, and makes the device lost."""
        self._lose(error)
        return self._loss()

    def cause_of(self, error: BaseException) -> BaseException:
        """Return `error`, or the loss of the device if CUDA raised `error` because of it.

        CuPy's errors of CUDA's runtime, of its driver (at launches), of cuBLAS and of Thrust are RuntimeErrors, and
        have nothing else in common.
        """
        if not isinstance(error, RuntimeError):
            return error
        if self._lost is None:
            with self.cupy.cuda.Device(self.physical):
                status = self.cupy.cuda.runtime.streamQuery(0 if self._probe is None else self._probe.raw.ptr)
            if status not in (DONE, NOT_READY, *_CAPTURE_ERRORS):
                self._lose(error)
        if self._lost is None:
            return error
        error.__traceback__ = None  # streams keep the error; its frames would keep the values of all running kernels
        return self._loss()

    def _lose(self, error: BaseException) -> None:
        if self._lost is None:
            if self.swapping is not None:
                self.swapping.device_is_lost()  # before dropping the traceback, which alone may hold saved values
            self._lost = error.with_traceback(None)
            self._lost_at = self.pool.label
        self._go_on()

    def answer(self, deliver: Deliver, make: Kernel, *args: Value) -> None:
        """Call ``deliver(make(*args), None)``, or ``deliver(None, error)`` if the device is lost or `make` fails."""
        try:
            self.check()
            made = make(*args)
        except Exception as error:
            deliver(None, self.cause_of(error))
        else:
            deliver(made, None)
