"""Bodies of branches and loops: calling the user's function once inside a subgraph, and joining captures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncflow.errors import GraphError
from asyncflow.graph import nest
from asyncflow.graph.build import add_control_input, as_tensor, constant, identity
from asyncflow.graph.dtypes import promote
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.shapes import size_of
from asyncflow.ops.manipulation import reshape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.graph.build import TensorLike

_WEAK = (bool, int, float, complex)


def as_predicate(pred: TensorLike, what: str) -> Tensor:
    """`pred` as a boolean scalar; one with a single element, such as shape ``[1,1]``, is reshaped.

    Raises:
        ShapeError, DTypeError: it is not a boolean, or has several elements.
    """
    leaves, structure = nest.flatten(pred)
    if structure.kind is not None:
        raise GraphError(f"{what} is one boolean scalar; got {len(leaves)} values: {structure}")
    tensor = as_tensor(pred)
    if tensor.shape != () and size_of(tensor.shape) in (1, None):
        return reshape(tensor, ())
    return tensor


def result_tensor(body: Subgraph, value: Any, like: Tensor | None = None) -> Tensor:
    """A leaf of what a body returned, as a tensor of the body.

    A `Node` becomes a boolean that is true once the node has run. A Python number takes the dtype of `like`.
    """
    with body:
        if isinstance(value, Node):
            done = identity(constant(True), name="done")
            add_control_input(done.node, value)
            return done
        if like is not None and type(value) in _WEAK and promote([like.dtype, value]) == like.dtype:
            return constant(value, like.dtype)
        return as_tensor(value)


def join_captures(bodies: Sequence[Subgraph], n_parameters: int) -> list[Tensor]:
    """Gives all `bodies` the same captures in the same order, and closes them; returns the outer tensors."""
    joined = list(dict.fromkeys(outer for body in bodies for outer in body.captures))
    for body in bodies:
        for outer in joined:
            body.import_tensor(outer)
        body.inputs = body.inputs[:n_parameters] + [body.captures[outer] for outer in joined]
        body.captures = dict(zip(joined, body.inputs[n_parameters:], strict=True))
        body.closed = True
    return joined


def add_outer_controls(node: Node) -> None:
    """Makes a structured node wait for what its bodies named as control inputs outside themselves."""
    for body in node.subgraphs:
        for outer in body.outer_controls:
            add_control_input(node, outer)
