"""Nodes in a kernel besides elementwise ops: views of inputs, and joins of results.

A view costs a kernel nothing, as it then reads from other places. A join costs nothing either: each result is written
to its part of the joined array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import TypeAlias

from asyncflow.compiler.program.kernels.chains import ENDS_OF_ROWS
from asyncflow.compiler.program.kernels.kernels import is_host_spec
from asyncflow.compiler.program.kernels.row_text import LONGEST_ROW
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import Op
from asyncflow.graph.values.shapes import Shape, is_static, normalize_axis
from asyncflow.ops.arrays.datatypes import BROADCAST_TO
from asyncflow.ops.arrays.manipulation import CONCAT, EXPAND_DIMS, PERMUTE_DIMS, SQUEEZE
from asyncflow.ops.arrays.splitting import SPLIT
from asyncflow.ops.axes import normalize_axes
from asyncflow.ops.cuda.source import expression, has_c_type
from asyncflow.ops.indexing.indexing import GETITEM
from asyncflow.ops.indexing.keys import along
from asyncflow.ops.matrices.products import MATRIX_TRANSPOSE

Looks: TypeAlias = Mapping[Tensor, tuple[Op, Attrs]]
"""For each output of a node that is a view, the op that looks at the node's input so, and its attributes."""

_WHOLE_VIEWS = (EXPAND_DIMS, PERMUTE_DIMS, MATRIX_TRANSPOSE)
_CHECKING_VIEWS = (SQUEEZE, BROADCAST_TO)
"""Views that only some shapes have: these must be known, so that the node that fails is the user's."""


def is_elementwise(node: Node) -> bool:
    """Return True if a kernel can compute the node, element by element."""
    specs = [tensor.spec for tensor in (*node.inputs, *node.outputs)]
    if not node.single or not node.inputs or any(spec.shape is None for spec in specs) or is_host_spec(specs[-1]):
        return False
    *inputs, output = (spec.dtype for spec in specs)
    names = [f"v{index}" for index in range(len(inputs))]
    return expression(node.op, node.attrs, inputs, output, names) is not None


def looks_of(node: Node) -> Looks:
    """Return the views of which a node consists; none for a node that is no view."""
    if len(node.inputs) != 1 or node.control_inputs:
        return {}
    specs = [node.inputs[0].spec, *(output.spec for output in node.outputs)]
    if not all(spec.shape is not None and has_c_type(spec.dtype) and not is_host_spec(spec) for spec in specs):
        return {}
    if node.op is SPLIT:
        return _parts(node)
    are_known = all(is_static(spec.shape) for spec in specs)
    is_view = node.op in _WHOLE_VIEWS or (node.op in _CHECKING_VIEWS and are_known)
    if node.op is GETITEM:
        is_view = all(
            entry[0] != "input" and all(bound is None or isinstance(bound, int) for bound in entry[1:])
            and (entry[0] != "int" or are_known)
            for entry in node.attrs["key"]
        )  # fmt: skip
    return {node.outputs[0]: (node.op, node.attrs)} if is_view else {}


def _parts(node: Node) -> Looks:
    """Return the slices of which a `split` of known sizes consists."""
    shape, axis = node.inputs[0].shape, node.attrs["axis"]
    assert shape is not None
    sizes = [(output.shape or ())[normalize_axis(axis, len(shape))] for output in node.outputs]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return {}
    bounds = pairwise(accumulate(known, initial=0))
    keys = [along(axis, ("slice", start, stop, None)) for start, stop in bounds]
    return {output: (GETITEM, {"key": key}) for output, key in zip(node.outputs, keys, strict=True)}


def is_reduction(node: Node, shape: Shape) -> bool:
    """Return True if a kernel whose loop has this shape can reduce rows of it as the node does."""
    if node.op not in ENDS_OF_ROWS or shape is None or not shape or node.inputs[0].shape is None:
        return False
    specs = node.inputs[0].spec, node.outputs[0].spec
    rank = len(shape)
    axes = normalize_axes(node.attrs["axis"], rank)
    if sorted(axes) != list(range(rank - len(axes), rank)) or not axes:
        return False
    row = shape[rank - len(axes) :]
    is_short = not is_static(row) or 0 < math.prod(extent or 0 for extent in row) <= LONGEST_ROW
    return is_short and all(has_c_type(spec.dtype) and not is_host_spec(spec) for spec in specs)


def is_join(node: Node) -> bool:
    """Return True if the node joins arrays, and a kernel can write each to its part of the output."""
    if node.op is not CONCAT or node.attrs["axis"] is None or len(node.inputs) < 2:
        return False
    output = node.outputs[0].spec
    alike = all(tensor.dtype == output.dtype and tensor.shape is not None for tensor in node.inputs)
    return alike and has_c_type(output.dtype) and not is_host_spec(output)
