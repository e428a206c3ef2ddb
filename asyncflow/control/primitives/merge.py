"""Merge: passes on the first live input (EuroSys '18 §4.1).

Deadness: fires once per tag, with the first live input, or dead when all inputs are dead. It waits for all its control
inputs but ignores their deadness. Two live inputs under one tag are an error, where TensorFlow races.
"""

from __future__ import annotations

from functools import reduce

from asyncflow.control.primitives.next_iteration import NEXT_ITERATION
from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply
from asyncflow.graph.frames import format_frame
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import define
from asyncflow.graph.values.dtypes import int32
from asyncflow.graph.values.shapes import format_shape, is_subshape, relax
from asyncflow.graph.values.spec import Spec


def _infer(*inputs: Spec) -> tuple[Spec, Spec]:
    if not inputs:
        raise GraphError("merge needs at least one input")
    if len({spec.dtype for spec in inputs}) > 1:
        raise DTypeError(f"all inputs of a merge have one dtype; got {', '.join(map(str, inputs))}")
    shape = reduce(relax, (spec.shape for spec in inputs))
    return Spec(inputs[0].dtype, shape), Spec(int32, ())


MERGE = define("merge", _infer)


def merge(*inputs: TensorLike, name: str | None = None) -> tuple[Tensor, Tensor]:
    """``(value, index)``: the first live input and its position.

    A loop's Merge starts with its Enter alone; `add_back_edge` adds the NextIteration.
    """
    value, index = apply(MERGE, *inputs, name=name)
    return value, index


def add_back_edge(merged: Tensor, next_iteration: Tensor) -> None:
    """Closes a hand-written loop: makes `next_iteration` an input of the Merge behind `merged`.

    Raises:
        GraphError: `merged` is not a Merge's value, or `next_iteration` not the output of a NextIteration, or they are
            in two frames.
        DTypeError, ShapeError: the next value has another dtype than the Merge's, or a shape that is no case of its.
    """
    if merged.node.op is not MERGE or next_iteration.node.op is not NEXT_ITERATION:
        raise GraphError(f"a back edge runs from a next_iteration to a merge; got {next_iteration!r} to {merged!r}")
    _infer(merged.spec, next_iteration.spec)
    if not is_subshape(next_iteration.shape, merged.shape):
        was, now = format_shape(merged.shape), format_shape(next_iteration.shape)
        raise ShapeError(
            f"{merged.node.name} has shape {was}, as what enters has, which all behind it relies on, but the back edge "
            f"{next_iteration.node.name} brings shape {now}; if the shape changes, say so with enter(..., shape=), "
            f"such as shape=None"
        )
    inner = merged.graph.import_tensor(next_iteration)
    frames = [merged.graph.frames.get(node, ()) for node in (inner.node, merged.node)]
    if frames[0] != frames[1]:
        raise GraphError(
            f"a back edge stays in one frame: {inner.node.name} is in {format_frame(frames[0])}, {merged.node.name} in "
            f"{format_frame(frames[1])}"
        )
    merged.node.inputs.append(inner)
