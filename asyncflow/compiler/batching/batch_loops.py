"""Pass: joins the matrix products of many iterations of a loop into one (Cavs' lazy batching, for any loop).

Two kinds of work in a loop's body do not need to wait for their iteration, or need not be done in it:

- products whose rows depend on captures and the loop's counter alone, such as ``xs[t] @ W``, are made ahead, a block of
  iterations at a time (`batch_rows`); products of rows that are so in part are taken apart for it (`take_apart`);
- sums over iterations that nothing in the loop reads are computed later, such as gradients of weights, a block of
  iterations at a time (`batch_sums`).

Only pure nodes that stand on one device are moved, and only floats, for which a product of many rows is faster: their
results are the same within rounding. A node that may fail stays in the loop as well, and fails there.

On cards each product that is left out is a launch less, of whatever size. What decides how much is made at once, as
counters and bounds do, has to be on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from asyncflow.compiler.batching.batch_rows import batch_rows
from asyncflow.compiler.batching.batch_sums import batch_sums, pending_bytes
from asyncflow.compiler.batching.take_apart import take_apart
from asyncflow.compiler.program.replacements import Replacements
from asyncflow.devices.protocol import Device
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import WhileNode

_BLOCK_BYTES = 24 << 20
"""Most bytes of a block. Larger ones gain nothing more: their products are as fast as one of all rows. From 32 MiB on,
the C library would give the memory back to the system after each step."""

_CARD_BYTES = 256 << 20
"""The same on a card, for rows. It has the rows of all iterations made by one launch, if they are not so large that
other values lack the memory."""

_OVERLAPPED = 16
"""Divisor of block sizes where iterations overlap: others wait for values from another stream until a block is made."""

_OF_SUMS = 2
"""Factor by which blocks of sums may be larger than blocks that other nodes wait for: adding each product to its total
takes as long as the product, so that a block should hold a few."""

_SHARE = 64
"""A block takes at most so small a part of a device's memory limit."""

_SHARE_OF_SUMS = 8
"""Divisor of the memory that all blocks of sums may take together, if no plan says whether they fit."""


def block_bytes(devices: Sequence[Device]) -> int | None:
    """Return the most bytes of a block of rows on these devices; None if nothing is batched.

    That is so if a card has several streams for kernels: a store is valid in the order of one of them.
    """
    cards = [device for device in devices if device.capabilities.own_memory]
    if any(len(card.compute_streams) > 1 for card in cards):
        return None
    most = _CARD_BYTES if len(cards) == len(devices) else _without_limits(devices)
    return min([most, *(limit // _SHARE for limit in _limits(devices))])


def blocks_of_sums(graph: Graph, devices: Sequence[Device], *, in_plan: bool) -> tuple[int, int]:
    """Return the most bytes of a block of sums: the usual size, and the size if the usual one does not fit.

    Usual blocks do not depend on limits, so that sums round the same with a limit and without.

    Args:
        graph: a program.
        devices: of the session.
        in_plan: a plan of the memory says whether usual blocks fit.
    """
    usual, limits = _without_limits(devices), _limits(devices)
    if not limits:
        return usual, usual
    least = min(usual, min(limits) // _SHARE)
    on_card = has_cards(devices)
    found = [_waiting_bytes(node, usual, on_card) for node in graph.nodes if isinstance(node, WhileNode)]
    known = [each for each in found if each is not None]
    fits = len(known) == len(found) and (in_plan or _SHARE_OF_SUMS * sum(known) <= min(limits))
    return (usual if fits else least), least


def has_cards(devices: Sequence[Device]) -> bool:
    """Return True if one of the devices has a memory of its own."""
    return any(device.capabilities.own_memory for device in devices)


def _limits(devices: Sequence[Device]) -> list[int]:
    return [device.memory.limit for device in devices if device.memory.limit is not None]


def _without_limits(devices: Sequence[Device]) -> int:
    overlap = any(len(device.compute_streams) > 1 for device in devices)
    return _BLOCK_BYTES // _OVERLAPPED if overlap else _BLOCK_BYTES


def batch_loops(
    graph: Graph,
    block_bytes: int = _BLOCK_BYTES,
    of_sums: int = _BLOCK_BYTES,
    on_host: AbstractSet[Tensor] | None = None,
    left: Collection[Node] = (),
) -> None:
    """Batch in all loops of `graph`, inner ones first, in place; runs after the hoisting of unchanging nodes.

    Args:
        graph: a program.
        block_bytes: most bytes of a block of rows.
        of_sums: most bytes of a block of sums.
        on_host: where a device is a card, the tensors whose values are on the host; None without cards.
        left: loops that stay as they are, with all in them: a card runs them without the host, which fills blocks.
    """
    replaced = Replacements()
    ordered: list[Node] = []
    for node in graph.nodes:
        if replaced.tensors:
            replaced.apply(node)
        if node in left:
            ordered.append(node)
            continue
        for body in node.subgraphs:
            batch_loops(body, block_bytes, of_sums, on_host, left)
        if isinstance(node, WhileNode):
            divisor = _OVERLAPPED if _is_cut(node) else 1
            apart = take_apart(node, on_host)
            ahead = batch_rows(node, block_bytes // divisor, on_host)
            before, after = batch_sums(node, _bytes_of_sums(of_sums // divisor), replaced, on_card=on_host is not None)
            ordered += [*apart, *ahead, *before, node, *after]
        else:
            ordered.append(node)
    graph.nodes[:] = ordered
    replaced.apply_to_results(graph)


def bytes_for_batches(loop: WhileNode, blocks: tuple[int, int], *, on_card: bool = False) -> tuple[int, int]:
    """Return the bytes that batching makes a loop hold in rows that wait for their product.

    Args:
        loop: a `while`.
        blocks: see `blocks_of_sums`.
        on_card: a card may run it.

    Returns:
        The bytes in usual blocks, and in the least ones; 0 if only a run knows.
    """
    usual, least = blocks
    return _waiting_bytes(loop, usual, on_card) or 0, _waiting_bytes(loop, least, on_card) or 0


def _waiting_bytes(loop: WhileNode, block_bytes: int, on_card: bool) -> int | None:
    inner = (node for node in loop.body.walk() if isinstance(node, WhileNode))
    found = [pending_bytes(each, _bytes_of_sums(block_bytes), on_card=on_card) for each in (loop, *inner)]
    known = [each for each in found if each is not None]
    return sum(known) if len(known) == len(found) else None


def _bytes_of_sums(block_bytes: int) -> int:
    return min(_OF_SUMS * block_bytes, _BLOCK_BYTES)


def _is_cut(loop: WhileNode) -> bool:
    """Return True if nodes of the loop's body ask for different devices."""
    asked = {node.device for node in loop.body.walk() if node.device is not None}
    return len(asked) > 1
