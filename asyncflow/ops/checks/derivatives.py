"""Derivatives of looking at values: what passes a value on passes its gradient back."""

from __future__ import annotations

from asyncflow.graph.op import gradient_of_first, not_differentiable
from asyncflow.ops.checks.checks import ASSERT, CHECK_NUMERICS, PRINT
from asyncflow.ops.derivatives.dtypes import in_dtype_of

# The first value is the result. Its gradient is neither printed nor checked.
gradient_of_first(PRINT, lambda node, grad: in_dtype_of(grad, node.inputs[0]))
gradient_of_first(CHECK_NUMERICS, lambda node, grad: in_dtype_of(grad, node.inputs[0]))

not_differentiable(ASSERT, because="its result is boolean")
