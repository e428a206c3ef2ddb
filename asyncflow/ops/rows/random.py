"""Row rules of random draws: counted by row, so that a row draws the same numbers with or without the others."""

from __future__ import annotations

from asyncflow.ops import random
from asyncflow.ops.rows.by_row import row_by_row
from asyncflow.ops.rows.rule import row_rule

row_rule(
    *(random.NORMAL, random.TRUNCATED_NORMAL, random.UNIFORM, random.GAMMA, random.POISSON, random.INTEGERS),
    *(random.BERNOULLI, random.CATEGORICAL, random.CHOICE, random.PERMUTATION),
)(row_by_row)
