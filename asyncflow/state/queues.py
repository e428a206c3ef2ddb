"""Queues: elements that flow from run to run, and within one; the ops that put them in and take them out.

Every op is atomic: it puts in or takes out all of its elements, at once, or none. A waiting op suspends its own firing,
and neither the event loop nor a thread; `asyncflow.state.elements.queue` gives the order of service. Elements are in
the memory of the host: values from a card are copied there, and back when a card takes them.

In a run, enqueues and `Queue.close` happen in the order in which they were written, and so do dequeues, through
branches and loops. Nothing else orders the two, as an enqueue may have to wait for a dequeue written behind it;
`Queue.size` stands in both orders.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, NoReturn

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError, told_at
from asyncflow.foreign_names import close_names
from asyncflow.graph.building.build import (
    SupportsTensor,
    TensorLike,
    as_array,
    as_tensor,
    constant,
    graph_for,
    is_symbolic,
)
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Op
from asyncflow.graph.resource import Resource
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import VARIANT, int64
from asyncflow.graph.values.shapes import is_compatible, is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.state.containers import HasState, find_state
from asyncflow.state.elements.element_orders import (
    ArrivalOrder,
    BucketOrder,
    Element,
    ElementOrder,
    PriorityOrder,
    RandomOrder,
)
from asyncflow.state.elements.queue import QueueState
from asyncflow.state.elements.queue_arrays import Pads, open_axes, stacked
from asyncflow.state.elements.queue_ops import (
    DEQUEUE,
    DEQUEUE_MANY,
    ENQUEUE,
    ENQUEUE_MANY,
    QUEUE_CLOSE,
    QUEUE_SIZE,
    put,
)
from asyncflow.state.elements.queue_places import granted_beside
from asyncflow.state.mutex import whole_number
from asyncflow.values import Array, Nest

# By the coroutine that does the same outside a graph: an error message of one names the other.
_NODES = {
    "put": "enqueue",
    "put_many": "enqueue_many",
    "get": "dequeue",
    "get_many": "dequeue_many",
    "get_up_to": "dequeue_up_to",
    "size_nowait": "size",
    "close_nowait": "close",
}
_OUTSIDE = {node: name for name, node in _NODES.items()}


_RENAMED: Final = {
    "empty": "size_nowait() == 0",
    "full": "size_nowait() == capacity",
    "get_nowait": "get()",
    "put_nowait": "put()",
    "qsize": "size_nowait(), or size() in a graph",
}
"""Names of `asyncio.Queue`, with their replacements."""


def _hint(name: str, known: Sequence[str]) -> str:
    if name in _RENAMED:
        return f"; use {_RENAMED[name]}"
    close = close_names(name, known)
    return f"; did you mean {' or '.join(close)}?" if close else ""


class Queue(Resource):
    """A queue, the base class of all kinds; make a `FIFOQueue` or another subclass.

    It belongs to no graph. The elements live in the session, or, with `container`, in the container of that name. All
    sessions of the process share the queue there, under its name.

    Attributes:
        element: the spec of an element, a nest.
        capacity: how many elements it holds.
    """

    noun = "queue"
    waits: ClassVar[bool] = True
    nodes: ClassVar[Mapping[str, str]] = _NODES

    @property
    def is_fifo(self) -> bool:
        """True if elements leave in the order they came; otherwise the other elements decide which leaves next."""
        return False

    if not TYPE_CHECKING:  # with `__getattr__`, every misspelt attribute would pass the type checker

        def __getattr__(self, name: str) -> NoReturn:
            hint = "" if name.startswith("_") else _hint(name, dir(self))
            raise AttributeError(f"a queue has no attribute {name!r}{hint}", name=name, obj=self)

    def __init__(self, capacity: int, spec: Nest, *, name: str | None = None, container: str | None = None) -> None:
        kind = type(self).__name__
        if type(self) is Queue:
            raise GraphError("Queue is the base of all queues; make an af.FIFOQueue, or another of its kinds")
        super().__init__(name, container)
        self.capacity = whole_number(capacity, f"{kind}: capacity")
        self.element = spec
        leaves, self._structure = nest.flatten(spec)
        # In the order of the nest, which inputs and outputs of all nodes have, and arrays in an element.
        self._specs = tuple(_leaf(kind, leaf) for leaf in leaves)
        if not leaves:
            raise GraphError(
                f"{kind}: an element has at least one value; give af.spec(dtype, shape), or a nest of them"
            )

    @property
    def signature(self) -> str:
        """See `Resource.signature`."""
        return f"{type(self).__name__}({self.capacity}, {self.element})"

    # -- nodes ---------------------------------------------------------------------------------------------------

    def enqueue(self, element: Nest) -> Node:
        """Put an element in, once there is room.

        Args:
            element: a nest as the spec is, of tensors and of what converts to them: of the same dtypes, and of shapes
                that fit.

        Raises:
            DTypeError, ShapeError, GraphError: it is no element of this queue.
            QueueClosedError: (from the run) the queue is closed.
        """
        return self._putting(ENQUEUE, element, "enqueue", many=False)

    def enqueue_many(self, elements: Nest) -> Node:
        """Put the rows of `elements` in, in order, all at once, once there is room for all; see `enqueue`.

        Args:
            elements: a nest as the spec is, whose values have one more axis in front, all of the same length. More than
                the capacity go in when a dequeue waits for more than there is.
        """
        return self._putting(ENQUEUE_MANY, elements, "enqueue_many", many=True)

    def dequeue(self) -> Nest:
        """Take an element, once there is one: returns a nest of tensors.

        Raises:
            QueueClosedError: (from the run) the queue is closed and empty.
        """
        outputs = self._add(DEQUEUE, (), "dequeue").outputs
        return self._structure.unflatten(outputs)

    def dequeue_many(self, n: int | Tensor | SupportsTensor, pad: Nest = None) -> Nest:
        """Take n elements at once, when there are enough: returns a nest with one more axis in front.

        Args:
            n: an int or an integer scalar, at least 0; 0 gives an empty batch at once.
            pad: a number (or a nest of them, as the spec is) that fills open extents up to the longest element; then
                the result is ``(elements, lengths)``. Lengths are ``int64[n]`` for a value with one open extent,
                ``int64[n, k]`` for one with k, and None where nothing is open.

        Raises:
            GraphError: the spec leaves extents open, and there is no `pad`.
            QueueClosedError: (from the run) the queue is closed, and there will never be n. The remaining elements can
                be taken with `dequeue_up_to`.
        """
        return self._batch(n, pad, "dequeue_many", or_fewer=False)

    def dequeue_up_to(self, n: int | Tensor | SupportsTensor, pad: Nest = None) -> Nest:
        """Take n elements as `dequeue_many` does, or the remaining ones of a closed queue, at least one, if fewer."""
        return self._batch(n, pad, "dequeue_up_to", or_fewer=True)

    def size(self) -> Tensor:
        """Return the number of elements in the queue: ``int64[]``."""
        return self._add(QUEUE_SIZE, (), "size").outputs[0]

    def close(self, cancel_pending: bool = False) -> Node:
        """Close the queue to further elements; the elements inside can still be taken. Closing it again changes
        nothing.

        Args:
            cancel_pending: an enqueue that waits for room fails. Otherwise it goes on waiting, and goes in.
        """
        return self._add(QUEUE_CLOSE, (), "close", cancel_pending=bool(cancel_pending))

    # -- for coroutines ------------------------------------------------------------------------------------------

    async def put(self, element: Nest, *, session: HasState | None = None) -> None:
        """Put an element in, once there is room, from a coroutine of the application.

        Args:
            element: a nest as the spec is, of arrays and numbers. Writable arrays are copied, on a thread if that takes
                long: do not change them until this returns.
            session: the session whose queue is meant; None for the ``async with`` block around. In a container it does
                not matter.

        Raises:
            DTypeError, ShapeError, GraphError: it is no element of this queue, or there is no session.
            QueueClosedError: the queue is closed.
            SessionClosedError: the session is, or is closed meanwhile.

        Cancellation: nothing was put in.
        """
        await granted_beside(put(self._state(session), [self._values(element, "put")], f"put of queue {self.name!r}"))

    async def put_many(self, elements: Sequence[Nest], *, session: HasState | None = None) -> None:
        """Put all `elements` in, at once, once there is room for all; see `put`.

        Raises:
            GraphError: it is one element.
        """
        if not isinstance(elements, Iterable):
            raise GraphError(f"put_many of queue {self.name!r} takes a list of elements; got {elements!r}")
        state, rows = self._state(session), [self._values(each, "put_many") for each in elements]
        if rows:  # an empty put never waits for room
            await granted_beside(put(state, rows, f"put_many({len(rows)}) of queue {self.name!r}"))

    async def get(self, *, session: HasState | None = None) -> Nest:
        """Take an element, once there is one: returns a nest of read-only arrays and NumPy scalars.

        Raises:
            QueueClosedError: the queue is closed and empty.
            SessionClosedError: the session is, or is closed meanwhile.

        Cancellation: nothing was taken.
        """
        state = self._state(session)
        return await granted_beside(state.take(1, False, f"get of queue {self.name!r}", self._first))

    async def get_many(self, n: int, pad: Nest = None, *, session: HasState | None = None) -> Nest:
        """Take n elements at once, as `dequeue_many` does, and return arrays; see `get`."""
        return await self._got(n, pad, "get_many", False, session)

    async def get_up_to(self, n: int, pad: Nest = None, *, session: HasState | None = None) -> Nest:
        """Take n elements as `get_many` does, or the remaining ones of a closed queue, at least one, if fewer."""
        return await self._got(n, pad, "get_up_to", True, session)

    def size_nowait(self, *, session: HasState | None = None) -> int:
        """Return the number of elements in the queue."""
        return self._state(session).size()

    def close_nowait(self, cancel_pending: bool = False, *, session: HasState | None = None) -> None:
        """Close the queue to further elements; see `close`."""
        self._state(session).close(cancel_pending)

    # -- building ------------------------------------------------------------------------------------------------

    def _add(self, op: Op, inputs: Sequence[Tensor], verb: str, **attrs: object) -> Node:
        graph = graph_for(*inputs, outside=_OUTSIDE[verb])
        attrs["queue"] = self
        specs = op.infer(*(x.spec for x in inputs), **attrs)
        return graph.add_node(op, list(inputs), attrs, specs, name=f"{self.name}/{verb}")

    def _putting(self, op: Op, element: Nest, verb: str, *, many: bool) -> Node:
        leaves = self._leaves(element, verb)
        with graph_for(*leaves, outside=_OUTSIDE[verb]) as graph:
            tensors = []
            for path, leaf, spec in zip(self._structure.paths(), leaves, self._specs, strict=True):
                whole = Spec(spec.dtype, None if spec.shape is None else (None, *spec.shape)) if many else spec
                part = f"{verb} {path}".rstrip()
                tensors.append(self._tensor(graph, leaf, whole, part))
                self._check(tensors[-1].spec, whole, part, "af.astype")
            return self._add(op, tensors, verb)

    def _leaves(self, element: Nest, verb: str) -> list[Nest]:
        try:
            return nest.flatten_like(self._structure, element, nested_leaves=True)
        except nest.StructureMismatch as error:
            shown = str(self._structure.unflatten(list(map(str, self._specs)))).replace("'", "")
            raise GraphError(f"{verb} of queue {self.name!r}, whose elements are {shown}: {error}") from None

    def _tensor(self, graph: Graph, x: TensorLike, spec: Spec, what: str) -> Tensor:
        if is_symbolic(x) or isinstance(x, np.ndarray | np.generic):
            return graph.import_tensor(as_tensor(x))
        # Numbers and lists take the queue's dtype. Values that have a dtype are not converted, as digits could be lost.
        try:
            return constant(x, spec.dtype)
        except GraphError as error:
            raise told_at(error, f"{what}: queue {self.name!r} holds {spec}") from None

    def _check(self, found: Spec, wanted: Spec, what: str, converts: str) -> None:
        if found.dtype != wanted.dtype:
            raise DTypeError(f"{what}: queue {self.name!r} holds {wanted}, not {found}; convert it with {converts}")
        if not is_compatible(found.shape, wanted.shape):
            raise ShapeError(f"{what}: queue {self.name!r} holds {wanted}, not {found}")

    def _batch(self, n: int | Tensor | SupportsTensor, pad: Nest, verb: str, *, or_fewer: bool) -> Nest:
        pads, what = self._pads(pad, verb), f"{verb} of queue {self.name!r}: n"
        with graph_for(n, outside=_OUTSIDE[verb]):
            # A known number becomes an attribute, so that shapes of the batch are known, too.
            x = as_tensor(n) if is_symbolic(n) else whole_number(n, what, 0)
            if isinstance(x, Tensor) and (x.dtype.kind not in "iu" or x.shape not in ((), None)):
                raise GraphError(f"{what} is an int or an integer scalar; got {x!r}")
            inputs, count = ([x], None) if isinstance(x, Tensor) else ([], x)
            node = self._add(DEQUEUE_MANY, inputs, verb, count=count, or_fewer=or_fewer, pads=pads)
        return self._as_batch(node.outputs, pads)

    def _as_batch(self, values: Sequence[Nest], pads: Pads | None) -> Nest:
        elements = self._structure.unflatten(values[: len(self._specs)])
        if pads is None:
            return elements
        lengths = iter(values[len(self._specs) :])
        return elements, self._structure.unflatten([next(lengths) if open_axes(spec) else None for spec in self._specs])

    def _pads(self, pad: Nest, verb: str) -> Pads | None:
        """A number for each leaf; None if nothing is padded."""
        if pad is None:
            vague = [spec for spec in self._specs if not is_static(spec.shape)]
            if vague:
                raise GraphError(
                    f"{verb}: elements of queue {self.name!r} are {', '.join(map(str, vague))}, and may differ in "
                    f"shape; fill them up with pad=, such as pad=0, or take them one by one"
                )
            return None
        if nest.flatten(pad)[1].kind is None:  # one number for all parts of an element
            pads = [pad] * len(self._specs)
        else:
            pads = self._leaves(pad, f"{verb}(pad=)")
        for each, spec in zip(pads, self._specs, strict=True):
            if spec.shape is None:
                raise GraphError(f"{verb}: padding needs a known rank; queue {self.name!r} has elements {spec}")
            if open_axes(spec):
                as_array(each, spec.dtype)  # raises now, where the traceback shows the user's line
        return tuple(pads)

    # -- running -------------------------------------------------------------------------------------------------

    def _state(self, session: HasState | None) -> QueueState:
        state = find_state(self, session)
        assert isinstance(state, QueueState)
        return state

    def _values(self, element: Nest, verb: str) -> Element:
        values: list[Array] = []
        for path, leaf, spec in zip(self._structure.paths(), self._leaves(element, verb), self._specs, strict=True):
            part = f"{verb} {path}".rstrip()
            if isinstance(leaf, np.ndarray | np.generic):
                array = leaf
            elif is_symbolic(leaf):
                raise GraphError(
                    f"{part}: {leaf!r} has no value yet; write {_NODES[verb]} in the graph, or put what a run gives"
                )
            else:
                try:
                    array = as_array(leaf, spec.dtype)
                except GraphError as error:
                    raise told_at(error, f"{part}: queue {self.name!r} holds {spec}") from None
            self._check(Spec(array.dtype, array.shape), spec, part, ".astype")
            values.append(np.asarray(array))  # elements are arrays, not NumPy scalars
        return tuple(values)

    def _first(self, elements: Sequence[Element]) -> Nest:
        return self._structure.unflatten(elements[0])

    async def _got(self, n: int, pad: Nest, verb: str, or_fewer: bool, session: HasState | None) -> Nest:
        whole_number(n, f"{verb} of queue {self.name!r}: n", 0)
        pads, state = self._pads(pad, verb), self._state(session)
        stack = partial(stacked, self._specs, pads)
        if not n:  # an empty batch never waits, not even in line
            return self._as_batch(stack(()), pads)
        taken = state.take(n, or_fewer, f"{verb}({n}) of queue {self.name!r}", stack, copies=True)
        values: Nest = await granted_beside(taken)
        return self._as_batch(values, pads)

    def create_state(self) -> QueueState:
        """An empty queue."""
        return QueueState(self.name, self._order(), self.capacity, self._reserve, self._specs)

    _reserve = 0  # number of elements that a dequeue leaves in the queue

    def _order(self) -> ElementOrder:
        raise NotImplementedError


class FIFOQueue(Queue):
    """A queue whose elements leave in the order in which they came in.

    In a graph, `enqueue`, `enqueue_many`, `dequeue`, `dequeue_many`, `dequeue_up_to`, `size` and `close` are nodes, for
    any number of runs at once; `put`, `put_many`, `get`, `get_many` and `get_up_to` are the same for coroutines of the
    application's. A waiting op suspends its own firing and nothing else. Waiting ops are served in the order they came,
    nothing overtakes, and an element is handed over exactly once. A run that fails, is cancelled or runs out of time
    while it waits has taken nothing, and the queue goes on.

    Args:
        capacity: how many elements it holds, at least 1.
        spec: of an element: an `af.spec`, or a nest of them. Shapes may be open.
        name: for messages, and the key inside a container; None generates one.
        container: a name shared by sessions; None for a queue of the session's own.

    Raises:
        GraphError: an argument is none of these.

    >>> import asyncflow as af
    >>> queue = FIFOQueue(10, af.spec("int64", ()), name="numbers")
    >>> with af.Graph() as graph:
    ...     fill = queue.enqueue_many([1, 2, 3])
    ...     total = af.sum(queue.dequeue_many(3))
    >>> async def main():
    ...     async with af.Session(graph) as session:
    ...         return await session.run((fill, total))
    >>> af.run(main())
    (None, np.int64(6))
    """

    @property
    def is_fifo(self) -> bool:
        """See `Queue.is_fifo`."""
        return True

    def _order(self) -> ElementOrder:
        return ArrivalOrder()


class ShuffleQueue(Queue):
    """A queue that gives any of its elements, each as likely as the others; else it is like `FIFOQueue`.

    Args:
        capacity: how many elements it holds, at least 1.
        spec: of an element.
        min_after_dequeue: how many elements have to be left after each dequeue, so that they are well mixed; once the
            queue is closed, none.
        seed: of the choices, which depend on it and on the order of enqueues and dequeues alone; None draws one.
        name: see `FIFOQueue`.
        container: see `FIFOQueue`.

    Raises:
        GraphError: an argument is none of these, or no dequeue would ever leave `min_after_dequeue` elements.
    """

    def __init__(
        self,
        capacity: int,
        spec: Nest,
        min_after_dequeue: int = 0,
        seed: int | None = None,
        *,
        name: str | None = None,
        container: str | None = None,
    ) -> None:
        super().__init__(capacity, spec, name=name, container=container)
        whole_number(min_after_dequeue, "ShuffleQueue: min_after_dequeue", 0)
        if min_after_dequeue >= self.capacity:
            raise GraphError(
                f"ShuffleQueue: min_after_dequeue={min_after_dequeue} of a capacity of {capacity}: a full queue would "
                f"never give anything; make the capacity larger"
            )
        if seed is not None and not isinstance(seed, int | np.integer):
            raise GraphError(f"ShuffleQueue: seed={seed!r} is an integer or None")
        self.min_after_dequeue = self._reserve = min_after_dequeue
        self.seed = None if seed is None else int(seed)

    def _order(self) -> ElementOrder:
        return RandomOrder(self.seed)


class PriorityQueue(Queue):
    """A queue that gives the element with the smallest number first; otherwise like `FIFOQueue`.

    Its elements are pairs ``(priority, element)``: an ``int64`` scalar, and what `spec` says. Elements of one priority
    leave in the order in which they came in.

    Args:
        capacity: how many elements it holds, at least 1.
        spec: of the element beside the priority.
        name: see `FIFOQueue`.
        container: see `FIFOQueue`.
    """

    def __init__(self, capacity: int, spec: Nest, *, name: str | None = None, container: str | None = None) -> None:
        super().__init__(capacity, (Spec(int64, ()), spec), name=name, container=container)

    def _order(self) -> ElementOrder:
        return PriorityOrder()


class PaddingQueue(Queue):
    """A queue of elements of different extents, padded to make batches; otherwise like `FIFOQueue`.

    `dequeue_many` and `dequeue_up_to` give ``(elements, lengths)``, as they do elsewhere with `pad`.

    Args:
        capacity: how many elements it holds, at least 1.
        spec: of an element; ranks are known.
        bucket_by: called with each element that comes in, as NumPy values in the nest of `spec`, on a thread if it is
            large; gives its bucket, such as ``len(x) // 16``. A batch is taken from one bucket: of the buckets with
            enough elements, the bucket with the oldest one. Only if the queue is full and no bucket has enough, or it
            is closed, the batch has the oldest elements. None: in the order in which they came in.
        pad: a number or string, or a nest of them as `spec` is, that fills open extents up. None: 0, False or "".
        name: see `FIFOQueue`.
        container: see `FIFOQueue`.
    """

    def __init__(
        self,
        capacity: int,
        spec: Nest,
        *,
        bucket_by: Callable[..., Hashable] | None = None,
        pad: Nest = None,
        name: str | None = None,
        container: str | None = None,
    ) -> None:
        super().__init__(capacity, spec, name=name, container=container)
        if bucket_by is not None and not callable(bucket_by):
            raise GraphError(f"PaddingQueue: bucket_by={bucket_by!r} is a function of an element, or None")
        self.bucket_by, self.pad = bucket_by, pad
        self._pads(None, "PaddingQueue")  # report errors of pad= or of the spec here, not at the first batch

    @property
    def is_fifo(self) -> bool:
        """See `Queue.is_fifo`."""
        return self.bucket_by is None

    def _pads(self, pad: Nest, verb: str) -> Pads | None:
        found = self.pad if pad is None else pad
        if found is None:
            blank: dict[str, str | bool] = {"T": "", "b": False}
            found = self._structure.unflatten([blank.get(spec.dtype.kind, 0) for spec in self._specs])
        return super()._pads(found, verb)

    def _order(self) -> ElementOrder:
        if self.bucket_by is None:
            return ArrivalOrder()
        # Capture parts, not the queue: states are found by their queue, and must not keep it alive.
        bucket_by, structure = self.bucket_by, self._structure
        return BucketOrder(lambda element: bucket_by(structure.unflatten(element)))


def _leaf(kind: str, leaf: Nest) -> Spec:
    if not isinstance(leaf, Spec):
        raise GraphError(f"{kind}: an element is described by af.spec(dtype, shape), or a nest of specs; got {leaf!r}")
    if leaf.dtype == VARIANT:
        raise DTypeError(f"{kind}: a queue cannot hold variants; only the ops that made them read them")
    return leaf
