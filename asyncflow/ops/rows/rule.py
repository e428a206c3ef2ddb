"""Row rules: how a node over one row becomes nodes over many (docs/design/rows.md).

A rule is to lifting what a derivative is to gradients. Most ops name a shared rule, with `rows=` in their definition.
Others have their own in the module of their family here, which `row_rule` installs. Inputs are `LiftedValue`: with a
leading row axis, or the same for all rows. The engine, `asyncflow.lift`, asks a rule only where some input has rows;
what depends on no row is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import NamedTuple, Protocol, TypeAlias

from asyncflow.errors import SourceLocation
from asyncflow.graph.building.build import apply
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import VIEW, Op, Rows, define, derivative
from asyncflow.graph.structured import StructuredNode, WhileNode
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import Shape
from asyncflow.graph.values.spec import Spec, known_int
from asyncflow.ops.arrays.manipulation import expand_dims, permute_dims
from asyncflow.ops.cost import free
from asyncflow.ops.reductions.statistical import sum as sum_of
from asyncflow.values import Array, Kernel, Namespace


class LiftedValue(NamedTuple):
    """A value of the body for all rows: `tensor` has a row axis in front, or is the same for every row.

    `is_zero` says that it is 0, and that no run can feed another value, so that sums and products with it need not be
    computed.
    """

    tensor: Tensor
    has_rows: bool
    is_zero: bool = False

    @property
    def shape(self) -> Shape:
        """The shape of one row."""
        shape = self.tensor.shape
        return shape if shape is None or not self.has_rows else shape[1:]

    @property
    def rank(self) -> int:
        """The rank of one row.

        Raises:
            CannotLift: it is not known.
        """
        if self.shape is None:
            raise CannotLift(f"the rank of {self.tensor.name} is not known while the graph is built")
        return len(self.shape)


class CannotLift(Exception):
    """A body, or a node of it, cannot be computed for all rows at once; the message says why.

    Attributes:
        location: the user's line of the node, which the message ends with; None where it is about no node.
    """

    def __init__(self, reason: str, location: SourceLocation | None = None) -> None:
        self.location = location
        super().__init__(reason if location is None else f"{reason}, built at {location}")


class LiftedBody(Protocol):
    """A body that is being lifted, for rules that need more of it than the inputs of their node."""

    def value(self, x: Tensor) -> LiftedValue:
        """A value of the body, for all rows."""

    def prepared(self, node: Node) -> object:
        """Return the result of `prepare` for the node's row rule."""

    def computed(
        self, inner: Subgraph, known: dict[Tensor, LiftedValue], wanted: Sequence[Tensor]
    ) -> list[LiftedValue]:
        """Return values for all rows of a body inside this one, some of which are known; in any graph, and later
        too.
        """


@dataclass(eq=False, repr=False)
class RowAxis:
    """The row axis that a body is given.

    Attributes:
        count: number of rows: an int64 scalar.
        extent: number of rows, if it is known while the graph is built.
        numbers: gives the numbers that random draws count rows by: int64 ``[rows, k]``, a vector that is the row's own.
        loops: number of lifted loops around, inside the lifted body.
        own_loops: number of loops around that bring rows in turn, which do not identify a row.
        outer: for rows of rows, a tuple for each axis around: the number of integers, `loops` and `own_loops`.
        label: a name for the axis, by which errors tell a row.
        part: for some of the rows of a loop that goes back, their places there, and the axis of all rows.
        body: the body being lifted over the axis.
        owns_stores: each row has TensorArrays and row stores of its own, as values of dtype VARIANT; else one store
            has elements with a row axis.
    """

    count: Tensor
    extent: int | None
    numbers: Callable[[], Tensor]
    _: KW_ONLY
    loops: int = 0
    own_loops: int = 0
    outer: tuple[tuple[int, int, int], ...] = ()
    label: str = "row"
    part: tuple[Tensor, RowAxis] | None = None
    body: LiftedBody = field(init=False)
    owns_stores: bool = field(default=False, init=False)

    def places(self) -> tuple[tuple[int, int, int], ...]:
        """Return the places of a row's numbers in a tag, for each axis: their count, `loops` and `own_loops`."""
        shape = self.numbers().shape
        assert shape is not None
        assert shape[1] is not None
        return (*self.outer, (shape[1] - sum(width for width, *_ in self.outer), self.loops, self.own_loops))

    def among(self, count: Tensor, numbers: Callable[[], Tensor], extent: int | None = None) -> RowAxis:
        """The axis of some of the rows."""
        # Without `part`, whose places belong to the former rows: `part_of` sets it again.
        return self._like(count=count, extent=extent, numbers=numbers, part=None)

    def part_of(self, whole: RowAxis, places: Tensor) -> RowAxis:
        """Return the same rows, as the rows of `whole` at these places; see `part`."""
        return self._like(part=(places, whole))

    def inside(self) -> RowAxis:
        """The same rows, inside of a loop."""
        # One more loop stands between the firing's tag and every axis: row numbers go in front of it.
        outer = tuple((width, inside + 1, around) for width, inside, around in self.outer)
        return self._like(loops=self.loops + 1, outer=outer)

    def _like(self, **changed: object) -> RowAxis:
        own: Attrs = {each.name: getattr(self, each.name) for each in fields(RowAxis) if each.init}
        return RowAxis(**{**own, **changed})

    def shape(self, row: Shape) -> Shape:
        """Return the shape of rows of this shape."""
        return None if row is None else (self.extent, *row)

    def spread(self, value: LiftedValue) -> Tensor:
        """Return the value with a row axis; a value common to all rows is repeated, without a copy.

        Raises:
            CannotLift: a TensorArray that is the same for every row.
        """
        if value.has_rows:
            return value.tensor
        if value.tensor.dtype == VARIANT:
            maker = value.tensor.node
            if maker.inputs or not maker.op.conduct.is_random:
                raise CannotLift(f"{value.tensor.name}, which is the same for all rows, takes values of each")
            return value.tensor  # a store that is new, with nothing in it
        return apply(SPREAD_ROWS, value.tensor, self.count, extent=self.extent)[0]

    def aligned(self, values: Sequence[LiftedValue]) -> list[Tensor]:
        """Values of known rank to broadcast: row axes meet, and axes behind align from the right, as in single rows."""
        # A value without rows needs no axis: it is at most of this rank, so it never meets the row axis.
        rank = max(value.rank for value in values)
        return [self.raised(value, rank) if value.has_rows else value.tensor for value in values]

    def raised(self, value: LiftedValue, rank: int) -> Tensor:
        """Rows of a value that has them, with axes of extent 1 in front that bring each to `rank`."""
        missing = rank - value.rank
        return expand_dims(value.tensor, axis=tuple(range(1, 1 + missing))) if missing > 0 else value.tensor


RowRule: TypeAlias = "Callable[[Node, RowAxis, Sequence[LiftedValue]], Sequence[Tensor]]"
"""``rule(node, rows, inputs)``: the outputs of `node` for all rows, as new nodes of the current graph.

At least one input has rows, unless the op draws random numbers or makes something anew. A rule raises `CannotLift`
where it has no answer.
"""

# By op, or by the name that several ops pass as `rows=`; a rule for the op itself wins.
_rules: dict[Op | Rows | None, RowRule] = {}
_reasons: dict[Op | Rows | None, str] = {}
_alike: set[Op | Rows] = set()
_always: dict[Op | Rows, Callable[[Node], bool]] = {}
_each: set[Op | Rows] = set()
_on_demand: set[Op | Rows] = set()
_prepare: dict[Op | Rows, Callable[[Node], object]] = {}


def row_rule(
    *ops: Op | Rows,
    alike: bool = False,
    always: Callable[[Node], bool] | None = None,
    each: bool = False,
    on_demand: bool = False,
    prepare: Callable[[Node], object] | None = None,
) -> Callable[[RowRule], RowRule]:
    """Make the decorated function the row rule of `ops`, or of ops that name it with `rows=`.

    Args:
        ops: operations, or names for `rows=`.
        alike: True if the rule's results are the same for every row.
        always: holds for nodes whose outputs have rows also where no input has, as each row has the op for itself.
        each: True if an output has rows exactly when the input at its place has.
        on_demand: the op makes something anew, which has rows if values with rows go into it later.
        prepare: called with each such node before any node of its body is lifted, as it may add results to loops there.
    """

    def install(rule: RowRule) -> RowRule:
        _rules.update(dict.fromkeys(ops, rule))
        if alike:
            _alike.update(ops)
        if always is not None:
            _always.update(dict.fromkeys(ops, always))
        if each:
            _each.update(ops)
        if on_demand:
            _on_demand.update(ops)
        if prepare is not None:
            _prepare.update(dict.fromkeys(ops, prepare))
        return rule

    return install


def is_saved(x: Tensor) -> bool:
    """Return True if a value of a body is a store, or has come from one, in which loops save their iterations'
    values.
    """
    # A loop returns the store that it was given, with elements; a branch, the store of its first body.
    while isinstance(x.node, StructuredNode):
        node = x.node
        x = (node.inputs if isinstance(node, WhileNode) else node.subgraphs[0].results)[x.index]
    return is_new(x)


def is_new(x: Tensor) -> bool:
    """Return True if a value of a body is such a store, still empty."""
    return x.dtype == VARIANT and not x.node.inputs and x.node.op in _alike


def outputs_with_rows(node: Node, inputs: Sequence[bool]) -> list[bool]:
    """Return which outputs of a lifted node, without bodies, have rows, given which of its inputs have."""
    op = node.op
    if op in _each:
        return list(inputs[: len(node.outputs)])
    # Rows draw separate numbers even if all inputs of the draw are common to them.
    own = op.conduct.is_random or (op in _always and _always[op](node))
    has_rows = (any(inputs) or own) and op not in _alike
    return [has_rows] * len(node.outputs)


def has_rows_on_demand(op: Op) -> bool:
    """Return True if a value made by `op` has rows only where values with rows go into it."""
    return op in _on_demand


def preparation_of(op: Op) -> Callable[[Node], object] | None:
    """Return the function `prepare` of the row rule of `op`, or None."""
    return _prepare.get(op)


def no_row_rule(*ops: Op | Rows, because: str) -> None:
    """Note that `ops` are not computed for many rows at once, and why."""
    _reasons.update(dict.fromkeys(ops, because))


def row_rule_of(op: Op) -> RowRule | None:
    """The row rule of `op`; None if it has none."""
    return _rules.get(op) or _rules.get(op.rows)


def why_no_row_rule(op: Op) -> str | None:
    """The reason given with `no_row_rule`; None if the op was not named there."""
    return _reasons.get(op) or _reasons.get(op.rows)


def fixed(node: Node, values: Sequence[LiftedValue], what: str) -> list[Tensor]:
    """Values that have to be the same for all rows.

    Raises:
        CannotLift: some have rows.
    """
    if any(value.has_rows for value in values):
        raise CannotLift(f"{node.name} has {what} of its own for each row")
    return [value.tensor for value in values]


def refuse_part(node: Node, rows: RowAxis) -> None:
    """Raise CannotLift in a loop that goes back, whose iterations have rows of their own: elements have all rows."""
    if rows.part is not None:
        raise CannotLift(f"{node.name} is an element of a TensorArray, in a loop that each row leaves for itself")


# -- values that are the same for every row --------------------------------------------------------------------------


def _spread_spec(x: Spec, count: Spec, *, extent: int | None) -> Spec:
    rows = known_int(count) if extent is None else extent
    return Spec(x.dtype, None if x.shape is None else (rows, *x.shape))


def _spread_kernel(xp: Namespace, *, extent: int | None) -> Kernel:
    def spread(x: Array, count: Array) -> Array:
        return xp.broadcast_to(x, (int(count), *x.shape))  # a view with stride 0: no row is copied

    return spread


SPREAD_ROWS = define(
    "spread_rows", _spread_spec, _spread_kernel, flops=free, host_inputs=(1,), is_total=True, traits=VIEW
)
"""The same value for each of several rows."""


@derivative(SPREAD_ROWS)
def _spread(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    return [sum_of(grad, axis=0, dtype=grad.dtype), None]


@row_rule(SPREAD_ROWS)
def _spread_rows(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    x, count = inputs
    if count.has_rows:
        raise CannotLift(f"{node.name} makes another number of rows for each row")
    # Spread in front of the lifted rows, as the kernel does, then transpose: a view, where a copy would be large.
    (whole,) = apply(SPREAD_ROWS, x.tensor, count.tensor, **node.attrs)
    return [permute_dims(whole, (1, 0, *range(2, x.rank + 2)))]
