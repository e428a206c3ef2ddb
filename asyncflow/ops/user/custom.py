"""`@op`: a Python function or coroutine function of the user's becomes an op of the graph."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, update_wrapper
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, overload

from asyncflow.errors import GraphError
from asyncflow.graph.building.build import TensorLike, as_tensor, graph_for, is_symbolic
from asyncflow.graph.graph import current_graph
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import Access, DeviceKernel, Effects, Op
from asyncflow.graph.values import nest
from asyncflow.graph.values.shapes import Shape
from asyncflow.graph.values.spec import Spec, spec_of
from asyncflow.ops.user.batch import Batch
from asyncflow.ops.user.limits import Backoff, CallLimits, Rate, RetryOn, call_limited
from asyncflow.ops.user.recorded_calls import recorded, recorded_coroutine
from asyncflow.ops.user.results import Results, checked, given_up, read_only, require_rows
from asyncflow.ops.user.rules import accepted_arguments, rule_of_op
from asyncflow.values import Array, Conduct, Kernel, Namespace, Nest, Value

nest.register_leaf(Spec)

ShareCalls: TypeAlias = Callable[[Callable[..., Nest], Batch, str, Sequence[bool]], Callable[..., Nest]]
"""Makes a function whose calls are computed together; see `asyncflow.lift.calls.batched.batched_with`."""

_share_calls: list[ShareCalls] = []


def install_batching(share: ShareCalls) -> None:
    """Note how the calls of a function are computed together: the room of lifting, above this one, knows that."""
    _share_calls[:] = [share]


Outputs: TypeAlias = object
"""A `Spec`, any nest of specs, or a function of the inputs' specs (and, by name, of static arguments) that returns
one.
"""

Cost: TypeAlias = "float | Callable[[Sequence[Shape], Sequence[Shape]], float]"
"""Arithmetic operations per call: a number, or a function of the inputs' and the outputs' shapes."""


P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., object])


class CustomOp(Generic[P]):
    """A user's function as an op; made by the decorator `op`.

    Attributes:
        function: the decorated function.
        op: its definition, which nodes refer to.
        gradient: the argument ``gradient=``.
        device: constraint that its nodes carry; None for none.
        limits: of its calls; None for none.
    """

    def __init__(
        self,
        function: Callable[P, object],
        *,
        outputs: Outputs = None,
        name: str | None = None,
        gradient: Callable[..., object] | None = None,
        device: str | None = None,
        cost: Cost | None = None,
        stateful: bool | None = None,
        rows: bool = False,
        pure: bool = False,
        batch: Batch | None = None,
        limits: Callable[[str], CallLimits] | None = None,
    ) -> None:
        self.name = name or _name_of(function)
        self.function: Callable[..., Any] = function
        self.gradient = gradient
        self.device = device
        self.outputs = _declared(self.name, function, outputs)
        is_async = _is_coroutine_function(self.name, function)
        if batch is not None and not isinstance(batch, Batch):
            raise GraphError(f"@op: batch= of {self.name} is an af.Batch; got {batch!r}")
        self._batch = batch
        # Packed rows are not an axis of members.
        rows = rows or (batch is not None and batch.ragged is None)
        if is_async and (rows or batch is not None):
            option = "rows=True" if batch is None else "batch="
            raise GraphError(f"@op: {self.name} is a coroutine function; {option} is for functions that do not await")
        self._is_stateful = self._has_effects(stateful)
        self.limits = None if limits is None else self._limited(limits(self.name), is_async)
        if pure and self._is_stateful:
            raise GraphError(f"@op: {self.name} is pure=True and has effects: it is stateful=True, or has no outputs")
        # A separate object: with this one, the op would refer to its owner, a cycle.
        calls = Calls(function, is_async, self.name, self.limits)
        self.op = Op(
            self.name,
            declared_specs,
            calls.one_row_kernel if rows else calls.kernel,
            rows_kernel=calls.rows_kernel if rows else None,
            effects=calls.effects if self._is_stateful else None,
            conduct=Conduct(
                is_async=is_async or self.limits is not None,
                is_user=True,
                is_repeatable=pure,
                alone=calls if self._is_stateful else None,
            ),
            flops=None if cost is None else partial(_flops, cost),
            derivative=None if gradient is None else rule_of_op(self.name, gradient),
        )
        self._signature = inspect.signature(function)  # computed once: each call in a graph is checked against it
        update_wrapper(self, function, updated=())

    # Type checkers see the function's own signature, for arrays; in a graph it takes tensors.
    @overload
    def __call__(self, *inputs: P.args, **arguments: P.kwargs) -> Nest: ...
    @overload
    def __call__(self, *inputs: TensorLike, **arguments: object) -> Nest: ...

    def __call__(self, *inputs: TensorLike, **arguments: object) -> Nest:
        """A node for tensors, or while a graph is built; else what the function itself gives.

        Args:
            inputs: tensors and what converts to them; the function gets their values as NumPy arrays or scalars.
            arguments: static Python values, passed on as they are.

        Returns:
            The nest of tensors that was declared; the node if there are no outputs.

        Raises:
            GraphError: the function does not take these arguments, or a tensor is passed by name.
        """
        if current_graph() is None and not any(is_symbolic(x) for x in inputs):
            return self.function(*inputs, **arguments)  # unchecked, like the undecorated function
        batch = self._batch
        # None stands for the parameter of lengths or offsets, which only a shared call passes.
        told = () if batch is None or batch.tells is None else (None,)
        self._check_call((*inputs, *told), arguments)
        if batch is None:
            return self._build(inputs, arguments)

        side_by_side: list[bool] = []

        def build(*given: TensorLike, **told: TensorLike) -> Nest:
            return self._build((*given, *told.values()), arguments, side_by_side)

        return _share_calls[0](build, batch, self.name, side_by_side)(*inputs)

    def _build(self, inputs: Sequence[TensorLike], arguments: Attrs, side_by_side: list[bool] | None = None) -> Nest:
        with graph_for(*inputs) as graph:
            tensors = [graph.import_tensor(as_tensor(x)) for x in inputs]
            outputs = self._declare(tensors, arguments)
            if side_by_side is not None and self._batch is not None and self._batch.ragged is not None:
                side_by_side[:] = [leaf.shape is not None and leaf.shape[:1] == (None,) for leaf in _leaves_of(outputs)]
                outputs = nest.map_leaves(_of_members, outputs)
            attrs: Attrs = {"outputs": outputs, "arguments": arguments}
            node = graph.add_node(self.op, tensors, attrs, declared_specs(**attrs))
        node.device = self.device or node.device  # the function may need that device, whatever its caller asks for
        return nest.flatten(outputs)[1].unflatten(node.outputs) if node.outputs else node

    def kernel(self, kind: str, *, graph_safe: bool = False) -> Callable[[F], F]:
        """Decorate a function that computes the op on devices of one kind, such as ``"cuda"``.

        Args:
            kind: the kind of device, without a number.
            graph_safe: the function only launches kernels of shapes that follow from its inputs' shapes; see
                `register_kernel`.

        Returns:
            A decorator, which returns the function as it is.

        Raises:
            GraphError, PlacementError: as from `register_kernel`.
        """

        if callable(kind):
            raise GraphError(f'{self.name}.kernel takes a kind of device: write @{self.name}.kernel("cuda")')

        def register(function: F) -> F:
            # Looked up by name: kinds of devices belong to a higher layer.
            sys.modules["asyncflow"].register_kernel(self, kind, function, graph_safe=graph_safe)
            return function

        return register

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    # -- building ------------------------------------------------------------------------------------------------

    def _check_call(self, inputs: Sequence[TensorLike], arguments: Attrs) -> None:
        for name, value in arguments.items():
            if any(is_symbolic(leaf) for leaf in nest.flatten(value)[0]):
                raise GraphError(
                    f"{self.name}: {name}={value!r} is passed by name; names are for static Python values, pass "
                    f"tensors by position"
                )
        try:
            self._signature.bind(*inputs, **arguments)
        except TypeError as error:
            raise GraphError(
                f"{self.name}{self._signature} is called with {len(inputs)} inputs and arguments "
                f"{sorted(arguments)}: {error}"
            ) from None

    def _declare(self, tensors: Sequence[Tensor], arguments: Attrs) -> Outputs:
        """The outputs' specs for a call."""
        if not callable(self.outputs):
            return self.outputs
        try:
            declared = self.outputs(*(tensor.spec for tensor in tensors), **accepted_arguments(self.outputs, arguments))
            _check_specs(self.name, declared)
            if not self._is_stateful:
                self._require_outputs(declared)
        except GraphError as error:
            seen = ", ".join(f"{tensor.name} {tensor.spec}" for tensor in tensors)
            raise type(error)(f"{self.name}: {error.reason}\n  inputs   {seen or 'none'}") from None
        return declared

    def _has_effects(self, stateful: bool | None) -> bool:
        """Return True if calls have effects: as asked for; a function without outputs is only called for effects."""
        if callable(self.outputs) or nest.flatten(self.outputs)[0]:
            return bool(stateful)
        if stateful is False:
            self._require_outputs(self.outputs)
        return True

    def _limited(self, limits: CallLimits, is_async: bool) -> CallLimits | None:
        if limits.given and self._is_stateful and not is_async and limits.max_concurrency is None:
            return replace(limits, max_concurrency=1)  # orders calls of different runs
        return limits if limits.given else None

    def _require_outputs(self, outputs: Outputs) -> None:
        if not nest.flatten(outputs)[0]:
            raise GraphError(
                f"@op: {self.name} has no outputs to ask for, and without stateful=True no effects "
                f"either, so no run would call it; say stateful=True, or declare its outputs"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """The calls of a user's function: kernels and effects. An op has them, and they have no op.

    Attributes:
        function: it.
        is_async: it is a coroutine function.
        name: of the op.
        limits: of its calls; None for none.
        kernels: other functions that compute the same on devices of a kind. A table of all ops would keep a kernel that
            refers to its op, and so the op, for ever.
    """

    function: Callable[..., Any]
    is_async: bool
    name: str
    limits: CallLimits | None = None
    kernels: dict[str, DeviceKernel] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def effects(self, node: Node) -> Effects:
        """Return the effect that orders calls of this function with one another only."""
        # With `eq=False` this is a key by identity: different functions, even equal ones, never wait for one another.
        return ((self, Access.WRITE),)

    def kernel(self, xp: Namespace, *, outputs: Outputs, arguments: Attrs) -> Kernel:
        """Return the function, checked, with static arguments."""
        function = partial(self.function, **arguments) if arguments else self.function
        check = partial(checked, outputs) if isinstance(outputs, Spec) else Results(outputs)
        limits = self.limits
        if limits is not None:  # with limits even a plain function is awaited, as it waits for its turn

            async def call_in_turn(*values: Value) -> Value:
                inputs = tuple(map(read_only, values))
                return check(given_up(await call_limited(limits, function, inputs, is_async=self.is_async)))

            return recorded_coroutine(call_in_turn)

        def call(*values: Value) -> Value:
            return check(given_up(function(*map(read_only, values))))

        async def call_async(*values: Value) -> Value:
            return check(given_up(await function(*map(read_only, values))))

        return recorded_coroutine(call_async) if self.is_async else recorded(call)

    def rows_kernel(self, xp: Namespace, *, outputs: Outputs, arguments: Attrs) -> Kernel:
        """Return the same for a function of rows, given `outputs` of one row."""
        lifted = nest.map_leaves(lambda x: Spec(x.dtype, None if x.shape is None else (None, *x.shape)), outputs)
        return self.kernel(xp, outputs=lifted, arguments=arguments)

    def one_row_kernel(self, xp: Namespace, *, outputs: Outputs, arguments: Attrs) -> Kernel:
        """Return a function of rows as one of a single row."""
        of_rows = self.rows_kernel(xp, outputs=outputs, arguments=arguments)

        def only_row(found: Array | tuple[Array, ...]) -> Value:
            results = found if isinstance(found, tuple) else (found,)
            require_rows(results, 1)
            return results[0][0] if isinstance(outputs, Spec) else tuple(x[0] for x in results)

        def call(*values: Value) -> Value:
            return only_row(of_rows(*(xp.asarray(value)[None] for value in values)))

        async def call_in_turn(*values: Value) -> Value:
            return only_row(await of_rows(*(xp.asarray(value)[None] for value in values)))

        return call if self.limits is None else call_in_turn


@overload
def op(function: Callable[P, object], /) -> CustomOp[P]: ...


@overload
def op(
    *,
    outputs: Outputs = None,
    name: str | None = None,
    gradient: Callable[..., object] | None = None,
    device: str | None = None,
    cost: Cost | None = None,
    stateful: bool | None = None,
    rows: bool = False,
    pure: bool = False,
    batch: Batch | None = None,
    timeout: float | None = None,
    retries: int = 0,
    retry_on: RetryOn | None = None,
    backoff: Backoff | None = None,
    max_concurrency: int | None = None,
    rate: Rate | None = None,
) -> Callable[[Callable[P, object]], CustomOp[P]]: ...


def op(
    function: Callable[..., object] | None = None,
    /,
    *,
    outputs: Outputs = None,
    name: str | None = None,
    gradient: Callable[..., object] | None = None,
    device: str | None = None,
    cost: Cost | None = None,
    stateful: bool | None = None,
    rows: bool = False,
    pure: bool = False,
    batch: Batch | None = None,
    timeout: float | None = None,
    retries: int = 0,
    retry_on: RetryOn | None = None,
    backoff: Backoff | None = None,
    max_concurrency: int | None = None,
    rate: Rate | None = None,
) -> CustomOp[...] | Callable[[Callable[..., object]], CustomOp[...]]:
    """Turn a function or coroutine function into an op.

    In a graph, values passed by position become inputs, and the function gets them as read-only NumPy arrays (or
    scalars, for rank 0); values passed by name are static and arrive as they are. Outside any graph, with plain values,
    the function is called as if it were not decorated. A coroutine function suspends only its own firing. What the
    function returns is checked on every firing; an array that it keeps, to write to it later or to give it again, is
    copied.

    Args:
        function: what to decorate.
        outputs: a `Spec`, a nest of them, ``()`` for none, or a function of the inputs' specs that gives one; may be
            the return annotation instead.
        name: of the op and its nodes; None takes the function's.
        gradient: ``gradient(inputs, outputs, grads)`` builds the op's gradient: nodes of the graph, as its arguments
            are tensors. `inputs` is a tuple; `outputs` is what a call gives; `grads` is what reaches each output, in
            the same nest: zeros where nothing does, None for integers. It returns one gradient for each input, of its
            dtype and shape, in a tuple (of a single one, itself); None where nothing flows. It gets the static
            arguments of the call that it has parameters for. None: an op without a derivative, which `gradients`
            refuses.
        device: constraint that nodes carry, such as ``"cpu"``.
        cost: arithmetic operations per call, or a function of input and output shapes that gives them. It gets guesses
            for extents and ranks that are not known; where it fails, the time is guessed without it.
        stateful: calls have side effects: they run in the order they were written, and always in branches, loops and an
            `af.function`. Calls of a plain function that belong to different runs take turns. Calls of a coroutine
            function overlap: one may wait for another. Without `stateful`, calls with equal inputs may be merged.
            Several runs, or overlapping iterations, may be inside the function at once, on several threads. None: only
            if there are no outputs.
        rows: the function works on rows: each input has one more axis in front, and so have the results; one call does
            for all rows of `map_fn` and `vmap`, and where there are none it gets a single one. The declared outputs
            describe one row. False: it is called for each row.
        pure: True if calls with equal inputs give the same and have no effect. A gradient may then call the function
            once more instead of keeping its results (`recompute`), and members of a failed batch may be tried apart.
        batch: firings of several runs, iterations and branches share a call, as with `batched`; the function then works
            on the rows of all members. Unless it is `pure`, a call that fails fails for all of them. With `pad` or
            `bucket` it gets their lengths as one more argument, and with ``ragged="packed"`` their offsets: a result
            declared with an open first extent is then side by side, as the argument is. Coroutine functions have
            neither `batch` nor `rows`.
        timeout: seconds that one attempt of a call may take, without the time it waits for its turn. A coroutine
            function is cancelled then. A plain function cannot be stopped: its thread goes on, and its result is
            dropped. The same happens when its run is cancelled. None: any time.
        retries: number of further attempts after a failed one. The last error tells the number of attempts, and its
            traceback continues with the tracebacks of up to seven before it.
        retry_on: errors that are worth another attempt: a class, a tuple of classes, or a function of the error. None:
            any `Exception` but what this library raises of the program itself, such as `GraphError`. A cancellation is
            never retried.
        backoff: seconds before the first retry, 0.1 for None. They double before each further one, up to a minute, and
            are shortened at random by up to half, by the session's seed. Or a function ``backoff(failed, error)`` of
            the number of failed attempts and the last error. A run without time for that fails at once.
        max_concurrency: calls at once, of all runs of one session. A plain function that timed out counts until its
            thread returns. None: any number, but one at a time for a plain function that is `stateful`.
        rate: calls that all runs of one session begin: 10 for ten within any second, or ``(100, 60)`` for a hundred
            within any minute. Retries count, too.

    A function with any of these six *limits* is called as a coroutine function is; a plain one gets a thread of its own
    for each attempt. Calls that wait for their turn go by the `priority=` and `timeout=` of their runs, then by
    arrival. They hold no thread, and a run that only waits for them gives its place in `max_runs` to others. In a
    record, a call has its last result alone. Outside any graph there are no limits.

    Raises:
        GraphError: no outputs are declared, the function is a generator, or it has neither outputs nor effects; a
            coroutine function has `rows` or `batch`; or a limit is out of its range.

    >>> import numpy as np
    >>> import asyncflow as af
    >>> @op(outputs=af.spec("float64", (None,)))
    ... def smooth(x, *, width=3):
    ...     return np.convolve(x, np.ones(width) / width, mode="same")
    >>> with af.Graph():
    ...     smooth(af.placeholder("float64", (8,)), width=5)
    <Tensor smooth:0 float64[?]>
    """
    limits = partial(
        CallLimits,
        timeout=timeout,
        retries=retries,
        retry_on=retry_on,
        backoff=backoff,
        max_concurrency=max_concurrency,
        rate=rate,
    )
    made = partial(
        CustomOp,
        outputs=outputs,
        name=name,
        gradient=gradient,
        device=device,
        cost=cost,
        stateful=stateful,
        rows=rows,
        pure=pure,
        batch=batch,
        limits=limits,
    )
    return made if function is None else made(function)


def _leaves_of(outputs: Outputs) -> list[Spec]:
    return nest.flatten(outputs)[0]


def _of_members(spec: Spec) -> Spec:
    """Return the spec of a packed function's result, given the spec of a member's result."""
    return spec if spec.shape is None or spec.shape[:1] == (None,) else Spec(spec.dtype, (None, *spec.shape))


# -- declarations ----------------------------------------------------------------------------------------------------


def _name_of(function: Callable[..., object]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "op" if name == "<lambda>" else name


def _is_coroutine_function(name: str, function: Callable[..., object]) -> bool:
    candidates = (function, getattr(function, "__call__", function))  # noqa: B004
    if any(inspect.isgeneratorfunction(x) or inspect.isasyncgenfunction(x) for x in candidates):
        raise GraphError(
            f"@op: {name} is a generator function; an op gives all its outputs at once: return them, from a function "
            f"or a coroutine function"
        )
    return any(inspect.iscoroutinefunction(x) for x in candidates)


def _declared(name: str, function: Callable[..., object], outputs: Outputs) -> Outputs:
    if outputs is None:
        outputs = _return_annotation(function)
    if outputs is None:
        raise GraphError(
            f"@op: {name} does not declare its outputs; write @af.op(outputs=af.spec(dtype, shape)), "
            f"with a tuple of specs for several outputs and () for none"
        )
    if isinstance(outputs, type) or not callable(outputs):
        _check_specs(f"@op: {name}", outputs)
    return outputs


def _return_annotation(function: Callable[..., object]) -> Outputs:
    """Return the return annotation if it is a spec or a nest of specs, ``()`` if it is None; else None."""
    annotations = getattr(inspect.unwrap(function), "__annotations__", {})
    found = annotations.get("return", type)
    if isinstance(found, str):
        try:
            # Evaluate only the return annotation: a parameter's may name an import for type checkers alone.
            found = eval(found, getattr(function, "__globals__", {}))  # as inspect.get_annotations does
        except Exception:
            return None  # an annotation for type checkers alone
    if (described := spec_of(found)) is not None:
        return described
    leaves, _ = nest.flatten(found)
    if found is None:
        return ()
    return found if leaves and all(isinstance(leaf, Spec) for leaf in leaves) else None


def _check_specs(what: str, declared: Outputs) -> None:
    for leaf in nest.flatten(declared)[0]:
        if not isinstance(leaf, Spec):
            raise GraphError(
                f"{what}: outputs are described by af.spec(dtype, shape), or a nest of specs; got {leaf!r}"
            )


def declared_specs(*inputs: Spec, outputs: Outputs, **attrs: object) -> Spec | tuple[Spec, ...]:
    """Return the specs that a node has in an attribute; a shape rule."""
    return outputs if isinstance(outputs, Spec) else tuple(nest.flatten(outputs)[0])


def _flops(cost: Cost, inputs: Sequence[Shape], outputs: Sequence[Shape], /, **attrs: object) -> float:
    return float(cost(inputs, outputs) if callable(cost) else cost)
