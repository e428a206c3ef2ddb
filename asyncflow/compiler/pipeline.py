"""The list of passes, in order, that turn a graph into a plan.

Each pass has its rule at the top of its module. This module says when a pass runs, with which arguments, and where its
findings go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial, wraps

from asyncflow.compiler.batching.batch_loops import batch_loops, blocks_of_sums, bytes_for_batches, has_cards
from asyncflow.compiler.dump import start_dump, tell_plan
from asyncflow.compiler.lowering.bind import Binding
from asyncflow.compiler.lowering.delay_recvs import delay_recvs
from asyncflow.compiler.lowering.lower import lower
from asyncflow.compiler.lowering.single_call import find_single_call
from asyncflow.compiler.memory.free_early import free_early
from asyncflow.compiler.memory.last_reads import mark_last_reads
from asyncflow.compiler.memory.move_saved import move_saved
from asyncflow.compiler.memory.plan_memory import plan_memory
from asyncflow.compiler.memory.recomputation.segments import segments
from asyncflow.compiler.memory.saved import find_saved
from asyncflow.compiler.memory.saving.choose_saved import choose_saved
from asyncflow.compiler.optimize.cse import eliminate_common_subexpressions
from asyncflow.compiler.optimize.fold import fold
from asyncflow.compiler.optimize.hoist import hoist
from asyncflow.compiler.optimize.loop_variables import reduce_loop_variables
from asyncflow.compiler.optimize.prune import prune
from asyncflow.compiler.optimize.simplify import simplify
from asyncflow.compiler.passes import Context, Pass, Program, Run
from asyncflow.compiler.placement.assign_streams import assign_streams
from asyncflow.compiler.placement.constraints import resolve_requests
from asyncflow.compiler.placement.homes import send_home
from asyncflow.compiler.placement.place import place
from asyncflow.compiler.plan import FiringWay, Plan
from asyncflow.compiler.program.extract import FEED, extract
from asyncflow.compiler.program.host_values import find_host_values, keeping
from asyncflow.compiler.program.host_vectors import keep_vectors
from asyncflow.compiler.program.kernels.choose_kernels import choose_kernels
from asyncflow.compiler.program.loops.frames import has_primitives
from asyncflow.compiler.program.order_effects import order_effects
from asyncflow.compiler.program.request import PlanRequest
from asyncflow.compiler.program.survey import survey
from asyncflow.compiler.regions.device_loops import find_device_loops, make_device_loops
from asyncflow.compiler.regions.fuse import fuse_regions
from asyncflow.compiler.regions.join_regions import region_costs
from asyncflow.compiler.regions.loop_drivers import explain_loops
from asyncflow.compiler.regions.regions import make_regions
from asyncflow.foreign_names import close_names
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node
from asyncflow.graph.op import host_inputs, runs_on_host
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.verify import verify
from asyncflow.semantics.report import warn_of_races


def compile_plan(request: PlanRequest, context: Context) -> Plan:
    """Compile the plan of one kind of run.

    Args:
        request: the kind of run; its graph is not changed.
        context: the session's.

    Raises:
        FeedError: a needed placeholder is not fed.
        GraphError: the graph is not a valid program.
        PlacementError: no device fits the constraints of a node.

    Warns:
        RaceWarning: effects are unordered, and some have no order.
    """
    program, options = Program(request, request.graph), context.options
    # Check the user's graph, before passes order effects. Hand-written control flow has no bodies to check.
    if request.graph.effects == "unordered" and not has_primitives(request.graph.walk()):
        warn_of_races(request.graph, request.roots, request.feeds)
    dump = start_dump(program, options.dump)
    for each in PASSES:
        if each.name in options.without or not (each.when is None or each.when(program, context)):
            continue
        each.run(program, context)
        if options.debug and not each.is_analysis:
            verify(program.graph)
        if dump is not None:
            dump.tell(each.name)
    assert program.placement is not None
    assert program.survey is not None
    # A call that waits in a line needs no scheduler, either, but another driver: its result comes on the event loop.
    call = find_single_call(program.partitions, context.devices, may_wait=True)
    waits = call is not None and call.node.way in (FiringWay.LIGHT, FiringWay.IN_LINE)
    plan = Plan(
        request=request,
        graph=program.graph,
        partitions=program.partitions,
        fetches=program.order,
        placement=program.placement,
        single_call=None if waits else call,
        lone_firing=call if waits else None,
        loops=program.loops,
        saved=program.saved,
        memory=program.memory,
        memory_notes=program.memory_notes,
        remarks=program.remarks,
        kernels=program.kernels,
        survey=program.survey,
    )
    tell_plan(plan)
    return plan


# -- conditions of passes --------------------------------------------------------------------------------------------


def _optimizes(program: Program, context: Context) -> bool:
    return context.options.optimize and not program.is_hand_written


def _folds(program: Program, context: Context) -> bool:
    """Return True if constants may be computed here: the plan's kernels give the same bits on the host alone."""
    return context.is_on_host and _optimizes(program, context)


def _frees_early(program: Program, context: Context) -> bool:
    """With several devices or streams others wait for values: eight simulated cards took 7 % longer for an LSTM."""
    return _optimizes(program, context) and len(context.devices) == 1 and not context.has_streams


def _moves(program: Program, context: Context) -> bool:
    """Return True if nodes may move: a run that fails on NaN must not compute unused values."""
    options = context.options
    return options.optimize and not options.check_numerics and not program.is_hand_written


def _batches(program: Program, context: Context) -> bool:
    return context.options.loop_batching and _moves(program, context) and context.block_bytes is not None


def _plans_memory(program: Program, context: Context) -> bool:
    return context.options.saved_values != "recompute" and context.has_limits and not program.is_hand_written


def _recomputes(program: Program, context: Context) -> bool:
    return context.options.saved_values == "recompute" and not program.is_hand_written


def _has_cards(_: Program, context: Context) -> object:
    return context.enqueuing


def _keeps_vectors(program: Program, context: Context) -> object:
    return context.enqueuing and not program.is_hand_written


def _fuses(program: Program, context: Context) -> object:
    return program.request.regions and context.options.fusion and context.fusing


def _delays(program: Program, context: Context) -> object:
    return context.asynchronous and not program.is_hand_written


def _moves_saved(_: Program, context: Context) -> object:
    return context.options.saved_values != "keep" and context.swapping


# -- arguments and findings of passes --------------------------------------------------------------------------------


def _of_graph(change: Callable[[Graph], object]) -> Run:
    """Return the pass that changes a graph and needs no other argument."""

    @wraps(change)
    def run(program: Program, _: Context) -> None:
        change(program.graph)

    return run


@wraps(extract)
def _extract(program: Program, _: Context) -> None:
    request = program.request
    found = extract(
        request.graph, request.fetches, request.feeds, streamed=request.streamed, all_effects=request.all_effects
    )
    program.graph, program.fetches, program.kept = found.graph, found.fetches, found.kept
    program.is_hand_written = has_primitives(found.graph.walk())
    # A store cannot be copied to another device, so its feed is placed where the store is.
    for node in found.graph.nodes if request.stores_on is not None else ():
        if node.op is FEED and node.outputs[0].dtype == VARIANT:
            node.device = request.stores_on
    if remarks := request.graph.root.remarks:
        parts = (node.name.split("/") for node in found.graph.walk())
        names = {"/".join(each[:depth]) for each in parts for depth in range(1, len(each) + 1)}
        program.remarks = tuple(f"{label}: {remark}" for label, remark in remarks.items() if label in names)


@wraps(send_home)
def _send_home(program: Program, context: Context) -> None:
    send_home(program.graph, context.homes or {})


@wraps(resolve_requests)
def _resolve_requests(program: Program, context: Context) -> None:
    options = context.options
    spread = options.placement_seed is not None
    program.notes = resolve_requests(
        program.graph,
        program.request.graph,
        context.devices,
        context.kernels,
        soft=options.soft_placement,
        spread=spread,
    )


@wraps(plan_memory)
def _plan_memory(program: Program, context: Context) -> None:
    fuses = bool(program.request.regions and context.options.fusion)
    batches = _batches(program, context)
    blocks = blocks_of_sums(program.graph, context.devices, in_plan=True)
    way = context.options.saved_values
    program.memory, program.memory_notes = plan_memory(
        program.graph,
        context.devices,
        context.costs,
        fuses=fuses,
        pending=partial(bytes_for_batches, blocks=blocks, on_card=has_cards(context.devices)) if batches else None,
        asked=way if way == "keep" or way == "swap" else None,
    )


@wraps(segments)
def _segments(program: Program, _: Context) -> None:
    program.remarks = (*program.remarks, *segments(program.graph))


@wraps(batch_loops)
def _batch_loops(program: Program, context: Context) -> None:
    if not [node for node in program.graph.nodes if node.subgraphs]:
        return  # fast path for many small plans: no bodies, so no loops
    usual, least = blocks_of_sums(program.graph, context.devices, in_plan=bool(program.memory))
    is_usual = all(loop.has_usual_blocks for loop in program.memory)
    batch_loops(
        program.graph,
        context.block_bytes or 0,
        usual if is_usual else least,
        find_host_values(program.graph) if has_cards(context.devices) else None,
        find_device_loops(program.graph, limited=context.has_limits) if context.has_device_loops else (),
    )


@wraps(prune)
def _prune(program: Program, _: Context) -> None:
    prune(program.graph, program.kept)


@wraps(free_early)
def _free_early(program: Program, _: Context) -> None:
    found = free_early(program.graph)
    program.memory_notes = program.memory_notes or (() if program.memory else tuple(found))  # else a plan tells more


@wraps(place)
def _place(program: Program, context: Context) -> None:
    seed = context.options.placement_seed
    placed, notes = context.placed, program.notes
    program.placement = place(
        program.graph, context.devices, context.costs, context.kernels, seed=seed, placed=placed, notes=notes
    )


@wraps(choose_kernels)
def _choose_kernels(program: Program, context: Context) -> None:
    devices = {device.name: device for device in context.devices}
    program.kernels = choose_kernels(program.graph, devices, context.kernels, context.warned)


@wraps(survey)
def _survey(program: Program, context: Context) -> None:
    program.survey = survey(program.graph, context.asynchronous, context.resolve, context.homes)
    program.saved = find_saved(program.graph)


@wraps(keep_vectors)
def _keep_vectors(program: Program, context: Context) -> None:
    program.kept_on_host = keep_vectors(program.graph, context.enqueuing)


@wraps(make_device_loops)
def _make_device_loops(program: Program, context: Context) -> None:
    # Without regions the host launches no fused kernels, and fused kernels may round differently.
    fusion, kept = context.options.fusion and program.request.regions, program.kept_on_host
    program.loop_reasons = make_device_loops(
        program.graph, context.enqueuing, fusion=fusion, kept=kept, limited=context.has_limits
    )


@wraps(find_host_values)
def _find_host_values(program: Program, context: Context) -> None:
    program.on_host = find_host_values(program.graph, keeping(program.kept_on_host))
    program.loops = explain_loops(
        program.graph, context.enqueuing, program.on_host, program.loop_reasons if context.has_device_loops else None
    )


@wraps(move_saved)
def _move_saved(program: Program, context: Context) -> None:
    move_saved(program.graph, context.swapping, always=context.options.saved_values == "swap")


@wraps(assign_streams)
def _assign_streams(program: Program, context: Context) -> None:
    counts = {device.name: len(device.compute_streams) for device in context.devices}
    handovers = {device.name: device.handover_ns for device in context.devices}
    program.streams = assign_streams(program.graph, counts, handovers, context.costs)


@wraps(make_regions)
def _make_regions(program: Program, context: Context) -> None:
    program.streams = make_regions(
        program.graph,
        program.streams,
        context.asynchronous - context.enqueuing,
        context.enqueuing,
        program.on_host,
        region_costs(context.devices) if context.enqueuing else None,
        context.options.seed,
    )


@wraps(fuse_regions)
def _fuse_regions(program: Program, context: Context) -> None:
    fuse_regions(program.graph, context.fusing, program.on_host)


@wraps(lower)
def _lower(program: Program, context: Context) -> None:
    truncate = context.options.transfer_dtype is not None
    reads = partial(_read_on_host, program=program, context=context)
    program.graph, program.places = lower(
        program.graph, asynchronous=context.asynchronous, truncate=truncate, reads=reads
    )


def _read_on_host(node: Node, *, program: Program, context: Context) -> list[int]:
    """Positions of inputs that the kernel, or of primitives the scheduler, reads, and that may be the device's."""
    reading = context.asynchronous if node.op.kernel is None else context.enqueuing
    if node.device not in reading or runs_on_host(node):
        return []
    return [index for index in sorted(host_inputs(node)) if node.inputs[index] not in program.on_host]


@wraps(delay_recvs)
def _delay_recvs(program: Program, context: Context) -> None:
    delay_recvs(program.graph, program.places, context.devices, context.costs)


@wraps(Binding.partitions)
def _bind(program: Program, context: Context) -> None:
    assert program.survey is not None
    takes = program.survey.takes
    binding = Binding(context.options, context.resolve, program.streams, program.on_host, takes)
    fetches = (fetch for fetch in program.fetches if fetch is not None)
    program.partitions = binding.partitions(program.graph, fetches, context.devices)


# -- the list --------------------------------------------------------------------------------------------------------

PASSES = (
    Pass("extract", _extract, needed="the other passes change the copy that it makes"),
    # Homes of variables are requests like the user's, and are checked with them.
    Pass("homes", _send_home, lambda _, context: context.homes, "a variable stays where it is", is_analysis=True),
    Pass("constraints", _resolve_requests, needed="it checks what nodes ask of devices", is_analysis=True),
    Pass("loop_variables", _of_graph(reduce_loop_variables), _optimizes),
    Pass("fold", _of_graph(fold), _folds),
    Pass("simplify", _of_graph(simplify), _optimizes),
    Pass("cse", _of_graph(eliminate_common_subexpressions), _optimizes),
    Pass("hoist", _of_graph(hoist), _moves),
    # After these passes: constants, equal nodes and hoisted nodes need no saving.
    Pass("choose_saved", _of_graph(choose_saved), _optimizes),
    Pass("plan_memory", _plan_memory, _plans_memory),
    Pass("segments", _segments, _recomputes),
    # After the memory plan, which leaves room for its blocks of sums.
    Pass("batch_loops", _batch_loops, _batches),
    # Drop stores and captures left without users, so that the last reads can be found.
    Pass("prune", _prune, _optimizes),
    Pass("last_reads", _of_graph(mark_last_reads), _optimizes),
    # After `prune`: its edges order nodes of the plan, and add no nodes.
    Pass("order_effects", _of_graph(order_effects), needed="nodes that touch one variable would run in any order"),
    Pass("free_early", _free_early, _frees_early),
    Pass("place", _place, needed="every node runs on a device", is_analysis=True),
    # After all passes that know the library's ops, before passes that ask which kernels a device launches.
    Pass("choose_kernels", _choose_kernels, needed="it calls the kernels of users for devices", is_analysis=True),
    Pass("survey", _survey, needed="runs ask it which variables they touch", is_analysis=True),
    # Each node has its device now, which decides whether stores move, loops run there, and regions form.
    Pass("host_vectors", _keep_vectors, _keeps_vectors),
    Pass("move_saved", _move_saved, _moves_saved, is_analysis=True),
    Pass("device_loops", _make_device_loops, lambda _, context: context.has_device_loops),
    Pass("host_values", _find_host_values, _has_cards, "later passes ask what the host can look at", is_analysis=True),
    Pass("assign_streams", _assign_streams, lambda _, context: context.has_streams, is_analysis=True),
    Pass("regions", _make_regions, lambda program, _: program.request.regions),
    Pass("fuse", _fuse_regions, _fuses),
    Pass("lower", _lower, needed="the scheduler runs primitives only"),
    Pass("delay_recvs", _delay_recvs, _delays),
    Pass("bind", _bind, needed="it gives nodes their code", is_analysis=True),
)
"""All passes, in the order in which they run."""


def pass_named(name: object) -> Pass:
    """The pass of that name.

    Raises:
        ValueError: there is none.
    """
    found = next((each for each in PASSES if each.name == name), None)
    if found is None:
        names = [each.name for each in PASSES]
        close = close_names(name, names) if isinstance(name, str) else ()
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise ValueError(f"no pass is called {name!r}; {hint}There are {', '.join(names)}")
    return found


def check_without(names: object) -> None:
    """Looks at what a user has named to be left out.

    Raises:
        TypeError: it is no list of names.
        ValueError: one is no pass, or is a pass without which plans would not be right.
    """
    if isinstance(names, str) or not isinstance(names, Collection):
        raise TypeError(f"without is a list of names of passes, such as ['fold']; got {type(names).__name__} {names!r}")
    for name in names:
        needed = pass_named(name).needed
        if needed:
            others = ", ".join(each.name for each in PASSES if not each.needed)
            raise ValueError(f"the pass {name!r} cannot be left out: {needed}. Passes that can be left out: {others}")


def check_dump(asked: object) -> None:
    """Looks at what a user has asked to be told of passes.

    Raises:
        TypeError: it is neither True or False, nor a name, nor a function.
        ValueError: no pass has the name.
    """
    if isinstance(asked, str):
        pass_named(asked)
    elif not (isinstance(asked, bool) or callable(asked)):
        raise TypeError(
            "dump is True, the name of a pass, or a function of the name of each and its change; "
            f"got {type(asked).__name__} {asked!r}"
        )
