"""Which tests fail for the processor time that they take: those that take too much every time, and have no mark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests import processor_time
from tests.processor_time import ATTEMPTS, FAR_BEYOND, LIMIT_S, ProcessorTime

OVER_S = LIMIT_S * FAR_BEYOND * 1.5


@pytest.mark.parametrize(
    ("taken_s", "options", "outcome"),
    [
        ([OVER_S] * ATTEMPTS, {}, "failed"),
        ([LIMIT_S * 0.9], {}, None),
        ([OVER_S] * (ATTEMPTS - 1) + [LIMIT_S], {}, "passed"),
        ([LIMIT_S * 1.1], {}, "passed"),
        ([OVER_S], {"slowness": 2.0}, "passed"),
        ([OVER_S], {"is_slow": True}, "passed"),
        ([OVER_S], {"is_ci": False}, "passed"),
    ],
)
def test_what_fails(
    taken_s: list[float], options: dict[str, Any], outcome: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: nothing is said of the test."""
    now_s, attempts, outcomes = 0.0, iter(taken_s), list[str]()

    def run(*_: object, **__: object) -> None:
        nonlocal now_s
        now_s += next(attempts)

    monkeypatch.delenv(processor_time.RESULT, raising=False)
    monkeypatch.setenv("CI", "true") if options.get("is_ci", True) else monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(processor_time, "_processor_s", lambda: now_s)
    monkeypatch.setattr(processor_time, "_slowness", lambda: options.get("slowness", 1.0))
    monkeypatch.setattr(processor_time, "runtestprotocol", run)
    item: Any = SimpleNamespace(
        nodeid="test",
        location=("", 0, ""),
        session=SimpleNamespace(testsfailed=0),
        ihook=SimpleNamespace(pytest_runtest_logreport=lambda report: outcomes.append(report.outcome)),
        get_closest_marker=lambda name: name if options.get("is_slow") else None,
        _initrequest=lambda: None,
    )
    protocol = ProcessorTime().pytest_runtest_protocol(item, None)
    next(protocol)
    run()
    with pytest.raises(StopIteration):
        protocol.send(True)
    assert outcomes == ([] if outcome is None else [outcome])
    assert next(attempts, None) is None, "as often as need be"
