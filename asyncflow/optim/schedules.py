"""Learning rates that depend on the number of the step."""

from __future__ import annotations

import math

from asyncflow.errors import GraphError, brief
from asyncflow.graph.building.build import TensorLike, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import float64
from asyncflow.ops.arithmetic.elementwise import clip, cos
from asyncflow.ops.axes import static_int
from asyncflow.ops.searching.searching import where
from asyncflow.optim.scalars import as_scalar, is_number


def cosine_schedule(step: TensorLike, steps: int, peak: float, *, warmup: int = 0, least: float = 0.0) -> Tensor:
    """Return a learning rate that rises to `peak` in a line, and then falls to `least` along a cosine.

    Args:
        step: the number of the step, from 0: a scalar tensor, such as ``count.assign_add(1) - 1`` of a variable.
        steps: number of steps after which the rate is `least`.
        peak: the largest rate.
        warmup: number of steps in which the rate rises; step ``warmup - 1`` has the rate `peak`.
        least: the last rate.

    Returns:
        A float64 scalar.

    Raises:
        GraphError: `steps` is not above `warmup`, or a rate is no number.
        DTypeError, ShapeError: `step` is no scalar.
    """
    total, rising = static_int(steps, "steps"), static_int(warmup, "warmup")
    if not 0 <= rising < total:
        raise GraphError(f"cosine_schedule: warmup is at least 0 and below steps; got {warmup} of {steps}")
    for name, rate in (("peak", peak), ("least", least)):
        if not is_number(rate):
            raise GraphError(f"cosine_schedule: {name} is a number; got {brief(rate)}")
    with graph_for(step):
        at = as_scalar("cosine_schedule: step", step, float64)
        share = clip((at - rising) / (total - rising), 0.0, 1.0)
        falling = least + (peak - least) * (1 + cos(share * math.pi)) / 2
        return where(at < rising, peak * (at + 1) / max(1, rising), falling)
