"""Index keys: the items between the brackets of ``x[...]``, as plain data.

A key is a tuple of entries, one per item; tensors in it become inputs of the node, named by number:

=====================  =====================================================================================
``("int", i)``         one position; drops the axis
``("slice", a, b, c)`` bounds and step: ints, None, or ``("input", n)`` for a scalar tensor
``("newaxis",)``       a new axis of extent 1
``("ellipsis",)``      all axes that the other entries leave; at most once
``("input", n)``       an integer tensor, or a boolean mask that spans as many axes as its rank
=====================  =====================================================================================

The meaning is NumPy's, advanced indexing included: integer tensors and masks broadcast together, and ints beside them
join in; their axes go where they stood, or to the front if a slice, newaxis or ellipsis stands between them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, as_tensor, is_symbolic
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import dtype_name, int64
from asyncflow.graph.values.shapes import Shape, broadcast, format_shape, is_compatible
from asyncflow.graph.values.spec import Spec, known_int
from asyncflow.values import Array, Index, Namespace

Entry: TypeAlias = tuple[Any, ...]
Key: TypeAlias = tuple[Entry, ...]

ELLIPSIS: Entry = ("ellipsis",)
NEWAXIS: Entry = ("newaxis",)
WHOLE: Entry = ("slice", None, None, None)
"""Takes an axis whole."""


def along(axis: int, entry: Entry) -> Key:
    """The key that indexes one axis, of a value of whatever rank."""
    # From the end behind an ellipsis, so that the rank need not be known.
    return (ELLIPSIS, entry, *(WHOLE,) * (-1 - axis)) if axis < 0 else (*(WHOLE,) * axis, entry)


# -- from Python -----------------------------------------------------------------------------------------------------


def encode(key: object) -> tuple[Key, tuple[Tensor, ...]]:
    """Encode `key` as entries, and return the tensors in it, in the order of their numbers.

    Raises:
        GraphError: an item that is no index.
        DTypeError: an index tensor that holds neither integers nor booleans.
    """
    tensors: list[Tensor] = []
    entries = tuple(_entry(item, tensors) for item in (key if isinstance(key, tuple) else (key,)))
    if entries.count(ELLIPSIS) > 1:
        raise GraphError("an index may hold only one ellipsis (...)")
    return entries, tuple(tensors)


def _entry(item: object, tensors: list[Tensor]) -> Entry:
    if item is None:
        return NEWAXIS
    if item is Ellipsis:
        return ELLIPSIS
    if isinstance(item, slice):
        return ("slice", *(_bound(bound, tensors) for bound in (item.start, item.stop, item.step)))
    # A boolean is an int to Python, and a mask to NumPy; an array of rank 0 is an advanced index, not a position.
    if not (is_symbolic(item) or isinstance(item, bool | np.bool_ | np.ndarray)) and hasattr(item, "__index__"):
        return ("int", operator.index(item))
    return _input(_index_tensor(item), tensors)


def _index_tensor(item: TensorLike) -> Tensor:
    if isinstance(item, list) and not item:  # NumPy makes floats of it
        item = np.zeros(0, dtype=int64)
    tensor = as_tensor(item)
    if tensor.dtype.kind not in "biu":
        raise DTypeError(
            f"an index must be ints, slices, None, ..., or tensors of integers or booleans; got {item!r} of dtype "
            f"{dtype_name(tensor.dtype)}"
        )
    return tensor


def _bound(bound: object, tensors: list[Tensor]) -> int | Entry | None:
    if bound is None:
        return None
    if is_symbolic(bound):
        tensor = as_tensor(bound)
        if tensor.dtype.kind not in "iu" or tensor.shape not in (None, ()):
            raise DTypeError(f"a slice bound must be an integer scalar, got {tensor!r}")
        return _input(tensor, tensors)
    if not hasattr(bound, "__index__"):
        raise GraphError(f"a slice bound must be an int, None or an integer scalar tensor, got {bound!r}")
    return operator.index(bound)


def _input(tensor: Tensor, tensors: list[Tensor]) -> Entry:
    tensors.append(tensor)
    return ("input", len(tensors) - 1)


# -- to an index at run time -----------------------------------------------------------------------------------------


ROW_RANGE: Final[Key] = (("slice", ("input", 0), ("input", 1), None),)
"""``x[start:stop]``, as loops over sets of rows read them: worth a short way."""


def compile_key(key: Key) -> tuple[Index | None, Callable[..., Index]]:
    """``(static, build)``: the whole index if no tensor is in it, else None; and a function of the tensors' values."""
    if not any(_inputs_of(entry) for entry in key):
        index = tuple(_static(entry) for entry in key)
        return index, lambda: index
    # Fast paths for keys of inner loops: only tensors, a range of rows, a single entry.
    if key == tuple(("input", number) for number in range(len(key))):
        return None, lambda *values: values
    if key == ROW_RANGE:
        return None, slice
    parts = [_compile_entry(entry) for entry in key]
    if len(parts) == 1:
        return None, lambda *values: parts[0](values)
    return None, lambda *values: tuple([part(values) for part in parts])


def _inputs_of(entry: Entry) -> bool:
    return entry[0] == "input" or any(isinstance(bound, tuple) for bound in entry[1:])


def _static(entry: Entry) -> Index:
    match entry:
        case ("int", position):
            return position
        case ("newaxis",):
            return None
        case ("ellipsis",):
            return Ellipsis
        case _:
            return slice(*entry[1:])


def _compile_entry(entry: Entry) -> Callable[[Sequence[Array]], Index]:
    """A function from the tensors' values to one item of the index."""
    if not _inputs_of(entry):
        item = _static(entry)
        return lambda values: item
    if entry[0] == "input":
        return operator.itemgetter(entry[1])
    start, stop, step = (_compile_bound(bound) for bound in entry[1:])
    return lambda values: slice(start(values), stop(values), step(values))


def _compile_bound(bound: int | Entry | None) -> Callable[[Sequence[Array]], Index]:
    return operator.itemgetter(bound[1]) if isinstance(bound, tuple) else lambda values: bound


# -- on devices ------------------------------------------------------------------------------------------------------


def host_indices(key: Key, indices: Sequence[Spec]) -> list[int] | None:
    """Numbers of the tensors whose values indexing with `key` reads: bounds of slices, and masks.

    None if `x` has to be there, too: a single boolean, which only NumPy takes for an index.
    """
    masks = [entry[1] for entry in key if entry[0] == "input" and indices[entry[1]].dtype.kind == "b"]
    if not all(indices[number].rank for number in masks):
        return None
    bounds = [bound[1] for entry in key for bound in entry[1:] if isinstance(bound, tuple)]
    return [*masks, *bounds]


def device_index(xp: Namespace, index: Index) -> Index:
    """`index` with the positions of its true elements for each mask, which the host has; NumPy's arrays become `xp`'s.

    CuPy would count the elements itself, and wait for the result.
    """
    items: list[Index] = []
    for item in index if isinstance(index, tuple) else (index,):
        if not isinstance(item, np.ndarray):
            items.append(item)
        elif item.dtype.kind == "b":
            items.extend(xp.asarray(positions) for positions in item.nonzero())
        else:
            items.append(xp.asarray(item))
    return tuple(items)


def is_flag(value: Array | Tensor) -> bool:
    """Return True if a tensor in a key is a single boolean."""
    return bool(value.ndim == 0 and value.dtype.kind == "b")


# -- shape rule ------------------------------------------------------------------------------------------------------


def is_basic(key: Key, indices: Sequence[Spec]) -> bool:
    """Return True if the key holds only ints, slices, new axes and scalar integer tensors: no element is named
    twice.
    """
    named = [indices[entry[1]] for entry in key if entry[0] == "input"]
    return all(x.shape == () and x.dtype.kind in "iu" for x in named)


def indexed_shape(x: Shape, key: Key, indices: Sequence[Spec]) -> Shape:
    """The shape of ``x[key]``; None where a rank that decides it is not known.

    Raises:
        ShapeError: too many indices, an int out of range, a step of 0, or masks and indices that do not fit.
    """
    spans = [_span(entry, indices) for entry in key]
    _check_steps(key)  # also where no rank is known
    if x is None or None in spans:
        return None
    rest = len(x) - sum(span for span in spans if span is not None)
    if rest < 0:
        raise ShapeError(f"too many indices: {len(x) - rest} for a value of shape {format_shape(x)}")
    return _walked(x, key, indices, advanced=not is_basic(key, indices)).result()


def place_of_positions(x: tuple[int | None, ...], key: Key, indices: Sequence[Spec]) -> tuple[int, bool]:
    """Return the place of the positions' axes in ``x[key]``, and True if other entries stand between them.

    Scalars among them count as arrays do. The key fits `x`.
    """
    walk = _walked(x, key, indices, advanced=True)
    return walk.at or 0, walk.apart


def _walked(x: tuple[int | None, ...], key: Key, indices: Sequence[Spec], *, advanced: bool) -> _Walk:
    rest = len(x) - sum(_span(entry, indices) or 0 for entry in key)
    walk = _Walk(x, indices, advanced=advanced)
    for entry in key if ELLIPSIS in key else (*key, ELLIPSIS):  # axes that a key leaves out are taken whole
        walk.take(entry, rest if entry == ELLIPSIS else _span(entry, indices) or 0)
    return walk


def _span(entry: Entry, indices: Sequence[Spec]) -> int | None:
    """Number of axes that an entry uses up; None if unknown."""
    if entry in (NEWAXIS, ELLIPSIS):
        return 0
    if entry[0] != "input":
        return 1
    index = indices[entry[1]]
    if index.dtype.kind == "b":
        return index.rank
    return None if index.rank is None else 1


def _check_steps(key: Key) -> None:
    if any(entry[0] == "slice" and entry[3] == 0 for entry in key):
        raise ShapeError("a slice step cannot be 0")


class _Walk:
    """A walk through a key from left to right that collects the result's axes.

    Invariant: ``axis`` is the next axis of the indexed value that no entry has used.
    """

    __slots__ = ("advanced", "apart", "at", "axis", "broken", "dims", "indices", "joined", "shape")

    def __init__(self, shape: tuple[int | None, ...], indices: Sequence[Spec], *, advanced: bool) -> None:
        self.shape = shape
        self.indices = indices
        self.advanced = advanced
        self.axis = 0
        self.dims: list[int | None] = []
        self.joined: list[Shape] = []
        self.at: int | None = None
        """Place in `dims` of the axes of the advanced indices."""
        self.broken = False
        """True after another entry behind an advanced index."""
        self.apart = False
        """True after one more advanced index behind that."""

    def take(self, entry: Entry, span: int) -> None:
        """Add the axes that `entry`, which uses up `span` axes, gives to the result."""
        extents = self.shape[self.axis : self.axis + span]
        if entry[0] in ("int", "input"):
            self._join(self._index_shape(entry, extents))
        else:
            if self.at is not None:
                self.broken = True
            self.dims += _kept(entry, extents, self.indices)
        self.axis += span

    def _index_shape(self, entry: Entry, extents: tuple[int | None, ...]) -> Shape:
        if entry[0] == "int":
            _check_position(entry[1], extents[0], self.axis)
            return ()
        index = self.indices[entry[1]]
        if index.dtype.kind != "b":
            return index.shape
        if not is_compatible(index.shape, extents):
            seen = f"{format_shape(index.shape)} for axes of extent {format_shape(extents)}"
            raise ShapeError(f"a boolean mask must have the shape of the axes it selects from, got {seen}")
        return (None,)

    def _join(self, shape: Shape) -> None:
        if not self.advanced:
            return
        if self.at is None:
            self.at = len(self.dims)
        elif self.broken:  # NumPy's rule: axes of advanced indices that stand apart go to the front
            self.at, self.apart = 0, True
        self.joined.append(shape)

    def result(self) -> Shape:
        """The collected shape."""
        if not self.advanced or self.at is None:
            return tuple(self.dims)
        joined = broadcast(self.joined)
        assert joined is not None
        return (*self.dims[: self.at], *joined, *self.dims[self.at :])


def _check_position(position: int, extent: int | None, axis: int) -> None:
    if extent is not None and not -extent <= position < extent:
        raise ShapeError(f"index {position} is out of range for axis {axis} of extent {extent}")


def _kept(entry: Entry, extents: tuple[int | None, ...], indices: Sequence[Spec]) -> tuple[int | None, ...]:
    """Extents that remain of the axes a slice, ellipsis or newaxis stands for."""
    if entry == NEWAXIS:
        return (1,)
    if entry == ELLIPSIS:
        return extents
    (extent,) = extents
    bounds = [known_int(indices[bound[1]]) if isinstance(bound, tuple) else bound for bound in entry[1:]]
    is_told = all(bound is not None or given is None for bound, given in zip(bounds, entry[1:], strict=True))
    if extent is None or not is_told:
        return (None,)
    return (len(range(*slice(*bounds).indices(extent))),)
