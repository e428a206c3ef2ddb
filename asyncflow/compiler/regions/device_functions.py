"""Functions of bodies whose branches and loops a CUDA device, or the code waiting for it, decides.

They are generated as the functions of regions are. Where a body branches or loops, its function yields the `Branch` or
`Loop` to be decided (`asyncflow.devices.decisions`), which holds the functions of the inner bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from asyncflow.compiler.program.kernels.work import KernelCounter
from asyncflow.compiler.regions.code.codegen import RegionGenerator
from asyncflow.compiler.regions.regions import Region
from asyncflow.devices.decisions import Body, Branch, Condition, Loop, decisions
from asyncflow.errors import LoopIdentity
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Node
from asyncflow.graph.structured import StructuredNode, WhileNode
from asyncflow.values import Kernel, Value


@dataclass(frozen=True, slots=True)
class DeviceFunctions:
    """Makes the functions of one device's loop.

    Attributes:
        name: of the loop's node, for generated files.
        bind: gives each node's kernel.
        counter: counts the kernels that the functions launch.
    """

    name: str
    bind: Callable[[Node], Kernel]
    counter: KernelCounter

    def condition(self, part: Subgraph) -> Condition:
        """The function of a loop's predicate."""
        function = self.body(part)

        def run(*values: Value) -> Generator[Branch | Loop, Sequence[Value], Value]:
            (pred,) = yield from decisions(function, values)
            return pred

        return run

    def body(self, part: Subgraph) -> Body:
        """Return the function of a loop's or a branch's body, from its inputs to its results."""
        region = Region(tuple(part.nodes), tuple(part.inputs), tuple(part.results))
        return (
            RegionGenerator(region=region, bind=self.bind, enqueues=True, decide=self._decision, counter=self.counter)
            .generate(self.name)
            .function
        )

    def _decision(self, node: StructuredNode) -> Callable[..., Branch | Loop]:
        if not isinstance(node, WhileNode):
            on_true, on_false = map(self.body, node.subgraphs)
            return lambda pred, *captures: Branch(pred, on_true, on_false, captures)
        condition, body, n_vars = self.condition(node.predicate), self.body(node.body), node.n_vars
        identity = LoopIdentity(node.name, node.location)
        return lambda *values: Loop(condition, body, values[:n_vars], values[n_vars:], identity)
