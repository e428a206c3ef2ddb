"""The pure state machine behind every run: tokens go in, firings that are now ready come out. No asyncio in here.

Rules (EuroSys '18, fig. 5):

1. A *token* is a value, or `Dead`, arriving at a node under a *tag*: the path of (frame, iteration) pairs that names
   one execution context. Here a tag is an `Iteration` object; tokens of one tag meet in its ``values``.
2. A node fires when all its inputs of one tag have arrived. Control inputs count as inputs.
3. A dead input makes a node dead: its kernel is skipped, all its outputs and control edges are dead.
4. Switch passes its value to one side and makes the other dead.
5. Merge fires with its first live input, or dead when all are dead, once all its control inputs have arrived; their
   deadness is ignored. A second live input is an error. ControlTrigger ignores deadness too.
6. Enter creates the frame on first arrival and delivers to iteration 0. A constant Enter delivers to every iteration,
   started or not. A dead Enter delivers a dead token.
7. Exit: a live token leaves its frame at once, and a second one is an error. A dead token is dropped: when the frame
   ends, each Exit without a live token delivers a dead one.
8. NextIteration: a live token starts the next iteration. It is parked while `parallel_iterations` are live, or memory
   is short for one more. A dead token stops here. Control edges of Enter, Exit and NextIteration lead to where their
   values go.
9. An iteration ends under four conditions. Nothing in it is ready or running, its child frames have ended, its
   predecessor has ended, and, for iteration 0, all Enters have arrived. Parked tokens then start the next one, if there
   is memory for it beside the live ones, or no iteration is live. A frame ends with its last iteration, unless tokens
   are parked. The run is done when the root iteration ends.

======================= ======================== =====================================================================
event                   state                    action
======================= ======================== =====================================================================
token arrives           inputs missing           remembered in the iteration
token arrives           last input               node becomes ready; ``outstanding`` + 1
node popped             dead                     dead tokens to its targets; ``outstanding`` - 1
node popped             primitive                routed at once (rules 4-8); ``outstanding`` - 1
node popped             kernel                   handed out as a firing; ``outstanding`` unchanged
`complete`              firing                   tokens to its targets; ``outstanding`` - 1
``outstanding`` is 0    rule 9 holds             iteration ends; the next may end or start; the frame may end
======================= ======================== =====================================================================

Memory: an iteration holds its values until the firings that use them take them, and is dropped when it ends. So
`parallel_iterations` bounds a loop's footprint, not its length.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from asyncflow.compiler.plan import Dead, Kind, Partition, PlanNode
from asyncflow.errors import TooManyIterations
from asyncflow.runtime.scheduler.frame import Frame, Iteration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from asyncflow.devices.saved.working_set import WorkingSet
    from asyncflow.values import Value

    Firing = tuple[PlanNode, Iteration, Sequence[Value]]

_KERNEL: Final = Kind.KERNEL
_SWITCH: Final = Kind.SWITCH
_MERGE: Final = Kind.MERGE
_ENTER: Final = Kind.ENTER
_EXIT: Final = Kind.EXIT
_NEXT_ITERATION: Final = Kind.NEXT_ITERATION
_FETCH: Final = Kind.FETCH
_TRIGGER: Final = Kind.TRIGGER
_FIRED: Final = object()
_ROUTES: Final = range(64)
"""Number of nodes that `Scheduler.next_firing` routes before its caller may look at the clock."""


class SchedulingError(Exception):
    """A rule was broken while running: two live inputs at a Merge, or too many iterations."""

    def __init__(self, reason: str | TooManyIterations, node: PlanNode, iteration: Iteration) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.node = node
        self.iteration = iteration


class Statistics(NamedTuple):
    """Contents of a scheduler at one moment; all zero after a run."""

    ready: int
    running: int
    frames: int
    iterations: int
    parked: int


class ShuffledQueue(deque["tuple[PlanNode, Iteration]"]):
    """A ready queue that gives any of its firings, picked at random; without a seed, the oldest.

    Firings with effects are held back by odds that the seed draws, from not at all to 63 of 64 picks. Otherwise an
    update would fire long before the next iteration has come as far as its own, and no seed would exchange the two.
    """

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self._random = None if seed is None else Random(seed)
        self._held_back = 0.0 if self._random is None else 1 - 2.0 ** -self._random.randrange(7)

    def popleft(self) -> tuple[PlanNode, Iteration]:
        """Take one firing."""
        if self._random is not None:
            index = self._random.randrange(len(self))
            if self[index][0].source.op.effects is not None and self._random.random() < self._held_back:
                others = [at for at, (node, _) in enumerate(self) if node.source.op.effects is None]
                index = self._random.choice(others) if others else index
            self[index], self[-1] = self[-1], self[index]
            return self.pop()
        return super().popleft()


class Scheduler:
    """The state of one run of one partition: `start`, then `next_firing` and `complete` until `done`.

    Args:
        partition: the partition to run.
        seed: None fires in the order in which nodes became ready; a number picks among the ready ones at random, to
            show that results do not depend on the order.
        max_iterations: most iterations of one frame; None for no limit.
    """

    def __init__(self, partition: Partition, *, seed: int | None = None, max_iterations: int | None = None) -> None:
        self.partition = partition
        self.ready: deque[tuple[PlanNode, Iteration]] = deque() if seed is None else ShuffledQueue(seed)
        self.done = False
        self.results: list[Value] = [None] * partition.n_fetches
        self.ended: list[tuple[int, tuple[int, ...]]] = []
        """Iterations that have ended and of which another partition wants to hear, as (transfer, counters)."""
        self.max_iterations = max_iterations
        self.asks: list[WorkingSet] = []
        """Working sets of loops with an iteration that has begun by itself, for which there may be no memory yet.
        `next_firing` returns None until a caller has emptied it."""
        self.routed = 0
        """Number of primitives routed since a caller reset it."""
        self._root = Frame(partition.root, None)

    def start(self, feeds: Iterable[Value] = ()) -> None:
        """Deliver the fed values, in the order of the partition's feeds, and ready the nodes without inputs."""
        root = self._start_iteration(self._root)
        # Holds the root iteration open until everything it starts with has been delivered.
        root.outstanding += 1
        for node in self.partition.root.initial:
            self._make_ready(node, root)
        for node, value in zip(self.partition.feeds, feeds, strict=True):
            self._deliver(node, 0, value, root)
            if node.controls:
                self._deliver_controls(node, root)
        root.outstanding -= 1
        if not root.outstanding:
            self._settle(root)

    def next_firing(self) -> Firing | None:
        """Return the next firing to execute; None if there is none yet.

        Routes the primitives it meets on the way. None with an empty ``ready`` means that all remaining nodes wait for
        firings handed out before. Otherwise a loop ``asks`` for memory, or many primitives were routed. The caller may
        then look at the clock and call again: a loop without kernels would hold it for ever.
        """
        ready = self.ready
        for routed in _ROUTES:
            if not ready or self.asks:
                self.routed += routed
                break
            node, iteration = ready.popleft()
            kind = node.kind
            if iteration.dead is not None and node.position in iteration.dead and kind != _MERGE:
                self._kill(node, iteration, iteration.dead[node.position])
                iteration.outstanding -= 1
                if not iteration.outstanding:
                    self._settle(iteration)
                continue
            values = iteration.values
            slot = node.slot
            if kind == _KERNEL:
                count = node.n_inputs
                if count == 2:
                    inputs: Sequence[Value] = (values[slot], values[slot + 1])
                    values[slot] = values[slot + 1] = None
                elif count == 1:
                    inputs = (values[slot],)
                    values[slot] = None
                elif count:
                    inputs = values[slot : slot + count]
                    values[slot : slot + count] = node.blanks
                else:
                    inputs = ()
                self.routed += routed
                return node, iteration, inputs
            if kind == _MERGE:
                self._fire_merge(node, iteration)
            elif kind == _SWITCH:
                side = 1 if values[slot + 1] else 0
                value = values[slot]
                values[slot] = None
                self._deliver(node, side, value, iteration)
                self._deliver_dead(node, 1 - side, node.dead, iteration)
                if node.controls:
                    self._deliver_controls(node, iteration)
            elif kind == _TRIGGER:
                self._deliver_controls(node, iteration)
            else:
                value = values[slot]
                values[slot] = None
                if kind == _NEXT_ITERATION:
                    self._advance(node, value, iteration)
                elif kind == _ENTER:
                    self._enter(node, value, None, iteration)
                elif kind == _EXIT:
                    self._exit(node, value, iteration)
                elif kind == _FETCH:
                    self.results[node.number] = value
                else:
                    self._deliver(node, 0, value, iteration)
                    if node.controls:
                        self._deliver_controls(node, iteration)
            iteration.outstanding -= 1
            if not iteration.outstanding:
                self._settle(iteration)
        else:
            self.routed += len(_ROUTES)
        return None

    def complete(self, node: PlanNode, iteration: Iteration, result: Any) -> None:
        """Take the result of a firing: the value, or the tuple of values if the node has several outputs."""
        if node.single:
            self._deliver(node, 0, result, iteration)
        else:
            for port, value in enumerate(result):
                self._deliver(node, port, value, iteration)
        if node.controls:
            self._deliver_controls(node, iteration)
        iteration.outstanding -= 1
        if not iteration.outstanding:
            self._settle(iteration)

    def abort(self) -> None:
        """Drop all state; firings handed out must not be completed any more."""
        self.ready.clear()
        self.ended.clear()
        self.asks.clear()
        # The traceback of a kept error refers to this object, which must not keep values alive.
        self.results = [None] * self.partition.n_fetches
        for iteration in list(self._live()):
            # Break every reference cycle, so that values are freed now and not by the garbage collector.
            iteration.frame.newest = iteration.next = iteration.previous = None
            iteration.children = {}
        self._root = Frame(self.partition.root, None)
        self.done = True

    def statistics(self) -> Statistics:
        """Return the contents held now."""
        live, ready = list(self._live()), len(self.ready)
        frames = {id(iteration.frame): iteration.frame for iteration in live}
        parked = sum(len(frame.parked) for frame in frames.values())
        running = sum(iteration.outstanding for iteration in live) - ready
        return Statistics(ready, running, len(frames), len(live), parked)

    def _live(self) -> Iterator[Iteration]:
        """The iterations that have started and not ended, outer ones first."""
        stack = [] if self._root.newest is None else [self._root.newest]
        while stack:
            iteration = stack.pop()
            yield iteration
            for child in iteration.children.values():
                newest = child.newest
                while newest is not None:
                    stack.append(newest)
                    newest = newest.previous

    def waiting(self) -> list[str]:
        """Return a line for each node of a stalled run that has some of its inputs, with the tag of the others."""
        lines = []
        for iteration in self._live():
            for node in iteration.frame.info.nodes:
                left, total = iteration.pending[node.position], iteration.frame.info.pending[node.position]
                if 0 < left < total:
                    where = f" in iteration {iteration.tag()}" if iteration.tag() else ""
                    lines.append(f"{node.name}{where} has {total - left} of {total} inputs")
        return lines

    # -- delivering tokens ---------------------------------------------------------------------------------------

    def _deliver(self, node: PlanNode, port: int, value: Value, iteration: Iteration) -> None:
        """A live token to all targets of an output, which are in `iteration`."""
        plain, merges = node.targets[port]
        if plain:
            values = iteration.values
            pending = iteration.pending
            for position, slot, target in plain:
                values[slot] = value
                left = pending[position] - 1
                pending[position] = left
                if not left:
                    iteration.outstanding += 1
                    self.ready.append((target, iteration))
        # A Merge has two slots: the first holds its live input, the second that input's number. Until one is live, the
        # second counts the dead ones instead (see `_deliver_dead`); from then on no rule needs that count.
        for position, slot, target, index in merges:
            # No kernel gives None, so None in a slot always means that nothing has arrived.
            if iteration.values[slot] is not None:
                raise SchedulingError("a merge got two live inputs under one tag", target, iteration)
            iteration.values[slot] = value
            iteration.values[slot + 1] = index
            self._count_down(position, target, iteration)

    def _deliver_controls(self, node: PlanNode, iteration: Iteration) -> None:
        # `_count_down`, inlined: a straight line of effects passes here once for each effect.
        pending = iteration.pending
        for position, target in node.controls:
            left = pending[position] - 1
            pending[position] = left
            if not left:
                iteration.outstanding += 1
                self.ready.append((target, iteration))

    def _deliver_dead(self, node: PlanNode, port: int, dead: Dead, iteration: Iteration) -> None:
        """A dead token to all targets of an output; Exit and NextIteration stop it (rules 7, 8)."""
        plain, merges = node.dead_targets[port]
        for position, target in plain:
            self._mark_dead(position, dead, iteration)
            self._count_down(position, target, iteration)
        for position, slot, target, _ in merges:
            if iteration.values[slot] is not None:
                continue  # a live input came first; its number stands in the slot that counts dead inputs
            seen = (iteration.values[slot + 1] or 0) + 1
            iteration.values[slot + 1] = seen
            if seen == target.n_inputs:
                self._mark_dead(position, dead, iteration)
                self._count_down(position, target, iteration)

    def _deliver_death(self, node: PlanNode, dead: Dead, iteration: Iteration) -> None:
        """Dead tokens along all outputs and control edges, whose targets are in `iteration`."""
        for port in range(len(node.dead_targets)):
            self._deliver_dead(node, port, dead, iteration)
        for position, target in node.controls:
            if target.kind not in (_MERGE, _TRIGGER):
                self._mark_dead(position, dead, iteration)
            self._count_down(position, target, iteration)

    def _mark_dead(self, position: int, dead: Dead, iteration: Iteration) -> None:
        if iteration.dead is None:
            iteration.dead = {}
        iteration.dead.setdefault(position, dead)

    def _count_down(self, position: int, target: PlanNode, iteration: Iteration) -> None:
        left = iteration.pending[position] - 1
        iteration.pending[position] = left
        if not left:
            self._make_ready(target, iteration)

    def _make_ready(self, node: PlanNode, iteration: Iteration) -> None:
        iteration.outstanding += 1
        self.ready.append((node, iteration))

    # -- the primitives ------------------------------------------------------------------------------------------

    def _kill(self, node: PlanNode, iteration: Iteration, dead: Dead) -> None:
        """Rule 3: all outputs and control edges of a dead node are dead."""
        kind = node.kind
        if kind == _FETCH:
            self.results[node.number] = dead
            return
        if kind == _ENTER:
            self._enter(node, None, dead, iteration)
        elif kind not in (_EXIT, _NEXT_ITERATION):
            self._deliver_death(node, dead, iteration)

    def _fire_merge(self, node: PlanNode, iteration: Iteration) -> None:
        values = iteration.values
        slot = node.slot
        value = values[slot]
        if value is None:
            assert iteration.dead is not None
            self._kill(node, iteration, iteration.dead[node.position])
            return
        values[slot] = _FIRED  # not None: a second live input that comes later is an error, too (rule 5)
        self._deliver(node, 0, value, iteration)
        if node.index_values:
            self._deliver(node, 1, node.index_values[values[slot + 1]], iteration)
        if node.controls:
            self._deliver_controls(node, iteration)

    def _enter(self, node: PlanNode, value: Value, dead: Dead | None, outer: Iteration) -> None:
        info = node.child
        assert info is not None
        frame = outer.children.get(info)
        if frame is None:
            frame = outer.children[info] = Frame(info, outer)
            self._start_iteration(frame)
        frame.pending_enters -= 1
        if dead is not None and frame.killer is None:
            frame.killer = dead
        if node.source.attrs["constant"]:
            self._enter_constant(node, value, dead, frame)
        else:
            assert frame.oldest is not None
            self._arrive(node, value, dead, frame.oldest)
        if frame.pending_enters == 0:
            # Only the last Enter may have held iteration 0 open.
            self._end_oldest(frame)

    def _enter_constant(self, node: PlanNode, value: Value, dead: Dead | None, frame: Frame) -> None:
        """Deliver to the live iterations, and to the tables of new ones."""
        iteration = frame.newest
        while iteration is not None:
            self._arrive(node, value, dead, iteration)
            iteration = iteration.previous
        if frame.pending is frame.info.pending:  # frames share the tables of their loop until a constant arrives
            frame.values = frame.values[:]
            frame.pending = frame.pending[:]
        plain, merges = node.targets[0]
        assert not merges
        for _, slot, _ in plain:
            frame.values[slot] = value
        for position, target in (*((position, target) for position, _, target in plain), *node.controls):
            frame.pending[position] -= 1
            if dead is not None and target.kind not in (_MERGE, _TRIGGER):
                frame.dead.setdefault(position, dead)
            if frame.pending[position] == 0:
                frame.constant_ready.append(target)

    def _arrive(self, node: PlanNode, value: Value, dead: Dead | None, iteration: Iteration) -> None:
        """A value that was parked, or that an Enter brings, in one iteration of its frame."""
        if dead is None:
            self._deliver(node, 0, value, iteration)
            if node.controls:
                self._deliver_controls(node, iteration)
        else:
            self._deliver_death(node, dead, iteration)

    def _exit(self, node: PlanNode, value: Value, iteration: Iteration) -> None:
        frame = iteration.frame
        if node in frame.live_exits:
            raise SchedulingError("an exit got a live value in two iterations of its frame", node, iteration)
        frame.live_exits.add(node)
        outer = frame.parent
        assert outer is not None
        self._deliver(node, 0, value, outer)
        if node.controls:
            self._deliver_controls(node, outer)

    def _advance(self, node: PlanNode, value: Value, iteration: Iteration) -> None:
        """Rule 8 for a live token."""
        following = iteration.next
        if following is None:
            frame = iteration.frame
            working_set = frame.info.working_set
            is_full = frame.live >= frame.info.parallel_iterations or frame.parked
            if is_full or (working_set is not None and not working_set.fits(frame.live + 1)):
                frame.parked.append((node, value))
                return
            following = self._start_iteration(frame, node)
        self._deliver(node, 0, value, following)
        if node.controls:
            self._deliver_controls(node, following)

    # -- iterations and frames -----------------------------------------------------------------------------------

    def _start_iteration(self, frame: Frame, node: PlanNode | None = None) -> Iteration:
        previous = frame.newest
        index = 0 if previous is None else previous.index + 1
        # One more iteration than the body runs: the last one only evaluates the predicate.
        if node is not None and self.max_iterations is not None and index > self.max_iterations:
            assert previous is not None
            raise SchedulingError(TooManyIterations(frame.info.loop, self.max_iterations), node, previous)
        iteration = Iteration(frame, index, previous if previous is not None and frame.live else None)
        if previous is not None:
            previous.next = iteration
        frame.newest = iteration
        if not frame.live and frame.info.working_set is not None:
            self.asks.append(frame.info.working_set)
        frame.live += 1
        for ready in frame.constant_ready:
            self._make_ready(ready, iteration)
        return iteration

    def _settle(self, iteration: Iteration) -> None:
        """Settle an iteration with nothing ready or running: it ends now, or when its children and predecessor do.

        Callers count down themselves: one more call would be a good part of what a small firing costs.
        """
        if iteration.previous is None and not iteration.children:
            self._end_oldest(iteration.frame, iteration)

    def _end_oldest(self, frame: Frame, oldest: Iteration | None = None) -> None:
        """End the oldest iteration, and the following ones, as far as rule 9 allows."""
        if oldest is None:
            oldest = frame.oldest
        while oldest is not None:
            if oldest.outstanding or oldest.children or frame.pending_enters:
                return
            following = oldest.next
            if frame.info.acknowledges:
                self.ended.append((frame.info.acknowledges, oldest.counters()))
            frame.live -= 1
            working_set = frame.info.working_set
            # With no live iteration, none would end and free memory: start one anyway, even if it may fail.
            if frame.parked and (not frame.live or working_set is None or working_set.fits(frame.live + 1)):
                following = self._unpark(frame, oldest)
            if following is None:
                self._end_frame(frame)
                return
            following.previous = None
            # A caller may still hold the ended iteration, which must not keep all later ones alive.
            oldest.next = None
            oldest = following

    def _unpark(self, frame: Frame, ended: Iteration) -> Iteration:
        """Start the iteration that parked tokens wait for; return the iteration after `ended`."""
        parked, frame.parked = frame.parked, []
        started = self._start_iteration(frame, parked[0][0])
        # Keep it open until all of its first tokens have arrived.
        started.outstanding += 1
        for node, value in parked:
            self._arrive(node, value, None, started)
        started.outstanding -= 1
        return started if ended.next is None or ended.next is started else ended.next

    def _end_frame(self, frame: Frame) -> None:
        outer = frame.parent
        frame.newest = None  # an iteration and its frame refer to each other
        if outer is None:
            self.done = True
            return
        del outer.children[frame.info]
        outer.outstanding += 1
        for node in frame.info.exits:
            if node not in frame.live_exits:
                self._deliver_death(node, frame.killer or node.dead, outer)
        outer.outstanding -= 1
        if not outer.outstanding:
            self._settle(outer)
