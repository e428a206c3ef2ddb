"""Windows of a value: slices such as ``x[i : i + 2]``, whose bounds differ by a number that is known.

NumPy's slices end where the value ends, so a window may be shorter than its bounds say, and its static extent stays
open. A loop variable of a known shape takes it all the same: the run checks that each window was whole.
"""

from __future__ import annotations

from asyncflow.errors import GraphError
from asyncflow.graph.building.build import apply
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values.shapes import Shape, is_static, is_subshape, merge
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import ADD, SUBTRACT
from asyncflow.ops.arrays.known_values import default_value
from asyncflow.ops.derivatives.shapes import CHECK_SHAPE
from asyncflow.ops.indexing.indexing import GETITEM
from asyncflow.ops.indexing.keys import Key, indexed_shape

_OPEN = 1 << 40
"""Stands for an extent that is not known, and from which no window is cut too short."""


def of_whole_windows(x: Tensor, shape: Shape, what: str) -> Tensor:
    """Return `x` with a check of its shape in the run, if it has `shape` whenever all windows are whole; else `x`
    itself.

    Args:
        x: a value of the body that is being built.
        shape: the shape that is expected of it.
        what: a name for the value, for the error.
    """
    if shape is None or not is_static(shape) or is_subshape(x.shape, shape):
        return x
    if not is_subshape(_shape_if_whole(x), shape):
        return x
    with x.graph:
        return apply(CHECK_SHAPE, x, shape=shape, what=what)[0]


def _shape_if_whole(x: Tensor) -> Shape:
    """The shape of a value if all windows that it is computed from are whole."""
    body = x.graph
    found: dict[Tensor, Shape] = {}
    nodes = {node: place for place, node in enumerate(body.nodes)}
    needed = _needed(x, body)
    for node in sorted(needed, key=nodes.__getitem__):
        shapes = [found.get(source, source.shape) for source in node.inputs]
        inferred: Spec | tuple[Spec, ...] = ()
        try:
            if node.op is GETITEM:
                inferred = Spec(x.dtype, _indexed(node.inputs, node.attrs["key"], shapes[0]))
            elif node.op.is_pure and node.inputs:
                specs = [Spec(source.dtype, shape) for source, shape in zip(node.inputs, shapes, strict=True)]
                inferred = node.op.infer(*specs, **node.attrs)
            told = (inferred,) if isinstance(inferred, Spec) else inferred
            found.update({y: merge(y.shape, spec.shape) for y, spec in zip(node.outputs, told, strict=False)})
        except GraphError:
            continue  # extents of whole windows contradict the declared ones
    shape: Shape = found.get(x, x.shape)
    return shape


def _needed(x: Tensor, body: Graph) -> set[Node]:
    needed: set[Node] = set()
    pending = [x.node]
    while pending:
        node = pending.pop()
        if node not in needed and node.graph is body and not all(is_static(y.shape) for y in node.outputs):
            needed.add(node)
            pending += [source.node for source in node.inputs]
    return needed


def _indexed(inputs: list[Tensor], key: Key, shape: Shape) -> Shape:
    """Return the shape of ``x[key]``, for an `x` of this shape, if its windows are whole."""
    x, *indices = inputs
    entries = []
    for entry in key:
        if entry[0] == "slice" and isinstance(entry[1], tuple) and isinstance(entry[2], tuple) and entry[3] is None:
            (start, begin), (stop, end) = (_with_offset(indices[bound[1]]) for bound in entry[1:3])
            if start is stop:
                entry = ("slice", 0, max(0, end - begin), None)
        entries.append(entry)
    if shape is None:
        return x.shape
    large = tuple(_OPEN if extent is None else extent for extent in shape)
    result = indexed_shape(large, tuple(entries), [index.spec for index in indices])
    return result if result is None else tuple(None if n is None or n > _OPEN // 2 else n for n in result)


def _with_offset(x: Tensor) -> tuple[Tensor, int]:
    """The tensor and the integer that `x` is the sum of."""
    offset = 0
    while x.node.op in (ADD, SUBTRACT):
        first, second = x.node.inputs
        if x.node.op is ADD and default_value(first) is not None:
            first, second = second, first
        number = default_value(second)
        if number is None or number.shape or number.dtype.kind not in "iu":
            break
        offset += int(number) if x.node.op is ADD else -int(number)
        x = first
    return x, offset
