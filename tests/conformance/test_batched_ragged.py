"""Members whose arguments differ in an extent share calls, padded or side by side, with the results of single calls."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from tests.conftest import OpenSession

WEIGHTS = np.linspace(-1, 1, 6).reshape(2, 3)


def masked(x: af.Tensor, y: af.Tensor, lengths: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
    """A function of rows [n, 2] and a scalar: as many rows of 3, and the largest of their elements."""
    is_own = (af.arange(af.shape(x)[0]) < lengths)[:, None]
    rows = af.tanh(x @ WEIGHTS) * y
    return rows, af.max(af.where(is_own, rows, -np.inf))


def masked_of(x: np.ndarray[Any, Any], y: float) -> tuple[Any, Any]:
    rows = np.tanh(x @ WEIGHTS) * y
    return rows, rows.max(initial=-np.inf)


def packed(x: af.Tensor, y: af.Tensor, offsets: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
    """As `masked`, of the rows of all members, [total, 2], and their scalars, [members]."""
    ids = af.searchsorted(offsets[1:], af.arange(af.shape(x)[0]), side="right")
    rows = af.tanh(x @ WEIGHTS) * y[ids][:, None]
    return rows, af.segment_sum(af.sum(rows, axis=1), ids, af.shape(y)[0])


def packed_of(x: np.ndarray[Any, Any], y: float) -> tuple[Any, Any]:
    rows = np.tanh(x @ WEIGHTS) * y
    return rows, rows.sum()


WAYS: dict[str, Any] = {
    "pad": (masked, masked_of, {"pad": 7.5}),
    "bucket": (masked, masked_of, {"bucket": (2, 4)}),
    "function": (masked, masked_of, {"bucket": lambda length: -(-length // 3) * 3, "pad": -1}),
    "packed": (packed, packed_of, {"ragged": "packed"}),
}


@pytest.mark.parametrize("way", WAYS)
async def test_lengths_share_calls(open_session: OpenSession, way: str) -> None:
    """Fault F42: each result is that of the member alone, of its own length."""
    fn, by_hand, options = WAYS[way]
    with af.Graph() as graph:
        x, y = af.placeholder("float64", (None, 2), name="x"), af.placeholder("float64", (), name="y")
        fetches = af.batched(fn, cost="none", **options)(x, y)
    assert [x.shape for x in fetches] == [(None, 3), ()]
    rng = np.random.default_rng(3)
    members = [(rng.normal(size=(length, 2)), rng.normal()) for length in (1, 3, 4, 3, 9, 2, 1, 4)]
    async with open_session(graph) as session:
        alone = [await session.run(fetches, {x: members[1][0], y: members[1][1]})]
        found = await asyncio.gather(*(session.run(fetches, {x: rows, y: scalar}) for rows, scalar in members))
        await asyncio.gather(*(session.run(fetches, {x: rows, y: scalar}) for rows, scalar in members))
        (counts,) = session.statistics().batches.values()
    for (rows, scalar), results in zip([members[1], *members], alone + found, strict=True):
        for result, expected in zip(results, by_hand(rows, scalar), strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-12)
            assert np.shape(result) == np.shape(expected)
    assert counts.members == 17
    assert counts.largest >= 3
    assert counts.failed == 0


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from(sorted(WAYS))), max_size=12))
async def test_random_lengths(requests: list[tuple[int, int, str]]) -> None:
    """Fault F42: random lengths, none among them, arrive and are cancelled at random."""
    with af.Graph() as graph:
        x, y = af.placeholder("float64", (None, 2), name="x"), af.placeholder("float64", (), name="y")
        # What is exact is equal bit for bit.
        shared = {
            way: af.batched(lambda x, y, lengths: x * 3 + y, cost="none", **WAYS[way][2])(x, y)
            for way in WAYS
            if way != "packed"
        }
        shared["packed"] = af.batched(lambda x, y, offsets: x * 3 + 2, ragged="packed", cost="none")(x, y)
    async with af.Session(graph) as session:

        async def request(length: int, turns: int, way: str) -> None:
            rows = np.arange(2.0 * length).reshape(length, 2)
            for _ in range(turns):
                await asyncio.sleep(0)
            run = asyncio.ensure_future(session.run(shared[way], {x: rows, y: 2.0}))
            if turns == 3:
                await asyncio.sleep(0)
                run.cancel()
                await asyncio.wait([run])
            else:
                np.testing.assert_array_equal(await run, rows * 3 + 2)

        await asyncio.gather(*(request(*each) for each in requests))


async def test_a_bucket_that_raises_fails_its_members_alone(open_session: OpenSession) -> None:
    """Fault F39, Behaviour 88: the other members have their results, and so do later ones."""

    def edge(length: int) -> Any:
        if length == 5:
            raise ValueError("five")
        return "eight" if length == 6 else 8

    with af.Graph() as graph:
        x = af.placeholder("float64", (None,), name="x")
        y = af.batched(lambda x, lengths: af.sum(x), bucket=edge, cost="none")(x)
    async with open_session(graph) as session:
        for _ in range(2):
            runs = [session.run(y, {x: np.ones(length)}) for length in range(1, 8)]
            found = await asyncio.gather(*runs, return_exceptions=True)
            for length, result in enumerate(found, 1):
                if length in (5, 6):
                    assert isinstance(result, af.KernelError), result
                    assert ("five" if length == 5 else "gave 'eight'") in str(result)
                    assert "test_batched_ragged.py" in str(result)
                else:
                    assert result == length
            del found, result


async def test_functions_of_users_are_told(open_session: OpenSession) -> None:
    """`@op(batch=)` gives lengths and offsets as the last argument."""
    seen: list[tuple[Any, ...]] = []

    @af.op(outputs=af.spec("float64", (None,)), batch=af.Batch(pad=9, cost="none"))
    def double(x: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        seen.append((x.shape, tuple(lengths)))
        return np.where(np.arange(x.shape[1]) < lengths[:, None], 2 * x, np.nan)

    @af.op(outputs=(af.spec("float64", (None,)), af.spec("float64", ())), batch=af.Batch(ragged="packed", cost="none"))
    def ranks(x: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
        seen.append((x.shape, tuple(offsets)))
        least = np.array([x[a:b].min() for a, b in pairwise(offsets)])
        return np.concatenate([x[a:b] - low for low, (a, b) in zip(least, pairwise(offsets), strict=True)]), least

    with af.Graph() as graph:
        x = af.placeholder("float64", (None,), name="x")
        doubled, (ranked, least) = double(x), ranks(x)
    async with open_session(graph) as session:
        for fetch, expected in [(doubled, lambda x: 2 * x), (ranked, lambda x: x - x.min())]:
            members = [np.arange(length) + 1.0 for length in (2, 4, 1)]
            found = await asyncio.gather(*(session.run(fetch, {x: rows}) for rows in members))
            for rows, result in zip(members, found, strict=True):
                np.testing.assert_array_equal(result, expected(rows))
        assert await session.run(least, {x: np.array([3.0, 2.0])}) == 2
    assert max(len(told) for _, told in seen) >= 2
    assert all(shape[-1] in (max(told), told[-1]) for shape, told in seen)


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("is_packed", [True, False])
async def test_a_result_of_another_length(open_session: OpenSession, is_packed: bool, runs: int) -> None:
    """Fault F41: rows of which it is not known whose they are fail with the lengths, and alone too."""
    batch = af.Batch(ragged="packed", cost="none") if is_packed else af.Batch(pad=0, cost="none")

    @af.op(outputs=af.spec("float64", (None,)), batch=batch, pure=True)
    def fewer(x: np.ndarray[Any, Any], told: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return x[..., :-1]

    with af.Graph() as graph:
        x = af.placeholder("float64", (None,), name="x")
        y = fewer(x)
    async with open_session(graph) as session:
        found = await asyncio.gather(*(session.run(y, {x: np.ones(5)}) for _ in range(runs)), return_exceptions=True)
        for result in found:
            assert isinstance(result, af.KernelError)
            assert "has extent 4 where there are 5 rows or members: whose part is whose is not known" in str(result)
        del found, result


async def test_several_extents_and_strings(open_session: OpenSession) -> None:
    def fn(words: af.Tensor, table: af.Tensor, lengths: af.Tensor) -> tuple[af.Tensor, ...]:
        return words, table + 1, lengths, af.equal(words, "")

    with af.Graph() as graph:
        words, table = af.placeholder("string", (None,), name="words"), af.placeholder("int64", (None, None), name="t")
        fetches = af.batched(fn, pad=None, bucket=(2, 4), cost="none")(words, table)
    members = [(["a"], (1, 2)), (["b", "c"], (2, 1)), (["d"], (2, 2))]
    async with open_session(graph) as session:
        found = await asyncio.gather(
            *(session.run(fetches, {words: given, table: np.ones(shape, np.int64)}) for given, shape in members)
        )
        assert session.statistics().batches["fn"].largest >= 2
    for (given_, shape), (same, more, lengths, are_blank) in zip(members, found, strict=True):
        assert list(same) == given_
        np.testing.assert_array_equal(more, np.full(shape, 2))
        assert list(lengths) == [len(given_), *shape]
        assert not are_blank.any()


def test_what_cannot_be_joined_is_named() -> None:
    with af.Graph():
        x, fixed = af.placeholder("float64", (None,), name="x"), af.placeholder("float64", (3,), name="fixed")
        own, any_rank = af.placeholder("float64", (), name="own"), af.placeholder("float64", None, name="any")
        counts = af.placeholder("int64", (None,), name="counts")
        cases: list[tuple[Any, Any, str]] = [
            (af.batched(lambda x, lengths: x, pad=0), fixed, "all extents of its arguments are fixed"),
            (af.batched(lambda x, lengths: x, pad=0), any_rank, "whose rank is not known"),
            (af.batched(lambda x, lengths: x, pad=0.5), counts, "int64, which cannot be padded with 0.5"),
            (af.batched(lambda x, lengths: x, pad="a"), counts, "int64, which cannot be padded with 'a'"),
            (af.batched(lambda x, lengths: af.concat([x, x]), pad=0), x, "extent 0 of result 0, float64"),
            (af.batched(lambda x, offsets: af.sum(x), ragged="packed"), x, "no member's part is known"),
            (af.batched(lambda x, offsets: x * own, ragged="packed"), x, "own:0, which it captures, is each run's own"),
        ]
        for fn, given_, message in cases:
            with pytest.raises(af.GraphError, match=message) as caught:
                fn(given_)
            assert "test_batched_ragged.py" in str(caught.value)
        table = af.placeholder("float64", (2, None), name="table")
        with pytest.raises(af.GraphError, match="differ in the first extent alone"):
            af.batched(lambda x, offsets: x, ragged="packed")(table)
        with pytest.raises(af.GraphError, match="written for packed rows"):
            af.map_fn(af.batched(lambda x, offsets: x, ragged="packed"), table, lift=True)
        padded = af.batched(lambda x, lengths: af.sum(x) / af.astype(lengths, "float64"), pad=0)
        assert af.map_fn(padded, table, lift=True).shape == (2,)
    with pytest.raises(af.GraphError, match="need a function with a parameter lengths="):
        af.batched(lambda x: x, pad=0)
    with pytest.raises(af.GraphError, match="needs a function with a parameter offsets="):
        af.batched(lambda x: x, ragged="packed")


@pytest.mark.parametrize(
    "options",
    [
        {"bucket": (4, 2)},
        {"bucket": ()},
        {"bucket": (0, 2)},
        {"bucket": 3},
        {"bucket": (1.5,)},
        {"pad": [0]},
        {"ragged": "yes"},
        {"ragged": "packed", "pad": 0},
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(af.GraphError, match=next(iter(options))):
        af.Batch(**options)
