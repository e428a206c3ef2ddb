"""Fixtures for every test: both event loops, sessions, and guards against leaks."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

import asyncflow as af

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def graph() -> Iterator[af.Graph]:
    """A graph that the test builds in."""
    with af.Graph() as built:
        yield built


@pytest.fixture(params=[True, False], ids=["regions", "interpreted"])
def regions(request: pytest.FixtureRequest) -> bool:
    """Whether sessions compile regions: what a program does must not depend on it."""
    return bool(request.param)


@pytest.fixture
async def session(regions: bool) -> AsyncIterator[af.Session]:
    """A session in debug mode, with regions and without; afterwards nothing of its runs may be left."""
    async with af.Session(debug=True, regions=regions) as opened:
        yield opened
        assert_baseline(opened)


@pytest.fixture
def run(session: af.Session) -> Callable[..., Awaitable[Any]]:
    """`session.run`."""
    return session.run


def assert_baseline(session: af.Session) -> None:
    """After a run, however it ended: no run in flight, and no task but the test's own."""
    assert session.statistics().runs == 0
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [task for task in others if not task.done()], others


@pytest.fixture(autouse=True)
def _no_leaked_threads() -> Iterator[None]:
    """Stream threads end with their sessions."""
    before = set(threading.enumerate())
    yield
    leaked = [t for t in threading.enumerate() if t not in before and t.name.startswith(("cpu:", "asyncflow"))]
    for thread in leaked:
        thread.join(timeout=5)
    assert not [thread for thread in leaked if thread.is_alive()]
