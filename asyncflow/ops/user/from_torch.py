"""`from_torch`: a `torch.nn.Module`, or a function on torch's tensors, becomes an op of the graph.

Tensors and the arrays of a device share memory, in and out. On a CUDA device the module runs on the stream of the node,
inside one synchronous block: torch is told that this is its current stream, so it allocates in the order of that stream
and neither side waits for the other.

The gradient runs the module once more, with gradients recorded: what the first run would have kept need not live until
then, and a graph may be differentiated after it has run.

Rows (`map_fn`, `vmap`, `batched`, pools) are one call of the module. With ``rows=True`` it gets the rows as they are.
Else `torch.vmap` maps the module over them, which gives what each row gives for itself. One more axis alone might mix
rows, or mean something else, as for a recurrent layer. What `torch.vmap` refuses is called row by row.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from asyncflow.errors import GraphError, RowByRow, brief
from asyncflow.foreign_names import install
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import Op
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import VARIANT, as_dtype, dtype_name, string
from asyncflow.graph.values.shapes import Shape, format_shape, is_compatible, size_of
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.axes import check_flag
from asyncflow.ops.derivatives.shapes import carries_gradient
from asyncflow.ops.user.custom import Outputs, declared_specs
from asyncflow.ops.user.recorded_calls import recorded
from asyncflow.ops.user.results import require_rows
from asyncflow.ops.user.rules import output_gradients
from asyncflow.ops.user.torch_arrays import CudaTensors, HostTensors, TorchTensor, torch_dtype
from asyncflow.values import Array, Conduct, Kernel, Nest, Value

_KINDS = frozenset({"cpu", "cuda"})
"""PyTorch's names of kinds of devices that sessions may have."""

_log = logging.getLogger("asyncflow.runtime")

_MOST_REFUSED = 3
"""Calls for many rows that fail, one after the other, before the module is called row by row for good."""

_PROBES = 64, 96
"""Stand-ins for unknown extents when outputs are inferred; multiples of what modules divide by."""


class TorchOp:
    """A module or function of PyTorch's as an op; made by `from_torch`.

    Attributes:
        module: it.
        name: of the op and its nodes.
    """

    def __init__(
        self, module: Callable[..., object], outputs: Outputs, name: str | None, rows: bool | None = None
    ) -> None:
        self._torch: Any = importlib.import_module("torch")
        if not callable(module):
            raise GraphError(f"from_torch takes a torch.nn.Module or a function on tensors; got {brief(module)}")
        self.module = module
        self.name = name or getattr(module, "__name__", type(module).__name__).replace("<lambda>", "torch")
        self._is_module = isinstance(module, self._torch.nn.Module)
        self._outputs = outputs
        if outputs is not None:
            _check_specs(self.name, outputs)
        # Without CUDA, PyTorch cannot read a card's memory: nodes then run on the host, like other user functions.
        self._takes_cards: bool = self._torch.cuda.is_available()
        # Calls must not overlap: PyTorch has one random generator per process, and parameters are swapped in and out.
        conduct = Conduct(is_user=True, alone=self._torch)
        make = functools.partial(Op, takes_any_arrays=self._takes_cards, conduct=conduct)
        flops = self._flops if self._is_module else None
        self._rows = rows
        self._refused = 0
        self._op = make(
            self.name,
            declared_specs,
            self._of_one_row if rows else self._forward,
            rows_kernel=None if rows is False else self._of_rows,
            flops=flops,
            derivative=self._derivative,
        )
        # The module runs again, and each product has two backward products: for its input and its parameter.
        thrice = None if flops is None else lambda *shapes, **attrs: 3 * self._flops(*shapes, **attrs)
        self._gradient_op = make(f"{self.name}_gradient", declared_specs, self._backward, flops=thrice)

    def __repr__(self) -> str:
        return f"<from_torch {self.name}>"

    def parameters(self) -> dict[str, Array]:
        """Copies of the module's parameters by name, such as ``"0.weight"``, to make variables of.

        Raises:
            GraphError: it is a function.
        """
        if not self._is_module:
            raise GraphError(f"{self.name} is a function: its tensors are its arguments, and it has no parameters")
        host = HostTensors(self._torch)
        return {name: np.array(host.array(x.detach().cpu())) for name, x in self._module.named_parameters()}

    @property
    def _module(self) -> Any:
        return self.module

    # -- building ------------------------------------------------------------------------------------------------

    def __call__(
        self, *inputs: TensorLike, params: Mapping[str, TensorLike] | None = None, **arguments: object
    ) -> Nest:
        """A node for tensors.

        Args:
            inputs: what the module is called with, by position.
            params: tensors or variables in place of the module's parameters of these names, through which gradients
                flow. The others are the module's own.
            arguments: static Python values that the module takes by name.

        Returns:
            The nest of tensors that was declared or inferred.

        Raises:
            GraphError: no graph is being built, `params` does not fit, or outputs are not declared and cannot be
                inferred. Or a tensor of the module that is not among `params` has no data, or is on a device other than
                CPUs and CUDA cards.
        """
        given = dict(params or {})
        self._check_names(given)
        home = self._home(given)
        with graph_for(*inputs, *given.values()) as graph:
            tensors = [graph.import_tensor(as_tensor(x)) for x in inputs]
            tensors += [graph.import_tensor(self._as_parameter(name, x)) for name, x in given.items()]
            for x in tensors:
                if x.dtype in (string, VARIANT):
                    raise GraphError(f"{self.name}: {x!r} is no array of numbers")
            outputs = self._outputs
            if outputs is None:
                outputs = self._inferred(tensors, tuple(given), arguments)
            attrs = {"outputs": outputs, "names": tuple(given), "arguments": arguments}
            node = graph.add_node(self._op, tensors, attrs, declared_specs(**attrs))
        # Parameters that are not given stay in the module's memory.
        node.device = node.device or home
        return nest.flatten(outputs)[1].unflatten(node.outputs)

    def _check_names(self, given: Mapping[str, TensorLike]) -> None:
        known = dict(self._module.named_parameters()) if self._is_module else {}
        unknown = [name for name in given if name not in known]
        if unknown:
            raise GraphError(f"{self.name} has no parameter {unknown[0]!r}; it has {', '.join(known) or 'none'}")

    def _as_parameter(self, name: str, value: TensorLike) -> Tensor:
        tensor = as_tensor(value)
        own = self._module.get_parameter(name)
        spec = Spec(as_dtype(_name(own.dtype)), tuple(own.shape))
        if tensor.dtype != spec.dtype or not is_compatible(tensor.shape, spec.shape):
            raise GraphError(f"{self.name}: parameter {name!r} is {spec}, and {tensor!r} was given")
        return tensor

    def _home(self, given: Mapping[str, TensorLike]) -> str | None:
        """The kind of device that the module's own tensors are on; None if it has none, or no card could be chosen.

        Raises:
            GraphError: no device of a session is of that kind.
        """
        kinds: dict[str, str] = {}
        for name, x in self._own_tensors():
            if name not in given:
                kinds.setdefault(x.device.type, name)
        for kind, name in kinds.items():
            if kind not in _KINDS:
                cause = "has no data" if kind == "meta" else f"is on a device of kind {kind!r}"
                move = "to_empty(device='cpu') and load its values" if kind == "meta" else "to('cpu')"
                raise GraphError(
                    f"{self.name}: its tensor {name!r} {cause}, and nodes run on CPUs and cards of CUDA's; move the "
                    f"module with module.{move}, or pass all its tensors as params="
                )
        return next(iter(kinds)) if len(kinds) == 1 and self._takes_cards else None

    def _own_tensors(self) -> list[tuple[str, TorchTensor]]:
        if not self._is_module:
            return []
        return [*self._module.named_parameters(), *self._module.named_buffers()]

    def _inferred(self, tensors: Sequence[Tensor], names: tuple[str, ...], arguments: Attrs) -> Nest:
        """The nest of specs that the module gives on tensors without data."""
        torch = self._torch
        is_open = any(None in (x.shape or ()) for x in tensors)
        found = []
        try:
            if any(x.shape is None for x in tensors):
                raise ValueError("the rank of an input is unknown")
            # Twice, if an extent is open: result extents that differ between the probes are open, too.
            for extent in _PROBES if is_open or self._rows else _PROBES[:1]:
                probes = [
                    torch.empty([extent if dim is None else dim for dim in x.shape or ()], dtype=dtype, device="meta")
                    for x in tensors
                    for dtype in [torch_dtype(torch, x.dtype)]
                ]
                if self._rows:
                    probes = self._with_rows(probes, names, extent)
                own = {name: torch.empty_like(x, device="meta") for name, x in self._own_tensors()}
                with torch.no_grad():
                    returned = self._called(probes, names, arguments, own)
                found.append(nest.map_leaves(_row_spec_of(extent) if self._rows else _spec_of, returned))
        except Exception as error:  # the module's own code may raise anything
            seen = ", ".join(f"{x.name} {x.spec}" for x in tensors)
            raise GraphError(
                f"{self.name}: its outputs cannot be inferred ({type(error).__name__}: {brief(str(error))}); "
                f"declare it: af.from_torch(module, outputs=af.spec(dtype, shape))\n  inputs   {seen or 'none'}"
            ) from error
        return _joined(found)

    def _derivative(self, node: Node, *grads: Tensor | None) -> Sequence[Tensor | None]:
        wanted = tuple(index for index, x in enumerate(node.inputs) if carries_gradient(x.spec))
        reaching = {i: g for i, g in enumerate(output_gradients(node.outputs, grads)) if g is not None}
        results: list[Tensor | None] = [None] * len(node.inputs)
        if not wanted or not reaching:
            return results
        made = apply(
            self._gradient_op,
            *node.inputs,
            *reaching.values(),
            outputs=tuple(node.inputs[index].spec for index in wanted),
            names=node.attrs["names"],
            arguments=node.attrs["arguments"],
            wanted=wanted,
            reaching=tuple(reaching),
        )
        # The gradient runs the module, too, whose own tensors are on the device of the first run.
        made[0].node.device = made[0].node.device or node.device
        for index, grad in zip(wanted, made, strict=True):
            results[index] = grad
        return results

    def _flops(self, inputs: Sequence[Shape], results: Sequence[Shape], /, **attrs: object) -> float:
        """An estimate: every parameter is multiplied once a row."""
        rows = max((size_of(shape) or 1) // max(shape[-1] or 1, 1) for shape in (*inputs, (1,)) if shape)
        return float(2 * rows * sum(x.numel() for _, x in self._own_tensors()))

    # -- running -------------------------------------------------------------------------------------------------

    def _called(
        self,
        tensors: Sequence[TorchTensor],
        names: tuple[str, ...],
        arguments: Attrs,
        own: Mapping[str, TorchTensor] | None = None,
    ) -> Nest:
        """The result of the module; the last tensors are its parameters of these names, `own` others of its tensors."""
        count = len(tensors) - len(names)
        replaced = {**(own or {}), **dict(zip(names, tensors[count:], strict=True))}
        if not replaced:
            return self.module(*tensors[:count], **arguments)
        call = self._torch.func.functional_call
        return call(self.module, replaced, tuple(tensors[:count]), dict(arguments))

    def _with_rows(self, tensors: Sequence[TorchTensor], names: tuple[str, ...], rows: int) -> list[TorchTensor]:
        """Return the same inputs repeated for `rows` rows; parameters stay as they are."""
        count = len(tensors) - len(names)
        return [x.expand(rows, *x.shape) if place < count else x for place, x in enumerate(tensors)]

    def _forward(self, xp: ModuleType, *, outputs: Outputs, names: tuple[str, ...], arguments: Attrs) -> Kernel:
        return self._kernel(xp, outputs, names, lambda inputs: self._called(inputs, names, arguments))

    def _of_one_row(self, xp: ModuleType, *, outputs: Outputs, names: tuple[str, ...], arguments: Attrs) -> Kernel:
        """The kernel of a module of rows, for a single one."""
        of_rows = self._forward(xp, outputs=_of_many(outputs), names=names, arguments=arguments)
        is_single = isinstance(outputs, Spec)

        def call(*values: Array) -> Value:
            count = len(values) - len(names)
            found = of_rows(*(xp.asarray(value)[None] for value in values[:count]), *values[count:])
            require_rows((found,) if is_single else found, 1)
            return found[0] if is_single else tuple(x[0] for x in found)

        return call

    def _of_rows(self, xp: ModuleType, *, outputs: Outputs, names: tuple[str, ...], arguments: Attrs) -> Kernel:
        """The kernel for many rows; see `Op.rows_kernel`."""
        call = self._called_with_rows if self._rows else self._mapped
        return self._kernel(xp, _of_many(outputs), names, lambda inputs: call(inputs, names, arguments))

    def _called_with_rows(self, inputs: Sequence[TorchTensor], names: tuple[str, ...], arguments: Attrs) -> Nest:
        """The results of a module of rows; parameters are the same for all rows, as far as that is known."""
        count = len(inputs) - len(names)
        if not len(inputs[0]) or any(_has_own(x) for x in inputs[count:]):
            raise RowByRow
        return self._called([*inputs[:count], *(x[0] for x in inputs[count:])], names, arguments)

    def _mapped(self, inputs: Sequence[TorchTensor], names: tuple[str, ...], arguments: Attrs) -> Nest:
        """The results of a module of a single row, for all of them."""
        if len(inputs[0]) == 1:  # called directly, a module may also do operations that vmap refuses, such as drawing
            return nest.map_leaves(_with_row, self._called([x[0] for x in inputs], names, arguments))
        # A module with buffers may count its calls there, so while training it is not run for rows that may run again.
        counts = self._is_module and self._module.training and any(True for _ in self._module.buffers())
        if self._refused >= _MOST_REFUSED or counts or not len(inputs[0]):
            raise RowByRow
        dims = [0 if _has_own(x) else None for x in inputs]
        if not any(dim == 0 for dim in dims):  # vmap needs at least one input to map over
            dims = [0] * len(inputs)
        given = [x if dim == 0 else x[0] for x, dim in zip(inputs, dims, strict=True)]
        try:
            found: Nest = self._torch.vmap(lambda *row: self._called(row, names, arguments), in_dims=tuple(dims))(
                *given
            )
        except Exception as error:  # vmap cannot map it, or a row fails; single calls then find the row
            self._refused += 1
            if self._refused == _MOST_REFUSED:
                _log.warning(
                    "%s is called for each row by itself, as torch.vmap cannot map it over rows (%s: %s); "
                    "if it takes rows, say so with af.from_torch(module, rows=True)",
                    *(self.name, type(error).__name__, brief(str(error))),
                )
            raise RowByRow from error
        self._refused = 0
        return found

    def _kernel(
        self,
        xp: ModuleType,
        outputs: Outputs,
        names: tuple[str, ...],
        call: Callable[[Sequence[TorchTensor]], Nest],
    ) -> Kernel:
        """The kernel that gives the outputs of ``call(inputs)``."""
        tensors_of = self._bridge(xp)
        structure = nest.flatten(outputs)[1]
        specs = nest.flatten(outputs)[0]
        is_single = isinstance(outputs, Spec)

        def forward(*values: Array) -> Value:
            with tensors_of.active(), self._torch.no_grad():
                inputs = [tensors_of.tensor(value) for value in values]
                if self._takes_cards:
                    self._check_place(inputs, names)
                # PyTorch counts writes to a tensor. Inputs share memory with the graph's values, which must not change.
                versions = [x._version for x in inputs]
                leaves = self._leaves(structure, call(inputs))
                if versions != [x._version for x in inputs]:
                    raise RuntimeError(
                        f"{self.name} writes to its inputs, which others use, too; let it write to a clone"
                    )
                shared = tensors_of.places([*inputs, *(x for _, x in self._own_tensors())])
                results = [
                    tensors_of.output(_checked(spec, leaf, f"output {index}"), shared)
                    for index, (spec, leaf) in enumerate(zip(specs, leaves, strict=True))
                ]
            return results[0] if is_single else tuple(results)

        return recorded(forward) if xp is np else forward

    def _backward(
        self,
        xp: ModuleType,
        *,
        outputs: Outputs,
        names: tuple[str, ...],
        arguments: Attrs,
        wanted: tuple[int, ...],
        reaching: tuple[int, ...],
    ) -> Kernel:
        torch, tensors_of = self._torch, self._bridge(xp)

        def backward(*values: Array) -> tuple[Array, ...]:
            with tensors_of.active(), torch.enable_grad():
                tensors = [tensors_of.tensor(value) for value in values]
                inputs, grads = tensors[: -len(reaching)], tensors[-len(reaching) :]
                # New leaves that share the memory: the tape for the gradient ends at them.
                for index in wanted:
                    inputs[index] = inputs[index].detach().requires_grad_()
                before = tensors_of.random_state()
                given = inputs
                if self._rows:  # a single row
                    given = self._with_rows(inputs, names, 1)
                    grads = [grad[None] for grad in grads]
                returned = self._called(given, names, arguments, self._buffers())
                if not torch.equal(before, tensors_of.random_state()):
                    raise RuntimeError(
                        f"{self.name} draws random numbers, and its gradient would be that of others than were drawn "
                        "before; call module.eval()"
                    )
                leaves = [x for x in nest.flatten(returned)[0] if isinstance(x, torch.Tensor)]
                ends = [(leaves[i], grad) for i, grad in zip(reaching, grads, strict=True) if leaves[i].requires_grad]
                found: Sequence[TorchTensor | None] = [None] * len(wanted)
                if ends:  # else no result depends on the inputs
                    ys, grads_of_ys = zip(*ends, strict=True)
                    at = [inputs[index] for index in wanted]
                    found = torch.autograd.grad(ys, at, grads_of_ys, allow_unused=True)
                shared = tensors_of.places(tensors)
                return tuple(
                    tensors_of.output(torch.zeros_like(inputs[index]) if grad is None else grad.detach(), shared)
                    for index, grad in zip(wanted, found, strict=True)
                )

        return recorded(backward) if xp is np else backward

    def _buffers(self) -> dict[str, TorchTensor]:
        """Copies, so that running statistics count a batch once."""
        return {name: x.clone() for name, x in self._module.named_buffers()} if self._is_module else {}

    def _bridge(self, xp: ModuleType) -> HostTensors | CudaTensors:
        return HostTensors(self._torch) if xp is np else CudaTensors(self._torch, xp)

    def _leaves(self, structure: nest.Structure, returned: Nest) -> list[TorchTensor]:
        if structure.kind in (tuple, list) and isinstance(returned, tuple | list):
            returned = structure.kind(returned)  # tuples and lists are interchangeable, as for @op
        try:
            return nest.flatten_like(structure, returned)
        except nest.StructureMismatch as error:
            raise TypeError(f"{self.name} returned another nest than is declared: {error}") from None

    def _check_place(self, inputs: Sequence[TorchTensor], names: tuple[str, ...]) -> None:
        for name, x in self._own_tensors():
            if name not in names and inputs and x.device != inputs[0].device:
                raise RuntimeError(
                    f"{self.name} runs on {inputs[0].device}, and its {name!r} is on {x.device}: move the module "
                    f"there, or ask for its device with af.device"
                )


def from_torch(
    module: Callable[..., object], *, outputs: Outputs = None, name: str | None = None, rows: bool | None = None
) -> TorchOp:
    """Turn a `torch.nn.Module`, or a function on torch's tensors, into an op: ``f = af.from_torch(module)``, ``f(x)``.

    Values and tensors share memory, in and out. On a CPU device the module runs on the event loop if it is short and on
    the device's thread if not; torch's own threads are as many as `torch.set_num_threads` says. On a CUDA device it is
    enqueued on the node's stream; its own memory comes from torch's allocator, which no ``memory_limit`` counts. A node
    goes to a device of the kind that the module's own tensors are on. A PyTorch without CUDA computes on the host: on
    a CPU device if the session has one, and else on behalf of a card, with copies out and in.

    Gradients flow to the inputs, and to those parameters that a call gets from the graph::

        f = af.from_torch(module)
        params = {name: af.Variable(value) for name, value in f.parameters().items()}
        loss = af.mean((f(x, params=params) - y) ** 2)
        step = af.optim.minimize(loss, params, partial(af.optim.sgd, learning_rate=0.1))

    All other parameters are the module's own, as they are when a node runs, and get no gradient. The gradient runs the
    module again and needs the same outputs: a module that draws random numbers (dropout in training) fails with a
    `KernelError`. Buffers that a module updates (batch normalisation in training) are updated once a run, in the order
    in which nodes happen to run. Not covered: second derivatives, complex gradients, autocast, and hooks that need a
    gradient of the module's own parameters. Modules that write to their inputs are refused, and modules that wait for
    the card block the event loop.

    Rows of `map_fn` and `vmap`, members of `batched` calls and rows of pooled loops are one call of the module. With
    ``rows=True`` it is called with one more axis in front of each input, as modules are that take batches. Otherwise
    `torch.vmap` maps it over rows: each row gets the result it would get alone, which takes longer. Modules that cannot
    be mapped are called for each row, and so are those which draw random numbers or update buffers.

    Args:
        module: on the CPU, or on the card of the CUDA device that its nodes run on.
        outputs: a `Spec`, or a nest of them, for the module's results. None: found when the op is called, by running it
            on tensors of torch's "meta" device, which have no data; unknown extents stay unknown.
        name: of the op and its nodes; None takes the function's or the class's.
        rows: True: the module works on rows, as for `op`; a node's inputs and the declared outputs describe a single
            row. Parameters have no such axis. False: each row is a call. None: `torch.vmap` maps the module.

    Raises:
        ImportError: torch is not installed (``pip install 'asyncflow-runtime[torch]'``).
        GraphError: `module` cannot be called, `outputs` is no nest of specs, or `rows` is neither a bool nor None.
    """
    if rows is not None:
        check_flag(rows, "from_torch(rows): rows")
    try:
        return TorchOp(module, outputs, name, rows)
    except ModuleNotFoundError as error:
        raise ImportError(f"from_torch needs PyTorch: {install('torch')}") from error


def _check_specs(name: str, outputs: Outputs) -> None:
    leaves = nest.flatten(outputs)[0]
    if not leaves or not all(isinstance(leaf, Spec) for leaf in leaves):
        raise GraphError(f"{name}: outputs are described by af.spec(dtype, shape), or a nest of specs; got {outputs!r}")


def _of_many(outputs: Outputs) -> Outputs:
    """Return the specs of rows, given the specs of a single row."""
    many: Outputs = nest.map_leaves(lambda x: Spec(x.dtype, None if x.shape is None else (None, *x.shape)), outputs)
    return many


def _has_own(x: TorchTensor) -> bool:
    """Return True if rows may be different; a value common to all rows has no step from one to the next."""
    return len(x) > 1 and x.stride(0) != 0


def _with_row(leaf: TorchTensor) -> TorchTensor:
    return leaf[None] if hasattr(leaf, "untyped_storage") else leaf


def _name(dtype: object) -> str:
    return str(dtype).rpartition(".")[2]


def _spec_of(leaf: TorchTensor) -> Spec:
    if not hasattr(leaf, "dtype"):
        raise TypeError(f"it returns {brief(leaf)}, which is no tensor")
    return Spec(as_dtype(_name(leaf.dtype)), tuple(leaf.shape))


def _row_spec_of(rows: int) -> Callable[[TorchTensor], Spec]:
    """Return a function that derives the spec of a row from the results for `rows` rows."""

    def spec_of(leaf: TorchTensor) -> Spec:
        found = _spec_of(leaf)
        if not found.shape or found.shape[0] != rows:
            raise TypeError(f"rows=True, but {rows} rows give {found}")
        return Spec(found.dtype, found.shape[1:])

    return spec_of


def _joined(found: Sequence[Nest]) -> Nest:
    """The nest of specs, in which an extent is unknown if it differs between the nests found."""
    leaves = [nest.flatten(one)[0] for one in found]
    structure = nest.flatten(found[0])[1]
    return structure.unflatten([functools.reduce(_joined_spec, specs) for specs in zip(*leaves, strict=True)])


def _joined_spec(a: Spec, b: Spec) -> Spec:
    if a.rank != b.rank:
        return Spec(a.dtype, None)
    dims = zip(a.shape or (), b.shape or (), strict=True)
    return Spec(a.dtype, tuple(x if x == y else None for x, y in dims))


def _checked(spec: Spec, tensor: TorchTensor, what: str) -> TorchTensor:
    """`tensor`, which has to be of the declared dtype and shape."""
    found = f"{type(tensor).__name__}"
    if hasattr(tensor, "untyped_storage"):
        shape = tuple(tensor.shape)
        if _name(tensor.dtype) == dtype_name(spec.dtype) and is_compatible(shape, spec.shape):
            return tensor
        found = f"{_name(tensor.dtype)}{format_shape(shape)}"
    raise TypeError(f"the module returned {found} as {what}, declared as {spec}")
