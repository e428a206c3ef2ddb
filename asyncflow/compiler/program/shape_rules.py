"""Shapes of values that a run does not compute, found from the shapes of their node's inputs.

A gradient often asks for the shape of a forward value and nothing else of it: to sum to it, to make ones of it, or to
check a given gradient. The rule by which the graph was typed tells it, without arithmetic and without the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncflow.control.stores.tensor_array import READ
from asyncflow.errors import GraphError
from asyncflow.graph.ir import Attrs, Tensor
from asyncflow.graph.op import METADATA, Op, host_inputs, inputs_from, runs_on_host
from asyncflow.graph.values.dtypes import VARIANT, int64
from asyncflow.graph.values.shapes import Shape, is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.values import Array, Kernel, Namespace, Value


@dataclass(frozen=True, slots=True)
class ShapeRule:
    """The shape rule of a node.

    Attributes:
        op: of the node.
        attrs: of the node.
        inputs: specs of the node's inputs.
        index: of the output asked for.
    """

    op: Op
    attrs: Attrs
    inputs: tuple[Spec, ...]
    index: int

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the shape of the output, given the inputs' shapes.

        Raises:
            ShapeError, DTypeError: the op does not take them.
        """
        specs = (Spec(spec.dtype, shape) for spec, shape in zip(self.inputs, shapes, strict=True))
        found = self.op.infer(*specs, **self.attrs)
        return found.shape if isinstance(found, Spec) else found[self.index].shape


def rule_of(tensor: Tensor) -> ShapeRule | None:
    """Return the rule that derives the shape of `tensor` from its node's inputs; None if shapes do not suffice."""
    node = tensor.node
    op = node.op
    if not op.is_pure or not node.inputs or node.control_inputs or runs_on_host(node) or host_inputs(node):
        return None
    specs = tuple(source.spec for source in node.inputs)
    if any(spec.dtype == VARIANT for spec in specs):
        return None
    rule = ShapeRule(op, node.attrs, specs, tensor.index)
    ranks = range(_RANKS_TRIED) if any(spec.shape is None for spec in specs) else (0,)
    return rule if any(_is_closed(rule, rank) for rank in ranks) else None


_RANKS_TRIED = 4


def _is_closed(rule: ShapeRule, rank: int) -> bool:
    """Return True if the shape is fully known once all shapes are, with unknown ranks taken as `rank`."""
    guesses = (((1,) * rank if spec.shape is None else spec.shape) for spec in rule.inputs)
    try:
        return is_static(rule.shape([tuple(1 if extent is None else extent for extent in guess) for guess in guesses]))
    except GraphError:
        return False


def shape_sources(tensor: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]] | None:
    """The sources of the shape of `tensor` without it: tensors whose shapes, and tensors whose values are needed.

    None if it is not.
    """
    node = tensor.node
    if node.op is READ:  # a read may drop the element, but not its shape
        return (), node.inputs
    rule = rule_of(tensor)
    if rule is None:
        return None
    return [source for source in node.inputs if not is_static(source.shape)], ()


def _kernel(xp: Namespace, *, rule: ShapeRule) -> Kernel:
    def run(*vectors: Array) -> Value:
        rest = iter(vectors)
        known = (spec.shape for spec in rule.inputs)
        shapes = [shape if is_static(shape) else tuple(int(extent) for extent in next(rest)) for shape in known]
        return np.array(rule.shape(shapes), dtype=int64)

    return run


SHAPE_BY_RULE = Op(
    "shape_by_rule",
    lambda *sizes, rule: Spec(int64, (None,)),
    _kernel,
    host_inputs=inputs_from(0),
    traits=METADATA,
)
"""Op that returns the shape of a value, given the unknown shapes among its node's inputs."""
