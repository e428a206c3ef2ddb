"""Random numbers that do not depend on the schedule, as ``af.random``.

Every draw starts a counter-based generator anew (Philox 4x64): its key is the session's (or graph's) seed and the
op's, its counter starts at the number of the run and the iteration tag. The same seed, op, run and iteration give the
same numbers whatever ran before or beside them, and on every device, for the numbers are drawn on the host; any other
op, run or iteration gives independent ones. An op's seed is `seed`, or comes from its name.
"""

from __future__ import annotations

import ctypes
import struct
from functools import partial
from hashlib import blake2b
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError, brief
from asyncflow.foreign_names import public_names
from asyncflow.graph.build import TensorLike, apply, as_tensor, graph_for, is_symbolic
from asyncflow.graph.dtypes import DType, DTypeLike, as_dtype, bool_, dtype_name, float32, float64, int64
from asyncflow.graph.ir import Attrs, Tensor
from asyncflow.graph.op import KernelContext, Op, register
from asyncflow.graph.shapes import Shape, broadcast, format_shape, is_compatible, normalize_axis
from asyncflow.graph.spec import Spec
from asyncflow.ops.axes import reduced, static_int
from asyncflow.ops.creation import arange
from asyncflow.ops.elementwise import add, multiply, subtract
from asyncflow.ops.extents import ExtentsLike, shape_reader, split_extents, template_shape
from asyncflow.ops.known_values import default_value
from asyncflow.ops.promotion import is_weak, kind_of, require_kind
from asyncflow.ops.shape import extent_of
from asyncflow.ops.shape import shape as shape_of_value

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike

    from asyncflow.values import Array, Kernel, Namespace, Value

T = TypeVar("T")

_WORD = 2**64 - 1


class _Restarted:
    """A generator whose state is set before it is used, which takes a tenth of making one.

    NumPy takes a state as a dict, and longer to read it than to draw a number. Where its generator lies in memory as we
    know it, and that is seen in what NumPy itself writes there, the same words are written in place.
    """

    __slots__ = ("bits", "restart", "rng")

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=0)
        self.rng = np.random.Generator(self.bits)
        self.restart = self._writer() or self._set_state
        """Takes the two words of a key and the four of a counter."""

    def _set_state(self, *words: int) -> None:
        key, counter = np.array(words[:2], np.uint64), np.array(words[2:], np.uint64)
        self.bits.state = {
            "bit_generator": "Philox",
            "state": {"key": key, "counter": counter},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": _DRAWN,
            "has_uint32": 0,
            "uinteger": 0,
        }

    def _writer(self) -> Callable[..., None] | None:
        start = self.bits.ctypes.state_address + _STATE_AT
        if not id(self.bits) <= start <= id(self.bits) + self.bits.__sizeof__() - _STATE.size:
            return None
        memory = (ctypes.c_char * _STATE.size).from_address(start)
        for words in ((1, 2, 3, 4, 5, 6), (_WORD, 0, _WORD, 7, 0, _WORD)):
            self._set_state(*words)
            if memory.raw != _STATE.pack(_DRAWN, *words):
                return None
        return partial(_STATE.pack_into, memory, 0, _DRAWN)


_DRAWN = 4
"""The position in a buffer of which nothing is left."""

_STATE = struct.Struct("=i44x6Q")
"""The position in the buffer, the buffer and half a word kept for later, which are empty, the key, the counter."""

_STATE_AT = 16
"""Before it are pointers to the counter and to the key."""

_idle: list[_Restarted] = []
"""Those that nobody draws with."""


def drawing(draw: Callable[..., T], seed: int) -> Callable[..., T]:
    """A kernel that gives ``draw(generator, *inputs)``, with the generator of the firing of the op with that seed.

    The generator is another's afterwards.
    """
    seed &= _WORD
    take, give_back = _idle.pop, _idle.append

    def call(context: KernelContext, *inputs: object) -> T:
        session_seed, run, tag, _ = context
        try:
            made = take()
        except IndexError:  # as many threads draw as there are
            made = _Restarted()
        first, second = (1, tag[0]) if len(tag) == 1 else _tag_words(tag)
        # The lowest word counts the blocks drawn, so counters of different runs and tags never meet.
        made.restart(session_seed & _WORD, seed, 0, run & _WORD, first, second)
        found = draw(made.rng, *inputs)
        give_back(made)
        return found

    return call


def _tag_words(tag: tuple[int, ...]) -> tuple[int, int]:
    if not tag:
        return 0, 0
    digest = blake2b(repr(tag).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def seed_of_name(name: str) -> int:
    """The seed of an op that is given none, from the name of its node."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _random_op(name: str, infer: Callable[..., Spec], draw: Callable[..., Callable[..., Value]]) -> Op:
    """Registers an op; ``draw(**attrs)`` gives a function of the generator and the inputs, in NumPy."""

    def kernel(xp: Namespace, *, seed: int, **attrs: object) -> Kernel:
        return drawing(draw(**attrs), seed)

    def rule(*inputs: Spec, seed: int, **attrs: object) -> Spec:
        return infer(*inputs, **attrs)

    op = Op(f"random_{name}", rule, kernel, needs_context=True, is_random=True, rows="row by row", runs_on_host=True)
    return register(op)


def _drawn(op: Op, shape: ExtentsLike, *inputs: TensorLike, **attrs: object) -> Tensor:
    """The result of an op that is told a shape; `attrs` are those of `_apply`."""
    template, sizes = split_extents(shape)
    given: Attrs = {**attrs, "shape": template}
    return _apply(op, *inputs, *sizes, **given)


def _apply(op: Op, *inputs: TensorLike, seed: int | None, name: str | None, **attrs: Any) -> Tensor:
    import_module("numpy.random")  # else NumPy does at the first draw, and that is on the event loop
    if seed is not None:
        return apply(op, *inputs, name=name, seed=static_int(seed, "seed"), **attrs)[0]
    (result,) = apply(op, *inputs, name=name, seed=0, **attrs)
    # Only now is it known what the node is called.
    result.node.attrs["seed"] = seed_of_name(result.node.name)
    return result


def _require(holds: Array | bool, values: Array, rule: str) -> None:
    """Raises a ValueError that shows the first of `values` for which it does not hold."""
    if not np.all(holds):
        wrong = np.asarray(values)[~np.asarray(holds)]
        raise ValueError(f"{rule}; got {wrong.flat[0]} ({wrong.size} of {np.size(values)} values are wrong)")


def _check_known(what: str, rule: str, *values: TensorLike, holds: Callable[..., Array | bool]) -> None:
    """Refuse parameters that are known while the graph is built."""
    known = [
        default_value(x) if isinstance(x, Tensor) else x for x in values if isinstance(x, Tensor) or not is_symbolic(x)
    ]
    if len(known) == len(values) and all(x is not None for x in known) and not np.all(holds(*map(np.asarray, known))):
        seen = " and ".join(map(brief, values))
        raise GraphError(f"random_{what}: {rule}; got {seen}")


# -- floats ----------------------------------------------------------------------------------------------------------


def _float_spec(*sizes: Spec, shape: Shape, dtype: DType) -> Spec:
    return Spec(dtype, template_shape(shape, sizes))


def _float_draw(sample: Callable[..., Array], *, shape: Shape, dtype: DType) -> Callable[..., Value]:
    read = shape_reader(shape)
    kind, number = (float64 if dtype == float64 else float32).type, dtype.type
    if shape == ():
        return lambda rng: number(sample(rng, None, kind))  # of one number the generator makes no array
    return lambda rng, *sizes: sample(rng, read(sizes), kind).astype(dtype, copy=False)


def _sample_truncated(rng: np.random.Generator, shape: tuple[int, ...] | None, kind: type) -> Array:
    values = np.asarray(rng.standard_normal(() if shape is None else shape, kind))
    while (outside := np.abs(values) > 2).any():
        values[outside] = rng.standard_normal(int(outside.sum()), kind)
    return values


NORMAL = _random_op("normal", _float_spec, partial(_float_draw, np.random.Generator.standard_normal))
TRUNCATED_NORMAL = _random_op("truncated_normal", _float_spec, partial(_float_draw, _sample_truncated))
UNIFORM = _random_op("uniform", _float_spec, partial(_float_draw, np.random.Generator.random))


def _floats(op: Op, shape: ExtentsLike, dtype: DTypeLike, seed: int | None, name: str | None) -> Tensor:
    found = as_dtype(dtype)
    if kind_of(found) != "f":
        raise DTypeError(f"{op.name} gives floats, not {dtype_name(found)}; use af.random.integers or af.astype")
    return _drawn(op, shape, seed=seed, name=name, dtype=found)


def _scaled(x: Tensor, factor: TensorLike, offset: TensorLike) -> Tensor:
    if not (is_weak(factor) and factor == 1):
        x = multiply(x, factor)
    return x if is_weak(offset) and offset == 0 else add(x, offset)


def normal(
    shape: ExtentsLike = (),
    *,
    mean: TensorLike = 0.0,
    std: TensorLike = 1.0,
    dtype: DTypeLike = float64,
    seed: int | None = None,
    name: str | None = None,
) -> Tensor:
    """Normally distributed floats.

    Args:
        shape: ints and integer tensors of rank 0, or one integer tensor of rank 1.
        mean: broadcasts with the result.
        std: standard deviation, likewise; 0 or more.
        dtype: a float dtype.
        seed: of this op; None derives one from its name.
        name: of the node.

    Raises:
        GraphError: `std` is known while the graph is built, and below 0 or not finite.
    """
    _check_std("normal", std)
    return _scaled(_floats(NORMAL, shape, dtype, seed, name), std, mean)


def truncated_normal(
    shape: ExtentsLike = (),
    *,
    mean: TensorLike = 0.0,
    std: TensorLike = 1.0,
    dtype: DTypeLike = float64,
    seed: int | None = None,
    name: str | None = None,
) -> Tensor:
    """Like `normal`, with values further than two standard deviations from the mean drawn again.

    Args:
        shape: as for `normal`.
        mean: of what is drawn, before any is drawn again; broadcasts with the result.
        std: standard deviation, likewise; 0 or more.
        dtype: a float dtype.
        seed: of this op; None derives one from its name.
        name: of the node.
    """
    _check_std("truncated_normal", std)
    return _scaled(_floats(TRUNCATED_NORMAL, shape, dtype, seed, name), std, mean)


def _check_std(what: str, std: TensorLike) -> None:
    _check_known(
        what, "a standard deviation is finite, and 0 or more", std, holds=lambda std: np.isfinite(std) & (std >= 0)
    )


def uniform(
    shape: ExtentsLike = (),
    *,
    low: TensorLike = 0.0,
    high: TensorLike = 1.0,
    dtype: DTypeLike = float64,
    seed: int | None = None,
    name: str | None = None,
) -> Tensor:
    """Floats spread evenly over `low` to `high`; `high` only comes out where rounding makes it.

    Args:
        shape: see `normal`.
        low: lower end; broadcasts with the result.
        high: upper end, likewise.
        dtype: a float dtype.
        seed: see `normal`.
        name: of the node.

    Raises:
        GraphError: `low` and `high` are known while the graph is built, and not finite or not in that order.
    """
    in_order = "low and high are finite, and low is not above high"
    _check_known("uniform", in_order, low, high, holds=lambda a, b: np.isfinite(a) & np.isfinite(b) & (a <= b))
    from_zero = is_weak(low) and low == 0
    width = high if from_zero else high - low if is_weak(low) and is_weak(high) else subtract(high, low)
    return _scaled(_floats(UNIFORM, shape, dtype, seed, name), width, low)


def _parameter_spec(parameter: Spec, *sizes: Spec, shape: Shape, dtype: DType) -> Spec:
    target = template_shape(shape, sizes)
    require_kind(parameter, "iuf", "real numbers")
    if target is not None and not is_compatible(broadcast([parameter.shape, target]), target):
        raise ShapeError(f"parameters broadcast to the shape asked for, {format_shape(target)}; got {parameter}")
    return Spec(dtype, target)


def _parameter_op(
    name: str,
    rule: str,
    holds: Callable[[Array], Array],
    sample: Callable[[np.random.Generator, Array, tuple[int, ...]], Value],
) -> Op:
    """Registers an op that draws from distributions with one parameter, which is finite and for which `rule` holds."""

    def prepare(*, shape: Shape, dtype: DType) -> Callable[..., Value]:
        read = shape_reader(shape)

        def draw(rng: np.random.Generator, parameter: Array, *sizes: Array) -> Value:
            wide = np.asarray(parameter).astype(float64)
            _require(np.isfinite(wide) & holds(wide), wide, rule)
            return np.asarray(sample(rng, wide, read(sizes))).astype(dtype, copy=False)

        return draw

    return _random_op(name, _parameter_spec, prepare)


GAMMA = _parameter_op(
    "gamma", "alpha is finite, and above 0", lambda x: x > 0, lambda rng, x, size: rng.standard_gamma(x, size)
)
POISSON = _parameter_op(
    "poisson", "a rate is finite, and 0 or more", lambda x: x >= 0, lambda rng, x, size: rng.poisson(x, size)
)


def gamma(
    shape: ExtentsLike | None = None,
    *,
    alpha: TensorLike,
    scale: TensorLike = 1.0,
    dtype: DTypeLike = float64,
    seed: int | None = None,
    name: str | None = None,
) -> Tensor:
    """Floats of a gamma distribution, of mean ``alpha * scale``; no gradient reaches `alpha`, which is an error.

    Args:
        shape: see `normal`; None for one number for each item of `alpha`.
        alpha: the distribution's shape; finite and above 0, or the run fails; broadcasts to `shape`.
        scale: what the standard sample is multiplied by; broadcasts with the result.
        dtype: a float dtype.
        seed: see `normal`.
        name: of the node.
    """
    found = as_dtype(dtype)
    if kind_of(found) != "f":
        raise DTypeError(f"random_gamma gives floats, not {dtype_name(found)}; use af.astype")
    with graph_for(alpha, scale, outside="np.random.Generator.gamma"):
        given = as_tensor(alpha)
        return _scaled(_drawn(GAMMA, _shape_for(shape, given), given, seed=seed, name=name, dtype=found), scale, 0.0)


def _shape_for(shape: ExtentsLike | None, parameter: Tensor) -> ExtentsLike:
    if shape is not None:
        return shape
    if parameter.ndim is None:
        return shape_of_value(parameter)
    return [extent_of(parameter, axis) for axis in range(parameter.ndim)]


def poisson(
    shape: ExtentsLike | None = None,
    *,
    rate: TensorLike,
    dtype: DTypeLike = int64,
    seed: int | None = None,
    name: str | None = None,
) -> Tensor:
    """Numbers of a Poisson distribution: how often happens what happens `rate` times on average.

    Args:
        shape: see `normal`; None for one number for each item of `rate`.
        rate: finite and 0 or more, or the run fails; broadcasts to `shape`.
        dtype: an integer dtype, or a float dtype.
        seed: see `normal`.
        name: of the node.
    """
    found = as_dtype(dtype)
    if kind_of(found) not in "iuf":
        raise DTypeError(f"random_poisson gives integers or floats, not {dtype_name(found)}")
    with graph_for(rate, outside="np.random.Generator.poisson"):
        given = as_tensor(rate)
        return _drawn(POISSON, _shape_for(shape, given), given, seed=seed, name=name, dtype=found)


# -- choices ---------------------------------------------------------------------------------------------------------


def _integers_spec(low: Spec, high: Spec, *sizes: Spec, shape: Shape, dtype: DType) -> Spec:
    target = template_shape(shape, sizes)
    for bound in (low, high):
        require_kind(bound, "iu", "integer bounds")
        if target is not None and not is_compatible(broadcast([bound.shape, target]), target):
            raise ShapeError(f"bounds broadcast to the shape asked for, {format_shape(target)}; got {bound}")
    return Spec(dtype, target)


def _integers_draw(*, shape: Shape, dtype: DType) -> Callable[..., Value]:
    read, kind = shape_reader(shape), dtype.type
    return lambda rng, low, high, *sizes: rng.integers(low, high, None if shape == () else read(sizes), kind)


INTEGERS = _random_op("integers", _integers_spec, _integers_draw)


def integers(
    shape: ExtentsLike = (),
    *,
    low: TensorLike = 0,
    high: TensorLike,
    dtype: DTypeLike = int64,
    seed: int | None = None,
    name: str | None = None,
) -> Tensor:
    """Integers from `low` up to but not including `high`, all equally likely.

    Args:
        shape: see `normal`.
        low: integers that broadcast to `shape`.
        high: likewise; above `low`, or the run fails.
        dtype: an integer dtype.
        seed: see `normal`.
        name: of the node.
    """
    found = as_dtype(dtype)
    if found.kind not in "iu":
        raise DTypeError(f"random_integers gives integers, not {dtype_name(found)}; use af.random.uniform")
    return _drawn(INTEGERS, shape, low, high, seed=seed, name=name, dtype=found)


def _bernoulli_spec(p: Spec) -> Spec:
    require_kind(p, "f", "probabilities as floats")
    return Spec(bool_, p.shape)


def _bernoulli_draw() -> Callable[..., Value]:
    def draw(rng: np.random.Generator, p: Array) -> Value:
        if not p.ndim and 0 <= p <= 1:
            return np.bool_(rng.random() < float(p))
        p = np.asarray(p).astype(float64)
        _require((p >= 0) & (p <= 1), p, "probabilities lie from 0 to 1")
        return rng.random(p.shape) < p

    return draw


BERNOULLI = _random_op("bernoulli", _bernoulli_spec, _bernoulli_draw)


def bernoulli(p: TensorLike, /, *, seed: int | None = None, name: str | None = None) -> Tensor:
    """True with probability `p`, float and elementwise; booleans of the shape of `p`.

    Args:
        p: probabilities, floats from 0 to 1.
        seed: of this op; None derives one from its name.
        name: of the node.

    Raises:
        ValueError: (in the run, as the cause of a KernelError) a probability is below 0, above 1 or NaN.
    """
    return _apply(BERNOULLI, p, seed=seed, name=name)


def _categorical_spec(logits: Spec, *, axis: int) -> Spec:
    require_kind(logits, "f", "logits as floats")
    return Spec(int64, reduced(logits.shape, axis, keepdims=False))


def _categorical_draw(*, axis: int) -> Callable[..., Value]:
    def draw(rng: np.random.Generator, logits: Array) -> Value:
        if not logits.shape[axis]:
            raise ValueError(f"there is no category to draw: logits of shape {logits.shape} along axis {axis}")
        largest = logits.max(axis=axis)
        _require(np.isfinite(largest), largest, "the largest logit along the axis is finite")
        # The largest of the logits plus Gumbel noise falls on a category with just its probability.
        return np.argmax(logits.astype(float64) + rng.gumbel(size=logits.shape), axis=axis)

    return draw


CATEGORICAL = _random_op("categorical", _categorical_spec, _categorical_draw)


def categorical(logits: TensorLike, /, *, axis: int = -1, seed: int | None = None, name: str | None = None) -> Tensor:
    """Category numbers drawn with probabilities ``softmax(logits)``: int64, the shape of `logits` without `axis`.

    Args:
        logits: floats.
        axis: the one along which the categories lie.
        seed: of this op; None derives one from its name.
        name: of the node.

    Raises:
        ValueError: (in the run, as the cause of a KernelError) NaN or infinity among the logits, but for -inf, which is
            a category that is never drawn; or none along `axis` that is.
    """
    return _apply(CATEGORICAL, logits, seed=seed, name=name, axis=static_int(axis, "axis"))


def _choice_spec(x: Spec, *rest: Spec, shape: Shape, replace: bool, weighted: bool) -> Spec:
    p, sizes = (rest[0], rest[1:]) if weighted else (None, rest)
    if x.rank == 0:
        raise ShapeError(f"takes a tensor of rank 1 or more to choose from, not {x}")
    if p is not None:
        require_kind(p, "f", "probabilities as floats")
        if not is_compatible(p.shape, None if x.shape is None else x.shape[:1]):
            raise ShapeError(f"takes one probability for each row of {x}, not {p}")
    target = template_shape(shape, sizes)
    return Spec(x.dtype, None if target is None or x.shape is None else target + x.shape[1:])


def _choice_draw(*, shape: Shape, replace: bool, weighted: bool) -> Callable[..., Value]:
    read = shape_reader(shape)

    def draw(rng: np.random.Generator, x: Array, *rest: Array) -> Value:
        p = rest[0].astype(float64) if weighted else None
        return x[rng.choice(len(x), read(rest[weighted:]), replace=replace, p=p)]

    return draw


CHOICE = _random_op("choice", _choice_spec, _choice_draw)


def choice(
    x: TensorLike,
    /,
    shape: ExtentsLike = (),
    *,
    replace: bool = True,
    p: TensorLike | None = None,
    seed: int | None = None,
    name: str | None = None,
) -> Tensor:
    """Rows of `x` (items along its first axis) drawn at random: shape ``shape + x.shape[1:]``.

    Args:
        x: what to choose from; an int `n` stands for ``arange(n)``.
        shape: how many; see `normal`.
        replace: whether a row may be drawn twice.
        p: probability of each row, summing to 1; None for all alike.
        seed: see `normal`.
        name: of the node.
    """
    weights = () if p is None else (as_tensor(p),)
    return _drawn(CHOICE, shape, _rows(x), *weights, seed=seed, name=name, replace=replace, weighted=p is not None)


def _permutation_spec(x: Spec, *, axis: int) -> Spec:
    if x.rank is not None:
        normalize_axis(axis, x.rank)
    return x


PERMUTATION = _random_op("permutation", _permutation_spec, lambda *, axis: lambda rng, x: rng.permutation(x, axis=axis))


def permutation(x: TensorLike, /, *, axis: int = 0, seed: int | None = None, name: str | None = None) -> Tensor:
    """`x` with its items along `axis` in random order; an int `n` stands for ``arange(n)``.

    Args:
        x: a tensor of rank 1 or higher, or an int.
        axis: the one along which items are permuted.
        seed: of this op; None derives one from its name.
        name: of the node.
    """
    return _apply(PERMUTATION, _rows(x), seed=seed, name=name, axis=static_int(axis, "axis"))


def _rows(x: TensorLike) -> Tensor:
    if isinstance(x, bool) or (is_weak(x) and not isinstance(x, int)):
        raise GraphError(f"takes a tensor or an int to choose from, not {x!r}")
    if not is_symbolic(x) and np.ndim(cast("ArrayLike", x)) == 0:
        return arange(x)
    return as_tensor(x)


__all__ = [
    "bernoulli",
    "categorical",
    "choice",
    "gamma",
    "integers",
    "normal",
    "permutation",
    "poisson",
    "truncated_normal",
    "uniform",
]

if not TYPE_CHECKING:  # or every misspelt name would pass the type checker
    __getattr__, __dir__ = public_names("asyncflow.random", __all__)
