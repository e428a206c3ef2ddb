"""Loops that a card runs by itself give, to the bit, what the same loops give where the host drives them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.cuda.graphs import logs
from asyncflow.devices.cuda.graphs.loop import DeviceLoop
from tests.conftest import small_cards
from tests.fake_cupy import FakeCupy

Built = tuple[list[af.Tensor], dict[af.Tensor, Any]]
"""Fetches and feeds of a run."""


def launched(cupy: FakeCupy) -> list[str]:
    """Return the names of the launches, without copies."""
    return [name for _, name in cupy.engine.launches if "cop" not in name and name != "poison"]


async def results(
    build: Callable[[], Built], *, device_while: bool, runs: int = 2, seed: int = 0, **options: Any
) -> tuple[list[list[bytes]], list[str], str]:
    """Return the bits of all results of each run, the launches of the last run, and the plan's explanation."""
    with small_cards(seed) as cupy:
        with af.Graph() as graph:
            fetched, feeds = build()
        found = []
        async with af.Session(
            graph, ["cuda:0"], device_while=device_while, debug=True, **{"loop_batching": False} | options
        ) as session:
            for _ in range(runs):
                cupy.engine.launches.clear()
                found.append([np.asarray(value).tobytes() for value in await session.run(fetched, feeds)])
            explained = session.plan(fetched, list(feeds)).explain()
        return found, launched(cupy), explained


async def check_equal(build: Callable[[], Built], graphs: int, **options: Any) -> str:
    """Run with and without `device_while`, compare the bits, and return how the card's plan explains its loops.

    Args:
        build: makes the program, in the current graph.
        graphs: number of graph launches of the last run.
        options: of `results`.
    """
    by_host, _, _ = await results(build, device_while=False, **options)
    by_card, launches, explained = await results(build, device_while=True, **options)
    assert by_card == by_host
    assert launches.count("graph") == graphs
    return explained


def matrix(size: int = 3) -> tuple[af.Tensor, dict[af.Tensor, Any]]:
    """A placeholder, and a feed for it."""
    x = af.placeholder("float64", (size, size), name="x")
    return x, {x: np.random.default_rng(size).normal(size=(size, size)) * 0.4}


def until(limit: float, step: Callable[[af.Tensor], af.Tensor], start: af.Tensor, **options: Any) -> af.Tensor:
    """A loop that goes on while the sum of squares is below `limit`."""
    return af.while_loop(lambda y: af.sum(y * y) < limit, step, start, **options)


# -- products and variables --------------------------------------------------------------------------------------------


def with_products() -> Built:
    x, feeds = matrix()
    return [until(50, lambda y: y @ x + (x @ y) * 0.5 + 0.3, x)], feeds


def with_products_of_stacks() -> Built:
    x, feeds = matrix()
    start = af.stack([x, x + 1])
    return [until(500, lambda y: af.matmul(y, x) + af.matmul(x, y) + 0.3, start)], feeds


def with_products_in_parts() -> Built:
    """In the predicate, a branch and an inner loop."""
    x, feeds = matrix()

    def step(y: af.Tensor) -> af.Tensor:
        y = af.cond(af.sum(y @ x) > 0, lambda: y @ x + 1, lambda: y + 0.5)
        return until(9, lambda z: z @ x + 1.25, y)

    return [af.while_loop(lambda y: af.max(y @ y) < 60, step, x)], feeds


def with_variables() -> Built:
    """Read in the predicate, the body, a branch, and an inner loop; one in several places."""
    x, feeds = matrix()
    w = af.Variable(np.full((3, 3), 0.75), name="w")
    bias, most = af.Variable(np.float64(0.25), name="bias"), af.Variable(np.float64(900), name="most")

    def step(y: af.Tensor) -> af.Tensor:
        y = af.cond(af.max(y) > 1, lambda: y @ w.read() + bias.read(), lambda: y + 1)
        return until(9, lambda z: z + w.read() + bias.read(), y)

    return [af.while_loop(lambda y: af.sum(y * y) < most.read() + bias.read(), step, x)], feeds


def with_variables_that_change() -> Built:
    """Written before and behind the loop, in each run."""
    x, feeds = matrix()
    w = af.Variable(np.full((3, 3), 0.5), name="w")
    before = w.assign_add(np.full((3, 3), 0.125))
    y = until(70, lambda y: y @ w.read() + 0.5, x)
    return [y, before, w.assign_sub(y / 1024), w.read()], feeds


@pytest.mark.parametrize(
    "build",
    [with_products, with_products_of_stacks, with_products_in_parts, with_variables, with_variables_that_change],
)
async def test_products_and_variables_are_in_the_loop(build: Callable[[], Built]) -> None:
    explained = await check_equal(build, graphs=1, runs=3)
    assert "the card runs it" in explained
    assert "the host drives" not in explained


async def test_a_loop_that_writes_a_variable_stays_with_the_host() -> None:
    def build() -> Built:
        x, feeds = matrix()
        total = af.Variable(np.float64(0), name="total")

        def step(y: af.Tensor) -> af.Tensor:
            with af.control_dependencies([total.assign_add(af.max(y))]):
                return y * 1.5 + total.read()

        return [until(50, step, x), total.read()], feeds

    assert "works on a store or variable, which the host does" in await check_equal(build, graphs=0)


# -- gradients ---------------------------------------------------------------------------------------------------------


def with_gradients(*targets: af.Tensor | af.Variable, of: af.Tensor) -> list[af.Tensor]:
    """Return the result of a loop, and the gradients of its sum of squares."""
    return [of, *af.gradients(af.sum(of * of), targets)]


def trained() -> Built:
    x, feeds = matrix()
    return with_gradients(x, of=until(50, lambda y: af.tanh(y) @ x * 1.5 + y + 0.25, x)), feeds


def trained_with_variables() -> Built:
    x, feeds = matrix()
    w, bias = af.Variable(np.full((3, 3), 0.375), name="w"), af.Variable(np.float64(0.25), name="bias")
    y = until(90, lambda y: af.tanh(y) @ w.read() + y + bias.read(), x)
    return with_gradients(x, w.read(), bias.read(), of=y), feeds


def trained_by_steps() -> Built:
    """Each run changes what the next one computes with, and so the number of iterations."""
    x, feeds = matrix()
    w = af.Variable(np.full((3, 3), 0.375), name="w")
    y = until(90, lambda y: af.tanh(y) @ w.read() + y + 0.25, x)
    (grad,) = af.gradients(af.sum(y), [w])
    return [y, w.assign_sub(grad / 4096)], feeds


def trained_with_two_outputs() -> Built:
    x, feeds = matrix()
    y, z = af.while_loop(lambda y, z: af.sum(y * z) < 30, lambda y, z: (y + z * 0.5, af.sin(y) @ z + z + 1), (x, x * 2))
    return [y, z, *af.gradients(af.sum(y * z), [x])], feeds


def trained_without_iterations() -> Built:
    x, feeds = matrix()
    return with_gradients(x, of=until(-1, lambda y: af.tanh(y) @ x, x)), feeds


def trained_twice() -> Built:
    """Second derivatives: gradients of saved values are in a store of gradients, which the host keeps."""
    x, feeds = matrix()
    y = until(50, lambda y: af.tanh(y) * x + y + 0.25, x)
    (grad,) = af.gradients(af.sum(y * y), [x])
    return [y, grad, *af.gradients(af.sum(grad * grad), [x])], feeds


def trained_with_narrow_numbers() -> Built:
    """Entries of 1, 2 and 4 bytes."""
    x = af.placeholder("float32", (3,), name="x")

    def step(y: af.Tensor, z: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        z = z * af.astype(af.where(y > 1, 0.5, 1.5), "float16")
        return y + af.where(y > 0.5, af.cos(y), 0.25) * af.astype(z, "float32") * 0.125 + 1, z

    y, z = af.while_loop(lambda y, z: af.sum(y) < 30, step, (x, af.astype(x, "float16")))
    feeds = {x: np.array([0.25, 0.75, 1.5], np.float32)}
    return [y, z, *af.gradients(af.sum(y * y) + af.sum(af.astype(z, "float32")), [x])], feeds


def trained_in_two_levels() -> Built:
    x, feeds = matrix()

    def step(y: af.Tensor) -> af.Tensor:
        inner = af.while_loop(lambda z: af.max(z) % 10 < 8, lambda z: z + 1 + af.tanh(z @ x), y + 1, name="inner")
        return af.sqrt(af.abs(inner)) + y

    return with_gradients(x, of=af.while_loop(lambda y: af.sum(y) < 300, step, x, name="outer")), feeds


def trained_in_three_levels() -> Built:
    x, feeds = matrix()

    def inner(z: af.Tensor) -> af.Tensor:
        return af.while_loop(lambda v: af.sum(v * v) < 12, lambda v: v * 1.5 + af.sin(v) * 0.25 + 0.25, af.abs(z))

    def middle(y: af.Tensor) -> af.Tensor:
        return af.while_loop(
            lambda z: af.sum(z) < 14, lambda z: af.tanh(inner(z)) + af.tanh(z @ x) * 0.25 + z, af.sin(y)
        )

    def outer(y: af.Tensor) -> af.Tensor:
        return af.tanh(middle(y)) * 0.5 + inner(y) * 0.125 + y + 0.75

    return with_gradients(x, of=af.while_loop(lambda y: af.max(y) < 6, outer, x)), feeds


def trained_with_a_counted_loop_inside() -> Built:
    x, feeds = matrix()

    def step(y: af.Tensor) -> af.Tensor:
        return af.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, af.tanh(z) @ x + z + 0.5), (0, y))[1]

    return with_gradients(x, of=af.while_loop(lambda y: af.sum(y) < 40, step, x)), feeds


def trained_with_branches() -> Built:
    """Each side saves a value that the other does not have, one of them in a branch inside."""
    x, feeds = matrix()

    def large(y: af.Tensor) -> af.Tensor:
        grown = af.tanh(y) @ x + y + 0.25
        return af.cond(af.max(grown) > 3, lambda: af.sqrt(grown[0] ** 2 + 1) + grown, lambda: grown * 1.25)

    def step(y: af.Tensor) -> af.Tensor:
        return af.cond(af.sum(y) > 3, lambda: large(y), lambda: af.exp(af.sin(y[:, 1]))[:2, None, None][0] + y)

    return with_gradients(x, of=until(150, step, x)), feeds


def trained_with_loops_in_branches() -> Built:
    """One side has a loop, the other one has another, and a branch inside has a third."""
    x, feeds = matrix()

    def grown(y: af.Tensor, most: float) -> af.Tensor:
        return af.while_loop(lambda z: af.max(z) < most, lambda z: z * 1.25 + af.sin(z) * 0.25 + 0.25, y)

    def large(y: af.Tensor) -> af.Tensor:
        return af.cond(af.max(y) > 4, lambda: grown(y, 5) + af.tanh(y), lambda: y + 0.5)

    def step(y: af.Tensor) -> af.Tensor:
        return af.cond(af.sum(y) > 9, lambda: large(y) + 0.25, lambda: af.tanh(grown(y @ x, 2)) + y)

    return with_gradients(x, of=until(300, step, x)), feeds


TRAINED = [
    trained,
    trained_with_variables,
    trained_by_steps,
    trained_with_two_outputs,
    trained_without_iterations,
    trained_with_narrow_numbers,
    trained_in_two_levels,
    pytest.param(trained_in_three_levels, marks=pytest.mark.slow),
    trained_with_a_counted_loop_inside,
    trained_with_branches,
    trained_with_loops_in_branches,
]


@pytest.mark.parametrize("build", TRAINED)
async def test_loops_are_trained_on_the_card(build: Callable[[], Built]) -> None:
    explained = await check_equal(build, graphs=2, runs=3)
    assert "the card runs it" in explained
    assert "the host drives" not in explained


async def test_a_reader_of_saved_values_keeps_a_loop_with_the_host() -> None:
    explained = await check_equal(trained_twice, graphs=0)
    line = next(line for line in explained.splitlines() if line.startswith("while on "))
    assert "its saved value while/body/tanh (" in line
    assert ") is read by gradients/while/while: its saved value " in line
    assert line.endswith("is read by gradients/gradients/while/while/while: a value of it is variant[], no number")


async def test_the_gradient_of_a_loop_of_the_card_is_not_batched() -> None:
    """The host fills blocks of sums."""
    by_card, launches, explained = await results(trained_with_variables, device_while=True, loop_batching=True)
    assert by_card == (await results(trained_with_variables, device_while=False))[0]
    assert launches.count("graph") == 2
    assert "the host drives" not in explained


async def test_saved_values_that_are_to_move_keep_a_loop_with_the_host() -> None:
    explained = await check_equal(trained, graphs=0, saved_values="swap")
    assert "reads the predicate of each iteration: its saved values are to leave the card\n" in explained


@pytest.mark.parametrize(
    ("build", "reason"),
    [(trained, "are to leave the card"), (trained_in_two_levels, "may have to leave a card with a memory_limit")],
)
async def test_a_limit_of_memory_keeps_trained_loops_with_the_host(build: Callable[[], Built], reason: str) -> None:
    assert f": its saved values {reason}\n" in await check_equal(build, graphs=0, memory_limit=200 << 10)


@pytest.mark.parametrize("option", ["regions", "fusion", "optimize"])
async def test_bits_are_equal_without_fused_kernels(option: str) -> None:
    await check_equal(trained_in_two_levels, graphs=2, **{option: False})


# -- logs --------------------------------------------------------------------------------------------------------------

LOGGED = [
    trained_with_variables,
    trained_in_two_levels,
    pytest.param(trained_in_three_levels, marks=pytest.mark.slow),
]


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs begin with a block of one entry."""
    monkeypatch.setattr(logs, "MOST_ENTRIES", 1)


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("build", LOGGED)
async def test_blocks_double_as_a_loop_goes_on(build: Callable[[], Built]) -> None:
    by_host, _, _ = await results(build, device_while=False, runs=2)
    by_card, launches, _ = await results(build, device_while=True, runs=1)
    assert by_card == by_host[:1]
    assert 3 < launches.count("graph") < 14
    assert len([name for name in launches if name == "add_block"]) > 4
    # The next run knows how many entries there are.
    by_card, launches, _ = await results(build, device_while=True, runs=2)
    assert by_card == by_host
    assert launches.count("graph") == 2


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("after", [0, 1, 2, 3, 100])
@pytest.mark.parametrize("build", LOGGED)
async def test_the_host_goes_on_where_no_graph_can_be_launched(
    build: Callable[[], Built], after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be because there is no room for a graph."""
    left, launch = after, DeviceLoop.launch

    def launch_some(self: DeviceLoop, *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        return launch(self, *arguments) if left >= 0 else None

    by_host, _, _ = await results(build, device_while=False, runs=1)
    monkeypatch.setattr(DeviceLoop, "launch", launch_some)
    by_card, launches, _ = await results(build, device_while=True, runs=1)
    assert by_card == by_host
    assert launches.count("graph") <= after


@pytest.mark.slow
@pytest.mark.parametrize("inner", [False, True], ids=["outer", "inner"])
async def test_trained_loops_keep_to_the_limit(inner: bool) -> None:
    def build() -> Built:
        x, feeds = matrix()

        def step(y: af.Tensor) -> af.Tensor:
            most = 90 if inner else 2
            return af.while_loop(lambda z: af.max(z) < most, lambda z: af.tanh(z) + z + 0.25, y, name="inner") * 0.5

        most = 40 if inner else 1e9
        y = af.while_loop(lambda y: af.max(y) < most, step, x, name="outer")
        return with_gradients(x, of=y), feeds

    for device_while in (False, True):
        with pytest.raises(af.KernelError, match=f"loop {'inner' if inner else 'outer'} reached max_iterations=20"):
            await results(build, device_while=device_while, max_iterations=20)


async def test_memory_of_logs_goes_with_their_run() -> None:
    """Graphs of the loops stay, and nothing else."""
    with small_cards(0), af.Graph() as graph:
        fetched, feeds = trained_in_two_levels()
        async with af.Session(graph, ["cuda:0"], device_while=True) as session:
            memory, used = session.devices[0].memory, []
            for _ in range(6):
                await session.run(fetched, feeds)
                gc.collect()
                used.append(memory.used)
            assert used[1] == used[-1]
