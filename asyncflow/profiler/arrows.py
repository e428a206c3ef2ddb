"""Arrows of a timeline: the firings that each transfer leads from and to.

A transfer is recorded where its Recv took the value, in the host's time. On a simulated device the host is far ahead of
the streams, so an arrow between those moments would miss the kernel and the copy. An arrow therefore goes from the
firing that made the value to the copy of the value. Where one of the two is no firing (a primitive such as LoopCond, a
value on the host), the arrow ends at the host's moment.

A late copy of a saved value delayed its reader: an arrow goes from the copy to the firing that ran next.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from asyncflow.profiler.lanes import TimelineLane
from asyncflow.runtime.watch.trace import LATE_COPY, Firing, Trace, Transfer

_RECV = re.compile(r"/recv(_\d+)?$")

ARRIVALS = ("h2d", "peer")
"""Streams of copies that arrive at their device."""

_Key: TypeAlias = tuple[int, str, str, str]
_Place: TypeAlias = tuple[int, int]


class End(NamedTuple):
    """A start or end point of an arrow."""

    device: str
    time_ns: int
    lane: int | None
    """Index of the firing's lane; None without a firing."""
    position: int | None
    """Index of the firing in the lane; `time_ns` lies within it."""


class Arrow(NamedTuple):
    """A transfer or wait, as a timeline draws it; never points back in time."""

    transfer: Transfer
    tensor: str
    """The node whose output was sent; for a control edge, the node that ran."""
    start: End
    end: End
    is_stall: bool = False
    """The end had to wait for a saved value that came back late."""


def find_arrows(trace: Trace, lanes: Sequence[TimelineLane]) -> list[Arrow]:
    """Return an arrow for each transfer, in the order recorded, and for each late copy; `lanes` are the trace's
    lanes.
    """
    made = {_produced(transfer) for transfer in trace.transfers}
    brought = {_arrival(transfer) for transfer in trace.transfers}
    makers: dict[_Key, _Place] = {}
    bringers: dict[_Key, _Place] = {}
    for key, place, firing in _long_firings(lanes) if trace.transfers else ():
        if key in made and (key not in makers or firing.ended_ns > _at(lanes, makers[key]).ended_ns):
            makers[key] = place
        if (
            key in brought
            and lanes[place[0]].stream in ARRIVALS
            and (key not in bringers or firing.started_ns < _at(lanes, bringers[key]).started_ns)
        ):
            bringers[key] = place
    arrows = [
        _arrow(transfer, lanes, makers.get(_produced(transfer)), bringers.get(_arrival(transfer)))
        for transfer in trace.transfers
    ]
    return arrows + list(_stalls(lanes))


def _stalls(lanes: Sequence[TimelineLane]) -> Iterable[Arrow]:
    """Yield an arrow from each late copy to the firing of a compute stream that ran at the copy's end, or next."""
    late = [(k, i) for k, lane in enumerate(lanes) for i, firing in enumerate(lane.firings) if firing.op == LATE_COPY]
    for place in late:
        copy, device = _at(lanes, place), lanes[place[0]].device
        ends = []
        for number, lane in enumerate(lanes):
            index = bisect_right(lane.firings, copy.ended_ns - 1, key=lambda firing: firing.ended_ns)
            if lane.device == device and lane.stream.startswith("compute") and index < len(lane.firings):
                ends.append((max(lane.firings[index].started_ns, copy.ended_ns), number, index))
        if ends:
            time_ns, number, index = min(ends)
            waiting = lanes[number].firings[index].node
            transfer = Transfer(copy.run, waiting, copy.tag, device, device, copy.ended_ns, time_ns, copy.nbytes)
            start = End(device, copy.ended_ns - 1, *place)
            yield Arrow(transfer, copy.node, start, End(device, time_ns, number, index), is_stall=True)


def sent_tensor(transfer: Transfer) -> str:
    """The node whose output a transfer brings, which its Recv is named after."""
    return _RECV.sub("", transfer.node)


def _produced(transfer: Transfer) -> _Key:
    return transfer.run, sent_tensor(transfer), transfer.tag, transfer.source


def _arrival(transfer: Transfer) -> _Key:
    return transfer.run, transfer.node, transfer.tag, transfer.target


def _long_firings(lanes: Iterable[TimelineLane]) -> Iterable[tuple[_Key, _Place, Firing]]:
    """The firings that an arrow can be tied to: an instant has no inside."""
    for number, lane in enumerate(lanes):
        for index, firing in enumerate(lane.firings):
            if firing.ended_ns > firing.started_ns:
                yield (firing.run, firing.node, firing.tag, firing.device), (number, index), firing


def _at(lanes: Sequence[TimelineLane], place: _Place) -> Firing:
    lane, index = place
    return lanes[lane].firings[index]


def _arrow(transfer: Transfer, lanes: Sequence[TimelineLane], maker: _Place | None, bringer: _Place | None) -> Arrow:
    sent_ns, received_ns = transfer.sent_ns, max(transfer.sent_ns, transfer.received_ns)
    if bringer is not None:
        received_ns = _at(lanes, bringer).started_ns
    if maker is not None and _at(lanes, maker).started_ns > received_ns:
        # The host passed on the value before the stream computed it.
        maker = None
    if maker is not None:
        made = _at(lanes, maker)
        sent_ns = made.ended_ns - 1
    return Arrow(
        transfer=transfer,
        tensor=sent_tensor(transfer),
        start=_end(transfer.source, min(sent_ns, received_ns), maker),
        end=_end(transfer.target, received_ns, bringer),
    )


def _end(device: str, time_ns: int, place: _Place | None) -> End:
    lane, position = (None, None) if place is None else place
    return End(device, time_ns, lane, position)
