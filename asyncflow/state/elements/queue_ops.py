"""The ops that put elements in queues and take them out, and the copying of elements by their kernels.

Elements are never written to. An array made by the graph and referenced from nowhere else is kept as it is; otherwise a
copy is. Rows of a batch are copied too, as a view would keep the whole batch in memory. Large copies are made on a
thread (`queue_places`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.errors import ShapeError
from asyncflow.graph.op import GIVES_BACK, WAITS, Access, Effects, define, inputs_from, not_differentiable
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.shapes import format_shape, is_subshape
from asyncflow.graph.values.spec import Spec
from asyncflow.state.elements.queue_arrays import Pads, open_axes, stacked
from asyncflow.state.elements.taken import current_taken
from asyncflow.state.variables.immutable import LARGE_BYTES, immutable, is_immutable, lock

if TYPE_CHECKING:
    from asyncflow.graph.ir import Node
    from asyncflow.state.elements.element_orders import Element
    from asyncflow.state.elements.queue import QueueState
    from asyncflow.state.elements.taken import Taken
    from asyncflow.state.queues import Queue
    from asyncflow.state.waiting.lines import PlaceInLine
    from asyncflow.values import Array, Kernel, Namespace, Value


def _nothing(_: object) -> tuple[()]:
    return ()


def put(
    queue: QueueState, elements: Sequence[tuple[Value, ...]], what: str, taken: Taken | None = None
) -> Value | PlaceInLine:
    """Put elements in, with copies of writable arrays: made on a thread, if that takes long.

    Raises:
        QueueClosedError: the queue is closed.
    """
    nbytes = 0
    for element in elements:
        for value in element:
            if isinstance(value, np.ndarray):
                nbytes += value.nbytes
    if nbytes > LARGE_BYTES and not all(map(_is_kept, chain.from_iterable(elements))):
        return queue.put_copies(partial(_copies, elements), len(elements), what, _nothing, taken)
    return queue.put(_copies(elements), what, _nothing, taken)


def _is_kept(value: Value) -> bool:
    return not isinstance(value, np.ndarray) or is_immutable(value)


def _copies(elements: Sequence[tuple[Value, ...]]) -> list[Element]:
    return [tuple(map(immutable, element)) for element in elements]


def _effects(*touched: tuple[str, Access]) -> Callable[[Node], Effects]:
    # Puts and takes are effects on two resources, each with its own order.
    return lambda node: tuple(((node.attrs["queue"].effect_key, side), access) for side, access in touched)


def _put_specs(*inputs: Spec, queue: Queue) -> tuple[Spec, ...]:
    return ()


def _outputs(specs: Sequence[Spec]) -> Spec | tuple[Spec, ...]:
    return specs[0] if len(specs) == 1 else tuple(specs)


def _dequeue_specs(*, queue: Queue) -> Spec | tuple[Spec, ...]:
    return _outputs(queue._specs)


def _batch_specs(
    *n: Spec, queue: Queue, count: int | None, or_fewer: bool, pads: Pads | None
) -> Spec | tuple[Spec, ...]:
    first = None if or_fewer else count
    found = [Spec(spec.dtype, (first, *(spec.shape or ()))) for spec in queue._specs]
    for spec in queue._specs if pads is not None else ():
        k = len(open_axes(spec))
        if k:
            found.append(Spec(int64, (first,) if k == 1 else (first, k)))
    return _outputs(found)


def _enqueue_kernel(xp: Namespace, *, queue: QueueState) -> Kernel:
    what, specs = f"enqueue of queue {queue.name!r}", queue.specs

    def run(*values: Array) -> Value | PlaceInLine:
        has_arrays = False
        for value, spec in zip(values, specs, strict=True):
            if getattr(value, "shape", ()) != spec.shape:  # a string has no shape
                _check_shape(np.shape(value), spec, queue)
            if isinstance(value, np.ndarray):
                lock(value)
                has_arrays = True
        taken = current_taken()
        return put(queue, (values,), what, taken) if has_arrays else queue.put((values,), what, _nothing, taken)

    def run_on_one(value: Array) -> Value | PlaceInLine:
        # Without a loop over values, the kernel for a scalar takes 0.6 of the time.
        if getattr(value, "shape", ()) != shape:
            _check_shape(np.shape(value), specs[0], queue)
        is_array = isinstance(value, np.ndarray)
        if is_array:
            lock(value)
        taken = current_taken()
        return put(queue, ((value,),), what, taken) if is_array else queue.put(((value,),), what, _nothing, taken)

    if len(specs) > 1:
        return run
    shape = specs[0].shape
    return run_on_one


def _enqueue_many_kernel(xp: Namespace, *, queue: QueueState) -> Kernel:
    def run(*values: Array) -> Value | PlaceInLine:
        count = len(values[0])
        for value, spec in zip(values, queue.specs, strict=True):
            _check_shape(value.shape[1:], spec, queue)
            if len(value) != count:
                raise ValueError(f"enqueue_many of queue {queue.name!r} is given {count} and {len(value)} rows")
        if not count:
            return ()
        what = f"enqueue_many of {count} elements, queue {queue.name!r}"
        copies = partial(_rows, values)
        if sum([value.nbytes for value in values]) > LARGE_BYTES:
            return queue.put_copies(copies, count, what, _nothing, current_taken())
        return queue.put(copies(), what, _nothing, current_taken())

    return run


def _rows(values: Sequence[Array]) -> list[Element]:
    return [tuple([_row(value, row) for value in values]) for row in range(len(values[0]))]


def _row(values: Array, row: int) -> Array:
    value: Array = values[row]
    if isinstance(value, np.ndarray):
        # A view would keep all rows in memory for as long as any of them is in the queue.
        value = value.copy()
        value.flags.writeable = False
    return value


def _check_shape(shape: tuple[int, ...], spec: Spec, queue: QueueState) -> None:
    if shape != spec.shape and not is_subshape(shape, spec.shape):
        raise ShapeError(f"queue {queue.name!r} holds {spec}; a value of shape {format_shape(shape)} does not fit")


def _dequeue_kernel(xp: Namespace, *, queue: QueueState) -> Kernel:
    finish = _only_value if len(queue.specs) == 1 else _only_element
    take = partial(queue.take, 1, False, f"dequeue of queue {queue.name!r}", finish)
    return lambda: take(taken=current_taken())


def _only_value(elements: Sequence[Element]) -> Array:
    return elements[0][0]


def _only_element(elements: Sequence[Element]) -> Element:
    return elements[0]


def _dequeue_many_kernel(
    xp: Namespace, *, queue: QueueState, count: int | None, or_fewer: bool, pads: Pads | None
) -> Kernel:
    verb = f"dequeue_{'up_to' if or_fewer else 'many'}"
    specs = queue.specs
    n_outputs = len(specs) + (0 if pads is None else sum(bool(open_axes(spec)) for spec in specs))
    stack = partial(stacked, specs, pads)
    finish = stack if n_outputs > 1 else lambda found: stack(found)[0]

    def take(count: int) -> Value | PlaceInLine:
        what = f"{verb}({count}) of queue {queue.name!r}"
        if count < 0:
            raise ValueError(f"{what}: n is at least 0")
        return queue.take(count, or_fewer, what, finish, copies=True, taken=current_taken()) if count else finish(())

    return (lambda n: take(int(n))) if count is None else partial(take, count)


_PUT, _TAKE = ("put", Access.WRITE), ("take", Access.WRITE)
_LOOK = (("put", Access.READ), ("take", Access.READ))

ENQUEUE = define("enqueue", _put_specs, _enqueue_kernel, effects=_effects(_PUT), conduct=WAITS)
ENQUEUE_MANY = define("enqueue_many", _put_specs, _enqueue_many_kernel, effects=_effects(_PUT), conduct=WAITS)
DEQUEUE = define("dequeue", _dequeue_specs, _dequeue_kernel, effects=_effects(_TAKE), conduct=GIVES_BACK)
DEQUEUE_MANY = define(
    "dequeue_many",
    _batch_specs,
    _dequeue_many_kernel,
    effects=_effects(_TAKE),
    conduct=GIVES_BACK,
    host_inputs=inputs_from(0),
)
QUEUE_SIZE = define(
    "queue_size",
    lambda *, queue: Spec(int64, ()),
    lambda xp, *, queue: lambda: np.int64(queue.size()),
    effects=_effects(*_LOOK),
    conduct=WAITS,
)


def _close_kernel(xp: Namespace, *, queue: QueueState, cancel_pending: bool) -> Kernel:
    def run() -> Value:
        queue.close(cancel_pending)
        if (taken := current_taken()) is not None:
            taken.keep()
        return ()

    return run


QUEUE_CLOSE = define(
    "queue_close", lambda *, queue, cancel_pending: (), _close_kernel, effects=_effects(_PUT), conduct=WAITS
)
PUTS, TAKES = (ENQUEUE, ENQUEUE_MANY), (DEQUEUE, DEQUEUE_MANY)
QUEUE_OPS = (ENQUEUE, ENQUEUE_MANY, DEQUEUE, DEQUEUE_MANY, QUEUE_SIZE, QUEUE_CLOSE)
not_differentiable(*QUEUE_OPS, because="elements of a queue may come from another run, whose values are gone")
