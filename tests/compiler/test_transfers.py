"""`Session(transfer_dtype="bfloat16")`: float32 values go between devices as their upper 16 bits (white paper §5.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.program.kernels.transfers import EXPAND, TRUNCATE
from asyncflow.testing import virtual_clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncflow.values import Kernel

DEVICES = ["cpu:0", "cpu:1"]


def bits(*numbers: int) -> np.ndarray[Any, Any]:
    return np.array(numbers, np.uint32).view(np.float32)


def upper_half(value: Any) -> Any:
    """Return the expected value: the lower 16 bits are zero."""
    return (np.asarray(value, np.float32).view(np.uint32) & np.uint32(0xFFFF_0000)).view(np.float32)


def there_and_back(value: Any) -> Any:
    """`value` in its short form, as it comes out of it."""
    kernels: list[Kernel | None] = [None if op.kernel is None else op.kernel(np) for op in (TRUNCATE, EXPAND)]
    truncate, expand = kernels
    assert truncate is not None
    assert expand is not None
    short = truncate(value)
    assert (short.dtype, short.shape) == (np.uint16, value.shape)
    return expand(short)


def assert_same_bits(actual: Any, expected: Any) -> None:
    assert (actual.dtype, actual.shape) == (np.float32, np.shape(expected))
    assert actual.tobytes() == np.asarray(expected, np.float32).tobytes()


# -- the short form --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        pytest.param([0.0, -0.0], id="zeros keep their signs"),
        pytest.param([np.inf, -np.inf], id="infinities"),
        pytest.param([1.0, -2.5, 3.0e38, 2.0**-126, 255.0 * 2.0**120], id="of up to 8 bits of precision"),
        pytest.param(bits(0x0001_0000, 0x8040_0000, 0x007F_0000), id="denormals of few bits"),
        pytest.param(np.zeros((2, 0, 3)), id="nothing at all"),
    ],
)
def test_what_fits_arrives_as_it_was(value: Any) -> None:
    exact = upper_half(value)
    assert_same_bits(there_and_back(exact), exact)


def test_these_values_do_fit() -> None:
    """So that the test above is one of values and not only of bits."""
    assert upper_half(1.0) == 1.0
    assert upper_half([np.inf, -2.5]).tolist() == [np.inf, -2.5]


def test_the_rest_loses_its_lower_bits() -> None:
    """Towards zero; a denormal that has only lower bits becomes a zero of its sign."""
    value = bits(0x3F80_FFFF, 0xBF80_8001, 0x7F7F_FFFF, 0x0000_FFFF, 0x8000_0001)
    assert_same_bits(there_and_back(value), bits(0x3F80_0000, 0xBF80_0000, 0x7F7F_0000, 0, 0x8000_0000))


def test_the_precision_is_8_bits() -> None:
    value = np.random.default_rng(3).normal(size=1000).astype(np.float32)
    arrived = there_and_back(value)
    assert_same_bits(arrived, upper_half(value))
    assert np.all(np.abs(arrived) <= np.abs(value))
    assert np.max(np.abs(arrived - value) / np.abs(value)) < 2.0**-7


@pytest.mark.parametrize("number", [0x7FC0_0000, 0xFFC0_0000, 0x7F80_0001, 0xFF80_FFFF, 0x7FBF_FFFF])
def test_nan_stays_nan_whichever_of_its_bits_are_set(number: int) -> None:
    """A NaN that differs from infinity only in its lower half stays NaN, too; and NaN keeps its sign."""
    arrived = there_and_back(bits(number))
    assert np.isnan(arrived).all()
    assert bool(np.signbit(arrived[0])) is bool(number >> 31)


def test_the_layout_does_not_matter() -> None:
    value = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-3].T * np.float32(1.001)
    assert not value.flags.c_contiguous
    assert_same_bits(there_and_back(value), upper_half(value))


# -- sessions --------------------------------------------------------------------------------------------------------


async def over_two_devices(graph: af.Graph, make: Callable[[af.Tensor], af.Tensor], value: Any) -> Any:
    """`make` of a value on cpu:0, used as it is on cpu:1."""
    x = af.placeholder(value.dtype.name, value.shape)
    with af.device("cpu:0"):
        here = make(x)
    with af.device("cpu:1"):
        there = af.stack([here, here])
    async with af.Session(graph, devices=DEVICES, transfer_dtype="bfloat16", debug=True) as session:
        return (await session.run(there, {x: value}))[1]


@pytest.mark.parametrize("shape", [(), (5,), (3, 1, 2)])
async def test_float32_is_shortened(graph: af.Graph, shape: tuple[int, ...]) -> None:
    value = np.full(shape, 0.1, np.float32)
    arrived = await over_two_devices(graph, af.negative, value)
    assert_same_bits(arrived, upper_half(-value))
    assert not np.array_equal(arrived, -value)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(np.array([0.1, 1 / 3]), id="float64"),
        pytest.param(np.array([0.1 + 0.3j], np.complex64), id="complex64"),
        pytest.param(np.array([0x1234_5678, -1], np.int32), id="int32"),
        pytest.param(np.array([0xFFFF, 0x1234], np.uint16), id="uint16"),
        pytest.param(np.array([2**62 + 1]), id="int64"),
    ],
)
async def test_nothing_else_is(graph: af.Graph, value: Any) -> None:
    arrived = await over_two_devices(graph, lambda x: x * x, value)
    assert arrived.dtype == value.dtype
    assert arrived.tobytes() == (value * value).tobytes()


async def test_values_that_stay_on_their_device_are_not(graph: af.Graph) -> None:
    """Neither are fed and fetched ones, nor constants, which are on every device from the start."""
    value = np.array([0.1, 1 / 3], np.float32)
    x = af.placeholder("float32", (2,))
    with af.device("cpu:0"):
        made = x * value
        used_here = made + value
    with af.device("cpu:1"):
        used_there = made + value
        fed_there = x + value
    fetches = [made, used_here, used_there, fed_there]
    async with af.Session(graph, devices=DEVICES, transfer_dtype="bfloat16", debug=True) as session:
        got = await session.run(fetches, {x: value})
    product = value * value
    for actual, expected in zip(
        got, [product, product + value, upper_half(product) + value, value + value], strict=True
    ):
        assert_same_bits(actual, expected)


async def test_a_loop_variable_is_shortened_in_every_iteration(graph: af.Graph) -> None:
    start = np.full(4, 1.1, np.float32)

    def body(i: af.Tensor, x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        with af.device("cpu:0"):
            grown = x * np.float32(1.01)
        with af.device("cpu:1"):
            return i + 1, grown + np.float32(0.01)

    result = af.while_loop(lambda i, _: i < 5, body, (0, start))[1]
    async with af.Session(graph, devices=DEVICES, transfer_dtype="bfloat16", debug=True) as session:
        got = await session.run(result)
    x = start
    for _ in range(5):  # the variable is on cpu:1, where its next value is made: it goes there and back
        x = upper_half(upper_half(x) * np.float32(1.01)) + np.float32(0.01)
    assert_same_bits(got, x)


def test_it_takes_half_the_bytes_and_half_the_time_of_the_link() -> None:
    """4 MB over PCIe, which takes far longer than making the short form of it."""

    def simulate(transfer_dtype: str | None) -> tuple[list[int], list[int]]:
        trace = af.Trace()
        with af.Graph() as graph, virtual_clock("2 x v100, pcie3", shapes_only=True) as clock:
            x = af.placeholder("float32", (1024, 1024))
            with af.device("sim:0"):
                here = x + x
            with af.device("sim:1"):
                there = af.sum(here)

            async def main() -> None:
                async with af.Session(
                    graph, devices=["sim:0", "sim:1"], transfer_dtype=transfer_dtype, debug=True
                ) as session:
                    await session.run(there, {x: np.ones((1024, 1024), np.float32)}, trace=trace)

            clock.run(main())
            assert clock.machine.hazards == []
        (transfer,) = trace.transfers
        copies = [
            firing.ended_ns - firing.started_ns
            for firing in trace.firings
            if firing.device == "sim:1" and firing.stream in ("h2d", "peer") and firing.node == transfer.node
        ]
        return [transfer.nbytes], copies

    full_bytes, full_times = simulate(None)
    short_bytes, short_times = simulate("bfloat16")
    assert (full_bytes, short_bytes) == ([4 << 20], [2 << 20])
    assert len(full_times) == len(short_times) == 1
    assert short_times[0] == pytest.approx(full_times[0] / 2, rel=0.1)


# -- the option ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["float16", "bf16", "float32", "", 16, True, np.float16])
def test_there_is_one_short_form(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"transfer_dtype is None or 'bfloat16'; got ") as caught:
        af.Session(transfer_dtype=wrong)
    assert repr(wrong) in str(caught.value)
