"""Pass: saves those values of a loop from which its gradient computes the others cheaply, if that takes less memory.

A gradient is built from the values that its rules ask for, and a loop saves each of them. These are computed from other
values, in part by cheap ops (elementwise ones, casts and views). Among all of them a minimum cut (`min_cut`) finds the
set of least bytes. The gradient's body computes the others again, next to their use, by the same kernels from the same
inputs. An LSTM cell need not save tanh(c) beside c.

Constants, counters and captures need no saving. Values in one buffer, such as an iteration's result and the next one's
variable, count once. A kernel that runs again has a price in bytes: saving so little costs less than that.

For example, the gradient of ``o * tanh(c)`` reads `tanh(c)`, and that of ``f * c`` reads `c`. If each is
``float32[64,256]``, a loop would save 128 KiB an iteration. Computing `tanh(c)` again has a price of `KERNEL` + 64 KiB
/ `PASS` = 4,352 bytes, and frees 65,536: the cut keeps `c` alone. If each is ``float32[64]``, the price is 272 bytes
and frees 256: both are saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import combinations
from math import prod

import numpy as np

from asyncflow.autodiff.bodies.while_gradient import is_successor
from asyncflow.autodiff.stores.saved_values import READ_SAVED
from asyncflow.compiler.memory.largest import largest_spec
from asyncflow.compiler.memory.saved import buffer_of, is_shared
from asyncflow.compiler.memory.saving.copy_parts import copy_parts
from asyncflow.compiler.memory.saving.min_cut import Cut, smallest_cut
from asyncflow.compiler.memory.store_paths import LoopStore, StorePaths, StoreReader, stores_of
from asyncflow.compiler.program.detached import detached_node
from asyncflow.compiler.program.purity import may_run_again
from asyncflow.compiler.program.replacements import Replacements
from asyncflow.graph.building.copying import Copier, copied
from asyncflow.graph.builtin import CONSTANT, PARAMETER, is_constant
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import WhileNode
from asyncflow.graph.values.dtypes import VARIANT, int64
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import ADD
from asyncflow.ops.arrays.datatypes import ASTYPE

KERNEL = 256
"""Price of a kernel that runs again, in bytes: so few are made and kept in the time that a call takes."""

PASS = 16
"""Divisor of a result's bytes in the price of an elementwise kernel, which is added to `KERNEL`.

Memory that is written for the first time is slow, so that keeping a value costs about as much time as making it again.
"""

COMPOSITE = 1
"""`PASS` of an op that is several kernels."""

_EXTENTS = 64, 1, 4096
"""Stand-ins for extents that only a run knows. Sets are compared with the first; with no other may a set be larger."""

_MOST_SHARED = 4
"""Buffers with several names of which all combinations are tried, to pay for them or not."""

_LARGE = 300
"""Number of values from which only one cut is tried."""


def choose_saved(graph: Graph) -> None:
    """Choose the saved values of all loops of `graph`, outer loops first, in place."""
    loops = [node for node in graph.walk() if isinstance(node, WhileNode) and stores_of(node)]
    if not loops:
        return
    for loop in loops:
        copy_parts(loop)
    paths = StorePaths(graph)
    for loop in loops:
        asked = {node.device for node in loop.body.walk() if node.device is not None}
        if len(asked) < 2:  # with several devices, values are saved where they are made
            change = SavedChange(loop, paths)
            if change.gains:
                change.apply()


class SavedChange:
    """A change of the values that a forward loop saves for its gradients.

    Args:
        loop: the forward loop.
        paths: all stores of the program.
        price_of: the price, in bytes, of computing a value again; None where that may not be done.

    Attributes:
        loop, paths, price_of: as given.
        readers: by store, the readers of stores that may be dropped, since nothing else uses them.
        wanted: the values that those stores hold.
        pinned: values that are saved in any case, and their stores.
        depth: from how many loops, at most, stores are taken out.
        values: of the forward body, read by gradients or possible sources of values that gradients read.
        numbers: the place of each among them.
        kept: the values to save, besides pinned ones.
        again: the nodes to compute again.
    """

    def __init__(
        self, loop: WhileNode, paths: StorePaths, price_of: Callable[[Tensor], int | None] | None = None
    ) -> None:
        self.loop = loop
        self.price_of = price_of or price_of_cheap
        self.paths = paths
        self.readers: dict[LoopStore, list[StoreReader]] = {}
        self.wanted: dict[Tensor, LoopStore] = {}
        self.pinned: dict[Tensor, LoopStore] = {}
        for store in stores_of(loop):
            value = store.value
            found = None if value.dtype == VARIANT or store.save.control_inputs else paths.readers(store)
            if found is None or value in self.wanted:
                self.pinned[value] = store
            else:
                self.readers[store] = found
                self.wanted[value] = store
        self.depth = max((each.depth for found in self.readers.values() for each in found), default=0)
        self.variables = dict(loop.carried)
        self.captured = loop.captured(loop.body)
        self.values: list[Tensor] = []
        self.numbers: dict[Tensor, int] = {}
        self._prices: list[int | None] = []
        self._choose()

    def _choose(self) -> None:
        read = [value for value, store in self.wanted.items() if self.readers[store]]
        self._collect(read)
        needed = frozenset(self.numbers[value] for value in read if value in self.numbers)
        self.kept = {self.values[number] for number in needed}
        self.again: set[Node] = set()
        if needed:
            cut = self._best(needed)
            chosen = {self.values[number] for number in cut.kept}
            # If an extent is 1, values without it may be larger: no stand-in extent may lead to more bytes.
            if self._price(cut) < self._saved_bytes(self.kept) and all(
                self._saved_bytes(chosen, extent) <= self._saved_bytes(self.kept, extent) for extent in _EXTENTS
            ):
                self.kept = chosen
                self.again = {self.values[number].node for number in cut.again}

    @property
    def dropped(self) -> list[LoopStore]:
        """The stores that are there, and are not needed any more."""
        return [store for value, store in self.wanted.items() if value not in self.kept]

    @property
    def gains(self) -> bool:
        """True if the change has any effect."""
        return bool(self.dropped)

    def saved(self) -> dict[Tensor, int]:
        """Return the values saved with the change, and the bytes of each an iteration; 0 if a value needs no memory of
        its own.

        Values in one buffer count once. Extents that only a run knows have a stand-in.
        """
        buffers: set[Tensor] = set()
        sizes: dict[Tensor, int] = {}
        for value in (*self.pinned, *(value for value in self.values if value in self.kept)):
            buffer = self.buffer(value)
            sizes[value] = 0 if buffer in buffers else self._nbytes(buffer)
            buffers.add(buffer)
        return sizes

    # -- candidates ---------------------------------------------------------------------------------------------------

    def is_free(self, value: Tensor) -> bool:
        """Return True if a value of the body needs no saving wherever the loop's stores are read."""
        return is_free(value, self.loop, self.depth, self.paths)

    def _collect(self, wanted: Iterable[Tensor]) -> None:
        """Note the values that `wanted` are, or may be computed from."""
        open_ = list(wanted)
        while open_:
            value = open_.pop()
            if value in self.numbers or self.is_free(value):
                continue
            self.numbers[value] = len(self.values)
            self.values.append(value)
            self._prices.append(self.price_of(value))
            if self._prices[-1] is not None:
                open_ += value.node.inputs

    def _best(self, needed: Collection[int]) -> Cut:
        """The cut of least price, as far as buffers with several names allow to find it."""
        pinned = {self.buffer(value) for value in self.pinned}
        buffers = [self.buffer(value) for value in self.values]
        costs = [0 if buffer in pinned else self._nbytes(buffer) for buffer in buffers]
        inputs = [
            [] if price is None else [self.numbers[x] for x in value.node.inputs if x in self.numbers]
            for value, price in zip(self.values, self._prices, strict=True)
        ]
        # A cut pays for each value, so several times for a buffer with several names. One cut cannot pay once, so try
        # each combination of the largest such buffers as already paid for, up to 16.
        names: dict[Tensor, list[int]] = defaultdict(list)
        for number, buffer in enumerate(buffers):
            names[buffer].append(number)
        shared = [each for each in names.values() if len(each) > 1 and costs[each[0]]]
        shared.sort(key=lambda each: costs[each[0]], reverse=True)
        shared = shared[: 0 if len(self.values) > _LARGE else _MOST_SHARED]
        found = []
        for count in range(len(shared) + 1):
            for paid in combinations(shared, count):
                free = {number for each in paid for number in each}
                rest = [0 if number in free else cost for number, cost in enumerate(costs)]
                found.append(smallest_cut(rest, self._prices, inputs, needed))
        return min(found, key=self._price)

    def _price(self, cut: Cut) -> int:
        """Return the bytes saved, plus the price of the values computed again."""
        again = sum(self._prices[number] or 0 for number in cut.again)
        return self._saved_bytes(self.values[number] for number in cut.kept) + again

    # -- bytes --------------------------------------------------------------------------------------------------------

    def _saved_bytes(self, values: Iterable[Tensor], extent: int = _EXTENTS[0]) -> int:
        """Return the bytes an iteration of all saved values, if these are among them."""
        buffers = {self.buffer(value) for value in (*values, *self.pinned)}
        return sum(self._nbytes(buffer, extent) for buffer in buffers)

    def buffer(self, value: Tensor) -> Tensor:
        """The value whose memory holds one of the body, in the iteration before maybe."""
        return buffer_of(value, self.variables)

    def _nbytes(self, buffer: Tensor, extent: int = _EXTENTS[0]) -> int:
        """Return the bytes of a buffer an iteration; 0 if it needs no memory of its own."""
        is_there = buffer.dtype == VARIANT or buffer.node.op is READ_SAVED
        if is_there or buffer in self.captured or is_shared(buffer, self.loop):
            return 0
        return nbytes_of(largest_spec(buffer), extent)

    # -- the change ---------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Save `kept`, and compute the other values again where they are read."""
        kept, dropped = self.kept, self.dropped
        stores = {**self.pinned, **{value: store for value, store in self.wanted.items() if value in kept}}
        for value in self.values:  # in list order: a set's order, and so the order of stores, differs between processes
            if value in kept and value not in stores:
                stores[value] = self.paths.add_store(dropped[0], value, beside=dropped[0].save)
        places: dict[Graph, dict[Node, StoreReader]] = defaultdict(dict)
        for readers in self.readers.values():
            for reader in readers:
                places[reader.node.graph][reader.node] = reader
        for graph, here in places.items():
            # By index: readers of one iteration share the recomputed values, which stand behind the first reader.
            again: dict[Tensor, _ComputedAgain] = {}
            replaced = Replacements()
            for reader in [here[node] for node in graph.nodes if node in here]:
                here_again = again.setdefault(reader.index, _ComputedAgain(self, stores, reader))
                here_again.reader = reader
                value = here_again.value(reader.store.value)
                if value is not reader.node.outputs[0]:
                    replaced.tensors[reader.node.outputs[0]] = value
                    self.paths.drop_reader(reader)
            for node in graph.nodes:
                replaced.apply(node)
            replaced.apply_to_results(graph)
        for store in dropped:
            self.paths.drop(store)
        self.paths.settle()


class _ComputedAgain(Copier):
    """Forward values of one iteration, computed again in one body of a gradient.

    Args:
        loop: the forward loop.
        stores: of the saved values.
        reader: the node behind which copies stand.
    """

    def __init__(self, loop: SavedChange, stores: dict[Tensor, LoopStore], reader: StoreReader) -> None:
        super().__init__(reader.node.graph)
        self.loop = loop
        self.stores = stores
        self.reader = reader

    def known(self, x: Tensor) -> Tensor | None:
        """See `Copier.known`."""
        # Called for each input of a copied node: copying ends at saved values, and at values that need no saving.
        reader, paths = self.reader, self.loop.paths
        if self.loop.is_free(x):
            return _brought(x, self.loop.loop, reader, paths)
        if x not in self.stores:
            return None
        store = self.stores[x]
        return reader.node.outputs[0] if reader.store == store else paths.read(store, reader)

    def made(self, node: Node) -> Node:
        """See `Copier.made`."""
        return _inserted(node, self.values(node.inputs), self.reader, self.loop.paths)


def _inserted(node: Node, inputs: Sequence[Tensor], reader: StoreReader, paths: StorePaths) -> Node:
    """A copy of a node, behind `reader`."""
    # Named as a node of the gradient: errors and listings find the differentiated node by the name.
    graph = reader.node.graph
    name = graph.reserve(f"{reader.node.name.rpartition('/')[0]}/{node.name.rpartition('/')[2]}")
    paths.insert(copied(node, graph, inputs, name), behind=reader.node)
    return graph.nodes.pop()


def _brought(value: Tensor, loop: WhileNode, reader: StoreReader, paths: StorePaths) -> Tensor:
    """A value that is there for nothing in the body of a loop, where `reader` stands."""
    if is_constant(value):
        return _inserted(value.node, (), reader, paths).outputs[0]
    graph = reader.node.graph
    start = counter_start(value, loop)
    if start is not None:
        return _counted(start, value, reader, paths)
    outer = loop.captured(loop.body)[value]
    if reader.around is None:
        return paths.captured(outer, graph)
    owner = paths.owners[loop.graph]
    assert isinstance(owner, WhileNode)
    return paths.captured(_brought(outer, owner, reader.around, paths), graph)


def _counted(start: Tensor, counter: Tensor, reader: StoreReader, paths: StorePaths) -> Tensor:
    """A counter of the forward loop: the number of the iteration, and what the counter begins with."""
    graph, like, scalar = reader.node.graph, counter.node, Spec(int64, ())
    first = np.asarray(start.node.attrs["value"], int64)
    made = [detached_node(graph, CONSTANT, (), {"value": first}, like, scalar)]
    made.append(detached_node(graph, ADD, [reader.index, made[0].outputs[0]], {}, like, scalar))
    made.append(detached_node(graph, ASTYPE, made[1].outputs, {"dtype": counter.dtype}, like, counter.spec))
    for node in made:
        paths.insert(node, behind=reader.node)
    return made[-1].outputs[0]


# -- the rules --------------------------------------------------------------------------------------------------------


def is_free(value: Tensor, loop: WhileNode, depth: int, paths: StorePaths) -> bool:
    """Return True if a value of the body of `loop` needs no saving for a gradient that many loops further out."""
    if is_constant(value) or counter_start(value, loop) is not None:
        return True
    outer = loop.captured(loop.body).get(value) if value.node.op is PARAMETER else None
    if outer is None or outer.dtype == VARIANT or not depth:
        return outer is not None and outer.dtype != VARIANT
    owner = paths.owners[loop.graph]
    return isinstance(owner, WhileNode) and is_free(outer, owner, depth - 1, paths)


def counter_start(value: Tensor, loop: WhileNode) -> Tensor | None:
    """The constant with which a loop variable begins that goes up by one in each iteration; None for anything else."""
    if value.node.op is not PARAMETER or value.dtype.kind not in "iu" or value.shape != ():
        return None
    place = next((place for place, (x, _) in enumerate(loop.carried) if x is value), None)
    if place is None or not is_constant(loop.inputs[place]) or not is_successor(loop.body.results[place], value):
        return None
    return loop.inputs[place]


def is_cheap(node: Node) -> bool:
    """Return True if a gradient may cheaply compute the node again: an elementwise op, a cast or a view."""
    return (node.op.traits.is_cheap or node.op.rows == "elementwise") and may_run_again(node)


def price_of_cheap(value: Tensor) -> int | None:
    """The price, in bytes, of computing a value again; None if it is not cheap."""
    if not is_cheap(value.node):
        return None
    if value.node.op.traits.is_cheap:
        return 0
    return KERNEL + nbytes_of(value.spec, _EXTENTS[0]) // (COMPOSITE if value.node.op.is_composite else PASS)


def nbytes_of(spec: Spec, extent: int) -> int:
    """Bytes of a value, if all extents that are not known are `extent`."""
    shape = (extent,) if spec.shape is None else spec.shape
    return prod(extent if dim is None else dim for dim in shape) * spec.dtype.itemsize
