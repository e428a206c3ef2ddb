"""The host as the driver of a loop whose kernels run on a CUDA device: it waits for each predicate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from asyncflow.devices.decisions import Decision, Ended, Loop, advance, decisions
from asyncflow.devices.protocol import KernelInfo, Placed, Span, recording

if TYPE_CHECKING:
    from asyncflow.devices.cuda.arguments import Values
    from asyncflow.devices.cuda.device import CudaDevice
    from asyncflow.values import Kernel, Value

Result = TypeVar("Result")


@dataclass(slots=True, eq=False, repr=False)
class HostDriver:
    """A call of a loop: work is launched in blocks, and between them the host waits for the deciding values.

    Arguments and results of its methods are CuPy's arrays and host values.

    Attributes:
        device: where it runs.
        values: of its stream.
        info: of the node.
        args: of the call: device values and host values.
        spans: gets the launched work.
        limit: most iterations of a loop; None for no limit.
    """

    device: CudaDevice
    values: Values
    info: KernelInfo
    args: Sequence[Value]
    spans: list[Span] | None
    limit: int | None

    def in_one_block(self, launch: Callable[..., Result], *arguments: Value) -> Result:
        """``launch(*arguments)``, with the stream active."""
        device, info, values = self.device, self.info, self.values
        device.check()
        device.pool.label = info.name
        values.hold(self.args)
        with recording(device, self.spans), values.stream, device.timed(values.stream, info.name):
            device.launched += info.code.launches
            values.stream.work.given += 1
            return launch(*arguments)

    async def fetched(self, value: Value) -> Placed:
        """The value on the host."""
        with recording(self.device, self.spans):
            found = self.device.fetched(self.values.wrapped(value, self.info.name))
        return await found if isinstance(found, asyncio.Future) else found

    async def looped(self, loop: Loop, done: int = 0) -> Sequence[Placed]:
        """The variables of a loop, of which `done` iterations have been made already, after its last iteration."""
        variables = loop.variables
        while await self.fetched(await self._results(loop.condition, (*variables, *loop.captures))):
            done += 1
            loop.identity.check(done, self.limit)
            variables = await self._results(loop.body, (*variables, *loop.captures))
        return variables

    async def _decided(self, decision: Decision) -> Sequence[Placed]:
        if isinstance(decision, Loop):
            return await self.looped(decision)
        taken = decision.on_true if await self.fetched(decision.pred) else decision.on_false
        return list(await self._results(taken, decision.arguments))

    async def _results(self, function: Kernel, arguments: Sequence[Value]) -> Placed:
        """The result of ``function(*arguments)``, with the host deciding."""
        running = decisions(function, arguments)
        decision = self.in_one_block(advance, running, None)
        while not isinstance(decision, Ended):
            decision = self.in_one_block(advance, running, await self._decided(decision))
        return decision.value
