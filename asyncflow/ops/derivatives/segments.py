"""Derivatives of sums by label; what names the labels has none."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative, not_differentiable
from asyncflow.ops.indexing import gather
from asyncflow.ops.segments import BINCOUNT, SEGMENT_IDS

not_differentiable(SEGMENT_IDS, because="segment ids are integers")


@derivative(BINCOUNT)
def _bincount(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, *weights = node.inputs
    return [None, *(gather(grad, x) for _ in weights)]
