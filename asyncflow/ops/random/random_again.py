"""Random numbers by a key: drawn once more, or for a firing of another run.

What an op draws depends on the session's seed, the run, the iteration and the op's own seed (`random`). The first three
are a value, the *key* of a firing: a few integers ``[seed, run, *tag]`` to keep in place of all that was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import DRAWS, KernelContext, Op, define, find_op
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.cost import free
from asyncflow.ops.draws import DrawsForRows, RowContexts
from asyncflow.ops.rows.by_row import BY_ROW_DRAWN, row_by_row
from asyncflow.ops.rows.rule import row_rule
from asyncflow.values import Array, Conduct, Kernel, Namespace, Value

_WORD = 1 << 64

FIRST = 2
"""Number of a key's integers before the tag's."""

SEGMENTED = 2
"""Number of loops that stand for a loop whose iterations run again: over its segments, and inside of each."""


def _key_kernel(xp: Namespace, *, depth: int | None, counts: bool) -> Kernel:
    more = (0,) * counts

    def key(context: KernelContext) -> Array:
        seed = (context.seed + _WORD // 2) % _WORD - _WORD // 2  # the same bits, as a signed number
        return np.array([seed, context.run, *context.tag, *more], int64)

    return key


class _Again:
    """The kernel of `RANDOM_AGAIN`.

    Args:
        draw: the kernel of the op that draws.
        inside: how many loops are around it since the key was taken.
        is_by_row: rows differ in their keys alone; else a key has row axes, for the op itself.
    """

    __slots__ = ("_draw", "_inside", "_is_by_row")

    def __init__(self, draw: Kernel, inside: int, *, is_by_row: bool) -> None:
        self._draw, self._inside, self._is_by_row = draw, inside, is_by_row

    def __call__(self, context: KernelContext, key: Array, *inputs: Array) -> Value:
        inner = len(context.tag) - self._inside
        loops = context.tag[inner:]
        if not np.ndim(key):
            return self._draw(context._replace(tag=(*context.tag[: inner - SEGMENTED], int(key), *loops)), *inputs)
        keys = key.reshape(-1, key.shape[-1])  # keys of rows, which differ only in row numbers
        seed, number, *tag = keys[0].tolist() if len(keys) else [0] * key.shape[-1]
        return self._draw(context._replace(seed=seed, run=number, tag=(*tag, *loops)), *inputs)

    def of_rows(
        self, contexts: Callable[[], RowContexts], inputs: Sequence[Array], has_rows: Sequence[bool]
    ) -> Array | list[Value] | None:
        """See `DrawsForRows`."""
        keys, *rest = inputs
        if not (self._is_by_row and has_rows[0] and hasattr(self._draw, "of_rows")):
            return None

        def told() -> RowContexts:
            tags = keys[:, FIRST:]
            if self._inside:
                loops = contexts().tags
                tags = np.concatenate([tags, loops[:, loops.shape[1] - self._inside :]], axis=1)
            return RowContexts(keys[:, 0], keys[:, 1], tags)

        return cast("DrawsForRows", self._draw).of_rows(told, rest, has_rows[1:])


def _again_kernel(
    xp: Namespace,
    *,
    draws: str,
    arguments: Attrs,
    axes: int,
    inside: int,
    specs: Spec | tuple[Spec, ...],
    of_rows: bool = False,
) -> Kernel:
    op = find_op(draws)
    assert op.kernel is not None
    return _Again(op.kernel(xp, **_replacing(arguments, axes)), inside, is_by_row=not axes)


RANDOM_KEY = define(
    "random_key",
    lambda *, depth, counts: Spec(int64, (None if depth is None else FIRST + depth + counts,)),
    _key_kernel,
    conduct=DRAWS,
    rows="row by row",
    flops=free,
    runs_on_host=True,
)
RANDOM_AGAIN = define(
    "random_again",
    lambda key, *inputs, specs, **attrs: specs,
    _again_kernel,
    conduct=Conduct(needs_context=True),
    rows="row by row",
    runs_on_host=True,
)
"""Op that draws another op's numbers by a key; the numbers are the same for all rows if the key is.

The number of an iteration may stand in place of a key. The op then draws what that iteration of this run drew, inside
`SEGMENTED` loops that stand for the original one.
"""


row_rule(RANDOM_AGAIN, always=lambda node: bool(node.attrs.get("of_rows")))(row_by_row)


def random_key(depth: int | None = None, *, counts: bool = False) -> Tensor:
    """Return the key of the iteration that the current graph or body runs.

    Args:
        depth: how many loops are around, if that is known.
        counts: give that of the first iteration of one more loop.
    """
    return apply(RANDOM_KEY, depth=depth, counts=counts)[0]


def draws_numbers(op: Op) -> bool:
    """Return True if an op's results depend on the seed, the run and the iteration alone, beside its inputs."""
    draws = op.conduct.needs_context and op.conduct.is_random and op.effects is None
    return (draws and op.rows == "row by row") or op is BY_ROW_DRAWN


def draw_by_key(node: Node, key: Tensor, inside: int, axes: int = 0, *, of_rows: bool = False) -> None:
    """Change a node that draws random numbers into a node that draws them by a key.

    Args:
        node: the node.
        key: of the firing in which, or around which, it draws; with rows, the keys of their firings. The number of an
            iteration may take its place (`RANDOM_AGAIN`).
        inside: number of loops around it since the key was taken.
        axes: number of row axes of the key: the outer axes of the node's rows.
        of_rows: rows that the node is lifted over draw numbers of their own, although the key is the same for them.
    """
    arguments, specs = node.attrs, node.specs
    node.attrs = {"draws": node.op.name, "arguments": arguments, "axes": axes, "inside": inside, "specs": specs}
    if of_rows:
        node.attrs["of_rows"] = True
    node.op, node.inputs = RANDOM_AGAIN, [key, *node.inputs]


def _replacing(arguments: Attrs, axes: int) -> Attrs:
    """Return arguments of an op that draws row by row, by a key with row axes: row numbers replace the numbers in
    its tags.
    """
    if not axes:
        return arguments
    loops = list(arguments["loops"])
    for place, (width, after, _) in enumerate(loops[:axes]):
        deeper = sum(each for each, *_ in loops[place + 1 : axes])
        loops[place] = (width, after + deeper, width)
    return {**arguments, "loops": tuple(loops)}
