"""Values that a loop saves for its gradient (EuroSys '18 §5; docs/design/gradients.md).

One ordered store (`stores`) per value and loop: the forward loop saves its value in each iteration, and the gradient
loop reads them from the last to the first. An inner loop has a store of its own in each iteration of the outer one,
which saves that in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.autodiff.stores.store_gradients import gradient_of_read, gradient_of_write
from asyncflow.autodiff.stores.stores import STORE, MovingLog, SavedValues, StoreLog, store_op
from asyncflow.devices.saved.swap import Moves
from asyncflow.devices.swapping import Swapping
from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import (
    DRAWS,
    KERNELS,
    NEW_EACH,
    READS_STORE,
    KernelContext,
    define,
    derivative,
    not_differentiable,
)
from asyncflow.graph.structured import StructuredNode, WhileNode
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.cost import free
from asyncflow.values import Kernel, Namespace

NEW_STORE = define(
    "saved_values",
    lambda **_: STORE,
    lambda xp, **_: lambda: SavedValues(StoreLog(), 0, 0),
    flops=free,
    conduct=NEW_EACH,
    is_total=True,
    traits=KERNELS,
)
"""Op that makes an empty store; its attribute ``moves``, if any, is for `asyncflow.compiler.memory.move_saved`."""


def _moving_store(
    xp: Namespace, *, swapping: Swapping, label: str, moves: Moves, together: float, loops: Sequence[str]
) -> Kernel:
    def new(context: KernelContext) -> SavedValues:
        outer = "".join(f"{name}/{number}/" for name, number in zip(loops, context.tag, strict=False))
        loop = outer + loops[-1]
        log = MovingLog((), swapping, label=label, run=context.run, moves=moves, together=together, loop=loop)
        return SavedValues(log, 0, 0)

    return new


MOVING_STORE = define(
    "moving_saved_values",
    lambda **_: STORE,
    _moving_store,
    flops=free,
    conduct=DRAWS,
    traits=KERNELS,
)
"""`NEW_STORE` on a device that can move values away, for a plan alone: its attributes hold the device's `Swapping`."""


def inputs_of_save(node: Node) -> tuple[int, ...]:
    """Positions of the inputs that a node which saves its third input reads on the host; see `SAVE`."""
    return (1, 2) if node.attrs.get("stays") else (1,)


SAVE = store_op(
    "save_value",
    lambda store, index, value, *, stays=False: STORE,
    SavedValues.saved,
    host_inputs=inputs_of_save,
    is_total=True,
)
"""Op that saves a value. The compiler says which values are on the host, and stay there."""
READ_SAVED = define(
    "saved_value",
    lambda store, index, *, value, is_last=False: value,
    lambda xp, *, value, is_last=False: SavedValues.read_last if is_last else SavedValues.read,
    flops=free,
    host_inputs=(1,),
    is_total=True,
    traits=READS_STORE,
)
"""Op that reads a saved value: the innermost loop around it reads each number once. The compiler says which read is
the last.
"""


def new_store() -> Tensor:
    """Make an empty store."""
    return apply(NEW_STORE)[0]


def store_node(tensor: Tensor) -> Node | None:
    """The node that makes the store from which `tensor`, a store that branches and loops give, has come; None if none.

    All that touches a store is placed with it.
    """
    while isinstance(tensor.node, StructuredNode):
        node = tensor.node
        sources = node.inputs if isinstance(node, WhileNode) else node.subgraphs[0].results
        tensor = sources[tensor.index]
    return tensor.node if tensor.node.op is NEW_STORE else None


def save(store: Tensor, index: Tensor, value: Tensor) -> Tensor:
    """The store with `value` behind the others, as number `index`."""
    return apply(SAVE, store, index, value)[0]


def saved_value(store: Tensor, index: Tensor, value: Spec) -> Tensor:
    """The value saved as number `index`."""
    return apply(READ_SAVED, store, index, value=value)[0]


derivative(SAVE)(gradient_of_write)
derivative(READ_SAVED)(gradient_of_read)
not_differentiable(NEW_STORE, MOVING_STORE, because="it has no inputs")
