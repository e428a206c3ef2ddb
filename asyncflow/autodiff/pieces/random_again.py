"""Random numbers drawn a second time, with the same bits, elsewhere in a program: for example in the gradient of the
node that drew them.

A loop keeps the *key* of a firing, a few integers, in place of all that was drawn
(`asyncflow.ops.random.random_again`).
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.errors import GraphError
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Op, derivative, derivative_of, find_op, not_differentiable
from asyncflow.ops.derivatives.shapes import carries_gradient
from asyncflow.ops.random.random import SEEDED
from asyncflow.ops.random.random_again import RANDOM_AGAIN, RANDOM_KEY
from asyncflow.ops.rows.by_row import BY_ROW_DRAWN


def draws(node: Node) -> bool:
    """Return True if a node's values depend on its place, so that a copy elsewhere needs a key."""
    return node.op.conduct.needs_context and told_key(node) is None


def told_key(node: Node) -> Tensor | None:
    """Return the key that a node draws again by; None for any other node."""
    if node.op is RANDOM_AGAIN:
        return node.inputs[0]
    return node.inputs[1] if node.attrs.get("calls") == RANDOM_AGAIN.name else None


def forget_key(node: Node) -> None:
    """Change a node that draws by a key into a node that draws by its own firing; other nodes stay as they are."""
    attrs, inputs = node.attrs, node.inputs
    if node.op is RANDOM_AGAIN:
        node.op, node.attrs, node.inputs = find_op(attrs["draws"]), attrs["arguments"], inputs[1:]
    elif told_key(node) is not None:
        again, has_rows = attrs["arguments"], attrs["has_rows"][1:]
        node.attrs = {**attrs, "calls": again["draws"], "arguments": again["arguments"], "has_rows": has_rows}
        node.inputs = [inputs[0], *inputs[2:]]


def axes_of(key: Tensor) -> int:
    """Return how many row axes a key has, by the node that makes it."""
    node = key.node
    while node.op not in (BY_ROW_DRAWN, RANDOM_AGAIN) and node.inputs:
        node = node.inputs[0].node  # such as a node that shapes rows of rows
    attrs, axes = node.attrs, 0
    while attrs:
        axes += len(attrs.get("loops", ()))
        attrs = attrs.get("arguments", {})
    return axes


not_differentiable(RANDOM_KEY, because="its result is integers")


@derivative(RANDOM_AGAIN, SEEDED)
def _drawn_again(node: Node, *grads: Tensor | None) -> Sequence[Tensor | None]:
    """Refuse gradients through a draw if the drawing op may have a derivative.

    Raises:
        GraphError: its results depend on an input that is no constant.
    """
    op = _op_drawing(node)
    given = [x for x in node.inputs[1:] if carries_gradient(x.spec) and x.node.op is not CONSTANT]
    if derivative_of(op) is None or not given:
        return [None] * len(node.inputs)
    raise GraphError(
        f"{op.name} has no gradient with respect to {given[0]!r}; use af.stop_gradient on it"
        f"\n  written at {node.location}"
    )


def _op_drawing(node: Node) -> Op:
    """Return the op that draws in the end, by a key or with the seed of a request."""
    attrs = node.attrs
    while (op := find_op(attrs["draws"])) in (RANDOM_AGAIN, SEEDED):
        attrs = attrs["arguments"]
    return op
