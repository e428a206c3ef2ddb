"""Enter: brings a value into a loop's frame (EuroSys '18 §4.1).

The first Enter to arrive creates the frame. A constant Enter's value reaches every iteration, started or not; any
other Enter's value goes to iteration 0. Deadness: a dead Enter delivers a dead value, which kills the loop's Merge.
"""

from __future__ import annotations

from typing import Any

from asyncflow.errors import GraphError
from asyncflow.graph.build import TensorLike, apply
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import Op, register
from asyncflow.graph.spec import Spec


def _infer(data: Spec, *, frame: str, constant: bool, parallel_iterations: int) -> Spec:
    check_parallel_iterations(parallel_iterations)
    return data


def check_parallel_iterations(value: Any) -> None:
    """Raises GraphError unless `value` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise GraphError(f"parallel_iterations is an int of at least 1; got {value!r}")


ENTER = register(Op(name="enter", infer=_infer))


def enter(
    data: TensorLike,
    frame: str,
    *,
    constant: bool = False,
    parallel_iterations: int = 32,
    name: str | None = None,
) -> Tensor:
    """`data` inside the loop frame named `frame`.

    Args:
        data: any value.
        frame: name of the frame; all Enters of one loop share it.
        constant: whether every iteration sees the value.
        parallel_iterations: how many iterations of the frame may be live at once.
    """
    attrs = {"frame": frame, "constant": constant, "parallel_iterations": parallel_iterations}
    return apply(ENTER, data, name=name, **attrs)[0]
