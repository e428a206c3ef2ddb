"""Cards and links for simulations: their speed, and the source of each figure.

Every rate is *datasheet peak × efficiency*, and both are written down. The efficiencies are rounded to 0.05 and are
what large matrix products, copy kernels and copies commonly reach; they were not fitted to anything. A single number
cannot be right for every shape: that is what measured costs are for.

- Matrix product, float32 without tensor cores: 0.85. The K40 is held back by its register file, and H100 and H200 by
  their power limit: 0.75.
- Memory: 0.85; 0.75 for the first HBM2 (P100) and 0.70 for GDDR5 with error correction, which takes its bits from the
  same bus (K40).
- Links: PCIe 0.80 (headers, and payloads of 256 bytes); NVLink 0.90 (`p2pBandwidthLatencyTest` of the CUDA samples
  shows 18.3 of 20 GB/s on P100 and 47.9 of 50 GB/s on V100 in Dell's comparison of the two); networks 0.90.

Times that no datasheet has are the same for every NVIDIA card: ``kernel_s`` 2 µs, and two below. NVIDIA's "Getting
Started with CUDA Graphs" measures 2.9 µs for a kernel of half a million elements on V100; the smallest are a little
shorter.

Hosts are no cards: the launching thread's time for each activity was fitted to real runs on an H100. The table in
`docs/gpu/README.md` says from which figure each cost is, and compares simulated with measured times
(``python -m benchmarks.gpu_model``).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from asyncflow.devices.figures.host import Host

_GRAPH_NODE_S = 1.5e-6
"""Between two nodes of a CUDA graph: until it is measured, what others report for small kernels."""

_RAMP_S = 8e-6
"""The time that products of cuBLAS take beyond their operations at the full rate. One multiprocessor computes a block
of the result, and small results have fewer blocks than a card has multiprocessors. It is not measured yet.

JAX's training step of an LSTM on the H100, five products a step in 127 µs with all else, allows for 18 µs a product.
"""

_FULL_RAMP_FLOPS = 2.0 * 64 * 64 * 512
"""Operations of such a block; a product of fewer takes less of the ramp."""

_TERA = 1e12
_GIGA = 1e9
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Card:
    """A card: a processor with memory of its own.

    Attributes:
        name: as `parse_machine` reads it.
        flops_per_s: float32 operations of a large matrix product, as achieved.
        bytes_per_s: of its memory, read and written, as achieved.
        memory_bytes: its capacity.
        kernel_s: the shortest time a kernel occupies a stream.
        copy_engines: how many copies run at once; with 1, copies in and out take turns.
        source: where the figures come from.
        ramp_s: time that a product takes beyond its operations, so that small ones have a lower rate.
        graph_node_s: time between two nodes of a CUDA graph, in which the stream is idle.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: int
    kernel_s: float
    copy_engines: int
    source: str = ""
    ramp_s: float = 0.0
    graph_node_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two devices, or a device and its host.

    Attributes:
        name: as `parse_machine` reads it.
        bytes_per_s: in each direction, as achieved by a large copy.
        latency_s: from the start of a copy until its first byte is there.
        source: where the figures come from.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    source: str = ""


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """A machine: cards and the links between them.

    Attributes:
        cards: device i is a ``cards[i]``.
        host_link: from each card to its host.
        peer_link: between any two cards; None if copies between cards go through the host.
        message_s: delay of a control message between the executors of two devices; 0 on one host.
        disk_bytes_per_s: of the host's disk, written or read: an assumption, of a good one on four lanes of PCIe 3.
    """

    cards: tuple[Card, ...]
    host_link: Link
    peer_link: Link | None = None
    message_s: float = 0.0
    disk_bytes_per_s: float = 2e9


def _nvidia(
    name: str, tflops: float, gigabytes_per_s: float, memory_gib: int, efficiency: tuple[float, float], source: str
) -> Card:
    matmul, memory = efficiency
    return Card(
        name=name,
        flops_per_s=tflops * _TERA * matmul,
        bytes_per_s=gigabytes_per_s * _GIGA * memory,
        memory_bytes=memory_gib * _GIB,
        kernel_s=2e-6,
        copy_engines=2,
        source=f"{source}: {tflops} TFLOPS float32 × {matmul:.2f}, {gigabytes_per_s} GB/s × {memory:.2f}",
        ramp_s=_RAMP_S,
        graph_node_s=_GRAPH_NODE_S,
    )


def _link(name: str, gigabytes_per_s: float, efficiency: float, latency_s: float, source: str) -> Link:
    return Link(
        name=name,
        bytes_per_s=gigabytes_per_s * _GIGA * efficiency,
        latency_s=latency_s,
        source=f"{source}: {gigabytes_per_s} GB/s each way × {efficiency:.2f}",
    )


CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        # Base clock (745 MHz), at which the peak is stated.
        _nvidia("k40", 4.29, 288, 12, (0.75, 0.70), "Tesla K40 board specification (BD-06902-001)"),
        _nvidia("p100", 10.6, 732, 16, (0.85, 0.75), "Tesla P100 SXM2 datasheet"),
        _nvidia("v100", 15.7, 900, 16, (0.85, 0.85), "Tesla V100 SXM2 16 GB datasheet"),
        # Without TF32, which is 156: float32 results stay float32.
        _nvidia("a100", 19.5, 2039, 80, (0.85, 0.85), "A100 SXM 80 GB datasheet"),
        _nvidia("h100", 67, 3350, 80, (0.75, 0.85), "H100 SXM 80 GB datasheet"),
        _nvidia("h200", 67, 4800, 141, (0.75, 0.85), "H200 SXM datasheet"),
        # The host processor of the DGX A100. Peak: 64 cores × 2.25 GHz (base) × 32 float32 operations a cycle (two
        # fused multiply-adds of 256 bits). A kernel is a call into NumPy: no driver, and hardly any shortest time.
        Card(
            name="cpu",
            flops_per_s=64 * 2.25e9 * 32 * 0.85,
            bytes_per_s=204.8 * _GIGA * 0.85,
            memory_bytes=512 * _GIB,
            kernel_s=1e-6,
            copy_engines=2,
            source="one socket, AMD EPYC 7742 datasheet: 64 cores at 2.25 GHz = 4.61 TFLOPS float32 × 0.85, "
            "204.8 GB/s × 0.85; half the 1 TB of a DGX A100",
        ),
    )
}
"""Every card that can be simulated, by name."""

LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        # 16 lanes of 8, 16 and 32 GT/s, 128 bits in 130. Latency: a small `cudaMemcpyAsync`, start to end.
        _link("pcie3", 15.75, 0.80, 8e-6, "PCI Express 3.0 x16"),
        _link("pcie4", 31.5, 0.80, 7e-6, "PCI Express 4.0 x16"),
        _link("pcie5", 63.0, 0.80, 6e-6, "PCI Express 5.0 x16"),
        # Between two cards. Before NVSwitch a pair had one link (DGX-1 with P100). Neighbours on the ring through all
        # eight cards had two (DGX-1 with V100). With NVSwitch a pair has all links of a card.
        _link("nvlink1", 20, 0.90, 2e-6, "NVLink 1, one link of a DGX-1 with P100"),
        _link("nvlink2", 50, 0.90, 2e-6, "NVLink 2, two links of 25 GB/s of a DGX-1 with V100"),
        _link("nvlink3", 300, 0.90, 2.5e-6, "NVLink 3 and NVSwitch, twelve links of 25 GB/s of a DGX A100"),
        _link("nvlink4", 450, 0.90, 2.5e-6, "NVLink 4 and NVSwitch, eighteen links of 25 GB/s of a DGX H100"),
        # One device a host. Latency: one way, through the socket layer, or InfiniBand verbs with GPUDirect.
        _link("ethernet10", 1.25, 0.90, 50e-6, "10 Gb/s Ethernet, TCP"),
        _link("ethernet100", 12.5, 0.90, 20e-6, "100 Gb/s Ethernet, TCP"),
        _link("infiniband", 12.5, 0.90, 3e-6, "100 Gb/s InfiniBand EDR"),
    )
}
"""Every link that can be simulated, by name."""

HOSTS: Mapping[str, Host] = {
    host.name: host
    for host in (
        Host(
            name="asyncflow",
            summary="this runtime, one Python thread for all devices",
            # A run kept a processor busy for 160 µs, and took 1 ms besides its kernels: part of it may be waiting.
            run_s=500e-6,
            node_s=7e-6,
            primitive_s=1e-6,
            step_s=0.15e-6,
            view_s=18e-6,
            region_s=75e-6,
            launch_s=27e-6,
            product_s=36e-6,
            library_s=78e-6,
            graph_s=12e-6,
            buffer_s=23e-6,
            copy_s=64e-6,
            event_s=3.2e-6,
            delivery_s=14e-6,
            # For an idle loop; a busy one wakes up after 5 ms, which depends on its other work.
            wake_s=68e-6,
            source="fitted by python -m benchmarks.gpu_model to the runs of 2026-11-22 and 2026-11-28 in docs/gpu, and "
            "to benchmarks.host_costs of 2026-11-22 where these say nothing: Python 3.12, CuPy 14.2, NVIDIA H100 in a "
            "virtual machine on an Intel Xeon; docs/gpu/README.md says which row each cost is from",
        ),
        # No such runtime exists: it models the one of EuroSys '18, as far as the paper describes it. Costs of
        # TensorFlow 1 are from docs/performance_tables.md, where measured.
        Host(
            name="c++",
            summary="a C++ runtime with a thread a device",
            thread_a_device=True,
            launches="nodes",
            run_s=100e-6,
            node_s=1e-6,
            primitive_s=0.2e-6,
            step_s=0.1e-6,
            view_s=0.2e-6,
            region_s=1e-6,
            launch_s=4e-6,
            product_s=4e-6,
            library_s=4e-6,
            graph_s=5e-6,
            buffer_s=1e-6,
            copy_s=5e-6,
            event_s=0.5e-6,
            delivery_s=2e-6,
            source="TensorFlow 1 on a CPU: a run of one node 0.1 ms, a trivial loop of nine nodes 1.3 µs, a node "
            "that is interpreted 1 µs; CUDA's driver: about 3 µs a launch, 0.5 µs an event",
        ),
    )
}
"""Every host that can be simulated, by name; the first is this runtime."""

DEFAULT_HOST = HOSTS["asyncflow"]

_HOST_LINKS = dict.fromkeys(("k40", "p100", "v100"), "pcie3") | dict.fromkeys(("a100", "cpu"), "pcie4")
_NETWORKS = ("ethernet10", "ethernet100", "infiniband")

_MOST_CARDS = 1024
"""Maximum number of cards: a larger number is probably a typing error, and would take minutes."""

_PART = re.compile(r"(?:(\d+)\s*x\s*)?([a-z][a-z0-9]*)", re.IGNORECASE)
_EXAMPLE = "'8 x v100, nvlink2'"


def parse_machine(text: str) -> MachineSpec:
    """Parse cards, with the number of each, and links, separated by commas: ``"2 x v100, 2 x a100, nvlink2, pcie3"``.

    A ``pcie`` link joins the cards to their host; without one it is the slowest link that the cards were made for. An
    ``nvlink`` joins the cards to each other; without one, copies between cards go through the host. A network
    (``ethernet10``, ``ethernet100``, ``infiniband``) puts each card in a host of its own: it joins them, and control
    messages take its latency.

    Raises:
        ValueError: a name that is unknown, a count of 0, no card, over 1024 of them, or two links for one purpose.
    """
    cards: list[Card] = []
    links: dict[str, Link] = {}
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} in {text!r} is neither a card nor a link; write such as {_EXAMPLE}")
        count, name = match[1], match[2].lower()
        if name in CARDS:
            if count is not None and int(count) == 0:
                raise ValueError(f"{part.strip()!r} in {text!r} is no card at all; a count is at least 1")
            total = len(cards) + int(count or 1)
            if total > _MOST_CARDS:
                raise ValueError(f"{text!r} names {total} cards; a machine has at most {_MOST_CARDS}")
            cards += [CARDS[name]] * int(count or 1)
        elif name not in LINKS:
            raise ValueError(f"unknown card or link {match[2]!r} in {text!r}{_suggestion(name)}; {_known()}")
        elif count is not None:
            raise ValueError(f"{part.strip()!r} in {text!r} counts a link; a link joins all cards, so name it once")
        else:
            _add_link(links, LINKS[name], text)
    if not cards:
        raise ValueError(f"{text!r} names no card; write such as {_EXAMPLE}; {_known()}")
    peer = links.get("peer")
    return MachineSpec(
        cards=tuple(cards),
        host_link=links.get("host") or default_host_link(cards),
        peer_link=peer,
        message_s=peer.latency_s if peer is not None and peer.name in _NETWORKS else 0.0,
    )


def format_machine(machine: MachineSpec) -> str:
    """Return the text for which `parse_machine` gives this machine, if it is made of presets: ``"8 x v100,
    nvlink2"``.
    """
    groups = [(card, len(list(group))) for card, group in groupby(machine.cards)]
    parts = [f"{count} x {card.name}" if count > 1 else card.name for card, count in groups]
    if machine.peer_link is not None:
        parts.append(machine.peer_link.name)
    if machine.host_link != default_host_link(machine.cards):
        parts.append(machine.host_link.name)
    return ", ".join(parts)


def host_named(name: str) -> Host:
    """The host of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in HOSTS:
        raise ValueError(f"unknown host {name!r}; hosts are {', '.join(HOSTS)}")
    return HOSTS[name]


def default_host_link(cards: Iterable[Card]) -> Link:
    """The slowest of the host links that the cards were made for; a card of one's own counts as the latest."""
    links = [LINKS[_HOST_LINKS.get(card.name, "pcie5")] for card in cards]
    return min(links, key=lambda link: link.bytes_per_s)


def work_ns(card: Card, flops: float, nbytes: float, itemsize: int = 4) -> int:
    """Return the time for which a kernel needs all of `card`: the larger of arithmetic and memory time.

    Items of 8 bytes halve the arithmetic rate, as on cards for data centres; narrower ones do not raise it.
    """
    flops_per_s = card.flops_per_s / 2 if itemsize >= 8 else card.flops_per_s
    return round(max(flops / flops_per_s, nbytes / card.bytes_per_s) * _GIGA)


def kernel_ns(card: Card, flops: float, nbytes: float, itemsize: int = 4) -> int:
    """Return the time for which a kernel occupies a stream of `card`: its work, or the shortest possible time.

    A kernel that is bound by arithmetic is a product: it also takes the card's ``ramp_s``, in which others may run.
    """
    taken_ns = work_ns(card, flops, nbytes, itemsize)
    # Elementwise operations and sums of any size are bound by memory: only products come here.
    if card.ramp_s and flops * card.bytes_per_s >= nbytes * card.flops_per_s:
        taken_ns += round(card.ramp_s * _GIGA * min(1.0, flops / _FULL_RAMP_FLOPS))
    return max(round(card.kernel_s * _GIGA), taken_ns)


def _add_link(links: dict[str, Link], link: Link, text: str) -> None:
    purpose = "host" if link.name.startswith("pcie") else "peer"
    if purpose in links:
        joins = "the cards to their host" if purpose == "host" else "the cards to each other"
        raise ValueError(f"{links[purpose].name} and {link.name} in {text!r} both join {joins}; name one")
    links[purpose] = link


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, [*CARDS, *LINKS], n=2)
    return f", did you mean {' or '.join(map(repr, close))}?" if close else ""


def _known() -> str:
    return f"cards are {', '.join(CARDS)}; links are {', '.join(LINKS)}"
