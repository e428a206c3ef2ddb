"""How a graph becomes a plan: the passes, in order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.compiler.codegen import generate
from asyncflow.compiler.extract import extract
from asyncflow.compiler.frames import assign_frames
from asyncflow.compiler.kernels import bind_kernel
from asyncflow.compiler.lower import lower
from asyncflow.compiler.optimize import optimize as run_optimizations
from asyncflow.compiler.order_effects import order_effects
from asyncflow.compiler.place import choose_device
from asyncflow.compiler.plan import Plan, build_partition
from asyncflow.compiler.regions import make_regions
from asyncflow.compiler.straight import find_straight
from asyncflow.graph.verify import verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.compiler.codegen import RegionCode
    from asyncflow.compiler.kernels import Resolve
    from asyncflow.devices.protocol import Device
    from asyncflow.graph.build import SupportsTensor
    from asyncflow.graph.graph import Graph
    from asyncflow.graph.ir import Node, Tensor


def compile_plan(
    graph: Graph,
    fetches: Sequence[Tensor | Node | SupportsTensor],
    feeds: Sequence[Tensor],
    *,
    devices: Sequence[Device],
    resolve: Resolve,
    streamed: Sequence[Tensor] = (),
    all_effects: bool = False,
    optimize: bool = True,
    regions: bool = True,
    debug: bool = False,
    check_numerics: bool = False,
    max_iterations: int | None = None,
) -> Plan:
    """Compiles what one kind of run needs.

    Args:
        graph: a root graph; not changed.
        fetches: what the run returns.
        feeds: tensors the run gets values for.
        devices: those of the session.
        resolve: looks up the state of resources.
        streamed: tensors of one body, handed out in each iteration.
        all_effects: run every side effect of the graph, fetched or not.
        optimize: fold constants, join equal nodes, move invariant ones out of loops, and leave out what does nothing.
        regions: compile clusters of nodes that never wait to Python functions.
        debug: verify the graph after every pass, and every kernel's outputs while running.
        check_numerics: fail on NaN and infinity.
        max_iterations: most iterations of a loop, for those inside regions.

    Raises:
        FeedError: a needed placeholder is not fed.
        GraphError: the graph is not a valid program.
        PlacementError: no device fits all constraints.
    """
    extracted = extract(graph, fetches, feeds, streamed=streamed, all_effects=all_effects)
    device = choose_device(extracted.graph, devices)
    if debug:
        verify(extracted.graph)
    if optimize:
        run_optimizations(
            extracted.graph,
            keep=extracted.kept,
            on_host=device.xp is np,
            check_numerics=check_numerics,
            debug=debug,
        )
    order_effects(extracted.graph)
    if debug:
        verify(extracted.graph)
    if regions:
        make_regions(extracted.graph)
        if debug:
            verify(extracted.graph)
    lowered = lower(extracted.graph)
    if debug:
        verify(lowered)
    bind = partial(bind_kernel, xp=device.xp, resolve=resolve, check_outputs=debug, check_numerics=check_numerics)
    # Accounting costs a region more than many a kernel: without a limit only what enters and leaves it is counted.
    track = device.memory.track if debug or device.memory.limit is not None else None

    def bind_region(node: Node) -> RegionCode:
        return generate(node.attrs["region"], node.name, bind, track=track, max_iterations=max_iterations)

    with_value = [fetch for fetch in extracted.fetches if fetch is not None]
    partition = build_partition(
        lowered,
        assign_frames(lowered),
        device=device.name,
        feeds=extracted.feeds,
        fetches=with_value,
        bind=bind,
        bind_region=bind_region,
    )
    positions = iter(range(len(with_value)))
    order = [None if fetch is None else next(positions) for fetch in extracted.fetches]
    return Plan(graph=lowered, partitions=[partition], fetches=order, straight=find_straight(partition))
