"""Row rules of searches."""

from __future__ import annotations

from asyncflow.ops import searching, sets
from asyncflow.ops.rows.by_row import row_by_row
from asyncflow.ops.rows.rule import row_rule

row_rule(
    *(searching.NONZERO, searching.SEARCHSORTED, sets.UNIQUE_ALL, sets.UNIQUE_COUNTS, sets.UNIQUE_INVERSE),
    sets.UNIQUE_VALUES,
)(row_by_row)
