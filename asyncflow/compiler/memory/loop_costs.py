"""Time of an iteration of a loop on one device.

It is estimated by `asyncflow.compiler.placement.node_costs`: measured where a node has run, else from shapes. On a
device that fuses, elementwise nodes that feed one another are one kernel, which reads only its inputs and writes only
its outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from asyncflow.compiler.memory.memory_choices import Work
from asyncflow.compiler.placement.node_costs import ASSUMED_ITERATIONS, NodeCosts, tensor_nbytes
from asyncflow.compiler.program.kernels.kernels import is_host_spec
from asyncflow.compiler.program.kernels.work import launch_of
from asyncflow.compiler.program.loops.counters import trip_count
from asyncflow.compiler.program.purity import has_variants
from asyncflow.devices.figures.host import NO_TIMES
from asyncflow.devices.protocol import Device
from asyncflow.graph.builtin import CONSTANT, PARAMETER
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import CondNode, WhileNode
from asyncflow.graph.values.dtypes import VARIANT


class LoopCosts:
    """Estimates for loops on one device.

    Args:
        device: it.
        measured: mean ns of a firing by node name.
        fuses: whether elementwise nodes that feed one another become one kernel there.

    Attributes:
        counts: iterations of gradients' loops, which only the loops that save for them tell.
    """

    def __init__(self, device: Device, measured: Mapping[str, float], *, fuses: bool) -> None:
        self._device = device
        self._costs = NodeCosts([device], measured)
        self._fuses = fuses
        self.counts: dict[WhileNode, int] = {}
        launching = device.asynchronous
        self._host = NO_TIMES if launching is None else launching.host_times

    def iteration(self, loop: WhileNode) -> Work:
        """One iteration."""
        handed_on = Work(0.0, self._host.variable_ns * len(loop.body.results))
        return self._of_body(loop.predicate).plus(self._of_body(loop.body)).plus(handed_on)

    def of_nodes(self, nodes: Iterable[Node], wanted: Collection[Tensor] = ()) -> Work:
        """Some nodes of a body, of whose values others want these."""
        work = Work()
        chains: list[Node] = []
        for node in nodes:
            if self._fuses and node.op.rows == "elementwise" and not _is_on_host(node):
                chains.append(node)
            else:
                work = work.plus(self.of_node(node))
        for chain in _chains(chains):
            work = work.plus(Work(self._chain_ns(chain, wanted), self._host.launch_ns["launch"]))
        return work

    def of_node(self, node: Node) -> Work:
        """Return the cost of one node, with its bodies."""
        if isinstance(node, CondNode):
            return max(map(self._of_body, node.subgraphs), key=lambda work: work.ns)
        if isinstance(node, WhileNode):
            count = trip_count(node)
            count = self.counts.get(node, ASSUMED_ITERATIONS) if count is None else count
            return self.iteration(node).times(count)
        if node.op in (PARAMETER, CONSTANT):
            return Work()
        if _is_on_host(node) or has_variants(node.inputs):
            return Work(0.0, self._host.step_ns)
        if self._costs.work(node)[0] == 0.0:
            return Work(0.0, self._host.view_ns)
        (ns,) = self._costs.times(node)
        return Work(ns, self._host.launch_ns[launch_of(node)])

    def _of_body(self, body: Subgraph) -> Work:
        used = {x for node in body.nodes if self._fuses and node.op.rows != "elementwise" for x in node.inputs}
        return self.of_nodes(body.nodes, used.union(body.results))

    def _chain_ns(self, chain: Sequence[Node], wanted: Collection[Tensor]) -> float:
        made = {x for node in chain for x in node.outputs}
        read = {x for node in chain for x in node.inputs if x not in made}
        written = [x for x in made if x in wanted]
        flops = sum(self._costs.work(node)[0] for node in chain)
        return self._device.kernel_ns(flops, sum(map(tensor_nbytes, (*read, *written))))


def _is_on_host(node: Node) -> bool:
    return all(is_host_spec(x.spec) or x.dtype == VARIANT for x in node.outputs)


def _chains(nodes: Sequence[Node]) -> Iterable[list[Node]]:
    """Groups of elementwise nodes of one shape that feed one another."""
    group_of: dict[Node, list[Node]] = {}
    for node in nodes:
        group = [node]
        for x in node.inputs:
            found = group_of.get(x.node)
            if found is not None and found is not group and x.shape == node.outputs[0].shape:
                found += group
                group = found
                group_of.update((each, group) for each in group)
        group_of[node] = group
    return {id(group): group for group in group_of.values()}.values()
