"""Tests that fail for their processor time, and functions of which only a part runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import processor_time
from tests.cells import COSTLY
from tests.processor_time import ATTEMPTS, FAR_BEYOND, LIMIT_S, MOST_PARTS, SHARE_S, ProcessorTime, costly

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


def test_what_takes_more_than_its_share_is_divided() -> None:
    taken = {
        **{f"cheap[{each}]": (SHARE_S / 9, False) for each in range(9)},
        **{f"twice[{each}]": (SHARE_S / 5, False) for each in range(10)},
        **{f"a_part_of_four[{each}]": (SHARE_S / 3, False) for each in range(3)},
        **{f"became_cheap[{each}]": (SHARE_S / 9, False) for each in range(4)},
        **{f"by_far[{each}]": (SHARE_S * 9, False) for each in range(MOST_PARTS)},
        **{f"whole[{each}]": (SHARE_S * 9, False) for each in range(9)},
        "of_two[0]": (SHARE_S * 2, False),
        "of_two[1]": (SHARE_S * 2, False),
        "alone": (SHARE_S * 4, False),
        **{f"slow[{each}]": (SHARE_S * 9, True) for each in range(9)},
    }
    assert costly(taken, {"a_part_of_four": 4, "became_cheap": 2, "gone": 5, "whole": 1}) == {
        "a_part_of_four": 4,
        "by_far": MOST_PARTS,
        "of_two": 2,
        "twice": 2,
        "whole": 1,
    }


def test_functions_that_are_divided_exist() -> None:
    root = Path(__file__).parents[2]
    texts = {path: (root / path).read_text(encoding="utf-8") for path in {name.partition("::")[0] for name in COSTLY}}
    for name in COSTLY:
        path, *_, function = name.split("::")
        assert f"def {function}(" in texts[path], name
    assert all(1 <= parts <= MOST_PARTS for parts in COSTLY.values())
