"""Memory limits for the errors of runs that did not fit: a run fits into the limit that its error names.

A planned loop names its own limit (`PlannedLoop.advice`). For a program without stores of values, this module adds up
the bytes of its nodes. A region runs its nodes one after the other, so that it takes the values that are there at a
time. Firings outside of regions have no certain order, and neither have several regions: each counts with all that it
takes, as if the run let go of nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil

from asyncflow.compiler.memory.largest import largest_spec
from asyncflow.compiler.memory.live_bytes import Sizes, most_live
from asyncflow.compiler.memory.plan_memory import UNPLANNED
from asyncflow.compiler.plan import Partition, Plan
from asyncflow.compiler.program.extract import FEED
from asyncflow.compiler.program.kernels.fused import FUSED
from asyncflow.compiler.program.kernels.kernels import is_small_spec
from asyncflow.compiler.regions.code.held_bytes import VARIABLE_WRITES
from asyncflow.compiler.regions.regions import REGION, Region
from asyncflow.devices.memory import format_bytes
from asyncflow.devices.protocol import Device
from asyncflow.errors import OutOfMemoryError
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import WhileNode
from asyncflow.graph.values.shapes import is_static
from asyncflow.state.variables.variable import VARIABLE_READ

_IN_PIECES = 1.25
"""Factor for the memory of cards, which may be free in pieces that are too small.

With limits of 1.125 times the bytes held, 6 of 40 random programs failed on the stand-in; with 1.25 times all ran.
"""

_PIECE = 512
"""Bytes that a value takes at least on a card."""


def memory_advice(failure: OutOfMemoryError, plan: Plan, devices: Mapping[str, Device]) -> Iterator[str]:
    """Yield lines for people on the limits that would do for a run that failed, and has ended.

    Of loops that nothing is planned for, the plan's notes say why, and which option can hold less.
    """
    found = [advice for advice in (loop.advice() for loop in plan.memory) if advice]
    found += [note for note in plan.memory_notes if note.endswith(UNPLANNED)]
    yield from found
    partition = next((each for each in plan.partitions if each.device == failure.device), None)
    if found or partition is None or failure.device not in devices:
        return
    device = devices[failure.device]
    enough = enough_bytes(partition, device.memory.used, is_on_card=device.asynchronous is not None)
    if enough is not None and enough > failure.limit:
        yield (
            f"a run of this program alone is predicted to hold at most {format_bytes(enough)} on {device.name}, in any "
            f"order of its firings; memory_limit={enough:_} is predicted to be enough"
        )


def enough_bytes(partition: Partition, used: int, *, is_on_card: bool) -> int | None:
    """Return the most bytes that a run of a partition may hold; None if the sizes of its values are not known.

    Args:
        partition: the partition.
        used: bytes held between runs, by variables for example.
        is_on_card: feeds and constants take memory of the device, which may be free in small pieces.
    """
    nodes = [each.source for each in partition.root.nodes if each not in partition.host_feeds]
    inside = [each for node in nodes for each in _inside(node)]
    values = [x for node in inside for x in node.outputs]
    if len(partition.frames) > 1 or not all(map(_has_size, values)):
        return None
    sizes = Sizes(())
    lasting = {x for node in inside if node.op in (VARIABLE_READ, *VARIABLE_WRITES) for x in node.outputs}
    standing = max(float(used), sum(map(sizes.of, lasting)))
    # A CPU counts a feed if a view of it is made.
    viewed = {x for node in inside if node.op.traits.is_cheap for x in node.inputs}
    fed = [x for node in nodes if node.op is FEED for x in node.outputs]
    total = sum(sizes.of(x) for x in fed if is_on_card or not viewed.isdisjoint((x, *_as_inputs(x, nodes))))
    for node in inside:
        if isinstance(node, WhileNode):  # a variable's next value exists beside its current one
            total += sum(map(sizes.of, node.inputs[: node.n_vars]))
    for node in nodes:
        region: Region | None = node.attrs["region"] if node.op is REGION else None
        line, results = ([node], node.outputs) if region is None else (region.nodes, region.outputs)
        total += 0.0 if node.op in (FEED, CONSTANT) else most_live(line, results, sizes, lasting)
    if is_on_card:
        total += sum(sizes.of(x) for node in inside if node.op is CONSTANT for x in node.outputs)
        total += _PIECE * len(values) + sum(sizes.of(x) for x in values if is_small_spec(x.spec))
        # Kernels with several steps hold temporary arrays.
        steps = [node for node in inside if not (node.op is FUSED or node.op.rows == "elementwise" or node.subgraphs)]
        total += max((sum(map(sizes.of, (*node.inputs, *node.outputs))) for node in steps), default=0.0)
    return ceil((standing + total) * (_IN_PIECES if is_on_card else 1.0))


def _inside(node: Node) -> Iterator[Node]:
    """Yield a node, or the nodes of a region."""
    if node.op is REGION:
        yield from node.attrs["region"].walk()
    else:
        yield node


def _as_inputs(value: Tensor, nodes: Sequence[Node]) -> Iterator[Tensor]:
    """Yield a value's names inside of regions that take it."""
    for node in nodes:
        if node.op is REGION:
            yield from (inner for inner, x in zip(node.attrs["region"].inputs, node.inputs, strict=True) if x is value)


def _has_size(value: Tensor) -> bool:
    return value.dtype.kind not in "OT" and is_static(largest_spec(value).shape)
