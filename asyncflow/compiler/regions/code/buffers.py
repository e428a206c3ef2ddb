"""Buffers of a straight line of nodes that may be written again, so that loop bodies allocate nothing once warm.

A value's buffer is dead after its last use, if every use is by an op that keeps no input, or that returns a view. Uses
of the view then count as uses of the buffer (`Memory`). Anything else may keep the value: a TensorArray, a variable, a
body it is passed into.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from asyncflow.compiler.program.kernels.kernels import is_small_spec
from asyncflow.graph.builtin import CONSTANT, IDENTITY
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Memory
from asyncflow.graph.structured import StructuredNode
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.values import Kernel


def dead_values(
    nodes: Sequence[Node],
    escaping: Iterable[Tensor],
    *,
    variables: AbstractSet[Tensor] = frozenset(),
    deep: bool = False,
) -> dict[int, list[Tensor]]:
    """Return the large values that are unused after a node, so that their names can drop them.

    Args:
        nodes: a straight line, in order.
        escaping: values that are used afterwards.
        variables: of the loop whose body this is, if they may be let go of as well.
        deep: results of branches and loops, and stores, may be, too.

    Returns:
        The values, by the index of the node.
    """
    owner: dict[Tensor, Tensor] = {}
    last: dict[Tensor, int] = {}
    for index, node in enumerate(nodes):
        last.update((owner.get(tensor, tensor), index) for tensor in node.inputs)
        if node.op is IDENTITY:  # shares its input's variable
            owner[node.outputs[0]] = owner.get(node.inputs[0], node.inputs[0])
        elif deep if isinstance(node, StructuredNode) else len(node.outputs) > 1:
            last.update(dict.fromkeys(node.outputs, index))  # some outputs may be unused
    kept = {owner.get(tensor, tensor) for tensor in escaping}
    made = {node for node in nodes if makes_name(node, deep=deep)}
    dead: dict[int, list[Tensor]] = {}
    for tensor, index in last.items():
        if (tensor.node in made or tensor in variables) and tensor not in kept and _may_be_large(tensor, deep=deep):
            dead.setdefault(index, []).append(tensor)
    return dead


def makes_name(node: Node, *, deep: bool) -> bool:
    """Return True if the outputs of a node have names of their own in the code of a region.

    Kernels' have. Loops share theirs with their variables, which begin anew when the loop does; `deep` lets them go.
    """
    return (deep and isinstance(node, StructuredNode)) or (node.op.kernel is not None and node.op is not CONSTANT)


def _may_be_large(value: Tensor, *, deep: bool) -> bool:
    return not is_small_spec(value.spec) or (deep and value.dtype == VARIANT)


def made_by(nodes: Collection[Node], results: Iterable[Tensor]) -> list[Tensor]:
    """Find the large values and stores that nodes of a body have made, and that its results share names with."""
    found: dict[Tensor, None] = {}
    for result in results:
        value = result
        while value.node.op is IDENTITY and value.node in nodes:
            value = value.node.inputs[0]
        if value.node in nodes and makes_name(value.node, deep=True) and _may_be_large(value, deep=True):
            found[value] = None
    return list(found)


@dataclass(frozen=True, slots=True)
class Uses:
    """Uses of buffers in a straight line of nodes.

    Attributes:
        last: for each value in use, the index of the last node that uses its buffer.
        kept: values whose buffers may be kept elsewhere, so that they are never dead.
        owner: of a view, the value whose buffer it looks into.
    """

    last: Mapping[Tensor, int]
    kept: frozenset[Tensor]
    owner: Mapping[Tensor, Tensor]

    def dies_at(self, tensor: Tensor) -> int | None:
        """Return the index of the node after which the buffer is dead; None if it never is, or is unused."""
        return None if tensor in self.kept else self.last.get(tensor)


def find_uses(nodes: Sequence[Node], escaping: Iterable[Tensor]) -> Uses:
    """The uses of buffers in `nodes`.

    Args:
        nodes: a straight line, in order.
        escaping: values used afterwards.
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
                if place == 0:  # the first input is the viewed array; the others select the part
                    owner.update((output, buffer) for output in node.outputs)
            elif memory is not Memory.NEW:
                kept.add(buffer)
    kept.update(owner.get(tensor, tensor) for tensor in escaping)
    return Uses(last, frozenset(kept), owner)


def writes_to_buffer(node: Node, kernel: Kernel | None, *, on_card: bool = False) -> bool:
    """Return True if the node can write its result to a given buffer, and that is worthwhile.

    Args:
        node: any node.
        kernel: of the node.
        on_card: the kernel computes with arrays of a card, which take some microseconds to allocate, of whatever size.
            CuPy's ufuncs have NumPy's attributes; a ufunc of NumPy's computes a value that stays on the host.
    """
    is_ufunc = isinstance(kernel, np.ufunc) or (hasattr(kernel, "nout") and hasattr(kernel, "types"))
    takes_out = getattr(kernel, "nout", 0) == 1 if is_ufunc else getattr(kernel, "takes_out", False)
    if not (takes_out and node.single) or (on_card and isinstance(kernel, np.ufunc)):
        return False
    spec = node.outputs[0].spec
    return is_static(spec.shape) and (spec.shape != () if on_card else not is_small_spec(spec))


def carried_results(
    variables: Sequence[tuple[Tensor, Tensor, Tensor]], condition: Uses, body: Uses, can_write: Callable[[Tensor], bool]
) -> frozenset[Tensor]:
    """The results of a loop body that may be written to the buffer of the loop variable before last.

    That takes a result without other references, and a variable that only ufuncs read. When the next value is there,
    the buffer of the present one is dead, so two buffers take turns.

    Args:
        variables: per loop variable, its tensors in the predicate and in the body, and its result.
        condition: the uses in the predicate.
        body: the uses in the body, with all results escaping except the `can_write` ones.
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


def changed_in_place(
    variables: Sequence[tuple[Tensor, Tensor, Tensor]],
    condition: Uses,
    body: Uses,
    can_change: Callable[[Tensor], bool],
) -> list[tuple[int, list[Node]]]:
    """Loop variables that a body gives back with some elements changed, and the nodes that change them.

    Args:
        variables: see `carried_results`, as the others.
        condition: the uses in the predicate.
        body: the uses in the body, with all results escaping except the `can_change` ones.
        can_change: whether a result is computed by a node of the body that can change its first input.
    """
    results = [result for _, _, result in variables]
    found = []
    for place, (in_cond, in_body, result) in enumerate(variables):
        value, nodes = result, []
        while value is not in_body and can_change(value):
            nodes.append(value.node)
            value = value.node.inputs[0]
        made = {in_body, *(node.outputs[0] for node in nodes)}
        is_seen = in_cond in condition.kept or made & body.kept or sum(other is result for other in results) > 1
        if nodes and value is in_body and not is_seen:
            found.append((place, nodes))
    return found


@dataclass(slots=True)
class Buffers:
    """The buffers of one straight line, as its code is written.

    Attributes:
        uses: from `find_uses`.
        carried: results that become loop variables, whose old values are theirs to write to.
        on_card: the buffers are in the memory of a card.
        gives: the line runs once: a value that stays may have a dead buffer for its own, and buffers that no later
            value takes are dropped.
        slots: the variable that holds the buffer of a value.
        unslotted: values in memory of their own, for which no buffer may be kept.
    """

    uses: Uses
    carried: frozenset[Tensor] = frozenset()
    on_card: bool = False
    gives: bool = False
    slots: dict[Tensor, str] = field(default_factory=dict)
    unslotted: set[Tensor] = field(default_factory=set)
    _free: dict[Spec, list[str]] = field(default_factory=dict)
    _wanted: dict[int, dict[Spec, int]] = field(default_factory=dict)

    def look_ahead(self, nodes: Sequence[Node], kernel_of: Callable[[Node], Kernel | None]) -> None:
        """Find for a line that runs once how many dead buffers its later nodes take, wherever buffers are released."""
        self.gives = True
        # First in order: which nodes take a buffer, as `slot_for` will find, and where the buffers die.
        taking: dict[int, Spec] = {}
        ending: dict[int, Counter[Spec]] = defaultdict(Counter)
        has_slot: dict[Tensor, str] = {}
        for index, node in enumerate(nodes):
            kernel = kernel_of(node)
            if kernel is None or not writes_to_buffer(node, kernel, on_card=self.on_card):
                continue
            (output,) = node.outputs
            over, end = self._ending(node, index, kernel, has_slot), self.uses.dies_at(output)
            if over is None:
                taking[index] = output.spec
            else:
                del has_slot[over]
                ending[index][over.spec] -= 1
            if end is not None:
                has_slot[output] = ""
                ending[end][output.spec] += 1
        # Then backwards: a buffer that dies is wanted where later nodes take more than die in between.
        wanted: Counter[Spec] = Counter()
        for index in range(len(nodes) - 1, -1, -1):
            for spec, count in ending[index].items():
                self._wanted.setdefault(index, {})[spec] = wanted[spec]
                wanted[spec] = max(0, wanted[spec] - count)
            if index in taking:
                wanted[taking[index]] += 1

    def slot_for(self, node: Node, index: int, kernel: Kernel, new_slot: Callable[[Spec], str | None]) -> str | None:
        """The variable whose buffer `node`, at `index`, may write its result to; None if it has to make a new one."""
        if not writes_to_buffer(node, kernel, on_card=self.on_card):
            return None
        output = node.outputs[0]
        # No later node writes to the buffer of a value that stays, so a dead buffer will do: gradients of four layers
        # hold 9 MiB of values instead of 12.
        stays = self.uses.dies_at(output) is None and output not in self.carried
        if stays and not self.gives:
            return None
        free = self._free.get(output.spec)
        slot = self._in_place(node, index, kernel) or (free.pop() if free else None)
        if stays:
            return slot
        slot = slot or new_slot(output.spec)
        if slot is not None:
            self.slots[output] = slot
        elif output not in self.carried:
            self.unslotted.add(output)
        return slot

    def replaced(self, node: Node, index: int, kernel: Kernel) -> Tensor | None:
        """Return an input over which `node` may write its result, though no buffer may be kept.

        The input is in memory of its own and ends here, so that this takes no memory. A new array would stand beside
        the input, and a program would hold more within a limit than without one. The memory is not used again, so that
        the result may be kept.
        """
        if not writes_to_buffer(node, kernel, on_card=self.on_card):
            return None
        found = self._ending(node, index, kernel, self.unslotted)
        if found is not None:
            self.unslotted.remove(found)
            self.unslotted.add(node.outputs[0])
        return found

    def _in_place(self, node: Node, index: int, kernel: Kernel) -> str | None:
        found = self._ending(node, index, kernel, self.slots)
        return None if found is None else self.slots.pop(found)

    def _ending(self, node: Node, index: int, kernel: Kernel, among: Container[Tensor]) -> Tensor | None:
        """Return an input whose buffer is dead after `node`, which can write its result there."""
        if not isinstance(kernel, np.ufunc) or kernel.signature is not None:
            return None  # such as matmul, which reads its inputs more than once
        for tensor in node.inputs:
            dies_here = self.uses.dies_at(tensor) == index and tensor not in self.carried
            if dies_here and tensor in among and tensor.spec == node.outputs[0].spec:
                return tensor
        return None

    def may_change(self, node: Node, index: int) -> bool:
        """Return True if only `node`, at `index`, still uses its first input."""
        x, *others = node.inputs
        return self.uses.dies_at(x) == index and all(self.uses.owner.get(other, other) is not x for other in others)

    def release(self, index: int) -> list[str]:
        """After the node at `index`: buffers that are dead now may be written again; return buffers to drop."""
        for tensor in [x for x in self.slots if self.uses.dies_at(x) == index and x not in self.carried]:
            self._free.setdefault(tensor.spec, []).append(self.slots.pop(tensor))
        # A buffer that no later node takes would be held to the end of the region: 20 values in place of 13, of eight
        # pieces that a gradient computes again.
        dropped: list[str] = []
        for spec, wanted in self._wanted.get(index, {}).items():
            free = self._free.get(spec, [])
            dropped += free[wanted:]
            del free[wanted:]
        return dropped
