"""Pass: keeps vectors of integers on the host where a decision of the host depends on them.

Lengths of sequences and the order of vertices come from the host, and decide there: about numbers of iterations, bounds
of slices and sizes of arrays. The host would have to wait for vectors on a card. So the pass looks for vectors of
integers that the host needs, and can have without asking a card. Fed values, constants and results of kernels of the
host are such vectors, and so are integers computed from these. The host keeps all of these vectors, and computes with
them.

A kernel may use such a vector as data, as the rows to gather. Then the pass adds a copy for the card. A fed value or
constant is given once more. A node (`TO_CARD`) copies any other vector, once for all users, before their loops. So a
CUDA graph of a region has these arrays among its inputs.

An example: ``dynamic_rnn`` with lengths. One kernel of the host makes five values of the lengths. The number of steps,
and the number of rows in each step, decide about the loop and its slices: the host keeps both. Kernels alone read the
order of the sequences and the rows in that order: these go to the card.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from asyncflow.autodiff.stores.saved_values import NEW_STORE, READ_SAVED
from asyncflow.compiler.program.detached import detached_node
from asyncflow.compiler.program.extract import EMIT, FEED, FETCH
from asyncflow.compiler.program.host_values import (
    STORES,
    computes_on_host,
    find_host_values,
    is_metadata,
    keeping,
)
from asyncflow.compiler.program.kernels.kernels import SAVES
from asyncflow.compiler.program.kernels.transfers import TO_CARD
from asyncflow.compiler.program.purity import has_variants
from asyncflow.graph.builtin import CONSTANT, IDENTITY, PARAMETER
from asyncflow.graph.facts import MOVE
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import host_inputs, runs_on_host
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode
from asyncflow.graph.values.spec import Spec


def keep_vectors(graph: Graph, cards: Collection[str]) -> frozenset[Tensor]:
    """Add copies of vectors that are to stay on the host, in place; return the tensors whose values stay.

    Args:
        graph: structured, with the device of every node in ``node.device``.
        cards: names of the devices with a memory of their own whose regions enqueue.

    Returns:
        The tensors that `find_host_values` does not find by itself.
    """
    if not any(_may_stay(x.spec) for node in graph.walk() if _is_source(node, cards) for x in node.outputs):
        return frozenset()
    search = _VectorSearch(graph, cards, find_host_values(graph))
    kept = search.kept()
    if kept:
        search.mark_stores()
        _VectorCopies(graph, find_host_values(graph, keeping(kept)), search.alone).add()
        for tensor in kept:
            if tensor.node.op is FEED:
                tensor.node.attrs["stays"] = True
    return kept


def _may_stay(spec: Spec) -> bool:
    """Return True for numbers that decide, and vectors of them."""
    return spec.dtype.kind in "biu" and spec.rank in (0, 1)


def _is_source(node: Node, cards: Collection[str]) -> bool:
    """Return True if the host has the outputs of a node before any card does."""
    if node.op in (FEED, CONSTANT):
        return node.op is CONSTANT or node.device in cards
    conduct = node.op.conduct
    return node.device in cards and runs_on_host(node) and not conduct.is_user and not conduct.is_async


# -- vectors that stay -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _VectorSearch:
    """The search for vectors that the host needs, and can have.

    Attributes:
        graph: the program's.
        cards: names of the devices.
        alone: values of the host without this pass, such as shapes.
        owners: the branch or loop of each body.
        places: of each input of a body, its position at the branch or loop.
        stores: nodes that make or fill stores of saved values for such vectors.
    """

    graph: Graph
    cards: Collection[str]
    alone: AbstractSet[Tensor]
    owners: dict[Graph, StructuredNode] = field(default_factory=dict)
    places: dict[Tensor, int] = field(default_factory=dict)
    stores: set[Node] = field(default_factory=set)

    def kept(self) -> frozenset[Tensor]:
        """Return the tensors that the host is to keep."""
        can = find_host_values(self.graph, self.could_keep)
        needed = self.behind(self.decisive(), can)
        reads = [node for node in self.graph.walk() if node.op is READ_SAVED and _may_stay(node.outputs[0].spec)]
        chains = [(read, self.behind(read.inputs[:1], can)) for read in reads]
        while True:
            saves = {x.node for x in needed if x.node.op in SAVES and x.node.inputs[2].shape != ()}
            # All readers of a store find the same values. One reader may need a value that another loop saves.
            filled = [(read, chain) for read, chain in chains if not saves.isdisjoint(x.node for x in chain)]
            found = {x for read, _ in filled for x in self.behind(read.outputs, can)}
            if found <= needed:
                break
            needed |= found
        self.stores = {x.node for _, chain in filled for x in chain if x.node.op in (NEW_STORE, *SAVES)}
        # The host computes all results of a node or none.
        return frozenset(x for each in needed - self.alone for x in self.together(each) if x not in self.alone)

    def mark_stores(self) -> None:
        """Mark the stores whose values stay on the host."""
        for node in self.stores:
            node.attrs = {**node.attrs, **({"moves": "never"} if node.op is NEW_STORE else {"stays": True})}

    def behind(self, tensors: Iterable[Tensor], can: AbstractSet[Tensor]) -> set[Tensor]:
        """Return which of these tensors, and of the tensors that they are made of, the host `can` have."""
        found: set[Tensor] = set()
        stack = [x for x in tensors if x in can]
        while stack:
            tensor = stack.pop()
            if tensor not in found:
                found.add(tensor)
                stack += [x for x in self.sources(tensor) if x in can]
        return found

    def could_keep(self, node: Node, found: AbstractSet[Tensor]) -> Sequence[Tensor]:
        """Return the outputs of a node that the host could have, given the tensors that it has."""
        if _is_source(node, self.cards):
            return [x for x in node.outputs if _may_stay(x.spec)]
        if node.op is READ_SAVED:
            is_there = all(x in found for x in node.inputs)
            return node.outputs if is_there and _may_stay(node.outputs[0].spec) else ()
        if node.device not in self.cards or node.op.kernel is None or not MOVE.allows(node.op) or runs_on_host(node):
            return ()
        if has_variants(node.inputs) or not all(_may_stay(x.spec) for x in node.outputs):
            return ()
        return node.outputs if node.inputs and all(x in found for x in node.inputs) else ()

    def decisive(self) -> Iterator[Tensor]:
        """Yield the tensors whose values the host looks at."""
        for node in self.graph.walk():
            if isinstance(node, StructuredNode):
                self.note(node)
                yield node.decision
            elif runs_on_host(node):
                yield from node.inputs
            else:
                yield from (node.inputs[place] for place in host_inputs(node))

    def note(self, node: StructuredNode) -> None:
        """Note which inputs the inputs of bodies stand for."""
        for body in node.subgraphs:
            self.owners[body] = node
            self.places.update((x, place) for place, x in enumerate(body.inputs, start=node.body_offset))

    def sources(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the tensors of which the host makes a tensor."""
        node = tensor.node
        if node.op is PARAMETER and tensor in self.places:
            owner, place = self.owners[node.graph], self.places[tensor]
            if isinstance(owner, WhileNode) and place < owner.n_vars:
                return owner.inputs[place], owner.body.results[place]
            return owner.inputs[place : place + 1]
        if isinstance(node, WhileNode):
            return node.inputs[tensor.index], node.body.results[tensor.index]
        if isinstance(node, CondNode):
            return [branch.results[tensor.index] for branch in node.subgraphs]
        return () if runs_on_host(node) or is_metadata(node) else node.inputs

    def together(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the outputs that are on the host if `tensor` is."""
        node = tensor.node
        if node.op is PARAMETER or isinstance(node, StructuredNode):
            return ()  # these follow
        return (tensor,) if _is_source(node, self.cards) else node.outputs


# -- copies for kernels ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _VectorCopies:
    """Copies on cards of the host's vectors.

    Attributes:
        graph: the program's.
        found: the tensors that are on the host.
        alone: values of the host without this pass, such as shapes.
        made: the copy of each tensor that has one.
        transfers: the `TO_CARD` node for the outputs of each node that has one.
        behind: new nodes to be put behind a node of a graph.
        owners: the branch or loop of each body.
    """

    graph: Graph
    found: AbstractSet[Tensor]
    alone: AbstractSet[Tensor]
    made: dict[Tensor, Tensor] = field(default_factory=dict)
    transfers: dict[Node, Node] = field(default_factory=dict)
    behind: dict[Node, list[Node]] = field(default_factory=dict)
    owners: dict[Graph, StructuredNode] = field(default_factory=dict)

    def add(self) -> None:
        """Give copies to all kernels with vectors of the host as data."""
        levels = [self.graph]
        for graph in levels:  # the list grows, outer graphs first
            for node in list(graph.nodes):
                for body in node.subgraphs:
                    assert isinstance(node, StructuredNode)
                    self.owners[body] = node
                    levels.append(body)
                for place in self.data_inputs(node):
                    node.inputs[place] = self.copy(node.inputs[place])
            if isinstance(graph, Subgraph):
                self.copy_results(self.owners[graph], graph)
        for graph in levels:
            graph.nodes[:] = [each for node in graph.nodes for each in (node, *self.behind.get(node, ()))]

    def is_vector(self, tensor: Tensor) -> bool:
        """Return True for a vector that the pass keeps on the host."""
        return tensor.shape != () and tensor in self.found and tensor not in self.alone

    def data_inputs(self, node: Node) -> Sequence[int]:
        """Return positions of the vectors of the host among the inputs of a kernel of a card."""
        places = [place for place, x in enumerate(node.inputs) if self.is_vector(x)]
        if not places or node.op in (FETCH, EMIT, IDENTITY) or node.op is TO_CARD:
            return ()
        if isinstance(node, WhileNode):
            # Variables that start on the host, but do not stay there.
            return [place for place in places if place < node.n_vars and node.body.inputs[place] not in self.found]
        if isinstance(node, CondNode) or runs_on_host(node) or is_metadata(node):
            return ()
        if node.op not in STORES and computes_on_host(node, self.found):
            return ()
        read = host_inputs(node)
        return [place for place in places if place not in read]

    def copy_results(self, owner: StructuredNode, body: Subgraph) -> None:
        """Copy results of a branch or an iteration whose users are on the card."""
        is_loop = isinstance(owner, WhileNode)
        if is_loop and body is not owner.subgraphs[1]:
            return
        stand_ins = body.inputs if is_loop else owner.outputs
        for place, (result, stands_for) in enumerate(zip(body.results, stand_ins, strict=False)):
            if self.is_vector(result) and stands_for not in self.found:
                body.results[place] = self.copy(result)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the copy of a vector on the card, made once."""
        if tensor not in self.made:
            self.made[tensor] = self.new_copy(tensor)
        return self.made[tensor]

    def new_copy(self, tensor: Tensor) -> Tensor:
        node, graph = tensor.node, tensor.node.graph
        if node.op is PARAMETER:
            owner = self.owners[graph]
            assert isinstance(graph, Subgraph)
            outer = owner.captured(graph).get(tensor)
            if outer is not None:
                inner = owner.add_capture(self.copy(outer), graph)
                for body in owner.subgraphs:  # lowering places Enter and Switch by these
                    body.inputs[-1].node.device = node.device
                return inner
            return self.transferred(tensor)  # a variable changes in each iteration
        if node.op in (FEED, CONSTANT):
            name = node.name.rpartition("/")[2]
            again = detached_node(graph, node.op, (), node.attrs, node, tensor.spec, name=name)
            self.behind.setdefault(node, []).insert(0, again)
            return again.outputs[0]
        is_read = node.op is READ_SAVED  # this may be the last read, which drops the value
        if isinstance(node, StructuredNode) or runs_on_host(node) or is_read or not graph.is_subgraph:
            return self.transferred(tensor)
        # In a body, let the card compute it again: usually a view, without a copy in each iteration.
        read = host_inputs(node)
        inputs = [self.copy(x) if self.is_vector(x) and place not in read else x for place, x in enumerate(node.inputs)]
        again = detached_node(graph, node.op, inputs, node.attrs, node, node.specs, name=f"{_last(node)}/on_card")
        self.behind.setdefault(node, []).append(again)
        self.made.update(zip(node.outputs, again.outputs, strict=True))
        return again.outputs[tensor.index]

    def transferred(self, tensor: Tensor) -> Tensor:
        """Return the copy that a node makes: one node for all outputs of a node."""
        node = tensor.node
        if node not in self.transfers:
            made = detached_node(node.graph, TO_CARD, (), {}, node, (), name=f"{_last(node)}/to_card")
            self.transfers[node] = made
            self.behind.setdefault(node, []).insert(0, made)
        transfer = self.transfers[node]
        transfer.inputs.append(tensor)
        output = Tensor(transfer, len(transfer.outputs), tensor.spec)
        transfer.outputs = (*transfer.outputs, output)
        return output


def _last(node: Node) -> str:
    return node.name.rpartition("/")[2]
