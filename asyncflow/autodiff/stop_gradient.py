"""`stop_gradient`: a value that gradients take for a constant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.graph import nest
from asyncflow.graph.build import apply
from asyncflow.graph.builtin import IDENTITY
from asyncflow.graph.op import KERNELS, define, not_differentiable

if TYPE_CHECKING:
    from asyncflow.values import Kernel, Namespace, Nest


def _kernel(xp: Namespace) -> Kernel:
    return lambda value: value


STOP_GRADIENT = define(
    "stop_gradient", lambda x: x, _kernel, is_total=True, rows="elementwise", cuda=IDENTITY.cuda, traits=KERNELS
)
not_differentiable(STOP_GRADIENT, because="that is what it is for")


def stop_gradient(x: Nest) -> Nest:
    """`x` itself, which counts as a constant in `gradients`: nothing depends on `x` through it, and nothing flows back.

    It costs nothing when the graph runs.

    Args:
        x: a tensor, or any nest of them.

    >>> import asyncflow as af
    >>> with af.Graph() as graph:
    ...     x = af.placeholder("float64", ())
    ...     slope = af.gradients(x * stop_gradient(x), x)
    >>> async def main():
    ...     async with af.Session(graph) as session:
    ...         return await session.run(slope, {x: 3.0})
    >>> af.run(main())
    np.float64(3.0)
    """
    return nest.map_leaves(lambda leaf: apply(STOP_GRADIENT, leaf)[0], x)
