"""Vectors of integers that stay on the host where a decision depends on them, and their copies on cards."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

import asyncflow as af
from asyncflow.autodiff.stores.checkpoints import CHECKPOINT, SAVE_FIRST
from asyncflow.autodiff.stores.saved_values import SAVE
from asyncflow.compiler.memory.recomputation.segments import loops_to_segment
from asyncflow.compiler.program.extract import FEED, extract
from asyncflow.compiler.program.host_values import find_host_values, keeping
from asyncflow.compiler.program.host_vectors import keep_vectors
from asyncflow.compiler.program.kernels.kernels import SAVES
from asyncflow.compiler.program.kernels.transfers import TO_CARD
from asyncflow.graph.op import host_inputs
from asyncflow.testing import virtual_clock
from tests.cells import SEEDS
from tests.fake_cupy.stand_in import stand_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.graph.ir import Node

CARD: Final = "cuda:0"
X: Final = np.arange(12.0).reshape(6, 2)


def kept(*fetches: af.Tensor) -> tuple[af.Graph, set[str]]:
    """The program after the pass, and the names of the nodes whose values it keeps."""
    root = fetches[0].graph
    fed = [node.outputs[0] for node in root.nodes if node.op.name == "placeholder"]
    graph = extract(root, list(fetches), fed).graph
    for node in graph.walk():
        node.device = CARD
    found = keep_vectors(graph, {CARD})
    return graph, {tensor.node.name.rpartition("/")[2] for tensor in found}


def nodes_of(graph: af.Graph, op: object) -> list[Node]:
    return [node for node in graph.walk() if node.op is op]


# -- what stays ------------------------------------------------------------------------------------------------------


def test_a_fed_vector_that_decides_stays(graph: af.Graph) -> None:
    n = af.placeholder("int64", (None,), name="n")
    total = af.while_loop(lambda i: i < af.max(n), lambda i: i + 1, 0)
    program, names = kept(total)
    assert names == {"feed", "max", "less"}
    (feed,) = nodes_of(program, FEED)
    assert feed.attrs["stays"]


def test_a_vector_that_kernels_alone_use_does_not(graph: af.Graph) -> None:
    n, x = af.placeholder("int64", (None,), name="n"), af.placeholder("float64", (None, 2), name="x")
    program, names = kept(af.take(x, n * 2, axis=0))
    assert not names
    assert not any(feed.attrs.get("stays") for feed in nodes_of(program, FEED))


def test_a_vector_of_both_is_fed_twice(graph: af.Graph) -> None:
    """A card gets a copy of its own, and nothing is copied back."""
    n, x = af.placeholder("int64", (None,), name="n"), af.placeholder("float64", (None, 2), name="x")
    program, names = kept(af.take(x, n, axis=0)[: n[0]])
    feeds = [node for node in nodes_of(program, FEED) if node.outputs[0].dtype == "int64"]
    assert [feed.attrs.get("stays", False) for feed in feeds] == [True, False]
    (take,) = [node for node in program.nodes if node.op.name == "take"]
    assert take.inputs[1] is feeds[1].outputs[0]
    assert "feed" in names


def test_what_a_card_computes_decides_after_a_wait(graph: af.Graph) -> None:
    x = af.placeholder("float64", (None,), name="x")
    n = af.astype(x, "int64")
    _, names = kept(af.while_loop(lambda i: i < af.max(n), lambda i: i + 1, 0))
    assert not names


def test_a_kernel_of_the_host_keeps_what_decides(graph: af.Graph) -> None:
    """Although a card has made its inputs. What kernels alone read goes to the card as it always did."""
    x = af.placeholder("float64", (5, 3, 4), name="x")
    lengths = af.astype(af.sum(x, axis=(0, 2)), "int64")
    outputs, last = af.nn.dynamic_rnn(lambda x, s: (x, s + 1.0), x, af.zeros((3, 2), dtype="float64"), lengths)
    program, names = kept(outputs, last)
    assert "pack_lengths" in names
    assert not nodes_of(program, TO_CARD)


def test_results_of_a_kernel_of_the_host_are_copied_once(graph: af.Graph) -> None:
    """For all kernels that read them as data, also in a loop, where one node copies them before it."""
    x = af.placeholder("float64", (None, 2), name="x")
    (places,) = af.nonzero(x[:, 0] > 0.0)
    taken = af.take(x, places, axis=0)
    _, y = af.while_loop(lambda i, _: i < places[0], lambda i, y: (i + 1, y + af.take(y, places, axis=0)), (0, taken))
    program, names = kept(y, taken * 2.0)
    assert "nonzero" in names
    (copy,) = nodes_of(program, TO_CARD)
    assert copy.graph is program
    assert [tensor.node.op.name for tensor in copy.inputs] == ["nonzero"]


def test_copies_that_bodies_capture_have_a_device(graph: af.Graph) -> None:
    """Lowering places the Enter and Switch nodes of a capture where its parameter is."""
    n, x = af.placeholder("int64", (None,), name="n"), af.placeholder("float64", (None, 2), name="x")

    def body(i: af.Tensor, y: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return i + 1, af.cond(i < 1, lambda: af.take(y, n, axis=0), lambda: y)

    program, names = kept(af.while_loop(lambda i, _: i < n[0], body, (0, x))[1])
    assert "feed" in names
    assert len(nodes_of(program, FEED)) == 3, "the card has a copy"
    assert {node.device for node in program.walk()} == {CARD}


def test_vectors_computed_in_a_loop_and_saved_for_its_gradient(graph: af.Graph) -> None:
    """The host has them when the gradient needs them there, and their stores never move."""
    n, x = af.placeholder("int64", (None,), name="n"), af.placeholder("float64", (6, 2), name="x")

    def body(i: af.Tensor, y: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        bounds = n[i : i + 2] * 2
        return i + 1, y * af.concat([x[: bounds[0]], x[bounds[0] :] * 2.0], axis=0)

    _, y = af.while_loop(lambda i, _: i < 2, body, (0, x))
    (grad,) = af.gradients(af.sum(y), [x])
    program, names = kept(grad)
    on_host = find_host_values(program, keeping(keep_vectors(program, {CARD})))
    assert "feed" in names
    for node in program.walk():
        if node.op.name == "getitem" and node.inputs[0].dtype == "float64":
            assert all(tensor in on_host for tensor in node.inputs[1:])


def turned(x: af.Tensor, n: af.Tensor, count: int) -> af.Tensor:
    """A loop with a variable that decides about bounds, is data as well, and changes in each iteration."""

    def body(i: af.Tensor, v: af.Tensor, y: af.Tensor) -> tuple[af.Tensor, ...]:
        bound = af.max(v) % 5
        y = y + af.sum(af.sin(af.take(y, v % 6, axis=0)), axis=0)
        return i + 1, (v * 3 + i) % 7, af.concat([y[bound:], af.sin(y[:bound])], axis=0)

    invariants = ((), (None,), (None, 2))
    return af.while_loop(lambda i, *_: i < count, body, (0, n, x), shape_invariants=invariants)[2]


@pytest.mark.parametrize("kept_first", [0, 2])
def test_a_vector_that_each_segment_begins_with(graph: af.Graph, kept_first: int) -> None:
    """Whoever runs iterations again finds it on the host, as all that read one store do."""
    n, x = af.placeholder("int64", (None,), name="n"), af.placeholder("float64", (6, 2), name="x")
    grads = af.gradients(af.sum(turned(x, n, 5)), [x])
    program = extract(graph, list(grads), [n, x]).graph
    (loop,) = [found for found in loops_to_segment(program) if found.may_run_again]
    loop.rewrite(2, kept_first)
    for node in program.walk():
        node.device = CARD
    on_host = find_host_values(program, keeping(keep_vectors(program, {CARD})))
    saves = [node for node in program.walk() if node.op in SAVES and node.inputs[2].dtype.kind == "i"]
    assert {node.op for node in saves} == {SAVE, CHECKPOINT, *([SAVE_FIRST] if kept_first else [])}
    for node in program.walk():
        assert all(node.inputs[place] in on_host for place in host_inputs(node) if node.inputs[place].shape == ())
        assert not (node in saves and node.inputs[2].shape) or (node.attrs["stays"] and node.inputs[2] in on_host)


# -- the same values everywhere --------------------------------------------------------------------------------------


class Programs:
    """Random programs of vectors of integers, of which some decide, some are data, and some are both."""

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)
        self.n = af.placeholder("int64", (None,), name="n")
        self.m = af.placeholder("int64", (None,), name="m")
        self.x = af.placeholder("float64", (None, 2), name="x")

    def vector(self, *others: af.Tensor, depth: int = 2) -> af.Tensor:
        """A vector of at least one element, made of fed ones."""
        known = [self.n, self.m, af.constant([3, 1, 2]), *others]
        x = self.random.choice(known)
        for _ in range(self.random.randrange(depth + 1)):
            y = self.random.choice(known)
            x = self.random.choice(
                [
                    lambda x, y: x + y[0],
                    lambda x, y: af.concat([x, y], axis=0),
                    lambda x, y: x[: 1 + abs(y[0]) % 3],
                    lambda x, y: af.cumulative_sum(x) % 7,
                    lambda x, y: af.take(x, y % af.size(x), axis=0),
                    lambda x, y: x * 2 - af.max(y),
                ]
            )(x, y)
        return x

    def number(self, *others: af.Tensor) -> af.Tensor:
        x = self.vector(*others)
        return abs(self.random.choice([lambda: af.sum(x), lambda: af.max(x), lambda: x[-1], lambda: af.size(x)])())

    def rows(self, values: af.Tensor, *others: af.Tensor) -> af.Tensor:
        """A matrix of six rows, computed from one by kernels, with vectors as data or as bounds."""
        kind = self.random.randrange(4)
        if kind == 0:
            return af.take(values, (self.vector(*others)[0] + af.arange(af.shape(values)[0])) % 6, axis=0) * 0.5
        if kind == 1:
            bound = self.number(*others) % 5
            return af.concat([values[bound:], values[:bound]], axis=0) + 1.0
        if kind == 2:
            return af.cond(
                self.number(*others) % 2 == 0, lambda: values * 2.0, lambda: values - self.number(*others) * 0.25
            )
        places = self.vector(*others) % 6
        return values + af.sum(af.take(values, places, axis=0), axis=0)

    def loop(self, values: af.Tensor) -> af.Tensor:
        """A loop whose trip count, body, and perhaps a variable, are made of vectors."""
        count, carried = self.number() % 4, self.vector()
        turns = self.random.random() < 0.5

        def body(i: af.Tensor, v: af.Tensor, values: af.Tensor) -> tuple[af.Tensor, ...]:
            values = self.rows(self.rows(values, v), v)
            return i + 1, (v * 3 + i) % 5 if turns else v[::-1], values

        return af.while_loop(lambda i, *_: i < count, body, (0, carried, values))[2]

    def fetches(self) -> list[af.Tensor]:
        values = self.rows(self.loop(self.rows(self.x)))
        grads = af.gradients(af.sum(values * values), [self.x])
        return [values, *grads, self.vector(), self.number()]


async def results(
    tensors: Sequence[af.Tensor], fetches: Any, feeds: Sequence[Any], device: str, **options: Any
) -> list[Any]:
    graph = (fetches if isinstance(fetches, af.Tensor) else fetches[0]).graph
    async with af.Session(graph, [device], loop_batching=False, **options) as session:
        return [await session.run(fetches, dict(zip(tensors, each, strict=True))) for each in feeds]


def check_everywhere(tensors: Sequence[af.Tensor], fetches: Any, feeds: Sequence[Any], **options: Any) -> None:
    """Compare runs on simulated cards, and on the stand-in, with runs on a CPU."""
    expected = asyncio.run(results(tensors, fetches, feeds, "cpu:0"))
    found = {}
    with virtual_clock() as clock:
        found["sim:0"] = clock.run(results(tensors, fetches, feeds, "sim:0", **options))
    with stand_in(devices=1, nbytes=16 << 20):
        found["cuda:0"] = asyncio.run(results(tensors, fetches, feeds, "cuda:0", **options))
    for where, runs in found.items():
        for run, wanted in zip(runs, expected, strict=True):
            for value, other in zip(run, wanted, strict=True):
                assert value.dtype == other.dtype
                np.testing.assert_allclose(value, other, rtol=1e-12, atol=1e-300, err_msg=where)


@pytest.mark.parametrize("seed", range(3 * SEEDS))
def test_random_programs_have_the_same_values_on_cards(graph: af.Graph, seed: int) -> None:
    programs = Programs(f"vectors {seed}")
    fetches, random = programs.fetches(), np.random.default_rng([*b"vectors", seed])
    feeds = []
    for size in (3, 1):
        n, m = (random.integers(-9, 10, size + extra) for extra in (0, 1))
        feeds += [(n, m, random.normal(size=(6, 2)))] * (4 if size == 3 else 1)
    options: tuple[dict[str, bool], ...] = {"cuda_graphs": True}, {}, {"regions": False}
    check_everywhere((programs.n, programs.m, programs.x), fetches, feeds, **options[seed % 3])


@pytest.mark.parametrize("saved_values", ["keep", "recompute", "swap"])
def test_a_vector_that_a_loop_changes(graph: af.Graph, saved_values: str) -> None:
    n, x = af.placeholder("int64", (None,), name="n"), af.placeholder("float64", (6, 2), name="x")
    y = turned(x, n, 5)
    feeds = [(np.array([3, 8, 1]), X), (np.array([6]), X)]
    check_everywhere((n, x), [y, *af.gradients(af.sum(y * y), [x])], feeds, saved_values=saved_values)


@pytest.mark.parametrize("graphs", [False, True])
def test_sequences_of_other_lengths_in_each_run(graph: af.Graph, graphs: bool) -> None:
    """Of no steps, too, or without sequences, with gradients."""
    xs, lengths = af.placeholder("float64", (None, None, 2)), af.placeholder("int64", (None,))
    w = af.constant(X[:4].T.copy() * 0.1)
    zeros = af.zeros((af.shape(xs)[1], 2), dtype="float64")

    def cell(x: Any, h: Any) -> tuple[Any, Any]:
        h = af.tanh(af.concat([x, h], axis=1) @ af.matrix_transpose(w))
        return h, h

    outputs, last = af.nn.dynamic_rnn(cell, xs, zeros, lengths)
    mask = af.nn.sequence_mask(lengths, af.shape(outputs)[0])
    loss = af.sum(af.where(mask, af.sum(outputs * outputs, axis=-1), 0)) + af.sum(last)
    fetches = [loss, outputs, last, *af.gradients(loss, [xs]), af.sum(lengths)]
    random = np.random.default_rng([*b"lengths"])
    feeds = []
    for ends, steps in (([3, 0, 4], 4), ([4, 3, 0], 4), ([0, 0], 5), ([], 2), ([0], 0), ([2] * 70, 3)):
        feeds += [(random.normal(size=(steps, len(ends), 2)), np.array(ends, np.int64))] * (
            3 if steps == 4 and graphs else 1
        )
    check_everywhere((xs, lengths), fetches, feeds, cuda_graphs=graphs)


def test_lengths_that_are_on_the_card(graph: af.Graph) -> None:
    """A vector that decides is copied to the host, whatever array is fed."""
    n = af.placeholder("int64", (None,))
    total = af.while_loop(lambda i: i < af.max(n), lambda i: i + 1, 0)
    with stand_in(devices=1, nbytes=16 << 20) as cupy:
        (found,) = asyncio.run(results((n,), total, [(cupy.asarray(np.array([2, 5])),)], CARD))
    assert found == 5
