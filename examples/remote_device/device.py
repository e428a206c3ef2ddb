"""A kind of device that asyncflow does not come with: another process, at the other end of a pipe.

Its memory is its own: an array there is a number here, a `RemoteArray`. A kernel that is a plain function of arrays is
sent once, as the name of its op and its attributes. From then on it is called by number. It counts as done once the
call is written, since the process executes all messages in order. Kernels with state, and the user's own code, run on
this side, on copies.

The thread of the device's `compute` stream writes to the pipe and waits for answers, so the event loop does neither.
When the process dies, waiting and later calls get a `DeviceLostError`.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import count
from time import perf_counter_ns
from typing import IO, Any

import numpy as np

from asyncflow.devices import (
    Capabilities,
    ChargedAccount,
    Device,
    DeviceKind,
    DeviceOptions,
    DeviceValue,
    KernelInfo,
    LaunchingDevice,
    Span,
)
from asyncflow.devices.protocol import Deliver, Mark
from asyncflow.devices.values import as_scalar, is_array, stays_on_host
from asyncflow.errors import DeviceLostError
from asyncflow.streams.beside import call_beside
from asyncflow.streams.cpu.stream import ThreadStream
from asyncflow.streams.futures import resolve
from examples.remote_device.array import RemoteArray
from examples.remote_device.kernels import HostKernel, MetadataKernel, RemoteKernel

NS_PER_CALL, NS_PER_FLOP = 50_000.0, 0.1
NS_PER_COPY, NS_PER_BYTE = 200_000.0, 1.0

MOST_AHEAD = 256
"""Messages that may wait to be written before launching has to pause."""


_GRACE_S = 10.0
"""Seconds that a process has to end."""


class Timed:
    """Work for a timeline: when a message about it was written, or when the host did it itself."""

    __slots__ = ("ended_ns", "label", "nbytes", "started_ns", "stream")

    def __init__(self, label: str, stream: str, nbytes: int = 0) -> None:
        self.label = label
        self.stream = stream
        self.nbytes = nbytes
        self.started_ns = self.ended_ns = perf_counter_ns()

    def __enter__(self) -> None:
        self.started_ns = perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self.ended_ns = perf_counter_ns()


class RemoteDevice(LaunchingDevice[ThreadStream]):
    """One process.

    Attributes (more in `LogicalDevice`):
        process: the process, once the device is open.
        freed: numbers of arrays without references, for the next message.
    """

    def __init__(self, index: int, options: DeviceOptions) -> None:
        """Name the device; its process starts with `start`."""
        capabilities = Capabilities(own_memory=True, kernels="arrays")
        super().__init__("remote", index, capabilities, options.compute_streams)
        self.memory: ChargedAccount = ChargedAccount(self.name, options.memory_limit)
        self.make_streams(ThreadStream)
        self.freed: deque[int] = deque()
        self.process: subprocess.Popen[bytes] | None = None
        self.next_number = count().__next__
        self.next_kernel = count().__next__
        self._lost = ""

    @property
    def what(self) -> str:
        """The description of the process."""
        return "no process yet" if self.process is None else f"process {self.process.pid}"

    # -- the process ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the process. Idempotent."""
        await call_beside(self.start)

    def start(self) -> None:
        """Start the process; the waiting part of `open`."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "examples.remote_device.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for this process
            )

    async def aclose(self, grace_s: float) -> bool:
        """Take no more work, wait for the present work, and end the process; return True if all ended. Idempotent."""
        has_ended = await super().aclose(grace_s)
        await call_beside(self._end, has_ended)
        return has_ended

    def _end(self, in_peace: bool) -> None:
        if self.process is None:
            return
        if not in_peace:
            self.process.kill()
        source, answers = self._pipes()
        with suppress(OSError):  # it may have died, with something left in the pipe
            source.close()  # which is how the process knows
        try:
            self.process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        answers.close()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        return process.stdin, process.stdout

    def check(self) -> None:
        """Raise if the process has died.

        Raises:
            DeviceLostError: it has.
        """
        if self._lost:
            raise DeviceLostError(self._lost)

    def _lose(self, error: Exception) -> DeviceLostError:
        if not self._lost:
            assert self.process is not None
            self.process.kill()
            ended = self.process.wait(timeout=_GRACE_S)
            self._lost = (
                f"{self.name} is lost: its process ended with code {ended} ({type(error).__name__}: {error}), and with "
                "it all values that it had; open another session"
            )
        return DeviceLostError(self._lost)

    # -- messages ------------------------------------------------------------------------------------------------

    def tell(self, timed: Timed | None, verb: str, *arguments: object) -> None:
        """Send a message without an answer, after all earlier ones."""
        self.check()
        self.compute.enqueue(self._write, timed, (self._freed(), verb, *arguments))

    def ask(self, deliver: Deliver, timed: Timed | None, verb: str, *arguments: object) -> None:
        """Send a message after all earlier ones: ``deliver(value, error)`` is called with the answer, later."""
        message = (self._freed(), verb, *arguments)

        def take(answer: Any, error: BaseException | None, *_: int) -> None:
            deliver(*(answer if error is None else (None, error)))

        self.compute.submit(self._answered, (timed, message), take, asyncio.get_running_loop())

    def _freed(self) -> list[int]:
        return [self.freed.popleft() for _ in range(len(self.freed))]

    def _write(self, timed: Timed | None, message: object) -> None:
        """On the stream's thread; of a process that is gone, the next answer tells."""
        source, _ = self._pipes()
        try:
            with timed or nullcontext():
                pickle.dump(message, source, protocol=pickle.HIGHEST_PROTOCOL)
                source.flush()
        except (OSError, ValueError) as error:
            self._lose(error)

    def _answered(self, timed: Timed | None, message: object) -> Any:
        """On the stream's thread: the answer to a message."""
        with timed or nullcontext():
            self._write(None, message)
            self.check()
            _, answers = self._pipes()
            try:
                return pickle.load(answers)
            except (OSError, EOFError, ValueError) as error:
                raise self._lose(error) from error

    # -- timelines -----------------------------------------------------------------------------------------------

    def timed(self, label: str, stream: str, nbytes: int = 0) -> Timed:
        """Return the times of a piece of work, to be filled in; a trace keeps them."""
        timed = Timed(label, stream, nbytes)
        if self._spans is not None:
            self._spans.append(timed)
        return timed

    def settle(self, spans: Sequence[Timed]) -> list[Span]:
        """The spans of work that has ended."""
        return [Span(each.label, each.stream, each.started_ns, each.ended_ns, each.nbytes) for each in spans]

    def recorded(self) -> list[Any] | None:
        """Return the list that work launched now is added to."""
        return self._spans

    # -- launching -----------------------------------------------------------------------------------------------

    def bind(self, kernel: Callable[..., Any], info: KernelInfo) -> Callable[..., Any]:
        """Return a kernel that the process runs, if it can make it; else a kernel that runs here, on copies."""
        recipe = info.recipe
        if info.is_metadata and not info.host_inputs:
            return MetadataKernel(self, kernel, info)
        if recipe is None or info.is_async or info.host_inputs or not _can_send(recipe.attrs):
            return HostKernel(self, kernel, info)
        return RemoteKernel(self, info)

    def use(self, value: Any) -> tuple[bool, Any]:
        """Return True and the number of an array of this device, or False and any other argument."""
        if not isinstance(value, RemoteArray):
            return False, value
        if value.unsent is not None:
            self.tell(self.timed(value.name, "h2d", value.nbytes), "put", value.number, value.unsent)
            value.unsent = None
        return True, value.number

    def throttle(self, resume: Callable[[], None]) -> bool:
        """Return True if launching has to pause, as many messages wait to be written."""
        if self.compute.pending < MOST_AHEAD or self._lost:
            return False
        self.compute.submit(int, (), lambda *_: resume(), asyncio.get_running_loop())
        return True

    def mark(self) -> Mark:
        """None: whatever is asked for is done after all that was asked before."""
        return None

    def when_done(
        self, done: Callable[[BaseException | None], None], mark: Mark = None, *, elsewhere: bool = False
    ) -> None:
        """Call ``done(error)`` once all work launched by now has ended."""
        self.ask(lambda _, error: done(error), None, "wait")

    # -- values --------------------------------------------------------------------------------------------------

    def constant(self, value: Any) -> Any:
        """A device value that has been there from the start; any thread may ask."""
        return self.brought(value, "constant")

    def feed(self, value: Any, deliver: Deliver) -> None:
        """Deliver a copy of a host value; it is sent when a kernel needs it."""
        deliver(self.brought(value.copy() if isinstance(value, np.ndarray) else value, "feed"), None)

    def brought(self, value: Any, name: str) -> Any:
        """Return an array of the host as an array of the device; numbers, and other values, stay on the host."""
        if not is_array(value) or stays_on_host(value) or not np.ndim(value):
            return as_scalar(value)
        return RemoteArray(self, (value.dtype, value.shape), name, value)

    def copy_to_host(self, value: RemoteArray, deliver: Deliver) -> None:
        """Deliver a copy of an array, or why there is none."""
        unsent = value.unsent
        if unsent is not None:
            asyncio.get_running_loop().call_soon(lambda: deliver(unsent.copy(), None))
        else:
            timed = self.timed(value.name, "d2h", value.nbytes)
            self.ask(lambda copy, error: deliver(as_scalar(copy), error), timed, "get", value.number)

    def fetched(self, value: Any) -> Any:
        """A value on the host, or a future of it."""
        if not isinstance(value, DeviceValue):
            return value
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # Whoever waits for several hears of the first failure only.
        future.add_done_callback(lambda future: future.cancelled() or future.exception())
        value.to_host(partial(resolve, future))
        return future

    # -- for placement -------------------------------------------------------------------------------------------

    def kernel_ns(self, flops: float, nbytes: float) -> float:
        """The expected time of a kernel."""
        return NS_PER_CALL + NS_PER_FLOP * flops

    def transfer_ns(self, nbytes: float, target: Device) -> float:
        """The expected time until a value made here is there on `target`."""
        return 0.0 if target is self else NS_PER_COPY + NS_PER_BYTE * nbytes


class RemoteKind(DeviceKind):
    """The kind ``remote``: any number of processes."""

    name = "remote"

    def open(self, index: int, options: DeviceOptions) -> RemoteDevice:
        """The device ``remote:<index>``."""
        return RemoteDevice(index, options)


def _can_send(attrs: object) -> bool:
    try:
        pickle.dumps(attrs)
    except Exception:  # it says so in whatever way it likes
        return False
    return True


KIND = RemoteKind()
