"""The kind of run that a plan is compiled for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from asyncflow.graph.building.build import SupportsTensor
from asyncflow.graph.graph import Graph, has_side_effect
from asyncflow.graph.home import Home
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import bodies_in
from asyncflow.values import Value

SavedValuesChoice: TypeAlias = Literal["auto", "keep", "swap", "recompute"]
"""Treatments that may be asked for values that loops save for their gradients."""

Fetch: TypeAlias = Tensor | Node | SupportsTensor


class PlanRequest(NamedTuple):
    """One kind of run: what its plan is found by."""

    home: Home
    """The home of a root graph, which keeps the plans of its requests: they do not keep the graph."""
    fetches: tuple[Fetch, ...]
    """The fetches of the run."""
    feeds: tuple[Tensor, ...]
    """Tensors the run gets values for."""
    streamed: tuple[Tensor, ...] = ()
    """Tensors of one body, handed out in each iteration."""
    all_effects: bool = False
    """Run every side effect of the graph, fetched or not."""
    regions: bool = True
    """Compile clusters of nodes that never wait to Python functions."""
    stores_on: str | None = None
    """The device that has the elements of TensorArrays and rows of RowStores that are fed."""

    @property
    def graph(self) -> Graph:
        """The root graph."""
        return self.home.graph

    @property
    def roots(self) -> list[Fetch]:
        """All that the run has to run: fetches, streamed tensors with the loops around them, and effects."""
        loops = structured_nodes_around(self.streamed[0].graph) if self.streamed else []
        effects = filter(has_side_effect, self.graph.nodes) if self.all_effects else ()
        return [*self.fetches, *self.streamed, *loops, *effects]


def structured_nodes_around(body: Graph) -> list[Node]:
    """The structured nodes that enclose `body`, outermost first."""
    path: list[Node] = []
    while body.parent is not None:
        path.insert(0, next(node for node in body.parent.nodes if any(inner is body for inner in bodies_in(node))))
        body = body.parent
    return path


_watchers: list[Callable[[PlanRequest, Sequence[Value]], object]] = []


@contextmanager
def watching(tell: Callable[[PlanRequest, Sequence[Value]], object]) -> Iterator[None]:
    """Report each kind of run that any session begins inside the block, with the feeds of its first run."""
    _watchers.append(tell)
    try:
        yield
    finally:
        _watchers.remove(tell)


def tell_watchers(request: PlanRequest, values: Sequence[Value]) -> None:
    """Tell all watchers of a run."""
    for tell in _watchers:
        tell(request, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of a session that plans are compiled with; `SessionOptions` has their defaults and checks."""

    optimize: bool
    """Fold constants, join equal nodes, move invariant ones out of loops, and drop nodes without effect."""
    loop_batching: bool
    """With `optimize`, join the matrix products of many iterations of a loop into one, on CPUs."""
    fusion: bool
    """With regions, join chains of elementwise kernels into one, on devices that launch them."""
    cuda_graphs: bool
    """With regions, replay capturable ones as CUDA graphs."""
    device_while: bool
    """Run loops on the card if they decide by its arrays and contain only nodes that a graph can hold."""
    without: Collection[str]
    """Names of passes that are left out."""
    dump: bool | str | Callable[[str, str], object]
    """Receiver of the changes of passes; see `asyncflow.compiler.dump`."""
    debug: bool
    """Verify the graph after every pass, and every kernel's outputs while running."""
    check_numerics: bool
    """Fail on NaN and infinity."""
    max_iterations: int | None
    """Most iterations of a loop."""
    transfer_dtype: str | None
    """``"bfloat16"`` sends float32 values between devices as their upper 16 bits."""
    saved_values: SavedValuesChoice
    """Treatment of values that loops save for their gradients."""
    soft_placement: bool
    """A node that has no kernel where it is asked to be goes elsewhere."""
    seed: int | None
    """Seed for a random order of a region's nodes within the required order; None: as written."""
    kernels: Mapping[tuple[object, str], Callable[..., object]] | None
    """Kernels of users in place of the ops' own, by op and kind of device."""
    placement_seed: int | None
    """Seed for random placement within the constraints; None: nodes go where they finish first."""
