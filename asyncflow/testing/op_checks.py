"""`check_op`: requirements on the parts of an op, which have to agree: kernels, gradient, row rule and shape rule.

Each check is a coroutine function whose docstring states the requirement. The kernel for CPUs is the reference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Final

import numpy as np

import asyncflow as af
from asyncflow.devices.kinds import find_kind, kind_names
from asyncflow.errors import located_at, user_location
from asyncflow.graph.ir import Attrs
from asyncflow.graph.values import nest
from asyncflow.graph.values.shapes import is_compatible
from asyncflow.ops.user.custom import CustomOp
from asyncflow.values import Array, Nest

_DIRECTIONS: Final = 3
"""Directions in which differences are taken: a gradient that is wrong in one element is wrong in nearly all of them."""


class NotChecked(Exception):
    """A check that does not apply to an op, with the reason."""


def check_op(
    op: Callable[..., Nest],
    /,
    *inputs: object,
    rows: int = 3,
    tolerance: float | None = None,
    run: Callable[[Coroutine[object, None, None]], object] | None = None,
    **arguments: object,
) -> list[str]:
    """Check that the parts of an op agree, on inputs of yours.

    Kernels are compared with the one for CPUs, on all kinds of device that there are here. Gradients are compared with
    differences, results for many rows with a loop over them, and shapes with the shape rule, also of open extents.

    Args:
        op: a function decorated with `op`, or of this library's.
        inputs: arrays to call it with. Differences of ``float64`` find smaller faults than differences of ``float32``.
        rows: number of rows; 0 leaves rows out, for an op that does not take the elements of inputs in another order.
        tolerance: relative difference that is allowed; None for a multiple of the dtype's rounding.
        run: runs a coroutine to its end; None for `asyncio.run`. For simulated cards, ``clock.run`` of their clock.
        arguments: static arguments of `op`.

    Returns:
        Checks that do not apply, with reasons: a line each.

    Raises:
        TypeError: there are no inputs.
        ExceptionGroup: checks failed; each error has a note that says which requirement is broken.

    >>> import asyncflow as af
    >>> import numpy as np
    >>> @af.op(outputs=lambda x: x, gradient=lambda inputs, outputs, grads: 2 * inputs[0] * grads)
    ... def squared(x):
    ...     return x**2
    >>> check_op(squared, np.linspace(-1, 1, 5))
    []
    """
    if not inputs:
        raise TypeError("check_op needs inputs to call the op with, such as check_op(op, np.ones((2, 3)))")
    subject = _Checked(op, [np.asarray(x) for x in inputs], arguments, rows, tolerance)
    with located_at(user_location()):
        (run or asyncio.run)(subject.check())
    return subject.left_out


class _Checked:
    """The op that is checked, with inputs.

    Attributes:
        kinds: of devices that there are here, CPUs first.
        left_out: checks that do not apply, with reasons.
    """

    def __init__(
        self, op: Callable[..., Nest], inputs: Sequence[Array], arguments: Attrs, rows: int, tolerance: float | None
    ) -> None:
        self.op, self.inputs, self.arguments, self.rows, self.tolerance = op, inputs, arguments, rows, tolerance
        there = [name for name in kind_names() if (kind := find_kind(name)) is not None and kind.why_not(0) is None]
        own = af.kernels(op) if isinstance(op, CustomOp) else there  # without a kernel, the host computes for a card
        self.kinds = ["cpu", *(name for name in there if name != "cpu" and name in own)]
        self.left_out: list[str] = []

    async def check(self) -> None:
        """Run all checks."""
        failures = []
        for kind in self.kinds:
            for check in (self.shapes, self.kernels, self.gradients, self.by_rows):
                try:
                    await check(kind)
                except NotChecked as reason:
                    self.left_out.append(f"{check.__name__} on {kind!r}: {reason}")
                except Exception as error:
                    error.add_note(f"check of {self.op!r} on {kind!r}: {check.__doc__}")
                    failures.append(error)
        if failures:
            raise ExceptionGroup(f"{len(failures)} checks of {self.op!r} failed", failures)

    async def results(
        self, kind: str, of: Callable[..., Nest], inputs: Sequence[Array], *, is_open: bool = False
    ) -> list[Array]:
        """The results of a function of tensors, which have shapes that it declares."""
        with af.Graph(seed=0):
            tensors = [af.placeholder(x.dtype, [None] * x.ndim if is_open else x.shape) for x in inputs]
            declared = [x for x in nest.flatten(of(*tensors))[0] if x is not None]
            async with af.Session(devices=[f"{kind}:0"]) as session:
                found = [np.asarray(x) for x in await session.run(declared, dict(zip(tensors, inputs, strict=True)))]
        for x, tensor in zip(found, declared, strict=True):
            if not is_compatible(x.shape, tensor.shape) or x.dtype != tensor.dtype:
                raise AssertionError(f"{tensor!r} is declared, and the kernel gives {x.dtype}{list(x.shape)}")
        return found

    def called(self, *tensors: af.Tensor) -> Nest:
        """The op's outputs for tensors."""
        return self.op(*tensors, **self.arguments)

    def equal(self, found: Sequence[Array], wanted: Sequence[Array]) -> None:
        """Raise unless results are equal, but for rounding."""
        for place, (x, y) in enumerate(zip(found, wanted, strict=True)):
            is_exact = y.dtype.kind not in "fc" and "float" not in y.dtype.name
            rounding = 0.0 if is_exact else self.tolerance or 1e3 * float(af.finfo(y.dtype).eps)
            np.testing.assert_allclose(x, y, rtol=rounding, atol=rounding, err_msg=f"output {place}")

    # -- checks ------------------------------------------------------------------------------------------------------

    async def shapes(self, kind: str) -> None:
        """Results have the shapes and dtypes that the shape rule gives, also for open extents."""
        await self.results(kind, self.called, self.inputs)
        try:
            await self.results(kind, self.called, self.inputs, is_open=True)
        except af.GraphError as error:
            raise NotChecked(f"it refuses open extents: {str(error).partition(chr(10))[0]}") from error

    async def kernels(self, kind: str) -> None:
        """A kernel gives the same as the kernel for CPUs."""
        found, wanted = [await self.results(each, self.called, self.inputs) for each in (kind, "cpu")]
        self.equal(found, wanted)

    async def gradients(self, kind: str) -> None:
        """The gradient in a direction is the difference of results in that direction."""
        random = np.random.default_rng(0)
        floats = [place for place, x in enumerate(self.inputs) if x.dtype.kind == "f"]
        if isinstance(self.op, CustomOp) and self.op.gradient is None:
            raise NotChecked("it has no gradient=")
        if not floats:
            raise NotChecked("no input is a float")
        outputs = await self.results(kind, self.called, self.inputs)
        weights = [np.asarray(random.standard_normal(y.shape)) if y.dtype.kind == "f" else None for y in outputs]

        def weighed(*tensors: af.Tensor) -> af.Tensor:
            pairs = zip(nest.flatten(self.called(*tensors))[0], weights, strict=True)
            return sum((af.sum(y * af.constant(w, y.dtype)) for y, w in pairs if w is not None), start=af.constant(0.0))

        def graded(*tensors: af.Tensor) -> Nest:
            grads = af.gradients(weighed(*tensors), [tensors[place] for place in floats])
            return [af.zeros_like(tensors[k]) if g is None else g for k, g in zip(floats, grads, strict=True)]

        try:
            grads = await self.results(kind, graded, self.inputs)
        except af.GraphError as error:
            if isinstance(self.op, CustomOp):
                raise
            raise NotChecked(str(error).partition("\n")[0]) from error
        step = max(float(np.finfo(self.inputs[place].dtype).eps) for place in floats) ** (1 / 3)
        allowed = self.tolerance or 100 * step**2
        for _ in range(_DIRECTIONS):
            ways = [np.asarray(random.standard_normal(self.inputs[place].shape)) for place in floats]
            slope = sum(float(np.vdot(way, g)) for g, way in zip(grads, ways, strict=True))
            ends = [await self._at(kind, weighed, dict(zip(floats, ways, strict=True)), s) for s in (step, -step)]
            difference = (ends[0] - ends[1]) / (2 * step)
            if not abs(slope - difference) <= allowed * max(1.0, abs(slope), abs(ends[0])):
                raise AssertionError(f"the gradient has the slope {slope:.8g}, and the difference is {difference:.8g}")

    async def _at(self, kind: str, of: Callable[..., Nest], ways: Mapping[int, Array], step: float) -> float:
        moved = [np.asarray(x + step * ways.get(place, 0), x.dtype) for place, x in enumerate(self.inputs)]
        return float((await self.results(kind, of, moved))[0])

    async def by_rows(self, kind: str) -> None:
        """Results for many rows are the results of each row."""
        if not self.rows:
            raise NotChecked("rows=0")
        rows = [[_varied(x, k / self.rows) for k in range(self.rows)] for x in self.inputs]
        try:
            found = await self.results(kind, af.vmap(self.called), [np.stack(x) for x in rows])
        except af.GraphError as error:
            if "vmap" not in str(error):
                raise
            raise NotChecked(str(error).partition("\n")[0]) from error
        each = [await self.results(kind, self.called, row) for row in zip(*rows, strict=True)]
        self.equal(found, [np.stack(column) for column in zip(*each, strict=True)])


def _varied(x: Array, share: float) -> Array:
    """Another input: the elements in another order, and floats a little smaller, which most ops take as well."""
    found = np.roll(x.ravel(), round(share * x.size)).reshape(x.shape)
    return np.asarray(found * (1 - share / 4), x.dtype) if x.dtype.kind == "f" else found
