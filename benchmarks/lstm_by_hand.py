"""The training step of an LSTM layer by hand: the reference of all others, in NumPy or CuPy.

Work that does not depend on the state is one product for all steps: ``x @ w_x`` before the loop, the gradients of both
weights after it. All buffers are made once. Sequences may have different lengths: sorted by them, longest first, step t
has the rows of longer sequences, and all rows of all steps are packed one step after the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from benchmarks.lstm import Model, Step


def packed(xs: NDArray[Any], counts: Sequence[int]) -> NDArray[Any]:
    """The first ``counts[t]`` rows of each step t, one step after the other."""
    return np.concatenate([x[:count] for x, count in zip(xs, counts, strict=True)])


class ByHand:
    """A training step; what a call gives is valid until the next.

    Args:
        model: its numbers.
        counts: rows of each step, which never go up; None for all of them in every step.
        xp: NumPy or CuPy.
    """

    def __init__(self, model: Model, counts: Sequence[int] | None = None, xp: Any = np) -> None:
        steps, batch, hidden = model.xs.shape
        xs = model.xs.reshape(-1, hidden) if counts is None else packed(model.xs, counts)
        model, xs = model.map(xp.asarray), xp.asarray(xs)
        self._xp = xp
        counts = [batch] * steps if counts is None else counts
        ends = np.cumsum(counts).tolist()
        self._model = replace(model, xs=xs)
        self._spans = [(slice(end - count, end), count) for end, count in zip(ends, counts, strict=True)]

        def buffer(rows: int, columns: int) -> Any:
            return xp.empty((rows, columns), np.float32)

        # By step: the gates, and later their gradients; c, its tanh, and h after the step and before.
        self._gates = buffer(len(xs), 4 * hidden)
        self._c, self._tanh_c = buffer(len(xs), hidden), buffer(len(xs), hidden)
        self._keeps_all = counts[-1] == batch
        if self._keeps_all:
            states = buffer(batch + len(xs), hidden)
            states[:batch] = model.h
            self._outputs, self._before = states[batch:], states[:-batch]
        else:
            self._outputs, self._before = buffer(len(xs), hidden), buffer(len(xs), hidden)
        self._recurrent = buffer(batch, 4 * hidden)
        self._d_h, self._d_c, self._scratch, self._more_scratch = (buffer(batch, hidden) for _ in range(4))
        self._d_weights = xp.empty_like(model.w_x), xp.empty_like(model.w_h), xp.empty_like(model.bias)

    def __call__(self) -> Step:
        """One step."""
        self._forward()
        outputs = self._outputs.reshape(-1)
        self._backward(np.float32(2 / outputs.size))
        return self._xp.dot(outputs, outputs) / np.float32(outputs.size), [*self._d_weights, self._d_h, self._d_c]

    def _forward(self) -> None:
        model, xp = self._model, self._xp
        xp.matmul(model.xs, model.w_x, out=self._gates)
        self._gates += model.bias
        h, c = model.h, model.c
        for rows, count in self._spans:
            gates, before, recurrent = self._gates[rows], self._before[rows], self._recurrent[:count]
            if not self._keeps_all:
                before[...] = h[:count]
            xp.matmul(before, model.w_h, out=recurrent)
            gates += recurrent
            into, forget, candidate, out = xp.split(gates, 4, axis=-1)
            for gate in (into, forget, out):
                # sigmoid(x) = tanh(x / 2) / 2 + 1 / 2
                gate *= np.float32(0.5)
                xp.tanh(gate, out=gate)
                gate *= np.float32(0.5)
                gate += np.float32(0.5)
            xp.tanh(candidate, out=candidate)
            c = xp.multiply(forget, c[:count], out=self._c[rows])
            scratch = xp.multiply(into, candidate, out=self._scratch[:count])
            c += scratch
            tanh_c = xp.tanh(c, out=self._tanh_c[rows])
            h = xp.multiply(out, tanh_c, out=self._outputs[rows])

    def _backward(self, scale: np.float32) -> None:
        model, xp = self._model, self._xp
        # Rows whose sequences have ended get nothing from later steps.
        self._d_h.fill(0)
        self._d_c.fill(0)
        for step in reversed(range(len(self._spans))):
            rows, count = self._spans[step]
            d_h, scratch = self._d_h[:count], self._scratch[:count]
            d_h += xp.multiply(self._outputs[rows], scale, out=scratch)
            self._through_cell(step)
            xp.matmul(self._gates[rows], model.w_h.T, out=d_h)
        d_x, d_recurrent, d_bias = self._d_weights
        xp.matmul(model.xs.T, self._gates, out=d_x)
        xp.matmul(self._before.T, self._gates, out=d_recurrent)
        xp.sum(self._gates, axis=0, out=d_bias)

    def _through_cell(self, step: int) -> None:
        """From what reaches h and c to what reaches the gates, which takes their place, and the c before."""
        xp, (rows, count) = self._xp, self._spans[step]
        d_h, d_c, a, b = (each[:count] for each in (self._d_h, self._d_c, self._scratch, self._more_scratch))
        into, forget, candidate, out = xp.split(self._gates[rows], 4, axis=-1)
        tanh_c = self._tanh_c[rows]
        c_before = (self._c[self._spans[step - 1][0]] if step else self._model.c)[:count]

        _one_minus_square(xp, tanh_c, a)
        a *= out
        a *= d_h
        d_c += a

        _slope_of_sigmoid(xp, out, a)
        a *= tanh_c
        xp.multiply(a, d_h, out=out)

        _slope_of_sigmoid(xp, into, a)
        a *= candidate
        _one_minus_square(xp, candidate, b)
        b *= into
        xp.multiply(a, d_c, out=into)
        xp.multiply(b, d_c, out=candidate)

        _slope_of_sigmoid(xp, forget, a)
        a *= c_before
        a *= d_c
        d_c *= forget
        forget[...] = a


def _one_minus_square(xp: Any, y: Any, out: Any) -> None:
    """The slope of tanh where it is y."""
    xp.multiply(y, y, out=out)
    xp.subtract(np.float32(1), out, out=out)


def _slope_of_sigmoid(xp: Any, y: Any, out: Any) -> None:
    """The slope of the sigmoid where it is y."""
    xp.subtract(np.float32(1), y, out=out)
    out *= y
