"""The list of passes: names, rules, and programs without each optional pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import pytest

import asyncflow as af
import asyncflow.compiler
from asyncflow.compiler.pipeline import PASSES
from tests.conftest import small_cards
from tests.patience import PATIENCE_S

COMPILER = Path(asyncflow.compiler.__file__).parent


def test_a_pass_has_the_name_of_its_module() -> None:
    assert [each.name for each in PASSES] == [each.run.__module__.rpartition(".")[2] for each in PASSES]
    assert len({each.name for each in PASSES}) == len(PASSES)


def test_modules_of_passes_say_so_and_are_listed() -> None:
    """The first line says what the pass does: the page of the design repeats it."""
    heads = {path: path.read_text(encoding="utf-8").partition("\n")[0] for path in COMPILER.rglob("*.py")}
    say_so = {path: head for path, head in heads.items() if head.startswith('"""Pass: ')}
    assert set(say_so) == {Path(sys.modules[each.run.__module__].__file__ or "") for each in PASSES}
    assert [head for head in say_so.values() if not head.rstrip('"').endswith(".")] == []


# -- programs without a pass -----------------------------------------------------------------------------------------

STEPS, ROWS, WIDTH = 6, 16, 256


def of_one_device(x: af.Tensor) -> af.Tensor:
    """There is something to do in it for every pass that has anything to do on one CPU."""
    weights = af.constant(np.full((WIDTH, WIDTH), 1 / WIDTH, np.float32))
    xs = af.stack([x[:ROWS]] * STEPS)

    def body(t: af.Tensor, h: af.Tensor, unchanged: af.Tensor) -> tuple[af.Tensor, ...]:
        scale = af.constant(2, "float32") * 3  # folded
        product = xs[t] @ weights  # made ahead
        twice = af.tanh(h * 1) + af.tanh(h)  # simplified, joined
        return t + 1, twice + product * af.sum(af.sin(unchanged)) * scale, unchanged  # hoisted

    return af.while_loop(lambda t, *_: t < STEPS, body, (0, x[:ROWS], x))[1]


def of_gradients(x: af.Tensor) -> af.Tensor:
    """A loop that need not save all that the rules of its gradient ask for."""

    def body(t: af.Tensor, h: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return t + 1, af.tanh(h * h) * af.sin(h * h)

    slope: af.Tensor = af.gradients(af.while_loop(lambda t, _: t < STEPS, body, (0, x))[1], x)
    return slope


def of_a_long_loop(x: af.Tensor) -> af.Tensor:
    """A loop that saves 10 MiB."""
    y = af.while_loop(lambda i, _: i < 40, lambda i, h: (i + 1, af.tanh(h)), (0, x))[1]
    return af.gradients(y, x)


def of_two_streams(x: af.Tensor) -> af.Tensor:
    return af.matmul(x, x + 1) + af.matmul(x, x + 2)


def of_cards(x: af.Tensor) -> af.Tensor:
    """A loop that decides by an array, and a chain of elementwise nodes."""
    grown = af.while_loop(lambda h: af.sum(h) < 1e6, lambda h: (h * 2 + 1,), (x,))[0]
    return af.sqrt(grown * 0.5 + 1)


def of_a_gradient(x: af.Tensor) -> af.Tensor:
    """A loop that saves values, and a loop that reads them."""
    y = af.while_loop(lambda i, _: i < STEPS, lambda i, h: (i + 1, af.tanh(h)), (0, x))[1]
    return af.gradients(y, x)


def of_places(x: af.Tensor) -> af.Tensor:
    """A loop that decides by the largest number of a vector, and adds a row that is gathered by it."""
    (places,) = af.nonzero(x[0] > -1)
    return af.while_loop(
        lambda i, _: i < af.max(places), lambda i, h: (i + 1, af.tanh(h) + af.take(h, places, axis=0)[0]), (0, x)
    )[1]


def of_branches(x: af.Tensor) -> af.Tensor:
    """Branches of 256 KiB, which are all there before they are added up."""
    branches = [af.tanh(x * i) for i in range(1, 9)]
    return af.stack([af.sum(branch) for branch in branches])


CARDS: dict[str, Any] = {"devices": ["cuda:0"], "device_while": True}
CONCERNED: dict[str, tuple[Callable[[af.Tensor], af.Tensor], dict[str, Any]]] = {
    "choose_saved": (of_gradients, {}),
    "plan_memory": (of_a_long_loop, {"memory_limit": 25 << 19}),
    "segments": (of_gradients, {"saved_values": "recompute"}),
    "free_early": (of_branches, {}),
    "assign_streams": (of_two_streams, {"compute_streams": 2}),
    "device_loops": (of_cards, CARDS),
    "fuse": (of_cards, CARDS),
    "host_vectors": (of_places, CARDS),
    "last_reads": (of_a_gradient, {}),
    "move_saved": (of_a_gradient, {"memory_limit": 1 << 30, "spill_directory": gettempdir()}),
}


@pytest.mark.parametrize("name", [each.name for each in PASSES if not each.needed and each.name != "delay_recvs"])
async def test_a_program_gives_the_same_without(name: str) -> None:
    """The programs of `test_delay_recvs` and of the conformance suite also run without passes; see
    `tests.cells.WITHOUT`.
    """
    build, options = CONCERNED.get(name, (of_one_device, {}))
    with af.Graph() as graph:
        x = af.placeholder("float32", (WIDTH, WIDTH))
        y = build(x)
    fed = np.random.default_rng(0).uniform(-0.1, 0.1, (WIDTH, WIDTH)).astype(np.float32)

    async def run(without: list[str]) -> tuple[np.ndarray[Any, Any], dict[str, str]]:
        told: dict[str, str] = {}
        cards: AbstractContextManager[object] = small_cards(0) if options is CARDS else nullcontext()
        with cards:
            async with af.Session(graph, debug=True, dump=told.__setitem__, without=without, **options) as session:
                return await session.run(y, {x: fed}, timeout=PATIENCE_S), told

    value, changes = await run([])
    assert changes[name], "it does something"
    same, changes_without = await run([name])
    assert name not in changes_without
    np.testing.assert_allclose(same, value, rtol=1e-4)
