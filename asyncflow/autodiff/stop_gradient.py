"""`stop_gradient`: a value that gradients take for a constant."""

from __future__ import annotations

from dataclasses import replace

from asyncflow.graph.building.build import apply
from asyncflow.graph.builtin import IDENTITY
from asyncflow.graph.op import KERNELS, not_differentiable, register
from asyncflow.graph.values import nest
from asyncflow.values import Nest

STOP_GRADIENT = register(replace(IDENTITY, name="stop_gradient", traits=KERNELS))
not_differentiable(STOP_GRADIENT, because="stopping gradients is its purpose")


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
