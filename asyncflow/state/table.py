"""`Table`: many rows of one form that survive a run, and the ops that write, gather and sample them.

Every op is atomic against every other on the table, in this run and in all others; how says
`asyncflow.state.table_state`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError, told_at
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for, is_symbolic
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import DRAWS, Access, Effects, define, not_differentiable
from asyncflow.graph.resource import Resource
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import VARIANT, dtype_name, int64, string
from asyncflow.graph.values.shapes import Shape, format_shape, is_compatible, is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.extents import ExtentsLike, shape_reader, split_extents, template_shape
from asyncflow.ops.axes import static_int
from asyncflow.ops.cost import moving, moving_in
from asyncflow.ops.draws import Drawing, seed_of_name
from asyncflow.state.table_state import TableState
from asyncflow.values import Kernel, Namespace, Nest


class Table(Resource):
    """Rows that survive a run and are written in place, such as the experience that an agent learns from.

    Like a variable, it belongs to no graph: its rows live in the session or, with `container`, in the container of that
    name. In a graph with ordered effects its ops happen in the order they were written. A write costs the rows that it
    writes, whatever the table has. Reads copy rows out, so a value never changes under its reader, and see all or
    nothing of a write.

    Rows are in the host's memory, wherever the ops on them are placed; a card gets copies of the rows that it reads.
    They are data, and no gradient flows through them. Over many rows at once (`vmap`), `gather` gathers for all of
    them, and ops that write or sample are refused.

    Args:
        rows: how many there is room for; 1 or more.
        spec: of one row: a `Spec`, or a nest of them, of numbers or booleans with shapes known in full.
        name: for messages, and the key inside a container; None generates one.
        container: a name shared by sessions; None for rows of the session's own.

    Raises:
        GraphError: `rows` is no positive int, `spec` has something that is no `Spec`, or a table in a container has no
            name.
        DTypeError, ShapeError: a row cannot be like that.

    Raises (in the run, as the cause of a KernelError):
        IndexError: there is no such row.

    >>> import asyncflow as af
    >>> seen = Table(100_000, {"state": af.spec("float32", (4,)), "reward": af.spec("float32", ())}, name="seen")
    >>> with af.Graph():
    ...     written = seen.append({"state": [1.0, 2.0, 3.0, 4.0], "reward": 1.0})
    ...     seen.sample(32)
    {'state': <Tensor seen/sample:0 float32[32,4]>, 'reward': <Tensor seen/sample:1 float32[32]>}
    """

    noun = "table"

    def __init__(self, rows: int, spec: Nest, *, name: str | None = None, container: str | None = None) -> None:
        super().__init__(name, container)
        self.rows = static_int(rows, "rows")
        if self.rows < 1:
            raise GraphError(f"a table has room for 1 row or more; got rows={rows}")
        leaves, self.structure = nest.flatten(spec)
        self.row_specs = tuple(map(_row_spec, leaves))
        if not leaves:
            raise GraphError("a row of a table has something in it; got a spec without leaves")

    @property
    def signature(self) -> str:
        """See `Resource.signature`."""
        columns = [f"row{path} {spec}" for path, spec in zip(self.structure.paths(), self.row_specs, strict=True)]
        return f"a table of {self.rows} rows of {', '.join(columns)}"

    def create_state(self) -> TableState:
        """A state with no row written."""
        return TableState(self.name, self.rows, [f"row{path}" for path in self.structure.paths()], self.row_specs)

    def write(self, index: TensorLike, row: Nest, *, name: str | None = None) -> Tensor:
        """Writes `row` at `index`, from 0 to ``rows - 1``; or a row at each of several, the last for equal ones.

        Args:
            index: integers of any shape.
            row: a nest like `spec`; each part has the shape of `index` in front.
            name: of the node.

        Returns:
            `index`, once the rows are written.

        Raises:
            DTypeError, ShapeError, GraphError: `row` is no row of the table.
        """
        leaves = self._leaves(row)
        with graph_for(index, *leaves):
            at = as_tensor(index, int64 if isinstance(index, list) and not index else None)
            return apply(TABLE_WRITE, at, *self._parts(leaves), name=name or f"{self.name}/write", table=self)[0]

    def append(self, row: Nest, *, name: str | None = None) -> Tensor:
        """Write `row` behind the row appended last, and from the front again once the table is full (a ring).

        Args:
            row: a nest like `spec`, or a nest of rows whose parts all have one more axis in front.
            name: of the node.

        Returns:
            Where it was written, an int64; or where each of the rows was.

        Raises:
            DTypeError, ShapeError, GraphError: `row` is no row of the table.
        """
        leaves = self._leaves(row)
        with graph_for(*leaves):
            return apply(TABLE_APPEND, *self._parts(leaves), name=name or f"{self.name}/append", table=self)[0]

    def gather(self, indices: TensorLike, *, name: str | None = None) -> Nest:
        """Copy the rows at `indices`, integers of any shape; rows never written are zeros.

        Returns:
            A nest like `spec`, each part with the shape of `indices` in front.
        """
        with graph_for(indices):
            at = as_tensor(indices, int64 if isinstance(indices, list) and not indices else None)
            found = apply(TABLE_GATHER, at, name=name or f"{self.name}/gather", table=self)
        return self.structure.unflatten(found)

    def sample(self, shape: ExtentsLike, *, seed: int | None = None, name: str | None = None) -> Nest:
        """Copy rows drawn with replacement from the first `size`, all equally likely.

        The draw is a function of the seeds, the run and the iteration, as with `af.random`; sampling a table without
        rows fails.

        Args:
            shape: how many: an int, or extents as in `af.random.normal`.
            seed: of this op; None derives one from its name.
            name: of the node.

        Returns:
            A nest like `spec`, each part with `shape` in front.
        """
        template, sizes = split_extents(shape)
        number = 0 if seed is None else static_int(seed, "seed")
        label = name or f"{self.name}/sample"
        found = apply(TABLE_SAMPLE, *sizes, name=label, table=self, shape=template, seed=number)
        if seed is None:
            found[0].node.attrs["seed"] = seed_of_name(found[0].node.name)
        return self.structure.unflatten(found)

    def size(self, *, name: str | None = None) -> Tensor:
        """One more than the last row that has been written: an int64 scalar, `rows` once the table is full."""
        return apply(TABLE_SIZE, name=name or f"{self.name}/size", table=self)[0]

    def _leaves(self, row: Nest) -> list[TensorLike]:
        return nest.match(self.structure, row, f"not a row of table {self.name!r}", nested_leaves=True)

    def _parts(self, leaves: list[TensorLike]) -> list[Tensor]:
        return [
            self._part(path, x, spec)
            for path, x, spec in zip(self.structure.paths("row"), leaves, self.row_specs, strict=True)
        ]

    def _part(self, path: str, x: TensorLike, spec: Spec) -> Tensor:
        if is_symbolic(x) or isinstance(x, np.ndarray | np.generic):
            return as_tensor(x)
        try:
            return as_tensor(x, spec.dtype)
        except GraphError as error:
            raise told_at(error, f"{path} of table {self.name!r} is {spec}") from None


def _row_spec(leaf: object) -> Spec:
    if not isinstance(leaf, Spec):
        raise GraphError(f"a row of a table is described by af.spec(dtype, shape), or a nest of these; got {leaf!r}")
    if leaf.dtype in (VARIANT, string):
        raise DTypeError(f"rows of a table are numbers or booleans; got {dtype_name(leaf.dtype)}")
    if leaf.shape is None or not is_static(leaf.shape):
        raise ShapeError(f"the shape of a row is known in full; got {format_shape(leaf.shape)}")
    return leaf


# -- ops -------------------------------------------------------------------------------------------------------------


def _effects(access: Access) -> Callable[[Node], Effects]:
    return lambda node: ((node.attrs["table"].effect_key, access),)


def _check_parts(table: Table, leading: Shape, parts: tuple[Spec, ...]) -> None:
    for path, spec, part in zip(table.structure.paths("row"), table.row_specs, parts, strict=True):
        if part.dtype != spec.dtype:
            raise DTypeError(f"{path} of table {table.name!r} is {spec} and cannot hold {part}; convert with af.astype")
        expected = None if leading is None else (*leading, *(spec.shape or ()))
        if not is_compatible(part.shape, expected):
            takes = f"takes {format_shape(expected)} here; got {format_shape(part.shape)}"
            raise ShapeError(f"{path} of table {table.name!r} {takes}")


def _check_index(table: Table, index: Spec) -> None:
    if index.dtype.kind not in "iu":
        raise DTypeError(f"rows of table {table.name!r} are found by integers; got {index}")


def _write_spec(index: Spec, *parts: Spec, table: Table) -> Spec:
    _check_index(table, index)
    _check_parts(table, index.shape, parts)
    return index


def _append_spec(*parts: Spec, table: Table) -> Spec:
    extra = {
        part.rank - len(spec.shape or ())
        for part, spec in zip(parts, table.row_specs, strict=True)
        if part.rank is not None
    }
    if not extra:
        raise ShapeError(f"append to table {table.name!r} takes parts whose rank is known, such as that of af.reshape")
    if extra not in ({0}, {1}):
        paths = table.structure.paths("row")
        row = ", ".join(f"{path} {spec}" for path, spec in zip(paths, table.row_specs, strict=True))
        raise ShapeError(
            f"append to table {table.name!r} takes a row ({row}), or several, with an axis more in front of each part"
        )
    leading: Shape = () if extra == {0} else (None,)
    _check_parts(table, leading, parts)
    return Spec(int64, leading)


def _rows_spec(leading: Shape, table: Table) -> tuple[Spec, ...]:
    return tuple(Spec(s.dtype, None if leading is None else (*leading, *(s.shape or ()))) for s in table.row_specs)


def _gather_spec(indices: Spec, *, table: Table) -> tuple[Spec, ...]:
    _check_index(table, indices)
    return _rows_spec(indices.shape, table)


def _sample_spec(*sizes: Spec, table: Table, shape: Shape, seed: int) -> tuple[Spec, ...]:
    return _rows_spec(template_shape(shape, sizes), table)


def _sample_kernel(xp: Namespace, *, table: TableState, shape: Shape, seed: int) -> Kernel:
    read = shape_reader(shape)
    return Drawing(lambda rng, *sizes: table.sample(rng, read(sizes)), seed)


_table_op = partial(define, runs_on_host=True, flops=moving)
_write_op = partial(define, runs_on_host=True, flops=moving_in)

TABLE_WRITE = _write_op("table_write", _write_spec, lambda xp, *, table: table.write, effects=_effects(Access.WRITE))
TABLE_APPEND = _write_op(
    "table_append", _append_spec, lambda xp, *, table: table.append, effects=_effects(Access.WRITE)
)
TABLE_GATHER = _table_op("table_gather", _gather_spec, lambda xp, *, table: table.gather, effects=_effects(Access.READ))
TABLE_SAMPLE = _table_op("table_sample", _sample_spec, _sample_kernel, effects=_effects(Access.READ), conduct=DRAWS)
TABLE_SIZE = _table_op(
    "table_size",
    lambda *, table: Spec(int64, ()),
    lambda xp, *, table: lambda: np.int64(table.size),
    effects=_effects(Access.READ),
)

not_differentiable(
    *(TABLE_WRITE, TABLE_APPEND, TABLE_GATHER, TABLE_SAMPLE, TABLE_SIZE),
    because="rows of a table are data; keep weights in an af.Variable",
)
