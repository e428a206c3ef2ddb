"""Entrances and exits of a partition's values: Send, Recv, the copy to the host, and streamed items.

Between devices, values meet in the run's rendezvous; see there. A Send is done when its value is handed over, except
a Send that brings a loop's predicate to another device. Such a Send is done when the iteration has ended there. So the
window of `parallel_iterations` at the predicate's device holds for the loop as a whole, and partitions are at most that
far apart. On an asynchronous device an iteration has ended when its launched work has.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.compiler.plan import FiringWay, Kind, PlanNode
from asyncflow.devices.protocol import AsynchronousDevice, Deliver, Device, Placed, recording
from asyncflow.devices.values import DeviceArray, DeviceValue, is_array, stays_on_host
from asyncflow.runtime.executor.kernels.provenance import as_kernel_error
from asyncflow.runtime.watch.picks import StoreContent, made_on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncflow.runtime.executor.partition_run import PartitionRun
    from asyncflow.runtime.scheduler.frame import Iteration
    from asyncflow.runtime.watch.picks import OnCard
    from asyncflow.values import Value


class Ports:
    """The ports of one executor.

    Attributes:
        untaken: streamed items that the consumer has not taken.
        incoming: values on their way to an asynchronous device. Whatever uses one holds up its stream until the copy is
            done, so all that is ready without it is launched first.
    """

    __slots__ = ("_executor", "_run", "incoming", "untaken")

    def __init__(self, executor: PartitionRun) -> None:
        self.untaken = 0
        self.incoming: deque[tuple[PlanNode, Iteration, Value, int]] = deque()
        self._executor = executor
        self._run = executor.run

    def cross(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Value]) -> None:
        """Does a firing of a node that takes a value into or out of the partition."""
        if node.way == FiringWay.SEND:
            self._send(node, iteration, inputs[0] if inputs else np.True_)
        elif node.way == FiringWay.RECV:
            self._run.rendezvous.receive(self.arrived, node, iteration)
        elif node.way == FiringWay.TO_HOST:
            self._to_host(node, iteration, inputs[0])
        else:
            self._emit(node, iteration, tuple(inputs))

    def copy_in(self, device: AsynchronousDevice, feeds: list[Value], begin: Callable[[list[Value]], None]) -> None:
        """Calls ``begin(feeds)`` once the fed values are on their way to the device."""
        executor, host_feeds = self._executor, self._executor.scheduler.partition.host_feeds
        # One more than the copies, so that `begin` is not called before all copies are requested.
        left = 1

        def arrived() -> None:
            nonlocal left
            left -= 1
            if not left:
                begin(feeds)

        def copy(index: int, node: PlanNode) -> None:
            spans = executor.new_spans()

            def take(copied: Value, error: BaseException | None) -> None:
                if error is None:
                    executor.record_spans(spans, device, node, None, copied)
                    feeds[index] = copied
                else:
                    executor.fail(as_kernel_error(error, node, "", (feeds[index],), device.name), node.source.id)

            deliver = executor.expect(take, arrived)
            try:
                with recording(device, spans):
                    receiver = _read_on(device, deliver) if node in host_feeds else deliver
                    device.feed_into(feeds[index], receiver, node.offer_of(0))
            except BaseException as error:
                deliver(None, error)

        for index, node in enumerate(executor.scheduler.partition.feeds):
            is_there = node in host_feeds and isinstance(feeds[index], np.ndarray)
            if not (executor.stopped or is_there):
                left += 1
                copy(index, node)
        arrived()

    def give(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Value], answer: OnCard) -> None:
        """Complete a firing with its recorded answer, once that is on its way to the device."""
        executor, recorder, device = self._executor, self._executor.recorder, self._executor.asynchronous
        assert device is not None and recorder is not None
        outputs: list[Placed] = [*answer.outputs] if isinstance(answer.outputs, tuple) else [answer.outputs]
        stores = {index: outputs[index] for index in answer.placed if isinstance(outputs[index], StoreContent)}
        parts = {index: list(stores[index].arrays if index in stores else [outputs[index]]) for index in answer.placed}
        # In a store, scalars were on the host, and 0-d arrays on the card.
        asked = [
            (each, at)
            for index, each in parts.items()
            for at, x in enumerate(each)
            if not (index in stores and isinstance(x, np.generic))
        ]
        # One more than the copies: the firing must end even without any, as for a store without elements.
        left = len(asked) + 1

        def take(each: list[Placed], at: int, copied: Placed, error: BaseException | None) -> None:
            if error is None:
                each[at] = copied if np.ndim(each[at]) else copied[0]
                end()
            else:
                executor.kernel_failed(error, node, iteration, inputs)

        def end() -> None:
            nonlocal left
            left -= 1
            if left or executor.stopped:
                return
            # A store is made by a kernel, which waits for the copies of its arrays on the card's own stream.
            try:
                for index, each in parts.items():
                    outputs[index] = made_on(device, stores[index], each) if index in stores else each[0]
            except Exception as error:  # such as out of memory
                executor.kernel_failed(error, node, iteration, inputs)
                return
            result = outputs[0] if node.single else tuple(outputs)
            recorder.given(node, iteration, result)
            executor.complete(node, iteration, inputs, result)

        for each, at in asked:
            deliver = executor.expect(partial(take, each, at))
            try:
                device.feed(np.atleast_1d(each[at]), deliver)  # a number would stay on the host
            except BaseException as error:
                deliver(None, error)
        end()

    # -- between devices -----------------------------------------------------------------------------------------

    def _send(self, node: PlanNode, iteration: Iteration, value: Value) -> None:
        rendezvous, recorder = self._run.rendezvous, self._executor.recorder
        if node.source.attrs["is_acknowledged"]:
            rendezvous.await_acknowledgement(self.acknowledged, node, iteration)
        if self._executor.asynchronous is not None:
            sent_ns = self._executor.asynchronous.send()
        else:
            sent_ns = 0 if recorder is None else recorder.now()
        rendezvous.send(node, iteration, value, sent_ns)
        if not (node.source.attrs["is_acknowledged"] or self._executor.stopped):
            self._executor.scheduler.complete(node, iteration, ())

    def acknowledged(self, node: PlanNode, iteration: Iteration) -> None:
        """The iteration that a Send brought its predicate to has ended."""
        if not self._executor.stopped:
            self._executor.scheduler.complete(node, iteration, ())
            self._run.turn.enqueue(self._executor)

    def acknowledge_ended(self) -> None:
        """Acknowledge iterations that have ended here, once their launched work has."""
        executor = self._executor
        ended, executor.scheduler.ended = executor.scheduler.ended, []
        if executor.asynchronous is None:
            self._pass_on(ended)
        else:
            executor.when_done(None, partial(self._pass_on, ended), elsewhere=True)

    def _pass_on(self, ended: list[tuple[int, tuple[int, ...]]]) -> None:
        for transfer, counters in ended:
            self._run.rendezvous.acknowledge(transfer, counters)

    def arrived(self, node: PlanNode, iteration: Iteration, value: Value, sent_ns: int) -> None:
        """The value that a Recv waits for is on its way: copies it here if need be."""
        executor, source = self._executor, self._run.devices[node.source.attrs["source"]]
        if executor.stopped:
            return
        if self._executor.asynchronous is None and source.asynchronous is None:
            self._received(node, iteration, value, sent_ns)
            return

        def take(copied: Value, error: BaseException | None) -> None:
            if error is not None:
                executor.kernel_failed(error, node, iteration, ())
            elif not executor.stopped:
                if self._executor.asynchronous is None:
                    self._received(node, iteration, copied, sent_ns)
                else:
                    self.incoming.append((node, iteration, copied, sent_ns))
                    self._run.turn.enqueue(executor)

        deliver = executor.expect(take, executor.check_quiet)
        try:
            self._bring(node, iteration, value, source, sent_ns, deliver)
        except BaseException as error:
            deliver(None, error)

    def _bring(
        self, node: PlanNode, iteration: Iteration, value: Value, source: Device, sent_ns: int, deliver: Deliver
    ) -> None:
        """Asks for a copy of a value of `source`."""
        executor, device, sender = self._executor, self._executor.asynchronous, source.asynchronous
        if device is None:
            value.to_host(deliver) if isinstance(value, DeviceValue) else deliver(value, None)
            return
        here, there = executor.new_spans(), executor.new_spans()
        with recording(device, here), nullcontext() if sender is None else recording(sender, there):
            device.receive(value, source, deliver, None if sender is None else sent_ns)
        executor.record_spans(here, device, node, iteration, value)
        if sender is not None:  # a copy through the host has a span there
            executor.record_spans(there, sender, node, iteration, value)

    def take_incoming(self) -> None:
        """Hands the oldest incoming value to whoever waits for it."""
        self._received(*self.incoming.popleft())

    def _received(self, node: PlanNode, iteration: Iteration, value: Value, sent_ns: int) -> None:
        if self._executor.recorder is not None:
            self._executor.recorder.transfer(node, iteration, value, sent_ns)
        self._executor.complete(node, iteration, (), value)
        # Queue it: the sender is being driven, and its turn has to end first.
        self._run.turn.enqueue(self._executor)

    # -- to the host ---------------------------------------------------------------------------------------------

    def _to_host(self, node: PlanNode, iteration: Iteration, value: Value) -> None:
        """A predicate, a fetch or a streamed item, which leaves an asynchronous device."""
        executor, device = self._executor, self._executor.asynchronous
        assert device is not None
        if self._run.staying and isinstance(value, DeviceArray) and value.can_lend and self._leave(node, value):
            executor.complete(node, iteration, (value,), value)
            return
        if self._run.staying and is_array(value) and not stays_on_host(value) and self._staying(node):
            self._bring_in(node, iteration, value, device)
            return

        def take(result: Value, error: BaseException | None) -> None:
            if error is not None:
                executor.kernel_failed(error, node, iteration, (value,))
            elif not executor.stopped:
                executor.complete(node, iteration, (value,), result if assumed is None else assumed)

        deliver = executor.expect(take)
        spans, use, assumed = executor.new_spans(), node.source.attrs["use"], None
        try:
            if use == "predicate":
                device.require_data(value, node.source.name)
            elif use == "loop":
                assumed = device.assume_decision(value, node.source.name, iteration.index)
            if isinstance(value, DeviceValue):
                with recording(device, spans):
                    device.read_value(value, deliver) if use == "input" else value.to_host(deliver)
        except BaseException as error:
            deliver(None, error)
            return
        if isinstance(value, DeviceValue):
            executor.record_spans(spans, device, node, iteration, value)
        else:
            deliver(value, None)

    def _staying(self, node: PlanNode) -> list[PlanNode]:
        """The fetches that take a value where it is."""
        plain, _ = node.targets[0]
        return [target for _, _, target in plain if target.kind == Kind.FETCH and target.number in self._run.staying]

    def _leave(self, node: PlanNode, value: DeviceArray) -> bool:
        """Give a value to the fetches that take it where it is; return True if the host needs it for nothing else."""
        plain, merges = node.targets[0]
        staying = self._staying(node)
        for target in staying:
            self._run.stay(target.number, value)
        return not merges and len(staying) == len(plain)

    def _bring_in(self, node: PlanNode, iteration: Iteration, value: Value, device: AsynchronousDevice) -> None:
        """Copies to the device what the host has made, and a fetch wants there."""

        def take(copied: Value, error: BaseException | None) -> None:
            if error is not None:
                self._executor.kernel_failed(error, node, iteration, (value,))
            elif self._executor.stopped:
                pass
            elif isinstance(copied, DeviceValue):
                self._to_host(node, iteration, copied)
            else:  # a number, which the device leaves on the host
                self._executor.complete(node, iteration, (value,), copied)

        deliver = self._executor.expect(take)
        try:
            device.feed(value, deliver)
        except BaseException as error:
            deliver(None, error)

    def _emit(self, node: PlanNode, iteration: Iteration, values: tuple[Value, ...]) -> None:
        emitter, executor = self._run.emitter, self._executor
        assert emitter is not None
        self.untaken += 1

        def taken() -> None:
            self.untaken -= 1
            if self._run.taken is not None:
                self._run.taken.keep()
            if not executor.stopped:
                executor.scheduler.complete(node, iteration, ())
                self._run.turn.drive_now(executor)

        emitter.offer(values, taken)


def _read_on(device: AsynchronousDevice, deliver: Deliver) -> Deliver:
    """Return the receiver of a value of the device that is needed on the host, which `deliver` then gets."""

    def read(value: Value, error: BaseException | None) -> None:
        if error is None and isinstance(value, DeviceValue):
            device.read_value(value, deliver)
        else:
            deliver(value, error)

    return read
