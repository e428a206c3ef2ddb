"""An LSTM over sequences as a vertex function over chains (Fixed-LSTM and Var-LSTM of Cavs, fig. 8), and its peers.

The cell, the loss and the numbers come from `benchmarks.lstm`; sequences begin with states of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

import asyncflow as af
from benchmarks.lstm import Model, cell, random_model
from benchmarks.tree_peers import DynetParameters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from benchmarks.lstm import Step


@dataclass(frozen=True, slots=True)
class Sequences:
    """A batch of sequences, longest first.

    Attributes:
        model: inputs, ``(steps, batch, hidden)``, and weights.
        locked: the same with locked inputs, so that a session takes them as they are.
        lengths: of the sequences.
        counts: number of sequences that go on, by step.
        rows: the inputs of all steps, sequence by sequence.
    """

    model: Model
    locked: Model
    lengths: NDArray[np.int32]
    counts: NDArray[np.int32]
    rows: NDArray[np.float32]

    @property
    def is_fixed(self) -> bool:
        """True if all sequences have one length."""
        return bool(self.lengths[0] == self.lengths[-1])

    @property
    def outputs(self) -> int:
        """Numbers that the loss is the mean of."""
        return int(self.rows.size)


def sequences(batch: int, hidden: int, shortest: int, longest: int) -> Sequences:
    """The same every time; one sequence alone has the mean length."""
    lengths = np.random.default_rng(1).integers(shortest, longest, batch, np.int32, endpoint=True)
    lengths[:2] = [(shortest + longest) // 2] if batch == 1 else [shortest, longest]
    lengths = np.sort(lengths)[::-1].copy()
    model = random_model(int(lengths[0]), batch, hidden)
    model = replace(model, h=np.zeros_like(model.h), c=np.zeros_like(model.c))
    counts: NDArray[np.int32] = np.sum(lengths > np.arange(lengths[0])[:, None], axis=1, dtype=np.int32)
    rows = np.concatenate([model.xs[:length, place] for place, length in enumerate(lengths)])
    locked = replace(model, xs=model.xs.copy())
    for array in (locked.xs, rows):
        array.flags.writeable = False
    return Sequences(model, locked, lengths, counts, rows)


def _with_weights(model: Model, weights: Sequence[Any]) -> Model:
    return replace(model, **dict(zip(("w_x", "w_h", "bias"), weights, strict=True)))


def lstm_function(model: Model) -> af.VertexFunction:
    """The cell over one vertex of a chain; it pushes what the layer gives."""
    hidden = model.h.shape[-1]
    part = af.spec("float32", (hidden,))

    @af.vertex_function(state=(part, part), children=1)
    def lstm(vertex: af.Vertex) -> None:
        h, c = vertex.gather(0)
        gates = vertex.pull() @ model.w_x + h @ model.w_h + model.bias
        into, forget, candidate, out = (gates[k * hidden : (k + 1) * hidden] for k in range(4))
        c = af.sigmoid(forget) * c + af.sigmoid(into) * af.tanh(candidate)
        h = af.sigmoid(out) * af.tanh(c)
        vertex.push(h)
        vertex.scatter((h, c))

    return lstm


class OfVertices:
    """A training step as a vertex function; `options` go to `vertex_map` and to the session."""

    def __init__(self, batch: Sequences, *, lift_parts: bool = True, streams: int = 1, **options: Any) -> None:
        with af.Graph() as graph:
            self.graph, x = af.InputGraph.placeholder(), af.placeholder("float32", (None, batch.rows.shape[1]))
            weights = [af.Variable(weight).read() for weight in batch.model.weights]
            model = _with_weights(batch.model, weights)
            function = lstm_function(model)
            pushes = af.vertex_map(function, self.graph, x, lift_parts=lift_parts, streams=streams).pushes
            loss = af.sum(af.square(pushes["y"])) * np.float32(1 / batch.outputs)
            self.fetches = loss, af.gradients(loss, weights)
        self.feeds = {**self.graph.feeds(af.InputGraph.chain(batch.lengths)), x: batch.rows}
        self.session = af.Session(graph, **options)

    async def step(self) -> Step:
        """One step."""
        step: Step = await self.session.run(self.fetches, self.feeds)
        return step


class OfDynamicRnn:
    """A training step by `af.nn.dynamic_rnn`."""

    def __init__(self, batch: Sequences) -> None:
        with af.Graph() as graph:
            xs = af.placeholder("float32", (None, *batch.model.xs.shape[1:]))
            lengths = None if batch.is_fixed else af.placeholder("int64", (None,))
            weights = [af.Variable(weight).read() for weight in batch.model.weights]
            model = replace(_with_weights(batch.model, weights), xs=xs)

            def step(x: Any, state: Any) -> tuple[Any, Any]:
                state = cell(af, model, x, *state)
                return state[0], state

            outputs, _ = af.nn.dynamic_rnn(step, xs, (model.h, model.c), lengths)
            loss = af.sum(af.square(outputs)) * np.float32(1 / batch.outputs)
            self.fetches = loss, af.gradients(loss, weights)
        self.feeds = {xs: batch.locked.xs} | ({} if lengths is None else {lengths: batch.lengths.astype(np.int64)})
        self.session = af.Session(graph)

    async def run(self) -> Step:
        """One step."""
        step: Step = await self.session.run(self.fetches, self.feeds)
        return step


def torch_by_node(torch: Any, batch: Sequences) -> Callable[[], Step]:
    """A step of one sequence at a time in PyTorch."""
    model = batch.model.map(torch.from_numpy)
    for weight in model.weights:
        weight.requires_grad_()

    def work() -> Step:
        total: Any = 0
        for place, length in enumerate(batch.lengths.tolist()):
            h, c = model.h[place : place + 1], model.c[place : place + 1]
            for t in range(length):
                h, c = cell(torch, model, model.xs[t, place : place + 1], h, c)
                total = total + h.square().sum()
        loss = total / batch.outputs
        return loss.detach(), list(torch.autograd.grad(loss, model.weights))

    return work


def jax_masked(jax: Any, batch: Sequences) -> Callable[[], Step]:
    """`lax.scan` over all rows in JAX, in which sequences that have ended keep their state."""
    active = np.arange(len(batch.model.xs))[:, None, None] < batch.lengths[:, None]

    class Functions:
        sigmoid, tanh = staticmethod(jax.nn.sigmoid), staticmethod(jax.numpy.tanh)

    def loss_of(weights: Any, xs: Any) -> Any:
        model = _with_weights(batch.model, weights)

        def body(state: Any, each: Any) -> Any:
            x, goes_on = each
            after = cell(Functions, model, x, *state)
            state = tuple(jax.numpy.where(goes_on, new, old) for new, old in zip(after, state, strict=True))
            return state, jax.numpy.where(goes_on, after[0], 0)

        return (jax.lax.scan(body, (model.h, model.c), (xs, active))[1] ** 2).sum() / batch.outputs

    function = jax.jit(jax.value_and_grad(loss_of))

    def work() -> Step:
        loss, grads = function(batch.model.weights, batch.model.xs)
        return np.asarray(loss), list(map(np.asarray, grads))

    return work


def dynet(dy: Any, batch: Sequences) -> Callable[[], Step]:
    """One step of one sequence at a time in DyNet, which batches them."""
    n = batch.model.h.shape[-1]
    parameters = DynetParameters(dy, batch.rows, batch.model.weights)
    starts = np.cumsum(batch.lengths) - batch.lengths

    def outputs(first: int, length: int) -> Sequence[Any]:
        w_x, w_h, bias = parameters.arrays
        found = []
        h: Any = None
        c: Any = None
        for row in range(first, first + length):
            before = [] if h is None else [w_h, h]
            gates = dy.affine_transform([bias, w_x, parameters.x(row), *before])
            into, forget, candidate, out = (dy.pick_range(gates, k * n, (k + 1) * n) for k in range(4))
            new = dy.cmult(dy.logistic(into), dy.tanh(candidate))
            c = new if h is None else new + dy.cmult(dy.logistic(forget), c)
            h = dy.cmult(dy.logistic(out), dy.tanh(c))
            found.append(dy.squared_norm(h))
        return found

    def work() -> Step:
        dy.renew_cg()
        squares = [x for first, length in zip(starts, batch.lengths, strict=True) for x in outputs(first, length)]
        loss, *grads = parameters.step(dy.esum(squares) * (1 / batch.outputs))
        return loss, grads

    return work
