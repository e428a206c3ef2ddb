from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.state.elements.queue import QueueState
from asyncflow.state.waiting.lines import PlaceInLine
from benchmarks.queues import straight


@pytest.mark.parametrize("waits", [True, False])
async def test_takes_wait_where_the_figure_says_so(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    found: list[bool] = []
    take = QueueState.take

    def noted(*arguments: Any, **options: Any) -> Any:
        result = take(*arguments, **options)
        found.append(isinstance(result, PlaceInLine))
        return result

    monkeypatch.setattr(QueueState, "take", noted)
    graph, x, last = straight(af.FIFOQueue(100, af.spec("float32", ())), 5, waits=waits)
    async with af.Session(graph) as session:
        await session.run(last, {x: np.float32(1)})
    assert found == [waits] * 5
