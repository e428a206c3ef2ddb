"""What nodes cost on each device: time as measured in earlier runs or else estimated from shapes, bytes, transfers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from asyncflow.compiler.program.estimate import assumed, flops_of
from asyncflow.compiler.program.extract import EMIT, FEED, FETCH
from asyncflow.graph.builtin import CONSTANT, IDENTITY, NO_OP, PARAMETER
from asyncflow.graph.graph import STRUCTURED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncflow.devices.protocol import Device
    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.graph.shapes import Shape
    from asyncflow.graph.spec import Spec

_FREE = frozenset({CONSTANT, IDENTITY, NO_OP, PARAMETER, FEED, FETCH, EMIT})

_STRING_NBYTES = 16

_VARIANT_NBYTES = 1024 * 1024
"""TensorArrays and the like hold many values: moving one is worth avoiding."""

SMALL_NBYTES = 64 * 1024
"""The memory of a value of fewer bytes does not count."""

_SMALL_FLOPS = 20_000


class NodeCosts:
    """Costs on each of some devices, in the order of the devices.

    Args:
        devices: those of the session.
        measured: mean ns of a firing by node name; taken for every device, as where it was measured is not known.
    """

    def __init__(self, devices: Sequence[Device], measured: Mapping[str, float]) -> None:
        self.devices = devices
        self.measured = measured
        self._transfers: dict[tuple[float, int, int], float] = {}

    def times(self, node: Node) -> tuple[float, ...]:
        """The ns of one firing on each device; 0 for what only hands values on."""
        measured = self.measured.get(node.name)
        if measured is not None:
            return (measured,) * len(self.devices)
        if node.op in _FREE or node.op.kernel is None or node.op.name in STRUCTURED:
            return (0.0,) * len(self.devices)
        work = self._work(node)
        return tuple([device.kernel_ns(*work) for device in self.devices])

    def is_small(self, node: Node) -> bool:
        """Whether every device is done with it about as soon as it has begun."""
        flops, nbytes = self._work(node)
        return flops <= _SMALL_FLOPS and nbytes <= SMALL_NBYTES and self.measured.get(node.name, 0.0) <= _SMALL_FLOPS

    def _work(self, node: Node) -> tuple[float, float]:
        """Arithmetic operations and bytes read and written."""
        made = sum(map(tensor_nbytes, node.outputs))
        inputs, outputs = ([assumed(tensor.shape) for tensor in tensors] for tensors in (node.inputs, node.outputs))
        flops = flops_of(node, inputs, outputs)
        if flops == 0.0:
            return 0.0, 0.0  # another view of the same memory
        if flops is None:
            flops = float(max(map(math.prod, outputs), default=0))
        return flops, made + sum(map(tensor_nbytes, node.inputs))

    def transfer(self, nbytes: float, source: int, target: int) -> float:
        """The ns until a value of so many bytes is on another device."""
        if source == target:
            return 0.0
        key = (nbytes, source, target)
        found = self._transfers.get(key)
        if found is None:
            found = self._transfers[key] = self.devices[source].transfer_ns(nbytes, self.devices[target])
        return found


def tensor_nbytes(tensor: Tensor) -> float:
    """The bytes of a tensor's value; see `spec_nbytes`."""
    return spec_nbytes(tensor.spec)


def spec_nbytes(spec: Spec) -> float:
    """The bytes of a value; extents that are not known count as `ASSUMED_EXTENT`."""
    kind = spec.dtype.kind
    if kind == "O":
        return _VARIANT_NBYTES
    return float(_elements(spec.shape) * (_STRING_NBYTES if kind == "T" else spec.dtype.itemsize))


def _elements(shape: Shape) -> int:
    return math.prod(assumed(shape))
