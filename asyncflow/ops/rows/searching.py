"""Row rules of searches and checks."""

from __future__ import annotations

from asyncflow.ops import checks, searching, segments, sets
from asyncflow.ops.rows.by_row import row_by_row
from asyncflow.ops.rows.rule import no_row_rule, row_rule

row_rule(searching.SEARCHSORTED, segments.SEGMENT_IDS, checks.ASSERT, checks.CHECK_NUMERICS)(row_by_row)

no_row_rule(
    *(searching.NONZERO, sets.UNIQUE_ALL, sets.UNIQUE_COUNTS, sets.UNIQUE_INVERSE, sets.UNIQUE_VALUES),
    segments.BINCOUNT,
    because="what it gives is as long as the run finds it, for each row",
)
