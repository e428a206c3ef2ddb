"""Pass: makes loops keep their variables once a segment of iterations, and gradients run each segment forward again.

A loop that saves values for its gradient holds the values of all iterations. Rewritten, the forward loop saves only its
variables at the start of each segment (`asyncflow.autodiff.stores.checkpoints`). The gradient becomes a loop over the
segments, from the last to the first. It runs the iterations of a segment forward again, which saves the values of that
segment, and then goes back through them. So a run holds the variables of all segments, and the values of one, for the
time of one more forward loop.

For example, 9 iterations save 1 MiB each, and the variables take 0.25 MiB: 9 MiB. In segments of 3 the forward loop
saves its variables before iterations 0, 3 and 6. The gradient runs 6, 7, 8 forward again from the third checkpoint and
goes back through 8, 7, 6, then does the same from 3 and from 0. It holds 3 x 0.25 + 3 x 1 = 3.75 MiB.

Some iterations, the first ones, may keep their values (`SegmentedLoop.rewrite`): a run then takes the time of running
the others again, and holds the values of those kept besides.

The forward loop keeps its name and its iterations their numbers; the gradient loop stands inside the one over segments.
Of the latter one iteration is live at a time, or else several segments would be held.

Two kinds of loops are left as they are: loops whose values are read by another loop's gradient too, and loops whose
gradient is differentiated. Of nested loops the outer one is rewritten, so that the values of the inner ones are held
for one segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncflow.autodiff.stores.checkpoints import CHECKPOINT, SAVE_FIRST, SEGMENT, SEGMENT_STORE, segment_of
from asyncflow.autodiff.stores.saved_values import NEW_STORE, READ_SAVED, SAVE
from asyncflow.autodiff.stores.stores import STORE
from asyncflow.compiler.memory.memory_choices import segment_length
from asyncflow.compiler.memory.recomputation.repeats import (
    BodyPart,
    Owners,
    Refusal,
    Repeat,
    part_for,
    used_up,
    why_never_twice,
)
from asyncflow.compiler.memory.saved import find_saved
from asyncflow.compiler.program.detached import detached_node
from asyncflow.compiler.program.loops.counters import counters, trip_count
from asyncflow.compiler.program.purity import nbytes
from asyncflow.compiler.program.reads_before import read_before
from asyncflow.compiler.program.replacements import Replacements
from asyncflow.control.while_loop import add_loop
from asyncflow.errors import GraphError
from asyncflow.graph.builtin import CONSTANT, PARAMETER, is_constant
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import Op
from asyncflow.graph.structured import StructuredNode, WhileNode, levels
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import ADD, SUBTRACT
from asyncflow.ops.arithmetic.logic import GREATER, LESS
from asyncflow.ops.arrays.datatypes import ASTYPE

_NUMBER = Spec(int64, ())


def segments(graph: Graph) -> list[str]:
    """Rewrite all loops of `graph` that may be rewritten, in place.

    Returns:
        A line for people for each loop that saves values: the decision, or why nothing is done.

    Raises:
        GraphError: a loop would have to run a node twice that must not be.
    """
    return [f"{loop.forward.name}: {_rewritten(loop)}" for loop in loops_to_segment(graph)]


def _rewritten(loop: SegmentedLoop) -> str:
    """Rewrite a loop if that is allowed and saves memory; return a sentence on it."""
    if loop.refusal is not None:
        raise _refused(loop)
    if loop.why_not is not None:
        return f"keeps the values that it saves: {loop.why_not}"
    count, length = loop.trip_count, loop.usual_length()
    if count is not None and not loop.gains(count, length):
        return f"keeps the values that it saves: {count} iterations hold no more than segments of them would"
    loop.rewrite(length)
    lengths = "segments of 1, 2, 3, ... iterations" if length is None else f"segments of {length} iterations"
    return f"runs again for its gradient, in {lengths}"


def _refused(loop: SegmentedLoop) -> GraphError:
    assert loop.refusal is not None
    node, why = loop.refusal
    return GraphError(
        f"saved_values='recompute': the gradient of {loop.forward.name} would run {node.name} ({node.op.name}) again, "
        f"and {why}; leave saved_values as it is, or compute this outside the loop and pass it in"
        f"\n  built at {node.location}\n  in the loop built at {loop.forward.location}"
    )


def loops_to_segment(graph: Graph) -> Iterator[SegmentedLoop]:
    """Yield the loops of `graph` that save values for its gradients, inner loops before outer ones.

    Each is looked at when its turn comes, so that loops before it may have been rewritten.
    """
    saved: dict[str, int | None] = {}
    for each in find_saved(graph):
        before = saved.get(each.loop, 0)
        saved[each.loop] = None if before is None or each.nbytes is None else before + each.nbytes
    inner_first = reversed(list(levels(graph)))
    loops = [node for level in inner_first for node in level.nodes if isinstance(node, WhileNode)]
    search = None
    for loop in loops:
        if loop.name not in saved:
            continue
        if search is None or search.level is not loop.graph:
            search = _Search(loop.graph)
        found = search.run(loop, saved[loop.name])
        yield found
        if found.is_rewritten:  # the caller has rewritten the loop: the known users of tensors are out of date
            search = None


def loop_to_segment(loop: WhileNode) -> SegmentedLoop:
    """Return one loop that saves values, as it is now; the number of bytes is left open."""
    return _Search(loop.graph).run(loop, None)


# -- loops that may be rewritten -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Reader:
    """A gradient loop that reads what a loop has saved.

    Attributes:
        loop: the gradient loop.
        count: the place of its variable that counts the iterations that are left.
        reads: where it reads a value, and the place of the store among the variables of the forward loop.
    """

    loop: WhileNode
    count: int
    reads: dict[Node, int] = field(default_factory=dict)


@dataclass(slots=True)
class SegmentedLoop:
    """A loop that saves values, with the means to run it again in segments.

    Attributes:
        forward: the loop.
        saves: the nodes that save, by the place of their store among the loop variables.
        readers: the gradient loops that read them.
        number: the number of the iteration, in the body.
        part: the part of the body that makes the saved values.
        owners: the branch or loop that has each body of the graph.
        value_bytes: bytes of the values of one iteration; None if only a run knows.
        trip_count: number of iterations; None if only a run knows.
        refusal: a node that must not run twice.
        why_not: another reason not to rewrite it.
        is_rewritten: True once it has been rewritten.
    """

    forward: WhileNode
    saves: dict[int, Node]
    owners: Owners
    value_bytes: int | None
    readers: list[_Reader] = field(default_factory=list)
    number: Tensor | None = None
    part: BodyPart | None = None
    trip_count: int | None = None
    refusal: Refusal | None = None
    why_not: str | None = None
    is_rewritten: bool = False

    @property
    def kept_variables(self) -> list[int]:
        """Places of the loop variables that are saved for each segment; counters follow from the iteration's number."""
        assert self.part is not None
        computed = {place for place, _ in counters(self.forward)}
        return sorted(self.part.variables - computed)

    @property
    def variable_bytes(self) -> int | None:
        """Bytes saved for a segment; None if only a run knows."""
        sizes = [nbytes(self.forward.body.inputs[place].spec) for place in self.kept_variables]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def may_run_again(self) -> bool:
        """True if `rewrite` is allowed."""
        return self.refusal is None and self.why_not is None

    def usual_length(self) -> int | None:
        """The length of segments with which least is held at a time; None where only a run knows how many there are."""
        if self.trip_count is None:
            return None
        return segment_length(self.trip_count, self.variable_bytes or 0, self.value_bytes or 0)

    def bytes_held(self, count: int, length: int | None) -> int | None:
        """Most bytes held at a time over `count` iterations; None if only a run knows the size of a value.

        They are the loop's variables at the start of every segment, and the values of one segment. Values that lie in
        one buffer, as a loop variable and the value that it is made of, are counted twice.

        Args:
            count: of iterations.
            length: of each segment; None if they have 1, 2, 3, ... iterations.
        """
        if self.value_bytes is None or self.variable_bytes is None:
            return None
        if not count:
            return 0
        n_segments = segment_of(count - 1, length)[0] + 1
        longest = min(count, n_segments if length is None else length)
        return n_segments * self.variable_bytes + longest * self.value_bytes

    def gains(self, count: int, length: int | None) -> bool:
        """Return True if less memory is held than by the values of all iterations."""
        held = self.bytes_held(count, length)
        return held is None or self.value_bytes is None or held < count * self.value_bytes

    def rewrite(self, length: int | None, kept: int = 0) -> None:
        """Save variables once a segment, and make each gradient run the segments again.

        Args:
            length: of each segment; None if they have 1, 2, 3, ... iterations.
            kept: number of first iterations that save their values and do not run again; 0 if several gradients read
                them, since a store drops values as they are read.
        """
        assert self.may_run_again
        assert not kept or len(self.readers) == 1
        walk = self.forward.graph.root.walk
        asked, before = {node.device for node in self.forward.body.walk() if node.device is not None}, set(walk())
        _Rewriting(self, length, kept).run()
        if len(asked) == 1:  # placement may put new nodes on another device, unless they ask for this one
            device = asked.pop()
            for node in walk():
                if node not in before and node.device is None and node.op.kernel is not None:
                    node.device = device
        self.is_rewritten = True


class _Search:
    """Finds out whether loops of one graph or body can be rewritten; all in them is as `while_gradient` builds it."""

    def __init__(self, level: Graph) -> None:
        self.level = level
        self.users: dict[Tensor, list[Node]] = {}
        for node in level.nodes:
            for tensor in node.inputs:
                self.users.setdefault(tensor, []).append(node)
        self.owners: Owners = {body: node for node in level.root.walk() for body in node.subgraphs}  # type: ignore[misc]
        self.results = set(level.results) if isinstance(level, Subgraph) else set()

    def run(self, loop: WhileNode, value_bytes: int | None) -> SegmentedLoop:
        saves = {place: result.node for place, result in enumerate(loop.body.results) if result.node.op is SAVE}
        found = SegmentedLoop(loop, saves, self.owners, value_bytes, trip_count=trip_count(loop))
        found.why_not = self.why_not(found)
        if found.why_not is None:
            assert found.number is not None
            values = [save.inputs[2] for save in saves.values()]
            found.part = part_for(loop, [*values, found.number])
            found.refusal = why_never_twice(loop, found.part)
            array = used_up(loop, found.part, self.owners)
            if array is not None:
                found.why_not = f"{array.name} changes or uses up an array or store, which has no second copy"
        return found

    def why_not(self, found: SegmentedLoop) -> str | None:
        """The reason for which the loop and its gradients are not of the shape that can be rewritten."""
        loop, body = found.forward, found.forward.body
        numbers = {save.inputs[1] for save in found.saves.values()}
        if len(numbers) != 1:
            return "its values are not saved in step"
        (found.number,) = numbers
        stores = {loop.outputs[place]: place for place in found.saves}
        own = {body.inputs[place]: save for place, save in found.saves.items()}
        if any(tensor in own and own[tensor] is not node for node in body.nodes for tensor in node.inputs):
            return "it reads its own saved values"
        readers: dict[Node, None] = {}
        for store in stores:
            if store in self.results:
                return "its saved values leave the loop or branch around it"
            readers.update(dict.fromkeys(self.users.get(store, ())))
        for node in readers:
            if not isinstance(node, WhileNode):
                return "a loop around it saves its values, or a branch reads them"
            reader = self.reader(node, stores)
            if isinstance(reader, str):
                return reader
            found.readers.append(reader)
        return None if found.readers else "nothing reads its saved values"

    def reader(self, loop: WhileNode, stores: dict[Tensor, int]) -> _Reader | str:
        """The gradient loop that reads `stores`, or the reason why it is none."""
        count = next((place for place, step in counters(loop) if step == -1 and _ends_at_zero(loop, place)), None)
        if count is None or not stores.keys().isdisjoint(loop.inputs[: loop.n_vars]):
            return f"{loop.name}, which reads its saved values, does not count down"
        if any(result.node.op is SAVE for result in loop.body.results):
            return f"its gradient {loop.name} is differentiated in turn"
        if any(node.op.conduct.needs_context for node in loop.body.walk()):
            return f"its gradient {loop.name} draws random numbers"
        index = loop.body.results[count]
        reader = _Reader(loop, count)
        inner = {seen: stores[outer] for seen, outer in loop.captured(loop.body).items() if outer in stores}
        for node in loop.body.nodes:
            for tensor in node.inputs:
                if tensor in inner:
                    if node.op is not READ_SAVED or node.inputs[1] is not index:
                        return f"a branch or loop in {loop.name} reads its saved values"
                    reader.reads[node] = inner[tensor]
        return reader


def _ends_at_zero(loop: WhileNode, place: int) -> bool:
    """Return True if the loop goes on while the variable is above 0."""
    node = loop.decision.node
    if node.op is not GREATER or node.inputs[0] is not loop.predicate.inputs[place]:
        return False
    bound = node.inputs[1]
    return is_constant(bound) and bound.shape == () and not bound.node.attrs["value"]


# -- the rewriting ---------------------------------------------------------------------------------------------------


class _Rewriting:
    """A rewriting of one loop and its gradients.

    Attributes:
        front: nodes to stand in front of the loop.
        kept: number of iterations that keep their values.
        checkpoints: the stores of its variables, behind the loop, by the places of the variables.
        saves: the nodes that save values which change with the iteration, by the places of their stores.
        stores: where the values of iterations that are kept are, behind the loop.
        outside: what the loop's captures stand for.
    """

    def __init__(self, found: SegmentedLoop, length: int | None, kept: int) -> None:
        assert found.part is not None
        assert found.number is not None
        self.found = found
        self.part = found.part
        self.number = found.number
        self.forward = found.forward
        self.graph = found.forward.graph
        self.kept = kept
        self.attrs = {"length": length, "kept": kept}
        self.front = read_before(self.forward, [self.forward.body], self.part.nodes)
        self.part.nodes.intersection_update(self.forward.body.nodes)
        self.checkpoints: dict[int, Tensor] = {}
        self.outside = self.forward.captured(self.forward.body)
        self.saves = {place: save for place, save in found.saves.items() if save.inputs[2] not in self.outside}
        self.stores = {place: self.forward.outputs[place] for place in self.saves} if kept else {}

    def run(self) -> None:
        """Rewrite the loop and its gradients."""
        for place in self.found.kept_variables:
            self.keep(place)
        # Gradients first: they copy the body and look for its stores, which `save_less` takes away.
        loops: dict[Node, WhileNode] = {reader.loop: self.in_segments(reader) for reader in self.found.readers}
        self.save_less()
        replaced = Replacements()
        ordered: list[Node] = []
        for node in self.graph.nodes:
            if node is self.forward:
                ordered += self.front
            around = loops.get(node)
            if around is not None:
                replaced.nodes[node] = around
                replaced.tensors.update(zip(node.outputs, around.outputs, strict=True))
            ordered.append(around or node)
            # In order: a gradient may read outputs of an earlier gradient, which is replaced by then.
            replaced.apply(ordered[-1])
        self.graph.nodes[:] = ordered
        replaced.apply_to_results(self.graph)

    # -- the forward loop --------------------------------------------------------------------------------------------

    def keep(self, place: int) -> None:
        """Make the forward loop keep a variable of it for each segment, where the values of the variable are made."""
        forward, body = self.forward, self.forward.body
        maker = body.results[place].node
        like = next(iter(self.found.saves.values()))
        new = detached_node(self.graph, NEW_STORE, (), _new_store(forward, like).attrs, forward, STORE)
        # Loops, parameters and constants have no device of their own: the store then chooses its own.
        is_plain = not isinstance(maker, StructuredNode) and maker.op not in (PARAMETER, CONSTANT)
        home = maker if is_plain else new
        home.colocated_with = home.colocated_with or home.name
        inner, store = forward.add_variable(new.outputs[0])
        inputs = [inner, self.number, body.inputs[place]]
        kept = detached_node(body, CHECKPOINT, inputs, self.attrs, home, STORE)
        new.device, new.colocated_with = kept.device, kept.colocated_with
        self.front.append(new)
        body.nodes.append(kept)
        body.results.append(kept.outputs[0])
        self.checkpoints[place] = store

    def save_less(self) -> None:
        """Remove the stores of values from the forward loop, except for kept iterations."""
        forward, saves = self.forward, self.found.saves
        for place in self.stores:
            saves[place].op, saves[place].attrs = SAVE_FIRST, {"kept": self.kept}
        gone = {place: save for place, save in saves.items() if place not in self.stores}
        stores = {_new_store(forward, save) for save in gone.values()}
        forward.body.nodes[:] = [node for node in forward.body.nodes if node not in set(gone.values())]
        forward.drop_inputs(gone)
        forward.keep_variables([place for place in range(forward.n_vars) if place not in gone])
        used = {tensor.node for node in self.graph.nodes for tensor in node.inputs}
        self.graph.nodes[:] = [node for node in self.graph.nodes if node not in stores or node in used]

    # -- a gradient --------------------------------------------------------------------------------------------------

    def in_segments(self, reader: _Reader) -> WhileNode:
        """Return the loop over segments that replaces a gradient loop, which moves into it; it has no users yet."""
        loop, graph = reader.loop, self.graph
        label = graph.reserve(f"{loop.name}/segments")
        outer, condition = Subgraph(graph, f"{label}/body"), Subgraph(graph, f"{label}/cond")
        specs = [output.spec for output in loop.outputs]
        left = [condition.add_input(spec, "var") for spec in specs][reader.count]
        zero = _add(condition, CONSTANT, [], {"value": np.zeros((), left.dtype)}, loop, left.spec)
        condition.results.append(_add(condition, GREATER, [left, zero], {}, loop))
        variables = [outer.add_input(spec, "var") for spec in specs]
        found = outer.add_node(SEGMENT, [variables[reader.count]], self.attrs, (_NUMBER,) * 3, location=loop.location)
        values = self.run_again(outer, label, variables[reader.count], *found.outputs)
        starts = loop.inputs[: loop.n_vars]
        self.move(reader, outer, variables, values, found.outputs[1])
        # One iteration at a time: two would hold the values of two segments.
        made = _add_loop(condition, outer, starts, label, 1, loop)
        graph.nodes.pop()  # `run` moves it to the place of the gradient loop
        made.device, made.colocated_with = loop.device, loop.colocated_with
        # The outer loop waits instead: a node of a body may only wait for nodes of the same body.
        made.control_inputs, loop.control_inputs = loop.control_inputs, []
        return made

    def run_again(
        self, outer: Subgraph, label: str, end: Tensor, segment: Tensor, first: Tensor, begin: Tensor
    ) -> dict[int, Tensor]:
        """Return the stores of the values of a segment, by the places of the forward loop's stores.

        Args:
            outer: the body of the loop over segments.
            label: of that loop.
            end: the number of the iteration behind the segment.
            segment: its number.
            first: the number of its first iteration.
            begin: that of the first one to run again.
        """
        forward, steps = self.forward, dict(counters(self.forward))
        label = self.graph.reserve(f"{label}/{forward.name.rpartition('/')[2]}")
        condition, body = Subgraph(outer, f"{label}/cond"), Subgraph(outer, f"{label}/body")
        saves = self.saves
        places = sorted(self.part.variables)
        starts = [self.start(outer, place, steps.get(place), segment, begin) for place in places]
        # Variables first, then stores: the results of the body below come in the same order.
        starts += [self.store(outer, place, save, first) for place, save in saves.items()]
        specs = [tensor.spec for tensor in starts]
        # The predicate only compares the number: the forward loop has decided where the segment ends.
        counted = self.copied(condition, specs, places, BodyPart())
        end = condition.import_tensor(end)
        condition.results.append(_add(condition, LESS, [counted.value(self.number), end], {}, forward))
        again = self.copied(body, specs, places, self.part)
        # Stores of a segment start at index 0, but iterations keep their numbers.
        index = _add(body, SUBTRACT, [again.value(self.number), body.import_tensor(first)], {}, forward)
        body.results += [again.value(forward.body.results[place]) for place in places]
        for store, save in zip(body.inputs[len(places) :], saves.values(), strict=False):
            inputs = [store, index, again.value(save.inputs[2])]
            body.results.append(_add(body, SAVE, inputs, save.attrs, save, STORE, near=save))
        made = _add_loop(condition, body, starts, label, forward.parallel_iterations, forward)
        return dict(zip(saves, made.outputs[len(places) :], strict=True))

    def store(self, outer: Subgraph, place: int, save: Node, first: Tensor) -> Tensor:
        """The store for the values of a segment that one of the forward loop's was for."""
        like = _new_store(self.forward, save)
        new = _add(outer, NEW_STORE, [], like.attrs, like, STORE, near=like)
        if not self.kept:
            return new
        inputs = [outer.import_tensor(self.stores[place]), new, first]
        return _add(outer, SEGMENT_STORE, inputs, {"kept": self.kept}, like, STORE, near=like)

    def start(self, outer: Subgraph, place: int, step: int | None, segment: Tensor, begin: Tensor) -> Tensor:
        """A variable of the forward loop at the start of a segment."""
        forward = self.forward
        variable = forward.body.inputs[place]
        if step is None:
            store = self.checkpoints[place]
            kept = forward.body.results[store.index].node
            inputs = [outer.import_tensor(store), segment]
            return _add(outer, READ_SAVED, inputs, {"value": variable.spec}, forward, variable.spec, near=kept)
        if variable.dtype != begin.dtype:
            begin = _add(outer, ASTYPE, [begin], {"dtype": variable.dtype}, forward)
        op = ADD if step > 0 else SUBTRACT
        return _add(outer, op, [outer.import_tensor(forward.inputs[place]), begin], {}, forward)

    def copied(self, body: Subgraph, specs: Sequence[Spec], places: Sequence[int], part: BodyPart) -> Repeat:
        """A part of the forward body in `body`, which gets loop variables of these specs."""
        variables = [body.add_input(spec, "var") for spec in specs]
        known = {self.forward.body.inputs[place]: x for place, x in zip(places, variables, strict=False)}
        repeat = Repeat(body, known, self.outside, self.found.owners)
        # The iteration's number comes first: nodes that draw random numbers need it.
        first = part_for(self.forward, [self.number], before=False).nodes
        repeat.copy(node for node in self.forward.body.nodes if node in first)
        repeat.number = repeat.value(self.number)
        repeat.copy(node for node in self.forward.body.nodes if node in part.nodes and node not in first)
        return repeat

    def move(
        self, reader: _Reader, outer: Subgraph, variables: Sequence[Tensor], values: Mapping[int, Tensor], first: Tensor
    ) -> None:
        """Moves a gradient loop into the loop over segments, where it goes back through one segment.

        Args:
            reader: the gradient loop, and where it reads saved values.
            outer: the body of the loop over segments.
            variables: its loop variables.
            values: the stores of the values of a segment.
            first: the number of its first iteration.
        """
        loop, forward, saves = reader.loop, self.forward, self.found.saves
        places = {forward.outputs[place]: place for place in saves}
        captures = [
            (outer.import_tensor(x) if x not in places else values.get(places[x], first)) for x in loop.captures
        ]
        # Captures of removed stores get the iteration's number as a stand-in until they are dropped below.
        gone = [at for at, x in enumerate(loop.captures, loop.n_vars) if x in places and places[x] not in values]
        loop.graph, loop.inputs = outer, [*variables, *captures]
        for body in loop.subgraphs:
            body.parent = outer
        loop.drop_inputs(gone)
        start = loop.add_capture(first, loop.body)
        loop.decision.node.inputs = [loop.predicate.inputs[reader.count], loop.predicate.inputs[-1]]
        count = loop.body.results[reader.count]
        index = detached_node(loop.body, SUBTRACT, [count, start], {}, count.node, _NUMBER)
        loop.body.nodes.insert(loop.body.nodes.index(count.node) + 1, index)
        # Saved values that are the same in all iterations are captured instead.
        same = Replacements()
        for read, place in reader.reads.items():
            read.inputs[1] = index.outputs[0]
            if place not in values:
                value = outer.import_tensor(self.outside[saves[place].inputs[2]])
                same.tensors[read.outputs[0]] = loop.add_capture(value, loop.body)
                loop.body.nodes.remove(read)
        for node in loop.body.nodes:
            same.apply(node)
        same.apply_to_results(loop.body)
        outer.adopt(loop)
        outer.results = list(loop.outputs)


def _new_store(loop: WhileNode, save: Node) -> Node:
    """The node that makes the store into which `save` saves."""
    return next(
        start.node for start, result in zip(loop.inputs, loop.body.results, strict=False) if result.node is save
    )


def _add(
    graph: Graph,
    op: Op,
    inputs: Sequence[Tensor],
    attrs: Attrs,
    like: Node,
    spec: Spec | None = None,
    *,
    near: Node | None = None,
) -> Tensor:
    """The output of a new node, located as `like` and placed with `near`; or where `like`, a loop, decides."""
    found = spec or op.infer(*(x.spec for x in inputs), **attrs)
    node = graph.add_node(op, inputs, attrs, found, location=like.location)
    if near is not None:
        node.device, node.colocated_with = near.device, near.colocated_with
    elif isinstance(like, WhileNode):
        node.device = like.decision.node.device
    return node.outputs[0]


def _add_loop(
    condition: Subgraph, body: Subgraph, starts: Sequence[Tensor], label: str, window: int, like: WhileNode
) -> WhileNode:
    """A new loop at the end of the graph around, located as `like`, whose bodies other passes may change."""
    specs = [tensor.spec for tensor in body.inputs[: len(starts)]]
    made = add_loop(condition, body, starts, specs, label, window, like.swap_memory)
    assert isinstance(made, WhileNode)
    made.location = like.location
    for part in made.subgraphs:
        part.closed, part.captures = False, {}
    return made
