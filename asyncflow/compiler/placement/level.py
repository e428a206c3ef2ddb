"""One level of a structured graph, the root's nodes or the nodes of a body, as a problem for `list_schedule`.

A loop's level holds its predicate and its body, several iterations of them if they may overlap. Their overlap then
shows in the simulated execution as well, and stages of a pipeline pay.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from asyncflow.compiler.placement.choices import Choices
from asyncflow.compiler.placement.list_schedule import GAIN, Solution, search
from asyncflow.compiler.placement.node_costs import NodeCosts, tensor_nbytes
from asyncflow.compiler.placement.simulated_execution import (
    Group,
    Places,
    Problem,
    Spread,
    Task,
    Value,
    host_loads,
    loads,
)
from asyncflow.compiler.program.extract import EMIT, FEED, FETCH
from asyncflow.graph.builtin import CONSTANT, PARAMETER
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import StructuredNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A branch or loop that is placed like one node.

    Attributes:
        allowed: the devices it may be on.
        times: ns of all it does on each device.
        launches: ns of launching all of it on each device.
        workspace: bytes it holds while it runs.
        held: bytes of the variables in it.
    """

    allowed: tuple[int, ...]
    times: Sequence[float]
    launches: Sequence[float]
    workspace: float
    held: float

    def on(self, device: int) -> float:
        """The ns from its start to its end on a device."""
        return max(self.times[device], self.launches[device])


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A branch or loop whose nodes are on several devices.

    Attributes:
        where: the device of every node in it that was placed.
        why: the reason for each.
        loads: ns on each device.
        hosts: ns of each thread of the host.
        span: ns from start to end.
        inputs: the device that needs each of its inputs; None: none does.
        outputs: the device of each of its outputs; None: everywhere.
        whole: the alternative of one node; None if it has to be cut.
    """

    where: dict[Node, int]
    why: dict[Node, str]
    loads: Sequence[float]
    hosts: Sequence[float]
    span: float
    inputs: Sequence[int | None]
    outputs: Sequence[int | None]
    whole: Whole | None = None


@dataclass(slots=True)
class PlacementLevel:
    """The problem of one level, built node by node.

    Attributes:
        choices: allowed devices of nodes.
        costs: of nodes.
        inside: how a branch or loop is to be treated, given where its inputs are, as far as that is known.
        counters: nodes to keep together, with the others on the same device.
        is_root: it is no body, so that the threads of the host start a run for each device.
        part: the iteration at hand.
    """

    choices: Choices
    costs: NodeCosts
    inside: Callable[[StructuredNode, Callable[[Tensor], int | None]], Whole | Split]
    counters: Mapping[Node, int]
    is_root: bool
    part: int = 0
    problem: Problem = field(init=False)
    group_of: dict[Node, int] = field(default_factory=dict)
    index: dict[Tensor, int] = field(default_factory=dict)
    """The value that a tensor is in the iteration at hand."""
    gate: int | None = None
    """Task that other tasks wait for, if they use values entering the iteration, or have no other input."""
    structured: dict[Node, Whole | Split] = field(default_factory=dict)
    _groups: dict[Hashable, int] = field(default_factory=dict)
    _tasks: dict[Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choices = self.choices
        hosts = self.costs.hosts(is_root=self.is_root)
        self.problem = Problem(limits=choices.limits, transfer=self.costs.transfer, trials=choices.trials, hosts=hosts)

    def give(self, tensors: Iterable[Tensor], value: Value) -> int:
        """Add a value that exists from the start and stands for these tensors; return its number."""
        self.problem.values.append(value)
        number = len(self.problem.values) - 1
        self.index.update(dict.fromkeys(tensors, number))
        return number

    def add_graph(self, graph: Graph) -> None:
        """Adds an iteration's tasks for the nodes of a graph."""
        for node in graph.nodes:
            if node.op in (CONSTANT, FEED):
                if node.outputs[0] not in self.index:
                    self.give(node.outputs, Value(nbytes=tensor_nbytes(node.outputs[0]), is_kept=node.op is CONSTANT))
            elif isinstance(node, StructuredNode):
                self._add_structured(node)
            elif node.op not in (PARAMETER, FETCH, EMIT):
                times, launches = self.costs.times(node), self.costs.launches(node)
                self._add_task(node, Task(group=self._group(node), times=times, launches=launches))

    def task(self, tensor: Tensor) -> int | None:
        """The task that makes the tensor in the iteration at hand; None if it is there from the start."""
        return self.problem.values[self.index[tensor]].maker

    def known_home(self, tensor: Tensor) -> int | None:
        """The device of a value, if that is settled before any search."""
        value = self.problem.values[self.index[tensor]]
        if value.maker is None:
            return value.home
        task = self.problem.tasks[value.maker]
        if task.spread is not None:
            return task.spread.outputs[value.slot]
        allowed = self.problem.groups[task.group].allowed
        return allowed[0] if len(allowed) == 1 else None

    def device_of(self, number: int, solution: Solution) -> int | None:
        """Return the device of a value in a solution; None: everywhere, or not known."""
        return Places(self.problem, solution.devices).of(self.problem.values[number])

    def needed_on(self, number: int, solution: Solution) -> int | None:
        """The device of the first task that uses a value; None if none does."""
        for user in self.problem.values[number].users:
            task = self.problem.tasks[user]
            device = solution.devices[task.group] if task.spread is None else task.spread.inputs[number]
            if device is not None:
                return device
        return None

    def loads(self, solution: Solution) -> list[float]:
        """The ns of work on each device in a solution, of all iterations that were added."""
        return loads(self.problem, solution.devices)

    def host_loads(self, solution: Solution) -> list[float]:
        """The ns of work of each thread of the host in a solution."""
        return host_loads(self.problem, solution.devices)

    def solve(self) -> Solution:
        """Return the best placement found. Optional cuts are undone where others make up for them."""
        solution = search(self.problem)
        whole = {node: x.whole for node, x in self.structured.items() if isinstance(x, Split) and x.whole is not None}
        if not whole:
            return solution
        of_group = {self.group_of[node]: inside for node, inside in whole.items()}
        tasks, groups = self.problem.tasks.copy(), self.problem.groups.copy()
        for number, inside in of_group.items():
            groups[number] = replace(groups[number], allowed=inside.allowed, held=inside.held)
            for task in groups[number].tasks:
                tasks[task] = replace(
                    tasks[task],
                    spread=None,
                    times=inside.times,
                    launches=inside.launches,
                    workspace=inside.workspace,
                )
        problem = replace(self.problem, tasks=tasks, groups=groups)
        kept = search(problem)
        if kept.overflow > solution.overflow or solution.span <= GAIN * kept.span:
            return solution
        self.problem = problem
        self.structured |= whole
        return kept

    def _group(self, node: Node) -> int:
        if node in self.counters:
            return self._find_group(self.counters[node], (self.counters[node],), ())
        return self._find_group(self.choices.label(node) or node, self.choices.allowed(node), (node,))

    def _find_group(self, key: Hashable, allowed: Sequence[int], users: Iterable[Node]) -> int:
        groups = self.problem.groups
        number = self._groups.get(key)
        if number is None:
            number = self._groups[key] = len(groups)
            groups.append(Group(allowed=allowed))
            groups[number].held = self.choices.held(users)
        return number

    def _add_structured(self, node: StructuredNode) -> None:
        inside = self.structured.get(node)
        if inside is None:
            inside = self.structured[node] = self.inside(node, self.known_home)
        if isinstance(inside, Whole):
            group = self._find_group(node, inside.allowed, ())
            self.problem.groups[group].held = inside.held
            task = Task(group=group, times=inside.times, launches=inside.launches, workspace=inside.workspace)
        else:
            needed = {
                self.index[tensor]: device
                for tensor, device in zip(node.inputs, inside.inputs, strict=True)
                if tensor in self.index
            }
            spread = Spread(
                loads=inside.loads, hosts=inside.hosts, span=inside.span, inputs=needed, outputs=inside.outputs
            )
            none = (0.0,) * len(self.choices.limits)
            task = Task(group=self._find_group(node, (), ()), times=none, spread=spread)
        self._add_task(node, task)

    def _add_task(self, node: Node, task: Task) -> None:
        values, tasks = self.problem.values, self.problem.tasks
        task.part = self.part
        number = self._tasks[node] = len(tasks)
        self.group_of[node] = task.group
        self.problem.groups[task.group].tasks.append(number)
        tasks.append(task)
        # Skip back edges of a hand-written loop, whose values do not exist yet: only one iteration is simulated.
        task.inputs = list(dict.fromkeys(self.index[tensor] for tensor in node.inputs if tensor in self.index))
        task.waits = list(dict.fromkeys(self._tasks[before] for before in node.control_inputs if before in self._tasks))
        is_early = not task.waits and all(values[i].maker is None for i in task.inputs)
        if self.gate is not None and (is_early or any(tensor.node.op is PARAMETER for tensor in node.inputs)):
            task.waits.append(self.gate)
        for i in task.inputs:
            values[i].users.append(number)
        for slot, tensor in enumerate(node.outputs):
            self.index[tensor] = len(values)
            task.outputs.append(len(values))
            values.append(Value(nbytes=tensor_nbytes(tensor), maker=number, slot=slot))
