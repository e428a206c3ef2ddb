"""Gradients of stores of saved values, and of TensorArrays: stores of gradients, of which those for one place add up.

What writes to an array reads from its gradient, and the other way round: unstack is the counterpart of stack, scatter
of gather, split of concat. No rule needs the array itself, so an array may be used up, or closed, before its gradient
is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, pairwise
from threading import Lock
from typing import TYPE_CHECKING, Any

from asyncflow.control import tensor_array
from asyncflow.graph.build import apply
from asyncflow.graph.dtypes import VARIANT
from asyncflow.graph.op import Op, derivative, inputs_from, not_differentiable, register
from asyncflow.graph.shapes import format_shape
from asyncflow.graph.spec import Spec
from asyncflow.ops.cost import free
from asyncflow.ops.derivatives.shapes import carries_gradient, ensure_shape, shape_of
from asyncflow.ops.extents import shape_reader, split_extents, template_shape

if TYPE_CHECKING:
    from types import ModuleType

    from asyncflow.graph.dtypes import DType
    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.graph.op import Kernel
    from asyncflow.graph.shapes import Shape

STORE = Spec(VARIANT, ())


class StoreGradient:
    """What has reached the elements of a store or array: the first `length` entries of a log that versions share.

    An entry is the index of an element and a gradient of it; several of one element add up when they are read. Only the
    newest version grows in place, and any thread may use any version.

    Attributes:
        nbytes: of the gradients, for the profiler.
    """

    __slots__ = ("length", "log", "nbytes")

    def __init__(self, log: _Log, length: int, nbytes: int) -> None:
        self.log = log
        self.length = length
        self.nbytes = nbytes

    @property
    def held(self) -> _Log:
        """The store, for the account of a device that has a limit."""
        return self.log

    @classmethod
    def of(cls, entries: Sequence[tuple[int, Any]]) -> StoreGradient:
        """One with these entries alone."""
        return cls(_Log(entries), len(entries), _nbytes(entries))

    def with_entries(self, entries: Sequence[tuple[int, Any]]) -> StoreGradient:
        """With more entries."""
        log = self.log
        length = self.length + len(entries)
        with log.lock:
            is_newest = self.length == len(log.entries)
            if is_newest:
                log.extend(entries)
        if not is_newest:
            log = _Log([*self.entries(), *entries])
        return StoreGradient(log, length, self.nbytes + _nbytes(entries))

    def merged(self, other: StoreGradient) -> StoreGradient:
        """With those of `other`; the cost is that of the shorter one."""
        if other.length > self.length:
            return other.merged(self)
        return self.with_entries(other.entries()) if other.length else self

    def entries(self) -> Sequence[tuple[int, Any]]:
        """All entries."""
        return self.log.entries[: self.length]

    def read(self, index: int) -> list[Any]:
        """The gradients of one element."""
        positions = self.log.positions.get(index, ())
        return [self.log.entries[place][1] for place in positions if place < self.length]

    def total(self, index: int, shape: tuple[int, ...], xp: ModuleType) -> Any | None:
        """The sum of the gradients of one element of this shape; None if there are none.

        Raises:
            ValueError: one has another shape. It is not broadcast: the sum would be wrong without a word.
        """
        found = self.read(index)
        for grad in found:
            if grad.shape != shape:
                raise ValueError(
                    f"a gradient of shape {format_shape(grad.shape)} has reached element {index} of an array, which "
                    f"has shape {format_shape(shape)}; they can only be added up if they are alike"
                )
        return reduce(xp.add, found) if found else None


class _Log:
    __slots__ = ("__weakref__", "entries", "lock", "positions")
    entry_nbytes = 200  # a pair, its index, and the list of an element's positions

    def __init__(self, entries: Sequence[tuple[int, Any]]) -> None:
        self.entries: list[tuple[int, Any]] = []
        self.lock = Lock()
        self.positions: dict[int, list[int]] = {}
        self.extend(entries)

    def since(self, count: int) -> list[Any]:
        return [grad for _, grad in self.entries[count:]]

    def buffers(self) -> tuple[()]:
        return ()

    def extend(self, entries: Sequence[tuple[int, Any]]) -> None:
        for entry in entries:
            self.positions.setdefault(entry[0], []).append(len(self.entries))
            self.entries.append(entry)


def _nbytes(entries: Sequence[tuple[int, Any]]) -> int:
    return sum(getattr(value, "nbytes", 0) for _, value in entries)


# -- ops -------------------------------------------------------------------------------------------------------------


def _no_gradient_kernel(xp: ModuleType) -> Kernel:
    return lambda: StoreGradient.of(())


def _accumulate_kernel(xp: ModuleType) -> Kernel:
    return lambda grads, index, grad: grads.with_entries(((int(index), grad),))


def _merge_kernel(xp: ModuleType) -> Kernel:
    def merge(grads: Any, others: Any) -> Any:
        if grads.length and others.length:
            return grads.merged(others)
        return grads if grads.length else others  # a sum of parts (`part_sums`) begins as a store of nothing

    return merge


def _element_kernel(xp: ModuleType, *, dtype: DType, shape: Shape) -> Kernel:
    if dtype == VARIANT:
        return lambda grads, index: reduce(StoreGradient.merged, grads.read(int(index)) or [StoreGradient.of(())])
    read_shape = shape_reader(shape)

    def read(grads: StoreGradient, index: Any, *sizes: Any) -> Any:
        extents = read_shape(sizes)
        found = grads.total(int(index), extents, xp)
        return xp.zeros(extents, dtype) if found is None else found

    return read


def _element_spec(grads: Spec, index: Spec, *sizes: Spec, dtype: DType, shape: Shape) -> Spec:
    return STORE if dtype == VARIANT else Spec(dtype, template_shape(shape, sizes))


def _stacked_kernel(xp: ModuleType) -> Kernel:
    def entries(grad: Any, *indices: Any) -> StoreGradient:
        places = indices[0].tolist() if indices else range(len(grad))
        return StoreGradient.of([(place, grad[row]) for row, place in enumerate(places)])

    return entries


def _rows_kernel(xp: ModuleType, *, is_scattered: bool, dtype: DType, shape: Shape) -> Kernel:
    read_shape = shape_reader(shape)

    def read(grads: StoreGradient, *inputs: Any) -> Any:
        extents = read_shape(inputs[is_scattered:])
        places = inputs[0].tolist() if is_scattered else range(extents[0])
        found = [grads.total(place, extents[1:], xp) for place in places]
        if all(row is None for row in found):
            return xp.zeros(extents, dtype)
        zeros = xp.zeros(extents[1:], dtype)
        return xp.stack([zeros if row is None else row for row in found])

    return read


def _rows_spec(grads: Spec, *inputs: Spec, is_scattered: bool, dtype: DType, shape: Shape) -> Spec:
    return Spec(dtype, template_shape(shape, inputs[is_scattered:]))


def _joined_kernel(xp: ModuleType) -> Kernel:
    def entries(grad: Any, lengths: Any) -> StoreGradient:
        cuts = _cuts(lengths)
        total = cuts[-1].stop if cuts else 0
        if len(grad) != total:
            raise ValueError(
                f"a gradient of shape {format_shape(grad.shape)} has reached the joined elements of an array, whose "
                f"lengths add up to {total}"
            )
        return StoreGradient.of([(place, grad[piece]) for place, piece in enumerate(cuts)])

    return entries


def _pieces_kernel(xp: ModuleType, *, dtype: DType, shape: Shape) -> Kernel:
    read_shape = shape_reader(shape)

    def read(grads: StoreGradient, lengths: Any, *sizes: Any) -> Any:
        extents = read_shape(sizes)
        whole = xp.zeros(extents, dtype)
        for place, piece in enumerate(_cuts(lengths)):
            found = grads.total(place, (piece.stop - piece.start, *extents[1:]), xp)
            if found is not None:
                whole[piece] = found
        return whole

    return read


def _pieces_spec(grads: Spec, lengths: Spec, *sizes: Spec, dtype: DType, shape: Shape) -> Spec:
    return Spec(dtype, template_shape(shape, sizes))


def _cuts(lengths: Any) -> list[slice]:
    """The slices that pieces of these lengths are."""
    ends = list(accumulate(lengths.tolist(), initial=0))
    return [slice(start, stop) for start, stop in pairwise(ends)]


# Each is one of its own, never shared with an equal one.
NO_GRADIENT = register(
    Op(name="store_gradient", infer=lambda: STORE, kernel=_no_gradient_kernel, is_random=True, flops=free)
)
ACCUMULATE = register(
    Op(
        name="accumulate_gradient",
        infer=lambda grads, index, grad: STORE,
        kernel=_accumulate_kernel,
        flops=free,
        host_inputs=(1,),
    )
)
MERGE_GRADIENTS = register(
    Op(name="merge_gradients", infer=lambda grads, others: STORE, kernel=_merge_kernel, flops=free)
)
ELEMENT_GRADIENT = register(
    Op(name="element_gradient", infer=_element_spec, kernel=_element_kernel, flops=free, host_inputs=inputs_from(1))
)
STACKED_GRADIENTS = register(
    Op(
        name="stacked_gradients",
        infer=lambda grad, *indices: STORE,
        kernel=_stacked_kernel,
        flops=free,
        host_inputs=inputs_from(1),
    )
)
ROWS_GRADIENT = register(Op(name="rows_gradient", infer=_rows_spec, kernel=_rows_kernel, host_inputs=inputs_from(1)))
JOINED_GRADIENTS = register(
    Op(
        name="joined_gradients",
        infer=lambda grad, lengths: STORE,
        kernel=_joined_kernel,
        flops=free,
        host_inputs=(1,),
    )
)
PIECES_GRADIENT = register(
    Op(name="pieces_gradient", infer=_pieces_spec, kernel=_pieces_kernel, host_inputs=inputs_from(1))
)


def no_gradient() -> Tensor:
    """The gradient of a store or array of which nothing is used."""
    return apply(NO_GRADIENT)[0]


def element_gradients(index: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a store or array of which one element is used."""
    return apply(ACCUMULATE, no_gradient(), index, grad)[0]


def merge_gradients(grads: Tensor, others: Tensor) -> Tensor:
    """The sum of two gradients of a store or array; adding few entries to many costs little."""
    for one, rest in ((others, grads), (grads, others)):
        if one.node.op is ACCUMULATE and one.node.inputs[0].node.op is NO_GRADIENT:
            return apply(ACCUMULATE, rest, *one.node.inputs[1:])[0]
    return apply(MERGE_GRADIENTS, grads, others)[0]


def element_gradient(grads: Tensor, index: Tensor, element: Tensor) -> Tensor:
    """What has reached one element, of the shape of the forward value `element`; zeros if nothing has."""
    if element.dtype == VARIANT:
        return apply(ELEMENT_GRADIENT, grads, index, dtype=VARIANT, shape=())[0]
    template, sizes = split_extents(shape_of(element))
    found = apply(ELEMENT_GRADIENT, grads, index, *sizes, dtype=element.dtype, shape=template)[0]
    return ensure_shape(found, element.shape)


def stacked_gradients(grad: Tensor, indices: Tensor | None = None) -> Tensor:
    """The gradient of an array whose elements (those at `indices`, or all) are used as the rows of one tensor."""
    return apply(STACKED_GRADIENTS, grad, *_given(indices))[0]


def rows_gradient(grads: Tensor, values: Tensor, indices: Tensor | None = None) -> Tensor:
    """What has reached the rows of the forward value `values`: elements at `indices` of an array, or all of them."""
    template, sizes = split_extents(shape_of(values))
    inputs = (grads, *_given(indices), *sizes)
    found = apply(ROWS_GRADIENT, *inputs, is_scattered=indices is not None, dtype=values.dtype, shape=template)[0]
    return ensure_shape(found, values.shape)


def joined_gradients(grad: Tensor, lengths: Tensor) -> Tensor:
    """The gradient of an array whose elements, of these lengths, are used as the pieces of one tensor."""
    return apply(JOINED_GRADIENTS, grad, lengths)[0]


def pieces_gradient(grads: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """What has reached the pieces, of these lengths, of the forward value `values`: all elements of an array."""
    template, sizes = split_extents(shape_of(values))
    found = apply(PIECES_GRADIENT, grads, lengths, *sizes, dtype=values.dtype, shape=template)[0]
    return ensure_shape(found, values.shape)


def _given(indices: Tensor | None) -> tuple[Tensor, ...]:
    return () if indices is None else (indices,)


# -- their derivatives -----------------------------------------------------------------------------------------------


@derivative(ACCUMULATE)
def _accumulate(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    _, index, grad = node.inputs
    return grads, None, element_gradient(grads, index, grad)


@derivative(MERGE_GRADIENTS)
def _merge(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    return grads, grads


@derivative(ELEMENT_GRADIENT)
def _element(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    return [element_gradients(node.inputs[1], grad), *[None] * (len(node.inputs) - 1)]


@derivative(STACKED_GRADIENTS)
def _stacked(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    grad, *indices = node.inputs
    return [rows_gradient(grads, grad, *indices), *[None] * len(indices)]


@derivative(ROWS_GRADIENT)
def _rows(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    indices = node.inputs[1:2] if node.attrs["is_scattered"] else []
    return [stacked_gradients(grad, *indices), *[None] * (len(node.inputs) - 1)]


@derivative(JOINED_GRADIENTS)
def _joined(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    grad, lengths = node.inputs
    return pieces_gradient(grads, grad, lengths), None


@derivative(PIECES_GRADIENT)
def _pieces(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    return [joined_gradients(grad, node.inputs[1]), *[None] * (len(node.inputs) - 1)]


not_differentiable(NO_GRADIENT, because="it has no inputs")


# -- derivatives of TensorArrays -------------------------------------------------------------------------------------


@derivative(tensor_array.WRITE)
def _write(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    _, index, value = node.inputs
    return grads, None, element_gradient(grads, index, value) if carries_gradient(value.spec) else None


@derivative(tensor_array.READ)
def _read(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    return element_gradients(node.inputs[1], grad), None


@derivative(tensor_array.UNSTACK)
def _unstack(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    values = node.inputs[1]
    return grads, rows_gradient(grads, values) if carries_gradient(values.spec) else None


@derivative(tensor_array.STACK)
def _stack(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    return [stacked_gradients(grad)]


@derivative(tensor_array.SCATTER)
def _scatter(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    _, indices, values = node.inputs
    return grads, None, rows_gradient(grads, values, indices) if carries_gradient(values.spec) else None


@derivative(tensor_array.GATHER)
def _gather(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    return stacked_gradients(grad, node.inputs[1]), None


@derivative(tensor_array.SPLIT)
def _split(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    _, values, lengths = node.inputs
    return grads, pieces_gradient(grads, values, lengths) if carries_gradient(values.spec) else None, None


@derivative(tensor_array.CONCAT)
def _concat(node: Node, grad: Tensor, lengths: None) -> Sequence[Tensor | None]:
    return [joined_gradients(grad, node.outputs[1])]


not_differentiable(tensor_array.TENSOR_ARRAY, because="a new array depends on its size alone")
not_differentiable(tensor_array.ELEMENT_SHAPE, tensor_array.SIZE, because="its result is an integer")
not_differentiable(tensor_array.CLOSE, because="it has no outputs")
