"""Sessions over several devices, simulated, logical CPUs or a stand-in's cards; and programs cut over them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

import asyncflow as af
from asyncflow.testing import virtual_clock
from tests.conftest import OpenSession, any_cards, assert_baseline, held_buffers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_Result = TypeVar("_Result")

COUNTS = (2, 3, 8)
"""Numbers of devices that programs are cut over."""


@dataclass(frozen=True)
class Cluster:
    """A number of devices of a kind.

    Attributes:
        kind: ``sim`` for cards on virtual time. On asyncio's loop: ``cpu`` for logical CPUs, ``cuda`` for logical
            devices on the stand-in for CuPy's two cards, and ``mixed`` for a CPU and such devices.
        count: how many.
        link: between the cards; empty for none.
        jitter: variation of the times of a simulation.
        seed: of the jitter, and of the order in which the stand-in works.
    """

    count: int
    kind: Literal["sim", "cpu", "cuda", "mixed"] = "sim"
    link: str = "nvlink2"
    jitter: float = 0.0
    seed: int = 0

    def device(self, index: int) -> str:
        """The name of a device; indices wrap around."""
        number = index % self.count
        if self.kind == "mixed":
            return f"cuda:{number - 1}" if number else "cpu:0"
        return f"{self.kind}:{number}"

    @property
    def devices(self) -> list[str]:
        return [self.device(index) for index in range(self.count)]

    def run(self, main: Callable[[OpenSession], Coroutine[Any, Any, _Result]]) -> _Result:
        """Runs ``main(open_session)``; nothing may be left of it, and no hazard have come up."""
        if self.kind == "cpu":
            return asyncio.run(main(self._open))
        if self.kind in ("cuda", "mixed"):
            with any_cards(self.seed):
                return asyncio.run(main(self._open))
        machine = ", ".join(filter(None, (f"{self.count} x v100", self.link)))
        with virtual_clock(machine, seed=self.seed, jitter=self.jitter) as clock:
            result = clock.run(main(self._open))
        assert clock.machine.hazards == []
        return result

    @asynccontextmanager
    async def _open(self, graph: af.Graph | None = None, **options: Any) -> AsyncIterator[af.Session]:
        async with af.Session(graph, devices=self.devices, **options) as session:
            yield session
            assert_nothing_left(session)


def assert_nothing_left(session: af.Session) -> None:
    """No run and no task is in flight, and simulated devices hold no buffer of a run."""
    assert_baseline(session)
    if session.devices[0].kind == "sim":
        assert held_buffers(session) == {}
        assert session.devices[0].machine.hazards == []  # type: ignore[attr-defined]


def step_on(device: str, x: af.Tensor, other: af.Tensor) -> af.Tensor:
    """A small piece of work on a device, of its own value and another's."""
    with af.device(device):
        moved: af.Tensor = x * 0.5 + other
    return moved


WIDTH = 256
"""Elements of the vectors of `ring`."""


@dataclass(frozen=True)
class Ring:
    """A loop cut over all devices: each has a vector, adds its neighbour's, and loops and branches over it.

    Attributes:
        x: the feed, a vector of float32.
        total: one number made of all vectors.
        count: the number of iterations.
    """

    x: af.Tensor
    total: af.Tensor
    count: af.Tensor
    devices: int
    trips: int

    def feeds(self) -> dict[af.Tensor, Any]:
        return {self.x: _fed()}

    def expected(self) -> Any:
        """Return NumPy's results, bit for bit."""
        half, tenth = np.float32(0.5), np.float32(0.1)
        parts = [_fed() + np.float32(k) for k in range(self.devices)]
        for i in range(self.trips):
            parts = [part * half + parts[k - 1] for k, part in enumerate(parts)]
            for _ in range(i % 3):
                parts[-1] = parts[-1] + tenth
            parts[0] = parts[0] - parts[-1] if i % 2 else parts[0] + parts[-1]
        return parts[0]


@af.op(outputs=lambda spec: spec)
async def later(x: Any) -> Any:
    """`x`, some passes of the event loop later: between any two of them the run can be cancelled."""
    for _ in range(3):
        await asyncio.sleep(0)
    return x


def ring(cluster: Cluster, trips: int = 4, parallel_iterations: int = 3) -> Ring:
    """Builds a `Ring` in the current graph; every edge of the ring crosses devices."""
    x = af.placeholder("float32", (WIDTH,), name="x")

    def start(k: int) -> af.Tensor:
        with af.device(cluster.device(k)):
            started: af.Tensor = x + np.float32(k)
        return started

    def body(i: af.Tensor, *parts: af.Tensor) -> tuple[af.Tensor, ...]:
        moved = [step_on(cluster.device(k), part, parts[k - 1]) for k, part in enumerate(parts)]
        with af.device(cluster.device(-1)):
            _, last = af.while_loop(
                lambda j, _: j < i % 3, lambda j, v: (j + 1, v + np.float32(0.1)), (0, moved[-1]), name="inner"
            )
        first = moved[0]

        def on_first(build: Callable[[], af.Tensor]) -> Callable[[], af.Tensor]:
            def built() -> af.Tensor:
                with af.device(cluster.device(0)):
                    return build()

            return built

        with af.device(cluster.device(1)):
            is_even = af.equal(i % 2, 0)
        with af.device(cluster.device(-1)):
            last = later(last)
        chosen = af.cond(is_even, on_first(lambda: first + last), on_first(lambda: first - last))
        return (i + 1, chosen, *moved[1:-1], last)

    starts = [start(k) for k in range(cluster.count)]
    count, total, *_ = af.while_loop(
        lambda i, *_: i < trips, body, (0, *starts), parallel_iterations=parallel_iterations, name="ring"
    )
    return Ring(x, total, count, cluster.count, trips)


def _fed() -> np.ndarray[Any, Any]:
    return np.linspace(-1, 1, WIDTH, dtype=np.float32)
