"""`@af.op`: declaring, building, and what a function may return."""

from __future__ import annotations

import asyncio
import inspect
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.graph import node_effects
from asyncflow.graph.op import Access, find_op
from asyncflow.ops.user.custom import CustomOp
from tests.faults.kernels import until
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Runner = Callable[..., Awaitable[Any]]

SCALAR = af.spec("float32", ())
VECTOR = af.spec("float32", (None,))
ONES = np.ones(3, np.float32)


def call(tensor: af.Tensor | af.Node, *inputs: Any) -> Any:
    """Call the node's kernel for a firing."""
    node = tensor.node if isinstance(tensor, af.Tensor) else tensor
    assert node.op.kernel is not None
    return node.op.kernel(np, **node.attrs)(*inputs)


def returning(value: Any, outputs: Any = VECTOR) -> Any:
    """Return the result of a node whose function returns `value`."""
    with af.Graph() as graph:
        af.op(outputs=outputs)(lambda: value)()
    return call(graph.nodes[-1])


# -- declaring -------------------------------------------------------------------------------------------------------


@af.op(outputs=VECTOR)
def double(x: Any, *, by: int = 2) -> Any:
    """Twice x."""
    return x * np.float32(by)


def annotated(x: Any) -> af.spec("float32", (None,)):  # type: ignore[valid-type]
    return x


def silent(x: Any) -> None:
    return None


def test_keeps_the_wrapped_function() -> None:
    assert isinstance(double, CustomOp)
    assert double.__wrapped__ is double.function  # type: ignore[attr-defined]
    assert (double.__name__, double.__doc__, double.name) == ("double", "Twice x.", "double")  # type: ignore[attr-defined]
    assert str(inspect.signature(double)) == str(inspect.signature(double.function))
    assert repr(double) == "<op double>"
    assert double.op.conduct.is_user and not double.op.conduct.is_async
    with pytest.raises(af.GraphError, match="no op is named 'double'"):
        find_op("double")


def test_options_reach_the_op_and_its_nodes(graph: af.Graph) -> None:
    def gradient(*args: Any) -> None:
        return None

    made = af.op(outputs=SCALAR, name="mine", gradient=gradient, device="cpu:1", cost=5)(lambda: np.float32(1))
    assert made.gradient is gradient
    node = made().node
    assert (node.name, node.device) == ("mine", "cpu:1")
    assert made.op.flops is not None and made.op.flops([], [()], **node.attrs) == 5.0
    by_shape = af.op(outputs=SCALAR, cost=lambda inputs, outputs: 2 * inputs[0][0])(lambda x: x)
    assert by_shape.op.flops is not None and by_shape.op.flops([(4,)], [()], outputs=SCALAR, arguments={}) == 8.0


def test_a_device_scope_holds_where_the_op_names_none(graph: af.Graph) -> None:
    with af.device("cpu:1"):
        assert double(ONES).node.device == "cpu:1"


def test_the_return_annotation_may_declare(graph: af.Graph) -> None:
    assert af.op(annotated)(ONES).spec == VECTOR
    node = af.op(silent)(ONES)
    assert isinstance(node, af.Node)
    assert call(node, ONES) == ()


async def _stream(x: Any) -> Any:
    yield x


def _generate(x: Any) -> Any:
    yield x


@pytest.mark.parametrize(
    ("decorate", "message"),
    [
        (lambda: af.op(lambda x: x), "op does not declare its outputs; write @af.op"),
        (lambda: af.op(outputs="float32")(double.function), "described by af.spec.*got 'float32'"),
        (lambda: af.op(outputs=np.float32)(double.function), "described by af.spec"),
        (lambda: af.op(outputs=VECTOR)(_generate), "_generate is a generator function; an op gives all"),
        (lambda: af.op(outputs=VECTOR)(_stream), "_stream is a generator function"),
    ],
)
def test_refuses_bad_declarations(decorate: Callable[[], object], message: str) -> None:
    with pytest.raises(af.GraphError, match=message):
        decorate()


# -- calling ---------------------------------------------------------------------------------------------------------


async def test_outside_a_graph_it_is_the_function() -> None:
    assert double(ONES, by=3).tolist() == [3, 3, 3]
    assert double(np.float32(2)) == 4

    @af.op(outputs=SCALAR)
    async def wait(x: Any) -> Any:
        return x

    assert await wait(5) == 5


def test_positions_are_inputs_and_names_are_static(graph: af.Graph) -> None:
    x = af.placeholder("float32", (3,))
    y = double(x, by=5)
    assert y.node.inputs[0] is x
    assert call(y, ONES).tolist() == [5, 5, 5]
    constant = double([1, 2])
    assert constant.node.inputs[0].shape == (2,)
    assert double(af.Variable(ONES)).node.inputs[0].node.op.name == "variable_read"


def test_joins_the_graph_of_its_tensors() -> None:
    with af.Graph() as graph:
        x = af.placeholder("float32", (3,))
    assert double(x).graph is graph


@pytest.mark.parametrize("name", ["name", "op", "xp", "outputs", "arguments", "inputs", "attrs"])
def test_any_name_may_be_an_argument(graph: af.Graph, name: str) -> None:
    taker = af.op(outputs=SCALAR)(lambda x, **given: np.float32(given[name]))
    assert call(taker(1.0, **{name: 3}), np.float64(1)) == 3


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda x: double(x=x), "x=<Tensor .*> is passed by name; names are for static"),
        (lambda x: double(x, by=[x]), "by=.* is passed by name"),
        (lambda x: double(x, x), r"double\(.*\).* is called with 2 inputs and arguments \[\]: too many positional"),
        (lambda x: double(x, speed=1), r"arguments \['speed'\]: got an unexpected keyword argument 'speed'"),
    ],
)
def test_refuses_bad_calls(graph: af.Graph, use: Callable[[af.Tensor], object], message: str) -> None:
    with pytest.raises(af.GraphError, match=rf"{message}(.|\n)*written at .*test_custom\.py"):
        use(af.placeholder("float32", (3,)))


def test_outputs_may_depend_on_inputs_and_arguments(graph: af.Graph) -> None:
    same = af.op(outputs=lambda x: x)(lambda x, *, times=1: x)
    assert str(same(af.placeholder("int8", (None, 2)), times=3).spec) == "int8[?,2]"
    rows = af.op(outputs=lambda x, n=1: af.spec(x.dtype, (n,)))(lambda x, *, n=1: np.repeat(x, n))
    assert rows(1.0, n=4).shape == (4,)

    def refuse(x: af.Spec) -> af.Spec:
        raise af.ShapeError(f"takes vectors, not {x}")

    with pytest.raises(
        af.ShapeError, match=r"picky: takes vectors, not float64\[\]\n  inputs   constant(.|\n)*written"
    ):
        af.op(outputs=refuse, name="picky")(lambda x: x)(1.0)
    with pytest.raises(af.GraphError, match=r"described by af.spec.*got \(1, 2\)|got 1"):
        af.op(outputs=lambda x: (1, 2))(lambda x: x)(1.0)


@dataclass
class Pair:
    low: Any
    high: Any


@pytest.mark.parametrize(
    ("outputs", "result"),
    [
        ((SCALAR, VECTOR), (np.float32(1), ONES)),
        ((SCALAR, VECTOR), [np.float32(1), ONES]),
        ({"a": SCALAR, "b": (VECTOR,)}, {"b": (ONES,), "a": np.float32(1)}),
        (Pair(SCALAR, VECTOR), Pair(np.float32(1), ONES)),
        ([SCALAR, VECTOR], (np.float32(1), ONES)),
    ],
)
def test_outputs_are_any_nest(graph: af.Graph, outputs: Any, result: Any) -> None:
    built = af.op(outputs=outputs)(lambda: result)()
    assert type(built) is type(outputs)
    node = graph.nodes[-1]
    assert [str(x.spec) for x in node.outputs] == ["float32[]", "float32[?]"]
    first, second = call(node)
    assert first == 1
    assert second.tolist() == [1.0] * 3


def test_state_orders_calls_among_themselves(graph: af.Graph) -> None:
    made = af.op(outputs=SCALAR, stateful=True)(lambda: np.float32(1))
    other = af.op(outputs=SCALAR, stateful=True)(lambda: np.float32(1))
    effects = node_effects(made().node)
    assert effects == node_effects(made().node)
    assert [access for _, access in effects] == [Access.WRITE]
    assert effects != node_effects(other().node)
    assert node_effects(double(ONES).node) == ()


# -- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "value", "expected"),
    [
        (af.spec("int8", ()), 100, np.int8(100)),
        (af.spec("int8", ()), True, np.int8(1)),
        (af.spec("float32", ()), 2, np.float32(2)),
        (af.spec("float32", ()), 0.1, np.float32(0.1)),
        (af.spec("complex64"), 1j, np.complex64(1j)),
        (af.spec("bool", ()), True, np.bool_(True)),
        (af.spec("bfloat16", ()), 1.5, 1.5),
        (af.spec("string", ()), "text", np.array("text", np.dtypes.StringDType())),
        (af.spec("string", (2,)), np.array(["a", "b"]), np.array(["a", "b"], np.dtypes.StringDType())),
        (af.spec("float32", (2, 2)), np.eye(2, dtype=np.float32).view(np.matrix), np.eye(2, dtype=np.float32)),
    ],
)
def test_takes_what_fits(spec: af.Spec, value: Any, expected: Any) -> None:
    result = returning(value, spec)
    assert result.dtype == spec.dtype
    assert type(result) is not np.matrix
    assert np.array_equal(np.asarray(result), np.asarray(expected))


@pytest.mark.parametrize(
    ("outputs", "value", "kind", "message"),
    [
        (SCALAR, None, TypeError, r"returned None \(NoneType\) as its result, declared as float32\[\]; return a NumPy"),
        (VECTOR, [1.0, 2.0], TypeError, "return np.asarray"),
        (SCALAR, object, TypeError, "return a NumPy array or a number"),
        (SCALAR, 1j, TypeError, r"1j \(complex\) as its result, which does not fit the declared dtype float32"),
        (af.spec("int8", ()), 300, TypeError, "does not fit the declared dtype int8"),
        (af.spec("int8", ()), 1.0, TypeError, "does not fit the declared dtype int8"),
        (af.spec("bool", ()), 1, TypeError, "does not fit the declared dtype bool"),
        (SCALAR, "1", TypeError, "does not fit the declared dtype float32"),
        (VECTOR, np.ones(3), TypeError, r"dtype float64 as its result, declared as float32\[\?\]; convert it with"),
        (VECTOR, ONES.astype(">f4"), TypeError, "dtype >f4"),
        (VECTOR, np.float32(1), ValueError, r"returned shape \[\] as its result, declared as float32\[\?\]"),
        (VECTOR, 1.0, ValueError, r"returned shape \[\]"),
        (af.spec("float32", (2,)), ONES, ValueError, r"returned shape \[3\] as its result, declared as float32\[2\]"),
        ((SCALAR, SCALAR), (1.0, 2.0, 3.0), TypeError, "returned 3 values, .*, and 2 are declared"),
        ((SCALAR, SCALAR), 1.0, TypeError, "returned 1 value, 1.0 .*, and 2 are declared"),
        ((SCALAR, SCALAR), (1.0, ONES), ValueError, "as output 1, declared as"),
        (
            {"a": SCALAR},
            {"b": 1.0},
            TypeError,
            "1 are declared: expected a dict with keys 'a', got",
        ),
        ((), 5, TypeError, "returned 1 value, 5 .*, and 0 are declared"),
    ],
)
def test_refuses_what_does_not_fit(outputs: Any, value: Any, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        returning(value, outputs)


def test_a_forgotten_await_is_told() -> None:
    async def fetch() -> Any:
        return 1.0

    with pytest.raises(TypeError, match=r"\(coroutine\) as its result.*declare the function with `async def`"):
        returning(fetch(), SCALAR)


def test_a_tensor_from_a_function_is_told(graph: af.Graph) -> None:
    with pytest.raises(TypeError, match="computes with NumPy, not with graph functions"):
        returning(af.constant(1.0), SCALAR)


def test_user_code_cannot_write_to_its_inputs(graph: af.Graph) -> None:
    def spoil(x: Any) -> Any:
        x[0] = 9
        return x

    value = np.ones(3, np.float32)
    with pytest.raises(ValueError, match="read-only"):
        call(af.op(outputs=VECTOR)(spoil)(ONES), value)
    assert value.flags.writeable and value[0] == 1


# -- runs ------------------------------------------------------------------------------------------------------------


async def test_runs_functions_and_coroutines(graph: af.Graph, run: Runner) -> None:
    arrived = asyncio.Event()

    @af.op(outputs=(SCALAR, VECTOR))
    async def meet(x: Any, *, n: int) -> Any:
        await arrived.wait()
        return x.sum(), np.repeat(x, n)

    @af.op(outputs=SCALAR)
    async def arrive() -> Any:
        arrived.set()
        return 1.0

    assert meet.op.conduct.is_async
    total, rows = meet(double(ONES), n=2)
    one = arrive()
    result = await run({"total": total + one, "rows": rows})
    assert result["total"] == 7 and result["rows"].tolist() == [2.0] * 6


async def test_runs_a_partial_of_a_coroutine_function(graph: af.Graph, run: Runner) -> None:
    async def add(y: float, x: Any) -> Any:
        return x + np.float32(y)

    assert await run(af.op(outputs=VECTOR)(partial(add, 2.0))(ONES)) == pytest.approx([3, 3, 3])


async def test_stateful_calls_run_as_written(graph: af.Graph, run: Runner) -> None:
    seen: list[int] = []

    @af.op(outputs=(), stateful=True)
    def log(x: Any) -> None:
        seen.append(int(x))

    def body(i: af.Tensor) -> tuple[af.Tensor]:
        log(i)
        log(i * 10)
        return (i + 1,)

    await run(af.while_loop(lambda i: i < 3, body, (0,)))
    assert seen == [0, 0, 1, 10, 2, 20]


async def test_stateful_plain_functions_of_several_runs_take_turns(graph: af.Graph) -> None:
    """The second call waits for the first, though a thread is free for a function that is called later."""
    calls: list[float] = []
    first_may_end = threading.Event()

    @af.op(outputs=SCALAR, stateful=True, cost=1e12)
    def count(x: Any) -> Any:
        calls.append(float(x))
        assert x or first_may_end.wait(PATIENCE_S)
        return x

    @af.op(outputs=SCALAR, cost=1e12)
    def later(x: Any) -> Any:
        return x

    x = af.placeholder("float32", ())
    y, z = count(x), later(x)
    async with af.Session(graph) as session:
        first = asyncio.ensure_future(session.run(y, {x: 0.0}))
        await until(lambda: calls)
        second = asyncio.ensure_future(session.run(y, {x: 1.0}))
        await asyncio.sleep(0)
        assert await session.run(z, {x: 2.0}) == 2
        begun = list(calls)
        first_may_end.set()
        assert list(await asyncio.gather(first, second)) == [0, 1]
    assert (begun, calls) == ([0.0], [0.0, 1.0])


async def test_stateful_coroutine_functions_of_several_runs_overlap(graph: af.Graph) -> None:
    """As one may wait for another: here the first returns when the second has come."""
    came: list[asyncio.Event] = [asyncio.Event(), asyncio.Event()]

    @af.op(outputs=SCALAR, stateful=True)
    async def meet(x: Any) -> Any:
        came[int(x)].set()
        await came[1 - int(x)].wait()
        return x

    x = af.placeholder("float32", ())
    y = meet(x)
    async with af.Session(graph) as session:
        assert await asyncio.gather(*(session.run(y, {x: np.float32(k)}) for k in range(2))) == [0, 1]


@pytest.mark.parametrize(
    ("outputs", "value", "cause", "message"),
    [
        (VECTOR, np.ones(3), TypeError, "float64"),
        (VECTOR, np.float32(1), ValueError, "shape"),
        ((SCALAR, SCALAR), (1.0,), TypeError, "returned 1 value, .*, and 2 are declared"),
    ],
)
async def test_faults_07_08_name_the_node(
    graph: af.Graph, run: Runner, outputs: Any, value: Any, cause: type, message: str
) -> None:
    built = af.op(outputs=outputs, name="faulty")(lambda: value)()
    with pytest.raises(af.KernelError, match=message) as caught:
        await run(built)
    assert caught.value.node == "faulty"
    assert isinstance(caught.value.__cause__, cause)


async def test_an_op_without_outputs_has_effects_and_runs() -> None:
    seen: list[float] = []

    @af.op(outputs=())
    def note(x: Any) -> None:
        seen.append(float(x))

    @af.function
    def noted(x: Any) -> Any:
        note(x)
        return x + 1.0

    assert await noted(2.0) == 3.0
    assert seen == [2.0]


def test_an_op_with_neither_outputs_nor_effects_is_refused(graph: af.Graph) -> None:
    with pytest.raises(af.GraphError, match="note has no outputs to ask for"):
        af.op(outputs=(), name="note", stateful=False)(print)
    chosen = af.op(outputs=lambda x: (), name="chosen")(print)
    with pytest.raises(af.GraphError, match="chosen has no outputs to ask for"):
        chosen(af.constant(1.0))


async def test_what_a_function_keeps_and_changes_changes_no_results(graph: af.Graph, run: Runner) -> None:
    total, table = np.zeros(3), np.arange(3.0)

    @af.op(outputs=af.spec("float64", (3,)), stateful=True)
    def add_up(x: Any) -> Any:
        total[:] += x
        return total

    @af.op(outputs={"whole": af.spec("float64", (3,)), "part": af.spec("float64", (2,))})
    def look_up(x: Any) -> Any:
        return {"whole": table, "part": table[1:]}

    x = af.placeholder("float64", ())
    first, second, found = add_up(x), add_up(x), look_up(x)
    whole, part = found["whole"], found["part"]
    before = await run([first, second, whole, part], {x: 1.0})
    assert [value.tolist() for value in before] == [[1.0] * 3, [2.0] * 3, [0.0, 1.0, 2.0], [1.0, 2.0]]
    for value in before:
        value *= 10
    after = await run([first, second, whole, part], {x: 1.0})
    assert [value.tolist() for value in after] == [[3.0] * 3, [4.0] * 3, [0.0, 1.0, 2.0], [1.0, 2.0]]


def test_what_a_function_makes_is_not_copied(graph: af.Graph) -> None:
    made: list[int] = []

    @af.op(outputs=(af.spec("float64", (3,)), af.spec("float64", (2, 3))))
    def fresh(x: Any) -> Any:
        results = x + np.ones(3), np.ones(6).reshape(2, 3)
        made.extend(value.ctypes.data for value in results)
        return results

    kernel = fresh.op.kernel
    assert kernel is not None
    results = kernel(np, outputs=fresh.outputs, arguments={})(np.float64(1.0))
    assert [value.ctypes.data for value in results] == made
