"""Finds extents that only a run knows and that are the same, of values in the body of a loop or branch.

With an open batch every value has an unknown extent, and for all that a gradient could tell, ``x * y`` has stretched
`x`: it would keep shapes, and sum, in every iteration. Most such extents are extents of one value, though. Here each
stands for a number of its own, too large for any array, and shape rules say where it turns up again. Outside of bodies
nothing is said, because there a run may feed any value with another extent.
"""

from __future__ import annotations

from random import Random

from asyncflow.errors import GraphError
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values.spec import Spec

_LEAST = 1 << 40


def extents(x: Tensor) -> tuple[int, ...] | None:
    """Return the extents of a value: known ones, and large numbers for the others, equal for equal extents; None for no
    rank.

    Outside of bodies each open extent is one of its own.
    """
    found = x.node.graph.extents
    open_ = [x]
    while open_:
        tensor = open_[-1]
        if tensor in found:
            open_.pop()
            continue
        before = [each for each in _sources(tensor.node) if each not in found]
        if before:
            open_ += before
        else:
            _note(tensor.node)
    return found[x]


def _sources(node: Node) -> list[Tensor]:
    """The inputs whose extents tell something of the outputs'."""
    op = node.op
    if op.kernel is None or op.conduct.is_user or not node.graph.is_subgraph:
        return []
    if all(_is_known(x.spec) for x in node.outputs):
        return []
    return list(node.inputs)


def _is_known(spec: Spec) -> bool:
    return spec.shape is None or None not in spec.shape


def _note(node: Node) -> None:
    """Find the extents of a node's outputs, given the extents of its inputs."""
    found = node.graph.extents
    sources = _sources(node)
    inferred: tuple[Spec, ...] = ()
    if sources:
        try:
            specs = node.op.infer(*(Spec(x.dtype, found[x]) for x in sources), **node.attrs)
        except GraphError:  # such as a sum of two extents that are assumed to differ
            specs = ()
        inferred = (specs,) if isinstance(specs, Spec) else specs
    from_inputs: dict[int | None, int] = {
        extent: extent for x in sources for extent in found[x] or () if extent >= _LEAST
    }
    for output in node.outputs:
        if output.shape is None:
            found[output] = None
            continue
        told = inferred[output.index].shape if inferred else None
        if told is None or len(told) != len(output.shape):
            told = (None,) * len(output.shape)
        found[output] = tuple(
            extent if extent is not None else from_inputs.get(there) or _new(output, axis)
            for axis, (extent, there) in enumerate(zip(output.shape, told, strict=True))
        )


def _new(x: Tensor, axis: int) -> int:
    """A number that no sum of others is by chance."""
    return _LEAST + Random(f"{x.name} {axis}").getrandbits(40)
