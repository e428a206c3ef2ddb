"""The frame of the Array API standard: what a namespace says of itself, and what its arrays say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af


def test_version_and_namespace() -> None:
    with af.Graph():
        x = af.ones((2, 3))
        assert af.__array_api_version__ == "2024.12"
        assert x.__array_namespace__() is af
        assert x.__array_namespace__(api_version=af.__array_api_version__) is af
        assert af.Variable(1.0).__array_namespace__() is af
        with pytest.raises(af.GraphError, match=r"no Array API '1999\.1' here; asyncflow has 2024\.12"):
            x.__array_namespace__(api_version="1999.1")


def test_info() -> None:
    info = af.__array_namespace_info__()
    assert info.capabilities()["data-dependent shapes"]
    assert info.default_device() is None
    assert "cpu:0" in info.devices()
    assert info.default_dtypes() == {
        "real floating": af.float64,
        "complex floating": af.complex128,
        "integral": af.int64,
        "indexing": af.int64,
    }
    assert info.dtypes(kind="bool") == {"bool": af.bool}
    assert set(info.dtypes(kind=("signed integer", "real floating"))) == {
        *("int8", "int16", "int32", "int64", "float32", "float64")
    }
    assert len(info.dtypes()) == 13
    with pytest.raises(af.DTypeError, match="nonsense"):
        info.dtypes(kind="nonsense")


def test_size_of_tensors() -> None:
    with af.Graph():
        assert af.placeholder("float32", (2, 3)).size == 6
        assert af.placeholder("float32", ()).size == 1
        assert af.placeholder("float32", (2, None)).size is None
        assert af.placeholder("float32").size is None


MADE: list[Callable[..., af.Tensor]] = [
    lambda **at: af.arange(3, **at),
    lambda **at: af.asarray([1.0], **at),
    lambda **at: af.asarray(af.ones(2), **at),
    lambda **at: af.empty(2, **at),
    lambda **at: af.empty_like([1.0], **at),
    lambda **at: af.eye(2, **at),
    lambda **at: af.from_dlpack(np.ones(2), **at),
    lambda **at: af.full(2, 1.0, **at),
    lambda **at: af.full_like([1.0], 2.0, **at),
    lambda **at: af.full_like(af.placeholder("float32", (None,)), 2.0, **at),
    lambda **at: af.linspace(0, 1, 3, **at),
    lambda **at: af.ones(2, **at),
    lambda **at: af.ones_like([1.0], **at),
    lambda **at: af.zeros(2, **at),
    lambda **at: af.zeros_like([1.0], **at),
    lambda **at: af.astype(af.ones(2), "float64", **at),
    lambda **at: af.astype(af.ones(2), "float32", **at),
]


@pytest.mark.parametrize("make", MADE)
def test_device_argument(make: Callable[..., af.Tensor]) -> None:
    with af.Graph():
        assert make().device is None
        assert make(device=None).device is None
        assert make(device="cuda:1").device == "cuda:1"
        with af.device("cpu"):
            assert make(device=None).device == "cpu"
        with pytest.raises(af.GraphError, match=r"device\('GPU 0'\)"):
            make(device="GPU 0")


async def test_to_device() -> None:
    with af.Graph() as graph:
        x = af.constant([1.0, 2.0])
        y = x.to_device("cpu:0")
        assert (x.device, y.device) == (None, "cpu:0")
        with pytest.raises(af.GraphError, match="sessions order streams themselves"):
            x.to_device("cpu:0", stream=1)  # type: ignore[arg-type]
    async with af.Session(graph) as session:
        assert (await session.run(y)).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("make", [af.zeros, af.ones, af.empty, af.eye])
def test_no_dtype_is_the_default_one(make: Callable[..., af.Tensor]) -> None:
    with af.Graph():
        assert make(2, dtype=None).dtype == af.float64


BAD_AXES: list[Callable[[Any], Any]] = [
    lambda x: af.sum(x, axis=2),
    lambda x: af.sum(x, axis=(0, 0)),
    lambda x: af.argmax(x, axis=-3),
    lambda x: af.concat([x, x], axis=2),
    lambda x: af.expand_dims(x, 4),
    lambda x: af.expand_dims(x, axis=-4),
    lambda x: af.flip(x, axis=2),
    lambda x: af.roll(x, 1, axis=2),
    lambda x: af.sort(x, axis=2),
    lambda x: af.squeeze(x, 5),
    lambda x: af.stack([x, x], axis=4),
    lambda x: af.unstack(x, axis=2),
    lambda x: af.take(x, [0], axis=2),
    lambda x: af.moveaxis(x, 2, 0),
    lambda x: af.softmax(x, axis=2),
    lambda x: af.cumulative_sum(x, axis=2),
    lambda x: af.permute_dims(x, (0, 2)),
]


@pytest.mark.parametrize("build", BAD_AXES)
def test_bad_axes_are_index_errors(build: Callable[[Any], Any]) -> None:
    with af.Graph():
        x = af.ones((2, 3))
        with pytest.raises(IndexError) as caught:
            build(x)
    assert isinstance(caught.value, af.AxisError)
    assert isinstance(caught.value, af.ShapeError)
