"""CUDA graphs that are captured before any run needs them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asyncflow.compiler.program.extract import FEED
from asyncflow.devices.captures import SLICE_LAUNCHES
from asyncflow.errors import SessionClosedError
from asyncflow.graph.builtin import CONSTANT
from asyncflow.runtime.executor.kernels.provenance import as_kernel_error
from asyncflow.streams.futures import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncflow.compiler.plan import Plan, PlanNode
    from asyncflow.devices.protocol import Device
    from asyncflow.runtime.gates.in_flight import InFlight
    from asyncflow.values import Kernel, Value


async def capture_ahead(plan: Plan, values: Sequence[Value], devices: Mapping[str, Device], runs: InFlight) -> None:
    """Capture the regions of a plan that take fed values and constants alone, and change nothing else.

    A region with computed inputs is captured after a few runs, as without this.

    Args:
        plan: of a run.
        values: for its feeds, checked.
        devices: by name.
        runs: of the session, which says when it closes.

    Raises:
        DeviceLostError: a kernel has broken the card.
        KernelError: a kernel fails for such values.
        SessionClosedError: the session was closed meanwhile.
    """
    for partition in plan.partitions:
        device = devices[partition.device]
        feeds = {feed.source: feed for feed in partition.feeds}
        for node in partition.root.nodes:
            ahead = getattr(node.kernel, "ahead", None)
            sources = [tensor.node for tensor in node.source.inputs]
            if ahead is None or any(source.op not in (FEED, CONSTANT) for source in sources):
                continue
            inputs = list(partition.root.values[node.slot : node.slot + node.n_inputs])
            for index, source in enumerate(sources):
                if source.op is FEED:
                    inputs[index] = await _fed(device, feeds[source], values[source.attrs["index"]])
            if node.conduct.needs_context:
                inputs.insert(0, None)  # graphs do not need the context
            await _driven(ahead, node, inputs, device, runs)


async def _fed(device: Device, feed: PlanNode, value: Value) -> Value:
    future: asyncio.Future[Value] = asyncio.get_running_loop().create_future()
    assert device.asynchronous is not None, "other devices capture nothing"
    try:
        device.asynchronous.feed_into(value, lambda placed, error: resolve(future, placed, error), feed.offer_of(0))
        return await future
    except Exception as error:
        raise as_kernel_error(error, feed, "", (value,), device.name)  # noqa: B904 - which has its cause


async def _driven(ahead: Kernel, node: PlanNode, inputs: Sequence[Value], device: Device, runs: InFlight) -> None:
    """Drive a capture, and let the event loop have its turns."""
    assert device.asynchronous is not None, "other devices capture nothing"
    steps, budget = ahead(*inputs), None
    try:
        while True:
            try:
                steps.send(budget)
            except StopIteration:
                return
            budget = SLICE_LAUNCHES
            is_behind = asyncio.Event()
            if device.asynchronous.throttle(is_behind.set):
                await is_behind.wait()
            await asyncio.sleep(0)
            if runs.closed is not None:
                raise SessionClosedError(runs.closed)
    except Exception as error:
        raise as_kernel_error(error, node, "", inputs, device.name)  # noqa: B904 - which has its cause
    finally:
        steps.close()
