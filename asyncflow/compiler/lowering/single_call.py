"""Plans so simple that no scheduler is needed: feeds, one kernel (often a region), fetches.

A kernel on shapes that are known and small is always short. For any other, such as one on a batch of any size, that
depends on the arrays fed: the run looks up how long it took before on as many elements, as the executor does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncflow.compiler.plan import FiringWay, Kind, Partition, PlanNode
from asyncflow.devices.protocol import Device
from asyncflow.graph.structured import WhileNode
from asyncflow.ops.random.random_again import RANDOM_KEY
from asyncflow.values import Kernel, Value


@dataclass(frozen=True, slots=True)
class SingleCall:
    """A plan that runs as one call.

    Attributes:
        node: the kernel's node.
        template: its inputs, with constants in place.
        fed_inputs: ``(input, feed)`` for the inputs that come from feeds.
        fetched: per fetch, the output it shows.
        is_open: how long it takes is only known once it is fed.
        keys: for a call that waits in line, the inputs that are the key of the run, each with the kernel that makes it.
    """

    node: PlanNode
    template: tuple[Value, ...]
    fed_inputs: tuple[tuple[int, int], ...]
    fetched: tuple[int, ...]
    is_open: bool
    keys: tuple[tuple[int, Kernel], ...] = ()

    def inputs(self, feeds: Sequence[Value]) -> list[Value]:
        """Return the kernel's inputs for these fed values."""
        inputs = list(self.template)
        for index, feed in self.fed_inputs:
            inputs[index] = feeds[feed]
        return inputs

    def results(self, output: Any) -> list[Value]:
        """Return the fetched values, given the kernel's output."""
        return [output] if self.node.single else [output[index] for index in self.fetched]


def find_single_call(
    partitions: Sequence[Partition],
    devices: Sequence[Device],
    *,
    may_loop: bool = False,
    may_wait: bool = False,
    has_context: bool = False,
) -> SingleCall | None:
    """The single call that a plan is; None if it needs the scheduler.

    Args:
        partitions: of the plan.
        devices: of the session.
        may_loop: whoever calls it knows how long its loops go on.
        may_wait: whoever calls it can wait in line, where others compute it.
        has_context: whoever calls it gives it a `KernelContext`.
    """
    partition = partitions[0]
    if len(partitions) > 1 or any(d.asynchronous is not None for d in devices if d.name == partition.device):
        return None
    nodes = partition.root.nodes
    kernels = [node for node in nodes if node.kind == Kind.KERNEL]
    makers: list[PlanNode] = []
    if len(kernels) > 1:
        makers = [node for node in kernels if node.source.op is RANDOM_KEY]
        kernels = [node for node in kernels if node.source.op is not RANDOM_KEY]
    n_others = len(makers) + len(partition.feeds) + partition.n_fetches
    if len(kernels) != 1 or len(partition.frames) > 1 or len(nodes) != 1 + n_others:
        return None
    node = kernels[0]
    waits = may_wait and node.conduct.waits_in_line and all(device.swapping is None for device in devices)
    if makers and not waits:
        return None
    is_small = node.way == FiringWay.SMALL
    if not (is_small or waits or _may_be_short(node, may_loop, has_context)) or any(other.controls for other in nodes):
        return None
    fed: list[tuple[int, int]] = []
    keys: list[tuple[int, Kernel]] = []
    feed_indexes = iter(partition.feed_indexes)
    for source in [*partition.feeds, *makers]:
        feed_index = next(feed_indexes, None)
        plain, merges = source.targets[0]
        for _, slot, target in plain:
            if target is not node:
                return None
            if feed_index is not None:
                fed.append((slot - node.slot, feed_index))
            else:
                assert source.kernel is not None
                keys.append((slot - node.slot, source.kernel))
        if merges:
            return None
    fetched: dict[int, int] = {}
    for output, (plain, merges) in enumerate(node.targets):
        for _, _, target in plain:
            if target.kind != Kind.FETCH:
                return None
            fetched[target.number] = output
        if merges:
            return None
    if len(fetched) != partition.n_fetches or (node.single and partition.n_fetches != 1):
        return None
    template = partition.root.values[node.slot : node.slot + node.n_inputs]
    in_order = tuple(fetched[index] for index in sorted(fetched))
    return SingleCall(node, tuple(template), tuple(fed), in_order, is_open=not is_small, keys=tuple(keys))


def _may_be_short(node: PlanNode, may_loop: bool, has_context: bool) -> bool:
    """Return True if the node never waits, and its duration depends on its function or the fed arrays."""
    if node.region is not None:
        has_loops = any(isinstance(inner, WhileNode) for inner in node.region_nodes())
        return (has_context or not node.region.conduct.needs_context) and (may_loop or not has_loops)
    return node.way == FiringWay.TIMED and (has_context or not node.conduct.needs_context)
