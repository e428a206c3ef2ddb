"""Ops that are not computed for many rows at once, and why."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.control.case import CASE_INDEX
from asyncflow.control.cond import COND
from asyncflow.control.primitives.control_trigger import CONTROL_TRIGGER
from asyncflow.control.primitives.enter import ENTER
from asyncflow.control.primitives.exit import EXIT
from asyncflow.control.primitives.loop_cond import LOOP_COND
from asyncflow.control.primitives.merge import MERGE
from asyncflow.control.primitives.next_iteration import NEXT_ITERATION
from asyncflow.control.primitives.switch import SWITCH
from asyncflow.control.stores import row_store
from asyncflow.control.while_loop import WHILE
from asyncflow.graph.building.build import apply
from asyncflow.graph.builtin import CONSTANT, NO_OP, PARAMETER, PLACEHOLDER
from asyncflow.graph.ir import Node, Tensor
from asyncflow.lift.control.branches import JOIN_ROWS, SPLIT_ROWS
from asyncflow.ops.checks.checks import PRINT
from asyncflow.ops.rows.by_row import row_by_row
from asyncflow.ops.rows.rule import LiftedValue, RowAxis, no_row_rule, row_rule
from asyncflow.state import mutex, table
from asyncflow.state.elements import queue_ops
from asyncflow.state.variables import variable

row_rule(CASE_INDEX)(row_by_row)


@row_rule(table.TABLE_GATHER)
def _gather_rows(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    return apply(table.TABLE_GATHER, inputs[0].tensor, **node.attrs)


no_row_rule(COND, WHILE, because="its bodies are lifted, by `lift/control/branches.py` and `lift/control/loops.py`")
no_row_rule(CONSTANT, PARAMETER, PLACEHOLDER, CONTROL_TRIGGER, because="it has no inputs that could have rows")
no_row_rule(NO_OP, because="it has no outputs")
no_row_rule(
    *(ENTER, EXIT, LOOP_COND, MERGE, NEXT_ITERATION, SWITCH),
    because="primitives placed by hand have firings of their own; `af.cond` and `af.while_loop` are lifted",
)
no_row_rule(variable.VARIABLE_READ, because="it has no inputs that could have rows")
no_row_rule(
    *(variable.ASSIGN, variable.ASSIGN_ADD, variable.ASSIGN_SUB, variable.UPDATE, variable.USER_UPDATE),
    because="rows would change one variable, in an order of theirs",
)
no_row_rule(table.TABLE_SIZE, because="it has no inputs that could have rows")
no_row_rule(
    *(table.TABLE_WRITE, table.TABLE_APPEND),
    because="rows would change one table, in an order of theirs",
)
no_row_rule(table.TABLE_SAMPLE, because="rows would draw from one table; sample before, one for each of them")
no_row_rule(*mutex.MEETING_OPS, because="it is no row that waits, but a run")
no_row_rule(
    *queue_ops.QUEUE_OPS,
    because="rows would share one queue, and wait for one another; put the rows in with enqueue_many",
)
no_row_rule(PRINT, because="each row prints a line, in their order")
no_row_rule(
    *(row_store.APPEND, row_store.TAKE, row_store.SLICE, row_store.SIZE),
    because="a store of rows is filled in the order of one program",
)
no_row_rule(SPLIT_ROWS, JOIN_ROWS, because="rows of each row are parted, as many as the run says")
