"""`while_loop`: repeats a body while a predicate holds (EuroSys '18 §4.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, overload

from asyncflow.control.body import add_outer_controls, as_predicate, result_tensor, user_function
from asyncflow.control.primitives.enter import check_parallel_iterations
from asyncflow.control.primitives.switch import check_predicate
from asyncflow.control.windows import of_whole_windows
from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, as_tensor, graph_for
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.op import define
from asyncflow.graph.structured import WhileNode, join_captures
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import dtype_name, int64
from asyncflow.graph.values.shapes import as_shape, format_shape, is_subshape
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import add
from asyncflow.ops.arithmetic.logic import less, logical_and
from asyncflow.ops.arrays.known_values import default_value
from asyncflow.ops.arrays.manipulation import as_scalar
from asyncflow.ops.axes import check_flag

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncflow.control.nest_types import N
    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.ops.user.batch import Pool
    from asyncflow.values import Nest


def _infer(
    *inputs: Spec, cond: Subgraph, body: Subgraph, n_vars: int, parallel_iterations: int, swap_memory: bool
) -> tuple[Spec, ...]:
    check_parallel_iterations(parallel_iterations)
    check_predicate(cond.results[0].spec)
    return tuple(inner.spec for inner in body.inputs[:n_vars])


WHILE = define("while", _infer, node_type=WhileNode)


@overload
def while_loop(
    cond: Callable[..., TensorLike],
    body: Callable[..., Nest],
    loop_vars: N,
    *,
    shape_invariants: Nest = None,
    parallel_iterations: int = 32,
    swap_memory: bool = False,
    maximum_iterations: TensorLike | None = None,
    pool: Pool | None = None,
    name: str | None = None,
) -> N: ...
@overload
def while_loop(
    cond: Callable[..., TensorLike],
    body: Callable[..., Nest],
    loop_vars: Nest,
    *,
    shape_invariants: Nest = None,
    parallel_iterations: int = 32,
    swap_memory: bool = False,
    maximum_iterations: TensorLike | None = None,
    pool: Pool | None = None,
    name: str | None = None,
) -> Nest: ...


def while_loop(
    cond: Callable[..., TensorLike],
    body: Callable[..., Nest],
    loop_vars: Nest,
    *,
    shape_invariants: Nest = None,
    parallel_iterations: int = 32,
    swap_memory: bool = False,
    maximum_iterations: TensorLike | None = None,
    pool: Pool | None = None,
    name: str | None = None,
) -> Nest:
    """Repeat ``loop_vars = body(loop_vars)`` while ``cond(loop_vars)`` holds, and return the last `loop_vars`.

    Both functions are called once, while the graph is built. A tuple or list of loop variables is spread over the
    arguments; any other nest is passed as it is. Iterations overlap as far as data and effects allow; with ordered
    effects, nodes that touch one resource keep their order from iteration to iteration.

    Args:
        cond: loop variables to a boolean with one element.
        body: loop variables to the next ones: same nest, dtypes, and shapes no less specific.
        loop_vars: initial values; any nest of tensors, TensorArrays, variables, arrays and numbers.
        shape_invariants: same nest, of partial shapes, for variables whose shape changes; None for a TensorArray.
            None for the whole: no shape changes.
        parallel_iterations: how many iterations may be live at once, at least 1. It never changes the result.
        swap_memory: values of 64 KiB and more that are saved for gradients leave the device's memory as they are saved,
            and come back ahead of their reads. They go to the host's memory, or with a `memory_limit` on a CPU to the
            file in `Session(spill_directory=)`. With False they do so only once memory is short.
            Gradients are the same bits (EuroSys '18 §5.3).
        maximum_iterations: number of iterations after which the loop stops, at least 0; a number or an integer scalar.
        pool: step the activations of this loop in different runs, and in iterations of a loop around it, together
            (continuous batching). An activation may join while others go on, and leaves as soon as its predicate fails.
            A step computes predicate and body once for all of them; if variables have come to differ in shape, once for
            each shape. A capture that depends on constants alone is one value for all; any other is each activation's
            own, and so are TensorArrays and RowStores among the loop variables. Activations with equally many entries
            are stepped together where the body stacks or slices them. The loop may read variables, which it does in
            each step. A loop that changes them, awaits, or is cut over devices is not pooled: a warning, and
            `Plan.explain`, say why. Random numbers do not depend on the other members of a step: each request draws the
            bits that it would draw alone. No gradient goes through a pooled loop. Results are the same within rounding.
            Items that `Session.stream` hands out of the body come from each activation by itself. An activation whose
            consumer is `parallel_iterations` behind is set aside, and the others go on.
        name: of the node.

    Raises:
        GraphError, DTypeError, ShapeError: the body does not fit the loop variables; the message names the variable.
        GraphError: `pool` is no `Pool`.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     n, total = af.while_loop(lambda i, s: i < 10, lambda i, s: (i + 1, s + i), (0, 0))
    >>> total
    <Tensor while:1 int64[]>
    """
    graph = graph_for(*(leaf for leaf in nest.flatten(loop_vars)[0]))
    check_parallel_iterations(parallel_iterations)
    check_flag(swap_memory, "swap_memory")
    variables = _Variables(graph, loop_vars, shape_invariants)
    cond = user_function(cond, "cond of while_loop", *variables.passed)
    body = user_function(body, "body of while_loop", *variables.passed)
    if maximum_iterations is not None:
        cond, body, variables = _bounded(cond, body, variables, maximum_iterations)
    label = graph.unique_name("while" if name is None else name)
    condition, loop_body = Subgraph(graph, f"{label}/cond"), Subgraph(graph, f"{label}/body")
    with condition:
        pred = as_predicate(cond(*variables.arguments(condition)), f"the predicate of {label}")
        check_predicate(pred.spec)
        condition.results.append(condition.import_tensor(pred))
    with loop_body:
        arguments = variables.arguments(loop_body)
        loop_body.starts.update(zip(loop_body.inputs, variables.initial, strict=True))
        returned = body(*arguments)
    loop_body.results.extend(variables.next_values(label, loop_body, returned))
    parts = condition, loop_body, variables.initial, variables.specs, label, parallel_iterations
    node = None if pool is None else _add_pooled[0](*parts, pool)
    if node is None:
        node = add_loop(*parts, swap_memory)
    result = variables.structure.unflatten(node.outputs[: len(variables.specs)])  # a pooled loop may have more outputs
    return result if maximum_iterations is None else result[1]


_AddPooled: TypeAlias = "Callable[[Subgraph, Subgraph, Sequence[Tensor], Sequence[Spec], str, int, Pool], Node | None]"
_add_pooled: list[_AddPooled] = []


def install_pooling(add: _AddPooled) -> None:
    """Tells how the node of a pooled loop is added, which takes more than is known here."""
    _add_pooled[:] = [add]


def add_loop(
    condition: Subgraph,
    body: Subgraph,
    initial: Sequence[Tensor],
    specs: Sequence[Spec],
    label: str,
    parallel_iterations: int,
    swap_memory: bool = False,
) -> Node:
    """Adds the node of a loop whose predicate and body are built.

    Args:
        condition: the predicate, which is built.
        body: likewise.
        initial: values of the loop variables.
        specs: of the loop variables in every iteration.
        label: a name reserved for the node.
        parallel_iterations: how many iterations may be live at once.
        swap_memory: as for `while_loop`.
    """
    captured = join_captures((condition, body), len(specs))
    attrs = {
        "cond": condition,
        "body": body,
        "n_vars": len(specs),
        "parallel_iterations": parallel_iterations,
        "swap_memory": swap_memory,
    }
    assert body.parent is not None
    node = body.parent.add_node(WHILE, [*initial, *captured], attrs, tuple(specs), reserved_name=label)
    add_outer_controls(node)
    return node


class _Variables:
    """The loop variables: their nest, initial values, and the specs that hold in every iteration."""

    def __init__(self, graph: Graph, loop_vars: Nest, shape_invariants: Nest) -> None:
        leaves, self.structure = nest.flatten(loop_vars)
        if not leaves:
            raise GraphError(f"while_loop needs at least one loop variable; got {loop_vars!r}")
        self.initial: list[Tensor] = [graph.import_tensor(as_tensor(leaf)) for leaf in leaves]
        self.names = list(self.structure.paths("loop_vars"))
        self.specs = [tensor.spec for tensor in self.initial]
        if shape_invariants is not None:
            self._apply_invariants(shape_invariants)

    def _apply_invariants(self, shape_invariants: Nest) -> None:
        rule = "shape_invariants do not match loop_vars"
        shapes = nest.match(self.structure, shape_invariants, rule, nested_leaves=True)
        for index, declared in enumerate(shapes):
            if declared is ...:
                continue
            shape, initial = as_shape(declared), self.initial[index].shape
            if not is_subshape(initial, shape):
                raise ShapeError(
                    f"{self.names[index]} starts with shape {format_shape(initial)}, which its shape invariant "
                    f"{format_shape(shape)} does not allow"
                )
            self.specs[index] = Spec(self.specs[index].dtype, shape)

    @property
    def are_spread(self) -> bool:
        """True if each loop variable is an argument of its own."""
        return self.structure.kind in (tuple, list)

    @property
    def passed(self) -> tuple[int, str]:
        """The number of arguments that the functions get, and their description."""
        if not self.are_spread:
            return 1, f"the loop variables, {nest.describe(self.structure)}"
        count = len(self.structure.children)
        return count, f"{count} loop variable{'s' * (count != 1)}"

    def arguments(self, body: Subgraph) -> tuple[Nest, ...]:
        """Return the loop variables as `body` sees them, as the positional arguments of its function."""
        inner = [body.add_input(spec, "var") for spec in self.specs]
        nested = self.structure.unflatten(inner)
        return tuple(nested) if self.are_spread else (nested,)

    def listed(self, returned: Nest) -> Nest:
        """The results of the body, as a nest of the kind of the loop variables; one alone may come bare."""
        kind = self.structure.kind
        if kind not in (tuple, list):
            return returned
        is_list = isinstance(returned, tuple | list) and not hasattr(returned, "_fields")
        return kind(returned if is_list else (returned,))

    def next_values(self, label: str, body: Subgraph, returned: Nest) -> list[Tensor]:
        """The results of the body, checked against the loop variables."""
        rule = f"the body of {label} must return a nest like its arguments, {nest.describe(self.structure)}"
        leaves = nest.match(self.structure, self.listed(returned), rule)
        return [self._next_value(label, body, index, leaf) for index, leaf in enumerate(leaves)]

    def _next_value(self, label: str, body: Subgraph, index: int, value: TensorLike) -> Tensor:
        name, spec = self.names[index], self.specs[index]
        tensor = result_tensor(body, value, body.inputs[index])
        if tensor.dtype != spec.dtype:
            raise DTypeError(
                f"{name} of {label} enters as {dtype_name(spec.dtype)} but the body returns "
                f"{dtype_name(tensor.dtype)}; convert it with af.astype"
            )
        tensor = of_whole_windows(tensor, spec.shape, f"{name} of {label}")
        if not is_subshape(tensor.shape, spec.shape):
            raise ShapeError(
                f"{name} of {label} has shape {format_shape(spec.shape)} but the body returns "
                f"{format_shape(tensor.shape)}; if its shape changes, say so with shape_invariants"
            )
        return tensor


def _bounded(
    cond: Callable[..., TensorLike], body: Callable[..., Nest], variables: _Variables, maximum: TensorLike
) -> tuple[Callable[..., TensorLike], Callable[..., Nest], _Variables]:
    """The same loop with an iteration counter in front of its variables."""
    limit = as_tensor(maximum)
    if limit.dtype.kind not in "iu" or limit.shape not in ((), None):
        raise GraphError(f"maximum_iterations is an integer scalar; got {limit!r}")
    known = default_value(limit)
    if known is not None and known < 0:
        raise GraphError(f"maximum_iterations is at least 0; got {known}")
    rule = "maximum_iterations is an integer scalar; got shape {}; use af.reshape"
    limit = as_scalar(limit, rule, "maximum_iterations")
    spread = variables.are_spread
    counted = _Variables(limit.graph, (as_tensor(0, int64), variables.structure.unflatten(variables.initial)), None)
    counted.specs[1:] = variables.specs
    counted.names = ["the iteration counter", *variables.names]

    def counted_cond(count: Tensor, inner: Nest) -> Tensor:
        pred = as_predicate(cond(*inner) if spread else cond(inner), "the predicate of while_loop")
        return logical_and(less(count, limit), pred)

    def counted_body(count: Tensor, inner: Nest) -> Nest:
        return add(count, 1), variables.listed(body(*inner) if spread else body(inner))

    return counted_cond, counted_body, counted
