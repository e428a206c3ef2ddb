"""Variables: building their ops, their state alone, and runs that share it."""

from __future__ import annotations

import asyncio
import operator
import threading
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.graph import node_effects
from asyncflow.graph.op import Access
from asyncflow.state.containers import StateStore
from asyncflow.state.variables.immutable import immutable
from asyncflow.state.variables.variable_state import MOST_RACES, VariableState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Runner = Callable[..., Awaitable[Any]]


def kernel_of(tensor: af.Tensor, store: StateStore) -> Callable[..., Any]:
    """The tensor's kernel, bound to the state in `store`."""
    attrs = dict(tensor.node.attrs)
    attrs["variable"] = store.lookup(attrs["variable"])
    assert tensor.node.op.kernel is not None
    return tensor.node.op.kernel(np, **attrs)


# -- declaring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "options", "spec"),
    [
        (0, {}, "int64[]"),
        (1.5, {"dtype": "float32"}, "float32[]"),
        ([[1, 2], [3, 4]], {"dtype": "float16"}, "float16[2,2]"),
        (np.zeros((3, 0), np.int8), {}, "int8[3,0]"),
        ("text", {}, "string[]"),
        ([1.0], {"shape": (None,)}, "float64[?]"),
        (af.spec("bool", (None, 2)), {}, "bool[?,2]"),
        (af.spec("int32"), {}, "int32[...]"),
    ],
)
def test_declares_its_spec(value: Any, options: dict[str, Any], spec: str) -> None:
    variable = af.Variable(value, **options)
    assert str(variable.spec) == spec
    assert (variable.dtype, variable.shape, variable.ndim) == (
        variable.spec.dtype,
        variable.spec.shape,
        variable.spec.rank,
    )


def test_the_initial_value_is_copied() -> None:
    given = np.array([1.0, 2.0])
    variable = af.Variable(given)
    given[0] = 9
    assert np.array_equal(variable.create_state().read(), [1.0, 2.0])


def test_a_name_is_made_up_where_none_is_given() -> None:
    first, second = af.Variable(0), af.Variable(0)
    assert first.name != second.name


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: af.Variable(0, name=""), "a name is a string that is not empty"),
        (lambda: af.Variable(0, name="a:0"), "has no ':'"),
        (lambda: af.Variable(0, container="shared"), "container 'shared' needs a name"),
        (
            lambda: af.Variable(af.spec("int32"), dtype="int32"),
            r"Variable\(int32\[...\]\): a Spec says dtype and shape",
        ),
        (lambda: af.Variable([1, 2], shape=(3,)), r"has shape \[2\]; shape=\[3\] does not allow it"),
        (lambda: af.Variable(1.5, dtype="int32"), "1.5 does not fit dtype int32"),
        (lambda: af.Variable(af.spec("variant", ())), "cannot hold variants"),
        (lambda: af.Variable(af.Variable(1, name="v")), r"Variable\(Variable\('v'\)\): the initial value is fixed"),
    ],
)
def test_refuses_bad_declarations(build: Callable[[], object], message: str) -> None:
    with pytest.raises(af.GraphError, match=message):
        build()


# -- building --------------------------------------------------------------------------------------------------------


def test_each_use_is_a_new_read(graph: af.Graph) -> None:
    v = af.Variable(1.0, name="v")
    total = v + 1
    assert total.dtype == np.float64
    assert [node.op.name for node in graph.nodes].count("variable_read") == 1
    assert (2 * v).node.inputs[1].node is not total.node.inputs[0].node


def test_iterates_over_its_rows_and_no_further(graph: af.Graph) -> None:
    first, second = af.Variable([[1, 2], [3, 4]])
    assert first.shape == second.shape == (2,)
    with pytest.raises(af.GraphError, match="cannot iterate"):
        first, second = af.Variable(af.spec("int32", (None,)))


def test_effects_name_the_shared_variable(graph: af.Graph) -> None:
    v, w = af.Variable(0), af.Variable(0)
    ((key, access),) = node_effects(v.read().node)
    assert access is Access.READ
    for write in (v.assign(1), v.assign_add(1), v.assign_sub(1), v.update(lambda old: old + 1)):
        assert node_effects(write.node) == ((key, Access.WRITE),)
    assert node_effects(w.read().node)[0][0] != key
    shared = [af.Variable(0, name="n", container=c) for c in ("c", "c", "d")]
    keys = [node_effects(x.read().node)[0][0] for x in shared]
    assert keys[0] == keys[1] != keys[2]


def test_results_know_what_both_sides_know(graph: af.Graph) -> None:
    v = af.Variable(af.spec("float32", (None, 3)))
    x = af.placeholder("float32", (2, None))
    assert v.assign(x).shape == (2, 3)
    assert v.assign_add(x).shape == (2, 3)
    assert v.assign(af.placeholder("float32")).shape == (None, 3)
    assert v.update(lambda old: af.concat([old, old])).shape == (None, 3)


@pytest.mark.parametrize("value", [1, True, 2.5, [1, 2], np.float32(3)])
def test_python_values_take_the_dtype(graph: af.Graph, value: Any) -> None:
    v = af.Variable(af.spec("float32"))
    assert v.assign(value).dtype == np.float32


@pytest.mark.parametrize(
    ("spec", "write", "kind", "message"),
    [
        (("int32", ()), lambda v: v.assign(1.5), af.DTypeError, "1.5 does not fit variable 'v' of dtype int32"),
        (("bool", ()), lambda v: v.assign(1), af.DTypeError, "1 does not fit variable 'v' of dtype bool"),
        (("int8", ()), lambda v: v.assign(300), af.DTypeError, "300"),
        (("int32", ()), lambda v: v.assign(np.int64(1)), af.DTypeError, r"int32\[\] and cannot hold int64\[\]"),
        (("int32", (2,)), lambda v: v.assign(0), af.ShapeError, r"int32\[2\] and cannot hold int32\[\]"),
        (("int32", ()), lambda v: v.assign_add([1, 2]), af.ShapeError, r"int32\[\] and cannot hold int32\[2\]"),
        (("int32", (3,)), lambda v: v.assign_add([1, 2]), af.ShapeError, "do not broadcast"),
        (("bool", ()), lambda v: v.assign_sub(True), af.DTypeError, "not defined for bool"),
        (("int32", ()), lambda v: v.update(lambda old: old / 2), af.DTypeError, "v/update: variable 'v' is int32"),
        (("int32", ()), lambda v: v.update(lambda old: af.zeros((2,), dtype="int32")), af.ShapeError, "v/update"),
    ],
)
def test_refuses_values_that_cannot_fit(
    graph: af.Graph, spec: tuple[Any, ...], write: Callable[[af.Variable], object], kind: type, message: str
) -> None:
    with pytest.raises(kind, match=message):
        write(af.Variable(af.spec(*spec), name="v"))


def test_errors_name_the_line(graph: af.Graph) -> None:
    with pytest.raises(af.DTypeError, match=r"written at .*test_variable\.py:\d+"):
        af.Variable(0).assign(1.5)


def test_needs_a_graph() -> None:
    with pytest.raises(af.GraphError, match=r"no graph is being built.*outside of graphs it is `session\.run\(var"):
        af.Variable(0).read()
    with pytest.raises(af.GraphError, match=r"no graph is being built.*it is `session\.swap_variables\("):
        af.Variable(0).assign(1)


def test_joins_the_graph_of_a_tensor() -> None:
    with af.Graph() as graph:
        x = af.placeholder("float32", ())
    v = af.Variable(1.0, dtype="float32")
    assert v.assign_add(x).graph is graph
    assert v.update(lambda old, y: old * y + 1, x).graph is graph


# -- update ----------------------------------------------------------------------------------------------------------


def test_update_calls_its_function_once_and_keeps_the_body_apart(graph: af.Graph) -> None:
    calls = []
    v = af.Variable(2.0, name="v")
    outer = af.placeholder("float64", ())

    def fn(old: af.Tensor, x: af.Tensor) -> af.Tensor:
        calls.append(old)
        return old * x + outer

    new = v.update(fn, 3)
    assert len(calls) == 1
    assert new.node.inputs[1] is outer
    assert calls[0].graph is new.node.attrs["function"]
    store = StateStore()
    assert kernel_of(new, store)(np.float64(3), np.float64(0.5)) == 6.5
    assert store.lookup(v).value == 6.5
    with pytest.raises(af.GraphError, match="leaves a branch or loop"):
        calls[0] + 1
    af.verify(graph)


def test_update_prints_and_parses(graph: af.Graph) -> None:
    v = af.Variable(2.0, name="v")
    new = v.update(lambda old: old * af.constant(2.0))
    text = af.print_graph(graph)
    parsed = af.parse_graph(text, resources={"v": v})
    assert af.print_graph(parsed) == text
    assert kernel_of(parsed.tensor(new.name), StateStore())() == 4.0


def test_update_may_ignore_the_old_value_or_the_new(graph: af.Graph) -> None:
    v = af.Variable(af.spec("int64", (None,)))
    x = af.constant([1, 2])
    store = StateStore()
    store.lookup(v).assign(np.array([5]))
    fed = np.array([7, 8])
    assert kernel_of(v.update(lambda old, y: y, x), store)(fed).tolist() == [7, 8]
    fed[:] = 0
    assert store.lookup(v).value.tolist() == [7, 8]
    assert kernel_of(v.update(lambda old: old), store)().tolist() == [7, 8]
    assert kernel_of(v.update(lambda old: [3]), store)().tolist() == [3]


def test_an_error_inside_names_the_inner_node(graph: af.Graph) -> None:
    v = af.Variable(af.spec("int64"))
    new = v.update(lambda old: af.reshape(old, (2, 2)))
    store = StateStore()
    store.lookup(v).assign(np.array([5]))
    with pytest.raises(ValueError, match="reshape") as caught:
        kernel_of(new, store)()
    assert "reshape" in caught.value.__notes__[0]
    assert store.lookup(v).value.tolist() == [5]


async def _wait(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda old: old + af.Variable(1), "uses state or has a side effect"),
        (af.print, "uses state or has a side effect"),
        (lambda old: old + af.random.integers(high=3), "draws random numbers"),
        (lambda old: af.op(outputs=old.spec)(_wait)(old), "is a coroutine"),
        (lambda old: af.cond(old > 0, lambda: old, lambda: -old), "is a branch or loop"),
        (lambda old: old + af.placeholder("int64", ()), "has no value of its own"),
    ],
)
def test_update_refuses_impure_functions(graph: af.Graph, fn: Callable[[af.Tensor], af.Tensor], message: str) -> None:
    with pytest.raises(af.GraphError, match=f"v/update: .*{message}(.|\n)*pass it as an argument(.|\n)*built at"):
        af.Variable(0, name="v").update(fn)


def test_update_with_user_code_is_marked(graph: af.Graph) -> None:
    kept = np.array([1, 2])
    keep = af.op(outputs=af.spec("int64", (2,)))(lambda old: kept)
    v = af.Variable([0, 0])
    new = v.update(keep)
    assert new.node.op.conduct.is_user and not v.update(lambda old: old).node.op.conduct.is_user
    store = StateStore()
    kernel_of(new, store)()
    kept[0] = 9
    assert store.lookup(v).value.tolist() == [1, 2]


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float32", "complex64", "bfloat16", "string"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_holds_every_dtype(graph: af.Graph, dtype: str, shape: tuple[int, ...]) -> None:
    v = af.Variable(af.spec(dtype, shape))
    store = StateStore()
    value = np.ones(shape, dtype=v.dtype)
    written = kernel_of(v.assign(af.placeholder(dtype, shape)), store)(value)
    read = kernel_of(v.read(), store)()
    assert read is written
    assert (read.dtype, read.shape) == (v.dtype, shape)
    assert np.array_equal(np.asarray(read), value)
    if dtype not in ("bool", "string"):
        for op, factor in ((v.assign_add, 2), (v.assign_sub, 1)):
            result = kernel_of(op(af.placeholder(dtype, shape)), store)(value)
            assert (result.dtype, result.shape) == (v.dtype, shape)
            assert np.array_equal(np.asarray(result), value * np.asarray(factor, value.dtype))


def test_read_before_a_value_names_the_variable_and_the_way_out() -> None:
    state = af.Variable(af.spec("float32", (2,)), name="weights").create_state()
    for use in (state.read, lambda: state.apply(lambda old: old)):
        with pytest.raises(af.AsyncflowError, match=r"'weights' is read before it has a value; assign to it(.|\n)*"):
            use()


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (np.zeros(2, np.float64), af.DTypeError, "holds float32, not float64"),
        ([1.0, 2.0], af.DTypeError, "holds float32, not list"),
        (np.zeros((2, 1), np.float32), af.ShapeError, r"float32\[2\]; a value of shape \[2,1\] does not fit"),
    ],
)
def test_state_refuses_and_keeps_its_value(value: Any, kind: type, message: str) -> None:
    state = VariableState("v", af.spec("float32", (2,)), np.ones(2, np.float32))
    before = state.value
    for write in (lambda: state.assign(value), lambda: state.apply(lambda old: value)):
        with pytest.raises(kind, match=message):
            write()
        assert state.value is before


def test_a_partial_shape_is_checked_at_run_time() -> None:
    state = VariableState("v", af.spec("int64", (None, 2)))
    state.assign(np.zeros((3, 2), np.int64))
    assert state.read().shape == (3, 2)
    with pytest.raises(af.ShapeError, match=r"\[\?,2\]"):
        state.assign(np.zeros((3, 3), np.int64))


def writable() -> np.ndarray[Any, Any]:
    return np.arange(4.0)


def locked_view() -> np.ndarray[Any, Any]:
    view = writable()[1:]
    view.flags.writeable = False
    return view


@pytest.mark.parametrize("make", [writable, locked_view, lambda: writable().reshape(2, 2)])
def test_what_someone_may_write_to_is_copied(make: Callable[[], np.ndarray[Any, Any]]) -> None:
    given = make()
    kept = immutable(given)
    assert not kept.flags.writeable
    assert not np.shares_memory(kept, given)
    assert np.array_equal(kept, given)


def test_immutable_values_are_kept() -> None:
    owner = writable()
    owner.flags.writeable = False
    for given in (owner, owner[1:], owner.reshape(2, 2)):
        assert immutable(given) is given
    assert isinstance(immutable(np.array(1.5)), np.float64)
    assert immutable(np.asarray(ml_dtypes.bfloat16(2))) == 2


def test_a_memory_map_is_copied() -> None:
    memory = bytearray(8)
    given = np.frombuffer(memory, np.int64)
    given.flags.writeable = False
    kept = immutable(given)
    memory[0] = 1
    assert kept[0] == 0


def test_fresh_results_are_locked_without_a_copy(graph: af.Graph) -> None:
    v = af.Variable(np.zeros(4))
    store = StateStore()
    for write in (v.assign_add(np.ones(4)), v.update(lambda old, x: old + x, np.ones(4))):
        result = kernel_of(write, store)(np.ones(4))
        assert result.base is None and not result.flags.writeable
        assert result is store.lookup(v).value


def test_old_values_stay_as_readers_saw_them() -> None:
    state = VariableState("v", af.spec("int64", (2,)), np.zeros(2, np.int64))
    seen = state.read()
    state.apply(np.add, np.ones(2, np.int64))
    assert seen.tolist() == [0, 0] and state.read().tolist() == [1, 1]


def test_apply_computes_again_if_another_write_came_between() -> None:
    state = VariableState("v", af.spec("int64", ()), np.array(1))
    seen = []

    def double(old: np.int64) -> np.int64:
        seen.append(int(old))
        if len(seen) == 1:  # nothing is locked while this runs: others may read and write
            state.assign(np.int64(10))
        return np.int64(old * 2)

    assert state.apply(double) == 20
    assert seen == [1, 10]


def test_a_write_that_loses_many_races_has_the_others_wait() -> None:
    state = VariableState("v", af.spec("int64", ()), np.array(0))
    calls = []

    def slow(old: np.int64) -> np.int64:
        calls.append(int(old))
        assert state.lock.locked() is (len(calls) > MOST_RACES)  # whoever writes then comes after this
        if len(calls) <= MOST_RACES:
            state.assign(np.int64(len(calls)))
        return np.int64(old + 1)

    assert state.apply(slow) == MOST_RACES + 1
    assert calls == list(range(MOST_RACES + 1))
    state.assign(np.int64(100))
    assert state.read() == 100


async def test_writers_of_whole_arrays_are_never_mixed() -> None:
    """Fault F50: sessions on three threads assign to one variable; each read returns the value of one write."""
    names = range(3)
    with af.Graph() as graph:
        v = af.Variable(np.zeros(1000), name="v", container="f50")
        x = af.placeholder("float64", ())
        write, total = v.assign(af.broadcast_to(x, (1000,))).node, v.read()
    seen: list[set[float]] = []
    start = threading.Barrier(len(names))

    async def work(name: int) -> None:
        async with af.Session(graph) as session:
            start.wait()
            for _ in range(40):
                await session.run(write, {x: float(name)})
                seen.append(set((await session.run(total)).tolist()))

    try:
        await asyncio.gather(*[asyncio.to_thread(asyncio.run, work(name)) for name in names])
    finally:
        af.reset_container("f50")
    assert len(seen) == 120 and all(len(each) == 1 and each <= {0.0, 1.0, 2.0} for each in seen)


def test_no_update_is_lost_between_threads() -> None:
    """Fault F50: a write applies its function to what the last one left."""
    state = VariableState("v", af.spec("int64", ()), np.array(0))
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(2000):
            state.apply(np.add, np.int64(1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert state.read() == 8000


# -- runs ------------------------------------------------------------------------------------------------------------


async def test_survives_runs_and_belongs_to_one_session(graph: af.Graph) -> None:
    v = af.Variable(1.0)
    add = v.assign_add(2.0)
    async with af.Session(debug=True) as one, af.Session(debug=True) as two:
        assert await one.run(add) == 3.0
        assert await one.run(add) == 5.0
        assert await two.run(add) == 3.0


async def test_a_fetched_array_is_the_users(graph: af.Graph, run: Runner) -> None:
    v = af.Variable([1.0, 2.0])
    x = af.placeholder("float64", (2,))
    read, write = v.read(), v.assign(x * 1)
    for fetch in (read, write):
        fetched = await run(fetch, {x: [1.0, 2.0]})
        fetched[:] = 9
        assert (await run(read)).tolist() == [1.0, 2.0]


async def test_reads_and_writes_happen_as_written(graph: af.Graph, run: Runner) -> None:
    v = af.Variable(1)
    before = v.read()
    written = v.assign(v * 10)
    after = v + 0
    assert await run((before, written, after, v)) == (1, 10, 10, 10)


async def test_update_is_one_step(graph: af.Graph, run: Runner) -> None:
    v = af.Variable(1)
    k = af.placeholder("int64", ())
    new = v.update(lambda old, x: old * x + 1, k)
    results = await asyncio.gather(*(run(new, {k: 2}) for _ in range(10)))
    assert sorted(results) == [2 ** (n + 1) - 1 for n in range(1, 11)]


async def test_conformance_22_uninitialised_on_the_untaken_side(graph: af.Graph, run: Runner) -> None:
    v = af.Variable(af.spec("int64", ()), name="later")
    flag = af.placeholder("bool", ())
    y = af.cond(flag, lambda: v + 1, lambda: af.constant(7))
    assert await run(y, {flag: False}) == 7
    with pytest.raises(af.KernelError, match="'later' is read before it has a value"):
        await run(y, {flag: True})


async def test_conformance_31_captured_variable_is_read_each_iteration(graph: af.Graph, run: Runner) -> None:
    v = af.Variable(0)

    def body(i: af.Tensor, seen: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        v.assign_add(10)
        return i + 1, seen + v

    assert await run(af.while_loop(lambda i, _: i < 3, body, (0, 0))) == (3, 60)
    assert await run(v.read()) == 30


async def test_conformance_35_assigns_in_a_body(graph: af.Graph, run: Runner) -> None:
    a, b = af.Variable(0), af.Variable(0)

    def body(i: af.Tensor) -> af.Tensor:
        with af.control_dependencies([a.assign_add(1)]):
            b.assign_add(a)
        return i + 1

    loop = af.while_loop(lambda i: i < 10, body, (0,))
    await run(loop)
    assert await run((a.read(), b.read())) == (10, 55)
    n = af.Variable(0)
    turns = af.while_loop(lambda i: n.read() < 10, lambda i: (n.assign_add(1) - n + i + 1,), (0,))
    assert (await run((turns, n)))[1] == 10


@pytest.mark.slow
async def test_conformance_70_concurrent_writes(graph: af.Graph, run: Runner) -> None:
    exact, lossy = af.Variable(1), af.Variable(1)
    add = exact.assign_add(1)
    racy = lossy.assign(lossy + 1)
    await asyncio.gather(*(run((add, racy)) for _ in range(1024)))
    assert await run(exact.read()) == 1025
    assert 1 < await run(lossy.read()) <= 1025
    tail = af.placeholder("int64", (1,))
    log = af.Variable(af.spec("int64", (None,)))
    await run(log.assign(af.zeros((0,), dtype="int64")))
    append = log.update(lambda old, x: af.concat([old, x]), tail)
    await asyncio.gather(run(append, {tail: [1]}), run(append, {tail: [2]}))
    assert (await run(log.read())).tolist() in ([1, 2], [2, 1])


async def test_conformance_71_an_unfetched_write_is_pruned(graph: af.Graph, run: Runner) -> None:
    v = af.Variable(1)
    write = v.assign(2)
    with af.control_dependencies([write]):
        after = v.read()
    assert await run(v.read()) == 1
    assert await run(after) == 2


async def test_conformance_72_an_error_has_no_side_effect(graph: af.Graph, run: Runner) -> None:
    v = af.Variable(1)
    x = af.placeholder("float64", ())
    write = v.assign(af.astype(af.check_numerics(x), "int64"))
    with pytest.raises(af.KernelError, match="1 NaN"):
        await run(write, {x: float("nan")})
    assert await run(v.read()) == 1


async def test_unordered_graphs_take_variables_too() -> None:
    with af.Graph(effects="unordered"):
        v = af.Variable(1)
        new = v.assign_add(1)
    async with af.Session() as session:
        assert await session.run(new) == 2


async def test_a_variable_alone_needs_no_graph() -> None:
    """The variable belongs to no graph, and no other fetch says what to run."""
    with af.Graph():
        v = af.Variable(3)
        add = v.assign_add(1)
    async with af.Session() as session:
        assert await session.run(v) == 3
        await session.run(add)
        assert await session.run([v, {"again": v}]) == [4, {"again": 4}]
        with pytest.raises(af.FetchError, match="nothing is fetched, and no graph is known"):
            await session.run([])


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"]
)
def test_operators_that_assign_in_place_are_refused(graph: af.Graph, name: str) -> None:
    v = af.Variable(1.0, name="v")
    with pytest.raises(af.GraphError, match=r"leave variable 'v' as it is; write v\.assign_add\(x\)"):
        getattr(operator, f"i{name}")(v, 2.0)
