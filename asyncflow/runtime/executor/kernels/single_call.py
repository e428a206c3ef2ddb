"""Runs a plan that is a single short call, in which nothing can wait: it needs neither scheduler nor scope."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextvars import Context, copy_context
from math import inf
from time import perf_counter_ns, thread_time_ns
from types import GeneratorType
from typing import NoReturn, TypeAlias, cast

import numpy as np

from asyncflow.compiler.lowering.single_call import SingleCall
from asyncflow.compiler.plan import FiringWay, PlanNode
from asyncflow.devices.machine.cost import INLINE_LIMIT_NS, MeasuredCost
from asyncflow.devices.protocol import Device
from asyncflow.graph.graph import leave_graphs
from asyncflow.graph.op import KernelContext
from asyncflow.ops.rows.by_row import Paused
from asyncflow.ops.user.recorded_calls import call_log
from asyncflow.runtime.executor.kernels.first_guess import first_guess
from asyncflow.runtime.executor.kernels.provenance import as_kernel_error
from asyncflow.runtime.executor.kernels.sliced_region import RegionGenerator, in_parts, size_of
from asyncflow.values import Array, Value

_MOST_ELEMENTS = 1 << 16
"""Number of elements above which the executor's cost is nothing beside the kernel's."""

_NO_CONTEXT = KernelContext(seed=0, run=0, tag=())
"""The context of a call for several runs, in which all that draws has keys."""

_WHOLE = 1 << 62
"""The budget of a region that runs to its end."""

Begun: TypeAlias = "Paused | RegionGenerator"
"""Calls of a user's function for rows that took too long for the event loop: the rest is for a thread."""


def quiet_context() -> Context:
    """A context without NumPy's floating-point warnings: in a graph, infinities and NaN are values.

    Calls in it cost a tenth of what entering `numpy.errstate` does. It serves one thread.
    """
    context = Context()
    context.run(np.seterr, all="ignore")
    return context


def run_single_call(
    call: SingleCall, device: Device, quiet: Context, feeds: Sequence[Value], limit_ns: float = INLINE_LIMIT_NS
) -> list[Value] | None:
    """Return the fetched values for these feeds; None if computing them may hold the event loop too long.

    Args:
        call: the call.
        device: the device.
        quiet: a context without floating-point warnings.
        feeds: the fed values.
        limit_ns: longest expected time.

    Raises:
        KernelError: the kernel failed.
        OutOfMemoryError: its results pass the device's limit.
    """
    inputs = call.inputs(feeds)
    node = call.node
    is_generator = False
    cost = None
    size = started = 0
    if call.is_open:
        is_generator = node.way == FiringWay.SLICED
        cost = node.times.cost
        if cost is None:
            if is_generator:
                return None  # perhaps long; the executor measures it
            cost = node.times.cost = first_guess(node, inputs)
        size = size_of(inputs)
        if size * INLINE_LIMIT_NS > _MOST_ELEMENTS * limit_ns or cost.predict_ns(size) > limit_ns:
            return None
        started = perf_counter_ns()
    try:
        output = quiet.run(node.kernel, *inputs)  # type: ignore[arg-type]
        if cost is None:
            return call.results(output)
        if is_generator:
            output = quiet.run(_outputs, output)
        cost.observe(size, perf_counter_ns() - started)
        return _tracked(call, output, device)
    except BaseException as error:
        _fail(error, node, inputs, device)


def run_user_call(call: SingleCall, device: Device, feeds: Sequence[Value]) -> list[Value] | Begun | None:
    """Return the fetched values of a plan that calls a user's function; None unless it has proved to be short.

    The function sees the context variables of the caller, as in any run. It is over before anything else happens, so it
    needs no part of a run. If it has turned slow, this stops between two rows and returns the begun call.

    Raises:
        KernelError: the function failed.
        OutOfMemoryError: its results pass the device's limit.
    """
    node = call.node
    is_generator = node.way == FiringWay.SLICED
    cost = node.times.hold if is_generator else node.times.cost
    if cost is None or node.conduct.alone is not None:
        return None
    inputs = call.inputs(feeds)
    size = size_of(inputs)
    if cost.predict_ns(size) > INLINE_LIMIT_NS:
        return None
    context = copy_context()
    context.run(leave_graphs)
    if context.get(call_log) is not None:
        context.run(call_log.set, None)
    if node.region is not None:
        context.run(np.seterr, all="ignore")
    started = perf_counter_ns()
    try:
        output = context.run(in_parts(node), *inputs)
        if is_generator:
            output = context.run(_outputs, cast("RegionGenerator", output))
        cost.observe(size, perf_counter_ns() - started)
        if isinstance(output, Paused | GeneratorType):
            return output
        return _tracked(call, output, device)
    except BaseException as error:
        _fail(error, node, inputs, device)


def _tracked(call: SingleCall, output: object, device: Device) -> list[Value]:
    """Return the fetched values from a kernel's output, and count them."""
    results = call.results(output)
    for value in results:
        device.memory.track(value, call.node.source.name)
    return results


class CountedCall:
    """A single call that makes a given number of steps, so that its caller chooses its duration.

    Args:
        call: its first feed is that number, and its last result the number of steps made.
        device: where it runs.
        quiet: a context without floating-point warnings.
    """

    def __init__(self, call: SingleCall, device: Device, quiet: Context) -> None:
        self._call, self._device, self._quiet = call, device, quiet
        # Not the node's cost: each of its firings may make many steps.
        self._cost = MeasuredCost(base_ns=inf)

    @property
    def is_user(self) -> bool:
        """True if it calls a user's function, which is for a run: the executor decides where that goes."""
        return self._call.node.conduct.is_user

    def expected_ns(self, size: int) -> float:
        """Return the expected time of a step on `size` elements; infinite without a measurement."""
        return self._cost.predict_ns(size)

    def learn(self, size: int, taken_ns: int, made: int) -> None:
        """Record the time of `made` steps on `size` elements."""
        self._cost.observe(size, taken_ns // max(made, 1))

    def __call__(self, feeds: Sequence[Value], size: int) -> list[Array]:
        """Return the fetched values for these feeds, of `size` elements.

        Raises:
            KernelError: a kernel failed.
            OutOfMemoryError: its results pass the device's limit.
        """
        node, memory = self._call.node, self._device.memory
        inputs = self._call.inputs(feeds)
        if node.conduct.needs_context:
            inputs.insert(0, _NO_CONTEXT)
        started = thread_time_ns()  # processor time: a call that was only preempted still belongs on the event loop
        try:
            output = self._quiet.run(node.kernel, *inputs)  # type: ignore[arg-type]
            if node.way == FiringWay.SLICED:
                output = self._quiet.run(_outputs, output)
            taken_ns = thread_time_ns() - started
            results = cast("list[Array]", self._call.results(output))
            for value in results if memory.limit is not None else ():
                memory.track(value, node.source.name)
        except BaseException as error:
            _fail(error, node, inputs, self._device)
        self.learn(size, taken_ns, int(results[-1]))
        return results


def _fail(error: BaseException, node: PlanNode, inputs: Sequence[Value], device: Device) -> NoReturn:
    failure = as_kernel_error(error, node, "", inputs, device.name)
    try:
        raise failure from failure.__cause__
    finally:
        del failure  # its traceback refers to this frame: avoid a cycle


def _outputs(region: Generator[object, int | None, Value]) -> Value:
    """Run a region to its end, past the stops between its long kernels, and return its outputs.

    If a user's function in it takes too long, return the region, which has stopped there.
    """
    budget: int | None = None
    try:
        while not isinstance(region.send(budget), Paused):
            budget = _WHOLE
        return region
    except StopIteration as ended:
        return ended.value
