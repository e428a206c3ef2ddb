"""`scaled_dot_product_attention`, against NumPy with all scores at once, and by the checks of ops."""

from __future__ import annotations

import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.nn import attention
from asyncflow.testing import check_op
from tests.fake_cupy.stand_in import stand_in

Run = Callable[..., Awaitable[Any]]

RNG = np.random.default_rng(8)
BATCH, HEADS, LENGTH, KEYS, WIDTH = 2, 4, 5, 7, 3
QUERY = RNG.standard_normal((BATCH, HEADS, LENGTH, WIDTH))
KEY = RNG.standard_normal((BATCH, HEADS, KEYS, WIDTH))
VALUE = RNG.standard_normal((BATCH, HEADS, KEYS, 2))
LENGTHS = np.array([3, 7])
SEEN = RNG.random((BATCH, 1, LENGTH, KEYS)) > 0.4
BIAS = RNG.standard_normal((HEADS, LENGTH, KEYS))

attend = af.nn.scaled_dot_product_attention

CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, 0.0),
    "scale": ({"scale": 0.3}, 0.0),
    "causal": ({"is_causal": True}, np.where(np.tril(np.ones((LENGTH, KEYS))), 0, -np.inf)),
    "seen": ({"attn_mask": SEEN}, np.where(SEEN, 0, -np.inf)),
    "bias": ({"attn_mask": BIAS}, BIAS),
    "lengths": ({"lengths": LENGTHS}, np.where(np.arange(KEYS) < LENGTHS[:, None, None, None], 0, -np.inf)),
}


def by_numpy(q: np.ndarray, k: np.ndarray, v: np.ndarray, added: Any = 0.0, scale: float | None = None) -> np.ndarray:
    each = q.shape[-3] // k.shape[-3]
    k, v = np.repeat(k, each, axis=-3), np.repeat(v, each, axis=-3)
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale) + added
    with np.errstate(invalid="ignore"):
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.nan_to_num(powers / powers.sum(axis=-1, keepdims=True)) @ v


@pytest.fixture(params=[16, 300, 1 << 20])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK_BYTES", request.param)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [HEADS, 2])
@pytest.mark.usefixtures("graph", "block_bytes")
async def test_attention(run: Run, case: str, heads: int) -> None:
    options, added = CASES[case]
    k, v = KEY[:, :heads], VALUE[:, :heads]
    found = await run(attend(QUERY, k, v, enable_gqa=heads < HEADS, **options))
    np.testing.assert_allclose(found, by_numpy(QUERY, k, v, added, options.get("scale")), rtol=1e-12)


@pytest.mark.parametrize("length", [-1, 0, 2, KEYS, KEYS + 3])
async def test_keys_past_the_length_of_a_single_example_are_not_read(run: Run, length: int) -> None:
    """A cache with room has anything behind its filled part, and the scores there are not computed."""
    q, k, v = QUERY[0], KEY[0].copy(), VALUE[0].copy()
    seen = min(max(length, 0), KEYS)
    k[:, seen:] = v[:, seen:] = np.nan
    with af.Graph():
        lengths = af.placeholder("int64", ())
        found = await run(attend(q, k, v, lengths=lengths), {lengths: length})
        wanted = await run(attend(q, k[:, :seen], v[:, :seen]))
    np.testing.assert_array_equal(found, wanted)


def test_a_step_over_caches_copies_none_of_them() -> None:
    """Also where heads are the last axis but one, as they lie when a cache is ``[room, heads, width]``."""
    cache = np.random.default_rng(1).standard_normal((2, 4096, 4, 16)).swapaxes(1, 2)
    query, lengths = cache[:, :, :1].copy(), np.array([40, 60])
    kernel = attention._kernel(np, causal=False, scale=0.3, masked=False)
    wanted = kernel(query, cache.copy(), cache.copy(), lengths)
    tracemalloc.start()
    found = kernel(query, cache, cache, lengths)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert peak < cache.nbytes / 20


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_rows(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK_BYTES", 300)
    options = dict(CASES[case][0])
    mask, lengths = options.pop("attn_mask", None), options.pop("lengths", None)
    further = [x for x in (mask, lengths) if x is not None]

    def op(q: af.Tensor, k: af.Tensor, v: af.Tensor, *rest: af.Tensor) -> af.Tensor:
        left = list(rest)
        seen = left.pop(0) if mask is not None else None
        return attend(q, k, v, seen, lengths=left[0] if left else None, scale=0.4, enable_gqa=True, **options)

    options.pop("scale", None)
    left_out = check_op(op, QUERY, KEY[:, :2], VALUE[:, :2], *further)
    assert all("open extents" in each for each in left_out)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("graph")
async def test_gradients_of_gradients(run: Run, case: str) -> None:
    options = CASES[case][0]
    q, k, v = xs = [af.placeholder("float64", x.shape) for x in (QUERY, KEY, VALUE)]
    feeds = dict(zip(xs, (QUERY, KEY, VALUE), strict=True))

    def norm(y: af.Tensor) -> list[af.Tensor]:
        first = [g for g in af.gradients(af.sum(y**3), xs) if g is not None]
        return [g for g in af.gradients(sum(af.sum(g * g) for g in first), xs) if g is not None]

    attrs = {"causal": options.get("is_causal", False), "scale": options.get("scale", WIDTH**-0.5)}
    rest = [af.constant(options[name]) for name in ("attn_mask", "lengths") if name in options]
    if "attn_mask" in options:
        rest[0] = af.reshape(rest[0], (1,) * (4 - len(rest[0].shape or ())) + (rest[0].shape or ()))
    plain = attention._of_ops({**attrs, "masked": "attn_mask" in options}, q, k, v, *rest)
    found, wanted = await run([norm(attend(q, k, v, **options)), norm(plain)], feeds)
    for y, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.usefixtures("graph")
async def test_dtypes(run: Run, dtype: str) -> None:
    parts = [af.astype(x, dtype) for x in (QUERY, KEY, VALUE)]
    found = await run(attend(*parts))
    assert found.dtype == af.DType(dtype) if dtype != "bfloat16" else found.dtype.name == dtype
    np.testing.assert_allclose(
        np.asarray(found, np.float64), by_numpy(QUERY, KEY, VALUE), rtol=0.03 if dtype != "float32" else 1e-5, atol=0.03
    )


@pytest.mark.usefixtures("graph")
async def test_a_query_that_sees_no_key_gives_zeros(run: Run) -> None:
    mask = np.ones((LENGTH, KEYS), bool)
    mask[1] = False
    x = af.placeholder("float64", QUERY.shape)
    y = attend(x, KEY, VALUE, mask)
    found, grad, none = await run(
        [y, af.gradients(af.sum(y), x), attend(x, KEY, VALUE, lengths=np.zeros(BATCH, int))], {x: QUERY}
    )
    assert not found[:, :, 1].any()
    assert not grad[:, :, 1].any()
    assert np.isfinite(grad).all()
    assert not none.any()


@pytest.mark.parametrize("sizes", [(0, 2, 3), (2, 0, 3), (2, 3, 0)], ids=str)
@pytest.mark.usefixtures("graph")
async def test_empty_inputs(run: Run, sizes: tuple[int, int, int]) -> None:
    batch, length, keys = sizes
    q = af.placeholder("float32", (None, 1, None, 4))
    k = af.placeholder("float32", (None, 1, None, 4))
    feeds = {q: np.ones((batch, 1, length, 4), np.float32), k: np.ones((batch, 1, keys, 4), np.float32)}
    y = attend(q, k, k, is_causal=True)
    found, *grads = await run([y, *af.gradients(af.sum(y), [q, k])], feeds)
    assert found.shape == (batch, 1, length, 4)
    assert not found.any()
    assert [g.shape for g in grads] == [feeds[q].shape, feeds[k].shape]


@pytest.mark.usefixtures("graph")
async def test_without_heads(run: Run) -> None:
    found = await run(attend(QUERY[0, 0], KEY[0, 0], VALUE[0, 0], is_causal=True))
    np.testing.assert_allclose(
        found, by_numpy(QUERY[:1, 0], KEY[:1, 0], VALUE[:1, 0], CASES["causal"][1])[0], rtol=1e-12
    )


def test_memory_grows_with_the_length_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All scores of 1,024 queries and keys take 4 MiB."""
    monkeypatch.setattr(attention, "BLOCK_BYTES", 1 << 16)
    q = RNG.standard_normal((1, 1, 1024, 8)).astype(np.float32)
    attrs = {"causal": False, "scale": 1.0, "masked": False}
    for kernel, inputs in ((attention._attend, (q, q, q)), (attention._gradient, (q, q, q, q))):
        tracemalloc.start()
        kernel(np, attrs, *inputs)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20


def test_scores_of_unseen_keys_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK_BYTES", 1 << 12)
    q = RNG.standard_normal((2, 1, 64, 8))
    attrs = {"causal": False, "scale": 1.0, "masked": False}

    def computed(further: list[np.ndarray], **options: Any) -> int:
        blocks = attention._Blocks(np, {**attrs, **options}, q, q, q, *further)
        return sum(probabilities.size for *_, probabilities in blocks)

    assert computed([]) == 2 * 64 * 64
    assert computed([], causal=True) == 2 * sum(8 * stop for stop in range(8, 65, 8))
    assert computed([np.array([5, 64])]) == 64 * 5 + 64 * 64


@pytest.mark.parametrize("case", CASES)
async def test_on_a_card(graph: af.Graph, case: str) -> None:
    x = af.placeholder("float64", QUERY.shape)
    y = attend(x, KEY, VALUE, **CASES[case][0])
    grad = af.gradients(af.sum(y * y), x)
    async with af.Session(graph) as session:
        wanted = await session.run([y, grad], {x: QUERY})
    with stand_in(nbytes=16 << 20):
        async with af.Session(graph, devices=["cuda:0"]) as session:
            found = await session.run([y, grad], {x: QUERY})
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


# -- mistakes --------------------------------------------------------------------------------------------------------

MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: attend(QUERY, KEY.astype(np.float32), VALUE), af.DTypeError, "are floats of one dtype"),
    (lambda: attend(QUERY.astype(int), KEY.astype(int), VALUE.astype(int)), af.DTypeError, "are floats of one dtype"),
    (lambda: attend(QUERY, KEY[0], VALUE), af.ShapeError, "have one rank, 2 at least"),
    (lambda: attend(QUERY[..., :2], KEY, VALUE), af.ShapeError, "queries are as wide as keys"),
    (lambda: attend(QUERY, KEY, VALUE[:, :, 1:]), af.ShapeError, "there is a value for each key"),
    (lambda: attend(QUERY, KEY[:, :2], VALUE[:, :2]), af.ShapeError, "with enable_gqa=True several heads of queries"),
    (
        lambda: attend(QUERY, KEY[:, :3], VALUE[:, :3], enable_gqa=True),
        af.ShapeError,
        "the heads of queries are a multiple of the heads of keys",
    ),
    (lambda: attend(QUERY, KEY, VALUE, SEEN.astype(int)), af.DTypeError, "attn_mask is bool, or float64"),
    (lambda: attend(QUERY, KEY, VALUE, SEEN[..., 1:]), af.GraphError, "attn_mask|broadcast"),
    (lambda: attend(QUERY, KEY, VALUE, SEEN[None]), af.ShapeError, r"attn_mask broadcasts to \[2,4,5,7\]"),
    (lambda: attend(QUERY, KEY, VALUE, lengths=[1.0, 2.0]), af.ShapeError, "lengths are integers of shape"),
    (lambda: attend(QUERY, KEY, VALUE, lengths=[1, 2, 3]), af.ShapeError, r"lengths are integers of shape \[2\]"),
    (lambda: attend(QUERY, KEY, VALUE, is_causal=1), af.GraphError, "is_causal is True or False"),  # type: ignore[arg-type]
    (
        lambda: attend(*[af.placeholder("float32", (2, 3, None))] * 3),
        af.ShapeError,
        "is not known; pass scale=",
    ),
]


@pytest.mark.parametrize(("build", "error", "message"), MISTAKES)
@pytest.mark.usefixtures("graph")
def test_mistakes(build: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


@pytest.mark.usefixtures("graph")
async def test_a_mask_with_nan(run: Run) -> None:
    with pytest.raises(af.KernelError, match="attn_mask has NaN"):
        await run(attend(QUERY, KEY, VALUE, np.full((LENGTH, KEYS), np.nan)))
