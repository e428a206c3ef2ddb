"""Lines of ``asyncflow simulate`` about the host: how busy it was, with what, and whether it held up the devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncflow.devices.figures.host import Call, Launches
from asyncflow.devices.sim.machine import SimMachine
from asyncflow.profiler import Summary
from asyncflow.profiler.summary import COPY_STREAMS

BOUND = 0.8
"""A host that is busy for more of the time, and for more than any device, holds up all of them."""

_MOST_SHOWN = 4

_WORTHWHILE = 0.05
"""The share of the host's time that an option has to save to be worth a word."""

_WORDS: Mapping[Call, str] = {
    "run": "runs",
    "node": "interpreted nodes",
    "primitive": "primitives of loops",
    "step": "numbers",
    "view": "views",
    "region": "regions",
    "launch": "launches",
    "product": "products",
    "library": "other functions of CuPy",
    "graph": "CUDA graphs",
    "buffer": "buffers of graphs",
    "copy": "copies",
    "transfer": "copies between devices",
    "event": "events",
    "delivery": "deliveries",
}


@dataclass(frozen=True, slots=True)
class HostShare:
    """Load of the host's threads.

    Attributes:
        busy: of its busiest thread, as a fraction of the time.
        threads: how many threads drove devices.
        calls: what that thread did, and how often.
        busy_ns: how long each took in all.
        saved_by_graphs_ns: how much less of its time CUDA graphs would take, where the program has none.
    """

    busy: float
    threads: int
    calls: Mapping[Call, int]
    busy_ns: Mapping[Call, int]
    saved_by_graphs_ns: int = 0


def host_share(machines: Sequence[SimMachine], wall_ns: int) -> HostShare:
    """The share of `wall_ns` that the host was busy, on machines that were there one after the other."""
    calls: dict[str, Counter[Call]] = {}
    busy_ns: dict[str, Counter[Call]] = {}
    saved_ns: Counter[str] = Counter()
    for machine in machines:
        for driven, thread in machine.threads.items():
            calls.setdefault(driven, Counter()).update(thread.calls)
            busy_ns.setdefault(driven, Counter()).update(thread.busy_ns)
            saved_ns[driven] += thread.saved_by_graphs_ns
    if not busy_ns:
        return HostShare(0.0, 0, {}, {})
    busiest = max(busy_ns, key=lambda driven: busy_ns[driven].total())
    busy = busy_ns[busiest].total() / max(wall_ns, 1)
    return HostShare(busy, len(busy_ns), calls[busiest], busy_ns[busiest], saved_ns[busiest])


def format_host(share: HostShare, summary: Summary, launches: Launches) -> list[str]:
    """Lines for the report: how busy, with what, and what would help where the program is bound by it."""
    total = sum(share.busy_ns.values())
    if not total:
        return []
    parts = sorted(share.busy_ns.items(), key=lambda item: -item[1])[:_MOST_SHOWN]
    spent = ", ".join(f"{ns / total:.0%} {_WORDS[call]} ({share.calls[call]:,})" for call, ns in parts if ns)
    which = "busy" if share.threads == 1 else f"the busiest of {share.threads} threads busy"
    lines = [f"host busy  {min(share.busy, 1):.1%} ({which} with {spent})"]
    lanes = [lane for lane in summary.lanes if lane.stream not in (*COPY_STREAMS, "host")]
    device = max((lane.busy_fraction for lane in lanes), default=0.0)
    if share.busy > BOUND and share.busy > device:
        lines.append(
            f"bound by   the host: no device computes for more than {device:.0%} of the time, and faster ones, or more "
            f"of them, would not help. {_help(share, launches, len({lane.device for lane in lanes}))}"
        )
    elif max(share.busy, device) < 1 - BOUND / 2 and len(lanes) > 1:
        lines.append(
            "waiting    neither the host nor a device is busy for most of the time: more parallel_iterations, or "
            "several runs at once, would fill it"
        )
    return lines


def _help(share: HostShare, launches: Launches, devices: int) -> str:
    """Return advice for a user whose launches take too long, as far as the model gives any."""
    fewer = []
    if launches == "nodes":
        fewer.append("--launches regions")
    if share.saved_by_graphs_ns > _WORTHWHILE * sum(share.busy_ns.values()):
        saved = share.saved_by_graphs_ns / sum(share.busy_ns.values())
        fewer.append(f"CUDA graphs (Session(cuda_graphs=True), --launches graphs), by {saved:.0%} of its time")
    if devices > 1 and share.calls.get("primitive", 0):
        fewer.append("loops that are not cut over devices")
    bigger = "bigger batches, which take no more launches; parallel_iterations would not"
    return f"Fewer launches would: {', '.join(fewer)}, and {bigger}" if fewer else f"What would: {bigger}"
