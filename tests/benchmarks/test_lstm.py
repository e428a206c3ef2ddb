"""The LSTM's training step by hand, which all systems are compared with, and what compares them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks import lstm_training
from benchmarks.harness import ASYNCFLOW, DifferentAnswers, Figure, Result, compare
from benchmarks.lstm import TOLERANCE, AsyncflowStep, Model, comparable, looped, random_model, timed_step, unrolled
from benchmarks.lstm_by_hand import ByHand, packed
from benchmarks.ragged_training import active_rows, masked, random_lengths, sliced
from benchmarks.results import curves_of, quotient

TIME, RATIO = Figure("time", "s"), Figure("ratio", "x")


@pytest.mark.parametrize("name", ["w_x", "w_h", "bias", "h", "c"])
@pytest.mark.parametrize("counts", [None, [3, 3, 2, 1]])
def test_gradients_by_hand_are_slopes_of_the_loss(name: str, counts: list[int] | None) -> None:
    model = random_model(4, 3, 5)
    grad = dict(zip(("w_x", "w_h", "bias", "h", "c"), ByHand(model, counts)()[1], strict=True))[name]
    steepness = np.linalg.norm(grad)
    step = 1e-2 * grad / steepness
    ahead, behind = (
        ByHand(replace(model, **{name: getattr(model, name) + sign * step}), counts)()[0] for sign in (1, -1)
    )
    assert (ahead - behind) / 2e-2 == pytest.approx(steepness, rel=1e-2)


def test_sequences_of_different_lengths_do_not_touch_each_other() -> None:
    model, lengths = random_model(4, 3, 5), [4, 2, 1]
    loss, grads = ByHand(model, active_rows(np.array(lengths, np.int32)).tolist())()
    total = np.float32(0)
    sums = [np.zeros_like(grad) for grad in grads]
    for row, length in enumerate(lengths):
        alone = np.s_[row : row + 1]
        state = replace(model, xs=model.xs[:length, alone], h=model.h[alone], c=model.c[alone])
        part, found = ByHand(state)()
        total += part * length
        for where, sum_, grad in zip([...] * 3 + [alone] * 2, sums, found, strict=True):
            sum_[where] += grad * length
    assert loss == pytest.approx(total / sum(lengths), rel=1e-5)
    for grad, sum_ in zip(grads, sums, strict=True):
        np.testing.assert_allclose(grad, sum_ / sum(lengths), rtol=1e-4, atol=1e-6)


def test_a_step_by_hand_can_be_done_again() -> None:
    step = ByHand(random_model(3, 2, 4))
    first = comparable(step(), 24)
    np.testing.assert_array_equal(comparable(step(), 24), first)


def test_rows_of_ragged_sequences() -> None:
    lengths = random_lengths(6, 2, 5)
    assert (lengths[0], lengths[-1]) == (5, 2)
    assert list(lengths) == sorted(lengths, reverse=True)
    counts = active_rows(np.array([3, 1], np.int32))
    assert counts.tolist() == [2, 1, 1]
    xs = np.arange(6).reshape(3, 2, 1)
    assert packed(xs, counts.tolist()).ravel().tolist() == [0, 1, 2, 4]


async def _step(model: Model, *args: object, **options: object) -> np.ndarray:
    step = AsyncflowStep(model, *args, **options)  # type: ignore[arg-type]
    async with step.session:
        return comparable(await step.run(), model.xs.size)


async def test_programs_equal_the_calculation_by_hand() -> None:
    model = random_model(4, 3, 5)
    expected = comparable(ByHand(model)(), model.xs.size)
    dynamic = await _step(model, looped, model.xs.size, [np.array(4, np.int32)])
    static = await _step(model, unrolled, model.xs.size, length=4)
    for found in (dynamic, static):
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


async def test_programs_for_different_lengths_equal_the_calculation_by_hand() -> None:
    model, lengths = random_model(4, 3, 5), np.array([4, 2, 1], np.int32)
    counts, steps = active_rows(lengths), np.array(4, np.int32)
    expected = comparable(ByHand(model, counts.tolist())(), model.xs.size)
    outputs = int(counts.sum()) * 5
    for program, fed in ((sliced, counts), (masked, lengths)):
        found = await _step(model, program, outputs, [steps, fed])
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("wrong", range(5))
async def test_a_wrong_gradient_is_found(wrong: int) -> None:
    model = random_model(4, 3, 5)
    loss, grads = ByHand(model)()
    others = [grad * np.float32(1.01 if place == wrong else 1) for place, grad in enumerate(grads)]
    outputs = model.xs.size
    trials = {
        ASYNCFLOW: timed_step(outputs, lambda: (loss, grads)),
        "peer": timed_step(outputs, lambda: (loss, others)),
    }
    with pytest.raises(DifferentAnswers, match="peer computed"):
        await compare("work", "case", trials, repeats=1, warm_ups=0, tolerance=TOLERANCE)


async def test_all_of_a_case_get_the_threads_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLAS has one number of threads a process, and of sessions that are open the one with the fewest decides."""
    options: list[tuple[int, int]] = []
    cases: list[str] = []

    class Noted(AsyncflowStep):
        def __init__(self, *args: Any, **given: Any) -> None:
            options.append((given["threads"], given["compute_streams"]))
            super().__init__(*args, **given)

    async def not_run(name: str, case: str, *_: object, **__: object) -> list[Result]:
        cases.append(case.rpartition(", ")[2])
        return []

    monkeypatch.setattr(lstm_training, "AsyncflowStep", Noted)
    monkeypatch.setattr(lstm_training, "compare", not_run)
    await lstm_training.measure(repeats=1, steps=2, batch=2, hidden=4)
    assert cases == ["1 thread", "2 threads", "2 threads between products"]
    assert options == [(1, 1), (1, 1), (2, 1), (2, 1), (1, 2), (1, 2)]


def _result(system: str, case: str, *values: float) -> Result:
    return Result(workload="work", case=case, figure=TIME, system=system, values=values, ratio=None)


def test_quotients_are_taken_repeat_by_repeat() -> None:
    found = quotient(RATIO, _result("a", "case", 2.0, 9.0), _result("b", "case", 1.0, 3.0))
    assert (found.figure, found.system, found.values) == (RATIO, "a", (2.0, 3.0))


def test_curves_of_results() -> None:
    results = [_result("a", "x 1", 2.0), _result("a", "x 2", 3.0), _result("b", "x 2", 4.0), _result("a", "y 1", 9.0)]
    assert curves_of(results, TIME, {1: "x 1", 2: "x 2", 4: "x 4"}) == {"a": {1: 2.0, 2: 3.0}, "b": {2: 4.0}}
    assert curves_of(results, RATIO, {1: "x 1"}) == {}
