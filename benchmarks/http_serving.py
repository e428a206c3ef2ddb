"""One model behind HTTP, beside other servers: eight LSTM steps over a vector of 512 numbers, for 1 and 32 clients.

``python -m benchmarks.http_serving``: requests a second and times, one server after the other, each with one BLAS
thread. ``--python`` names an interpreter that has uvicorn and the others (Mosec, LitServe, BentoML, Ray Serve); those
that it has not are left out. All batch up to 32 requests, and those that want a time to wait for others get 2 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.http_servers.lstm import SIZE, model

WARM_S, MEASURED_S = 1.0, 4.0
START_S = 60.0
SYSTEMS = {
    "asyncflow": ["asyncflow"],
    "asyncflow, unbatched": ["asyncflow", "unbatched"],
    "mosec": ["mosec"],
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
    head = f"POST {PATHS.get(system, '/')} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def answer(reader: asyncio.StreamReader) -> bytes:
    """The body of a response."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if " 200 " not in head.partition("\r\n")[0]:
        raise RuntimeError(head)
    length = next(line for line in head.split("\r\n") if line.startswith("content-length:"))
    return await reader.readexactly(int(length.partition(":")[2]))


def numbers(system: str, body: bytes) -> Any:
    """What a response says."""
    if system not in JSON:
        return np.frombuffer(body, np.float32)
    found = json.loads(body)
    return np.asarray(found["y"] if system == "litserve" else found[0], np.float32)


async def load(system: str, port: int, clients: int) -> tuple[float, float, float]:
    """Requests a second, and the median and 99th percentile of their times in milliseconds."""
    rows = np.random.default_rng(1).normal(size=(clients, SIZE)).astype(np.float32)
    expected = model(rows)
    begin = perf_counter() + WARM_S
    end = begin + MEASURED_S
    times: list[float] = []

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = request(system, rows[number])
        body = b""
        while (asked := perf_counter()) < end:
            writer.write(sent)
            body = await answer(reader)
            if asked >= begin:
                times.append(perf_counter() - asked)
        np.testing.assert_allclose(numbers(system, body), expected[number], rtol=1e-4, atol=1e-5)
        writer.close()

    await asyncio.gather(*map(client, range(clients)))
    ordered = sorted(times)
    return len(times) / MEASURED_S, 1e3 * statistics.median(ordered), 1e3 * ordered[int(0.99 * len(ordered))]


def measure(system: str, python: str, clients: list[int]) -> dict[int, tuple[float, float, float]] | None:
    """The figures of one server, by clients; None if it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL")}
    module, *options = SYSTEMS[system]
    command = [python, "-m", f"benchmarks.http_servers.{module}_server", str(port), *options]
    process = subprocess.Popen(
        command,
        env={**os.environ, **threads},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return asyncio.run(_measure(process, system, port, clients))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=START_S)


async def _measure(
    process: subprocess.Popen[bytes], system: str, port: int, clients: list[int]
) -> dict[int, tuple[float, float, float]] | None:
    limit = perf_counter() + START_S
    while process.poll() is None and perf_counter() < limit:
        try:
            await load_once(system, port)
            return {number: await load(system, port, number) for number in clients}
        except (OSError, RuntimeError, EOFError):
            await asyncio.sleep(0.1)
    return None


async def load_once(system: str, port: int) -> None:
    """One request, to see whether it is there."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(system, np.zeros(SIZE, np.float32)))
    await answer(reader)
    writer.close()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("systems", nargs="*", default=list(SYSTEMS))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32])
    options = parser.parse_args()
    for system in options.systems:
        found = measure(system, options.python, options.clients)
        told = "does not start here" if found is None else ""
        for number, (rate, median_ms, late_ms) in (found or {}).items():
            told += f"   {number:3d} clients: {rate:6.0f} requests/s, p50 {median_ms:6.1f} ms, p99 {late_ms:6.1f} ms"
        print(f"{system:22s}{told}", flush=True)


if __name__ == "__main__":
    main()
