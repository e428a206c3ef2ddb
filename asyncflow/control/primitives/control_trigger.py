"""ControlTrigger: runs once all its control inputs are done, dead or not."""

from __future__ import annotations

from asyncflow.graph.building.build import graph_for
from asyncflow.graph.ir import Node
from asyncflow.graph.op import define

CONTROL_TRIGGER = define("control_trigger", lambda: ())


def control_trigger(*, name: str | None = None) -> Node:
    """A node that is never dead; give it its inputs with `control_dependencies`."""
    return graph_for().add_node(CONTROL_TRIGGER, (), {}, (), name=name)
