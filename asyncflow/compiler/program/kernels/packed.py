"""A chain as kernels of our own, one for each memory layout of its inputs: a launch is one call of the driver.

A call with inputs of new shapes or strides finds all that a launch needs besides addresses. Later calls write the
addresses into a record of parameters that exists already, and hand it to the driver.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from asyncflow.compiler.program.kernels.chains import Chain, Lengths, Read
from asyncflow.compiler.program.kernels.kernel_text import (
    OPTIONS,
    Form,
    Lie,
    body_of,
    kernel_name,
    packed_source,
    parameters_of,
)
from asyncflow.compiler.program.kernels.layouts import (
    Shapes,
    collapsed,
    looked_at,
    loop_of,
    rows_of,
    shapes_of,
    steps_of,
    stored_at,
    without_values,
)
from asyncflow.compiler.program.kernels.row_text import LONGEST_ROW, THREADS, block_of, lanes_of
from asyncflow.devices.protocol import Placed
from asyncflow.errors import InternalError

if TYPE_CHECKING:
    from asyncflow.devices.cuda.kernels import KernelLaunches, LaunchRecord, PackedKernel
    from asyncflow.graph.values.dtypes import DType
    from asyncflow.values import Array, Kernel, Value

MOST_BLOCKS: Final = 1 << 16
"""Kernels of more elements go on in steps of all threads."""

MOST_LAYOUTS: Final = 256
"""Number of shapes and strides of the inputs of a chain that are remembered."""

_MOST_ELEMENTS: Final = 1 << 56
"""Beyond that, CuPy makes arrays without memory for some shapes."""

_SHORT: Final = 1 << 30
"""Numbers of elements, and strides, below which numbers of 32 bits are enough, also behind the last step."""


class _Address(NamedTuple):
    """An array of a launch.

    Attributes:
        slot: of its address among the parameters.
        source: number of the input or output.
        offset: in bytes, of the first element that is read or written.
    """

    slot: int
    source: int
    offset: int


class _Scalar(NamedTuple):
    """A scalar of a launch: its slot, the number of the input, and what makes the bits for the slot."""

    slot: int
    source: int
    bits: Callable[[Placed], int]


@dataclass(slots=True, eq=False)
class _Launch:
    """A launch for inputs of certain shapes and strides.

    Attributes:
        kernel: the kernel; None where there is nothing to compute.
        shapes: of the outputs.
        blocks: number of blocks of threads.
        threads: number of threads of a block.
        reads: arrays to read.
        numbers: scalars.
        stores: arrays to write.
        values: all parameters, with 0 for addresses and scalars.
        records: records not in use at present; two threads never write to the same one.
    """

    kernel: PackedKernel | None
    shapes: Shapes
    blocks: int = 0
    threads: int = THREADS
    reads: Sequence[_Address] = ()
    numbers: Sequence[_Scalar] = ()
    stores: Sequence[_Address] = ()
    values: Sequence[int] = ()
    records: list[LaunchRecord] = field(default_factory=list)


class PackedChain:
    """The kernel of a `fused` node on a device that launches kernels of our own.

    Attributes:
        takes_out: True if a call can be given the array to write to.
    """

    __slots__ = (
        "_body",
        "_chain",
        "_dtypes",
        "_launches",
        "_layouts",
        "_moves",
        "_name",
        "_ndarray",
        "_one_by_one",
        "_outputs",
        "takes_out",
    )

    def __init__(self, chain: Chain, launches: KernelLaunches, one_by_one: Kernel) -> None:
        self._chain = chain
        self._launches = launches
        self._ndarray = launches.ndarray
        self._name = kernel_name(chain)
        self._one_by_one = one_by_one
        self.takes_out = len(chain.outputs) == 1
        self._body = body_of(chain)
        self._moves = chain.has_views or chain.has_ends
        self._dtypes = [np.dtype(spec.dtype) for spec in chain.inputs]
        self._outputs = [np.dtype(chain.specs[output].dtype) for output in chain.outputs]
        self._layouts: dict[tuple[tuple[Lengths, Lengths] | None, ...], _Launch | None] = {}

    def __call__(self, *inputs: Placed, out: Placed = None) -> Value:
        """Launch the kernel, or the ops one by one where one kernel cannot do it; return the outputs.

        Args:
            inputs: arrays of the card, and scalars of the host.
            out: for the only output, an array in C order that no input looks into; a new one is made if it is None, or
                has another shape.
        """
        ndarray = self._ndarray
        key = tuple([(value.shape, value.strides) if type(value) is ndarray else None for value in inputs])
        try:
            layout = self._layouts[key]
        except KeyError:
            layout = self._found(inputs, key)
        if layout is None:
            return self._one_by_one(*inputs)
        # Check the strides, unknown until now: in another order, elements would be at other places.
        if out is not None and out.shape == layout.shapes[0] and out.flags.c_contiguous:
            outputs = [out]
        else:
            outputs = [ndarray(shape, dtype) for shape, dtype in zip(layout.shapes, self._outputs, strict=True)]
        if layout.kernel is not None:
            self._launch(layout, inputs, outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _launch(self, layout: _Launch, inputs: Sequence[Placed], outputs: Sequence[Placed]) -> None:
        kernel, dtypes = layout.kernel, self._dtypes
        assert kernel is not None
        # Another thread may launch the same kernel meanwhile, with its own record.
        record = layout.records.pop() if layout.records else kernel.record(layout.values)
        values = record.values
        for slot, source, offset in layout.reads:
            array = inputs[source]
            if array.dtype is not dtypes[source] and array.dtype != dtypes[source]:
                raise self._other_dtype(source, array.dtype)
            values[slot] = array.data.ptr + offset
        for slot, source, offset in layout.stores:
            values[slot] = outputs[source].data.ptr + offset
        for slot, source, bits in layout.numbers:
            values[slot] = bits(inputs[source])
        kernel.launch(layout.blocks, layout.threads, record)
        layout.records.append(record)

    def _other_dtype(self, source: int, dtype: DType) -> InternalError:
        return InternalError(f"{self._name}: input {source} should be {self._dtypes[source]}, and is {dtype}")

    # -- once for inputs of certain shapes and strides -----------------------------------------------------------

    def _found(self, inputs: Sequence[Placed], key: tuple[tuple[Lengths, Lengths] | None, ...]) -> _Launch | None:
        for value, place in zip(inputs, key, strict=True):
            if place is None and np.ndim(value):
                raise InternalError(f"{self._name}: an array of the host is an operand")
        layout = self._layout(key) if any(key) else None  # only numbers: no operand is on the device
        # Drop all at once: finding one again takes microseconds, but tracking the order of use would slow every call.
        if len(self._layouts) >= MOST_LAYOUTS:
            self._layouts.clear()
        self._layouts[key] = layout
        return layout

    def _layout(self, key: Sequence[tuple[Lengths, Lengths] | None]) -> _Launch | None:
        """Return the launch; None if one kernel cannot do it."""
        chain = self._chain
        # The common case, found without NumPy: it occurs for each length of ragged batches and growing caches.
        if (loop := self._common_shape(key)) is not None:
            lies: list[Lie] = ["number" if key[read.source] is None else "flat" for read in self._body.reads]
            flat: list[Lie] = ["flat"] * len(self._outputs)
            size = math.prod(loop)
            form = Form(1, tuple(lies), tuple(flat), size >= _SHORT)
            offsets = [0] * (len(lies) + len(flat))
            return self._launched(form, (loop,) * len(flat), (size,), (), offsets, (size,))
        shapes = shapes_of(chain, tuple(() if place is None else place[0] for place in key))
        loop = None if shapes is None else loop_of(chain, shapes)
        if shapes is None or loop is None:
            return None
        size = math.prod(loop)
        if size > _MOST_ELEMENTS:
            return None
        outputs = tuple([shapes[output] for output in chain.outputs])
        # A loop over no elements would leave sums unwritten.
        if not size:
            return None if chain.reduced else _Launch(None, outputs)
        views = [self._view(read, key[read.source], shapes) for read in self._body.reads]
        steps = [
            None if view is None else _in_elements(np.broadcast_to(view, loop).strides, view.itemsize) for view in views
        ]
        places = stored_at(chain, shapes)
        own, own_offsets = [strides for strides, _ in places], [offset for _, offset in places]
        if any(step is None and view is not None for step, view in zip(steps, views, strict=True)):
            return None
        # Fewer axes cost fewer divisions an element.
        extents, strides = collapsed(loop, [*(step or (0,) * len(loop) for step in steps), *own])
        form = _form(extents, strides, [view is None for view in views], size)
        sizes: Lengths = (size,)
        if chain.reduced:
            sizes = rows_of(chain, loop)
            # For long rows, one block would work while the card's other blocks are idle.
            if sizes[1] > LONGEST_ROW:
                return None
            form = form._replace(lanes=lanes_of(sizes[1]))
        nbytes = [self._outputs[store.output].itemsize for store in chain.stores]
        offsets = [0 if view is None else _offset(view) for view in views]
        offsets += [offset * itemsize for offset, itemsize in zip(own_offsets, nbytes, strict=True)]
        return self._launched(form, outputs, extents, strides, offsets, sizes)

    def _common_shape(self, key: Sequence[tuple[Lengths, Lengths] | None]) -> Lengths | None:
        """Return the shape of all arrays, if each is the loop's and in C order, as in most calls; None if not."""
        arrays = [place for place in key if place is not None]
        shape, size = arrays[0][0], math.prod(arrays[0][0])
        if self._moves or not 0 < size <= _MOST_ELEMENTS or any(place[0] != shape for place in arrays):
            return None
        for place, dtype in zip(key, self._dtypes, strict=True):
            if place is not None and place[1] != steps_of(shape, dtype.itemsize):
                return None
        # An output that depends only on numbers would have no axes.
        depend = all(any(key[source] is not None for source in sources) for sources in self._chain.sources)
        return shape if depend else None

    def _launched(
        self,
        form: Form,
        outputs: Shapes,
        extents: Lengths,
        strides: Sequence[Lengths],
        offsets: Sequence[int],
        sizes: Lengths,
    ) -> _Launch:
        """Return a launch of this form.

        Args:
            form: of the kernel.
            outputs: the shapes of the outputs.
            extents: of the loop.
            strides: of each operand along each axis of the loop, in elements; empty if none has its own.
            offsets: of each operand, in bytes: where in its array the first element is.
            sizes: the number of elements, or of rows and of the elements in a row.
        """
        chain, reads, numbers, n_reads = self._chain, [], [], len(form.reads)
        for slot, (read, lie) in enumerate(zip(self._body.reads, form.reads, strict=True)):
            if lie == "number":
                numbers.append(_Scalar(slot, read.source, bits_of(self._dtypes[read.source])))
            else:
                reads.append(_Address(slot, read.source, offsets[slot]))
        stores = [_Address(slot, store.output, offsets[slot]) for slot, store in enumerate(chain.stores, start=n_reads)]
        # Rows are contiguous in the results of reductions, whatever the shapes.
        stores += [
            _Address(slot, reduced.output, 0) for slot, reduced in enumerate(chain.reduced, start=n_reads + len(stores))
        ]
        values = [*([0] * (n_reads + len(stores))), *parameters_of(form, extents, strides, sizes)]
        threads = block_of(form.lanes)
        blocks = -(-sizes[0] * max(form.lanes, 1) // threads)
        kernel = self._launches.kernel(packed_source(chain, form), self._name, OPTIONS)
        return _Launch(kernel, outputs, min(blocks, MOST_BLOCKS), threads, reads, numbers, stores, values)

    def _view(self, read: Read, place: tuple[Lengths, Lengths] | None, shapes: Shapes) -> Array | None:
        """The view of an input that is read, as an array without values; None for a number."""
        if place is None:
            return None
        return looked_at(self._chain, read, without_values(*place, self._dtypes[read.source].itemsize), shapes)


def _in_elements(strides: Lengths, itemsize: int) -> Lengths | None:
    """Return strides in elements; None if they are not whole numbers of them."""
    return None if any(step % itemsize for step in strides) else tuple(step // itemsize for step in strides)


def _offset(view: Array) -> int:
    """Return how far the first element of a view is from that of the array that it looks into, in bytes."""
    base: Placed = view
    while getattr(base, "base", None) is not None:
        base = base.base
    return int(view.__array_interface__["data"][0] - base.__array_interface__["data"][0])


def _form(extents: Lengths, strides: Sequence[Lengths], are_numbers: Sequence[bool], size: int) -> Form:
    flat = steps_of(extents, 1)
    lies: list[Lie] = []
    for index, steps in enumerate(strides):
        if index < len(are_numbers) and are_numbers[index]:
            lies.append("number")
        elif steps == flat:
            lies.append("flat")
        else:
            lies.append("strided" if any(steps) else "one")
    reach = max(sum(abs(step) * extent for step, extent in zip(steps, extents, strict=True)) for steps in strides)
    n_reads = len(are_numbers)
    return Form(len(extents), tuple(lies[:n_reads]), tuple(lies[n_reads:]), max(size, reach) >= _SHORT)


def bits_of(dtype: DType) -> Callable[[Placed], int]:
    """Return a function that gives the bits of a scalar, as a kernel's parameter of this dtype has them."""
    if dtype.kind == "b":
        return bool
    if dtype.kind in "iu":
        mask = (1 << 8 * dtype.itemsize) - 1
        return lambda value: int(value) & mask
    pack, rounded = struct.Struct("<d" if dtype.itemsize == 8 else "<f").pack, dtype.type
    return lambda value: int.from_bytes(pack(float(rounded(value))), "little")
