"""A small trace with everything in it."""

from __future__ import annotations

import pytest

from asyncflow.runtime.watch.trace import DeviceRequests, Firing, MemorySample, RunSpan, Trace

ORIGIN = 9_000_000_000


@pytest.fixture
def trace() -> Trace:
    """Two runs on two devices: 6 firings, 3 of them async and overlapping, one failed, one cancelled."""

    def firing(
        run: int,
        node: str,
        op: str,
        tag: str,
        device: str,
        stream: str,
        times: tuple[int, int, int],
        status: str = "ok",
    ) -> Firing:
        scheduled, started, ended = (ORIGIN + ns for ns in times)
        return Firing(
            run, node, op, tag, device, stream, scheduled, started, ended, "float32[64,64]", status, "model.py:7"
        )

    return Trace(
        firings=[
            firing(0, "loop/less", "less", "loop/0", "cpu:0", "inline", (0, 1_000, 3_001)),
            firing(0, "loop/matmul", "matmul", "loop/0", "cpu:1", "compute", (3_001, 4_000, 9_000)),
            firing(0, "loop/get", "http_get", "loop/0", "cpu:0", "async", (3_001, 3_500, 8_000)),
            firing(1, "loop/get", "http_get", "loop/0", "cpu:0", "async", (4_000, 5_000, 9_500), "cancelled"),
            firing(1, "loop/get", "http_get", "loop/1", "cpu:0", "async", (8_000, 8_000, 8_500), "error"),
            firing(1, "loop/less", "less", "loop/1", "cpu:0", "inline", (3_000, 3_001, 3_500)),
        ],
        runs=[
            RunSpan(0, "predict", ORIGIN, ORIGIN + 9_000, "ok"),
            RunSpan(1, "", ORIGIN + 2_000, ORIGIN + 10_000, "error"),
        ],
        memory=[MemorySample("cpu:1", ORIGIN + 9_000, 16_384), MemorySample("cpu:1", ORIGIN + 4_000, 8_192)],
        requests=[DeviceRequests(0, "cuda:0", 29, 0, 4, 35), DeviceRequests(1, "cuda:0", 0, 1, 2, 3)],
        dropped=3,
    )
