"""Warnings about functions called once for each row although all rows were asked for at once."""

from __future__ import annotations

from collections.abc import Iterable

from asyncflow.errors import warn_user
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node

_warned: dict[str | tuple[str, type[Warning], int], int] = {}
"""The warnings shown: a function that is traced often builds its bodies as often."""


def warn_of_single_rows(graph: Graph, label: str, asked: str, each: str, nodes: Iterable[Node]) -> None:
    """Warn, and leave a remark, if nodes call a user's function that takes one row.

    Args:
        graph: gets the remark.
        label: of the lifted code.
        asked: the argument by which it was asked for.
        each: what a row stands for.
        nodes: of the body over one row.
    """
    found = next((node for node in nodes if node.op.conduct.is_user and node.op.rows_kernel is None), None)
    if found is None:
        return
    why = (
        f"{found.op.name} takes one row, so {asked} calls it once for each {each}, one after the other; declare it "
        f"with rows=True if it takes rows\n  built at {found.location}"
    )
    graph.root.remarks[f"{label}/{found.name.rpartition('/')[2]}"] = why
    warn_user(f"{label}: {why}", registry=_warned)
