"""One step of an LSTM and of a GRU, and the weights they start with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.nn.recurrent import gru_step, lstm_step

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")

BATCH, N_IN, HIDDEN = 4, 3, 5
RNG = np.random.default_rng(11)
X, H, C = (RNG.standard_normal((BATCH, size)) for size in (N_IN, HIDDEN, HIDDEN))


def random_weights(gates: int, *more: int) -> list[np.ndarray]:
    shapes = [(N_IN, gates * HIDDEN), (HIDDEN, gates * HIDDEN), (gates * HIDDEN,), *((size,) for size in more)]
    return [RNG.standard_normal(shape) for shape in shapes]


async def test_lstm_cell(run: Run) -> None:
    """Against the formula, gate by gate."""
    weights = random_weights(4)
    output, (h, c) = af.nn.lstm_cell(X, (H, C), af.nn.LSTMWeights(*weights))
    want, (want_h, want_c) = lstm_step(X, (H, C), weights)
    for found, expected in zip(await run([output, h, c]), [want, want_h, want_c], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


async def test_gru_cell(run: Run) -> None:
    """Against the formula of the textbook."""
    weights = random_weights(3, HIDDEN)
    output, state = af.nn.gru_cell(X, H, af.nn.GRUWeights(*weights))
    want, _ = gru_step(X, H, weights)
    for found in await run([output, state]):
        np.testing.assert_allclose(found, want, rtol=1e-12)


async def test_one_example_of_a_cell(run: Run) -> None:
    """Without the extent of a batch: the first of what a batch gives."""
    lstm, gru = af.nn.LSTMWeights(*random_weights(4)), af.nn.GRUWeights(*random_weights(3, HIDDEN))
    one, (one_h, one_c) = af.nn.lstm_cell(X[0], (H[0], C[0]), lstm)
    many, (many_h, many_c) = af.nn.lstm_cell(X, (H, C), lstm)
    one_gru, many_gru = af.nn.gru_cell(X[0], H[0], gru)[0], af.nn.gru_cell(X, H, gru)[0]
    assert one.shape == one_c.shape == one_gru.shape == (HIDDEN,)
    singles, batches = await run([[one, one_h, one_c, one_gru], [many, many_h, many_c, many_gru]])
    for found, expected in zip(singles, batches, strict=True):
        np.testing.assert_allclose(found, expected[0], rtol=1e-12)


@pytest.mark.parametrize(("make", "gates"), [(af.nn.lstm_weights, 4), (af.nn.gru_weights, 3)], ids=["lstm", "gru"])
def test_weights(make: Callable[..., Any], gates: int) -> None:
    """Shapes, names and dtype; the same for the same seed."""
    weights = make(N_IN, HIDDEN, seed=3, name="layer", dtype="float64")
    assert [weight.shape for weight in weights[:3]] == [
        (N_IN, gates * HIDDEN),
        (HIDDEN, gates * HIDDEN),
        (gates * HIDDEN,),
    ]
    assert [weight.name for weight in weights] == [f"layer/{field}" for field in weights._fields]
    assert {weight.dtype for weight in weights} == {np.dtype("float64")}
    for again, weight in zip(make(N_IN, HIDDEN, seed=3, dtype="float64"), weights, strict=True):
        np.testing.assert_array_equal(again.initial, weight.initial)
    assert not np.array_equal(make(N_IN, HIDDEN, seed=4).input.initial, weights.input.initial)
    assert make(N_IN, HIDDEN).input.dtype == "float32"


@pytest.mark.parametrize("make", [af.nn.lstm_weights, af.nn.gru_weights])
def test_each_gate_keeps_the_length_of_the_state(make: Callable[..., Any]) -> None:
    """The matrix of the state is orthogonal, block by block."""
    recurrent = make(N_IN, HIDDEN, dtype="float64").recurrent.initial
    for block in np.split(recurrent, recurrent.shape[1] // HIDDEN, axis=1):
        np.testing.assert_allclose(block.T @ block, np.eye(HIDDEN), atol=1e-12)


def test_inputs_keep_their_variance() -> None:
    """Glorot's bound, for one gate at a time."""
    drawn = af.nn.glorot_uniform(np.random.default_rng(0), 300, 100, 4)
    assert drawn.dtype == "float32"
    assert drawn.shape == (300, 400)
    assert np.abs(drawn).max() <= np.sqrt(6 / 400)
    np.testing.assert_allclose(drawn.var(), 2 / 400, rtol=0.02)


def test_forget_gates_are_open_at_first() -> None:
    bias = af.nn.lstm_weights(N_IN, HIDDEN).bias
    assert isinstance(bias, af.Variable)
    np.testing.assert_array_equal(bias.initial, [0] * HIDDEN + [1] * HIDDEN + [0] * 2 * HIDDEN)


async def test_gates_of_weights_of_unknown_width(run: Run) -> None:
    """The state tells how wide they are."""
    weights = random_weights(3, HIDDEN)
    fed = [af.placeholder("float64", (None,) * weight.ndim) for weight in weights]
    output, _ = af.nn.gru_cell(X, H, af.nn.GRUWeights(*fed))
    found = await run(output, dict(zip(fed, weights, strict=True)))
    np.testing.assert_allclose(found, gru_step(X, H, weights)[0], rtol=1e-12)


async def test_weights_read_once_are_tensors(run: Run) -> None:
    weights = af.nn.lstm_weights(N_IN, HIDDEN)
    read = weights.read()
    assert isinstance(read, af.nn.LSTMWeights)
    assert all(isinstance(tensor, af.Tensor) for tensor in read)
    np.testing.assert_array_equal(await run(read.input), weights.input.initial)


def test_extents_that_do_not_fit() -> None:
    """A state of another width, and columns that are no whole number of gates."""
    zeros = np.zeros((BATCH, HIDDEN + 1))
    columns = [*random_weights(4)[:2], None]
    with pytest.raises(af.ShapeError, match=r"gates of shape \[4,20\] and a state of shape \[4,6\]"):
        af.nn.lstm_cell(X, (af.placeholder("float64", (None, None)), zeros), af.nn.LSTMWeights(*columns))
    with pytest.raises(af.ShapeError, match="a cell with 3 gates"):
        af.nn.gru_cell(X, H, af.nn.GRUWeights(*random_weights(4, HIDDEN)))
    unknown = af.placeholder("float64", None)
    with pytest.raises(af.ShapeError, match="a cell with 4 gates needs to know `hidden` while the graph is built"):
        af.nn.lstm_cell(unknown, (unknown, unknown), af.nn.LSTMWeights(unknown, unknown, unknown))


@pytest.mark.parametrize("batch", [2, 4])
def test_an_lstm_has_a_pair_as_state(batch: int) -> None:
    """A tensor with two rows is none."""
    weights = af.nn.LSTMWeights(*random_weights(4))
    for state in (af.zeros((batch, HIDDEN)), H[:batch], (H, C, C)):
        with pytest.raises(af.GraphError, match=r"lstm_cell: its state is a pair \(h, c\), each of .*; got"):
            af.nn.lstm_cell(X[:batch], state, weights)  # type: ignore[arg-type]
    with pytest.raises(af.GraphError, match="lstm_cell: its state c is one tensor; got a tuple of 2 values"):
        af.nn.lstm_cell(X, (H, (C, C)), weights)


def test_a_gru_has_a_tensor_as_state() -> None:
    """The message names the state that the cell takes."""
    with pytest.raises(af.GraphError, match="gru_cell: its state h is one tensor; got a tuple of 2 values"):
        af.nn.gru_cell(X, (H, H), af.nn.GRUWeights(*random_weights(3, HIDDEN)))


@pytest.mark.parametrize("state", [H[0], H[:1], H[:, :1], H[None]], ids=["row", "batch", "hidden", "rank"])
def test_states_do_not_broadcast(state: np.ndarray) -> None:
    """A state has a row for each row of the input, and is as wide as the other part."""
    message = r"x is \[batch,n_in\] and its state \[batch,hidden\], or both are without batch; got x \[4,3\], h "
    for pair in ((H, state), (state, H), (state, state)):
        if pair[0].shape != pair[1].shape or state.shape[-1] != 1:
            with pytest.raises(af.ShapeError, match=f"lstm_cell: {message}"):
                af.nn.lstm_cell(X, pair, af.nn.LSTMWeights(*random_weights(4)))
    if state.shape != (BATCH, 1):
        with pytest.raises(af.ShapeError, match=f"gru_cell: {message}"):
            af.nn.gru_cell(X, state, af.nn.GRUWeights(*random_weights(3, HIDDEN)))


def test_dtypes_do_not_mix() -> None:
    """A state or an input of another dtype would change that of the state."""
    weights = af.nn.lstm_weights(N_IN, HIDDEN)
    x, h = X.astype(np.float32), H.astype(np.float32)
    for arguments, message in [
        ((x, (H, h)), "lstm_cell: x is float32 and h is float64; all are of one dtype"),
        ((x, (h, H)), "lstm_cell: x is float32 and c is float64"),
        ((X, (H, H)), "lstm_cell: x is float64 and weights.input is float32"),
        ((np.ones((BATCH, N_IN), np.int64), (h, h)), "lstm_cell: x is floats; got"),
    ]:
        with pytest.raises(af.DTypeError, match=message):
            af.nn.lstm_cell(*arguments, weights)
    with pytest.raises(af.DTypeError, match="gru_cell: x is float32 and h is float64"):
        af.nn.gru_cell(x, H, af.nn.gru_weights(N_IN, HIDDEN))


def test_weights_of_another_cell() -> None:
    with pytest.raises(af.GraphError, match=r"gru_cell: weights are GRUWeights, .*gru_weights gives; got LSTMWeights"):
        af.nn.gru_cell(X, H, af.nn.LSTMWeights(*random_weights(4)))  # type: ignore[arg-type]
    with pytest.raises(af.GraphError, match=r"lstm_cell: weights are LSTMWeights, .* gives; got list"):
        af.nn.lstm_cell(X, (H, C), random_weights(4))  # type: ignore[arg-type]


async def test_without_bias(run: Run) -> None:
    """As with zeros; `read` leaves None as it is."""
    w, u, b = random_weights(4)
    without = af.nn.LSTMWeights(w, u, None).read()
    assert without.bias is None
    found, want = await run(
        [af.nn.lstm_cell(X, (H, C), weights)[0] for weights in (without, af.nn.LSTMWeights(w, u, b * 0))]
    )
    np.testing.assert_array_equal(found, want)
    w, u, b, r = random_weights(3, HIDDEN)
    cells = [af.nn.GRUWeights(w, u, None, None).read(), af.nn.GRUWeights(w, u, b * 0, r * 0)]
    found, want = await run([af.nn.gru_cell(X, H, weights)[0] for weights in cells])
    np.testing.assert_array_equal(found, want)
