"""Golden runs: the first node whose value differs between two runs of a program (white paper section 6).

The first run is the *golden* one: a log of it keeps a copy of each value that a node gives, inside loops and branches
too. The second run is compared value by value. Runs are interpreted for it, node by node.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from asyncflow.compiler.plan import PlanNode
from asyncflow.devices.protocol import Device
from asyncflow.devices.values import DeviceValue
from asyncflow.errors import GraphError, SourceLocation, brief, counted
from asyncflow.graph.building.feeds import Feeds
from asyncflow.graph.resource import resources_of
from asyncflow.ops.arrays.datatypes import finfo
from asyncflow.ops.promotion import kind_of
from asyncflow.runtime.session.session import Session
from asyncflow.runtime.watch.picks import PickLog, Tagged
from asyncflow.runtime.watch.trace import Trace
from asyncflow.values import Array, Nest, Value

_SHOWN: Final = 6
"""Elements of a value that a report shows."""
_COUNTED: Final = re.compile(r"[a-z]+_\d+")


@dataclass(frozen=True, slots=True)
class _Occurrence:
    """A firing of a node: its name, the path of frames and iterations, and the number of such firings before it."""

    node: str
    tag: str
    number: int

    def __str__(self) -> str:
        iteration = f", in iteration {self.tag}" if self.tag else ""
        return f"{self.node}{iteration}{f', firing {self.number + 1}' if self.number else ''}"


class ValueLog(PickLog):
    """A log of the values that nodes give, in the order in which the nodes ended.

    Attributes:
        values: copies of the outputs of each firing; None for an output that is no array, such as a store.
        locations: lines of the user's code that built the nodes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[_Occurrence, list[Array | None]] = {}
        self.locations: dict[str, SourceLocation | None] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._unnamed: dict[str, str] = {}

    def taken(self, partition: int, node: PlanNode, iteration: Tagged) -> None:
        """Note nothing: the order of values is the order in which nodes end."""

    def calls(self, partition: int, node: PlanNode, iteration: Tagged) -> None:
        """Return no log: functions are called as in any run."""

    def ended(
        self, partition: int, node: PlanNode, iteration: Tagged, result: Value, device: Device, *, at_once: bool
    ) -> None:
        """Keep a copy of the result; see `PickLog.ended`."""
        name, tag = self._name_of(node), iteration.tag()
        firing = _Occurrence(name, tag, self._counts[name, tag])
        self._counts[name, tag] += 1
        self.locations[name] = node.source.location
        outputs = [*result] if isinstance(result, tuple) else [result]
        kept = self.values[firing] = [_copied(each) for each in outputs]
        for place, each in enumerate(outputs):
            if isinstance(each, DeviceValue) and device.asynchronous is not None:
                self._copies += 1
                device.asynchronous.read_value(each, partial(self._came, kept, place))

    def _name_of(self, node: PlanNode) -> str:
        """Return the node's name, in which variables without a name count from 1 as they come.

        Their own names count through the process, so the same program has other names when it runs again.
        """
        for each in resources_of(node.source):
            if each.name == f"{each.noun}_{each.serial}":
                self._unnamed.setdefault(each.name, f"{each.noun}_{len(self._unnamed) + 1}")
        return _COUNTED.sub(lambda found: self._unnamed.get(found[0], found[0]), node.name)

    def _came(self, kept: list[Array | None], place: int, value: Value, error: BaseException | None) -> None:
        kept[place] = _copied(value)  # None after an error, such as the loss of the card
        self._ended_copy()


@contextmanager
def logged() -> Iterator[ValueLog]:
    """Log the values of all runs that start inside the block."""
    trace = Trace(capacity=0, detail="node")
    trace.order = log = ValueLog()
    with trace:
        yield log


async def compare_sessions(
    first: Session, second: Session, fetches: Nest, feeds: Feeds | None = None, *, tolerance: float | None = None
) -> str | None:
    """Run the same in two sessions, and describe the first node whose values differ; None if none differs.

    The sessions may have other devices, options or variables. Random numbers are equal if the sessions have one seed.

    Args:
        first: its run is the golden run.
        second: its values are compared with the golden values.
        fetches: as of `Session.run`.
        feeds: as of `Session.run`.
        tolerance: largest difference that is allowed, as a share of the largest magnitude in the value; None for the
            square root of the dtype's rounding (0.0003 for float32). Integers have to be equal.

    Raises:
        GraphError: `tolerance` is below 0.
    """
    logs = []
    for session in (first, second):
        trace = Trace(capacity=0, detail="node")
        trace.order = log = ValueLog()
        await session.run(fetches, feeds, trace=trace)
        await log.copied()
        logs.append(log)
    return difference(*logs, tolerance=tolerance)


def difference(golden: ValueLog, other: ValueLog, *, tolerance: float | None = None) -> str | None:
    """Describe the first value of `golden` that `other` has and that differs; None if none differs."""
    if tolerance is not None and not tolerance >= 0:
        raise GraphError(f"tolerance is a number, at least 0; got {brief(tolerance)}")
    equal = missing = 0
    for firing, values in golden.values.items():
        if firing not in other.values:
            missing += 1
            continue
        for place, (x, y) in enumerate(zip(values, other.values[firing], strict=False)):
            if x is None or y is None:
                continue
            why = _why_different(x, y, tolerance)
            if why is not None:
                lines = [f"first difference: {firing}{f', output {place}' if place else ''}: {why}"]
                for log, value in ((golden, x), (other, y)):
                    shown = np.array2string(value.ravel()[:_SHOWN], precision=8, separator=", ")
                    more = ", ..." if value.size > _SHOWN else ""
                    built = log.locations[firing.node]
                    lines.append(f"  {value.dtype}{list(value.shape)} {shown[:-1]}{more}]  built at {built}")
                told = f"; {missing} firings of the first run are not in the second" if missing else ""
                lines.append(f"  {counted(equal, 'value')} before are equal{told}")
                return "\n".join(lines)
            equal += 1
    return None


def _copied(value: Value) -> Array | None:
    return np.array(value) if isinstance(value, np.ndarray | np.generic) else None


def _why_different(x: Array, y: Array, tolerance: float | None) -> str | None:
    if x.dtype != y.dtype or x.shape != y.shape:
        return "another dtype or shape"
    if kind_of(x.dtype) not in "fc":
        count = int(np.sum(x != y))
        return f"{count} of {x.size} elements differ" if count else None
    wide = [each.astype(np.complex128 if kind_of(x.dtype) == "c" else np.float64) for each in (x, y)]
    share = float(finfo(x.dtype).eps) ** 0.5 if tolerance is None else tolerance
    is_finite = np.isfinite(wide[0]) & np.isfinite(wide[1])
    # Infinities and NaN have to be in the same places.
    strange = ~is_finite & ~((wide[0] == wide[1]) | (np.isnan(wide[0]) & np.isnan(wide[1])))
    if strange.any():
        return f"{int(strange.sum())} of {x.size} elements are not finite in one of them"
    found, given = (each[is_finite] for each in wide)
    apart, largest = np.max(np.abs(found - given), initial=0.0), np.max(np.abs(found), initial=0.0)
    if apart <= share * largest:
        return None
    return f"by {apart:.3g} at most, of values up to {largest:.3g} (tolerance {share:.2g} of these)"
