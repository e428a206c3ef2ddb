"""Costs of an iteration of a loop: a counter, five scalar operations, and matrix products of two sizes.

Every system runs one program, `while i < limit: i, x = i + 1, step(x)`. The eager ones count with Python's `range`
where there is more to do than counting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Trial, compare, timed, timed_await
from benchmarks.peers import JAX, NO_PEERS, NUMPY, PYTHON, TENSORFLOW_1, TENSORFLOW_2, TENSORFLOW_EAGER, TORCH, Peers

if TYPE_CHECKING:
    from benchmarks.peers import TensorFlow

TIME = Figure("time an iteration", "µs")
Step: TypeAlias = Callable[..., Any]
"""The system's own `tanh`, x, and the case's constants to the next x. Operators do the rest, in every system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One loop.

    Attributes:
        name: in the table.
        iterations: of the loop.
        step: None to count only.
        start: the first x.
        constants: what `step` takes further.
        by_hand: name of the hand-written program, and the program: start, constants and iterations to the last value.
        tolerance: of answers; 0 for the same bits.
    """

    name: str
    iterations: int
    step: Step | None
    start: Any = None
    constants: tuple[Any, ...] = ()
    by_hand: tuple[str, Callable[[Case], Any]]
    tolerance: float = 0.0


def _five(_tanh: Any, x: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    # A contraction, and no two neighbours that an optimiser could merge.
    return ((x * a + b) * c - d) * e


def _product(tanh: Any, x: Any, w: Any) -> Any:
    return tanh(x @ w)


def _count_by_hand(case: Case) -> Any:
    stop, one, i = np.int32(case.iterations), np.int32(1), np.int32(0)
    while i < stop:
        i = i + one
    return i


def _five_by_hand(case: Case) -> Any:
    a, b, c, d, e = case.constants
    stop, one, i, x = np.int32(case.iterations), np.int32(1), np.int32(0), case.start
    while i < stop:
        x = ((x * a + b) * c - d) * e
        i = i + one
    return x


def _product_by_hand(case: Case) -> Any:
    (w,) = case.constants
    x, product = case.start.copy(), np.empty_like(case.start)
    matmul, tanh = np.matmul, np.tanh
    for _ in range(case.iterations):
        matmul(x, w, out=product)
        tanh(product, out=x)
    return x


def _product_case(size: int, iterations: int) -> Case:
    random = np.random.default_rng(0)
    # Every element goes to a fixed point of about 0.66, so rounding errors do not grow.
    w = 1.2 * np.eye(size) + 0.01 / size * random.standard_normal((size, size))
    return Case(
        name=f"{size}x{size} matmul and tanh",
        iterations=iterations,
        step=_product,
        start=random.uniform(0.5, 1.0, (size, size)).astype(np.float32),
        constants=(w.astype(np.float32),),
        by_hand=(NUMPY, _product_by_hand),
        tolerance=1e-4,
    )


def cases(iterations: int) -> list[Case]:
    """Return the loops, with `iterations` iterations of scalar ones, and fewer of larger ones."""
    constants = tuple(map(np.float32, (0.75, 0.5, 0.9, 0.25, 1.1)))
    return [
        Case(name="counter", iterations=iterations, step=None, by_hand=(PYTHON, _count_by_hand)),
        Case(
            name="five float32 scalar operations",
            iterations=iterations,
            step=_five,
            start=np.float32(3.0),
            constants=constants,
            by_hand=(PYTHON, _five_by_hand),
            # XLA contracts a product and a sum into one rounding.
            tolerance=1e-6,
        ),
        _product_case(64, max(iterations // 10, 1)),
        _product_case(512, max(iterations // 500, 1)),
    ]


NAME = "loop_overhead"


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 15,
    iterations: int = 10_000,
    devices: Sequence[str] | None = None,
    workload: str = NAME,
) -> list[Result]:
    """µs per iteration of every system; `devices` are asyncflow's, the others work on the CPU."""
    results = []
    for case in cases(iterations):
        results += await _measure(case, peers, repeats, devices, workload)
    return results


def build(case: Case) -> tuple[af.Graph, af.Tensor, af.Tensor]:
    """The loop of a case, how long it is to run, and its last value."""
    with af.Graph() as graph:
        limit = af.placeholder("int32", ())
        constants = [af.constant(value) for value in case.constants]
        loop_vars = [af.constant(0, "int32"), *([] if case.step is None else [af.constant(case.start)])]
        *_, last = af.while_loop(lambda i, *_: i < limit, _body(case, af.tanh, constants), loop_vars)
    return graph, limit, last


async def _measure(
    case: Case, peers: Peers, repeats: int, devices: Sequence[str] | None, workload: str
) -> list[Result]:
    graph, limit, last = build(case)
    scale = 1e6 / case.iterations
    async with af.Session(graph, devices=devices) as session:
        name, by_hand = case.by_hand
        trials: dict[str, Trial] = {
            ASYNCFLOW: timed_await(TIME, scale, lambda: session.run(last, {limit: case.iterations})),
            name: timed(TIME, scale, lambda: by_hand(case)),
        }
        for system, work in _peers_work(case, peers).items():
            trials[system] = timed(TIME, scale, work)
        return await compare(workload, case.name, trials, repeats=repeats, tolerance=case.tolerance)


def _body(case: Case, tanh: Any, constants: list[Any]) -> Callable[..., Any]:
    step = case.step
    if step is None:
        return lambda i: (i + 1,)
    return lambda i, x: (i + 1, step(tanh, x, *constants))


def _peers_work(case: Case, peers: Peers) -> dict[str, Callable[[], Any]]:
    work: dict[str, Callable[[], Any]] = {}
    if peers.tensorflow is not None:
        work[TENSORFLOW_1] = _tensorflow_1(case, peers.tensorflow)
        work[TENSORFLOW_2] = _tensorflow_2(case, peers.tensorflow.v2)
        work[TENSORFLOW_EAGER] = _eager(case, peers.tensorflow.v2.constant, peers.tensorflow.v2.tanh)
    if peers.torch is not None:
        work[TORCH] = _torch(case, peers.torch)
    if peers.jax is not None:
        work[JAX] = _jax(case, peers.jax)
    return work


def _tensorflow_1(case: Case, tensorflow: TensorFlow) -> Callable[[], Any]:
    v1 = tensorflow.v1
    with tensorflow.graph() as graph:
        limit = v1.placeholder(v1.int32, ())
        constants = [v1.constant(value) for value in case.constants]
        loop_vars = [v1.constant(0), *([] if case.step is None else [v1.constant(case.start)])]
        last = v1.while_loop(lambda i, *_: i < limit, _body(case, v1.tanh, constants), loop_vars)
        last = last[-1] if isinstance(last, list | tuple) else last
    session = tensorflow.session(graph, threads=1)
    return lambda: session.run(last, {limit: case.iterations})


def _tensorflow_2(case: Case, tf: Any) -> Callable[[], Any]:
    constants = [tf.constant(value) for value in case.constants]

    @tf.function  # type: ignore[untyped-decorator]
    def function(limit: Any, *start: Any) -> Any:
        return tf.while_loop(lambda i, *_: i < limit, _body(case, tf.tanh, constants), (tf.constant(0), *start))[-1]

    limit = tf.constant(case.iterations)
    start = [] if case.step is None else [tf.constant(case.start)]
    return lambda: function(limit, *start).numpy()


def _eager(case: Case, tensor: Callable[[Any], Any], tanh: Any) -> Callable[[], Any]:
    """The loop in Python, over tensors."""
    step = case.step
    if step is None:
        limit, zero = tensor(np.int32(case.iterations)), tensor(np.int32(0))

        def count() -> Any:
            i = zero
            while i < limit:
                i = i + 1
            return i.numpy()

        return count
    constants, start = [tensor(value) for value in case.constants], tensor(case.start)

    def loop() -> Any:
        x = start
        for _ in range(case.iterations):
            x = step(tanh, x, *constants)
        return x.numpy()

    return loop


def _torch(case: Case, torch: Any) -> Callable[[], Any]:
    work = _eager(case, lambda value: torch.from_numpy(np.asarray(value)), torch.tanh)

    def without_gradients() -> Any:
        with torch.inference_mode():
            return work()

    return without_gradients


def _jax(case: Case, jax: Any) -> Callable[[], Any]:
    constants = [jax.numpy.asarray(value) for value in case.constants]
    body = _body(case, jax.numpy.tanh, constants)

    @jax.jit  # type: ignore[untyped-decorator]
    def function(limit: Any, *start: Any) -> Any:
        state = (np.int32(0), *start)
        return jax.lax.while_loop(lambda state: state[0] < limit, lambda state: body(*state), state)[-1]

    start = [] if case.step is None else [jax.numpy.asarray(case.start)]
    return lambda: np.asarray(function(np.int32(case.iterations), *start))
