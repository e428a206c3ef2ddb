"""Pass: notes which variables a run touches and where they are, and what its loops save for gradients."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Final, NamedTuple

from asyncflow.compiler.program.kernels.kernels import Resolve
from asyncflow.graph.facts import RUN_AGAIN
from asyncflow.graph.graph import Graph, has_side_effect
from asyncflow.graph.resource import resources_of
from asyncflow.state.variables.variable_state import VariableState


class Survey(NamedTuple):
    """States and nodes that a run of a program touches.

    Attributes:
        states: what tells the variables that it touches from others.
        is_repeatable: it only computes: a second run gives the same, and has no visible effect.
        read_on_host: states that CPUs use, and that another session, which shares the container, may have on a card.
        writes: the ones among `states` that it may write.
        takes: it takes elements of queues or inputs.
        waits: it may wait in line of a resource, such as a queue.
        awaits: it has coroutines of the user's, which may be calls of functions with limits.
        gathers: some firings are computed together with firings of other runs, in batches or pools.
    """

    states: frozenset[Hashable]
    is_repeatable: bool
    read_on_host: tuple[VariableState, ...]
    writes: frozenset[Hashable]
    takes: bool
    waits: bool
    awaits: bool
    gathers: bool

    @property
    def only_awaits(self) -> bool:
        """True if runs wait in coroutines, and neither in lines of queues nor for elements of inputs."""
        return self.awaits and not (self.waits or self.takes or self.gathers)


NOTHING_TOUCHED: Final = Survey(frozenset(), False, (), frozenset(), False, False, False, False)


def survey(
    graph: Graph, asynchronous: Collection[str], resolve: Resolve, homes: dict[Hashable, str] | None = None
) -> Survey:
    """Looks at every node.

    Args:
        graph: with the device of every node in ``node.device``.
        asynchronous: names of the devices that are no CPUs.
        resolve: looks up the state of resources.
        homes: where state is; what the program puts somewhere is added.
    """
    states: dict[Hashable, str | None] = {}
    shared: dict[int, VariableState] = {}
    is_repeatable = True
    takes = waits = has_users = gathers = False
    written: set[Hashable] = set()
    for node in graph.walk():
        op = node.op
        gathers = gathers or op.conduct.waits_in_line
        writes = op.effects is not None and has_side_effect(node)
        has_users = has_users or (op.conduct.is_user and op.conduct.is_async)
        # A body shared by several runs knows itself whether it only computes.
        if writes or not getattr(node.attrs.get("shared"), "is_repeatable", RUN_AGAIN.allows(op)):
            is_repeatable = False
            takes = takes or (op.conduct.is_undone and bool(node.outputs))
        for resource in resources_of(node) if node.attrs else ():
            if resource.waits:
                waits = True
                continue
            states[resource.effect_key] = node.device
            if writes:
                written.add(resource.effect_key)
            if resource.container is not None and node.device not in asynchronous:
                state = resolve(resource)
                if isinstance(state, VariableState):
                    shared[id(state)] = state
    if homes is not None:
        homes.update((key, device) for key, device in states.items() if device is not None)
    kinds = (takes, waits, has_users, gathers)
    return Survey(frozenset(states), is_repeatable, tuple(shared.values()), frozenset(written), *kinds)
