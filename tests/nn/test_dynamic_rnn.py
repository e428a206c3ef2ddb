"""Cells over sequences of different lengths: against one sequence at a time in NumPy, and central differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.nn.recurrent import differences, gru_step, lstm_step, sequence_by_sequence

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")

STEPS, BATCH, N_IN, HIDDEN = 6, 5, 3, 4
RNG = np.random.default_rng(2)
INPUTS = RNG.standard_normal((STEPS, BATCH, N_IN))
H, C = RNG.standard_normal((2, BATCH, HIDDEN))
LENGTHS = {
    "unsorted": [3, 6, 0, 5, 3],
    "ascending": [0, 1, 2, 4, 6],
    "descending": [6, 4, 4, 2, 1],
    "equal": [4, 4, 4, 4, 4],
    "full": [6, 6, 6, 6, 6],
    "all-empty": [0, 0, 0, 0, 0],
    "one-goes-on": [1, 1, 6, 1, 0],
}


def random_weights(gates: int, *more: int) -> list[np.ndarray]:
    shapes = [(N_IN, gates * HIDDEN), (HIDDEN, gates * HIDDEN), (gates * HIDDEN,), *((size,) for size in more)]
    return [RNG.standard_normal(shape) * 0.5 for shape in shapes]


LSTM, GRU = random_weights(4), random_weights(3, HIDDEN)


def lstm(x: Any, state: Any, weights: Any = None) -> Any:
    return af.nn.lstm_cell(x, state, af.nn.LSTMWeights(*(LSTM if weights is None else weights)))


def gru(x: Any, state: Any) -> Any:
    return af.nn.gru_cell(x, state, af.nn.GRUWeights(*GRU))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
async def test_lstm_of_ragged_sequences(run: Run, lengths: list[int]) -> None:
    """As one sequence at a time; outputs are zeros past an end, and the state is that of the end."""
    outputs, (h, c) = await run(af.nn.dynamic_rnn(lstm, INPUTS, (H, C), lengths))
    want, finals = sequence_by_sequence(lstm_step, LSTM, INPUTS, (H, C), lengths)
    np.testing.assert_allclose(outputs, want, atol=1e-12)
    np.testing.assert_allclose(h, [final[0] for final in finals], atol=1e-12)
    np.testing.assert_allclose(c, [final[1] for final in finals], atol=1e-12)


@pytest.mark.parametrize("lengths", [None, LENGTHS["unsorted"]], ids=["full", "ragged"])
async def test_gru(run: Run, lengths: list[int] | None) -> None:
    """A state that is one tensor."""
    outputs, state = await run(af.nn.dynamic_rnn(gru, INPUTS, H, lengths))
    want, finals = sequence_by_sequence(gru_step, GRU, INPUTS, H, lengths or [STEPS] * BATCH)
    np.testing.assert_allclose(outputs, want, atol=1e-12)
    np.testing.assert_allclose(state, finals, atol=1e-12)


async def test_without_lengths(run: Run) -> None:
    """All sequences have all steps; shapes stay known."""
    outputs, (h, c) = af.nn.dynamic_rnn(lstm, INPUTS, (H, C))
    assert outputs.shape == (STEPS, BATCH, HIDDEN)
    assert h.shape == c.shape == (BATCH, HIDDEN)
    want, finals = sequence_by_sequence(lstm_step, LSTM, INPUTS, (H, C), [STEPS] * BATCH)
    found = await run([outputs, h])
    np.testing.assert_allclose(found[0], want, atol=1e-12)
    np.testing.assert_allclose(found[1], [final[0] for final in finals], atol=1e-12)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("steps", "batch"), [(6, 5), (3, 1), (1, 2), (0, 4), (5, 0), (0, 0)])
async def test_extents_known_in_the_run_only(run: Run, steps: int, batch: int, ragged: bool) -> None:
    """One sequence, one step, none of either."""
    xs, h, c = (af.placeholder("float64", (None,) * rank + (size,)) for rank, size in ((2, N_IN), (1, 4), (1, 4)))
    lengths = af.placeholder("int32", (None,))
    loop = af.nn.dynamic_rnn(lstm, xs, (h, c), lengths if ragged else None)
    feeds = {xs: INPUTS[:steps, :batch], h: H[:batch], c: C[:batch]}
    ends = [min(length, steps) for length in LENGTHS["unsorted"][:batch]] if ragged else [steps] * batch
    outputs, (last, _) = await run(loop, {**feeds, **({lengths: np.array(ends, np.int32)} if ragged else {})})
    want, finals = sequence_by_sequence(lstm_step, LSTM, feeds[xs], (feeds[h], feeds[c]), ends)
    assert outputs.shape == (steps, batch, HIDDEN)
    np.testing.assert_allclose(outputs, want, atol=1e-12)
    np.testing.assert_allclose(last.reshape(-1), np.reshape([final[0] for final in finals], -1), atol=1e-12)


@pytest.mark.parametrize("lengths", [None, [3, 1, 0, 2]], ids=["full", "ragged"])
async def test_gradients(run: Run, lengths: list[int] | None) -> None:
    """By inputs, first state and weights, of a loss on outputs and last state, against central differences."""
    at = dict(zip("xhcwub", (INPUTS[:3, :4], H[:4], C[:4], *LSTM), strict=True))
    feeds = {name: af.placeholder("float64", value.shape) for name, value in at.items()}
    weights = [feeds[name] for name in "wub"]
    cell = af.nn.dynamic_rnn(lambda x, state: lstm(x, state, weights), feeds["x"], (feeds["h"], feeds["c"]), lengths)
    shares = [np.cos(np.arange(size)).reshape(shape) for size, shape in ((48, (3, 4, 4)), (16, (4, 4)), (16, (4, 4)))]
    outputs, (h, c) = cell
    loss = sum((af.sum(x * share) for x, share in zip((outputs, h, c), shares, strict=True)), start=af.constant(0.0))
    found = await run(af.gradients(loss, feeds), {feeds[name]: value for name, value in at.items()})

    def by_hand(values: Any) -> float:
        state = values["h"], values["c"]
        weights = [values[name] for name in "wub"]
        outputs, finals = sequence_by_sequence(lstm_step, weights, values["x"], state, lengths or [3] * 4)
        last = [np.array([final[k] for final in finals]) for k in (0, 1)]
        return float(sum((x * share).sum() for x, share in zip((outputs, *last), shares, strict=True)))

    for name, want in differences(by_hand, at).items():
        np.testing.assert_allclose(found[name], want, atol=1e-7, err_msg=name)


async def test_gradients_of_nothing(run: Run) -> None:
    """No steps at all: the loss depends on the first state alone."""
    xs, h, weights = af.constant(INPUTS), af.constant(H), [af.constant(item) for item in LSTM]
    outputs, (last, _) = af.nn.dynamic_rnn(lambda x, s: lstm(x, s, weights), xs, (h, C), [0] * BATCH)
    found = await run(af.gradients(af.sum(outputs) + af.sum(last * 2), [xs, h, *weights]))
    for grad, given, value in zip(found, [INPUTS, H, *LSTM], [0, 2, 0, 0, 0], strict=True):
        np.testing.assert_array_equal(grad, np.full_like(given, value))


async def test_gradients_of_variables(run: Run) -> None:
    """Read in front of the loop or in every iteration, they get the same gradients."""
    found = []
    for read in (True, False):
        weights = af.nn.lstm_weights(N_IN, HIDDEN, seed=1, dtype="float64")
        used = weights.read() if read else weights
        cell = partial(af.nn.lstm_cell, weights=used)
        outputs, _ = af.nn.dynamic_rnn(cell, INPUTS, (H, C), LENGTHS["unsorted"])
        found.append(await run(af.gradients(af.sum(outputs**2), weights)))
    assert isinstance(found[0], af.nn.LSTMWeights)
    for a, b in zip(*found, strict=True):
        assert np.abs(a).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


async def test_nothing_past_an_end_is_computed(run: Run) -> None:
    """The cell sees as many rows as there are sequences left, and runs as often as the longest has steps.

    The order is free: work on inputs alone waits for no earlier step.
    """
    rows = []

    @af.op(outputs=af.spec("float64", (None, N_IN)))
    def seen(x: Any) -> Any:
        rows.append(len(x))
        return x

    def cell(x: Any, state: Any) -> Any:
        return gru(seen(x), state)

    await run(af.nn.dynamic_rnn(cell, INPUTS, H, LENGTHS["unsorted"]))
    assert sorted(rows) == [1, 2, 2, 4, 4, 4]
    rows.clear()
    await run(af.nn.dynamic_rnn(cell, INPUTS, H, [2, 0, 1, 0, 2]))
    assert sorted(rows) == [2, 3]


async def test_values_past_an_end_do_not_matter(run: Run) -> None:
    """Not even NaN, neither in outputs nor in gradients."""
    spoiled = INPUTS.copy()
    for k, length in enumerate(LENGTHS["unsorted"]):
        spoiled[length:, k] = np.nan
    values = []
    for inputs in (INPUTS, spoiled):
        xs, h = af.constant(inputs), af.constant(H)
        outputs, last = af.nn.dynamic_rnn(gru, xs, h, LENGTHS["unsorted"])
        values.append(await run([outputs, last, *af.gradients(af.sum(outputs**2) + af.sum(last), [xs, h])]))
    for a, b in zip(*values, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("lengths", [None, LENGTHS["unsorted"]], ids=["full", "ragged"])
async def test_nests(run: Run, lengths: list[int] | None) -> None:
    """Inputs, state and outputs of several parts; a state may be integers, and an output no part of the state."""

    def cell(x: Any, state: Any) -> Any:
        total = state["total"] + x["a"] * x["b"]
        return (total, {"half": x["a"] / 2}), {"total": total, "count": state["count"] + 1}

    inputs = {"a": INPUTS, "b": INPUTS[..., 0:1]}
    state = {"total": np.zeros((BATCH, N_IN)), "count": np.zeros(BATCH, np.int64)}
    (totals, parts), last = await run(af.nn.dynamic_rnn(cell, inputs, state, lengths))
    ends = [STEPS] * BATCH if lengths is None else lengths
    inside = (np.arange(STEPS)[:, None] < np.array(ends))[..., None]
    want = np.cumsum(INPUTS * INPUTS[..., 0:1], axis=0)
    np.testing.assert_allclose(totals, want * inside, atol=1e-12)
    np.testing.assert_array_equal(parts["half"], INPUTS / 2 * inside)
    np.testing.assert_array_equal(last["count"], ends)
    np.testing.assert_allclose(last["total"], [want[n - 1, k] if n else np.zeros(3) for k, n in enumerate(ends)])


async def test_two_layers(run: Run) -> None:
    """The outputs of one loop are the inputs of the next; the gradient goes through both."""
    xs = af.constant(INPUTS)
    below, _ = af.nn.dynamic_rnn(gru, xs, H, LENGTHS["unsorted"])
    upper = af.nn.gru_weights(HIDDEN, 2, dtype="float64")
    above, _ = af.nn.dynamic_rnn(
        lambda x, s: af.nn.gru_cell(x, s, upper), below, np.zeros((BATCH, 2)), LENGTHS["unsorted"]
    )
    found = await run(af.gradients(af.sum(above), xs))

    def by_hand(values: Any) -> float:
        lengths = LENGTHS["unsorted"]
        below, _ = sequence_by_sequence(gru_step, GRU, values["x"], H, lengths)
        weights = [variable.initial for variable in upper]
        return float(sequence_by_sequence(gru_step, weights, below, np.zeros((BATCH, 2)), lengths)[0].sum())

    np.testing.assert_allclose(found, differences(by_hand, {"x": INPUTS})["x"], atol=1e-7)


@pytest.mark.parametrize("lengths", [None, LENGTHS["unsorted"]], ids=["full", "ragged"])
@pytest.mark.parametrize("window", [1, 4])
async def test_windows(run: Run, window: int, lengths: list[int] | None) -> None:
    """The number of steps that may overlap makes no difference."""
    found = await run(af.nn.dynamic_rnn(gru, INPUTS, H, lengths, parallel_iterations=window))
    expected = await run(af.nn.dynamic_rnn(gru, INPUTS, H, lengths))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


async def test_lengths_of_a_small_dtype(run: Run) -> None:
    """There may be more steps than it can count."""
    xs = np.ones((300, 2, 1))
    _, last = af.nn.dynamic_rnn(lambda x, s: (s, s + x), xs, np.zeros((2, 1)), np.array([200, 3], np.uint8))
    assert (await run(last)).tolist() == [[200.0], [3.0]]


@pytest.mark.parametrize("lengths", [[7, 0, 0, 0, 0], [0, 0, -1, 0, 0]])
async def test_lengths_out_of_range(run: Run, lengths: list[int]) -> None:
    """The message says what holds, and shows the lengths."""
    with pytest.raises(af.KernelError, match="every length is at least 0") as caught:
        await run(af.nn.dynamic_rnn(gru, INPUTS, H, lengths))
    assert str(np.array(lengths)) in str(caught.value)


@pytest.mark.parametrize("count", [0, 1, 2, 4])
async def test_fewer_or_more_lengths_than_sequences(run: Run, count: int) -> None:
    """Of a batch that only the run knows, with 3 sequences: none is lost."""
    xs, h = af.placeholder("float64", (None, None, N_IN)), af.placeholder("float64", (None, HIDDEN))
    lengths = af.placeholder("int64", (None,))
    outputs, last = af.nn.dynamic_rnn(gru, xs, h, lengths)
    feeds = {xs: INPUTS[:, :3], h: H[:3], lengths: np.full(count, 2)}
    for fetched in (outputs, last):
        with pytest.raises(af.KernelError, match="lengths are one for each sequence") as caught:
            await run(fetched, feeds)
        assert isinstance(caught.value.__cause__, AssertionError)


def test_arguments_that_do_not_fit() -> None:
    """Each message names the wrong argument and the mistake."""
    for inputs, state, lengths, error, message in [
        (INPUTS, H[:4], None, af.ShapeError, "inputs has batch 5, initial_state has 4"),
        ((INPUTS, INPUTS[:5]), H, None, af.ShapeError, r"inputs\[0\] has steps 6, inputs\[1\] has 5"),
        (INPUTS[0, 0], H, None, af.ShapeError, r"inputs is \[steps,batch,...\]"),
        (INPUTS, np.float64(0), None, af.ShapeError, r"initial_state is \[batch,...\]"),
        (INPUTS, (), None, af.GraphError, "needs inputs and a state"),
        (INPUTS, H, [1.0] * 5, af.DTypeError, "lengths are integers, not float64"),
        (INPUTS, H, [1] * 4, af.ShapeError, r"lengths are one for each sequence, of shape \[5\]"),
        (INPUTS, H, 3, af.ShapeError, "lengths are one for each sequence"),
    ]:
        with pytest.raises(error, match=message):
            af.nn.dynamic_rnn(gru, inputs, state, lengths)


def test_cells_that_do_not_fit() -> None:
    """The arguments and results of a cell are checked when the loop is built."""
    cells: list[tuple[Any, type[Exception], str]] = [
        (lambda x: x, af.GraphError, "cell of dynamic_rnn is called with"),
        (lambda x, s: s, af.GraphError, "returns its output and the next state"),
        (lambda x, s: (s, (s, s)), af.GraphError, "returns a state like the one it is given"),
        (lambda x, s: (s, af.astype(s, "float32")), af.DTypeError, "state of dynamic_rnn begins as float64"),
        (lambda x, s: (s, x), af.ShapeError, "a state keeps its shape"),
        (lambda x, s: (af.sum(s), s), af.ShapeError, "output of the cell of dynamic_rnn has a row"),
    ]
    for cell, error, message in cells:
        with pytest.raises(error, match=message):
            af.nn.dynamic_rnn(cell, INPUTS, H, LENGTHS["full"])


def test_options_of_the_loop() -> None:
    """The options equal the options of `while_loop`."""
    outputs, _ = af.nn.dynamic_rnn(gru, INPUTS, H, parallel_iterations=3, swap_memory=True, name="layer")
    loop = next(node for node in outputs.graph.nodes if node.op.name == "while")
    assert (loop.name, loop.attrs["parallel_iterations"], loop.attrs["swap_memory"]) == ("layer", 3, True)
    with pytest.raises(af.GraphError, match="parallel_iterations"):
        af.nn.dynamic_rnn(gru, INPUTS, H, parallel_iterations=0)


async def test_a_step_of_training_lowers_the_loss(graph: af.Graph) -> None:
    """Steps may be tiny: the gradient of one neither keeps the shapes of its rows nor sums for them."""
    xs, h = af.placeholder("float64", (6, 5, 4)), af.placeholder("float64", (5, 3))
    weights = af.nn.lstm_weights(4, 3, dtype="float64").read()
    outputs, _ = af.nn.dynamic_rnn(lambda x, s: af.nn.lstm_cell(x, s, weights), xs, (h, h), [2, 6, 1, 4, 5])
    slope = af.gradients(af.sum(outputs * outputs), h)
    trace = af.Trace()
    async with af.Session(graph, regions=False) as session:
        await session.run(slope, {xs: np.ones((6, 5, 4)), h: np.ones((5, 3))}, trace=trace)
    inside = Counter(firing.op for firing in trace.firings if firing.tag)
    assert inside["sum_to"] == inside["scatter_to"] == 0
    assert inside["shape"] <= 6 * 4
