"""`@af.function`: traced once per kind of arguments, awaited like any coroutine, inlined into graphs."""

from __future__ import annotations

import asyncio
import enum
import gc
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import pytest

import asyncflow as af

scalar = af.spec("float32", ())


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Box:
    low: Any
    high: Any


def counted(fn: Callable[..., Any]) -> tuple[af.Function, list[int]]:
    """The function `fn`, and a list that grows with each tracing."""
    traces: list[int] = []

    def traced(*args: Any, **kwargs: Any) -> Any:
        traces.append(1)
        return fn(*args, **kwargs)

    traced.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]
    return af.function(traced), traces


# -- what describes the arguments ------------------------------------------------------------------------------------


async def test_the_first_call_describes_the_arguments() -> None:
    f, traces = counted(lambda a, b: af.sqrt(a * a + b * b))
    assert await f(3.0, 4.0) == 5.0
    assert traces == [1]
    (traced,) = f._traces.values()
    assert [x.spec for x in traced.inputs] == [af.spec("float64", ())] * 2


async def test_a_parameter_of_any_name() -> None:
    """Behaviour 91: placeholders are named after parameters, even parameters that are only underscores."""
    f, _ = counted(lambda _, __: _ - __)
    assert await f(3.0, 4.0) == -1.0


async def test_extents_are_unknown_so_they_do_not_retrace() -> None:
    f, traces = counted(lambda x: af.sum(x * 1))
    assert [await f(np.ones(n)) for n in (1, 5, 0)] == [1, 5, 0]
    assert traces == [1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(np.float32(1), np.float64(1), id="dtype"),
        pytest.param(np.ones(2), np.ones((2, 2)), id="rank"),
        pytest.param([1.0, 2.0], (1.0, 2.0), id="list and tuple"),
        pytest.param({"a": 1}, {"b": 1}, id="keys"),
        pytest.param(1, 1.0, id="int and float"),
        pytest.param(1, True, id="int and bool"),
    ],
)
async def test_another_kind_of_arguments_is_traced_anew(first: Any, second: Any) -> None:
    f, traces = counted(lambda x: x)
    for value, total in ((first, 1), (second, 2), (first, 2), (second, 2)):
        await f(value)
        assert len(traces) == total


async def test_annotations_describe_arguments() -> None:
    """A parameter annotated with a spec is traced as that, whatever comes; Python numbers take its dtype."""
    shapes = []

    @af.function
    def f(x: af.spec("float32", (None, 3)), scale: scalar = 2.0) -> Any:  # type: ignore[valid-type]
        shapes.append((x.spec, scale.spec))  # type: ignore[attr-defined]
        return x * scale

    for n in (1, 2):
        result = await f(np.ones((n, 3), np.float32))
        assert result.dtype == np.float32 and result.shape == (n, 3)
    assert await f(np.ones((1, 3), np.float32), 3) == pytest.approx(np.full((1, 3), 3))
    assert shapes == [(af.spec("float32", (None, 3)), scalar)]


@pytest.mark.parametrize(
    ("value", "message"),
    [(np.float64(1), "its dtype is float64"), (np.ones(2, np.float32), r"its shape is \[2\]")],
)
async def test_a_value_that_does_not_fit_its_annotation(value: Any, message: str) -> None:
    @af.function
    def f(x: scalar) -> Any:  # type: ignore[valid-type]
        return x

    with pytest.raises(af.FeedError, match=message):
        await f(value)


async def test_specs_trace_without_running() -> None:
    traced = af.function(lambda x: x @ x).trace(af.spec("float32", (4, 4)))
    assert traced.outputs.spec == af.spec("float32", (4, 4))


# -- tensors and static arguments ------------------------------------------------------------------------------------


class Mode(enum.Enum):
    ADD = 1
    TAKE = 2


class Level(enum.IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    "value",
    [3, 2.5, 1j, np.float32(2), np.bool_(True), np.ones((2, 3)), np.array(["a"]), 2**63, np.array([1, 2], ">i4")],
    ids=repr,
)
async def test_arrays_and_numbers_are_tensors(value: Any) -> None:
    seen: list[Any] = []

    @af.function
    def f(x: Any) -> Any:
        seen.append(x)
        return x

    for _ in range(2):
        np.testing.assert_array_equal(await f(value), value)
    (x,) = seen
    assert isinstance(x, af.Tensor) and x.name == "x:0"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(True, False, id="bool"),
        pytest.param("a", "b", id="str"),
        pytest.param(None, "a", id="None"),
        pytest.param(Mode.ADD, Mode.TAKE, id="enum"),
        pytest.param(Level.LOW, True, id="int enum"),
        pytest.param(np.dtype("int8"), np.dtype("int16"), id="dtype"),
        pytest.param(np.float32, np.float64, id="type"),
        pytest.param(af.sqrt, af.exp, id="callable"),
        pytest.param(af.float32, af.float64, id="dtype of asyncflow"),
        pytest.param(frozenset({1}), frozenset({2}), id="hashable"),
        pytest.param(af.Variable(1), af.Variable(1), id="variable"),
    ],
)
async def test_any_other_hashable_argument_is_static(first: Any, second: Any) -> None:
    """The argument arrives as it is, and each value has a graph of its own."""
    seen: list[Any] = []

    @af.function
    def f(x: Any, kind: Any) -> Any:
        seen.append(kind)
        return x + 1

    for kind in (first, second, first, second):
        assert await f(1, kind) == 2
    assert len(seen) == 2 and seen[0] is first and seen[1] is second


async def test_static_arguments_steer_the_tracing() -> None:
    @af.function
    def f(x: Any, training: bool = False, mode: Any = "add", options: Any = None) -> Any:
        if training:
            x = x * 10
        if options is not None and options["twice"]:
            x = x * 2
        return x + 1 if mode == "add" else x - 1

    assert await f(1.0) == 2.0
    assert await f(1.0, True) == 11.0
    assert await f(1.0, mode="take") == 0.0
    assert await f(1.0, options={"twice": True, "by": 3}) == 3.0


@pytest.mark.parametrize(
    ("annotation", "first", "second"),
    [
        (int, 1, 2),
        (int, 1, True),
        (float, 0.0, -0.0),
        (bool, True, False),
        (str, "a", "b"),
        (int | None, None, 3),
        ("int", 1, 2),
    ],
)
async def test_parameters_annotated_as_python_numbers_are_static(annotation: Any, first: Any, second: Any) -> None:
    seen: list[Any] = []

    def fn(x: Any, n: Any) -> Any:
        seen.append(n)
        return x

    fn.__annotations__["n"] = annotation
    f = af.function(fn)
    for value in (first, second, first):
        await f(1, value)
    assert seen == [first, second]


async def test_nan_is_one_static_value() -> None:
    seen: list[float] = []

    @af.function
    def f(x: float) -> None:
        seen.append(x)

    for value in (float("nan"), float("nan"), 0.5):
        await f(value)
    assert len(seen) == 2


async def test_a_parameter_with_a_spec_takes_one_array(session: af.Session) -> None:
    """A list is not taken apart; None is no array."""

    @af.function
    def f(x: af.spec("float32", (None,)), *more: scalar, **named: scalar) -> Any:  # type: ignore[valid-type]
        return af.sum(x) + sum(more) + sum(named.values())

    assert await f([1.0, 2.0]) == 3.0
    assert await f([1.0, 2.0], 3.0, 4, last=5.0) == 15.0
    with pytest.raises(af.FeedError, match=r"f: argument x: it is annotated float32\[\?\].*got None"):
        await f(None)
    with pytest.raises(af.FeedError, match=r"f: argument more\[1\]: it is annotated float32\[\]"):
        await f([1.0], 1.0, None)


async def test_placeholders_are_named_after_their_parameters() -> None:
    traced = af.function(lambda x, p, **named: x).trace(1, Point([2, 3], {"k": 4}), last=5)
    assert [x.name for x in traced.inputs] == ["x:0", "p_x_0:0", "p_x_1:0", "p_y_k:0", "named_last:0"]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({1, 2}, af.GraphError, r"argument x: it is no array, .* has to be hashable; got a set"),
        ([1, bytearray(b"a")], af.GraphError, r"argument x\[1\]: .* got a bytearray"),
        ({"k": np.datetime64("2020")}, af.DTypeError, r"argument x\['k'\]: dtype datetime64"),
        (2**70, af.DTypeError, r"argument x: cannot make a tensor of"),
    ],
)
async def test_what_can_be_no_argument(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        await af.function(lambda x: x)(value)


async def test_an_array_for_a_static_parameter() -> None:
    @af.function
    def f(n: int) -> Any:
        return n

    with pytest.raises(af.GraphError, match=r"f: argument n: it is annotated int, .* got an ndarray. .*af.spec"):
        await f(np.ones(2))


async def test_a_feed_error_names_the_parameter() -> None:
    @af.function
    def f(rate: scalar) -> Any:  # type: ignore[valid-type]
        return rate

    with pytest.raises(af.FeedError, match=r"cannot feed rate:0: expected float32\[\]"):
        await f(np.float64(1))


async def test_nests_that_contain_themselves() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(af.GraphError, match="argument x is nested too deep, or contains itself"):
        await af.function(lambda x: 1)(loop)
    with pytest.raises(af.GraphError, match=r"what .* returned is nested too deep, or contains itself"):
        await af.function(lambda: loop)()


# -- recursion -------------------------------------------------------------------------------------------------------


async def test_recursion_without_end() -> None:
    @af.function
    def factorial(n: Any) -> Any:
        return af.cond(n <= 1, lambda: n, lambda: n * factorial(n - 1))

    with pytest.raises(af.GraphError, match=r"factorial calls itself without end .* write the recursion as a while_"):
        await factorial(5)


async def test_recursion_that_ends_while_traced() -> None:
    @af.function
    def power(x: Any, n: int) -> Any:
        return x if n == 1 else x * power(x, n - 1)

    assert await power(2.0, 5) == 32.0


# -- nests, defaults, keywords ---------------------------------------------------------------------------------------


async def test_arguments_and_results_are_nests() -> None:
    @af.function
    def f(point: Point, box: Box, items: list[Any]) -> Any:
        return {"sum": point.x + point.y, "box": Box(box.high, box.low), "items": (items[0], [items[1]], None)}

    result = await f(Point(1, 2), Box(0.5, 1.5), [np.ones(2), True])
    assert result["sum"] == 3 and result["box"] == Box(1.5, 0.5)
    assert list(result["items"][0]) == [1, 1] and result["items"][1:] == ([True], None)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((1,), {}, 1 * 10 + 3),
        ((1, 20), {}, 1 * 20 + 3),
        ((1,), {"c": 5}, 1 * 10 + 5),
        ((), {"c": 5, "a": 2, "b": 3}, 2 * 3 + 5),
    ],
)
async def test_defaults_and_keywords(args: tuple[Any, ...], kwargs: dict[str, Any], expected: int) -> None:
    @af.function
    def f(a: Any, b: Any = 10, *, c: Any = 3) -> Any:
        return a * b + c

    assert await f(*args, **kwargs) == expected


async def test_positional_and_keyword_calls_share_a_trace() -> None:
    f, traces = counted(lambda a, b: a - b)
    assert [await f(3, 1), await f(3, b=1), await f(b=1, a=3)] == [2, 2, 2]
    assert traces == [1]


async def test_variable_arguments() -> None:
    @af.function
    def f(*xs: Any, **named: Any) -> Any:
        return xs[0] + xs[-1], named["last"]

    assert await f(1, 2, 3, last=4) == (4, 4)


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2), {}), ((1,), {"z": 1})])
async def test_arguments_the_signature_does_not_take(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    f = af.function(lambda a: a)
    with pytest.raises(TypeError, match="argument"):
        await f(*args, **kwargs)


async def test_constants_as_results() -> None:
    assert await af.function(lambda: (1, [2.5], "three"))() == (1, [2.5], "three")


# -- effects ---------------------------------------------------------------------------------------------------------


async def test_all_effects_run_in_order_though_nothing_needs_them() -> None:
    seen = []

    @af.op(outputs=(), stateful=True)
    def note(*, label: str) -> None:
        seen.append(label)

    @af.function
    def f(x: Any) -> Any:
        note(label="first")
        af.cond(x > 0, lambda: note(label="positive"), lambda: note(label="negative"))
        af.while_loop(lambda i: i < 2, lambda i: (note(label="step"), i + 1)[1], (0,))
        note(label="last")
        return x

    assert (await f(1), await f(-1)) == (1, -1)
    assert seen == ["first", "positive", "step", "step", "last", "first", "negative", "step", "step", "last"]


async def test_a_function_without_results_runs_its_effects(session: af.Session) -> None:
    v = af.Variable(1)

    @af.function
    def double() -> None:
        v.assign(v * 2)

    assert (await double(), await double()) == (None, None)
    with af.Graph():
        assert await session.run(v.read()) == 4


async def test_reads_see_the_writes_before_them(session: af.Session) -> None:
    v = af.Variable(1)

    @af.function
    def f(x: Any) -> Any:
        before = v.read()
        v.assign_add(x)
        return before, v.read()

    assert (await f(10), await f(100)) == ((1, 11), (11, 111))


async def test_unordered_effects_on_request() -> None:
    f = af.function(effects="unordered", seed=7)(lambda x: x + 1)
    assert await f(1) == 2
    assert f.trace(1).graph.effects == "unordered" and f.trace(1).graph.seed == 7


async def test_random_ops_follow_the_seed() -> None:
    f = af.function(seed=3)(lambda: af.random.normal((4,)))
    g = af.function(seed=3)(lambda: af.random.normal((4,)))
    async with af.Session():
        first = await f()
    async with af.Session():
        np.testing.assert_array_equal(first, await g())


# -- inlining --------------------------------------------------------------------------------------------------------


@af.function
def squared(x: Any) -> Any:
    return x * x


async def test_inside_a_graph_it_is_inlined(session: af.Session, graph: af.Graph) -> None:
    y = squared(af.constant(3.0))
    assert isinstance(y, af.Tensor) and y.graph is graph
    assert await session.run(y) == 9.0


async def test_inside_bodies_and_other_functions(session: af.Session, graph: af.Graph) -> None:
    @af.function
    def fourth(x: Any) -> Any:
        return squared(squared(x))

    (looped,) = af.while_loop(lambda x: x < 1000.0, fourth, (2.0,))
    branched = af.cond(looped > 0, lambda: fourth(looped), lambda: looped)
    assert await session.run((looped, branched)) == (2.0**16, 2.0**64)


# -- sessions --------------------------------------------------------------------------------------------------------


async def test_state_is_the_sessions_own() -> None:
    v = af.Variable(0)
    bump = af.function(lambda: v.assign_add(1))
    async with af.Session():
        assert [await bump(), await bump()] == [1, 2]
    async with af.Session():
        assert await bump() == 1
    assert [await bump(), await bump()] == [1, 2], "the session of the event loop"


async def test_it_runs_in_the_session_around_it(session: af.Session) -> None:
    before = session.statistics().completed
    assert await squared(2) == 4
    assert session.statistics().completed == before + 1


async def test_calls_overlap(session: af.Session) -> None:
    both = asyncio.Barrier(2)

    @af.op(outputs=af.spec("int64", ()))
    async def meet(x: Any) -> Any:
        await both.wait()
        return x

    f = af.function(lambda x: meet(x) + 1)
    assert list(await asyncio.gather(f(1), f(2))) == [2, 3]


async def test_errors_name_the_users_line() -> None:
    @af.op(outputs=af.spec("int64", ()))
    def fails(x: Any) -> Any:
        raise LookupError("broken")

    f = af.function(lambda x: fails(x) + 1)
    with pytest.raises(af.KernelError, match=r"broken[\s\S]*test_function.py") as caught:
        await f(1)
    assert isinstance(caught.value.__cause__, LookupError)


def ending_with_its_loop(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(main)


@pytest.mark.parametrize("run", [ending_with_its_loop, af.run])
def test_the_session_of_an_event_loop_ends_with_it(run: Callable[[Any], Any]) -> None:
    """No ResourceWarning, no thread left, and a new loop gets a new session."""
    threads = []

    @af.op(outputs=af.spec("int64", ()), cost=1e12)  # long enough for the stream thread
    def on_the_stream(x: Any) -> Any:
        threads.append(threading.current_thread())
        return x

    v = af.Variable(0)
    f = af.function(lambda x: on_the_stream(v.assign_add(x)))

    async def main() -> list[Any]:
        return [await f(1), await f(2)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [run(main()), run(main())] == [[1, 3], [1, 3]]
        gc.collect()
    assert threads[0] is not threading.current_thread()
    assert not any(thread.is_alive() for thread in threads if thread is not threading.current_thread())


# -- methods and refusals --------------------------------------------------------------------------------------------


class Model:
    def __init__(self, weight: float) -> None:
        self.weight = af.Variable(weight)

    @af.function
    def scale(self, x: Any) -> Any:
        """Times the weight."""
        return self.weight * x

    @af.function
    def train(self, x: Any) -> Any:
        return self.weight.assign_add(x)


async def test_methods(session: af.Session) -> None:
    """Each instance is traced with its own variables."""
    a, b = Model(2.0), Model(3.0)
    assert [await a.scale(10.0), await b.scale(10.0)] == [20.0, 30.0]
    assert [await a.train(1.0), await a.scale(10.0), await b.scale(10.0)] == [3.0, 30.0, 30.0]


async def test_methods_of_instances_that_cannot_be_hashed_or_are_nests(session: af.Session) -> None:
    @dataclass
    class Scale:
        by: float

        @af.function
        def __call__(self, x: Any) -> Any:
            return x * self.by

    assert [await Scale(2.0)(3.0), await Scale(4.0)(3.0)] == [6.0, 12.0]


async def test_a_method_is_traced_once_and_does_not_keep_its_instance(session: af.Session) -> None:
    traces = []

    class Counting:
        @af.function
        def method(self, x: Any) -> Any:
            traces.append(1)
            return x

    counting = Counting()
    assert [await counting.method(1), await counting.method(2)] == [1, 2]
    assert traces == [1]
    watch = weakref.ref(counting)
    del counting
    gc.collect()
    assert watch() is None


def test_a_method_needs_weak_references_to_its_instance() -> None:
    class Slotted:
        __slots__ = ()

        @af.function
        def method(self, x: Any) -> Any:
            return x

    with pytest.raises(af.GraphError, match="weak references to Slotted: add __weakref__ to its slots"):
        Slotted().method(1)


async def test_methods_inside_a_graph(session: af.Session, graph: af.Graph) -> None:
    assert await session.run(Model(2.0).scale(af.constant(4.0))) == 8.0


def test_it_looks_like_the_function_it_wraps() -> None:
    assert (Model.scale.__name__, Model.scale.__doc__) == ("scale", "Times the weight.")
    assert "squared" in repr(squared)


async def coroutine(x: Any) -> Any:
    return x


def generator(x: Any) -> Any:
    yield x


async def async_generator(x: Any) -> Any:
    yield x


@pytest.mark.parametrize("fn", [coroutine, generator, async_generator])
def test_coroutines_and_generators_are_refused(fn: Callable[..., Any]) -> None:
    with pytest.raises(af.GraphError, match=f"{fn.__name__} is a coroutine or a generator.*use @af.op"):
        af.function(fn)


async def test_a_faulty_program_is_reported_at_each_call() -> None:
    """Nothing of a trace that failed is kept."""
    f, traces = counted(lambda x: af.reshape(x, (2,)))
    for _ in range(2):
        with pytest.raises(af.ShapeError):
            await f(1)
    assert len(traces) == 2


async def test_an_array_may_be_optional() -> None:
    @af.function
    def scaled(x: af.Tensor, by: Annotated[af.Tensor, af.spec("float64", (None,))] | None = None) -> Any:
        return x if by is None else x * by

    assert await scaled(2.0) == 2.0
    np.testing.assert_array_equal(await scaled(2.0, [1.0, 3.0]), [2.0, 6.0])


def test_annotations_that_describe_nothing_or_two_things_are_refused() -> None:
    with pytest.raises(af.GraphError, match=r"describes nothing; Annotated\[af.Tensor, af.spec"):

        @af.function
        def forgotten(x: Annotated[af.Tensor, af.spec]) -> Any:
            return x

    with pytest.raises(af.GraphError, match=r"describes one array; got float32\[\] and float64\[\]"):

        @af.function
        def twice(x: Annotated[af.Tensor, af.spec("float32", ()), af.spec("float64", ())]) -> Any:
            return x


async def test_a_static_method_is_not_bound() -> None:
    class Model:
        @af.function
        @staticmethod
        def doubled(x: af.Tensor) -> Any:
            return x * 2

    assert await Model().doubled(2.0) == await Model.doubled(2.0) == 4.0
    with pytest.raises(af.GraphError, match=r"@classmethod stands above @af\.function"):
        af.function(classmethod(lambda cls, x: x))  # type: ignore[call-overload]


async def test_errors_of_a_first_call_in_a_task_name_the_function() -> None:
    """The stack of a task begins in the event loop."""

    @af.function
    def picky(x: Annotated[af.Tensor, af.spec("float64", (2,))]) -> Any:
        return x

    with pytest.raises(af.FeedError, match=r"built at .*test_function.py:\d+"):
        await asyncio.create_task(picky([1.0]))
