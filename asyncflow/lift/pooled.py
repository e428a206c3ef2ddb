"""``while_loop(pool=)``: a loop whose activations, of any runs, are the rows of one state that is stepped together.

A pooled loop is one node, which waits as a coroutine does. Predicate and body are built over many activations, as two
graphs of their own: `check` gives which of those that join go on at all, `step` the next loop variables and which of
those that were stepped go on. A step is a run of that graph, in the session of the activations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from asyncflow.control.body import join_captures
from asyncflow.control.while_loop import install_pooling
from asyncflow.errors import GraphError
from asyncflow.graph.build import add_control_input, placeholder
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.dtypes import VARIANT
from asyncflow.graph.graph import Graph
from asyncflow.graph.op import define, derivative
from asyncflow.graph.shapes import is_static
from asyncflow.lift.batched import (
    NO_TEXT,
    BodyProgram,
    check_shareable,
    is_repeatable,
    is_same_for_all,
    known_constants,
    reads,
    variables_of,
)
from asyncflow.lift.lifting import lift
from asyncflow.ops.batch import Pool
from asyncflow.ops.rows.rule import CannotLift, LiftedValue, no_row_rule
from asyncflow.ops.shape import shape

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from asyncflow.graph.graph import Subgraph
    from asyncflow.graph.ir import Attrs, Node, Tensor
    from asyncflow.graph.spec import Spec
    from asyncflow.values import Array, Kernel, Namespace, Value


class SharedLoop:
    """The code of one pooled loop in a graph.

    Attributes:
        label: its name.
        pool: how many activations are stepped together.
        n_vars: how many of its inputs are loop variables; the others are captures.
        has_rows: of each input, whether each activation has one of its own.
        specs: of the loop variables of one activation.
        is_repeatable: computing a step again does no harm.
        check: from all inputs to whether an activation goes on.
        step: from all inputs to the next loop variables, and whether it goes on.
    """

    why_no_text = NO_TEXT.format("a loop with a pool")

    def __init__(self, condition: Subgraph, body: Subgraph, kept: dict[int, bool], pool: Pool, label: str) -> None:
        self.label = label
        self.pool = pool
        self.specs = tuple(x.spec for x in body.inputs[: len(body.results)])
        self.n_vars = len(self.specs)
        self.has_rows = tuple(kept.values())
        self.is_repeatable = is_repeatable(condition) and is_repeatable(body)
        self._places = tuple(kept)
        self._condition, self._body = condition, body
        self.check = self._built(steps=False)
        self.step = self._built(steps=True)

    def __repr__(self) -> str:
        return f"<pooled loop {self.label}, at most {self.pool.capacity}>"

    def _built(self, *, steps: bool) -> BodyProgram:
        body, condition = self._body, self._condition
        outer = {inner: outer.node for outer, inner in body.captures.items() if outer.node.op is CONSTANT}
        with Graph() as graph:
            constants = known_constants(outer)
            given: dict[int, LiftedValue] = {}
            for place, has_rows in zip(self._places, self.has_rows, strict=True):
                x = body.inputs[place]
                extents = (None, *(x.shape or ())) if has_rows else x.shape
                given[place] = LiftedValue(placeholder(x.dtype, extents), has_rows)
            feeds = tuple(value.tensor for value in given.values())
            count = shape(feeds[0])[0]

            def known(part: Subgraph) -> dict[Tensor, LiftedValue]:
                places = enumerate(part.inputs)
                return {x: given[k] if k in given else constants[body.inputs[k]] for k, x in places}

            if not steps:
                return BodyProgram(
                    graph, feeds, tuple(lift(condition, known(condition), condition.results, count, self.label))
                )
            following = lift(body, known(body), body.results, count, self.label)
            given.update({k: LiftedValue(x, has_rows=True) for k, x in enumerate(following)})
            goes_on = lift(condition, known(condition), condition.results, count, f"{self.label}/again")
        return BodyProgram(graph, feeds, (*following, *goes_on))


def _specs(*inputs: Spec, shared: SharedLoop, **variables: object) -> tuple[Spec, ...]:
    return shared.specs


_gatherers: list[Callable[[SharedLoop, tuple[Array, ...]], Awaitable[Sequence[Array]]]] = []


def install_pool_gatherer(gather: Callable[[SharedLoop, tuple[Array, ...]], Awaitable[Sequence[Array]]]) -> None:
    """Tells who steps activations; the runtime does, which nothing here may know."""
    _gatherers[:] = [gather]


def _kernel(xp: Namespace, *, shared: SharedLoop, **variables: object) -> Kernel:
    async def call(*inputs: Array) -> Value:
        return tuple(await _gatherers[0](shared, inputs))

    return call


POOLED = define("pooled_while", _specs, _kernel, is_async=True, effects=reads)
"""A pooled loop; its inputs are initial values and what predicate and body capture."""


@derivative(POOLED)
def _no_gradient(node: Node, *grads: Tensor | None) -> NoReturn:
    raise GraphError(
        f"{node.name} is a loop with a pool, through which no gradient goes: differentiate it without pool=\n"
        f"  built at {node.location}"
    )


no_row_rule(POOLED, because="it steps activations of its own accord; leave out pool=, as there are rows at hand")


def _add(
    condition: Subgraph, body: Subgraph, initial: Sequence[Tensor], specs: Sequence[Spec], label: str, pool: Pool
) -> Node:
    """Adds the node of a pooled loop."""
    if not isinstance(pool, Pool):
        raise GraphError(f"pool= of {label} is an af.Pool; got {pool!r}")
    for place, spec in enumerate(specs):
        if spec.dtype == VARIANT:
            raise GraphError(f"{label} cannot be pooled: loop variable {place} is a TensorArray or RowStore")
        if not is_static(spec.shape):
            raise GraphError(f"{label} cannot be pooled: loop variable {place} is {spec}, whose shape is not fixed")
    captured = join_captures((condition, body), len(specs))
    for part in (condition, body):
        check_shareable(part, label, "pooled")
    kept = dict.fromkeys(range(len(specs)), True)
    outer = list(initial)
    for place, x in enumerate(captured, len(specs)):
        if x.node.op is CONSTANT:
            continue
        kept[place] = not is_same_for_all(x)
        if kept[place] and not is_static(x.shape):
            raise GraphError(f"{label} cannot be pooled: it captures {x.name}, {x.spec}, whose shape is not fixed")
        outer.append(x)
    try:
        shared = SharedLoop(condition, body, kept, pool, label)
    except CannotLift as reason:
        raise GraphError(f"{label} cannot be pooled: {reason}") from None
    assert body.parent is not None
    attrs: Attrs = {"shared": shared, **variables_of(condition, body)}
    node = body.parent.add_node(POOLED, outer, attrs, shared.specs, reserved_name=label)
    for part in (condition, body):
        for control in part.outer_controls:
            add_control_input(node, control)
    return node


install_pooling(_add)

__all__ = ["POOLED", "SharedLoop", "install_pool_gatherer"]
