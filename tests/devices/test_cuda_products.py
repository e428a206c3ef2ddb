"""Products of matrices that CUDA graphs can hold, on the stand-in for cuBLAS, against NumPy's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.devices.captures import WARM_UPS
from asyncflow.devices.cuda.graphs.graph import capture
from asyncflow.devices.cuda.graphs.products import Products, cublas, stand_ins
from asyncflow.streams.cuda.stream import active
from tests.conftest import small_cards
from tests.fake_cupy import FakeCupy

DTYPES = ["float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128"]
EXTENTS = st.integers(0, 4)
BATCHES = [((), ()), ((3,), ()), ((), (3,)), ((3,), (3,)), ((2, 3), ()), ((2, 3), (3,)), ((2, 1), (1, 3)), ((1,), (3,))]
LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    "a part of longer rows": lambda x: np.concatenate([x, x], -1)[..., : x.shape[-1]],
    "a part of longer columns": lambda x: (
        np.concatenate([x, x], -2).swapaxes(-1, -2).copy().swapaxes(-1, -2)[..., : x.shape[-2], :]
    ),
    "every second": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "backwards": lambda x: np.flip(x, -2).copy()[..., ::-1, :],
    "every second matrix": lambda x: np.repeat(x, 2, 0)[::2] if x.ndim > 2 else x,
    "matrices backwards": lambda x: np.flip(x, 0).copy()[::-1] if x.ndim > 2 else x,
}


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeCupy]:
    with FakeCupy(nbytes=64 << 20) as made:
        yield made


@pytest.fixture(scope="module")
def products(fake: FakeCupy) -> Products:
    return Products(fake, fake.cublas, [fake.cuda.get_current_stream()])


def sent(fake: FakeCupy, x: np.ndarray[Any, Any]) -> Any:
    """The array on the card, in the same layout."""
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    if base is x or base.dtype != x.dtype:
        return fake.asarray(x)
    memory = fake.asarray(np.lib.stride_tricks.as_strided(base, (base.size,), (base.itemsize,)).copy())
    offset = x.ctypes.data - base.ctypes.data
    return fake.ndarray(x.shape, x.dtype, memory.data + offset, x.strides) if x.size else fake.asarray(x)


@given(
    st.sampled_from(DTYPES), st.sampled_from(BATCHES), EXTENTS, EXTENTS, EXTENTS, st.sampled_from([*LAYOUTS]),
    st.sampled_from([*LAYOUTS]), st.sampled_from(["none", "rows", "every second"]), st.integers(0, 99),
)  # fmt: skip
def test_products_equal_numpys(
    fake: FakeCupy, products: Products, dtype: Any, batches: Any, m: int, k: int, n: int, first: str, second: str,
    out: str, seed: int,
) -> None:  # fmt: skip
    random, kind = np.random.default_rng(seed), np.dtype(dtype)
    factor = 1 + 2j if kind.kind == "c" else 1
    x, y = (
        layout((random.integers(-4, 5, (*batch, *shape)) * factor).astype(kind))
        for layout, batch, shape in zip((LAYOUTS[first], LAYOUTS[second]), batches, ((m, k), (k, n)), strict=True)
    )
    wide = "complex128" if kind.kind == "c" else "float64"
    wanted = np.matmul(x.astype(wide), y.astype(wide)).astype(kind)
    target = None
    if out != "none":
        target = fake.full((*wanted.shape[:-1], 2 * wanted.shape[-1] or 1), 7, dtype=wanted.dtype)
        target = target[..., ::2][..., : wanted.shape[-1]] if out == "every second" else target[..., : wanted.shape[-1]]
    calls = fake.cublas.calls
    found: Any = products.matmul(sent(fake, x), sent(fake, y), **({} if target is None else {"out": target}))
    assert fake.cublas.calls - calls == (1 if wanted.size and k else 0)
    assert found is target or target is None
    np.testing.assert_array_equal(found.get(), wanted)


@pytest.mark.parametrize(("m", "n"), [((), ()), ((2,), ()), ((), (2,)), ((3, 2), ()), ((), (3, 2))])
def test_vectors_are_rows_and_columns(fake: FakeCupy, products: Products, m: Any, n: Any) -> None:
    x = np.arange(np.prod((*m, 4)), dtype="float64").reshape(*m, 4)
    y = np.arange(np.prod((*n[:-1], 4, *n[-1:]))).astype("float64").reshape(*n[:-1], 4, *n[-1:])
    found: Any = products.matmul(fake.asarray(x), fake.asarray(y))
    assert found.shape == np.matmul(x, y).shape
    np.testing.assert_array_equal(found.get(), np.matmul(x, y))


@pytest.mark.parametrize("first", DTYPES)
@pytest.mark.parametrize("second", DTYPES)
def test_products_of_two_dtypes_are_of_the_wider_one(
    fake: FakeCupy, products: Products, first: Any, second: Any
) -> None:
    x, y = np.arange(6).reshape(2, 3).astype(first), np.arange(12).reshape(3, 4).astype(second)
    wide = np.promote_types(x.dtype, y.dtype)
    calls = fake.cublas.calls
    found: Any = products.matmul(fake.asarray(x), fake.asarray(y))
    assert fake.cublas.calls == calls + 1
    assert found.dtype == wide
    np.testing.assert_array_equal(found.get(), np.matmul(x.astype(wide), y.astype(wide)))


async def test_a_program_with_products_of_two_dtypes_is_captured() -> None:
    with small_cards(0) as cupy, af.Graph() as graph:
        x, w = (af.placeholder(dtype, (4, 4)) for dtype in ("float32", "float16"))
        y = x
        for _ in range(4):
            y = af.tanh(y @ w + 1)
        async with af.Session(graph, ["cuda:0"], cuda_graphs=True) as session:
            feeds = {x: np.eye(4, dtype="float32"), w: np.eye(4, dtype="float16")}
            found = [await session.run(y, feeds) for _ in range(WARM_UPS + 2)]
        assert [name for _, name in cupy.engine.launches].count("graph") == 2
        assert all((each == found[0]).all() for each in found)


def test_what_cublas_has_no_product_for_is_left_to_cupy(fake: FakeCupy, products: Products) -> None:
    ints, floats = fake.asarray(np.eye(2, dtype="int32")), fake.asarray(np.eye(2, dtype="float32"))
    for x, y in ((ints, ints), (floats, ints), (floats, fake.ones((3, 2), "float32")), (floats, fake.full((), 1.0))):
        assert products.matmul(x, y) is None


def test_a_graph_holds_products(fake: FakeCupy) -> None:
    """Other work of the stream does not disturb them, nor they that."""
    stream = fake.cuda.Stream(non_blocking=True)
    products = Products(fake, fake.cublas, [stream])
    with stream:
        x, y, z = (fake.asarray(np.full((2, 2), value, "float32")) for value in (1, 2, 3))
        out = fake.empty((2, 2), "float32")
        pool = fake.cuda.MemoryPool(fake.cuda.MemoryPool().malloc)
        with fake.cuda.using_allocator(pool.malloc):
            graph, _ = capture(stream, lambda: products.matmul(products.matmul(x, y), z, out=out))
        out.fill(0)
        for value in (1, 5):
            x.fill(value)
            graph.launch(stream=stream)
            np.testing.assert_array_equal(out.get(), np.full((2, 2), value * 24.0, "float32"))


def test_each_stream_has_a_workspace(fake: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the active one, also where the body of its loop is captured on another."""
    streams, x, found = [fake.cuda.Stream(non_blocking=True) for _ in range(3)], fake.ones((2, 2), "float32"), []
    products = Products(fake, fake.cublas, streams[:2])
    for stream, current in ((0, 0), (0, 2), (1, 1), (1, 2)):
        monkeypatch.setattr(active, "stream", SimpleNamespace(raw=streams[stream]))
        with streams[current]:
            products.matmul(x, x)
        found.append(fake.cublas.workspace)
    assert found[0] == found[1] != found[2] == found[3]


def test_no_extent_is_larger_than_an_int(fake: FakeCupy, products: Products, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that would be one matrix, nor of the rows that a matrix is a part of."""
    monkeypatch.setattr("asyncflow.devices.cuda.graphs.products._MOST_EXTENT", 8)
    multiply = Mock(wraps=fake.cublas.cublasGemmStridedBatchedEx)
    monkeypatch.setattr(fake.cublas, "cublasGemmStridedBatchedEx", multiply)
    x, y = np.arange(48.0).reshape(3, 4, 4), np.arange(64.0).reshape(4, 16)
    found: Any = products.matmul(fake.asarray(x), fake.asarray(y)[:, 3:7])
    np.testing.assert_array_equal(found.get(), x @ y[:, 3:7])
    assert max(value for value in multiply.call_args.args if isinstance(value, int) and value not in (68, 70)) == 4


def test_an_error_of_cublas_says_which(fake: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake.cublas, "cublasCreate_v2", lambda _: 3)
    with pytest.raises(RuntimeError, match="cublasCreate_v2 of cuBLAS failed with status 3"):
        Products(fake, fake.cublas, [fake.cuda.get_current_stream()])


def test_without_the_library_there_are_none(fake: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncflow.devices.cuda.graphs.products.stand_ins", [])
    assert stand_ins is not None
    assert cublas(fake) is None


@pytest.mark.parametrize("has_library", [True, False])
async def test_a_region_with_products_is_captured_where_there_is_the_library(
    has_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives the same where there is not."""
    with small_cards(0) as cupy, af.Graph() as graph:
        if not has_library:
            monkeypatch.setattr("asyncflow.devices.cuda.device.cublas", lambda _: None)
        random = np.random.default_rng(0)
        weights = [random.normal(size=(8, 8)).astype("float32") for _ in range(4)]
        x = y = af.placeholder("float32", (None, 8))
        for weight in weights:
            y = af.tanh(y @ weight + 1)
        dx = af.gradients(y, x)[0]
        async with af.Session(graph, ["cuda:0"], cuda_graphs=True) as session:
            for n in range(6):
                fed = np.full((3, 8), n / 4, "float32")
                found, _ = await session.run([y, dx], {x: fed})
                wanted = fed
                for weight in weights:
                    wanted = np.tanh(wanted @ weight + 1)
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
            cupy.engine.launches.clear()
            await session.run([y, dx], {x: np.ones((3, 8), "float32")})
            names = [name for _, name in cupy.engine.launches]
            assert names.count("graph") == has_library
            assert ("cupy_matmul" in names or "matmul" in names) != has_library
        assert cupy.cublas.handles == 0


async def test_a_card_without_room_makes_no_graphs_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_cards(0) as cupy, af.Graph() as graph:
        monkeypatch.setattr("asyncflow.devices.cuda.graphs.products.WORKSPACE_NBYTES", 1 << 40)
        x = y = af.placeholder("float32", (8, 8))
        for _ in range(4):
            y = af.tanh(y @ y + 1)
        async with af.Session(graph, ["cuda:0"], cuda_graphs=True) as session:
            for _ in range(6):
                assert (await session.run(y, {x: np.eye(8, dtype="float32")})).shape == (8, 8)
        assert cupy.cublas.handles == 0
