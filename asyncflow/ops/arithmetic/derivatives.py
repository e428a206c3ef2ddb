"""Derivatives of arithmetic and mathematical functions.

For complex numbers a gradient points where the (real) result of it all rises: that of ``z = a + bi`` is
``dL/da + i dL/db``, and a holomorphic ``f`` passes ``grad * conj(f'(z))`` on. That is TensorFlow's and PyTorch's
convention, and the conjugate of JAX's.

At kinks: `abs` and `hypot` pass nothing at 0, and `atan2` nothing at the origin; operands that tie in `maximum` and
`minimum` get half each; in `clip` a value on a bound passes all to the value; ``x ** 0`` passes nothing to `x`, and ``0
** y`` nothing to `y`. Infinite limits are infinite: `sqrt` and `log` at 0. Comparisons, tests and bitwise functions
give booleans and integers, through which nothing flows back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Op, derivative, gradient_of_first, not_differentiable
from asyncflow.ops.arithmetic import elementwise as ew
from asyncflow.ops.arithmetic import logic as lo
from asyncflow.ops.arithmetic.elementwise import log, negative, sign, sqrt, square
from asyncflow.ops.arithmetic.logic import greater_equal, isinf, less_equal, logical_and, logical_or
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.known_values import static_value
from asyncflow.ops.derivatives.dtypes import conjugated, in_dtype_of
from asyncflow.ops.derivatives.open_extents import extents
from asyncflow.ops.derivatives.shapes import carries_gradient, sum_to_like, zeros_of
from asyncflow.ops.layers.nn import sigmoid
from asyncflow.ops.promotion import kind_of
from asyncflow.ops.searching.searching import where


def reaching(x: Tensor, grad: Callable[[], Tensor]) -> Tensor | None:
    """The gradient ``grad()``, of the shape of `x`, in the dtype of `x`; None for integers, without calling it."""
    return in_dtype_of(grad(), x) if carries_gradient(x.spec) else None


def _shared(x: Tensor, others: Sequence[Tensor], grad: Callable[[], Tensor]) -> Tensor | None:
    """The gradient ``grad()`` for `x`, which was promoted and broadcast with `others`."""
    if not carries_gradient(x.spec):
        return None
    found = grad()
    return in_dtype_of(sum_to_like(found, x) if _may_stretch(x, others) else found, x)


def _both(node: Node, by_x: Callable[[], Tensor], by_y: Callable[[], Tensor]) -> Sequence[Tensor | None]:
    """The gradients for two inputs that were promoted and broadcast with one another."""
    return [_shared(x, node.inputs, grad) for x, grad in zip(node.inputs, (by_x, by_y), strict=True)]


def _may_stretch(x: Tensor, others: Sequence[Tensor]) -> bool:
    """Return True if broadcasting with `others` may give `x` another shape; if not, not even its shape need be kept."""
    return any(other is not x and not _fits_in(other, x) for other in others)


def _fits_in(other: Tensor, x: Tensor) -> bool:
    """Return True if `other` broadcasts to the shape of `x`, given that the two broadcast."""
    if other.shape == ():
        return True
    if x.shape is None or other.shape is None or len(other.shape) > len(x.shape):
        return False
    pairs = list(zip(other.shape[::-1], x.shape[::-1], strict=False))
    if all(theirs == 1 or ours not in (None, 1) for theirs, ours in pairs):
        return True
    if not (other.node.graph is x.node.graph and x.node.graph.is_subgraph):
        return False
    their_own, own = extents(other), extents(x)
    assert their_own is not None
    assert own is not None
    same = zip(their_own[::-1], own[::-1], pairs, strict=False)
    return all(theirs == ours or pair[0] == 1 or pair[1] not in (None, 1) for theirs, ours, pair in same)


def _is_complex(x: Tensor) -> bool:
    return kind_of(x.dtype) == "c"


# -- functions of one value ------------------------------------------------------------------------------------------


def _multiplied(op: Op, slope: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Makes ``grad * slope(x, y)`` the derivative of ``y = op(x)``."""

    @derivative(op)
    def rule(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
        x = node.inputs[0]
        return [reaching(x, lambda: grad * conjugated(slope(x, node.outputs[0])))]


def _divided(op: Op, divisor: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Makes ``grad / divisor(x, y)`` the derivative of ``y = op(x)``."""

    @derivative(op)
    def rule(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
        x = node.inputs[0]
        return [reaching(x, lambda: grad / conjugated(divisor(x, node.outputs[0])))]


# Use the result for slopes where possible: programs keep it more often than the argument.
_multiplied(ew.COS, lambda x, y: negative(ew.sin(x)))
_multiplied(ew.COSH, lambda x, y: ew.sinh(x))
_multiplied(ew.EXP, lambda x, y: y)
_multiplied(ew.EXPM1, lambda x, y: y + 1)
_multiplied(ew.RECIPROCAL, lambda x, y: negative(square(y)))
_multiplied(ew.SIN, lambda x, y: ew.cos(x))
_multiplied(ew.SINH, lambda x, y: ew.cosh(x))
_multiplied(ew.SQUARE, lambda x, y: 2 * x)
_multiplied(ew.TAN, lambda x, y: 1 + square(y))
_multiplied(ew.TANH, lambda x, y: 1 - square(y))

# (1 - x) * (1 + x) keeps the digits that 1 - x * x loses near 1. The product of roots is right on both sides of the
# cut that the root of the product would have.
_divided(ew.ACOS, lambda x, y: negative(sqrt((1 - x) * (1 + x))))
_divided(ew.ACOSH, lambda x, y: sqrt(x - 1) * sqrt(x + 1))
_divided(ew.ASIN, lambda x, y: sqrt((1 - x) * (1 + x)))
_divided(ew.ASINH, lambda x, y: sqrt(1 + square(x)) if _is_complex(x) else ew.hypot(1, x))
_divided(ew.ATAN, lambda x, y: 1 + square(x))
_divided(ew.ATANH, lambda x, y: (1 - x) * (1 + x))
_divided(ew.LOG, lambda x, y: x)
_divided(ew.LOG1P, lambda x, y: 1 + x)
_divided(ew.LOG2, lambda x, y: x * math.log(2))
_divided(ew.LOG10, lambda x, y: x * math.log(10))
_divided(ew.SQRT, lambda x, y: 2 * y)


gradient_of_first(ew.NEGATIVE, lambda node, grad: reaching(node.inputs[0], lambda: negative(grad)))


gradient_of_first(ew.POSITIVE, lambda node, grad: reaching(node.inputs[0], lambda: grad))


gradient_of_first(ew.ABS, lambda node, grad: reaching(node.inputs[0], lambda: grad * sign(node.inputs[0])))


@derivative(ew.SIGN)
def _sign(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Real signs are constant almost everywhere; a complex one turns with its number. 0 at 0."""
    (x,), (y,) = node.inputs, node.outputs
    if not _is_complex(x):
        return [None]
    across = grad - y * ew.real(grad * conjugated(y))
    size = ew.abs(x)
    return [where(size == 0, 0, across / where(size == 0, 1, size))]


gradient_of_first(ew.CONJ, lambda node, grad: conjugated(grad))


gradient_of_first(ew.REAL, lambda node, grad: astype(grad, node.inputs[0].dtype))


gradient_of_first(ew.IMAG, lambda node, grad: astype(grad, node.inputs[0].dtype) * 1j)


# -- arithmetic ------------------------------------------------------------------------------------------------------


@derivative(ew.ADD)
def _add(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    return [_shared(x, node.inputs, lambda: grad) for x in node.inputs]


@derivative(ew.SUBTRACT)
def _subtract(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, y = node.inputs
    taken = _shared(y, node.inputs, lambda: grad)
    return [_shared(x, node.inputs, lambda: grad), None if taken is None else negative(taken)]


@derivative(ew.MULTIPLY, ew.COMPLEX_MULTIPLY)
def _multiply(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, y = node.inputs
    return _both(node, lambda: grad * conjugated(y), lambda: grad * conjugated(x))


@derivative(ew.DIVIDE)
def _divide(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, y = node.inputs
    quotient = grad / conjugated(y)
    by_y = _shared(y, node.inputs, lambda: quotient * conjugated(node.outputs[0]))
    return [_shared(x, node.inputs, lambda: quotient), None if by_y is None else negative(by_y)]


@derivative(ew.REMAINDER)
def _remainder(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, y = node.inputs
    return _both(node, lambda: grad, lambda: grad * negative(ew.floor_divide(x, y)))


@derivative(ew.POW)
def _pow(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Pass nothing to the base where the exponent is 0, nor to the exponent where the base is 0.

    The exponent's gradient is NaN where the base is negative: there real powers are no continuous function of it.
    """
    (x, _), (power,) = node.inputs, node.outputs

    def by_exponent() -> Tensor:
        base = x if x.dtype == power.dtype else astype(x, power.dtype)
        return grad * conjugated(power * log(where(base == 0, 1, base)))

    return _both(node, lambda: _by_base(node, grad), by_exponent)


def _by_base(node: Node, grad: Tensor) -> Tensor:
    x, y = node.inputs
    # A number written beside ``**`` never changes. For a separate constant, a run may feed another value.
    is_number = y.node.op is CONSTANT and (y.graph.is_subgraph or node.id - y.node.id == 1)
    known = static_value(y) if is_number else None
    if y.dtype.kind == "b":
        return where(y, grad, zeros_of(grad))
    if known is None or known.ndim:
        # With the exponent -1, 0 ** 0 would give 0 * inf.
        return grad * conjugated(y * ew.pow(x, where(y == 0, 0, y - 1)))
    exponent = known.item() if known.dtype.kind in "iufc" else float(known)
    if exponent == 0:
        return zeros_of(x)
    if exponent == 1:
        return grad
    return grad * conjugated(exponent * ew.pow(x, exponent - 1))


# -- functions of two values -----------------------------------------------------------------------------------------


@derivative(ew.ATAN2)
def _atan2(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """0 at the origin, which has no angle."""
    y, x = node.inputs
    length = ew.hypot(x, y)  # its square may overflow
    length = where(length == 0, 1, length)
    scaled = grad / length
    return _both(node, lambda: scaled * (x / length), lambda: scaled * negative(y / length))


@derivative(ew.HYPOT)
def _hypot(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """0 at the origin."""
    (x, y), (length,) = node.inputs, node.outputs
    length = where(length == 0, 1, length)
    return _both(node, lambda: grad * (x / length), lambda: grad * (y / length))


@derivative(ew.COPYSIGN)
def _copysign(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """The sign is constant almost everywhere. 0 where the magnitude is 0."""
    x, giver = node.inputs
    return [_shared(x, node.inputs, lambda: grad * sign(x) * ew.copysign(1, giver)), None]


@derivative(ew.LOGADDEXP)
def _logaddexp(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Half each where both are the same infinity."""
    x, y = node.inputs
    ahead = where(logical_and(isinf(x), x == y), 0, x - y)
    return _both(node, lambda: grad * sigmoid(ahead), lambda: grad * sigmoid(negative(ahead)))


@derivative(ew.MAXIMUM, ew.MINIMUM)
def _extreme(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Pass half to each operand where the two tie."""
    x, y = node.inputs
    share = where(x == y, 0.5 * grad, grad)
    wins = greater_equal if node.op is ew.MAXIMUM else less_equal
    return _both(node, lambda: where(wins(x, y), share, 0), lambda: where(wins(y, x), share, 0))


@derivative(ew.CLIP)
def _clip(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Pass the gradient to the bound that applies, or to a value that lies between the bounds or on one."""
    x, low, high = node.inputs[0], node.inputs[1], node.inputs[-1]
    masks: list[Callable[[], Tensor]]
    if not node.attrs["high"]:
        masks = [lambda: x >= low, lambda: x < low]
    elif not node.attrs["low"]:
        masks = [lambda: x <= high, lambda: x > high]
    else:
        masks = [
            lambda: logical_and(x >= low, x <= high),
            lambda: logical_and(x < low, low <= high),
            lambda: logical_or(x > high, low > high),
        ]

    def chosen(mask: Callable[[], Tensor]) -> Tensor:
        return where(mask(), grad, 0)

    return [_shared(each, node.inputs, partial(chosen, mask)) for each, mask in zip(node.inputs, masks, strict=True)]


@derivative(ew.NEXTAFTER)
def _nextafter(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """A step of rounding is no distance: all goes to the value, nothing to the direction."""
    return [_shared(node.inputs[0], node.inputs, lambda: grad), None]


not_differentiable(ew.CEIL, ew.FLOOR, ew.ROUND, ew.TRUNC, ew.FLOOR_DIVIDE, because="it is constant almost everywhere")


# -- comparisons, tests and bitwise functions ------------------------------------------------------------------------


not_differentiable(
    *(lo.EQUAL, lo.GREATER, lo.GREATER_EQUAL, lo.LESS, lo.LESS_EQUAL, lo.NOT_EQUAL),
    *(lo.ISFINITE, lo.ISINF, lo.ISNAN, lo.SIGNBIT, lo.LOGICAL_AND, lo.LOGICAL_NOT, lo.LOGICAL_OR, lo.LOGICAL_XOR),
    because="its result is boolean",
)
not_differentiable(
    *(lo.BITWISE_AND, lo.BITWISE_INVERT, lo.BITWISE_OR, lo.BITWISE_XOR),
    *(lo.BITWISE_LEFT_SHIFT, lo.BITWISE_RIGHT_SHIFT),
    because="it is defined for integers and booleans alone",
)
