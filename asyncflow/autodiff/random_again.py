"""Random numbers drawn once more, the same: elsewhere in a program, such as in the gradient of what has drawn them.

What an op draws depends on the session's seed, the run, the iteration and the op's own seed (`random`). The first three
are a value, the *key* of a firing: a few integers to keep in place of all that was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from asyncflow.errors import GraphError
from asyncflow.graph.build import apply
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.dtypes import int64
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import KernelContext, define, derivative, derivative_of, find_op, not_differentiable
from asyncflow.graph.spec import Spec
from asyncflow.ops.cost import free
from asyncflow.ops.derivatives.shapes import carries_gradient
from asyncflow.ops.rows.by_row import BY_ROW_DRAWN
from asyncflow.values import Array, Kernel, Namespace

_WORD = 1 << 64


def _key(context: KernelContext) -> Array:
    seed = (context.seed + _WORD // 2) % _WORD - _WORD // 2  # as many bits, with a sign
    return np.array([seed, context.run, *context.tag], int64)


def _again_kernel(
    xp: Namespace, *, draws: str, arguments: Attrs, axes: int, inside: int, specs: Spec | tuple[Spec, ...]
) -> Kernel:
    op = find_op(draws)
    assert op.kernel is not None
    draw = op.kernel(xp, **_replacing(arguments, axes))

    def run(context: KernelContext, key: Array, *inputs: Array) -> object:
        keys = key.reshape(-1, key.shape[-1])  # of rows, whose numbers are all that they differ in
        seed, number, *tag = keys[0].tolist() if len(keys) else [0] * key.shape[-1]
        loops = context.tag[len(context.tag) - inside :]
        return draw(KernelContext(seed=seed, run=number, tag=(*tag, *loops)), *inputs)

    return run


RANDOM_KEY = define(
    "random_key",
    lambda: Spec(int64, (None,)),
    lambda xp: _key,
    needs_context=True,
    is_random=True,
    rows="row by row",
    flops=free,
    runs_on_host=True,
)
RANDOM_AGAIN = define(
    "random_again",
    lambda key, *inputs, specs, **attrs: specs,
    _again_kernel,
    needs_context=True,
    rows="row by row",
    runs_on_host=True,
)
"""What an op draws, by a key; the same for all rows if the key is."""


def random_key() -> Tensor:
    """The key of the iteration that the current graph or body runs."""
    return apply(RANDOM_KEY)[0]


def draws(node: Node) -> bool:
    """Return True if what a node gives depends on where it stands, so that it has to be told a key elsewhere."""
    return node.op.needs_context and told_key(node) is None


def told_key(node: Node) -> Tensor | None:
    """Return the key that a node draws again by; None for any other node."""
    if node.op is RANDOM_AGAIN:
        return node.inputs[0]
    return node.inputs[1] if node.attrs.get("calls") == RANDOM_AGAIN.name else None


def drawn_again(node: Node, key: Tensor, inputs: Sequence[Tensor], inside: int, axes: int) -> Sequence[Tensor]:
    """Return the results of a node that draws random numbers, in another place.

    Args:
        node: it; one that is told a key is told this one instead.
        key: of the firing in which, or around which, it draws; with rows, those of their firings.
        inputs: its inputs, as they are here.
        inside: how many loops are around it since the key was taken; there are as many here.
        axes: how many row axes the key has (`axes_of`): the outer ones of those that the node draws for.
    """
    name, attrs = node.op.name, node.attrs
    if node.op is RANDOM_AGAIN:
        name, attrs, inputs = attrs["draws"], attrs["arguments"], inputs[1:]
    elif told_key(node) is not None:
        again, has_rows = attrs["arguments"], attrs["has_rows"][1:]
        attrs = {**attrs, "calls": again["draws"], "arguments": again["arguments"], "has_rows": has_rows}
        inputs = [inputs[0], *inputs[2:]]
    of = {"draws": name, "arguments": dict(attrs), "axes": axes}
    return apply(RANDOM_AGAIN, key, *inputs, inside=inside, specs=node.specs, **cast("Attrs", of))


def axes_of(key: Tensor) -> int:
    """Return how many row axes a key has, by the node that makes it."""
    node = key.node
    while node.op not in (BY_ROW_DRAWN, RANDOM_AGAIN) and node.inputs:
        node = node.inputs[0].node  # such as the one that gives rows of rows their shape
    attrs, axes = node.attrs, 0
    while attrs:
        axes += len(attrs.get("loops", ()))
        attrs = attrs.get("arguments", {})
    return axes


def _replacing(arguments: Attrs, axes: int) -> Attrs:
    """Arguments of an op that draws row by row, by a key with row axes: numbers of rows replace those in its tags."""
    if not axes:
        return arguments
    loops = list(arguments["loops"])
    for place, (width, after, _) in enumerate(loops[:axes]):
        deeper = sum(each for each, *_ in loops[place + 1 : axes])
        loops[place] = (width, after + deeper, width)
    return {**arguments, "loops": tuple(loops)}


not_differentiable(RANDOM_KEY, because="its result is integers")


@derivative(RANDOM_AGAIN)
def _drawn_again(node: Node, *grads: Tensor | None) -> Sequence[Tensor | None]:
    """Refuses where the derivative of the op that draws might.

    Raises:
        GraphError: its results depend on what it is given, which is no constant.
    """
    op = find_op(node.attrs["draws"])
    given = [x for x in node.inputs[1:] if carries_gradient(x.spec) and x.node.op is not CONSTANT]
    if derivative_of(op) is None or not given:
        return [None] * len(node.inputs)
    raise GraphError(
        f"{op.name} has no gradient with respect to {given[0]!r}; use af.stop_gradient on it"
        f"\n  written at {node.location}"
    )
