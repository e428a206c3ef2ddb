"""Derivatives of branches and loops."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.autodiff.cond_gradient import differentiate_cond
from asyncflow.autodiff.sweep import Sweep
from asyncflow.autodiff.while_gradient import differentiate_while
from asyncflow.graph.ir import Tensor
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode


def differentiate_structured(
    node: StructuredNode, grads: Sequence[Tensor | None], sweep: Sweep
) -> Sequence[Tensor | None]:
    """The gradient of each input of a branch or loop; those of variables read inside are given to `sweep`."""
    if isinstance(node, WhileNode):
        return differentiate_while(node, grads, sweep, differentiate_structured)
    assert isinstance(node, CondNode)
    return differentiate_cond(node, grads, sweep, differentiate_structured)
