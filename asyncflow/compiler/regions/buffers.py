"""Which buffers of a straight line of nodes may be written again, so that loop bodies allocate nothing once warm.

A value's buffer is dead after its last use, if every use is by an op that keeps nothing of its inputs, or that gives a
view, whose uses then count as uses of the buffer (`Memory`). Anything else may keep the value: a TensorArray, a
variable, a body it is passed into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncflow.compiler.program.kernels import is_small_spec
from asyncflow.compiler.regions.row_buffers import has_open_rows, is_elementwise, is_own, leading_inputs, takes_out
from asyncflow.graph.builtin import CONSTANT, IDENTITY
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Memory
from asyncflow.graph.shapes import is_static
from asyncflow.graph.spec import Spec
from asyncflow.values import Kernel


def dead_values(nodes: Sequence[Node], escaping: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """By index: the large values that nobody asks for after that node, so that their variables need not hold them."""
    owner: dict[Tensor, Tensor] = {}
    last: dict[Tensor, int] = {}
    for index, node in enumerate(nodes):
        last.update((owner.get(tensor, tensor), index) for tensor in node.inputs)
        if node.op is IDENTITY:  # shares its input's variable
            owner[node.outputs[0]] = owner.get(node.inputs[0], node.inputs[0])
    kept = {owner.get(tensor, tensor) for tensor in escaping}
    # Only kernels make variables of their own: loops share theirs with their results, bodies with what is passed in.
    made = {node for node in nodes if node.op.kernel is not None and node.op is not CONSTANT}
    dead: dict[int, list[Tensor]] = {}
    for tensor, index in last.items():
        if tensor.node in made and tensor not in kept and not is_small_spec(tensor.spec):
            dead.setdefault(index, []).append(tensor)
    return dead


@dataclass(frozen=True, slots=True)
class Uses:
    """How a straight line of nodes uses buffers.

    Attributes:
        last: for each value in use, the index of the last node that uses its buffer.
        kept: values whose buffers somebody may keep, so that they are never dead.
    """

    last: Mapping[Tensor, int]
    kept: frozenset[Tensor]

    def dies_at(self, tensor: Tensor) -> int | None:
        """The index of the node after which the buffer is dead; None if it never is, or nobody uses it."""
        return None if tensor in self.kept else self.last.get(tensor)


def find_uses(nodes: Sequence[Node], escaping: Iterable[Tensor]) -> Uses:
    """The uses of buffers in `nodes`.

    Args:
        nodes: a straight line, in order.
        escaping: values somebody uses afterwards.
    """
    owner: dict[Tensor, Tensor] = {}
    last: dict[Tensor, int] = {}
    kept: set[Tensor] = set()
    for index, node in enumerate(nodes):
        memory = node.op.traits.memory
        for place, tensor in enumerate(node.inputs):
            buffer = owner.get(tensor, tensor)
            last[buffer] = index
            if memory in (Memory.VIEW, Memory.WHOLE_VIEW):
                if place == 0:  # of what it is a view; others say of which part
                    owner[node.outputs[0]] = buffer
            elif memory is not Memory.NEW:
                kept.add(buffer)
    kept.update(owner.get(tensor, tensor) for tensor in escaping)
    return Uses(last, frozenset(kept))


def writes_to_buffer(node: Node, kernel: Kernel | None) -> bool:
    """Whether the node can write its result to a buffer that it is given, and that is worth it."""
    if not (takes_out(kernel) and node.single):
        return False
    spec = node.outputs[0].spec
    return is_static(spec.shape) and not is_small_spec(spec)


def carried_results(
    variables: Sequence[tuple[Tensor, Tensor, Tensor]], condition: Uses, body: Uses, can_write: Callable[[Tensor], bool]
) -> frozenset[Tensor]:
    """The results of a loop body that may be written to the buffer of the loop variable before last.

    That takes a result nobody else keeps, and a variable that only ufuncs look at: when the next value is there, the
    buffer of the present one is dead, so two buffers take turns.

    Args:
        variables: per loop variable, its tensors in the predicate and in the body, and its result.
        condition: the uses in the predicate.
        body: the uses in the body, with all results but those that `can_write` escaping.
        can_write: whether a result is computed by a node of the body that can write to a given buffer.
    """
    results = [result for _, _, result in variables]
    return frozenset(
        result
        for in_cond, in_body, result in variables
        if can_write(result)
        and result.spec == in_body.spec
        and in_cond not in condition.kept
        and not {in_body, result} & body.kept
        and sum(other is result for other in results) == 1
    )


@dataclass(slots=True)
class Buffers:
    """The buffers of one straight line, as its code is written.

    Attributes:
        uses: from `find_uses`.
        carried: results that become loop variables, whose old values are theirs to write to.
        keeps_rows: whether buffers of rows are kept for the next iteration.
        appended: from `rows_appended`.
        slots: the variable that holds the buffer of a value.
        row_slots: the variable that holds rows of the buffer of a value, as many as were asked for last.
        own: values in memory that nobody else knows, of which only a run knows how many rows they have.
    """

    uses: Uses
    carried: frozenset[Tensor] = frozenset()
    keeps_rows: bool = False
    appended: Mapping[Tensor, Tensor] = field(default_factory=dict)
    slots: dict[Tensor, str] = field(default_factory=dict)
    row_slots: dict[Tensor, str] = field(default_factory=dict)
    own: set[Tensor] = field(default_factory=set)
    _free: dict[Spec, list[str]] = field(default_factory=dict)

    def slot_for(self, node: Node, index: int, kernel: Kernel, new_slot: Callable[[Spec], str | None]) -> str | None:
        """The variable whose buffer `node`, at `index`, may write its result to; None if it has to make a new one."""
        if not writes_to_buffer(node, kernel):
            return None
        output = node.outputs[0]
        if self.uses.dies_at(output) is None and output not in self.carried:
            return None
        slot = self._in_place(node, index, kernel) or self._reused(output.spec) or new_slot(output.spec)
        if slot is not None:
            self.slots[output] = slot
        return slot

    def rows_for(
        self, node: Node, index: int, kernel: Kernel, value: Callable[[Tensor], str], new_slot: Callable[[Spec], str]
    ) -> str | None:
        """An expression for the memory that `node` may write open rows to, or None in the run; None if there is none.

        Args:
            node: at `index`.
            index: its place in the line.
            kernel: of the node.
            value: gives the expression for a value.
            new_slot: makes a variable that holds rows of a buffer.
        """
        output = node.outputs[0] if node.single else None
        if output is None or not has_open_rows(output):
            return None
        ends = self.uses.dies_at(output)
        if ends is not None and is_own(node):
            self.own.add(output)
        leading = leading_inputs(node, kernel)
        if not leading:
            return None
        names = list(dict.fromkeys(map(value, leading)))
        alike = f" if {' == '.join(f'len({name})' for name in names)} else None" if len(names) > 1 else ""
        for x in leading if is_elementwise(node, kernel) else ():
            # What is used later on must not be in a buffer, into which the next iteration writes.
            is_free = x in self.own and self.uses.dies_at(x) == index and (ends is not None or x not in self.row_slots)
            if is_free and x.dtype == output.dtype:
                self.own.discard(x)
                if x in self.row_slots:
                    self.row_slots[output] = self.row_slots.pop(x)
                return value(x) + alike
        if ends is None or not self.keeps_rows:
            return None
        slot = self._reused(output.spec) or new_slot(output.spec)
        self.row_slots[output] = slot
        count = f"len({names[0]})"
        return f"({slot} if len({slot}) == {count} else ({slot} := rows_of({slot}, {count}))){alike}"

    def _in_place(self, node: Node, index: int, kernel: Kernel) -> str | None:
        if not isinstance(kernel, np.ufunc) or kernel.signature is not None:
            return None  # such as matmul, which reads its inputs more than once
        for tensor in node.inputs:
            dies_here = self.uses.dies_at(tensor) == index and tensor not in self.carried
            if dies_here and tensor in self.slots and tensor.spec == node.outputs[0].spec:
                return self.slots.pop(tensor)
        return None

    def _reused(self, spec: Spec) -> str | None:
        free = self._free.get(spec)
        return free.pop() if free else None

    def release(self, index: int) -> None:
        """After the node at `index`: buffers that are dead now may be written again."""
        for slots in (self.slots, self.row_slots):
            for tensor in [x for x in slots if self.uses.dies_at(x) == index and x not in self.carried]:
                slot = slots.pop(tensor)
                self._free.setdefault(tensor.spec, []).append(slot)
