"""Requests of a run to a card: ``python -m benchmarks.gpu_launches`` counts them for ten ordinary programs.

Counted on the stand-in for CuPy, so the numbers are the same on every machine, and stand for no time: kernels and
graphs that the host launches, copies, and arrays that it allocates, of one run of a program that has run before. After
each row stands why its first region is no CUDA graph. With ``--explain NAME`` it prints the plan.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import asyncflow as af
from asyncflow.devices.captures import WARM_UPS
from asyncflow.devices.cuda.graphs.graph import CALM
from asyncflow.devices.cuda.memory import CudaPool
from benchmarks.trees import batch_of, complete, tree_lstm
from benchmarks.walks import walked
from tests.fake_cupy.module import FakeCupy
from tests.fake_cupy.stand_in import stand_in

STEPS: Final = 6
BATCH: Final = 4
SIZE: Final = 8

ROOT: Final = Path(__file__).resolve().parents[1]

ALLOCATION: Final = f"devices/cuda/memory.py: {CudaPool.malloc.__qualname__}"
"""The name in a walk of the function that allocates an array in the memory of a card."""

_OTHERS: Final = frozenset({"eventRecord", "streamWaitEvent", "poison"})
"""Entries of the stand-in's record that are neither kernels, graphs nor copies."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests of the host to a card in one run.

    Attributes:
        kernels: launched one by one.
        graphs: launched.
        copies: within the card's memory, to it, and from it.
        allocations: of arrays, most of which the pool has at hand.
    """

    kernels: int
    graphs: int
    copies: int
    allocations: int


@dataclass(frozen=True, slots=True)
class Program:
    """A program: what to fetch, and what to feed.

    Attributes:
        fetches: of the graph that is the current one where it was built.
        feeds: by placeholder.
    """

    fetches: object
    feeds: Mapping[af.Tensor, object]


# -- the programs ----------------------------------------------------------------------------------------------------


def _random(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def _variable(name: str, *shape: int) -> af.Variable:
    return af.Variable(_random(*shape), name=name)


def _sequences() -> tuple[af.Tensor, dict[af.Tensor, object]]:
    xs = af.placeholder("float32", (STEPS, BATCH, SIZE), name="xs")
    return xs, {xs: _random(STEPS, BATCH, SIZE)}


def _trained(loss: af.Tensor, variables: Sequence[af.Variable], feeds: Mapping[af.Tensor, object]) -> Program:
    return Program([loss, af.optim.sgd(zip(af.gradients(loss, variables), variables, strict=True), 0.1)], feeds)


def mlp_with_adam() -> Program:
    """A step of a network of two layers."""
    x = af.placeholder("float32", (BATCH, SIZE), name="x")
    first, second = _variable("first", SIZE, SIZE), _variable("second", SIZE, 1)
    loss = af.mean(af.square(af.tanh(x @ first) @ second))
    pairs = zip(af.gradients(loss, [first, second]), (first, second), strict=True)
    return Program([loss, af.optim.adam(pairs)], {x: _random(BATCH, SIZE)})


def _cell(w: af.Variable, u: af.Variable) -> Callable[..., tuple[af.Tensor, af.Tensor]]:
    def cell(x: af.Tensor, h: af.Tensor, c: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        i, f, o, g = af.split(x @ w + h @ u, 4, axis=-1)
        c = af.sigmoid(f) * c + af.sigmoid(i) * af.tanh(g)
        return af.sigmoid(o) * af.tanh(c), c

    return cell


def lstm_training() -> Program:
    """A step of an LSTM in a loop of the user's own."""
    xs, feeds = _sequences()
    weights = _variable("w", SIZE, 4 * SIZE), _variable("u", SIZE, 4 * SIZE)
    cell, zeros = _cell(*weights), af.zeros((BATCH, SIZE), dtype="float32")
    _, h, _ = af.while_loop(lambda t, *_: t < STEPS, lambda t, h, c: (t + 1, *cell(xs[t], h, c)), (0, zeros, zeros))
    return _trained(af.sum(af.square(h)), weights, feeds)


def _dynamic_rnn(lengths: Sequence[int] | None) -> Program:
    xs, feeds = _sequences()
    weights = _variable("w", SIZE, 4 * SIZE), _variable("u", SIZE, 4 * SIZE)
    cell, zeros = _cell(*weights), af.zeros((BATCH, SIZE), dtype="float32")

    def step(x: Any, state: Any) -> tuple[Any, Any]:
        state = cell(x, *state)
        return state[0], state

    given = None
    if lengths is not None:
        given = af.placeholder("int64", (BATCH,), name="lengths")
        feeds[given] = np.asarray(lengths)
    outputs, _ = af.nn.dynamic_rnn(step, xs, (zeros, zeros), given)
    return _trained(af.mean(af.square(outputs)), weights, feeds)


def dynamic_rnn() -> Program:
    """A step of an LSTM layer over sequences of one length."""
    return _dynamic_rnn(None)


def ragged() -> Program:
    """A step of the same over sequences of different lengths."""
    return _dynamic_rnn([STEPS, 2, 5, 3])


def scan() -> Program:
    """The running sum of products."""
    xs, feeds = _sequences()
    w = af.constant(_random(SIZE, SIZE))
    return Program(
        af.scan(lambda total, x: af.tanh(total @ w + x), xs, af.zeros((BATCH, SIZE), dtype="float32")), feeds
    )


def counted_loop() -> Program:
    """A loop whose number of iterations the host knows."""
    x = af.placeholder("float32", (SIZE, SIZE), name="x")
    y = af.while_loop(lambda i, _: i < STEPS, lambda i, v: (i + 1, af.tanh(v @ v)), (0, x))[1]
    return Program(y, {x: _random(SIZE, SIZE)})


def mapped() -> Program:
    """A function of one row, over the rows of a matrix."""
    x = af.placeholder("float32", (BATCH, SIZE), name="x")
    return Program(af.map_fn(lambda row: af.tanh(row) * 2.0, x), {x: _random(BATCH, SIZE)})


def newton() -> Program:
    """A loop that decides by the card's values."""
    x = af.placeholder("float32", (SIZE,), name="x")
    y = af.while_loop(lambda y: af.max(af.abs(y * y - x)) > 1e-3, lambda y: (y + x / y) / 2, x)
    return Program(y, {x: np.linspace(1, 4, SIZE).astype(np.float32)})


def newton_training() -> Program:
    """A step that learns the number whose roots a loop finds: the gradient runs through all iterations."""
    x, wanted = _variable("x", SIZE), np.linspace(1, 2, SIZE).astype(np.float32)
    squares = af.square(x) + 1
    y = af.while_loop(lambda y: af.max(af.abs(y * y - squares)) > 1e-3, lambda y: (y + squares / y) / 2, squares)
    return _trained(af.sum(af.square(y - wanted)), [x], {})


def attention() -> Program:
    """One head over a sequence."""
    x = af.placeholder("float32", (SIZE, SIZE), name="x")
    q, k, v = (x @ _random(SIZE, SIZE) for _ in range(3))
    return Program(af.softmax(q @ af.matrix_transpose(k) / np.float32(3), axis=-1) @ v, {x: _random(SIZE, SIZE)})


def trees() -> Program:
    """A step of a Tree-LSTM over two trees."""
    function, variables = tree_lstm(SIZE)
    graph, x = af.InputGraph.placeholder(), af.placeholder("float32", (None, SIZE), name="x")
    h, _ = af.vertex_map(function, graph, x).roots
    batch = batch_of([complete(4), complete(2)], SIZE)
    return _trained(af.sum(af.square(h)), variables, {**graph.feeds(batch.graph), x: batch.xs})


PROGRAMS: Final[Mapping[str, Callable[[], Program]]] = {
    "MLP, adam": mlp_with_adam,
    "LSTM, training": lstm_training,
    "dynamic_rnn, training": dynamic_rnn,
    "ragged, training": ragged,
    "scan": scan,
    "counted loop": counted_loop,
    "map_fn": mapped,
    "Newton": newton,
    "attention": attention,
    "Tree-LSTM, training": trees,
}

DECIDED: Final[Mapping[str, Callable[[], Program]]] = {"Newton": newton, "Newton, training": newton_training}
"""Programs whose loops `device_while=True` gives to the card."""


# -- counting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """Findings about a program.

    Attributes:
        counts: of a warm run, as the stand-in counts them.
        traced: of the same, as its trace counts them.
        plan: in words.
    """

    counts: Counts
    traced: Counts
    plan: str

    @property
    def reasons(self) -> list[str]:
        """Return the plan's lines about each region on the card."""
        lines = self.plan.replace(f"{ROOT}/", "").splitlines()
        return [line.partition("# ")[2] for line in lines if line.startswith("      # ")]


async def found_for(build: Callable[[], Program], cupy: FakeCupy, **options: Any) -> Found:
    """Run a program until its graphs are made, and count what one more run asks of the card.

    Args:
        build: the program.
        cupy: the stand-in whose card it runs on.
        options: of the session.
    """
    with af.Graph() as graph:
        program = build()
    async with af.Session(graph, ["cuda:0"], **options) as session:
        for _ in range(WARM_UPS + CALM + 3):
            await session.run(program.fetches, program.feeds)
        cupy.engine.launches.clear()
        trace = af.Trace(detail="region")
        walk = await walked(lambda: session.run(program.fetches, program.feeds, trace=trace))
        names = Counter(name for _, name in cupy.engine.launches)
        copies, graphs = names["memcpyAsync"], names["graph"]
        kernels = sum(count for name, count in names.items() if name not in _OTHERS) - copies - graphs
        plan = session.plan(program.fetches, list(program.feeds)).explain()
    return Found(Counts(kernels, graphs, copies, walk[ALLOCATION]), Counts(*trace.requests[0][2:]), plan)


async def count_all(programs: Mapping[str, Callable[[], Program]] = PROGRAMS, **options: Any) -> dict[str, Found]:
    """The programs by name, each on a card of its own."""
    found = {}
    for name, build in programs.items():
        with stand_in(devices=1, nbytes=64 << 20) as cupy:
            found[name] = await found_for(build, cupy, **options)
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_launches", description=__doc__)
    parser.add_argument("--explain", choices=PROGRAMS, help="print the plan of one program")
    chosen = parser.parse_args().explain
    launched, captured = (asyncio.run(count_all(cuda_graphs=graphs)) for graphs in (False, True))
    if chosen is not None:
        print(captured[chosen].plan)
        return
    print(f"{'':24}{'launched one by one':^36}{'cuda_graphs=True':^36}")
    heads = "kernels", "graphs", "copies", "arrays"
    print(f"{'':24}{''.join(f'{head:>9}' for head in 2 * heads)}")
    for name in PROGRAMS:
        print(f"{_row(name, launched, captured)}  {captured[name].reasons[0]}")
    by_host, by_card = (asyncio.run(count_all(DECIDED, device_while=on_card)) for on_card in (False, True))
    print(f"{'':24}{'the host decides':^36}{'device_while=True':^36}")
    for name in DECIDED:
        print(_row(name, by_host, by_card))


def _row(name: str, *found: Mapping[str, Found]) -> str:
    counts = (count for each in found for count in astuple(each[name].counts))
    return f"{name:24}{''.join(f'{count:9}' for count in counts)}"


if __name__ == "__main__":
    main()
