"""Training steps of the tree models in other systems: by node in PyTorch, by level in JAX, batched by DyNet.

By node is what people write first: a model of one vertex, called for each in turn. DyNet gets the same program and
finds by itself which operations are alike (Neubig et al. 2017, "On-the-fly operation batching"). JAX gets the levels
as constants and compiles them, which takes it seconds for each new structure; the time of that is not in its figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.trees import TreeFcByHand, TreeLstmByHand, Trees

    Step = Callable[[], tuple[Any, ...]]
    Cell = Callable[[int, Sequence[Any]], Any]


def _vertices(trees: Trees) -> Iterator[tuple[int, list[int]]]:
    """The position of each vertex in execution order, and its children's."""
    for level in trees.levels:
        below, starts = level.children.tolist(), level.starts.tolist()
        for place in range(level.last - level.first):
            yield level.first + place, below[starts[place] : starts[place + 1]]


def _states(trees: Trees, cell: Cell) -> list[Any]:
    found: list[Any] = []
    for vertex, children in _vertices(trees):
        found.append(cell(vertex, [found[child] for child in children]))
    return found


def torch_by_node(torch: Any, trees: Trees, by_hand: TreeFcByHand) -> Step:
    """Tree-FC in PyTorch, a vertex at a time."""
    n = trees.xs.shape[1]
    xs = torch.from_numpy(trees.xs[trees.order])
    parameters = [torch.from_numpy(part.copy()).requires_grad_() for part in (by_hand.w[:n], by_hand.w[n:])]

    def cell(vertex: int, children: Sequence[Any]) -> Any:
        products = [child @ w for child, w in zip(children, parameters, strict=False)]
        return torch.relu(sum(products, xs[vertex]))

    def step() -> tuple[Any, ...]:
        states = _states(trees, cell)
        loss = torch.stack([states[root] for root in trees.roots]).sum() * float(trees.weight)
        return loss.detach().numpy()[()], *(grad.numpy() for grad in torch.autograd.grad(loss, parameters))

    return step


def torch_lstm_by_node(torch: Any, trees: Trees, by_hand: TreeLstmByHand) -> Step:
    """Tree-LSTM in PyTorch, a vertex at a time."""
    n = by_hand.hidden
    xs = torch.from_numpy(trees.xs[trees.order])
    parameters = [torch.from_numpy(each.copy()).requires_grad_() for each in (by_hand.w, by_hand.u, by_hand.f)]
    nothing = xs.new_zeros(n)

    def cell(vertex: int, children: Sequence[Any]) -> Any:
        w, u, f = parameters
        x = xs[vertex] @ w
        gates = x[: 3 * n] + sum((h for h, _ in children), nothing) @ u
        gate = torch.sigmoid(gates[: 2 * n])
        kept = [torch.sigmoid(x[3 * n :] + h @ f) * c for h, c in children]
        c = sum(kept, gate[:n] * torch.tanh(gates[2 * n :]))
        return gate[n:] * torch.tanh(c), c

    def step() -> tuple[Any, ...]:
        states = _states(trees, cell)
        loss = torch.stack([states[root][0] for root in trees.roots]).sum() * float(trees.weight)
        return loss.detach().numpy()[()], *(grad.numpy() for grad in torch.autograd.grad(loss, parameters))

    return step


def jax_by_level(jax: Any, trees: Trees, by_hand: TreeFcByHand) -> Step:
    """Tree-FC in JAX."""
    n, numpy = trees.xs.shape[1], jax.numpy

    def loss_of(w: Any, xs: Any) -> Any:
        states = numpy.zeros_like(xs)
        for level in trees.levels:
            own = xs[level.first : level.last]
            if len(level.children):
                own = own + states[level.children].reshape(-1, 2 * n) @ w
            states = states.at[level.first : level.last].set(numpy.maximum(own, 0))
        return states[trees.roots].sum() * trees.weight

    function, w, xs = jax.jit(jax.value_and_grad(loss_of)), by_hand.w, trees.xs[trees.order]

    def step() -> tuple[Any, ...]:
        loss, grad = function(w, xs)
        found = np.asarray(grad)
        return np.asarray(loss)[()], found[:n], found[n:]

    return step


def jax_lstm_by_level(jax: Any, trees: Trees, by_hand: TreeLstmByHand) -> Step:
    """Tree-LSTM in JAX."""
    n, numpy = by_hand.hidden, jax.numpy

    def loss_of(parameters: Any, xs: Any) -> Any:
        w, u, f = parameters
        x = xs @ w
        h, c = numpy.zeros((len(xs), n), numpy.float32), numpy.zeros((len(xs), n), numpy.float32)
        for level in trees.levels:
            rows, count = slice(level.first, level.last), level.last - level.first
            h_below, c_below = h[level.children], c[level.children]

            def below(values: Any, level: Any = level, count: int = count) -> Any:
                return jax.ops.segment_sum(values, level.owners, count)

            gates = x[rows, : 3 * n] + below(h_below) @ u
            gate = jax.nn.sigmoid(gates[:, : 2 * n])
            forget = jax.nn.sigmoid(x[rows, 3 * n :][level.owners] + h_below @ f)
            new = below(forget * c_below) + gate[:, :n] * numpy.tanh(gates[:, 2 * n :])
            c, h = c.at[rows].set(new), h.at[rows].set(gate[:, n:] * numpy.tanh(new))
        return h[trees.roots].sum() * trees.weight

    function, xs = jax.jit(jax.value_and_grad(loss_of)), trees.xs[trees.order]
    parameters = by_hand.w, by_hand.u, by_hand.f

    def step() -> tuple[Any, ...]:
        loss, grads = function(parameters, xs)
        return np.asarray(loss)[()], *map(np.asarray, grads)

    return step


class DynetParameters:
    """Parameters of a program of DyNet, whose products are of matrices with columns: ours are transposed there."""

    def __init__(self, dynet: Any, xs: Any, arrays: Sequence[Any]) -> None:
        self._collection = collection = dynet.ParameterCollection()  # the parameters do not keep it
        self._dynet = dynet
        self._xs = collection.lookup_parameters_from_numpy(np.ascontiguousarray(xs))
        self.arrays = [collection.parameters_from_numpy(np.ascontiguousarray(array.T)) for array in arrays]
        # It does nothing but forget the gradients.
        self._trainer = dynet.SimpleSGDTrainer(collection, learning_rate=0.0)

    def x(self, row: int) -> Any:
        """A row of inputs, which are not trained."""
        return self._dynet.lookup(self._xs, row, update=False)

    def step(self, loss: Any) -> tuple[Any, ...]:
        """Its value and gradients."""
        value = loss.value()
        loss.backward()
        grads = [array.grad_as_array().T.astype(np.float32) for array in self.arrays]
        self._trainer.update()
        return np.float32(value), *grads


def dynet(dy: Any, trees: Trees, by_hand: TreeFcByHand) -> Step:
    """Tree-FC in DyNet."""
    n = trees.xs.shape[1]
    parameters = DynetParameters(dy, trees.xs[trees.order], (by_hand.w[:n], by_hand.w[n:]))
    build = _fc_graph(dy, trees, parameters)
    return lambda: parameters.step(build())


def dynet_graph(dy: Any, trees: Trees, by_hand: TreeFcByHand) -> Callable[[], Any]:
    """Builds the graph of Tree-FC in DyNet, and computes nothing."""
    n = trees.xs.shape[1]
    return _fc_graph(dy, trees, DynetParameters(dy, trees.xs[trees.order], (by_hand.w[:n], by_hand.w[n:])))


def _fc_graph(dy: Any, trees: Trees, parameters: DynetParameters) -> Callable[[], Any]:
    def cell(vertex: int, children: Sequence[Any]) -> Any:
        terms = [term for pair in zip(parameters.arrays, children, strict=False) for term in pair]
        x = parameters.x(vertex)
        return dy.rectify(dy.affine_transform([x, *terms]) if terms else x)

    def build() -> Any:
        dy.renew_cg()
        states = _states(trees, cell)
        return dy.sum_elems(dy.esum([states[root] for root in trees.roots])) * float(trees.weight)

    return build


def dynet_lstm(dy: Any, trees: Trees, by_hand: TreeLstmByHand) -> Step:
    """Tree-LSTM in DyNet."""
    n = by_hand.hidden
    parameters = DynetParameters(dy, trees.xs[trees.order], (by_hand.w, by_hand.u, by_hand.f))

    def cell(vertex: int, children: Sequence[Any]) -> Any:
        w, u, f = parameters.arrays
        x = w * parameters.x(vertex)
        gates = dy.pick_range(x, 0, 3 * n)
        if children:
            gates = gates + u * dy.esum([h for h, _ in children])
        own = dy.pick_range(x, 3 * n, 4 * n)
        kept = [dy.cmult(dy.logistic(own + f * h), c) for h, c in children]
        into, out = dy.logistic(dy.pick_range(gates, 0, n)), dy.logistic(dy.pick_range(gates, n, 2 * n))
        c = dy.esum([dy.cmult(into, dy.tanh(dy.pick_range(gates, 2 * n, 3 * n))), *kept])
        return dy.cmult(out, dy.tanh(c)), c

    def step() -> tuple[Any, ...]:
        dy.renew_cg()
        states = _states(trees, cell)
        return parameters.step(dy.sum_elems(dy.esum([states[root][0] for root in trees.roots])) * float(trees.weight))

    return step
