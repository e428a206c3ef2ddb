"""`Variable`: a value that survives a run, and the ops that read and write it.

Every write is atomic against every other op on the variable, in this run and in all others. How that is done, and where
the value is, says `asyncflow.state.variables.variable_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import (
    TensorLike,
    add_control_input,
    apply,
    as_array,
    as_tensor,
    constant,
    graph_for,
    is_symbolic,
)
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import KERNELS, OPAQUE, Access, Effects, Op, define, register
from asyncflow.graph.resource import Resource, revives
from asyncflow.graph.values.dtypes import VARIANT, DTypeLike, as_dtype, dtype_name
from asyncflow.graph.values.operators import Operators
from asyncflow.graph.values.shapes import ShapeLike, as_shape, broadcast, format_shape, is_compatible, merge
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.promotion import is_weak, promoted_dtype, ufunc_dtype
from asyncflow.state.variables.immutable import sealed
from asyncflow.state.variables.pure import check_pure, compile_pure, needs_host, stays_on_host
from asyncflow.state.variables.variable_state import VariableState
from asyncflow.values import Array, Conduct, Kernel, Namespace


class Variable(Resource, Operators):
    """A variable: a value that survives a run; used like a tensor, it is read anew at each use.

    It belongs to no graph. Its value lives in the session or, with `container`, in the container of that name. All
    sessions of the process share it there under the variable's name, whatever devices they have; the first user sets
    the initial value. In a graph with ordered effects its reads and writes happen in the order they were written.

    A value stays in the memory of the device that wrote it. Another device, or the host, copies it at the first read
    after a write, in this session or in a session that shares the container. `copy.copy` and `copy.deepcopy` give the
    variable itself; for one of its own, make another, of ``await session.run(v)``.

    Args:
        value: the initial value: an array, a number or nested lists of numbers; copied. Or a `Spec`, for a variable
            that has no value before it is assigned one.
        name: for messages, and the key inside a container; None generates one.
        container: a name shared by sessions; None for a value of the session's own.
        dtype: of the value; None takes NumPy's choice.
        shape: partial shape that all values have to fit; None for the initial value's.

    Raises:
        DTypeError, ShapeError: `value` does not fit `dtype` or `shape`.
        GraphError: `value` is symbolic, or a variable in a container has no name.

    >>> import asyncflow as af
    >>> count = Variable(0, name="count")
    >>> with af.Graph():
    ...     print(count.assign_add(1), (count + 1).dtype)
    <Tensor count/assign_add:0 int64[]> int64
    """

    noun = "variable"

    def __init__(
        self,
        value: TensorLike | Spec,
        *,
        name: str | None = None,
        container: str | None = None,
        dtype: DTypeLike | None = None,
        shape: ShapeLike = None,
    ) -> None:
        super().__init__(name, container)
        self.spec, self.initial = _declared(value, dtype, shape)

    @property
    def signature(self) -> str:
        """See `Resource.signature`."""
        return f"a variable {self.spec}"

    # -- symbolic use --------------------------------------------------------------------------------------------

    def __asyncflow_tensor__(self) -> Tensor:
        """A new read of the variable, in the current graph."""
        return self.read()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.read())  # one read: by `__getitem__`, as Python does else, each item would be of another

    def read(self) -> Tensor:
        """Read the value at this point of the program.

        Raises:
            GraphError: no graph is being built.
        """
        with graph_for(outside="session.run(variable)"):
            return apply(VARIABLE_READ, name=f"{self.name}/read", variable=self)[0]

    def assign(self, x: TensorLike) -> Tensor:
        """Make `x` the value.

        Args:
            x: same dtype, and a shape that fits; Python numbers and lists take the variable's dtype.

        Returns:
            The new value.

        Raises:
            DTypeError, ShapeError: `x` cannot be a value of the variable.
        """
        return self._write(ASSIGN, x, "assign")

    def assign_add(self, x: TensorLike) -> Tensor:
        """Add `x`, which broadcasts to the value's shape, and return the new value; see `assign`."""
        return self._write(ASSIGN_ADD, x, "assign_add")

    def assign_sub(self, x: TensorLike) -> Tensor:
        """Subtract `x`, which broadcasts to the value's shape, and return the new value; see `assign`."""
        return self._write(ASSIGN_SUB, x, "assign_sub")

    def update(self, fn: Callable[..., TensorLike], *xs: TensorLike) -> Tensor:
        """Make ``fn(old, *xs)`` the value, atomically (Assign-f of MAPL '17).

        Args:
            fn: called once, now, with tensors; returns the new value. It may use tensors around it. Only pure ops: it
                runs again if another write came between.
            xs: values it gets after the old one. A Python number takes the variable's dtype if it fits.

        Returns:
            The new value.

        Raises:
            DTypeError, ShapeError: the result cannot be a value of the variable.
            GraphError: `fn` builds something that is not pure: state, coroutines, random numbers, branches or loops.
        """
        if not callable(fn):
            raise GraphError(f"update of variable {self.name!r} takes a function of the old value first; got {fn!r}")
        with graph_for(*xs) as graph:
            inputs = [graph.import_tensor(self._operand(x)) for x in xs]
            return _update(self, graph, fn, inputs)

    def _write(self, op: Op, x: TensorLike, verb: str) -> Tensor:
        with graph_for(x, outside="session.swap_variables({variable: value})" if op is ASSIGN else ""):
            return apply(op, self._own(x), name=f"{self.name}/{verb}", variable=self)[0]

    def _own(self, x: TensorLike) -> Tensor:
        """`x` as a tensor; what Python leaves without a dtype takes the variable's."""
        if is_symbolic(x) or isinstance(x, np.ndarray | np.generic):
            return as_tensor(x)
        if is_weak(x) and promoted_dtype([self.dtype, x]) != self.dtype:
            raise DTypeError(
                f"{x!r} does not fit variable {self.name!r} of dtype {dtype_name(self.dtype)}; convert it yourself if "
                f"you mean to lose data"
            )
        return constant(x, self.dtype)

    def _operand(self, x: TensorLike) -> Tensor:
        # "V" is the kind of bfloat16. A number that does not fit keeps its own dtype, for `fn` to promote to.
        fits = is_weak(x) and self.dtype.kind in "biufcV" and promoted_dtype([self.dtype, x]) == self.dtype
        return constant(x, self.dtype) if fits else as_tensor(x)

    def _refuse_in_place(self, other: object) -> NoReturn:
        raise GraphError(
            f"v += x and similar operators would make v a tensor and leave variable {self.name!r} as it is; write "
            f"v.assign_add(x), v.assign_sub(x), or v.update(lambda old: old * x)"
        )

    if not TYPE_CHECKING:  # a type checker takes them for the operators without an equals sign, which give tensors
        __iadd__ = __isub__ = __imul__ = __imatmul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = (
            _refuse_in_place
        )
        __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _refuse_in_place

    def described(self) -> Attrs:
        """See `Resource.described`."""
        return {"container": self.container, "initial": self.initial, "name": self.name, "spec": self.spec}

    # -- state ---------------------------------------------------------------------------------------------------

    def create_state(self) -> VariableState:
        """A state that holds the initial value, if there is one."""
        return VariableState(self.name, self.spec, self.initial)


def _revived(attrs: Attrs) -> Variable:
    """Make a variable from its description in a text."""
    container, initial, name, spec = attrs["container"], attrs["initial"], attrs["name"], attrs["spec"]
    if len(attrs) != 4 or type(name) is not str or not (container is None or type(container) is str):
        raise GraphError("a variable has a container, an initial value, a name and a spec")
    if not isinstance(spec, Spec) or (initial is not None and not isinstance(initial, np.ndarray)):
        raise GraphError("a variable has a spec, and an array or none as its initial value")
    if initial is None:
        return Variable(spec, name=name, container=container)
    if initial.dtype != spec.dtype:
        raise GraphError(f"a variable of {spec} has an initial value of {initial.dtype}")
    return Variable(initial, name=name, container=container, shape=spec.shape)


revives("Variable", _revived)


def _declared(value: TensorLike | Spec, dtype: DTypeLike | None, shape: ShapeLike) -> tuple[Spec, Array | None]:
    """Spec and initial value of a variable made with these arguments."""
    if isinstance(value, Spec):
        if dtype is not None or shape is not None:
            raise GraphError(f"Variable({value}): a Spec says dtype and shape itself; leave out dtype= and shape=")
        if value.dtype == VARIANT:
            raise DTypeError("a variable cannot hold variants; only the ops that made them read them")
        return value, None
    if is_symbolic(value):
        raise GraphError(
            f"Variable({value!r}): the initial value is fixed before any run; "
            f"write Variable(af.spec(dtype, shape)) and assign the tensor to it"
        )
    array = as_array(value, None if dtype is None else as_dtype(dtype))
    array.flags.writeable = False  # sessions without a value start with this very array
    declared = array.shape if shape is None else as_shape(shape)
    if not is_compatible(array.shape, declared):
        raise ShapeError(
            f"the initial value has shape {format_shape(array.shape)}; shape={format_shape(declared)} does not allow it"
        )
    return Spec(array.dtype, declared), array


# -- ops -------------------------------------------------------------------------------------------------------------


def _effects(access: Access) -> Callable[[Node], Effects]:
    return lambda node: ((node.attrs["variable"].effect_key, access),)


def _fitting(variable: Variable, x: Spec) -> Spec:
    """The spec of a value of `variable` that also has spec `x`."""
    if x.dtype != variable.dtype:
        raise DTypeError(
            f"variable {variable.name!r} is {variable.spec} and cannot hold {x}; convert the value with af.astype"
        )
    if not is_compatible(x.shape, variable.shape):
        raise ShapeError(f"variable {variable.name!r} is {variable.spec} and cannot hold {x}")
    return Spec(x.dtype, merge(x.shape, variable.shape))


def _assign_spec(x: Spec, *, variable: Variable) -> Spec:
    return _fitting(variable, x)


def _arithmetic_spec(ufunc: np.ufunc) -> Callable[..., Spec]:
    def infer(x: Spec, *, variable: Variable) -> Spec:
        if x.dtype != variable.dtype:
            return _fitting(variable, x)  # raises: promotion would change the variable's dtype
        return _fitting(variable, Spec(ufunc_dtype(ufunc, x.dtype, x.dtype), broadcast([variable.shape, x.shape])))

    return infer


def _arithmetic(name: str, ufunc: np.ufunc) -> Op:
    def kernel(xp: Namespace, *, variable: VariableState) -> Kernel:
        return partial(variable.apply, sealed(getattr(xp, ufunc.__name__)), xp=xp)

    conduct, effects = Conduct(commutes=True), _effects(Access.WRITE)
    return define(name, _arithmetic_spec(ufunc), kernel, effects=effects, conduct=conduct, traits=KERNELS)


def _update_spec(*inputs: Spec, variable: Variable, function: Subgraph) -> Spec:
    return _fitting(variable, function.results[0].spec)


def _update_kernel(xp: Namespace, *, variable: VariableState, function: Subgraph) -> Kernel:
    return partial(variable.apply, compile_pure(xp, function), xp=xp)


def _update_host_inputs(node: Node) -> Collection[int]:
    """Return the places of counters and predicates, which the body may use to choose the part to change."""
    return [place for place, x in enumerate(node.inputs) if stays_on_host(x)]


def _read_kernel(xp: Namespace, *, variable: VariableState) -> Kernel:
    return variable.read if xp is np else partial(variable.read_in, xp)


VARIABLE_READ = define(
    "variable_read", lambda *, variable: variable.spec, _read_kernel, effects=_effects(Access.READ), traits=KERNELS
)
# CUDA graphs may contain these ops, with the variable as input and result, but not a user's update below.
ASSIGN = define(
    "variable_assign",
    _assign_spec,
    lambda xp, *, variable: variable.assign if xp is np else partial(variable.assign, xp=xp),
    effects=_effects(Access.WRITE),
    traits=KERNELS,
)
ASSIGN_ADD = _arithmetic("variable_assign_add", np.add)
ASSIGN_SUB = _arithmetic("variable_assign_sub", np.subtract)
UPDATE = define(
    "variable_update",
    _update_spec,
    _update_kernel,
    effects=_effects(Access.WRITE),
    host_inputs=_update_host_inputs,
    traits=KERNELS,
)
USER_UPDATE = register(
    replace(UPDATE, name="variable_user_update", conduct=Conduct(is_user=True), host_inputs=(), traits=OPAQUE)
)
"""An update whose function calls user code, so it may take long however small its values are.

An update that looks at values does so as well, which only the host can: its variable lives on a CPU."""


# -- update ----------------------------------------------------------------------------------------------------------


def _update(variable: Variable, graph: Graph, fn: Callable[..., TensorLike], inputs: list[Tensor]) -> Tensor:
    label = graph.unique_name(f"{variable.name}/update")
    body = Subgraph(graph, label)
    with body:
        old = body.add_input(variable.spec, "old")
        returned = fn(old, *[body.add_input(x.spec, "x") for x in inputs])
        result = body.import_tensor(variable._own(returned))
    body.results.append(result)
    body.closed = True
    check_pure(body, label)  # the state runs it again after a concurrent write
    attrs = {"variable": variable, "function": body}
    try:
        spec = _update_spec(variable=variable, function=body)
    except GraphError as error:
        raise type(error)(f"{label}: {error.reason}") from None
    op = USER_UPDATE if needs_host(body) else UPDATE
    node = graph.add_node(op, [*inputs, *body.captures], attrs, spec, reserved_name=label)
    for outer in body.outer_controls:
        add_control_input(node, outer)
    return node.outputs[0]
