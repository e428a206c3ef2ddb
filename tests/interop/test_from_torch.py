"""`af.from_torch`: modules and functions of PyTorch's as ops, on the CPU."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.fake_cupy.stand_in import stand_in

torch: Any = importlib.import_module("torch")

Run = Callable[..., Awaitable[Any]]


@pytest.fixture
def perceptron() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


# -- values ----------------------------------------------------------------------------------------------------------


async def test_a_module_is_an_op(run: Run, graph: af.Graph, perceptron: Any) -> None:
    x = af.placeholder("float32", (None, 4))
    f = af.from_torch(perceptron)
    y = f(x)
    assert (repr(f), str(y.spec)) == ("<from_torch Sequential>", "float32[?,2]")
    assert y.node.device == ("cpu" if torch.cuda.is_available() else None)
    value = numbers(5, 4)
    expected = perceptron(torch.from_numpy(value)).detach().numpy()
    np.testing.assert_array_equal(await run(y, {x: value}), expected)
    with torch.no_grad():
        perceptron[0].weight.zero_()
    changed = await run(y, {x: value})
    assert not np.array_equal(changed, expected), "the module's own parameters are those of the moment"


async def test_nests_dtypes_and_static_arguments(run: Run, graph: af.Graph) -> None:
    def both(a: Any, b: Any, *, scale: float) -> dict[str, Any]:
        return {"sum": (a + b) * scale, "more": (a > b, [b.to(torch.bfloat16)])}

    f = af.from_torch(both)
    a, b = af.placeholder("float32", (None, 3)), af.placeholder("float32", ())
    result = f(a, b, scale=2.0)
    value = numbers(2, 3)
    fetched = await run(result, {a: value, b: 0.5})
    np.testing.assert_array_equal(fetched["sum"], (value + np.float32(0.5)) * 2)
    np.testing.assert_array_equal(fetched["more"][0], value > 0.5)
    assert fetched["more"][1][0].dtype == result["more"][1][0].dtype == af.placeholder("bfloat16", ()).dtype


INPUTS = [numbers(3, 4), numbers(4, 3).T, numbers(3, 8)[:, ::-2], numbers(0, 4)]


@pytest.mark.parametrize("value", INPUTS, ids=["plain", "transposed", "backwards", "empty"])
async def test_values_in_other_layouts(run: Run, graph: af.Graph, value: np.ndarray[Any, Any]) -> None:
    x = af.placeholder("float32", (None, 4))
    y = af.from_torch(torch.neg)(af.identity(x[::-1]))
    np.testing.assert_array_equal(await run(y, {x: value}), -value[::-1])


async def test_one_row_flipped_has_a_negative_stride_too(run: Run, graph: af.Graph) -> None:
    """The row is in C order all the same."""
    x = af.placeholder("float32", (1, 4))
    value = numbers(1, 4)
    np.testing.assert_array_equal(await run(af.from_torch(torch.neg)(af.flip(x * 2, axis=0)), {x: value}), -2 * value)


def test_inputs_and_outputs_share_memory(graph: af.Graph) -> None:
    seen: list[int] = []

    def look(x: Any) -> Any:
        seen.append(x.data_ptr())
        return x + 1

    node = af.from_torch(look, outputs=af.spec("float32", (None,)))(af.placeholder("float32", (None,))).node
    value = numbers(8)
    value.flags.writeable = False
    assert node.op.kernel is not None
    result = node.op.kernel(np, **node.attrs)(value)
    assert seen == [value.ctypes.data] and result.flags.writeable


async def test_what_a_module_gives_back_is_not_written_to(run: Run, graph: af.Graph) -> None:
    """An output in memory that others use is locked, so that nothing computes into it."""
    layer = torch.nn.Linear(3, 3, bias=False)
    before = layer.weight.detach().clone()

    class Reveal(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any) -> tuple[Any, Any]:
            return self.layer.weight, x.reshape(-1)

    x = af.placeholder("float32", (3, 3))
    weight, flat = af.from_torch(Reveal())(x)
    node = weight.node
    value = numbers(3, 3)
    results = node.op.kernel(np, **node.attrs)(value)
    assert [result.flags.writeable for result in results] == [False, False]
    fetched = await run([weight, flat, af.exp(weight) + 1], {x: value})
    fetched[0][:] = 7
    assert torch.equal(layer.weight, before)
    np.testing.assert_array_equal(fetched[1], value.reshape(-1))


async def test_in_loops_and_branches(run: Run, graph: af.Graph) -> None:
    f = af.from_torch(torch.tanh)
    x = af.placeholder("float64", (3,))
    _, y = af.while_loop(lambda i, _: i < 4, lambda i, y: (i + 1, f(y)), (af.constant(0), x))
    z = af.cond(af.sum(x) > 100, lambda: f(x), lambda: x)
    slope = af.gradients(y, [x])[0]
    value = np.array([0.1, 0.5, 2.0])
    tensor = torch.from_numpy(value).requires_grad_()
    expected = tensor
    for _ in range(4):
        expected = torch.tanh(expected)
    expected.sum().backward()
    got = await run([y, z, slope], {x: value})
    for found, wanted in zip(got, (expected.detach(), value, tensor.grad), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


# -- gradients -------------------------------------------------------------------------------------------------------


async def test_gradients_are_torchs(run: Run, graph: af.Graph, perceptron: Any) -> None:
    x, scale = af.placeholder("float32", (None, 4)), af.placeholder("float32", ())
    f = af.from_torch(perceptron)
    weights = {name: af.constant(value) for name, value in f.parameters().items()}
    y = af.sum(f(x * scale, params={name: weights[name] for name in ("0.weight", "2.bias")}) ** 2)
    found = af.gradients(y, [x, scale, weights["0.weight"], weights["2.bias"], weights["0.bias"]], unconnected="zero")
    value = numbers(5, 4)
    got = await run(found, {x: value, scale: 2.0})

    a, s = torch.from_numpy(value).requires_grad_(), torch.tensor(2.0, requires_grad=True)
    (perceptron(a * s) ** 2).sum().backward()
    parameters = dict(perceptron.named_parameters())
    wanted = [a.grad, s.grad, parameters["0.weight"].grad, parameters["2.bias"].grad]
    for gradient, expected in zip(got, wanted, strict=False):
        assert expected is not None
        np.testing.assert_allclose(gradient, expected.numpy(), rtol=1e-5, atol=1e-6)
    assert not got[4].any(), "the module's own parameters have no gradient in the graph"


async def test_a_module_is_trained(graph: af.Graph, perceptron: Any) -> None:
    f = af.from_torch(perceptron)
    params = {name: af.Variable(value, name=name) for name, value in f.parameters().items()}
    x, target = af.placeholder("float32", (None, 4)), af.placeholder("float32", (None, 2))
    loss = af.mean((f(x, params=params) - target) ** 2)
    step = af.optim.minimize(loss, params, partial(af.optim.sgd, learning_rate=0.1))
    feeds = {x: numbers(16, 4), target: numbers(16, 2)}
    optimizer = torch.optim.SGD(perceptron.parameters(), lr=0.1)
    async with af.Session(graph) as session:
        for _ in range(5):
            got, _ = await session.run([loss, step], feeds)
            expected = ((perceptron(torch.from_numpy(feeds[x])) - torch.from_numpy(feeds[target])) ** 2).mean()
            np.testing.assert_allclose(got, expected.item(), rtol=1e-5)
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
        trained = await session.run(params)
    for name, parameter in perceptron.named_parameters():
        np.testing.assert_allclose(trained[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-6)


async def test_inputs_and_outputs_without_a_gradient(run: Run, graph: af.Graph) -> None:
    def chosen(table: Any, index: Any) -> tuple[Any, Any, Any]:
        return table[index], index + 1, torch.ones(2)

    table, index = af.placeholder("float64", (4, 2)), af.placeholder("int64", (None,))
    rows, after, ones = af.from_torch(chosen)(table, index)
    loss = af.sum(rows * 3.0) + af.sum(ones) + af.astype(af.sum(after), "float64")
    got = await run(af.gradients(loss, [table])[0], {table: np.zeros((4, 2)), index: np.array([1, 1, 3])})
    np.testing.assert_array_equal(got, [[0, 0], [6, 6], [0, 0], [3, 3]])
    none = await run(af.gradients(af.sum(ones), [table])[0], {table: np.zeros((4, 2)), index: np.array([0])})
    np.testing.assert_array_equal(none, np.zeros((4, 2)))


async def test_running_statistics_count_a_batch_once(graph: af.Graph) -> None:
    layer = torch.nn.BatchNorm1d(3)
    x = af.placeholder("float32", (None, 3))
    y = af.sum(af.from_torch(layer)(x) ** 3)
    async with af.Session(graph) as session:
        await session.run([y, af.gradients(y, [x])[0]], {x: numbers(8, 3)})
    assert layer.num_batches_tracked is not None and int(layer.num_batches_tracked) == 1


async def test_gradients_of_random_numbers_are_refused(run: Run, graph: af.Graph) -> None:
    layer = torch.nn.Dropout(0.5)
    x = af.placeholder("float32", (None,))
    y = af.from_torch(layer)(x)
    slope = af.gradients(y, [x])[0]
    feeds = {x: np.ones(4, np.float32)}
    assert set((await run(y, feeds)).tolist()) <= {0.0, 2.0}
    with pytest.raises(af.KernelError, match=r"Dropout draws random numbers.*call module.eval\(\)"):
        await run(slope, feeds)
    layer.eval()
    assert (await run(slope, feeds)).tolist() == [1, 1, 1, 1]


# -- rows ------------------------------------------------------------------------------------------------------------


def counted(module: Any) -> tuple[Callable[..., Any], list[tuple[int, ...]]]:
    """The module as a function, and the shapes that it is called with."""
    shapes: list[tuple[int, ...]] = []

    def call(x: Any) -> Any:
        shapes.append(tuple(x.shape))
        return module(x)

    return call, shapes


@pytest.mark.parametrize("rows", [True, None, False], ids=["of rows", "mapped", "row by row"])
@pytest.mark.filterwarnings("ignore:.* takes one row:UserWarning")
async def test_members_of_a_batch_are_one_call(graph: af.Graph, perceptron: Any, rows: bool | None) -> None:
    call, shapes = counted(perceptron)
    f = af.from_torch(call, rows=rows, outputs=af.spec("float32", (2,)))
    x = af.placeholder("float32", (4,))
    y = af.batched(lambda x: f(x) * 2, max_delay_s=1)(x)
    values = numbers(5, 4)
    async with af.Session(graph) as session:
        found = await asyncio.gather(*(session.run(y, {x: value}) for value in values))
        assert (await session.run(y, {x: values[0]})).shape == (2,)
    expected = perceptron(torch.from_numpy(values)).detach().numpy() * 2
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert shapes == {True: [(5, 4), (1, 4)], None: [(4,)] * 2, False: [(4,)] * 6}[rows]


async def test_rows_of_map_fn_vmap_and_pools(run: Run, graph: af.Graph, perceptron: Any) -> None:
    """Nests of results, numbers that are the same for all rows, and a row that is alone."""

    class Both(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.perceptron = perceptron

        def forward(self, x: Any, scale: Any) -> dict[str, Any]:
            return {"y": self.perceptron(x) * scale, "sum": x.sum(dim=-1)}

    x, scale = af.placeholder("float32", (None, 4)), af.placeholder("float32", ())
    value = numbers(5, 4)
    expected = perceptron(torch.from_numpy(value)).detach().numpy() * 3
    mapped = af.from_torch(Both())
    for found in (
        af.vmap(lambda row: mapped(row, scale))(x),
        af.map_fn(lambda row: mapped(row, scale), x),
        af.vmap(lambda row: af.vmap(lambda inner: mapped(inner, scale))(row[None]))(x),
    ):
        for rows in (value, value[:1], value[:0]):
            y, total = await run([found["y"], found["sum"]], {x: rows, scale: 3.0})
            np.testing.assert_allclose(y.reshape(-1, 2), expected[: len(rows)], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(total.reshape(-1), rows.sum(axis=1), rtol=1e-5, atol=1e-6)


async def test_parameters_of_the_graph_stay_as_they_are_or_are_each_rows_own(
    run: Run, graph: af.Graph, perceptron: Any
) -> None:
    x, factor = af.placeholder("float32", (None, 4)), af.placeholder("float32", (None,))
    for rows in (True, None):
        f = af.from_torch(perceptron, rows=rows)
        params = {name: af.Variable(value) for name, value in f.parameters().items()}
        same = af.vmap(lambda row, f=f, params=params: f(row, params=params))(x)
        bias = params["2.bias"].read()
        own = af.vmap(lambda row, k, f=f, bias=bias: f(row, params={"2.bias": bias * k}))(x, factor)
        value, factors = numbers(3, 4), np.array([1, 2, 3], np.float32)
        expected = perceptron(torch.from_numpy(value)).detach().numpy()
        found = await run([same, own, af.gradients(af.sum(same), params["2.bias"])], {x: value, factor: factors})
        np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)
        moved = (factors - 1)[:, None] * perceptron[2].bias.detach().numpy()
        np.testing.assert_allclose(found[1], expected + moved, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[2], [3, 3], rtol=1e-5)


async def test_what_torch_cannot_map_is_called_row_by_row(
    run: Run, graph: af.Graph, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning comes once; each row has its own result, also of a module that would mix rows along another axis."""
    torch.manual_seed(0)
    recurrent = torch.nn.LSTM(4, 3)
    x = af.placeholder("float32", (None, 5, 4))
    y = af.vmap(lambda row: af.from_torch(recurrent)(row)[0])(x)
    value = numbers(2, 5, 4)
    expected = [recurrent(torch.from_numpy(row))[0].detach().numpy() for row in value]
    for _ in range(4):
        np.testing.assert_allclose(await run(y, {x: value}), expected, rtol=1e-5, atol=1e-6)
    (told,) = (message for message in caplog.messages if "torch.vmap cannot map" in message)
    assert told.startswith("LSTM is called for each row by itself")


async def test_a_module_that_counts_in_a_buffer_sees_each_row_once(run: Run, graph: af.Graph) -> None:
    class Counting(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            self.seen += 1
            return x + self.seen

    module = Counting()
    x = af.placeholder("float32", (None,))
    y = af.vmap(af.from_torch(module, outputs=af.spec("float32", ())))(x)
    assert (await run(y, {x: np.zeros(3, np.float32)})).tolist() == [1, 2, 3]


async def test_a_row_at_fault_is_named(run: Run, graph: af.Graph) -> None:
    def positive(x: Any) -> Any:
        if x < 0:
            raise ValueError("below 0")
        return x

    x = af.placeholder("float32", (None,))
    y = af.vmap(af.from_torch(positive, outputs=af.spec("float32", ())))(x)
    with pytest.raises(af.KernelError, match=r"(?s)below 0.*positive.*vmap/2"):
        await run(y, {x: np.array([1, 2, -1, 3], np.float32)})
    assert (await run(y, {x: np.ones(2, np.float32)})).tolist() == [1, 1]


async def test_a_module_of_rows_without_any(run: Run, graph: af.Graph) -> None:
    """A single row is passed as a batch of one; the spec of the result is inferred with two numbers of rows."""
    layer = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    x = af.placeholder("float32", (3, 4))
    y = af.from_torch(layer, rows=True)(x)
    assert str(y.spec) == "float32[2]"
    value = numbers(3, 4)
    expected = layer(torch.from_numpy(value[None]))[0].detach().numpy()
    np.testing.assert_allclose(await run(y, {x: value}), expected, rtol=1e-6)
    slope = af.gradients(af.sum(y), x)
    np.testing.assert_allclose(
        await run(slope, {x: value}), layer[1].weight.detach().numpy().sum(axis=0).reshape(3, 4), rtol=1e-5
    )
    for function in (lambda x: x.sum(), lambda x: x.reshape(-1), lambda x: x[:1]):
        with pytest.raises(af.GraphError, match=r"rows=True, but 64 rows give float32\["):
            af.from_torch(function, rows=True)(x)
    wrong = af.from_torch(lambda x: x[:0], rows=True, outputs=af.spec("float32", (3, 4)))(x)
    with pytest.raises(af.KernelError, match="and 1 were given; return one for each"):
        await run(wrong, {x: value})
    with pytest.raises(af.GraphError, match=r"from_torch\(rows\): rows is True or False"):
        af.from_torch(layer, rows="yes")  # type: ignore[arg-type]


# -- errors ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_built(graph: af.Graph, perceptron: Any) -> None:
    x = af.placeholder("float32", (None, 4))
    f = af.from_torch(perceptron)
    with pytest.raises(af.GraphError, match=r"Sequential has no parameter 'weight'; it has 0.weight, 0.bias"):
        f(x, params={"weight": x})
    with pytest.raises(af.GraphError, match=r"parameter '0.bias' is float32\[8\], and .* was given"):
        f(x, params={"0.bias": af.zeros((7,), dtype="float32")})
    with pytest.raises(af.GraphError, match=r"(?s)cannot be inferred \(RuntimeError.*declare it: af.from_torch"):
        f(af.placeholder("float32", (None, 3)))
    with pytest.raises(af.GraphError, match=r"cannot be inferred \(ValueError: .*the rank of an input is unknown"):
        f(af.placeholder("float32", None))
    with pytest.raises(af.GraphError, match="is no array of numbers"):
        f(af.constant("text"))
    with pytest.raises(af.GraphError, match=r"takes a torch\.nn\.Module or a function on tensors; got 3"):
        af.from_torch(3)  # type: ignore[arg-type]
    with pytest.raises(af.GraphError, match=r"outputs are described by af\.spec"):
        af.from_torch(perceptron, outputs="float32")
    with pytest.raises(af.GraphError, match="tanh is a function"):
        af.from_torch(torch.tanh).parameters()
    with pytest.raises(af.GraphError, match=r"of a Tensor that requires grad; give its \.detach\(\)"):
        af.constant(torch.ones(2, requires_grad=True))


def test_a_module_without_data(graph: af.Graph) -> None:
    x = af.placeholder("float32", (None, 4))
    f = af.from_torch(torch.nn.Linear(4, 2, device="meta"), name="layer")
    with pytest.raises(af.GraphError, match=r"layer: its tensor 'weight' has no data.*\.to_empty\(device='cpu'\)"):
        f(x)
    weights = {"weight": af.zeros((2, 4), dtype="float32"), "bias": af.zeros((2,), dtype="float32")}
    assert str(f(x, params=weights).spec) == "float32[?,2]"
    with pytest.raises(af.GraphError, match=r"its tensor 'bias' has no data"):
        f(x, params={"weight": weights["weight"]})


def test_a_module_on_another_kind_of_device(graph: af.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    f = af.from_torch(torch.nn.Linear(4, 2))
    elsewhere = SimpleNamespace(device=SimpleNamespace(type="xpu"))
    monkeypatch.setattr(f, "_own_tensors", lambda: [("weight", elsewhere)])
    with pytest.raises(af.GraphError, match=r"'weight' is on a device of kind 'xpu'.*module\.to\('cpu'\)"):
        f(af.placeholder("float32", (None, 4)))


@pytest.mark.parametrize("given", [False, True], ids=["own parameters", "parameters of the graph"])
@pytest.mark.parametrize("devices", [["cuda:0", "cpu:0"], ["cuda:0"]])
async def test_without_cuda_a_module_is_computed_on_the_host(
    graph: af.Graph, perceptron: Any, monkeypatch: pytest.MonkeyPatch, devices: list[str], given: bool
) -> None:
    """On a CPU if there is one, and else for the card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    x = af.placeholder("float32", (None, 4))
    f = af.from_torch(perceptron)
    params = {name: af.Variable(value) for name, value in f.parameters().items()} if given else None
    y = f(x + 1, params=params) * 2
    slope = af.gradients(y, x)
    value = numbers(5, 4)
    leaf = torch.from_numpy(value + 1).requires_grad_()
    (perceptron(leaf) * 2).sum().backward()
    with stand_in(devices=1):
        async with af.Session(graph, devices=devices, debug=True) as session:
            got = await session.run([y, slope], {x: value})
            placed = [part.device for part in session.plan([y, slope], [x]).partitions for _ in part.nodes]
    np.testing.assert_allclose(got[0], perceptron(leaf).detach() * 2, rtol=1e-5)
    np.testing.assert_allclose(got[1], leaf.grad, rtol=1e-5, atol=1e-6)
    assert devices[-1] in placed


async def test_what_fails_in_a_run_names_the_node(run: Run, graph: af.Graph) -> None:
    x = af.placeholder("float32", (None,))
    vector = af.spec("float32", (None,))
    cases: list[tuple[Callable[..., Any], str]] = [
        (lambda x: x.double(), r"returned float64\[3\] as output 0, declared as float32\[\?\]"),
        (lambda x: x.reshape(3, 1), r"returned float32\[3,1\] as output 0"),
        (lambda x: 3, "returned int as output 0"),
        (lambda x: (x, x), "returned another nest than is declared"),
        (lambda x: x.add_(1), "writes to its inputs"),
        (lambda x: x @ torch.ones(5), "size"),
    ]
    for function, message in cases:
        y = af.from_torch(function, outputs=vector, name="mine")(af.identity(x) + 0)
        with pytest.raises(af.KernelError, match=rf"(?s){message}.*node    mine"):
            await run(y, {x: np.ones(3, np.float32)})


def test_second_derivatives_are_refused(graph: af.Graph) -> None:
    x = af.placeholder("float32", (3,))
    first = af.gradients(af.from_torch(torch.tanh)(x), [x])[0]
    with pytest.raises(af.GraphError, match="tanh_gradient"):
        af.gradients(first, [x])


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"from_torch needs PyTorch: pip install 'asyncflow-runtime\[torch\]'"):
        af.from_torch(abs)
