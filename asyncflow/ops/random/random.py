"""Random numbers that do not depend on the schedule, as ``af.random``.

Every draw starts a counter-based generator anew (Philox 4x64): its key is the session's (or graph's) seed and the op's,
its counter starts at the number of the run and the iteration tag. The same seed, op, run and iteration give the same
numbers on every device, whatever ran before or at the same time: the numbers are drawn on the host. Another op, run or
iteration gives independent numbers. An op's seed is `seed`, or comes from its name.

A tensor as `seed=` is the seed of a request: it stands in place of the session's seed and the number of the run. So the
request draws the same numbers again in any session, alone or in a pool.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError, brief
from asyncflow.foreign_names import public_names
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for, is_symbolic
from asyncflow.graph.ir import Attrs, Tensor
from asyncflow.graph.op import DRAWS, KernelContext, Op, find_op, register
from asyncflow.graph.values.dtypes import DType, DTypeLike, as_dtype, bool_, dtype_name, float32, float64, int64
from asyncflow.graph.values.shapes import Shape, broadcast, format_shape, is_compatible, normalize_axis
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import add, multiply, subtract
from asyncflow.ops.arrays.creation import arange
from asyncflow.ops.arrays.extents import ExtentsLike, shape_reader, split_extents, template_shape
from asyncflow.ops.arrays.known_values import default_value
from asyncflow.ops.arrays.shape import extent_of
from asyncflow.ops.arrays.shape import shape as shape_of_value
from asyncflow.ops.axes import reduced, static_int
from asyncflow.ops.draws import Drawing, RowContexts, seed_of_name
from asyncflow.ops.promotion import is_weak, kind_of, require_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike

    from asyncflow.graph.building.build import SupportsTensor
    from asyncflow.ops.draws import DrawsForRows, Filled
    from asyncflow.values import Array, Kernel, Namespace, Value

SeedLike: TypeAlias = "int | Tensor | SupportsTensor | tuple[Tensor | SupportsTensor, int] | None"
"""The seed of an op: an int; an integer tensor of rank 0, which is the seed of a request; or both of them."""


def _random_op(
    name: str,
    infer: Callable[..., Spec],
    draw: Callable[..., Callable[..., Value]],
    draw_rows: Callable[..., Callable[..., Array | None]] | None = None,
) -> Op:
    """Register an op that draws.

    Args:
        name: behind ``random_``.
        infer: its shape rule.
        draw: ``draw(**attrs)`` gives a function of the generator and the inputs, in NumPy.
        draw_rows: ``draw_rows(**attrs)`` gives `draw_rows` of `Drawing`, with the same bits.
    """

    def kernel(xp: Namespace, *, seed: int, **attrs: object) -> Kernel:
        return Drawing(draw(**attrs), seed, None if draw_rows is None else draw_rows(**attrs))

    # The shape does not depend on the seed, so shape rules do not get it.
    def rule(*inputs: Spec, seed: int, **attrs: object) -> Spec:
        return infer(*inputs, **attrs)

    op = Op(f"random_{name}", rule, kernel, conduct=DRAWS, rows="row by row", runs_on_host=True)
    return register(op)


def _drawn(op: Op, shape: ExtentsLike, *inputs: TensorLike, **attrs: object) -> Tensor:
    """Build an op with a shape argument, and return its result; `attrs` are passed to `_apply`."""
    template, sizes = split_extents(shape)
    given: Attrs = {**attrs, "shape": template}
    return _apply(op, *inputs, *sizes, **given)


def _apply(op: Op, *inputs: TensorLike, seed: SeedLike, name: str | None, **attrs: Any) -> Tensor:
    import_module("numpy.random")  # else NumPy imports it at the first draw, on the event loop
    given, own = seed if isinstance(seed, tuple) and len(seed) == 2 else (seed, None)
    if is_symbolic(given):
        return _seeded(op, given, own, inputs, name, attrs)
    if seed is not None:
        own = static_int(seed, "a seed that is no tensor, nor a pair (tensor, int),")
        return apply(op, *inputs, name=name, seed=own, **attrs)[0]
    (result,) = apply(op, *inputs, name=name, seed=0, **attrs)
    # The node's name is known only now.
    result.node.attrs["seed"] = seed_of_name(result.node.name)
    return result


def _seeded(
    op: Op,
    given: Tensor | SupportsTensor,
    own: int | None,
    inputs: Sequence[TensorLike],
    name: str | None,
    attrs: Attrs,
) -> Tensor:
    """The result of an op with the seed of a request."""
    with graph_for(given, *inputs):
        seed = as_tensor(given)
        if kind_of(seed.dtype) not in "iu" or seed.ndim not in (0, None):
            raise GraphError(
                f"the seed of {op.name} is an int, or an integer tensor of rank 0 for each request; got {seed!r}"
            )
        # Two draws of a request share the request's seed; the op's own seed makes them differ.
        arguments = {**attrs, "seed": 0 if own is None else static_int(own, "the second of seed=(tensor, int)")}
        (result,) = apply(SEEDED, seed, *inputs, name=name or op.name, draws=op.name, arguments=arguments)
        if own is None:
            arguments["seed"] = seed_of_name(result.node.name)
        return result


class _Seeded:
    """The kernel of `SEEDED`."""

    __slots__ = ("_draw",)

    def __init__(self, draw: Kernel) -> None:
        self._draw = draw

    def __call__(self, context: KernelContext, seed: Array, *inputs: Array) -> Value:
        return self._draw(context._replace(seed=int(seed), run=_NO_RUN), *inputs)

    def of_rows(
        self, contexts: Callable[[], RowContexts], inputs: Sequence[Array], has_rows: Sequence[bool]
    ) -> Array | list[Value] | None:
        """See `DrawsForRows`."""
        seed, *rest = inputs
        seeds = seed if has_rows[0] else int(seed)
        draw = cast("DrawsForRows", self._draw)
        return draw.of_rows(lambda: contexts()._replace(seeds=seeds, runs=_NO_RUN), rest, has_rows[1:])


_NO_RUN = -1
"""Number in place of the run's, in draws of a request with its own seed: they are the same in whichever run."""


def _seeded_spec(seed: Spec, *inputs: Spec, draws: str, arguments: Attrs) -> Spec | tuple[Spec, ...]:
    return find_op(draws).infer(*inputs, **arguments)


def _seeded_kernel(xp: Namespace, *, draws: str, arguments: Attrs) -> Kernel:
    op = find_op(draws)
    assert op.kernel is not None
    return _Seeded(op.kernel(xp, **arguments))


SEEDED = register(
    Op(
        "random_seeded",
        _seeded_spec,
        _seeded_kernel,
        conduct=DRAWS,
        rows="row by row",
        runs_on_host=True,
    )
)
"""Op that draws as the op called `draws` does, with the seed of a request as first input; iterations count as ever."""


def _require(holds: Array | bool, values: Array, rule: str) -> None:
    """Raise a ValueError that shows the first of `values` for which it does not hold."""
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
        return lambda rng: number(sample(rng, None, kind))  # the generator returns a single number as a scalar
    return lambda rng, *sizes: sample(rng, read(sizes), kind).astype(dtype, copy=False)


def _sample_truncated(rng: np.random.Generator, shape: tuple[int, ...] | None, kind: type) -> Array:
    # One value in 22 lies outside and is drawn again, so rows take different counts of numbers from their generators.
    # The op therefore has no `draw_rows`, with which all rows take equally many.
    values = np.asarray(rng.standard_normal(() if shape is None else shape, kind))
    while (outside := np.abs(values) > 2).any():
        values[outside] = rng.standard_normal(int(outside.sum()), kind)
    return values


def _float_rows(sample: Callable[..., Array], *, shape: Shape, dtype: DType) -> Callable[..., Array | None]:
    read, kind = shape_reader(shape), (float64 if dtype == float64 else float32).type

    def draw(filled: Filled, count: int, sizes: Sequence[Array], has_rows: Sequence[bool]) -> Array | None:
        if any(has_rows):  # sizes differ from row to row, so no single array can be filled
            return None
        out = np.empty((count, *read(sizes)), kind)
        return filled(lambda rng, row: sample(rng, None, kind, row), out).astype(dtype, copy=False)

    return draw


def _float_op(name: str, sample: Callable[..., Array]) -> Op:
    return _random_op(name, _float_spec, partial(_float_draw, sample), partial(_float_rows, sample))


NORMAL = _float_op("normal", np.random.Generator.standard_normal)
TRUNCATED_NORMAL = _random_op("truncated_normal", _float_spec, partial(_float_draw, _sample_truncated))
UNIFORM = _float_op("uniform", np.random.Generator.random)


def _floats(op: Op, shape: ExtentsLike, dtype: DTypeLike, seed: SeedLike, name: str | None) -> Tensor:
    found = as_dtype(dtype)
    if kind_of(found) != "f":
        raise DTypeError(f"{op.name} gives floats, not {dtype_name(found)}; use af.random.integers or af.astype")
    return _drawn(op, shape, seed=seed, name=name, dtype=found)


def _scaled(x: Tensor, factor: TensorLike, offset: TensorLike) -> Tensor:
    # Separate ops, so that gradients reach mean and deviation although a draw has none. Defaults add no op.
    if not (is_weak(factor) and factor == 1):
        x = multiply(x, factor)
    return x if is_weak(offset) and offset == 0 else add(x, offset)


def normal(
    shape: ExtentsLike = (),
    *,
    mean: TensorLike = 0.0,
    std: TensorLike = 1.0,
    dtype: DTypeLike = float64,
    seed: SeedLike = None,
    name: str | None = None,
) -> Tensor:
    """Normally distributed floats.

    Args:
        shape: ints and integer tensors of rank 0, or one integer tensor of rank 1.
        mean: broadcasts with the result.
        std: standard deviation, likewise; 0 or more.
        dtype: a float dtype.
        seed: of this op; None derives one from its name. An integer tensor of rank 0 is the seed of a request: numbers
            then depend on it, the op's name and the iteration alone. A pair ``(tensor, int)`` fixes the op's seed, too.
        name: of the node.

    Raises:
        GraphError: `std` is known while the graph is built, and below 0 or not finite; or `seed` is a tensor of floats
            or of rank 1 or more.
    """
    _check_std("normal", std)
    return _scaled(_floats(NORMAL, shape, dtype, seed, name), std, mean)


def truncated_normal(
    shape: ExtentsLike = (),
    *,
    mean: TensorLike = 0.0,
    std: TensorLike = 1.0,
    dtype: DTypeLike = float64,
    seed: SeedLike = None,
    name: str | None = None,
) -> Tensor:
    """Draw as `normal` does, and draw values further than two standard deviations from the mean again.

    Args:
        shape: as for `normal`.
        mean: of the numbers before any is drawn again; broadcasts with the result.
        std: standard deviation, likewise; 0 or more.
        dtype: a float dtype.
        seed: see `normal`.
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
    seed: SeedLike = None,
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
    # With `low` at 0, the usual case, one op is enough. Subtract two numbers here, not in each run.
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
    """Register an op that draws from distributions with one parameter, which is finite and for which `rule` holds."""

    def prepare(*, shape: Shape, dtype: DType) -> Callable[..., Value]:
        read = shape_reader(shape)

        def draw(rng: np.random.Generator, parameter: Array, *sizes: Array) -> Value:
            # The samplers take only float64, and check differently: NaN gives NaN in some, and an error in others.
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
    seed: SeedLike = None,
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
    seed: SeedLike = None,
    name: str | None = None,
) -> Tensor:
    """Draw numbers from a Poisson distribution: the number of events that happen `rate` times on average.

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
    # NumPy itself refuses `low` above `high`.
    return lambda rng, low, high, *sizes: rng.integers(low, high, None if shape == () else read(sizes), kind)


INTEGERS = _random_op("integers", _integers_spec, _integers_draw)


def integers(
    shape: ExtentsLike = (),
    *,
    low: TensorLike = 0,
    high: TensorLike,
    dtype: DTypeLike = int64,
    seed: SeedLike = None,
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
        if not p.ndim and 0 <= p <= 1:  # one number needs no array; a wrong probability is refused below
            return np.bool_(rng.random() < float(p))
        p = np.asarray(p).astype(float64)
        _require((p >= 0) & (p <= 1), p, "probabilities lie from 0 to 1")
        return rng.random(p.shape) < p

    return draw


def _bernoulli_rows() -> Callable[..., Array]:
    def draw(filled: Filled, count: int, inputs: Sequence[Array], has_rows: Sequence[bool]) -> Array:
        p = np.asarray(inputs[0]).astype(float64)
        _require((p >= 0) & (p <= 1), p, "probabilities lie from 0 to 1")
        return filled(_uniforms, np.empty((count, *p.shape[has_rows[0] :]))) < p

    return draw


def _uniforms(rng: np.random.Generator, out: Array) -> Array:
    return rng.random(None, float64.type, out)


BERNOULLI = _random_op("bernoulli", _bernoulli_spec, _bernoulli_draw, _bernoulli_rows)


def bernoulli(p: TensorLike, /, *, seed: SeedLike = None, name: str | None = None) -> Tensor:
    """True with probability `p`, float and elementwise; booleans of the shape of `p`.

    Args:
        p: probabilities, floats from 0 to 1.
        seed: see `normal`.
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
        return _category(logits, _uniforms(rng, np.empty(logits.shape)), axis)

    return draw


def _categorical_rows(*, axis: int) -> Callable[..., Array]:
    def draw(filled: Filled, count: int, inputs: Sequence[Array], has_rows: Sequence[bool]) -> Array:
        logits, has_own = inputs[0], has_rows[0]
        uniforms = filled(_uniforms, np.empty((count, *logits.shape[has_own:])))
        return _category(logits, uniforms, axis if axis < 0 else axis + 1)  # rows add an axis in front

    return draw


def _category(logits: Array, uniforms: Array, axis: int) -> Array:
    """Return the categories chosen by numbers from 0 to 1, which are overwritten; the bits for one row equal its
    bits among many.
    """
    if not uniforms.shape[axis]:
        raise ValueError(f"there is no category to draw: logits of shape {logits.shape} along axis {axis}")
    # The maximum of logits plus Gumbel noise picks each category with exactly its probability. Keep the noise finite: a
    # uniform number may be 0, whose logarithm is infinite.
    noise = np.maximum(uniforms, 2.0**-53, out=uniforms)
    np.subtract(1.0, noise, out=noise)
    np.negative(np.log(noise, out=noise), out=noise)
    np.subtract(logits, np.log(noise, out=noise), out=noise)
    found: Array = noise.argmax(axis)
    largest = noise[found] if noise.ndim == 1 else noise.max(axis)
    if not np.isfinite(largest).all():
        _require(np.isfinite(largest), largest, "the largest logit along the axis is finite")
    return found


CATEGORICAL = _random_op("categorical", _categorical_spec, _categorical_draw, _categorical_rows)


def categorical(logits: TensorLike, /, *, axis: int = -1, seed: SeedLike = None, name: str | None = None) -> Tensor:
    """Draw category numbers with probabilities ``softmax(logits)``: int64, the shape of `logits` without `axis`.

    Args:
        logits: floats.
        axis: the one along which the categories lie.
        seed: see `normal`.
        name: of the node.

    Raises:
        ValueError: (in the run, as the cause of a KernelError) the logits hold NaN or infinity, except -inf, which is a
            category that is never drawn; or no category along `axis` is above -inf.
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
        p = _probabilities(rest[0]) if weighted else None
        return x[rng.choice(len(x), read(rest[weighted:]), replace=replace, p=p)]

    return draw


_ROOT_OF_BFLOAT16_EPSILON = 2.0**-3.5


def _probabilities(p: Array) -> Array:
    """Return `p` for the generator, which refuses values below 0, and a sum other than 1."""
    # NumPy allows an error of the sum up to the root of the dtype's epsilon. So float32 is passed unchanged: as
    # float64, softmax weights over 1000 rows would be refused. bfloat16, unknown to NumPy, is scaled here likewise.
    if p.dtype.kind == "f":
        return p
    wide = p.astype(float64)
    total = wide.sum()
    return wide / total if abs(total - 1) <= _ROOT_OF_BFLOAT16_EPSILON else wide


CHOICE = _random_op("choice", _choice_spec, _choice_draw)


def choice(
    x: TensorLike,
    /,
    shape: ExtentsLike = (),
    *,
    replace: bool = True,
    p: TensorLike | None = None,
    seed: SeedLike = None,
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


def permutation(x: TensorLike, /, *, axis: int = 0, seed: SeedLike = None, name: str | None = None) -> Tensor:
    """`x` with its items along `axis` in random order; an int `n` stands for ``arange(n)``.

    Args:
        x: a tensor of rank 1 or higher, or an int.
        axis: the one along which items are permuted.
        seed: see `normal`.
        name: of the node.
    """
    return _apply(PERMUTATION, _rows(x), seed=seed, name=name, axis=static_int(axis, "axis"))


def _rows(x: TensorLike) -> Tensor:
    if isinstance(x, bool) or (is_weak(x) and not isinstance(x, int)):  # True is an int, but is hardly meant as one row
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

if not TYPE_CHECKING:  # with `__getattr__`, every misspelt name would pass the type checker
    __getattr__, __dir__ = public_names("asyncflow.random", __all__)
