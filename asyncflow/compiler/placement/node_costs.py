"""The costs of nodes: time as measured in earlier runs or else estimated from shapes, bytes, transfers.

`NodeCosts` gives costs on each device, for placement. The functions below it estimate a firing where it may run, on the
event loop or on a thread of it: they decide which, before anything has been measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from asyncflow.compiler.placement.simulated_execution import NO_HOSTS, Hosts
from asyncflow.compiler.program.extract import EMIT, FEED, FETCH
from asyncflow.compiler.program.kernels.kernels import is_host_spec
from asyncflow.compiler.program.kernels.work import assumed, flops_of, launch_of, makes_what_it_is_told
from asyncflow.devices.figures.host import NO_TIMES, HostTimes
from asyncflow.devices.machine.cost import NS_PER_CALL, NS_PER_FLOP
from asyncflow.devices.protocol import Device
from asyncflow.graph.builtin import CONSTANT, IDENTITY, NO_OP, PARAMETER
from asyncflow.graph.facts import Fact
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values.shapes import Shape, is_static, size_of
from asyncflow.graph.values.spec import Spec
from asyncflow.values import Value

if TYPE_CHECKING:
    from asyncflow.devices.figures.host import Launch

NS_PER_ELEMENT = 1.0
NS_PER_DRAW = 40.0
NS_PER_STRING = 150.0

ASSUMED_ITERATIONS = 10
"""Number of iterations assumed for the cost of a whole loop."""

LARGE_ELEMENTS = 16_384
"""Elements of inputs that may mean work too long for the event loop, where sizes are only known in a run."""

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
        devices: the session's devices.
        measured: mean ns of a firing by node name, used for every device, as the device of the measurement is not
            known.
    """

    def __init__(self, devices: Sequence[Device], measured: Mapping[str, float]) -> None:
        self.devices = devices
        self.measured = measured
        self._transfers: dict[tuple[float, int, int], float] = {}
        launching = [device.asynchronous for device in devices]
        self._hosts = [NO_TIMES if each is None else each.host_times for each in launching]
        drivers = list(dict.fromkeys(each.host_times.driver for each in launching if each is not None))
        self._threads = [None if each is None else drivers.index(each.host_times.driver) for each in launching]
        self._fusing = [device.capabilities.fuses for device in devices]
        self._nothing, self._none = (0.0,) * len(devices), [None] * len(devices)

    def hosts(self, *, is_root: bool) -> Hosts:
        """The threads of the host that launch for the devices, in the root of a program or in a body."""
        threads = {thread for thread in self._threads if thread is not None}
        if not threads:
            return NO_HOSTS
        return Hosts(
            count=len(threads),
            of=self._threads,
            opening=[host.region_ns + is_root * host.run_ns for host in self._hosts],
            sending=[host.send_ns for host in self._hosts],
        )

    def launches(self, node: Node) -> tuple[float, ...]:
        """The ns that launching one firing takes the host for each device; 0 on a device that computes by itself."""
        if node.op in _FREE or node.op.kernel is None or self._threads == self._none:
            return self._nothing
        call = _call_of(node, self.work(node)[0])
        return tuple([_host_ns(host, call, fuses) for host, fuses in zip(self._hosts, self._fusing, strict=True)])

    def times(self, node: Node) -> tuple[float, ...]:
        """The ns of one firing on each device; 0 for what only hands values on."""
        measured = self.measured.get(node.name)
        if measured is not None:
            return (measured,) * len(self.devices)
        if node.op in _FREE or node.op.kernel is None:
            return (0.0,) * len(self.devices)
        work = self.work(node)
        return tuple([device.kernel_ns(*work) for device in self.devices])

    def is_small(self, node: Node) -> bool:
        """Return True if every device is done with the node about as soon as it has begun."""
        flops, nbytes = self.work(node)
        return flops <= _SMALL_FLOPS and nbytes <= SMALL_NBYTES and self.measured.get(node.name, 0.0) <= _SMALL_FLOPS

    def work(self, node: Node) -> tuple[float, float]:
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
        """Return the ns until a value of `nbytes` bytes is on another device."""
        if source == target:
            return 0.0
        key = (nbytes, source, target)
        found = self._transfers.get(key)
        if found is None:
            found = self._transfers[key] = self.devices[source].transfer_ns(nbytes, self.devices[target])
        return found


_HostWork: TypeAlias = "Launch | Literal['step', 'view', 'fused']"


def _call_of(node: Node, flops: float) -> _HostWork:
    """Return the work of the host for one firing where nothing is interpreted."""
    if all(is_host_spec(tensor.spec) for tensor in node.outputs):
        return "step"
    if flops == 0.0:
        return "view"
    made = node.outputs[0]
    if node.op.rows == "elementwise" and any(
        tensor.node.op.rows == "elementwise" and tensor.shape == made.shape for tensor in node.inputs
    ):
        return "fused"  # with the previous node, which is launched
    return launch_of(node)


def _host_ns(host: HostTimes, call: _HostWork, fuses: bool) -> float:
    if call == "step":
        return host.step_ns
    if call == "view":
        return host.view_ns
    if call == "fused":
        return 0.0 if fuses else host.launch_ns["launch"]
    return host.launch_ns[call]


def tensor_nbytes(tensor: Tensor) -> float:
    """The bytes of a tensor's value; see `spec_nbytes`."""
    return spec_nbytes(tensor.spec)


def spec_nbytes(spec: Spec) -> float:
    """The bytes of a value; extents that are not known count as `ASSUMED_EXTENT`."""
    kind = spec.dtype.kind
    if kind == "O":
        return _VARIANT_NBYTES
    return float(math.prod(assumed(spec.shape)) * (_STRING_NBYTES if kind == "T" else spec.dtype.itemsize))


def kernel_ns(node: Node, input_shapes: Sequence[Shape], output_shapes: Sequence[Shape]) -> float:
    """Return the ns of one firing of `node` on values of these shapes; unknown extents count little."""
    flops = flops_of(node, input_shapes, output_shapes)
    if flops is not None:
        return NS_PER_CALL + NS_PER_FLOP * flops
    made = max([size_of(shape) or 0 for shape in output_shapes], default=0)
    if Fact.DRAWS in node.op.facts:  # it may also draw once for each element of an input
        return NS_PER_CALL + NS_PER_DRAW * max(made, *(size_of(shape) or 0 for shape in input_shapes), 0)
    if "T" in [tensor.spec.dtype.kind for tensor in (*node.inputs, *node.outputs)]:
        return NS_PER_CALL + NS_PER_STRING * made
    return NS_PER_CALL + NS_PER_ELEMENT * made


def may_be_long(node: Node, limit_ns: float) -> bool:
    """Return True if one firing may well take longer than `limit_ns`; see `assumed_ns`."""
    return assumed_ns(node) > limit_ns


def assumed_ns(node: Node) -> float:
    """One firing of `node`; extents that are not known count as `ASSUMED_EXTENT`."""
    inputs, outputs = ([assumed(tensor.shape) for tensor in tensors] for tensors in (node.inputs, node.outputs))
    return kernel_ns(node, inputs, outputs)


@dataclass(frozen=True, slots=True)
class RegionEstimate:
    """An estimate of a region's running time.

    Attributes:
        once_ns: every node once, loops as if they ran one iteration.
        longest_ns: its longest kernel.
        is_open: some sizes are only known in a run.
        is_told: some of them by values, so that the sizes of the inputs do not limit them.
    """

    once_ns: float
    longest_ns: float
    is_open: bool
    is_told: bool

    def expects(self, limit_ns: float, inputs: Iterable[Value]) -> bool:
        """Return True if a kernel may take longer than `limit_ns`, given the region's inputs."""
        if self.longest_ns > limit_ns or self.is_told:
            return True
        return self.is_open and sum(getattr(value, "size", 1) for value in inputs) >= LARGE_ELEMENTS


def estimate_region(nodes: Iterable[Node]) -> RegionEstimate:
    """Return the estimate for the nodes of a region, also inside branches and loops."""
    once = longest = 0.0
    is_open = is_told = False
    for node in nodes:
        if node.op.kernel is None:
            continue
        inputs, outputs = [tensor.shape for tensor in node.inputs], [tensor.shape for tensor in node.outputs]
        is_open |= not all(map(is_static, (*inputs, *outputs)))
        is_told |= makes_what_it_is_told(node)
        taken = kernel_ns(node, inputs, outputs)
        once, longest = once + taken, max(longest, taken)
    return RegionEstimate(once, longest, is_open, is_told)
