"""Lowers control flow written by hand: finds the places of its nodes, so that `places` can cut it over devices.

The primitives stay as they are. Added are the parts that structured loops and branches have as well (`lower`). Each
device that has to receive a value of a frame gets a control loop that goes on by the frame's predicate. Nodes live on
one side of a predicate only get a Switch of that predicate. Constant Enters stand wherever their values are used.
"""

from __future__ import annotations

from asyncflow.compiler.lowering.places import NEWS, Device, EnclosingLoop, FlatBuilder, Place
from asyncflow.compiler.program.loops.frames import is_everywhere
from asyncflow.compiler.program.loops.hand_written import HandFrame, HandWritten, Live, Side
from asyncflow.control.primitives.enter import ENTER
from asyncflow.control.primitives.exit import EXIT
from asyncflow.control.primitives.loop_cond import LOOP_COND
from asyncflow.control.primitives.switch import SWITCH
from asyncflow.graph.frames import FramePath, output_frame
from asyncflow.graph.ir import Node, Tensor


class PlacesByHand:
    """The places of the nodes of one graph, or of one body, that stands at `around`.

    `place_of` a node before it is put, `tell` where its outputs are afterwards, and `close` when all are put.
    """

    def __init__(self, emitter: FlatBuilder, found: HandWritten, around: Place) -> None:
        self.emitter = emitter
        self.found = found
        self.unknown = Place()
        self._places: dict[Live, Place] = {Live(()): around}
        self._opened: list[tuple[HandFrame, Device]] = []
        self._marked: dict[HandFrame, Tensor] = {}
        self._switches: dict[Side, Node] = {}
        for frame in found.frames.values():
            if frame.trouble is None:
                emitter.drivers.update(frame.loop_conds)

    def place_of(self, node: Node) -> Place:
        """Return the place for a node."""
        return self.place(self.found.runs[node])

    def before(self, node: Node) -> list[Node]:
        """Return the nodes that a node must also wait for, so that it is live only where its loop is."""
        if node.op is not ENTER or not self.found.is_early(node):
            return []
        frame = self.found.frames[output_frame(node, self.found.frame_of[node])]
        return [self.emitter.pivot(self.place(frame.around), node.device)]

    def tell(self, node: Node) -> None:
        """Says where the outputs of a node, which has been put, are live."""
        if node.op is SWITCH:
            for output, side in zip(node.outputs, self.found.sides[node], strict=True):
                self._switches.setdefault(side, node)
                self.emitter.value_places[output] = self.place(self.found.live_of(output))
        elif node.op in (ENTER, EXIT):
            self.emitter.places[node] = self.place(self.found.live[node])

    def capture(self, enter: Node) -> bool:
        """Make a constant Enter one on each device that uses it, if it is only that."""
        live = self.found.live[enter]
        if not enter.attrs["constant"] or live is None or enter.control_inputs or enter in self.emitter.awaited:
            return False
        (entered,) = enter.outputs
        (value,) = self.emitter.values(enter.inputs)
        self.emitter.captures[entered] = value, self._loop(self.found.frames[live.frame], enter)
        self.emitter.value_places[entered] = self.place(live)
        return True

    def close(self) -> None:
        """Make every device of a loop begin its iterations, and close the control loops."""
        used: dict[FramePath, set[Device]] = {}
        for node, path in self.found.frame_of.items():
            if not is_everywhere(node):
                used.setdefault(path, set()).add(node.device)
        for path, frame in self.found.frames.items():
            devices = used.get(path, set())
            if frame.driver is not None and frame.trouble is None and len(devices) > 1:
                for device in sorted(devices - {again.device for again in frame.following}, key=str):
                    self.emitter.gate(self.place(Live(path)), device)
        while self._opened:
            frame, device = self._opened.pop()
            assert frame.driver is not None
            in_body = self.place(Live(frame.path, frozenset({frame.driver})))
            merged = self.place(Live(frame.path)).gates[device]
            self.emitter.put_back_edge(frame.enters[0], merged, self.emitter.gate(in_body, device), in_body)

    def place(self, live: Live | None) -> Place:
        """Return the place for nodes that are live so."""
        if live is None:
            return self.unknown
        if live not in self._places:
            made = self._places[live] = Place()
            self.emitter.opened.append(made)
            made.open = lambda device: self._open_side(live, device) if live.sides else self._open_frame(live, device)
        return self._places[live]

    # -- gates -----------------------------------------------------------------------------------------------------

    def _open_frame(self, live: Live, device: Device) -> Tensor:
        emitter, frame = self.emitter, self.found.frames[live.frame]
        loop = self._loop(frame, frame.enters[0])
        if frame.driver is not None:
            self._opened.append((frame, device))
            return emitter.put_merge(loop, "control", emitter.always(), NEWS, self.place(live), device)
        attrs = loop.enter_attrs(constant=False)
        start = [emitter.always()]
        (entered,) = emitter.put(frame.enters[0], "control_enter", ENTER, start, loop.around, device=device, **attrs)
        emitter.places[entered.node] = self.place(live)
        return entered

    def _open_side(self, live: Live, device: Device) -> Tensor:
        """One side of a Switch of the predicate that is known last, where all others are as they have to be."""
        side = self.found.latest(live.sides)
        outer = Live(live.frame, live.sides - {side})
        pred, is_opposite = self._predicate(live.frame, side[0])
        known = self.found.live_of(side[0])
        assert known is not None
        data = pred if outer.sides <= known.sides else self.emitter.gate(self.place(outer), device)
        like = self._switches.get(side, side[0].node)
        sides = self.emitter.put_switch(like, data, pred, self.place(outer), device, stands_for=like.name)
        for holds in (False, True):
            place = self.place(Live(live.frame, outer.sides | {(side[0], holds)}))
            self.emitter.value_places[sides[holds ^ is_opposite]] = place
        return sides[side[1] ^ is_opposite]

    def _predicate(self, path: FramePath, pred: Tensor) -> tuple[Tensor, bool]:
        """Return a predicate readable in Python, and True if it is inverted: a loop's comes from its LoopCond."""
        emitter = self.emitter
        frame = self.found.frames.get(path)
        if frame is None or frame.driver is None or frame.driver[0] is not pred:
            (value,) = emitter.values([pred])
            place = self.place(self.found.live_of(pred))
            return emitter.host_value(value, pred.node, place, use="predicate"), False
        if frame.loop_conds:
            (marked,) = frame.loop_conds[0].outputs
            return marked, frame.is_opposite
        if frame not in self._marked:
            place, device = self.place(Live(path)), pred.node.device
            (value,) = emitter.values([pred])
            value = emitter.host_value(value, pred.node, place, use="loop")
            (self._marked[frame],) = emitter.put(pred.node, "loop_cond", LOOP_COND, [value], place, device=device)
            emitter.drivers.add(self._marked[frame].node)
        return self._marked[frame], False

    def _loop(self, frame: HandFrame, enter: Node) -> EnclosingLoop:
        window = enter.attrs["parallel_iterations"]
        return EnclosingLoop(enter, self.place(frame.around), [], frame.path[-1], window, self.found.is_early(enter))
