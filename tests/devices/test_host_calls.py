"""Calls of the host are the same on simulated cards as on the stand-in for CuPy. Behaviour 99."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import virtual_clock
from tests.fake_cupy.stand_in import stand_in

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_KERNELS = ("eventRecord", "streamWaitEvent", "memcpyAsync", "memcpyPeerAsync", "graph")

Program = tuple[af.Graph, Any, dict[Any, Any]]


def _chain(x: af.Tensor, w: af.Tensor) -> af.Tensor:
    x = af.tanh(x @ w) * np.float32(0.5) + x
    return x @ (w + af.sum(x, axis=0))


def _line(kind: str) -> Program:
    with af.Graph() as graph:
        x = af.placeholder("float32", (4, 4))
        w = af.constant(np.eye(4, dtype=np.float32))
        y = _chain(_chain(x, w), w)
        return graph, [y, af.permute_dims(y, (1, 0)), af.shape(y)], {x: np.eye(4)}


def _counter(kind: str) -> Program:
    """Numbers of the host, and a product an iteration."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (4, 4))
        rate = af.placeholder("float32", ())
        out = af.while_loop(lambda i, *_: i < 5, lambda i, r, y: (i + 1, r * 2, y @ (x * r)), (np.int32(0), rate, x))
        return graph, out, {x: np.eye(4), rate: 0.5}


def _device_predicate(kind: str) -> Program:
    """A loop whose predicate depends on values on the card, which the host has to fetch."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (4, 4))
        return graph, af.while_loop(lambda y: af.sum(y) < 50, lambda y: (y + y @ y,), (x,)), {x: np.eye(4)}


def _training(kind: str) -> Program:
    """Saved values, and state that is updated."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (4, 4))
        weights = af.Variable(np.eye(4, dtype=np.float32))
        w = weights.read()
        _, y = af.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, af.sigmoid(y @ w) * y), (np.int32(0), x))
        (slope,) = af.gradients(af.sum(y), [weights])
        return graph, af.group(weights.assign_sub(slope * np.float32(0.1))), {x: np.eye(4)}


def _cut_training(kind: str) -> Program:
    """Two layers on two devices: copies, messages, and values kept where they are made."""
    names = [f"{kind}:0", f"{kind}:1"]
    with af.Graph() as graph:
        x = af.placeholder("float32", (4, 4))
        variables = []
        for name in names:
            with af.device(name):
                variables.append(af.Variable(np.eye(4, dtype=np.float32)))
        weights = [variable.read() for variable in variables]

        def body(i: Any, *states: Any) -> Any:
            below, after = x, []
            for name, state, w in zip(names, states, weights, strict=True):
                with af.device(name):
                    below = af.tanh(below @ w + state)
                after.append(below)
            return i + 1, *after

        out = af.while_loop(lambda i, *_: i < 4, body, (np.int32(0), x, x))
        slopes = af.gradients(af.sum(out[-1]), variables)
        updates = []
        for name, variable, slope in zip(names, variables, slopes, strict=True):
            with af.device(name):
                updates.append(variable.assign_sub(slope))
        return graph, af.group(*updates), {x: np.eye(4)}


def _elementwise(kind: str) -> Program:
    with af.Graph() as graph:
        x = y = af.placeholder("float32", (4, 4))
        for _ in range(4):
            y = af.tanh(y) + af.sum(y, axis=0)
        return graph, y, {x: np.eye(4)}


async def _counted(program: Program, count: Callable[[], Any], options: dict[str, Any], kind: str) -> tuple[Any, Any]:
    """Return the result of `count` for a run behind some others, and its values."""
    graph, fetches, feeds = program
    feeds = {tensor: np.asarray(value, np.float32) for tensor, value in feeds.items()}
    # What asks for no device would go where a kind of card has it done first.
    asked = {node.device for node in graph.nodes if node.device is not None} or {f"{kind}:0"}
    async with af.Session(graph, devices=sorted(asked), **options) as session:
        for _ in range(3):  # as many as a graph waits for
            await session.run(fetches, feeds)
        before = Counter(count())
        values = await session.run(fetches, feeds)
        return Counter(count()) - before, values


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (_line, {}),
        (_line, {"regions": False}),
        (_counter, {}),
        (_counter, {"regions": False}),
        (_device_predicate, {}),
        (_training, {}),
        (_cut_training, {}),
        (_cut_training, {"regions": False}),
        (_elementwise, {"cuda_graphs": True}),
    ],
)
def test_a_plan_makes_the_calls_that_it_makes_on_cards(
    build: Callable[[str], Program], options: dict[str, Any]
) -> None:
    """Behaviour 99."""
    with virtual_clock("2 x v100, nvlink2") as clock:
        calls, simulated = clock.run(
            _counted(build("sim"), lambda: next(iter(clock.machine.threads.values())).calls, options, "sim")
        )
    with stand_in(devices=2, nbytes=1 << 20) as cupy:
        given, real = af.run(
            _counted(build("cuda"), lambda: [name for _, name in cupy.engine.launches], options, "cuda")
        )
    kernels = sum(count for name, count in given.items() if name not in _NO_KERNELS)
    copies = given["memcpyAsync"] + given["memcpyPeerAsync"]
    assert calls["launch"] + calls["product"] + calls["library"] == kernels, given
    # A block of sums ends with one product for each of at most two weights, which counts as a launch of its store.
    assert given["matmul"] - calls["product"] in range(3)
    assert calls["library"] == given["sum"]
    assert calls["copy"] + calls["transfer"] + calls["buffer"] == copies
    assert calls["transfer"] == given["memcpyPeerAsync"]
    # Between devices it depends on times which copies find that the kernels before have ended.
    assert abs(calls["event"] - given["streamWaitEvent"]) <= given["memcpyPeerAsync"]
    assert calls["graph"] == given["graph"]
    assert kernels or given["graph"]
    for ours, theirs in zip(
        *(value if isinstance(value, list | tuple) else [value] for value in (simulated, real)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
