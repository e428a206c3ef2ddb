"""Arguments of `explore` and `find_races`, checked as `Session.run` checks them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from asyncflow.errors import FeedError, GraphError
from asyncflow.graph.building.build import TensorLike, as_array
from asyncflow.graph.building.feeds import Feeds, as_feeds, fed_array, feed_targets
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Tensor
from asyncflow.ops.arrays.known_values import assumptions_about, refuse_contradictions
from asyncflow.state.variables.variable import Variable
from asyncflow.state.variables.variable_state import VariableState
from asyncflow.values import Array, Value


def targets_in(graph: Graph, feeds: Iterable[object]) -> tuple[Tensor, ...]:
    """The tensors of a graph that keys of ``feeds`` name.

    Raises:
        FeedError: as `feed_targets`, or one belongs to another graph.
        GraphError: `graph` is none.
    """
    if not isinstance(graph, Graph):
        raise GraphError(f"graph is an af.Graph; got {type(graph).__name__} {graph!r}")
    targets = feed_targets(feeds, graph)
    for tensor in targets:
        if tensor.graph is not graph:
            raise FeedError(f"{tensor!r} belongs to another graph")
    return targets


def fed_arrays(graph: Graph, feeds: Feeds | None) -> dict[Tensor, Array]:
    """Values that a run of a graph is fed, as arrays, by their tensors.

    Raises:
        FeedError: as `targets_in`, or a value does not fit its tensor or what the graph was built on.
        GraphError: `graph` is none.
    """
    given = as_feeds(feeds)
    targets = targets_in(graph, given)
    fed = {tensor: fed_array(tensor, value) for tensor, value in zip(targets, given.values(), strict=True)}
    refuse_contradictions(assumptions_about(graph, fed), fed)
    return fed


def initial_values(variables: Mapping[Variable, TensorLike] | None) -> dict[Hashable, Value]:
    """Values before a run, by the keys of their variables.

    Raises:
        GraphError: a key is no variable.
        DTypeError, ShapeError: a value does not fit.
    """
    values: dict[Hashable, Value] = {}
    for variable, value in (variables or {}).items():
        if not isinstance(variable, Variable):
            raise GraphError(f"variables= are values by variables, such as {{w: 1.0}}; got {variable!r}")
        state = VariableState(variable.name, variable.spec)
        values[variable.effect_key] = state.assign(as_array(value, variable.dtype))
    return values
