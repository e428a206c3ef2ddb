"""How long kernels will take, before anything has been measured."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncflow.errors import told
from asyncflow.graph.graph import STRUCTURED
from asyncflow.graph.op import host_inputs
from asyncflow.graph.shapes import is_static, size_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncflow.graph.ir import Node
    from asyncflow.graph.shapes import Shape

NS_PER_CALL = 2_000.0
NS_PER_ELEMENT = 1.0
NS_PER_FLOP = 0.1
NS_PER_DRAW = 40.0
NS_PER_STRING = 150.0

ASSUMED_EXTENT = 256

ASSUMED_ITERATIONS = 10
"""Of a loop, for what it costs as a whole."""

LARGE_ELEMENTS = 16_384
"""Where sizes are only known in a run, inputs of so many elements may mean work that is too long for the event loop."""


def kernel_ns(node: Node, input_shapes: Sequence[Shape], output_shapes: Sequence[Shape]) -> float:
    """One firing of `node` on values of these shapes; what is not known counts little."""
    flops = flops_of(node, input_shapes, output_shapes)
    if flops is not None:
        return NS_PER_CALL + NS_PER_FLOP * flops
    made = max((size_of(shape) or 0 for shape in output_shapes), default=0)
    if node.op.is_random:  # of what it is given it may draw once for each element, too
        return NS_PER_CALL + NS_PER_DRAW * max(made, *(size_of(shape) or 0 for shape in input_shapes), 0)
    if any(tensor.dtype.kind == "T" for tensor in (*node.inputs, *node.outputs)):
        return NS_PER_CALL + NS_PER_STRING * made
    return NS_PER_CALL + NS_PER_ELEMENT * made


def flops_of(node: Node, input_shapes: Sequence[Shape], output_shapes: Sequence[Shape]) -> float | None:
    """What the op of `node` says of its arithmetic on values of these shapes; None if it says nothing.

    The cost function of a user is given shapes without unknown extents. If it does not take them it counts as none, for
    a guess must not fail a program; it is told, unless it is the rank that was guessed.
    """
    op = node.op
    if op.flops is None:
        return None
    if not op.is_user:
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


def makes_what_it_is_told(node: Node) -> bool:
    """Whether values decide how much a kernel makes, as those of `arange` do: then shapes say nothing of its time."""
    return (
        node.op.flops is None
        and bool(host_inputs(node))
        and not all(is_static(tensor.shape) for tensor in node.outputs)
    )


def may_be_long(node: Node, limit_ns: float) -> bool:
    """Whether one firing may well take longer than `limit_ns`; see `assumed_ns`."""
    return assumed_ns(node) > limit_ns


def assumed_ns(node: Node) -> float:
    """One firing of `node`; extents that are not known count as `ASSUMED_EXTENT`."""
    inputs, outputs = ([assumed(tensor.shape) for tensor in tensors] for tensors in (node.inputs, node.outputs))
    return kernel_ns(node, inputs, outputs)


def assumed(shape: Shape) -> tuple[int, ...]:
    """A shape without unknown extents."""
    if shape is None:
        return (ASSUMED_EXTENT, ASSUMED_EXTENT)
    return tuple(ASSUMED_EXTENT if dim is None else dim for dim in shape)


@dataclass(frozen=True, slots=True)
class RegionEstimate:
    """An estimate of a region's running time.

    Attributes:
        once_ns: every node once, loops as if they ran one iteration.
        longest_ns: its longest kernel.
        is_open: some sizes are only known in a run.
        is_told: some of them by values, so that the sizes of the inputs do not limit them.
    """

    once_ns: float
    longest_ns: float
    is_open: bool
    is_told: bool

    def expects(self, limit_ns: float, inputs: Iterable[Any]) -> bool:
        """Whether a kernel may take longer than `limit_ns`, given the region's inputs."""
        if self.longest_ns > limit_ns or self.is_told:
            return True
        return self.is_open and sum(getattr(value, "size", 1) for value in inputs) >= LARGE_ELEMENTS


def estimate_region(nodes: Iterable[Node]) -> RegionEstimate:
    """The estimate for the nodes of a region, those in branches and loops included."""
    once = longest = 0.0
    is_open = is_told = False
    for node in nodes:
        if node.op.name in STRUCTURED or node.op.kernel is None:
            continue
        inputs, outputs = [tensor.shape for tensor in node.inputs], [tensor.shape for tensor in node.outputs]
        is_open |= not all(map(is_static, (*inputs, *outputs)))
        is_told |= makes_what_it_is_told(node)
        taken = kernel_ns(node, inputs, outputs)
        once, longest = once + taken, max(longest, taken)
    return RegionEstimate(once, longest, is_open, is_told)
