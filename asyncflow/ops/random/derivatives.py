"""Derivatives of random ops: nothing flows back through drawn numbers.

The scale and offset of `normal` and `uniform` are arithmetic on the sample, which is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.errors import GraphError
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative, not_differentiable
from asyncflow.ops.random import random

not_differentiable(
    random.NORMAL, random.TRUNCATED_NORMAL, random.UNIFORM, because="a standard sample depends on no value"
)
not_differentiable(
    random.BERNOULLI, random.CATEGORICAL, random.INTEGERS, random.POISSON, because="its result is discrete"
)


@derivative(random.GAMMA)
def _gamma(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """The sample does depend on the shape parameter, by no formula that is here: zeros would be silently wrong.

    Raises:
        GraphError: unless it is a constant.
    """
    if node.inputs[0].node.op is CONSTANT:
        return [None] * len(node.inputs)
    raise GraphError(
        f"{node.op.name} has no gradient with respect to alpha, {node.inputs[0]!r}; use af.stop_gradient on it, or a "
        f"score function\n  written at {node.location}"
    )


@derivative(random.CHOICE, random.PERMUTATION)
def _unknown_rows(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Refuse: the drawn rows are not known afterwards, and zeros would be silently wrong.

    Raises:
        GraphError: always.
    """
    name = node.op.name.removeprefix("random_")
    raise GraphError(
        f"{node.op.name} does not say which rows it drew, so no gradient reaches {node.inputs[0]!r}; draw row numbers "
        f"and index with them: x[af.random.{name}(n)], where n is the number of rows\n  written at {node.location}"
    )
