"""Kernels of users for kinds of devices: how they are registered and found, and the op that calls one.

An op has one kernel, written against an array namespace, and a user's op has a function for NumPy. A kernel registered
for ``"cuda"`` takes its place on cards. `call_kernel` gives a node an op that differs from its own in the kernel alone,
once the node has its device. So passes need not know of kernels for kinds of devices: they ask an op whether it runs on
the host, or whether a CUDA graph can hold it.

On a card the kernel is called as the library's own are: by the thread that launches, with the stream of the device as
CuPy's current one, and with arrays of the card. Results of other libraries are not copied.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakSet

import numpy as np

from asyncflow.devices.names import DeviceSpec
from asyncflow.devices.protocol import Placed
from asyncflow.errors import GraphError, PlacementError, brief
from asyncflow.graph.ir import Attrs, Node
from asyncflow.graph.op import KERNELS, OPAQUE, DeviceKernel, Memory, Op, find_op
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import string
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.rows.by_row import BY_ROW_OPS, called_op, calling
from asyncflow.ops.user.custom import Calls, CustomOp, Outputs
from asyncflow.ops.user.from_torch import TorchOp
from asyncflow.ops.user.recorded_calls import recorded
from asyncflow.ops.user.results import Results, checked, given_up, read_only
from asyncflow.values import Conduct, Kernel, Namespace, Nest, Value

_CUDA_MEMORY = (2, 13)
"""Kinds of memory on a card, as `__dlpack_device__` names them: a card's own, and CUDA's managed memory."""

_DECIDING = ("asyncflow.control.", "asyncflow.lift.", "asyncflow.vertex.")
"""Modules of functions that decide which nodes run, and compute nothing by themselves."""


def has_strings(node: Node) -> bool:
    """Return True if a node computes with strings, which no device but the host has."""
    return any(x.dtype == string for x in (*node.inputs, *node.outputs))


# -- calls -----------------------------------------------------------------------------------------------------------


def call_kernel(node: Node, kernel: DeviceKernel, *, on_card: bool) -> None:
    """Let `node` call a kernel of the user's, in place of its op's own.

    Args:
        node: of the op, or with many rows of it.
        kernel: of the op, for the kind of the node's device.
        on_card: the device has arrays other than NumPy's.

    Raises:
        GraphError: the kernel does not take the inputs and static arguments of the node.
    """
    own, by_row = called_op(node), node.op in BY_ROW_OPS
    is_users = own.conduct.is_user
    attrs: Attrs = node.attrs["arguments"] if by_row else node.attrs
    arguments: Attrs = attrs["arguments"] if is_users else attrs
    # Checked at each node, as only a call shows which static arguments have defaults. Row numbers, the first input of
    # rows, are not passed to kernels.
    if (why := _why_not_called(kernel, [None] * (len(node.inputs) - by_row), list(arguments))) is not None:
        raise GraphError(f"the kernel of {own.name} for {kernel.kind!r}, {why}\n  built at {node.location}")
    outputs: Outputs = None
    if not is_users and by_row:
        specs = tuple(Spec(x.dtype, x.shape and x.shape[1:]) for x in node.attrs["specs"])
        outputs = specs[0] if node.attrs["single"] else specs
    elif not is_users:
        outputs = node.specs
    calling_it = _op_calling(kernel, own, outputs, on_card)
    if by_row:
        node.attrs = {**node.attrs, "calls": calling_it}
        node.op = calling(calling_it, on_host=False)
    else:
        node.op = calling_it


def _op_calling(kernel: DeviceKernel, own: Op, outputs: Outputs, on_card: bool) -> Op:
    """Return an op like `own` that calls a kernel; `outputs` of the node are None if its attributes tell them."""
    calls = _KernelCalls(kernel.function, False, own.name, registered=kernel)
    is_of_rows = own.rows_kernel is not None and own.conduct.is_user
    make: Callable[..., Kernel] = calls.one_row_kernel if is_of_rows else calls.kernel
    if outputs is not None:  # the library's ops pass their attributes as arguments

        def make(xp: Namespace, **attrs: object) -> Kernel:
            return calls.kernel(xp, outputs=outputs, arguments=attrs)

    # A kernel that only launches counts as one of the library's: it joins regions and CUDA graphs.
    launches = kernel.graph_safe and on_card
    return replace(
        own,
        kernel=_falling_back(make, own.kernel) if on_card else make,
        rows_kernel=calls.rows_kernel if is_of_rows else None,
        scalar_kernel=None,
        conduct=Conduct() if launches else replace(own.conduct, is_user=True),
        takes_any_arrays=True,
        runs_on_host=False,
        # Rules of rows were applied earlier, and fusion would bypass the kernel.
        rows=None,
        cuda=None,
        is_composite=False,
        traits=KERNELS if launches else OPAQUE,
    )


def _falling_back(make: Callable[..., Kernel], own: Callable[..., Kernel] | None) -> Callable[..., Kernel]:
    """Return `make`, or the op's own where the host computes a node of a card: numbers that decide a branch."""

    def bind(xp: Namespace, **attrs: object) -> Kernel:
        assert own is not None
        return own(xp, **attrs) if xp is np else make(xp, **attrs)

    return bind


@dataclass(frozen=True, slots=True, eq=False)
class _KernelCalls(Calls):
    """Calls of a registered kernel."""

    registered: DeviceKernel | None = None

    def kernel(self, xp: Namespace, *, outputs: Outputs, arguments: Attrs) -> Kernel:
        """Return the function with its arguments, its results checked, for the arrays of one device."""
        assert self.registered is not None
        kernel, function = self.registered, self.function
        arrays = _HostArrays() if xp is np else _CardArrays(xp, kernel, is_empty=not nest.flatten(outputs)[0])
        check: Callable[[Nest], Value] = Results(outputs)
        if isinstance(outputs, Spec):
            single = outputs

            def check(found: Nest) -> Value:
                return checked(single, found)

        takes_stream = _takes_stream(function) and "stream" not in arguments

        def call(*values: Value) -> Value:
            named = {**arguments, "stream": arrays.stream()} if takes_stream else arguments
            given = [arrays.given(value) for value in values]
            try:
                # No variable for the result: `given_up` counts references, and copies arrays that are still held.
                return arrays.finished(check(arrays.taken(given_up(function(*given, **named), arrays.kind))))
            except Exception as error:
                error.add_note(f"in the kernel of {kernel.op} for {kernel.kind!r}: {kernel}")
                raise

        return recorded(call) if xp is np else call


class _HostArrays:
    """NumPy's arrays, to and from a kernel."""

    kind: type = np.ndarray

    def stream(self) -> object:
        """Return None: there is no stream."""
        return None

    def given(self, value: Value) -> Value:
        """Return an input, locked."""
        return read_only(value)

    def taken(self, found: Nest) -> Nest:
        """Return the function's results."""
        return found

    def finished(self, value: Value) -> Value:
        """Return checked results."""
        return value


class _CardArrays(_HostArrays):
    """A card's arrays, to and from a kernel, on CuPy's current stream."""

    def __init__(self, xp: Placed, kernel: DeviceKernel, *, is_empty: bool) -> None:
        self._xp, self._kernel, self._is_empty = xp, kernel, is_empty
        self.kind = xp.ndarray

    def stream(self) -> object:
        """Return CuPy's current stream."""
        return self._xp.cuda.get_current_stream()

    def given(self, value: Value) -> Value:
        """Return an input as an array of the card: a number of the host is filled in by a kernel."""
        # Always an array: a CUDA C++ kernel cannot tell a number from its address.
        return value if isinstance(value, self.kind) else self._xp.asarray(value)

    def taken(self, found: Nest) -> Nest:
        """Return results in arrays of CuPy's, in the memory of arrays of other libraries."""
        return self._taken(found) if found is None and not self._is_empty else nest.map_leaves(self._taken, found)

    def _taken(self, value: Placed) -> Placed:
        if isinstance(value, self.kind | np.generic | bool | int | float | complex):
            return value
        if hasattr(value, "__dlpack_device__"):
            if value.__dlpack_device__()[0] in _CUDA_MEMORY:
                return self._xp.from_dlpack(value)
            found = f"{type(value).__module__}.{type(value).__name__} in the host's memory"
        elif hasattr(value, "__cuda_array_interface__"):
            return self._xp.asanyarray(self._ordered(value))
        else:
            found = brief(value)
        raise TypeError(
            f"the kernel returned {found}; a kernel for {self._kernel.kind!r} returns arrays on the card, such as "
            f"cupy.zeros_like(x) makes"
        )

    def _ordered(self, value: Placed) -> _Interface:
        """Return the interface of an array, for which the current stream waits: CuPy would block for its stream."""
        cuda, found = self._xp.cuda, dict(value.__cuda_array_interface__)
        stream, current = found.pop("stream", None), cuda.get_current_stream()
        # A library that worked on the current stream names it, and no wait is needed.
        if stream not in (None, current.ptr):
            event = cuda.Event(disable_timing=True)
            cuda.runtime.eventRecord(event.ptr, stream)
            cuda.runtime.streamWaitEvent(current.ptr, event.ptr)
        return _Interface(value, found)

    def finished(self, value: Value) -> Value:
        """Return checked results, with numbers of the host filled in."""
        return tuple(map(self._filled, value)) if type(value) is tuple else self._filled(value)

    def _filled(self, value: Placed) -> Value:
        is_there = isinstance(value, self.kind)
        return value if is_there else self._xp.full((), np.asarray(value)[()], dtype=value.dtype)


class _Interface:
    """The interface of an array of another library, which it keeps alive."""

    def __init__(self, array: object, interface: dict[str, object]) -> None:
        self.array = array
        self.__cuda_array_interface__ = interface


# -- registration ----------------------------------------------------------------------------------------------------


class HoldsPlans(Protocol):
    """An object with compiled plans."""

    def clear(self) -> None:
        """Forget the plans."""


compiled: WeakSet[HoldsPlans] = WeakSet()
"""Holders of plans that were compiled with the kernels of that time: a new kernel makes them forget these."""


class Kernels:
    """Kernels of users, as a session finds them: its own first.

    Args:
        of_session: the option ``kernels=`` of the session.

    Raises:
        GraphError, PlacementError, TypeError: as from `register_kernel`, or it is no mapping from pairs.
    """

    def __init__(self, of_session: Mapping[tuple[object, str], Callable[..., object]] | None = None) -> None:
        self._own: dict[Op, dict[str, DeviceKernel]] = {}
        given: object = {} if of_session is None else of_session
        if not isinstance(given, Mapping):
            raise TypeError(f"kernels is a mapping such as {{('softmax', 'cuda'): function}}; got {brief(of_session)}")
        for key, function in given.items():
            if not (isinstance(key, tuple) and len(key) == 2):
                raise TypeError(f"kernels has pairs of an op and a kind of device as keys; got {brief(key)}")
            op, kind = key
            table = self._own.setdefault(_op_of(op), {})
            _register(table, op, kind, function, graph_safe=False, of_session=True)

    def find(self, node: Node, kind: str) -> DeviceKernel | None:
        """Return the kernel that computes a node on devices of a kind; None if that is the op's own."""
        op = called_op(node)
        own = self._own.get(op, {}).get(kind) if self._own else None
        found = own or _kernels_of(op).get(kind)
        return None if found is None or has_strings(node) else found


_of_library: dict[Op, dict[str, DeviceKernel]] = {}


def _kernels_of(op: Op) -> dict[str, DeviceKernel]:
    calls = getattr(op.kernel, "__self__", None)
    return calls.kernels if isinstance(calls, Calls) else _of_library.setdefault(op, {})


NO_KERNELS = Kernels()
"""The kernels of a session without any of its own."""


def register_kernel(op: object, kind: str, function: Callable[..., object], /, *, graph_safe: bool = False) -> None:
    """Register the kernel of an op for one kind of device, in place of the op's own there.

    On a card, `function` gets CuPy arrays, in the order of the inputs, and returns arrays on the card. The stream of
    the device is CuPy's current one then: enqueue the work there, and do not wait for it. Numbers are arrays of rank 0.
    Static arguments come by name, and a parameter `stream` gets the stream. Inputs are shared with other nodes, so the
    function must not write to them. Open sessions compile their plans anew.

    Args:
        op: a function such as `asyncflow.softmax`, its name, or the result of `@op`.
        kind: the kind of device, such as ``"cuda"`` or ``"cpu"``, without a number.
        function: computes the same as the op, whose gradients, row rules and shape rules stay.
        graph_safe: CUDA graphs may record the work and launch it again without calling `function`. So the function
            only launches kernels: it does not wait, look at values, or count its calls.

    Raises:
        GraphError: `op` has no kernel of its own, uses state or waits; or `function` does not take its arguments.
        PlacementError: there is no such kind of device.
        TypeError: `function` cannot be called.

    >>> import asyncflow as af
    >>> @af.op(outputs=lambda x: x)
    ... def double(x):
    ...     return x * 2
    >>> af.register_kernel(double, "cuda", lambda x, *, stream: x + x)
    >>> sorted(af.kernels(double))
    ['cpu', 'cuda', 'sim']
    """
    _register(_kernels_of(_op_of(op)), op, kind, function, graph_safe=graph_safe)
    for each in list(compiled):
        each.clear()


def kernels(op: object, /) -> dict[str, Callable[..., object]]:
    """Return the kernels registered for an op, by kind of device.

    For a function decorated with `op`, that function is the kernel of kinds whose arrays are NumPy's. An op of the
    library has its own kernels on every kind, which are not listed.

    Args:
        op: as for `register_kernel`.

    Raises:
        GraphError: as from `register_kernel`.
    """
    found = {kind: each.function for kind, each in _kernels_of(_op_of(op)).items()}
    if isinstance(op, CustomOp):
        found = {"cpu": op.function, "sim": op.function, **found}
    return dict(sorted(found.items()))


def _register(
    table: dict[str, DeviceKernel],
    op: object,
    kind: str,
    function: Callable[..., object],
    *,
    graph_safe: bool,
    of_session: bool = False,
) -> None:
    found = _op_of(op)
    if DeviceSpec.parse(kind).index is not None:
        only = kind.partition(":")[0]
        raise PlacementError(f"kernels are for a kind of device, not for one device: say {only!r}, not {kind!r}")
    if not callable(function):
        raise TypeError(f"the kernel of {found.name} for {kind!r} is a function; got {brief(function)}")
    if graph_safe and found.effects is not None:
        raise GraphError(f"{found.name} has effects, which a CUDA graph would repeat unseen: leave graph_safe out")
    made = DeviceKernel(found.name, kind, function, graph_safe, of_session)
    _check(made, op, found)
    table[kind] = made
    if kind == "cuda" and isinstance(op, CustomOp):
        # A simulated card computes such a kernel by the NumPy function, which gives the same.
        table.setdefault("sim", replace(made, kind="sim", function=op.function))


def _op_of(op: object) -> Op:
    if isinstance(op, CustomOp):
        if op.op.conduct.is_async:
            raise GraphError(f"{op.name} is a coroutine function, or has limits: it waits, and no device launches that")
        return op.op
    if isinstance(op, TorchOp):
        raise GraphError(f"{op.name} runs where its module is: move that, with from_torch(module.cuda())")
    if isinstance(op, str):
        try:
            found = find_op(op)
        except GraphError as error:
            raise GraphError(f"{error.reason}; an op of yours is given itself, and not by its name") from None
    elif callable(op) and getattr(op, "__module__", "").startswith("asyncflow."):
        found = _op_of_function(op)
    else:
        advice = "; decorate it with @af.op(outputs=...) first" if callable(op) else ""
        raise GraphError(
            f"kernels are registered for a function of this library's, its name, or an op of yours; got {brief(op)}"
            f"{advice}"
        )
    if (why := _why_none(found)) is not None:
        raise GraphError(f"{found.name} {why}, so it has no kernel that could be replaced")
    return found


def _op_of_function(function: Callable[..., object]) -> Op:
    name = getattr(function, "__name__", brief(function))
    if function.__module__.startswith(_DECIDING):
        raise GraphError(f"{name} decides which nodes run, and computes nothing: register kernels for the ops inside")
    try:
        return find_op(name)
    except GraphError:
        raise GraphError(
            f"{name} is made of other ops, and has no kernel of its own: register kernels for these, which "
            f"af.print_graph(graph) names"
        ) from None


def _why_none(op: Op) -> str | None:
    if op.kernel is None or op.node_type is not Node:
        return "decides which nodes run"
    if op.conduct.needs_context or op.conduct.is_random:
        return "draws random numbers by the session's seed"
    if op.effects is not None or op.conduct.is_async:
        return "touches state, or waits"
    # Passes rely on how these ops use memory, and a kernel might use it differently.
    if op.traits.memory not in (Memory.NEW, Memory.ANY):
        return "looks into the memory of its input"
    if not op.infer.__module__.startswith("asyncflow.ops.") or op in BY_ROW_OPS:
        return "is a part of loops, gradients or stores"
    return None


# -- signatures ------------------------------------------------------------------------------------------------------


def _signature(function: Callable[..., object]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # of C
        return None


def _takes_stream(function: Callable[..., object]) -> bool:
    signature = _signature(function)
    return signature is not None and "stream" in signature.parameters


def _check(kernel: DeviceKernel, asked: object, op: Op) -> None:
    """Raise unless the function can be called as the op's own is, as far as signatures tell."""
    function = kernel.function
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise GraphError(f"the kernel of {op.name} for {kernel.kind!r} is a plain function: it launches, and returns")
    own = _signature(asked.function if isinstance(asked, CustomOp) else op.infer)
    if own is None:
        return
    plain = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = own.parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return  # checked at the first call
    # An optional parameter that is not keyword-only may be an input or a static argument.
    inputs = [p for p in parameters if p.kind in plain and (p.default is p.empty or not isinstance(asked, CustomOp))]
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if (why := _why_not_called(kernel, inputs, named)) is not None:
        takes = ", ".join([*(p.name for p in inputs), *(f"{name}=" for name in named)])
        raise GraphError(f"the kernel of {op.name} for {kernel.kind!r}, {why}; {op.name} has ({takes})")


def _why_not_called(kernel: DeviceKernel, inputs: Sequence[object], named: Sequence[str]) -> str | None:
    signature = _signature(kernel.function)
    if signature is None:
        return None
    stream = ["stream"] if "stream" in signature.parameters else []
    try:
        signature.bind(*inputs, **dict.fromkeys([*named, *stream]))
    except TypeError as error:
        return f"{getattr(kernel.function, '__name__', 'which is')}{signature}, cannot be called: {error}"
    return None
