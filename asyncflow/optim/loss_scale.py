"""Loss scaling: gradients of 16 bits are computed of a loss that is multiplied by a number, which adapts.

Small gradients are 0 in float16. A factor on the loss, a power of 2, keeps them; it is divided out before the step. If
it is too large, some gradient is not finite: then the step is left out, and the factor halved. After many steps without
such a gradient, the factor is doubled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from asyncflow.autodiff.gradients import gradients
from asyncflow.control.cond import cond
from asyncflow.errors import GraphError, brief
from asyncflow.graph.building.build import constant, group
from asyncflow.graph.building.scopes import name_scope
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values.dtypes import float32
from asyncflow.ops.arithmetic.logic import isfinite, logical_and
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.reductions.utility import all as all_of
from asyncflow.ops.searching.searching import where
from asyncflow.optim.scalars import as_dtype_of, is_number
from asyncflow.state.variables.variable import Variable

GROWTH_STEPS = 2000
"""Steps with finite gradients after which the factor is doubled."""
LEAST, MOST = 1.0, 2.0**24
"""Bounds of the factor."""


def scaled_step(
    loss: Tensor,
    variables: list[Variable],
    change: Callable[[list[tuple[Tensor | None, Variable]]], Node],
    first: float,
) -> Node:
    """Add a step along gradients of `loss` that are computed of its multiple.

    Args:
        loss: a float scalar.
        variables: to change.
        change: adds the step, given pairs of a gradient and a variable.
        first: the factor at first.
    """
    if not is_number(first) or not LEAST <= first <= MOST:
        raise GraphError(f"minimize: loss_scale is a number from {LEAST:g} to {MOST:g}; got {brief(first)}")
    with name_scope("loss_scale"):
        factor = Variable(np.float32(first), name="loss_scale")
        finite_steps = Variable(np.int64(0), name="loss_scale/finite_steps")
        scale = factor.read()
        grads = [
            grad if grad is None else grad / as_dtype_of(scale, grad.dtype)
            for grad in gradients(astype(loss, float32) * scale, variables)
        ]
        checked = [all_of(isfinite(grad)) for grad in grads if grad is not None]
        is_finite = reduce(logical_and, checked, constant(True))

        def step() -> Node:
            count = finite_steps.read() + 1
            grows = count >= GROWTH_STEPS
            return group(
                change(list(zip(grads, variables, strict=True))),
                factor.assign(where(grows & (scale < MOST), scale * 2, scale)),
                finite_steps.assign(where(grows, 0, count)),
            )

        def leave_out() -> Node:
            return group(factor.assign(where(scale > LEAST, scale / 2, scale)), finite_steps.assign(0))

        done: Tensor = cond(is_finite, step, leave_out)
        # The result, and not the branch alone: without ordered effects that would run nothing in it.
        return group(done)
