"""Functions that add nodes: `apply` an op, turn values `as_tensor`, `placeholder`, `constant`, `identity`, `group`."""

from __future__ import annotations

import inspect
import sys
from types import CoroutineType
from typing import Any, Protocol, TypeAlias, TypeGuard, cast, overload

import numpy as np

from asyncflow.errors import DTypeError, GraphError, a_kind, brief, told, user_location
from asyncflow.graph import builtin
from asyncflow.graph.frames import frame_of
from asyncflow.graph.graph import Graph, current_graph, encloses, reopened
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Op
from asyncflow.graph.resource import Resource
from asyncflow.graph.structured import StructuredNode
from asyncflow.graph.values.dtypes import VARIANT, DType, DTypeLike, as_dtype, is_supported, string
from asyncflow.graph.values.operators import Operators
from asyncflow.graph.values.shapes import ShapeLike, as_shape
from asyncflow.graph.values.spec import Spec
from asyncflow.values import Array


class SupportsTensor(Protocol):
    """A value that converts to a tensor, such as a `Variable`; `is_symbolic` tests for it."""

    def __asyncflow_tensor__(self) -> Tensor:
        """The tensor, built in the current graph."""


TensorLike: TypeAlias = object
"""A Tensor, a Variable, a NumPy array or scalar, a Python number, bool or string, or a nested list of those numbers.

Arrays of other libraries are read as NumPy reads them. One of CuPy's or PyTorch's in the memory of a card is copied to
the host, after what its library's current stream has been given; that blocks, as graphs are built before they run.
"""

_CARD_MEMORY = frozenset({2, 13})
"""DLPack's numbers of memory that NumPy cannot read: a card's, and what CUDA moves by itself."""


def graph_for(*values: object, outside: str = "") -> Graph:
    """The graph new nodes join: the one being built, or else the root graph of the tensors given.

    Args:
        values: among which there may be tensors.
        outside: advice for code without a graph, for the error.

    Raises:
        GraphError: there is neither.
    """
    graph = current_graph()
    if graph is not None:
        return graph
    for value in values:
        if isinstance(value, Tensor):
            return value.graph.root
    hint = f"; outside of graphs it is `{outside}`" if outside else ""
    raise GraphError(f"no graph is being built here; write `with af.Graph() as graph:` around this code{hint}")


def apply(op: Op, *inputs: TensorLike, name: str | None = None, **attrs: Any) -> tuple[Tensor, ...]:
    """Adds a node to the current graph and returns its outputs.

    Args:
        op: what the node does.
        inputs: tensors, and values that become constants.
        name: of the node; None takes the op's.
        attrs: static arguments, as the op's shape rule takes them.

    Raises:
        ShapeError, DTypeError: the op does not accept the inputs; the message names the op and its inputs.
        GraphError: an input belongs to another graph or leaked out of a branch or loop.
    """
    graph = current_graph()
    if graph is None:
        with graph_for(*inputs):  # constants among the inputs join the graph of the tensors
            return apply(op, *inputs, name=name, **attrs)
    tensors: list[Tensor] = []
    specs: list[Spec] = []
    for value in inputs:
        tensor = graph.import_tensor(value if isinstance(value, Tensor) else as_tensor(value))
        tensors.append(tensor)
        specs.append(tensor.spec)
    try:
        made = op.infer(*specs, **attrs)
    except GraphError as error:
        seen = ", ".join(f"{tensor.name} {tensor.spec}" for tensor in tensors)
        raise type(error)(f"{op.name}: {error.reason}\n  inputs   {seen or 'none'}") from None
    if not graph.frames and op.name != "enter":
        return graph.add_node(op, tensors, attrs, made, name=name).outputs
    # A hand-written loop: check its frames while it is built.
    sources = [*(tensor.node for tensor in tensors), *graph.scope.controls]
    for source in sources:
        _record_frame(graph, source)
    frame = frame_of(op.name, name or op.name, sources, graph.frames, user_location())
    node = graph.add_node(op, tensors, attrs, made, name=name)
    graph.frames[node] = frame
    return node.outputs


def _record_frame(graph: Graph, node: Node) -> None:
    """Note the frame of a node that was not built by `apply`, such as a group, and of earlier such nodes."""
    unknown = [node] if node not in graph.frames else []
    while unknown:
        latest = unknown[-1]
        sources = (*(tensor.node for tensor in latest.inputs), *latest.control_inputs)
        earlier = [source for source in sources if source not in graph.frames]
        if earlier:
            unknown.extend(earlier)
        else:
            graph.frames[latest] = frame_of(latest.op.name, latest.name, sources, graph.frames, latest.location)
            unknown.pop()


def is_symbolic(value: object) -> TypeGuard[Tensor | SupportsTensor]:
    """Return True if `value` is a tensor or converts to one, such as a `Variable`."""
    # Check the type: `isinstance` with a protocol takes longer than the rest of making a constant.
    return isinstance(value, Tensor) or hasattr(type(value), "__asyncflow_tensor__")


@overload
def symbolic(value: Tensor | SupportsTensor) -> Tensor: ...
@overload
def symbolic(value: TensorLike) -> TensorLike: ...
def symbolic(value: TensorLike) -> TensorLike:
    """The tensor that `value` is or reads as; else `value` itself."""
    if isinstance(value, Tensor) or not is_symbolic(value):
        return value
    return cast("SupportsTensor", value).__asyncflow_tensor__()


def as_tensor(value: TensorLike, dtype: DTypeLike | None = None) -> Tensor:
    """`value` as a tensor of the current graph; a constant unless it already is symbolic.

    Raises:
        DTypeError: a value that no tensor can hold, or a tensor of another dtype than asked for.
        GraphError: a ragged list.
    """
    value = symbolic(value)
    if not isinstance(value, Tensor):
        return constant(value, dtype)
    if dtype is not None and value.dtype != as_dtype(dtype):
        raise DTypeError(f"{value!r} is not of dtype {as_dtype(dtype)}; convert it with af.astype")
    return graph_for(value).import_tensor(value)


def constant(value: TensorLike, dtype: DTypeLike | None = None, *, name: str | None = None) -> Tensor:
    """A value fixed when the graph is built.

    Args:
        value: a number, bool, string, array, or nested lists of numbers. Copied; from the memory of a card, too, for
            which it waits.
        dtype: None takes NumPy's choice (Python floats give float64, ints int64).

    Raises:
        DTypeError: the value cannot be held, or does not fit `dtype` exactly in kind.
        GraphError: nested lists are ragged, or contain tensors (use af.stack).
    """
    array = as_array(value, None if dtype is None else as_dtype(dtype))
    array.flags.writeable = False
    return apply(builtin.CONSTANT, name=name, value=array)[0]


def as_array(value: TensorLike, dtype: DType | None) -> Array:
    """A fresh NumPy array of `value`; refuses what a tensor cannot hold."""
    try:
        return _as_array(value, dtype)
    except RecursionError:
        kind = a_kind(type(value))
        raise GraphError(f"cannot make a tensor of {kind} that is nested too deep, or contains itself") from None


def _as_array(value: TensorLike, dtype: DType | None) -> Array:
    if isinstance(value, Operators):
        raise GraphError(f"{value!r} already is a tensor, or converts to one: use it, or convert it with af.astype")
    if is_masked(value):
        raise GraphError("a masked array would lose its mask; fill it first, with .filled(value)")
    is_text = _is_text(value)
    try:
        # Else NumPy would make each string as long as the longest one.
        array = np.array(_on_host(value), string if is_text else None)
    except GraphError:  # raised by a tensor, alone or in a list: it has no value
        _refuse_tensors(value)
        raise
    except (ValueError, OverflowError) as error:
        _refuse_tensors(value)
        is_ragged = "inhomogeneous" in str(error)  # NumPy's word, in a message about its internals
        reason = "its nested lists differ in length or depth; pad them to one shape" if is_ragged else error
        raise GraphError(f"cannot make a tensor of {brief(value)}: {reason}") from error
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # an object's `__array__`, `__len__` and the like may raise anything
        raise DTypeError(
            f"cannot make a tensor of {a_kind(type(value))}: NumPy cannot read it ({told(error)}); give a NumPy "
            "array of its values"
        ) from error
    if array.dtype.kind in "UT" and not is_text:
        if isinstance(value, list | tuple) and not _only_strings(value):
            raise DTypeError(f"cannot make a tensor of {brief(value)}: strings and other values do not mix")
        array = array.astype(string)
    if not is_supported(array.dtype) or VARIANT in (array.dtype, dtype):
        if array.dtype == VARIANT:
            _refuse_tensors(value)
            _explain_objects(value, array)
        raise DTypeError(
            f"cannot make a tensor of {brief(value)}: NumPy gives dtype {array.dtype}; tensors hold booleans, "
            f"integers, floats, complex numbers or strings"
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array if dtype is None or array.dtype == dtype else _convert(array, value, dtype)


def is_masked(value: object) -> bool:
    """Return True if `value` is a masked array, whose mask NumPy would silently lose."""
    # No masked array exists before `numpy.ma` is imported, and an import here would take 10 ms.
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(value, masked.MaskedArray)


def _on_host(value: Any) -> object:
    """`value`; of an array in a card's memory a copy that NumPy reads, made by its library.

    Raises:
        GraphError: it records gradients.
    """
    if isinstance(value, np.ndarray | np.generic) or not hasattr(value, "__dlpack_device__"):
        return value
    if getattr(value, "requires_grad", False):
        raise GraphError(f"cannot make a tensor of {a_kind(type(value))} that requires grad; give its .detach()")
    if value.__dlpack_device__()[0] not in _CARD_MEMORY:
        return value
    bring = getattr(value, "get", None) or getattr(value, "cpu", None)  # CuPy's, and PyTorch's
    return value if bring is None else bring()


def _explain_objects(value: TensorLike, array: Array) -> None:
    """Raise the error that explains a common mistake in `value`, if there is one."""
    items = list(array.flat)
    refuse_coroutines(*items)
    if items and all(isinstance(item, int) for item in items):
        raise DTypeError(
            f"cannot make a tensor of {brief(value)}: it does not fit int64 or uint64; write it as a float if digits "
            f"may be lost"
        )


def refuse_coroutines(*values: object) -> None:
    """Refuses coroutines, which are closed, and coroutine functions, where a value is expected.

    Raises:
        GraphError: there is one among `values`.
    """
    coroutines = [value for value in values if inspect.iscoroutine(value)]
    hints = [_instead_of(coroutine) for coroutine in coroutines]
    for coroutine in coroutines:
        coroutine.close()  # never awaited: Python would warn otherwise
    if coroutines:
        raise GraphError(f"{coroutines[0].__qualname__}(...) is a coroutine, not a value: {hints[0]}")
    for value in values:
        if inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value):
            name = getattr(value, "__qualname__", repr(value))
            raise GraphError(f"{name} is a coroutine function; {_MAKE_AN_OP}")


def _instead_of(coroutine: CoroutineType[Any, Any, Any]) -> str:
    owner = None if coroutine.cr_frame is None else coroutine.cr_frame.f_locals.get("self")
    node = owner.nodes.get(coroutine.__name__) if isinstance(owner, Resource) else None
    return f"in a graph it is `{node}`" if node else f"{coroutine.__qualname__} is a coroutine function; {_MAKE_AN_OP}"


_MAKE_AN_OP = "make it an op with @af.op and call it with tensors; a graph itself is built by plain functions"


def _convert(array: Array, value: TensorLike, dtype: DType) -> Array:
    if array.size == 0 and isinstance(value, list | tuple):
        return np.empty(array.shape, dtype)
    if string not in (array.dtype, dtype) and _RANKS[array.dtype.kind] <= _RANKS[dtype.kind]:
        # Overflow gives infinities, which the comparison finds.
        with np.errstate(over="ignore"):
            converted = array.astype(dtype)
        if _same_values(array, converted):
            return converted
    raise DTypeError(f"{brief(value)} does not fit dtype {dtype}; convert it yourself if you mean to lose data")


_RANKS = {"b": 0, "i": 1, "u": 1, "f": 2, "V": 2, "c": 3}
"""Kinds of dtypes, each of which the later ones can hold; bfloat16 is of kind V."""


def _same_values(array: Array, converted: Array) -> bool:
    """Return True if integers are unchanged, and finite floats stay finite; rounding is expected of a smaller float."""
    if converted.dtype.kind in "biu":
        return bool((array == converted).all())
    return bool((np.isfinite(converted) | ~np.isfinite(array)).all())


def _only_strings(value: object) -> bool:
    if isinstance(value, list | tuple):
        return set(map(type, value)) <= {str} or all(map(_only_strings, value))
    return isinstance(value, str) or (isinstance(value, np.ndarray) and value.dtype.kind in "UT")


def _is_text(value: object) -> bool:
    """Return True if `value` is a list of strings only."""
    return isinstance(value, list | tuple) and isinstance(_first(value), str) and _only_strings(value)


def _first(value: object) -> object:
    """The first item of nested lists."""
    return _first(value[0]) if isinstance(value, list | tuple) and value else value


def _refuse_tensors(value: object) -> None:
    """Raises GraphError if `value` is a list with tensors in it.

    Asked only where NumPy could make no array of it: to ask each number of a list costs far more than to read it.
    """
    if isinstance(value, list | tuple) and _contains_tensor(value):
        message = "a list with tensors in it is not a constant; use af.stack to make one tensor of them"
        raise GraphError(message) from None


def _contains_tensor(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(_contains_tensor(item) for item in value)
    return is_symbolic(value)


def placeholder(dtype: DTypeLike, shape: ShapeLike = None, name: str | None = None) -> Tensor:
    """A value every run that needs it must feed.

    Args:
        dtype: element type.
        shape: partial shape; None for unknown rank.
    """
    spec = Spec(as_dtype(dtype), as_shape(shape))
    return apply(builtin.PLACEHOLDER, name=name, spec=spec)[0]


def identity(x: TensorLike, *, name: str | None = None) -> Tensor:
    """Return `x` through a new node, which can carry control edges or a name."""
    return apply(builtin.IDENTITY, x, name=name)[0]


def group(*items: Tensor | Node, name: str | None = None) -> Node:
    """A node that has run when all `items` have."""
    graph = graph_for(*items)
    before = [local for item in items if (local := awaited_node(item, graph)) is not None]
    node = graph.add_node(builtin.NO_OP, (), {}, (), name="group" if name is None else name)
    # Added all at once: one by one, each would be searched among all earlier edges.
    node.control_inputs = list(dict.fromkeys((*node.control_inputs, *before)))
    return node


def awaited_node(item: object, graph: Graph) -> Node | None:
    """Return the node to wait for to have `item` in `graph`; None if an enclosing branch or loop waits instead.

    For a result of a branch or loop it is an identity of that result, as only the used results of a structured node
    run.
    """
    if not isinstance(item, Tensor | Node):
        raise GraphError(f"{item!r} is neither a tensor nor a node, so that nothing can wait for it")
    if not isinstance(item, Tensor):
        return graph.import_control(item)
    if isinstance(item.node, StructuredNode) and encloses(item.graph, graph):
        with reopened(item.graph):  # in the outer graph, as inner bodies would capture it
            item = identity(item)
        item.node.device = item.node.colocated_with = None
    return graph.import_control(item.node)


def add_control_input(node: Node, before: Node) -> None:
    """Makes `node` run after `before`."""
    local = node.graph.import_control(before)
    if local is not None and local not in node.control_inputs:
        node.control_inputs.append(local)
