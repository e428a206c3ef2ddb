"""Every op answers the questions of passes, and its memory facts are true wherever its kernel runs."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from asyncflow.errors import GraphError
from asyncflow.graph.builtin import IDENTITY
from asyncflow.graph.graph import Graph
from asyncflow.graph.op import NEW, OPAQUE, VIEW, Memory, Op, Traits, registered_ops
from asyncflow.ops.arithmetic.elementwise import add
from tests.ops.test_host_inputs import PROGRAMS, run_here, traced

LOOKING = (Memory.VIEW, Memory.WHOLE_VIEW)


def shared_with() -> dict[Op, set[int]]:
    """The inputs whose memory results of each op were in, in any of the programs that have it."""
    found: dict[Op, set[int]] = defaultdict(set)
    for build, arrays, known in PROGRAMS:
        nodes, fed = traced(build, arrays, known)
        values = run_here(nodes, dict(fed))
        for node in nodes:
            given = [values[tensor] for tensor in node.inputs]
            found[node.op].update(
                place
                for result in (values[tensor] for tensor in node.outputs if tensor in values)
                for place, value in enumerate(given)
                if _overlap(result, value)
            )
    return found


def _overlap(result: Any, value: Any) -> bool:
    arrays = isinstance(result, np.ndarray) and isinstance(value, np.ndarray)
    return arrays and np.shares_memory(result, value)


def test_what_ops_say_of_memory_is_true() -> None:
    for op, places in shared_with().items():
        if op.traits.memory is Memory.NEW:
            assert not places, f"{op.name} gives memory of its inputs back"
        elif op.traits.memory in LOOKING:
            assert places == {0} or op is IDENTITY, f"{op.name} is said to look into its first input"
        elif op.traits.memory in (Memory.METADATA, Memory.STORE):
            assert not places, op.name


def test_an_op_that_does_not_say_is_refused() -> None:
    with pytest.raises(GraphError, match=r"op 'silent' does not say traits=, such as NEW or OPAQUE"):
        Op("silent", lambda x: x, lambda xp: xp.exp)
    assert Op("outside", lambda x: x, lambda xp: np.exp, runs_on_host=True).traits == OPAQUE
    assert Op("lowered", lambda x: x).traits == OPAQUE


def test_only_what_computes_on_a_device_alone_can_be_captured_or_computed_again() -> None:
    for op in registered_ops():
        if op.traits.is_capturable or op.traits.is_cheap:
            is_of_state = op.name.startswith(("variable_", "tensor_array", "row_store", "saved_", "moving_saved_"))
            assert op.is_pure or is_of_state or op.name in ("store_gradient", "barrier"), op.name
            assert not op.runs_on_host, op.name
        assert op.traits.is_capturable or not callable(op.cuda), op.name


def test_families_answer_everything() -> None:
    assert Traits(Memory.NEW, is_capturable=True, is_cheap=False) == NEW
    assert VIEW.is_cheap
    with pytest.raises(TypeError, match="is_cheap"):
        Traits(Memory.NEW, is_capturable=True)  # type: ignore[call-arg]


def test_a_copied_graph_has_the_same_ops() -> None:
    with Graph() as graph:
        add(1.0, 2.0)
    for node, copied in zip(graph.nodes, deepcopy(graph).nodes, strict=True):
        assert copied.op is node.op
