"""The GRU cell (Cho et al. 2014), with the reset gate behind the product as cuDNN has it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asyncflow.graph.building.build import TensorLike, as_tensor, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import DTypeLike, as_dtype, float32
from asyncflow.nn.cell_arguments import Weight, cell_arguments, check_weights
from asyncflow.nn.gates import plus, split_gates
from asyncflow.nn.initializers import glorot_uniform, orthogonal
from asyncflow.ops.arithmetic.elementwise import tanh
from asyncflow.ops.layers.nn import sigmoid
from asyncflow.ops.matrices.products import matmul
from asyncflow.state.variables.variable import Variable


class GRUWeights(NamedTuple):
    """The weights and biases of `gru_cell`, the three gates side by side: reset, update, candidate."""

    input: Weight
    """Weights of the input: ``(n_in, 3 * hidden)``."""
    recurrent: Weight
    """Of the state: ``(hidden, 3 * hidden)``."""
    bias: Weight
    """``(3 * hidden,)``; None for none."""
    recurrent_bias: Weight
    """Bias of the candidate, inside the reset: ``(hidden,)``; None for none."""

    def read(self) -> GRUWeights:
        """The same as tensors. In front of a loop: the variables are then read once, and not in every iteration."""
        return GRUWeights(*(None if x is None else as_tensor(x) for x in self))


def gru_weights(
    n_in: int,
    hidden: int,
    seed: int = 0,
    *,
    dtype: DTypeLike = float32,
    name: str = "gru",
    container: str | None = None,
) -> GRUWeights:
    """Make variables for a GRU cell, named after their fields, such as ``<name>/input``; drawn as in `lstm_weights`.

    Args:
        n_in: extent of the input.
        hidden: extent of the state.
        seed: of the random numbers.
        dtype: of the variables.
        name: in front of their names.
        container: they share their values with the sessions that use this container; None for each session its own.
    """
    random, found = np.random.default_rng(seed), as_dtype(dtype)
    values = {
        "input": glorot_uniform(random, n_in, hidden, 3, dtype=found),
        "recurrent": orthogonal(random, hidden, 3, dtype=found),
        "bias": np.zeros(3 * hidden, found),
        "recurrent_bias": np.zeros(hidden, found),
    }
    return GRUWeights(
        **{field: Variable(value, name=f"{name}/{field}", container=container) for field, value in values.items()}
    )


def gru_cell(x: TensorLike, state: TensorLike, weights: GRUWeights) -> tuple[Tensor, Tensor]:
    """One step: ``r, z = σ(x @ W + b + h @ U)``; ``n = tanh(x @ W + b + r (h @ U + bᵣ))``; ``h = (1 - z) n + z h``.

    Each gate has its columns of ``W``, ``U`` and ``b``. What depends on the input alone is a product of its own.
    Without `batch` everywhere it is a step of one example, as in a vertex function.

    Args:
        x: ``(batch, n_in)``, floats.
        state: ``h``, ``(batch, hidden)``, of the dtype of `x`.
        weights: arrays, tensors or variables, of the dtype of `x`.

    Returns:
        ``h``, as output and as new state.

    Raises:
        GraphError, DTypeError, ShapeError: the state is no tensor, dtypes differ, or extents that are known do not fit.

    >>> import asyncflow as af
    >>> weights = gru_weights(3, 5)
    >>> with af.Graph():
    ...     h, state = gru_cell(af.ones((2, 3), dtype="float32"), af.zeros((2, 5), dtype="float32"), weights)
    >>> print(h.dtype, h.shape)
    float32 (2, 5)
    """
    check_weights("gru_cell", weights, GRUWeights)
    with graph_for(x, state, *weights):
        read = weights.read()
        x, h = cell_arguments("gru_cell", x, {"h": state}, read._asdict())
        reset_in, update_in, candidate_in = split_gates(plus(matmul(x, read.input), read.bias), 3, h.shape)
        reset_on, update_on, candidate_on = split_gates(matmul(h, read.recurrent), 3, h.shape)
        reset, update = sigmoid(reset_in + reset_on), sigmoid(update_in + update_on)
        candidate = tanh(candidate_in + reset * plus(candidate_on, read.recurrent_bias))
        # One product less than the formula above; exact at z = 0, and nearly so at 1.
        h = candidate + update * (h - candidate)
        return h, h
