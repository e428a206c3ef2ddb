"""The colours of a timeline page: one for each family of firings, as long as there are colours."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable

from asyncflow.runtime.watch.trace import WHOLE, Firing

PALETTE = (
    *("#e49571", "#8fdb6e", "#10c7fd", "#c66ab8", "#ad9f0b", "#07efde", "#9e8ffe"),
    *("#a67967", "#4d931e", "#069391", "#f991ca", "#f4be20", "#01c2a0", "#1a88e1"),
)
"""Told apart on white and on black, under dark text, and with a red-green deficiency. No reds: red means failed."""
CONTROL_FLOW_COLOUR = "#9aa5b5"
OTHERS_COLOUR = "#d3d8df"
CONTROL_FLOW = "control flow"
_PRIMITIVES = frozenset({"switch", "merge", "enter", "exit", "nextiteration", "loopcond"})


def family(node: str, op: str) -> str:
    """Return the key of a firing's colour: its op or, for nodes run as a whole, their name."""
    if op.lower() in _PRIMITIVES:
        return CONTROL_FLOW
    return node if op in WHOLE else op


def family_colours(firings: Iterable[Firing]) -> dict[str, str]:
    """Return a colour for each family, longest first.

    The families that take most of the time get a colour each, and the rest share one. The search begins at a place
    that depends on the name, so that an op mostly has the same colour on two pages.
    """
    times = Counter[str]()
    for firing in firings:
        times[family(firing.node, firing.op)] += firing.ended_ns - firing.started_ns
    colours, free = dict[str, str](), list(PALETTE)
    for name in sorted(times, key=lambda name: (-times[name], name)):
        if name == CONTROL_FLOW:
            colours[name] = CONTROL_FLOW_COLOUR
        elif free:
            wanted = zlib.crc32(name.encode("utf-8", "surrogatepass")) % len(PALETTE)
            turned = (*PALETTE[wanted:], *PALETTE[:wanted])
            colours[name] = next(colour for colour in turned if colour in free)
            free.remove(colours[name])
        else:
            colours[name] = OTHERS_COLOUR
    return colours
