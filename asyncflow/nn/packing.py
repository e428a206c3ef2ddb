"""Sequences of different lengths, packed step after step without the steps past their ends.

The rows of a packed batch are the rows of step 0, then of step 1, and so on; in each step the longest sequence comes
first. So the rows of one step are side by side, and sequences that go on are the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncflow.errors import ShapeError
from asyncflow.graph.building.build import TensorLike, apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import KERNELS, VIEW, define, derivative, gradient_of_first, inputs_from, not_differentiable
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.shapes import Shape, format_shape, is_compatible
from asyncflow.graph.values.spec import Spec
from asyncflow.nn.masks import as_lengths
from asyncflow.ops.arrays.extents import Extent, shape_reader, split_extents, template_shape
from asyncflow.ops.arrays.manipulation import reshape
from asyncflow.ops.arrays.shape import extent_of
from asyncflow.ops.cost import free, moving
from asyncflow.ops.derivatives.shapes import ensure_shape
from asyncflow.ops.indexing.indexing import gather
from asyncflow.ops.indexing.keys import along
from asyncflow.ops.indexing.scatter import scatter_to
from asyncflow.ops.rows.by_row import row_by_row
from asyncflow.ops.rows.rule import row_rule
from asyncflow.values import Array, Kernel, Namespace, Value

# -- ops -------------------------------------------------------------------------------------------------------------
# Each is the derivative of the other.


def _first_spec(x: Spec, like: Spec) -> Spec:
    return Spec(x.dtype, None if x.shape is None or like.shape is None else (like.shape[0], *x.shape[1:]))


def _pad_spec(values: Spec, *size: Spec, extent: Shape) -> Spec:
    whole = template_shape(extent, size)
    return Spec(values.dtype, None if values.shape is None or whole is None else (*whole, *values.shape[1:]))


def _pad_kernel(xp: Namespace, *, extent: Shape) -> Kernel:
    read = shape_reader(extent)

    def pad(values: Array, *size: Array) -> Array:
        (rows,) = read(size)
        if len(values) == rows:  # usual: no sequence ends in this step
            return values
        result = xp.zeros((rows, *values.shape[1:]), dtype=values.dtype)
        result[: len(values)] = values
        return result

    return pad


FIRST_ROWS = define("first_rows", _first_spec, lambda xp: lambda x, like: x[: len(like)], flops=free, traits=VIEW)


def _pad_flops(inputs: Sequence[Shape], outputs: Sequence[Shape], *, extent: Shape) -> float:
    return free(inputs, outputs) if inputs[0] == outputs[0] else moving(inputs, outputs)


PAD_ROWS = define("pad_rows", _pad_spec, _pad_kernel, flops=_pad_flops, host_inputs=inputs_from(1), traits=KERNELS)


row_rule(FIRST_ROWS, PAD_ROWS)(row_by_row)


def first_rows(x: Tensor, like: Tensor) -> Tensor:
    """The first rows of `x`, as many as `like` has, which are no more: so both are known to have one extent."""
    return apply(FIRST_ROWS, x, like)[0]


@derivative(FIRST_ROWS)
def _first_rows(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, _ = node.inputs
    template, size = split_extents((extent_of(x, 0),))
    return [ensure_shape(apply(PAD_ROWS, grad, *size, extent=template)[0], x.shape), None]


gradient_of_first(PAD_ROWS, lambda node, grad: first_rows(grad, node.inputs[0]))


def place_rows(values: Tensor, rows: Tensor, extent: Extent) -> Tensor:
    """Zeros with `extent` rows, but ``values[i]`` in row ``rows[i]``."""
    rest = [extent_of(values, axis) for axis in range(1, values.ndim or 1)]
    return scatter_to(values, along(0, ("input", 0)), [rows], (extent, *rest))


# -- order -----------------------------------------------------------------------------------------------------------


def _order_spec(lengths: Spec, steps: Spec, batch: Spec) -> tuple[Spec, ...]:
    each = Spec(int64, (None,) if lengths.shape is None else lengths.shape)
    any_number = Spec(int64, (None,))
    return Spec(int64, ()), any_number, each, each, any_number


def _order_kernel(xp: Namespace) -> Kernel:
    def order(lengths: Array, steps: Array, batch: Array) -> tuple[Value, ...]:
        if len(lengths) != batch or not ((lengths >= 0) & (lengths <= steps)).all():
            shown = np.array2string(lengths, threshold=2 * _SHOWN, edgeitems=_SHOWN)
            raise AssertionError(
                "dynamic_rnn: lengths are one for each sequence, and every length is at least 0 and at most the extent "
                f"of the time axis; lengths, steps, sequences:\n  {shown}\n  {steps}\n  {batch}"
            )
        # Both stable, so that they agree on sequences of one length.
        descending, ascending = np.argsort(-lengths, kind="stable"), np.argsort(lengths, kind="stable")
        longest = lengths.max(initial=0)
        counts = len(lengths) - np.searchsorted(lengths[ascending], np.arange(longest), side="right")
        firsts = np.cumsum(counts) - counts
        places = np.arange(counts.sum()) - np.repeat(firsts, counts)
        rows = np.repeat(np.arange(longest) * batch, counts) + descending[places]
        return np.int64(longest), counts, descending, ascending, rows

    return order


_SHOWN = 8
"""Number of lengths at each end that an error shows."""

PACK_LENGTHS = define(
    "pack_lengths", _order_spec, _order_kernel, rows="as found", runs_on_host=True, host_inputs=inputs_from(0)
)
not_differentiable(PACK_LENGTHS, because="all of its outputs are integers")


# -- batches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The packing of a time-major batch of some lengths; all are int64.

    Attributes:
        steps: extent of the time axis.
        batch: number of sequences.
        longest: the largest of the lengths: how many steps there are to go; ``()``.
        counts: how many sequences go on in each step; ``(longest,)``.
        descending: the sequences from the longest to the shortest, in their order where equally long; ``(batch,)``.
        ascending: from the shortest to the longest, likewise.
        rows: where each packed row is in the batch whose first two axes are joined; ``(sum of counts,)``.
    """

    steps: int | Tensor
    batch: int | Tensor
    longest: Tensor
    counts: Tensor
    descending: Tensor
    ascending: Tensor
    rows: Tensor

    def pack(self, x: Tensor) -> Tensor:
        """Pack ``(steps, batch, ...)`` to ``(rows, ...)``, without steps past the ends."""
        return gather(reshaped(x, (self.steps * self.batch,), 2), self.rows)

    def unpack(self, packed: Tensor) -> Tensor:
        """``(steps, batch, ...)``, with zeros past the ends."""
        whole = place_rows(packed, self.rows, self.steps * self.batch)
        return reshaped(whole, (self.steps, self.batch), 1)


def packing(lengths: TensorLike, steps: int | Tensor, batch: int | Tensor) -> Packing:
    """Return the packing of a batch with these lengths.

    Raises:
        DTypeError, ShapeError: `lengths` are no integers of shape ``(batch,)``.
        AssertionError: (in the run, as the cause of a KernelError) a length below 0 or above `steps`, or more or fewer
            of them than sequences.
    """
    given = as_lengths(lengths)
    known = batch if isinstance(batch, int) else None
    if not is_compatible(given.shape, (known,)):
        raise ShapeError(f"lengths are one for each sequence, of shape {format_shape((known,))}; got {given!r}")
    longest, counts, descending, ascending, rows = apply(PACK_LENGTHS, given, steps, batch)
    return Packing(
        steps=steps,
        batch=batch,
        longest=longest,
        counts=counts,
        descending=descending,
        ascending=ascending,
        rows=rows,
    )


def reshaped(x: Tensor, first: tuple[Extent, ...], joined: int) -> Tensor:
    """`x` with `first` in place of its first `joined` axes."""
    assert x.shape is not None
    rest = [extent_of(x, axis) for axis in range(joined, len(x.shape))]
    return reshape(x, (*first, *rest))
