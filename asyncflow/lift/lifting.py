"""`Lifting`: the nodes of a body over one row, built anew for many rows in the current graph.

For example, the body ``cond(row[0] > 0, lambda: tanh(row @ w), lambda: zeros(4))`` is lifted over 100 rows of shape
``[8]``, and captures ``w`` of shape ``[8, 4]``. The rows come in as ``x`` of shape ``[100, 8]``; ``w`` has no rows, and
is not repeated. ``row[0] > 0`` becomes ``x[:, 0] > 0`` by the row rules of its ops. The predicate has rows, so the
branch is taken apart (`asyncflow.lift.control.branches`): the rows that hold, say 60, are gathered.
``tanh(x60 @ w)`` is one product for all of them, and the results go back to their places beside the zeros of the
other 40. A node is built once if no input of it has rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from asyncflow.control.stores.tensor_array import TensorArray
from asyncflow.errors import user_location
from asyncflow.graph.building.build import as_tensor, graph_for, identity
from asyncflow.graph.building.scopes import control_dependencies
from asyncflow.graph.graph import Graph, Subgraph, current_graph, node_effects
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Access
from asyncflow.graph.resource import resources_of
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode
from asyncflow.graph.values.dtypes import VARIANT, int64
from asyncflow.lift import arrays, reasons
from asyncflow.lift.control.branches import lift_cond
from asyncflow.lift.control.flow import find_rows
from asyncflow.lift.control.loops import lift_while
from asyncflow.lift.control.parted import PartedRows, parted_at
from asyncflow.lift.zeros import without_zeros
from asyncflow.ops.arrays.creation import arange
from asyncflow.ops.arrays.manipulation import expand_dims
from asyncflow.ops.derivatives.open_extents import extents
from asyncflow.ops.rows import all as _rules
from asyncflow.ops.rows.by_row import row_by_row
from asyncflow.ops.rows.folded import FoldedRows
from asyncflow.ops.rows.rule import (
    CannotLift,
    LiftedValue,
    RowAxis,
    has_rows_on_demand,
    outputs_with_rows,
    preparation_of,
    row_rule_of,
    why_no_row_rule,
)

_RULES = (_rules, arrays, reasons)


def in_rows(x: Tensor, count: int | Tensor) -> Tensor:
    """`x`, which is found in the run to have `count` rows, where that is not known before."""
    if (x.shape is not None and x.shape[0] is not None) or _counts(count, x):
        return x
    array = TensorArray(x.dtype, count, element_shape=x.shape and x.shape[1:], clear_after_read=False)
    return array.unstack(x).stack()


def _counts(count: int | Tensor, x: Tensor) -> bool:
    """Return True if `count` was read off the shape of `x`."""
    return not isinstance(count, int) and any(y is x for each in count.node.inputs for y in each.node.inputs)


def lift(
    body: Subgraph,
    known: dict[Tensor, LiftedValue],
    wanted: Sequence[Tensor],
    count: int | Tensor,
    label: str,
    *,
    owns_stores: bool = False,
) -> list[Tensor]:
    """Return values of `body`, computed for all rows in the current graph, each with a row axis in front.

    Effects in the body run before any of the values is there. The body is left as it is.

    Args:
        body: the nodes that a function of one row has built; values that it captures are the same for every row.
        known: its values that are given.
        wanted: its values that are asked for.
        count: number of rows.
        label: a name reserved for the new nodes.
        owns_stores: see `RowAxis`.

    Raises:
        CannotLift: something in it is not computed for several rows at once; nothing is left behind.
    """
    graph = graph_for()
    before = len(graph.nodes)
    try:
        lifting = Lifting(_axis(count, label), label)
        lifting.rows.owns_stores = owns_stores
        captured = {inner: LiftedValue(outer, has_rows=False) for outer, inner in body.captures.items()}
        return [lifting.rows.spread(value) for value in lifting.checked_values(body, {**captured, **known}, wanted)]
    except CannotLift:
        graph.take_back(before)  # remove the half-built body: the caller falls back to another way
        raise


def lift_one(body: Subgraph, known: dict[Tensor, LiftedValue], wanted: Sequence[Tensor], label: str) -> list[Tensor]:
    """Return values of `body` as written, for one row without an axis, once its checks have passed; see `lift`.

    Values from a TensorArray have a row axis although no given value has one, and lose it here.
    """
    lifting = Lifting(RowAxis(as_tensor(1), 1, lambda: as_tensor([0]), label=label), label)
    found = lifting.checked_values(body, known, wanted)
    return [value.tensor[0] if value.has_rows else value.tensor for value in found]


def _axis(count: int | Tensor, label: str) -> RowAxis:
    extent = count if isinstance(count, int) else None
    tensor = as_tensor(count, int64)
    return RowAxis(tensor, extent, lambda: expand_dims(arange(tensor, dtype=int64), axis=1), label=label)


class Lifting:
    """Lifts bodies over one row axis.

    Args:
        rows: the axis.
        label: a name reserved for the lifted nodes.
    """

    def __init__(self, rows: RowAxis, label: str) -> None:
        self.rows = rows
        self.label = label
        self._location = user_location()
        self._made: dict[Node, tuple[Node, ...]] = {}
        self._stores: set[Tensor] = set()  # stores whose entries have folded rows
        self._without: set[Node] = set()  # nodes whose results are the same for all rows
        self.prepared: dict[Node, object] = {}
        self._extent: int | None = None

    def over(self, rows: RowAxis) -> Lifting:
        """Return the same lifting over other rows, such as some of these."""
        other = Lifting(rows, self.label)
        # Shared, not copied: nodes over all rows may wait for nodes lifted over some rows.
        other._made, other._stores, other.prepared = self._made, self._stores, self.prepared
        return other

    def spread(self, values: Iterable[LiftedValue], flags: Iterable[bool]) -> list[Tensor]:
        """Values as tensors, with a row axis where the flag says so."""
        return [
            self.rows.spread(value) if has_rows else value.tensor for value, has_rows in zip(values, flags, strict=True)
        ]

    def results(self, body: Subgraph, inputs: Sequence[LiftedValue]) -> list[LiftedValue]:
        """Return the results of `body` for all rows; its effects are built too.

        Args:
            body: all of whose inputs are given.
            inputs: one for each of its inputs.

        Raises:
            CannotLift: something in it is not computed for several rows at once.
        """
        return self.values(body, dict(zip(body.inputs, inputs, strict=True)), body.results)

    def values(
        self,
        body: Subgraph,
        known: dict[Tensor, LiftedValue],
        wanted: Sequence[Tensor],
        among: Collection[Node] | None = None,
    ) -> list[LiftedValue]:
        """Return values of `body`, some of which are known, and build its effects; see `results`.

        Args:
            body: as it was built.
            known: gets the built values, too.
            wanted: the values.
            among: the nodes that may be built; None: all of the body's.
        """
        self._note_extents(known.values())
        among = body.nodes if among is None else among
        needed = _needed(body, known, wanted, among)
        if self._prepare(needed):  # preparations add nodes, and uses of further values
            needed = _needed(body, known, wanted, among)
        arrays = [each for each in needed if isinstance(each, Node) and has_rows_on_demand(each.op)]
        if arrays and not self.rows.owns_stores:
            found = find_rows(body.nodes, {x: value.has_rows for x, value in known.items()}).known
            self._without.update(each for each in arrays if not found[each.outputs[0]])
        is_outermost = not hasattr(self.rows, "body")
        try:
            for node in needed:
                given = [known[x] for x in (node.needs if isinstance(node, PartedRows) else node.inputs)]
                self.rows.body = _BodyAtHand(self, body, known)
                outputs = self._lifted(node, given, body)
                self._note_extents(outputs)
                known.update(zip(node.outputs, outputs, strict=True))
        finally:
            if is_outermost and hasattr(self.rows, "body"):
                del self.rows.body  # avoid a cycle: it refers to the rows
        return [known[x] for x in wanted]

    def checked_values(
        self, body: Subgraph, known: dict[Tensor, LiftedValue], wanted: Sequence[Tensor]
    ) -> list[LiftedValue]:
        """Return `values` that are available once the effects of the body have run: a check may fail before."""
        found = self.values(body, known, wanted)
        effects = self.effects()
        # Return identities that wait: the values themselves could be used before a check fails.
        with control_dependencies(effects):
            return [value._replace(tensor=identity(value.tensor)) for value in found] if effects else found

    def _prepare(self, needed: Iterable[Node | PartedRows]) -> bool:
        """Call the preparations of row rules, for nodes and the nodes inside them; return False without any."""
        found = []
        for node in needed:
            inside = () if isinstance(node, PartedRows) else (each for body in node.subgraphs for each in body.walk())
            for each in () if isinstance(node, PartedRows) else (node, *inside):
                prepare = preparation_of(each.op)
                if prepare is not None and each not in self.prepared:
                    found.append((each, prepare))
        self.prepared.update((each, prepare(each)) for each, prepare in found)
        return bool(found)

    def _note_extents(self, values: Iterable[LiftedValue]) -> None:
        """Note that all of them have the same number of rows, so that gradients keep and compare no shapes."""
        graph = current_graph()
        for value in values:
            x = value.tensor
            if not value.has_rows or x.node.graph is not graph or not x.shape or x.shape[0] is not None:
                continue
            first, *others = extents(x) or ()
            self._extent = first if self._extent is None else self._extent
            graph.extents[x] = self._extent, *others

    def effects(self) -> list[Node]:
        """Return the nodes of this graph built for effects, without the nodes inside branches."""
        graph = current_graph()
        found = (made for node, each in self._made.items() if _writes(node) for made in each if made.graph is graph)
        return list(dict.fromkeys(found))

    def _lifted(self, unit: Node | PartedRows, inputs: list[LiftedValue], body: Subgraph) -> Sequence[LiftedValue]:
        graph = graph_for()
        count, first = len(graph.nodes), graph.root.version
        node, of = (unit.node, unit.made) if isinstance(unit, PartedRows) else (unit, (unit,))
        with graph.scoped(name_scope=self._scope(node, body), device=node.device, controls=self._controls(of, graph)):
            try:
                if isinstance(unit, PartedRows):
                    outputs: Sequence[LiftedValue] = self._rows_of_rows(unit, inputs)
                else:
                    outputs = self._outputs(node, inputs)
            except CannotLift as reason:
                if reason.location is not None:  # the location of an inner node is more exact
                    raise
                raise CannotLift(str(reason), node.location) from None
        made = graph.nodes[count:]
        # Nodes that waited for this node wait for its effects or, without effects, for the last node made.
        self._made.update(dict.fromkeys(of, tuple(each for each in made if _writes(each)) or tuple(made[-1:])))
        for each in made:
            # Errors in the run then name the user's line of the lifted node.
            if each.id >= first and each.location == self._location:
                each.location = node.location
        return outputs

    def _scope(self, node: Node, body: Subgraph) -> str:
        inner = node.name.removeprefix(f"{body.label}/").rpartition("/")
        return f"{self.label}/{inner[0]}{inner[1]}"

    def _controls(self, nodes: Iterable[Node], graph: Graph) -> tuple[Node, ...]:
        before = [made for node in nodes for each in node.control_inputs for made in self._made.get(each, ())]
        local = [graph.import_control(each) for each in before if graph.can_use(each.graph)]
        return tuple(each for each in local if each is not None)

    def _rows_of_rows(self, parted: PartedRows, given: Sequence[LiftedValue]) -> list[LiftedValue]:
        """The outputs of a branch or loop over rows, for the rows of each row."""
        *inputs, count, numbers = given
        if count.has_rows:
            raise CannotLift(f"{parted.node.name} has another number of rows for each row")
        if not parted.gives_rows([value.has_rows for value in given]):
            rows = parted.rows.among(count.tensor, lambda: numbers.tensor, parted.rows.extent)
            same = [LiftedValue(x.tensor, own.has_rows) for x, own in zip(inputs, parted.inputs, strict=True)]
            return [LiftedValue(y.tensor, False) for y in self.over(rows)._outputs(parted.node, same)]
        folded = FoldedRows(self.rows, count.tensor if parted.rows.extent is None else parted.rows.extent)
        flat = [
            x if x.tensor in self._stores else folded.fold(x, own.has_rows)
            for x, own in zip(inputs, parted.inputs, strict=True)
        ]
        outputs = self.over(folded.axis(parted.rows, numbers))._outputs(parted.node, flat)
        self._stores.update(y.tensor for y in outputs if y.tensor.dtype == VARIANT)
        return [LiftedValue(y.tensor if y.tensor in self._stores else folded.unfold(y.tensor), True) for y in outputs]

    def _of_own_stores(self, node: Node, inputs: list[LiftedValue]) -> list[LiftedValue] | None:
        """Return the outputs of a node that makes or reads stores of each row's own; None for other nodes."""
        made = any(y.dtype == VARIANT for y in node.outputs)
        if not (made or any(value.has_rows and value.tensor.dtype == VARIANT for value in inputs)):
            return None
        if isinstance(node, StructuredNode):
            raise CannotLift(f"{node.name} takes a TensorArray or RowStore that each row has of its own")
        return [LiftedValue(y, True) for y in row_by_row(node, self.rows, inputs)]

    def _outputs(self, node: Node, inputs: list[LiftedValue]) -> Sequence[LiftedValue]:
        if self.rows.owns_stores and (found := self._of_own_stores(node, inputs)) is not None:
            return found
        if isinstance(node, WhileNode):
            return lift_while(self, node, inputs)
        if isinstance(node, CondNode):
            return lift_cond(self, node, inputs)
        _refuse_writes(node)
        known = without_zeros(node, inputs)
        if known is not None:
            return [known]
        flags = outputs_with_rows(node, [value.has_rows for value in inputs])
        # Each row draws its own numbers, even with equal inputs.
        is_same = not any(flags) and not any(value.has_rows for value in inputs) and not node.op.conduct.is_random
        if (is_same and node not in self.prepared) or node in self._without:
            return [LiftedValue(x, has_rows=False) for x in _copied(node, [value.tensor for value in inputs])]
        reason = why_no_row_rule(node.op)
        rule = row_rule_of(node.op) or (row_by_row if node.op.conduct.is_user and reason is None else None)
        if rule is None:
            reason = reason or "it has no row rule"
            raise CannotLift(f"{node.name} ({node.op.name}) is not computed for several rows at once: {reason}")
        return [LiftedValue(x, rows) for x, rows in zip(rule(node, self.rows, inputs), flags, strict=True)]


class _BodyAtHand(NamedTuple):
    """See `LiftedBody`."""

    lifting: Lifting
    body: Subgraph
    known: dict[Tensor, LiftedValue]

    def value(self, x: Tensor) -> LiftedValue:
        if x.graph is not self.body:
            graph = graph_for()
            if not graph.can_use(x.graph):
                raise CannotLift(f"{x.name} belongs to another row axis, and {self.body.label} does not capture it")
            return LiftedValue(graph.import_tensor(x), has_rows=False)
        return self.lifting.values(self.body, self.known, [x], among=())[0]

    def prepared(self, node: Node) -> object:
        return self.lifting.prepared[node]

    def computed(
        self, inner: Subgraph, known: dict[Tensor, LiftedValue], wanted: Sequence[Tensor]
    ) -> list[LiftedValue]:
        return Lifting(self.lifting.rows, self.lifting.label).values(inner, known, wanted)


def _copied(node: Node, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs of a node that is the same for every row.

    No `Copier` makes the node: its inputs may have other shapes than the original's, so its outputs are inferred anew.
    """
    graph = graph_for()
    local = [graph.import_tensor(x) for x in inputs]
    specs = node.op.infer(*(x.spec for x in local), **node.attrs)
    return graph.add_node(node.op, local, node.attrs, specs, name=node.name.rpartition("/")[2]).outputs


def _refuse_writes(node: Node) -> None:
    if isinstance(node, StructuredNode) or row_rule_of(node.op) is not None:
        return
    for _, access in node_effects(node):
        if access is Access.WRITE:
            changed = [repr(each) for each in resources_of(node)]
            what = f"changes {changed[0]}" if changed else "has effects"
            raise CannotLift(f"{node.name} ({node.op.name}) {what}, once for each row and in their order")


def _writes(node: Node) -> bool:
    return any(access is Access.WRITE for _, access in node_effects(node))


def _needed(
    body: Subgraph, known: Collection[Tensor], wanted: Iterable[Tensor], among: Collection[Node]
) -> list[Node | PartedRows]:
    """Return the unknown nodes behind the wanted values and the effects, in order.

    The nodes made of one branch or loop over rows count as one, unless other nodes use their inner values.
    """
    needed = {x.node for x in wanted if x not in known}
    wholes: dict[Node, PartedRows] = {}
    for node in reversed(body.nodes):  # users before the nodes that they use
        if node in needed or (_writes(node) and node in among):
            parted = body.parted.get(node) if _writes(node) else parted_at(node)
            if parted is not None:
                needed.discard(node)
                wholes[parted.made[-1]] = parted
            else:
                needed.add(node)
            of, needs = ([node], node.inputs) if parted is None else (parted.made, parted.needs)
            needed.update(x.node for x in needs if x not in known)
            needed.update({x for each in of for x in each.control_inputs}.difference(of))
    found: list[Node | PartedRows] = []
    for node in body.nodes:
        found += [node] if node in needed else []
        found += [wholes[node]] if node in wholes else []
    return [each for each in found if not any(x in known for x in each.outputs)]
