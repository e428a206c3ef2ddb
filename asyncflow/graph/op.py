"""Operations: name, shape rule, kernels, effects; and the table of all of them."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Collection, Hashable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, ParamSpec, TypeAlias

import numpy as np

from asyncflow.errors import GraphError
from asyncflow.foreign_names import close_names
from asyncflow.graph.facts import REPLACE, Fact
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.values.spec import Spec
from asyncflow.values import Conduct, Kernel, Namespace


class Access(enum.Enum):
    """A node's way of touching a resource."""

    READ = "read"
    WRITE = "write"


class Memory(enum.Enum):
    """Use of its inputs' memory by a kernel."""

    NEW = "results are in memory of their own, and no input is kept, so that its buffer may be written again"
    VIEW = "results may look into the memory of the first input, and nothing else of the inputs is kept"
    WHOLE_VIEW = "the result is another name for all of the first input's memory"
    METADATA = "it reads facts about its inputs that are known without their data"
    STORE = "it reads a store of values, and leaves it as it is"
    ANY = "inputs may be kept, and results may be in their memory"


@dataclass(frozen=True, slots=True)
class Traits:
    """Answers of an op to passes; every op must give all of them, since a missing answer would only make the op slow.

    Attributes:
        memory: the kernels' use of memory.
        is_capturable: kernels are launched, or arrays are put into a store, and nothing else is done, so that a CUDA
            graph can hold it. Kernels that sort or wait for the device cannot be captured, nor kernels that make CuPy
            call cuBLAS.
        is_cheap: it costs next to nothing, mostly as its result is a view of its input: gradients compute it again
            rather than keep the value.
        counts_itself: it is a store, of which some nodes launch many kernels and others none: the device's namespace
            for stores counts them (`asyncflow.devices.protocol.LogicalDevice.store_xp`).
    """

    memory: Memory
    is_capturable: bool
    is_cheap: bool
    host_outputs: Collection[int] = ()
    """Positions of integers that the kernel gives as NumPy's whatever `xp` is, such as lengths: they stay there."""
    counts_itself: bool = False


NEW: Final = Traits(Memory.NEW, is_capturable=True, is_cheap=False)
NEW_UNCAPTURED: Final = Traits(Memory.NEW, is_capturable=False, is_cheap=False)
VIEW: Final = Traits(Memory.VIEW, is_capturable=True, is_cheap=True)
WHOLE_VIEW: Final = Traits(Memory.WHOLE_VIEW, is_capturable=True, is_cheap=True)
PARTS: Final = Traits(Memory.VIEW, is_capturable=True, is_cheap=False)
"""Traits of an op that returns views of parts of its first input, and is not repeated for them."""
METADATA: Final = Traits(Memory.METADATA, is_capturable=True, is_cheap=True)
READS_STORE: Final = Traits(Memory.STORE, is_capturable=True, is_cheap=False)
KERNELS: Final = Traits(Memory.ANY, is_capturable=True, is_cheap=False)
"""Traits of an op that is made of kernels, or keeps arrays in a store, with nothing known of their memory."""
BATCHED: Final = Traits(Memory.ANY, is_capturable=True, is_cheap=False, counts_itself=True)
"""Traits of an op of a store that launches the kernels of many iterations at once."""
OPAQUE: Final = Traits(Memory.ANY, is_capturable=False, is_cheap=False)
"""Traits of an op of which nothing is taken for granted."""
# Equal to `OPAQUE`, but a different object, to tell a missing answer from the answer "opaque".
_UNSAID: Final = Traits(Memory.ANY, is_capturable=False, is_cheap=False)

PURE: Final = Conduct()
DRAWS: Final = Conduct(needs_context=True, is_random=True)
NEW_EACH: Final = Conduct(is_random=True)
"""Conduct of an op that makes a new object on each firing, such as a store."""
WAITS: Final = Conduct(is_async=True)
GIVES_BACK: Final = Conduct(is_async=True, is_undone=True)
"""Conduct of an op that waits for elements, and gives them back if the run ends early."""

Effects: TypeAlias = tuple[tuple[Hashable, Access], ...]

HostInputs: TypeAlias = "Collection[int] | Callable[[Node], Collection[int]]"
"""Positions of inputs, the same for all nodes of an op, or what a function finds for a node."""

Rows: TypeAlias = Literal["elementwise", "axes", "axis", "matrices", "row by row", "as found"]
"""Ways of computing ops for many rows at once that many of them share; `Op` says what each means."""

CudaRule: TypeAlias = Callable[..., str | None]
"""``rule(attrs, inputs, output, operands)``: a CUDA C++ expression for one element of the output, of which
`asyncflow.ops.cuda.source` tells; or None where there is none for these dtypes.
"""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceKernel:
    """A function that a user has registered as the kernel of an op on one kind of device.

    Attributes:
        op: the op's name.
        kind: of the devices.
        function: takes the inputs, static arguments by name, and the stream if it has a parameter `stream`.
        graph_safe: CUDA graphs may hold its work.
        of_session: a session alone has it.
    """

    op: str
    kind: str
    function: Callable[..., object]
    graph_safe: bool
    of_session: bool = False

    def __str__(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        code = getattr(self.function, "__code__", None)
        where = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
        whose = "the session's" if self.of_session else "registered"
        return f"{name}{where}, {whose} for {self.kind!r}"


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True, eq=False)
class Op:
    """An operation.

    Attributes:
        name: unique, the standard's name where there is one.
        infer: ``infer(*input_specs, **attrs)`` gives the output's `Spec`, or a tuple of them for an op whose kernel
            returns a tuple. Raises ShapeError or DTypeError on inputs that do not fit.
        kernel: ``kernel(xp, **attrs)`` binds the op for one node: it returns the `Kernel` to call on each firing.
            None for ops that the compiler or the scheduler handles itself.
        scalar_kernel: used instead when every input has rank 0 and is a NumPy value; a plain Python operator on NumPy
            scalars gives the same bits several times faster than a ufunc. It may look at them.
        rows_kernel: the same for inputs that all have a row axis in front, where one call does for all rows. An input
            that is the same for all rows has a stride of 0 there. A user's may raise `RowByRow`.
        effects: resources a node touches, in the order it touches them; None for a pure op.
        conduct: needs and doings of its firings besides computing outputs from inputs.
        takes_any_arrays: a user's kernel computes with the arrays of any device all the same, as the library's own do.
        is_total: the kernel never fails on inputs of known shapes and number dtypes, so it may run where the program
            would not have run it.
        flops: ``flops(input_shapes, output_shapes, **attrs)`` estimates arithmetic operations for the cost model;
            None: one per output element.
        derivative: that of a user's op; the library's stand beside their ops, with `derivative` as decorator.
        rows: how it is computed for many rows at once, where it has no row rule of its own, in `rows.py` of its room:
            "elementwise": inputs broadcast, and each element of the output needs one of each.
            "axes": the attribute `axis` names axes of the only input, or with None all of them.
            "axis": the attribute `axis` names an axis of each input, or with None that of the flattened input.
            "matrices": it works on the last axes of the first input; other inputs are sizes.
            "row by row": one firing calls the kernel for each row, where speed does not matter.
            "as found": it is not, as the results are as long as the run finds them, for each row.
        cuda: the rule of an elementwise op's CUDA expression, by which one kernel does the work of many ops; or a
            sentence that says why it has none.
        is_composite: True if the kernel launches several kernels of the device, so that a generated one pays off for
            this op alone.
        host_inputs: the inputs whose *values* the kernel reads, such as shapes and indices of tensor arrays: they have
            to be in host memory, as NumPy values, whatever `xp` is. To read one from the memory of a GPU would block.
        runs_on_host: the kernel computes with NumPy on any device: the shapes of its outputs depend on the data, it
            draws NumPy's random numbers, raises on certain values, or talks to the outside. A device with its own
            memory binds it to NumPy, copies all inputs to host memory, and the outputs in.
        traits: answers to passes. An op that is not pure, or runs on the host, need not answer: passes then assume
            nothing.
        node_type: class of its nodes.
        facts: reasons why passes may not move its nodes, or run them again (`asyncflow.graph.facts`): they follow from
            its conduct, effects and kind.
        is_pure: True if its outputs depend on its inputs and attributes alone, and it has no other visible effect:
            `asyncflow.graph.facts.REPLACE` allows it, since there are no facts.
    """

    name: str = field(kw_only=False)
    infer: Callable[..., Spec | tuple[Spec, ...]] = field(kw_only=False)
    kernel: Callable[..., Kernel] | None = field(kw_only=False, default=None)
    scalar_kernel: Kernel | None = None
    rows_kernel: Callable[..., Kernel] | None = None
    effects: Callable[[Node], Effects] | None = None
    conduct: Conduct = PURE
    takes_any_arrays: bool = False
    is_total: bool = False
    flops: Callable[..., float] | None = None
    derivative: Derivative | None = None
    rows: Rows | None = None
    cuda: CudaRule | str | None = None
    is_composite: bool = False
    host_inputs: HostInputs = ()
    runs_on_host: bool = False
    traits: Traits = _UNSAID
    node_type: type[Node] = Node
    facts: frozenset[Fact] = field(init=False)
    is_pure: bool = field(init=False)

    def __post_init__(self) -> None:
        # Computed once: passes and the builder read them for every node.
        facts = _facts_of(self)
        object.__setattr__(self, "facts", facts)
        object.__setattr__(self, "is_pure", REPLACE.allows(self))
        if self.traits is _UNSAID and self.is_pure and not self.runs_on_host:
            raise GraphError(f"op {self.name!r} does not say traits=, such as NEW or OPAQUE of asyncflow.graph.op")

    def __deepcopy__(self, memo: object) -> Op:
        return self  # passes compare ops by identity, even in copies of a graph

    def __repr__(self) -> str:
        return f"Op({self.name!r})"


def _facts_of(op: Op) -> frozenset[Fact]:
    """Return the facts about an op; none if it is pure."""
    conduct, has_effects = op.conduct, op.effects is not None
    has_bodies = bool(getattr(op.node_type, "body_names", ()))
    # By name, as the module that defines them imports this one.
    is_given = op.kernel is None and op.name in ("parameter", "placeholder")
    holds = {
        Fact.JOINS: conduct.waits_in_line,
        Fact.WAITS: conduct.is_async and (has_effects or not conduct.is_user),
        Fact.AWAITS: conduct.is_async and conduct.is_user and not has_effects,
        Fact.CALLS: conduct.is_user and not conduct.is_repeatable,
        Fact.CALLS_PURE: conduct.is_user and conduct.is_repeatable,
        Fact.EFFECT: has_effects,
        Fact.DRAWS: conduct.is_random or conduct.needs_context,
        Fact.BODIES: has_bodies,
        Fact.GIVEN: is_given,
        Fact.BY_HAND: op.kernel is None and not has_bodies and not is_given,
    }
    return frozenset(fact for fact, found in holds.items() if found)


def bound_kernel(op: Op, xp: Namespace, attrs: Attrs, *, of_scalars: bool) -> Kernel:
    """The kernel of a node.

    Args:
        op: with a kernel.
        xp: the array namespace it computes with.
        attrs: the node's, with the state of resources in their place.
        of_scalars: all inputs have rank 0.
    """
    # Scalar kernels use Python's operators and `if`, which would wait for scalars in a device's memory.
    if of_scalars and xp is np and op.scalar_kernel is not None:
        return op.scalar_kernel
    assert op.kernel is not None, f"{op.name} has no kernel"
    return op.kernel(xp, **attrs)


def inputs_from(first: int) -> Callable[[Node], Collection[int]]:
    """All inputs from position `first` on, as `Op.host_inputs`: the sizes that a shape leaves open."""
    return lambda node: range(first, len(node.inputs))


def host_inputs(node: Node) -> frozenset[int]:
    """Positions of the inputs that the kernel of `node` needs in host memory."""
    found = node.op.host_inputs
    return frozenset(found(node) if callable(found) else found)


def runs_on_host(node: Node) -> bool:
    """Return True if the kernel of `node` computes with NumPy wherever it is placed.

    Users' functions do, as they are written for NumPy, and all kernels on strings, which only NumPy has.
    """
    op = node.op
    # Kernels of async ops run on the event loop, and kernels of user ops are written for NumPy.
    if op.runs_on_host or op.conduct.is_async or (op.conduct.is_user and not op.takes_any_arrays):
        return True
    # The spec of elements of an array or store is an attribute of its ops.
    specs = [tensor.spec for tensor in (*node.inputs, *node.outputs)] + list(node.attrs.values())
    return any(isinstance(spec, Spec) and spec.dtype.kind == "T" for spec in specs)


class KernelContext(NamedTuple):
    """The firing that a kernel runs for, by which seeded random ops count.

    A named tuple, as an iteration of a loop that draws a number makes one.
    """

    seed: int
    """The session's or graph's seed."""
    run: int
    """Number of the run within the session."""
    tag: tuple[int, ...]
    """Iteration numbers from the outermost loop inward."""
    at_end: MutableMapping[object, Callable[[], None]] | None = None
    """Functions that are called when the run has ended, however that comes: its own, so that it tells runs apart."""


_P = ParamSpec("_P")
_ops: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Add `op` to the table of operations.

    Raises:
        GraphError: another op has its name.
    """
    if op.name in _ops:
        raise GraphError(f"an op named {op.name!r} is already registered; op names are unique")
    _ops[op.name] = op
    return op


# Lets type checkers see the fields of `Op` as the parameters of `define`, without writing them twice.
def _registering(make: Callable[_P, Op]) -> Callable[_P, Op]:
    def define(*fields: _P.args, **named: _P.kwargs) -> Op:
        return register(make(*fields, **named))

    return define


define = _registering(Op)
"""Function that makes an `Op` of these fields, and registers it."""


def find_op(name: str) -> Op:
    """The registered op of that name.

    Raises:
        GraphError: there is none.
    """
    if name not in _ops:
        _import_all()  # modules register their ops when imported, and few may be imported by now
    if name not in _ops:
        close = close_names(name, list(_ops))
        meant = f"did you mean {' or '.join(map(repr, close))}?"
        raise GraphError(f"no op is named {name!r}; {meant if close else 'is the module that registers it imported?'}")
    return _ops[name]


def _import_all() -> None:
    """Import every public name, as `import asyncflow` leaves out what a first graph does not need."""
    package = sys.modules["asyncflow"]
    for name in package.__all__:
        getattr(package, name)


# By identity, as a user's op may have the same name as one of the library's.
def is_registered(op: Op) -> bool:
    """Return True if `find_op` finds the op, in this process or another."""
    return _ops.get(op.name) is op


# -- derivatives -----------------------------------------------------------------------------------------------------

Derivative: TypeAlias = "Callable[..., Sequence[Tensor | None]]"
"""``derivative(node, *grads)``: what reaches each input of `node`, given what reaches each of its outputs.

A gradient is None where nothing reaches an output, but not for all of them; the result has one entry per input, None
where nothing flows. It is asked only where an input can have a gradient. The rule adds nodes to the current graph. It
may use `node.inputs` and `node.outputs`, whose values are then kept for it; for a mere shape it asks
`asyncflow.ops.derivatives.shapes`.
"""

_derivatives: dict[Op, Derivative] = {}
_not_differentiable: dict[Op, str] = {}


def derivative(*ops: Op) -> Callable[[Derivative], Derivative]:
    """Make the decorated function the derivative of `ops`."""

    def install(rule: Derivative) -> Derivative:
        for op in ops:
            _derivatives[op] = rule
        return rule

    return install


def gradient_of_first(op: Op, find: Callable[[Node, Tensor], Tensor | None]) -> None:
    """Make ``find(node, grad)`` that which reaches the first input of `op`; nothing reaches the others."""

    @derivative(op)
    def rule(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
        return [find(node, grad), *[None] * (len(node.inputs) - 1)]


def not_differentiable(*ops: Op, because: str) -> None:
    """Mark `ops`: nothing flows back through them, as their outputs are integers, constant almost everywhere, …"""
    _not_differentiable.update(dict.fromkeys(ops, because))


def derivative_of(op: Op) -> Derivative | None:
    """The derivative of `op`; None if it has none."""
    return op.derivative or _derivatives.get(op)


def why_not_differentiable(op: Op) -> str | None:
    """The reason given with `not_differentiable`; None if the op was not marked."""
    return _not_differentiable.get(op)


def registered_ops() -> tuple[Op, ...]:
    """Every registered op."""
    _import_all()  # else the result would depend on the modules imported so far
    return tuple(_ops.values())
