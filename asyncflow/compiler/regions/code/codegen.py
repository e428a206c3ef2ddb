"""Generates the Python function of a region: straight-line calls on bound kernels, native `while` and `if`.

Values of rank 0 are NumPy scalars and combine by Python operators, which give the same dtype and the same bits as the
ufuncs. Loop variables are local variables. A region with loops is a generator. At every back edge it counts down its
budget, and yields when the budget is spent. So its driver can look at the clock, stop it, or carry it on elsewhere. Two
other kinds of regions are generators, too: regions with kernels that may be long, each of which counts, and regions
that may have to wait, for saved values or in a line. Any other is a plain function.

Errors find their node again through the line of the generated source, and their iteration through the loop counters
among its locals.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TypeVar

from asyncflow.autodiff.stores.saved_values import MOVING_STORE, READ_SAVED
from asyncflow.compiler.placement.node_costs import may_be_long, spec_nbytes
from asyncflow.compiler.program.extract import FEED
from asyncflow.compiler.program.kernels.kernels import asks_for_memory, is_light, is_small_spec, waits_for_saved
from asyncflow.compiler.regions.code.buffers import (
    Buffers,
    carried_results,
    changed_in_place,
    dead_values,
    find_uses,
    made_by,
    writes_to_buffer,
)
from asyncflow.compiler.regions.code.held_bytes import VARIABLE_WRITES, HeldBytes
from asyncflow.compiler.regions.code.last_iteration import SILENT, needed_to_end, only_node
from asyncflow.compiler.regions.code.memory_order import find_reordered
from asyncflow.compiler.regions.code.region_code import Phase, RegionCode
from asyncflow.compiler.regions.code.source import KnownNames, Source, in_iteration
from asyncflow.compiler.regions.regions import Region
from asyncflow.devices.machine.cost import INLINE_LIMIT_NS
from asyncflow.devices.saved.working_set import WorkingSet
from asyncflow.devices.swapping import Swapping
from asyncflow.devices.told import UNBOUND, Holding, ToldAccount
from asyncflow.errors import LoopIdentity, TooManyIterations
from asyncflow.graph.builtin import IDENTITY, PARAMETER
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Memory
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.indexing.in_place import OwnBuffer
from asyncflow.ops.rows.by_row import Paused, PausingKernel, called_op
from asyncflow.state.waiting.lines import PlaceInLine, claimed
from asyncflow.values import Conduct, Kernel, Value

_OPERATORS = "add sub mul truediv floordiv mod lt le gt ge eq ne and_ or_ xor lshift rshift"
_SIGNS = "+ - * / // % < <= > >= == != & | ^ << >>"
_INFIX: dict[Callable[..., object], str] = {
    **{
        getattr(operator, name): f"{{}} {sign} {{}}"
        for name, sign in zip(_OPERATORS.split(), _SIGNS.split(), strict=True)
    },
    operator.neg: "-{}",
    operator.pos: "+{}",
    operator.invert: "~{}",
}

_RESERVED = (
    *("budget", "context", "track", "in_iteration", "swapping", "lacks", "requests", "TooManyIterations"),
    *("PlaceInLine", "claimed", "OwnBuffer", "Holding", "holding", "tell", "tell_often", "pause", "passed", "UNBOUND"),
)
"""Names of the source's own."""

_Found = TypeVar("_Found")

_LAUNCHES = 32
"""Number of launches after which a straight line may be stopped: each takes some microseconds."""


@dataclass(slots=True, kw_only=True)
class RegionGenerator(Source):
    """A writer of a region's function; see `Source` for its lines and names.

    Args:
        region: what to run.
        track: called with every value that may be large, and its node's name; None to leave that out.
        max_iterations: most iterations of a loop.
        enqueues: the kernels only enqueue work on a device that looks after its own buffers.
        decide: for a function that runs without stops: returns the callable in place of a branch or loop. The function
            yields what that returns, and is sent the results.
        swapping: moves saved values. The function yields False before it waits for one, and a `WorkingSet` before an
            iteration for which memory is short. None: nothing moves, and `MOVING_STORE` is bound as `NEW_STORE` is.
        spare_bytes: how many bytes of buffers the function may keep to write to them again.
        account: is told what the function holds, at a few places; None where each value is tracked.
    """

    region: Region
    track: Callable[[Value, str], None] | None = None
    max_iterations: int | None = None
    enqueues: bool = False
    decide: Callable[[StructuredNode], Callable[..., object]] | None = None
    swapping: Swapping | None = None
    spare_bytes: float = inf
    account: ToldAccount | None = None
    kernels: dict[Node, Kernel] = field(default_factory=dict)
    slots: list[str] = field(default_factory=list)
    owned: dict[Node, str] = field(default_factory=dict)
    lent: set[str] = field(default_factory=set)
    reordered: frozenset[Tensor] = frozenset()
    needs_context: bool = False
    is_generator: bool = False
    phases: list[Phase] = field(default_factory=list)
    held: HeldBytes | None = None

    def generate(self, name: str) -> RegionCode:
        """Return the function, under that name."""
        self.taken.update(dict.fromkeys(_RESERVED, 0))
        self.reordered = find_reordered(self.region.nodes)
        if self.account is not None:
            for node in self.region.nodes:
                if node.subgraphs or not node.single or node.outputs[0].spec.shape != ():
                    self.held = HeldBytes()
                    break
        function = self.fresh(name, "region")
        parameters = [self.name(tensor) for tensor in self.region.inputs]
        block = KnownNames()
        self.put_line(self.region.nodes, self.region.outputs, block)
        if self.phases and self.phases[-1].is_loop and not is_light(self.phases[-1].nodes):
            self.phases.append(Phase(len(self.lines) + 1, []))
            self.part(block)  # a finished function has lost the loop's counter
        outputs = "".join(f"{self.value(tensor)}, " for tensor in self.region.outputs)
        self.line(block, f"return ({outputs})")
        told = [] if self.held is None else self.tell_account()
        if self.needs_context:
            parameters.insert(0, "context")
        # Defaults make kernels and constants local variables of the function.
        if self.bound:
            parameters += ["*", *(f"{key}={key}" for key in self.bound)]
        signature = f"def {function}({', '.join(parameters)}):"
        head = [signature, *(["    budget = 1"] if self.is_generator else [])]
        if "Holding" in self.bound:
            large = [self.names[x] for x in self.region.inputs if not is_small_spec(x.spec)]
            large += [name for x, name in self.constants.items() if not is_small_spec(x.spec)]
            head.append(f"    holding = Holding({', '.join(large)})")
        head.extend(f"    {slot} = None" for slot in self.slots)
        head.extend(f"    {name} = UNBOUND" for name in (self.not_surely_bound(told) if told else ()))
        lines = self.with_told(told) if told else self.lines
        made, source, filename = self.compiled(function, (*head, *lines))
        places = {number + len(head): place for number, place in self.places.items()}
        for phase in self.phases:
            phase.line += len(head)
        phases = tuple(self.phases)
        return RegionCode(made, source, filename, places, self.is_generator, self.conduct(), phases)

    def conduct(self) -> Conduct:
        """Return what the nodes of the region need and do together."""
        is_user, alone = False, None
        for node in self.region.walk():
            each = called_op(node).conduct
            is_user, alone = is_user or each.is_user, each.alone if alone is None else alone
        return Conduct(needs_context=self.needs_context, is_user=is_user, alone=alone)

    def tell_account(self) -> list[tuple[int, str]]:
        """Return the lines that tell the account the bytes held, each with the number of the line before it."""
        if self.account is None or self.held is None:
            return []
        places = self.held.places({self.names[tensor]: tensor.spec for tensor in self.region.inputs})
        if not (self.is_generator or any(place.stores for place in places)):
            if places:  # held bytes are known here, at compile time
                self.bound["passed"] = self.account.passed
            return [(place.line, "    " * place.depth + f"passed({place.most})") for place in places]
        if places:
            self.bound.update(Holding=Holding, **{each.how: getattr(self.account, each.how) for each in places})
        return [(place.line, "    " * place.depth + place.text()) for place in places]

    def not_surely_bound(self, told: Sequence[tuple[int, str]]) -> list[str]:
        """Return names that lines tell of, and that are bound in branches and loops alone: these may not be entered."""
        used = {name for _, text in told for name in re.findall(r"[A-Za-z_]\w*", text)}
        inputs = {self.names[tensor] for tensor in self.region.inputs}
        # Lines at the depth of the function itself always run.
        outside = {found[1] for line in self.lines if (found := re.match(r" {4}(\w+) = ", line))}
        names = [name for name in dict.fromkeys(self.names.values()) if name in used - inputs - outside]
        if names:
            self.bound["UNBOUND"] = UNBOUND
        return names

    def with_told(self, told: Sequence[tuple[int, str]]) -> list[str]:
        """Return the source with these lines added, which shift the later ones."""
        before = [line for line, _ in told]
        self.places = {number + bisect_left(before, number): place for number, place in self.places.items()}
        for phase in self.phases:
            phase.line += bisect_left(before, phase.line)
        lines = list(self.lines)
        for line, text in reversed(told):  # from the end, so that earlier line numbers stay valid
            lines.insert(line, text)
        return lines

    # -- nodes ---------------------------------------------------------------------------------------------------

    def kernel(self, node: Node) -> Kernel | None:
        """The bound kernel of a node; None for a structured one."""
        if node.op.kernel is None:
            return None
        if node not in self.kernels:
            kernel = self.bind(node)
            if isinstance(kernel, PausingKernel) and self.may_pause(node):
                kernel = partial(kernel.begin, INLINE_LIMIT_NS)
            self.kernels[node] = kernel
        return self.kernels[node]

    def may_pause(self, node: Node) -> bool:
        """Return True if whoever drives the function can take over between two rows of a user's function."""
        return node.op.conduct.is_user and not self.enqueues and self.decide is None

    def put_line(
        self,
        nodes: Sequence[Node],
        escaping: Iterable[Tensor],
        block: KnownNames,
        carried: frozenset[Tensor] = frozenset(),
        end: tuple[int, Callable[[Sequence[str]], None]] | None = None,
    ) -> None:
        """Write a straight line of nodes.

        Args:
            nodes: in order.
            escaping: values used afterwards.
            block: where it stands.
            carried: results of a loop's body that take turns with its variables.
            end: number of nodes for the last iteration of a loop, and a writer of its end, given the others' variables.
        """
        escaping = tuple(escaping)
        self.count(nodes, block)
        block.nodes, block.escaping = nodes, escaping
        # Memory is scarce on a card, so there only iterations of a loop keep buffers.
        if self.decide is None and (block.loops or not self.enqueues):
            uses = find_uses(nodes, (t for t in escaping if t not in carried))
            block.buffers = Buffers(uses, carried, on_card=self.enqueues)
            if not block.loops:
                block.buffers.look_ahead(nodes, self.kernel)
        variables = block.variables if self.enqueues else frozenset()
        dead = block.dead = dead_values(nodes, escaping, variables=variables, deep=self.frees)
        for index, node in enumerate(nodes):
            if end is not None and index == end[0]:
                left = (x for place, values in dead.items() if place >= index for x in values)
                end[1]([self.names[x] for x in left if x in self.names])
            self.put(node, index, block)
            if block.buffers is not None:
                self.put_release(block.buffers.release(index), block)
            self.drop(dead.get(index, ()), block)

    @property
    def frees(self) -> bool:
        """True where names of branches and loops let go of large values, since memory may be short."""
        return self.enqueues or self.track is not None

    def drop(self, values: Iterable[Tensor], block: KnownNames) -> None:
        """Drop the names of unused values; names of loop variables are bound again."""
        names = {self.names[x]: x.node.op is PARAMETER for x in values}
        if self.held is not None:
            self.held.dropped(names)
        for name in (name for name, is_variable in names.items() if is_variable):
            self.line(block, f"{name} = None")
        if made := [name for name, is_variable in names.items() if not is_variable]:
            self.line(block, f"del {', '.join(made)}")

    def put(self, node: Node, index: int, block: KnownNames) -> None:
        """Add the lines of the node at `index` of a straight line."""
        if self.decide is not None and isinstance(node, StructuredNode):
            self.put_decision(node, self.decide(node), block)
            return
        if block.depth == 1 and node.op not in SILENT:
            self.note_phase(node, block)
        if isinstance(node, CondNode):
            self.put_cond(node, block)
        elif isinstance(node, WhileNode):
            self.put_while(node, index, block)
        elif node.op is IDENTITY:
            self.names[node.outputs[0]] = self.value(node.inputs[0])
        elif node.op not in SILENT:
            self.put_kernel(node, index, block)

    def note_phase(self, node: Node, block: KnownNames) -> None:
        """Begin a phase where a loop outside all others begins or has ended."""
        last = self.phases[-1] if self.phases else None
        if last is not None and not (last.is_loop or isinstance(node, WhileNode)):
            last.nodes.append(node)
            return
        self.phases.append(Phase(len(self.lines) + 1, [node]))
        if last is None:
            return
        # A budget was found by iterations of another loop, and may be far too high for this one.
        is_misleading = self.is_generator and isinstance(node, WhileNode)
        if is_misleading or not is_light(last.nodes) or not is_light([node]):
            self.part(block)

    def part(self, block: KnownNames) -> None:
        """Add a place where the function stops in any case, between two phases."""
        self.stop(block, "yield True")

    def put_kernel(self, node: Node, index: int, block: KnownNames) -> None:
        """Add the lines of a node that has a kernel."""
        kernel, buffers, slot, own = self.kernel(node), block.buffers, None, self.owned.get(node)
        n_slots, replaced = len(self.slots), None
        if buffers is not None and kernel is not None:
            slot = own = own if own is not None and buffers.may_change(node, index) else None
            if own is None and self.reordered.isdisjoint(node.outputs):
                replaced = buffers.replaced(node, index, kernel)
                slot = None if replaced is not None else buffers.slot_for(node, index, kernel, self.new_buffer)
        if self.swapping is not None and (waits := waits_for_saved(node)) is not None:
            self.is_generator = True
            self.bound.setdefault("swapping", self.swapping)
            # A resumed thread waits by itself. Where steps only launch, other work may have resumed it too early.
            again = "while" if self.enqueues else "if"
            waited = ", ".join(map(self.value, waits))
            self.line(block, f"{again} not swapping.is_at_rest and swapping.must_wait({waited}):")
            self.stop(block.deeper(), "yield False")
        expression = self.call(node, block, slot if replaced is None else self.names[replaced])
        if self.may_pause(node):
            expression = self.in_parts(node, expression, block)
        slot = None if own in self.lent else slot
        if node.op.conduct.is_async:  # it waits in a line; other asynchronous ops are not in regions
            expression = self.granted(node, expression, block)
        targets = [self.name(tensor) for tensor in node.outputs]
        if not targets:
            self.line(block, expression, node)
            return
        left = targets[0] if node.single else "".join(f"{target}, " for target in targets).rstrip()
        # Saved values count from when they were saved or came back; buffers count from their first write.
        is_again = slot not in (None, own) and len(self.slots) == n_slots
        counts = is_again or node.op is READ_SAVED or replaced is not None
        fresh: list[str] = []
        if self.track is not None and not counts:
            fresh = [y for x, y in zip(node.outputs, targets, strict=True) if not is_small_spec(x.spec)]
        place = block
        if fresh and slot is not None:
            self.line(block, f"{left} = {expression}", node)
            self.line(block, f"if {left} is not {slot}:")
            place = block.deeper()
            self.line(place, f"{slot} = {left}")
        else:
            self.line(block, f"{left} = {expression}" if slot is None else f"{left} = {slot} = {expression}", node)
        if self.held is not None:
            self.held.made(node, [self.names.get(x) for x in node.inputs], targets, slot, len(self.lines), block.depth)
        if buffers is not None and slot not in (None, own) and node.outputs[0] not in buffers.slots:
            self.put_release([slot], block)  # the value has it for its own
        if self.account is not None and node.op in VARIABLE_WRITES:
            fresh = [] if is_small_spec(node.outputs[0].spec) else targets
        for target in fresh:
            self.bound.setdefault("track", self.track or (self.account and self.account.track))
            self.line(place, f"track({target}, {node.name!r})", node)
        if self.decide is None and self.enqueues:
            self.counter.written += 1
            if self.counter.written % _LAUNCHES == 0:
                self.checkpoint(block)
        elif self.decide is None and may_be_long(node, INLINE_LIMIT_NS):
            self.checkpoint(block)

    def in_parts(self, node: Node, expression: str, block: KnownNames) -> str:
        """Write a user's function over rows, and return the variable of its results; the region yields between rows."""
        self.is_generator = True
        self.bound.update(Paused=Paused)
        found = self.fresh(node.name, "found")
        self.line(block, f"{found} = {expression}", node)
        self.line(block, f"while isinstance({found}, Paused):")
        self.stop(block.deeper(), f"yield {found}")
        self.line(block.deeper(), f"{found} = {found}.go_on()", node)
        return found

    def granted(self, node: Node, expression: str, block: KnownNames) -> str:
        """Write a wait for a state's result, and return the variable that holds it; the function yields while it is
        a place in line.
        """
        self.is_generator = True
        self.bound.update(PlaceInLine=PlaceInLine, claimed=claimed)
        found = self.fresh(node.name, "found")
        self.line(block, f"{found} = {expression}", node)
        self.line(block, f"while isinstance({found}, PlaceInLine):")
        self.stop(block.deeper(), f"yield {found}")
        self.line(block.deeper(), f"{found} = claimed({found})", node)
        return found

    def checkpoint(self, block: KnownNames) -> None:
        """Add a place where the driver of the function may stop it."""
        self.is_generator = True
        self.line(block, "budget -= 1")
        self.line(block, "if not budget:")
        self.stop(block.deeper(), "yield")

    def stop(self, block: KnownNames, expression: str) -> None:
        """Add a line at which the function yields, and gets its next budget."""
        self.is_generator = True
        if self.held is not None:
            self.held.stops(len(self.lines), block.depth)
        self.line(block, f"budget = {expression}")

    def new_buffer(self, spec: Spec) -> str | None:
        """A variable with a buffer for values of this spec; None if that would be more than may be kept."""
        nbytes = spec_nbytes(spec)
        if nbytes > self.spare_bytes:
            return None
        self.spare_bytes -= nbytes
        self.slots.append(self.fresh("buffer", "buffer"))
        return self.slots[-1]

    def call(self, node: Node, block: KnownNames, out: str | None = None) -> str:
        """The expression that computes a node."""
        kernel = self.kernel(node)
        assert kernel is not None
        arguments = [self.value(tensor) for tensor in node.inputs]
        infix = _INFIX.get(kernel)
        if infix is not None:
            return infix.format(*arguments)
        if node.op.conduct.needs_context and (self.swapping is not None or node.op is not MOVING_STORE):
            self.needs_context = True
            arguments.insert(0, self.context(block))
        if out is not None:
            arguments.append(f"{'own' if node in self.owned else 'out'}={out}")
        return f"{self.bind_name(f'k_{node.op.name}', 'kernel', kernel)}({', '.join(arguments)})"

    def context(self, block: KnownNames) -> str:
        """The expression for the context of a kernel."""
        if not block.loops:
            return "context"
        self.bound.setdefault("in_iteration", in_iteration)
        counters = "".join(f"{counter}, " for _, counter in block.loops)
        return f"in_iteration(context, ({counters}))"

    # -- branches and loops --------------------------------------------------------------------------------------

    def put_cond(self, node: CondNode, block: KnownNames) -> None:
        """Add an `if`."""
        condition = self.value(node.predicate)
        true_branch, false_branch = node.subgraphs
        outputs = [self.fresh(tensor.node.name, "value") for tensor in node.outputs]
        for keyword_, branch in ((f"if {condition}:", true_branch), ("else:", false_branch)):
            self.line(block, keyword_, node)
            if self.held is not None:
                self.held.opens()
            inner = block.deeper()
            before = len(self.lines)
            for given, outer in node.captured(branch).items():
                self.names[given] = self.value(outer)
            self.put_line(branch.nodes, branch.results, inner)
            for output, result in zip(outputs, branch.results, strict=True):
                self.line(inner, f"{output} = {self.value(result)}")
            if self.held is not None:
                self.held.named(outputs, [self.value(result) for result in branch.results])
            if self.frees or self.account is not None:  # else a branch would keep its values until it is taken again
                self.drop(made_by(set(branch.nodes), branch.results), inner)
            if len(self.lines) == before:
                self.line(inner, "pass")
            if self.held is not None:
                self.held.closes_branch(outputs)
        self.names.update(zip(node.outputs, outputs, strict=True))

    def put_decision(self, node: StructuredNode, decide: Callable[..., object], block: KnownNames) -> None:
        """Add a branch or loop that the driver of the function sees to."""
        arguments = ", ".join(self.value(tensor) for tensor in node.inputs)
        decision = f"yield {self.bind_name(f'decide_{node.op.name}', 'decide', decide)}({arguments})"
        results = "".join(f"{self.name(tensor)}, " for tensor in node.outputs)
        self.line(block, f"{results.rstrip()} = {decision}" if results else decision, node)

    def put_while(self, node: WhileNode, index: int, block: KnownNames) -> None:
        """Add a loop, the node at `index` of a straight line."""
        # A loop may take any time: its function is a generator, which stops at back edges for others to run.
        follows_loop, self.is_generator = self.is_generator, True
        condition, body = node.predicate, node.body
        loop = LoopIdentity(node.name, node.location)
        n_slots, spare_bytes = len(self.slots), self.spare_bytes
        counter = self.fresh(f"{loop.label}_iteration", "iteration")
        variables = self.put_variables(node, index, block)
        self.line(block, f"{counter} = 0")
        if block.depth == 1:
            self.phases[-1].counter = counter
        elif follows_loop and not (block.loops and is_light(condition.nodes) and is_light(body.nodes)):
            self.part(block)  # as between phases
        changed = () if self.enqueues else self.in_place(node, self.can_change, changed_in_place)
        owned = [self.put_owned(node, place, nodes, variables[place], block) for place, nodes in changed]
        outside, lent = block, [own for own in owned if own in self.lent]
        if lent:
            self.line(block, "try:")
            block = block.deeper()
        inner = KnownNames(
            (*block.loops, (loop.label, counter)), block.depth + 1, variables=frozenset(body.inputs[: node.n_vars])
        )
        start = len(self.lines)
        if self.held is not None:
            self.held.opens()
        self.put_predicate(condition, block, inner)
        self.put_ask(node, inner)
        self.put_iteration(node, variables, outside, inner)
        if self.max_iterations is not None:
            self.bound.setdefault("TooManyIterations", TooManyIterations)
            self.line(inner, f"if {counter} >= {self.max_iterations}:")
            identity = self.bind_name(f"{loop.label}_loop", "loop", loop)
            self.line(inner.deeper(), f"raise TooManyIterations({identity}, {self.max_iterations})", node)
        # Count and check after binding the new values: a stop here leaves only whole iterations.
        self.line(inner, f"{counter} += 1")
        self.checkpoint(inner)
        if self.held is not None:
            self.held.closes_loop(variables, counter, start, len(self.lines), block.depth)
        self.names.update(zip(node.outputs, variables, strict=True))
        if lent:  # restore the caller's array, even if the loop stops midway
            self.line(outside, "except BaseException:")
            for own in lent:
                self.line(block, f"{own}.restore()")
            self.line(block, "raise")
        self.put_release(owned, outside)
        if not outside.loops:  # an inner loop reuses its buffers in its next activation
            self.put_release(self.slots[n_slots:], outside)
            self.spare_bytes = spare_bytes

    def put_variables(self, node: WhileNode, index: int, block: KnownNames) -> list[str]:
        """Return the loop's variables, bound to their initial values; predicate and body see them."""
        n_vars = node.n_vars
        variables = [self.fresh(tensor.node.name, "var") for tensor in node.body.inputs[:n_vars]]
        for variable, initial in zip(variables, node.inputs, strict=False):
            self.line(block, f"{variable} = {self.value(initial)}")
        if self.held is not None:
            self.held.named(variables, [self.value(initial) for initial in node.inputs[:n_vars]])
        if self.frees:
            passed = set(node.inputs[:n_vars]).difference(node.captures)
            self.drop([x for x in block.dead.get(index, ()) if x in passed], block)
            block.dead[index] = [x for x in block.dead.get(index, ()) if x not in passed]
        # Predicate and body share names, as a variable has one value at a time. Captures keep the names of the outer
        # code, as the loop never rebinds them.
        for part in node.subgraphs:
            self.names.update(zip(part.inputs, variables, strict=False))
            for captured, outer in node.captured(part).items():
                self.names[captured] = self.value(outer)
        return variables

    def put_iteration(self, node: WhileNode, variables: list[str], outside: KnownNames, block: KnownNames) -> None:
        """Add the body of a loop, and rebind its variables; `outside` is the block around the loop."""
        body = node.body
        carried = frozenset(self.in_place(node, self.can_write, carried_results))
        # The code keeps such a variable's current value: the value after the next is written into its memory.
        block.variables -= {x for x, result in zip(body.inputs, body.results, strict=False) if result in carried}
        read = {*outside.escaping, *(x for each in outside.nodes for x in each.inputs)}
        kept = [place for place, output in enumerate(node.outputs) if output in read]
        nodes, for_next = needed_to_end(node, kept)
        only = only_node(node.predicate)
        is_short = not any(may_be_long(each, INLINE_LIMIT_NS) for each in for_next)
        if is_short or only is None or self.enqueues or self.decide is not None:
            self.put_line(body.nodes, body.results, block, carried)
        else:
            end = partial(self.put_end, node, only, variables, kept, block)
            self.put_line([*nodes, *for_next], body.results, block, carried, (len(nodes), end))
        for variable, result in zip(variables, body.results, strict=True):
            if block.buffers is not None and result in block.buffers.slots and result in carried:
                # The variable's old value is dead, so reuse its memory, unless it is the caller's initial value.
                slot, (_, counter) = block.buffers.slots[result], block.loops[-1]
                self.line(block, f"{slot} = {variable} if {counter} else None")
                if self.held is not None:
                    self.held.took_turns(slot, variable)
        self.put_next(variables, [self.value(result) for result in body.results], block)
        if self.frees:
            self.drop(made_by(set(body.nodes), body.results), block)

    def put_end(
        self,
        node: WhileNode,
        only: Node,
        variables: list[str],
        kept: Sequence[int],
        block: KnownNames,
        left: Sequence[str],
    ) -> None:
        """Add the end of a loop in the middle of its body: the rest is for a further iteration alone.

        Args:
            node: the loop.
            only: the one node of its predicate.
            variables: of the loop.
            kept: places of the variables that are read after the loop.
            block: of the body.
            left: variables that the rest of the body would drop.
        """
        condition, results = node.predicate, node.body.results
        decided, following = set(only.inputs), zip(condition.inputs, results, strict=False)
        self.names.update((x, self.value(result)) for x, result in following if x in decided)
        self.line(block, f"if not {self.call(only, block)}:", only)
        if self.held is not None:
            self.held.opens()
        self.put_next([variables[k] for k in kept], [self.value(results[k]) for k in kept], block.deeper())
        if left:
            self.line(block.deeper(), f"del {', '.join(left)}")
        self.line(block.deeper(), "break")
        if self.held is not None:
            self.held.leaves_out()
        self.names.update(zip(condition.inputs, variables, strict=False))

    def put_release(self, buffers: Sequence[str], block: KnownNames) -> None:
        """Let go of the buffers of a loop that has ended."""
        if not buffers:
            return
        self.line(block, f"del {', '.join(buffers)}")
        if self.held is not None:
            self.held.dropped(buffers)

    def put_owned(self, loop: WhileNode, place: int, nodes: Iterable[Node], variable: str, block: KnownNames) -> str:
        """Return a variable for the buffer that nodes of a body may write to in place of a copy.

        It holds the first iteration's result, as the value before may have other references, or else the buffer lent to
        the run.
        """
        own = self.fresh("own", "own")
        self.owned.update(dict.fromkeys(nodes, own))
        initial = loop.inputs[place]
        readers = (each for each in block.nodes if each.op.traits.memory is not Memory.METADATA)
        read = [*block.escaping, *(x for each in readers for x in each.inputs)]
        is_lent = (
            initial.node.op is FEED
            and initial.node.attrs.get("is_lent", False)
            and self.track is None  # memory accounting may fail after the loop
            and block.depth == 1  # in an outer loop, the next iteration would find it changed
            and sum(x is initial for x in read) == 1
        )
        if is_lent:
            self.lent.add(own)
            self.bound.setdefault("OwnBuffer", OwnBuffer)
        self.line(block, f"{own} = OwnBuffer({variable})" if is_lent else f"{own} = None")
        if self.held is not None:
            self.held.dropped([own])
        return own

    def put_ask(self, node: WhileNode, block: KnownNames) -> None:
        """Add a line that asks for the memory of an iteration."""
        if self.swapping is None or self.swapping.account.limit is None or not asks_for_memory(node.body.walk()):
            return
        self.needs_context = True
        self.bound.setdefault("lacks", self.swapping.lacks)
        inner = (each for each in node.body.walk() if isinstance(each, WhileNode))
        is_around = any(asks_for_memory(each.body.nodes) for each in inner)
        wanted = WorkingSet(self.swapping.account, is_around=is_around)
        working_set = self.bind_name(f"{node.name}_set", "working_set", wanted)
        self.line(block, f"if lacks(context.run, {working_set}):")
        self.stop(block.deeper(), f"yield {working_set}")

    def in_place(
        self, loop: WhileNode, can: Callable[[Node], bool], find: Callable[..., Iterable[_Found]]
    ) -> Iterable[_Found]:
        """Return the findings of `find` among the results of a loop's body that suitable nodes of it compute."""
        if self.decide is not None:
            return ()
        condition, body, members = loop.predicate, loop.body, set(loop.body.nodes)

        def may(result: Tensor) -> bool:
            return result.node in members and can(result.node)

        if not any(map(may, body.results)):
            return ()
        variables = list(zip(condition.inputs[: loop.n_vars], body.inputs[: loop.n_vars], body.results, strict=True))
        in_cond = find_uses(condition.nodes, condition.results)
        in_body = find_uses(body.nodes, (result for result in body.results if not may(result)))
        return find(variables, in_cond, in_body, may)

    def can_write(self, node: Node) -> bool:
        """Return True if a node can write to a buffer that takes turns with another."""
        is_in_order = self.reordered.isdisjoint(node.outputs)
        return is_in_order and writes_to_buffer(node, self.kernel(node), on_card=self.enqueues)

    def can_change(self, node: Node) -> bool:
        """Return True if a node can change its first input in place of a copy."""
        return (
            node.single and node.outputs[0].shape not in (None, ()) and getattr(self.kernel(node), "takes_own", False)
        )

    def put_predicate(self, condition: Subgraph, block: KnownNames, inner: KnownNames) -> None:
        """Add the head of a loop, with the nodes that decide."""
        only = only_node(condition)
        if only is not None:
            self.line(block, f"while {self.call(only, inner)}:")
            self.places[len(self.lines)] = self.place(only, inner)
            return
        self.line(block, "while True:")
        predicate = KnownNames(inner.loops, inner.depth)
        self.put_line(condition.nodes, condition.results, predicate)
        self.line(inner, f"if not {self.value(condition.results[0])}:")
        self.line(inner.deeper(), "break")

    def put_next(self, variables: list[str], values: list[str], block: KnownNames) -> None:
        """Rebind the loop variables: one by one if no value is a variable rebound before it."""
        moves = [(variable, value) for variable, value in zip(variables, values, strict=True) if variable != value]
        if self.held is not None:
            self.held.named([variable for variable, _ in moves], [value for _, value in moves])
        rebound: set[str] = set()
        for variable, value in moves:
            if value in rebound:
                left, right = zip(*moves, strict=True)
                self.line(block, f"{', '.join(left)} = {', '.join(right)}")
                return
            rebound.add(variable)
        for variable, value in moves:
            self.line(block, f"{variable} = {value}")
