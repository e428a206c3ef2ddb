"""Derivatives of branches and loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.autodiff.cond_gradient import differentiate_cond
from asyncflow.autodiff.while_gradient import differentiate_while

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.autodiff.sweep import Sweep
    from asyncflow.graph.ir import Node, Tensor


def differentiate_structured(node: Node, grads: Sequence[Tensor | None], sweep: Sweep) -> Sequence[Tensor | None]:
    """What reaches each input of a branch or loop; what reaches variables read inside is given to `sweep`."""
    rule = differentiate_while if node.op.name == "while" else differentiate_cond
    return rule(node, grads, sweep, differentiate_structured)
