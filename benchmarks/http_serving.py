"""One model behind HTTP, beside other servers: eight LSTM steps over a vector of 512 numbers.

``python -m benchmarks.http_serving``: answers a second and times, each with one BLAS thread, for 1, 8 and 32 clients
that ask again once they are answered, and for 256: eight times the largest batch. Servers run at the same time, and are
asked in turn; ratios are of neighbouring windows. ``--python`` names an interpreter that has uvicorn and the others
(Mosec, LitServe, BentoML, Ray Serve); missing ones are left out. All batch up to 32 requests, and servers that want a
waiting time get 2 ms.

The small model is one layer, whose row takes 20 µs: it shows the other costs of a request. By hand, handlers append
their rows to a list, which is computed at the end of the pass of the event loop. "Tuned" follows the advice of the
guide on the garbage collector.

Systems that are "limited" have 32 requests in flight and as many in line. They refuse the rest, and clients ask again
at once: in the application, with `Lifespan.shed`, or with uvicorn's own limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any, NamedTuple, Self

import numpy as np
import uvloop

from benchmarks.http_servers.lstm import SIZE, model, small_model

WARM_S, MEASURED_S = 0.5, 1.5
START_S = 60.0
SYSTEMS = {
    "asyncflow": ["asyncflow"],
    "asyncflow, unbatched": ["asyncflow", "unbatched"],
    "asyncflow, limited": ["asyncflow", "limited"],
    "asyncflow, limited, shed": ["asyncflow", "limited", "shed"],
    "asyncflow, limited by uvicorn": ["asyncflow", "limited-by-uvicorn"],
    "mosec": ["mosec"],
    "asyncflow, small model": ["asyncflow", "small"],
    "asyncflow, small model, tuned": ["asyncflow", "small", "tuned"],
    "asyncflow, small model, unbatched": ["asyncflow", "small", "unbatched"],
    "by hand, small model": ["by_hand", "small"],
    "mosec, small model": ["mosec", "small"],
    "litserve": ["litserve"],
    "bentoml": ["bentoml"],
    "ray": ["ray"],
}
"""The module of each, and what follows the port."""
PATHS = {"mosec": "/inference", "litserve": "/predict", "bentoml": "/predict"}
JSON = ("litserve", "bentoml")
"""Systems whose requests are JSON; the others take and give the bytes of the numbers."""


def request(system: str, row: Any) -> bytes:
    """A request, with its head."""
    body = (
        json.dumps({"x": row.tolist() if system == "litserve" else [row.tolist()]}).encode()
        if system in JSON
        else row.tobytes()
    )
    kind = "application/json" if system in JSON else "application/octet-stream"
    head = f"POST {PATHS.get(SYSTEMS[system][0], '/')} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Connection(asyncio.Protocol):
    """A client's connection, which is opened when it is needed and the server has closed the one before.

    A protocol of its own: streams would cost more than some of the servers.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._received = b""

    async def ask(self, sent: bytes) -> tuple[int, bytes]:
        """Return the status and the body of the response to a request."""
        loop = asyncio.get_running_loop()
        if self._transport is None:
            self._transport, _ = await loop.create_connection(lambda: self, "127.0.0.1", self._port)
        self._answer = loop.create_future()
        self._received = b""
        self._transport.write(sent)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        """Answers once the response is whole."""
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        found = head.lower()
        place = found.find(b"content-length:")
        if not end or len(body) < int(found[place + 15 :].split(maxsplit=1)[0]):
            return
        if b"connection: close" in found:
            self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((int(head.split(maxsplit=2)[1]), body))

    def connection_lost(self, error: Exception | None) -> None:
        """Fails the request that waits."""
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError("the server has closed the connection"))

    def close(self) -> None:
        """Closes it."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None


def numbers(system: str, body: bytes) -> Any:
    """Return the numbers in a response."""
    if system not in JSON:
        return np.frombuffer(body, np.float32)
    found = json.loads(body)
    return np.asarray(found["y"] if system == "litserve" else found[0], np.float32)


class Load(NamedTuple):
    """Load of the clients.

    Attributes:
        rate: answers a second.
        median_ms: of the times of these.
        late_ms: their 99th percentile.
        refused: refusals a second.
    """

    rate: float
    median_ms: float
    late_ms: float
    refused: float


async def load(system: str, port: int, clients: int) -> Load:
    """Have clients ask again as soon as they are answered or refused, and count."""
    rows = np.random.default_rng(1).normal(size=(clients, SIZE)).astype(np.float32)
    expected = (small_model if "small" in SYSTEMS[system] else model)(rows)
    begin = perf_counter() + WARM_S
    end = begin + MEASURED_S
    times: list[float] = []
    refused = 0

    async def client(number: int) -> None:
        nonlocal refused
        connection = Connection(port)
        sent = request(system, rows[number])
        while (asked := perf_counter()) < end:
            try:
                status, body = await connection.ask(sent)
            except (OSError, EOFError):  # it closes connections under load
                connection.close()
                status, body = 503, b""
            if status == 200:
                np.testing.assert_allclose(numbers(system, body), expected[number], rtol=1e-4, atol=1e-5)
            elif status not in (429, 503):
                raise RuntimeError(f"{system} answers {status}: {body!r}")
            if begin <= asked and status == 200:
                times.append(perf_counter() - asked)
            elif begin <= asked:
                refused += 1
        connection.close()

    await asyncio.gather(*map(client, range(clients)))
    ordered = sorted(times) or [math.inf]
    late = ordered[int(0.99 * len(ordered))]
    return Load(len(times) / MEASURED_S, 1e3 * statistics.median(ordered), 1e3 * late, refused / MEASURED_S)


class Server:
    """One system as a program, from `__enter__` to `__exit__`."""

    def __init__(self, system: str, python: str) -> None:
        self.system = system
        self._python = python

    def __enter__(self) -> Self:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        threads = {f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL")}
        module, *options = SYSTEMS[self.system]
        self._process = subprocess.Popen(
            [self._python, "-m", f"benchmarks.http_servers.{module}_server", str(self.port), *options],
            env={**os.environ, **threads},
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=START_S)

    def has_started(self) -> bool:
        """Wait until it answers; False if it ended, or took too long."""
        return uvloop.run(self._answers())

    async def _answers(self) -> bool:
        limit = perf_counter() + START_S
        while self._process.poll() is None and perf_counter() < limit:
            try:
                await load_once(self.system, self.port)
            except (OSError, RuntimeError, EOFError):
                await asyncio.sleep(0.1)
            else:
                return True
        return False


async def load_once(system: str, port: int) -> None:
    """Ask for one answer, to see whether the server is there."""
    connection = Connection(port)
    try:
        status, _ = await connection.ask(request(system, np.zeros(SIZE, np.float32)))
    finally:
        connection.close()
    if status != 200:
        raise RuntimeError(f"{system} answers {status}")


def measure(
    systems: Sequence[str], python: str, clients: Sequence[int], rounds: int
) -> dict[tuple[str, int], list[Load]]:
    """Windows of each system that starts, for each number of clients, in turn: one of each in a round."""
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(system, python)) for system in systems]
        cells = [(server, number) for server in servers if server.has_started() for number in clients]
        taken: dict[tuple[str, int], list[Load]] = {(server.system, number): [] for server, number in cells}
        for turn in range(rounds if cells else 0):
            for server, number in cells[turn % len(cells) :] + cells[: turn % len(cells)]:
                taken[server.system, number].append(uvloop.run(load(server.system, server.port, number)))
    return taken


def table(taken: Mapping[tuple[str, int], Sequence[Load]]) -> Iterator[str]:
    """Medians, and ratios of rates: to the first system, and to the fewest clients of the same system."""
    for (system, clients), loads in taken.items():
        of_system = [each for name, each in taken if name == system]
        first = taken.get((next(iter(taken))[0], clients), loads)
        fewest = taken[system, of_system[0]]
        rate, median_ms, late_ms, refused = (statistics.median(values) for values in zip(*loads, strict=True))
        told = f"{system:28s}{clients:4d} clients {rate:6.0f}/s, p50 {median_ms:6.1f} ms, p99 {late_ms:6.1f} ms"
        told += f", {_ratio(loads, first):5.2f}x"
        if clients != of_system[0]:
            told += f", {_ratio(loads, fewest):5.2f}x of {of_system[0]} clients"
        yield told + (f", {refused:.0f} refused/s" if refused else "")


def _ratio(loads: Sequence[Load], others: Sequence[Load]) -> float:
    """The median of the ratios of windows of one round."""
    return statistics.median(each.rate / max(other.rate, 1e-9) for each, other in zip(loads, others, strict=True))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("systems", nargs="*", default=list(SYSTEMS))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    taken = measure(options.systems, options.python, options.clients, options.rounds)
    for system in options.systems:
        if not any(name == system for name, _ in taken):
            print(f"{system:28s} does not start here")
    print(*table(taken), sep="\n", flush=True)


if __name__ == "__main__":
    main()
