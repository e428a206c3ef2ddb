"""Functions of bodies whose branches and loops are for a CUDA device to decide, or for whoever waits for it.

Straight lines become generated Python functions, as in regions. A body with branches or loops is a generator that calls
those, and yields a `Branch` or a `Loop` where there is one (`asyncflow.devices.cuda.decisions`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from asyncflow.compiler.regions.codegen import generate
from asyncflow.compiler.regions.regions import Region
from asyncflow.devices.cuda.decisions import Branch, Loop, decisions
from asyncflow.devices.cuda.experimental.graph import driven
from asyncflow.errors import LoopIdentity
from asyncflow.graph.builtin import CONSTANT, NO_OP, PARAMETER
from asyncflow.graph.graph import STRUCTURED

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from asyncflow.devices.cuda.decisions import Body, Condition
    from asyncflow.graph.graph import Subgraph
    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.graph.op import Kernel


@dataclass(frozen=True, slots=True)
class _Step:
    """A part of a body.

    Attributes:
        run: takes the `inputs`, and gives the `outputs` or what is to be decided for them.
        decides: it is the latter.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    run: Callable[..., Any]
    decides: bool


@dataclass(frozen=True, slots=True)
class DeviceFunctions:
    """Makes the functions of one device's loop.

    Attributes:
        name: of the loop's node, for generated files.
        bind: gives each node's kernel.
    """

    name: str
    bind: Callable[[Node], Kernel]

    def condition(self, part: Subgraph) -> Condition:
        """The function of a loop's predicate."""
        function = self.body(part)

        def run(*values: Any) -> Any:
            (pred,) = yield from decisions(function, values)
            return pred

        return run

    def body(self, part: Subgraph) -> Body:
        """The function of a loop's or a branch's body, from its inputs to its results."""
        steps = self._steps(part)
        needed = (*part.results, *(tensor for step in steps for tensor in step.inputs))
        constants = {tensor: self.bind(tensor.node)() for tensor in needed if tensor.node.op is CONSTANT}

        def run(*values: Any) -> Any:
            found = {**constants, **dict(zip(part.inputs, values, strict=True))}
            for step in steps:
                results = step.run(*[found[tensor] for tensor in step.inputs])
                if step.decides:
                    results = yield results
                found.update(zip(step.outputs, results, strict=True))
            return [found[result] for result in part.results]

        return run

    def _steps(self, part: Subgraph) -> list[_Step]:
        nodes = [node for node in part.nodes if node.op not in (CONSTANT, NO_OP, PARAMETER)]
        lines: list[list[Node]] = []
        for is_structured, group in groupby(nodes, lambda node: node.op.name in STRUCTURED):
            line = list(group)
            lines += [[node] for node in line] if is_structured else [line]
        needed = set(part.results)
        steps: list[_Step] = []
        for line in reversed(lines):
            steps.append(self._decision(line[0]) if line[0].op.name in STRUCTURED else self._straight(line, needed))
            needed.update(steps[-1].inputs)
        return steps[::-1]

    def _straight(self, line: Sequence[Node], needed: Collection[Tensor]) -> _Step:
        """Nodes that decide nothing; `needed` is what is used behind them."""
        made = [tensor for node in line for tensor in node.outputs]
        used = dict.fromkeys(tensor for node in line for tensor in node.inputs if tensor.node.op is not CONSTANT)
        inputs = tuple(tensor for tensor in used if tensor not in set(made))
        outputs = tuple(tensor for tensor in made if tensor in needed)
        region = Region(tuple(line), inputs, outputs)
        code = generate(region, self.name, self.bind, track=None, max_iterations=None, enqueues=True)
        return _Step(inputs, outputs, driven(code.function) if code.is_generator else code.function, decides=False)

    def _decision(self, node: Node) -> _Step:
        decide = self._branch(node) if node.op.name == "cond" else self._loop(node)
        return _Step(node.inputs, node.outputs, decide, decides=True)

    def _branch(self, node: Node) -> Callable[..., Branch]:
        on_true, on_false = map(self.body, node.subgraphs)
        return lambda pred, *captures: Branch(pred, on_true, on_false, captures)

    def _loop(self, node: Node) -> Callable[..., Loop]:
        n_vars: int = node.attrs["n_vars"]
        condition, body = self.condition(node.attrs["cond"]), self.body(node.attrs["body"])
        identity = LoopIdentity(node.name, node.location)
        return lambda *values: Loop(condition, body, values[:n_vars], values[n_vars:], identity)


__all__ = ["DeviceFunctions"]
