"""Values that loops save for their gradients, their sizes and purposes: ``plan.explain(memory=True)``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from asyncflow.autodiff.stores.checkpoints import CHECKPOINT
from asyncflow.autodiff.stores.saved_values import READ_SAVED, SAVE
from asyncflow.errors import SourceLocation
from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.graph import Graph, node_effects
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Access, Memory
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import size_of
from asyncflow.graph.values.spec import Spec
from asyncflow.state.variables.variable import VARIABLE_READ


@dataclass(frozen=True, slots=True)
class Saved:
    """A value that a loop saves in each iteration.

    Attributes:
        loop: the loop's name.
        location: where the loop was written.
        value: the value's name.
        spec: its dtype and shape.
        readers: the forward nodes whose gradients read it.
        is_shared: it is one value in all iterations, which share its memory.
        is_checkpoint: it is a variable, saved once a segment of iterations; see
            `asyncflow.compiler.memory.recomputation.segments`.
        same_as: a value saved before that lies in the same buffer, in this iteration or the one before; None for none.
    """

    loop: str
    location: SourceLocation
    value: str
    spec: Spec
    readers: tuple[str, ...]
    is_shared: bool
    is_checkpoint: bool = False
    same_as: str | None = None

    @property
    def nbytes(self) -> int | None:
        """Bytes an iteration; None where the shape is known only in a run.

        0 for shared values, for stores of inner loops, for checkpoints, and for values that count under another name.
        """
        if self.spec.dtype == VARIANT or self.is_shared or self.is_checkpoint or self.same_as is not None:
            return 0
        size = size_of(self.spec.shape)
        return None if size is None else size * self.spec.dtype.itemsize


def find_saved(graph: Graph) -> tuple[Saved, ...]:
    """Return all values that loops of `graph` save, from the outermost loop inward."""
    found = [
        (node, place, result.node.inputs[2])
        for node in graph.walk()
        if isinstance(node, WhileNode)
        for place, result in enumerate(node.body.results)
        if result.node.op in (SAVE, CHECKPOINT)
    ]
    if not found:
        return ()
    readers = _Readers(graph)
    names: dict[tuple[WhileNode, Tensor], str] = {}
    return tuple(
        Saved(
            loop=loop.name,
            location=loop.location,
            value=value.node.name,
            spec=value.spec,
            readers=readers.of(loop.outputs[place]),
            is_shared=is_shared(value, loop),
            is_checkpoint=loop.body.results[place].node.op is CHECKPOINT,
            same_as=_name_before(names, loop, value),
        )
        for loop, place, value in found
    )


def explain_saved(saved: Iterable[Saved]) -> list[str]:
    """Return lines for people: each loop, and the values it saves."""
    loops: dict[str, list[Saved]] = {}
    for each in saved:
        loops.setdefault(each.loop, []).append(each)
    if not loops:
        return ["no loop saves values for a gradient"]
    lines = []
    for loop, values in loops.items():
        sizes = [value.nbytes for value in values]
        known = sum(size for size in sizes if size is not None)
        more = ", and values of a size known only in a run" if None in sizes else ""
        lines.append(f"loop {loop} ({values[0].location}) saves {known:,} bytes an iteration for its gradient{more}")
        lines.extend(f"  {_line(value)}" for value in values)
    return lines


def _line(value: Saved) -> str:
    if value.spec.dtype == VARIANT:
        size = "the saved values or the array of an inner loop"
    elif value.is_checkpoint:
        size = f"{value.spec}, at the start of each segment"
    elif value.is_shared:
        size = f"{value.spec}, the same in all iterations and kept once"
    elif value.same_as is not None:
        size = f"{value.spec}, which is in the buffer of {value.same_as}"
    elif value.nbytes is None:
        size = f"{value.spec}, of a size known only in a run"
    else:
        size = f"{value.spec}, {value.nbytes:,} bytes"
    readers = ", ".join(value.readers)
    return f"{value.value}: {size}; " + (f"for the gradient of {readers}" if readers else "not read in this run")


def _name_before(names: dict[tuple[WhileNode, Tensor], str], loop: WhileNode, value: Tensor) -> str | None:
    """The name under which the buffer of a value was saved before; else the value gives its own."""
    if value.spec.dtype == VARIANT:
        return None
    found = names.setdefault((loop, buffer_of(value, dict(loop.carried))), value.node.name)
    return None if found == value.node.name else found


def buffer_of(value: Tensor, variables: Mapping[Tensor, Tensor]) -> Tensor:
    """The value whose memory holds a value of a loop's body, as far as is known.

    Args:
        value: of the body.
        variables: the loop variables: each has the memory of what the iteration before gave it.
    """
    seen: set[Tensor] = set()
    while value not in seen:
        seen.add(value)
        if value in variables:
            value = variables[value]
        elif _is_view(value.node):
            value = value.node.inputs[0]
    return value


def _is_view(node: Node) -> bool:
    """Return True if a node's result is a view of its first input; picked rows have a memory of their own."""
    if node.op.traits.memory not in (Memory.VIEW, Memory.WHOLE_VIEW):
        return False
    return all(given.shape == () for given in node.inputs[1:])


def is_shared(value: Tensor, loop: WhileNode) -> bool:
    """Return True if a value of the body is made outside the loop, or read from a variable that the loop does not
    change.
    """
    if value.node.op is PARAMETER:
        return all(value is not variable for variable, _ in loop.carried)
    if value.node.op is not VARIABLE_READ:
        return False
    (resource, _), *_ = node_effects(value.node)
    return all(touched != resource or access is Access.READ for touched, access in node_effects(loop))


class _Readers:
    """Readers of the values of a store, through the bodies that it is passed into and the stores that keep it."""

    def __init__(self, graph: Graph) -> None:
        self._names: set[str] = set()
        self._users: dict[Tensor, list[Node]] = {}
        self._passed: dict[Tensor, list[Tensor]] = {}
        self._note(graph)

    def of(self, store: Tensor) -> tuple[str, ...]:
        """Return the forward nodes whose gradients read the values in `store`."""
        found: dict[str, None] = {}
        seen: set[Tensor] = set()
        open_ = [store]
        while open_:
            tensor = open_.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            open_ += self._passed.get(tensor, ())
            for user in self._users.get(tensor, ()):
                if user.op is READ_SAVED and user.inputs[0] is tensor:
                    value = user.outputs[0]
                    if value.dtype == VARIANT:
                        open_.append(value)
                    found.update(dict.fromkeys(self._forward(reader) for reader in self._uses(value)))
                elif user.op is SAVE and user.inputs[2] is tensor:
                    open_.append(user.outputs[0])
        return tuple(sorted(found))

    def _uses(self, value: Tensor) -> list[Node]:
        """Return the nodes that read a value, in inner bodies too, without nodes that only pass it on.

        A branch looks at its predicate.
        """
        found = []
        open_ = [value]
        while open_:
            tensor = open_.pop()
            open_ += self._passed.get(tensor, ())
            found += [
                user
                for user in self._users.get(tensor, ())
                if not user.subgraphs or (isinstance(user, CondNode) and user.predicate is tensor)
            ]
        return found

    def _forward(self, reader: Node) -> str:
        """Return the node that `reader` helps to differentiate: `gradients` names added nodes after it."""
        scope = reader.name.rpartition("/")[0].rpartition("gradients/")[2]
        name = scope
        while name and name not in self._names:
            name = name.rpartition("/")[0]
        return name or scope

    def _note(self, graph: Graph) -> None:
        for node in graph.nodes:
            self._names.add(node.name)
            for tensor in node.inputs:
                self._users.setdefault(tensor, []).append(node)
            if not isinstance(node, StructuredNode):
                continue
            for part in node.subgraphs:
                for inner, outer in zip(part.inputs, node.entering, strict=True):
                    self._passed.setdefault(outer, []).append(inner)
                self._note(part)
                if isinstance(node, CondNode) or part is node.subgraphs[1]:
                    for result, output in zip(part.results, node.outputs, strict=True):
                        self._passed.setdefault(result, []).append(output)
