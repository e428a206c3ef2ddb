"""`TensorArray`: elements that a loop writes and reads one by one (EuroSys '18 §2.1).

The handle is Python's view of one VARIANT scalar, whose value is an `asyncflow.control.stores.array_value.ArrayValue`.
A write gives a new handle; the old handle keeps its meaning. Nothing here has an effect but `close`, so arrays need no
ordering of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from typing import NoReturn, Self

import numpy as np

from asyncflow.control.stores.array_elements import elements_of, pieces_written, rows_written, value_written
from asyncflow.control.stores.array_store import ArrayKind, Common, element_shape, widen
from asyncflow.control.stores.array_value import ArrayValue
from asyncflow.control.stores.handles import Handle
from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, add_control_input, apply, as_tensor, graph_for, identity
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import KERNELS, METADATA, NEW_EACH, Access, Effects, Op, Traits, define
from asyncflow.graph.structured import StructuredNode, WhileNode
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import VARIANT, DType, DTypeLike, as_dtype, dtype_name, int64
from asyncflow.graph.values.shapes import Shape, ShapeLike, as_shape, format_shape, is_compatible, merge
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.known_values import default_value, static_value
from asyncflow.ops.cost import free
from asyncflow.values import Array, Kernel, Namespace

ARRAY = Spec(VARIANT, ())
"""The spec of every handle."""


# -- shape rules and kernels -----------------------------------------------------------------------------------------


def _check_integers(value: Spec, rank: int, what: str) -> None:
    if value.dtype.kind not in "iu":
        raise DTypeError(f"{what} must be integers; got {value}")
    if value.rank not in (rank, None):
        raise ShapeError(f"{what} must have rank {rank}; got shape {format_shape(value.shape)}")


def _check_element(dtype: DType, shape: Shape, element: Spec) -> None:
    if dtype != element.dtype:
        raise DTypeError(
            f"elements of the TensorArray are {dtype_name(element.dtype)}; got {dtype_name(dtype)}: convert with "
            f"af.astype"
        )
    if not is_compatible(shape, element.shape):
        raise ShapeError(
            f"elements of the TensorArray have shape {format_shape(element.shape)}; got {format_shape(shape)}"
        )


def _row_shape(values: Spec) -> Shape:
    if values.shape == ():
        raise ShapeError("a scalar cannot be taken apart along its first axis")
    return None if values.shape is None else values.shape[1:]


def _new_spec(size: Spec, *, element: Spec, dynamic_size: bool, clear_after_read: bool) -> Spec:
    _check_integers(size, 0, "the size")
    return ARRAY


def _write_spec(index: Spec, value: Spec, *, element: Spec) -> Spec:
    _check_integers(index, 0, "an index")
    _check_element(value.dtype, value.shape, element)
    return ARRAY


def _read_spec(index: Spec, *, element: Spec) -> Spec:
    _check_integers(index, 0, "an index")
    return element


def _unstack_spec(values: Spec, *, element: Spec) -> Spec:
    _check_element(values.dtype, _row_shape(values), element)
    return ARRAY


def _stack_spec(*, element: Spec, length: int | None) -> Spec:
    return Spec(element.dtype, None if element.shape is None else (length, *element.shape))


def _scatter_spec(indices: Spec, values: Spec, *, element: Spec) -> Spec:
    _check_integers(indices, 1, "indices")
    _unstack_spec(values, element=element)
    if indices.shape and values.shape and not is_compatible(indices.shape, values.shape[:1]):
        raise ShapeError(f"{values.shape[0]} rows do not fit {indices.shape[0]} indices")
    return ARRAY


def _gather_spec(indices: Spec, *, element: Spec) -> Spec:
    _check_integers(indices, 1, "indices")
    return _stack_spec(element=element, length=indices.shape[0] if indices.shape else None)


def _split_spec(values: Spec, lengths: Spec, *, element: Spec) -> Spec:
    _check_integers(lengths, 1, "lengths")
    rows = _row_shape(values)
    _check_element(values.dtype, None if rows is None else (None, *rows), element)
    return ARRAY


def _concat_spec(*, element: Spec) -> tuple[Spec, Spec]:
    if element.shape == ():
        raise ShapeError("scalars cannot be joined along their first axis; use stack")
    shape = None if element.shape is None else (None, *element.shape[1:])
    return Spec(element.dtype, shape), Spec(int64, (None,))


def _new_kernel(xp: Namespace, *, element: Spec, dynamic_size: bool, clear_after_read: bool) -> Kernel:
    kind = ArrayKind(element.dtype, element.shape, dynamic_size, clear_after_read)
    return lambda size: ArrayValue.create(xp, kind, int(size))


def _close(array: ArrayValue) -> tuple[()]:
    array.close()
    return ()


def _array_op(
    name: str,
    infer: Callable[..., Spec | tuple[Spec, ...]],
    method: Kernel,
    flops: Callable[..., float] | None = free,
    *,
    effects: Callable[[Node], Effects] | None = None,
    host_inputs: Collection[int] = (),
    traits: Traits = KERNELS,
) -> Op:
    """An op whose kernel is a method of the array, which needs no attributes; `infer` gets the inputs behind it."""

    def checked(array: Spec, *inputs: Spec, **attrs: object) -> Spec | tuple[Spec, ...]:
        if array.dtype != VARIANT:
            raise DTypeError(f"the first input is the handle of a TensorArray; got {array}")
        return infer(*inputs, **attrs)

    return define(
        f"tensor_array_{name}",
        checked,
        lambda xp, **attrs: method,
        effects=effects,
        flops=flops,
        host_inputs=host_inputs,
        traits=traits,
    )


def _ints(values: Array) -> list[int]:
    if values.ndim != 1:
        raise ValueError(f"indices of a TensorArray are a vector; got shape {format_shape(values.shape)}")
    return [int(value) for value in values.tolist()]


# Two arrays made with equal arguments are not interchangeable: reading one must not use up the other.
TENSOR_ARRAY = define(
    "tensor_array", _new_spec, _new_kernel, conduct=NEW_EACH, flops=free, host_inputs=(0,), traits=KERNELS
)
WRITE = _array_op("write", _write_spec, lambda array, index, value: array.write(int(index), value), host_inputs=(1,))
READ = _array_op("read", _read_spec, lambda array, index: array.read(int(index)), host_inputs=(1,))
ELEMENT_SHAPE = _array_op(
    "element_shape",
    lambda index, *, element: Spec(int64, (element.rank,)),
    lambda array, index: array.element_shape(int(index)),
    host_inputs=(1,),
    traits=METADATA,
)
"""Op that returns the shape of an element without reading it, for uses of the shape alone; see
`compiler.shape_rules`.
"""
UNSTACK = _array_op("unstack", _unstack_spec, ArrayValue.unstack)
STACK = _array_op("stack", _stack_spec, ArrayValue.stack, flops=None)
SCATTER = _array_op(
    "scatter", _scatter_spec, lambda array, indices, values: array.scatter(_ints(indices), values), host_inputs=(1,)
)
GATHER = _array_op(
    "gather", _gather_spec, lambda array, indices: array.gather(_ints(indices)), flops=None, host_inputs=(1,)
)
PEEK = _array_op("peek", _gather_spec, lambda array, indices: array.peek(_ints(indices)), flops=None, host_inputs=(1,))
"""Op that gathers without freeing elements: of rows that read one array at their own places, others may come back
later.
"""
SPLIT = _array_op("split", _split_spec, ArrayValue.split, host_inputs=(2,))
_SIZES = replace(KERNELS, host_outputs=(0,))
CONCAT = _array_op("concat", _concat_spec, ArrayValue.concat, flops=None, traits=replace(KERNELS, host_outputs=(1,)))
SIZE = _array_op("size", lambda: Spec(int64, ()), lambda array: np.int64(array.current_size()), traits=_SIZES)
# Its own resource: never pruned from a body that runs, and not ordered with other nodes.
CLOSE = _array_op("close", lambda: (), _close, effects=lambda node: ((node, Access.WRITE),))


# -- the handle ------------------------------------------------------------------------------------------------------


class TensorArray(Handle):
    """An array of tensors, written and read element by element; a value like any other.

    Methods that write return the new array and leave this one as it is. Each element is written once on the way to any
    array; writing in a loop costs no copies. Arrays may be loop variables, branch results and parts of any nest. In the
    body of a loop, only `dtype` and `element_shape` as given here are known. Behind the loop, the shape that all writes
    have in common is known, too, and the number of elements if `size` is a constant.

    Args:
        dtype: of the elements.
        size: number of elements; an int or an integer scalar.
        dynamic_size: a write past the end makes the array longer. Negative indices always fail.
        element_shape: partial shape of every element. None: elements may differ in shape, unless they are stacked.
        clear_after_read: an element is freed when it is read, and a second read of it fails, be it by `read`,
            `gather`, `stack` or `concat`. (Elements written as one array are freed with the last of them.)
        name: of the node.

    Raises (in the run, as the cause of a KernelError):
        IndexError: an index below 0 or past the end.
        ValueError: a second write of an element, or a second read with `clear_after_read`; values that do not fit; a
            use after `close`.

    Reading an unwritten element gives zeros if the shape of an element is known in full. It may be known from
    `element_shape` or from the elements written on the way. Otherwise it fails with a ValueError.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     squares = af.TensorArray("int64", size=3)
    ...     for i in range(3):
    ...         squares = squares.write(i, i * i)
    ...     squares.stack()
    <Tensor tensor_array_stack:0 int64[3]>
    """

    __slots__ = ("_common", "_kind", "_length")
    _dropped = (
        "the array that a write at {} gave was dropped, so the write has no effect: a TensorArray does not change; "
        "write array = array.write(index, value)"
    )

    _kind: ArrayKind
    # Facts about this handle: size and elements. Behind a loop or branch they are read off the graph again.
    _length: int | Tensor | None
    _common: Common

    def __init__(
        self,
        dtype: DTypeLike,
        size: TensorLike = 0,
        dynamic_size: bool = False,
        element_shape: ShapeLike = None,
        clear_after_read: bool = True,
        *,
        name: str | None = None,
    ) -> None:
        kind = ArrayKind(as_dtype(dtype), as_shape(element_shape), bool(dynamic_size), bool(clear_after_read))
        if kind.dtype == VARIANT:
            raise DTypeError("elements of a TensorArray are numbers, booleans or strings; keep several arrays instead")
        tensor = as_tensor(size)
        fixed = default_value(tensor)
        if fixed is not None and fixed.shape == () and fixed.dtype.kind in "iu" and fixed < 0:
            raise ShapeError(f"the size of a TensorArray is not negative; got {fixed}")
        attrs = {
            "element": Spec(kind.dtype, kind.element_shape),
            "dynamic_size": kind.dynamic_size,
            "clear_after_read": kind.clear_after_read,
        }
        self._carry(apply(TENSOR_ARRAY, tensor, name=name, **attrs)[0])
        self._kind = kind
        self._length = _fixed_length(self.handle.node)
        self._common = None

    @classmethod
    def from_handle(cls, handle: Tensor, kind: ArrayKind, *, length: int | Tensor | None = None) -> Self:
        """The array that the tensor `handle` carries; `length` is its size, if known and fixed."""
        array = cls.__new__(cls)
        array._carry(handle)
        array._kind = kind
        array._length = length
        # Earlier writes are unknown, so elements may have any shape that the kind allows.
        array._common = (kind.element_shape,)  # None would say that no element is written
        return array

    @property
    def kind(self) -> ArrayKind:
        """Properties that this array shares with the arrays written from it."""
        return self._kind

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self._kind.dtype

    @property
    def element_shape(self) -> Shape:
        """Partial shape of the elements: the declared shape, refined by the writes seen here."""
        return element_shape(self._kind.element_shape, self._common)

    @property
    def dynamic_size(self) -> bool:
        """True if writes past the end make the array longer."""
        return self._kind.dynamic_size

    @property
    def clear_after_read(self) -> bool:
        """True if a read frees the element."""
        return self._kind.clear_after_read

    def __repr__(self) -> str:
        return f"<TensorArray {self._handle.name} {Spec(self.dtype, self.element_shape)}>"

    def __getitem__(self, index: object) -> NoReturn:
        raise GraphError(f"{self!r} has no indexing, because reading may use elements up; use .read(i) or .stack()")

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise GraphError(f"{self!r} cannot be assigned to; use array = array.write(i, value)")

    def __iter__(self) -> NoReturn:
        raise GraphError(f"{self!r} cannot be iterated over; use .read(i) for an element, .stack() for all")

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, index: TensorLike, value: TensorLike, *, name: str | None = None) -> TensorArray:
        """The array with element `index` written.

        Args:
            index: an int or an integer scalar.
            value: the element.
            name: of the node.

        Raises:
            DTypeError, ShapeError: `value` does not fit `dtype` or `element_shape`.
        """
        return self._written(WRITE, index, self._value(value), name=name)

    def unstack(self, values: TensorLike, *, name: str | None = None) -> TensorArray:
        """The array with element i set to ``values[i]``, for all elements; as many rows as the array has elements."""
        return self._written(UNSTACK, self._value(values), name=name)

    def scatter(self, indices: TensorLike, values: TensorLike, *, name: str | None = None) -> TensorArray:
        """The array with element ``indices[i]`` set to ``values[i]``; `indices` is a vector without repetitions.

        Args:
            indices: a vector of integers.
            values: one row for each.
            name: of the node.
        """
        values = self._value(values)
        return self._written(SCATTER, self._vector(indices), values, name=name)

    def split(self, values: TensorLike, lengths: TensorLike, *, name: str | None = None) -> TensorArray:
        """The array whose elements are pieces of `values` along its first axis.

        Args:
            values: of rank 1 or higher.
            lengths: of the pieces: a vector with as many items as the array has elements, that add up to the extent of
                the axis.
            name: of the node.
        """
        return self._written(SPLIT, self._value(values), self._vector(lengths), name=name)

    def identity(self, *, name: str | None = None) -> TensorArray:
        """The same array behind a new node, to hang control edges on."""
        return self._with_handle(identity(self.handle, name=name), self._common)

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, index: TensorLike, *, name: str | None = None) -> Tensor:
        """Element `index`."""
        return self._apply(READ, index, name=name, element=self._element())[0]

    def stack(self, *, name: str | None = None) -> Tensor:
        """All elements, joined along a new first axis. Of no elements, the element shape must be known in full."""
        return self._apply(STACK, name=name, element=self._element(), length=self._known_length())[0]

    def gather(self, indices: TensorLike, *, name: str | None = None) -> Tensor:
        """The elements at `indices` (a vector), joined along a new first axis."""
        return self._apply(GATHER, self._vector(indices), name=name, element=self._element())[0]

    def concat(self, *, name: str | None = None) -> Tensor:
        """Join all elements along their first axis, in which they may differ."""
        return self._apply(CONCAT, name=name, element=self._element())[0]

    def size(self, *, name: str | None = None) -> Tensor:
        """Number of elements, written or not: an int64 scalar."""
        return self._apply(SIZE, name=name)[0]

    def close(self, *, name: str | None = None) -> Node:
        """Free the elements; return the node that does so.

        Ordering: the node runs after every earlier use, in the same body, of this array and of the arrays that it was
            written from. Uses after it fail; order them with `control_dependencies`.
        """
        graph = graph_for(self.handle)
        handle = graph.import_tensor(self.handle)
        # Earlier arrays of the lineage share the elements. Nodes of inner bodies need no search: their branch or loop
        # in this graph is a user itself.
        states = {handle}
        while handle.node.graph is graph and handle.node.op in _WRITERS:
            handle = handle.node.inputs[0]
            states.add(handle)
        users = [node for node in graph.nodes if any(tensor in states for tensor in node.inputs)]
        node = graph.add_node(CLOSE, [graph.import_tensor(self.handle)], {}, (), name=name)
        for user in users:
            add_control_input(node, user)
        return node

    # -- inside --------------------------------------------------------------------------------------------------

    def _known_length(self) -> int | None:
        """Return the size if it is known; every later run that feeds it must then agree."""
        if isinstance(self._length, Tensor):
            value = static_value(self._length)
            return None if value is None else int(value)
        return self._length

    def _element(self) -> Spec:
        return Spec(self.dtype, self.element_shape)

    def _value(self, value: TensorLike) -> Tensor:
        """The value to be written, as a tensor; Python numbers, and lists of them, take the dtype of the array."""
        with graph_for(self.handle):  # the array's graph, even if only Python numbers are written
            tensor = as_tensor(value, self.dtype if type(value) in _WEAK else None)
        if tensor.dtype == VARIANT:
            raise GraphError("elements of a TensorArray are tensors; keep several arrays instead of arrays in an array")
        return tensor

    def _written(self, op: Op, *inputs: TensorLike, name: str | None) -> TensorArray:
        declared = Spec(self.dtype, self._kind.element_shape)
        handle = self._apply(op, *inputs, name=name, element=declared)[0]
        shape = merge(declared.shape, _WRITERS[op](handle.node))
        array = self._with_handle(handle, widen(self._common, shape))
        self._note_write(array)
        return array

    def _with_handle(self, handle: Tensor, common: Common) -> TensorArray:
        array = TensorArray.from_handle(handle, self._kind, length=self._length)
        array._common = common
        return array


_WRITERS = {WRITE: value_written, UNSTACK: rows_written(1), SCATTER: rows_written(2), SPLIT: pieces_written}
_WEAK = frozenset({bool, int, float, complex, str, list, tuple})


def _unpack(array: TensorArray) -> tuple[tuple[Hashable, ...], tuple[Tensor, ...], ArrayKind]:
    array._warn_of_dropped_writes()
    return ("handle",), (array.handle,), array.kind


def _pack(kind: Hashable, children: Sequence[Tensor]) -> TensorArray:
    assert isinstance(kind, ArrayKind)
    array = TensorArray.from_handle(children[0], kind)
    # A branch or loop returns a new handle: shape and length are read off the graph again.
    if isinstance(array.handle, Tensor):  # nests are also built of names and paths
        array._common, maker = elements_of(array.handle, kind.element_shape, _WRITERS)
        array._length = None if maker is None else _fixed_length(maker)
    return array


def _fixed_length(maker: Node) -> Tensor | None:
    """Return the size of a new array as a tensor, if it is a constant and the array does not grow."""
    if maker.op is not TENSOR_ARRAY or maker.attrs["dynamic_size"]:
        return None
    fixed = default_value(maker.inputs[0])
    return None if fixed is None or fixed.shape != () else maker.inputs[0]


nest.register(TensorArray, _unpack, _pack)


def array_node(array: Tensor) -> Node | None:
    """Return the node that makes a TensorArray, behind writes, branches and loops; None if that is not in sight."""
    while array.node.op is not TENSOR_ARRAY:
        node = array.node
        if isinstance(node, StructuredNode):
            sources = node.inputs if isinstance(node, WhileNode) else node.subgraphs[0].results
            array = sources[array.index]
        elif node.inputs and node.inputs[0].dtype == VARIANT:
            array = node.inputs[0]
        else:
            return None
    return array.node
