"""The benchmark of servers asks ours, checks what it answers, and leaves no process."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from benchmarks import http_serving
from benchmarks.http_servers.lstm import SIZE, model


@pytest.mark.slow
def test_it_asks_a_server_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_serving, "WARM_S", 0.0)
    monkeypatch.setattr(http_serving, "MEASURED_S", 0.3)
    found = http_serving.measure("asyncflow", sys.executable, [1, 4])
    assert found is not None and set(found) == {1, 4}
    assert all(math.isfinite(figure) and figure > 0 for figures in found.values() for figure in figures)


def test_what_does_not_start_is_left_out() -> None:
    assert http_serving.measure("mosec", "/bin/false", [1]) is None


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
