"""Derivatives of the ops every graph needs."""

from __future__ import annotations

from asyncflow.graph.builtin import CONSTANT, IDENTITY, NO_OP, PARAMETER, PLACEHOLDER
from asyncflow.graph.op import gradient_of_first, not_differentiable
from asyncflow.ops.derivatives.datatypes import in_dtype_of

gradient_of_first(IDENTITY, lambda node, grad: in_dtype_of(grad, node.inputs[0]))


not_differentiable(CONSTANT, PARAMETER, PLACEHOLDER, because="it has no inputs")
not_differentiable(NO_OP, because="it has no outputs")
