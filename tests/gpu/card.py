"""`Card`: the card that these tests use, or the stand-in for CuPy where there is none; and what only tests do to it."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from asyncflow.devices.cuda.backend import cuda_backend
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.streams.cuda.bindings import Bindings, cuda_bindings
from asyncflow.streams.cuda.stream import CudaStream
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.elementwise import _loaded
from tests.fake_cupy.engine import Item
from tests.fake_cupy.stand_in import stand_in

SPIN = r"""
extern "C" __global__ void spin(unsigned long long ns) {
    // Both clocks: the first tells the time, the second ends the kernel should the first stand still.
    unsigned long long started, now;
    const long long cycle = clock64();
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(started));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - started < ns && clock64() - cycle < (1LL << 35));
}
"""
"""Keeps a stream busy for some nanoseconds, and 17 s at 2 GHz at most."""

FAULT = r"""
extern "C" __global__ void fault(int* address) { *address = 1; }
"""

FAKE_BYTES, FAKE_PINNED_BYTES = 256 << 20, 8 << 20
STALL_S = 20.0
"""Seconds after which the stand-in lets a stalled stream go on. A call that waits for it then fails a test instead of
hanging it.
"""

GRACE_S = 30.0

MOST_RUNS = 30
"""Most runs until one of them must find all the memory that it needs."""

T = TypeVar("T")


def card_is_there() -> bool:
    """Return True if this machine has a card that CuPy can use."""
    return cuda_backend().cupy is not None


class Card:
    """Card 0, real or not.

    Attributes:
        cupy: the module, or the stand-in for it.
        fake: the stand-in; None on a real card.
    """

    def __init__(self, cupy: Any, fake: FakeCupy | None) -> None:
        self.cupy = cupy
        self.fake = fake
        self._kernels: dict[str, Any] = {}

    @property
    def is_real(self) -> bool:
        return self.fake is None

    @property
    def bindings(self) -> Bindings:
        """The module that makes conditional nodes."""
        found: Bindings | None = cuda_bindings() if self.fake is None else self.fake.bindings
        assert found is not None, "cuda-bindings is not installed, or too old"
        return found

    def choose(self, real: int, fake: int) -> int:
        """Return the real test's size, or a size that the stand-in computes in a moment."""
        return real if self.is_real else fake

    # -- devices and streams -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def device(self, index: int = 0, **options: Any) -> AsyncIterator[CudaDevice]:
        """A logical device on card 0; closed, and all its work done, afterwards."""
        device = CudaDevice(self.cupy, index, physical=0, **options)
        await device.open()
        try:
            yield device
        finally:
            assert await device.aclose(GRACE_S)

    @asynccontextmanager
    async def devices(self, count: int, **options: Any) -> AsyncIterator[list[CudaDevice]]:
        """Open `count` logical devices, all on card 0."""
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self.device(index, **options)) for index in range(count)]

    def total_bytes(self, device: CudaDevice) -> int:
        """Return the bytes that the device's pool has taken from the card."""
        with self.cupy.cuda.Device(device.physical):
            total: int = device.pool._pool.total_bytes()
            return total

    # -- time --------------------------------------------------------------------------------------------------------

    def spin(self, stream: CudaStream, ms: float, blocks: int = 1) -> None:
        """Give `stream` a kernel that takes so long, of large blocks if several; on the stand-in, no time."""
        with stream:
            if self.fake is not None:
                self.fake.engine.give(self.fake.engine.queue(stream.raw.ptr, stream.physical), "spin", None)
            else:
                threads = 1 if blocks == 1 else 1024
                self._kernel("spin", SPIN)((blocks,), (threads,), (np.uint64(round(ms * 1e6)),))

    @contextmanager
    def stall(self, *streams: CudaStream, ms: float) -> Iterator[None]:
        """Keep streams from executing their work inside the block: for `ms` on a card, on the stand-in until the
        end.
        """
        if self.fake is None:
            for stream in streams:
                self.spin(stream, ms)
            yield
            return
        engine = self.fake.engine
        gate = Item("gate", None, (), internal=True)

        def release() -> None:
            with engine.condition:
                gate.finish()
                engine.condition.notify_all()

        for stream in streams:
            engine.give(engine.queue(stream.raw.ptr, stream.physical), "stall", None, (gate,))
        timer = threading.Timer(STALL_S, release)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            release()

    def fault(self, stream: CudaStream) -> None:
        """Give `stream` a kernel that writes where there is no memory: the card is lost to this process."""
        if self.fake is not None:
            self.fake.fail_stream(stream.raw)
            return
        with stream:
            self._kernel("fault", FAULT)((1,), (1,), (np.uint64(0),))

    def _kernel(self, name: str, source: str) -> Any:
        if name not in self._kernels:
            self._kernels[name] = self.cupy.RawKernel(source, name)
        return self._kernels[name]

    def warm_up(self) -> None:
        """Compile the kernels of these tests; on a thread that may wait."""
        if self.is_real:
            for name, source in (("spin", SPIN), ("fault", FAULT)):
                self._kernel(name, source).compile()

    # -- what was done -----------------------------------------------------------------------------------------------

    @contextmanager
    def never_blocks(self, growth: list[str] | None = None) -> Iterator[None]:
        """Raise if a call of this thread inside has blocked; seen on the stand-in only.

        Args:
            growth: takes the calls that got the pool more memory; None if they raise like others.
        """
        before = len(self.blocking())
        yield
        blocked = self.blocking()[before:]
        if growth is not None:
            growth += [call for call in blocked if call == "malloc"]
            blocked = [call for call in blocked if call != "malloc"]
        assert blocked == [], blocked

    def blocking(self) -> list[str]:
        """The calls so far that have blocked; seen on the stand-in only."""
        return [] if self.fake is None else self.fake.blocking()

    async def without_blocking(self, run: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the first run that waits for nothing; raise if all of them wait.

        The first runs wait for memory, until no run needs more than before. That depends on how late the runs
        before it gave theirs back.
        """
        blocked: list[str] = []
        for _ in range(MOST_RUNS):
            before = len(self.blocking())
            found = await run()
            blocked = self.blocking()[before:]
            if not blocked:
                return found
        raise AssertionError(f"each of {MOST_RUNS} runs waited, the last one for {blocked}")

    def compiled(self) -> Collection[tuple[str, float]]:
        """Every kernel compiled so far: on a card the files of CuPy's cache, and when they were written."""
        if self.fake is not None:
            return {(key, 0.0) for key in _loaded}
        folder = Path(os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser()
        return {(path.name, path.stat().st_mtime) for path in folder.glob("*")}


@contextmanager
def opened_card(seed: int = 0) -> Iterator[Card]:
    """The card, with the compiled kernels of these tests, or a new stand-in, which sessions find too."""
    if card_is_there():
        card = Card(cuda_backend().cupy, None)
        card.warm_up()
        yield card
        return
    with stand_in(nbytes=FAKE_BYTES, seed=seed, pinned_nbytes=FAKE_PINNED_BYTES) as fake:
        yield Card(fake, fake)


def now_us() -> float:
    """The host's time."""
    return perf_counter() * 1e6
