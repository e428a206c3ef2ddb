"""One LSTM layer and its training step, as several workloads measure it: sizes, the cell, asyncflow and TensorFlow 1.

The loss is the mean of the squares of all outputs. A step gives it, and its gradients of the three weights and of the
state that the layer starts with. Both systems build their graphs with the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

import asyncflow as af
from benchmarks.harness import Figure, Sample, Trial

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from numpy.typing import NDArray

    from benchmarks.peers import TensorFlow

STEP_TIME: Final = Figure("time a training step", "ms")
TOLERANCE: Final = 1e-3
"""For gradients of the sum of all squares, which are sums over all steps of numbers around one."""


@dataclass(frozen=True, slots=True)
class Model:
    """Inputs, weights, and the state to start with, as arrays of any system.

    Shape:
        xs: ``(steps, batch, hidden)``. w_x, w_h: ``(hidden, 4 * hidden)``. bias: ``(4 * hidden,)``.
        h, c: ``(batch, hidden)``.
    """

    xs: Any
    w_x: Any
    w_h: Any
    bias: Any
    h: Any
    c: Any

    @property
    def weights(self) -> tuple[Any, Any, Any]:
        """The trained arrays."""
        return self.w_x, self.w_h, self.bias

    @property
    def parameters(self) -> tuple[Any, ...]:
        """Everything that has a gradient."""
        return *self.weights, self.h, self.c

    def map(self, convert: Callable[[Any], Any]) -> Model:
        """The same in another system."""
        return Model(convert(self.xs), *map(convert, self.parameters))


def random_model(steps: int, batch: int, hidden: int) -> Model:
    """The same numbers every time."""
    random = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> NDArray[np.float32]:
        return np.float32(scale) * random.standard_normal(shape, np.float32)

    return Model(
        xs=normal(steps, batch, hidden),
        w_x=normal(hidden, 4 * hidden, scale=hidden**-0.5),
        w_h=normal(hidden, 4 * hidden, scale=hidden**-0.5),
        bias=normal(4 * hidden),
        h=normal(batch, hidden, scale=0.1),
        c=normal(batch, hidden, scale=0.1),
    )


def cell(functions: Any, model: Any, x: Any, h: Any, c: Any) -> tuple[Any, Any]:
    """The next h and c; `functions` has `sigmoid` and `tanh`."""
    return _gated(functions, x @ model.w_x + h @ model.w_h + model.bias, c)


def joined_cell(functions: Any, w: Any, bias: Any, x: Any, h: Any, c: Any) -> tuple[Any, Any]:
    """The same as it is mostly written: `w` is ``(2 * hidden, 4 * hidden)``, and `functions` has `concat`, too."""
    return _gated(functions, functions.concat([x, h], axis=-1) @ w + bias, c)


def _gated(functions: Any, gates: Any, c: Any) -> tuple[Any, Any]:
    hidden = gates.shape[-1] // 4
    into, forget, candidate, out = (gates[:, k * hidden : (k + 1) * hidden] for k in range(4))
    c = functions.sigmoid(forget) * c + functions.sigmoid(into) * functions.tanh(candidate)
    return functions.sigmoid(out) * functions.tanh(c), c


# -- sums of the squares of all outputs ----------------------------------------------------------------------------

Program: TypeAlias = "Callable[..., Any]"
"""Builds that sum, from a system's functions, a model of its tensors and whatever else is fed."""


def looped(system: Any, model: Model, steps: Any) -> Any:
    """By a loop of a length known only in the run."""

    def body(t: Any, h: Any, c: Any, total: Any) -> Any:
        h, c = cell(system, model, model.xs[t], h, c)
        return t + 1, h, c, total + system.sum(system.square(h))

    return system.while_loop(lambda t, *_: t < steps, body, (np.int32(0), model.h, model.c, np.float32(0)))[-1]


def looped_joined(system: Any, model: Model, steps: Any) -> Any:
    """As `looped`, by cells that join input and state; the weights are joined once, in front of the loop."""
    w = system.concat([model.w_x, model.w_h], axis=0)

    def body(t: Any, h: Any, c: Any, total: Any) -> Any:
        h, c = joined_cell(system, w, model.bias, model.xs[t], h, c)
        return t + 1, h, c, total + system.sum(system.square(h))

    return system.while_loop(lambda t, *_: t < steps, body, (np.int32(0), model.h, model.c, np.float32(0)))[-1]


def unrolled(system: Any, model: Model) -> Any:
    """By cells one after the other."""
    h, c = model.h, model.c
    total = np.float32(0)
    for x in system.unstack(model.xs):
        h, c = cell(system, model, x, h, c)
        total = total + system.sum(system.square(h))
    return total


# -- steps ---------------------------------------------------------------------------------------------------------

Residence: TypeAlias = Literal["fetched", "fed", "resident"]
"""Copies in a step on a card: results come to the host, inputs come from it too, or neither."""

Step: TypeAlias = "tuple[Any, Sequence[Any]]"
"""The loss, and its gradients of `Model.parameters`, as arrays that NumPy understands."""


class AsyncflowStep:
    """A program and its gradients in a session, which opens with the first step and has to be closed.

    Args:
        model: its numbers.
        program: builds the graph.
        outputs: number of numbers in the mean.
        fed: further feeds, beside the model's inputs and state.
        length: of the inputs, if the program has to know it.
        options: of the session.
    """

    def __init__(
        self,
        model: Model,
        program: Program,
        outputs: int,
        fed: Sequence[Any] = (),
        *,
        length: int | None = None,
        **options: Any,
    ) -> None:
        with af.Graph() as graph:
            xs = af.placeholder("float32", (length, *model.xs.shape[1:]))
            h, c = (af.placeholder("float32", state.shape) for state in (model.h, model.c))
            others = [af.placeholder(value.dtype, (None,) * value.ndim) for value in fed]
            w_x, w_h, bias = (af.Variable(weight).read() for weight in model.weights)
            built = Model(xs, w_x, w_h, bias, h, c)
            loss = program(af, built, *others) * np.float32(1 / outputs)
            self._fetches = loss, af.gradients(loss, list(built.parameters))
        self._feeds = dict(zip([xs, h, c, *others], [model.xs, model.h, model.c, *fed], strict=True))
        self.session = af.Session(graph, **options)

    async def run(self) -> Step:
        """One step."""
        step: Step = await self.session.run(self._fetches, self._feeds)
        return step

    async def resident(self) -> Callable[[], Awaitable[Step]]:
        """Put the inputs on the device; return a step whose results stay there, which ends with the device's work."""
        there = await self.session.run([af.on_device(x) for x in self._feeds], self._feeds)
        feeds, fetches = dict(zip(self._feeds, there, strict=True)), af.on_device(self._fetches)

        async def run() -> Step:
            step: Step = await self.session.run(fetches, feeds)
            await self.session.devices[0].compute.record().wait()
            return step

        return run


def tensorflow_step(
    tensorflow: TensorFlow,
    model: Model,
    program: Program,
    outputs: int,
    fed: Sequence[Any] = (),
    *,
    length: int | None = None,
    threads: int = 1,
) -> Callable[[], Step]:
    """Make the same step in TensorFlow 1, with `threads` threads between ops."""
    v1 = tensorflow.v1
    with tensorflow.graph() as graph:
        xs = v1.placeholder(v1.float32, (length, *model.xs.shape[1:]))
        h, c = (v1.placeholder(v1.float32, state.shape) for state in (model.h, model.c))
        others = [v1.placeholder(value.dtype, (None,) * value.ndim) for value in fed]
        w_x, w_h, bias = (v1.Variable(weight, use_resource=True).read_value() for weight in model.weights)
        built = Model(xs, w_x, w_h, bias, h, c)
        loss = program(tensorflow_functions(tensorflow), built, *others) * np.float32(1 / outputs)
        fetches = loss, v1.gradients(loss, list(built.parameters))
        session = tensorflow.session(graph, threads=threads)
        session.run(v1.global_variables_initializer())
    feeds = dict(zip([xs, h, c, *others], [model.xs, model.h, model.c, *fed], strict=True))
    return lambda: session.run(fetches, feeds)


def tensorflow_functions(tensorflow: TensorFlow) -> Any:
    """Return the functions that programs call, under asyncflow's names."""
    v1 = tensorflow.v1
    return SimpleNamespace(
        device=v1.device,
        identity=v1.identity,
        sigmoid=v1.sigmoid,
        square=v1.square,
        sum=v1.reduce_sum,
        tanh=v1.tanh,
        unstack=v1.unstack,
        where=v1.where_v2,
        while_loop=v1.while_loop,
    )


# -- trials --------------------------------------------------------------------------------------------------------


def timed_step(outputs: int, work: Callable[[], Step], to_host: Callable[[Any], Any] = lambda array: array) -> Trial:
    """A trial of a function that does one step; the time of the step is its figure.

    `to_host` brings an array of a step to the host, which takes no part in the time.
    """

    async def trial() -> Sample:
        started = perf_counter()
        loss, found = work()
        figures = {STEP_TIME: (perf_counter() - started) * 1e3}
        return Sample(figures, comparable((to_host(loss), [to_host(grad) for grad in found]), outputs))

    return trial


def timed_step_await(
    outputs: int, work: Callable[[], Awaitable[Step]], to_host: Callable[[Any], Any] = lambda array: array
) -> Trial:
    """Make a trial like `timed_step`, of awaited work."""

    async def trial() -> Sample:
        started = perf_counter()
        loss, found = await work()
        figures = {STEP_TIME: (perf_counter() - started) * 1e3}
        return Sample(figures, comparable((to_host(loss), [to_host(grad) for grad in found]), outputs))

    return trial


def comparable(step: Step, outputs: int) -> NDArray[np.float32]:
    """Return all numbers of a step in one array.

    The gradients are of the sum over all outputs. Gradients of the mean are so small that any two of them would be
    within the harness's tolerance.
    """
    loss, found = step
    return np.concatenate([np.reshape(loss, 1), *(np.float32(outputs) * np.ravel(grad) for grad in found)])
