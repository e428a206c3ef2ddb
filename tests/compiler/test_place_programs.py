"""Random programs with random requests: every node has a device, the one asked for, and followers follow."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

import asyncflow as af
from asyncflow.compiler.optimize.cse import eliminate_common_subexpressions
from asyncflow.compiler.optimize.fold import fold
from asyncflow.compiler.optimize.hoist import hoist
from asyncflow.compiler.optimize.loop_variables import reduce_loop_variables
from asyncflow.compiler.optimize.prune import prune
from asyncflow.compiler.optimize.simplify import simplify
from asyncflow.compiler.placement.constraints import resolve_requests
from asyncflow.compiler.placement.place import place
from asyncflow.compiler.program.extract import extract
from asyncflow.compiler.program.order_effects import order_effects
from tests.compiler.placing import MS, devices
from tests.property.graphs import build
from tests.property.strategies import write_program

if TYPE_CHECKING:
    from asyncflow.graph.graph import Graph

FOLLOWERS = {"parameter", "while", "cond", "fetch"}


def prepared(choose: Random, n_devices: int) -> tuple[Graph, dict[str, str]]:
    """Return a program's graph, ready to be placed, and the requests for its nodes."""
    graph = build(write_program(choose.randrange), choose.choice([1, 4, 32])).graph
    feeds = [node.outputs[0] for node in graph.nodes if node.op.name == "placeholder"]
    results = [tensor for node in graph.nodes for tensor in node.outputs][-3:]
    copied = extract(graph, results, feeds, all_effects=True)
    for node in copied.graph.walk():
        if node.op.effects is None and node.op.name not in FOLLOWERS and choose.random() < 0.3:
            node.device = f"sim:{choose.randrange(n_devices)}"
    resolve_requests(copied.graph, graph, devices(*(f"sim:{index}" for index in range(n_devices))))
    if choose.random() < 0.5:
        for change in (reduce_loop_variables, fold, simplify, eliminate_common_subexpressions, hoist):
            change(copied.graph)
        prune(copied.graph, copied.kept)
        af.verify(copied.graph)
    order_effects(copied.graph)
    return copied.graph, {node.name: node.device for node in copied.graph.walk() if node.device is not None}


@pytest.mark.parametrize("seed", range(30))
def test_every_node_has_the_device_it_should(seed: int) -> None:
    choose = Random(seed)
    n_devices = choose.choice([2, 3])
    graph, asked = prepared(choose, n_devices)
    # Heavy ones make it worth while to cut branches and loops.
    costs = {node.name: choose.choice([0.001, 1.0]) * MS for node in graph.walk()}
    placement = place(graph, devices(*(f"sim:{index}" for index in range(n_devices))), costs)
    af.verify(graph)
    for node in graph.walk():
        assert placement.devices[node.name] == node.device
        if node.op.name not in FOLLOWERS:
            assert node.device == asked.get(node.name, node.device)
        if node.op.name == "fetch" and not node.inputs[0].node.subgraphs:
            assert node.device == node.inputs[0].node.device
        if node.op.name != "while":
            continue
        condition, body = node.subgraphs
        for in_cond, in_body in zip(condition.inputs, body.inputs, strict=True):
            assert in_cond.node.device == in_body.node.device
        for variable, result in zip(body.inputs, body.results, strict=False):
            if result.node.op.name not in FOLLOWERS:
                assert variable.node.device == result.node.device
