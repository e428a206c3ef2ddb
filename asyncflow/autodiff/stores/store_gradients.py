"""Gradients of stores of saved values, and of TensorArrays: stores of gradients that add up for each place.

A write to an array is a read from its gradient, and the other way round: unstack is the counterpart of stack, scatter
of gather, split of concat. No rule needs the array itself, so an array may be used up, or closed, before its gradient
is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, pairwise

from asyncflow.autodiff.stores.stores import STORE, Grad, StoreGradient, store_op
from asyncflow.control.stores import tensor_array
from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import (
    KERNELS,
    NEW_EACH,
    READS_STORE,
    define,
    derivative,
    gradient_of_first,
    inputs_from,
    not_differentiable,
)
from asyncflow.graph.values.dtypes import VARIANT, DType
from asyncflow.graph.values.shapes import Shape, format_shape
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.extents import apply_to_shape, shape_reader, template_shape
from asyncflow.ops.cost import free
from asyncflow.ops.derivatives.shapes import carries_gradient, ensure_shape, shape_of
from asyncflow.values import Array, Kernel, Namespace

# -- ops -------------------------------------------------------------------------------------------------------------


def _merge(grads: Grad, others: Grad) -> Grad:
    if grads.length and others.length:
        return grads.merged(others)
    return grads if grads.length else others  # a sum of parts (`part_sums`) starts as an empty store


def _element_kernel(
    xp: Namespace, *, dtype: DType, shape: Shape, is_once: bool = False, is_last: bool = False
) -> Kernel:
    if dtype == VARIANT:
        return lambda grads, index: reduce(StoreGradient.merged, grads.read(int(index)) or [StoreGradient.of(())])
    read_shape = shape_reader(shape)

    def read(grads: StoreGradient, index: Array, *sizes: Array) -> Array:
        extents = read_shape(sizes)
        found = grads.total(int(index), extents, xp, is_last=is_last)
        return xp.zeros(extents, dtype) if found is None else found

    return read


def _element_spec(
    grads: Spec, index: Spec, *sizes: Spec, dtype: DType, shape: Shape, is_once: bool = False, is_last: bool = False
) -> Spec:
    return STORE if dtype == VARIANT else Spec(dtype, template_shape(shape, sizes))


def _stacked(grad: Array, *indices: Array) -> StoreGradient:
    places = indices[0].tolist() if indices else range(len(grad))
    return StoreGradient.of([(place, grad[row]) for row, place in enumerate(places)])


def _rows_kernel(xp: Namespace, *, is_scattered: bool, dtype: DType, shape: Shape) -> Kernel:
    read_shape = shape_reader(shape)

    def read(grads: StoreGradient, *inputs: Array) -> Array:
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


def _joined_kernel(xp: Namespace, *, axis: int) -> Kernel:
    def joined(grad: Array, lengths: Array) -> StoreGradient:
        cuts = _cuts(lengths)
        total = cuts[-1].stop if cuts else 0
        if grad.shape[axis] != total:
            raise ValueError(
                f"a gradient of shape {format_shape(grad.shape)} has reached the joined elements of an array, whose "
                f"lengths add up to {total}"
            )
        around = (slice(None),) * axis
        return StoreGradient.of([(place, grad[(*around, piece)]) for place, piece in enumerate(cuts)])

    return joined


def _pieces_kernel(xp: Namespace, *, dtype: DType, shape: Shape, axis: int) -> Kernel:
    read_shape = shape_reader(shape)
    around = (slice(None),) * axis

    def read(grads: StoreGradient, lengths: Array, *sizes: Array) -> Array:
        extents = read_shape(sizes)
        whole = xp.zeros(extents, dtype)
        for place, piece in enumerate(_cuts(lengths)):
            own = (*extents[:axis], piece.stop - piece.start, *extents[axis + 1 :])
            if (found := grads.total(place, own, xp)) is not None:
                whole[(*around, piece)] = found
        return whole

    return read


def _pieces_spec(grads: Spec, lengths: Spec, *sizes: Spec, dtype: DType, shape: Shape, axis: int) -> Spec:
    return Spec(dtype, template_shape(shape, sizes))


def _cuts(lengths: Array) -> list[slice]:
    """Return the slices of consecutive pieces of these lengths."""
    ends = list(accumulate(lengths.tolist(), initial=0))
    return [slice(start, stop) for start, stop in pairwise(ends)]


NO_GRADIENT = store_op("store_gradient", lambda: STORE, lambda: StoreGradient.of(()), conduct=NEW_EACH, is_total=True)
ACCUMULATE = store_op(
    "accumulate_gradient",
    lambda grads, index, grad: STORE,
    lambda grads, index, grad: grads.with_entries(((int(index), grad),)),
    host_inputs=(1,),
    is_total=True,
)
ADDERS = {ACCUMULATE}
"""Ops that add to the store of gradients which is their first input."""
MERGE_GRADIENTS = store_op("merge_gradients", lambda grads, others: STORE, _merge, is_total=True)
ELEMENT_GRADIENT = define(
    "element_gradient", _element_spec, _element_kernel, flops=free, host_inputs=inputs_from(1), traits=READS_STORE
)
"""With ``is_once``, each element is asked for once: it was written, once. The compiler says which read is the last."""
STACKED_GRADIENTS = store_op("stacked_gradients", lambda grad, *indices: STORE, _stacked, host_inputs=inputs_from(1))
ROWS_GRADIENT = define("rows_gradient", _rows_spec, _rows_kernel, host_inputs=inputs_from(1), traits=KERNELS)
JOINED_GRADIENTS = define(
    "joined_gradients", lambda grad, lengths, axis: STORE, _joined_kernel, flops=free, host_inputs=(1,), traits=KERNELS
)
"""Gradients of the pieces of which a value is made along an axis: 0, but where others stand in front of it."""
PIECES_GRADIENT = define("pieces_gradient", _pieces_spec, _pieces_kernel, host_inputs=inputs_from(1), traits=KERNELS)


def no_gradient() -> Tensor:
    """The gradient of a store or array of which nothing is used."""
    return apply(NO_GRADIENT)[0]


def element_gradients(index: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a store or array of which one element is used."""
    return apply(ACCUMULATE, no_gradient(), index, grad)[0]


def merge_gradients(grads: Tensor, others: Tensor) -> Tensor:
    """The sum of two gradients of a store or array; adding few entries to many costs little."""
    for one, rest in ((others, grads), (grads, others)):
        node = one.node
        if node.op in ADDERS and node.inputs[0].node.op is NO_GRADIENT:
            return apply(node.op, rest, *node.inputs[1:], **node.attrs)[0]
    return apply(MERGE_GRADIENTS, grads, others)[0]


def element_gradient(grads: Tensor, index: Tensor, element: Tensor, *, is_once: bool = False) -> Tensor:
    """The gradient of one element, of the shape of the forward value `element`; zeros if none has reached it.

    Args:
        grads: the store.
        index: of the element.
        element: its forward value.
        is_once: no other node that this makes, and no other iteration of its loop, asks for the same.
    """
    if element.dtype == VARIANT:
        return apply(ELEMENT_GRADIENT, grads, index, dtype=VARIANT, shape=())[0]
    found = apply_to_shape(ELEMENT_GRADIENT, shape_of(element), grads, index, dtype=element.dtype, is_once=is_once)
    return ensure_shape(found, element.shape)


def stacked_gradients(grad: Tensor, indices: Tensor | None = None) -> Tensor:
    """Return the gradient of an array whose elements (at `indices`, or all) are used as the rows of one tensor."""
    return apply(STACKED_GRADIENTS, grad, *_given(indices))[0]


def rows_gradient(grads: Tensor, values: Tensor, indices: Tensor | None = None) -> Tensor:
    """The gradients of the rows of the forward value `values`: elements at `indices` of an array, or all of them."""
    inputs, is_scattered = (grads, *_given(indices)), indices is not None
    found = apply_to_shape(ROWS_GRADIENT, shape_of(values), *inputs, is_scattered=is_scattered, dtype=values.dtype)
    return ensure_shape(found, values.shape)


def joined_gradients(grad: Tensor, lengths: Tensor, axis: int = 0) -> Tensor:
    """The gradient of an array whose elements, of these lengths, are used as the pieces of one tensor."""
    return apply(JOINED_GRADIENTS, grad, lengths, axis=axis)[0]


def pieces_gradient(grads: Tensor, values: Tensor, lengths: Tensor, axis: int = 0) -> Tensor:
    """The gradients of the pieces, of these lengths, of the forward value `values`: all elements of an array."""
    found = apply_to_shape(PIECES_GRADIENT, shape_of(values), grads, lengths, dtype=values.dtype, axis=axis)
    return ensure_shape(found, values.shape)


def _given(indices: Tensor | None) -> tuple[Tensor, ...]:
    return () if indices is None else (indices,)


# -- derivatives, of TensorArrays among them -------------------------------------------------------------------------


@derivative(ACCUMULATE, tensor_array.WRITE)
def gradient_of_write(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    """The derivative of what writes one value to a store or array."""
    _, index, value = node.inputs
    if not carries_gradient(value.spec):
        return grads, None, None
    return grads, None, element_gradient(grads, index, value, is_once=node.op is tensor_array.WRITE)


@derivative(ELEMENT_GRADIENT, tensor_array.READ)
def gradient_of_read(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """The derivative of what reads one value of a store or array; it may take sizes as well."""
    return [element_gradients(node.inputs[1], grad), *[None] * (len(node.inputs) - 1)]


@derivative(tensor_array.UNSTACK, tensor_array.SCATTER)
def _written_rows(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    _, *indices, values = node.inputs
    reached = rows_gradient(grads, values, *indices) if carries_gradient(values.spec) else None
    return [grads, *[None] * len(indices), reached]


@derivative(tensor_array.STACK, tensor_array.GATHER, tensor_array.PEEK)
def _read_rows(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    _, *indices = node.inputs
    return [stacked_gradients(grad, *indices), *[None] * len(indices)]


@derivative(ROWS_GRADIENT)
def _rows(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    indices = node.inputs[1:2] if node.attrs["is_scattered"] else []
    return [stacked_gradients(grad, *indices), *[None] * (len(node.inputs) - 1)]


@derivative(STACKED_GRADIENTS)
def _stacked_rule(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    grad, *indices = node.inputs
    return [rows_gradient(grads, grad, *indices), *[None] * len(indices)]


@derivative(tensor_array.SPLIT)
def _split(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    _, values, lengths = node.inputs
    return grads, pieces_gradient(grads, values, lengths) if carries_gradient(values.spec) else None, None


@derivative(tensor_array.CONCAT)
def _concat(node: Node, grad: Tensor, lengths: None) -> Sequence[Tensor | None]:
    return [joined_gradients(grad, node.outputs[1])]


@derivative(JOINED_GRADIENTS)
def _joined_rule(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    grad, lengths = node.inputs
    return pieces_gradient(grads, grad, lengths, node.attrs["axis"]), None


gradient_of_first(PIECES_GRADIENT, lambda node, grad: joined_gradients(grad, node.inputs[1], node.attrs["axis"]))


@derivative(MERGE_GRADIENTS)
def _merge_rule(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    return grads, grads


not_differentiable(NO_GRADIENT, because="it has no inputs")
not_differentiable(tensor_array.TENSOR_ARRAY, because="a new array depends on its size alone")
not_differentiable(tensor_array.ELEMENT_SHAPE, tensor_array.SIZE, because="its result is an integer")
not_differentiable(tensor_array.CLOSE, because="it has no outputs")
