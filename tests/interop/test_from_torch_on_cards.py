"""`af.from_torch` on CUDA devices, with stand-ins for CuPy and PyTorch: the stream, the memory, and waits."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from tests.fake_cupy.stand_in import stand_in
from tests.interop.torch_on_cards import TorchOnCards

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH = 3000
VECTOR = af.spec("float32", (None,))


@pytest.fixture(params=range(4))
def torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchOnCards]:
    """The stand-in, on one card, which serves streams in an order of its own."""
    with stand_in(nbytes=16 << 20, seed=request.param) as fake:
        torch = TorchOnCards(fake)
        monkeypatch.setitem(sys.modules, "torch", torch)
        yield torch


@pytest.mark.parametrize("options", [{}, {"compute_streams": 2}, {"memory_limit": 1 << 18}], ids=str)
async def test_a_function_runs_on_the_stream_of_its_node(
    torch: TorchOnCards, graph: af.Graph, options: dict[str, Any]
) -> None:
    x, scale = af.placeholder("float32", (None,)), af.placeholder("float32", ())
    f = af.from_torch(lambda x, scale: x * scale + x, outputs=VECTOR)
    y = f(x + 1, scale)
    _, z = af.while_loop(lambda i, _: i < 5, lambda i, z: (i + 1, f(z, scale) - z), (af.constant(0), y))
    value = np.arange(LENGTH, dtype=np.float32)
    async with af.Session(graph, devices=["cuda:0"], debug=True, **options) as session:
        for _ in range(3):
            got = await session.run([y, z, af.on_device(y)], {x: value, scale: 2.0})
            np.testing.assert_array_equal(got[0], (value + 1) * 3)
            np.testing.assert_array_equal(got[1], (value + 1) * 3 * 32)
            np.testing.assert_array_equal(got[2].get(), got[0])
    assert torch.waits == 0, "both sides have one stream"
    assert not [name for name in torch.fake.blocking() if "ynchronize" in name or "memcpy" in name]


@pytest.mark.parametrize("options", [{}, {"compute_streams": 2}], ids=str)
async def test_gradients_are_computed_on_the_card(
    torch: TorchOnCards, graph: af.Graph, options: dict[str, Any]
) -> None:
    x, scale = af.placeholder("float32", (None,)), af.placeholder("float32", ())
    f = af.from_torch(lambda x, scale: x * x * scale + x, outputs=VECTOR)
    y = f(x + 1, scale)
    dx, dscale = af.gradients(af.sum(y * y), [x, scale])
    value = np.arange(LENGTH, dtype=np.float32) / LENGTH
    async with af.Session(graph, devices=["cuda:0"], debug=True, **options) as session:
        fed = await session.run(af.on_device(af.identity(x)), {x: value})
        before = session.devices[0].memory.requests.copies
        results = [await session.run(af.on_device([dx, dscale]), {x: fed, scale: 3.0}) for _ in range(3)]
        copies, found = session.devices[0].memory.requests.copies - before, results[-1]
        z, slope = (value + 1) ** 2 * 3 + value + 1, 6 * (value + 1) + 1
        np.testing.assert_allclose(found[0].get(), 2 * z * slope, rtol=1e-4)
        np.testing.assert_allclose(found[1].get(), (2 * z * (value + 1) ** 2).sum(), rtol=1e-4)
    assert copies == 3, "the array that is fed, on the card"
    assert torch.waits == 0, "both sides have one stream"
    assert not [name for name in torch.fake.blocking() if "ynchronize" in name or "memcpy" in name]


async def test_an_array_without_elements(torch: TorchOnCards, graph: af.Graph) -> None:
    x = af.placeholder("float32", (None,))
    double = af.from_torch(lambda x: x + x, outputs=VECTOR)(x + 1)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        for length in (0, 1):
            found = await session.run(double, {x: np.zeros(length, np.float32)})
            assert found.tolist() == [2.0] * length


async def test_a_flipped_array_comes_with_strides_that_torch_has(torch: TorchOnCards, graph: af.Graph) -> None:
    x = af.placeholder("float32", (None,))
    flipped = af.flip(x)
    double = af.from_torch(lambda x: x + x, outputs=VECTOR)(flipped)
    value = np.arange(LENGTH, dtype=np.float32)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        doubled, lent = await session.run([double, af.on_device(flipped)], {x: value})
    np.testing.assert_array_equal(doubled, value[::-1] * 2)
    np.testing.assert_array_equal(torch.from_dlpack(lent).array.get(), value[::-1])


async def test_one_row_flipped_has_a_negative_stride_too(torch: TorchOnCards, graph: af.Graph) -> None:
    """The row is in C order all the same."""
    x = af.placeholder("float32", (1, 3))
    flipped = af.flip(x, axis=0)
    double = af.from_torch(lambda x: x + x, outputs=af.spec("float32", (1, 3)))(flipped)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        doubled, lent = await session.run([double, af.on_device(flipped)], {x: np.ones((1, 3), np.float32)})
    np.testing.assert_array_equal(doubled, [[2, 2, 2]])
    np.testing.assert_array_equal(torch.from_dlpack(lent).array.get(), [[1, 1, 1]])


async def test_what_a_function_gives_back_is_copied(torch: TorchOnCards, graph: af.Graph) -> None:
    """CuPy cannot lock an array, so an output in the memory of an input is one of its own."""
    x = af.placeholder("float32", (None,))
    y = x + 1
    same = af.from_torch(lambda x: x, outputs=VECTOR)(y)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        first, second = await session.run([af.on_device(y), af.on_device(same)], {x: np.ones(LENGTH, np.float32)})
    assert first.data.ptr != second.data.ptr
    np.testing.assert_array_equal(first.get(), second.get())


async def test_what_does_not_fit_names_the_node(torch: TorchOnCards, graph: af.Graph) -> None:
    x = af.placeholder("float32", (None,))
    y = af.from_torch(lambda x: x + x, outputs=af.spec("float64", (None,)), name="mine")(x)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        with pytest.raises(af.KernelError, match=r"(?s)returned float32\[3000\] as output 0.*node    mine"):
            await session.run(y, {x: np.ones(LENGTH, np.float32)})
