"""Values that a loop saves for its gradient, and values that the gradient computes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress, product
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.autodiff.stores.saved_values import SAVE
from asyncflow.autodiff.stores.stores import StoreLog
from asyncflow.compiler.memory.saved import buffer_of, find_saved
from asyncflow.compiler.memory.saving import choose_saved as module
from asyncflow.compiler.memory.saving.choose_saved import choose_saved, is_cheap, nbytes_of
from asyncflow.compiler.memory.store_paths import stores_of
from asyncflow.compiler.program.extract import extract
from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.structured import WhileNode
from asyncflow.nn.lstm import LSTMWeights
from tests.property.differentiable import FREE, random_loss

Body = Callable[..., tuple[Any, ...]]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes alone count: kernels that run again have no price."""
    for name, value in FREE.items():
        monkeypatch.setattr(module, name, value)


def slopes(body: Body, *start: Any, trips: int = 4) -> tuple[Any, list[Any]]:
    """The last loop variable after a loop, and its gradients by what the variables begin with."""
    *_, y = af.while_loop(lambda i, *_: i < trips, lambda i, *xs: (i + 1, *body(*xs)), (0, *start), name="loop")
    return y, af.gradients(y, list(start))


def loops_of(graph: af.Graph, fetches: Any) -> dict[str, WhileNode]:
    """The loops that save values, of a private copy of what the fetches need, once it has chosen."""
    copied = copy_of(graph, fetches)
    choose_saved(copied)
    af.verify(copied)
    return {node.name: node for node in copied.walk() if isinstance(node, WhileNode) and stores_of(node)}


def copy_of(graph: af.Graph, fetches: Any) -> af.Graph:
    feeds = [node.outputs[0] for node in graph.nodes if node.op.name == "placeholder"]
    return extract(graph, fetches, feeds).graph


def saved_names(graph: af.Graph, fetches: Any) -> set[str]:
    (loop,) = loops_of(graph, fetches).values()
    return {store.value.node.name.rpartition("/")[2] for store in stores_of(loop)}


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Everything that goes into stores."""
    held: list[Any] = []

    def append(log: StoreLog[Any], value: Any) -> None:
        list.append(log, value)
        held.append(value)

    with monkeypatch.context() as patched:
        patched.setattr(StoreLog, "append", append)
        yield held


def bytes_of(held: list[Any]) -> int:
    """Bytes of the buffers behind arrays."""
    owners = {}
    for value in held:
        while getattr(value, "base", None) is not None:
            value = value.base
        owners[id(value)] = getattr(value, "nbytes", 0)
    return sum(owners.values())


# -- a cell -----------------------------------------------------------------------------------------------------------


def lstm(batch: int, hidden: int) -> tuple[Any, list[Any]]:
    weights = LSTMWeights(
        af.placeholder("float32", (hidden, 4 * hidden)),
        af.placeholder("float32", (hidden, 4 * hidden)),
        af.placeholder("float32", (4 * hidden,)),
    )
    xs = af.placeholder("float32", (None, batch, hidden))
    zeros = af.zeros((batch, hidden), dtype="float32")

    def body(i: Any, h: Any, c: Any) -> tuple[Any, Any, Any]:
        _, (h, c) = af.nn.lstm_cell(xs[i], (h, c), weights)
        return i + 1, h, c

    _, h, _ = af.while_loop(lambda i, h, c: i < af.shape(xs)[0], body, (np.int64(0), zeros, zeros), name="loop")
    loss = af.sum(h * h)
    return loss, af.gradients(loss, list(weights))


async def test_an_lstm_cell_saves_six_values(graph: af.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """The four gates, c and h. The tanh of the new c is computed again; a run holds what the plan says."""
    batch, hidden, steps = 8, 64, 5
    loss, found = lstm(batch, hidden)
    feeds = [node.outputs[0] for node in graph.nodes if node.op.name == "placeholder"]
    random = np.random.default_rng(0)
    fed = {x: random.standard_normal([steps if n is None else n for n in x.shape or ()], np.float32) for x in feeds}
    async with af.Session(graph) as session:
        plan = session.plan([loss, found], feeds)
        of_state = batch * hidden * 4
        assert sum(each.nbytes or 0 for each in plan.saved) == 6 * of_state
        with recorded(monkeypatch) as held:
            values = await session.run([loss, found], fed)
        # Of h and c, each iteration's is the next one's. The first, which the loop begins with, is one zero matrix.
        assert bytes_of(held) <= (6 * steps + 1) * of_state
    async with af.Session(graph, without=["choose_saved"]) as session:
        assert sum(each.nbytes or 0 for each in session.plan([loss, found], feeds).saved) == 7 * of_state
        np.testing.assert_equal(await session.run([loss, found], fed), values)


# -- graphs by hand ---------------------------------------------------------------------------------------------------


def test_of_several_functions_of_one_value_the_value_is_saved(graph: af.Graph, free: None) -> None:
    """Three results of one product, each of its size: sin, cos and exp are made again."""
    x, w = af.placeholder("float32", (64, 64)), af.placeholder("float32", (64, 64))
    _, found = slopes(lambda v: (af.sin(p := v @ w) * af.cos(p) * af.exp(p),), x)
    assert saved_names(graph, found) == {"matmul"}


@pytest.mark.parametrize("step", [1, -1])
def test_values_are_saved_in_one_order(graph: af.Graph, free: None, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The order of a set follows from addresses, and so would that of stores, of kernels and of what a trace shows."""
    x, w = af.placeholder("float32", (64, 64)), af.placeholder("float32", (64, 64))
    _, found = slopes(lambda v: (sum(af.exp(p) * af.tanh(p) for p in (v @ w, w @ v)),), x)
    choose = module.SavedChange._choose

    def choose_in_order(self: Any) -> None:
        choose(self)
        self.kept = dict.fromkeys([value for value in self.values if value in self.kept][::step])

    monkeypatch.setattr(module.SavedChange, "_choose", choose_in_order)
    (loop,) = loops_of(graph, found).values()
    assert [store.value.node.name for store in stores_of(loop)] == ["loop/body/matmul", "loop/body/matmul_1"]


def test_a_smaller_dtype_is_saved(graph: af.Graph, free: None) -> None:
    x, w = af.placeholder("float32", (64, 64)), af.placeholder("float32", (64, 64))

    def body(v: Any) -> tuple[Any]:
        wide = af.astype(af.astype(v @ w, "float16"), "float64")
        return (af.astype(af.sin(wide) * wide, "float32"),)

    _, found = slopes(body, x)
    loop = next(iter(loops_of(graph, found).values()))
    assert {str(store.value.spec) for store in stores_of(loop)} == {"float16[64,64]"}


def test_reductions_and_random_ops_are_not_computed_again(graph: af.Graph, free: None) -> None:
    x = af.placeholder("float32", (64, 64))

    def body(v: Any) -> tuple[Any]:
        noise = af.random.normal((64, 64), dtype="float32")
        return (af.sin(v) * noise * af.exp(af.sum(v, axis=0)),)

    _, found = slopes(body, x)
    assert {"normal", "sum"} & {name.split("_")[-1] for name in saved_names(graph, found)}
    loop = next(iter(loops_of(graph, found).values()))
    copied = copy_chosen(graph, found)
    again = next(node for node in copied.nodes if isinstance(node, WhileNode) and not stores_of(node))
    assert stores_of(loop)
    assert not {node.op.name for node in again.body.nodes} & {"random_normal"}


def copy_chosen(graph: af.Graph, fetches: Any) -> af.Graph:
    copied = copy_of(graph, fetches)
    choose_saved(copied)
    return copied


def test_a_user_op_is_never_run_twice(graph: af.Graph, free: None) -> None:
    x = af.placeholder("float32", (64, 64))

    @af.op(outputs=af.spec("float32", (64, 64)), gradient=lambda inputs, outputs, grad: grad * outputs)
    def grown(v: Any) -> Any:
        return np.exp(v)

    _, found = slopes(lambda v: (grown(af.sin(v)),), x)
    copied = copy_chosen(graph, found)
    assert [node.op.name for node in copied.walk()].count("grown") == 1


def test_a_mask_of_the_counter_is_not_saved(graph: af.Graph, free: None) -> None:
    """Counters, captures and constants cost nothing, and cheap functions of them cost little."""
    x, lengths = af.placeholder("float32", (64, 8)), af.placeholder("int32", (64, 1))

    def body(i: Any, v: Any) -> tuple[Any, Any]:
        return i + 1, af.where(i < lengths, v * 2, v)

    _, y = af.while_loop(lambda i, v: i < 5, body, (np.int32(0), x), name="loop")
    assert loops_of(graph, [af.gradients(y, x)]) == {}


def test_a_price_keeps_small_values_saved(graph: af.Graph) -> None:
    x, w = af.placeholder("float32", (2, 2)), af.placeholder("float32", (2, 2))
    _, found = slopes(lambda v: (af.sin(p := v @ w) * af.cos(p) * af.exp(p),), x)
    before = set(saved_by(copy_of(graph, found)))
    assert saved_names(graph, found) == before


def saved_by(graph: af.Graph) -> list[str]:
    return [node.inputs[2].node.name.rpartition("/")[2] for node in graph.walk() if node.op is SAVE]


def test_values_on_several_devices_are_left_where_they_are(graph: af.Graph, free: None) -> None:
    x = af.placeholder("float32", (64, 64))

    def body(v: Any) -> tuple[Any]:
        with af.device("cpu:0"):
            a = af.sin(v)
        with af.device("cpu:1"):
            return (af.cos(a) * af.exp(a) * a,)

    _, found = slopes(body, x)
    before = set(saved_by(copy_of(graph, found)))
    assert set(saved_by(copy_chosen(graph, found))) == before


def test_sizes_that_only_a_run_knows_are_compared_by_a_stand_in(graph: af.Graph, free: None) -> None:
    x, w = af.placeholder("float32", (None, 64)), af.placeholder("float32", (64, 64))
    _, found = slopes(lambda v: (af.sin(p := v @ w) * af.cos(p) * af.exp(p),), x)
    assert saved_names(graph, found) == {"matmul"}


def test_a_sum_of_small_parts_is_saved_in_parts(graph: af.Graph, free: None) -> None:
    """One value more is saved than the gradient asks for, and fewer bytes: a row and a column, not the matrix."""
    x, w = af.placeholder("float32", (64,)), af.placeholder("float32", (64, 64))

    def body(v: Any) -> tuple[Any]:
        row, column = w @ v, w @ (v + 1)
        return (af.sum(af.sin(row[:, None] * column), axis=0),)

    _, found = slopes(body, x)
    (loop,) = loops_of(graph, found).values()
    assert sum(nbytes_of(store.value.spec, 1) for store in stores_of(loop)) == 2 * 64 * 4


# -- the best of all subsets ------------------------------------------------------------------------------------------


def straight_program(seed: int) -> tuple[Any, Any]:
    """A loop of a few steps, so that the values to choose from are few."""
    random = Random(seed)
    x, w = af.placeholder("float32", (16, 8)), af.placeholder("float32", (8, 8))

    def body(a: Any, b: Any) -> tuple[Any, Any]:
        values = [a, b]
        for _ in range(random.randint(2, 5)):
            one, other = random.choice(values), random.choice(values)
            steps = (
                lambda one, other: af.sin(one),
                lambda one, other: one * other,
                lambda one, other: af.tanh(one + other),
                lambda one, other: one @ w,
                lambda one, other: af.exp(af.mean(one, axis=1, keepdims=True)) * other,
                lambda one, other: af.astype(af.sin(af.astype(one, "float64")), "float32"),
            )
            values.append(random.choice(steps)(one, other))
        return values[-1], values[-2]

    y, _ = slopes(body, x, x * 2)
    return y, af.gradients(y, [x, w], unconnected="zero")


def fewest_bytes(loop: WhileNode) -> tuple[int, int]:
    """Return the bytes that are saved now, and the least bytes of all subsets that suffice."""
    needed = [store.value for store in stores_of(loop)]
    variables = dict(loop.carried)
    captured = loop.captured(loop.body)

    def is_free(value: Any) -> bool:
        return value in captured or value.node.op.name == "constant"

    values: list[Any] = []
    open_ = list(needed)
    while open_:
        value = open_.pop()
        if is_free(value) or any(value is each for each in values):
            continue
        values.append(value)
        if is_cheap(value.node):
            open_ += value.node.inputs
    assert len(values) <= 12

    def has(kept: list[Any], value: Any) -> bool:
        if is_free(value) or any(value is each for each in kept):
            return True
        return is_cheap(value.node) and value.node.op is not PARAMETER and all(has(kept, x) for x in value.node.inputs)

    def nbytes(kept: list[Any]) -> int:
        buffers = {buffer_of(value, variables) for value in kept}
        return sum(nbytes_of(buffer.spec, 1) for buffer in buffers if not is_free(buffer))

    every = (list(compress(values, chosen)) for chosen in product((False, True), repeat=len(values)))
    return nbytes(needed), min(nbytes(kept) for kept in every if all(has(kept, value) for value in needed))


@pytest.mark.parametrize("seed", range(24))
def test_the_cut_is_the_best_of_all_subsets(graph: af.Graph, free: None, seed: int) -> None:
    _, found = straight_program(seed)
    before = copy_of(graph, found)
    loop = next((node for node in before.nodes if isinstance(node, WhileNode) and stores_of(node)), None)
    if loop is None:
        return
    _, best = fewest_bytes(loop)
    chosen = find_saved(copy_chosen(graph, found))
    assert sum(each.nbytes or 0 for each in chosen) == best


# -- nested loops -----------------------------------------------------------------------------------------------------


async def test_stores_of_inner_loops_go_and_come_with_the_outer_ones(graph: af.Graph, free: None) -> None:
    x, w = af.placeholder("float32", (8, 8)), af.placeholder("float32", (8, 8))

    def body(i: Any, v: Any) -> tuple[Any, Any]:
        def inner(j: Any, u: Any) -> tuple[Any, Any]:
            p = u @ w
            return j + 1, af.sin(p) * af.tanh(p) * w

        return i + 1, af.while_loop(lambda j, u: j < i + 1, inner, (np.int64(0), v), name="inner")[1]

    _, y = af.while_loop(lambda i, v: i < 3, body, (np.int64(0), x), name="loop")
    found = af.gradients(y, [x, w])
    before = {node.name: stores_of(node) for node in copy_of(graph, found).walk() if isinstance(node, WhileNode)}
    after = loops_of(graph, found)
    inner = {store.value.node.name for store in stores_of(after["loop/body/inner"])}
    assert inner == {"loop/body/inner/body/matmul", "loop/body/inner/body/var_1"}
    assert len(stores_of(after["loop"])) < len(before["loop"]), "a store of the inner loop is one value of the outer"
    fed = {x: np.full((8, 8), 0.3, np.float32), w: np.eye(8, dtype=np.float32)}
    values = []
    for without in ([], ["choose_saved"]):
        async with af.Session(graph, without=without, debug=True) as session:
            values.append(await session.run([y, found], fed))
    np.testing.assert_equal(*values)


# -- random programs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
async def test_random_programs_hold_no_more(seed: int, monkeypatch: pytest.MonkeyPatch, free: None) -> None:
    """But for one value of each buffer at either end of a loop, which a loop of one iteration may feel."""
    with af.Graph() as graph:
        x, w = af.placeholder("float32", (3, 4)), af.placeholder("float32", (4, 4))
        found = af.gradients(random_loss(Random(seed), x, w), [x, w])
    random = np.random.default_rng(seed)
    fed = {x: random.standard_normal((3, 4), np.float32), w: random.standard_normal((4, 4), np.float32)}
    held = {}
    for without in ((), ("choose_saved",)):
        async with af.Session(graph, without=without) as session:
            with recorded(monkeypatch) as values:
                await session.run(found, fed)
        held[without] = bytes_of([value for value in values if isinstance(value, np.ndarray)])
    assert held[()] <= held["choose_saved",]
