"""Figures that follow from other figures, and curves of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.harness import Figure, Result
    from benchmarks.simulation import Curve


def quotient(figure: Figure, result: Result, over: Result) -> Result:
    """Divide `result`'s values by another's, repeat by repeat: trials of one repeat ran next to each other."""
    values = tuple(a / b for a, b in zip(result.values, over.values, strict=True))
    return replace(result, figure=figure, ratio=None, values=values)


def curves_of(results: Sequence[Result], figure: Figure, cases: Mapping[int, str]) -> dict[str, Curve]:
    """The medians of a figure by system: at each x, that of the case given for it, where there is one."""
    found: dict[str, Curve] = {}
    for x, case in cases.items():
        for result in results:
            if result.figure == figure and result.case == case:
                found.setdefault(result.system, {})[x] = result.median
    return found
