"""Simulations of shapes only compute every size that follows from shapes, and refuse shapes that depend on data."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.figures.host import Launches
from asyncflow.errors import FetchError, ShapeError
from asyncflow.testing import virtual_clock

WIDTH = 1200
"""So that an array of one row has no data, and whatever is computed from it neither."""

Step: TypeAlias = "Callable[[af.Tensor], af.Tensor]"


def outcome(
    program: Callable[[af.Tensor], Any], rows: int, *, device: str = "sim:0", shapes_only: bool
) -> tuple[Any, int]:
    """Return the result and time of a program for an array of `rows` rows, of which the graph knows nothing."""
    with virtual_clock("1 x v100", shapes_only=shapes_only) as clock, af.Graph():
        x = af.placeholder("float32", (None, None))
        fetches = program(x)

        async def main() -> Any:
            async with af.Session(devices=[device]) as session:
                return await session.run(fetches, {x: np.full((rows, WIDTH), 0.5, np.float32)})

        return clock.run(main()), clock.now_ns


def shapes_of(program: Step) -> Callable[[af.Tensor], list[af.Tensor]]:
    """The shapes of what a program gives, and of its first and second derivative."""

    def run(x: af.Tensor) -> list[af.Tensor]:
        y = program(x)
        (grad,) = af.gradients(af.sum(y * y), [x])
        (second,) = af.gradients(af.sum(grad * grad), [x], unconnected="zero")
        return [af.shape(value) for value in (y, grad, second)]

    return run


def extent(x: af.Tensor) -> af.Tensor:
    return af.shape(x)[0]


def loop(x: af.Tensor, body: Callable[[af.Tensor, af.Tensor], af.Tensor]) -> af.Tensor:
    """The sum over all rows of what a body makes of the number of the row."""
    start = af.zeros((af.shape(x)[1],), dtype="float32")
    return af.while_loop(lambda t, _: t < extent(x), lambda t, total: (t + 1, total + body(t, x)), (0, start))[1]


def rnn(x: af.Tensor) -> af.Tensor:
    start = af.zeros((1, af.shape(x)[1]), dtype="float32")
    return af.nn.dynamic_rnn(lambda each, state: (af.tanh(each + state),) * 2, x[:, None], start)[0][:, 0]


def in_array(x: af.Tensor) -> af.Tensor:
    rows = af.TensorArray("float32", size=extent(x)).unstack(x)
    out = af.TensorArray("float32", size=extent(x))
    body = lambda t, found: (t + 1, found.write(t, af.sin(rows.read(t))))  # noqa: E731
    return af.while_loop(lambda t, _: t < extent(x), body, (0, out))[1].stack()


STEPS: dict[str, Step] = {
    "last": lambda x: x[-1:],
    "without first": lambda x: af.concat([x[1:], x[:1]]),
    "every other": lambda x: x[::2],
    "reversed": lambda x: x[::-1],
    "first half": lambda x: x[: extent(x) // 2 + 1],
    "second half": lambda x: x[extent(x) // 2 :],
    "take": lambda x: af.take(x, af.constant([0, -1, 0]), axis=0),
    "take last": lambda x: af.take(x, extent(x) - 1, axis=0)[None],
    "take all": lambda x: af.take(x, af.arange(extent(x)), axis=0),
    "pairs": lambda x: x[af.arange(extent(x)), af.zeros((extent(x),), dtype="int64")][:, None] + x,
    "window": lambda x: af.dynamic_slice(x, (extent(x) - 1, 0), (1, WIDTH)),
    "joined": lambda x: af.concat([x, x[-1:]]),
    "parts": lambda x: (
        af.concat(af.split(af.concat([x, x]), 2, axis=1), axis=0)[: extent(x)] @ af.ones((600, WIDTH), dtype="float32")
    ),
    "padded": lambda x: af.pad(x, ((1, 2), (0, 0))),
    "reshaped": lambda x: af.reshape(af.reshape(x, (-1,)), (extent(x), WIDTH)),
    "turned": lambda x: af.permute_dims(af.permute_dims(x, (1, 0))[:, -1:], (1, 0)),
    "tiled": lambda x: af.tile(x, (2, 1)),
    "repeated": lambda x: af.repeat(x, extent(x) % 2 + 1, axis=0),
    "counted": lambda x: af.repeat(x, af.arange(extent(x)) % 2 + 1, axis=0),
    "centred": lambda x: x - af.mean(x, axis=0),
    "spread": lambda x: af.broadcast_to(x[0], af.shape(x)),
    "sorted": lambda x: af.sort(x, axis=0),
    "changed": lambda x: af.index_add(x, slice(0, extent(x) // 2), af.ones((1, WIDTH), dtype="float32")),
    "numbered": lambda x: x * af.astype(af.arange(extent(x)), "float32")[:, None],
    "chosen": lambda x: af.cond(extent(x) > 3, lambda: x[-2:], lambda: x[:1]),
    "read in a loop": lambda x: loop(x, lambda t, x: x[t])[None],
    "taken in a loop": lambda x: loop(x, lambda t, x: af.take(x, t, axis=0))[None],
    "sliced in a loop": lambda x: loop(x, lambda t, x: af.mean(x[: t + 1], axis=0))[None],
    "recurrent": rnn,
    "the last state": lambda x: rnn(x)[-1:],
    "states but the first": lambda x: af.concat([rnn(x)[1:], x[:1]]),
    "in an array": in_array,
    "mapped": lambda x: af.map_fn(lambda row: row * row[-1], x),
    "mapped in a loop": lambda x: af.map_fn(lambda row: row * row[-1], x, lift=False),
    "vectorised": af.vmap(lambda row: af.concat([row[1:], row[:1]])),
}


@pytest.mark.parametrize("device", ["sim:0", "cpu:0"])
@pytest.mark.parametrize("name", STEPS)
def test_shapes_are_computed_without_data(name: str, device: str) -> None:
    program = shapes_of(STEPS[name])
    with_data, _ = outcome(program, 5, device=device, shapes_only=False)
    shapes, _ = outcome(program, 5, device=device, shapes_only=True)
    assert [shape.tolist() for shape in shapes] == [shape.tolist() for shape in with_data]


@pytest.mark.parametrize("seed", range(16))
def test_random_programs_have_the_same_shapes_and_times(seed: int) -> None:
    """Whatever the steps are, as nothing in them depends on data."""
    random = Random(seed)
    names = random.choices(list(STEPS), k=random.randint(2, 4))
    rows = random.randint(2, 4)

    def program(x: af.Tensor) -> af.Tensor:
        for name in names:
            x = STEPS[name](x)
        return x

    (with_data, real_ns), (shapes, ns) = (
        outcome(shapes_of(program), rows, shapes_only=shapes_only) for shapes_only in (False, True)
    )
    assert [shape.tolist() for shape in shapes] == [shape.tolist() for shape in with_data], names
    assert ns == real_ns, names


count: Step = lambda x: af.astype(af.sum(x), "int64") % 3 + 1  # noqa: E731


@af.op(outputs=af.spec("int64", ()))
def size_by_user(x: Any) -> Any:
    return np.int64(abs(x.sum()) > 0)


@af.op(outputs=af.spec("float32", (None, None)))
def without_first_by_user(x: Any) -> Any:
    return x[1:]


ON_DATA: dict[str, Step] = {
    "slice": lambda x: x[: count(x)],
    "reshape": lambda x: af.reshape(af.concat([x, x]), (count(x), -1)),
    "mask": lambda x: x[x[:, 0] > 0],
    "nonzero": lambda x: af.nonzero(x + 1)[0],
    "unique": lambda x: af.unique_values(x[:2, 0]),
    "arange": lambda x: af.arange(count(x)),
    "repeat": lambda x: af.repeat(x, count(x), axis=0),
    "zeros": lambda x: af.zeros((count(x), 3)),
    "array": lambda x: af.TensorArray("float32", size=count(x), element_shape=()).stack(),
    "loop": lambda x: af.while_loop(lambda i: i < count(x), lambda i: (i + 1,), (0,))[0],
    "user": lambda x: af.zeros((size_by_user(x + 1), 3)),
}


@pytest.mark.parametrize("device", ["sim:0", "cpu:0"])
@pytest.mark.parametrize("name", ON_DATA)
def test_shapes_that_depend_on_data_are_refused(name: str, device: str) -> None:
    with pytest.raises(af.KernelError, match="shapes-only simulation does not have") as caught:
        outcome(ON_DATA[name], 5, device=device, shapes_only=True)
    assert isinstance(caught.value.__cause__, ShapeError | FetchError)


@pytest.mark.parametrize("launches", ["regions", "nodes"])
@pytest.mark.parametrize("device", ["sim:0", "cpu:0"])
def test_a_loop_on_data_runs_as_often_as_assumed(device: str, launches: Launches) -> None:
    """In a loop and out of one; loops that can decide by counters do."""
    with virtual_clock("1 x v100", shapes_only=True, iterations=7, launches=launches) as clock, af.Graph():
        x = af.placeholder("float32", (None, WIDTH))

        def until(row: af.Tensor) -> af.Tensor:
            return af.while_loop(lambda i, y: af.sum(y) < 1e9, lambda i, y: (i + 1, y * 2), (0, row))[0]

        counted = af.while_loop(lambda t, _: t < 3, lambda t, total: (t + 1, total + until(x[0])), (0, 0))[1]

        async def main() -> Any:
            async with af.Session(devices=[device]) as session:
                return await session.run([until(x), counted], {x: np.ones((5, WIDTH), np.float32)})

        assert clock.run(main()) == [7, 21]


@pytest.mark.parametrize("device", ["sim:0", "cpu:0"])
def test_a_loop_on_data_without_an_assumption_names_the_way_out(device: str) -> None:
    with pytest.raises(af.KernelError, match="say how often such loops run: iterations=, or --iterations"):
        outcome(ON_DATA["loop"], 5, device=device, shapes_only=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"iterations": 3}, ValueError, "unless shapes_only=True"),
        ({"iterations": -1, "shapes_only": True}, ValueError, "0 or more; got -1"),
        ({"iterations": 1.5, "shapes_only": True}, TypeError, "an integer; got float 1.5"),
        ({"iterations": True, "shapes_only": True}, TypeError, "an integer; got bool True"),
    ],
)
def test_assumed_iterations_are_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        virtual_clock(**options)


VALUES_ON_DATA: dict[str, Step] = {
    "element": lambda x: x[count(x)],
    "linspace": lambda x: af.linspace(x[0, 0], 1.0, extent(x)),
    "full": lambda x: af.full(af.shape(x), x[0, 0]),
    "number": lambda x: af.zeros((3,)) + af.astype(count(x) * 2, "float32"),
    "drawn": lambda x: af.random.categorical(x + 1),
    "checked": lambda x: af.assert_that(x < 1)[:1],
    "index of an array": lambda x: in_array(x)[0] + af.TensorArray("float32", size=extent(x)).unstack(x).read(count(x)),
    "user": lambda x: without_first_by_user(x + 1),
    "fetched": count,
}


@pytest.mark.parametrize("device", ["sim:0", "cpu:0"])
@pytest.mark.parametrize("name", VALUES_ON_DATA)
def test_values_may_depend_on_data_where_no_shape_does(name: str, device: str) -> None:
    (with_data, real_ns), (value, ns) = (
        outcome(VALUES_ON_DATA[name], 5, device=device, shapes_only=shapes_only) for shapes_only in (False, True)
    )
    assert (value.shape, value.dtype, ns) == (with_data.shape, with_data.dtype, real_ns)
    assert np.all(np.isnan(value)) if value.dtype.kind == "f" else not np.any(value)
