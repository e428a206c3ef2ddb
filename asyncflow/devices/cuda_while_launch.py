"""How a CUDA device runs a loop that decides by what it computes: one launch, and one look at how far it came.

A loop that cannot be captured is driven by the host, which waits for the predicate of each iteration, and of each
branch and loop inside. So is what is left of a loop when an iteration of it was given up: because a loop inside passes
the limit, which is an error that the host then comes to, or because loops inside go on for too long.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from asyncflow.devices.cuda_conditional import GIVEN_UP, MOST_INSIDE, MOST_ITERATIONS, STOPPED, Limits
from asyncflow.devices.cuda_decisions import Loop
from asyncflow.devices.cuda_launch import Values
from asyncflow.devices.cuda_while import DeviceLoop
from asyncflow.devices.cuda_while_host import HostDriver
from asyncflow.devices.protocol import CoroutineKernel

if TYPE_CHECKING:
    from asyncflow.devices.cuda import CudaDevice
    from asyncflow.devices.cuda_bindings import Bindings
    from asyncflow.devices.cuda_decisions import Body, Condition
    from asyncflow.devices.protocol import KernelInfo, Span


class WhileLauncher(CoroutineKernel):
    """A loop bound to a CUDA device: calling it with its variables and captures gives a coroutine of its results."""

    __slots__ = ("_device", "_info", "_label", "_limit", "_loop", "_n_vars", "_too_many", "_values")

    def __init__(
        self,
        device: CudaDevice,
        bindings: Bindings | None,
        functions: tuple[Condition, Body],
        info: KernelInfo,
        *,
        n_vars: int,
        label: str = "loop",
        limit: int | None = None,
        too_many: Callable[[str], Exception],
    ) -> None:
        """Nothing is captured before the first call.

        Args:
            device: where it runs.
            bindings: None: the host drives the loop.
            functions: condition and body, over CuPy's arrays and host values; see `DeviceLoop`.
            info: of the node.
            n_vars: how many of the arguments of a call are loop variables.
            label: of the loop, for errors.
            limit: most iterations of a loop, this one or one inside.
            too_many: the error if the predicate of the loop of that label still holds after so many.
        """
        stream = device.compute_streams[info.stream]
        most = MOST_ITERATIONS if limit is None else max(1, min(limit, MOST_ITERATIONS))
        limits = Limits(most, limit, MOST_INSIDE)
        self._device = device
        self._info = info
        self._n_vars = n_vars
        self._label = label
        self._limit = limit
        self._too_many = too_many
        self._values = Values(device, stream)
        self._loop = DeviceLoop(device.cupy, stream, device.pool, bindings, *functions, info.name, limits=limits)

    def __call__(self, *args: Any) -> Coroutine[Any, Any, tuple[Any, ...]]:
        """Run the loop.

        Raises (from the coroutine):
            DeviceLostError: an earlier kernel has broken the device.
            MemoryLimitExceeded: a value does not fit.
            BaseException: what `too_many` gives, or what a kernel raises.

        Cancellation: what is launched is done to its end, for no more iterations than `Limits` allows.
        """
        return self._run(args, self._device.recorded())

    async def _run(self, args: Sequence[Any], spans: list[Span] | None) -> tuple[Any, ...]:
        try:
            return await self._launched(args, spans)
        except RuntimeError as error:
            raise self._device.cause_of(error)  # noqa: B904 - which has its cause

    async def _launched(self, args: Sequence[Any], spans: list[Span] | None) -> tuple[Any, ...]:
        host = HostDriver(self._device, self._values, self._info, args, spans, self._check)
        with self._values.stream.activate():
            raw = [self._values.raw(value, self._info.name) for value in args]
        variables: Sequence[Any] = raw[: self._n_vars]
        captures = raw[self._n_vars :]
        done, outcome = 0, STOPPED
        while outcome == STOPPED:
            iterated = host.in_one_block(self._loop.launch, variables, captures)
            count, outcome, _ = (0, GIVEN_UP, 0) if iterated is None else (await host.fetched(iterated.state)).tolist()
            if iterated is None or outcome == GIVEN_UP:
                rest = Loop(self._loop.condition, self._loop.body, variables, captures, self._label)
                variables = await host.looped(rest, done)
            else:
                done += count
                self._check(self._label, done + (outcome == STOPPED))
                variables = iterated.values
        return tuple([self._values.wrapped(value, self._info.name) for value in variables])

    def _check(self, label: str, count: int) -> None:
        """Raise if that many iterations are too many."""
        if self._limit is not None and count > self._limit:
            raise self._too_many(label)


__all__ = ["WhileLauncher"]
