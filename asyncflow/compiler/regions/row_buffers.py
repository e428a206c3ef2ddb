"""Buffers for values of which only a run knows how many rows they have, as those of a batch or a set of vertices.

A node that is computed element by element has as many rows as the inputs that have its rank. If only one of its inputs
has, or if the run finds them shaped alike, it writes into one that nobody reads later, or, in a loop, to the front of a
buffer that is kept from iteration to iteration. Else it makes memory of its own, as without buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from asyncflow.autodiff.row_gradients import READ_ROWS
from asyncflow.control.row_store import APPEND
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Memory
from asyncflow.graph.shapes import is_static, size_of
from asyncflow.ops.linalg import MATMUL
from asyncflow.ops.manipulation import CONCAT
from asyncflow.values import Array, Kernel

_LEAST_BYTES: Final = 64
"""Rows that are smaller are hardly worth looking at a shape."""


def rows_of(rows: Array, count: int) -> Array:
    """So many rows at the front of the memory that has `rows` there, or of a larger one; they are written over."""
    memory = rows if rows.base is None else rows.base
    if len(memory) < count:
        memory = np.empty((max(count, 2 * len(memory)), *memory.shape[1:]), memory.dtype)
    return memory[:count]


def takes_out(kernel: Kernel | None) -> bool:
    """Whether a kernel can write its result to a given buffer."""
    return kernel.nout == 1 if isinstance(kernel, np.ufunc) else getattr(kernel, "takes_out", False)


def has_open_rows(x: Tensor) -> bool:
    """Whether the number of rows is all that is not known of a shape, and rows are worth a buffer."""
    shape = x.shape
    if not shape or len(shape) < 2 or shape[0] is not None or not is_static(shape[1:]):
        return False
    return (size_of(shape[1:]) or 0) * x.dtype.itemsize >= _LEAST_BYTES


def is_own(node: Node) -> bool:
    """Whether what a node gives is in memory that nobody else knows; what is taken from a store may be a view."""
    return (node.op.traits.memory is Memory.NEW or node.op is READ_ROWS) and not node.op.is_user


def rows_appended(nodes: Sequence[Node]) -> dict[Tensor, Tensor]:
    """Values that are appended to a RowStore in a straight line, and the store before."""
    return {node.inputs[1]: node.inputs[0] for node in reversed(nodes) if node.op is APPEND}


def leading_inputs(node: Node, kernel: Kernel | None) -> Sequence[Tensor]:
    """The inputs whose rows, if they are as many, are those of the result; none if that is not known of a node."""
    if not (node.single and takes_out(kernel) and has_open_rows(node.outputs[0])):
        return ()
    shape, inputs = node.outputs[0].shape, node.inputs
    if shape is None or any(x.shape is None for x in inputs):
        return ()
    if node.op is MATMUL:
        return inputs[:1] if all(x.spec.rank == len(shape) == 2 for x in inputs) else ()
    if node.op is CONCAT:
        axis = node.attrs["axis"]
        return inputs[:1] if axis is not None and axis % len(shape) else ()
    leading = [x for x in inputs if x.shape is not None and len(x.shape) == len(shape) and x.shape[0] is None]
    fits = is_elementwise(node, kernel) and len(leading) <= 2 and all(x.shape == shape for x in leading)
    return leading if fits else ()


def is_elementwise(node: Node, kernel: Kernel | None) -> bool:
    """Whether a kernel reads each element of an input before it writes the one in its place."""
    return kernel.signature is None if isinstance(kernel, np.ufunc) else node.op.rows == "elementwise"
