"""LoopCond: marks the predicate that a loop's Switches share, once per iteration (EuroSys '18 §4.1).

It is where partitions that share a loop learn whether the next iteration runs. Deadness: as any node.
"""

from __future__ import annotations

from asyncflow.control.primitives.switch import check_predicate
from asyncflow.graph.building.build import TensorLike, apply
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import define
from asyncflow.graph.values.spec import Spec


def _infer(pred: Spec) -> Spec:
    check_predicate(pred)
    return pred


LOOP_COND = define("loop_cond", _infer, host_inputs=(0,))


def loop_cond(pred: TensorLike, *, name: str | None = None) -> Tensor:
    """Mark `pred` as the predicate of its loop, and return it."""
    return apply(LOOP_COND, pred, name=name)[0]
