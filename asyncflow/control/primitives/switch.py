"""Switch: sends a value to one of two outputs (EuroSys '18 §4.1).

Deadness: the output not chosen is dead; a dead input makes both dead. The scheduler routes the value itself, so any
dtype passes, and no copy is made.
"""

from __future__ import annotations

from asyncflow.errors import DTypeError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import define
from asyncflow.graph.values.dtypes import bool_
from asyncflow.graph.values.shapes import format_shape
from asyncflow.graph.values.spec import Spec

PREDICATE_SHAPE = "a predicate is a boolean scalar; got shape {}; use af.any, af.all or af.reshape"
"""Message for predicates of another shape than that of a scalar."""


def check_predicate(pred: Spec) -> None:
    """Raises DTypeError or ShapeError unless `pred` is a boolean scalar."""
    if pred.dtype != bool_:
        raise DTypeError(f"a predicate is a boolean scalar; got {pred}; compare it with something, or use af.astype")
    if pred.shape != ():
        raise ShapeError(PREDICATE_SHAPE.format(format_shape(pred.shape)))


def _infer(data: Spec, pred: Spec, *, stands_for: str = "") -> tuple[Spec, Spec]:
    """`stands_for`: the name of the Switch that the user wrote, of which this does the same on another device."""
    check_predicate(pred)
    return data, data


SWITCH = define("switch", _infer, host_inputs=(1,))


def switch(data: TensorLike, pred: TensorLike, *, name: str | None = None) -> tuple[Tensor, Tensor]:
    """``(output_false, output_true)``: `data` leaves through the side that `pred` names, the other is dead.

    Args:
        data: any value.
        pred: a boolean scalar.
        name: of the node.
    """
    output_false, output_true = apply(SWITCH, data, pred, name=name)
    return output_false, output_true
