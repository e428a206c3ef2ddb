"""Enter: brings a value into a loop's frame (EuroSys '18 §4.1).

The first Enter to arrive creates the frame. A constant Enter's value reaches every iteration, started or not; any
other Enter's value goes to iteration 0. Deadness: a dead Enter delivers a dead value, which kills the loop's Merge.
"""

from __future__ import annotations

from types import EllipsisType

from asyncflow.errors import GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for
from asyncflow.graph.frames import FramePath, format_frame, output_frame
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor, is_name
from asyncflow.graph.op import define
from asyncflow.graph.values.shapes import Shape, ShapeLike, as_shape, format_shape, is_subshape
from asyncflow.graph.values.spec import Spec


def _infer(
    data: Spec,
    *,
    frame: str,
    constant: bool,
    parallel_iterations: int,
    shape: Shape | EllipsisType = ...,
    loop: str = "",
) -> Spec:
    """`loop`: the name of the `while` node that was lowered to it; empty where a user has written it."""
    check_parallel_iterations(parallel_iterations)
    if shape is ...:
        return data
    if not is_subshape(data.shape, shape):
        raise ShapeError(
            f"a value of shape {format_shape(data.shape)} cannot enter as one of shape {format_shape(shape)}, which "
            f"has to allow it"
        )
    return Spec(data.dtype, shape)


def check_parallel_iterations(value: object) -> None:
    """Raises GraphError unless `value` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise GraphError(f"parallel_iterations is an int of at least 1; got {value!r}")


ENTER = define("enter", _infer)


def enter(
    data: TensorLike,
    frame: str,
    *,
    constant: bool = False,
    parallel_iterations: int | None = None,
    shape: ShapeLike | EllipsisType = ...,
    name: str | None = None,
) -> Tensor:
    """`data` inside the loop frame named `frame`.

    Args:
        data: any value.
        frame: name of the frame; all Enters of one loop share it.
        constant: whether every iteration sees the value.
        parallel_iterations: how many iterations of the frame may be live at once, one number for all its Enters. None:
            what an earlier one says, or 32.
        shape: what holds of the value in every iteration, if the back edge brings other shapes; ``...`` for that of
            `data`.
        name: of the node.

    Raises:
        GraphError: `frame` is no name, or another Enter of the frame has other `parallel_iterations`.
        ShapeError: `shape` does not allow `data`.
    """
    if not is_name(frame):
        raise GraphError(
            f"enter(data, frame): a frame's name is a string that is not empty and has no ':' in it; got {frame!r}"
        )
    attrs: dict[str, object] = {} if isinstance(shape, EllipsisType) else {"shape": as_shape(shape)}
    with graph_for(data) as graph:
        tensor = as_tensor(data)
        path = (*output_frame(tensor.node, graph.frames.get(tensor.node, ())), frame)
        first = _first_enter(graph, path)
        if parallel_iterations is None:
            parallel_iterations = 32 if first is None else first.attrs["parallel_iterations"]
        elif first is not None:
            require_one_window(first, path, parallel_iterations)
        attrs |= {"frame": frame, "constant": constant, "parallel_iterations": parallel_iterations}
        return apply(ENTER, tensor, name=name, **attrs)[0]


def _first_enter(graph: Graph, frame: FramePath) -> Node | None:
    """The first Enter of a frame, if there is one; each node is looked at once, whoever asks."""
    with graph.root.lock:
        for node in graph.nodes[graph.searched_for_enters :]:
            if node.op is ENTER:
                graph.enters.setdefault(output_frame(node, graph.frames.get(node, ())), node)
        graph.searched_for_enters = len(graph.nodes)
    return graph.enters.get(frame)


def require_one_window(enter: Node, frame: FramePath, parallel_iterations: int) -> None:
    """Raises GraphError unless `enter`, of `frame`, lets as many iterations live at once as another Enter of it."""
    found = enter.attrs["parallel_iterations"]
    if found != parallel_iterations:
        raise GraphError(
            f"{format_frame(frame)} is entered with parallel_iterations={found} by {enter.name} and with "
            f"{parallel_iterations} elsewhere; all Enters of a frame have one number\n  {enter.name} built at "
            f"{enter.location}"
        )
