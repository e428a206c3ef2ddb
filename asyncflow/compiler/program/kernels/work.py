"""Estimated work of a kernel, from its op and shapes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from asyncflow.errors import told
from asyncflow.graph.ir import Node
from asyncflow.graph.op import host_inputs
from asyncflow.graph.values.shapes import Shape, is_static
from asyncflow.ops.arrays.manipulation import CONCAT, STACK
from asyncflow.ops.derivatives.shapes import SUM_TO
from asyncflow.ops.matrices.products import EINSUM, MATMUL, TENSORDOT, VECDOT

if TYPE_CHECKING:
    from asyncflow.devices.figures.host import Launch

ASSUMED_EXTENT = 256

_PRODUCTS: Final = frozenset({MATMUL, TENSORDOT, VECDOT, EINSUM})
_OF_CUPY: Final = frozenset({CONCAT, STACK, SUM_TO})


def flops_of(node: Node, input_shapes: Sequence[Shape], output_shapes: Sequence[Shape]) -> float | None:
    """Return the arithmetic operations of `node` on values of these shapes, by its op's cost; None if the op has none.

    The cost function of a user is given shapes without unknown extents. If it does not take them it counts as none, for
    a guess must not fail a program; it is told, unless it is the rank that was guessed.
    """
    op = node.op
    if op.flops is None:
        return None
    if not op.conduct.is_user:
        return op.flops(input_shapes, output_shapes, **node.attrs)
    shapes = [assumed(shape) for shape in input_shapes], [assumed(shape) for shape in output_shapes]
    try:
        return float(op.flops(*shapes, **node.attrs))
    except Exception as error:
        if all(tensor.shape is not None for tensor in (*node.inputs, *node.outputs)):
            warnings.warn(
                f"the cost= of {op.name} fails for inputs of shapes {shapes[0]} and outputs of {shapes[1]}, so its "
                f"time is guessed without: {told(error)}\n  built at {node.location}",
                RuntimeWarning,
                stacklevel=2,
            )
        return None


def launch_of(node: Node) -> Launch:
    """Return the way in which a card launches `node`: what that takes the host depends on it."""
    op = node.op
    if op in _PRODUCTS:
        return "product"
    # Reductions, scans and sorts go through CuPy's own functions, which look at much before they launch anything.
    return "library" if op.rows in ("axes", "axis", "matrices") or op in _OF_CUPY else "launch"


def makes_what_it_is_told(node: Node) -> bool:
    """Return True if values decide the size of a kernel's results, as for `arange`: shapes then do not tell its
    time.
    """
    return (
        node.op.flops is None
        and bool(host_inputs(node))
        and not all(is_static(tensor.shape) for tensor in node.outputs)
    )


def assumed(shape: Shape) -> tuple[int, ...]:
    """A shape without unknown extents."""
    if shape is None:
        return (ASSUMED_EXTENT, ASSUMED_EXTENT)
    return tuple(ASSUMED_EXTENT if dim is None else dim for dim in shape)
