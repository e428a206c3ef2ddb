"""The benchmark of servers sends requests to ours, checks the answers, and leaves no process behind."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from benchmarks import http_serving
from benchmarks.http_servers.lstm import SIZE, model
from benchmarks.http_serving import Load


@pytest.mark.slow
def test_it_asks_a_server_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_serving, "WARM_S", 0.0)
    monkeypatch.setattr(http_serving, "MEASURED_S", 0.3)
    found = http_serving.measure(["asyncflow", "asyncflow, limited, shed"], sys.executable, [1, 70], 1)
    assert len(found) == 4
    assert all(math.isfinite(load.rate) and load.rate > 0 for loads in found.values() for load in loads)
    assert [bool(loads[0].refused) for loads in found.values()] == [False, False, False, True]


def test_what_does_not_start_is_left_out() -> None:
    assert http_serving.measure(["mosec"], "/bin/false", [1], 1) == {}


def test_ratios_are_of_windows_of_one_round() -> None:
    taken = {
        ("a", 32): [Load(100, 1, 2, 0), Load(300, 1, 2, 0)],
        ("a", 256): [Load(50, 1, 2, 7), Load(300, 1, 2, 7)],
        ("b", 32): [Load(50, 1, 2, 0), Load(75, 1, 2, 0)],
    }
    lines = list(http_serving.table(taken))
    assert [" ".join(line.split()).partition("ms, p99 2.0 ms, ")[2] for line in lines] == [
        "1.00x",
        "1.00x, 0.75x of 32 clients, 7 refused/s",
        "0.38x",
    ]


def test_answers_are_read_as_each_system_gives_them() -> None:
    row = np.arange(SIZE, dtype=np.float32)
    for system, body in (
        ("asyncflow", row.tobytes()),
        ("litserve", f'{{"y": {row.tolist()}}}'.encode()),
        ("bentoml", f"[{row.tolist()}]".encode()),
    ):
        assert np.array_equal(http_serving.numbers(system, body), row)
        head, _, sent = http_serving.request(system, row).partition(b"\r\n\r\n")
        assert f"Content-Length: {len(sent)}".encode() in head
    assert model(np.zeros((3, SIZE), np.float32)).shape == (3, SIZE)
