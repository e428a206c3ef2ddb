"""Holds derivative rules against central differences, with everything that may be known of shapes: all, ranks, nothing.

`assert_derivatives` is what tests of a family use; `gradients_at` gives the values for kinks, and `kept_values` says
what a rule keeps of the forward pass. They go through the `sweep` here, which holds every rule to its contract; one
case of each test goes through `gradients` instead.

For a complex ``z = a + bi`` the gradient of a real loss is ``dL/da + i dL/db``: the direction in which the loss rises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from asyncflow.autodiff.gradients import gradients
from asyncflow.graph.building.build import apply, constant, placeholder
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import OPAQUE, Op, derivative_of, not_differentiable, why_not_differentiable
from asyncflow.graph.values.shapes import is_compatible
from asyncflow.ops.arithmetic.elementwise import add
from asyncflow.ops.derivatives.shapes import carries_gradient
from asyncflow.ops.promotion import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from asyncflow.graph.ir import Node

Array: TypeAlias = "np.ndarray[Any, Any]"
Find: TypeAlias = "Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], list[Tensor | None]]"
Build: TypeAlias = "Callable[..., Tensor | Sequence[Tensor]]"

KNOWN = ("all", "rank", "nothing")
"""Cases of knowledge about the inputs' shapes."""

STEP = 1e-6
"""Of central differences in float64."""


def sweep(ys: Sequence[Tensor], xs: Sequence[Tensor], grad_ys: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradient of each of `xs` for gradients `grad_ys` of `ys`: nodes for it join the current graph.

    For straight-line graphs: one rule after the other. Each is held to its contract: a gradient or None for each
    input, of its dtype and shape, and None for integers.
    """
    flows: dict[Tensor, Tensor] = {}
    for y, reached in zip(ys, grad_ys, strict=True):
        flows[y] = add(flows[y], reached) if y in flows else reached
    for node in reversed(_between(ys, xs)):
        grads = [flows.get(output) for output in node.outputs]
        if all(grad is None for grad in grads):
            continue
        rule = derivative_of(node.op)
        if rule is None:
            assert why_not_differentiable(node.op), f"{node.op.name} has neither a rule nor a reason to have none"
            continue
        if not any(carries_gradient(x.spec) for x in node.inputs):
            continue  # no rule is asked then
        passed = rule(node, *grads)
        assert len(passed) == len(node.inputs), f"{node.op.name}: {len(passed)} gradients, {len(node.inputs)} inputs"
        for x, grad in zip(node.inputs, passed, strict=True):
            if grad is None:
                continue
            assert kind_of(x.dtype) in "fc", f"{node.op.name}: a gradient for {x!r}"
            assert grad.dtype == x.dtype, f"{node.op.name}: {grad!r} is no gradient of {x!r}"
            assert is_compatible(grad.shape, x.shape), f"{node.op.name}: {grad!r} is no gradient of {x!r}"
            flows[x] = add(flows[x], grad) if x in flows else grad
    return [flows.get(x) for x in xs]


def _between(ys: Iterable[Tensor], xs: Iterable[Tensor]) -> list[Node]:
    """The nodes on a path from `xs` to `ys`, in the order they were built."""
    ends = set(xs)
    starts = list(ys)
    if not starts:
        return []
    graph = starts[0].graph
    after: set[Node] = set()
    for node in graph.nodes:
        if any(x in ends or x.node in after for x in node.inputs):
            after.add(node)
    before: set[Node] = {y.node for y in starts}
    for node in reversed(graph.nodes):
        if node in before:
            before.update(x.node for x in node.inputs)
    return [node for node in graph.nodes if node in before and node in after]


def assert_derivatives(
    build: Build,
    *arrays: Any,
    order: int = 1,
    known: Sequence[str] = KNOWN,
    rtol: float = 1e-5,
    atol: float = 1e-7,
) -> None:
    """Compare the gradients of ``build(*placeholders)`` with central differences.

    Args:
        build: from tensors to a tensor or several.
        arrays: where to differentiate: float64 or complex128, away from kinks; integers and booleans get no gradient.
        order: 2 differentiates the gradients too.
        known: how much is known of shapes while the graph is built, one case each.
        rtol: relative to a gradient's element.
        atol: absolute.

    Every case must give exactly the dtype and shape of the input; in float32 the gradient is near that in float64.
    """
    values = [np.asarray(array) for array in arrays]
    expected = _differences(build, values)
    for how in known:
        find = gradients if how == known[0] else sweep
        _compare(gradients_at(build, *values, known=how, find=find), expected, values, rtol, atol)
    narrow = [_narrow(value) for value in values]
    _compare(gradients_at(build, *narrow), expected, narrow, 5e-3, 5e-4)
    if order > 1:
        _assert_higher(build, values, order, known, rtol, atol)


def _assert_higher(
    build: Build, values: Sequence[Array], order: int, known: Sequence[str], rtol: float, atol: float
) -> None:
    def differentiated(*inputs: Tensor) -> list[Tensor]:
        return [grad for grad in _gradients_of(build, inputs, None, sweep) if grad is not None]

    assert_derivatives(differentiated, *values, order=order - 1, known=known, rtol=rtol, atol=max(atol, 1e-6))


def gradients_at(
    build: Build, *arrays: Any, grad: Sequence[Any] | None = None, known: str = "all", find: Find = sweep
) -> list[Array | None]:
    """The gradients of ``build(*placeholders)`` at `arrays`; None for inputs that get none.

    Args:
        build: from tensors to a tensor or several.
        arrays: where to differentiate.
        grad: what reaches each output; None for the weights that central differences take.
        known: of the inputs' shapes: ``"all"``, ``"rank"``, ``"nothing"``.
        find: `gradients` or `sweep`.
    """
    values = [np.asarray(array) for array in arrays]
    with Graph():
        inputs = _placeholders(values, known)
        grads = _gradients_of(build, inputs, grad, find)
        run = _program([item for item in grads if item is not None])
    results = iter(run(dict(zip(inputs, map(_fed, values), strict=True))))
    return [None if item is None else next(results) for item in grads]


def kept_values(build: Build, *arrays: Any) -> set[str]:
    """Names of the forward values that the gradient nodes use, by more than their shapes.

    Shapes are not known while building. ``"x0"`` is the first input; an op's output has the op's name.
    """
    with Graph() as graph:
        inputs = _placeholders([np.asarray(array) for array in arrays], "nothing")
        built = build(*inputs)
        ys = [built] if isinstance(built, Tensor) else list(built)
        reached = [placeholder(y.dtype, None, name="grad") for y in ys]
        forward = set(graph.nodes) - {item.node for item in reached}
        sweep(ys, inputs, reached)
        shapes = {item.node for item in graph.shapes.values()}
        used = {x for node in graph.nodes if node not in forward and node not in shapes for x in node.inputs}
    named = {item: f"x{position}" for position, item in enumerate(inputs)}
    return {named.get(x, x.node.op.name) for x in used if x.node in forward and x.node.op.name != "constant"}


# -- building and running --------------------------------------------------------------------------------------------


def _placeholders(values: Sequence[Array], known: str) -> list[Tensor]:
    shapes = {"all": lambda v: v.shape, "rank": lambda v: (None,) * v.ndim, "nothing": lambda v: None}
    return [placeholder(value.dtype, shapes[known](value)) for value in values]


def _gradients_of(
    build: Build, inputs: Sequence[Tensor], grad: Sequence[Any] | None, find: Find
) -> list[Tensor | None]:
    built = build(*inputs)
    ys = [built] if isinstance(built, Tensor) else list(built)
    if grad is None:
        differentiable = [y for y in ys if kind_of(y.dtype) in "fc"]
        reached = [_weights_like(y) for y in differentiable]
    else:
        differentiable = ys
        reached = [constant(np.asarray(item, y.dtype)) for y, item in zip(ys, grad, strict=True)]
    found: list[Tensor | None] = find(differentiable, list(inputs), reached)
    return found


def _weights_like(y: Tensor) -> Tensor:
    """Different weights for the elements of `y`, whatever its shape: an op, as only a run knows that."""
    return apply(WEIGHTS, y)[0]


def _weights(shape: tuple[int, ...], dtype: Any) -> Array:
    rng = np.random.default_rng(17)
    drawn = rng.uniform(0.5, 1.5, shape) * rng.choice([-1.0, 1.0], shape)
    if np.dtype(dtype).kind == "c":
        drawn = drawn + 1j * rng.uniform(-1, 1, shape)
    return np.asarray(drawn).astype(dtype)


WEIGHTS = Op("weights", lambda y: y, lambda xp: lambda y: _weights(y.shape, y.dtype), traits=OPAQUE)
not_differentiable(WEIGHTS, because="they depend on a shape alone")


def _program(ys: Sequence[Tensor]) -> Callable[[Mapping[Tensor, Any]], list[Array]]:
    """Runs kernels directly, each of its outputs held against the op's shape rule."""
    if not ys:
        return lambda feeds: []
    graph = ys[0].graph
    needed = {y.node for y in ys}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(x.node for x in node.inputs)
    ordered = [node for node in graph.nodes if node in needed]
    kernels = {node: node.op.kernel(np, **node.attrs) for node in ordered if node.op.kernel is not None}

    def run(feeds: Mapping[Tensor, Any]) -> list[Array]:
        values: dict[Tensor, Any] = dict(feeds)
        with np.errstate(all="ignore"):
            for node in ordered:
                if node.outputs[0] in values:
                    continue
                result = kernels[node](*(values[x] for x in node.inputs))
                for output, value in zip(node.outputs, (result,) if node.single else result, strict=True):
                    got = np.asarray(value)
                    assert got.dtype == output.dtype, f"{node.op.name}: gave {got.dtype}, rule said {output.spec}"
                    assert is_compatible(got.shape, output.shape), f"{node.op.name}: {got.shape} is not {output.spec}"
                    values[output] = value
        return [np.asarray(values[y]) for y in ys]

    return run


def _fed(value: Array) -> Any:
    """NumPy scalars for rank 0, as constants and scalar kernels give them."""
    return value[()] if value.ndim == 0 else value


# -- central differences ---------------------------------------------------------------------------------------------


def _differences(build: Build, values: Sequence[Array]) -> list[Array | None]:
    with Graph():
        inputs = _placeholders(values, "all")
        built = build(*inputs)
        ys = [built] if isinstance(built, Tensor) else list(built)
        ys = [y for y in ys if kind_of(y.dtype) in "fc"]
        run = _program(ys)

    def outputs(position: int, changed: Array) -> list[Array]:
        arguments = [changed if index == position else value for index, value in enumerate(values)]
        return run(dict(zip(inputs, map(_fed, arguments), strict=True)))

    def slope(position: int, at: int, step: complex) -> float:
        above, below = values[position].copy(), values[position].copy()
        above.reshape(-1)[at] += step
        below.reshape(-1)[at] -= step
        pairs = zip(outputs(position, above), outputs(position, below), strict=True)
        return sum(_weighted(up - down) for up, down in pairs) / (2 * STEP)

    found: list[Array | None] = []
    for position, value in enumerate(values):
        if value.dtype.kind not in "fc":
            found.append(None)
            continue
        slopes: list[complex] = [slope(position, at, STEP) for at in range(value.size)]
        if value.dtype.kind == "c":
            slopes = [real + 1j * slope(position, at, 1j * STEP) for at, real in enumerate(slopes)]
        found.append(np.array(slopes, value.dtype).reshape(value.shape))
    return found


def _weighted(change: Array) -> float:
    return float(np.sum(np.conj(_weights(change.shape, change.dtype)) * change).real)


def _compare(
    got: Sequence[Array | None], expected: Sequence[Array | None], values: Sequence[Array], rtol: float, atol: float
) -> None:
    for grad, want, value in zip(got, expected, values, strict=True):
        if want is None:
            assert grad is None
            continue
        if grad is None:
            assert not want.any(), f"nothing reached an input whose gradient is {want}"
            continue
        assert grad.dtype == value.dtype
        assert grad.shape == value.shape
        np.testing.assert_allclose(grad, want, rtol=rtol, atol=atol)


def _narrow(value: Array) -> Array:
    narrower = {"float64": "float32", "complex128": "complex64"}
    return value.astype(narrower.get(value.dtype.name, value.dtype))


__all__ = ["KNOWN", "assert_derivatives", "gradients_at", "kept_values", "sweep"]
