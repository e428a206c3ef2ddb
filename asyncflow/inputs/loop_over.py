"""`loop_over`: a loop in the graph that ends with its input."""

from __future__ import annotations

from collections.abc import Callable

from asyncflow.control.while_loop import while_loop
from asyncflow.errors import GraphError
from asyncflow.graph.graph import current_graph
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values import nest
from asyncflow.inputs.input import Input
from asyncflow.values import Nest


def loop_over(
    input: Input,
    body: Callable[..., Nest],
    loop_vars: Nest = None,
    *,
    parallel_iterations: int = 32,
    name: str | None = None,
) -> Nest:
    """Call `body` for each element of `input`, as a `while_loop` does: a training loop, say.

    Elements are taken in order, and the next may be taken while an iteration computes. An element is taken as its
    iteration begins; a failed iteration has taken it. Runs that loop over one input at the same time share its
    elements. The last element may be taken by another run after `has_more` said yes: the run then ends with
    `EndOfInput`.

    Args:
        input: what to loop over.
        body: ``body(element)``, which is called for its effects; with `loop_vars` ``body(element, loop_vars)``, which
            gives the next ones.
        loop_vars: initial values, any nest; None for none.
        parallel_iterations: how many iterations may be live at once, at least 1.
        name: of the node.

    Returns:
        The last `loop_vars`; without them how many elements there were, an int64.

    Raises:
        GraphError: the graph has unordered effects, so that nothing would order the elements; `input` is no input, or
            `body` no function.
    """
    if not isinstance(input, Input):
        raise GraphError(
            f"loop_over takes an input, such as af.read_lines(paths); got {input!r}. Over the rows of an array, write "
            "af.map_fn or af.while_loop"
        )
    if not callable(body):
        raise GraphError(f"loop_over takes a function of an element second; got {body!r}")
    graph = current_graph()
    if graph is not None and graph.effects != "ordered":
        raise GraphError("loop_over needs a graph with ordered effects: nothing else would order the elements")

    def step(count: Tensor, given: Nest) -> tuple[Tensor, Nest]:
        element = input.next()
        if loop_vars is None:
            body(element)
            return count + 1, None
        return count + 1, body(element, given)

    count, found = while_loop(
        lambda *_: input.has_more(),
        step,
        (0, loop_vars),
        parallel_iterations=parallel_iterations,
        name=name or f"{input.name}/loop",
    )
    return count if nest.flatten(loop_vars)[1].kind is type(None) else found
