"""Estimated work of a kernel, from its op and shapes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from asyncflow.compiler.program.host_values import computes_on_host
from asyncflow.errors import told
from asyncflow.graph.builtin import CONSTANT, IDENTITY, NO_OP, PARAMETER
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Memory, host_inputs
from asyncflow.graph.values.shapes import Shape, is_static
from asyncflow.ops.arrays.manipulation import CONCAT, STACK
from asyncflow.ops.derivatives.shapes import SUM_TO
from asyncflow.ops.matrices.products import EINSUM, MATMUL, TENSORDOT, VECDOT
from asyncflow.state.variables.variable import UPDATE, VARIABLE_READ

if TYPE_CHECKING:
    from asyncflow.devices.figures.host import Launch
    from asyncflow.devices.memory import Requests

ASSUMED_EXTENT = 256

_PRODUCTS: Final = frozenset({MATMUL, TENSORDOT, VECDOT, EINSUM})
_OF_CUPY: Final = frozenset({CONCAT, STACK, SUM_TO})
_NO_LAUNCH: Final = frozenset({CONSTANT, IDENTITY, NO_OP, PARAMETER, VARIABLE_READ})


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
    # Reductions, scans and sorts use CuPy's own functions, which do much work before they launch.
    return "library" if op.rows in ("axes", "axis", "matrices") or op in _OF_CUPY else "launch"


@dataclass(slots=True)
class KernelCounter:
    """A count of the kernels that generated code launches: each straight line adds its number when it begins.

    Attributes:
        requests: of the device, whose attribute `kernels` is the count; None where kernels count by themselves.
        on_host: tensors whose values are on the host.
        written: number of launches in the code so far.
    """

    requests: Requests | None = None
    on_host: AbstractSet[Tensor] = frozenset()
    written: int = 0

    def count(self, nodes: Iterable[Node]) -> int:
        """Return how many kernels the nodes launch, without the bodies of branches and loops."""
        return sum(kernel_count(node, self.on_host) for node in nodes)


def kernel_count(node: Node, on_host: AbstractSet[Tensor]) -> int:
    """Return how many kernels a card launches for a node: one, if it computes there; the functions of updates more.

    Args:
        node: any.
        on_host: tensors whose values are on the host.
    """
    op = node.op
    if op.traits.counts_itself:
        return 0
    if op is UPDATE:
        return sum(kernel_count(inner, on_host) for inner in node.attrs["function"].nodes)
    if op.kernel is None or op in _NO_LAUNCH or op.traits.memory is Memory.METADATA or computes_on_host(node, on_host):
        return 0
    if op.flops is None or op.conduct.is_user:
        return 1
    # Ops without work give views, or move references: see `Op.flops`.
    shapes = ([assumed(x.shape) for x in tensors] for tensors in (node.inputs, node.outputs))
    return int(op.flops(*shapes, **node.attrs) > 0)


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
