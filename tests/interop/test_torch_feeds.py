"""PyTorch's tensors, and objects with only DLPack, as feeds and arguments on the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import asyncflow as af

torch: Any = importlib.import_module("torch")

Run = Callable[..., Awaitable[Any]]


class OnlyDLPack:
    """An array of a library that knows no more of NumPy than DLPack."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)


DTYPES = ["bool", "uint8", "int16", "int64", "float16", "float32", "float64", "complex64", "bfloat16"]


@pytest.mark.parametrize("dtype", DTYPES)
async def test_tensors_of_every_dtype_are_fed(run: Run, graph: af.Graph, dtype: str) -> None:
    x = af.placeholder(dtype, None)
    values = torch.tensor([[0, 1, 3], [2, 5, 7]]).to(getattr(torch, dtype))
    for tensor in (values, values.T, values[:, ::2], values[0, 1], values[:0]):
        fetched = await run(af.identity(x), {x: tensor})
        assert fetched.dtype == x.dtype
        np.testing.assert_array_equal(fetched.astype(np.complex64), tensor.to(torch.complex64).numpy())


async def test_objects_with_dlpack_alone_are_fed(run: Run, graph: af.Graph) -> None:
    x = af.placeholder("float32", (None,))
    np.testing.assert_array_equal(await run(x * 2, {x: OnlyDLPack(torch.ones(3))}), np.full(3, 2, np.float32))


async def test_a_fed_tensor_is_a_snapshot(graph: af.Graph) -> None:
    x, wait = af.placeholder("float32", (None,)), af.placeholder("float32", ())
    tensors: list[Any] = [torch.ones(4), torch.ones(4, dtype=torch.bfloat16), OnlyDLPack(torch.ones(4))]

    @af.op(outputs=af.spec("float32", ()))
    async def change(value: Any) -> Any:
        for tensor in tensors:
            getattr(tensor, "tensor", tensor).fill_(-1)
        return value

    b = af.placeholder("bfloat16", (None,))
    o = af.placeholder("float32", (None,))
    with af.control_dependencies([change(wait).node]):
        fetches = [af.identity(x), af.astype(b, "float32"), af.identity(o)]
    async with af.Session(graph) as session:
        feeds: dict[Any, Any] = dict(zip((x, b, o), tensors, strict=True))
        for value in await session.run(fetches, {**feeds, wait: 0.0}):
            assert value.tolist() == [1, 1, 1, 1]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "gradients": (lambda: torch.zeros(2, requires_grad=True), r"it requires grad.*\.detach\(\)"),
    "dtype": (lambda: torch.zeros(2, dtype=torch.float64), "its dtype is float64; convert it yourself"),
    "bfloat16": (lambda: torch.zeros(2, dtype=torch.bfloat16), "its dtype is bfloat16"),
    "shape": (lambda: torch.zeros(2, 1), r"its shape is \[2,1\]"),
    "no data": (lambda: torch.zeros(2, device="meta"), "it cannot be read by DLPack: .*meta"),
    "sparse": (lambda: torch.zeros(2).to_sparse(), "it cannot be read by DLPack"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_does_not_fit_is_refused(run: Run, graph: af.Graph, case: str) -> None:
    make, reason = REFUSED[case]
    x = af.placeholder("float32", (None,), name="x")
    with pytest.raises(af.FeedError, match=rf"(?s)cannot feed x:0: expected float32\[\?\], got a Tensor: {reason}"):
        await run(x + 1, {x: make()})


async def test_tensors_are_arguments() -> None:
    traces: list[tuple[Any, Any]] = []

    @af.function
    def doubled(x: Any) -> Any:
        traces.append((x.dtype, x.shape))
        return x + x

    for tensor in (torch.ones(3), torch.zeros(5), np.ones(2, np.float32)):
        np.testing.assert_array_equal(await doubled(tensor), 2 * np.asarray(tensor))
    assert traces == [(np.float32, (None,))], "the same graph serves all of them"
    bits = await doubled(torch.ones(2, dtype=torch.bfloat16))
    assert bits.dtype == np.dtype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(await doubled(OnlyDLPackArgument(torch.ones(2))), [2, 2])
    with pytest.raises(af.FeedError, match=r"doubled: argument x: .*it requires grad.*\.detach\(\)"):
        await doubled(torch.ones(2, requires_grad=True))


class OnlyDLPackArgument(OnlyDLPack):
    """Not to be compared, hashed or read in another way."""

    __hash__ = None  # type: ignore[assignment]


async def test_fetches_are_read_without_a_copy(run: Run, graph: af.Graph) -> None:
    x = af.placeholder("float32", (None,))
    value, total = await run([af.on_device(x * 2), af.on_device(af.sum(x))], {x: torch.ones(4)})
    tensor = torch.from_dlpack(value)
    assert tensor.data_ptr() == value.ctypes.data and tensor.tolist() == [2, 2, 2, 2]
    assert torch.from_dlpack(total).item() == 4
