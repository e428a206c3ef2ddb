"""`scaled_dot_product_attention`, in blocks: the scores of a few queries are there at a time, never all.

The kernel goes over blocks of queries. A block has the scores with all keys, so each softmax is taken at once, and no
sum has to be corrected later. The gradient computes the scores again, block by block. Gradients of gradients, and of
float masks, are made of ordinary ops instead, and hold all scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from asyncflow.autodiff.gradients import gradients
from asyncflow.errors import DTypeError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for, identity
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import NEW_UNCAPTURED, define, derivative
from asyncflow.graph.values.dtypes import bool_, dtype_name, float32
from asyncflow.graph.values.shapes import Shape, broadcast, format_shape, is_compatible
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import add, divide, exp, multiply, subtract
from asyncflow.ops.arithmetic.logic import greater_equal, isfinite, less
from asyncflow.ops.arrays.creation import arange
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.manipulation import expand_dims, repeat, reshape, squeeze
from asyncflow.ops.arrays.shape import extent_of
from asyncflow.ops.axes import check_flag
from asyncflow.ops.matrices.products import matmul, matrix_transpose
from asyncflow.ops.promotion import kind_of
from asyncflow.ops.reductions.statistical import max as max_of
from asyncflow.ops.reductions.statistical import sum as sum_of
from asyncflow.ops.rows.rule import LiftedValue, RowAxis, row_rule
from asyncflow.ops.searching.searching import where
from asyncflow.values import Array, Kernel, Namespace

BLOCK_BYTES = 1 << 19
"""Bytes of the scores of one block: with the arrays that are made of them they fit into a cache of the second level."""


class _Blocks:
    """Queries, keys and values of one call, and the probabilities of blocks of queries.

    Axes are brought to ``[items, queries per key, length, width]``: an item is a head of keys of one example.

    Attributes:
        parts: queries, keys and values in these axes.
    """

    def __init__(self, xp: Namespace, attrs: Attrs, q: Array, k: Array, v: Array, *rest: Array) -> None:
        self.xp, self.causal, self.scale = xp, attrs["causal"], attrs["scale"]
        heads = k.shape[-3]
        self.batch = (*q.shape[:-3], heads)
        items, each = math.prod(self.batch), q.shape[-3] // heads if heads else 1
        self.parts = (
            q.reshape(items, each, *q.shape[-2:]),
            k.reshape(items, 1, *k.shape[-2:]),
            v.reshape(items, 1, *v.shape[-2:]),
        )
        self.length, self.keys = q.shape[-2], k.shape[-2]
        self.mask = self.lengths = None
        left = list(rest)
        if attrs["masked"]:
            mask = left.pop(0)
            if xp is np and mask.dtype != bool and np.isnan(mask).any():
                raise ValueError("attn_mask has NaN; a float mask has -inf where a query does not see a key")
            whole = xp.broadcast_to(mask, (*q.shape[:-1], self.keys))
            self.mask = whole.reshape(*self.batch, each, *whole.shape[-2:])
        if left and xp is np and left[0].size == 1:  # of a single example, further keys are left out
            self.keys = min(self.keys, max(0, int(left[0].item())))
        elif left:
            self.lengths = xp.repeat(left[0].reshape(-1), heads)

    def __iter__(self) -> Iterator[tuple[slice, slice, slice, Array]]:
        """Yield items, queries, keys, and the probabilities of these keys, in float32 at least."""
        items, each = self.parts[0].shape[:2]
        # A block has whole items if several fit, else some queries of one item.
        row = max(1, each * self.keys * max(4, self.parts[0].dtype.itemsize))
        rows = max(1, min(self.length, BLOCK_BYTES // row))
        count = max(1, BLOCK_BYTES // (row * max(1, self.length))) if rows == self.length else 1
        for first in range(0, items, count):
            some = slice(first, min(items, first + count))
            # Reading lengths on a card would wait, so there all keys are computed, and masked.
            end = self.keys if self.lengths is None or self.xp is not np else int(self.lengths[some].max(initial=0))
            for begin in range(0, self.length, rows):
                queries = slice(begin, min(self.length, begin + rows))
                # Half of the causal scores are never computed.
                seen = slice(0, min(self.keys, end, queries.stop if self.causal else end))
                yield some, queries, seen, self._probabilities(some, queries, seen)

    def of(self, place: int, items: slice, part: slice) -> Array:
        """Return a block of queries (0), keys (1) or values (2), in float32 at least."""
        return self.wide(self.parts[place][items, :, part])

    def wide(self, x: Array) -> Array:
        """Return values of 16 bits in float32."""
        return x if x.dtype.itemsize >= float32.itemsize else x.astype(float32)

    def _probabilities(self, items: slice, queries: slice, seen: slice) -> Array:
        xp = self.xp
        q = self.of(0, items, queries)
        scores = xp.matmul(q * q.dtype.type(self.scale), self.of(1, items, seen).swapaxes(-1, -2))
        # The dtype's least number would mask as well, but would hide queries without keys.
        keys = xp.arange(seen.stop)
        # The first query of a block sees the keys up to its own number, so no key may need masking. The scores belong
        # to this block, and change in place, as no value is larger.
        if self.causal and seen.stop > queries.start + 1:
            scores = self._without(scores, keys > xp.arange(queries.start, queries.stop)[:, None])
        if self.lengths is not None:
            scores = self._without(scores, keys >= self.lengths[items][:, None, None, None])
        if self.mask is not None:
            mask = self._mask_of(items)[:, :, queries, seen]
            if mask.dtype == bool:
                scores = self._without(scores, ~mask)
            else:
                scores += mask
        if not seen.stop:  # an empty axis has no `max`
            return scores
        peak = scores.max(axis=-1, keepdims=True)
        # To look costs nothing on the host. A query that sees no key, which gets zeros, has no finite peak.
        is_finite = xp is np and bool(np.isfinite(peak).all())
        scores -= peak if is_finite else xp.where(xp.isfinite(peak), peak, peak.dtype.type(0))
        xp.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        scores /= total if is_finite else xp.where(total == 0, total.dtype.type(1), total)
        return scores

    def _without(self, scores: Array, unseen: Array) -> Array:
        """Return the scores with -inf where a key is not seen: on the host in place."""
        if self.xp is not np:
            return self.xp.where(unseen, scores.dtype.type(-np.inf), scores)
        np.copyto(scores, -np.inf, where=unseen)
        return scores

    def _mask_of(self, items: slice) -> Array:
        assert self.mask is not None
        places = np.unravel_index(np.arange(items.start, items.stop), self.batch)
        if items.stop - items.start == 1:  # a view: one example may have a large mask
            alone: Array = self.mask[tuple(int(place[0]) for place in places)]
            return alone[None]
        found: Array = self.mask[tuple(self.xp.asarray(place) for place in places)]
        return found


def _of_one_block(attrs: Attrs, q: Array, k: Array, v: Array, lengths: Array | None = None) -> Array | None:
    """Return the result for a few queries without a mask, on the host; None for all other calls.

    A decoder makes such a call in each step. The views and arrays of blocks would cost as much as the products, and
    caches with axes in another order are read where they lie.
    """
    heads, keys = q.shape[-3] == k.shape[-3], k.shape[-2]
    if not heads or q.dtype.itemsize < 4 or math.prod(q.shape[:-1]) * keys * q.dtype.itemsize > BLOCK_BYTES:
        return None
    if lengths is not None:
        keys = min(keys, max(0, int(lengths.max(initial=0))))
        k, v = k[..., :keys, :], v[..., :keys, :]
    scores: Array = np.matmul(q * q.dtype.type(attrs["scale"]), k.swapaxes(-1, -2))
    if lengths is not None and lengths.size > 1:
        np.copyto(scores, -np.inf, where=np.arange(keys) >= lengths[..., None, None, None])
    if not scores.size:
        return None
    peak = scores.max(axis=-1, keepdims=True)
    if not np.isfinite(peak).all():  # a query that sees no key, or values that are no numbers
        return None
    scores -= peak
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    found: Array = np.matmul(scores, v)
    return found


def _attend(xp: Namespace, attrs: Attrs, q: Array, k: Array, v: Array, *rest: Array) -> Array:
    if xp is np and not attrs["causal"] and not attrs["masked"]:
        alone = _of_one_block(attrs, q, k, v, *rest)
        if alone is not None:
            return alone
    blocks = _Blocks(xp, attrs, q, k, v, *rest)
    shape, found = (*blocks.parts[0].shape[:3], v.shape[-1]), None
    for items, queries, seen, probabilities in blocks:
        part = xp.matmul(probabilities, blocks.of(2, items, seen)).astype(q.dtype, copy=False)
        if part.shape == shape:  # a single block, as of a few queries
            found = part
            break
        found = xp.zeros(shape, q.dtype) if found is None else found
        found[items, :, queries] = part
    found = xp.zeros(shape, q.dtype) if found is None else found
    return found.reshape(*q.shape[:-1], v.shape[-1])


def _gradient(xp: Namespace, attrs: Attrs, grad: Array, *inputs: Array) -> tuple[Array, ...]:
    blocks = _Blocks(xp, attrs, *inputs)
    items_first = grad.reshape(*blocks.parts[0].shape[:3], grad.shape[-1])
    of_q, of_k, of_v = (xp.zeros(x.shape, x.dtype if x.dtype.itemsize >= 4 else float32) for x in blocks.parts)
    # Keys and values get a part from each block; of a softmax p, the derivative is p * (g - sum(g * p)).
    for items, queries, seen, p in blocks:
        q, k, v = blocks.of(0, items, queries), blocks.of(1, items, seen), blocks.of(2, items, seen)
        reached = blocks.wide(items_first[items, :, queries])
        of_v[items, :, seen] += _over_queries(xp.matmul(p.swapaxes(-1, -2), reached))
        by_p = xp.matmul(reached, v.swapaxes(-1, -2))
        by_score = p * (by_p - (by_p * p).sum(axis=-1, keepdims=True)) * p.dtype.type(blocks.scale)
        of_q[items, :, queries] = xp.matmul(by_score, k)
        of_k[items, :, seen] += _over_queries(xp.matmul(by_score.swapaxes(-1, -2), q))
    return tuple(
        found.reshape(x.shape).astype(x.dtype, copy=False)
        for found, x in zip((of_q, of_k, of_v), inputs[:3], strict=True)
    )


def _over_queries(x: Array) -> Array:
    """Sum over the heads of queries that share one of keys."""
    return x if x.shape[1] == 1 else x.sum(axis=1, keepdims=True)


def _spec(q: Spec, k: Spec, v: Spec, *rest: Spec, **attrs: object) -> Spec:
    return Spec(q.dtype, None if q.shape is None or v.shape is None else (*q.shape[:-1], v.shape[-1]))


def _flops(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    q, k = [[dim or 1 for dim in shape or ()] for shape in inputs[:2]]
    return 4.0 * math.prod(q) * math.prod(k[-2:-1])


def _kernel(xp: Namespace, *, causal: bool, scale: float, masked: bool) -> Kernel:
    return partial(_attend, xp, {"causal": causal, "scale": scale, "masked": masked})


def _gradient_kernel(xp: Namespace, *, causal: bool, scale: float, masked: bool) -> Kernel:
    return partial(_gradient, xp, {"causal": causal, "scale": scale, "masked": masked})


ATTENTION = define("attention", _spec, _kernel, flops=_flops, traits=NEW_UNCAPTURED)
ATTENTION_GRADIENT = define(
    "attention_gradient",
    lambda grad, q, k, v, *rest, **attrs: (q, k, v),
    _gradient_kernel,
    flops=lambda inputs, outputs, **attrs: 2.5 * _flops(inputs[1:], outputs),
    traits=NEW_UNCAPTURED,
)


@derivative(ATTENTION)
def _attention(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    # A float mask may be as large as all scores, so its gradient, if requested, may hold all of them.
    found: list[Tensor | None] = [*apply(ATTENTION_GRADIENT, grad, *node.inputs, **node.attrs)]
    found += [None] * (len(node.inputs) - 3)
    if node.attrs["masked"] and node.inputs[3].dtype != bool_:
        mask = identity(node.inputs[3])
        whole = _of_ops(node.attrs, *node.inputs[:3], mask, *node.inputs[4:])
        (found[3],) = gradients([whole], [mask], [grad])
    return found


@derivative(ATTENTION_GRADIENT)
def _attention_gradient(node: Node, *grads: Tensor | None) -> Sequence[Tensor | None]:
    # Separate identities: paths between the inputs before this node do not belong to this derivative.
    inputs = [identity(x) if kind_of(x.dtype) == "f" else x for x in node.inputs]
    grad, *given = inputs
    by_inputs = gradients([_of_ops(node.attrs, *given)], given[:3], [grad])
    reached = [(y, g) for y, g in zip(by_inputs, grads, strict=True) if y is not None and g is not None]
    floats = [x for x in inputs if kind_of(x.dtype) == "f"]
    found = dict(zip(floats, gradients([y for y, _ in reached], floats, [g for _, g in reached]), strict=True))
    return [found.get(x) for x in inputs]


def _of_ops(attrs: Attrs, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
    """The same by ordinary ops, with all scores at once."""
    q, k, v, dtype = (*(_wide(x) for x in (q, k, v)), q.dtype)
    assert q.shape is not None
    assert k.shape is not None
    heads, shared = q.shape[-3], k.shape[-3]
    if heads is not None and shared is not None and heads != shared:
        k, v = (repeat(x, heads // shared, axis=-3) for x in (k, v))
    scores = matmul(multiply(q, np.asarray(attrs["scale"], q.dtype)), matrix_transpose(k))
    keys, unseen = arange(extent_of(k, -2)), np.asarray(-np.inf, q.dtype)
    if attrs["causal"]:
        scores = where(greater_equal(expand_dims(arange(extent_of(q, -2)), axis=-1), keys), scores, unseen)
    left = list(rest)
    mask = left.pop(0) if attrs["masked"] else None
    if left:
        scores = where(less(keys, reshape(left[0], (*_extents(left[0]), 1, 1, 1))), scores, unseen)
    if mask is not None:
        scores = where(mask, scores, unseen) if mask.dtype == bool_ else add(scores, astype(mask, q.dtype))
    peak = max_of(scores, axis=-1, keepdims=True)
    shifted = subtract(scores, where(isfinite(peak), peak, np.asarray(0, q.dtype)))
    powers = exp(shifted)
    total = sum_of(powers, axis=-1, keepdims=True)
    found = matmul(divide(powers, where(total == 0, np.asarray(1, q.dtype), total)), v)
    return astype(found, dtype)


def _extents(x: Tensor) -> list[int | Tensor]:
    return [extent_of(x, axis) for axis in range(len(x.shape or ()))]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize >= float32.itemsize else astype(x, float32)


@row_rule(ATTENTION, ATTENTION_GRADIENT)
def _rows(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    """Rows are one more axis of examples."""
    return apply(node.op, *[rows.spread(x) for x in inputs], **node.attrs)


def scaled_dot_product_attention(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    attn_mask: TensorLike | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    lengths: TensorLike | None = None,
) -> Tensor:
    """``softmax(query @ key.mT * scale) @ value``, in memory that grows with the length, and not with its square.

    Args:
        query: floats, ``(..., heads, length, width)``; the axis of heads may be missing.
        key: ``(..., heads, keys, width)``, of the dtype of `query`.
        value: ``(..., heads, keys, width of values)``, likewise.
        attn_mask: True where a query sees a key, or floats that are added to the scores. It broadcasts to
            ``(..., heads, length, keys)``. A query that sees no key gives zeros.
        is_causal: query number i sees the keys up to number i alone.
        scale: None for ``1 / sqrt(width)``.
        enable_gqa: several heads of queries, next to one another, share a head of keys and values.
        lengths: integers ``(...)``: the number of keys of each example; further keys are not looked at. CPUs compute
            the scores up to the longest of a few examples alone.

    Returns:
        ``(..., heads, length, width of values)``. Values of 16 bits are summed in float32.

    Raises:
        DTypeError, ShapeError: inputs do not fit.
        ValueError: (in the run on a CPU, as the cause of a KernelError) the mask has NaN.
    """
    check_flag(is_causal, "is_causal")
    check_flag(enable_gqa, "enable_gqa")
    with graph_for(query, key, value, attn_mask, lengths):
        q, k, v = parts = [as_tensor(x) for x in (query, key, value)]
        _check(parts, enable_gqa)
        assert q.shape is not None
        # With an axis of heads, any axis in front of it is an axis of examples, as rows are.
        has_heads = len(q.shape) > 2
        if not has_heads:
            q, k, v = (expand_dims(x, axis=0) for x in parts)
        assert q.shape is not None
        assert k.shape is not None
        rest: list[Tensor] = []
        if attn_mask is not None:
            mask = as_tensor(attn_mask)
            _check_mask(mask, q, k)
            # Give the mask all axes, as rows add an axis in front.
            missing = len(q.shape) - len(mask.shape or ())
            rest.append(expand_dims(mask, axis=tuple(range(missing))) if missing else mask)
        if lengths is not None:
            ends = as_tensor(lengths)
            if kind_of(ends.dtype) not in "iu" or not is_compatible(ends.shape, q.shape[:-3]):
                raise ShapeError(
                    f"scaled_dot_product_attention: lengths are integers of shape {format_shape(q.shape[:-3])}, one "
                    f"for each example; got {ends!r}"
                )
            rest.append(ends)
        if scale is None:
            if q.shape[-1] is None:
                raise ShapeError(f"scaled_dot_product_attention: the width of {q!r} is not known; pass scale=")
            scale = 1 / math.sqrt(max(1, q.shape[-1]))
        masked = attn_mask is not None
        (found,) = apply(ATTENTION, q, k, v, *rest, causal=is_causal, scale=float(scale), masked=masked)
        return found if has_heads else squeeze(found, axis=0)


def _check(parts: Sequence[Tensor], enable_gqa: bool) -> None:
    told = "scaled_dot_product_attention: query {!r}, key {!r} and value {!r}".format(*parts)
    q, k, v = parts
    if kind_of(q.dtype) != "f" or not q.dtype == k.dtype == v.dtype:
        raise DTypeError(f"{told} are floats of one dtype; convert with af.astype first")
    if q.shape is None or k.shape is None or v.shape is None:
        raise ShapeError(f"{told} have known ranks")
    if len(q.shape) < 2 or not len(q.shape) == len(k.shape) == len(v.shape):
        raise ShapeError(f"{told} have one rank, 2 at least")
    if not (is_compatible(q.shape[-1:], k.shape[-1:]) and is_compatible(k.shape[:-1], v.shape[:-1])):
        raise ShapeError(f"{told}: queries are as wide as keys, and there is a value for each key")
    if enable_gqa and len(q.shape) > 2:
        heads = q.shape[-3], k.shape[-3]
        if None in heads or not heads[1] or (heads[0] or 0) % heads[1]:
            raise ShapeError(f"{told}: with enable_gqa the heads of queries are a multiple of the heads of keys")
        q_batch, k_batch = q.shape[:-3], k.shape[:-3]
    else:
        q_batch, k_batch = q.shape[:-2], k.shape[:-2]
    if not is_compatible(q_batch, k_batch):
        raise ShapeError(
            f"{told} have the same examples and heads; with enable_gqa=True several heads of queries share one of keys"
        )


def _check_mask(mask: Tensor, q: Tensor, k: Tensor) -> None:
    assert q.shape is not None
    assert k.shape is not None
    scores = (*q.shape[:-1], k.shape[-2])
    if mask.dtype not in (bool_, q.dtype):
        raise DTypeError(
            f"scaled_dot_product_attention: attn_mask is bool, or {dtype_name(q.dtype)} as the query; got {mask!r}"
        )
    fits = mask.shape is not None and len(mask.shape) <= len(scores)
    if not fits or not is_compatible(broadcast([mask.shape, scores]), scores):
        raise ShapeError(
            f"scaled_dot_product_attention: attn_mask broadcasts to {format_shape(scores)}, a score for each query and "
            f"key; got {mask!r}"
        )
