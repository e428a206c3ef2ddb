"""`erf`, which NumPy does not have: the rational approximations of the Cephes library, right to the last digit or two.

Below 1 the function is ``x * T(x**2) / U(x**2)``, beyond it ``1 - exp(-x**2) * P(x) / Q(x)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from asyncflow.graph.building.build import TensorLike, apply
from asyncflow.graph.ir import Tensor
from asyncflow.ops.cuda.source import function
from asyncflow.ops.layers.nn import activation
from asyncflow.values import Array, Namespace

_T = (
    9.60497373987051638749,
    90.0260197203842689217,
    2232.00534594684319226,
    7003.32514112805075473,
    55592.3013010394962768,
)
_U = (
    1.0,
    33.5617141647503099647,
    521.357949780152679795,
    4594.32382970980127987,
    22629.0000613890934246,
    49267.3942608635921086,
)
_P = (
    2.46196981473530512524e-10,
    0.564189564831068821977,
    7.46321056442269912687,
    48.6371970985681366614,
    196.520832956077098242,
    526.445194995477358631,
    934.528527171957607540,
    1027.55188689515710272,
    557.535335369399327526,
)
_Q = (
    1.0,
    13.2281951154744992508,
    86.7072140885989742329,
    354.937778887819891062,
    975.708501743205489753,
    1823.90916687909736289,
    2246.33760818710981792,
    1656.66309194161350182,
    557.535340817727675546,
)

_FAR = 6.0
"""From here on the result is 1."""


def _polynomial(coefficients: Sequence[float | Array], x: Array) -> float | Array:
    return reduce(lambda total, coefficient: total * x + coefficient, coefficients)


def _erf(xp: Namespace, x: Array) -> Array:
    size = xp.minimum(xp.abs(x), _FAR)
    near_square = xp.minimum(size * size, 1)
    near = x * _polynomial(_T, near_square) / _polynomial(_U, near_square)
    far = 1 - xp.exp(-size * size) * _polynomial(_P, size) / _polynomial(_Q, size)
    return xp.where(size < 1, near, xp.copysign(far, x))


ERF = activation("erf", _erf, 50, function("erf"))


def erf(x: TensorLike, /) -> Tensor:
    """The error function of floats: twice the integral of ``exp(-t**2)`` from 0 to `x`, over the root of pi."""
    return apply(ERF, x)[0]
