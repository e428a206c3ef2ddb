"""Row rules of ops that go element by element: what broadcasts for single rows broadcasts behind the row axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.graph.build import apply
from asyncflow.graph.builtin import IDENTITY
from asyncflow.ops import elementwise as e
from asyncflow.ops import logic as lo
from asyncflow.ops import nn
from asyncflow.ops.datatypes import ASTYPE, BROADCAST_ARRAYS
from asyncflow.ops.erf import ERF
from asyncflow.ops.promotion import ufunc_ops
from asyncflow.ops.rows.rule import row_rule
from asyncflow.ops.searching import WHERE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.ops.rows.rule import LiftedValue, RowAxis

_COMPARISONS = (lo.EQUAL, lo.GREATER, lo.GREATER_EQUAL, lo.LESS, lo.LESS_EQUAL, lo.NOT_EQUAL)
_ACTIVATIONS = (nn.RELU, nn.SIGMOID, nn.SILU, nn.SOFTPLUS, nn.GELU, ERF)


@row_rule(*ufunc_ops(), *_COMPARISONS, *_ACTIVATIONS, IDENTITY, ASTYPE, WHERE, e.REAL, e.IMAG, e.CLIP)
def _elementwise(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    return apply(node.op, *(rows.aligned(inputs) if len(inputs) > 1 else [inputs[0].tensor]), **node.attrs)


@row_rule(BROADCAST_ARRAYS)
def _broadcast_arrays(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    return apply(node.op, *rows.aligned(inputs), **node.attrs)
