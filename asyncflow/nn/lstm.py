"""The LSTM cell (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asyncflow.graph.building.build import TensorLike, as_tensor, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import DTypeLike, as_dtype, float32
from asyncflow.nn.cell_arguments import Weight, cell_arguments, check_weights, pair
from asyncflow.nn.gates import plus, split_gates
from asyncflow.nn.initializers import glorot_uniform, orthogonal
from asyncflow.ops.arithmetic.elementwise import tanh
from asyncflow.ops.layers.nn import sigmoid
from asyncflow.ops.matrices.products import matmul
from asyncflow.state.variables.variable import Variable


class LSTMWeights(NamedTuple):
    """The weights and biases of `lstm_cell`, the four gates side by side: input, forget, candidate, output."""

    input: Weight
    """Weights of the input: ``(n_in, 4 * hidden)``."""
    recurrent: Weight
    """Of the state: ``(hidden, 4 * hidden)``."""
    bias: Weight
    """``(4 * hidden,)``; None for none."""

    def read(self) -> LSTMWeights:
        """The same as tensors. In front of a loop: the variables are then read once, and not in every iteration."""
        return LSTMWeights(*(None if x is None else as_tensor(x) for x in self))


def lstm_weights(
    n_in: int,
    hidden: int,
    seed: int = 0,
    *,
    dtype: DTypeLike = float32,
    name: str = "lstm",
    container: str | None = None,
) -> LSTMWeights:
    """Make variables for an LSTM cell, named ``<name>/input``, ``<name>/recurrent`` and ``<name>/bias``.

    Weights of the input are drawn as Glorot and Bengio do, and weights of the state are orthogonal for each gate.
    Biases are 0, but 1 for the forget gate, so that the cell remembers before it has learned to.

    Args:
        n_in: extent of the input.
        hidden: extent of the state.
        seed: of the random numbers.
        dtype: of the variables.
        name: in front of their names.
        container: they share their values with the sessions that use this container; None for each session its own.
    """
    random = np.random.default_rng(seed)
    bias = np.zeros(4 * hidden, as_dtype(dtype))
    bias[hidden : 2 * hidden] = 1
    return LSTMWeights(
        Variable(glorot_uniform(random, n_in, hidden, 4, dtype=dtype), name=f"{name}/input", container=container),
        Variable(orthogonal(random, hidden, 4, dtype=dtype), name=f"{name}/recurrent", container=container),
        Variable(bias, name=f"{name}/bias", container=container),
    )


def lstm_cell(
    x: TensorLike, state: tuple[TensorLike, TensorLike], weights: LSTMWeights
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One step: ``i, f, g, o = x @ W + b + h @ U``; ``c = σ(f) c + σ(i) tanh(g)``; ``h = σ(o) tanh(c)``.

    What depends on the input alone is a product of its own, which a loop may take for many steps at once. Without
    `batch` everywhere it is a step of one example, as in a vertex function.

    Args:
        x: ``(batch, n_in)``, floats.
        state: ``(h, c)``, each ``(batch, hidden)``, of the dtype of `x`.
        weights: arrays, tensors or variables, of the dtype of `x`.

    Returns:
        ``h`` and the new state ``(h, c)``.

    Raises:
        GraphError, DTypeError, ShapeError: the state is no pair, dtypes differ, or extents that are known do not fit.

    >>> import asyncflow as af
    >>> weights = lstm_weights(3, 5)
    >>> with af.Graph():
    ...     zeros = af.zeros((2, 5), dtype="float32")
    ...     h, (h, c) = lstm_cell(af.ones((2, 3), dtype="float32"), (zeros, zeros), weights)
    >>> print(h.dtype, h.shape)
    float32 (2, 5)
    """
    check_weights("lstm_cell", weights, LSTMWeights)
    before = pair("lstm_cell", state)
    with graph_for(x, *before, *weights):
        read = weights.read()
        x, h, c = cell_arguments("lstm_cell", x, dict(zip("hc", before, strict=True)), read._asdict())
        gates = plus(matmul(x, read.input), read.bias) + matmul(h, read.recurrent)
        into, forget, candidate, out = split_gates(gates, 4, c.shape)
        c = sigmoid(forget) * c + sigmoid(into) * tanh(candidate)
        h = sigmoid(out) * tanh(c)
        return h, (h, c)
