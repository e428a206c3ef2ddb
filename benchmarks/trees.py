"""Training steps of tree models (Cavs, fig. 8): Tree-FC over complete trees, Tree-LSTM over syntax trees.

asyncflow runs a vertex function, declared over one vertex. NumPy and PyTorch go level by level over the whole batch, by
hand: the batching is known in advance. Figures are for one tree.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, replace
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import asyncflow as af
from asyncflow.graph.values import nest
from asyncflow.vertex.schedule import SCHEDULE
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, NUMPY, TORCH, Peers
from examples.syntax_trees import read_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

NAME = "trees"
STEP: Final = Figure("training, a sample", "us")
FORWARD: Final = Figure("inference, a sample", "us")
IN_LOOP: Final = f"{ASYNCFLOW} all in the loop"
TOLERANCE: Final = 2e-3


@dataclass(frozen=True, slots=True)
class Level:
    """The vertices of a level, as rows in execution order, and their children's: one after the other, by vertex."""

    first: int
    last: int
    children: NDArray[np.int64]
    starts: NDArray[np.int64]
    owners: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trees:
    """A batch of trees, a row for each vertex, and the order that goes level by level."""

    graph: af.InputGraph
    xs: NDArray[np.float32]
    order: NDArray[np.int64]
    levels: list[Level]
    roots: NDArray[np.int64]

    @property
    def count(self) -> int:
        """Number of trees."""
        return len(self.graph)

    @property
    def weight(self) -> np.float32:
        """Share of a tree in the loss."""
        return np.float32(1 / self.count)

    def map(self, convert: Callable[[Any], Any]) -> Trees:
        """The same with arrays of another system; what says where children begin stays."""
        levels = [replace(each, children=convert(each.children), owners=convert(each.owners)) for each in self.levels]
        arrays = convert(self.xs), convert(self.order), convert(self.roots)
        return replace(self, xs=arrays[0], order=arrays[1], roots=arrays[2], levels=levels)


def batch_of(graphs: Sequence[af.InputGraph], hidden: int) -> Trees:
    """The graphs with a random row for each vertex."""
    graph = af.InputGraph.batch(graphs)
    assert SCHEDULE.kernel is not None
    arrays = graph.offsets, graph.children, graph.samples
    found: Any = SCHEDULE.kernel(np, policy="breadth_first", arity=None, n_types=None)(*arrays)
    order, _, sets, roots, ranks, starts, owners = found
    levels = [
        Level(a, b, ranks[starts[a] : starts[b]] - 1, starts[a : b + 1] - starts[a], owners[starts[a] : starts[b]] - a)
        for a, b in pairwise(sets.tolist())
    ]
    xs = np.random.default_rng(0).standard_normal((len(order), hidden), np.float32)
    xs.flags.writeable = False  # fed without a copy, as the guide says
    return Trees(graph, xs, order, levels, roots - 1)


def complete(leaves: int) -> af.InputGraph:
    """A complete binary tree."""
    return af.InputGraph.from_parents([-1, *((vertex - 1) // 2 for vertex in range(1, 2 * leaves - 1))])


def weights(*shape: int) -> NDArray[np.float32]:
    """The same numbers every time."""
    values: NDArray[np.float64] = np.random.default_rng(1).standard_normal(shape) / np.sqrt(shape[0])
    return values.astype(np.float32)


# -- Tree-FC ---------------------------------------------------------------------------------------------------------


def tree_fc(hidden: int) -> tuple[af.VertexFunction, list[af.Variable]]:
    """``relu(x + left @ u + right @ v)``."""
    u, v = af.Variable(weights(hidden, hidden), name="u"), af.Variable(weights(hidden, hidden)[::-1].copy(), name="v")

    @af.vertex_function(state=af.spec("float32", (hidden,)), children=2)
    def cell(vertex: af.Vertex) -> None:
        vertex.scatter(af.relu(vertex.pull() + vertex.gather(0) @ u + vertex.gather(1) @ v))

    return cell, [u, v]


class TreeFcByHand:
    """Tree-FC level by level in NumPy or CuPy: one product a level, over both children side by side."""

    def __init__(self, trees: Trees, hidden: int, xp: Any = np) -> None:
        self.trees = trees.map(xp.asarray)
        self.w = xp.asarray(np.concatenate([weights(hidden, hidden), weights(hidden, hidden)[::-1]]))
        self._xp = xp

    def forward(self) -> NDArray[np.float32]:
        """All states, in execution order."""
        trees, two = self.trees, len(self.w)
        states = trees.xs[trees.order]
        for level in trees.levels:
            own = states[level.first : level.last]
            if len(level.children):
                own += states[level.children].reshape(-1, two) @ self.w
            self._xp.maximum(own, 0, out=own)
        return states

    def step(self) -> tuple[Any, ...]:
        """The loss, and its gradients of the weights."""
        trees, (two, hidden) = self.trees, self.w.shape
        states = self.forward()
        grads, of_w = self._xp.zeros_like(states), self._xp.zeros_like(self.w)
        grads[trees.roots] = trees.weight
        for level in reversed(trees.levels):
            if not len(level.children):
                continue
            own = grads[level.first : level.last] * (states[level.first : level.last] > 0)
            below = states[level.children].reshape(-1, two)
            of_w += below.T @ own
            grads[level.children] = (own @ self.w.T).reshape(-1, hidden)  # a tree: no child has two parents
        return states[trees.roots].sum() * trees.weight, of_w[:hidden], of_w[hidden:]


# -- Tree-LSTM -------------------------------------------------------------------------------------------------------


def tree_lstm(hidden: int) -> tuple[af.VertexFunction, list[af.Variable]]:
    """Child-sum Tree-LSTM (Tai et al. 2015)."""
    w, u = af.Variable(weights(hidden, 4 * hidden), name="w"), af.Variable(weights(hidden, 3 * hidden), name="u")
    f = af.Variable(weights(hidden, hidden), name="f")
    part = af.spec("float32", (hidden,))

    @af.vertex_function(state=(part, part))
    def cell(vertex: af.Vertex) -> None:
        x = vertex.pull() @ w
        gates = x[: 3 * hidden] + vertex.gather_all(lambda child: child[0]) @ u
        own = x[3 * hidden :]
        kept = vertex.gather_all(lambda child: af.sigmoid(own + child[0] @ f) * child[1])
        gate = af.sigmoid(gates[: 2 * hidden])
        c = kept + gate[:hidden] * af.tanh(gates[2 * hidden :])
        vertex.scatter((gate[hidden:] * af.tanh(c), c))

    return cell, [w, u, f]


class TreeLstmByHand:
    """Child-sum Tree-LSTM level by level in NumPy or CuPy; inputs are multiplied for all vertices at once."""

    def __init__(self, trees: Trees, hidden: int, xp: Any = np) -> None:
        self.trees = trees.map(xp.asarray)
        self.hidden = hidden
        self.w, self.u, self.f = (xp.asarray(weights(hidden, count * hidden)) for count in (4, 3, 1))
        self._xp = xp

    def _sigmoid(self, x: Any) -> Any:
        return 1 / (1 + self._xp.exp(-x))

    def _below(self, level: Level, rows: Any) -> Any:
        """Rows of children, summed for each vertex."""
        total = self._xp.zeros_like(rows, shape=(level.last - level.first, self.hidden))
        if self._xp is not np:
            self._xp.add.at(total, level.owners, rows)
            return total
        filled = np.flatnonzero(np.diff(level.starts))
        if len(filled):
            total[filled] = np.add.reduceat(rows, level.starts[filled], axis=0)
        return total

    def forward(self, kept: list[Any] | None = None) -> tuple[Any, Any, Any]:
        """Inputs, and both parts of all states, in execution order; `kept` gets what the gradient needs."""
        trees, n = self.trees, self.hidden
        xs = trees.xs[trees.order]
        x = xs @ self.w
        h, c = self._xp.empty_like(xs, shape=(len(xs), n)), self._xp.empty_like(xs, shape=(len(xs), n))
        for level in trees.levels:
            rows = slice(level.first, level.last)
            h_below, c_below = h[level.children], c[level.children]
            h_sum = self._below(level, h_below)
            gates = x[rows, : 3 * n] + h_sum @ self.u
            gate, new = self._sigmoid(gates[:, : 2 * n]), self._xp.tanh(gates[:, 2 * n :])
            forget = self._sigmoid(x[rows, 3 * n :][level.owners] + h_below @ self.f)
            c[rows] = self._below(level, forget * c_below) + gate[:, :n] * new
            shown = self._xp.tanh(c[rows])
            h[rows] = gate[:, n:] * shown
            if kept is not None:
                kept.append((h_below, c_below, h_sum, gate, new, forget, shown))
        return xs, h, c

    def step(self) -> tuple[Any, ...]:
        """The loss, and its gradients of the weights."""
        trees, n = self.trees, self.hidden
        kept: list[Any] = []
        xs, h, _ = self.forward(kept)
        of_x = self._xp.zeros_like(xs, shape=(len(xs), 4 * n))
        of_h, of_c = self._xp.zeros_like(h), self._xp.zeros_like(h)
        of_u, of_f = self._xp.zeros_like(self.u), self._xp.zeros_like(self.f)
        of_h[trees.roots] = trees.weight
        for level, (h_below, c_below, h_sum, gate, new, forget, shown) in zip(
            reversed(trees.levels), reversed(kept), strict=True
        ):
            rows = slice(level.first, level.last)
            d_h = of_h[rows]
            d_c = of_c[rows] + d_h * gate[:, n:] * (1 - shown * shown)
            d_gates = self._xp.concatenate([d_c * new, d_h * shown, d_c * gate[:, :n]], axis=1)
            d_gates[:, : 2 * n] *= gate * (1 - gate)
            d_gates[:, 2 * n :] *= 1 - new * new
            of_x[rows, : 3 * n] = d_gates
            if not len(level.children):
                continue
            of_u += h_sum.T @ d_gates
            d_kept = d_c[level.owners]
            d_forget = d_kept * c_below * forget * (1 - forget)
            of_x[rows, 3 * n :] = self._below(level, d_forget)
            of_f += h_below.T @ d_forget
            of_h[level.children] = (d_gates @ self.u.T)[level.owners] + d_forget @ self.f.T
            of_c[level.children] = d_kept * forget
        return h[trees.roots].sum() * trees.weight, xs.T @ of_x, of_u, of_f


# -- the workload ----------------------------------------------------------------------------------------------------


class OfAsyncflow:
    """A vertex function over the trees, its loss and gradients."""

    def __init__(
        self,
        trees: Trees,
        model: tuple[af.VertexFunction, list[af.Variable]],
        *,
        lift_parts: bool = True,
        streams: int = 1,
        **options: Any,
    ) -> None:
        function, variables = model
        with af.Graph() as graph:
            self.graph, x = af.InputGraph.placeholder(), af.placeholder("float32", (None, trees.xs.shape[1]))
            roots = af.vertex_map(function, self.graph, x, lift_parts=lift_parts, streams=streams).roots
            self.loss = af.sum(roots[0] if isinstance(roots, tuple) else roots) * trees.weight
            self.fetches = self.loss, af.gradients(self.loss, variables)
        self.feeds = {**self.graph.feeds(trees.graph), x: trees.xs}
        self.session = af.Session(graph, **options)

    async def forward(self) -> Any:
        """The loss."""
        return await self.session.run(self.loss, self.feeds)

    async def step(self) -> tuple[Any, ...]:
        """The loss, and its gradients of the weights."""
        loss, grads = await self.session.run(self.fetches, self.feeds)
        return loss, *grads


def timed_sample(
    count: int, work: Callable[[], Any], answer_of: Callable[[Any], Any] | None = None, figure: Figure = STEP
) -> Trial:
    """Make a trial of a step of `count` samples, awaited or not; `answer_of` returns its results in one array."""

    def joined(step: Any) -> Any:
        return np.concatenate([np.ravel(part) for part in nest.flatten(step)[0]])

    async def trial() -> Sample:
        started = perf_counter()
        step = work()
        if isinstance(step, Awaitable):
            step = await step
        taken = perf_counter() - started
        return Sample({figure: taken * 1e6 / count}, (answer_of or joined)(step))

    return trial


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 5,
    fc_sizes: Sequence[tuple[int, int, int]] = ((256, 16, 64), (256, 16, 256), (256, 16, 512)),
    lstm_sizes: Sequence[tuple[int, int]] = ((32, 150), (32, 512)),
    files: int = 60,
) -> list[Result]:
    """Measure us a tree: asyncflow, NumPy by level, PyTorch by level; training and inference.

    Args:
        peers: systems beside NumPy.
        repeats: measured trials of each system.
        fc_sizes: leaves, batch and hidden extent of Tree-FC.
        lstm_sizes: batch and hidden extent of Tree-LSTM.
        files: number of files of the library that the syntax trees come from.
    """
    results: list[Result] = []
    for leaves, batch, hidden in fc_sizes:
        trees = batch_of([complete(leaves)] * batch, hidden)
        case = f"Tree-FC, {leaves} leaves, batch {batch}, hidden {hidden}"
        results += await _measured(peers, case, trees, tree_fc(hidden), TreeFcByHand(trees, hidden), repeats)
    # Whole files are held out of the example's training: here both parts are only shapes.
    functions = [function for part in read_functions(files) for function in part]
    for batch, hidden in lstm_sizes:
        chosen = np.random.default_rng(2).choice(len(functions), batch, replace=False)
        trees = batch_of([functions[place].tree for place in chosen], hidden)
        case = f"Tree-LSTM, syntax trees, batch {batch}, hidden {hidden}"
        results += await _measured(peers, case, trees, tree_lstm(hidden), TreeLstmByHand(trees, hidden), repeats)
    return results


async def _measured(
    peers: Peers,
    case: str,
    trees: Trees,
    model: tuple[af.VertexFunction, list[af.Variable]],
    by_hand: TreeFcByHand | TreeLstmByHand,
    repeats: int,
) -> list[Result]:
    ours = {
        ASYNCFLOW: OfAsyncflow(trees, model),
        IN_LOOP: OfAsyncflow(trees, model, lift_parts=False),
    }
    steps = {name: timed_sample(trees.count, each.step) for name, each in ours.items()}
    steps[NUMPY] = timed_sample(trees.count, by_hand.step)
    if peers.torch is not None:
        steps[TORCH] = timed_sample(trees.count, torch_step(peers.torch, trees, by_hand))
    forward: dict[str, Trial] = {
        name: timed_sample(trees.count, each.forward, figure=FORWARD) for name, each in ours.items()
    }

    def inference() -> Any:
        found = by_hand.forward()
        states = found[1] if isinstance(found, tuple) else found
        return states[trees.roots].sum() * trees.weight

    forward[NUMPY] = timed_sample(trees.count, inference, figure=FORWARD)
    try:
        return [
            *await compare(NAME, case, forward, repeats=repeats, lead_ins=1, tolerance=TOLERANCE),
            *await compare(NAME, case, steps, repeats=repeats, lead_ins=1, tolerance=TOLERANCE),
        ]
    finally:
        for each in ours.values():
            await each.session.aclose()


def torch_step(
    torch: Any, trees: Trees, by_hand: TreeFcByHand | TreeLstmByHand, *, place: str = "cpu"
) -> Callable[[], tuple[Any, ...]]:
    """Make a training step level by level in PyTorch; the states of a level are joined to the states below."""
    xs = torch.from_numpy(trees.xs[trees.order]).to(place)
    roots = torch.from_numpy(trees.roots).to(place)
    levels = [
        (each, torch.from_numpy(each.children).to(place), torch.from_numpy(each.owners).to(place))
        for each in trees.levels
    ]
    is_lstm = isinstance(by_hand, TreeLstmByHand)
    names = ("w", "u", "f") if is_lstm else ("w",)
    parameters = [torch.tensor(getattr(by_hand, name), device=place).requires_grad_() for name in names]
    n = xs.shape[1]

    def fc() -> Any:
        (w,) = parameters
        done = xs.new_zeros((0, n))
        for level, children, _ in levels:
            own = xs[level.first : level.last]
            if len(children):
                own = own + done[children].reshape(-1, 2 * n) @ w
            done = torch.cat([done, torch.relu(own)])
        return done[roots].sum() * float(trees.weight)

    def lstm() -> Any:
        w, u, f = parameters
        x = xs @ w
        h, c = xs.new_zeros((0, n)), xs.new_zeros((0, n))
        for level, children, owners in levels:
            own = x[level.first : level.last]
            zeros = xs.new_zeros((len(own), n))
            below = h[children]
            gates = own[:, : 3 * n] + zeros.index_add(0, owners, below) @ u
            gate = torch.sigmoid(gates[:, : 2 * n])
            forget = torch.sigmoid(own[:, 3 * n :][owners] + below @ f)
            cell = zeros.index_add(0, owners, forget * c[children]) + gate[:, :n] * torch.tanh(gates[:, 2 * n :])
            h, c = torch.cat([h, gate[:, n:] * torch.tanh(cell)]), torch.cat([c, cell])
        return h[roots].sum() * float(trees.weight)

    def step() -> tuple[Any, ...]:
        loss = lstm() if is_lstm else fc()
        grads = [grad.cpu().numpy() for grad in torch.autograd.grad(loss, parameters)]
        split = grads if is_lstm else [grads[0][:n], grads[0][n:]]
        return loss.detach().cpu().numpy()[()], *split

    return step
